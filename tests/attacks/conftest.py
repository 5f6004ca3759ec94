from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import quietmax as qm
from quietmax.attacks import ShadowPool
from quietmax.data import Records, Split, split
from quietmax.models import CrossEntropy, Model, TrainingSettings, train
from tests.attacks.reference_attacks import Experiment, location_experiment


@pytest.fixture(scope="session")
def memorised() -> Split:
    """Records with random labels: a network can only memorise them."""
    generator = np.random.default_rng(7)
    features = generator.choice([-1.0, 1.0], size=(420, 40)).astype(np.float32)
    labels = generator.integers(0, 3, 420)
    return split(Records("random-labels", features, labels, classes=3), size=100, seed=1)


@pytest.fixture(scope="session")
def overfitted(memorised: Split) -> Model:
    settings = TrainingSettings(
        hidden=(24,), loss=CrossEntropy(), learning_rate=0.01, epochs=40, batch_size=50
    )
    return train(memorised, settings=settings)


@pytest.fixture(scope="session")
def untrained(memorised: Split) -> Model:
    """A network of the same kind that was trained on no record: nothing to leak."""
    settings = TrainingSettings(hidden=(24,), loss=CrossEntropy(), epochs=0)
    return train(memorised, settings=settings)


@pytest.fixture(scope="session")
def disjoint_pool(memorised: Split, overfitted: Model) -> ShadowPool:
    return ShadowPool.train("disjoint", memorised, overfitted.settings, 8, seed=3)


@pytest.fixture(scope="session")
def overlapping_pool(memorised: Split, overfitted: Model) -> ShadowPool:
    return ShadowPool.train("overlapping", memorised, overfitted.settings, 12, seed=3)


@pytest.fixture(scope="session")
def location(real_data: Path) -> Experiment:
    return location_experiment(qm.load("location", data_dir=real_data))

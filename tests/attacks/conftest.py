from __future__ import annotations

import numpy as np
import pytest

from quietmax.attacks import ShadowPool
from quietmax.data import Records, Split, split
from quietmax.models import CrossEntropy, Model, TrainingSettings, train


@pytest.fixture(scope="session")
def memorised() -> Split:
    """Records whose labels are coin tosses: a network can only learn them by heart."""
    generator = np.random.default_rng(7)
    features = generator.choice([-1.0, 1.0], size=(420, 40)).astype(np.float32)
    labels = generator.integers(0, 3, 420)
    return split(Records("tosses", features, labels, classes=3), size=100, seed=1)


@pytest.fixture(scope="session")
def overfitted(memorised: Split) -> Model:
    settings = TrainingSettings(
        hidden=(24,), loss=CrossEntropy(), learning_rate=0.01, epochs=40, batch_size=50
    )
    return train(memorised, settings=settings)


@pytest.fixture(scope="session")
def outside_pool(memorised: Split, overfitted: Model) -> ShadowPool:
    return ShadowPool.outside(memorised, overfitted.settings, 8, seed=3)


@pytest.fixture(scope="session")
def around_pool(memorised: Split, overfitted: Model) -> ShadowPool:
    return ShadowPool.around(memorised, overfitted.settings, 12, seed=3)


@pytest.fixture(scope="session")
def untrained(memorised: Split) -> Model:
    """A network of the same kind that has seen no record: nothing to leak."""
    settings = TrainingSettings(hidden=(24,), loss=CrossEntropy(), epochs=0)
    return train(memorised, settings=settings)

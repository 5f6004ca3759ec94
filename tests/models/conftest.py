"""Records and a small network for the tests of models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quietmax.data import Records, split
from quietmax.models import Model, TrainingSettings, train

FAST = TrainingSettings(hidden=(8,), epochs=3, batch_size=20)


@pytest.fixture(autouse=True)
def in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def records() -> Records:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 300)
    features = 2 * np.eye(3)[labels] @ generator.normal(size=(3, 6)) + generator.normal(size=(300, 6))
    return Records("made up", features.astype(np.float32), labels, 3)


@pytest.fixture
def model(records: Records) -> Model:
    return train(split(records, size=100, seed=1), settings=FAST)

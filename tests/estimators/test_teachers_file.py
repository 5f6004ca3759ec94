from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from quietmax.account import BudgetExhausted
from quietmax.errors import DataUnavailable, InvalidInput
from quietmax.estimators import Teachers, open_private, save_private
from quietmax.models import CrossEntropy, TrainingSettings
from quietmax.models.features import UnitNorm

LINEAR = TrainingSettings(hidden=(), loss=CrossEntropy(), learning_rate=0.05, epochs=20, batch_size=8)


def _fitted(**changes) -> tuple[Teachers, np.ndarray]:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 120)
    features = (3 * (2 * labels[:, None] - 1) + generator.normal(size=(120, 4))).astype(np.float32)
    options = {
        "epsilon": 200.0,
        "queries": 5,
        "teachers": 4,
        "network": LINEAR,
        "declared_size": 120,
        "classes": ["no", "yes"],
    }
    return Teachers(**(options | changes)).fit(features, np.array(["no", "yes"])[labels]), features


@pytest.mark.parametrize(
    "changes", [{}, {"features": UnitNorm(constant=1.0)}, {"release": "probabilities"}], ids=str
)
def test_saved_teachers_answer_as_before_and_keep_their_account(tmp_path, changes):
    teachers, features = _fitted(**changes)
    folder = save_private(teachers, tmp_path / "model", dataset="made up")
    opened = open_private(folder)
    assert opened.classes == ("no", "yes")
    assert opened.guarantee == teachers.guarantee_
    assert (np.array(opened.classes)[opened.predict(features[:3])] == teachers.predict(features[:3])).all()
    assert opened.remaining == 2
    again = open_private(folder)
    assert again.remaining == 2
    with pytest.raises(BudgetExhausted):
        again.predict(features[10:13])
    if changes.get("release") == "probabilities":
        np.testing.assert_allclose(again.predict_proba(features[20:21]).sum(1), 1.0)


def test_the_key_is_not_stored(tmp_path):
    teachers, _ = _fitted()
    folder = save_private(teachers, tmp_path / "model", dataset="made up")
    assert "key" not in json.loads((folder / "model.json").read_text())


def test_what_cannot_be_saved_is_refused(tmp_path):
    modules, _ = _fitted(network=lambda width, classes: torch.nn.Linear(width, classes))
    with pytest.raises(InvalidInput, match="built-in network"):
        save_private(modules, tmp_path / "model", dataset="made up")

    class Mine:
        def transform(self, records):
            return records

    with pytest.raises(InvalidInput, match="feature map"):
        save_private(_fitted(features=Mine())[0], tmp_path / "model", dataset="made up")


def test_damaged_teachers_give_one_sentence(tmp_path):
    folder = save_private(_fitted()[0], tmp_path / "model", dataset="made up")
    path = folder / "model.json"
    whole = json.loads(path.read_text())
    for broken in (
        {"queries": 0},
        {"method": "best"},
        {"classes": None},
        {"widths": None},
        {"widths": []},
        {"widths": [5, 2]},
    ):
        path.write_text(json.dumps(whole | broken))
        with pytest.raises(DataUnavailable, match="damaged"):
            open_private(folder).predict(np.zeros((1, 4), np.float32))

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from quietmax.account import BudgetExhausted
from quietmax.accounting import Budget
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
    before = teachers.predict(features[:1])
    folder = save_private(teachers, tmp_path / "model", dataset="made up")
    opened = open_private(folder)
    assert opened.classes == ("no", "yes")
    assert opened.guarantee == teachers.guarantee_
    assert (np.array(opened.classes)[opened.predict(features[:2])][:1] == before).all()
    assert opened.remaining == 2
    again = open_private(folder)
    assert again.remaining == 2
    with pytest.raises(BudgetExhausted):
        again.predict(features[10:13])
    if changes.get("release") == "probabilities":
        np.testing.assert_allclose(again.predict_proba(features[20:21]).sum(1), 1.0)


def test_a_budget_lives_in_one_place(tmp_path):
    """In memory until it is saved, then in the folder, with what was spent of it."""
    teachers, features = _fitted()
    teachers.predict(features[:2])
    with pytest.raises(InvalidInput, match="exists already"):
        save_private(teachers, tmp_path, dataset="made up")
    assert teachers.remaining.queries == 3, "what could not be saved goes on in memory"
    folder = save_private(teachers, tmp_path / "model", dataset="made up")
    assert open_private(folder).remaining == teachers.remaining.queries == 3
    open_private(folder).predict(features[2:4])
    assert teachers.remaining.queries == 1
    teachers.predict(features[4:5])
    for asked in (teachers, open_private(folder)):
        with pytest.raises(BudgetExhausted):
            asked.predict(features[5:6])
    with pytest.raises(InvalidInput, match="lives there alone"):
        save_private(teachers, tmp_path / "second", dataset="made up")
    assert not (tmp_path / "second").exists()


def test_a_folder_in_which_something_was_spent_is_not_overwritten(tmp_path):
    teachers, features = _fitted()
    folder = save_private(teachers, tmp_path / "model", dataset="made up")
    save_private(_fitted()[0], folder, dataset="made up", overwrite=True)
    open_private(folder).predict(features[:2])
    with pytest.raises(InvalidInput, match="counts 2 answers paid for"):
        save_private(_fitted()[0], folder, dataset="made up", overwrite=True)
    assert open_private(folder).remaining == 3


def test_settings_changed_after_training_change_nothing_that_is_saved(tmp_path):
    teachers, _ = _fitted(features=UnitNorm(constant=1.0))
    teachers.set_params(epsilon=900.0, delta=0.1, queries=9000, features=None, release="probabilities")
    opened = open_private(save_private(teachers, tmp_path / "model", dataset="made up"))
    assert opened.answerer.budget == Budget(200.0, 1e-5, 5)
    assert opened.features == UnitNorm(constant=1.0)
    assert opened.answerer.guarantee.cost == teachers.guarantee_.cost


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

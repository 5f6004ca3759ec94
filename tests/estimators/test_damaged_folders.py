"""Folders whose description was changed by hand: one sentence when they are opened, before anything is paid for."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from quietmax.data import Encoding, NumericColumn
from quietmax.errors import DataUnavailable
from quietmax.estimators import DPSGD, PrivateHead, Teachers, open_private, save_private
from quietmax.models.features import UnitNorm

GENERATOR = np.random.default_rng(0)
LABELS = GENERATOR.integers(0, 2, 60)
FEATURES = np.abs(GENERATOR.normal(size=(60, 2)) + LABELS[:, None]).astype(np.float32)
ENCODING = Encoding((NumericColumn("a", 0, 4),), "y", ("no", "yes"))
ESTIMATORS = {
    "head": PrivateHead(declared_size=60, classes=(0, 1), features=UnitNorm(1.0)),
    "head asked": PrivateHead(
        declared_size=60, classes=(0, 1), route="output", release="query", queries=5, features=UnitNorm(1.0)
    ),
    "teachers": Teachers(
        declared_size=60, classes=(0, 1), queries=5, teachers=3, features=UnitNorm(1.0)
    ),
    "dpsgd": DPSGD(declared_size=60, classes=(0, 1), features=UnitNorm(1.0), steps=2, random_state=0),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder for each kind of private model."""
    place = tmp_path_factory.mktemp("models")
    return {
        kind: save_private(
            estimator.fit(FEATURES, LABELS), place / kind, dataset="made up", encoding=ENCODING
        )
        for kind, estimator in ESTIMATORS.items()
    }


def _changed(folder, target, **changes):
    shutil.copytree(folder, target, dirs_exist_ok=True)
    path = target / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return target


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_a_folder_as_it_was_written_is_opened(saved, kind):
    assert open_private(saved[kind]).inputs == 2


@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize(
    "changes",
    [
        {"features": None},
        {"inputs": 3},
        {"inputs": 0},
        {"inputs": 1e308},
        {"inputs": 10**12},
        {"classes": ["no"]},
        {"classes": ["no", "yes", "perhaps"]},
        {"encoding": json.loads(Encoding((NumericColumn("a", 0, 4),), "y", ("a", "b", "c")).to_json())},
        {"guarantee": -1},
        {"guarantee": [None]},
    ],
    ids=str,
)
def test_parts_that_do_not_fit_together_are_refused_in_a_sentence(saved, kind, changes, tmp_path):
    with pytest.raises(DataUnavailable, match="is damaged") as refusal:
        open_private(_changed(saved[kind], tmp_path / "bad", **changes))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "silent",
    [None, -1, "x", [], {}, 1e308, True, [None], [False] * 2, [0, 0, 0], ["", "", ""], [[False]] * 3],
    ids=str,
)
def test_teachers_that_do_not_say_who_is_silent_are_refused_in_a_sentence(saved, silent, tmp_path):
    with pytest.raises(DataUnavailable, match="is damaged"):
        open_private(_changed(saved["teachers"], tmp_path / "bad", silent=silent))

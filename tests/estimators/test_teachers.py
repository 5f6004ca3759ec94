"""Teachers: one record changes one teacher and nothing else, so the votes move as little as certified (THEORY 3.4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quietmax.accounting import Budget
from quietmax.errors import BudgetExhausted, InvalidInput
from quietmax.estimators import open_private, save_private
from quietmax.estimators import training_set as conditions
from quietmax.estimators.teachers import (
    TeacherEnsemble,
    Teachers,
    _default_teachers,
    _vote_noise,
    shard_of,
)
from quietmax.mechanisms import NoisyMax
from quietmax.models import CrossEntropy, TrainingSettings
from quietmax.models.features import UnitNorm
from quietmax.models.stacked import train_independent
from quietmax.predictor import Predictor
from tests.estimators.made import blobs

VOTE_BOUNDS = TeacherEnsemble([], np.zeros(0, bool), 3, soft=False).bounds
FAST = TrainingSettings(hidden=(8,), loss=CrossEntropy(), learning_rate=0.02, epochs=15, batch_size=16)
LINEAR = TrainingSettings(hidden=(), loss=CrossEntropy(), learning_rate=0.05, epochs=5, batch_size=8)


def _blobs(count: int = 400, seed: int = 0) -> Any:
    return blobs(count, seed=seed)


def _teachers(**changes) -> Teachers:
    options = {
        "epsilon": 8.0,
        "queries": 50,
        "teachers": 7,
        "network": FAST,
        "declared_size": 400,
        "classes": range(3),
    }
    return Teachers(**(options | changes))


def test_teachers_answer_well_with_a_generous_budget() -> None:
    features, labels = _blobs()
    others, truth = _blobs(50, seed=1)
    fitted = _teachers(epsilon=500.0).fit(features, labels)
    assert (fitted.predict(others) == truth).mean() > 0.9
    assert fitted.guarantee_.status == "proven"
    assert fitted.remaining.queries == 0
    with pytest.raises(BudgetExhausted, match="1 answer requested, 0 of 50 left"):
        fitted.predict(_blobs(1, seed=5)[0])
    np.testing.assert_array_equal(fitted.predict(others), fitted.predict(others))  # stored answers stay free


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), kind=st.sampled_from(["ordinary", "mislabelled", "extreme", "duplicate"]))
def test_removing_a_record_changes_one_teacher_and_the_votes_by_at_most_the_bound(
    seed: int, kind: str
) -> None:
    """Bit for bit: all other teachers keep exactly the same weights."""
    generator = np.random.default_rng(seed)
    features, labels = _blobs(60, seed=seed % 50)
    victim = int(generator.integers(60))
    if kind == "mislabelled":
        labels[victim] = (labels[victim] + 1) % 3
    elif kind == "extreme":
        features[victim] = 1e30 * generator.choice([-1, 1], 5)
    elif kind == "duplicate":
        features[victim], labels[victim] = features[victim - 1], labels[victim - 1]
    kept = np.arange(60) != victim
    make = lambda: _teachers(teachers=5, network=LINEAR, random_state=3, declared_size=60)  # noqa: E731
    with_it, without = make().fit(features, labels), make().fit(features[kept], labels[kept])
    one, other = (each.ensemble_.teachers.weight_vectors() for each in (with_it, without))
    different = [k for k in range(5) if not torch.equal(torch.nan_to_num(one[k]), torch.nan_to_num(other[k]))]
    assert len(different) <= 1
    queries = np.vstack([_blobs(40, seed=7)[0], features[[victim]]])
    moved = with_it.ensemble_.scores(queries) - without.ensemble_.scores(queries)
    assert np.abs(moved).max() <= VOTE_BOUNDS.one.value + 1e-9
    assert np.linalg.norm(moved, axis=1).max() <= VOTE_BOUNDS.vector.value + 1e-9
    assert (moved.max(1) - moved.min(1)).max() <= VOTE_BOUNDS.spread + 1e-9


def test_only_teachers_of_a_fit_or_of_a_folder_have_proven_bounds(tmp_path) -> None:
    features, labels = _blobs(60)
    fitted = _teachers(network=LINEAR, declared_size=60).fit(features, labels)
    opened: Any = open_private(save_private(fitted, tmp_path / "model", dataset="made up"))
    everything = [np.arange(60)] * 20
    same = train_independent(features, labels, 3, everything, settings=LINEAR, seeds=list(range(20)), steps=5)
    silent = np.zeros(20, dtype=bool)

    def status(ensemble: TeacherEnsemble) -> str:
        return Predictor(ensemble, NoisyMax("permute-and-flip"), Budget(1.0, queries=1)).guarantee.status

    assert [fitted.guarantee_.status, opened.guarantee.status, status(fitted.ensemble_)] == ["proven"] * 3
    for made in (
        TeacherEnsemble(same, silent, 3, False),
        replace(fitted.ensemble_, teachers=same, silent=silent),
    ):
        assert status(made) == "conditional"
    with pytest.raises(TypeError, match="_fitted"):
        TeacherEnsemble(same, silent, 3, False, _fitted=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("soft", [False, True])
def test_the_vote_bound_is_reached(soft: bool) -> None:
    """One record can turn a teacher around completely: the bound is tight."""
    features = np.zeros((1, 2), np.float32)
    strong = torch.nn.Linear(2, 2)
    with torch.no_grad():
        strong.weight.zero_()
        strong.bias.copy_(torch.tensor([50.0, -50.0]))
    turned = torch.nn.Linear(2, 2)
    with torch.no_grad():
        turned.weight.zero_()
        turned.bias.copy_(torch.tensor([-50.0, 50.0]))
    votes = [
        TeacherEnsemble([strong, module], np.array([False, False]), 2, soft).scores(features)[0]
        for module in (strong, turned)
    ]
    moved = votes[0] - votes[1]
    assert np.linalg.norm(moved) >= 0.9 * VOTE_BOUNDS.vector.value
    assert np.abs(moved).max() >= 0.9 * VOTE_BOUNDS.one.value


def test_a_records_shard_depends_on_nothing_but_its_name_and_the_key() -> None:
    names = [b"%d" % number for number in range(1000)]
    shards = shard_of(names, 10, b"secret")
    np.testing.assert_array_equal(shards[::-1], shard_of(names[::-1], 10, b"secret"))
    np.testing.assert_array_equal(shards[5:], shard_of(names[5:], 10, b"secret"))
    assert (shards != shard_of(names, 10, b"other")).mean() > 0.8
    assert np.bincount(shards, minlength=10).min() > 60


def test_teachers_of_persons_say_so_in_guarantee_bounds_and_size() -> None:
    features, labels = _blobs(60)
    people = np.repeat(np.arange(20), 3)
    fitted = _teachers(teachers=3, network=LINEAR, declared_size=None).fit(features, labels, groups=people)
    assert fitted.guarantee_.parameters["declared_size"] == 20
    assert "number of persons" in " ".join(fitted.guarantee_.assumptions)
    assert fitted.ensemble_.bounds.unit == fitted.predictor_.guarantee.unit == "person"
    assert "One person changes" in fitted.ensemble_.bounds.one.because


def test_a_teacher_without_records_votes_evenly() -> None:
    features, labels = _blobs(12)
    fitted = _teachers(teachers=30, network=LINEAR, random_state=0).fit(features, labels).ensemble_
    assert fitted.silent.sum() >= 18
    assert fitted.scores(features).sum(1) == pytest.approx(np.full(12, 30.0))


def test_a_broken_teacher_votes_evenly_and_breaks_no_other() -> None:
    features, labels = _blobs(40)
    features[0] = np.float32(3e38)
    fitted = _teachers(
        teachers=3,
        network=TrainingSettings(hidden=(), loss=CrossEntropy(), learning_rate=1e30, epochs=3),
        random_state=0,
    )
    votes = fitted.fit(features, labels).ensemble_.scores(features)
    assert np.isfinite(votes).all()
    assert votes.sum(1) == pytest.approx(np.full(40, 3.0))


def test_any_torch_module_can_be_a_teacher() -> None:
    features, labels = _blobs(120)

    def build(width, classes):
        return torch.nn.Sequential(torch.nn.Linear(width, 6), torch.nn.ReLU(), torch.nn.Linear(6, classes))

    fitted = _teachers(epsilon=500.0, teachers=3, network=build, random_state=0).fit(features, labels)
    assert (fitted.predict(features[:40]) == labels[:40]).mean() > 0.7
    broken = _teachers(teachers=3, network=lambda width, classes: torch.nn.Linear(width + 1, classes)).fit(
        features, labels
    )
    assert broken.ensemble_.silent.all()
    assert broken.ensemble_.scores(features[:2]) == pytest.approx(np.ones((2, 3)))


def test_probabilities_are_released_with_gaussian_noise() -> None:
    features, labels = _blobs()
    fitted = _teachers(release="probabilities", epsilon=500.0).fit(features, labels)
    probabilities = fitted.predict_proba(features[:10])
    np.testing.assert_allclose(probabilities.sum(1), 1.0)
    assert fitted.guarantee_.parameters["mechanism"] == "gaussian"
    assert not hasattr(_teachers().fit(features, labels), "predict_proba")


def test_the_smaller_noise_is_chosen_from_public_numbers() -> None:
    few, many = Budget(1.0, 1e-5, queries=1), Budget(1.0, 1e-5, queries=100)
    assert _vote_noise(few)[0] < _vote_noise(few)[1]
    assert _vote_noise(many)[0] > _vote_noise(many)[1]
    features, labels = _blobs(60)
    methods = [
        _teachers(epsilon=1.0, queries=queries, network=LINEAR)
        .fit(features, labels)
        .guarantee_.parameters["method"]
        for queries in (1, 100)
    ]
    assert methods == ["permute-and-flip", "gaussian"]
    assert _default_teachers(many, 10_000) == 422
    assert _default_teachers(many, 1200) == 60


def test_networks_of_the_users_own_make_the_guarantee_conditional() -> None:
    features, labels = _blobs(60)
    own = (
        _teachers(network=lambda width, classes: torch.nn.Linear(width, classes))
        .fit(features, labels)
        .guarantee_
    )
    assert own.status == "conditional"
    assert set(conditions.OWN_MODULES.assumptions) <= set(own.assumptions)
    assert conditions.OWN_MODULES.because in own.because
    ours = _teachers(network=LINEAR, features=UnitNorm()).fit(features, labels).guarantee_
    assert (ours.status, ours.assumptions) == (
        "proven",
        (conditions.SETTINGS_PUBLIC, conditions.LIBRARY_STACK),
    )


def test_teachers_that_share_weights_are_refused() -> None:
    features, labels = _blobs(60)
    shared = torch.nn.Linear(5, 3)
    frozen = torch.nn.Linear(5, 5).requires_grad_(False)
    for build in (lambda *_: shared, lambda *_: torch.nn.Sequential(torch.nn.Linear(5, 5), shared)):
        with pytest.raises(InvalidInput, match="must return a new module each time"):
            _teachers(network=build).fit(features, labels)
    _teachers(network=lambda *_: torch.nn.Sequential(frozen, torch.nn.Linear(5, 3))).fit(features, labels)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"release": "votes"}, "release"),
        ({"method": "best"}, "method"),
        ({"method": "gaussian", "delta": 0.0}, "requires a delta"),
        ({"teachers": 0}, "teachers"),
        ({"teachers": 2.5}, "teachers must be an integer"),
        ({"teachers": 2**20 + 1}, "teachers must be an integer from 1 to 1,048,576"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidInput, match=match):
        _teachers(network=LINEAR, **changes).fit(*_blobs(30))

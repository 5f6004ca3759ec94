"""Attacks on the user's own table: a holdout instead of a pool, and persons with several rows."""

from __future__ import annotations

import numpy as np
import pytest

from quietmax.attacks import RMIA, Attack, LiRA, Shadow, ShadowPool, Threshold
from quietmax.attacks.base import run_together
from quietmax.attacks.shadow_models import Units, _folds, _leftover_rows, candidate_rows, with_shadow_data
from quietmax.data import Records, Split, hold_out
from quietmax.errors import InvalidInput
from quietmax.models import CrossEntropy, Model, TrainingSettings, train

MEMORISING = TrainingSettings(hidden=(24,), loss=CrossEntropy(), learning_rate=0.01, epochs=40, batch_size=50)
QUICK = TrainingSettings(hidden=(4,), loss=CrossEntropy(), epochs=1)


def visits(persons: int, seed: int, first: str = "p") -> Records:
    """Persons with 1 to 3 rows and random labels; the rows of a person do not lie together."""
    generator = np.random.default_rng(seed)
    names = np.repeat([f"{first}{number}" for number in range(persons)], np.arange(persons) % 3 + 1)
    generator.shuffle(names)
    features = generator.choice([-1.0, 1.0], size=(len(names), 40)).astype(np.float32)
    labels = generator.integers(0, 2, len(names))
    return Records("visits", features, labels, classes=2, persons=names.astype(object))


@pytest.fixture(scope="module")
def table() -> Split:
    return hold_out(visits(150, seed=0), 0.25, seed=1)


@pytest.fixture(scope="module")
def memorising(table: Split) -> Model:
    return train(table, settings=MEMORISING)


def test_values_of_persons_are_means_over_their_rows() -> None:
    persons = np.array(["b", "a", "b", "c", "a", "b"], dtype=object)
    records = Records("visits", np.zeros((6, 1)), np.zeros(6, int), classes=2, persons=persons)
    units = Units._of(records, np.array([5, 1, 0, 4]))  # b a b a
    assert len(units) == 2
    values = np.array([[1.0, 10.0, 2.0, 20.0], [0.0, 1.0, np.nan, 1.0]])
    np.testing.assert_array_equal(units.means(values), [[1.5, 15.0], [np.nan, 1.0]])
    np.testing.assert_array_equal(units.all(np.array([True, True, False, True])), [False, True])
    assert units._rows_of(np.array([1])).tolist() == [1, 3]
    assert units._rows_of(np.array([1, 0])).tolist() == [1, 3, 0, 2]
    assert units._rows_of(np.array([], dtype=int)).tolist() == []
    assert len(Units._of(records, np.array([], dtype=int))) == 0


def test_overlapping_sets_leave_out_whole_persons_fold_by_fold(table: Split) -> None:
    assert _folds(table) == 5
    pool = ShadowPool.train("overlapping", table, QUICK, 10, seed=2)
    persons = table.records.units
    for inside in pool.inside:
        assert set(persons[inside]).isdisjoint(persons[~inside])
    assert (pool.inside.sum(0) == 8).all()  # of 10 networks, each record is left out by 2
    assert {len(set(persons[inside])) for inside in pool.inside} == {120}
    assert "1 in 5 of its persons" in pool.notes[0]


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2), (0.2, 5), (0.04, 10)])
def test_a_network_leaves_out_about_as_many_as_were_held_out(share: float, expected: int) -> None:
    assert _folds(hold_out(visits(1000, seed=3), share, seed=0)) == expected


@pytest.mark.parametrize(
    "attack",
    [Shadow(models=8), Threshold(models=8), LiRA(models=16), RMIA(models=16), RMIA(16, mode="offline")],
)
def test_persons_are_told_apart_by_the_mean_of_their_rows(
    table: Split, memorising: Model, attack: Attack
) -> None:
    """A network that memorises random labels: 120 members and 30 non-members, told apart nearly always."""
    report = attack.run(memorising, table)
    assert report.unit == report.to_json()["unit"] == "person"
    assert report.members == len(set(table.train.persons))  # type: ignore[arg-type]
    assert report.nonmembers == len(set(table.test.persons))  # type: ignore[arg-type]
    assert report.queries >= len(table.records)
    assert report.auc.value > 0.9
    assert report.advantage.low > 0.3
    assert report.settings["pool"] == "overlapping"
    assert report.title.endswith("(persons)")
    # As many members as non-members are learned from; else the attack networks would call nearly everybody a member.
    if isinstance(attack, Shadow):
        assert report.leakage.value > 0.7
        assert report.fpr.value < 0.2


def test_a_network_that_learned_nothing_leaks_nothing(table: Split) -> None:
    untrained = train(table, settings=TrainingSettings(hidden=(24,), loss=CrossEntropy(), epochs=0))
    for report in run_together([Threshold(models=8), LiRA(models=8), Shadow(models=8)], untrained, table):
        assert report.auc.low < 0.5 < report.auc.high


def test_without_a_holdout_an_attack_says_what_it_needs() -> None:
    everybody = hold_out(visits(30, seed=4))
    model = train(everybody, settings=QUICK)
    with pytest.raises(
        InvalidInput, match=r"train with `holdout` \(0.2 holds out a fifth\), or give `shadow_data`"
    ):
        Threshold(models=2).run(model, everybody)


def test_other_people_are_the_pool_and_without_a_holdout_the_nonmembers_too(table: Split) -> None:
    others = visits(80, seed=5, first="q")
    more = with_shadow_data(table, others)
    np.testing.assert_array_equal(candidate_rows(more), candidate_rows(table))
    assert more.pool.persons is not None
    assert set(more.pool.persons) == set(others.persons)  # type: ignore[arg-type]
    pool = ShadowPool.train("disjoint", more, QUICK, 3)
    persons = more.records.units
    for inside, drawn in zip(pool.inside, pool.drawn, strict=True):
        assert set(persons[inside]).isdisjoint(persons[drawn & ~inside])
        assert len(set(persons[inside])) == 40
        assert not drawn[candidate_rows(more)].any()
    assert "Only 80 persons are available" in pool.notes[0]
    everybody = with_shadow_data(hold_out(table.records), others)
    assert len(everybody.train) == len(table.records)
    assert everybody.test.persons is not None
    assert everybody.pool.persons is not None
    assert set(everybody.test.persons).isdisjoint(everybody.pool.persons)
    assert 20 < len(set(everybody.test.persons)) < 60  # 80 fair coins; 4.5 standard deviations on either side


def test_other_people_must_be_others_and_encoded_alike(table: Split) -> None:
    with pytest.raises(InvalidInput, match="must hold other people"):
        with_shadow_data(table, visits(10, seed=6))
    others = visits(10, seed=6, first="q")
    plain = Records("plain", others.features, others.labels, classes=2)
    with pytest.raises(InvalidInput, match="must be encoded like 'visits'"):
        with_shadow_data(table, plain)


def test_population_records_are_whole_persons(table: Split) -> None:
    more = with_shadow_data(table, visits(80, seed=5, first="q"))
    chosen = _leftover_rows(more, 30, 0)
    persons = more.records.units
    assert 30 <= len(chosen) <= 32
    assert set(persons[chosen]).isdisjoint(np.delete(persons, chosen))


def test_too_few_networks_to_leave_out_everybody_are_an_error(table: Split, memorising: Model) -> None:
    with pytest.raises(InvalidInput, match="at least 10 are recommended"):
        LiRA(models=3).run(memorising, table)

"""What a record contributes to a noisy sum, and which teacher it trains, depends on that record alone (THEORY 3.8)."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone

from quietmax import DPSGD, PrivateHead, Teachers
from quietmax.audit import audit_invariant
from quietmax.data.schema import Schema
from quietmax.estimators.blocks import Table
from quietmax.estimators.dpsgd.gradients import exact_clipped_sum
from quietmax.estimators.head.estimator import _centred, _clipped_features, _with_cells
from quietmax.estimators.head.exact_sums import (
    BITS,
    GRID,
    _row_sum,
    gradient_sum,
)
from quietmax.estimators.head.tables import Basis, _Residuals, cell_scores, with_lengths
from quietmax.estimators.head.weights import _Excess, even_shares
from quietmax.estimators.teachers import LINEAR, NETWORK, TeacherEnsemble
from quietmax.estimators.training_set import (
    LIBRARY_ROUNDING,
    LIBRARY_STACK,
    Persons,
    _checked_records,
    _class_numbers,
)
from quietmax.models import MLP, TrainingSettings
from quietmax.models.features import FeatureMap, RandomFourier, Scattering, UnitNorm
from quietmax.models.features.tabular import table_cells
from quietmax.models.stacked import initial_mlp, train_independent
from quietmax.sensitivity import certified
from tests.estimators.whole_set import training_set

SMALL_IMAGES = Scattering((1, 7, 7))
THREADS = pytest.mark.parametrize("threads", [1, 2])


def digits(rows: int, columns: int = 49, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((rows, columns), np.float32)


def centred(rows: np.ndarray, centre: np.ndarray) -> np.ndarray:
    return _centred(centre, Table(rows.copy(), np.zeros(len(rows), np.int64), 2)).rows


def sum_of(rows: np.ndarray) -> np.ndarray:
    """The sum of rows that have no labels."""
    return _row_sum(Table(rows, np.zeros(len(rows), np.int64), 2))


def moving_records(feature_map: FeatureMap, direction: np.ndarray, blocks: int) -> np.ndarray:
    """Records chosen so that features that depend on the place in a batch move along `direction` if all move up by one.

    For every place of a batch of 64 this takes, out of 192 records, the one whose clipped features change most.
    """
    pool = digits(192, seed=9)
    features = np.stack(
        [
            np.roll(_clipped_features(feature_map, np.roll(pool, shift, axis=0), 1.0), -shift, axis=0)[:, :-1]
            for shift in range(64)
        ]
    )
    chosen = []
    for place in range(64):
        # record i stands at place (i + shift) % 64
        here = features[(place - np.arange(192)) % 64, np.arange(192)].astype(np.float64)
        below = features[(place - 1 - np.arange(192)) % 64, np.arange(192)].astype(np.float64)
        chosen.append(int(((here - below) @ direction).argmax()))
    return np.tile(pool[chosen], (blocks, 1))


@pytest.fixture(scope="module")
def adversarial() -> np.ndarray:
    """A record in front of 5,120 others, which stand where its removal moves their features most."""
    first = digits(1, seed=4)
    direction = _clipped_features(SMALL_IMAGES, first, 1.0)[0, :-1].astype(np.float64)
    others = moving_records(SMALL_IMAGES, direction, blocks=80)
    return np.concatenate([first, np.roll(others, -1, axis=0)])


def test_removing_a_record_moves_the_centring_sum_by_its_own_row_and_no_more(adversarial: np.ndarray) -> None:
    rows = _clipped_features(SMALL_IMAGES, adversarial, 1.0)
    others = _clipped_features(SMALL_IMAGES, adversarial[1:], 1.0)
    moved = sum_of(rows) - sum_of(others)
    assert np.linalg.norm(moved) <= 1.0
    np.testing.assert_array_equal(moved, rows[0].astype(np.float64))


def test_removing_a_record_moves_the_gradient_sum_within_its_bound(adversarial: np.ndarray) -> None:
    classes, clip = 3, 0.2
    rows = _clipped_features(SMALL_IMAGES, adversarial, 1.0)
    others = _clipped_features(SMALL_IMAGES, adversarial[1:], 1.0)
    centre = np.zeros(rows.shape[1] - 1)
    weights = np.zeros((classes, rows.shape[1]))

    def total(part: np.ndarray) -> np.ndarray:
        table = Table(centred(part, centre), np.zeros(len(part), np.int64), classes)
        return gradient_sum(table, weights, clip)

    moved = np.linalg.norm(total(rows) - total(others))
    assert moved <= certified.head_gradient(clip, coordinates=weights.size, grid=GRID).value


@pytest.mark.parametrize("estimator", [PrivateHead(), Teachers(), DPSGD()], ids=["head", "teachers", "dpsgd"])
def test_one_label_of_another_type_moves_the_gradient_sum_within_its_bound(
    estimator: PrivateHead | Teachers | DPSGD,
) -> None:
    """2**53 and 2**53 + 1 are the same float: a common type of all labels would change other people's classes."""
    classes, clip = (2**53, 2**53 + 1, 1), 0.2
    records = np.array([[0.0, 1.0], [1.0, 0.0]] * 200 + [[1.0, 1.0]])
    labels = [2**53, 2**53 + 1] * 200 + [1.0]

    def total(size: int) -> np.ndarray:
        table, given = _checked_records(estimator, records[:size], labels[:size])
        numbers = _class_numbers(given, classes)[1]
        rows = centred(_clipped_features(UnitNorm(0.4), table, 1.0), np.zeros(3))
        return gradient_sum(Table(rows, numbers, 3), np.zeros((3, 4)), clip)

    moved = np.linalg.norm(total(401) - total(400))
    assert 0.0 < moved <= certified.head_gradient(clip, coordinates=12, grid=GRID).value


@pytest.mark.parametrize("features", [SMALL_IMAGES, RandomFourier(count=30), UnitNorm(0.4)])
@THREADS
def test_the_rows_of_a_head_depend_on_their_own_records_alone(features: FeatureMap, threads: int) -> None:
    torch.set_num_threads(threads)
    records = digits(150)
    records[3], records[4] = 0.0, 2.0**100
    centre = np.trunc(np.full(features.dimension(49), 0.01) * 2**BITS) / 2**BITS

    def rows(chosen: np.ndarray) -> np.ndarray:
        return centred(_clipped_features(features, records[chosen], 0.7), centre)

    everyone = rows(np.arange(150))
    for chosen in (np.arange(1, 150), np.arange(150)[::-1], np.repeat(np.arange(9), 20), np.array([4])):
        np.testing.assert_array_equal(rows(chosen), everyone[chosen])
    lengths = np.sqrt(np.square(everyone.astype(np.float64)).sum(axis=1))
    assert lengths.max() <= 1.0


@pytest.mark.parametrize(
    ("activation", "removed"),
    [*((name, (0, 5, 511, 512, 699)) for name in ("tanh", "sigmoid", "relu")), ("tanh", (0, 50, 85, 1000))],
    ids=["tanh", "sigmoid", "relu", "persons"],
)
@THREADS
def test_a_dpsgd_sum_changes_by_exactly_what_a_removed_record_or_person_adds_alone(
    activation: str, removed: tuple[int, ...], threads: int
) -> None:
    torch.set_num_threads(threads)
    by_person = 1000 in removed
    network = initial_mlp((30, 17, 5, 3), activation, (2,), torch.float64)
    inputs = torch.from_numpy(digits(700, 30))
    inputs[5] *= 2.0**100
    labels = torch.arange(700) % 3
    names = np.arange(700)
    if by_person:
        names = np.where(names < 600, names // 7, 1000)
    weights = torch.from_numpy(1 / Persons.of(names).rows) if by_person else None

    def total(chosen: np.ndarray) -> list[torch.Tensor]:
        shares = None if weights is None else weights[chosen]
        return list(exact_clipped_sum(network, inputs[chosen], labels[chosen], 0.8, shares).tensors())

    everyone = total(np.random.default_rng(0).permutation(700))
    for each in removed:
        others, alone = total(np.flatnonzero(names != each)), total(np.flatnonzero(names == each))
        assert all(torch.equal(a, b + c) for a, b, c in zip(everyone, others, alone, strict=True))
        assert 0 < sum(float(part.square().sum()) for part in alone) <= 0.8**2


STRANGERS = {
    "a name of another type": {"who": "x7", "age": 5, "town": "a"},
    "a name with a fraction": {"who": 2.5, "age": 5, "town": "a"},
    "a huge number": {"who": 2**70, "age": 5, "town": "a"},
    "a missing value": {"who": 77, "age": None, "town": None},
    "a number as a string": {"who": 77, "age": "5", "town": "a"},
    "an unknown category": {"who": 77, "age": 1e300, "town": "elsewhere"},
}


PEOPLE = Schema(
    label="ill",
    classes=("0", "1"),
    bounds={"age": (0, 60)},
    categories={"town": ("a", "b")},
    person="who",
)


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_in_a_frame_changes_nothing_about_anybody_else(stranger: dict[str, object]) -> None:
    """Names, shares, encoded rows and labels keep every bit, although pandas may give whole columns another type."""
    rows: list[dict[str, object]] = [
        {"who": row // 3, "age": row % 50, "town": "ab"[row % 2], "ill": row % 2} for row in range(60)
    ]

    def found(people: list[dict[str, object]]) -> Any:
        return training_set(PrivateHead(schema=PEOPLE), pd.DataFrame(people), None, None)

    plain, disturbed = found(rows), found([{**stranger, "ill": 1}] * 2 + rows[::-1])
    for before, after in (
        (plain.records, disturbed.records),
        (plain.labels, disturbed.labels),
        (plain.names, disturbed.names),
        (plain.persons.rows, disturbed.persons.rows),
    ):
        np.testing.assert_array_equal(after[2:][::-1], before)
    assert disturbed.persons.count == plain.persons.count + 1


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
@THREADS
def test_a_stranger_moves_the_integer_sums_over_cells_by_what_their_rows_add_alone(
    stranger: dict[str, object], threads: int
) -> None:
    """Clipped residuals and excess confidence, from a frame to the sums that get noise."""
    torch.set_num_threads(threads)
    schema = replace(PEOPLE, crosses=(("age", "town"),))
    rows: list[dict[str, object]] = [
        {"who": row // 30, "age": row % 50, "town": "ab"[row % 2], "ill": row % 2} for row in range(600)
    ]
    strangers = [{**stranger, "ill": 1}] * 2

    def sums(people: list[dict[str, object]]) -> list[np.ndarray]:
        data = training_set(PrivateHead(schema=schema), pd.DataFrame(people), None, None)
        cells = table_cells(data.encoding, 16)
        assert cells is not None
        basis = Basis.of(cells, even_shares(cells.sizes), 0.01, 50.0)
        weights = np.random.default_rng(0).normal(size=(1, basis.features))
        scores = basis.scores(weights)
        repeats = data.persons.rows.astype(np.int64)
        table = with_lengths(
            basis, cells.sizes, _with_cells(cells, Table(data.records, data.labels, 2, repeats))
        )
        work = _Excess(partial(cell_scores, np.concatenate([-scores, scores]), cells.sizes), 0.7, 64)
        return [table.sum(_Residuals(cells.sizes, scores, 0.25)), np.array(table.sum(work))]

    without, alone = sums(rows), sums(strangers)
    for place in (0, 300, 600):
        for both, one, other in zip(
            sums(rows[:place] + strangers + rows[place:]), without, alone, strict=True
        ):
            np.testing.assert_array_equal(both, one + other)
            assert other.any()


MIXED_LABELS = [2**53, 2**53 + 1] * 100 + [1.0]
SHARDED: dict[str, tuple[Any, dict[str, Any], tuple[Any, ...]]] = {
    "records": (np.arange(501) % 3, {"teachers": 25, "classes": (0, 1, 2)}, (0,)),
    "a label of another type": (MIXED_LABELS, {"teachers": 5, "classes": (2**53, 2**53 + 1, 1)}, (200,)),
    "persons": (np.arange(300) % 3, {"teachers": 7, "classes": (0, 1, 2)}, (999, 30, 74)),
}


@pytest.mark.parametrize(("labels", "settings", "removed"), SHARDED.values(), ids=SHARDED)
@THREADS
def test_removing_a_record_or_person_changes_one_teacher_and_one_vote(
    labels: Any, settings: dict[str, Any], removed: tuple[Any, ...], threads: int
) -> None:
    torch.set_num_threads(threads)
    records, queries = digits(len(labels), seed=3), SMALL_IMAGES.transform(digits(300, seed=5))
    names = np.arange(len(labels))
    if 999 in removed:
        names = np.where(names < 90, 999, names // 4)

    def ensemble(kept: np.ndarray) -> TeacherEnsemble:
        teachers = Teachers(**settings, features=SMALL_IMAGES, declared_size=60, random_state=0)
        groups = names[kept] if 999 in removed else None
        return teachers.fit(records[kept], [labels[row] for row in kept], groups=groups).ensemble_

    whole = ensemble(np.arange(len(labels)))
    for each in removed:
        without = ensemble(np.flatnonzero(names != each))
        assert (weights_of(whole) != weights_of(without)).any(axis=1).sum() == 1
        moved = np.abs(whole.scores(queries) - without.scores(queries))
        assert moved.max() <= 1.0
        assert moved.sum(axis=1).max() <= 2.0


def weights_of(ensemble: TeacherEnsemble) -> np.ndarray:
    assert isinstance(ensemble.teachers, MLP)
    return ensemble.teachers.weight_vectors().numpy().view(np.uint32)


@pytest.mark.parametrize("settings", [LINEAR, NETWORK], ids=["linear", "hidden"])
@pytest.mark.parametrize("networks", [2, 25])
@THREADS
def test_networks_trained_independently_do_not_change_each_other(
    settings: TrainingSettings, networks: int, threads: int
) -> None:
    torch.set_num_threads(threads)
    records, labels = digits(networks * 12, 33), np.arange(networks * 12) % 4
    shards = np.arange(len(records)) % networks

    def trained(kept: np.ndarray, table: np.ndarray = records) -> np.ndarray:
        rows = [np.flatnonzero(shards[kept] == shard) for shard in range(networks)]
        stack = train_independent(
            table[kept], labels[kept], 4, rows, settings=settings, seeds=range(networks), steps=5
        )
        return stack.weight_vectors().numpy().view(np.uint32)

    everyone = np.arange(len(records))
    whole = trained(everyone)
    extreme = records.copy()
    extreme[networks:][:: networks * 2] = 2.0**120  # diverges to infinity
    first = shards == 0
    for kept, table in (
        (everyone[1:], records),
        (everyone[~first], records),
        (np.concatenate([everyone[first], everyone[~first]]), records),
        (everyone, extreme),
    ):
        changed = (trained(kept, table) != whole).any(axis=1)
        assert not changed[1:].any()


HEADS = [
    PrivateHead(release=release, method=method)
    for release, method in (("weights", "gradient"), ("weights", "output"), ("query", "output"))
]


@pytest.mark.parametrize(
    ("estimator", "features", "assumed"),
    [
        *((head, SMALL_IMAGES, {LIBRARY_ROUNDING}) for head in HEADS),
        *((head, UnitNorm(), set()) for head in HEADS),
        (Teachers(teachers=3), SMALL_IMAGES, {LIBRARY_ROUNDING, LIBRARY_STACK}),
        (Teachers(teachers=3, network=LINEAR), None, {LIBRARY_STACK}),
    ],
)
def test_the_guarantee_names_what_it_assumes_of_the_numerical_library(
    estimator: Any, features: Any, assumed: set[str]
) -> None:
    stated = clone(estimator).set_params(features=features, classes=(0, 1), declared_size=120)
    guarantee = stated.fit(digits(120), np.arange(120) % 2).guarantee_
    assert guarantee.status == "proven"
    assert {LIBRARY_ROUNDING, LIBRARY_STACK} & set(guarantee.assumptions) == assumed


def test_the_audit_catches_networks_and_sums_that_are_not_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = initial_mlp((6, 4, 3), "tanh", tuple(range(5)))

    def together(features: np.ndarray, *arguments: object, **settings: object) -> MLP:
        return train_independent(features - features.mean(axis=0), *arguments, **settings)  # type: ignore[arg-type]

    report = audit_invariant(None, 6, networks=stack, classes=3)
    assert report.verdict == "consistent"
    assert [check.part for check in report.checks] == ["networks", "sums"]
    module = sys.modules["quietmax.audit.invariant"]
    monkeypatch.setattr(module, "train_independent", together)
    assert "other networks changed" in str(audit_invariant(None, 6, networks=stack).broken)

    def rounded(table: Table, weights: np.ndarray, clip: float) -> np.ndarray:
        places = np.arange(len(table))
        return gradient_sum(table, weights, clip) + places @ table.rows.sum(axis=1)

    monkeypatch.setattr(module, "gradient_sum", rounded)
    assert "order of the records" in str(audit_invariant(None, 6, classes=3).broken)

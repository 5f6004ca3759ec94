"""The scale of released scores: what one record or person moves, and that confidence meets accuracy (THEORY 3.15)."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quietmax import HeadSettings, PrivateHead
from quietmax.accounting import GaussianCost
from quietmax.data.schema import Schema
from quietmax.estimators.blocks import ROWS_AT_ONCE, Floats, LocalEngine, Table
from quietmax.estimators.head import weights as head_weights
from quietmax.estimators.head.estimator import _dense_scores
from quietmax.estimators.head.exact_sums import BITS, _unit_rows, _weights_on_grid, clipped_rows
from quietmax.estimators.head.tables import cell_scores
from quietmax.estimators.head.weights import (
    CALIBRATION_STEPS,
    TableWeights,
    _Excess,
    calibration_share,
    kept_scores,
    released_scale,
    with_scores,
)
from quietmax.models.training import softmax
from quietmax.noise.release import NoisyValues, release_gaussian
from quietmax.noise.sources import SeededNoise
from tests.estimators.table_of_people import PERSONS, table_of_people

UNIT = 2**BITS
SIZES = (5, 3)
SEEDS = st.integers(0, 2**32)


def table_of(rng: np.random.Generator, count: int, classes: int, persons: int = 0) -> Table:
    rows = np.stack([rng.integers(0, size, count) for size in SIZES], axis=1).astype(np.uint16)
    owner = rng.integers(persons, size=count) if persons else None
    repeats = None if owner is None else np.bincount(owner)[owner]
    return Table(rows, rng.integers(classes, size=count), classes, repeats)


def excess_of(weights: Floats, scale: float = 1.0, rows_at_once: int = 7) -> _Excess:
    return _Excess(partial(cell_scores, weights, SIZES), scale, rows_at_once)


def random_weights(rng: np.random.Generator, classes: int) -> Floats:
    return np.asarray(rng.normal(size=(classes, sum(SIZES) + 1)) * 10.0 ** rng.uniform(-3, 4))


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, classes=st.integers(2, 4), persons=st.sampled_from([0, 5]), scale=st.floats(0.125, 4.0))
def test_a_record_or_a_person_moves_the_sum_by_at_most_one(
    seed: int, classes: int, persons: int, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    table = table_of(rng, 30, classes, persons)
    work = excess_of(random_weights(rng, classes), scale)
    each = [work(table.take(slice(row, row + 1))) for row in range(30)]
    assert table.sum(work) == sum(each)
    repeats = [1] * 30 if table.repeats is None else table.repeats.tolist()
    for own, k in zip(each, repeats, strict=True):
        assert k * abs(own) <= UNIT


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, classes=st.integers(2, 4))
def test_the_sum_is_that_of_confidence_minus_correctness(seed: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    table, weights = table_of(rng, 30, classes, 6), random_weights(rng, classes)
    model = TableWeights(weights * 0.5, np.zeros(sum(SIZES)), SIZES, np.zeros(sum(SIZES) + 1))
    shares = model.predict_proba(table.rows)
    expected = (shares.max(axis=1) - (shares.argmax(axis=1) == table.labels)) / table.repeats
    found = [excess_of(weights, 0.5)(table.take(slice(row, row + 1))) for row in range(30)]
    np.testing.assert_allclose(np.array(found) / UNIT, expected, atol=1.01 / UNIT)


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, classes=st.integers(2, 4), one=st.floats(0.125, 4.0), other=st.floats(0.125, 4.0))
def test_the_sum_grows_with_the_scale(seed: int, classes: int, one: float, other: float) -> None:
    """Up to the last bit of each confidence, which may move a row's integer by one."""
    rng = np.random.default_rng(seed)
    table, weights = table_of(rng, 30, classes), random_weights(rng, classes)
    less, more = (table.sum(excess_of(weights, scale)) for scale in sorted((one, other)))
    assert less <= more + 30


@pytest.mark.parametrize("persons", [0, 200], ids=["records", "persons"])
def test_the_sum_depends_on_neither_order_nor_parts_nor_threads(persons: int) -> None:
    rng = np.random.default_rng(3)
    table, weights = table_of(rng, 3000, 3, persons), random_weights(rng, 3)
    expected = excess_of(weights, 0.7)(table)
    for threads, height in ((1, 1), (2, 64), (4, 2**14)):
        torch.set_num_threads(threads)
        order = rng.permutation(3000)
        repeats = None if table.repeats is None else table.repeats[order]
        permuted = Table(table.rows[order], table.labels[order], 3, repeats)
        assert permuted.sum(excess_of(weights, 0.7, height)) == expected


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, classes=st.integers(2, 3), power=st.integers(-300, 199))
@example(seed=0, classes=2, power=199)
@example(seed=0, classes=2, power=0)
def test_scores_of_dense_rows_are_exact_products_of_integers(seed: int, classes: int, power: int) -> None:
    """So that they follow from each row alone, whatever a library does with the order of additions."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(9, 30)).astype(np.float32)
    rows = _unit_rows(clipped_rows(features, 1.0), np.zeros(30), 0.2).astype(np.float32)
    weights = _weights_on_grid(np.ldexp(rng.normal(size=(classes, 31)), power))
    found = _dense_scores(weights, Table(rows, np.zeros(9, np.int64), classes), slice(0, 9))
    for row, column in zip(rows, found.T, strict=True):
        for line, score in zip(weights, column, strict=True):
            products = [Fraction(float(a)) * Fraction(float(b)) for a, b in zip(row, line, strict=True)]
            assert sum(products) == Fraction(float(score))


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, classes=st.integers(2, 4), scale=st.floats(0.125, 4.0))
def test_rows_replaced_by_their_scores_have_the_same_sum(seed: int, classes: int, scale: float) -> None:
    """Up to the rounding to float32 and, for two classes, the table of the logistic function."""
    rng = np.random.default_rng(seed)
    table, weights = table_of(rng, 30, classes, 6), random_weights(rng, classes)
    kept = with_scores(partial(cell_scores, weights, SIZES), 7, table)
    assert kept.rows.shape == (30, 1 if classes == 2 else classes)
    work, repeats = _Excess(kept_scores, scale, 4), table.repeats
    assert repeats is not None
    for row in range(30):
        part = slice(row, row + 1)
        scores = scale * cell_scores(weights, SIZES, table, part)
        expected = softmax(scores.T).max() - (scores.argmax() == table.labels[row])
        found = work(kept.take(part)) * repeats[row] / UNIT
        assert found == pytest.approx(
            expected, abs=2.0**-13 + 1e-6 + 2.0**-22 * np.abs(scores).max() + 6 / UNIT
        )
    assert kept.sum(work) == sum(work(kept.take(slice(row, row + 1))) for row in range(30))


def test_kept_scores_are_finite_whatever_the_weights_are() -> None:
    table, weights = table_of(np.random.default_rng(0), 9, 3), np.full((3, 9), 2.0**199)
    weights[1] *= -1.0
    kept = with_scores(partial(cell_scores, weights, SIZES), 4, table)
    assert np.isfinite(kept.rows).all()
    assert abs(_Excess(kept_scores, 4.0, 4)(kept)) <= 9 * UNIT


# --- What is released -------------------------------------------------------------------------------------------------


def sure_by(factor: float, count: int, seed: int = 0) -> tuple[Table, Floats]:
    """Rows of two classes and weights whose scores are those of the true log-odds, times a factor."""
    rng = np.random.default_rng(seed)
    rows = np.stack([rng.integers(0, size, count) for size in SIZES], axis=1).astype(np.uint16)
    odds = np.array([-2.0, -1.0, 0.0, 1.0, 2.0, -1.0, 0.3, 1.5, 0.1])  # of each cell, and of every row
    scores = odds[rows[:, 0]] + odds[5 + rows[:, 1]] + odds[-1]
    labels = (rng.random(count) < 1.0 / (1.0 + np.exp(-scores))).astype(np.int64)
    return Table(rows, labels, 2), factor * np.stack([-odds, odds]) / 2.0


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_scores_that_are_sure_by_a_factor_get_its_inverse_as_their_scale(factor: float) -> None:
    table, weights = sure_by(factor, 20_000)
    scale = released_scale(table, partial(cell_scores, weights, SIZES), 4096, 1.0, SeededNoise(1))
    assert scale == pytest.approx(1.0 / factor, rel=0.1)


def test_the_steps_together_cost_no_more_than_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    spent: list[tuple[float, float]] = []

    def noted(values: Any, *, sensitivity: float, mu: float, source: Any) -> NoisyValues:
        spent.append((sensitivity, mu))
        return release_gaussian(values, sensitivity=sensitivity, mu=mu, source=source)

    monkeypatch.setattr(head_weights, "release_gaussian", noted)
    for mu in (1e-3, 0.05, 0.268, 7.0):
        spent.clear()
        table, weights = sure_by(1.0, 50)
        released_scale(table, partial(cell_scores, weights, SIZES), 4096, mu, SeededNoise(1))
        assert len(spent) == CALIBRATION_STEPS
        assert {sensitivity for sensitivity, _ in spent} == {1.0}
        assert sum(Fraction(step) ** 2 for _, step in spent) <= Fraction(mu) ** 2


@pytest.mark.parametrize("rows", [2**33, 2**33 + 1, 2**40, 2**80])
def test_a_sum_that_float64_does_not_hold_is_clamped(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Many(Table):
        """A table that says it has many rows, all of which are sure and wrong."""

        def sum(self, work: Any) -> Any:
            return rows * work(self)

    seen: list[float] = []

    def noted(values: Any, **given: Any) -> NoisyValues:
        seen.extend(values)
        return release_gaussian(values, **given)

    monkeypatch.setattr(head_weights, "release_gaussian", noted)

    many = Many(np.zeros((1, 2), np.uint16), np.zeros(1, np.int64), 2)
    weights = np.zeros((2, 9))
    weights[1] = 50.0
    scale = released_scale(many, partial(cell_scores, weights, SIZES), 4096, 1.0, SeededNoise(1))
    assert scale == pytest.approx(0.125, rel=0.05)  # as small as possible
    assert 0.99 * 2**33 < max(seen) <= 2**33


# --- The whole training -----------------------------------------------------------------------------------------------


def error_of(head: PrivateHead, frame: pd.DataFrame) -> float:
    """The expected calibration error in ten bins."""
    shares = head.predict_proba(frame)
    confidence, right = shares.max(axis=1), head.predict(frame) == frame["ill"].to_numpy()
    bins = np.minimum((confidence * 10).astype(int), 9)
    return float(
        sum(abs((confidence - right)[bins == place].sum()) for place in np.unique(bins)) / len(frame)
    )


def weak_table(count: int, seed: int) -> pd.DataFrame:
    """Many columns that say little, from which a head without calibration learns too much."""
    rng = np.random.default_rng(seed)
    table = {f"c{number}": rng.choice(["a", "b", "c", "d"], count) for number in range(12)}
    odds = 0.4 * sum((table[f"c{number}"] == "a").astype(float) for number in range(6)) - 0.6
    ill = np.where(rng.random(count) < 1.0 / (1.0 + np.exp(-odds)), "yes", "no")
    return pd.DataFrame({**table, "ill": ill})


WEAK = Schema(label="ill", classes=("no", "yes"), categories={f"c{i}": tuple("abcd") for i in range(12)})
LONG = {"steps": 60, "learning_rate": 60.0}


def test_a_head_that_is_too_sure_becomes_calibrated() -> None:
    frame, others = weak_table(6000, 0), weak_table(6000, 1)
    errors = {}
    for share in (0.0, None):
        chosen = HeadSettings(calibration=share, **LONG)
        head = PrivateHead(1.0, 1e-5, schema=WEAK, settings=chosen, random_state=2).fit(frame)
        errors[share] = error_of(head, others)
        assert hasattr(head, "scale_") == (share is None)
    assert errors[0.0] > 0.08
    assert errors[None] < errors[0.0] / 2


def test_calibration_is_charged_and_stated_and_left_out_where_it_cannot_be_found() -> None:
    assert calibration_share(200.0, 0.27) == 0.0
    assert calibration_share(1e5, 0.27) > 0.0
    frame = weak_table(6000, 0)
    for rows, calibrated in ((300, False), (6000, True)):
        head = PrivateHead(1.0, 1e-5, schema=WEAK, random_state=2).fit(frame.iloc[:rows])
        facts = head.guarantee_.parameters
        assert ("mu_calibration" in facts, "scale" in facts, hasattr(head, "scale_")) == (calibrated,) * 3
        names = ("mu_size", "mu_centring", "mu_calibration", "mu_training")
        spent = sum(GaussianCost(facts[name]).amount for name in names if name in facts)
        assert math.sqrt(spent) == pytest.approx(head.guarantee_.mu, rel=1e-9)
        if calibrated:
            assert 0.125 < facts["scale"] < 4.0
            # what was released is the scale: the choice of every class stays
            plain = TableWeights(head.coef_ / head.scale_, head.centre_, head.feature_map_.sizes, head.noise_)
            cells = head.feature_map_.transform(head.encoding_.encode(frame))
            labels = np.array(["no", "yes"])[plain.predict(cells)]
            np.testing.assert_array_equal(labels, head.predict(frame))


@pytest.mark.parametrize(
    "settings", [{"schema": PERSONS}, {"method": "gradient"}, {"method": "output"}], ids=str
)
def test_the_scale_is_the_same_wherever_the_rows_are(settings: dict[str, Any], tmp_path: Path) -> None:
    """Rows on disk, in another order and on several threads; the output method up to its tolerance."""
    frame = table_of_people(3000, 1200)
    X = np.random.default_rng(0).normal(size=(1500, 4))
    y = (X[:, 0] + X[:, 1] > 0).astype(int)
    chosen = HeadSettings(calibration=0.2, steps=None if settings.get("method") == "output" else 4)

    def scale(order: np.ndarray, engine: Any) -> tuple[float, Floats]:
        head = PrivateHead(2.0, 1e-5, random_state=1, settings=chosen, engine=engine, declared_size=1500)
        head.set_params(**settings, classes=None if "schema" in settings else (0, 1))
        given = (frame.iloc[order],) if "schema" in settings else (X[order], y[order])
        fitted = head.fit(*given)
        return fitted.scale_, fitted.coef_

    count = 3000 if "schema" in settings else 1500
    expected, weights = scale(np.arange(count), "local")
    torch.set_num_threads(2)
    order = np.random.default_rng(1).permutation(count)
    found, same = scale(order, LocalEngine(0, tmp_path))
    if settings.get("method") == "output":
        assert found == pytest.approx(expected)
    else:
        assert found == expected
        np.testing.assert_array_equal(same, weights)


def test_the_sum_over_dense_rows_is_that_of_each_row_alone() -> None:
    rng = np.random.default_rng(5)
    rows = _unit_rows(clipped_rows(rng.normal(size=(2000, 6)).astype(np.float32), 1.0), np.zeros(6), 0.2)
    table = Table(rows.astype(np.float32), rng.integers(3, size=2000), 3)
    scores = partial(_dense_scores, _weights_on_grid(rng.normal(size=(3, 7))))
    work = _Excess(scores, 0.6, ROWS_AT_ONCE)
    each = sum(work(table.take(slice(row, row + 1))) for row in range(2000))
    assert table.sum(work) == each

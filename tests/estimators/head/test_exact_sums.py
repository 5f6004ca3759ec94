"""The sums a head releases: exact, of bounded sensitivity, and the same in any order (THEORY 3.1, 3.5)."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quietmax.errors import InvalidInput
from quietmax.estimators.head import exact_sums as head_table
from quietmax.estimators.head.exact_sums import (
    BITS,
    GRID,
    Table,
    clipped_residuals,
    clipped_rows,
    gradient_sum,
    on_grid,
    probabilities,
    repeatable_exp,
    residuals,
    row_sum,
    unit_rows,
    weights_on_grid,
)
from quietmax.estimators.head.training import centred
from quietmax.models import softmax
from quietmax.sensitivity import certified


def random_table(rng: np.random.Generator, records: int, columns: int, classes: int) -> Table:
    features = rng.normal(size=(records, columns)).astype(np.float32) * 10 ** rng.uniform(-2, 2)
    rows = unit_rows(clipped_rows(features, 1.0), np.zeros(columns), 0.2).astype(np.float32)
    return Table(rows, rng.integers(classes, size=records), classes)


def contributions(table: Table, weights: np.ndarray, max_grad_norm: float) -> np.ndarray:
    """What every record adds, one at a time: (n, C, d), exact."""
    grid = torch.from_numpy(weights_on_grid(weights))
    parts = []
    for row, label in zip(table.rows, table.labels, strict=True):
        one = torch.from_numpy(row[None].astype(np.float64))
        errors = clipped_residuals(
            residuals(grid, one, np.array([label])), np.sqrt(np.square(one.numpy()).sum(1)), max_grad_norm
        )
        parts.append(errors @ one.numpy())
    return np.array(parts)


def test_the_gradient_sum_is_the_exact_sum_of_every_records_own_contribution() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        table = random_table(rng, int(rng.integers(1, 60)), int(rng.integers(1, 9)), int(rng.integers(2, 5)))
        weights = rng.normal(size=(table.classes, table.features)) * 10 ** rng.uniform(-2, 3)
        units = np.ldexp(contributions(table, weights, 0.3), 2 * BITS)
        assert (units == np.rint(units)).all()
        exact = units.astype(np.int64).sum(axis=0)
        rounded = (exact + 2**9) >> 10
        np.testing.assert_array_equal(gradient_sum(table, weights, 0.3), rounded * GRID)


def test_no_record_contributes_more_than_the_clip_and_some_contribute_all_of_it() -> None:
    rng = np.random.default_rng(1)
    longest = 0.0
    for _ in range(100):
        table = random_table(rng, 20, 3, 4)
        weights = rng.normal(size=(4, 4)) * 10 ** rng.uniform(-2, 2)
        max_grad_norm = float(10 ** rng.uniform(-1.5, 0.0))
        lengths = np.linalg.norm(contributions(table, weights, max_grad_norm), axis=(1, 2))
        assert lengths.max() <= max_grad_norm
        longest = max(longest, float(lengths.max() / max_grad_norm))
    assert longest > 0.999


def test_without_clipping_a_mislabelled_record_contributes_nearly_the_square_root_of_two() -> None:
    rows = unit_rows(np.array([[1.0 - 2.0**-BITS]]), np.zeros(1), 0.2).astype(np.float32)
    table = Table(rows, np.array([0]), 2)
    sure_of_the_wrong_class = np.array([[-50.0, 0.0], [50.0, 0.0]])
    length = np.linalg.norm(contributions(table, sure_of_the_wrong_class, 2.0))
    assert 0.99 * math.sqrt(2) < length <= math.sqrt(2)


def test_removing_any_record_moves_the_released_sum_by_at_most_the_certified_sensitivity() -> None:
    rng = np.random.default_rng(2)
    largest = 0.0
    for _ in range(60):
        table = random_table(rng, int(rng.integers(2, 40)), int(rng.integers(1, 6)), int(rng.integers(2, 6)))
        weights = rng.normal(size=(table.classes, table.features)) * 10 ** rng.uniform(-1, 2)
        max_grad_norm = float(10 ** rng.uniform(-1.0, 0.0))
        bound = certified.head_gradient(max_grad_norm, coordinates=weights.size, grid=GRID).value
        whole = gradient_sum(table, weights, max_grad_norm)
        for removed in range(len(table)):
            kept = np.delete(np.arange(len(table)), removed)
            moved = whole - gradient_sum(
                Table(table.rows[kept], table.labels[kept], table.classes), weights, max_grad_norm
            )
            assert np.linalg.norm(moved) <= bound
            largest = max(largest, float(np.linalg.norm(moved) / bound))
    assert largest > 0.99


@pytest.mark.parametrize("height", [16, 37, 4096])
def test_the_sum_depends_on_neither_the_order_of_the_records_nor_the_blocks(
    monkeypatch: pytest.MonkeyPatch, height: int
) -> None:
    rng = np.random.default_rng(3)
    table = random_table(rng, 500, 700, 3)
    weights = rng.normal(size=(3, 701)) * 5
    whole = gradient_sum(table, weights, 0.2)
    order = rng.permutation(500)
    monkeypatch.setattr(Table, "rows_at_once", height)
    shuffled = Table(table.rows[order], table.labels[order], 3)
    np.testing.assert_array_equal(gradient_sum(shuffled, weights, 0.2), whole)


def test_the_sum_does_not_depend_on_the_number_of_threads() -> None:
    rng = np.random.default_rng(9)
    table = random_table(rng, 3000, 40, 3)
    weights = rng.normal(size=(3, 41)) * 5
    whole = gradient_sum(table, weights, 0.2)
    torch.set_num_threads(3)
    assert len(table.pieces) == 3
    np.testing.assert_array_equal(gradient_sum(table, weights, 0.2), whole)


def test_logits_of_rows_and_weights_on_their_grids_are_exact() -> None:
    rng = np.random.default_rng(4)
    for scale in (1e-3, 1.0, 1e4, 1e12):
        table = random_table(rng, 5, 300, 2)
        weights = weights_on_grid(rng.normal(size=(2, 301)) * scale)
        computed = (torch.from_numpy(weights) @ torch.from_numpy(table.rows.astype(np.float64)).T).numpy()
        unit = 2.0**-60
        for c in range(2):
            for i in range(5):
                terms = [
                    int(w / unit * 2**BITS) * int(x * 2**BITS)
                    for w, x in zip(weights[c], table.rows[i].tolist(), strict=True)
                ]
                assert computed[c, i] == sum(terms) / 2**60 / 2 ** (2 * BITS)


def test_weights_on_their_grid_are_close_to_the_weights() -> None:
    weights = np.random.default_rng(5).normal(size=(3, 1000))
    assert np.abs(weights_on_grid(weights) - weights).max() < 1e-7


@given(st.lists(st.floats(-800.0, 0.0), min_size=1, max_size=40))
def test_the_repeatable_exponential_is_accurate_and_the_same_at_every_place(values: Any) -> None:
    array = np.array(values)
    result = repeatable_exp(array)
    np.testing.assert_allclose(result, np.exp(np.maximum(array, -700.0)), rtol=1e-15)
    for place, value in enumerate(values):
        assert repeatable_exp(np.array([value]))[0] == result[place]


def test_probabilities_equal_the_ordinary_softmax_and_do_not_depend_on_other_columns() -> None:
    logits = np.random.default_rng(6).normal(size=(7, 33)) * 30
    together = probabilities(logits)
    np.testing.assert_allclose(together, softmax(logits.T).T, rtol=1e-13, atol=1e-300)
    for column in range(33):
        np.testing.assert_array_equal(
            probabilities(logits[:, column : column + 1])[:, 0], together[:, column]
        )


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=3, max_size=3),
    st.floats(0.01, 100.0),
    st.lists(st.floats(-0.5, 0.5), min_size=3, max_size=3),
)
def test_rows_never_become_longer_than_one(values: Any, radius: float, centre: Any) -> None:
    clipped = clipped_rows(np.array([values], np.float32), radius)
    assert (np.ldexp(clipped, BITS) == np.rint(np.ldexp(clipped, BITS))).all()
    assert float(np.square(clipped).sum()) <= 1.0
    middle = on_grid(np.array(centre))
    rows = unit_rows(clipped, middle, 0.2)
    assert float(np.square(rows).sum()) <= 1.0
    assert float(np.square(rows).sum()) > 0.9999
    np.testing.assert_array_equal(rows.astype(np.float32), rows)


def test_a_row_that_is_not_finite_becomes_zero() -> None:
    np.testing.assert_array_equal(
        clipped_rows(np.array([[np.nan, np.inf, -np.inf]], np.float32), 1.0), np.zeros((1, 3))
    )


@pytest.mark.parametrize("radius", [1e-320, 1e-272, 1e-200, 1e-12, 1e12, 1e300])
def test_rows_stay_finite_and_short_for_every_radius(radius: float) -> None:
    features = np.array([[1e38, 1.0], [-1e38, 1e-38], [0.5, 0.25], [np.inf, 1.0]], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning would depend on the values
        rows = clipped_rows(features, radius)
    assert np.isfinite(rows).all()
    assert np.square(rows).sum(axis=1).max() <= 1.0
    for number, row in enumerate(rows):
        np.testing.assert_array_equal(clipped_rows(features[number : number + 1], radius)[0], row)
    moved = row_sum(rows.astype(np.float32)) - row_sum(rows[1:].astype(np.float32))
    np.testing.assert_array_equal(moved, rows[0])


def test_an_empty_row_without_constant_stays_zero() -> None:
    np.testing.assert_array_equal(unit_rows(np.zeros((1, 2)), np.zeros(2), 0.0), np.zeros((1, 3)))


def test_the_sum_of_rows_is_exact() -> None:
    rng = np.random.default_rng(7)
    rows = clipped_rows(rng.normal(size=(3000, 4)).astype(np.float32), 1.0).astype(np.float32)
    units = np.ldexp(rows.astype(np.float64), BITS).astype(np.int64)
    np.testing.assert_array_equal(np.ldexp(row_sum(rows), BITS), units.sum(axis=0))


def test_a_decision_on_centred_unit_rows_is_an_affine_decision_on_features() -> None:
    rng = np.random.default_rng(8)
    features = rng.normal(size=(50, 3)).astype(np.float32) * 0.3
    clipped = clipped_rows(features, 2.0)
    centre, weights = on_grid(rng.normal(size=3) * 0.2), rng.normal(size=4)
    rows = np.concatenate([clipped, np.zeros((50, 1))], axis=1).astype(np.float32)
    decisions = centred(rows, centre).astype(float) @ weights
    affine = clipped @ weights[:3] - centre @ weights[:3] + 0.2 * weights[3]
    clear = np.abs(affine) > 1e-3
    assert clear.sum() > 40
    np.testing.assert_array_equal(np.sign(decisions[clear]), np.sign(affine[clear]))


def test_more_records_than_can_be_summed_exactly_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_table, "LARGEST_TABLE", 2)
    with pytest.raises(InvalidInput, match="at most 2 records"):
        Table(np.zeros((3, 1), np.float32), np.zeros(3, np.int64), 2)


def test_the_bits_of_the_largest_sum_fit_into_the_integers_used() -> None:
    """The arithmetic behind the constants: 63 bits for the total, 53 for a block and for the released sum."""
    widest = math.sqrt(2) * 2.0 ** (2 * BITS)
    assert head_table.LARGEST_TABLE * widest < 2**63
    assert 4096 * widest < 2**53
    assert head_table.LARGEST_TABLE * math.sqrt(2) / GRID < 2**53
    assert 4.1 * 2.0 ** (2 * BITS) < 2**53

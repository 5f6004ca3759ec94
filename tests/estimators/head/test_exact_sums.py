"""The sums a head releases: exact, of bounded sensitivity, and the same in any order (THEORY 3.1, 3.5)."""

from __future__ import annotations

import math
import warnings
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit

from quietmax.estimators import blocks
from quietmax.estimators.blocks import Table, _chunk_rows
from quietmax.estimators.head import exact_sums
from quietmax.estimators.head.estimator import _centred
from quietmax.estimators.head.exact_sums import (
    BITS,
    GRID,
    MOMENTS_BITS,
    MOMENTS_GRID,
    WHITENING_BITS,
    ExactSum,
    _clipped_residuals,
    _moment_sum,
    _repeatable_exp,
    _residuals,
    _row_sum,
    _unit_rows,
    _weights_on_grid,
    _whitened_rows,
    _whitening_on_grid,
    clipped_rows,
    gradient_grid,
    gradient_sum,
    is_whitening,
    logistic,
    moments_grid,
    on_grid,
    probabilities,
)
from quietmax.models.training import softmax
from quietmax.sensitivity import certified


def random_table(rng: np.random.Generator, records: int, columns: int, classes: int) -> Table:
    features = rng.normal(size=(records, columns)).astype(np.float32) * 10 ** rng.uniform(-2, 2)
    rows = _unit_rows(clipped_rows(features, 1.0), np.zeros(columns), 0.2).astype(np.float32)
    return Table(rows, rng.integers(classes, size=records), classes)


def sum_of(rows: np.ndarray) -> np.ndarray:
    """The sum of rows that have no labels."""
    return _row_sum(Table(rows.astype(np.float32), np.zeros(len(rows), np.int64), 2))


def lines_of(table: Table) -> int:
    """The number of lines that training has: for two classes one, the difference."""
    return 1 if table.classes == 2 else table.classes


def contributions(table: Table, weights: np.ndarray, max_grad_norm: float) -> np.ndarray:
    """What every row adds, one at a time: (n, lines of weights, d), exact."""
    grid = torch.from_numpy(_weights_on_grid(weights))
    shares = np.ones(len(table)) if table.shares is None else table.shares
    parts = []
    for row, label, share in zip(table.rows, table.labels, shares, strict=True):
        one = torch.from_numpy(row[None].astype(np.float64))
        errors = _clipped_residuals(
            _residuals((grid @ one.T).numpy(), np.array([label])),
            max_grad_norm,
            np.array([share]),
        )
        parts.append(errors @ one.numpy())
    return np.array(parts)


def with_persons(rng: np.random.Generator, table: Table, persons: int | None) -> tuple[Table, np.ndarray]:
    """The same rows, given to persons at random, and the person of each row; None: every row is a person."""
    if persons is None:
        return table, np.arange(len(table))
    owner = rng.integers(persons, size=len(table))
    return Table(table.rows, table.labels, table.classes, np.bincount(owner)[owner]), owner


def released(table: Table, weights: np.ndarray) -> list[np.ndarray]:
    """The sums that are released with noise."""
    return [gradient_sum(table, weights, 0.2), _row_sum(table), _moment_sum(table)]


def chosen(table: Table, rows: np.ndarray) -> Table:
    """Some rows of a table, whose persons keep their number of rows."""
    repeats = None if table.repeats is None else table.repeats[rows]
    return Table(table.rows[rows], table.labels[rows], table.classes, repeats)


def units(values: np.ndarray, bits: int) -> list[int]:
    """Numbers as unbounded integers in units of 2^-bits; they must be such multiples."""
    scaled = [math.ldexp(float(value), bits) for value in np.ravel(values)]
    assert all(each == int(each) for each in scaled)
    return [int(each) for each in scaled]


def test_no_record_contributes_more_than_the_clip_and_some_contribute_all_of_it() -> None:
    rng = np.random.default_rng(1)
    longest = 0.0
    for classes in (2, 4) * 50:
        table = random_table(rng, 20, 3, classes)
        weights = rng.normal(size=(lines_of(table), 4)) * 10 ** rng.uniform(-2, 2)
        max_grad_norm = float(10 ** rng.uniform(-1.5, 0.0))
        lengths = np.linalg.norm(contributions(table, weights, max_grad_norm), axis=(1, 2))
        assert lengths.max() <= max_grad_norm
        longest = max(longest, float(lengths.max() / max_grad_norm))
    assert longest > 0.999


def test_without_clipping_a_mislabelled_record_contributes_nearly_the_square_root_of_two() -> None:
    rows = _unit_rows(np.array([[1.0 - 2.0**-BITS]]), np.zeros(1), 0.2).astype(np.float32)
    table = Table(rows, np.array([0]), 2)
    sure_of_the_wrong_class = np.array([[-50.0, 0.0], [50.0, 0.0]])
    length = np.linalg.norm(contributions(table, sure_of_the_wrong_class, 2.0))
    assert 0.99 * math.sqrt(2) < length <= math.sqrt(2)


@pytest.mark.parametrize("persons", [None, 120], ids=["records", "persons"])
@pytest.mark.parametrize("change", ["order", "chunks of 16", "chunks of 37", "rows in float64", "threads"])
def test_no_sum_depends_on_the_order_of_the_rows_on_blocks_or_on_threads(
    monkeypatch: pytest.MonkeyPatch, change: str, persons: int | None
) -> None:
    rng = np.random.default_rng(3)
    table, _ = with_persons(rng, random_table(rng, 3000, 40, 3), persons)
    weights = rng.normal(size=(3, 41)) * 5
    whole = released(table, weights)
    if change == "order":
        table = chosen(table, rng.permutation(3000))
    elif change.startswith("chunks"):
        monkeypatch.setattr(blocks, "_chunk_rows", lambda _: int(change[-2:]))
    elif change == "threads":
        torch.set_num_threads(3)
        assert len(table.pieces(torch.get_num_threads())) == 3
    else:
        monkeypatch.setattr(exact_sums, "EXACT_ROWS", 16)
    for found, expected in zip(released(table, weights), whole, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_the_logistic_function_is_looked_up_near_its_place_and_for_each_number_alone() -> None:
    rng = np.random.default_rng(8)
    scores = np.concatenate([rng.normal(size=5000) * 6, [0.0, -0.0, 16.0, -16.0, 1e300, -1e300, 2.0**-11]])
    found = logistic(scores[None])[0]
    assert np.abs(found - expit(scores)).max() <= 2.0**-13
    assert (np.diff(found[np.argsort(scores)]) >= 0.0).all()
    np.testing.assert_allclose(logistic(-scores), 1.0 - found, atol=1e-15)
    for place in rng.permutation(len(scores))[:200]:
        assert logistic(scores[place : place + 1])[0] == found[place]


def test_one_line_for_two_classes_steps_like_their_two_lines() -> None:
    rng = np.random.default_rng(9)
    table = random_table(rng, 200, 5, 2)
    weights = rng.normal(size=(1, 6)) * 5
    both = gradient_sum(table, np.concatenate([-weights / 2, weights / 2]), 0.2 * math.sqrt(2))
    np.testing.assert_allclose(gradient_sum(table, weights, 0.2), both[1:], atol=200 * 2.0**-13)
    np.testing.assert_allclose(both[0], -both[1], atol=1e-3)


@pytest.mark.parametrize("classes", [2, 3])
def test_weights_of_classes_multiply_what_their_rows_add_after_clipping(classes: int) -> None:
    rng = np.random.default_rng(10)
    table = random_table(rng, 200, 5, classes)
    weights = rng.normal(size=(1 if classes == 2 else classes, 6)) * 5
    stated = np.array([1.0, 0.25, 0.5][:classes])
    of_class = [table.labels == each for each in range(classes)]
    parts = [
        gradient_sum(Table(table.rows[rows], table.labels[rows], classes), weights, 0.2) for rows in of_class
    ]
    expected = sum(weight * part for weight, part in zip(stated, parts, strict=True))
    found = gradient_sum(table, weights, 0.2, class_weights=stated)
    np.testing.assert_allclose(found, expected, rtol=0, atol=200 * 2.0**-BITS)
    assert np.abs(found - gradient_sum(table, weights, 0.2)).max() > 0.1


def test_the_sum_of_more_rows_than_float64_holds_exactly_is_that_of_its_parts() -> None:
    rng = np.random.default_rng(31)
    table = random_table(rng, 9000, 30, 3)
    weights = rng.normal(size=(3, 31)) * 5
    parts = [
        gradient_sum(Table(table.rows[rows], table.labels[rows], 3), weights, 0.2)
        for rows in np.array_split(np.arange(9000), 9)
    ]
    # Each of the ten sums is rounded to the grid once.
    np.testing.assert_allclose(
        gradient_sum(table, weights, 0.2), np.sum(parts, axis=0), rtol=0, atol=5 * GRID
    )


def test_logits_of_rows_and_weights_on_their_grids_are_exact() -> None:
    rng = np.random.default_rng(4)
    for scale in (1e-3, 1.0, 1e4, 1e12):
        table = random_table(rng, 5, 300, 2)
        weights = _weights_on_grid(rng.normal(size=(2, 301)) * scale)
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
    assert np.abs(_weights_on_grid(weights) - weights).max() < 1e-7


@given(st.lists(st.floats(-800.0, 0.0), min_size=1, max_size=40))
def test_the_repeatable_exponential_is_accurate_and_the_same_at_every_place(values: Any) -> None:
    array = np.array(values)
    result = _repeatable_exp(array)
    np.testing.assert_allclose(result, np.exp(np.maximum(array, -700.0)), rtol=1e-15)
    for place, value in enumerate(values):
        assert _repeatable_exp(np.array([value]))[0] == result[place]


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
    rows = _unit_rows(clipped, middle, 0.2)
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
    moved = sum_of(rows) - sum_of(rows[1:])
    np.testing.assert_array_equal(moved, rows[0])


def test_an_empty_row_without_constant_stays_zero() -> None:
    np.testing.assert_array_equal(_unit_rows(np.zeros((1, 2)), np.zeros(2), 0.0), np.zeros((1, 3)))


def test_a_decision_on_centred_unit_rows_is_an_affine_decision_on_features() -> None:
    rng = np.random.default_rng(8)
    features = rng.normal(size=(50, 3)).astype(np.float32) * 0.3
    clipped = clipped_rows(features, 2.0)
    centre, weights = on_grid(rng.normal(size=3) * 0.2), rng.normal(size=4)
    rows = np.concatenate([clipped, np.zeros((50, 1))], axis=1).astype(np.float32)
    table = Table(rows, np.zeros(50, np.int64), 2)
    decisions = _centred(centre, table).rows.astype(float) @ weights
    affine = clipped @ weights[:3] - centre @ weights[:3] + 0.2 * weights[3]
    clear = np.abs(affine) > 1e-3
    assert clear.sum() > 40
    np.testing.assert_array_equal(np.sign(decisions[clear]), np.sign(affine[clear]))


def test_the_bits_of_the_largest_sum_fit_into_the_integers_used() -> None:
    """The arithmetic behind the constants: 63 bits for a block, 53 for a chunk and for the released sum."""
    widest = math.sqrt(2) * 2.0 ** (2 * BITS)
    assert blocks.MAX_BLOCK_ROWS * widest < 2**63
    assert blocks.EXACT_ROWS * widest < 2**53
    assert max(_chunk_rows(columns) for columns in (1, 50, 4000)) <= blocks.EXACT_ROWS
    assert 4.1 * 2.0 ** (2 * BITS) < 2**53
    assert blocks.MAX_BLOCK_ROWS * 2.0 ** (2 * BITS) < 2**63
    assert _chunk_rows(1) * 2.0 ** (2 * BITS) < 2**53
    assert 2**MOMENTS_BITS * 181 < 2**53  # times the square root of two, 181/128
    assert BITS + WHITENING_BITS <= 52
    for size in (1, 2**22, 2**22 + 1, 10**9, 2**35):
        assert size * math.sqrt(2) / gradient_grid(size) < 2**53
        assert size / moments_grid(size) * 181 < 2**53  # times the square root of two, 181/128
        assert 2 * BITS + math.log2(gradient_grid(size)) < 32
        assert 2 * BITS + math.log2(moments_grid(size)) < 32


def as_integers(total: ExactSum) -> list[int]:
    """The sum in unbounded integers."""
    return [int(high) * 2**32 + int(low) for high, low in zip(total.high.flat, total.low.flat, strict=True)]


EDGES = (0, 1, -1, 2**31, 2**32 - 1, 2**32, -(2**32), -(2**32) - 1, 2**53, 2**61, 2**63 - 1, -(2**63))


@given(
    st.lists(st.sampled_from(EDGES) | st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30), st.randoms()
)
def test_pairs_of_integers_are_the_sum_in_unbounded_integers_in_any_order(values: Any, random: Any) -> None:
    shuffled = random.sample(values, len(values))
    for order in (values, shuffled):
        total = blocks.added(ExactSum.of(np.array([value], np.int64)) for value in order)
        assert as_integers(total) == [sum(values)]


@pytest.mark.parametrize("extreme", [-(2**63), 2**63 - 1])
def test_two_to_the_31_blocks_of_the_largest_sums_do_not_overflow(extreme: int) -> None:
    """Adding a sum to itself 31 times is the same as adding 2^31 blocks."""
    total = ExactSum.of(np.array([extreme], np.int64))
    for _ in range(31):
        total = total + total
    assert as_integers(total) == [extreme * 2**31]


@pytest.mark.parametrize(("bits", "drop"), [(53, 0), (53, 10), (53, 31), (45, 20), (45, 26)])
def test_rounding_and_clamping_are_those_of_unbounded_integers(bits: int, drop: int) -> None:
    edges = {0, 1, 2**31, 2**32, 2**62, 2**63 - 1, 2 ** (bits + drop), 2**74 - 1, 2**90}
    edges |= {2 ** (bits + drop) - 2**drop, (1 << drop) >> 1, ((1 << drop) >> 1) - 1, 3 * ((1 << drop) >> 1)}
    numbers = sorted(sign * edge + step for edge in edges for sign in (1, -1) for step in (-1, 0, 1))
    numbers = [number for number in numbers if abs(number) < 2**92]
    high = np.array([number >> 32 for number in numbers], np.int64)
    low = np.array([number & (2**32 - 1) for number in numbers], np.int64)
    half, limit = (1 << drop) >> 1, 2**bits
    expected = [max(-limit, min(limit, (number + half) >> drop)) for number in numbers]
    found = ExactSum(high, low)._to_grid(drop=drop, bits=bits)
    assert [int(each) for each in found] == expected
    carried = ExactSum(high - 2**20, low + 2**52)._to_grid(drop=drop, bits=bits)  # low parts above 2^32
    assert [int(each) for each in carried] == expected


@pytest.mark.parametrize("size", [1, 2**22, 2**22 + 1, 10**9])
def test_clamping_and_rounding_move_neighbours_apart_by_at_most_one_step(size: int) -> None:
    """Sums at the limit of float64 and beyond it, which more records than declared can reach."""
    grid = gradient_grid(size)
    step = round(grid * 2 ** (2 * BITS))
    limit = 2**53 * step
    rng = np.random.default_rng(size)
    for start in (0, limit - 3 * step, limit, 2 * limit, -limit - step):
        for _ in range(50):
            one = start + int(rng.integers(-(2**42), 2**42))
            other = one + int(rng.integers(-(2**41), 2**41))
            pairs = [
                ExactSum(np.array([each >> 32]), np.array([each & (2**32 - 1)])) for each in (one, other)
            ]
            found = [pair._to_grid(drop=step.bit_length() - 1)[0] for pair in pairs]
            assert abs(int(found[0]) - int(found[1])) * step <= abs(one - other) + step
            assert all(abs(each) <= 2**53 for each in found)


def test_a_large_declared_size_rounds_to_its_coarser_grid() -> None:
    rng = np.random.default_rng(17)
    table = random_table(rng, 300, 5, 3)
    weights = rng.normal(size=(3, 6))
    exact = np.array([units(part, 2 * BITS) for part in contributions(table, weights, 0.3)], object).sum(
        axis=0
    )
    grid = gradient_grid(10**9)
    assert grid == 2.0**-22
    rounded = [((total + 2**17) >> 18) * grid for total in exact]
    np.testing.assert_array_equal(gradient_sum(table, weights, 0.3, grid=grid).ravel(), rounded)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 30, 1000, 4097, 100_000])
def test_one_persons_rows_together_contribute_at_most_what_one_record_does(rows: int) -> None:
    """In unbounded integers: the worst person, whose rows are equal and all clipped, and one with rows of all kinds."""
    rng = np.random.default_rng(rows)
    max_grad_norm = 0.2
    worst = _unit_rows(clipped_rows(np.array([[0.3, -0.4, 0.1]], np.float32), 1.0), np.zeros(3), 0.2)
    mixed = random_table(rng, min(rows, 1000), 3, 2)
    for one in (Table(worst.astype(np.float32), np.array([0]), 2), mixed):
        copies = rows // len(one)
        if copies * len(one) != rows:
            continue
        table = Table(one.rows, one.labels, 2, np.full(len(one), rows))
        weights = np.array([[90.0, -80.0, 0.0, 0.0]])
        # each of `copies` copies adds the same, so its integers are multiplied
        each = [units(part, 2 * BITS) for part in contributions(table, weights, max_grad_norm)]
        gradient = [sum(column) for column in zip(*each, strict=True)]
        length = sum((column * copies) ** 2 for column in gradient)
        assert length <= Fraction(max_grad_norm) ** 2 * 2 ** (4 * BITS)
        shortened = units(_row_sum(table), BITS)
        assert sum((each * copies) ** 2 for each in shortened) <= 2 ** (2 * BITS)
        halves = on_grid(table.rows.astype(np.float64) * np.sqrt(1.0 / rows))
        scaled = np.array([units(row, BITS) for row in halves], object)
        moments = (scaled.T @ scaled) * copies
        assert (moments**2).sum() <= 2 ** (4 * BITS)
        if one is not mixed and rows <= 1000:
            assert float(length) > (0.98 * max_grad_norm) ** 2 * 2.0 ** (4 * BITS)
            assert sum((each * copies) ** 2 for each in shortened) > 0.98**2 * 2 ** (2 * BITS)
            assert (moments**2).sum() > 0.98**2 * 2 ** (4 * BITS)


def test_one_of_two_people_who_share_a_value_moves_a_sum_by_up_to_twice_the_bound() -> None:
    """This is why a guarantee for persons assumes that nobody else has a person's value (THEORY 3.7)."""
    rows = _unit_rows(clipped_rows(np.array([[0.9], [-0.9]], np.float32), 1.0), np.zeros(1), 0.2)
    both = rows[[0] + [1] * 99].astype(np.float32)
    together = Table(both, np.zeros(100, np.int64), 2, np.full(100, 100))
    alone = Table(both[:1], np.zeros(1, np.int64), 2, np.ones(1, np.int64))
    sums = zip(released(together, np.zeros((2, 2))), released(alone, np.zeros((2, 2))), strict=True)
    for (one, other), bound in zip(sums, (0.2, 1.0), strict=False):
        assert 1.9 * bound < np.linalg.norm(one - other) < 2 * bound


@pytest.mark.parametrize("persons", [None, 12], ids=["records", "persons"])
def test_every_sum_is_the_exact_sum_of_what_each_row_adds_alone(persons: int | None) -> None:
    rng = np.random.default_rng(10)
    for _ in range(20):
        plain = random_table(rng, int(rng.integers(1, 60)), int(rng.integers(1, 9)), int(rng.integers(2, 5)))
        table, _ = with_persons(rng, plain, persons)
        weights = rng.normal(size=(lines_of(table), table.features)) * 10 ** rng.uniform(-2, 3)
        each = [units(part, 2 * BITS) for part in contributions(table, weights, 0.3)]
        expected = [((sum(column) + 2**9) >> 10) * GRID for column in zip(*each, strict=True)]
        np.testing.assert_array_equal(gradient_sum(table, weights, 0.3).ravel(), expected)
        rows = table.rows.astype(np.float64)
        shares = np.ones((len(rows), 1)) if table.shares is None else table.shares[:, None]
        roots = np.array([units(row, BITS) for row in on_grid(rows * np.sqrt(shares))], object)
        exact = (roots.T @ roots + 2**19) >> 20
        np.testing.assert_array_equal(_moment_sum(table), exact.astype(np.float64) * MOMENTS_GRID)
        parts = [units(row, BITS) for row in on_grid(rows * shares)]
        assert units(_row_sum(table), BITS) == [sum(column) for column in zip(*parts, strict=True)]


@pytest.mark.parametrize("persons", [None, 8], ids=["records", "persons"])
def test_removing_anybody_moves_every_released_sum_by_at_most_the_certified_sensitivity(
    persons: int | None,
) -> None:
    rng = np.random.default_rng(11)
    largest = np.zeros(3)
    for _ in range(40):
        plain = random_table(rng, 40, int(rng.integers(1, 6)), int(rng.integers(2, 6)))
        table, owner = with_persons(rng, plain, persons)
        weights = rng.normal(size=(lines_of(table), table.features)) * 10 ** rng.uniform(-1, 2)
        gradient = certified.head_gradient(0.2, coordinates=weights.size, grid=GRID)
        moments = certified.head_moments(features=table.features, grid=MOMENTS_GRID)
        bounds = np.array([gradient.value, 1.0, moments.value])
        whole = released(table, weights)
        for person in set(owner.tolist()):
            fewer = released(chosen(table, np.flatnonzero(owner != person)), weights)
            moved = [np.linalg.norm(one - other) for one, other in zip(whole, fewer, strict=True)]
            assert (moved <= bounds).all()
            largest = np.maximum(largest, moved / bounds)
    assert (largest > 0.99).all()


def test_whitened_rows_are_exact_products_divided_by_their_length() -> None:
    """The products in unbounded integers; a row's result does not depend on the rows beside it."""
    rng = np.random.default_rng(13)
    for condition in (1.0, 1e3, 1e6):
        rows = random_table(rng, 40, 30, 2).rows.astype(np.float64)
        directions = np.linalg.qr(rng.normal(size=(31, 31)))[0]
        matrix = _whitening_on_grid(directions * np.geomspace(1.0, 1 / condition, 31) @ directions.T)
        assert is_whitening(matrix, 31)
        whole = _whitened_rows(rows, matrix)
        exact = np.array([units(row, BITS) for row in rows], object) @ np.array(
            [units(row, WHITENING_BITS) for row in matrix], object
        )
        product = (torch.from_numpy(rows) @ torch.from_numpy(matrix)).numpy()
        assert [int(each) for each in exact.ravel()] == units(product, BITS + WHITENING_BITS)
        assert max(sum(int(each) ** 2 for each in row) for row in exact) <= 2 ** (2 * (BITS + WHITENING_BITS))
        for number, row in enumerate(whole):
            assert sum(each**2 for each in units(row, BITS)) <= 2 ** (2 * BITS)
            np.testing.assert_array_equal(_whitened_rows(rows[number : number + 1], matrix)[0], row)
        np.testing.assert_array_equal(_whitened_rows(rows[::-1].copy(), matrix)[::-1], whole)
        np.testing.assert_array_equal(whole.astype(np.float32), whole)
        direct = rows @ matrix
        direct /= np.linalg.norm(direct, axis=1, keepdims=True)
        np.testing.assert_allclose(whole, direct, atol=2e-5)


def test_a_diagonal_whitening_is_the_matrix_with_that_diagonal() -> None:
    rng = np.random.default_rng(16)
    rows = random_table(rng, 40, 30, 2).rows.astype(np.float64)
    diagonal = _whitening_on_grid(rng.uniform(0.01, 3.0, 31))
    assert is_whitening(diagonal, 31)
    assert is_whitening(np.diag(diagonal), 31)
    assert not is_whitening(diagonal, 30)
    np.testing.assert_array_equal(_whitened_rows(rows, diagonal), _whitened_rows(rows, np.diag(diagonal)))


def test_a_row_that_the_whitening_makes_too_short_becomes_zero() -> None:
    matrix = _whitening_on_grid(np.diag([1.0, 2.0**-30]))
    np.testing.assert_array_equal(_whitened_rows(np.array([[0.0, 0.5]]), matrix), np.zeros((1, 2)))


@pytest.mark.parametrize(
    "matrix",
    [
        np.eye(3),
        np.eye(2) / 3,
        np.eye(2) * 2,
        np.array([[0.5, 0.25], [0.0, 0.5]]),
        np.diag([0.5, np.nan]),
        np.eye(2, dtype=np.float32),
    ],
    ids=["shape", "grid", "long", "asymmetric", "nan", "type"],
)
def test_a_matrix_that_cannot_be_a_whitening_is_recognised(matrix: np.ndarray) -> None:
    assert not is_whitening(matrix, 2)
    assert is_whitening(_whitening_on_grid(np.eye(2)), 2)


def test_a_binary_softmax_is_the_general_one_bit_for_bit() -> None:
    logits = np.random.default_rng(14).normal(size=(2, 3000)) * 10 ** np.random.default_rng(15).uniform(
        -3, 3, 3000
    )
    logits[:, :3] = [[0.0, 1e-320, -5.0], [0.0, 0.0, -5.0]]
    exponentials = _repeatable_exp(logits - logits.max(axis=0))
    np.testing.assert_array_equal(probabilities(logits), exponentials / (exponentials[0] + exponentials[1]))

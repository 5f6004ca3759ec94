"""Training on the cells of a table: what one record or person moves, in unbounded integers (THEORY 3.7, 3.14)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from quietmax import HeadSettings, PrivateHead
from quietmax.data.schema import Schema
from quietmax.errors import InvalidInput
from quietmax.estimators.blocks import Blocks, Table
from quietmax.estimators.head import tables, weights
from quietmax.estimators.head.estimator import _with_cells
from quietmax.estimators.head.exact_sums import BITS, gradient_grid
from quietmax.estimators.head.tables import (
    Basis,
    JoinedColumns,
    _Residuals,
    descend,
    released_counts,
    with_lengths,
)
from quietmax.estimators.head.weights import GradientPlan, added_scores, even_shares
from quietmax.models.features.tabular import MOST_CELLS, TableCells
from quietmax.noise.release import NoisyValues
from quietmax.noise.sources import SeededNoise
from quietmax.sensitivity import certified

UNIT = 2**BITS
MIXED = TableCells(7, ((0, 1), (1, 3), (3, 6), (6, 7)), (0, 1), levels=16, crosses=((0, 2), (1, 3)))
"""A number, a number with missing values, three categories, one category, and two crosses."""
FEW = settings(max_examples=40, deadline=None)
SEEDS = st.integers(0, 2**32)


def rows_of(rng: np.random.Generator, sizes: tuple[int, ...], count: int) -> np.ndarray:
    return np.stack([rng.integers(0, size, count) for size in sizes], axis=1).astype(np.uint16)


def table_of(
    rng: np.random.Generator, cells: TableCells, count: int, classes: int, persons: int = 0
) -> Table:
    """Rows at random; with persons, every row belongs to one of them."""
    owner = rng.integers(persons, size=count) if persons else None
    labels = rng.integers(classes, size=count)
    digests = None if owner is None else np.char.zfill(owner.astype("S"), 16)
    repeats = None if owner is None else np.bincount(owner)[owner]
    return Table(rows_of(rng, cells.sizes, count), labels, classes, repeats, digests)


def chosen(table: Table, rows: np.ndarray) -> Table:
    """Some rows, whose persons keep their number of rows."""
    arrays = {name: array[rows] for name, array in table._arrays().items()}
    return Table(classes=table.classes, **arrays)


def basis_of(
    rng: np.random.Generator, cells: TableCells, noise: float = 1e-3, shares: np.ndarray | None = None
) -> Basis:
    if shares is None:
        shares = np.clip(even_shares(cells.sizes) + rng.normal(0.0, 0.05, sum(cells.sizes)), 0.0, 1.0)
    return Basis.of(cells, shares, noise, 10.0 ** rng.uniform(0.0, 3.0))


@dataclass(frozen=True)
class Reference:
    """The same sums from every row's z, in Python's integers."""

    lines: list[list[int]]  # What each cell, and last every row, adds to z
    starts: list[int]

    @classmethod
    def of(cls, basis: Basis, sizes: tuple[int, ...]) -> Reference:
        lines = [[int(each) for each in line] for line in basis.entries.toarray()]
        return cls(lines, [sum(sizes[:position]) for position in range(len(sizes))])

    def z(self, row: np.ndarray) -> list[int]:
        """A row's z in units of 2^-20."""
        cells = [self.lines[start + int(cell)] for start, cell in zip(self.starts, row, strict=True)]
        return [sum(column) for column in zip(*cells, self.lines[-1], strict=True)]

    def gradient(self, table: Table, residuals: list[list[int]], grid: float) -> list[list[float]]:
        """The sum of r z' over all rows, halves rounded up, on the grid."""
        step = round(grid * UNIT**2)
        total = [[0] * len(self.lines[0]) for _ in residuals[0]]
        for row, own in zip(table.rows, residuals, strict=True):
            z = self.z(row)
            total = [
                [found + r * each for found, each in zip(line, z, strict=True)]
                for line, r in zip(total, own, strict=True)
            ]
        limit = 2**53
        return [
            [max(-limit, min(limit, (each + step // 2) // step)) * grid for each in line] for line in total
        ]


def alone(table: Table) -> Iterator[Table]:
    for row in range(len(table)):
        yield table.take(slice(row, row + 1))


def residuals_of(table: Table, work: _Residuals) -> list[list[int]]:
    """The clipped residuals of every row, computed one row at a time."""
    return [[int(each) for each in work(one)[:, -1]] for one in alone(table)]


@pytest.mark.parametrize("persons", [0, 9], ids=["records", "persons"])
@FEW
@given(seed=SEEDS, classes=st.integers(2, 4), size=st.sampled_from([1, 40, 2**22 + 1, 10**9]))
def test_the_gradient_sum_is_the_sum_over_rows_in_unbounded_integers(
    persons: int, seed: int, classes: int, size: int
) -> None:
    rng = np.random.default_rng(seed)
    basis, outputs = basis_of(rng, MIXED), 1 if classes == 2 else classes
    table = with_lengths(basis, MIXED.sizes, table_of(rng, MIXED, 40, classes, persons))
    weights = rng.normal(size=(outputs, basis.features)) * 10.0 ** rng.uniform(-2, 3)
    max_grad_norm = float(10.0 ** rng.uniform(-2, 1))
    work = _Residuals(MIXED.sizes, basis.scores(weights), max_grad_norm)
    grid = gradient_grid(size)
    reference, residuals = Reference.of(basis, MIXED.sizes), residuals_of(table, work)
    np.testing.assert_array_equal(
        basis.gradient(table.sum(work), grid), reference.gradient(table, residuals, grid)
    )
    repeats = [1] * 40 if table.repeats is None else table.repeats.tolist()
    limit = Fraction(max_grad_norm) ** 2 * UNIT**4
    for row, own, k in zip(table.rows, residuals, repeats, strict=True):
        squared = sum(r * r for r in own) * sum(each**2 for each in reference.z(row))
        assert k * k * squared <= limit  # in the integers that are added: no margin is left out


@pytest.mark.parametrize(("size", "together"), [(1.0, 6), (3e3, 4), (1e6, 3)])
def test_joined_columns_have_the_sums_of_single_ones(size: float, together: int) -> None:
    rng = np.random.default_rng(0)
    table = table_of(rng, MIXED, 300, 3, 9)
    # Sums of such scores are exact in any order.
    work = _Residuals(MIXED.sizes, rng.integers(-9, 9, (3, sum(MIXED.sizes) + 1)) / 4.0, 0.25)
    blocks = Blocks(3)
    blocks.extend([with_lengths(basis_of(rng, MIXED), MIXED.sizes, table)])
    expected = blocks.sum(work)
    joined = JoinedColumns.of(blocks, MIXED.sizes, size)
    assert blocks.features == len(joined.groups) == together
    np.testing.assert_array_equal(joined.sum(work), expected)
    joined.separate()
    np.testing.assert_array_equal(
        blocks.sum(lambda block: block.rows.astype(np.int64).sum(axis=0)), table.rows.sum(axis=0)
    )
    np.testing.assert_array_equal(blocks.sum(work), expected)


@FEW
@given(seed=SEEDS, classes=st.integers(2, 5))
def test_residuals_are_those_of_the_softmax_shortened_to_the_clipping_norm(seed: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    basis, outputs = basis_of(rng, MIXED), 1 if classes == 2 else classes
    table = with_lengths(basis, MIXED.sizes, table_of(rng, MIXED, 10, classes, 4))
    weights = rng.normal(size=(outputs, basis.features))
    found = residuals_of(table, _Residuals(MIXED.sizes, basis.scores(weights), 0.25))
    reference = Reference.of(basis, MIXED.sizes)
    assert table.repeats is not None
    for row, label, k, own in zip(table.rows, table.labels, table.repeats, found, strict=True):
        z = np.array(reference.z(row)) / UNIT
        scores = weights @ z
        if outputs == 1:
            errors = np.array([1.0 / (1.0 + math.exp(-scores[0])) - label])
        else:
            errors = np.exp(scores - scores.max())
            errors = errors / errors.sum() - (np.arange(classes) == label)
        length = float(np.linalg.norm(errors) * np.linalg.norm(z))
        expected = errors * min(1.0, 0.25 / length) / k * UNIT
        np.testing.assert_allclose(own, expected, rtol=1e-6, atol=1.0)
        assert (np.abs(own) <= np.abs(expected) * (1 + 1e-12)).all()  # towards zero


EXTREME_SHARES = st.lists(
    st.sampled_from([0.0, 1.0, 0.5, 1e-300, 1e-9, 1e-3]) | st.floats(0.0, 1.0), min_size=1, max_size=12
)


@settings(max_examples=80, deadline=None)
@given(
    seed=SEEDS,
    shares=EXTREME_SHARES,
    noise=st.sampled_from([0.0, 1e-300, 1e-9, 0.01, 1.0, 1e6]),
    columns=st.integers(1, 40),
)
@example(seed=0, shares=[0.0], noise=0.0, columns=40)
@example(seed=0, shares=[1.0], noise=0.0, columns=40)
@example(seed=0, shares=[0.0, 1.0], noise=1e-300, columns=3)
def test_lengths_are_upper_bounds_whatever_was_released(
    seed: int, shares: list[float], noise: float, columns: int
) -> None:
    rng = np.random.default_rng(seed)
    widths = rng.integers(1, 4, columns)
    edges = np.cumsum([0, *widths])
    numbers = tuple(place for place in range(columns) if widths[place] < 3 and rng.random() < 0.4)
    parts = tuple((int(first), int(last)) for first, last in itertools.pairwise(edges))
    cells = TableCells(int(edges[-1]), parts, numbers, levels=8, crosses=((0, columns - 1),))
    basis = Basis.of(cells, rng.permutation(np.resize(shares, sum(cells.sizes))), noise, 1e3)
    assert np.abs(basis.entries.data).max() <= 8 * UNIT
    table = with_lengths(basis, cells.sizes, Table(rows_of(rng, cells.sizes, 8), np.zeros(8, np.int64), 2))
    reference = Reference.of(basis, cells.sizes)
    sums = added_scores([*table.rows.T.astype(np.intp)], cells.sizes, basis.squares[None])[0]
    assert table.lengths is not None
    for row, length, total in zip(table.rows, table.lengths, sums, strict=True):
        squared = Fraction(sum(each**2 for each in reference.z(row)), UNIT**2)
        assert squared <= Fraction(float(total))  # before the root is rounded upwards
        assert squared <= Fraction(float(length)) ** 2 <= squared * Fraction(1 + 1e-6) + Fraction(1e-6)


def test_lengths_are_upper_bounds_where_the_sum_over_many_columns_is_rounded() -> None:
    rng, columns = np.random.default_rng(6), 3000
    cells = TableCells(columns, tuple((place, place + 1) for place in range(columns)))
    basis = Basis.of(cells, rng.uniform(1e-6, 1e-5, 2 * columns), 0.0, 1.0)
    rows = (rng.random((20, columns)) < 0.1).astype(np.uint16)
    sums = added_scores([*rows.T.astype(np.intp)], cells.sizes, basis.squares[None])[0]
    assert sums.max() > 2**13
    for row, total in zip(rows, sums, strict=True):
        chosen = [*(2 * np.arange(columns) + row), 2 * columns]
        z = basis.entries[chosen].sum(axis=0)
        assert Fraction(sum(int(each) ** 2 for each in z), UNIT**2) <= Fraction(float(total))


def test_the_released_centre_is_the_mean_of_the_features_and_is_subtracted() -> None:
    """So that the rows' z add up to nothing but the constant, if the counts have no noise."""
    rng = np.random.default_rng(4)
    plain = replace(MIXED, crosses=())
    table = table_of(rng, plain, 500, 2)
    counted = [
        np.bincount(cells, minlength=size) for cells, size in zip(table.rows.T, plain.sizes, strict=True)
    ]
    basis = Basis.of(plain, np.concatenate(counted) / 500, 0.0, 1e3)
    reference = Reference.of(basis, plain.sizes)
    mean = np.mean([reference.z(row) for row in table.rows], axis=0) / UNIT
    np.testing.assert_allclose(mean[:-1], 0.0, atol=1e-5)
    assert mean[-1] == pytest.approx(0.2, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), size=st.sampled_from([1, 2**22 + 1, 10**9, 2**35]))
def test_sums_of_up_to_2_to_the_35_rows_do_not_overflow(data: st.DataObject, size: int) -> None:
    """A feature of all 256 levels of a number, entries of 8, and every sum that so many residuals may have."""
    most = 2**35 * UNIT
    integers = st.integers(-most, most) | st.sampled_from([most, -most, most - 1, 0, -1])
    levels = data.draw(st.lists(integers, min_size=1, max_size=256))
    assume(sum(map(abs, levels)) <= most)
    sums = np.array([[*levels, *[0] * (256 - len(levels)), data.draw(integers)]], np.int64)
    entry = st.integers(-8 * UNIT, 8 * UNIT) | st.sampled_from([8 * UNIT, -8 * UNIT])
    drawn = data.draw(st.lists(entry, min_size=4, max_size=4))
    lines = np.array([[drawn[place % 3], drawn[-place % 2]] for place in range(257)], np.int64)
    from scipy.sparse import csr_array

    basis = Basis(csr_array(lines), np.zeros(257), np.ones(1), np.zeros(1, np.int64))
    found = basis.gradient(sums, gradient_grid(size))[0]
    step = round(gradient_grid(size) * UNIT**2)
    for column, each in zip(lines.T, found, strict=True):
        exact = sum(int(entry) * int(total) for entry, total in zip(column, sums[0], strict=True))
        rounded = max(-(2**53), min(2**53, (exact + step // 2) // step))
        assert Fraction(float(each)) == rounded * Fraction(gradient_grid(size))


# --- Neighbours -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("persons", [0, 12], ids=["records", "persons"])
def test_neighbours_move_the_gradient_sum_by_at_most_the_certified_sensitivity(persons: int) -> None:
    rng = np.random.default_rng(7)
    largest = 0.0
    for classes in (2, 3, 2, 4):
        basis, outputs = basis_of(rng, MIXED), 1 if classes == 2 else classes
        table = with_lengths(basis, MIXED.sizes, table_of(rng, MIXED, 40, classes, persons))
        weights = rng.normal(size=(outputs, basis.features)) * 10.0 ** rng.uniform(-1, 2)
        work = _Residuals(MIXED.sizes, basis.scores(weights), 0.25)
        for size in (40, 10**9):
            grid = gradient_grid(size)
            bound = certified.head_gradient(0.25, coordinates=outputs * basis.features, grid=grid).value
            whole = basis.gradient(table.sum(work), grid)
            owners = np.arange(40) if table.persons is None else table.persons
            for owner in set(owners.tolist()):
                fewer = chosen(table, np.flatnonzero(owners != owner))
                moved = float(np.linalg.norm(whole - basis.gradient(fewer.sum(work), grid)))
                assert moved <= bound
                largest = max(largest, moved / bound if size == 40 else 0.0)
    assert largest > 0.9


@pytest.mark.parametrize("rows", [1, 3, 7, 30, 1000, 4097])
def test_a_person_whose_rows_are_all_alike_moves_sums_by_at_most_what_one_record_does(rows: int) -> None:
    rng = np.random.default_rng(rows)
    basis = basis_of(rng, MIXED)
    one = Table(rows_of(rng, MIXED.sizes, 1), np.ones(1, np.int64), 2, np.array([rows]))
    one = with_lengths(basis, MIXED.sizes, one)
    z = Reference.of(basis, MIXED.sizes).z(one.rows[0])
    work = _Residuals(MIXED.sizes, basis.scores(np.array([z]) * -1e-3), 0.25)  # sure of the wrong class
    ((residual,),) = residuals_of(one, work)
    squares = sum(each**2 for each in z)
    together = (rows * residual) ** 2 * squares
    limit = Fraction(0.25) ** 2 * UNIT**4
    assert Fraction(95, 100) ** 2 * limit <= together <= limit


def counted(table: Table, mu: float, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, float]:
    """The exact counts, and the sensitivity that noise is drawn for."""
    seen: list[tuple[np.ndarray, float]] = []

    def noted(values: Any, *, sensitivity: float, mu: float, source: Any) -> NoisyValues:  # noqa: ARG001
        seen.append((np.asarray(values), sensitivity))
        return NoisyValues(np.asarray(values), 0.0, 0.0)

    monkeypatch.setattr(tables, "release_gaussian", noted)
    released_counts(table, MIXED.sizes, mu, SeededNoise(0))
    return seen[0]


@pytest.mark.parametrize("persons", [0, 12], ids=["records", "persons"])
def test_neighbours_move_the_counts_by_at_most_the_root_of_the_number_of_columns(
    persons: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(8)
    table = table_of(rng, MIXED, 60, 2, persons)
    if table.persons is not None:  # one of them has rows that are all alike
        table.rows[table.persons == table.persons[0]] = table.rows[0]
    whole, sensitivity = counted(table, 1.0, monkeypatch)
    assert (whole * UNIT == np.round(whole * UNIT)).all()
    owners = np.arange(60) if table.persons is None else table.persons
    moved = []
    for owner in set(owners.tolist()):
        fewer, same = counted(chosen(table, np.flatnonzero(owners != owner)), 1.0, monkeypatch)
        assert same == sensitivity
        difference = (whole - fewer) * UNIT
        moved.append(math.sqrt(sum(int(each) ** 2 for each in difference)) / UNIT)
    assert 0.9 * sensitivity < max(moved) <= sensitivity


# --- The place of a row changes nothing -------------------------------------------------------------------------------


@pytest.mark.parametrize("persons", [0, 100], ids=["records", "persons"])
def test_no_sum_depends_on_the_order_of_rows_on_blocks_or_on_threads(
    persons: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(9)
    basis = basis_of(rng, MIXED)
    table = table_of(rng, MIXED, 3000, 3, persons)
    work = _Residuals(MIXED.sizes, basis.scores(rng.normal(size=(3, basis.features))), 0.25)

    def sums(given: Table) -> list[np.ndarray]:
        measured = with_lengths(basis, MIXED.sizes, given)
        exact = counted(given, 1.0, monkeypatch)[0]
        assert measured.lengths is not None
        return [measured.sum(work), exact, measured.lengths]

    expected = sums(table)
    for threads, height in ((1, 2**14), (2, 1), (4, 37), (2, 1000)):
        torch.set_num_threads(threads)
        monkeypatch.setattr(tables, "ROWS_AT_ONCE", height)
        order = rng.permutation(3000)
        *same, lengths = sums(chosen(table, order))
        for one, other in zip((*same, lengths), (*expected[:2], expected[2][order]), strict=True):
            np.testing.assert_array_equal(one, other)


def test_every_row_adds_the_same_whatever_else_is_in_the_table() -> None:
    """Removed, added, repeated and reordered rows, and rows that lie elsewhere in memory."""
    rng = np.random.default_rng(10)
    basis = basis_of(rng, MIXED)
    table = with_lengths(basis, MIXED.sizes, table_of(rng, MIXED, 50, 3))
    work = _Residuals(MIXED.sizes, basis.scores(rng.normal(size=(3, basis.features)) * 9.0), 0.25)
    each = [work(one) for one in alone(table)]
    for rows in (np.arange(1, 50), np.arange(50)[::-1], np.repeat(np.arange(7), 5), np.array([3])):
        part = chosen(table, rows)
        np.testing.assert_array_equal(work(part), sum(each[row] for row in rows))
        transposed = replace(part, rows=np.asfortranarray(part.rows))
        np.testing.assert_array_equal(work(transposed), work(part))


def test_the_same_weights_have_the_same_scores_wherever_they_lie_in_memory() -> None:
    rng = np.random.default_rng(11)
    basis = basis_of(rng, MIXED)
    weights = rng.normal(size=(3, basis.features))
    expected = basis.scores(weights)
    for offset in range(4):
        memory = np.empty(weights.size + offset)
        moved = memory[offset:].reshape(weights.shape)
        moved[:] = weights
        for copy in (moved, np.asfortranarray(moved)):
            np.testing.assert_array_equal(basis.scores(copy), expected)
    rows = rows_of(rng, MIXED.sizes, 20)
    reference = Reference.of(basis, MIXED.sizes)
    direct = weights @ np.array([reference.z(row) for row in rows]).T / UNIT
    columns = [*rows.T.astype(np.intp)]
    np.testing.assert_allclose(added_scores(columns, MIXED.sizes, expected), direct, atol=1e-9)


@pytest.mark.parametrize("width", [3, 256, 2**16 - 1, 2**16])
def test_every_cell_is_kept_in_a_type_that_follows_from_public_numbers(width: int) -> None:
    cells = TableCells(width, ((0, width),))
    rows = np.zeros((3, width), np.float32)
    rows[[0, 1], [0, width - 1]] = 1.0
    found = [
        _with_cells(cells, Table(part, np.zeros(len(part), np.int64), 2)).rows for part in (rows, rows[:1])
    ]
    assert found[0].tolist() == [[0], [width - 1], [width]]
    assert found[0].dtype == found[1].dtype == (np.int32 if width >= 2**16 else np.uint16)


# --- The whole descent ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize("classes", [2, 3])
def test_descending_on_cells_is_gradient_descent_on_the_rows_they_stand_for(
    classes: int, momentum: float
) -> None:
    """Two classes have one output: half of it, with both signs, are the scores."""
    rng = np.random.default_rng(12)
    basis, outputs = basis_of(rng, MIXED), 1 if classes == 2 else classes
    table = with_lengths(basis, MIXED.sizes, table_of(rng, MIXED, 200, classes))
    plan = GradientPlan(steps=8, learning_rate=3.0, max_grad_norm=0.5, momentum=momentum)
    outcome = descend(table, basis, MIXED.sizes, plan, 1e9, 200.0, SeededNoise(0))
    found, rates = tables.class_scores(outcome), tables._rates_and_mus(plan, 1.0)[0]
    reference = Reference.of(basis, MIXED.sizes)
    rows = np.array([reference.z(row) for row in table.rows]) / UNIT
    weights, direction = np.zeros((2, classes, basis.features))
    for rate in rates:
        scores = rows @ weights.T
        errors = np.exp(scores - scores.max(axis=1, keepdims=True))
        errors = errors / errors.sum(axis=1, keepdims=True) - np.eye(classes)[table.labels]
        seen = errors[:, 1:] if outputs == 1 else errors
        norms = np.linalg.norm(seen, axis=1) * np.linalg.norm(rows, axis=1)
        errors *= np.minimum(1.0, 0.5 / norms)[:, None]
        direction = momentum * direction + errors.T @ rows
        weights -= rate / 200.0 * (errors.T @ rows + momentum * direction)
    if outputs == 1:
        shrunk = basis.shrunk(weights[1:] - weights[:1], 200.0, 2.0 * 8 * 3.0) / 2.0
        weights = np.concatenate([-shrunk, shrunk])
    else:
        weights = basis.shrunk(weights, 200.0, 8 * 3.0)
    cells = [*table.rows.T.astype(np.intp)]
    scores = added_scores(cells, MIXED.sizes, found)
    expected = weights @ rows.T
    np.testing.assert_allclose(scores, expected - expected.mean(axis=0), atol=1e-4)
    np.testing.assert_allclose(found.sum(axis=0), 0.0, atol=1e-12)
    assert np.abs(scores).max() > 0.3


def test_what_chance_may_have_added_to_a_column_is_shrunk_the_more_the_fewer_people_there_are() -> None:
    rng = np.random.default_rng(3)
    basis = basis_of(rng, MIXED)
    weights = rng.normal(size=(3, basis.features))
    seen = basis.shrunk(weights, 500.0, 20.0) / weights
    assert (seen[:, -1] == 1.0).all()
    for group in np.unique(basis.groups):
        inside = np.flatnonzero(basis.groups == group)
        chance = [min(1.0 / (0.15 * v), 20.0**2 * 0.15 * v) / 500.0 for v in basis.variances[inside]]
        squares = float((weights[:, inside] ** 2).sum())
        np.testing.assert_allclose(seen[:, inside], squares / (squares + 3 * sum(chance)), rtol=1e-12)
    more = basis.shrunk(weights, 5e6, 20.0) / weights
    assert (more >= seen).all()
    assert more.min() > 0.99
    assert not basis.shrunk(np.zeros((1, basis.features)), 500.0, 20.0).any()


@pytest.mark.parametrize("numbers", [20, 21])
def test_places_of_many_numbers_have_half_of_the_length_of_a_row(numbers: int) -> None:
    parts = tuple((place, place + 1) for place in range(numbers))
    cells = TableCells(numbers, parts, tuple(range(numbers)), levels=32)
    basis = Basis.of(cells, even_shares(cells.sizes), 0.0, 32.0)
    places = basis.groups % 2 == 1
    assert places.sum() == numbers
    share = basis.variances[places].sum() / basis.variances.sum()
    assert share > 0.5 if numbers > 20 else share < 0.1


def test_the_scores_of_few_people_are_shrunk_by_what_the_noise_adds_unless_calibration_is_0() -> None:
    rng = np.random.default_rng(6)
    frame = pd.DataFrame({"age": rng.uniform(0, 9, 400), "job": rng.choice(list("abcd"), 400)})
    frame["y"] = np.where(rng.random(400) < 0.1 + 0.08 * frame["age"], "no", "yes")
    schema = Schema(
        label="y", classes=("no", "yes"), bounds={"age": (0, 9)}, categories={"job": tuple("abcd")}
    )

    def fitted(calibration: float | None) -> PrivateHead:
        settings = HeadSettings(calibration=calibration)
        return PrivateHead(schema=schema, declared_size=400, settings=settings, random_state=2).fit(frame)

    shrunk, plain = fitted(None), fitted(0.0)
    assert not hasattr(shrunk, "scale_")
    assert shrunk.guarantee_.mu == plain.guarantee_.mu
    scale = tables.scale_by_noise(plain.coef_, plain.feature_map_, plain.centre_, plain.noise_)
    assert 0.1 < scale < 0.9
    np.testing.assert_array_equal(shrunk.coef_, plain.coef_ * scale)
    np.testing.assert_array_equal(shrunk.noise_, plain.noise_ * scale)
    assert tables.scale_by_noise(plain.coef_, plain.feature_map_, plain.centre_, plain.noise_ * 0) == 1.0


@FEW
@given(
    mu=st.floats(1e-3, 100.0),
    size=st.sampled_from([None, 100]),
    centring=st.floats(0.0, 0.98),
    moments=st.none() | st.floats(0.0, 0.98),
    calibration=st.none() | st.floats(0.0, 0.98),
)
@example(mu=1.0, size=None, centring=0.975, moments=None, calibration=None)
@example(mu=1.0, size=100, centring=0.0, moments=0.979, calibration=None)
def test_the_parts_of_a_budget_are_never_more_than_the_whole(
    mu: float, size: int | None, centring: float, moments: float | None, calibration: float | None
) -> None:
    assume(centring + (moments or 0.0) + (calibration or 0.0) < 0.98)
    chosen = HeadSettings(centring=centring, second_moments=moments, calibration=calibration)
    head = PrivateHead(mu=mu, declared_size=size, settings=chosen)
    head.size_, head.feature_map_ = 1e9, MIXED
    allowance = head._allowance(20)
    parts = astuple(allowance)
    spent = [Fraction(part) ** 2 for part in parts if part is not None]
    assert Fraction(mu) ** 2 * Fraction(0.999999) < sum(spent) <= Fraction(mu) ** 2
    assert allowance.training > 0.0


# --- Steps with momentum, pairs of columns and weights of classes -----------------------------------------------------


@FEW
@given(
    steps=st.integers(1, 80),
    momentum=st.sampled_from([0.0, 0.5, 0.8, 0.95]),
    mu=st.floats(1e-3, 100.0),
)
def test_every_step_gets_mu_in_proportion_to_what_its_gradient_moves_in_the_end(
    steps: int, momentum: float, mu: float
) -> None:
    rates, mus = tables._rates_and_mus(GradientPlan(steps, 3.0, 0.25, momentum), mu)
    moved = np.zeros(steps)
    for pushed in range(steps):  # one gradient of 1, at one step
        direction = 0.0
        for step, rate in enumerate(rates):
            gradient = float(step == pushed)
            direction = momentum * direction + gradient
            moved[pushed] += rate * (gradient + momentum * direction)
    np.testing.assert_allclose(rates / rates[-1], np.arange(steps, 0, -1))
    np.testing.assert_allclose(moved.mean(), 3.0)
    np.testing.assert_allclose(mus**2, mu**2 * moved / moved.sum())
    spent = sum((Fraction(float(each)) ** 2 for each in mus), Fraction())
    assert spent <= Fraction(mu) ** 2 * weights._STEPS_ROUNDED


def random_outputs(rng: np.random.Generator, cells: TableCells) -> tuple[np.ndarray, np.ndarray]:
    shares = np.concatenate([rng.dirichlet(np.ones(size)) for size in cells.sizes])
    return rng.normal(size=(3, sum(cells.sizes) + 1)), shares


def test_centred_effects_average_0_and_leave_every_score_as_it_is() -> None:
    rng = np.random.default_rng(13)
    outputs, shares = random_outputs(rng, MIXED)
    found = tables.centred(outputs, MIXED, shares)
    # Every row there can be: the cells of the crosses follow from those of the columns.
    alone = replace(MIXED, crosses=())
    every = np.array([*itertools.product(*map(range, alone.sizes))], np.uint16)
    rows = [*MIXED.with_crosses(every).T.astype(np.intp)]
    np.testing.assert_allclose(
        added_scores(rows, MIXED.sizes, found), added_scores(rows, MIXED.sizes, outputs), atol=1e-12
    )
    edges = np.cumsum([0, *MIXED.sizes])
    for first, last in itertools.pairwise(edges):
        np.testing.assert_allclose(found[:, first:last] @ shares[first:last], 0.0, atol=1e-12)
    for place, (one, other) in enumerate(MIXED.crosses, start=len(MIXED.parts)):
        weights_of = [tables._coarse_shares(MIXED, shares, position) for position in (one, other)]
        block = found[:, edges[place] : edges[place + 1]].reshape(3, len(weights_of[0]), len(weights_of[1]))
        # What the mean over all cells of the cross took away is the same for all rows and columns of it.
        for means in (block @ weights_of[1], np.einsum("oij,i->oj", block, weights_of[0])):
            np.testing.assert_allclose(means - means[:, :1], 0.0, atol=1e-12)


def test_shares_that_are_all_0_leave_effects_finite() -> None:
    outputs, shares = random_outputs(np.random.default_rng(14), MIXED)
    assert np.isfinite(tables.centred(outputs, MIXED, np.zeros_like(shares))).all()


def test_the_pairs_are_those_of_the_columns_whose_effects_vary_most() -> None:
    cells = TableCells(9, tuple((place, place + 1) for place in range(9)), crosses=((8, 2),))
    spread = np.array([0.1, 5.0, 4.0, 0.2, 3.0, 2.0, 1.0, 0.3, 6.0])
    outputs = np.zeros((1, sum(cells.sizes) + 1))
    outputs[0, 0:18:2] = spread
    shares = even_shares(cells.sizes)
    found = tables.with_strongest_pairs(cells, outputs, shares).crosses
    assert found[0] == (8, 2)
    assert {frozenset(pair) for pair in found} == {
        *map(frozenset, itertools.combinations((1, 2, 4, 5, 6, 8), 2))
    }
    assert len(found) == 15
    # An effect that nobody has does not count.
    shares[2:4] = 0.0, 1.0
    assert 1 not in {
        place for pair in tables.with_strongest_pairs(cells, outputs, shares).crosses for place in pair
    }


def test_pairs_with_too_many_cells_are_not_chosen() -> None:
    cells = TableCells(141, ((0, 70), (70, 140), (140, 141)))
    outputs = np.ones((1, sum(cells.sizes) + 1))
    assert tables.with_strongest_pairs(cells, outputs, even_shares(cells.sizes)).crosses == ((0, 2), (1, 2))


def test_pairs_never_make_more_cells_than_a_table_may_have() -> None:
    widths = [2044, 2044, 60, 60]
    edges = np.cumsum([0, *widths]).tolist()
    cells = TableCells(edges[-1], tuple(itertools.pairwise(edges)), crosses=((0, 1),))
    found = tables.with_strongest_pairs(cells, np.ones((1, sum(cells.sizes) + 1)), even_shares(cells.sizes))
    assert found.crosses == ((0, 1), (2, 3))
    full = replace(cells, crosses=((0, 1), (2, 2), (3, 3)))
    assert sum(full.sizes) + 61 * 61 > MOST_CELLS
    same = tables.with_strongest_pairs(full, np.ones((1, sum(full.sizes) + 1)), even_shares(full.sizes))
    assert same.crosses == full.crosses


def test_cells_of_pairs_are_those_of_a_map_that_had_them_from_the_start() -> None:
    rng = np.random.default_rng(15)
    later = replace(MIXED, crosses=(*MIXED.crosses, (0, 1), (2, 3)))
    records = rng.random((200, 7)).astype(np.float32)
    records[:, 2:6] = rng.random((200, 4)) < 0.4
    np.testing.assert_array_equal(later.with_crosses(MIXED.transform(records)), later.transform(records))


def test_shares_of_pairs_are_products_of_the_columns_shares() -> None:
    shares = np.concatenate([np.random.default_rng(16).dirichlet(np.ones(size)) for size in MIXED.sizes])
    later = replace(MIXED, crosses=(*MIXED.crosses, (1, 2)))
    found = tables.with_shares_of_pairs(later, shares)
    np.testing.assert_array_equal(found[: len(shares)], shares)
    number, categories = shares[17:34], shares[34:38]
    levels = [*number[:16].reshape(8, 2).sum(axis=1), number[16]]
    np.testing.assert_allclose(found[len(shares) :], np.outer(levels, categories).ravel())


def exclusive_or(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two numbers that say nothing alone, three that say nothing at all, and a class that is rare by a fifth."""
    rng = np.random.default_rng(seed)
    rows = rng.random((count, 5)).astype(np.float32)
    return rows, ((rows[:, 0] > 0.5) ^ (rows[:, 3] > 0.5)).astype(int)


FIVE = TableCells(5, tuple((place, place + 1) for place in range(5)), tuple(range(5)), levels=16)


def test_pairs_learn_what_no_column_says_alone_at_the_same_guarantee() -> None:
    rows, labels = exclusive_or(12_000, 17)
    heads = [
        PrivateHead(
            3.0,
            features=FIVE,
            classes=(0, 1),
            declared_size=10_000,
            random_state=0,
            settings=HeadSettings(pairs=pairs),
        ).fit(rows[:10_000], labels[:10_000])
        for pairs in (False, True)
    ]
    alone, paired = (head.score(rows[10_000:], labels[10_000:]) for head in heads)
    assert alone < 0.6
    assert paired > 0.85
    assert heads[1].guarantee_.mu == heads[0].guarantee_.mu
    assert len(heads[1].feature_map_.crosses) == 10


@pytest.mark.parametrize("classes", [2, 3])
def test_a_head_with_pairs_has_the_same_bits_whatever_the_order_of_rows(classes: int) -> None:
    rng = np.random.default_rng(18)
    rows, labels = rng.random((400, 5)).astype(np.float32), rng.integers(classes, size=400)
    chosen = HeadSettings(pairs=True, class_weight={0: 2.0}, calibration=0.1)
    head = PrivateHead(
        features=FIVE, classes=range(classes), declared_size=400, random_state=3, settings=chosen
    )
    order = rng.permutation(400)
    first = head.fit(rows, labels).coef_
    np.testing.assert_array_equal(head.fit(rows[order], labels[order]).coef_, first)


@pytest.mark.parametrize("persons", [0, 9], ids=["records", "persons"])
def test_weights_of_classes_never_make_a_residual_longer_than_the_clipping_norm(persons: int) -> None:
    rng = np.random.default_rng(19)
    for classes in (2, 3):
        basis, outputs = basis_of(rng, MIXED), 1 if classes == 2 else classes
        table = with_lengths(basis, MIXED.sizes, table_of(rng, MIXED, 40, classes, persons))
        scores = basis.scores(rng.normal(size=(outputs, basis.features)))
        weighted = _Residuals(MIXED.sizes, scores, 0.25, np.array([1e-3, 1.0, 0.5][:classes]))
        reference, repeats = Reference.of(basis, MIXED.sizes), table.repeats
        plain = residuals_of(table, _Residuals(MIXED.sizes, scores, 0.25))
        for row, own, usual in zip(range(40), residuals_of(table, weighted), plain, strict=True):
            squared = sum(r * r for r in own) * sum(each**2 for each in reference.z(table.rows[row]))
            assert squared <= (Fraction(0.25) / (1 if repeats is None else int(repeats[row]))) ** 2 * UNIT**4
            if table.labels[row] == 0:  # a thousandth of what it is without weights
                np.testing.assert_allclose(own, np.array(usual) / 1000, atol=1.0)


@pytest.mark.parametrize("features", [FIVE, "identity"], ids=["cells", "array"])
def test_balanced_classes_count_the_same_and_their_sizes_are_paid_for(features: Any) -> None:
    rng = np.random.default_rng(20)
    rows = rng.random((20_000, 5)).astype(np.float32)
    labels = (rng.random(20_000) < 0.1 * rows[:, 0]).astype(int)
    facts = {"features": features, "classes": (0, 1), "declared_size": 20_000, "random_state": 0}
    usual = PrivateHead(**facts).fit(rows, labels)
    balanced = PrivateHead(**facts, settings=HeadSettings(class_weight="balanced")).fit(rows, labels)
    assert usual.predict(rows).mean() < 0.01
    assert 0.3 < balanced.predict(rows).mean() < 0.7
    assert balanced.guarantee_.mu == pytest.approx(usual.guarantee_.mu, rel=1e-9)
    spent = balanced.guarantee_.parameters
    assert spent["mu_class_sizes"] == pytest.approx(0.1 * usual.guarantee_.mu, rel=1e-6)
    (common, rare), sizes = spent["class_weights"], np.bincount(labels)
    assert rare == 1.0
    # The noise in a size has standard deviation 1/mu = 37: eight of them, below 1e-14.
    assert abs(common * sizes[0] - sizes[1]) < 8 / spent["mu_class_sizes"] * 1.1


def test_a_class_without_anybody_counts_a_hundred_times_as_much_as_with_even_sizes() -> None:
    table = Table(np.zeros((50, 1), np.uint16), np.zeros(50, np.int64), 2)
    found, mean = tables.released_class_weights(table, 50.0, 1e6, SeededNoise(0))
    np.testing.assert_allclose(found, [0.25 / 50.0, 1.0], rtol=1e-3)
    assert mean == pytest.approx(0.5 / 50.25, rel=1e-3)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ("heavy", "class_weight must be 'balanced'"),
        ({0: -1.0}, r"class_weight\[0\]"),
        ({0: float("nan")}, r"class_weight\[0\]"),
    ],
)
def test_wrong_weights_of_classes_are_errors(weight: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        HeadSettings(class_weight=weight)


def test_weights_of_classes_that_were_changed_after_their_check_are_errors() -> None:
    rows, labels = exclusive_or(50, 0)
    stated = {0: 1.0, 1: 1.0}
    chosen = HeadSettings(class_weight=stated)
    stated[0] = -50.0
    assert chosen.class_weight == {0: 1.0, 1: 1.0}
    changed: Any = chosen.class_weight
    changed[0] = -50.0
    with pytest.raises(InvalidInput, match="class_weight must have positive numbers"):
        PrivateHead(classes=(0, 1), settings=chosen).fit(rows, labels)


def test_weights_of_classes_name_classes_and_need_the_gradient_method() -> None:
    rows, labels = exclusive_or(50, 0)
    chosen = HeadSettings(class_weight={2: 1.0})
    with pytest.raises(InvalidInput, match="class_weight names 2"):
        PrivateHead(features=FIVE, classes=(0, 1), settings=chosen).fit(rows, labels)
    with pytest.raises(InvalidInput, match="class_weight requires method='gradient'"):
        PrivateHead(classes=(0, 1), method="output", settings=chosen).fit(rows, labels)

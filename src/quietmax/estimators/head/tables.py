"""Training a head on a table from the cells of its rows: scores by looking up, sums as integer histograms.

The score of a row is a sum of one number per column, looked up by the row's cell (THEORY 3.14). Training sees a row as
`z = D (B' e - c)`: e are the indicators of its cells, B turns cells into features (`Basis`), c is the released mean of
the features, and D the released scale. All entries of `D B` and `D c` are integers in units of 2^-20, like the clipped
residuals r, so the sum of `r z'` follows exactly from two integer sums over rows: of r in each cell, and of r.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quietmax.errors import InvalidInput
from quietmax.estimators.blocks import Floats, Labels, Table
from quietmax.estimators.head.exact_sums import (
    _SHORTENED,
    _UNIT,
    BITS,
    ExactSum,
    Rows,
    _released,
    _repeatable_exp,
    gradient_grid,
    on_grid,
    probabilities,
)
from quietmax.estimators.head.weights import (
    BIAS,
    GradientPlan,
    _gradient_sensitivity,
    added_scores,
)
from quietmax.models.features.cells import LEVELS, TableCells
from quietmax.noise.release import release_gaussian
from quietmax.noise.sources import NoiseSource

if TYPE_CHECKING:
    from scipy.sparse import csr_array

ROWS_AT_ONCE = 2**14
_LARGEST_ENTRY = 8.0
"""Entries of a basis are at most this, so that its products with sums of up to 2^35 rows fit into 63 bits."""
_HALF_BITS = 24
_LENGTH_MARGIN = 2.0**-40
_COUNT_FLOOR = 4.0
"""Scales allow for this many standard deviations of the noise in a released count."""
_CLEAR_COUNT = 2.0
"""A released count below this many standard deviations of its noise says nothing about where the numbers are."""
_LEVEL_DECAY = 0.6
"""Each halving of the intervals has features smaller by this factor."""
_INTERVALS, PEOPLE_PER_INTERVAL = (32, 16, 8), 5.0
"""A number has the largest of these numbers of intervals that is at most `mu N / 5`, per number in the table."""
_LEVELS_FROM = 256.0
"""From that `mu N / 5` on, every level also has a feature of its own: some values of a number stand for themselves."""
_LEVELS_PER_COUNT = 4.0
_PLAIN, _NUMBER, _INTERVAL = range(
    3
)  # kinds of features: of categories, of a number itself, of its intervals
_SCALE_POWER = 0.35
"""A feature with the second moment v is multiplied by `v^-0.35`: between no scaling and equal variances."""


def levels_for(size: float, mu_counts: float | None, columns: int) -> int:
    """Return into how many levels numbers are divided: the more, the clearer the released counts will be."""
    if mu_counts is None:
        return LEVELS[-1]
    clear = size * mu_counts / math.sqrt(columns)
    return next((levels for levels in LEVELS if clear >= _LEVELS_PER_COUNT * math.sqrt(levels)), LEVELS[-1])


# --- Counts -----------------------------------------------------------------------------------------------------------


def released_counts(
    table: Rows, sizes: tuple[int, ...], mu: float, source: NoiseSource
) -> tuple[Floats, float]:
    """Release how many records or persons are in each cell, with noise; also return the noise's standard deviation.

    A record adds 1 to one cell of each of m columns, and a person's k rows add 1/k each: at most sqrt(m) in L2.
    """

    def counts(block: Table) -> NDArray[np.int64]:
        total = np.zeros(sum(sizes), np.int64)
        for part in _parts(block):
            weights = np.full(part.stop - part.start, _UNIT)
            if block.repeats is not None:
                weights = np.trunc(weights / block.repeats[part])
            total += _histogram(_columns(block, part), sizes, weights)
        return total

    exact = table.sum(counts) / _UNIT
    sensitivity = math.sqrt(len(sizes)) * (1 + 2.0**-40)
    return release_gaussian(exact, sensitivity=sensitivity, mu=mu, source=source).values, sensitivity / mu


def _parts(block: Table) -> Iterator[slice]:
    for start in range(0, len(block), ROWS_AT_ONCE):
        yield slice(start, min(start + ROWS_AT_ONCE, len(block)))


def _columns(block: Table, part: slice) -> list[NDArray[np.intp]]:
    """Return the cells of some rows, column by column."""
    return [*np.ascontiguousarray(block.rows[part].T).astype(np.intp)]


def _histogram(columns: list[NDArray[np.intp]], sizes: tuple[int, ...], weights: Floats) -> NDArray[np.int64]:
    """Sum integer weights in each cell; exact, as all sums are below 2^53."""
    sums = [np.bincount(cells, weights, size) for cells, size in zip(columns, sizes, strict=True)]
    return np.concatenate(sums).astype(np.int64)


# --- The basis --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Basis:
    """The features of every cell, scaled and centred: `z = sum of a row's entries - centre`, and a constant."""

    entries: csr_array  # (cells, features) integers in units of 2^-20
    centre: NDArray[np.int64]  # (features,) in the same units
    lengths: Floats  # What each cell adds to the squared length of z
    constant: float  # What every row has of the squared length, with a margin for rounding

    @property
    def features(self) -> int:
        """The number of features, with the constant one."""
        return len(self.centre) + 1

    @classmethod
    def of(cls, cells: TableCells, shares: Floats, noise: float, per_number: float) -> Basis:
        """Compute a basis from the released shares of people in each cell and the noise in these."""
        entries, heights, kinds = _features_of(cells, shares, noise, per_number)
        moments = (entries * entries).T @ shares
        floored = np.maximum(moments + _COUNT_FLOOR * noise * heights, np.finfo(np.float64).tiny)
        factors = floored**-_SCALE_POWER
        factors[kinds == _NUMBER] = np.median(factors[kinds == _PLAIN]) if (kinds == _PLAIN).any() else 1.0
        factors /= math.sqrt(max(float((factors**2 * moments).sum()), 1e-12))
        scaled = entries.multiply(factors[None, :]).tocsr()
        scaled.data = np.trunc(np.clip(scaled.data, -_LARGEST_ENTRY, _LARGEST_ENTRY) * _UNIT) / _UNIT
        centre = on_grid(np.clip(scaled.T @ shares, -_LARGEST_ENTRY, _LARGEST_ENTRY))
        squares = np.asarray((scaled * scaled).sum(axis=1)).ravel()
        lengths = squares - 2.0 * (scaled @ centre)
        constant = float(centre @ centre) + BIAS**2
        margin = _LENGTH_MARGIN * (constant + len(cells.sizes) * float(np.abs(lengths).max()))
        scaled.data *= _UNIT
        return cls(scaled.astype(np.int64), (centre * _UNIT).astype(np.int64), lengths, constant + margin)

    def scores(self, weights: Floats) -> tuple[Floats, Floats]:
        """Return what each cell adds to the scores of weights (outputs, features), and the scores of no cell."""
        linear = weights[:, :-1].T
        constant = weights[:, -1] * float(on_grid(np.array(BIAS))) - (self.centre / _UNIT) @ linear
        return (self.entries / _UNIT) @ linear, constant

    def gradient(self, sums: NDArray[np.int64], grid: float) -> Floats:
        """Return the sum of `r z'` on a grid: exact, from the sums of r in each cell and, last, of all r."""
        columns = sums.T  # (cells + 1, outputs)
        parts = []
        for half in (columns >> _HALF_BITS, columns & (2**_HALF_BITS - 1)):
            inner = self.entries.T @ half[:-1] - np.outer(self.centre, half[-1])
            bias = int(on_grid(np.array(BIAS)) * _UNIT) * half[-1:]
            parts.append(np.concatenate([inner, bias]).T)
        high, low = parts
        carried = low + ((high & 255) << _HALF_BITS)
        return _released(ExactSum(high >> 8, carried), 2 * BITS, grid)


def _features_of(
    cells: TableCells, shares: Floats, noise: float, per_number: float
) -> tuple[csr_array, Floats, NDArray[np.int64]]:
    """Return the features of all cells, the height of each, and its kind."""
    from scipy.sparse import block_diag, csr_array, eye_array

    blocks: list[Any] = []
    kinds: list[int] = []
    start = 0
    for position, size in enumerate(cells.sizes):
        if position in cells.numbers:
            first, last = cells.parts[position]
            block = _number_features(shares[start : start + cells.levels], noise, per_number)
            kinds += [_NUMBER] + [_INTERVAL] * (block.shape[1] - 1)
            if last - first == 2:  # values may be missing
                block = block_diag([block, np.ones((1, 1))])
                kinds.append(_INTERVAL)
            else:
                block = csr_array(
                    (block.data, block.indices, [*block.indptr, block.nnz]), (size, block.shape[1])
                )
        else:
            # The last cell of a column says that it is none of its indicators: it has no feature.
            block = eye_array(size, size - (position < len(cells.parts)))
            kinds += [_PLAIN] * block.shape[1]
        blocks.append(block)
        start += size
    entries = csr_array(block_diag(blocks, format="csr"))
    return entries, np.asarray(abs(entries).max(axis=0).todense()).ravel(), np.array(kinds)


def _number_features(shares: Floats, noise: float, per_number: float) -> csr_array:
    """Return the features of a number's levels: its place, nested intervals, and with many people each level.

    The place of a level is the mean of its number and of the released share of people below it.
    """
    from scipy.sparse import csr_array, eye_array, hstack

    levels = len(shares)
    clear = np.where(shares > _CLEAR_COUNT * noise, shares, 0.0)
    clear = clear / clear.sum() if clear.any() else np.full(levels, 1.0 / levels)
    mixed = (clear + 1.0 / levels) / 2.0
    places = np.cumsum(mixed) - mixed / 2.0
    features = [csr_array((2.0 * places - 1.0)[:, None])]
    finest = next((count for count in _INTERVALS if count <= per_number), 0)
    count, height = 2, 1.0
    while count <= finest:
        inside = np.minimum((places * count).astype(np.int64), count - 1)
        features.append(_indicators(inside, count, height))
        count, height = 2 * count, height * _LEVEL_DECAY
    if per_number >= _LEVELS_FROM:
        features.append(csr_array(eye_array(levels)))
    return csr_array(hstack(features, format="csr"))


def _indicators(positions: NDArray[np.int64], count: int, height: float) -> csr_array:
    from scipy.sparse import csr_array

    rows = np.flatnonzero(positions >= 0)
    return csr_array((np.full(len(rows), height), (rows, positions[rows])), (len(positions), count))


# --- The gradient method ----------------------------------------------------------------------------------------------


def with_lengths(basis: Basis, sizes: tuple[int, ...], block: Table) -> Table:
    """Compute an upper bound on the length of every row's z."""
    lengths = np.empty(len(block), np.float32)
    for part in _parts(block):
        looked_up, constant = basis.lengths[:, None], np.array([basis.constant])
        squares = added_scores(_columns(block, part), sizes, looked_up, constant)[0]
        # The margin covers the rounding; that to 24 bits is upwards.
        lengths[part] = np.nextafter(np.sqrt(squares).astype(np.float32), np.float32(np.inf))
    return replace(block, lengths=lengths)


def descend(
    table: Rows,
    basis: Basis,
    sizes: tuple[int, ...],
    plan: GradientPlan,
    step_mus: Floats,
    size: float,
    source: NoiseSource,
) -> Floats:
    """Take noisy gradient steps; return what each cell, and last no cell, adds to the scores of the classes.

    Two classes have one output, the difference of their scores.
    """
    outputs = 1 if table.classes == 2 else table.classes
    grid = gradient_grid(size)
    sensitivity = _gradient_sensitivity(plan.max_grad_norm, outputs, basis.features, grid).value
    weights = np.zeros((outputs, basis.features))
    for step, mu in enumerate(step_mus):
        sums = table.sum(_Residuals(sizes, *basis.scores(weights), plan.max_grad_norm))
        noisy = release_gaussian(
            basis.gradient(sums, grid), sensitivity=sensitivity, mu=float(mu), source=source
        ).values
        rate = plan.rate(step) * (2.0 if outputs == 1 else 1.0)  # both scores move
        weights = weights - (rate / size) * noisy
        if not np.abs(weights).max() < 2.0**200:
            raise InvalidInput(
                f"Training diverged: learning_rate {plan.learning_rate:g} is too large for this head."
            )
    looked_up, constant = basis.scores(weights)
    found = np.concatenate([looked_up, constant[None, :]]).T
    if outputs == 1:
        found = np.concatenate([-found / 2.0, found / 2.0])
    return np.asarray(found - found.mean(axis=0))


@dataclass(frozen=True, eq=False)
class _Residuals:
    """Sums the clipped residuals of a block, as integers: (outputs, cells + 1), in each cell and in all."""

    sizes: tuple[int, ...]
    looked_up: Floats  # (cells, outputs)
    constant: Floats  # (outputs,)
    max_grad_norm: float

    def __call__(self, block: Table) -> NDArray[np.int64]:
        assert block.lengths is not None
        outputs = len(self.constant)
        total = np.zeros((outputs, sum(self.sizes) + 1), np.int64)
        for part in _parts(block):
            columns = _columns(block, part)
            errors = _errors(
                added_scores(columns, self.sizes, self.looked_up, self.constant), block.labels[part]
            )
            squares = np.zeros(errors.shape[1])
            for error in errors:
                squares += error * error
            lengths = np.sqrt(squares) * block.lengths[part]
            limit = self.max_grad_norm * _SHORTENED
            factors = limit / np.maximum(lengths, limit)
            if block.repeats is not None:
                factors = factors / block.repeats[part]
            for output, residuals in enumerate(np.trunc(errors * (factors * _UNIT))):
                total[output, :-1] += _histogram(columns, self.sizes, residuals)
                total[output, -1] += int(residuals.sum())
        return total


def cell_scores(weights: Floats, sizes: tuple[int, ...], block: Table, part: slice) -> Floats:
    """Return the scores of some rows, one line per class."""
    return added_scores(_columns(block, part), sizes, weights[:, :-1].T, weights[:, -1])


def _errors(scores: Floats, labels: Labels) -> Floats:
    """Return `p - y` for one output, and `p - e_y` for several."""
    if len(scores) == 1:
        smaller = _repeatable_exp(-np.abs(scores[0]))
        errors = np.where(scores[0] >= 0.0, 1.0, smaller) / (1.0 + smaller)
        errors -= labels
        return errors[None, :]
    errors = probabilities(scores)
    errors[labels, np.arange(len(labels))] -= 1.0
    return errors

"""Training a head on a table from the cells of its rows: scores by looking up, sums as integer histograms.

The score of a row is a sum of one number per column (THEORY 3.14). Training sees a row as `z = D (B' e - c)`: e are the
indicators of its cells, B turns cells into features (`Basis`), c is the released mean of the features, and D the
released scale. All entries of `D B` and `D c` are integers in units of 2^-20, like the clipped residuals r, so the sum
of `r z'` follows exactly from two integer sums over rows: of r in each cell, and of r. Counts and residuals are rounded
towards zero, each from its row alone, and added as integers of at most 2^55 for 2^35 rows. Clipping uses an upper bound
on the length of z. Where a person has k rows, each of them counts 1/k.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, combinations, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quietmax.errors import InvalidInput
from quietmax.estimators.blocks import Blocks, Floats, Labels, Summed, Table
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
    LARGEST_CLASS_WEIGHT,
    PAIRED_COLUMNS,
    GradientPlan,
    _gradient_sensitivity,
    added_scores,
)
from quietmax.models.features.tabular import LEVELS, MOST_CELLS, TableCells
from quietmax.noise.release import release_gaussian
from quietmax.noise.sources import NoiseSource

if TYPE_CHECKING:
    from scipy.sparse import csr_array

ROWS_AT_ONCE = 2**14
_LARGEST_ENTRY = 8.0
"""Entries of a basis are at most this, so that its products with sums of up to 2^35 rows fit into 63 bits."""
_HALF_BITS = 24
_LENGTH_MARGIN = 2.0**-52
"""A sum of m numbers is off by less than this, times m, of the sum of their absolute values."""
_EXACT = 2**53
_COUNT_FLOOR = 4.0
"""Scales allow for this many standard deviations of the noise in a released count."""
_CLEAR_COUNT = 2.0
"""A released count below this many standard deviations of its noise says nothing about where the numbers are."""
_MOST_JOINT, _PEOPLE_PER_JOINT = 2**11, 16
"""Columns are taken together while they have at most so many joint cells, and so many people for each of these."""
_SMALLEST_VARIANCE = 1e-9
_LEVEL_DECAY = 0.6
"""Each halving of the intervals has features smaller by this factor."""
_INTERVALS, PEOPLE_PER_INTERVAL = (32, 16, 8), 5.0
"""A number has the largest of these numbers of intervals that is at most `mu N / 5`, per number in the table."""
_LEVELS_FROM = 256.0
"""From that `mu N / 5` on, every level also has a feature of its own: some values of a number stand for themselves."""
_LEVELS_PER_COUNT = 4.0
_CROSS_FACTOR = 0.4
"""Features of crosses are smaller by this factor: a pair mostly says little beside its two columns."""
_LARGEST_PAIR = 2**12
"""Pairs of columns with more cells than this are not chosen."""
_WIDE = 20
"""In tables of more numbers, the places of numbers have at least half of what numbers add to the squared length."""
_RESIDUAL_VARIANCE = 0.15
"""About how much `p - y` varies; it is at most 0.25."""
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
    table: Summed, sizes: tuple[int, ...], mu: float, source: NoiseSource
) -> tuple[Floats, float]:
    """Release the people in each cell, moved by at most sqrt(columns) in L2; also return the noise's deviation."""

    def counts(block: Table) -> NDArray[np.int64]:
        total = np.zeros(sum(sizes), np.int64)
        for part in _parts(block):
            weights = np.full(part.stop - part.start, _UNIT)
            if block.repeats is not None:
                weights = np.trunc(weights / block.repeats[part])
            total += _histogram(_columns(block, part), sizes, weights)
        return total

    exact = np.minimum(table.sum(counts), _EXACT) / _UNIT
    sensitivity = math.sqrt(len(sizes)) * (1 + 2.0**-40)
    return release_gaussian(exact, sensitivity=sensitivity, mu=mu, source=source).values, sensitivity / mu


def released_class_weights(table: Rows, size: float, mu: float, source: NoiseSource) -> tuple[Floats, float]:
    """Return the weights, at most 1, with which all classes count the same by noisy sizes, and their mean."""

    def sizes(block: Table) -> NDArray[np.int64]:
        shares = 1.0 if block.repeats is None else 1.0 / block.repeats
        weights = np.broadcast_to(np.trunc(_UNIT * shares), len(block))
        return np.bincount(block.labels, weights, block.classes).astype(np.int64)

    exact = np.minimum(table.sum(sizes), _EXACT) / _UNIT
    noisy = release_gaussian(exact, sensitivity=1.0, mu=mu, source=source).values
    found = np.clip(noisy, size / (table.classes * LARGEST_CLASS_WEIGHT), size)
    weights = found.min() / found
    return weights, float(weights @ found / found.sum())


def _parts(block: Table) -> Iterator[slice]:
    for start in range(0, len(block), ROWS_AT_ONCE):
        yield slice(start, min(start + ROWS_AT_ONCE, len(block)))


def _columns(block: Table, part: slice) -> list[NDArray[np.intp]]:
    return [*np.ascontiguousarray(block.rows[part].T).astype(np.intp)]


def _histogram(columns: list[NDArray[np.intp]], sizes: tuple[int, ...], weights: Floats) -> NDArray[np.int64]:
    """Sum integer weights in each cell; exact, as all sums are below 2^53."""
    sums = [np.bincount(cells, weights, size) for cells, size in zip(columns, sizes, strict=True)]
    return np.concatenate(sums).astype(np.int64)


@dataclass(frozen=True, eq=False)
class JoinedColumns:
    """Rows whose small columns are joined by public numbers: fewer cells are looked up and added in a step."""

    table: Blocks
    sizes: tuple[int, ...]  # Of each column
    groups: tuple[tuple[int, ...], ...]  # Which columns are together

    @classmethod
    def of(cls, table: Blocks, sizes: tuple[int, ...], size: float) -> JoinedColumns:
        """Join columns while there are few joint cells beside the public number of people."""
        groups: list[tuple[int, ...]] = []
        for position in sorted(range(len(sizes)), key=sizes.__getitem__):
            both = math.prod(sizes[each] for each in (*groups[-1], position)) if groups else math.inf
            if both <= min(_MOST_JOINT, size / _PEOPLE_PER_JOINT):
                groups[-1] += (position,)
            else:
                groups.append((position,))
        table.update(partial(_joined, sizes, tuple(groups)))
        return cls(table, sizes, tuple(groups))

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.table.classes

    def sum(self, work: _Residuals) -> NDArray[np.int64]:
        """Add up the residuals of all rows in each cell, from their sums in each joint cell."""
        columns, shapes = parts_of(self.sizes), [_chosen(self.sizes, group) for group in self.groups]
        parts = [[work.scores[:, columns[each]] for each in group] for group in self.groups]
        scores = np.concatenate([*map(_outer_sums, parts), work.scores[:, -1:]], axis=1)
        joint = tuple(map(math.prod, shapes))
        sums = self.table.sum(replace(work, sizes=joint, scores=scores))
        found = np.empty(work.scores.shape, np.int64)
        found[:, -1] = sums[:, -1]
        for cells, shape, group in zip(parts_of(joint), shapes, self.groups, strict=True):
            together = sums[:, cells].reshape(-1, *shape)
            for axis, each in enumerate(group, start=1):
                others = tuple(other for other in range(1, together.ndim) if other != axis)
                found[:, columns[each]] = together.sum(axis=others)
        return found

    def separate(self) -> None:
        """Give the rows their columns back."""
        self.table.update(partial(_separated, self.sizes, self.groups))


def _joined(sizes: tuple[int, ...], groups: tuple[tuple[int, ...], ...], block: Table) -> Table:
    rows = np.empty((len(block), len(groups)), block.rows.dtype)
    for place, group in enumerate(groups):
        rows[:, place] = np.ravel_multi_index(tuple(block.rows[:, group].T), _chosen(sizes, group))
    return replace(block, rows=rows)


def _separated(sizes: tuple[int, ...], groups: tuple[tuple[int, ...], ...], block: Table) -> Table:
    rows = np.empty((len(block), len(sizes)), block.rows.dtype)
    for place, group in enumerate(groups):
        rows[:, group] = np.transpose(np.unravel_index(block.rows[:, place], _chosen(sizes, group)))
    return replace(block, rows=rows)


def _chosen(sizes: tuple[int, ...], group: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sizes[each] for each in group)


def _outer_sums(parts: list[Floats]) -> Floats:
    total = parts[0]
    for part in parts[1:]:
        total = (total[:, :, None] + part[:, None, :]).reshape(len(total), -1)
    return total


# --- The basis --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Basis:
    """The features of every cell, scaled and centred: z adds up the lines of a row's cells and the last line."""

    entries: csr_array  # (cells + 1, features) integers in units of 2^-20; the last line is minus the centre
    squares: Floats  # (cells + 1,) what each cell, and last every row, adds to a bound on z's squared length
    variances: Floats  # (features - 1,) of the features, by the released shares
    groups: NDArray[np.int64]  # (features - 1,) which of them are shrunk together

    @property
    def features(self) -> int:
        """The number of features; the last one is constant."""
        return int(self.entries.shape[1])

    @classmethod
    def of(cls, cells: TableCells, shares: Floats, noise: float, per_number: float) -> Basis:
        """Compute a basis from the released shares of people in each cell and the noise in these."""
        from scipy.sparse import csr_array, vstack

        features, heights, groups = _features_of(cells, shares, noise, per_number)
        moments = (features * features).T @ shares
        floored = np.maximum(moments + _COUNT_FLOOR * noise * heights, np.finfo(np.float64).tiny)
        factors = floored**-_SCALE_POWER
        places, plain = groups % 2 == 1, ~np.isin(groups // 2, cells.numbers)
        factors[places] = np.median(factors[plain]) if plain.any() else 1.0
        if len(cells.numbers) > _WIDE:
            rest = np.bincount(groups, factors**2 * moments)[groups[places] - 1]
            factors[places] = np.maximum(factors[places], np.sqrt(rest / floored[places]))
        crossed = sum(cells.sizes[len(cells.parts) :])
        factors[len(factors) - crossed :] *= _CROSS_FACTOR
        factors /= math.sqrt(max(float((factors**2 * moments).sum()), 1e-12))
        scaled = features.multiply(factors[None, :]).tocsr()
        scaled.data = on_grid(np.clip(scaled.data, -_LARGEST_ENTRY, _LARGEST_ENTRY))
        centre = on_grid(np.clip(scaled.T @ shares, -_LARGEST_ENTRY, _LARGEST_ENTRY))
        # Exact: a cell has fewer than 32 features, so these are multiples of 2^-40 below 2^13.
        added = np.asarray((scaled * scaled).sum(axis=1)).ravel() - 2.0 * (scaled @ centre)
        last = np.append(-centre, on_grid(np.array(BIAS)))
        constant = math.fsum(last * last)
        columns = len(cells.sizes)
        margin = (columns + 2**12) * _LENGTH_MARGIN * (constant + columns * float(np.abs(added).max()))
        scaled.resize(len(added), len(centre) + 1)
        entries = vstack([scaled, csr_array(last[None])], format="csr") * _UNIT
        variances = np.maximum((scaled * scaled).T @ shares - last**2, _SMALLEST_VARIANCE)[:-1]
        return cls(entries.astype(np.int64), np.append(added, constant + margin), variances, groups)

    def scores(self, weights: Floats) -> Floats:
        """Return what each cell, and last every row, adds to the scores of weights (outputs, features)."""
        return np.ascontiguousarray((self._in_units @ weights.T).T)

    @cached_property
    def _in_units(self) -> csr_array:
        return self.entries / _UNIT

    @cached_property
    def _transposed(self) -> csr_array:
        return self.entries.T.tocsr()

    def shrunk(self, weights: Floats, size: float, reach: float) -> Floats:
        """Multiply the weights of each group by `v / (v + s)`, v their squares and s what chance adds to them."""
        steep = self.variances * _RESIDUAL_VARIANCE
        chance = np.minimum(1.0 / steep, reach**2 * steep) * (len(weights) / size)
        found, added = (
            np.bincount(self.groups, each) for each in (np.square(weights[:, :-1]).sum(axis=0), chance)
        )
        return np.asarray(weights * np.append(found[self.groups] / (found + added)[self.groups], 1.0))

    def gradient(self, sums: NDArray[np.int64], grid: float) -> Floats:
        """Return the sum of `r z'` on a grid: exact, from the sums of r in each cell and, last, of all r.

        The halves of sums over 2^35 rows are below 2^31 and 2^24 units, and at most 2^8 cells have a common feature:
        the products are sums below 2^56. The low part may be negative; `ExactSum` carries what is not below 2^32.
        """
        high, low = (
            (self._transposed @ half.T).T for half in (sums >> _HALF_BITS, sums & (2**_HALF_BITS - 1))
        )
        carried = low + ((high & 255) << _HALF_BITS)
        return _released(ExactSum(high >> 8, carried), 2 * BITS, grid)


def _features_of(
    cells: TableCells, shares: Floats, noise: float, per_number: float
) -> tuple[csr_array, Floats, NDArray[np.int64]]:
    """Return the features of all cells, the height of each, and its group: twice its column's position, or 1 more for
    the place of a number."""
    from scipy.sparse import block_diag, csr_array, eye_array

    blocks: list[Any] = []
    groups: list[int] = []
    for position, (part, size) in enumerate(zip(parts_of(cells.sizes), cells.sizes, strict=True)):
        if position in cells.numbers:
            first, last = cells.parts[position]
            block = _number_features(shares[part][: cells.levels], noise, per_number)
            block = block_diag([block, eye_array(1, last - first - 1)])  # the last cell: a missing value
            groups += [2 * position + 1] + [2 * position] * (block.shape[1] - 1)
        else:
            # The last cell of a column says that it is none of its indicators: it has no feature.
            block = eye_array(size, size - (position < len(cells.parts)))
            groups += [2 * position] * block.shape[1]
        blocks.append(block)
    entries = csr_array(block_diag(blocks, format="csr"))
    return entries, np.asarray(abs(entries).max(axis=0).todense()).ravel(), np.array(groups)


def _number_features(shares: Floats, noise: float, per_number: float) -> csr_array:
    """Return the features of a number's levels: its place, nested intervals, and with many people each level."""
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
        features.append(csr_array(eye_array(count))[inside] * height)
        count, height = 2 * count, height * _LEVEL_DECAY
    if per_number >= _LEVELS_FROM:
        features.append(csr_array(eye_array(levels)))
    return csr_array(hstack(features, format="csr"))


# --- Pairs of columns, and effects ------------------------------------------------------------------------------------


def with_strongest_pairs(cells: TableCells, outputs: Floats, shares: Floats) -> TableCells:
    """Add a cross for each pair of the columns whose released effects vary most, by the released shares."""
    spread = []
    for own in parts_of(cells.sizes)[: len(cells.parts)]:
        part, weights = outputs[:, own], normalised(shares[own])
        spread.append(float((np.square(part - (part @ weights)[:, None]) @ weights).sum()))
    strongest = sorted(np.argsort(spread)[: -PAIRED_COLUMNS - 1 : -1].tolist())
    known, left = {frozenset(pair) for pair in cells.crosses}, MOST_CELLS - sum(cells.sizes)
    pairs = []
    for pair in combinations(strongest, 2):
        size = math.prod(map(cells.crossed_size, pair))
        if frozenset(pair) not in known and size <= min(left, _LARGEST_PAIR):
            pairs.append(pair)
            left -= size
    return replace(cells, crosses=(*cells.crosses, *pairs))


def with_shares_of_pairs(cells: TableCells, shares: Floats) -> Floats:
    """Append the shares of the crosses' cells that are not known, as if the two columns were independent."""
    known = [shares]
    missing = [place for place, part in enumerate(parts_of(cells.sizes)) if part.start >= len(shares)]
    for pair in (cells.crosses[place - len(cells.parts)] for place in missing):
        known.append(np.outer(*(_coarse_shares(cells, shares, position) for position in pair)).ravel())
    return np.concatenate(known)


def centred(outputs: Floats, cells: TableCells, shares: Floats) -> Floats:
    """Move what a cross says of one column into that column, and every column's mean into the constant."""
    found, parts = outputs.copy(), parts_of(cells.sizes)
    for part, pair in zip(parts[len(cells.parts) :], cells.crosses, strict=True):
        one, other = (normalised(_coarse_shares(cells, shares, position)) for position in pair)
        block = found[:, part].reshape(-1, len(one), len(other))
        for position, weights, axis in ((pair[0], other, 2), (pair[1], one, 1)):
            means = np.moveaxis(block, axis, 2) @ weights
            found[:, parts[position]] += means[:, cells.coarse(position)]
            block -= np.expand_dims(means, axis)
    for part in parts:
        means = found[:, part] @ normalised(shares[part])
        found[:, part] -= means[:, None]
        found[:, -1] += means
    return found


def score_noise(plan: GradientPlan, sensitivity: float, mu: float, size: float, classes: int) -> float:
    """Return an upper bound on the standard deviation of all noise together, in a weight of the scores of one class.

    With the rates and mu_t of `_rates_and_mus`, the squares of the steps' noise add up to that of `eta S T / (mu N)`.
    With more classes than two, their mean is subtracted.
    """
    whole = plan.learning_rate * sensitivity * plan.steps / (mu * size)
    return whole if classes == 2 else whole * math.sqrt(1.0 - 1.0 / classes)


def effect_noise(basis: Basis, cells: TableCells, shares: Floats, noise: float) -> Floats:
    """Return the standard deviation of the noise in each effect, as `centred` returns them, and last in the constant.

    An effect is a sum of lines of the basis times weights with independent noise; lines of crosses are orthogonal.
    """
    lines = basis.entries[:-1].astype(np.float64)
    constant = basis.entries[-1:].toarray()[0].astype(np.float64)
    variances = np.empty(len(shares) + 1)
    parts = parts_of(cells.sizes)
    squares = np.asarray((lines * lines).sum(axis=1)).ravel()
    for part in parts[: len(cells.parts)]:
        entries, weights = lines[part], normalised(shares[part])
        mean = entries.T @ weights
        variances[:-1][part] = squares[part] - 2.0 * (entries @ mean) + mean @ mean
        constant += mean
    for part, pair in zip(parts[len(cells.parts) :], cells.crosses, strict=True):
        people = [normalised(_coarse_shares(cells, shares, position)) for position in pair]
        own = squares[part].reshape(len(people[0]), len(people[1]))
        for axis, position in enumerate(pair):
            mean_of_others = np.moveaxis(own, axis, 0) @ np.square(people[1 - axis])
            added = _less_mean(mean_of_others, people[axis])
            variances[:-1][parts[position]] += added[cells.coarse(position)]
        both = _less_mean(_less_mean(own, people[0]).T, people[1]).T
        variances[:-1][part] = both.ravel()
        constant += lines[part].T @ np.outer(*people).ravel()
    variances[-1] = constant @ constant
    return np.sqrt(np.maximum(variances, 0.0)) * (noise / _UNIT)


def scale_by_noise(weights: Floats, cells: TableCells, shares: Floats, noise: Floats) -> float:
    """Return `v / (v + n / 2)`: v the variance of the scores, n that of the noise in them, an upper bound."""
    people = np.concatenate([normalised(shares[part]) for part in parts_of(cells.sizes)])
    found = float((np.square(weights[:, :-1]) @ people).sum())
    added = float(np.square(noise[:-1]) @ people) * len(weights)
    return found / (found + added / 2.0) if found > 0.0 else 1.0


def _less_mean(variances: Floats, people: Floats) -> Floats:
    """Return the variances of independent values, given along the first axis, less their mean over people."""
    own: Floats = (variances.T * (1.0 - 2.0 * people)).T
    return own + np.square(people) @ variances


def class_scores(outputs: Floats) -> Floats:
    """Return what each cell adds to the scores of the classes, from what it adds to the outputs; they add up to 0."""
    if len(outputs) == 1:
        outputs = np.concatenate([-outputs / 2.0, outputs / 2.0])
    return np.asarray(outputs - outputs.mean(axis=0))


def parts_of(sizes: Sequence[int]) -> list[slice]:
    """Return the range of each column's cells."""
    return [slice(start, end) for start, end in pairwise([0, *accumulate(sizes)])]


def _coarse_shares(cells: TableCells, shares: Floats, position: int) -> Floats:
    own = shares[parts_of(cells.sizes)[position]]
    return np.bincount(cells.coarse(position), own).astype(np.float64)


def normalised(shares: Floats) -> Floats:
    """Return the shares of one column so that they add up to 1."""
    return shares / shares.sum() if shares.sum() > 0.0 else np.full(len(shares), 1.0 / len(shares))


# --- The gradient method ----------------------------------------------------------------------------------------------


def with_lengths(basis: Basis, sizes: tuple[int, ...], block: Table) -> Table:
    """Compute an upper bound on the length of every row's z."""
    lengths = np.empty(len(block), np.float32)
    for part in _parts(block):
        squares = added_scores(_columns(block, part), sizes, basis.squares[None])[0]
        # The margin covers the rounding of the sum. The next number of 24 bits is at least the root: it is half a unit
        # above the farthest number that is rounded to the one before.
        lengths[part] = np.nextafter(np.sqrt(squares).astype(np.float32), np.float32(np.inf))
    return replace(block, lengths=lengths)


def descend(
    table: Rows | JoinedColumns,
    basis: Basis,
    sizes: tuple[int, ...],
    plan: GradientPlan,
    mu: float,
    size: float,
    source: NoiseSource,
    start: Floats | None = None,
    class_weights: Floats | None = None,
) -> Floats:
    """Take noisy gradient steps from a start; return what each cell, and last every row, adds to the outputs."""
    outputs = 1 if table.classes == 2 else table.classes
    if start is None:
        start = np.zeros((outputs, sum(sizes) + 1))
    grid = gradient_grid(size)
    sensitivity = _gradient_sensitivity(plan.max_grad_norm, outputs, basis.features, grid).value
    weights, direction = np.zeros((2, outputs, basis.features))
    both = 2.0 if outputs == 1 else 1.0  # both scores move
    for rate, step_mu in zip(*_rates_and_mus(plan, mu), strict=True):
        scores = start + basis.scores(weights)
        sums = table.sum(_Residuals(sizes, scores, plan.max_grad_norm, class_weights))
        noisy = release_gaussian(
            basis.gradient(sums, grid), sensitivity=sensitivity, mu=float(step_mu), source=source
        ).values
        direction = plan.momentum * direction + noisy
        weights = weights - (both * rate / size) * (noisy + plan.momentum * direction)
        if not np.abs(weights).max() < 2.0**200:
            raise InvalidInput(
                f"Training diverged: learning_rate {plan.learning_rate:g} is too large for this head."
            )
    reach = both * plan.learning_rate * plan.steps
    return np.asarray(start + basis.scores(basis.shrunk(weights, size, reach)))


def _rates_and_mus(plan: GradientPlan, mu: float) -> tuple[Floats, Floats]:
    """Return the rate and the mu of every step: mu^2 in proportion to what its gradient moves in the end."""
    falling = np.arange(plan.steps, 0, -1, dtype=np.float64)
    moved, later = np.empty(plan.steps), 0.0
    for step in reversed(range(plan.steps)):
        moved[step] = falling[step] * (1.0 + plan.momentum) + later
        later = plan.momentum * (later + plan.momentum * falling[step])
    return falling * (plan.learning_rate * plan.steps / moved.sum()), mu * np.sqrt(moved / moved.sum())


@dataclass(frozen=True, eq=False)
class _Residuals:
    """Sums the clipped residuals of a block, as integers: (outputs, cells + 1), in each cell and in all."""

    sizes: tuple[int, ...]
    scores: Floats  # (outputs, cells + 1) what each cell, and last every row, adds to the scores
    max_grad_norm: float
    class_weights: Floats | None = None  # At most 1, after clipping: no contribution becomes longer

    def __call__(self, block: Table) -> NDArray[np.int64]:
        assert block.lengths is not None
        total = np.zeros(self.scores.shape, np.int64)
        for part in _parts(block):
            columns = _columns(block, part)
            errors = _errors(added_scores(columns, self.sizes, self.scores), block.labels[part])
            squares = np.zeros(errors.shape[1])
            for error in errors:
                squares += error * error
            lengths = np.sqrt(squares) * block.lengths[part]
            limit = self.max_grad_norm * _SHORTENED
            factors = limit / np.maximum(lengths, limit)
            if self.class_weights is not None:
                factors = factors * self.class_weights[block.labels[part]]
            if block.repeats is not None:
                factors = factors / block.repeats[part]
            for output, residuals in enumerate(np.trunc(errors * (factors * _UNIT))):
                total[output, :-1] += _histogram(columns, self.sizes, residuals)
                total[output, -1] += int(residuals.sum())
        return total


def cell_scores(weights: Floats, sizes: tuple[int, ...], block: Table, part: slice) -> Floats:
    """Return the scores of some rows, one line per class."""
    return added_scores(_columns(block, part), sizes, weights)


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

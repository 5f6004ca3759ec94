"""Feature maps for tables, all with given constants.

`Identity`, `Scaling`, `OneHot` and `UnitNorm` take any numbers. `TableFeatures` takes the rows of an encoded table: it
adds indicators of public bins and of declared crosses. `table_features` chooses its bins from public numbers.
`TableCells` has one index per column instead, by the row and public numbers alone (THEORY 3.14).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from quietmax.data.encoding import DIMENSION, DateColumn, Encoding, NumericColumn, TextColumn
from quietmax.errors import InvalidInput
from quietmax.models.features.base import FeatureMap, Floats, square_sums

Block = tuple[int, int]
"""A range of features: the first, and the one after the last."""

CONSTANT_PER_COLUMN = 0.3
"""Plain features of tables: `UnitNorm` with this constant times the root of the number of columns."""
COARSE_BINS, FINE_BINS = (8, 16, 32), 256
UNITS_PER_BIN = 10.0
"""A numeric column has at most `mu N / 10` bins, divided by the number of numeric columns."""
RECORDS_PER_BIN = 30.0
"""More than 8 bins need at least this many records each, divided by the number of numeric columns: whatever mu is, a
bin with fewer records says little."""
MOST_BINNED = 20
"""A table with more numeric columns gets no bins."""
FINE_FROM = 64.0
"""Fine bins are used where that many coarse bins would be possible."""
LARGEST_TABLE = 2**28
"""The features of all rows together are at most this many numbers (of 4 bytes)."""
LARGEST_CROSSED = 2**31
"""The same with declared crosses and without bins; more is an error."""
LARGEST_HEAD = 2**14
"""Features times classes: the noise values of one gradient step."""
_SCALE_FLOOR = 4.0
_NUMBER = 4.0
"""The scale of a number itself is multiplied by this, so that it counts where a bin is empty in training."""
_ATOM = 4.0
"""A fine bin that holds this many times its even share of the coarse bin keeps its full scale."""
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Identity(FeatureMap):
    """The record itself.

    Examples
    --------
    >>> Identity().transform([[1.0, 2.0]])
    array([[1., 2.]], dtype=float32)
    """

    kind: ClassVar[str] = "identity"

    def dimension(self, columns: int) -> int:
        """Return the number of features: as many as numbers."""
        return columns

    def _features(self, records: Floats) -> Floats:
        return records


@dataclass(frozen=True)
class Scaling(FeatureMap):
    """Clip each column to public bounds and scale it to [0, 1].

    Parameters
    ----------
    low, high : tuple of float
        Finite bounds of each column, `low < high`.

    Examples
    --------
    >>> Scaling(low=(0.0, 10.0), high=(100.0, 20.0)).transform([[25.0, 30.0]])
    array([[0.25, 1.  ]], dtype=float32)
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    kind: ClassVar[str] = "scaling"

    def __post_init__(self) -> None:
        object.__setattr__(self, "low", tuple(float(value) for value in self.low))
        object.__setattr__(self, "high", tuple(float(value) for value in self.high))
        pairs = list(zip(self.low, self.high, strict=False))
        if (
            len(self.low) != len(self.high)
            or not pairs
            or not all(math.isfinite(low) and math.isfinite(high) and low < high for low, high in pairs)
        ):
            raise InvalidInput(
                "Scaling needs two finite bounds for each column, the lower one in `low` and the upper one in `high`."
            )

    def dimension(self, columns: int) -> int:
        """Return the number of features: as many as columns."""
        if columns != len(self.low):
            raise InvalidInput(
                f"The records must have {len(self.low)} columns, one for each pair of bounds; got {columns}."
            )
        return columns

    def _features(self, records: Floats) -> Floats:
        low, high = np.array(self.low), np.array(self.high)
        return np.asarray((np.clip(records, low, high) - low) / (high - low), dtype=np.float32)


@dataclass(frozen=True)
class OneHot(FeatureMap):
    """One feature per category of each column; a value that is not listed becomes all zeros.

    Parameters
    ----------
    categories : tuple of (tuple of float, or None)
        The categories of each column, all different; None keeps the column as it is.

    Examples
    --------
    >>> OneHot((None, (1.0, 2.0, 3.0))).transform([[0.5, 2.0], [0.25, 7.0]])
    array([[0.5 , 0.  , 1.  , 0.  ],
           [0.25, 0.  , 0.  , 0.  ]], dtype=float32)
    """

    categories: tuple[tuple[float, ...] | None, ...]
    kind: ClassVar[str] = "one-hot"

    def __post_init__(self) -> None:
        columns = tuple(
            None if column is None else tuple(float(value) for value in column) for column in self.categories
        )
        object.__setattr__(self, "categories", columns)
        if not columns or any(
            column is not None and (not column or len(set(column)) < len(column)) for column in columns
        ):
            raise InvalidInput(
                "One-hot encoding needs None or a list of different categories for every column."
            )

    def dimension(self, columns: int) -> int:
        """Return the number of features: one per category, and one per column kept."""
        if columns != len(self.categories):
            raise InvalidInput(
                f"The records must have {len(self.categories)} columns, one for each entry of `categories`; got "
                f"{columns}."
            )
        return sum(1 if column is None else len(column) for column in self.categories)

    def _features(self, records: Floats) -> Floats:
        parts = [
            values[:, None] if column is None else values[:, None] == np.array(column, np.float32)
            for values, column in zip(records.T, self.categories, strict=True)
        ]
        return np.concatenate(parts, axis=1).astype(np.float32)


@dataclass(frozen=True)
class UnitNorm(FeatureMap):
    """Divide every record by its length: `x / ||x||`, with a constant c > 0 `(x, c) / ||(x, c)||`.

    With the constant nothing is lost to a linear classifier: `w.x + b > 0` and `(w.x + (b/c) c) / ||(x,
    c)|| > 0` are the same statement. A record of zeros stays zero if there is no constant.

    Parameters
    ----------
    constant : float
        A number of at least 0 that is appended to every record; 0 appends nothing.

    Examples
    --------
    >>> UnitNorm().transform([[3.0, 4.0]])
    array([[0.6, 0.8]], dtype=float32)
    >>> UnitNorm(constant=1.0).transform([[0.0, 0.0]])
    array([[0., 0., 1.]], dtype=float32)
    """

    constant: float = 0.0
    kind: ClassVar[str] = "unit-norm"

    def __post_init__(self) -> None:
        object.__setattr__(self, "constant", float(self.constant))
        if not 0.0 <= self.constant < math.inf:
            raise InvalidInput(
                f"The constant of a normalisation must be a number of at least 0, got {self.constant}."
            )

    def dimension(self, columns: int) -> int:
        """Return the number of features: one more than numbers if there is a constant."""
        return columns + (self.constant > 0.0)

    def _features(self, records: Floats) -> Floats:
        columns = records.shape[1]
        wide = np.full((len(records), self.dimension(columns)), self.constant)
        wide[:, :columns] = records
        lengths = np.sqrt(square_sums(wide))
        lengths[lengths == 0.0] = 1.0
        wide /= lengths
        return np.asarray(wide, dtype=np.float32)


@dataclass(frozen=True)
class TableFeatures(FeatureMap):
    """The rows of an encoded table, with indicators of bins and crosses, divided by their length.

    Each number in [0, 1] keeps its value and is also described by one indicator of `bins[0]` equal intervals and, if
    there are two numbers of bins, by one of `bins[1]` narrower intervals. A missing value is in no interval. A cross
    has one feature for each pair of features of two blocks: their product. The embedding of a text keeps its numbers.
    All other features are at least 0 if the row is.

    Parameters
    ----------
    columns : int
        Numbers per encoded row.
    numbers : tuple of int
        Positions of the numbers that are divided into bins.
    missing : tuple of (int or None)
        For each of them, the position of the feature that is 1 for a missing value, or None.
    bins : tuple of int
        No, one or two numbers of bins; the second is a multiple of the first.
    crosses : tuple of pairs of blocks
        Each block is a range (first, after the last) of the features before the crosses: the encoded row, then the
        bins `bins[0]` of all numbers, then the bins `bins[1]`.
    text : tuple of blocks
        The ranges of the encoded row that are embeddings of texts: numbers of both signs, together of length 1.

    Examples
    --------
    >>> TableFeatures(columns=3, numbers=(0,), missing=(None,), bins=(2,)).transform([[0.0, 0.0, 1.0]]).round(2)
    array([[0.  , 0.  , 0.71, 0.71, 0.  ]], dtype=float32)
    """

    columns: int
    numbers: tuple[int, ...] = ()
    missing: tuple[int | None, ...] = ()
    bins: tuple[int, ...] = ()
    crosses: tuple[tuple[Block, Block], ...] = ()
    text: tuple[Block, ...] = ()
    kind: ClassVar[str] = "table"

    def __post_init__(self) -> None:
        flags = [position for position in self.missing if position is not None]
        positions = [*self.numbers, *flags]
        if not all(0 <= position < self.columns for position in positions) or len(set(positions)) < len(
            positions
        ):
            raise InvalidInput(
                f"The positions of numbers and missing values must be different, from 0 to {self.columns - 1}."
            )
        if len(self.missing) != len(self.numbers):
            raise InvalidInput("`missing` needs a position or None for each number.")
        coarse, fine = (*self.bins, 1, 1)[:2] if len(self.bins) < 2 else self.bins[:2]
        if len(self.bins) > 2 or coarse < 1 or fine < 1 or (len(self.bins) == 2 and fine % coarse):
            raise InvalidInput(
                f"`bins` must be at most two positive numbers, the second a multiple of the first; got {self.bins}."
            )
        if not all(0 <= first < last <= self._binned for pair in self.crosses for first, last in pair):
            raise InvalidInput(
                f"Each block of a cross must be a range of the {self._binned} features before the crosses."
            )
        if not all(0 <= first < last <= self.columns for first, last in self.text):
            raise InvalidInput(f"Each block of a text must be a range of the {self.columns} encoded numbers.")

    @property
    def _binned(self) -> int:
        """Number of features before the crosses."""
        return self.columns + len(self.numbers) * sum(self.bins)

    def dimension(self, columns: int) -> int:
        """Return the number of features: the encoded row, one per bin, and one per pair of crossed features."""
        if columns != self.columns:
            raise InvalidInput(f"The encoded rows must have {self.columns} numbers, got {columns}.")
        return self._binned + sum((b - a) * (d - c) for (a, b), (c, d) in self.crosses)

    def _features(self, records: Floats) -> Floats:
        features = np.empty((len(records), self.dimension(records.shape[1])), np.float32)
        for start in range(0, len(records), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            features[part] = self._unit_rows(records[part])
        return features

    def _unit_rows(self, records: Floats) -> NDArray[np.float64]:
        """Return the features of some records; each number is computed by operations on single numbers alone."""
        wide = np.zeros((len(records), self.dimension(records.shape[1])))
        wide[:, : self.columns] = records
        start = self.columns
        for bins in self.bins:
            for number, flag in zip(self.numbers, self.missing, strict=True):
                values = np.clip(records[:, number].astype(np.float64), 0.0, 1.0)
                interval = np.minimum((values * bins).astype(np.int64), bins - 1)
                present = (
                    np.flatnonzero(records[:, flag] == 0.0) if flag is not None else np.arange(len(records))
                )
                wide[present, start + interval[present]] = 1.0
                start += bins
        for (a, b), (c, d) in self.crosses:
            products = wide[:, a:b, None] * wide[:, None, c:d]
            stop = start + (b - a) * (d - c)
            wide[:, start:stop] = products.reshape(len(wide), -1)
            start = stop
        lengths = np.sqrt(square_sums(wide))
        return np.divide(wide, lengths, out=wide, where=lengths > 0.0)

    def scale(self, centre: NDArray[np.float64], noise: float) -> NDArray[np.float64]:
        """Return a positive factor for each feature, computed from the released mean m of the features.

        An indicator of height h has the second moment `E f^2 = h E f`: the mean is proportional to the diagonal of the
        second moments, and the factor `(max(m, 0) + 4 noise)^(-1/2)` makes frequent and rare indicators vary alike. A
        fine bin that holds a share s of its coarse bin tells nothing new where the values are spread evenly. Its
        factor is multiplied by `min(1, s / s0)^2`, where s0 is four times the even share: values that many rows have in
        common keep their own factor. The factor of a number itself is multiplied by 4, because it is the only one that
        says anything about values whose bin is empty in training. The mean of an embedding says nothing about its
        second moments. Its d numbers have together the length h of an indicator, so each gets the factor
        `(h / d + 4 noise)^(-1/2)` of an indicator with the same second moment.

        The noise of each coordinate of m has the standard deviation `noise`. A typical scaled row has length 1.

        Examples
        --------
        >>> TableFeatures(columns=3).scale(np.array([0.4, 0.1, 0.1]), 0.0).round(2)
        array([0.71, 1.41, 1.41])
        """
        means = np.maximum(centre, 0.0)
        # A row with B blocks of length 1 has indicators of height B^(-1/2), whose means add up to about B^(1/2).
        texts = [slice(first, last) for first, last in self.text]
        for block in texts:
            means[block] = 0.0
        height = 1.0 / math.sqrt(max(1.0, len(texts) + float(means.sum()) ** 2))
        for block in texts:
            means[block] = height / (block.stop - block.start)
        floored = means + max(_SCALE_FLOOR * noise, np.finfo(np.float64).tiny)
        factors = 1.0 / np.sqrt(floored)
        factors[list(self.numbers)] *= _NUMBER
        if len(self.bins) == 2 and self.numbers:
            coarse, fine = self.bins
            first = self.columns + coarse * len(self.numbers)
            inner = slice(first, self._binned)
            outer = np.repeat(floored[self.columns : first], fine // coarse)
            factors[inner] *= np.minimum(1.0, floored[inner] / outer * (fine / (coarse * _ATOM))) ** 2
        typical = math.sqrt(float((factors**2 * means).sum()) / float(means.sum())) if means.any() else 1.0
        return np.asarray(factors / typical)

    def to_json(self) -> dict[str, Any]:
        """Return the positions, bins and crosses as JSON values, and texts if there are any."""
        values = super().to_json()
        return values if self.text else {name: each for name, each in values.items() if name != "text"}


def table_features(encoding: Encoding, size: float, classes: int, mu: float) -> FeatureMap:
    """Return the feature map of a table, chosen from public numbers alone.

    Each of at most 20 numeric columns and dates gets the largest number of bins among 8, 16 and 32 that is at most
    `b = min(mu n / 10, max(8, n / 30))`, where n is the size divided by the number of such columns. From b = 64 on it
    also gets 256 fine bins. Fewer are used where all features together would be more than 2^28 numbers (1 GB), or
    features times classes more than 2^14. A table with numbers but without bins gets `UnitNorm` instead, unless it has
    texts, and second moments where they pay (`training.moments_share`). Crosses are those that the encoding declares; a
    number is crossed by its coarse bins.

    Parameters
    ----------
    encoding : Encoding
        The public columns.
    size : float
        The public number N of records or persons.
    classes : int
        Number of classes.
    mu : float
        Privacy of the whole training; with answers per query, epsilon of one answer.

    Returns
    -------
    FeatureMap
        `TableFeatures`, or `UnitNorm`.

    Raises
    ------
    InvalidInput
        If the declared crosses give more than 2^31 numbers (8 GB) for all rows together.

    Examples
    --------
    >>> encoding = Encoding((NumericColumn("age", 0, 100, missing=False),), "ill", ("no", "yes"))
    >>> table_features(encoding, 1_000, 2, 0.3).bins
    (16,)
    """
    blocks: dict[str, Block] = {}
    binned: dict[str, tuple[int, int | None]] = {}
    text = []
    start = 0
    for column in encoding.columns:
        stop = start + len(column.feature_names)
        blocks[column.name] = (start, stop)
        if isinstance(column, DateColumn) or (isinstance(column, NumericColumn) and not column.edges):
            binned[column.name] = (start, stop - 1 if column.missing else None)
        if isinstance(column, TextColumn):
            text.append((start, start + DIMENSION))
        start = stop
    numbers = tuple(number for number, _ in binned.values())
    missing = tuple(flag for _, flag in binned.values())

    def _with_bins(bins: tuple[int, ...]) -> TableFeatures:
        width = bins[0] if bins else 1
        firsts = range(start, start + width * len(numbers), width) if bins else numbers
        crossed = blocks | {name: (first, first + width) for name, first in zip(binned, firsts, strict=True)}
        crosses = tuple((crossed[one], crossed[other]) for one, other in encoding.crosses)
        return TableFeatures(start, numbers, missing, bins, crosses, tuple(text))

    per_column = size / max(1, len(numbers))
    possible = min(mu * per_column / UNITS_PER_BIN, max(COARSE_BINS[0], per_column / RECORDS_PER_BIN))
    coarse = [count for count in reversed(COARSE_BINS) if count <= possible and len(numbers) <= MOST_BINNED]
    choices = [(count, FINE_BINS) for count in coarse[:1] if possible >= FINE_FROM]
    for bins in (*choices, *((count,) for count in coarse)) if numbers else ((),):
        chosen = _with_bins(bins)
        features = chosen.dimension(start)
        if features * max(size, 1.0) <= LARGEST_TABLE and features * classes <= LARGEST_HEAD:
            return chosen
    if numbers and not encoding.crosses and not text:
        return UnitNorm(CONSTANT_PER_COLUMN * math.sqrt(start))
    smallest = _with_bins(())
    if encoding.crosses and smallest.dimension(start) * max(size, 1.0) > LARGEST_CROSSED:
        raise InvalidInput(
            f"The declared crosses give {smallest.dimension(start):,} features per row, too many for a table of this "
            "size; cross columns with fewer categories or buckets."
        )
    return smallest


# --- The cells of a row -----------------------------------------------------------------------------------------------

LEVELS = (256, 128, 64, 32, 16, 8)
CROSSED_LEVELS = 8
MOST_CELLS = 2**22


@dataclass(frozen=True)
class TableCells(FeatureMap):
    """The index of the cell that an encoded row has in each column, and in each cross.

    A column of indicators has a cell for each of them, and a last one if none is 1. A number from 0 to 1 has
    `levels` equal intervals, and a last cell for a missing value. The cell of a cross is a pair of cells, in which a
    number has 8 intervals.

    Parameters
    ----------
    columns : int
        Numbers per encoded row.
    parts : tuple of (int, int)
        For each column of the table its range (first, after the last) of the encoded row.
    numbers : tuple of int
        The positions in `parts` of the columns that are numbers; a second entry of theirs is 1 for a missing value.
    levels : int
        Number of intervals of a number: 8, 16, 32, 64, 128 or 256.
    crosses : tuple of (int, int)
        Pairs of positions in `parts`.

    Raises
    ------
    InvalidInput
        If the parameters are not valid, or if there are more than 2^22 cells.

    Examples
    --------
    >>> cells = TableCells(columns=3, parts=((0, 1), (1, 3)), numbers=(0,), levels=8)
    >>> cells.transform([[0.5, 0.0, 1.0], [1.0, 0.0, 0.0]])
    array([[4., 1.],
           [7., 2.]], dtype=float32)
    """

    columns: int
    parts: tuple[tuple[int, int], ...]
    numbers: tuple[int, ...] = ()
    levels: int = LEVELS[0]
    crosses: tuple[tuple[int, int], ...] = ()
    kind: ClassVar[str] = "cells"

    def __post_init__(self) -> None:
        count = len(self.parts)
        widths = [last - first for first, last in self.parts]
        if not count or any(not 0 <= first < last <= self.columns for first, last in self.parts):
            raise InvalidInput(f"Each part must be a range of the {self.columns} encoded numbers.")
        if self.levels not in LEVELS:
            raise InvalidInput(f"`levels` must be one of {LEVELS}, got {self.levels!r}.")
        if not all(0 <= number < count and widths[number] <= 2 for number in self.numbers):
            raise InvalidInput("`numbers` must be positions of parts that have one or two entries.")
        if not all(0 <= position < count for pair in self.crosses for position in pair):
            raise InvalidInput("`crosses` must be pairs of positions of parts.")
        if sum(self.sizes) > MOST_CELLS:
            raise InvalidInput(
                f"The columns and declared crosses have {sum(self.sizes):,} cells, but at most {MOST_CELLS:,} are "
                "possible: cross columns with fewer categories or buckets."
            )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of cells of each column, then of each cross."""
        single = [
            self.levels + 1 if position in self.numbers else last - first + 1
            for position, (first, last) in enumerate(self.parts)
        ]
        paired = [self.crossed_size(one) * self.crossed_size(other) for one, other in self.crosses]
        return (*single, *paired)

    def crossed_size(self, position: int) -> int:
        """Return the number of cells that a column has in a cross."""
        first, last = self.parts[position]
        return CROSSED_LEVELS + 1 if position in self.numbers else last - first + 1

    def dimension(self, columns: int) -> int:
        """Return the number of indices: one per column and cross."""
        if columns != self.columns:
            raise InvalidInput(f"The encoded rows must have {self.columns} numbers, got {columns}.")
        return len(self.sizes)

    def _features(self, records: Floats) -> Floats:
        indices = np.empty((len(records), len(self.parts)), np.float32)
        for position, (first, last) in enumerate(self.parts):
            part = records[:, first:last]
            if position in self.numbers:
                absent = part[:, -1] > 0.0 if last - first == 2 else np.zeros(len(part), np.bool_)
                indices[:, position] = self._levels(part[:, 0], absent)
            else:
                indices[:, position] = _indicated(part)
        return self.with_crosses(indices)

    def of_codes(self, codes: Sequence[NDArray[np.float64]], missing: Sequence[bool]) -> NDArray[np.int32]:
        """Return the cells of rows from the codes of columns, of which some have a feature for missing values."""
        given, numbers = np.array(codes), [*self.numbers]
        widths = np.array([[last - first] for first, last in self.parts])
        absent, has_feature = np.isnan(given), np.array(missing)[:, None]
        values = np.where(absent, 0.0, given)
        found = np.where(absent, widths - has_feature, np.where(values < 0.0, widths, values)).astype(
            np.int32
        )
        found[numbers] = self._levels(values[numbers].astype(np.float32), (absent & has_feature)[numbers])
        return self.with_crosses(found.T)

    def with_crosses(self, indices: NDArray[Any]) -> NDArray[Any]:
        """Append to rows the cells of the crosses that they lack; each row's follow from that row alone."""
        pairs = np.array(self.crosses[indices.shape[1] - len(self.parts) :], np.intp).reshape(-1, 2)
        if not len(pairs):
            return indices
        sizes = np.array([self.crossed_size(position) for position in range(len(self.parts))], np.int32)
        coarse = indices[:, : len(self.parts)].astype(np.int32)
        coarse[:, [*self.numbers]] //= self.levels // CROSSED_LEVELS
        paired = coarse[:, pairs[:, 0]] * sizes[pairs[:, 1]] + coarse[:, pairs[:, 1]]
        return np.concatenate([indices, paired.astype(indices.dtype)], axis=1)

    def coarse(self, position: int) -> NDArray[np.int64]:
        """Return which cell of a cross each cell of a column belongs to."""
        if position not in self.numbers:
            return np.arange(self.crossed_size(position))
        return np.arange(self.levels + 1) // (self.levels // CROSSED_LEVELS)

    def _levels(self, shares: Floats, absent: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return the interval of each share, and the last cell for a missing value."""
        clipped = np.minimum(np.maximum(shares.astype(np.float64), 0.0), 1.0)
        levels = np.minimum((clipped * self.levels).astype(np.int64), self.levels - 1)
        return np.where(absent, self.levels, levels)


def _indicated(part: Floats) -> NDArray[np.int64]:
    """Return the position of the (first, largest) positive indicator of each row, or their number if there is none."""
    first = part.argmax(axis=1)
    return np.asarray(np.where(part[np.arange(len(part)), first] > 0.0, first, part.shape[1]), np.int64)


def table_cells(encoding: Encoding, levels: int) -> TableCells | None:
    """Return the cells of a table, or None if it has columns of text, which have none."""
    if any(isinstance(column, TextColumn) for column in encoding.columns):
        return None
    parts, numbers, start = [], [], 0
    for position, column in enumerate(encoding.columns):
        parts.append((start, start + len(column.feature_names)))
        start = parts[-1][1]
        if column.is_share:
            numbers.append(position)
    places = {column.name: position for position, column in enumerate(encoding.columns)}
    crosses = tuple((places[one], places[other]) for one, other in encoding.crosses)
    return TableCells(start, tuple(parts), tuple(numbers), levels, crosses)

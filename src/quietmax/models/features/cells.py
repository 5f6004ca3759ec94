"""The cells of a table's rows: for each column the index of its category or interval, instead of a vector.

A row of a table has one value per column, so a model that adds up one number per value needs a few indices per row and
no vector with an entry for every category (THEORY 3.14). A cell depends on the row and on public numbers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from quietmax.data.encoding import Encoding, TextColumn
from quietmax.errors import InvalidInput
from quietmax.models.features.base import FeatureMap, Floats

LEVELS = (256, 128, 64, 32, 16, 8)
"""Numbers of equal intervals that a number may be divided into."""
CROSSED_LEVELS = 8
"""In a cross, a number has this many intervals."""
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

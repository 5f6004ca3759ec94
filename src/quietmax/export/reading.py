"""How each column of a table is read, said without Quietmax: where its cells begin, and how its values are spelled.

SQL and the calculator look up what a row's cell adds to the scores. Where a number's or date's cells begin is found by
asking the encoding itself, to the last bit: rounding, logarithms and bounds are all in these borders.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from quietmax.data.cells import MISSING_MARKERS, NO, YES, exact_number
from quietmax.data.encoding import (
    BooleanColumn,
    CategoricalColumn,
    Column,
    DateColumn,
    Encoding,
    HashedColumn,
    NumericColumn,
    TextColumn,
)
from quietmax.errors import InvalidInput
from quietmax.estimators.head.effects import Additive
from quietmax.estimators.head.weights import TableWeights
from quietmax.estimators.serialization import PrivateModel
from quietmax.export.released import _open_released
from quietmax.models.features.tabular import CROSSED_LEVELS, table_cells

BLANKS = "".join(character for character in map(chr, range(0x3001)) if character.isspace())
"""What `str.strip` removes."""
CASED = range(0x20000)
"""Characters that `str.casefold` may change."""
_SIGN = -(2**63)


@dataclass(frozen=True)
class Reading:
    """Which cell each value of a column has; None for a value that is an error."""

    column: Column
    missing: int  # The cell of a missing value
    starts: tuple[Any, ...] = ()  # From which number, or date as ISO 8601, on each further cell begins
    words: tuple[tuple[str, int], ...] = ()  # The cell of each string, folded if case is ignored
    numbers: tuple[tuple[Decimal, int], ...] = ()  # The cell of strings that are such a number
    other: int | None = None  # The cell of all other strings
    coarse: int = 1  # So many cells are one in a cross

    @property
    def folded(self) -> bool:
        """Whether strings match in any case."""
        return isinstance(self.column, BooleanColumn) or getattr(self.column, "ignore_case", False)

    @property
    def codes(self) -> list[float]:
        """The numbers that stand for a missing value."""
        assert isinstance(self.column, NumericColumn)
        parsed = map(self.column.parse, self.column.missing_values)
        return [code for code in parsed if code is not None and code == code]

    @property
    def markers(self) -> list[str]:
        """The strings that stand for a missing value."""
        return sorted(MISSING_MARKERS.union(self.column.missing_values))


def open_additive(folder: str | Path, form: str) -> tuple[PrivateModel, Additive, list[Reading]]:
    """Open a released model whose scores are sums over columns, and read its columns."""
    model = _open_released(folder)
    if not isinstance(model.classifier, TableWeights):
        raise InvalidInput(
            f"Only heads and linear DP-SGD models of a table with a schema, without columns of text, can be exported "
            f"to {form}: only their scores are sums over columns. Export this model to ONNX, skops or MLflow."
        )
    sums = model.additive()
    return model, sums, [_reading(column, sums.cells.levels, form) for column in sums.encoding.columns]


def refused(column: Column, form: str) -> InvalidInput:
    """Return the error for a column that a format cannot hold."""
    reasons = {HashedColumn: "hashes (BLAKE2b)", TextColumn: "tokenizers"}
    needed = reasons.get(type(column), f"columns of the type '{column.kind}'")
    return InvalidInput(
        f"Column '{column.name}' cannot be exported to {form}, which has no operator for {needed}. The formats skops "
        "and MLflow can hold it."
    )


def refused_dates(column: DateColumn, form: str) -> InvalidInput:
    """Return the error for dates that a format cannot read."""
    return InvalidInput(
        f"Column '{column.name}' cannot be exported to {form}: only dates such as 2024-01-31 or 31.01.2024 can, "
        "without the time of day."
    )


def date_parts(column: DateColumn) -> tuple[str, str] | None:
    """Return the order of year, month and day (as in "dmY") and the mark between them; None for other formats."""
    written = column.format or "%Y-%m-%d"
    order, mark = written[1::3], written[2:3]
    plain = written == mark.join(f"%{part}" for part in order) and mark in ("-", ".", "/")
    return (order, mark) if plain and sorted(order) == sorted("Ymd") and len(column.low) == 10 else None


@cache
def characters_by_case() -> dict[str, list[str]]:
    """Return the characters that `str.casefold` changes, by what it makes of them."""
    found = defaultdict(list)
    for character in map(chr, CASED):
        if (folded := character.casefold()) != character:
            found[folded].append(character)
    return found


def _reading(column: Column, levels: int, form: str) -> Reading:
    """Ask the encoding how a column is read."""
    cell_of = _cell_of(column, levels)
    missing = int(cell_of([None])[0])
    coarse = levels // CROSSED_LEVELS if column.is_share else 1
    if isinstance(column, NumericColumn):
        plain = _cell_of(replace(column, missing_values=()), levels)
        low, high = _keys(np.array([column.low, column.high], np.float64)).tolist()
        count = levels if column.is_share else len(column.indicated)
        starts = _floats(_borders(lambda keys: plain(_floats(keys)), low, high, count))
        return Reading(column, missing, tuple(starts.tolist()), coarse=coarse)
    if isinstance(column, DateColumn):
        if date_parts(column) is None or column.bounds is None:
            raise refused_dates(column, form)
        iso = _cell_of(replace(column, format=None, missing_values=()), levels)
        days = _borders(lambda keys: iso(_days(keys)), *column.bounds, levels)
        return Reading(column, missing, tuple(_days(days)), coarse=coarse)
    if isinstance(column, BooleanColumn):
        no, yes = cell_of(["no", "yes"]).tolist()
        words = [(word, cell) for group, cell in ((NO, no), (YES, yes)) for word in sorted(group)]
        return Reading(column, missing, words=tuple(words), numbers=((Decimal(0), no), (Decimal(1), yes)))
    if not isinstance(column, CategoricalColumn):
        raise refused(column, form)
    places = [*zip(column.categories, cell_of(column.categories).tolist(), strict=True)]
    fold = str.casefold if column.ignore_case else str
    numbers: dict[Decimal, int] = {}
    for category, cell in places:
        if (number := exact_number(category)) is not None:
            numbers.setdefault(number, cell)
    return Reading(
        column,
        missing,
        words=tuple((fold(category), cell) for category, cell in places),
        numbers=tuple(numbers.items()),
        other=int(cell_of([unlisted(column)])[0]),
        coarse=coarse,
    )


def unlisted(column: Column) -> str:
    """Return a string that is no category."""
    return "another value" + "!" * max(map(len, column.indicated))


def _cell_of(column: Column, levels: int) -> Callable[[Any], NDArray[np.int64]]:
    """Return the function that says which cells the values of a column have, by the encoding and the map."""
    encoding = Encoding((replace(column, name="x"),), "y", ("no", "yes"))  # type: ignore[type-var]
    cells = table_cells(encoding, levels)
    if cells is None:
        raise refused(column, "this format")
    return lambda values: cells.transform(encoding.encode(pd.DataFrame({"x": values})))[:, 0].astype(np.int64)


def _borders(
    cell_of: Callable[[NDArray[np.int64]], NDArray[np.int64]], low: int, high: int, count: int
) -> NDArray[np.int64]:
    """Return the smallest integer in every cell but the first; a cell never falls from `low` to `high`."""
    wanted = np.arange(1, count)
    below, above = np.full(count - 1, low), np.full(count - 1, high)
    for _ in range(65):
        middle = (below >> 1) + (above >> 1) + (below & above & 1)
        reached = cell_of(middle) >= wanted
        below, above = np.where(reached, below, middle), np.where(reached, middle, above)
    return above


def _keys(numbers: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return integers in the order of float64, one after the other."""
    bits = numbers.view(np.int64)
    return np.where(bits >= 0, bits, _SIGN - bits)


def _floats(keys: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.where(keys >= 0, keys, _SIGN - keys).view(np.float64)


def _days(ordinals: NDArray[np.int64]) -> list[str]:
    return [date.fromordinal(ordinal).isoformat() for ordinal in ordinals.tolist()]


def terms_of(sums: Additive) -> list[NDArray[np.float64]]:
    """Return what the constant, each column and each cross add to the scores: (classes, cells) each."""
    *added, constant = np.split(sums.weights.weights, np.cumsum(sums.weights.sizes), axis=1)
    return [constant, *added]

"""Reading the cells of a column, each on its own (THEORY 3.8).

What a cell becomes depends on the cell, on what is declared, and on the declared type of the data (a pandas dtype, or
the Arrow type in a Parquet file), never on another cell.  The type says how a cell is read:

- integers, decimals: exact, whatever their size; booleans: `True` and `False`, as numbers 1 and 0;
- floats: NaN is a missing value;
- strings: without outer blanks; bytes: as UTF-8, other bytes written as `\\xNN`;
- bytes of a fixed length (also UUIDs): as hexadecimal digits;
- dates, times, timestamps: `2024-01-31`, `08:30:00`, `2024-01-31 08:30:00.5Z`; durations: the number of units;
- dictionaries and extension types: as the type of their values;
- null, `None`, `NA`, `NaT`: a missing value.

`Cells` are those of a request: Python values, which are read without pandas as those of a column of objects are.

Lists, structs, maps and all other types are errors, because of the column's type alone.  Errors are for the owner of
the table and are not part of any release; they name rows and columns, never a value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quietmax._lazy import lazy_module
from quietmax.errors import InvalidData

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow
    import pyarrow.compute
else:
    pd = lazy_module("pandas")
    pyarrow = lazy_module("pyarrow")

MISSING_MARKERS = frozenset({"", "?", "NA", "N/A", "null", "NULL", "nan", "NaN"})
"""Strings that stand for a missing value (besides an empty cell), unless they are declared as a category."""

YES = frozenset({"yes", "y", "true", "t", "1"})
NO = frozenset({"no", "n", "false", "f", "0"})
"""What a boolean column may hold, in any case."""

_LITERAL = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
"""A number among categories; 01 is a code, not a number."""

_DECIMAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?inf(inity)?", re.IGNORECASE)
"""A number in a numeric column."""

_FLOATS = (bool, np.bool_, float, np.floating)
"""Types whose values are read as numbers; integers may be too large for a float, and are read as strings."""

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which no valid string contains."""

_ISO_DATE = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?)?(Z|[+-][0-9]{2}(:?[0-9]{2})?)?)?"
)
_FRACTION = (
    (r"(\.[0-9]*?)0+(Z|[+-][0-9]{4})?$", r"\1\2"),
    (r"\.(Z|[+-][0-9]{4})?$", r"\1"),
)
"""Replacements that together remove trailing zeros of the fraction of a second from Arrow's string of a time."""

_STRING_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """A column without a frame: a list of Python values, None for a missing one, or an array of numbers."""

    values: list[Any] | NDArray[Any]
    strings: bool = False  # Whether its type is that of strings

    def __len__(self) -> int:
        return len(self.values)

    def tolist(self) -> list[Any]:
        """Return the cells as Python values."""
        return self.values if isinstance(self.values, list) else self.values.tolist()


Values: TypeAlias = "pd.Series[Any] | Cells"


def _is_string(kind: pyarrow.DataType) -> bool:
    return any(getattr(pyarrow.types, f"is_{name}")(kind) for name in _STRING_TYPES)


def as_strings(values: Values) -> NDArray[np.object_]:
    """Return every cell as a string without outer blanks; an integer has no decimals, a missing value is ""."""
    return _map_cells(values, as_string)


def as_string(value: Any) -> str:
    """Return one cell as a string; see `as_strings`."""
    if isinstance(value, str):
        return value.strip()
    if value is None:
        return ""
    if isinstance(value, float | np.floating):
        return "" if value != value else str(int(value)) if value.is_integer() else str(value)
    if type(value) in (bool, int):
        return str(value)
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace").strip()
    if not pd.api.types.is_scalar(value):
        raise InvalidData(
            "Cells must be numbers, booleans, strings, bytes, dates or times; a cell of the table is of type "
            f"{type(value).__name__}."
        )
    if pd.isna(value):
        return ""
    if isinstance(value, Decimal) and value.is_finite():
        digits = f"{value:f}"
        return digits.rstrip("0").rstrip(".") if "." in digits else digits
    string = str(value)
    if isinstance(value, datetime) and value.tzinfo is None and "." in string:
        return string.rstrip("0")  # as in a column of timestamps
    return string


def as_numbers(values: Values, name: str) -> NDArray[np.float64]:
    """Return every cell as a number, NaN for a missing value."""
    numbers, unreadable = _read_numbers(values, _parse_number)
    _refuse_unreadable(unreadable, name, _NOT_A_NUMBER)
    return numbers


_NOT_A_NUMBER = "no number in the numeric column '{}'; a missing value is an empty cell"


def _refuse_unreadable(unreadable: NDArray[np.bool_], name: str, problem: str) -> None:
    if np.count_nonzero(unreadable):
        rows = np.flatnonzero(unreadable)
        raise InvalidData(f"{_first_of(rows)} has {problem.format(name)}.", column=name)


def _read_numbers(
    values: Values, parse: Callable[[str], float | None]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the number of every cell, NaN for a missing value, and which cells are no numbers."""
    readable = np.zeros(len(values), dtype=bool)
    if isinstance(values, Cells):
        if isinstance(values.values, np.ndarray):
            return values.values.astype(np.float64), readable
    elif isinstance(values.dtype, pd.ArrowDtype):
        column = _plain(_arrow(values))
        if pyarrow.types.is_boolean(column.type):
            column = column.cast(pyarrow.uint8())
        if pyarrow.types.is_integer(column.type) or pyarrow.types.is_floating(column.type):
            floats = pyarrow.compute.fill_null(column.cast(pyarrow.float64(), safe=False), math.nan)
            return np.asarray(floats, dtype=np.float64), readable
    elif pd.api.types.is_numeric_dtype(values.dtype) and values.dtype.kind != "c":
        return values.to_numpy(dtype=np.float64, na_value=np.nan), readable

    def number(value: object) -> float | None:
        if isinstance(value, _FLOATS):
            return float(value)
        return (parse if isinstance(value, str | bytes) else _parse_number)(as_string(value))

    numbers = _map_cells(values, number)
    unreadable = np.array([number is None for number in numbers], dtype=bool)
    return np.where(unreadable, math.nan, numbers).astype(np.float64), unreadable


def _numbers_of(
    strings: NDArray[np.object_], parse: Callable[[str], float | None]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    given = strings.tolist()
    known = {string: parse(string) for string in set(given)}
    wrong = {string for string, number in known.items() if number is None}
    numbers = {string: math.nan if number is None else number for string, number in known.items()}
    found = np.fromiter(map(numbers.__getitem__, given), np.float64, len(given))
    if not wrong:
        return found, np.zeros(len(given), np.bool_)
    return found, np.fromiter(map(wrong.__contains__, given), np.bool_, len(given))


def _parse_number(string: str) -> float | None:
    """Return the number that a string stands for: NaN if it is missing, None if it is no number."""
    if string in MISSING_MARKERS:
        return math.nan
    return float(string) if _DECIMAL.fullmatch(string) else None


def parse_date(string: str, pattern: str | None = None) -> datetime | None:
    """Return the date or timestamp that a string stands for."""
    try:
        if pattern is not None:
            return datetime.strptime(string, pattern)
        return datetime.fromisoformat(string) if _ISO_DATE.fullmatch(string) else None
    except ValueError:
        return None


def is_missing(strings: Iterable[str]) -> NDArray[np.bool_]:
    """Return for every string whether it stands for a missing value."""
    return np.array([string in MISSING_MARKERS for string in strings], dtype=bool)


def is_valid_unicode(strings: Iterable[str]) -> NDArray[np.bool_]:
    """Return for every string whether it is valid Unicode: whether it has no half of a surrogate pair."""
    return np.array([string.isascii() or not _SURROGATE.search(string) for string in strings], dtype=bool)


def exact_number(string: str) -> Decimal | None:
    """Return the exact number that a category is."""
    return Decimal(string) if _LITERAL.fullmatch(string) else None


def numbered(strings: Iterable[str]) -> tuple[NDArray[np.int64], list[str]]:
    """Number the distinct strings from 0, in order of first appearance (pandas before 3 stops at a NUL character)."""
    given = list(strings)
    distinct = list(dict.fromkeys(given))
    places = dict(zip(distinct, range(len(distinct)), strict=True))
    return np.fromiter(map(places.__getitem__, given), np.int64, len(given)), distinct


def _map_cells(values: Values, rule: Callable[[object], object]) -> NDArray[np.object_]:
    if isinstance(values, Cells):
        return np.array([rule(value) for value in values.tolist()], dtype=object)
    if isinstance(values.dtype, pd.CategoricalDtype):
        array: Any = values.array
        present, codes = np.unique(array.codes, return_inverse=True)  # -1 is a missing value
        named = values.dtype.categories.take(present[present >= 0]).tolist()
        distinct = [None] * (len(present) - len(named)) + named
        return np.array([rule(value) for value in distinct], dtype=object)[codes]
    is_arrow = isinstance(values.dtype, pd.ArrowDtype) or getattr(values.dtype, "storage", "") == "pyarrow"
    if isinstance(values.dtype, pd.StringDtype) and not is_arrow:
        codes, distinct = numbered(values.tolist())
        return np.array([rule(value) for value in distinct], dtype=object)[codes]
    if isinstance(values.dtype, np.dtype) and values.dtype.kind in "biu":
        codes, integers = pd.factorize(values.to_numpy())
        return np.array([rule(value) for value in integers.tolist()], dtype=object)[codes]
    if is_arrow and len(values):
        column = _plain(_arrow(values))
        is_string = _is_string(column.type)
        if is_string or pyarrow.types.is_boolean(column.type) or pyarrow.types.is_integer(column.type):
            column = column.cast(pyarrow.large_binary()) if is_string else column
            encoded = column.combine_chunks().dictionary_encode("encode")
            mapped = np.array([rule(value) for value in encoded.dictionary.to_pylist()], dtype=object)
            return np.asarray(mapped[encoded.indices.to_numpy()])
    known = _Strings(rule)
    made = [known[value] if type(value) is str else rule(value) for value in _cells(values)]
    return np.array(made, dtype=object)


class _Strings(dict[str, object]):
    def __init__(self, rule: Callable[[object], object]) -> None:
        self._rule = rule

    def __missing__(self, string: str) -> object:
        self[string] = value = self._rule(string)
        return value


def _cells(values: pd.Series[Any]) -> list[Any]:
    """Return the cells as Python values; the rule follows from the declared type of the column."""
    if not isinstance(values.dtype, pd.ArrowDtype) and values.dtype.kind not in "mM":
        return values.tolist()
    column = _plain(_arrow(values))
    kind, types = column.type, pyarrow.types
    plain = ("null", "boolean", "integer", "floating", "decimal")
    if any(getattr(types, f"is_{name}")(kind) for name in plain):
        return list(column.to_pylist())
    if types.is_fixed_size_binary(kind):
        return [None if value is None else value.hex() for value in column.to_pylist()]
    if _is_string(kind):
        return list(column.cast(pyarrow.large_binary()).to_pylist())
    if types.is_temporal(kind) and not types.is_interval(kind):
        try:
            strings = column.cast(pyarrow.string())
        except pyarrow.ArrowException:
            raise InvalidData(
                f"Column '{values.name}' has the type {kind}, whose time zone is unknown on this system."
            ) from None
        for pattern, kept in _FRACTION:
            strings = pyarrow.compute.replace_substring_regex(strings, pattern, kept)
        return list(strings.to_pylist())
    raise InvalidData(
        f"Column '{values.name}' must hold numbers, booleans, strings, bytes, dates or times; its type is {kind}."
    )


def _arrow(values: pd.Series[Any]) -> Any:
    if isinstance(values.dtype, pd.ArrowDtype):
        column = values.array.__arrow_array__()
    else:
        column = pyarrow.array(values, from_pandas=True)
    return column if isinstance(column, pyarrow.ChunkedArray) else pyarrow.chunked_array([column])


def _plain(column: Any) -> Any:
    """Return the values of dictionaries, runs and extension types, piece by piece, as the type that they have."""
    kind = column.type
    if pyarrow.types.is_dictionary(kind):
        # Arrow cannot take from strings in the view layout.
        view = pyarrow.types.is_string_view(kind.value_type) or pyarrow.types.is_binary_view(kind.value_type)
        inner = pyarrow.large_binary() if view else kind.value_type
        pieces = [piece.dictionary.cast(inner).take(piece.indices) for piece in column.chunks]
        return _plain(pyarrow.chunked_array(pieces, type=inner))
    if pyarrow.types.is_run_end_encoded(kind):
        pieces = [pyarrow.compute.run_end_decode(piece) for piece in column.chunks]
        return _plain(pyarrow.chunked_array(pieces, type=kind.value_type))
    if isinstance(kind, pyarrow.BaseExtensionType):
        # The attributes of Arrow's own classes: a class of somebody else's may compute them otherwise.
        pieces = [pyarrow.ExtensionArray.storage.__get__(piece) for piece in column.chunks]
        return _plain(
            pyarrow.chunked_array(pieces, type=pyarrow.BaseExtensionType.storage_type.__get__(kind))
        )
    return column


def _holds_strings(values: Values) -> bool:
    if isinstance(values, Cells):
        return values.strings
    if isinstance(values.dtype, pd.ArrowDtype):
        kind = values.dtype.pyarrow_dtype
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        return _is_string(kind)
    return values.dtype.kind == "O"


def _parse_boolean(string: str) -> float | None:
    folded = string.casefold()
    number = exact_number(folded)
    if folded in YES or number == 1:
        return 1.0
    return 0.0 if folded in NO or number == 0 else None


def _first_of(rows: NDArray[np.int64]) -> str:
    """Return the number of the first of some rows, counted from 1, and how many follow, for messages."""
    return f"Row {rows[0] + 1}" + (f" (and {len(rows) - 1} more)" if len(rows) > 1 else "")

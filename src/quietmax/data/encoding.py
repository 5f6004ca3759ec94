"""The public encoding of a table: how the cells of each row become features.

Each cell is converted on its own (THEORY 3.8): its features depend on the cell, on the declared column and on
the declared type of the data (a pandas dtype, or the Arrow type in a Parquet file), never on another cell.  The
type says how a cell is read:

- integers, decimals: exact, whatever their size; booleans: `True` and `False`, as numbers 1 and 0;
- floats: NaN is a missing value;
- strings: without outer blanks; bytes: as UTF-8, other bytes written as `\\xNN`;
- bytes of a fixed length (also UUIDs): as hexadecimal digits;
- dates, times, timestamps: `2024-01-31`, `08:30:00`, `2024-01-31 08:30:00.5Z`; durations: the number of units;
- dictionaries and extension types: as the type of their values;
- null, `None`, `NA`, `NaT`: a missing value.

Lists, structs, maps and all other types are errors, because of the column's type alone.  A cell that is not a
number in a column that is declared as numeric is an error, because of that cell alone.  Errors are for the owner
of the table and are not part of any release.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any, Literal, get_args, overload

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

from quietmax.errors import InvalidData, InvalidInput

Scale = Literal["linear", "log"]
Style = Literal["one-hot", "codes"]

MISSING_MARKERS = frozenset({"", "?", "NA", "N/A", "null", "NULL", "nan", "NaN"})
"""Strings that stand for a missing value (besides an empty cell), unless they are declared as a category."""

_FORMAT, _FORMAT_0_1 = "quietmax encoding 2", "quietmax encoding 1"

_LITERAL = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
"""A number among categories; 01 is a code, not a number."""

_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?inf(inity)?", re.IGNORECASE)
"""A number in a numeric column."""

_FRACTION = (
    (r"(\.[0-9]*?)0+(Z|[+-][0-9]{4})?$", r"\1\2"),
    (r"\.(Z|[+-][0-9]{4})?$", r"\1"),
)
"""Replacements that together remove trailing zeros of the fraction of a second from Arrow's string of a time."""

_STRING_TYPES = (
    pyarrow.types.is_string,
    pyarrow.types.is_large_string,
    pyarrow.types.is_string_view,
    pyarrow.types.is_binary,
    pyarrow.types.is_large_binary,
    pyarrow.types.is_binary_view,
)


@dataclass(frozen=True)
class NumericColumn:
    """A column of numbers with public bounds.

    A value v is clipped to [low, high] and becomes `(v - low) / (high - low)`, with `scale="log"` `ln(1 + v -
    low) / ln(1 + high - low)`.  With `edges` it becomes one feature per interval instead: 1 for the interval
    that contains v, else 0.  Infinity is clipped like any large number.

    Parameters
    ----------
    name : str
        Name of the column.
    low, high : float
        Public bounds, `low < high`.
    scale : {"linear", "log"}
        How values are spread over [0, 1]; ignored with `edges`.
    edges : tuple of float
        Inner borders of the intervals, in rising order; an edge belongs to the interval above it.
    missing : bool
        Whether values may be missing.  A missing value (also NaN) becomes the lower bound, or no interval; one
        more feature is then 1 for it.

    Raises
    ------
    InvalidInput
        If the bounds, the scale or the edges are not valid.

    Examples
    --------
    >>> NumericColumn("age", 0, 100, edges=(18, 65)).feature_names
    ('age>=0', 'age>=18', 'age>=65', 'age missing')
    """

    name: str
    low: float
    high: float
    scale: Scale = "linear"
    edges: tuple[float, ...] = ()
    missing: bool = True

    def __post_init__(self) -> None:
        if not (self.low < self.high and math.isfinite(self.high - self.low)):
            raise InvalidInput(
                f"The bounds of column '{self.name}' must be two finite numbers, the lower one first; got "
                f"{self.low} and {self.high}."
            )
        if self.scale not in get_args(Scale):
            raise InvalidInput(
                f"The scale of column '{self.name}' must be 'linear' or 'log', got {self.scale!r}."
            )
        rising = all(first < second for first, second in zip(self.edges, self.edges[1:], strict=False))
        if not rising or any(not self.low < edge <= self.high for edge in self.edges):
            raise InvalidInput(
                f"The edges of column '{self.name}' must rise and lie between its bounds {self.low} and "
                f"{self.high}, got {list(self.edges)}."
            )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features that the column becomes."""
        intervals = tuple(f"{self.name}>={start:g}" for start in (self.low, *self.edges))
        names = intervals if self.edges else (self.name,)
        return (*names, f"{self.name} missing") if self.missing else names

    def encode(self, values: pd.Series[Any], features: NDArray[np.float32]) -> None:
        """Write the features of a column's cells.

        Parameters
        ----------
        values : pandas.Series
            The cells.
        features : ndarray of float32
            Output array of zeros, one column per feature name.
        """
        numbers = as_numbers(values, self.name)
        absent = np.isnan(numbers)
        # Adding 0.0 turns -0.0 into 0.0: which of the two a comparison returns is left open by IEEE 754.
        clipped = np.clip(np.where(absent, self.low, numbers), self.low, self.high) + 0.0
        if self.edges:
            interval = np.searchsorted(self.edges, clipped, side="right")
            present = np.flatnonzero(~absent)
            features[present, interval[present]] = 1
        elif self.scale == "log":
            # NumPy's log1p may round by the place in the array (vector or scalar code), math.log1p cannot.
            logs = np.fromiter(map(math.log1p, (clipped - self.low).tolist()), np.float64, len(clipped))
            features[:, 0] = logs / math.log1p(self.high - self.low)
        else:
            features[:, 0] = (clipped - self.low) / (self.high - self.low)
        if self.missing:
            features[absent, -1] = 1


@dataclass(frozen=True)
class CategoricalColumn:
    """A column of public categories.

    A cell belongs to the category of the same string, else to the first category that is the same number: 1, 1.0
    and "1.00" are.  A category that is not listed becomes all zeros.

    Parameters
    ----------
    name : str
        Name of the column.
    categories : tuple of str
        The categories in order, all different.
    style : {"one-hot", "codes"}
        One feature per category, or one feature with the value `(i + 1) / k` for the i-th of k categories
        (counted from 0).
    missing : bool
        Whether values may be missing; one more feature is then 1 for a missing value.

    Raises
    ------
    InvalidInput
        If the categories or the style are not valid.

    Examples
    --------
    >>> CategoricalColumn("sex", ("Female", "Male"), missing=False).feature_names
    ('sex=Female', 'sex=Male')
    """

    name: str
    categories: tuple[str, ...]
    style: Style = "one-hot"
    missing: bool = True

    def __post_init__(self) -> None:
        named = all(isinstance(category, str) for category in self.categories)
        if not self.categories or not named or len(set(self.categories)) < len(self.categories):
            raise InvalidInput(
                f"The categories of column '{self.name}' must be at least one string, all different."
            )
        if self.style not in get_args(Style):
            raise InvalidInput(
                f"The style of column '{self.name}' must be 'one-hot' or 'codes', got {self.style!r}."
            )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features that the column becomes."""
        names = (
            (self.name,)
            if self.style == "codes"
            else tuple(f"{self.name}={category}" for category in self.categories)
        )
        return (*names, f"{self.name} missing") if self.missing else names

    def encode(self, values: pd.Series[Any], features: NDArray[np.float32]) -> None:
        """Write the features of a column's cells.

        Parameters
        ----------
        values : pandas.Series
            The cells.
        features : ndarray of float32
            Output array of zeros, one column per feature name.
        """
        strings = as_strings(values)
        index = _map_distinct(strings, self._index)
        known = np.flatnonzero(index >= 0)
        if self.style == "codes":
            features[known, 0] = (index[known] + 1) / len(self.categories)
        else:
            features[known, index[known]] = 1
        if self.missing:
            features[is_missing(strings) & (index < 0), -1] = 1

    def _index(self, string: str) -> int:
        """Return the index of the category of a string, or -1."""
        index = self._by_string.get(string)
        return self._by_number.get(_literal(string), -1) if index is None else index

    @cached_property
    def _by_string(self) -> dict[str, int]:
        return {category: index for index, category in enumerate(self.categories)}

    @cached_property
    def _by_number(self) -> dict[Decimal | None, int]:
        """The index of the first category for each number among the categories."""
        numbers = {_literal(category): index for index, category in reversed([*enumerate(self.categories)])}
        return {number: index for number, index in numbers.items() if number is not None}


Column = NumericColumn | CategoricalColumn


@dataclass(frozen=True)
class Encoding:
    """Public description of a table: its columns in order, its label column and its class names.

    Parameters
    ----------
    columns : tuple of NumericColumn and CategoricalColumn
        The columns that become features, in order.
    label : str
        Name of the label column.
    classes : tuple of str
        Names of the classes, in the order of their numbers.
    inferred : tuple of str
        Everything in the encoding that was read from the records instead of declared.  A guarantee for a model
        that uses such an encoding holds only if these things are public after all.

    Attributes
    ----------
    feature_names : tuple of str
        Names of all features, in order.

    Raises
    ------
    InvalidInput
        If there is no column, if names are repeated, or if there are fewer than two classes.

    Examples
    --------
    >>> encoding = Encoding((NumericColumn("age", 0, 100, missing=False),), "ill", ("no", "yes"))
    >>> encoding.encode(pd.DataFrame({"age": [25, 250]}))
    array([[0.25],
           [1.  ]], dtype=float32)
    """

    columns: tuple[Column, ...]
    label: str
    classes: tuple[str, ...]
    inferred: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [*(column.name for column in self.columns), self.label]
        if not self.columns or len(set(names)) < len(names):
            raise InvalidInput(
                "An encoding must have at least one column besides the label, and all names must be different."
            )
        if len(self.classes) < 2 or len(set(self.classes)) < len(self.classes):
            raise InvalidInput(
                f"The label '{self.label}' must have at least two classes with different names; got "
                f"{len(self.classes)} name(s), {len(set(self.classes))} of them different."
            )

    @cached_property
    def feature_names(self) -> tuple[str, ...]:
        """Names of all features, in order."""
        return tuple(name for column in self.columns for name in column.feature_names)

    @overload
    def encode(self, table: pd.DataFrame, label: None = None) -> NDArray[np.float32]: ...

    @overload
    def encode(self, table: pd.DataFrame, label: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]: ...

    def encode(
        self, table: pd.DataFrame, label: str | None = None
    ) -> NDArray[np.float32] | tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Encode the rows of a table.

        Parameters
        ----------
        table : pandas.DataFrame
            The rows.  Columns that the encoding does not know are ignored.
        label : str, optional
            Name of the label column; without it only features are returned.

        Returns
        -------
        features : ndarray of float32, shape (rows, features)
        labels : ndarray of int64, shape (rows,)
            The class numbers, only with `label`.

        Raises
        ------
        InvalidInput
            If a column is missing or a cell cannot be read.
        """
        require_columns(table, [column.name for column in self.columns])
        named = _with_string_names(table)
        features = np.zeros((len(table), len(self.feature_names)), dtype=np.float32)
        start = 0
        for column in self.columns:
            end = start + len(column.feature_names)
            column.encode(named[column.name], features[:, start:end])
            start = end
        return features if label is None else (features, self.encode_labels(table, label))

    def encode_labels(self, table: pd.DataFrame, label: str | None = None) -> NDArray[np.int64]:
        """Return the class number of every row.

        Parameters
        ----------
        table : pandas.DataFrame
            The rows.
        label : str, optional
            Name of the label column; by default the encoding's own.

        Returns
        -------
        ndarray of int64, shape (rows,)

        Raises
        ------
        InvalidInput
            If a row has no label, or one outside the classes.
        """
        name = self.label if label is None else label
        require_columns(table, [name])
        strings = as_strings(_with_string_names(table)[name])
        numbers = {name: number for number, name in enumerate(self.classes)}
        labels = _map_distinct(strings, lambda string: numbers.get(string, -1))
        wrong = np.flatnonzero(labels < 0)
        if wrong.size:
            problem = "no label" if is_missing(strings[wrong[:1]])[0] else "a label outside the classes"
            raise InvalidData(
                f"{first_of(wrong)} has {problem} in column '{name}'; the declared classes are "
                f"{quoted(self.classes)}."
            )
        return labels

    def to_json(self) -> str:
        """Return the encoding as a JSON string."""
        columns = [{"type": _TYPES[type(column)], **asdict(column)} for column in self.columns]
        content = {
            "format": _FORMAT,
            "columns": columns,
            "label": self.label,
            "classes": self.classes,
            "inferred": self.inferred,
        }
        return json.dumps(content, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Encoding:
        """Read an encoding from JSON.

        Parameters
        ----------
        text : str
            What `to_json` returned, in this version or in version 0.1.

        Returns
        -------
        Encoding

        Raises
        ------
        InvalidInput
            If the string is not the JSON of an encoding.
        """
        try:
            content = json.loads(text)
            if content["format"] == _FORMAT_0_1:
                content = {**content, "format": _FORMAT, "inferred": content["measurements"]}
            if content["format"] != _FORMAT:
                raise ValueError
            return cls(
                columns=tuple(_column_from_json(entry) for entry in content["columns"]),
                label=content["label"],
                classes=tuple(content["classes"]),
                inferred=tuple(content["inferred"]),
            )
        except InvalidInput:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInput(f"This is not the JSON of an encoding in the format '{_FORMAT}'.") from error


_TYPES: dict[type[Column], str] = {NumericColumn: "numeric", CategoricalColumn: "categorical"}


def _column_from_json(entry: Mapping[str, Any]) -> Column:
    """Return one column; raises ValueError, KeyError or TypeError if the entry is not one."""
    fields = dict(entry)
    kind = fields.pop("type")
    if kind == "numeric":
        return NumericColumn(**{**fields, "edges": tuple(fields["edges"])})
    if kind == "categorical":
        return CategoricalColumn(**{**fields, "categories": tuple(fields["categories"])})
    raise ValueError


def require_columns(table: pd.DataFrame, names: Sequence[str]) -> None:
    """Check that a table has the named columns, and each name once.

    Parameters
    ----------
    table : pandas.DataFrame
        The table.
    names : sequence of str
        Names of the columns that are needed.

    Raises
    ------
    InvalidInput
        If a column is missing or two columns have the same name.
    """
    present = [str(column) for column in table.columns]
    distinct = set(present)
    repeated = (
        sorted(name for name in distinct if present.count(name) > 1) if len(distinct) < len(present) else []
    )
    if repeated:
        raise InvalidData(
            f"Column names must be different; the table has several columns named {quoted(repeated)}."
        )
    absent = [name for name in names if name not in distinct]
    if absent:
        raise InvalidInput(f"The table has no column {quoted(absent)}; its columns are {quoted(present)}.")


def _with_string_names(table: pd.DataFrame) -> pd.DataFrame:
    return table.set_axis([str(name) for name in table.columns], axis=1)


def quoted(names: Sequence[str], limit: int = 30) -> str:
    """Return names in quotes, separated by commas, for messages.

    Parameters
    ----------
    names : sequence of str
        The names.
    limit : int
        How many are shown at most.

    Returns
    -------
    str

    Examples
    --------
    >>> quoted(["a", "b", "c"], limit=2)
    "'a', 'b' and 1 more"
    """
    shown = ", ".join(f"'{name}'" for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def first_of(rows: NDArray[np.int64]) -> str:
    """Return the number of the first of some rows, counted from 1, and how many follow, for messages.

    Parameters
    ----------
    rows : ndarray of int64
        Row numbers, counted from 0.

    Returns
    -------
    str

    Examples
    --------
    >>> first_of(np.array([4])), first_of(np.array([4, 7, 9]))
    ('Row 5', 'Row 5 (and 2 more)')
    """
    return f"Row {rows[0] + 1}" + (f" (and {len(rows) - 1} more)" if len(rows) > 1 else "")


# Reading the cells of a column.


def as_strings(values: pd.Series[Any]) -> NDArray[np.object_]:
    """Return every cell as a string without outer blanks; an integer has no decimals, a missing value is "".

    Parameters
    ----------
    values : pandas.Series
        The cells of a column.

    Returns
    -------
    ndarray of str

    Examples
    --------
    >>> as_strings(pd.Series([1.0, None, 2.5])).tolist()
    ['1', '', '2.5']
    """
    return _map_cells(values, as_string)


def as_string(value: Any) -> str:
    """Return one cell as a string; see `as_strings`.

    Parameters
    ----------
    value : object
        A number, boolean, string, bytes, date or time, or a missing value.

    Returns
    -------
    str
    """
    if isinstance(value, str):
        return value.strip()
    if value is None:
        return ""
    if isinstance(value, float | np.floating):
        return "" if value != value else str(int(value)) if value.is_integer() else str(value)
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace").strip()
    if not pd.api.types.is_scalar(value):
        raise InvalidData(
            "Cells must be numbers, booleans, strings, bytes, dates or times; a cell of the table is of type "
            f"{type(value).__name__}."
        )
    if value is pd.NA or value is pd.NaT or pd.isna(value):
        return ""
    if isinstance(value, Decimal) and value.is_finite():
        digits = f"{value:f}"
        return digits.rstrip("0").rstrip(".") if "." in digits else digits
    return str(value)


def as_numbers(values: pd.Series[Any], name: str) -> NDArray[np.float64]:
    """Return every cell as a number, NaN for a missing value.

    Parameters
    ----------
    values : pandas.Series
        The cells of a column.
    name : str
        Name of the column, for errors; no error shows a value.

    Returns
    -------
    ndarray of float64

    Raises
    ------
    InvalidInput
        If a cell is not a number.

    Examples
    --------
    >>> as_numbers(pd.Series(["1.5", "?", "-inf"]), "age").tolist()
    [1.5, nan, -inf]
    """
    if isinstance(values.dtype, pd.ArrowDtype):
        column = _plain(_arrow(values))
        if pyarrow.types.is_boolean(column.type):
            column = column.cast(pyarrow.uint8())
        if pyarrow.types.is_integer(column.type) or pyarrow.types.is_floating(column.type):
            floats = pyarrow.compute.fill_null(column.cast(pyarrow.float64(), safe=False), math.nan)
            return np.asarray(floats, dtype=np.float64)
    elif pd.api.types.is_numeric_dtype(values.dtype) and values.dtype.kind != "c":
        return values.to_numpy(dtype=np.float64, na_value=np.nan)
    numbers = _map_cells(values, _as_number)
    wrong = np.flatnonzero([number is None for number in numbers])
    if wrong.size:
        raise InvalidData(
            f"{first_of(wrong)} has no number in the numeric column '{name}'. An empty cell is a missing value; "
            "a column of other values needs `categories`."
        )
    return numbers.astype(np.float64)


def _as_number(value: object) -> float | None:
    if isinstance(value, bool | np.bool_ | float | np.floating):
        return float(value)
    return parse_number(as_string(value))


def parse_number(string: str) -> float | None:
    """Return the number that a string stands for.

    Parameters
    ----------
    string : str
        A cell as a string.

    Returns
    -------
    float or None
        NaN for a missing value, None if the string is not a number.

    Examples
    --------
    >>> parse_number("-2.50"), parse_number("1,000")
    (-2.5, None)
    """
    if string in MISSING_MARKERS:
        return math.nan
    return float(string) if _DECIMAL.fullmatch(string) else None


def is_missing(strings: Iterable[str]) -> NDArray[np.bool_]:
    """Return for every string whether it stands for a missing value.

    Parameters
    ----------
    strings : iterable of str
        Cells as strings.

    Returns
    -------
    ndarray of bool
    """
    return np.array([string in MISSING_MARKERS for string in strings], dtype=bool)


def _literal(string: str) -> Decimal | None:
    """Return the exact number that a category is, or None."""
    return Decimal(string) if _LITERAL.fullmatch(string) else None


def _map_distinct(strings: NDArray[np.object_], rule: Callable[[str], int]) -> NDArray[np.int64]:
    """Return the rule's integer for every string; equal strings are computed once."""
    known = {string: rule(string) for string in set(strings.tolist())}
    return np.fromiter(map(known.__getitem__, strings.tolist()), dtype=np.int64, count=len(strings))


def _map_cells(values: pd.Series[Any], rule: Callable[[object], object]) -> NDArray[np.object_]:
    """Return the rule's value for every cell; where the type lists distinct values, each is computed once."""
    if isinstance(values.dtype, pd.StringDtype | pd.CategoricalDtype):
        codes, distinct = pd.factorize(values, use_na_sentinel=False)
        return np.array([rule(value) for value in distinct], dtype=object)[codes]
    return np.array([rule(value) for value in _cells(values)], dtype=object)


def _cells(values: pd.Series[Any]) -> list[Any]:
    """Return the cells as Python values; the rule follows from the declared type of the column."""
    if not isinstance(values.dtype, pd.ArrowDtype) and values.dtype.kind not in "mM":
        return values.tolist()
    column = _plain(_arrow(values))
    kind, types = column.type, pyarrow.types
    if types.is_null(kind) or types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        return list(column.to_pylist())
    if types.is_decimal(kind):
        return list(column.to_pylist())
    if types.is_fixed_size_binary(kind):
        return [None if value is None else value.hex() for value in column.to_pylist()]
    if any(test(kind) for test in _STRING_TYPES):
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
    """Return a column as chunks of Arrow arrays."""
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
        pieces = [piece.storage for piece in column.chunks]
        return _plain(pyarrow.chunked_array(pieces, type=kind.storage_type))
    return column

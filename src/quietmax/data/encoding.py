"""How one column of a table becomes features, with public constants only.

Each cell is converted on its own (THEORY 3.8): its features depend on the cell, on the declared column and on
the declared type of the data (a pandas dtype, or the Arrow type in a Parquet file), never on another cell.  The
type says how a cell is read:

- integers, decimals: exact, whatever their size; booleans: `True` and `False`, as numbers 1 and 0;
- floats: NaN is a missing value;
- strings: without outer blanks; bytes: as UTF-8 text, other bytes written as `\\xNN`;
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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any, Literal, get_args, overload

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

from quietmax.errors import InvalidInput

MISSING_MARKERS = frozenset({"", "?", "NA", "N/A", "null", "NULL", "nan", "NaN"})
"""Texts that stand for a missing value (besides an empty cell), unless they are declared as a category."""

_NUMBER = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
"""A number as text, for categories; 01 is a code, not a number."""

_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?inf(inity)?", re.IGNORECASE)
"""A number as text, for numeric columns."""

_FRACTION = (
    (r"(\.[0-9]*?)0+(Z|[+-][0-9]{4})?$", r"\1\2"),
    (r"\.(Z|[+-][0-9]{4})?$", r"\1"),
)
"""Replacements that together remove trailing zeros of the fraction of a second from Arrow's text of a time."""

_TEXT_TYPES = (
    pyarrow.types.is_string,
    pyarrow.types.is_large_string,
    pyarrow.types.is_string_view,
    pyarrow.types.is_binary,
    pyarrow.types.is_large_binary,
    pyarrow.types.is_binary_view,
)

Scale = Literal["linear", "log"]
Style = Literal["one-hot", "codes"]


@dataclass(frozen=True)
class NumericColumn:
    """A column of numbers with public bounds.

    A value v is clipped to [low, high] and becomes `(v - low) / (high - low)`, with `scale="log"` `ln(1 + v -
    low) / ln(1 + high - low)`.  With `edges` it becomes one feature per interval instead, 1 for the interval
    that holds v (an edge belongs to the interval above it).  Infinity is clipped like any large number.  A missing
    value (also NaN) becomes the lower bound (no interval), and one more feature, present if `missing`, is 1 for it.
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
                f"The bounds of column '{self.name}' are {self.low} and {self.high}, but two finite numbers "
                "with the lower one first are needed; correct the bounds."
            )
        if self.scale not in get_args(Scale):
            raise InvalidInput(
                f"The scale of column '{self.name}' is {self.scale!r}, but it must be 'linear' or 'log'; "
                "give one of them."
            )
        if any(not self.low < edge <= self.high for edge in self.edges) or any(
            first >= second for first, second in zip(self.edges, self.edges[1:], strict=False)
        ):
            raise InvalidInput(
                f"The edges of column '{self.name}' must rise and lie between its bounds {self.low} and "
                f"{self.high}; correct the edges or the bounds."
            )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Name of every feature the column becomes."""
        if self.edges:
            starts = (self.low, *self.edges)
            names = tuple(f"{self.name}>={start:g}" for start in starts)
        else:
            names = (self.name,)
        return (*names, f"{self.name} missing") if self.missing else names

    def encode(self, values: pd.Series[Any], features: NDArray[np.float32]) -> None:
        """Write the features of all values into `features`: zeros, one column per feature name."""
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
    """A column of k public categories.

    `one-hot`: one feature per category.  `codes`: one feature, `(i + 1) / k` for the i-th category (from 0).
    A value belongs to the category of the same text, else to the first that is the same number: 1, 1.0 and "1.00" are.
    A category that is not listed becomes all zeros, and so does a missing value, for which one more feature,
    present if `missing`, is 1.
    """

    name: str
    categories: tuple[str, ...]
    style: Style = "one-hot"
    missing: bool = True

    def __post_init__(self) -> None:
        named = all(isinstance(category, str) for category in self.categories)
        if not self.categories or not named or len(set(self.categories)) < len(self.categories):
            raise InvalidInput(
                f"The categories of column '{self.name}' must be a list of different names, at least one; "
                "correct the list."
            )
        if self.style not in get_args(Style):
            raise InvalidInput(
                f"The style of column '{self.name}' is {self.style!r}, but it must be 'one-hot' or 'codes'; "
                "give one of them."
            )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Name of every feature the column becomes."""
        names = (
            (self.name,)
            if self.style == "codes"
            else tuple(f"{self.name}={category}" for category in self.categories)
        )
        return (*names, f"{self.name} missing") if self.missing else names

    def encode(self, values: pd.Series[Any], features: NDArray[np.float32]) -> None:
        """Write the features of all values into `features`: zeros, one column per feature name."""
        texts = as_texts(values)
        index = each(texts, self._place, np.int64)
        known = np.flatnonzero(index >= 0)
        if self.style == "codes":
            features[known, 0] = (index[known] + 1) / len(self.categories)
        else:
            features[known, index[known]] = 1
        if self.missing:
            features[is_missing(texts) & (index < 0), -1] = 1

    def _place(self, text: str) -> int:
        """Return the index of the category of a text, or -1."""
        place = self._texts.get(text)
        return self._numbers.get(_number(text), -1) if place is None else place

    @cached_property
    def _texts(self) -> dict[str, int]:
        return {category: index for index, category in enumerate(self.categories)}

    @cached_property
    def _numbers(self) -> dict[Decimal | None, int]:
        """The index of the first category for each number among the categories."""
        numbers = {_number(category): index for index, category in reversed([*enumerate(self.categories)])}
        return {number: index for number, index in numbers.items() if number is not None}


Column = NumericColumn | CategoricalColumn


def each(texts: NDArray[np.object_], rule: Callable[[str], float], kind: type[np.generic]) -> NDArray[Any]:
    """Return the rule's number for every text; equal texts are looked at once."""
    known = {text: rule(text) for text in set(texts.tolist())}
    return np.fromiter(map(known.__getitem__, texts.tolist()), dtype=kind, count=len(texts))


def as_texts(values: pd.Series[Any]) -> NDArray[np.object_]:
    """Return every value as text without outer blanks; a whole number has no decimals, an empty cell is "".

    >>> as_texts(pd.Series([1.0, None, 2.5])).tolist()
    ['1', '', '2.5']
    """
    return _each_cell(values, as_text)


def as_text(value: Any) -> str:
    """Return one cell as text."""
    if isinstance(value, str):
        return value.strip()
    if value is None:
        return ""
    if isinstance(value, float | np.floating):
        return "" if value != value else str(int(value)) if value.is_integer() else str(value)
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace").strip()
    if not pd.api.types.is_scalar(value):
        raise InvalidInput(
            f"A cell of the table holds a {type(value).__name__}, but cells must be numbers, booleans, strings, bytes, "
            "dates or times; split it into such columns."
        )
    if value is pd.NA or value is pd.NaT or pd.isna(value):
        return ""
    if isinstance(value, Decimal) and value.is_finite():
        text = f"{value:f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return str(value)


def is_missing(texts: Iterable[str]) -> NDArray[np.bool_]:
    """Tell for every text whether it stands for a missing value."""
    return np.array([text in MISSING_MARKERS for text in texts], dtype=bool)


def as_numbers(values: pd.Series[Any], name: str) -> NDArray[np.float64]:
    """Return the values of column `name` as numbers, NaN for a missing one; never show a value in an error.

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
    numbers = _each_cell(values, _as_number)
    wrong = np.flatnonzero([number is None for number in numbers])
    if wrong.size:
        raise InvalidInput(
            f"Column '{name}' holds something other than a number in record {wrong[0] + 1} (and in "
            f"{wrong.size - 1} more); correct it, leave the cell empty if the value is missing, or declare "
            "the column's categories."
        )
    return numbers.astype(np.float64)


def text_to_number(text: str) -> float | None:
    """Return the number that a text stands for, NaN for a missing value, None if it is something else.

    >>> text_to_number("-2.50"), text_to_number("1,000")
    (-2.5, None)
    """
    if text in MISSING_MARKERS:
        return math.nan
    return float(text) if _DECIMAL.fullmatch(text) else None


def _as_number(value: object) -> float | None:
    if isinstance(value, bool | np.bool_ | float | np.floating):
        return float(value)
    return text_to_number(as_text(value))


def _number(text: str) -> Decimal | None:
    return Decimal(text) if _NUMBER.fullmatch(text) else None


def _each_cell(values: pd.Series[Any], rule: Callable[[object], object]) -> NDArray[np.object_]:
    """Return what a rule makes of each cell; where the type lists distinct values, each is looked at once."""
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
    if any(test(kind) for test in _TEXT_TYPES):
        return list(column.cast(pyarrow.large_binary()).to_pylist())
    if types.is_temporal(kind) and not types.is_interval(kind):
        try:
            texts = column.cast(pyarrow.string())
        except pyarrow.ArrowException as error:
            raise InvalidInput(
                f"Column '{values.name}' has the type {kind}, whose time zone is not known here; write it in UTC."
            ) from error
        for pattern, kept in _FRACTION:
            texts = pyarrow.compute.replace_substring_regex(texts, pattern, kept)
        return list(texts.to_pylist())
    raise InvalidInput(
        f"Column '{values.name}' has the type {kind}, but a column must hold numbers, booleans, strings, bytes, dates "
        "or times; split it into such columns, or ignore it."
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
        pieces = [piece.storage for piece in column.chunks]
        return _plain(pyarrow.chunked_array(pieces, type=kind.storage_type))
    return column


_FORMAT = "quietmax encoding 2"
_FORMAT_0_1 = "quietmax encoding 1"


@dataclass(frozen=True)
class Encoding:
    """Public description of a table: its columns in order, its label column, its class names.

    `inferred` names everything in it that was read off the records instead of given; a guarantee for a
    model that uses such an encoding holds only if these things are public after all.

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
                "An encoding needs at least one column besides the label and different names for all of "
                "them; correct the columns."
            )
        if len(self.classes) < 2 or len(set(self.classes)) < len(self.classes):
            raise InvalidInput(
                f"The label '{self.label}' needs at least two classes with different names, but "
                f"{len(self.classes)} given name(s) do not make that; correct the classes."
            )

    @cached_property
    def feature_names(self) -> tuple[str, ...]:
        """Name of every feature, in order."""
        return tuple(name for column in self.columns for name in column.feature_names)

    @overload
    def encode(self, table: pd.DataFrame, label: None = None) -> NDArray[np.float32]: ...

    @overload
    def encode(self, table: pd.DataFrame, label: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]: ...

    def encode(
        self, table: pd.DataFrame, label: str | None = None
    ) -> NDArray[np.float32] | tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the features of the table's rows and, if the label column is named, the class numbers.

        Columns that the encoding does not know are left aside.
        """
        require_columns(table, [column.name for column in self.columns])
        named = _with_text_names(table)
        features = np.zeros((len(table), len(self.feature_names)), dtype=np.float32)
        start = 0
        for column in self.columns:
            end = start + len(column.feature_names)
            column.encode(named[column.name], features[:, start:end])
            start = end
        return features if label is None else (features, self.encode_labels(table, label))

    def encode_labels(self, table: pd.DataFrame, label: str | None = None) -> NDArray[np.int64]:
        """Return the class number of every row, read from the label column."""
        name = self.label if label is None else label
        require_columns(table, [name])
        texts = as_texts(_with_text_names(table)[name])
        numbers = {name: number for number, name in enumerate(self.classes)}
        labels = each(texts, lambda text: numbers.get(text, -1), np.int64)
        wrong = np.flatnonzero(labels < 0)
        if wrong.size:
            kind = "no label" if is_missing(texts[wrong[:1]])[0] else "a label outside the declared classes"
            raise InvalidInput(
                f"Record {wrong[0] + 1} has {kind} in column '{name}' (and {wrong.size - 1} more have a "
                f"wrong one or none), but the classes are {_listed(self.classes)}; correct the label or "
                "declare its class."
            )
        return labels

    def to_json(self) -> str:
        """Return the encoding as JSON text."""
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
        """Return the encoding that `to_json` wrote."""
        try:
            content = json.loads(text)
            if content["format"] == _FORMAT_0_1:
                content = {**content, "format": _FORMAT, "inferred": content["measurements"]}
            if content["format"] != _FORMAT:
                raise ValueError
            return cls(
                columns=tuple(_column(entry) for entry in content["columns"]),
                label=content["label"],
                classes=tuple(content["classes"]),
                inferred=tuple(content["inferred"]),
            )
        except InvalidInput:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInput(
                f"This is not the description of an encoding in the form '{_FORMAT}'; give the text that "
                "Encoding.to_json wrote."
            ) from error


_TYPES: dict[type[Column], str] = {NumericColumn: "numeric", CategoricalColumn: "categorical"}


def _column(entry: Mapping[str, Any]) -> Column:
    fields = dict(entry)
    kind = fields.pop("type")
    if kind == "numeric":
        return NumericColumn(**{**fields, "edges": tuple(fields["edges"])})
    if kind == "categorical":
        return CategoricalColumn(**{**fields, "categories": tuple(fields["categories"])})
    raise ValueError


def require_columns(table: pd.DataFrame, names: list[str]) -> None:
    """Refuse a table that lacks one of the named columns or has several columns of one name."""
    present = [str(column) for column in table.columns]
    distinct = set(present)
    repeated = (
        sorted(name for name in distinct if present.count(name) > 1) if len(distinct) < len(present) else []
    )
    if repeated:
        raise InvalidInput(
            f"The table has several columns named {_listed(repeated)}, but every column needs its own name; "
            "rename them."
        )
    absent = [name for name in names if name not in distinct]
    if absent:
        raise InvalidInput(
            f"The table has no column {_listed(absent)}, its columns are {_listed(present)}; correct the "
            "name, add the column, or separate columns by commas."
        )


def _with_text_names(table: pd.DataFrame) -> pd.DataFrame:
    return table.set_axis([str(name) for name in table.columns], axis=1)


def _listed(names: list[str] | tuple[str, ...], limit: int = 30) -> str:
    """Return names in quotes, separated by commas; of many only the first."""
    shown = ", ".join(f"'{name}'" for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"

"""Building an ONNX graph, operation by operation; and the encoding of a table in it, one input per column, by name.

A column of numbers takes float64, NaN for a missing value.  All other columns take strings, "" for a missing value.
What a cell becomes is what `quietmax.data.encoding` makes of it.  Where standard operators cannot tell, or where
Quietmax would refuse the cell, the row is marked as unreadable, so that it gets no answer rather than another one.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from decimal import Decimal
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quietmax.data.cells import MISSING_MARKERS, NO, YES, exact_number
from quietmax.data.encoding import (
    BooleanColumn,
    CategoricalColumn,
    Column,
    DateColumn,
    HashedColumn,
    NumericColumn,
)
from quietmax.errors import DataUnavailable, InvalidInput

OPSET, IR_VERSION = 20, 9
"""Version of the standard operators, the first with regular expressions, and of the file format that belongs to it."""

_TYPES = {np.float32: "FLOAT", np.float64: "DOUBLE", np.int64: "INT64", np.bool_: "BOOL", np.str_: "STRING"}


def _require_onnx() -> Any:
    """Import the package onnx."""
    try:
        import onnx
    except ImportError:
        raise DataUnavailable(
            "An export to ONNX requires the package onnx. Install: pip install 'quietmax[onnx]'."
        ) from None
    return onnx


class Graph:
    """An ONNX graph under construction. Values are known by their names."""

    def __init__(self, reserved: Collection[str]) -> None:
        self._onnx = _require_onnx()
        self._reserved = set(reserved)
        self._count = 0
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def __call__(
        self, operator: str, *inputs: str | NDArray[Any] | np.generic, outputs: int = 1, **attributes: Any
    ) -> str:
        """Add an operation and return the name of its first output."""
        results = [self._name() for _ in range(outputs)]
        names = [each if isinstance(each, str) else self._constant(each) for each in inputs]
        self.nodes.append(self._onnx.helper.make_node(operator, names, results, **attributes))
        return results[0]

    def output(self, value: str, name: str) -> None:
        """Give a value the name of an output."""
        self.nodes.append(self._onnx.helper.make_node("Identity", [value], [name]))

    def cast(self, value: str, kind: type) -> str:
        """Return a value as another type."""
        return self("Cast", value, to=self.type_of(kind))

    def type_of(self, kind: type) -> int:
        """Return the number by which ONNX knows a type."""
        return int(getattr(self._onnx.TensorProto, _TYPES[kind]))

    def trunc(self, value: str) -> str:
        """Round towards zero; ONNX has no operator for it."""
        return self("Mul", self("Sign", value), self("Floor", self("Abs", value)))

    def columns(self, value: str) -> str:
        """Return a vector as a matrix of one column."""
        return self("Unsqueeze", value, np.array([1]))

    def side_by_side(self, values: list[str]) -> str:
        """Join matrices of the same number of rows."""
        return values[0] if len(values) == 1 else self("Concat", *values, axis=1)

    def any_of(self, values: list[str]) -> str:
        """Return where at least one of several booleans holds."""
        result = values[0]
        for value in values[1:]:
            result = self("Or", result, value)
        return result

    def unit(self, rows: str, floor: float) -> str:
        """Return rows divided by their length, or by the floor where that is larger."""
        squares = self("ReduceSumSquare", rows, np.array([1]), keepdims=1)
        return self("Div", rows, self("Max", self("Sqrt", squares), np.array([floor], np.float32)))

    def _name(self) -> str:
        """Return a name that nothing has yet."""
        while (name := f"value {self._count + 1}") in self._reserved:
            self._count += 1
        self._count += 1
        return name

    def _constant(self, value: ArrayLike) -> str:
        """Add a constant and return its name."""
        array, name = np.asarray(value), self._name()
        if array.dtype.kind == "U":
            strings = [each.encode() for each in array.ravel().tolist()]
            kind = self.type_of(np.str_)
            self.constants.append(self._onnx.helper.make_tensor(name, kind, array.shape, strings))
        else:
            self.constants.append(self._onnx.numpy_helper.from_array(array, name))
        return name


# --- Columns ----------------------------------------------------------------------------------------------------------


_Encoded = tuple[str, str | None]
"""The features of a column, float32 of shape (rows, features), and which cells are unreadable, if any can be."""

_EXPONENT = r"-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)[eE][+-]?[0-9]{1,3}"
"""Numbers that regular expressions cannot compare with a category."""
_LONGEST_PATTERN = 20_000
_TIME = (
    r"([T ]([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9](\.[0-9]+)?)?(Z|[+-]([01][0-9]|2[0-3])(:?[0-5][0-9])?)?)?"
)
_DATE_PARTS = {"Y": "[0-9]{4}", "m": "(0[1-9]|1[0-2])", "d": "(0[1-9]|[12][0-9]|3[01])"}
_ISO = "%Y-%m-%d"
_DAYS = (0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_OF_STOLL = "[\\t-\\r ]*"
"""Blanks that may stand before an integer where onnxruntime reads it from a string."""


def _input_type(column: Column) -> type:
    """Return the type of a column's input."""
    return np.float64 if isinstance(column, NumericColumn) else np.str_


def _indicators(graph: Graph, hits: list[str]) -> str:
    """Return booleans as columns of 0 and 1."""
    return graph.side_by_side([graph.columns(graph.cast(hit, np.float32)) for hit in hits])


def _with_missing(graph: Graph, column: Column, features: str, absent: str) -> str:
    """Append the feature of the missing value, if the column has one."""
    if not column.missing:
        return features
    return graph.side_by_side([features, _indicators(graph, [absent])])


def _numeric(graph: Graph, column: NumericColumn) -> _Encoded:
    """Encode numbers; see `NumericColumn.write`."""
    numbers = column.name
    parsed = [column.parse(value) for value in column.missing_values]
    codes = [code for code in parsed if code is not None and not math.isnan(code)]
    equal = [graph("Equal", numbers, np.float64(code)) for code in codes]
    absent = graph.any_of([graph("IsNaN", numbers), *equal])
    low, high = np.float64(column.low), np.float64(column.high)
    clipped = graph("Clip", graph("Where", absent, low, numbers), low, high)
    if column.edges:
        starts, ends = np.array([-np.inf, *column.edges]), np.array([*column.edges, np.inf])
        values = graph.columns(clipped)
        inside = graph("And", graph("GreaterOrEqual", values, starts), graph("Less", values, ends))
        present = graph.columns(graph("Not", absent))
        indicators = graph.cast(graph("And", inside, present), np.float32)
        return _with_missing(graph, column, indicators, absent), None
    distance = graph("Sub", clipped, low)
    if column.scale == "log":
        share = graph("Div", _log1p(graph, distance), np.float64(math.log1p(column.high - column.low)))
    else:
        share = graph("Div", distance, high - low)
    return _with_missing(graph, column, graph.columns(graph.cast(share, np.float32)), absent), None


def _log1p(graph: Graph, value: str) -> str:
    """Return ln(1 + x), as exact as float64 allows: `x ln(u) / (u - 1)` for u = 1 + x, and x where u is 1."""
    one = np.float64(1.0)
    above = graph("Add", value, one)
    ratio = graph("Div", graph("Mul", graph("Log", above), value), graph("Sub", above, one))
    return graph("Where", graph("Equal", above, one), value, ratio)


def _matches(graph: Graph, column: Column, alternatives: Iterable[str]) -> str:
    """Return which cells of a column match one of several regular expressions, without outer blanks."""
    pattern = f"{_BLANKS}*({'|'.join(alternatives)}){_BLANKS}*"
    if len(pattern) > _LONGEST_PATTERN:
        raise InvalidInput(
            f"Column '{column.name}' cannot be exported to ONNX, because its values match in any case and have too "
            "many spellings."
        )
    return graph("RegexFullMatch", column.name, pattern=pattern)


def _absent(graph: Graph, column: Column) -> str:
    """Return which cells are missing values."""
    return _matches(graph, column, map(_literal, sorted(MISSING_MARKERS.union(column.missing_values))))


def _categorical(graph: Graph, column: CategoricalColumn) -> _Encoded:
    """Encode categories; see `CategoricalColumn`."""
    numbers = [number for category in column.categories if (number := exact_number(category)) is not None]
    if len(set(numbers)) < len(numbers):
        raise InvalidInput(
            f"Column '{column.name}' cannot be exported to ONNX, because two of its categories are the same number."
        )
    hits = []
    for category in column.categories:
        number = exact_number(category)
        spellings = [_any_case(category.casefold()) if column.ignore_case else _literal(category)]
        hits.append(
            _matches(graph, column, spellings if number is None else [*spellings, _plain_number(number)])
        )
    known = graph.any_of(hits)
    absent = graph("And", _absent(graph, column), graph("Not", known))
    features = _indicators(graph, hits)
    if column.style == "codes":
        codes = (np.arange(len(hits)) + 1) / len(hits)
        features = graph("MatMul", features, codes[:, None].astype(np.float32))
    encoded = _with_missing(graph, column, features, absent)
    if not numbers:
        return encoded, None
    return encoded, graph(
        "And", _matches(graph, column, [_EXPONENT]), graph("Not", graph("Or", known, absent))
    )


def _boolean(graph: Graph, column: BooleanColumn) -> _Encoded:
    """Encode yes and no; see `BooleanColumn`."""
    absent = _absent(graph, column)
    present = graph("Not", absent)
    answers = []
    for words, number in ((NO, Decimal(0)), (YES, Decimal(1))):
        spellings = [*map(_any_case, sorted(words)), _plain_number(number)]
        answers.append(graph("And", _matches(graph, column, spellings), present))
    unreadable = graph("Not", graph.any_of([absent, *answers]))
    return _with_missing(graph, column, _indicators(graph, answers), absent), unreadable


def _date(graph: Graph, column: DateColumn) -> _Encoded:
    """Encode dates; see `DateColumn`."""
    style = column.format or _ISO
    form = re.fullmatch(r"%([Ymd])([-./])%([Ymd])\2%([Ymd])", style)
    if (
        column.bounds is None
        or len(column.low) != 10
        or form is None
        or len(set(form.groups()) - {form[2]}) < 3
    ):
        raise InvalidInput(
            f"Column '{column.name}' cannot be exported to ONNX: only dates such as 2024-01-31 or 31.01.2024 can, "
            "without the time of day."
        )
    order = (form[1], form[3], form[4])
    absent = _absent(graph, column)
    plain = re.escape(form[2]).join(_DATE_PARTS[part] for part in order)
    written = plain + _TIME if column.format is None else plain
    is_date = graph("RegexFullMatch", column.name, pattern=f"{_OF_STOLL}{written}{_BLANKS}*")
    readable = graph("And", is_date, graph("Not", absent))
    # Every cell must have three parts that are integers.
    dates = graph("Where", readable, column.name, np.array(form[2].join(_FIRST_DAY[part] for part in order)))
    parts = graph("StringSplit", dates, delimiter=form[2], maxsplit=2, outputs=2)
    year, month, day = (
        graph.cast(graph("Gather", parts, np.array(order.index(part)), axis=1), np.int64) for part in "Ymd"
    )
    ordinal, valid = _ordinal(graph, year, month, day)
    low, high = column.bounds
    share = graph("Div", graph.cast(graph("Sub", ordinal, np.int64(low)), np.float64), np.float64(high - low))
    clipped = graph("Clip", share, np.float64(0.0), np.float64(1.0))
    features = graph.cast(graph("Where", absent, np.float64(0.0), clipped), np.float32)
    unreadable = graph("Not", graph("Or", absent, graph("And", readable, valid)))
    return _with_missing(graph, column, graph.columns(features), absent), unreadable


_FIRST_DAY = {"Y": "0001", "m": "01", "d": "01"}


def _ordinal(graph: Graph, year: str, month: str, day: str) -> tuple[str, str]:
    """Return the number of days since the beginning of the year 1, and which dates exist."""

    def divides(number: int) -> str:
        return graph("Equal", graph("Mod", year, np.int64(number)), np.int64(0))

    leap = graph("Or", graph("And", divides(4), graph("Not", divides(100))), divides(400))
    past = graph("Sub", year, np.int64(1))
    leap_days = graph("Sub", graph("Div", past, np.int64(4)), graph("Div", past, np.int64(100)))
    leap_days = graph("Add", leap_days, graph("Div", past, np.int64(400)))
    before_year = graph("Add", graph("Mul", past, np.int64(365)), leap_days)
    leap_day = graph.cast(graph("And", leap, graph("Greater", month, np.int64(2))), np.int64)
    before_month = graph("Gather", np.concatenate([[0], np.cumsum(_DAYS)])[: len(_DAYS)], month)
    ordinal = graph("Add", graph("Add", before_year, before_month), graph("Add", leap_day, day))
    february = graph.cast(graph("And", leap, graph("Equal", month, np.int64(2))), np.int64)
    last = graph("Add", graph("Gather", np.array(_DAYS), month), february)
    exists = graph("And", graph("LessOrEqual", day, last), graph("Greater", year, np.int64(0)))
    return ordinal, exists


_ENCODERS: dict[type, Callable[[Graph, Any], _Encoded]] = {
    NumericColumn: _numeric,
    CategoricalColumn: _categorical,
    BooleanColumn: _boolean,
    DateColumn: _date,
}


def _encode_column(graph: Graph, column: Column) -> _Encoded:
    """Add the operations that encode a column, whose input has the column's name."""
    if type(column) in _ENCODERS:
        return _ENCODERS[type(column)](graph, column)
    needed = "hashes (BLAKE2b)" if isinstance(column, HashedColumn) else "tokenizers"
    raise InvalidInput(
        f"Column '{column.name}' cannot be exported to ONNX, which has no operator for {needed}. The other "
        "formats can hold it."
    )


# --- Regular expressions ----------------------------------------------------------------------------------------------


def _literal(string: str) -> str:
    """Return what matches a string alone."""
    return "".join(f"\\x{{{ord(character):x}}}" for character in string)


def _any_of(characters: Iterable[str]) -> str:
    """Return what matches one of several characters."""
    return f"[{''.join(map(_literal, characters))}]"


_BLANKS = _any_of(character for character in map(chr, range(0x3001)) if character.isspace())
"""What `str.strip` removes."""


_CASED = range(0x20000)
"""Characters that `str.casefold` may change."""


@cache
def _characters_by_case() -> dict[str, list[str]]:
    """Return the characters that `str.casefold` changes, by what it makes of them."""
    found = defaultdict(list)
    for character in map(chr, _CASED):
        if (folded := character.casefold()) != character:
            found[folded].append(character)
    return found


def _any_case(folded: str) -> str:
    """Return what matches the strings whose `casefold` is this one.

    Some characters fold to two or three. They are alternatives wherever these stand.
    """
    table = _characters_by_case()
    rest = [""] * (len(folded) + 1)
    for place in reversed(range(len(folded))):
        options = []
        for width in (1, 2, 3):
            part = folded[place : place + width]
            characters = [*([part] if width == 1 else []), *table.get(part, [])]
            if characters and len(part) == width:
                options.append(_any_of(characters) + rest[place + width])
        rest[place] = options[0] if len(options) == 1 else f"({'|'.join(options)})"
        if len(rest[place]) > _LONGEST_PATTERN:
            return rest[place]  # refused by the caller
    return rest[0]


def _plain_number(number: Decimal) -> str:
    """Return what matches the ways to write a number without an exponent; zero may have one."""
    if number == 0:
        return r"-?(0(\.0*)?|\.0+)([eE][+-]?[0-9]{1,3})?"
    sign = "-" if number < 0 else ""
    integer, _, fraction = f"{abs(number):f}".partition(".")
    fraction = fraction.rstrip("0")
    if not fraction:
        return rf"{sign}{integer}(\.0*)?"
    return rf"{sign}{'0?' if integer == '0' else integer}\.{fraction}0*"

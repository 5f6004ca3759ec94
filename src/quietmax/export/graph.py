"""Building an ONNX graph, operation by operation; and the encoding of a table in it, one input per column, by name.

A column of numbers takes float64, NaN for a missing value.  All other columns take strings, "" for a missing value.
What a cell becomes is what `quietmax.data.encoding` makes of it.  Where standard operators cannot tell, or where
Quietmax would refuse the cell, the row is marked as unreadable, so that it gets no answer rather than another one.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, reduce
from operator import or_
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from quietmax._lazy import required
from quietmax.data.cells import MISSING_MARKERS, NO, YES, exact_number
from quietmax.data.encoding import (
    BooleanColumn,
    CategoricalColumn,
    Column,
    DateColumn,
    HashedColumn,
    NumericColumn,
    TextColumn,
)
from quietmax.errors import InvalidInput

OPSET, IR_VERSION = 20, 9
"""Version of the standard operators, the first with regular expressions, and of the file format that belongs to it."""

_TYPES = {np.float32: "FLOAT", np.float64: "DOUBLE", np.int64: "INT64", np.bool_: "BOOL", np.str_: "STRING"}


class Graph:
    """An ONNX graph under construction."""

    def __init__(self, reserved: Collection[str]) -> None:
        self._onnx = required("onnx", "An export to ONNX")
        self._reserved = set(reserved)
        self._count = 0
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def __call__(
        self, operator: str, *inputs: Value | ArrayLike, outputs: int = 1, **attributes: Any
    ) -> Value:
        """Add an operation and return its first output."""
        results = [self._name() for _ in range(outputs)]
        names = [each.name if isinstance(each, Value) else self._constant(each) for each in inputs]
        self.nodes.append(self._onnx.helper.make_node(operator, names, results, **attributes))
        return Value(self, results[0])

    def _output(self, value: Value, name: str) -> None:
        """Give a value the name of an output."""
        self.nodes.append(self._onnx.helper.make_node("Identity", [value.name], [name]))

    def _type(self, kind: type) -> int:
        """Return the number by which ONNX knows a type."""
        return int(getattr(self._onnx.TensorProto, _TYPES[kind]))

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
            kind = self._type(np.str_)
            self.constants.append(self._onnx.helper.make_tensor(name, kind, array.shape, strings))
        else:
            self.constants.append(self._onnx.numpy_helper.from_array(array, name))
        return name


def _operation(operator: str, *, reflected: bool = False) -> Callable[[Value, Any], Value]:
    """Return the method of an arithmetic or logical operator."""

    def _apply(value: Value, other: Any) -> Value:
        return value.graph(operator, other, value) if reflected else value.graph(operator, value, other)

    return _apply


@dataclass(frozen=True, eq=False)
class Value:
    """A value of a graph, for each row of the input. Python's operators add those of ONNX to the graph."""

    graph: Graph
    name: str

    __array_ufunc__ = None  # An array leaves the arithmetic with a value to the value
    __add__ = _operation("Add")
    __sub__ = _operation("Sub")
    __mul__ = _operation("Mul")
    __truediv__ = _operation("Div")
    __rtruediv__ = _operation("Div", reflected=True)
    __mod__ = _operation("Mod")
    __matmul__ = _operation("MatMul")
    __rmatmul__ = _operation("MatMul", reflected=True)
    __and__ = _operation("And")
    __or__ = _operation("Or")
    __lt__ = _operation("Less")
    __gt__ = _operation("Greater")
    __le__ = _operation("LessOrEqual")
    __ge__ = _operation("GreaterOrEqual")

    def __invert__(self) -> Value:
        return self("Not")

    def __call__(self, operator: str, *others: Value | ArrayLike, **attributes: Any) -> Value:
        """Add an operation whose first input is this value."""
        return self.graph(operator, self, *others, **attributes)

    def _cast(self, kind: type) -> Value:
        """Return the value as another type."""
        return self("Cast", to=self.graph._type(kind))

    def _trunc(self) -> Value:
        """Round towards zero; ONNX has no operator for it."""
        return self("Sign") * self("Abs")("Floor")

    def _column(self) -> Value:
        """Return a vector as a matrix of one column."""
        return self("Unsqueeze", np.array([1]))

    def _squares(self) -> Value:
        """Return the sum of the squares of each row, as a column."""
        return self("ReduceSumSquare", np.array([1]), keepdims=1)

    def _unit(self, floor: float) -> Value:
        """Return rows divided by their length, or by the floor where that is larger."""
        return self / self._squares()("Sqrt")("Max", np.float32(floor))


def _side_by_side(values: Sequence[Value]) -> Value:
    """Join matrices of the same number of rows."""
    return values[0] if len(values) == 1 else values[0]("Concat", *values[1:], axis=1)


def _any_of(values: Sequence[Value]) -> Value:
    """Return where at least one of several booleans holds."""
    return reduce(or_, values)


# --- Columns ----------------------------------------------------------------------------------------------------------

_Encoded = tuple[Value, Value | None]
"""The features of a column, float32 of shape (rows, features), and which cells are unreadable, if any can be."""

_EXPONENT = r"-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)[eE][+-]?[0-9]{1,3}"
"""Numbers that regular expressions cannot compare with a category."""
_LONGEST_PATTERN = 20_000
_TIME = (
    r"([T ]([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9](\.[0-9]+)?)?(Z|[+-]([01][0-9]|2[0-3])(:?[0-5][0-9])?)?)?"
)
_DATE_PARTS = {"Y": "[0-9]{4}", "m": "(0[1-9]|1[0-2])", "d": "(0[1-9]|[12][0-9]|3[01])"}
_FIRST_DAY = {"Y": "0001", "m": "01", "d": "01"}
_ISO = "%Y-%m-%d"
_DAYS = (0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_OF_STOLL = "[\\t-\\r ]*"
"""Blanks that may stand before an integer where onnxruntime reads it from a string."""


def _input_type(column: Column) -> type:
    """Return the type of a column's input."""
    return np.float64 if isinstance(column, NumericColumn) else np.str_


def _indicators(hits: Sequence[Value]) -> Value:
    """Return booleans as columns of 0 and 1."""
    return _side_by_side([hit._cast(np.float32)._column() for hit in hits])


def _with_missing(column: Column, features: Value, absent: Value) -> Value:
    """Append the feature of the missing value, if the column has one."""
    return _side_by_side([features, _indicators([absent])]) if column.missing else features


def _numeric(cells: Value, column: NumericColumn) -> _Encoded:
    """Encode numbers; see `NumericColumn`."""
    parsed = [column.parse(value) for value in column.missing_values]
    codes = [code for code in parsed if code is not None and not math.isnan(code)]
    absent = _any_of([cells("IsNaN"), *(cells("Equal", np.float64(code)) for code in codes)])
    low, high = np.float64(column.low), np.float64(column.high)
    clipped = absent("Where", low, cells)("Clip", low, high)
    if column.edges:
        starts, ends = np.array([-np.inf, *column.edges]), np.array([*column.edges, np.inf])
        values = clipped._column()
        inside = (values >= starts) & (values < ends) & (~absent)._column()
        return _with_missing(column, inside._cast(np.float32), absent), None
    distance = clipped - low
    if column.scale == "log":
        share = _log1p(distance) / np.float64(math.log1p(column.high - column.low))
    else:
        share = distance / (high - low)
    return _with_missing(column, share._cast(np.float32)._column(), absent), None


def _log1p(value: Value) -> Value:
    """Return ln(1 + x), as exact as float64 allows: `x ln(u) / (u - 1)` for u = 1 + x, and x where u is 1."""
    above = value + 1.0
    return above("Equal", 1.0)("Where", value, above("Log") * value / (above - 1.0))


def _matches(cells: Value, column: Column, alternatives: Iterable[str]) -> Value:
    """Return which cells of a column match one of several regular expressions, without outer blanks."""
    pattern = f"{_BLANKS}*({'|'.join(alternatives)}){_BLANKS}*"
    if len(pattern) > _LONGEST_PATTERN:
        raise InvalidInput(
            f"Column '{column.name}' cannot be exported to ONNX, because its values match in any case and have too "
            "many spellings."
        )
    return cells("RegexFullMatch", pattern=pattern)


def _absent(cells: Value, column: Column) -> Value:
    """Return which cells are missing values."""
    return _matches(cells, column, map(_literal, sorted(MISSING_MARKERS.union(column.missing_values))))


def _categorical(cells: Value, column: CategoricalColumn) -> _Encoded:
    """Encode categories; see `CategoricalColumn`."""
    numbers = [exact_number(category) for category in column.categories]
    present = [number for number in numbers if number is not None]
    if len(set(present)) < len(present):
        raise InvalidInput(
            f"Column '{column.name}' cannot be exported to ONNX, because two of its categories are the same number."
        )
    hits = []
    for category, number in zip(column.categories, numbers, strict=True):
        spellings = [_any_case(category.casefold()) if column.ignore_case else _literal(category)]
        spellings += [] if number is None else [_plain_number(number)]
        hits.append(_matches(cells, column, spellings))
    known = _any_of(hits)
    absent = _absent(cells, column) & ~known
    features = _indicators(hits)
    if column.style == "codes":
        codes = (np.arange(len(hits)) + 1) / len(hits)
        features = features @ codes[:, None].astype(np.float32)
    unreadable = _matches(cells, column, [_EXPONENT]) & ~(known | absent) if present else None
    return _with_missing(column, features, absent), unreadable


def _boolean(cells: Value, column: BooleanColumn) -> _Encoded:
    """Encode yes and no; see `BooleanColumn`."""
    absent = _absent(cells, column)
    answers = []
    for words, number in ((NO, Decimal(0)), (YES, Decimal(1))):
        spellings = [*map(_any_case, sorted(words)), _plain_number(number)]
        answers.append(_matches(cells, column, spellings) & ~absent)
    return _with_missing(column, _indicators(answers), absent), ~_any_of([absent, *answers])


def _date(cells: Value, column: DateColumn) -> _Encoded:
    """Encode dates; see `DateColumn`."""
    form = re.fullmatch(r"%([Ymd])([-./])%([Ymd])\2%([Ymd])", column.format or _ISO)
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
    order, mark = (form[1], form[3], form[4]), form[2]
    absent = _absent(cells, column)
    plain = re.escape(mark).join(_DATE_PARTS[part] for part in order)
    written = plain + _TIME if column.format is None else plain
    readable = cells("RegexFullMatch", pattern=f"{_OF_STOLL}{written}{_BLANKS}*") & ~absent
    # Every cell must have three parts that are integers.
    dates = readable("Where", cells, np.array(mark.join(_FIRST_DAY[part] for part in order)))
    parts = dates("StringSplit", delimiter=mark, maxsplit=2, outputs=2)
    year, month, day = (
        parts("Gather", np.array(order.index(part)), axis=1)._cast(np.int64) for part in "Ymd"
    )
    ordinal, valid = _ordinal(year, month, day)
    low, high = column.bounds
    share = (ordinal - low)._cast(np.float64) / np.float64(high - low)
    features = absent("Where", 0.0, share("Clip", 0.0, 1.0))._cast(np.float32)
    return _with_missing(column, features._column(), absent), ~(absent | (readable & valid))


def _ordinal(year: Value, month: Value, day: Value) -> tuple[Value, Value]:
    """Return the number of days since the beginning of the year 1, and which dates exist."""
    by_4, by_100, by_400 = ((year % number)("Equal", 0) for number in (4, 100, 400))
    leap = (by_4 & ~by_100) | by_400
    past = year - 1
    before_year = past * 365 + (past / 4 - past / 100 + past / 400)
    before_month = year.graph("Gather", np.concatenate([[0], np.cumsum(_DAYS)])[: len(_DAYS)], month)
    leap_day, leap_february = ((leap & place)._cast(np.int64) for place in (month > 2, month("Equal", 2)))
    last = year.graph("Gather", np.array(_DAYS), month) + leap_february
    return before_year + before_month + leap_day + day, (day <= last) & (year > 0)


_ENCODERS: dict[type, Callable[[Value, Any], _Encoded]] = {
    NumericColumn: _numeric,
    CategoricalColumn: _categorical,
    BooleanColumn: _boolean,
    DateColumn: _date,
}


def _encode_column(graph: Graph, column: Column) -> _Encoded:
    """Add the operations that encode a column, whose input has the column's name."""
    if type(column) in _ENCODERS:
        return _ENCODERS[type(column)](Value(graph, column.name), column)
    reasons = {HashedColumn: "hashes (BLAKE2b)", TextColumn: "tokenizers"}
    needed = reasons.get(type(column), f"columns of the type '{column.kind}'")
    raise InvalidInput(
        f"Column '{column.name}' cannot be exported to ONNX, which has no operator for {needed}. The other "
        "formats can hold it."
    )


# --- Regular expressions ----------------------------------------------------------------------------------------------


def _literal(string: str) -> str:
    """Return what matches a string alone."""
    return "".join(f"\\x{{{ord(character):x}}}" for character in string)


def _one_of(characters: Iterable[str]) -> str:
    """Return what matches one of several characters."""
    return f"[{''.join(map(_literal, characters))}]"


_BLANKS = _one_of(character for character in map(chr, range(0x3001)) if character.isspace())
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
                options.append(_one_of(characters) + rest[place + width])
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

"""A released model as one ONNX graph: columns in, class names and probabilities out.

A column of numbers takes float64, NaN for a missing value. All other columns take strings, "" for a missing value.
What a cell becomes is what `quietmax.data.encoding` makes of it. Where standard operators cannot tell, or where
Quietmax would refuse the cell, the row is marked as unreadable, so that it gets no answer rather than another one.

Feature maps and classifiers compute in the order and the precision of their own modules. Fourier transforms of images
are products with matrices of cosines and sines, 14 times as fast as the operator DFT of onnxruntime 1.31. Turning an
image and averaging its pixels are linear, so they are products with the matrices that the maps' own functions make of
unit images.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

import quietmax.models.features.images as image_maps
from quietmax import __version__
from quietmax._io import atomic_write
from quietmax._lazy import required
from quietmax.data.cells import MISSING_MARKERS, NO, YES, exact_number
from quietmax.data.encoding import (
    BooleanColumn,
    CategoricalColumn,
    Column,
    DateColumn,
    NumericColumn,
)
from quietmax.errors import InvalidInput
from quietmax.estimators.dpsgd.estimator import Centring, PrivateNetwork
from quietmax.estimators.dpsgd.training import ROW_LENGTH, CellLayer
from quietmax.estimators.figures import threshold_of
from quietmax.estimators.head.exact_sums import BITS, on_grid
from quietmax.estimators.head.weights import HeadWeights, TableWeights
from quietmax.estimators.serialization import PrivateModel
from quietmax.export.released import _metadata, _open_released
from quietmax.export.tables import BLANKS, characters_by_case, date_parts, refused, refused_dates
from quietmax.models.features.base import FeatureMap
from quietmax.models.features.generic import Pipeline, RandomFourier, _frequencies
from quietmax.models.features.images import (
    CONTRAST,
    TINY,
    Joined,
    Mirrored,
    Patches,
    Reduced,
    Scattering,
    Turned,
)
from quietmax.models.features.tabular import (
    CROSSED_LEVELS,
    Identity,
    OneHot,
    Scaling,
    TableCells,
    TableFeatures,
    UnitNorm,
)
from quietmax.models.stacked import MLP
from quietmax.spending import DESCRIPTION_FILE

OPSET, IR_VERSION = 20, 9
"""Version of the standard operators, the first with regular expressions, and of the file format that belongs to it."""

_LABEL, _PROBABILITIES, _REASONS, _FEATURES = "label", "probabilities", "reasons", "features"
_MOST_BYTES = 2**31 - 2**20
"""An ONNX file is one protocol buffer, which cannot be larger."""
_UNIT = 2.0**BITS
_SHORTENED = 1.0 - 2.0**-36
_IMAGE_UNIT = 2.0**26
_ONE_MORE = np.array([0, 0, 0, 1])
"""Pads rows by one column."""


def export_onnx(folder: str | Path, file: str | Path, *, reasons: bool = False) -> None:
    """Write a released model as an ONNX file.

    The graph has one input per column of the table: float64 of shape (rows,) for a column of numbers, NaN for a missing
    value, and strings of shape (rows,) for all others, "" for a missing value. A model that was trained on numbers has
    the input ``features``, float32 of shape (rows, inputs). The outputs are ``label``, strings of shape (rows,), and
    ``probabilities``, float64 of shape (rows, classes). If a column has such a name, that of the output is followed by
    an underscore. A row with a cell that Quietmax would refuse has the label "" and all numbers NaN.

    Parameters
    ----------
    folder : str or Path
        The model folder.
    file : str or Path
        The file to write.
    reasons : bool, default=False
        Whether a head on a table also has the output ``reasons``, float64 of shape (rows, columns + 1, classes): what
        the constant and then each column and cross contributed to the score of each class. Added one after the other,
        they are the score, to the last bit. The metadata ``reasons`` has their names.
    """
    content = _onnx_model(folder, reasons=reasons).SerializeToString()
    atomic_write(Path(file), lambda staging: staging.write_bytes(content))


def _onnx_model(folder: str | Path, *, reasons: bool = False) -> Any:
    """Return a released model as an ONNX model; see `export_onnx`."""
    onnx, model = required("onnx", "An export to ONNX"), _open_released(folder)
    columns = model.encoding.columns if model.encoding else ()
    names = [column.name for column in columns] or [_FEATURES]
    summands = model.additive().summands if reasons else ()
    label, probabilities, contributions = (_free(name, names) for name in (_LABEL, _PROBABILITIES, _REASONS))
    graph = Graph([*names, label, probabilities, contributions])

    def _info(name: str, kind: type, *shape: str | int) -> Any:
        return onnx.helper.make_tensor_value_info(name, graph._type(kind), ["rows", *shape])

    inputs = [_info(column.name, _input_type(column)) for column in columns]
    classes = len(model.classes)
    outputs = [_info(label, object), _info(probabilities, np.float64, classes)]
    if summands:
        outputs.append(_info(contributions, np.float64, len(summands), classes))
    _answers(graph, model, label, probabilities, contributions if summands else None)
    if sum(each.ByteSize() for each in graph.constants) > _MOST_BYTES:
        raise InvalidInput("The model is too large for one ONNX file, which has at most 2 GB.")
    inputs = inputs or [_info(_FEATURES, np.float32, model.inputs)]
    written = onnx.helper.make_model(
        onnx.helper.make_graph(graph.nodes, "quietmax", inputs, outputs, graph.constants),
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="quietmax",
        producer_version=__version__,
        doc_string=str(model.guarantee),
    )
    about = _metadata(model, (Path(folder) / DESCRIPTION_FILE).read_bytes())
    if summands:
        about["reasons"] = list(summands)
    texts = {
        name: each if isinstance(each, str) else json.dumps(each, ensure_ascii=False)
        for name, each in about.items()
    }
    onnx.helper.set_model_props(written, texts)
    onnx.checker.check_model(written)
    return written


def _free(name: str, taken: list[str]) -> str:
    """Return a name that no column has."""
    while name in taken:
        name += "_"
    return name


def _answers(graph: Graph, model: PrivateModel, label: str, probabilities: str, reasons: str | None) -> None:
    """Add the operations from the inputs to the outputs."""
    records, unreadable = _encoded(graph, model)
    if model.features is not None:
        records = _map_features(model.features, records, model.inputs)
    if reasons is not None:
        assert isinstance(model.classifier, TableWeights)
        summands = [each._column() for each in _summands(model.classifier, records)]
        contributions = _side_by_side(summands)
        if unreadable is not None:
            undefined = unreadable._column()._column()
            contributions = undefined("Where", np.float64(np.nan), contributions)
        graph._output(contributions, reasons)
    logits = _classify(model.classifier, records)  # type: ignore[arg-type]
    shares = logits("Softmax", axis=1)
    if model.costs is None:
        chosen = logits("ArgMax", axis=1, keepdims=0)
    elif len(model.costs) == 2:
        above = _sliced(shares, 1, 2)("Greater", np.float64(threshold_of(model.costs)))
        chosen = above._cast(np.int64)("Squeeze", np.array([1]))
    else:
        chosen = shares("MatMul", np.array(model.costs))("ArgMin", axis=1, keepdims=0)
    names = graph("Gather", np.array(model.classes), chosen)
    if unreadable is not None:
        names = unreadable("Where", np.array(""), names)
        shares = unreadable._column()("Where", np.float64(np.nan), shares)
    graph._output(names, label)
    graph._output(shares, probabilities)


def _encoded(graph: Graph, model: PrivateModel) -> tuple[Value, Value | None]:
    """Return the encoded records, and which rows cannot be read."""
    if model.encoding is None:
        numbers = Value(graph, _FEATURES)
        infinite = (numbers("IsNaN") | numbers("IsInf"))._cast(np.float32)
        return numbers, infinite("ReduceMax", np.array([1]), keepdims=0)._cast(np.bool_)
    columns = [_encode_column(graph, column) for column in model.encoding.columns]
    doubts = [unreadable for _, unreadable in columns if unreadable is not None]
    return _side_by_side([features for features, _ in columns]), _any_of(doubts) if doubts else None


# --- The graph --------------------------------------------------------------------------------------------------------


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
        """Return the number by which ONNX knows a type; strings are objects."""
        return int(self._onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind)))

    def _name(self) -> str:
        """Return a name that nothing has yet."""
        while (name := f"value {self._count + 1}") in self._reserved:
            self._count += 1
        self._count += 1
        return name

    def _constant(self, value: ArrayLike) -> str:
        """Add a constant and return its name."""
        array, name = np.asarray(value), self._name()
        stored = array.astype(object) if array.dtype.kind == "U" else array
        self.constants.append(self._onnx.numpy_helper.from_array(stored, name))
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
        """Return a vector as a matrix of one column, or rows as matrices of one row."""
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
_DAYS = (0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_OF_STOLL = "[\\t-\\r ]*"
"""Blanks that may stand before an integer where onnxruntime reads it from a string."""


def _input_type(column: Column) -> type:
    """Return the type of a column's input."""
    return np.float64 if isinstance(column, NumericColumn) else object


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
    parted = date_parts(column)
    if column.bounds is None or parted is None:
        raise refused_dates(column, "ONNX")
    order, mark = parted
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
    raise refused(column, "ONNX")


# --- Regular expressions ----------------------------------------------------------------------------------------------


def _literal(string: str) -> str:
    """Return what matches a string alone."""
    return "".join(f"\\x{{{ord(character):x}}}" for character in string)


def _one_of(characters: Iterable[str]) -> str:
    """Return what matches one of several characters."""
    return f"[{''.join(map(_literal, characters))}]"


_BLANKS = _one_of(BLANKS)
"""What `str.strip` removes."""


def _any_case(folded: str) -> str:
    """Return what matches the strings whose `casefold` is this one.

    Some characters fold to two or three. They are alternatives wherever these stand.
    """
    table = characters_by_case()
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


# --- Feature maps -----------------------------------------------------------------------------------------------------


def _map_features(feature_map: FeatureMap, records: Value, columns: int) -> Value:
    """Add the operations of a feature map."""
    if isinstance(feature_map, Pipeline):
        for step in feature_map.maps:
            records = _map_features(step, records, columns)
            columns = step.dimension(columns)
        return records
    if isinstance(feature_map, RandomFourier):
        return _random_fourier(feature_map, records, columns)
    add = _MAPS.get(type(feature_map))
    if add is None:
        raise InvalidInput(
            f"The features '{feature_map.kind}' cannot be exported to ONNX. The other formats can hold them."
        )
    return add(feature_map, records)


def _scaling(feature_map: Scaling, records: Value) -> Value:
    low, high = np.array(feature_map.low), np.array(feature_map.high)
    clipped = records._cast(np.float64)("Max", low)("Min", high)
    shares: Value = (clipped - low) / (high - low)
    return shares._cast(np.float32)


def _one_hot(feature_map: OneHot, records: Value) -> Value:
    parts = []
    for place, categories in enumerate(feature_map.categories):
        part = records("Gather", np.array([place]), axis=1)
        if categories is not None:
            part = part("Equal", np.array(categories, np.float32))._cast(np.float32)
        parts.append(part)
    return _side_by_side(parts)


def _unit_norm(feature_map: UnitNorm, records: Value) -> Value:
    wide = records._cast(np.float64)
    if feature_map.constant > 0.0:
        wide = wide("Pad", _ONE_MORE, np.float64(feature_map.constant))
    return _divided(wide)._cast(np.float32)


def _divided(rows: Value) -> Value:
    """Return rows of float64 divided by their length; a row of zeros stays."""
    lengths = rows._squares()("Sqrt")
    positive: Value = lengths > 0.0
    return rows / positive("Where", lengths, 1.0)


def _table(feature_map: TableFeatures, records: Value) -> Value:
    encoded = records._cast(np.float64)
    parts = [encoded]
    if feature_map.bins and feature_map.numbers:
        values = encoded("Gather", np.array(feature_map.numbers), axis=1)("Clip", 0.0, 1.0)
        # A number that cannot be missing has its flag in a further column of zeros.
        flags = [feature_map.columns if flag is None else flag for flag in feature_map.missing]
        flagged = encoded("Pad", _ONE_MORE)("Gather", np.array(flags), axis=1)
        present = flagged("Equal", 0.0)("Unsqueeze", np.array([2]))
        parts += [_bins(values, present, bins) for bins in feature_map.bins]
    wide = _side_by_side(parts)
    crosses = []
    for (a, b), (c, d) in feature_map.crosses:
        first = _sliced(wide, a, b)("Unsqueeze", np.array([2]))
        second = _sliced(wide, c, d)("Unsqueeze", np.array([1]))
        crosses.append((first * second)("Flatten", axis=1))
    return _divided(_side_by_side([wide, *crosses]))._cast(np.float32)


def _sliced(rows: Value, start: int, end: int, axis: int = 1) -> Value:
    return rows("Slice", np.array([start]), np.array([end]), np.array([axis]))


def _bins(values: Value, present: Value, bins: int) -> Value:
    """Return the indicators of equal intervals, number by number."""
    interval = (values * float(bins))("Floor")("Min", np.float64(bins - 1))("Unsqueeze", np.array([2]))
    inside = interval("Equal", np.arange(bins, dtype=np.float64)) & present
    return inside._cast(np.float64)("Flatten", axis=1)


def _cells(feature_map: TableCells, records: Value) -> Value:
    """Return the index of the cell in each column and cross; see `TableCells`."""
    levels, crossed = feature_map.levels, feature_map.crossed_size
    cells, coarse = [], []
    for position, (first, last) in enumerate(feature_map.parts):
        part = _sliced(records, first, last)
        if position in feature_map.numbers:
            cells.append(_level(part, last - first, levels))
            coarse.append((cells[-1] / np.float32(levels // CROSSED_LEVELS))("Floor"))
        else:
            cells.append(_indicated(part, last - first))
            coarse.append(cells[-1])
    pairs = [coarse[one] * np.float32(crossed(other)) + coarse[other] for one, other in feature_map.crosses]
    return _side_by_side([*cells, *pairs])


def _level(part: Value, width: int, levels: int) -> Value:
    """Return the interval of each share, and the last cell for a missing value."""
    share = _sliced(part, 0, 1)("Clip", np.float32(0.0), np.float32(1.0))
    level = (share * np.float32(levels))("Floor")("Min", np.float32(levels - 1))
    missing = _sliced(part, 1, 2) > np.float32(0.0) if width == 2 else None
    return level if missing is None else missing("Where", np.float32(levels), level)


def _indicated(part: Value, width: int) -> Value:
    """Return the position of each row's largest positive indicator, or their number if there is none."""
    positive: Value = part("ReduceMax", np.array([1]), keepdims=1) > np.float32(0.0)
    return positive("Where", part("ArgMax", axis=1, keepdims=1)._cast(np.float32), np.float32(width))


def _random_fourier(feature_map: RandomFourier, records: Value, columns: int) -> Value:
    pairs = feature_map.count // 2
    bandwidth = math.sqrt(columns) / 4 if feature_map.bandwidth is None else float(feature_map.bandwidth)
    frequencies = _frequencies(columns, pairs, bandwidth, feature_map.seed)[:, :pairs].numpy()
    angles = records._cast(np.float64) @ frequencies
    return (_side_by_side([angles("Cos"), angles("Sin")]) / math.sqrt(pairs))._cast(np.float32)


# --- Feature maps of images -------------------------------------------------------------------------------------------

_Complex = tuple[Value, Value]
"""The real and the imaginary part of a value."""


def _shaped(values: Value, *shape: int) -> Value:
    """Return the values of every record in a shape."""
    return values("Reshape", np.array([-1, *shape]))


def _bright(records: Value, pixels: int) -> Value:
    """Return images divided by the root of their mean square."""
    lengths = records._squares()("Sqrt")("Max", np.float32(TINY))
    return records / (lengths / np.float32(math.sqrt(pixels)))


def _scattering(feature_map: Scattering, records: Value) -> Value:
    channels, height, width = feature_map.image_shape
    bright = _shaped(_bright(records, channels * height * width), height, width)
    paths, positions = feature_map.paths, math.prod(feature_map.grid)
    grouped = _shaped(
        _scatter(feature_map, bright), feature_map.groups, paths // feature_map.groups * positions
    )
    ones = np.ones(feature_map.groups, np.float32)
    normalised = _shaped(grouped("InstanceNormalization", ones, 0 * ones, epsilon=1e-5), paths, positions)
    if feature_map.whitening > 0.0:
        whitening = image_maps._whitening(feature_map)[:, :paths].numpy()
        normalised = np.ascontiguousarray(whitening.T) @ normalised
    return normalised("Flatten", axis=1)._unit(TINY)


def _scatter(feature_map: Scattering, images: Value) -> Value:
    """Return the scattering coefficients of grey images, of shape (planes, paths, positions)."""
    _, height, width = feature_map.image_shape
    scales, positions = feature_map.scales, math.prod(feature_map.grid)
    filters = image_maps._filters(height, width, scales, feature_map.angles)
    averages = [matrix[:, :positions].numpy() for matrix in filters.averages]
    padded = _reflected(images, height, width, scales)
    rows, columns = filters.wavelets[0][0].shape[1:3]
    spectrum = _transformed(padded, rows, columns)
    first, second = [_shaped(padded, 1, rows * columns) @ averages[0]], []
    for fine in range(scales):
        wavelets = filters.wavelets[fine][0][..., 0].numpy()
        moduli = _moduli(spectrum, wavelets, 2**fine)
        side = (rows // 2**fine, columns // 2**fine)
        angles = len(wavelets)
        first.append(_shaped(moduli, angles, math.prod(side)) @ averages[fine])
        if fine + 1 < scales:
            inner = _transformed(_shaped(moduli, 1, *side), *side)
        coarser = []
        for coarse in range(fine + 1, scales):
            bank = filters.wavelets[coarse][fine][..., 0].numpy()
            step = 2 ** (coarse - fine)
            flat = _shaped(_moduli(inner, bank, step), angles, math.prod(side) // step**2)
            coarser.append(flat @ averages[coarse])
        if coarser:
            second.append(_shaped(_side_by_side(coarser), angles * angles * len(coarser), positions))
    return _side_by_side([*first, *second])


def _reflected(images: Value, height: int, width: int, scales: int) -> Value:
    """Pad images by reflection, as shape (planes, 1, rows, columns)."""
    above = image_maps._padded(height, scales) - height
    left = image_maps._padded(width, scales) - width
    pads = np.array([0, above // 2, left // 2, 0, (above + 1) // 2, (left + 1) // 2])
    return images("Pad", pads, mode="reflect")("Unsqueeze", np.array([1]))


def _fourier(size: int, sign: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the matrix of a discrete Fourier transform, its real and its imaginary part."""
    turns = np.outer(np.arange(size), np.arange(size)) % size * (2 * math.pi / size)
    return np.cos(turns).astype(np.float32), (sign * np.sin(turns)).astype(np.float32)


def _transformed(images: Value, rows: int, columns: int) -> _Complex:
    """Return the Fourier transform of real images: F U F'."""
    real, imaginary = _fourier(rows, -1.0)
    return _product((real @ images, imaginary @ images), _fourier(columns, -1.0))


def _product(left: tuple[Any, Any], right: tuple[Any, Any]) -> _Complex:
    """Return the product of complex matrices, of which one may be constant."""
    (a, b), (c, d) = left, right
    return a @ c - b @ d, a @ d + b @ c


def _moduli(spectrum: _Complex, wavelets: NDArray[np.float32], step: int) -> Value:
    """Return |x * psi| subsampled by a step, for every wavelet; see `images._moduli`."""
    rows, columns = (side // step for side in wavelets.shape[1:])
    folded = []
    for part in spectrum:
        product = part * (wavelets / np.float32(step**2))
        if step > 1:
            blocks = product("Reshape", np.array([0, 0, step, rows, step, columns]))
            product = blocks("ReduceSum", np.array([2, 4]), keepdims=0)
        folded.append(product)
    left = _product(_fourier(rows, 1.0), (folded[0], folded[1]))
    real, imaginary = (part / np.float32(rows * columns) for part in _fourier(columns, 1.0))
    back, turned = _product(left, (real, imaginary))
    return (back * back + turned * turned)("Sqrt")


def _patches(feature_map: Patches, records: Value) -> Value:
    channels, height, width = feature_map.image_shape
    shipped = image_maps._shipped()
    images = _shaped(_bright(records, channels * height * width), channels, height, width)
    left, right = (_responses(each, feature_map, shipped) for each in (images, _flipped(images, width)))
    roots = ((left + right) / np.float32(2.0))("Sqrt")("Transpose", perm=[0, 2, 1])
    centred = roots - roots("ReduceMean", np.array([2]), keepdims=1)
    deviation = (centred * centred)("ReduceMean", np.array([2]), keepdims=1)("Sqrt")
    cells = centred / deviation("Max", np.float32(TINY))
    whitened = (cells @ shipped.whitening.numpy())("Transpose", perm=[0, 2, 1])
    return whitened("Flatten", axis=1)._unit(TINY)


def _responses(images: Value, feature_map: Patches, shipped: image_maps._PatchFilters) -> Value:
    """Return the mean responses of the cells of one side; see `images._responses`."""
    filters = shipped.filters.numpy()
    box = np.full((1, *filters.shape[1:]), 1 / filters[0].size, np.float32)
    mean = images("Conv", box)
    variance = ((images * images)("Conv", box) - mean * mean)("Max", np.float32(0.0))
    contrast = (variance + np.float32(CONTRAST**2))("Sqrt")
    z = images("Conv", filters) / contrast - shipped.offsets.numpy()[:, None, None]
    threshold = np.float32(image_maps._THRESHOLD)
    above, below = (z - threshold)("Relu"), (z("Neg") - threshold)("Relu")
    inside = [side - filters.shape[2] + 1 for side in feature_map.image_shape[1:]]
    cells = feature_map.cells
    pooled = _pooled(_side_by_side([above, below]), inside, [cells, cells])
    return _shaped(pooled, 2 * len(filters), cells * cells)


def _pooled(images: Value, sides: list[int], cells: list[int], kind: type = np.float32) -> Value:
    """Average the pixels of every cell, as `adaptive_avg_pool2d`."""
    down, across = (
        torch.nn.functional.adaptive_avg_pool1d(torch.eye(side, dtype=torch.float64)[None], number)[0].numpy()
        for side, number in zip(sides, cells, strict=True)
    )
    rows: Value = np.ascontiguousarray(down.T).astype(kind) @ images
    return rows @ across.astype(kind)


def _flipped(images: Value, width: int) -> Value:
    """Return mirror images."""
    return images("Gather", np.arange(width)[::-1].copy(), axis=3)


def _mirrored(feature_map: Mirrored, records: Value) -> Value:
    channels, height, width = feature_map.image_shape
    mirror = _flipped(_shaped(records, channels, height, width), width)("Flatten", axis=1)
    inner = feature_map.feature_map
    total = _scattering(inner, records) + _scattering(inner, mirror)
    across = inner.grid[1]
    wide = _shaped(total, inner.paths * inner.grid[0], across)
    return _sliced(wide, 0, (across + 1) // 2, axis=2)("Flatten", axis=1)._unit(TINY)


def _turned(feature_map: Turned, records: Value) -> Value:
    channels, height, width = feature_map.image_shape
    pixels = height * width
    planes = _shaped(_bright(records, channels * pixels), channels, pixels)
    units = torch.eye(pixels).reshape(pixels, 1, height, width)
    parts = []
    for angle in feature_map.degrees:
        matrix = image_maps._turned(units, angle).reshape(pixels, pixels).numpy()
        parts.append(_scattering(feature_map.feature_map, (planes @ matrix)("Flatten", axis=1)))
    total = parts[0] if len(parts) == 1 else parts[0]("Sum", *parts[1:])
    if feature_map.pairs:
        across, back = image_maps._differences(feature_map.feature_map, feature_map.pairs)
        kept = np.ascontiguousarray(back[:, : across.shape[0]].numpy())
        total = total - total @ across.numpy() @ kept
    return total._unit(TINY)


def _joined(feature_map: Joined, records: Value) -> Value:
    parts = _side_by_side([_MAPS[type(each)](each, records) for each in feature_map.maps])
    return parts / np.float32(math.sqrt(len(feature_map.maps)))


def _reduced(feature_map: Reduced, records: Value) -> Value:
    inner = feature_map.feature_map
    images = _shaped(records._cast(np.float64), *feature_map.image_shape)
    sides, cells = list(feature_map.image_shape[1:]), list(inner.image_shape[1:])
    small = _pooled(images, sides, cells, np.float64)._cast(np.float32)
    return _MAPS[type(inner)](inner, small("Flatten", axis=1))


_MAPS: dict[type[FeatureMap], Callable[[Any, Value], Value]] = {
    Identity: lambda _map, records: records,
    Scaling: _scaling,
    OneHot: _one_hot,
    UnitNorm: _unit_norm,
    TableFeatures: _table,
    TableCells: _cells,
    Scattering: _scattering,
    Patches: _patches,
    Mirrored: _mirrored,
    Turned: _turned,
    Joined: _joined,
    Reduced: _reduced,
}


# --- Classifiers ------------------------------------------------------------------------------------------------------


def _classify(classifier: HeadWeights | TableWeights | PrivateNetwork, features: Value) -> Value:
    """Add the operations of a classifier."""
    if isinstance(classifier, TableWeights):
        return _looked_up(classifier, features)
    if isinstance(classifier, HeadWeights):
        rows = _centred(features, classifier.centre, classifier.radius, classifier.bias, classifier.whitening)
        return rows @ np.ascontiguousarray(classifier.weights.T)
    assert isinstance(classifier.network, MLP)
    if isinstance(classifier.centring, CellLayer):
        outputs = _looked_up(classifier.centring.first, features)
        features = outputs(classifier.centring.activation.capitalize())
    elif classifier.centring is not None:
        features = _centring(features, classifier.centring)
    return _network(classifier.network, features)._cast(np.float64)


def _looked_up(classifier: TableWeights, cells: Value) -> Value:
    """Return the sum of a constant and of what each cell adds to the logits, column by column."""
    return cells.graph("Sum", classifier.weights[:, -1].copy(), *_added(classifier, cells))


def _summands(classifier: TableWeights, cells: Value) -> list[Value]:
    """Return the constant and what each cell adds to the logits, for each row."""
    added = _added(classifier, cells)
    constant = cells.graph("Expand", classifier.weights[:, -1].copy(), added[0]("Shape"))
    return [constant, *added]


def _added(classifier: TableWeights, cells: Value) -> list[Value]:
    """Return what each cell adds to the logits, column by column."""
    ends = np.cumsum(classifier.sizes)
    added = []
    for place, (size, end) in enumerate(zip(classifier.sizes, ends, strict=True)):
        index = cells("Gather", np.array(place), axis=1)._cast(np.int64)
        table = np.ascontiguousarray(classifier.weights[:, end - size : end].T)
        added.append(cells.graph("Gather", table, index))
    return added


def _centred(
    features: Value,
    centre: NDArray[np.float64],
    radius: float,
    bias: float,
    whitening: NDArray[np.float64] | None,
) -> Value:
    """Return clipped, centred and whitened rows on the grid; see `exact_sums`."""
    scaled = features._cast(np.float64) / np.float64(radius)
    factors = np.float64(_SHORTENED) / scaled._squares()("Sqrt")("Max", np.array([[_SHORTENED]]))
    shifted = _on_grid(scaled * factors) - centre
    shifted = shifted("Pad", _ONE_MORE, np.float64(on_grid(np.array(bias))))
    unit = shifted / shifted._squares()("Max", np.array([[2.0**-60]]))("Sqrt")
    rows = _on_grid(unit * _SHORTENED)
    if whitening is None:
        return rows
    # A g / ||A g||
    images = rows * whitening if whitening.ndim == 1 else rows @ whitening
    images = (images * _IMAGE_UNIT)._trunc()
    lengths = images._squares()("Max", np.array([[1.0]]))("Sqrt")
    return (images * (_UNIT * _SHORTENED) / lengths)._trunc() / _UNIT


def _on_grid(values: Value) -> Value:
    """Round towards zero to multiples of 2^-20."""
    return (values * _UNIT)._trunc() / _UNIT


def _centring(features: Value, centring: Centring) -> Value:
    """Return what the network of DP-SGD sees; see `Centring.rows`."""
    rows = _centred(features, centring.centre, centring.radius, 1.0 / ROW_LENGTH, centring.scale)
    return (_sliced(rows, 0, -1) * ROW_LENGTH)._cast(np.float32)


def _network(network: MLP, features: Value) -> Value:
    """Return the logits of a network."""
    signal = features._cast(network.kernels[0].numpy().dtype.type)  # with exact noise the weights are float64
    for kernel, bias in zip(network.kernels[:-1], network.biases[:-1], strict=True):
        summed = signal @ kernel[0].numpy() + bias[0].numpy()
        signal = summed(network.activation.capitalize())
    last = np.ascontiguousarray(network.kernels[-1][0].numpy().T)
    return signal @ last + network.biases[-1][0].numpy()

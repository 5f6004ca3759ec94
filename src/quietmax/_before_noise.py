"""What may stand between a row and the noise in a guarantee that is `proven`: one list for all estimators (THEORY 3.8).

Everything else is somebody else's code: it may compute a row from its place in memory, from its batch, from a thread or
from other rows, so it makes a guarantee `conditional` and is named there. The identity of a type decides, and what its
object holds. Names, modules, tags and other attributes that an author sets decide nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from inspect import CO_VARARGS
from itertools import chain
from typing import Any, Literal

Role = Literal["estimator", "step", "map", "encoding", "training", "records", "column", "cell"]


@dataclass(frozen=True)
class Allowed:
    """One line of the list."""

    role: Role  # Where these types may stand
    types: tuple[str, ...]  # Modules and names
    because: str  # Why a row stays a function of that row
    test: str  # The test that checks it


_MAPS = "tests/invariant/test_feature_maps.py"
_TABLES = "tests/invariant/test_tables.py"
_FOREIGN = "tests/invariant/test_foreign_code.py"


def _named(types: str) -> tuple[str, ...]:
    """The full names of types, written as ``module: name name; module: name``."""
    parts = (part.partition(": ") for part in types.split("; "))
    return tuple(f"{module}.{name}" for module, _, names in parts for name in names.split())


ALLOWED = (
    Allowed(
        "estimator",
        _named(
            "quietmax.estimators.head.estimator: PrivateHead; quietmax.estimators.teachers: Teachers; "
            "quietmax.estimators.dpsgd.estimator: DPSGD"
        ),
        "sums are exact, and each teacher is trained alone; no subclass, and no method set on the object",
        "tests/invariant/test_estimators.py",
    ),
    Allowed(
        "step",
        _named("sklearn.pipeline: Pipeline"),
        "runs its steps in order; each must be on this list, and `memory` must be None",
        _FOREIGN,
    ),
    Allowed(
        "step",
        _named("sklearn.preprocessing: FunctionTransformer"),
        "hands the records on, since it must have no function",
        _FOREIGN,
    ),
    Allowed(
        "step",
        _named("sklearn.preprocessing: Binarizer"),
        "compares each number with one public number, which rounds nothing",
        _FOREIGN,
    ),
    Allowed(
        "map",
        _named(
            "quietmax.models.features.tabular: Identity Scaling OneHot UnitNorm TableFeatures; "
            "quietmax.models.features.tabular: TableCells; "
            "quietmax.models.features.encoder: Embedding"
        ),
        "single operations per number, and sums whose order depends on the width alone",
        _MAPS,
    ),
    Allowed(
        "map",
        _named(
            "quietmax.models.features.generic: RandomFourier; quietmax.models.features.images: Scattering "
            "Patches Mirrored Turned Joined Reduced"
        ),
        "batches of one shape and alignment, checked at every place on public records before training",
        _MAPS,
    ),
    Allowed(
        "map",
        _named("quietmax.models.features.encoder: Encoder"),
        "as above; an ONNX file gets one record at a time, on one thread, with no operation of its own",
        "tests/invariant/test_encoder.py",
    ),
    Allowed(
        "map",
        _named("quietmax.models.features.generic: Pipeline"),
        "runs its maps in order; each must be on this list",
        _MAPS,
    ),
    Allowed(
        "encoding",
        _named(
            "quietmax.data.schema: Schema; quietmax.data.encoding: Encoding; quietmax.data.records: Holdout; "
            "quietmax.data.cohorts: ErasureList; quietmax.data.cohorts: CohortRule Cohort; "
            "quietmax.data.encoding: NumericColumn CategoricalColumn BooleanColumn DateColumn HashedColumn"
        ),
        "each cell is read alone, by its declared type",
        _TABLES,
    ),
    Allowed(
        "encoding",
        _named("quietmax.data.encoding: TextColumn"),
        "each text is embedded alone, without padding, on one thread, by files with a fixed SHA-256",
        "tests/invariant/test_text.py",
    ),
    Allowed(
        "training",
        _named("quietmax.models.stacked: TrainingSettings CrossEntropy Quadratic Convexified"),
        "the built-in networks of teachers are trained apart from each other",
        "tests/invariant/test_estimators.py",
    ),
    Allowed(
        "training",
        _named(
            "quietmax.estimators.head.weights: HeadSettings; quietmax.estimators.dpsgd.training: DPSGDSettings"
        ),
        "hold public numbers and names, each of which is checked",
        _FOREIGN,
    ),
    Allowed(
        "records",
        _named("builtins: list tuple range; numpy: ndarray memmap; torch: Tensor"),
        "each number is converted alone; the numbers of an array must be of a type of NumPy",
        _FOREIGN,
    ),
    Allowed(
        "records",
        _named(
            "pandas: DataFrame Series Index RangeIndex CategoricalIndex DatetimeIndex PeriodIndex "
            "TimedeltaIndex; pandas.arrays: *; polars: DataFrame Series; pyarrow.lib: *"
        ),
        "each cell is converted alone; of extension types, only the columns listed below",
        _TABLES,
    ),
    Allowed(
        "records",
        _named(
            "builtins: str; pathlib: PosixPath WindowsPath; quietmax.data.sources: ParquetPart TextPart "
            "FramePart; quietmax.data.tables: TableRows; quietmax.data.records: Records"
        ),
        "rows of files and frames are encoded alike, whatever part they are in",
        _TABLES,
    ),
    Allowed(
        "column",
        _named("numpy.dtypes: *; pandas.arrays: *; polars: *; pyarrow.lib: *"),
        "the types of these four; a type of another package converts with code of its own",
        _TABLES,
    ),
    Allowed(
        "cell",
        _named(
            "builtins: bool int float str bytes; types: NoneType; numpy: int8 int16 int32 int64 uint8 uint16 "
            "uint32 uint64 bool bool_ float16 float32 float64 longdouble longlong ulonglong intc uintc str_ "
            "bytes_ datetime64 timedelta64; datetime: date datetime time timedelta timezone; zoneinfo: "
            "ZoneInfo; decimal: Decimal; uuid: UUID; pathlib: PosixPath WindowsPath; pandas: Timestamp "
            "Timedelta Period Interval; pandas.api.typing: NAType NaTType"
        ),
        "compares, hashes and converts as Python, NumPy and pandas define it; no subclass",
        _TABLES,
    ),
)
"""The list. `docs/sharp-edges.md` shows it; a pipeline step may also be None or "passthrough"."""


def is_allowed(kind: type, *roles: Role) -> bool:
    """Return whether a type is on the list for one of these roles."""
    return any(_is(kind, name) for line in ALLOWED if line.role in roles for name in line.types)


def _is(kind: type, name: str) -> bool:
    """Return whether a name of the list means this very type; a module that nobody imported has no objects."""
    module, _, own = name.rpartition(".")
    found = (
        vars(sys.modules[module]).get(kind.__name__ if own == "*" else own) if module in sys.modules else None
    )
    return kind is found


def is_own_class(kind: type) -> bool:
    """Return whether a class is the one that a module of quietmax has under its name."""
    return kind.__module__.startswith("quietmax.") and _is(kind, f"{kind.__module__}.{kind.__name__}")


def is_plain(value: Any, *roles: Role) -> bool:
    """Return whether a value is on the list for one of these roles, and everything that it holds; cells are.

    An object that holds something else, such as a function in the place of a method, runs code that nobody checked.
    """
    kind = type(value)
    if kind in (tuple, list):
        return all(is_plain(each, *roles) for each in value)
    if kind is dict:
        return is_plain([*value.items()], *roles)
    if _is(kind, "numpy.ndarray"):
        return not any(_foreign_records(value))
    if is_allowed(kind, "cell"):
        return True
    if not is_allowed(kind, *roles):
        return False
    cached = {name for name, each in vars(kind).items() if isinstance(each, cached_property)}
    return all(is_plain(each, *roles) for name, each in vars(value).items() if name not in cached)


# --- scikit-learn -----------------------------------------------------------------------------------------------------


def _foreign_callers(estimator: Any) -> Iterator[str]:
    """Yield the names of what saw the private records before an estimator that is being fitted now, outermost first.

    scikit-learn tells an estimator nothing about what it is in, so this looks at the calls in progress. What can be
    fitted counts by itself (a search over settings, a stack, a vote, a calibration, a wrapper of the user's own), and a
    `Pipeline` by its earlier steps and by what it was given, which they convert. So does an estimator of the user's own
    that inherits from one of ours: it may compute anything before it calls the `fit` that it inherits. A worker of
    joblib counts, because what called it is in another thread or process. This cannot see what was applied by hand, nor
    other threads and processes.
    """
    from sklearn.pipeline import Pipeline

    callers: list[Any] = []
    given: list[Any] = []
    in_worker = False
    frame = sys._getframe(1)
    while frame.f_back is not None:
        caller = _first_argument(frame)
        if _is(type(caller), "joblib.parallel.BatchedCalls"):
            in_worker = True
        elif _is(type(caller), "joblib.parallel.Parallel"):
            in_worker = False  # what called the worker is further out
        if _can_be_fitted(type(caller)) and not any(caller is each for each in (estimator, *callers)):
            callers.append(caller)
            given.append([frame.f_locals.get(name) for name in ("X", "y")])
        frame = frame.f_back
    if in_worker:
        yield "joblib"
    for caller, values in zip(reversed(callers), reversed(given), strict=True):
        if issubclass(type(caller), Pipeline):
            yield from _foreign_steps(caller, caller.steps[:-1])
            yield from chain.from_iterable(map(_foreign_records, values))
        elif not _runs_our_methods(caller):
            yield type(caller).__name__
    if not (is_allowed(type(estimator), "estimator") and _runs_our_methods(estimator)):
        yield type(estimator).__name__


_FITTING = ("fit", "partial_fit", "fit_transform", "fit_predict", "fit_resample")


def _can_be_fitted(kind: type) -> bool:
    """Return whether a class has a method that trains on records."""
    return any(callable(getattr(kind, name, None)) for name in _FITTING)


def _first_argument(frame: Any) -> Any:
    """Return the first argument of a call in progress: the object, if the call is one of a method."""
    code = frame.f_code
    if not code.co_argcount and not code.co_flags & CO_VARARGS:
        return None
    first = frame.f_locals.get(code.co_varnames[0 if code.co_argcount else code.co_kwonlyargcount])
    return first if code.co_argcount or not first else first[0]


def _runs_our_methods(value: Any) -> bool:
    """Return whether an object is of a class of ours, and no method was replaced on the object."""
    kind = type(value)
    return (is_allowed(kind, "estimator") or is_own_class(kind)) and not _replaces_methods(value)


def _replaces_methods(value: Any) -> bool:
    """Return whether an object itself holds something under the name of a method or of an interface."""
    kind = type(value)
    return any(
        name.startswith("__") or callable(getattr(kind, name, None))
        for name in getattr(value, "__dict__", ())
    )


_LOOKED_AT = ("steps", "_callback_fit_ctx", "_parent_callback_ctx")
"""What a pipeline holds besides settings. The callbacks of the contexts are those in `_skl_callbacks`, a setting."""


def _foreign_steps(pipeline: Any, steps: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Yield the names of what is not on the list in a pipeline and in some of its steps."""
    from sklearn.pipeline import Pipeline

    state = {name: each for name, each in vars(pipeline).items() if name not in _LOOKED_AT}
    if not is_allowed(type(pipeline), "step") or pipeline.memory is not None or not is_plain(state, "step"):
        yield type(pipeline).__name__
    for _, step in steps:
        if issubclass(type(step), Pipeline):
            yield from _foreign_steps(step, step.steps)
        elif not (is_plain(step, "step") and (step == "passthrough" if type(step) is str else True)):
            yield type(step).__name__


# --- Records, labels and persons --------------------------------------------------------------------------------------


def _foreign_records(values: Any) -> Iterator[str]:
    """Yield the types in records, labels or persons that are not on the list: somebody else's code converts them."""
    kind = type(values)
    # The table is what an iterator yields, whatever yields it.
    allowed = is_allowed(kind, "records", "cell") and not _replaces_methods(values)
    if not (allowed or callable(getattr(kind, "__next__", None))):
        yield kind.__name__
    for name, parts in _PARTS.items():
        if _is(kind, name):
            yield from parts(values)


def _foreign_rows(rows: Iterable[Any]) -> Iterator[str]:
    """Yield the foreign types in a sequence of cells or of rows."""
    nested = {kind: is_allowed(kind, "records") and kind is not str for kind in set(map(type, rows))}
    yield from _foreign_cells(each for each in rows if not nested[type(each)])
    yield from chain.from_iterable(_foreign_records(each) for each in rows if nested[type(each)])


def _foreign_numbers(array: Any) -> Iterator[str]:
    """Yield the foreign types in an array of NumPy."""
    if not is_allowed(type(array.dtype), "column"):
        yield str(array.dtype)
    elif array.dtype.kind == "O":
        yield from _foreign_cells(array.ravel().tolist())


def _foreign_encoding(rows: Any) -> Iterator[str]:
    """Yield the foreign types in what says how records or a table are encoded and whom they are left to."""
    names = ("encoding", "holdout", "cohorts", "cohort", "forgotten")
    held = (getattr(rows, name, None) for name in names)
    yield from (type(each).__name__ for each in held if not is_plain(each, "encoding"))


def _foreign_column(array: Any) -> Iterator[str]:
    """Yield the foreign types in the array of a column of pandas."""
    kind = type(array)
    if not is_allowed(kind, "column"):
        yield kind.__name__
    elif _is(kind, "pandas.arrays.Categorical"):
        yield from _foreign_column(array.categories.array)
    elif _is(kind, "pandas.arrays.NumpyExtensionArray") or _is(kind, "pandas.arrays.StringArray"):
        yield from _foreign_numbers(array.to_numpy())
    elif _is(kind, "pandas.arrays.SparseArray"):
        yield from _foreign_numbers(array.sp_values)
        yield from _foreign_cells([array.fill_value])
    elif _is(kind, "pandas.arrays.ArrowExtensionArray"):
        yield from _foreign_types([array.dtype.pyarrow_dtype])
    elif _is(kind, "pandas.arrays.DatetimeArray"):
        yield from _foreign_cells([array.dtype.tz] if hasattr(array.dtype, "tz") else [])


def _foreign_types(types: Iterable[Any]) -> Iterator[str]:
    """Yield the foreign types of columns of Arrow or polars."""
    for each in types:
        kind = each if isinstance(each, type) else type(each)
        if not is_allowed(kind, "column"):
            yield kind.__name__


def _foreign_in_polars(columns: Iterable[Any]) -> Iterator[str]:
    """Yield the foreign types in columns of polars."""
    for column in columns:
        yield from _foreign_types([column.dtype])
        if column.dtype.is_(sys.modules["polars"].Object):
            yield from _foreign_cells(column.to_list())


def _foreign_cells(cells: Iterable[Any]) -> Iterator[str]:
    """Yield the types of cells that are not on the list."""
    cells = list(cells)
    kinds = {type(cell) for cell in cells}
    yield from sorted(kind.__name__ for kind in kinds if not is_allowed(kind, "cell"))
    within = {kind: parts for kind in kinds for name, parts in _WITHIN.items() if _is(kind, name)}
    if within:
        yield from _foreign_cells(
            getattr(cell, part) for cell in cells if type(cell) in within for part in within[type(cell)]
        )


_WITHIN = {
    "datetime.datetime": ("tzinfo",),
    "datetime.time": ("tzinfo",),
    "pandas.Timestamp": ("tzinfo",),
    "pandas.Interval": ("left", "right"),
}
"""Cells that hold objects."""

_INDEXES = ("", "Range", "Categorical", "Datetime", "Period", "Timedelta")


_PARTS: dict[str, Callable[[Any], Iterable[str]]] = {
    "builtins.list": _foreign_rows,
    "builtins.tuple": _foreign_rows,
    "numpy.ndarray": _foreign_numbers,
    "numpy.memmap": _foreign_numbers,
    "pandas.DataFrame": lambda frame: chain.from_iterable(
        _foreign_column(each.array) for _, each in frame.items()
    ),
    "pandas.Series": lambda column: _foreign_column(column.array),
    **{f"pandas.{kind}Index": lambda column: _foreign_column(column.array) for kind in _INDEXES},
    "pandas.arrays.*": lambda column: _foreign_column(column),
    "polars.DataFrame": lambda frame: _foreign_in_polars(frame.get_columns()),
    "polars.Series": lambda column: _foreign_in_polars([column]),
    "pyarrow.lib.Table": lambda table: _foreign_types(table.schema.types),
    "pyarrow.lib.RecordBatch": lambda table: _foreign_types(table.schema.types),
    "pyarrow.lib.ChunkedArray": lambda column: _foreign_types([column.type]),
    "pyarrow.lib.ExtensionArray": lambda column: _foreign_types([column.type]),
    "quietmax.data.records.Records": lambda records: chain(
        _foreign_encoding(records), _foreign_records(records.persons)
    ),
    "quietmax.data.tables.TableRows": lambda table: chain(
        _foreign_encoding(table), *map(_foreign_records, table.parts)
    ),
    "quietmax.data.sources.FramePart": lambda part: _foreign_records(part.frame),
}
"""What else must be on the list, for containers on it."""

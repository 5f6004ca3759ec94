"""What every private estimator is trained on: checked records, labels, persons; and what its guarantee rests on.

`_training_rows` is the one way in for all estimators. It accepts arrays with scikit-learn's checks, data frames and
files of an estimator that has a `schema`, and `Records`. `queries` is the same for predictions. Everything here treats
one person's rows alone (THEORY 3.8). Error messages never show a value, a label or a count of the private records: they
may reach people who must not see the records.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quietmax._before_noise import _foreign_callers, _foreign_records, _runs_our_methods, is_allowed, is_plain
from quietmax._lazy import lazy_module
from quietmax.accounting.guarantee import MADE_WITHOUT_RECORDS, Guarantee, Status, Unit
from quietmax.data.cells import as_strings, is_missing, is_valid_unicode, numbered
from quietmax.data.cohorts import Cohort, ErasureList
from quietmax.data.encoding import Encoding, NumericColumn, quoted
from quietmax.data.records import Holdout, Records, is_held_out
from quietmax.data.sources import as_frame, as_series
from quietmax.data.tables import TableRows, table_rows
from quietmax.errors import InvalidData, InvalidInput
from quietmax.models.features.base import FeatureMap
from quietmax.models.features.encoder import Embedding, Encoder
from quietmax.models.features.generic import (
    describe_map,
    is_batched,
    make_plugin_map,
    plugin_maps,
    runs_user_code,
)
from quietmax.models.features.images import Scattering
from quietmax.models.features.tabular import Identity, UnitNorm
from quietmax.models.stacked import TrainingSettings

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = lazy_module("pandas")

ImageShape = tuple[int, int, int]

LARGEST_SIZE = 10**9
"""Largest number of records or persons that can be declared. It is fixed, so an error reveals nothing."""


def check_choice(name: str, value: object, valid: Collection[str]) -> None:
    """Raise `InvalidInput` unless an argument is one of the valid strings."""
    if not (isinstance(value, str) and value in valid):
        raise InvalidInput(f"{name} must be one of {', '.join(valid)}, got {value!r}.")


def _check_positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not 0.0 < value < math.inf:
            raise InvalidInput(f"{name} must be a positive number, got {value!r}.")


def _checked_size(size: int) -> int:
    if (
        isinstance(size, bool)
        or not isinstance(size, Real)
        or not 1 <= size <= LARGEST_SIZE
        or size != int(size)
    ):
        raise InvalidInput(f"declared_size must be an integer from 1 to {LARGEST_SIZE:,}, got {size!r}.")
    return int(size)


BUILT_IN_FEATURES = ("auto", "identity", "unit-norm", "scattering", "embedding")


def named_features(
    features: FeatureMap | str | None, image_shape: ImageShape | None, *, encoding: Encoding | None = None
) -> FeatureMap | None:
    """Return the feature map that a name stands for; a map, or None for no map, is returned as it is."""
    if features is None or isinstance(features, FeatureMap):
        return features
    if features not in BUILT_IN_FEATURES:
        check_choice("features", features, (*BUILT_IN_FEATURES, *plugin_maps()))
        return make_plugin_map(features, image_shape)
    if features == "embedding":
        if encoding is None:
            return Embedding()
        _check_embedding(encoding)
        return Embedding(0.5)
    if features == "scattering":
        if image_shape is None:
            raise InvalidInput("features='scattering' requires image_shape: the records must be images.")
        return Scattering(image_shape)
    return UnitNorm(1.0) if features == "unit-norm" else Identity()


def _check_embedding(encoding: Encoding) -> None:
    """Check that every column of a table can be a part of an embedding, with 0 at the centre of its encoded values."""
    for column in encoding.columns:
        if not (
            isinstance(column, NumericColumn)
            and column.low == -column.high
            and column.scale == "linear"
            and not column.edges
            and not column.missing
        ):
            raise InvalidInput(
                f"features='embedding' requires numeric columns with bounds around 0 and without missing values, but "
                f"column {column.name!r} is not declared so. Declare bounds such as [-1, 1] and complete = ['*'] in "
                f"the schema, or use features='auto'."
            )


def _checked_records(
    estimator: Any, X: ArrayLike, y: ArrayLike, *, dtypes: Sequence[Any] = (np.float32,)
) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Check a training set as scikit-learn does, with messages that show no value and no number of records."""
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import validate_data

    records: NDArray[np.float32]
    try:
        labels = None if y is None else _label_array(y)
        by_object = labels is not None and labels.dtype == object
        with np.errstate(over="ignore"):
            # Zeros stand in for objects: scikit-learn would judge all of them by the first one.
            records, checked = validate_data(
                estimator, X, np.zeros(np.shape(labels)) if by_object else labels, dtype=list(dtypes)
            )
            # Everything is computed from float32. What it cannot hold is refused here, before any noise is drawn.
            if not np.isfinite(np.array([records.min(), records.max()], np.float32)).all():
                raise ValueError("Input X contains a value too large for dtype('float32')")
        if by_object:
            return records, np.reshape(labels, -1)
        with warnings.catch_warnings():
            # Whether most labels differ is a fact about the private labels.
            warnings.filterwarnings("ignore", message="The number of unique classes")
            check_classification_targets(checked)
    except ValueError as problem:
        hint = " A data frame with other columns needs a `schema`." if hasattr(X, "columns") else ""
        raise InvalidInput(
            f"{_public_reason(problem)}. X must be a table of finite numbers, and y must have one label for each row."
            f"{hint}"
        ) from None
    return records, checked


def _public_reason(problem: ValueError) -> str:
    """Return what is wrong with a training set, without the values and the numbers of rows that the message shows."""
    reason = str(problem).splitlines()[0]
    if "array element with a sequence" in reason:
        return "A row of X has another number of columns than the others, or an element that is not a number"
    # The text after "to float:" shows values, the list after "samples" and the start of a shape show numbers of rows.
    reason = reason.partition(" to float:")[0].partition(": [")[0].rstrip(":. ")
    return re.sub(r"\(\d+, ", "(, ", reason)


def _label_array(y: Any) -> NDArray[Any]:
    """Return labels as an array in which no label changes another one, as a single 1.0 would large integers."""
    if hasattr(y, "__array__") or isinstance(y, str | bytes | Mapping) or not hasattr(y, "__getitem__"):
        array = np.asarray(y)
        if array.dtype == object and array.ndim:
            return _objects([_label(each) for each in array.ravel()]).reshape(array.shape)
        return array
    return _unchanged([_label(each) for each in y])


def _label(value: Any) -> str | int | float:
    label = _plain(value)
    if isinstance(label, str | int) or (isinstance(label, float) and label.is_integer()):
        return label
    raise ValueError("Unknown label type: every label must be a string, an integer or a boolean")


def _plain(value: Any) -> Any:
    """Return a scalar of NumPy or torch as a Python object, which compares exactly; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _objects(values: list[Any]) -> NDArray[Any]:
    return np.fromiter(values, dtype=object, count=len(values))


def _unchanged(values: list[Any]) -> NDArray[Any]:
    """Return values as an array of the type that NumPy chooses, or of objects if this type would change a value."""
    try:
        array = np.asarray(values)
    except OverflowError:
        return _objects(values)
    return array if array.ndim != 1 or array.tolist() == values else _objects(values)


def _declared_array(declared: Any) -> NDArray[Any]:
    """Return declared classes as an array in which no class changes another one."""
    if not isinstance(declared, Sequence) or isinstance(declared, str | bytes):
        return np.asarray(declared)
    try:
        return _unchanged([_plain(each) for each in declared])
    except ValueError:
        raise InvalidInput(
            "classes must be a flat sequence such as range(10), got sequences in it."
        ) from None


def _class_numbers(
    labels: NDArray[Any], declared: Sequence[Any] | None
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the classes, and the index of every label among them; equality is that of Python (1.0 is 1)."""
    classes = _distinct(labels) if declared is None else _declared_array(declared)
    if classes.ndim != 1:
        raise InvalidInput(f"classes must be a flat sequence such as range(10), got shape {classes.shape}.")
    numbers = {_plain(label): number for number, label in enumerate(classes.tolist())}
    if declared is None and len(classes) < 2:
        raise InvalidInput("y contains only one class; a classifier needs at least two different classes.")
    if len(numbers) < 2 or len(numbers) < len(classes):
        raise InvalidInput(
            f"classes must contain at least two different classes, each once, got {classes.tolist()[:20]}."
        )
    if labels.dtype.kind == classes.dtype.kind == "i":
        order = np.argsort(classes)
        found = order[np.searchsorted(classes[order[:-1]], labels)]
        places = np.where(classes[found] == labels, found, -1)
    else:
        places = np.array([numbers.get(label, -1) for label in labels.tolist()], dtype=np.int64)
    if (places < 0).any():
        raise InvalidInput(f"y contains a label that is not one of the {len(classes)} declared classes.")
    return classes, places


def _distinct(labels: NDArray[Any]) -> NDArray[Any]:
    try:
        return np.unique(labels)
    except TypeError:
        raise InvalidInput(
            "y contains both strings and numbers, which cannot be sorted: declare the classes."
        ) from None


@dataclass(frozen=True)
class Condition:
    """A condition that makes a proven guarantee conditional."""

    because: str  # The sentence that is added to the guarantee's reason
    assumptions: tuple[str, ...]  # The assumptions on which the guarantee then rests


def size_condition(unit: Unit) -> Condition:
    """Return the condition of a size that was not declared."""
    return Condition(
        f"The number of {unit}s was not declared by declared_size (--declared-size; THEORY 3.1).",
        (f"The number of {unit}s is public: it was read off them, since no declared_size was given.",),
    )


SETTINGS_PUBLIC = (
    "What the owner declared or chose (bounds, categories, classes, size, column types, features, settings) would be "
    "the same without any one person or record."
)
LIBRARY_ROUNDING = (
    "The numerical library rounds a record's features alike at every place of a batch and beside all other records. "
    "This was checked on synthetic records before training; `quietmax audit invariant` checks it again."
)
LIBRARY_STACK = (
    "The numerical library computes every network of a stack from that network's numbers alone, and rounds equal "
    "calls alike. `quietmax audit invariant` checks it."
)
LIBRARY_TEXT = (
    "The numerical library rounds equal calls alike: texts are embedded one by one, so that a text's numbers depend on "
    "that text alone. `quietmax audit invariant` checks it."
)
EMBEDDED = (
    "The embeddings in the records were computed from each record alone, by an encoder that "
    f"{MADE_WITHOUT_RECORDS}."
)
CLASSES = Condition(
    "The classes were not declared (THEORY 3.1).",
    ("The set of classes is public: it was read off the labels, since none were declared.",),
)
OWN_MAP = Condition(
    "The feature map runs the user's own code.",
    ("The user's own feature map computes a record's features from that record alone.",),
)
OWN_MODULES = Condition(
    "The teachers are the user's own modules.",
    ("The user's own modules share nothing: a record changes the answers of its own teacher alone.",),
)
ERASURE = (
    "Who is on the erasure list was decided by these people, and not by what other people's rows say. The list and its "
    "key stay with the owner of the table."
)
EARLIER_VERSION = Condition(
    "An earlier version of the series has a conditional guarantee.",
    (
        "What the guarantees of the earlier versions of the series assume holds; their model folders state it.",
    ),
)
SEEDED_WEIGHTS = Condition(
    "The noise is seeded and in floating point, for experiments only (THEORY 3.5).",
    ("Nobody knows the seed, and nobody looks at the low digits of the weights.",),
)


def weakened(guarantee: Guarantee, *conditions: Condition) -> Guarantee:
    """Return a guarantee that also rests on some conditions."""
    for condition in conditions:
        status: Status = "conditional" if guarantee.status == "proven" else guarantee.status
        reason = f"{guarantee.because} {condition.because}"
        guarantee = guarantee.weakened(status, reason, condition.assumptions)
    return guarantee


def _encoder_assumptions(description: Mapping[str, Any]) -> tuple[str, ...]:
    """Return one sentence for each encoder in a map, and one for numbers that an encoder computed beforehand."""
    if description == {"kind": Embedding.kind, "centre": description.get("centre")}:
        return (EMBEDDED,)
    if description["kind"] == Encoder.kind and "sha256" in description:  # else a class of the user's own
        name, digest = description["file"], description["sha256"]
        return (f"The encoder file {name} (SHA-256 {digest}) {MADE_WITHOUT_RECORDS}.",)
    return tuple(each for step in description.get("maps", ()) for each in _encoder_assumptions(step))


def alike(stored: Any, computed: Any, within: float = 1e-9) -> bool:
    """Return whether two JSON values are equal up to rounding."""
    if isinstance(stored, bool) or isinstance(computed, bool):
        return stored is computed
    if isinstance(stored, int | float) and isinstance(computed, int | float):
        return math.isclose(stored, computed, rel_tol=within)
    if isinstance(stored, Mapping) and isinstance(computed, Mapping):
        return stored.keys() == computed.keys() and all(
            alike(stored[name], computed[name], within) for name in stored
        )
    if isinstance(stored, list | tuple) and isinstance(computed, list | tuple):
        return len(stored) == len(computed) and all(
            alike(*pair, within) for pair in zip(stored, computed, strict=True)
        )
    return bool(stored == computed)


def _names_of(groups: Any) -> NDArray[np.object_]:
    """Return the name of each row's person. Each entry becomes a string by itself: 1, 1.0 and "1" are the same one."""
    try:
        names = as_strings(as_series(groups, "groups"))
    except InvalidData:
        raise InvalidInput("groups must be a flat sequence of numbers or strings.") from None
    if is_missing(names).any():
        raise InvalidInput("groups must name a person for every row; some rows have no value.")
    if not is_valid_unicode(names).all():
        raise InvalidInput("groups must be valid Unicode; some rows have a string that is not.")
    return names


@dataclass(frozen=True, eq=False)
class Persons:
    """Whom each row belongs to."""

    codes: NDArray[np.int64]  # One number per row, equal for the rows of one person

    @classmethod
    def of(cls, names: Iterable[str]) -> Persons:
        """Return the persons with these names, one for each row."""
        return cls(numbered(names)[0])

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """The number of rows of each row's person."""
        return np.bincount(self.codes)[self.codes].astype(self.codes.dtype)

    @cached_property
    def count(self) -> int:
        """The number of persons."""
        return int(self.codes.max(initial=-1)) + 1


@dataclass(frozen=True, eq=False)
class Piece:
    """Some rows of a training set."""

    records: NDArray[np.float32]  # Finite numbers
    labels: NDArray[np.int64]  # Indices into the classes
    persons: NDArray[np.object_] | None = None


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """A training set whose rows are read piece by piece; what is public about it is known before."""

    pieces: Iterator[Piece]  # The rows; they can be read once
    columns: int  # Number of columns of a record
    classes: NDArray[Any]  # The labels of the classes
    unit: Unit  # What a guarantee protects
    encoding: Encoding | None  # How the rows of a table become records; None for plain arrays
    holdout: Holdout | None  # Which persons of the table were held out; None if nobody was
    classes_declared: bool  # Whether the classes were declared; otherwise they were read off the labels
    own_code: tuple[str, ...]
    in_memory: bool  # Whether the rows are in memory before they are read
    count: int | None  # The number of rows (before a holdout), if it is known before they are read
    source: TableRows | None = None
    cohort: Cohort | None = None  # The cohort that the rows are left to
    erasure_list: bool = False  # Whether people on a list were left out


CodeBefore = Mapping[str, Sequence[str]]
_CODE_BEFORE = {
    "own_code": (
        "Code that is not on Quietmax's list saw the private records before this estimator (THEORY 3.8).",
        "This code computes each record from that record alone, and what it learned from the records is public",
    ),
    "fitted_steps": (  # in folders of version 0.2
        "Other steps saw the private records before this estimator (THEORY 3.8).",
        "What these steps learned from the private records is public",
    ),
}


def code_before(facts: Mapping[str, Any]) -> CodeBefore:
    """Return what ran before an estimator, by the name that the facts of a guarantee have for it."""
    return {name: list(facts[name]) for name in _CODE_BEFORE if facts.get(name)}


@dataclass(frozen=True)
class Basis:
    """What a guarantee rests on beside its mechanism and its settings."""

    features: Mapping[str, Any] | None = None  # Describes the feature map
    own_map: bool = False  # Whether the feature map is the user's own, or runs code of theirs
    encoding: Encoding | None = None
    size_declared: bool = True
    classes_declared: bool = True
    code_before: CodeBefore = field(default_factory=dict)  # What ran before the estimator
    erasure_list: bool = False  # Whether people on a list were left out

    @classmethod
    def of(cls, feature_map: FeatureMap | None, encoding: Encoding | None, facts: Mapping[str, Any]) -> Basis:
        """Return the basis of a training with these facts."""
        return cls(
            None if feature_map is None else describe_map(feature_map),
            feature_map is not None and runs_user_code(feature_map),
            encoding,
            facts["size_declared"] is True,
            facts["classes_declared"] is True,
            code_before(facts),
            facts.get("erasure_list") is True,
        )

    @property
    def facts(self) -> dict[str, Any]:
        """What a guarantee states of it."""
        declared = {"classes_declared": self.classes_declared, "size_declared": self.size_declared}
        return {**declared, **self.code_before, **({"erasure_list": True} if self.erasure_list else {})}

    def under(
        self,
        guarantee: Guarantee,
        assumptions: Sequence[str] = (),
        *,
        own_modules: Condition | None = None,
        seeded: bool = False,
    ) -> Guarantee:
        """Return a guarantee with all that it assumes and rests on."""
        assumed = (
            *guarantee.assumptions,
            SETTINGS_PUBLIC,
            *self._data_assumptions(guarantee.unit),
            *(() if self.features is None else _encoder_assumptions(self.features)),
            *((LIBRARY_ROUNDING,) if self.features is not None and is_batched(self.features) else ()),
            *assumptions,
        )
        conditions = (
            OWN_MAP if self.own_map else None,
            *self._data_conditions,
            own_modules,
            None if self.size_declared else size_condition(guarantee.unit),
            SEEDED_WEIGHTS if seeded else None,
        )
        return weakened(replace(guarantee, assumptions=assumed), *filter(None, conditions))

    def _data_assumptions(self, unit: Unit) -> Iterator[str]:
        """Yield what is assumed about who is a person, and about the encoder of text columns.

        If several people share a value, the guarantee protects all of them together. One of them alone changes what the
        rows of the others count, and so has up to twice the mu (or epsilon): the others leave, and come back without
        them.
        """
        column = None if self.encoding is None else self.encoding.person
        if unit == "person":
            same = "entry in `groups`" if column is None else f"value in column {column!r}"
            yield f"All rows of one person, and nobody else's, have the same {same}."
        if self.erasure_list:
            yield ERASURE
        if self.encoding is not None and self.encoding.encoders:
            for name, digest in self.encoding.encoders:
                yield f"The sentence encoder {name} (SHA-256 {digest}) {MADE_WITHOUT_RECORDS}."
            yield LIBRARY_TEXT

    @property
    def _data_conditions(self) -> tuple[Condition, ...]:
        """What was read off the records, and what saw them before."""
        conditions = [] if self.classes_declared else [CLASSES]
        if self.encoding is not None and self.encoding.inferred:
            conditions.append(
                Condition(
                    "The encoding was measured on the private records (THEORY 3).",
                    (f"What was read off the records is public: {', '.join(self.encoding.inferred)}.",),
                )
            )
        for name, names in self.code_before.items():
            because, assumption = _CODE_BEFORE[name]
            conditions.append(Condition(because, (f"{assumption}: {', '.join(names)}.",)))
        return tuple(conditions)


def _training_rows(
    estimator: Any,
    X: Any,
    y: Any,
    groups: Any,
    *,
    cohort: str | None = None,
    forgotten: ErasureList | str | Path | None = None,
    dtypes: Sequence[Any] = (np.float32,),
) -> TrainingRows:
    """Check what an estimator is trained on; set `classes_`, `encoding_`, `holdout_` and `n_features_in_`."""
    source = _selected(_source(estimator, X, y), cohort, forgotten, groups)
    chosen = source if isinstance(source, TableRows) and source.selected else None
    own_code = _own_code(estimator, X, y, groups)
    if chosen is not None:
        own_code = tuple(dict.fromkeys((*own_code, *_foreign_records(chosen))))
    encoding, holdout = (None, None) if source is None else (source.encoding, source.holdout)
    names: NDArray[np.object_] | None = None
    if groups is not None:
        _check_groups(source)
        names = _names_of(groups)
    if isinstance(source, TableRows):
        if source.held_out:
            raise InvalidInput("These rows are held out, so they must not be trained on: train on `train`.")
        classes = _classes(estimator, source.encoding, len(source.encoding.classes))
        by_person = names is not None or source.encoding.person is not None
        columns, count, pieces = len(source.encoding.feature_names), source.count(), _pieces(source, names)
        estimator.n_features_in_ = columns
        estimator.__dict__.pop("feature_names_in_", None)
    else:
        if source is None:
            records, given = _checked_records(estimator, X, y, dtypes=dtypes)
            classes, labels = _class_numbers(given, estimator.classes)
        else:
            _check_held_out(source)
            records, labels = _checked_records(estimator, source.features, source.labels)
            classes = _classes(estimator, source.encoding, source.classes)
            names = source.persons if names is None else names
        _check_one_for_each(names, len(records))
        by_person, columns, count = names is not None, records.shape[1], len(records)
        pieces = iter([Piece(records, labels, names)])
    held_out = None if holdout is None or holdout.share == 0 else holdout
    estimator.classes_, estimator.encoding_, estimator.holdout_ = classes, encoding, held_out
    streamed = source if isinstance(source, TableRows) else None
    return TrainingRows(
        pieces,
        columns,
        classes,
        unit="person" if by_person else "record",
        encoding=encoding,
        holdout=held_out,
        classes_declared=source is not None or estimator.classes is not None,
        own_code=own_code,
        in_memory=streamed is None or streamed.in_memory,
        count=count,
        source=streamed if groups is None else None,
        cohort=None if chosen is None else chosen.cohort,
        erasure_list=chosen is not None and chosen.forgotten is not None,
    )


def _selected(
    source: Records | TableRows | None, cohort: str | None, forgotten: Any, groups: Any
) -> Records | TableRows | None:
    given = cohort is not None or forgotten is not None
    if not given and not (isinstance(source, TableRows) and source.selected):
        return source
    if not isinstance(source, TableRows):
        raise InvalidInput(
            "`cohort` and `forgotten` require a table with a `schema`, not encoded records or arrays."
        )
    if groups is not None:
        raise InvalidInput("`cohort` and `forgotten` know people by a `person` column: leave out `groups`.")
    if forgotten is not None:
        source = source.without(
            ErasureList.from_file(forgotten) if isinstance(forgotten, str | Path) else forgotten
        )
    if cohort is None or (source.cohort is not None and source.cohort.name == cohort):
        return source
    return source.of_cohort(cohort)


_SPLIT_WITHOUT_GROUPS = (
    "The records were split without knowing `groups`, so one person may be in the training set and in the holdout: "
    "leave out `groups`, or declare a `person` column before the split."
)
NOBODY = (
    "Nobody is left to train on: the table or its cohort has nobody, or all are held out or left out. Whether "
    "somebody is left depends on the records: this error is for their owner and not part of a release."
)


def _own_code(estimator: Any, *values: Any) -> tuple[str, ...]:
    found = [*_foreign_callers(estimator)]
    for value in values:
        found += _foreign_records(value)
    for name, value in estimator.get_params(deep=False).items():
        if name == "classes":
            found += _foreign_records(value)
        elif name == "engine":
            found += () if type(value) is str or _runs_our_methods(value) else (type(value).__name__,)
        elif name == "settings" and is_allowed(type(value), "training"):
            found += (type(each).__name__ for each in vars(value).values() if not is_plain(each))
        elif name == "network" and not isinstance(value, TrainingSettings):
            pass  # a function that makes modules is a condition of its own, as are `features` and `random_state`
        elif name not in ("features", "random_state") and not is_plain(value, "encoding", "training"):
            found.append(type(value).__name__)
    return tuple(dict.fromkeys(found))


def _source(estimator: Any, X: Any, y: Any) -> Records | TableRows | None:
    """Return the records or the source of rows that an estimator was given, or None for arrays."""
    if isinstance(X, Records | TableRows):
        if estimator.schema is not None or y is not None:
            raise InvalidInput("Records are encoded and have labels: leave out `schema` and `y`.")
        return X
    if estimator.schema is None and isinstance(X, str | Path):
        raise InvalidInput("Files need a `schema`.")
    if estimator.schema is None:
        return None
    rows, prior = table_rows(X, estimator.schema, y=y), getattr(estimator, "_prior", None)
    # The same people are held out in all of a series.
    return rows if prior is None else replace(rows, holdout=prior.holdout)


def _check_groups(source: Records | TableRows | None) -> None:
    if source is None:
        return
    if isinstance(source, TableRows) and not source.in_memory:
        raise InvalidInput("Files name persons in a `person` column: leave out `groups`.")
    if source.holdout is not None and source.holdout.share > 0:
        raise InvalidInput(_SPLIT_WITHOUT_GROUPS)
    if (source.persons if isinstance(source, Records) else source.encoding.person) is not None:
        raise InvalidInput("The records have a `person` column already: leave out `groups`.")


def _check_one_for_each(names: NDArray[np.object_] | None, rows: int) -> None:
    if names is not None and len(names) != rows:
        raise InvalidInput("groups must have one entry for each row of X.")


def _pieces(source: TableRows, names: NDArray[np.object_] | None) -> Iterator[Piece]:
    start = 0
    for records in source.records():
        end = start + len(records)
        yield Piece(records.features, records.labels, records.persons if names is None else names[start:end])
        start = end
    _check_one_for_each(names, start)


def _check_held_out(records: Records) -> None:
    if not len(records):
        raise InvalidData(NOBODY)
    if records.holdout is None or records.holdout.share == 0:
        return
    if is_held_out(records, records.holdout).any():
        raise InvalidInput(
            "Some of these records are held out by their own split, so they must not be trained on: train on "
            "`split.train`. To train on everybody, split with a `holdout` of 0."
        )


def with_holdout(guarantee: Guarantee, holdout: Holdout | None) -> Guarantee:
    """Return a guarantee that names the rule by which people were held out of the training."""
    parameters = {name: value for name, value in guarantee.parameters.items() if name != "holdout"}
    if holdout is not None:
        parameters["holdout"] = holdout.to_json()
    return replace(guarantee, parameters=parameters)


def _classes(estimator: Any, encoding: Encoding | None, count: int) -> NDArray[Any]:
    names: Sequence[Any] = range(count) if encoding is None else encoding.classes
    if estimator.classes is None:
        return np.asarray(names)
    if encoding is not None and list(estimator.classes) != list(names):
        raise InvalidInput("The schema declares the classes: leave out `classes`.")
    classes = _class_numbers(np.empty(0, dtype=object), estimator.classes)[0]
    if len(classes) != count:
        raise InvalidInput(f"classes must name the {count} classes of the records, got {len(classes)}.")
    return classes


def queries(estimator: Any, X: Any) -> NDArray[np.float32]:
    """Check the queries of a prediction, and encode the rows of a frame as in training."""
    from sklearn.utils.validation import check_is_fitted, validate_data

    check_is_fitted(estimator)
    if isinstance(X, Records):
        X = X.features
    elif estimator.encoding_ is not None and (
        isinstance(X, pd.DataFrame) or hasattr(X, "__arrow_c_stream__")
    ):
        X = estimator.encoding_.encode(as_frame(X))
    elif estimator.encoding_ is not None and not _holds_numbers(X):
        names = [column.name for column in estimator.encoding_.columns]
        raise InvalidInput(
            f"X must be a data frame with the columns {quoted(names)}, or an array of encoded rows, which are numbers."
        )
    checked: NDArray[np.float32] = validate_data(estimator, X, dtype=np.float32, reset=False)
    return checked


def _holds_numbers(X: Any) -> bool:
    try:
        values = np.asarray(X)
        if values.dtype.kind == "O":
            values = values.astype(np.float64)
    except (TypeError, ValueError):
        return False
    return values.dtype.kind not in "SU"

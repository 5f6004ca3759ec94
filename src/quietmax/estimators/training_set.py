"""What every private estimator is trained on: checked records, labels, and whom each record belongs to.

`training_rows` is the one way in for all estimators, and `training_set` reads it into memory. It accepts arrays with
scikit-learn's checks, data frames and files of an estimator that has a `schema`, and `Records`. `queries` is the same
for predictions. Everything here treats one person's rows alone (THEORY 3.8); messages show no value of the private
records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quietmax._before_noise import foreign_callers, foreign_records, is_own_class, is_plain
from quietmax._lazy import lazy_module
from quietmax.accounting.guarantee import MADE_WITHOUT_RECORDS, Guarantee, Unit
from quietmax.data.cells import as_strings, is_missing, is_valid_unicode, numbered
from quietmax.data.encoding import Encoding, quoted
from quietmax.data.records import Holdout, Records, is_held_out
from quietmax.data.sources import as_frame, as_series, is_source
from quietmax.data.tables import TableRows, table_rows
from quietmax.errors import InvalidData, InvalidInput
from quietmax.estimators.validation import (
    CLASSES,
    Condition,
    checked_records,
    class_numbers,
    person_assumptions,
)
from quietmax.models.stacked import TrainingSettings

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = lazy_module("pandas")


@dataclass(frozen=True, eq=False)
class Persons:
    """Whom each row belongs to."""

    names: NDArray[np.object_]  # A stable name of each row's person, which depends on nothing but that row

    @classmethod
    def of(cls, groups: Any) -> Persons:
        """Return the persons that `groups` names, one entry per row.

        Each entry becomes a string by itself: 1, 1.0 and "1" name the same person.
        """
        try:
            names = as_strings(as_series(groups, "groups"))
        except InvalidData:
            raise InvalidInput("groups must be a flat sequence of numbers or strings.") from None
        if is_missing(names).any():
            raise InvalidInput("groups must name a person for every row; some rows have no value.")
        if not is_valid_unicode(names).all():
            raise InvalidInput("groups must be valid Unicode; some rows have a string that is not.")
        return cls(names)

    @cached_property
    def codes(self) -> NDArray[np.int64]:
        """One number per row, equal for the rows of one person."""
        return numbered(self.names)[0]

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """The number of rows of each row's person."""
        return np.bincount(self.codes)[self.codes].astype(np.int64)

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

    @property
    def code_before(self) -> CodeBefore:
        """What ran before this estimator, as `data_conditions` takes it."""
        return code_before({"own_code": self.own_code})


def data_assumptions(unit: Unit, encoding: Encoding | None) -> tuple[str, ...]:
    """Return what every guarantee assumes about who is a person, and about the encoder of text columns."""
    if encoding is None:
        return person_assumptions(unit, None)
    encoders = (
        f"The sentence encoder {name} (SHA-256 {digest}) {MADE_WITHOUT_RECORDS}."
        for name, digest in encoding.encoders
    )
    rounding = (LIBRARY_TEXT,) if encoding.encoders else ()
    return (*person_assumptions(unit, encoding.person), *encoders, *rounding)


LIBRARY_TEXT = (
    "The numerical library rounds equal calls alike: texts are embedded one by one, so that a text's numbers depend on "
    "that text alone. `quietmax audit invariant` checks it."
)


def data_conditions(
    *, classes_declared: bool, encoding: Encoding | None, code_before: CodeBefore
) -> tuple[Condition, ...]:
    """Return the conditions on which a guarantee rests because of its training set."""
    conditions = [] if classes_declared else [CLASSES]
    if encoding is not None and encoding.inferred:
        conditions.append(
            Condition(
                "The encoding was measured on the private records (THEORY 3).",
                (f"What was read off the records is public: {', '.join(encoding.inferred)}.",),
            )
        )
    for name, names in code_before.items():
        because, assumption = _CODE_BEFORE[name]
        conditions.append(Condition(because, (f"{assumption}: {', '.join(names)}.",)))
    return tuple(conditions)


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


def training_rows(
    estimator: Any, X: Any, y: Any, groups: Any, *, dtypes: Sequence[Any] = (np.float32,)
) -> TrainingRows:
    """Check what an estimator is trained on; set `classes_`, `encoding_`, `holdout_` and `n_features_in_`."""
    own_code = _own_code(estimator, X, y, groups)
    source = _source(estimator, X, y)
    if source is None:
        records, given = checked_records(estimator, X, y, dtypes=dtypes)
        classes, labels = class_numbers(given, estimator.classes)
        names = _person_names(None, groups, len(records))
        pieces: Iterator[Piece] = iter([Piece(records, labels, names)])
        count: int | None = len(records)
        encoding, holdout, declared, in_memory = None, None, estimator.classes is not None, True
        person, columns = names is not None, records.shape[1]
    elif isinstance(source, Records):
        _check_holdout(source, groups)
        if not len(source):
            raise InvalidData(NOBODY)
        records, labels = checked_records(estimator, source.features, source.labels)
        classes = _classes(estimator, source.encoding, source.classes)
        names = _person_names(source.persons, groups, len(records))
        pieces, count = iter([Piece(records, labels, names)]), len(records)
        encoding, holdout, declared, in_memory = source.encoding, source.holdout, True, True
        person, columns = names is not None, records.shape[1]
    else:
        encoding, holdout, declared, in_memory = source.encoding, source.holdout, True, source.in_memory
        classes = _classes(estimator, encoding, len(encoding.classes))
        person, columns = encoding.person is not None or groups is not None, len(encoding.feature_names)
        if source.held_out:
            raise InvalidInput("These rows are held out, so they must not be trained on: train on `train`.")
        pieces, count = _encoded_pieces(source, groups), source.count()
        estimator.n_features_in_ = columns
        estimator.__dict__.pop("feature_names_in_", None)
    held_out = None if holdout is None or holdout.share == 0 else holdout
    estimator.classes_, estimator.encoding_, estimator.holdout_ = classes, encoding, held_out
    return TrainingRows(
        pieces,
        columns,
        classes,
        "person" if person else "record",
        encoding,
        held_out,
        declared,
        own_code,
        in_memory,
        count,
        source if isinstance(source, TableRows) and groups is None else None,
    )


_SPLIT_WITHOUT_GROUPS = (
    "The records were split without knowing `groups`, so one person may be in the training set and in the holdout: "
    "leave out `groups`, or declare a `person` column before the split."
)
NOBODY = (
    "Nobody is left to train on. A smaller `holdout` keeps more people for training. Whether somebody is left "
    "depends on the records: this error is for their owner and not part of a release."
)


def _own_code(estimator: Any, *values: Any) -> tuple[str, ...]:
    """Return the names of what is not on the list of `_before_noise` and computes something from the records."""
    found = [*foreign_callers(estimator)]
    for value in values:
        found += foreign_records(value)
    for name, value in estimator.get_params(deep=False).items():
        if name == "classes":
            found += foreign_records(value)
        elif name == "engine":
            found += () if type(value) is str or is_own_class(type(value)) else (type(value).__name__,)
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
    if estimator.schema is None and is_source(X):
        raise InvalidInput("Files, datasets and streams need a `schema`.")
    return None if estimator.schema is None else table_rows(X, estimator.schema, y=y)


def _encoded_pieces(source: TableRows, groups: Any) -> Iterator[Piece]:
    """Encode a table piece by piece."""
    if groups is not None and not source.in_memory:
        raise InvalidInput(
            "Files, datasets and streams name persons in a `person` column: leave out `groups`."
        )
    if groups is not None and source.holdout is not None:
        raise InvalidInput(_SPLIT_WITHOUT_GROUPS)
    if groups is not None and source.encoding.person is not None:
        raise InvalidInput("The records have a `person` column already: leave out `groups`.")
    given = None if groups is None else Persons.of(groups).names

    def pieces() -> Iterator[Piece]:
        start = 0
        for records in source.records():
            names = records.persons if given is None else given[start : start + len(records)]
            start += len(records)
            yield Piece(records.features, records.labels, names)
        if given is not None and start != len(given):
            raise InvalidInput("groups must have one entry for each row of X.")

    return pieces()


def _check_holdout(records: Records, groups: Any) -> None:
    """Raise unless all records are on the side of the training set, and their split knows whose they are."""
    if records.holdout is None or records.holdout.share == 0:
        return
    if groups is not None:
        raise InvalidInput(_SPLIT_WITHOUT_GROUPS)
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
    """Return the declared classes of encoded records, in the order of their class numbers."""
    names: Sequence[Any] = range(count) if encoding is None else encoding.classes
    if estimator.classes is None:
        return np.asarray(names)
    if encoding is not None and list(estimator.classes) != list(names):
        raise InvalidInput("The schema declares the classes: leave out `classes`.")
    classes = class_numbers(np.empty(0, dtype=object), estimator.classes)[0]
    if len(classes) != count:
        raise InvalidInput(f"classes must name the {count} classes of the records, got {len(classes)}.")
    return classes


def _person_names(names: NDArray[np.object_] | None, groups: Any, rows: int) -> NDArray[np.object_] | None:
    """Return the person of each row, from a `person` column or from `groups`; None for neither."""
    if groups is None:
        return names
    if names is not None:
        raise InvalidInput("The records have a `person` column already: leave out `groups`.")
    given = Persons.of(groups).names
    if len(given) != rows:
        raise InvalidInput("groups must have one entry for each row of X.")
    return given


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
    """Return whether an array-like holds numbers, as encoded rows do."""
    try:
        values = np.asarray(X)
        if values.dtype.kind == "O":
            values = values.astype(np.float64)
    except (TypeError, ValueError):
        return False
    return values.dtype.kind not in "SU"

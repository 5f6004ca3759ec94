"""What every private estimator is trained on: checked records, labels, and whom each record belongs to.

`training_set` is the one way in for all estimators. It accepts arrays with scikit-learn's checks, data frames of an
estimator that has a `schema`, and `Records`. `queries` is the same for predictions. Everything here treats one
person's rows alone (THEORY 3.8); messages show no value of the private records.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import get_tags
from sklearn.utils.validation import check_is_fitted, validate_data

from quietmax.accounting.guarantee import Guarantee, Unit
from quietmax.data.encoding import Encoding, as_strings, is_missing, is_text, quoted
from quietmax.data.records import Holdout, Records, is_held_out
from quietmax.data.tables import as_frame, as_series, encode_table
from quietmax.errors import InvalidData, InvalidInput
from quietmax.estimators.validation import CLASSES, Condition, checked_records, class_numbers


@dataclass(frozen=True, eq=False)
class Persons:
    """Whom each row belongs to.

    Parameters
    ----------
    names : array of str of shape (rows,)
        A stable name of each row's person, which depends on nothing but that row.

    Attributes
    ----------
    codes : array of int of shape (rows,)
        One number per row, equal for the rows of one person; the numbers themselves mean nothing.
    rows : array of int of shape (rows,)
        The number of rows k_u of each row's person.
    count : int
        The number of persons.

    Examples
    --------
    >>> persons = Persons.of(["ann", "bob", "ann"])
    >>> persons.count, persons.codes.tolist(), persons.rows.tolist()
    (2, [0, 1, 0], [2, 1, 2])
    """

    names: NDArray[np.object_]

    @classmethod
    def of(cls, groups: Any) -> Persons:
        """Return the persons that `groups` names, one entry per row.

        Each entry becomes a string by itself: 1, 1.0 and "1" name the same person.

        Parameters
        ----------
        groups : array-like of shape (rows,)
            Numbers or strings.

        Raises
        ------
        InvalidInput
            If an entry is missing, or not a number or a string. The message shows no entry.
        """
        try:
            names = as_strings(as_series(groups, "groups"))
        except InvalidData:
            raise InvalidInput("groups must be a flat sequence of numbers or strings.") from None
        if is_missing(names).any():
            raise InvalidInput("groups must name a person for every row; some rows have no value.")
        if not is_text(names).all():
            raise InvalidInput("groups must be valid Unicode; some rows have a string that is not.")
        return cls(names)

    @cached_property
    def codes(self) -> NDArray[np.int64]:
        """One number per row, equal for the rows of one person."""
        return np.asarray(pd.factorize(self.names)[0], dtype=np.int64)

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """The number of rows of each row's person."""
        return np.bincount(self.codes)[self.codes].astype(np.int64)

    @cached_property
    def count(self) -> int:
        """The number of persons."""
        return int(self.codes.max(initial=-1)) + 1


@dataclass(frozen=True, eq=False)
class TrainingSet:
    """A checked training set.

    Parameters
    ----------
    records : array of float32 of shape (rows, columns)
        Finite numbers; of another type if `training_set` was told to leave it.
    labels : array of int of shape (rows,)
        Indices into ``classes``.
    classes : array of shape (classes,)
        The labels of the classes.
    persons : Persons or None
        Whom each row belongs to; None if every row stands for itself.
    encoding : Encoding or None
        How the rows of a table became records; None for plain arrays.
    holdout : Holdout or None
        Which persons of the table were held out; None if nobody was.
    classes_declared : bool
        Whether the classes were declared; otherwise they were read off the labels.
    fitted_steps : tuple of str
        What was fitted on the private records before this estimator, as far as it can be seen.

    Attributes
    ----------
    unit : {"record", "person"}
        What a guarantee protects.
    units : int
        The number of persons, or of records if every row stands for itself.
    conditions : tuple of Condition
        The conditions on which every guarantee for this training set rests.

    Examples
    --------
    >>> labels = np.array([0, 1, 1])
    >>> persons = Persons.of(["ann", "bob", "ann"])
    >>> found = TrainingSet(np.eye(3, dtype=np.float32), labels, np.array(["no", "yes"]), persons, None, None, True)
    >>> found.unit, found.units, found.conditions
    ('person', 2, ())
    """

    records: NDArray[np.float32]
    labels: NDArray[np.int64]
    classes: NDArray[Any]
    persons: Persons | None
    encoding: Encoding | None
    holdout: Holdout | None
    classes_declared: bool
    fitted_steps: tuple[str, ...] = ()

    @property
    def unit(self) -> Unit:
        """What a guarantee protects."""
        return "record" if self.persons is None else "person"

    @property
    def units(self) -> int:
        """The number of persons, or of records if every row stands for itself."""
        return len(self.records) if self.persons is None else self.persons.count

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The conditions on which every guarantee for this training set rests."""
        return data_conditions(
            classes_declared=self.classes_declared, encoding=self.encoding, fitted_steps=self.fitted_steps
        )


def data_conditions(
    *, classes_declared: bool, encoding: Encoding | None, fitted_steps: Sequence[str]
) -> tuple[Condition, ...]:
    """Return the conditions on which a guarantee rests because of its training set.

    Parameters
    ----------
    classes_declared : bool
        Whether the classes were declared.
    encoding : Encoding or None
        The encoding of a table.
    fitted_steps : sequence of str
        What was fitted on the private records before the estimator.

    Returns
    -------
    tuple of Condition
        Empty if everything was declared.

    Examples
    --------
    >>> data_conditions(classes_declared=True, encoding=None, fitted_steps=())
    ()
    """
    conditions = [] if classes_declared else [CLASSES]
    if encoding is not None and encoding.inferred:
        conditions.append(
            Condition(
                "The encoding was measured on the private records (THEORY 3).",
                (f"What was read off the records is public: {', '.join(encoding.inferred)}.",),
            )
        )
    if fitted_steps:
        conditions.append(
            Condition(
                "Other steps saw the private records before this estimator (THEORY 3.8).",
                (f"What these steps learned from the private records is public: {', '.join(fitted_steps)}.",),
            )
        )
    return tuple(conditions)


def training_set(
    estimator: Any, X: Any, y: Any, groups: Any, *, dtypes: Sequence[Any] = (np.float32,)
) -> TrainingSet:
    """Check what an estimator is trained on; set `classes_`, `encoding_`, `holdout_` and `n_features_in_`.

    Parameters
    ----------
    estimator : object
        The estimator that is being fitted, with the parameters `schema` and `classes`.
    X : array-like, data frame or Records
        Arrays as in scikit-learn. With a schema, a pandas or polars frame or an Arrow table. Records as they are.
    y : array-like or None
        The labels. With a schema they may be in the frame instead. None for Records.
    groups : array-like or None
        Whose row each row is. With a schema or Records that have a `person` column, None.
    dtypes : sequence of types
        Arrays of one of these types are not copied; the estimator converts them part by part to save memory.

    Returns
    -------
    TrainingSet
        The checked training set.

    Raises
    ------
    InvalidInput
        If something is wrong. The message shows no value.

    Examples
    --------
    >>> from quietmax.estimators import PrivateHead
    >>> found = training_set(PrivateHead(), [[0.0], [1.0], [2.0]], ["no", "yes", "no"], ["ann", "bob", "ann"])
    >>> found.unit, found.units, found.classes.tolist()
    ('person', 2, ['no', 'yes'])
    """
    estimator.__dict__.pop("_evaluations", None)  # an estimator whose fit fails cannot be evaluated
    found = _encoded(estimator, X, y)
    if found is not None:
        _check_holdout(found, groups)
    if found is None:
        records, given = checked_records(estimator, X, y, dtypes=dtypes)
        classes, labels = class_numbers(given, estimator.classes)
        names, encoding, holdout, declared = None, None, None, estimator.classes is not None
    elif not len(found):
        raise InvalidData(
            "Nobody is left to train on. A smaller `holdout` keeps more people for training. Whether somebody is left "
            "depends on the records: this error is for their owner and not part of a release."
        )
    else:
        records, labels = checked_records(estimator, found.features, found.labels)
        classes = _classes(estimator, found)
        names, encoding, holdout, declared = found.persons, found.encoding, found.holdout, True
    persons = _persons(names, groups, len(records))
    held_out = None if holdout is None or holdout.share == 0 else holdout
    estimator.classes_, estimator.encoding_, estimator.holdout_ = classes, encoding, held_out
    return TrainingSet(
        records, labels, classes, persons, encoding, held_out, declared, steps_before(estimator)
    )


def _encoded(estimator: Any, X: Any, y: Any) -> Records | None:
    """Return the records that an estimator was given, or None for arrays."""
    if isinstance(X, Records):
        if estimator.schema is not None or y is not None:
            raise InvalidInput("Records are encoded and have labels: leave out `schema` and `y`.")
        return X
    return None if estimator.schema is None else encode_table(X, estimator.schema, y=y)


def _check_holdout(records: Records, groups: Any) -> None:
    """Raise unless all records are on the side of the training set, and their split knows whose they are."""
    if records.holdout is None or records.holdout.share == 0:
        return
    if groups is not None:
        raise InvalidInput(
            "The records were split without knowing `groups`, so one person may be in the training set and in the "
            "holdout: leave out `groups`, or declare a `person` column before the split."
        )
    if is_held_out(records, records.holdout).any():
        raise InvalidInput(
            "Some of these records are held out by their own split, so they must not be trained on: train on "
            "`split.train`. To train on everybody, split with a `holdout` of 0."
        )


def with_holdout(guarantee: Guarantee, holdout: Holdout | None) -> Guarantee:
    """Return a guarantee that names the rule by which people were held out of the training.

    Parameters
    ----------
    guarantee : Guarantee
        What is guaranteed of the model.
    holdout : Holdout or None
        The rule; None if nobody was held out.

    Returns
    -------
    Guarantee
        With the parameter `holdout`, or without it.
    """
    parameters = {name: value for name, value in guarantee.parameters.items() if name != "holdout"}
    if holdout is not None:
        parameters["holdout"] = holdout.to_json()
    return replace(guarantee, parameters=parameters)


def _classes(estimator: Any, records: Records) -> NDArray[Any]:
    """Return the declared classes of records, in the order of their class numbers."""
    names: Sequence[Any] = range(records.classes) if records.encoding is None else records.encoding.classes
    if estimator.classes is None:
        return np.asarray(names)
    if records.encoding is not None and list(estimator.classes) != list(names):
        raise InvalidInput("The schema declares the classes: leave out `classes`.")
    classes = class_numbers(np.empty(0, dtype=object), estimator.classes)[0]
    if len(classes) != records.classes:
        raise InvalidInput(
            f"classes must name the {records.classes} classes of the records, got {len(classes)}."
        )
    return classes


def _persons(names: NDArray[np.object_] | None, groups: Any, rows: int) -> Persons | None:
    """Return the persons of a `person` column or of `groups`, None for neither."""
    if groups is None:
        return None if names is None else Persons(names)
    if names is not None:
        raise InvalidInput("The records have a `person` column already: leave out `groups`.")
    persons = Persons.of(groups)
    if len(persons.names) != rows:
        raise InvalidInput("groups must have one entry for each row of X.")
    return persons


def queries(estimator: Any, X: Any) -> NDArray[np.float32]:
    """Check the queries of a prediction, and encode the rows of a frame as in training.

    Parameters
    ----------
    estimator : object
        A fitted estimator.
    X : array-like, data frame or Records
        For an estimator that was trained on a table: a frame with its columns, or rows that are encoded already.

    Returns
    -------
    array of float32 of shape (queries, columns)
        Encoded rows.

    Raises
    ------
    InvalidInput
        If a column is missing, or a cell cannot be read.

    Examples
    --------
    >>> from quietmax.estimators import PrivateHead
    >>> head = PrivateHead(classes=(0, 1)).fit(np.eye(2), [0, 1])
    >>> queries(head, [[0.5, 0.25]])
    array([[0.5 , 0.25]], dtype=float32)
    """
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


def steps_before(estimator: Any) -> tuple[str, ...]:
    """Return what was fitted on the private records before an estimator that is being fitted now.

    scikit-learn tells an estimator nothing about what it is in, so this looks at the calls in progress: a `Pipeline`
    counts by its earlier steps that learn something, every other estimator (a search over settings, a stack, a vote,
    a calibration, a wrapper of the user's own) counts by itself. It cannot see a transformer that was applied by
    hand, nor a fit in other threads or processes.

    Parameters
    ----------
    estimator : object
        The estimator.

    Returns
    -------
    tuple of str
        Names of steps and of other estimators, outermost first.

    Examples
    --------
    >>> steps_before(None)
    ()
    """
    callers: list[Any] = []
    frame = sys._getframe(1)
    while frame.f_back is not None:
        caller = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
        if isinstance(caller, BaseEstimator) and not any(caller is each for each in (estimator, *callers)):
            callers.append(caller)
        frame = frame.f_back
    found: list[str] = []
    for caller in reversed(callers):
        if isinstance(caller, Pipeline):
            found += [
                type(step).__name__
                for _, step in caller.steps[:-1]
                if step is not estimator and _learns(step)
            ]
        elif not type(caller).__module__.startswith("quietmax."):
            found.append(type(caller).__name__)
    return tuple(found)


def _learns(step: Any) -> bool:
    """Return whether a step of a pipeline may compute a row from other rows."""
    if step is None or isinstance(step, str):
        return False
    own = not type(step).__module__.startswith("sklearn.")
    return own or isinstance(step, FunctionTransformer) or bool(get_tags(step).requires_fit)

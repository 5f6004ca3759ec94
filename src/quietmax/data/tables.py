"""Encoding tables as their owner declares: frames and files in one piece, and rows of any number part by part.

What is a number and what a category is declared, not detected: the encoding follows from the schema and from the names
and types of the columns, and `encoding` says how each cell is read (THEORY 3.8).  Errors are for the owner of the
table: they name rows and columns, never a value.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quietmax._lazy import lazy_module
from quietmax.data.cells import _first_of, as_numbers, as_string, as_strings, is_missing, is_valid_unicode
from quietmax.data.cohorts import COHORT_FORMS, Cohort, CohortRule, ErasureList, people_of
from quietmax.data.draft import (
    _infer_classes,
    _is_free_text,
    _may_tell_people_apart,
    _propose,
    _with_proposals,
)
from quietmax.data.encoding import Encoding, quoted, require_columns
from quietmax.data.records import Holdout, Records, is_held_out
from quietmax.data.schema import (
    _NO_PERSON,
    _TYPE_KEYS,
    Schema,
    _check_declarations,
    _declared_column,
    declared_cohorts,
)
from quietmax.data.sources import (
    FramePart,
    Part,
    RawTable,
    _errors_of,
    _existing,
    _open_source,
    as_frame,
    as_series,
    converted_frames,
    read_table,
    rows_at_once,
)
from quietmax.errors import DataUnavailable, InvalidData, InvalidInput, QuietmaxWarning

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow
else:
    pd = lazy_module("pandas")
    pyarrow = lazy_module("pyarrow")


def _read_records(
    path: str | Path, schema: Schema, *, infer: bool = False, features: str = "features"
) -> Records:
    label = schema.label
    if label is None and Path(path).suffix.lower() == ".npz":
        label = "labels"
    if label is None:
        file = _existing(path)
        raise InvalidInput(
            f"label must name the label column of {file}, here or in the schema file; "
            f"'quietmax schema draft {file}' proposes a schema."
        )
    table = read_table(path, features=features, label=label)
    encoding = _declared_encoding(table, schema, label, infer=infer)
    return replace(_encode_rows(table.frame, encoding, Path(path).stem), image_shape=table.image_shape)


def encode_table(table: Any, schema: Schema, *, infer: bool = False, y: Any = None) -> Records:
    """Encode a frame as the schema declares.

    The names and types of the columns count as public facts.  A type that another library chose by looking at all
    rows (as `pandas.read_csv` does) is not: one odd cell can change how it reads the others.  `load` and
    `read_table` read text files without choosing types.

    Parameters
    ----------
    table : pandas.DataFrame, pyarrow.Table, polars.DataFrame or object with `__arrow_c_stream__`
        The rows.
    schema : Schema
        The declarations.
    infer : bool
        Whether to read from the records what the schema does not declare; the encoding lists it in `inferred`.
    y : array-like, optional
        One label per row, instead of the label column of the table.

    Returns
    -------
    Records

    Raises
    ------
    InvalidInput
        If the table does not match the schema, or the schema leaves something open and `infer` is not set.

    Examples
    --------
    >>> schema = Schema(label="ill", classes=("no", "yes"), bounds={"age": (0, 100)}, complete=("age",))
    >>> records = encode_table(pd.DataFrame({"age": [25, 75], "ill": ["yes", "no"]}), schema)
    >>> records.features[:, 0].tolist(), records.labels.tolist(), records.unit
    ([0.25, 0.75], [1, 0], 'record')
    """
    frame, label = _labelled_frame(table, schema, y)
    return _encode_rows(frame, _declared_encoding(RawTable(frame), schema, label, infer=infer))


def _labelled_frame(table: Any, schema: Schema, y: Any = None) -> tuple[pd.DataFrame, str]:
    frame, label = as_frame(table), schema.label
    if y is not None:
        labels = as_series(y, "y")
        if len(labels) != len(frame):
            raise InvalidInput(f"y must have one label per row: {len(frame)} rows, but {len(labels)} labels.")
        label = "label" if label is None else label
        frame = frame.assign(**{label: labels.set_axis(frame.index)})
    if label is None:
        raise InvalidInput("The schema's label must name the label column of the table, or y must be given.")
    return frame, label


def _encode_rows(frame: pd.DataFrame, encoding: Encoding, name: str = "table") -> Records:
    """Encode labelled rows of a table: all of them, or any part."""
    try:
        features = encoding.encode(frame)
    except InvalidData as error:
        raise InvalidData(
            f"{error} `quietmax schema check` counts all cells that cannot be read, and says what can declare them."
        ) from error
    labels = encoding.encode_labels(frame)
    persons = None
    if encoding.person is not None:
        persons = person_names(frame, encoding.person, ignore_case=encoding.person_ignores_case)
    return Records(name, features, labels, len(encoding.classes), encoding=encoding, persons=persons)


def _declared_encoding(table: RawTable, schema: Schema, label: str, *, infer: bool) -> Encoding:
    _check_declarations(table.frame, schema, label)
    if not infer:
        _require_confirmed(schema)
    unused = {label, schema.person, *schema.ignore}
    used = [str(name) for name in table.frame.columns if name not in unused]
    undeclared = [name for name in used if _declared_column(name, schema, table) is None]
    if not infer:
        _require_declared(table.frame, undeclared, label if schema.classes is None else None)
    elif schema.person is None:
        unconfirmed = schema.confirm.get("ignore", ())
        _warn_of_persons([*undeclared, *(name for name in schema.ignore if name in unconfirmed)])
    inferred = [f"what column '{name}' holds, and its bounds or categories" for name in undeclared]
    if schema.classes is None:
        inferred.append(f"the classes of label '{label}'")
    if schema.confirm:
        inferred.append(f"the lines of the schema that nobody has confirmed: {', '.join(schema.unconfirmed)}")
    completed = _infer(table.frame, schema, undeclared, label)
    _check_declarations(table.frame, completed, label)
    used = [name for name in used if name not in completed.ignore]
    columns = [column for name in used if (column := _declared_column(name, completed, table)) is not None]
    return Encoding(
        tuple(columns),
        label,
        completed.classes or (),
        tuple(inferred),
        crosses=schema.crosses,
        label_ignores_case=label in completed.ignore_case,
        person=schema.person,
        person_type=None if schema.person is None else _person_type(table.frame, schema.person),
        person_ignores_case=schema.person in schema.ignore_case,
        defaults=tuple((name, as_string(value)) for name, value in schema.defaults.items()),
    )


def _warn_of_persons(columns: Sequence[str]) -> None:
    """Warn if the names of columns about which the owner said nothing say that they may tell people apart."""
    found = [name for name in columns if _may_tell_people_apart(name)]
    if found:
        warnings.warn(
            f"{quoted(found, limit=20)}: the name says that this may tell whose row a row is, but no `person` column "
            "is named. The guarantee is for one record, so a person with several rows is protected less. If one person "
            f"can have several rows, name the column: person='{found[0]}'.",
            QuietmaxWarning,
            stacklevel=2,
        )


def _require_confirmed(schema: Schema) -> None:
    facts = schema.unconfirmed
    if facts:
        more = f" and {len(facts) - 20} more" if len(facts) > 20 else ""
        raise InvalidInput(
            f"The schema is a draft; nobody has confirmed {', '.join(facts[:20])}{more}. Check each of them and delete "
            "its line under [confirm], or load the table with `infer` to train with the draft, which reveals something "
            "about the records: guarantees are then conditional."
        )


def _require_declared(frame: pd.DataFrame, columns: list[str], label: str | None) -> None:
    needed, hint = [], ""
    if columns:
        keys = ", ".join(f"`{key}`" for key in _TYPE_KEYS)
        needed.append(f"{keys} or `ignore` for {quoted(columns, limit=20)}")
    if label is not None:
        needed.append(f"`classes` for the label '{label}'")
    if text := [name for name in columns if _is_free_text(frame[name])]:
        hint = (
            f" {quoted(text, limit=20)}: this seems to be free text; name it in `text` or `ignore` (`hashed` is for "
            "short strings)."
        )
    if needed:
        raise InvalidInput(
            f"The table needs {', and '.join(needed)}, given here or in a schema file (by default the .toml file of "
            "the same name beside the table). The command 'quietmax schema draft' proposes such a file. `infer` reads "
            "them from the records instead, which reveals something about the records: guarantees are then "
            f"conditional.{hint}"
        )


def _infer(frame: pd.DataFrame, schema: Schema, columns: list[str], label: str) -> Schema:
    completed = _with_proposals(schema, {name: _propose(name, frame[name]) for name in columns})
    if schema.classes is not None:
        return completed
    classes, ignore_case = _infer_classes(frame[label])
    if len(classes) < 2:
        raise InvalidData("All records are of one class; training needs at least two.")
    folded = (*completed.ignore_case, label) if ignore_case else completed.ignore_case
    return replace(completed, classes=classes, ignore_case=folded)


def person_names(frame: pd.DataFrame, person: str, *, ignore_case: bool = False) -> NDArray[np.object_]:
    """Return the person of every row, as a string."""
    require_columns(frame, [person])
    names = as_strings(frame[person])
    absent = np.flatnonzero(is_missing(names))
    if absent.size:
        raise InvalidData(f"{_first_of(absent)} has no value in the `person` column '{person}'. {_NO_PERSON}")
    damaged = np.flatnonzero(~is_valid_unicode(names))
    if damaged.size:
        raise InvalidData(
            f"{_first_of(damaged)} has a string that is not valid Unicode in the `person` column '{person}'."
        )
    return np.array([name.casefold() for name in names], dtype=object) if ignore_case else names


def _person_type(frame: pd.DataFrame, person: str) -> str:
    """Return the type of the column that tells people apart, in which 00007 and 7 may be two people or one."""
    require_columns(frame, [person])
    given = frame[person].dtype
    dtype = given.categories.dtype if isinstance(given, pd.CategoricalDtype) else given
    if isinstance(dtype, pd.ArrowDtype) and pyarrow.types.is_dictionary(dtype.pyarrow_dtype):
        dtype = pd.ArrowDtype(dtype.pyarrow_dtype.value_type)
    if pd.api.types.is_string_dtype(dtype) and not pd.api.types.is_object_dtype(dtype):
        return "string"
    return str(dtype.pyarrow_dtype if isinstance(dtype, pd.ArrowDtype) else dtype).lower()


def require_person_type(frame: pd.DataFrame, encoding: Encoding) -> None:
    """Refuse a table whose `person` column has another type than the table that an encoding was made for."""
    if encoding.person is None:
        return
    found = _person_type(frame, encoding.person)
    if found != encoding.person_type:
        raise InvalidInput(
            f"The `person` column {encoding.person!r} must have the same type as in training "
            f"({encoding.person_type}), got {found}. In another type the same people may have other names: 00007 "
            "becomes 7."
        )


def read_queries(path: str | Path, *, encoding: Encoding | None, width: int) -> NDArray[np.float32]:
    """Read a file as queries to a model."""
    return query_features(read_table(path).frame, encoding=encoding, width=width, place=f"The file {path}")


def query_features(
    frame: pd.DataFrame, *, encoding: Encoding | None, width: int, place: str
) -> NDArray[np.float32]:
    """Return the rows of a table as queries to a model."""
    if encoding is not None:
        if len(encoding.feature_names) != width:
            raise DataUnavailable(
                f"The encoding has {len(encoding.feature_names)} features, but the model takes {width}; they do not "
                "belong together."
            )
        return encoding.encode(frame)
    if frame.shape[1] != width:
        raise InvalidData(
            f"{place} must have one column for each of the model's {width} features and no label; it has "
            f"{frame.shape[1]} columns."
        )
    numbers = [as_numbers(frame[name], str(name)) for name in frame.columns]
    features = np.stack(numbers, axis=1).astype(np.float32)
    if not np.isfinite(features).all():
        row, column = np.argwhere(~np.isfinite(features))[0]
        raise InvalidData(f"{place}: Row {row + 1} has no finite number in column '{frame.columns[column]}'.")
    return np.ascontiguousarray(features)


@dataclass(frozen=True, eq=False)
class TableRows:
    """The rows of a table, which are encoded while they are read."""

    name: str  # Name of the table
    encoding: Encoding  # The public encoding, the same for all parts
    parts: tuple[Part, ...]  # Where the rows are
    in_memory: bool  # Whether the rows are in memory before they are read
    holdout: Holdout | None = None  # How persons are held out of training; None if nobody is
    held_out: bool = False  # Whether these are the rows of the persons who are held out
    cohorts: CohortRule | None = None  # What says which cohort a person is in, if the schema does
    cohort: Cohort | None = None  # The one cohort whose rows these are; None for all people
    forgotten: ErasureList | None = None  # The people who are left out because they asked to be erased

    @property
    def train(self) -> TableRows:
        """The rows of all persons who are not held out."""
        return replace(self, held_out=False)

    @property
    def test(self) -> TableRows:
        """The rows of the persons who are held out."""
        return replace(self, held_out=True)

    def of_cohort(self, name: str) -> TableRows:
        """Return the rows of the people of one cohort; if all rows of a person decide, they are looked at here."""
        if self.cohorts is None:
            raise InvalidInput(
                f"The schema declares no `cohort`, so there is no cohort {name!r}: it must be {COHORT_FORMS}."
            )
        cohort, person = Cohort(self.cohorts, name), self.encoding.person
        self.cohorts.number(name)  # an unknown name is an error before any row is read
        if self.cohorts.column is not None and person is not None:
            cohort = people_of(self.cohorts, name, self._rows_by_cohort(self.cohorts, person))
        return replace(self, cohort=cohort)

    def without(self, forgotten: ErasureList) -> TableRows:
        """Return the rows without those of the people on a list."""
        if type(forgotten) is not ErasureList:
            raise InvalidInput("`forgotten` must be an ErasureList or the path of one.")
        if self.forgotten not in (None, forgotten):
            raise InvalidInput("These rows are without the people on another erasure list: use one list.")
        if self.encoding.person is None:
            raise InvalidInput(
                "`forgotten` requires a `person` column: without one nobody can be left out by name."
            )
        return replace(self, forgotten=forgotten)

    def _rows_by_cohort(
        self, rule: CohortRule, person: str
    ) -> Iterator[tuple[NDArray[np.object_], NDArray[np.int64]]]:
        assert rule.column is not None
        ignore_case, columns = self.encoding.person_ignores_case, [person, rule.column.name]
        for part in self.parts:
            yield from converted_frames(
                part,
                columns,
                rows_at_once(1),
                lambda frame: (person_names(frame, person, ignore_case=ignore_case), rule.of_rows(frame)),
            )

    @property
    def selected(self) -> bool:
        """Whether the rows are left to a cohort, or without the people on a list."""
        return self.cohort is not None or self.forgotten is not None

    @property
    def selection(self) -> list[str | None]:
        """Digests of whom the rows are left to, beside the holdout; computed from private records."""
        names = [] if self.forgotten is None else sorted(self.forgotten.persons)
        cohort = None if self.cohort is None else self.cohort.digest
        return [cohort, hashlib.sha256(repr(names).encode()).hexdigest()]

    def count(self) -> int | None:
        """Return the number of rows, those of both sides of a holdout included."""
        total = 0
        for part in self.parts:
            with _errors_of(part.place):
                count = part.count()
            if count is None:
                return None
            total += count
        return total

    def records(self, rows: int | None = None) -> Iterator[Records]:
        """Read and encode all rows, part by part."""
        for part in self.parts:
            yield from self.part_records(part, rows)

    def part_records(self, part: Part, rows: int | None = None) -> Iterator[Records]:
        """Read and encode the rows of one part."""
        height = rows or rows_at_once(len(self.encoding.feature_names))
        columns = _used_columns(self.encoding, None if self.cohort is None else self.cohort.rule)
        for records in converted_frames(part, columns, height, self._encoded):
            if len(records):
                yield records

    def _encoded(self, frame: pd.DataFrame) -> Records:
        """Encode some rows, and leave those of the people who belong here: each person alone decides (THEORY 3.8)."""
        records = _encode_rows(frame, self.encoding, self.name)
        left = np.ones(len(records), dtype=bool)
        if self.cohort is not None:
            left &= self.cohort.holds(frame, records.persons, records.features)
        if self.forgotten is not None and records.persons is not None:
            left &= ~self.forgotten.holds(records.persons)
        if self.holdout is not None and self.holdout.share > 0:
            left &= is_held_out(records, self.holdout) == self.held_out
            records = replace(records, holdout=self.holdout)
        return records if left.all() else records.take(left)


def _used_columns(encoding: Encoding, cohorts: CohortRule | None = None) -> list[str]:
    names = [*(column.name for column in encoding.columns), encoding.label]
    names += [encoding.person] if encoding.person is not None else []
    names += [cohorts.column.name] if cohorts is not None and cohorts.column is not None else []
    return [*dict.fromkeys(names)]


def table_rows(
    source: Any, schema: Schema, *, y: Any = None, holdout: float = 0.0, seed: int = 0
) -> TableRows:
    """Return the rows of a table, which are encoded as the schema declares while they are read."""
    rule = Holdout(holdout, seed) if holdout else None
    if not isinstance(source, str | Path):
        frame, label = _labelled_frame(source, schema, y)
        encoding = _declared_encoding(RawTable(frame), schema, label, infer=False)
        cohorts = declared_cohorts(schema, RawTable(frame))
        return TableRows(
            "table", encoding, (FramePart(frame),), in_memory=True, holdout=rule, cohorts=cohorts
        )
    if y is not None:
        raise InvalidInput("Files must have a label column: leave out `y`.")
    found = _open_source(source)
    if schema.label is None:
        raise InvalidInput("The schema's label must name the label column of the files.")
    with _errors_of(found.parts[0].place):
        encoding = _declared_encoding(RawTable(found._empty_frame()), schema, schema.label, infer=False)
        cohorts = declared_cohorts(schema, RawTable(found._empty_frame()))
    found._require_alike(_used_columns(encoding, cohorts))
    return TableRows(found.name, encoding, tuple(found.parts), in_memory=False, holdout=rule, cohorts=cohorts)


def encoded_rows(source: Any, encoding: Encoding, cohorts: CohortRule | None = None) -> TableRows:
    """Return the rows of files or of a frame, which are encoded like those of an earlier table."""
    if not isinstance(source, str | Path):
        frame = as_frame(source)
        require_person_type(frame, encoding)
        return TableRows("table", encoding, (FramePart(frame),), in_memory=True, cohorts=cohorts)
    found = _open_source(source)
    found._require_alike(_used_columns(encoding, cohorts))
    with _errors_of(found.parts[0].place):
        require_person_type(found._empty_frame(), encoding)
    return TableRows(found.name, encoding, tuple(found.parts), in_memory=False, cohorts=cohorts)

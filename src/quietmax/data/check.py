"""What a table loses when it is read as a schema declares.  For the eyes of its owner: the numbers are private."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quietmax.data.cells import as_strings, is_missing
from quietmax.data.encoding import COLUMN_TYPES, Losses, quoted
from quietmax.data.inference import is_free_text
from quietmax.data.schema import Schema
from quietmax.data.tables import (
    NO_PERSON,
    RawTable,
    as_frame,
    check_declarations,
    declared_column,
    read_table,
)
from quietmax.data.text import missing_extra
from quietmax.errors import InvalidInput, counted


@dataclass(frozen=True)
class ColumnReport:
    """What a column loses."""

    name: str  # Name of the column
    kind: str  # "numeric", "categorical", "boolean", "date", "hashed" or "text"
    losses: Losses  # How many of its cells are missing, clipped, unknown or unreadable


@dataclass(frozen=True)
class TableReport:
    """What a table loses when it is read as a schema declares; exact numbers, not for publication.

    Parameters
    ----------
    rows : int
        Number of rows.
    columns : tuple of ColumnReport
        The columns that become features.
    ignored, undeclared, unconfirmed : tuple of str
        Columns that are not features, columns that the schema says nothing about, and what nobody has confirmed.
    classes : dict of str to int
        Number of rows of each declared class.
    unlabelled : int
        Rows with no label, or with one that is not a class.
    persons : int or None
        Number of people; None without a `person` column.
    most_rows : int
        The largest number of rows of one person.
    without_person : int
        Rows without a value in the `person` column.
    first_without_person : int
        Number of the first such row, counted from 1; 0 if there is none.
    similar_persons : int
        People whose name differs from that of another person only in case, blanks or leading zeros.
    free_text : tuple of str
        Hashed columns that seem to hold free text.
    unnamed : int
        Columns of a text file without a name, which are ignored.
    missing_extra : str or None
        How to install the sentence encoder, if there are text columns and it is not installed.
    """

    rows: int
    columns: tuple[ColumnReport, ...]
    ignored: tuple[str, ...]
    undeclared: tuple[str, ...]
    unconfirmed: tuple[str, ...]
    classes: dict[str, int]
    unlabelled: int
    persons: int | None
    most_rows: int
    without_person: int
    first_without_person: int = 0
    similar_persons: int = 0
    free_text: tuple[str, ...] = ()
    unnamed: int = 0
    missing_extra: str | None = None

    @property
    def problems(self) -> tuple[str, ...]:
        """Why training would be refused, one or two sentences each."""
        found = []
        if self.unconfirmed:
            found.append(
                "The schema is a draft: training refuses it until each line under [confirm] is checked and deleted."
            )
        if self.undeclared:
            found.append(f"The schema does not say what {quoted(self.undeclared, limit=20)} hold.")
        if not self.classes:
            found.append("The schema does not declare the label and its classes.")
        elif self.unlabelled:
            found.append(
                f"{counted(self.unlabelled, 'row has', 'rows have')} no label, or one that is not in `classes`: add "
                "the class there, or delete such rows."
            )
        if self.without_person:
            more = f" (and {self.without_person - 1} more)" if self.without_person > 1 else ""
            found.append(
                f"Row {self.first_without_person}{more} has no value in the person column. {NO_PERSON}"
            )
        for column in self.columns:
            if column.losses.unreadable:
                what, keys = _READ_BY[column.kind]
                found.append(
                    f"{counted(column.losses.unreadable, 'cell', 'cells')} of column '{column.name}' cannot be read "
                    f"as {what}; {keys} in the schema can say how they are written."
                )
        if self.missing_extra is not None:
            found.append(self.missing_extra)
        return tuple(found)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What training accepts, but what may be a mistake, one or two sentences each."""
        found = []
        if self.similar_persons:
            found.append(
                f"{self.similar_persons:,} names in the person column differ from another one only in case, blanks or "
                "leading zeros. If these are the same people, write each name in one way; where they differ in case, "
                "list the person column in `ignore_case`."
            )
        if self.persons and self.most_rows == 1:
            found.append("Every person has just one row: does the person column tell people apart, or rows?")
        if self.free_text:
            found.append(
                f"The hashed columns {quoted(self.free_text)} seem to hold free text, of which buckets make no useful "
                "features; declare them in `text`, or leave them out by `ignore`."
            )
        if self.unnamed:
            found.append(
                f"{counted(self.unnamed, 'column has', 'columns have')} no name, and will be ignored."
            )
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """Return all fields, the problems and the warnings as JSON values."""
        return {**asdict(self), "problems": list(self.problems), "warnings": list(self.warnings)}


_READ_BY = {
    "numeric": ("numbers", "`decimal`, `thousands`, `units` or `missing_values`"),
    "date": ("dates", "`date_formats` or `missing_values`"),
    "boolean": ("yes or no", "`missing_values`, or `categories` in place of `booleans`,"),
}
"""What the cells of a column should be, and the keys of the schema that say how they are written."""


def check_table(table: Any, schema: Schema) -> TableReport:
    """Count what a table loses when it is read as a schema declares.

    Parameters
    ----------
    table : str, Path, pandas.DataFrame, pyarrow.Table, polars.DataFrame or object with `__arrow_c_stream__`
        A CSV, TSV or Parquet file, or a frame.
    schema : Schema
        The declarations; some may be missing or unconfirmed.

    Returns
    -------
    TableReport

    Raises
    ------
    DataUnavailable
        If the file cannot be read.
    InvalidInput
        If the schema names columns that do not exist, or contradicts itself.

    Examples
    --------
    >>> import pandas as pd
    >>> people = pd.DataFrame({"age": ["25", "250", "old", None], "ill": ["no", "yes", "no", "no"]})
    >>> report = check_table(people, Schema(label="ill", classes=("no", "yes"), bounds={"age": (0, 100)}))
    >>> report.columns[0].losses
    Losses(missing=1, clipped=1, unknown=0, unreadable=1)
    """
    if isinstance(table, str | Path) and Path(table).suffix.lower() == ".npz":
        raise InvalidInput("A schema can be checked for CSV, TSV and Parquet files and frames only.")
    content = read_table(table) if isinstance(table, str | Path) else RawTable(as_frame(table))
    frame = content.frame
    check_declarations(frame, schema, schema.label)
    names = [str(name) for name in frame.columns]
    unused = [name for name in names if name in {schema.label, schema.person, *schema.ignore}]
    described = {name: declared_column(name, content, schema) for name in names if name not in unused}
    columns = tuple(
        ColumnReport(name, COLUMN_TYPES[type(column)], column.losses(frame[name]))
        for name, column in described.items()
        if column is not None
    )
    classes, unlabelled = _count_classes(content, schema)
    return TableReport(
        rows=len(frame),
        columns=columns,
        ignored=tuple(name for name in unused if name not in (schema.label, schema.person)),
        undeclared=tuple(name for name, column in described.items() if column is None),
        unconfirmed=schema.unconfirmed,
        classes=classes,
        unlabelled=unlabelled,
        free_text=tuple(name for name in schema.hashed if name in described and is_free_text(frame[name])),
        unnamed=content.unnamed,
        missing_extra=missing_extra() if any(column.kind == "text" for column in columns) else None,
        **_count_persons(content, schema),
    )


def _count_classes(table: RawTable, schema: Schema) -> tuple[dict[str, int], int]:
    """Return the number of rows of each class, and the number of rows of none."""
    if schema.label is None or schema.classes is None:
        return {}, 0
    fold = str.casefold if schema.label in schema.ignore_case else str
    counts = Counter(fold(string) for string in as_strings(table.frame[schema.label]))
    classes = {name: counts[fold(name)] for name in schema.classes}
    return classes, len(table.frame) - sum(classes.values())


def _count_persons(table: RawTable, schema: Schema) -> dict[str, Any]:
    """Return the fields of the report about people."""
    if schema.person is None:
        return {"persons": None, "most_rows": 1, "without_person": 0}
    names = as_strings(table.frame[schema.person])
    absent = is_missing(names)
    fold = str.casefold if schema.person in schema.ignore_case else str
    counts = Counter(fold(name) for name in names[~absent].tolist())
    alike = Counter(map(_without_spelling, counts))
    return {
        "persons": len(counts),
        "most_rows": max(counts.values(), default=0),
        "without_person": int(np.sum(absent)),
        "first_without_person": int(np.argmax(absent)) + 1 if absent.any() else 0,
        "similar_persons": sum(count for count in alike.values() if count > 1),
    }


def _without_spelling(name: str) -> str:
    """Return a name in lower case, without blanks and without zeros before a number."""
    return re.sub("(?<![0-9])0+(?=[0-9])", "", "".join(name.casefold().split()))

"""What a table loses when it is read as a schema declares.  For the eyes of its owner: the numbers are private."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quietmax.data.encoding import COLUMN_TYPES, Losses, as_strings, is_missing, quoted
from quietmax.data.schema import Schema
from quietmax.data.tables import RawTable, as_frame, check_declarations, declared_column, read_table
from quietmax.errors import InvalidInput


@dataclass(frozen=True)
class ColumnReport:
    """What a column loses.

    Parameters
    ----------
    name : str
        Name of the column.
    kind : str
        "numeric", "categorical", "boolean", "date" or "hashed".
    losses : Losses
        How many of its cells are missing, clipped, unknown or unreadable.
    """

    name: str
    kind: str
    losses: Losses


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

    @property
    def problems(self) -> tuple[str, ...]:
        """Why training would be refused even if every proposal was confirmed, one sentence each."""
        found = []
        if self.undeclared:
            found.append(f"The schema does not say what {quoted(self.undeclared, limit=20)} hold.")
        if not self.classes:
            found.append("The schema does not declare the label and its classes.")
        elif self.unlabelled:
            found.append(f"{self.unlabelled} rows have no label, or one that is not a declared class.")
        if self.without_person:
            found.append(f"{self.without_person} rows have no value in the person column.")
        for column in self.columns:
            if column.losses.unreadable:
                found.append(
                    f"{column.losses.unreadable} cells of column '{column.name}' cannot be read as {column.kind}; "
                    "missing_values can declare them as missing."
                )
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """Return all fields, and the problems, as JSON values."""
        return {**asdict(self), "problems": list(self.problems)}


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
    persons, most_rows, without_person = _count_persons(content, schema)
    return TableReport(
        len(frame),
        columns,
        tuple(name for name in unused if name not in (schema.label, schema.person)),
        tuple(name for name, column in described.items() if column is None),
        schema.unconfirmed,
        classes,
        unlabelled,
        persons,
        most_rows,
        without_person,
    )


def _count_classes(table: RawTable, schema: Schema) -> tuple[dict[str, int], int]:
    """Return the number of rows of each class, and the number of rows of none."""
    if schema.label is None or schema.classes is None:
        return {}, 0
    fold = str.casefold if schema.label in schema.ignore_case else str
    counts = Counter(fold(string) for string in as_strings(table.frame[schema.label]))
    classes = {name: counts[fold(name)] for name in schema.classes}
    return classes, len(table.frame) - sum(classes.values())


def _count_persons(table: RawTable, schema: Schema) -> tuple[int | None, int, int]:
    """Return the number of people, the largest number of rows of one, and the number of rows of nobody."""
    if schema.person is None:
        return None, 1, 0
    names = as_strings(table.frame[schema.person])
    absent = is_missing(names)
    counts = Counter(names[~absent].tolist())
    return len(counts), max(counts.values(), default=0), int(np.sum(absent))

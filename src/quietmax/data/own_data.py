"""The user's own table as encoded records.

Bounds, categories and classes must be declared: reading them off the records would let one record change the
features of all others, and would reveal it.  Whoever says `measure=True` gets them measured, and the encoding
then lists what was measured.

Errors about a table depend on its records.  They are for the owner and are not part of any release; they name rows
and columns, never a value.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from quietmax.data.columns import (
    CategoricalColumn,
    Column,
    NumericColumn,
    as_texts,
    is_missing,
    text_to_number,
)
from quietmax.data.encoding import Encoding, require_columns
from quietmax.data.records import Records
from quietmax.data.schema import ANY_COLUMN, Schema
from quietmax.data.tables import Table, read_table
from quietmax.errors import InvalidInput

_WHOLE = re.compile("-?[0-9]+")


def read_own(
    path: str | Path, schema: Schema, *, measure: bool = False, features: str = "features"
) -> Records:
    """Read a table of one's own and encode it as the schema declares.

    `features` names the array of features in an NPZ file, whose labels are `labels` unless the schema says
    otherwise.
    """
    label = schema.label
    if label is None and Path(path).suffix.lower() == ".npz":
        label = "labels"
    if label is None:
        raise InvalidInput(
            f"It is not said which column of {path} is the label; name it with label=... or in the schema "
            "file."
        )
    table = read_table(path, features=features, label=label)
    encoding = describe(table, schema, label, measure=measure)
    encoded, labels = encoding.encode(table.frame, label)
    if len(np.unique(labels)) < 2:
        raise InvalidInput(
            f"All records of {path} are of one class, but at least two classes are needed to train; give "
            "records of another class as well."
        )
    identities = None
    if schema.identifier is not None:
        identities = _identities(table.frame, schema.identifier)
    return Records(
        Path(path).stem, encoded, labels, len(encoding.classes), table.image_shape, encoding, identities
    )


def describe(table: Table, schema: Schema, label: str, *, measure: bool = False) -> Encoding:
    """Return the encoding that the schema declares for the table; measure what is left open, or refuse."""
    frame = table.frame
    named = [
        *schema.bounds,
        *schema.categories,
        *schema.scales,
        *schema.edges,
        *schema.complete,
        *schema.ignore,
    ]
    extra = [] if schema.identifier is None else [schema.identifier]
    require_columns(frame, [label, *(name for name in (*named, *extra) if name != ANY_COLUMN)])
    used = [str(name) for name in frame.columns if name not in {label, schema.identifier, *schema.ignore}]
    both = sorted(
        (set(schema.bounds) & set(schema.categories)) | ({label} & {*schema.bounds, *schema.categories})
    )
    if both:
        raise InvalidInput(
            f"Column '{both[0]}' is declared in more than one way (label, bounds, categories); keep one "
            "declaration."
        )
    open_columns = [name for name in used if _declared(name, table, schema) is None]
    if (open_columns or schema.classes is None) and not measure:
        raise InvalidInput(_open_sentence(open_columns, label if schema.classes is None else None))
    measurements = [f"what column '{name}' holds, and its bounds or categories" for name in open_columns]
    if schema.classes is None:
        measurements.append(f"the classes of label '{label}'")
    completed = _measured(frame, schema, open_columns, label)
    columns = [column for name in used if (column := _declared(name, table, completed)) is not None]
    categorical = {column.name for column in columns if isinstance(column, CategoricalColumn)}
    refined = sorted(categorical & {*schema.scales, *schema.edges})
    if refined:
        raise InvalidInput(
            f"Column '{refined[0]}' has a scale or edges but holds categories; leave these out or give it "
            "bounds."
        )
    return Encoding(tuple(columns), label, completed.classes or (), tuple(measurements))


def _open_sentence(columns: list[str], label: str | None) -> str:
    shown = ", ".join(f"'{name}'" for name in columns[:20]) + (" and others" if len(columns) > 20 else "")
    lacking = []
    if columns:
        lacking.append(
            f"neither bounds nor categories for column(s) {shown} (give "
            f"bounds={{'{columns[0]}': (low, high)}} or categories={{'{columns[0]}': [...]}})"
        )
    if label is not None:
        lacking.append(f"no classes for label '{label}' (give classes=[...])")
    return (
        f"There are {' and '.join(lacking)}: declare these public facts as arguments or in a schema file (a .toml "
        "beside the table is found by itself), since reading them off the records would reveal something of them, or "
        "accept that with measure=True."
    )


def _declared(name: str, table: Table, schema: Schema) -> Column | None:
    missing = not table.complete and name not in schema.complete
    if name in schema.categories:
        return CategoricalColumn(name, schema.categories[name], missing=missing)
    bounds = schema.bounds.get(name, schema.bounds.get(ANY_COLUMN, table.type_bounds))
    if bounds is None:
        return None
    return NumericColumn(
        name, *bounds, schema.scales.get(name, "linear"), schema.edges.get(name, ()), missing=missing
    )


def _measured(frame: pd.DataFrame, schema: Schema, columns: list[str], label: str) -> Schema:
    """Return the schema with what it leaves open read off the records; only with the user's consent."""
    bounds, categories = dict(schema.bounds), dict(schema.categories)
    for name in columns:
        present = _present(frame, name)
        numbers = [text_to_number(text) for text in present]
        if None not in numbers:
            finite = [number for number in numbers if number is not None and math.isfinite(number)]
            low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
            bounds[name] = (low, high if high > low else low + 1)
        else:
            categories[name] = tuple(sorted(set(present)))
    return replace(
        schema,
        bounds=bounds,
        categories=categories,
        classes=schema.classes or _ordered(_present(frame, label)),
    )


def _present(frame: pd.DataFrame, name: str) -> NDArray[np.object_]:
    """Return the texts of a column that are not missing."""
    texts = as_texts(frame[name])
    return texts[~is_missing(texts)]


def _ordered(labels: NDArray[np.object_]) -> tuple[str, ...]:
    """Return the distinct labels, in the order of numbers if all are whole numbers."""
    distinct = set(labels)
    whole = all(_WHOLE.fullmatch(text) for text in distinct)
    classes = tuple(sorted(distinct, key=int) if whole else sorted(distinct))
    if len(classes) < 2:
        raise InvalidInput(
            "All records are of one class, but at least two classes are needed to train; give records of "
            "another class as well."
        )
    return classes


def _identities(frame: pd.DataFrame, identifier: str) -> NDArray[np.uint64]:
    """Return a 64-bit number per row, equal for equal identifiers."""
    texts = as_texts(frame[identifier])
    absent = np.flatnonzero(is_missing(texts))
    if absent.size:
        raise InvalidInput(
            f"Record {absent[0] + 1} has no identifier in column '{identifier}' (and {absent.size - 1} more "
            "have none), but every record needs one; fill the column or name no identifier."
        )
    hashes = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return np.frombuffer(b"".join(hashes), dtype="<u8").astype(np.uint64)

"""The user's own files as tables: CSV, TSV, Parquet and NPZ.

Nothing is guessed from the records: every cell of a text file is a string, and a column of a Parquet file keeps
the Arrow type that the file declares, with its nulls.  `columns` says how a cell of each type is read; what is a
number and what a category is declared, not detected.  The names and types of the columns count as public facts.
Errors are for the owner of the file: they name rows and columns, never a value.
"""

from __future__ import annotations

import csv
import hashlib
import math
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.csv
import pyarrow.parquet
from numpy.typing import NDArray

from quietmax.data.encoding import (
    CategoricalColumn,
    Column,
    Encoding,
    NumericColumn,
    as_numbers,
    as_texts,
    is_missing,
    require_columns,
    text_to_number,
)
from quietmax.data.records import Records
from quietmax.data.schema import ANY_COLUMN, Schema
from quietmax.errors import DataUnavailable, InvalidInput

_MOST_TEXT_BYTES = 2**31 - 2
SUFFIXES = (".csv", ".tsv", ".parquet", ".pq", ".npz")


@dataclass(frozen=True, eq=False)
class RawTable:
    """Rows and named columns of a file.

    `image_shape` is set where the features of an NPZ file are images; `type_bounds` where their number type
    has bounds of its own (bool, uint8); `complete` where a missing value cannot occur.
    """

    frame: pd.DataFrame
    image_shape: tuple[int, int, int] | None = None
    type_bounds: tuple[float, float] | None = None
    complete: bool = False


def is_table_path(name: str | Path) -> bool:
    """Tell whether a name is the path of a file of one's own rather than the name of a data set."""
    return isinstance(name, Path) or Path(name).suffix.lower() in SUFFIXES or "/" in name or "\\" in name


def read_table(path: str | Path, *, features: str = "features", label: str | None = None) -> RawTable:
    """Read a CSV, TSV, Parquet or NPZ file.

    An NPZ file holds an array named by `features` (n rows; images may keep their axes) and, if `label` is
    given, one of that name with n labels; its columns are then called `feature_0`, `feature_1` and so on.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataUnavailable(f"There is no file {file}; give the path of a {_listed(SUFFIXES)} file.")
    kind = file.suffix.lower()
    if kind not in SUFFIXES:
        raise InvalidInput(
            f"The file {file} ends in '{file.suffix}', but a {_listed(SUFFIXES)} file is needed; convert it "
            "or correct its name."
        )
    if file.stat().st_size == 0:
        raise InvalidInput(f"The file {file} is empty; give a file with records.")
    try:
        if kind == ".npz":
            table = _read_npz(file, features, label)
        elif kind in (".parquet", ".pq"):
            table = RawTable(_read_parquet(file))
        else:
            table = RawTable(_read_text(file, "\t" if kind == ".tsv" else ","))
    except OSError as error:
        raise DataUnavailable(
            f"The file {file} cannot be read ({error.strerror or 'it is damaged'}); make it readable or "
            "replace it."
        ) from error
    if table.frame.empty:
        raise InvalidInput(f"The file {file} has no records; give a file with records.")
    return table


def _read_text(file: Path, delimiter: str) -> pd.DataFrame:
    try:
        header, lines = _header(file, delimiter)
        _refuse_repeated(file, header)
        if file.stat().st_size > _MOST_TEXT_BYTES:
            raise InvalidInput(f"The file {file} is larger than 2 GiB; write so large a table as Parquet.")
        text = file.read_bytes()
        # One block for the whole file: at a border between two blocks Arrow loses the line feed of a quoted "\r\n",
        # and where the borders are depends on the other rows.
        content = pyarrow.csv.read_csv(
            pyarrow.BufferReader(text),
            read_options=pyarrow.csv.ReadOptions(
                use_threads=False, block_size=len(text) + 1, column_names=header, skip_rows=lines
            ),
            parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(header, pyarrow.string()), strings_can_be_null=False
            ),
        )
    except UnicodeDecodeError as error:
        raise InvalidInput(f"The file {file} is not UTF-8 text; save it in that encoding.") from error
    except (pyarrow.ArrowInvalid, csv.Error) as error:
        if "Could not skip" in str(error):
            return pd.DataFrame()
        if "UTF8" in str(error):
            raise InvalidInput(f"The file {file} is not UTF-8 text; save it in that encoding.") from error
        row = re.search(r"Row #(\d+)", str(error))
        where = f"row {row[1]} (counting the header)" if row else "some row"
        raise InvalidInput(
            f"In the file {file}, {where} has another number of fields than the header, the file may be cut "
            "off; correct that row."
        ) from error
    return cast(pd.DataFrame, content.to_pandas())


def _header(file: Path, delimiter: str) -> tuple[list[str], int]:
    """Return the column names in the first row that is not blank, and how many lines they take up to there."""
    with file.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, delimiter=delimiter)
        for row in reader:
            if any(cell.strip() for cell in row):
                return [cell.strip() for cell in row], reader.line_num
    raise InvalidInput(f"The file {file} is empty; give a file with records.")


def _read_parquet(file: Path) -> pd.DataFrame:
    try:
        content = pyarrow.parquet.ParquetFile(file).read()
    except pyarrow.ArrowException as error:
        raise InvalidInput(
            f"The file {file} is not a whole Parquet file, it may be cut off; write it again."
        ) from error
    _refuse_repeated(file, content.schema.names)
    return pd.DataFrame(
        {
            name: pd.arrays.ArrowExtensionArray(column)
            for name, column in zip(content.schema.names, content.columns, strict=True)
        },
        index=pd.RangeIndex(content.num_rows),
    )


def _read_npz(file: Path, features: str, label: str | None) -> RawTable:
    try:
        with np.load(file, allow_pickle=False) as archive:
            absent = [name for name in (features, label) if name is not None and name not in archive.files]
            if absent:
                raise InvalidInput(
                    f"The file {file} has no array {_listed(absent)}, its arrays are "
                    f"{_listed(archive.files)}; name the arrays of features and labels."
                )
            values, labels = archive[features], None if label is None else archive[label]
    except InvalidInput:
        raise
    except (ValueError, zipfile.BadZipFile, EOFError, KeyError) as error:
        raise InvalidInput(
            f"The file {file} is not a whole NPZ file of plain arrays, it may be cut off or hold Python "
            "objects; write it again with numpy.savez."
        ) from error
    return _array_table(file, values, labels, label)


def _array_table(
    file: Path, values: NDArray[Any], labels: NDArray[Any] | None, label: str | None
) -> RawTable:
    if (
        values.ndim < 2
        or values.dtype.kind not in "biuf"
        or (labels is not None and labels.shape != values.shape[:1])
    ):
        raise InvalidInput(
            f"The file {file} needs an array of numbers with one row per record and one label for each, but "
            f"the features have shape {values.shape} and type {values.dtype} and the labels shape "
            f"{None if labels is None else labels.shape}; correct the arrays."
        )
    image_shape = None
    if values.ndim in (3, 4):
        channels, height, width = values.shape[1:] if values.ndim == 4 else (1, *values.shape[1:])
        image_shape = (int(channels), int(height), int(width))
    rows = values.reshape(len(values), int(np.prod(values.shape[1:])))
    frame = pd.DataFrame(rows, columns=[f"feature_{number}" for number in range(rows.shape[1])])
    if labels is not None and label is not None:
        frame[label] = labels
    type_bounds = {"b": (0.0, 1.0), "u": (0.0, 255.0) if values.dtype.itemsize == 1 else None}.get(
        values.dtype.kind
    )
    return RawTable(frame, image_shape, type_bounds, complete=True)


def _refuse_repeated(file: Path, names: Sequence[str]) -> None:
    seen: set[str] = set()
    repeated = {name for name in names if name in seen or seen.add(name)}  # type: ignore[func-returns-value]
    if repeated:
        raise InvalidInput(
            f"The file {file} has several columns named {_listed(sorted(repeated))}, but every column needs "
            "its own name; rename them."
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


_WHOLE = re.compile("-?[0-9]+")


def read_records(
    path: str | Path, schema: Schema, *, infer: bool = False, features: str = "features"
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
    encoding = describe(table, schema, label, infer=infer)
    encoded, labels = encoding.encode(table.frame, label)
    if len(np.unique(labels)) < 2:
        raise InvalidInput(
            f"All records of {path} are of one class, but at least two classes are needed to train; give "
            "records of another class as well."
        )
    identities = None
    if schema.person is not None:
        identities = _identities(table.frame, schema.person)
    return Records(
        Path(path).stem, encoded, labels, len(encoding.classes), table.image_shape, encoding, identities
    )


def describe(table: RawTable, schema: Schema, label: str, *, infer: bool = False) -> Encoding:
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
    extra = [] if schema.person is None else [schema.person]
    require_columns(frame, [label, *(name for name in (*named, *extra) if name != ANY_COLUMN)])
    used = [str(name) for name in frame.columns if name not in {label, schema.person, *schema.ignore}]
    both = sorted(
        (set(schema.bounds) & set(schema.categories)) | ({label} & {*schema.bounds, *schema.categories})
    )
    if both:
        raise InvalidInput(
            f"Column '{both[0]}' is declared in more than one way (label, bounds, categories); keep one "
            "declaration."
        )
    open_columns = [name for name in used if _declared(name, table, schema) is None]
    if (open_columns or schema.classes is None) and not infer:
        raise InvalidInput(_open_sentence(open_columns, label if schema.classes is None else None))
    inferred = [f"what column '{name}' holds, and its bounds or categories" for name in open_columns]
    if schema.classes is None:
        inferred.append(f"the classes of label '{label}'")
    completed = _measured(frame, schema, open_columns, label)
    columns = [column for name in used if (column := _declared(name, table, completed)) is not None]
    categorical = {column.name for column in columns if isinstance(column, CategoricalColumn)}
    refined = sorted(categorical & {*schema.scales, *schema.edges})
    if refined:
        raise InvalidInput(
            f"Column '{refined[0]}' has a scale or edges but holds categories; leave these out or give it "
            "bounds."
        )
    return Encoding(tuple(columns), label, completed.classes or (), tuple(inferred))


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
        "accept that with infer=True."
    )


def _declared(name: str, table: RawTable, schema: Schema) -> Column | None:
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


def _identities(frame: pd.DataFrame, person: str) -> NDArray[np.uint64]:
    """Return a 64-bit number per row, equal for rows of one person."""
    texts = as_texts(frame[person])
    absent = np.flatnonzero(is_missing(texts))
    if absent.size:
        raise InvalidInput(
            f"The person column '{person}' must not have missing values; row {absent[0] + 1} and "
            f"{absent.size - 1} more have none."
        )
    hashes = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return np.frombuffer(b"".join(hashes), dtype="<u8").astype(np.uint64)


def read_queries(path: str | Path, *, encoding: Encoding | None, width: int) -> NDArray[np.float32]:
    """Read a CSV, TSV, Parquet or NPZ file as queries of ``width`` features.

    With an ``encoding`` (a model trained on a table) the columns are those of the training table; the label
    column may be missing. Without one, the file has exactly ``width`` columns of numbers, already scaled as
    in training.
    """
    frame = read_table(path).frame
    if encoding is not None:
        if len(encoding.feature_names) != width:
            raise DataUnavailable(
                f"The encoding makes {len(encoding.feature_names)} features, but the model takes {width}; train it "
                "again or restore a copy of its folder."
            )
        return encoding.encode(frame)
    if frame.shape[1] != width:
        raise InvalidInput(
            f"The file {path} has {frame.shape[1]} columns, but the model takes {width} features; "
            "give one column per feature and no label."
        )
    numbers = [as_numbers(frame[name], str(name)) for name in frame.columns]
    features = np.stack(numbers, axis=1).astype(np.float32)
    if not np.isfinite(features).all():
        row, column = np.argwhere(~np.isfinite(features))[0]
        raise InvalidInput(
            f"Record {row + 1} of {path} has no finite number in column '{frame.columns[column]}'; correct "
            "that record."
        )
    return np.ascontiguousarray(features)

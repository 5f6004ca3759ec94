"""The user's own files as tables: CSV, TSV, Parquet and NPZ.

Nothing is guessed from the records: every cell of a text file is a string, and a column of a Parquet file keeps
the Arrow type that the file declares, with its nulls.  `columns` says how a cell of each type is read; what is a
number and what a category is declared, not detected.  The names and types of the columns count as public facts.
Errors are for the owner of the file: they name rows and columns, never a value.
"""

from __future__ import annotations

import csv
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.csv
import pyarrow.parquet
from numpy.typing import NDArray

from quietmax.errors import DataUnavailable, InvalidInput

_MOST_TEXT_BYTES = 2**31 - 2
SUFFIXES = (".csv", ".tsv", ".parquet", ".pq", ".npz")


@dataclass(frozen=True, eq=False)
class Table:
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


def read_table(path: str | Path, *, features: str = "features", label: str | None = None) -> Table:
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
            table = Table(_read_parquet(file))
        else:
            table = Table(_read_text(file, "\t" if kind == ".tsv" else ","))
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


def _read_npz(file: Path, features: str, label: str | None) -> Table:
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


def _array_table(file: Path, values: NDArray[Any], labels: NDArray[Any] | None, label: str | None) -> Table:
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
    return Table(frame, image_shape, type_bounds, complete=True)


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

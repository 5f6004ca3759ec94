"""Reading tables: CSV, TSV, Parquet and NPZ files, folders and frames, whole or in parts.

Nothing is guessed from the records: every cell of a text file is a string, and a column of a Parquet file keeps its
Arrow type. All files of a source must agree in the columns that are used, so a row is read alike whatever file and part
it is in (THEORY 3.8). Errors are for the owner of the table: they name files, rows and columns, never a value. The
parsers of pandas and Arrow lose NUL characters and read on after an open quote; so text is read with Python's.
"""

from __future__ import annotations

import codecs
import csv
import glob
import re
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from quietmax._lazy import lazy_module
from quietmax.data.encoding import _require_distinct, quoted
from quietmax.errors import DataUnavailable, InvalidData, InvalidInput

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow
    import pyarrow.parquet
else:
    pd = lazy_module("pandas")
    pyarrow = lazy_module("pyarrow")

_TEXT_SUFFIXES = (".csv", ".tsv")
FILE_SUFFIXES = (".parquet", ".pq", *_TEXT_SUFFIXES)
_SUFFIXES = (*FILE_SUFFIXES, ".npz")
_NUMBERS_AT_ONCE = 2**22
_MOST_ROWS_AT_ONCE = 2**16
_TEXT_ROWS = 2**9
"""So many rows of a text file are Python strings at once; with more, collecting garbage takes most of the time."""
_LONGEST_CELL = 2**27
"""Characters of a cell of a text file that may be read at most; the default of `csv` is 2^17."""

Converted = TypeVar("Converted")
_Types = Mapping[str, "pyarrow.DataType"]


@dataclass(frozen=True, eq=False)
class RawTable:
    """The content of a file before it is encoded."""

    frame: pd.DataFrame  # Rows and named columns
    image_shape: tuple[int, int, int] | None = None
    type_bounds: tuple[float, float] | None = None
    complete: bool = False  # Whether missing values cannot occur
    unnamed: int = 0  # Columns of a text file without a name, which are left out


def is_table_path(name: str | Path) -> bool:
    """Return whether a name is the path of a file rather than the name of a registered data set."""
    return isinstance(name, Path) or Path(name).suffix.lower() in _SUFFIXES or "/" in name or "\\" in name


def read_table(path: str | Path, *, features: str = "features", label: str | None = None) -> RawTable:
    """Read a CSV, TSV, Parquet or NPZ file; `features` and `label` name the arrays of an NPZ file."""
    file = _existing(path)
    suffix = file.suffix.lower()
    if suffix not in _SUFFIXES:
        raise InvalidInput(f"The file {file} must end in one of {quoted(_SUFFIXES)}, got '{file.suffix}'.")
    if file.stat().st_size == 0:
        raise InvalidData(f"The file {file} is empty.")
    with _errors_of(f"The file {file}"):
        if suffix == ".npz":
            table = _read_npz(file, features, label)
        elif suffix in _TEXT_SUFFIXES:
            table = _read_text(file)
        else:
            table = RawTable(_read_parquet(file))
    if table.frame.empty:
        raise InvalidData(f"The file {file} has no records.")
    return table


# --- Text -------------------------------------------------------------------------------------------------------------


def _read_text(file: Path) -> RawTable:
    """Read a CSV or TSV file; columns without a name are left out, whatever they hold."""
    header, part = _text_header(file)[0], TextPart(file)
    frames = list(converted_frames(part, [*part._types()], _MOST_ROWS_AT_ONCE, lambda frame: frame))
    frame = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
    return RawTable(frame, unnamed=header.count(""))


_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # begins with that of UTF-16
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}

_DELIMITER_LINE = re.compile('"?sep=([,;\t|])"?(?:\r\n|\r|\n)', re.IGNORECASE)
"""A first line with which spreadsheets name the delimiter."""


@contextmanager
def _open_text(file: Path) -> Iterator[tuple[IO[str], str]]:
    with file.open("rb") as content:
        start = content.read(4)
    encoding = next((name for mark, name in _MARKS.items() if start.startswith(mark)), "utf-8")
    try:
        with file.open(encoding=encoding, newline="") as text:
            named = _DELIMITER_LINE.fullmatch(text.readline(20))
            if named is None:
                text.seek(0)
            yield text, named[1] if named else "\t" if file.suffix.lower() == ".tsv" else ",;\t"
    except UnicodeDecodeError:
        raise InvalidData(
            f"The file {file} is not encoded as UTF-8 (or as UTF-16 with a byte-order mark). Spreadsheets can save it "
            "as 'CSV UTF-8'; 'iconv -f WINDOWS-1252 -t UTF-8' converts files of Windows."
        ) from None


def _text_header(file: Path) -> tuple[list[str], str]:
    """Return the longest header that one of the usual delimiters gives, and this delimiter."""
    headers = {}
    csv.field_size_limit(_LONGEST_CELL)
    with _open_text(file) as (text, delimiters):
        start = text.tell()
        for delimiter in delimiters:
            text.seek(start)
            headers[delimiter] = _first_row(file, csv.reader(text, delimiter=delimiter))
    delimiter = max(headers, key=lambda each: len(headers[each]))
    return headers[delimiter], delimiter


def _first_row(file: Path, rows: Iterator[list[str]]) -> list[str]:
    try:
        header = next((row for row in rows if any(map(str.strip, row))), None)
    except csv.Error:
        raise _unclosed(file, "the header") from None
    if header is None:
        raise InvalidData(f"The file {file} is empty.")
    return [name.strip() for name in header]


def _text_rows(file: Path, delimiter: str) -> Iterator[list[str]]:
    with _open_text(file) as (text, _):
        reader, count = csv.reader(text, delimiter=delimiter, strict=True), 0
        width = len(_first_row(file, reader))
        try:
            for count, row in enumerate(filter(None, reader), start=1):
                if len(row) != width:
                    raise InvalidData(
                        f"In the file {file}, row {count} (not counting the header) does not have as many fields as "
                        "the header; the file may be truncated."
                    )
                yield row
        except csv.Error:  # which shows the row
            raise _unclosed(file, f"row {count + 1} (not counting the header)") from None


def _unclosed(file: Path, where: str) -> InvalidData:
    return InvalidData(
        f"In the file {file}, {where} has a field that begins with a quote but does not end with one; a CSV writer "
        "puts such a field in quotes and doubles the quotes inside."
    )


# --- Parquet and NPZ --------------------------------------------------------------------------------------------------


def _read_parquet(file: Path) -> pd.DataFrame:
    return as_frame(pyarrow.parquet.ParquetFile(file).read())


def _read_npz(file: Path, features: str, label: str | None) -> RawTable:
    """Read arrays of features and labels; never unpickle."""
    try:
        with np.load(file, allow_pickle=False) as archive:
            absent = [name for name in (features, label) if name is not None and name not in archive.files]
            if absent:
                raise InvalidInput(
                    f"The file {file} has no array {quoted(absent)}; its arrays are {quoted(archive.files)}. "
                    "`features` and `label` name the arrays."
                )
            values, labels = archive[features], None if label is None else archive[label]
    except InvalidInput:
        raise
    except (ValueError, zipfile.BadZipFile, EOFError, KeyError):
        raise InvalidData(
            f"The file {file} is not a complete NPZ file of plain arrays; it may be truncated or hold Python objects."
        ) from None
    return _array_table(file, values, labels, label)


def _array_table(
    file: Path, values: NDArray[Any], labels: NDArray[Any] | None, label: str | None
) -> RawTable:
    if (
        values.ndim < 2
        or values.dtype.kind not in "biuf"
        or (labels is not None and labels.shape != values.shape[:1])
    ):
        raise InvalidData(
            f"The features in {file} must be an array of numbers with one row per record, and the labels an array "
            f"with one label per record; got features of shape {values.shape} and type {values.dtype}, and labels of "
            f"shape {None if labels is None else labels.shape}."
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


# --- Frames -----------------------------------------------------------------------------------------------------------


def _arrow_frame(content: pyarrow.Table) -> pd.DataFrame:
    columns = {
        number: pd.arrays.ArrowExtensionArray(_without_views(column))
        for number, column in enumerate(content.columns)
    }
    return pd.DataFrame(columns, index=pd.RangeIndex(content.num_rows)).set_axis(content.schema.names, axis=1)


def _without_views(column: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    """Return strings and bytes in the view layout in the usual one, which pandas can take rows of."""
    if pyarrow.types.is_string_view(column.type):
        return column.cast(pyarrow.large_string())
    return column.cast(pyarrow.large_binary()) if pyarrow.types.is_binary_view(column.type) else column


def as_frame(table: Any) -> pd.DataFrame:
    """Return a table as a pandas frame, without converting any value."""
    if isinstance(table, pd.DataFrame):
        frame = table
    elif hasattr(table, "__arrow_c_stream__"):
        problem = "The table has a column of a type that Arrow cannot represent."
        if any(str(kind) == "Object" for kind in getattr(table, "dtypes", ())):
            raise InvalidData(problem)  # polars would export the addresses of the objects
        try:
            content = pyarrow.table(table)
        except Exception:  # what a foreign library raises while it exports a column may show cells
            raise InvalidData(problem) from None
        frame = _arrow_frame(content)
    else:
        raise InvalidInput(
            f"A table must be a pandas or polars DataFrame or an Arrow table, got {type(table).__name__}."
        )
    names = [str(name).strip() for name in frame.columns]
    _require_distinct("the table", names)
    return frame.set_axis(names, axis=1)


def as_series(values: Any, name: str) -> pd.Series[Any]:
    """Return one entry per row as a pandas series; no entry is converted by looking at others."""
    problem = f"{name} must be a flat sequence of numbers or strings, one for each row."
    flat = hasattr(values, "__iter__") and getattr(values, "ndim", 1) == 1
    if not flat or isinstance(values, str | bytes | Mapping | pd.DataFrame):
        raise InvalidInput(problem)
    if isinstance(values, pd.Series):
        return values
    if isinstance(values, pd.Index | pd.api.extensions.ExtensionArray):
        return pd.Series(values, dtype=values.dtype)
    if hasattr(values, "__arrow_c_stream__") or hasattr(values, "__arrow_c_array__"):
        return pd.Series(pd.arrays.ArrowExtensionArray(_arrow_column(values, problem)))
    if isinstance(values, np.ndarray) and values.dtype.kind in "mM":
        try:
            return pd.Series(values)
        except ValueError:  # a date that pandas cannot represent; its message shows it
            raise InvalidInput(problem) from None
    entries = values.tolist() if isinstance(values, np.ndarray) else values
    cells = [entry.item() if getattr(entry, "ndim", None) == 0 else entry for entry in entries]
    if not all(map(pd.api.types.is_scalar, cells)):
        raise InvalidInput(problem)
    return pd.Series(cells, dtype=object)


def _arrow_column(values: Any, problem: str) -> pyarrow.ChunkedArray:
    if str(getattr(values, "dtype", "")) == "Object":
        raise InvalidInput(problem)  # polars would export the addresses of the objects
    try:
        if hasattr(values, "__arrow_c_stream__"):
            return _without_views(pyarrow.chunked_array(values))
        return _without_views(pyarrow.chunked_array([pyarrow.array(values)]))
    except Exception:  # what a foreign library raises while it exports a column may show entries
        raise InvalidInput(problem) from None


def _existing(path: str | Path) -> Path:
    file = Path(path).expanduser()
    if file.is_file():
        return file
    if file.is_dir():
        raise DataUnavailable(f"{file} is a folder; one of its files is required here.")
    raise DataUnavailable(f"The file {file} does not exist.")


# --- Parts ------------------------------------------------------------------------------------------------------------


class Part(ABC):
    """Rows that are read in one go, by one worker."""

    place: str = ""  # Where the rows are, as the beginning of a sentence; empty for a frame

    def count(self) -> int | None:
        """Return the number of rows; None if it is not known before they are read."""
        return None

    @abstractmethod
    def _frames(self, columns: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:
        """Read some columns, about so many rows at once."""


def rows_at_once(columns: int) -> int:
    """Return how many rows of encoded or mapped numbers are held at once, so that they take little memory."""
    return max(64, min(_NUMBERS_AT_ONCE // max(columns, 1), _MOST_ROWS_AT_ONCE))


def converted_frames(
    part: Part, columns: Sequence[str], rows: int, convert: Callable[[pd.DataFrame], Converted]
) -> Iterator[Converted]:
    """Read the rows of one part, and convert them frame by frame."""
    frames, first = part._frames(columns, rows), 0
    while True:
        with _errors_of(part.place):
            frame = next(frames, None)
        if frame is None:
            return
        with _errors_of(part.place, first):
            made = convert(frame)
        first += len(frame)
        yield made


@contextmanager
def _errors_of(place: str, first: int = 0) -> Iterator[None]:
    """Let errors name the file, and count rows from its first one."""
    try:
        yield
    except InvalidInput as error:
        message = re.sub(
            r"\b([Rr]ow )(\d+)", lambda match: f"{match[1]}{int(match[2]) + first}", str(error), count=1
        )
        if place and place.partition(" ")[2] not in message:
            message = f"{place}: {message}"
        raise type(error)(message) from None
    except pyarrow.ArrowException:
        # Errors of the parsers may show cells. Those of the operating system have a strerror and show none.
        raise InvalidData(f"{place} is damaged; the file may be truncated.") from None
    except OSError as error:
        raise DataUnavailable(f"{place} cannot be read: {error.strerror or 'it is damaged'}.") from (
            error if error.strerror else None
        )


def file_parts(
    source: str | Path, columns: Sequence[str] | None
) -> list[tuple[TextPart | ParquetPart, list[str]]]:
    """Return the files that a path or a pattern names, after a look at the columns of each one."""
    found = []
    for part in _file_parts(source):
        types = part._types()
        wanted = list(types if columns is None else columns)
        _require_columns(part.place, types, wanted)
        found.append((part, wanted))
    return found


def names_several_files(name: str | Path) -> bool:
    """Return whether a path is a folder or a pattern, such as "people/*.parquet"."""
    path = Path(name).expanduser()
    return path.is_dir() or (glob.has_magic(str(path)) and not path.is_file())


@dataclass(frozen=True, eq=False)
class _Source:
    """The files that a path or a pattern names; no row has been read."""

    name: str
    parts: Sequence[TextPart | ParquetPart]
    types: Sequence[_Types]  # The columns of each part

    def _empty_frame(self) -> pd.DataFrame:
        return as_frame(pyarrow.schema(list(_stated_types(self.types).items())).empty_table())

    def _require_alike(self, used: Sequence[str]) -> None:
        """Refuse a source without one of the columns that are used, or whose parts differ in the columns."""
        stated = _stated_types(self.types)
        _require_columns(self.parts[0].place, stated, used)
        for part, own in zip(self.parts[1:], self.types[1:], strict=True):
            _require_types(part.place, own, stated, used)


def _open_source(source: str | Path) -> _Source:
    named = [part for part in Path(source).expanduser().parts if not glob.has_magic(part)]
    parts = _file_parts(source)
    return _Source(Path(named[-1]).stem if named else "table", parts, [part._types() for part in parts])


def _stated_types(types: Sequence[_Types]) -> dict[str, pyarrow.DataType]:
    """Return the columns of the first part. A column without values may have the type null; the next part decides."""
    stated = dict(types[0])
    for name, kind in stated.items():
        if pyarrow.types.is_null(kind):
            others = (own[name] for own in types if name in own)
            stated[name] = next((each for each in others if not pyarrow.types.is_null(each)), kind)
    return stated


def _require_types(place: str, own: _Types, first: _Types, used: Sequence[str]) -> None:
    """Refuse a file in which a column is missing or new, or has another type than in an earlier file."""
    absent = [name for name in used if name not in own]
    if absent:
        raise InvalidData(f"{place} has no column {quoted(absent)}, which the first file has.")
    new = [name for name in own if name not in first]
    if new:
        raise InvalidData(f"{place} has a column {quoted(new)}, which the first file does not have.")
    for name in used:
        kinds = {_plain(own[name]), _plain(first[name])}
        if len(kinds) > 1 and not any(map(pyarrow.types.is_null, kinds)):
            raise InvalidData(
                f"{place} has column '{name}' of type {own[name]}, but in an earlier file it is of type {first[name]}; "
                "all files must have the same type."
            )


def _require_columns(place: str, own: _Types, used: Sequence[str]) -> None:
    absent = [name for name in used if name not in own]
    if absent:
        raise InvalidData(f"{place} has no column {quoted(absent)}.")


def _plain(kind: pyarrow.DataType) -> pyarrow.DataType:
    """Return a type without what makes no difference to its cells: a dictionary, the size of strings."""
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    is_string = pyarrow.types.is_large_string(kind) or pyarrow.types.is_string_view(kind)
    return pyarrow.string() if is_string else kind


# --- Kinds of parts ---------------------------------------------------------------------------------------------------


def _file_parts(source: str | Path) -> list[TextPart | ParquetPart]:
    path = Path(source).expanduser()
    if path.is_dir():
        found = sorted(
            file
            for file in path.rglob("*")
            if file.suffix.lower() in FILE_SUFFIXES
            and file.is_file()
            and not any(part.startswith((".", "_")) for part in file.relative_to(path).parts)
        )
        if not found:
            raise DataUnavailable(
                f"The folder {path} has no file that ends in one of {quoted(FILE_SUFFIXES)}."
            )
    elif path.is_file():
        found = [path]
    else:
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
        if not found:
            raise DataUnavailable(f"There is no file or folder {path}.")
    wrong = [file for file in found if file.suffix.lower() not in FILE_SUFFIXES]
    if wrong:
        raise InvalidInput(
            f"The file {wrong[0]} must end in one of {quoted(FILE_SUFFIXES)}, got '{wrong[0].suffix}'."
        )
    return [TextPart(file) if file.suffix.lower() in _TEXT_SUFFIXES else ParquetPart(file) for file in found]


@dataclass(frozen=True)
class _FilePart(Part):
    file: Path

    @property
    def place(self) -> str:  # type: ignore[override]
        """Where the rows are, as the beginning of a sentence."""
        return f"The file {self.file}"


class ParquetPart(_FilePart):
    """A Parquet file, which states its number of rows."""

    def count(self) -> int:
        """Return the number of rows."""
        return int(pyarrow.parquet.read_metadata(self.file).num_rows)

    def _types(self) -> _Types:
        with _errors_of(self.place):
            schema = pyarrow.parquet.read_schema(self.file)
            _require_distinct(f"the file {self.file}", [name.strip() for name in schema.names])
            return {field.name.strip(): field.type for field in schema}

    def _frames(self, columns: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:
        with pyarrow.parquet.ParquetFile(self.file) as content:
            names = {name.strip(): name for name in content.schema_arrow.names}
            for batch in content.iter_batches(rows, columns=[names[name] for name in columns]):
                yield as_frame(pyarrow.table(batch))


class TextPart(_FilePart):
    """A CSV or TSV file."""

    def _types(self) -> _Types:
        with _errors_of(self.place):
            columns = [name for name in _text_header(self.file)[0] if name]
            _require_distinct(f"the file {self.file}", columns)
            return dict.fromkeys(columns, pyarrow.string())

    def _frames(self, columns: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:
        header, delimiter = _text_header(self.file)
        places = [header.index(name) for name in columns]
        records, size = _text_rows(self.file, delimiter), min(rows, _TEXT_ROWS)

        def batches() -> Iterator[pyarrow.RecordBatch]:
            while batch := list(islice(records, size)):
                cells = list(zip(*batch, strict=True))
                arrays = [pyarrow.array(cells[place], pyarrow.string()) for place in places]
                yield pyarrow.record_batch(arrays, names=list(columns))

        found = batches()
        while several := list(islice(found, rows // size)):
            yield pyarrow.Table.from_batches(several).to_pandas()


@dataclass(frozen=True, eq=False)
class FramePart(Part):
    """A table in memory."""

    frame: pd.DataFrame

    def count(self) -> int:
        """Return the number of rows."""
        return len(self.frame)

    def _frames(self, columns: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:  # noqa: ARG002
        for start in range(0, len(self.frame), rows):
            yield self.frame.iloc[start : start + rows]

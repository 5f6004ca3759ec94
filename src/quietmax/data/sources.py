"""Reading tables: CSV, TSV, Parquet and NPZ files, folders, Arrow datasets, streams and frames, whole or in parts.

Nothing is guessed from the records: every cell of a text file is a string, and a column of a Parquet file keeps
the Arrow type that the file declares, with its nulls.  All files of a source must agree in the columns that are used,
so a row is read alike whatever file and part it is in (THEORY 3.8).  The names and types of the columns count as public
facts.  Errors are for the owner of the table: they name files, rows and columns, never a value.

The parser of text is Arrow's, between two checks of our own: no reader of pandas or Arrow keeps NUL characters, refuses
a quoted field that does not end, and cuts a file at the ends of records.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import glob
import io
import re
import zipfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from quietmax._lazy import lazy_module
from quietmax.data.encoding import quoted
from quietmax.errors import DataUnavailable, InvalidData, InvalidInput

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow
    import pyarrow.csv
    import pyarrow.dataset
    import pyarrow.parquet
else:
    pd = lazy_module("pandas")
    pyarrow = lazy_module("pyarrow")

_SUFFIXES = (".csv", ".tsv", ".parquet", ".pq", ".npz")
FILE_SUFFIXES = (".parquet", ".pq", ".csv", ".tsv")
_TEXT_SUFFIXES = (".csv", ".tsv")
_MOST_ROWS = 2**62
_TEXT_BYTES = 2**23
_HEADER_BYTES = 2**20
_NUMBERS_AT_ONCE = 2**22
"""About this many numbers are encoded at once."""
_MOST_ROWS_AT_ONCE = 2**16

Converted = TypeVar("Converted")


@dataclass(frozen=True, eq=False)
class RawTable:
    """The content of a file before it is encoded."""

    frame: pd.DataFrame  # Rows and named columns
    image_shape: tuple[int, int, int] | None = None
    type_bounds: tuple[float, float] | None = None
    complete: bool = False  # Whether missing values cannot occur
    unnamed: int = 0


def is_table_path(name: str | Path) -> bool:
    """Return whether a name is the path of a file rather than the name of a registered data set."""
    return isinstance(name, Path) or Path(name).suffix.lower() in _SUFFIXES or "/" in name or "\\" in name


def read_table(path: str | Path, *, features: str = "features", label: str | None = None) -> RawTable:
    """Read a CSV, TSV, Parquet or NPZ file.

    Parameters
    ----------
    path : str or Path
        The file; its suffix is its format.
    features : str
        NPZ only: name of the array of features with one row per record.  Images may keep their axes.  The columns
        are called `feature_0`, `feature_1` and so on.
    label : str, optional
        NPZ only: name of the array of labels.

    Returns
    -------
    RawTable

    Raises
    ------
    DataUnavailable
        If the file does not exist or cannot be read.
    InvalidInput
        If the file has another format, is damaged, or has no records.
    """
    file = existing(path)
    suffix = file.suffix.lower()
    if suffix not in _SUFFIXES:
        raise InvalidInput(f"The file {file} must end in one of {quoted(_SUFFIXES)}, got '{file.suffix}'.")
    if file.stat().st_size == 0:
        raise InvalidData(f"The file {file} is empty.")
    try:
        if suffix == ".npz":
            table = _read_npz(file, features, label)
        elif suffix in _TEXT_SUFFIXES:
            table = _read_text(file)
        else:
            table = RawTable(_read_parquet(file))
    except OSError as error:
        # Errors of the parsers may show cells. Those of the operating system have a strerror and show none.
        raise DataUnavailable(f"The file {file} cannot be read: {error.strerror or 'it is damaged'}.") from (
            error if error.strerror else None
        )
    if table.frame.empty:
        raise InvalidData(f"The file {file} has no records.")
    return table


def _read_text(file: Path) -> RawTable:
    """Read a CSV or TSV file; every cell is a string.

    The delimiter is the one that a first line such as "sep=;" names, else the one that gives the longest header.
    Columns without a name are left out, whatever they hold.
    """
    with _open_text(file) as stream:
        names = _read_header(file, stream, _HEADER_BYTES)[1][2]
    part, columns = TextPart(file), [name for name in names if name]
    frames = list(converted_frames(part, columns, _MOST_ROWS, lambda frame: frame))
    frame = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
    return RawTable(frame, unnamed=len(names) - len(columns))


def _parse_text(file: Path, content: bytes) -> pd.DataFrame:
    """Return the rows of a text in UTF-8 that begins with a header."""
    content, delimiters = _without_delimiter_line(file, content)
    try:
        header, lines, delimiter = _longest_header(file, content, delimiters)
        columns = [name for name in header if name]
        _require_distinct(f"the file {file}", columns)
        rows = _count_rows(file, content, lines, delimiter) if b'"' in content else None
        # Names that no column can have, because they have outer blanks.
        names = [name or f" {number}" for number, name in enumerate(header)]
        # One block for the whole file: at a border between two blocks Arrow loses the line feed of a quoted "\r\n",
        # and where the borders are depends on the other rows.
        table = pyarrow.csv.read_csv(
            pyarrow.BufferReader(content),
            read_options=pyarrow.csv.ReadOptions(
                use_threads=False, block_size=len(content) + 1, column_names=names, skip_rows=lines
            ),
            parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(names, pyarrow.string()), strings_can_be_null=False
            ),
        )
    except (pyarrow.ArrowInvalid, csv.Error) as error:
        # Below, `from None`: what the parser raises shows the row.
        if "Could not skip" in str(error):
            return pd.DataFrame()
        if "UTF8" in str(error):
            raise InvalidData(_not_utf_8(file)) from None
        row = re.search(r"Row #(\d+)", str(error))
        where = f"row {int(row[1]) - lines} (not counting the header)" if row else "some row"
        raise InvalidData(
            f"In the file {file}, {where} does not have as many fields as the header; the file may be truncated."
        ) from None
    if rows is not None and rows != table.num_rows:
        raise InvalidData(f"The quotes in the file {file} are ambiguous; a CSV writer must have written it.")
    frame: pd.DataFrame = table.select(columns).to_pandas()
    return frame


def _text_frames(file: Path, max_bytes: int) -> Iterator[pd.DataFrame]:
    """Read a CSV or TSV file part by part; parts end where a record ends, so a cell is read alike in any part."""
    try:
        with _open_text(file) as stream:
            content, (header, delimiter, _) = _read_header(file, stream, max(max_bytes, _HEADER_BYTES))
            _parse_text(file, header)  # which refuses a quoted field that does not end
            for part in _text_parts(content[len(header) :], stream, max_bytes, delimiter):
                yield _parse_text(file, header + part)
    except UnicodeDecodeError:
        raise InvalidData(_not_utf_8(file)) from None


def _text_columns(file: Path) -> list[str]:
    """Return the names of the columns of a CSV or TSV file; no row is read."""
    with _open_text(file) as stream:
        columns = [name for name in _read_header(file, stream, _HEADER_BYTES)[1][2] if name]
    _require_distinct(f"the file {file}", columns)
    return columns


def _open_text(file: Path) -> IO[bytes]:
    """Open a text file as UTF-8 without a byte-order mark; the marks of UTF-16 and UTF-32 are understood."""
    stream = file.open("rb")
    start = stream.read(4)
    encoding = next((name for mark, name in _MARKS.items() if start.startswith(mark)), None)
    stream.seek(len(codecs.BOM_UTF8) if encoding == "utf-8" else 0)
    if encoding in (None, "utf-8"):
        return stream
    with stream:
        try:
            return io.BytesIO(stream.read().decode(encoding).encode())
        except UnicodeDecodeError:
            raise InvalidData(_not_utf_8(file)) from None


_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32",  # begins with that of UTF-16
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def _read_header(file: Path, stream: IO[bytes], size: int) -> tuple[bytes, tuple[bytes, str, list[str]]]:
    """Read the beginning of a text: at least so many bytes and the whole header, which is returned too."""
    content, more = b"", stream.read(size)
    while more:
        content += more
        with contextlib.suppress(InvalidData):
            found = _text_header(file, content)
            if len(found[0]) < len(content):
                return content, found
        more = stream.read(len(content))
    return content, _text_header(file, content)


def _text_header(file: Path, content: bytes) -> tuple[bytes, str, list[str]]:
    """Return the beginning of a text up to the end of its header, its delimiter, and the names in the header."""
    rest, delimiters = _without_delimiter_line(file, content)
    try:
        names, lines, delimiter = _longest_header(file, rest, delimiters)
    except (UnicodeDecodeError, csv.Error):
        raise InvalidData(_not_utf_8(file)) from None
    ends = (match.end() for match in re.finditer(b"\r\n|\r|\n", rest))
    end = next(islice(ends, lines - 1, None), len(rest))
    return content[: len(content) - len(rest) + end].rstrip(b"\r\n") + b"\n", delimiter, names


def _text_parts(pending: bytes, stream: IO[bytes], max_bytes: int, delimiter: str) -> Iterator[bytes]:
    """Yield whole records, about `max_bytes` at a time: first those in `pending`, then the rest of the stream."""
    ended = False
    while pending or not ended:
        while len(pending) < max_bytes and not ended:
            more = stream.read(max_bytes)
            pending, ended = pending + more, not more
        whole = ended and len(pending) <= max_bytes
        cut = len(pending) if whole else _last_record_end(pending[:max_bytes], delimiter)
        if cut == 0:
            max_bytes *= 2
            continue
        # Not `strip()`: a row of missing values in a TSV file consists of tabs.
        if pending[:cut].strip(b"\r\n"):
            yield pending[:cut]
        pending = pending[cut:]


def _last_record_end(text: bytes, delimiter: str) -> int:
    """Return where the last whole record of a text ends; the text begins with a record. 0 if there is none."""
    if b'"' not in text:
        end = text.rfind(b"\n") + 1
        return end or text[:-1].rfind(b"\r") + 1
    opening, closed = _quoted(delimiter)
    end = 0
    for match in re.finditer(b"(" + closed + b")|(" + opening + b")|\r\n|\r|\n", b"\n" + text):
        if match[2]:
            break
        # A line feed may follow a carriage return at the very end.
        if not match[1] and not (match[0] == b"\r" and match.end() == len(text) + 1):
            end = match.end() - 1
    return end


def _without_delimiter_line(file: Path, content: bytes) -> tuple[bytes, Sequence[str]]:
    """Return a text without a first line that names the delimiter, and the delimiters that it may have."""
    named = _DELIMITER_LINE.match(content)
    if named is not None:
        return content[named.end() :], (named[1].decode(),)
    return content, ("\t",) if file.suffix.lower() == ".tsv" else (",", ";", "\t")


_DELIMITER_LINE = re.compile(b'"?sep=([,;\t|])"?(?:\r\n|\r|\n)', re.IGNORECASE)
"""A first line with which spreadsheets name the delimiter."""


def _quoted(delimiter: str) -> tuple[bytes, bytes]:
    """Return what matches the quote that opens a field, and a whole field in quotes."""
    border = b"[" + re.escape(delimiter.encode()) + b"\r\n]"
    opening = b'"(?<=' + border + b'")'
    return opening, opening + b'[^"]*+(?:""[^"]*+)*+"(?=' + border + b")"


def _count_rows(file: Path, content: bytes, lines: int, delimiter: str) -> int:
    """Return the number of rows after the header of a file with quotes, and refuse a quoted field that does not end.

    Arrow reads an opening quote that nobody closes as one cell, which takes in all later rows without an error.
    """
    end = re.compile(b"\r\n|\r|\n")
    start = next((match.end() for match in islice(end.finditer(content), lines - 1, None)), len(content))
    opening, closed = map(re.compile, _quoted(delimiter))
    count = 0
    for is_header, part in ((True, content[:start]), (False, content[start:])):
        unquoted = closed.sub(b"_", b"\n%b\n" % part)
        wrong = opening.search(unquoted)
        if wrong is not None:
            row = f"row {_count_lines(unquoted[: wrong.end()])} (not counting the header)"
            raise InvalidData(
                f"In the file {file}, {'the header' if is_header else row} has a field that begins with a quote but "
                "does not end with one; a CSV writer puts such a field in quotes and doubles the quotes inside."
            )
        count = _count_lines(unquoted)
    return count


def _count_lines(text: bytes) -> int:
    """Return the number of lines that are not empty; the text begins with a line feed."""
    return sum(1 for _ in re.finditer(b"[\r\n][^\r\n]", text))


def _not_utf_8(file: Path) -> str:
    return (
        f"The file {file} is not encoded as UTF-8 (or as UTF-16 with a byte-order mark). Spreadsheets can save it as "
        "'CSV UTF-8'; 'iconv -f WINDOWS-1252 -t UTF-8' converts files of Windows."
    )


def _longest_header(file: Path, content: bytes, delimiters: Sequence[str]) -> tuple[list[str], int, str]:
    """Return the header that has the most columns, the number of lines up to its end, and its delimiter."""
    first, *others = delimiters
    best = (*_header(file, content, first), first)
    for delimiter in others:
        with contextlib.suppress(csv.Error):  # the whole header in one field may be too long for the parser
            header, lines = _header(file, content, delimiter)
            best = (header, lines, delimiter) if len(header) > len(best[0]) else best
    return best


def _header(file: Path, content: bytes, delimiter: str) -> tuple[list[str], int]:
    """Return the column names in the first row that is not blank, and the number of lines up to its end."""
    with io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", newline="") as stream:
        reader = csv.reader(stream, delimiter=delimiter)
        for row in reader:
            if any(cell.strip() for cell in row):
                return [cell.strip() for cell in row], reader.line_num
    raise InvalidData(f"The file {file} is empty.")


def _read_parquet(file: Path) -> pd.DataFrame:
    """Read a Parquet file; every column keeps its Arrow type."""
    try:
        content = pyarrow.parquet.ParquetFile(file).read()
    except pyarrow.ArrowException:
        raise InvalidData(f"The file {file} is not a complete Parquet file; it may be truncated.") from None
    _require_distinct(f"the file {file}", [name.strip() for name in content.schema.names])
    return as_frame(content)


def _arrow_frame(content: pyarrow.Table) -> pd.DataFrame:
    """Return an Arrow table as a frame; every column keeps its Arrow type, and names may repeat."""
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
    """Return arrays as a table with the columns `feature_0`, `feature_1` and so on."""
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


def _require_distinct(place: str, names: Sequence[str]) -> None:
    """Refuse a table in which two columns have the same name."""
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if repeated:
        raise InvalidData(
            f"Column names must be different; {place} has several columns named {quoted(repeated)}."
        )


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
    """Return one entry per row as a pandas series, without converting any of them.

    A type that the container declares (pandas, polars, Arrow, NumPy) is kept.  The entries of a list or of an array
    of objects stay Python objects: pandas would choose one type by looking at all of them.
    """
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
    """Return a series of polars or an Arrow array as an Arrow column."""
    if str(getattr(values, "dtype", "")) == "Object":
        raise InvalidInput(problem)  # polars would export the addresses of the objects
    try:
        if hasattr(values, "__arrow_c_stream__"):
            return _without_views(pyarrow.chunked_array(values))
        return _without_views(pyarrow.chunked_array([pyarrow.array(values)]))
    except Exception:  # what a foreign library raises while it exports a column may show entries
        raise InvalidInput(problem) from None


def existing(path: str | Path) -> Path:
    """Return the path of a file; raise if there is none."""
    file = Path(path).expanduser()
    if file.is_file():
        return file
    if file.is_dir():
        raise DataUnavailable(f"{file} is a folder; one of its files is required here.")
    raise DataUnavailable(f"The file {file} does not exist.")


# --- Parts ------------------------------------------------------------------------------------------------------------


class Part(ABC):
    """Rows that are read in one go, by one worker."""

    @property
    def place(self) -> str:
        """Where the rows are, as the beginning of a sentence; empty for a frame."""
        return ""

    def count(self) -> int | None:
        """Return the number of rows; None if it is not known before they are read."""
        return None

    @abstractmethod
    def frames(self, columns: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:
        """Read the needed columns, about that many rows at once."""


def rows_at_once(columns: int) -> int:
    """Return how many rows of encoded or mapped numbers are held at once, so that they take little memory."""
    return max(64, min(_NUMBERS_AT_ONCE // max(columns, 1), _MOST_ROWS_AT_ONCE))


def converted_frames(
    part: Part, columns: Sequence[str], rows: int, convert: Callable[[pd.DataFrame], Converted]
) -> Iterator[Converted]:
    """Read the rows of one part, and convert them frame by frame."""
    frames, first = part.frames(columns, rows), 0
    while True:
        with errors_of(part, first):
            frame = next(frames, None)
            if frame is None:
                return
            made = convert(frame)
        first += len(frame)
        yield made


@contextmanager
def errors_of(part: Part, first: int = 0) -> Iterator[None]:
    """Let errors name the file. What Arrow itself raises may show the cells of a row."""
    try:
        yield
    except InvalidInput as error:
        raise _placed(error, part.place, first) from None
    except pyarrow.ArrowException:
        raise InvalidData(f"{part.place} is damaged; the file may be truncated.") from None
    except OSError as error:
        reason = error.strerror or "it is damaged"
        raise DataUnavailable(f"{part.place} cannot be read: {reason}.") from None


def _placed(error: InvalidInput, place: str, first: int) -> InvalidInput:
    """Return an error that names the file, and counts rows from its first one."""
    message = re.sub(
        r"\b([Rr]ow )(\d+)", lambda match: f"{match[1]}{int(match[2]) + first}", str(error), count=1
    )
    if place and place.partition(" ")[2] not in message:
        message = f"{place}: {message}"
    return type(error)(message)


def file_parts(
    source: str | Path, columns: Sequence[str] | None
) -> list[tuple[TextPart | ParquetPart, list[str]]]:
    """Return the files that a path or a pattern names, after a look at the columns of each one."""
    found = []
    for file in _files(source):
        part, types = _file_part(file), _file_types(file)
        wanted = list(types if columns is None else columns)
        _require_columns(part.place, types, wanted)
        found.append((part, wanted))
    return found


def names_several_files(name: str | Path) -> bool:
    """Return whether a path is a folder or a pattern, such as "people/*.parquet"."""
    path = Path(name).expanduser()
    return path.is_dir() or (glob.has_magic(str(path)) and not path.is_file())


def is_source(source: Any) -> bool:
    """Return whether an object is a source of rows that are not in memory: files, a dataset or a stream."""
    kinds = str | Path | pyarrow.dataset.Dataset | pyarrow.RecordBatchReader
    return isinstance(source, kinds) or hasattr(source, "__next__")


@dataclass(frozen=True, eq=False)
class Source:
    """Files, a dataset or a stream."""

    name: str
    parts: Sequence[Part]
    types: Sequence[Mapping[str, pyarrow.DataType]]  # The columns of each part and their types

    @classmethod
    def of(cls, source: Any) -> Source:
        """Look at the columns of all parts; no row is read."""
        if isinstance(source, str | Path):
            files = _files(source)
            named = [part for part in Path(source).expanduser().parts if not glob.has_magic(part)]
            parts = [_file_part(file) for file in files]
            return cls(
                Path(named[-1]).stem if named else "table", parts, [_file_types(file) for file in files]
            )
        if isinstance(source, pyarrow.dataset.Dataset):
            fragments = _fragments(source)
            return cls("dataset", fragments, [_fragment_types(fragment) for fragment in fragments])
        stream = StreamPart.of(source)
        return cls("stream", [stream], [stream.types])

    def empty_frame(self) -> pd.DataFrame:
        """Return a frame with the columns of the source and no row."""
        return as_frame(pyarrow.schema(list(_stated_types(self.types).items())).empty_table())

    def require_alike(self, used: Sequence[str]) -> None:
        """Refuse a source without one of the columns that are used, or whose parts differ in the columns."""
        stated = _stated_types(self.types)
        _require_columns(self.parts[0].place, stated, used)
        for part, own in zip(self.parts[1:], self.types[1:], strict=True):
            _require_types(part.place, own, stated, used)


def _fragments(dataset: pyarrow.dataset.Dataset) -> list[FragmentPart]:
    """Return the parts of a dataset."""
    try:
        parts = [FragmentPart(fragment, dataset.schema) for fragment in dataset.get_fragments()]
    except ValueError:
        raise InvalidInput(
            "A dataset must not be filtered. Its rows can be given as a stream: `dataset.to_batches()`."
        ) from None
    if not parts:
        raise InvalidData("There are no files.")
    formats = {
        getattr(part.fragment.format, "default_extname", "")
        for part in parts
        if hasattr(part.fragment, "path")
    }
    if formats & {"csv", "json"}:
        raise InvalidInput(
            "Arrow guesses the types of a dataset of CSV or JSON files from some of its rows, so one row could change "
            "how the others are read. Give the folder of the CSV files itself, or Parquet files."
        )
    return parts


def _fragment_types(part: FragmentPart) -> dict[str, pyarrow.DataType]:
    """Return those columns of a dataset that one of its files has; Arrow would fill in the others with nulls."""
    with errors_of(part):
        own = {
            *part.fragment.physical_schema.names,
            *pyarrow.dataset.get_partition_keys(part.fragment.partition_expression),
        }
    return _types(pyarrow.schema(field for field in part.schema if field.name in own))


def _stated_types(types: Sequence[Mapping[str, pyarrow.DataType]]) -> dict[str, pyarrow.DataType]:
    """Return the columns of the first part. A column without values may have the type null; the next part decides."""
    stated = dict(types[0])
    for name, kind in stated.items():
        if pyarrow.types.is_null(kind):
            others = (own[name] for own in types if name in own)
            stated[name] = next((each for each in others if not pyarrow.types.is_null(each)), kind)
    return stated


def _require_types(
    place: str,
    own: Mapping[str, pyarrow.DataType],
    first: Mapping[str, pyarrow.DataType],
    used: Sequence[str],
) -> None:
    """Refuse a file in which a column is missing or new, or has another type than in an earlier file."""
    absent = [name for name in used if name not in own]
    if absent:
        raise InvalidData(f"{place} has no column {quoted(absent)}, which the first file has.")
    new = [name for name in own if name not in first]
    if new:
        raise InvalidData(f"{place} has a column {quoted(new)}, which the first file does not have.")
    for name in used:
        if not _alike(own[name], first[name]):
            raise InvalidData(
                f"{place} has column '{name}' of type {own[name]}, but in an earlier file it is of type {first[name]}; "
                "all files must have the same type."
            )


def _require_columns(place: str, own: Mapping[str, pyarrow.DataType], used: Sequence[str]) -> None:
    """Refuse a file in which a column is missing."""
    absent = [name for name in used if name not in own]
    if absent:
        raise InvalidData(f"{place} has no column {quoted(absent)}.")


def _alike(one: pyarrow.DataType, other: pyarrow.DataType) -> bool:
    """Return whether cells of two types are read alike: equal types, but for dictionaries and the size of strings."""
    kinds = [_plain(one), _plain(other)]
    return kinds[0] == kinds[1] or any(pyarrow.types.is_null(kind) for kind in kinds)


def _plain(kind: pyarrow.DataType) -> pyarrow.DataType:
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    is_string = pyarrow.types.is_large_string(kind) or pyarrow.types.is_string_view(kind)
    return pyarrow.string() if is_string else kind


def _types(schema: pyarrow.Schema) -> dict[str, pyarrow.DataType]:
    return {field.name.strip(): field.type for field in schema}


# --- Files ------------------------------------------------------------------------------------------------------------


def _files(source: str | Path) -> list[Path]:
    """Return the files that a path or a pattern names, in order."""
    path = Path(source).expanduser()
    if path.is_dir():
        found = sorted(
            file
            for file in path.rglob("*")
            if file.suffix.lower() in FILE_SUFFIXES and file.is_file() and not _hidden(file.relative_to(path))
        )
        if not found:
            raise DataUnavailable(
                f"The folder {path} has no file that ends in one of {quoted(FILE_SUFFIXES)}."
            )
        return found
    if path.is_file():
        found = [path]
    elif glob.has_magic(str(path)):
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
    else:
        found = []
    if not found:
        raise DataUnavailable(f"There is no file or folder {path}.")
    wrong = [file for file in found if file.suffix.lower() not in FILE_SUFFIXES]
    if wrong:
        raise InvalidInput(
            f"The file {wrong[0]} must end in one of {quoted(FILE_SUFFIXES)}, got '{wrong[0].suffix}'."
        )
    return found


def _file_part(file: Path) -> TextPart | ParquetPart:
    return TextPart(file) if file.suffix.lower() in _TEXT_SUFFIXES else ParquetPart(file)


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _file_types(file: Path) -> dict[str, pyarrow.DataType]:
    """Return the columns of a file and their types, without reading rows."""
    try:
        if file.suffix.lower() in _TEXT_SUFFIXES:
            return dict.fromkeys(_text_columns(file), pyarrow.string())
        schema = pyarrow.parquet.read_schema(file)
    except OSError as error:
        raise DataUnavailable(
            f"The file {file} cannot be read: {error.strerror or 'it is damaged'}."
        ) from None
    except pyarrow.ArrowException:
        raise InvalidData(f"The file {file} is not a complete Parquet file; it may be truncated.") from None
    _require_distinct(f"the file {file}", [name.strip() for name in schema.names])
    return _types(schema)


@dataclass(frozen=True)
class _FilePart(Part):
    """A file."""

    file: Path

    @property
    def place(self) -> str:
        """The file, the dataset or the stream."""
        return f"The file {self.file}"


class ParquetPart(_FilePart):
    """A Parquet file, which states its number of rows."""

    def count(self) -> int:
        """Return the number of rows."""
        return int(pyarrow.parquet.read_metadata(self.file).num_rows)

    def frames(self, columns: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:
        """Read the needed columns, about that many rows at once."""
        with pyarrow.parquet.ParquetFile(self.file) as content:
            names = {name.strip(): name for name in content.schema_arrow.names}
            for batch in content.iter_batches(rows, columns=[names[name] for name in columns]):
                yield as_frame(pyarrow.table(batch))


class TextPart(_FilePart):
    """A CSV or TSV file."""

    def frames(self, columns: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:
        """Read the needed columns, about that many rows at once."""
        for frame in _text_frames(self.file, _TEXT_BYTES):
            yield from _slices(frame[list(columns)], rows)


@dataclass(frozen=True, eq=False)
class FragmentPart(Part):
    """A fragment of a pyarrow dataset."""

    fragment: Any
    schema: pyarrow.Schema  # The schema of the dataset

    @property
    def place(self) -> str:
        """The file, the dataset or the stream."""
        path = getattr(self.fragment, "path", "")
        return f"The file {path}" if path else "The dataset"

    def count(self) -> int:
        """Return the number of rows."""
        return int(self.fragment.count_rows())

    def frames(self, columns: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:
        """Read the needed columns, about that many rows at once."""
        names = {field.name.strip(): field.name for field in self.schema}
        scanner = self.fragment.scanner(
            schema=self.schema, columns=[names[name] for name in columns], batch_size=rows, batch_readahead=2
        )
        for batch in scanner.to_batches():
            yield as_frame(pyarrow.table(batch))


@dataclass(frozen=True, eq=False)
class StreamPart(Part):
    """Record batches that can be read once."""

    batches: Iterator[Any]  # Record batches or tables of Arrow
    types: dict[str, pyarrow.DataType]  # The columns, from the first batch

    @classmethod
    def of(cls, source: Any) -> StreamPart:
        """Return a stream; the first batch of an iterator is read now."""
        if isinstance(source, pyarrow.RecordBatchReader):
            return cls(iter(source), _types(source.schema))
        first = _batch(next(source, None))
        return cls(chain([first], source), _types(first.schema))

    @property
    def place(self) -> str:
        """The file, the dataset or the stream."""
        return "The stream"

    def frames(self, columns: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:
        """Read the needed columns, about that many rows at once."""
        stated = dict(self.types)
        for number, batch in enumerate(map(_batch, self.batches), start=1):
            own = _types(batch.schema)
            _require_types(f"Batch {number} of the stream", own, stated, columns)
            stated = _stated_types([stated, own])
            for start in range(0, batch.num_rows, rows):
                yield as_frame(pyarrow.table(batch.slice(start, rows)))[list(columns)]


def _batch(given: Any) -> Any:
    """Return what an iterator yielded, if it is a batch of Arrow."""
    if not isinstance(given, pyarrow.RecordBatch | pyarrow.Table):
        raise InvalidInput("An iterator of rows must yield record batches or tables of Arrow.")
    return given


@dataclass(frozen=True, eq=False)
class FramePart(Part):
    """A table in memory."""

    frame: pd.DataFrame

    def count(self) -> int:
        """Return the number of rows."""
        return len(self.frame)

    def frames(self, columns: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:  # noqa: ARG002
        """Read the needed columns, about that many rows at once."""
        yield from _slices(self.frame, rows)


def _slices(frame: pd.DataFrame, rows: int) -> Iterator[pd.DataFrame]:
    """Yield consecutive rows of a frame, without copying them."""
    for start in range(0, len(frame), rows):
        yield frame.iloc[start : start + rows]

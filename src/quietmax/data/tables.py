"""The user's own tables: reading CSV, TSV, Parquet and NPZ files, and encoding them as declared.

Nothing is guessed from the records: every cell of a text file is a string, and a column of a Parquet file keeps
the Arrow type that the file declares, with its nulls.  `encoding` says how a cell of each type is read; what is a
number and what a category is declared, not detected.  The names and types of the columns count as public facts.
Errors are for the owner of the file: they name rows and columns, never a value.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quietmax._lazy import lazy_module
from quietmax.data.cells import as_numbers, as_strings, first_of, is_missing, is_valid_unicode
from quietmax.data.encoding import (
    BooleanColumn,
    CategoricalColumn,
    Column,
    DateColumn,
    Encoding,
    HashedColumn,
    NumericColumn,
    TextColumn,
    quoted,
    require_columns,
)
from quietmax.data.inference import (
    infer_classes,
    is_free_text,
    may_tell_people_apart,
    propose,
    with_proposals,
)
from quietmax.data.records import Records
from quietmax.data.schema import ANY_COLUMN, Schema
from quietmax.errors import DataUnavailable, InvalidData, InvalidInput, QuietmaxWarning

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet
else:
    pd = lazy_module("pandas")
    pyarrow = lazy_module("pyarrow")

SUFFIXES = (".csv", ".tsv", ".parquet", ".pq", ".npz")
_MAX_TEXT_BYTES = 2**31 - 2


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
    return isinstance(name, Path) or Path(name).suffix.lower() in SUFFIXES or "/" in name or "\\" in name


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
    file = _existing(path)
    suffix = file.suffix.lower()
    if suffix not in SUFFIXES:
        raise InvalidInput(f"The file {file} must end in one of {quoted(SUFFIXES)}, got '{file.suffix}'.")
    if file.stat().st_size == 0:
        raise InvalidData(f"The file {file} is empty.")
    try:
        if suffix == ".npz":
            table = _read_npz(file, features, label)
        elif suffix in (".parquet", ".pq"):
            table = RawTable(_read_parquet(file))
        else:
            table = _read_text(file, text_delimiters(file))
    except OSError as error:
        # Errors of the parsers may show cells. Those of the operating system have a strerror and show none.
        raise DataUnavailable(f"The file {file} cannot be read: {error.strerror or 'it is damaged'}.") from (
            error if error.strerror else None
        )
    if table.frame.empty:
        raise InvalidData(f"The file {file} has no records.")
    return table


def _read_text(file: Path, delimiters: Sequence[str]) -> RawTable:
    """Read a CSV or TSV file; every cell is a string.

    The delimiter is the one that a first line such as "sep=;" names, else the one that gives the longest header.
    Columns without a name are left out, whatever they hold.
    """
    try:
        return _parse_text(file, _text(file), delimiters)
    except UnicodeDecodeError:
        raise InvalidData(_not_utf_8(file)) from None


def _parse_text(file: Path, content: bytes, delimiters: Sequence[str]) -> RawTable:
    """Return the rows of a text in UTF-8 that begins with a header."""
    content, delimiters = _without_delimiter_line(content, delimiters)
    try:
        header, lines, delimiter = _longest_header(file, content, delimiters)
        columns = [name for name in header if name]
        _require_distinct(file, columns)
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
            return RawTable(pd.DataFrame())
        if "UTF8" in str(error):
            raise InvalidData(_not_utf_8(file)) from None
        row = re.search(r"Row #(\d+)", str(error))
        where = f"row {int(row[1]) - lines} (not counting the header)" if row else "some row"
        raise InvalidData(
            f"In the file {file}, {where} does not have as many fields as the header; the file may be truncated."
        ) from None
    if rows is not None and rows != table.num_rows:
        raise InvalidData(f"The quotes in the file {file} are ambiguous; a CSV writer must have written it.")
    return RawTable(table.select(columns).to_pandas(), unnamed=len(header) - len(columns))


def text_delimiters(file: Path) -> tuple[str, ...]:
    """Return the delimiters that a text file of this name may have."""
    return ("\t",) if file.suffix.lower() == ".tsv" else (",", ";", "\t")


def text_frames(file: Path, max_bytes: int) -> Iterator[pd.DataFrame]:
    """Read a CSV or TSV file part by part, as `read_table` reads it in one piece.

    Parts end where a record ends, so a cell is read alike whatever part it is in. A file in UTF-16 is one part.
    """
    delimiters = text_delimiters(file)
    try:
        with file.open("rb") as stream:
            content = stream.read(max(max_bytes, _HEADER_BYTES))
            if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # also that of UTF-32
                yield _read_text(file, delimiters).frame
                return
            content = content.removeprefix(codecs.BOM_UTF8)
            header, delimiter, _ = _text_header(file, content, delimiters)
            for part in _text_parts(content[len(header) :], stream, max_bytes, delimiter):
                yield _parse_text(file, header + part, delimiters).frame
    except UnicodeDecodeError:
        raise InvalidData(_not_utf_8(file)) from None


_HEADER_BYTES = 2**20


def text_columns(file: Path) -> list[str]:
    """Return the names of the columns of a CSV or TSV file; no row is read."""
    try:
        with file.open("rb") as stream:
            content = stream.read(_HEADER_BYTES)
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            content = _text(file)
        names = _text_header(file, content.removeprefix(codecs.BOM_UTF8), text_delimiters(file))[2]
    except (UnicodeDecodeError, csv.Error):
        raise InvalidData(_not_utf_8(file)) from None
    columns = [name for name in names if name]
    _require_distinct(file, columns)
    return columns


def _text_header(file: Path, content: bytes, delimiters: Sequence[str]) -> tuple[bytes, str, list[str]]:
    """Return the beginning of a text up to the end of its header, its delimiter, and the names in the header."""
    rest, delimiters = _without_delimiter_line(content, delimiters)
    names, lines, delimiter = _longest_header(file, rest, delimiters)
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
    border = b"[" + re.escape(delimiter.encode()) + b"\r\n]"
    opening = b'"(?<=' + border + b'")'
    closed = opening + b'[^"]*+(?:""[^"]*+)*+"(?=' + border + b")"
    end = 0
    for match in re.finditer(b"(" + closed + b")|(" + opening + b")|\r\n|\r|\n", b"\n" + text):
        if match[2]:
            break
        # A line feed may follow a carriage return at the very end.
        if not match[1] and not (match[0] == b"\r" and match.end() == len(text) + 1):
            end = match.end() - 1
    return end


def _without_delimiter_line(content: bytes, delimiters: Sequence[str]) -> tuple[bytes, Sequence[str]]:
    """Return a text without its first line, and the delimiter it names, if it names one."""
    named = _DELIMITER_LINE.match(content)
    return (content, delimiters) if named is None else (content[named.end() :], (named[1].decode(),))


_DELIMITER_LINE = re.compile(b'"?sep=([,;\t|])"?(?:\r\n|\r|\n)', re.IGNORECASE)
"""A first line with which spreadsheets name the delimiter."""


def _text(file: Path) -> bytes:
    """Return the content of a text file in UTF-8 without a byte-order mark; the mark of UTF-16 is understood."""
    too_large = f"The file {file} is larger than 2 GiB, the limit for text files; Parquet has none."
    if file.stat().st_size > _MAX_TEXT_BYTES:
        raise InvalidData(too_large)
    content = file.read_bytes()
    if content.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        content = content.decode("utf-32").encode()
    elif content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        content = content.decode("utf-16").encode()
    if len(content) > _MAX_TEXT_BYTES:
        raise InvalidData(too_large)
    return content.removeprefix(codecs.BOM_UTF8)


def _count_rows(file: Path, content: bytes, lines: int, delimiter: str) -> int:
    """Return the number of rows after the header of a file with quotes, and refuse a quoted field that does not end.

    Arrow reads an opening quote that nobody closes as one cell, which takes in all later rows without an error.
    """
    end = re.compile(b"\r\n|\r|\n")
    start = next((match.end() for match in islice(end.finditer(content), lines - 1, None)), len(content))
    border = b"[" + re.escape(delimiter.encode()) + b"\r\n]"
    opening = re.compile(b'"(?<=' + border + b'")')
    closed = re.compile(opening.pattern + b'[^"]*+(?:""[^"]*+)*+"(?=' + border + b")")
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
    _require_distinct(file, [name.strip() for name in content.schema.names])
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


def _require_distinct(file: Path, names: Sequence[str]) -> None:
    """Refuse a file in which two columns have the same name."""
    repeated = (
        sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    )
    if repeated:
        raise InvalidData(
            f"Column names must be different; the file {file} has several columns named {quoted(repeated)}."
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
    if len(set(names)) < len(names):
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise InvalidData(
            f"Column names must be different; the table has several columns named {quoted(repeated)}."
        )
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


def _existing(path: str | Path) -> Path:
    """Return the path of a file; raise if there is none."""
    file = Path(path).expanduser()
    if file.is_file():
        return file
    if file.is_dir():
        raise DataUnavailable(f"{file} is a folder; one of its files is required here.")
    raise DataUnavailable(f"The file {file} does not exist.")


def read_records(
    source: str | Path | Any, schema: Schema, *, infer: bool = False, features: str = "features"
) -> Records:
    """Read a table and encode it as the schema declares."""
    if not isinstance(source, str | Path):
        return encode_table(source, schema, infer=infer)
    label = schema.label
    if label is None and Path(source).suffix.lower() == ".npz":
        label = "labels"
    if label is None:
        file = _existing(source)
        raise InvalidInput(
            f"label must name the label column of {file}, here or in the schema file; "
            f"'quietmax schema draft {file}' proposes a schema."
        )
    table = read_table(source, features=features, label=label)
    return _encode(Path(source).stem, table, schema, label, infer=infer)


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
    frame, label = labelled_frame(table, schema, y)
    return _encode("table", RawTable(frame), schema, label, infer=infer)


def labelled_frame(table: Any, schema: Schema, y: Any = None) -> tuple[pd.DataFrame, str]:
    """Return a table as a frame that has its labels, and the name of the label column."""
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


def _encode(name: str, table: RawTable, schema: Schema, label: str, *, infer: bool) -> Records:
    """Encode a table: the one way from rows to records."""
    encoding = declared_encoding(table, schema, label, infer=infer)
    return encode_rows(table.frame, encoding, name, image_shape=table.image_shape)


def encode_rows(
    frame: pd.DataFrame,
    encoding: Encoding,
    name: str = "table",
    *,
    image_shape: tuple[int, int, int] | None = None,
) -> Records:
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
    return Records(name, features, labels, len(encoding.classes), image_shape, encoding, persons)


def declared_encoding(table: RawTable, schema: Schema, label: str, *, infer: bool) -> Encoding:
    """Return the encoding that the schema declares for a table."""
    check_declarations(table.frame, schema, label)
    if schema.confirm and not infer:
        raise InvalidInput(_unconfirmed_message(schema))
    unused = {label, schema.person, *schema.ignore}
    used = [str(name) for name in table.frame.columns if name not in unused]
    undeclared = [name for name in used if declared_column(name, table, schema) is None]
    if (undeclared or schema.classes is None) and not infer:
        text = [name for name in undeclared if is_free_text(table.frame[name])]
        raise InvalidInput(_undeclared_message(undeclared, text, label if schema.classes is None else None))
    if infer and schema.person is None:
        _warn_of_persons([*undeclared, *(name for name in schema.ignore if _is_unconfirmed(name, schema))])
    inferred = [f"what column '{name}' holds, and its bounds or categories" for name in undeclared]
    if schema.classes is None:
        inferred.append(f"the classes of label '{label}'")
    if schema.confirm:
        inferred.append(f"the lines of the schema that nobody has confirmed: {', '.join(schema.unconfirmed)}")
    completed = _infer(table.frame, schema, undeclared, label)
    check_declarations(table.frame, completed, label)
    used = [name for name in used if name not in completed.ignore]
    columns = [column for name in used if (column := declared_column(name, table, completed)) is not None]
    return Encoding(
        tuple(columns),
        label,
        completed.classes or (),
        tuple(inferred),
        crosses=schema.crosses,
        label_ignores_case=label in completed.ignore_case,
        person=schema.person,
        person_type=None if schema.person is None else person_type(table.frame, schema.person),
        person_ignores_case=schema.person in schema.ignore_case,
    )


_TYPE_KEYS = ("bounds", "categories", "dates", "booleans", "hashed", "text")
_REFINEMENTS = {
    "scales": ("bounds",),
    "edges": ("bounds",),
    "decimal": ("bounds",),
    "thousands": ("bounds",),
    "units": ("bounds",),
    "date_formats": ("dates",),
    "ignore_case": ("categories", "hashed"),
}
"""The keys that refine a declaration, and those that a column must be named in for it."""


def check_declarations(frame: pd.DataFrame, schema: Schema, label: str | None) -> None:
    """Refuse declarations about columns that do not exist, or that contradict each other."""
    keys = (*_TYPE_KEYS, *_REFINEMENTS, "complete", "missing_values")
    named = [name for key in keys for name in getattr(schema, key) if name != ANY_COLUMN]
    named += [name for name in schema.ignore if name]  # a column without a name is ignored anyway
    single = [name for name in (label, schema.person) if name is not None]
    require_columns(frame, [*single, *named, *(name for pair in schema.crosses for name in pair)])
    declared = [name for key in _TYPE_KEYS for name in getattr(schema, key)] + single
    twice = sorted({name for name in declared if declared.count(name) > 1})
    if twice:
        raise InvalidInput(
            f"Column '{twice[0]}' is declared more than once; only one of `label`, `person`, "
            f"{', '.join(f'`{key}`' for key in _TYPE_KEYS[:-1])} and `{_TYPE_KEYS[-1]}` may name it."
        )
    for key, kinds in _REFINEMENTS.items():
        others = {name for kind in _TYPE_KEYS if kind not in kinds for name in getattr(schema, kind)}
        wrong = sorted(others & set(getattr(schema, key)))
        if wrong:
            raise InvalidInput(
                f"Column '{wrong[0]}' is named in `{key}`, which is for columns in "
                f"{' or '.join(f'`{kind}`' for kind in kinds)} only."
            )


def _is_unconfirmed(name: str, schema: Schema) -> bool:
    """Return whether nobody has confirmed that a column is ignored."""
    named = schema.confirm.get("ignore", ())
    return not isinstance(named, str) and name in named


def _warn_of_persons(columns: Sequence[str]) -> None:
    """Warn if the names of columns about which the owner said nothing say that they may tell people apart."""
    found = [name for name in columns if may_tell_people_apart(name)]
    if found:
        warnings.warn(
            f"{quoted(found, limit=20)}: the name says that this may tell whose row a row is, but no `person` column "
            "is named. The guarantee is for one record, so a person with several rows is protected less. If one person "
            f"can have several rows, name the column: person='{found[0]}'.",
            QuietmaxWarning,
            stacklevel=2,
        )


def _unconfirmed_message(schema: Schema) -> str:
    """Return what the owner must still confirm, and how."""
    facts = schema.unconfirmed
    more = f" and {len(facts) - 20} more" if len(facts) > 20 else ""
    return (
        f"The schema is a draft; nobody has confirmed {', '.join(facts[:20])}{more}. Check each of them and delete its "
        "line under [confirm], or load the table with `infer` to train with the draft, which reveals something about "
        "the records: guarantees are then conditional."
    )


def _undeclared_message(columns: list[str], text: list[str], label: str | None) -> str:
    """Return what must be declared, and where."""
    needed = []
    if columns:
        needed.append(
            "`bounds` or `categories` (or `dates`, `booleans`, `hashed`, `text`, `ignore`) for "
            f"{quoted(columns, limit=20)}"
        )
    if label is not None:
        needed.append(f"`classes` for the label '{label}'")
    hint = ""
    if text:
        hint = (
            f" {quoted(text, limit=20)}: this seems to be free text; name it in `text` or `ignore` (`hashed` is for "
            "short strings)."
        )
    return (
        f"The table needs {', and '.join(needed)}, given here or in a schema file (by default the .toml file of "
        "the same name beside the table). The command 'quietmax schema draft' proposes such a file. `infer` reads "
        "them from the records instead, which reveals something about the records: guarantees are then conditional."
        f"{hint}"
    )


def declared_column(name: str, table: RawTable, schema: Schema) -> Column | None:
    """Return a column as declared."""
    missing = not table.complete and not {name, ANY_COLUMN} & set(schema.complete)
    values, ignore_case = schema.missing_values.get(name, ()), name in schema.ignore_case
    if name in schema.categories:
        return CategoricalColumn(
            name, schema.categories[name], missing=missing, ignore_case=ignore_case, missing_values=values
        )
    if name in schema.booleans:
        return BooleanColumn(name, missing, values)
    if name in schema.dates:
        return DateColumn(name, *schema.dates[name], schema.date_formats.get(name), missing, values)
    if name in schema.hashed:
        return HashedColumn(name, schema.hashed[name], missing, ignore_case, values)
    if name in schema.text:
        return TextColumn(name, missing, values)
    bounds = schema.bounds.get(name, schema.bounds.get(ANY_COLUMN, table.type_bounds))
    if bounds is None:
        return None
    return NumericColumn(
        name,
        *bounds,
        scale=schema.scales.get(name, "linear"),
        edges=schema.edges.get(name, ()),
        missing=missing,
        decimal=schema.decimal.get(name, "."),
        thousands=schema.thousands.get(name, ""),
        missing_values=values,
        unit=schema.units.get(name, ""),
    )


def _infer(frame: pd.DataFrame, schema: Schema, columns: list[str], label: str) -> Schema:
    """Return the schema with the named columns, and classes that are not declared, read from the records."""
    completed = with_proposals(schema, {name: propose(name, frame[name]) for name in columns})
    if schema.classes is not None:
        return completed
    strings = as_strings(frame[label])
    classes, ignore_case = infer_classes(strings[~is_missing(strings)])
    if len(classes) < 2:
        raise InvalidData("All records are of one class; training needs at least two.")
    folded = (*completed.ignore_case, label) if ignore_case else completed.ignore_case
    return replace(completed, classes=classes, ignore_case=folded)


NO_PERSON = "Give each such row a value of its own, or delete it."
"""The way out where rows have no person."""


def person_names(frame: pd.DataFrame, person: str, *, ignore_case: bool = False) -> NDArray[np.object_]:
    """Return the person of every row, as a string."""
    require_columns(frame, [person])
    names = as_strings(frame[person])
    absent = np.flatnonzero(is_missing(names))
    if absent.size:
        raise InvalidData(f"{first_of(absent)} has no value in the `person` column '{person}'. {NO_PERSON}")
    damaged = np.flatnonzero(~is_valid_unicode(names))
    if damaged.size:
        raise InvalidData(
            f"{first_of(damaged)} has a string that is not valid Unicode in the `person` column '{person}'."
        )
    return np.array([name.casefold() for name in names], dtype=object) if ignore_case else names


def person_type(frame: pd.DataFrame, person: str) -> str:
    """Return the type of the column that tells people apart.

    A customer whom a file calls 00007 is called 7 in a column of integers.  So the people of two tables can be
    compared only if the column has the same type in both.
    """
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
    found = person_type(frame, encoding.person)
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

"""Rows of a table that are read and encoded part by part: from a frame, from files, from a dataset or from a stream.

The encoding follows from the schema and from the names and types of the columns. All files must agree in the columns
that it uses, so a row is encoded alike whatever file and part it is in (THEORY 3.8). Errors name the file, and never
show a value.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from quietmax._lazy import lazy_module
from quietmax.data.encoding import Encoding, quoted
from quietmax.data.records import Holdout, Records, is_held_out
from quietmax.data.schema import Schema
from quietmax.data.tables import (
    RawTable,
    as_frame,
    declared_encoding,
    encode_rows,
    labelled_frame,
    require_person_type,
    text_columns,
    text_frames,
)
from quietmax.errors import DataUnavailable, InvalidData, InvalidInput

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow
    import pyarrow.dataset
    import pyarrow.parquet
else:
    pd = lazy_module("pandas")
    pyarrow = lazy_module("pyarrow")

FILE_SUFFIXES = (".parquet", ".pq", ".csv", ".tsv")
_TEXT_SUFFIXES = (".csv", ".tsv")
_TEXT_BYTES = 2**23
_NUMBERS_AT_ONCE = 2**22
"""About this many numbers are encoded at once."""
_MOST_ROWS_AT_ONCE = 2**16

Converted = TypeVar("Converted")


class Part(Protocol):
    """Rows that are read in one go, by one worker."""

    @property
    def place(self) -> str:
        """Where the rows are, as the beginning of a sentence; empty for a frame."""
        ...

    def count(self) -> int | None:
        """Return the number of rows; None if it is not known before they are read."""
        ...

    def frames(self, columns: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:
        """Read the rows."""
        ...


@dataclass(frozen=True, eq=False)
class TableRows:
    """The rows of a table, which are encoded while they are read."""

    name: str  # Name of the table
    encoding: Encoding  # The public encoding, the same for all parts
    parts: tuple[Part, ...]  # Where the rows are
    in_memory: bool  # Whether the rows are in memory before they are read
    holdout: Holdout | None = None  # How persons are held out of training; None if nobody is
    held_out: bool = False  # Whether these are the rows of the persons who are held out

    @property
    def train(self) -> TableRows:
        """The rows of all persons who are not held out."""
        return replace(self, held_out=False)

    @property
    def test(self) -> TableRows:
        """The rows of the persons who are held out."""
        return replace(self, held_out=True)

    def count(self) -> int | None:
        """Return the number of rows, those of both sides of a holdout included."""
        total = 0
        for part in self.parts:
            with _errors_of(part):
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
        encoding = self.encoding
        height = rows or rows_at_once(len(encoding.feature_names))
        for records in converted_frames(
            part, _used_columns(encoding), height, lambda frame: encode_rows(frame, encoding, self.name)
        ):
            if self.holdout is not None and self.holdout.share > 0:
                chosen = is_held_out(records, self.holdout) == self.held_out
                records = replace(records.take(chosen), holdout=self.holdout)
            if len(records):
                yield records


def rows_at_once(columns: int) -> int:
    """Return how many rows of encoded or mapped numbers are held at once, so that they take little memory."""
    return max(64, min(_NUMBERS_AT_ONCE // max(columns, 1), _MOST_ROWS_AT_ONCE))


def converted_frames(
    part: Part, columns: Sequence[str], rows: int, convert: Callable[[pd.DataFrame], Converted]
) -> Iterator[Converted]:
    """Read the rows of one part, and convert them frame by frame."""
    frames, first = part.frames(columns, rows), 0
    while True:
        with _errors_of(part, first):
            frame = next(frames, None)
            if frame is None:
                return
            made = convert(frame)
        first += len(frame)
        yield made


@contextmanager
def _errors_of(part: Part, first: int = 0) -> Iterator[None]:
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


def _used_columns(encoding: Encoding) -> list[str]:
    """Return the columns that an encoding needs."""
    names = [*(column.name for column in encoding.columns), encoding.label]
    return names if encoding.person is None else [*names, encoding.person]


def table_rows(
    source: Any, schema: Schema, *, y: Any = None, holdout: float = 0.0, seed: int = 0
) -> TableRows:
    """Return the rows of a table, which are encoded as the schema declares while they are read."""
    rule = Holdout(holdout, seed) if holdout else None
    if y is not None and is_source(source):
        raise InvalidInput("Files, datasets and streams must have a label column: leave out `y`.")
    if is_source(source):
        return _rows_of(*_parts(source), schema, rule)
    frame, label = labelled_frame(source, schema, y)
    encoding = declared_encoding(RawTable(frame), schema, label, infer=False)
    return TableRows("table", encoding, (FramePart(frame),), in_memory=True, holdout=rule)


def encoded_rows(source: Any, encoding: Encoding) -> TableRows:
    """Return the rows of files, a dataset or a stream, which are encoded like those of an earlier table."""
    name, parts, types = _parts(source)
    stated, used = _stated_types(types), _used_columns(encoding)
    _require_columns(parts[0].place, stated, used)
    try:
        require_person_type(_empty_frame(stated), encoding)
    except InvalidInput as error:
        raise _placed(error, parts[0].place, 0) from None
    _require_alike(parts, types, stated, used)
    return TableRows(name, encoding, tuple(parts), in_memory=False)


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


def _parts(source: Any) -> tuple[str, Sequence[Part], Sequence[Mapping[str, pyarrow.DataType]]]:
    """Return the name of a source, its parts, and the columns of each part with their types."""
    if isinstance(source, str | Path):
        files = _files(source)
        named = [part for part in Path(source).expanduser().parts if not glob.has_magic(part)]
        return (
            Path(named[-1]).stem if named else "table",
            [_file_part(file) for file in files],
            [_file_types(file) for file in files],
        )
    if isinstance(source, pyarrow.dataset.Dataset):
        fragments = _fragments(source)
        return "dataset", fragments, [_fragment_types(fragment) for fragment in fragments]
    stream = StreamPart.of(source)
    return "stream", [stream], [stream.types]


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
    formats = {getattr(part.fragment.format, "default_extname", "") for part in parts if part.is_file}
    if formats & {"csv", "json"}:
        raise InvalidInput(
            "Arrow guesses the types of a dataset of CSV or JSON files from some of its rows, so one row could change "
            "how the others are read. Give the folder of the CSV files itself, or Parquet files."
        )
    return parts


def _fragment_types(part: FragmentPart) -> dict[str, pyarrow.DataType]:
    """Return those columns of a dataset that one of its files has; Arrow would fill in the others with nulls."""
    with _errors_of(part):
        own = {
            *part.fragment.physical_schema.names,
            *pyarrow.dataset.get_partition_keys(part.fragment.partition_expression),
        }
    return _types(pyarrow.schema(field for field in part.schema if field.name in own))


def _rows_of(
    name: str,
    parts: Sequence[Part],
    types: Sequence[Mapping[str, pyarrow.DataType]],
    schema: Schema,
    holdout: Holdout | None,
) -> TableRows:
    """Return the rows of parts whose columns have these types."""
    if schema.label is None:
        raise InvalidInput("The schema's label must name the label column of the files.")
    stated = _stated_types(types)
    try:
        encoding = declared_encoding(RawTable(_empty_frame(stated)), schema, schema.label, infer=False)
    except InvalidInput as error:
        raise _placed(error, parts[0].place, 0) from None
    _require_alike(parts, types, stated, _used_columns(encoding))
    return TableRows(name, encoding, tuple(parts), in_memory=False, holdout=holdout)


def _stated_types(types: Sequence[Mapping[str, pyarrow.DataType]]) -> dict[str, pyarrow.DataType]:
    """Return the columns of the first part. A column without values may have the type null; the next part decides."""
    stated = dict(types[0])
    for name, kind in stated.items():
        if pyarrow.types.is_null(kind):
            others = (own[name] for own in types if name in own)
            stated[name] = next((each for each in others if not pyarrow.types.is_null(each)), kind)
    return stated


def _require_alike(
    parts: Sequence[Part],
    types: Sequence[Mapping[str, pyarrow.DataType]],
    stated: Mapping[str, pyarrow.DataType],
    used: Sequence[str],
) -> None:
    """Refuse files that differ in their columns."""
    for part, own in zip(parts[1:], types[1:], strict=True):
        _require_types(part.place, own, stated, used)


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


def _empty_frame(types: Mapping[str, pyarrow.DataType]) -> pd.DataFrame:
    return as_frame(pyarrow.schema(list(types.items())).empty_table())


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
            return dict.fromkeys(text_columns(file), pyarrow.string())
        schema = pyarrow.parquet.read_schema(file)
    except OSError as error:
        raise DataUnavailable(
            f"The file {file} cannot be read: {error.strerror or 'it is damaged'}."
        ) from None
    except pyarrow.ArrowException:
        raise InvalidData(f"The file {file} is not a complete Parquet file; it may be truncated.") from None
    types = _types(schema)
    if len(types) < len(schema.names):
        raise InvalidData(f"Column names must be different; the file {file} has several columns of one name.")
    return types


@dataclass(frozen=True)
class ParquetPart:
    """A Parquet file."""

    file: Path  # The file

    @property
    def place(self) -> str:
        """The file, as the beginning of a sentence."""
        return f"The file {self.file}"

    def count(self) -> int:
        """Return the number of rows, which the file states."""
        return int(pyarrow.parquet.read_metadata(self.file).num_rows)

    def frames(self, columns: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:
        """Read the needed ``columns``, about that many ``rows`` at once."""
        with pyarrow.parquet.ParquetFile(self.file) as content:
            names = {name.strip(): name for name in content.schema_arrow.names}
            for batch in content.iter_batches(rows, columns=[names[name] for name in columns]):
                yield as_frame(pyarrow.table(batch))


@dataclass(frozen=True)
class TextPart:
    """A CSV or TSV file."""

    file: Path  # The file

    @property
    def place(self) -> str:
        """The file, as the beginning of a sentence."""
        return f"The file {self.file}"

    def count(self) -> None:
        """Return None: a text file does not state its number of rows."""

    def frames(self, columns: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:
        """Read the needed ``columns``, at most that many ``rows`` at once."""
        for frame in text_frames(self.file, _TEXT_BYTES):
            yield from _slices(frame[list(columns)], rows)


@dataclass(frozen=True, eq=False)
class FragmentPart:
    """A fragment of a pyarrow dataset."""

    fragment: Any  # The fragment
    schema: pyarrow.Schema  # The schema of the dataset

    @property
    def is_file(self) -> bool:
        """Whether the rows are in a file."""
        return hasattr(self.fragment, "path")

    @property
    def place(self) -> str:
        """The file of the fragment, as the beginning of a sentence."""
        path = getattr(self.fragment, "path", "")
        return f"The file {path}" if path else "The dataset"

    def count(self) -> int:
        """Return the number of rows."""
        return int(self.fragment.count_rows())

    def frames(self, columns: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:
        """Read the needed ``columns``, at most that many ``rows`` at once."""
        names = {field.name.strip(): field.name for field in self.schema}
        scanner = self.fragment.scanner(
            schema=self.schema, columns=[names[name] for name in columns], batch_size=rows, batch_readahead=2
        )
        for batch in scanner.to_batches():
            yield as_frame(pyarrow.table(batch))


@dataclass(frozen=True, eq=False)
class StreamPart:
    """Record batches that can be read once."""

    batches: Iterator[Any]  # Record batches or tables of Arrow, or frames
    types: dict[str, pyarrow.DataType]  # The columns, from the first batch

    @classmethod
    def of(cls, source: Any) -> StreamPart:
        """Return a stream; the first batch of an iterator is read now."""
        if isinstance(source, pyarrow.RecordBatchReader):
            return cls(iter(source), _types(source.schema))
        first = next(source, None)
        if not isinstance(first, pyarrow.RecordBatch | pyarrow.Table):
            raise InvalidInput("An iterator of rows must yield record batches or tables of Arrow.")

        def all_batches() -> Iterator[Any]:
            yield first
            yield from source

        return cls(all_batches(), _types(first.schema))

    @property
    def place(self) -> str:
        """The stream, as the beginning of a sentence."""
        return "The stream"

    def count(self) -> None:
        """Return None: a stream ends when it ends."""

    def frames(self, columns: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:
        """Read the needed ``columns``, at most that many ``rows`` at once."""
        stated = dict(self.types)
        for number, batch in enumerate(self.batches, start=1):
            if not isinstance(batch, pyarrow.RecordBatch | pyarrow.Table):
                raise InvalidInput("An iterator of rows must yield record batches or tables of Arrow.")
            own = _types(batch.schema)
            _require_types(f"Batch {number} of the stream", own, stated, columns)
            stated = _stated_types([stated, own])
            for start in range(0, batch.num_rows, rows):
                yield as_frame(pyarrow.table(batch.slice(start, rows)))[list(columns)]


@dataclass(frozen=True, eq=False)
class FramePart:
    """A table in memory."""

    frame: pd.DataFrame  # The rows

    @property
    def place(self) -> str:
        """Nothing: there is only one table."""
        return ""

    def count(self) -> int:
        """Return the number of rows."""
        return len(self.frame)

    def frames(self, columns: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:
        """Return the rows, at most that many ``rows`` at once."""
        del columns
        yield from _slices(self.frame, rows)


def _slices(frame: pd.DataFrame, rows: int) -> Iterator[pd.DataFrame]:
    """Yield consecutive rows of a frame, without copying them."""
    for start in range(0, len(frame), rows):
        yield frame.iloc[start : start + rows]

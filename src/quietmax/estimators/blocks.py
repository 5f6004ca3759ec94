"""Rows of a training set in blocks: in memory, or on disk where there are too many of them.

A training reads its rows through two operations. `sum` adds up what a function returns for every block, and `update`
replaces every block by what a function makes of it. What a row contributes depends on that row, on the number of rows
of its person and on public numbers alone, and contributions are added as integers (`exact_sums`). So neither the
borders of the blocks nor the order of the rows nor the place of a block changes a bit of the result (THEORY 3.11).
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import secrets
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from quietmax import __version__
from quietmax._io import atomic_write
from quietmax._lazy import lazy_module
from quietmax._threads import parallel_map, thread_count
from quietmax.data.cohorts import person_digests
from quietmax.data.sources import ParquetPart, Part, TextPart
from quietmax.data.tables import TableRows
from quietmax.errors import DataUnavailable, InvalidInput

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]
Progress = Callable[[int, int], None]
"""Takes what is done and the total, both in rows times passes."""

ROWS_AT_ONCE = 512
EXACT_ROWS = 4096
"""Clipped gradients of at most this many rows sum to less than 2^53 units of 2^-40."""
MAX_BLOCK_ROWS = 2**20
"""A block has at most this many rows: the sum of their contributions fits into 63 bits."""
CHUNKS_PER_BLOCK = 256
"""A block has at most this many chunks of `_chunk_rows` rows."""
BLOCK_BYTES = 2**25
"""A block has about this many bytes of rows, if this is more than `ROWS_AT_ONCE` rows."""
FILES_IN_MEMORY = 2**29
"""Blocks of rows that come from files are kept in memory up to this many bytes by default."""
_CACHED = 2**19
"""About this many numbers are held in float64 at once: they fit into a processor's cache."""
_NOT_RESUMED = "`resume` requires a head that is trained on files of this machine."
_BESIDE_BYTES = 32
"""For a label, the number of rows of a person, and a digest of the person."""
_PERSONS_AT_ONCE = 2**22
"""Persons are counted in ranges of digests, so that about this many rows are looked at together."""

_person_digests = person_digests

Sum = TypeVar("Sum")


class Summed(Protocol):
    """Rows that a function can be summed over: a table, blocks, or a batch of DP-SGD."""

    def sum(self, work: Callable[[Table], Sum]) -> Sum:
        """Add up what a function returns for parts of the rows."""


@dataclass(frozen=True, eq=False)
class Table:
    """Rows in memory: one block, or a whole table that is not large."""

    rows: NDArray[Any]  # Encoded records; in training rows on the grid, of length at most 1
    labels: Labels  # Class indices
    classes: int  # Number of classes
    repeats: Labels | None = None  # How many rows the person of each row has
    persons: NDArray[np.bytes_] | None = None  # A digest of the person of each row
    lengths: NDArray[np.float32] | None = None  # At least the length of what each row of cells stands for

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def features(self) -> int:
        """The number of features, in training with the constant one."""
        return int(self.rows.shape[1])

    @cached_property
    def shares(self) -> Floats | None:
        """What every row counts: 1/k if its person has k rows. None if all count 1."""
        return None if self.repeats is None else 1.0 / self.repeats

    @property
    def units(self) -> int:
        """The number of persons, or of records if there are no persons."""
        return len(self.rows) if self.shares is None else round(float(self.shares.sum()))

    @property
    def _nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays().values())

    def take(self, part: slice) -> Table:
        """Return consecutive rows, without copying them."""
        return Table(classes=self.classes, **{name: array[part] for name, array in self._arrays().items()})

    def pieces(self, count: int) -> list[Table]:
        """Divide the rows into consecutive parts of about equal length."""
        most = min(MAX_BLOCK_ROWS, CHUNKS_PER_BLOCK * _chunk_rows(self.features))
        count = max(1, min(count, len(self) // ROWS_AT_ONCE), -(-len(self) // most))
        edges = [len(self) * piece // count for piece in range(count + 1)]
        return [self.take(slice(start, stop)) for start, stop in itertools.pairwise(edges)]

    def _in_blocks(self, columns: int) -> list[Table]:
        return self.pieces(-(-len(self) // _block_rows(columns)))

    def chunks(self) -> Iterator[tuple[torch.Tensor, slice]]:
        """Iterate over chunks of rows."""
        height = _chunk_rows(self.features)
        buffer = torch.empty((min(height, len(self)), self.features), dtype=torch.float64)
        for start in range(0, len(self), height):
            part = slice(start, min(start + height, len(self)))
            rows = buffer[: part.stop - start]
            rows.copy_(torch.from_numpy(self.rows[part]))
            yield rows, part

    def sum(self, work: Callable[[Table], Sum]) -> Sum:
        """Add up what a function returns for parts of the table, on all threads; see `Blocks.sum`."""
        return _sum([self], work)

    def _load(self) -> Table:
        return self

    def _arrays(self) -> dict[str, NDArray[Any]]:
        named = {name: getattr(self, name) for name in _ARRAYS}
        return {name: array for name, array in named.items() if array is not None}


_ARRAYS = ("rows", "labels", "repeats", "persons", "lengths")


def _chunk_rows(features: int) -> int:
    return min(max(_CACHED // max(features, 1) // 8 * 8, 16), EXACT_ROWS)


def _block_rows(columns: int) -> int:
    most = min(MAX_BLOCK_ROWS, CHUNKS_PER_BLOCK * _chunk_rows(columns))
    return min(most, max(BLOCK_BYTES // (4 * columns), ROWS_AT_ONCE))


@dataclass(frozen=True)
class LocalEngine:
    """Trains in this process: blocks in memory and, beyond a limit, in a temporary folder.

    Parameters
    ----------
    max_memory : int, optional
        Blocks are kept in memory up to this many bytes; the others are written to files. By default 512 MiB for rows
        that come from files, and no limit for rows that are in memory already.
    cache_dir : str or Path, optional
        Where the temporary folder is made; by default where the operating system puts temporary files. It needs as
        many bytes as the rows: 4 for every feature. The files are readable by the owner alone and removed at the end,
        also after an error.
    progress : callable, optional
        Called with what is done and the total, in rows times passes.
    report : callable, optional
        Called with a sentence that says where files are written and how large they become, before they are.
    resume : bool
        Whether a training that was interrupted can be continued. The encoded rows of files then stay in a folder in
        ``cache_dir``, and the next training on the same files and schema does not read those files again. The folder
        is removed when a training ends well. **It holds the private rows**; only its owner can read it. No noise and
        nothing that was released is stored, so every training draws its own noise.

    Examples
    --------
    >>> LocalEngine(max_memory=2**28).max_memory
    268435456
    """

    max_memory: int | None = None
    cache_dir: str | Path | None = None
    progress: Progress | None = None
    report: Callable[[str], None] | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        if self.max_memory is not None and not (
            isinstance(self.max_memory, Integral) and self.max_memory >= 0
        ):
            raise InvalidInput(f"max_memory must be a number of bytes, at least 0, got {self.max_memory!r}.")
        if self.resume and self.cache_dir is None:
            raise InvalidInput("`resume` requires a `cache_dir`, in which the encoded rows stay.")


class Blocks:
    """The rows of a training set in blocks."""

    def __init__(
        self, classes: int, engine: LocalEngine | None = None, max_memory: int | None = None
    ) -> None:
        self.classes = classes
        self.engine = engine or LocalEngine()
        self._limit = max_memory if self.engine.max_memory is None else self.engine.max_memory
        self._blocks: list[Table | _StoredTable] = []
        self._folder: Path | None = None
        self._remove_folder: Callable[[], object] | None = None
        self._encoded: _EncodedRows | None = None
        self._numbers = itertools.count()
        self._in_memory = 0
        self._persons: int | None = None
        self._reported = False
        self._done = self._total = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Blocks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._encoded is not None:
            self._encoded._remove()
        self.close()

    def close(self) -> None:
        """Drop all rows, and remove the temporary folder."""
        self._blocks.clear()
        if self._remove_folder is not None:
            self._remove_folder()
        self._folder = self._remove_folder = None
        if self._encoded is not None:
            self._encoded._close()
            self._encoded = None

    def __len__(self) -> int:
        return sum(len(block) for block in self._blocks)

    @property
    def features(self) -> int:
        """Numbers per row."""
        return self._blocks[0].features

    @property
    def repeated(self) -> bool:
        """Whether the unit is a person with several rows."""
        return self._persons is not None

    @property
    def units(self) -> int:
        """The number of persons, or of rows if there are no persons."""
        return len(self) if self._persons is None else self._persons

    def expect(self, passes: float, rows: int | None = None) -> None:
        """Announce how many passes over the rows are left; progress is reported from then on."""
        self._total = self._done + max(1, round(passes)) * (len(self) if rows is None else rows)

    def advance(self, rows: int) -> None:
        """Report that some more rows are done."""
        if self.engine.progress is None or self._total == 0:
            return
        with self._lock:
            self._done += rows
            self._total = max(self._total, self._done)
            self.engine.progress(self._done, self._total)

    def _reserve(self, rows: int | None, columns: int) -> None:
        """Report how many bytes of files the rows will need; raise `DataUnavailable` if the disk has fewer."""
        if self._limit is None or rows is None:
            return
        limit = 0 if self.engine.resume else self._limit
        needed = rows * (4 * columns + _BESIDE_BYTES) - limit
        if needed <= 0:
            return
        place = self._place()
        try:
            free = shutil.disk_usage(place).free
        except OSError as error:
            raise _no_folder(place, error) from error
        free += sum(
            block._nbytes
            for block in self._blocks
            if isinstance(block, _StoredTable) and block.files["rows"].parent == self._folder
        )
        if needed > free:
            raise DataUnavailable(
                f"The rows need {needed / 1e9:.1f} GB of files in {place}, which has {free / 1e9:.1f} GB free. "
                "`cache_dir` can name another place, and a larger `max_memory` keeps more rows in memory."
            )
        self._report(f"The rows need up to {needed / 1e9:.1f} GB of temporary files in {place}.")

    def read(self, source: TableRows, key: bytes) -> None:
        """Read and encode the rows of a table, part by part."""
        if not self.engine.resume:
            self.extend(_tables_of(source, key, self.classes))
            return
        self._encoded = encoded = _EncodedRows(self._place(), source)
        self._report(
            f"The encoded rows, which are private, stay in {encoded.folder} until a training on the same files ends "
            "well."
        )
        for part in source.parts:
            blocks = encoded._blocks(part, self.classes)
            if blocks is None:
                own = _tables_of(replace(source, parts=(part,)), encoded.key, self.classes)
                blocks = encoded._write(part, _in_blocks(own))
            for block in blocks:
                self._blocks.append(block)
                self.advance(len(block))

    def extend(self, tables: Iterable[Table]) -> None:
        """Append rows, in blocks of a suitable size."""
        if self.engine.resume:
            raise InvalidInput(_NOT_RESUMED)
        for block in _in_blocks(tables):
            self._blocks.append(self._kept(block))
            self.advance(len(block))

    def sum(self, work: Callable[[Table], Sum]) -> Sum:
        """Add up what a function returns for every block."""
        return _sum(self._blocks, work, self.advance)

    def update(self, function: Callable[[Table], Table | Iterable[Table]]) -> None:
        """Replace every block by what a function makes of it, one after the other."""
        old, self._blocks = self._blocks, []
        old.reverse()
        while old:
            kept = old.pop()
            table = kept._load()
            made = function(table)
            rows = len(table)
            if isinstance(kept, Table):
                self._in_memory -= kept._nbytes
            else:
                self._remove(kept.files.values())
            del table, kept
            for block in [made] if isinstance(made, Table) else made:
                self._blocks.append(self._kept(block))
            del made
            self.advance(rows)

    def _rows_at(self, numbers: Labels) -> NDArray[Any]:
        starts = np.cumsum([0, *map(len, self._blocks)])
        places = np.searchsorted(starts, numbers, side="right") - 1
        rows: NDArray[Any] = np.empty((len(numbers), self.features), np.float32)
        for place in np.unique(places):
            chosen = places == place
            rows[chosen] = self._blocks[place]._load().rows[numbers[chosen] - starts[place]]
        self.advance(len(numbers))
        return rows

    def slices(self, parts: Sequence[slice]) -> Table:
        """Return consecutive rows of every block as one table in memory."""
        taken = (block._load().take(part) for block, part in zip(self._blocks, parts, strict=True))
        return joined([replace(table, persons=None) for table in taken])

    def beside(self, name: str) -> NDArray[Any]:
        """Return the labels or persons of all rows."""
        return np.concatenate([getattr(block._load(), name) for block in self._blocks])

    # --- Persons

    def _count_persons(self) -> None:
        """Count the rows of each person, over all blocks, range by range; sets `repeats`, and drops the digests."""
        persons = 0
        for first, last in self._person_ranges():
            counts = self._sum_labels(partial(_PersonCounts._of, first=first, last=last))
            persons += len(counts.digests)
            self._update_labels(partial(counts._assigned, first=first, last=last))
        self._drop_persons()
        self._persons = persons

    def _drop_persons(self) -> None:
        self._update_labels(partial(replace, persons=None))

    def _distinct_persons(self) -> int:
        return sum(
            len(self._sum_labels(partial(_PersonCounts._of, first=first, last=last)).digests)
            for first, last in self._person_ranges()
        )

    def _person_ranges(self) -> Iterator[tuple[int, int]]:
        """Return ranges of the first 16 bits of digests, so that the persons of one range take little memory."""
        ranges = min(-(-len(self) // _PERSONS_AT_ONCE), 2**16)
        return itertools.pairwise(2**16 * number // ranges for number in range(ranges + 1))

    def _sum_labels(self, work: Callable[[Table], Sum]) -> Sum:
        """Add up what a function returns for every block, of which it does not read the rows."""
        return _sum(self._blocks, work)

    def _update_labels(self, function: Callable[[Table], Table]) -> None:
        """Replace what is known of every row besides the row itself."""
        for number, block in enumerate(self._blocks):
            made = function(block._load())
            if isinstance(block, Table):
                self._in_memory += made._nbytes - block._nbytes
                self._blocks[number] = made
            else:
                self._blocks[number] = block._with_labels(made, self._new_file())
                self._remove(path for name, path in block.files.items() if name != "rows")

    # --- Files

    def _kept(self, table: Table) -> Table | _StoredTable:
        if self._limit is None or self._in_memory + table._nbytes <= self._limit:
            self._in_memory += table._nbytes
            return table
        return _StoredTable._write(table, self._new_file())

    def _remove(self, files: Iterable[Path]) -> None:
        """Remove temporary files; encoded rows of `resume` stay."""
        for file in files:
            if file.parent == self._folder:
                file.unlink()

    def _new_file(self) -> Path:
        if self._folder is None:
            place = self._place()
            try:
                self._folder = Path(tempfile.mkdtemp(prefix="quietmax-rows-", dir=place))
                # Also if Ctrl-C comes before anybody who would call `close` has these blocks.
                self._remove_folder = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            except OSError as error:
                raise _no_folder(place, error) from error
            if not self._reported:
                self._report(f"Rows that do not fit into memory go to temporary files in {place}.")
        return self._folder / str(next(self._numbers))

    def _place(self) -> Path:
        return Path(self.engine.cache_dir or tempfile.gettempdir()).expanduser()

    def _report(self, sentence: str) -> None:
        self._reported = True
        if self.engine.report is not None:
            self.engine.report(sentence)


def joined(tables: Sequence[Table]) -> Table:
    """Return tables of the same columns as one."""
    arrays = [table._arrays() for table in tables]
    return Table(
        classes=tables[0].classes,
        **{name: np.concatenate([each[name] for each in arrays]) for name in arrays[0]},
    )


def _in_blocks(tables: Iterable[Table]) -> Iterator[Table]:
    waiting: list[Table] = []
    count = 0
    for table in tables:
        height = _block_rows(table.features)
        for start in range(0, len(table), height):
            waiting.append(table.take(slice(start, start + height)))
            count += len(waiting[-1])
            if count >= height:
                yield from _cut(waiting)
                waiting, count = [], 0
    if waiting:
        yield from _cut(waiting)


def _cut(tables: list[Table]) -> Iterator[Table]:
    table = tables[0] if len(tables) == 1 else joined(tables)
    for start in range(0, len(table), most := _block_rows(table.features)):
        yield table.take(slice(start, start + most))


def _tables_of(source: TableRows, key: bytes, classes: int) -> Iterator[Table]:
    for records in source.records():
        persons = None if records.persons is None else _person_digests(records.persons, key)
        yield Table(records.features, records.labels, classes, persons=persons)


def _no_folder(place: Path, error: OSError) -> DataUnavailable:
    return DataUnavailable(f"No temporary folder can be made in {place}: {error.strerror}.")


@dataclass(frozen=True)
class _StoredTable:
    """A block in files, one for each array. They are mapped into memory: what is not needed is not read."""

    files: Mapping[str, Path]
    types: Mapping[str, str]  # The type of the numbers in each file
    length: int
    features: int
    classes: int

    def __len__(self) -> int:
        return self.length

    @property
    def _nbytes(self) -> int:
        return self.length * (4 * self.features + _BESIDE_BYTES)

    @classmethod
    def _write(cls, table: Table, path: Path, names: Sequence[str] = _ARRAYS) -> _StoredTable:
        arrays = {name: array for name, array in table._arrays().items() if name in names}
        files = {name: path.with_name(f"{path.name}.{name}") for name in arrays}
        try:
            for name, array in arrays.items():
                with open(files[name], "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                    file.write(np.ascontiguousarray(array).view(np.uint8).data)
        except OSError as error:
            raise DataUnavailable(
                f"The rows cannot be written to the folder {path.parent}: {error.strerror}. `cache_dir` can name "
                "another place."
            ) from error
        types = {name: array.dtype.str for name, array in arrays.items()}
        return cls(files, types, len(table), table.features, table.classes)

    def _load(self) -> Table:
        arrays: dict[str, NDArray[Any]] = {
            name: np.memmap(file, self.types[name], "c", shape=self._shape(name))
            for name, file in self.files.items()
        }
        return Table(classes=self.classes, **arrays)

    def _shape(self, name: str) -> tuple[int, ...]:
        return (self.length, self.features) if name == "rows" else (self.length,)

    def _with_labels(self, table: Table, path: Path) -> _StoredTable:
        made = _StoredTable._write(table, path, _ARRAYS[1:])
        files = {**made.files, "rows": self.files["rows"]}
        return replace(self, files=files, types={**made.types, "rows": self.types["rows"]})


class _EncodedRows:
    """The encoded rows of files, in a folder that outlasts an interrupted training; changed files are read again."""

    def __init__(self, place: Path, source: TableRows) -> None:
        paths = [str(_file_of(part).absolute()) for part in source.parts]
        split = None if source.holdout is None else source.holdout.to_json()
        name = _digest(
            [__version__, source.encoding.to_json(), split, source.held_out, paths, *source.selection]
        )
        self.folder = place / f"quietmax-encoded-{name}"
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            about = self.folder.lstat()
            if about.st_uid != os.geteuid() or about.st_mode & 0o077 or self.folder.is_symlink():
                raise DataUnavailable(f"The folder {self.folder} must belong to you alone (mode 700).")
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise _no_folder(place, error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            key = self.folder / "key"
            if not key.exists():
                _write_once(key, secrets.token_bytes(16))
            self.key = key.read_bytes()
        except BaseException as error:
            self._close()
            if isinstance(error, BlockingIOError):
                raise DataUnavailable(f"Another training uses the folder {self.folder}.") from None
            raise

    def _blocks(self, part: Part, classes: int) -> list[_StoredTable] | None:
        """Return the stored blocks of a part; None if it was not read to its end."""
        name = _part_digest(part)
        listed = self.folder / f"{name}.json"
        if not listed.exists():
            return None
        return [
            _StoredTable(
                {each: self.folder / f"{name}-{number}.{each}" for each in types},
                types,
                length,
                features,
                classes,
            )
            for number, (length, features, types) in enumerate(json.loads(listed.read_text("utf-8")))
        ]

    def _write(self, part: Part, tables: Iterable[Table]) -> list[_StoredTable]:
        name = _part_digest(part)
        stored = [
            _StoredTable._write(table, self.folder / f"{name}-{number}")
            for number, table in enumerate(tables)
        ]
        for block in stored:
            for path in block.files.values():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        content = json.dumps([[block.length, block.features, block.types] for block in stored])
        _write_once(self.folder / f"{name}.json", content.encode())
        return stored

    def _remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _close(self) -> None:
        """Let another training use the folder."""
        os.close(self._lock)


def _write_once(path: Path, content: bytes) -> None:
    atomic_write(path, lambda place: place.write_bytes(content), private=True)


def _file_of(part: Part) -> Path:
    # Not those of datasets: a fragment may be a part of its file, and what it reads depends on the whole dataset.
    if not isinstance(part, ParquetPart | TextPart):
        raise InvalidInput(_NOT_RESUMED)
    return part.file


def _part_digest(part: Part) -> str:
    file = _file_of(part)
    about = file.stat()
    # The second time changes with every change of the file; `cp -p` and `touch` can set the first one.
    times = (about.st_mtime_ns, about.st_ctime_ns)
    return _digest([str(file.absolute()), about.st_ino, about.st_size, *times])


def _digest(facts: object) -> str:
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _sum(
    blocks: Sequence[Table | _StoredTable],
    work: Callable[[Table], Sum],
    advance: Callable[[int], None] = lambda _: None,
) -> Sum:
    """Add up what a function returns for every block; each thread has a fixed share, so sums repeat to the bit."""
    if not blocks:
        raise InvalidInput("There are no records.")
    threads = thread_count()
    per_block = -(-threads // len(blocks))
    groups = min(threads, len(blocks))

    def _group_sum(number: int) -> Sum:
        def _results() -> Iterator[Sum]:
            for block in blocks[number::groups]:
                table = block._load()
                yield from map(work, table.pieces(1))
                advance(len(table))

        return added(_results())

    if per_block == 1:
        return added(parallel_map(_group_sum, groups))
    pieces = [piece for block in blocks for piece in block._load().pieces(per_block)]
    total = added(parallel_map(lambda number: work(pieces[number]), len(pieces)))
    advance(sum(map(len, blocks)))
    return total


def added(values: Iterable[Sum]) -> Sum:
    """Add values in pairs, pairs of pairs and so on, so that few rounding errors add up where there are any."""
    sums: list[Any] = []
    for count, value in enumerate(values, start=1):
        total: Any = value
        while count % 2 == 0:
            total, count = sums.pop() + total, count // 2
        sums.append(total)
    while len(sums) > 1:
        last = sums.pop()
        sums.append(sums.pop() + last)
    result: Sum = sums[0]
    return result


# --- Persons ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _PersonCounts:
    """How many rows each person of a range has."""

    digests: NDArray[np.bytes_]
    rows: Labels

    @classmethod
    def _of(cls, block: Table, first: int, last: int) -> _PersonCounts:
        assert block.persons is not None
        digests, rows = np.unique(block.persons[_in_range(block.persons, first, last)], return_counts=True)
        return cls(digests, rows.astype(np.int64))

    def __add__(self, other: _PersonCounts) -> _PersonCounts:
        digests, places = np.unique(np.concatenate([self.digests, other.digests]), return_inverse=True)
        rows = np.zeros(len(digests), np.int64)
        np.add.at(rows, places, np.concatenate([self.rows, other.rows]))
        return _PersonCounts(digests, rows)

    def _assigned(self, block: Table, first: int, last: int) -> Table:
        assert block.persons is not None
        repeats = np.ones(len(block), np.int64) if block.repeats is None else block.repeats
        chosen = _in_range(block.persons, first, last)
        repeats[chosen] = self.rows[np.searchsorted(self.digests, block.persons[chosen])]
        return replace(block, repeats=repeats)


def _in_range(digests: NDArray[np.bytes_], first: int, last: int) -> NDArray[np.bool_]:
    starts = np.ascontiguousarray(digests).view(">u2").reshape(len(digests), -1)[:, 0]
    return (starts >= first) & (starts < last)

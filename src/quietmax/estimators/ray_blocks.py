"""Blocks of rows on the workers of a Ray cluster.

A pass sends a function to all workers and adds up what they return: exact sums, so that the number of workers does not
change a bit of the result (THEORY 3.11). Noise is drawn by the process that calls `fit`, never by a worker. Every call
brings the list of all updates of the rows: a new worker reads the files again and repeats them before it answers.

Processors of different kinds may round otherwise, and a row that is removed can move others to another worker. So every
worker also makes all updates of some public rows, and all workers must get the same bits; an update that refuses all
public rows is an error.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from quietmax._lazy import lazy_module
from quietmax._ray import Actors, RayEngine, _check_alike
from quietmax.data.encoding import embed
from quietmax.data.sources import ParquetPart, Part, TextPart
from quietmax.data.tables import TableRows
from quietmax.errors import DataUnavailable, InvalidInput, short_message
from quietmax.estimators.blocks import Blocks, LocalEngine, Sum, Table, _tables_of, added, joined

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

Change = Literal["rows", "labels"]
_PROBE_ROWS, _PROBE_SEED = 64, 3008
_PROBE_TEXTS = (
    "",
    "Two short words.",
    "A longer text, of which a sentence encoder makes a few more tokens. " * 4,
)


class RayBlocks(Blocks):
    """The rows of a training set in blocks on the workers of a Ray cluster."""

    def __init__(self, classes: int, engine: RayEngine) -> None:
        super().__init__(classes, LocalEngine(progress=engine.progress))
        self._actors = Actors(engine, _Worker, lambda number: (self._shares[number],))
        self._shares = [_Share(classes) for _ in range(self._actors.count)]
        self._next = itertools.cycle(range(self._actors.count))
        self._states: list[_State | None] = [None] * self._actors.count
        self._updates: list[tuple[Change, Any]] = []

    def close(self) -> None:
        """End all workers, which drops all rows; and the cluster if it was started here."""
        self._updates.clear()
        self._shares = []
        self._actors.close()

    def __len__(self) -> int:
        return sum(state.rows for state in self._states if state is not None)

    @property
    def features(self) -> int:
        """Numbers per row."""
        return max(state.features for state in self._states if state is not None)

    def extend(self, tables: Iterable[Table]) -> None:
        """Send rows to the workers."""
        for table in tables:
            for piece in table.pieces(len(self._shares)):
                self._shares[next(self._next)].tables.append(self._actors.put(piece))
        self._run()

    def read(self, source: TableRows, key: bytes) -> None:
        """Let the workers read the rows of a table, each its own parts; tables in memory are read here."""
        if not all(isinstance(part, ParquetPart | TextPart) for part in source.parts):
            self.extend(_tables_of(source, key, self.classes))
            return
        for part in source.parts:
            if isinstance(part, ParquetPart | TextPart):
                part = replace(part, file=part.file.absolute())
            self._shares[next(self._next)].parts.append(part)
        for share in self._shares:
            share.source, share.key = replace(source, parts=()), key
        self._run()

    def sum(self, work: Callable[[Table], Sum]) -> Sum:
        """Add up what a function returns for every block; see `Blocks.sum`."""
        return added(self._run(work))

    def update(self, function: Callable[[Table], Table | Iterable[Table]]) -> None:
        """Replace every block by what a function makes of it; see `Blocks.update`."""
        self._updates.append(("rows", self._actors.put(function)))
        self._run()

    def _sum_labels(self, work: Callable[[Table], Sum]) -> Sum:
        return added(self._run(work, kind="labels"))

    def _update_labels(self, function: Callable[[Table], Table]) -> None:
        self._updates.append(("labels", self._actors.put(function)))
        self._run(kind="labels")

    def _run(self, work: Callable[[Table], Sum] | None = None, kind: Change = "rows") -> list[Sum]:
        """Let all workers make the updates that they have not made, and then a sum; return it in their order."""
        sent = None if work is None else self._actors.put(work)
        jobs = [(self._updates, sent, kind)] * self._actors.count
        sums: dict[int, Sum] = {}
        probed: set[bytes] = set()
        for number, (state, found) in self._actors.results("run", jobs):
            self._check_state(number, state)
            if state.rows:
                probed.add(state.probed)
                _check_alike(probed)
            if found is not None:
                sums[number] = found
            if kind == "rows":
                self.advance(state.rows)
        if work is not None and not sums:
            raise InvalidInput("There are no records.")
        return [sums[number] for number in sorted(sums)]

    def _check_state(self, number: int, state: _State) -> None:
        before = self._states[number]
        if before is not None and before.fingerprint != state.fingerprint:
            raise DataUnavailable(
                "A Ray worker was lost, and its files have changed since they were first read. Train again, on files "
                "that stay as they are."
            )
        self._states[number] = state


def _chosen_engine(engine: LocalEngine | RayEngine | Literal["local", "ray"]) -> LocalEngine | RayEngine:
    if isinstance(engine, LocalEngine | RayEngine):
        return engine
    if engine not in ("local", "ray"):
        raise InvalidInput(f"engine must be 'local', 'ray', a LocalEngine or a RayEngine, got {engine!r}.")
    return RayEngine() if engine == "ray" else LocalEngine()


# --- What runs on the workers -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Share:
    classes: int
    source: TableRows | None = None
    key: bytes = b""
    parts: list[Part] = field(default_factory=list)
    tables: list[Any] = field(default_factory=list)

    def _read(self) -> Iterator[Table]:
        if self.source is not None:
            yield from _tables_of(replace(self.source, parts=tuple(self.parts)), self.key, self.classes)
        if self.tables:
            import ray

            for table in self.tables:
                yield ray.get(table)


@dataclass(frozen=True)
class _State:
    rows: int
    features: int
    fingerprint: bytes
    probed: bytes


class _Worker:
    """Holds the rows of one share; this is a Ray actor."""

    def __init__(self, share: _Share) -> None:
        torch.set_num_threads(1)
        self._share = share
        self._blocks: Blocks | None = None
        self._updated = 0
        self._fingerprint = b""
        self._probes: list[Table] = []
        self._probed = hashlib.blake2b(digest_size=16)

    def run(
        self, updates: Sequence[tuple[Change, Any]], work: Callable[[Table], Any] | None, kind: Change
    ) -> tuple[_State, Any]:
        """Make the updates that have not been made; then return the sum of some work, or None without rows or work."""
        blocks = self._read() if self._blocks is None else self._blocks
        self._blocks = blocks
        for change, function in updates[self._updated :]:
            import ray

            made = ray.get(function)
            if change == "rows":
                blocks.update(made)
                self._update_probe(made)
            else:
                blocks._update_labels(made)
            self._updated += 1
        rows = len(blocks)
        state = _State(rows, blocks.features if rows else 0, self._fingerprint, self._probed.digest())
        if work is None or not rows:
            return state, None
        return state, blocks.sum(work) if kind == "rows" else blocks._sum_labels(work)

    def _read(self) -> Blocks:
        blocks, digest = Blocks(self._share.classes), hashlib.blake2b(digest_size=16)

        def _tables() -> Iterator[Table]:
            for table in self._share._read():
                for array in (table.rows, table.labels, table.persons):
                    if array is not None:
                        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
                yield table

        blocks.extend(_tables())
        self._fingerprint = digest.digest()
        if len(blocks):
            rows = np.random.default_rng(_PROBE_SEED).random((_PROBE_ROWS, blocks.features), np.float32)
            labels = np.zeros(_PROBE_ROWS, np.int64)
            kinds = (rows, np.round(rows), np.zeros_like(rows))
            self._probes = [Table(each, labels, self._share.classes) for each in kinds]
        if self._share.source is not None and self._share.source.encoding.encoders:
            self._probed.update(embed(_PROBE_TEXTS).data)
        return blocks

    def _update_probe(self, function: Callable[[Table], Table | Iterable[Table]]) -> None:
        """Make an update of the public rows too: of the first kind that it takes."""
        refused = None
        for probe in self._probes:
            try:
                made = function(probe)
                changed = made if isinstance(made, Table) else joined(list(made))
            except Exception as error:  # a feature map of the user's own may refuse such rows in any way
                refused = error
                continue
            self._probes = [changed]
            self._probed.update(np.ascontiguousarray(changed.rows).data)
            return
        if refused is not None:
            raise InvalidInput(
                "The workers of a Ray cluster must be compared on public rows, but the feature map refuses them "
                f"({short_message(refused)}). It must take rows of numbers from 0 to 1, of zeros and ones, or of zeros."
            ) from refused

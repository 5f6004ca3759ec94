"""The runner: computes the cells of a grid that the store does not hold yet, and stores each as it finishes.

Ctrl-C, a crash or SIGKILL therefore lose at most the cells being computed at that moment. A cell that fails is
reported and the others go on; a cell whose worker died is tried again a few times.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quietmax.experiments.cell import Cell, Group
from quietmax.experiments.crew import Crew
from quietmax.experiments.store import Result, Store

TRIES = 3
"""How often a cell is given out when workers die over it."""


@dataclass(frozen=True)
class Progress:
    """Where a run is: cells ``done`` of ``total`` (those found in the store included), and seconds left."""

    done: int
    total: int
    failed: int
    seconds_left: float | None


@dataclass(frozen=True)
class Run:
    """What a run gave: results by cell, failures by cell, and how many cells were computed rather than found."""

    results: dict[Cell, Result]
    failures: dict[Cell, str] = field(default_factory=dict)
    computed: int = 0
    seconds: float = 0.0


def run(
    cells: Sequence[Cell],
    store: Store,
    hire: Callable[[], Crew],
    *,
    weight: Callable[[Cell], float] = lambda _: 1.0,
    progress: Callable[[Progress], None] | None = None,
) -> Run:
    """Compute what is missing; ``weight`` is a cell's expected share of the time (the longest groups start first).

    ``hire`` is called only if there is anything to compute.
    """
    started = time.monotonic()
    with store.locked():
        results: dict[Cell, Result] = {}
        missing = []
        for cell in dict.fromkeys(cells):
            stored = store.result(cell)
            if stored is None:
                missing.append(cell)
            else:
                results[cell] = stored
        failures: dict[Cell, str] = {}
        if missing:
            queue = _Queue(missing, weight)
            crew = hire()
            try:
                _drive(queue, crew, store, results, failures, len(missing) + len(results), progress)
            finally:
                crew.stop()
    ordered = {cell: results[cell] for cell in cells if cell in results}
    return Run(ordered, failures, len(missing) - len(failures), time.monotonic() - started)


def _drive(
    queue: _Queue,
    crew: Crew,
    store: Store,
    results: dict[Cell, Result],
    failures: dict[Cell, str],
    total: int,
    progress: Callable[[Progress], None] | None,
) -> None:
    given: dict[int, Cell] = {}
    tried: Counter[Cell] = Counter()
    started = time.monotonic()

    def report() -> None:
        if progress is not None:
            share = queue.share_done
            left = (time.monotonic() - started) * (1 - share) / share if share > 0 else None
            progress(Progress(len(results), total, len(failures), left))

    while True:
        for worker in range(crew.workers):
            if worker not in given and (cell := queue.take(worker)) is not None:
                given[worker] = cell
                tried[cell] += 1
                crew.give(worker, cell)
        report()
        if not given:
            return
        outcome = crew.next()
        cell_given = given.pop(outcome.worker, None)
        if cell_given is None:
            continue
        if outcome.result is not None:
            store.keep_result(cell_given, outcome.result)
            results[cell_given] = outcome.result
        elif outcome.died and tried[cell_given] < TRIES:
            queue.put_back(cell_given)
            continue
        else:
            failures[cell_given] = outcome.failure
        queue.finish(cell_given)


class _Queue:
    """Cells by group. A group's first cell trains what the others need, so until it is done nobody else joins in."""

    def __init__(self, cells: Sequence[Cell], weight: Callable[[Cell], float]) -> None:
        self._weights = {cell: max(weight(cell), 1e-9) for cell in cells}
        self._total = sum(self._weights.values())
        self._done = 0.0
        groups: dict[Group, list[Cell]] = {}
        for cell in cells:
            groups.setdefault(cell.group, []).append(cell)
        heaviest = sorted(groups, key=lambda group: -sum(self._weights[cell] for cell in groups[group]))
        self._waiting: OrderedDict[Group, list[Cell]] = OrderedDict(
            (group, groups[group]) for group in heaviest
        )
        self._held_by: dict[Group, int] = {}
        self._ready: set[Group] = set()

    @property
    def share_done(self) -> float:
        """The share of the expected time that lies behind."""
        return self._done / self._total

    def take(self, worker: int) -> Cell | None:
        """The next cell for a worker: of its own group, of one nobody holds, or of one whose networks exist.

        Who joins another's group begins at its far end: neighbouring cells need the same networks and attacks.
        """
        mine = [group for group in self._waiting if self._held_by.get(group) == worker]
        free = [group for group in self._waiting if group not in self._held_by]
        joinable = [group for group in self._waiting if group in self._ready]
        for group in (*mine, *free, *joinable):
            self._held_by.setdefault(group, worker)
            cells = self._waiting[group]
            cell = cells.pop(0 if self._held_by[group] == worker else -1)
            if not cells:
                del self._waiting[group]
            return cell
        return None

    def put_back(self, cell: Cell) -> None:
        """Return a cell whose worker died; anybody may take its group up."""
        self._waiting.setdefault(cell.group, []).insert(0, cell)
        self._held_by.pop(cell.group, None)

    def finish(self, cell: Cell) -> None:
        """Note that a cell needs no more work."""
        self._done += self._weights[cell]
        self._ready.add(cell.group)

"""The runner: computes the cells of a grid that the store does not hold yet, and stores each as it finishes.

Ctrl-C, a crash or SIGKILL therefore lose at most the cells being computed at that moment. A cell that fails is
reported and the others go on; a cell whose worker died is tried again a few times.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from quietmax.errors import InvalidInput
from quietmax.experiments.estimate import estimated_seconds
from quietmax.experiments.evaluate import MakeMeasure
from quietmax.experiments.grid import Group, Trial
from quietmax.experiments.results import Result, Store
from quietmax.experiments.workers import LocalWorkers, Workers

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

    results: dict[Trial, Result]
    failures: dict[Trial, str] = field(default_factory=dict)
    computed: int = 0
    seconds: float = 0.0


def run(
    trials: Sequence[Trial],
    store: Store,
    hire: Callable[[], Workers],
    *,
    weight: Callable[[Trial], float] = lambda _: 1.0,
    progress: Callable[[Progress], None] | None = None,
) -> Run:
    """Compute what is missing; ``weight`` is a cell's expected share of the time (the longest groups start first).

    ``hire`` is called only if there is anything to compute.
    """
    started = time.monotonic()
    with store.locked():
        results: dict[Trial, Result] = {}
        missing = []
        for trial in dict.fromkeys(trials):
            stored = store.result(trial)
            if stored is None:
                missing.append(trial)
            else:
                results[trial] = stored
        failures: dict[Trial, str] = {}
        if missing:
            queue = _Queue(missing, weight)
            crew = hire()
            try:
                _drive(queue, crew, store, results, failures, len(missing) + len(results), progress)
            finally:
                crew.stop()
    ordered = {trial: results[trial] for trial in trials if trial in results}
    return Run(ordered, failures, len(missing) - len(failures), time.monotonic() - started)


def _drive(
    queue: _Queue,
    crew: Workers,
    store: Store,
    results: dict[Trial, Result],
    failures: dict[Trial, str],
    total: int,
    progress: Callable[[Progress], None] | None,
) -> None:
    given: dict[int, Trial] = {}
    tried: Counter[Trial] = Counter()
    started = time.monotonic()

    def report() -> None:
        if progress is not None:
            share = queue.share_done
            left = (time.monotonic() - started) * (1 - share) / share if share > 0 else None
            progress(Progress(len(results), total, len(failures), left))

    while True:
        for worker in range(crew.workers):
            if worker not in given and (trial := queue.take(worker)) is not None:
                given[worker] = trial
                tried[trial] += 1
                crew.give(worker, trial)
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

    def __init__(self, trials: Sequence[Trial], weight: Callable[[Trial], float]) -> None:
        self._weights = {trial: max(weight(trial), 1e-9) for trial in trials}
        self._total = sum(self._weights.values())
        self._done = 0.0
        groups: dict[Group, list[Trial]] = {}
        for trial in trials:
            groups.setdefault(trial.group, []).append(trial)
        heaviest = sorted(groups, key=lambda group: -sum(self._weights[trial] for trial in groups[group]))
        self._waiting: OrderedDict[Group, list[Trial]] = OrderedDict(
            (group, groups[group]) for group in heaviest
        )
        self._held_by: dict[Group, int] = {}
        self._ready: set[Group] = set()

    @property
    def share_done(self) -> float:
        """The share of the expected time that lies behind."""
        return self._done / self._total

    def take(self, worker: int) -> Trial | None:
        """The next cell for a worker: of its own group, of one nobody holds, or of one whose networks exist.

        Who joins another's group begins at its far end: neighbouring cells need the same networks and attacks.
        """
        mine = [group for group in self._waiting if self._held_by.get(group) == worker]
        free = [group for group in self._waiting if group not in self._held_by]
        joinable = [group for group in self._waiting if group in self._ready]
        for group in (*mine, *free, *joinable):
            self._held_by.setdefault(group, worker)
            trials = self._waiting[group]
            trial = trials.pop(0 if self._held_by[group] == worker else -1)
            if not trials:
                del self._waiting[group]
            return trial
        return None

    def put_back(self, trial: Trial) -> None:
        """Return a cell whose worker died; anybody may take its group up."""
        self._waiting.setdefault(trial.group, []).insert(0, trial)
        self._held_by.pop(trial.group, None)

    def finish(self, trial: Trial) -> None:
        """Note that a cell needs no more work."""
        self._done += self._weights[trial]
        self._ready.add(trial.group)


_PACKAGES = ("quietmax", "torch", "numpy", "scipy", "scikit-learn", "dp-accounting")


@dataclass(frozen=True)
class Where:
    """Where cells are computed: ``workers`` local processes, or a Ray cluster at ``ray`` ("" starts a local one)."""

    workers: int | None = None
    ray: str | None = None

    def crew(self, make: MakeMeasure) -> Workers:
        """Hire the workers."""
        if self.ray is not None:
            from quietmax.experiments.workers import RayWorkers

            return RayWorkers(make, address=self.ray or None, workers=self.workers)
        return LocalWorkers(make, self.workers or usable_cores())


def usable_cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_cells(
    trials: Sequence[Trial],
    folder: Path,
    *,
    where: Where | None = None,
    data_dir: Path | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Run:
    """Compute the cells that ``folder`` does not hold yet."""
    if not trials:
        raise InvalidInput("There is nothing to compute; name at least one data set and one method.")
    weights = estimated_seconds(trials, measured=False)
    make = MakeMeasure(folder.resolve(), None if data_dir is None else str(Path(data_dir).resolve()))
    chosen = where or Where()
    return run(
        trials,
        Store(folder),
        lambda: chosen.crew(make),
        weight=lambda trial: weights[trial],
        progress=progress,
    )


def environment() -> dict[str, Any]:
    """Versions and machine, for the report."""
    return {
        "python": sys.version.split()[0],
        "machine": f"{platform.system()} {platform.machine()}, {usable_cores()} cores",
        **{name: _version(name) for name in _PACKAGES},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed as a package"

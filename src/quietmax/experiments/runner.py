"""The runner: computes the trials of a grid that the store does not have, and stores each as it finishes.

Ctrl-C, a crash or SIGKILL therefore lose at most the trials in flight. A trial that fails is reported, and the others
continue. A trial whose worker died is tried again.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quietmax.errors import InvalidInput
from quietmax.experiments.estimate import estimated_seconds
from quietmax.experiments.evaluate import MeasureFactory
from quietmax.experiments.grid import Group, Trial
from quietmax.experiments.results import Result, ResultStore
from quietmax.experiments.workers import Workers, start_workers

MAX_TRIES = 3
"""How often a trial is started when workers die while computing it."""


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    done: int  # Finished trials, including those found in the store
    total: int  # All trials
    failed: int  # Failed trials
    seconds_left: float | None  # Expected time until the end; None before the first trial is finished


ReportProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class Run:
    """The result of a run."""

    results: dict[Trial, Result]  # Result of each trial, in the order of the trials
    failures: dict[Trial, str] = field(default_factory=dict)  # What went wrong, for each trial that failed
    computed: int = 0  # Number of trials that were computed rather than found in the store
    seconds: float = 0.0  # Duration of the run


def run_trials(
    trials: Sequence[Trial],
    folder: Path,
    *,
    workers: int | None = None,
    ray: str | None = None,
    data_dir: Path | None = None,
    progress: ReportProgress | None = None,
) -> Run:
    """Measure the trials whose results are not yet in a folder."""
    if not trials:
        raise InvalidInput("There are no trials to run. At least one data set and one method are required.")
    factory = MeasureFactory(folder.resolve(), None if data_dir is None else str(data_dir.resolve()))
    weights = estimated_seconds(trials, measured=False)
    return run(
        trials,
        ResultStore(folder),
        lambda: start_workers(factory, workers, ray),
        weight=lambda trial: weights[trial],
        progress=progress,
    )


def run(
    trials: Sequence[Trial],
    store: ResultStore,
    start: Callable[[], Workers],
    *,
    weight: Callable[[Trial], float] = lambda _: 1.0,
    progress: ReportProgress | None = None,
) -> Run:
    """Compute the trials that a store does not have."""
    started = time.monotonic()
    with store.locked():
        stored = {trial: store.result(trial) for trial in dict.fromkeys(trials)}
        results = {trial: result for trial, result in stored.items() if result is not None}
        missing = [trial for trial, result in stored.items() if result is None]
        failures: dict[Trial, str] = {}
        if missing:
            queue = _Queue(missing, weight)
            workers = start()
            try:
                _compute(queue, workers, store, results, failures, progress)
            finally:
                workers.stop()
    ordered = {trial: results[trial] for trial in trials if trial in results}
    return Run(ordered, failures, len(missing) - len(failures), time.monotonic() - started)


def _compute(
    queue: _Queue,
    workers: Workers,
    store: ResultStore,
    results: dict[Trial, Result],
    failures: dict[Trial, str],
    progress: ReportProgress | None,
) -> None:
    """Keep all workers busy until the queue is empty; add to ``results`` and ``failures``."""
    total = len(results) + len(queue)
    in_flight: dict[int, Trial] = {}
    tries: Counter[Trial] = Counter()
    started = time.monotonic()
    while True:
        for worker in range(workers.count):
            if worker not in in_flight and (trial := queue.take(worker)) is not None:
                in_flight[worker] = trial
                tries[trial] += 1
                workers.submit(worker, trial)
        if progress is not None:
            share = queue.share_done
            left = (time.monotonic() - started) * (1 - share) / share if share > 0 else None
            progress(Progress(len(results), total, len(failures), left))
        if not in_flight:
            return
        outcome = workers.next_outcome()
        finished = in_flight.pop(outcome.worker, None)
        if finished is None:
            continue  # an idle worker died
        if outcome.died and tries[finished] < MAX_TRIES:
            queue.put_back(finished)
            continue
        if outcome.result is not None:
            store.store_result(finished, outcome.result)
            results[finished] = outcome.result
        else:
            failures[finished] = outcome.failure
        queue.finish(finished)


class _Queue:
    """The waiting trials by group.

    The first trial of a group trains what the others need, so no second worker joins a group before it is finished.
    """

    def __init__(self, trials: Sequence[Trial], weight: Callable[[Trial], float]) -> None:
        self._weights = {trial: max(weight(trial), 1e-9) for trial in trials}
        self._total = sum(self._weights.values())
        self._done = 0.0
        groups: dict[Group, list[Trial]] = {}
        for trial in trials:
            groups.setdefault(trial.group, []).append(trial)
        heaviest = sorted(groups, key=lambda group: -sum(self._weights[trial] for trial in groups[group]))
        self._waiting = OrderedDict((group, groups[group]) for group in heaviest)
        self._held_by: dict[Group, int] = {}
        self._ready: set[Group] = set()

    def __len__(self) -> int:
        return sum(len(trials) for trials in self._waiting.values())

    @property
    def share_done(self) -> float:
        """The finished share of the expected time."""
        return self._done / self._total

    def take(self, worker: int) -> Trial | None:
        """Return the next trial for a worker: of its own group, of a free group, or of one whose networks exist.

        A worker that joins another's group begins at its end, since neighbouring trials need the same networks.
        """
        own = [group for group in self._waiting if self._held_by.get(group) == worker]
        free = [group for group in self._waiting if group not in self._held_by]
        joinable = [group for group in self._waiting if group in self._ready]
        for group in (*own, *free, *joinable):
            self._held_by.setdefault(group, worker)
            trials = self._waiting[group]
            trial = trials.pop(0 if self._held_by[group] == worker else -1)
            if not trials:
                del self._waiting[group]
            return trial
        return None

    def put_back(self, trial: Trial) -> None:
        """Return a trial whose worker died; any worker may take its group."""
        self._waiting.setdefault(trial.group, []).insert(0, trial)
        self._held_by.pop(trial.group, None)

    def finish(self, trial: Trial) -> None:
        """Note that a trial needs no more work."""
        self._done += self._weights[trial]
        self._ready.add(trial.group)

"""The runner: computes the trials of a grid that the store does not have, and stores each as it finishes.

Ctrl-C, a crash or SIGKILL therefore lose at most the trials in flight. A trial that fails is reported, and the others
continue. A trial whose worker died is tried again.

Workers are processes on this machine, or Ray actors on a cluster. A worker keeps what it loaded and trained for its
last group, so the trials of one group are best given to one worker. Each computes with one thread, so that two workers
use two cores.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from quietmax._ray import MOST_LOSSES, Actors, Lost, RayEngine
from quietmax._threads import usable_cores
from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.experiments.grid import Effort, Group, Result, ResultStore, Trial
from quietmax.experiments.methods import SharedInputs, measure

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")

Progress = Callable[[int, int], None]
"""Called with the number of finished trials and of all."""
Compute = Callable[[Trial], Result]
ComputeFactory = Callable[[], Compute]
"""Called once in every worker; what it returns is called for every trial. It must be picklable."""
Outcome = tuple[Result | None, str]
"""The result of a trial; or None, and what went wrong."""


@dataclass(frozen=True)
class Run:
    """The result of a run."""

    results: dict[Trial, Result]  # Result of each trial, in the order of the trials
    failures: dict[Trial, str] = field(default_factory=dict)  # What went wrong, for each trial that failed
    computed: int = 0  # Number of trials that were computed rather than found in the store
    seconds: float = 0.0  # Duration of the run

    @property
    def failed(self) -> tuple[str, ...]:
        """The failed trials, each with what went wrong."""
        return tuple(f"{trial}: {failure}" for trial, failure in self.failures.items())


def run_trials(
    trials: Sequence[Trial],
    folder: Path,
    *,
    workers: int | None = None,
    ray: str | None = None,
    progress: Progress = lambda _done, _total: None,
) -> Run:
    """Measure the trials whose results are not yet in a folder."""
    if not trials:
        raise InvalidInput("There are no trials to run. At least one data set and one method are required.")
    factory = partial(_measuring, folder.resolve())
    return run(trials, ResultStore(folder), lambda: _start_workers(factory, workers, ray), progress=progress)


def _measuring(folder: Path) -> Compute:
    """Return a function that measures trials, and keeps the inputs of the last group in memory."""
    store = ResultStore(folder)
    last: list[SharedInputs] = []

    def _compute(trial: Trial) -> Result:
        if not last or last[0].group != trial.group:
            last[:] = [SharedInputs(trial.group, store)]
        return measure(trial, last[0])

    return _compute


def run(
    trials: Sequence[Trial],
    store: ResultStore,
    start: Callable[[], Workers],
    *,
    progress: Progress = lambda _done, _total: None,
) -> Run:
    """Compute the trials that a store does not have."""
    started = time.monotonic()
    with store.locked():
        stored = {trial: store.result(trial) for trial in dict.fromkeys(trials)}
        results = {trial: result for trial, result in stored.items() if result is not None}
        missing = [trial for trial, result in stored.items() if result is None]
        failures: dict[Trial, str] = {}
        if missing:
            workers = start()
            progress(len(results), len(stored))
            try:
                for trial, (result, failure) in _outcomes(_Queue(missing), workers):
                    if result is None:
                        failures[trial] = failure
                    else:
                        store.store_result(trial, result)
                        results[trial] = result
                    progress(len(results) + len(failures), len(stored))
            finally:
                workers.close()
    ordered = {trial: results[trial] for trial in trials if trial in results}
    return Run(ordered, failures, len(missing) - len(failures), time.monotonic() - started)


def _outcomes(queue: _Queue, workers: Workers) -> Iterator[tuple[Trial, Outcome]]:
    """Keep all workers busy until the queue is empty; yield what became of each trial."""
    in_flight: dict[int, Trial] = {}
    tries: Counter[Trial] = Counter()
    while True:
        for worker in range(workers.count):
            if worker not in in_flight and (trial := queue._take(worker)) is not None:
                in_flight[worker] = trial
                tries[trial] += 1
                workers.send(worker, "compute", trial)
        if not in_flight:
            return
        worker, outcome = workers.next()
        if worker not in in_flight:
            continue  # an idle worker died
        finished = in_flight.pop(worker)
        lost = isinstance(outcome, Lost)
        if lost and tries[finished] < MOST_LOSSES:
            queue._put_back(finished)
        else:
            queue.ready.add(finished.group)
            yield finished, (None, f"the worker was lost ({outcome.reason})") if lost else outcome


class _Queue:
    """The waiting trials by group, those of the most work first.

    The first trial of a group trains what the others need, so no second worker joins a group before it is finished.
    """

    def __init__(self, trials: Sequence[Trial]) -> None:
        groups: dict[Group, list[Trial]] = {}
        for trial in trials:
            groups.setdefault(trial.group, []).append(trial)
        self._waiting = dict(sorted(groups.items(), key=lambda item: -_records_seen(item[0].effort)))
        self._held_by: dict[Group, int] = {}
        self.ready: set[Group] = set()  # Groups of which a trial is finished

    def _take(self, worker: int) -> Trial | None:
        """Return the next trial for a worker: of its own group, of a free group, or of one whose networks exist.

        A worker that joins another's group begins at its end, since neighbouring trials need the same networks.
        """
        own = [group for group in self._waiting if self._held_by.get(group) == worker]
        free = [group for group in self._waiting if group not in self._held_by]
        joinable = [group for group in self._waiting if group in self.ready]
        for group in (*own, *free, *joinable):
            self._held_by.setdefault(group, worker)
            trials = self._waiting[group]
            trial = trials.pop(0 if self._held_by[group] == worker else -1)
            if not trials:
                del self._waiting[group]
            return trial
        return None

    def _put_back(self, trial: Trial) -> None:
        """Return a trial whose worker died; any worker may take its group."""
        self._waiting.setdefault(trial.group, []).insert(0, trial)
        self._held_by.pop(trial.group, None)


def _records_seen(effort: Effort) -> int:
    """Records that the network and its shadow networks see."""
    return effort.records * effort.epochs * (1 + (effort.shadows if effort.attacks else 0))


def _start_workers(factory: ComputeFactory, count: int | None = None, ray: str | None = None) -> Workers:
    """Start workers on this machine or on a Ray cluster."""
    if ray is not None:
        return Actors(RayEngine(ray, count), Worker, lambda _: (factory,))
    return LocalWorkers(factory, count or usable_cores())


class Worker:
    """What runs in a worker. The function is made when the first trial arrives."""

    def __init__(self, factory: ComputeFactory) -> None:
        torch.set_num_threads(1)
        self._factory = cache(factory)

    def compute(self, trial: Trial) -> Outcome:
        """Return the result of a trial, or None and what went wrong."""
        return _compute_trial(self._factory(), trial)


def _compute_trial(compute: Compute, trial: Trial) -> Outcome:
    """Return the result of a trial, or None and what went wrong."""
    try:
        return compute(trial), ""
    except QuietmaxError as error:
        return None, str(error)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(place.filename)}:{place.lineno}"
        return None, f"{type(error).__name__}: {error} ({where})"


class LocalWorkers:
    """Processes on this machine, with the methods of `Actors`. Each computes at most one trial at a time."""

    def __init__(self, factory: ComputeFactory, count: int) -> None:
        self._factory = factory
        self._context = multiprocessing.get_context("spawn")
        self.count = count
        self._processes = [self._start() for _ in range(count)]

    def send(self, worker: int, _method: str, *arguments: Any) -> None:
        """Send a trial to an idle process. If the process is gone, `next` says so."""
        try:
            self._processes[worker][1].send(*arguments)
        except OSError:
            return

    def next(self) -> tuple[int, Any]:
        """Wait until a process returns an outcome, or dies: then it is replaced, and the outcome is `Lost`."""
        connections = [connection for _, connection in self._processes]
        worker = connections.index(wait(connections)[0])  # type: ignore[arg-type]
        process, connection = self._processes[worker]
        try:
            return worker, connection.recv()
        except (EOFError, OSError):
            process.join()
            connection.close()
            self._processes[worker] = self._start()
            return worker, Lost(f"its process ended with code {process.exitcode}")

    def close(self) -> None:
        """Kill all processes. No finished result is lost, since the runner stores results, not the workers."""
        for process, connection in self._processes:
            process.kill()
            process.join()
            connection.close()

    def _start(self) -> tuple[SpawnProcess, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs, self._factory, os.getpid()), daemon=True)
        before = dict(os.environ)
        os.environ.update(_ONE_THREAD)  # read by numerical libraries when the new process loads them
        try:
            process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        theirs.close()
        return process, ours


Workers = LocalWorkers | Actors


def _work(connection: Connection, factory: ComputeFactory, parent: int) -> None:
    """Compute what arrives until the other end closes. Ctrl-C is handled by the parent process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = Worker(factory)
    while os.getppid() == parent:
        try:
            connection.send(worker.compute(connection.recv()))
        except (EOFError, OSError):
            return

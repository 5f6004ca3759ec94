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
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from quietmax._ray import Actors, Lost, RayEngine
from quietmax.accounting.dpsgd import PUBLISHED_ACCOUNTANTS
from quietmax.attacks.builtin import Shadow
from quietmax.data.registry import dataset
from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.experiments.grid import DataSource, Group, Trial
from quietmax.experiments.inputs import SharedInputs, source_records
from quietmax.experiments.methods import measure
from quietmax.experiments.paper import EPSILONS
from quietmax.experiments.results import Result, ResultStore
from quietmax.models.stacked import LARGEST_STACK, TrainingSettings, train_stack, training_bytes

MAX_TRIES = 3
"""How often a trial is started when workers die while computing it."""

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")

Progress = Callable[[int, int], None]
"""Called with the number of finished trials and of all."""
Compute = Callable[[Trial], Result]
ComputeFactory = Callable[[], Compute]
"""Called once in every worker; what it returns is called for every trial. It must be picklable."""


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
    data_dir: Path | None = None,
    progress: Progress = lambda _done, _total: None,
) -> Run:
    """Measure the trials whose results are not yet in a folder."""
    if not trials:
        raise InvalidInput("There are no trials to run. At least one data set and one method are required.")
    factory = MeasureFactory(folder.resolve(), None if data_dir is None else str(data_dir.resolve()))
    return run(trials, ResultStore(folder), lambda: start_workers(factory, workers, ray), progress=progress)


@dataclass(frozen=True)
class MeasureFactory:
    """Makes the function with which a worker measures trials. It is picklable, so it can be sent to workers."""

    folder: Path  # Folder of the result store, where shared networks are found and stored
    data_dir: str | None = None  # Folder of the data sets' files

    def __call__(self) -> Compute:
        """Return a function that measures trials and keeps the inputs of the last group in memory."""
        store = ResultStore(self.folder)
        last: list[SharedInputs] = []

        def compute(trial: Trial) -> Result:
            if not last or last[0].group != trial.group:
                last[:] = [SharedInputs(trial.group, store, self.data_dir)]
            return measure(trial, last[0])

        return compute


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
                for trial, outcome in _outcomes(_Queue(missing), workers):
                    if outcome.result is None:
                        failures[trial] = outcome.failure
                    else:
                        store.store_result(trial, outcome.result)
                        results[trial] = outcome.result
                    progress(len(results) + len(failures), len(stored))
            finally:
                workers.stop()
    ordered = {trial: results[trial] for trial in trials if trial in results}
    return Run(ordered, failures, len(missing) - len(failures), time.monotonic() - started)


def _outcomes(queue: _Queue, workers: Workers) -> Iterator[tuple[Trial, TrialOutcome]]:
    """Keep all workers busy until the queue is empty; yield what became of each trial."""
    in_flight: dict[int, Trial] = {}
    tries: Counter[Trial] = Counter()
    while True:
        for worker in range(workers.count):
            if worker not in in_flight and (trial := queue.take(worker)) is not None:
                in_flight[worker] = trial
                tries[trial] += 1
                workers.submit(worker, trial)
        if not in_flight:
            return
        outcome = workers.next_outcome()
        finished = in_flight.pop(outcome.worker, None)
        if finished is None:
            continue  # an idle worker died
        if outcome.died and tries[finished] < MAX_TRIES:
            queue.put_back(finished)
        else:
            queue.finish(finished)
            yield finished, outcome


class _Queue:
    """The waiting trials by group.

    The first trial of a group trains what the others need, so no second worker joins a group before it is finished.
    """

    def __init__(self, trials: Sequence[Trial]) -> None:
        groups: dict[Group, list[Trial]] = {}
        for trial in trials:
            groups.setdefault(trial.group, []).append(trial)
        self._waiting = OrderedDict(sorted(groups.items(), key=lambda item: -item[0].effort.records_seen))
        self._held_by: dict[Group, int] = {}
        self._ready: set[Group] = set()

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
        self._ready.add(trial.group)


@dataclass(frozen=True)
class TrialOutcome:
    """What became of a trial."""

    worker: int  # Number of the worker
    result: Result | None = None  # The result, if the trial succeeded
    failure: str = ""  # What went wrong, if it failed
    died: bool = False  # Whether the worker itself was lost


class Workers(Protocol):
    """Workers numbered from 0 to ``count - 1``. Each computes at most one trial at a time."""

    count: int

    def submit(self, worker: int, trial: Trial) -> None:
        """Send a trial to an idle worker."""

    def next_outcome(self) -> TrialOutcome:
        """Wait for the next outcome. A worker that died has been replaced by then."""

    def stop(self) -> None:
        """End all workers at once."""


def start_workers(factory: ComputeFactory, count: int | None = None, ray: str | None = None) -> Workers:
    """Start workers."""
    if ray is not None:
        return RayWorkers(factory, address=ray, count=count)
    return LocalWorkers(factory, count or usable_cores())


def compute_trial(compute: Compute, trial: Trial) -> tuple[Result | None, str]:
    """Return the result of a trial, or None and what went wrong."""
    try:
        return compute(trial), ""
    except QuietmaxError as error:
        return None, str(error)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(place.filename)}:{place.lineno}"
        return None, f"{type(error).__name__}: {error} ({where})"


class _Worker:
    """What runs in a worker. The function is made when the first trial arrives."""

    def __init__(self, factory: ComputeFactory) -> None:
        torch.set_num_threads(1)
        self._factory = factory
        self._compute: Compute | None = None

    def compute(self, trial: Trial) -> tuple[Result | None, str]:
        self._compute = self._compute or self._factory()
        return compute_trial(self._compute, trial)


class LocalWorkers:
    """Processes on this machine."""

    def __init__(self, factory: ComputeFactory, count: int) -> None:
        self._factory = factory
        self._context = multiprocessing.get_context("spawn")
        self.count = count
        self._processes = [self._start() for _ in range(count)]

    def submit(self, worker: int, trial: Trial) -> None:
        """Send a trial to an idle process. If the process is gone, `next_outcome` says so."""
        try:
            self._processes[worker][1].send(trial)
        except OSError:
            return

    def next_outcome(self) -> TrialOutcome:
        """Wait until a process returns a result or dies; replace a dead one."""
        connections = [connection for _, connection in self._processes]
        worker = connections.index(wait(connections)[0])  # type: ignore[arg-type]
        process, connection = self._processes[worker]
        try:
            result, failure = connection.recv()
        except (EOFError, OSError):
            process.join()
            connection.close()
            self._processes[worker] = self._start()
            failure = f"the worker process ended with code {process.exitcode}"
            return TrialOutcome(worker, failure=failure, died=True)
        return TrialOutcome(worker, result, failure)

    def stop(self) -> None:
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


def _work(connection: Connection, factory: ComputeFactory, parent: int) -> None:
    """Compute what arrives until the other end closes. Ctrl-C is handled by the parent process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = _Worker(factory)
    while os.getppid() == parent:
        try:
            connection.send(worker.compute(connection.recv()))
        except (EOFError, OSError):
            return


class RayWorkers:
    """Ray actors of one core each."""

    def __init__(
        self, factory: ComputeFactory, *, address: str | None = None, count: int | None = None
    ) -> None:
        self._actors = Actors(RayEngine(address, count), _Worker, lambda _: (factory,))
        self.count = self._actors.count

    def submit(self, worker: int, trial: Trial) -> None:
        """Send a trial to an idle actor."""
        self._actors.send(worker, "compute", trial)

    def next_outcome(self) -> TrialOutcome:
        """Wait until an actor returns a result or dies; a dead one is replaced by the next trial."""
        worker, outcome = self._actors.next()
        if isinstance(outcome, Lost):
            return TrialOutcome(worker, failure=f"the Ray worker was lost ({outcome.reason})", died=True)
        return TrialOutcome(worker, *outcome)

    def stop(self) -> None:
        """End all actors, and the cluster if it was started here."""
        self._actors.close()


# How long an evaluation will take on this machine, and how much memory. Networks of each shape are trained for a moment
# to find the time per record. Everything else follows from the numbers of networks, records and epochs, from the labels
# of the data set, and from fixed ratios for the compared methods.

_TIMED_RECORDS = 1_000
_MIN_SECONDS, _TIMINGS = 0.3, 3
_MAX_TIMED_NETWORKS = 10
"""Networks timed together; with more of them the time per network hardly changes."""

# Ratios measured on MNIST, Adult, Location and CIFAR.
_DPSGD_NETWORK = 1.1
"""Time of a DP-SGD network as published, in ordinary networks."""
_SECONDS_PER_VALUE = {"head": 2.5e-8, "sampled-neuron": 2.5e-8, "teachers": 3e-8}
_DPSGD_SECONDS_PER_VALUE = 0.8e-8
_SECONDS_PER_TRIAL = 0.15
"""Answers, attack and audit of one trial."""
_FEATURES_PER_PIXEL = 5.0
"""Scattering features of an image."""
_SMALLEST_IMAGE = 784
"""Data sets with at least so many features are images."""
_LIBRARY_BYTES = 450 * 2**20
_DPSGD_BYTES = 1.9
"""Memory of a DP-SGD network, in ordinary networks; the records are copied once more."""
_BYTES_PER_FEATURE = 18
"""Memory of a public feature of a record while a head or DP-SGD is trained."""


def usable_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def estimated_seconds(trials: Sequence[Trial], *, data_dir: Path | None = None) -> float:
    """Estimate the time of trials on registered data sets, on one core. What a group shares counts once."""
    own = 0.0
    shared: dict[tuple[Group, str], float] = {}
    for trial in trials:
        own += _SECONDS_PER_TRIAL + _fit_seconds(trial)
        shared |= {(trial.group, what): cost for what, cost in _shared_seconds(trial, data_dir).items()}
    return own + sum(shared.values())


def estimated_bytes(trials: Sequence[Trial], *, data_dir: Path | None = None) -> int:
    """Estimate the largest memory of one worker."""
    return max(
        _group_bytes(group, {trial.method for trial in trials if trial.group == group}, data_dir)
        for group in {trial.group for trial in trials}
    )


def _group_bytes(group: Group, methods: set[str], data_dir: Path | None) -> int:
    """Memory of the libraries, the records, and whichever of the group's steps needs the most."""
    effort, settings = group.effort, TrainingSettings()
    width, classes = _shape(group.source)
    widths = (width, *settings.hidden, classes)
    steps = [training_bytes(widths, settings)]
    if effort.attacks:
        height = min(effort.shadows, LARGEST_STACK)
        kept = 4 * effort.shadows * (width * settings.hidden[0] + settings.hidden[-1] * classes)
        steps.append(height * training_bytes(widths, settings) + kept)
    records = 4 * width * len(_labels(group.source, data_dir))
    steps.append(2 * records)  # copies while they are read, checked and divided
    if any(name.startswith("published-") for name in methods):
        networks = len(PUBLISHED_ACCOUNTANTS) * len(EPSILONS)
        steps.append(int(networks * _DPSGD_BYTES * training_bytes(widths, settings)) + records)
    if methods & {"head", "dpsgd", "teachers", "sampled-neuron"}:
        values = width * (_FEATURES_PER_PIXEL if width >= _SMALLEST_IMAGE else 1)
        steps.append(int(2 * effort.records * values * _BYTES_PER_FEATURE))
    return _LIBRARY_BYTES + records + max(steps)


@cache
def _labels(source: DataSource, data_dir: Path | None) -> NDArray[np.int64]:
    return source_records(source, data_dir).labels


def _shared_seconds(trial: Trial, data_dir: Path | None) -> dict[str, float]:
    """Time of everything shared that the trial needs."""
    effort = trial.group.effort
    width, classes = _shape(trial.group.source)
    layers = (width, *TrainingSettings().hidden, classes)
    alone = effort.epochs * effort.records * _seconds_per_record(layers, 1, 100)
    one = (
        effort.epochs
        * effort.records
        * _seconds_per_record(layers, min(effort.shadows, _MAX_TIMED_NETWORKS), 100)
    )
    costs = {"model": alone}
    if trial.method == "original":
        return costs | {"original": alone}
    if effort.attacks:
        labels = _labels(trial.group.source, data_dir)
        # Size of a shadow network's set relative to the target's, and share of the largest class.
        set_size = min(1.0, max(len(labels) - 2 * effort.records, 0) / (2 * effort.records))
        largest = float(np.bincount(labels).max() / len(labels))
        costs["shadows"] = set_size * effort.shadows * one
        # Every shadow network answers its set and as many other records. There is one attack network per class; that
        # of the largest class is still training when the others are finished.
        network = Shadow().network
        answers = 2 * effort.shadows * set_size * effort.records * effort.attack_epochs
        stack = (classes, *network.hidden, 2)
        other = (1 - largest) / (classes - 1)
        costs["attack"] = answers * (
            classes
            * other
            * _seconds_per_record(stack, min(classes, _MAX_TIMED_NETWORKS), network.batch_size)
            + (largest - other) * _seconds_per_record(stack, 1, network.batch_size)
        )
        if trial.method == "teachers":
            costs["attack on labels"] = costs["attack"]
    if trial.method.startswith("published-"):
        networks = len(PUBLISHED_ACCOUNTANTS) * len(EPSILONS)
        costs["dpsgd"] = networks * _DPSGD_NETWORK * one
    return costs


def _fit_seconds(trial: Trial) -> float:
    """Time of the trial's own training."""
    width, classes = _shape(trial.group.source)
    values = trial.group.effort.records * width * classes
    if width >= _SMALLEST_IMAGE:
        values = int(values * _FEATURES_PER_PIXEL)
    if trial.method.startswith("dpsgd"):
        return _DPSGD_SECONDS_PER_VALUE * values
    return _SECONDS_PER_VALUE.get(trial.method, 0.0) * values


def _shape(source: DataSource) -> tuple[int, int]:
    """Features and classes."""
    registered = dataset(source.name)
    return registered.width or registered.features, registered.classes


@cache
def _seconds_per_record(widths: tuple[int, ...], networks: int, batch: int) -> float:
    """Measure the training time per network, record and epoch with a few epochs of a small stack."""
    generator = np.random.default_rng(0)
    features = generator.random((_TIMED_RECORDS, widths[0]), dtype=np.float32)
    labels = generator.integers(widths[-1], size=_TIMED_RECORDS)
    rows, seeds = [np.arange(_TIMED_RECORDS)] * networks, list(range(networks))

    def seconds(epochs: int) -> float:
        settings = TrainingSettings(hidden=widths[1:-1], epochs=epochs, batch_size=batch)
        started = time.process_time()
        train_stack(features, labels, widths[-1], rows, settings=settings, seeds=seeds)
        return time.process_time() - started

    # The difference of two runs leaves out what is done once; the longer run is long enough for the clock.
    epochs = int(np.clip(_MIN_SECONDS / max(seconds(1), 1e-3), 2, 60))
    differences = sorted(seconds(1 + epochs) - seconds(1) for _ in range(_TIMINGS))
    return max(differences[_TIMINGS // 2], 1e-6) / (epochs * networks * _TIMED_RECORDS)

"""Workers that compute one trial at a time: processes on this machine, or Ray actors on a cluster.

A worker keeps what it loaded and trained for its last group, so the trials of one group are best given to one worker.
Each worker computes with one thread, so that two workers use two cores.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Protocol

import torch

from quietmax._ray import Actors, Lost, RayEngine
from quietmax.errors import QuietmaxError
from quietmax.experiments.grid import Trial
from quietmax.experiments.results import Result

Compute = Callable[[Trial], Result]
ComputeFactory = Callable[[], Compute]
"""Called once in every worker; what it returns is called for every trial. It must be picklable."""

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


@dataclass(frozen=True)
class TrialOutcome:
    """What became of a trial."""

    worker: int  # Number of the worker
    result: Result | None = None  # The result, if the trial succeeded
    failure: str = ""  # What went wrong, if it failed
    died: bool = False  # Whether the worker itself was lost


class Workers(Protocol):
    """Workers numbered from 0. Each computes at most one trial at a time."""

    @property
    def count(self) -> int:
        """Number of workers."""
        ...

    def submit(self, worker: int, trial: Trial) -> None:
        """Send a trial to an idle worker."""
        ...

    def next_outcome(self) -> TrialOutcome:
        """Wait for the next outcome. A worker that died has been replaced by then."""
        ...

    def stop(self) -> None:
        """End all workers at once."""
        ...


def start_workers(factory: ComputeFactory, count: int | None = None, ray: str | None = None) -> Workers:
    """Start workers."""
    if ray is not None:
        return RayWorkers(factory, address=ray, count=count)
    return LocalWorkers(factory, count or usable_cores())


def usable_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compute_trial(compute: Compute, trial: Trial) -> tuple[Result | None, str]:
    """Compute a trial and catch what goes wrong."""
    try:
        return compute(trial), ""
    except QuietmaxError as error:
        return None, str(error)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(place.filename)}:{place.lineno}"
        return None, f"{type(error).__name__}: {error} ({where})"


class LocalWorkers:
    """Processes on this machine."""

    def __init__(self, factory: ComputeFactory, count: int) -> None:
        self._factory = factory
        self._context = multiprocessing.get_context("spawn")
        self._processes = [self._start() for _ in range(count)]

    @property
    def count(self) -> int:
        """Number of processes."""
        return len(self._processes)

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
        with _environment(_ONE_THREAD):
            process = self._context.Process(
                target=_work, args=(theirs, self._factory, os.getpid()), daemon=True
            )
            process.start()
        theirs.close()
        return process, ours


def _work(connection: Connection, factory: ComputeFactory, parent: int) -> None:
    """Compute what arrives until the other end closes. Ctrl-C is handled by the parent process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    compute: Compute | None = None
    while os.getppid() == parent:
        try:
            trial = connection.recv()
        except (EOFError, OSError):
            return
        if compute is None:
            compute = factory()
        try:
            connection.send(compute_trial(compute, trial))
        except OSError:
            return


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Actor:
    """What runs in a Ray actor."""

    def __init__(self, factory: ComputeFactory) -> None:
        torch.set_num_threads(1)
        self._factory = factory
        self._compute: Compute | None = None

    def compute(self, trial: Trial) -> tuple[Result | None, str]:
        if self._compute is None:
            self._compute = self._factory()
        return compute_trial(self._compute, trial)


class RayWorkers:
    """Ray actors of one core each."""

    def __init__(
        self, factory: ComputeFactory, *, address: str | None = None, count: int | None = None
    ) -> None:
        self._actors = Actors(RayEngine(address, count), _Actor, lambda _: (factory,))

    @property
    def count(self) -> int:
        """Number of actors."""
        return self._actors.count

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

"""Crew: workers that compute cells one at a time. Local processes here; Ray actors in `ray_crew`.

Each worker keeps what it loaded and trained for the last group, so cells of one group are best given to one worker.
A local worker is a fresh Python process: it computes with one thread, so that two workers fill two cores.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol

from quietmax.errors import QuietmaxError
from quietmax.experiments.grid import Trial
from quietmax.experiments.results import Result

Compute = Callable[[Trial], Result]
MakeCompute = Callable[[], Compute]
"""Called once in every worker; what it returns is called for every cell. It must be picklable."""


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: its ``result``, or a ``failure``; ``died`` if the worker itself was lost."""

    worker: int
    result: Result | None = None
    failure: str = ""
    died: bool = False


class Workers(Protocol):
    """Workers numbered from 0; each computes at most one cell at a time."""

    @property
    def workers(self) -> int:
        """How many there are."""
        ...

    def give(self, worker: int, trial: Trial) -> None:
        """Hand a cell to an idle worker."""
        ...

    def next(self) -> Outcome:
        """Wait for the next outcome; a worker that died has been replaced by then."""
        ...

    def stop(self) -> None:
        """End all workers at once."""
        ...


def outcome_of(compute: Compute, trial: Trial) -> tuple[Result | None, str]:
    """A cell's result, or what went wrong: a sentence for our own refusals, else the end of the traceback."""
    try:
        return compute(trial), ""
    except QuietmaxError as refusal:
        return None, str(refusal)
    except Exception as problem:
        place = traceback.extract_tb(problem.__traceback__)[-1]
        return (
            None,
            f"{type(problem).__name__}: {problem} ({os.path.basename(place.filename)}:{place.lineno})",
        )


class LocalWorkers:
    """Processes on this machine."""

    def __init__(self, make_compute: MakeCompute, workers: int, *, threads: int = 1) -> None:
        self._make, self._threads = make_compute, threads
        self._context = multiprocessing.get_context("spawn")
        self._members = [self._hire() for _ in range(workers)]

    @property
    def workers(self) -> int:
        """How many processes there are."""
        return len(self._members)

    def give(self, worker: int, trial: Trial) -> None:
        """Send a cell to a process; if it is gone, `next` will say so."""
        try:
            self._members[worker][1].send(trial)
        except OSError:
            return

    def next(self) -> Outcome:
        """Wait for the next answer or death."""
        connections = [connection for _, connection in self._members]
        worker = connections.index(wait(connections)[0])  # type: ignore[arg-type]
        process, connection = self._members[worker]
        try:
            result, failure = connection.recv()
        except (EOFError, OSError):
            process.join()
            connection.close()
            self._members[worker] = self._hire()
            return Outcome(
                worker, failure=f"the worker process ended with code {process.exitcode}", died=True
            )
        return Outcome(worker, result, failure)

    def stop(self) -> None:
        """Kill all processes; nothing is lost, as results are stored by whoever asked for them."""
        for process, connection in self._members:
            process.kill()
            process.join()
            connection.close()

    def _hire(self) -> tuple[SpawnProcess, Connection]:
        ours, theirs = self._context.Pipe()
        with _environment(_threads(self._threads)):
            process = self._context.Process(
                target=_work, args=(theirs, self._make, self._threads, os.getpid()), daemon=True
            )
            process.start()
        theirs.close()
        return process, ours


def _work(connection: Connection, make_compute: MakeCompute, threads: int, parent: int) -> None:
    """A worker's life: compute what arrives until the other end closes. Ctrl-C is the driver's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit_threads(threads)
    compute: Compute | None = None
    while os.getppid() == parent:
        try:
            trial = connection.recv()
        except (EOFError, OSError):
            return
        if compute is None:
            compute = make_compute()
        try:
            connection.send(outcome_of(compute, trial))
        except OSError:
            return


def limit_threads(threads: int) -> None:
    """Let torch compute with this many threads."""
    import torch

    torch.set_num_threads(threads)


def _threads(threads: int) -> Mapping[str, str]:
    return {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


class _environment:
    """Environment variables for processes started meanwhile."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> None:
        self._before = {name: os.environ.get(name) for name in self._values}
        os.environ.update(self._values)

    def __exit__(self, *_: Any) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _Worker:
    """What an actor is."""

    def __init__(self, make_compute: MakeCompute) -> None:
        limit_threads(1)
        self._make = make_compute
        self._compute: Compute | None = None

    def compute(self, trial: Trial) -> tuple[Result | None, str]:
        """A cell's result, or what went wrong."""
        if self._compute is None:
            self._compute = self._make()
        return outcome_of(self._compute, trial)

    def process_id(self) -> int:
        """The actor's process."""
        import os

        return os.getpid()


class RayWorkers:
    """Actors of one core each; an actor that dies is replaced, and the runner gives its cell out again."""

    def __init__(
        self, make_compute: MakeCompute, *, address: str | None = None, workers: int | None = None
    ) -> None:
        self._ray = _imported()
        self._make = make_compute
        # A cluster someone else started stays; one started here ends with the crew.
        self._started_here = not self._ray.is_initialized()
        if self._started_here:
            try:
                self._ray.init(
                    address=address, include_dashboard=False, log_to_driver=False, configure_logging=False
                )
            except (ConnectionError, RuntimeError, ValueError) as problem:
                raise QuietmaxError(
                    f"Ray could not be reached at {address or 'this machine'} ({problem}); start a cluster with 'ray "
                    "start --head', or leave --ray out."
                ) from problem
        count = workers or int(self._ray.cluster_resources().get("CPU", 1))
        environment = {"env_vars": {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}}
        self._actor = self._ray.remote(_Worker).options(num_cpus=1, max_restarts=0, runtime_env=environment)
        self._members = [self._actor.remote(make_compute) for _ in range(max(count, 1))]
        self._asked: dict[Any, int] = {}

    @property
    def workers(self) -> int:
        """How many actors there are."""
        return len(self._members)

    def process_id(self, worker: int) -> int:
        """An actor's process number, for whoever wants to watch it; waits for the actor to be idle."""
        return int(self._ray.get(self._members[worker].process_id.remote()))

    def give(self, worker: int, trial: Trial) -> None:
        """Send a cell to an actor."""
        self._asked[self._members[worker].compute.remote(trial)] = worker

    def next(self) -> Outcome:
        """Wait for the next answer or death."""
        (finished, *_), _ = self._ray.wait(list(self._asked), num_returns=1)
        worker = self._asked.pop(finished)
        try:
            result, failure = self._ray.get(finished)
        except self._ray.exceptions.RayError as problem:
            self._members[worker] = self._actor.remote(self._make)
            return Outcome(worker, failure=f"the Ray worker was lost ({type(problem).__name__})", died=True)
        return Outcome(worker, result, failure)

    def stop(self) -> None:
        """End all actors, and the cluster if it was started here."""
        for member in self._members:
            self._ray.kill(member)
        if self._started_here:
            self._ray.shutdown()


def _imported() -> Any:
    try:
        import ray
    except ImportError:
        raise QuietmaxError(
            "--ray needs the package Ray, which is not installed; install quietmax[ray], or leave --ray out."
        ) from None
    return ray

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
from quietmax.experiments.cell import Cell
from quietmax.experiments.store import Result

Compute = Callable[[Cell], Result]
MakeCompute = Callable[[], Compute]
"""Called once in every worker; what it returns is called for every cell. It must be picklable."""


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: its ``result``, or a ``failure``; ``died`` if the worker itself was lost."""

    worker: int
    result: Result | None = None
    failure: str = ""
    died: bool = False


class Crew(Protocol):
    """Workers numbered from 0; each computes at most one cell at a time."""

    @property
    def workers(self) -> int:
        """How many there are."""
        ...

    def give(self, worker: int, cell: Cell) -> None:
        """Hand a cell to an idle worker."""
        ...

    def next(self) -> Outcome:
        """Wait for the next outcome; a worker that died has been replaced by then."""
        ...

    def stop(self) -> None:
        """End all workers at once."""
        ...


def outcome_of(compute: Compute, cell: Cell) -> tuple[Result | None, str]:
    """A cell's result, or what went wrong: a sentence for our own refusals, else the end of the traceback."""
    try:
        return compute(cell), ""
    except QuietmaxError as refusal:
        return None, str(refusal)
    except Exception as problem:
        place = traceback.extract_tb(problem.__traceback__)[-1]
        return (
            None,
            f"{type(problem).__name__}: {problem} ({os.path.basename(place.filename)}:{place.lineno})",
        )


class LocalCrew:
    """Processes on this machine."""

    def __init__(self, make_compute: MakeCompute, workers: int, *, threads: int = 1) -> None:
        self._make, self._threads = make_compute, threads
        self._context = multiprocessing.get_context("spawn")
        self._members = [self._hire() for _ in range(workers)]

    @property
    def workers(self) -> int:
        """How many processes there are."""
        return len(self._members)

    def give(self, worker: int, cell: Cell) -> None:
        """Send a cell to a process; if it is gone, `next` will say so."""
        try:
            self._members[worker][1].send(cell)
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
            cell = connection.recv()
        except (EOFError, OSError):
            return
        if compute is None:
            compute = make_compute()
        try:
            connection.send(outcome_of(compute, cell))
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

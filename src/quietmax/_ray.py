"""Work on the workers of a Ray cluster, each with one core. A worker that is lost is replaced."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from quietmax.errors import InvalidInput, QuietmaxError

MOST_LOSSES = 3
"""A piece of work is given up when its worker was lost this many times."""
START_SECONDS = 300.0
"""A worker must start within this time; the cores of the cluster may be in use."""
_LOOK_SECONDS = 5.0
"""How long a wait lasts before it looks whether the workers are there."""
_KNOCK_SECONDS = 5.0
_ANSWER_SECONDS = 60.0
_TRIAL = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False)"
_ADDRESS = r"auto|local|[^\s/]+:\d+"


@dataclass(frozen=True)
class RayEngine:
    """Computes on a Ray cluster.

    A head is trained on rows in the memory of the workers; a row needs 4 bytes for every feature. The workers read
    files and datasets themselves, so all machines must see them at the same path, and have the same version of
    Quietmax. Rows of arrays, frames and streams are read here and sent to the workers.

    Parameters
    ----------
    address : str, optional
        Address of a cluster, such as "host:6379" or "auto"; this machine must be part of it. By default, and for
        "local", a cluster is started on this machine, which ends with the work. If this process is connected to a
        cluster already, that one is used.
    workers : int, optional
        Number of workers, of one core each; by default one for each core of the cluster.
    progress : callable, optional
        Called with what is done and the total.

    Raises
    ------
    InvalidInput
        If an argument is not valid.

    Examples
    --------
    >>> RayEngine(workers=8)
    RayEngine(address=None, workers=8, progress=None)
    """

    address: str | None = None
    workers: int | None = None
    progress: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        if self.workers is not None and (not isinstance(self.workers, int) or self.workers < 1):
            raise InvalidInput(f"workers must be a positive integer, got {self.workers!r}.")
        if self.address is not None and not is_ray_address(self.address):
            raise InvalidInput(
                f"The address of a Ray cluster must be host:port, 'auto' or 'local', got {self.address!r}."
            )


def is_ray_address(text: str) -> bool:
    """Return whether a text can be the address of a cluster."""
    return re.fullmatch(_ADDRESS, text) is not None


@dataclass(frozen=True)
class Lost:
    """What `Actors.next` returns for a call whose worker was lost."""

    reason: str  # What Ray reported


class Actors:
    """Workers of one core each, which are Ray actors. Each makes at most one call at a time."""

    def __init__(
        self, engine: RayEngine, kind: type[Any], arguments: Callable[[int], tuple[Any, ...]] = lambda _: ()
    ) -> None:
        self._ray, self._connected_here = _connected(engine.address)
        self._arguments = arguments
        self._actors: dict[int, Any] = {}
        self._starting: dict[int, tuple[Any, float]] = {}
        self._calls: dict[Any, int] = {}
        try:
            cores = int(self._ray.cluster_resources().get("CPU", 0))
            if (engine.workers or 1) > cores:
                raise InvalidInput(
                    f"workers must be at most {cores}, the number of cores of the Ray cluster, got {engine.workers}."
                )
        except BaseException:
            self.close()
            raise
        self.count = engine.workers or cores
        self.kind = kind
        self._remote = self._ray.remote(kind).options(num_cpus=1, max_restarts=0, max_task_retries=0)

    def __enter__(self) -> Actors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers; and the cluster, if it was started here."""
        try:
            for actor in self._actors.values():
                self._end(actor)
        finally:
            for known in (self._actors, self._starting, self._calls):
                known.clear()
            if self._connected_here:
                self._connected_here = False
                self._ray.shutdown()

    def put(self, value: Any) -> Any:
        """Copy a value to the cluster."""
        return self._ray.put(value)

    def send(self, worker: int, method: str, *arguments: Any) -> None:
        """Call a method of an idle worker, which is started if there is none of this number."""
        if worker not in self._actors:
            actor = self._start(worker)
            self._actors[worker] = actor
            self._starting[worker] = (actor.__ray_ready__.remote(), time.monotonic())
        self._calls[getattr(self._actors[worker], method).remote(*arguments)] = worker

    def next(self) -> tuple[int, Any]:
        """Wait for the next call that ends."""
        call = self._ended_call()
        worker = self._calls.pop(call)
        try:
            return worker, self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            raise (error.cause or error) from None
        except self._ray.exceptions.RayError as error:
            self._end(self._actors.pop(worker))
            return worker, Lost(type(error).__name__)

    def results(self, method: str, jobs: Iterable[tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
        """Give jobs to the workers until all are done. The job of a worker that is lost is done again."""
        numbered, idle = enumerate(jobs), deque(range(self.count))
        running: dict[int, tuple[int, tuple[Any, ...]]] = {}
        losses: Counter[int] = Counter()
        while True:
            while idle and (following := next(numbered, None)) is not None:
                worker = idle.popleft()
                running[worker] = following
                self.send(worker, method, *following[1])
            if not running:
                return
            worker, result = self.next()
            job, arguments = running[worker]
            if isinstance(result, Lost):
                losses[job] += 1
                if losses[job] == MOST_LOSSES:
                    raise QuietmaxError(
                        f"A Ray worker was lost {MOST_LOSSES} times at the same work ({result.reason}). It may need "
                        "more memory than its machine has, or its machine may not have Quietmax."
                    )
                self.send(worker, method, *arguments)
                continue
            del running[worker]
            idle.append(worker)
            yield job, result

    def _start(self, worker: int) -> Any:
        return self._remote.remote(*self._arguments(worker))

    def _end(self, actor: Any) -> None:
        self._ray.kill(actor)

    def _ended_call(self) -> Any:
        """Wait for a call that has ended; look now and then whether Ray is there and workers have started."""
        while True:
            ended, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=_LOOK_SECONDS)
            if ended:
                return ended[0]
            self._check_connection()
            for worker in self._calls.values():
                if worker in self._starting:
                    self._look(worker)

    def _check_connection(self) -> None:
        """Raise if this machine has left the cluster: then no call would ever end."""
        here = self._ray.get_runtime_context().get_node_id()
        if not any(node["Alive"] and node["NodeID"] == here for node in self._ray.nodes()):
            raise QuietmaxError(
                "Ray has stopped on this machine, before the work was done. Its logs, usually in /tmp/ray, may say why."
            )

    def _look(self, worker: int) -> None:
        """Raise if a worker has not started in time."""
        ready, since = self._starting[worker]
        started, _ = self._ray.wait([ready], timeout=0)
        if started:
            del self._starting[worker]
        elif time.monotonic() - since > START_SECONDS:
            raise QuietmaxError(
                f"A Ray worker did not start within {START_SECONDS:g} seconds: the cores of the cluster may be in use "
                "by others. A smaller number of workers may help."
            )


def ray_map(
    engine: RayEngine,
    function: Callable[..., Any],
    jobs: Iterable[tuple[Any, ...]],
    *,
    shared: tuple[Any, ...] = (),
    total: int | None = None,
    probe: Callable[[], bytes] | None = None,
) -> Iterator[Any]:
    """Call a function once for each job, on the workers of a Ray cluster."""
    probed: set[bytes] = set()
    with Actors(engine, _Caller, lambda _: (probe,)) as actors:
        common = [actors.put(value) for value in shared]
        early: dict[int, Any] = {}
        following = 0
        results = actors.results("call", ((function, *common, *own) for own in jobs))
        for done, (job, (found, result)) in enumerate(results, start=1):
            probed.add(found)
            _check_alike(probed)
            early[job] = result
            if engine.progress is not None and total is not None:
                engine.progress(done, total)
            while following in early:
                yield early.pop(following)
                following += 1


class _Caller:
    """Calls functions; this is a Ray actor."""

    def __init__(self, probe: Callable[[], bytes] | None = None) -> None:
        import torch

        torch.set_num_threads(1)
        self._probed = b"" if probe is None else probe()

    def call(self, function: Callable[..., Any], *arguments: Any) -> tuple[bytes, Any]:
        return self._probed, function(*arguments)


def _check_alike(probed: set[bytes]) -> None:
    """Raise `QuietmaxError` if workers computed different numbers from the same public ones.

    Which worker computes what depends on the number of rows and on time. So if two machines round differently, the
    numbers of one record would depend on other records (THEORY 3.8).
    """
    if len(probed) > 1:
        raise QuietmaxError(
            "Two workers of the Ray cluster compute different numbers from the same public rows, so the numbers of a "
            "record would depend on the machine it is on. All machines must have the same kind of processor and the "
            "same versions of all libraries."
        )


def _connected(address: str | None) -> tuple[Any, bool]:
    """Return Ray, connected to a cluster, and whether the connection was made here."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report to its makers
    try:
        import ray
    except ImportError:
        raise QuietmaxError("Ray is not installed. It comes with: pip install 'quietmax[ray]'.") from None
    if ray.is_initialized():
        return ray, False
    started_here = address in (None, "local")
    try:
        if not started_here:
            _try_connection(str(address))
        logging.getLogger("ray").setLevel(logging.CRITICAL)
        with _kept_sigterm():
            ray.init(
                address=address or "local",
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
            )
        _silence()
    except Exception as error:
        told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        reason = (told.strip() or type(error).__name__).splitlines()[0].rstrip(".")
        if started_here:
            raise QuietmaxError(f"Ray could not be started on this machine: {reason}.") from error
        raise QuietmaxError(
            f"Ray could not be reached at {address}: {reason}. `ray start --head` starts a cluster. "
            "If the cluster uses tokens, as Ray's clusters do by default, set RAY_AUTH_MODE=token."
        ) from error
    return ray, True


@contextmanager
def _kept_sigterm() -> Iterator[None]:
    """Keep the handler of SIGTERM that the program has set; Ray sets one that ends the process without a word."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if handler not in (signal.SIG_DFL, None):
            with suppress(ValueError):  # not in the main thread, where Ray sets none either
                signal.signal(signal.SIGTERM, handler)


def _silence() -> None:
    """Keep Ray from printing every lost worker on stdout, for which it has no setting. We report what matters."""
    printing = sys.modules.get("ray._private.worker")
    if hasattr(printing, "print_to_stdstream"):
        setattr(printing, "print_to_stdstream", lambda *_, **__: None)  # noqa: B010


def _try_connection(address: str) -> None:
    """Raise `OSError` if no cluster answers at an address. Ray itself would wait for minutes, and print its trials."""
    if address != "auto":
        host, _, port = address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK_SECONDS).close()
    try:
        trial = subprocess.run(
            [sys.executable, "-c", _TRIAL, address],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ANSWER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConnectionError(f"no answer within {_ANSWER_SECONDS:g} seconds") from None
    if trial.returncode != 0:
        said = [line for line in trial.stderr.splitlines() if line.strip()]
        reason = said[-1].partition(": ")[2] or said[-1] if said else "no answer"
        # Ray would name options that are not ours.
        missing = "Could not find any running Ray instance" in reason
        raise ConnectionError("no cluster runs on this machine" if missing else reason)

"""The supervisor: runs the workers of a service in child processes on one port, and restarts each that dies."""

from __future__ import annotations

import ctypes
import fcntl
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from quietmax.errors import LedgerUnavailable, QuietmaxError
from quietmax.server.log import Log
from quietmax.server.metrics import Metrics
from quietmax.server.protocol import ConnectionShare
from quietmax.server.run import Listener, run
from quietmax.server.service import Service

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SIGNALS = (*_STOP_SIGNALS, signal.SIGHUP)
_MIN_UPTIME = 2.0
_MAX_FAILURES = 3
_LEDGER_UNAVAILABLE = 75
_MAX_RESTART_DELAY = 5.0
_PR_SET_PDEATHSIG = 1


def supervise(
    create_service: Callable[[Metrics], Service],
    listener: Listener,
    opened: socket.socket,
    log: Log,
    workers: int = 1,
) -> None:
    """Run a service in worker processes on one socket, and restart each that dies, until a signal asks to stop.

    SIGTERM and SIGINT to the supervisor stop all workers gracefully; a second one kills them. SIGHUP is passed on to
    the workers. A worker that ends for another reason is restarted, also if somebody else has asked it to stop.
    """
    shares = ConnectionShare.of_workers(workers)
    with _metrics_folder(workers) as folder:

        def serve(number: int) -> None:
            metrics = Metrics() if folder is None else Metrics.of_worker(folder, number)
            try:
                run(create_service(metrics), listener, opened, shares[number] if workers > 1 else None)
            finally:
                shares[number].close()

        with _Supervisor(serve, shares, opened, log) as supervisor:
            supervisor.run(workers)


@contextmanager
def _metrics_folder(workers: int) -> Iterator[Path | None]:
    """Make a folder where several workers count together; one worker needs none."""
    if workers == 1:
        yield None
        return
    with shared_folder("quietmax-metrics-") as folder:
        yield folder


@contextmanager
def shared_folder(prefix: str) -> Iterator[Path]:
    """Make a folder that only this user can read, in memory if possible, for what the workers share.

    The processes that use it hold a lock on it. Folders that nobody locks are left over from processes that were
    killed, and are removed.
    """
    place = _shared_place()
    for abandoned in place.glob(f"{prefix}*"):
        with suppress(OSError), _locked(abandoned):
            shutil.rmtree(abandoned, ignore_errors=True)
    with ExitStack() as stack:
        while True:
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
            # Another service that starts now may have found the folder before it was locked, and removed it.
            with suppress(BlockingIOError, FileNotFoundError):
                stack.enter_context(_locked(folder))
                break
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder for this process and its forks; raise OSError if another process has locked or removed it."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.stat(folder)
        yield
    finally:
        os.close(lock)


def _shared_place() -> Path:
    """Return a place for temporary files, in memory if possible."""
    in_memory = Path("/dev/shm")
    return in_memory if os.access(in_memory, os.W_OK) else Path(tempfile.gettempdir())


class _Worker:
    """A worker process: what runs now, and how often it died right after its start."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.failures = 0
        self.process = 0
        self.ended = -1
        """The end of a pipe that closes when the process ends, in whatever way."""
        self.started = 0.0
        self.start_at = 0.0

    def start(self, serve: Callable[[int], None], restore_signals: Callable[[], None]) -> None:
        """Start the process. Signals must be blocked; the process accepts them once it has its own handlers."""
        parent = os.getpid()
        self.ended, alive = os.pipe()
        self.started = time.monotonic()
        self.process = os.fork()
        if self.process == 0:
            restore_signals()
            _run_and_exit(lambda: serve(self.number), parent)
        os.close(alive)

    def wait(self) -> int:
        """Wait until the process has ended; return its exit code, negative if a signal ended it."""
        _, status = os.waitpid(self.process, 0)
        os.close(self.ended)
        self.process = 0
        return os.waitstatus_to_exitcode(status)

    def send(self, number: int) -> None:
        """Send a signal to the process, if there is one."""
        if self.process:
            with suppress(ProcessLookupError):
                os.kill(self.process, number)


class _Supervisor:
    """Starts workers, waits for what happens to them, and passes signals on."""

    def __init__(
        self,
        serve: Callable[[int], None],
        shares: list[ConnectionShare],
        opened: socket.socket,
        log: Log,
    ) -> None:
        self._serve = serve
        self._shares = shares
        self._opened = opened
        self._log = log
        self._workers: list[_Worker] = []
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()

    def __enter__(self) -> _Supervisor:
        self._handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        for end in (self._woken, self._wake):
            end.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        for number in _STOP_SIGNALS:
            signal.signal(number, self._stop)
        signal.signal(signal.SIGHUP, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore_signals()
        self._selector.close()
        self._woken.close()
        self._wake.close()

    def run(self, count: int) -> None:
        """Run so many workers until all have ended."""
        self._workers = [_Worker(number) for number in range(count)]
        waiting, running = list(self._workers), 0
        while running or (waiting and not self._stopping):
            now = time.monotonic()
            for worker in [each for each in waiting if each.start_at <= now and not self._stopping]:
                self._start(worker)
                waiting.remove(worker)
                running += 1
            for worker in self._ended(min((each.start_at for each in waiting), default=None)):
                running -= 1
                if self._is_restarted(worker):
                    waiting.append(worker)

    def _start(self, worker: _Worker) -> None:
        # A worker that still had the supervisor's handlers would signal its siblings.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            worker.start(self._serve, self._become_worker)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._selector.register(worker.ended, selectors.EVENT_READ, worker)
        if self._stopping:
            worker.send(signal.SIGTERM)

    def _ended(self, until: float | None) -> list[_Worker]:
        """Wait for a worker to end, a signal, or a moment; return the workers that have ended."""
        timeout = None if until is None or self._stopping else max(until - time.monotonic(), 0.0)
        ended = []
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
            else:
                self._selector.unregister(key.fd)
                ended.append(key.data)
        return ended

    def _is_restarted(self, worker: _Worker) -> bool:
        """Note that a worker has ended; return whether it starts again, and set when."""
        code = worker.wait()
        self._shares[worker.number].close()
        if self._stopping:
            return False
        now = time.monotonic()
        uptime = now - worker.started
        worker.failures = worker.failures + 1 if uptime < _MIN_UPTIME else 0
        self._log.event("died", worker=worker.number, code=code, seconds=round(uptime, 2))
        if code == _LEDGER_UNAVAILABLE:
            worker.start_at = now + min(0.1 * 2 ** min(worker.failures, 8), _MAX_RESTART_DELAY)
        elif worker.failures >= _MAX_FAILURES:
            self._stop_workers()
            self._log.flush()
            raise QuietmaxError("The service died several times right after its start; the log says why.")
        return True

    def _stop_workers(self) -> None:
        """Stop all workers that still run, and wait for them."""
        self._stop(signal.SIGTERM, None)
        for worker in self._workers:
            if worker.process:
                worker.wait()

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        """Ask all workers to stop; when asked a second time, kill them."""
        for worker in self._workers:
            worker.send(signal.SIGKILL if self._stopping else signal.SIGTERM)
        self._stopping = True
        self._opened.close()  # nobody waits for a worker that will not come

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        for worker in self._workers:
            worker.send(number)

    def _become_worker(self) -> None:
        """In a new worker: restore the signal handlers, ignore SIGHUP, and accept signals again."""
        self._restore_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def _restore_signals(self) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


def _run_and_exit(serve: Callable[[], None], parent: int) -> NoReturn:
    """Serve in a worker, and exit without returning into the supervisor's code."""
    code = 1
    log = Log()
    try:
        _stop_with_parent(parent)
        serve()
        code = 0
    except LedgerUnavailable as error:
        code = _LEDGER_UNAVAILABLE
        log.event("not_started", error=str(error))
    except QuietmaxError as error:
        log.event("not_started", error=str(error))
    except KeyboardInterrupt:  # asked to stop before it was ready
        code = 130
    except BaseException as error:
        log.failure(error)
    finally:
        log.flush()
        os._exit(code)


def _stop_with_parent(parent: int) -> None:
    """Ask Linux to stop this process when its parent ends; elsewhere it goes on alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

"""Run the service with uvicorn: in this process, in a thread, or in worker processes that a supervisor restarts.

The defaults are safe on a laptop and behind a proxy: loopback only unless TLS is set up, and proxy headers are never
trusted.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib.util
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import uvicorn

from quietmax.errors import InvalidInput, LedgerUnavailable, QuietmaxError
from quietmax.server.app import create_app
from quietmax.server.protocol import Connections, ConnectionShare, LimitedProtocol
from quietmax.server.service import Service
from quietmax.server.settings import Listener
from quietmax.server.telemetry import Log, Metrics, _libraries_logged

_START_TIMEOUT = 120.0
_SHUTDOWN_TIMEOUT = 15
_SWITCH_INTERVAL = 0.0005
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SIGNALS = (*_STOP_SIGNALS, signal.SIGHUP)
_MIN_UPTIME = 2.0
_MAX_FAILURES = 3
_LEDGER_UNAVAILABLE = 75
_MAX_RESTART_DELAY = 5.0
_RESTART_INTERVAL = 0.05
_PR_SET_PDEATHSIG = 1


def _grpc_server(service: Service, listener: Listener) -> AbstractAsyncContextManager[None] | None:
    """Return the gRPC server to run beside HTTP, if there is one."""
    if listener.grpc_port is None:
        return None
    # Not imported before the fork, which the threads of grpc do not survive.
    # The core of gRPC writes to standard error itself, and would wait for ever while nobody reads it.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from quietmax.server.grpc_server import serving

    tls = None if listener.tls_content is None else partial(getattr, listener, "tls_content")
    return serving(service, listener.host, listener.grpc_port, tls)


class _Server(uvicorn.Server):
    """uvicorn's server with limited connections. It stops on a signal."""

    def __init__(self, service: Service, listener: Listener, share: ConnectionShare | None = None) -> None:
        config = uvicorn.Config(
            create_app(service, _grpc_server(service, listener)),
            loop="uvloop" if importlib.util.find_spec("uvloop") is not None else "asyncio",
            http=LimitedProtocol,
            ws="none",
            access_log=False,
            log_config=None,
            log_level="warning",
            proxy_headers=False,  # they are never trusted
            server_header=False,
            timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT,
        )
        super().__init__(config)
        self._log = service.log
        self._share = share or ConnectionShare._of_workers(1)[0]
        self._connections = Connections(service, self._share, grpc=listener.grpc_port is not None)
        self._context = listener.ssl_context
        self._accepting: list[asyncio.Task[None]] = []
        self._checking: asyncio.Task[None] | None = None
        self._service, self._listener = service, listener
        self._reloading: Future[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM; unlike uvicorn's own server, do not raise them once more afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _STOP_SIGNALS}
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self.handle_reload)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, _sig: int, _frame: FrameType | None) -> None:
        """Stop gracefully. The supervisor, which gets the second signal too, kills what does not stop."""
        self.should_exit = True

    def handle_reload(self, _sig: int, _frame: FrameType | None) -> None:
        """Read the certificate and what is new in the model repository. What is broken is logged and left as it was."""
        if self.started:
            self._reloading = asyncio.run_coroutine_threadsafe(self._reload(), self._loop)

    async def _reload(self) -> None:
        try:
            self._listener._load_certificate()
            certificate, key = self._listener.tls_certificate, self._listener.tls_key
            if self._context is not None and certificate is not None:
                # Connections are accepted with this context, so it gets what was just found to be valid.
                self._context.load_cert_chain(certificate, key)
        except (InvalidInput, OSError) as error:
            self._service.log.event("certificate_invalid", error=str(error))
        await self._service._reload()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the service, then accept connections."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._log_error)
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(1)
        create = partial(
            LimitedProtocol,
            self._connections,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        self.servers = []
        self._checking = asyncio.create_task(self._connections._check())
        for listening in sockets or []:
            accepting = self._connections._accept(listening, create, self._context)
            self._accepting.append(asyncio.create_task(accepting))
        self.started = True

    def _log_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error that no task has handled; asyncio's own message would quote arguments."""
        error = context.get("exception")
        if isinstance(error, BaseException):
            self._log.failure(error, source="asyncio error")
        else:
            self._log.event("library", source="asyncio error", message="")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, answer the requests that were received, and stop the service."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        self._share._close()
        await super().shutdown(sockets)


def run(
    service: Service, listener: Listener, opened: socket.socket, share: ConnectionShare | None = None
) -> None:
    """Serve until a signal asks to stop. Requests in flight are answered first."""
    # The ledger's thread releases the interpreter lock at every statement and must not wait long to get it back.
    sys.setswitchinterval(_SWITCH_INTERVAL)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    try:
        listener._load_certificate()
    except InvalidInput as error:  # a broken one in its place: that which was valid at the start stays in use
        service.log.event("certificate_invalid", error=str(error))
    # What is loaded now stays. The garbage of requests is then found soon: a full collection waits until there is a
    # quarter as much of it as of all other objects.
    gc.freeze()
    with _libraries_logged(service.log):
        _Server(service, listener, share).run(sockets=[opened])
    service.log.flush()


@contextmanager
def run_in_thread(service: Service, listener: Listener | None = None) -> Iterator[str]:
    """Run a service in a thread of this process, for scripts and tests."""
    where = listener or Listener(port=0)
    opened = where.open_socket()
    server = _Server(service, where)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]}, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + _START_TIMEOUT
        while not server.started:
            if not thread.is_alive() or time.monotonic() > deadline:
                raise QuietmaxError("The service did not start.")
            time.sleep(0.01)
        yield where.url(opened)
    finally:
        server.should_exit = True
        thread.join()


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
    shares = ConnectionShare._of_workers(workers)
    with _metrics_folder() if workers > 1 else nullcontext() as folder:

        def _serve(number: int) -> None:
            metrics = Metrics() if folder is None else Metrics._of_worker(Path(folder), number)
            try:
                run(create_service(metrics), listener, opened, shares[number])
            finally:
                shares[number]._close()

        _Supervisor(_serve, shares, opened, log).run()


def _metrics_folder() -> AbstractContextManager[str]:
    """Make a folder that only this user can read, in memory if possible, for the counters of the workers."""
    in_memory = Path("/dev/shm")
    place = in_memory if os.access(in_memory, os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="quietmax-metrics-", dir=place)


@dataclass
class _Worker:
    """A worker process: what runs now, and how often it died right after its start."""

    number: int
    process: ForkProcess | None = None
    failures: int = 0
    started: float = 0.0
    start_at: float = 0.0

    def _send(self, number: int) -> None:
        if self.process is not None and self.process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)


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
        self._workers = [_Worker(number) for number in range(len(shares))]
        self._stopping = False
        self._handlers = {number: signal.getsignal(number) for number in _SIGNALS}

    def run(self) -> None:
        """Run the workers until all have ended."""
        for number in _STOP_SIGNALS:
            signal.signal(number, self._stop)
        signal.signal(signal.SIGHUP, self._forward)
        try:
            while not self._stopping or any(worker.process for worker in self._workers):
                for worker in self._workers:
                    if worker.process is None and worker.start_at <= time.monotonic() and not self._stopping:
                        self._start(worker)
                for worker in self._ended():
                    self._note_end(worker)
        finally:
            self._restore_signals()

    def _start(self, worker: _Worker) -> None:
        worker.started = time.monotonic()
        process = ForkProcess(target=self._be_worker, args=(worker.number, os.getpid()), daemon=True)
        # A worker that still had the supervisor's handlers would signal its siblings.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            process.start()
            worker.process = process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if self._stopping:
            worker._send(signal.SIGTERM)

    def _be_worker(self, number: int, parent: int) -> None:
        """In a new worker: restore the signal handlers, ignore SIGHUP, accept signals again, and serve."""
        self._restore_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        _run_and_exit(lambda: self._serve(number), parent)

    def _ended(self) -> list[_Worker]:
        """Wait for a worker to end, or a moment if one is waiting to be started; return those that have ended."""
        running = {worker.process.sentinel: worker for worker in self._workers if worker.process is not None}
        wait = None if self._stopping or len(running) == len(self._workers) else _RESTART_INTERVAL
        return [running[sentinel] for sentinel in connection.wait(running, wait)]  # type: ignore[index]

    def _note_end(self, worker: _Worker) -> None:
        """Note that a worker has ended, and when it starts again."""
        assert worker.process is not None
        worker.process.join()
        code, worker.process = worker.process.exitcode, None
        self._shares[worker.number]._close()
        if self._stopping:
            return
        now = time.monotonic()
        uptime = now - worker.started
        worker.failures = worker.failures + 1 if uptime < _MIN_UPTIME else 0
        self._log.event("died", worker=worker.number, code=code, seconds=round(uptime, 2))
        if code == _LEDGER_UNAVAILABLE:
            worker.start_at = now + min(0.1 * 2 ** min(worker.failures, 8), _MAX_RESTART_DELAY)
        elif worker.failures >= _MAX_FAILURES:
            self._stop(signal.SIGTERM, None)
            for other in self._workers:
                if other.process is not None:
                    other.process.join()
            self._log.flush()
            raise QuietmaxError("The service died several times right after its start; the log says why.")

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        """Ask all workers to stop; when asked a second time, kill them."""
        for worker in self._workers:
            worker._send(signal.SIGKILL if self._stopping else signal.SIGTERM)
        self._stopping = True
        self._opened.close()  # nobody waits for a worker that will not come

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        for worker in self._workers:
            worker._send(number)

    def _restore_signals(self) -> None:
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

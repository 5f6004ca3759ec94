"""Run the service with uvicorn, with defaults that are safe on a laptop and behind a proxy."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from quietmax.errors import InvalidInput, LedgerUnavailable, QuietmaxError
from quietmax.server.app import application
from quietmax.server.metrics import Log
from quietmax.server.service import Service
from quietmax.server.settings import is_loopback

SECONDS_TO_FINISH = 15
SWITCH_SECONDS = 0.0005


@dataclass(frozen=True)
class Listening:
    """Where the service listens. A proxy that ends TLS must be declared with `behind_proxy`."""

    host: str = "127.0.0.1"
    port: int = 8080
    certificate: Path | None = None
    private_key: Path | None = None
    behind_proxy: bool = False

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.private_key is None):
            raise InvalidInput("TLS needs a certificate and its private key; give both, or neither.")
        for file in (self.certificate, self.private_key):
            if file is not None and not file.is_file():
                raise InvalidInput(f"There is no file {file}; name the certificate and the key of this host.")
        if self.certificate is not None and self.private_key is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                    self.certificate, self.private_key, password=lambda: ""
                )
            except (OSError, ValueError) as problem:
                raise InvalidInput(
                    f"The certificate {self.certificate} and the key {self.private_key} cannot be used ({problem}); "
                    "give a PEM certificate and its own key, without a password."
                ) from problem
        if not is_loopback(self.host) and self.certificate is None and not self.behind_proxy:
            raise InvalidInput(
                f"On {self.host} keys would travel in the clear; give --tls-certificate and --tls-key, or "
                "--behind-proxy if a proxy in front speaks TLS."
            )

    @property
    def secure_cookies(self) -> bool:
        """Whether browsers reach the service over TLS."""
        return self.certificate is not None or self.behind_proxy


def check_anonymous(listening: Listening) -> None:
    """Anonymous access is for this machine only."""
    if not is_loopback(listening.host) or listening.behind_proxy:
        raise InvalidInput(
            "Anonymous access is only for this machine: listen on 127.0.0.1 and not behind a proxy, or use keys."
        )


def configuration(service: Service, listening: Listening) -> uvicorn.Config:
    """The server's configuration: no proxy headers are believed, nothing of requests is logged by uvicorn."""
    fast = importlib.util.find_spec("uvloop") is not None
    return uvicorn.Config(
        application(service),
        host=listening.host,
        port=listening.port,
        loop="uvloop" if fast else "asyncio",
        http="httptools" if importlib.util.find_spec("httptools") is not None else "h11",
        ws="none",
        access_log=False,
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=SECONDS_TO_FINISH,
        h11_max_incomplete_event_size=64 * 1024,
        ssl_certfile=listening.certificate,
        ssl_keyfile=listening.private_key,
    )


class _Server(uvicorn.Server):
    """Ends with a return when asked to stop; uvicorn's own would end the process by the signal once more."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop gracefully on SIGINT and SIGTERM; a second signal stops at once."""
        wanted = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in wanted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run(service: Service, listening: Listening, port: socket.socket) -> None:
    """Serve on an open port until a signal asks to stop; requests under way are answered first."""
    # The ledger's thread gives the interpreter away at every statement and must not wait long to get it back.
    sys.setswitchinterval(SWITCH_SECONDS)
    _Server(configuration(service, listening)).run(sockets=[port])


_STOPPING = (signal.SIGINT, signal.SIGTERM)
_AT_LEAST_SECONDS = 2.0
_MOST_FAILURES = 3
_LEDGER_AWAY = 75
_LONGEST_PAUSE_SECONDS = 5.0
_BACKLOG = 2048
_SIGNAL_AT_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG of Linux


def open_port(listening: Listening) -> socket.socket:
    """The listening socket, or one sentence why there is none."""
    family = socket.AF_INET6 if ":" in listening.host else socket.AF_INET
    port = socket.socket(family)
    try:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind((listening.host, listening.port))
        port.listen(_BACKLOG)
    except OSError as problem:
        port.close()
        raise InvalidInput(
            f"The service cannot listen on {listening.host}:{listening.port} ({problem.strerror}); choose another port."
        ) from problem
    return port


def supervise(make: Callable[[], Service], listening: Listening, port: socket.socket, log: Log) -> None:
    """Run the service that `make` builds in a child process, again whenever it dies, until asked to stop."""
    parent = _Parent()
    failures = 0
    number = os.getpid()
    with parent:
        while True:
            started = time.monotonic()
            child = os.fork()
            if child == 0:
                parent.restore()
                _serve(make, listening, port, number)
            code = parent.wait_for(child)
            if code == 0 or parent.asked_to_stop:
                return
            lasted = time.monotonic() - started
            failures = failures + 1 if lasted < _AT_LEAST_SECONDS else 0
            log.event("died", code=code, seconds=round(lasted, 2))
            if code == _LEDGER_AWAY:
                parent.pause(min(0.1 * 2 ** min(failures, 8), _LONGEST_PAUSE_SECONDS))
                if parent.asked_to_stop:
                    return
            elif failures >= _MOST_FAILURES:
                raise QuietmaxError(
                    "The service died several times right after its start; see the log for why."
                )


def _serve(make: Callable[[], Service], listening: Listening, port: socket.socket, parent: int) -> None:
    """The child: serve, and end without returning into the parent's code."""
    code = 1
    try:
        _end_with_parent(parent)
        run(make(), listening, port)
        code = 0
    except LedgerUnavailable as problem:
        code = _LEDGER_AWAY
        sys.stderr.write(f"quietmax: {problem}\n")
    except QuietmaxError as refusal:
        sys.stderr.write(f"quietmax: {refusal}\n")
    except BaseException as problem:
        sys.stderr.write(f"quietmax: the service failed ({type(problem).__name__})\n")
    finally:
        sys.stderr.flush()
        os._exit(code)


def _end_with_parent(parent: int) -> None:
    """Ask the system to stop this process when the parent is gone; only Linux can, elsewhere it goes on alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SIGNAL_AT_PARENTS_DEATH, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)


class _Parent:
    """The parent's signals: asked to stop, it asks the child to stop and waits for it."""

    def __init__(self) -> None:
        self.asked_to_stop = False
        self._child = 0
        self._before = {number: signal.getsignal(number) for number in _STOPPING}

    def __enter__(self) -> None:
        for number in _STOPPING:
            signal.signal(number, self._stop)

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Put the signals back as they were."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait_for(self, child: int) -> int:
        """The child's exit code; negative if a signal ended it."""
        self._child = child
        if self.asked_to_stop:
            os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        self._child = 0
        return os.waitstatus_to_exitcode(status)

    def pause(self, seconds: float) -> None:
        """Wait, but no longer than until asked to stop."""
        end = time.monotonic() + seconds
        while not self.asked_to_stop and time.monotonic() < end:
            time.sleep(0.02)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self.asked_to_stop = True
        if self._child:
            os.kill(self._child, signal.SIGTERM)

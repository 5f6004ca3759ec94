"""Run the service with uvicorn, in this process or in a thread.

The defaults are safe on a laptop and behind a proxy: loopback only unless TLS is set up, and proxy headers are never
trusted.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import math
import os
import resource
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Self

import uvicorn

from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.server.app import create_app
from quietmax.server.log import libraries_logged
from quietmax.server.protocol import Connections, ConnectionShare, LimitedProtocol
from quietmax.server.service import Service
from quietmax.server.settings import is_loopback

_START_TIMEOUT = 120.0
_SHUTDOWN_TIMEOUT = 15
_SWITCH_INTERVAL = 0.0005
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_BACKLOG = 2048


@dataclass(frozen=True)
class Listener:
    """Where the service listens."""

    host: str = "127.0.0.1"  # Address to listen on. Other addresses than loopback require TLS
    port: int = 8080  # Port to listen on; 0 for any free one
    tls_certificate: Path | None = None  # TLS certificate, a PEM file
    tls_key: Path | None = None  # Private key of the certificate, a PEM file without a password
    behind_proxy: bool = False  # Whether a proxy in front of the service ends TLS
    grpc_port: int | None = None
    ssl_context: ssl.SSLContext | None = field(init=False, default=None, compare=False, repr=False)
    tls_content: tuple[bytes, bytes] | None = field(init=False, default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise InvalidInput("TLS requires both `tls_certificate` and `tls_key`.")
        if self.grpc_port is not None and importlib.util.find_spec("grpc") is None:
            raise InvalidInput("gRPC requires the extra `grpc`: pip install 'quietmax[grpc]'.")
        for file in (self.tls_certificate, self.tls_key):
            if file is not None and not file.is_file():
                raise InvalidInput(f"There is no file {file}.")
        self.load_certificate()
        if not is_loopback(self.host) and self.tls_certificate is None and not self.behind_proxy:
            raise InvalidInput(
                f"API keys would be sent to {self.host} without encryption. Listening beyond loopback requires "
                "`tls_certificate` and `tls_key`, or `behind_proxy`."
            )

    def load_certificate(self) -> None:
        """Read the certificate and its key from their files, again if they were read before."""
        if self.tls_certificate is None or self.tls_key is None:
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            content = (self.tls_certificate.read_bytes(), self.tls_key.read_bytes())
            context.load_cert_chain(self.tls_certificate, self.tls_key, password=lambda: "")
        except (OSError, ValueError) as error:
            raise InvalidInput(
                f"{self.tls_certificate} and {self.tls_key} must be a PEM certificate and its private key "
                f"without a password ({error})."
            ) from error
        object.__setattr__(self, "ssl_context", context)
        object.__setattr__(self, "tls_content", content)

    @property
    def secure_cookies(self) -> bool:
        """Whether browsers reach the service over TLS."""
        return self.tls_certificate is not None or self.behind_proxy

    def check_anonymous(self) -> None:
        """Raise `InvalidInput` unless only this machine can reach the service, as anonymous access requires."""
        if not is_loopback(self.host) or self.behind_proxy:
            raise InvalidInput("Anonymous access requires a loopback address and no proxy.")

    def open_socket(self) -> socket.socket:
        """Open the listening socket."""
        opened = self._bind(self.port)
        try:
            opened.listen(_BACKLOG)
        except OSError as error:
            opened.close()
            raise self._listen_error(self.port, error) from error
        return opened

    def check_ports(self) -> None:
        """Raise `InvalidInput` if a port cannot be used. Nobody can connect in the meantime."""
        for port in (self.port, self.grpc_port):
            if port is not None:
                self._bind(port).close()

    @contextmanager
    def reserve_grpc_port(self) -> Iterator[Self]:
        """Keep the gRPC port for the server processes, which share it; another service cannot have it."""
        if self.grpc_port is None:
            yield self
            return
        with self._bind(self.grpc_port) as reserved:
            # Set only now: a port that another service listens on was refused above.
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            yield replace(self, grpc_port=reserved.getsockname()[1])

    def _bind(self, port: int) -> socket.socket:
        bound = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((self.host, port))
        except OSError as error:
            bound.close()
            raise self._listen_error(port, error) from error
        return bound

    def _listen_error(self, port: int, error: OSError) -> InvalidInput:
        return InvalidInput(f"Cannot listen on {self.host}:{port} ({error.strerror}).")

    def url(self, opened: socket.socket) -> str:
        """Return the URL of the service."""
        scheme = "http" if self.tls_certificate is None else "https"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{opened.getsockname()[1]}"


def uvicorn_config(service: Service, listener: Listener) -> uvicorn.Config:
    """Return the configuration of uvicorn. Proxy headers are never trusted; uvicorn logs no requests."""
    return uvicorn.Config(
        create_app(service, _grpc_server(service, listener)),
        host=listener.host,
        port=listener.port,
        loop="uvloop" if importlib.util.find_spec("uvloop") is not None else "asyncio",
        http=LimitedProtocol,
        ws="none",
        access_log=False,
        log_config=None,
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=math.ceil(service.settings.idle_timeout),
        timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT,
    )


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
    """uvicorn's server with limited connections. It stops on the first signal, and at once on the second."""

    def __init__(self, service: Service, listener: Listener, share: ConnectionShare | None = None) -> None:
        super().__init__(uvicorn_config(service, listener))
        self._log = service.log
        self._connections = Connections(
            service.settings,
            service.log,
            service.metrics,
            service.bodies,
            share,
            grpc=listener.grpc_port is not None,
        )
        self._received: set[int] = set()
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

    def handle_exit(self, sig: int, _frame: FrameType | None) -> None:
        """Stop gracefully on the first signal, and at once on the second: what was charged stays charged.

        The terminal sends Ctrl-C to the supervisor, too, which sends SIGTERM: two different signals are one request.
        """
        if sig in self._received:
            os._exit(128 + sig)
        self._received.add(sig)
        self.should_exit = True

    def handle_reload(self, _sig: int, _frame: FrameType | None) -> None:
        """Read the certificate and what is new in the model repository. What is broken is logged and left as it was."""
        if self.started:
            self._reloading = asyncio.run_coroutine_threadsafe(self._reload(), self._loop)

    async def _reload(self) -> None:
        try:
            self._listener.load_certificate()
            certificate, key = self._listener.tls_certificate, self._listener.tls_key
            if self._context is not None and certificate is not None:
                # Connections are accepted with this context, so it gets what was just found to be valid.
                self._context.load_cert_chain(certificate, key)
        except (InvalidInput, OSError) as error:
            self._service.log.event("certificate_invalid", error=str(error))
        await self._service.reload()

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
        self._checking = asyncio.create_task(self._connections.check())
        for listening in sockets or []:
            accepting = self._connections.accept(listening, create, self._context)
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
        self._connections.close_share()
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
        listener.load_certificate()
    except (
        InvalidInput
    ) as error:  # replaced by a broken one: the one that was valid at the start stays in use
        service.log.event("certificate_invalid", error=str(error))
    # What is loaded now stays. The garbage of requests is then found soon: a full collection waits until there is a
    # quarter as much of it as of all other objects.
    gc.freeze()
    with libraries_logged(service.log):
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

"""Run the service with uvicorn, with defaults that are safe on a laptop and behind a proxy."""

from __future__ import annotations

import importlib.util
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from quietmax.errors import InvalidInput
from quietmax.server.application import application
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

"""Settings of a running service: limits and options, whose tokens are accepted, and where it listens.

Every field, with its type, default and the sentence of the docstring, is declared here once. `quietmax serve` makes
command line options of them, which are also environment variables, keys of a TOML file and rows of the documentation.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import re
import secrets
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from quietmax.errors import InvalidInput

ANONYMOUS = "anonymous"
"""The client name of requests without an API key."""
SESSION_SECRET_BYTES = 32
_ISSUER = re.compile(r"https?://[!-~]{1,190}")
_BACKLOG = 2048
_PORT = {"min": 0, "max": 65535}
_NO_OPTION = {"option": False}
"""Marks what the command line does not set."""


def meanings(settings: type) -> dict[str, str]:
    """Return what each field of a class of settings means, as its docstring says."""
    found = re.findall(r"^(\w+) : .*\n((?:    .+\n?)+)", inspect.getdoc(settings) or "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


@dataclass(frozen=True)
class OidcSettings:
    """Whose tokens are accepted beside API keys, and what their claims mean.

    Parameters
    ----------
    issuer : str
        URL of an OpenID Connect issuer whose bearer tokens are accepted beside API keys; the same as in the claim iss.
    audience : str
        Audience (claim aud) that tokens must name. Required with `oidc_issuer`.
    client_claim : str
        Claim that names the client: a name, or a path with dots.
    admin_claim : str or None
        Claim that makes an administrator, for example realm_access.roles.
    admin_value : str or None
        Value that `oidc_admin_claim` must be equal to or contain.
    """

    issuer: str
    audience: str
    client_claim: str = "sub"
    admin_claim: str | None = None
    admin_value: str | None = None

    def __post_init__(self) -> None:
        if (
            not _ISSUER.fullmatch(self.issuer)
            or set("@?#") & set(self.issuer)
            or not is_private_url(self.issuer)
        ):
            raise InvalidInput(
                "`oidc_issuer` must be a URL with https, or with http and a loopback address, without @, ? and #, "
                f"got {self.issuer[:80]!r}."
            )
        if not self.audience or not self.client_claim:
            raise InvalidInput("`oidc_audience` and `oidc_client_claim` must not be empty.")
        if (self.admin_claim is None) != (self.admin_value is None):
            raise InvalidInput("`oidc_admin_claim` and `oidc_admin_value` require each other.")


@dataclass(frozen=True)
class Settings:
    """Limits and options of a service. Limits hold for each server process.

    Parameters
    ----------
    max_rows : int
        Most rows in one request.
    max_bytes : int
        Largest request body in bytes.
    max_body_memory : int
        Most bytes of all request bodies that a worker holds at the same time.
    timeout : float
        Seconds until a request is given up, and until its body must have arrived.
    header_timeout : float
        Seconds until the headers of a request must have arrived.
    idle_timeout : float
        Seconds until a connection without a request is closed.
    max_header_bytes : int
        Largest size of the headers of a request in bytes, with its URL.
    max_headers : int
        Most headers of a request.
    max_connections : int
        Most open connections of a worker. The limit on file descriptors may lower it.
    max_in_flight : int
        Most inference requests of a worker at the same time.
    rate_limit : float or None
        Requests per second of one client, in each worker. Default: no limit.
    rate_burst : int or None
        Requests that a client may send at once after a pause. Default: those of one second.
    anonymous : bool
        Answer requests without an API key (loopback only), as the client anonymous.
    answer_cache : bool
        Answer identical queries from the cache for free, or charge them again.
    request_log : bool
        Write a log line per request.
    otel : bool
        Export traces by OpenTelemetry (OTLP over HTTP), as the variables OTEL_* say.
    secure_cookies : bool
        Send the session cookie of the dashboard over TLS only.
    session_secret : bytes
        Signs the sessions of the dashboard; at least 32 bytes. Processes that share it accept each other's sessions.
        Default: a random one, so that sessions end when the service is started again.
    oidc : OidcSettings or None
        Whose tokens are accepted beside API keys. Default: none.
    """

    max_rows: int = 1000
    max_bytes: int = 16 * 2**20
    max_body_memory: int = 256 * 2**20
    timeout: float = 10.0
    header_timeout: float = 10.0
    idle_timeout: float = 60.0
    max_header_bytes: int = 32 * 2**10
    max_headers: int = 100
    max_connections: int = 1000
    max_in_flight: int = field(default=1024, metadata=_NO_OPTION)
    rate_limit: float | None = None
    rate_burst: int | None = None
    anonymous: bool = False
    answer_cache: bool = True
    request_log: bool = True
    otel: bool = False
    secure_cookies: bool = field(default=False, metadata=_NO_OPTION)
    session_secret: bytes = field(
        default_factory=lambda: secrets.token_bytes(SESSION_SECRET_BYTES),
        repr=False,
        compare=False,
        metadata=_NO_OPTION,
    )
    oidc: OidcSettings | None = field(default=None, metadata=_NO_OPTION)

    def __post_init__(self) -> None:
        if len(self.session_secret) < SESSION_SECRET_BYTES:
            raise InvalidInput(
                f"session_secret must have at least {SESSION_SECRET_BYTES} bytes, got {len(self.session_secret)}."
            )
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < math.inf:
                raise InvalidInput(f"{each.name} must be greater than 0, got {value}.")
        if self.max_body_memory < self.max_bytes:
            raise InvalidInput(
                f"max_body_memory must be at least max_bytes ({self.max_bytes}), got {self.max_body_memory}."
            )
        if self.rate_burst is not None and self.rate_limit is None:
            raise InvalidInput("`rate_burst` requires `rate_limit`.")


@dataclass(frozen=True)
class Listener:
    """Where the service listens.

    Parameters
    ----------
    host : str
        Address to listen on.
    port : int
        Port to listen on; 0: any free one.
    tls_certificate : Path or None
        TLS certificate (PEM file).
    tls_key : Path or None
        TLS private key (PEM file), without a password.
    behind_proxy : bool
        A proxy in front of the service ends TLS.
    grpc_port : int or None
        Also listen for gRPC on this port; 0: any free one. Requires quietmax[grpc].
    """

    host: str = "127.0.0.1"
    port: int = field(default=8080, metadata=_PORT)
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    behind_proxy: bool = False
    grpc_port: int | None = field(default=None, metadata=_PORT)
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


def read_session_secret(path: Path) -> bytes:
    """Read the secret that signs sessions of the dashboard from a file."""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise InvalidInput(f"Cannot read the session secret {path}: {error.strerror}.") from error
    if len(secret) < SESSION_SECRET_BYTES:
        raise InvalidInput(
            f"The session secret {path} must have at least {SESSION_SECRET_BYTES} bytes, got {len(secret)}."
        )
    return secret


def is_private_url(url: str) -> bool:
    """Tell whether nobody on the way can read or change what is fetched from a URL: https, or http on this machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return False
    return (parts.scheme == "https" and host != "") or (parts.scheme == "http" and is_loopback(host))


def is_loopback(host: str) -> bool:
    """Tell whether a host name can only mean this machine."""
    return host in ("localhost", "::1", "[::1]") or (
        host.startswith("127.") and host.replace(".", "").isdigit()
    )

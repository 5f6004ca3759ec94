"""Settings of a running service: limits and options, whose tokens are accepted, and where it listens.

Every option is declared here once, with its type, default and meaning. `quietmax serve` makes command line options of
them, which are also environment variables, keys of a TOML file and rows of the documentation.
"""

from __future__ import annotations

import importlib.util
import math
import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self
from urllib.parse import urlsplit

from quietmax.errors import InvalidInput

ANONYMOUS = "anonymous"
"""The client name of requests without an API key."""
_ISSUER = re.compile(r"https?://[!-~]{1,190}")
_BACKLOG = 2048
_COUNT: dict[str, Any] = {"min": 1}
_PORT: dict[str, Any] = {"min": 0, "max": 65535}


@dataclass(frozen=True)
class _AnswerOptions:
    PANEL: ClassVar = "Answers and log"

    answer_cache: Annotated[
        bool, "Answer identical queries from the cache for free, or charge them again."
    ] = True
    request_log: Annotated[bool, "Write a log line per request."] = True


@dataclass(frozen=True)
class Settings(_AnswerOptions):
    """Limits and options of a service. Limits hold for each server process.

    Its parameters are options of `quietmax serve` by their names in the configuration file, such as
    ``Settings(max_rows=100, anonymous=True)``, and these:

    Parameters
    ----------
    max_header_bytes : int
        Largest size of the headers of a request in bytes, with its URL.
    max_headers : int
        Most headers of a request.
    max_in_flight : int
        Most inference requests of a worker at the same time.
    """

    PANEL: ClassVar = "Limits and access"

    max_rows: Annotated[int, "Most rows in one request.", _COUNT] = 1000
    max_bytes: Annotated[int, "Largest request body in bytes.", _COUNT] = 16 * 2**20
    max_body_memory: Annotated[
        int, "Most bytes of all request bodies that a worker holds at the same time.", _COUNT
    ] = 256 * 2**20
    timeout: Annotated[
        float, "Seconds until a request is given up, and until its body must have arrived."
    ] = 10.0
    header_timeout: Annotated[float, "Seconds until the headers of a request must have arrived."] = 10.0
    idle_timeout: Annotated[float, "Seconds until a connection without a request is closed."] = 60.0
    max_connections: Annotated[
        int, "Most open connections of a worker. The limit on file descriptors may lower it.", _COUNT
    ] = 1000
    rate_limit: Annotated[
        float | None, "Requests per second of one client, in each worker. Default: no limit."
    ] = None
    rate_burst: Annotated[
        int | None,
        "Requests that a client may send at once after a pause. Default: those of one second.",
        _COUNT,
    ] = None
    anonymous: Annotated[
        bool, "Answer requests without an API key (loopback only), as the client anonymous."
    ] = False
    oidc_issuer: Annotated[
        str | None,
        "URL of an OpenID Connect issuer whose bearer tokens are accepted beside API keys; the same as in the claim "
        "iss.",
    ] = None
    oidc_audience: Annotated[
        str | None, "Audience (claim aud) that tokens must name. Required with --oidc-issuer."
    ] = None
    oidc_client_claim: Annotated[str, "Claim that names the client: a name, or a path with dots."] = "sub"
    oidc_admin_claim: Annotated[
        str | None, "Claim that makes an administrator, for example realm_access.roles."
    ] = None
    oidc_admin_value: Annotated[str | None, "Value that --oidc-admin-claim must be equal to or contain."] = (
        None
    )
    max_header_bytes: int = 32 * 2**10
    max_headers: int = 100
    max_in_flight: int = 1024

    def __post_init__(self) -> None:
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
        self._check_oidc()

    def _check_oidc(self) -> None:
        issuer, audience = self.oidc_issuer, self.oidc_audience
        if issuer is None:
            if (audience, self.oidc_admin_claim, self.oidc_admin_value) != (None, None, None):
                raise InvalidInput(
                    "`oidc_audience`, `oidc_admin_claim` and `oidc_admin_value` require `oidc_issuer`."
                )
            return
        if audience is None:
            raise InvalidInput("`oidc_issuer` requires `oidc_audience`.")
        if not _ISSUER.fullmatch(issuer) or set("@?#") & set(issuer) or not _is_private_url(issuer):
            raise InvalidInput(
                "`oidc_issuer` must be a URL with https, or with http and a loopback address, without @, ? and #, "
                f"got {issuer[:80]!r}."
            )
        if not audience or not self.oidc_client_claim:
            raise InvalidInput("`oidc_audience` and `oidc_client_claim` must not be empty.")
        if (self.oidc_admin_claim is None) != (self.oidc_admin_value is None):
            raise InvalidInput("`oidc_admin_claim` and `oidc_admin_value` require each other.")


@dataclass(frozen=True)
class Listener:
    """Where the service listens."""

    PANEL: ClassVar = "Network"

    host: Annotated[str, "Address to listen on."] = "127.0.0.1"
    port: Annotated[int, "Port to listen on; 0: any free one.", _PORT] = 8080
    tls_certificate: Annotated[Path | None, "TLS certificate (PEM file)."] = None
    tls_key: Annotated[Path | None, "TLS private key (PEM file), without a password."] = None
    behind_proxy: Annotated[bool, "A proxy in front of the service ends TLS."] = False
    grpc_port: Annotated[
        int | None, "Also listen for gRPC on this port; 0: any free one. Requires quietmax[grpc].", _PORT
    ] = None
    ssl_context: ClassVar[ssl.SSLContext | None] = None  # Of one listener, once it has read its certificate
    tls_content: ClassVar[tuple[bytes, bytes] | None] = None

    def __post_init__(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise InvalidInput("TLS requires both `tls_certificate` and `tls_key`.")
        if self.grpc_port is not None and importlib.util.find_spec("grpc") is None:
            raise InvalidInput("gRPC requires the extra `grpc`: pip install 'quietmax[grpc]'.")
        for file in (self.tls_certificate, self.tls_key):
            if file is not None and not file.is_file():
                raise InvalidInput(f"There is no file {file}.")
        self._load_certificate()
        if not _is_loopback(self.host) and self.tls_certificate is None and not self.behind_proxy:
            raise InvalidInput(
                f"API keys would be sent to {self.host} without encryption. Listening beyond loopback requires "
                "`tls_certificate` and `tls_key`, or `behind_proxy`."
            )

    def _load_certificate(self) -> None:
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

    def check_anonymous(self) -> None:
        """Raise `InvalidInput` unless only this machine can reach the service, as anonymous access requires."""
        if not _is_loopback(self.host) or self.behind_proxy:
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


def _is_private_url(url: str) -> bool:
    """Tell whether nobody on the way can read or change what is fetched from a URL: https, or http on this machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return False
    return (parts.scheme == "https" and host != "") or (parts.scheme == "http" and _is_loopback(host))


def _is_loopback(host: str) -> bool:
    """Tell whether a host name can only mean this machine."""
    return host in ("localhost", "::1", "[::1]") or (
        host.startswith("127.") and host.replace(".", "").isdigit()
    )

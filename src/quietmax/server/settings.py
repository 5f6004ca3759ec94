"""Settings of a running service."""

from __future__ import annotations

import math
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from quietmax.errors import InvalidInput

SESSION_SECRET_BYTES = 32
POSITIVE = (
    "max_bytes",
    "max_body_memory",
    "max_rows",
    "timeout",
    "header_timeout",
    "idle_timeout",
    "max_header_bytes",
    "max_headers",
    "max_connections",
    "max_in_flight",
)
"""Settings that must be greater than 0."""
_ISSUER = re.compile(r"https?://[!-~]{1,190}")


@dataclass(frozen=True)
class OidcSettings:
    """Whose tokens are accepted beside API keys, and what their claims mean."""

    issuer: str  # URL of the OpenID Connect issuer, exactly as in the claim `iss`
    audience: str  # The audience that tokens must name in the claim `aud`
    client_claim: str = "sub"  # The claim that names the client: a name, or a path with dots
    admin_claim: str | None = None  # The claim that makes an administrator: a name, or a path with dots
    admin_value: str | None = None  # The value that this claim must be equal to or contain

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
    anonymous : bool
        Answer requests without an API key, as the client ``anonymous``. Loopback only.
    max_bytes : int
        Largest request body.
    max_body_memory : int
        Most bytes of all request bodies that are held at the same time.
    max_rows : int
        Most rows in one request.
    timeout : float
        Seconds until a request is given up, and until its body must have arrived.
    header_timeout : float
        Seconds until the headers of a request must have arrived.
    idle_timeout : float
        Seconds until a connection without a request is closed.
    max_header_bytes : int
        Largest size of all headers of a request, with its URL.
    max_headers : int
        Most headers of a request.
    max_connections : int
        Most open connections. The limit on file descriptors may lower it.
    max_in_flight : int
        Most inference requests at the same time.
    answer_cache : bool
        Answer identical queries from the answer cache, at no cost.
    log_requests : bool
        Write one log line per inference request.
    secure_cookies : bool
        Send the session cookie of the dashboard over TLS only.
    session_secret : bytes
        Signs the sessions of the dashboard; at least 32 bytes. Processes that share it accept each other's sessions.
        Default: a random one, so that sessions end when the service is started again.
    oidc : OidcSettings or None
        Whose tokens are accepted beside API keys. None: no tokens.
    telemetry : bool
        Export traces and metrics by OpenTelemetry.
    rate_limit : float or None
        Requests per second of one client. None: no limit.
    rate_burst : int or None
        Requests that a client may send at once after a pause. None: the requests of one second.
    """

    anonymous: bool = False
    max_bytes: int = 16 * 2**20
    max_body_memory: int = 256 * 2**20
    max_rows: int = 1000
    timeout: float = 10.0
    header_timeout: float = 10.0
    idle_timeout: float = 60.0
    max_header_bytes: int = 32 * 2**10
    max_headers: int = 100
    max_connections: int = 1000
    max_in_flight: int = 1024
    answer_cache: bool = True
    log_requests: bool = True
    secure_cookies: bool = False
    session_secret: bytes = field(
        default_factory=lambda: secrets.token_bytes(SESSION_SECRET_BYTES), repr=False, compare=False
    )
    oidc: OidcSettings | None = None
    telemetry: bool = False
    rate_limit: float | None = None
    rate_burst: int | None = None

    def __post_init__(self) -> None:
        if len(self.session_secret) < SESSION_SECRET_BYTES:
            raise InvalidInput(
                f"session_secret must have at least {SESSION_SECRET_BYTES} bytes, got {len(self.session_secret)}."
            )
        for name in POSITIVE:
            value = getattr(self, name)
            if not value > 0:
                raise InvalidInput(f"{name} must be greater than 0, got {value}.")
        if self.max_body_memory < self.max_bytes:
            raise InvalidInput(
                f"max_body_memory must be at least max_bytes ({self.max_bytes}), got {self.max_body_memory}."
            )
        if self.rate_limit is not None and not 0 < self.rate_limit < math.inf:
            raise InvalidInput(f"rate_limit must be greater than 0, got {self.rate_limit}.")
        if self.rate_burst is not None and (self.rate_limit is None or self.rate_burst < 1):
            raise InvalidInput("`rate_burst` must be at least 1, and requires `rate_limit`.")


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


ANONYMOUS = "anonymous"
"""The client name of requests without an API key."""


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

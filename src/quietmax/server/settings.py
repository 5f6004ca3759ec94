"""Settings of a running service."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path

from quietmax.errors import InvalidInput

SESSION_SECRET_BYTES = 32
POSITIVE = (
    "max_bytes",
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


@dataclass(frozen=True)
class Settings:
    """Limits and options of a service. Limits hold for each server process.

    Parameters
    ----------
    anonymous : bool
        Answer requests without an API key, as the client ``anonymous``. Loopback only.
    max_bytes : int
        Largest request body.
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
    """

    anonymous: bool = False
    max_bytes: int = 16 * 2**20
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

    def __post_init__(self) -> None:
        if len(self.session_secret) < SESSION_SECRET_BYTES:
            raise InvalidInput(
                f"session_secret must have at least {SESSION_SECRET_BYTES} bytes, got {len(self.session_secret)}."
            )
        for name in POSITIVE:
            value = getattr(self, name)
            if not value > 0:
                raise InvalidInput(f"{name} must be greater than 0, got {value}.")


def read_session_secret(path: Path) -> bytes:
    """Read the secret that signs sessions of the dashboard from a file.

    Parameters
    ----------
    path : Path
        The file. Its whole content is the secret, without white space at its ends.

    Raises
    ------
    InvalidInput
        If the file cannot be read or is too short.
    """
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


def is_loopback(host: str) -> bool:
    """Tell whether a host name can only mean this machine.

    Parameters
    ----------
    host : str
        A host name or address, without a port.

    Examples
    --------
    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0"), is_loopback("127.0.0.53")
    (True, False, True)
    """
    return host in ("localhost", "::1", "[::1]") or (
        host.startswith("127.") and host.replace(".", "").isdigit()
    )

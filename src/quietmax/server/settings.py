"""Settings of a running service."""

from __future__ import annotations

from dataclasses import dataclass

from quietmax.errors import InvalidInput


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
        Seconds until a request is given up.
    max_in_flight : int
        Most inference requests at the same time.
    answer_cache : bool
        Answer identical queries from the answer cache, at no cost.
    log_requests : bool
        Write one log line per inference request.
    secure_cookies : bool
        Send the session cookie of the dashboard over TLS only.
    """

    anonymous: bool = False
    max_bytes: int = 16 * 2**20
    max_rows: int = 1000
    timeout: float = 10.0
    max_in_flight: int = 1024
    answer_cache: bool = True
    log_requests: bool = True
    secure_cookies: bool = False

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_rows", "timeout", "max_in_flight"):
            value = getattr(self, name)
            if not value > 0:
                raise InvalidInput(f"{name} must be greater than 0, got {value}.")


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

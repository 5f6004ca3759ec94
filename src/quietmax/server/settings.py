"""What the owner decides about a running service."""

from __future__ import annotations

from dataclasses import dataclass

from quietmax.errors import InvalidInput


@dataclass(frozen=True)
class Settings:
    """Limits and habits of the service; every one of them holds for each process on its own.

    `anonymous`: requests without a key are answered, as client "anonymous" (loopback only). `max_bytes`, `max_rows`:
    of one request. `seconds`: until a request is given up. `max_waiting`: requests at once. `stored_answers`:
    identical queries get the stored answer at no cost. `secure_cookies`: the dashboard's session only over TLS.
    """

    anonymous: bool = False
    max_bytes: int = 16 * 2**20
    max_rows: int = 1000
    seconds: float = 10.0
    max_waiting: int = 1024
    stored_answers: bool = True
    log_requests: bool = True
    secure_cookies: bool = False

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_rows", "seconds", "max_waiting"):
            if not getattr(self, name) > 0:
                raise InvalidInput(f"{name} is {getattr(self, name)}, but must be more than 0; give a limit.")


ANONYMOUS = "anonymous"
"""The client who asks without a key."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")


def is_loopback(host: str) -> bool:
    """Whether a host name means this machine only.

    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0"), is_loopback("127.0.0.53")
    (True, False, True)
    """
    return host in _LOOPBACK or (host.startswith("127.") and host.replace(".", "").isdigit())

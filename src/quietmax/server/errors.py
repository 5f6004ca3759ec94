"""Errors that the service answers with: an HTTP status and a message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from quietmax.errors import LedgerDamaged, LedgerTooLate, LedgerUnavailable, QuietmaxError

P = ParamSpec("P")
T = TypeVar("T")
_HEADERS = {401: {"www-authenticate": "Bearer"}, 503: {"retry-after": "1"}}


class HttpError(QuietmaxError):
    """A request that ends with an error response."""

    def __init__(
        self,
        status: int,
        message: str,
        extra: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        detail: str | None = None,  # What only the log tells
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.extra = extra or {}
        self.headers = headers or _HEADERS.get(status, {})
        self.detail = detail

    def to_json(self) -> dict[str, Any]:
        """Return the body of the response."""
        return {"error": self.message, **self.extra}


def _internal_error() -> HttpError:
    """Return what a client is told about a fault of the service; the log names its kind."""
    return HttpError(500, "Internal error. What was charged is not refunded.")


def _ledger_error(error: Exception) -> HttpError:
    """Return what a client is told if the ledger failed: not why, which the log tells, nor where it is."""
    message = str(error) or "The ledger does not respond."
    if isinstance(error, LedgerUnavailable | LedgerDamaged) and not isinstance(error, LedgerTooLate):
        return HttpError(
            503, "The ledger is not available. No query is answered until it is.", detail=message
        )
    return HttpError(503, message)


async def _from_ledger(timeout: float, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Call a function of the ledger in a thread; raise 503 if it fails or does not respond in time."""
    try:
        return await asyncio.wait_for(asyncio.to_thread(function, *arguments, **named), timeout)
    except (QuietmaxError, TimeoutError) as error:
        raise _ledger_error(error) from error

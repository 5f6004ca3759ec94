"""Errors that the service answers with: an HTTP status and a message."""

from __future__ import annotations

from typing import Any

from quietmax.errors import LedgerDamaged, LedgerTooLate, LedgerUnavailable, QuietmaxError


class HttpError(QuietmaxError):
    """A request that ends with an error response."""

    def __init__(
        self,
        status: int,
        message: str,
        extra: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        detail: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.extra = extra or {}
        self.headers = headers or {}
        self.detail = detail

    def to_json(self) -> dict[str, Any]:
        """Return the body of the response: ``{"error": message, ...}``."""
        return {"error": self.message, **self.extra}


def bad_request(message: str) -> HttpError:
    """400: the body is not an inference request. Nothing was charged."""
    return HttpError(400, message)


def unauthorized(message: str) -> HttpError:
    """401: no API key, or one that is not valid."""
    return HttpError(401, message, headers={"www-authenticate": "Bearer"})


def no_such_model() -> HttpError:
    """404: no model has this name and version."""
    return HttpError(404, "There is no such model or version. GET /v2/models lists all.")


def unprocessable(message: str) -> HttpError:
    """422: an inference request that does not fit the model. Nothing was charged."""
    return HttpError(422, message)


def unavailable(message: str) -> HttpError:
    """503: the service or its ledger cannot answer now."""
    return HttpError(503, message, headers={"retry-after": "1"})


def ledger_error(error: Exception) -> HttpError:
    """503: the ledger failed. The log tells why; clients are not told where the ledger is."""
    message = str(error) or "The ledger does not respond."
    if isinstance(error, LedgerUnavailable | LedgerDamaged) and not isinstance(error, LedgerTooLate):
        return HttpError(
            503,
            "The ledger is not available. No query is answered until it is.",
            headers={"retry-after": "1"},
            detail=message,
        )
    return unavailable(message)

"""Errors that the service answers with: an HTTP status and a message."""

from __future__ import annotations

from typing import Any

from quietmax.errors import QuietmaxError


class HttpError(QuietmaxError):
    """A request that ends with an error response.

    Parameters
    ----------
    status : int
        HTTP status code.
    message : str
        The ``error`` of the JSON response.
    extra : dict, optional
        Further keys of the JSON response.
    headers : dict, optional
        Further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        extra: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.extra = extra or {}
        self.headers = headers or {}

    def to_json(self) -> dict[str, Any]:
        """Return the body of the response: ``{"error": message, ...}``."""
        return {"error": self.message, **self.extra}


def bad_request(message: str) -> HttpError:
    """400: the body is not an inference request. Nothing was charged.

    Parameters
    ----------
    message : str
        What is wrong, and what is valid.
    """
    return HttpError(400, message)


def unauthorized(message: str) -> HttpError:
    """401: no API key, or one that is not valid.

    Parameters
    ----------
    message : str
        What is wrong, and what is valid.
    """
    return HttpError(401, message, headers={"www-authenticate": "Bearer"})


def no_such_model() -> HttpError:
    """404: no model has this name and version."""
    return HttpError(404, "There is no such model or version. GET /v2/models lists all.")


def unprocessable(message: str) -> HttpError:
    """422: an inference request that does not fit the model. Nothing was charged.

    Parameters
    ----------
    message : str
        What is wrong, and what is valid.
    """
    return HttpError(422, message)


def unavailable(message: str) -> HttpError:
    """503: the service or its ledger cannot answer now.

    Parameters
    ----------
    message : str
        What is wrong.
    """
    return HttpError(503, message, headers={"retry-after": "1"})

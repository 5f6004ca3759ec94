"""How the service says no: an HTTP status and one sentence."""

from __future__ import annotations

from typing import Any

from quietmax.errors import QuietmaxError


class HttpError(QuietmaxError):
    """A request that is not answered. `more` goes beside the sentence, `headers` with the response."""

    def __init__(
        self,
        status: int,
        sentence: str,
        more: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.more = more or {}
        self.headers = headers or {}

    def to_json(self) -> dict[str, Any]:
        """``{"error": sentence, ...}``."""
        return {"error": self.sentence, **self.more}


def bad_request(sentence: str) -> HttpError:
    """400: the body is not an inference request; nothing was spent."""
    return HttpError(400, sentence)


def unfit(sentence: str) -> HttpError:
    """422: an inference request that does not fit the model; nothing was spent."""
    return HttpError(422, sentence)


def unavailable(sentence: str) -> HttpError:
    """503: the ledger or the service cannot answer now."""
    return HttpError(503, sentence, headers={"retry-after": "1"})

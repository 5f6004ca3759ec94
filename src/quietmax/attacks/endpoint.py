"""Endpoint: a small client for servers that speak the Open Inference Protocol (version 2, JSON over HTTP).

Knows one thing: ``POST {url}/infer`` with a tensor of features, and reading probabilities or labels from the reply.
``url`` names the model, as in ``http://host:8000/v2/models/income``.
"""

from __future__ import annotations

import http.client
import json
import math
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from email.message import Message
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.mechanisms import Answers

_FRACTIONS = ("FP16", "FP32", "FP64", "BF16")
_WHOLE = ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
_NUMBERS_AT_ONCE = 250_000
"""Some 6 MB of JSON: servers limit the size of a request."""
_LARGEST_REPLY = 256 * 2**20


class EndpointFailed(QuietmaxError):
    """The server could not be reached, refused, or replied with something else than an inference."""


class _StayHere(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: records and key go to the named server and to no other."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,  # noqa: ARG002
        headers: Message,
        newurl: str,  # noqa: ARG002
    ) -> None:
        raise urllib.error.HTTPError(req.full_url, code, "redirects are not followed", headers, fp)


@dataclass(frozen=True)
class Endpoint:
    """A model on a server. ``key`` is sent as a bearer token; at most ``rows_at_once`` queries travel in one request.

    ``input_name`` is the input tensor's name; by default the server's model metadata is asked for it.
    """

    url: str
    key: str | None = field(default=None, repr=False)
    input_name: str | None = None
    rows_at_once: int = 256
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if not _is_address(self.url):
            raise InvalidInput(
                f"The target {self.url!r} is not an address of the form http://host:port/v2/models/name; give "
                "such a one."
            )
        if self.rows_at_once < 1:
            raise InvalidInput(
                f"rows_at_once is {self.rows_at_once}, but must be at least 1; give such a number."
            )

    def answer(self, features: NDArray[np.floating]) -> Answers:
        """Ask all rows, in requests of at most ``rows_at_once``."""
        rows = np.asarray(features, dtype=np.float32)
        name = self.input_name or self._stated_input_name()
        at_once = max(1, min(self.rows_at_once, _NUMBERS_AT_ONCE // max(rows.shape[1], 1)))
        replies = [self._infer(rows[start : start + at_once], name) for start in range(0, len(rows), at_once)]
        labels = np.concatenate([reply.labels for reply in replies])
        parts = [reply.probabilities for reply in replies if reply.probabilities is not None]
        return Answers(labels, np.concatenate(parts) if len(parts) == len(replies) else None)

    def _stated_input_name(self) -> str:
        metadata = self._json(urllib.request.Request(self.url, headers=self._headers()))
        try:
            return str(metadata["inputs"][0]["name"])
        except (KeyError, IndexError, TypeError):
            raise EndpointFailed(
                f"The metadata at {self.url} name no input tensor; give input_name, or check the address."
            ) from None

    def _infer(self, rows: NDArray[np.float32], name: str) -> Answers:
        tensor = {
            "name": name,
            "shape": list(rows.shape),
            "datatype": "FP32",
            "data": rows.ravel().tolist(),
        }
        body = json.dumps({"inputs": [tensor]}).encode()
        headers = {**self._headers(), "Content-Type": "application/json"}
        reply = self._json(urllib.request.Request(f"{self.url.rstrip('/')}/infer", body, headers))
        try:
            return _read(reply["outputs"], len(rows))
        except (KeyError, TypeError, ValueError):
            raise EndpointFailed(
                f"The reply of {self.url} holds neither probabilities of shape ({len(rows)}, classes) nor labels of "
                f"shape ({len(rows)},); ask a model that classifies."
            ) from None

    def _headers(self) -> dict[str, str]:
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}

    def _json(self, request: urllib.request.Request) -> Any:
        try:
            with urllib.request.build_opener(_StayHere).open(request, timeout=self.timeout) as reply:
                text = reply.read(_LARGEST_REPLY + 1)
        except urllib.error.HTTPError as refusal:
            raise EndpointFailed(
                f"The server at {self.url} refused with {refusal.code} ({_reason(refusal)}); what was "
                "answered before counts as asked, so correct the cause before asking again."
            ) from refusal
        except http.client.HTTPException as problem:
            raise EndpointFailed(
                f"What runs at {self.url} does not speak HTTP ({type(problem).__name__}); check host and port."
            ) from problem
        except (OSError, UnicodeError) as problem:
            raise EndpointFailed(
                f"The server at {self.url} cannot be reached ({getattr(problem, 'reason', problem)}); "
                "check that it runs and the address."
            ) from problem
        try:
            if len(text) > _LARGEST_REPLY:
                raise ValueError
            return json.loads(text)
        except ValueError:
            raise EndpointFailed(
                f"The server at {self.url} replied with something else than JSON; check the address."
            ) from None


def _is_address(url: str) -> bool:
    if not url.isascii() or not url.isprintable() or " " in url:
        return False
    try:
        address = urllib.parse.urlsplit(url)
        return address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:  # a bracket that is not closed, or a port that is no number
        return False


def _read(outputs: list[dict[str, Any]], queries: int) -> Answers:
    """Probabilities if an output tensor holds fractions in two dimensions, else labels from whole numbers."""
    labels = None
    for output in outputs:
        shape, datatype = [int(length) for length in output["shape"]], output["datatype"]
        if math.prod(shape) == 0 or shape[0] != queries:
            continue
        if datatype in _FRACTIONS and len(shape) == 2 and shape[1] > 1:
            probabilities = np.asarray(output["data"], dtype=np.float64).reshape(shape)
            return Answers(probabilities.argmax(-1), probabilities)
        if datatype in _WHOLE and math.prod(shape) == queries:
            labels = np.asarray(output["data"], dtype=np.int64).reshape(queries)
    if labels is None:
        raise ValueError
    return Answers(labels, None)


def _reason(refusal: urllib.error.HTTPError) -> str:
    """The server's own sentence if it sent one, else the status text."""
    try:
        return str(json.loads(refusal.read(65536))["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return str(refusal.reason)

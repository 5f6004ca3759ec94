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
from collections.abc import Callable
from dataclasses import dataclass, field
from email.message import Message
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from quietmax.accounting.costs import Cost
from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.estimators.serialization import PrivateModel
from quietmax.mechanisms.base import Answerer, Answers
from quietmax.models.training import Classifier, Model, softmax
from quietmax.predictor import Predictor

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


Features = NDArray[np.float32]
Target = Any
"""A classifier, `Predictor`, `Answerer`, estimator, private model, `Endpoint`, URL, or function of features."""

_SUM_TOLERANCE = 1e-2


@dataclass(frozen=True, eq=False)
class QueryResult:
    """A target's answers, how many queries they took, and what those cost where the target says so."""

    answers: Answers
    queries: int
    spent: Cost | None
    target: str


def ask(target: Target, features: Features, classes: int) -> QueryResult:
    """Ask ``target`` for an answer to each row of ``features`` and check that it is one.

    >>> asked = ask(lambda rows: np.full((len(rows), 2), 0.5), np.zeros((3, 4), np.float32), 2)
    >>> asked.queries, asked.answers.probabilities.shape
    (3, (3, 2))
    """
    if isinstance(target, str):
        target = Endpoint(target)
    queries, spent, name = len(features), None, _name(target)
    account = _account_of(target)
    before = 0 if account is None else account.answered
    answers = _checked(_answers_of(target, features, classes), queries, classes)
    if account is not None:
        queries = account.answered - before
        spent = account.cost.times(queries)
    elif isinstance(target, Answerer):
        spent = target.cost.times(queries)
    return QueryResult(answers, queries, spent, name)


def _name(target: Target) -> str:
    """What a report calls the target."""
    if isinstance(target, Predictor | Answerer):
        return target.mechanism.name
    if isinstance(target, Endpoint):
        return target.url
    return "plain model" if isinstance(target, Model) else type(target).__name__


def _account_of(target: Target) -> Predictor | None:
    """The predictor that pays for the target's answers, where one does."""
    if isinstance(target, PrivateModel):
        return _account_of(target.answerer)
    behind = target if isinstance(target, Predictor) else getattr(target, "predictor_", None)
    return behind if isinstance(behind, Predictor) else None


def _answers_of(target: Target, features: Features, classes: int) -> Answers:
    if isinstance(target, Answerer | Endpoint):
        return target.answer(features)
    columns = _columns(target, classes)
    if hasattr(target, "predict_proba") and not _refuses_probabilities(target, features):
        return _with_labels(_spread(_numbers(target.predict_proba(features)), columns, classes))
    if isinstance(target, Classifier):
        return _with_labels(softmax(target.scores(features)))
    if hasattr(target, "predict"):
        return Answers(_codes(target.predict(features), columns), None)
    if callable(target):
        return _from_function(target, features)
    raise InvalidInput(
        f"A target of type {type(target).__name__} cannot be asked; give a model, a Predictor, a fitted estimator, "
        "a function from features to probabilities or labels, or the URL of a server."
    )


def _refuses_probabilities(target: Target, features: Features) -> bool:
    """Whether a paying target releases labels only; one record tells, and its stored answer is free to ask again."""
    if not isinstance(target, Predictor | PrivateModel) or _account_of(target) is None:
        return False
    try:
        target.predict_proba(features[:1])
    except InvalidInput:
        return True
    return False


def _from_function(target: Callable[[Features], Any], features: Features) -> Answers:
    given = _numbers(target(features))
    if given.ndim == 1:
        return Answers(_whole(given), None)
    return _with_labels(given)


def _columns(target: Target, classes: int) -> NDArray[np.int64] | None:
    """Which class each column of a fitted estimator means; None where it states nothing."""
    stated = getattr(target, "classes_", None)
    if stated is None:
        return None
    known = np.asarray(stated)
    if not np.issubdtype(known.dtype, np.number) or not np.isin(known, np.arange(classes)).all():
        raise InvalidInput(
            f"The estimator's classes are {known.tolist()[:5]}..., but the data's are 0 to {classes - 1}; "
            "fit it on the labels of the data it is attacked with."
        )
    return known.astype(np.int64)


def _spread(
    probabilities: NDArray[np.float64], columns: NDArray[np.int64] | None, classes: int
) -> NDArray[np.float64]:
    """Columns put at their classes; classes the estimator never saw get probability 0."""
    if columns is None or probabilities.ndim != 2 or probabilities.shape[1] != len(columns):
        return probabilities
    spread = np.zeros((len(probabilities), classes))
    spread[:, columns] = probabilities
    return spread


def _codes(labels: Any, columns: NDArray[np.int64] | None) -> NDArray[np.int64]:
    codes = _whole(_numbers(labels))
    if columns is not None and not np.isin(codes, columns).all():
        raise InvalidInput("The estimator predicted a label that is not among its classes; fit it again.")
    return codes


def _numbers(given: Any) -> NDArray[np.float64]:
    try:
        return np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidInput(
            "The target's answers are not numbers; it must return probabilities of shape (queries, classes) or "
            "whole-number labels of shape (queries,); correct the target."
        ) from None


def _whole(labels: NDArray[np.float64]) -> NDArray[np.int64]:
    if not np.isfinite(labels).all() or (labels != np.rint(labels)).any():
        raise InvalidInput(
            "The target's answers have one number per query, but not whole ones; labels must be class numbers, "
            "probabilities a row per query; correct the target."
        )
    return labels.astype(np.int64)


def _with_labels(probabilities: NDArray[np.float64]) -> Answers:
    values = np.asarray(probabilities, dtype=np.float64)
    return Answers(values.argmax(-1), values)


def _checked(answers: Answers, queries: int, classes: int) -> Answers:
    """Refuse answers of a wrong shape, labels outside the classes, and rows that are no probabilities."""
    labels, probabilities = answers.labels, answers.probabilities
    if labels.shape != (queries,):
        raise InvalidInput(
            f"The target gave answers of shape {labels.shape} to {queries} queries, but must give one per query; "
            "correct the target."
        )
    if probabilities is None:
        if queries and (labels.min() < 0 or labels.max() >= classes):
            raise InvalidInput(f"The target released a label outside 0 to {classes - 1}; check its classes.")
        return answers
    if probabilities.shape != (queries, classes):
        raise InvalidInput(
            f"The target released values of shape {probabilities.shape}, but {queries} queries to {classes} classes "
            f"need ({queries}, {classes}); check its classes."
        )
    sums = probabilities.sum(-1)
    if (
        not (np.isfinite(sums).all() and (probabilities >= -_SUM_TOLERANCE).all())
        or (np.abs(sums - 1) > _SUM_TOLERANCE).any()
    ):
        raise InvalidInput(
            "The target released rows that are not probabilities (0 or more, adding up to 1); apply a softmax to "
            "logits first."
        )
    return Answers(labels, np.clip(probabilities, 0.0, 1.0))

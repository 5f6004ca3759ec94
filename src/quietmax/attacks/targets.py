"""Targets of an attack: anything that answers queries, in this process or on a server."""

from __future__ import annotations

import http.client
import json
import math
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from quietmax.accounting.costs import Cost
from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.estimators.serialization import PrivateModel
from quietmax.mechanisms.base import Answerer, Answers, releases_probabilities
from quietmax.models.training import Classifier, Model, softmax
from quietmax.predictor import Predictor

Features = NDArray[np.float32]
Target = Any
"""A classifier, `Predictor`, `Answerer`, fitted estimator, private model, `Endpoint`, URL, or function of features."""

_SUM_TOLERANCE = 1e-2
_FLOAT_TYPES = ("FP16", "FP32", "FP64", "BF16")
_INTEGER_TYPES = ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
_MAX_NUMBERS = 250_000
"""Numbers in one request, some 6 MB of JSON: servers limit the size of a request."""
_MAX_REPLY_BYTES = 256 * 2**20


@dataclass(frozen=True, eq=False)
class QueryResult:
    """The answers of a target."""

    answers: Answers  # One per query
    queries: int  # Number of queries; of a target with a budget, the number it charged for
    spent: Cost | None  # None if the target has no budget
    target: str  # Name for reports


def query_target(target: Target, features: Features, classes: int) -> QueryResult:
    """Query a target once for each row of features and check its answers."""
    if isinstance(target, str):
        target = Endpoint(target)
    account = _account_of(target)
    before = 0 if account is None else account.answered
    answers = _checked(_answers_of(target, features, classes), len(features), classes)
    queries = len(features) if account is None else account.answered - before
    charged = target if isinstance(target, Answerer) else account
    spent = None if charged is None else charged.cost.times(queries)
    return QueryResult(answers, queries, spent, _name_of(target))


class EndpointError(QuietmaxError):
    """The server cannot be reached, returned an error, or sent a reply that is not an inference."""


@dataclass(frozen=True)
class Endpoint:
    """A model on a server that implements the Open Inference Protocol (version 2, JSON over HTTP).

    Parameters
    ----------
    url : str
        Address of the model, for example ``http://host:8000/v2/models/income``.
    key : str or None
        Sent as a bearer token.
    input_name : str or None
        Name of the input tensor; None reads it from the model's metadata.
    max_rows : int
        Largest number of queries in one request.
    timeout : float
        Seconds to wait for a reply.

    Examples
    --------
    >>> Endpoint("http://127.0.0.1:8000/v2/models/income", max_rows=100).max_rows
    100
    """

    url: str
    key: str | None = field(default=None, repr=False)
    input_name: str | None = None
    max_rows: int = 256
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if not _is_address(self.url):
            raise InvalidInput(
                f"The target must be an address like http://host:port/v2/models/name, got {self.url!r}."
            )
        if self.max_rows < 1:
            raise InvalidInput(f"max_rows must be at least 1, got {self.max_rows}.")

    def answer(self, features: NDArray[np.floating]) -> Answers:
        """Query the server for all rows of ``features``, in requests of at most `max_rows`."""
        rows = np.asarray(features, dtype=np.float32)
        name, names = self._stated() if self.input_name is None else (self.input_name, [])
        at_once = max(1, min(self.max_rows, _MAX_NUMBERS // max(rows.shape[1], 1)))
        replies = [
            self._infer(rows[start : start + at_once], name, names) for start in range(0, len(rows), at_once)
        ]
        labels = np.concatenate([reply.labels for reply in replies])
        parts = [reply.probabilities for reply in replies if reply.probabilities is not None]
        return Answers(labels, np.concatenate(parts) if len(parts) == len(replies) else None)

    def _stated(self) -> tuple[str, list[str]]:
        """Return the name of the input tensor for encoded rows, and the names of the classes if they are stated."""
        metadata = self._send(self.url)
        try:
            parameters = metadata.get("parameters") or {}
            # A model of a table lists its columns; its input for encoded rows is stated beside them.
            tensor = parameters.get("encoded_input") or metadata["inputs"][0]
            return str(tensor["name"]), [str(name) for name in parameters.get("classes", ())]
        except (KeyError, IndexError, TypeError, AttributeError):
            raise EndpointError(
                f"The metadata at {self.url} name no input tensor; Endpoint takes its name as input_name."
            ) from None

    def _infer(self, rows: NDArray[np.float32], name: str, names: list[str]) -> Answers:
        tensor = {"shape": list(rows.shape), "datatype": "FP32", "data": rows.ravel().tolist()}
        body = json.dumps({"inputs": [{"name": name, **tensor}]}).encode()
        reply = self._send(f"{self.url.rstrip('/')}/infer", body)
        try:
            return _read_outputs(reply["outputs"], len(rows), names)
        except (KeyError, TypeError, ValueError):
            raise EndpointError(
                f"The reply of {self.url} contains neither probabilities of shape ({len(rows)}, classes) nor labels "
                f"of shape ({len(rows)},)."
            ) from None

    def _send(self, url: str, body: bytes | None = None) -> Any:
        """Send a request, with a body by POST, and return the JSON of the reply."""
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        request = urllib.request.Request(url, body, headers)
        try:
            with urllib.request.build_opener(_NoRedirects).open(request, timeout=self.timeout) as reply:
                text = reply.read(_MAX_REPLY_BYTES + 1)
        except urllib.error.HTTPError as error:
            raise EndpointError(
                f"The server at {self.url} returned {error.code} ({_reason(error)}). Queries that it answered before "
                "count as asked."
            ) from error
        except http.client.HTTPException as error:
            raise EndpointError(
                f"The server at {self.url} does not speak HTTP ({type(error).__name__})."
            ) from error
        except (OSError, UnicodeError) as error:
            raise EndpointError(
                f"The server at {self.url} cannot be reached ({getattr(error, 'reason', error)})."
            ) from error
        if len(text) > _MAX_REPLY_BYTES:
            raise EndpointError(f"The reply of {self.url} is larger than {_MAX_REPLY_BYTES} bytes.")
        try:
            return json.loads(text)
        except ValueError:
            raise EndpointError(f"The reply of {self.url} is not JSON.") from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirects: records and key go to the named server only."""

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> NoReturn:  # noqa: ARG002
        raise urllib.error.HTTPError(req.full_url, code, "redirects are not followed", headers, fp)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def _is_address(url: str) -> bool:
    if not url.isascii() or not url.isprintable() or " " in url:
        return False
    try:
        address = urllib.parse.urlsplit(url)
        return address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:  # an open bracket, or a port that is not a number
        return False


def _read_outputs(outputs: list[dict[str, Any]], queries: int, names: list[str]) -> Answers:
    """Read probabilities if an output has floats in two dimensions, else labels: class numbers or names."""
    labels = None
    for output in outputs:
        shape, datatype = [int(length) for length in output["shape"]], output["datatype"]
        if math.prod(shape) == 0 or shape[0] != queries:
            continue
        if datatype in _FLOAT_TYPES and len(shape) == 2 and shape[1] > 1:
            return _with_labels(np.asarray(output["data"], dtype=np.float64).reshape(shape))
        if datatype in _INTEGER_TYPES and math.prod(shape) == queries:
            labels = np.asarray(output["data"], dtype=np.int64).reshape(queries)
        if datatype == "BYTES" and names and math.prod(shape) == queries:
            labels = np.array([names.index(name) for name in output["data"]], dtype=np.int64)
    if labels is None:
        raise ValueError
    return Answers(labels, None)


def _reason(error: urllib.error.HTTPError) -> str:
    """Return the server's own message if it sent one, else the status text."""
    try:
        return str(json.loads(error.read(65536))["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return str(error.reason)


def _name_of(target: Target) -> str:
    if isinstance(target, Predictor | Answerer):
        return target.mechanism.name
    if isinstance(target, Endpoint):
        return target.url
    return "plain model" if isinstance(target, Model) else type(target).__name__


def _account_of(target: Target) -> Predictor | None:
    """Return the predictor that is charged for the target's answers; None if there is none."""
    if isinstance(target, PrivateModel):
        return _account_of(target.classifier)
    behind = target if isinstance(target, Predictor) else getattr(target, "predictor_", None)
    return behind if isinstance(behind, Predictor) else None


def _answers_of(target: Target, features: Features, classes: int) -> Answers:
    """Query a target that is not a URL."""
    if isinstance(target, Answerer | Endpoint):
        return target.answer(features)
    columns, account = _class_of_each_column(target, classes), _account_of(target)
    labels_only = account is not None and not releases_probabilities(account.mechanism, classes)
    if hasattr(target, "predict_proba") and not labels_only:
        probabilities = _numbers(target.predict_proba(features))
        if columns is not None and probabilities.ndim == 2 and probabilities.shape[1] == len(columns):
            # Classes that the estimator does not know get probability 0.
            known, probabilities = probabilities, np.zeros((len(probabilities), classes))
            probabilities[:, columns] = known
        return _with_labels(probabilities)
    if isinstance(target, Classifier):
        return _with_labels(softmax(target.scores(features)))
    if hasattr(target, "predict"):
        labels = _label_numbers(target, target.predict(features))
        if columns is not None and not np.isin(labels, columns).all():
            raise InvalidInput("The estimator predicted a label that is not among its classes_.")
        return Answers(labels, None)
    if callable(target):
        returned = _numbers(target(features))
        return Answers(_integers(returned), None) if returned.ndim == 1 else _with_labels(returned)
    raise InvalidInput(
        "A target must be a model, a Predictor, a fitted estimator, a function of features or the URL of a server, "
        f"got {type(target).__name__}."
    )


def _class_of_each_column(target: Target, classes: int) -> NDArray[np.int64] | None:
    """Return the class of each column of a fitted estimator; None if it does not state its classes."""
    stated = getattr(target, "classes_", None)
    if stated is None or getattr(target, "encoding_", None) is not None:
        return None if stated is None else _label_numbers(target, stated)
    known = np.asarray(stated)
    if not np.issubdtype(known.dtype, np.number) or not np.isin(known, np.arange(classes)).all():
        raise InvalidInput(
            f"The classes of the estimator must be among 0 to {classes - 1}, as in the data; got "
            f"{', '.join(map(repr, known.tolist()[:5]))}."
        )
    return known.astype(np.int64)


def _label_numbers(target: Target, labels: Any) -> NDArray[np.int64]:
    """Return the class numbers of labels; an estimator that was trained on a table names its classes."""
    encoding = getattr(target, "encoding_", None)
    if encoding is None:
        return _integers(_numbers(labels))
    return np.array([encoding.classes.index(str(label)) for label in labels], dtype=np.int64)


def _numbers(returned: Any) -> NDArray[np.float64]:
    try:
        return np.asarray(returned, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidInput(
            "A target must return probabilities of shape (queries, classes) or integer labels of shape (queries,); "
            "its answers are not numbers."
        ) from None


def _integers(labels: NDArray[np.float64]) -> NDArray[np.int64]:
    if not np.isfinite(labels).all() or (labels != np.rint(labels)).any():
        raise InvalidInput("Labels must be integers; the target returned other numbers, one per query.")
    return labels.astype(np.int64)


def _with_labels(probabilities: NDArray[np.float64]) -> Answers:
    return Answers(probabilities.argmax(-1), probabilities)


def _checked(answers: Answers, queries: int, classes: int) -> Answers:
    """Raise if answers have a wrong shape, labels are no classes or rows are no probabilities."""
    labels, probabilities = answers.labels, answers.probabilities
    if labels.shape != (queries,):
        raise InvalidInput(
            f"A target must return one answer per query; got shape {labels.shape} for {queries} queries."
        )
    if probabilities is None:
        if queries and (labels.min() < 0 or labels.max() >= classes):
            raise InvalidInput(f"Labels must be from 0 to {classes - 1}; the target returned another one.")
        return answers
    if probabilities.shape != (queries, classes):
        raise InvalidInput(
            f"Probabilities must have shape ({queries}, {classes}) for {queries} queries and {classes} classes, got "
            f"{probabilities.shape}."
        )
    sums = probabilities.sum(-1)
    if (
        not (np.isfinite(sums).all() and (probabilities >= -_SUM_TOLERANCE).all())
        or (np.abs(sums - 1) > _SUM_TOLERANCE).any()
    ):
        raise InvalidInput(
            "Probabilities must be at least 0 and sum to 1 in each row. Logits require a softmax first."
        )
    return Answers(labels, np.clip(probabilities, 0.0, 1.0))

"""A client of the service: rows of a table or of numbers in, numpy arrays out, over one connection."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, quote, urlsplit

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quietmax.data.encoding import quoted
from quietmax.errors import BudgetExhausted, InvalidInput, QuietmaxError
from quietmax.server.codec import _split_strings

if TYPE_CHECKING:
    import pandas as pd

_DATATYPES = {"INT64": "<i8", "FP32": "<f4", "FP64": "<f8"}

_WITH_REASONS = ("reasons", "label", "probabilities")
"""The outputs of a request for reasons; an error names the first one that the model does not have."""


@dataclass(frozen=True, eq=False)
class Response:
    """The answers to an inference request.

    Parameters
    ----------
    labels : ndarray of str or int64, shape (rows,)
        Class names if the model was trained on a table, else class numbers.
    probabilities : ndarray of float32, shape (rows, classes), or None
        Class probabilities, if the model releases them.
    parameters : dict
        Cost, remaining budget and guarantee status; the number of unknown categories if there are any.
    reasons : ndarray of float64, shape (rows, columns + 1, classes), or None
        If they were asked for, what the constant and then each column and cross contributed to the score of each class.
        Their names are ``metadata(model)["parameters"]["reasons"]``. Added one after the other, in this order, they are
        the scores, to the last bit.
    """

    labels: NDArray[Any]
    probabilities: NDArray[np.float32] | None
    parameters: dict[str, Any]
    reasons: NDArray[np.float64] | None = None


class Client:
    """A client of the service.

    Each request has its own id, so a broken connection is retried without being charged twice.

    Parameters
    ----------
    url : str
        Address of the service.
    key : str or None
        API key. None: anonymous access.
    timeout : float
        Seconds to wait for a response.

    See Also
    --------
    quietmax.server.Service : has an example that starts a service and sends queries.
    """

    def __init__(
        self, url: str = "http://127.0.0.1:8080", key: str | None = None, *, timeout: float = 30.0
    ) -> None:
        self._url = _parse_url(url)
        self._timeout = timeout
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._connection: http.client.HTTPConnection | None = None
        self._known: dict[tuple[str, str | None], dict[str, Any]] = {}  # metadata of models
        self._lock = threading.Lock()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def infer(
        self,
        model: str,
        features: ArrayLike | pd.DataFrame | Sequence[Mapping[str, Any]],
        *,
        version: str | None = None,
        request_id: str | None = None,
        reasons: bool = False,
    ) -> Response:
        """Send one inference request.

        Parameters
        ----------
        model : str
            Name of the model.
        features : DataFrame, sequence of mappings, or array of shape (rows, features)
            The queries. Of a table (pandas, polars or Arrow) and of rows like ``{"age": 30, "sex": "female"}`` the
            model's own columns are sent by name, and no others; every row must have all of them, None for a missing
            value. An array holds encoded rows. At most as many rows as the service takes in one request (``max_rows``
            of the metadata); `predict` takes more.
        version : str or None
            Version of the model. None: the highest.
        request_id : str or None
            A retry with the same id gets the same answer and is not charged. None: a new random id.
        reasons : bool
            Whether to ask for the reasons too. Only released heads on tables have them.

        Returns
        -------
        Response
            Labels, probabilities, parameters and reasons.

        Raises
        ------
        BudgetExhausted
            If the budget or quota does not pay for all rows. Nothing was charged.
        """
        return self._infer(model, version, self._checked(model, version, features), request_id, reasons)

    def _infer(
        self,
        model: str,
        version: str | None,
        queries: pd.DataFrame | NDArray[Any],
        request_id: str | None,
        reasons: bool = False,
    ) -> Response:
        """Send one inference request with checked queries."""
        inputs, binary = _tensors(queries)
        head = json.dumps(
            {
                "id": request_id or uuid.uuid4().hex,
                "inputs": inputs,
                "outputs": [{"name": name} for name in _WITH_REASONS] if reasons else [],
                "parameters": {"binary_data_output": True},
            },
            ensure_ascii=False,
        ).encode()
        headers = {
            "content-type": "application/octet-stream",
            "inference-header-content-length": str(len(head)),
        }
        path = _model_path(model, version) + "/infer"
        content, received = self._exchange("POST", path, head + binary, headers)
        length = int(received.get("inference-header-content-length", len(content)))
        body = json.loads(content[:length])
        outputs: dict[str, NDArray[Any]] = {}
        start = length
        for tensor in body["outputs"]:
            end = start + tensor["parameters"]["binary_data_size"]
            outputs[tensor["name"]] = _values(tensor["datatype"], content[start:end]).reshape(tensor["shape"])
            start = end
        return Response(
            outputs["label"], outputs.get("probabilities"), body["parameters"], outputs.get("reasons")
        )

    def predict(
        self,
        model: str,
        features: ArrayLike | pd.DataFrame | Sequence[Mapping[str, Any]],
        *,
        version: str | None = None,
        request_id: str | None = None,
    ) -> NDArray[Any]:
        """Return the labels only, of any number of rows.

        More rows than the service takes in one request are sent in several requests. Each is charged by itself.

        Parameters
        ----------
        model, features, version
            As in `infer`, with any number of rows.
        request_id : str or None
            A retry with the same id and rows gets the same answers, and what was charged is not charged again. None:
            a new random id.

        Returns
        -------
        ndarray of str or int64, shape (rows,)
            Class names if the model was trained on a table, else class numbers.

        Raises
        ------
        BudgetExhausted
            If the budget or quota does not pay for all rows of a request. The requests before it were charged; the
            message says how many rows they had.
        """
        queries = self._checked(model, version, features)
        most = self._metadata_once(model, version)["parameters"]["max_rows"]
        if len(queries) <= most:
            return self._infer(model, version, queries, request_id).labels
        request_id = request_id or uuid.uuid4().hex
        labels: list[NDArray[Any]] = []
        for start in range(0, len(queries), most):
            rows = slice(start, start + most)
            part = queries[rows] if isinstance(queries, np.ndarray) else queries.iloc[rows]
            try:
                response = self._infer(model, version, part, f"{request_id}/{start // most}")
            except BudgetExhausted as error:
                raise BudgetExhausted(
                    f"{error} The {start} rows before were answered; with request_id={request_id!r} they are not "
                    "charged again."
                ) from None
            labels.append(response.labels)
        return np.concatenate(labels)

    def metadata(self, model: str, *, version: str | None = None) -> dict[str, Any]:
        """Return the metadata of a model: inputs, outputs, classes, cost and guarantee. No version: the highest."""
        return self._get(_model_path(model, version))

    def budget(self, model: str, *, version: str | None = None) -> dict[str, Any]:
        """Return the spent and remaining budget behind a model. No version: the highest."""
        return self._get(_model_path(model, version) + "/budget")

    def _checked(self, model: str, version: str | None, features: Any) -> pd.DataFrame | NDArray[Any]:
        """Return queries as a frame of the model's columns, or as an array of encoded rows."""
        named = isinstance(features, Sequence) and any(isinstance(row, Mapping) for row in features)
        if named or hasattr(features, "columns") or hasattr(features, "__arrow_c_stream__"):
            columns = self._columns(model, version)
            if not columns:
                raise InvalidInput(f"The model {model!r} has no columns; features must be rows of numbers.")
            return _frame(features, columns)
        rows = _numbers(features)
        columns = self._columns(model, version)
        encoded = self._metadata_once(model, version)["parameters"].get("encoded_input", {"shape": []})
        if columns and (rows is None or rows.ndim != 2 or [-1, rows.shape[1]] != encoded["shape"]):
            raise InvalidInput(
                f"The model {model!r} has the columns {quoted(columns)}: features must be a data frame with these "
                "columns, a list with a dict of these columns for each row, or an array of encoded rows."
            )
        if rows is None:
            raise InvalidInput("features must be a table, or an array of numbers of shape (rows, features).")
        return rows

    def _columns(self, model: str, version: str | None) -> list[str]:
        """Return the columns of a model; none if it takes numbers."""
        inputs = self._metadata_once(model, version)["inputs"]
        return [tensor["name"] for tensor in inputs if len(tensor["shape"]) == 1]

    def _metadata_once(self, model: str, version: str | None) -> dict[str, Any]:
        if (model, version) not in self._known:
            self._known[model, version] = self.metadata(model, version=version)
        return self._known[model, version]

    def _get(self, path: str) -> dict[str, Any]:
        content, _ = self._exchange("GET", path, None, {})
        document: dict[str, Any] = json.loads(content)
        return document

    def _exchange(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[bytes, http.client.HTTPMessage]:
        """Send a request, once more if the connection breaks; return the body and headers of the response."""
        with self._lock:
            for last in (False, True):
                try:
                    connection = self._connect()
                    connection.request(
                        method, self._url.path.rstrip("/") + path, body, {**self._headers, **headers}
                    )
                    response = connection.getresponse()
                    content = response.read()
                    break
                except (OSError, http.client.HTTPException) as error:
                    self.close()
                    if last:
                        raise QuietmaxError(
                            f"The service at {self._url.netloc} cannot be reached ({error}). "
                            "'quietmax serve' starts one."
                        ) from error
        if response.status == 200:
            return content, response.headers
        raise _response_error(response.status, content)

    def _connect(self) -> http.client.HTTPConnection:
        if self._connection is None:
            host, port = str(self._url.hostname), self._url.port
            if self._url.scheme == "https":
                self._connection = http.client.HTTPSConnection(
                    host, port, timeout=self._timeout, context=ssl.create_default_context()
                )
            else:
                self._connection = http.client.HTTPConnection(host, port, timeout=self._timeout)
        return self._connection


def _numbers(features: Any) -> NDArray[Any] | None:
    """Return an array of numbers, None if the features are none."""
    if features is None:
        return None
    try:
        return np.ascontiguousarray(features, dtype="<f4")
    except (ValueError, TypeError):
        return None


def _frame(table: Any, names: list[str]) -> pd.DataFrame:
    import pandas as pd

    from quietmax.data.encoding import require_columns
    from quietmax.data.sources import as_frame

    if isinstance(table, Sequence):
        for number, row in enumerate(table, start=1):
            given = {str(name).strip() for name in row} if isinstance(row, Mapping) else set()
            absent = [name for name in names if name not in given]
            if absent:
                raise InvalidInput(
                    f"Row {number} has no column {quoted(absent, 10)}; every column must be given, None for a missing "
                    "value."
                )
        table = pd.DataFrame(table)
    frame = as_frame(table)
    require_columns(frame, names)
    return frame[names]


def _tensors(queries: pd.DataFrame | NDArray[Any]) -> tuple[list[dict[str, Any]], bytes]:
    """Return queries as input tensors, and the binary data of those that have none in JSON."""
    if isinstance(queries, np.ndarray):
        return [_binary_tensor("features", "FP32", queries)], queries.tobytes()
    tensors, binary = [], b""
    for name in queries.columns:
        tensor, data = _column(name, queries[name])
        tensors.append(tensor)
        binary += data
    return tensors, binary


def _column(name: str, values: pd.Series[Any]) -> tuple[dict[str, Any], bytes]:
    """Return a column as a tensor, and its binary data. Only strings are left to the declarations of the column."""
    import pandas as pd

    from quietmax.data.cells import as_numbers, as_strings

    if isinstance(values.dtype, pd.CategoricalDtype):
        values = values.astype(values.dtype.categories.dtype)
    typed = values.infer_objects()
    kind = pd.api.types.infer_dtype(typed, skipna=True)
    if kind in ("floating", "decimal"):
        numbers = np.ascontiguousarray(as_numbers(typed, name), "<f8")
        return _binary_tensor(name, "FP64", numbers), numbers.tobytes()
    tensor: dict[str, Any] = {"name": name, "shape": [len(values)]}
    if kind in ("integer", "boolean"):
        convert, datatype = (bool, "BOOL") if kind == "boolean" else (int, "INT64")
        if typed.dtype.kind == "u":
            datatype = "UINT64"
        cells = [None if pd.isna(cell) else convert(cell) for cell in typed.tolist()]
        return {**tensor, "datatype": datatype, "data": cells}, b""
    if kind in ("date", "datetime", "datetime64"):
        tensor["parameters"] = {"content_type": "datetime"}
    if kind.startswith("mixed") and any(isinstance(cell, float | Decimal) for cell in typed.dropna()):
        raise InvalidInput(f"Column {name!r} must hold numbers or strings, got both.")
    return {**tensor, "datatype": "BYTES", "data": as_strings(typed).tolist()}, b""


def _binary_tensor(name: str, datatype: str, values: NDArray[Any]) -> dict[str, Any]:
    return {
        "name": name,
        "shape": list(values.shape),
        "datatype": datatype,
        "parameters": {"binary_data_size": values.nbytes},
    }


def _values(datatype: str, content: bytes) -> NDArray[Any]:
    return (
        np.array(_split_strings(content))
        if datatype == "BYTES"
        else np.frombuffer(content, dtype=_DATATYPES[datatype])
    )


def _parse_url(url: str) -> SplitResult:
    try:
        parsed = urlsplit(url)
        valid = parsed.scheme in ("http", "https") and bool(parsed.hostname) and parsed.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise InvalidInput(f"url must be an http or https address like http://127.0.0.1:8080, got {url!r}.")
    return parsed


def _model_path(model: str, version: str | None) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return path if version is None else f"{path}/versions/{quote(version, safe='')}"


def _response_error(status: int, content: bytes) -> QuietmaxError:
    try:
        body = json.loads(content)
        message = str(body["error"])
    except (ValueError, KeyError, TypeError):
        body, message = {}, f"The service responded with status {status}."
    if status == 403 and "remaining" in body:
        return BudgetExhausted(message)
    return InvalidInput(message) if status in (400, 404, 409, 413, 422) else QuietmaxError(message)

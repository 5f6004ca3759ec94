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

from quietmax.errors import BudgetExhausted, InvalidInput, QuietmaxError
from quietmax.server.codec import split_strings

if TYPE_CHECKING:
    import pandas as pd

_DATATYPES = {"INT64": "<i8", "FP32": "<f4"}


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
    """

    labels: NDArray[Any]
    probabilities: NDArray[np.float32] | None
    parameters: dict[str, Any]


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
        self._columns: dict[tuple[str, str | None], list[str]] = {}
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
    ) -> Response:
        """Send an inference request.

        Parameters
        ----------
        model : str
            Name of the model.
        features : DataFrame, sequence of mappings, or array of shape (rows, features)
            The queries. Of a table (pandas, polars or Arrow) and of rows like ``{"age": 30, "sex": "female"}`` the
            model's own columns are sent by name, and no others. An array holds encoded rows.
        version : str or None
            Version of the model. None: the highest.
        request_id : str or None
            A retry with the same id gets the same answer and is not charged. None: a new random id.

        Returns
        -------
        Response
            Labels, probabilities and parameters.

        Raises
        ------
        BudgetExhausted
            If the budget or quota does not pay for all rows. Nothing was charged.
        """
        inputs, binary = self._inputs(model, version, features)
        head = json.dumps(
            {
                "id": request_id or uuid.uuid4().hex,
                "inputs": inputs,
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
        return Response(outputs["label"], outputs.get("probabilities"), body["parameters"])

    def predict(
        self,
        model: str,
        features: ArrayLike | pd.DataFrame | Sequence[Mapping[str, Any]],
        *,
        version: str | None = None,
    ) -> NDArray[Any]:
        """Send an inference request and return the labels only.

        Parameters
        ----------
        model, features, version
            As in `infer`.

        Returns
        -------
        ndarray of str or int64, shape (rows,)
            Class names if the model was trained on a table, else class numbers.
        """
        return self.infer(model, features, version=version).labels

    def metadata(self, model: str, *, version: str | None = None) -> dict[str, Any]:
        """Return the metadata of a model: inputs, outputs, classes, cost and guarantee.

        Parameters
        ----------
        model : str
            Name of the model.
        version : str or None
            Version of the model. None: the highest.
        """
        return self._get(_model_path(model, version))

    def budget(self, model: str, *, version: str | None = None) -> dict[str, Any]:
        """Return the spent and remaining budget behind a model.

        Parameters
        ----------
        model : str
            Name of the model.
        version : str or None
            Version of the model. None: the highest.
        """
        return self._get(_model_path(model, version) + "/budget")

    def _inputs(self, model: str, version: str | None, features: Any) -> tuple[list[dict[str, Any]], bytes]:
        """Return queries as input tensors, and the binary data of those that have none in JSON."""
        by_name = isinstance(features, Sequence) and len(features) > 0 and isinstance(features[0], Mapping)
        if by_name or hasattr(features, "columns") or hasattr(features, "__arrow_c_stream__"):
            return _columns(features, self._column_names(model, version))
        try:
            rows = np.ascontiguousarray(features, dtype="<f4")
        except (ValueError, TypeError) as error:
            raise InvalidInput(
                f"features must be a table, or an array of numbers of shape (rows, features) ({error})."
            ) from error
        return [_binary_tensor("features", "FP32", rows)], rows.tobytes()

    def _column_names(self, model: str, version: str | None) -> list[str]:
        """Return the names of a model's columns; they are read once."""
        if (model, version) not in self._columns:
            inputs = self.metadata(model, version=version)["inputs"]
            names = [tensor["name"] for tensor in inputs if len(tensor["shape"]) == 1]
            if not names:
                raise InvalidInput(f"The model {model!r} has no columns; features must be rows of numbers.")
            self._columns[model, version] = names
        return self._columns[model, version]

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


def _columns(table: Any, names: list[str]) -> tuple[list[dict[str, Any]], bytes]:
    """Return the named columns of a table as input tensors, and their binary data."""
    import pandas as pd

    from quietmax.data.encoding import require_columns
    from quietmax.data.tables import as_frame

    frame = as_frame(pd.DataFrame(table) if isinstance(table, Sequence) else table)
    require_columns(frame, names)
    tensors, binary = [], b""
    for name in names:
        tensor, data = _column(name, frame[name])
        tensors.append(tensor)
        binary += data
    return tensors, binary


def _column(name: str, values: pd.Series[Any]) -> tuple[dict[str, Any], bytes]:
    """Return a column as a tensor, and its binary data. Only strings are left to the declarations of the column."""
    import pandas as pd

    from quietmax.data.encoding import as_numbers, as_strings

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
    """Return the elements of a binary output tensor."""
    return (
        np.array(split_strings(content))
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
    """Return the exception for an error response."""
    try:
        body = json.loads(content)
        message = str(body["error"])
    except (ValueError, KeyError, TypeError):
        body, message = {}, f"The service responded with status {status}."
    if status == 403 and "remaining" in body:
        return BudgetExhausted(message)
    return InvalidInput(message) if status in (400, 404, 409, 413, 422) else QuietmaxError(message)

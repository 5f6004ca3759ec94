"""A client of the service: rows of numbers or of a table in, numpy arrays out, over one kept connection."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quietmax.errors import BudgetExhausted, InvalidInput, QuietmaxError

if TYPE_CHECKING:
    import pandas as pd

_DATATYPES: dict[str, str] = {"INT64": "<i8", "FP32": "<f4"}


@dataclass(frozen=True, eq=False)
class Response:
    """Labels, probabilities where the model releases them, and what the answer cost."""

    labels: NDArray[np.int64]
    probabilities: NDArray[np.float32] | None
    parameters: dict[str, Any]


class Client:
    """Asks a service. Every question carries a fresh id: a broken connection is retried without paying twice."""

    def __init__(
        self, url: str = "http://127.0.0.1:8080", key: str | None = None, *, seconds: float = 30.0
    ) -> None:
        try:
            parts = urlsplit(url)
            right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            right = False
        if not right:
            raise InvalidInput(
                f"The address {url!r} is no http or https address; give one, as in http://127.0.0.1:8080."
            )
        self._parts = parts
        self._seconds = seconds
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._connection: http.client.HTTPConnection | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def ask(
        self,
        model: str,
        features: ArrayLike | pd.DataFrame | Sequence[Mapping[str, Any]],
        *,
        version: str | None = None,
        request_id: str | None = None,
    ) -> Response:
        """Private answers for rows of features; `BudgetExhausted` if the budget does not pay for them.

        A data frame, or a list of rows as `{"age": 30, ...}`, is encoded as the model's training table was.
        """
        rows = self._rows(model, version, features)
        head = json.dumps(
            {
                "id": request_id or uuid.uuid4().hex,
                "inputs": [
                    {
                        "name": "features",
                        "shape": list(rows.shape),
                        "datatype": "FP32",
                        "parameters": {"binary_data_size": rows.nbytes},
                    }
                ],
                "parameters": {"binary_data_output": True},
            }
        ).encode()
        headers = {
            "content-type": "application/octet-stream",
            "inference-header-content-length": str(len(head)),
        }
        path = self._model(model, version) + "/infer"
        content, told = self._exchange("POST", path, head + rows.tobytes(), headers)
        length = int(told.get("inference-header-content-length", len(content)))
        described = json.loads(content[:length])
        outputs: dict[str, NDArray[Any]] = {}
        start = length
        for tensor in described["outputs"]:
            end = start + tensor["parameters"]["binary_data_size"]
            values = np.frombuffer(content[start:end], dtype=_DATATYPES[tensor["datatype"]])
            outputs[tensor["name"]] = values.reshape(tensor["shape"])
            start = end
        return Response(outputs["label"], outputs.get("probabilities"), described["parameters"])

    def predict(self, model: str, features: ArrayLike, *, version: str | None = None) -> NDArray[np.int64]:
        """Labels only."""
        return self.ask(model, features, version=version).labels

    def metadata(self, model: str, *, version: str | None = None) -> dict[str, Any]:
        """What a model takes, gives, costs and promises."""
        return self._read(self._model(model, version))

    def budget(self, model: str, *, version: str | None = None) -> dict[str, Any]:
        """What is spent and left."""
        return self._read(self._model(model, version) + "/budget")

    def _rows(self, model: str, version: str | None, features: Any) -> NDArray[np.float32]:
        by_name = isinstance(features, Sequence) and len(features) > 0 and isinstance(features[0], Mapping)
        if not by_name and not hasattr(features, "columns"):
            try:
                return np.ascontiguousarray(features, dtype="<f4")
            except (ValueError, TypeError) as problem:
                raise InvalidInput(
                    f"The features are no rows of numbers ({problem}); give an array of shape (rows, features)."
                ) from problem
        import pandas as pd

        from quietmax.data.encoding import Encoding

        described = self.metadata(model, version=version)["parameters"].get("encoding")
        if described is None:
            raise InvalidInput(
                f"The model {model!r} has no public encoding of columns; give its features as rows of numbers."
            )
        return np.ascontiguousarray(
            Encoding.from_json(json.dumps(described)).encode(pd.DataFrame(features)), "<f4"
        )

    def _model(self, model: str, version: str | None) -> str:
        path = f"/v2/models/{quote(model, safe='')}"
        return path if version is None else f"{path}/versions/{quote(version, safe='')}"

    def _read(self, path: str) -> dict[str, Any]:
        content, _ = self._exchange("GET", path, None, {})
        told: dict[str, Any] = json.loads(content)
        return told

    def _exchange(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[bytes, http.client.HTTPMessage]:
        with self._lock:
            for last in (False, True):
                try:
                    connection = self._connected()
                    connection.request(
                        method, self._parts.path.rstrip("/") + path, body, {**self._headers, **headers}
                    )
                    response = connection.getresponse()
                    content = response.read()
                    break
                except (OSError, http.client.HTTPException) as problem:
                    self.close()
                    if last:
                        raise QuietmaxError(
                            f"The service at {self._parts.netloc} cannot be reached ({problem}); start it "
                            "with 'quietmax serve', or correct the address."
                        ) from problem
        if response.status == 200:
            return content, response.headers
        raise _problem(response.status, content)

    def _connected(self) -> http.client.HTTPConnection:
        if self._connection is None:
            host, port = str(self._parts.hostname), self._parts.port
            if self._parts.scheme == "https":
                self._connection = http.client.HTTPSConnection(
                    host, port, timeout=self._seconds, context=ssl.create_default_context()
                )
            else:
                self._connection = http.client.HTTPConnection(host, port, timeout=self._seconds)
        return self._connection


def _problem(status: int, content: bytes) -> QuietmaxError:
    try:
        told = json.loads(content)
        sentence = str(told["error"])
    except (ValueError, KeyError, TypeError):
        told, sentence = {}, f"The service answered with status {status}."
    if status == 403 and "remaining" in told:
        return BudgetExhausted(sentence)
    return InvalidInput(sentence) if status in (400, 404, 409, 413, 422) else QuietmaxError(sentence)

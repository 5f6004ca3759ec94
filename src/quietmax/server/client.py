"""Clients of the service: rows of a table or of numbers in, numpy arrays, data frames or files out.

Neither numpy nor pandas is imported before it is needed: pandas only for a data frame or a file.
"""

from __future__ import annotations

import asyncio
import csv
import hmac
import http.client
import json
import random
import ssl
import struct
import time
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar
from urllib.parse import SplitResult, quote, urlsplit

from quietmax._lazy import lazy_module
from quietmax.errors import BudgetExhausted, InvalidData, InvalidInput, QuietmaxError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import ArrayLike, NDArray

    Features = ArrayLike | pd.DataFrame | Sequence[Mapping[str, Any]]
    Queries = pd.DataFrame | NDArray[Any] | Sequence[Mapping[str, Any]]
    """Features that were checked."""
else:
    np = lazy_module("numpy")

P = ParamSpec("P")
Value = TypeVar("Value")
Progress = Callable[[int, int], object]
_DATATYPES = {"INT64": "<i8", "FP32": "<f4", "FP64": "<f8"}
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 30.0
"""Seconds before the first retry, twice as long before each following one; a service that asks for more is not waited
for."""

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
    """A client of the service. Threads may share it: each request in flight has a connection of its own.

    A request that gets no response, 503 or 429 is sent again with the same id, so it is not charged twice.

    Parameters
    ----------
    url : str
        Address of the service.
    key : str or None
        API key. None: anonymous access.
    timeout : float
        Seconds to wait for a response.
    retries : int
        How often a request is sent again: after 0.1 seconds, then twice as long each time, and never before the
        service asks for it (``retry-after``). If it asks for more than 30 seconds, the error is raised at once.

    See Also
    --------
    quietmax.server.Service : has an example that starts a service and sends queries.
    quietmax.server.AsyncClient : the same for asyncio.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8080",
        key: str | None = None,
        *,
        timeout: float = 30.0,
        retries: int = 4,
    ) -> None:
        self._url = _parse_url(url)
        self._timeout = timeout
        self._retries = retries
        self._key = key or ""
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._known: dict[tuple[str, str | None], dict[str, Any]] = {}  # metadata of models

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        while self._idle:
            self._idle.pop().close()

    def infer(
        self,
        model: str,
        features: Features,
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
        tensors = _tensors(self._checked(model, version, features))
        return self._send(model, version, tensors, request_id, reasons)

    def _send(
        self,
        model: str,
        version: str | None,
        tensors: tuple[list[dict[str, Any]], bytes],
        request_id: str | None,
        reasons: bool = False,
    ) -> Response:
        """Send one inference request with input tensors, see `_tensors`."""
        inputs, binary = tensors
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
        features: Features,
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
        responses = self._responses(model, features, version, request_id)
        return np.concatenate([response.labels for response in responses])

    def ask(
        self,
        model: str,
        features: Features,
        *,
        version: str | None = None,
        request_id: str | None = None,
        progress: Progress | None = None,
    ) -> pd.DataFrame:
        """Return the answers to any number of rows as a data frame.

        Parameters
        ----------
        model, features, version, request_id
            As in `predict`.
        progress : callable or None
            Called with the number of rows that are answered, and that of all rows.

        Returns
        -------
        DataFrame
            The column ``label``, and a column ``probability of CLASS`` for each class if the model releases
            probabilities. It has the index of `features`, if that is a pandas data frame.
        """
        import pandas as pd

        responses = list(self._responses(model, features, version, request_id, progress))
        headings = _headings(self._metadata_once(model, version), responses[0])
        cells = [cell for response in responses for cell in _cells(response)]
        index = features.index if isinstance(features, pd.DataFrame) else None
        return pd.DataFrame(cells, columns=headings, index=index)

    def ask_file(
        self,
        model: str,
        source: str | Path,
        output: str | Path,
        *,
        version: str | None = None,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Write the answers to all rows of a file to another file, completely or not at all.

        The id of each request is made of its rows and the key. Another run with the same file and key gets what was
        charged without paying again, whatever ended the first one, until the ledger is pruned.

        Parameters
        ----------
        model, version, progress
            As in `ask`. The number of all rows of a text file is estimated.
        source : path
            CSV, TSV or Parquet file with the columns of the model, in any order; others are not sent. For a model
            without columns: one column for each number.
        output : path
            CSV file of answers, with the columns of `ask`.

        Returns
        -------
        dict
            The number of ``rows``; how many ``new_answers`` were charged; ``remaining_answers``, None if they are free.
        """
        from quietmax._io import atomic_write
        from quietmax.data.sources import converted_frames, file_parts

        if Path(output).exists() and Path(output).samefile(source):
            raise InvalidInput("output must be another file than source.")
        about = self._metadata_once(model, version)
        most, asked = about["parameters"]["max_rows"], (model, version or about["versions"][-1])
        (part, names), *others = file_parts(source, self._columns(model, version) or None)
        if others:
            raise InvalidInput(f"source must be one file, got {len(others) + 1}.")
        total = part.count() or _estimated_rows(part.file)
        done: dict[str, Any] = {"rows": 0, "new_answers": 0, "remaining_answers": None}

        def _write(staging: Path) -> None:
            with staging.open("w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                send = partial(self._ask_part, *asked, done, part.place)
                for response in converted_frames(part, names, most, send):
                    if not done["rows"]:
                        writer.writerow(_headings(about, response))
                    writer.writerows(_cells(response))
                    done["rows"] += len(response.labels)
                    done["new_answers"] += response.parameters["new_answers"]
                    done["remaining_answers"] = response.parameters.get("remaining_answers")
                    if progress is not None:
                        progress(done["rows"], max(total, done["rows"]))
            if not done["rows"]:
                raise InvalidData(f"{part.place} has no rows.")

        try:
            atomic_write(Path(output), _write)
        except OSError as problem:
            raise QuietmaxError(
                f"The answers cannot be written to {output}: {problem.strerror or problem}. What was charged is not "
                "charged again if the same command runs again."
            ) from problem
        return done

    def _ask_part(
        self, model: str, version: str, done: Mapping[str, Any], place: str, frame: pd.DataFrame
    ) -> Response:
        """Ask about some rows of a file, with an id that another run has too, and nobody without the key can guess."""
        from quietmax.data.tables import query_features

        queries: Any = frame
        if not self._columns(model, version):
            width = self._metadata_once(model, version)["inputs"][0]["shape"][1]
            queries = query_features(frame, encoding=None, width=width, place=place)
        tensors = _tensors(queries)
        content = json.dumps([model, version, done["rows"], tensors[0]]).encode() + tensors[1]
        request_id = hmac.digest(self._key.encode(), content, "sha256").hex()
        try:
            return self._send(model, version, tensors, request_id)
        except BudgetExhausted as error:
            raise _exhausted(error, done["rows"], "if you ask again with the same file and key,") from None

    def _responses(
        self,
        model: str,
        features: Features,
        version: str | None,
        request_id: str | None,
        progress: Progress | None = None,
    ) -> Iterator[Response]:
        """Send as many requests as the rows need."""
        queries = self._checked(model, version, features)
        most = self._metadata_once(model, version)["parameters"]["max_rows"]
        if len(queries) <= most:
            yield self._send(model, version, _tensors(queries), request_id)
            return
        request_id = request_id or uuid.uuid4().hex
        for start in range(0, len(queries), most):
            rows = slice(start, start + most)
            part = queries.iloc[rows] if hasattr(queries, "iloc") else queries[rows]
            try:
                yield self._send(model, version, _tensors(part), f"{request_id}/{start // most}")
            except BudgetExhausted as error:
                raise _exhausted(error, start, f"with request_id={request_id!r}") from None
            if progress is not None:
                progress(min(start + most, len(queries)), len(queries))

    def metadata(self, model: str, *, version: str | None = None) -> dict[str, Any]:
        """Return the metadata of a model: inputs, outputs, classes, cost and guarantee. No version: the highest."""
        return self._get(_model_path(model, version))

    def budget(self, model: str, *, version: str | None = None) -> dict[str, Any]:
        """Return the spent and remaining budget behind a model. No version: the highest."""
        return self._get(_model_path(model, version) + "/budget")

    def _checked(self, model: str, version: str | None, features: Any) -> Queries:
        """Return queries as a frame or mappings with the model's columns, or as an array of encoded rows."""
        named = isinstance(features, Sequence) and any(isinstance(row, Mapping) for row in features)
        columns = self._columns(model, version)
        if named or hasattr(features, "columns") or hasattr(features, "__arrow_c_stream__"):
            if not columns:
                raise InvalidInput(f"The model {model!r} has no columns; features must be rows of numbers.")
            return _named_rows(features, columns) if named else _frame(features, columns)
        rows = _numbers(features)
        encoded = self._metadata_once(model, version)["parameters"].get("encoded_input", {"shape": []})
        if columns and (rows is None or rows.ndim != 2 or [-1, rows.shape[1]] != encoded["shape"]):
            from quietmax.data.encoding import quoted

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
        """Send a request, again if there is no response or it asks for that; return its body and headers."""
        error: QuietmaxError
        for attempt in range(self._retries + 1):
            wait = _FIRST_WAIT * 2**attempt * random.uniform(0.5, 1)
            try:
                response, content = self._exchange_once(method, path, body, headers)
            except (OSError, http.client.HTTPException) as broken:
                error = QuietmaxError(
                    f"The service at {self._url.netloc} cannot be reached ({broken}). 'quietmax serve' starts one."
                )
            else:
                if response.status == 200:
                    return content, response.headers
                error = _response_error(response.status, content)
                if response.status not in (429, 503):
                    break
                wait = max(wait, _seconds(response.headers.get("retry-after", "")))
            if attempt == self._retries or wait > _LONGEST_WAIT:
                break
            time.sleep(wait)
        raise error

    def _exchange_once(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
        try:
            target = self._url.path.rstrip("/") + path
            connection.request(method, target, body, {**self._headers, **headers})
            response = connection.getresponse()
            content = response.read()
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return response, content

    def _connect(self) -> http.client.HTTPConnection:
        host, port = str(self._url.hostname), self._url.port
        if self._url.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(host, port, timeout=self._timeout, context=context)
        return http.client.HTTPConnection(host, port, timeout=self._timeout)


def _in_thread(
    method: Callable[Concatenate[Client, P], Value],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, Value]]:
    """Return a method of `Client` as one that waits for a thread."""

    @wraps(method)
    async def _wait(self: AsyncClient, /, *arguments: P.args, **named: P.kwargs) -> Value:
        call = partial(method, self._client, *arguments, **named)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    return _wait


class AsyncClient:
    """A client of the service for asyncio, with the methods of `Client`.

    Requests run in threads, and so do functions given as ``progress``. Once sent, a request goes on if the task that
    waits for it is cancelled: ask again with the same ``request_id``.

    Parameters
    ----------
    url, key, timeout, retries
        As for `Client`.
    connections : int
        How many requests run at the same time; others wait.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8080",
        key: str | None = None,
        *,
        timeout: float = 30.0,
        retries: int = 4,
        connections: int = 16,
    ) -> None:
        self._client = Client(url, key, timeout=timeout, retries=retries)
        self._threads = ThreadPoolExecutor(connections, "quietmax-client")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Wait for the requests that were sent, and close the connections."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        self._client.close()

    infer = _in_thread(Client.infer)
    predict = _in_thread(Client.predict)
    ask = _in_thread(Client.ask)
    ask_file = _in_thread(Client.ask_file)
    metadata = _in_thread(Client.metadata)
    budget = _in_thread(Client.budget)


def _exhausted(error: BudgetExhausted, rows: int, how: str) -> BudgetExhausted:
    """Return the error of a request after others that were answered."""
    if not rows:
        return error
    return BudgetExhausted(f"{error} The {rows} rows before were answered; {how} they are not charged again.")


def _seconds(text: str) -> float:
    """Return the seconds of a header ``retry-after``; 0 for a date, which the service does not send."""
    return float(text) if text.isascii() and text.isdigit() else 0.0


def _headings(about: dict[str, Any], response: Response) -> list[str]:
    """Return the columns of answers."""
    classes = [] if response.probabilities is None else about["parameters"]["classes"]
    return ["label", *(f"probability of {name}" for name in classes)]


def _cells(response: Response) -> Iterator[list[Any]]:
    """Yield the answer to each row: its label, and its probabilities if there are any."""
    labels = response.labels.tolist()
    probabilities = [[]] * len(labels) if response.probabilities is None else response.probabilities.tolist()
    return ([label, *row] for label, row in zip(labels, probabilities, strict=True))


def _estimated_rows(file: Path) -> int:
    """Return the number of lines of a text file after the first one."""
    with file.open("rb") as lines:
        return max(sum(1 for _ in lines) - 1, 0)


def _numbers(features: Any) -> NDArray[Any] | None:
    """Return an array of numbers, None if the features are none."""
    if features is None:
        return None
    try:
        return np.ascontiguousarray(features, dtype="<f4")
    except (ValueError, TypeError):
        return None


def _named_rows(rows: Sequence[Any], names: list[str]) -> Sequence[dict[str, Any]] | pd.DataFrame:
    """Return rows with the named columns alone; as a frame if a cell is of a type that needs pandas."""
    chosen: list[dict[str, Any]] = []
    for number, row in enumerate(rows, start=1):
        given = {str(name).strip(): cell for name, cell in row.items()} if isinstance(row, Mapping) else {}
        absent = [name for name in names if name not in given]
        if absent:
            from quietmax.data.encoding import quoted

            raise InvalidInput(
                f"Row {number} has no column {quoted(absent, 10)}; every column must be given, None for a missing "
                "value."
            )
        chosen.append({name: given[name] for name in names})
    if all(type(cell) in _PLAIN for row in chosen for cell in row.values()):
        return chosen
    import pandas as pd

    return pd.DataFrame(chosen)


_PLAIN = (type(None), bool, int, float, str)


def _frame(table: Any, names: list[str]) -> pd.DataFrame:
    from quietmax.data.encoding import require_columns
    from quietmax.data.sources import as_frame

    frame = as_frame(table)
    require_columns(frame, names)
    return frame[names]


def _tensors(queries: Any) -> tuple[list[dict[str, Any]], bytes]:
    """Return queries as input tensors, and the binary data of those that have none in JSON."""
    if isinstance(queries, Sequence):
        columns = [_plain_column(name, [row[name] for row in queries]) for name in queries[0]]
    elif hasattr(queries, "iloc"):
        columns = [_column(str(name), queries[name]) for name in queries.columns]
    else:
        columns = [(_binary_tensor("features", "FP32", queries.shape, queries.nbytes), queries.tobytes())]
    return [tensor for tensor, _ in columns], b"".join(data for _, data in columns)


def _plain_column(name: str, cells: list[Any]) -> tuple[dict[str, Any], bytes]:
    """Return a column of plain Python values as a tensor, and its binary data."""
    kinds = {type(cell) for cell in cells if cell is not None and cell == cell}
    if kinds & {str, bool} and float in kinds:
        raise InvalidInput(f"Column {name!r} must hold numbers or strings, got both.")
    if kinds and kinds <= {float, int} and (float in kinds or any(cell != cell for cell in cells)):
        numbers = [float("nan") if cell is None else cell for cell in cells]
        try:
            data = struct.pack(f"<{len(cells)}d", *numbers)
        except (OverflowError, struct.error):
            raise InvalidInput(f"Column {name!r} has an integer that is too large.") from None
        return _binary_tensor(name, "FP64", (len(cells),), len(data)), data
    tensor: dict[str, Any] = {"name": name, "shape": [len(cells)]}
    if kinds == {bool} or kinds == {int}:
        large = kinds == {int} and max(cell for cell in cells if cell is not None) >= 2**63
        datatype = "BOOL" if kinds == {bool} else "UINT64" if large else "INT64"
        return {
            **tensor,
            "datatype": datatype,
            "data": [cell if cell == cell else None for cell in cells],
        }, b""
    strings = ["" if cell is None or cell != cell else str(cell).strip() for cell in cells]
    return {**tensor, "datatype": "BYTES", "data": strings}, b""


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
        return _binary_tensor(name, "FP64", numbers.shape, numbers.nbytes), numbers.tobytes()
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


def _binary_tensor(name: str, datatype: str, shape: Sequence[int], size: int) -> dict[str, Any]:
    parameters = {"binary_data_size": size}
    return {"name": name, "shape": list(shape), "datatype": datatype, "parameters": parameters}


def _values(datatype: str, content: bytes) -> NDArray[Any]:
    """Return the values of a binary tensor; a string has 4 bytes for its length before it."""
    if datatype != "BYTES":
        return np.frombuffer(content, dtype=_DATATYPES[datatype])
    strings, start = [], 0
    while start < len(content):
        end = start + 4 + int.from_bytes(content[start : start + 4], "little")
        strings.append(content[start + 4 : end].decode())
        start = end
    return np.array(strings)


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
    if status == 422:
        return InvalidData(message)
    return InvalidInput(message) if status in (400, 404, 409, 413) else QuietmaxError(message)

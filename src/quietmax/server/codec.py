"""Tensors of the Open Inference Protocol v2, as JSON or in the binary tensor extension, in requests and responses.

A model takes one tensor `features`. A model of a table takes one tensor per column instead, by the name of the column,
and answers with class names; it also takes rows that are encoded already, as `features`.

orjson reads the JSON. It silently keeps the last of two equal keys, so a body in which a key could be repeated is read
once more with the standard library. simdjson reads a long list of numbers straight into an array: a request of 100 rows
holds some 78,000 numbers, which take most of its time as Python objects (8.8 against 2.5 ms measured).
"""

from __future__ import annotations

import asyncio
import json
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import orjson
import simdjson
from numpy.typing import NDArray

from quietmax.data.cells import Cells
from quietmax.data.encoding import CategoricalColumn, Encoding, quoted
from quietmax.errors import InvalidInput
from quietmax.estimators.head.effects import NOT_ADDITIVE, PAID, Additive
from quietmax.mechanisms.base import Answers
from quietmax.server.deployment import Deployment, Rows
from quietmax.server.errors import HttpError

INPUT, LABEL, PROBABILITIES, REASONS = "features", "label", "probabilities", "reasons"
MAX_VALUE = 1e15
"""Largest absolute value of a feature: no sum of squares of such features overflows in 32-bit floats."""
INPUT_DATATYPES: dict[str, np.dtype[Any]] = {
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    **{f"INT{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
}
"""Datatypes of `features`."""
COLUMN_DATATYPES: dict[str, np.dtype[Any]] = {
    "BYTES": np.dtype(object),
    "BOOL": np.dtype(np.uint8),
    **INPUT_DATATYPES,
}
"""Datatypes of a column; BYTES are strings in UTF-8."""
_CELLS: dict[str, tuple[set[type], str]] = {
    "O": ({str}, "strings"),
    "b": ({bool}, "booleans"),
    "f": ({int, float}, "numbers"),
}
"""What the cells of a column are in JSON, by the kind of its datatype; all others are integers."""
_ISO_DATES = "datetime"
"""The content type of strings that are dates in ISO 8601, whatever format their column declares."""
_LENGTH = struct.Struct("<I")
"""The length of an element of a binary BYTES tensor, before its bytes."""
_MIN_ARRAY_BYTES = 512
"""Numbers of shorter texts are read as Python objects."""
MAX_BYTES_UNCHECKED = 2**15
"""The structure of a larger body is checked before it is parsed, and its columns are encoded in a thread."""
_MAX_BYTES_IN_LOOP = 2**20
_PARSERS: list[simdjson.Parser] = []
"""The parser of the last body that was not larger: getting the memory of a new one takes longer than parsing."""
_SPARE = 64
"""Values, lists and objects of a request, and of each of its columns, that are not data."""
_ANY_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""A string, or the unfinished rest of the text: a search that starts again at every quote would take quadratic time."""
_MAX_ID = 128
_MAX_TENSORS = 16
_MAX_DIMENSIONS = 8


@dataclass(frozen=True, slots=True, eq=False)
class InferenceRequest:
    """A decoded inference request."""

    rows: Rows  # The features
    id: str | None  # The request id
    outputs: tuple[tuple[str, bool], ...]
    unknown: Mapping[str, int] = field(default_factory=dict)


async def _read_request(
    body: bytes, json_length: int | None, deployment: Deployment, max_rows: int
) -> InferenceRequest:
    """Decode the body of an inference request: in a thread if it is large, so that other requests do not wait."""
    if len(body) <= (_MAX_BYTES_IN_LOOP if deployment.encoding is None else MAX_BYTES_UNCHECKED):
        return _decode_request(body, json_length, deployment, max_rows)
    return await asyncio.to_thread(_decode_request, body, json_length, deployment, max_rows)


def _decode_request(
    body: bytes, json_length: int | None, deployment: Deployment, max_rows: int
) -> InferenceRequest:
    if json_length is not None and not 0 <= json_length <= len(body):
        raise HttpError(
            400,
            f"Inference-Header-Content-Length must be at most {len(body)}, the size of the body, got {json_length}.",
        )
    text = body if json_length is None else body[:json_length]
    if len(body) > MAX_BYTES_UNCHECKED:
        _check_structure(text, deployment, max_rows)
    request = _parse(text, deployment.encoding)
    return _decode_tensors(request, memoryview(body)[len(text) :], deployment, max_rows)


def _decode_tensors(
    request: Mapping[str, Any], binary: memoryview, deployment: Deployment, max_rows: int
) -> InferenceRequest:
    inputs = _inputs(request)
    parts = _binary_parts(inputs, binary)
    encoding, additive = deployment.encoding, deployment.additive
    unknown: dict[str, int] = {}
    encoded = [tensor["name"] for tensor in inputs] == [INPUT]
    if encoding is None or (encoded and _takes_encoded_rows(encoding)):
        rows: Rows = _rows(inputs, parts[0], deployment.inputs, max_rows)
        rows = rows if additive is None else additive.cells.transform(rows).astype(np.int32)
    else:
        columns = _columns(inputs, parts, encoding, max_rows)
        try:
            rows, unknown = _read_columns(encoding, columns, additive)
        except InvalidInput as error:
            raise HttpError(422, str(error), {"column": error.column} if error.column else None) from None
    return InferenceRequest(rows, _id(request), _outputs(request, deployment), unknown)


def _read_columns(
    encoding: Encoding, columns: Mapping[str, Cells], additive: Additive | None
) -> tuple[Rows, dict[str, int]]:
    """Return the rows of some columns, and how many values are outside of the declared categories, by column."""
    read = [each for each in encoding.columns if additive or isinstance(each, CategoricalColumn)]
    codes = [each._codes(columns[each.name]) for each in read]
    if additive:
        rows: Rows = additive.cells.of_codes(codes, [each.missing for each in read])
    else:
        rows = encoding._encoded(columns) + np.float32(0)
    public = [] if encoding.inferred else zip(read, codes, strict=True)
    counts = {each.name: each.unknown(code) for each, code in public if isinstance(each, CategoricalColumn)}
    return rows, {name: count for name, count in counts.items() if count}


def _check_structure(text: bytes, deployment: Deployment, max_rows: int) -> None:
    """Raise if a JSON text has more values, lists or objects than the largest request to a model.

    Counting takes a fraction of the time and memory of parsing. Only what stands outside of strings counts.
    """
    columns = 0 if deployment.encoding is None else len(deployment.encoding.columns)
    most = {
        b",": max_rows * max(deployment.inputs, columns) + _SPARE * (1 + columns),
        b"[": max_rows * max(1, columns) + _SPARE * (1 + columns),
        b"{": _SPARE * (1 + columns),
    }
    if all(_count(text, sign) <= limit for sign, limit in most.items()):
        return
    outside = _ANY_STRING.sub(b"", text)
    if any(outside.count(sign) > limit for sign, limit in most.items()):
        raise HttpError(413, f"The body has more values or lists than {max_rows} rows of this model.")


def _count(text: bytes, sign: bytes) -> int:
    """Count a byte, in a quarter of the time that `bytes.count` takes for a long text; in parts, to take no memory."""
    signs, size = np.frombuffer(text, np.uint8), 2**16
    parts = (signs[start : start + size] for start in range(0, len(signs), size))
    return sum(int(np.count_nonzero(part == ord(sign))) for part in parts)


def _parse(text: bytes, encoding: Encoding | None) -> dict[str, Any]:
    """Return the JSON object of a body, in which no key may be repeated."""
    request: Any = None
    if len(text) >= _MIN_ARRAY_BYTES and (encoding is None or _takes_encoded_rows(encoding)):
        request = _parse_with_array(text)
    if request is None:
        try:
            request = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise HttpError(400, f"The body is not valid JSON ({str(error)[:100]}).") from None
    if not isinstance(request, dict):
        raise HttpError(400, "The body must be a JSON object with `inputs`.")
    # Every key has two quotes, and so has every string: a key whose first value was dropped leaves quotes over.
    if b"\\" in text or _count(text, b'"') != _dumped(request).count(b'"'):
        _check_unique_keys(text)
    return request


def _parse_with_array(text: bytes) -> dict[str, Any] | None:
    """Parse a request for `features` with their numbers as an array. None: it is, or may be, anything else."""
    if b"\\" in text:
        return None
    try:
        parser = _PARSERS.pop() if _PARSERS else simdjson.Parser()
        document: Any = parser.parse(text)
        (tensor,) = document["inputs"]
        data = tensor["data"]
        rows = list(data) if isinstance(data[0], simdjson.Array) else []
        parts = [np.frombuffer(row.as_buffer(of_type="d")) for row in rows or [data]]
        numbers = np.stack(parts) if rows else parts[0]
        read = {name: [] if name == "data" else _as_python(tensor[name]) for name in tensor}
        others = {name: _as_python(document[name]) for name in document if name != "inputs"}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError):
        return None
    if len(text) <= _MAX_BYTES_IN_LOOP:
        _PARSERS[:] = [parser]
    request = {**others, "inputs": [read]}
    # A list among the numbers would have been flattened; it has a bracket of its own.
    if read.get("name") != INPUT or _count(text, b"[") != _dumped(request).count(b"[") + len(rows):
        return None
    read["data"] = numbers
    return request


def _as_python(value: Any) -> Any:
    if isinstance(value, simdjson.Object):
        return value.as_dict()
    return value.as_list() if isinstance(value, simdjson.Array) else value


def _dumped(request: Any) -> bytes:
    """Write a request as JSON, null for an array of numbers; nothing if it is nested too deeply."""
    try:
        return orjson.dumps(request, default=lambda _: None)
    except orjson.JSONEncodeError:
        return b""


def _check_unique_keys(text: bytes) -> None:
    def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise HttpError(400, "Keys of a JSON object must be unique.")
        return found

    try:
        json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        raise HttpError(400, "The body is not valid JSON.") from None


def _inputs(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    inputs = request.get("inputs")
    if not isinstance(inputs, list) or not inputs or not all(isinstance(tensor, dict) for tensor in inputs):
        raise HttpError(400, "`inputs` must be a list of tensors.")
    for tensor in inputs:
        if not isinstance(tensor.get("name"), str):
            raise HttpError(400, "The `name` of an input must be a string.")
    return inputs


def _id(request: Mapping[str, Any]) -> str | None:
    identifier = request.get("id")
    if identifier is None or identifier == "":
        return None
    if not isinstance(identifier, str) or len(identifier) > _MAX_ID:
        raise HttpError(400, f"`id` must be a string of at most {_MAX_ID} characters.")
    return identifier


def _parameters(owner: Mapping[str, Any]) -> dict[str, Any]:
    parameters = owner.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict) or not all(
        isinstance(value, str | int | float) for value in parameters.values()
    ):
        raise HttpError(400, "`parameters` values must be strings, numbers or booleans.")
    return parameters


def _outputs(request: Mapping[str, Any], deployment: Deployment) -> tuple[tuple[str, bool], ...]:
    """Return the requested outputs; all that the model has but reasons if none are named."""
    known = tuple(_output_datatypes(deployment))
    default_binary = _parameters(request).get("binary_data_output") is True
    wanted = request.get("outputs")
    if wanted is None or wanted == []:
        return tuple((name, default_binary) for name in known if name != REASONS)
    if not isinstance(wanted, list) or len(wanted) > _MAX_TENSORS:
        raise HttpError(400, f"`outputs` must be a list of at most {_MAX_TENSORS} tensors.")
    chosen: dict[str, bool] = {}
    for tensor in wanted:
        if not isinstance(tensor, dict) or not isinstance(tensor.get("name"), str):
            raise HttpError(400, "Each of `outputs` must be an object with a `name`.")
        name = tensor["name"]
        if name == REASONS and name not in known:
            raise HttpError(422, NOT_ADDITIVE if deployment.cost is None else PAID)
        if name not in known or name in chosen:
            raise HttpError(422, f"`outputs` may name each of {', '.join(known)} once.")
        chosen[name] = _parameters(tensor).get("binary_data", default_binary) is True
    return tuple(chosen.items())


def _binary_parts(inputs: list[dict[str, Any]], binary: memoryview) -> list[memoryview | None]:
    """Return the binary data of each input; None if its data are listed in the JSON."""
    parts: list[memoryview | None] = []
    start = 0
    for tensor in inputs:
        name, size = tensor["name"][:64], _parameters(tensor).get("binary_data_size")
        if size is None:
            parts.append(None)
            continue
        if tensor.get("data") is not None:
            raise HttpError(400, f"`{name}` must have either `data` or `binary_data_size`, got both.")
        if type(size) is not int or not 0 <= size <= len(binary) - start:
            raise HttpError(422, f"The `binary_data_size` of `{name}` must be its number of bytes.")
        parts.append(binary[start : start + size])
        start += size
    if start != len(binary):
        raise HttpError(
            422, f"The inputs have a `binary_data_size` of {start} bytes together, got {len(binary)} bytes."
        )
    return parts


def _datatype(tensor: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    datatype = tensor.get("datatype")
    if not isinstance(datatype, str) or datatype not in known:
        raise HttpError(422, f"The `datatype` of `{tensor['name'][:64]}` must be one of {', '.join(known)}.")
    return datatype


def _rows(inputs: list[dict[str, Any]], part: memoryview | None, width: int, max_rows: int) -> Rows:
    """Return the rows of the one tensor `features`."""
    tensor = inputs[0]
    if len(inputs) > 1 or tensor["name"] != INPUT:
        raise HttpError(422, f"`inputs` must be one tensor named `{INPUT}`.")
    shape = _shape(tensor, "[1, 784]")
    if shape[1:] != [width]:
        raise HttpError(422, f"The `shape` of `{INPUT}` must be [rows, {width}], got {shape}.")
    _check_count(shape[0], max_rows, f"`{INPUT}`")
    datatype = _datatype(tensor, INPUT_DATATYPES)
    if part is not None:
        values = _binary_numbers(INPUT, part, datatype, shape[0] * width)
    else:
        values = _listed_values(tensor, INPUT_DATATYPES[datatype], shape)
    with np.errstate(over="ignore"):
        rows = values.astype(np.float32, copy=False).reshape(shape)
    if not -MAX_VALUE <= rows.min() <= rows.max() <= MAX_VALUE:  # neither is NaN
        raise HttpError(422, f"Features must be between {-MAX_VALUE:g} and {MAX_VALUE:g}.")
    # -0.0 becomes 0.0, as equal queries have equal bytes
    return np.add(rows, np.float32(0), out=rows if rows.flags.writeable else None)


def _check_count(count: int, max_rows: int, what: str) -> None:
    if count < 1:
        raise HttpError(422, f"{what} must have at least 1 row.")
    if count > max_rows:
        raise HttpError(413, f"{what} must have at most {max_rows} rows, got {count}.")


def _shape(tensor: Mapping[str, Any], example: str) -> list[int]:
    shape = tensor.get("shape")
    if (
        not isinstance(shape, list)
        or not 1 <= len(shape) <= _MAX_DIMENSIONS
        or not all(type(size) is int and 0 <= size < 2**31 for size in shape)
    ):
        raise HttpError(
            400, f"The `shape` of `{tensor['name']}` must be a list of integers, as in {example}."
        )
    return shape


def _listed_values(tensor: Mapping[str, Any], kind: np.dtype[Any], shape: list[int]) -> NDArray[Any]:
    """Return the numbers of `features` from JSON, in one list or one for each row; booleans are no numbers."""
    data = tensor.get("data")
    if not isinstance(data, list | np.ndarray):
        raise HttpError(400, f"The `data` of `{INPUT}` must be a list of numbers.")
    if isinstance(data, list):
        nested = set(map(type, data)) == {list}
        if not set(map(type, chain.from_iterable(data) if nested else data)) <= {int, float}:
            raise HttpError(422, f"The `data` of `{INPUT}` must be numbers or lists of numbers.")
    try:
        with np.errstate(over="ignore"):
            values: NDArray[np.floating] = np.array(
                data, dtype=np.float64 if kind.kind in "iu" else np.float32
            )
    except (ValueError, OverflowError):
        raise HttpError(422, f"The `data` of `{INPUT}` must be rows of numbers of equal length.") from None
    if values.shape not in (tuple(shape), (shape[0] * shape[1],)):
        raise HttpError(
            422, f"The `data` of `{INPUT}` must have the shape {shape}, got {values.size} numbers."
        )
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        fits = (values == np.rint(values)) & (values >= limits.min) & (values <= limits.max)
        if not fits.all():
            raise HttpError(422, f"The `data` of `{INPUT}` must be integers of the stated `datatype`.")
    return values


def _takes_encoded_rows(encoding: Encoding) -> bool:
    """Tell whether a model of a table also takes `features`; not if that is the name of one of its columns."""
    return all(column.name != INPUT for column in encoding.columns)


def _columns(
    inputs: list[dict[str, Any]], parts: list[memoryview | None], encoding: Encoding, max_rows: int
) -> dict[str, Cells]:
    """Return the cells of the input tensors, by the name of the column."""
    _check_columns([tensor["name"] for tensor in inputs], [column.name for column in encoding.columns])
    count = _common_length(inputs, max_rows)
    columns: dict[str, Cells] = {}
    for tensor, part in zip(inputs, parts, strict=True):
        name, datatype = tensor["name"], _datatype(tensor, COLUMN_DATATYPES)
        content_type = _parameters(tensor).get("content_type", "str")
        if datatype == "BYTES" and content_type not in ("str", _ISO_DATES):
            raise HttpError(422, f"The `content_type` of `{name}` must be str or {_ISO_DATES}.")
        if part is None:
            cells = _listed_column(tensor, datatype, count)
        elif datatype == "BYTES":
            cells = _binary_strings(name, part, count)
        else:
            cells = _binary_numbers(name, part, datatype, count)
        # As in MLServer, strings of that content type are written like dates that have a type.
        columns[name] = Cells(cells, strings=datatype == "BYTES" and content_type != _ISO_DATES)
    return columns


def _check_columns(given: list[str], names: list[str]) -> None:
    """Raise unless every column of the model is given, once."""
    known = set(names)
    for name in given:
        if name not in known:
            raise HttpError(422, f"There is no column {name[:64]!r}; the columns are {quoted(names)}.")
    absent = [name for name in names if name not in given]
    if absent:
        raise HttpError(
            422,
            f"The request has no column {quoted(absent, 10)}; every column must be given, null for a missing value.",
        )
    if len(given) > len(names):
        raise HttpError(422, "Every column must be given once.")


def _common_length(inputs: list[dict[str, Any]], max_rows: int) -> int:
    """Return the number of rows of all columns, each of shape [rows] or [rows, 1]."""
    counts = set()
    for tensor in inputs:
        count, *others = _shape(tensor, "[1]")
        if others not in ([], [1]):
            raise HttpError(422, f"The `shape` of `{tensor['name']}` must be [rows] or [rows, 1].")
        counts.add(count)
    if len(counts) > 1:
        raise HttpError(422, "All columns must have the same number of rows.")
    _check_count(count, max_rows, "Columns")
    return count


def _listed_column(tensor: Mapping[str, Any], datatype: str, count: int) -> list[Any] | NDArray[Any]:
    """Return the cells of a column from JSON; null is a missing value."""
    name, cells = tensor["name"], tensor.get("data")
    if not isinstance(cells, list):
        raise HttpError(400, f"The `data` of `{name}` must be a list.")
    if cells and set(map(type, cells)) == {list} and all(len(cell) == 1 for cell in cells):
        cells = [cell[0] for cell in cells]
    if len(cells) != count:
        raise HttpError(422, f"The `data` of `{name}` must have {count} values, got {len(cells)}.")
    kind = "b" if datatype == "BOOL" else COLUMN_DATATYPES[datatype].kind
    allowed, words = _CELLS.get(kind, ({int}, "integers"))
    found = set(map(type, cells))
    if not found <= {*allowed, type(None)}:
        raise HttpError(422, f"The `data` of `{name}` must be {words} or null, as its `datatype` says.")
    if kind == "f":
        return np.array(cells, dtype=np.float64)  # None is NaN
    if kind in "bO":
        return cells
    try:
        values = np.array([0 if cell is None else cell for cell in cells], dtype=COLUMN_DATATYPES[datatype])
    except OverflowError:
        raise HttpError(422, f"The `data` of `{name}` must be integers of the stated `datatype`.") from None
    return cells if type(None) in found else values


def _binary_strings(name: str, content: memoryview, count: int) -> list[str]:
    try:
        strings = _split_strings(bytes(content))
    except ValueError:
        raise HttpError(
            422, f"Each string of `{name}` must be 4 bytes for its length, then its bytes in UTF-8."
        ) from None
    if len(strings) != count:
        raise HttpError(422, f"`{name}` must have {count} strings of binary data, got {len(strings)}.")
    return strings


def _binary_numbers(name: str, content: memoryview, datatype: str, count: int) -> NDArray[Any]:
    kind = COLUMN_DATATYPES[datatype]
    if len(content) != count * kind.itemsize:
        raise HttpError(
            422, f"`{name}` must have {count * kind.itemsize} bytes of binary data, got {len(content)} bytes."
        )
    values = np.frombuffer(content, dtype=kind)
    if datatype == "BOOL" and (values > 1).any():
        raise HttpError(422, f"The binary data of `{name}` must be bytes 0 and 1, as BOOL says.")
    return values.astype(bool) if datatype == "BOOL" else values


def _split_strings(content: bytes) -> list[str]:
    """Decode a binary BYTES tensor; see `_join_strings`."""
    strings: list[str] = []
    start = 0
    while start < len(content):
        begin = start + _LENGTH.size
        if begin > len(content):
            raise ValueError("a length is cut off")
        start = begin + _LENGTH.unpack_from(content, begin - _LENGTH.size)[0]
        if start > len(content):
            raise ValueError("an element is cut off")
        strings.append(content[begin:start].decode())
    return strings


def _join_strings(strings: Iterable[str | bytes]) -> bytes:
    """Encode strings as a binary BYTES tensor: 4 bytes for the length of each, then its bytes in UTF-8."""
    elements = [each.encode() if isinstance(each, str) else each for each in strings]
    return b"".join(_LENGTH.pack(len(element)) + element for element in elements)


def _output_datatypes(deployment: Deployment) -> dict[str, str]:
    datatypes = {LABEL: "INT64" if deployment.encoding is None else "BYTES"}
    if deployment.releases_probabilities:
        datatypes[PROBABILITIES] = "FP32"
    if deployment.additive is not None:
        datatypes[REASONS] = "FP64"
    return datatypes


def _encode_response(
    head: dict[str, Any], request: InferenceRequest, answers: Answers, deployment: Deployment
) -> tuple[bytes, int | None]:
    tensors = _requested_tensors(request, answers, deployment)
    datatypes = _output_datatypes(deployment)
    described: list[dict[str, Any]] = []
    binary: list[bytes] = []
    for name, as_binary in request.outputs:
        values = tensors[name]
        tensor: dict[str, Any] = {"name": name, "datatype": datatypes[name], "shape": values.shape}
        names = None
        if datatypes[name] == "BYTES":
            names = [deployment.classes[label] for label in values.tolist()]
        if as_binary:
            content = values.tobytes() if names is None else _join_strings(names)
            tensor["parameters"] = {"binary_data_size": len(content)}
            binary.append(content)
        else:
            tensor["data"] = values.reshape(-1) if names is None else names
        described.append(tensor)
    text = orjson.dumps({**head, "outputs": described}, option=orjson.OPT_SERIALIZE_NUMPY)
    return (text, None) if not binary else (b"".join([text, *binary]), len(text))


def _requested_tensors(
    request: InferenceRequest, answers: Answers, deployment: Deployment
) -> dict[str, NDArray[Any]]:
    """Return the answers, and the reasons of rows of a table if they are asked for."""
    tensors = _output_tensors(answers)
    if deployment.additive is not None and any(name == REASONS for name, _ in request.outputs):
        tensors[REASONS] = deployment.additive.weights.summands(request.rows)
    return tensors


def _output_tensors(answers: Answers) -> dict[str, NDArray[Any]]:
    tensors: dict[str, NDArray[Any]] = {LABEL: np.ascontiguousarray(answers.labels, dtype="<i8")}
    if answers.probabilities is not None:
        tensors[PROBABILITIES] = np.ascontiguousarray(answers.probabilities, dtype="<f4")
    return tensors


def _pack_answers(answers: Answers) -> NDArray[np.uint8]:
    """Encode answers as the ledger stores them: per row 8 bytes for the label, then 4 for each probability."""
    return np.hstack(
        [tensor.reshape(len(tensor), -1).view(np.uint8) for tensor in _output_tensors(answers).values()]
    )


def _unpack_answers(packed: NDArray[np.uint8]) -> Answers:
    labels = np.ascontiguousarray(packed[:, :8]).view("<i8").reshape(-1)
    if packed.shape[1] == 8:
        return Answers(labels, None)
    return Answers(labels, np.ascontiguousarray(packed[:, 8:]).view("<f4").astype(np.float64))


def _packed_width(deployment: Deployment) -> int:
    return 8 + (4 * len(deployment.classes) if deployment.releases_probabilities else 0)

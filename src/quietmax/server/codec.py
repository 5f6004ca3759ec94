"""Tensors of the Open Inference Protocol v2: JSON, and the binary tensor extension, in and out.

orjson reads the JSON: for a row of 784 numbers it takes a ninth of the standard library's time (42 against 388
microseconds measured), which is most of what a request costs. It keeps the last of two equal keys without a word, so
that a body in which keys could be repeated is read once more with the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from quietmax.mechanisms.base import Answers
from quietmax.server.errors import HttpError, bad_request, unfit
from quietmax.server.repository import LARGEST_VALUE, Rows, Servable

INPUT, LABEL, PROBABILITIES = "features", "label", "probabilities"
_TYPES: dict[str, np.dtype[Any]] = {
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    **{f"INT{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
}
_LONGEST_NAME = 64
_LONGEST_ID = 128
_MOST_TENSORS = 16
_MOST_DIMENSIONS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """An inference request: rows of features, its id if it has one, and which outputs are wanted, binary or not."""

    rows: Rows
    id: str | None
    outputs: tuple[tuple[str, bool], ...]


def read_query(body: bytes, json_length: int | None, servable: Servable, max_rows: int) -> Query:
    """The query in a request's body. `json_length` is where the JSON ends and binary tensors begin."""
    if json_length is not None and not 0 <= json_length <= len(body):
        raise bad_request(
            f"The header says that {json_length} bytes are JSON, but the body has {len(body)}; correct it."
        )
    text, binary = (body, b"") if json_length is None else (body[:json_length], body[json_length:])
    try:
        request = orjson.loads(text)
    except orjson.JSONDecodeError as problem:
        raise bad_request(
            f"The body is not JSON ({str(problem)[:100]}); send a v2 inference request."
        ) from None
    if not isinstance(request, dict):
        raise bad_request("The body is JSON, but not an object; send a v2 inference request with inputs.")
    tensor = _only_input(request)
    data = tensor.get("data")
    if data is not None:
        tensor["data"] = None
    suspicious = _more_quotes_than_known(text, request)
    if suspicious:
        _refuse_repeated_keys(text)
    if data is not None:
        tensor["data"] = data
    rows = _rows(tensor, binary, servable, max_rows, check_types=suspicious or _has_words(text))
    return Query(rows, _identifier(request), _outputs(request, servable))


def _only_input(request: Mapping[str, Any]) -> dict[str, Any]:
    inputs = request.get("inputs")
    if not isinstance(inputs, list) or not inputs or not all(isinstance(tensor, dict) for tensor in inputs):
        raise bad_request(f"The request has no list of inputs; send one tensor named '{INPUT}'.")
    if len(inputs) > 1:
        raise unfit(
            f"The request has {len(inputs)} input tensors, but the model takes one; send only '{INPUT}'."
        )
    tensor: dict[str, Any] = inputs[0]
    name = tensor.get("name")
    if not isinstance(name, str) or len(name) > _LONGEST_NAME:
        raise bad_request(
            f"The input tensor has no name of up to {_LONGEST_NAME} letters; call it '{INPUT}'."
        )
    if name != INPUT:
        raise unfit(f"The input tensor must be called '{INPUT}'; see the model's metadata, and rename it.")
    return tensor


def _identifier(request: Mapping[str, Any]) -> str | None:
    identifier = request.get("id")
    if identifier is None or identifier == "":
        return None
    if not isinstance(identifier, str) or len(identifier) > _LONGEST_ID:
        raise bad_request(
            f"The request id must be text of up to {_LONGEST_ID} letters; send such a one, or none."
        )
    return identifier


def _parameters(owner: Mapping[str, Any]) -> dict[str, Any]:
    parameters = owner.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict) or not all(
        isinstance(value, str | int | float) for value in parameters.values()
    ):
        raise bad_request(
            "The parameters must be an object of texts, numbers and truth values; correct or leave them out."
        )
    return parameters


def _outputs(request: Mapping[str, Any], servable: Servable) -> tuple[tuple[str, bool], ...]:
    offered = (LABEL, PROBABILITIES) if servable.releases_probabilities else (LABEL,)
    by_default = _parameters(request).get("binary_data_output") is True
    wanted = request.get("outputs")
    if wanted is None or wanted == []:
        return tuple((name, by_default) for name in offered)
    if not isinstance(wanted, list) or len(wanted) > _MOST_TENSORS:
        raise bad_request(f"The outputs must be a list of up to {_MOST_TENSORS} tensors; send one, or none.")
    chosen: list[tuple[str, bool]] = []
    for tensor in wanted:
        if not isinstance(tensor, dict) or not isinstance(tensor.get("name"), str):
            raise bad_request("An output is not an object with a name; send names, or leave the outputs out.")
        name = tensor["name"]
        if name not in offered or name in {known for known, _ in chosen}:
            raise unfit(
                f"An output asked for is unknown or asked for twice; name each at most once, of {', '.join(offered)}."
            )
        chosen.append((name, _parameters(tensor).get("binary_data", by_default) is True))
    return tuple(chosen)


def _rows(
    tensor: Mapping[str, Any], binary: bytes, servable: Servable, max_rows: int, *, check_types: bool
) -> Rows:
    shape = tensor.get("shape")
    if (
        not isinstance(shape, list)
        or not 1 <= len(shape) <= _MOST_DIMENSIONS
        or not all(type(size) is int and 0 <= size < 2**31 for size in shape)
    ):
        raise bad_request("The input's shape must be a list of whole numbers, as in [1, 784]; correct it.")
    if tuple(shape[1:]) not in ((servable.inputs,), servable.shape):
        raise unfit(
            f"The input has shape {shape}, but the model takes [rows, {servable.inputs}]; give one row per query."
        )
    count = shape[0]
    if count < 1:
        raise unfit("The input has no rows; send at least one query.")
    if count > max_rows:
        raise HttpError(413, f"The input has {count} rows, but at most {max_rows} are taken; send fewer.")
    kind = _TYPES.get(tensor.get("datatype") if isinstance(tensor.get("datatype"), str) else "")  # type: ignore[arg-type]
    if kind is None:
        raise unfit(f"The input's datatype must be one of {', '.join(_TYPES)}; send FP32.")
    size = count * servable.inputs
    announced = _parameters(tensor).get("binary_data_size")
    if announced is not None:
        values = _binary_values(tensor, binary, announced, kind, size)
    else:
        values = _listed_values(tensor, binary, kind, size, check_types)
    with np.errstate(over="ignore"):
        rows = values.astype(np.float32, copy=False).reshape(count, servable.inputs)
    if not (np.abs(rows) <= LARGEST_VALUE).all():
        raise unfit(
            f"The input holds NaN, infinity or a number beyond {LARGEST_VALUE:g}; correct it, nothing was spent."
        )
    return rows + np.float32(0)  # -0.0 becomes 0.0, as equal queries have equal bytes


def _binary_values(
    tensor: Mapping[str, Any], binary: bytes, announced: Any, kind: np.dtype[Any], size: int
) -> NDArray[Any]:
    if tensor.get("data") is not None:
        raise bad_request("The input has both data and binary_data_size; send one of them.")
    if type(announced) is not int or announced != len(binary) or announced != size * kind.itemsize:
        raise unfit(
            f"The binary input should be {size * kind.itemsize} bytes after the JSON, and say so in binary_data_size, "
            f"but {len(binary)} bytes came; correct its size."
        )
    return np.frombuffer(binary, dtype=kind)


def _listed_values(
    tensor: Mapping[str, Any], binary: bytes, kind: np.dtype[Any], size: int, check_types: bool
) -> NDArray[Any]:
    if binary:
        raise bad_request("Bytes follow the JSON, but no input has a binary_data_size; add it.")
    data = tensor.get("data")
    if not isinstance(data, list):
        raise bad_request("The input has no list of data; send its numbers, row after row.")
    if check_types and not _all_numbers(data):
        raise unfit("The input's data must be numbers, or lists of numbers; correct them.")
    try:
        with np.errstate(over="ignore"):
            values: NDArray[np.floating] = np.array(
                data, dtype=np.float64 if kind.kind in "iu" else np.float32
            )
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise unfit("The input's data are not rows of numbers of equal length; correct them.") from None
    if values.size != size or (values.ndim > 1 and values.shape != tuple(tensor["shape"])):
        raise unfit(
            f"The input has {values.size} numbers, but not in the shape {tensor['shape']}; correct one."
        )
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        whole = (values == np.rint(values)) & (values >= limits.min) & (values <= limits.max)
        if not whole.all():
            raise unfit("The input holds numbers that its whole-number datatype cannot; send FP32.")
    return values


def _all_numbers(data: list[Any]) -> bool:
    """Whether a list, however nested, holds numbers only (truth values are none)."""
    level = data
    for _ in range(_MOST_DIMENSIONS):
        kinds = set(map(type, level))
        if kinds <= {int, float}:
            return True
        if kinds != {list}:
            return False
        level = [value for inner in level for value in inner]
    return False


def _has_words(text: bytes) -> bool:
    return b"true" in text or b"false" in text or b"null" in text


def _more_quotes_than_known(text: bytes, request: Mapping[str, Any]) -> bool:
    """Whether the body holds more keys or texts than what was read of it; the input's data were taken out.

    Every key and every text stands in two quotes, so that a repeated key, whose first value is dropped, or a text among
    the data leaves quotes over. A body with escapes is always suspicious.
    """
    try:
        return b"\\" in text or text.count(b'"') != 2 * _texts(request)
    except RecursionError:
        raise bad_request("The body is nested too deeply; send a v2 inference request.") from None


def _texts(value: Any) -> int:
    """How many keys and texts a JSON value holds."""
    if isinstance(value, str):
        return 1
    if isinstance(value, dict):
        return len(value) + sum(_texts(entry) for entry in value.values())
    if isinstance(value, list):
        return sum(_texts(entry) for entry in value)
    return 0


def _refuse_repeated_keys(text: bytes) -> None:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise bad_request("A key stands twice in one object of the body; send each key once.")
        return found

    try:
        json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError):
        raise bad_request(
            "The body is not JSON that can be read safely; send a v2 inference request."
        ) from None


Packed = NDArray[np.uint8]


def packed(answers: Answers) -> Packed:
    """Answers as rows of bytes: the label in 8, then each probability in 4. This is what the ledger stores."""
    labels = np.ascontiguousarray(answers.labels, dtype="<i8").reshape(-1, 1).view(np.uint8)
    if answers.probabilities is None:
        return labels
    probabilities = np.ascontiguousarray(answers.probabilities, dtype="<f4").view(np.uint8)
    return np.hstack([labels, probabilities])


def unpacked(rows: Packed) -> dict[str, NDArray[Any]]:
    """The output tensors in packed answers."""
    outputs: dict[str, NDArray[Any]] = {LABEL: np.ascontiguousarray(rows[:, :8]).view("<i8").reshape(-1)}
    if rows.shape[1] > 8:
        outputs[PROBABILITIES] = np.ascontiguousarray(rows[:, 8:]).view("<f4")
    return outputs


def packed_width(servable: Servable) -> int:
    """How many bytes one packed answer has."""
    return 8 + (4 * len(servable.classes) if servable.releases_probabilities else 0)


_DATATYPES = {LABEL: "INT64", PROBABILITIES: "FP32"}


def write_response(
    head: dict[str, Any], rows: Packed, outputs: tuple[tuple[str, bool], ...]
) -> tuple[bytes, int | None]:
    """The response's body, and where its JSON ends if binary tensors follow. `head` is all but the outputs."""
    tensors = unpacked(rows)
    described: list[dict[str, Any]] = []
    binary: list[bytes] = []
    for name, as_bytes in outputs:
        values = tensors[name]
        tensor: dict[str, Any] = {"name": name, "datatype": _DATATYPES[name], "shape": values.shape}
        if as_bytes:
            content = values.tobytes()
            tensor["parameters"] = {"binary_data_size": len(content)}
            binary.append(content)
        else:
            tensor["data"] = values.reshape(-1)
        described.append(tensor)
    text = orjson.dumps({**head, "outputs": described}, option=orjson.OPT_SERIALIZE_NUMPY)
    return (text, None) if not binary else (b"".join([text, *binary]), len(text))

"""Messages of the Open Inference Protocol v2 over gRPC: tensors in requests and responses.

`inference.proto` defines the messages and `inference.binpb` is its compiled form. They are kept in a pool of their own:
other libraries define messages of the same names for the same protocol.

All values become bytes as in the binary tensor extension, so that `quietmax.server.codec` checks them like any other.

Parsing a message of 16 MiB that consists of nothing but tiny parts would take seconds and hundreds of megabytes. The
parts of a large message are therefore counted before it is parsed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

import numpy as np
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from quietmax.mechanisms.base import Answers
from quietmax.server.codec import (
    COLUMN_DATATYPES,
    InferenceRequest,
    decode_tensors,
    join_strings,
    output_datatypes,
    output_tensors,
)
from quietmax.server.deployment import Deployment
from quietmax.server.errors import HttpError, bad_request, unprocessable

SERVICE = "inference.GRPCInferenceService"
"""The name of the service in the protocol."""
_MAX_DIMENSIONS = 8
_POOL = DescriptorPool()
for _file in FileDescriptorSet.FromString(
    files("quietmax.server").joinpath("inference.binpb").read_bytes()
).file:
    _POOL.Add(_file)
_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field of InferTensorContents for each datatype; FP16 has none."""
_LENGTH = struct.Struct("<I")
_MAX_UNCOUNTED_BYTES = 2**15
_MAX_PARTS = 2**14
"""Most parts of a large message; a request with 1,000 columns has about 6,000."""
_MAX_SHAPE_BYTES = 80
_INPUTS, _OUTPUTS = 5, 6
_SHAPE, _TENSOR_CONTENTS = (_INPUTS, 3), (_INPUTS, 5)
_FIXED_SIZES = {1: 8, 5: 4}


def message_class(name: str) -> Any:
    """Return the class of a message."""
    return GetMessageClass(_POOL.FindMessageTypeByName(f"inference.{name}"))


def parse_message(name: str, content: bytes) -> Any:
    """Parse a message."""
    try:
        return message_class(name).FromString(content)
    except DecodeError:
        raise bad_request(f"The message is not a valid {name}.") from None


def parse_request(content: bytes, max_rows: int) -> Any:
    """Parse an inference request, after a check that it does not have too many parts."""
    if len(content) > _MAX_UNCOUNTED_BYTES:
        _check_parts(content, max_rows)
    return parse_message("ModelInferRequest", content)


def _check_parts(content: bytes, max_rows: int) -> None:
    """Raise if a message has more parts than a valid request."""
    for count, (path, start, end) in enumerate(_all_parts(content)):
        if count >= _MAX_PARTS:
            raise HttpError(413, f"The message must have at most {_MAX_PARTS} parts.")
        if path == _SHAPE and end - start > _MAX_SHAPE_BYTES:
            raise bad_request("The `shape` of an input has too many dimensions.")
        # Numbers that are packed are one part; each string is one.
        if path == _TENSOR_CONTENTS and any(
            row >= max_rows for row, _ in enumerate(_parts(content, start, end))
        ):
            raise HttpError(413, f"Columns must have at most {max_rows} rows.")


def _all_parts(content: bytes) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Yield the fields of an inference request and those of its inputs and outputs, by their numbers."""
    for number, start, end in _parts(content, 0, len(content)):
        yield (number,), start, end
        if number in (_INPUTS, _OUTPUTS):
            for inner, inner_start, inner_end in _parts(content, start, end):
                yield (number, inner), inner_start, inner_end


def _parts(content: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the fields of a message: the number, and where the value starts and ends."""
    while start < end:
        tag, start = _varint(content, start, end)
        kind = tag & 7
        if kind == 0:
            stop = _varint(content, start, end)[1]
        elif kind == 2:
            length, start = _varint(content, start, end)
            stop = start + length
        else:
            stop = start + _FIXED_SIZES.get(kind, end)
        if stop > end:
            raise bad_request("The message is not a valid ModelInferRequest.")
        yield tag >> 3, start, stop
        start = stop


def _varint(content: bytes, start: int, end: int) -> tuple[int, int]:
    """Return an integer of variable length, and where it ends."""
    value = 0
    for place in range(start, min(end, start + 10)):
        value |= (content[place] & 127) << 7 * (place - start)
        if content[place] < 128:
            return value, place + 1
    raise bad_request("The message is not a valid ModelInferRequest.")


def decode_request(message: Any, deployment: Deployment, max_rows: int) -> InferenceRequest:
    """Decode an inference request."""
    contents = _contents(message, max_rows, deployment.inputs)
    inputs = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
            "parameters": {**_parameters(tensor.parameters), "binary_data_size": len(content)},
        }
        for tensor, content in zip(message.inputs, contents, strict=True)
    ]
    request = {
        "id": message.id,
        "parameters": _parameters(message.parameters),
        "inputs": inputs,
        "outputs": [
            {"name": output.name, "parameters": _parameters(output.parameters)} for output in message.outputs
        ],
    }
    return decode_tensors(request, b"".join(contents), deployment, max_rows)


def _contents(message: Any, max_rows: int, inputs: int) -> list[bytes]:
    """Return the binary data of each input."""
    raw = list(message.raw_input_contents)
    if not raw:
        return [_content_bytes(tensor, max_rows, inputs) for tensor in message.inputs]
    if any(tensor.HasField("contents") for tensor in message.inputs):
        raise bad_request("Inputs must have either `contents` or `raw_input_contents`, got both.")
    if len(raw) != len(message.inputs):
        raise bad_request(
            f"`raw_input_contents` must have one entry for each of the {len(message.inputs)} inputs, got {len(raw)}."
        )
    for tensor, content in zip(message.inputs, raw, strict=True):
        kind = COLUMN_DATATYPES.get(tensor.datatype)
        if kind is not None and tensor.datatype != "BYTES":
            _check_size(tensor, len(content), kind.itemsize, "bytes of `raw_input_contents`")
    return raw


def _check_size(tensor: Any, size: int, factor: int, unit: str) -> None:
    """Raise if the size of a tensor is not that of its shape; a shape that is not valid is refused where it is read."""
    if len(tensor.shape) > _MAX_DIMENSIONS:
        raise bad_request(
            f"The `shape` of `{tensor.name[:64]}` must have at most {_MAX_DIMENSIONS} dimensions."
        )
    expected = math.prod(tensor.shape) * factor
    if tensor.shape and expected >= 0 and size != expected:
        raise unprocessable(
            f"`{tensor.name[:64]}` must have {str(expected)[:20]} {unit}, as its `shape` says, got {size}."
        )


def _content_bytes(tensor: Any, max_rows: int, inputs: int) -> bytes:
    """Return the typed values of an input as binary data."""
    name, datatype = tensor.name[:64], tensor.datatype
    if datatype not in _CONTENTS:
        raise unprocessable(
            f"The `datatype` of `{name}` must be one of {', '.join(_CONTENTS)}; FP16 requires `raw_input_contents`."
        )
    expected = _CONTENTS[datatype]
    if any(field.name != expected for field, _ in tensor.contents.ListFields()):
        raise unprocessable(f"The `contents` of `{name}` must be in `{expected}`, as its `datatype` says.")
    values = getattr(tensor.contents, expected)
    if len(values) > max_rows * inputs:
        raise HttpError(413, f"`{name}` must have at most {max_rows} rows, got {len(values)} values.")
    _check_size(tensor, len(values), 1, "values")
    if datatype == "BYTES":
        return b"".join(_LENGTH.pack(len(value)) + value for value in values)
    kind = COLUMN_DATATYPES[datatype]
    if kind.kind == "f" or kind.itemsize == 8:
        return np.fromiter(values, kind, len(values)).tobytes()
    wide = np.fromiter(values, np.int64, len(values))
    limits = np.iinfo(kind)
    if ((wide < limits.min) | (wide > limits.max)).any():
        raise unprocessable(f"The `contents` of `{name}` must be integers of the stated `datatype`.")
    return wide.astype(kind).tobytes()


def _parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters as their JSON would be; one without a value is None, which is refused where it is read."""
    values = {}
    for name, parameter in parameters.items():
        chosen = parameter.WhichOneof("parameter_choice")
        values[name] = None if chosen is None else getattr(parameter, chosen)
    return values


def encode_response(
    message: Any,
    request: InferenceRequest,
    answers: Answers,
    parameters: Mapping[str, Any],
    deployment: Deployment,
) -> bytes:
    """Encode an inference response: raw if the inputs came raw, else in typed contents."""
    response = message_class("ModelInferResponse")(
        model_name=deployment.name, model_version=deployment.version, id=request.id or ""
    )
    for name, value in parameters.items():
        setattr(response.parameters[name], _parameter_field(value), value)
    tensors, datatypes = output_tensors(answers), output_datatypes(deployment)
    for name, _ in request.outputs:
        values, datatype = tensors[name], datatypes[name]
        output = response.outputs.add(name=name, datatype=datatype, shape=values.shape)
        names = [deployment.classes[label] for label in values.tolist()] if datatype == "BYTES" else None
        if message.raw_input_contents:
            response.raw_output_contents.append(values.tobytes() if names is None else join_strings(names))
        else:
            typed = values.reshape(-1).tolist() if names is None else [each.encode() for each in names]
            getattr(output.contents, _CONTENTS[datatype]).extend(typed)
    content: bytes = response.SerializeToString()
    return content


def _parameter_field(value: Any) -> str:
    """Return the field of InferParameter for a value.

    >>> _parameter_field(True), _parameter_field(1), _parameter_field(1.0), _parameter_field("proven")
    ('bool_param', 'int64_param', 'double_param', 'string_param')
    """
    if isinstance(value, bool):
        return "bool_param"
    if isinstance(value, int):
        return "int64_param"
    return "double_param" if isinstance(value, float) else "string_param"

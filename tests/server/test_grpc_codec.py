"""Messages of gRPC: their definition is that of the protocol, and malformed ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor
from tritonclient.grpc import service_pb2

from quietmax.mechanisms.base import Answers
from quietmax.server import grpc_server as grpc_codec
from quietmax.server.deployment import Deployment
from quietmax.server.errors import HttpError
from quietmax.server.grpc_server import (
    SERVICE,
    _parse_request,
    decode_request,
    encode_response,
    message_class,
)
from quietmax.server.repository import load_models
from tests.docs.scripts import script
from tests.server.running_service import FEATURES, some_rows

FOLDER = Path(__file__).parents[2] / "src" / "quietmax" / "server"
MESSAGES = [
    message
    for method in service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    if method.name
    in (
        "RepositoryIndex",
        "RepositoryModelLoad",
        "RepositoryModelUnload",
        "ServerLive",
        "ServerReady",
        "ModelReady",
        "ServerMetadata",
        "ModelMetadata",
        "ModelInfer",
    )
    for message in (method.input_type, method.output_type)
]


@pytest.fixture(scope="module")
def head(models: Path) -> Deployment:
    return load_models([f"head={models / 'head'}"])[0]


@pytest.fixture(scope="module")
def survey(models: Path) -> Deployment:
    return load_models([f"survey={models / 'survey'}"])[0]


def _fields(message: Descriptor) -> dict[str, Any]:
    """Names, numbers and types of all fields, with those of the messages within."""
    return {
        field.name: (
            field.number,
            field.type,
            field.is_repeated,
            None if field.containing_oneof is None else field.containing_oneof.name,
            None if field.message_type is None else _fields(field.message_type),
        )
        for field in message.fields
    }


@pytest.mark.parametrize("theirs", MESSAGES, ids=lambda message: message.name)
def test_a_message_has_the_fields_that_triton_defines(theirs: Descriptor) -> None:
    assert _fields(message_class(theirs.name).DESCRIPTOR) == _fields(theirs)


def test_the_service_has_the_methods_and_messages_that_triton_defines() -> None:
    ours = message_class("ModelInferRequest").DESCRIPTOR.file.services_by_name[SERVICE.rpartition(".")[2]]
    theirs = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    assert len(ours.methods) == 9
    for method in ours.methods:
        known = theirs[method.name]
        assert method.input_type.full_name == known.input_type.full_name
        assert method.output_type.full_name == known.output_type.full_name


def test_the_stored_descriptors_are_those_of_the_proto_file(tmp_path: Path) -> None:
    script("docs/making/inference_messages.py").compile_messages(tmp_path / "compiled.binpb")
    assert (tmp_path / "compiled.binpb").read_bytes() == (FOLDER / "inference.binpb").read_bytes()


def _message() -> Any:
    """A valid request with typed contents."""
    message = service_pb2.ModelInferRequest(model_name="head", id="a")
    tensor = message.inputs.add(name="features", datatype="FP32", shape=[2, FEATURES])
    tensor.contents.fp32_contents.extend(some_rows(2).ravel().tolist())
    return message


def _decode(message: Any, deployment: Deployment) -> Any:
    return decode_request(_parse_request(message.SerializeToString(), 3), deployment, 3)


@pytest.mark.parametrize(
    ("datatype", "field", "value"),
    [
        ("INT8", "int_contents", -128),
        ("INT16", "int_contents", -(2**15)),
        ("INT32", "int_contents", -7),
        ("INT64", "int64_contents", -7),
        ("UINT8", "uint_contents", 255),
        ("UINT16", "uint_contents", 2**16 - 1),
        ("UINT32", "uint_contents", 2**32 - 1),
        ("UINT64", "uint64_contents", 7),
        ("FP32", "fp32_contents", 0.5),
        ("FP64", "fp64_contents", 0.5),
    ],
)
def test_typed_and_raw_features_of_every_datatype_are_the_same_rows(
    head: Deployment, datatype: str, field: str, value: float
) -> None:
    typed = service_pb2.ModelInferRequest()
    tensor = typed.inputs.add(name="features", datatype=datatype, shape=[1, FEATURES])
    raw = service_pb2.ModelInferRequest.FromString(typed.SerializeToString())
    getattr(tensor.contents, field).extend([value] * FEATURES)
    kind = {"FP32": "<f4", "FP64": "<f8"}.get(datatype, datatype.lower())
    raw.raw_input_contents.append(np.full(FEATURES, value, np.dtype(kind)).tobytes())
    for message in (typed, raw):
        rows = _decode(message, head).rows
        assert rows.dtype == np.float32
        np.testing.assert_array_equal(rows, np.full((1, FEATURES), value, np.float32))


def test_half_floats_are_read_raw_only(head: Deployment) -> None:
    message = service_pb2.ModelInferRequest()
    message.inputs.add(name="features", datatype="FP16", shape=[1, FEATURES])
    with pytest.raises(HttpError, match="FP16 requires `raw_input_contents`"):
        _decode(message, head)
    message.raw_input_contents.append(np.full(FEATURES, 0.5, "<f2").tobytes())
    assert (_decode(message, head).rows == 0.5).all()


def _columns() -> Any:
    message = service_pb2.ModelInferRequest(model_name="survey")
    message.inputs.add(name="age", datatype="INT8", shape=[2]).contents.int_contents.extend([30, 40])
    message.inputs.add(name="income", datatype="FP64", shape=[2, 1]).contents.fp64_contents.extend([1.0, 9.0])
    region = message.inputs.add(name="région", datatype="BYTES", shape=[2])
    region.contents.bytes_contents.extend([b"north", b"ouest"])
    return message


def test_typed_columns_are_encoded_and_class_names_sent_as_bytes(survey: Deployment) -> None:
    message = _columns()
    request = _decode(message, survey)
    assert request.unknown == {"région": 1}
    encoded = encode_response(message, request, Answers(np.array([1, 0]), None), {"cost": 0.5}, survey)
    response = service_pb2.ModelInferResponse.FromString(encoded)
    (label,) = response.outputs
    assert (label.name, label.datatype, list(label.shape)) == ("label", "BYTES", [2])
    assert list(label.contents.bytes_contents) == [b"yes", b"no"]
    assert response.parameters["cost"].double_param == 0.5


def _with_raw(*contents: bytes) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        message.inputs[0].ClearField("contents")
        message.raw_input_contents.extend(contents)

    return change


def _with_rows(count: int) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        message.inputs[0].shape[0] = count
        _with_raw(b"\0" * 4 * FEATURES * count)(message)

    return change


def _with_integers(message: Any) -> None:
    message.inputs[0].datatype = "INT8"
    message.inputs[0].contents.CopyFrom(service_pb2.InferTensorContents(int_contents=[128] * 2 * FEATURES))


MALFORMED: dict[str, tuple[int, Callable[[Any], object]]] = {
    "no inputs": (400, lambda message: message.ClearField("inputs")),
    "two inputs": (422, lambda message: message.inputs.append(message.inputs[0])),
    "another name": (422, lambda message: setattr(message.inputs[0], "name", "pixels")),
    "negative shape": (400, lambda message: message.inputs[0].shape.__setitem__(0, -1)),
    "no shape": (400, lambda message: message.inputs[0].ClearField("shape")),
    "another shape": (422, lambda message: message.inputs[0].shape.__setitem__(1, FEATURES - 1)),
    "too many rows": (413, _with_rows(4)),
    "too many values": (413, lambda message: message.inputs[0].contents.fp32_contents.extend([0.0] * 99)),
    "no rows": (422, lambda message: message.inputs[0].shape.__setitem__(0, 0)),
    "unknown datatype": (422, lambda message: setattr(message.inputs[0], "datatype", "FP8")),
    "strings": (422, lambda message: setattr(message.inputs[0], "datatype", "BYTES")),
    "another field": (422, lambda message: message.inputs[0].contents.int_contents.append(1)),
    "no contents": (422, lambda message: message.inputs[0].ClearField("contents")),
    "too few values": (422, lambda message: message.inputs[0].contents.fp32_contents.pop()),
    "not a number": (422, lambda message: message.inputs[0].contents.fp32_contents.__setitem__(0, np.nan)),
    "too large": (422, lambda message: message.inputs[0].contents.fp32_contents.__setitem__(0, 1e30)),
    "integers too large": (422, _with_integers),
    "raw and typed": (400, lambda message: message.raw_input_contents.append(b"\0" * 8 * FEATURES)),
    "too many raw contents": (400, _with_raw(b"\0" * 8 * FEATURES, b"")),
    "raw of another size": (422, _with_raw(b"\0")),
    "unknown output": (422, lambda message: message.outputs.add(name="logits")),
    "output twice": (422, lambda message: message.outputs.extend(2 * [message.outputs.add(name="label")])),
    "many outputs": (400, lambda message: [message.outputs.add(name="label") for _ in range(17)]),
    "long id": (400, lambda message: setattr(message, "id", "x" * 129)),
    "parameter without a value": (400, lambda message: message.parameters["binary_data_output"]),
}


@pytest.mark.parametrize("change", MALFORMED)
def test_a_malformed_message_is_refused_with_a_sentence(head: Deployment, change: str) -> None:
    message = _message()
    assert _decode(message, head).id == "a"
    status, apply = MALFORMED[change]
    apply(message)
    with pytest.raises(HttpError) as caught:
        _decode(message, head)
    assert caught.value.status == status
    assert caught.value.message.endswith(".")
    assert "binary_data_size" not in caught.value.message


@pytest.mark.parametrize("content", [b"\xff", b"\x0a\x05ab", b"\x0a\x01\xff", b"\x2a\x80\x80\x80\x80\x80"])
def test_bytes_that_are_no_message_are_refused(content: bytes) -> None:
    with pytest.raises(HttpError, match="not a valid ModelInferRequest") as caught:
        _parse_request(content, 3)
    assert caught.value.status == 400


def _field(number: int, content: bytes) -> bytes:
    """A field of bytes as it is sent."""
    size, length = len(content), bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + content


_MIB = 2**20
LARGE = {
    "inputs": _field(5, b"") * _MIB,
    "outputs": _field(6, b"") * _MIB,
    "raw contents": _field(7, b"") * _MIB,
    "parameters": _field(4, b"") * _MIB,
    "unknown fields": b"\x78\x00" * _MIB,
    "parameters of an input": _field(5, _field(4, b"") * _MIB),
    "shape of an input": _field(5, _field(3, b"\0" * _MIB)),
    "strings of an input": _field(5, _field(5, _field(8, b"") * _MIB)),
    "numbers of an input": _field(5, _field(5, b"\x18\x01" * _MIB)),
    "a field that does not end": _field(5, b"\x2a\xff\xff\xff\x7f" + b"\0" * _MIB),
    "a number that does not end": b"\x80" * _MIB,
    "groups": b"\x7b\x7c" * _MIB,
}


@pytest.mark.parametrize("name", LARGE)
def test_a_message_of_countless_tiny_parts_is_refused_before_it_is_parsed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(*_: object) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(grpc_codec, "_parse_message", parse)
    with pytest.raises(HttpError) as caught:
        _parse_request(LARGE[name], 1000)
    assert caught.value.status in (400, 413)


def test_a_large_valid_message_is_parsed(head: Deployment, survey: Deployment) -> None:
    message = service_pb2.ModelInferRequest()
    tensor = message.inputs.add(name="features", datatype="FP32", shape=[5000, FEATURES])
    tensor.contents.fp32_contents.extend([0.5] * 5000 * FEATURES)
    content = message.SerializeToString()
    assert len(content) > 2**16
    assert decode_request(_parse_request(content, 5000), head, 5000).rows.shape == (5000, FEATURES)
    columns = service_pb2.ModelInferRequest()
    for name, value in (("age", b"30"), ("income", b"9000"), ("r\u00e9gion", b"north")):
        column = columns.inputs.add(name=name, datatype="BYTES", shape=[5000])
        column.contents.bytes_contents.extend([value] * 5000)
    content = columns.SerializeToString()
    assert len(content) > 2**16
    assert len(decode_request(_parse_request(content, 5000), survey, 5000).rows) == 5000


def test_a_shape_of_thousands_of_dimensions_is_refused() -> None:
    """The product of such a shape has more digits than Python prints."""
    message = grpc_codec.message_class("ModelInferRequest")()
    tensor = message.inputs.add(name="features", datatype="FP32", shape=[10] * 5000)
    with pytest.raises(HttpError, match="at most 8 dimensions") as refused:
        grpc_codec._check_size(tensor, 4, 4, "bytes")
    assert refused.value.status == 400

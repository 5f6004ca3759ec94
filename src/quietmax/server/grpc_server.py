"""The Open Inference Protocol v2 over gRPC, beside HTTP: the same keys, ledger, limits, log and metrics.

This module imports grpc, whose threads do not survive a fork: import it in the process that serves.

Every method is registered as one that reads a stream, which is the same on the wire. So the key is checked before the
message is received, and a message that does not arrive or cannot be parsed is an error of ours.

`inference.proto` defines the messages and `inference.binpb` is its compiled form. They are kept in a pool of their own:
other libraries define messages of the same names for the same protocol. All values become bytes as in the binary tensor
extension, so that `quietmax.server.codec` checks them like any other.

Parsing a message of 16 MiB that consists of nothing but tiny parts would take seconds and hundreds of megabytes. The
parts of a large message are therefore counted before it is parsed.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any
from weakref import WeakValueDictionary

import grpc
import numpy as np
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc import StatusCode

from quietmax import __version__
from quietmax.errors import InvalidInput
from quietmax.mechanisms.base import Answers
from quietmax.server.auth import Caller
from quietmax.server.codec import (
    COLUMN_DATATYPES,
    MAX_BYTES_UNCHECKED,
    InferenceRequest,
    _decode_tensors,
    _join_strings,
    _output_datatypes,
    _requested_tensors,
)
from quietmax.server.deployment import Deployment
from quietmax.server.errors import HttpError, _internal_error
from quietmax.server.protocol import BODIES_FULL, MAX_CONTROL_BYTES, _connection_limits
from quietmax.server.service import AUDITED, Service
from quietmax.server.settings import Settings
from quietmax.server.telemetry import Headers, Record

EXTENSIONS = ["privacy_budget"]
STATUS_CODES = {
    400: StatusCode.INVALID_ARGUMENT,
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.NOT_FOUND,
    410: StatusCode.NOT_FOUND,
    408: StatusCode.DEADLINE_EXCEEDED,
    409: StatusCode.ALREADY_EXISTS,
    413: StatusCode.RESOURCE_EXHAUSTED,
    422: StatusCode.INVALID_ARGUMENT,
    429: StatusCode.RESOURCE_EXHAUSTED,
    500: StatusCode.INTERNAL,
    503: StatusCode.UNAVAILABLE,
}
"""The gRPC status of each HTTP status."""
_GRACE_SECONDS = 5.0
_LINGER_SECONDS = 1.0
_CHECK_INTERVAL = 0.05
_IDENTITY_ONLY = 1

_INFER = "ModelInfer"
Method = Callable[[Any], Awaitable[bytes]]
"""Takes the context of a request and returns a message."""


@asynccontextmanager
async def serving(
    service: Service, host: str, port: int, tls: Callable[[], tuple[bytes, bytes]] | None = None
) -> AsyncIterator[None]:
    """Serve over gRPC; at the end, answer the requests in flight."""
    server = grpc.aio.server(
        options=_options(service), maximum_concurrent_rpcs=service.settings.max_in_flight
    )
    methods = _Methods(service)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods._handlers()),))
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if tls is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, _credentials(tls))
    except RuntimeError as error:
        raise InvalidInput(f"Cannot listen on {address} for gRPC.") from error
    await server.start()
    try:
        yield
    finally:
        methods._stop()
        stopping = asyncio.ensure_future(server.stop(service.settings.timeout + _GRACE_SECONDS))
        while methods.in_flight and not stopping.done():
            await asyncio.wait([stopping], timeout=_CHECK_INTERVAL)
        await asyncio.wait([stopping], timeout=_LINGER_SECONDS)
        await server.stop(None)  # connections whose clients do not say goodbye
        await stopping


def _credentials(tls: Callable[[], tuple[bytes, bytes]]) -> grpc.ServerCredentials:
    """Return credentials that follow the certificate; they change nothing while it stays the same."""
    used: tuple[bytes, bytes] | None = None

    def _fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        latest = tls()
        if latest == used:
            return None
        used = certificate, key = latest
        return grpc.ssl_server_certificate_configuration([(key, certificate)])

    return grpc.dynamic_ssl_server_credentials(_fetch(), _fetch)


def _options(service: Service) -> list[tuple[str, int]]:
    settings = service.settings
    return [
        ("grpc.so_reuseport", 1),
        ("grpc.max_receive_message_length", settings.max_bytes),
        ("grpc.max_concurrent_streams", settings.max_in_flight),
        ("grpc.compression_enabled_algorithms_bitset", _IDENTITY_ONLY),
        ("grpc.max_metadata_size", settings.max_header_bytes),
        ("grpc.server_handshake_timeout_ms", math.ceil(settings.header_timeout * 1000)),
        ("grpc.max_connection_idle_ms", math.ceil(settings.idle_timeout * 1000)),
        ("grpc.max_allowed_incoming_connections", _connection_limits(settings, grpc=True)[1]),
    ]


class _Receiving:
    """Limits how many messages are received at the same time, so that the largest ones fit into the memory for bodies.

    Nobody knows the size of a message before it has arrived. A client gets at most half of the places, so that one
    whose messages do not arrive does not stop the others.
    """

    def __init__(self, settings: Settings) -> None:
        places = max(settings.max_body_memory // settings.max_bytes, 1)
        self._places = asyncio.Semaphore(places)
        self._places_of_client = max(places // 2, 1)
        self._max_calls = max(settings.max_in_flight // 2, 1)
        self._clients: WeakValueDictionary[int, asyncio.Semaphore] = WeakValueDictionary()
        self._calls: Counter[int] = Counter()

    @asynccontextmanager
    async def _place(self, client: int) -> AsyncIterator[None]:
        """Wait for a place of this client."""
        if self._calls[client] >= self._max_calls:
            raise HttpError(503, "Too many requests of this client are in flight. Nothing was charged.")
        self._calls[client] += 1
        try:
            own = self._clients.setdefault(client, asyncio.Semaphore(self._places_of_client))
            async with own, self._places:
                yield
        finally:
            self._calls[client] -= 1
            if not self._calls[client]:
                del self._calls[client]


class _Methods:
    """The methods of the protocol."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._receiving = _Receiving(service.settings)
        self._timeouts: set[asyncio.Timeout] = set()
        self._stopping = False
        self.in_flight = 0

    def _stop(self) -> None:
        """Refuse the requests whose message has not arrived yet."""
        self._stopping = True
        for timeout in self._timeouts:
            timeout.reschedule(asyncio.get_running_loop().time())

    def _handlers(self) -> dict[str, Any]:
        methods: dict[str, Method] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            _INFER: self._model_infer,
        }
        return {
            name: grpc.stream_unary_rpc_method_handler(self._with_status(name, method))
            for name, method in methods.items()
        }

    def _with_status(self, name: str, method: Method) -> Callable[[Any, Any], Awaitable[bytes]]:
        """Return the method with its errors as a gRPC status."""

        async def _handle(_messages: Any, context: Any) -> bytes:
            self.in_flight += 1
            try:
                return await method(context)
            except HttpError as error:
                status = self._status(error)
                if error.status in AUDITED and name != _INFER:  # which is recorded anyway
                    self._record(context, name, error.status)._write(self._service.log, 0.0)
            except Exception as error:
                self._service.log.failure(error)
                status = self._status(_internal_error())
            finally:
                self.in_flight -= 1
            # grpc keeps this frame until the next garbage collection. So it must not hold the error, whose frames have
            # the message.
            await context.abort(*status)
            raise AssertionError("abort raises")

        return _handle

    @staticmethod
    def _status(error: HttpError) -> tuple[StatusCode, str, tuple[tuple[str, str | bytes], ...]]:
        """Return status, message and trailing metadata: what is left of a budget, when to try again, which column."""
        trailers: dict[str, str | bytes] = {name: str(value) for name, value in error.extra.items()}
        if "column" in trailers:  # a name in UTF-8, which only metadata of bytes may hold
            trailers["column-bin"] = str(trailers.pop("column")).encode()
        if "retry-after" in error.headers:
            trailers["retry-after"] = error.headers["retry-after"]
        return STATUS_CODES.get(error.status, StatusCode.INTERNAL), error.message, tuple(trailers.items())

    async def _server_live(self, _context: Any) -> bytes:
        return _message("ServerLiveResponse", live=True)

    async def _server_ready(self, _context: Any) -> bytes:
        error = await self._service._readiness_error()
        return _message("ServerReadyResponse", ready=error is None)

    async def _server_metadata(self, _context: Any) -> bytes:
        return _message("ServerMetadataResponse", name="quietmax", version=__version__, extensions=EXTENSIONS)

    async def _model_ready(self, context: Any) -> bytes:
        await self._named_model("ModelReadyRequest", context)
        return _message("ModelReadyResponse", ready=await self._service._readiness_error() is None)

    async def _model_metadata(self, context: Any) -> bytes:
        metadata = await self._service.metadata(await self._named_model("ModelMetadataRequest", context))
        parameters = metadata.pop("parameters")
        response = message_class("ModelMetadataResponse")(**metadata)
        _set_parameters(response.parameters, parameters)
        content: bytes = response.SerializeToString()
        return content

    async def _named_model(self, message: str, context: Any) -> Deployment:
        """Receive a message without data, which names a model."""
        caller = await self._authenticate(context)
        async with self._received(context, caller) as content:
            if len(content) > MAX_CONTROL_BYTES:
                raise HttpError(413, f"The message must have at most {MAX_CONTROL_BYTES} bytes.")
            request = _parse_message(message, content)
        return self._service.deployment(request.name, request.version or None)

    async def _model_infer(self, context: Any) -> bytes:
        service = self._service
        with service._recorded(self._record(context, _INFER)) as record:
            caller = await self._authenticate(context)
            record.client = caller.client
            async with self._received(context, caller) as content:
                response = await self._answer(content, caller, record)
            record.status = 200
            return response

    async def _answer(self, content: bytes, caller: Caller, record: Record) -> bytes:
        if len(content) <= MAX_BYTES_UNCHECKED:
            message, deployment, request = self._decode(content, record)
        else:
            message, deployment, request = await asyncio.to_thread(self._decode, content, record)
        record.rows = len(request.rows)
        # A client that goes away cancels this method, but not what it is charged for.
        answers, parameters = await asyncio.shield(self._service.infer(deployment, request, caller))
        return _encode_response(message, request, answers, parameters, deployment)

    def _decode(self, content: bytes, record: Record) -> tuple[Any, Deployment, InferenceRequest]:
        max_rows = self._service.settings.max_rows
        message = _parse_request(content, max_rows)
        deployment = self._service.deployment(message.model_name, message.model_version or None)
        record.deployment = deployment
        return message, deployment, _decode_request(message, deployment, max_rows)

    def _record(self, context: Any, route: str, status: int = 500) -> Record:
        address = _peer_host(context.peer())
        return self._service._new_record(address=address, route=route, status=status)

    async def _authenticate(self, context: Any) -> Caller:
        """Return the caller, from the key in the metadata.

        Nobody is anonymous here: grpc does not tell which name (`:authority`) the client has connected to, so a request
        through a local proxy looks like one of a local program.
        """
        headers = _headers(context)
        if sum(name == b"authorization" for name, _ in headers) > 1:
            raise HttpError(400, "The metadata must have `authorization` once.")
        return await self._service.auth.authenticate(headers, local=False)

    @asynccontextmanager
    async def _received(self, context: Any, caller: Caller) -> AsyncIterator[bytes]:
        """Receive the one message of a request; it counts as a body in memory until the request ends."""
        bodies = self._service.bodies
        timeout = asyncio.timeout(0 if self._stopping else self._service.settings.timeout)
        self._timeouts.add(timeout)
        try:
            async with timeout, self._receiving._place(caller.client_id):
                content = await _read(context)
        except TimeoutError:
            if self._stopping:
                raise HttpError(503, "The service is stopping. Nothing was charged.") from None
            raise HttpError(408, "The message did not arrive in time. Nothing was charged.") from None
        finally:
            self._timeouts.discard(timeout)
        if not bodies._fits(len(content)):
            raise HttpError(503, BODIES_FULL)
        bodies._hold(len(content))
        try:
            yield content
        finally:
            bodies._release(len(content))


async def _read(context: Any) -> bytes:
    """Read the message of a request. The iterator over messages would keep it until the next garbage collection."""
    content = await context.read()
    if content is grpc.aio.EOF:
        raise HttpError(400, "The connection ended before the message was complete.")
    return bytes(content)


def _message(name: str, /, **fields: Any) -> bytes:
    content: bytes = message_class(name)(**fields).SerializeToString()
    return content


def _peer_host(peer: str) -> str:
    """Return the address in the name of a peer.

    >>> _peer_host("ipv4:127.0.0.1:50000"), _peer_host("ipv6:%5B::1%5D:50000")
    ('127.0.0.1', '::1')
    """
    host = peer.partition(":")[2].rpartition(":")[0]
    return host.replace("%5B", "").replace("%5D", "").strip("[]")


def _headers(context: Any) -> Headers:
    return [
        (name.encode(), value if isinstance(value, bytes) else value.encode())
        for name, value in context.invocation_metadata()
    ]


SERVICE = "inference.GRPCInferenceService"
"""The name of the service in the protocol."""
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
_PARAMETERS = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
"""The field of InferParameter for each type; a boolean is an integer too, so it comes first."""
_MAX_PARTS = 2**14
"""Most parts of a large message; a request with 1,000 columns has about 6,000."""
_MAX_SHAPE_BYTES = 80
_INPUTS, _OUTPUTS = 5, 6
_SHAPE, _TENSOR_CONTENTS = (_INPUTS, 3), (_INPUTS, 5)
_FIXED_SIZES = {1: 8, 5: 4}


def message_class(name: str) -> Any:
    """Return the class of a message."""
    return GetMessageClass(_POOL.FindMessageTypeByName(f"inference.{name}"))


def _parse_message(name: str, content: bytes) -> Any:
    try:
        return message_class(name).FromString(content)
    except DecodeError:
        raise HttpError(400, f"The message is not a valid {name}.") from None


def _parse_request(content: bytes, max_rows: int) -> Any:
    """Parse an inference request, after a check that it does not have too many parts."""
    if len(content) > MAX_BYTES_UNCHECKED:
        _check_parts(content, max_rows)
    return _parse_message("ModelInferRequest", content)


def _check_parts(content: bytes, max_rows: int) -> None:
    """Raise if a message has more parts than a valid request."""
    for count, (path, start, end) in enumerate(_all_parts(content)):
        if count >= _MAX_PARTS:
            raise HttpError(413, f"The message must have at most {_MAX_PARTS} parts.")
        if path == _SHAPE and end - start > _MAX_SHAPE_BYTES:
            raise HttpError(400, "The `shape` of an input has too many dimensions.")
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
            raise HttpError(400, "The message is not a valid ModelInferRequest.")
        yield tag >> 3, start, stop
        start = stop


def _varint(content: bytes, start: int, end: int) -> tuple[int, int]:
    """Return an integer of variable length, and where it ends."""
    value = 0
    for place in range(start, min(end, start + 10)):
        value |= (content[place] & 127) << 7 * (place - start)
        if content[place] < 128:
            return value, place + 1
    raise HttpError(400, "The message is not a valid ModelInferRequest.")


def _decode_request(message: Any, deployment: Deployment, max_rows: int) -> InferenceRequest:
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
    return _decode_tensors(request, memoryview(b"".join(contents)), deployment, max_rows)


def _contents(message: Any, max_rows: int, inputs: int) -> list[bytes]:
    raw = list(message.raw_input_contents)
    if not raw:
        return [_content_bytes(tensor, max_rows, inputs) for tensor in message.inputs]
    if any(tensor.HasField("contents") for tensor in message.inputs):
        raise HttpError(400, "Inputs must have either `contents` or `raw_input_contents`, got both.")
    if len(raw) != len(message.inputs):
        raise HttpError(
            400,
            f"`raw_input_contents` must have one entry for each of the {len(message.inputs)} inputs, got {len(raw)}.",
        )
    return raw


def _content_bytes(tensor: Any, max_rows: int, inputs: int) -> bytes:
    """Return the typed values of an input as binary data."""
    name, datatype = tensor.name[:64], tensor.datatype
    if datatype not in _CONTENTS:
        raise HttpError(
            422,
            f"The `datatype` of `{name}` must be one of {', '.join(_CONTENTS)}; FP16 requires `raw_input_contents`.",
        )
    expected = _CONTENTS[datatype]
    if any(field.name != expected for field, _ in tensor.contents.ListFields()):
        raise HttpError(422, f"The `contents` of `{name}` must be in `{expected}`, as its `datatype` says.")
    values = getattr(tensor.contents, expected)
    if len(values) > max_rows * inputs:
        raise HttpError(413, f"`{name}` must have at most {max_rows} rows, got {len(values)} values.")
    if datatype == "BYTES":
        return _join_strings(values)
    kind = COLUMN_DATATYPES[datatype]
    if kind.kind == "f" or kind.itemsize == 8:
        return np.fromiter(values, kind, len(values)).tobytes()
    wide = np.fromiter(values, np.int64, len(values))
    limits = np.iinfo(kind)
    if ((wide < limits.min) | (wide > limits.max)).any():
        raise HttpError(422, f"The `contents` of `{name}` must be integers of the stated `datatype`.")
    return wide.astype(kind).tobytes()


def _parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters as their JSON would be; one without a value is None, which is refused where it is read."""
    values = {}
    for name, parameter in parameters.items():
        chosen = parameter.WhichOneof("parameter_choice")
        values[name] = None if chosen is None else getattr(parameter, chosen)
    return values


def _set_parameters(place: Any, parameters: Mapping[str, Any]) -> None:
    """Set parameters that are strings, numbers or booleans, which are all that the protocol has; names as JSON."""
    for name, value in parameters.items():
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            value = json.dumps(value, ensure_ascii=False)
        for kind, choice in _PARAMETERS.items():
            if isinstance(value, kind):
                setattr(place[name], choice, value)
                break


def _encode_response(
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
    _set_parameters(response.parameters, parameters)
    tensors, datatypes = _requested_tensors(request, answers, deployment), _output_datatypes(deployment)
    for name, _ in request.outputs:
        values, datatype = tensors[name], datatypes[name]
        output = response.outputs.add(name=name, datatype=datatype, shape=values.shape)
        names = [deployment.classes[label] for label in values.tolist()] if datatype == "BYTES" else None
        if message.raw_input_contents:
            response.raw_output_contents.append(values.tobytes() if names is None else _join_strings(names))
        else:
            typed = values.reshape(-1).tolist() if names is None else [each.encode() for each in names]
            getattr(output.contents, _CONTENTS[datatype]).extend(typed)
    content: bytes = response.SerializeToString()
    return content

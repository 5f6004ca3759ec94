"""The inference endpoint as a plain ASGI application: the one path that must be fast.

FastAPI's routing, dependency resolution and validation would cost as much as everything done here. FastAPI serves all
other paths, and `quietmax.server.openapi` describes this one in the OpenAPI document.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quietmax.server.auth import Caller, Headers, is_local
from quietmax.server.codec import InferenceRequest, decode_request, encode_response
from quietmax.server.deployment import Deployment
from quietmax.server.errors import HttpError, bad_request
from quietmax.server.log import Field, Log
from quietmax.server.protocol import EXCHANGE
from quietmax.server.service import Service
from quietmax.server.telemetry import phase

_PATH = re.compile(r"/v2/models/([^/]{1,64})(?:/versions/([^/]{1,64}))?/infer")
_JSON_LENGTH = b"inference-header-content-length"
_REQUEST_ID = b"x-request-id"
_ROUTE = "/v2/models/{name}/infer"
_VERSION_ROUTE = "/v2/models/{name}/versions/{version}/infer"
_RECORD = "quietmax.record"
AUDITED = (401, 403, 404)
"""Refused requests with these statuses are always logged."""
_MAX_BYTES_UNCHECKED = 2**15
"""The structure of a larger body is checked before it is parsed, and its columns are encoded in a thread."""
_MAX_BYTES_IN_LOOP = 2**20
"""A larger body is parsed in a thread, so that other requests do not wait."""
_SPARE = 64
"""Values, lists and objects of a request, and of each of its columns, that are not data."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""A string, or the unfinished rest of the text: a search that starts again at every quote would take quadratic time."""


class InferenceEndpoint:
    """Answers inference requests, and passes all others on."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = Record(address=_address(scope), request=self._service.next_request_id())
        path = _PATH.fullmatch(scope["path"]) if scope["method"] == "POST" else None
        if path is None:
            await self._pass_on(record, scope, receive, send)
        else:
            record.route = _ROUTE if path[2] is None else _VERSION_ROUTE
            await self._infer(record, path[1], path[2], scope, receive, send)

    async def _pass_on(self, record: Record, scope: Scope, receive: Receive, send: Send) -> None:
        """Let FastAPI answer, and log what an audit asks for: logins, and requests that were refused or failed."""
        scope[_RECORD] = record
        started = time.perf_counter()
        try:
            await self._app(scope, receive, _with_request_id(send, record))
        finally:
            audited = record.event != "request" or record.status in AUDITED or record.status >= 500
            if audited and not record.logged:
                record.route = getattr(scope.get("route"), "path", None)
                record.write(self._service.log, time.perf_counter() - started)

    async def _infer(
        self, record: Record, name: str, version: str | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        service = self._service
        headers: Headers = scope["headers"]
        exchange = scope.get(EXCHANGE)
        try:
            with recorded(service, record):
                caller = await service.auth.authenticate(headers, local=is_local(scope))
                record.client = caller.client
                record.traceparent = traceparent(service, headers)
                deployment = record.deployment = service.deployment(name, version)
                json_length = self._check_headers(headers)
                body = None if exchange is None else exchange.take_body()
                if body is None:
                    body = await self._read_body(receive)
                elif len(body) > service.settings.max_bytes:
                    raise _too_large(service.settings.max_bytes)
                request = await decoded_request(body, json_length, deployment, service.settings.max_rows)
                record.rows = len(request.rows)
                content, json_length = await encoded_answer(service, deployment, request, caller)
                record.status = 200
                own = _content_headers(record, content, json_length)
                if exchange is None or not exchange.respond(200, own, content):
                    await _send(send, 200, own, content)
        except HttpError as error:
            await _send_error(send, record, error)

    def _check_headers(self, headers: Headers) -> int | None:
        """Check the headers of the body; return the length of its JSON if binary tensors follow."""
        limit = self._service.settings.max_bytes
        json_length: int | None = None
        for name, value in headers:
            if name == b"content-length" and value.isdigit() and int(value) > limit:
                raise _too_large(limit)
            if name == _JSON_LENGTH:
                if not value.isdigit() or len(value) > 12:
                    raise bad_request("Inference-Header-Content-Length must be an integer.")
                json_length = int(value)
            if name == b"content-encoding" and value.lower() not in (b"", b"identity"):
                raise HttpError(415, "Compressed request bodies are not supported.")
        return json_length

    async def _read_body(self, receive: Receive) -> bytes:
        limit = self._service.settings.max_bytes
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise bad_request("The connection ended before the body was complete.")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise _too_large(limit)
            if not message.get("more_body"):
                return b"".join(parts)


@dataclass(slots=True)
class Record:
    """What the log and the metrics tell about an inference request."""

    client: str | None = None  # Who sent it, once that is known
    deployment: Deployment | None = None  # The model that is asked, once it is found
    rows: int = 0  # Number of rows, once they are decoded
    status: int = 500  # HTTP status of the response, also for requests over gRPC
    traceparent: str | None = None  # The trace that an authenticated caller names, for telemetry
    address: str | None = None  # The address that the request came from: that of the proxy, if there is one
    request: str = ""  # Id of the request, for the log and the header `x-request-id`
    route: str | None = None  # The path as the OpenAPI document has it; None if there is no such path
    event: str = "request"  # Name of the event in the log
    error: str | None = None  # What only the log tells about an error
    logged: bool = False  # Whether it is in the log

    def write(self, log: Log, seconds: float) -> None:
        """Write one line to the log."""
        self.logged = True
        deployment = self.deployment
        fields: dict[str, Field] = {
            "request": self.request,
            "address": self.address,
            "route": self.route,
            "model": "" if deployment is None else deployment.name,
            "version": "" if deployment is None else deployment.version,
            "client": self.client,
            "rows": self.rows,
            "status": self.status,
            "milliseconds": round(seconds * 1000, 2),
        }
        if self.error is not None:
            fields["error"] = self.error
        if self.event == "request":
            log.request(**fields)
        else:
            log.event(self.event, **fields)


def record_of(scope: Scope) -> Record:
    """Return the record of a request that FastAPI answers."""
    found = scope.get(_RECORD)
    return found if isinstance(found, Record) else Record()


@contextmanager
def recorded(service: Service, record: Record | None = None) -> Iterator[Record]:
    """Count and log an inference request, whatever its protocol; any other error than HttpError becomes a 500."""
    started = time.perf_counter()
    record = record or Record(request=service.next_request_id())
    telemetry = service.telemetry
    trace = None if telemetry is None else telemetry.begin()
    try:
        yield record
    except HttpError as error:
        record.status = error.status
        record.error = error.detail
        raise
    except Exception as error:
        service.log.failure(error, request=record.request)
        raise internal_error() from error
    finally:
        seconds = time.perf_counter() - started
        deployment = record.deployment
        model, version = ("", "") if deployment is None else (deployment.name, deployment.version)
        service.metrics.count_request(model, version, record.status, seconds)
        if telemetry is not None and trace is not None:
            telemetry.end(
                trace,
                model=model,
                version=version,
                rows=record.rows,
                status=record.status,
                traceparent=record.traceparent,
            )
        if service.settings.log_requests or record.status in AUDITED:
            record.write(service.log, seconds)


def traceparent(service: Service, headers: Headers) -> str | None:
    """Return the header `traceparent` of a request, if telemetry needs it."""
    if service.telemetry is None:
        return None
    value = dict(headers).get(b"traceparent")
    return None if value is None else value.decode("latin-1")


async def decoded_request(
    body: bytes, json_length: int | None, deployment: Deployment, max_rows: int
) -> InferenceRequest:
    """Decode a request; see `decode_request`."""
    with phase("parse"):
        limit = _MAX_BYTES_IN_LOOP if deployment.encoding is None else _MAX_BYTES_UNCHECKED
        if len(body) <= limit:
            return _checked_request(body, json_length, deployment, max_rows)
        return await asyncio.to_thread(_checked_request, body, json_length, deployment, max_rows)


def _checked_request(
    body: bytes, json_length: int | None, deployment: Deployment, max_rows: int
) -> InferenceRequest:
    """Decode a request after a check of its structure, if it is large."""
    if len(body) > _MAX_BYTES_UNCHECKED:
        check_structure(body if json_length is None else body[:json_length], deployment, max_rows)
    return decode_request(body, json_length, deployment, max_rows)


def check_structure(text: bytes, deployment: Deployment, max_rows: int) -> None:
    """Raise if a JSON text has more values, lists or objects than the largest request to a model.

    Counting takes a fraction of the time and memory of parsing. Only what stands outside of strings counts.
    """
    columns = 0 if deployment.encoding is None else len(deployment.encoding.columns)
    row_lists = cells = 1
    for size in (deployment.image_shape or ())[:-1]:
        cells *= size
        row_lists += cells
    most = {
        b",": max_rows * max(deployment.inputs, columns) + _SPARE * (1 + columns),
        b"[": max_rows * max(row_lists, columns) + _SPARE * (1 + columns),
        b"{": _SPARE * (1 + columns),
    }
    signs = np.frombuffer(text, np.uint8)  # bytes.count takes ten times as long for frequent bytes
    if all(np.count_nonzero(signs == ord(sign)) <= limit for sign, limit in most.items()):
        return
    outside = _STRING.sub(b"", text)
    if any(outside.count(sign) > limit for sign, limit in most.items()):
        raise HttpError(413, f"The body has more values or lists than {max_rows} rows of this model.")


async def encoded_answer(
    service: Service, deployment: Deployment, request: InferenceRequest, caller: Caller
) -> tuple[bytes, int | None]:
    """Answer a request and encode the response; see `encode_response`."""
    answers, parameters = await service.infer(deployment, request, caller)
    head: dict[str, Any] = {
        "model_name": deployment.name,
        "model_version": deployment.version,
        "parameters": parameters,
    }
    if request.id is not None:
        head["id"] = request.id
    return encode_response(head, answers, request.outputs, deployment)


def internal_error() -> HttpError:
    """500: a fault of the service. The log names its kind; the response says nothing about it."""
    return HttpError(500, "Internal error. What was charged is not refunded.")


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"The body must have at most {limit} bytes.", headers={"connection": "close"})


def _address(scope: Scope) -> str | None:
    client = scope.get("client")
    return None if client is None else str(client[0])


def _with_request_id(send: Send, record: Record) -> Send:
    """Return a `send` that adds the id of the request to the headers of the response."""

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            message["headers"] = [*message["headers"], (_REQUEST_ID, record.request.encode())]
        await send(message)

    return send_with_id


def _content_headers(record: Record, content: bytes, json_length: int | None) -> Headers:
    """Return the headers of an answer."""
    media_type = b"application/json" if json_length is None else b"application/octet-stream"
    headers = [
        (b"content-type", media_type),
        (b"content-length", b"%d" % len(content)),
        (_REQUEST_ID, record.request.encode()),
    ]
    return headers if json_length is None else [*headers, (_JSON_LENGTH, b"%d" % json_length)]


async def _send_error(send: Send, record: Record, error: HttpError) -> None:
    content = orjson.dumps(error.to_json())
    own = [(name.encode(), value.encode()) for name, value in error.headers.items()]
    await _send(send, error.status, [*_content_headers(record, content, None), *own], content)


async def _send(send: Send, status: int, headers: Headers, content: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})

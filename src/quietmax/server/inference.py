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

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from quietmax.server.auth import Caller, Headers
from quietmax.server.codec import InferenceRequest, decode_request, encode_response
from quietmax.server.deployment import Deployment
from quietmax.server.errors import HttpError, bad_request
from quietmax.server.service import Service
from quietmax.server.telemetry import phase

_PATH = re.compile(r"/v2/models/([^/]{1,64})(?:/versions/([^/]{1,64}))?/infer")
_JSON_LENGTH = b"inference-header-content-length"
_MAX_BYTES_IN_LOOP = 2**15
"""Columns of a larger body are encoded in a thread, so that other requests do not wait."""


class InferenceEndpoint:
    """Answers inference requests, and passes all others on.

    Parameters
    ----------
    app : ASGI application
        Gets all other requests.
    service : Service
        Answers the inference requests.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        path = _PATH.fullmatch(scope["path"]) if is_post else None
        if path is None:
            await self._app(scope, receive, send)
        else:
            await self._infer(path[1], path[2], scope["headers"], receive, send)

    async def _infer(
        self, name: str, version: str | None, headers: Headers, receive: Receive, send: Send
    ) -> None:
        service = self._service
        try:
            with recorded(service) as record:
                caller = await service.auth.authenticate(headers)
                record.client = caller.client
                record.traceparent = traceparent(service, headers)
                deployment = record.deployment = service.deployment(name, version)
                json_length = self._check_headers(headers)
                body = await self._read_body(receive)
                request = await decoded_request(body, json_length, deployment, service.settings.max_rows)
                record.rows = len(request.rows)
                content, json_length = await encoded_answer(service, deployment, request, caller)
                record.status = 200
                await _send_content(send, content, json_length)
        except HttpError as error:
            await _send_error(send, error)

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
    """What the log and the metrics tell about an inference request.

    Parameters
    ----------
    client : str or None
        Who sent it, once that is known.
    deployment : Deployment or None
        The model that is asked, once it is found.
    rows : int
        Number of rows, once they are decoded.
    status : int
        HTTP status of the response, also for requests over gRPC.
    traceparent : str or None
        The trace that an authenticated caller names, for telemetry.
    """

    client: str | None = None
    deployment: Deployment | None = None
    rows: int = 0
    status: int = 500
    traceparent: str | None = None


@contextmanager
def recorded(service: Service) -> Iterator[Record]:
    """Count and log an inference request, whatever its protocol; any other error than HttpError becomes a 500.

    Parameters
    ----------
    service : Service
        Has the metrics and the log.

    Yields
    ------
    Record
        To be filled in as the request is handled.
    """
    started = time.perf_counter()
    record = Record()
    telemetry = service.telemetry
    trace = None if telemetry is None else telemetry.begin()
    try:
        yield record
    except HttpError as error:
        record.status = error.status
        raise
    except Exception as error:
        service.log.failure(error)
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
        if service.settings.log_requests:
            service.log.request(
                model=model,
                version=version,
                client=record.client,
                rows=record.rows,
                status=record.status,
                milliseconds=round(seconds * 1000, 2),
            )


def traceparent(service: Service, headers: Headers) -> str | None:
    """Return the header `traceparent` of a request, if telemetry needs it.

    Parameters
    ----------
    service : Service
        Has the telemetry.
    headers : list of (bytes, bytes)
        The headers of the request, or its metadata over gRPC.
    """
    if service.telemetry is None:
        return None
    value = dict(headers).get(b"traceparent")
    return None if value is None else value.decode("latin-1")


async def decoded_request(
    body: bytes, json_length: int | None, deployment: Deployment, max_rows: int
) -> InferenceRequest:
    """Decode a request; see `decode_request`.

    Parameters
    ----------
    body, json_length, deployment, max_rows
        As in `decode_request`.
    """
    with phase("parse"):
        if deployment.encoding is None or len(body) <= _MAX_BYTES_IN_LOOP:
            return decode_request(body, json_length, deployment, max_rows)
        return await asyncio.to_thread(decode_request, body, json_length, deployment, max_rows)


async def encoded_answer(
    service: Service, deployment: Deployment, request: InferenceRequest, caller: Caller
) -> tuple[bytes, int | None]:
    """Answer a request and encode the response; see `encode_response`.

    Parameters
    ----------
    service : Service
        Answers the request.
    deployment : Deployment
        The model that is asked.
    request : InferenceRequest
        The decoded request.
    caller : Caller
        Who is charged.
    """
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


async def _send_error(send: Send, error: HttpError) -> None:
    headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
    await _send(send, error.status, orjson.dumps(error.to_json()), b"application/json", headers)


async def _send_content(send: Send, content: bytes, json_length: int | None) -> None:
    if json_length is None:
        await _send(send, 200, content, b"application/json", [])
    else:
        headers = [(_JSON_LENGTH, b"%d" % json_length)]
        await _send(send, 200, content, b"application/octet-stream", headers)


async def _send(send: Send, status: int, content: bytes, media_type: bytes, headers: Headers) -> None:
    own = [(b"content-type", media_type), (b"content-length", b"%d" % len(content)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": own})
    await send({"type": "http.response.body", "body": content})

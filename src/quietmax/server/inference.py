"""The inference endpoint as a bare ASGI application: the one path that must be fast.

FastAPI's routing, dependency resolution and pydantic would cost as much as everything done here; they serve all other
paths, and the same endpoint is described in the OpenAPI document by `quietmax.server.openapi`.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from quietmax.server.codec import read_query, write_response
from quietmax.server.deployment import Deployment
from quietmax.server.errors import HttpError, bad_request
from quietmax.server.service import Service

_PATH = re.compile(r"/v2/models/([^/]{1,64})(?:/versions/([^/]{1,64}))?/infer")
_JSON_LENGTH = b"inference-header-content-length"


class InferenceGate:
    """Answers inference requests itself and hands everything else to the application behind it."""

    def __init__(self, behind: ASGIApp, service: Service) -> None:
        self._behind = behind
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        found = (
            _PATH.fullmatch(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        )
        if found is None:
            await self._behind(scope, receive, send)
        else:
            await self._infer(found[1], found[2], scope, receive, send)

    async def _infer(
        self, name: str, version: str | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        started = time.perf_counter()
        service = self._service
        deployment: Deployment | None = None
        client, rows, status = None, 0, 500
        try:
            caller = await service.access.caller(scope["headers"])
            client = caller.client
            deployment = service.deployment(name, version)
            body, json_length = await self._body(scope["headers"], receive)
            query = read_query(body, json_length, deployment.servable, service.settings.max_rows)
            rows = len(query.rows)
            answer, parameters = await service.answer(deployment, query, caller)
            head: dict[str, Any] = {
                "model_name": deployment.name,
                "model_version": deployment.version,
                "parameters": parameters,
            }
            if query.id is not None:
                head["id"] = query.id
            content, length = write_response(head, answer.rows, query.outputs)
            status = 200
            more = [] if length is None else [(_JSON_LENGTH, b"%d" % length)]
            await respond(
                send,
                200,
                content,
                b"application/json" if length is None else b"application/octet-stream",
                more,
            )
        except HttpError as refusal:
            status = refusal.status
            await respond_refusal(send, refusal)
        except Exception as problem:
            service.log.event("failed", kind=type(problem).__name__)
            await respond_refusal(send, unforeseen())
        finally:
            seconds = time.perf_counter() - started
            model, served = ("", "") if deployment is None else (deployment.name, deployment.version)
            service.metrics.request(model, served, status, seconds)
            if service.settings.log_requests:
                service.log.request(
                    model=model,
                    version=served,
                    client=client,
                    rows=rows,
                    status=status,
                    milliseconds=round(seconds * 1000, 2),
                )

    async def _body(self, headers: list[tuple[bytes, bytes]], receive: Receive) -> tuple[bytes, int | None]:
        limit = self._service.settings.max_bytes
        json_length: int | None = None
        for name, value in headers:
            if name == b"content-length" and value.isdigit() and int(value) > limit:
                raise _too_large(limit)
            if name == _JSON_LENGTH:
                if not value.isdigit() or len(value) > 12:
                    raise bad_request(
                        "The header Inference-Header-Content-Length must be a whole number; correct it."
                    )
                json_length = int(value)
            if name == b"content-encoding" and value.lower() not in (b"", b"identity"):
                raise HttpError(415, "The body is compressed, which is not taken; send it as it is.")
        try:
            async with asyncio.timeout(self._service.settings.seconds):
                body = await _whole_body(receive, limit)
        except TimeoutError:
            raise HttpError(408, "The body did not come in time; nothing was spent, send it again.") from None
        return body, json_length


async def _whole_body(receive: Receive, limit: int) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HttpError(400, "The connection ended before the body did; send it again.")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise _too_large(limit)
        if not message.get("more_body"):
            return b"".join(parts)


def unforeseen() -> HttpError:
    """500: a fault of ours; the sentence says nothing about it, the log names its kind."""
    return HttpError(
        500, "The service failed in an unforeseen way; what was charged is spent, tell its owner."
    )


def _too_large(limit: int) -> HttpError:
    return HttpError(
        413,
        f"The body is larger than {limit} bytes; send fewer rows at a time.",
        headers={"connection": "close"},
    )


async def respond_refusal(send: Send, refusal: HttpError) -> None:
    """Send a refusal."""
    more = [(name.encode(), value.encode()) for name, value in refusal.headers.items()]
    await respond(send, refusal.status, orjson.dumps(refusal.to_json()), b"application/json", more)


async def respond(
    send: Send, status: int, content: bytes, kind: bytes, more: list[tuple[bytes, bytes]]
) -> None:
    """Send a whole response."""
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(content)), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})

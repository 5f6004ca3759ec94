"""The routes over HTTP: Open Inference Protocol v2, the privacy budget extension, metrics and the page.

This is a plain ASGI application: there are few routes, only inference has a body, and inference must be fast.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import orjson

from quietmax import __version__
from quietmax.errors import QuietmaxError
from quietmax.server import dashboard
from quietmax.server.auth import Caller
from quietmax.server.codec import _read_request
from quietmax.server.deployment import Deployment
from quietmax.server.errors import HttpError
from quietmax.server.protocol import Receive, Scope, Send
from quietmax.server.service import Service
from quietmax.server.settings import _is_loopback
from quietmax.server.telemetry import CONTENT_TYPE, Headers, Record

EXTENSIONS = ["binary_tensor_data", "privacy_budget"]
_JSON_LENGTH = b"inference-header-content-length"
_JSON = (b"content-type", b"application/json")
_BINARY = (b"content-type", b"application/octet-stream")

Answer = tuple[int, Headers, bytes]
"""Status, headers and body of a response."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request, and who serves it."""

    service: Service
    record: Record  # What the log will tell
    scope: Scope
    receive: Receive
    names: Mapping[str, str | None]  # Name and version in the path

    async def caller(self, **how: bool) -> Caller:
        """Return who sends the request, and note it for the log."""
        caller = await self.service.auth.authenticate(
            self.scope["headers"], local=_is_local(self.scope), **how
        )
        self.record.client = caller.client
        return caller

    @property
    def deployment(self) -> Deployment:
        """The model in the path."""
        return self.service.deployment(str(self.names["name"]), self.names.get("version"))


Handler = Callable[[Request], Awaitable[Answer]]


def create_app(
    service: Service, beside: AbstractAsyncContextManager[None] | None = None
) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """Create the ASGI application of a service.

    Parameters
    ----------
    service : Service
        The service; the application starts and stops it.
    beside : async context manager or None
        Entered after the start and left before the stop: a server of another protocol.
    """

    async def _app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live_on(service, beside or nullcontext(), receive, send)
        else:
            await _serve(service, scope, receive, send)

    return _app


async def _live_on(
    service: Service, beside: AbstractAsyncContextManager[None], receive: Receive, send: Send
) -> None:
    """Start the service, and stop it when the server asks for that."""
    await receive()
    try:
        await service.start()
        await beside.__aenter__()
    except Exception as error:
        await send({"type": "lifespan.startup.failed", "message": ""})
        service.log.event("not_started", error=str(error) if isinstance(error, QuietmaxError) else None)
        raise
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await beside.__aexit__(None, None, None)
    await service.stop()
    await send({"type": "lifespan.shutdown.complete"})


async def _serve(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer one request. Errors are JSON, and each response has an id that the log has, too."""
    client = scope.get("client")
    record = service._new_record(address=None if client is None else str(client[0]))
    handler, record.route, names = _find(scope["method"], scope["path"])
    try:
        with service._recorded(record, inference=handler is _infer):
            status, headers, content = await handler(Request(service, record, scope, receive, names))
            record.status = status
    except HttpError as error:
        status, headers, content = _json(error.to_json(), error.status, error.headers)
    length = (b"content-length", b"%d" % len(content))
    headers = [*headers, length, (b"x-request-id", record.request.encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def _find(method: str, path: str) -> tuple[Handler, str | None, Mapping[str, str | None]]:
    """Return who answers a request, the pattern of its path, and the names in it."""
    wanted = "GET" if method == "HEAD" else method
    allowed: dict[str, None] = {}
    for pattern, route, valid, handler in _ROUTES:
        found = pattern.fullmatch(path)
        if found is not None and wanted == valid:
            return handler, route, found.groupdict()
        if found is not None or path == "*":
            allowed |= {valid: None, **({"HEAD": None} if valid == "GET" else {}), "OPTIONS": None}

    async def _refuse(_: Request) -> Answer:
        if not allowed:
            raise HttpError(404, "There is no such path.")
        allow = {"allow": ", ".join(allowed)}
        if method == "OPTIONS":
            return _json({"methods": [*allowed]}, headers=allow)
        raise HttpError(405, "This path does not support the method.", headers=allow)

    return _refuse, None, {}


def _json(document: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    own = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    return status, [_JSON, *own], orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def _is_local(scope: Scope) -> bool:
    """Tell whether a request comes from this machine, as far as that can be known.

    HTTP/1.0 does not count: proxies speak it, and local clients do not. A proxy on this machine that speaks HTTP/1.1
    and adds no header cannot be told from a local client.
    """
    client = scope.get("client")
    return client is not None and _is_loopback(client[0]) and scope.get("http_version") == "1.1"


async def _infer(request: Request) -> Answer:
    """Private answers for rows. Errors charge nothing; an exhausted budget is 403 with `remaining`."""
    service, record = request.service, request.record
    caller = await request.caller()
    deployment = record.deployment = request.deployment
    limits = service.settings
    json_length = _check_headers(request.scope["headers"], limits.max_bytes)
    body = await _read_body(request.receive, limits.max_bytes)
    query = await _read_request(body, json_length, deployment, limits.max_rows)
    record.rows = len(query.rows)
    content, json_length = await service._answer(deployment, query, caller)
    if json_length is None:
        return 200, [_JSON], content
    return 200, [_BINARY, (_JSON_LENGTH, b"%d" % json_length)], content


def _check_headers(headers: Headers, limit: int) -> int | None:
    """Check the headers of the body; return the length of its JSON if binary tensors follow."""
    json_length: int | None = None
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise _too_large(limit)
        if name == _JSON_LENGTH:
            if not value.isdigit() or len(value) > 12:
                raise HttpError(400, "Inference-Header-Content-Length must be an integer.")
            json_length = int(value)
        if name == b"content-encoding" and value.lower() not in (b"", b"identity"):
            raise HttpError(
                415,
                "Compressed request bodies are not supported.",
                headers={"accept-encoding": "identity"},
            )
    return json_length


async def _read_body(receive: Receive, limit: int) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HttpError(400, "The connection ended before the body was complete.")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise _too_large(limit)
        if not message.get("more_body"):
            return b"".join(parts)


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"The body must have at most {limit} bytes.", headers={"connection": "close"})


async def _server_metadata(_: Request) -> Answer:
    """Name, version and extensions of the server."""
    return _json({"name": "quietmax", "version": __version__, "extensions": EXTENSIONS})


async def _live(_: Request) -> Answer:
    """Whether the process runs."""
    return _json({"live": True})


async def _ready(request: Request) -> Answer:
    """Whether requests are answered: the ledger can be read and written."""
    error = await request.service._readiness_error()
    return _json({"ready": True}) if error is None else _json({"error": error}, 503, {"retry-after": "1"})


async def _metrics(request: Request) -> Answer:
    """Prometheus metrics; with any API key, also while the ledger is unavailable."""
    service = request.service
    await request.caller(allow_stale=True)
    try:
        accounts = await service._read(service.ledger.accounts)
    except QuietmaxError:
        accounts = None
    return 200, [(b"content-type", CONTENT_TYPE.encode())], service.metrics._exposition(accounts)


async def _models(request: Request) -> Answer:
    """All models and versions."""
    await request.caller()
    listed = [{"name": each.name, "version": each.version} for each in request.service.deployments]
    return _json({"models": listed})


async def _metadata(request: Request) -> Answer:
    """Inputs, outputs, cost and guarantee of a model."""
    await request.caller()
    return _json(await request.service.metadata(request.deployment))


async def _model_ready(request: Request) -> Answer:
    """Whether a model answers requests."""
    await request.caller()
    _ = request.deployment
    return await _ready(request)


async def _budget(request: Request) -> Answer:
    """Spent and remaining privacy budget behind a model (extension privacy_budget)."""
    caller = await request.caller()
    return _json(await request.service.budget(request.deployment, caller))


async def _page(request: Request) -> Answer:
    """The page, which asks for an API key."""
    return 200, *dashboard._page(request.service)


async def _contents(request: Request) -> Answer:
    """What the page shows, as HTML."""
    return 200, *await dashboard._contents(request.service, await request.caller(page=True), live=False)


async def _state(request: Request) -> Answer:
    """The same without the forms: the page takes from it what has changed."""
    return 200, *await dashboard._contents(request.service, await request.caller(page=True), live=True)


_MODEL_PATHS = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
_ROUTES = [
    (re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", route)), route, method, handler)
    for method, route, handler in (
        *(("POST", f"{model}/infer", _infer) for model in _MODEL_PATHS),
        ("GET", "/v2", _server_metadata),
        ("GET", "/v2/health/live", _live),
        ("GET", "/v2/health/ready", _ready),
        ("GET", "/metrics", _metrics),
        ("GET", "/v2/models", _models),
        *(("GET", model, _metadata) for model in _MODEL_PATHS),
        *(("GET", f"{model}/ready", _model_ready) for model in _MODEL_PATHS),
        *(("GET", f"{model}/budget", _budget) for model in _MODEL_PATHS),
        ("GET", "/", _page),
        ("GET", "/contents", _contents),
        ("GET", "/state", _state),
    )
]

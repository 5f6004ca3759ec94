"""The routes: Open Inference Protocol v2, the privacy budget extension, metrics and the dashboard.

Inference requests have an endpoint of their own, a plain ASGI application: it is the one path that must be fast.
Starlette routes all others.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quietmax import __version__
from quietmax.errors import QuietmaxError
from quietmax.server import dashboard
from quietmax.server.auth import Caller, _is_local
from quietmax.server.codec import _read_request
from quietmax.server.deployment import Deployment
from quietmax.server.errors import HttpError, _internal_error
from quietmax.server.service import AUDITED, Service
from quietmax.server.telemetry import CONTENT_TYPE, Headers, Record

EXTENSIONS = ["binary_tensor_data", "privacy_budget"]
_PATH = re.compile(r"/v2/models/([^/]{1,64})(?:/versions/([^/]{1,64}))?/infer")
_ROUTE = "/v2/models/{name}/infer"
_VERSION_ROUTE = "/v2/models/{name}/versions/{version}/infer"
_JSON_LENGTH = b"inference-header-content-length"
_REQUEST_ID = b"x-request-id"
_RECORD = "quietmax.record"

Handler = Callable[[Service, Request], Awaitable[Response]]


def create_app(service: Service, beside: AbstractAsyncContextManager[None] | None = None) -> ASGIApp:
    """Create the ASGI application of a service: the inference endpoint in front of the other routes.

    Parameters
    ----------
    service : Service
        The service; the application starts and stops it.
    beside : async context manager or None
        Entered after the start and left before the stop: a server of another protocol.
    """
    return InferenceEndpoint(_create_api(service, beside), service)


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
        client = scope.get("client")
        record = self._service._new_record(address=None if client is None else str(client[0]))
        path = _PATH.fullmatch(scope["path"]) if scope["method"] == "POST" else None
        if path is None:
            await self._pass_on(record, scope, receive, send)
        else:
            record.route = _ROUTE if path[2] is None else _VERSION_ROUTE
            await self._infer(record, path[1], path[2], scope, receive, send)

    async def _pass_on(self, record: Record, scope: Scope, receive: Receive, send: Send) -> None:
        """Let Starlette answer, and log requests that were refused or failed."""

        async def _send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], (_REQUEST_ID, record.request.encode())]
            await send(message)

        scope[_RECORD] = record
        started = time.perf_counter()
        try:
            await self._app(scope, receive, _send_with_id)
        finally:
            if record.status in AUDITED or record.status >= 500:
                record._write(self._service.log, time.perf_counter() - started)

    async def _infer(
        self, record: Record, name: str, version: str | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        service = self._service
        headers: Headers = scope["headers"]
        try:
            with service._recorded(record):
                caller = await service.auth.authenticate(headers, local=_is_local(scope))
                record.client = caller.client
                deployment = record.deployment = service.deployment(name, version)
                json_length = self._check_headers(headers)
                body = await _read_body(receive, service.settings.max_bytes)
                request = await _read_request(body, json_length, deployment, service.settings.max_rows)
                record.rows = len(request.rows)
                content, json_length = await service._answer(deployment, request, caller)
                record.status = 200
                await _send(send, 200, _content_headers(record, content, json_length), content)
        except HttpError as error:
            content = orjson.dumps(error.to_json())
            own = [(key.encode(), value.encode()) for key, value in error.headers.items()]
            await _send(send, error.status, [*_content_headers(record, content, None), *own], content)

    def _check_headers(self, headers: Headers) -> int | None:
        """Check the headers of the body; return the length of its JSON if binary tensors follow."""
        limit = self._service.settings.max_bytes
        json_length: int | None = None
        for name, value in headers:
            if name == b"content-length" and value.isdigit() and int(value) > limit:
                raise _too_large(limit)
            if name == _JSON_LENGTH:
                if not value.isdigit() or len(value) > 12:
                    raise HttpError(400, "Inference-Header-Content-Length must be an integer.")
                json_length = int(value)
            if name == b"content-encoding" and value.lower() not in (b"", b"identity"):
                raise HttpError(415, "Compressed request bodies are not supported.")
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


def _content_headers(record: Record, content: bytes, json_length: int | None) -> Headers:
    media_type = b"application/json" if json_length is None else b"application/octet-stream"
    headers = [
        (b"content-type", media_type),
        (b"content-length", b"%d" % len(content)),
        (_REQUEST_ID, record.request.encode()),
    ]
    return headers if json_length is None else [*headers, (_JSON_LENGTH, b"%d" % json_length)]


async def _send(send: Send, status: int, headers: Headers, content: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def _create_api(service: Service, beside: AbstractAsyncContextManager[None] | None = None) -> Starlette:
    """Create the application with all other routes."""

    @asynccontextmanager
    async def _lifespan(_: Starlette) -> AsyncIterator[None]:
        await service.start()
        async with beside or nullcontext():
            yield
        await service.stop()

    async def _unexpected_error(request: Request, error: Exception) -> Response:
        service.log.failure(error, request=_record(request).request)
        return JSONResponse(_internal_error().to_json(), 500)

    app = Starlette(
        routes=[_route(service, path, handler) for path, handler in _ROUTES],
        exception_handlers={
            HttpError: _http_error,
            HTTPException: _routing_error,
            Exception: _unexpected_error,
        },
        lifespan=_lifespan,
    )
    app.router.redirect_slashes = False  # the target would be whatever the Host header says
    return app


def _route(service: Service, route: str, handler: Handler) -> Route:
    method, path = route.split()

    async def _endpoint(request: Request) -> Response:
        _record(request).route = path
        return await handler(service, request)

    made = Route(path, _endpoint)
    made.methods = {method}  # and no HEAD
    return made


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    _record(request).error = error.detail
    return JSONResponse(error.to_json(), error.status, error.headers)


async def _routing_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {
        404: "There is no such path.",
        405: "This path does not support the method.",
    }.get(error.status_code, str(error.detail))
    return JSONResponse({"error": message}, error.status_code, error.headers)


def _record(request: Request) -> Record:
    """Return the record of a request that is not answered by the inference endpoint."""
    record = request.scope.get(_RECORD)
    return record if isinstance(record, Record) else Record()


async def _caller(service: Service, request: Request, **how: bool) -> Caller:
    """Return who sends a request, and note it for the log."""
    scope = request.scope
    caller = await service.auth.authenticate(scope["headers"], local=_is_local(scope), **how)
    _record(request).client = caller.client
    return caller


def _asked(service: Service, request: Request) -> Deployment:
    return service.deployment(request.path_params["name"], request.path_params.get("version"))


async def _server_metadata(_service: Service, _request: Request) -> Response:
    """Name, version and extensions of the server."""
    return JSONResponse({"name": "quietmax", "version": __version__, "extensions": EXTENSIONS})


async def _live(_service: Service, _request: Request) -> Response:
    """Whether the process runs."""
    return JSONResponse({"live": True})


async def _ready(service: Service, _request: Request) -> Response:
    """Whether requests are answered: the ledger can be read and written."""
    error = await service._readiness_error()
    if error is not None:
        return JSONResponse({"error": error}, 503, {"retry-after": "1"})
    return JSONResponse({"ready": True})


async def _metrics(service: Service, request: Request) -> Response:
    """Prometheus metrics; with any API key, also while the ledger is unavailable."""
    await _caller(service, request, allow_stale=True)
    try:
        accounts = await service._read(service.ledger.accounts)
    except QuietmaxError:
        accounts = None
    return Response(service.metrics._exposition(accounts), media_type=CONTENT_TYPE)


async def _models(service: Service, request: Request) -> Response:
    """All models and versions."""
    await _caller(service, request)
    listed = [{"name": each.name, "version": each.version} for each in service.deployments]
    return JSONResponse({"models": listed})


async def _metadata(service: Service, request: Request) -> Response:
    """Inputs, outputs, cost and guarantee of a model."""
    await _caller(service, request)
    return JSONResponse(await service.metadata(_asked(service, request)))


async def _model_ready(service: Service, request: Request) -> Response:
    """Whether a model answers requests."""
    await _caller(service, request)
    _asked(service, request)
    return await _ready(service, request)


async def _budget(service: Service, request: Request) -> Response:
    """Spent and remaining privacy budget behind a model (extension privacy_budget)."""
    caller = await _caller(service, request)
    return JSONResponse(await service.budget(_asked(service, request), caller))


async def _infer(service: Service, request: Request) -> Response:
    """Private answers for rows of features.

    Errors charge nothing; an exhausted budget is 403 with `remaining`.
    """
    _asked(service, request)  # a name that the inference endpoint passes on is too long for a model
    raise _internal_error()


async def _page(service: Service, _request: Request) -> Response:
    """The page, which asks for an API key."""
    return dashboard._page(service)


async def _contents(service: Service, request: Request) -> Response:
    """What the page shows, as HTML."""
    return await dashboard._contents(service, await _caller(service, request, page=True))


async def _state(service: Service, request: Request) -> Response:
    """What changes on the page, as JSON."""
    return JSONResponse(await dashboard._state(service, await _caller(service, request, page=True)))


_MODEL_PATHS = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
_ROUTES: list[tuple[str, Handler]] = [
    ("GET /v2", _server_metadata),
    ("GET /v2/health/live", _live),
    ("GET /v2/health/ready", _ready),
    ("GET /metrics", _metrics),
    ("GET /v2/models", _models),
    *((f"GET {model}", _metadata) for model in _MODEL_PATHS),
    *((f"GET {model}/ready", _model_ready) for model in _MODEL_PATHS),
    *((f"GET {model}/budget", _budget) for model in _MODEL_PATHS),
    *((f"POST {model}/infer", _infer) for model in _MODEL_PATHS),
    ("GET /", _page),
    ("GET /contents", _contents),
    ("GET /state", _state),
]

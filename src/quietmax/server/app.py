"""The routes: Open Inference Protocol v2, the privacy budget extension, metrics and the dashboard.

Inference requests have an endpoint of their own, a plain ASGI application: it is the one path that must be fast, and
FastAPI's routing, dependency resolution and validation would cost as much as everything done here. FastAPI serves all
other paths. The schemas of the OpenAPI document are written by hand: the inference endpoint has no pydantic models.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any
from urllib.parse import parse_qs

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quietmax import __version__
from quietmax.errors import QuietmaxError
from quietmax.server import dashboard
from quietmax.server.auth import SESSION_SECONDS, Caller, is_cross_site, is_local
from quietmax.server.codec import COLUMN_DATATYPES, read_request
from quietmax.server.errors import HttpError, internal_error
from quietmax.server.protocol import EXCHANGE, MAX_CONTROL_BYTES
from quietmax.server.service import AUDITED, Service
from quietmax.server.telemetry import CONTENT_TYPE, Headers, Record

EXTENSIONS = ["binary_tensor_data", "model_repository", "privacy_budget"]
Handler = Callable[[Request, str, str | None], Awaitable[Response]]
_PATH = re.compile(r"/v2/models/([^/]{1,64})(?:/versions/([^/]{1,64}))?/infer")
_ROUTE = "/v2/models/{name}/infer"
_VERSION_ROUTE = "/v2/models/{name}/versions/{version}/infer"
_JSON_LENGTH = b"inference-header-content-length"
_REQUEST_ID = b"x-request-id"
_RECORD = "quietmax.record"
_COOKIE = "quietmax_session"
_MAX_LOGIN_BYTES = 2**12


def create_app(service: Service, beside: AbstractAsyncContextManager[None] | None = None) -> ASGIApp:
    """Create the ASGI application of a service: the inference endpoint in front of the FastAPI routes.

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
        record = self._service.new_record(address=None if client is None else str(client[0]))
        path = _PATH.fullmatch(scope["path"]) if scope["method"] == "POST" else None
        if path is None:
            await self._pass_on(record, scope, receive, send)
        else:
            record.route = _ROUTE if path[2] is None else _VERSION_ROUTE
            await self._infer(record, path[1], path[2], scope, receive, send)

    async def _pass_on(self, record: Record, scope: Scope, receive: Receive, send: Send) -> None:
        """Let FastAPI answer, and log what an audit asks for: logins, and requests that were refused or failed."""

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], (_REQUEST_ID, record.request.encode())]
            await send(message)

        scope[_RECORD] = record
        started = time.perf_counter()
        try:
            await self._app(scope, receive, send_with_id)
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
            with service.recorded(record):
                caller = await service.auth.authenticate(headers, local=is_local(scope))
                record.client, record.headers = caller.client, headers
                deployment = record.deployment = service.deployment(name, version)
                json_length = self._check_headers(headers)
                body = None if exchange is None else exchange.take_body()
                if body is None:
                    body = await _read_body(receive, service.settings.max_bytes)
                elif len(body) > service.settings.max_bytes:
                    raise _too_large(service.settings.max_bytes)
                request = await read_request(body, json_length, deployment, service.settings.max_rows)
                record.rows = len(request.rows)
                content, json_length = await service.answer(deployment, request, caller)
                record.status = 200
                own = _content_headers(record, content, json_length)
                if exchange is None or not exchange.respond(200, own, content):
                    await _send(send, 200, own, content)
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
    """Return the headers of an answer."""
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


def _create_api(service: Service, beside: AbstractAsyncContextManager[None] | None = None) -> FastAPI:
    """Create the FastAPI application with all routes, and their OpenAPI document at /openapi.json."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        async with beside or nullcontext():
            yield
        await service.stop()

    app = FastAPI(
        title="Quietmax",
        version=__version__,
        description="Private predictions over the Open Inference Protocol v2, with an enforced privacy budget.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # the target would be whatever the Host header says
        lifespan=lifespan,
    )
    _add_error_handlers(app, service)
    _add_server_routes(app, service)
    _add_model_routes(app, service)
    _add_repository_routes(app, service)
    _add_dashboard_routes(app, service)
    _add_document(app)
    return app


def _add_error_handlers(app: FastAPI, service: Service) -> None:
    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HttpError)
        _record(request).error = error.detail
        return JSONResponse(error.to_json(), error.status, error.headers)

    async def routing_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = {
            404: "There is no such path. /openapi.json lists all.",
            405: "This path does not support the method. /openapi.json lists the methods.",
        }.get(error.status_code, str(error.detail))
        return JSONResponse({"error": message}, error.status_code, error.headers)

    async def validation_error(_: Request, __: Exception) -> Response:
        return JSONResponse({"error": "The request does not match /openapi.json."}, 400)

    async def unexpected_error(request: Request, error: Exception) -> Response:
        service.log.failure(error, request=_record(request).request)
        return JSONResponse(internal_error().to_json(), 500)

    app.add_exception_handler(HttpError, http_error)
    app.add_exception_handler(HTTPException, routing_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(Exception, unexpected_error)


def _record(request: Request) -> Record:
    """Return the record of a request that FastAPI answers."""
    record = request.scope.get(_RECORD)
    return record if isinstance(record, Record) else Record()


async def _caller(service: Service, request: Request, *, allow_stale: bool = False) -> Caller:
    """Return who sends a request, and note it for the log."""
    scope = request.scope
    caller = await service.auth.authenticate(scope["headers"], local=is_local(scope), allow_stale=allow_stale)
    _record(request).client = caller.client
    return caller


async def _ready(service: Service) -> Response:
    error = await service.readiness_error()
    if error is not None:
        return JSONResponse({"error": error}, 503, {"retry-after": "1"})
    return JSONResponse({"ready": True})


def _add_server_routes(app: FastAPI, service: Service) -> None:
    @app.get("/v2", tags=["server"], responses=_responses("ServerMetadata", 503))
    async def server_metadata() -> Response:
        """Name, version and extensions of the server."""
        return JSONResponse({"name": "quietmax", "version": __version__, "extensions": EXTENSIONS})

    @app.get("/v2/health/live", tags=["server"], responses=_responses("Live"))
    async def live() -> Response:
        """Whether the process runs."""
        return JSONResponse({"live": True})

    @app.get("/v2/health/ready", tags=["server"], responses=_responses("Ready", 503))
    async def ready() -> Response:
        """Whether requests are answered: the ledger can be read and written."""
        return await _ready(service)

    @app.get("/metrics", tags=["server"], responses=_responses(None, 401, 403, 429, 503))
    async def prometheus(request: Request) -> Response:
        """Prometheus metrics; with any API key, also while the ledger is unavailable."""
        await _caller(service, request, allow_stale=True)
        try:
            accounts = await service.read(service.ledger.accounts)
        except QuietmaxError:
            accounts = None
        return Response(service.metrics.exposition(accounts), media_type=CONTENT_TYPE)


def _add_model_routes(app: FastAPI, service: Service) -> None:
    def add(method: str, suffix: str, handler: Handler, documented: dict[int | str, Any]) -> None:
        """Add a route for the highest version of a model, and one for a given version."""

        async def highest(request: Request, name: str) -> Response:
            return await handler(request, name, None)

        async def versioned(request: Request, name: str, version: str) -> Response:
            return await handler(request, name, version)

        for path, endpoint in (
            (f"/v2/models/{{name}}{suffix}", highest),
            (f"/v2/models/{{name}}/versions/{{version}}{suffix}", versioned),
        ):
            app.add_api_route(
                path,
                endpoint,
                methods=[method],
                tags=["models"],
                responses=documented,
                description=handler.__doc__,
                operation_id=f"{method.lower()}{path}",
                response_model=None,
            )

    @app.get("/v2/models", tags=["models"], responses=_responses("ModelList", 401, 403, 429, 503))
    async def models(request: Request) -> Response:
        """All models and versions."""
        await _caller(service, request)
        listed = [{"name": each.name, "version": each.version} for each in service.deployments]
        return JSONResponse({"models": listed})

    async def metadata(request: Request, name: str, version: str | None) -> Response:
        """Inputs, outputs, cost and guarantee of a model."""
        await _caller(service, request)
        return JSONResponse(await service.metadata(service.deployment(name, version)))

    async def model_ready(request: Request, name: str, version: str | None) -> Response:
        """Whether a model answers requests."""
        await _caller(service, request)
        service.deployment(name, version)
        return await _ready(service)

    async def budget(request: Request, name: str, version: str | None) -> Response:
        """Spent and remaining privacy budget behind a model (extension privacy_budget)."""
        caller = await _caller(service, request)
        return JSONResponse(await service.budget(service.deployment(name, version), caller))

    async def infer(_request: Request, name: str, version: str | None) -> Response:
        """Private answers for rows of features.

        Errors charge nothing; an exhausted budget is 403 with `remaining`.
        """
        service.deployment(name, version)  # a name that `InferenceEndpoint` passes on is too long for a model
        raise internal_error()

    common = (401, 403, 404, 429, 503)
    add("GET", "", metadata, _responses("ModelMetadata", *common))
    add("GET", "/ready", model_ready, _responses("Ready", *common))
    add("GET", "/budget", budget, _responses("Budget", *common))
    add("POST", "/infer", infer, _responses("InferenceResponse", *common, 400, 408, 409, 413, 415, 422))


def _add_repository_routes(app: FastAPI, service: Service) -> None:
    async def read_object(request: Request) -> dict[str, Any]:
        """Read a small body that is a JSON object, or empty."""
        content = await _read_body(request.receive, MAX_CONTROL_BYTES)
        try:
            document = orjson.loads(content or b"{}")
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise HttpError(400, "The body must be a JSON object, or empty.")
        return document

    index_responses = _responses("RepositoryIndex", 400, 401, 403, 408, 413, 429, 503)
    changed = _responses("Changed", 400, 401, 403, 404, 408, 413, 429, 503)

    @app.post("/v2/repository/index", tags=["repository"], responses=index_responses)
    async def index(request: Request) -> Response:
        """The models of the repository and whether they are served; administrators only."""
        caller = await _caller(service, request)
        ready = (await read_object(request)).get("ready", False)
        return JSONResponse(await service.repository_index(caller, ready=ready is True))

    @app.post("/v2/repository/models/{name}/load", tags=["repository"], responses=changed)
    async def load(request: Request, name: str) -> Response:
        """Load the highest version of a model from the repository; the one before it goes. Administrators only."""
        caller = await _caller(service, request)
        await service.load_model(name, caller, (await read_object(request)).get("parameters"))
        return JSONResponse({})

    @app.post("/v2/repository/models/{name}/unload", tags=["repository"], responses=changed)
    async def unload(request: Request, name: str) -> Response:
        """Stop serving a model of the repository. Nothing is refunded; administrators only."""
        caller = await _caller(service, request)
        await read_object(request)
        await service.unload_model(name, caller)
        return JSONResponse({})


async def _session(service: Service, request: Request) -> Caller | None:
    """Return whose session of the dashboard sends a request; None without a session that is open."""
    scope = request.scope
    caller = await service.auth.authenticate_session(
        request.cookies.get(_COOKIE), scope["headers"], local=is_local(scope)
    )
    _record(request).client = None if caller is None else caller.client
    return caller


async def _required_session(service: Service, request: Request) -> Caller:
    caller = await _session(service, request)
    if caller is None:
        raise HttpError(401, "The session has ended.")
    return caller


def _check_same_site(request: Request) -> None:
    if is_cross_site(request.scope["headers"]):
        raise HttpError(403, "Requests from other sites are not allowed.")


def _add_dashboard_routes(app: FastAPI, service: Service) -> None:
    _add_session_routes(app, service)

    @app.get("/", tags=["dashboard"], response_class=HTMLResponse, responses=_responses(None, 403, 429, 503))
    async def page(request: Request) -> Response:
        """The dashboard, or the login page."""
        caller = await _session(service, request)
        if caller is None:
            return dashboard.login_page(wrong=False)
        service.auth.check_page_rate(caller)
        return await dashboard.page(service, caller)

    @app.get("/state", tags=["dashboard"], responses=_responses("DashboardState", 401, 403, 429, 503))
    async def current_state(request: Request) -> Response:
        """The contents of the dashboard as JSON."""
        caller = await _required_session(service, request)
        service.auth.check_page_rate(caller)
        return JSONResponse(await dashboard.state(service, caller))

    answered = _responses("InferenceResponse", 400, 401, 403, 404, 409, 413, 422, 429, 503)

    @app.post("/try", tags=["dashboard"], responses=answered)
    async def try_it(request: Request, model: str, version: str | None = None) -> Response:
        """Send an inference request from the dashboard; it is charged like any other."""
        _check_same_site(request)
        caller = await _required_session(service, request)
        service.auth.check_rate(caller)
        record = _record(request)
        record.route = "/try"
        with service.recorded(record):
            deployment = record.deployment = service.deployment(model, version)
            body = await _read_body(request.receive, service.settings.max_bytes)
            query = await read_request(body, None, deployment, service.settings.max_rows)
            record.rows = len(query.rows)
            content, _ = await service.answer(deployment, query, caller)
            record.status = 200
        return Response(content, media_type="application/json")


def _add_session_routes(app: FastAPI, service: Service) -> None:
    login_page: dict[str, Any] = {
        "description": "The login page.",
        "content": {"text/html": {"schema": {"type": "string"}}},
    }
    opened: dict[int | str, Any] = {401: login_page, 303: {"description": "Logged in."}}
    closed: dict[int | str, Any] = {303: {"description": "Logged out."}}
    post = partial(
        app.post, tags=["dashboard"], status_code=303, response_class=Response, response_model=None
    )

    @post("/login", responses=_responses(None, 400, 403, 408, 413, 429, 503) | opened)
    async def login(request: Request) -> Response:
        """Open a session with the API key in the form field `key`."""
        _check_same_site(request)
        record = _record(request)
        try:
            service.auth.check_login(record.address)
            body = await _read_body(request.receive, _MAX_LOGIN_BYTES)
            key = parse_qs(body.decode("utf-8", "replace")).get("key", [""])[0]
            cookie, caller = await service.auth.login(key, record.address)
        except HttpError as error:
            if error.status not in (401, 429):
                raise
            record.event = "login_failed"
            if error.status == 429:
                raise
            return dashboard.login_page(wrong=True)
        record.event, record.client = "login", caller.client
        response = RedirectResponse("/", 303)
        response.set_cookie(
            _COOKIE,
            cookie,
            max_age=SESSION_SECONDS,
            httponly=True,
            samesite="strict",
            secure=service.settings.secure_cookies,
        )
        return response

    @post("/logout", responses=_responses(None, 403, 429, 503) | closed)
    async def logout(request: Request) -> Response:
        """Close the session: its cookie is no longer accepted."""
        _check_same_site(request)
        await service.auth.logout(request.cookies.get(_COOKIE))
        response = RedirectResponse("/", 303)
        response.delete_cookie(_COOKIE)
        return response


def _reference(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _responses(schema: str | None, *statuses: int) -> dict[int | str, Any]:
    """Describe the errors of an endpoint, and its success if that is a JSON document."""
    schemas = {200: schema, **dict.fromkeys(statuses, "Error")}
    return {
        status: {
            "description": _DESCRIPTIONS[status],
            "content": {"application/json": {"schema": _reference(name)}},
        }
        for status, name in schemas.items()
        if name is not None
    }


def _list(of: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": of, **more}


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


_STRING, _OBJECT, _INTEGER = {"type": "string"}, {"type": "object"}, {"type": "integer"}
_KINDS: list[tuple[dict[str, Any], str]] = [
    (_STRING, "error name version platform mechanism kind warning reason datatype account note client"),
    (_STRING, "id model_name model_version unknown_columns"),
    ({"type": "number"}, "remaining total spent spent_fraction cost cost_per_answer"),
    ({"type": ["number", "null"]}, "spent_in_epsilon quota_fraction"),
    (_INTEGER, "max_rows refused new_answers unknown_values"),
    ({"type": ["integer", "null"]}, "remaining_answers"),
    ({"type": "boolean"}, "live ready paid_at_training"),
    (_OBJECT, "guarantee encoding encoded_input terms"),
    (_list(_STRING), "extensions versions classes unproven_models"),
    (_list(_INTEGER), "shape"),
    (_one_of("pure", "gaussian"), "measure"),
    (_one_of("proven", "conditional", "refuted"), "guarantee_status"),
    (_one_of("READY", "UNAVAILABLE"), "state"),
    ({"type": "object", "additionalProperties": True}, "parameters"),
    ({"type": "string", "description": "An API key."}, "key"),
]
_FIELDS = {name: schema for schema, names in _KINDS for name in names.split()}
"""The schemas of fields, which mean the same in every document."""


def _object(required: str, optional: str = "", **others: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with such fields; `others` have schemas of their own, and are required."""
    names = [*required.split(), *optional.split()]
    return {
        "type": "object",
        "properties": {**{name: _FIELDS[name] for name in names}, **others},
        "required": [*required.split(), *others],
    }


_TENSORS = _list(_object("name datatype shape"))
_INPUT = _object(
    "",
    "parameters",
    name={"type": "string", "description": "`features`, or a column of the table."},
    shape=_list({"type": "integer", "minimum": 0}, minItems=1, maxItems=8),
    datatype=_one_of(*COLUMN_DATATYPES),
)
_INPUT["properties"]["data"] = _list({})
_OUTPUT = _object("name datatype shape", "parameters")
_OUTPUT["properties"]["data"] = _list({"type": ["number", "string"]})
_INFERENCE = _object("", "parameters", inputs=_list(_INPUT, minItems=1))
_INFERENCE["properties"] |= {
    "id": {
        "type": "string",
        "maxLength": 128,
        "description": "A retry with the same id gets the same answer and is not charged.",
    },
    "outputs": _list(_object("", "parameters", name=_one_of("label", "probabilities")), maxItems=2),
}
_SCHEMAS: dict[str, dict[str, Any]] = {
    "Error": _object("error", "remaining remaining_answers"),
    "Live": _object("live"),
    "Ready": _object("ready"),
    "ServerMetadata": _object("name version extensions"),
    "RepositoryIndex": _list(_object("name version state reason")),
    "Changed": _object(""),
    "ModelList": _object("", models=_list(_object("name version"))),
    "ModelMetadata": _object(
        "name versions platform",
        inputs=_TENSORS,
        outputs=_TENSORS,
        parameters=_object(
            "classes mechanism guarantee_status guarantee measure cost_per_answer paid_at_training max_rows",
            "warning kind encoding encoded_input",
        ),
    ),
    "Budget": _object(
        "account measure terms total spent remaining spent_fraction spent_in_epsilon cost_per_answer "
        "remaining_answers note unproven_models",
        clients=_list(_object("client spent_fraction quota_fraction refused")),
    ),
    "InferenceRequest": _INFERENCE,
    "InferenceResponse": _object(
        "model_name model_version",
        "id",
        outputs=_list(_OUTPUT),
        parameters=_object(
            "guarantee_status measure cost new_answers",
            "remaining remaining_answers paid_at_training warning unknown_values unknown_columns",
        ),
    ),
    "RepositoryIndexRequest": _object("", "ready"),
    "RepositoryLoadRequest": {
        "type": "object",
        "properties": {"parameters": {"type": "object", "maxProperties": 0, "description": "Not supported."}},
    },
    "RepositoryUnloadRequest": _object("", "parameters"),
    "DashboardState": _OBJECT,
    "Login": _object("key"),
}
_BODIES = {
    "/v2/repository/index": ("application/json", "RepositoryIndexRequest", False),
    "/v2/repository/models/{name}/load": ("application/json", "RepositoryLoadRequest", False),
    "/v2/repository/models/{name}/unload": ("application/json", "RepositoryUnloadRequest", False),
    "/login": ("application/x-www-form-urlencoded", "Login", True),
}
"""Media type and schema of the bodies of other requests, and whether they are required."""
_DESCRIPTIONS = {
    200: "Success.",
    400: "Not an inference request. Nothing was charged.",
    401: "No API key, or one that is wrong, revoked or expired.",
    403: "The budget or quota is exhausted (see `remaining`), or the key has no permission.",
    404: "No such model or version.",
    408: "The body did not arrive in time.",
    409: "The request id was used with another body. Nothing was charged.",
    413: "Too many bytes or rows. Nothing was charged.",
    415: "The body is compressed.",
    422: "An inference request that does not fit the model. Nothing was charged.",
    429: "More requests than the rate limit of a client allows. Nothing was charged.",
    503: "The service or its ledger is unavailable.",
}


def _add_document(app: FastAPI) -> None:
    """Make FastAPI's OpenAPI document complete: schemas, API keys and the body of inference requests."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            schema["components"] = {
                "schemas": _SCHEMAS,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            }
            schema["security"] = [{"key": []}]
            for path, operations in schema["paths"].items():
                for operation in operations.values():
                    _complete(path, operation)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _complete(path: str, operation: dict[str, Any]) -> None:
    """Add what FastAPI does not know about an operation."""
    described = operation["responses"]
    if "422" in described and described["422"].get("description") != _DESCRIPTIONS[422]:
        del described["422"]  # path parameters are any strings: FastAPI never refuses one
    if path.endswith("/infer") or path == "/try":
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _reference("InferenceRequest")}},
        }
    elif path in _BODIES:
        media_type, schema, required = _BODIES[path]
        operation["requestBody"] = {
            "required": required,
            "content": {media_type: {"schema": _reference(schema)}},
        }
    if path == "/metrics":
        described["200"] = {
            "description": "Success.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        }
    if path in ("/v2", "/v2/health/live", "/v2/health/ready", "/"):
        operation["security"] = []

"""The routes: Open Inference Protocol v2, the privacy budget extension, metrics and the dashboard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from quietmax import __version__
from quietmax.errors import QuietmaxError
from quietmax.server import dashboard, metrics
from quietmax.server.auth import Caller, is_local
from quietmax.server.body_memory import MAX_CONTROL_BYTES
from quietmax.server.errors import HttpError, bad_request, no_such_model
from quietmax.server.inference import InferenceEndpoint, internal_error, record_of
from quietmax.server.openapi import add_document, error_responses, responses
from quietmax.server.service import Service

EXTENSIONS = ["binary_tensor_data", "model_repository", "privacy_budget"]
Handler = Callable[[Request, str, str | None], Awaitable[Response]]


def create_app(service: Service, beside: AbstractAsyncContextManager[None] | None = None) -> ASGIApp:
    """Create the ASGI application of a service: the inference endpoint in front of the FastAPI routes.

    Parameters
    ----------
    service : Service
        The service; the application starts and stops it.
    beside : async context manager or None
        Entered after the start and left before the stop: a server of another protocol.
    """
    return InferenceEndpoint(create_api(service, beside), service)


def create_api(service: Service, beside: AbstractAsyncContextManager[None] | None = None) -> FastAPI:
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
    dashboard.add_routes(app, service)
    add_document(app)
    return app


def _add_error_handlers(app: FastAPI, service: Service) -> None:
    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HttpError)
        record_of(request.scope).error = error.detail
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
        service.log.failure(error, request=record_of(request.scope).request)
        return JSONResponse(internal_error().to_json(), 500)

    app.add_exception_handler(HttpError, http_error)
    app.add_exception_handler(HTTPException, routing_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(Exception, unexpected_error)


def _add_server_routes(app: FastAPI, service: Service) -> None:
    @app.get("/v2", tags=["server"], responses=responses("ServerMetadata", 503))
    async def server_metadata() -> Response:
        """Name, version and extensions of the server."""
        return JSONResponse({"name": "quietmax", "version": __version__, "extensions": EXTENSIONS})

    @app.get("/v2/health/live", tags=["server"], responses=responses("Live"))
    async def live() -> Response:
        """Whether the process runs."""
        return JSONResponse({"live": True})

    @app.get("/v2/health/ready", tags=["server"], responses=responses("Ready", 503))
    async def ready() -> Response:
        """Whether requests are answered: the ledger can be read and written."""
        return await _ready(service)

    @app.get("/metrics", tags=["server"], responses=error_responses(401, 403, 429, 503))
    async def prometheus(request: Request) -> Response:
        """Prometheus metrics; with any API key, also while the ledger is unavailable."""
        await _caller(service, request, allow_stale=True)
        try:
            accounts = await service.read(service.ledger.accounts)
        except QuietmaxError:
            accounts = None
        return Response(service.metrics.exposition(accounts), media_type=metrics.CONTENT_TYPE)


async def _caller(service: Service, request: Request, *, allow_stale: bool = False) -> Caller:
    """Return who sends a request, and note it for the log."""
    scope = request.scope
    caller = await service.auth.authenticate(scope["headers"], local=is_local(scope), allow_stale=allow_stale)
    record_of(scope).client = caller.client
    return caller


async def _ready(service: Service) -> Response:
    error = await service.readiness_error()
    if error is not None:
        return JSONResponse({"error": error}, 503, {"retry-after": "1"})
    return JSONResponse({"ready": True})


def _add_model_routes(app: FastAPI, service: Service) -> None:
    @app.get("/v2/models", tags=["models"], responses=responses("ModelList", 401, 403, 429, 503))
    async def models(request: Request) -> Response:
        """All models and versions."""
        await _caller(service, request)
        listed = [{"name": each.name, "version": each.version} for each in service.deployments]
        return JSONResponse({"models": listed})

    async def metadata(request: Request, name: str, version: str | None) -> Response:
        await _caller(service, request)
        return JSONResponse(await service.metadata(service.deployment(name, version)))

    async def model_ready(request: Request, name: str, version: str | None) -> Response:
        await _caller(service, request)
        service.deployment(name, version)
        return await _ready(service)

    async def budget(request: Request, name: str, version: str | None) -> Response:
        caller = await _caller(service, request)
        return JSONResponse(await service.budget(service.deployment(name, version), caller))

    async def infer(_request: Request, _name: str, _version: str | None) -> Response:
        """Refuse the names that `InferenceEndpoint` passes on: they are too long for a model."""
        raise no_such_model()

    common = (401, 403, 404, 429, 503)
    _add_versioned(
        app, "GET", "", metadata, responses("ModelMetadata", *common),
        "Inputs, outputs, cost and guarantee of a model.",
    )  # fmt: skip
    _add_versioned(
        app, "GET", "/ready", model_ready, responses("Ready", *common), "Whether a model answers requests."
    )
    _add_versioned(
        app, "GET", "/budget", budget, responses("Budget", *common),
        "Spent and remaining privacy budget behind a model (extension privacy_budget).",
    )  # fmt: skip
    _add_versioned(
        app, "POST", "/infer", infer,
        responses("InferenceResponse", 400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 503),
        "Private answers for rows of features. Errors charge nothing; an exhausted budget is 403 with `remaining`.",
    )  # fmt: skip


def _add_repository_routes(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v2/repository/index",
        tags=["repository"],
        responses=responses("RepositoryIndex", 400, 401, 403, 408, 413, 429, 503),
    )
    async def index(request: Request) -> Response:
        """The models of the repository and whether they are served; administrators only."""
        caller = await _caller(service, request)
        ready = (await _read_object(request, service)).get("ready", False)
        return JSONResponse(await service.repository_index(caller, ready=ready is True))

    changed = responses("Changed", 400, 401, 403, 404, 408, 413, 429, 503)

    @app.post("/v2/repository/models/{name}/load", tags=["repository"], responses=changed)
    async def load(request: Request, name: str) -> Response:
        """Load the highest version of a model from the repository; the one before it goes. Administrators only."""
        caller = await _caller(service, request)
        if (await _read_object(request, service)).get("parameters"):
            raise bad_request(
                "Models are loaded from the model repository alone; `parameters` are not supported."
            )
        await service.load_model(name, caller)
        return JSONResponse({})

    @app.post("/v2/repository/models/{name}/unload", tags=["repository"], responses=changed)
    async def unload(request: Request, name: str) -> Response:
        """Stop serving a model of the repository. Nothing is refunded; administrators only."""
        caller = await _caller(service, request)
        await _read_object(request, service)
        await service.unload_model(name, caller)
        return JSONResponse({})


async def _read_object(request: Request, service: Service) -> dict[str, Any]:
    """Read a small body that is a JSON object, or empty."""
    content = b""
    try:
        async with asyncio.timeout(service.settings.timeout):
            async for part in request.stream():
                content += part
                if len(content) > MAX_CONTROL_BYTES:
                    raise HttpError(
                        413,
                        f"The body must have at most {MAX_CONTROL_BYTES} bytes.",
                        headers={"connection": "close"},
                    )
    except ClientDisconnect:
        raise bad_request("The connection ended before the body was complete.") from None
    except TimeoutError:
        raise HttpError(408, "The body did not arrive in time.", headers={"connection": "close"}) from None
    try:
        document = orjson.loads(content or b"{}")
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise bad_request("The body must be a JSON object, or empty.")
    return document


def _add_versioned(
    app: FastAPI,
    method: str,
    suffix: str,
    handler: Handler,
    documented: dict[int | str, Any],
    description: str,
) -> None:
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
            description=description,
            operation_id=f"{method.lower()}{path}",
            response_model=None,
        )

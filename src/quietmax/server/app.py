"""The HTTP surface: Open Inference Protocol v2, the budget extension, metrics and the dashboard."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from quietmax import __version__
from quietmax.errors import QuietmaxError
from quietmax.ledger.accounts import AccountState
from quietmax.server import dashboard, metrics
from quietmax.server.codec import INPUT, LABEL, PROBABILITIES
from quietmax.server.deployment import Deployment, currency_name, shown_cost
from quietmax.server.errors import HttpError
from quietmax.server.inference import InferenceGate, unforeseen
from quietmax.server.openapi import describe, refusals, responses
from quietmax.server.service import Service

EXTENSIONS = ["binary_tensor_data", "privacy_budget"]


def application(service: Service) -> ASGIApp:
    """The ASGI application for a service: the fast inference path in front of FastAPI."""
    return InferenceGate(documented_application(service), service)


def documented_application(service: Service) -> FastAPI:
    """All endpoints, with their OpenAPI document at /openapi.json."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    app = FastAPI(
        title="Quietmax",
        version=__version__,
        description="Private predictions over the Open Inference Protocol v2, with a budget that cannot be overspent.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    _handle_refusals(app, service)
    _add_health(app, service)
    _add_models(app, service)
    dashboard.add(app, service)
    describe(app)
    return app


def _handle_refusals(app: FastAPI, service: Service) -> None:
    async def refused(_: Request, refusal: Exception) -> Response:
        assert isinstance(refusal, HttpError)
        return JSONResponse(refusal.to_json(), refusal.status, refusal.headers)

    async def unknown(_: Request, problem: Exception) -> Response:
        assert isinstance(problem, HTTPException)
        sentence = {
            404: "There is no such page; see /openapi.json for those there are.",
            405: "This page does not take that method; see /openapi.json for those it takes.",
        }.get(problem.status_code, str(problem.detail))
        return JSONResponse({"error": sentence}, problem.status_code, problem.headers)

    async def malformed(_: Request, __: Exception) -> Response:
        return JSONResponse(
            {"error": "The request does not have the form the API describes; see /openapi.json."}, 400
        )

    async def failed(_: Request, problem: Exception) -> Response:
        service.log.event("failed", kind=type(problem).__name__)
        return JSONResponse(unforeseen().to_json(), 500)

    app.add_exception_handler(HttpError, refused)
    app.add_exception_handler(HTTPException, unknown)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(Exception, failed)


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/v2", tags=["server"], responses=responses("ServerMetadata", 503))
    async def server_metadata() -> Response:
        """The server's name, version and extensions."""
        return JSONResponse({"name": "quietmax", "version": __version__, "extensions": EXTENSIONS})

    @app.get("/v2/health/live", tags=["server"], responses=responses("Live"))
    async def live() -> Response:
        """Whether the process runs."""
        return JSONResponse({"live": True})

    @app.get("/v2/health/ready", tags=["server"], responses=responses("Ready", 503))
    async def ready() -> Response:
        """Whether questions would be answered: the ledger can be reached and written."""
        return await _ready(service)

    @app.get("/metrics", tags=["server"], responses=refusals(401, 403, 503))
    async def prometheus(request: Request) -> Response:
        """Counters for Prometheus; any key may read them, also while the ledger is away."""
        await service.access.caller(request.scope["headers"], as_last_known=True)
        try:
            accounts = await service.look(service.ledger.accounts)
        except QuietmaxError:
            accounts = None
        return Response(service.metrics.page(accounts), media_type=metrics.CONTENT_TYPE)


async def _ready(service: Service) -> Response:
    why = await service.unready()
    if why is not None:
        return JSONResponse({"error": why}, 503, {"retry-after": "1"})
    return JSONResponse({"ready": True})


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v2/models", tags=["models"], responses=responses("ModelList", 401, 403, 503))
    async def models(request: Request) -> Response:
        """All models and versions."""
        await service.access.caller(request.scope["headers"])
        return JSONResponse(
            {
                "models": [
                    {"name": deployment.name, "version": deployment.version}
                    for deployment in service.deployments
                ]
            }
        )

    async def metadata(request: Request, name: str, version: str | None) -> Response:
        await service.access.caller(request.scope["headers"])
        deployment = service.deployment(name, version)
        return JSONResponse(model_metadata(service, deployment, await service.account(deployment)))

    async def model_ready(request: Request, name: str, version: str | None) -> Response:
        await service.access.caller(request.scope["headers"])
        service.deployment(name, version)
        return await _ready(service)

    async def budget(request: Request, name: str, version: str | None) -> Response:
        caller = await service.access.caller(request.scope["headers"])
        return JSONResponse(await service.budget(service.deployment(name, version), caller))

    async def infer(_request: Request, _name: str, _version: str | None) -> Response:
        raise HttpError(404, "There is no such model or version; see GET /v2/models for those there are.")

    usual = (401, 403, 404, 503)
    for ending, handler, schema, what in (
        ("", metadata, "ModelMetadata", "What a model takes, gives, costs and promises."),
        ("/ready", model_ready, "Ready", "Whether this model would answer."),
        (
            "/budget",
            budget,
            "Budget",
            "What is spent and left of the budget behind a model (privacy_budget).",
        ),
    ):
        _add_both(app, ending, handler, "GET", responses(schema, *usual), what)
    _add_both(
        app,
        "/infer",
        infer,
        "POST",
        responses("InferenceResponse", 400, 401, 403, 404, 408, 409, 413, 415, 422, 503),
        "Private answers to rows of features. A refusal spends nothing; an exhausted budget is 403 with `remaining`.",
    )


Handler = Callable[[Request, str, str | None], Awaitable[Response]]


def _add_both(
    app: FastAPI, ending: str, handler: Handler, method: str, told: dict[int | str, Any], what: str
) -> None:
    """A path with and without a version."""

    async def newest(request: Request, name: str) -> Response:
        return await handler(request, name, None)

    async def versioned(request: Request, name: str, version: str) -> Response:
        return await handler(request, name, version)

    for path, endpoint in ((f"/v2/models/{{name}}{ending}", newest), (_versioned(ending), versioned)):
        app.add_api_route(
            path,
            endpoint,
            methods=[method],
            tags=["models"],
            responses=told,
            description=what,
            operation_id=f"{method.lower()}{path}",
            response_model=None,
        )


def _versioned(ending: str) -> str:
    return f"/v2/models/{{name}}/versions/{{version}}{ending}"


def model_metadata(service: Service, deployment: Deployment, account: AccountState) -> dict[str, Any]:
    """The v2 metadata of a model; its guarantee, cost and classes stand in the parameters."""
    servable = deployment.servable
    outputs: list[dict[str, Any]] = [{"name": LABEL, "datatype": "INT64", "shape": [-1]}]
    if servable.releases_probabilities:
        outputs.append({"name": PROBABILITIES, "datatype": "FP32", "shape": [-1, len(servable.classes)]})
    total = account.total
    parameters: dict[str, Any] = {
        "classes": list(servable.classes),
        "kind": servable.kind,
        "mechanism": servable.mechanism,
        "guarantee_status": deployment.status,
        "guarantee": deployment.guarantee(account).to_json(),
        "currency": currency_name(total),
        "cost_per_answer": shown_cost(total, deployment.unit_cost),
        "paid_at_training": deployment.unit_cost == 0,
    }
    if deployment.warning is not None:
        parameters["warning"] = deployment.warning
    # one that was read off the records is not public, and stays here
    if servable.encoding is not None and not servable.encoding.inferred:
        parameters["encoding"] = json.loads(servable.encoding.to_json())
    return {
        "name": deployment.name,
        "versions": service.deployments.versions(deployment.name),
        "platform": f"quietmax_{servable.kind}",
        "inputs": [{"name": INPUT, "datatype": "FP32", "shape": [-1, servable.inputs]}],
        "outputs": outputs,
        "parameters": parameters,
    }

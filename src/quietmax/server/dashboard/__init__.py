"""The dashboard: server-rendered pages with a little JavaScript; no external resources."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import orjson
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from jinja2 import Environment, FileSystemLoader, select_autoescape

from quietmax.ledger.accounts import AccountState
from quietmax.ledger.ledger import SpendingPoint
from quietmax.server.auth import SESSION_SECONDS, Caller, from_another_site
from quietmax.server.codec import LABEL, PROBABILITIES, Query, unpacked
from quietmax.server.deployment import Deployment, budget_json, currency_name, shown_cost
from quietmax.server.errors import HttpError, bad_request, unfit
from quietmax.server.openapi import refusals, responses
from quietmax.server.repository import LARGEST_VALUE
from quietmax.server.service import Service

COOKIE = "quietmax_session"
_WIDTH, _HEIGHT = 600, 160
_MOST_BYTES = 2**20
_PAGE: dict[str, Any] = {
    "description": "The page to log in.",
    "content": {"text/html": {"schema": {"type": "string"}}},
}
_templates = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=select_autoescape(default=True),
    trim_blocks=True,
    lstrip_blocks=True,
)


def add(app: FastAPI, service: Service) -> None:
    """Add the pages to an application."""

    @app.get("/", tags=["dashboard"], response_class=HTMLResponse, responses=refusals(403, 503))
    async def page(request: Request) -> Response:
        """The dashboard, or the page to log in."""
        caller = await _caller(service, request)
        if caller is None:
            return _html("login.html", service, wrong=False)
        return _html("page.html", service, caller=caller, state=await state(service, caller))

    @app.post(
        "/login",
        tags=["dashboard"],
        status_code=303,
        responses={**refusals(403, 413, 503), 401: _PAGE, 303: {"description": "Logged in."}},
        response_class=Response,
        response_model=None,
    )
    async def login(request: Request) -> Response:
        """Open a session with a key, given as the form field `key`."""
        _same_origin(request)
        fields = parse_qs((await _body(request)).decode("utf-8", "replace"))
        try:
            cookie, caller = await service.access.login(fields.get("key", [""])[0])
        except HttpError as refusal:
            if refusal.status != 401:
                raise
            return _html("login.html", service, wrong=True, status=401)
        service.log.event("login", client=caller.client)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(
            COOKIE,
            cookie,
            max_age=SESSION_SECONDS,
            httponly=True,
            samesite="strict",
            secure=service.settings.secure_cookies,
        )
        return answer

    @app.post(
        "/logout",
        tags=["dashboard"],
        status_code=303,
        responses={**refusals(403), 303: {"description": "Logged out."}},
        response_class=Response,
        response_model=None,
    )
    async def logout(request: Request) -> Response:
        """End the session."""
        _same_origin(request)
        answer = RedirectResponse("/", 303)
        answer.delete_cookie(COOKIE)
        return answer

    @app.get("/state", tags=["dashboard"], responses=responses("DashboardState", 401, 403, 503))
    async def current_state(request: Request) -> Response:
        """What the dashboard shows, as JSON."""
        return JSONResponse(await state(service, await _known(service, request)))

    @app.post(
        "/try",
        tags=["dashboard"],
        responses=responses("InferenceResponse", 400, 401, 403, 404, 413, 422, 503),
    )
    async def try_it(request: Request) -> Response:
        """Ask one question from the dashboard; it costs what any question costs."""
        _same_origin(request)
        caller = await _known(service, request)
        deployment, query = _question(service, await _body(request))
        started = time.perf_counter()
        status = 500
        try:
            answer, parameters = await service.answer(deployment, query, caller)
            status = 200
        except HttpError as refusal:
            status = refusal.status
            raise
        finally:
            service.metrics.request(
                deployment.name, deployment.version, status, time.perf_counter() - started
            )
        outputs = unpacked(answer.rows)
        return JSONResponse(
            {
                "model_name": deployment.name,
                "model_version": deployment.version,
                "parameters": parameters,
                "outputs": [
                    {"name": name, "datatype": kind, "shape": list(outputs[name].shape), "data": data}
                    for name, kind in ((LABEL, "INT64"), (PROBABILITIES, "FP32"))
                    if name in outputs
                    for data in [outputs[name].reshape(-1).tolist()]
                ],
            }
        )


async def _caller(service: Service, request: Request) -> Caller | None:
    return await service.access.session(request.cookies.get(COOKIE), request.scope["headers"])


async def _known(service: Service, request: Request) -> Caller:
    caller = await _caller(service, request)
    if caller is None:
        raise HttpError(401, "The session has ended; log in again.")
    return caller


def _same_origin(request: Request) -> None:
    if from_another_site(request.scope["headers"]):
        raise HttpError(403, "This request came from another site; use the dashboard itself.")


async def _body(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > _MOST_BYTES:
            raise HttpError(413, f"The body is larger than {_MOST_BYTES} bytes; send less.")
    return b"".join(parts)


def _question(service: Service, body: bytes) -> tuple[Deployment, Query]:
    try:
        asked: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        asked = None
    if not isinstance(asked, dict) or not isinstance(asked.get("model"), str):
        raise bad_request("A trial is a JSON object with a model and its features; send one.")
    version = asked.get("version")
    if version is not None and not isinstance(version, str):
        raise bad_request("The version must be text; send it so, or leave it out.")
    deployment = service.deployment(asked["model"], version)
    features = asked.get("features")
    if not isinstance(features, list) or not {type(value) for value in features} <= {int, float}:
        raise unfit("The features must be a list of numbers; correct them.")
    with np.errstate(over="ignore"):
        row = np.array(features, dtype=np.float64)
    if row.shape != (deployment.servable.inputs,) or not (np.abs(row) <= LARGEST_VALUE).all():
        raise unfit(
            f"The model takes {deployment.servable.inputs} finite numbers, but {row.size} were given; correct them."
        )
    outputs = ((LABEL, False), (PROBABILITIES, False))
    return deployment, Query(row.astype(np.float32)[None] + np.float32(0), None, outputs)


def _html(template: str, service: Service, status: int = 200, **values: Any) -> Response:
    nonce = secrets.token_urlsafe(16)
    content = _templates.get_template(template).render(nonce=nonce, settings=service.settings, **values)
    policy = (
        f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'; img-src data:"
    )
    return HTMLResponse(
        content,
        status,
        {
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "same-origin",
            "cache-control": "no-store",
        },
    )


async def state(service: Service, caller: Caller) -> dict[str, Any]:
    """What the dashboard shows: models with their privacy cards, accounts with who spent what and when."""
    names = sorted({deployment.account.name for deployment in service.deployments})
    accounts: dict[str, AccountState] = {
        name: await service.look(service.ledger.account, name) for name in names
    }
    return {
        "client": caller.client,
        "admin": caller.admin,
        "ready": await service.unready() is None,
        "models": [
            _model(service, deployment, accounts[deployment.account.name])
            for deployment in service.deployments
        ],
        "accounts": [await _account(service, account, caller) for account in accounts.values()],
    }


def _model(service: Service, deployment: Deployment, account: AccountState) -> dict[str, Any]:
    servable = deployment.servable
    guarantee = deployment.guarantee(account)
    latency = service.metrics.latency(deployment.label)
    return {
        "name": deployment.name,
        "version": deployment.version,
        "kind": servable.kind,
        "mechanism": servable.mechanism,
        "dataset": servable.dataset,
        "classes": list(servable.classes),
        "inputs": servable.inputs,
        "account": account.name,
        "status": deployment.status,
        "guarantee": str(guarantee).removesuffix(guarantee.because).strip(),
        "because": guarantee.because,
        "assumptions": list(guarantee.assumptions),
        "warning": deployment.warning,
        "currency": currency_name(account.total),
        "cost_per_answer": shown_cost(account.total, deployment.unit_cost),
        "latency": None
        if latency is None
        else {name: round(1000 * value, 1) for name, value in latency.items()},
    }


async def _account(service: Service, account: AccountState, caller: Caller) -> dict[str, Any]:
    parts = await service.look(service.ledger.subaccounts, account)
    curve = await service.look(service.ledger.spending_history, account)
    unproven = await service.look(service.ledger.unproven_models, account)
    told = budget_json(account, parts, caller.client, caller.admin)
    told["refused"] = sum(part.refused for part in parts)
    told["unproven_models"] = [f"{model} ({status})" for model, status in unproven]
    now = time.time_ns() // 1000
    told["curve"] = _polyline(curve, account.limit_units, now)
    told["from"], told["to"] = (curve[0].time // 1000, now // 1000) if curve else (0, 0)
    return told


def _polyline(curve: list[SpendingPoint], limit: int, now: int) -> str:
    """The spending curve up to now as steps, for an SVG polyline of `_WIDTH` by `_HEIGHT`."""
    if not curve:
        return ""
    start, span = curve[0].time, max(now - curve[0].time, curve[-1].time - curve[0].time, 1)
    points: list[str] = []
    before = float(_HEIGHT)
    for point in curve:
        across = _WIDTH * (point.time - start) / span
        height = _HEIGHT * (1 - (point.spent_units / limit if limit else 1.0))
        points += [f"{across:.1f},{before:.1f}", f"{across:.1f},{height:.1f}"]
        before = height
    points.append(f"{_WIDTH},{before:.1f}")
    return " ".join(points)

"""The dashboard: server-rendered pages with a little JavaScript, and no external resources."""

from __future__ import annotations

import secrets
import time
from datetime import UTC
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quietmax.accounting.guarantee import Guarantee, Status
from quietmax.data.cells import as_string, parse_date
from quietmax.data.encoding import (
    BooleanColumn,
    CategoricalColumn,
    Column,
    DateColumn,
    Encoding,
    NumericColumn,
)
from quietmax.ledger.accounts import AccountState, SpendingPoint, Use
from quietmax.server.auth import Caller
from quietmax.server.deployment import Deployment, _version_order
from quietmax.server.service import Service, _cost_amount, _remaining_answers
from quietmax.server.telemetry import Headers

if TYPE_CHECKING:
    from jinja2 import Environment

Html = tuple[Headers, bytes]
"""Headers and body of a page."""
_CHART_WIDTH, _CHART_HEIGHT = 600, 160
_MAX_BATCH_ROWS = 500
"""Rows of a CSV file that the page sends in one request."""


def _page(service: Service) -> Html:
    """Return the page: a form for an API key, and a script that fetches the contents with it."""
    max_rows = min(service.settings.max_rows, _MAX_BATCH_ROWS)
    return _html("page.html", max_rows=max_rows, anonymous=service.settings.anonymous)


async def _contents(service: Service, caller: Caller, *, live: bool) -> Html:
    """Return what the page shows: with `live` without the forms, which never change."""
    return _html(
        "contents.html",
        live=live,
        state=await _state(service, caller),
        columns={
            deployment.label: [_field(column, encoding) for column in encoding.columns]
            for deployment in service.deployments
            if (encoding := deployment.encoding) is not None
        },
    )


@lru_cache(maxsize=1)
def _templates() -> Environment:
    """Return the pages; the service starts without the library that reads them."""
    from jinja2 import Environment, FileSystemLoader, select_autoescape

    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=select_autoescape(default=True),
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _html(template: str, **values: Any) -> Html:
    nonce = secrets.token_urlsafe(16)
    content = _templates().get_template(template).render(nonce=nonce, **values)
    policy = (
        f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; "
        "form-action 'none'; base-uri 'none'; frame-ancestors 'none'; img-src data:"
    )
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "same-origin",
        "cache-control": "no-store",
    }
    return [(name.encode(), value.encode()) for name, value in headers.items()], content.encode()


async def _state(service: Service, caller: Caller) -> dict[str, Any]:
    """Return what the dashboard shows: models with their guarantees, accounts with who spent what and when."""
    names = sorted({deployment.account.name for deployment in service.deployments})
    accounts = {name: await service._read(service.ledger.account, name) for name in names}
    return {
        "client": caller.client,
        "admin": caller.admin,
        "ready": await service._readiness_error() is None,
        "models": [_model_state(each, accounts[each.account.name]) for each in _newest_first(service)],
        "accounts": [await _account_state(service, account, caller) for account in accounts.values()],
    }


def _newest_first(service: Service) -> list[Deployment]:
    """Return the models by name, the highest version of each first: it answers those who name none."""
    newest = sorted(service.deployments, key=lambda each: _version_order(each.version), reverse=True)
    return sorted(newest, key=lambda each: each.name)


def _model_state(deployment: Deployment, account: AccountState) -> dict[str, Any]:
    guarantee = deployment.total_guarantee(account)
    return {
        "name": deployment.name,
        "version": deployment.version,
        "kind": deployment.kind,
        "mechanism": deployment.mechanism,
        "dataset": deployment.dataset,
        "classes": list(deployment.classes),
        "inputs": deployment.inputs,
        "decision": deployment.decision if deployment.costs else None,
        "account": account.name,
        "status": guarantee.status,
        "grade": guarantee.grade,
        "protection": guarantee.protection,
        "guarantee": str(guarantee).removesuffix(guarantee.reason).strip(),
        "because": guarantee.reason,
        "unit": guarantee.unit,
        "protects": _protects(deployment),
        "in_words": guarantee.in_words(
            "the weights and all answers of this model"
            if deployment.cost is None
            else "everything that the budget of this account pays for"
        ),
        "assumptions": list(guarantee.assumptions),
        "warning": deployment.warning,
        "measure": account.total.measure,
        "cost_per_answer": _cost_amount(account.total, deployment.unit_cost),
        "answers_left": _remaining_answers(account.remaining_units, deployment.unit_cost or 1),
    }


def _protects(deployment: Deployment) -> str:
    if deployment.guarantee.unit == "record":
        return "one record"
    encoding = deployment.encoding
    if encoding is None or encoding.person is None:
        return "one person, with all rows of this person"
    return f"one person: all rows with the same value in column {encoding.person!r}"


def _account_words(account: AccountState, models: list[Deployment], unproven: set[str]) -> list[str]:
    """Return what the budget of an account with several models means once all of it is spent.

    `unproven` are the statuses of all models that were ever charged to it without a proven guarantee.
    """
    if len(models) < 2:
        return []
    if len({model.guarantee.unit for model in models}) > 1:
        return [
            "Some of these models protect records and others people, so no limit holds for all of them together."
        ]
    if any(model.cost is None and model.training_cost is None for model in models):
        return [
            "The guarantees of these models do not add up, so no limit is stated for all of them together."
        ]
    status: Status = "refuted" if "refuted" in unproven else "conditional" if unproven else "proven"
    total = Guarantee.of(
        account.limit,
        status=status,
        because="The ledger adds up what all models of an account cost.",
        unit=models[0].guarantee.unit,
    )
    return total.in_words("everything that all models of this account release, and their evaluations")


def _field(column: Column, encoding: Encoding) -> dict[str, Any]:
    """Return a column as a form field. What was inferred from the records is not public, and left out."""
    public, default = not encoding.inferred, dict(encoding.defaults).get(column.name)
    field: dict[str, Any] = {"name": column.name, "required": not column.missing, "type": "text"}
    if default is not None and public:
        field["default"] = _local_time(default) if isinstance(column, DateColumn) else default
    if isinstance(column, NumericColumn):
        field["type"] = "number"
        if public:
            field.update(low=as_string(column.low), high=as_string(column.high))
            field["hint"] = f"{column.low:,.12g} to {column.high:,.12g} {column.unit}".strip()
    elif isinstance(column, DateColumn):
        field["type"] = "date" if len(column.low) == 10 else "datetime-local"
        if public:
            field.update(low=_local_time(column.low), high=_local_time(column.high))
            field["hint"] = f"{column.low} to {column.high}"
    elif isinstance(column, BooleanColumn):
        field["choices"] = ["yes", "no"]
    elif isinstance(column, CategoricalColumn) and public:
        field["choices"] = list(column.categories)
    return field


def _local_time(bound: str) -> str:
    """Write the bound of a column of dates as an input of HTML does: in UTC, without an offset."""
    moment = parse_date(bound)
    if moment is None or len(bound) == 10:
        return bound
    in_utc = moment if moment.tzinfo is None else moment.astimezone(UTC).replace(tzinfo=None)
    return in_utc.isoformat(timespec="seconds")


async def _account_state(service: Service, account: AccountState, caller: Caller) -> dict[str, Any]:
    subaccounts = await service._read(service.ledger.subaccounts, account)
    history = await service._read(service.ledger.spending_history, account)
    unproven = await service._read(service.ledger.unproven_models, account)
    now = time.time_ns() // 1000
    models = [each for each in service.deployments if each.account.name == account.name]
    return {
        **await service._account_document(account, subaccounts, caller),
        "curves": _client_curves(await service.usage(account), account.opened, now) if caller.admin else {},
        "in_words": _account_words(account, models, {status for _, status in unproven}),
        "paid_at_training": all(model.unit_cost == 0 for model in models),
        "refused": sum(each.refused for each in subaccounts),
        "curve": _polyline(history, account.limit_units, now),
        "from": history[0].time // 1000 if history else 0,
        "to": now // 1000 if history else 0,
    }


def _client_curves(uses: list[Use], opened: int, now: int) -> dict[str, str]:
    """Return what each client spent over time, each as a share of what it spent by now."""
    found: dict[str, list[SpendingPoint]] = {}
    for use in sorted(uses, key=lambda use: use.last):
        points = found.setdefault(use.client, [SpendingPoint(opened, 0)])
        points.append(SpendingPoint(use.last, points[-1].spent_units + use.units))
    return {client: _polyline(points, points[-1].spent_units, now) for client, points in found.items()}


def _polyline(history: list[SpendingPoint], limit: int, now: int) -> str:
    """Return the spending up to now as steps: the points of an SVG polyline."""
    if not history:
        return ""
    start = history[0].time
    span = max(now - start, history[-1].time - start, 1)
    points: list[str] = []
    before = float(_CHART_HEIGHT)
    for point in history:
        x = _CHART_WIDTH * (point.time - start) / span
        y = _CHART_HEIGHT * (1 - (point.spent_units / limit if limit else 1.0))
        points += [f"{x:.1f},{before:.1f}", f"{x:.1f},{y:.1f}"]
        before = y
    points.append(f"{_CHART_WIDTH},{before:.1f}")
    return " ".join(points)

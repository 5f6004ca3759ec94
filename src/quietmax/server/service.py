"""The service behind the HTTP surface: offers, ledger, access, pipeline, metrics and log, together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from quietmax.errors import QuietmaxError
from quietmax.ledger.accounts import AccountState
from quietmax.ledger.ledger import Ledger
from quietmax.ledger.transactions import ChargeResult, Failed, InvalidKey, LimitExceeded, RequestIdReused
from quietmax.server.auth import Access, Caller
from quietmax.server.batching import Answer, Pipeline
from quietmax.server.codec import Query
from quietmax.server.deployment import (
    Deployment,
    Deployments,
    answers_left,
    budget_json,
    currency_name,
    shown_cost,
    shown_left,
)
from quietmax.server.errors import HttpError, unavailable
from quietmax.server.metrics import Log, Metrics
from quietmax.server.settings import Settings

P = ParamSpec("P")
Seen = TypeVar("Seen")
_READY_SECONDS = 3.0
_READY_FRESH_SECONDS = 0.2


class Service:
    """Answers queries and tells how it stands. `start` and `stop` belong to the event loop that serves."""

    def __init__(
        self,
        ledger: Ledger,
        deployments: Deployments,
        settings: Settings | None = None,
        log: Log | None = None,
    ) -> None:
        self.ledger = ledger
        self.deployments = deployments
        self.settings = settings or Settings()
        self.metrics = Metrics()
        self.log = log or Log()
        self.access = Access(ledger, self.settings)
        self._pipeline: Pipeline | None = None
        self._checked = (-1.0, "")

    async def start(self) -> None:
        """Begin to answer."""
        self._pipeline = Pipeline(self.ledger, self.settings)
        self.log.event("started", models=len(self.deployments), ledger=self.ledger.address)

    async def stop(self) -> None:
        """Answer what was charged, write what waits, and stop."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            await pipeline.close()
        await asyncio.to_thread(self.ledger.close)
        self.log.event("stopped")

    def deployment(self, name: str, version: str | None) -> Deployment:
        """The offer of that name and version, or 404."""
        found = self.deployments.find(name, version)
        if found is None:
            raise HttpError(404, "There is no such model or version; see GET /v2/models for those there are.")
        return found

    async def answer(
        self, deployment: Deployment, query: Query, caller: Caller
    ) -> tuple[Answer, dict[str, Any]]:
        """The answer to a query and the parameters that go with it; or a refusal that has spent nothing new."""
        if self._pipeline is None:
            raise unavailable("The service is starting or stopping; ask again in a second.")
        result = await self._pipeline.ask(deployment, query, caller)
        if not isinstance(result, Answer):
            raise _refusal(deployment, result)
        self.metrics.answers(
            deployment.name, deployment.version, result.answers, len(result.rows) - result.answers
        )
        return result, _parameters(deployment, result)

    async def unready(self) -> str | None:
        """Why the service is not ready, or None if it is. Asks the ledger, at most five times a second."""
        at, why = self._checked
        if time.monotonic() - at > _READY_FRESH_SECONDS:
            why = await self._check()
            self._checked = (time.monotonic(), why)
        return why or None

    async def _check(self) -> str:
        if self._pipeline is None:
            return "The service is starting or stopping."
        try:
            await asyncio.wait_for(asyncio.to_thread(self.ledger.ping), _READY_SECONDS)
        except TimeoutError:
            return "The ledger does not answer."
        except QuietmaxError as problem:
            return str(problem)
        return ""

    async def account(self, deployment: Deployment) -> AccountState:
        """The offer's account as it stands."""
        return await self.look(self.ledger.account, deployment.account.name)

    async def look(self, function: Callable[P, Seen], *arguments: P.args, **named: P.kwargs) -> Seen:
        """Read something from the ledger in a thread; 503 if that fails."""
        try:
            return await asyncio.wait_for(
                asyncio.to_thread(function, *arguments, **named), self.settings.seconds
            )
        except (QuietmaxError, TimeoutError) as problem:
            raise unavailable(str(problem) or "The ledger does not answer; ask again later.") from problem

    async def budget(self, deployment: Deployment, caller: Caller) -> dict[str, Any]:
        """What is spent and left of the account behind a model."""
        account = await self.account(deployment)
        parts = await self.look(self.ledger.subaccounts, account)
        unproven = await self.look(self.ledger.unproven_models, account)
        told = budget_json(account, parts, caller.client, caller.admin)
        mine = next((part for part in parts if part.client == caller.client), None)
        left = account.remaining_units
        if mine is not None and mine.limit_units is not None:
            left = min(left, mine.limit_units - mine.spent_units)
        if deployment.unit_cost:
            told["cost_per_answer"] = shown_cost(account.total, deployment.unit_cost)
            told["remaining_answers"] = answers_left(left, deployment.unit_cost)
            told["note"] = (
                "Every new answer is paid for; a stored answer to an identical query costs nothing."
            )
        else:
            told["cost_per_answer"] = 0.0
            told["remaining_answers"] = None
            told["note"] = "All of it was paid at training: any number of answers, at no further cost."
        told["unproven_models"] = [f"{model} ({status})" for model, status in unproven]
        return told


def _parameters(deployment: Deployment, answer: Answer) -> dict[str, Any]:
    total = deployment.account.total
    told: dict[str, Any] = {
        "guarantee_status": deployment.status,
        "currency": currency_name(total),
        "cost": shown_cost(total, answer.units),
        "new_answers": answer.answers,
    }
    if answer.remaining_units is None:
        told["paid_at_training"] = True
    else:
        told["remaining"] = shown_left(total, answer.remaining_units)
        told["remaining_answers"] = answers_left(answer.remaining_units, deployment.unit_cost)
    if deployment.warning is not None:
        told["warning"] = deployment.warning
    return told


def _refusal(deployment: Deployment, outcome: ChargeResult) -> HttpError:
    if isinstance(outcome, LimitExceeded):
        total = deployment.account.total
        left = answers_left(outcome.remaining_units, deployment.unit_cost)
        whose = "the budget of these records" if outcome.limit == "budget" else "your quota"
        return HttpError(
            403,
            f"{outcome.units // deployment.unit_cost} new answers were asked for, but {whose} pays for {left} more; nothing "
            "was spent, ask for fewer or ask the owner of the records.",
            {"remaining": shown_left(total, outcome.remaining_units), "remaining_answers": left},
        )
    if isinstance(outcome, RequestIdReused):
        return HttpError(
            409, "This request id was used for another request; nothing was spent, choose a new id."
        )
    if isinstance(outcome, InvalidKey):
        return HttpError(
            401,
            "The key was revoked or has expired; ask the administrator for a new one.",
            headers={"www-authenticate": "Bearer"},
        )
    assert isinstance(outcome, Failed)
    return unavailable(str(outcome.error))

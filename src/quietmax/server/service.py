"""The service behind the HTTP routes: deployments, ledger, authentication, pipeline, metrics and log together."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, TypeVar

from quietmax.accounting.costs import LIMIT, Cost, PureCost, epsilon_of
from quietmax.errors import QuietmaxError, counted
from quietmax.estimators.figures import threshold_of
from quietmax.ledger.accounts import AccountState, Subaccount, Use
from quietmax.ledger.ledger import Ledger
from quietmax.ledger.transactions import ChargeResult, Failed, InvalidKey, LimitExceeded, RequestIdReused
from quietmax.mechanisms.base import Answers
from quietmax.server.auth import Authenticator, Caller
from quietmax.server.batching import Pipeline, Reply
from quietmax.server.codec import (
    INPUT,
    LABEL,
    PROBABILITIES,
    REASONS,
    InferenceRequest,
    _encode_response,
    _output_datatypes,
    _takes_encoded_rows,
)
from quietmax.server.deployment import Deployment, ModelRepository, _version_order
from quietmax.server.errors import HttpError, _from_ledger, _internal_error, _ledger_error
from quietmax.server.protocol import BodyMemory
from quietmax.server.settings import Settings
from quietmax.server.telemetry import Log, Metrics, Record, _spent_fraction

P = ParamSpec("P")
T = TypeVar("T")
AUDITED = (401, 403, 404)
"""Refused requests with these statuses are always logged."""
_READY_TIMEOUT = 3.0
_READY_FRESH_SECONDS = 0.2
_ROUNDING = 2.0**-50


class Service:
    """Answers inference requests and describes its models and budgets.

    `start` and `stop` must be called in the event loop that serves.

    Parameters
    ----------
    ledger : Ledger
        Charges requests; it is closed by `stop`.
    deployments : iterable of Deployment
        The models to serve, as `deploy` returns them.
    settings : Settings or None
        Limits and options. None: the defaults.
    log : Log or None
        Where to write events. None: standard error.
    metrics : Metrics or None
        Counters, from `quietmax.server.run.supervise`. None: those of this process.
    repository : ModelRepository or None
        Further models, already bound. None: there are no others than `deployments`.

    Attributes
    ----------
    auth : Authenticator
        Finds out who sends a request.
    metrics : Metrics
        Counters of the service.
    bodies : BodyMemory
        Counts the bytes of request bodies.

    Examples
    --------
    Train a head, save it, serve it and send two queries:

    >>> import io, tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> from quietmax import PrivateHead
    >>> from quietmax.estimators import save_private
    >>> from quietmax.ledger import Ledger
    >>> from quietmax.models.features import Identity
    >>> from quietmax.server import Client, Settings
    >>> from quietmax.server.deployment import deploy, load_models
    >>> from quietmax.server.telemetry import Log
    >>> from quietmax.server.run import run_in_thread
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(300, 2))
    >>> head = PrivateHead(1.0, 1e-5, features=Identity(), declared_size=300, classes=[0, 1])
    >>> with tempfile.TemporaryDirectory() as place:
    ...     folder = save_private(head.fit(X, X[:, 0] > 0), Path(place) / "sign", dataset="points")
    ...     ledger = Ledger(Path(place) / "ledger.sqlite")
    ...     deployments = deploy(ledger, load_models([str(folder)]))
    ...     service = Service(ledger, deployments, Settings(anonymous=True), Log(io.BytesIO()))
    ...     with run_in_thread(service) as url, Client(url) as client:
    ...         response = client.infer("sign", [[-1.0, 0.0], [1.0, 0.0]])
    >>> response.labels.shape, response.parameters["cost"]
    ((2,), 0.0)
    """

    def __init__(
        self,
        ledger: Ledger,
        deployments: Iterable[Deployment],
        settings: Settings | None = None,
        log: Log | None = None,
        metrics: Metrics | None = None,
        repository: ModelRepository | None = None,
    ) -> None:
        self.ledger = ledger
        self.settings = settings or Settings()
        self.metrics = metrics or Metrics()
        self.log = log or Log()
        self.auth = Authenticator(ledger, self.settings)
        self.bodies = BodyMemory(self.settings.max_body_memory)
        self._fixed = list(deployments)
        self._repository = repository
        self._reloading = asyncio.Lock()
        self._use_models()
        self._pipeline: Pipeline | None = None
        self._usage: dict[int, tuple[int, dict[tuple[str, str, int], Use]]] = {}
        self._checked: tuple[float, str | None] = (-1.0, None)
        self._request_prefix = secrets.token_hex(4)
        self._request_count = itertools.count()

    def _use_models(self) -> None:
        """Serve what the repository has. Requests in flight keep the model that they began with."""
        models = [] if self._repository is None else self._repository.deployments
        self.deployments = [*self._fixed, *models]

    async def start(self) -> None:
        """Start to answer requests."""
        await self._reload()
        self._pipeline = Pipeline(self.ledger, self.settings)
        self.log.event("started", models=len(self.deployments), ledger=self.ledger.address)

    async def stop(self) -> None:
        """Answer the requests in flight, close the ledger, and stop."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            await pipeline._close()
        await asyncio.to_thread(self.ledger.close)
        self.log.event("stopped")

    def _new_record(self, **known: Any) -> Record:
        """Return the record of a new request, with an id for the log and the header ``x-request-id``."""
        return Record(request=f"{self._request_prefix}-{next(self._request_count):x}", **known)

    @contextmanager
    def _recorded(self, record: Record, *, inference: bool = True) -> Iterator[Record]:
        """Log a request, and count it if it is for inference; another error than HttpError becomes a 500."""
        started = time.perf_counter()
        try:
            yield record
        except HttpError as error:
            record.status = error.status
            record.error = error.detail
            raise
        except Exception as error:
            self.log.failure(error, request=record.request)
            raise _internal_error() from error
        finally:
            seconds = time.perf_counter() - started
            if inference:
                self.metrics._count_request(*record.model, record.status, seconds)
            logged = inference and self.settings.request_log
            if logged or record.status in AUDITED or record.status >= 500:
                record._write(self.log, seconds)

    def deployment(self, name: str, version: str | None = None) -> Deployment:
        """Find a model by its name and version, by default the highest."""
        versions = [each for each in self.deployments if each.name == name]
        found = [each for each in versions if version in (None, each.version)]
        if found:
            return max(found, key=lambda each: _version_order(each.version))
        if version is not None and self._is_retired(name, version, versions):
            raise HttpError(
                410, f"Version {version} of this model is retired; without a version, the newest answers."
            )
        raise HttpError(404, "There is no such model or version. GET /v2/models lists all.")

    def _is_retired(self, name: str, version: str, served: list[Deployment]) -> bool:
        """Return whether a version was served before one that is, or is earlier in its series."""
        newest = max((_version_order(each.version) for each in served), default=[])
        seen = self._repository is not None and self._repository.has_seen(name, version)
        earlier = {str(past.version) for each in served for past in each.series}
        return (seen or version in earlier) and _version_order(version) < newest

    async def _reload(self) -> None:
        """Serve what is new in the model repository. What cannot be served is logged, and what was before it stays."""
        if self._repository is None:
            return
        async with self._reloading:
            before = self.deployments
            try:
                errors = await asyncio.to_thread(self._repository.refresh, self.ledger)
            except QuietmaxError as error:
                errors = {"": str(error)}
            self._use_models()
        for model in self.deployments:
            if model not in before:
                self.log.event("model_loaded", model=model.label)
        names, labels = ({getattr(model, of) for model in self.deployments} for of in ("name", "label"))
        for model in before:
            if model.label not in labels:
                self.log.event("model_unloaded", model=model.label if model.name in names else model.name)
        for name, problem in errors.items():
            self.log.event("model_failed", model=name, error=problem)

    async def infer(
        self, deployment: Deployment, request: InferenceRequest, caller: Caller
    ) -> tuple[Answers, dict[str, Any]]:
        """Answer an inference request: return the answers and the `parameters` of the response."""
        if self._pipeline is None:
            raise HttpError(503, "The service is starting or stopping.")
        result = await self._pipeline._infer(deployment, request, caller)
        if not isinstance(result, Reply):
            error = _charge_error(deployment, result)
            if caller.admin and isinstance(result, LimitExceeded) and result.limit == "budget":
                await self._name_users(error, deployment.account.name)
            raise error
        cached = len(request.rows) - result.new_answers
        self.metrics._count_answers(deployment.name, deployment.version, result.new_answers, cached)
        parameters = _response_parameters(deployment, result)
        if request.unknown:
            parameters["unknown_values"] = sum(request.unknown.values())
            parameters["unknown_columns"] = ", ".join(request.unknown)
        return result.answers, parameters

    async def _answer(
        self, deployment: Deployment, request: InferenceRequest, caller: Caller
    ) -> tuple[bytes, int | None]:
        """Answer an inference request; return the encoded response, see `_encode_response`."""
        answers, parameters = await self.infer(deployment, request, caller)
        head: dict[str, Any] = {
            "model_name": deployment.name,
            "model_version": deployment.version,
            "parameters": parameters,
        }
        if request.id is not None:
            head["id"] = request.id
        return _encode_response(head, request, answers, deployment)

    async def _readiness_error(self) -> str | None:
        """Return why the service is not ready; None if it is. Asks the ledger at most five times a second."""
        checked_at, message = self._checked
        if time.monotonic() - checked_at > _READY_FRESH_SECONDS:
            message = None
            if self._pipeline is None:
                message = "The service is starting or stopping."
            else:
                try:
                    await _from_ledger(_READY_TIMEOUT, self.ledger.ping)
                except HttpError as error:
                    self.log.event("not_ready", error=error.detail or error.message)
                    message = error.message
            self._checked = (time.monotonic(), message)
        return message

    async def _read(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call a function that reads from the ledger, in a thread."""
        return await _from_ledger(self.settings.timeout, function, *arguments, **named)

    async def metadata(self, deployment: Deployment) -> dict[str, Any]:
        """Describe a model for the metadata endpoint."""
        account = await self._read(self.ledger.account, deployment.account.name)
        encoding = deployment.encoding
        encoded = {"name": INPUT, "datatype": "FP32", "shape": [-1, deployment.inputs]}
        inputs: list[dict[str, Any]] = [encoded]
        if encoding is not None:
            inputs = [
                {"name": column.name, "datatype": column.datatype, "shape": [-1]}
                for column in encoding.columns
            ]
        summands = [] if deployment.additive is None else list(deployment.additive.summands)
        classes = len(deployment.classes)
        shapes = {LABEL: [-1], PROBABILITIES: [-1, classes], REASONS: [-1, len(summands), classes]}
        outputs = [
            {"name": name, "datatype": datatype, "shape": shapes[name]}
            for name, datatype in _output_datatypes(deployment).items()
        ]
        guarantee = deployment.total_guarantee(account)
        parameters: dict[str, Any] = {
            "classes": list(deployment.classes),
            "kind": deployment.kind,
            "mechanism": deployment.mechanism,
            "guarantee_status": guarantee.status,
            "guarantee_strength": guarantee.strength,
            "guarantee": _without_seeds(guarantee.to_json()),
            "measure": account.total.measure,
            "cost_per_answer": _cost_amount(account.total, deployment.unit_cost),
            "paid_at_training": deployment.unit_cost == 0,
            "max_rows": self.settings.max_rows,
        }
        if summands:
            parameters["reasons"] = summands
        if deployment.decision is not None:
            parameters["decision"] = deployment.decision
            if classes == 2:
                parameters["threshold"] = threshold_of(deployment.costs)
            parameters["costs"] = deployment.costs
        if deployment.warning is not None:
            parameters["warning"] = deployment.warning
        if deployment.series:
            parameters["series"] = self._series(deployment)
        if encoding is not None and _takes_encoded_rows(encoding):
            parameters["encoded_input"] = encoded
        # An encoding that was inferred from the records is not public.
        if encoding is not None and not encoding.inferred:
            parameters["encoding"] = json.loads(encoding.to_json())
            if deployment.additive is not None:
                parameters["effects"] = await asyncio.to_thread(lambda: deployment.effects)
        return {
            "name": deployment.name,
            "versions": sorted(
                (each.version for each in self.deployments if each.name == deployment.name),
                key=_version_order,
            ),
            "platform": f"quietmax_{deployment.kind}",
            "inputs": inputs,
            "outputs": outputs,
            "parameters": parameters,
        }

    def _series(self, deployment: Deployment) -> dict[str, Any]:
        """Describe the series of a version: what each cost the people of its cohort, and what all together cost."""
        served = {each.version for each in self.deployments if each.name == deployment.name}
        versions = [{**each.to_json(), "served": str(each.version) in served} for each in deployment.series]
        return {"rule": deployment.cohorts, "mu": deployment.guarantee.mu, "versions": versions}

    async def usage(self, account: AccountState) -> list[Use]:
        """Return what each client spent on each model by the hour; reads what is new in the journal."""
        until, known = self._usage.get(account.id, (0, {}))
        if until < account.sequence:
            known = dict(known)
            for new in await self._read(self.ledger.usage, account, until):
                old = known.get(new[:3], new._replace(units=0))
                known[new[:3]] = old._replace(last=new.last, units=old.units + new.units)
            self._usage[account.id] = account.sequence, known
        names = await self._read(self.ledger.client_names)
        return [use._replace(client=names.get(use.client, use.client)) for use in known.values()]

    async def _name_users(self, error: HttpError, name: str) -> None:
        """Add to an error for an administrator what has used up the budget; the error stays as it is if that fails."""
        with suppress(HttpError):
            account = await self._read(self.ledger.account, name)
            if used := _used_by(await self.usage(account), account):
                most = used[0]
                share, since = f"{100 * most['spent_fraction']:.1f}%", _utc(most["since"])
                of_model = f" for {most['model']}" if most["model"] else ""
                error.message += (
                    f" Most was used by client {most['client']}{of_model}: {share} since {since}."
                )
                error.extra["used_by"] = used

    async def budget(self, deployment: Deployment, caller: Caller) -> dict[str, Any]:
        """Describe the budget behind a model, with the caller's own spending; an administrator sees all clients'."""
        account = await self._read(self.ledger.account, deployment.account.name)
        subaccounts = await self._read(self.ledger.subaccounts, account)
        document = await self._account_document(account, subaccounts, caller)
        remaining = account.remaining_units
        own = next((each for each in subaccounts if each.client == caller.client), None)
        if own is not None and own.limit_units is not None:
            remaining = min(remaining, own.limit_units - own.spent_units)
        if deployment.unit_cost:
            document["cost_per_answer"] = _cost_amount(account.total, deployment.unit_cost)
            document["remaining_answers"] = _remaining_answers(remaining, deployment.unit_cost)
            document["note"] = "Each new answer is charged. Cached answers to identical queries are free."
        else:
            document["cost_per_answer"] = 0.0
            document["remaining_answers"] = None
            document["note"] = "Training was charged. Any number of answers is free."
        return document

    async def _account_document(
        self, account: AccountState, subaccounts: list[Subaccount], caller: Caller
    ) -> dict[str, Any]:
        """Describe an account and who spent what of it, as far as the caller may see it."""
        limit = account.limit_units
        total = _amount(account.total, limit)
        unproven = await self._read(self.ledger.unproven_models, account)
        used = {"used_by": _used_by(await self.usage(account), account)} if caller.admin else {}
        return {
            **used,
            "account": account.name,
            "measure": account.total.measure,
            "terms": account.terms.to_json(),
            "total": total,
            "spent": min(_cost_amount(account.total, account.spent_units), total),
            "remaining": _remaining_amount(account.total, account.remaining_units),
            "spent_fraction": _spent_fraction(account),
            "spent_in_epsilon": await asyncio.to_thread(_spent_in_epsilon, account),
            "unproven_models": [f"{model} ({status})" for model, status in unproven],
            "clients": [
                {
                    "client": each.client,
                    "spent_fraction": _fraction(each.spent_units, limit),
                    "quota_fraction": None
                    if each.limit_units is None
                    else _fraction(each.limit_units, limit),
                    "refused": each.refused,
                }
                for each in subaccounts
                if caller.admin or each.client == caller.client
            ],
        }


def _used_by(uses: list[Use], account: AccountState) -> list[dict[str, Any]]:
    """Return which client has spent how much on which model, and since when; those that spent most first."""
    found: dict[tuple[str, str], list[Use]] = {}
    for use in uses:
        found.setdefault((use.client, use.model), []).append(use)
    used = [
        {
            "client": client,
            "model": model,
            "since": min(use.first for use in each),
            "last": max(use.last for use in each),
            "spent_fraction": _fraction(sum(use.units for use in each), account.limit_units),
        }
        for (client, model), each in found.items()
    ]
    return sorted(used, key=lambda each: -each["spent_fraction"])


def _utc(microseconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(microseconds / 1e6))


def _without_seeds(record: Any) -> Any:
    """Return JSON values without any field `seed`: whoever knows the seed of the noise can subtract the noise."""
    if isinstance(record, dict):
        return {name: _without_seeds(value) for name, value in record.items() if name != "seed"}
    return [_without_seeds(value) for value in record] if isinstance(record, list) else record


def _cost_amount(total: Cost, units: int) -> float:
    """Return what units cost, rounded up: an epsilon for a pure total, a mu for a Gaussian one."""
    return _amount(total, units) * (1 + _ROUNDING)


def _remaining_amount(total: Cost, units: int) -> float:
    """Return what units are still worth, rounded down."""
    return _amount(total, max(units, 0)) * (1 - _ROUNDING)


def _amount(total: Cost, units: int) -> float:
    share = units / LIMIT
    return total.epsilon * share if isinstance(total, PureCost) else total.mu * math.sqrt(share)


def _remaining_answers(remaining_units: int, unit_cost: int) -> int:
    return max(remaining_units, 0) // unit_cost


def _fraction(units: int, limit: int) -> float:
    return units / limit if limit else 0.0


def _spent_in_epsilon(account: AccountState) -> float | None:
    """Return what was spent as an epsilon at the delta of the terms; None if a mu has no such epsilon."""
    spent = account.spent
    if isinstance(spent, PureCost):
        return spent.epsilon
    if account.terms.delta == 0 or account.terms.analysis != "proven":
        return None
    return epsilon_of(spent.mu, account.terms.delta) if spent.mu else 0.0


def _response_parameters(deployment: Deployment, reply: Reply) -> dict[str, Any]:
    total = deployment.account.total
    parameters: dict[str, Any] = {
        "guarantee_status": deployment.status,
        "measure": total.measure,
        "cost": _cost_amount(total, reply.units),
        "new_answers": reply.new_answers,
    }
    if reply.remaining_units is None:
        parameters["paid_at_training"] = True
    else:
        parameters["remaining"] = _remaining_amount(total, reply.remaining_units)
        parameters["remaining_answers"] = _remaining_answers(reply.remaining_units, deployment.unit_cost)
    if deployment.warning is not None:
        parameters["warning"] = deployment.warning
    return parameters


def _charge_error(deployment: Deployment, result: ChargeResult) -> HttpError:
    if isinstance(result, LimitExceeded):
        left = _remaining_answers(result.remaining_units, deployment.unit_cost)
        requested = result.units // deployment.unit_cost
        limit = "Privacy budget" if result.limit == "budget" else "Quota of this client"
        remaining = _remaining_amount(deployment.account.total, result.remaining_units)
        return HttpError(
            403,
            f"{limit} exhausted: {counted(requested, 'answer')} requested, {left} left. Nothing was charged.",
            {"remaining": remaining, "remaining_answers": left},
        )
    if isinstance(result, RequestIdReused):
        return HttpError(409, "This request id was used for another request. Nothing was charged.")
    if isinstance(result, InvalidKey):
        return HttpError(401, "The API key was revoked or has expired, or the token has expired.")
    assert isinstance(result, Failed)
    return _ledger_error(result.error)

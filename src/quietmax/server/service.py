"""The service behind the HTTP routes: deployments, ledger, authentication, pipeline, metrics and log together."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from quietmax.accounting.costs import LIMIT, Cost, PureCost, epsilon_of
from quietmax.errors import LedgerUnavailable, QuietmaxError, counted
from quietmax.ledger.accounts import AccountState, Subaccount
from quietmax.ledger.ledger import Ledger
from quietmax.ledger.transactions import ChargeResult, Failed, InvalidKey, LimitExceeded, RequestIdReused
from quietmax.mechanisms.base import Answers
from quietmax.server.auth import Authenticator, Caller
from quietmax.server.batching import Pipeline, Reply
from quietmax.server.body_memory import BodyMemory
from quietmax.server.codec import (
    INPUT,
    LABEL,
    InferenceRequest,
    column_datatype,
    output_datatypes,
    takes_encoded_rows,
)
from quietmax.server.deployment import Deployment, version_order
from quietmax.server.errors import HttpError, ledger_error, no_such_model, unauthorized, unavailable
from quietmax.server.log import Log
from quietmax.server.metrics import Metrics
from quietmax.server.model_control import ModelControl
from quietmax.server.settings import Settings
from quietmax.server.telemetry import Telemetry

P = ParamSpec("P")
T = TypeVar("T")
_READY_TIMEOUT = 3.0
_READY_FRESH_SECONDS = 0.2
_ROUNDING = 2.0**-50
_FOLLOW_SECONDS = 0.2
_FOLLOW_RETRY_SECONDS = 2.0


class _ModelSet:
    """Models by name and version. It never changes: another set takes its place at once."""

    def __init__(self, deployments: list[Deployment]) -> None:
        self.deployments = deployments
        ordered = sorted(deployments, key=lambda deployment: version_order(deployment.version))
        self.by_version = {(each.name, each.version): each for each in ordered}
        self.highest = {each.name: each for each in ordered}


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
        Counters, from `quietmax.server.supervisor.supervise`. None: those of this process.
    control : ModelControl or None
        Loads and unloads further models. `deployments` must hold those of `ModelControl.start`, with their accounts.

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
    >>> from quietmax.server import Client, Settings, deploy, load_models
    >>> from quietmax.server.log import Log
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
        control: ModelControl | None = None,
    ) -> None:
        self.ledger = ledger
        bound = list(deployments)
        self.settings = settings or Settings()
        self.metrics = metrics or Metrics()
        self.log = log or Log()
        self.auth = Authenticator(ledger, self.settings)
        self.bodies = BodyMemory(self.settings.max_body_memory)
        self.telemetry: Telemetry | None = None
        self._control = control
        self._models = _ModelSet(bound)
        if control is not None:
            control.serve(ledger, bound, self._use_models)
            loaded = {each.name for each in control.deployments}
            self._fixed = [each for each in bound if each.name not in loaded]
        self._pipeline: Pipeline | None = None
        self._following: asyncio.Task[None] | None = None
        # A change waits for the other workers. asyncio's own threads stay free for requests.
        self._changes = ThreadPoolExecutor(1, "models")
        self._checked = (-1.0, "")
        self._request_prefix = secrets.token_hex(4)
        self._request_count = itertools.count()

    @property
    def deployments(self) -> list[Deployment]:
        """The models that are served now."""
        return self._models.deployments

    def _use_models(self) -> None:
        """Serve what the model control has loaded. Requests in flight keep the model that they began with."""
        assert self._control is not None
        self._models = _ModelSet([*self._fixed, *self._control.deployments])

    async def start(self) -> None:
        """Start to answer requests."""
        if self.settings.telemetry:
            self.telemetry = Telemetry(self.ledger)
        self._pipeline = Pipeline(self.ledger, self.settings)
        if self._control is not None:
            self._control.confirm()
            self._following = asyncio.create_task(self._follow(self._control))
        self.log.event("started", models=len(self.deployments), ledger=self.ledger.address)

    async def stop(self) -> None:
        """Answer the requests in flight, close the ledger, and stop."""
        if self._following is not None:
            self._following.cancel()
        self._changes.shutdown(wait=False, cancel_futures=True)
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            await pipeline.close()
        if self.telemetry is not None:
            await asyncio.to_thread(self.telemetry.close)
        await asyncio.to_thread(self.ledger.close)
        self.log.event("stopped")

    def next_request_id(self) -> str:
        """Return a new id for a request, for the log and the header ``x-request-id``."""
        return f"{self._request_prefix}-{next(self._request_count):x}"

    def deployment(self, name: str, version: str | None = None) -> Deployment:
        """Find a model.

        Parameters
        ----------
        name : str
            Name of the model.
        version : str or None
            Version of the model. None: the highest.

        Raises
        ------
        HttpError
            404 if there is no such model.
        """
        models = self._models
        found = models.highest.get(name) if version is None else models.by_version.get((name, version))
        if found is None:
            raise no_such_model()
        return found

    def versions(self, name: str) -> list[str]:
        """List the versions of a model, the highest last.

        Parameters
        ----------
        name : str
            Name of the model.
        """
        return [version for known, version in self._models.by_version if known == name]

    async def repository_index(self, caller: Caller, *, ready: bool = False) -> list[dict[str, str]]:
        """Describe the models that are served or could be loaded.

        Parameters
        ----------
        caller : Caller
            Must be an administrator.
        ready : bool
            Leave out those that are not served.

        Returns
        -------
        list of dict
            ``name``, ``version``, ``state`` (``READY`` or ``UNAVAILABLE``) and ``reason`` of each version.

        Raises
        ------
        HttpError
            403 unless the caller is an administrator.
        """
        _check_administrator(caller)
        rows = [] if self._control is None else await asyncio.to_thread(self._control.index)
        listed = {(row["name"], row["version"]) for row in rows}
        rows += [
            {"name": each.name, "version": each.version, "state": "READY", "reason": ""}
            for each in self.deployments
            if (each.name, each.version) not in listed
        ]
        return [row for row in rows if row["state"] == "READY" or not ready]

    async def load_model(self, name: str, caller: Caller) -> None:
        """Load the highest version of a model from the model repository; the version before it goes afterwards.

        Parameters
        ----------
        name : str
            Name of the model.
        caller : Caller
            Must be an administrator.

        Raises
        ------
        HttpError
            403 unless the caller is an administrator; 404 if there is no such model; 400 if it cannot be served, and
            then everything stays as it was; 503 if the ledger or a worker does not follow.
        """
        control = self._checked_control(caller)
        bound = await self._controlled(control.load, name)
        self.log.event("model_loaded", model=bound.label, client=caller.client)

    async def unload_model(self, name: str, caller: Caller) -> None:
        """Stop serving a model of the model repository. Requests in flight are answered; nothing is refunded.

        Parameters
        ----------
        name : str
            Name of the model.
        caller : Caller
            Must be an administrator.

        Raises
        ------
        HttpError
            403 unless the caller is an administrator; 404 if there is no such model; 503 if a worker does not follow.
        """
        control = self._checked_control(caller)
        await self._controlled(control.unload, name)
        self.log.event("model_unloaded", model=name, client=caller.client)

    async def reload(self) -> None:
        """Load what is new in the model repository. What cannot be loaded is logged, and its old version stays."""
        if self._control is None:
            return
        loaded, failed = await asyncio.get_running_loop().run_in_executor(self._changes, self._control.reload)
        for label in loaded:
            self.log.event("model_loaded", model=label)
        for name, error in failed.items():
            self.log.event("model_failed", model=name, error=error)

    def _checked_control(self, caller: Caller) -> ModelControl:
        _check_administrator(caller)
        if self._control is None:
            raise HttpError(400, "The service has no model repository; the option `repository` names one.")
        return self._control

    async def _controlled(self, function: Callable[[str], T], name: str) -> T:
        """Change the models in a thread, one change after the other; errors become HTTP errors."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._changes, function, name)
        except (HttpError, LedgerUnavailable) as error:
            self.log.event("model_failed", model=name, error=str(error))
            raise (error if isinstance(error, HttpError) else ledger_error(error)) from error
        except QuietmaxError as error:
            self.log.event("model_failed", model=name, error=str(error))
            raise HttpError(400, str(error)) from error

    async def _follow(self, control: ModelControl) -> None:
        """Follow what other workers load and unload."""
        while True:
            await asyncio.sleep(_FOLLOW_SECONDS)
            try:
                if control.is_behind:
                    for error in await asyncio.to_thread(control.follow):
                        self.log.event("model_failed", error=error)
            except Exception as error:  # whatever it is, the next attempt may succeed
                self.log.failure(error)
                await asyncio.sleep(_FOLLOW_RETRY_SECONDS)

    async def infer(
        self, deployment: Deployment, request: InferenceRequest, caller: Caller
    ) -> tuple[Answers, dict[str, Any]]:
        """Answer an inference request.

        Parameters
        ----------
        deployment : Deployment
            The model that is asked.
        request : InferenceRequest
            The decoded request.
        caller : Caller
            Who is charged.

        Returns
        -------
        answers : Answers
            One answer for each row.
        parameters : dict
            The ``parameters`` of the response: cost, remaining budget and guarantee status.

        Raises
        ------
        HttpError
            If the request is not answered. 403: the budget or quota is exhausted, and nothing was charged.
        """
        if self._pipeline is None:
            raise unavailable("The service is starting or stopping.")
        result = await self._pipeline.infer(deployment, request, caller)
        if not isinstance(result, Reply):
            raise _charge_error(deployment, result)
        cached = len(request.rows) - result.new_answers
        self.metrics.count_answers(deployment.name, deployment.version, result.new_answers, cached)
        if self.telemetry is not None:
            self.telemetry.count_answers(deployment.name, deployment.version, result.new_answers, cached)
        parameters = _response_parameters(deployment, result)
        if request.unknown:
            parameters["unknown_values"] = sum(request.unknown.values())
            parameters["unknown_columns"] = ", ".join(request.unknown)
        return result.answers, parameters

    async def readiness_error(self) -> str | None:
        """Return why the service is not ready; None if it is. Asks the ledger at most five times a second."""
        checked_at, error = self._checked
        if time.monotonic() - checked_at > _READY_FRESH_SECONDS:
            error = await self._check_ready()
            self._checked = (time.monotonic(), error)
        return error or None

    async def _check_ready(self) -> str:
        if self._pipeline is None:
            return "The service is starting or stopping."
        try:
            await asyncio.wait_for(asyncio.to_thread(self.ledger.ping), _READY_TIMEOUT)
        except TimeoutError:
            return "The ledger does not respond."
        except QuietmaxError as error:
            failed = ledger_error(error)
            self.log.event("not_ready", error=failed.detail or failed.message)
            return failed.message
        return ""

    async def read(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call a function that reads from the ledger, in a thread.

        Parameters
        ----------
        function : callable
            The function to call.
        *arguments, **named
            Its arguments.

        Raises
        ------
        HttpError
            503 if the ledger fails or does not respond in time.
        """
        try:
            return await asyncio.wait_for(
                asyncio.to_thread(function, *arguments, **named), self.settings.timeout
            )
        except (QuietmaxError, TimeoutError) as error:
            raise ledger_error(error) from error

    async def account(self, deployment: Deployment) -> AccountState:
        """Read the account of a model as it stands now.

        Parameters
        ----------
        deployment : Deployment
            The model.
        """
        return await self.read(self.ledger.account, deployment.account.name)

    async def metadata(self, deployment: Deployment) -> dict[str, Any]:
        """Describe a model for the metadata endpoint.

        Parameters
        ----------
        deployment : Deployment
            The model.
        """
        account = await self.account(deployment)
        encoding = deployment.encoding
        encoded = {"name": INPUT, "datatype": "FP32", "shape": [-1, deployment.inputs]}
        inputs: list[dict[str, Any]] = [encoded]
        if encoding is not None:
            inputs = [
                {"name": column.name, "datatype": column_datatype(column), "shape": [-1]}
                for column in encoding.columns
            ]
        outputs = [
            {
                "name": name,
                "datatype": datatype,
                "shape": [-1] if name == LABEL else [-1, len(deployment.classes)],
            }
            for name, datatype in output_datatypes(deployment).items()
        ]
        parameters: dict[str, Any] = {
            "classes": list(deployment.classes),
            "kind": deployment.kind,
            "mechanism": deployment.mechanism,
            "guarantee_status": deployment.status,
            "guarantee": _without_seeds(deployment.total_guarantee(account).to_json()),
            "measure": account.total.measure,
            "cost_per_answer": cost_amount(account.total, deployment.unit_cost),
            "paid_at_training": deployment.unit_cost == 0,
            "max_rows": self.settings.max_rows,
        }
        if deployment.warning is not None:
            parameters["warning"] = deployment.warning
        if encoding is not None and takes_encoded_rows(encoding):
            parameters["encoded_input"] = encoded
        # An encoding that was inferred from the records is not public.
        if encoding is not None and not encoding.inferred:
            parameters["encoding"] = json.loads(encoding.to_json())
        return {
            "name": deployment.name,
            "versions": self.versions(deployment.name),
            "platform": f"quietmax_{deployment.kind}",
            "inputs": inputs,
            "outputs": outputs,
            "parameters": parameters,
        }

    async def budget(self, deployment: Deployment, caller: Caller) -> dict[str, Any]:
        """Describe the budget behind a model for the budget endpoint.

        Parameters
        ----------
        deployment : Deployment
            The model.
        caller : Caller
            Sees its own spending; an administrator sees that of all clients.
        """
        account = await self.account(deployment)
        subaccounts = await self.read(self.ledger.subaccounts, account)
        document = await self.account_document(account, subaccounts, caller)
        remaining = account.remaining_units
        own = next((each for each in subaccounts if each.client == caller.client), None)
        if own is not None and own.limit_units is not None:
            remaining = min(remaining, own.limit_units - own.spent_units)
        if deployment.unit_cost:
            document["cost_per_answer"] = cost_amount(account.total, deployment.unit_cost)
            document["remaining_answers"] = _remaining_answers(remaining, deployment.unit_cost)
            document["note"] = "Each new answer is charged. Cached answers to identical queries are free."
        else:
            document["cost_per_answer"] = 0.0
            document["remaining_answers"] = None
            document["note"] = "Training was charged. Any number of answers is free."
        return document

    async def account_document(
        self, account: AccountState, subaccounts: list[Subaccount], caller: Caller
    ) -> dict[str, Any]:
        """Describe an account and who spent what of it.

        Parameters
        ----------
        account : AccountState
            The account.
        subaccounts : list of Subaccount
            The shares of its clients.
        caller : Caller
            Sees its own share; an administrator sees all.
        """
        limit = account.limit_units
        total = _amount(account.total, limit)
        unproven = await self.read(self.ledger.unproven_models, account)
        return {
            "account": account.name,
            "measure": account.total.measure,
            "terms": account.terms.to_json(),
            "total": total,
            "spent": min(cost_amount(account.total, account.spent_units), total),
            "remaining": _remaining_amount(account.total, account.remaining_units),
            "spent_fraction": account.spent_units / limit if limit else 1.0,
            "spent_in_epsilon": await asyncio.to_thread(_spent_in_epsilon, account),
            "unproven_models": [f"{model} ({status})" for model, status in unproven],
            "clients": [
                {
                    "client": each.client,
                    "spent_fraction": each.spent_units / limit if limit else 0.0,
                    "quota_fraction": _quota_fraction(each, limit),
                    "refused": each.refused,
                }
                for each in subaccounts
                if caller.admin or each.client == caller.client
            ],
        }


def _without_seeds(record: Any) -> Any:
    """Return JSON values without any field `seed`: whoever knows the seed of the noise can subtract the noise."""
    if isinstance(record, dict):
        return {name: _without_seeds(value) for name, value in record.items() if name != "seed"}
    return [_without_seeds(value) for value in record] if isinstance(record, list) else record


def _check_administrator(caller: Caller) -> None:
    if not caller.admin:
        raise HttpError(403, "Only administrators can see and change the model repository.")


def cost_amount(total: Cost, units: int) -> float:
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


def _quota_fraction(subaccount: Subaccount, limit: int) -> float | None:
    if subaccount.limit_units is None:
        return None
    return subaccount.limit_units / limit if limit else 0.0


def _spent_in_epsilon(account: AccountState) -> float | None:
    """Return what was spent as an epsilon at the delta of the terms; None if a mu has no such epsilon."""
    spent = account.spent
    if isinstance(spent, PureCost):
        return spent.epsilon
    if account.terms.delta == 0 or account.terms.analysis != "proven":
        return None
    return epsilon_of(spent.mu, account.terms.delta) if spent.mu else 0.0


def _response_parameters(deployment: Deployment, reply: Reply) -> dict[str, Any]:
    """Return the `parameters` of an inference response."""
    total = deployment.account.total
    parameters: dict[str, Any] = {
        "guarantee_status": deployment.status,
        "measure": total.measure,
        "cost": cost_amount(total, reply.units),
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
    """Return the HTTP error for a charge that did not lead to an answer."""
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
        return unauthorized("The API key was revoked or has expired, or the token has expired.")
    assert isinstance(result, Failed)
    return ledger_error(result.error)

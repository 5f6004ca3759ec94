"""Deployments: model folders that are read, bound to the ledger accounts that pay for their answers, and served.

A model whose weights were released is charged once, for its training. Any other model pays for each answer. A budget
that was kept in the model folder until now moves into the ledger. Nothing here takes a noise source: served answers
always draw exact noise (THEORY 3.5).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from quietmax._io import atomic_write
from quietmax.accounting.costs import LIMIT, Budget, Cost, GaussianCost, Measure
from quietmax.accounting.guarantee import Guarantee
from quietmax.data.encoding import Encoding
from quietmax.errors import BudgetExhausted, InvalidInput, QuietmaxError, counted
from quietmax.estimators.evaluation import EVALUATION_FILE, EvaluationCharge, read_evaluations, split_name
from quietmax.estimators.figures import Costs, decision_in_words
from quietmax.estimators.head.effects import Additive
from quietmax.estimators.head.update import prior_of
from quietmax.estimators.head.weights import TableWeights
from quietmax.estimators.serialization import DECISION_FILE, PrivateModel, open_private
from quietmax.estimators.series import Version, own_cost
from quietmax.ledger.accounts import AccountState, Terms
from quietmax.ledger.database import START
from quietmax.ledger.ledger import Ledger
from quietmax.ledger.transactions import Charged, NewAnswers
from quietmax.mechanisms.algorithm1 import Algorithm1
from quietmax.mechanisms.base import Answerer, Answers, digest_text, releases_probabilities
from quietmax.models.serialization import load_model, read_description
from quietmax.predictor import Predictor, claimed
from quietmax.spending import ACCOUNT_FILE, ACCOUNT_ID, MOVED_FILE, FileAccount

_MODEL = re.compile(r"(?:(?P<name>[^/=]+)(?:/(?P<version>[^/=]+))?=)?(?P<folder>.+)")
MODEL_FILES = ("model.json", "weights.safetensors")
KINDS = ("mlp", "head", "teachers", "dpsgd")
"""The kinds of model that can be served."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
Rows = NDArray[Any]
"""Encoded rows, float32; or int32 cells, where scores are sums over columns."""


@dataclass(frozen=True)
class MigratedBudget:
    """A budget that a model folder kept until it was deployed."""

    account: FileAccount  # The account in the model folder
    limit: int  # How many answers the folder's budget pays for
    digest: str  # SHA-256 of the model folder, in hexadecimal digits


@dataclass(frozen=True, eq=False)
class Deployment:
    """A model that is served under a name and version: `load_models` reads it, `deploy` gives it its account."""

    name: str  # What requests call the model
    version: str
    kind: str  # One of `KINDS`
    inputs: int  # Number of features in a row
    classes: tuple[str, ...]
    dataset: str  # Name of the training set, as the model folder states it
    mechanism: str
    answer: Callable[[Rows], Answers]  # Draws exact noise
    guarantee: Guarantee  # Of one answer if each answer is charged, else of the released weights
    digest: bytes  # Changes with the weights and the mechanism; a cached answer belongs to one digest
    cost: Cost | None = None  # Cost of one answer. None: answers are free, because training was charged
    training_cost: Cost | None = None  # What training spent, if answers are free. None: it does not add up
    releases_probabilities: bool = True
    terms: Terms | None = None  # The budget that the model states itself
    encoding: Encoding | None = None  # How columns become features. With it, answers are class names
    migrated_budget: MigratedBudget | None = None  # The budget to move out of the model folder
    split: str | None = None  # Name of the split that held people out of the training set
    cohorts: str | None = None  # The rule that says which cohort a person is in, if it was trained on one
    series: tuple[Version, ...] = ()  # The versions of its series, of which it is the last
    answerer: Answerer | None = None  # Computes scores during the charge and draws, if each answer is charged
    evaluations: tuple[EvaluationCharge, ...] = ()  # What those in the folder cost the people evaluated
    bound_account: AccountState | None = None  # The account as it was when the model was deployed
    unit_cost: int = 0  # Units of the account that one answer takes; 0 if answers are free
    costs: Costs | None = (
        None  # Of errors, which decide the answer if answers are free. None: all cost the same
    )
    additive: Additive | None = (
        None  # If scores are sums over columns and free; then rows are cells, not features
    )

    @property
    def label(self) -> str:
        """``name/version``, as the journal calls the model."""
        return f"{self.name}/{self.version}"

    @property
    def account(self) -> AccountState:
        """The account that pays, as it was when the model was deployed."""
        if self.bound_account is None:
            raise QuietmaxError(f"The model {self.label} is not bound to an account; see deploy().")
        return self.bound_account

    @cached_property
    def effects(self) -> dict[str, Any]:
        """What each column does to the scores, as JSON values; of a model with `additive` only."""
        assert self.additive is not None
        return self.additive.to_json()

    @property
    def _measure(self) -> Measure:
        cost = self.cost or self.training_cost
        return "pure" if cost is None else cost.measure

    @property
    def status(self) -> str:
        """The status of its guarantee."""
        return self.guarantee.status

    @property
    def warning(self) -> str | None:
        """What every answer says if the guarantee is not proven."""
        if self.status == "proven":
            return None
        return f"No proven guarantee ({self.status}): {self.guarantee.reason}"

    @property
    def decision(self) -> str | None:
        """Which class is the answer, in words; None if answers are drawn by a mechanism."""
        return decision_in_words(self.costs, self.classes) if self.cost is None else None

    def total_guarantee(self, account: AccountState) -> Guarantee:
        """Return what is claimed of all answers together, once all that the account has now is spent."""
        if self.cost is None:
            return self.guarantee
        return Guarantee.of(
            account.limit,
            status=self.guarantee.status,
            because=self.guarantee.because,
            parameters=self.guarantee.parameters,
            assumptions=self.guarantee.assumptions,
            unit=self.guarantee.unit,
        )


# --- reading model folders ----------------------------------------------------------------------------------------


def load_models(
    models: Sequence[str],
    *,
    budget: Terms | None = None,
    queries: int | None = None,
    accept_unproven: bool = False,
) -> list[Deployment]:
    """Load model folders to be served. Only JSON and safetensors files are read."""
    loaded: dict[str, Deployment] = {}
    for text in models:
        name, stated, path = _parse_model(text)
        description = read_description(path)
        kind = str(description.get("kind"))
        if kind == "mlp":
            read = _read_network(path, budget, queries)
        elif kind in KINDS:
            read = _read_private(path, description)
        else:
            raise InvalidInput(
                f"The kind of a served model must be one of {', '.join(KINDS)}, but {path} has {kind!r}."
            )
        dataset = str(description.get("dataset", ""))
        series = read.get("series")
        version = stated or (str(series[-1].version) if series else "1")
        deployment = Deployment(name, version, kind, dataset=dataset, **read)
        if deployment.encoding is not None:
            deployment.encoding.read_encoders()  # an encoder that is not installed is an error at the start
        if deployment.label in loaded:
            raise InvalidInput(f"Model names must be unique, got two models called {deployment.label}.")
        if deployment.status != "proven" and not accept_unproven:
            raise InvalidInput(
                f"The guarantee of {path} is {deployment.status}, not proven: {deployment.guarantee.reason} "
                "Serving it requires `accept_unproven`; every answer will then carry a warning."
            )
        loaded[deployment.label] = deployment
    return list(loaded.values())


def _parse_model(text: str) -> tuple[str, str, Path]:
    """Parse ``[NAME[/VERSION]=]FOLDER`` into name, version ("" if none is stated) and folder."""
    found = _MODEL.fullmatch(text)
    if found is None:
        raise InvalidInput(f"A model must be FOLDER, NAME=FOLDER or NAME/VERSION=FOLDER, got {text!r}.")
    if Path(text).is_dir():  # its name may hold an equals sign
        name, version, path = Path(text).resolve().name, "", Path(text)
    else:
        path = Path(found["folder"])
        name, version = found["name"] or path.resolve().name, found["version"] or ""
    for word in (name, version or "1"):
        if not _NAME.fullmatch(word):
            raise InvalidInput(
                "Model names and versions must be 1 to 64 letters, digits, dots, dashes and underscores, got "
                f"{word!r}; NAME=FOLDER gives a folder another name."
            )
    return name, version, path


def _read_network(path: Path, budget: Terms | None, queries: int | None) -> dict[str, Any]:
    """Read an ordinary network behind Algorithm 1 as published: conditional for two classes, refuted for more."""
    if budget is None:
        raise InvalidInput(f"The ordinary model in {path} states no budget; `budget` is required.")
    model = load_model(path)
    mechanism = Algorithm1("gaussian")
    terms = Terms(budget.epsilon, budget.delta, mechanism.analysis)
    answerer = Answerer.prepare(model, mechanism, Budget(terms.epsilon, terms.delta, queries))
    return {
        "inputs": model.features,
        "classes": tuple(map(str, range(model.classes)))
        if model.encoding is None
        else model.encoding.classes,
        "guarantee": claimed(answerer.mechanism.guarantee(model.classes), answerer.mechanism),
        "terms": terms,
        "encoding": model.encoding,
        **_charged_per_answer(path, answerer),
    }


def _read_private(path: Path, description: Mapping[str, Any]) -> dict[str, Any]:
    """Read a head, teachers or a network trained by DP-SGD, under the guarantee of their training."""
    model = open_private(path)
    epsilon, delta = description.get("epsilon"), description.get("delta")
    read: dict[str, Any] = {
        "inputs": model.inputs,
        "classes": model.classes if model.encoding is None else model.encoding.classes,
        "guarantee": model.guarantee,
        "terms": None if epsilon is None else Terms(float(epsilon), float(delta or 0.0)),
        "encoding": model.encoding,
    }
    if isinstance(model.classifier, Predictor):
        predictor = model.classifier
        account = FileAccount(path / ACCOUNT_FILE, identity=description.get(ACCOUNT_ID))
        limit = predictor.remaining.queries + predictor.answered
        answerer = Answerer(predictor.model, predictor.mechanism, features=model.features)
        migrated = MigratedBudget(account, limit, _digest(path).hex())
        return {**read, "migrated_budget": migrated, **_charged_per_answer(path, answerer)}
    summed = isinstance(model.classifier, TableWeights) and model.encoding is not None
    return {
        **read,
        "additive": model.additive() if summed else None,
        "costs": model.costs,
        "mechanism": "released weights",
        "answer": partial(_released_answer, replace(model, features=None) if summed else model),
        "digest": _digest(path),
        "training_cost": None if model.guarantee.definition == "approximate" else model.guarantee.cost,
        "split": split_name(model),
        **_read_series(model),
        "evaluations": tuple(read_evaluations(path, model)),
    }


def _read_series(model: PrivateModel) -> dict[str, Any]:
    """Describe a version of a series: what its own training cost, the rule for cohorts, and all versions up to it.

    The name of the rule says by which cells and how people are recognised: with equal names, cohorts are the same.
    """
    facts, encoding = model.guarantee.parameters, model.encoding
    if "cohort" not in facts or encoding is None:
        return {}
    rule = facts["cohort"]["rule"]
    exact = [rule, encoding.person, encoding.person_type, encoding.person_ignores_case]
    if rule["column"] is None and encoding.person is None:  # rows are known by their features
        exact.append(replace(encoding, defaults=()).to_json())
    digest = hashlib.sha256(json.dumps(exact, sort_keys=True).encode()).hexdigest()[:32]
    return {
        "training_cost": own_cost(model.guarantee),
        "cohorts": f"{rule['by']} of the {model.guarantee.unit}s ({digest})",
        "series": tuple(prior_of(model).versions),
    }


def _charged_per_answer(path: Path, answerer: Answerer) -> dict[str, Any]:
    """Describe a model that pays for every answer. The mechanism's own guarantee must have a cost."""
    mechanism, classes = answerer.mechanism, answerer.model.classes
    one = mechanism.guarantee(classes)
    if one.extra_delta or one.definition == "approximate":
        raise InvalidInput(
            f"The mechanism {mechanism.name} of {path} spends a delta with every answer. The ledger can only count "
            "pure and Gaussian costs."
        )
    # An error after the charge would reveal something about the model.
    served = replace(answerer, non_finite="undecided")
    return {
        "mechanism": mechanism.name,
        "answer": served.answer,
        "answerer": served,
        "digest": _digest(path, digest_text(mechanism)),
        "cost": answerer.cost,
        "releases_probabilities": releases_probabilities(mechanism, classes),
    }


def _digest(path: Path, mechanism: str = "") -> bytes:
    """Return a SHA-256 that never changes for an unchanged model: cached answers are stored under it."""
    sha256 = hashlib.sha256(json.dumps(mechanism).encode())
    for name in MODEL_FILES:
        content = (path / name).read_bytes()
        sha256.update(b"%s %d " % (name.encode(), len(content)) + content)
    return sha256.digest()


def _released_answer(model: PrivateModel, rows: Rows) -> Answers:
    """Answer with released weights: post-processing, without a mechanism."""
    probabilities = model.predict_proba(rows)
    return Answers(model.decided(probabilities), probabilities)


# --- accounts -----------------------------------------------------------------------------------------------------


def deploy(
    ledger: Ledger,
    models: Iterable[Deployment],
    *,
    budget: Terms | None = None,
    account: str | None = None,
    because: str | None = None,
    accept_weak: bool = False,
) -> list[Deployment]:
    """Bind models to the accounts of their training sets, new ones if need be, and charge what training spent."""
    ordered = sorted(models, key=_deployment_order)
    return [_deploy(ledger, model, budget, account, because, accept_weak) for model in ordered]


def _deployment_order(model: Deployment) -> tuple[bool, Any]:
    """Sort models with Gaussian costs first: an account with such a total can pay pure costs too. Then by version."""
    return model._measure != "gaussian", _version_order(model.version)


def check_deployments(
    ledger: Ledger | None,
    models: Iterable[Deployment],
    *,
    budget: Terms | None = None,
    account: str | None = None,
    because: str | None = None,
    accept_weak: bool = False,
) -> None:
    """Raise what `deploy` would raise, without opening, charging or migrating anything.

    Each model is checked alone: several new models that share an account may still exceed it together. Evaluations and
    trainings with a holdout or on a cohort are checked by `deploy` only.
    """
    for model in models:
        name, found = account or _account_name(model.dataset), None
        if ledger is not None:
            name, _, found = find_account(ledger, model.dataset, account)
        _check_account(model, name, budget, found, accept_weak)
        if ledger is not None and found is None:
            ledger.check_opening(name, because)
        if ledger is None or found is None or model.training_cost is None or model.split or model.series:
            continue
        charged = ledger.is_training_charged(found, model.digest.hex())
        if not charged and found.units(model.training_cost) > found.remaining_units:
            raise QuietmaxError(
                f"Training the model {model.label} spent more than remains in the account {found.name!r}. "
                "'quietmax ledger grant' raises the budget."
            )


def _account_name(dataset: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", dataset).strip("-._")[:64] or "records"


def _version_order(version: str) -> list[tuple[int, int | str]]:
    """Order numbers within versions as numbers: 10 comes after 9."""
    parts: list[str] = re.findall(r"\d+|\D+", version)
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts]


def _deploy(
    ledger: Ledger,
    model: Deployment,
    budget: Terms | None,
    account: str | None,
    because: str | None,
    accept_weak: bool,
) -> Deployment:
    """Open or find the account of one model, and charge it for what was spent before."""
    name, records, found = find_account(ledger, model.dataset, account)
    total, terms, unit_cost = _check_account(model, name, budget, found, accept_weak)
    state = ledger.open_account(
        name, total, terms, digest=records, named_by_owner=account is not None, because=because
    )
    if model.cost is None:
        _charge_training(ledger, model, state)
    _charge_evaluations(ledger, model, state)
    if model.migrated_budget is not None:
        _migrate_budget(ledger, model.label, model.migrated_budget, state, unit_cost)
    if model.status != "proven":
        ledger.record_unproven(state, model.label, model.status)
    return replace(model, bound_account=ledger.account(state.name), unit_cost=unit_cost)


def _charge_training(ledger: Ledger, model: Deployment, state: AccountState) -> None:
    """Charge what training spent: for a series, that of each version, since the last one depends on all of them."""
    if model.cohorts is None:
        # A guarantee without a cost adds up with no other, so it takes the whole account.
        ledger.charge_training(
            state, model.label, model.digest.hex(), model.training_cost or "all", split=model.split
        )
    for each in model.series:  # all hold out the same people
        label, mu = f"{model.name}/{each.version}", GaussianCost(each.mu)
        cohort = str(model.cohorts), each.cohort
        if not ledger.is_training_charged(state, each.digest):
            ledger.charge_training(state, label, each.digest, mu, split=model.split, cohort=cohort)
        for number, spent in each.evaluations:
            cost = GaussianCost(spent)
            digest = evaluation_digest(number, spent, "parallel")
            ledger.charge_evaluation(state, label, digest, cost, split=model.split, cohort=cohort)


def evaluation_digest(number: str, mu: float, composition: str) -> str:
    """Name an evaluation. The words are part of stored keys: they cannot change."""
    return f"{number} {mu!r} {composition}"


def find_account(
    ledger: Ledger, dataset: str, account: str | None = None
) -> tuple[str, str, AccountState | None]:
    """Find the account that pays for models of a data set."""
    name = _account_name(dataset) if account is None else account
    records = hashlib.sha256(f"data set {dataset}".encode()).hexdigest()
    return name, records, ledger.find_account(name, None if account is not None else records)


def _check_account(
    model: Deployment, name: str, budget: Terms | None, found: AccountState | None, accept_weak: bool
) -> tuple[Cost, Terms, int]:
    """Check that a model fits its account, or a new one; return total and terms of the account, and the unit cost."""
    total, terms = _total(model, name, budget, found)
    state = found or AccountState(0, name, total, terms, LIMIT, 0, 0, START, 0)
    unit_cost = _unit_cost(model, state)
    if model.cost is None and model.training_cost is None:
        _check_terms(model, state.terms)
    if found is None:
        _check_fits(model, state, unit_cost)  # before an account is opened that would stay behind
    promised = model.total_guarantee(state)
    if promised.status == "proven" and promised.strength in ("weak", "none") and not accept_weak:
        raise InvalidInput(
            f"The guarantee of the model {model.label} is {promised.summary}. Serving it requires `accept_weak`."
        )
    return total, terms, unit_cost


def _charge_evaluations(ledger: Ledger, model: Deployment, state: AccountState) -> None:
    """Charge, once, for each evaluation in the model folder. That of a holdout is free next to the training."""
    for charge in model.evaluations:
        if charge.reserved:  # another folder may spend it; the ledger charges that folder's evaluations
            continue
        digest = evaluation_digest(charge.id, charge.mu, charge.composition)
        split = model.split if charge.composition == "parallel" else None
        cohort = None if model.cohorts is None else (model.cohorts, model.series[-1].cohort)
        try:
            ledger.charge_evaluation(
                state, model.label, digest, GaussianCost(charge.mu), split=split, cohort=cohort
            )
        except InvalidInput as error:
            raise InvalidInput(
                f"The evaluations of the model {model.label} cannot be paid from the account {state.name!r}: {error}"
            ) from error


def _total(
    model: Deployment, name: str, budget: Terms | None, found: AccountState | None
) -> tuple[Cost, Terms]:
    """Return the total and the terms that the account has, or will be opened with."""
    if budget is not None:
        analysis = "proven" if model.terms is None else model.terms.analysis
        terms = Terms(budget.epsilon, budget.delta, analysis)
        return terms.total(model._measure if found is None else found.total.measure), terms
    if found is not None:
        return found.total, found.terms
    if model.terms is not None:
        own = None if model.series else model.training_cost  # that of a version may be below that of others
        return own or model.terms.total(model._measure), model.terms
    raise InvalidInput(
        f"The account {name!r} does not exist and the model {model.label} states no budget; `budget` is required."
    )


def _unit_cost(model: Deployment, state: AccountState) -> int:
    """Return the units that one answer takes from the account; 0 if answers are free."""
    try:
        unit_cost = 0 if model.cost is None else state.units(model.cost)
        if model.training_cost is not None:
            state.units(model.training_cost)
    except InvalidInput as error:
        raise InvalidInput(
            f"The model {model.label} cannot be paid from the account {state.name!r}: {error} Another account "
            "requires `account`, `because` and `budget`."
        ) from error
    if model.cost is not None and unit_cost == 0:
        raise InvalidInput(f"The cost per answer of the model {model.label} must be greater than 0.")
    return unit_cost


def _check_terms(model: Deployment, terms: Terms) -> None:
    """Raise if an (epsilon, delta) guarantee is weaker than the terms of the account."""
    guarantee = model.guarantee
    assert guarantee.epsilon is not None
    assert guarantee.delta is not None
    if guarantee.epsilon > terms.epsilon or guarantee.delta + guarantee.extra_delta > terms.delta:
        raise InvalidInput(
            f"The model {model.label} was trained with epsilon {guarantee.epsilon:g} and delta "
            f"{guarantee.delta:g}, but its account allows {_terms_text(terms)}."
        )


def _check_fits(model: Deployment, state: AccountState, unit_cost: int) -> None:
    """Raise if a model has spent more than a new account would hold."""
    spent = 0 if model.training_cost is None else state.units(model.guarantee.cost)  # of the whole series
    if model.migrated_budget is not None:
        spent += model.migrated_budget.account.answered * unit_cost
    if spent > state.limit_units:
        raise QuietmaxError(
            f"The model {model.label} has already spent more than the budget of {_terms_text(state.terms)}."
        )


def _terms_text(terms: Terms) -> str:
    return f"epsilon {terms.epsilon:g} and delta {terms.delta:g}"


def _migrate_budget(
    ledger: Ledger, label: str, migrated: MigratedBudget, state: AccountState, unit_cost: int
) -> None:
    """Move the budget of the model folder into the ledger: charge what was answered, leave nothing in the folder.

    The folder is emptied after the ledger was charged; an answer given from the folder in between is charged too. A
    mark in the folder says that this was done to this model, wherever the folder may lie later; it counts only while
    the folder's account is empty. An account that was put back after it had been moved is charged once more.
    """
    folder = migrated.account.path.resolve().parent
    mark = folder / MOVED_FILE
    # The words "carried over" are part of stored marks and request keys: they cannot change.
    text = ledger.request_key(0, f"carried over {state.id} {migrated.digest}").hex() + "\n"
    read_only = bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    moved = mark.is_file() and mark.read_text(encoding="utf-8", errors="replace") == text
    request = hashlib.sha256(f"carried over {state.id} {folder} {migrated.digest}".encode()).digest()
    exceeded = "The model {} answered {} outside the ledger, more than remains"
    while True:
        answered = migrated.account.answered
        if moved and answered >= migrated.limit:
            with suppress(OSError):  # without the mark, the folder is known by its path
                atomic_write(mark, lambda staging: staging.write_text(text, encoding="utf-8"))
            return
        if read_only:
            raise QuietmaxError(
                f"The model {label} keeps its budget in the read-only {folder}, so it cannot move into the ledger. "
                "Serve it once from a writable folder."
            )
        told = exceeded.format(label, counted(answered, "query", "queries"))
        result = ledger.charge_past(state, label, unit_cost, answered, request, "migrated-budget", told)
        if isinstance(result, Charged):
            try:
                migrated.account.charge(max(migrated.limit - answered, 0), migrated.limit)
            except BudgetExhausted:
                continue
            ledger.store_answers(NewAnswers(state.id, request=request, answer=b"moved"))
        else:
            # This request was charged before: the account was put back into the folder since.
            request = hashlib.sha256(request).digest()
        moved = True


# --- the model repository -----------------------------------------------------------------------------------------


class ModelRepository:
    """The models of a directory with folders ``NAME/VERSION``, of which the newest versions of each name are served."""

    def __init__(
        self,
        directory: Path,
        load: Callable[[list[str]], list[Deployment]],  # As `load_models` does
        deploy: Callable[[Ledger, list[Deployment]], list[Deployment]],  # As the function does
        reserved: Iterable[str] = (),  # Names of models that are served from elsewhere
        keep: int = 1,  # How many versions of each name are served
    ) -> None:
        if not directory.is_dir():
            raise InvalidInput(f"The model repository {directory} must be a directory.")
        self._directory = directory.resolve()
        self._load = load
        self._deploy = deploy
        self._reserved = frozenset(reserved)
        self._keep = keep
        self._models: dict[
            str, dict[str, tuple[str, Deployment]]
        ] = {}  # by name and version, after their files' state
        self._seen: set[tuple[str, str]] = set()  # names and versions that are or were in the directory

    @property
    def deployments(self) -> list[Deployment]:
        """The models that are served."""
        return [model for versions in self._models.values() for _, model in versions.values()]

    def has_seen(self, name: str, version: str) -> bool:
        """Return whether a version is, or was while this process ran, in the directory."""
        return (name, version) in self._seen

    def start(self, ledger: Ledger | None) -> list[Deployment]:
        """Read and deploy all models; raise if that fails for one."""
        for error in self.refresh(ledger).values():
            raise InvalidInput(error)
        return self.deployments

    def refresh(self, ledger: Ledger | None) -> dict[str, str]:
        """Read what is new or changed and deploy it, unless there is no ledger; forget what is gone.

        A model that cannot be read or deployed changes nothing: what was served under its name stays. The result says
        why.
        """
        if not self._directory.is_dir():
            raise QuietmaxError(
                f"The model repository {self._directory} is away; its models stay as they are."
            )
        models: dict[str, dict[str, tuple[str, Deployment]]] = {}
        read, errors = [], {}
        for name in self._folders(self._directory):
            versions = sorted(self._folders(self._directory / name), key=_version_order)
            self._seen |= {(name, version) for version in versions}
            for version in versions[-self._keep :]:
                served = models.setdefault(name, {})
                folder = self._directory / name / version
                state, before = _file_state(folder), self._models.get(name, {}).get(version)
                if before is not None and before[0] == state:
                    served[version] = before
                    continue
                try:
                    read.append((state, self._read(name, folder)))
                except QuietmaxError as error:
                    errors[name] = str(error)
        # One by one: a model that cannot be paid for keeps no other from being served.
        for state, model in sorted(read, key=lambda each: _deployment_order(each[1])):
            try:
                deployed = model if ledger is None else self._deploy(ledger, [model])[0]
                models[model.name][model.version] = state, deployed
            except QuietmaxError as error:
                errors[model.name] = str(error)
        for name in errors:
            models[name] = {**self._models.get(name, {}), **models[name]}
        self._models = {name: versions for name, versions in models.items() if versions}
        return errors

    def _read(self, name: str, folder: Path) -> Deployment:
        if name in self._reserved:
            raise InvalidInput(f"Model names must be unique, but {name} is also in the model repository.")
        try:
            return self._load([f"{name}/{folder.name}={folder}"])[0]
        except QuietmaxError:
            raise
        except Exception as error:
            raise QuietmaxError(
                f"The model {name}/{folder.name} cannot be read ({type(error).__name__})."
            ) from error

    def _folders(self, place: Path) -> list[str]:
        """The valid names of folders that lie below the directory, also after following links."""
        try:
            entries = sorted(place.iterdir())
        except OSError:
            return []
        return [
            entry.name
            for entry in entries
            if _NAME.fullmatch(entry.name)
            and entry.is_dir()
            and entry.resolve().is_relative_to(self._directory)
        ]


def _file_state(folder: Path) -> str:
    """Return a text that changes when the files of a version are replaced, or an evaluation or decision is stored."""
    found = [str(folder)]
    for file in (*MODEL_FILES, EVALUATION_FILE, DECISION_FILE):
        with suppress(OSError):
            state = (folder / file).stat()
            found.append(f"{file} {state.st_ino} {state.st_size} {state.st_mtime_ns}")
    return ", ".join(found)

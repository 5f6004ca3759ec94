"""The model repository: reads model folders into deployments, and loads and unloads them while the service runs.

To serve a further kind of model, write a function from a `ModelFolder` to a `Deployment` and add it to `LOADERS` under
the ``kind`` that the model folder states. No loader takes a noise source: served answers always draw exact noise
(THEORY 3.5).

One file, shared by the workers, says which version of which model they serve. The worker that gets a request to load a
model reads the folder, binds it to its account (which charges its training once), and writes the file. The others
follow within a fraction of a second, each from the same folder, and confirm. A worker that was restarted begins with
the file. A model that cannot be loaded changes nothing. A worker that cannot follow keeps what it has and tries again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quietmax._io import atomic_write
from quietmax.accounting.costs import Budget
from quietmax.accounting.guarantee import Guarantee
from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.estimators.evaluation import EVALUATION_FILE, read_evaluations, split_name
from quietmax.estimators.serialization import PrivateModel, open_private
from quietmax.ledger.accounts import Terms
from quietmax.ledger.ledger import Ledger
from quietmax.mechanisms.algorithm1 import Algorithm1
from quietmax.mechanisms.base import (
    Answerer,
    Answers,
    Mechanism,
    SampledNeuron,
    digest_text,
    plugin_mechanisms,
    releases_probabilities,
)
from quietmax.models.serialization import load_model, read_description
from quietmax.predictor import Predictor, claimed
from quietmax.server.deployment import Deployment, MigratedBudget, Rows, _version_order
from quietmax.server.errors import HttpError
from quietmax.spending import ACCOUNT_FILE, ACCOUNT_ID, FileAccount

_MODEL = re.compile(r"(?:(?P<name>[^/=]+)(?:/(?P<version>[^/=]+))?=)?(?P<folder>.+)")
MODEL_FILES = ("model.json", "weights.safetensors")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class ModelFolder:
    """A model folder, and how to serve it."""

    name: str  # What requests will call the model
    version: str
    path: Path  # The folder
    description: Mapping[str, Any]  # The contents of its `model.json`
    budget: Terms | None = None  # The total budget of the training set, if stated by the owner
    queries: int | None = None  # Number of answers that share the budget of an ordinary model
    mechanism: str | None = None  # A mechanism other than the model's own

    @property
    def dataset(self) -> str:
        """Name of the training set."""
        return str(self.description.get("dataset", ""))

    def _digest(self, mechanism: str = "") -> bytes:
        """Return the SHA-256 of the description, the weights and the mechanism.

        Cached answers are stored under this digest: it must not change for an unchanged model.
        """
        sha256 = hashlib.sha256(json.dumps(mechanism).encode())
        for name in MODEL_FILES:
            content = (self.path / name).read_bytes()
            sha256.update(b"%s %d " % (name.encode(), len(content)) + content)
        return sha256.digest()


class ModelRepository:
    """A directory of models that may be loaded while the service runs: one folder for each model and version."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise InvalidInput(f"The model repository {directory} must be a directory.")
        self._directory = directory.resolve()

    def _names(self) -> list[str]:
        """List the models that have at least one version."""
        return [name for name in self._folders(self._directory) if self._versions(name)]

    def _versions(self, name: str) -> list[str]:
        """List the versions of a model, the highest last; none if there is no such model."""
        if not _NAME.fullmatch(name):
            return []
        return sorted(self._folders(self._directory / name), key=_version_order)

    def _folder(self, name: str, version: str) -> Path:
        return self._directory / name / version

    def _signature(self, name: str, version: str) -> str:
        """Return a text that changes when the files of a version are replaced, or the model was evaluated again."""
        found = []
        for file in (*MODEL_FILES, EVALUATION_FILE):
            with suppress(OSError):
                state = (self._folder(name, version) / file).stat()
                found.append(f"{file} {state.st_ino} {state.st_size} {state.st_mtime_ns}")
        return ", ".join(found)

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


def load_models(
    models: Sequence[str],
    *,
    budget: Terms | None = None,
    queries: int | None = None,
    mechanism: str | None = None,
    accept_unproven: bool = False,
) -> list[Deployment]:
    """Load model folders to be served. Only JSON and safetensors files are read."""
    loaded: dict[str, Deployment] = {}
    for text in models:
        name, version, path = _parse_model(text)
        folder = ModelFolder(name, version, path, read_description(path), budget, queries, mechanism)
        deployment = _load(folder)
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
    """Parse ``[NAME[/VERSION]=]FOLDER`` into name, version and folder."""
    found = _MODEL.fullmatch(text)
    if found is None:
        raise InvalidInput(f"A model must be FOLDER, NAME=FOLDER or NAME/VERSION=FOLDER, got {text!r}.")
    if Path(text).is_dir():  # its name may hold an equals sign
        name, version, path = Path(text).resolve().name, "1", Path(text)
    else:
        path = Path(found["folder"])
        name, version = found["name"] or path.resolve().name, found["version"] or "1"
    for word in (name, version):
        if not _NAME.fullmatch(word):
            raise InvalidInput(
                "Model names and versions must be 1 to 64 letters, digits, dots, dashes and underscores, got "
                f"{word!r}; NAME=FOLDER gives a folder another name."
            )
    return name, version, path


def _load(folder: ModelFolder) -> Deployment:
    kind = str(folder.description.get("kind"))
    if kind not in LOADERS:
        raise InvalidInput(
            f"The kind of a served model must be one of {', '.join(LOADERS)}, but {folder.path} has {kind!r}."
        )
    deployment = LOADERS[kind](folder)
    if deployment.encoding is not None:
        deployment.encoding.read_encoders()  # an encoder that is not installed is an error at the start
    return deployment


def _load_network(folder: ModelFolder) -> Deployment:
    """Load an ordinary network behind Algorithm 1 as published, or behind the mechanism of a plug-in.

    Algorithm 1 is conditional for two classes and refuted for more. A plug-in is conditional at best.
    """
    mechanism: Mechanism
    if folder.mechanism in (None, "algorithm1"):
        mechanism = Algorithm1("gaussian")
    elif (own := plugin_mechanisms().get(str(folder.mechanism))) is not None:
        mechanism = own
    else:
        raise InvalidInput(
            f"The mechanism of an ordinary model must be algorithm1 or that of an installed plug-in, got "
            f"{folder.mechanism!r} for {folder.path}."
        )
    if folder.budget is None:
        raise InvalidInput(f"The ordinary model in {folder.path} states no budget; `budget` is required.")
    model = load_model(folder.path)
    terms = Terms(folder.budget.epsilon, folder.budget.delta, mechanism.analysis)
    answerer = Answerer.prepare(model, mechanism, Budget(terms.epsilon, terms.delta, folder.queries))
    classes = tuple(map(str, range(model.classes))) if model.encoding is None else model.encoding.classes
    return _charged_per_answer(
        folder,
        answerer,
        kind="mlp",
        inputs=model.features,
        classes=classes,
        guarantee=claimed(answerer.mechanism.guarantee(model.classes), answerer.mechanism),
        terms=terms,
        image_shape=model.image_shape,
        encoding=model.encoding,
    )


def _load_private(folder: ModelFolder) -> Deployment:
    """Load a head, teachers or a network trained by DP-SGD, under the guarantee of their training."""
    model = open_private(folder.path)
    epsilon, delta = folder.description.get("epsilon"), folder.description.get("delta")
    terms = None if epsilon is None else Terms(float(epsilon), float(delta or 0.0))
    classes = model.classes if model.encoding is None else model.encoding.classes
    if isinstance(model.classifier, Predictor):
        predictor = model.classifier
        mechanism = _mechanism(folder, predictor)
        return _charged_per_answer(
            folder,
            Answerer(predictor.model, mechanism, features=model.features),
            kind=model.kind,
            inputs=model.inputs,
            classes=classes,
            guarantee=_guarantee(model.guarantee, mechanism, predictor),
            terms=terms,
            encoding=model.encoding,
            migrated_budget=MigratedBudget(
                FileAccount(folder.path / ACCOUNT_FILE, identity=folder.description.get(ACCOUNT_ID)),
                predictor.remaining.queries + predictor.answered,
                folder._digest().hex(),
            ),
        )
    if folder.mechanism is not None:
        raise InvalidInput(
            f"The weights in {folder.path} are released, so `mechanism` must not be set, got {folder.mechanism!r}."
        )
    guarantee = model.guarantee
    return Deployment(
        folder.name,
        folder.version,
        kind=model.kind,
        inputs=model.inputs,
        classes=classes,
        dataset=folder.dataset,
        mechanism="released weights",
        answer=partial(_released_answer, model),
        guarantee=guarantee,
        digest=folder._digest(),
        training_cost=None if guarantee.definition == "approximate" else guarantee.cost,
        terms=terms,
        encoding=model.encoding,
        split=split_name(model),
        evaluations=tuple(read_evaluations(folder.path, model)),
    )


def _charged_per_answer(folder: ModelFolder, answerer: Answerer, **fields: Any) -> Deployment:
    """Make a deployment that charges every answer. The mechanism's own guarantee must have a cost."""
    mechanism, classes = answerer.mechanism, answerer.model.classes
    one = mechanism.guarantee(classes)
    if one.extra_delta or one.definition == "approximate":
        raise InvalidInput(
            f"The mechanism {mechanism.name} of {folder.path} spends a delta with every answer. The ledger can "
            "only count pure and Gaussian costs."
        )
    # An error after the charge would reveal something about the model.
    served = replace(answerer, non_finite="undecided")
    return Deployment(
        folder.name,
        folder.version,
        dataset=folder.dataset,
        mechanism=mechanism.name,
        answer=served.answer,
        answerer=served,
        digest=folder._digest(digest_text(mechanism)),
        cost=answerer.cost,
        releases_probabilities=releases_probabilities(mechanism, classes),
        **fields,
    )


def _mechanism(folder: ModelFolder, predictor: Predictor) -> Mechanism:
    """Return the model's own mechanism, or the one that the owner asks for."""
    own: Mechanism = predictor.mechanism
    valid = [own.name, "sampled-neuron"] if folder.description.get("kind") == "head" else [own.name]
    if folder.mechanism in (None, own.name):
        return own
    if len(valid) > 1 and (plug_in := plugin_mechanisms().get(str(folder.mechanism))) is not None:
        if plug_in.measure != own.measure:
            raise InvalidInput(
                f"The mechanism of the model in {folder.path} must have the privacy measure {own.measure}, but "
                f"{plug_in.name} has {plug_in.measure}."
            )
        return plug_in.prepared(predictor.model, predictor.cost)
    if folder.mechanism not in valid:
        raise InvalidInput(
            f"The mechanism of the model in {folder.path} must be {' or '.join(valid)}, got {folder.mechanism!r}."
        )
    return SampledNeuron("laplace").prepared(predictor.model, predictor.cost)


def _guarantee(stated: Guarantee, mechanism: Mechanism, predictor: Predictor) -> Guarantee:
    """Return the stated guarantee; for another mechanism its own reason, at a status no better than stated."""
    if mechanism is predictor.mechanism:
        return stated
    one = claimed(mechanism.guarantee(predictor.model.classes), mechanism)
    worse = one if stated.status == "proven" or one.status == "refuted" else stated
    return Guarantee.of(
        stated.cost,
        status=worse.status,
        because=worse.because,
        parameters=one.parameters,
        assumptions=tuple(dict.fromkeys((*stated.assumptions, *one.assumptions))),
        unit=stated.unit,
    )


def _released_answer(model: PrivateModel, rows: Rows) -> Answers:
    """Answer with released weights: post-processing, without a mechanism."""
    probabilities = model.predict_proba(rows)
    return Answers(np.asarray(probabilities.argmax(-1), dtype=np.int64), probabilities)


LOADERS: dict[str, Callable[[ModelFolder], Deployment]] = {
    "mlp": _load_network,
    "head": _load_private,
    "teachers": _load_private,
    "dpsgd": _load_private,
}
"""The kinds of model that can be served, each with the function that loads its folder."""


_CONFIRM_TIMEOUT = 60.0
_POLL_SECONDS = 0.05
_MAX_RETRY_SECONDS = 60.0

Load = Callable[[str], Deployment]
"""Reads ``NAME/VERSION=FOLDER``."""
Bind = Callable[[Ledger, Iterable[Deployment]], list[Deployment]]
"""Binds models to their accounts, as `deploy` does."""


@dataclass(frozen=True)
class LoadedVersion:
    """The version of a model that all workers serve."""

    version: str  # The version
    digest: str  # Digest of the deployment, in hexadecimal digits: every worker must have read the same files
    signature: str  # Changes when the files of the folder change; see `ModelRepository.signature`


@dataclass(frozen=True)
class DesiredModels:
    """What all workers of a service should serve."""

    revision: int  # Grows with every change
    models: dict[str, LoadedVersion | None]  # The models of the repository by name. None: unloaded on request


class SharedState:
    """The desired models, and who has confirmed them, in a folder that all workers of a service share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "models.json"
        self._write(DesiredModels(0, {}))

    def _read(self) -> DesiredModels:
        document = json.loads(self._file.read_text(encoding="utf-8"))
        models = {
            name: None if version is None else LoadedVersion(**version)
            for name, version in document["models"].items()
        }
        return DesiredModels(document["revision"], models)

    def _marker(self) -> tuple[int, int]:
        """Return numbers that change when the file is written; much cheaper than to read it."""
        state = self._file.stat()
        return state.st_ino, state.st_mtime_ns

    def _write(self, desired: DesiredModels) -> None:
        models = {
            name: None if version is None else vars(version) for name, version in desired.models.items()
        }
        text = json.dumps({"revision": desired.revision, "models": models})
        atomic_write(self._file, lambda staging: staging.write_text(text, encoding="utf-8"))

    def _confirm(self, revision: int, errors: Mapping[str, str]) -> None:
        """Say that this process serves a revision."""
        text = json.dumps({"revision": revision, "errors": dict(errors)})
        file = self._folder / f"worker-{os.getpid()}"
        atomic_write(file, lambda staging: staging.write_text(text, encoding="utf-8"))

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Let only one process at a time change the models; the lock of a killed process is free at once."""
        with (self._folder / "lock").open("w") as file:
            until = time.monotonic() + _CONFIRM_TIMEOUT
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise HttpError(503, "Another change of the models is in progress.") from None
                    time.sleep(_POLL_SECONDS)
                else:
                    break
            yield

    def _wait(self, revision: int, name: str) -> tuple[int, int, str | None]:
        until = time.monotonic() + _CONFIRM_TIMEOUT
        while True:
            found = self._confirmations()
            reached = [each for each in found if each["revision"] >= revision]
            if len(reached) == len(found) or time.monotonic() > until:
                failures = [each["errors"][name] for each in reached if name in each["errors"]]
                return len(reached) - len(failures), len(found), failures[0] if failures else None
            time.sleep(_POLL_SECONDS)

    def _confirmations(self) -> list[dict[str, Any]]:
        """What each worker that lives has confirmed."""
        found = []
        for file in self._folder.glob("worker-*"):
            try:
                os.kill(int(file.name.removeprefix("worker-")), 0)
                found.append(json.loads(file.read_text(encoding="utf-8")))
            except (ProcessLookupError, FileNotFoundError):
                file.unlink(missing_ok=True)
        return found


class ModelControl:
    """Loads and unloads the models of a repository. Created before the workers are started, used in each of them."""

    def __init__(
        self,
        repository: ModelRepository,
        state: SharedState,
        load: Load,
        bind: Bind,
        reserved: Iterable[str] = (),
    ) -> None:
        self._repository = repository
        self._state = state
        self._load = load
        self._bind = bind
        self._reserved = frozenset(reserved)
        self._changing = threading.Lock()
        self._errors: dict[str, str] = {}
        self._failed: dict[str, str] = {}
        self._failures = 0
        self._retry_at = math.inf
        self._seen = (0, 0)
        self._ledger: Ledger | None = None
        read = {name: self._read_highest(name) for name in repository._names()}
        self._models = {name: deployment for name, (deployment, _) in read.items()}
        self._desired = DesiredModels(1, {name: version for name, (_, version) in read.items()})
        state._write(self._desired)

    def start(self) -> list[Deployment]:
        """Return the models that this process serves first, without accounts, but not those that cannot be read."""
        self._ledger = None
        self._catch_up(self._state._read())
        return self.deployments

    def _serve(self, ledger: Ledger, deployments: Iterable[Deployment], use: Callable[[], None]) -> None:
        """Begin to follow what other workers load."""
        self._ledger = ledger
        self._use = use
        self._models = {each.name: each for each in deployments if each.name in self._models}

    def _confirm(self) -> None:
        """Say that this process now answers requests, and that others must wait for it when they change the models."""
        with suppress(OSError):  # a full disk: the request waits in vain, but the model is served
            self._state._confirm(self._desired.revision, self._failed)

    @property
    def _is_behind(self) -> bool:
        """Whether `follow` should be called: another worker has changed the models, or it is time to try again."""
        return self._state._marker() != self._seen or time.monotonic() >= self._retry_at

    @property
    def deployments(self) -> list[Deployment]:
        """The models of the repository that this process serves."""
        return list(self._models.values())

    def _index(self) -> list[dict[str, str]]:
        """Describe every version in the repository: its name, version, state, and why it is not served."""
        served = {each.label for each in self.deployments}
        rows = []
        for name in self._repository._names():
            for version in self._repository._versions(name):
                ready = f"{name}/{version}" in served
                reason = "" if ready else self._errors.get(name, "not loaded")
                state = "READY" if ready else "UNAVAILABLE"
                rows.append({"name": name, "version": version, "state": state, "reason": reason})
        return rows

    def load(self, name: str) -> Deployment:
        """Serve the highest version of a model in all workers. The version before it goes once this one is ready."""
        self._check_name(name)
        with self._change() as desired:
            bound, version = self._read_and_bind(name)
            self._publish(desired, name, bound, version)
        self._wait(name, f"The model {bound.label} was loaded")
        return bound

    def unload(self, name: str) -> None:
        """Stop serving a model in all workers. What it has cost stays charged."""
        with self._change() as desired:
            if name not in desired.models:
                self._check_name(name)
            self._publish(desired, name, None, None)
        self._wait(name, f"The model {name} was unloaded")

    def _reload(self) -> tuple[list[str], dict[str, str]]:
        """Load what is new in the repository: models, versions and changed folders. Unloaded models stay unloaded."""
        loaded, failed = [], {}
        for name in self._repository._names():
            try:
                with self._change() as desired:
                    if not self._is_new(name, desired):
                        continue
                    bound, version = self._read_and_bind(name)
                    self._publish(desired, name, bound, version)
                loaded.append(bound.label)
            except QuietmaxError as error:
                failed[name] = str(error)
        return loaded, failed

    def _follow(self) -> list[str]:
        """Serve what another worker has loaded or unloaded; return what failed.

        A model that cannot be loaded here stays as it was, and is tried again after 2, 4, 8, ... seconds.
        """
        with self._changing:
            seen = self._state._marker()
            desired = self._state._read()
            again = bool(self._failed) or desired.revision != self._desired.revision
            if again:
                self._catch_up(desired)
            self._seen = seen
            return list(self._failed.values()) if again else []

    def _is_new(self, name: str, desired: DesiredModels) -> bool:
        if name in self._reserved or (name in desired.models and desired.models[name] is None):
            return False
        version = self._repository._versions(name)[-1]
        current = desired.models.get(name)
        return current is None or (current.version, current.signature) != (
            version,
            self._repository._signature(name, version),
        )

    def _check_name(self, name: str) -> None:
        if name in self._reserved:
            raise InvalidInput(
                f"The model {name} was named at the start, so it is not loaded from the repository."
            )
        if not self._repository._versions(name):
            raise HttpError(
                404, "The model repository has no such model. POST /v2/repository/index lists all."
            )

    @contextmanager
    def _change(self) -> Iterator[DesiredModels]:
        """Let nobody else change the models, here or in another worker, and begin with what they have changed."""
        with self._state._lock(), self._changing:
            desired = self._state._read()
            if desired.revision != self._desired.revision:
                self._catch_up(desired)
            yield desired

    def _publish(
        self, desired: DesiredModels, name: str, bound: Deployment | None, version: LoadedVersion | None
    ) -> None:
        """Serve a model here, or none of its name, and tell the other workers."""
        self._errors.pop(name, None)
        self._note_failures({known: error for known, error in self._failed.items() if known != name})
        models = {known: model for known, model in self._models.items() if known != name}
        self._models = models if bound is None else {**models, name: bound}
        self._desired = DesiredModels(desired.revision + 1, {**desired.models, name: version})
        self._use()
        self._state._write(self._desired)
        self._confirm()

    def _wait(self, name: str, done: str) -> None:
        confirmed, workers, error = self._state._wait(self._desired.revision, name)
        if error is not None:
            raise HttpError(503, f"{done} by {confirmed} of {workers} workers; the others try again: {error}")
        if confirmed < workers:
            raise HttpError(
                503,
                f"{done} by {confirmed} of {workers} workers; the others have not confirmed it within "
                f"{_CONFIRM_TIMEOUT:g} seconds.",
            )

    def _catch_up(self, desired: DesiredModels) -> None:
        """Serve the desired models: those that this process has, and the others from their folders."""
        models: dict[str, Deployment] = {}
        failed: dict[str, str] = {}
        for name, version in desired.models.items():
            if version is None:
                continue
            model = self._models.get(name)
            if model is None or (model.version, model.digest.hex()) != (version.version, version.digest):
                try:
                    model = self._read_same(name, version)
                except QuietmaxError as error:
                    failed[name] = str(error)
                    model = None if self._ledger is None else model
            if model is not None:
                models[name] = model
        self._models = models
        self._note_failures(failed)
        self._desired = desired
        if self._ledger is not None:
            self._use()
            self._confirm()

    def _read_same(self, name: str, version: LoadedVersion) -> Deployment:
        """Read and bind the version that another process has loaded."""
        model = self._read(name, version.version)
        if model.digest.hex() != version.digest:
            raise QuietmaxError(
                f"The folder of {name}/{version.version} has changed since it was loaded. Load it again."
            )
        return model if self._ledger is None else self._bind(self._ledger, [model])[0]

    def _note_failures(self, failed: dict[str, str]) -> None:
        """Remember which models could not be loaded here, and when to try again."""
        self._errors.update(failed)
        self._failed = failed
        self._failures = self._failures + 1 if failed else 0
        wait = min(2.0**self._failures, _MAX_RETRY_SECONDS) if failed else math.inf
        self._retry_at = time.monotonic() + wait

    def _read_and_bind(self, name: str) -> tuple[Deployment, LoadedVersion]:
        try:
            assert self._ledger is not None
            model, version = self._read_highest(name)
            (bound,) = self._bind(self._ledger, [model])
        except QuietmaxError as error:
            self._errors[name] = str(error)
            raise
        return bound, version

    def _read_highest(self, name: str) -> tuple[Deployment, LoadedVersion]:
        if name in self._reserved:
            raise InvalidInput(f"Model names must be unique, but {name} is also in the model repository.")
        version = self._repository._versions(name)[-1]
        signature = self._repository._signature(name, version)
        model = self._read(name, version)
        return model, LoadedVersion(version, model.digest.hex(), signature)

    def _read(self, name: str, version: str) -> Deployment:
        try:
            return self._load(f"{name}/{version}={self._repository._folder(name, version)}")
        except QuietmaxError:
            raise
        except Exception as error:
            raise QuietmaxError(
                f"The model {name}/{version} cannot be read ({type(error).__name__})."
            ) from error

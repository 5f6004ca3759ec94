"""The model repository: reads model folders into deployments, at the start and while the service runs.

To serve a further kind of model, write a function from a `ModelFolder` to a `Deployment` and add it to `LOADERS` under
the ``kind`` that the model folder states. No loader takes a noise source: served answers always draw exact noise
(THEORY 3.5).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quietmax.accounting.costs import Budget
from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.estimators.evaluation import EVALUATION_FILE, read_evaluations, split_name
from quietmax.estimators.serialization import PrivateModel, open_private
from quietmax.ledger.accounts import Terms
from quietmax.ledger.ledger import Ledger
from quietmax.mechanisms.algorithm1 import Algorithm1
from quietmax.mechanisms.base import (
    Answerer,
    Answers,
    digest_text,
    releases_probabilities,
)
from quietmax.models.serialization import load_model, read_description
from quietmax.predictor import Predictor, claimed
from quietmax.server.deployment import Deployment, MigratedBudget, Rows, _version_order, binding_order
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
        name, version, path = _parse_model(text)
        folder = ModelFolder(name, version, path, read_description(path), budget, queries)
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
    """Load an ordinary network behind Algorithm 1 as published: conditional for two classes, refuted for more."""
    if folder.budget is None:
        raise InvalidInput(f"The ordinary model in {folder.path} states no budget; `budget` is required.")
    model = load_model(folder.path)
    mechanism = Algorithm1("gaussian")
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
        return _charged_per_answer(
            folder,
            Answerer(predictor.model, predictor.mechanism, features=model.features),
            kind=model.kind,
            inputs=model.inputs,
            classes=classes,
            guarantee=model.guarantee,
            terms=terms,
            encoding=model.encoding,
            migrated_budget=MigratedBudget(
                FileAccount(folder.path / ACCOUNT_FILE, identity=folder.description.get(ACCOUNT_ID)),
                predictor.remaining.queries + predictor.answered,
                folder._digest().hex(),
            ),
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


class ModelRepository:
    """The models of a directory with one folder ``NAME/VERSION`` for each: the highest version of every name is served.

    Parameters
    ----------
    directory : Path
        The directory.
    load : function
        Reads a list of ``NAME/VERSION=FOLDER``, as `load_models` does.
    bind : function
        Binds models to their accounts, as `deploy` does.
    reserved : iterable of str
        Names of models that are served from elsewhere.
    """

    def __init__(
        self,
        directory: Path,
        load: Callable[[list[str]], list[Deployment]],
        bind: Callable[[Ledger, list[Deployment]], list[Deployment]],
        reserved: Iterable[str] = (),
    ) -> None:
        if not directory.is_dir():
            raise InvalidInput(f"The model repository {directory} must be a directory.")
        self._directory = directory.resolve()
        self._load = load
        self._bind = bind
        self._reserved = frozenset(reserved)
        self._models: dict[str, tuple[str, Deployment]] = {}  # by name, after the state of their files

    @property
    def deployments(self) -> list[Deployment]:
        """The models that are served."""
        return [model for _, model in self._models.values()]

    def start(self, ledger: Ledger | None) -> list[Deployment]:
        """Read and bind all models; raise if that fails for one."""
        for error in self.refresh(ledger).values():
            raise InvalidInput(error)
        return self.deployments

    def refresh(self, ledger: Ledger | None) -> dict[str, str]:
        """Read what is new or changed and bind it, unless there is no ledger; forget what is gone.

        A model that cannot be read or bound changes nothing: what was served under its name stays. The result says why.
        """
        if not self._directory.is_dir():
            raise QuietmaxError(
                f"The model repository {self._directory} is away; its models stay as they are."
            )
        models, read, errors = {}, {}, {}
        for name in self._folders(self._directory):
            versions = self._folders(self._directory / name)
            if not versions:
                continue
            folder = self._directory / name / max(versions, key=_version_order)
            state = _file_state(folder)
            if name in self._models:
                models[name] = self._models[name]
            if name not in self._models or self._models[name][0] != state:
                try:
                    read[name] = state, self._read(name, folder)
                except QuietmaxError as error:
                    errors[name] = str(error)
        # One by one: a model that cannot be paid for keeps no other from being served.
        for name, (state, model) in sorted(read.items(), key=lambda each: binding_order(each[1][1])):
            try:
                bound = model if ledger is None else self._bind(ledger, [model])[0]
                models[name] = state, bound
            except QuietmaxError as error:
                errors[name] = str(error)
        self._models = models
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
    """Return a text that changes when the files of a version are replaced, or the model was evaluated again."""
    found = [str(folder)]
    for file in (*MODEL_FILES, EVALUATION_FILE):
        with suppress(OSError):
            state = (folder / file).stat()
            found.append(f"{file} {state.st_ino} {state.st_size} {state.st_mtime_ns}")
    return ", ".join(found)

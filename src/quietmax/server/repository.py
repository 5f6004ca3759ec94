"""What can be served: a loaded model with its mechanism, its guarantee and its cost per answer.

To add a kind of model, write a function from a `Folder` to a `Servable` and add it to `LOADERS` in
`quietmax.server.repository` under the "kind" that the model folder states. A model that pays for every answer is made
with `per_answer`; one whose release was paid for at training with `paid_at_training`. Neither takes a source of noise:
what is served draws exact noise from the operating system's entropy and nothing else (THEORY 3.5).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quietmax.accounting.budget import Budget
from quietmax.accounting.costs import Cost
from quietmax.accounting.guarantee import Guarantee
from quietmax.data.encoding import Encoding
from quietmax.errors import InvalidInput
from quietmax.estimators.serialization import PrivateModel, open_private
from quietmax.ledger.accounts import Terms
from quietmax.mechanisms.algorithm1 import Algorithm1
from quietmax.mechanisms.base import Answerer, Answers, Mechanism, PublicMap, releases_probabilities
from quietmax.mechanisms.sampled_neuron import SampledNeuron
from quietmax.models.serialization import load_model, read_description
from quietmax.models.training import Classifier
from quietmax.predictor import Predictor
from quietmax.spending import ACCOUNT_FILE, FileAccount

Rows = NDArray[np.float32]
LARGEST_VALUE = 1e15
"""Features beyond this are refused, so that no sum of squares in float32 overflows."""


@dataclass(frozen=True)
class Folder:
    """A model folder to be served, and what the owner asked for."""

    path: Path
    description: Mapping[str, Any]
    budget: Terms | None
    queries: int | None
    mechanism: str | None
    noise: str


@dataclass(frozen=True)
class MigratedBudget:
    """The account in a model folder: answers that were paid for outside of the ledger, of a limit."""

    account: FileAccount
    limit: int


@dataclass(frozen=True, eq=False)
class Servable:
    """A model that can be asked.

    `cost` is that of one answer; None if answers cost nothing further, and then `training_cost` is what training spent
    (None if that is no cost in either currency). `terms` is the budget the model brings along, `claim` the sentence
    and assumptions on which it rests. `digest` changes with the weights and the mechanism.
    """

    kind: str
    inputs: int
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    dataset: str
    mechanism: str
    releases_probabilities: bool
    claim: Guarantee
    cost: Cost | None
    training_cost: Cost | None
    terms: Terms | None
    digest: bytes
    answer: Callable[[Rows], Answers]
    encoding: Encoding | None = None
    migrated_budget: MigratedBudget | None = None

    @property
    def proven(self) -> bool:
        """Whether its guarantee is proven."""
        return self.claim.status == "proven"


def per_answer(
    folder: Folder,
    model: Classifier,
    mechanism: Mechanism,
    *,
    kind: str,
    inputs: int,
    classes: tuple[str, ...],
    claim: Guarantee,
    terms: Terms | None,
    shape: tuple[int, ...] | None = None,
    features: PublicMap | None = None,
    encoding: Encoding | None = None,
    migrated_budget: MigratedBudget | None = None,
) -> Servable:
    """A model that pays for every answer; `mechanism` is prepared. Its own guarantee must be in a currency."""
    one = mechanism.guarantee(model.classes)
    if one.extra_delta or one.definition == "approximate":
        raise InvalidInput(
            f"The mechanism {mechanism.name} of {folder.path} spends a delta of its own with every answer, which the "
            "ledger cannot count; serve it with another mechanism."
        )
    cost = mechanism.cost(model.classes)
    return Servable(
        kind=kind,
        inputs=inputs,
        shape=shape or (inputs,),
        classes=classes,
        dataset=str(folder.description.get("dataset", "")),
        mechanism=mechanism.name,
        releases_probabilities=releases_probabilities(mechanism, model.classes),
        claim=claim,
        cost=cost,
        training_cost=None,
        terms=terms,
        digest=folder_digest(folder.path, f"{mechanism!r}"),
        answer=Answerer(model, mechanism, features=features, non_finite="undecided").answer,
        encoding=encoding,
        migrated_budget=migrated_budget,
    )


def paid_at_training(
    folder: Folder,
    answer: Callable[[Rows], Answers],
    *,
    kind: str,
    inputs: int,
    classes: tuple[str, ...],
    claim: Guarantee,
    terms: Terms | None,
    shape: tuple[int, ...] | None = None,
    encoding: Encoding | None = None,
) -> Servable:
    """A model whose weights were released under `claim`: every answer is post-processing and costs nothing further."""
    return Servable(
        kind=kind,
        inputs=inputs,
        shape=shape or (inputs,),
        classes=classes,
        dataset=str(folder.description.get("dataset", "")),
        mechanism="released weights",
        releases_probabilities=True,
        claim=claim,
        cost=None,
        training_cost=None if claim.definition == "approximate" else claim.cost,
        terms=terms,
        digest=folder_digest(folder.path, ""),
        answer=answer,
        encoding=encoding,
    )


def folder_digest(path: Path, mechanism: str) -> bytes:
    """SHA-256 of the description, the weights and the mechanism: a stored answer belongs to exactly these."""
    sha256 = hashlib.sha256(json.dumps(mechanism).encode())
    for name in ("model.json", "weights.safetensors"):
        content = (path / name).read_bytes()
        sha256.update(b"%s %d " % (name.encode(), len(content)) + content)
    return sha256.digest()


_NAMED = re.compile(r"(?:(?P<name>[^/=]+)(?:/(?P<version>[^/=]+))?=)?(?P<folder>.+)")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Named:
    """A servable under the name and version it is asked by."""

    name: str
    version: str
    servable: Servable

    @property
    def label(self) -> str:
        """``name/version``, as the journal calls it."""
        return f"{self.name}/{self.version}"


def load_servables(
    models: Sequence[str],
    *,
    budget: Terms | None = None,
    queries: int | None = None,
    mechanism: str | None = None,
    noise: str = "gaussian",
    accept_unproven: bool = False,
) -> list[Named]:
    """Load models given as ``[NAME[/VERSION]=]FOLDER``; refuse one without proven guarantee unless told otherwise."""
    loaded: list[Named] = []
    for text in models:
        name, version, path = named_folder(text)
        if any((other.name, other.version) == (name, version) for other in loaded):
            raise InvalidInput(
                f"Two models are called {name}/{version}; name one otherwise, as in {name}/2={path}."
            )
        servable = load_servable(Folder(path, read_description(path), budget, queries, mechanism, noise))
        if not servable.proven and not accept_unproven:
            raise InvalidInput(
                f"The guarantee of {path} is {servable.claim.status}, not proven: {servable.claim.because} Serve a "
                "private head or teachers, or give --accept-unproven; every answer will then say so."
            )
        loaded.append(Named(name, version, servable))
    return loaded


def named_folder(text: str) -> tuple[str, str, Path]:
    """Read ``[NAME[/VERSION]=]FOLDER``.

    >>> named_folder("digits/2=models/new")[:2], named_folder("models/digits")[:2]
    (('digits', '2'), ('digits', '1'))
    """
    found = _NAMED.fullmatch(text)
    if found is None:
        raise InvalidInput(f"{text!r} names no model; give a folder, or NAME=FOLDER, or NAME/VERSION=FOLDER.")
    if Path(text).is_dir():  # its name may hold an equals sign
        name, version, path = Path(text).resolve().name, "1", Path(text)
    else:
        path = Path(found["folder"])
        name, version = found["name"] or path.resolve().name, found["version"] or "1"
    for word in (name, version):
        if not _WORD.fullmatch(word):
            raise InvalidInput(
                f"The model would be called {name}/{version}, but names and versions are letters, digits, dots, "
                "dashes and underscores; choose one with NAME=FOLDER."
            )
    return name, version, path


def load_servable(folder: Folder) -> Servable:
    """Load a model of any known kind; only JSON and safetensors are read."""
    kind = str(folder.description.get("kind"))
    if kind not in LOADERS:
        raise InvalidInput(
            f"The model in {folder.path} is of kind {kind!r}, which cannot be served; serve one of the kinds: "
            f"{', '.join(LOADERS)}."
        )
    return LOADERS[kind](folder)


def _ordinary(folder: Folder) -> Servable:
    """An ordinary network behind Algorithm 1 as published: conditional for two classes, refuted for more."""
    if folder.mechanism not in (None, "algorithm1"):
        raise InvalidInput(
            f"The ordinary model in {folder.path} cannot be served with {folder.mechanism!r}; choose algorithm1."
        )
    if folder.budget is None:
        raise InvalidInput(
            f"The ordinary model in {folder.path} brings no budget along; give --budget, and --queries to divide it."
        )
    model = load_model(folder.path)
    open_mechanism = Algorithm1(folder.noise)  # type: ignore[arg-type]
    terms = Terms(folder.budget.epsilon, folder.budget.delta, open_mechanism.reading)
    whole = Budget(terms.epsilon, terms.delta, folder.queries)
    mechanism = Answerer.prepare(model, open_mechanism, whole).mechanism
    one = mechanism.guarantee(model.classes)
    return per_answer(
        folder,
        model,
        mechanism,
        kind="mlp",
        inputs=model.features,
        classes=(
            model.encoding.classes if model.encoding else tuple(str(label) for label in range(model.classes))
        ),
        claim=one,
        terms=terms,
        shape=model.image_shape,
        encoding=model.encoding,
    )


def _private(folder: Folder) -> Servable:
    """A head, teachers or a network trained by DP-SGD, under the guarantee their training stated."""
    private = open_private(folder.path)
    classes = private.encoding.classes if private.encoding else private.classes
    epsilon, delta = folder.description.get("epsilon"), folder.description.get("delta")
    terms = None if epsilon is None else Terms(float(epsilon), float(delta or 0.0))
    if not isinstance(private.answerer, Predictor):
        if folder.mechanism is not None:
            raise InvalidInput(
                f"The weights in {folder.path} are released, so their answers need no mechanism; leave it out."
            )
        return paid_at_training(
            folder,
            partial(_answer_released, private),
            kind=private.kind,
            inputs=private.inputs,
            classes=classes,
            claim=private.guarantee,
            terms=terms,
            encoding=private.encoding,
        )
    predictor = private.answerer
    mechanism: Mechanism = predictor.mechanism
    if folder.mechanism == "sampled-neuron" and private.kind == "head":
        mechanism = SampledNeuron("laplace").prepared(predictor.model, predictor.cost)
    elif folder.mechanism not in (None, mechanism.name):
        raise InvalidInput(
            f"The model in {folder.path} cannot be served with {folder.mechanism!r}; leave the mechanism out."
        )
    return per_answer(
        folder,
        predictor.model,
        mechanism,
        kind=private.kind,
        inputs=private.inputs,
        classes=classes,
        claim=_claim(private.guarantee, mechanism, predictor),
        terms=terms,
        features=private.features,
        encoding=private.encoding,
        migrated_budget=MigratedBudget(
            FileAccount(folder.path / ACCOUNT_FILE), predictor.remaining.queries + predictor.answered
        ),
    )


def _claim(stated: Guarantee, mechanism: Mechanism, predictor: Predictor) -> Guarantee:
    """The stated guarantee; with another mechanism its own reason, at a status no better than stated."""
    if mechanism is predictor.mechanism:
        return stated
    one = mechanism.guarantee(predictor.model.classes)
    return Guarantee.of(
        stated.cost,
        status=one.status if stated.status == "proven" else stated.status,
        because=one.because if stated.status == "proven" else stated.because,
        parameters=one.parameters,
        assumptions=stated.assumptions,
    )


def _answer_released(model: PrivateModel, rows: Rows) -> Answers:
    """Answer with released weights: post-processing."""
    probabilities = model.predict_proba(rows)
    return Answers(np.asarray(probabilities.argmax(-1), dtype=np.int64), probabilities)


LOADERS: dict[str, Callable[[Folder], Servable]] = {
    "mlp": _ordinary,
    "head": _private,
    "teachers": _private,
    "dpsgd": _private,
}
"""The kinds of model folders that can be served, and the function that loads each."""

"""From model folders to servables: which kinds there are, and which are refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quietmax.account import FileAccount
from quietmax.accounting import Budget, Guarantee, per_query
from quietmax.errors import InvalidInput
from quietmax.estimators import PrivateModel, open_private
from quietmax.estimators.private_model import ACCOUNT_FILE
from quietmax.ledger import Terms
from quietmax.mechanisms import Algorithm1, Answers, Mechanism, SampledNeuron
from quietmax.models import load_model
from quietmax.models.files import read_description
from quietmax.predictor import Predictor
from quietmax.server.servable import CarriedOver, Folder, Rows, Servable, paid_at_training, per_answer

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
    mechanism = open_mechanism.prepared(
        model, per_query(whole, open_mechanism.currency, open_mechanism.reading)
    )
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
            _Released(private),
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
        carried_over=CarriedOver(
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


@dataclass(frozen=True, eq=False)
class _Released:
    """Answers of released weights: post-processing."""

    model: PrivateModel

    def __call__(self, rows: Rows) -> Answers:
        probabilities = self.model.predict_proba(rows)
        return Answers(np.asarray(probabilities.argmax(-1), dtype=np.int64), probabilities)


LOADERS: dict[str, Callable[[Folder], Servable]] = {
    "mlp": _ordinary,
    "head": _private,
    "teachers": _private,
    "dpsgd": _private,
}
"""The kinds of model folders that can be served, and the function that loads each."""

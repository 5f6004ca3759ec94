"""What can be served: a loaded model with its mechanism, its guarantee and its cost per answer.

To add a kind of model, write a function from a `Folder` to a `Servable` and add it to `LOADERS` in
`quietmax.server.loading` under the "kind" that the model folder states. A model that pays for every answer is made
with `per_answer`; one whose release was paid for at training with `paid_at_training`. Neither takes a source of noise:
what is served draws exact noise from the operating system's entropy and nothing else (THEORY 3.5).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quietmax.account import FileAccount
from quietmax.accounting import Cost, Guarantee
from quietmax.data import Encoding
from quietmax.errors import InvalidInput
from quietmax.ledger import Terms
from quietmax.mechanisms import Answers, Mechanism
from quietmax.mechanisms.mechanism import releases_probabilities
from quietmax.models import Classifier
from quietmax.noise import ExactNoise

Rows = NDArray[np.float32]
LARGEST_VALUE = 1e15
"""Features beyond this are refused, so that no sum of squares in float32 overflows."""


class PublicMap(Protocol):
    """A feature map chosen without the private records."""

    def transform(self, features: Rows) -> Rows:
        """Map rows of features."""
        ...


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
class CarriedOver:
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
    carried_over: CarriedOver | None = None

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
    carried_over: CarriedOver | None = None,
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
        answer=Noisy(model, mechanism, features),
        encoding=encoding,
        carried_over=carried_over,
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


@dataclass(frozen=True, eq=False)
class Noisy:
    """Answers by a mechanism, with exact noise always."""

    model: Classifier
    mechanism: Mechanism
    features: PublicMap | None = None

    def __call__(self, rows: Rows) -> Answers:
        """Randomised answers; a row for which the model has no finite scores counts as undecided, never as an error.

        An error after the charge would tell something of the model for nothing.
        """
        scores = self.model.scores(rows if self.features is None else self.features.transform(rows))
        finite = np.isfinite(scores).all(axis=1, keepdims=True)
        return self.mechanism.release(np.where(finite, scores, 0.0), ExactNoise())


def folder_digest(path: Path, mechanism: str) -> bytes:
    """SHA-256 of the description, the weights and the mechanism: a stored answer belongs to exactly these."""
    sha256 = hashlib.sha256(json.dumps(mechanism).encode())
    for name in ("model.json", "weights.safetensors"):
        content = (path / name).read_bytes()
        sha256.update(b"%s %d " % (name.encode(), len(content)) + content)
    return sha256.digest()

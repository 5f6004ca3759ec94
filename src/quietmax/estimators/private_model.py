"""A private model opened from its folder: asked with features of records, answers with what is claimed of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quietmax.account import ACCOUNT_FILE as ACCOUNT_FILE
from quietmax.accounting import Guarantee
from quietmax.data import Encoding
from quietmax.estimators.conditions import Condition
from quietmax.models.features import FeatureMap
from quietmax.noise import EXACT, NoiseSource, SeededNoise
from quietmax.predictor import Predictor

UNFIT = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RuntimeError)
"""What building a model from a damaged folder may raise."""
_MOST_INPUTS = 10**7


@dataclass(frozen=True, eq=False)
class OwnPart:
    """What one kind of private model stores of its own: its feature map, public numbers and weights."""

    features: Any
    description: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


class Answers(Protocol):
    """Anything that answers in class numbers, and perhaps in probabilities."""

    def predict(self, features: NDArray[np.float32]) -> NDArray[np.int64]:
        """Class numbers."""
        ...

    def predict_proba(self, features: NDArray[np.float32]) -> NDArray[np.float64]:
        """Class probabilities, where the model releases them."""
        ...


@dataclass(frozen=True, eq=False)
class PrivateModel:
    """``inputs`` features per record; ``answerer`` sees them after the public feature map.

    A `Predictor` as answerer pays for every answer; a head's weights were paid for once, at training.
    """

    kind: str
    inputs: int
    classes: tuple[str, ...]
    guarantee: Guarantee
    encoding: Encoding | None
    features: FeatureMap | None
    answerer: Answers

    def predict(self, records: NDArray[np.float32]) -> NDArray[np.int64]:
        """Class numbers for encoded records."""
        return self.answerer.predict(self._mapped(records))

    def predict_proba(self, records: NDArray[np.float32]) -> NDArray[np.float64]:
        """Class probabilities for encoded records."""
        return self.answerer.predict_proba(self._mapped(records))

    @property
    def remaining(self) -> int | None:
        """How many further answers are paid for; None means any number."""
        return self.answerer.remaining.queries if isinstance(self.answerer, Predictor) else None

    def _mapped(self, records: NDArray[np.float32]) -> NDArray[np.float32]:
        return records if self.features is None else self.features.transform(records)


def check_parts(model: PrivateModel) -> None:
    """Refuse, with one of `UNFIT`, parts that do not fit together, before an answer is paid for; zeros are scored."""
    if not 1 <= model.inputs <= _MOST_INPUTS:
        raise ValueError(f"{model.inputs} inputs")
    asked: Any = model.answerer.model if isinstance(model.answerer, Predictor) else model.answerer
    zeros = np.zeros((1, model.inputs), dtype=np.float32)
    scores = asked.scores(zeros if model.features is None else model.features.transform(zeros))
    classes = len(model.classes if model.encoding is None else model.encoding.classes)
    if scores.shape != (1, len(model.classes)) or classes != len(model.classes):
        raise ValueError("its classes are not those of its encoding or its weights")


def check_same(what: str, stored: Any, computed: Any, *, within: float = 1e-9) -> None:
    """Raise ValueError if a folder states something else than what follows from the rest of it.

    Numbers may differ by the relative error ``within``, since libraries round differently.
    """
    if not _alike(stored, computed, within):
        raise ValueError(f"it states {what} {stored!r}, but the rest of it implies {computed!r}")


def check_claim(stated: Guarantee, computed: Guarantee) -> None:
    """Raise ValueError unless a stored guarantee states what `computed` does.

    Words may differ, as another version may have written them. Assumptions may be added, but none may be lost.
    """
    for name in ("status", "definition", "neighbours", "epsilon", "mu", "delta", "extra_delta"):
        check_same(name, getattr(stated, name), getattr(computed, name))
    check_parameters(stated, computed)
    if len(stated.assumptions) > len(computed.assumptions):
        raise ValueError("it lists more assumptions than what it was made with explains")


def check_parameters(stated: Guarantee, computed: Guarantee) -> None:
    """Raise ValueError if a parameter that both guarantees name differs."""
    for name in stated.parameters.keys() & computed.parameters.keys() - {"because"}:
        check_same(name, stated.parameters[name], computed.parameters[name])


def stated_noise(guarantee: Guarantee) -> NoiseSource:
    """A source of the kind that a stored guarantee names. It is for computing the claim again, not for answers."""
    described = guarantee.parameters["noise_source"]
    if described == EXACT.describe():
        return EXACT
    source = SeededNoise(described["seed"] if "seed" in described else np.random.default_rng(0))
    check_same("noise_source", described, source.describe())
    return source


def stated_as_declared(guarantee: Guarantee, name: str, otherwise: Condition) -> bool:
    """Whether a stored guarantee says that something was declared; version 0.1 listed the assumption only."""
    assumed = any(assumption in guarantee.assumptions for assumption in otherwise.assumptions)
    return guarantee.parameters.get(name, not assumed) is True


def _alike(stored: Any, computed: Any, within: float) -> bool:
    if isinstance(stored, bool) or isinstance(computed, bool):
        return stored is computed
    if isinstance(stored, int | float) and isinstance(computed, int | float):
        return math.isclose(stored, computed, rel_tol=within)
    if isinstance(stored, Mapping) and isinstance(computed, Mapping):
        return stored.keys() == computed.keys() and all(
            _alike(stored[name], computed[name], within) for name in stored
        )
    if isinstance(stored, list | tuple) and isinstance(computed, list | tuple):
        return len(stored) == len(computed) and all(
            _alike(*pair, within) for pair in zip(stored, computed, strict=True)
        )
    return bool(stored == computed)

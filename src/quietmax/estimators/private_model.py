"""A private model opened from its folder: asked with features of records, answers with what is claimed of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quietmax.account import ACCOUNT_FILE as ACCOUNT_FILE
from quietmax.accounting import Guarantee
from quietmax.data import Encoding
from quietmax.models.features import FeatureMap
from quietmax.predictor import Predictor

UNFIT = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError)
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

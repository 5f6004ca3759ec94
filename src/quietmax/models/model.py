"""A trained classifier together with what is known about its training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from quietmax.data import Encoding
from quietmax.errors import InvalidInput
from quietmax.models.mlp import MLP, checked_finite
from quietmax.models.settings import TrainingSettings


@runtime_checkable
class Classifier(Protocol):
    """Anything that gives one row of scores per record: logits of a network, or votes of several."""

    @property
    def classes(self) -> int:
        """The number of classes."""
        ...

    def scores(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """What a mechanism sees, in float64, shape (records, classes); `InvalidInput` for features it cannot take."""
        ...


@dataclass(frozen=True, eq=False)
class Model:
    """A trained multilayer perceptron. Its answers are *not* private; a `Predictor` makes private ones.

    ``records`` is the number of training records, ``dataset`` and ``seed`` say which ones they were.
    """

    network: MLP
    settings: TrainingSettings
    records: int
    dataset: str
    seed: int
    encoding: Encoding | None = None
    image_shape: tuple[int, int, int] | None = None

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.network.classes

    @property
    def features(self) -> int:
        """The number of features of a record."""
        return self.network.widths[0]

    def logits(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """Logits in float64, shape (records, classes)."""
        return self.network.logits(features).double().numpy()

    scores = logits

    def predict_proba(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """Plain class probabilities, with no privacy at all."""
        return softmax(self.logits(features))

    def predict(self, features: NDArray[np.floating]) -> NDArray[np.int64]:
        """The most probable class, with no privacy at all."""
        return np.asarray(self.logits(features).argmax(-1))


@dataclass(frozen=True, eq=False)
class TorchModel:
    """Any torch module that maps a batch of records to logits, seen as a classifier.

    >>> TorchModel(torch.nn.Linear(4, 3), classes=3).logits(np.zeros((2, 4), np.float32)).shape
    (2, 3)
    """

    module: torch.nn.Module
    classes: int
    rows_at_once: int = field(default=1024, kw_only=True)

    def logits(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """Logits in float64; the module runs in evaluation mode and is left as it was."""
        training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                parts = torch.split(torch.as_tensor(features, dtype=torch.float32), self.rows_at_once)
                answers = [self.module(checked_finite(part)) for part in parts]
        finally:
            self.module.train(training)
        logits = torch.cat(answers).double().numpy() if answers else np.empty((0, self.classes))
        if logits.ndim != 2 or logits.shape[1] != self.classes:
            raise InvalidInput(
                f"The module returned values of shape {logits.shape}, but expected one row of {self.classes} logits "
                "per record; check its last layer and the number of classes."
            )
        return logits

    scores = logits

    def predict(self, features: NDArray[np.floating]) -> NDArray[np.int64]:
        """The most probable class, with no privacy at all."""
        return np.asarray(self.logits(features).argmax(-1))


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """``exp(z - max) / sum exp(z - max)`` along the last axis: only differences of logits matter, nothing overflows."""
    return torch.softmax(torch.from_numpy(np.ascontiguousarray(logits, dtype=np.float64)), -1).numpy()

"""The linear part of a fitted head: scores from public features."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quietmax.estimators.head_table import ROWS_AT_ONCE, clipped_rows, unit_rows
from quietmax.models import softmax
from quietmax.sensitivity import ScoreBounds

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """`scores(f) = W (f - m, b) / ||(f - m, b)||`, f being public features divided by the radius and clipped.

    `weights` (C, d + 1), the last column for the constant feature b; `centre` m. If the weights were
    released, everything computed here is post-processing.
    """

    weights: Floats
    centre: Floats
    bias: float
    radius: float

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.weights)

    def scores(self, features: NDArray[np.floating]) -> Floats:
        """Logits of shape (records, classes)."""
        inputs = np.asarray(features, dtype=np.float32)
        logits = np.empty((len(inputs), self.classes))
        for start in range(0, len(inputs), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            rows = unit_rows(clipped_rows(inputs[part], self.radius), self.centre, self.bias)
            logits[part] = rows @ self.weights.T
        return logits

    def predict(self, features: NDArray[np.floating]) -> NDArray[np.int64]:
        """Class numbers."""
        return np.asarray(self.scores(features).argmax(-1))

    def predict_proba(self, features: NDArray[np.floating]) -> Floats:
        """Class probabilities."""
        return softmax(self.scores(features))


@dataclass(frozen=True, eq=False)
class PrivateHeadWeights(HeadWeights):
    """Weights that were not released, with certified bounds on their scores: a `Predictor` may answer from them."""

    bounds: ScoreBounds

"""The linear part of a fitted head: scores from public features."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quietmax.estimators.head.exact_sums import ROWS_AT_ONCE, clipped_rows, unit_rows
from quietmax.mechanisms.base import proves_bounds
from quietmax.models.training import softmax
from quietmax.sensitivity import certified
from quietmax.sensitivity.base import ScoreBounds, Sensitivity

Floats = NDArray[np.float64]

_SLACK = 2.0**-20


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
    """Weights that were not released, with bounds on their scores: a `Predictor` may answer from them.

    The bounds are proven of weights that `certified` made; bounds passed to the constructor are an assumption.
    """

    bounds: ScoreBounds
    _derived: bool = field(default=False, init=False, repr=False)

    @classmethod
    def certified(cls, head: HeadWeights, sensitivity: Sensitivity, *, longest: float) -> PrivateHeadWeights:
        """Add the bounds that follow from the weights' sensitivity, widened for the rounding of computed scores.

        A score computed in float64 is off by at most `(d + 2) 2^-53 ||W||`, twice that between neighbours, doubled to
        be safe. ``longest`` is a public bound on `||W||`: longer weights are scaled down to it, which moves no two
        further apart, so nothing here depends on the records or is refused because of them.
        """
        length = math.sqrt(float(np.square(head.weights).sum()))
        weights = head.weights * min(1.0, longest / max(length, longest))
        rounding = 4 * (head.weights.shape[1] + 2) * 2.0**-53 * longest * math.sqrt(head.classes)
        widened = Sensitivity(
            sensitivity.value * (1 + _SLACK) + rounding, sensitivity.basis, sensitivity.because
        )
        bounds = certified.score_bounds(widened, classes=head.classes)
        private = cls(weights, head.centre, head.bias, head.radius, bounds)
        object.__setattr__(private, "_derived", True)
        return private


proves_bounds(PrivateHeadWeights, when=lambda head: head._derived)

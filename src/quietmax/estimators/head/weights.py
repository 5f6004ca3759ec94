"""A fitted head as a classifier: scores from public features, and bounds on them if the weights stay private."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quietmax.accounting.guarantee import Unit
from quietmax.estimators.blocks import ROWS_AT_ONCE, Floats
from quietmax.estimators.head.exact_sums import clipped_rows, unit_rows, whitened_rows
from quietmax.mechanisms.base import proves_bounds
from quietmax.models.training import LogitClassifier
from quietmax.sensitivity import certified
from quietmax.sensitivity.certified import ScoreBounds, Sensitivity

_SLACK = 2.0**-20


@dataclass(frozen=True, eq=False)
class HeadWeights(LogitClassifier):
    """The classifier `scores(f) = W (f - m, b) / ||(f - m, b)||` of public features f, clipped to a radius.

    If the weights were released, everything computed here is post-processing.
    """

    weights: Floats  # W; the last column is for the constant feature b
    centre: Floats  # m
    bias: float  # b
    radius: float  # Features are clipped to this length and divided by it
    whitening: Floats | None = field(default=None, kw_only=True)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.weights)

    def scores(self, features: NDArray[np.floating]) -> Floats:
        """Compute the logits."""
        inputs = np.asarray(features, dtype=np.float32)
        logits = np.empty((len(inputs), self.classes))
        for start in range(0, len(inputs), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            rows = unit_rows(clipped_rows(inputs[part], self.radius), self.centre, self.bias)
            if self.whitening is not None:
                rows = whitened_rows(rows, self.whitening)
            logits[part] = rows @ self.weights.T
        return logits

    def predict_proba(self, features: NDArray[np.floating]) -> Floats:
        """Compute class probabilities."""
        logits = self.scores(features)
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))


@dataclass(frozen=True, eq=False)
class PrivateHeadWeights(HeadWeights):
    """Weights that were not released, with bounds on their scores: a `Predictor` may answer from them.

    The bounds are proven for weights that `PrivateHead.fit` made or that were opened from a model folder. For weights
    that you make yourself, here or by `certified`, they are an assumption.
    """

    bounds: ScoreBounds  # How far one record or person moves the scores of any query
    _fitted: bool = field(default=False, init=False, repr=False)

    @classmethod
    def certified(
        cls, head: HeadWeights, sensitivity: Sensitivity, *, max_norm: float, unit: Unit = "record"
    ) -> PrivateHeadWeights:
        """Add the bounds that follow from the sensitivity of the weights, widened for the rounding of the scores.

        A score computed in float64 is off by at most `(d + 2) 2^-53 ||W||`, twice that between neighbours, doubled to
        be safe.
        """
        length = math.sqrt(float(np.square(head.weights).sum()))
        weights = head.weights * min(1.0, max_norm / max(length, max_norm))
        rounding = 4 * (head.weights.shape[1] + 2) * 2.0**-53 * max_norm * math.sqrt(head.classes)
        widened = Sensitivity(
            sensitivity.value * (1 + _SLACK) + rounding, sensitivity.basis, sensitivity.because
        )
        bounds = certified.score_bounds(widened, classes=head.classes, unit=unit)
        return cls(weights, head.centre, head.bias, head.radius, bounds, whitening=head.whitening)

    @classmethod
    def _of_fit(
        cls, head: HeadWeights, sensitivity: Sensitivity, *, max_norm: float, unit: Unit = "record"
    ) -> PrivateHeadWeights:
        """Return weights with proven bounds; only for weights whose sensitivity this library derived itself."""
        private = cls.certified(head, sensitivity, max_norm=max_norm, unit=unit)
        object.__setattr__(private, "_fitted", True)
        return private


proves_bounds(PrivateHeadWeights, when=lambda head: head._fitted)

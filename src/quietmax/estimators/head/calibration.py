"""The scale of released scores at which confidence equals accuracy, found with noise (THEORY 3.15).

`h(s)`, the sum over rows of confidence minus correctness of the scores times s, grows with s, and one record or person
moves it by at most 1. A few bisection steps on h with noise find where it is zero.
DP-SGD adds up the rows of a batch of its own in every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from quietmax.estimators.blocks import Floats, Table
from quietmax.estimators.head.exact_sums import _UNIT, Rows, probabilities
from quietmax.estimators.head.weights import CALIBRATION_STEPS
from quietmax.noise.release import release_gaussian
from quietmax.noise.sources import NoiseSource

SMALLEST_SCALE, LARGEST_SCALE = 0.125, 4.0

Scores = Callable[[Table, slice], Floats]
"""Returns the scores of some rows of a block, one line per class; each row's follow from that row alone."""


def released_scale(
    table: Rows,
    scores: Scores,
    rows_at_once: int,
    mu: float,
    source: NoiseSource,
    class_weights: Floats | None = None,
) -> float:
    """Release the scale; all bisection steps together are mu-Gaussian private."""
    # The squares add up to less than mu^2 after rounding.
    step_mu = mu / math.sqrt(CALIBRATION_STEPS) * (1.0 - 1e-12)
    excess = partial(_Excess, scores, rows_at_once=rows_at_once, class_weights=class_weights)
    return _bisected_scale(lambda scale: table.sum(excess(scale)), CALIBRATION_STEPS, step_mu, source)


def _bisected_scale(
    excess_at: Callable[[float], int], steps: int, step_mu: float, source: NoiseSource
) -> float:
    """Release the scale from sums of `_Excess`; each bisection step is step_mu-Gaussian private."""
    low, high = math.log(SMALLEST_SCALE), math.log(LARGEST_SCALE)
    for _ in range(steps):
        middle = (low + high) / 2.0
        # From 2^33 rows on the sum may not be a float64 number; clamping moves no two sums further apart.
        excess = max(-(2**53), min(excess_at(math.exp(middle)), 2**53)) / _UNIT
        noisy = release_gaussian([excess], sensitivity=1.0, mu=step_mu, source=source).values[0]
        low, high = (low, middle) if noisy > 0.0 else (middle, high)
    return math.exp((low + high) / 2.0)


@dataclass(frozen=True)
class _Excess:
    """Sums confidence minus correctness over a block, in units of 2^-20, each rounded towards zero."""

    scores: Scores
    scale: float
    rows_at_once: int
    class_weights: Floats | None = None  # What a record counts by its class, at most 1

    def __call__(self, block: Table) -> int:
        total = 0
        for start in range(0, len(block), self.rows_at_once):
            part = slice(start, min(start + self.rows_at_once, len(block)))
            found = self.scores(block, part)
            excess = probabilities(found * self.scale).max(axis=0)
            excess -= found.argmax(axis=0) == block.labels[part]
            if self.class_weights is not None:
                excess *= self.class_weights[block.labels[part]]
            if block.repeats is not None:
                excess = excess / block.repeats[part]
            total += int(np.trunc(excess * _UNIT).sum())
        return total

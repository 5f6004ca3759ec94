"""The scale of released scores at which confidence equals accuracy, found with noise (THEORY 3.15).

`h(s)`, the sum over rows of confidence minus correctness of the scores times s, grows with s, and one record or person
moves it by at most 1. A few bisection steps on h with noise find where it is zero.
DP-SGD adds up the rows of a batch of its own in every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from quietmax._threads import parallel_map
from quietmax.estimators.blocks import Floats, Table
from quietmax.estimators.head.exact_sums import _UNIT, Rows, logistic, probabilities
from quietmax.estimators.head.weights import CALIBRATION_STEPS
from quietmax.noise.release import release_gaussian
from quietmax.noise.sources import NoiseSource

SMALLEST_SCALE, LARGEST_SCALE = 0.125, 4.0

Scores = Callable[[Table, slice], Floats]
"""Returns the scores of some rows of a block, one line per class; each row's follow from that row alone. For two
classes one line may stand for the difference."""
SCORES_AT_ONCE = 2**13
_LARGEST_SCORE = 1e30
"""Kept scores are at most this: float32 holds them."""


def with_scores(scores: Scores, rows_at_once: int, block: Table) -> Table:
    """Put the scores of all rows in the place of the rows; for two classes, their difference."""
    rows = np.empty((len(block), 1 if block.classes == 2 else block.classes), np.float32)

    def fill(number: int) -> None:
        part = slice(number * rows_at_once, min((number + 1) * rows_at_once, len(block)))
        found = scores(block, part)
        difference = found[1:] - found[:1] if len(found) == 2 else found
        rows[part] = np.clip(difference, -_LARGEST_SCORE, _LARGEST_SCORE).T

    parallel_map(fill, -(-len(block) // rows_at_once))
    return replace(block, rows=rows)


def kept_scores(block: Table, part: slice) -> Floats:
    """Return what `with_scores` has kept."""
    return np.asarray(block.rows[part].T, np.float64)


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
            if len(found) == 1:
                excess = logistic(np.abs(found[0]) * self.scale)
                excess -= (found[0] > 0.0) == block.labels[part]
            else:
                excess = probabilities(found * self.scale).max(axis=0)
                excess -= found.argmax(axis=0) == block.labels[part]
            if self.class_weights is not None:
                excess *= self.class_weights[block.labels[part]]
            if block.repeats is not None:
                excess = excess / block.repeats[part]
            total += int(np.trunc(excess * _UNIT).sum())
        return total

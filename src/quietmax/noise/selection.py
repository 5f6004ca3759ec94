"""Choose one of C candidates by score: the exponential mechanism and permute-and-flip, sampled exactly.

Only gaps to the best score matter. They are rounded to a public grid: a gap, max - score, is computed in
floating point (at most 2^-8 of a step off, being at most 2^45 steps), clipped at 2^45 steps and rounded (half
a step). Let two neighbours' scores differ by amounts within an interval of length `range_sensitivity`. Then
so do their gaps, the interval containing 0 since each side's best has gap 0; clipping moves each difference
towards 0, so it stays there; rounding adds less than 3 steps to the length. With exponent
epsilon/(range_sensitivity + 3 steps) the logarithms of the probability ratios lie in an interval of length
epsilon: bounded range epsilon, hence epsilon-differential privacy (Dong, Durfee, Rogers 2020).
Permute-and-flip with the same exponent is epsilon-differentially private (McKenna, Sheldon 2020; only
differences matter, so shift one side to make every score move by at most half the length).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quietmax.errors import InvalidInput
from quietmax.noise.release import DECIMAL_SLACK, Grid, checked_positive, checked_values, power_of_two_below
from quietmax.noise.sources import EXACT, NoiseSource

STEPS_PER_RANGE = 2.0**20
CLIP_STEPS = 2.0**45
ROUNDING_STEPS = 3
_CELLS = 1 << 16


@dataclass(frozen=True)
class Choice:
    """The chosen candidate of each row, the `exponent` of the score, the grid's `step`, and who drew it."""

    index: NDArray[np.int64]
    exponent: float
    step: float
    source: str


def choose(
    scores: ArrayLike,
    *,
    epsilon: float,
    sensitivity: float | None = None,
    range_sensitivity: float | None = None,
    source: NoiseSource = EXACT,
) -> Choice:
    """Choose candidate v of each row with probability proportional to exp(exponent * score_v).

    exponent = epsilon/range, a little less for the rounding; range = `range_sensitivity` if given (how far
    one record can change the difference of two scores), otherwise 2 * `sensitivity` (each score). Each row
    costs epsilon; in the Gaussian measure only `accounting.bounded_range_as_gaussian(epsilon)`. `scores` is
    (n, C) or (C,).

    >>> choose([[0.0, 50.0], [50.0, 0.0]], epsilon=2.0, sensitivity=1.0).index
    array([1, 0])
    """
    return _choose(scores, epsilon, sensitivity, range_sensitivity, source, flip=False)


def permute_and_flip(
    scores: ArrayLike,
    *,
    epsilon: float,
    sensitivity: float | None = None,
    range_sensitivity: float | None = None,
    source: NoiseSource = EXACT,
) -> Choice:
    """Choose a candidate of each row by permute-and-flip: never a worse expected score than `choose` at equal epsilon.

    In random order, accept candidate v with probability exp(exponent * (score_v - best)) until one is
    accepted. Each row costs epsilon; in the Gaussian measure `accounting.pure_as_gaussian(epsilon)`, up to
    twice that of `choose`.

    >>> permute_and_flip([0.0, 50.0], epsilon=2.0, sensitivity=1.0).index
    array(1)
    """
    return _choose(scores, epsilon, sensitivity, range_sensitivity, source, flip=True)


@lru_cache(maxsize=1024)
def _grid(spread: float, epsilon: float) -> Grid:
    """Return the step and the exponent per step, rounded down."""
    step = power_of_two_below(spread / STEPS_PER_RANGE)
    rate = Fraction(epsilon) / (Fraction(spread) / Fraction(step) + ROUNDING_STEPS) / DECIMAL_SLACK
    nearest = float(rate)
    return Grid(step, nearest if nearest <= rate else math.nextafter(nearest, 0.0))


def _choose(
    scores: ArrayLike,
    epsilon: float,
    sensitivity: float | None,
    range_sensitivity: float | None,
    source: NoiseSource,
    flip: bool,
) -> Choice:
    array = checked_values(scores)
    if array.ndim not in (1, 2) or array.shape[-1] < 1:
        raise InvalidInput(
            f"The scores have shape {array.shape}, but must be (rows, candidates) or (candidates,); reshape them."
        )
    spreads = []
    if sensitivity is not None:
        spreads.append(2.0 * checked_positive(sensitivity, "sensitivity"))
    if range_sensitivity is not None:
        spreads.append(checked_positive(range_sensitivity, "range sensitivity"))
    if not spreads:
        raise InvalidInput(
            "A choice needs the sensitivity or the range_sensitivity of the scores: give one or both."
        )
    grid = _grid(min(spreads), checked_positive(epsilon, "epsilon"))
    draw = source.permute_and_flip_choice if flip else source.exponential_choice
    rows = np.atleast_2d(array)
    index = np.empty(len(rows), dtype=np.int64)
    width = max(1, _CELLS // rows.shape[1])
    for start in range(0, len(rows), width):
        part = rows[start : start + width]
        index[start : start + width] = draw(_gaps(part, grid.step), grid.scale)
    return Choice(index.reshape(array.shape[:-1]), grid.scale / grid.step, grid.step, source.name)


def _gaps(rows: NDArray[np.float64], step: float) -> NDArray[np.float64]:
    """Return each score's distance from its row's best in whole steps, candidates by rows."""
    columns = np.ascontiguousarray(rows.T)
    with np.errstate(over="ignore"):  # an infinite gap is clipped like any other
        gaps: NDArray[np.float64] = columns.max(axis=0) - columns
    np.minimum(gaps, CLIP_STEPS * step, out=gaps)
    gaps /= step
    return np.rint(gaps, out=gaps)

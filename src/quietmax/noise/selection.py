"""Choose one of C candidates by score: the exponential mechanism and permute-and-flip, sampled exactly.

Only the gaps to the best score matter. They are rounded to a public grid: a gap, max - score, is computed in floating
point (at most 2^-8 of a step off, being at most 2^45 steps), clipped at 2^45 steps and rounded (half a step). Let the
scores of two neighbours differ by amounts within an interval of length `range_sensitivity`. Then so do their gaps, and
the interval contains 0 since each side's best has gap 0. Clipping moves each difference towards 0, so it stays in the
interval. Rounding adds less than 3 steps to the length. With exponent epsilon/(range_sensitivity + 3 steps) the
logarithms of the probability ratios lie in an interval of length epsilon: bounded range epsilon, hence
epsilon-differential privacy (Dong, Durfee, Rogers 2020). Permute-and-flip with the same exponent is
epsilon-differentially private (McKenna, Sheldon 2020; only differences matter, so shift one side to make every score
move by at most half the length).
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

_STEPS_PER_RANGE = 2.0**20
_CLIP_STEPS = 2.0**45
ROUNDING_STEPS = 3
_CELLS = 1 << 16


@dataclass(frozen=True)
class Choice:
    """The chosen candidates."""

    index: NDArray[np.int64]  # The chosen candidate of each row
    exponent: float  # The factor of the scores in the exponent
    step: float  # The grid step to which the gaps were rounded
    source: str  # The name of the noise source


def choose(
    scores: ArrayLike,
    *,
    epsilon: float,
    sensitivity: float | None = None,
    range_sensitivity: float | None = None,
    source: NoiseSource = EXACT,
) -> Choice:
    """Choose candidate v of each row with probability proportional to exp(exponent * score_v).

    This is the exponential mechanism. The exponent is epsilon/range, a little less because of rounding. Each row costs
    epsilon; in the Gaussian measure only `quietmax.accounting.bounded_range_as_gaussian` of epsilon.

    Parameters
    ----------
    scores : array_like of shape (rows, candidates) or (candidates,)
        The scores; larger is better.
    epsilon : float
        The cost of each row.
    sensitivity : float or None
        How far one record can move a single score.
    range_sensitivity : float or None
        How far one record can move the difference of two scores. If both are given, the smaller of this and
        ``2 * sensitivity`` counts; one of the two is required.
    source : NoiseSource
        Where the randomness comes from. Exact by default.

    Returns
    -------
    Choice
        The chosen candidate of each row.

    Examples
    --------
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
    """Choose a candidate of each row by permute-and-flip.

    In random order, candidate v is accepted with probability exp(exponent * (score_v - best)) until one is accepted.
    The expected score is never worse than that of `choose` at the same epsilon. Each row costs epsilon; in the Gaussian
    measure `quietmax.accounting.pure_as_gaussian` of epsilon, up to twice the cost of `choose`.

    Parameters
    ----------
    scores : array_like of shape (rows, candidates) or (candidates,)
        The scores; larger is better.
    epsilon : float
        The cost of each row.
    sensitivity : float or None
        How far one record can move a single score.
    range_sensitivity : float or None
        How far one record can move the difference of two scores. If both are given, the smaller of this and
        ``2 * sensitivity`` counts; one of the two is required.
    source : NoiseSource
        Where the randomness comes from. Exact by default.

    Returns
    -------
    Choice
        The chosen candidate of each row.

    Examples
    --------
    >>> permute_and_flip([0.0, 50.0], epsilon=2.0, sensitivity=1.0).index
    array(1)
    """
    return _choose(scores, epsilon, sensitivity, range_sensitivity, source, flip=True)


@lru_cache(maxsize=1024)
def _grid(spread: float, epsilon: float) -> Grid:
    """Return the step and the exponent per step, rounded down."""
    step = power_of_two_below(spread / _STEPS_PER_RANGE)
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
    """Round the gaps to the grid and choose, some rows at a time."""
    array = checked_values(scores)
    if array.ndim not in (1, 2) or array.shape[-1] < 1:
        raise InvalidInput(
            f"scores must have shape (rows, candidates) or (candidates,) with 1 or more candidates, got {array.shape}."
        )
    spreads = []
    if sensitivity is not None:
        spreads.append(2.0 * checked_positive(sensitivity, "sensitivity"))
    if range_sensitivity is not None:
        spreads.append(checked_positive(range_sensitivity, "range_sensitivity"))
    if not spreads:
        raise InvalidInput("sensitivity or range_sensitivity is required.")
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
    """Return each score's distance from the best of its row in integer steps, shape (candidates, rows)."""
    columns = np.ascontiguousarray(rows.T)
    with np.errstate(over="ignore"):  # an infinite gap is clipped like any other
        gaps: NDArray[np.float64] = columns.max(axis=0) - columns
    np.minimum(gaps, _CLIP_STEPS * step, out=gaps)
    gaps /= step
    return np.rint(gaps, out=gaps)

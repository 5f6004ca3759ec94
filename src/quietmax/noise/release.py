"""Release values with noise, or the choice of a candidate, on a public grid.

**Noise.** Values are rounded to integer multiples of a step. The step is a power of two, so dividing by it and
multiplying back is exact. Rounding moves each coordinate by at most half a step, hence the coordinates of two
neighbours by at most one step more: sqrt(d) steps in L2, d in L1 (THEORY 3.5). The step depends on public numbers alone
(sensitivity, privacy parameter, number of coordinates) and is so small that rounding hardly matters. The noise scale
covers the sensitivity and the rounding together; it is computed in exact fractions and rounded up.

**Choices** by score: the exponential mechanism and permute-and-flip. Only the gaps to the best score matter. They are
rounded to a public grid: a gap, max - score, is computed in floating point (at most 2^-8 of a step off, being at most
2^45 steps), clipped at 2^45 steps and rounded (half a step). Let the scores of two neighbours differ by amounts within
an interval of length `range_sensitivity`. Then so do their gaps, and the interval contains 0 since each side's best has
gap 0. Clipping moves each difference towards 0, so it stays in the interval. Rounding adds less than 3 steps to the
length. With exponent epsilon/(range_sensitivity + 3 steps) the logarithms of the probability ratios lie in an interval
of length epsilon: bounded range epsilon, hence epsilon-differential privacy (Dong, Durfee, Rogers 2020).
Permute-and-flip with the same exponent is epsilon-differentially private (McKenna, Sheldon 2020; only differences
matter, so shift one side to make every score move by at most half the length).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quietmax.errors import InvalidInput, checked_positive
from quietmax.noise.sources import EXACT, LARGEST_SCALE, NoiseSource

# The grid of Gaussian and of Laplace noise. Another grid gives other seeded numbers: `tests/fixtures/seeded` follow.
_FINENESS = 2.0**-16
"""Rounding may add this share of the sensitivity, unless that needs a scale above `_FAST_SCALE`."""
_MIN_SCALE = 2.0**20
"""The noise scale is at least this many steps, so that the grid is fine beside the noise too."""
_FAST_SCALE = 2.0**32
"""The step is made coarser where the scale would be larger: exact noise then takes longer to draw."""
CLIP_STEPS = 2.0**62
"""Values are clipped at this many steps: with the noise they fit into 64-bit integers."""
_DECIMAL_SLACK = 1 + Fraction(1, 2**52)
"""An epsilon or mu is charged as the decimal it prints as, up to 2^-53 of it below the float: noise is added for it."""

# The grid of choices.
_STEPS_PER_RANGE = 2.0**20
"""The range sensitivity is at least this many steps."""
_GAP_CLIP_STEPS = 2.0**45
_ROUNDING_STEPS = 3
"""Computing and rounding the gaps may add this many steps to the range sensitivity."""
_CELLS = 1 << 16
"""Scores of which the gaps are computed at a time."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class NoisyValues:
    """Released values and the noise that was added to them.

    Parameters
    ----------
    values : ndarray
        The values with noise.
    scale : float
        The standard deviation of Gaussian noise, or the mean absolute value of Laplace noise.
    step : float
        The grid step; every value is an integer multiple of it.
    """

    values: Floats
    scale: float
    step: float


def release_gaussian(
    values: ArrayLike,
    *,
    sensitivity: float,
    mu: float,
    source: NoiseSource = EXACT,
    coordinates: int | None = None,
) -> NoisyValues:
    """Add N(0, sigma^2) noise to every value, sigma = (sensitivity + rounding)/mu: mu-Gaussian privacy.

    Values beyond +-2^62 steps, which is more than 10^9 sigma, are clipped.

    Parameters
    ----------
    values : array_like
        The values to release.
    sensitivity : float
        How far one record moves, in L2, any `coordinates` of the values together.
    mu : float
        The privacy parameter.
    source : NoiseSource
        Where the noise comes from. Exact noise by default.
    coordinates : int or None
        The number of values that the sensitivity refers to; all of them if None. Use 1 for independent queries that
        are each charged on their own.

    Raises
    ------
    InvalidInput
        If a value is not finite or a parameter is not a positive number. Nothing has been drawn.

    Examples
    --------
    >>> from quietmax.noise import SeededNoise
    >>> release_gaussian([0.25, 4.0], sensitivity=1.0, mu=1e6, source=SeededNoise(0)).values.round(3)
    array([0.25, 4.  ])
    """
    array = _checked_values(values)
    rounding = math.isqrt(_checked_coordinates(coordinates, array.size) - 1) + 1
    grid = _grid_for(checked_positive(sensitivity, "sensitivity"), checked_positive(mu, "mu"), rounding)
    return _noisy(array, source.gaussian(grid.scale, array.size), grid)


def release_laplace(
    values: ArrayLike,
    *,
    sensitivity: float,
    epsilon: float,
    source: NoiseSource = EXACT,
    coordinates: int | None = None,
) -> NoisyValues:
    """Add Laplace noise of scale (sensitivity + rounding)/epsilon to every value: epsilon-differential privacy.

    Parameters
    ----------
    sensitivity : float
        How far one record moves, in L1, any `coordinates` of the values together.
    epsilon : float
        The privacy parameter.
    values, source, coordinates
        As in `release_gaussian`.

    Examples
    --------
    >>> from quietmax.noise import SeededNoise
    >>> release_laplace([0.25, 4.0], sensitivity=1.0, epsilon=1e6, source=SeededNoise(0)).values.round(3)
    array([0.25, 4.  ])
    """
    array = _checked_values(values)
    rounding = _checked_coordinates(coordinates, array.size)
    grid = _grid_for(
        checked_positive(sensitivity, "sensitivity"), checked_positive(epsilon, "epsilon"), rounding
    )
    return _noisy(array, source.laplace(grid.scale, array.size), grid)


@dataclass(frozen=True)
class _Grid:
    step: float  # The grid step, a power of two
    scale: float  # The noise scale, or the exponent of a choice, in steps


@lru_cache(maxsize=1024)
def _grid_for(sensitivity: float, privacy: float, rounding_steps: int) -> _Grid:
    """Return the grid on which noise of scale (sensitivity + rounding)/privacy is drawn."""
    ideal = sensitivity / privacy
    step = min(sensitivity * _FINENESS / rounding_steps, ideal / _MIN_SCALE)
    step = _power_of_two_below(max(step, ideal / _FAST_SCALE))
    needed = Fraction(sensitivity) / Fraction(step) + rounding_steps
    exact = needed / Fraction(privacy) * _DECIMAL_SLACK
    scale = float(exact)
    if scale < exact:
        scale = math.nextafter(scale, math.inf)
    if scale > LARGEST_SCALE:
        raise InvalidInput(
            f"Epsilon or mu {privacy:g} for {rounding_steps} rounding steps requires noise of {scale:.1e} grid steps. "
            "At most 2^50 steps are supported: a larger epsilon or mu, or fewer coordinates."
        )
    return _Grid(step, scale)


def _checked_values(values: ArrayLike) -> Floats:
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        array = np.array(np.nan)
    if np.isfinite(array).all():
        return array
    raise InvalidInput("The values to release must be finite numbers. Nothing was drawn.")


def _power_of_two_below(value: float) -> float:
    return math.ldexp(0.5, math.frexp(value)[1])


def _checked_coordinates(coordinates: int | None, size: int) -> int:
    """Return the number of coordinates that the sensitivity refers to, at least 1."""
    if coordinates is None:
        return max(size, 1)
    if isinstance(coordinates, bool) or int(coordinates) != coordinates or coordinates < 1:
        raise InvalidInput(f"coordinates must be an integer of at least 1 or None, got {coordinates!r}.")
    return int(coordinates)


def _noisy(array: Floats, noise: NDArray[np.int64], grid: _Grid) -> NoisyValues:
    limit = CLIP_STEPS * grid.step
    steps = np.maximum(array.reshape(-1), -limit)
    np.minimum(steps, limit, out=steps)
    steps /= grid.step
    np.rint(steps, out=steps)
    noise += steps.astype(np.int64)
    released = noise.astype(np.float64)
    released *= grid.step
    return NoisyValues(released.reshape(array.shape), grid.scale * grid.step, grid.step)


def choose(
    scores: ArrayLike, *, epsilon: float, range_sensitivity: float, source: NoiseSource = EXACT
) -> NDArray[np.int64]:
    """Choose candidate v of each row with probability proportional to exp(exponent * score_v).

    This is the exponential mechanism. The exponent is epsilon/range, a little less because of rounding. Each row costs
    epsilon; in the Gaussian measure only `quietmax.accounting.costs.bounded_range_as_gaussian` of epsilon.

    Parameters
    ----------
    scores : array_like of shape (rows, candidates) or (candidates,)
        The scores; larger is better.
    epsilon : float
        The cost of each row.
    range_sensitivity : float
        How far one record can move the difference of two scores: at most twice as far as a single score.
    source : NoiseSource
        Where the randomness comes from. Exact by default.

    Returns
    -------
    ndarray of int
        The chosen candidate of each row.

    Examples
    --------
    >>> choose([[0.0, 50.0], [50.0, 0.0]], epsilon=2.0, range_sensitivity=2.0)
    array([1, 0])
    """
    return _choose(scores, epsilon, range_sensitivity, source.exponential_choice)


def permute_and_flip(
    scores: ArrayLike, *, epsilon: float, range_sensitivity: float, source: NoiseSource = EXACT
) -> NDArray[np.int64]:
    """Choose a candidate of each row by permute-and-flip.

    In random order, candidate v is accepted with probability exp(exponent * (score_v - best)) until one is accepted.
    The expected score is never worse than that of `choose` at the same epsilon. Each row costs epsilon; in the Gaussian
    measure `quietmax.accounting.pure_as_gaussian` of epsilon, up to twice the cost of `choose`.

    Parameters
    ----------
    scores, epsilon, range_sensitivity, source
        As in `choose`, and so is what is returned.

    Examples
    --------
    >>> permute_and_flip([0.0, 50.0], epsilon=2.0, range_sensitivity=2.0)
    array(1)
    """
    return _choose(scores, epsilon, range_sensitivity, source.permute_and_flip_choice)


@lru_cache(maxsize=1024)
def _choice_grid(spread: float, epsilon: float) -> _Grid:
    """Return the step and the exponent per step, rounded down."""
    step = _power_of_two_below(spread / _STEPS_PER_RANGE)
    rate = Fraction(epsilon) / (Fraction(spread) / Fraction(step) + _ROUNDING_STEPS) / _DECIMAL_SLACK
    nearest = float(rate)
    return _Grid(step, nearest if nearest <= rate else math.nextafter(nearest, 0.0))


def _choose(
    scores: ArrayLike,
    epsilon: float,
    spread: float,
    draw: Callable[[Floats, float], NDArray[np.int64]],
) -> NDArray[np.int64]:
    array = _checked_values(scores)
    if array.ndim not in (1, 2) or array.shape[-1] < 1:
        raise InvalidInput(
            f"scores must have shape (rows, candidates) or (candidates,) with 1 or more candidates, got {array.shape}."
        )
    grid = _choice_grid(checked_positive(spread, "range_sensitivity"), checked_positive(epsilon, "epsilon"))
    rows = np.atleast_2d(array)
    index = np.empty(len(rows), dtype=np.int64)
    width = max(1, _CELLS // rows.shape[1])
    for start in range(0, len(rows), width):
        part = rows[start : start + width]
        index[start : start + width] = draw(_gaps(part, grid.step), grid.scale)
    return index.reshape(array.shape[:-1])


def _gaps(rows: NDArray[np.float64], step: float) -> NDArray[np.float64]:
    """Return each score's distance from the best of its row in integer steps, shape (candidates, rows)."""
    columns = np.ascontiguousarray(rows.T)
    with np.errstate(over="ignore"):  # an infinite gap is clipped like any other
        gaps: NDArray[np.float64] = columns.max(axis=0) - columns
    np.minimum(gaps, _GAP_CLIP_STEPS * step, out=gaps)
    gaps /= step
    return np.rint(gaps, out=gaps)

"""Add Laplace or Gaussian noise to values on a public grid.

Values are rounded to integer multiples of a step. The step is a power of two, so dividing by it and multiplying back
is exact. Rounding moves each coordinate by at most half a step, hence the coordinates of two neighbours by at most one
step more: sqrt(d) steps in L2, d in L1 (THEORY 3.5). The step depends on public numbers alone (sensitivity, privacy
parameter, number of coordinates) and is so small that rounding hardly matters. The noise scale covers the sensitivity
and the rounding together; it is computed in exact fractions and rounded up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quietmax.errors import InvalidInput
from quietmax.noise.sources import EXACT, LARGEST_SCALE, NoiseSource

_FINENESS = 2.0**-16
"""Rounding may add this share of the sensitivity, unless that needs a scale of more than 2^32 steps."""
_MIN_SCALE = 2.0**20
_FAST_SCALE = 2.0**32
CLIP_STEPS = 2.0**62
DECIMAL_SLACK = 1 + Fraction(1, 2**52)
"""An epsilon or mu is charged as the decimal it prints as, up to 2^-53 of it below the float: noise is added for it."""

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
    source : str
        The name of the noise source.
    """

    values: Floats
    scale: float
    step: float
    source: str


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

    Returns
    -------
    NoisyValues
        The released values.

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
    array = checked_values(values)
    rounding = math.isqrt(_checked_coordinates(coordinates, array.size) - 1) + 1
    grid = grid_for(checked_positive(sensitivity, "sensitivity"), checked_positive(mu, "mu"), rounding)
    noise = source.gaussian(grid.scale, array.size)
    return NoisyValues(_noisy(array, noise, grid), grid.scale * grid.step, grid.step, source.name)


def release_laplace(
    values: ArrayLike,
    *,
    sensitivity: float,
    epsilon: float,
    source: NoiseSource = EXACT,
    coordinates: int | None = None,
) -> NoisyValues:
    """Add Laplace noise of scale (sensitivity + rounding)/epsilon to every value: epsilon-differential privacy.

    Values beyond +-2^62 steps are clipped.

    Parameters
    ----------
    values : array_like
        The values to release.
    sensitivity : float
        How far one record moves, in L1, any `coordinates` of the values together.
    epsilon : float
        The privacy parameter.
    source : NoiseSource
        Where the noise comes from. Exact noise by default.
    coordinates : int or None
        The number of values that the sensitivity refers to; all of them if None.

    Returns
    -------
    NoisyValues
        The released values.

    Raises
    ------
    InvalidInput
        If a value is not finite or a parameter is not a positive number. Nothing has been drawn.

    Examples
    --------
    >>> from quietmax.noise import SeededNoise
    >>> release_laplace([0.25, 4.0], sensitivity=1.0, epsilon=1e6, source=SeededNoise(0)).values.round(3)
    array([0.25, 4.  ])
    """
    array = checked_values(values)
    rounding = _checked_coordinates(coordinates, array.size)
    grid = grid_for(
        checked_positive(sensitivity, "sensitivity"), checked_positive(epsilon, "epsilon"), rounding
    )
    noise = source.laplace(grid.scale, array.size)
    return NoisyValues(_noisy(array, noise, grid), grid.scale * grid.step, grid.step, source.name)


@dataclass(frozen=True)
class Grid:
    """The grid of a release."""

    step: float  # The grid step, a power of two
    scale: float  # The noise scale, or the exponent of a choice, in steps


@lru_cache(maxsize=1024)
def grid_for(sensitivity: float, privacy: float, rounding_steps: int) -> Grid:
    """Return the grid on which noise of scale (sensitivity + rounding)/privacy is drawn."""
    ideal = sensitivity / privacy
    step = min(sensitivity * _FINENESS / rounding_steps, ideal / _MIN_SCALE)
    step = power_of_two_below(max(step, ideal / _FAST_SCALE))
    needed = Fraction(sensitivity) / Fraction(step) + rounding_steps
    exact = needed / Fraction(privacy) * DECIMAL_SLACK
    scale = float(exact)
    if scale < exact:
        scale = math.nextafter(scale, math.inf)
    if scale > LARGEST_SCALE:
        raise InvalidInput(
            f"Epsilon or mu {privacy:g} for {rounding_steps} rounding steps requires noise of {scale:.1e} grid steps. "
            "At most 2^50 steps are supported: a larger epsilon or mu, or fewer coordinates."
        )
    return Grid(step, scale)


def checked_positive(value: float, name: str) -> float:
    """Return `value` as a float if it is between 1e-100 and 1e100."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if 1e-100 <= number <= 1e100:
        return number
    raise InvalidInput(f"{name} must be between 1e-100 and 1e100, got {value!r}.")


def checked_values(values: ArrayLike) -> Floats:
    """Return the values as float64; raise `InvalidInput` if one is not a finite number."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        array = np.array(np.nan)
    if np.isfinite(array).all():
        return array
    raise InvalidInput("The values to release must be finite numbers. Nothing was drawn.")


def power_of_two_below(value: float) -> float:
    """Return the largest power of two that is at most `value`."""
    return math.ldexp(0.5, math.frexp(value)[1])


def _checked_coordinates(coordinates: int | None, size: int) -> int:
    """Return the number of coordinates that the sensitivity refers to, at least 1."""
    if coordinates is None:
        return max(size, 1)
    if isinstance(coordinates, bool) or int(coordinates) != coordinates or coordinates < 1:
        raise InvalidInput(f"coordinates must be an integer of at least 1 or None, got {coordinates!r}.")
    return int(coordinates)


def _noisy(array: Floats, noise: NDArray[np.int64], grid: Grid) -> Floats:
    """Return the rounded values plus the noise; overwrites `noise`."""
    limit = CLIP_STEPS * grid.step
    steps = np.maximum(array.reshape(-1), -limit)
    np.minimum(steps, limit, out=steps)
    steps /= grid.step
    np.rint(steps, out=steps)
    noise += steps.astype(np.int64)
    released = noise.astype(np.float64)
    released *= grid.step
    return released.reshape(array.shape)

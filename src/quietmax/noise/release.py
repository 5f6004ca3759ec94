"""The public grid on which noise is added: its step, and how much noise a sensitivity needs on it.

Values are rounded to whole multiples of a power of two, so that dividing by the step and multiplying back is
exact. Rounding moves each coordinate by at most half a step on either side, hence two neighbours' coordinates
by at most one step more: sqrt(d) steps in L2, d in L1 (theory section 3.5). The step is chosen from public
numbers alone (sensitivity, privacy parameter, number of coordinates) and small enough that this hardly
matters; the noise scale then covers sensitivity and rounding together, in exact fractions rounded up.
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

FINENESS = 2.0**-16
"""Rounding may add this share of the sensitivity, unless that needs a scale of more than 2^32 steps."""
SMALLEST_SCALE = 2.0**20
FAST_SCALE = 2.0**32
DECIMAL_SLACK = 1 + Fraction(1, 2**52)
"""An epsilon or mu is charged as the decimal it prints as, up to 2^-53 of it below the float: noise is added for it."""


@dataclass(frozen=True)
class Grid:
    """A step (a power of two) and the noise scale in steps."""

    step: float
    scale: float


def checked_positive(value: float, name: str) -> float:
    """Return `value` as a float, refusing what is not a number from 1e-100 to 1e100."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if 1e-100 <= number <= 1e100:
        return number
    raise InvalidInput(
        f"The {name} is {value!r}, but must be a number from 1e-100 to 1e100: give such a number."
    )


def power_of_two_below(value: float) -> float:
    """Return the largest power of two that is at most `value`.

    >>> power_of_two_below(0.3)
    0.25
    """
    return math.ldexp(0.5, math.frexp(value)[1])


def rounded_up(value: Fraction) -> float:
    """Return the smallest float that is at least `value`."""
    nearest = float(value)
    return nearest if nearest >= value else math.nextafter(nearest, math.inf)


@lru_cache(maxsize=1024)
def grid_for(sensitivity: float, privacy: float, rounding_steps: int) -> Grid:
    """Return the grid on which noise of scale (sensitivity + rounding)/privacy is drawn.

    `privacy` is mu (with the L2 sensitivity) or epsilon (L1); `rounding_steps` what rounding adds to the
    sensitivity.
    """
    ideal = sensitivity / privacy
    step = min(sensitivity * FINENESS / rounding_steps, ideal / SMALLEST_SCALE)
    step = power_of_two_below(max(step, ideal / FAST_SCALE))
    needed = Fraction(sensitivity) / Fraction(step) + rounding_steps
    scale = rounded_up(needed / Fraction(privacy) * DECIMAL_SLACK)
    if scale > LARGEST_SCALE:
        raise InvalidInput(
            f"Privacy {privacy:g} for {rounding_steps} rounding steps needs noise of {scale:.1e} grid steps,"
            " more"
            " than 2^50: raise epsilon or mu, or release fewer coordinates together."
        )
    return Grid(step, scale)


CLIP_STEPS = 2.0**62

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class GaussianRelease:
    """Values with Gaussian noise: `sigma` its standard deviation, `step` the grid, `source` who drew it."""

    values: Floats
    sigma: float
    step: float
    source: str


@dataclass(frozen=True)
class LaplaceRelease:
    """Values with Laplace noise: `scale` its mean absolute value, `step` the grid, `source` who drew it."""

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
) -> GaussianRelease:
    """Add N(0, sigma^2) noise to every value, sigma = (sensitivity + rounding)/mu: mu-Gaussian privacy.

    `sensitivity` bounds how far one record moves, in L2, any `coordinates` of the values together (all of
    them if not given; e.g. 1 for independent queries each charged on its own). Values beyond +-2^62 steps,
    that is more than 10^9 sigma, are clipped. NaN and infinite values are refused before anything is drawn.

    >>> from quietmax.noise import SeededNoise
    >>> release_gaussian([0.25, 4.0], sensitivity=1.0, mu=1e6, source=SeededNoise(0)).values.round(3)
    array([0.25, 4.  ])
    """
    array = checked_values(values)
    size = checked_coordinates(coordinates, array.size)
    rounding = math.isqrt(size - 1) + 1
    grid = grid_for(checked_positive(sensitivity, "sensitivity"), checked_positive(mu, "mu"), rounding)
    noise = source.gaussian(grid.scale, array.size)
    return GaussianRelease(_noisy(array, noise, grid), grid.scale * grid.step, grid.step, source.name)


def release_laplace(
    values: ArrayLike,
    *,
    sensitivity: float,
    epsilon: float,
    source: NoiseSource = EXACT,
    coordinates: int | None = None,
) -> LaplaceRelease:
    """Add Laplace noise of scale (sensitivity + rounding)/epsilon to every value: epsilon-differential privacy.

    As `release_gaussian`, with the sensitivity in L1.

    >>> from quietmax.noise import SeededNoise
    >>> release_laplace([0.25, 4.0], sensitivity=1.0, epsilon=1e6, source=SeededNoise(0)).values.round(3)
    array([0.25, 4.  ])
    """
    array = checked_values(values)
    size = checked_coordinates(coordinates, array.size)
    grid = grid_for(checked_positive(sensitivity, "sensitivity"), checked_positive(epsilon, "epsilon"), size)
    noise = source.laplace(grid.scale, array.size)
    return LaplaceRelease(_noisy(array, noise, grid), grid.scale * grid.step, grid.step, source.name)


def checked_values(values: ArrayLike) -> Floats:
    """Return the values as float64, refusing NaN and infinity."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        array = np.array(np.nan)
    if np.isfinite(array).all():
        return array
    raise InvalidInput(
        "The values to release contain NaN, infinity or no numbers: give finite numbers; nothing was drawn."
    )


def checked_coordinates(coordinates: int | None, size: int) -> int:
    """Return the number of coordinates the sensitivity speaks of, at least 1."""
    if coordinates is None:
        return max(size, 1)
    if isinstance(coordinates, bool) or int(coordinates) != coordinates or coordinates < 1:
        raise InvalidInput(
            f"The number of coordinates is {coordinates!r}, but must be a whole number from 1 up: give one."
        )
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

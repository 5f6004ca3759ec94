"""Release numbers with Gaussian or Laplace noise on a public grid, exactly as private as stated.

The value is clipped to +-2^62 steps and rounded to the grid, k steps. What is released is k + round(scale *
X), X a real Gaussian or Laplace variable: the same as rounding k + scale*X. So the release is post-processing
of the textbook mechanism on the grid, whose L2 (L1) sensitivity is sensitivity/step + sqrt(d) (+ d) steps,
and it is *exactly* mu-Gaussian (epsilon-differentially) private: no further delta for the discretisation is
needed, unlike with the discrete Gaussian of theory section 3.5. Clipping and rounding in this order are safe
because clipping moves two values no further apart. Turning the whole number into a float afterwards is
post-processing. The stated sensitivity must hold for the values as they were computed, rounding errors
included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quietmax.errors import InvalidInput
from quietmax.noise.grid import Grid, checked_positive, grid_for
from quietmax.noise.source import EXACT, NoiseSource

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

"""Sources of noise: exact noise for a release, seeded noise for experiments.

`ExactNoise` draws from the operating system's generator, and its distribution is exact (see
`quietmax.noise.samplers`). It has no state and no buffer, so threads and forked processes share nothing. `SeededNoise`
is numpy's generator with ordinary floating-point noise. It is fast and repeatable, and for both reasons it protects
nothing: floating-point noise leaks (Mironov 2012; Haney et al. 2022; THEORY 3.5). Both draw integers, in steps of the
grid that `release_gaussian`, `release_laplace`, `choose` and `permute_and_flip` set.

Run time is a side channel. About one draw in ten thousand takes longer, depending on the random digits and not on the
value that the noise hides. A choice can also take longer for some scores than for others (nearly equal cumulative
weights, tiny exponentials). Answer after a fixed delay if clients can time single answers to microseconds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quietmax.errors import InvalidInput
from quietmax.noise import samplers

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Shape = int | tuple[int, ...]

SMALLEST_SCALE = 2.0**-8
"""With less, the error margin of `samplers` would vanish beside the rounding of a half."""
LARGEST_SCALE = 2.0**50
"""With it, noise of 2^62 steps has probability below exp(-4000): 64-bit integers cannot overflow."""


@runtime_checkable
class NoiseSource(Protocol):
    """The interface of a noise source; all draws are integers.

    Attributes
    ----------
    name : str
        ``"exact"``, ``"seeded"`` or ``"test"``; results state it.
    exact : bool
        Whether the distribution is exact and the entropy unpredictable, as a release requires.
    """

    name: str
    exact: bool

    def gaussian(self, scale: float, shape: Shape) -> Integers:
        """Draw round(scale * N(0, 1)).

        Parameters
        ----------
        scale : float
            The scale of the noise in grid steps, from 2^-8 to 2^50.
        shape : int or tuple of int
            The shape of the result.
        """
        ...

    def laplace(self, scale: float, shape: Shape) -> Integers:
        """Draw round(scale * X), where X has density exp(-|x|)/2.

        Parameters
        ----------
        scale : float
            The scale of the noise in grid steps, from 2^-8 to 2^50.
        shape : int or tuple of int
            The shape of the result.
        """
        ...

    def exponential_choice(self, gaps: Floats, rate: float) -> Integers:
        """Choose a row v of each column with probability proportional to exp(-rate*gap_v).

        Parameters
        ----------
        gaps : ndarray of shape (candidates, columns)
            Distances from the best score of each column, in grid steps.
        rate : float
            The exponent per grid step.
        """
        ...

    def permute_and_flip_choice(self, gaps: Floats, rate: float) -> Integers:
        """Choose a row v of each column by permute-and-flip with acceptance exp(-rate*gap_v).

        Parameters
        ----------
        gaps : ndarray of shape (candidates, columns)
            Distances from the best score of each column, in grid steps.
        rate : float
            The exponent per grid step.
        """
        ...

    def describe(self) -> dict[str, str | int | bool]:
        """Return a description of the source as JSON values."""
        ...


def _checked_scale(scale: float) -> float:
    """Return the scale as a float, or raise `InvalidInput`."""
    if SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        return float(scale)
    raise InvalidInput(f"The noise scale must be between 2^-8 and 2^50 grid steps, got {scale!r}.")


def _size(shape: Shape) -> int:
    """Return the number of entries of an array of this shape."""
    return shape if isinstance(shape, int) else math.prod(shape)


class ExactNoise:
    """Exact noise from the operating system's entropy: the default for everything that leaves the process.

    The arguments `_bytes` and `_margin` exist for tests: a source that is given either has the name ``"test"`` and is
    not `exact`.

    Attributes
    ----------
    name : str
        ``"exact"``.
    exact : bool
        True.

    Examples
    --------
    >>> ExactNoise().gaussian(2.0**30, (2, 3)).shape
    (2, 3)
    """

    def __init__(self, *, _bytes: Callable[[int], bytes] | None = None, _margin: float | None = None) -> None:
        self.exact = _bytes is None and _margin is None
        self.name = "exact" if self.exact else "test"
        self._read = os.urandom if _bytes is None else _bytes
        self._margin = _margin

    def gaussian(self, scale: float, shape: Shape) -> Integers:
        """Draw round(scale * N(0, 1)), exactly distributed.

        Parameters
        ----------
        scale : float
            The scale of the noise in grid steps, from 2^-8 to 2^50.
        shape : int or tuple of int
            The shape of the result.
        """
        margin = samplers.MARGIN if self._margin is None else self._margin
        drawn = samplers.rounded_gaussian(_size(shape), _checked_scale(scale), self._read, margin)
        return drawn.reshape(shape)

    def laplace(self, scale: float, shape: Shape) -> Integers:
        """Draw round(scale * X), where X has density exp(-|x|)/2, exactly distributed.

        Parameters
        ----------
        scale : float
            The scale of the noise in grid steps, from 2^-8 to 2^50.
        shape : int or tuple of int
            The shape of the result.
        """
        margin = samplers.MARGIN if self._margin is None else self._margin
        drawn = samplers.rounded_laplace(_size(shape), _checked_scale(scale), self._read, margin)
        return drawn.reshape(shape)

    def exponential_choice(self, gaps: Floats, rate: float) -> Integers:
        """Choose a row v of each column with probability exactly proportional to exp(-rate*gap_v).

        Parameters
        ----------
        gaps : ndarray of shape (candidates, columns)
            Distances from the best score of each column, in grid steps.
        rate : float
            The exponent per grid step.
        """
        margin = samplers.WEIGHT_MARGIN if self._margin is None else self._margin
        return samplers.exponential_choice(gaps, rate, self._read, margin)

    def permute_and_flip_choice(self, gaps: Floats, rate: float) -> Integers:
        """Choose a row v of each column by exact permute-and-flip with acceptance exp(-rate*gap_v).

        Parameters
        ----------
        gaps : ndarray of shape (candidates, columns)
            Distances from the best score of each column, in grid steps.
        rate : float
            The exponent per grid step.
        """
        margin = samplers.KEY_MARGIN if self._margin is None else self._margin
        return samplers.permute_and_flip_choice(gaps, rate, self._read, margin)

    def describe(self) -> dict[str, str | int | bool]:
        """Return a description of the source as JSON values."""
        return {
            "source": self.name,
            "exact": self.exact,
            "entropy": "operating system" if self.exact else "test",
        }


class SeededNoise:
    """Fast, repeatable noise for experiments. Guarantees become conditional, and results name the source.

    Parameters
    ----------
    seed : int or numpy.random.Generator
        A seed of at least 0, or the generator to draw from.

    Attributes
    ----------
    name : str
        ``"seeded"``.
    exact : bool
        False.
    seed : int or None
        The seed; None if a generator was given.

    Examples
    --------
    >>> bool((SeededNoise(7).laplace(8.0, 5) == SeededNoise(7).laplace(8.0, 5)).all())
    True
    """

    name = "seeded"
    exact = False

    def __init__(self, seed: int | np.random.Generator) -> None:
        if isinstance(seed, np.random.Generator):
            self.seed = None
            self._generator = seed
        elif isinstance(seed, int | np.integer) and not isinstance(seed, bool) and seed >= 0:
            self.seed = int(seed)
            self._generator = np.random.default_rng(self.seed)
        else:
            raise InvalidInput(f"seed must be an integer of at least 0 or a numpy Generator, got {seed!r}.")

    def gaussian(self, scale: float, shape: Shape) -> Integers:
        """Draw round(scale * N(0, 1)) in floating point.

        Parameters
        ----------
        scale : float
            The scale of the noise in grid steps, from 2^-8 to 2^50.
        shape : int or tuple of int
            The shape of the result.
        """
        return np.rint(self._generator.standard_normal(shape) * _checked_scale(scale)).astype(np.int64)

    def laplace(self, scale: float, shape: Shape) -> Integers:
        """Draw round(scale * X), where X has density exp(-|x|)/2, in floating point.

        Parameters
        ----------
        scale : float
            The scale of the noise in grid steps, from 2^-8 to 2^50.
        shape : int or tuple of int
            The shape of the result.
        """
        return np.rint(self._generator.laplace(0.0, _checked_scale(scale), shape)).astype(np.int64)

    def exponential_choice(self, gaps: Floats, rate: float) -> Integers:
        """Choose a row v of each column with probability proportional to exp(-rate*gap_v).

        Parameters
        ----------
        gaps : ndarray of shape (candidates, columns)
            Distances from the best score of each column, in grid steps.
        rate : float
            The exponent per grid step.
        """
        cumulative = np.cumsum(np.exp(-rate * gaps), axis=0)
        target = self._generator.random(gaps.shape[1]) * cumulative[-1]
        chosen: Integers = np.count_nonzero(cumulative[:-1] <= target, axis=0).astype(np.int64, copy=False)
        return chosen

    def permute_and_flip_choice(self, gaps: Floats, rate: float) -> Integers:
        """Choose a row v of each column by permute-and-flip with acceptance exp(-rate*gap_v).

        Parameters
        ----------
        gaps : ndarray of shape (candidates, columns)
            Distances from the best score of each column, in grid steps.
        rate : float
            The exponent per grid step.
        """
        chosen: Integers = np.argmax(self._generator.standard_exponential(gaps.shape) - rate * gaps, axis=0)
        return chosen

    def describe(self) -> dict[str, str | int | bool]:
        """Return a description of the source as JSON values."""
        described: dict[str, str | int | bool] = {"source": self.name, "exact": False}
        return described if self.seed is None else {**described, "seed": self.seed}


EXACT = ExactNoise()
"""The default source."""

"""Where noise comes from: exact for release, seeded for experiments, behind one small interface.

`ExactNoise` draws from the operating system's generator and is exact in law (see `inversion` and
`selection`); it holds no state and no buffer, so threads and forked processes share nothing. `SeededNoise` is
numpy's generator with ordinary floating-point noise: fast and repeatable, and for both reasons no protection
(floating-point noise leaks: Mironov 2012; Haney et al. 2022; theory section 3.5). Both draw whole numbers of
grid steps; the grid is chosen in `release` and `choice`.

Run time is a side channel. Noise takes longer for about one draw in ten thousand, depending on the digits
drawn and not on the value it hides; a choice may also take longer for some scores than for others (nearly
equal cumulative weights, tiny exponentials). Answer after a fixed delay if clients can time single answers to
microseconds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quietmax.errors import InvalidInput
from quietmax.noise import samplers as inversion
from quietmax.noise import samplers as selection

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Shape = int | tuple[int, ...]

SMALLEST_SCALE = 2.0**-8
"""With less, the error margin of `inversion` would vanish beside the rounding of a half."""
LARGEST_SCALE = 2.0**50
"""With it, noise of 2^62 steps has probability below exp(-4000): whole numbers of 64 bits cannot overflow."""


@runtime_checkable
class NoiseSource(Protocol):
    """Draws whole-number noise.

    `name` is "exact", "seeded" or "test" and is shown in every result; `exact` says whether the law is exact
    and the entropy unpredictable, as release demands.
    """

    name: str
    exact: bool

    def gaussian(self, scale: float, shape: Shape) -> Integers:
        """Draw round(scale * N(0, 1))."""
        ...

    def laplace(self, scale: float, shape: Shape) -> Integers:
        """Draw round(scale * X), X of density exp(-|x|)/2."""
        ...

    def exponential_choice(self, gaps: Floats, rate: float) -> Integers:
        """Choose a line v of each column of `gaps` with probability proportional to exp(-rate*gap_v)."""
        ...

    def permute_and_flip_choice(self, gaps: Floats, rate: float) -> Integers:
        """Choose a line v of each column of `gaps` by permute-and-flip with acceptance exp(-rate*gap_v)."""
        ...

    def describe(self) -> dict[str, str | int | bool]:
        """Say in JSON values what was used."""
        ...


def _checked_scale(scale: float) -> float:
    if SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        return float(scale)
    raise InvalidInput(
        f"The noise scale is {scale!r} grid steps, but must be from 2^-8 to 2^50: give such a scale."
    )


def _size(shape: Shape) -> int:
    return shape if isinstance(shape, int) else math.prod(shape)


class ExactNoise:
    """Exact noise from the operating system's entropy: the default wherever an answer leaves the process.

    `_bytes` and `_margin` exist for the tests: a source given either calls itself "test" and is not `exact`.

    >>> ExactNoise().gaussian(2.0**30, (2, 3)).shape
    (2, 3)
    """

    def __init__(self, *, _bytes: Callable[[int], bytes] | None = None, _margin: float | None = None) -> None:
        self.exact = _bytes is None and _margin is None
        self.name = "exact" if self.exact else "test"
        self._read = os.urandom if _bytes is None else _bytes
        self._margin = _margin

    def gaussian(self, scale: float, shape: Shape) -> Integers:
        """Draw round(scale * N(0, 1)), exactly in law."""
        margin = inversion.MARGIN if self._margin is None else self._margin
        drawn = inversion.rounded_gaussian(_size(shape), _checked_scale(scale), self._read, margin)
        return drawn.reshape(shape)

    def laplace(self, scale: float, shape: Shape) -> Integers:
        """Draw round(scale * X), X of density exp(-|x|)/2, exactly in law."""
        margin = inversion.MARGIN if self._margin is None else self._margin
        drawn = inversion.rounded_laplace(_size(shape), _checked_scale(scale), self._read, margin)
        return drawn.reshape(shape)

    def exponential_choice(self, gaps: Floats, rate: float) -> Integers:
        """Choose a line v of each column of `gaps` with probability proportional to exp(-rate*gap_v), exactly."""
        margin = selection.WEIGHT_MARGIN if self._margin is None else self._margin
        return selection.exponential_choice(gaps, rate, self._read, margin)

    def permute_and_flip_choice(self, gaps: Floats, rate: float) -> Integers:
        """Choose a line of each column of `gaps` by permute-and-flip with acceptance exp(-rate*gap_v), exactly."""
        margin = selection.KEY_MARGIN if self._margin is None else self._margin
        return selection.permute_and_flip_choice(gaps, rate, self._read, margin)

    def describe(self) -> dict[str, str | int | bool]:
        """Say what was used."""
        return {
            "source": self.name,
            "exact": self.exact,
            "entropy": "operating system" if self.exact else "test",
        }


class SeededNoise:
    """Fast repeatable noise for experiments only: no guarantee survives it, and results name it.

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
            raise InvalidInput(
                f"The seed is {seed!r}, but must be a whole number from 0 up or a numpy Generator: give one."
            )

    def gaussian(self, scale: float, shape: Shape) -> Integers:
        """Draw round(scale * N(0, 1)) in floating point."""
        return np.rint(self._generator.standard_normal(shape) * _checked_scale(scale)).astype(np.int64)

    def laplace(self, scale: float, shape: Shape) -> Integers:
        """Draw round(scale * X), X of density exp(-|x|)/2, in floating point."""
        return np.rint(self._generator.laplace(0.0, _checked_scale(scale), shape)).astype(np.int64)

    def exponential_choice(self, gaps: Floats, rate: float) -> Integers:
        """Choose a line v of each column of `gaps` with probability proportional to exp(-rate*gap_v)."""
        cumulative = np.cumsum(np.exp(-rate * gaps), axis=0)
        target = self._generator.random(gaps.shape[1]) * cumulative[-1]
        chosen: Integers = np.count_nonzero(cumulative[:-1] <= target, axis=0).astype(np.int64, copy=False)
        return chosen

    def permute_and_flip_choice(self, gaps: Floats, rate: float) -> Integers:
        """Choose a line of each column of `gaps` by permute-and-flip with acceptance exp(-rate*gap_v)."""
        chosen: Integers = np.argmax(self._generator.standard_exponential(gaps.shape) - rate * gaps, axis=0)
        return chosen

    def describe(self) -> dict[str, str | int | bool]:
        """Say what was used."""
        described: dict[str, str | int | bool] = {"source": self.name, "exact": False}
        return described if self.seed is None else {**described, "seed": self.seed}


EXACT = ExactNoise()
"""The default source."""

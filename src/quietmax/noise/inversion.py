"""Exact noise by inversion: round(scale * X) for a standard Gaussian or Laplace variable X.

One 64-bit word gives a sign and the leading 63 bits of a uniform V in (0, 1). The magnitude |X| = S^-1(V),
where S is the probability that |X| exceeds a value, is computed in floating point. Its error is far below
`MARGIN`, so that the nearest integer of scale*|X| is certain unless scale*|X| lies within scale*MARGIN of a
half-integer, or V is below `TAIL`. Those draws, one in thousands, are decided by exact comparison of V,
extended by further random bits, with rigorous bounds on S at the half-integers. The law is therefore exactly
that of the rounded real variable.

What is trusted: SciPy's `ndtri` on [2^-17, 1/2] and NumPy's `log` on [2^-16, 1] err by less than 2^-43 (an
absolute error; the tests measure below 2^-48 against 40-digit arithmetic). The other errors add up to less
than 2^-46: V known to 2^-64 moves |X| by at most 2^-48 since V >= 2^-16, V rounded to a float by 2^-51, the
product by 2^-49. Together they stay below MARGIN = 2^-42.

Run time: a draw takes longer in the rare undecided cases, which depend on the low digits of the noise and on
extreme values, never on the data; nothing else branches on the value drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from quietmax.noise.enclosure import Bounds, exponential_survival, normal_survival
from quietmax.noise.uniform import LazyUniform, ReadBytes

MARGIN = 2.0**-42
TAIL = 2.0**-16
_CHUNK = 1 << 15
_WORD = np.dtype("<i8")
_LOW_BITS = np.int64(2**63 - 1)

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Survival = Callable[[Fraction, int], Bounds]


def _normal_magnitude(uniform: Floats) -> Floats:
    magnitude: Floats = ndtri(0.5 * uniform)
    return np.negative(magnitude, out=magnitude)


def _exponential_magnitude(uniform: Floats) -> Floats:
    magnitude: Floats = np.log(uniform)
    return np.negative(magnitude, out=magnitude)


def rounded_gaussian(count: int, scale: float, read: ReadBytes, margin: float = MARGIN) -> Integers:
    """Draw round(scale * N(0, 1)) `count` times, exactly in law."""
    return _draw(count, scale, read, margin, _normal_magnitude, normal_survival)


def rounded_laplace(count: int, scale: float, read: ReadBytes, margin: float = MARGIN) -> Integers:
    """Draw round(scale * Laplace(1)) `count` times, exactly in law; Laplace(1) has density exp(-|x|)/2."""
    return _draw(count, scale, read, margin, _exponential_magnitude, exponential_survival)


def _draw(
    count: int,
    scale: float,
    read: ReadBytes,
    margin: float,
    magnitude: Callable[[Floats], Floats],
    survival: Survival,
) -> Integers:
    drawn = np.empty(count, dtype=np.int64)
    limit = 0.5 - scale * margin
    for start in range(0, count, _CHUNK):
        part = drawn[start : start + _CHUNK]
        words = np.frombuffer(read(8 * part.size), dtype=_WORD)
        uniform = (words & _LOW_BITS).astype(np.float64)
        uniform += 0.5
        uniform *= 2.0**-63
        distance = magnitude(uniform)
        distance *= scale
        nearest = np.rint(distance)
        distance -= nearest
        np.abs(distance, out=distance)
        undecided = distance > limit
        undecided |= uniform < TAIL
        part[:] = nearest
        for index in undecided.nonzero()[0]:
            lazy = LazyUniform(int(words[index]) & int(_LOW_BITS), 63, read)
            part[index] = _exact_magnitude(lazy, Fraction(scale), survival, int(nearest[index]))
        np.negative(part, out=part, where=words < 0)
    return drawn


def _exact_magnitude(uniform: LazyUniform, scale: Fraction, survival: Survival, guess: int) -> int:
    """Return the integer m nearest to scale * S^-1(uniform): the smallest m with uniform >= S((m + 1/2)/scale)."""

    def exceeds(integer: int) -> bool:
        return uniform.is_below(partial(survival, Fraction(2 * integer + 1, 2) / scale))

    low, high, step = guess, guess, 1  # invariant sought: exceeds(low - 1) or low = 0, and not exceeds(high)
    while exceeds(high):
        low, high, step = high + 1, high + step, 2 * step
    while low > 0 and low <= guess and not exceeds(low - 1):
        low, high, step = max(low - step, 0), low - 1, 2 * step
    while low < high:
        middle = (low + high) // 2
        if exceeds(middle):
            low = middle + 1
        else:
            high = middle
    return high

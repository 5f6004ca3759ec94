"""Sources of noise: exact noise for a release, seeded noise for experiments.

`ExactNoise` draws from the operating system's generator, without state or buffer, and its distribution is exact.
`SeededNoise` is numpy's generator with ordinary floating-point noise: fast and repeatable, and for both reasons no
protection (Mironov 2012; Haney et al. 2022; THEORY 3.5). Both draw integers, in steps of the grid that
`quietmax.noise.release` sets. Every exact draw is a decision about uniform random numbers, made in floating point where
its error certainly does not matter, in all but about one of ten thousand draws. Otherwise a `_LazyUniform` reads more
random bits until rigorous bounds on the function in question decide the comparison.

Run time is a side channel. These draws take longer, depending on the random digits and not on the value that the noise
hides. A choice can also take longer for some scores than for others (nearly equal cumulative weights, tiny
exponentials). Answer after a fixed delay if clients can time single answers to microseconds.
"""

from __future__ import annotations

import decimal
import math
import os
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache, partial
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from quietmax.errors import InvalidInput

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Shape = int | tuple[int, ...]
_Bounds = tuple[Fraction, Fraction]
_ReadBytes = Callable[[int], bytes]

_SMALLEST_SCALE = 2.0**-8
"""With less, the error margin of the exact draws would vanish beside the rounding of a half."""
LARGEST_SCALE = 2.0**50
"""With it, noise of 2^62 steps has probability below exp(-4000): 64-bit integers cannot overflow."""
_MARGIN = 2.0**-42
"""More than the error of a computed magnitude for uniform numbers of at least `_TAIL`."""
_WEIGHT_MARGIN = 2.0**-40
_KEY_MARGIN = 2.0**-42
_TAIL = 2.0**-16
_TAIL_LOGARITHM = 11.09
"""Below 16*ln(2): -ln(V) exceeds it when V is below `_TAIL`."""
_CHUNK = 1 << 15
_LOW_BITS = np.int64(2**63 - 1)


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
        """Draw round(scale * X), where X has density exp(-|x|)/2; parameters as in `gaussian`."""
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
        """Choose by permute-and-flip with acceptance exp(-rate*gap_v); parameters as in `exponential_choice`."""
        ...

    def describe(self) -> dict[str, str | int | bool]:
        """Return a description of the source as JSON values."""
        ...


class ExactNoise:
    """Exact noise from the operating system's entropy: the default for everything that leaves the process.

    The arguments `_bytes` and `_margin` exist for tests: a source that is given either has the name ``"test"`` and is
    not `exact`.

    Examples
    --------
    >>> ExactNoise().gaussian(2.0**30, (2, 3)).shape
    (2, 3)
    """

    def __init__(self, *, _bytes: _ReadBytes | None = None, _margin: float | None = None) -> None:
        self.exact = _bytes is None and _margin is None
        self.name = "exact" if self.exact else "test"
        self._read = os.urandom if _bytes is None else _bytes
        self._margin = _margin

    def gaussian(self, scale: float, shape: Shape) -> Integers:
        """Draw round(scale * N(0, 1)), exactly distributed."""
        return self._rounded(scale, shape, lambda uniform: ndtri(0.5 * uniform), _normal_survival)

    def laplace(self, scale: float, shape: Shape) -> Integers:
        """Draw round(scale * X), where X has density exp(-|x|)/2, exactly distributed."""
        return self._rounded(scale, shape, np.log, _exponential_survival)

    def exponential_choice(self, gaps: Floats, rate: float) -> Integers:
        """Choose candidate v of each column with probability exp(-rate*gap_v) / sum_w exp(-rate*gap_w), exactly.

        Inversion: with weights w_v = exp(-rate*gap_v) in (0, 1] and V uniform, the first v whose cumulative weight
        exceeds V * sum(w). A weight has an error below 2^-43 (w*ln(1/w) <= 1/e, so a relative error of the exponent
        does not grow), a sum of C of them below C*2^-43 + C^2*2^-53, V times the total no more than that plus C*2^-52.
        The comparison is certain when it is decided by more than C*(1 + C/1024)*2^-40.
        """
        candidates, columns = gaps.shape
        words, uniform = self._uniforms(columns)
        weights = np.exp(-rate * gaps)
        cumulative = np.cumsum(weights, axis=0, out=weights)
        cumulative -= uniform * cumulative[-1]
        chosen: Integers = np.count_nonzero(cumulative <= 0.0, axis=0).astype(np.int64, copy=False)
        closest = np.abs(cumulative, out=cumulative).min(axis=0)
        margin = candidates * (1.0 + candidates / 1024.0) * self._margin_or(_WEIGHT_MARGIN)
        for column in np.flatnonzero(closest < margin):
            lazy = _LazyUniform(int(words[column]), 64, self._read)
            chosen[column] = _exact_exponential_choice(gaps[:, column], Fraction(rate), lazy)
        return chosen

    def permute_and_flip_choice(self, gaps: Floats, rate: float) -> Integers:
        """Choose a candidate of each column by permute-and-flip with acceptance exp(-rate*gap_v), exactly.

        Permute-and-flip has the same distribution as the largest of E_v - rate*gap_v with independent standard
        exponential E_v (Ding, Kifer, Sayed, Wang, Xiao, Zhang 2021). E_v = -ln(V_v) has an error below 2^-43 + 2^-47
        for V_v >= 2^-16, rate*gap_v of 2^-53 of itself and the difference of 2^-53 of itself, all below
        (1 + rate*gap_v)*2^-42.
        """
        flat_words, flat_uniform = self._uniforms(gaps.size)
        words, uniform = flat_words.reshape(gaps.shape), flat_uniform.reshape(gaps.shape)
        penalties = rate * gaps
        spread = self._margin_or(_KEY_MARGIN) * (1.0 + penalties)
        lower = -np.log(uniform)
        lower -= penalties
        upper = lower + spread
        lower -= spread
        tail = np.nonzero(uniform < _TAIL)
        lower[tail], upper[tail] = _TAIL_LOGARITHM - penalties[tail] - spread[tail], np.inf
        rivals = upper >= lower.max(axis=0)
        chosen: Integers = np.argmax(rivals, axis=0)
        for column in np.flatnonzero(np.count_nonzero(rivals, axis=0) > 1):
            rows = np.flatnonzero(rivals[:, column])
            lazies = [_LazyUniform(int(words[row, column]), 64, self._read) for row in rows]
            exact_penalties = [Fraction(rate) * int(gaps[row, column]) for row in rows]
            chosen[column] = rows[_exact_largest(lazies, exact_penalties)]
        return chosen

    def describe(self) -> dict[str, str | int | bool]:
        """Return a description of the source as JSON values."""
        entropy = "operating system" if self.exact else "test"
        return {"source": self.name, "exact": self.exact, "entropy": entropy}

    def _margin_or(self, margin: float) -> float:
        return margin if self._margin is None else self._margin

    def _uniforms(self, count: int) -> tuple[NDArray[np.uint64], Floats]:
        """Draw 64-bit words and the uniform numbers whose first bits they are."""
        words: NDArray[np.uint64] = np.frombuffer(self._read(8 * count), dtype="<u8")
        uniform = words.astype(np.float64)
        uniform += 0.5
        uniform *= 2.0**-64
        return words, uniform

    def _rounded(
        self,
        scale: float,
        shape: Shape,
        negative_magnitude: Callable[[Floats], Floats],
        survival: Callable[[Fraction, int], _Bounds],
    ) -> Integers:
        """Draw by inversion, in floating point; exactly where it is too close to a boundary or in the tail."""
        scale = _checked_scale(scale)
        drawn = np.empty(shape if isinstance(shape, int) else math.prod(shape), dtype=np.int64)
        limit = 0.5 - scale * self._margin_or(_MARGIN)
        for start in range(0, drawn.size, _CHUNK):
            part = drawn[start : start + _CHUNK]
            words = np.frombuffer(self._read(8 * part.size), dtype="<i8")
            uniform = (words & _LOW_BITS).astype(np.float64)
            uniform += 0.5
            uniform *= 2.0**-63
            distance = negative_magnitude(uniform)
            distance *= -scale
            nearest = np.rint(distance)
            distance -= nearest
            np.abs(distance, out=distance)
            undecided = distance > limit
            undecided |= uniform < _TAIL
            part[:] = nearest
            for index in undecided.nonzero()[0]:
                lazy = _LazyUniform(int(words[index]) & int(_LOW_BITS), 63, self._read)
                part[index] = _exact_magnitude(lazy, Fraction(scale), survival, int(nearest[index]))
            np.negative(part, out=part, where=words < 0)
        return drawn.reshape(shape)


class SeededNoise:
    """Fast, repeatable noise for experiments. Guarantees become conditional, and results name the source.

    Parameters
    ----------
    seed : int or numpy.random.Generator
        A seed of at least 0, or the generator to draw from. The attribute `seed` is None for a generator.

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
        """Draw round(scale * N(0, 1)) in floating point."""
        return np.rint(self._generator.standard_normal(shape) * _checked_scale(scale)).astype(np.int64)

    def laplace(self, scale: float, shape: Shape) -> Integers:
        """Draw round(scale * X), where X has density exp(-|x|)/2, in floating point."""
        return np.rint(self._generator.laplace(0.0, _checked_scale(scale), shape)).astype(np.int64)

    def exponential_choice(self, gaps: Floats, rate: float) -> Integers:
        """Choose a row v of each column with probability proportional to exp(-rate*gap_v)."""
        cumulative = np.cumsum(np.exp(-rate * gaps), axis=0)
        target = self._generator.random(gaps.shape[1]) * cumulative[-1]
        chosen: Integers = np.count_nonzero(cumulative[:-1] <= target, axis=0).astype(np.int64, copy=False)
        return chosen

    def permute_and_flip_choice(self, gaps: Floats, rate: float) -> Integers:
        """Choose a row v of each column by permute-and-flip with acceptance exp(-rate*gap_v)."""
        chosen: Integers = np.argmax(self._generator.standard_exponential(gaps.shape) - rate * gaps, axis=0)
        return chosen

    def describe(self) -> dict[str, str | int | bool]:
        """Return a description of the source as JSON values."""
        described: dict[str, str | int | bool] = {"source": self.name, "exact": False}
        return described if self.seed is None else {**described, "seed": self.seed}


EXACT = ExactNoise()
"""The default source."""


def _checked_scale(scale: float) -> float:
    if _SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        return float(scale)
    raise InvalidInput(f"The noise scale must be between 2^-8 and 2^50 grid steps, got {scale!r}.")


class _LazyUniform:
    """A uniform random number whose binary digits are drawn on demand: in (numerator, numerator + 1) / 2^bits.

    Bits that were drawn are kept, so all decisions concern one real number and their joint distribution is exact.
    """

    def __init__(self, numerator: int, bits: int, read: _ReadBytes) -> None:
        self.numerator, self.bits, self._read = numerator, bits, read

    def bounds(self) -> _Bounds:
        """Return the largest number known to be below it, and the smallest known to be above it."""
        return Fraction(self.numerator, 1 << self.bits), Fraction(self.numerator + 1, 1 << self.bits)

    def extend(self) -> None:
        """Draw 64 more bits."""
        self.numerator = self.numerator << 64 | int.from_bytes(self._read(8), "little")
        self.bits += 64

    def is_below(self, enclose: Callable[[int], _Bounds]) -> bool:
        """Decide whether the number is below another one."""
        while True:
            (lower, upper), (low, high) = self.bounds(), enclose(self.bits + 8)
            if upper <= low:
                return True
            if lower >= high:
                return False
            self.extend()


def _exact_magnitude(
    uniform: _LazyUniform, scale: Fraction, survival: Callable[[Fraction, int], _Bounds], guess: int
) -> int:
    """Return the integer m nearest to scale * S^-1(uniform): the smallest m with uniform >= S((m + 1/2)/scale)."""

    def _exceeds(integer: int) -> bool:
        return uniform.is_below(partial(survival, Fraction(2 * integer + 1, 2) / scale))

    low, high, step = (
        guess,
        guess,
        1,
    )  # invariant sought: _exceeds(low - 1) or low = 0, and not _exceeds(high)
    while _exceeds(high):
        low, high, step = high + 1, high + step, 2 * step
    while low > 0 and low <= guess and not _exceeds(low - 1):
        low, high, step = max(low - step, 0), low - 1, 2 * step
    while low < high:
        middle = (low + high) // 2
        if _exceeds(middle):
            low = middle + 1
        else:
            high = middle
    return high


def _exact_exponential_choice(gaps: Floats, rate: Fraction, uniform: _LazyUniform) -> int:
    """Return the candidate of one column, extending the uniform number until the choice is certain."""
    exponents = [rate * int(gap) for gap in gaps]
    while True:
        bounds = [_exponential_survival(exponent, uniform.bits + 8) for exponent in exponents]
        lower, upper = uniform.bounds()
        low_target = lower * sum(low for low, _ in bounds)
        high_target = upper * sum(high for _, high in bounds)
        low_sum = high_sum = Fraction(0)
        for candidate, (low, high) in enumerate(bounds):
            after_the_previous = high_sum <= low_target
            low_sum, high_sum = low_sum + low, high_sum + high
            if after_the_previous and high_target <= low_sum:
                return candidate
        uniform.extend()


def _exact_largest(uniforms: list[_LazyUniform], penalties: list[Fraction]) -> int:
    """Return the index of the largest -ln(uniform) - penalty."""
    while True:
        lower, upper = [], []
        for uniform, penalty in zip(uniforms, penalties, strict=True):
            below, above = uniform.bounds()
            lower.append(-_logarithm(above, uniform.bits)[1] - penalty)
            upper.append(-_logarithm(below, uniform.bits)[0] - penalty if below > 0 else None)
        best = max(range(len(lower)), key=lower.__getitem__)
        others = [bound for index, bound in enumerate(upper) if index != best]
        if all(bound is not None and bound <= lower[best] for bound in others):
            return best
        for uniform in uniforms:
            uniform.extend()


# Rigorous bounds. Each function returns a lower and an upper bound that enclose the true value and approach it as
# `bits` grows: integer arithmetic rounded outwards, and the decimal module's `exp` and `ln`, which are correctly
# rounded. They are slow, and rarely needed.


def _enclosed(value: Fraction, bits: int, function: str) -> _Bounds:
    """Enclose exp or ln of a fraction with more than this many bits."""
    digits = bits * 31 // 100 + 12
    context = decimal.Context(prec=digits, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX, traps=[])
    nearest = context.divide(decimal.Decimal(value.numerator), decimal.Decimal(value.denominator))
    low = getattr(context, function)(context.next_minus(nearest))
    high = getattr(context, function)(context.next_plus(nearest))
    return Fraction(context.next_minus(low)), Fraction(context.next_plus(high))


def _exponential_survival(point: Fraction, bits: int) -> _Bounds:
    """Enclose exp(-point), the probability that a standard exponential variable exceeds `point`."""
    if point > bits:
        return Fraction(0), Fraction(1, 1 << bits)
    return _enclosed(-point, bits, "exp")


def _logarithm(value: Fraction, bits: int) -> _Bounds:
    if value == 1:
        return Fraction(0), Fraction(0)
    return _enclosed(value, bits + 16, "ln")


@lru_cache(maxsize=64)
def _arctangent_of_inverse(divisor: int, bits: int) -> tuple[int, int]:
    """Enclose arctan(1/divisor) * 2^bits: the alternating series, each term rounded down, errors counted."""
    power, total, terms = (1 << bits) // divisor, 0, 0
    while power:
        term = power // (2 * terms + 1)
        total += -term if terms % 2 else term
        power //= divisor * divisor
        terms += 1
    return total - terms - 2, total + terms + 2


@lru_cache(maxsize=64)
def _root_of_two_over_pi(bits: int) -> tuple[int, int]:
    """Enclose sqrt(2/pi) * 2^bits, with pi = 16 arctan(1/5) - 4 arctan(1/239) (Machin)."""
    low5, high5 = _arctangent_of_inverse(5, bits)
    low239, high239 = _arctangent_of_inverse(239, bits)
    low_pi, high_pi = 16 * low5 - 4 * high239, 16 * high5 - 4 * low239
    return math.isqrt((2 << 3 * bits) // high_pi), math.isqrt(-(-(2 << 3 * bits) // low_pi)) + 1


def _normal_survival(point: Fraction, bits: int) -> _Bounds:
    """Enclose P(|N(0, 1)| > point).

    The series is 1 - sqrt(2/pi) * sum_k (-1)^k * point^(2k+1) / (2^k * k! * (2k+1)). Its terms grow to exp(point^2/2)
    and cancel, so more bits are carried; each term is kept between two integers.
    """
    square = point * point
    if square > 2 * bits:
        return Fraction(0), Fraction(1, 1 << bits)  # P(|N| > x) <= exp(-x^2/2)
    carried = -(-(bits + int(square * 3 / 4) + 24) // 64) * 64
    one = 1 << carried
    low_square, high_square = _scaled(square, carried)
    low_power, high_power = _scaled(point, carried)
    low_sum = high_sum = 0
    index = 0
    turn = int(square) // 2 + 1
    while high_power > 1 or index < turn:
        odd = 2 * index + 1
        if index % 2 == 0:
            low_sum += low_power // odd
            high_sum += high_power // odd + 1
        else:
            low_sum -= high_power // odd + 1
            high_sum -= low_power // odd
        index += 1
        low_power = (low_power * low_square >> carried) // (2 * index)
        high_power = (high_power * high_square >> carried) // (2 * index) + 1
    # The terms now decrease and alternate, so the rest is at most the next one.
    low_sum -= high_power + 1
    high_sum += high_power + 1
    low_root, high_root = _root_of_two_over_pi(carried)
    low_inside = (max(low_sum, 0) * low_root) >> carried
    high_inside = (high_sum * high_root >> carried) + 1
    return Fraction(max(one - high_inside, 0), one), Fraction(one - low_inside, one)


def _scaled(value: Fraction, bits: int) -> tuple[int, int]:
    low = (value.numerator << bits) // value.denominator
    return low, low + 1

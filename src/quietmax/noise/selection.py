"""Exact choice of one of C candidates per row, from whole-number gaps to the best candidate.

`gaps` has one column per row of scores and one line per candidate (C, n): whole numbers from 0 (the best) up,
held as floats. Two laws: candidate v with probability proportional to exp(-rate*gap_v) (exponential
mechanism), and permute-and-flip. Both compute in floating point, know a bound on their error, and settle what
lies within it by exact arithmetic on the same, lazily extended, uniform numbers. The law is exact.

What is trusted: NumPy's `exp` errs by less than 2^-44 of the result (where it underflows, by less than
2^-1000), its `log` on [2^-16, 1] by less than 2^-43.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from quietmax.noise.enclosure import exponential_survival, logarithm
from quietmax.noise.uniform import LazyUniform, ReadBytes

WEIGHT_MARGIN = 2.0**-40
KEY_MARGIN = 2.0**-42
TAIL = 2.0**-16
TAIL_LOGARITHM = 11.09
"""Below 16*ln(2): what -ln(V) exceeds when V is below the tail."""

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


def _uniforms(count: int, read: ReadBytes) -> tuple[NDArray[np.uint64], Floats]:
    words: NDArray[np.uint64] = np.frombuffer(read(8 * count), dtype="<u8")
    uniform = words.astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-64
    return words, uniform


def exponential_choice(gaps: Floats, rate: float, read: ReadBytes, margin: float = WEIGHT_MARGIN) -> Integers:
    """Choose candidate v of each column with probability exp(-rate*gap_v) / sum_w exp(-rate*gap_w), exactly.

    Inversion: with weights w_v = exp(-rate*gap_v) in (0, 1] and V uniform, the first v whose cumulative
    weight exceeds V * sum(w). A weight errs by less than 2^-43 (w*ln(1/w) <= 1/e, so a relative error of the
    exponent does not grow), a sum of C of them by less than C*2^-43 + C^2*2^-53, V times the total by no more
    than that plus C*2^-52; the comparison is certain when it is decided by more than C*(1 + C/1024)*2^-40.
    """
    candidates, columns = gaps.shape
    words, uniform = _uniforms(columns, read)
    weights = np.exp(-rate * gaps)
    cumulative = np.cumsum(weights, axis=0, out=weights)
    cumulative -= uniform * cumulative[-1]
    chosen: Integers = np.count_nonzero(cumulative <= 0.0, axis=0).astype(np.int64, copy=False)
    closest = np.abs(cumulative, out=cumulative).min(axis=0)
    for column in np.flatnonzero(closest < candidates * (1.0 + candidates / 1024.0) * margin):
        lazy = LazyUniform(int(words[column]), 64, read)
        chosen[column] = _exact_exponential_choice(gaps[:, column], Fraction(rate), lazy)
    return chosen


def _exact_exponential_choice(gaps: Floats, rate: Fraction, uniform: LazyUniform) -> int:
    exponents = [rate * int(gap) for gap in gaps]
    while True:
        bounds = [exponential_survival(exponent, uniform.bits + 8) for exponent in exponents]
        low_target = uniform.lower * sum(low for low, _ in bounds)
        high_target = uniform.upper * sum(high for _, high in bounds)
        low_sum = high_sum = Fraction(0)
        for candidate, (low, high) in enumerate(bounds):
            certainly_after_the_previous = high_sum <= low_target
            low_sum, high_sum = low_sum + low, high_sum + high
            if certainly_after_the_previous and high_target <= low_sum:
                return candidate
        uniform.extend()


def permute_and_flip_choice(
    gaps: Floats, rate: float, read: ReadBytes, margin: float = KEY_MARGIN
) -> Integers:
    """Choose a candidate of each column as permute-and-flip does with acceptance exp(-rate*gap_v), exactly.

    Permute-and-flip is the same law as the largest of E_v - rate*gap_v with independent standard exponential
    E_v (Ding, Kifer, Sayed, Wang, Xiao, Zhang 2021). E_v = -ln(V_v) errs by less than 2^-43 + 2^-47 for V_v
    >= 2^-16, rate*gap_v by 2^-53 of itself and the difference by 2^-53 of itself, all below (1 +
    rate*gap_v)*2^-42.
    """
    candidates, columns = gaps.shape
    flat_words, flat_uniform = _uniforms(candidates * columns, read)
    words, uniform = flat_words.reshape(gaps.shape), flat_uniform.reshape(gaps.shape)
    penalties = rate * gaps
    spread = margin * (1.0 + penalties)
    lower = -np.log(uniform)
    lower -= penalties
    upper = lower + spread
    lower -= spread
    tail = np.nonzero(uniform < TAIL)
    lower[tail], upper[tail] = TAIL_LOGARITHM - penalties[tail] - spread[tail], np.inf
    rivals = upper >= lower.max(axis=0)
    chosen: Integers = np.argmax(rivals, axis=0)
    for column in np.flatnonzero(np.count_nonzero(rivals, axis=0) > 1):
        lines = np.flatnonzero(rivals[:, column])
        lazies = [LazyUniform(int(words[line, column]), 64, read) for line in lines]
        exact_penalties = [Fraction(rate) * int(gaps[line, column]) for line in lines]
        chosen[column] = lines[_exact_largest(lazies, exact_penalties)]
    return chosen


def _exact_largest(uniforms: list[LazyUniform], penalties: list[Fraction]) -> int:
    """Return the index of the largest -ln(uniform) - penalty."""
    while True:
        lower, upper = [], []
        for uniform, penalty in zip(uniforms, penalties, strict=True):
            lower.append(-logarithm(uniform.upper, uniform.bits)[1] - penalty)
            known = uniform.numerator > 0
            upper.append(-logarithm(uniform.lower, uniform.bits)[0] - penalty if known else None)
        best = max(range(len(lower)), key=lower.__getitem__)
        others = [bound for index, bound in enumerate(upper) if index != best]
        if all(bound is not None and bound <= lower[best] for bound in others):
            return best
        for uniform in uniforms:
            uniform.extend()

"""Rigorous bounds on the few functions the exact sampler compares random numbers with.

Each returns a pair of fractions, lower and upper, that surely encloses the true value and closes in on it as
`bits` grows: integer arithmetic rounded outwards, and the decimal module's `exp` and `ln`, which are
correctly rounded. Slow, and rarely needed: one draw in thousands.
"""

from __future__ import annotations

import decimal
from fractions import Fraction
from functools import lru_cache
from math import isqrt

Bounds = tuple[Fraction, Fraction]


def _context(bits: int) -> decimal.Context:
    digits = bits * 31 // 100 + 12
    return decimal.Context(prec=digits, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX, traps=[])


def _decimals(value: Fraction, context: decimal.Context) -> tuple[decimal.Decimal, decimal.Decimal]:
    nearest = context.divide(decimal.Decimal(value.numerator), decimal.Decimal(value.denominator))
    return context.next_minus(nearest), context.next_plus(nearest)


def exponential_survival(point: Fraction, bits: int) -> Bounds:
    """Enclose exp(-point), the probability that a standard exponential variable exceeds `point` >= 0.

    >>> lower, upper = exponential_survival(Fraction(1), 64)
    >>> f"{float(lower):.6f}", upper - lower < Fraction(1, 2**64)
    ('0.367879', True)
    """
    if point > bits:
        return Fraction(0), Fraction(1, 1 << bits)
    context = _context(bits)
    low, high = _decimals(-point, context)
    return Fraction(context.next_minus(low.exp(context))), Fraction(context.next_plus(high.exp(context)))


def logarithm(value: Fraction, bits: int) -> Bounds:
    """Enclose ln(value), `value` > 0."""
    if value == 1:
        return Fraction(0), Fraction(0)
    context = _context(bits + 16)
    low, high = _decimals(value, context)
    return Fraction(context.next_minus(low.ln(context))), Fraction(context.next_plus(high.ln(context)))


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
    return isqrt((2 << 3 * bits) // high_pi), isqrt(-(-(2 << 3 * bits) // low_pi)) + 1


def normal_survival(point: Fraction, bits: int) -> Bounds:
    """Enclose P(|N(0, 1)| > point) for `point` >= 0.

    1 - sqrt(2/pi) * sum_k (-1)^k * point^(2k+1) / (2^k * k! * (2k+1)): the terms grow to exp(point^2/2) and
    cancel, so that many more bits are carried; each is kept between two integers.

    >>> lower, upper = normal_survival(Fraction(2), 64)
    >>> f"{float(lower):.6f}", upper - lower < Fraction(1, 2**64)
    ('0.045500', True)
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

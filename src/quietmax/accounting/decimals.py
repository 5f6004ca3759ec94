"""Exact arithmetic on the numbers people write: a float stands for the decimal it prints as.

0.1 is not a binary number, so ten charges of the *binary* 0.1 exceed a budget of 1 by 5.6e-16 and the tenth
answer would be refused. Costs and budgets are therefore read as the shortest decimal that names the float
(0.1 is 1/10), added as exact fractions, and turned back into floats outwards: what was spent is rounded up,
what is left is rounded down. The difference between a float and its decimal is at most 2^-53 of it;
`quietmax.noise` spends that much less.
"""

from __future__ import annotations

import math
from fractions import Fraction

from quietmax.errors import InvalidInput

SMALLEST = 1e-100
LARGEST = 1e100


def decimal(value: float) -> Fraction:
    """Return the decimal number a float prints as.

    >>> decimal(0.1)
    Fraction(1, 10)
    """
    return Fraction(repr(float(value)))


def as_number(value: float) -> float:
    """Return `value` as a float; NaN if it is no number."""
    try:
        return float(value) if not isinstance(value, str | bytes) else math.nan
    except (TypeError, ValueError, OverflowError):
        return math.nan


def checked_amount(value: float, name: str) -> float:
    """Return `value` as a float, refusing what is not 0 or a number from 1e-100 to 1e100."""
    number = as_number(value)
    if number == 0.0 or SMALLEST <= number <= LARGEST:
        return abs(number)
    raise InvalidInput(f"{name} is {value!r}, but must be 0 or a number from 1e-100 to 1e100: give such one.")


def rounded_up(value: Fraction) -> float:
    """Return the smallest float whose decimal is at least `value`.

    >>> rounded_up(decimal(0.1) + decimal(0.2))
    0.3
    """
    nearest = float(value)
    return nearest if decimal(nearest) >= value else math.nextafter(nearest, math.inf)


def rounded_down(value: Fraction) -> float:
    """Return the largest float whose decimal is at most `value`."""
    nearest = float(value)
    return nearest if decimal(nearest) <= value else math.nextafter(nearest, -math.inf)


def root_rounded_up(value: Fraction) -> float:
    """Return the smallest float whose squared decimal is at least `value`.

    >>> root_rounded_up(Fraction(2)) ** 2 >= 2
    True
    """
    root = math.sqrt(float(value)) * (1.0 - 2.0**-51)  # a few floats too low
    while decimal(root) ** 2 < value:
        root = math.nextafter(root, math.inf)
    return root


def root_rounded_down(value: Fraction) -> float:
    """Return the largest float whose squared decimal is at most `value`."""
    root = root_rounded_up(value)
    return root if decimal(root) ** 2 <= value else math.nextafter(root, 0.0)

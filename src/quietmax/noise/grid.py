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

from quietmax.errors import InvalidInput
from quietmax.noise.source import LARGEST_SCALE

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

"""Meter: a budget counted in whole units, so that spending can never pass it by rounding.

A budget is `LIMIT` units in its own currency (epsilon, or mu squared). One unit is an exact fraction of the
budget, a charge is rounded up to whole units, and units are added as integers: below 2^53, they fit a
database's integer column and JSON. `LIMIT` = 5040 * 10^12 is divisible by every number to 10 and by powers of
ten, so that ten charges of a tenth are exactly the budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from quietmax.accounting.cost import Cost, GaussianCost, PureCost, checked_count
from quietmax.accounting.decimals import root_rounded_down, root_rounded_up, rounded_down, rounded_up
from quietmax.errors import InvalidInput

LIMIT = 5040 * 10**12


@dataclass(frozen=True)
class Meter:
    """Whole units of a total cost.

    >>> meter = Meter(PureCost(1.0))
    >>> meter.affordable(PureCost(0.1)), meter.affordable(PureCost(0.3)), meter.share(4)
    (10, 3, PureCost(epsilon=0.25))
    """

    total: Cost

    def __post_init__(self) -> None:
        if self.total.amount == 0:
            raise InvalidInput(
                "The budget is 0, so that no answer can be paid for: give a positive epsilon or mu."
            )

    def units(self, cost: Cost) -> int:
        """Return what `cost` takes from the meter, rounded up to whole units."""
        if cost.currency != self.total.currency:
            raise InvalidInput(
                f"A {cost.currency} cost cannot be charged to a {self.total.currency} budget: convert it with"
                " as_gaussian(), or state the budget in the other currency."
            )
        return math.ceil(cost.amount * LIMIT / self.total.amount)

    def affordable(self, cost: Cost) -> int:
        """Return how many releases of `cost` the whole budget pays for."""
        units = self.units(cost)
        if units == 0:
            raise InvalidInput(
                "A release of cost 0 can be repeated without end: give a positive cost to count."
            )
        return LIMIT // units

    def share(self, releases: int) -> Cost:
        """Return the largest cost of which the budget pays that many: epsilon/k, or mu/sqrt(k), rounded down.

        Exactly that many up to 70 million of them: `meter.affordable(meter.share(k)) == k`.
        """
        count = checked_count(releases)
        if not 1 <= count <= LIMIT:
            raise InvalidInput(
                f"The budget cannot be shared by {releases!r} releases: give from 1 to {LIMIT}."
            )
        return self._cost(Fraction(LIMIT // count, LIMIT) * self.total.amount, up=False)

    def spent(self, units: int) -> Cost:
        """Return the cost of that many units, rounded up: what to report as spent."""
        return self._cost(Fraction(units, LIMIT) * self.total.amount, up=True)

    def remaining(self, units: int) -> Cost:
        """Return the cost left after that many units were spent, rounded down and never negative."""
        return self._cost(Fraction(max(LIMIT - units, 0), LIMIT) * self.total.amount, up=False)

    def _cost(self, amount: Fraction, up: bool) -> Cost:
        if isinstance(self.total, PureCost):
            return PureCost(rounded_up(amount) if up else rounded_down(amount))
        return GaussianCost(root_rounded_up(amount) if up else root_rounded_down(amount))

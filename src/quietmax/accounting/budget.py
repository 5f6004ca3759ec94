"""Meter: a budget counted in whole units, so that spending can never pass it by rounding.

A budget is `LIMIT` units in its own measure (epsilon, or mu squared). One unit is an exact fraction of the
budget, a charge is rounded up to whole units, and units are added as integers: below 2^53, they fit a
database's integer column and JSON. `LIMIT` = 5040 * 10^12 is divisible by every number to 10 and by powers of
ten, so that ten charges of a tenth are exactly the budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from quietmax.accounting.conversions import (
    LARGEST,
    SMALLEST,
    as_number,
    decimal,
    mu_of,
    root_rounded_down,
    root_rounded_up,
    rounded_down,
    rounded_up,
)
from quietmax.accounting.costs import Cost, GaussianCost, Measure, PureCost, checked_count
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
        if cost.measure != self.total.measure:
            raise InvalidInput(
                f"A {cost.measure} cost cannot be charged to a {self.total.measure} budget: convert it with"
                " as_gaussian(), or state the budget in the other measure."
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


Analysis = Literal["proven", "published", "published-example"]


@dataclass(frozen=True)
class Budget:
    """The total of all answers: (epsilon, delta), and optionally the number of queries to divide it among.

    >>> Budget(epsilon=1.0, queries=100).total("pure")
    PureCost(epsilon=1.0)
    >>> round(Budget(epsilon=1.0, delta=1e-5).total("gaussian").mu, 3)
    0.268
    """

    epsilon: float
    delta: float = 0.0
    queries: int | None = None

    def __post_init__(self) -> None:
        epsilon, delta = as_number(self.epsilon), as_number(self.delta)
        if not SMALLEST <= epsilon <= LARGEST:
            raise InvalidInput(
                f"The budget's epsilon is {self.epsilon!r}, but must be a number from 1e-100 to 1e100: give one."
            )
        if not 0.0 <= delta < 1.0:
            raise InvalidInput(
                f"The budget's delta is {self.delta!r}, but must be from 0 to below 1: give such a delta."
            )
        if self.queries is not None and checked_count(self.queries) < 1:
            raise InvalidInput(
                f"The budget is for {self.queries!r} queries, but must be for at least 1, or None: give one."
            )
        object.__setattr__(self, "epsilon", epsilon)
        object.__setattr__(self, "delta", delta)
        object.__setattr__(self, "queries", None if self.queries is None else int(self.queries))

    def total(self, measure: Measure, analysis: Analysis = "proven") -> Cost:
        """Return the total: epsilon, the mu within (epsilon, delta), or mu = epsilon as published."""
        _check_words(measure, analysis)
        if measure == "pure":
            return PureCost(self.epsilon)
        if analysis != "proven":
            return GaussianCost(self.epsilon)
        if self.delta == 0.0:
            raise InvalidInput(
                f"A budget of epsilon {self.epsilon:g} with delta 0 has no Gaussian total: give a delta"
                " above 0,"
                " use Laplace noise, or ask for the published analysis (mu = epsilon)."
            )
        return GaussianCost(mu_of(self.epsilon, self.delta))

    def to_json(self) -> dict[str, float | int | None]:
        """Return the three numbers by name."""
        return {"epsilon": self.epsilon, "delta": self.delta, "queries": self.queries}


def _check_words(measure: str, analysis: str) -> None:
    if measure not in ("pure", "gaussian"):
        raise InvalidInput(f"The measure is {measure!r}, but must be pure or gaussian: name one of them.")
    if analysis not in ("proven", "published", "published-example"):
        raise InvalidInput(
            f"The analysis is {analysis!r}, but must be proven, published or published-example: name one."
        )


def per_query(budget: Budget, measure: Measure, analysis: Analysis = "proven") -> Cost:
    """Return what each of `budget.queries` queries (one, if not stated) may cost, rounded down.

    >>> per_query(Budget(epsilon=10.0, queries=100), "pure")
    PureCost(epsilon=0.1)
    >>> per_query(Budget(epsilon=10.0, queries=100), "gaussian", analysis="published")
    GaussianCost(mu=1.0)
    >>> per_query(Budget(epsilon=10.0, queries=100), "gaussian", analysis="published-example")
    GaussianCost(mu=0.1)
    """
    total = budget.total(measure, analysis)
    queries = 1 if budget.queries is None else budget.queries
    if measure == "gaussian" and analysis == "published-example":
        return GaussianCost(rounded_down(decimal(budget.epsilon) / queries))
    return Meter(total).share(queries)


def queries_affordable(total: Cost, per_query_cost: Cost) -> int:
    """Return how many queries of this cost the total pays for; never one too many by rounding.

    >>> queries_affordable(PureCost(1.0), PureCost(0.1))
    10
    >>> queries_affordable(GaussianCost(1.0), GaussianCost(0.1))
    100
    """
    return Meter(total).affordable(per_query_cost)


def total_needed(per_query_cost: Cost, queries: int) -> Cost:
    """Return the smallest total that pays for this many queries: the inverse of `queries_affordable`.

    `queries_affordable(total_needed(cost, k), cost) >= k`, though a charge is rounded up to the meter's units.

    >>> total_needed(GaussianCost(0.1), 100)
    GaussianCost(mu=1.0)
    """
    count = checked_count(queries)
    if not 1 <= count <= LIMIT:
        raise InvalidInput(
            f"A total for {queries!r} queries was asked for, but it must be for 1 to {LIMIT}; give such a "
            "number."
        )
    amount = per_query_cost.amount * Fraction(LIMIT, LIMIT // count)
    if isinstance(per_query_cost, PureCost):
        return PureCost(rounded_up(amount))
    return GaussianCost(root_rounded_up(amount))

"""Budgets: the total of all answers, its share per query, and a meter that counts it in integer units.

A meter divides a budget into `LIMIT` units of its own measure (epsilon, or mu squared). One unit is an exact fraction
of the budget, a charge is rounded up to integer units, and units are added as integers, so spending can never exceed
the budget by rounding. Units are below 2^53 and therefore fit a database's integer column and JSON. `LIMIT` =
5040 * 10^12 is divisible by every number up to 10 and by powers of ten, so ten charges of a tenth are exactly the
budget.
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
"""The number of units of a meter."""
Analysis = Literal["proven", "published", "published-example"]
"""How (epsilon, delta) becomes a total: proven, as the paper's text has it, or as the paper's example computes it."""


@dataclass(frozen=True)
class Budget:
    """The privacy budget of all answers together.

    Parameters
    ----------
    epsilon : float
        Between 1e-100 and 1e100.
    delta : float
        At least 0 and below 1. The Gaussian measure requires a delta above 0.
    queries : int or None
        The number of queries that share the budget. None: queries are answered until the budget is spent.

    Raises
    ------
    InvalidInput
        If a number is out of range.

    Examples
    --------
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
            raise InvalidInput(f"epsilon must be between 1e-100 and 1e100, got {self.epsilon!r}.")
        if not 0.0 <= delta < 1.0:
            raise InvalidInput(f"delta must be at least 0 and below 1, got {self.delta!r}.")
        if self.queries is not None and checked_count(self.queries, "queries") < 1:
            raise InvalidInput(f"queries must be an integer of at least 1 or None, got {self.queries!r}.")
        object.__setattr__(self, "epsilon", epsilon)
        object.__setattr__(self, "delta", delta)
        object.__setattr__(self, "queries", None if self.queries is None else int(self.queries))

    def total(self, measure: Measure, analysis: Analysis = "proven") -> Cost:
        """Return the total of the budget in a privacy measure.

        Parameters
        ----------
        measure : {"pure", "gaussian"}
            The measure of the result.
        analysis : {"proven", "published", "published-example"}
            ``"proven"``: in the Gaussian measure the largest mu within (epsilon, delta). Otherwise mu = epsilon, as the
            paper has it.

        Returns
        -------
        PureCost or GaussianCost
            The total.

        Raises
        ------
        InvalidInput
            If the measure or analysis is unknown, or a proven Gaussian total is asked for with delta 0.
        """
        if measure not in ("pure", "gaussian"):
            raise InvalidInput(f"measure must be 'pure' or 'gaussian', got {measure!r}.")
        if analysis not in ("proven", "published", "published-example"):
            raise InvalidInput(
                f"analysis must be 'proven', 'published' or 'published-example', got {analysis!r}."
            )
        if measure == "pure":
            return PureCost(self.epsilon)
        if analysis != "proven":
            return GaussianCost(self.epsilon)
        if self.delta == 0.0:
            raise InvalidInput(
                "Gaussian noise requires a delta above 0, got 0. Laplace noise and the exponential mechanism need no "
                "delta."
            )
        return GaussianCost(mu_of(self.epsilon, self.delta))

    def to_json(self) -> dict[str, float | int | None]:
        """Return the three numbers by name."""
        return {"epsilon": self.epsilon, "delta": self.delta, "queries": self.queries}


def per_query(budget: Budget, measure: Measure, analysis: Analysis = "proven") -> Cost:
    """Return what each query of a budget may cost, rounded down.

    Parameters
    ----------
    budget : Budget
        The total and the number of queries; one query if the budget states no number.
    measure : {"pure", "gaussian"}
        The measure of the cost.
    analysis : {"proven", "published", "published-example"}
        See `Budget.total`. The paper's example divides mu by the number of queries instead of its square root.

    Returns
    -------
    PureCost or GaussianCost
        The cost of one query.

    Examples
    --------
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


@dataclass(frozen=True)
class Meter:
    """A total cost divided into `LIMIT` integer units."""

    total: Cost  # The total, above 0

    def __post_init__(self) -> None:
        if self.total.amount == 0:
            raise InvalidInput("The total of a budget must be above 0, got 0.")

    def units(self, cost: Cost) -> int:
        """Return the units that a cost takes, rounded up."""
        if cost.measure != self.total.measure:
            raise InvalidInput(
                f"A {self.total.measure} budget cannot be charged a {cost.measure} cost. A pure cost can be converted "
                "with as_gaussian()."
            )
        return math.ceil(cost.amount * LIMIT / self.total.amount)

    def affordable(self, cost: Cost) -> int:
        """Return how many releases of a cost the whole budget pays for."""
        units = self.units(cost)
        if units == 0:
            raise InvalidInput("The cost of a release must be above 0, got 0.")
        return LIMIT // units

    def share(self, releases: int) -> Cost:
        """Return the largest cost of which the budget pays that many: epsilon/k, or mu/sqrt(k), rounded down.

        Up to 70 million releases, ``meter.affordable(meter.share(k)) == k`` holds exactly.
        """
        count = _checked_releases(releases)
        return self._cost(Fraction(LIMIT // count, LIMIT) * self.total.amount, up=False)

    def spent(self, units: int) -> Cost:
        """Return the cost of spent units, rounded up."""
        return self._cost(Fraction(units, LIMIT) * self.total.amount, up=True)

    def remaining(self, units: int) -> Cost:
        """Return the cost that is left, rounded down and never negative."""
        return self._cost(Fraction(max(LIMIT - units, 0), LIMIT) * self.total.amount, up=False)

    def _cost(self, amount: Fraction, up: bool) -> Cost:
        """Return the cost of an amount (epsilon, or mu squared), rounded up or down."""
        if isinstance(self.total, PureCost):
            return PureCost(rounded_up(amount) if up else rounded_down(amount))
        return GaussianCost(root_rounded_up(amount) if up else root_rounded_down(amount))


def queries_affordable(total: Cost, per_query_cost: Cost) -> int:
    """Return how many queries a total pays for; never one too many by rounding.

    Parameters
    ----------
    total : PureCost or GaussianCost
        The total, above 0.
    per_query_cost : PureCost or GaussianCost
        The cost of one query, in the same measure.

    Returns
    -------
    int
        The number of queries.

    Examples
    --------
    >>> queries_affordable(PureCost(1.0), PureCost(0.1))
    10
    >>> queries_affordable(GaussianCost(1.0), GaussianCost(0.1))
    100
    """
    return Meter(total).affordable(per_query_cost)


def total_needed(per_query_cost: Cost, queries: int) -> Cost:
    """Return the smallest total that pays for this many queries: the inverse of `queries_affordable`.

    ``queries_affordable(total_needed(cost, k), cost) >= k``, though a charge is rounded up to the meter's units.

    Parameters
    ----------
    per_query_cost : PureCost or GaussianCost
        The cost of one query.
    queries : int
        The number of queries, from 1 to `LIMIT`.

    Returns
    -------
    PureCost or GaussianCost
        The total.

    Examples
    --------
    >>> total_needed(GaussianCost(0.1), 100)
    GaussianCost(mu=1.0)
    """
    amount = per_query_cost.amount * Fraction(LIMIT, LIMIT // _checked_releases(queries))
    if isinstance(per_query_cost, PureCost):
        return PureCost(rounded_up(amount))
    return GaussianCost(root_rounded_up(amount))


def _checked_releases(releases: int) -> int:
    """Return the number of releases if a meter can be divided among them."""
    count = checked_count(releases, "The number of releases")
    if not 1 <= count <= LIMIT:
        raise InvalidInput(f"The number of releases must be between 1 and {LIMIT}, got {releases!r}.")
    return count

"""Budget: the total an owner allows, in (epsilon, delta), and its division among queries.

Three readings of what a total means, and of the paper's section on multiple queries:

* `proven`: (epsilon, delta) is what is promised. Pure: epsilon/k for each of k queries. Gaussian: the largest
  mu within (epsilon, delta), divided as mu/sqrt(k).
* `published`: the paper's "epsilon-GDP" is mu = epsilon, divided as epsilon/sqrt(k) by its composition
  theorem; delta plays no part. At epsilon = 1 this is delta = 0.127, not 1e-5 (theory section 2.5).
* `published-example`: the paper's worked example divides epsilon by k for the Gaussian mechanism too (and
  writes 10/100 as 10^-2, theory section 2.6): mu = epsilon/k, which spends less than `published` allows.

For the pure currency the three agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from quietmax.accounting.cost import Cost, Currency, GaussianCost, PureCost, checked_count
from quietmax.accounting.decimals import (
    LARGEST,
    SMALLEST,
    as_number,
    decimal,
    root_rounded_up,
    rounded_down,
    rounded_up,
)
from quietmax.accounting.gaussian import mu_of
from quietmax.accounting.meter import LIMIT, Meter
from quietmax.errors import InvalidInput

Reading = Literal["proven", "published", "published-example"]


@dataclass(frozen=True)
class Budget:
    """The total of all answers: (epsilon, delta), and optionally the number of queries to divide it among.

    >>> Budget(epsilon=1.0, queries=100).in_currency("pure")
    PureCost(epsilon=1.0)
    >>> round(Budget(epsilon=1.0, delta=1e-5).in_currency("gaussian").mu, 3)
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

    def in_currency(self, currency: Currency, reading: Reading = "proven") -> Cost:
        """Return the total: epsilon, the mu within (epsilon, delta), or mu = epsilon as published."""
        _check_words(currency, reading)
        if currency == "pure":
            return PureCost(self.epsilon)
        if reading != "proven":
            return GaussianCost(self.epsilon)
        if self.delta == 0.0:
            raise InvalidInput(
                f"A budget of epsilon {self.epsilon:g} with delta 0 has no Gaussian total: give a delta"
                " above 0,"
                " use Laplace noise, or ask for the published reading (mu = epsilon)."
            )
        return GaussianCost(mu_of(self.epsilon, self.delta))

    def to_json(self) -> dict[str, float | int | None]:
        """Return the three numbers by name."""
        return {"epsilon": self.epsilon, "delta": self.delta, "queries": self.queries}


def _check_words(currency: str, reading: str) -> None:
    if currency not in ("pure", "gaussian"):
        raise InvalidInput(f"The currency is {currency!r}, but must be pure or gaussian: name one of them.")
    if reading not in ("proven", "published", "published-example"):
        raise InvalidInput(
            f"The reading is {reading!r}, but must be proven, published or published-example: name one."
        )


def per_query(budget: Budget, currency: Currency, reading: Reading = "proven") -> Cost:
    """Return what each of `budget.queries` queries (one, if not stated) may cost, rounded down.

    >>> per_query(Budget(epsilon=10.0, queries=100), "pure")
    PureCost(epsilon=0.1)
    >>> per_query(Budget(epsilon=10.0, queries=100), "gaussian", reading="published")
    GaussianCost(mu=1.0)
    >>> per_query(Budget(epsilon=10.0, queries=100), "gaussian", reading="published-example")
    GaussianCost(mu=0.1)
    """
    total = budget.in_currency(currency, reading)
    queries = 1 if budget.queries is None else budget.queries
    if currency == "gaussian" and reading == "published-example":
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

"""Cost: what one release spends, in one of two currencies that compose exactly (theory section 3).

Pure: epsilon-differential privacy; epsilons add up. Gaussian: mu-Gaussian differential privacy (Dong, Roth,
Su 2022); the squares of the mus add up, also when each mu is chosen after seeing the earlier answers (Smith,
Thakurta 2022). (epsilon, delta) is no measure: it is derived at the edge, see
`quietmax.accounting.conversions`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

from scipy.optimize import brentq

from quietmax.accounting.conversions import (
    as_number,
    checked_amount,
    decimal,
    pure_as_gaussian,
    root_rounded_up,
    rounded_up,
)
from quietmax.errors import InvalidInput

Measure = Literal["pure", "gaussian"]


@dataclass(frozen=True)
class PureCost:
    """A release that is epsilon-differentially private.

    >>> PureCost(0.1).times(3)
    PureCost(epsilon=0.3)
    """

    epsilon: float
    measure: ClassVar[Measure] = "pure"

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", checked_amount(self.epsilon, "The epsilon of a cost"))

    @property
    def amount(self) -> Fraction:
        """What adds up under composition: epsilon."""
        return decimal(self.epsilon)

    def times(self, releases: int) -> PureCost:
        """Return the cost of that many such releases: `releases * epsilon`, rounded up."""
        return PureCost(rounded_up(self.amount * checked_count(releases)))

    def as_gaussian(self) -> GaussianCost:
        """Return the Gaussian cost that any epsilon-private release stays within (theory section 3)."""
        return GaussianCost(pure_as_gaussian(self.epsilon))

    def to_json(self) -> dict[str, str | float]:
        """Return `{"measure": "pure", "epsilon": ...}`."""
        return {"measure": self.measure, "epsilon": self.epsilon}

    def __str__(self) -> str:
        return f"epsilon = {self.epsilon:.6g} (pure)"


@dataclass(frozen=True)
class GaussianCost:
    """A release that is mu-Gaussian private: as hard to tell apart as N(0, 1) and N(mu, 1), or harder.

    >>> GaussianCost(0.1).times(100)
    GaussianCost(mu=1.0)
    """

    mu: float
    measure: ClassVar[Measure] = "gaussian"

    def __post_init__(self) -> None:
        object.__setattr__(self, "mu", checked_amount(self.mu, "The mu of a cost"))

    @property
    def amount(self) -> Fraction:
        """What adds up under composition: mu squared."""
        return decimal(self.mu) ** 2

    def times(self, releases: int) -> GaussianCost:
        """Return the cost of that many such releases: `sqrt(releases) * mu`, rounded up."""
        return GaussianCost(root_rounded_up(self.amount * checked_count(releases)))

    def as_gaussian(self) -> GaussianCost:
        """Return itself."""
        return self

    def to_json(self) -> dict[str, str | float]:
        """Return `{"measure": "gaussian", "mu": ...}`."""
        return {"measure": self.measure, "mu": self.mu}

    def __str__(self) -> str:
        return f"mu = {self.mu:.6g} (gaussian)"


Cost = PureCost | GaussianCost


def checked_count(count: int) -> int:
    """Return `count` as an int, refusing what is not a whole number from 0 up."""
    number = as_number(count)
    if isinstance(count, bool) or not 0.0 <= number < 2.0**53 or number != int(number):
        raise InvalidInput(
            f"The number of releases is {count!r}, but must be a whole number from 0 up: give one."
        )
    return int(count)


def compose(costs: Iterable[Cost]) -> Cost:
    """Return the cost of all the releases together, each possibly chosen after seeing the earlier answers.

    All pure: the sum of the epsilons. All Gaussian: the root of the sum of the squared mus. Mixed: every pure
    cost is first converted to the Gaussian measure by `as_gaussian`; a bounded-range release (exponential
    mechanism) should be given as `GaussianCost(bounded_range_as_gaussian(epsilon))` instead, which is about
    half. Sums are exact and the result is rounded up to a float. Nothing at all costs `PureCost(0.0)`.

    >>> compose([PureCost(0.1), PureCost(0.2)])
    PureCost(epsilon=0.3)
    >>> compose([GaussianCost(3.0), GaussianCost(4.0)])
    GaussianCost(mu=5.0)
    """
    steps = list(costs)
    if all(isinstance(step, PureCost) for step in steps):
        return PureCost(rounded_up(sum((step.amount for step in steps), Fraction(0))))
    return GaussianCost(root_rounded_up(sum((step.as_gaussian().amount for step in steps), Fraction(0))))


def cost_from_json(record: Mapping[str, str | float]) -> Cost:
    """Return the cost that `to_json` wrote; version 0.1 wrote the key ``currency`` instead of ``measure``.

    Parameters
    ----------
    record : Mapping
        A measure (``"pure"`` or ``"gaussian"``) with its epsilon or mu.

    Returns
    -------
    PureCost or GaussianCost
        The cost.

    Raises
    ------
    InvalidInput
        If the record has another form.

    Examples
    --------
    >>> cost_from_json(PureCost(1.0).to_json())
    PureCost(epsilon=1.0)
    """
    measure = record.get("measure", record.get("currency"))
    if measure == "pure" and "epsilon" in record:
        return PureCost(float(record["epsilon"]))
    if measure == "gaussian" and "mu" in record:
        return GaussianCost(float(record["mu"]))
    raise InvalidInput(
        f"A cost must state a measure (pure or gaussian) with its epsilon or mu, got {record!r}."
    )


_SLACK = 2.0**-44


def _checked(epsilon: float, queries: int, delta: float) -> tuple[float, int, float]:
    if (
        not 0.0 < as_number(epsilon) < math.inf
        or checked_count(queries) < 1
        or not 0.0 < as_number(delta) < 1.0
    ):
        raise InvalidInput(
            f"Advanced composition got epsilon {epsilon!r}, queries {queries!r}, delta {delta!r}:"
            " give a positive epsilon, at least one query and a delta between 0 and 1."
        )
    return float(epsilon), int(queries), float(delta)


def _total(epsilon: float, queries: int, delta: float) -> float:
    drift = queries * epsilon * math.tanh(0.5 * epsilon)
    return min(queries * epsilon, drift + epsilon * math.sqrt(2.0 * queries * -math.log(delta)))


def advanced_composition(epsilon: float, queries: int, delta: float) -> float:
    """Return the epsilon' of `queries` releases of `epsilon` each at this delta, rounded up.

    >>> round(advanced_composition(0.01, 10_000, 1e-5), 1)
    5.3
    """
    return _total(*_checked(epsilon, queries, delta)) * (1.0 + _SLACK)


def advanced_composition_per_query(total_epsilon: float, queries: int, delta: float) -> float:
    """Return the largest epsilon per query that stays within (total_epsilon, delta), rounded down.

    >>> share = advanced_composition_per_query(1.0, 1000, 1e-5)
    >>> advanced_composition(share, 1000, 1e-5) <= 1.0 < advanced_composition(share * 1.0001, 1000, 1e-5)
    True
    """
    total_epsilon, queries, delta = _checked(total_epsilon, queries, delta)
    even = total_epsilon / queries
    if _total(total_epsilon, queries, delta) <= total_epsilon:
        share = total_epsilon
    else:
        share = float(
            brentq(
                lambda epsilon: _total(epsilon, queries, delta) - total_epsilon,
                0.5 * even,
                total_epsilon,
                xtol=1e-300,
                rtol=2.0**-48,
                maxiter=500,
            )
        )
    while advanced_composition(share, queries, delta) > total_epsilon:
        share *= 1.0 - _SLACK
    return share

"""Costs: what a release spends, in one of two privacy measures that compose exactly (THEORY section 3).

Pure: epsilon-differential privacy; epsilons add up. Gaussian: mu-Gaussian differential privacy (Dong, Roth, Su 2022);
the squares of the mus add up, also when each mu is chosen after seeing the earlier answers (Smith, Thakurta 2022).
(epsilon, delta) is not a measure: it is derived at the end, see `quietmax.accounting.conversions`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

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
    """The cost of a release that is epsilon-differentially private.

    Parameters
    ----------
    epsilon : float
        0, or between 1e-100 and 1e100.

    Attributes
    ----------
    measure : str
        ``"pure"``.

    Examples
    --------
    >>> PureCost(0.1).times(3)
    PureCost(epsilon=0.3)
    """

    epsilon: float
    measure: ClassVar[Measure] = "pure"

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", checked_amount(self.epsilon, "epsilon"))

    @property
    def amount(self) -> Fraction:
        """The quantity that adds up under composition: epsilon."""
        return decimal(self.epsilon)

    def times(self, releases: int) -> PureCost:
        """Return the cost of several such releases: ``releases * epsilon``, rounded up.

        Parameters
        ----------
        releases : int
            The number of releases, at least 0.
        """
        return PureCost(rounded_up(self.amount * checked_count(releases, "releases")))

    def as_gaussian(self) -> GaussianCost:
        """Return a Gaussian cost that covers every epsilon-private release (THEORY section 3)."""
        return GaussianCost(pure_as_gaussian(self.epsilon))

    def to_json(self) -> dict[str, str | float]:
        """Return ``{"measure": "pure", "epsilon": ...}``."""
        return {"measure": self.measure, "epsilon": self.epsilon}

    def __str__(self) -> str:
        return f"epsilon = {self.epsilon:.6g} (pure)"


@dataclass(frozen=True)
class GaussianCost:
    """The cost of a mu-Gaussian private release: neighbours are as hard to distinguish as N(0, 1) and N(mu, 1).

    Parameters
    ----------
    mu : float
        0, or between 1e-100 and 1e100.

    Attributes
    ----------
    measure : str
        ``"gaussian"``.

    Examples
    --------
    >>> GaussianCost(0.1).times(100)
    GaussianCost(mu=1.0)
    """

    mu: float
    measure: ClassVar[Measure] = "gaussian"

    def __post_init__(self) -> None:
        object.__setattr__(self, "mu", checked_amount(self.mu, "mu"))

    @property
    def amount(self) -> Fraction:
        """The quantity that adds up under composition: mu squared."""
        return decimal(self.mu) ** 2

    def times(self, releases: int) -> GaussianCost:
        """Return the cost of several such releases: ``sqrt(releases) * mu``, rounded up.

        Parameters
        ----------
        releases : int
            The number of releases, at least 0.
        """
        return GaussianCost(root_rounded_up(self.amount * checked_count(releases, "releases")))

    def as_gaussian(self) -> GaussianCost:
        """Return the cost itself."""
        return self

    def to_json(self) -> dict[str, str | float]:
        """Return ``{"measure": "gaussian", "mu": ...}``."""
        return {"measure": self.measure, "mu": self.mu}

    def __str__(self) -> str:
        return f"mu = {self.mu:.6g} (gaussian)"


Cost = PureCost | GaussianCost


def checked_count(count: int, name: str) -> int:
    """Return `count` as an int if it is an integer of at least 0."""
    number = as_number(count)
    if isinstance(count, bool) or not 0.0 <= number < 2.0**53 or number != int(number):
        raise InvalidInput(f"{name} must be an integer of at least 0 and below 2^53, got {count!r}.")
    return int(count)


def compose(costs: Iterable[Cost]) -> Cost:
    """Return the cost of several releases together, each possibly chosen after seeing the earlier answers.

    All pure: the sum of the epsilons. All Gaussian: the root of the sum of the squared mus. Mixed: every pure cost is
    first converted by `as_gaussian`; a release of bounded range (exponential mechanism) is better given as
    ``GaussianCost(bounded_range_as_gaussian(epsilon))``, which is about half. Sums are exact and the result is rounded
    up to a float. No releases cost ``PureCost(0.0)``.

    Parameters
    ----------
    costs : iterable of PureCost or GaussianCost
        The costs of the releases.

    Returns
    -------
    PureCost or GaussianCost
        The cost of all of them.

    Examples
    --------
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
    """Return the cost that `to_json` wrote; version 0.1 wrote the key ``currency`` instead of ``measure``."""
    measure = record.get("measure", record.get("currency"))
    if measure == "pure" and "epsilon" in record:
        return PureCost(float(record["epsilon"]))
    if measure == "gaussian" and "mu" in record:
        return GaussianCost(float(record["mu"]))
    raise InvalidInput(
        f"A cost must state a measure (pure or gaussian) with its epsilon or mu, got {record!r}."
    )


_SLACK = 2.0**-44


def advanced_composition(epsilon: float, queries: int, delta: float) -> float:
    """Return the total epsilon of several pure releases at a delta, rounded up (advanced composition)."""
    return _total(*_checked(epsilon, queries, delta)) * (1.0 + _SLACK)


def advanced_composition_per_query(total_epsilon: float, queries: int, delta: float) -> float:
    """Return the largest epsilon per query that stays within (total_epsilon, delta), rounded down."""
    total_epsilon, queries, delta = _checked(total_epsilon, queries, delta)
    even = total_epsilon / queries
    if _total(total_epsilon, queries, delta) <= total_epsilon:
        share = total_epsilon
    else:
        from scipy.optimize import brentq

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


def _checked(epsilon: float, queries: int, delta: float) -> tuple[float, int, float]:
    """Return the arguments of advanced composition, or raise `InvalidInput`."""
    if not 0.0 < as_number(epsilon) < math.inf:
        raise InvalidInput(f"epsilon must be a finite number above 0, got {epsilon!r}.")
    if checked_count(queries, "queries") < 1:
        raise InvalidInput(f"queries must be an integer of at least 1, got {queries!r}.")
    if not 0.0 < as_number(delta) < 1.0:
        raise InvalidInput(f"delta must be between 0 and 1, exclusive, got {delta!r}.")
    return float(epsilon), int(queries), float(delta)


def _total(epsilon: float, queries: int, delta: float) -> float:
    """Return the total epsilon of advanced composition without rounding."""
    drift = queries * epsilon * math.tanh(0.5 * epsilon)
    return min(queries * epsilon, drift + epsilon * math.sqrt(2.0 * queries * -math.log(delta)))

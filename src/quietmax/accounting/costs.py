"""Costs and budgets: what a release spends, in one of two privacy measures that compose exactly (THEORY section 3).

Pure: epsilon-differential privacy; epsilons add up. Gaussian: mu-Gaussian differential privacy (Dong, Roth, Su 2022);
the squares of the mus add up, also when each mu is chosen after seeing the earlier answers (Smith, Thakurta 2022).
(epsilon, delta) is not a measure: it is derived at the end, by `delta_of` and `epsilon_of`.

A float stands for the decimal number it prints as. 0.1 is not a binary fraction, so ten charges of the *binary* 0.1
exceed a budget of 1 by 5.6e-16 and the tenth answer would be refused. Costs and budgets are therefore read as the
shortest decimal that names the float (0.1 is 1/10), added as exact fractions, and turned back into floats outwards:
what was spent is rounded up, what is left is rounded down. A float differs from its decimal by at most 2^-53 of it;
`quietmax.noise` adds noise for that difference.

A meter divides a budget into `LIMIT` units of its own measure (epsilon, or mu squared). One unit is an exact fraction
of the budget, a charge is rounded up to integer units, and units are added as integers, so spending can never exceed
the budget by rounding. Units are below 2^53 and therefore fit a database's integer column and JSON. `LIMIT` =
5040 * 10^12 is divisible by every number up to 10 and by powers of ten, so ten charges of a tenth are exactly the
budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal, Self, cast, get_args

import numpy as np
from scipy.special import erfcx, erfinv, log_expit, ndtr, ndtri, ndtri_exp

from quietmax.errors import InvalidInput, as_number, checked_positive


def decimal(value: float) -> Fraction:
    """Return the decimal number that a float prints as."""
    return Fraction(repr(float(value)))


def _checked_amount(value: float, name: str) -> float:
    number = as_number(value)
    if number == 0.0 or 1e-100 <= number <= 1e100:
        return abs(number)
    raise InvalidInput(f"{name} must be 0 or between 1e-100 and 1e100, got {value!r}.")


def rounded_up(value: Fraction) -> float:
    """Return the smallest float whose decimal is at least `value`."""
    nearest = float(value)
    return nearest if decimal(nearest) >= value else math.nextafter(nearest, math.inf)


def _rounded_down(value: Fraction) -> float:
    nearest = float(value)
    return nearest if decimal(nearest) <= value else math.nextafter(nearest, -math.inf)


def root_rounded_up(value: Fraction) -> float:
    """Return the smallest float whose squared decimal is at least `value`."""
    root = math.sqrt(float(value)) * (1.0 - 2.0**-51)  # a few floats too low
    while decimal(root) ** 2 < value:
        root = math.nextafter(root, math.inf)
    return root


def root_rounded_down(value: Fraction) -> float:
    """Return the largest float whose squared decimal is at most `value`."""
    root = root_rounded_up(value)
    return root if decimal(root) ** 2 <= value else math.nextafter(root, 0.0)


_SMALLEST_DELTA = 1e-300
"""No smaller positive delta is ever claimed."""
_SLACK = 2.0**-36
"""Relative slack added to every computed delta; mu/64 times as much for larger mu, where x cancels."""
_FINE = 2.0**-44
_SMALL_MU = 0.5
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(24)


def _mills(x: float) -> float:
    """Return Mills' ratio P(N > x)/phi(x)."""
    return math.sqrt(math.pi / 2) * float(erfcx(x / math.sqrt(2)))


def _log_delta(mu: float, x: float) -> float:
    """Return ln(delta) at epsilon = mu*(x + mu/2), with a relative error of delta below the slack."""
    if mu < _SMALL_MU:
        points = x + 0.5 * mu * (_NODES + 1.0)
        slopes = 1.0 - points * math.sqrt(math.pi / 2) * erfcx(points / math.sqrt(2))
        difference = 0.5 * mu * float(_WEIGHTS @ slopes)
    elif x > 0.0:
        difference = _mills(x) - _mills(x + mu)
    else:
        density = math.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return math.log(float(ndtr(-x)) - density * _mills(x + mu))
    if difference <= 0.0:
        return -math.inf
    return math.log(difference) - 0.5 * x * x - 0.5 * math.log(2 * math.pi)


def _checked(value: float, name: str, low: float, high: float) -> float:
    number = as_number(value)
    if low <= number < high:
        return number
    raise InvalidInput(f"{name} must be at least {low:g} and below {high:g}, got {value!r}.")


def delta_of(mu: float, epsilon: float) -> float:
    """Return the delta at which mu-Gaussian privacy is (epsilon, delta)-differential privacy, rounded up.

    delta = Phi(-epsilon/mu + mu/2) - exp(epsilon) * Phi(-epsilon/mu - mu/2)   (THEORY 2.5)

    The result is at least the true value and, for mu up to 100, at most (1 + 3e-11) times it. It is never a positive
    number below 1e-300.

    Parameters
    ----------
    mu, epsilon : float
        At least 0.

    Examples
    --------
    >>> round(delta_of(1.0, 1.0), 3)
    0.127
    """
    mu = _checked(mu, "mu", 0.0, math.inf)
    epsilon = _checked(epsilon, "epsilon", 0.0, math.inf)
    if mu == 0.0:
        return 0.0
    log_delta = _log_delta(mu, epsilon / mu - 0.5 * mu)
    return min(1.0, max(_SMALLEST_DELTA, math.exp(log_delta) * (1.0 + _SLACK * max(1.0, mu / 64.0))))


def epsilon_of(mu: float, delta: float) -> float:
    """Return the smallest epsilon at which mu-Gaussian privacy is (epsilon, delta)-private, rounded up.

    ``delta_of(mu, epsilon_of(mu, delta)) <= delta`` always holds.

    Parameters
    ----------
    mu : float
        At least 0.
    delta : float
        At least 1e-300 and below 1.

    Examples
    --------
    >>> round(epsilon_of(1.0, 1e-5), 2)
    4.38
    """
    mu = _checked(mu, "mu", 0.0, math.inf)
    delta = _checked(delta, "delta", _SMALLEST_DELTA, 1.0)
    if delta_of(mu, 0.0) <= delta:
        return 0.0

    def _excess(point: float) -> float:
        return _log_delta(mu, point) - math.log(delta)

    # epsilon = 0 is x = -mu/2; delta <= Phi(-x), so the root lies below x = -ndtri(delta).
    x = -0.5 * mu
    if _excess(x) > 0.0:
        x = _root(_excess, x, -float(ndtri(delta)) + 1e-3)
    epsilon = mu * (x + 0.5 * mu)
    return _stepped(lambda step: epsilon * (1.0 + step) + mu * step, lambda e: delta_of(mu, e) <= delta)


def mu_of(epsilon: float, delta: float) -> float:
    """Return the largest mu whose Gaussian privacy is within (epsilon, delta), rounded down.

    ``delta_of(mu_of(epsilon, delta), epsilon) <= delta`` always holds.

    Parameters
    ----------
    epsilon : float
        At least 0.
    delta : float
        At least 1e-300 and below 1.

    Examples
    --------
    >>> round(mu_of(1.0, 1e-5), 3)
    0.268
    """
    epsilon = _checked(epsilon, "epsilon", 0.0, math.inf)
    delta = _checked(delta, "delta", _SMALLEST_DELTA, 1.0)
    # delta <= mu/sqrt(2 pi) and delta <= Phi(-x), which is below 1e-300 for x > 38, give two mu that certainly suffice.
    low, width = math.log(max(delta, min(1.0, epsilon / 40.0))), 1.0

    def _excess(log_mu: float) -> float:
        mu = math.exp(log_mu)
        return _log_delta(mu, epsilon / mu - 0.5 * mu) - math.log(delta)

    while _excess(low + width) <= 0.0:
        width *= 2.0
    mu = math.exp(_root(_excess, low, low + width))
    return _stepped(lambda step: mu * (1.0 - step), lambda m: delta_of(m, epsilon) <= delta)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    from scipy.optimize import brentq

    return float(brentq(function, low, high, xtol=1e-300, maxiter=500))


def _stepped(candidate: Callable[[float], float], safe: Callable[[float], bool]) -> float:
    """Return the first candidate, of steps 2^-44, 2^-43, ... away from the root, that is on the safe side."""
    step = _FINE
    while not safe(candidate(step)):
        step *= 2.0
    return candidate(step)


def pure_as_gaussian(epsilon: float) -> float:
    """Return mu such that every epsilon-private release is mu-Gaussian private, rounded up.

    mu = 2 * Phi^-1(exp(epsilon)/(1 + exp(epsilon))): the curve of mu-Gaussian privacy is convex and passes through the
    one corner of the curve of epsilon-privacy, hence lies below it everywhere (THEORY section 3).

    Parameters
    ----------
    epsilon : float
        At least 0.

    Examples
    --------
    >>> round(pure_as_gaussian(0.01) / 0.01, 4)
    1.2533
    """
    epsilon = _checked(epsilon, "epsilon", 0.0, math.inf)
    if epsilon < 1.0:
        mu = 2.0 * math.sqrt(2.0) * float(erfinv(math.tanh(0.5 * epsilon)))
    else:
        mu = -2.0 * float(ndtri_exp(log_expit(-epsilon)))
    return mu * (1.0 + _FINE)


def bounded_range_as_gaussian(epsilon: float) -> float:
    """Return mu such that every release of bounded range epsilon is mu-Gaussian private, rounded up.

    mu = 2 * Phi^-1(1/(1 + exp(-epsilon/2))). Bounded range: the logarithms of the probability ratios lie in
    an interval of length epsilon, as for the exponential mechanism (Dong, Durfee, Rogers 2020). The worst
    pair for the interval [t - epsilon, t] is binary, with probabilities p(t) and q(t) = exp(-t)*p(t), and
    needs mu = Phi^-1(p) - Phi^-1(q). Its derivative in t has the sign of h(p) - h(q), h(s) =
    phi(Phi^-1(s))/(s*(1-s)), and h grows with |s - 1/2| since phi/Phi + phi/(1 - Phi) is convex and even; so
    the maximum is at t = epsilon/2.
    """
    return pure_as_gaussian(0.5 * as_number(epsilon))


Measure = Literal["pure", "gaussian"]


class _Cost:
    """What the costs in the two measures share: each has one number, and an amount that adds up."""

    measure: ClassVar[Measure]
    _power: ClassVar[int]

    def __post_init__(self) -> None:
        ((name, value),) = vars(self).items()
        object.__setattr__(self, name, _checked_amount(value, name))

    @property
    def amount(self) -> Fraction:
        """The quantity that adds up under composition: epsilon, or mu squared."""
        (value,) = vars(self).values()
        return decimal(value) ** self._power

    def times(self, releases: int) -> Self:
        """Return the cost of several such releases, rounded up: ``k * epsilon``, or ``sqrt(k) * mu``."""
        return cast(Self, cost_of(self.measure, self.amount * _checked_count(releases, "releases")))

    def to_json(self) -> dict[str, str | float]:
        """Return the measure and the number by name."""
        return {"measure": self.measure, **vars(self)}

    def __str__(self) -> str:
        ((name, value),) = vars(self).items()
        return f"{name} = {value:.6g} ({self.measure})"


@dataclass(frozen=True)
class PureCost(_Cost):
    """The cost of a release that is epsilon-differentially private.

    Parameters
    ----------
    epsilon : float
        0, or between 1e-100 and 1e100.

    Examples
    --------
    >>> PureCost(0.1).times(3)
    PureCost(epsilon=0.3)
    """

    epsilon: float
    measure: ClassVar[Measure] = "pure"
    _power: ClassVar[int] = 1

    def as_gaussian(self) -> GaussianCost:
        """Return a Gaussian cost that covers every epsilon-private release (THEORY section 3)."""
        return GaussianCost(pure_as_gaussian(self.epsilon))


@dataclass(frozen=True)
class GaussianCost(_Cost):
    """The cost of a mu-Gaussian private release: neighbours are as hard to distinguish as N(0, 1) and N(mu, 1).

    Parameters
    ----------
    mu : float
        0, or between 1e-100 and 1e100.

    Examples
    --------
    >>> GaussianCost(0.1).times(100)
    GaussianCost(mu=1.0)
    """

    mu: float
    measure: ClassVar[Measure] = "gaussian"
    _power: ClassVar[int] = 2

    def as_gaussian(self) -> GaussianCost:
        """Return the cost itself."""
        return self


Cost = PureCost | GaussianCost


def cost_of(measure: Measure, amount: Fraction, *, up: bool = True) -> Cost:
    """Return the cost of an amount (epsilon, or mu squared), rounded up or down to a float."""
    if measure == "pure":
        return PureCost(rounded_up(amount) if up else _rounded_down(amount))
    return GaussianCost(root_rounded_up(amount) if up else root_rounded_down(amount))


def _checked_count(count: int, name: str) -> int:
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

    Examples
    --------
    >>> compose([PureCost(0.1), PureCost(0.2)])
    PureCost(epsilon=0.3)
    >>> compose([GaussianCost(3.0), GaussianCost(4.0)])
    GaussianCost(mu=5.0)
    """
    steps = list(costs)
    if all(isinstance(step, PureCost) for step in steps):
        return cost_of("pure", sum((step.amount for step in steps), Fraction(0)))
    return cost_of("gaussian", sum((step.as_gaussian().amount for step in steps), Fraction(0)))


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
        epsilon, delta = checked_positive(self.epsilon, "epsilon"), _checked(self.delta, "delta", 0.0, 1.0)
        if self.queries is not None and _checked_count(self.queries, "queries") < 1:
            raise InvalidInput(f"queries must be an integer of at least 1 or None, got {self.queries!r}.")
        queries = None if self.queries is None else int(self.queries)
        vars(self).update(epsilon=epsilon, delta=delta, queries=queries)

    def total(self, measure: Measure, analysis: Analysis = "proven") -> Cost:
        """Return the total of the budget in a privacy measure.

        Parameters
        ----------
        measure : {"pure", "gaussian"}
            The measure of the result.
        analysis : {"proven", "published", "published-example"}
            ``"proven"``: in the Gaussian measure the largest mu within (epsilon, delta). Otherwise mu = epsilon, as the
            paper has it.
        """
        if measure not in get_args(Measure):
            raise InvalidInput(f"measure must be 'pure' or 'gaussian', got {measure!r}.")
        if analysis not in get_args(Analysis):
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
        return GaussianCost(_rounded_down(decimal(budget.epsilon) / queries))
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

    def share(self, releases: int) -> Cost:
        """Return the largest cost of which the budget pays that many, rounded down; exact up to 70 million releases."""
        count = _checked_count(releases, "The number of releases")
        if not 1 <= count <= LIMIT:
            raise InvalidInput(f"The number of releases must be between 1 and {LIMIT}, got {releases!r}.")
        return cost_of(self.total.measure, Fraction(LIMIT // count, LIMIT) * self.total.amount, up=False)

    def affordable(self, cost: Cost) -> int:
        """Return how many releases of a cost the total pays for; never one too many by rounding."""
        return LIMIT // max(self.units(cost), 1)

    def spent(self, units: int) -> Cost:
        """Return the cost of spent units, rounded up."""
        return cost_of(self.total.measure, Fraction(units, LIMIT) * self.total.amount)

    def remaining(self, units: int) -> Cost:
        """Return the cost that is left, rounded down and never negative."""
        left = Fraction(max(LIMIT - units, 0), LIMIT)
        return cost_of(self.total.measure, left * self.total.amount, up=False)

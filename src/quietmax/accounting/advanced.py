"""Advanced composition of pure steps: fewer epsilon for many queries, at the price of a delta.

An option beside the two currencies. k releases, each epsilon-private, are together (epsilon', delta)-private
with

    epsilon' = min(k*epsilon, k*epsilon*tanh(epsilon/2) + epsilon*sqrt(2*k*ln(1/delta)))

(Kairouz, Oh, Viswanath 2015, theorem 3.4, without its third term). Each step's privacy loss lies in
[-epsilon, epsilon] with mean at most epsilon*tanh(epsilon/2), so Hoeffding's inequality bounds the
probability of a larger sum by delta. The theorem is for costs fixed in advance; with costs chosen adaptively
use one of the two currencies.
"""

from __future__ import annotations

import math

from scipy.optimize import brentq

from quietmax.accounting.cost import checked_count
from quietmax.accounting.decimals import as_number
from quietmax.errors import InvalidInput

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

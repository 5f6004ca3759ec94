"""What a selection costs in each currency, and which epsilon a given cost pays for."""

from __future__ import annotations

from typing import Literal

from scipy.special import log_ndtr

from quietmax.accounting import Cost, PureCost, bounded_range_as_gaussian, pure_as_gaussian

Selection = Literal["exponential", "permute-and-flip"]


def selection_epsilon(cost: Cost, selection: Selection) -> float:
    """The largest epsilon that ``cost`` pays for.

    Pure: epsilon itself. Gaussian: the inverse of the conversions of THEORY section 3, rounded down: the exponential
    mechanism has bounded range, permute-and-flip is only epsilon-private.

    >>> from quietmax.accounting import GaussianCost
    >>> round(selection_epsilon(GaussianCost(0.5), "exponential") / 0.5, 2)
    1.6
    """
    if isinstance(cost, PureCost):
        return cost.epsilon
    log_odds = float(log_ndtr(cost.mu / 2) - log_ndtr(-cost.mu / 2))
    convert = bounded_range_as_gaussian if selection == "exponential" else pure_as_gaussian
    epsilon = 2 * log_odds if selection == "exponential" else log_odds
    while convert(epsilon) > cost.mu:
        epsilon *= 1 - 2**-50
    return epsilon

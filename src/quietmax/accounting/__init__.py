"""Privacy accounting: costs in two measures that compose exactly, budgets, conversions and guarantees."""

from quietmax.accounting.costs import (
    Budget,
    Cost,
    GaussianCost,
    PureCost,
    compose,
    delta_of,
    epsilon_of,
    mu_of,
    per_query,
    pure_as_gaussian,
)
from quietmax.accounting.guarantee import Guarantee

__all__ = [
    "Budget",
    "Cost",
    "GaussianCost",
    "Guarantee",
    "PureCost",
    "compose",
    "delta_of",
    "epsilon_of",
    "mu_of",
    "per_query",
    "pure_as_gaussian",
]

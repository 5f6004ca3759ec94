"""What it costs: two currencies that compose exactly, budgets, and the guarantee claimed of a release."""

from quietmax.accounting.advanced import advanced_composition, advanced_composition_per_query
from quietmax.accounting.budget import Budget, Reading, per_query, queries_affordable, total_needed
from quietmax.accounting.cost import Cost, Currency, GaussianCost, PureCost, compose, cost_from_json
from quietmax.accounting.gaussian import (
    bounded_range_as_gaussian,
    delta_of,
    epsilon_of,
    mu_of,
    pure_as_gaussian,
)
from quietmax.accounting.guarantee import Definition, Guarantee, Status
from quietmax.accounting.meter import LIMIT, Meter

__all__ = [
    "LIMIT",
    "Budget",
    "Cost",
    "Currency",
    "Definition",
    "GaussianCost",
    "Guarantee",
    "Meter",
    "PureCost",
    "Reading",
    "Status",
    "advanced_composition",
    "advanced_composition_per_query",
    "bounded_range_as_gaussian",
    "compose",
    "cost_from_json",
    "delta_of",
    "epsilon_of",
    "mu_of",
    "per_query",
    "pure_as_gaussian",
    "queries_affordable",
    "total_needed",
]

"""Privacy accounting: costs in two measures that compose exactly, budgets, conversions and guarantees."""

from quietmax.accounting.budget import (
    LIMIT,
    Analysis,
    Budget,
    Meter,
    per_query,
    queries_affordable,
    total_needed,
)
from quietmax.accounting.conversions import (
    bounded_range_as_gaussian,
    delta_of,
    epsilon_of,
    mu_of,
    pure_as_gaussian,
)
from quietmax.accounting.costs import (
    Cost,
    GaussianCost,
    Measure,
    PureCost,
    advanced_composition,
    advanced_composition_per_query,
    compose,
    cost_from_json,
)
from quietmax.accounting.guarantee import Definition, Guarantee, Status

__all__ = [
    "LIMIT",
    "Analysis",
    "Budget",
    "Cost",
    "Definition",
    "GaussianCost",
    "Guarantee",
    "Measure",
    "Meter",
    "PureCost",
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

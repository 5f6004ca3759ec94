"""The guarantees of a head: computed from the public facts of its training alone, after training and when opened."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from quietmax.accounting.costs import GaussianCost, root_rounded_up
from quietmax.accounting.guarantee import Guarantee
from quietmax.data.encoding import Encoding
from quietmax.errors import InvalidInput
from quietmax.estimators.head.exact_sums import GRID
from quietmax.estimators.head.solver import (
    MeanCrossEntropy,
    Tilted,
    certifiable_tolerance,
    max_solution_norm,
    output_sensitivity,
)
from quietmax.estimators.head.training import (
    LINEAR,
    STEPS_ROUNDED,
    TILTED_TOLERANCE,
    gradient_sensitivity,
    output_plan,
)
from quietmax.estimators.training_set import code_before, data_assumptions, data_conditions
from quietmax.estimators.validation import (
    OWN_MAP,
    SEEDED_WEIGHTS,
    SETTINGS_PUBLIC,
    Condition,
    check_choice,
    map_assumptions,
    weakened,
)
from quietmax.noise.sources import EXACT
from quietmax.sensitivity.certified import Sensitivity

Facts = Mapping[str, Any]
"""The public facts of a training by name: the ``parameters`` of its guarantee."""


def weights_guarantee(facts: Facts, *, own_map: bool, encoding: Encoding | None = None) -> Guarantee:
    """Return the guarantee of released weights."""
    because = f"Gaussian mechanism on a certified minimiser. {weight_sensitivity(facts).because}"
    if facts["training_method"] == "gradient":
        because = "Gaussian mechanisms on exact clipped gradient sums compose to mu (THEORY 3.1)."
    parts = (facts["mu_size"], facts["mu_centring"], facts.get("mu_moments"))
    first = [GaussianCost(mu).amount for mu in parts if mu is not None]
    guarantee = Guarantee.of(
        GaussianCost(root_rounded_up(sum(first, _training_amount(facts)))),
        status="proven",
        because=because,
        parameters=facts,
        assumptions=_assumptions(facts, encoding),
        unit=facts.get("unit", "record"),
    )
    seeded = () if facts["noise_source"] == EXACT.describe() else (SEEDED_WEIGHTS,)
    return weakened(guarantee, *_conditions(facts, own_map, encoding), *seeded)


def _training_amount(facts: Facts) -> Fraction:
    """Return mu^2 of all releases of the training itself."""
    whole = GaussianCost(facts["mu_training"]).amount
    if facts["training_method"] != "gradient":
        return whole
    if "schedule" not in facts:  # A model made before the learning rate fell: the same noise in all steps.
        steps = facts["steps"]
        if not (isinstance(steps, int) and steps >= 1):
            raise InvalidInput(f"steps must be an integer of at least 1, got {steps!r}.")
        return steps * GaussianCost(facts["mu_training"] / math.sqrt(steps)).amount
    check_choice("schedule", facts["schedule"], (LINEAR,))
    return whole * STEPS_ROUNDED


def query_guarantee(
    answers: Guarantee, facts: Facts, *, own_map: bool, encoding: Encoding | None = None
) -> Guarantee:
    """Return the guarantee of all answers from weights that are not released."""
    guarantee = Guarantee.of(
        answers.cost,
        status=answers.status,
        because=answers.because,
        parameters={**answers.parameters, **facts},
        assumptions=(*answers.assumptions, *_assumptions(facts, encoding)),
        unit=facts.get("unit", "record"),
    )
    return weakened(guarantee, *_conditions(facts, own_map, encoding))


def _assumptions(facts: Facts, encoding: Encoding | None) -> tuple[str, ...]:
    """Return what every guarantee of a head assumes."""
    data = data_assumptions(facts.get("unit", "record"), encoding)
    return (SETTINGS_PUBLIC, *data, *map_assumptions(facts["features"]))


def _conditions(facts: Facts, own_map: bool, encoding: Encoding | None) -> tuple[Condition, ...]:
    """Return the conditions of user code and of what was read off the private records."""
    data = data_conditions(
        classes_declared=facts["classes_declared"] is True,
        encoding=encoding,
        code_before=code_before(facts),
    )
    return (OWN_MAP, *data) if own_map else data


def weight_sensitivity(facts: Facts) -> Sensitivity:
    """Return how far one record moves what is released: a gradient sum, or the minimiser of the output method."""
    if facts["training_method"] == "gradient":
        # Heads of earlier versions have no fact `grid`; they could not have more than 2^22 records.
        grid = facts.get("grid", GRID)
        return gradient_sensitivity(facts["max_grad_norm"], facts["classes"], facts["dimension"], grid)
    return output_sensitivity(_objective(facts), facts["classes"], facts["tolerance"])


def max_weight_norm(facts: Facts) -> float:
    """Return a public bound on the length of the minimiser of the output method."""
    return max_solution_norm(_objective(facts), facts["classes"], float(facts["tolerance"]))


def least_tolerance(facts: Facts) -> float:
    """Return the tolerance of the output method with these facts, which float64 can certify."""
    wanted = TILTED_TOLERANCE
    if facts["loss"] != "convexified":
        wanted = output_plan(facts["declared_size"], 1.0, regularisation=facts["regularisation"]).tolerance
    repeated = facts.get("unit", "record") == "person"
    return certifiable_tolerance(
        _objective(facts), facts["dimension"], facts["classes"], wanted, repeated=repeated
    )


def _objective(facts: Facts) -> MeanCrossEntropy | Tilted:
    """Return the objective that was minimised."""
    if facts["loss"] == "convexified":
        return Tilted(facts["alpha"], facts["mass"], facts["regularisation"])
    return MeanCrossEntropy(facts["declared_size"], facts["regularisation"])

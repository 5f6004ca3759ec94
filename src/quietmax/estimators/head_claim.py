"""What is claimed of a private head, computed from the public facts of its training and from nothing else.

`fit` and the opening of a model folder both call this, so a folder cannot claim what its facts do not support. The
facts are the ``parameters`` of the guarantee: route, release, loss, sizes, settings, the mu of each release and the
noise source.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quietmax.accounting import GaussianCost, Guarantee
from quietmax.accounting.decimals import root_rounded_up
from quietmax.estimators import conditions
from quietmax.estimators.conditions import SETTINGS_PUBLIC
from quietmax.estimators.head_solver import MeanCrossEntropy, Tilted
from quietmax.estimators.head_table import GRID
from quietmax.estimators.head_training import Allowance
from quietmax.noise import EXACT
from quietmax.sensitivity import Sensitivity, certified

Facts = Mapping[str, Any]


def weight_sensitivity(facts: Facts) -> Sensitivity:
    """How far one record moves what is released: a gradient sum, or the minimiser of the output route."""
    if facts["route"] == "gradient":
        coordinates = facts["classes"] * facts["dimension"]
        return certified.head_gradient(facts["clip"], coordinates=coordinates, grid=GRID)
    return output_sensitivity(_objective(facts), facts["classes"], facts["tolerance"])


def output_sensitivity(objective: MeanCrossEntropy | Tilted, classes: int, tolerance: float) -> Sensitivity:
    """How far one record moves a minimiser that was found up to the tolerance."""
    if isinstance(objective, Tilted):
        return certified.head_tilted(
            alpha=objective.alpha,
            mass=objective.mass,
            regularisation=objective.regularisation,
            classes=classes,
            tolerance=tolerance,
        )
    return certified.head_output(
        regularisation=objective.regularisation, declared_size=objective.size, tolerance=tolerance
    )


def longest_weights(facts: Facts) -> float:
    """The public bound on the length of a minimiser that `head_solver.minimise` states."""
    objective = _objective(facts)
    longest = objective.longest(facts["classes"]) + float(facts["tolerance"]) / objective.regularisation
    return longest * (1 + 2.0**-40)


def weights_claim(facts: Facts, *, own_map: bool) -> Guarantee:
    """What is claimed of released weights."""
    releases, because = 1, f"Gaussian mechanism on a certified minimiser. {weight_sensitivity(facts).because}"
    if facts["route"] == "gradient":
        releases = facts["steps"]
        because = "Gaussian mechanisms on exact clipped gradient sums compose to mu (THEORY 3.1)."
    allowance = Allowance(facts["mu_size"], facts["mu_centring"], facts["mu_training"])
    before = [GaussianCost(mu).amount for mu in (allowance.size, allowance.centre) if mu is not None]
    squared = sum(before, releases * GaussianCost(allowance.per_step(releases)).amount)
    guarantee = _under_conditions(
        Guarantee.of(
            GaussianCost(root_rounded_up(squared)),
            status="proven",
            because=because,
            parameters=facts,
            assumptions=(SETTINGS_PUBLIC, *conditions.map_assumptions(facts["features"])),
        ),
        facts,
        own_map,
    )
    if facts["noise_source"] == EXACT.describe():
        return guarantee
    return guarantee.weakened(
        "conditional",
        f"{guarantee.because} The noise is seeded and in floating point, for experiments only (THEORY 3.5).",
        ("Nobody knows the seed, and nobody looks at the low digits of the weights.",),
    )


def query_claim(answers: Guarantee, facts: Facts, *, own_map: bool) -> Guarantee:
    """What is claimed of answers from weights that are not released; ``answers`` is what the predictor claims."""
    return _under_conditions(
        Guarantee.of(
            answers.cost,
            status=answers.status,
            because=answers.because,
            parameters={**answers.parameters, **facts},
            assumptions=(
                *answers.assumptions,
                SETTINGS_PUBLIC,
                *conditions.map_assumptions(facts["features"]),
            ),
        ),
        facts,
        own_map,
    )


def _objective(facts: Facts) -> MeanCrossEntropy | Tilted:
    if facts["loss"] == "convexified":
        return Tilted(facts["alpha"], facts["mass"], facts["regularisation"])
    return MeanCrossEntropy(facts["declared_size"], facts["regularisation"])


def _under_conditions(guarantee: Guarantee, facts: Facts, own_map: bool) -> Guarantee:
    """Conditional if it rests on the user's own code or on classes read off the labels."""
    if own_map:
        guarantee = conditions.weakened(guarantee, conditions.MAP)
    return (
        guarantee if facts["classes_declared"] is True else conditions.weakened(guarantee, conditions.CLASSES)
    )

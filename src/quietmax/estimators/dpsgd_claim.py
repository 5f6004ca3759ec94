"""What is claimed of a network trained by DP-SGD, and on which assumptions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quietmax.accounting import Guarantee
from quietmax.accounting.guarantee import Status
from quietmax.estimators import conditions, dpsgd_module
from quietmax.estimators.conditions import SETTINGS_PUBLIC, runs_own_code
from quietmax.estimators.dpsgd_plan import Plan
from quietmax.models.features import FeatureMap, described

_NAMES = {
    "pld": "the privacy loss distribution",
    "rdp": "Renyi divergences",
    "zcdp": "concentrated privacy",
    "ac": "advanced composition",
    "nc": "adding up epsilon and delta",
}
NUMERICAL = {
    "pld": "SciPy's Fourier transform and NumPy's elementary functions have rounding errors no larger than those that "
    "quietmax.accounting.loss_distribution allows for.",
    "rdp": "dp-accounting computes the Renyi divergences of one step to within 1e-12.",
}
PLACES = (
    "Removing a record leaves the other records in their batches: epochs are counted as one Gaussian mechanism each, "
    "although a shuffled order moves them."
)
POISSON = "Shuffled batches protect as well as Poisson samples of the same expected size, as which they are counted."


def claim(
    plan: Plan,
    *,
    exact: bool,
    own_module: bool,
    size_declared: bool,
    classes_declared: bool,
    features: object = None,
    parameters: Mapping[str, Any] | None = None,
) -> Guarantee:
    """Return the guarantee of a run by this plan.

    Full batches with the proven reading are exactly sqrt(steps)/multiplier-Gaussian private; everything else is the
    one point (epsilon, delta) that the accountant was asked for.
    """
    assumptions = [SETTINGS_PUBLIC, *conditions.map_assumptions(_described(features))]
    status: Status = "proven"
    steps, rate = plan.settings.steps, plan.settings.sampling_rate
    gaussian = plan.reading == "proven" and rate == 1
    if gaussian:
        because = (
            f"{steps} Gaussian mechanisms on clipped gradient sums of all records (DP-SGD page, section 2)."
        )
    elif plan.reading == "proven":
        because = (
            f"{steps} Gaussian mechanisms on Poisson samples of clipped gradients, composed by "
            f"{_NAMES[plan.accountant]} (DP-SGD page, section 2)."
        )
        assumptions += [NUMERICAL[plan.accountant]] if plan.accountant in NUMERICAL else []
    else:
        status = "conditional"
        assumptions.append(POISSON if plan.accountant == "rdp" else PLACES)
        because = (
            f"The noise is what the paper's program computes by {_NAMES[plan.accountant]}, for batches other than "
            "those it shuffles (DP-SGD page, section 3)."
        )
    if own_module:
        status = "conditional"
        assumptions += dpsgd_module.ASSUMPTIONS
        because += " The module is the user's own."
    met = ((conditions.MAP, runs_own_code(features)), (conditions.CLASSES, not classes_declared))
    for condition in [each for each, applies in (*met, (conditions.SIZE, not size_declared)) if applies]:
        status = "conditional"
        assumptions += condition.assumptions
        because += f" {condition.because}"
    if not exact:
        status = "conditional"
        assumptions.append("Nobody knows the seed, and nobody looks at the low digits of the weights.")
        because += " The noise is seeded and in floating point, for experiments only (THEORY 3.5)."
    source = {"source": "exact" if exact else "seeded", "exact": exact}
    described = {
        "estimator": "dpsgd",
        **plan.to_json(),
        "features": _described(features),
        **(parameters or {}),
        "noise_source": source,
    }
    return Guarantee(
        definition="gaussian" if gaussian else "approximate",
        epsilon=None if gaussian else plan.epsilon,
        delta=None if gaussian else plan.delta,
        mu=math.sqrt(steps) / plan.noise_multiplier * (1 + 2.0**-50) if gaussian else None,
        status=status,
        because=because,
        parameters=described,
        assumptions=tuple(assumptions),
    )


def _described(features: object) -> Any:
    if features is None:
        return None
    if isinstance(features, FeatureMap):
        return described(features)
    return {"kind": type(features).__name__}

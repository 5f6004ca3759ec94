"""Mechanisms and estimators with a share of the noise that a claim requires, to test an audit of the claim.

Nothing here weakens a release: half of the noise that a claim requires is that of an honest release with a larger
budget, at the same settings. Its own guarantee states the larger cost, and only the audit holds it against the smaller
claim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np
from sklearn.base import clone

from quietmax.accounting.costs import Cost, GaussianCost, PureCost, epsilon_of, mu_of
from quietmax.audit.bounds import SampledSteps
from quietmax.errors import InvalidInput
from quietmax.estimators.dpsgd.estimator import DPSGD
from quietmax.estimators.dpsgd.training import DPSGDSettings
from quietmax.estimators.head.estimator import PrivateHead
from quietmax.estimators.head.weights import GradientPlan, HeadSettings
from quietmax.estimators.teachers import Teachers
from quietmax.mechanisms.algorithm1 import Algorithm1
from quietmax.mechanisms.base import Mechanism, NoisyMax, ProvenMechanism, selection_epsilon

Estimator = TypeVar("Estimator", PrivateHead, Teachers, DPSGD)


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise InvalidInput(f"noise_share must be above 0 and at most 1, got {share}.")


def _cost_with_share(cost: Cost, share: float) -> Cost:
    """Return the cost whose noise is a share of that of another cost: the scale of noise is the inverse of a cost."""
    _check_share(share)
    return PureCost(cost.epsilon / share) if isinstance(cost, PureCost) else GaussianCost(cost.mu / share)


def mechanism_with_share(mechanism: Mechanism, share: float) -> Mechanism:
    """Return a prepared mechanism with the noise of a larger cost; its guarantee states that cost.

    Parameters
    ----------
    mechanism : Mechanism
        A prepared mechanism of this library.
    share : float
        The share of its noise.

    Returns
    -------
    Mechanism
        The mechanism with that share of the noise.

    Examples
    --------
    >>> from quietmax.sensitivity import ScoreBounds, Sensitivity
    >>> one = Sensitivity(1.0, "certified", "One record changes one vote.")
    >>> votes = NoisyMax(bounds=ScoreBounds(one, one), per_query=PureCost(1.0))
    >>> mechanism_with_share(votes, 0.5).guarantee(2).epsilon
    2.0
    """
    _check_share(share)
    if isinstance(mechanism, Algorithm1) and mechanism.epsilon_neuron is not None:
        return replace(mechanism, epsilon_neuron=mechanism.epsilon_neuron / share)
    if not isinstance(mechanism, ProvenMechanism) or mechanism.per_query is None:
        raise InvalidInput(f"The noise of a {type(mechanism).__name__} cannot be scaled.")
    if isinstance(mechanism, NoisyMax) and mechanism.method != "gaussian":
        # A choice that is counted in mu has an epsilon of its own, which its noise is for.
        epsilon = selection_epsilon(mechanism.per_query, mechanism.method)
        return replace(mechanism, count_in=None, per_query=PureCost(epsilon / share))
    scaled: Mechanism = replace(mechanism, per_query=_cost_with_share(mechanism.per_query, share))  # type: ignore[type-var]
    return scaled


def estimator_with_share(fitted: Estimator, share: float) -> Estimator:
    """Return an estimator like a fitted one, not fitted, whose larger budget has a share of its noise.

    All other settings are those that the fitted one has computed from its budget.

    Parameters
    ----------
    fitted : PrivateHead, Teachers or DPSGD
        A fitted estimator.
    share : float
        The share of its noise.

    Returns
    -------
    PrivateHead, Teachers or DPSGD
        The estimator. Its ``guarantee_`` will state the larger budget.
    """
    _check_share(share)
    if isinstance(fitted, PrivateHead):
        settings = _head_settings(fitted, share)
    else:
        own = _teacher_settings if isinstance(fitted, Teachers) else _dpsgd_settings
        settings = own(fitted, share)
    changed: Estimator = clone(fitted)
    return changed.set_params(**settings)  # type: ignore[no-any-return]


def _head_settings(fitted: PrivateHead, share: float) -> dict[str, object]:
    plan, chosen = fitted.plan_, fitted.settings or HeadSettings()
    settings: dict[str, object] = {"features": fitted.feature_map_}
    if fitted.release == "query":
        own = replace(chosen, regularisation=plan.regularisation)  # type: ignore[union-attr]
        return {**settings, "settings": own, "epsilon": fitted.epsilon / share}
    mu = mu_of(fitted.epsilon, fitted.delta) if fitted.mu is None else float(fitted.mu)
    moments = fitted.guarantee_.parameters["mu_moments"]
    kept = (
        ("steps", "learning_rate", "max_grad_norm") if isinstance(plan, GradientPlan) else ("regularisation",)
    )
    own = replace(
        chosen,
        second_moments=0.0 if moments is None else (moments / mu) ** 2,
        **{name: getattr(plan, name) for name in kept},
    )
    return settings | {"mu": mu / share, "settings": own}


def _teacher_settings(fitted: Teachers, share: float) -> dict[str, object]:
    mechanism = fitted.predictor_.mechanism
    settings: dict[str, object] = {"teachers": len(fitted.ensemble_.silent)}
    if isinstance(mechanism, NoisyMax):
        settings["method"] = mechanism.method
    if mechanism.measure == "pure":
        return {**settings, "epsilon": fitted.epsilon / share}
    return {**settings, "epsilon": epsilon_of(mu_of(fitted.epsilon, fitted.delta) / share, fitted.delta)}


def _dpsgd_settings(fitted: DPSGD, share: float) -> dict[str, object]:
    plan = fitted.plan_
    if plan.analysis != "proven" or plan.accountant != "pld":
        raise InvalidInput(
            "A share of the noise of DP-SGD requires analysis='proven' and accountant='pld', got "
            f"{plan.analysis!r} and {plan.accountant!r}."
        )
    multiplier = share * plan.noise_multiplier
    if plan.settings.sampling_rate == 1.0:
        epsilon = epsilon_of(float(np.sqrt(plan.settings.steps)) / multiplier, plan.delta)
    else:
        epsilon = SampledSteps(multiplier, plan.schedule)._epsilon(plan.delta)
    kept = (
        *("hidden", "activation", "sampling_rate", "steps", "centring_steps"),
        *("max_grad_norm", "learning_rate", "decay", "optimizer", "l2"),
    )
    chosen = fitted.settings or DPSGDSettings()
    own = replace(chosen, **{name: getattr(plan.settings, name) for name in kept})
    return {"settings": own, "epsilon": epsilon, "delta": plan.delta, "features": fitted.feature_map_}

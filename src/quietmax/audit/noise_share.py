"""Mechanisms and estimators with a share of the noise, to test an audit: would it notice that half is missing?

Nothing here weakens a release. No mechanism or estimator has a setting for less noise than its budget requires. The
noise that is half of what a claim requires is that of an honest release with a larger budget, at the same settings.
That is what these functions return: its own guarantee states the larger cost, and only the audit holds it against the
smaller claim. So no model can be served or stored that has less noise than its guarantee states.
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
from quietmax.estimators.head.estimator import PrivateHead
from quietmax.estimators.head.training import GradientPlan
from quietmax.estimators.teachers import Teachers
from quietmax.mechanisms.algorithm1 import Algorithm1
from quietmax.mechanisms.base import Mechanism, NoisyMax, ProvenMechanism, selection_epsilon

Estimator = TypeVar("Estimator", PrivateHead, Teachers, DPSGD)


def check_noise_share(share: float) -> None:
    """Raise `InvalidInput` unless ``share`` is above 0 and at most 1."""
    if not 0 < share <= 1:
        raise InvalidInput(f"noise_share must be above 0 and at most 1, got {share}.")


def cost_with_share(cost: Cost, share: float) -> Cost:
    """Return the cost whose noise is a share of that of another cost: the scale of noise is the inverse of a cost."""
    check_noise_share(share)
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
    check_noise_share(share)
    if isinstance(mechanism, Algorithm1) and mechanism.epsilon_neuron is not None:
        return replace(mechanism, epsilon_neuron=mechanism.epsilon_neuron / share)
    if not isinstance(mechanism, ProvenMechanism) or mechanism.per_query is None:
        raise InvalidInput(f"The noise of a {type(mechanism).__name__} cannot be scaled.")
    if isinstance(mechanism, NoisyMax) and mechanism.method != "gaussian":
        # A choice that is counted in mu has an epsilon of its own, which its noise is for.
        epsilon = selection_epsilon(mechanism.per_query, mechanism.method)
        return replace(mechanism, count_in=None, per_query=PureCost(epsilon / share))
    scaled: Mechanism = replace(mechanism, per_query=cost_with_share(mechanism.per_query, share))  # type: ignore[type-var]
    return scaled


def estimator_with_share(fitted: Estimator, share: float) -> Estimator:
    """Return an estimator like a fitted one, not fitted, whose larger budget has a share of its noise.

    All other settings are those that the fitted one has computed from its budget: steps, learning rate, clipping norm,
    regularisation, feature map, number of teachers.

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
    check_noise_share(share)
    changed: Estimator = clone(fitted)
    if isinstance(fitted, PrivateHead):
        return changed.set_params(**_head_settings(fitted, share))  # type: ignore[no-any-return]
    if isinstance(fitted, Teachers):
        return changed.set_params(**_teacher_settings(fitted, share))  # type: ignore[no-any-return]
    return changed.set_params(**_dpsgd_settings(fitted, share))  # type: ignore[no-any-return]


def _head_settings(fitted: PrivateHead, share: float) -> dict[str, object]:
    plan = fitted.plan_
    settings: dict[str, object] = {"features": fitted.feature_map_}
    stated = fitted.guarantee_.parameters
    if fitted.release == "query":
        return {**settings, "regularisation": plan.regularisation, "epsilon": fitted.epsilon / share}  # type: ignore[union-attr]
    mu = mu_of(fitted.epsilon, fitted.delta) if fitted.mu is None else float(fitted.mu)
    moments = stated["mu_moments"]
    settings |= {"mu": mu / share, "second_moments": 0.0 if moments is None else (moments / mu) ** 2}
    if isinstance(plan, GradientPlan):
        return {
            **settings,
            "steps": plan.steps,
            "learning_rate": plan.learning_rate,
            "max_grad_norm": plan.max_grad_norm,
        }
    return {**settings, "regularisation": plan.regularisation}


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
        epsilon = SampledSteps(multiplier, plan.schedule).epsilon(plan.delta)
    return {
        "epsilon": epsilon,
        "delta": plan.delta,
        "features": fitted.feature_map_,
        "hidden": plan.settings.hidden,
        "activation": plan.settings.activation,
        "sampling_rate": plan.settings.sampling_rate,
        "steps": plan.settings.steps,
        "centring_steps": plan.settings.centring_steps,
        "max_grad_norm": plan.settings.max_grad_norm,
        "learning_rate": plan.settings.learning_rate,
        "decay": plan.settings.decay,
        "optimizer": plan.settings.optimizer,
        "l2": plan.settings.l2,
    }

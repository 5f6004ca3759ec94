"""What a folder holds of a network trained by DP-SGD: released weights for any number of queries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from quietmax.accounting import Guarantee
from quietmax.accounting.dpsgd import loss_delta, noise_multiplier, renyi_epsilon
from quietmax.errors import InvalidInput
from quietmax.estimators import conditions, dpsgd_claim
from quietmax.estimators.dpsgd import DPSGD, PrivateNetwork
from quietmax.estimators.dpsgd_plan import Plan
from quietmax.estimators.private_model import OwnPart, PrivateModel, check_same, stated_as_declared
from quietmax.models import MLP
from quietmax.models.files import mlp_from
from quietmax.models.private_settings import PrivateSettings


def own_part(estimator: DPSGD) -> OwnPart:
    """The network, and the public numbers of its training."""
    network = estimator.model_.network
    if not isinstance(network, MLP):
        raise InvalidInput(
            "Only the built-in network can be saved; save the weights of a module of your own with torch."
        )
    description = {
        "widths": list(network.widths),
        "activation": network.activation,
        "epsilon": estimator.plan_.epsilon,
        "delta": estimator.plan_.delta,
        "declared_size": estimator.plan_.size,
    }
    return OwnPart(estimator.feature_map_, description, dict(network.parameters()))


def answerer(_: Path, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> PrivateNetwork:
    """The released network."""
    network = mlp_from(tensors, description["widths"], str(description["activation"]))
    check_same("one network", network.networks, 1)
    return PrivateNetwork(network)


def claim(model: PrivateModel, description: Mapping[str, Any]) -> Guarantee:
    """What the stored facts support, with the accountant run again; ValueError if they contradict each other."""
    stated = model.guarantee
    facts = stated.parameters
    plan = Plan(
        PrivateSettings(**{field.name: facts[field.name] for field in fields(PrivateSettings)}),
        **{name: facts[name] for name in ("noise_multiplier", "epsilon", "delta", "accountant", "reading")},
        size=facts["declared_size"],
    )
    assert isinstance(model.answerer, PrivateNetwork)
    network = model.answerer.network
    assert isinstance(network, MLP)
    check_same("estimator", facts["estimator"], "dpsgd")
    check_same("hidden", facts["hidden"], network.widths[1:-1])
    check_same("activation", facts["activation"], network.activation)
    check_same("sampling", facts["sampling"], "poisson" if plan.reading == "proven" else "shuffled")
    for name, value in (("epsilon", plan.epsilon), ("delta", plan.delta), ("declared_size", plan.size)):
        check_same(name, description[name], value)
    _check_noise(plan)
    classes_declared = stated_as_declared(stated, "classes_declared", conditions.CLASSES)
    size_declared = stated_as_declared(stated, "size_declared", conditions.SIZE)
    return dpsgd_claim.claim(
        plan,
        exact=facts["noise_source"] == {"source": "exact", "exact": True},
        own_module=False,
        size_declared=size_declared,
        classes_declared=classes_declared,
        features=model.features,
        parameters={
            "dimension": network.widths[0],
            "classes": network.classes,
            "classes_declared": classes_declared,
            "size_declared": size_declared,
        },
    )


def _check_noise(plan: Plan) -> None:
    """Raise ValueError if the noise is too little for the stated epsilon and delta, according to its accountant."""
    if not 0 < plan.noise_multiplier < math.inf:
        raise ValueError(f"its noise multiplier is {plan.noise_multiplier}")
    sigma, schedule = plan.noise_multiplier, plan.schedule
    published = plan.reading == "published"
    # One evaluation is faster than the search for the least noise, which decides if this one does not.
    if (
        plan.accountant == "pld"
        and schedule.sampling_rate < 1
        and loss_delta(sigma, plan.epsilon, schedule) <= plan.delta
    ):
        return
    if (
        plan.accountant == "rdp"
        and renyi_epsilon(sigma, plan.delta, schedule, published=published) <= plan.epsilon
    ):
        return
    needed = noise_multiplier(
        plan.epsilon, plan.delta, schedule, accountant=plan.accountant, reading=plan.reading
    )
    if sigma < needed:
        raise ValueError(
            f"its noise multiplier is {plan.noise_multiplier:g}, but its epsilon needs {needed:g}"
        )

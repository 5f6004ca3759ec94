"""What a folder holds of a private head: released weights for any number of queries, or unreleased ones to pay for.

Bounds, sensitivity and status are stored for readers; what is used is computed from the facts of the training again,
and a folder that states anything else is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quietmax.account import FileAccount
from quietmax.accounting import Budget, Guarantee, mu_of
from quietmax.estimators import head_claim, head_plan
from quietmax.estimators.head import PrivateHead
from quietmax.estimators.head_weights import HeadWeights, PrivateHeadWeights
from quietmax.estimators.private_model import (
    ACCOUNT_FILE,
    OwnPart,
    PrivateModel,
    check_parameters,
    check_same,
    stated_noise,
)
from quietmax.mechanisms import NoisyMax
from quietmax.predictor import Predictor
from quietmax.sensitivity import ScoreBounds


def own_part(head: PrivateHead) -> OwnPart:
    """The released weights, or the unreleased minimiser with its bounds."""
    minimiser: PrivateHeadWeights | None = None
    if hasattr(head, "predictor_"):
        minimiser = head.predictor_.model  # type: ignore[assignment]
    released = minimiser is None
    description = {
        "bias": head_plan.BIAS,
        "radius": head.radius_,
        "released": released,
        "bounds": None if minimiser is None else _bounds_to_json(minimiser.bounds),
        "epsilon": head.budget_.epsilon,
        "delta": head.budget_.delta if released else None,
        "queries": head.budget_.queries,
        "declared_size": int(head.size_),
    }
    weights = head.coef_ if minimiser is None else minimiser.weights
    tensors = {
        "weights": torch.from_numpy(np.array(weights)),
        "centre": torch.from_numpy(np.array(head.centre_)),
    }
    return OwnPart(head.feature_map_, description, tensors)


def answerer(
    folder: Path, description: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> HeadWeights | Predictor:
    """The released weights, or the unreleased ones behind their budget."""
    head = HeadWeights(
        tensors["weights"].numpy(),
        tensors["centre"].numpy(),
        float(description["bias"]),
        float(description["radius"]),
    )
    facts = description["guarantee"]["parameters"]
    check_same("released", description["released"], facts["release"] == "weights")
    if description["released"]:
        return head
    private = PrivateHeadWeights.certified(
        head, head_claim.weight_sensitivity(facts), longest=head_claim.longest_weights(facts)
    )
    if not np.array_equal(private.weights, head.weights):
        raise ValueError("its weights are longer than a minimiser with its settings can be")
    return Predictor(
        private,
        NoisyMax("permute-and-flip"),
        Budget(float(description["epsilon"]), 0.0, int(description["queries"])),
        account=FileAccount(folder / ACCOUNT_FILE),
    )


def claim(model: PrivateModel, description: Mapping[str, Any]) -> Guarantee:
    """What the stored facts support; ValueError if they contradict each other or the weights."""
    stated, answerer = model.guarantee, model.answerer
    facts = stated.parameters
    head = answerer.model if isinstance(answerer, Predictor) else answerer
    assert isinstance(head, HeadWeights)
    assert model.features is not None
    expected = {
        "estimator": "head",
        "classes": head.classes,
        "dimension": head.weights.shape[1],
        "features": model.features.to_json(),
        "bias": head.bias,
        "radius": head.radius,
        "size_from": "declared" if facts.get("mu_size") is None else "noisy count",
        "sensitivity": head_claim.weight_sensitivity(facts).value,
    }
    for name, value in expected.items():
        check_same(name, facts[name], value)
    check_same("declared_size", description["declared_size"], int(facts["declared_size"]))
    if (facts["route"], facts["loss"]) not in _METHODS:
        raise ValueError(f"there is no route {facts['route']!r} with loss {facts['loss']!r}")
    if facts.get("mu_centring") is None and head.centre.any():
        raise ValueError("it has a centre, but nothing was spent on releasing one")
    if isinstance(answerer, Predictor):
        assert isinstance(head, PrivateHeadWeights)
        check_same("bounds", _values(description["bounds"]), _values(_bounds_to_json(head.bounds)))
        check_same("delta", description["delta"], None)
        check_same("route", facts["route"], "output")
        answers = answerer.guarantee_with(stated_noise(stated))
        check_parameters(stated, answers)
        return head_claim.query_claim(answers, facts, own_map=False)
    claimed = head_claim.weights_claim(facts, own_map=False)
    for name in ("bounds", "queries"):
        check_same(name, description[name], None)
    check_same("mu", claimed.mu, mu_of(description["epsilon"], description["delta"]), within=1e-6)
    return claimed


_METHODS = {("gradient", "cross-entropy"), ("output", "cross-entropy"), ("output", "convexified")}


def _bounds_to_json(bounds: ScoreBounds) -> dict[str, dict[str, float | str]]:
    return {
        name: {"value": entry.value, "because": entry.because}
        for name, entry in (("one", bounds.one), ("vector", bounds.vector))
    }


def _values(bounds: Mapping[str, Mapping[str, float | str]]) -> list[float | str]:
    return [bounds[name]["value"] for name in ("one", "vector")]

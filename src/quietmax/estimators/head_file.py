"""What a folder holds of a private head: released weights for any number of queries, or unreleased ones to pay for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quietmax.account import FileAccount
from quietmax.accounting import Budget
from quietmax.estimators import head_plan
from quietmax.estimators.head import PrivateHead
from quietmax.estimators.head_weights import HeadWeights, PrivateHeadWeights
from quietmax.estimators.private_model import ACCOUNT_FILE, OwnPart
from quietmax.mechanisms import NoisyMax
from quietmax.predictor import Predictor
from quietmax.sensitivity import ScoreBounds, Sensitivity


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
    parts = (
        tensors["weights"].numpy(),
        tensors["centre"].numpy(),
        float(description["bias"]),
        float(description["radius"]),
    )
    if description["released"]:
        return HeadWeights(*parts)
    return Predictor(
        PrivateHeadWeights(*parts, _bounds_from_json(description["bounds"])),
        NoisyMax("permute-and-flip"),
        Budget(float(description["epsilon"]), 0.0, int(description["queries"])),
        account=FileAccount(folder / ACCOUNT_FILE),
    )


def _bounds_to_json(bounds: ScoreBounds) -> dict[str, dict[str, float | str]]:
    return {
        name: {"value": entry.value, "because": entry.because}
        for name, entry in (("one", bounds.one), ("vector", bounds.vector))
    }


def _bounds_from_json(values: dict[str, dict[str, float | str]]) -> ScoreBounds:
    one, vector = (
        Sensitivity(float(values[name]["value"]), "certified", str(values[name]["because"]))
        for name in ("one", "vector")
    )
    return ScoreBounds(one, vector)

"""What a folder holds of a network trained by DP-SGD: released weights for any number of queries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from quietmax.errors import InvalidInput
from quietmax.estimators.dpsgd import DPSGD, PrivateNetwork
from quietmax.estimators.private_model import OwnPart
from quietmax.models import MLP
from quietmax.models.files import mlp_from


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
    return PrivateNetwork(mlp_from(tensors, description["widths"], str(description["activation"])))

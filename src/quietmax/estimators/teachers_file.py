"""What a folder holds of teachers, asked again with an account that outlives the process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from quietmax.account import FileAccount
from quietmax.accounting import Budget
from quietmax.errors import InvalidInput
from quietmax.estimators.private_model import ACCOUNT_FILE, OwnPart
from quietmax.estimators.teachers import Crowd, Teachers
from quietmax.mechanisms import GaussianScores, Mechanism, NoisyMax
from quietmax.models import MLP
from quietmax.models.files import mlp_from
from quietmax.predictor import Predictor


def own_part(teachers: Teachers) -> OwnPart:
    """The networks, who is silent and how votes are released; the key that assigned records to shards is not stored."""
    crowd = teachers.crowd_
    if not isinstance(crowd.teachers, MLP):
        raise InvalidInput(
            "Only teachers of the built-in network can be saved; save the weights of modules of your own with torch."
        )
    mechanism, budget = teachers.predictor_.mechanism, teachers.predictor_.budget
    description = {
        "widths": list(crowd.teachers.widths),
        "activation": crowd.teachers.activation,
        "silent": [bool(each) for each in crowd.silent],
        "soft": crowd.soft,
        "method": mechanism.method if isinstance(mechanism, NoisyMax) else "gaussian probabilities",
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "queries": budget.queries,
        "declared_size": teachers.guarantee_.parameters["declared_size"],
    }
    return OwnPart(teachers.feature_map_, description, dict(crowd.teachers.parameters()))


def answerer(folder: Path, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Predictor:
    """The teachers behind their budget."""
    network = mlp_from(tensors, description["widths"], str(description["activation"]))
    silent = np.array(description["silent"])
    if silent.dtype != bool or silent.shape != (network.networks,):
        raise ValueError(f"silent must be true or false for each of {network.networks} teachers")
    crowd = Crowd(network, silent, network.classes, bool(description["soft"]))
    budget = Budget(float(description["epsilon"]), float(description["delta"]), int(description["queries"]))
    mechanism: Mechanism = (
        GaussianScores(votes=network.networks) if crowd.soft else NoisyMax(description["method"])
    )
    return Predictor(crowd, mechanism, budget, account=FileAccount(folder / ACCOUNT_FILE))

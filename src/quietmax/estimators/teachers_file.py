"""What a folder holds of teachers, asked again with an account that outlives the process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from quietmax.account import FileAccount
from quietmax.accounting import Budget, Guarantee
from quietmax.errors import InvalidInput
from quietmax.estimators import conditions, teachers
from quietmax.estimators.private_model import (
    ACCOUNT_FILE,
    OwnPart,
    PrivateModel,
    check_same,
    stated_as_declared,
    stated_noise,
)
from quietmax.estimators.teachers import Crowd, Teachers
from quietmax.mechanisms import GaussianScores, Mechanism, NoisyMax
from quietmax.models import MLP
from quietmax.models.files import mlp_from
from quietmax.predictor import Predictor


def own_part(estimator: Teachers) -> OwnPart:
    """The networks, who is silent and how votes are released; the key that assigned records to shards is not stored."""
    crowd = estimator.crowd_
    if not isinstance(crowd.teachers, MLP):
        raise InvalidInput(
            "Only teachers of the built-in network can be saved; save the weights of modules of your own with torch."
        )
    mechanism, budget = estimator.predictor_.mechanism, estimator.predictor_.budget
    description = {
        "widths": list(crowd.teachers.widths),
        "activation": crowd.teachers.activation,
        "silent": [bool(each) for each in crowd.silent],
        "soft": crowd.soft,
        "method": mechanism.method if isinstance(mechanism, NoisyMax) else "gaussian probabilities",
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "queries": budget.queries,
        "declared_size": estimator.guarantee_.parameters["declared_size"],
    }
    return OwnPart(estimator.feature_map_, description, dict(crowd.teachers.parameters()))


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


def claim(model: PrivateModel, description: Mapping[str, Any]) -> Guarantee:
    """What the stored facts support; the mechanism, its bounds and its cost are made anew when the folder is opened."""
    stated, predictor = model.guarantee, model.answerer
    assert isinstance(predictor, Predictor)
    assert isinstance(predictor.model, Crowd)
    if not isinstance(predictor.mechanism, NoisyMax):
        check_same("method", description["method"], "gaussian probabilities")
    check_same("soft", description["soft"], predictor.model.soft)
    return teachers.claim(
        predictor.guarantee_with(stated_noise(stated)),
        len(predictor.model.silent),
        description["declared_size"],
        features=model.features,
        own_modules=False,
        classes_declared=stated_as_declared(stated, "classes_declared", conditions.CLASSES),
        size_declared=stated_as_declared(stated, "size_declared", conditions.SIZE),
    )

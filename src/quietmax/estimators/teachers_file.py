"""Teachers in a model folder, and opened again with an account that outlives the process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from quietmax.account import FileAccount
from quietmax.accounting import Budget, Guarantee
from quietmax.data import Encoding
from quietmax.errors import DataUnavailable, InvalidInput
from quietmax.estimators.private_model import ACCOUNT_FILE, PrivateModel, plain_label
from quietmax.estimators.teachers import Crowd, Teachers
from quietmax.mechanisms import GaussianScores, Mechanism, NoisyMax
from quietmax.models import MLP
from quietmax.models.features import FeatureMap, feature_map_from_json
from quietmax.models.files import read_folder, write_folder
from quietmax.predictor import Predictor

KIND = "teachers"


def save_teachers(
    teachers: Teachers,
    folder: str | Path,
    *,
    dataset: str,
    encoding: Encoding | None = None,
    guarantee: Guarantee | None = None,
    overwrite: bool = False,
) -> Path:
    """Write fitted teachers; the key that assigned records to shards is not stored.

    The file lets its holder ask without paying: like the records, it stays with the owner.
    """
    crowd = teachers.crowd_
    if not isinstance(crowd.teachers, MLP):
        raise InvalidInput(
            "Only teachers of the built-in network can be saved; save the weights of modules of your own with torch."
        )
    if not (teachers.features is None or isinstance(teachers.features, FeatureMap)):
        raise InvalidInput(
            "Teachers with a feature map that is not one of quietmax.models.features cannot be saved; use one of "
            "those, or apply yours to the records before."
        )
    mechanism = teachers.predictor_.mechanism
    description = {
        "kind": KIND,
        "dataset": dataset,
        "encoding": None if encoding is None else json.loads(encoding.to_json()),
        "features": None if teachers.features is None else teachers.features.to_json(),
        "inputs": teachers.n_features_in_,
        "widths": list(crowd.teachers.widths),
        "activation": crowd.teachers.activation,
        "silent": [bool(each) for each in crowd.silent],
        "soft": crowd.soft,
        "classes": [plain_label(label) for label in teachers.classes_],
        "method": mechanism.method if isinstance(mechanism, NoisyMax) else "gaussian probabilities",
        "epsilon": teachers.epsilon,
        "delta": teachers.delta,
        "queries": teachers.queries,
        "declared_size": teachers.guarantee_.parameters["declared_size"],
        "guarantee": (guarantee or teachers.guarantee_).to_json(),
    }
    return write_folder(folder, description, dict(crowd.teachers.parameters()), overwrite=overwrite)


def open_teachers(folder: str | Path) -> PrivateModel:
    """Open saved teachers; what was spent is read from and written to the folder's account."""
    description, tensors = read_folder(folder, KIND)
    try:
        widths = tuple(int(width) for width in description["widths"])
        layers = range(len(widths) - 1)
        network = MLP(
            widths,
            description["activation"],
            tuple(tensors[f"kernel.{depth}"] for depth in layers),
            tuple(tensors[f"bias.{depth}"] for depth in layers),
        )
        crowd = Crowd(
            network, np.array(description["silent"], dtype=bool), widths[-1], bool(description["soft"])
        )
        budget = Budget(
            float(description["epsilon"]), float(description["delta"]), int(description["queries"])
        )
        mechanism: Mechanism = (
            GaussianScores(votes=network.networks) if crowd.soft else NoisyMax(description["method"])
        )
        encoding, features = description["encoding"], description["features"]
        return PrivateModel(
            kind=KIND,
            inputs=int(description["inputs"]),
            classes=tuple(str(label) for label in description["classes"]),
            guarantee=Guarantee.from_json(description["guarantee"]),
            encoding=None if encoding is None else Encoding.from_json(json.dumps(encoding)),
            features=None if features is None else feature_map_from_json(features),
            answerer=Predictor(crowd, mechanism, budget, account=FileAccount(Path(folder) / ACCOUNT_FILE)),
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise DataUnavailable(
            f"The teachers in {folder} are damaged ({problem}); train them again or restore a copy."
        ) from problem

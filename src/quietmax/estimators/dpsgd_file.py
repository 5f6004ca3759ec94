"""A network trained by DP-SGD in a model folder: released weights for any number of queries."""

from __future__ import annotations

import json
from pathlib import Path

from quietmax.accounting import Guarantee
from quietmax.data import Encoding
from quietmax.errors import DataUnavailable, InvalidInput
from quietmax.estimators.dpsgd import DPSGD, PrivateNetwork
from quietmax.estimators.private_model import PrivateModel, plain_label
from quietmax.models import MLP
from quietmax.models.features import FeatureMap, feature_map_from_json
from quietmax.models.files import read_folder, write_folder

KIND = "dpsgd"


def save_dpsgd(
    estimator: DPSGD,
    folder: str | Path,
    *,
    dataset: str,
    encoding: Encoding | None = None,
    guarantee: Guarantee | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a fitted estimator; the folder may be published, as its guarantee says."""
    network = estimator.model_.network
    if not isinstance(network, MLP):
        raise InvalidInput(
            "Only the built-in network can be saved; save the weights of a module of your own with torch."
        )
    if not (estimator.features is None or isinstance(estimator.features, FeatureMap)):
        raise InvalidInput(
            "A feature map that is not one of quietmax.models.features cannot be saved; use one of those, or "
            "apply yours to the records before."
        )
    description = {
        "kind": KIND,
        "dataset": dataset,
        "encoding": None if encoding is None else json.loads(encoding.to_json()),
        "features": None if estimator.features is None else estimator.features.to_json(),
        "inputs": estimator.n_features_in_,
        "widths": list(network.widths),
        "activation": network.activation,
        "classes": [plain_label(label) for label in estimator.classes_],
        "epsilon": estimator.plan_.epsilon,
        "delta": estimator.plan_.delta,
        "declared_size": estimator.plan_.size,
        "guarantee": (guarantee or estimator.guarantee_).to_json(),
    }
    return write_folder(folder, description, dict(network.parameters()), overwrite=overwrite)


def open_dpsgd(folder: str | Path) -> PrivateModel:
    """Open a saved network."""
    description, tensors = read_folder(folder, KIND)
    try:
        widths = tuple(int(width) for width in description["widths"])
        layers = range(len(widths) - 1)
        network = MLP(
            widths,
            str(description["activation"]),
            tuple(tensors[f"kernel.{depth}"] for depth in layers),
            tuple(tensors[f"bias.{depth}"] for depth in layers),
        )
        encoding, features = description["encoding"], description["features"]
        return PrivateModel(
            kind=KIND,
            inputs=int(description["inputs"]),
            classes=tuple(str(label) for label in description["classes"]),
            guarantee=Guarantee.from_json(description["guarantee"]),
            encoding=None if encoding is None else Encoding.from_json(json.dumps(encoding)),
            features=None if features is None else feature_map_from_json(features),
            answerer=PrivateNetwork(network),
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise DataUnavailable(
            f"The network in {folder} is damaged ({problem}); train it again or restore a copy."
        ) from problem

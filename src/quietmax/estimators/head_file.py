"""A private head in a model folder: released weights for any number of queries, or unreleased ones with an account."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from quietmax.account import FileAccount
from quietmax.accounting import Budget, Guarantee
from quietmax.data import Encoding
from quietmax.errors import DataUnavailable
from quietmax.estimators import head_plan
from quietmax.estimators.head import PrivateHead
from quietmax.estimators.head_weights import HeadWeights, PrivateHeadWeights
from quietmax.estimators.private_model import ACCOUNT_FILE, PrivateModel, plain_label
from quietmax.mechanisms import NoisyMax
from quietmax.models.features import feature_map_from_json
from quietmax.models.files import read_folder, write_folder
from quietmax.predictor import Predictor
from quietmax.sensitivity import ScoreBounds, Sensitivity

KIND = "head"


def save_head(
    head: PrivateHead,
    folder: str | Path,
    *,
    dataset: str,
    encoding: Encoding | None = None,
    guarantee: Guarantee | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a fitted head.

    With released weights the folder may be published. With ``release="query"`` it holds the unreleased minimiser and
    stays with the owner, like the records.
    """
    released = head.release == "weights"
    answerer: PrivateHeadWeights | None = None if released else head.predictor_.model  # type: ignore[assignment]
    description = {
        "kind": KIND,
        "dataset": dataset,
        "encoding": None if encoding is None else json.loads(encoding.to_json()),
        "features": head.feature_map_.to_json(),
        "inputs": head.n_features_in_,
        "classes": [plain_label(label) for label in head.classes_],
        "bias": head_plan.BIAS,
        "radius": float(head.radius),
        "released": released,
        "bounds": None if answerer is None else _bounds_to_json(answerer.bounds),
        "epsilon": head.epsilon,
        "delta": head.delta if released else None,
        "queries": None if released else head.queries,
        "declared_size": int(head.size_),
        "guarantee": (guarantee or head.guarantee_).to_json(),
    }
    weights = head.coef_ if answerer is None else answerer.weights
    tensors = {
        "weights": torch.from_numpy(np.array(weights)),
        "centre": torch.from_numpy(np.array(head.centre_)),
    }
    return write_folder(folder, description, tensors, overwrite=overwrite)


def open_head(folder: str | Path) -> PrivateModel:
    """Open a saved head."""
    description, tensors = read_folder(folder, KIND)
    try:
        parts = (
            tensors["weights"].numpy(),
            tensors["centre"].numpy(),
            float(description["bias"]),
            float(description["radius"]),
        )
        answerer: HeadWeights | Predictor = HeadWeights(*parts)
        if not description["released"]:
            answerer = Predictor(
                PrivateHeadWeights(*parts, _bounds_from_json(description["bounds"])),
                NoisyMax("permute-and-flip"),
                Budget(float(description["epsilon"]), 0.0, int(description["queries"])),
                account=FileAccount(Path(folder) / ACCOUNT_FILE),
            )
        encoding = description["encoding"]
        return PrivateModel(
            kind=KIND,
            inputs=int(description["inputs"]),
            classes=tuple(str(label) for label in description["classes"]),
            guarantee=Guarantee.from_json(description["guarantee"]),
            encoding=None if encoding is None else Encoding.from_json(json.dumps(encoding)),
            features=feature_map_from_json(description["features"]),
            answerer=answerer,
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise DataUnavailable(
            f"The head in {folder} is damaged ({problem}); train it again or restore a copy."
        ) from problem


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

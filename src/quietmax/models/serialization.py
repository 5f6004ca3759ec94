"""Model files: a folder with ``weights.safetensors`` and ``model.json``; never pickle, so loading runs no code.

A folder appears whole or not at all: it is written beside its place and renamed. The description holds the digest of
the weights, so that files of two folders are not mixed up (format version 2; version 1, of Quietmax 0.1, has none).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from quietmax import __version__
from quietmax.data.encoding import Encoding
from quietmax.errors import DataUnavailable, InvalidInput, QuietmaxError, short_message
from quietmax.models.losses import Convexified, CrossEntropy, Loss, Quadratic
from quietmax.models.mlp import MLP
from quietmax.models.stacked import TrainingSettings
from quietmax.models.training import Model
from quietmax.spending import ACCOUNT_FILE, FileAccount

FORMAT, FORMAT_VERSION = "quietmax model", 3
_READABLE = (1, 2, FORMAT_VERSION)
_DESCRIPTION, _WEIGHTS, _DIGEST = "model.json", "weights.safetensors", "weights_sha256"
_BASES: dict[str, CrossEntropy | Quadratic] = {"cross-entropy": CrossEntropy(), "quadratic": Quadratic()}


def save_model(model: Model, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Write a trained network to ``folder``."""
    description = {
        "kind": "mlp",
        "widths": list(model.network.widths),
        "settings": settings_to_json(model.settings),
        "records": model.records,
        "dataset": model.dataset,
        "seed": model.seed,
        "encoding": None if model.encoding is None else json.loads(model.encoding.to_json()),
        "image_shape": model.image_shape,
    }
    return write_folder(folder, description, dict(model.network.parameters()), overwrite=overwrite)


def load_model(folder: str | Path) -> Model:
    """Read a trained network from ``folder``."""
    description, tensors = read_folder(folder, "mlp")
    try:
        settings = settings_from_json(description["settings"])
        network = mlp_from(tensors, description["widths"], settings.activation)
        if network.networks != 1:
            raise ValueError(f"it holds {network.networks} networks instead of one")
        if tuple(network.widths[1:-1]) != settings.hidden:
            raise ValueError(f"its layers are {network.widths}, but its settings name {settings.hidden}")
        if "guarantee" in description:
            raise ValueError("it states a guarantee, but an ordinary network has none")
        stated, shape = description["encoding"], description["image_shape"]
        encoding = None if stated is None else Encoding.from_json(json.dumps(stated))
        if encoding is not None and len(encoding.classes) != network.classes:
            raise ValueError(f"it has {network.classes} classes, but its encoding {len(encoding.classes)}")
        if shape is not None and math.prod(shape) != network.widths[0]:
            raise ValueError(f"its images have the shape {shape}, but it takes {network.widths[0]} features")
        return Model(
            network,
            settings,
            int(description["records"]),
            str(description["dataset"]),
            int(description["seed"]),
            encoding,
            None if shape is None else tuple(shape),
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise DataUnavailable(
            f"The model in {folder} is damaged ({short_message(problem)}); train it again or restore a copy."
        ) from problem


def mlp_from(tensors: Mapping[str, Tensor], widths: Sequence[int], activation: str) -> MLP:
    """The networks that `MLP.parameters` named; raises ValueError, TypeError or KeyError if they are not those."""
    if len(widths) < 2:
        raise ValueError(f"widths {list(widths)} are not a network")
    networks = len(tensors["kernel.0"])
    kernel_shapes = [(networks, *shape) for shape in itertools.pairwise(widths)]
    kernel_shapes[-1] = (networks, widths[-1], widths[-2])
    kernels = tuple(tensors[f"kernel.{depth}"] for depth in range(len(kernel_shapes)))
    biases = tuple(tensors[f"bias.{depth}"] for depth in range(len(kernel_shapes)))
    if [tuple(kernel.shape) for kernel in kernels] != kernel_shapes or [
        tuple(bias.shape) for bias in biases
    ] != [(networks, 1, width) for width in widths[1:]]:
        raise ValueError("the weights do not have the shapes the description states")
    return MLP(tuple(widths), activation, kernels, biases)


def write_folder(
    folder: str | Path,
    description: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    overwrite: bool,
    answered: int | None = None,
) -> Path:
    """Write a description and its tensors as one model folder, atomically.

    ``answered`` opens the folder's account with so many answers paid for already.
    """
    target = check_target(folder, overwrite=overwrite)
    header = {"format": FORMAT, "format_version": FORMAT_VERSION, "quietmax": __version__}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name[:40]}-", dir=target.parent))
        try:
            safetensors.torch.save_file(
                {name: tensor.contiguous() for name, tensor in tensors.items()}, staging / _WEIGHTS
            )
            header[_DIGEST] = hashlib.sha256((staging / _WEIGHTS).read_bytes()).hexdigest()
            text = json.dumps(header | dict(description), indent=2, allow_nan=False) + "\n"
            (staging / _DESCRIPTION).write_text(text, encoding="utf-8")
            if answered is not None:
                FileAccount.create(staging / ACCOUNT_FILE, answered)
            for written in staging.iterdir():
                with written.open("rb") as file:
                    os.fsync(file.fileno())
            staging.chmod(0o755)
            replaced = staging.with_name(staging.name + "-replaced")
            if target.exists():
                target.rename(replaced)
            try:
                staging.rename(target)
            except OSError:
                if replaced.exists():
                    replaced.rename(target)
                raise
            shutil.rmtree(replaced, ignore_errors=True)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as problem:
        raise QuietmaxError(
            f"The model could not be written to {target} ({problem.strerror}); choose a folder you may write to."
        ) from problem
    return target


def check_target(folder: str | Path, *, overwrite: bool) -> Path:
    """The folder as a path, unless something is there that must not be replaced."""
    target = Path(folder)
    if target.exists() and not overwrite:
        raise InvalidInput(
            f"{target} exists already; choose another folder, or overwrite it (--overwrite, or overwrite=True)."
        )
    if target.exists() and not (target / _DESCRIPTION).is_file():
        raise InvalidInput(
            f"{target} exists and is not a Quietmax model; it is left alone, choose another folder."
        )
    account = target / ACCOUNT_FILE
    if (account.exists() or _is_paid_per_answer(target)) and (spent := FileAccount(account).answered):
        raise InvalidInput(
            f"The account in {target} counts {spent} answers paid for, which must not be forgotten; choose another "
            "folder, or remove this one if the owner of the records allows it."
        )
    return target


def _is_paid_per_answer(folder: Path) -> bool:
    try:
        return read_description(folder).get("queries") is not None
    except DataUnavailable:
        return False


def read_folder(folder: str | Path, kind: str | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a model folder's description and tensors; with ``kind``, refuse any other kind of model."""
    source = Path(folder)
    description = read_description(source)
    if kind is not None and description.get("kind") != kind:
        raise InvalidInput(
            f"The model in {source} is of kind {description.get('kind')!r}, but {kind!r} is needed here; name "
            "another folder."
        )
    try:
        stored = (source / _WEIGHTS).read_bytes()
        tensors = safetensors.torch.load(stored)
    except (OSError, safetensors.SafetensorError) as problem:
        raise DataUnavailable(
            f"The weights {source / _WEIGHTS} cannot be read ({short_message(problem)}); train again or restore a copy."
        ) from problem
    if description["format_version"] > 1 and description.get(_DIGEST) != hashlib.sha256(stored).hexdigest():
        raise DataUnavailable(
            f"The weights in {source} are not those that {_DESCRIPTION} describes; train again or restore a copy."
        )
    return description, tensors


def read_description(folder: str | Path) -> dict[str, Any]:
    """Read and check the JSON part of a model folder."""
    path = Path(folder) / _DESCRIPTION
    if not path.is_file():
        raise DataUnavailable(
            f"There is no model in {folder} ({_DESCRIPTION} is missing); train one with 'quietmax train'."
        )
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise DataUnavailable(
            f"{path} cannot be read ({short_message(problem)}); train again or restore a copy."
        ) from problem
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise DataUnavailable(
            f"{path} is not a Quietmax model file; point to a folder written by 'quietmax train'."
        )
    if description.get("format_version") not in _READABLE:
        readable = ", ".join(str(each) for each in _READABLE)
        raise DataUnavailable(
            f"{path} has format version {description.get('format_version')}, but this Quietmax reads version "
            f"{readable}; install the Quietmax that wrote it ({description.get('quietmax')})."
        )
    return _upgraded(description)


_RENAMED_PARAMETERS = {
    "clip": "max_grad_norm",
    "optimiser": "optimizer",
    "rate": "learning_rate",
    "reading": "analysis",
    "route": "training_method",
}
"""Parameters of a stored guarantee: their names in format versions 1 and 2, and today's names."""


def _upgraded(description: dict[str, Any]) -> dict[str, Any]:
    """Return the description with the parameter names of the current format version."""
    guarantee = description.get("guarantee")
    if description["format_version"] >= 3 or not isinstance(guarantee, dict):
        return description
    parameters = guarantee.get("parameters")
    if not isinstance(parameters, dict):
        return description
    renamed = {_RENAMED_PARAMETERS.get(name, name): value for name, value in parameters.items()}
    return {**description, "guarantee": {**guarantee, "parameters": renamed}}


def settings_to_json(settings: TrainingSettings) -> dict[str, Any]:
    """Training settings as JSON values."""
    return {**asdict(settings), "hidden": list(settings.hidden), "loss": loss_to_json(settings.loss)}


def settings_from_json(values: Mapping[str, Any]) -> TrainingSettings:
    """The inverse of `settings_to_json`."""
    return TrainingSettings(
        **{**values, "hidden": tuple(values["hidden"]), "loss": loss_from_json(values["loss"])}
    )


def loss_to_json(loss: Loss) -> dict[str, Any]:
    """A loss by its name and constants."""
    if isinstance(loss, Convexified):
        return {
            "name": "convexified",
            "alpha": loss.alpha,
            "averaged_over": loss.averaged_over,
            "base": loss_to_json(loss.base)["name"],
        }
    return {"name": "cross-entropy" if isinstance(loss, CrossEntropy) else "quadratic"}


def loss_from_json(values: Mapping[str, Any]) -> Loss:
    """The inverse of `loss_to_json`."""
    if values["name"] == "convexified":
        return Convexified(float(values["alpha"]), values["averaged_over"], _BASES[values["base"]])
    return _BASES[values["name"]]

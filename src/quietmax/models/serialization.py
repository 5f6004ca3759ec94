"""Model folders: ``weights.safetensors`` and ``model.json``. Nothing is pickled, so loading a model runs no code.

A folder is written atomically: under another name first, then renamed. The description holds the SHA-256 of the
weights, so that files of two folders are not mixed up. Format version 4 is that of Quietmax 0.2 and later.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quietmax import __version__
from quietmax._lazy import lazy_module
from quietmax.data.encoding import Encoding
from quietmax.errors import DataUnavailable, InvalidInput, QuietmaxError, short_message
from quietmax.models.stacked import MLP, Convexified, CrossEntropy, Quadratic, TrainingSettings
from quietmax.models.training import Model
from quietmax.spending import ACCOUNT_FILE, DESCRIPTION_FILE, FileAccount

if TYPE_CHECKING:
    import safetensors
    import safetensors.torch
    from torch import Tensor
else:
    safetensors = lazy_module("safetensors")

FORMAT, FORMAT_VERSION = "quietmax model", 4
_DESCRIPTION, _WEIGHTS, _DIGEST = DESCRIPTION_FILE, "weights.safetensors", "weights_sha256"
_LOSSES: dict[type, str] = {CrossEntropy: "cross-entropy", Quadratic: "quadratic", Convexified: "convexified"}


def save_model(model: Model, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Write a trained network to a folder, whose files only their owner can read: nothing protects its records.

    Parameters
    ----------
    model : Model
        The network.
    folder : str or Path
        The folder to write.
    overwrite : bool
        Whether to replace a model that is there.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    InvalidInput
        If something is there that must not be replaced.
    QuietmaxError
        If the folder cannot be written.
    """
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
    tensors = dict(model.network.parameters())
    return write_folder(folder, description, tensors, overwrite=overwrite, released=False)


def load_model(folder: str | Path) -> Model:
    """Read a trained network from a folder.

    Parameters
    ----------
    folder : str or Path
        A folder that `save_model` wrote, with version 0.2 or later.

    Returns
    -------
    Model

    Raises
    ------
    DataUnavailable
        If there is no model, or it is damaged or of version 0.1.
    InvalidInput
        If it is a model of another kind.
    """
    description, tensors = read_folder(folder, "mlp")
    try:
        settings = _settings_from_json(description["settings"])
        network = mlp_from(tensors, description["widths"], settings.activation)
        if network.networks != 1:
            raise ValueError(f"it has {network.networks} networks instead of one")
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
        raise DataUnavailable(f"The model in {folder} is damaged: {short_message(problem)}.") from problem


def mlp_from(tensors: Mapping[str, Tensor], widths: Sequence[int], activation: str) -> MLP:
    """Return the networks whose tensors `MLP.parameters` named."""
    if len(widths) < 2:
        raise ValueError(f"the layer widths {list(widths)} are not those of a network")
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
    released: bool,
    answered: int | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a description and its tensors as one model folder, atomically."""
    target = check_target(folder, overwrite=overwrite)
    with staged_folder(target) as staging:
        _fill(staging, description, tensors, files or {}, released)
        if answered is not None:
            FileAccount.create(staging / ACCOUNT_FILE, answered)
        # Another process may have saved a model there since the check, or the account may have paid for answers.
        check_target(target, overwrite=overwrite)
        account = FileAccount(target / ACCOUNT_FILE)
        with account.closed() if account.path.exists() else nullcontext():
            _replace(target, staging)
    return target


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Make a folder beside a model's, to be filled and renamed. If it is not renamed, it is removed."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name[:40]}-", dir=target.parent))
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as problem:
        raise QuietmaxError(
            f"The model cannot be written to {target}: {problem.strerror or problem}."
        ) from problem


def _fill(
    folder: Path,
    description: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    files: Mapping[str, bytes],
    released: bool,
) -> None:
    """Write the files of a model into a new folder, flushed; what is not released is never readable by others."""
    # Serialized in memory, so that a full disk is an OSError and not an exception of the safetensors library.
    weights = safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})
    header = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "quietmax": __version__,
        _DIGEST: hashlib.sha256(weights).hexdigest(),
    }
    text = json.dumps(header | dict(description), indent=2, allow_nan=False) + "\n"
    mode = 0o666 if released else 0o600
    for name, content in {**files, _WEIGHTS: weights, _DESCRIPTION: text.encode()}.items():
        with open(folder / name, "xb", opener=lambda path, flags: os.open(path, flags, mode)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    folder.chmod(0o755)


def _replace(target: Path, staging: Path) -> None:
    """Rename a folder to its target; what was there is removed, or restored if the renaming fails or is interrupted."""
    replaced = staging.with_name(staging.name + "-replaced")
    try:
        if target.exists():
            target.rename(replaced)
        staging.rename(target)
    except BaseException:
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def check_target(folder: str | Path, *, overwrite: bool) -> Path:
    """Check that a model may be written to a folder."""
    target = Path(folder)
    if target.exists() and not overwrite:
        raise InvalidInput(f"'{target}' already exists; `overwrite` replaces it.")
    if target.exists() and not (target / _DESCRIPTION).is_file():
        raise InvalidInput(f"'{target}' already exists and is not a Quietmax model, so it is not replaced.")
    account = target / ACCOUNT_FILE
    if (account.exists() or _is_paid_per_answer(target)) and (spent := FileAccount(account).answered):
        raise InvalidInput(
            f"'{target}' is not replaced, because its account counts {spent} paid answers; they must not be forgotten."
        )
    return target


def _is_paid_per_answer(folder: Path) -> bool:
    """Return whether a folder holds a model with a budget of answers, also of another version."""
    with suppress(OSError, ValueError, AttributeError):
        return json.loads((folder / _DESCRIPTION).read_bytes()).get("queries") is not None
    return False


def read_folder(
    folder: str | Path, kind: str | None = None, *, library: Literal["torch", "numpy"] = "torch"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the description and the tensors of a model folder."""
    source = Path(folder)
    description = read_description(source)
    if kind is not None and description.get("kind") != kind:
        raise InvalidInput(
            f"The model in {source} must be of kind {kind!r}, got {description.get('kind')!r}."
        )
    try:
        stored = (source / _WEIGHTS).read_bytes()
        tensors: dict[str, Any] = getattr(safetensors, library).load(stored)
    except (OSError, safetensors.SafetensorError) as problem:
        raise DataUnavailable(
            f"The weights {source / _WEIGHTS} cannot be read: {short_message(problem)}."
        ) from problem
    if description.get(_DIGEST) != hashlib.sha256(stored).hexdigest():
        raise DataUnavailable(
            f"The weights in {source} are not those that {_DESCRIPTION} describes: their SHA-256 differs."
        )
    return description, tensors


def read_description(folder: str | Path) -> dict[str, Any]:
    """Read the description of a model folder."""
    path = Path(folder) / _DESCRIPTION
    if not path.is_file():
        raise DataUnavailable(f"There is no model in {folder}: {_DESCRIPTION} is missing.")
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise DataUnavailable(f"{path} cannot be read: {short_message(problem)}.") from problem
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise DataUnavailable(f"{path} does not describe a Quietmax model.")
    version, writer = (
        description.get("format_version"),
        f"was written by Quietmax {description.get('quietmax')}",
    )
    if version in (1, 2, 3):
        raise DataUnavailable(f"The model in {folder} {writer}. Version 0.2 can open it.")
    if version != FORMAT_VERSION:
        raise DataUnavailable(
            f"The model in {folder} {writer}: its format version must be {FORMAT_VERSION}, got {version!r}."
        )
    return description


def settings_to_json(settings: TrainingSettings) -> dict[str, Any]:
    """Return training settings as JSON values."""
    loss = settings.loss
    described = {"name": _LOSSES[type(loss)], **asdict(loss)}
    if isinstance(loss, Convexified):
        described["base"] = _LOSSES[type(loss.base)]
    return {**asdict(settings), "hidden": list(settings.hidden), "loss": described}


def _settings_from_json(values: Mapping[str, Any]) -> TrainingSettings:
    kinds: dict[str, Any] = {name: kind for kind, name in _LOSSES.items()}
    described = dict(values["loss"])
    kind = kinds[described.pop("name")]
    if "base" in described:
        described["base"] = kinds[described["base"]]()
    return TrainingSettings(**{**values, "hidden": tuple(values["hidden"]), "loss": kind(**described)})

"""Public encoders in files: the outputs of a network that somebody trained without the private records.

A guarantee assumes that of the file with this SHA-256. ``.onnx`` is computed by onnxruntime, one record at a time, with
standard operations that draw no random numbers. ``.safetensors`` holds tensors and a list of `torch.nn` layers, as
`save_encoder` writes it. `Embedding` takes numbers that an encoder computed beforehand.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from quietmax._lazy import lazy_module
from quietmax.errors import DataUnavailable, InvalidInput, QuietmaxError, short_message
from quietmax.models.features.base import BatchedMap, FeatureMap, Floats
from quietmax.models.features.tabular import UnitNorm

if TYPE_CHECKING:
    import safetensors
    import safetensors.torch
    import torch
else:
    safetensors = lazy_module("safetensors")
    torch = lazy_module("torch")

_Shape = tuple[int, ...]
_Network = tuple[Callable[["torch.Tensor"], "torch.Tensor"], tuple[int | None, ...] | None]
"""Computes the outputs of a batch of inputs; and the shape of an input, where the file states one."""

_SUFFIXES = (".onnx", ".safetensors")
_LAYERS_KEY = "quietmax.encoder"
_ROWS_AT_ONCE, _MOST_NUMBERS = 32, 2**14
"""Rows of a batch, and the most numbers of an input for which there is one. Activation functions round otherwise in the
last numbers of a tensor that do not fill two vectors of the processor; with 32 rows they always do."""
_RANDOM = frozenset(
    ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
)
_STANDARD_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True)
class Encoder(BatchedMap):
    """Outputs of a network in a file, of unit length.

    The record is brought into the shape that the network takes: an image is scaled to its height and width (bilinear,
    with anti-aliasing), and a single channel is repeated if it takes more. Then `mean` is subtracted, and the result
    is divided by `std`. Outputs that are not finite become 0, and every record's outputs are divided by their length.

    Parameters
    ----------
    path : str or Path
        An ``.onnx`` file, or a ``.safetensors`` file of `save_encoder`. It is read once.
    sha256 : str
        SHA-256 of the file, 64 hexadecimal digits. The error of a missing one states it.
    image_shape : (int, int, int), optional
        Channels, height and width, if the records are images.
    input_shape : tuple of int, optional
        Shape of a record as the network takes it. By default what an ONNX file states; dimensions that it leaves open,
        and all of them for other files, are those of the record.
    output : str, optional
        ONNX only: name of the output, which may also be an intermediate one. By default the first output.
    pool : bool
        Whether to average the output over all positions of its channels.
    mean, std : float or tuple of float
        Public numbers by which the inputs are scaled; one, or one for each channel.
    file : str, optional
        The name of the file in the guarantee. By default that of `path`.

    Raises
    ------
    InvalidInput
        If a parameter or the network is not valid.
    DataUnavailable
        If the file cannot be read or has another SHA-256.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "first.safetensors"
    >>> digest = save_encoder(torch.nn.Sequential(torch.nn.ReLU()), path)
    >>> Encoder(path, digest).transform([[-3.0, 3.0, 4.0]])
    array([[0. , 0.6, 0.8]], dtype=float32)
    """

    path: str | Path = field(compare=False)
    sha256: str | None = None
    image_shape: tuple[int, int, int] | None = field(default=None, kw_only=True)
    input_shape: tuple[int, ...] | None = field(default=None, kw_only=True)
    output: str | None = field(default=None, kw_only=True)
    pool: bool = field(default=False, kw_only=True)
    mean: float | tuple[float, ...] = field(default=0.0, kw_only=True)
    std: float | tuple[float, ...] = field(default=1.0, kw_only=True)
    file: str | None = field(default=None, kw_only=True)
    content: bytes = field(init=False, repr=False, compare=False)
    kind: ClassVar[str] = "encoder"
    parallel: ClassVar[bool] = True

    def __post_init__(self) -> None:
        path = Path(self.path)
        self._set(file=str(self.file or path.name), image_shape=_shape("image_shape", self.image_shape))
        self._set(input_shape=_shape("input_shape", self.input_shape), pool=bool(self.pool))
        self._set(mean=_numbers("mean", self.mean), std=_numbers("std", self.std))
        if self.suffix not in _SUFFIXES:
            raise InvalidInput(f"An encoder must be an .onnx or .safetensors file, got '{self.file}'.")
        if self.image_shape is not None and len(self.image_shape) != 3:
            raise InvalidInput(
                f"image_shape must be channels, height and width, got {list(self.image_shape)}."
            )
        if np.any(np.equal(self.std, 0.0)):
            raise InvalidInput("std must not be 0.")
        self._set(content=_read(path, self.sha256, str(self.file)))
        self._set(sha256=str(self.sha256).lower())
        _network(self)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def suffix(self) -> str:
        """The kind of file: ``.onnx`` or ``.safetensors``."""
        return Path(str(self.file)).suffix.lower()

    @property
    def stored_name(self) -> str:
        """The name of the file in a model folder."""
        return _stored_name(str(self.sha256), self.suffix)

    def dimension(self, columns: int) -> int:
        """Return the number of features: the numbers in the output."""
        return _width(self, columns)

    def _prepare(self) -> None:
        _network(self)

    def _batch_rows(self) -> int:
        if self.suffix == ".onnx":
            return 1
        numbers = math.prod(self.input_shape or self.image_shape or (1,))
        return _ROWS_AT_ONCE if numbers <= _MOST_NUMBERS else 1

    def _batch(self, batch: torch.Tensor) -> torch.Tensor:
        # A network may fail on one record, or give it another number of outputs, though it takes a record of zeros. An
        # error would then say something about that record, so it gets zeros instead.
        zeros = torch.zeros(len(batch), _width(self, batch.shape[1]))
        try:
            outputs = self._outputs(batch)
        except InvalidInput:
            return zeros
        return outputs if outputs.shape == zeros.shape else zeros

    def _features(self, records: Floats) -> Floats:
        finite = np.nan_to_num(super()._features(records), nan=0.0, posinf=0.0, neginf=0.0)
        return UnitNorm().transform(finite)

    def _outputs(self, batch: torch.Tensor) -> torch.Tensor:
        run, stated = _network(self)
        inputs = self._inputs(batch, stated)
        try:
            outputs = run(inputs)
        except Exception as problem:  # Both libraries raise errors of many kinds.
            raise InvalidInput(
                f"The encoder {self.file} cannot compute inputs of shape {list(inputs.shape[1:])}: "
                f"{short_message(problem)}"
            ) from problem
        if self.suffix == ".onnx" and (outputs.ndim == 0 or len(outputs) != 1):
            outputs = outputs[None]
        if len(outputs) != len(batch):
            raise InvalidInput(f"The encoder {self.file} must return one row of outputs per record.")
        if self.pool:
            if outputs.ndim < 3:
                raise InvalidInput(f"pool requires an output with positions, but {self.file} has none.")
            outputs = outputs.flatten(2).mean(dim=2)
        return outputs.flatten(1).to(torch.float32)

    def _inputs(self, batch: torch.Tensor, stated: tuple[int | None, ...] | None) -> torch.Tensor:
        own = self.image_shape or (batch.shape[1],)
        if math.prod(own) != batch.shape[1]:
            raise InvalidInput(
                f"The records have {batch.shape[1]} numbers, which do not form images of shape {list(own)}."
            )
        shape = self.input_shape or _filled(stated, own, str(self.file))
        inputs = batch.reshape(len(batch), *own)
        if self.image_shape is None:
            if math.prod(shape) != batch.shape[1]:
                raise InvalidInput(
                    f"The encoder {self.file} takes inputs of shape {list(shape)}, but the records have "
                    f"{batch.shape[1]} numbers. State image_shape if they are images."
                )
            inputs = inputs.reshape(len(batch), *shape)
        elif shape != own:
            inputs = _scaled(inputs, shape, str(self.file))
        mean, std = (_per_channel(value, inputs.shape, self) for value in (self.mean, self.std))
        return (inputs - mean) / std

    def to_json(self) -> dict[str, Any]:
        """Return the file's name and SHA-256 and the settings as JSON values."""
        return {name: value for name, value in super().to_json().items() if name != "path"}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> FeatureMap:
        """Return the map that `to_json` described."""
        stored = _stored_name(values["sha256"], Path(values["file"]).suffix.lower())
        return super().from_json({**values, "path": Path(values.get("folder", ".")) / stored})


@dataclass(frozen=True)
class Embedding(FeatureMap):
    """Numbers that a public encoder computed beforehand, of unit length.

    Parameters
    ----------
    centre : float
        Subtracted from every number first. A table's columns with bounds (-b, b) are encoded around 0.5.

    Examples
    --------
    >>> Embedding().transform([[-3.0, 4.0]])
    array([[-0.6,  0.8]], dtype=float32)
    """

    centre: float = 0.0
    kind: ClassVar[str] = "embedding"

    def __post_init__(self) -> None:
        object.__setattr__(self, "centre", float(self.centre))
        if not math.isfinite(self.centre):
            raise InvalidInput(f"centre must be a finite number, got {self.centre}.")

    def dimension(self, columns: int) -> int:
        """Return the number of features: one per number."""
        return columns

    def _features(self, records: Floats) -> Floats:
        return UnitNorm().transform(records - np.float32(self.centre))


def _stored_name(sha256: str, suffix: str) -> str:
    """Return the name of an encoder's file in a model folder; the user's name could be that of another file there."""
    return f"encoder-{sha256[:16]}{suffix}"


def _shape(name: str, value: Any) -> _Shape | None:
    if value is None:
        return None
    try:
        shape = tuple(int(side) for side in value)
    except (TypeError, ValueError):
        shape = ()
    if not shape or min(shape) < 1:
        raise InvalidInput(f"{name} must be a sequence of positive integers, got {value!r}.")
    return shape


def _numbers(name: str, value: Any) -> float | tuple[float, ...]:
    try:
        numbers = tuple(float(each) for each in np.ravel(value))
    except (TypeError, ValueError):
        numbers = ()
    if not numbers or not all(math.isfinite(each) for each in numbers):
        raise InvalidInput(f"{name} must be a finite number, or one for each channel, got {value!r}.")
    return numbers if np.ndim(value) else numbers[0]


def _read(path: Path, sha256: str | None, name: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise DataUnavailable(
            f"The encoder file {path} cannot be read: {problem.strerror or problem}."
        ) from problem
    digest = hashlib.sha256(content).hexdigest()
    if sha256 is None:
        raise InvalidInput(
            f"The encoder {name} must be named with its `sha256`. That of this file is "
            f"{digest}: state it if the file is the one that you expect."
        )
    if str(sha256).lower() != digest:
        raise DataUnavailable(f"The encoder file {path} has the SHA-256 {digest}, but {sha256} was expected.")
    return content


def _filled(stated: tuple[int | None, ...] | None, own: _Shape, name: str) -> _Shape:
    """Return the stated shape of an input, with the record's dimensions where the file leaves them open."""
    if stated is None:
        return own
    if None not in stated:
        return tuple(side for side in stated if side is not None)
    if len(stated) != len(own):
        raise InvalidInput(
            f"The encoder {name} takes inputs with {len(stated)} dimensions, but the records have {len(own)}. State "
            "input_shape, or image_shape if the records are images."
        )
    return tuple(mine if side is None else side for side, mine in zip(stated, own, strict=True))


def _scaled(images: torch.Tensor, shape: _Shape, name: str) -> torch.Tensor:
    """Return images with another height and width, and a single channel repeated."""
    if len(shape) != 3 or images.shape[1] not in (1, shape[0]):
        raise InvalidInput(
            f"Images of shape {list(images.shape[1:])} cannot be scaled to the shape {list(shape)} that the encoder "
            f"{name} takes."
        )
    if tuple(images.shape[2:]) != shape[1:]:
        images = torch.nn.functional.interpolate(
            images, shape[1:], mode="bilinear", antialias=True, align_corners=False
        )
    return images.expand(-1, shape[0], -1, -1)


def _per_channel(value: float | tuple[float, ...], shape: torch.Size, encoder: Encoder) -> torch.Tensor:
    if not isinstance(value, tuple):
        return torch.tensor(value, dtype=torch.float32)
    if len(value) != shape[1]:
        raise InvalidInput(
            f"mean and std must be one number or {shape[1]}, one for each channel of the inputs of {encoder.file}, "
            f"got {len(value)}."
        )
    return torch.tensor(value, dtype=torch.float32).reshape(-1, *[1] * (len(shape) - 2))


@lru_cache(maxsize=64)
def _width(encoder: Encoder, columns: int) -> int:
    with torch.no_grad():
        width = encoder._outputs(torch.zeros(1, columns)).shape[1]
    if width == 0:
        raise InvalidInput(f"The encoder {encoder.file} has no outputs for a record of zeros.")
    return width


@lru_cache(maxsize=4)
def _network(encoder: Encoder) -> _Network:
    return _onnx_network(encoder) if encoder.suffix == ".onnx" else _layer_network(encoder)


# --- ONNX -------------------------------------------------------------------------------------------------------------


def _onnx_network(encoder: Encoder) -> _Network:
    try:
        import onnx
        import onnxruntime
    except ImportError as missing:
        raise QuietmaxError(
            f"The encoder {encoder.file} requires the package {missing.name}. "
            "Install: pip install 'quietmax[onnx]'."
        ) from missing
    try:
        model = onnx.load_from_string(encoder.content)
    except Exception as problem:  # The errors of the protobuf library differ by version.
        raise InvalidInput(f"The encoder {encoder.file} is not an ONNX file.") from problem
    _check_operations(model, str(encoder.file))
    graph = model.graph
    output = encoder.output or next((each.name for each in graph.output), "")
    if output not in {each.name for each in graph.output}:
        if output not in {name for node in graph.node for name in node.output if name}:
            raise InvalidInput(
                f"The encoder {encoder.file} has no output {output!r}. Its outputs are "
                f"{', '.join(each.name for each in graph.output)}; names of intermediate outputs are valid too."
            )
        graph.output.append(onnx.ValueInfoProto(name=output))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.use_deterministic_compute = True
    try:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as problem:
        raise InvalidInput(
            f"onnxruntime cannot read the encoder {encoder.file}: {short_message(problem)}"
        ) from problem
    sources = session.get_inputs()
    if [each.type for each in sources] != ["tensor(float)"]:
        kinds = ", ".join(f"{each.name} ({each.type})" for each in sources)
        raise InvalidInput(
            f"An encoder must take one input of type float32, but {encoder.file} takes: {kinds}."
        )
    (source,) = sources
    batch, *dimensions = source.shape or [None]
    if isinstance(batch, int) and batch > 1:
        raise InvalidInput(
            f"The encoder {encoder.file} takes {batch} records at once, but must also take one record."
        )

    def _run(inputs: torch.Tensor) -> torch.Tensor:
        (values,) = session.run([output], {source.name: inputs.numpy()})
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))

    fixed = tuple(side if isinstance(side, int) and side > 0 else None for side in dimensions)
    return _run, fixed or None


def _check_operations(model: Any, name: str) -> None:
    """Raise `InvalidInput` if the outputs of an ONNX network are not a function of its file and its input."""
    import onnx

    if model.functions:
        raise InvalidInput(
            f"The encoder {name} defines functions of its own; export it with standard operations only."
        )
    for part in _messages(model.graph):
        if isinstance(part, onnx.NodeProto):
            if part.domain not in _STANDARD_DOMAINS:
                raise InvalidInput(
                    f"The encoder {name} has the operation {part.op_type} of the domain {part.domain}; only standard "
                    "operations of ONNX are supported."
                )
            trained = part.op_type == "Dropout" and len(part.input) > 2 and part.input[2]
            if part.op_type in _RANDOM or trained:
                raise InvalidInput(
                    f"The encoder {name} has the operation {part.op_type}, which may draw random numbers; export it "
                    "for inference."
                )
        elif isinstance(part, onnx.TensorProto) and (
            part.data_location == onnx.TensorProto.EXTERNAL or part.external_data
        ):
            raise InvalidInput(
                f"The encoder {name} keeps tensors in other files, which its SHA-256 does not cover; save it as one "
                "file."
            )


def _messages(message: Any) -> Iterator[Any]:
    """Iterate over a protobuf message and everything in it: operations, their graphs (If, Loop, Scan), tensors."""
    yield message
    for kind, value in message.ListFields():
        if kind.message_type is not None:
            for each in [value] if hasattr(value, "ListFields") else value:
                yield from _messages(each)


# --- Layers in safetensors --------------------------------------------------------------------------------------------

_SETTINGS: dict[str, tuple[str, ...]] = {
    "Conv2d": (
        *("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups"),
        *("padding_mode", "bias"),
    ),
    "Linear": ("in_features", "out_features", "bias"),
    "BatchNorm1d": ("num_features", "eps", "affine"),
    "BatchNorm2d": ("num_features", "eps", "affine"),
    "GroupNorm": ("num_groups", "num_channels", "eps", "affine"),
    "LayerNorm": ("normalized_shape", "eps", "elementwise_affine", "bias"),
    "AvgPool2d": ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad"),
    "MaxPool2d": ("kernel_size", "stride", "padding", "dilation", "ceil_mode"),
    "AdaptiveAvgPool2d": ("output_size",),
    "AdaptiveMaxPool2d": ("output_size",),
    "Flatten": ("start_dim", "end_dim"),
    "ELU": ("alpha",),
    "GELU": ("approximate",),
    "Hardswish": (),
    "LeakyReLU": ("negative_slope",),
    "ReLU": (),
    "ReLU6": (),
    "SiLU": (),
    "Sigmoid": (),
    "Softplus": ("beta", "threshold"),
    "Tanh": (),
}
"""The layers of `torch.nn` that a file may name, and their settings. In evaluation each computes rows one by one."""
_SKIPPED = ("Identity", "Dropout", "Dropout1d", "Dropout2d")


def save_encoder(module: torch.nn.Module, path: str | Path) -> str:
    """Write a sequence of layers as an encoder file, which `Encoder` reads without running code.

    Dropout is left out, and batch normalisation uses its running statistics.

    Parameters
    ----------
    module : torch.nn.Module
        A layer, or a `torch.nn.Sequential` of layers, which may be nested. The layers are those of `torch.nn` named
        Conv2d, Linear, BatchNorm1d, BatchNorm2d, GroupNorm, LayerNorm, AvgPool2d, MaxPool2d, AdaptiveAvgPool2d,
        AdaptiveMaxPool2d, Flatten, Dropout, Identity, and the usual activations. Export other networks as ONNX.
    path : str or Path
        The ``.safetensors`` file to write.

    Returns
    -------
    str
        SHA-256 of the file.

    Raises
    ------
    InvalidInput
        If a layer is not one of these.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "net.safetensors"
    >>> len(save_encoder(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Tanh()), path))
    64
    """
    layers: list[dict[str, Any]] = []
    tensors: dict[str, torch.Tensor] = {}
    for layer in _layers(module):
        kind = type(layer).__name__
        if getattr(torch.nn, kind, None) is not type(layer) or kind not in _SETTINGS:
            raise InvalidInput(
                f"An encoder file may have the layers {', '.join(_SETTINGS)} of torch.nn, got {kind}. Export other "
                "networks as ONNX."
            )
        settings = {name: getattr(layer, name) for name in _SETTINGS[kind]}
        if "bias" in settings:
            settings["bias"] = settings["bias"] is not None
        _check_layer(kind, settings, layer)
        for name, tensor in layer.state_dict().items():
            if name != "num_batches_tracked":
                tensors[f"{len(layers)}.{name}"] = tensor.detach().to("cpu", torch.float32).contiguous()
        layers.append({"layer": kind, **settings})
    content = safetensors.torch.save(tensors, {_LAYERS_KEY: json.dumps(layers)})
    Path(path).write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def _layers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Iterate over the layers of nested sequences, without those that do nothing in evaluation."""
    if isinstance(module, torch.nn.Sequential) and type(module).forward is torch.nn.Sequential.forward:
        for child in module:
            yield from _layers(child)
    elif not isinstance(module, tuple(getattr(torch.nn, name) for name in _SKIPPED)):
        yield module


def _check_layer(kind: str, settings: Mapping[str, Any], layer: torch.nn.Module) -> None:
    if kind == "Flatten" and settings["start_dim"] != 1:
        raise InvalidInput("A Flatten layer of an encoder must have start_dim=1, so that records stay apart.")
    if kind.startswith("BatchNorm") and getattr(layer, "running_mean", None) is None:
        raise InvalidInput("Batch normalisation in an encoder must have running statistics.")


def _layer_network(encoder: Encoder) -> _Network:
    if encoder.output is not None:
        raise InvalidInput(
            "output requires an ONNX file; save only the layers that you need with save_encoder."
        )
    try:
        tensors = safetensors.torch.load(encoder.content)
        network = torch.nn.Sequential(*map(_built, json.loads(_metadata(encoder.content)[_LAYERS_KEY])))
        network.load_state_dict(
            {name: tensor.to(torch.float32) for name, tensor in tensors.items()}, assign=True
        )
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as problem:
        raise InvalidInput(
            f"The encoder {encoder.file} is not a file that save_encoder wrote ({short_message(problem)})."
        ) from problem
    return network.eval().requires_grad_(False), None


def _metadata(content: bytes) -> Mapping[str, str]:
    """Return the metadata of a safetensors file, which begins with the length of its JSON header."""
    length = int.from_bytes(content[:8], "little")
    metadata: Mapping[str, str] = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    return metadata


def _built(description: Mapping[str, Any]) -> torch.nn.Module:
    """Return a described layer without numbers; they are assigned later."""
    kind = description["layer"]
    settings = {
        name: tuple(value) if isinstance(value := description[name], list) else value
        for name in _SETTINGS[kind]
    }
    with torch.device("meta"):
        layer: torch.nn.Module = getattr(torch.nn, kind)(**settings)
    _check_layer(kind, settings, layer)
    return layer

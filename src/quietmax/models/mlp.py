"""Multilayer perceptrons, K of one shape stacked in one tensor per layer, and their activations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quietmax._lazy import lazy_module
from quietmax.errors import InvalidInput

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_module("torch")

_ROWS_AT_ONCE = 2048


@dataclass(frozen=True)
class Activation:
    """An activation of hidden neurons, with its derivative in terms of its own output."""

    name: str  # Name in settings and files
    bound: float | None  # Largest absolute output (the paper's a_u); None if there is no bound
    apply_: Callable[[Tensor], Tensor]  # Overwrites pre-activations with outputs
    backward: Callable[[Tensor, Tensor], Tensor]  # Multiplies a gradient by the derivative, given the output


@cache
def _minus_one(dtype: torch.dtype) -> Tensor:
    """Return -1 as a tensor."""
    return torch.tensor(-1.0).to(dtype)


def _tanh_(values: Tensor) -> Tensor:
    """Overwrite values with their hyperbolic tangent."""
    # tanh(x) = 2*sigmoid(2x) - 1: the same to 2e-7 in float32 and over twice as fast as torch.tanh on a CPU.
    return torch.add(_minus_one(values.dtype), values.mul_(2).sigmoid_(), alpha=2, out=values)


# The lambdas leave torch to be imported on first use.
_ALL = (
    Activation("tanh", 1.0, _tanh_, lambda slope, output: torch.ops.aten.tanh_backward(slope, output)),
    Activation(
        "sigmoid",
        1.0,
        lambda values: torch.sigmoid_(values),
        lambda slope, output: torch.ops.aten.sigmoid_backward(slope, output),
    ),
    Activation(
        "relu",
        None,
        lambda values: torch.relu_(values),
        lambda slope, output: torch.ops.aten.threshold_backward(slope, output, 0),
    ),
)
ACTIVATIONS: Mapping[str, Activation] = MappingProxyType({each.name: each for each in _ALL})
"""The activations by name. Nothing can be added: an activation that mixes the networks of a stack would void proofs."""


def activation(name: str) -> Activation:
    """Return the activation of a name."""
    if name not in ACTIVATIONS:
        raise InvalidInput(f"The activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}.")
    return ACTIVATIONS[name]


@dataclass(frozen=True, eq=False)
class MLP:
    """K stacked multilayer perceptrons of one shape.

    Parameters
    ----------
    widths : tuple of int
        Number of features, of neurons in each hidden layer, and of classes.
    activation : str
        Activation of the hidden layers.
    kernels : tuple of Tensor
        Weights of each layer, shape (networks, inputs, outputs); of the last layer (networks, classes, inputs).
    biases : tuple of Tensor
        Biases of each layer, shape (networks, 1, outputs).
    """

    widths: tuple[int, ...]
    activation: str
    kernels: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]

    @property
    def networks(self) -> int:
        """Number of stacked networks."""
        return self.kernels[0].shape[0]

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.widths[-1]

    def network(self, index: int) -> MLP:
        """Return one of the stacked networks."""
        return self._chosen(slice(index, index + 1))

    def _chosen(self, networks: slice | Tensor) -> MLP:
        """Return some of the stacked networks, or all of them in another order."""
        kernels, biases = (tuple(each[networks] for each in layers) for layers in (self.kernels, self.biases))
        return MLP(self.widths, self.activation, kernels, biases)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight tensor with its name in model files."""
        for depth, (kernel, bias) in enumerate(zip(self.kernels, self.biases, strict=True)):
            yield f"kernel.{depth}", kernel
            yield f"bias.{depth}", bias

    def weight_vectors(self) -> Tensor:
        """Return all weights and biases of each network as one vector."""
        return torch.cat([tensor.flatten(1) for _, tensor in self.parameters()], 1)

    def stacked_logits(self, features: NDArray[np.floating] | Tensor) -> Tensor:
        """Return the logits of all networks for the same records."""
        inputs = self._inputs(features)
        parts = [self._forward(checked_finite(part)) for part in torch.split(inputs, _ROWS_AT_ONCE)]
        return torch.cat(parts, 1) if parts else inputs.new_empty(self.networks, 0, self.classes)

    def logits(self, features: NDArray[np.floating] | Tensor) -> Tensor:
        """Return the logits of a single network."""
        if self.networks != 1:
            raise InvalidInput(
                f"logits() needs a single network, but this is a stack of {self.networks}; network(index) returns one."
            )
        return self.stacked_logits(features)[0]

    def _inputs(self, features: NDArray[np.floating] | Tensor) -> Tensor:
        """Return the features as a matrix of the weights' type."""
        inputs = torch.as_tensor(features).to(self.kernels[0].dtype)
        if inputs.ndim != 2 or inputs.shape[1] != self.widths[0]:
            raise InvalidInput(
                f"The records must be an array of shape (n, {self.widths[0]}), got shape {tuple(inputs.shape)}."
            )
        return inputs

    def _forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of one batch."""
        apply_ = activation(self.activation).apply_
        signal = inputs.expand(self.networks, *inputs.shape)
        for kernel, bias in zip(self.kernels[:-1], self.biases[:-1], strict=True):
            signal = apply_(torch.baddbmm(bias, signal, kernel))
        return torch.baddbmm(self.biases[-1], signal, self.kernels[-1].transpose(1, 2))


def checked_finite(features: Tensor) -> Tensor:
    """Return the features if all are finite."""
    # The sum of squares decides in one pass, unless it overflows.
    flat = features.reshape(-1)
    if torch.isfinite(torch.dot(flat, flat)) or torch.isfinite(flat).all():
        return features
    raise InvalidInput("Features must be finite, but a query holds NaN or infinity. Nothing was charged.")


def initial_mlp(
    widths: tuple[int, ...],
    activation_name: str,
    seeds: tuple[int, ...],
    dtype: torch.dtype | None = None,
) -> MLP:
    """Return networks with Glorot-uniform kernels and zero biases."""
    activation(activation_name)
    if len(widths) < 2 or min(widths) < 1:
        raise InvalidInput(
            f"A network must have at least one neuron in every layer, got layers of the widths {widths}."
        )
    dtype = torch.float32 if dtype is None else dtype
    drawn = [_glorot(widths, np.random.default_rng((0x1417, seed))) for seed in seeds]
    kernels = [torch.from_numpy(np.stack(layer)).to(dtype) for layer in zip(*drawn, strict=True)]
    kernels[-1] = kernels[-1].transpose(1, 2).contiguous()
    biases = tuple(torch.zeros(len(seeds), 1, width, dtype=dtype) for width in widths[1:])
    return MLP(widths, activation_name, tuple(kernels), biases)


def _glorot(widths: tuple[int, ...], generator: np.random.Generator) -> list[NDArray[np.float64]]:
    """Draw the kernels of one network."""
    limits = [(6 / (fan_in + fan_out)) ** 0.5 for fan_in, fan_out in itertools.pairwise(widths)]
    return [
        generator.uniform(-limit, limit, shape)
        for limit, shape in zip(limits, itertools.pairwise(widths), strict=True)
    ]

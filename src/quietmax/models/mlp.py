"""The multilayer perceptron: K of them stacked along the first axis of every tensor; K = 1 is one network.

Hidden kernels are stored (networks, in, out), the output kernel (networks, out, in): the layouts for which
batched products with few classes are fastest on a CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quietmax.errors import InvalidInput
from quietmax.models.activations import activation

_ROWS_AT_ONCE = 2048


@dataclass(frozen=True, eq=False)
class MLP:
    """K stacked networks of one shape; ``widths`` is (features, hidden..., classes)."""

    widths: tuple[int, ...]
    activation: str
    kernels: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]

    @property
    def networks(self) -> int:
        """How many networks are stacked."""
        return self.kernels[0].shape[0]

    @property
    def classes(self) -> int:
        """The number of output neurons."""
        return self.widths[-1]

    def network(self, index: int) -> MLP:
        """Return one of the stacked networks as a stack of one (sharing memory)."""
        chosen = slice(index, index + 1)
        return MLP(
            self.widths,
            self.activation,
            tuple(kernel[chosen] for kernel in self.kernels),
            tuple(bias[chosen] for bias in self.biases),
        )

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor with its name in model files."""
        for depth, (kernel, bias) in enumerate(zip(self.kernels, self.biases, strict=True)):
            yield f"kernel.{depth}", kernel
            yield f"bias.{depth}", bias

    def weight_vectors(self) -> Tensor:
        """All kernels and biases of each network as one vector, shape (networks, parameters)."""
        return torch.cat([tensor.flatten(1) for _, tensor in self.parameters()], 1)

    def stacked_logits(self, features: NDArray[np.floating] | Tensor) -> Tensor:
        """Logits of all networks for the same records, shape (networks, records, classes)."""
        inputs = self._checked(features)
        parts = [self._forward(checked_finite(part)) for part in torch.split(inputs, _ROWS_AT_ONCE)]
        return torch.cat(parts, 1) if parts else inputs.new_empty(self.networks, 0, self.classes)

    def logits(self, features: NDArray[np.floating] | Tensor) -> Tensor:
        """Logits of a single network, shape (records, classes)."""
        if self.networks != 1:
            raise InvalidInput(
                f"This stack holds {self.networks} networks, but logits() needs one; pick it with network(index)."
            )
        return self.stacked_logits(features)[0]

    def _checked(self, features: NDArray[np.floating] | Tensor) -> Tensor:
        inputs = torch.as_tensor(features).to(self.kernels[0].dtype)
        if inputs.ndim != 2 or inputs.shape[1] != self.widths[0]:
            raise InvalidInput(
                f"The records have shape {tuple(inputs.shape)}, but this network takes rows of "
                f"{self.widths[0]} features; pass an array of shape (records, {self.widths[0]})."
            )
        return inputs

    def _forward(self, inputs: Tensor) -> Tensor:
        apply_ = activation(self.activation).apply_
        signal = inputs.expand(self.networks, *inputs.shape)
        for kernel, bias in zip(self.kernels[:-1], self.biases[:-1], strict=True):
            signal = apply_(torch.baddbmm(bias, signal, kernel))
        return torch.baddbmm(self.biases[-1], signal, self.kernels[-1].transpose(1, 2))


def checked_finite(features: Tensor) -> Tensor:
    """The features, unless one is NaN or infinite; a sum of squares settles it in one pass unless it overflows."""
    flat = features.reshape(-1)
    if torch.isfinite(torch.dot(flat, flat)) or torch.isfinite(flat).all():
        return features
    raise InvalidInput("A query holds NaN or infinity; correct it. Nothing was answered and nothing spent.")


def initial_mlp(
    widths: tuple[int, ...], activation_name: str, seeds: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> MLP:
    """Draw Glorot-uniform kernels and zero biases, each network from its own seed."""
    activation(activation_name)
    if len(widths) < 2 or min(widths) < 1:
        raise InvalidInput(
            f"Layer widths {widths} are not a network; every layer needs at least one neuron; give "
            "such widths."
        )
    drawn = [_glorot(widths, np.random.default_rng((0x1417, seed))) for seed in seeds]
    kernels = [torch.from_numpy(np.stack(layer)).to(dtype) for layer in zip(*drawn, strict=True)]
    kernels[-1] = kernels[-1].transpose(1, 2).contiguous()
    biases = tuple(torch.zeros(len(seeds), 1, width, dtype=dtype) for width in widths[1:])
    return MLP(widths, activation_name, tuple(kernels), biases)


def _glorot(widths: tuple[int, ...], generator: np.random.Generator) -> list[NDArray[np.float64]]:
    limits = [(6 / (fan_in + fan_out)) ** 0.5 for fan_in, fan_out in itertools.pairwise(widths)]
    return [
        generator.uniform(-limit, limit, shape)
        for limit, shape in zip(limits, itertools.pairwise(widths), strict=True)
    ]

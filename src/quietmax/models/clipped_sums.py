"""The sum over a batch of every record's gradient, each clipped: in closed form, for K networks at once.

In a network of linear layers the gradient of one record's loss with respect to a layer's kernel is the outer product
of the layer's input a and its slope d, so its squared norm is |a|^2*|d|^2, and with the bias (|a|^2 + 1)*|d|^2. Summed
over the layers that is the record's squared gradient norm; scaling the record's slopes by min(1, S/norm) before the
one matrix product per layer gives the sum of all clipped gradients. No per-example gradient is ever formed, and one
backward pass is enough (Goodfellow 2015, arXiv:1510.01799; "ghost clipping", Li et al. 2022, arXiv:2110.05679).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quietmax.models.activations import activation
from quietmax.models.mlp import MLP

_ROWS_AT_ONCE = 2048


@dataclass(frozen=True, eq=False)
class Gradients:
    """One tensor per layer: kernels and biases, in the layout of `MLP`."""

    kernels: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]

    @classmethod
    def zeros(cls, network: MLP) -> Gradients:
        """Nothing yet, in the shapes of the network."""
        return cls(
            tuple(torch.zeros_like(kernel) for kernel in network.kernels),
            tuple(torch.zeros_like(bias) for bias in network.biases),
        )

    def tensors(self) -> Iterator[Tensor]:
        """All of them, kernels first."""
        yield from self.kernels
        yield from self.biases


class ClippedSums:
    """Sums over a batch of every record's cross-entropy gradient, each clipped to its network's norm.

    ``inputs`` and ``targets`` hold all records; the last one is the padding and counts nothing. ``clips`` are the
    networks' norms; ``weights``, if given, multiply the networks' sums. With ``alpha`` the loss of a record is the
    convexified loss of a batch of one, `(1/a) ln[(exp(a*l) + C - 1)/C]`: its gradient is that of the cross-entropy l
    times `1/(1 + (C - 1)*p_y^a)`, since exp(-l) = p_y.
    """

    def __init__(
        self,
        network: MLP,
        inputs: Tensor,
        targets: Tensor,
        clips: Tensor,
        weights: Tensor | None = None,
        alpha: float | None = None,
    ) -> None:
        self._network, self._inputs, self._targets = network, inputs.contiguous(), targets
        self._lengths = inputs.square().sum(1)
        self._clips = clips.unsqueeze(1)
        self._weights = None if weights is None else weights.unsqueeze(1)
        self._alpha = alpha
        self._activation = activation(network.activation)

    def add_to(self, gradients: Gradients, records: Tensor) -> None:
        """Add the sums over ``records``, row indices of shape (networks, width), or (1, width) if all are alike."""
        for part in torch.split(records, _ROWS_AT_ONCE, 1):
            self._add_part(gradients, part)

    def _add_part(self, gradients: Gradients, records: Tensor) -> None:
        networks, (shared, width) = self._network.networks, records.shape
        picked = records.flatten()
        first = self._inputs[picked].view(shared, width, -1).expand(networks, -1, -1)
        signals, logits = self._forward(first)
        slopes = self._slopes(signals, logits, self._targets[picked].view(shared, width))
        norms = (self._lengths[picked].view(shared, width) + 1) * slopes[0].square().sum(-1)
        for signal, slope in zip(signals[1:], slopes[1:], strict=True):
            norms += (signal.square().sum(-1) + 1) * slope.square().sum(-1)
        factors = (self._clips / norms.sqrt_()).clamp_(max=1.0)
        factors *= records != len(self._inputs) - 1
        if self._weights is not None:
            factors *= self._weights
        lost = ~torch.isfinite(norms)
        if bool(lost.any()):
            # A record whose gradient overflows contributes nothing, rather than spoiling the sum of the others.
            factors.masked_fill_(lost, 0.0)
            signals = [signal.masked_fill(lost.unsqueeze(-1), 0.0) for signal in signals]
            slopes = [slope.masked_fill(lost.unsqueeze(-1), 0.0) for slope in slopes]
        self._add_products(gradients, signals, slopes, factors.unsqueeze(-1))

    def _forward(self, signal: Tensor) -> tuple[list[Tensor], Tensor]:
        """The input of every layer, and the logits."""
        signals = [signal]
        for kernel, bias in zip(self._network.kernels[:-1], self._network.biases[:-1], strict=True):
            signals.append(self._activation.apply_(torch.baddbmm(bias, signals[-1], kernel)))
        output = self._network.kernels[-1].transpose(1, 2)
        return signals, torch.baddbmm(self._network.biases[-1], signals[-1], output)

    def _slopes(self, signals: list[Tensor], logits: Tensor, labels: Tensor) -> list[Tensor]:
        """d loss_i / d pre-activation of every layer: for cross-entropy, p - e_y at the last."""
        slope = torch.softmax(logits, -1)
        wanted = labels.expand(len(slope), -1).unsqueeze(-1)
        probability = None if self._alpha is None else slope.gather(-1, wanted)
        slope.scatter_add_(-1, wanted, slope.new_full((), -1.0).expand(wanted.shape))
        if probability is not None and self._alpha is not None:
            slope /= 1 + (slope.shape[-1] - 1) * probability**self._alpha
        slopes = [slope]
        for depth in reversed(range(1, len(self._network.kernels))):
            kernel = self._network.kernels[depth]
            if depth < len(self._network.kernels) - 1:
                kernel = kernel.transpose(1, 2)
            slopes.insert(0, self._activation.backward(torch.bmm(slopes[0], kernel), signals[depth]))
        return slopes

    def _add_products(
        self, gradients: Gradients, signals: list[Tensor], slopes: list[Tensor], factors: Tensor
    ) -> None:
        """Sum over the records: a layer's input times its scaled slope."""
        last = len(slopes) - 1
        for depth, (signal, slope) in enumerate(zip(signals, slopes, strict=True)):
            scaled = slope.mul_(factors)
            left, right = (scaled, signal) if depth == last else (signal, scaled)
            gradients.kernels[depth].baddbmm_(left.transpose(1, 2), right)
            gradients.biases[depth].add_(scaled.sum(1, keepdim=True))

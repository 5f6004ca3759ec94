"""Sums of clipped per-example gradients: fast for K networks at once, exact for one network, and for any module.

**`ClippedSums`** of linear layers: a record's gradient in a kernel is the outer product of the layer's input a and its
slope d, of squared norm |a|^2*|d|^2, and with the bias (|a|^2 + 1)*|d|^2. Scaling its slopes by min(1, S/norm) before
one matrix product per layer sums all clipped gradients in one backward pass (Goodfellow 2015, arXiv:1510.01799; "ghost
clipping", Li et al. 2022, arXiv:2110.05679).

**`exact_clipped_sum`** is the same sum for a model that will be released. All that enters it are integer multiples of a
power of two, with so few bits that products and sums are exact: no record changes another's part (THEORY 3.8).

**`ModuleSums`** is for any other torch module, with the per-example norms of Opacus. Its floating-point sums cannot be
made exact: the noise allows for `MODULE_ROUNDING` of the clipping norm, and the guarantee names that as an assumption.

With weights of 1/k for the k rows of a person, the person contributes the mean of its clipped gradients (THEORY 3.7).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quietmax.errors import InvalidInput, short_message
from quietmax.estimators.head.exact_sums import ExactSum, _repeatable_exp
from quietmax.models.stacked import MLP, activation

Part = tuple[Tensor, Tensor, Tensor | None]
"""The inputs, the class indices and the weights of some records; no weights if all are 1."""

FAST_ROWS = 2048
"""Rows that `ClippedSums` takes at once."""
ROWS_AT_ONCE = 512
"""Rows that `exact_clipped_sum` takes at once."""
LARGEST_TABLE = 2**33
"""DP-SGD takes at most this many rows: their sums have fewer bits than the integers that hold them."""
MODULE_ROUNDING = 2.0**-10
"""Share of the clipping norm that is added to the sensitivity of a module, for sums in floating point."""
_INTEGER_ROWS = 2**19
"""Sums over this many rows fit into 63 bits: each row adds at most 2 to a sum counted in multiples of 2^-42."""
BITS = 20
_SLOPE_BITS = 22
_MANTISSA = 53
_LARGEST_LOGIT = 2.0**500
_SHORTENED = 1.0 - 2.0**-40
"""Norms computed in float64 are right up to 2^-45, and sums of k weights 1/k up to 2^-52; scaling to this share of the
clipping norm keeps the contribution of a record or person below it."""


@dataclass(frozen=True, eq=False)
class Gradients:
    """One gradient per layer, in the layout of `MLP`."""

    kernels: tuple[Tensor, ...]  # Gradients of the kernels and of the biases
    biases: tuple[Tensor, ...]

    @classmethod
    def zeros(cls, network: MLP) -> Gradients:
        """Return zeros in the shapes of a ``network``."""
        return cls(
            tuple(torch.zeros_like(kernel) for kernel in network.kernels),
            tuple(torch.zeros_like(bias) for bias in network.biases),
        )

    def tensors(self) -> Iterator[Tensor]:
        """Iterate over all tensors, kernels first."""
        yield from self.kernels
        yield from self.biases


class ClippedSums:
    """Sums of clipped cross-entropy gradients of a batch for K networks at once, times `factors[k]`.

    `read` returns records by their numbers; `padding` is the number of none.
    """

    def __init__(
        self,
        network: MLP,
        read: Callable[[Tensor], Part],
        padding: int,
        max_grad_norm: float,
        factors: Sequence[float] | None = None,
        alpha: float | None = None,
    ) -> None:
        self._network, self._read, self._padding, self._alpha = network, read, padding, alpha
        self._max_grad_norm = torch.tensor([[max_grad_norm]], dtype=network.kernels[0].dtype)
        self._factors = torch.ones(1, 1) if factors is None else torch.tensor(factors).view(-1, 1)
        self._activation = activation(network.activation)

    def add_to(self, gradients: Gradients, records: Tensor) -> None:
        """Add the sums over some records, of shape (networks or 1, records), to gradients."""
        for part in torch.split(records, FAST_ROWS, 1):
            self._add_part(gradients, part)

    def _add_part(self, gradients: Gradients, records: Tensor) -> None:
        networks, (shared, width), real = self._network.networks, records.shape, records != self._padding
        inputs, labels, weights = self._read(torch.where(real, records, 0).flatten())
        first = inputs.view(shared, width, -1)
        signals, logits = self._forward(first.expand(networks, -1, -1))
        slopes = self._slopes(signals, logits, labels.view(shared, width))
        norms = (first.square().sum(-1) + 1) * slopes[0].square().sum(-1)
        for signal, slope in zip(signals[1:], slopes[1:], strict=True):
            norms += (signal.square().sum(-1) + 1) * slope.square().sum(-1)
        factors = (self._max_grad_norm / norms.sqrt_()).clamp_(max=1.0)
        factors *= real
        factors *= self._factors
        if weights is not None:
            factors *= weights.to(factors.dtype).view(shared, width)
        lost = ~torch.isfinite(norms)
        if bool(lost.any()):
            # A record whose gradient overflows contributes nothing, rather than spoiling the sum of the others.
            factors.masked_fill_(lost, 0.0)
            signals = [signal.masked_fill(lost.unsqueeze(-1), 0.0) for signal in signals]
            slopes = [slope.masked_fill(lost.unsqueeze(-1), 0.0) for slope in slopes]
        self._add_products(gradients, signals, slopes, factors.unsqueeze(-1))

    def _forward(self, signal: Tensor) -> tuple[list[Tensor], Tensor]:
        signals = [signal]
        for kernel, bias in zip(self._network.kernels[:-1], self._network.biases[:-1], strict=True):
            signals.append(self._activation.apply_(torch.baddbmm(bias, signals[-1], kernel)))
        output = self._network.kernels[-1].transpose(1, 2)
        return signals, torch.baddbmm(self._network.biases[-1], signals[-1], output)

    def _slopes(self, signals: list[Tensor], logits: Tensor, labels: Tensor) -> list[Tensor]:
        """Return d loss_i / d pre-activation of every layer; p - e_y at the last one for cross-entropy."""
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
        """Add the sums over the records of a layer's input times its scaled slope."""
        last = len(slopes) - 1
        for depth, (signal, slope) in enumerate(zip(signals, slopes, strict=True)):
            scaled = slope.mul_(factors)
            left, right = (scaled, signal) if depth == last else (signal, scaled)
            gradients.kernels[depth].baddbmm_(left.transpose(1, 2), right)
            gradients.biases[depth].add_(scaled.sum(1, keepdim=True))


def exact_clipped_sum(
    network: MLP, inputs: Tensor, labels: Tensor, max_grad_norm: float, weights: Tensor | None = None
) -> Gradients:
    """Return the sum over all rows of the clipped cross-entropy gradients of a single network, in float64.

    One row, or a person's rows with weights of 1/k, change it by at most ``max_grad_norm`` in L2, and `rounding_share`.
    """
    slices = (slice(start, start + ROWS_AT_ONCE) for start in range(0, len(inputs), ROWS_AT_ONCE))
    parts = ((inputs[part], labels[part], None if weights is None else weights[part]) for part in slices)
    return _exact_sum_of_parts(network, parts, max_grad_norm)


def _exact_sum_of_parts(
    network: MLP, parts: Iterable[Part], max_grad_norm: float, size: int = _INTEGER_ROWS
) -> Gradients:
    """Return `exact_clipped_sum` of rows that come at most `ROWS_AT_ONCE` at a time, in any order."""
    sums = _ExactSums(network, max_grad_norm)
    for inputs, labels, weights in parts:
        sums._add(inputs.double(), labels, weights)
    return sums._gradients(size)


def exact_logits(network: MLP, rows: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the logits of a single network, one line per class; each row's follow from that row alone."""
    _, outputs = _ExactSums(network, 1.0)._forward_pass(torch.from_numpy(rows).double())
    logits: NDArray[np.float64] = outputs[-1].T.contiguous().numpy()
    return np.asarray(np.nan_to_num(logits, posinf=_LARGEST_LOGIT, neginf=-_LARGEST_LOGIT))


def rounding_share(weights: int, size: int) -> float:
    """Return how much the rounding of a finished sum can add to its sensitivity, as a share of the clipping norm.

    A coordinate is clamped to `2^(42 + b + s)` units, with b the bits after a slope's unit and `2^19 * 2^s` at least
    the public size, and rounded to float64 by at most half of its last bit, `2^(b + s - 12)` units. A unit is at most
    `2^(-21 - b)` of the clipping norm. So the difference of two sums changes by at most `2^(s - 32)` of the clipping
    norm in every coordinate; clamping moves nothing further apart.
    """
    return max(2.0**-20, math.sqrt(weights) * 2.0**-32) * 2.0 ** _more_bits(size)


def _nearest(total: ExactSum, bits: int) -> Tensor:
    high, low = total.high + (total.low >> 32), total.low & (2**32 - 1)
    # Both parts are exact in float64, so their sum is rounded once.
    nearest = torch.from_numpy(high).double() * 2.0**32 + torch.from_numpy(low).double()
    return nearest.clamp(-(2.0**bits), 2.0**bits)


def _more_bits(size: int) -> int:
    return max(0, (size - 1).bit_length() - (_INTEGER_ROWS - 1).bit_length())


class _ExactSums:
    """The public numbers of one step, and the sums so far as integers."""

    def __init__(self, network: MLP, max_grad_norm: float) -> None:
        widest = max(network.widths)
        self._bits = min(BITS, (_MANTISSA - max(1, math.ceil(math.log2(widest)))) // 2)
        self._activation, self._max_grad_norm = network.activation, max_grad_norm
        self._unit = 2.0 ** (math.frexp(max_grad_norm)[1] - _SLOPE_BITS)
        last = len(network.kernels) - 1
        plain = [kernel[0].T if depth == last else kernel[0] for depth, kernel in enumerate(network.kernels)]
        self._forward = [_kernel_on_grid(kernel, 0, self._bits) for kernel in plain]
        self._backward = [_kernel_on_grid(kernel, 1, self._bits).T for kernel in plain]
        self._biases = [bias[0].double() for bias in network.biases]
        self._kernel_sums = [torch.zeros(kernel.shape, dtype=torch.int64) for kernel in plain]
        self._bias_sums = [torch.zeros(bias.shape[1], dtype=torch.int64) for bias in self._biases]
        self._rows = 0
        self._earlier = [ExactSum.of(total.numpy()) for total in (*self._kernel_sums, *self._bias_sums)]

    def _add(
        self,
        rows: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Add at most `ROWS_AT_ONCE` records, each times its weight; return the clipped slopes of the layer before.

        With lengths, rows are outputs of that layer, and bounds on its inputs; its gradients are clipped too.
        """
        if self._rows + len(rows) > _INTEGER_ROWS:
            self._carry()
        self._rows += len(rows)
        signals, slopes = self._pass(rows, labels)
        squares = torch.zeros(len(rows), 1, dtype=torch.float64)
        for (size, signal), (steepness, slope) in zip(signals, slopes, strict=True):
            length = size * size * signal.square().sum(1, keepdim=True) + 1.0
            squares = squares + length * (steepness * steepness * slope.square().sum(1, keepdim=True))
        below = torch.zeros(len(rows), 0, dtype=torch.float64)
        if lengths is not None:
            steepness, slope = self._through(*slopes[0], *signals[0], 0)
            below = steepness * slope
            squares = squares + (lengths * steepness).square() * slope.square().sum(1, keepdim=True)
        limit = self._max_grad_norm * _SHORTENED
        factors = limit / torch.clamp(squares.sqrt(), min=limit)
        factors = torch.where(torch.isfinite(squares), factors, 0.0)
        if weights is not None:
            factors = factors * weights.unsqueeze(1)
        for depth, ((size, signal), (steepness, slope)) in enumerate(zip(signals, slopes, strict=True)):
            scaled = factors * steepness * slope
            kernel = signal.T @ self._units(size * scaled)
            # Integer multiples of 2^-bits times integers: a shift makes them integers.
            self._kernel_sums[depth] += (kernel * 2.0**self._bits).to(torch.int64)
            self._bias_sums[depth] += self._units(scaled).sum(0).to(torch.int64)
        return factors * below

    def _carry(self) -> list[ExactSum]:
        """Move the sums of the last rows into pairs of integers, which hold all rows; return these."""
        totals = [*self._kernel_sums, *self._bias_sums]
        self._earlier = [
            earlier + ExactSum.of(total.numpy()) for earlier, total in zip(self._earlier, totals, strict=True)
        ]
        for total in totals:
            total.zero_()
        self._rows = 0
        return self._earlier

    def _gradients(self, size: int) -> Gradients:
        """Return the sums in the layout of `MLP`, clamped and rounded to float64; see `rounding_share`."""
        limit = 42 + _more_bits(size)
        sums, depth = self._carry(), len(self._kernel_sums)
        kernels = [
            _nearest(total, limit + self._bits) * (self._unit * 2.0**-self._bits) for total in sums[:depth]
        ]
        kernels[-1] = kernels[-1].T
        biases = [_nearest(total, limit) * self._unit for total in sums[depth:]]
        return Gradients(
            tuple(kernel.unsqueeze(0) for kernel in kernels),
            tuple(bias.view(1, 1, -1) for bias in biases),
        )

    def _units(self, values: Tensor) -> Tensor:
        """Round towards zero to integer multiples of the unit; what is not finite counts as 0."""
        return torch.nan_to_num(values / self._unit, nan=0.0, posinf=0.0, neginf=0.0).trunc()

    def _forward_pass(self, rows: Tensor) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
        """Return every layer's input, as a power of two and a row on the grid, and its output before activation."""
        signals, outputs = [_scaled(rows, self._bits)], []
        for depth, (kernel, bias) in enumerate(zip(self._forward, self._biases, strict=True)):
            size, signal = signals[-1]
            outputs.append(size * (signal @ kernel) + bias)
            if depth < len(self._forward) - 1:
                signals.append(_scaled(_activated(self._activation, outputs[-1]), self._bits))
        return signals, outputs

    def _pass(
        self, rows: Tensor, labels: Tensor
    ) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
        """Return every layer's input and slope, each as a power of two and a row on the grid."""
        signals, outputs = self._forward_pass(rows)
        slope = _probabilities(outputs[-1])
        slope[torch.arange(len(labels)), labels] -= 1.0
        slopes = [_scaled(slope, self._bits)]
        for depth in reversed(range(1, len(self._backward))):
            slopes.insert(0, self._through(*slopes[0], *signals[depth], depth))
        return signals, slopes

    def _through(
        self, steepness: Tensor, slope: Tensor, size: Tensor, signal: Tensor, depth: int
    ) -> tuple[Tensor, Tensor]:
        """Return the slope of the layer before, whose output is the signal."""
        through = steepness * (slope @ self._backward[depth])
        return _scaled(through * _derivative(self._activation, size * signal), self._bits)


def _scaled(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Split rows into powers of two and multiples of 2^-bits below 1; rows that are not finite count as 0."""
    largest = rows.abs().amax(1, keepdim=True)
    safe = torch.where(largest < 2.0**500, rows, 0.0)
    exponents = torch.frexp(torch.where(largest < 2.0**500, largest, 0.0)).exponent
    powers = _power_of_two(exponents.clamp(min=-500))
    return powers, (safe / powers * 2.0**bits).trunc() * 2.0**-bits


def _power_of_two(exponents: Tensor) -> Tensor:
    """Return 2^k for integers k from -1022 to 1023, by its bits: library powers need not be exact."""
    return ((exponents.to(torch.int64) + 1023) << 52).view(torch.float64)


def _kernel_on_grid(kernel: Tensor, contracted: int, bits: int) -> Tensor:
    """Round a kernel so that its product with rows on the grid, along the axis `contracted`, is exact."""
    weights = kernel.double()
    largest = float(weights.abs().sum(contracted).max())
    free = _MANTISSA - 1 - bits - max(0, math.frexp(largest)[1])
    unit = 2.0 ** min(free, 40)
    return (weights * unit).round() / unit


def _exponential(values: Tensor) -> Tensor:
    """Compute exp(x) for x <= 0, for every number alone."""
    return torch.from_numpy(_repeatable_exp(values.numpy()))


def _probabilities(logits: Tensor) -> Tensor:
    """Compute the softmax; the weights are integer multiples of 2^-40, so that their sum is exact."""
    weights = _exponential(logits - logits.amax(1, keepdim=True))
    weights = (weights * 2.0**40).round() * 2.0**-40
    return weights / weights.sum(1, keepdim=True)


def _activated(name: str, values: Tensor) -> Tensor:
    if name == "relu":
        return torch.clamp(values, min=0.0)
    if name == "tanh":
        small = _exponential(-2.0 * values.abs())
        return torch.sign(values) * ((1.0 - small) / (1.0 + small))
    small = _exponential(-values.abs())
    share = 1.0 / (1.0 + small)
    return torch.where(values < 0.0, small * share, share)


def _derivative(name: str, outputs: Tensor) -> Tensor:
    if name == "relu":
        return (outputs > 0.0).double()
    return 1.0 - outputs * outputs if name == "tanh" else outputs * (1.0 - outputs)


# --- Any module -------------------------------------------------------------------------------------------------------


class ModuleSums:
    """Sums of clipped per-example gradients of a module wrapped by Opacus."""

    def __init__(self, module: torch.nn.Module, max_grad_norm: float) -> None:
        self._module, self._max_grad_norm = module, max_grad_norm
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not self.parameters:
            raise InvalidInput("The module has no trainable parameter.")
        self._wrapped = self._wrap(ghost=True)

    def _wrap(self, *, ghost: bool) -> Any:
        try:
            from opacus.grad_sample import GradSampleModuleFastGradientClipping  # type: ignore[import-untyped]
            from opacus.validators import ModuleValidator  # type: ignore[import-untyped]
            from opacus.validators.errors import UnsupportedModuleError  # type: ignore[import-untyped]
        except ImportError as problem:
            raise InvalidInput(
                "DP-SGD with a module of your own requires Opacus: pip install opacus."
            ) from problem
        try:
            ModuleValidator.validate(self._module, strict=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return GradSampleModuleFastGradientClipping(
                    self._module,
                    loss_reduction="sum",
                    max_grad_norm=self._max_grad_norm,
                    use_ghost_clipping=ghost,
                )
        except (UnsupportedModuleError, NotImplementedError) as problem:
            raise InvalidInput(
                f"The module mixes records or cannot be clipped per record ({short_message(problem)}). For instance, "
                "BatchNorm is not supported; GroupNorm is."
            ) from problem

    def add_to(self, sums: list[Tensor], inputs: Tensor, labels: Tensor, weights: Tensor) -> None:
        """Add the clipped gradients of these records, each times its weight."""
        if not len(labels):
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                finite = self._clip_and_sum(inputs, labels, weights)
            except NotImplementedError:
                # Tied weights: Opacus clips them without ghosts.
                self._unwrapped()
                self._wrapped = self._wrap(ghost=False)
                finite = self._clip_and_sum(inputs, labels, weights)
        if not bool(finite.all()):
            # A record whose gradient overflows contributes nothing, rather than spoiling the sum of the others.
            self.add_to(sums, inputs[finite], labels[finite], weights[finite])
            return
        for total, parameter in zip(sums, self.parameters, strict=True):
            if parameter.grad is not None:
                total += parameter.grad

    def _clip_and_sum(self, inputs: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Leave the clipped sum in the parameters' gradients; return which records have finite gradients."""
        wrapped = self._wrapped
        wrapped.zero_grad()
        losses = torch.nn.functional.cross_entropy(wrapped(inputs), labels, reduction="none")
        losses.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
        norms = wrapped.get_norm_sample()
        finite: Tensor = torch.isfinite(norms) & torch.isfinite(losses)
        wrapped.zero_grad()
        wrapped.disable_hooks()
        try:
            weighted = (weights * torch.clamp(self._max_grad_norm / norms, max=1.0) * losses).sum()
            weighted.backward()  # type: ignore[no-untyped-call]
        finally:
            wrapped.enable_hooks()
        return finite

    def _unwrapped(self) -> torch.nn.Module:
        self._wrapped.zero_grad()
        module: torch.nn.Module = self._wrapped.to_standard_module()
        for parameter in self.parameters:
            parameter.grad = None
        return module

"""The clipped gradient sum of one network without rounding: what one record adds is a function of that record alone.

Differential privacy is proven for exact sums. A floating-point sum depends on the order of its terms, a matrix
product on the shape and place of its rows, and the sensitivity of the rounded result can exceed that of the true one
(Casacuberta et al. 2022). As in the private head, every number that enters a product or a sum is a whole multiple of
a power of two with so few bits that float64 holds all partial results exactly, in any order:

* a layer's input a and slope d of one record are a power of two (from its own largest entry) times whole multiples of
  2^-BITS, at most 1 in size;
* kernels are rounded to a grid on which a product of such a row with any column is exact; they are public, so that is
  post-processing;
* the clipped slopes are rounded towards zero, so that no norm grows, to a grid on which the sum over a block of records
  is exact; blocks are added as 64-bit integers.

Between products there are only additions, multiplications, divisions and square roots of single numbers, which are
correctly rounded wherever they stand; exponentials are made of those. How the gradients are clipped in closed form is
explained in `clipped_sums`; the tests hold the two against each other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quietmax.models.clipped_sums import Gradients
from quietmax.models.mlp import MLP

BITS = 20
ROWS_AT_ONCE = 512
LARGEST_BATCH = 2**19
"""More records would overflow 63 bits: each adds at most 2 to a sum counted in multiples of 2^-42."""
_SLOPE_BITS = 22
_MANTISSA = 53
_SHORTENED = 1.0 - 2.0**-40
"""Norms computed in float64 are right up to 2^-45; scaling to this much less than the clip keeps them below it."""


def exact_clipped_sum(network: MLP, inputs: Tensor, labels: Tensor, clip: float) -> Gradients:
    """Return the sum over all rows of the clipped cross-entropy gradients of a single network, in float64.

    One row more or less changes it by at most ``clip`` in L2, up to the rounding of the finished sum to float64.
    """
    work = _Work(network, clip)
    for start in range(0, len(inputs), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        work.add(inputs[part].double(), labels[part])
    return work.sums()


class _Work:
    """The public numbers of one step, and the sums so far as whole numbers."""

    def __init__(self, network: MLP, clip: float) -> None:
        widest = max(network.widths)
        self._bits = min(BITS, (_MANTISSA - max(1, math.ceil(math.log2(widest)))) // 2)
        self._activation, self._clip = network.activation, clip
        self._unit = 2.0 ** (math.frexp(clip)[1] - _SLOPE_BITS)
        last = len(network.kernels) - 1
        plain = [kernel[0].T if depth == last else kernel[0] for depth, kernel in enumerate(network.kernels)]
        self._forward = [_kernel_on_grid(kernel, 0, self._bits) for kernel in plain]
        self._backward = [_kernel_on_grid(kernel, 1, self._bits).T for kernel in plain]
        self._biases = [bias[0].double() for bias in network.biases]
        self._kernel_sums = [torch.zeros(kernel.shape, dtype=torch.int64) for kernel in plain]
        self._bias_sums = [torch.zeros(bias.shape[1], dtype=torch.int64) for bias in self._biases]

    def add(self, rows: Tensor, labels: Tensor) -> None:
        """Add some records: at most `ROWS_AT_ONCE`."""
        signals, slopes = self._pass(rows, labels)
        squares = torch.zeros(len(rows), 1, dtype=torch.float64)
        for (size, signal), (steepness, slope) in zip(signals, slopes, strict=True):
            length = size * size * signal.square().sum(1, keepdim=True) + 1.0
            squares = squares + length * (steepness * steepness * slope.square().sum(1, keepdim=True))
        limit = self._clip * _SHORTENED
        factors = limit / torch.clamp(squares.sqrt(), min=limit)
        factors = torch.where(torch.isfinite(squares), factors, 0.0)
        for depth, ((size, signal), (steepness, slope)) in enumerate(zip(signals, slopes, strict=True)):
            scaled = factors * steepness * slope
            kernel = signal.T @ self._whole(size * scaled)
            # Whole multiples of 2^-bits times whole numbers: a shift makes them whole.
            self._kernel_sums[depth] += (kernel * 2.0**self._bits).to(torch.int64)
            self._bias_sums[depth] += self._whole(scaled).sum(0).to(torch.int64)

    def sums(self) -> Gradients:
        """The sums in the layout of `MLP`."""
        kernels = [total.double() * (self._unit * 2.0**-self._bits) for total in self._kernel_sums]
        kernels[-1] = kernels[-1].T
        return Gradients(
            tuple(kernel.unsqueeze(0) for kernel in kernels),
            tuple((total.double() * self._unit).view(1, 1, -1) for total in self._bias_sums),
        )

    def _whole(self, values: Tensor) -> Tensor:
        """Towards zero to whole multiples of the unit; what is not finite counts nothing."""
        return torch.nan_to_num(values / self._unit, nan=0.0, posinf=0.0, neginf=0.0).trunc()

    def _pass(
        self, rows: Tensor, labels: Tensor
    ) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
        """Every layer's input and slope, each as a power of two and a row on the grid."""
        signals, outputs = [_scaled(rows, self._bits)], []
        for depth, (kernel, bias) in enumerate(zip(self._forward, self._biases, strict=True)):
            size, signal = signals[-1]
            outputs.append(size * (signal @ kernel) + bias)
            if depth < len(self._forward) - 1:
                signals.append(_scaled(_activated(self._activation, outputs[-1]), self._bits))
        slope = _probabilities(outputs[-1])
        slope[torch.arange(len(labels)), labels] -= 1.0
        slopes = [_scaled(slope, self._bits)]
        for depth in reversed(range(1, len(self._backward))):
            steepness, slope = slopes[0]
            size, signal = signals[depth]
            through = steepness * (slope @ self._backward[depth])
            slopes.insert(0, _scaled(through * _derivative(self._activation, size * signal), self._bits))
        return signals, slopes


def _scaled(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Powers of two of shape (n, 1), and rows of whole multiples of 2^-bits below 1 in size: their product is `rows`.

    Up to rounding towards zero. A row with an entry that is undefined or beyond 2^500 is read as 0.
    """
    largest = rows.abs().amax(1, keepdim=True)
    safe = torch.where(largest < 2.0**500, rows, 0.0)
    exponents = torch.frexp(torch.where(largest < 2.0**500, largest, 0.0)).exponent
    powers = _power_of_two(exponents.clamp(min=-500))
    return powers, (safe / powers * 2.0**bits).trunc() * 2.0**-bits


def _power_of_two(exponents: Tensor) -> Tensor:
    """2^k for whole k from -1022 to 1023, by its bits: library powers need not be exact."""
    return ((exponents.to(torch.int64) + 1023) << 52).view(torch.float64)


def _kernel_on_grid(kernel: Tensor, contracted: int, bits: int) -> Tensor:
    """Round a kernel so that its product with rows on the grid, along the axis `contracted`, is exact.

    Partial sums are at most the largest sum of absolute weights, in multiples of 2^-bits times the grid.
    """
    weights = kernel.double()
    largest = float(weights.abs().sum(contracted).max())
    free = _MANTISSA - 1 - bits - max(0, math.frexp(largest)[1])
    unit = 2.0 ** min(free, 40)
    return (weights * unit).round() / unit


def _exponential(values: Tensor) -> Tensor:
    """exp(x) for x <= 0 to about 2 units in the last place, by additions and multiplications alone.

    Library exponentials may round differently at the end of an array than inside it.
    """
    limited = torch.clamp(values, min=-700.0)
    powers = (limited * 1.4426950408889634).round()
    rest = limited - powers * 0.693147180369123816490  # ln 2 with its last bits zero: the product is exact
    rest = rest - powers * 1.90821492927058770002e-10
    result = torch.full_like(rest, 1.0 / math.factorial(13))
    for order in range(12, -1, -1):
        result = result * rest
        result = result + 1.0 / math.factorial(order)
    return result * _power_of_two(powers)


def _probabilities(logits: Tensor) -> Tensor:
    """Softmax; the weights are whole multiples of 2^-40, so that their sum is exact."""
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

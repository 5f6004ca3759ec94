"""Hidden-layer activations, each with its derivative written in terms of its own output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quietmax.errors import InvalidInput


@dataclass(frozen=True)
class Activation:
    """``bound`` is the largest absolute output (the paper's a_u), None where there is none.

    ``apply_`` overwrites pre-activations with outputs; ``backward`` turns d loss / d output into
    d loss / d pre-activation, given the output.
    """

    name: str
    bound: float | None
    apply_: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


_MINUS_ONE = torch.tensor(-1.0)


def _tanh_(values: Tensor) -> Tensor:
    # tanh(x) = 2*sigmoid(2x) - 1: the same to 2e-7 in float32 and over twice as fast as torch.tanh on a CPU.
    return torch.add(_MINUS_ONE.to(values.dtype), values.mul_(2).sigmoid_(), alpha=2, out=values)


def _relu_backward(slope: Tensor, output: Tensor) -> Tensor:
    return torch.ops.aten.threshold_backward(slope, output, 0)  # type: ignore[no-any-return]


_ALL = (
    Activation("tanh", 1.0, _tanh_, torch.ops.aten.tanh_backward),
    Activation("sigmoid", 1.0, torch.sigmoid_, torch.ops.aten.sigmoid_backward),
    Activation("relu", None, torch.relu_, _relu_backward),
)
ACTIVATIONS: dict[str, Activation] = {each.name: each for each in _ALL}


def activation(name: str) -> Activation:
    """Look an activation up by its name.

    >>> activation("tanh").bound
    1.0
    """
    if name not in ACTIVATIONS:
        raise InvalidInput(f"There is no activation {name!r}; choose one of {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]

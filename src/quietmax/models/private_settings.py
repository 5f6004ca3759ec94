"""How DP-SGD trains, and how its noisy gradients move the weights."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from quietmax.errors import InvalidInput
from quietmax.models.activations import activation
from quietmax.models.adam import adam_step
from quietmax.models.clipped_sums import Gradients
from quietmax.models.mlp import MLP

Optimiser = Literal["sgd", "momentum", "adam"]
Sampling = Literal["poisson", "shuffled"]

_MOMENTUM = 0.9


@dataclass(frozen=True)
class PrivateSettings:
    """Everything but the data, the noise and the seed; public numbers, none computed from private records.

    ``sampling`` "poisson" takes each record with probability ``sampling_rate`` in every step; "shuffled" goes through
    the records in a new order each epoch, in batches of ``sampling_rate * size`` (what most programs do, and no
    accountant here proves). ``l2`` is as in `TrainingSettings`: its gradient is added after the noise, being no
    function of the records.
    """

    hidden: tuple[int, ...] = ()
    activation: str = "tanh"
    sampling_rate: float = 0.1
    steps: int = 100
    clip: float = 1.0
    learning_rate: float = 1.0
    optimiser: Optimiser = "sgd"
    l2: float = 0.0
    sampling: Sampling = "poisson"

    def __post_init__(self) -> None:
        activation(self.activation)
        object.__setattr__(self, "hidden", tuple(self.hidden))
        if any(width < 1 for width in self.hidden):
            raise InvalidInput(
                f"Hidden widths {self.hidden} must all be at least 1; leave the layer out instead."
            )
        if self.optimiser not in ("sgd", "momentum", "adam") or self.sampling not in ("poisson", "shuffled"):
            raise InvalidInput(
                f"The optimiser is {self.optimiser!r} and the sampling {self.sampling!r}, but must be sgd, momentum or "
                "adam, and poisson or shuffled: name such ones."
            )
        if not 0 < self.sampling_rate <= 1 or self.steps < 1 or int(self.steps) != self.steps:
            raise InvalidInput(
                f"The sampling rate is {self.sampling_rate} and the number of steps {self.steps}, but must be from "
                "above 0 to 1, and a whole number from 1 up: give such numbers."
            )
        for name in ("clip", "learning_rate"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise InvalidInput(f"{name} is {getattr(self, name)}, but it must be positive; try 1.")
        if not (math.isfinite(self.l2) and self.l2 >= 0):
            raise InvalidInput(f"The L2 coefficient is {self.l2}, but it must be 0 or more; try 0.")

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self) | {"hidden": list(self.hidden)}


class Update:
    """Takes a step with noisy mean gradients and the L2 penalty's ``2*l2*kernel``; holds the optimiser's state."""

    def __init__(self, network: MLP, settings: PrivateSettings) -> None:
        self._settings = settings
        self._groups = ((network.kernels, 2 * settings.l2), (network.biases, 0.0))
        states = {"sgd": 0, "momentum": 1, "adam": 2}[settings.optimiser]
        self._states = [
            [[torch.zeros_like(tensor) for tensor in tensors] for _ in range(states)]
            for tensors, _ in self._groups
        ]
        self._taken = [torch.zeros(()) for _ in network.kernels]

    def take(self, gradients: Gradients) -> None:
        """Move the network's weights; may overwrite ``gradients``."""
        for count in self._taken:
            count += 1
        for (weights, decay), given, states in zip(
            self._groups, (gradients.kernels, gradients.biases), self._states, strict=True
        ):
            if self._settings.optimiser == "adam":
                means, squares = states
                rate = self._settings.learning_rate
                adam_step(weights, given, means, squares, self._taken, learning_rate=rate, decay=decay)
                continue
            for index, (weight, gradient) in enumerate(zip(weights, given, strict=True)):
                moved = gradient.add_(weight, alpha=decay) if decay else gradient
                if states:
                    moved = states[0][index].mul_(_MOMENTUM).add_(moved)
                weight.sub_(moved, alpha=self._settings.learning_rate)

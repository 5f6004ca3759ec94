"""How DP-SGD trains, and how its noisy gradients move the weights."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from quietmax.accounting.dpsgd import Accountant, NoiseAnalysis, Schedule, noise_multiplier
from quietmax.errors import InvalidInput
from quietmax.estimators.dpsgd.gradients import Gradients
from quietmax.estimators.validation import checked_size
from quietmax.models.mlp import MLP, activation
from quietmax.models.stacked import adam_step

Optimizer = Literal["sgd", "momentum", "adam"]
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
    max_grad_norm: float = 1.0
    learning_rate: float = 1.0
    optimizer: Optimizer = "sgd"
    l2: float = 0.0
    sampling: Sampling = "poisson"

    def __post_init__(self) -> None:
        activation(self.activation)
        object.__setattr__(self, "hidden", tuple(self.hidden))
        if any(width < 1 for width in self.hidden):
            raise InvalidInput(
                f"Hidden widths {self.hidden} must all be at least 1; leave the layer out instead."
            )
        if self.optimizer not in ("sgd", "momentum", "adam") or self.sampling not in ("poisson", "shuffled"):
            raise InvalidInput(
                f"The optimiser is {self.optimizer!r} and the sampling {self.sampling!r}, but must be sgd, momentum or "
                "adam, and poisson or shuffled: name such ones."
            )
        if not 0 < self.sampling_rate <= 1 or self.steps < 1 or int(self.steps) != self.steps:
            raise InvalidInput(
                f"The sampling rate is {self.sampling_rate} and the number of steps {self.steps}, but must be from "
                "above 0 to 1, and a whole number from 1 up: give such numbers."
            )
        for name in ("max_grad_norm", "learning_rate"):
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
        states = {"sgd": 0, "momentum": 1, "adam": 2}[settings.optimizer]
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
            if self._settings.optimizer == "adam":
                means, squares = states
                rate = self._settings.learning_rate
                adam_step(weights, given, means, squares, self._taken, learning_rate=rate, decay=decay)
                continue
            for index, (weight, gradient) in enumerate(zip(weights, given, strict=True)):
                moved = gradient.add_(weight, alpha=decay) if decay else gradient
                if states:
                    moved = states[0][index].mul_(_MOMENTUM).add_(moved)
                weight.sub_(moved, alpha=self._settings.learning_rate)


Preset = Literal["default", "paper"]
PRESETS: tuple[Preset, ...] = ("default", "paper")

LOGIT_NOISE = 1.5
"""kappa: standard deviation that all noise together may have on a logit."""
SMALLEST_BATCH, SMALLEST_RATE, STEPS = 1000, 0.1, 100
CLIP_SHARE = 0.2
"""The max_grad_norm norm as a share of the length of the features and the bias."""
LONGEST_STEP = 5.0
"""With hardly any noise a step is limited for stability: eta * S * L is at most this."""
ADAM_RATE = 0.01
LENGTH_PER_COLUMN = 0.3
"""Records encoded into [0, 1] have about this length per root of the number of columns."""
PAPER_BATCH, PAPER_EPOCHS = 100, 100
_MOMENTUM_GAIN = {"sgd": 1.0, "momentum": 10.0}


@dataclass(frozen=True)
class Plan:
    """All that training needs to know: settings, noise, and what they promise."""

    settings: PrivateSettings
    noise_multiplier: float
    epsilon: float
    delta: float
    accountant: Accountant
    analysis: NoiseAnalysis
    size: int

    @property
    def schedule(self) -> Schedule:
        """Sampling rate and steps."""
        return Schedule(self.settings.sampling_rate, self.settings.steps)

    def to_json(self) -> dict[str, Any]:
        """Every public number by name."""
        return {
            **self.settings.to_json(),
            "noise_multiplier": self.noise_multiplier,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "accountant": self.accountant,
            "analysis": self.analysis,
            "epochs": self.schedule.epochs,
            "declared_size": self.size,
        }


def plan(
    size: int,
    *,
    epsilon: float,
    delta: float | None = None,
    accountant: Accountant = "pld",
    analysis: NoiseAnalysis = "proven",
    preset: Preset = "default",
    length: float = 1.0,
    **given: Any,
) -> Plan:
    """Fill in what is not given (fields of `PrivateSettings`) for a declared size and a length of the features.

    >>> chosen = plan(10_000, epsilon=1.0, preset="paper", accountant="zcdp", analysis="published")
    >>> chosen.settings.steps, chosen.settings.sampling, round(chosen.noise_multiplier, 1)
    (10000, 'shuffled', 49.0)
    """
    if preset not in PRESETS:
        raise InvalidInput(f"The preset is {preset!r}, but must be one of {', '.join(PRESETS)}: name one.")
    size = checked_size(size)
    if not 0 < length < math.inf:
        raise InvalidInput(
            f"The length of the features is {length!r}, but must be positive: give such a one."
        )
    wanted = {name: value for name, value in given.items() if value is not None}
    wanted["sampling"] = "poisson" if analysis == "proven" else "shuffled"
    promised = 1 / (10 * size) if delta is None else delta
    start = _paper(size) if preset == "paper" else _default(size, length)
    if preset == "paper" and "sampling_rate" in wanted and "steps" not in wanted:
        wanted["steps"] = max(1, round(PAPER_EPOCHS / wanted["sampling_rate"]))
    settings = replace(start, **wanted)
    schedule = Schedule(settings.sampling_rate, settings.steps)
    multiplier = noise_multiplier(epsilon, promised, schedule, accountant=accountant, analysis=analysis)
    if preset == "default" and "learning_rate" not in wanted:
        settings = replace(settings, learning_rate=_rate(settings, multiplier, size, length))
    return Plan(settings, multiplier, float(epsilon), float(promised), accountant, analysis, int(size))


def _default(size: int, length: float) -> PrivateSettings:
    return PrivateSettings(
        sampling_rate=min(1.0, max(SMALLEST_RATE, SMALLEST_BATCH / size)),
        steps=STEPS,
        max_grad_norm=CLIP_SHARE * math.sqrt(length * length + 1),
        optimizer="momentum",
    )


def _paper(size: int) -> PrivateSettings:
    rate = min(1.0, PAPER_BATCH / size)
    return PrivateSettings(
        hidden=(128,),
        sampling_rate=rate,
        steps=max(1, round(PAPER_EPOCHS / rate)),
        max_grad_norm=1.0,
        learning_rate=0.001,
        optimizer="adam",
        l2=0.001,
    )


def _rate(settings: PrivateSettings, multiplier: float, size: int, length: float) -> float:
    """The step size at which all noise together has standard deviation `LOGIT_NOISE` on a logit."""
    if settings.optimizer == "adam":
        return ADAM_RATE
    gain = _MOMENTUM_GAIN[settings.optimizer]
    noise = multiplier * math.sqrt(settings.steps) * gain / (settings.sampling_rate * size)
    return min(LOGIT_NOISE / noise, LONGEST_STEP) / (settings.max_grad_norm * length)

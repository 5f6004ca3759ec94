"""Settings of DP-SGD: presets, the noise multiplier, and the default learning rate.

All settings follow from public numbers. The rule of the "default" preset is one number: the learning rate is chosen so
that all noise together has a given standard deviation on a logit.

Features are centred if the first `centring_steps` steps release their mean (`training.released_centre`). Rows then have
a known length, `ROW_LENGTH` beside the constant 1 of the bias, and a rule like that of the private head holds: a
clipping norm of 0.2 and noise of 0.9 on a logit, whatever the features, the classes, the size and epsilon. Features of
tables that are scaled by their mean take 0.5 and 0.8. The learning rate falls over the last 30% of the steps:
where noise allows long steps, they oscillate in a few directions, and the last, short ones end that. All steps have the
same noise, so a rate that falls from the start would waste more of the budget on short steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quietmax.accounting.dpsgd import Accountant, NoiseAnalysis, Schedule, noise_multiplier
from quietmax.errors import InvalidInput
from quietmax.estimators.training_set import check_choice, check_positive, checked_size
from quietmax.models.mlp import activation

Optimizer = Literal["sgd", "momentum", "adam"]
Sampling = Literal["poisson", "shuffled"]
Preset = Literal["default", "paper"]
PRESETS: tuple[Preset, ...] = ("default", "paper")
Inputs = Literal["plain", "centred", "scaled"]
"""What the network sees: features as they are, centred rows, or centred rows that are scaled by the released mean."""

ROW_LENGTH = 5.0
"""Length of a centred row. The bias, a constant feature of 1, is then a fifth of it."""
CENTRING_SHARE = 0.05
"""Share of the steps that release the mean of the features."""
CENTRED_RATE, CENTRED_DECAY = 0.5, 0.3
"""With centring: the sampling rate, and the share of the steps over which the learning rate falls."""
CENTRED_NOISE, SCALED_NOISE, LOGIT_NOISE = 0.9, 0.8, 1.5
"""kappa, the standard deviation of all noise together on a logit: centred, centred and scaled, not centred."""
CLIPPING_SHARE, SCALED_CLIPPING_SHARE = 0.2, 0.5
"""The clipping norm as a share of the length of the features and the bias; the second for scaled features."""
SMALLEST_BATCH, SMALLEST_RATE, STEPS = 1000, 0.1, 100
LONGEST_TRAINING, LONGEST_STEP = 30_000.0, 5.0
"""With hardly any noise, learning_rate * max_grad_norm * length is limited: its sum over all steps for centred rows,
times the gain of momentum, and each step otherwise."""
ADAM_RATE = 0.01
LENGTH_PER_COLUMN = 0.3
"""Records encoded into [0, 1] have about this length per root of the number of columns."""
PAPER_BATCH, PAPER_EPOCHS = 100, 100
LATER_FIELDS = ("centring_steps", "decay")
"""Settings that older models do not have; 0 stands for them."""
_MOMENTUM_GAIN = {"sgd": 1.0, "momentum": 10.0}


@dataclass(frozen=True)
class DPSGDSettings:
    """The network of a `DPSGD` and its training, where the preset is not wanted. All are public numbers.

    Parameters
    ----------
    hidden : sequence of int, optional
        Widths of the hidden layers. What is None comes from the preset.
    activation : {"tanh", "sigmoid", "relu"}, optional
        Activation of the hidden layers.
    sampling_rate : float, optional
        Poisson sampling rate.
    steps : int, optional
        Number of steps, with those for centring.
    centring_steps : int, optional
        How many of the steps, the first ones, release the mean of the features, by which all rows are centred; 0 leaves
        centring out. By default 5% of the steps, and 0 with ``preset="paper"``, ``analysis="published"`` or a
        ``network``, which cannot have it.
    max_grad_norm : float, optional
        Per-example gradient clipping norm.
    learning_rate : float, optional
        Step size, before it falls.
    decay : float, optional
        Share of the gradient steps, the last ones, over which the learning rate falls linearly to almost zero.
    optimizer : {"sgd", "momentum", "adam"}, optional
        What the noisy gradients are given to.
    l2 : float, optional
        L2 penalty on the kernels.
    length : float, optional
        A public guess at the length of a record's features. With centring, features are clipped to it; without, the
        default step size follows from it. By default the length that public random records in [0, 1] have after the
        feature map, or 0.3 per root of the number of columns without a map.

    Examples
    --------
    >>> DPSGDSettings(hidden=(32,), steps=200).hidden
    (32,)
    """

    hidden: Sequence[int] | None = None
    activation: str | None = None
    sampling_rate: float | None = None
    steps: int | None = None
    centring_steps: int | None = None
    max_grad_norm: float | None = None
    learning_rate: float | None = None
    decay: float | None = None
    optimizer: Optimizer | None = None
    l2: float | None = None
    length: float | None = None


@dataclass(frozen=True)
class PrivateSettings:
    """Settings of DP-SGD, except the data, the noise and the seed. All are public numbers."""

    hidden: tuple[int, ...] = ()  # Widths of the hidden layers; () is a linear model
    activation: str = "tanh"  # Activation of the hidden layers: "tanh", "sigmoid" or "relu"
    sampling_rate: float = 0.1
    steps: int = 100  # Number of steps, with those for centring
    max_grad_norm: float = 1.0  # Per-example gradient clipping norm
    learning_rate: float = 1.0  # Step size, before it falls
    optimizer: Optimizer = "sgd"  # What the noisy gradients are given to
    l2: float = 0.0  # L2 penalty on the kernels
    sampling: Sampling = "poisson"  # "poisson" takes each record independently in every step
    centring_steps: int = 0
    decay: float = 0.0

    def __post_init__(self) -> None:
        activation(self.activation)
        object.__setattr__(self, "hidden", tuple(self.hidden))
        if any(width < 1 for width in self.hidden):
            raise InvalidInput(f"Widths of hidden layers must be at least 1, got {self.hidden}.")
        check_choice("optimizer", self.optimizer, ("sgd", "momentum", "adam"))
        check_choice("sampling", self.sampling, ("poisson", "shuffled"))
        if not 0 < self.sampling_rate <= 1:
            raise InvalidInput(f"sampling_rate must be above 0 and at most 1, got {self.sampling_rate}.")
        if self.steps < 1 or int(self.steps) != self.steps:
            raise InvalidInput(f"steps must be an integer, at least 1, got {self.steps}.")
        if not 0 <= self.centring_steps < self.steps or int(self.centring_steps) != self.centring_steps:
            raise InvalidInput(
                f"centring_steps must be an integer from 0 to {self.steps - 1} with {self.steps} steps, got "
                f"{self.centring_steps}."
            )
        if self.centring_steps and self.sampling != "poisson":
            raise InvalidInput("centring_steps requires Poisson sampling (analysis='proven').")
        check_positive(max_grad_norm=self.max_grad_norm, learning_rate=self.learning_rate)
        if not 0 <= self.decay <= 1:
            raise InvalidInput(f"decay must be from 0 to 1, got {self.decay}.")
        if not 0 <= self.l2 < math.inf:
            raise InvalidInput(f"l2 must be at least 0, got {self.l2}.")

    def to_json(self) -> dict[str, Any]:
        """Return all fields by name; those of `LATER_FIELDS` only if they are not 0."""
        fields = asdict(self) | {"hidden": list(self.hidden)}
        return {name: value for name, value in fields.items() if value or name not in LATER_FIELDS}

    @property
    def gradient_steps(self) -> int:
        """Number of steps that release a gradient."""
        return self.steps - self.centring_steps

    def learning_rates(self) -> NDArray[np.float64]:
        """Return the learning rate of every gradient step."""
        left = np.arange(self.gradient_steps, 0, -1)
        factors = np.minimum(1.0, left / max(1.0, self.decay * self.gradient_steps))
        return np.asarray(self.learning_rate * factors)


@dataclass(frozen=True)
class Plan:
    """All public numbers of a run: settings, noise, and the (epsilon, delta) they were calibrated for."""

    settings: PrivateSettings  # How the network is trained
    noise_multiplier: float  # Standard deviation of the noise as a multiple of the clipping norm
    epsilon: float  # The budget
    delta: float
    accountant: Accountant  # The accountant that calibrated the noise
    analysis: NoiseAnalysis  # How the steps were counted
    size: int  # The public number of records or persons

    @property
    def schedule(self) -> Schedule:
        """Sampling rate and steps."""
        return Schedule(self.settings.sampling_rate, self.settings.steps)

    def to_json(self) -> dict[str, Any]:
        """Return every number by name."""
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


def make_plan(
    size: int,
    *,
    epsilon: float,
    delta: float | None = None,
    accountant: Accountant = "pld",
    analysis: NoiseAnalysis = "proven",
    preset: Preset = "default",
    length: float = 1.0,
    inputs: Inputs = "plain",
    **given: Any,
) -> Plan:
    """Return the settings and the noise of a run; settings that are not given come from a preset."""
    check_choice("preset", preset, PRESETS)
    check_choice("inputs", inputs, ("plain", "centred", "scaled"))
    size = checked_size(size)
    check_positive(length=length)
    wanted = {name: value for name, value in given.items() if value is not None}
    wanted["sampling"] = "poisson" if analysis == "proven" else "shuffled"
    if delta is None:
        delta = 1 / (10 * size)
    if inputs != "plain":
        length = ROW_LENGTH
        steps = wanted.setdefault("steps", STEPS)
        wanted.setdefault("centring_steps", max(1, round(CENTRING_SHARE * steps)))
    start = _paper(size) if preset == "paper" else _default(size, length, inputs)
    if preset == "paper" and "sampling_rate" in wanted and "steps" not in wanted:
        wanted["steps"] = max(1, round(PAPER_EPOCHS / wanted["sampling_rate"]))
    settings = replace(start, **wanted)
    if (inputs != "plain") != (settings.centring_steps > 0):
        raise InvalidInput(f"inputs={inputs!r} does not fit centring_steps={settings.centring_steps}.")
    schedule = Schedule(settings.sampling_rate, settings.steps)
    multiplier = noise_multiplier(epsilon, delta, schedule, accountant=accountant, analysis=analysis)
    if preset == "default" and "learning_rate" not in wanted:
        rate = _learning_rate(settings, multiplier, size, length, inputs)
        settings = replace(settings, learning_rate=rate)
    return Plan(settings, multiplier, float(epsilon), float(delta), accountant, analysis, int(size))


def default_length(columns: int) -> float:
    """Guess the length of records that are encoded into [0, 1]."""
    return LENGTH_PER_COLUMN * math.sqrt(columns)


def _default(size: int, length: float, inputs: Inputs) -> PrivateSettings:
    """Return the settings of the default preset: a linear model and large batches; momentum without centring."""
    share = SCALED_CLIPPING_SHARE if inputs == "scaled" else CLIPPING_SHARE
    max_grad_norm = share * math.sqrt(length * length + 1)
    if inputs != "plain":
        return PrivateSettings(sampling_rate=CENTRED_RATE, max_grad_norm=max_grad_norm, decay=CENTRED_DECAY)
    return PrivateSettings(
        sampling_rate=min(1.0, max(SMALLEST_RATE, SMALLEST_BATCH / size)),
        steps=STEPS,
        max_grad_norm=max_grad_norm,
        optimizer="momentum",
    )


def _paper(size: int) -> PrivateSettings:
    """Return the settings of the paper's table: 128 tanh units, batches of 100, 100 epochs, Adam."""
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


def _learning_rate(
    settings: PrivateSettings, multiplier: float, size: int, length: float, inputs: Inputs
) -> float:
    """Return the learning rate at which all noise together has the standard deviation kappa on a logit."""
    if settings.optimizer == "adam":
        return ADAM_RATE
    gain = _MOMENTUM_GAIN[settings.optimizer]
    kappa = {"plain": LOGIT_NOISE, "centred": CENTRED_NOISE, "scaled": SCALED_NOISE}[inputs]
    factors = replace(settings, learning_rate=1.0).learning_rates()
    longest = LONGEST_STEP if inputs == "plain" else LONGEST_TRAINING / (gain * float(factors.sum()))
    root = math.sqrt(float(np.square(factors).sum()))
    noise = multiplier * root * gain / (settings.sampling_rate * size)
    return min(kappa / noise, longest) / (settings.max_grad_norm * length)

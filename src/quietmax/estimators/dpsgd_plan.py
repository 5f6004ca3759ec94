"""How DP-SGD is set up: settings from public numbers only, by two named configurations.

`today`: large batches, momentum, and a step size from one number. After T steps of rate eta with momentum m, noise of
standard deviation `kappa = eta * S * sigma * sqrt(T) * L / ((1 - m) * q * N)` has gathered on the logits of a record
whose features have length L, so eta follows from a chosen kappa. In trials on MNIST (pixels and scattering), Adult and
Location, at epsilon 1 and 10, with and without a hidden layer, kappa = 1.5 was the best or as good as the best. The
clip norm hardly matters between a tenth and a third of L. These constants were chosen on public data sets; the
settings for a data set of one's own follow from them and its declared size.

`paper`: the configuration table of the paper (one hidden layer of 128 tanh units, Adam with 0.001, batches of 100, 100
epochs, L2 0.001) with clip norm 1, as in the program it used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from quietmax.accounting.dpsgd import Accountant, NoiseReading, Schedule, noise_multiplier
from quietmax.errors import InvalidInput
from quietmax.estimators.declared_size import checked_size
from quietmax.models.private_settings import PrivateSettings

Configuration = Literal["today", "paper"]
CONFIGURATIONS: tuple[Configuration, ...] = ("today", "paper")

LOGIT_NOISE = 1.5
"""kappa: standard deviation that all noise together may have on a logit."""
SMALLEST_BATCH, SMALLEST_RATE, STEPS = 1000, 0.1, 100
CLIP_SHARE = 0.2
"""The clip norm as a share of the length of the features and the bias."""
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
    reading: NoiseReading
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
            "reading": self.reading,
            "epochs": self.schedule.epochs,
            "declared_size": self.size,
        }


def plan(
    size: int,
    *,
    epsilon: float,
    delta: float | None = None,
    accountant: Accountant = "pld",
    reading: NoiseReading = "proven",
    configuration: Configuration = "today",
    length: float = 1.0,
    **given: Any,
) -> Plan:
    """Fill in what is not given (fields of `PrivateSettings`) for a declared size and a length of the features.

    >>> chosen = plan(10_000, epsilon=1.0, configuration="paper", accountant="zcdp", reading="published")
    >>> chosen.settings.steps, chosen.settings.sampling, round(chosen.noise_multiplier, 1)
    (10000, 'shuffled', 49.0)
    """
    if configuration not in CONFIGURATIONS:
        raise InvalidInput(
            f"The configuration is {configuration!r}, but must be one of {', '.join(CONFIGURATIONS)}: name one."
        )
    size = checked_size(size)
    if not 0 < length < math.inf:
        raise InvalidInput(
            f"The length of the features is {length!r}, but must be positive: give such a one."
        )
    wanted = {name: value for name, value in given.items() if value is not None}
    wanted["sampling"] = "poisson" if reading == "proven" else "shuffled"
    promised = 1 / (10 * size) if delta is None else delta
    start = _paper(size) if configuration == "paper" else _today(size, length)
    if configuration == "paper" and "sampling_rate" in wanted and "steps" not in wanted:
        wanted["steps"] = max(1, round(PAPER_EPOCHS / wanted["sampling_rate"]))
    settings = replace(start, **wanted)
    schedule = Schedule(settings.sampling_rate, settings.steps)
    multiplier = noise_multiplier(epsilon, promised, schedule, accountant=accountant, reading=reading)
    if configuration == "today" and "learning_rate" not in wanted:
        settings = replace(settings, learning_rate=_rate(settings, multiplier, size, length))
    return Plan(settings, multiplier, float(epsilon), float(promised), accountant, reading, int(size))


def _today(size: int, length: float) -> PrivateSettings:
    return PrivateSettings(
        sampling_rate=min(1.0, max(SMALLEST_RATE, SMALLEST_BATCH / size)),
        steps=STEPS,
        clip=CLIP_SHARE * math.sqrt(length * length + 1),
        optimiser="momentum",
    )


def _paper(size: int) -> PrivateSettings:
    rate = min(1.0, PAPER_BATCH / size)
    return PrivateSettings(
        hidden=(128,),
        sampling_rate=rate,
        steps=max(1, round(PAPER_EPOCHS / rate)),
        clip=1.0,
        learning_rate=0.001,
        optimiser="adam",
        l2=0.001,
    )


def _rate(settings: PrivateSettings, multiplier: float, size: int, length: float) -> float:
    """The step size at which all noise together has standard deviation `LOGIT_NOISE` on a logit."""
    if settings.optimiser == "adam":
        return ADAM_RATE
    gain = _MOMENTUM_GAIN[settings.optimiser]
    noise = multiplier * math.sqrt(settings.steps) * gain / (settings.sampling_rate * size)
    return min(LOGIT_NOISE / noise, LONGEST_STEP) / (settings.clip * length)

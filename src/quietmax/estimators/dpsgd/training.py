"""DP-SGD: its settings, the batches, and training with seeded noise (K networks at once) or with exact noise.

**Settings.** All follow from public numbers. The learning rate of the "default" preset is chosen so that all noise
together has a given standard deviation on a logit (DP-SGD page, section 4).

**Training.** `train_private_stack` is for experiments: everything is float32 and seeded, repeatable and fast, and for
both reasons no protection. Networks with the same seed and records see the same batches and the same standard noise, so
a sweep over epsilon compares like with like. `train_private` and `train_private_module` train a network that may be
released: batches and noise come from the operating system, and the sums over records of a built-in network are exact.

If records belong to persons, a batch is a sample of persons with all their rows, and each row's clipped gradient counts
1/k for a person of k rows (THEORY 3.7). The paper's convexified loss is no mean of per-example losses; ``alpha`` clips
its gradient of each record as a batch of one.

**Tables.** On cells (`head.tables`), the first steps release the counts of people in each cell: a record adds 1 in each
of m columns, so noise of `sigma sqrt(m)` makes this the mechanism of any other step. The first layer of a network on
cells sees `z = D (B' e - c)`, one number per cell, looked up and added (`CellLayer`). A record's gradient there, the
outer product of its slope r and z, is clipped together with those of the other layers, with an upper bound on the
length of z, and the sums of r in each cell are integers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quietmax.accounting.dpsgd import Accountant, NoiseAnalysis, Schedule, noise_multiplier
from quietmax.data.records import Split
from quietmax.errors import InvalidInput
from quietmax.estimators.blocks import Blocks, Floats, Sum, Table, added
from quietmax.estimators.dpsgd.gradients import (
    LARGEST_TABLE,
    MODULE_ROUNDING,
    ROWS_AT_ONCE,
    ClippedSums,
    Gradients,
    ModuleSums,
    Part,
    _activated,
    _exact_sum_of_parts,
    _ExactSums,
    rounding_share,
)
from quietmax.estimators.head.exact_sums import _UNIT, gradient_grid
from quietmax.estimators.head.tables import (
    Basis,
    _columns,
    _histogram,
    _parts,
    _Residuals,
    released_counts,
    with_lengths,
)
from quietmax.estimators.head.weights import (
    CELLS_NOISE,
    CELLS_TRAINING_PER_COLUMN,
    TableWeights,
    _gradient_sensitivity,
    added_scores,
)
from quietmax.estimators.training_set import Persons, _check_positive, _checked_size, check_choice
from quietmax.models.stacked import (
    MLP,
    Convexified,
    Progress,
    Rows,
    activation,
    adam_step,
    check_networks,
    check_records,
    check_weights,
    initial_mlp,
)
from quietmax.noise.release import release_gaussian
from quietmax.noise.sources import EXACT, NoiseSource, SeededNoise

Build = Callable[[int, int], torch.nn.Module]


# --- Settings ---------------------------------------------------------------------------------------------------------

Optimizer = Literal["sgd", "momentum", "adam"]
Sampling = Literal["poisson", "shuffled"]
Preset = Literal["default", "paper"]
Inputs = Literal["plain", "centred", "scaled", "cells"]
"""What the network sees: features as they are, centred rows, centred rows that are scaled by the released mean, or the
cells of a table's rows."""

ROW_LENGTH = 5.0
"""Length of a centred row. The bias, a constant feature of 1, is then a fifth of it."""
CENTRING_SHARE = 0.05
"""Share of the steps that release the mean of the features."""
CENTRED_RATE, CENTRED_DECAY = 0.5, 0.3
"""With centring: the sampling rate, and the share of the steps over which the learning rate falls."""
CELLS_DECAY, CELLS_CLIPPING = 1.0, 0.4
"""On cells of a table: that share of the steps, and the clipping norm; rows have a length of about 1."""
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
"""A guess: records encoded into [0, 1] have about this length per root of the number of columns."""
PAPER_BATCH, PAPER_EPOCHS = 100, 100
CALIBRATION_STEPS, CALIBRATION_SHARE, CALIBRATION_ERROR = 5, 0.1, 0.03
"""Steps that find the scale of the logits, if they are at most this share of all steps, and if in one of them the noise
in the mean confidence has at most this standard deviation."""
LATER_FIELDS = ("centring_steps", "calibration_steps", "decay")
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
        Number of steps, with those for centring and calibration.
    centring_steps : int, optional
        How many of the steps, the first ones, release the mean of the features, by which all rows are centred; 0 leaves
        centring out. By default 5% of the steps, and 0 with ``preset="paper"``, ``analysis="published"`` or a
        ``network``, which cannot have it.
    calibration_steps : int, optional
        How many of the steps, the last ones, find the scale of the logits at which confidence equals accuracy; 0 leaves
        calibration out. By default 5 of at least 50 steps where the size allows to find the scale, and 0 otherwise.
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
    calibration_steps: int | None = None
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
    steps: int = 100  # Number of steps, with those for centring and calibration
    max_grad_norm: float = 1.0  # Per-example gradient clipping norm
    learning_rate: float = 1.0  # Step size, before it falls
    optimizer: Optimizer = "sgd"  # What the noisy gradients are given to
    l2: float = 0.0  # L2 penalty on the kernels
    sampling: Sampling = "poisson"  # "poisson" takes each record independently in every step
    centring_steps: int = 0
    calibration_steps: int = 0
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
        most = self.steps - self.centring_steps - 1
        if not 0 <= self.calibration_steps <= most or int(self.calibration_steps) != self.calibration_steps:
            raise InvalidInput(
                f"calibration_steps must be an integer from 0 to {most} with {self.steps} steps, "
                f"{self.centring_steps} of them for centring, got {self.calibration_steps}."
            )
        if (self.centring_steps or self.calibration_steps) and self.sampling != "poisson":
            raise InvalidInput(
                "centring_steps and calibration_steps require Poisson sampling (analysis='proven')."
            )
        _check_positive(max_grad_norm=self.max_grad_norm, learning_rate=self.learning_rate)
        if not 0 <= self.decay <= 1:
            raise InvalidInput(f"decay must be from 0 to 1, got {self.decay}.")
        if not 0 <= self.l2 < math.inf:
            raise InvalidInput(f"l2 must be at least 0, got {self.l2}.")

    def to_json(self) -> dict[str, Any]:
        """Return all fields by name; those of `LATER_FIELDS` only if they are not 0."""
        fields = asdict(self) | {"hidden": list(self.hidden)}
        return {name: value for name, value in fields.items() if value or name not in LATER_FIELDS}

    @property
    def _gradient_steps(self) -> int:
        return self.steps - self.centring_steps - self.calibration_steps

    def _learning_rates(self) -> NDArray[np.float64]:
        left = np.arange(self._gradient_steps, 0, -1)
        factors = np.minimum(1.0, left / max(1.0, self.decay * self._gradient_steps))
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
    columns: int = 1,
    **given: Any,
) -> Plan:
    """Return the settings and the noise of a run; settings that are not given come from a preset."""
    check_choice("preset", preset, ("default", "paper"))
    size = _checked_size(size)
    _check_positive(length=length)
    wanted = {name: value for name, value in given.items() if value is not None}
    wanted["sampling"] = "poisson" if analysis == "proven" else "shuffled"
    if delta is None:
        delta = 1 / (10 * size)
    if inputs != "plain":
        length = 1.0 if inputs == "cells" else ROW_LENGTH
        steps = wanted.setdefault("steps", STEPS)
        wanted.setdefault("centring_steps", max(1, round(CENTRING_SHARE * steps)))
    start = _paper(size) if preset == "paper" else _default(size, length, inputs)
    if preset == "paper" and "sampling_rate" in wanted and "steps" not in wanted:
        wanted["steps"] = max(1, round(PAPER_EPOCHS / wanted["sampling_rate"]))
    settings = replace(start, **wanted)
    schedule = Schedule(settings.sampling_rate, settings.steps)
    multiplier = noise_multiplier(epsilon, delta, schedule, accountant=accountant, analysis=analysis)
    if preset == "default" and analysis == "proven" and "calibration_steps" not in wanted:
        settings = replace(settings, calibration_steps=_calibration_steps(schedule, multiplier, size))
    if preset == "default" and "learning_rate" not in wanted:
        rate = _learning_rate(settings, multiplier, size, length, inputs, columns)
        settings = replace(settings, learning_rate=rate)
    return Plan(settings, multiplier, float(epsilon), float(delta), accountant, analysis, int(size))


def _default(size: int, length: float, inputs: Inputs) -> PrivateSettings:
    if inputs == "cells":
        return PrivateSettings(sampling_rate=CENTRED_RATE, max_grad_norm=CELLS_CLIPPING, decay=CELLS_DECAY)
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


def _calibration_steps(schedule: Schedule, multiplier: float, size: int) -> int:
    """Return how many steps find the scale of the logits by default; 0 where it cannot be found well."""
    error = multiplier / (schedule.sampling_rate * size)
    few = CALIBRATION_SHARE * schedule.steps >= CALIBRATION_STEPS
    return CALIBRATION_STEPS if few and error <= CALIBRATION_ERROR else 0


def _learning_rate(
    settings: PrivateSettings, multiplier: float, size: int, length: float, inputs: Inputs, columns: int
) -> float:
    """Return the learning rate at which all noise together has the standard deviation kappa on a logit."""
    if settings.optimizer == "adam":
        return ADAM_RATE
    gain = _MOMENTUM_GAIN[settings.optimizer]
    noises = {"plain": LOGIT_NOISE, "centred": CENTRED_NOISE, "scaled": SCALED_NOISE, "cells": CELLS_NOISE}
    kappa = noises[inputs]
    factors = replace(settings, learning_rate=1.0)._learning_rates()
    whole = CELLS_TRAINING_PER_COLUMN * columns if inputs == "cells" else LONGEST_TRAINING
    longest = LONGEST_STEP if inputs == "plain" else whole / (gain * float(factors.sum()))
    root = math.sqrt(float(np.square(factors).sum()))
    noise = multiplier * root * gain / (settings.sampling_rate * size)
    return min(kappa / noise, longest) / (settings.max_grad_norm * length)


# --- Rows and batches -------------------------------------------------------------------------------------------------


class StoredRows:
    """The rows of a training set, which are read by their numbers; all labels and persons are in memory."""

    def __init__(self, blocks: Blocks, *, by_person: bool) -> None:
        self.blocks = blocks
        compact = np.int8 if blocks.classes <= 2**7 else np.int32
        self.labels: NDArray[Any] = blocks.beside("labels").astype(compact)
        self.persons = None
        if by_person:
            self.persons = _numbered_persons(blocks.beside("persons"))
            blocks._drop_persons()

    def __enter__(self) -> StoredRows:
        return self

    def __exit__(self, *_: object) -> None:
        self.blocks.close()

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.blocks), self.blocks.features

    @property
    def units(self) -> int:
        """The number of persons, or of rows if there are no persons."""
        return len(self) if self.persons is None else self.persons.count

    def __getitem__(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        return self.blocks._rows_at(numbers)


def _numbered_persons(digests: NDArray[np.bytes_]) -> Persons:
    """Number persons in the order in which they come, so that the digests themselves do not matter."""
    _, first, places = np.unique(digests, return_index=True, return_inverse=True)
    numbers: NDArray[Any] = np.empty(len(first), np.int32 if len(digests) < 2**31 else np.int64)
    numbers[np.argsort(first)] = np.arange(len(first))
    return Persons(numbers[places])


def _reader(
    features: NDArray[np.float32] | StoredRows, targets: Tensor, persons: Persons | None
) -> Callable[[Tensor], Part]:
    """Return a function that reads records by their numbers; a row of a person with k rows has the weight 1/k."""

    def _read(numbers: Tensor) -> Part:
        chosen = numbers.numpy()
        weights = None if persons is None else torch.from_numpy(1.0 / persons.rows[chosen])
        return torch.from_numpy(features[chosen]), targets[numbers].to(torch.int64), weights

    return _read


def _randomness(stream: int, seed: int | None) -> tuple[NoiseSource, int | None]:
    """Return a source of noise and the seed of the batches, None for exact noise and batches."""
    if seed is None:
        return EXACT, None
    first, drawn = (int(word) for word in np.random.SeedSequence((stream, seed)).generate_state(2))
    return SeededNoise(first), drawn


@dataclass(frozen=True, eq=False)
class Batch:
    """Some rows of a training set by their numbers, which are read in parts."""

    features: NDArray[np.float32] | StoredRows
    labels: NDArray[np.integer[Any]]
    classes: int
    persons: Persons | None
    numbers: Rows

    def sum(self, work: Callable[[Table], Sum]) -> Sum:
        """Add up what a function returns for parts of the batch, also of a batch without rows."""
        return added(work(part) for part in self._parts())

    def _parts(self) -> Iterator[Table]:
        for start in range(0, max(len(self.numbers), 1), _BATCH_ROWS_AT_ONCE):
            part = self.numbers[start : start + _BATCH_ROWS_AT_ONCE]
            repeats = None if self.persons is None else self.persons.rows[part]
            yield Table(self.features[part], self.labels[part].astype(np.int64), self.classes, repeats)


class _Units:
    """What is sampled: single rows, or persons with all their rows. `rows` are some rows, or the number of all."""

    def __init__(self, rows: Rows | int, persons: Persons | None) -> None:
        self._rows = None if isinstance(rows, int) else rows
        self._codes: NDArray[np.integer[Any]] | None = None
        self._length = self.count = rows if isinstance(rows, int) else len(rows)
        if persons is None:
            return
        self._codes, self.count = persons.codes, persons.count
        if self._rows is not None:
            _, codes, sizes = np.unique(persons.codes[self._rows], return_inverse=True, return_counts=True)
            if (sizes[codes] != persons.rows[self._rows]).any():
                raise InvalidInput("A network must be trained on all records of a person or on none.")
            self._codes, self.count = codes, len(sizes)

    @property
    def rows(self) -> Rows:
        return np.arange(self._length) if self._rows is None else self._rows

    def _batches(self, order: Rows, width: int) -> Iterator[Rows]:
        for chosen in np.split(order, range(width, max(len(order), 1), width)):
            yield self._at(chosen if self._codes is None else np.flatnonzero(np.isin(self._codes, chosen)))

    def _sample(self, drawn: Callable[[int], NDArray[np.bool_]]) -> Rows:
        """Return the rows of the units for which a function draws True; it is told how many to decide about."""
        mask = np.empty(self.count, np.bool_)
        for start in range(0, self.count, _UNITS_AT_ONCE):
            part = mask[start : start + _UNITS_AT_ONCE]
            part[:] = drawn(len(part))
        return self._at(np.flatnonzero(mask if self._codes is None else mask[self._codes]))

    def _at(self, places: Rows) -> Rows:
        return places if self._rows is None else self._rows[places]


def _draw_batches(
    rows: Rows | int,
    size: int,
    settings: PrivateSettings,
    persons: Persons | None = None,
    *,
    seed: int | None = None,
) -> Iterator[Rows]:
    """Draw batches without end, from a seed or the operating system: no record more often than the rate says."""
    return _batches(_Units(rows, persons), size, settings, seed)


def _batches(units: _Units, size: int, settings: PrivateSettings, seed: int | None) -> Iterator[Rows]:
    rate = settings.sampling_rate
    width = max(1, round(rate * size))
    if seed is None:
        threshold = np.uint64(min(int(rate * 2.0**64), 2**64 - 1))

        def _words(count: int) -> NDArray[np.uint64]:
            return np.frombuffer(os.urandom(8 * count), np.uint64)

        def _order() -> Rows:
            return np.argsort(_words(units.count), kind="stable")

        def _taken(count: int) -> NDArray[np.bool_]:
            return _words(count) < threshold
    else:
        generator = np.random.default_rng((0x0DE5, seed))

        def _order() -> Rows:
            return generator.permutation(units.count)

        def _taken(count: int) -> NDArray[np.bool_]:
            return generator.random(count) < rate

    while True:
        if settings.sampling == "shuffled":
            yield from units._batches(_order(), width)
        else:
            yield units.rows if rate == 1 else units._sample(_taken)


# --- Steps ------------------------------------------------------------------------------------------------------------

_MOMENTUM = 0.9
_BATCH_ROWS_AT_ONCE = 2**14
_UNITS_AT_ONCE = 2**20
"""Random words are drawn for this many units at a time."""


class _Update:
    """The optimizer and its state: takes steps with noisy mean gradients and the L2 penalty's ``2*l2*kernel``."""

    def __init__(
        self, kernels: Sequence[Tensor], biases: Sequence[Tensor], settings: PrivateSettings
    ) -> None:
        self._optimizer, self._rates = settings.optimizer, iter(settings._learning_rates().tolist())
        self._groups = ((kernels, 2 * settings.l2), (biases, 0.0))
        states = {"sgd": 0, "momentum": 1, "adam": 2}[settings.optimizer]
        self._states = [
            [[torch.zeros_like(tensor) for tensor in tensors] for _ in range(states)]
            for tensors, _ in self._groups
        ]
        self._taken = [torch.zeros(()) for _ in (*kernels, *biases)]

    @torch.no_grad()
    def _take(self, kernels: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        rate = next(self._rates)
        for count in self._taken:
            count += 1
        for (weights, decay), given, states in zip(
            self._groups, (kernels, biases), self._states, strict=True
        ):
            if self._optimizer == "adam":
                means, squares = states
                taken = self._taken[: len(weights)]
                adam_step(weights, given, means, squares, taken, learning_rate=rate, decay=decay)
                continue
            for index, (weight, gradient) in enumerate(zip(weights, given, strict=True)):
                moved = gradient.add_(weight, alpha=decay) if decay else gradient
                if states:
                    moved = states[0][index].mul_(_MOMENTUM).add_(moved)
                weight.sub_(moved, alpha=rate)


def _initial_network(
    features: int, classes: int, settings: PrivateSettings, seeds: tuple[int, ...], dtype: torch.dtype
) -> MLP:
    network = initial_mlp((features, *settings.hidden, classes), settings.activation, seeds, dtype)
    if settings.centring_steps and not settings.hidden:
        network.kernels[0].zero_()
    return network


# --- Many networks, seeded --------------------------------------------------------------------------------------------


def train_private_stack(
    features: NDArray[np.floating] | Tensor | StoredRows,
    labels: NDArray[np.integer] | Tensor,
    classes: int,
    rows: Sequence[Rows],
    *,
    settings: PrivateSettings,
    noise_multipliers: Sequence[float],
    seeds: Sequence[int],
    sizes: Sequence[int] | None = None,
    alpha: float | None = None,
    persons: Persons | None = None,
    progress: Progress | None = None,
) -> MLP:
    """Train one network per entry of ``rows`` on those records, with seeded noise. A step is

        w <- w - learning_rate * (sum of clipped gradients + N(0, (multiplier*max_grad_norm)^2)) / (sampling_rate*size),

    or the same gradient given to momentum or Adam.
    """
    targets = torch.as_tensor(labels)
    units = [_Units(np.asarray(each, np.int64), persons) for each in rows]
    declared = [each.count for each in units] if sizes is None else list(sizes)
    if not isinstance(features, StoredRows):
        inputs = torch.as_tensor(features).to(torch.float32).contiguous()
        check_records(inputs, targets.to(torch.int64), classes)
        features = inputs.numpy()
    records, width = features.shape
    check_networks(rows, records, seeds=seeds, noise_multipliers=noise_multipliers, sizes=declared)
    if any(not math.isfinite(each) or each < 0 for each in noise_multipliers):
        raise InvalidInput("noise_multipliers must be finite and at least 0.")
    if any(size < 1 for size in declared):
        raise InvalidInput("sizes must be positive.")
    if alpha is not None:
        Convexified(alpha)  # raises for an invalid constant
    network = _initial_network(width, classes, settings, tuple(seeds), torch.float32)
    # Networks of equal seed, size and rows share a stream of batches and of noise.
    names: dict[tuple[object, ...], int] = {}
    keys = [(seed, size, own.rows.tobytes()) for own, seed, size in zip(units, seeds, declared, strict=True)]
    streams = [names.setdefault(key, len(names)) for key in keys]
    first = [streams.index(stream) for stream in range(len(names))]
    batches = [_batches(units[each], declared[each], settings, seeds[each]) for each in first]
    expected = [settings.sampling_rate * size for size in declared]
    spreads = [
        multiplier * settings.max_grad_norm / batch
        for multiplier, batch in zip(noise_multipliers, expected, strict=True)
    ]
    noise = _Noise(spreads, streams, [seeds[each] for each in first])
    read = _reader(features, targets, persons)
    factors = [1 / batch for batch in expected]
    sums = ClippedSums(network, read, records, settings.max_grad_norm, factors, alpha)
    gradients, update = Gradients.zeros(network), _Update(network.kernels, network.biases, settings)
    for step in range(1, settings._gradient_steps + 1):
        # Noise first, the clipped gradients on top of it: one pass over memory less.
        noise._write(gradients)
        sums.add_to(gradients, _padded([next(draws) for draws in batches], streams, records))
        update._take(gradients.kernels, gradients.biases)
        if progress is not None and (step % 64 == 0 or step == settings._gradient_steps):
            progress(step, settings._gradient_steps)
    check_weights([tensor for _, tensor in network.parameters()])
    return network


def _padded(drawn: Sequence[Rows], streams: Sequence[int], padding: int) -> Tensor:
    batch = np.full((len(drawn), max(1, *map(len, drawn))), padding, np.int64)
    for line, each in zip(batch, drawn, strict=True):
        line[: len(each)] = each
    return torch.from_numpy(batch if len(drawn) == 1 else batch[streams])


class _Noise:
    """Gaussian noise of each network's own standard deviation, from the seed of its stream."""

    def __init__(self, spreads: Sequence[float], streams: Sequence[int], seeds: Sequence[int]) -> None:
        self._streams = None if len(seeds) in (1, len(streams)) else torch.tensor(streams)
        self._generators = [torch.Generator().manual_seed(_noise_seed(seed)) for seed in seeds]
        self._spreads = torch.tensor(spreads, dtype=torch.float32).view(-1, 1, 1)

    def _write(self, gradients: Gradients) -> None:
        counts = [tensor[0].numel() for tensor in gradients.tensors()]
        standard = torch.empty(len(self._generators), sum(counts))
        for generator, line in zip(self._generators, standard, strict=True):
            line.normal_(generator=generator)
        if self._streams is not None:
            standard = standard[self._streams]
        for tensor, part in zip(gradients.tensors(), torch.split(standard, counts, 1), strict=True):
            torch.mul(part.view(-1, *tensor.shape[1:]), self._spreads, out=tensor)


def _noise_seed(seed: int) -> int:
    return int(np.random.SeedSequence((0x5EED, seed)).generate_state(1, np.uint64)[0] >> 1)


# --- One network, exact noise -----------------------------------------------------------------------------------------


def train_private(
    features: NDArray[np.floating] | StoredRows,
    labels: NDArray[np.integer],
    classes: int,
    *,
    settings: PrivateSettings,
    noise_multiplier: float,
    size: int,
    seed: int,
    persons: Persons | None = None,
) -> MLP:
    """Train one network that may be released: the step of `train_private_stack` with exact noise and exact sums."""
    targets = torch.as_tensor(np.ascontiguousarray(labels))
    if not isinstance(features, StoredRows):
        features = np.ascontiguousarray(features, dtype=np.float32)
        check_records(torch.from_numpy(features), targets.to(torch.int64), classes)
    _check_positive(noise_multiplier=noise_multiplier, size=size)
    batches = _draw_batches(len(features), size, settings, persons)
    _check_length(len(features))
    network = _initial_network(features.shape[1], classes, settings, (seed,), torch.float64)
    update = _Update(network.kernels, network.biases, settings)
    read = _reader(features, targets, persons)
    expected = settings.sampling_rate * size
    for _ in range(settings._gradient_steps):
        parts = map(read, torch.split(torch.from_numpy(next(batches)), ROWS_AT_ONCE))
        sums = _exact_sum_of_parts(network, parts, settings.max_grad_norm, size)
        rounding = rounding_share(sum(tensor.numel() for tensor in sums.tensors()), size)
        noisy = _released([*sums.tensors()], settings.max_grad_norm, rounding, noise_multiplier)
        means, layers = [tensor / expected for tensor in noisy], len(sums.kernels)
        update._take(means[:layers], means[layers:])
        check_weights([tensor for _, tensor in network.parameters()])
    return network


def _check_length(records: int) -> None:
    if records > LARGEST_TABLE:
        raise InvalidInput(f"DP-SGD can be trained on at most {LARGEST_TABLE:,} records.")


def _released(
    sums: Sequence[Tensor], max_grad_norm: float, rounding: float, multiplier: float
) -> list[Tensor]:
    """Release clipped sums with exact noise; rounding adds a share of the clipping norm to their sensitivity."""
    vector = torch.cat([total.flatten() for total in sums]).double().numpy()
    sensitivity = max_grad_norm * (1 + rounding)
    noisy = release_gaussian(vector, sensitivity=sensitivity, mu=1 / multiplier).values
    parts = torch.split(torch.from_numpy(noisy), [total.numel() for total in sums])
    return [part.view(total.shape).to(total.dtype) for part, total in zip(parts, sums, strict=True)]


# --- One module -------------------------------------------------------------------------------------------------------

_ROWS_AT_ONCE = 256


def train_private_module(
    module: torch.nn.Module,
    features: NDArray[np.float32] | StoredRows,
    labels: NDArray[np.int64],
    *,
    settings: PrivateSettings,
    noise_multiplier: float,
    size: int,
    seed: int | None = None,
    persons: Persons | None = None,
) -> torch.nn.Module:
    """Train a module with the steps of `train_private_stack`; with exact noise unless there is a seed."""
    clipped = ModuleSums(module.train(), settings.max_grad_norm)
    update = _Update(*_kernels_and_biases(clipped.parameters), settings)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    batches = _draw_batches(len(features), size, settings, persons, seed=seed)
    read = _reader(features, torch.from_numpy(labels), persons)
    expected, spread = settings.sampling_rate * size, settings.max_grad_norm * noise_multiplier
    for _ in range(settings._gradient_steps):
        sums = [torch.zeros_like(parameter) for parameter in clipped.parameters]
        for part in torch.split(torch.from_numpy(next(batches)), _ROWS_AT_ONCE):
            inputs, targets, weights = read(part)
            clipped.add_to(
                sums, inputs, targets, torch.ones(len(part)) if weights is None else weights.float()
            )
        if generator is None:
            noisy = _released(sums, settings.max_grad_norm, MODULE_ROUNDING, noise_multiplier)
        else:
            noisy = [total + spread * torch.randn(total.shape, generator=generator) for total in sums]
        update._take(*_kernels_and_biases([total / expected for total in noisy]))
        check_weights(clipped.parameters)
    return clipped._unwrapped().eval()


def _kernels_and_biases(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return [each for each in tensors if each.ndim > 1], [each for each in tensors if each.ndim <= 1]


# --- A sweep over accountants and epsilons ----------------------------------------------------------------------------


def train_sweep(
    data: Sequence[Split],
    *,
    epsilons: Sequence[float],
    accountants: Sequence[Accountant],
    alpha: float | None = None,
    learning_rate: float | None = None,
) -> tuple[list[Plan], MLP]:
    """Train one network per split, accountant and epsilon, all at once and in this order, as the paper does."""
    if not data or any(each.records is not data[0].records for each in data):
        raise InvalidInput("All splits of a sweep must be splits of the same records.")
    sizes = {len(each.train_rows) for each in data}
    if len(sizes) != 1:
        raise InvalidInput(f"All training parts of a sweep must have the same size, got {sorted(sizes)}.")
    records, size = data[0].records, sizes.pop()
    plans = [
        make_plan(
            size,
            epsilon=epsilon,
            accountant=accountant,
            analysis="published",
            preset="paper",
            learning_rate=learning_rate,
        )
        for accountant in accountants
        for epsilon in epsilons
    ]
    networks = train_private_stack(
        records.features,
        records.labels,
        records.classes,
        [each.train_rows for each in data for _ in plans],
        settings=plans[0].settings,
        noise_multipliers=[each.noise_multiplier for each in plans] * len(data),
        seeds=[each.seed for each in data for _ in plans],
        alpha=alpha,
    )
    return plans, networks


# --- On the cells of a table ------------------------------------------------------------------------------------------


def _cell_batches(rows: StoredRows, plan: Plan, seed: int | None) -> Iterator[Batch]:
    _check_length(len(rows))
    for numbers in _draw_batches(len(rows), plan.size, plan.settings, rows.persons, seed=seed):
        yield Batch(rows, rows.labels, rows.blocks.classes, rows.persons, numbers)


def released_shares(
    rows: StoredRows, plan: Plan, sizes: tuple[int, ...], seed: int | None
) -> tuple[Floats, float]:
    """Release the share of people in each cell by the centring steps of a plan; also return the noise in a share."""
    source, drawn = _randomness(0xCE27, seed)
    batches, steps = _cell_batches(rows, plan, drawn), plan.settings.centring_steps
    expected = steps * plan.settings.sampling_rate * plan.size
    total, noise = np.zeros(sum(sizes)), 0.0
    for _ in range(steps):
        counts, noise = released_counts(next(batches), sizes, 1 / plan.noise_multiplier, source)
        total += counts
    return np.clip(total / expected, 0.0, 1.0), noise * math.sqrt(steps) / expected


def train_on_cells(
    rows: StoredRows, basis: Basis, plan: Plan, sizes: tuple[int, ...], seed: int | None
) -> Floats:
    """Take the gradient steps of a plan; return what each cell, and last every row, adds to the outputs."""
    source, drawn = _randomness(0xCE11, seed)
    settings, batches = plan.settings, _cell_batches(rows, plan, drawn)
    outputs = 1 if rows.blocks.classes == 2 else rows.blocks.classes
    # Both scores of two classes move.
    expected = settings.sampling_rate * plan.size / (2.0 if outputs == 1 else 1.0)
    grid = gradient_grid(plan.size)
    sensitivity = _gradient_sensitivity(settings.max_grad_norm, outputs, basis.features, grid).value
    weights = torch.zeros(outputs, basis.features, dtype=torch.float64)
    update = _Update([weights], [], settings)
    for _ in range(settings._gradient_steps):
        residuals = _Residuals(sizes, basis.scores(weights.numpy()), settings.max_grad_norm)

        def _sums(part: Table, residuals: _Residuals = residuals) -> NDArray[np.int64]:
            return residuals(with_lengths(basis, sizes, part))

        exact = basis.gradient(next(batches).sum(_sums), grid)
        noisy = release_gaussian(
            exact, sensitivity=sensitivity, mu=1 / plan.noise_multiplier, source=source
        ).values
        update._take([torch.from_numpy(noisy / expected)], [])
        if not float(weights.abs().max()) < _LARGEST_WEIGHT:
            raise InvalidInput(
                f"Training diverged: learning_rate {settings.learning_rate:g} is too large for this table."
            )
    return basis.scores(weights.numpy())


_LARGEST_WEIGHT = 2.0**200


# --- Hidden layers ----------------------------------------------------------------------------------------------------

_LARGEST_SLOPE = 4.0
"""Clipped slopes of a layer of cells are at most this, so that `Basis.gradient` holds the sums of 2^33 rows."""


@dataclass(frozen=True, eq=False)
class CellLayer:
    """The first layer of a network on cells: an activation of a sum of one vector per cell."""

    first: TableWeights  # One line for each neuron
    activation: str

    def rows(self, features: NDArray[np.floating]) -> Floats:
        """Return the outputs of the layer; each row's depend on its own cells alone."""
        outputs: Floats = _activated(self.activation, torch.from_numpy(self.first.scores(features))).numpy()
        return outputs


def train_network_on_cells(
    rows: StoredRows, basis: Basis, plan: Plan, sizes: tuple[int, ...], seed: int | None
) -> tuple[Floats, MLP]:
    """Return what each cell, and last every row, adds to the first layer, and the trained network above it."""
    source, drawn = _randomness(0xCE11, seed)
    settings, batches, grid = plan.settings, _cell_batches(rows, plan, drawn), gradient_grid(plan.size)
    start = int.from_bytes(os.urandom(4), "big") if seed is None else seed
    whole = _initial_network(basis.features, rows.blocks.classes, settings, (start,), torch.float64)
    above = MLP(whole.widths[1:], whole.activation, whole.kernels[1:], whole.biases[1:])
    first = whole.kernels[0][0].T.contiguous()
    coordinates = sum(tensor.numel() for _, tensor in above.parameters())
    sensitivity = _gradient_sensitivity(settings.max_grad_norm, len(first), basis.features, grid).value
    # Both parts are rounded, to their own grids.
    sensitivity += settings.max_grad_norm * rounding_share(coordinates, plan.size)
    update = _Update([first, *above.kernels], above.biases, settings)
    expected = settings.sampling_rate * plan.size
    for _ in range(settings._gradient_steps):
        sums, others = _network_sums(next(batches), basis, sizes, first, above, plan)
        exact = [basis.gradient(sums, grid).ravel(), *(each.numpy().ravel() for each in others.tensors())]
        noisy = release_gaussian(
            np.concatenate(exact), sensitivity=sensitivity, mu=1 / plan.noise_multiplier, source=source
        ).values
        tensors = [first, *above.kernels, *above.biases]
        parts = torch.split(torch.from_numpy(noisy / expected), [each.numel() for each in tensors])
        means = [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]
        update._take(means[: 1 + len(above.kernels)], means[1 + len(above.kernels) :])
        check_weights(tensors)
    return basis.scores(first.numpy()), above


def _network_sums(
    batch: Batch, basis: Basis, sizes: tuple[int, ...], first: torch.Tensor, above: MLP, plan: Plan
) -> tuple[NDArray[np.int64], Gradients]:
    """Return sums over a batch: of the first layer's slopes in each cell and in all, and of the gradients above."""
    looked_up, others = basis.scores(first.numpy()), _ExactSums(above, plan.settings.max_grad_norm)
    total = np.zeros(looked_up.shape, np.int64)
    for block in (with_lengths(basis, sizes, part) for part in batch._parts()):
        assert block.lengths is not None
        for part in _parts(block):
            columns = _columns(block, part)
            inputs = torch.from_numpy(added_scores(columns, sizes, looked_up).T)
            counted = None if block.shares is None else torch.from_numpy(block.shares[part])
            labels, lengths = (torch.from_numpy(each[part]) for each in (block.labels, block.lengths))
            slopes = [
                others._add(
                    _activated(above.activation, inputs[few]),
                    labels[few],
                    None if counted is None else counted[few],
                    lengths[few, None].double(),
                )
                for few in (slice(at, at + ROWS_AT_ONCE) for at in range(0, len(labels), ROWS_AT_ONCE))
            ]
            limited = torch.cat(slopes).clamp(-_LARGEST_SLOPE, _LARGEST_SLOPE)
            for neuron, units in enumerate((limited * _UNIT).trunc().T.contiguous().numpy()):
                total[neuron, :-1] += _histogram(columns, sizes, units)
                total[neuron, -1] += int(units.sum())
    return total, others._gradients(plan.size)

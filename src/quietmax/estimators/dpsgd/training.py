"""DP-SGD for the built-in network: seeded and fast for K networks at once, or with exact noise for a release.

`train_private_stack` is for experiments: each network has its own noise, clipping norm, seed and records. Everything is
float32 and seeded: repeatable and fast, and for both reasons no protection. Networks with the same seed and records see
the same batches and the same standard noise, each scaled by its own noise multiplier. That is what each would see
alone, drawn once, so a sweep over epsilon compares like with like.

`train_private` trains a network that may be released: batches and noise come from the operating system, and sums over
records are exact.

If records belong to persons, a batch is a sample of persons with all their rows, and each row's clipped gradient counts
1/k for a person of k rows. A person is then sampled like a record, and contributes at most the clipping norm (THEORY
3.7); sizes are numbers of persons.

The loss is cross-entropy, which the paper's table of settings names. The convexified loss is no mean of per-example
losses: a record's weight in it depends on the other records of the batch, so there is no per-example gradient to clip.
The convexified loss of each record as a batch of one can be clipped; ``alpha`` asks for that.

For any other torch module, Opacus computes the per-example gradient norms; batches and noise are ours
(`train_private_module`). Its ghost clipping is used layer by layer where it knows the layer, and its general rule
elsewhere; tied weights are clipped without ghost clipping. Its own batches and noise are not used: its secure mode
needs torchcsprng, which does not exist for the PyTorch version pinned here. Floating-point sums of a module's gradients
cannot be made exact. The noise allows for `ROUNDING` of the clipping norm, and the guarantee names that as an
assumption.
"""

from __future__ import annotations

import math
import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quietmax.accounting.dpsgd import Accountant, NoiseAnalysis
from quietmax.accounting.guarantee import Unit
from quietmax.data.records import Split
from quietmax.errors import InvalidData, InvalidInput, short_message
from quietmax.estimators.blocks import FILES_IN_MEMORY, Blocks, LocalEngine, Table, block_rows, person_digests
from quietmax.estimators.dpsgd.config import Plan, Preset, PrivateSettings, make_plan
from quietmax.estimators.dpsgd.gradients import (
    FAST_ROWS,
    LARGEST_TABLE,
    ROWS_AT_ONCE,
    ClippedSums,
    Gradients,
    exact_clipped_sum_of_parts,
    rounding_share,
)
from quietmax.estimators.training_set import NOBODY, Condition, Persons, TrainingRows, check_positive
from quietmax.models.features.base import FeatureMap
from quietmax.models.mlp import MLP, initial_mlp
from quietmax.models.stacked import (
    Convexified,
    Progress,
    Rows,
    adam_step,
    check_networks,
    check_records,
    check_weights,
)
from quietmax.noise.release import release_gaussian


class _NumberedPersons(Persons):
    """Whom each row belongs to, without the names."""

    def __init__(self, digests: NDArray[np.bytes_]) -> None:
        super().__init__(np.empty(0, object))
        _, first, places = np.unique(digests, return_index=True, return_inverse=True)
        numbers = np.empty(len(first), np.int32 if len(first) < 2**31 else np.int64)
        # In the order in which the persons come, so that the digests themselves do not matter.
        numbers[np.argsort(first)] = np.arange(len(first))
        codes = numbers[places]
        rows = np.bincount(codes).astype(np.int32 if len(codes) < 2**31 else np.int64)[codes]
        self.__dict__.update(codes=codes, rows=rows, count=len(first))


class StoredRows:
    """The rows of a training set, which are read by their numbers."""

    def __init__(self, data: TrainingRows, engine: LocalEngine | Literal["local"] = "local") -> None:
        kept = LocalEngine() if engine == "local" else engine
        if not isinstance(kept, LocalEngine):
            raise InvalidInput("DP-SGD is trained in this process: engine must be 'local' or a LocalEngine.")
        key = secrets.token_bytes(16)
        classes = len(data.classes)
        compact = np.int8 if classes <= 2**7 else np.int32
        labels: list[NDArray[np.signedinteger[Any]]] = []
        digests: list[NDArray[np.bytes_]] = []

        def tables() -> Iterator[Table]:
            for piece in data.pieces:
                labels.append(piece.labels.astype(compact))
                if piece.persons is not None:
                    digests.append(person_digests(piece.persons, key))
                yield Table(piece.records, piece.labels, classes)

        self._blocks = Blocks(classes, kept, None if data.in_memory else FILES_IN_MEMORY)
        try:
            self._blocks.reserve(data.count, data.columns)
            self._blocks.extend(tables())
            if not len(self._blocks):
                raise InvalidData(NOBODY)
        except BaseException:
            self.close()
            raise
        self.labels = labels[0] if len(labels) == 1 else np.concatenate(labels)
        self.persons = _NumberedPersons(np.concatenate(digests)) if data.unit == "person" else None

    def __enter__(self) -> StoredRows:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop all rows, and remove what is on disk."""
        self._blocks.close()

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self._blocks), self._blocks.features

    @property
    def units(self) -> int:
        """The number of persons, or of rows if there are no persons."""
        return len(self) if self.persons is None else self.persons.count

    def __getitem__(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the rows with these numbers, in this order."""
        return self._blocks.rows_at(numbers)

    def update(
        self,
        function: Callable[[NDArray[np.float32]], NDArray[np.float32]],
        feature_map: object = None,
        *,
        finite: bool = True,
    ) -> None:
        """Replace the rows by what a function makes of them, block by block."""

        def changed(block: Table) -> Iterator[Table]:
            columns = block.features
            if isinstance(feature_map, FeatureMap):
                columns = feature_map.dimension(columns)
            for piece in block.pieces(-(-len(block) // block_rows(columns))):
                table = replace(piece, rows=function(piece.rows))
                if finite and not np.isfinite(table.rows).all():
                    raise InvalidInput("Features must be finite, but a record holds NaN or infinity.")
                yield from table.pieces(-(-len(table) // block_rows(table.features)))

        if isinstance(feature_map, FeatureMap):
            self._blocks.reserve(len(self), feature_map.dimension(self._blocks.features))
        self._blocks.update(changed)

    def expect(self, passes: float) -> None:
        """Announce how often every row will still be read or replaced, for the time left."""
        self._blocks.expect(max(1, round(passes)))


_MOMENTUM = 0.9
_UNITS_AT_ONCE = 2**20
"""Random words are drawn for this many units at a time."""


class _Update:
    """The optimizer and its state: takes steps with noisy mean gradients and the L2 penalty's ``2*l2*kernel``."""

    def __init__(self, network: MLP, settings: PrivateSettings) -> None:
        self._settings, self._rates = settings, iter(settings.learning_rates().tolist())
        self._groups = ((network.kernels, 2 * settings.l2), (network.biases, 0.0))
        states = {"sgd": 0, "momentum": 1, "adam": 2}[settings.optimizer]
        self._states = [
            [[torch.zeros_like(tensor) for tensor in tensors] for _ in range(states)]
            for tensors, _ in self._groups
        ]
        self._taken = [torch.zeros(()) for _ in network.kernels]

    def take(self, gradients: Gradients) -> None:
        """Move the network's weights; may overwrite the gradients."""
        rate = next(self._rates)
        for count in self._taken:
            count += 1
        for (weights, decay), given, states in zip(
            self._groups, (gradients.kernels, gradients.biases), self._states, strict=True
        ):
            if self._settings.optimizer == "adam":
                means, squares = states
                adam_step(weights, given, means, squares, self._taken, learning_rate=rate, decay=decay)
                continue
            for index, (weight, gradient) in enumerate(zip(weights, given, strict=True)):
                moved = gradient.add_(weight, alpha=decay) if decay else gradient
                if states:
                    moved = states[0][index].mul_(_MOMENTUM).add_(moved)
                weight.sub_(moved, alpha=rate)


def _initial_network(
    features: int, classes: int, settings: PrivateSettings, seeds: tuple[int, ...], dtype: torch.dtype
) -> MLP:
    """Return networks with random kernels; a linear model of centred rows starts at zero."""
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
    max_grad_norms: Sequence[float] | None = None,
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
    limits = [settings.max_grad_norm] * len(rows) if max_grad_norms is None else list(max_grad_norms)
    units = [_Units(np.asarray(each, np.int64), persons) for each in rows]
    declared = [each.count for each in units] if sizes is None else list(sizes)
    if not isinstance(features, StoredRows):
        features, targets = torch.as_tensor(features).to(torch.float32), targets.to(torch.int64)
        check_records(features, targets, classes)
    records, width = features.shape
    _check(records, rows, seeds, noise_multipliers, limits, declared)
    if alpha is not None:
        Convexified(alpha)  # raises for an invalid constant
    network = _initial_network(width, classes, settings, tuple(seeds), torch.float32)
    batches = _Batches(units, seeds, declared, settings, padding=records)
    expected = [settings.sampling_rate * size for size in declared]
    targets = torch.cat([targets, targets.new_zeros(1)])
    norms = torch.tensor(limits, dtype=torch.float32)
    factors = torch.tensor([1 / batch for batch in expected], dtype=torch.float32)
    sums: ClippedSums | _StoredSums
    if isinstance(features, StoredRows):
        sums = _StoredSums(network, features, targets, norms, factors, alpha, persons)
    else:
        shares = None
        if persons is not None:
            shares = torch.from_numpy(np.append(1 / persons.rows, 0.0)).to(torch.float32)
        padded = torch.cat([features, features.new_zeros(1, width)])
        sums = ClippedSums(network, padded, targets, norms, factors, alpha, shares)
    spreads = [
        multiplier * max_grad_norm / batch
        for multiplier, max_grad_norm, batch in zip(noise_multipliers, limits, expected, strict=True)
    ]
    noise = _Noise(spreads, batches.streams, seeds)
    gradients, update = Gradients.zeros(network), _Update(network, settings)
    for step in range(1, settings.gradient_steps + 1):
        # Noise first, the clipped gradients on top of it: one pass over memory less.
        noise.write(gradients)
        sums.add_to(gradients, batches.next())
        update.take(gradients)
        if progress is not None and (step % 64 == 0 or step == settings.gradient_steps):
            progress(step, settings.gradient_steps)
    check_weights([tensor for _, tensor in network.parameters()])
    return network


class _StoredSums:
    """`ClippedSums` of one network for rows that are read when they are needed; the same sums, bit for bit."""

    def __init__(
        self,
        network: MLP,
        rows: StoredRows,
        targets: Tensor,
        max_grad_norms: Tensor,
        weights: Tensor,
        alpha: float | None,
        persons: Persons | None,
    ) -> None:
        if network.networks != 1:
            raise InvalidInput("Stored rows can be used for one network at a time.")
        self._network, self._rows, self._targets, self._persons = network, rows, targets, persons
        self._max_grad_norms, self._weights, self._alpha = max_grad_norms, weights, alpha

    def add_to(self, gradients: Gradients, records: Tensor) -> None:
        """Add the sums over some records to gradients; the number of all rows stands for padding."""
        numbers = records[0][records[0] < len(self._rows)]
        if not len(numbers):
            return
        for part in torch.split(numbers, FAST_ROWS):
            inputs = torch.from_numpy(self._rows[part.numpy()])
            # The last row is padding. Its number is that of no record here.
            chosen = torch.cat([part, part.new_full((1,), len(self._rows))])
            shares = None
            if self._persons is not None:
                shares = torch.from_numpy(np.append(1 / self._persons.rows[part.numpy()], 0.0)).to(
                    torch.float32
                )
            sums = ClippedSums(
                self._network,
                torch.cat([inputs, inputs.new_zeros(1, inputs.shape[1])]),
                self._targets[chosen].to(torch.int64),
                self._max_grad_norms,
                self._weights,
                self._alpha,
                shares,
            )
            sums.add_to(gradients, torch.arange(len(part)).unsqueeze(0))


def _check(
    records: int,
    rows: Sequence[Rows],
    seeds: Sequence[int],
    multipliers: Sequence[float],
    max_grad_norms: Sequence[float],
    sizes: Sequence[int],
) -> None:
    check_networks(
        rows, records, seeds=seeds, noise_multipliers=multipliers, max_grad_norms=max_grad_norms, sizes=sizes
    )
    if any(not math.isfinite(each) or each < 0 for each in multipliers):
        raise InvalidInput("noise_multipliers must be finite and at least 0.")
    if any(not math.isfinite(each) or each <= 0 for each in max_grad_norms) or any(
        size < 1 for size in sizes
    ):
        raise InvalidInput("max_grad_norms and sizes must be positive.")


class _Units:
    """What is sampled: single rows, or persons with all their rows. `rows` are some rows, or the number of all."""

    def __init__(self, rows: Rows | int, persons: Persons | None) -> None:
        self._rows = None if isinstance(rows, int) else rows
        self._codes: NDArray[np.integer[Any]] | None = None
        self.length = self.count = rows if isinstance(rows, int) else len(rows)
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
        """All rows."""
        return np.arange(self.length) if self._rows is None else self._rows

    def _taken(self, mask: NDArray[np.bool_]) -> Rows:
        """Return the rows of the units in a mask."""
        places = np.flatnonzero(mask if self._codes is None else mask[self._codes])
        return places if self._rows is None else self._rows[places]

    def batches(self, order: Rows, width: int) -> Iterator[Rows]:
        """Return the rows of all units in batches of so many units, in this order of the units."""
        for chosen in np.split(order, range(width, max(len(order), 1), width)):
            places = chosen if self._codes is None else np.flatnonzero(np.isin(self._codes, chosen))
            yield places if self._rows is None else self._rows[places]

    def sample(self, drawn: Callable[[int], NDArray[np.bool_]]) -> Rows:
        """Return the rows of the units for which a function draws True; it is told how many to decide about."""
        mask = np.empty(self.count, np.bool_)
        for start in range(0, self.count, _UNITS_AT_ONCE):
            part = mask[start : start + _UNITS_AT_ONCE]
            part[:] = drawn(len(part))
        return self._taken(mask)


class _Batches:
    """One batch of row indices per network and step, filled up with `padding`.

    `streams` names, per network, the stream its batches come from: networks of equal seed, size and rows share one.
    """

    def __init__(
        self,
        units: Sequence[_Units],
        seeds: Sequence[int],
        sizes: Sequence[int],
        settings: PrivateSettings,
        *,
        padding: int,
    ) -> None:
        names: dict[tuple[object, ...], int] = {}
        self.streams: list[int] = []
        self._draws: list[Iterator[Rows]] = []
        for own, seed, size in zip(units, seeds, sizes, strict=True):
            name = (seed, size, own.rows.tobytes())
            if name not in names:
                names[name] = len(names)
                self._draws.append(_seeded_batches(own, seed, size, settings))
            self.streams.append(names[name])
        self._padding = padding

    def next(self) -> Tensor:
        """Return the row indices of the next step, of shape (networks, width), or (1, width) if all share them."""
        drawn = [next(draws) for draws in self._draws]
        width = max(1, *(len(each) for each in drawn))
        batch = np.full((len(drawn), width), self._padding, np.int64)
        for line, each in zip(batch, drawn, strict=True):
            line[: len(each)] = each
        return torch.from_numpy(batch if len(drawn) == 1 else batch[self.streams])


def seeded_batches(
    rows: Rows | int, seed: int, size: int, settings: PrivateSettings, persons: Persons | None = None
) -> Iterator[Rows]:
    """Draw batches of row indices without end, from a seed."""
    return _seeded_batches(_Units(rows, persons), seed, size, settings)


def _seeded_batches(units: _Units, seed: int, size: int, settings: PrivateSettings) -> Iterator[Rows]:
    """Draw batches of units without end."""
    generator = np.random.default_rng((0x0DE5, seed))
    width = max(1, round(settings.sampling_rate * size))
    while True:
        if settings.sampling == "shuffled":
            yield from units.batches(generator.permutation(units.count), width)
        elif settings.sampling_rate == 1:
            yield units.rows
        else:
            yield units.sample(lambda count: generator.random(count) < settings.sampling_rate)


class _Noise:
    """Gaussian noise of each network's own standard deviation, from its stream's own seed."""

    def __init__(self, spreads: Sequence[float], streams: Sequence[int], seeds: Sequence[int]) -> None:
        first = [streams.index(stream) for stream in range(max(streams) + 1)]
        alike = len(first) in (1, len(streams))
        self._streams = None if alike else torch.tensor(streams)
        self._generators = [torch.Generator().manual_seed(_noise_seed(seeds[index])) for index in first]
        self._spreads = torch.tensor(spreads, dtype=torch.float32).view(-1, 1, 1)

    def write(self, gradients: Gradients) -> None:
        """Overwrite the gradients with noise."""
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
    progress: Progress | None = None,
) -> MLP:
    """Train one network that may be released: the step of `train_private_stack` with exact noise and exact sums.

    A run of ``settings.steps`` steps with Poisson sampling is what `quietmax.accounting.dpsgd.noise_multiplier`
    calibrates with ``analysis="proven"``. Centring steps come before this function, which takes the others.
    """
    targets = torch.as_tensor(np.ascontiguousarray(labels))
    if not isinstance(features, StoredRows):
        features = np.ascontiguousarray(features, dtype=np.float32)
        targets = targets.to(torch.int64)
        check_records(torch.from_numpy(features), targets, classes)
    check_positive(noise_multiplier=noise_multiplier, size=size)
    units = _Units(len(features), persons)
    check_length(len(features))
    network = _initial_network(features.shape[1], classes, settings, (seed,), torch.float64)
    update = _Update(network, settings)
    batches = _secret_batches(units, size, settings)
    for step in range(1, settings.gradient_steps + 1):
        parts = _parts(features, targets, persons, next(batches))
        sums = exact_clipped_sum_of_parts(network, parts, settings.max_grad_norm, size)
        update.take(_released(sums, settings, noise_multiplier, size))
        check_weights([tensor for _, tensor in network.parameters()])
        if progress is not None and (step % 16 == 0 or step == settings.gradient_steps):
            progress(step, settings.gradient_steps)
    return network


def _parts(
    features: NDArray[np.floating] | StoredRows, targets: Tensor, persons: Persons | None, batch: Rows
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield the records of a batch, their class indices and their factors, `ROWS_AT_ONCE` rows at a time."""
    for start in range(0, len(batch), ROWS_AT_ONCE):
        part = batch[start : start + ROWS_AT_ONCE]
        weights = None if persons is None else torch.from_numpy(1.0 / persons.rows[part])
        yield torch.from_numpy(features[part]), targets[part].to(torch.int64), weights


def check_length(records: int) -> None:
    """Raise `InvalidInput` if there are more than `LARGEST_TABLE` records."""
    if records > LARGEST_TABLE:
        raise InvalidInput(f"DP-SGD can be trained on at most {LARGEST_TABLE:,} records.")


def secret_batches(
    records: int, size: int, settings: PrivateSettings, persons: Persons | None = None
) -> Iterator[Rows]:
    """Draw batches of row indices without end, from the entropy of the operating system.

    With Poisson sampling a record or person is taken if its own 64-bit word is below the rate's share of 2^64, rounded
    down: never more often than stated, and a lower rate is at least as private.
    """
    return _secret_batches(_Units(records, persons), size, settings)


def _secret_batches(units: _Units, size: int, settings: PrivateSettings) -> Iterator[Rows]:
    """Draw batches of units without end."""
    width = max(1, round(settings.sampling_rate * size))
    threshold = np.uint64(min(int(settings.sampling_rate * 2.0**64), 2**64 - 1))
    while True:
        if settings.sampling == "poisson" and settings.sampling_rate == 1:
            yield units.rows
            continue
        if settings.sampling == "poisson":
            yield units.sample(lambda count: np.frombuffer(os.urandom(8 * count), np.uint64) < threshold)
        else:
            words = np.frombuffer(os.urandom(8 * units.count), np.uint64)
            yield from units.batches(np.argsort(words, kind="stable"), width)


def _released(sums: Gradients, settings: PrivateSettings, noise_multiplier: float, size: int) -> Gradients:
    """Release the gradients of one step with noise, divided by the expected batch."""
    vector: Tensor = torch.cat([tensor.flatten() for tensor in sums.tensors()])
    sensitivity = settings.max_grad_norm * (1 + rounding_share(len(vector), size))
    noisy = release_gaussian(vector.numpy(), sensitivity=sensitivity, mu=1 / noise_multiplier)
    expected_batch = settings.sampling_rate * size
    parts = torch.split(
        torch.from_numpy(noisy.values) / expected_batch, [tensor.numel() for tensor in sums.tensors()]
    )
    shaped = [part.view(tensor.shape) for part, tensor in zip(parts, sums.tensors(), strict=True)]
    count = len(sums.kernels)
    return Gradients(tuple(shaped[:count]), tuple(shaped[count:]))


# --- A sweep over accountants and epsilons ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Sweep:
    """Networks trained by `train_sweep`."""

    splits: tuple[Split, ...]  # The splits
    accountants: tuple[Accountant, ...]  # The accountants
    epsilons: tuple[float, ...]  # The epsilons
    plans: tuple[Plan, ...]  # The plans of one split, ordered by accountant, then epsilon
    networks: MLP  # The networks, ordered by split, then as the plans

    def network(self, split: int, accountant: Accountant, epsilon: float) -> MLP:
        """Return one of the networks."""
        place = self.accountants.index(accountant) * len(self.epsilons) + self.epsilons.index(epsilon)
        return self.networks.network(split * len(self.plans) + place)

    def accuracies(self) -> NDArray[np.float64]:
        """Return the test accuracies, an array of shape (splits, accountants, epsilons)."""
        found = np.empty((len(self.splits), len(self.plans)))
        for split, data in enumerate(self.splits):
            for place in range(len(self.plans)):
                network = self.networks.network(split * len(self.plans) + place)
                answers = network.logits(data.test.features).argmax(-1).numpy()
                found[split, place] = (answers == data.test.labels).mean()
        return found.reshape(len(self.splits), len(self.accountants), len(self.epsilons))


def train_sweep(
    data: Sequence[Split],
    *,
    epsilons: Sequence[float],
    accountants: Sequence[Accountant],
    analysis: NoiseAnalysis = "published",
    preset: Preset = "paper",
    alpha: float | None = None,
    learning_rate: float | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """Train one network per split, accountant and epsilon, all at once."""
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
            analysis=analysis,
            preset=preset,
            learning_rate=learning_rate,
        )
        for accountant in accountants
        for epsilon in epsilons
    ]
    settings = plans[0].settings
    if any(each.settings != settings for each in plans):
        raise InvalidInput("All networks of a sweep must have the same settings, as with preset='paper'.")
    networks = train_private_stack(
        records.features,
        records.labels,
        records.classes,
        [each.train_rows for each in data for _ in plans],
        settings=settings,
        noise_multipliers=[each.noise_multiplier for each in plans] * len(data),
        seeds=[each.seed for each in data for _ in plans],
        alpha=alpha,
        progress=progress,
    )
    return Sweep(tuple(data), tuple(accountants), tuple(epsilons), tuple(plans), networks)


Build = Callable[[int, int], torch.nn.Module]

ROUNDING = 2.0**-10
"""Share of the clipping norm that is added to the sensitivity, for sums in floating point."""
_ROWS_AT_ONCE = 256


def own_module_condition(unit: Unit) -> Condition:
    """Return the condition of a module of the user's own."""
    return Condition(
        "The module is the user's own.",
        (
            "The module computes every record of a batch by itself.",
            f"One {unit} moves the module's clipped gradient sums, computed in floating point, by at most 1.001 clip "
            "norms.",
        ),
    )


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
    progress: Progress | None = None,
) -> torch.nn.Module:
    """Train a module with the steps of `train_private_stack`."""
    records, targets = len(features), torch.from_numpy(labels)
    clipped = _Clipped(module.train(), settings.max_grad_norm)
    parameters = clipped.parameters
    optimizer = _optimizer(parameters, settings)
    noise = _ModuleNoise(settings.max_grad_norm, noise_multiplier, seed)
    batches: Iterator[Rows]
    if seed is None:
        batches = secret_batches(records, size, settings, persons)
    else:
        batches = seeded_batches(records, seed, size, settings, persons)
    expected = settings.sampling_rate * size
    for step, rate in enumerate(settings.learning_rates().tolist(), start=1):
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = torch.from_numpy(next(batches))
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for part in torch.split(batch, _ROWS_AT_ONCE):
            inputs = torch.from_numpy(features[part.numpy()])
            weights = torch.ones(len(part))
            if persons is not None:
                weights = torch.from_numpy(1 / persons.rows[part.numpy()]).float()
            clipped.add_to(sums, inputs, targets[part].to(torch.int64), weights)
        for parameter, total in zip(parameters, noise.added(sums), strict=True):
            parameter.grad = total / expected
        optimizer.step()
        check_weights(parameters)
        if progress is not None:
            progress(step, settings.steps)
    return clipped.unwrapped().eval()


class _Clipped:
    """Sums of clipped per-example gradients of a module wrapped by Opacus."""

    def __init__(self, module: torch.nn.Module, max_grad_norm: float) -> None:
        self._module, self._max_grad_norm = module, max_grad_norm
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not self.parameters:
            raise InvalidInput("The module has no trainable parameter.")
        self._wrapped = self._wrap(ghost=True)

    def _wrap(self, *, ghost: bool) -> Any:
        """Return the module with Opacus's hooks."""
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
                self.unwrapped()
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

    def unwrapped(self) -> torch.nn.Module:
        """Return the module without Opacus's hooks."""
        self._wrapped.zero_grad()
        module: torch.nn.Module = self._wrapped.to_standard_module()
        for parameter in self.parameters:
            parameter.grad = None
        return module


class _ModuleNoise:
    """Exact noise from the operating system, or seeded noise for experiments."""

    def __init__(self, max_grad_norm: float, multiplier: float, seed: int | None) -> None:
        self._max_grad_norm, self._multiplier = max_grad_norm, multiplier
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    def added(self, sums: list[Tensor]) -> list[Tensor]:
        """Return the sums with noise added."""
        if self._generator is not None:
            spread = self._max_grad_norm * self._multiplier
            return [total + spread * torch.randn(total.shape, generator=self._generator) for total in sums]
        vector = torch.cat([total.flatten() for total in sums]).double().numpy()
        noisy = release_gaussian(
            vector, sensitivity=self._max_grad_norm * (1 + ROUNDING), mu=1 / self._multiplier
        )
        parts = torch.split(torch.from_numpy(noisy.values), [total.numel() for total in sums])
        return [part.view(total.shape).to(total.dtype) for part, total in zip(parts, sums, strict=True)]


def _optimizer(parameters: list[torch.nn.Parameter], settings: PrivateSettings) -> torch.optim.Optimizer:
    """Return torch's optimizer with the L2 penalty on kernels."""
    groups = [
        {"params": [each for each in parameters if each.ndim > 1], "weight_decay": 2 * settings.l2},
        {"params": [each for each in parameters if each.ndim <= 1], "weight_decay": 0.0},
    ]
    used = [group for group in groups if group["params"]]
    if settings.optimizer == "adam":
        return torch.optim.Adam(used, lr=settings.learning_rate, eps=1e-7)
    momentum = 0.9 if settings.optimizer == "momentum" else 0.0
    return torch.optim.SGD(used, lr=settings.learning_rate, momentum=momentum)

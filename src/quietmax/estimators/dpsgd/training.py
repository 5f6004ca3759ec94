"""DP-SGD for K networks at once, for experiments: each with its own noise, max_grad_norm norm, seed and records.

As in `ensemble`, every operation works on all K networks; the clipped sums need no per-example gradient (see
`clipped_sums`). Everything is float32 and seeded: repeatable, fast, and for both reasons no protection. A model to be
released is trained by `private_release`.

Networks of one seed and the same records see the same batches and the same standard noise, each scaled by its own
noise multiplier: exactly what each would see alone, drawn once. So a sweep over epsilons compares like with like.

The loss is cross-entropy, which the paper's preset table names. The convexified loss is no mean of per-example
losses: a record's weight in it depends on the other records of the batch, so there is no per-example gradient to max_grad_norm.
What can be clipped is the convexified loss of each record as a batch of one; ``alpha`` asks for that analysis.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quietmax.accounting.dpsgd import Accountant, NoiseAnalysis
from quietmax.data.records import Split
from quietmax.errors import InvalidInput
from quietmax.estimators.dpsgd.config import Plan, Preset, PrivateSettings, Update, plan
from quietmax.estimators.dpsgd.gradients import LARGEST_BATCH, ClippedSums, Gradients, exact_clipped_sum
from quietmax.models.losses import Convexified
from quietmax.models.mlp import MLP, initial_mlp
from quietmax.models.stacked import Progress, Rows, check_networks, check_records, check_weights
from quietmax.noise.release import release_gaussian


def train_private_stack(
    features: NDArray[np.floating] | Tensor,
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
    progress: Progress | None = None,
) -> MLP:
    """Train one network per entry of ``rows`` on those records of the shared ``features`` and ``labels``.

    ``max_grad_norms`` gives each network its own max_grad_norm norm. ``sizes`` are the public (declared) numbers of records by which
    steps are scaled, by default the true ones. ``alpha`` convexifies each record's loss by itself. A step is

        w <- w - rate * (sum of clipped gradients + N(0, (multiplier*max_grad_norm)^2)) / (sampling_rate * size),

    or the same gradient given to momentum or Adam.
    """
    inputs = torch.as_tensor(features).to(torch.float32)
    targets = torch.as_tensor(labels).to(torch.int64)
    limits = [settings.max_grad_norm] * len(rows) if max_grad_norms is None else list(max_grad_norms)
    declared = [len(each) for each in rows] if sizes is None else list(sizes)
    check_records(inputs, targets, classes)
    _check(len(inputs), rows, seeds, noise_multipliers, limits, declared)
    if alpha is not None:
        Convexified(alpha)  # refuses constants that make no sense
    network = initial_mlp((inputs.shape[1], *settings.hidden, classes), settings.activation, tuple(seeds))
    batches = _Batches(rows, seeds, declared, settings, padding=len(inputs))
    expected = [settings.sampling_rate * size for size in declared]
    sums = ClippedSums(
        network,
        torch.cat([inputs, inputs.new_zeros(1, inputs.shape[1])]),
        torch.cat([targets, targets.new_zeros(1)]),
        torch.tensor(limits, dtype=torch.float32),
        torch.tensor([1 / batch for batch in expected], dtype=torch.float32),
        alpha,
    )
    spreads = [
        multiplier * max_grad_norm / batch
        for multiplier, max_grad_norm, batch in zip(noise_multipliers, limits, expected, strict=True)
    ]
    noise = _Noise(spreads, batches.streams, seeds)
    gradients, update = Gradients.zeros(network), Update(network, settings)
    for step in range(1, settings.steps + 1):
        # Noise first, the clipped gradients on top of it: one pass over memory less.
        noise.write(gradients)
        sums.add_to(gradients, batches.next())
        update.take(gradients)
        if progress is not None and (step % 64 == 0 or step == settings.steps):
            progress(step, settings.steps)
    check_weights([tensor for _, tensor in network.parameters()])
    return network


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
        raise InvalidInput("A noise multiplier is negative or not finite; give numbers from 0 up.")
    if any(not math.isfinite(each) or each <= 0 for each in max_grad_norms) or any(
        size < 1 for size in sizes
    ):
        raise InvalidInput("Clip norms and sizes must be positive; give such numbers.")


class _Batches:
    """One batch of row indices per network and step, filled up with `padding`.

    `streams` names, per network, the stream its batches come from: networks of equal seed, size and rows share one.
    """

    def __init__(
        self,
        rows: Sequence[Rows],
        seeds: Sequence[int],
        sizes: Sequence[int],
        settings: PrivateSettings,
        *,
        padding: int,
    ) -> None:
        names: dict[tuple[object, ...], int] = {}
        self.streams: list[int] = []
        self._draws: list[Iterator[Rows]] = []
        for each, seed, size in zip(rows, seeds, sizes, strict=True):
            own = np.asarray(each, np.int64)
            name = (seed, size, own.tobytes())
            if name not in names:
                names[name] = len(names)
                self._draws.append(seeded_batches(own, seed, size, settings))
            self.streams.append(names[name])
        self._padding = padding

    def next(self) -> Tensor:
        """Row indices of the next step, of shape (networks, width), or (1, width) if all networks share them."""
        drawn = [next(draws) for draws in self._draws]
        width = max(1, *(len(each) for each in drawn))
        batch = np.full((len(drawn), width), self._padding, np.int64)
        for line, each in zip(batch, drawn, strict=True):
            line[: len(each)] = each
        return torch.from_numpy(batch if len(drawn) == 1 else batch[self.streams])


def seeded_batches(rows: Rows, seed: int, size: int, settings: PrivateSettings) -> Iterator[Rows]:
    """Batches of row indices without end, from a seed."""
    generator = np.random.default_rng((0x0DE5, seed))
    width = max(1, round(settings.sampling_rate * size))
    while True:
        if settings.sampling == "shuffled":
            order = generator.permutation(rows)
            yield from np.split(order, range(width, max(len(order), 1), width))
        elif settings.sampling_rate == 1:
            yield rows
        else:
            yield rows[generator.random(len(rows)) < settings.sampling_rate]


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


ROUNDING = 2.0**-20
"""Added to the sensitivity as a share of the max_grad_norm norm: far more than rounding the finished sum to float64 can do."""


def train_private(
    features: NDArray[np.floating],
    labels: NDArray[np.integer],
    classes: int,
    *,
    settings: PrivateSettings,
    noise_multiplier: float,
    size: int,
    seed: int,
    progress: Progress | None = None,
) -> MLP:
    """Train one network with exact noise; ``size`` is the declared number of records, ``seed`` fixes the first weights.

    The step is that of `train_private_stack`. A run of ``settings.steps`` steps with Poisson sampling is what
    `quietmax.accounting.dpsgd.noise_multiplier` calibrates in its proven analysis.
    """
    inputs = torch.as_tensor(np.ascontiguousarray(features, dtype=np.float32))
    targets = torch.as_tensor(np.ascontiguousarray(labels, dtype=np.int64))
    check_records(inputs, targets, classes)
    if not 0 < noise_multiplier < np.inf or size < 1:
        raise InvalidInput(
            f"The noise multiplier is {noise_multiplier} and the size {size}, but must be positive; give such ones."
        )
    if len(inputs) > LARGEST_BATCH:
        raise InvalidInput(
            f"There are {len(inputs)} records, but at most {LARGEST_BATCH} can be summed exactly; give fewer."
        )
    widths = (inputs.shape[1], *settings.hidden, classes)
    network = initial_mlp(widths, settings.activation, (seed,), torch.float64)
    update = Update(network, settings)
    batches = unforeseeable_batches(len(inputs), size, settings)
    for step in range(1, settings.steps + 1):
        batch = torch.from_numpy(next(batches))
        sums = exact_clipped_sum(network, inputs[batch], targets[batch], settings.max_grad_norm)
        update.take(_released(sums, settings.max_grad_norm, noise_multiplier, settings.sampling_rate * size))
        check_weights([tensor for _, tensor in network.parameters()])
        if progress is not None and (step % 16 == 0 or step == settings.steps):
            progress(step, settings.steps)
    return network


def unforeseeable_batches(records: int, size: int, settings: PrivateSettings) -> Iterator[Rows]:
    """Batches of row indices without end, from the operating system's entropy.

    Poisson: a record is taken if its 64-bit word is below the rate's share of 2^64, rounded down: never more often
    than stated, and a lower rate is at least as private.
    """
    everyone = np.arange(records)
    width = max(1, round(settings.sampling_rate * size))
    threshold = np.uint64(min(int(settings.sampling_rate * 2.0**64), 2**64 - 1))
    while True:
        if settings.sampling == "poisson" and settings.sampling_rate == 1:
            yield everyone
            continue
        words = np.frombuffer(os.urandom(8 * records), np.uint64)
        if settings.sampling == "poisson":
            yield everyone[words < threshold]
        else:
            yield from np.split(np.argsort(words, kind="stable"), range(width, max(records, 1), width))


def _released(
    sums: Gradients, max_grad_norm: float, noise_multiplier: float, expected_batch: float
) -> Gradients:
    """All gradients of one step with noise, divided by the expected batch."""
    vector: Tensor = torch.cat([tensor.flatten() for tensor in sums.tensors()])
    noisy = release_gaussian(
        vector.numpy(), sensitivity=max_grad_norm * (1 + ROUNDING), mu=1 / noise_multiplier
    )
    parts = torch.split(
        torch.from_numpy(noisy.values) / expected_batch, [tensor.numel() for tensor in sums.tensors()]
    )
    shaped = [part.view(tensor.shape) for part, tensor in zip(parts, sums.tensors(), strict=True)]
    count = len(sums.kernels)
    return Gradients(tuple(shaped[:count]), tuple(shaped[count:]))


@dataclass(frozen=True, eq=False)
class Sweep:
    """Trained networks, ordered by split, then accountant, then epsilon; ``plans`` are those of one split."""

    splits: tuple[Split, ...]
    accountants: tuple[Accountant, ...]
    epsilons: tuple[float, ...]
    plans: tuple[Plan, ...]
    networks: MLP

    def network(self, split: int, accountant: Accountant, epsilon: float) -> MLP:
        """One of the networks."""
        place = self.accountants.index(accountant) * len(self.epsilons) + self.epsilons.index(epsilon)
        return self.networks.network(split * len(self.plans) + place)

    def accuracies(self) -> NDArray[np.float64]:
        """Test accuracies of shape (splits, accountants, epsilons)."""
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
    progress: Progress | None = None,
) -> Sweep:
    """Train one network per split, accountant and epsilon, all at once; the splits must divide the same records.

    A split's own seed fixes initial weights, batches and noise. ``alpha`` convexifies each record's loss by itself.
    """
    if not data or any(each.records is not data[0].records for each in data):
        raise InvalidInput(
            "The splits must divide one and the same records; load them once, then split repeatedly."
        )
    sizes = {len(each.train_rows) for each in data}
    if len(sizes) != 1:
        raise InvalidInput(
            f"The training parts have {sorted(sizes)} records, but a sweep needs equal ones; split alike."
        )
    records, size = data[0].records, sizes.pop()
    plans = [
        plan(size, epsilon=epsilon, accountant=accountant, analysis=analysis, preset=preset)
        for accountant in accountants
        for epsilon in epsilons
    ]
    settings = plans[0].settings
    if any(each.settings != settings for each in plans):
        raise InvalidInput(
            "A sweep needs one learning rate for all networks; take the preset 'paper', or train one by one."
        )
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

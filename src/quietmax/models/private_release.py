"""DP-SGD for one network that is to be released: exact sums, exact noise, batches nobody can foresee.

Every step: each record is taken by its own random 64-bit word from the operating system, the clipped gradients are
summed without rounding (`exact_sums`), the sum goes through `release_gaussian`, and the rest is post-processing of
what was released and of public numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quietmax.errors import InvalidInput
from quietmax.models.checked_training import Rows, check_records, check_weights
from quietmax.models.clipped_sums import Gradients
from quietmax.models.ensemble import Progress
from quietmax.models.exact_sums import LARGEST_BATCH, exact_clipped_sum
from quietmax.models.mlp import MLP, initial_mlp
from quietmax.models.private_settings import PrivateSettings, Update
from quietmax.noise import release_gaussian

ROUNDING = 2.0**-20
"""Added to the sensitivity as a share of the clip norm: far more than rounding the finished sum to float64 can do."""


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
    `quietmax.accounting.dpsgd.noise_multiplier` calibrates in its proven reading.
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
        sums = exact_clipped_sum(network, inputs[batch], targets[batch], settings.clip)
        update.take(_released(sums, settings.clip, noise_multiplier, settings.sampling_rate * size))
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


def _released(sums: Gradients, clip: float, noise_multiplier: float, expected_batch: float) -> Gradients:
    """All gradients of one step with noise, divided by the expected batch."""
    vector: Tensor = torch.cat([tensor.flatten() for tensor in sums.tensors()])
    noisy = release_gaussian(vector.numpy(), sensitivity=clip * (1 + ROUNDING), mu=1 / noise_multiplier)
    parts = torch.split(
        torch.from_numpy(noisy.values) / expected_batch, [tensor.numel() for tensor in sums.tensors()]
    )
    shaped = [part.view(tensor.shape) for part, tensor in zip(parts, sums.tensors(), strict=True)]
    count = len(sums.kernels)
    return Gradients(tuple(shaped[:count]), tuple(shaped[count:]))

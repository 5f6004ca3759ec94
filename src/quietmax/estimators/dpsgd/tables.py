"""DP-SGD of a linear model on the cells of a table's rows: the exact sums of a head (`head.tables`) over samples.

The first steps release the counts of people in each cell. A record adds 1 in each of m columns, so with noise of
standard deviation `sigma sqrt(m)` this is the mechanism of any other step. `head.tables` bounds what a person changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from quietmax.errors import InvalidInput
from quietmax.estimators.blocks import Floats, Table
from quietmax.estimators.dpsgd.training import (
    Batch,
    Plan,
    StoredRows,
    _check_length,
    _draw_batches,
    _randomness,
    _Update,
)
from quietmax.estimators.head.exact_sums import gradient_grid
from quietmax.estimators.head.tables import Basis, _Residuals, released_counts, with_lengths
from quietmax.estimators.head.weights import _gradient_sensitivity
from quietmax.noise.release import release_gaussian


def _batches(rows: StoredRows, plan: Plan, seed: int | None) -> Iterator[Batch]:
    _check_length(len(rows))
    for numbers in _draw_batches(len(rows), plan.size, plan.settings, rows.persons, seed=seed):
        yield Batch(rows, rows.labels, rows.blocks.classes, rows.persons, numbers)


def released_shares(
    rows: StoredRows, plan: Plan, sizes: tuple[int, ...], seed: int | None
) -> tuple[Floats, float]:
    """Release the share of people in each cell by the centring steps of a plan; also return the noise in a share."""
    source, drawn = _randomness(0xCE27, seed)
    batches, steps = _batches(rows, plan, drawn), plan.settings.centring_steps
    expected = steps * plan.settings.sampling_rate * plan.size
    total, noise = np.zeros(sum(sizes)), 0.0
    for _ in range(steps):
        counts, noise = released_counts(next(batches), sizes, 1 / plan.noise_multiplier, source)
        total += counts
    return np.clip(total / expected, 0.0, 1.0), noise * math.sqrt(steps) / expected


def train_on_cells(
    rows: StoredRows, basis: Basis, plan: Plan, sizes: tuple[int, ...], seed: int | None
) -> Floats:
    """Take the gradient steps of a plan; return what each cell, and last every row, adds to the outputs.

    Two classes have one output, the difference of their scores.
    """
    source, drawn = _randomness(0xCE11, seed)
    settings, batches = plan.settings, _batches(rows, plan, drawn)
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

"""DP-SGD on the cells of a table's rows: the exact sums of a head (`head.tables`) over samples.

The first steps release the counts of people in each cell. A record adds 1 in each of m columns, so with noise of
standard deviation `sigma sqrt(m)` this is the mechanism of any other step. `head.tables` bounds what a person changes.

In a network the first layer sees `z = D (B' e - c)` as a head does: what it computes is one number per cell, looked up
and added (`CellLayer`). A record's gradient there is the outer product of its slope r and z. It is clipped together
with those of the other layers (`gradients`), with an upper bound on the length of z, and the sums of r in each cell are
integers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quietmax.errors import InvalidInput
from quietmax.estimators.blocks import Floats, Table
from quietmax.estimators.dpsgd.gradients import (
    ROWS_AT_ONCE,
    Gradients,
    _activated,
    _ExactSums,
    rounding_share,
)
from quietmax.estimators.dpsgd.training import (
    Batch,
    Plan,
    StoredRows,
    _check_length,
    _draw_batches,
    _initial_network,
    _randomness,
    _Update,
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
from quietmax.estimators.head.weights import TableWeights, _gradient_sensitivity, added_scores
from quietmax.models.mlp import MLP
from quietmax.models.stacked import check_weights
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
    """Take the gradient steps of a plan; return what each cell, and last every row, adds to the first layer, and the
    network above that layer.
    """
    source, drawn = _randomness(0xCE11, seed)
    settings, batches, grid = plan.settings, _batches(rows, plan, drawn), gradient_grid(plan.size)
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

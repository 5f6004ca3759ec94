"""The gradient route: full-batch gradient steps on exact clipped sums, each released with Gaussian noise (THEORY 3.1).

Everything that leaves here went through `release_gaussian`: the noisy count, the noisy sum of features, and
one noisy gradient sum per step. The rest is post-processing of these and of public numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quietmax.accounting import GaussianCost
from quietmax.errors import InvalidInput
from quietmax.estimators.head_plan import GradientPlan
from quietmax.estimators.head_table import (
    BITS,
    GRID,
    ROWS_AT_ONCE,
    Floats,
    Table,
    clipped_rows,
    gradient_sum,
    on_grid,
    row_sum,
    unit_rows,
)
from quietmax.models.features import FeatureMap
from quietmax.noise import NoiseSource, release_gaussian
from quietmax.sensitivity import Sensitivity, certified

RECORDS_AT_ONCE = 4096
_LARGEST_WEIGHT = 2.0**200
_SPARE = 1.0 - 1e-12
"""Shares of mu^2 are rounded; this keeps their sum below the whole."""


@dataclass(frozen=True)
class Allowance:
    """mu of each release: the count, the centre, and all of training together. None: no such release."""

    size: float | None
    centre: float | None
    training: float

    @classmethod
    def of(cls, mu: float, size_share: float, centring_share: float) -> Allowance:
        """Divide mu^2 by shares.

        >>> Allowance.of(1.0, 0.0, 0.36)
        Allowance(size=None, centre=0.5999999999994, training=0.7999999999992)
        """

        def part(share: float) -> float | None:
            return mu * math.sqrt(share) * _SPARE if share > 0.0 else None

        return cls(
            part(size_share), part(centring_share), mu * math.sqrt(1 - size_share - centring_share) * _SPARE
        )

    def costs(self, steps: int) -> list[GaussianCost]:
        """What every release costs, `steps` of them in training."""
        first = [GaussianCost(mu) for mu in (self.size, self.centre) if mu is not None]
        return first + [GaussianCost(self.per_step(steps))] * steps

    def per_step(self, steps: int) -> float:
        """mu of one of the training releases."""
        return self.training / math.sqrt(steps)


def released_size(records: int, mu: float, source: NoiseSource) -> float:
    """A noisy count, at least 1: one record changes the count by 1."""
    noisy = release_gaussian([float(records)], sensitivity=1.0, mu=mu, source=source).values[0]
    return max(1.0, float(np.rint(noisy)))


def released_centre(rows: NDArray[np.float32], size: float, mu: float, source: NoiseSource) -> Floats:
    """Noisy mean of clipped rows, shortened to length at most 1 (as a mean must be) and put on the grid."""
    noisy = release_gaussian(row_sum(rows)[:-1], sensitivity=1.0, mu=mu, source=source).values / size
    length = math.sqrt(float(np.square(noisy).sum()))
    return on_grid(noisy * ((1.0 - 2.0**-BITS) / max(length, 1.0)))


def clipped_features(
    feature_map: FeatureMap, records: NDArray[np.float32], radius: float
) -> NDArray[np.float32]:
    """Public features of every record, clipped and on the grid, with an empty last column for the constant one."""
    rows = np.zeros((len(records), feature_map.dimension(records.shape[1]) + 1), dtype=np.float32)
    for start in range(0, len(records), RECORDS_AT_ONCE):
        part = slice(start, start + RECORDS_AT_ONCE)
        rows[part, :-1] = clipped_rows(feature_map.transform(records[part]), radius)
    return rows


def centred(rows: NDArray[np.float32], centre: Floats, bias: float) -> NDArray[np.float32]:
    """Unit rows around the centre, with the constant feature; overwrites `rows`, which can be large."""
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        rows[part] = unit_rows(rows[part, :-1].astype(np.float64), centre, bias)
    return rows


def gradient_sensitivity(table: Table, plan: GradientPlan) -> Sensitivity:
    """How far one record moves a released gradient sum."""
    return certified.head_gradient(plan.clip, coordinates=table.classes * table.features, grid=GRID)


def descend(
    table: Table,
    plan: GradientPlan,
    size: float,
    mu: float,
    source: NoiseSource,
    watch: Callable[[int, Floats], None] | None = None,
) -> Floats:
    """Weights (C, d) after the planned noisy steps: exactly mu-Gaussian private for all steps together.

    `watch` is called with every step's number and released weights.
    """
    sensitivity = gradient_sensitivity(table, plan)
    per_step = mu / math.sqrt(plan.steps)
    weights = np.zeros((table.classes, table.features))
    for step in range(plan.steps):
        total = gradient_sum(table, weights, plan.clip)
        noisy = release_gaussian(total, sensitivity=sensitivity.value, mu=per_step, source=source).values
        weights = weights - (plan.rate / size) * noisy
        if not np.abs(weights).max() < _LARGEST_WEIGHT:  # decided on released numbers alone
            raise InvalidInput(
                f"The weights grew beyond bounds at rate {plan.rate:g}; choose a smaller rate."
            )
        if watch is not None:
            watch(step + 1, weights)
    centred_weights: Floats = weights - weights.mean(axis=0)
    return centred_weights

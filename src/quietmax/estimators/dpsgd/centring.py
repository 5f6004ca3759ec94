"""Centring for DP-SGD: the first steps release the mean of the features, and all rows are centred by it.

A centring step is a step like any other. Each record is taken with the sampling rate, and the sum of the rows taken,
each of length at most 1, is released with Gaussian noise of standard deviation sigma. A step on gradients clipped to S
has noise of sigma*S. Both are the same mechanism up to the factor S, so the accountant counts all steps alike.

A row f becomes `5 (f - m) / ||(f - m, 0.2)||`, for the released mean m: the row of the private head, times 5, so that
the constant feature 0.2 of the head becomes the bias of the network. Features of tables are scaled by the released mean
as well (`TableFeatures.scale`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quietmax.estimators.blocks import ROWS_AT_ONCE, Floats, Table
from quietmax.estimators.dpsgd.config import ROW_LENGTH, Plan
from quietmax.estimators.dpsgd.stored_rows import StoredRows
from quietmax.estimators.dpsgd.training import check_length, secret_batches, seeded_batches
from quietmax.estimators.head.exact_sums import (
    BITS,
    clipped_rows,
    on_grid,
    row_sum,
    unit_rows,
    whitened_rows,
)
from quietmax.estimators.training_set import Persons
from quietmax.noise.release import release_gaussian
from quietmax.noise.sources import EXACT, NoiseSource, SeededNoise


@dataclass(frozen=True, eq=False)
class Centring:
    """What makes rows of features centred, from released and public numbers."""

    centre: Floats  # The released mean of the features, clipped to the radius and divided by it
    radius: float  # Features are clipped to this length
    scale: Floats | None = None

    def rows(self, features: NDArray[np.floating]) -> NDArray[np.float32]:
        """Return what the network sees; each row depends on its own features alone."""
        rows = np.empty(np.shape(features), dtype=np.float32)
        for start in range(0, len(rows), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            clipped = clipped_rows(np.asarray(features[part], dtype=np.float32), self.radius)
            centred = unit_rows(clipped, self.centre, 1.0 / ROW_LENGTH)
            if self.scale is not None:
                centred = whitened_rows(centred, self.scale)
            rows[part] = ROW_LENGTH * centred[:, :-1]
        return rows


def released_centre(
    features: NDArray[np.float32] | StoredRows,
    plan: Plan,
    *,
    radius: float,
    seed: int | None = None,
    persons: Persons | None = None,
) -> Floats:
    """Release the mean of clipped features by the centring steps of a plan."""
    settings, records = plan.settings, len(features)
    check_length(records)
    source: NoiseSource = EXACT
    batches = secret_batches(records, plan.size, settings, persons)
    if seed is not None:
        first, second = (int(word) for word in np.random.SeedSequence((0xCE27, seed)).generate_state(2))
        source = SeededNoise(first)
        batches = seeded_batches(records, second, plan.size, settings, persons)
    total = np.zeros(features.shape[1])
    for _ in range(settings.centring_steps):
        exact = _batch_sum(features, next(batches), radius, persons)
        total += release_gaussian(exact, sensitivity=1.0, mu=1 / plan.noise_multiplier, source=source).values
    mean = total / (settings.centring_steps * settings.sampling_rate * plan.size)
    length = math.sqrt(float(np.square(mean).sum()))
    return on_grid(mean * ((1.0 - 2.0**-BITS) / max(length, 1.0)))


def centre_noise(plan: Plan) -> float:
    """Return the standard deviation of the noise on each coordinate of a released centre."""
    settings = plan.settings
    expected = settings.sampling_rate * plan.size
    return plan.noise_multiplier / (math.sqrt(settings.centring_steps) * expected)


def _batch_sum(
    features: NDArray[np.float32] | StoredRows,
    batch: NDArray[np.int64],
    radius: float,
    persons: Persons | None,
) -> Floats:
    """Sum the clipped rows of a batch without rounding; a row of a person with k rows counts 1/k.

    One record, or all rows of one person, change the sum by at most 1 in L2.
    """
    total = np.zeros(features.shape[1])
    for start in range(0, len(batch), ROWS_AT_ONCE):
        part = batch[start : start + ROWS_AT_ONCE]
        rows = clipped_rows(features[part], radius).astype(np.float32)
        # Sums are integer multiples of 2^-20 below 2^33, so adding them is exact.
        repeats = None if persons is None else persons.rows[part]
        total += row_sum(Table(rows, np.zeros(len(part), np.int64), 1, repeats))
    return total

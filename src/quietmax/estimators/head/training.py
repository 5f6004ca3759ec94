"""How a head is trained: settings computed from public numbers only, the same rule for every data set.

The rule of the gradient method is one number. After T steps of learning_rate eta, noise of standard deviation `kappa
= eta * S * T / (mu * N)` has gathered on every logit (features have length 1), so eta follows from a chosen
kappa. In trials on MNIST, CIFAR-10, Adult, Location and small tables, at N from 120 to 60,000 and epsilon
from 1 to 10, kappa = 0.7 was the best or as good as the best, whatever T, S, the number of classes and of
features. More steps hardly matter once a step is short (`eta * S` about 20) and cost time, so their number
is limited by the size of the head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quietmax.accounting.costs import GaussianCost
from quietmax.errors import InvalidInput
from quietmax.estimators.head.exact_sums import (
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
from quietmax.models.features.base import FeatureMap
from quietmax.models.features.images import Scattering
from quietmax.models.features.tabular import UnitNorm
from quietmax.noise.release import release_gaussian
from quietmax.noise.sources import NoiseSource
from quietmax.sensitivity import certified
from quietmax.sensitivity.base import Sensitivity

SIZE_SHARE = 0.01
"""Share of mu^2 spent on a noisy count when the size is not declared."""
CENTRING_SHARE = 0.05
"""Share of mu^2 spent on the mean feature vector."""
BIAS = 0.2
"""The constant feature beside features of length about 1."""
GRADIENT_NOISE = 0.7
"""kappa: standard deviation that all noise together may have on a logit."""
OUTPUT_NOISE = 0.25
"""The same for the output method, whose logits are kept small by the regulariser."""
QUERY_NOISE = 0.15
"""The same for answers per query, where epsilon takes the place of mu."""
CLIP = 0.2
FEWEST_STEPS, MOST_STEPS = 30, 300
SHORT_STEP, LONGEST_STEP = 20.0, 300.0
VALUES_DRAWN = 1.6e6
"""Steps are limited so that about this many noise values are drawn, if the fewest steps do not need more."""
SMALLEST_REGULARISATION = 1e-6
TOLERANCE = 0.005
"""The solver's gradient may be this share of one record's, which adds 1% to the sensitivity."""
TILTED_TOLERANCE = 1e-6
"""The same for the convexified loss, whose gradient does not shrink with the size."""


CONSTANT_PER_COLUMN = 0.3
"""Default features of tables: `UnitNorm` with this constant times the root of the number of columns."""


def default_features(columns: int, image_shape: tuple[int, int, int] | None = None) -> FeatureMap:
    """Wavelet scattering for images; for a table each record divided by its length together with a constant.

    >>> default_features(100)
    UnitNorm(constant=3.0)
    """
    if image_shape is not None:
        return Scattering(image_shape)
    return UnitNorm(CONSTANT_PER_COLUMN * math.sqrt(columns))


@dataclass(frozen=True)
class GradientPlan:
    """T full-batch steps `W <- W - (learning_rate / size) * (clipped gradient sum + noise)`."""

    steps: int
    learning_rate: float
    max_grad_norm: float

    def to_json(self) -> dict[str, Any]:
        """The three numbers."""
        return asdict(self)


@dataclass(frozen=True)
class OutputPlan:
    """Minimise with `(regularisation / 2) ||W||^2` until `||gradient|| <= tolerance`, then release."""

    regularisation: float
    tolerance: float

    def to_json(self) -> dict[str, Any]:
        """The two numbers."""
        return asdict(self)


def gradient_plan(
    size: float,
    features: int,
    classes: int,
    mu: float,
    *,
    steps: int | None = None,
    learning_rate: float | None = None,
    max_grad_norm: float | None = None,
) -> GradientPlan:
    """Fill in what is not given, for a declared size and mu of all the steps together.

    >>> gradient_plan(10_000, 3970, 10, 0.26).steps
    40
    """
    strength = GRADIENT_NOISE * mu * size
    if steps is None:
        affordable = max(FEWEST_STEPS, min(MOST_STEPS, int(VALUES_DRAWN / (features * classes))))
        steps = min(max(math.ceil(strength / SHORT_STEP), FEWEST_STEPS), affordable)
    max_grad_norm = CLIP if max_grad_norm is None else max_grad_norm
    if learning_rate is None:
        learning_rate = min(strength / steps, LONGEST_STEP) / max_grad_norm
    return GradientPlan(int(steps), float(learning_rate), float(max_grad_norm))


def output_plan(
    size: float, strength: float, *, noise: float = OUTPUT_NOISE, regularisation: float | None = None
) -> OutputPlan:
    """`lam = sqrt(2) / (kappa * N * strength)`, strength being mu (weights released) or epsilon (per query).

    Then the noise on a logit has a scale of about kappa (`noise`).

    >>> round(output_plan(10_000, 0.26).regularisation, 5)
    0.00218
    """
    if regularisation is None:
        regularisation = max(math.sqrt(2) / (noise * size * strength), SMALLEST_REGULARISATION)
    return OutputPlan(float(regularisation), TOLERANCE * math.sqrt(2) / size)


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
    return certified.head_gradient(plan.max_grad_norm, coordinates=table.classes * table.features, grid=GRID)


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
        total = gradient_sum(table, weights, plan.max_grad_norm)
        noisy = release_gaussian(total, sensitivity=sensitivity.value, mu=per_step, source=source).values
        weights = weights - (plan.learning_rate / size) * noisy
        if not np.abs(weights).max() < _LARGEST_WEIGHT:  # decided on released numbers alone
            raise InvalidInput(
                f"The weights grew beyond bounds at learning_rate {plan.learning_rate:g}; choose a smaller learning_rate."
            )
        if watch is not None:
            watch(step + 1, weights)
    centred_weights: Floats = weights - weights.mean(axis=0)
    return centred_weights

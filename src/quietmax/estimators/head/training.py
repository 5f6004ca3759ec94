"""Training of a private head: public features, the noisy size, centre and moments, settings, and the gradient method.

All settings follow from public numbers, by the same rule for every data set. The rule of the gradient method is one
number. The learning rate falls linearly to almost zero, and each step gets a share of mu^2 in proportion to its
learning rate. Then the noise on every logit has standard deviation `kappa = eta * S * T / (mu * N)` after T steps with
mean learning rate eta (features have length 1, gradients are clipped to S), as if the rate were constant. So eta
follows from a chosen kappa. `docs/results/training-rule.md` has the evidence.

The larger `mu * N`, the longer the steps: training goes on until noise or the number of records limits the accuracy.
Early steps may be too long for a few directions in which the rows vary most. There the weights oscillate, but no
further than the step is long, because gradients are clipped. The last, short steps end the oscillation.

Two things make the rows vary about equally in all directions, so that fewer steps are enough and the noise does less
harm. Where the size is large against the number of features, second moments are released (`moments_share`). Features
of tables are mostly indicators, whose second moments are proportional to their mean: there, the released centre gives
the diagonal of the moments without a further release (`TableFeatures.scale`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quietmax._threads import parallel_map
from quietmax.errors import InvalidInput
from quietmax.estimators.blocks import ROWS_AT_ONCE, Floats
from quietmax.estimators.head.exact_sums import (
    BITS,
    GRID,
    Rows,
    clipped_rows,
    gradient_grid,
    gradient_sum,
    moment_sum,
    moments_grid,
    on_grid,
    row_sum,
    unit_rows,
    whitened_rows,
    whitening_on_grid,
)
from quietmax.estimators.training_set import check_choice, check_positive
from quietmax.models.features.base import BatchedMap, FeatureMap
from quietmax.models.features.generic import Pipeline, runs_user_code
from quietmax.models.features.images import image_features
from quietmax.models.features.tabular import CONSTANT_PER_COLUMN, UnitNorm
from quietmax.noise.release import release_gaussian
from quietmax.noise.sources import NoiseSource
from quietmax.sensitivity import certified
from quietmax.sensitivity.certified import Sensitivity

LINEAR = "linear"
"""The schedule of learning rates and of mu^2, as it is stored with a model."""
STEPS_ROUNDED = 1 + Fraction(1, 2**48)
"""The squares of `_step_mus` add up to at most this many times mu^2: each is rounded by at most four units of 2^-53."""
Whitening = Literal["none", "moments", "centre"]
"""What the rows are whitened by: released second moments, or the released centre (indicator features)."""

BIAS = 0.2
"""The constant feature beside features of length about 1."""
SIZE_SHARE = 0.01
"""Share of mu^2 spent on a noisy count when the size is not declared."""
CENTRING_SHARE = 0.05
"""Share of mu^2 spent on the mean feature vector."""
GRADIENT_NOISE = 0.8
"""kappa of the gradient method: standard deviation of all noise together on a logit."""
OUTPUT_NOISE = 0.25
"""kappa of the output method, whose logits the regulariser keeps small."""
QUERY_NOISE = 0.15
"""kappa for answers per query, where epsilon takes the place of mu."""
MAX_GRAD_NORM, WHITENED_GRAD_NORM = 0.2, 0.5
"""Clipping norms; whitened rows need fewer steps, so less of each gradient has to be clipped."""
STEPS, FEWEST_STEPS, NUMBERS_READ = 100, 30, 6e10
"""Steps of the gradient method; fewer where they would read more numbers than this (two minutes on two cores)."""
LONGEST_TRAINING, TRAINING_PER_FEATURE = 30_000.0, 160.0
"""Limits of `eta * S * T`, in all and per feature: longer training was no better, and there is less noise then."""
MOMENTS_SHARE = 0.1
"""Share of mu^2 spent on second moments where they are used."""
MOMENTS_FROM, MOMENTS_NOISE = 1000, 10.0
"""Second moments are used from this size on, if their noise is at most this many times their mean eigenvalue."""
MOMENTS_STEPS, MOMENTS_NUMBERS_READ = (20, 40), 4e8
"""Whitened by second moments: fewest and most steps, and about how many numbers are read in all."""
SMALLEST_REGULARISATION = 1e-6
TOLERANCE = 0.005
"""The solver's gradient may be this share of one record's gradient, which adds 1% to the sensitivity."""
TILTED_TOLERANCE = 1e-6
"""The solver's tolerance for the convexified loss, whose gradient does not shrink with the size."""
_LARGEST_COUNT = 2.0**35
"""Noisy counts are at most this: `ExactSum.to_grid` drops at most 31 bits of a sum for such a size."""
_RECORDS_AT_ONCE = 4096
_ROOT_OF_TWO = 181 / 128
"""Below sqrt(2) by less than 0.02%, and short enough in bits for exact products."""
_LARGEST_WEIGHT = 2.0**200
_SPARE = 1.0 - 1e-12
"""Shares of mu^2 are rounded; this factor keeps their sum below the whole."""


# --- Each record alone ------------------------------------------------------------------------------------------------


def default_features(columns: int, image_shape: tuple[int, int, int] | None = None) -> FeatureMap:
    """Return the feature map of a head with ``features="auto"``."""
    if image_shape is not None:
        return image_features(image_shape)
    return UnitNorm(CONSTANT_PER_COLUMN * math.sqrt(columns))


def clipped_features(
    feature_map: FeatureMap, records: NDArray[np.float32], radius: float
) -> NDArray[np.float32]:
    """Return the public features of every record, clipped to ``radius``, divided by it and put on the grid."""
    rows = np.empty((len(records), feature_map.dimension(records.shape[1]) + 1), dtype=np.float32)
    rows[:, -1] = 0.0

    def fill(part: slice) -> None:
        rows[part, :-1] = clipped_rows(feature_map.transform(records[part]), radius)

    if _may_run_on_any_thread(feature_map):
        _on_all_threads(fill, len(records), 2 * ROWS_AT_ONCE)
    else:
        for start in range(0, len(records), _RECORDS_AT_ONCE):
            fill(slice(start, start + _RECORDS_AT_ONCE))
    return rows


def _on_all_threads(fill: Callable[[slice], None], rows: int, height: int) -> None:
    """Call a function for all rows, in parts of at most `height` rows."""
    parallel_map(lambda number: fill(slice(number * height, (number + 1) * height)), -(-rows // height))


def _replace_rows(rows: NDArray[np.float32], function: Callable[[Floats], Floats]) -> NDArray[np.float32]:
    """Replace every row by its image under a function of rows in float64, on all threads."""

    def fill(part: slice) -> None:
        rows[part] = function(rows[part].astype(np.float64))

    _on_all_threads(fill, len(rows), ROWS_AT_ONCE)
    return rows


def _may_run_on_any_thread(feature_map: FeatureMap) -> bool:
    """Return whether a map is neither the user's own code nor computed in batches, which use the threads themselves."""
    if isinstance(feature_map, Pipeline):
        return all(_may_run_on_any_thread(step) for step in feature_map.maps)
    return not (isinstance(feature_map, BatchedMap) or runs_user_code(feature_map))


def centred(rows: NDArray[np.float32], centre: Floats) -> NDArray[np.float32]:
    """Subtract the released centre from every row, append the constant feature and divide by the length."""
    return _replace_rows(rows, lambda part: unit_rows(part[:, :-1], centre, BIAS))


def whitened(rows: NDArray[np.float32], whitening: Floats) -> NDArray[np.float32]:
    """Multiply every row by a matrix and divide by the length."""
    return _replace_rows(rows, lambda part: whitened_rows(part, whitening))


# --- The noisy size, centre and second moments ------------------------------------------------------------------------


@dataclass(frozen=True)
class Allowance:
    """How mu is divided among the releases of a training; mu^2 adds up."""

    size: float | None  # mu of the noisy count; None if the size is declared
    centre: float | None  # mu of the noisy centre; None if there is no centring
    moments: float | None  # mu of the noisy second moments; None if they are not used
    training: float  # mu of all other releases together

    @classmethod
    def of(cls, mu: float, size_share: float, centring_share: float, moments_share: float = 0.0) -> Allowance:
        """Divide mu^2 by shares."""
        rest = 1 - size_share - centring_share - moments_share
        return cls(
            _part(mu, size_share),
            _part(mu, centring_share),
            _part(mu, moments_share),
            mu * math.sqrt(rest) * _SPARE,
        )


def _part(mu: float, share: float) -> float | None:
    """Return mu of a release with a share of mu^2; None for no release."""
    return mu * math.sqrt(share) * _SPARE if share > 0.0 else None


def released_size(units: int, mu: float, source: NoiseSource) -> float:
    """Release a noisy number of records or persons."""
    noisy = release_gaussian([float(units)], sensitivity=1.0, mu=mu, source=source).values[0]
    return min(max(1.0, float(np.rint(noisy))), _LARGEST_COUNT)


def released_centre(table: Rows, size: float, mu: float, source: NoiseSource) -> Floats:
    """Release the noisy mean of clipped rows."""
    noisy = release_gaussian(row_sum(table)[:-1], sensitivity=1.0, mu=mu, source=source).values / size
    length = math.sqrt(float(np.square(noisy).sum()))
    return on_grid(noisy * ((1.0 - 2.0**-BITS) / max(length, 1.0)))


def released_moments(table: Rows, size: float, mu: float, source: NoiseSource) -> Floats:
    """Release the noisy second moments of the rows (THEORY 3.10).

    The noise has standard deviation 1/mu on the diagonal and 1/(sqrt(2) mu) above it.
    """
    grid = moments_grid(size)
    sensitivity = certified.head_moments(features=table.features, grid=grid)
    total, above = moment_sum(table, grid=grid), np.triu_indices(table.features, 1)
    # An entry above the diagonal counts twice in the Frobenius norm, so it is released times (a little below) sqrt(2).
    # It is at most 2^45 grid steps, so the product is exact.
    values = np.concatenate([np.diag(total), total[above] * _ROOT_OF_TWO])
    noisy = release_gaussian(values, sensitivity=sensitivity.value, mu=mu, source=source).values
    moments = np.diag(noisy[: table.features])
    moments[above] = noisy[table.features :] / _ROOT_OF_TWO
    return np.triu(moments) + np.triu(moments, 1).T


def whitening_matrix(moments: Floats, size: float, mu: float) -> Floats:
    """Compute the matrix `(M_+ / N + c I)^(-1/2)`, up to its scale, from released second moments M.

    `M_+` is the positive part of M, and `c = sqrt(d) / (mu N)` is about the size of the noise in it. Rows multiplied by
    the matrix vary about equally in all directions, so that few gradient steps are enough.
    """
    variances, directions = np.linalg.eigh(moments / size)
    floor = math.sqrt(len(moments)) / (mu * size)
    return whitening_on_grid(directions / np.sqrt(np.maximum(variances, 0.0) + floor) @ directions.T)


def whitening_kind(whitening: Floats | None) -> Whitening:
    """Return what a whitening was computed from: a matrix from second moments, a diagonal from the centre."""
    if whitening is None:
        return "none"
    return "moments" if whitening.ndim == 2 else "centre"


# --- Settings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadSettings:
    """How a `PrivateHead` is trained, where its defaults are not wanted. All are public numbers.

    Parameters
    ----------
    centring : float, default=0.05
        Share of mu^2 spent on the mean of the features; 0 leaves centring out.
    second_moments : float, optional
        Share of mu^2 spent on the second moments of the features, by which the rows are whitened so that few steps are
        enough; 0 leaves them out. By default the gradient method uses a tenth of what the count and the centre leave if
        the size is large against the number of features, and 0 otherwise. Features of tables that have a schema need
        none: they are scaled by the mean (`TableFeatures.scale`).
    radius : float, default=1.0
        Features are clipped to this length, from 1e-12 to 1e12.
    loss : {"cross-entropy", "convexified"}, default="cross-entropy"
        The loss; "convexified" needs ``method="output"``.
    alpha : float, default=1.0
        Constant of the convexified loss.
    mass : float, optional
        Public mass of the convexified loss; the size by default.
    steps : int, optional
        Number of gradient steps. By default computed from public numbers, like the next three.
    learning_rate : float, optional
        Mean step size of the gradient method; the step size falls linearly.
    max_grad_norm : float, optional
        Per-record gradient clipping norm of the gradient method.
    regularisation : float, optional
        L2 regularisation of the output method.

    Raises
    ------
    InvalidInput
        If a number is not valid.

    Examples
    --------
    >>> HeadSettings(steps=20, second_moments=0.0).centring
    0.05
    """

    centring: float = CENTRING_SHARE
    second_moments: float | None = None
    radius: float = 1.0
    loss: Literal["cross-entropy", "convexified"] = "cross-entropy"
    alpha: float = 1.0
    mass: float | None = None
    steps: int | None = None
    learning_rate: float | None = None
    max_grad_norm: float | None = None
    regularisation: float | None = None

    def __post_init__(self) -> None:
        check_choice("loss", self.loss, ("cross-entropy", "convexified"))
        if not 0.0 <= self.centring < 1.0 - SIZE_SHARE:
            raise InvalidInput(
                f"centring must be at least 0 and below {1.0 - SIZE_SHARE}, got {self.centring}."
            )
        most = 1.0 - SIZE_SHARE - self.centring
        if self.second_moments is not None and not 0.0 <= self.second_moments < most:
            raise InvalidInput(
                f"second_moments must be at least 0 and, with this centring, below {most:g}, got {self.second_moments}."
            )
        check_positive(
            radius=self.radius,
            alpha=self.alpha,
            mass=self.mass,
            steps=self.steps,
            learning_rate=self.learning_rate,
            max_grad_norm=self.max_grad_norm,
            regularisation=self.regularisation,
        )
        if not 1e-12 <= self.radius <= 1e12:
            raise InvalidInput(f"radius must be a number from 1e-12 to 1e12, got {self.radius!r}.")


@dataclass(frozen=True)
class GradientPlan:
    """Settings of the gradient method: `W <- W - (rate / size) * (clipped gradient sum + noise)`.

    The rate of step t = 0, ..., T - 1 is `2 (T - t) / (T + 1)` times `learning_rate`: it falls linearly.
    """

    steps: int  # Number T of full-batch steps
    learning_rate: float  # Mean of the learning rates of all steps
    max_grad_norm: float  # Per-record gradient clipping norm

    def to_json(self) -> dict[str, Any]:
        """Return the three numbers and the schedule by name."""
        return {**asdict(self), "schedule": LINEAR}


@dataclass(frozen=True)
class OutputPlan:
    """Settings of the output method: minimise until `||gradient|| <= tolerance`, then release."""

    regularisation: float  # lam of the penalty `(lam / 2) ||W||^2`
    tolerance: float  # Bound on the length of the gradient at the solution

    def to_json(self) -> dict[str, Any]:
        """Return the two numbers by name."""
        return asdict(self)


def gradient_plan(
    size: float,
    features: int,
    mu: float,
    *,
    whitening: Whitening = "none",
    settings: HeadSettings | None = None,
) -> GradientPlan:
    """Return the settings of the gradient method; those that are not given follow from public numbers."""
    settings = settings or HeadSettings()
    steps, learning_rate, max_grad_norm = settings.steps, settings.learning_rate, settings.max_grad_norm
    if steps is None:
        steps = _default_steps(size, features, whitening)
    elif steps < 1 or steps != int(steps):
        raise InvalidInput(f"steps must be an integer of at least 1, got {steps!r}.")
    if max_grad_norm is None:
        max_grad_norm = MAX_GRAD_NORM if whitening == "none" else WHITENED_GRAD_NORM
    if learning_rate is None:
        length = min(GRADIENT_NOISE * mu * size, LONGEST_TRAINING, TRAINING_PER_FEATURE * features)
        learning_rate = length / (steps * max_grad_norm)
    return GradientPlan(int(steps), float(learning_rate), float(max_grad_norm))


def _default_steps(size: float, features: int, whitening: Whitening) -> int:
    """Return the number of steps if it is not given."""
    numbers = size * features
    if whitening == "moments":
        fewest, most = MOMENTS_STEPS
        return int(max(fewest, min(most, MOMENTS_NUMBERS_READ / numbers)))
    return int(max(FEWEST_STEPS, min(STEPS, NUMBERS_READ / numbers)))


def _step_mus(steps: int, mu: float) -> Floats:
    """Divide mu among the gradient steps: the squares fall linearly, like the learning rate, and add up to mu^2."""
    falling = np.arange(steps, 0, -1, dtype=np.float64)
    return np.asarray(mu * np.sqrt(falling * (2.0 / (steps * (steps + 1.0)))))


def moments_share(size: float, features: int, mu: float) -> float:
    """Return the share of mu^2 that is spent on second moments by default: `MOMENTS_SHARE`, or 0 if they do not pay.

    They pay if their noise is small beside them. Its largest eigenvalue is about `sqrt(d) / (mu_g N)`, and the mean
    eigenvalue of the moments of rows of length 1 is `1/d`.
    """
    noise = math.sqrt(features) / (mu * math.sqrt(MOMENTS_SHARE) * size)
    pays = size >= MOMENTS_FROM and noise * features <= MOMENTS_NOISE
    return MOMENTS_SHARE if pays else 0.0


def output_plan(
    size: float, strength: float, *, noise: float = OUTPUT_NOISE, regularisation: float | None = None
) -> OutputPlan:
    """Return the settings of the output method: `lam = sqrt(2) / (kappa * N * strength)` unless it is given."""
    if regularisation is None:
        regularisation = max(math.sqrt(2) / (noise * size * strength), SMALLEST_REGULARISATION)
    return OutputPlan(float(regularisation), TOLERANCE * math.sqrt(2) / size)


# --- The gradient method ----------------------------------------------------------------------------------------------


def gradient_sensitivity(
    max_grad_norm: float, classes: int, features: int, grid: float = GRID
) -> Sensitivity:
    """Return how far one record moves a released gradient sum."""
    return certified.head_gradient(max_grad_norm, coordinates=classes * features, grid=grid)


def descend(table: Rows, plan: GradientPlan, size: float, mu: float, source: NoiseSource) -> Floats:
    """Take noisy full-batch gradient steps: exactly mu-Gaussian private for all steps together (THEORY 3.1)."""
    grid = gradient_grid(size)
    sensitivity = gradient_sensitivity(plan.max_grad_norm, table.classes, table.features, grid)
    weights = np.zeros((table.classes, table.features))
    for step, step_mu in enumerate(_step_mus(plan.steps, mu)):
        total = gradient_sum(table, weights, plan.max_grad_norm, grid=grid)
        noisy = release_gaussian(
            total, sensitivity=sensitivity.value, mu=float(step_mu), source=source
        ).values
        rate = plan.learning_rate * (2.0 * (plan.steps - step) / (plan.steps + 1.0))
        weights = weights - (rate / size) * noisy
        if not np.abs(weights).max() < _LARGEST_WEIGHT:
            raise InvalidInput(
                f"Training diverged: learning_rate {plan.learning_rate:g} is too large for this head."
            )
    zero_sum: Floats = weights - weights.mean(axis=0)
    return zero_sum

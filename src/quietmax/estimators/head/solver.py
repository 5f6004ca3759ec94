"""The output method: a minimiser with a certified small gradient, and how far one record moves it (THEORY 3.1, 3.2).

The sensitivity holds only if `||grad F|| <= tau` at the returned weights, for every data set. Where L-BFGS stops early,
accelerated gradient descent goes on, at the known rate `(1 - sqrt(lam / L))^k` (Nesterov 2004, section 2.2). The
computed gradient is trusted only up to a bound on its rounding error, and `_certifiable_tolerance` chooses tau from
public numbers so that the bound is below it. Where a person has k rows, each row's loss counts 1/k (THEORY 3.7).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import numpy as np

from quietmax._lazy import lazy_module
from quietmax.errors import InvalidInput
from quietmax.estimators.blocks import CHUNKS_PER_BLOCK, Floats, Table, _chunk_rows
from quietmax.estimators.head.exact_sums import MOST_BLOCKS, Rows
from quietmax.sensitivity import certified
from quietmax.sensitivity.certified import Sensitivity

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

_ROUNDING = 2.0**-53
FAST_ITERATIONS = 500
LARGEST_CONDITION_NUMBER = 1e7
"""Largest ratio of the smoothness to the strong convexity of an objective."""
_MOST_ADDITIONS = CHUNKS_PER_BLOCK + 2 * math.log2(MOST_BLOCKS)
"""Additions that the sum of a chunk goes through: those in its block, then of blocks in pairs."""
_MORE_THAN_DECLARED = 2.0
"""The tolerance is certain to be reached for up to this many times the declared number of records."""


Shape = tuple[int, int]


Objective: TypeAlias = "MeanCrossEntropy | Tilted"
"""A strongly convex smooth function of the weights (classes, features), with public bounds for up to `_max_records`:
`smoothness` bounds the largest eigenvalue of the Hessian for a table (`_max_smoothness`: for every table), `rounding`
the L2 error of the computed gradient, and `max_weight_norm` the length of the minimiser."""


def _output_sensitivity(objective: Objective, classes: int, tolerance: float) -> Sensitivity:
    if isinstance(objective, Tilted):
        return certified.head_tilted(
            alpha=objective.alpha,
            mass=objective.mass,
            regularisation=objective.regularisation,
            classes=classes,
            tolerance=tolerance,
        )
    return certified.head_output(
        regularisation=objective.regularisation, declared_size=objective.size, tolerance=tolerance
    )


def _max_solution_norm(objective: Objective, classes: int, tolerance: float) -> float:
    """Return a public bound on the length of the weights that `_minimise` returns."""
    return (objective.max_weight_norm(classes) + tolerance / objective.regularisation) * (1 + 2.0**-40)


def _shares(table: Table, part: slice) -> torch.Tensor | None:
    return None if table.shares is None else torch.from_numpy(table.shares[part])


def _losses_and_residuals(
    weights: torch.Tensor, rows: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross-entropy l_i and `p_i - e_{y_i}` of every row."""
    log_probabilities = torch.log_softmax(rows @ weights.T, dim=1)
    losses = -log_probabilities.gather(1, labels[:, None])[:, 0]
    errors = log_probabilities.exp_()
    errors[torch.arange(len(labels)), labels] -= 1.0
    return losses, errors


def _residual_rounding(shape: Shape, weights: Floats) -> float:
    """Return a bound on the error of one computed `p - e_y`, for rows of length at most 1, doubled to be safe.

    A logit is off by at most `(d + 2) u ||W_c||` (u = 2^-53) and moves p by half of it; log, exp and sums add a few u.
    """
    longest = math.sqrt(float(np.square(weights).sum(axis=1).max()))
    classes, features = shape
    logits = (features + 2) * longest
    return 2 * math.sqrt(classes) * _ROUNDING * (logits + 4 * classes + 64)


def _sum_rounding(rows: float, shape: Shape) -> float:
    return 2 * _ROUNDING * (_chunk_rows(shape[1]) + _additions(rows, shape) + 1024)


def _additions(rows: float, shape: Shape) -> float:
    return min(rows / _chunk_rows(shape[1]), _MOST_ADDITIONS)


def _regulariser_rounding(regularisation: float, weights: Floats) -> float:
    """Return the error of `lam W`, plus lam times the error of making the rows sum to zero in the end."""
    return 8 * _ROUNDING * regularisation * math.sqrt(float(np.square(weights).sum()))


@dataclass(frozen=True, eq=False)
class _LossSum:
    """The losses of some rows and their gradients, summed."""

    value: float
    gradient: Floats

    def __add__(self, other: _LossSum) -> _LossSum:
        return _LossSum(self.value + other.value, self.gradient + other.gradient)


@dataclass(frozen=True, eq=False)
class _TiltedSum:
    """`sum_i exp(a l_i)` and `sum_i exp(a l_i) grad l_i` of some rows, both in units of `exp(shift)`."""

    shift: float
    total: float
    gradient: Floats

    def __add__(self, other: _TiltedSum) -> _TiltedSum:
        shift = max(self.shift, other.shift)
        one, two = math.exp(self.shift - shift), math.exp(other.shift - shift)
        return _TiltedSum(
            shift, self.total * one + other.total * two, self.gradient * one + other.gradient * two
        )


@dataclass(frozen=True)
class MeanCrossEntropy:
    """The objective `(1/N) sum_i l_i(W) + (lam/2) ||W||^2` with the public size N."""

    size: float  # N, the public number of records
    regularisation: float  # lam

    def smoothness(self, table: Rows) -> float:
        """Return `n / (2 N) + lam` for a ``table`` of n records: the Hessian of l in the logits is at most 1/2."""
        return table.units / (2 * self.size) + self.regularisation

    def _value_and_gradient(self, table: Rows, weights: Floats) -> tuple[float, Floats]:
        """Return the objective for a ``table`` at some ``weights``, and its gradient."""
        matrix = torch.from_numpy(weights)

        def _block_sum(block: Table) -> _LossSum:
            value, gradient = 0.0, torch.zeros_like(matrix)
            for rows, part in block.chunks():
                losses, errors = _losses_and_residuals(matrix, rows, torch.from_numpy(block.labels[part]))
                if (shares := _shares(block, part)) is not None:
                    losses, errors = losses * shares, errors * shares[:, None]
                value += float(losses.sum())
                gradient += errors.T @ rows
            return _LossSum(value, gradient.numpy())

        total = table.sum(_block_sum)
        penalty = 0.5 * self.regularisation * float(np.square(weights).sum())
        return total.value / self.size + penalty, total.gradient / self.size + self.regularisation * weights

    @property
    def _max_records(self) -> float:
        """Twice the declared size."""
        return math.ceil(_MORE_THAN_DECLARED * self.size)

    def max_weight_norm(self, classes: int) -> float:
        """Return `min(sqrt(2 r ln(C) / lam), sqrt(2) r / lam)` for C ``classes``, with `r = n / N` at most 2."""
        loss = _MORE_THAN_DECLARED * math.log(classes)
        gradient = _MORE_THAN_DECLARED * math.sqrt(2)
        return min(math.sqrt(2 * loss / self.regularisation), gradient / self.regularisation)

    @property
    def _max_smoothness(self) -> float:
        """The smoothness with `n / N` at most 2."""
        return _MORE_THAN_DECLARED / 2 + self.regularisation

    def rounding(self, units: float, rows: float, shape: Shape, weights: Floats) -> float:
        """Add the errors of the _residuals, of their sum and of the regulariser; see `Objective`."""
        regulariser = _regulariser_rounding(self.regularisation, weights)
        residual = _residual_rounding(shape, weights)
        return units / self.size * (residual + math.sqrt(2) * _sum_rounding(rows, shape)) + regulariser


@dataclass(frozen=True)
class Tilted:
    """The convexified loss `(1/a) ln(M + sum_i (1/k_i) exp(a l_i(W))) + (lam/2) ||W||^2` (THEORY 3.2)."""

    alpha: float  # a, public
    mass: float  # M, public
    regularisation: float  # lam

    def smoothness(self, table: Rows) -> float:  # noqa: ARG002
        """Return `1/2 + 2 a + lam` for every ``table``: shares sum to at most 1, `a grad l grad l^T` is at most 2 a."""
        return self._max_smoothness

    def _value_and_gradient(self, table: Rows, weights: Floats) -> tuple[float, Floats]:
        """Return the objective for a ``table`` at some ``weights``, and its gradient."""
        matrix = torch.from_numpy(weights)

        def _block_sum(block: Table) -> _TiltedSum:
            found = _TiltedSum(-math.inf, 0.0, np.zeros_like(weights))
            for rows, part in block.chunks():
                losses, errors = _losses_and_residuals(matrix, rows, torch.from_numpy(block.labels[part]))
                highest = self.alpha * float(losses.max())
                shares = (self.alpha * losses - highest).exp()
                if (counted := _shares(block, part)) is not None:
                    shares = shares * counted
                gradient = (errors * shares[:, None]).T @ rows
                found += _TiltedSum(highest, float(shares.sum()), gradient.numpy())
            return found

        start = _TiltedSum(math.log(self.mass), 1.0, np.zeros_like(weights))
        found = start + table.sum(_block_sum)
        penalty = 0.5 * self.regularisation * float(np.square(weights).sum())
        value = (found.shift + math.log(found.total)) / self.alpha + penalty
        return value, found.gradient / found.total + self.regularisation * weights

    @property
    def _max_records(self) -> float:
        """Any number."""
        return math.inf

    def max_weight_norm(self, classes: int) -> float:
        """Return the bound w of THEORY 3.2 for a number of ``classes``."""
        return certified.weight_bound(self.regularisation, classes)

    @property
    def _max_smoothness(self) -> float:
        """The smoothness, which does not depend on the records."""
        return 0.5 + 2 * self.alpha + self.regularisation

    def rounding(self, units: float, rows: float, shape: Shape, weights: Floats) -> float:  # noqa: ARG002
        """Add the errors as for the mean; the shares have the error of `a l_i`, and sum to at most 1."""
        residual = _residual_rounding(shape, weights)
        exponent = 4 * self.alpha * residual + 8 * _ROUNDING * (_additions(rows, shape) + 8)
        exponent += (
            8 * _ROUNDING * self.alpha * (math.log(shape[0]) + 2 * math.sqrt(float(np.square(weights).sum())))
        )
        regulariser = _regulariser_rounding(self.regularisation, weights)
        return residual + math.sqrt(2) * (_sum_rounding(rows, shape) + 2 * exponent) + regulariser


@dataclass(frozen=True, eq=False)
class Solution:
    """A certified minimiser."""

    weights: Floats  # The solution; its classes sum to zero
    gradient_bound: float  # A bound on the length of the true gradient at the solution, at most the tolerance
    fast: bool  # Whether L-BFGS found it


def _certifiable_tolerance(
    objective: Objective, features: int, classes: int, at_least: float, *, repeated: bool = False
) -> float:
    """Return a tolerance that float64 can certify for every table of up to `objective._max_records` records."""
    ratio = objective._max_smoothness / objective.regularisation
    if ratio > LARGEST_CONDITION_NUMBER:
        raise InvalidInput(
            f"With regularisation {objective.regularisation:g} the condition number of the loss is {ratio:.1e}, but it "
            f"must be at most {LARGEST_CONDITION_NUMBER:.0e}: use more regularisation or a smaller alpha."
        )
    longest = np.full((1, 1), objective.max_weight_norm(classes))
    units = objective._max_records
    rows = math.inf if repeated else units
    return max(at_least, 4 * objective.rounding(units, rows, (classes, features), longest))


def _minimise(
    table: Rows, objective: Objective, tolerance: float, *, fast_iterations: int = FAST_ITERATIONS
) -> Solution:
    """Find weights with `||grad F|| <= tolerance` for certain, and make their classes sum to zero."""
    fast = fast_iterations > 0

    def function(weights: Floats) -> tuple[float, Floats]:
        value, gradient = objective._value_and_gradient(table, weights)
        error = objective.rounding(table.units, len(table), weights.shape, weights)
        if table.units > objective._max_records and error > tolerance / 2:
            raise InvalidInput(
                f"Float64 cannot certify a gradient below {tolerance:.1e} here: declared_size is too far below "
                "the number of records, or regularisation is too small."
            )
        length = math.sqrt(float(np.square(gradient).sum())) + error
        if length <= tolerance:
            raise _ToleranceReached(Solution(weights - weights.mean(axis=0), length, fast))
        return value, gradient

    weights = np.zeros((table.classes, table.features))
    try:
        if fast:
            weights, fast = _quasi_newton(function, weights, fast_iterations), False
        _accelerate(function, weights, objective.smoothness(table), objective.regularisation)
    except _ToleranceReached as reached:
        return reached.solution


class _ToleranceReached(Exception):
    def __init__(self, solution: Solution) -> None:
        self.solution = solution


Function = Callable[[Floats], tuple[float, Floats]]
"""Returns a value and a gradient; raises `_ToleranceReached` where the gradient is certainly below the tolerance."""


def _quasi_newton(function: Function, start: Floats, iterations: int) -> Floats:
    """Run L-BFGS; return where it stopped without reaching the tolerance."""

    from scipy.optimize import minimize

    def flat(vector: Floats) -> tuple[float, Floats]:
        value, gradient = function(vector.reshape(start.shape))
        return value, gradient.ravel()

    options = {"maxiter": iterations, "maxfun": 4 * iterations, "maxcor": 20, "ftol": 0.0, "gtol": 0.0}
    found = minimize(flat, start.ravel(), jac=True, method="L-BFGS-B", options=options)
    return np.asarray(found.x, dtype=np.float64).reshape(start.shape)


def _accelerate(function: Function, start: Floats, smoothness: float, convexity: float) -> NoReturn:
    """Run Nesterov's constant-step scheme until the tolerance is reached."""
    root = math.sqrt(convexity / smoothness)
    momentum = (1 - root) / (1 + root)
    current, ahead = start, start
    while True:
        _, gradient = function(ahead)
        following = ahead - gradient / smoothness
        ahead = following + momentum * (following - current)
        current = following

"""The output method's solver: a minimiser whose gradient is certified to be small, for every data set (THEORY 3.1, 3.2).

The sensitivity counts on `||grad F|| <= tau` at what is returned, for whatever records. L-BFGS is fast and
nearly always gets there; if it stops early, accelerated gradient descent goes on, which converges for every
strongly convex smooth function at the known rate `(1 - sqrt(lam / L))^k` (Nesterov 2004, section 2.2).
Nothing is ever refused because the solver was slow. The computed gradient is trusted only up to a bound on
its rounding error; `certifiable_tolerance` chooses tau from public numbers so that the bound is below it wherever the
minimiser may lie.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NoReturn, Protocol

import numpy as np
import torch
from scipy.optimize import minimize

from quietmax.errors import InvalidInput
from quietmax.estimators.head.exact_sums import LARGEST_TABLE, Extent, Floats, Table
from quietmax.models.features.base import parallel_map
from quietmax.sensitivity import certified

_ROUNDING = 2.0**-53
FAST_ITERATIONS = 500
MOST_STEEP = 1e7
"""Largest ratio of the smoothness to the strong convexity of an objective."""
_MORE_THAN_DECLARED = 2.0
"""The tolerance is certain to be reached for up to this many times the declared number of records."""


class Objective(Protocol):
    """A strongly convex smooth function of the weights (C, d)."""

    @property
    def regularisation(self) -> float:
        """Strong convexity: lam."""
        ...

    def smoothness(self, table: Table) -> float:
        """An upper bound on the largest eigenvalue of the Hessian, the regulariser included."""
        ...

    def value_and_gradient(self, table: Table, weights: Floats) -> tuple[float, Floats]:
        """The objective and its gradient, computed in float64."""
        ...

    def rounding(self, table: Table | Extent, weights: Floats) -> float:
        """A bound on the L2 error of the computed gradient; it grows with the length of the weights."""
        ...

    @property
    def foreseen(self) -> int:
        """For up to so many records the two public bounds below hold."""
        ...

    def longest(self, classes: int) -> float:
        """A public bound on the length of the minimiser."""
        ...

    @property
    def steepest(self) -> float:
        """A public bound on the smoothness."""
        ...


def losses_and_residuals(
    weights: torch.Tensor, rows: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy l_i and `p_i - e_{y_i}` of every row."""
    log_probabilities = torch.log_softmax(rows @ weights.T, dim=1)
    losses = -log_probabilities.gather(1, labels[:, None])[:, 0]
    errors = log_probabilities.exp_()
    errors[torch.arange(len(labels)), labels] -= 1.0
    return losses, errors


def _residual_rounding(table: Table | Extent, weights: Floats) -> float:
    """Bound on the error of one computed `p - e_y`, rows having length at most 1.

    A logit is off by at most `(d + 2) u ||W_c||` (u = 2^-53), which moves p by at most half of that per
    logit in L2; log, exp and the sum over C classes add a few u each. Doubled to be safe.
    """
    longest = math.sqrt(float(np.square(weights).sum(axis=1).max()))
    logits = (table.features + 2) * longest
    return 2 * math.sqrt(table.classes) * _ROUNDING * (logits + 4 * table.classes + 64)


def _sum_rounding(table: Table | Extent) -> float:
    """Relative error of a sum over records in blocks."""
    return 2 * _ROUNDING * (table.rows_at_once + len(table) / table.rows_at_once + 1024)


def _regulariser_rounding(regularisation: float, weights: Floats) -> float:
    """Of `lam W`, and lam times that of making the rows sum to zero in the end."""
    return 8 * _ROUNDING * regularisation * math.sqrt(float(np.square(weights).sum()))


@dataclass(frozen=True)
class MeanCrossEntropy:
    """`(1/N) sum_i l_i(W) + (lam/2) ||W||^2` with the public size N."""

    size: float
    regularisation: float

    def smoothness(self, table: Table) -> float:
        """`n / (2 N) + lam`: the Hessian of l in the logits is at most 1/2, and rows have length at most 1."""
        return len(table) / (2 * self.size) + self.regularisation

    def value_and_gradient(self, table: Table, weights: Floats) -> tuple[float, Floats]:
        """The objective and its gradient."""
        matrix, pieces = torch.from_numpy(weights), table.pieces

        def piece_sum(number: int) -> tuple[float, torch.Tensor]:
            value, gradient = 0.0, torch.zeros_like(matrix)
            for rows, part in table.blocks(pieces[number]):
                losses, errors = losses_and_residuals(matrix, rows, torch.from_numpy(table.labels[part]))
                value += float(losses.sum())
                gradient += errors.T @ rows
            return value, gradient

        sums = parallel_map(piece_sum, len(pieces))
        value = sum(value for value, _ in sums)
        gradient = torch.stack([gradient for _, gradient in sums]).sum(dim=0)
        penalty = 0.5 * self.regularisation * float(np.square(weights).sum())
        return value / self.size + penalty, gradient.numpy() / self.size + self.regularisation * weights

    @property
    def foreseen(self) -> int:
        """Twice the declared size."""
        return min(math.ceil(_MORE_THAN_DECLARED * self.size), LARGEST_TABLE)

    def longest(self, classes: int) -> float:
        """`min(sqrt(2 r ln(C) / lam), sqrt(2) r / lam)` with `r = n / N` at most 2, as `certified.weight_bound`."""
        loss = _MORE_THAN_DECLARED * math.log(classes)
        gradient = _MORE_THAN_DECLARED * math.sqrt(2)
        return min(math.sqrt(2 * loss / self.regularisation), gradient / self.regularisation)

    @property
    def steepest(self) -> float:
        """As `smoothness`, with `n / N` at most 2."""
        return _MORE_THAN_DECLARED / 2 + self.regularisation

    def rounding(self, table: Table | Extent, weights: Floats) -> float:
        """n records, each with a residual slightly off and summed with rounding; and the regulariser's."""
        records = len(table) / self.size
        regulariser = _regulariser_rounding(self.regularisation, weights)
        return (
            records * (_residual_rounding(table, weights) + math.sqrt(2) * _sum_rounding(table)) + regulariser
        )


@dataclass(frozen=True)
class Tilted:
    """The convexified loss `(1/a) ln(M + sum_i exp(a l_i(W))) + (lam/2) ||W||^2` with public a and M (THEORY 3.2)."""

    alpha: float
    mass: float
    regularisation: float

    def smoothness(self, table: Table) -> float:  # noqa: ARG002
        """`1/2 + 2 a + lam`: weights add up to at most 1, and `a grad l grad l^T` is at most 2 a."""
        return self.steepest

    def value_and_gradient(self, table: Table, weights: Floats) -> tuple[float, Floats]:
        """The objective and its gradient `sum_i pi_i grad l_i + lam W`, `pi_i = e^(a l_i) / (M + sum_k e^(a l_k))`."""
        matrix = torch.from_numpy(weights)
        shift = math.log(self.mass)
        total, gradient = 1.0, torch.zeros_like(matrix)  # both in units of e^shift
        for rows, part in table.blocks():
            losses, errors = losses_and_residuals(matrix, rows, torch.from_numpy(table.labels[part]))
            highest = max(shift, self.alpha * float(losses.max()))
            shrink = math.exp(shift - highest)
            shares = (self.alpha * losses - highest).exp()
            total = total * shrink + float(shares.sum())
            gradient = gradient * shrink + (errors * shares[:, None]).T @ rows
            shift = highest
        penalty = 0.5 * self.regularisation * float(np.square(weights).sum())
        value = (shift + math.log(total)) / self.alpha + penalty
        return value, gradient.numpy() / total + self.regularisation * weights

    @property
    def foreseen(self) -> int:
        """Any table."""
        return LARGEST_TABLE

    def longest(self, classes: int) -> float:
        """THEORY 3.2's w."""
        return certified.weight_bound(self.regularisation, classes)

    @property
    def steepest(self) -> float:
        """As `smoothness`, which no record plays a part in."""
        return 0.5 + 2 * self.alpha + self.regularisation

    def rounding(self, table: Table | Extent, weights: Floats) -> float:
        """As for the mean, with weights that add up to at most 1 and are themselves off by the error of `a l_i`."""
        residual = _residual_rounding(table, weights)
        exponent = 4 * self.alpha * residual + 8 * _ROUNDING * (len(table) / table.rows_at_once + 8)
        exponent += (
            8
            * _ROUNDING
            * self.alpha
            * (math.log(table.classes) + 2 * math.sqrt(float(np.square(weights).sum())))
        )
        regulariser = _regulariser_rounding(self.regularisation, weights)
        return residual + math.sqrt(2) * (_sum_rounding(table) + 2 * exponent) + regulariser


@dataclass(frozen=True, eq=False)
class Solution:
    """A certified minimiser: `gradient_bound <= tolerance` bounds the true gradient's length at `weights`."""

    weights: Floats
    gradient_bound: float
    evaluations: int
    fast: bool
    longest: float
    """A public bound on the length of the weights, for up to `Objective.foreseen` records."""


class _Reached(Exception):
    """The tolerance is reached, at these weights and with this bound on the gradient."""

    def __init__(self, weights: Floats, bound: float) -> None:
        self.weights = weights
        self.bound = bound


class _Watched:
    """An objective that raises `_Reached` as soon as it is evaluated where the tolerance is certainly reached."""

    def __init__(self, table: Table, objective: Objective, tolerance: float) -> None:
        self.table, self.objective, self.tolerance = table, objective, tolerance
        self.shape = (table.classes, table.features)
        self.evaluations = 0

    def __call__(self, weights: Floats) -> tuple[float, Floats]:
        self.evaluations += 1
        value, gradient = self.objective.value_and_gradient(self.table, weights)
        error = self.objective.rounding(self.table, weights)
        if len(self.table) > self.objective.foreseen and error > self.tolerance / 2:
            raise InvalidInput(
                f"Float64 cannot certify a gradient below {self.tolerance:.1e} here; declare a size nearer to the "
                "number of records, or regularise more."
            )
        length = math.sqrt(float(np.square(gradient).sum())) + error
        if length <= self.tolerance:
            raise _Reached(weights.copy(), length)
        return value, gradient

    def flat(self, vector: Floats) -> tuple[float, Floats]:
        """The same for weights in one vector."""
        value, gradient = self(vector.reshape(self.shape))
        return value, gradient.ravel()


def certifiable_tolerance(objective: Objective, features: int, classes: int, at_least: float) -> float:
    """A tolerance that float64 can certify for every table of up to `objective.foreseen` records: public numbers only.

    It is four times the rounding error at the longest minimiser, or ``at_least`` if that is more. What is certified
    lies within tau/lam of the minimiser, where the rounding error is hardly larger. Settings for which the solver would
    need more than some `sqrt(MOST_STEEP)` steps per digit are refused before any record is looked at.

    >>> certifiable_tolerance(MeanCrossEntropy(1000, 0.01), 20, 3, at_least=7e-6)
    7e-06
    """
    ratio = objective.steepest / objective.regularisation
    if ratio > MOST_STEEP:
        raise InvalidInput(
            f"With a regularisation of {objective.regularisation:g} the loss is {ratio:.1e} times steeper than it is "
            f"convex, but at most {MOST_STEEP:.0e} can be minimised; regularise more, or choose a smaller alpha."
        )
    extent = Extent(objective.foreseen, features, classes)
    return max(at_least, 4 * objective.rounding(extent, np.full((1, 1), objective.longest(classes))))


def minimise(
    table: Table, objective: Objective, tolerance: float, *, fast_iterations: int = FAST_ITERATIONS
) -> Solution:
    """Weights with `||grad F|| <= tolerance` for certain; their rows are then made to sum to zero.

    The minimiser's rows sum to zero, so the projection only brings the weights closer to it.
    `fast_iterations=0` leaves L-BFGS out.
    """
    watched = _Watched(table, objective, tolerance)
    start = np.zeros(watched.shape)
    try:
        if fast_iterations > 0:
            start = _quasi_newton(watched, start, fast_iterations)
    except _Reached as reached:
        return _solution(reached, watched, fast=True)
    try:
        _accelerate(watched, start)
    except _Reached as reached:
        return _solution(reached, watched, fast=False)


def _solution(reached: _Reached, watched: _Watched, *, fast: bool) -> Solution:
    objective = watched.objective
    longest = objective.longest(watched.table.classes) + watched.tolerance / objective.regularisation
    weights = reached.weights - reached.weights.mean(axis=0)
    return Solution(weights, reached.bound, watched.evaluations, fast, longest * (1 + 2.0**-40))


def _quasi_newton(watched: _Watched, start: Floats, iterations: int) -> Floats:
    options = {"maxiter": iterations, "maxfun": 4 * iterations, "maxcor": 20, "ftol": 0.0, "gtol": 0.0}
    found = minimize(watched.flat, start.ravel(), jac=True, method="L-BFGS-B", options=options)
    return np.asarray(found.x, dtype=np.float64).reshape(watched.shape)


def _accelerate(watched: _Watched, start: Floats) -> NoReturn:
    """Nesterov's constant-step scheme, until the tolerance is reached."""
    smoothness = watched.objective.smoothness(watched.table)
    root = math.sqrt(watched.objective.regularisation / smoothness)
    momentum = (1 - root) / (1 + root)
    current, ahead = start, start
    while True:
        _, gradient = watched(ahead)
        following = ahead - gradient / smoothness
        ahead = following + momentum * (following - current)
        current = following

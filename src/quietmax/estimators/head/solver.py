"""The output method: a minimiser with a certified small gradient, and how far one record moves it (THEORY 3.1, 3.2).

The sensitivity holds only if `||grad F|| <= tau` at the returned weights, for every data set. L-BFGS is fast and nearly
always gets there. If it stops early, accelerated gradient descent goes on; it converges for every strongly convex
smooth function at the known rate `(1 - sqrt(lam / L))^k` (Nesterov 2004, section 2.2). So no training fails because the
solver was slow. The computed gradient is trusted only up to a bound on its rounding error. `certifiable_tolerance`
chooses tau from public numbers so that the bound is below it wherever the minimiser may lie.

Where a person has k rows, each row's loss counts 1/k (THEORY 3.7). Then "record" means "person" below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NoReturn, Protocol

import numpy as np
import torch
from scipy.optimize import minimize

from quietmax.errors import InvalidInput
from quietmax.estimators.head.exact_sums import LARGEST_TABLE, Floats, Table, TableShape
from quietmax.models.features.base import parallel_map
from quietmax.sensitivity import certified
from quietmax.sensitivity.base import Sensitivity

_ROUNDING = 2.0**-53
FAST_ITERATIONS = 500
LARGEST_CONDITION_NUMBER = 1e7
"""Largest ratio of the smoothness to the strong convexity of an objective."""
_MORE_THAN_DECLARED = 2.0
"""The tolerance is certain to be reached for up to this many times the declared number of records."""


class Objective(Protocol):
    """A strongly convex smooth function of the weights (classes, features)."""

    @property
    def regularisation(self) -> float:
        """Strong convexity lam."""
        ...

    def smoothness(self, table: Table) -> float:
        """Bound the largest eigenvalue of the Hessian for a ``table``, the regulariser included."""
        ...

    def value_and_gradient(self, table: Table, weights: Floats) -> tuple[float, Floats]:
        """Return the objective for a ``table`` at some ``weights``, and its gradient, computed in float64."""
        ...

    def rounding(self, table: Table | TableShape, weights: Floats) -> float:
        """Bound the L2 error of the computed gradient for a ``table`` (or its shape) at some ``weights``."""
        ...

    @property
    def max_records(self) -> int:
        """The two public bounds below hold for up to this many records."""
        ...

    def max_weight_norm(self, classes: int) -> float:
        """Return a public bound on the length of the minimiser for a number of ``classes``."""
        ...

    @property
    def max_smoothness(self) -> float:
        """A public bound on the smoothness."""
        ...


def output_sensitivity(objective: MeanCrossEntropy | Tilted, classes: int, tolerance: float) -> Sensitivity:
    """Return how far one record moves a minimiser that was found up to a tolerance.

    Parameters
    ----------
    objective : MeanCrossEntropy or Tilted
        What is minimised.
    classes : int
        Number of classes.
    tolerance : float
        Bound on the length of the gradient at the solution.

    Returns
    -------
    Sensitivity
        Of the weights, in L2.
    """
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


def max_solution_norm(objective: Objective, classes: int, tolerance: float) -> float:
    """Return a public bound on the length of the weights that `minimise` returns.

    Parameters
    ----------
    objective : Objective
        What is minimised.
    classes : int
        Number of classes.
    tolerance : float
        Bound on the length of the gradient at the solution.

    Returns
    -------
    float
        The bound, valid for up to ``objective.max_records`` records.
    """
    return (objective.max_weight_norm(classes) + tolerance / objective.regularisation) * (1 + 2.0**-40)


def _shares(table: Table, part: slice) -> torch.Tensor | None:
    """Return what the rows of a block count; None if all count 1."""
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


def _residual_rounding(table: Table | TableShape, weights: Floats) -> float:
    """Return a bound on the error of one computed `p - e_y`, for rows of length at most 1.

    A logit is off by at most `(d + 2) u ||W_c||` (u = 2^-53), which moves p by at most half of that per
    logit in L2; log, exp and the sum over C classes add a few u each. Doubled to be safe.
    """
    longest = math.sqrt(float(np.square(weights).sum(axis=1).max()))
    logits = (table.features + 2) * longest
    return 2 * math.sqrt(table.classes) * _ROUNDING * (logits + 4 * table.classes + 64)


def _sum_rounding(table: Table | TableShape) -> float:
    """Return the relative error of a sum over rows in blocks."""
    return 2 * _ROUNDING * (table.rows_at_once + len(table) / table.rows_at_once + 1024)


def _regulariser_rounding(regularisation: float, weights: Floats) -> float:
    """Return the error of `lam W`, plus lam times the error of making the rows sum to zero in the end."""
    return 8 * _ROUNDING * regularisation * math.sqrt(float(np.square(weights).sum()))


@dataclass(frozen=True)
class MeanCrossEntropy:
    """The objective `(1/N) sum_i l_i(W) + (lam/2) ||W||^2` with the public size N.

    Parameters
    ----------
    size : float
        N, the public number of records.
    regularisation : float
        lam.
    """

    size: float
    regularisation: float

    def smoothness(self, table: Table) -> float:
        """Return `n / (2 N) + lam` for a ``table`` of n records: the Hessian of l in the logits is at most 1/2."""
        return table.units / (2 * self.size) + self.regularisation

    def value_and_gradient(self, table: Table, weights: Floats) -> tuple[float, Floats]:
        """Return the objective for a ``table`` at some ``weights``, and its gradient."""
        matrix, pieces = torch.from_numpy(weights), table.pieces

        def piece_sum(number: int) -> tuple[float, torch.Tensor]:
            value, gradient = 0.0, torch.zeros_like(matrix)
            for rows, part in table.blocks(pieces[number]):
                losses, errors = _losses_and_residuals(matrix, rows, torch.from_numpy(table.labels[part]))
                if (shares := _shares(table, part)) is not None:
                    losses, errors = losses * shares, errors * shares[:, None]
                value += float(losses.sum())
                gradient += errors.T @ rows
            return value, gradient

        sums = parallel_map(piece_sum, len(pieces))
        value = sum(value for value, _ in sums)
        gradient = torch.stack([gradient for _, gradient in sums]).sum(dim=0)
        penalty = 0.5 * self.regularisation * float(np.square(weights).sum())
        return value / self.size + penalty, gradient.numpy() / self.size + self.regularisation * weights

    @property
    def max_records(self) -> int:
        """Twice the declared size."""
        return min(math.ceil(_MORE_THAN_DECLARED * self.size), LARGEST_TABLE)

    def max_weight_norm(self, classes: int) -> float:
        """Return `min(sqrt(2 r ln(C) / lam), sqrt(2) r / lam)` for C ``classes``, with `r = n / N` at most 2."""
        loss = _MORE_THAN_DECLARED * math.log(classes)
        gradient = _MORE_THAN_DECLARED * math.sqrt(2)
        return min(math.sqrt(2 * loss / self.regularisation), gradient / self.regularisation)

    @property
    def max_smoothness(self) -> float:
        """The smoothness with `n / N` at most 2."""
        return _MORE_THAN_DECLARED / 2 + self.regularisation

    def rounding(self, table: Table | TableShape, weights: Floats) -> float:
        """Add the errors of the residuals of a ``table`` at ``weights``, of their sum and of the regulariser."""
        records = table.units / self.size
        regulariser = _regulariser_rounding(self.regularisation, weights)
        return (
            records * (_residual_rounding(table, weights) + math.sqrt(2) * _sum_rounding(table)) + regulariser
        )


@dataclass(frozen=True)
class Tilted:
    """The convexified loss `(1/a) ln(M + sum_i exp(a l_i(W))) + (lam/2) ||W||^2` (THEORY 3.2).

    With persons of several rows the sum is `sum_i (1/k_i) exp(a l_i(W))`.

    Parameters
    ----------
    alpha : float
        a, public.
    mass : float
        M, public.
    regularisation : float
        lam.
    """

    alpha: float
    mass: float
    regularisation: float

    def smoothness(self, table: Table) -> float:  # noqa: ARG002
        """Return `1/2 + 2 a + lam` for every ``table``: shares sum to at most 1, `a grad l grad l^T` is at most 2 a."""
        return self.max_smoothness

    def value_and_gradient(self, table: Table, weights: Floats) -> tuple[float, Floats]:
        """Return the objective for a ``table`` at some ``weights``, and its gradient.

        The gradient is `sum_i pi_i grad l_i + lam W` with shares `pi_i = e^(a l_i) / (M + sum_k e^(a l_k))`.
        """
        matrix = torch.from_numpy(weights)
        shift = math.log(self.mass)
        total, gradient = 1.0, torch.zeros_like(matrix)  # both in units of e^shift
        for rows, part in table.blocks():
            losses, errors = _losses_and_residuals(matrix, rows, torch.from_numpy(table.labels[part]))
            highest = max(shift, self.alpha * float(losses.max()))
            shrink = math.exp(shift - highest)
            shares = (self.alpha * losses - highest).exp()
            if (counted := _shares(table, part)) is not None:
                shares = shares * counted
            total = total * shrink + float(shares.sum())
            gradient = gradient * shrink + (errors * shares[:, None]).T @ rows
            shift = highest
        penalty = 0.5 * self.regularisation * float(np.square(weights).sum())
        value = (shift + math.log(total)) / self.alpha + penalty
        return value, gradient.numpy() / total + self.regularisation * weights

    @property
    def max_records(self) -> int:
        """Every table."""
        return LARGEST_TABLE

    def max_weight_norm(self, classes: int) -> float:
        """Return the bound w of THEORY 3.2 for a number of ``classes``."""
        return certified.weight_bound(self.regularisation, classes)

    @property
    def max_smoothness(self) -> float:
        """The smoothness, which does not depend on the records."""
        return 0.5 + 2 * self.alpha + self.regularisation

    def rounding(self, table: Table | TableShape, weights: Floats) -> float:
        """Add the errors for a ``table`` at ``weights`` as for the mean; the shares have the error of `a l_i`."""
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
    """A certified minimiser.

    Parameters
    ----------
    weights : array of shape (classes, features)
        The solution; its classes sum to zero.
    gradient_bound : float
        A bound on the length of the true gradient at the solution, at most the tolerance.
    fast : bool
        Whether L-BFGS found it.
    """

    weights: Floats
    gradient_bound: float
    fast: bool


def certifiable_tolerance(
    objective: Objective, features: int, classes: int, at_least: float, *, repeated: bool = False
) -> float:
    """Return a tolerance that float64 can certify for every table of up to `objective.max_records` records.

    It is four times the rounding error at the longest minimiser, or ``at_least`` if that is more. Certified weights
    lie within tau/lam of the minimiser, where the rounding error is hardly larger.

    Parameters
    ----------
    objective : Objective
        What will be minimised.
    features, classes : int
        The shape of the weights.
    at_least : float
        The smallest tolerance that is useful.
    repeated : bool
        Whether the unit is a person with several rows.

    Returns
    -------
    float
        The tolerance, a function of public numbers alone.

    Raises
    ------
    InvalidInput
        If the solver would need more than about `sqrt(LARGEST_CONDITION_NUMBER)` steps per digit. This is decided
        before any record is looked at.

    Examples
    --------
    >>> certifiable_tolerance(MeanCrossEntropy(1000, 0.01), 20, 3, at_least=7e-6)
    7e-06
    """
    ratio = objective.max_smoothness / objective.regularisation
    if ratio > LARGEST_CONDITION_NUMBER:
        raise InvalidInput(
            f"With regularisation {objective.regularisation:g} the condition number of the loss is {ratio:.1e}, but it "
            f"must be at most {LARGEST_CONDITION_NUMBER:.0e}: use more regularisation or a smaller alpha."
        )
    shape = TableShape(objective.max_records, features, classes, repeated)
    return max(at_least, 4 * objective.rounding(shape, np.full((1, 1), objective.max_weight_norm(classes))))


def minimise(
    table: Table, objective: Objective, tolerance: float, *, fast_iterations: int = FAST_ITERATIONS
) -> Solution:
    """Find weights with `||grad F|| <= tolerance` for certain, and make their classes sum to zero.

    The classes of the true minimiser sum to zero, so the projection only brings the weights closer to it.

    Parameters
    ----------
    table : Table
        The records.
    objective : Objective
        What is minimised.
    tolerance : float
        Bound on the length of the gradient.
    fast_iterations : int, optional
        Iterations of L-BFGS before accelerated gradient descent takes over; 0 leaves L-BFGS out.

    Returns
    -------
    Solution
        The certified minimiser.
    """
    certified_objective = _CertifiedObjective(table, objective, tolerance)
    start = np.zeros((table.classes, table.features))
    try:
        if fast_iterations > 0:
            start = _quasi_newton(certified_objective, start, fast_iterations)
    except _ToleranceReached as reached:
        return reached.solution(fast=True)
    try:
        _accelerate(certified_objective, start)
    except _ToleranceReached as reached:
        return reached.solution(fast=False)


class _ToleranceReached(Exception):
    """The tolerance is reached at these weights, with this bound on the gradient."""

    def __init__(self, weights: Floats, bound: float) -> None:
        self.weights = weights
        self.bound = bound

    def solution(self, *, fast: bool) -> Solution:
        """Return the weights with classes that sum to zero."""
        return Solution(self.weights - self.weights.mean(axis=0), self.bound, fast)


class _CertifiedObjective:
    """An objective that raises `_ToleranceReached` where its gradient is certainly below the tolerance."""

    def __init__(self, table: Table, objective: Objective, tolerance: float) -> None:
        self.table, self.objective, self.tolerance = table, objective, tolerance

    def __call__(self, weights: Floats) -> tuple[float, Floats]:
        value, gradient = self.objective.value_and_gradient(self.table, weights)
        error = self.objective.rounding(self.table, weights)
        if self.table.units > self.objective.max_records and error > self.tolerance / 2:
            raise InvalidInput(
                f"Float64 cannot certify a gradient below {self.tolerance:.1e} here: declared_size is too far below "
                "the number of records, or regularisation is too small."
            )
        length = math.sqrt(float(np.square(gradient).sum())) + error
        if length <= self.tolerance:
            raise _ToleranceReached(weights.copy(), length)
        return value, gradient


def _quasi_newton(function: _CertifiedObjective, start: Floats, iterations: int) -> Floats:
    """Run L-BFGS; return where it stopped without reaching the tolerance."""

    def flat(vector: Floats) -> tuple[float, Floats]:
        value, gradient = function(vector.reshape(start.shape))
        return value, gradient.ravel()

    options = {"maxiter": iterations, "maxfun": 4 * iterations, "maxcor": 20, "ftol": 0.0, "gtol": 0.0}
    found = minimize(flat, start.ravel(), jac=True, method="L-BFGS-B", options=options)
    return np.asarray(found.x, dtype=np.float64).reshape(start.shape)


def _accelerate(function: _CertifiedObjective, start: Floats) -> NoReturn:
    """Run Nesterov's constant-step scheme until the tolerance is reached."""
    smoothness = function.objective.smoothness(function.table)
    root = math.sqrt(function.objective.regularisation / smoothness)
    momentum = (1 - root) / (1 + root)
    current, ahead = start, start
    while True:
        _, gradient = function(ahead)
        following = ahead - gradient / smoothness
        ahead = following + momentum * (following - current)
        current = following

"""Sensitivities and their basis, bounds on scores, and the certified sensitivities of a linear head.

The head is a softmax classifier with weights W (C x d) on features of length at most 1. N is its declared size, a
public constant. The cross-entropy l of one record has ``||grad l|| = ||p - e_y|| * ||f|| <= sqrt(2) =: rho``. The
proofs are in THEORY 3.1 and 3.2. Where a person has k rows and each counts 1/k, all bounds hold for one person as well,
with N the declared number of persons (THEORY 3.7). All values are rounded up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from quietmax.accounting.guarantee import UNITS, Unit
from quietmax.errors import InvalidInput

Basis = Literal["published", "certified", "empirical"]


@dataclass(frozen=True)
class Sensitivity:
    """A sensitivity with its basis.

    Parameters
    ----------
    value : float
        The number.
    basis : {"published", "certified", "empirical"}
        ``"published"``: the paper's formula, which is not an upper bound (THEORY 2.3). ``"certified"``: a proven
        upper bound. ``"empirical"``: the largest change seen in retraining, which is a lower bound.
    because : str
        One sentence that says where the number comes from.

    Raises
    ------
    InvalidInput
        If the value is not a number, or the basis or the sentence is not a string.

    Examples
    --------
    >>> float(Sensitivity(0.5, "certified", "Gradients are clipped to 0.5."))
    0.5
    """

    value: float
    basis: Basis
    because: str

    def __post_init__(self) -> None:
        # Subclasses of float and str may compare as they like, so only plain ones are kept.
        try:
            object.__setattr__(self, "value", float(self.value))
        except (TypeError, ValueError):
            raise InvalidInput(f"A sensitivity must be a number, got {self.value!r}.") from None
        if type(self.basis) is not str or type(self.because) is not str:
            raise InvalidInput(
                "The basis and the reason of a sensitivity must be plain strings, got "
                f"{type(self.basis).__name__} and {type(self.because).__name__}."
            )

    def __float__(self) -> float:
        return self.value


@dataclass(frozen=True)
class ScoreBounds:
    """Bounds on how far one record or person, added or removed, moves the scores of any query.

    Whether the bounds are proven depends on the model: see `quietmax.mechanisms.base.proves_bounds`.

    Parameters
    ----------
    one : Sensitivity
        Bound on any single score (D_inf). Its basis must be ``"certified"``.
    vector : Sensitivity
        Bound on the vector of all scores in L2 (D_2). Its basis must be ``"certified"``.
    unit : {"record", "person"}
        What is added or removed: one record, or all records of one person.

    Raises
    ------
    InvalidInput
        If a bound is not a `Sensitivity` (subclasses are refused), not certified or not a positive number, or the
        unit is another one.

    Examples
    --------
    >>> one = Sensitivity(1.0, "certified", "One record changes one vote.")
    >>> vector = Sensitivity(2**0.5, "certified", "One record moves one vote to another class.")
    >>> round(ScoreBounds(one, vector).spread, 6)
    2.0
    """

    one: Sensitivity
    vector: Sensitivity
    unit: Unit = field(default="record", repr=False)  # stored answers are found by the repr

    def __post_init__(self) -> None:
        if type(self.unit) is not str or self.unit not in UNITS:
            raise InvalidInput(f"unit must be one of {', '.join(UNITS)}, got {self.unit!r}.")
        for entry in (self.one, self.vector):
            if type(entry) is not Sensitivity:
                raise InvalidInput(
                    f"Bounds on scores must be of type Sensitivity itself, got {type(entry).__name__}."
                )
            if entry.basis != "certified" or not (math.isfinite(entry.value) and entry.value > 0):
                raise InvalidInput(
                    "Bounds on scores must be certified sensitivities above 0, got "
                    f"{entry.value} with basis {entry.basis!r}."
                )

    @property
    def spread(self) -> float:
        """How far a difference of two scores moves: min(2*D_inf, sqrt(2)*D_2).

        The same bound holds for the log-odds ``z_v - logsumexp_{j != v} z_j``, whose gradient has L1 norm 2 and L2
        norm at most sqrt(2) (THEORY 3.3).
        """
        return min(2 * self.one.value, math.nextafter(math.sqrt(2.0), 2.0) * self.vector.value)

    def to_json(self) -> dict[str, Any]:
        """Return the two bounds, their basis and the reason by name."""
        return {
            "one_score": self.one.value,
            "score_vector_l2": self.vector.value,
            "basis": self.one.basis,
            "because": self.one.because,
        }


_UP = 1.0 + 2.0**-40
"""Covers the rounding of the few floating-point steps of each formula."""


def head_gradient(max_grad_norm: float, *, coordinates: int = 0, grid: float = 0.0) -> Sensitivity:
    """Bound a sum of gradients in L2: ``S + sqrt(coordinates) * grid``, for the rounding of every coordinate."""
    _positive(max_grad_norm=max_grad_norm)
    because = f"One record adds one gradient clipped to {max_grad_norm:g} (THEORY 3.1)."
    return _certified(max_grad_norm + math.sqrt(coordinates) * grid, because)


def head_moments(*, features: int, grid: float = 0.0) -> Sensitivity:
    """Bound a sum of second moments ``f f^T`` of rows with ``||f|| <= 1`` in Frobenius norm: ``1 + d * grid``.

    The second term covers the rounding of d^2 entries. A person's k rows add ``f f^T / k`` each (THEORY 3.7, 3.10).
    """
    _positive(features=features)
    because = "A row of length at most 1 adds a matrix of norm at most 1 (THEORY 3.10)."
    return _certified(1.0 + features * grid, because)


def head_output(*, regularisation: float, declared_size: float, tolerance: float = 0.0) -> Sensitivity:
    """Bound the minimiser of ``(1/N) sum_i l_i(W) + (lam/2) ||W||^2`` in Frobenius norm.

    The bound is ``sqrt(2) / (lam N) + 2 tolerance / lam``: at the minimiser without record i, the gradient of the
    objective with it is ``grad l_i / N``, and the objective is lam-strongly convex (THEORY 3.1).
    """
    _positive(regularisation=regularisation, declared_size=declared_size)
    _not_negative(tolerance)
    value = (math.sqrt(2) / declared_size + 2 * tolerance) / regularisation
    because = "The regularised mean cross-entropy is strongly convex and Lipschitz (THEORY 3.1)."
    return _certified(value, because)


def head_tilted(
    *, alpha: float, mass: float, regularisation: float, classes: int, tolerance: float = 0.0
) -> Sensitivity:
    """Bound the minimiser of ``(1/a) ln(M + sum_i exp(a l_i)) + (lam/2) ||W||^2`` in Frobenius norm.

    The bound is ``min(pi (rho / lam + w), 2 w) + 2 tolerance / lam``, where w is `weight_bound` and pi the largest
    share of the tilted weight that one record can have: ``e^(aB) / (M + e^(aB))``, where ``B = ln C + sqrt(2) w``
    bounds a record's loss. If pi is close to 1, one record can weigh as much as all others together and the bound is
    useless. THEORY 3.2 states it with ``2 rho / lam``, which is no smaller since ``lam w <= rho``.
    """
    _positive(alpha=alpha, mass=mass)
    _not_negative(tolerance)
    bound = weight_bound(regularisation, classes)
    largest_loss = math.log(classes) + math.sqrt(2) * bound
    share = 1.0 / (1.0 + math.exp(math.log(mass) - alpha * largest_loss))
    moved = min(share * (math.sqrt(2) / regularisation + bound), 2 * bound)
    because = f"A record's share of the tilted weight is at most {share:.3g} (THEORY 3.2)."
    return _certified(moved + 2 * tolerance / regularisation, because)


def weight_bound(regularisation: float, classes: int) -> float:
    """Bound the length of a minimiser of the tilted objective: ``min(sqrt(2 ln(C) / lam), sqrt(2) / lam)``.

    The objective at the minimiser is at most that at 0, where every loss is ln C. At the minimiser, ``-lam W`` is a
    sum of gradients with weights that add up to less than 1.
    """
    _positive(regularisation=regularisation)
    if classes < 2:
        raise InvalidInput(f"classes must be at least 2, got {classes}.")
    return min(math.sqrt(2 * math.log(classes) / regularisation), math.sqrt(2) / regularisation)


def score_bounds(weights: Sensitivity, *, classes: int, unit: Unit = "record") -> ScoreBounds:
    """Bound the logits ``W f`` with ``||f|| <= 1``: one by ``sqrt((C-1)/C) * D``, all together in L2 by ``D``.

    The rows of a minimiser sum to zero, so a change of one row by t moves the others by at least ``t / sqrt(C-1)``
    together.
    """
    if weights.basis != "certified":
        raise InvalidInput(f"The sensitivity of the weights must be certified, got basis {weights.basis!r}.")
    because = f"{weights.because} Rows of weights sum to zero (THEORY 3.1)."
    one = _certified(math.sqrt((classes - 1) / classes) * weights.value, because)
    return ScoreBounds(one, _certified(weights.value, weights.because), unit)


def _certified(value: float, because: str) -> Sensitivity:
    return Sensitivity(value * _UP, "certified", because)


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not 0.0 < value < math.inf:
            raise InvalidInput(f"{name} must be a finite number above 0, got {value}.")


def _not_negative(tolerance: float) -> None:
    if not 0.0 <= tolerance < math.inf:
        raise InvalidInput(f"tolerance must be a finite number of at least 0, got {tolerance}.")

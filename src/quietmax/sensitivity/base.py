"""A sensitivity: how far one record can move a quantity, and what that number is based on."""

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

"""A sensitivity: how far something can move when one record is removed, and what that number rests on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from quietmax.errors import InvalidInput

Basis = Literal["published", "certified", "observed"]


@dataclass(frozen=True)
class Sensitivity:
    """A number with its basis; ``because`` says in one sentence where it comes from.

    ``published``: the paper's formula, which is not a bound (THEORY 2.3). ``certified``: a proven upper bound.
    ``observed``: the largest change seen in retraining, so a lower bound on the truth.
    """

    value: float
    basis: Basis
    because: str

    def __float__(self) -> float:
        return self.value


@dataclass(frozen=True)
class ScoreBounds:
    """How far one record, added or removed, moves the scores of any query.

    ``one``: any single score (D_inf). ``vector``: all scores together in L2 (D_2). Whether they are proven depends on
    the model they belong to: see `quietmax.mechanisms.base.proves_bounds`.
    """

    one: Sensitivity
    vector: Sensitivity

    def __post_init__(self) -> None:
        for entry in (self.one, self.vector):
            if entry.basis != "certified" or not (math.isfinite(entry.value) and entry.value > 0):
                raise InvalidInput(
                    f"A proven mechanism needs a positive certified sensitivity, not {entry.value} ({entry.basis}); "
                    "use a model that comes with one."
                )

    @property
    def spread(self) -> float:
        """min(2*D_inf, sqrt(2)*D_2): how far ``z_v - z_w`` moves, and ``z_v - logsumexp_{j != v} z_j`` too.

        The gradient of that log-odds has L1 norm 2 and L2 norm at most sqrt(2) (THEORY 3.3).
        """
        return min(2 * self.one.value, math.nextafter(math.sqrt(2.0), 2.0) * self.vector.value)

    def to_json(self) -> dict[str, Any]:
        """The two bounds and why they hold."""
        return {
            "one_score": self.one.value,
            "score_vector_l2": self.vector.value,
            "basis": self.one.basis,
            "because": self.one.because,
        }

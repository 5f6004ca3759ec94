"""Certified bounds on a model's scores (logits or votes): what a proven mechanism needs to know of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from quietmax.errors import InvalidInput
from quietmax.sensitivity.basis import Sensitivity


@dataclass(frozen=True)
class ScoreBounds:
    """How far one record, added or removed, moves the scores of any query.

    ``one``: any single score (D_inf). ``vector``: all scores together in L2 (D_2). Whether they are proven depends on
    the model they belong to: see `quietmax.mechanisms.mechanism.proves_bounds`.
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

"""A sensitivity: how far something can move when one record is removed, and what that number rests on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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

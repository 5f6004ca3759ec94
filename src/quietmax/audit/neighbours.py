"""Neighbouring worlds: two score vectors that one record may turn into one another.

A mechanism's claim must hold for every such pair. Where the caller gives none, pairs are built that move the scores
as far as the claim permits, in the directions that hurt, from several starting points; the audit looks for the worst.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quietmax.errors import InvalidInput

Floats = NDArray[np.float64]

_FAR_BEHIND = 60.0
_BEHIND = (0.0, 1.5, 3.0)


@dataclass(frozen=True)
class Reach:
    """How far one record may move the scores of a query: ``one`` any single score, ``vector`` all together in L2."""

    one: float
    vector: float = math.inf

    def __post_init__(self) -> None:
        if not (self.one > 0 and self.vector > 0 and math.isfinite(min(self.one, self.vector))):
            raise InvalidInput(
                f"A reach of {self.one} for one score and {self.vector} for all moves nothing or everything; "
                "give positive numbers, at least one of them finite."
            )

    @classmethod
    def of(cls, mechanism: Any) -> Reach:
        """Read off a prepared mechanism what its claim assumes: certified bounds, or Algorithm 1's Delta z.

        >>> from quietmax.mechanisms import Algorithm1
        >>> Reach.of(Algorithm1(logit_sensitivity=0.358)).one
        0.358
        """
        bounds = getattr(mechanism, "bounds", None)
        if bounds is not None:
            return cls(float(bounds.one), float(bounds.vector))
        logit = getattr(mechanism, "logit_sensitivity", None)
        if logit is not None:
            return cls(float(logit))
        raise InvalidInput(
            "This mechanism does not say how far one record moves the scores; give neighbours or a reach."
        )

    def scaled(self, direction: Floats) -> Floats:
        """The longest move in this direction that stays within reach."""
        return np.asarray(
            direction * min(self.one / np.abs(direction).max(), self.vector / np.linalg.norm(direction))
        )


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The scores of one query in two neighbouring worlds, and how they were chosen."""

    first: Floats
    second: Floats
    description: str = "as given"

    def __post_init__(self) -> None:
        for name in ("first", "second"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.float64))
        if self.first.ndim != 1 or self.first.shape != self.second.shape or len(self.first) < 2:
            raise InvalidInput(
                f"Neighbours have scores of shapes {self.first.shape} and {self.second.shape}, but need one score per "
                "class, the same classes in both worlds; give two vectors of equal length."
            )
        if not (np.isfinite(self.first).all() and np.isfinite(self.second).all()):
            raise InvalidInput("A neighbour's score is NaN or infinite; give finite scores.")

    @classmethod
    def between(cls, first: ArrayLike, second: ArrayLike, description: str = "as given") -> Neighbours:
        """Neighbours from any two sequences of scores."""
        return cls(np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64), description)


def worst_case(classes: int, reach: Reach, claimed: float, *, seed: int = 0) -> list[Neighbours]:
    """Pairs as far apart as ``reach`` allows; ``claimed`` (epsilon or mu) sets how far behind a class may start.

    Directions: one score up; one up and another down; one up and all others down; all but one up; random. Starting
    points: all scores equal, or two classes in front with the first of them 0, 1.5 or 3 units behind, a unit being
    what halves its chances or so at the claimed noise. Worlds lie symmetrically about the starting point.

    >>> pairs = worst_case(3, Reach(one=1.0), claimed=1.0)
    >>> max(float(abs(pair.second - pair.first).max()) for pair in pairs)
    1.0
    """
    if classes < 2:
        raise InvalidInput(f"There are {classes} classes, but a query has at least 2; give such a number.")
    generator = np.random.default_rng((0xA0D17, seed))
    first, others = np.eye(classes)[0], 1 - np.eye(classes)[0]
    directions = {
        "one up": first,
        "one up, another down": first - np.eye(classes)[1],
        "one up, all others down": first - others,
        "one up, all others down a little": first - others / (classes - 1),
        "all but one up": -others,
    }
    if classes == 2:
        del directions["one up, all others down"], directions["one up, all others down a little"]
    pairs = []
    for name, direction in directions.items():
        move = reach.scaled(direction)
        unit = float(np.ptp(move)) / (min(claimed, 1.0) if claimed > 0 else 1.0)
        starts = {"all equal": np.zeros(classes)} if classes > 2 else {}
        for behind in _BEHIND:
            start = np.full(classes, -_FAR_BEHIND * unit)
            start[:2] = -behind * unit, 0.0
            starts[f"two in front, the first {behind:g} units behind"] = start
        pairs += [
            Neighbours(start - move / 2, start + move / 2, f"{name}; {where}")
            for where, start in starts.items()
        ]
    for name, direction in (
        ("in a random direction", generator.normal(size=classes)),
        ("by random signs", generator.choice([-1.0, 1.0], classes) * generator.uniform(0.5, 1, classes)),
    ):
        move = reach.scaled(direction)
        start = generator.normal(size=classes) * np.ptp(move)
        pairs.append(Neighbours(start - move / 2, start + move / 2, f"{name}; random start"))
    return pairs

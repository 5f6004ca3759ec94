"""Neighbouring worlds: two score vectors that one record may turn into one another.

A mechanism's claim must hold for every such pair. Where the caller gives none, pairs are built that move the scores
as far as the claim permits, in the directions that hurt, from several starting points; the audit looks for the worst.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quietmax.accounting.costs import Cost
from quietmax.accounting.guarantee import Guarantee
from quietmax.audit.bounds import CONFIDENCE
from quietmax.audit.distinguishing import Draw, distinguish, drawn_worlds, find_event, rating_for
from quietmax.audit.report import AuditReport, Claim
from quietmax.errors import InvalidInput
from quietmax.mechanisms.base import Answers, Mechanism
from quietmax.noise.sources import NoiseSource, SeededNoise

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


Progress = Callable[[int, int], None]

_ROWS_AT_ONCE = 8192
# Rounds of the search for the worst pair: (share of the draws for each pair, confidence to rate by, pairs kept).
_ROUNDS = ((0.04, 0.95, 5), (0.2, 0.999, 1))
_FEWEST_DRAWS = 2000


def mechanism(
    subject: Mechanism,
    classes: int | None = None,
    *,
    neighbours: Neighbours | Sequence[Neighbours] | None = None,
    reach: Reach | None = None,
    claimed: Guarantee | Cost | None = None,
    samples: int = 100_000,
    confidence: float = CONFIDENCE,
    delta: float = 1e-5,
    source: NoiseSource | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> AuditReport:
    """Audit one answer of a prepared mechanism against what it claims (or ``claimed``).

    Without ``neighbours`` worst-case ones are built from ``reach``, by default what the mechanism itself assumes of
    one record. Where there are several, a few draws of each choose the pair; then ``samples`` draws of each world find
    an event and bound it. ``source`` None means seeded noise, repeatable; pass `quietmax.noise.EXACT` to audit the
    noise that is released in earnest.

    >>> from quietmax.accounting import PureCost
    >>> from quietmax.mechanisms import Algorithm1
    >>> leaky = Algorithm1("laplace", 1 / 7, 1 / 7, logit_sensitivity=0.4, probability_sensitivity=1.0)
    >>> mechanism(leaky, classes=3, samples=4000).verdict
    'refuted'
    """
    pairs = (
        [neighbours] if isinstance(neighbours, Neighbours) else None if neighbours is None else [*neighbours]
    )
    if pairs is None:
        if classes is None:
            raise InvalidInput("Say how many classes the answers have, or give the neighbours to tell apart.")
        claim = Claim.of(claimed or subject.guarantee(classes))
        pairs = worst_case(classes, reach or Reach.of(subject), claim.amount, seed=seed)
    if not pairs or len({len(pair.first) for pair in pairs}) != 1:
        raise InvalidInput(
            "Neighbours must be at least one pair, all with the same number of classes; give such pairs."
        )
    width = len(pairs[0].first)
    if classes is not None and classes != width:
        raise InvalidInput(
            f"The neighbours have {width} scores, but {classes} classes were stated; leave the classes out."
        )
    stated = claimed or subject.guarantee(width)
    dice = source or SeededNoise(np.random.default_rng((0xD1CE, seed)))
    pair = _worst(pairs, subject, dice, Claim.of(stated), samples, progress)
    return distinguish(
        _draw(subject, pair.first, dice),
        _draw(subject, pair.second, dice),
        stated,
        samples=samples,
        confidence=confidence,
        delta=delta,
        subject=subject.name,
        details={"classes": width, "neighbours": pair.description, "noise_source": dice.name},
    )


def _worst(
    pairs: Sequence[Neighbours],
    subject: Mechanism,
    dice: NoiseSource,
    claim: Claim,
    samples: int,
    progress: Progress | None,
) -> Neighbours:
    """The pair that draws of its own tell apart best; promising pairs get more draws."""
    left = list(pairs)
    for share, confidence, kept in _ROUNDS:
        if len(left) <= kept:
            continue
        rating = rating_for(claim.parameter, claim.extra_delta, confidence)
        draws = max(int(share * samples), _FEWEST_DRAWS)
        rated = []
        for done, pair in enumerate(left, 1):
            first, second = (_draw(subject, scores, dice) for scores in (pair.first, pair.second))
            rated.append(find_event(drawn_worlds(first, second, draws), rating)[1])
            if progress is not None:
                progress(done, len(left))
        left = [left[place] for place in np.argsort(-np.array(rated), kind="stable")[:kept]]
    return left[0]


def _draw(subject: Mechanism, scores: Floats, dice: NoiseSource) -> Draw:
    def draw(times: int) -> Answers:
        parts = [
            subject.release(np.tile(scores, (min(_ROWS_AT_ONCE, times - start), 1)), dice)
            for start in range(0, times, _ROWS_AT_ONCE)
        ]
        released = [part.probabilities for part in parts if part.probabilities is not None]
        return Answers(
            np.concatenate([part.labels for part in parts]), np.concatenate(released) if released else None
        )

    return draw

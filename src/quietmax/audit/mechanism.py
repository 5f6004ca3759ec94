"""Audit one answer of a mechanism: draw answers for two neighbouring score vectors and tell them apart.

A mechanism's claim must hold for every pair of score vectors that one record can turn into one another. If the caller
gives no pairs, the audit builds pairs that differ as much as the claim permits, in the directions that matter, from
several starting points, and searches for the worst.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quietmax.accounting.costs import Cost
from quietmax.accounting.guarantee import Guarantee
from quietmax.audit.bounds import CONFIDENCE
from quietmax.audit.distinguishing import Draw, claim_rating, distinguish, draw_pair, find_event
from quietmax.audit.report import AuditReport, Claim
from quietmax.errors import InvalidInput
from quietmax.mechanisms.base import Answers, Mechanism
from quietmax.models.stacked import Progress
from quietmax.noise.sources import NoiseSource, SeededNoise
from quietmax.sensitivity.certified import ScoreBounds

Floats = NDArray[np.float64]

_FAR_BEHIND = 60.0
_BEHIND = (0.0, 1.5, 3.0)
_ROWS_AT_ONCE = 8192
# Rounds of the search for the worst pair: (share of the draws for each pair, confidence to rate by, pairs kept).
_ROUNDS = ((0.04, 0.95, 5), (0.2, 0.999, 1))
_MIN_DRAWS = 2000


@dataclass(frozen=True)
class ScoreChange:
    """The largest change of a query's scores that one record can cause."""

    one: float  # The largest change of any single score
    vector: float = math.inf  # The largest change of all scores together, in L2

    def __post_init__(self) -> None:
        if not (self.one > 0 and self.vector > 0 and math.isfinite(min(self.one, self.vector))):
            raise InvalidInput(
                "The largest changes must be positive, and at least one of them finite; got "
                f"{self.one} for one score and {self.vector} for all."
            )

    @classmethod
    def of(cls, mechanism: Any) -> ScoreChange:
        """Return what the claim of a prepared ``mechanism`` assumes: certified bounds, or Algorithm 1's Delta z.

        >>> from quietmax.mechanisms import Algorithm1
        >>> ScoreChange.of(Algorithm1(logit_sensitivity=0.358)).one
        0.358
        """
        bounds = getattr(mechanism, "bounds", None)
        if bounds is not None:
            return cls(float(bounds.one), float(bounds.vector))
        logit = getattr(mechanism, "logit_sensitivity", None)
        if logit is not None:
            return cls(float(logit))
        raise InvalidInput(
            "The mechanism does not state how far one record moves the scores; `neighbours` or `change` is required."
        )

    def scaled(self, direction: Floats) -> Floats:
        """Return the longest change along ``direction`` that is within the limits."""
        return np.asarray(
            direction * min(self.one / np.abs(direction).max(), self.vector / np.linalg.norm(direction))
        )


@dataclass(frozen=True)
class StatedScores:
    """A model whose scores are its inputs, with stated bounds."""

    classes: int  # The number of classes
    bounds: ScoreBounds  # How far one record moves the scores

    def scores(self, features: NDArray[np.floating]) -> Floats:
        """Return the features themselves."""
        return np.asarray(features, dtype=np.float64)


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The scores of one query on two neighbouring training sets.

    Parameters
    ----------
    first, second : array of float, shape (classes,)
        The two score vectors; all scores are finite.
    description : str
        How they were chosen.

    Examples
    --------
    >>> Neighbours([0.0, 1.0], [1.0, 0.0]).second
    array([1., 0.])
    """

    first: Floats
    second: Floats
    description: str = "as given"

    def __init__(self, first: ArrayLike, second: ArrayLike, description: str = "as given") -> None:
        object.__setattr__(self, "first", np.asarray(first, dtype=np.float64))
        object.__setattr__(self, "second", np.asarray(second, dtype=np.float64))
        object.__setattr__(self, "description", description)
        if self.first.ndim != 1 or self.first.shape != self.second.shape or len(self.first) < 2:
            raise InvalidInput(
                "Neighbours must be two vectors with one score per class, the same classes in both; got shapes "
                f"{self.first.shape} and {self.second.shape}."
            )
        if not (np.isfinite(self.first).all() and np.isfinite(self.second).all()):
            raise InvalidInput("The scores of neighbours must be finite; some are NaN or infinite.")


def audit_mechanism(
    mechanism: Mechanism,
    classes: int | None = None,
    *,
    neighbours: Neighbours | Sequence[Neighbours] | None = None,
    change: ScoreChange | None = None,
    claimed: Guarantee | Cost | None = None,
    samples: int = 100_000,
    confidence: float = CONFIDENCE,
    delta: float = 1e-5,
    noise: NoiseSource | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> AuditReport:
    """Audit one answer of a prepared mechanism.

    If there are several pairs of neighbours, a few draws of each choose the pair. Then ``samples`` draws on each input
    find an event and bound it; see `distinguish`.

    Parameters
    ----------
    mechanism : Mechanism
        A prepared mechanism.
    classes : int or None
        Number of classes. Required without ``neighbours``.
    neighbours : Neighbours, sequence of Neighbours or None
        The pairs to tell apart. None: worst-case pairs within ``change``.
    change : ScoreChange or None
        How far one record moves the scores. None: what the mechanism's own claim assumes.
    claimed : Guarantee, Cost or None
        The claim to test. None: the mechanism's own guarantee.
    samples : int
        Number of draws on each input.
    confidence : float
        The bound holds with at least this probability.
    delta : float
        Delta of the epsilon that is reported for a Gaussian claim.
    noise : NoiseSource or None
        Where the mechanism draws its noise from. None: seeded noise, so that the audit can be repeated.
        `quietmax.noise.EXACT`: the noise of a real release.
    seed : int
        Determines the pairs and the seeded noise.
    progress : callable or None
        Called with (done, total) while pairs are compared.

    Returns
    -------
    AuditReport
        The lower bound beside the claim.

    Examples
    --------
    >>> from quietmax.mechanisms import Algorithm1
    >>> leaky = Algorithm1("laplace", 1 / 7, 1 / 7, logit_sensitivity=0.4, probability_sensitivity=1.0)
    >>> audit_mechanism(leaky, classes=3, samples=4000).verdict
    'refuted'
    """
    if neighbours is None:
        if classes is None:
            raise InvalidInput("classes is required if `neighbours` is not given.")
        claim = Claim.of(claimed or mechanism.guarantee(classes))
        pairs = worst_case_neighbours(classes, change or ScoreChange.of(mechanism), claim.amount, seed=seed)
    else:
        pairs = [neighbours] if isinstance(neighbours, Neighbours) else [*neighbours]
    if not pairs or len({len(pair.first) for pair in pairs}) != 1:
        raise InvalidInput("neighbours must be at least one pair, all with the same number of classes.")
    width = len(pairs[0].first)
    if classes is not None and classes != width:
        raise InvalidInput(
            f"classes must be the number of scores of the neighbours, {width}, or None; got {classes}."
        )
    stated = claimed or mechanism.guarantee(width)
    source = noise or SeededNoise(np.random.default_rng((0xD1CE, seed)))
    pair = _worst_pair(pairs, mechanism, source, Claim.of(stated), samples, progress)
    return distinguish(
        _draws(mechanism, pair.first, source),
        _draws(mechanism, pair.second, source),
        stated,
        samples=samples,
        confidence=confidence,
        delta=delta,
        subject=mechanism.name,
        details={"classes": width, "neighbours": pair.description, "noise_source": source.name},
    )


def worst_case_neighbours(
    classes: int, change: ScoreChange, claimed: float, *, seed: int = 0
) -> list[Neighbours]:
    """Build pairs of score vectors that differ as much as possible.

    Directions: one score up; one up and another down; one up and all others down; all but one up; random. Starting
    points: all scores equal, or two classes in front with the first of them 0, 1.5 or 3 units behind. A unit about
    halves the chances of a class at the claimed noise. Both vectors lie symmetrically about the starting point.
    """
    if classes < 2:
        raise InvalidInput(f"classes must be at least 2, got {classes}.")
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
        move = change.scaled(direction)
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
        move = change.scaled(direction)
        start = generator.normal(size=classes) * np.ptp(move)
        pairs.append(Neighbours(start - move / 2, start + move / 2, f"{name}; random start"))
    return pairs


def _worst_pair(
    pairs: Sequence[Neighbours],
    mechanism: Mechanism,
    noise: NoiseSource,
    claim: Claim,
    samples: int,
    progress: Progress | None,
) -> Neighbours:
    """Return the pair that a few draws tell apart best; promising pairs get more draws."""
    left = list(pairs)
    for share, confidence, kept in _ROUNDS:
        if len(left) <= kept:
            continue
        rating = claim_rating(claim, confidence)
        draws = max(int(share * samples), _MIN_DRAWS)
        rated = []
        for done, pair in enumerate(left, 1):
            first, second = (_draws(mechanism, scores, noise) for scores in (pair.first, pair.second))
            rated.append(find_event(draw_pair(first, second, draws), rating)[1])
            if progress is not None:
                progress(done, len(left))
        left = [left[place] for place in np.argsort(-np.array(rated), kind="stable")[:kept]]
    return left[0]


def _draws(mechanism: Mechanism, scores: Floats, noise: NoiseSource) -> Draw:
    """Return a function that draws answers for these scores, some thousand at once."""

    def draw(times: int) -> Answers:
        parts = [
            mechanism.release(np.tile(scores, (min(_ROWS_AT_ONCE, times - start), 1)), noise)
            for start in range(0, times, _ROWS_AT_ONCE)
        ]
        released = [part.probabilities for part in parts if part.probabilities is not None]
        return Answers(
            np.concatenate([part.labels for part in parts]), np.concatenate(released) if released else None
        )

    return draw

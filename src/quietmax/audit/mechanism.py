"""Audit of a mechanism: an adversary who knows the scores in both neighbouring worlds and sees the answers.

This is the strongest adversary the claim speaks of, so a mechanism whose noise is right comes out close to its claim,
and one whose noise is too small is refuted. The audit knows no mechanism by name: it draws answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quietmax.accounting import Cost, Guarantee
from quietmax.audit.distinguish import Draw, distinguish, drawn_worlds, rating_for
from quietmax.audit.events import find_event
from quietmax.audit.intervals import CONFIDENCE
from quietmax.audit.neighbours import Floats, Neighbours, Reach, worst_case
from quietmax.audit.report import AuditReport, Claim
from quietmax.errors import InvalidInput
from quietmax.mechanisms import Answers, Mechanism
from quietmax.noise import NoiseSource, SeededNoise

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

"""Tell two worlds apart by draws from each, and bound the privacy parameter from below by how well that works.

The first half of the draws is for finding an event, the second for bounding its two probabilities; since the event was
fixed before the second half was looked at, the bound holds with the stated confidence whatever the search did. This
works for anything that can be drawn often: a mechanism's answers, weights released by repeated training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quietmax.accounting import Cost, Guarantee
from quietmax.audit.events import Rating, Worlds, find_event
from quietmax.audit.intervals import CONFIDENCE, Parameter, approximate_lower_bounds, checked_confidence
from quietmax.audit.report import AuditReport, Claim
from quietmax.audit.statistics import Observed
from quietmax.errors import InvalidInput
from quietmax.mechanisms import Answers

Released = Answers | NDArray[np.floating]
Draw = Callable[[int], Released]
"""Draw a release that many times: answers with one row per draw, or an array of numbers with one row per draw."""

FEWEST_DRAWS = 64


def distinguish(
    first: Draw,
    second: Draw,
    claimed: Guarantee | Cost,
    *,
    samples: int = 100_000,
    confidence: float = CONFIDENCE,
    delta: float = 1e-5,
    subject: str = "release",
    details: Mapping[str, Any] | None = None,
) -> AuditReport:
    """Audit a release from ``samples`` draws of each of two neighbouring worlds against what is claimed of it.

    A pure claim is tested by ``epsilon >= ln((P - d)/Q)``, d being the claim's own extra delta; a Gaussian one by
    ``mu >= Phi^-1(P - d) - Phi^-1(Q)``, and the report adds a bound on epsilon at ``delta``, from an event of its own.

    >>> from quietmax.accounting import GaussianCost
    >>> dice = np.random.default_rng(0)
    >>> shifted = lambda shift: lambda draws: dice.normal(shift, 1.0, draws)
    >>> report = distinguish(shifted(0.0), shifted(1.0), GaussianCost(1.0), samples=10_000, confidence=0.99)
    >>> report.verdict, report.lower_bound > 0.8
    ('consistent', True)
    """
    claim = Claim.of(claimed)
    checked_confidence(confidence)
    if samples < FEWEST_DRAWS:
        raise InvalidInput(
            f"{samples} draws per world are too few to find and test an event; give at least {FEWEST_DRAWS}."
        )
    if not 0 < delta < 1:
        raise InvalidInput(f"delta is {delta}, but must lie between 0 and 1; try 1e-5.")
    searching = samples // 2
    found = drawn_worlds(first, second, searching)
    event, _ = find_event(found, rating_for(claim.parameter, claim.extra_delta, confidence))
    epsilon_event = event
    if claim.parameter == "mu":
        epsilon_event, _ = find_event(found, rating_for("epsilon", delta, confidence))
    fresh = drawn_worlds(first, second, samples - searching)
    counts = event.counts(fresh)
    epsilon = bound = counts.lower_bound(claim.parameter, claim.extra_delta, confidence)
    if claim.parameter == "mu":
        epsilon = epsilon_event.counts(fresh).epsilon_lower_bound(delta, confidence)
    return AuditReport(
        subject=subject,
        definition=claim.definition,
        claimed=claim.amount,
        lower_bound=bound,
        confidence=confidence,
        evidence=event.description,
        samples=samples,
        delta=claim.delta(delta),
        epsilon_claimed=claim.epsilon(delta),
        epsilon_lower_bound=epsilon,
        details={
            **(details or {}),
            "event_where_likely": counts.likely,
            "event_where_unlikely": counts.unlikely,
            "event_trials": counts.trials,
        },
    )


def drawn_worlds(first: Draw, second: Draw, draws: int) -> Worlds:
    """That many draws of each world."""
    worlds = Worlds(Observed.of(first(draws)), Observed.of(second(draws)))
    if [len(seen) for seen in worlds] != [draws, draws] or worlds.first.columns != worlds.second.columns:
        raise InvalidInput(
            f"{draws} draws of the same release were asked for, but the two worlds gave {len(worlds.first)} and "
            f"{len(worlds.second)} of {worlds.first.columns} and {worlds.second.columns} numbers; return equally "
            "many of equal width."
        )
    return worlds


def rating_for(parameter: Parameter, delta: float, confidence: float) -> Rating:
    """Rate events by the bound they would give."""
    return partial(approximate_lower_bounds, parameter=parameter, delta=delta, confidence=confidence)

"""Tell a release on two neighbouring inputs apart, and bound epsilon or mu from below.

Half of the draws serve to find an event that happens often on one input and seldom on the other. The other half bound
its two probabilities. The event is fixed before the second half is looked at, so the bound holds however long the
search was.

Nothing here knows any mechanism. From labels, probability vectors or plain numbers the search computes: the label;
single numbers; differences and log-ratios of pairs; log-odds; the log-odds of the label; the best linear combination;
and *atoms*, values that repeat exactly from draw to draw. Noise has no atoms; a relation that noise leaves unchanged
(as in THEORY 2.1) has.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quietmax.accounting.costs import Cost
from quietmax.accounting.guarantee import Guarantee, Unit
from quietmax.audit.bounds import (
    CONFIDENCE,
    CountedEvent,
    EventCounts,
    Parameter,
    approximate_lower_bounds,
    approximate_shares,
    check_confidence,
)
from quietmax.audit.report import AuditReport, Claim
from quietmax.errors import InvalidInput
from quietmax.mechanisms.base import Answers

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Draw = Callable[[int], Answers | NDArray[np.floating]]
"""Draw a release that many times: answers, or an array of numbers, with one row per draw."""
Rating = Callable[[Integers, Integers, int], Floats]
"""(counts where likely, counts where unlikely, draws on each input) -> how much each event would show."""

MIN_DRAWS = 64
"""Smallest number of draws on each input."""
ATOM_WIDTH = 1e-6
"""Values that agree to this are the same value."""
_KEPT_COLUMNS = 5
"""Pairs are formed among the columns that differ most; all columns enter the linear combination."""
_BINS = 128
_TAIL = np.geomspace(1e-5, 1 / _BINS, 16)
_QUANTILES = np.concatenate([np.arange(1, _BINS) / _BINS, _TAIL, 1 - _TAIL])
"""Quantiles of a statistic that separate its bins: evenly spaced, and closer together in the tails."""
_BINS_PER_LABEL = 16
_SMALLEST_PROBABILITY = 1e-300
_SMALLEST_IN_LINEAR = 1e-12
_ATOM_SHARE = 0.005
_ATOMS_PER_COLUMN = 8


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
    unit: Unit = "record",
) -> AuditReport:
    """Audit a release from draws on two neighbouring inputs.

    A pure or approximate claim is tested by ``epsilon >= ln((P - d)/Q)``, d the claim's own delta; a Gaussian claim by
    ``mu >= Phi^-1(P - d) - Phi^-1(Q)``; DP-SGD with Poisson samples by the curve of its steps
    (`quietmax.audit.bounds.SampledSteps`). For the last two the report adds a bound on epsilon alone, from an event of
    its own.

    Parameters
    ----------
    first, second : callable
        Each takes a number of draws and returns that many releases on its input: `Answers`, or an array with one row
        per draw.
    claimed : Guarantee or Cost
        The claim to test.
    samples : int
        Number of draws on each input, at least 64.
    confidence : float
        The bound holds with at least this probability.
    delta : float
        Delta of the epsilon that is reported for a Gaussian claim.
    subject : str
        Name for the report.
    details : Mapping[str, Any] or None
        Further figures for the report, as JSON values.
    unit : {"record", "person"}
        What the two inputs differ in.

    Returns
    -------
    AuditReport
        The lower bound beside the claim.

    Examples
    --------
    >>> from quietmax.accounting import GaussianCost
    >>> rng = np.random.default_rng(0)
    >>> shifted = lambda shift: lambda draws: rng.normal(shift, 1.0, draws)
    >>> report = distinguish(shifted(0.0), shifted(1.0), GaussianCost(1.0), samples=10_000, confidence=0.99)
    >>> report.verdict, report.lower_bound > 0.8
    ('consistent', True)
    """
    claim = Claim.of(claimed)
    check_confidence(confidence)
    if samples < MIN_DRAWS:
        raise InvalidInput(f"The number of draws on each input must be at least {MIN_DRAWS}, got {samples}.")
    if not 0 < delta < 1:
        raise InvalidInput(f"delta must lie strictly between 0 and 1, got {delta}.")
    searching = samples // 2
    drawn = draw_pair(first, second, searching)
    event, _ = find_event(drawn, claim_rating(claim, confidence))
    epsilon_event = None
    if claim.parameter == "mu" or claim.steps is not None:
        epsilon_event, _ = find_event(drawn, rating_for("epsilon", claim.delta(delta), confidence))
    fresh = draw_pair(first, second, samples - searching)
    counts = event.counts(fresh)
    epsilon = bound = claim.lower_bound(counts, confidence)
    if epsilon_event is not None:
        epsilon = epsilon_event.counts(fresh).lower_bound("epsilon", claim.delta(delta), confidence)
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
        unit=unit,
        repetition=CountedEvent(counts, claim.rejected, confidence),
    )


@dataclass(frozen=True, eq=False)
class Observations:
    """Draws of one release."""

    labels: Integers | None  # The released labels: one per draw, or those of several queries
    numbers: Floats | None  # The released numbers
    probabilities: bool  # Whether each row of numbers is a probability vector

    @classmethod
    def of(cls, released: Answers | NDArray[np.floating]) -> Observations:
        """Read ``released``: answers, or an array with one row of numbers per draw."""
        labels = probabilities = None
        if isinstance(released, Answers):
            labels, probabilities = np.asarray(released.labels), released.probabilities
            if probabilities is None:
                return cls(labels, None, False)
        numbers = np.asarray(released if probabilities is None else probabilities, dtype=np.float64)
        numbers = numbers[:, None] if numbers.ndim == 1 else numbers.reshape(len(numbers), -1)
        # NaN would hide what tells the inputs apart: it belongs to no bin.
        if not numbers.shape[1] or not np.isfinite(numbers).all():
            raise InvalidInput(
                "A release must contain at least one number per draw, and finite numbers only; some are missing, NaN "
                "or infinite."
            )
        return cls(labels, numbers, probabilities is not None)

    def __len__(self) -> int:
        return len(self.labels) if self.labels is not None else len(self.released_numbers)

    def part(self, start: int, stop: int) -> Observations:
        """Return the draws from ``start`` to ``stop``."""
        chosen = slice(start, stop)
        return Observations(
            None if self.labels is None else self.labels[chosen],
            None if self.numbers is None else self.numbers[chosen],
            self.probabilities,
        )

    @property
    def columns(self) -> int:
        """How many numbers a draw contains."""
        return 0 if self.numbers is None else self.numbers.shape[1]

    @property
    def released_numbers(self) -> Floats:
        """The released numbers; an error if there are labels only."""
        if self.numbers is None:
            raise InvalidInput("This release contains labels only, no numbers.")
        return self.numbers

    @cached_property
    def logs(self) -> Floats:
        """Logarithms of the probabilities, 0 taken as 1e-300."""
        return np.asarray(np.log(np.maximum(self.released_numbers, _SMALLEST_PROBABILITY)))

    def number(self, column: int) -> Floats:
        """Return one ``column``."""
        return self.released_numbers[:, column]

    def difference(self, one: int, other: int) -> Floats:
        """Return column ``one`` minus column ``other``."""
        return np.asarray(self.released_numbers[:, one] - self.released_numbers[:, other])

    def log_ratio(self, one: int, other: int) -> Floats:
        """Return ``ln p[one] - ln p[other]``."""
        return np.asarray(self.logs[:, one] - self.logs[:, other])

    def log_odds(self, column: int) -> Floats:
        """Return the log-odds of class ``column``; the other probabilities are summed, which keeps their digits."""
        others = np.delete(self.released_numbers, column, axis=1).sum(1)
        return np.asarray(self.logs[:, column] - np.log(np.maximum(others, _SMALLEST_PROBABILITY)))

    def log_odds_if_label(self, column: int) -> Floats:
        """Return the log-odds of class ``column`` where it is the label, minus infinity elsewhere."""
        return np.where(self.labels == column, self.log_odds(column), -np.inf)

    def log_odds_of_label(self) -> Floats:
        """Return the log-odds of the label of each draw."""
        rows, labels = np.arange(len(self)), np.asarray(self.labels)
        others = self.released_numbers.copy()
        others[rows, labels] = 0.0
        return np.asarray(self.logs[rows, labels] - np.log(np.maximum(others.sum(1), _SMALLEST_PROBABILITY)))


class DrawnPair(NamedTuple):
    """Equally many draws of the same release on two neighbouring inputs."""

    first: Observations
    second: Observations

    def part(self, start: int, stop: int) -> DrawnPair:
        """Return the draws from ``start`` to ``stop`` on both inputs."""
        return DrawnPair(self.first.part(start, stop), self.second.part(start, stop))


def draw_pair(first: Draw, second: Draw, draws: int) -> DrawnPair:
    """Draw from ``first`` and ``second`` that many ``draws`` each, and check that both have the same shape."""
    pair = DrawnPair(Observations.of(first(draws)), Observations.of(second(draws)))
    if [len(drawn) for drawn in pair] != [draws, draws] or pair.first.columns != pair.second.columns:
        raise InvalidInput(
            f"Both inputs must return {draws} draws of the same release; got {len(pair.first)} and "
            f"{len(pair.second)} draws of {pair.first.columns} and {pair.second.columns} numbers."
        )
    return pair


def rating_for(parameter: Parameter, delta: float, confidence: float) -> Rating:
    """Return a function that rates events by the bound on ``parameter`` at ``delta`` and ``confidence``."""
    return partial(approximate_lower_bounds, parameter=parameter, delta=delta, confidence=confidence)


def claim_rating(claim: Claim, confidence: float) -> Rating:
    """Return a function that rates events by how much they say about ``claim``."""
    if claim.steps is not None:
        return partial(approximate_shares, steps=claim.steps, confidence=confidence)
    return rating_for(claim.parameter, claim.extra_delta, confidence)


@dataclass(frozen=True, eq=False)
class Statistic:
    """One number per draw."""

    description: str  # The statistic in words
    of: Callable[[Observations], Floats]  # Takes observations and returns one number per draw
    ordered: bool = True  # False if the values are numbers of bins whose order has no meaning


@dataclass(frozen=True, eq=False)
class Event:
    """The event that a statistic falls into one of the marked bins."""

    statistic: Statistic  # The statistic
    edges: Floats  # The inner borders of the bins
    inside: NDArray[np.bool_]  # The marked bins
    likely_in: Literal[0, 1]  # The input on which the event happens more often
    description: str  # The event in words

    def counts(self, pair: DrawnPair) -> EventCounts:
        """Count how often the event happened in both parts of ``pair``."""
        happened = [int(self.inside[_bins(self.statistic.of(drawn), self.edges)].sum()) for drawn in pair]
        return EventCounts(happened[self.likely_in], happened[1 - self.likely_in], len(pair.first))


def find_event(pair: DrawnPair, rating: Rating) -> tuple[Event, float]:
    """Find the event with the highest rating."""
    draws = len(pair.first)
    learn, choose = pair.part(0, draws // 2), pair.part(draws // 2, draws)
    best: tuple[Event, float] | None = None
    for statistic in _statistics(*learn):
        found = _best_event(statistic, learn, choose, rating)
        if best is None or found[1] > best[1]:
            best = found
    assert best is not None, "every release has a label or a number"
    return best


def _best_event(
    statistic: Statistic, learn: DrawnPair, choose: DrawnPair, rating: Rating
) -> tuple[Event, float]:
    """Find the best event of one statistic: bins from one end, or bins ordered by likelihood ratio."""
    learned = [statistic.of(drawn) for drawn in learn]
    edges = _edges(np.concatenate(learned), statistic.ordered)
    size = len(edges) + 1
    known = [np.bincount(_bins(values, edges), minlength=size) for values in learned]
    chosen = [np.bincount(_bins(statistic.of(drawn), edges), minlength=size) for drawn in choose]
    ratio = np.log(known[1] + 0.5) - np.log(known[0] + 0.5)
    ascending = np.argsort(ratio, kind="stable")
    orders = [("ratio", ascending), ("ratio", ascending[::-1])]
    if statistic.ordered:
        orders += [("below", np.arange(size)), ("at least", np.arange(size)[::-1])]
    inside = np.zeros(size, dtype=np.bool_)
    if size == 1:
        return Event(statistic, edges, inside, 0, f"{statistic.description} is always the same"), -np.inf
    # Every event is a beginning of one of the orders; it may be likely on either input.
    first, second = (np.cumsum(counts[[order for _, order in orders]], 1)[:, :-1] for counts in chosen)
    rated = rating(np.stack([first, second]), np.stack([second, first]), len(choose.first))
    likely_in, which, taken = np.unravel_index(int(np.argmax(rated)), rated.shape)
    name, order = orders[which]
    inside[order[: taken + 1]] = True
    description = _describe(statistic, edges, inside, name)
    return Event(statistic, edges, inside, 1 if likely_in else 0, description), float(rated.max())


def _describe(statistic: Statistic, edges: Floats, inside: NDArray[np.bool_], order: str) -> str:
    """Describe an event in words."""
    count = int(inside.sum())
    if order == "below":
        return f"{statistic.description} < {edges[count - 1]:.6g}"
    if order == "at least":
        return f"{statistic.description} >= {edges[len(inside) - count - 1]:.6g}"
    if not statistic.ordered and len(inside) <= 32:
        values = np.concatenate([[edges[0] - 1], edges])[inside] + 0.5
        return f"{statistic.description} is {', '.join(f'{value:g}' for value in values)}"
    return f"{statistic.description} lies in {count} of {len(inside)} bins ordered by likelihood ratio"


def _edges(values: Floats, ordered: bool) -> Floats:
    """Return inner borders of bins: quantiles, or the middles between bin numbers."""
    if not ordered:
        return np.asarray(np.arange(values.min(), values.max()) + 0.5)
    ranked = np.sort(values)
    edges: Floats = np.unique(ranked[(_QUANTILES * len(ranked)).astype(np.int64)])
    # A border at the smallest value would leave the bin below it empty.
    return np.asarray(edges[edges > ranked[0]])


def _bins(values: Floats, edges: Floats) -> Integers:
    return np.asarray(np.searchsorted(edges, values, side="right"))


def _statistics(first: Observations, second: Observations) -> Iterator[Statistic]:
    """Yield every statistic to try, those with parameters fitted to these draws."""
    if first.labels is not None and first.labels.ndim == 2:
        yield _likelihood_of_labels(first, second)
        return
    if first.labels is not None:
        yield Statistic("the label", lambda drawn: np.asarray(drawn.labels, dtype=np.float64), ordered=False)
    if not first.columns:
        return
    kept = _differing_columns(first, second)
    yield from _column_statistics(kept, probabilities=first.probabilities)
    if first.probabilities:
        yield from _log_odds_statistics(first, second, kept)
    yield _linear_combination(first, second, logs=False)
    if first.probabilities:
        yield _linear_combination(first, second, logs=True)
    yield from _atoms(first, second, kept)


def _likelihood_of_labels(first: Observations, second: Observations) -> Statistic:
    """Return the log-likelihood ratio of the labels of several answers, whose noise is independent."""
    one, other = np.asarray(first.labels), np.asarray(second.labels)
    queries, classes = one.shape[1], int(max(one.max(), other.max())) + 1

    def counted(labels: Integers) -> Floats:
        places = labels + classes * np.arange(queries)
        counts = np.bincount(places.ravel(), minlength=queries * classes).reshape(queries, classes)
        return np.asarray(counts + 0.5, np.float64)

    ratios = np.log(counted(other)) - np.log(counted(one))

    def likelihood(drawn: Observations) -> Floats:
        # A label that was never seen says nothing.
        labels = np.asarray(drawn.labels)
        known = np.minimum(labels, classes - 1)
        values = ratios[np.arange(queries), known]
        # Equal ratios must be the same number, whatever the order of the sum.
        return np.asarray(np.where(labels < classes, values, 0.0).sum(1).round(9))

    what = "the label" if queries == 1 else f"the labels of {queries} answers"
    return Statistic(f"the log-likelihood ratio of {what}", likelihood)


def _differing_columns(first: Observations, second: Observations) -> list[int]:
    """Return the columns whose values, relative to the row's median, differ most between the inputs."""
    if first.columns <= _KEPT_COLUMNS:
        return list(range(first.columns))

    def centred(drawn: Observations) -> Floats:
        values = drawn.logs if drawn.probabilities else drawn.released_numbers
        return np.asarray(values - np.median(values, axis=1, keepdims=True))

    one, other = centred(first), centred(second)
    distance = np.abs(one.mean(0) - other.mean(0)) / (one.std(0) + other.std(0) + 1e-12)
    middles = np.abs(np.median(one, 0) - np.median(other, 0)) / (one.std(0) + other.std(0) + 1e-12)
    score = distance + middles
    if first.labels is not None and second.labels is not None:
        counts = [np.bincount(labels, minlength=first.columns) for labels in (first.labels, second.labels)]
        score = score + np.abs(counts[0] - counts[1]) / np.sqrt(counts[0] + counts[1] + 1.0)
    return sorted(np.argsort(-score, kind="stable")[:_KEPT_COLUMNS].tolist())


def _column_statistics(kept: list[int], *, probabilities: bool) -> Iterator[Statistic]:
    """Yield single columns, and differences (of probabilities also log-ratios) of pairs."""
    letter = "p" if probabilities else "x"
    for column in kept:
        yield Statistic(f"{letter}[{column}]", partial(Observations.number, column=column))
    for one, other in itertools.combinations(kept, 2):
        yield Statistic(
            f"{letter}[{one}] - {letter}[{other}]", partial(Observations.difference, one=one, other=other)
        )
        if probabilities:
            yield Statistic(
                f"ln p[{one}] - ln p[{other}]", partial(Observations.log_ratio, one=one, other=other)
            )


def _log_odds_statistics(first: Observations, second: Observations, kept: list[int]) -> Iterator[Statistic]:
    """Yield log-odds of classes, of classes that are the label, and the label with its log-odds."""
    if first.columns > 2:
        for column in kept:
            yield Statistic(f"log-odds of class {column}", partial(Observations.log_odds, column=column))
    if first.labels is None:
        return
    for column in kept:
        yield Statistic(
            f"log-odds of class {column} when it is the label",
            partial(Observations.log_odds_if_label, column=column),
        )
    yield _label_and_log_odds(first, second)


def _label_and_log_odds(first: Observations, second: Observations) -> Statistic:
    """Return the label together with the bin of its own log-odds, as one bin number."""
    edges = []
    values = np.concatenate([first.log_odds_of_label(), second.log_odds_of_label()])
    labels = np.concatenate([np.asarray(first.labels), np.asarray(second.labels)])
    for label in range(first.columns):
        own = np.sort(values[labels == label])
        places = np.linspace(0, len(own), _BINS_PER_LABEL + 1)[1:-1].astype(np.int64)
        edges.append(own[places] if len(own) else np.zeros(_BINS_PER_LABEL - 1))
    table = np.stack(edges)

    def bin_number(drawn: Observations) -> Floats:
        within = (drawn.log_odds_of_label()[:, None] >= table[np.asarray(drawn.labels)]).sum(1)
        return np.asarray(np.asarray(drawn.labels) * _BINS_PER_LABEL + within, dtype=np.float64)

    return Statistic("the label and the log-odds of it", bin_number, ordered=False)


def _linear_combination(first: Observations, second: Observations, *, logs: bool) -> Statistic:
    """Return the linear combination that separates the inputs best (Fisher's discriminant)."""

    def values(drawn: Observations) -> Floats:
        if not logs:
            return drawn.released_numbers
        floored = np.maximum(drawn.logs, np.log(_SMALLEST_IN_LINEAR))
        return np.asarray(floored - floored.mean(1, keepdims=True))

    one, other = values(first), values(second)
    spread = np.atleast_2d(np.cov(one, rowvar=False) + np.cov(other, rowvar=False))
    ridge = 1e-9 * max(float(np.trace(spread)), 1e-300) * np.eye(len(spread))
    weights = np.linalg.lstsq(spread + ridge, other.mean(0) - one.mean(0), rcond=None)[0]
    what = "log-probabilities" if logs else "released numbers"
    return Statistic(f"a linear combination of the {what}", lambda drawn: np.asarray(values(drawn) @ weights))


def _atoms(first: Observations, second: Observations, kept: list[int]) -> Iterator[Statistic]:
    """Yield the evidence of all values that repeat exactly: the sum of ``ln(frequency / frequency there)``."""
    compare = Observations.log_ratio if first.probabilities else Observations.difference
    relations: list[Callable[[Observations], Floats]] = [
        *(partial(Observations.number, column=column) for column in kept),
        *(partial(compare, one=one, other=other) for one, other in itertools.combinations(kept, 2)),
    ]
    tables = []
    for relation in relations:
        keys, weights = _repeated_values(relation(first), relation(second))
        if len(keys):
            tables.append((relation, keys, weights))
    if not tables:
        return

    def evidence(drawn: Observations) -> Floats:
        total = np.zeros(len(drawn))
        for relation, keys, weights in tables:
            rounded = np.rint(relation(drawn) / ATOM_WIDTH)
            place = np.minimum(np.searchsorted(keys, rounded), len(keys) - 1)
            total += np.where(keys[place] == rounded, weights[place], 0.0)
        return total

    what = "ln p[u] - ln p[w]" if first.probabilities else "x[u] - x[w]"
    yield Statistic(
        f"the evidence of values that repeat to {ATOM_WIDTH:g} ({what} or single values, in {len(tables)} relations)",
        evidence,
    )


def _repeated_values(first: Floats, second: Floats) -> tuple[Floats, Floats]:
    """Return values that repeat on either input, sorted, and ``ln(share on the second / share on the first)``."""
    least = max(8.0, _ATOM_SHARE * len(first))
    counted = [np.unique(np.rint(values / ATOM_WIDTH), return_counts=True) for values in (first, second)]
    often = []
    for keys, counts in counted:
        top = np.argsort(-counts, kind="stable")[:_ATOMS_PER_COLUMN]
        often.append(keys[top[counts[top] >= least]])
    repeated = np.unique(np.concatenate(often))
    shares = []
    for keys, counts in counted:
        place = np.minimum(np.searchsorted(keys, repeated), len(keys) - 1)
        shares.append(np.log(np.where(keys[place] == repeated, counts[place], 0) + 1.0))
    return repeated, np.asarray(shares[1] - shares[0])

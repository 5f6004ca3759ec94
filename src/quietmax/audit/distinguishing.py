"""Tell a release on two neighbouring inputs apart, and bound epsilon or mu from below.

Half of the draws serve to find an event that happens often on one input and seldom on the other. The other half bound
its two probabilities. The event is fixed before the second half is looked at, so the bound holds however long the
search was. The search knows no mechanism. Among its statistics are *atoms*, values that repeat exactly from draw to
draw: noise has none, a relation that noise leaves unchanged (as in THEORY 2.1) has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from quietmax.accounting.costs import Budget, Cost, GaussianCost, PureCost, per_query
from quietmax.accounting.guarantee import Guarantee, Unit
from quietmax.audit.bounds import (
    CONFIDENCE,
    AuditReport,
    Claim,
    CountedEvent,
    EventCounts,
    _check_confidence,
)
from quietmax.errors import InvalidInput
from quietmax.estimators.training_set import check_choice
from quietmax.mechanisms.algorithm1 import Algorithm1, budget_split
from quietmax.mechanisms.base import (
    Answers,
    GaussianScores,
    Mechanism,
    NoisyMax,
    ProvenMechanism,
    SampledNeuron,
    plugin_mechanisms,
    selection_epsilon,
)
from quietmax.models.stacked import Progress
from quietmax.noise.sources import EXACT, NoiseSource, SeededNoise
from quietmax.sensitivity.certified import ScoreBounds, Sensitivity

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Draw = Callable[[int], Answers | NDArray[np.floating]]
"""Draw a release that many times: answers, or an array of numbers, with one row per draw."""
Rating = Callable[[Integers, Integers, int], Floats]
"""(counts where likely, counts where unlikely, draws on each input) -> how much each event would show."""

MIN_DRAWS = 64
"""Smallest number of draws on each input."""
_ATOM_WIDTH = 1e-6
"""Values that agree to this are the same value."""
_KEPT_COLUMNS = 5
"""Pairs are formed among the columns that differ most; all columns enter the linear combination."""
_BINS = 128
_TAIL = np.geomspace(1e-5, 1 / _BINS, 16)
_QUANTILES = np.concatenate([np.arange(1, _BINS) / _BINS, _TAIL, 1 - _TAIL])
"""Quantiles of a statistic that separate its bins: evenly spaced, and closer together in the tails."""
_BINS_PER_LABEL = 16
_SMALLEST_IN_LINEAR = 1e-12
_ATOM_SHARE = 0.005
_ATOMS_PER_COLUMN = 8
_TINY = 1e-300
_FAR_BEHIND = 60.0
_BEHIND = (0.0, 1.5, 3.0)
_ROWS_AT_ONCE = 8192
# Rounds of the search for the worst pair: (share of the draws for each pair, confidence to rate by, pairs kept).
_ROUNDS = ((0.04, 0.95, 5), (0.2, 0.999, 1))
_MIN_DRAWS_OF_PAIR = 2000


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

    `quietmax.audit.bounds` has the bounds. For a Gaussian claim and for DP-SGD with Poisson samples the report adds a
    bound on epsilon alone, from an event of its own.

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
    claim = Claim._of(claimed)
    _check_confidence(confidence)
    if samples < MIN_DRAWS:
        raise InvalidInput(f"The number of draws on each input must be at least {MIN_DRAWS}, got {samples}.")
    if not 0 < delta < 1:
        raise InvalidInput(f"delta must lie strictly between 0 and 1, got {delta}.")
    searching = samples // 2
    drawn = _draw_pair(first, second, searching)
    claims = [claim]
    if claim.parameter == "mu" or claim.steps is not None:
        claims.append(claim._on_epsilon(delta))
    events = [_find_event(drawn, _rating(each, confidence))[0] for each in claims]
    fresh = _draw_pair(first, second, samples - searching)
    counted = [event._counts(fresh) for event in events]
    bounds = [each._lower_bound(own, confidence) for each, own in zip(claims, counted, strict=True)]
    counts = counted[0]
    return AuditReport(
        subject=subject,
        **claim._stated(delta),
        lower_bound=bounds[0],
        confidence=confidence,
        evidence=events[0].description,
        samples=samples,
        epsilon_lower_bound=bounds[-1],
        details={
            **(details or {}),
            "event_where_likely": counts.likely,
            "event_where_unlikely": counts.unlikely,
            "event_trials": counts.trials,
        },
        unit=unit,
        repetition=CountedEvent(counts, claim, confidence),
    )


@dataclass(frozen=True, eq=False)
class _Observations:
    """Draws of one release."""

    labels: Integers | None  # The released labels: one per draw, or those of several queries
    numbers: Floats  # The released numbers, one row per draw; no columns if there are labels only
    probabilities: bool  # Whether each row of numbers is a probability vector

    @classmethod
    def _of(cls, released: Answers | NDArray[np.floating]) -> _Observations:
        """Read answers, or an array with one row of numbers per draw."""
        labels = probabilities = None
        if isinstance(released, Answers):
            labels, probabilities = np.asarray(released.labels), released.probabilities
            if probabilities is None:
                return cls(labels, np.zeros((len(labels), 0)), False)
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
        return len(self.numbers)

    def _part(self, chosen: slice) -> _Observations:
        labels = None if self.labels is None else self.labels[chosen]
        return _Observations(labels, self.numbers[chosen], self.probabilities)

    @property
    def _columns(self) -> int:
        """How many numbers a draw contains."""
        return int(self.numbers.shape[1])

    @cached_property
    def _logs(self) -> Floats:
        """Logarithms of the probabilities, 0 taken as 1e-300."""
        return np.asarray(np.log(np.maximum(self.numbers, _TINY)))


_Pair = tuple[_Observations, _Observations]
"""Equally many draws of the same release on two neighbouring inputs."""


def _draw_pair(first: Draw, second: Draw, draws: int) -> _Pair:
    pair = _Observations._of(first(draws)), _Observations._of(second(draws))
    if [len(drawn) for drawn in pair] != [draws, draws] or pair[0]._columns != pair[1]._columns:
        raise InvalidInput(
            f"Both inputs must return {draws} draws of the same release; got {len(pair[0])} and "
            f"{len(pair[1])} draws of {pair[0]._columns} and {pair[1]._columns} numbers."
        )
    return pair


def _rating(claim: Claim, confidence: float) -> Rating:
    """Return a function that rates events by an approximate bound: good enough to choose an event."""

    def _rate(likely: Integers, unlikely: Integers, trials: int) -> Floats:
        low, high = _wilson_limits(likely, unlikely, trials, confidence)
        if claim.steps is not None:
            return np.asarray((low - high) / np.maximum(claim.steps._permitted(high) - high, _TINY))
        p, q = np.maximum(low - claim.extra_delta, _TINY), np.clip(high, _TINY, 1.0)
        return np.asarray(np.log(p / q) if claim.parameter == "epsilon" else ndtri(p) - ndtri(q))

    return _rate


def _wilson_limits(
    likely: Integers, unlikely: Integers, trials: int, confidence: float
) -> tuple[Floats, Floats]:
    """Return Wilson's limits: of P from below and of Q from above."""
    z = -float(ndtri((1 - confidence) / 2))
    p, q = likely / trials, unlikely / trials
    below, above = (
        z * np.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) for share in (p, q)
    )
    middle, scale = z * z / (2 * trials), 1 + z * z / trials
    return (p + middle - below) / scale, (q + middle + above) / scale


@dataclass(frozen=True, eq=False)
class _Statistic:
    """One number per draw."""

    description: str
    of: Callable[[_Observations], Floats]
    ordered: bool = True  # False if the values are numbers of bins whose order has no meaning


@dataclass(frozen=True, eq=False)
class _Event:
    """The event that a statistic falls into one of the marked bins."""

    statistic: _Statistic
    edges: Floats  # The inner borders of the bins
    inside: NDArray[np.bool_]  # The marked bins
    likely_in: Literal[0, 1]  # The input on which the event happens more often
    description: str

    def _counts(self, pair: _Pair) -> EventCounts:
        happened = [int(self.inside[_bins(self.statistic.of(drawn), self.edges)].sum()) for drawn in pair]
        return EventCounts(happened[self.likely_in], happened[1 - self.likely_in], len(pair[0]))


def _find_event(pair: _Pair, rating: Rating) -> tuple[_Event, float]:
    """Find the event with the highest rating."""
    half = len(pair[0]) // 2
    learn = pair[0]._part(slice(half)), pair[1]._part(slice(half))
    choose = pair[0]._part(slice(half, None)), pair[1]._part(slice(half, None))
    found = (_best_event(statistic, learn, choose, rating) for statistic in _statistics(*learn))
    return max(found, key=itemgetter(1))


def _best_event(statistic: _Statistic, learn: _Pair, choose: _Pair, rating: Rating) -> tuple[_Event, float]:
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
        return _Event(statistic, edges, inside, 0, f"{statistic.description} is always the same"), -np.inf
    # Every event is a beginning of one of the orders; it may be likely on either input.
    first, second = (np.cumsum(counts[[order for _, order in orders]], 1)[:, :-1] for counts in chosen)
    rated = rating(np.stack([first, second]), np.stack([second, first]), len(choose[0]))
    likely_in, which, taken = np.unravel_index(int(np.argmax(rated)), rated.shape)
    name, order = orders[which]
    inside[order[: taken + 1]] = True
    description = _describe(statistic, edges, inside, name)
    return _Event(statistic, edges, inside, 1 if likely_in else 0, description), float(rated.max())


def _describe(statistic: _Statistic, edges: Floats, inside: NDArray[np.bool_], order: str) -> str:
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


def _statistics(first: _Observations, second: _Observations) -> Iterator[_Statistic]:
    """Yield every statistic to try, those with parameters fitted to these draws."""
    if first.labels is not None and first.labels.ndim == 2:
        yield _likelihood_of_labels(first, second)
        return
    if first.labels is not None:
        yield _Statistic("the label", lambda drawn: np.asarray(drawn.labels, dtype=np.float64), ordered=False)
    if not first._columns:
        return
    kept = _differing_columns(first, second)
    yield from _column_statistics(first, kept)
    if first.probabilities and first.labels is not None:
        yield _label_and_log_odds(first, second)
    yield _linear_combination(first, second, logs=False)
    if first.probabilities:
        yield _linear_combination(first, second, logs=True)
    yield from _atoms(first, second, kept)


def _likelihood_of_labels(first: _Observations, second: _Observations) -> _Statistic:
    """Return the log-likelihood ratio of the labels of several answers."""
    one, other = np.asarray(first.labels), np.asarray(second.labels)
    queries, classes = one.shape[1], int(max(one.max(), other.max())) + 1

    def _counted(labels: Integers) -> Floats:
        places = labels + classes * np.arange(queries)
        counts = np.bincount(places.ravel(), minlength=queries * classes).reshape(queries, classes)
        return np.asarray(counts + 0.5, np.float64)

    ratios = np.log(_counted(other)) - np.log(_counted(one))

    def _likelihood(drawn: _Observations) -> Floats:
        # A label that was never seen says nothing.
        labels = np.asarray(drawn.labels)
        known = np.minimum(labels, classes - 1)
        values = ratios[np.arange(queries), known]
        # Equal ratios must be the same number, whatever the order of the sum.
        return np.asarray(np.where(labels < classes, values, 0.0).sum(1).round(9))

    what = "the label" if queries == 1 else f"the labels of {queries} answers"
    return _Statistic(f"the log-likelihood ratio of {what}", _likelihood)


def _differing_columns(first: _Observations, second: _Observations) -> list[int]:
    """Return the columns whose values, relative to the row's median, differ most between the inputs."""
    if first._columns <= _KEPT_COLUMNS:
        return list(range(first._columns))

    def _centred(drawn: _Observations) -> Floats:
        values = drawn._logs if drawn.probabilities else drawn.numbers
        return np.asarray(values - np.median(values, axis=1, keepdims=True))

    one, other = _centred(first), _centred(second)
    distance = np.abs(one.mean(0) - other.mean(0)) / (one.std(0) + other.std(0) + 1e-12)
    middles = np.abs(np.median(one, 0) - np.median(other, 0)) / (one.std(0) + other.std(0) + 1e-12)
    score = distance + middles
    if first.labels is not None and second.labels is not None:
        counts = [np.bincount(labels, minlength=first._columns) for labels in (first.labels, second.labels)]
        score = score + np.abs(counts[0] - counts[1]) / np.sqrt(counts[0] + counts[1] + 1.0)
    return sorted(np.argsort(-score, kind="stable")[:_KEPT_COLUMNS].tolist())


def _relation(drawn: _Observations, one: int, other: int | None = None, *, logs: bool = False) -> Floats:
    """Return one column, or the difference of two, of the released numbers or of their logarithms."""
    numbers = drawn._logs if logs else drawn.numbers
    return numbers[:, one] if other is None else np.asarray(numbers[:, one] - numbers[:, other])


def _column_statistics(first: _Observations, kept: list[int]) -> Iterator[_Statistic]:
    """Yield single columns, differences of pairs, and of probabilities also log-ratios and log-odds."""
    letter = "p" if first.probabilities else "x"
    for column in kept:
        yield _Statistic(f"{letter}[{column}]", partial(_relation, one=column))
    for one, other in itertools.combinations(kept, 2):
        pair = partial(_relation, one=one, other=other)
        yield _Statistic(f"{letter}[{one}] - {letter}[{other}]", pair)
        if first.probabilities:
            yield _Statistic(f"ln p[{one}] - ln p[{other}]", partial(pair, logs=True))
    if not first.probabilities:
        return
    for column in kept if first._columns > 2 else ():
        yield _Statistic(f"log-odds of class {column}", partial(_log_odds, column=column))
    for column in kept if first.labels is not None else ():
        when_label = partial(_log_odds, column=column, if_label=True)
        yield _Statistic(f"log-odds of class {column} when it is the label", when_label)


def _log_odds(drawn: _Observations, column: int, *, if_label: bool = False) -> Floats:
    """Return the log-odds of class ``column``; minus infinity where it is not the label, if it must be.

    The other probabilities are summed, which keeps their digits.
    """
    others = np.delete(drawn.numbers, column, axis=1).sum(1)
    odds = np.asarray(drawn._logs[:, column] - np.log(np.maximum(others, _TINY)))
    return np.where(drawn.labels == column, odds, -np.inf) if if_label else odds


def _log_odds_of_label(drawn: _Observations) -> Floats:
    """Return the log-odds of the label of each draw."""
    rows, labels = np.arange(len(drawn)), np.asarray(drawn.labels)
    others = drawn.numbers.copy()
    others[rows, labels] = 0.0
    return np.asarray(drawn._logs[rows, labels] - np.log(np.maximum(others.sum(1), _TINY)))


def _label_and_log_odds(first: _Observations, second: _Observations) -> _Statistic:
    """Return the label together with the bin of its own log-odds, as one bin number."""
    edges = []
    values = np.concatenate([_log_odds_of_label(first), _log_odds_of_label(second)])
    labels = np.concatenate([np.asarray(first.labels), np.asarray(second.labels)])
    for label in range(first._columns):
        own = np.sort(values[labels == label])
        places = np.linspace(0, len(own), _BINS_PER_LABEL + 1)[1:-1].astype(np.int64)
        edges.append(own[places] if len(own) else np.zeros(_BINS_PER_LABEL - 1))
    table = np.stack(edges)

    def _bin_number(drawn: _Observations) -> Floats:
        within = (_log_odds_of_label(drawn)[:, None] >= table[np.asarray(drawn.labels)]).sum(1)
        return np.asarray(np.asarray(drawn.labels) * _BINS_PER_LABEL + within, dtype=np.float64)

    return _Statistic("the label and the log-odds of it", _bin_number, ordered=False)


def _linear_combination(first: _Observations, second: _Observations, *, logs: bool) -> _Statistic:
    """Return the linear combination that separates the inputs best (Fisher's discriminant)."""

    def _values(drawn: _Observations) -> Floats:
        if not logs:
            return drawn.numbers
        floored = np.maximum(drawn._logs, np.log(_SMALLEST_IN_LINEAR))
        return np.asarray(floored - floored.mean(1, keepdims=True))

    one, other = _values(first), _values(second)
    spread = np.atleast_2d(np.cov(one, rowvar=False) + np.cov(other, rowvar=False))
    ridge = 1e-9 * max(float(np.trace(spread)), 1e-300) * np.eye(len(spread))
    weights = np.linalg.lstsq(spread + ridge, other.mean(0) - one.mean(0), rcond=None)[0]
    what = "log-probabilities" if logs else "released numbers"
    return _Statistic(
        f"a linear combination of the {what}", lambda drawn: np.asarray(_values(drawn) @ weights)
    )


def _atoms(first: _Observations, second: _Observations, kept: list[int]) -> Iterator[_Statistic]:
    """Yield the evidence of all values that repeat exactly: the sum of ``ln(frequency / frequency there)``."""
    compare = partial(_relation, logs=first.probabilities)
    relations: list[Callable[[_Observations], Floats]] = [
        *(partial(_relation, one=column) for column in kept),
        *(partial(compare, one=one, other=other) for one, other in itertools.combinations(kept, 2)),
    ]
    tables = []
    for relation in relations:
        keys, weights = _repeated_values(relation(first), relation(second))
        if len(keys):
            tables.append((relation, keys, weights))
    if not tables:
        return

    def _evidence(drawn: _Observations) -> Floats:
        total = np.zeros(len(drawn))
        for relation, keys, weights in tables:
            rounded = np.rint(relation(drawn) / _ATOM_WIDTH)
            place = np.minimum(np.searchsorted(keys, rounded), len(keys) - 1)
            total += np.where(keys[place] == rounded, weights[place], 0.0)
        return total

    what = "ln p[u] - ln p[w]" if first.probabilities else "x[u] - x[w]"
    yield _Statistic(
        f"the evidence of values that repeat to {_ATOM_WIDTH:g} ({what} or single values, in {len(tables)} relations)",
        _evidence,
    )


def _repeated_values(first: Floats, second: Floats) -> tuple[Floats, Floats]:
    """Return values that repeat on either input, sorted, and ``ln(share on the second / share on the first)``."""
    least = max(8.0, _ATOM_SHARE * len(first))
    counted = [np.unique(np.rint(values / _ATOM_WIDTH), return_counts=True) for values in (first, second)]
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


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The scores of one query on two neighbouring training sets.

    Parameters
    ----------
    first, second : array-like of float, shape (classes,)
        The two score vectors; all scores are finite.
    description : str
        How they were chosen.

    Examples
    --------
    >>> Neighbours([0.0, 1.0], [1.0, 0.0]).second
    array([1., 0.])
    """

    first: Any
    second: Any
    description: str = "as given"

    def __post_init__(self) -> None:
        for name in ("first", "second"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.float64))
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
    change: ScoreBounds | None = None,
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
    change : ScoreBounds or None
        How far one record moves the scores. None: what the mechanism's own claim assumes.
    claimed : Guarantee, Cost or None
        The claim to test. None: the mechanism's own guarantee.
    samples, confidence, delta
        As in `distinguish`.
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
        claim = Claim._of(claimed or mechanism.guarantee(classes))
        pairs = _worst_case_neighbours(classes, _largest_change(mechanism, change), claim.amount, seed=seed)
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
    pair = _worst_pair(pairs, mechanism, source, Claim._of(stated), samples, progress)
    return distinguish(
        _drawn_answers(mechanism, pair.first, source),
        _drawn_answers(mechanism, pair.second, source),
        stated,
        samples=samples,
        confidence=confidence,
        delta=delta,
        subject=mechanism.name,
        details={"classes": width, "neighbours": pair.description, "noise_source": source.name},
    )


# Mechanisms with less noise
#
# Nothing here weakens a release: half of the noise that a claim requires is that of an honest release with a larger
# budget. Its own guarantee states the larger cost, and only an audit holds it against the smaller claim.


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise InvalidInput(f"noise_share must be above 0 and at most 1, got {share}.")


def _cost_with_share(cost: Cost, share: float) -> Cost:
    """Return the cost whose noise is a share of that of another cost: the scale of noise is the inverse of a cost."""
    _check_share(share)
    return PureCost(cost.epsilon / share) if isinstance(cost, PureCost) else GaussianCost(cost.mu / share)


def mechanism_with_share(mechanism: Mechanism, share: float) -> Mechanism:
    """Return a prepared mechanism with the noise of a larger cost; its guarantee states that cost.

    Parameters
    ----------
    mechanism : Mechanism
        A prepared mechanism of this library.
    share : float
        The share of its noise.

    Returns
    -------
    Mechanism
        The mechanism with that share of the noise.

    Examples
    --------
    >>> from quietmax.sensitivity import ScoreBounds, Sensitivity
    >>> one = Sensitivity(1.0, "certified", "One record changes one vote.")
    >>> votes = NoisyMax(bounds=ScoreBounds(one, one), per_query=PureCost(1.0))
    >>> mechanism_with_share(votes, 0.5).guarantee(2).epsilon
    2.0
    """
    _check_share(share)
    if isinstance(mechanism, Algorithm1) and mechanism.epsilon_neuron is not None:
        return replace(mechanism, epsilon_neuron=mechanism.epsilon_neuron / share)
    if not isinstance(mechanism, ProvenMechanism) or mechanism.per_query is None:
        raise InvalidInput(f"The noise of a {type(mechanism).__name__} cannot be scaled.")
    if isinstance(mechanism, NoisyMax) and mechanism.method != "gaussian":
        # A choice that is counted in mu has an epsilon of its own, which its noise is for.
        epsilon = selection_epsilon(mechanism.per_query, mechanism.method)
        return replace(mechanism, count_in=None, per_query=PureCost(epsilon / share))
    scaled: Mechanism = replace(mechanism, per_query=_cost_with_share(mechanism.per_query, share))  # type: ignore[type-var]
    return scaled


# Mechanisms by name

_NOISES: dict[str, tuple[str, ...]] = {
    "algorithm1": ("laplace", "gaussian"),
    "sampled-neuron": ("laplace", "gaussian"),
    "noisy-max": ("exponential", "permute-and-flip", "gaussian"),
    "gaussian": ("gaussian",),
}
"""The mechanisms of this library, and the noise that each can have."""


def audit_named_mechanism(
    mechanism: str,
    classes: int,
    *,
    noise: str,
    sensitivity: float,
    epsilon: float,
    delta: float,
    noise_share: float = 1.0,
    exact: bool = False,
    samples: int = 100_000,
    seed: int = 0,
    progress: Progress | None = None,
) -> AuditReport:
    """Audit one answer of a mechanism of this library or of a plug-in, prepared with ``epsilon`` and ``delta``.

    One record moves one score by ``sensitivity`` and all in L2 by sqrt(2) times as much.
    """
    one, vector = (
        Sensitivity(moved, "certified", "Stated for an audit.")
        for moved in (sensitivity, math.sqrt(2) * sensitivity)
    )
    bounds = ScoreBounds(one, vector)
    prepared = partial(_named_mechanism, mechanism, classes, noise, bounds, Budget(epsilon, delta))
    return audit_mechanism(
        prepared(noise_share),
        classes,
        claimed=prepared(1.0).guarantee(classes),
        change=None if mechanism in _NOISES else bounds,
        samples=samples,
        delta=delta,
        noise=EXACT if exact else None,
        seed=seed,
        progress=progress,
    )


def _named_mechanism(
    name: str, classes: int, noise: Any, bounds: ScoreBounds, budget: Budget, share: float
) -> Mechanism:
    """Return a mechanism with its budget for one answer, and with a share of the noise that this requires."""
    check_choice("mechanism", name, (*_NOISES, *(plug_ins := plugin_mechanisms())))
    if name in plug_ins:
        own = plug_ins[name]
        cost = _cost_with_share(per_query(budget, own.measure, own.analysis), share)
        return own.prepared(_StatedScores(classes, bounds), cost)
    if (name, noise) == ("noisy-max", "laplace"):
        noise = "exponential"
    if name == "gaussian":
        noise = "gaussian"
    check_choice("noise", noise, _NOISES[name])
    cost = per_query(budget, "gaussian" if noise == "gaussian" else "pure")
    made: Mechanism
    if name == "algorithm1":
        part, moved = budget_split(budget.epsilon, classes, noise), bounds.one.value
        made = Algorithm1(noise, part, part, moved, min(math.expm1(2 * moved), 1.0))
    elif name == "gaussian":
        made = GaussianScores(bounds=bounds, per_query=cost)
    else:
        kind = SampledNeuron if name == "sampled-neuron" else NoisyMax
        made = kind(noise, bounds=bounds, per_query=cost)
    return mechanism_with_share(made, share)


@dataclass(frozen=True)
class _StatedScores:
    """A model whose scores are its inputs, with stated bounds."""

    classes: int
    bounds: ScoreBounds

    def scores(self, features: NDArray[np.floating]) -> Floats:
        return np.asarray(features, dtype=np.float64)


# The worst pair of neighbours


def _largest_change(mechanism: Any, change: ScoreBounds | None) -> tuple[float, float]:
    """Return how far one record moves one score, and all scores in L2.

    Unless ``change`` is given it is what the claim assumes: certified bounds, or Algorithm 1's Delta z.
    """
    bounds = getattr(mechanism, "bounds", None) if change is None else change
    if bounds is not None:
        return float(bounds.one), float(bounds.vector)
    logit = getattr(mechanism, "logit_sensitivity", None)
    if logit is not None:
        return float(logit), math.inf
    raise InvalidInput(
        "The mechanism does not state how far one record moves the scores; `neighbours` or `change` is required."
    )


def _worst_case_neighbours(
    classes: int, change: tuple[float, float], claimed: float, *, seed: int = 0
) -> list[Neighbours]:
    """Build pairs of score vectors that differ as much as possible.

    Directions: one score up; one up and another down; one up and all others down; all but one up; random. Starting
    points: all scores equal, or two classes in front with the first of them 0, 1.5 or 3 units behind. A unit about
    halves the chances of a class at the claimed noise. Both vectors lie symmetrically about the starting point.
    """
    if classes < 2:
        raise InvalidInput(f"classes must be at least 2, got {classes}.")
    generator = np.random.default_rng((0xA0D17, seed))

    def _longest(direction: Floats) -> Floats:
        limit = min(change[0] / np.abs(direction).max(), change[1] / np.linalg.norm(direction))
        return np.asarray(direction * limit)

    first, others = np.eye(classes)[0], 1 - np.eye(classes)[0]
    directions = {"one up": first, "one up, another down": first - np.eye(classes)[1]}
    if classes > 2:
        directions["one up, all others down"] = first - others
        directions["one up, all others down a little"] = first - others / (classes - 1)
    directions["all but one up"] = -others
    pairs = []

    def _add(name: str, move: Floats, where: str, start: Floats) -> None:
        pairs.append(Neighbours(start - move / 2, start + move / 2, f"{name}; {where}"))

    for name, direction in directions.items():
        move = _longest(direction)
        unit = float(np.ptp(move)) / (min(claimed, 1.0) if claimed > 0 else 1.0)
        if classes > 2:
            _add(name, move, "all equal", np.zeros(classes))
        for behind in _BEHIND:
            start = np.full(classes, -_FAR_BEHIND * unit)
            start[:2] = -behind * unit, 0.0
            _add(name, move, f"two in front, the first {behind:g} units behind", start)
    for name, direction in (
        ("in a random direction", generator.normal(size=classes)),
        ("by random signs", generator.choice([-1.0, 1.0], classes) * generator.uniform(0.5, 1, classes)),
    ):
        move = _longest(direction)
        _add(name, move, "random start", generator.normal(size=classes) * np.ptp(move))
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
        rating = _rating(claim, confidence)
        draws = max(int(share * samples), _MIN_DRAWS_OF_PAIR)
        rated = []
        for done, pair in enumerate(left, 1):
            first, second = (_drawn_answers(mechanism, scores, noise) for scores in (pair.first, pair.second))
            rated.append(_find_event(_draw_pair(first, second, draws), rating)[1])
            if progress is not None:
                progress(done, len(left))
        left = [left[place] for place in np.argsort(-np.array(rated), kind="stable")[:kept]]
    return left[0]


def _drawn_answers(
    mechanism: Mechanism, scores: Floats, noise: NoiseSource, at_once: int = _ROWS_AT_ONCE
) -> Callable[[int], Answers]:
    """Return draws of the answers for the same scores, of one query or of several."""

    def _draw(times: int) -> Answers:
        parts = [
            mechanism.release(np.tile(scores, (min(at_once, times - start), 1)), noise)
            for start in range(0, times, at_once)
        ]
        released = [part.probabilities for part in parts if part.probabilities is not None]
        return Answers(
            np.concatenate([part.labels for part in parts]), np.concatenate(released) if released else None
        )

    return _draw

"""What an adversary computes from released answers: numbers in which two worlds may differ.

Nothing here knows any mechanism. From labels, probability vectors or plain numbers come: the label; single numbers;
differences and log-ratios of pairs; log-odds; the log-odds of the label; the best linear combination; and *atoms*,
values that come back exactly, draw after draw. Honest noise has no atoms; a relation that noise leaves untouched (as
in THEORY 2.1) is one.
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
from quietmax.accounting.guarantee import Guarantee
from quietmax.audit.bounds import CONFIDENCE, Counts, Parameter, approximate_lower_bounds, checked_confidence
from quietmax.audit.report import AuditReport, Claim
from quietmax.errors import InvalidInput
from quietmax.mechanisms.base import Answers

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

ATOM_WIDTH = 1e-6
"""Values that agree to this are the same value."""
KEPT_COLUMNS = 5
"""Pairs are formed among the columns that differ most; all columns enter the linear combination."""
_SMALLEST = 1e-300
_LINEAR_FLOOR = 1e-12
_CELLS_PER_LABEL = 16
_ATOM_SHARE = 0.005
_ATOMS_PER_COLUMN = 8


@dataclass(frozen=True, eq=False)
class Observed:
    """Draws of one release: labels (draws,) if there are any, numbers (draws, columns) if there are any.

    ``probabilities`` says that each row of numbers is a probability vector.
    """

    labels: Integers | None
    numbers: Floats | None
    probabilities: bool

    @classmethod
    def of(cls, released: Answers | NDArray[np.floating]) -> Observed:
        """Look at a mechanism's answers, or at an array of released numbers with one row per draw."""
        if isinstance(released, Answers):
            return cls(
                np.asarray(released.labels), released.probabilities, released.probabilities is not None
            )
        numbers = np.asarray(released, dtype=np.float64)
        numbers = numbers[:, None] if numbers.ndim == 1 else numbers.reshape(len(numbers), -1)
        if not numbers.shape[1] or not np.isfinite(numbers).all():
            raise InvalidInput(
                "Released numbers are missing, NaN or infinite, so nothing can be compared; check the release."
            )
        return cls(None, numbers, False)

    def __len__(self) -> int:
        return len(self.labels) if self.labels is not None else len(self._needed)

    def part(self, start: int, stop: int) -> Observed:
        """The draws from ``start`` to ``stop``."""
        chosen = slice(start, stop)
        return Observed(
            None if self.labels is None else self.labels[chosen],
            None if self.numbers is None else self.numbers[chosen],
            self.probabilities,
        )

    @property
    def _needed(self) -> Floats:
        if self.numbers is None:
            raise InvalidInput(
                "This release holds no numbers, only labels; audit a mechanism that releases numbers, or "
                "look at the labels."
            )
        return self.numbers

    @property
    def columns(self) -> int:
        """How many numbers a draw holds."""
        return 0 if self.numbers is None else self.numbers.shape[1]

    @cached_property
    def logs(self) -> Floats:
        """Logarithms of the probabilities, zero taken as 1e-300."""
        return np.asarray(np.log(np.maximum(self._needed, _SMALLEST)))

    def number(self, column: int) -> Floats:
        """One column."""
        return self._needed[:, column]

    def difference(self, one: int, other: int) -> Floats:
        """The difference of two columns."""
        return np.asarray(self._needed[:, one] - self._needed[:, other])

    def log_ratio(self, one: int, other: int) -> Floats:
        """``ln p_u - ln p_w``."""
        return np.asarray(self.logs[:, one] - self.logs[:, other])

    def log_odds(self, column: int) -> Floats:
        """``ln p_v - ln sum_{j != v} p_j``; the sum keeps its digits where ``1 - p_v`` would lose them."""
        others = np.delete(self._needed, column, axis=1).sum(1)
        return np.asarray(self.logs[:, column] - np.log(np.maximum(others, _SMALLEST)))

    def log_odds_if_label(self, column: int) -> Floats:
        """The log-odds of a class where it is the label, minus infinity elsewhere."""
        return np.where(self.labels == column, self.log_odds(column), -np.inf)


@dataclass(frozen=True, eq=False)
class Statistic:
    """One number per draw. ``ordered`` False: the values are names of cells whose order means nothing."""

    description: str
    of: Callable[[Observed], Floats]
    ordered: bool = True


def statistics_for(first: Observed, second: Observed) -> Iterator[Statistic]:
    """Every statistic to try, those with parameters fitted to these draws of the two worlds."""
    if first.labels is not None:
        yield Statistic("the label", lambda seen: np.asarray(seen.labels, dtype=np.float64), ordered=False)
    if not first.columns:
        return
    kept = _differing_columns(first, second)
    letter = "p" if first.probabilities else "x"
    for column in kept:
        yield Statistic(f"{letter}[{column}]", partial(Observed.number, column=column))
    for one, other in itertools.combinations(kept, 2):
        yield Statistic(
            f"{letter}[{one}] - {letter}[{other}]", partial(Observed.difference, one=one, other=other)
        )
        if first.probabilities:
            yield Statistic(f"ln p[{one}] - ln p[{other}]", partial(Observed.log_ratio, one=one, other=other))
    if first.probabilities and first.columns > 2:
        for column in kept:
            yield Statistic(f"log-odds of class {column}", partial(Observed.log_odds, column=column))
    if first.probabilities and first.labels is not None:
        for column in kept:
            yield Statistic(
                f"log-odds of class {column} when it is the label",
                partial(Observed.log_odds_if_label, column=column),
            )
        yield _label_cells(first, second)
    yield _linear(first, second, logs=False)
    if first.probabilities:
        yield _linear(first, second, logs=True)
    yield from _atoms(first, second, kept)


def _differing_columns(first: Observed, second: Observed) -> list[int]:
    """The columns whose values, relative to the row's median, differ most between the worlds."""
    if first.columns <= KEPT_COLUMNS:
        return list(range(first.columns))

    def centred(seen: Observed) -> Floats:
        values = seen.logs if seen.probabilities else seen._needed
        return np.asarray(values - np.median(values, axis=1, keepdims=True))

    one, other = centred(first), centred(second)
    distance = np.abs(one.mean(0) - other.mean(0)) / (one.std(0) + other.std(0) + 1e-12)
    middles = np.abs(np.median(one, 0) - np.median(other, 0)) / (one.std(0) + other.std(0) + 1e-12)
    score = distance + middles
    if first.labels is not None and second.labels is not None:
        counts = [np.bincount(labels, minlength=first.columns) for labels in (first.labels, second.labels)]
        score = score + np.abs(counts[0] - counts[1]) / np.sqrt(counts[0] + counts[1] + 1.0)
    return sorted(np.argsort(-score, kind="stable")[:KEPT_COLUMNS].tolist())


def _label_cells(first: Observed, second: Observed) -> Statistic:
    """The label together with the bin of its own log-odds: a cell number."""
    edges = []
    values = np.concatenate([_own_log_odds(first), _own_log_odds(second)])
    labels = np.concatenate([np.asarray(first.labels), np.asarray(second.labels)])
    for label in range(first.columns):
        own = np.sort(values[labels == label])
        places = np.linspace(0, len(own), _CELLS_PER_LABEL + 1)[1:-1].astype(np.int64)
        edges.append(own[places] if len(own) else np.zeros(_CELLS_PER_LABEL - 1))
    table = np.stack(edges)

    def cells(seen: Observed) -> Floats:
        within = (_own_log_odds(seen)[:, None] >= table[np.asarray(seen.labels)]).sum(1)
        return np.asarray(np.asarray(seen.labels) * _CELLS_PER_LABEL + within, dtype=np.float64)

    return Statistic("the label and the log-odds of it", cells, ordered=False)


def _own_log_odds(seen: Observed) -> Floats:
    rows, labels = np.arange(len(seen)), np.asarray(seen.labels)
    others = seen._needed.copy()
    others[rows, labels] = 0.0
    return np.asarray(seen.logs[rows, labels] - np.log(np.maximum(others.sum(1), _SMALLEST)))


def _linear(first: Observed, second: Observed, *, logs: bool) -> Statistic:
    """The linear combination that separates the worlds best (Fisher's discriminant)."""

    def values(seen: Observed) -> Floats:
        if not logs:
            return seen._needed
        floored = np.maximum(seen.logs, np.log(_LINEAR_FLOOR))
        return np.asarray(floored - floored.mean(1, keepdims=True))

    one, other = values(first), values(second)
    spread = np.atleast_2d(np.cov(one, rowvar=False) + np.cov(other, rowvar=False))
    ridge = 1e-9 * max(float(np.trace(spread)), 1e-300) * np.eye(len(spread))
    weights = np.linalg.lstsq(spread + ridge, other.mean(0) - one.mean(0), rcond=None)[0]
    what = "log-probabilities" if logs else "released numbers"
    return Statistic(f"a linear combination of the {what}", lambda seen: np.asarray(values(seen) @ weights))


def _atoms(first: Observed, second: Observed, kept: list[int]) -> Iterator[Statistic]:
    """The evidence of all values that come back exactly: ``sum of ln(frequency here / frequency there)``."""
    compare = Observed.log_ratio if first.probabilities else Observed.difference
    relations: list[Callable[[Observed], Floats]] = [
        *(partial(Observed.number, column=column) for column in kept),
        *(partial(compare, one=one, other=other) for one, other in itertools.combinations(kept, 2)),
    ]
    tables = []
    for relation in relations:
        keys, weights = _repeated(relation(first), relation(second))
        if len(keys):
            tables.append((relation, keys, weights))
    if not tables:
        return

    def evidence(seen: Observed) -> Floats:
        total = np.zeros(len(seen))
        for relation, keys, weights in tables:
            rounded = np.rint(relation(seen) / ATOM_WIDTH)
            place = np.minimum(np.searchsorted(keys, rounded), len(keys) - 1)
            total += np.where(keys[place] == rounded, weights[place], 0.0)
        return total

    what = "ln p[u] - ln p[w]" if first.probabilities else "x[u] - x[w]"
    yield Statistic(
        f"the evidence of values that repeat to {ATOM_WIDTH:g} ({what} or single values, in {len(tables)} relations)",
        evidence,
    )


def _repeated(first: Floats, second: Floats) -> tuple[Floats, Floats]:
    """Values that come back in either world, sorted, and ``ln(share in the second / share in the first)``."""
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


Rating = Callable[[NDArray[np.int64], NDArray[np.int64], int], Floats]
"""(times it happened where likely, where unlikely, draws per world) -> how much each of these events would prove."""

_BINS = 128
_TAIL = np.geomspace(1e-5, 1 / _BINS, 16)
_SHARES = np.concatenate([np.arange(1, _BINS) / _BINS, _TAIL, 1 - _TAIL])
"""Where a statistic's quantiles are taken as borders of bins: evenly, and finer in the tails."""


class Worlds(NamedTuple):
    """Equally many draws of the same release in two neighbouring worlds."""

    first: Observed
    second: Observed

    def part(self, start: int, stop: int) -> Worlds:
        """The draws from ``start`` to ``stop`` of both."""
        return Worlds(self.first.part(start, stop), self.second.part(start, stop))


@dataclass(frozen=True, eq=False)
class Event:
    """The statistic falls into one of the marked bins; ``likely_in`` is the world where it does so more often."""

    statistic: Statistic
    edges: Floats
    inside: NDArray[np.bool_]
    likely_in: Literal[0, 1]
    description: str

    def happens(self, seen: Observed) -> NDArray[np.bool_]:
        """Whether it happened, draw by draw."""
        return np.asarray(self.inside[_bins(self.statistic.of(seen), self.edges)])

    def counts(self, worlds: Worlds) -> Counts:
        """How often it happened in equally many draws of both worlds."""
        happened = [int(self.happens(seen).sum()) for seen in worlds]
        return Counts(happened[self.likely_in], happened[1 - self.likely_in], len(worlds.first))


def find_event(worlds: Worlds, rating: Rating) -> tuple[Event, float]:
    """The event of the highest rating, and that rating."""
    draws = len(worlds.first)
    learn, choose = worlds.part(0, draws // 2), worlds.part(draws // 2, draws)
    best: tuple[Event, float] | None = None
    for statistic in statistics_for(*learn):
        found = _best_of(statistic, learn, choose, rating)
        if best is None or found[1] > best[1]:
            best = found
    assert best is not None, "every release has a label or a number"
    return best


def _best_of(statistic: Statistic, learn: Worlds, choose: Worlds, rating: Rating) -> tuple[Event, float]:
    learned = [statistic.of(seen) for seen in learn]
    edges = _edges(np.concatenate(learned), statistic.ordered)
    size = len(edges) + 1
    known = [np.bincount(_bins(values, edges), minlength=size) for values in learned]
    chosen = [np.bincount(_bins(statistic.of(seen), edges), minlength=size) for seen in choose]
    ratio = np.log(known[1] + 0.5) - np.log(known[0] + 0.5)
    ascending = np.argsort(ratio, kind="stable")
    orders = [("ratio", ascending), ("ratio", ascending[::-1])]
    if statistic.ordered:
        orders += [("below", np.arange(size)), ("at least", np.arange(size)[::-1])]
    inside = np.zeros(size, dtype=np.bool_)
    if size == 1:
        return Event(statistic, edges, inside, 0, f"{statistic.description} is always the same"), -np.inf
    # Every event is a beginning of one of the orders; it may be likely in either world.
    first, second = (np.cumsum(counts[[order for _, order in orders]], 1)[:, :-1] for counts in chosen)
    rated = rating(np.stack([first, second]), np.stack([second, first]), len(choose.first))
    likely_in, which, taken = np.unravel_index(int(np.argmax(rated)), rated.shape)
    name, order = orders[which]
    inside[order[: taken + 1]] = True
    described = _described(statistic, edges, inside, name)
    return Event(statistic, edges, inside, 1 if likely_in else 0, described), float(rated.max())


def _described(statistic: Statistic, edges: Floats, inside: NDArray[np.bool_], order: str) -> str:
    count = int(inside.sum())
    if order == "below":
        return f"{statistic.description} < {edges[count - 1]:.6g}"
    if order == "at least":
        return f"{statistic.description} >= {edges[len(inside) - count - 1]:.6g}"
    if not statistic.ordered and len(inside) <= 32:
        named = np.concatenate([[edges[0] - 1], edges])[inside] + 0.5
        return f"{statistic.description} is {', '.join(f'{name:g}' for name in named)}"
    return f"{statistic.description} lies in {count} of {len(inside)} bins ordered by likelihood ratio"


def _edges(values: Floats, ordered: bool) -> Floats:
    """Inner borders of the bins: quantiles, finer in the tails; or half-way between cell numbers."""
    if not ordered:
        return np.asarray(np.arange(values.min(), values.max()) + 0.5)
    ranked = np.sort(values)
    edges: Floats = np.unique(ranked[(_SHARES * len(ranked)).astype(np.int64)])
    # A border at the smallest value would leave the bin below it empty.
    return np.asarray(edges[edges > ranked[0]])


def _bins(values: Floats, edges: Floats) -> NDArray[np.int64]:
    return np.asarray(np.searchsorted(edges, values, side="right"))


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

"""Find the event that tells two worlds apart best: a set of values of one statistic.

The draws for the search are divided: bins and fitted statistics come from one part, the choice among events from the
other, so that an event is not preferred for fitting noise. What is found is only a *candidate*: its probabilities are
bounded later on draws it has never seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quietmax.audit.intervals import Counts
from quietmax.audit.statistics import Floats, Observed, Statistic, statistics_for

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

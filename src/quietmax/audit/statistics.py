"""What an adversary computes from released answers: numbers in which two worlds may differ.

Nothing here knows any mechanism. From labels, probability vectors or plain numbers come: the label; single numbers;
differences and log-ratios of pairs; log-odds; the log-odds of the label; the best linear combination; and *atoms*,
values that come back exactly, draw after draw. Honest noise has no atoms; a relation that noise leaves untouched (as
in THEORY 2.1) is one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from quietmax.errors import InvalidInput
from quietmax.mechanisms import Answers

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

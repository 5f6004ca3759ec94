"""Many queries: what a total epsilon leaves for each answer, in both readings of the paper, and what that costs.

The paper reads the accuracy loss for k queries off its single-query curves at the epsilon of one answer. Its
composition theorem gives ``eps/sqrt(k)`` for Gaussian noise (`published`), its worked example divides by k
(`published-example`); see `quietmax.accounting.budget`. DP-SGD and the private head answer any number of queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from quietmax.accounting import Budget, PureCost, Reading, per_query
from quietmax.experiments.summary import Summary

QUERIES = (1, 10, 100, 1_000, 10_000)
TOTALS = (1.0, 10.0)
_READINGS: tuple[tuple[str, Reading], ...] = (
    ("algorithm1-gaussian", "published"),
    ("algorithm1-gaussian", "published-example"),
    ("algorithm1-laplace", "published"),
)
_UNLIMITED = ("published-rdp", "dpsgd", "head")


@dataclass(frozen=True)
class ManyQueries:
    """Accuracy loss and leakage per answer when ``total`` pays for ``queries`` answers."""

    dataset: str
    method: str
    reading: str
    total: float
    queries: int
    per_answer: float | None
    accuracy_loss: float
    leakage: float | None
    extrapolated: bool

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


def multi_query(
    summaries: Sequence[Summary],
    *,
    totals: Sequence[float] = TOTALS,
    queries: Sequence[int] = QUERIES,
    attack: str = "shadow",
) -> list[ManyQueries]:
    """The analysis for every data set whose curves were measured.

    Between measured epsilons curves are read linearly in log epsilon; below the smallest the value there is taken, as
    the paper argues, and ``extrapolated`` says so.
    """
    rows = []
    for name in dict.fromkeys(each.dataset for each in summaries):
        mine = [each for each in summaries if each.dataset == name]
        for total in totals:
            for method, reading in _READINGS:
                curve = [each for each in mine if each.method == method and each.queries == 1]
                for count in queries if curve else ():
                    currency = "pure" if method.endswith("laplace") else "gaussian"
                    cost = per_query(Budget(total, queries=count), currency, reading)  # type: ignore[arg-type]
                    one = cost.epsilon if isinstance(cost, PureCost) else cost.mu
                    rows.append(_row(name, method, reading, total, count, one, curve, attack))
            for method in _UNLIMITED:
                curve = [each for each in mine if each.method == method]
                if curve and any(each.epsilon == total for each in curve):
                    rows += [
                        _row(name, method, "any number", total, count, None, curve, attack)
                        for count in queries
                    ]
    return rows


def _row(
    name: str,
    method: str,
    reading: str,
    total: float,
    count: int,
    one: float | None,
    curve: Sequence[Summary],
    attack: str,
) -> ManyQueries:
    where = total if one is None else one
    points = sorted((each.epsilon, each) for each in curve if each.epsilon is not None)
    epsilons = [epsilon for epsilon, _ in points]
    loss = read_off(where, epsilons, [each.accuracy_loss.value for _, each in points])
    leakage = None
    if all(attack in each.leakage for _, each in points):
        leakage = read_off(where, epsilons, [each.leakage[attack].value for _, each in points])
    return ManyQueries(name, method, reading, total, count, one, loss, leakage, where < epsilons[0])


def read_off(epsilon: float, epsilons: Sequence[float], values: Sequence[float]) -> float:
    """A curve's value, linear in log epsilon, constant beyond its ends.

    >>> read_off(10.0, [1.0, 100.0], [0.5, 0.1])
    0.3
    """
    return float(np.interp(np.log(epsilon), np.log(epsilons), values))

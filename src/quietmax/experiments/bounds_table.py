"""The paper's Table 1 with numbers: the upper bounds on the L2 sensitivity of the weights, side by side.

The bounds follow from the shape of a network. What they are compared with takes training: how far retraining without
one record moved the weights, and the measurements that decide about the conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quietmax.data.records import split
from quietmax.data.registry import dataset
from quietmax.experiments.grid import DataSource
from quietmax.experiments.inputs import source_records
from quietmax.experiments.paper import sensitivity_table
from quietmax.experiments.stored import stored_table
from quietmax.models.losses import Convexified
from quietmax.models.stacked import TrainingSettings
from quietmax.models.training import train
from quietmax.sensitivity.network import (
    CONDITIONS,
    EmpiricalSensitivity,
    MeasuredFacts,
    UpperBound,
    empirical_sensitivity,
    measured_facts,
    upper_bounds_for,
)

STORED = "bounds.csv"
TITLES = ("Chaudhuri binary", "Chaudhuri", "Wu decreasing", "Wu constant", "this paper")
"""Short names of the five bounds, in the paper's order."""

_QUERIES = 500
_REMOVALS = {"location": 12, "adult": 12}
_REMOVALS_OTHERWISE = 6


@dataclass(frozen=True)
class Observed:
    """What was measured on one data set with the paper's network."""

    dataset: str  # Name of the data set
    records: int  # Training records, and how many of them were removed, one at a time
    removals: int
    weights_l2: float  # How far all weights moved at most; by removing a record as it is in the data
    ordinary_l2: float
    weight: float  # The largest move of one weight and of one logit
    logit: float
    kind: str  # Which kind of record moved the weights furthest: ordinary, mislabelled or extreme
    norm: float  # The fields of `MeasuredFacts`
    loss: float
    loss_at_mean: float
    gradient: float
    objective_gradient: float

    @property
    def facts(self) -> MeasuredFacts:
        """The measurements that decide about conditions."""
        return MeasuredFacts(self.norm, self.loss, self.loss_at_mean, self.gradient, self.objective_gradient)


@dataclass(frozen=True)
class BoundsRow:
    """The five bounds of one data set beside what was observed."""

    dataset: str  # Name of the data set
    bounds: tuple[UpperBound, ...]  # The rows of Table 1 in the paper's order
    observed: Observed | None  # None if nothing was measured on this data set

    @property
    def verdict(self) -> str:
        """Whether retraining exceeded the paper's bound."""
        if self.observed is None:
            return "not measured"
        return "exceeded" if self.observed.weights_l2 > self.bounds[-1].value else "not exceeded"

    def flat(self) -> dict[str, object]:
        """Return one value per bound, and the observations, for a CSV file."""
        seen = self.observed
        return {
            "dataset": self.dataset,
            **{title: bound.value for title, bound in zip(TITLES, self.bounds, strict=True)},
            "observed": None if seen is None else seen.weights_l2,
            "observed_ordinary": None if seen is None else seen.ordinary_l2,
            "removals": None if seen is None else seen.removals,
            "verdict": self.verdict,
        }

    def to_json(self) -> dict[str, Any]:
        """Return the bounds with their conditions, the observations and the verdict."""
        return {
            "dataset": self.dataset,
            "bounds": [bound.to_json() for bound in self.bounds],
            "observed": None if self.observed is None else vars(self.observed),
            "verdict": self.verdict,
        }


def bounds_table(names: Sequence[str] | None = None, observed: Sequence[Observed] = ()) -> list[BoundsRow]:
    """Compute Table 1 for data sets."""
    measured = {each.dataset: each for each in observed}
    rows = []
    for name in names or sensitivity_table():
        shape, found = dataset(name), measured.get(name)
        bounds = upper_bounds_for(
            shape.features,
            shape.classes,
            shape.records,
            settings=_settings(name),
            facts=None if found is None else found.facts,
        )
        rows.append(BoundsRow(name, bounds, found))
    return rows


@dataclass(frozen=True)
class ConditionSummary:
    """On which data sets a condition holds, does not hold or was not checked."""

    condition: str  # The condition
    needed_by: tuple[str, ...]  # Short names of the bounds that need it
    holds: bool | None  # The verdict; None for "not checked"
    datasets: tuple[str, ...]  # The data sets with that verdict
    because: str  # The reason on the first of them


def condition_summaries(rows: Sequence[BoundsRow]) -> list[ConditionSummary]:
    """Summarise the conditions of all bounds over the data sets."""
    needed: dict[str, dict[str, None]] = {}
    found: dict[tuple[str, bool | None], dict[str, str]] = {}
    for row in rows:
        for title, bound in zip(TITLES, row.bounds, strict=True):
            for condition in bound.conditions:
                needed.setdefault(condition.name, {})[title] = None
                found.setdefault((condition.name, condition.holds), {})[row.dataset] = condition.because
    return [
        ConditionSummary(name, tuple(needed[name]), holds, tuple(whose), next(iter(whose.values())))
        for name in CONDITIONS
        for (condition, holds), whose in found.items()
        if condition == name
    ]


def stored_observations() -> list[Observed]:
    """Return the measurements that are shipped with the package."""
    return stored_table(Observed, STORED)


def observe(
    name: str,
    *,
    removals: int | None = None,
    data_dir: Path | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Observed:
    """Train the paper's network with all records and without each of a few, and compare."""
    data = split(source_records(DataSource.of(name), data_dir), size=dataset(name).records, seed=seed)
    settings = _settings(name)
    count = _REMOVALS.get(name, _REMOVALS_OTHERWISE) if removals is None else removals
    found = empirical_sensitivity(
        data.train,
        removals=count,
        queries=data.test.features[:_QUERIES],
        settings=settings,
        seed=seed,
        progress=progress,
    )
    facts = measured_facts(train(data, settings=settings), data.train)
    return Observed(
        name,
        len(data.train),
        count,
        found.weights_l2.value,
        _largest_ordinary(found),
        found.weight.value,
        found.logit.value,
        max(found.removals, key=lambda removal: removal.weights_l2).kind,
        facts.norm,
        facts.loss,
        facts.loss_at_mean,
        facts.gradient,
        facts.objective_gradient,
    )


def _largest_ordinary(found: EmpiricalSensitivity) -> float:
    """The largest move of the weights by removing an unchanged record; 0 if none was removed."""
    return max((each.weights_l2 for each in found.removals if each.kind == "ordinary"), default=0.0)


def _settings(name: str) -> TrainingSettings:
    """The paper's settings with the data set's alpha."""
    return TrainingSettings(loss=Convexified(dataset(name).alpha))

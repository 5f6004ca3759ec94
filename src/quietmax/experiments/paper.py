"""The paper's own numbers, and what follows from them without training: sensitivities, correlations and bounds.

The paper: Lu, Asghar, Kaafar, Webb, Dickinson, "A Differentially Private Framework for Deep Learning with Convexified
Loss Functions". Its tables and the curves of its figures are shipped as CSV files; the curves were read off the vector
plots of the authors' preprint.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from scipy import stats

from quietmax.data.registry import dataset
from quietmax.errors import InvalidInput
from quietmax.models.stacked import Convexified, TrainingSettings
from quietmax.sensitivity.network import (
    CONDITIONS,
    MeasuredFacts,
    UpperBound,
    published_sensitivity_for,
    upper_bounds_for,
)

FOLDER = Path(__file__).parent / "paper"
"""The CSV files of the paper's numbers and of our own stored measurements."""

EPSILONS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 50.0, 100.0, 500.0, 1000.0)
"""The values of epsilon in the paper's figures."""

_PRINTED_DIGITS = 4
"""Digits after the decimal point in the paper's tables."""

_SENSITIVITIES = {
    "rho": "rho",
    "weight": "delta_weight",
    "logit": "delta_logit",
    "probability": "delta_probability",
    "probability_untruncated": "delta_probability_untruncated",
    "oaro": "oaro_stability",
}
"""Our name of each sensitivity -> its column in the paper's tables."""

MISPRINTS = {
    ("purchase-2", "logit"): "residue: the paper prints 0.2000, its formula gives 0.1997",
    ("purchase-2", "probability"): "follows from the residue in logit",
    ("purchase-2", "probability_untruncated"): "follows from the residue in logit",
    ("purchase-20", "oaro"): "residue: the paper prints 1.6750, its formula gives 1.6753",
}
"""Printed numbers that do not follow from the paper's own formulas (THEORY section 1)."""

CORRELATED = {
    "oaro_vs_gap": ("oaro_stability", "convexified_gap"),
    "oaro_vs_leakage": ("oaro_stability", "privacy_leakage"),
    "leakage_vs_gap": ("privacy_leakage", "convexified_gap"),
}
"""Pairs of columns of the accuracy table that the paper correlates."""
_MOST_PERMUTED = 8
_ACCEPTABLE_TEST_ACCURACY = 0.5
"""The paper correlates only the models whose test accuracy it calls acceptable."""


class Row:
    """A frozen dataclass with a JSON form: its fields, and the properties that ``derived`` names."""

    derived: ClassVar[tuple[str, ...]] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the fields and the derived values."""
        stated: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return stated | {name: getattr(self, name) for name in self.derived}


@dataclass(frozen=True)
class Comparison(Row):
    """One number of the paper and ours."""

    dataset: str  # The data set; for correlations the pair of quantities
    quantity: str  # What was measured or computed
    paper: float  # The paper's number
    ours: float  # Our number
    agrees: bool  # Whether the two agree within the stated tolerance
    note: str = ""  # Explanation of a known difference
    spread: float | None = None  # Standard deviation over our repeats

    derived = ("difference",)

    @property
    def difference(self) -> float:
        """Ours minus the paper's."""
        return self.ours - self.paper


def _sensitivity_table() -> dict[str, dict[str, float]]:
    """Return the paper's table of sensitivities."""
    return _numbers("table_sensitivity.csv")


def accuracy_table() -> dict[str, dict[str, float]]:
    """Return the paper's table of accuracies."""
    return _numbers("table_accuracy.csv")


def _correlation_table() -> dict[str, dict[str, float]]:
    """Return the paper's correlations."""
    return _numbers("correlations.csv")


def curve(dataset: str, metric: str, series: str) -> dict[float, float]:
    """Return one curve of the paper's figures."""
    wanted = (dataset, metric, series)
    return {
        float(row["epsilon"]): float(row["value"])
        for row in _rows("curves.csv")
        if (row["dataset"], row["metric"], row["series"]) == wanted
    }


@cache
def _rows(file: str) -> tuple[dict[str, str], ...]:
    return tuple(csv.DictReader((FOLDER / file).read_text(encoding="utf-8").splitlines()))


def _numbers(file: str) -> dict[str, dict[str, float]]:
    tables = {}
    for row in _rows(file):
        (_, name), *values = row.items()
        tables[name] = {key: float(value) for key, value in values}
    return tables


def reproduce_sensitivity_table(names: Iterable[str] | None = None) -> list[Comparison]:
    """Compare every sensitivity of the paper's tables with what the formulas give.

    Two numbers agree if they are equal to the printed digits.
    """
    printed = _sensitivity_table()
    rows = []
    for name in names or printed:
        if name not in printed:
            raise InvalidInput(f"The paper has no row for {name!r}. It has {', '.join(printed)}.")
        shape = dataset(name)
        ours = published_sensitivity_for(shape.features, [128], shape.classes, shape.records).to_json()
        ours["probability_untruncated"] = math.expm1(2 * round(ours["logit"], _PRINTED_DIGITS))
        ours["probability"] = min(ours["probability_untruncated"], 1.0)
        paper = printed[name] | accuracy_table()[name]
        for quantity, column in _SENSITIVITIES.items():
            agrees = round(ours[quantity], _PRINTED_DIGITS) == paper[column]
            note = "" if agrees else MISPRINTS.get((name, quantity), "")
            rows.append(Comparison(name, quantity, paper[column], ours[quantity], agrees, note))
    return rows


def correlate(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """Return the Pearson, Spearman and Kendall coefficients of two series, and their two-sided p-values."""
    if len(first) != len(second) or len(first) < 3:
        raise InvalidInput(
            f"A correlation needs two series of the same length, at least 3; got {len(first)} and {len(second)} values."
        )
    found: dict[str, float] = {}
    tests = {"pearson": stats.pearsonr, "spearman": stats.spearmanr, "kendall": stats.kendalltau}
    for name, test in tests.items():
        result = test(first, second)
        found |= {name: float(result.statistic), f"{name}_p": float(result.pvalue)}
    return found


def _spearman_p(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the two-sided p-value of Spearman's coefficient, exact for up to eight pairs.

    The usual approximation gives 0 for a perfect order, however few pairs there are.
    """
    if len(first) > _MOST_PERMUTED:
        return correlate(first, second)["spearman_p"]
    ranks, others = stats.rankdata(first), stats.rankdata(second)
    found = abs(np.dot(ranks - ranks.mean(), others - others.mean()))
    orders = list(permutations(others - others.mean()))
    as_extreme = sum(abs(np.dot(ranks - ranks.mean(), order)) >= found - 1e-9 for order in orders)
    return float(as_extreme) / len(orders)


def reproduce_correlations() -> list[Comparison]:
    """Compare the paper's correlations with those computed from its own accuracy table."""
    models = [
        row for row in accuracy_table().values() if row["convexified_test_acc"] > _ACCEPTABLE_TEST_ACCURACY
    ]
    rows = []
    for pair, computed in _correlate_models(models).items():
        printed = _correlation_table()[pair]
        for quantity, ours in computed.items():
            agrees = round(ours, _PRINTED_DIGITS) == printed[quantity]
            rows.append(Comparison(pair, quantity, printed[quantity], ours, agrees))
    return rows


def _correlate_models(models: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Correlate OARO stability, accuracy gap and leakage over some models."""
    return {
        pair: correlate([model[first] for model in models], [model[second] for model in models])
        for pair, (first, second) in CORRELATED.items()
    }


# --- the upper bounds of Table 1 ----------------------------------------------------------------------------------

BOUND_TITLES = ("Chaudhuri binary", "Chaudhuri", "Wu decreasing", "Wu constant", "this paper")
"""Short names of the five bounds, in the paper's order."""


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

    def flat(self) -> dict[str, Any]:
        """Return one value per bound, and the observations, for a CSV file."""
        seen = self.observed
        return {
            "dataset": self.dataset,
            **{title: bound.value for title, bound in zip(BOUND_TITLES, self.bounds, strict=True)},
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
            "observed": None if self.observed is None else asdict(self.observed),
            "verdict": self.verdict,
        }


def bounds_table(names: Sequence[str] | None = None, observed: Sequence[Observed] = ()) -> list[BoundsRow]:
    """Compute Table 1 for data sets, from the shape of the paper's network and what was measured."""
    measured = {each.dataset: each for each in observed}
    rows = []
    for name in names or _sensitivity_table():
        shape, seen = dataset(name), measured.get(name)
        facts = None if seen is None else MeasuredFacts(*astuple(seen)[-len(fields(MeasuredFacts)) :])
        bounds = upper_bounds_for(
            shape.features, shape.classes, shape.records, settings=_settings(name), facts=facts
        )
        rows.append(BoundsRow(name, bounds, seen))
    return rows


def _settings(name: str) -> TrainingSettings:
    """The paper's settings with the data set's alpha."""
    return TrainingSettings(loss=Convexified(dataset(name).alpha))


def _condition_lines(rows: Sequence[BoundsRow]) -> list[tuple[str, str, str, str]]:
    """For each condition and verdict: the bounds that need it, the data sets, and the reason on the first of them."""
    needed: dict[str, dict[str, None]] = {}
    found: dict[tuple[str, bool | None], dict[str, str]] = {}
    for row in rows:
        for title, bound in zip(BOUND_TITLES, row.bounds, strict=True):
            for condition in bound.conditions:
                needed.setdefault(condition.name, {})[title] = None
                found.setdefault((condition.name, condition.holds), {})[row.dataset] = condition.because
    verdicts = {True: "holds", False: "does not hold", None: "not decided"}
    return [
        (
            name,
            "all" if len(needed[name]) == len(BOUND_TITLES) else ", ".join(needed[name]),
            f"{verdicts[holds]}: {'all' if len(reasons) == len(rows) else ', '.join(reasons)}",
            next(iter(reasons.values())),
        )
        for name in CONDITIONS
        for (condition, holds), reasons in found.items()
        if condition == name
    ]

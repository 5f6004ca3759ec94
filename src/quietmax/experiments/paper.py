"""The paper's own numbers, and what follows from them without training: sensitivities and correlations.

The paper: Lu, Asghar, Kaafar, Webb, Dickinson, "A Differentially Private Framework for Deep Learning with Convexified
Loss Functions". Its tables and the curves of its figures are shipped as CSV files; the curves were read off the vector
plots of the authors' preprint.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from scipy import stats

from quietmax.data.registry import dataset
from quietmax.errors import InvalidInput
from quietmax.sensitivity.network import published_sensitivity_for

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
        fields: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return fields | {name: getattr(self, name) for name in self.derived}


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


def sensitivity_table() -> dict[str, dict[str, float]]:
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
    printed = sensitivity_table()
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

"""The paper's own numbers: its tables, and the curves of its figures, shipped as CSV.

Source: Lu, Asghar, Kaafar, Webb, Dickinson, "A Differentially Private Framework for Deep Learning with
Convexified Loss Functions"; the curves were read off the vector plots of the authors' preprint.
"""

from __future__ import annotations

import csv
from functools import cache
from importlib import resources

Row = dict[str, str]


@cache
def _rows(file: str) -> tuple[Row, ...]:
    text = resources.files("quietmax.experiments").joinpath("paper", file).read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))


def sensitivity_table() -> dict[str, dict[str, float]]:
    """Data set -> records, features, classes, shadow_models, alpha, rho, delta_weight, ...

    >>> sensitivity_table()["mnist"]["delta_logit"]
    0.3577
    """
    return _numbers("table_sensitivity.csv")


def accuracy_table() -> dict[str, dict[str, float]]:
    """Data set -> accuracies and gaps with both losses, privacy leakage, OARO stability.

    >>> accuracy_table()["location"]["convexified_test_acc"]
    0.6484
    """
    return _numbers("table_accuracy.csv")


def correlations() -> dict[str, dict[str, float]]:
    """Pair of quantities -> Pearson, Spearman and Kendall coefficients with their p-values."""
    return _numbers("correlations.csv")


def curve(dataset: str, metric: str, series: str) -> dict[float, float]:
    """One curve of the paper's figures: epsilon -> value.

    ``metric`` is acc_loss or priv_leak; ``series`` alg1_gauss, alg1_lap, rdp, zcdp, ac or nc, and for the leakage
    also nonprivate and published_bound.

    >>> curve("location", "acc_loss", "alg1_gauss")[1.0]
    0.4566
    """
    wanted = (dataset, metric, series)
    return {
        float(row["epsilon"]): float(row["value"])
        for row in _rows("curves.csv")
        if (row["dataset"], row["metric"], row["series"]) == wanted
    }


def _numbers(file: str) -> dict[str, dict[str, float]]:
    tables = {}
    for row in _rows(file):
        (_, name), *values = row.items()
        tables[name] = {key: float(value) for key, value in values}
    return tables

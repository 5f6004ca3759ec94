"""Correlations between OARO stability, accuracy gap and privacy leakage over data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from scipy import stats

from quietmax.errors import InvalidInput
from quietmax.experiments import reference
from quietmax.experiments.comparison import Comparison

PRINTED_DIGITS = 4
PAIRS = {
    "oaro_vs_gap": ("oaro_stability", "convexified_gap"),
    "oaro_vs_leakage": ("oaro_stability", "privacy_leakage"),
    "leakage_vs_gap": ("privacy_leakage", "convexified_gap"),
}
# The paper correlates only the models whose test accuracy is "acceptable", above one half.
ACCEPTABLE_TEST_ACCURACY = 0.5


@dataclass(frozen=True)
class Correlation:
    """Coefficients and two-sided p-values of one pair of quantities."""

    pearson: float
    pearson_p: float
    spearman: float
    spearman_p: float
    kendall: float
    kendall_p: float


def correlate(first: Sequence[float], second: Sequence[float]) -> Correlation:
    """Pearson, Spearman and Kendall coefficients of two equally long series.

    >>> correlate([1, 2, 3, 4], [2, 3, 5, 9]).kendall
    1.0
    """
    if len(first) != len(second) or len(first) < 3:
        raise InvalidInput(
            f"A correlation needs two series of equal length of at least 3, not {len(first)} and {len(second)} values; "
            "give such series."
        )
    values = []
    for test in (stats.pearsonr, stats.spearmanr, stats.kendalltau):
        result = test(first, second)
        values += [float(result.statistic), float(result.pvalue)]
    return Correlation(*values)


def correlate_table(table: Mapping[str, Mapping[str, float]]) -> dict[str, Correlation]:
    """The paper's three pairs over the rows of an accuracy table with acceptable test accuracy."""
    rows = [row for row in table.values() if row["convexified_test_acc"] > ACCEPTABLE_TEST_ACCURACY]
    return {
        pair: correlate([row[first] for row in rows], [row[second] for row in rows])
        for pair, (first, second) in PAIRS.items()
    }


def reproduce_correlations() -> list[Comparison]:
    """The paper's coefficients beside those computed from its own accuracy table."""
    computed = correlate_table(reference.accuracy_table())
    rows = []
    for pair, printed in reference.correlations().items():
        for quantity, ours in asdict(computed[pair]).items():
            agrees = round(ours, PRINTED_DIGITS) == printed[quantity]
            rows.append(Comparison(pair, quantity, printed[quantity], ours, agrees))
    return rows

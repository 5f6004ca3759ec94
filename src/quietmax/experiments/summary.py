"""Summaries: the mean over the repeats of a trial, with the paper's number where it has one."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from scipy import stats

from quietmax.errors import counted
from quietmax.experiments import paper
from quietmax.experiments.grid import Trial
from quietmax.experiments.methods import methods
from quietmax.experiments.results import Result

CONFIDENCE = 0.95
"""Confidence level of the intervals of means."""
NORMAL_QUANTILE = float(stats.norm.ppf(0.5 + CONFIDENCE / 2))

PAPER_SERIES = {
    "algorithm1-gaussian": "alg1_gauss",
    "algorithm1-laplace": "alg1_lap",
    "published-rdp": "rdp",
    "published-zcdp": "zcdp",
    "published-ac": "ac",
    "published-nc": "nc",
}
"""Method -> series of the paper's figures."""

STATUS_WORDS = {
    "none": "no guarantee",
    "refuted": "no guarantee",
    "conditional": "guarantee conditional",
    "proven": "proven",
}


@dataclass(frozen=True)
class Mean:
    """Mean over the repeats, with an interval that contains the expected value with probability 95%."""

    value: float  # The mean
    spread: float | None = None  # Standard deviation, if there are several repeats
    low: float | None = None  # The interval
    high: float | None = None

    @classmethod
    def of(cls, values: Sequence[float], single: tuple[float, float] | None = None) -> Mean:
        """Return the mean of some numbers."""
        value = float(np.mean(values))
        if len(values) == 1:
            return cls(value, None, *(single or (None, None)))
        spread = float(np.std(values, ddof=1))
        half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(values) - 1)) * spread / math.sqrt(len(values))
        return cls(value, spread, value - half, value + half)


@dataclass(frozen=True)
class Summary:
    """One method at one epsilon on one data set."""

    dataset: str  # Name of the data set or table
    method: str  # Name of the method
    epsilon: float | None  # None for methods without privacy
    queries: int | None  # Number of answers that epsilon pays for; None for any number
    repeats: int  # Number of repeats
    classes: int  # Classes and training records
    records: int
    status: str  # Status of the guarantee: "none", "refuted", "conditional" or "proven"
    train_accuracy: Mean
    test_accuracy: Mean
    accuracy_loss: Mean
    leakage: Mapping[str, Mean]  # TPR - FPR and area under the ROC curve of each attack
    auc: Mapping[str, Mean]
    delta: float | None  # The claimed delta
    audited_epsilon: float | None  # Largest lower bound on epsilon that the audits found
    audited: str  # What was audited
    audited_claim: float | None  # The claim against which a mechanism was audited
    fit_seconds: float  # Median time of training, and of one answer
    answer_seconds: float
    paper_accuracy_loss: float | None = None  # The paper's numbers
    paper_leakage: float | None = None
    attacks: tuple[str, ...] = ()  # Names of the attacks

    @property
    def title(self) -> str:
        """The method's title, the number of answers, and the status of a guarantee that is not proven."""
        known = methods().get(self.method)
        words = self.method if known is None else known.title
        if self.queries is not None and (known is None or known.axis == "like-for-like" or self.queries > 1):
            words += f", {counted(self.queries, 'answer')}"
        return words if self.status == "proven" else f"{words} ({STATUS_WORDS[self.status]})"

    def flat(self) -> dict[str, Any]:
        """Return one row of a table, with columns of its own for each attack."""
        row: dict[str, Any] = {}
        for name, value in asdict(self).items():
            if name in ("leakage", "auc"):
                for attack, mean in value.items():
                    row |= _flat_mean(f"{name}_{attack}", mean)
            elif isinstance(value, dict):
                row |= _flat_mean(name, value)
            elif name != "attacks":
                row[name] = value
        return row


def _flat_mean(name: str, mean: Mapping[str, float | None]) -> dict[str, float | None]:
    ends = {f"{name}_{part}": mean[part] for part in ("spread", "low", "high")}
    return {name: mean["value"], **ends}


def summarize(results: Mapping[Trial, Result]) -> list[Summary]:
    """Average the results over the repeats."""
    repeats: dict[tuple[str, str, float | None, int | None], list[Result]] = {}
    for trial, result in results.items():
        key = (trial.group.source.title, trial.method, trial.epsilon, trial.queries)
        repeats.setdefault(key, []).append(result)
    return [_summary(*key, found) for key, found in repeats.items()]


def _summary(
    dataset: str, method: str, epsilon: float | None, queries: int | None, repeats: Sequence[Result]
) -> Summary:
    first = repeats[0]
    # One repeat: the binomial error of as many test records as training records.
    error = NORMAL_QUANTILE * math.sqrt(
        first["test_accuracy"] * (1 - first["test_accuracy"]) / first["records"]
    )
    train_error = NORMAL_QUANTILE * math.sqrt(
        first["train_accuracy"] * (1 - first["train_accuracy"]) / first["records"]
    )

    def mean(field: str, error: float) -> Mean:
        return Mean.of([result[field] for result in repeats], (first[field] - error, first[field] + error))

    def attack_means(figure: str) -> dict[str, Mean]:
        means = {}
        for attack, figures in first["attacks"].items():
            values = [result["attacks"][attack][figure]["value"] for result in repeats]
            means[attack] = Mean.of(values, (figures[figure]["low"], figures[figure]["high"]))
        return means

    audits = [result for result in repeats if result["audited_epsilon"] is not None]
    best: Result = max(audits, key=lambda result: result["audited_epsilon"], default={})
    return Summary(
        dataset=dataset,
        method=method,
        epsilon=epsilon,
        queries=queries,
        repeats=len(repeats),
        classes=first["classes"],
        records=first["records"],
        status=first["status"],
        train_accuracy=mean("train_accuracy", train_error),
        test_accuracy=mean("test_accuracy", error),
        accuracy_loss=mean("accuracy_loss", error / first["baseline_accuracy"]),
        leakage=attack_means("leakage"),
        auc=attack_means("auc"),
        delta=first["claimed_delta"],
        audited_epsilon=best.get("audited_epsilon"),
        audited=best.get("audited", ""),
        audited_claim=best.get("audited_claim"),
        fit_seconds=float(np.median([result["fit_seconds"] for result in repeats])),
        answer_seconds=float(np.median([result["answer_seconds"] for result in repeats])),
        paper_accuracy_loss=_paper_number(dataset, "acc_loss", method, epsilon),
        paper_leakage=_paper_number(dataset, "priv_leak", method, epsilon),
        attacks=tuple(first["attacks"]),
    )


def _paper_number(dataset: str, metric: str, method: str, epsilon: float | None) -> float | None:
    if method == "plain" and metric == "priv_leak":
        return paper.accuracy_table().get(dataset, {}).get("privacy_leakage")
    series = PAPER_SERIES.get(method)
    if series is None or epsilon is None:
        return None
    return paper.curve(dataset, metric, series).get(epsilon)


def write_tables(summaries: Sequence[Summary], folder: Path) -> list[Path]:
    """Write ``results.csv`` and ``results.parquet``, one row per summary."""

    rows = [each.flat() for each in summaries]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    folder.mkdir(parents=True, exist_ok=True)
    text, table = folder / "results.csv", folder / "results.parquet"
    with text.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows({name: _short(value) for name, value in row.items()} for row in rows)
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{name: row.get(name) for name in columns} for row in rows]), table
    )
    return [text, table]


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value

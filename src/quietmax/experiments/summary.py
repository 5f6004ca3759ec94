"""Summaries: the repeats of a cell averaged, the paper's number beside ours where it has one."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quietmax.experiments import paper as reference
from quietmax.experiments.grid import Trial
from quietmax.experiments.methods import method, methods
from quietmax.experiments.paper import Comparison
from quietmax.experiments.results import Result

PAPER_SERIES = {
    "algorithm1-gaussian": "alg1_gauss",
    "algorithm1-laplace": "alg1_lap",
    "published-rdp": "rdp",
    "published-zcdp": "zcdp",
    "published-ac": "ac",
    "published-nc": "nc",
}
LOSS_TOLERANCE = 0.04
ACCURACY_TOLERANCE = 0.02


@dataclass(frozen=True)
class Mean:
    """Mean of the repeats, and their standard deviation where there are several."""

    value: float
    spread: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """The mean of some numbers.

        >>> Mean.of([1.0, 3.0]).value
        2.0
        """
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return cls(float(np.mean(values)), spread)


@dataclass(frozen=True)
class Summary:
    """One method at one epsilon on one data set."""

    dataset: str
    method: str
    epsilon: float | None
    queries: int | None
    repeats: int
    classes: int
    records: int
    status: str
    train_accuracy: Mean
    test_accuracy: Mean
    accuracy_loss: Mean
    leakage: Mapping[str, Mean]
    auc: Mapping[str, Mean]
    delta: float | None
    audited_epsilon: float | None
    audited: str
    audited_claim: float | None
    fit_seconds: float
    answer_seconds: float
    paper_accuracy_loss: float | None = None
    paper_leakage: float | None = None
    attacks: tuple[str, ...] = field(default=())

    @property
    def title(self) -> str:
        """The method's name, the number of answers and, where there is no guarantee, that there is none."""
        known = methods().get(self.method)
        words = self.method if known is None else known.title
        if self.queries is not None and (known is None or known.axis == "like-for-like" or self.queries > 1):
            words += f", {self.queries} {'answer' if self.queries == 1 else 'answers'}"
        return words if self.status == "proven" else f"{words} ({STATUS_WORDS[self.status]})"

    def flat(self) -> dict[str, Any]:
        """One line of a table; a column per attack."""
        line: dict[str, Any] = {}
        for name, value in asdict(self).items():
            if name in ("leakage", "auc"):
                for attack, mean in value.items():
                    line[f"{name}_{attack}"] = mean["value"]
                    line[f"{name}_{attack}_spread"] = mean["spread"]
            elif isinstance(value, dict):
                line[name], line[f"{name}_spread"] = value["value"], value["spread"]
            elif name != "attacks":
                line[name] = value
        return line


STATUS_WORDS = {
    "none": "no guarantee",
    "refuted": "no guarantee",
    "conditional": "guarantee conditional",
    "proven": "proven",
}


def summarise(results: Mapping[Trial, Result]) -> list[Summary]:
    """Average over repeats, in the order in which the cells came."""
    groups: dict[tuple[str, str, float | None, int | None], list[Result]] = {}
    for trial, result in results.items():
        key = (trial.group.source.title, trial.method, trial.epsilon, trial.queries)
        groups.setdefault(key, []).append(result)
    return [_summary(*key, found) for key, found in groups.items()]


def _summary(
    name: str, method_name: str, epsilon: float | None, queries: int | None, found: Sequence[Result]
) -> Summary:
    def mean(field_name: str) -> Mean:
        return Mean.of([result[field_name] for result in found])

    def attack_mean(figure: str) -> dict[str, Mean]:
        return {
            attack: Mean.of([result["attacks"][attack][figure]["value"] for result in found])
            for attack in found[0]["attacks"]
        }

    audits = [result for result in found if result["audited_epsilon"] is not None]
    best = max(audits, key=lambda result: result["audited_epsilon"], default=None)
    return Summary(
        name,
        method_name,
        epsilon,
        queries,
        len(found),
        found[0]["classes"],
        found[0]["records"],
        found[0]["status"],
        mean("train_accuracy"),
        mean("test_accuracy"),
        mean("accuracy_loss"),
        attack_mean("leakage"),
        attack_mean("auc"),
        found[0]["claimed_delta"],
        None if best is None else best["audited_epsilon"],
        "" if best is None else best["audited"],
        None if best is None else best.get("audited_claim"),
        float(np.median([result["fit_seconds"] for result in found])),
        float(np.median([result["answer_seconds"] for result in found])),
        _paper(name, "acc_loss", method_name, epsilon),
        _paper(name, "priv_leak", method_name, epsilon),
        tuple(found[0]["attacks"]),
    )


def _paper(name: str, metric: str, method_name: str, epsilon: float | None) -> float | None:
    if method_name == "plain" and metric == "priv_leak":
        row = reference.accuracy_table().get(name)
        return None if row is None else row["privacy_leakage"]
    series = PAPER_SERIES.get(method_name)
    if series is None or epsilon is None:
        return None
    return reference.curve(name, metric, series).get(epsilon)


def accuracy_comparisons(summaries: Iterable[Summary]) -> list[Comparison]:
    """The paper's accuracy table: both losses, training and test accuracy, and the plain network's leakage."""
    rows = []
    for each in summaries:
        paper = reference.accuracy_table().get(each.dataset)
        loss = {"plain": "convexified", "original": "original"}.get(each.method)
        if paper is None or loss is None:
            continue
        for part, mean in (("train", each.train_accuracy), ("test", each.test_accuracy)):
            printed = paper[f"{loss}_{part}_acc"]
            rows.append(_compared(each.dataset, f"{loss} {part} accuracy", printed, mean, ACCURACY_TOLERANCE))
        if loss == "convexified" and "shadow" in each.leakage:
            leakage = each.leakage["shadow"]
            rows.append(
                _compared(
                    each.dataset, "leakage, plain network", paper["privacy_leakage"], leakage, LOSS_TOLERANCE
                )
            )
    return rows


def curve_comparisons(summaries: Iterable[Summary]) -> list[Comparison]:
    """The paper's figures point by point: accuracy loss and leakage of Algorithm 1 and of DP-SGD."""
    rows = []
    for each in summaries:
        title = method(each.method).title if each.method in methods() else each.method
        if each.paper_accuracy_loss is not None:
            what = f"accuracy loss, {title}, eps {each.epsilon:g}"
            rows.append(
                _compared(each.dataset, what, each.paper_accuracy_loss, each.accuracy_loss, LOSS_TOLERANCE)
            )
        if each.paper_leakage is not None and each.epsilon is not None and "shadow" in each.leakage:
            what = f"leakage, {title}, eps {each.epsilon:g}"
            rows.append(
                _compared(each.dataset, what, each.paper_leakage, each.leakage["shadow"], LOSS_TOLERANCE)
            )
    return rows


def _compared(name: str, what: str, paper: float, ours: Mean, tolerance: float) -> Comparison:
    agrees = abs(ours.value - paper) <= tolerance
    return Comparison(name, what, paper, ours.value, agrees, spread=ours.spread)


def write_tables(summaries: Sequence[Summary], folder: Path) -> list[Path]:
    """Write ``results.csv`` and ``results.parquet``: one line per data set, method, epsilon and number of answers."""
    import pyarrow
    import pyarrow.parquet

    lines = [each.flat() for each in summaries]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    folder.mkdir(parents=True, exist_ok=True)
    text, table = folder / "results.csv", folder / "results.parquet"
    with text.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows({name: _short(value) for name, value in line.items()} for line in lines)
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{name: line.get(name) for name in columns} for line in lines]), table
    )
    return [text, table]


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value

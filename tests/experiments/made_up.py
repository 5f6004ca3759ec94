"""Made-up results, for tests of everything that is computed from results."""

from __future__ import annotations

from typing import Any

from quietmax.experiments import paper
from quietmax.experiments.grid import DataSource, Effort, Group, Result, Trial
from quietmax.experiments.paper import EPSILONS


def result(**changes: Any) -> Result:
    """A result with some values changed; ``leakage`` is that of the shadow attack."""
    leakage = changes.pop("leakage", 0.1)
    estimate = {"value": leakage, "low": leakage - 0.005, "high": leakage + 0.005}
    return {
        "classes": 30,
        "records": 1200,
        "train_accuracy": 0.99,
        "test_accuracy": 0.65,
        "baseline_accuracy": 0.65,
        "accuracy_loss": 0.0,
        "attacks": {"shadow": {"leakage": estimate, "auc": estimate}},
        "status": "refuted",
        "claimed_delta": 0.0,
        "audited_epsilon": None,
        "audited": "",
        "fit_seconds": 1.0,
        "answer_seconds": 1e-6,
    } | changes


def trial(
    name: str,
    epsilon: float | None = None,
    repeat: int = 0,
    dataset: str = "location",
    queries: int | None = None,
) -> Trial:
    """A trial of a small group."""
    return Trial(Group(DataSource(dataset), Effort(1200, 2), repeat), name, epsilon, queries)


def the_papers_own(dataset: str = "location") -> dict[Trial, Result]:
    """Results that equal the paper's table and curves."""
    table = paper.accuracy_table()[dataset]
    classes = 2 if dataset in ("adult", "purchase-2") else 30
    found = {
        trial("plain", dataset=dataset): result(
            train_accuracy=table["convexified_train_acc"],
            test_accuracy=table["convexified_test_acc"],
            leakage=table["privacy_leakage"],
            status="none",
            classes=classes,
        )
    }
    for name, series in (("algorithm1-gaussian", "alg1_gauss"), ("algorithm1-laplace", "alg1_lap")):
        losses, leaks = (paper.curve(dataset, metric, series) for metric in ("acc_loss", "priv_leak"))
        for epsilon in EPSILONS:
            found[trial(name, epsilon, dataset=dataset, queries=1)] = result(
                accuracy_loss=losses[epsilon], leakage=leaks[epsilon], classes=classes
            )
    return found

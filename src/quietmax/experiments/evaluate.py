"""What is measured in a cell: accuracy, leakage by every attack, claimed and audited epsilon, times."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quietmax import audit
from quietmax.attacks.base import Attack
from quietmax.attacks.metrics import released_by
from quietmax.attacks.report import AttackReport
from quietmax.attacks.targets import QueryResult
from quietmax.audit import training as guessing
from quietmax.experiments.grid import Trial
from quietmax.experiments.methods import Method, Release, declared_delta, method
from quietmax.experiments.results import Result, Store
from quietmax.experiments.shared import Shared
from quietmax.mechanisms.base import Answers
from quietmax.models.training import accuracy_loss

AUDIT_DRAWS = 4_000
AUDIT_CONFIDENCE = 0.99
_FIGURES = ("leakage", "advantage", "auc", "tpr_at_0_1_percent_fpr", "tpr_at_1_percent_fpr")


@dataclass(frozen=True)
class MakeMeasure:
    """Makes the function that workers call; picklable, so that it can travel to them."""

    folder: Path
    data_dir: str | None = None

    def __call__(self) -> Callable[[Trial], Result]:
        """A function that measures cells and remembers the last group."""
        store = Store(self.folder)
        last: list[Shared] = []

        def compute(trial: Trial) -> Result:
            if not last or last[0].group != trial.group:
                last[:] = [Shared(trial.group, store, self.data_dir)]
            return measure(trial, last[0])

        return compute


def measure(trial: Trial, shared: Shared) -> Result:
    """Let the cell's method answer every member and non-member once; look at the answers."""
    begun = time.process_time()
    chosen = method(trial.method)
    release = chosen.prepare(trial, shared)
    data = shared.data
    attacks = shared.attacks if chosen.attacked else []
    wanted = [attack.queried_rows(data) for attack in attacks]
    rows = np.unique(np.concatenate([data.train_rows, data.test_rows, *wanted]))
    started = time.perf_counter()
    answers = release.answer(rows)
    answer_seconds = time.perf_counter() - started
    right = answers.labels == data.records.labels[rows]
    test_accuracy = float(right[np.searchsorted(rows, data.test_rows)].mean())
    baseline = float((shared.model.predict(data.test.features) == data.test.labels).mean())
    reports = {
        name: _attacked(attack, shared, _part(answers, np.searchsorted(rows, own)), len(rows))
        for name, attack, own in zip(shared.group.effort.attacks, attacks, wanted, strict=False)
    }
    return {
        "classes": data.classes,
        "records": len(data.train_rows),
        "train_accuracy": float(right[np.searchsorted(rows, data.train_rows)].mean()),
        "test_accuracy": test_accuracy,
        "baseline_accuracy": baseline,
        "accuracy_loss": accuracy_loss(test_accuracy, baseline),
        "attacks": {
            name: {figure: getattr(report, figure).to_json() for figure in _FIGURES}
            for name, report in reports.items()
        },
        **_claimed(trial, chosen, release, shared),
        **_audited(trial, chosen, release, data.classes, reports, len(data.train_rows)),
        "fit_seconds": release.fit_seconds,
        "answer_seconds": answer_seconds / len(rows),
        "processor_seconds": time.process_time() - begun,
    }


def _attacked(attack: Attack, shared: Shared, answers: Answers, queries: int) -> AttackReport:
    fitted = shared.fitted(attack, released_by(answers))
    return attack.report(fitted, QueryResult(answers, queries, None, "cell"), shared.pool_for(attack))


def _part(answers: Answers, places: NDArray[np.intp]) -> Answers:
    probabilities = answers.probabilities
    return Answers(answers.labels[places], None if probabilities is None else probabilities[places])


def _claimed(trial: Trial, chosen: Method, release: Release, shared: Shared) -> dict[str, Any]:
    """What the label says: epsilon as published, or (epsilon, delta) for all the stated answers."""
    status = chosen.status_for(shared.data.classes)
    if status == "proven" and shared.encoding_measured:
        status = "conditional"
    delta = declared_delta(len(shared.data.train_rows)) if chosen.axis == "like-for-like" else 0.0
    return {
        "status": status,
        "claimed_epsilon": trial.epsilon,
        "claimed_delta": delta if trial.epsilon is not None else None,
        "because": "" if release.claim is None else release.claim.because,
    }


def _audited(
    trial: Trial,
    chosen: Method,
    release: Release,
    classes: int,
    reports: dict[str, AttackReport],
    records: int,
) -> dict[str, Any]:
    """A lower bound on epsilon: of one answer of a mechanism, or of a trained model from the attacks' guesses.

    A mechanism is audited once, at repeat 0; the bound is on the claim of *one* answer. A model's bound takes the
    division into members and non-members as fair coins (`quietmax.audit.training`), each attack with its share of the
    permitted error; it is 0 where the attacks hardly guess better than a coin.
    """
    if release.mechanism is not None:
        if trial.group.repeat:
            return {"audited_epsilon": None, "audited": ""}
        report = audit.mechanism(
            release.mechanism,
            classes,
            samples=AUDIT_DRAWS,
            confidence=AUDIT_CONFIDENCE,
            delta=declared_delta(records),
            seed=trial.group.seed,
        )
        return {
            "audited_epsilon": _finite(report.lower_bound),
            "audited_claim": _finite(report.claimed),
            "audited": f"one answer, in {'mu' if report.definition == 'gaussian' else 'epsilon'}",
        }
    if not reports:
        return {"audited_epsilon": None, "audited": ""}
    bounds = [
        guessing.epsilon_lower_bound(
            report.members + report.nonmembers,
            report.members + report.nonmembers,
            round(report.tpr.value * report.members + (1 - report.fpr.value) * report.nonmembers),
            delta=0.0 if chosen.status == "none" else declared_delta(records),
            confidence=1 - (1 - AUDIT_CONFIDENCE) / len(reports),
        )
        for report in reports.values()
    ]
    return {"audited_epsilon": _finite(max(bounds)), "audited": "the attacks' guesses"}


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and np.isfinite(value) else None

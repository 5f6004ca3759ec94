"""The measurement of a trial: accuracy, leakage under every attack, claimed and audited epsilon, times."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quietmax import __version__
from quietmax.attacks.base import Attack
from quietmax.attacks.metrics import AttackReport, released_by
from quietmax.attacks.targets import QueryResult
from quietmax.audit.bounds import epsilon_from_guesses
from quietmax.audit.mechanism import audit_mechanism
from quietmax.experiments.grid import Trial
from quietmax.experiments.inputs import SharedInputs
from quietmax.experiments.methods import Method, PreparedMethod, declared_delta, method
from quietmax.experiments.results import Result, ResultStore
from quietmax.mechanisms.base import Answers
from quietmax.models.training import accuracy_loss

AUDIT_SAMPLES = 4_000
AUDIT_CONFIDENCE = 0.99
_ATTACK_FIGURES = ("leakage", "advantage", "auc", "tpr_at_0_1_percent_fpr", "tpr_at_1_percent_fpr")


@dataclass(frozen=True)
class MeasureFactory:
    """Makes the function with which a worker measures trials. It is picklable, so it can be sent to workers."""

    folder: Path  # Folder of the result store, where shared networks are found and stored
    data_dir: str | None = None  # Folder of the data sets' files

    def __call__(self) -> Callable[[Trial], Result]:
        """Return a function that measures trials and keeps the inputs of the last group in memory."""
        store = ResultStore(self.folder)
        last: list[SharedInputs] = []

        def compute(trial: Trial) -> Result:
            if not last or last[0].group != trial.group:
                last[:] = [SharedInputs(trial.group, store, self.data_dir)]
            return measure(trial, last[0])

        return compute


def measure(trial: Trial, shared: SharedInputs) -> Result:
    """Let the method of a trial answer every member and non-member once, and evaluate the answers."""
    begun = time.process_time()
    chosen = method(trial.method)
    prepared = chosen.prepare(trial, shared)
    data = shared.data
    attacks = dict(zip(shared.group.effort.attacks, shared.attacks, strict=True)) if chosen.attacked else {}
    queried = {name: attack.queried_rows(data) for name, attack in attacks.items()}
    rows = np.unique(np.concatenate([data.train_rows, data.test_rows, *queried.values()]))
    started = time.perf_counter()
    answers = prepared.answer(rows)
    answer_seconds = time.perf_counter() - started
    right = answers.labels == data.records.labels[rows]
    test_accuracy = float(right[np.searchsorted(rows, data.test_rows)].mean())
    baseline = float((shared.model.predict(data.test.features) == data.test.labels).mean())
    reports = {
        name: _attack(attack, shared, _part(answers, np.searchsorted(rows, queried[name])), len(rows))
        for name, attack in attacks.items()
    }
    return {
        "classes": data.classes,
        "records": len(data.train_rows),
        "train_accuracy": float(right[np.searchsorted(rows, data.train_rows)].mean()),
        "test_accuracy": test_accuracy,
        "baseline_accuracy": baseline,
        "accuracy_loss": accuracy_loss(test_accuracy, baseline),
        "attacks": {
            name: {figure: getattr(report, figure).to_json() for figure in _ATTACK_FIGURES}
            for name, report in reports.items()
        },
        **_claim(trial, chosen, prepared, shared),
        **_audit(trial, chosen, prepared, shared, reports),
        "fit_seconds": prepared.fit_seconds,
        "answer_seconds": answer_seconds / len(rows),
        "processor_seconds": time.process_time() - begun,
        "peak_bytes": getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        "version": __version__,
    }


def _attack(attack: Attack, shared: SharedInputs, answers: Answers, queries: int) -> AttackReport:
    fitted = shared.fitted(attack, released_by(answers))
    return attack.report(fitted, QueryResult(answers, queries, None, "trial"), shared.pool_for(attack))


def _part(answers: Answers, places: NDArray[np.intp]) -> Answers:
    probabilities = answers.probabilities
    return Answers(answers.labels[places], None if probabilities is None else probabilities[places])


def _claim(trial: Trial, chosen: Method, prepared: PreparedMethod, shared: SharedInputs) -> dict[str, Any]:
    """What is claimed: epsilon as published, or (epsilon, delta) for all the stated answers."""
    status = chosen.status_for(shared.data.classes)
    # The number of records of a user's own table is taken as public, so its guarantee rests on that assumption.
    if status == "proven" and (shared.encoding_measured or trial.group.source.digest):
        status = "conditional"
    pure = prepared.claim is not None and prepared.claim.definition == "pure"
    delta = declared_delta(trial.group.effort.records) if chosen.axis == "like-for-like" and not pure else 0.0
    return {
        "status": status,
        "claimed_epsilon": trial.epsilon,
        "claimed_delta": delta if trial.epsilon is not None else None,
        "because": "" if prepared.claim is None else prepared.claim.because,
    }


def _audit(
    trial: Trial,
    chosen: Method,
    prepared: PreparedMethod,
    shared: SharedInputs,
    reports: Mapping[str, AttackReport],
) -> dict[str, Any]:
    """A lower bound on epsilon: of one answer of a mechanism, or of a trained model from the attacks' guesses.

    A mechanism is audited once, at repeat 0, against the claim for *one* answer. The bound of a model takes the
    division into members and non-members as fair coins (`quietmax.audit.bounds`) and gives each attack its share of
    the permitted error; it is 0 where the attacks hardly guess better than a coin. If there are more members than
    non-members, as with a holdout, a random part of them counts, as large as the non-members.
    """
    delta = declared_delta(trial.group.effort.records)
    if prepared.mechanism is not None:
        if trial.group.repeat:
            return {"audited_epsilon": None, "audited": ""}
        report = audit_mechanism(
            prepared.mechanism,
            shared.data.classes,
            samples=AUDIT_SAMPLES,
            confidence=AUDIT_CONFIDENCE,
            delta=delta,
            seed=trial.group.seed,
        )
        return {
            "audited_epsilon": _finite(report.lower_bound),
            "audited_claim": _finite(report.claimed),
            "audited": f"one answer, in {'mu' if report.definition == 'gaussian' else 'epsilon'}",
        }
    if not reports:
        return {"audited_epsilon": None, "audited": ""}
    bounds = []
    for attacked in reports.values():
        guesses, right = _fair_guesses(attacked, trial.noise_seed)
        bounds.append(
            epsilon_from_guesses(
                guesses,
                guesses,
                right,
                delta=0.0 if chosen.status == "none" else delta,
                confidence=1 - (1 - AUDIT_CONFIDENCE) / len(reports),
            )
        )
    return {"audited_epsilon": _finite(max(bounds)), "audited": "the attacks' guesses"}


def _fair_guesses(report: AttackReport, seed: int) -> tuple[int, int]:
    """Return the number of guesses about as many members as non-members, and of right ones."""
    found = round(report.tpr.value * report.members)
    counted = min(report.members, report.nonmembers)
    if counted < report.members:
        generator = np.random.default_rng((0xFA12, seed))
        found = int(generator.hypergeometric(found, report.members - found, counted))
    rejected = round((1 - report.fpr.value) * report.nonmembers)
    return counted + report.nonmembers, found + rejected


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and np.isfinite(value) else None

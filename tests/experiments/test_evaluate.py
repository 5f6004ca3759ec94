"""A trial's result: accuracy, leakage by every attack, audits, times."""

from __future__ import annotations

import numpy as np
import pytest

from quietmax.experiments.evaluate import measure
from quietmax.experiments.grid import DataSource, Group, Trial
from quietmax.experiments.inputs import SharedInputs
from quietmax.experiments.methods import method
from quietmax.experiments.results import ResultStore


@pytest.mark.parametrize("name", ["plain", "original", "algorithm1-laplace", "head", "teachers"])
def test_a_result_has_accuracy_leakage_by_every_attack_and_times(
    name: str, group: Group, shared: SharedInputs
) -> None:
    epsilon = None if method(name).status == "none" else 5.0
    trial = Trial(group, name, epsilon, None if epsilon is None else 1)
    found = measure(trial, shared)
    rows = np.sort(np.concatenate([shared.data.train_rows, shared.data.test_rows]))
    right = method(name).prepare(trial, shared).answer(rows).labels == shared.data.records.labels[rows]
    assert found["test_accuracy"] == right[np.isin(rows, shared.data.test_rows)].mean()
    assert found["accuracy_loss"] == pytest.approx(1 - found["test_accuracy"] / found["baseline_accuracy"])
    assert set(found["attacks"]) == (set() if name == "original" else {"shadow", "threshold"})
    assert (found["fit_seconds"] == 0) == (name == "algorithm1-laplace")  # it uses the plain network
    assert 0 < found["answer_seconds"] < found["processor_seconds"]
    # The records are an own table, whose size is taken as public, so nothing is proven.
    assert found["status"] == ("none" if name in ("plain", "original") else "conditional")
    if method(name).per_answer:
        assert found["audited"] == "one answer, in epsilon"
        assert found["audited_claim"] == {"algorithm1-laplace": 2.0, "teachers": 5.0}[name]
        assert 1 < found["audited_epsilon"] <= found["audited_claim"]
    else:
        # Attacks on networks that hardly learned guess like a coin; the original network is not attacked.
        assert (found["audited"], found["audited_epsilon"]) == (
            ("", None) if name == "original" else ("the attacks' guesses", 0.0)
        )


def test_a_mechanism_is_audited_once_and_the_bound_stays_below_a_true_claim(
    group: Group, shared: SharedInputs, table: DataSource, store: ResultStore
) -> None:
    first = measure(Trial(group, "sampled-neuron", 1.0, 1), shared)
    assert 0 <= first["audited_epsilon"] <= first["audited_claim"] == 1.0
    other = Group(table, group.effort, repeat=1)
    second = measure(Trial(other, "sampled-neuron", 1.0, 1), SharedInputs(other, store))
    assert second["audited_epsilon"] is None

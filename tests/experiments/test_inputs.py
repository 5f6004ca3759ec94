"""Shared inputs are trained once and read back from the store."""

from __future__ import annotations

import numpy as np
import pytest

from quietmax.attacks.shadow_models import ShadowPool
from quietmax.experiments import inputs as inputs_module
from quietmax.experiments.evaluate import measure
from quietmax.experiments.grid import DataSource, Effort, Group, Trial
from quietmax.experiments.inputs import SharedInputs, training_records
from quietmax.experiments.results import ResultStore


def test_shared_networks_are_read_back_rather_than_trained_again(
    group: Group, shared: SharedInputs, store: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = measure(Trial(group, "plain"), shared)
    for name in ("train", "train_sweep"):
        monkeypatch.setattr(inputs_module, name, lambda *_, **__: pytest.fail("trained again"))
    monkeypatch.setattr(ShadowPool, "train", lambda *_, **__: pytest.fail("trained again"))
    again = measure(Trial(group, "plain"), SharedInputs(group, store))
    assert again["test_accuracy"] == pytest.approx(before["test_accuracy"])
    assert again["attacks"]["shadow"]["leakage"]["value"] == pytest.approx(
        before["attacks"]["shadow"]["leakage"]["value"]
    )


def test_a_comparison_trains_on_the_data_sets_number_of_records_or_two_fifths_of_a_table(
    table: DataSource,
) -> None:
    assert training_records(DataSource.of("mnist"), None) == 10_000
    assert training_records(DataSource.of("mnist"), 500) == 500
    assert training_records(table, None) == 240
    assert training_records(table, 100) == 100


def test_published_dpsgd_loses_less_accuracy_with_less_noise(
    store: ResultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embedded digits: with epsilon 1000 under zCDP nearly nothing is lost, with 0.01 nearly everything."""
    monkeypatch.setattr(inputs_module, "EPSILONS", (0.01, 1000.0))
    monkeypatch.setattr(inputs_module, "PUBLISHED_ACCOUNTANTS", ("zcdp", "nc"))
    shared = SharedInputs(Group(DataSource("mnist-5k"), Effort(200, 2, attacks=())), store)
    losses = {
        epsilon: measure(Trial(shared.group, "published-zcdp", epsilon), shared)["accuracy_loss"]
        for epsilon in (0.01, 1000.0)
    }
    assert losses[0.01] > 0.7
    assert losses[1000.0] < 0.1
    assert not np.array_equal(
        shared.published_dpsgd("zcdp", 0.01).weight_vectors(),
        shared.published_dpsgd("nc", 0.01).weight_vectors(),
    )

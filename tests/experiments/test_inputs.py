"""Shared inputs are trained once and read back from the store."""

from __future__ import annotations

import numpy as np
import pytest

from quietmax.attacks.shadow_models import ShadowPool
from quietmax.data import Holdout
from quietmax.errors import InvalidInput
from quietmax.experiments import inputs as inputs_module
from quietmax.experiments.grid import DataSource, Effort, Group, Trial
from quietmax.experiments.inputs import SharedInputs, training_size
from quietmax.experiments.methods import measure
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


def test_a_comparison_trains_on_the_data_sets_number_of_records_or_on_what_the_holdout_leaves(
    table: DataSource,
) -> None:
    mnist, fair = DataSource.of("mnist"), DataSource.of("fair")
    assert training_size(mnist, None, None) == (10_000, None)
    assert training_size(mnist, 500, None) == (500, None)
    assert training_size(fair, None, None)[1] == 0.2
    assert training_size(fair, 500, None) == (500, None)
    assert training_size(table, None, None) == (480, 0.2)
    assert training_size(table, None, 0.3) == (420, 0.3)
    with pytest.raises(InvalidInput, match="`holdout` is the share of a table"):
        training_size(table, 100, None)
    with pytest.raises(InvalidInput, match="`holdout` must be above 0"):
        training_size(table, None, 0.0)


def test_the_holdout_is_the_test_part_and_is_stored_in_keys_only_where_there_is_one(
    table: DataSource, store: ResultStore
) -> None:
    shared = SharedInputs(Group(table, Effort(480, 2, holdout=0.2), seed=3), store)
    assert shared.data.holdout == Holdout(0.2, 3)
    assert len(shared.data.train_rows) + len(shared.data.test_rows) == 600
    assert 80 < len(shared.data.test_rows) < 160  # 120 expected, 4 standard deviations on either side
    assert not len(shared.data.pool_rows)
    assert "holdout" not in Effort(480, 2).to_json()
    assert Effort(480, 2, holdout=0.2).to_json()["holdout"] == 0.2


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

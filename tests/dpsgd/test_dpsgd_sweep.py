"""Sweeps train what single runs train, and on real data reproduce the paper's DP-SGD curves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quietmax.data import Records, load_records, split
from quietmax.errors import InvalidInput
from quietmax.estimators.dpsgd_plan import plan
from quietmax.estimators.dpsgd_sweep import train_sweep
from quietmax.experiments import reference
from quietmax.models.private_stack import train_private_stack


def _records(count=500, seed=0):
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 2, count)
    features = generator.normal(size=(count, 4)) + 2 * labels[:, None]
    return Records("blobs", features.astype(np.float32), labels, 2)


def test_a_sweep_trains_every_network_as_if_alone():
    splits = [split(_records(), size=200, seed=0)]
    splits.append(split(splits[0].records, size=200, seed=1))
    sweep = train_sweep(splits, epsilons=[5.0, 500.0], accountants=["zcdp", "nc"])
    assert sweep.accuracies().shape == (2, 2, 2)
    chosen = plan(200, epsilon=500.0, accountant="nc", reading="published", configuration="paper")
    single = train_private_stack(
        splits[1].records.features,
        splits[1].records.labels,
        2,
        [splits[1].train_rows],
        settings=chosen.settings,
        noise_multipliers=[chosen.noise_multiplier],
        seeds=[1],
    )
    found = sweep.network(1, "nc", 500.0)
    torch.testing.assert_close(found.weight_vectors(), single.weight_vectors(), rtol=1e-3, atol=1e-4)
    answers = found.logits(splits[1].test.features).argmax(-1).numpy()
    assert sweep.accuracies()[1, 1, 1] == (answers == splits[1].test.labels).mean() > 0.8


def test_splits_of_different_records_and_differing_settings_are_refused():
    one, two = split(_records(), size=100, seed=0), split(_records(seed=1), size=100, seed=0)
    with pytest.raises(InvalidInput, match="same records"):
        train_sweep([one, two], epsilons=[1.0], accountants=["nc"])
    with pytest.raises(InvalidInput, match="equal ones"):
        train_sweep([one, split(one.records, size=90, seed=1)], epsilons=[1.0], accountants=["nc"])
    with pytest.raises(InvalidInput, match="one learning rate"):
        train_sweep([one], epsilons=[1.0, 8.0], accountants=["rdp"], reading="proven", configuration="today")


@pytest.mark.slow
def test_published_dpsgd_on_location_reproduces_the_order_and_shape_of_the_papers_curves(real_data):
    """One split instead of ten: a test accuracy of 0.6 on 1200 records has a deviation of 0.014, a loss 0.022."""
    accountants, epsilons = ("rdp", "zcdp", "ac", "nc"), (1.0, 10.0, 100.0, 1000.0)
    data = split(load_records("location", data_dir=real_data), size=1200, seed=0)
    accuracies = train_sweep([data], epsilons=epsilons, accountants=accountants).accuracies()[0]
    losses = 1 - accuracies / reference.accuracy_table()["location"]["convexified_test_acc"]
    for line, accountant in zip(losses, accountants, strict=True):
        paper = reference.curve("location", "acc_loss", accountant)
        for ours, epsilon in zip(line, epsilons, strict=True):
            assert ours == pytest.approx(paper[epsilon], abs=0.11)
        assert (np.diff(line) < 0.01).all()
    assert (losses[0] <= losses[1] + 0.02).all()  # RDP loses least,
    assert (losses[1] < losses[3] + 0.02).all()  # then zCDP,
    assert (
        losses[3, 3] < losses[2, 3]
    )  # and at epsilon 1000 naive composition beats advanced, as in the paper

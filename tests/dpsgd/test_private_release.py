"""Training for release: exact noise of the stated spread on exact sums, and a model that learns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.models.mlp import initial_mlp
from quietmax.models.private_release import train_private
from quietmax.models.private_settings import PrivateSettings
from quietmax.models.private_stack import train_private_stack


def _blobs(count=600, seed=0):
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 3, count)
    centres = 3 * np.random.default_rng(99).normal(size=(3, 5))
    return (centres[labels] + generator.normal(size=(count, 5))).astype(np.float32), labels


def test_without_records_the_weights_move_by_noise_of_the_stated_spread():
    """20,100 exact draws: their mean square is off by 6% with probability < 1e-8."""
    settings = PrivateSettings(sampling_rate=0.1, steps=1, learning_rate=1.0, clip=0.5)
    empty = np.zeros((0, 200), np.float32)
    network = train_private(
        empty, np.zeros(0, np.int64), 100, settings=settings, noise_multiplier=2.0, size=400, seed=1
    )
    start = initial_mlp((200, 100), "tanh", (1,), torch.float64)
    moved = network.weight_vectors() - start.weight_vectors()
    assert float(moved.square().mean()) == pytest.approx((2.0 * 0.5 / 40) ** 2, rel=0.06)


@pytest.mark.parametrize("hidden", [(), (8,), (8, 6)])
def test_it_trains_what_the_stacked_engine_trains_when_there_is_hardly_any_noise(hidden):
    features, labels = _blobs()
    settings = PrivateSettings(
        hidden=hidden,
        sampling_rate=1.0,
        steps=20,
        clip=0.5,
        learning_rate=0.5,
        optimiser="momentum",
        l2=0.001,
    )
    exact = train_private(
        features, labels, 3, settings=settings, noise_multiplier=1e-6, size=600, seed=3
    ).weight_vectors()
    stacked = train_private_stack(
        features, labels, 3, [np.arange(600)], settings=settings, noise_multipliers=[0.0], seeds=[3]
    ).weight_vectors()
    torch.testing.assert_close(exact.float(), stacked, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("sampling", ["poisson", "shuffled"])
def test_it_learns_and_no_two_runs_are_alike(sampling):
    features, labels = _blobs()
    settings = PrivateSettings(sampling_rate=0.3, steps=60, clip=1.0, learning_rate=0.5, sampling=sampling)
    told = []
    runs = [
        train_private(
            features,
            labels,
            3,
            settings=settings,
            noise_multiplier=2.0,
            size=600,
            seed=3,
            progress=lambda *now: told.append(now),
        )
        for _ in range(2)
    ]
    others, truth = _blobs(seed=1)
    assert (runs[0].logits(others).argmax(1).numpy() == truth).mean() > 0.9
    assert not torch.equal(runs[0].weight_vectors(), runs[1].weight_vectors())
    assert told[-1] == (60, 60)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"noise_multiplier": 0.0}, InvalidInput),
        ({"size": 0}, InvalidInput),
        ({"labels": np.full(600, 7)}, InvalidInput),
        ({"settings": PrivateSettings(steps=2, learning_rate=1e308), "noise_multiplier": 1e9}, QuietmaxError),
    ],
)
def test_bad_input_and_divergence_are_refused(changes, error):
    features, labels = _blobs()
    options = {"features": features, "labels": labels, "classes": 3, "settings": PrivateSettings(steps=2)}
    options |= {"noise_multiplier": 1.0, "size": 600, "seed": 0} | changes
    with pytest.raises(error):
        train_private(**options)

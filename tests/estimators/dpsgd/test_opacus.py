"""DP-SGD for any torch module: clipped like the built-in network, with our noise, refusing what mixes records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quietmax.errors import InvalidInput
from quietmax.estimators import DPSGDSettings
from quietmax.estimators.dpsgd.estimator import DPSGD
from quietmax.estimators.dpsgd.gradients import ModuleSums
from quietmax.estimators.dpsgd.training import (
    PrivateSettings,
    train_private_module,
    train_private_stack,
)
from quietmax.models.mlp import initial_mlp

pytest.importorskip("opacus")

SETTINGS = PrivateSettings(sampling_rate=0.5, steps=40, max_grad_norm=0.5, learning_rate=1.0)


def _blobs(count=400, seed=0):
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 3, count)
    centres = 3 * np.random.default_rng(99).normal(size=(3, 16))
    return (centres[labels] + generator.normal(size=(count, 16))).astype(np.float32), labels


class Tied(torch.nn.Module):
    """One kernel used twice."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(16, 16)
        self.last = torch.nn.Linear(16, 3)

    def forward(self, records):
        return self.last(torch.tanh(self.first(torch.tanh(self.first(records)))))


def _convolution(_features=16, classes=3):
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 4, 4)),
        torch.nn.Conv2d(1, 4, 3, padding=1),
        torch.nn.GroupNorm(2, 4),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(64, classes),
    )


@pytest.mark.parametrize("build", [_convolution, Tied])
def test_the_clipped_sum_of_a_module_equals_a_loop_over_its_records(build: Any) -> None:
    torch.manual_seed(0)
    module = build()
    features, labels = _blobs(20)
    inputs, targets = torch.from_numpy(features), torch.from_numpy(labels)
    wanted = [torch.zeros_like(parameter) for parameter in module.parameters()]
    for row, label in zip(inputs, targets, strict=True):
        module.zero_grad()
        torch.nn.functional.cross_entropy(module(row.unsqueeze(0)), label.unsqueeze(0)).backward()
        norm = torch.sqrt(sum(parameter.grad.square().sum() for parameter in module.parameters()))
        for total, parameter in zip(wanted, module.parameters(), strict=True):
            total += parameter.grad * min(1.0, 0.5 / float(norm))
    clipped = ModuleSums(module.train(), 0.5)
    sums = [torch.zeros_like(parameter) for parameter in clipped.parameters]
    clipped.add_to(sums, inputs, targets, torch.ones(len(inputs)))
    for ours, theirs in zip(sums, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_record_that_overflows_counts_nothing() -> None:
    module = torch.nn.Linear(16, 3)
    features, labels = _blobs(8)
    inputs, targets = torch.from_numpy(features), torch.from_numpy(labels)
    clipped = ModuleSums(module.train(), 0.5)
    wanted = [torch.zeros_like(parameter) for parameter in clipped.parameters]
    clipped.add_to(wanted, inputs[1:], targets[1:], torch.ones(len(inputs) - 1))
    inputs[0] = 3e38
    sums = [torch.zeros_like(parameter) for parameter in clipped.parameters]
    clipped.add_to(sums, inputs, targets, torch.ones(len(inputs)))
    for ours, theirs in zip(sums, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("rows", [1, 6, 300])
def test_a_person_moves_the_clipped_sum_of_a_module_by_one_clip_norm_at_most(rows: int) -> None:
    """Equal rows, whose gradients do not cancel, as the guarantee of a module of one's own assumes: 1.001 at most."""
    torch.manual_seed(0)
    clipped = ModuleSums(_convolution().train(), 0.5)
    features, labels = _blobs(1)
    inputs = torch.from_numpy(9 * features).expand(rows, -1)
    targets = torch.from_numpy(1 - labels % 2).expand(rows)
    sums = [torch.zeros_like(parameter) for parameter in clipped.parameters]
    weights = torch.full((rows,), 1 / rows)
    for part in torch.split(torch.arange(rows), 256):
        clipped.add_to(sums, inputs[part], targets[part], weights[part])
    moved = float(torch.cat([each.flatten() for each in sums]).double().norm())
    assert 0.99 * 0.5 <= moved <= 1.001 * 0.5


def test_a_module_of_ones_own_is_trained_by_person() -> None:
    features, labels = _blobs()
    people = np.arange(len(labels)) // 4
    fitted = DPSGD(
        epsilon=8.0,
        network=_convolution,
        declared_size=100,
        classes=range(3),
        settings=DPSGDSettings(steps=3, length=4.0),
    ).fit(features, labels, groups=people)
    assert fitted.guarantee_.unit == "person"
    assert any("One person moves the module's" in each for each in fitted.guarantee_.assumptions)


def test_the_noise_on_a_module_has_the_stated_spread() -> None:
    """20,100 exact draws: their mean square is off by 6% with probability < 1e-8."""
    module = torch.nn.Linear(200, 100)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    settings = PrivateSettings(sampling_rate=0.1, steps=1, max_grad_norm=0.5, learning_rate=1.0)
    empty = np.zeros((0, 200), np.float32)
    for seed in (None, 3):
        trained = train_private_module(
            module, empty, np.zeros(0, np.int64), settings=settings, noise_multiplier=2.0, size=400, seed=seed
        )
        moved = [new.detach() - old for new, old in zip(trained.parameters(), before, strict=True)]
        square = torch.cat([each.flatten() for each in moved]).double().square().mean()
        assert float(square) == pytest.approx((2.0 * 0.5 / 40) ** 2, rel=0.06)
        before = [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_a_module_of_ones_own_learns_and_its_guarantee_names_what_is_assumed(optimizer: str) -> None:
    features, labels = _blobs()
    others, truth = _blobs(seed=1)
    fitted = DPSGD(
        epsilon=8.0,
        network=_convolution,
        declared_size=400,
        classes=range(3),
        settings=DPSGDSettings(
            optimizer=optimizer, max_grad_norm=0.5, steps=40, length=4.0, sampling_rate=0.5
        ),
    ).fit(features, labels)
    assert fitted.score(others, truth) > 0.8
    assert fitted.guarantee_.status == "conditional"
    assert any("every record of a batch by itself" in each for each in fitted.guarantee_.assumptions)
    assert not any(
        hasattr(parameter, "grad_sample") for parameter in fitted.model_.network.module.parameters()
    )


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_a_linear_module_becomes_the_built_in_network_when_there_is_hardly_any_noise(
    optimizer: Any, decay: float
) -> None:
    features, labels = _blobs()
    settings = PrivateSettings(
        sampling_rate=1.0, steps=10, learning_rate=0.1, optimizer=optimizer, decay=decay
    )
    network = train_private_stack(
        features,
        labels,
        3,
        [np.arange(len(labels))],
        settings=settings,
        noise_multipliers=[1e-9],
        seeds=[0],
    )
    module, start = torch.nn.Linear(16, 3), initial_mlp((16, 3), "tanh", (0,))
    with torch.no_grad():
        module.weight.copy_(start.kernels[0][0])
        module.bias.zero_()
    trained = train_private_module(
        module, features, labels, settings=settings, noise_multiplier=1e-9, size=len(labels), seed=0
    )
    torch.testing.assert_close(trained.weight.detach(), network.kernels[0][0], rtol=1e-4, atol=1e-5)
    assert float((trained.weight.detach() - start.kernels[0][0]).norm()) > 0.05


def test_a_seeded_run_of_a_module_repeats() -> None:
    features, labels = _blobs(60)
    outputs = []
    for _ in range(2):
        torch.manual_seed(1)
        module = train_private_module(
            _convolution(), features, labels, settings=SETTINGS, noise_multiplier=1.0, size=60, seed=5
        )
        outputs.append(module(torch.from_numpy(features)).detach())
    torch.testing.assert_close(outputs[0], outputs[1])


def test_modules_that_mix_records_or_cannot_be_trained_are_refused() -> None:
    features, labels = _blobs(20)
    mixing = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    frozen = torch.nn.Linear(16, 3).requires_grad_(False)
    for module, match in ((mixing, "mixes records"), (frozen, "no trainable")):
        with pytest.raises(InvalidInput, match=match):
            train_private_module(module, features, labels, settings=SETTINGS, noise_multiplier=1.0, size=20)

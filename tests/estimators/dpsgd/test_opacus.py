"""DP-SGD for any torch module: clipped like the built-in network, with our noise, refusing what mixes records."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from quietmax.errors import InvalidInput
from quietmax.estimators.dpsgd.estimator import DPSGD
from quietmax.estimators.dpsgd.gradients import ModuleSums
from quietmax.estimators.dpsgd.training import (
    PrivateSettings,
    train_private_module,
)
from tests.estimators.dpsgd.networks import naive_sums
from tests.estimators.made import blobs, made

pytest.importorskip("opacus")

SETTINGS = PrivateSettings(sampling_rate=0.5, steps=40, max_grad_norm=0.5, learning_rate=1.0)


class Tied(torch.nn.Module):
    """One kernel used twice."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(16, 16)
        self.last = torch.nn.Linear(16, 3)

    def forward(self, records):
        return self.last(torch.tanh(self.first(torch.tanh(self.first(records)))))


def _blobs(count: int = 400, seed: int = 0) -> Any:
    return blobs(count, columns=16, seed=seed)


def _convolution(_features=16, classes=3):
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 4, 4)),
        torch.nn.Conv2d(1, 4, 3, padding=1),
        torch.nn.GroupNorm(2, 4),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(64, classes),
    )


def _clipped_sums(module: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
    clipped = ModuleSums(copy.deepcopy(module).train(), 0.5)
    sums = [torch.zeros_like(parameter) for parameter in clipped.parameters]
    clipped.add_to(sums, inputs, targets, torch.ones(len(inputs)))
    return sums


@pytest.mark.parametrize("size", [1, 3, 20])
@pytest.mark.parametrize("build", [_convolution, Tied, partial(torch.nn.Linear, 16, 3)])
def test_the_clipped_sum_of_a_module_equals_a_loop_over_its_records_whatever_the_size_of_the_batch(
    build: Any, size: int
) -> None:
    torch.manual_seed(0)
    module = build()
    features, labels = _blobs(size)
    inputs, targets = torch.from_numpy(features), torch.from_numpy(labels)
    wanted = naive_sums(module, inputs, targets, 0.5)
    for ours, theirs in zip(_clipped_sums(module, inputs, targets), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_record_that_overflows_counts_nothing() -> None:
    module = torch.nn.Linear(16, 3)
    features, labels = _blobs(8)
    inputs, targets = torch.from_numpy(features), torch.from_numpy(labels)
    wanted = _clipped_sums(module, inputs[1:], targets[1:])
    inputs[0] = 3e38
    for ours, theirs in zip(_clipped_sums(module, inputs, targets), wanted, strict=True):
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


@pytest.mark.parametrize(
    ("optimizer", "unit"), [("sgd", "record"), ("momentum", "record"), ("adam", "record"), ("sgd", "person")]
)
def test_a_module_of_ones_own_learns_and_its_guarantee_names_what_is_assumed(
    optimizer: str, unit: str
) -> None:
    features, labels = _blobs()
    groups = np.arange(400) // 2 if unit == "person" else None
    changes: dict[str, Any] = {"steps": 40, "sampling_rate": 0.5, "max_grad_norm": 0.5, "length": 4.0}
    options: dict[str, Any] = {"network": _convolution, "declared_size": 400, "classes": range(3)}
    fitted = made(DPSGD, 8.0, optimizer=optimizer, **changes, **options).fit(features, labels, groups=groups)
    assert fitted.score(*_blobs(seed=1)) > (0.8 if groups is None else 0.7)
    assert (fitted.guarantee_.status, fitted.guarantee_.unit) == ("conditional", unit)
    assumed = " ".join(fitted.guarantee_.assumptions)
    assert "every record of a batch by itself" in assumed
    assert f"One {unit} moves the module's" in assumed
    assert not any(hasattr(each, "grad_sample") for each in fitted.model_.network.module.parameters())


def test_a_seeded_run_of_a_module_repeats() -> None:
    features, labels = _blobs(60)
    outputs = []
    for _ in range(2):
        torch.manual_seed(1)
        options: dict[str, Any] = {"settings": SETTINGS, "noise_multiplier": 1.0, "size": 60, "seed": 5}
        module = train_private_module(_convolution(), features, labels, **options)
        outputs.append(module(torch.from_numpy(features)).detach())
    torch.testing.assert_close(outputs[0], outputs[1])


def test_modules_that_mix_records_or_cannot_be_trained_are_refused() -> None:
    features, labels = _blobs(20)
    mixing = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    frozen = torch.nn.Linear(16, 3).requires_grad_(False)
    for module, match in ((mixing, "mixes records"), (frozen, "no trainable")):
        with pytest.raises(InvalidInput, match=match):
            train_private_module(module, features, labels, settings=SETTINGS, noise_multiplier=1.0, size=20)

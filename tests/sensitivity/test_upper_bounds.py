"""The bounds of the paper's Table 1: their values by hand, and their conditions on networks that meet or miss them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from quietmax.data import Records, hold_out
from quietmax.models import Convexified, CrossEntropy, Model, Quadratic, TrainingSettings, train
from quietmax.models.losses import value
from quietmax.sensitivity.network import (
    CONDITIONS,
    MeasuredFacts,
    UpperBound,
    _mean_of_equivalent,
    _record_gradient_norms,
    measured_facts,
    upper_bounds_for,
)


@pytest.fixture(scope="module")
def points() -> Records:
    """Sixty points of three classes."""
    generator = np.random.default_rng(0)
    labels = np.arange(60) % 3
    features = generator.normal(size=(60, 4)) + 2.0 * np.eye(3, 4)[labels]
    return Records("points", features.astype(np.float32), labels, classes=3)


def trained(points: Records, **settings: object) -> Model:
    chosen = TrainingSettings(**({"hidden": (6,), "epochs": 30, "learning_rate": 0.01} | settings))  # type: ignore[arg-type]
    return train(hold_out(points, 0.0), settings=chosen)


def verdicts(bound: UpperBound) -> dict[str, bool | None]:
    return {condition.name: condition.holds for condition in bound.conditions}


def test_the_five_bounds_by_hand_for_us_adult() -> None:
    """14 features, 128 neurons, 2 classes, 10,000 records, lam = 0.0005, eta = 0.001."""
    rho = (1 / (2 * 128)) * math.sqrt(14) * math.sqrt(128)
    tight = 2 * rho / (0.0005 * 10_000)
    found = [bound.value for bound in upper_bounds_for(14, 2, 10_000)]
    assert found == pytest.approx(
        [
            tight,
            2 * math.sqrt(14) * rho / (0.0005 * 10_000),
            tight,
            2 * 0.001 * rho / (1 - (1 - 0.001 * 0.0005) ** 10_000),
            tight,
        ],
        rel=1e-9,
    )


def test_with_a_large_step_the_bound_for_constant_steps_is_much_looser() -> None:
    """2 eta rho/(1 - (1 - eta lam)^n) tends to 2 rho/(lam n) for small steps, and to 2 eta rho for large ones."""
    small, large = (
        upper_bounds_for(14, 2, 10_000, settings=TrainingSettings(learning_rate=rate))
        for rate in (1e-6, 100.0)
    )
    assert small[3].value == pytest.approx(small[4].value, rel=1e-5)
    rho = small[4].value * 0.0005 * 10_000 / 2
    assert large[3].value == pytest.approx(2 * 100.0 * rho)


def test_the_norm_of_the_general_bound_is_that_of_the_given_data_space() -> None:
    wide, narrow = (upper_bounds_for(9, 3, 100, maxima=maxima) for maxima in ([2.0, 1.0], [1.0, 1.0]))
    assert narrow[1].value / narrow[4].value == pytest.approx(3 * math.sqrt(9) / 2)
    assert wide[1].value / wide[4].value == pytest.approx(3 * 2 * math.sqrt(9) / 2)


def test_each_bound_has_the_conditions_of_the_papers_table() -> None:
    wanted = [
        {"convex loss", "normalised data", "binary classes"},
        {"convex loss"},
        {"convex loss", "smooth loss", "decreasing SGD step"},
        {"convex loss", "smooth loss", "constant SGD step"},
        {"convex loss"},
    ]
    implied = {"rho-Lipschitz loss", "minimiser reached"}
    for bound, names in zip(upper_bounds_for(14, 2, 10_000), wanted, strict=True):
        assert set(verdicts(bound)) - implied == names
        assert set(verdicts(bound)) <= set(CONDITIONS)


def test_the_papers_network_meets_only_the_condition_on_classes() -> None:
    first, *_ = upper_bounds_for(14, 2, 10_000)
    assert verdicts(first) == {
        "convex loss": False,
        "normalised data": False,
        "binary classes": True,
        "rho-Lipschitz loss": None,
        "minimiser reached": None,
    }
    assert not verdicts(upper_bounds_for(14, 3, 10_000)[0])["binary classes"]
    assert verdicts(upper_bounds_for(14, 2, 10_000, maxima=[0.25, 1.0])[0])["normalised data"]


def test_a_linear_model_is_convex_and_smooth_with_cross_entropy_and_not_convex_with_the_quadratic_loss() -> (
    None
):
    for loss, convex in ((CrossEntropy(), True), (Convexified(2.0), True), (Quadratic(), False)):
        settings = TrainingSettings(hidden=(), loss=loss)
        found = verdicts(upper_bounds_for(4, 2, 100, settings=settings, maxima=[1.0])[2])
        assert found["convex loss"] is convex
        assert found["smooth loss"] is True
        assert found["decreasing SGD step"] is False


def test_relu_has_a_kink() -> None:
    settings = TrainingSettings(activation="relu")
    smooth = upper_bounds_for(4, 2, 100, settings=settings, maxima=[1.0, 1.0])[2].conditions[1]
    assert (smooth.name, smooth.holds) == ("smooth loss", False)
    assert "kink" in smooth.because


@pytest.mark.parametrize("activation", ["tanh", "sigmoid", "relu"])
def test_the_mean_of_equivalent_networks_is_the_mean_over_all_orders_of_neurons(
    points: Records, activation: str
) -> None:
    network = trained(points, hidden=(3, 2), activation=activation, epochs=1).network
    mean = _mean_of_equivalent(network)
    total = [torch.zeros_like(tensor) for _, tensor in network.parameters()]
    orders = [([0, 1, 2], [0, 1]), ([1, 2, 0], [0, 1]), ([2, 0, 1], [0, 1])]
    orders += [(first, [1, 0]) for first, _ in orders]
    for first, second in orders:
        kernels = (
            network.kernels[0][:, :, first],
            network.kernels[1][:, first][:, :, second],
            network.kernels[2][:, :, second],
        )
        biases = (network.biases[0][:, :, first], network.biases[1][:, :, second], network.biases[2])
        same = replace(network, kernels=kernels, biases=biases)
        torch.testing.assert_close(same.logits(points.features), network.logits(points.features))
        total = [sum_ + tensor for sum_, (_, tensor) in zip(total, same.parameters(), strict=True)]
    for sum_, (_, tensor) in zip(total, mean.parameters(), strict=True):
        torch.testing.assert_close(sum_ / len(orders), tensor)


@pytest.mark.parametrize("base", [CrossEntropy(), Quadratic()], ids=str)
@pytest.mark.parametrize("activation", ["tanh", "sigmoid", "relu"])
def test_gradient_norms_of_records_are_those_of_automatic_differentiation(
    points: Records, base: CrossEntropy | Quadratic, activation: str
) -> None:
    network = trained(points, hidden=(5, 4), activation=activation, epochs=3).network
    features, labels = torch.from_numpy(points.features), torch.from_numpy(points.labels)
    found = _record_gradient_norms(network, base, features, labels)
    function = getattr(torch, activation)
    for record in range(5):
        kernels = [kernel[0].clone().requires_grad_() for kernel in network.kernels]
        signal = features[record : record + 1]
        for kernel, bias in zip(kernels[:-1], network.biases[:-1], strict=True):
            signal = function(signal @ kernel + bias[0])
        loss = value(base, signal @ kernels[-1].T + network.biases[-1][0], labels[record : record + 1])
        gradients = torch.autograd.grad(loss, kernels)
        norm = torch.cat([each.flatten() for each in gradients]).norm()
        assert found[record] == pytest.approx(float(norm), rel=1e-4)


def test_on_a_trained_network_the_mean_of_equivalent_networks_refutes_convexity(points: Records) -> None:
    model = trained(points)
    facts = measured_facts(model, points)
    assert facts.loss_at_mean > facts.loss
    assert facts.norm == pytest.approx(float(np.linalg.norm(points.features, axis=1).max()))
    bound = upper_bounds_for(16, 3, 100, settings=model.settings, facts=facts)[-1]
    assert bound.applies is False
    assert f"{facts.loss_at_mean:.3g}" in bound.conditions[0].because


def test_the_gradient_of_the_objective_is_small_at_a_minimiser_and_large_before(points: Records) -> None:
    early, late = (
        measured_facts(trained(points, hidden=(), batch_size=60, l2=0.1, epochs=epochs), points)
        for epochs in (1, 3000)
    )
    assert early.objective_gradient > 0.1
    assert late.objective_gradient < 1e-4


def test_measurements_decide_about_the_lipschitz_constant_and_the_minimiser() -> None:
    facts = MeasuredFacts(norm=0.9, loss=1.0, loss_at_mean=0.5, gradient=99.0, objective_gradient=0.0)
    found = verdicts(upper_bounds_for(14, 2, 10_000, facts=facts)[0])
    assert found["normalised data"] is True
    assert found["rho-Lipschitz loss"] is False
    assert found["minimiser reached"] is True
    small = replace(facts, gradient=0.01, objective_gradient=1.0)
    found = verdicts(upper_bounds_for(14, 2, 10_000, facts=small)[0])
    assert found["rho-Lipschitz loss"] is None, "gradients at one point prove no Lipschitz constant"
    assert found["minimiser reached"] is False

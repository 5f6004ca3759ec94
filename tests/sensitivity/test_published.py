from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from quietmax.errors import InvalidInput
from quietmax.models import Model, TrainingSettings
from quietmax.models.mlp import initial_mlp
from quietmax.sensitivity import published_sensitivity
from quietmax.sensitivity.network import published_sensitivity_for


def _model(hidden=(5,), activation="tanh", features=4, classes=3):
    network = initial_mlp((features, *hidden, classes), activation, (0,))
    return Model(network, TrainingSettings(hidden, activation), records=50, dataset="made up", seed=0)


def test_the_formulas_by_hand_for_one_hidden_layer() -> None:
    found = published_sensitivity_for(9, [4], 2, 100, l2=0.02)
    rho = (1 / 2) / 4 * 3 * 2  # (C-1)/(C*H) * sqrt(m) * sqrt(H)
    lam, weights = 0.01, 9 * 4 + 4 * 2
    assert found.rho.value == pytest.approx(rho)
    assert found.weights_l2.value == pytest.approx(2 * rho / (lam * 100))
    assert found.weight.value == pytest.approx(2 * rho / (lam * 100) / math.sqrt(weights))
    assert found.logit.value == pytest.approx(4 * found.weight.value)
    assert found.probability_untruncated.value == pytest.approx(math.exp(2 * found.logit.value) - 1)
    assert found.oaro.value == pytest.approx(2 * rho**2 / (lam * 100))


def test_the_formulas_by_hand_for_two_hidden_layers_with_given_maxima() -> None:
    found = published_sensitivity_for(9, [4, 16], 5, 100, l2=0.02, maxima=[2.0, 0.5, 3.0])
    rho = (4 / 5) / 16 * (3 * 2.0) * (2 * 0.5) * (4 * 3.0)
    weights = 9 * 4 + 4 * 16 + 16 * 5
    assert found.rho.value == pytest.approx(rho)
    assert found.logit.value == pytest.approx(16 * 2 * rho / (0.01 * 100) / math.sqrt(weights))


def test_every_value_knows_its_basis_and_says_it_is_no_bound() -> None:
    for name, entry in vars(published_sensitivity_for(784, [128], 10, 10_000)).items():
        assert entry.basis == "published", name
        assert "not an upper bound" in entry.because


def test_the_probability_is_truncated_at_one_and_never_overflows() -> None:
    found = published_sensitivity_for(10, [1000], 2, 1)
    assert found.probability.value == 1.0
    assert found.probability_untruncated.value == math.inf


def test_maxima_measured_on_records_are_the_largest_neurons_layer_by_layer() -> None:
    model = _model(hidden=(5, 6))
    records = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    signal = torch.from_numpy(records)
    first = torch.tanh(signal @ model.network.kernels[0][0] + model.network.biases[0][0])
    second = torch.tanh(first @ model.network.kernels[1][0] + model.network.biases[1][0])
    maxima = [float(layer.abs().max()) for layer in (signal, first, second)]
    measured = published_sensitivity(model, records=records)
    given = published_sensitivity(model, maxima=maxima)
    assert measured.rho.value == pytest.approx(given.rho.value, rel=1e-6)
    assert "measured" in measured.rho.because
    assert published_sensitivity(model).rho.value == pytest.approx(
        measured.rho.value / math.prod(maxima), rel=1e-6
    )


def test_an_unbounded_activation_needs_maxima() -> None:
    with pytest.raises(InvalidInput, match="maxima is required for the activation relu"):
        published_sensitivity(_model(activation="relu"))
    records = np.ones((3, 4), np.float32)
    assert published_sensitivity(_model(activation="relu"), records=records).logit.value > 0


def test_a_network_without_hidden_layer_needs_maxima() -> None:
    with pytest.raises(InvalidInput, match="maxima is required for a network without hidden layers"):
        published_sensitivity_for(4, [], 3, 10)
    assert published_sensitivity_for(4, [], 3, 10, maxima=[2.0]).logit.value > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"features": 0},
        {"classes": 1},
        {"records": 0},
        {"l2": 0.0},
        {"l2": math.nan},
        {"maxima": [1.0]},
        {"maxima": [1.0, -1.0]},
        {"hidden": [0]},
    ],
)
def test_impossible_shapes_are_refused(wrong) -> None:
    with pytest.raises(InvalidInput):
        published_sensitivity_for(**({"features": 4, "hidden": [5], "classes": 3, "records": 10} | wrong))


def test_records_and_maxima_together_are_refused() -> None:
    with pytest.raises(InvalidInput, match="Only one of records and maxima"):
        published_sensitivity(_model(), records=np.ones((1, 4), np.float32), maxima=[1.0, 1.0])

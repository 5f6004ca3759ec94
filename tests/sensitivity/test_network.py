"""The published formulas by hand, the bounds of Table 1 and their conditions, and what retraining says about them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from quietmax.data import Records, hold_out, load
from quietmax.errors import InvalidInput
from quietmax.models import CrossEntropy, Model, Quadratic, TrainingSettings, train
from quietmax.models.stacked import initial_mlp, loss_value, train_stack
from quietmax.sensitivity import published_sensitivity
from quietmax.sensitivity.network import (
    CONDITIONS,
    EmpiricalSensitivity,
    MeasuredFacts,
    Removal,
    UpperBound,
    _mean_of_equivalent,
    _plant,
    _record_gradient_norms,
    empirical_sensitivity,
    measured_facts,
    published_sensitivity_for,
    upper_bounds_for,
)


def _model(hidden=(5,), activation="tanh", features=4, classes=3):
    network = initial_mlp((features, *hidden, classes), activation, (0,))
    return Model(network, TrainingSettings(hidden, activation), records=50, dataset="made up", seed=0)


def test_the_formulas_by_hand_for_two_hidden_layers_with_given_maxima() -> None:
    """The paper's tables, which the formulas reproduce, are for one hidden layer."""
    found = published_sensitivity_for(9, [4, 16], 5, 100, l2=0.02, maxima=[2.0, 0.5, 3.0])
    rho = (4 / 5) / 16 * (3 * 2.0) * (2 * 0.5) * (4 * 3.0)
    weights, lam = 9 * 4 + 4 * 16 + 16 * 5, 0.01
    assert found.rho.value == pytest.approx(rho)
    assert found.weights_l2.value == pytest.approx(2 * rho / (lam * 100))
    assert found.logit.value == pytest.approx(16 * 2 * rho / (lam * 100) / math.sqrt(weights))
    assert found.probability_untruncated.value == pytest.approx(math.exp(2 * found.logit.value) - 1)
    assert found.oaro.value == pytest.approx(2 * rho**2 / (lam * 100))


def test_every_value_knows_its_basis_and_says_it_is_no_bound() -> None:
    for name, entry in vars(published_sensitivity_for(784, [128], 10, 10_000)).items():
        assert entry.basis == "published", name
        assert "not an upper bound" in entry.because


def test_the_probability_is_truncated_at_one_and_never_overflows() -> None:
    found = published_sensitivity_for(10, [1000], 2, 1)
    assert found.probability.value == 1.0
    assert found.probability_untruncated.value == math.inf


def test_without_a_bounded_activation_maxima_are_needed() -> None:
    with pytest.raises(InvalidInput, match="maxima is required for the activation relu"):
        published_sensitivity(_model(activation="relu"))
    assert published_sensitivity(_model(activation="relu"), maxima=[1.0, 2.0]).logit.value > 0
    with pytest.raises(InvalidInput, match="maxima is required for a network without hidden layers"):
        published_sensitivity_for(4, [], 3, 10)
    assert published_sensitivity_for(4, [], 3, 10, maxima=[2.0]).logit.value > 0
    assert published_sensitivity(_model()) == published_sensitivity_for(4, [5], 3, 50)


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


def test_bounds_follow_the_step_and_the_norm_of_the_data_space() -> None:
    """2 eta rho/(1 - (1 - eta lam)^n) tends to 2 rho/(lam n) for small steps, and to 2 eta rho for large ones."""
    small, large = (
        upper_bounds_for(14, 2, 10_000, settings=TrainingSettings(learning_rate=rate))
        for rate in (1e-6, 100.0)
    )
    assert small[3].value == pytest.approx(small[4].value, rel=1e-5)
    rho = small[4].value * 0.0005 * 10_000 / 2
    assert large[3].value == pytest.approx(2 * 100.0 * rho)
    bounds = upper_bounds_for(9, 3, 100)
    assert bounds[1].value / bounds[4].value == pytest.approx(3 * math.sqrt(9) / 2)


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
        loss = loss_value(base, signal @ kernels[-1].T + network.biases[-1][0], labels[record : record + 1])
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


SMALL = TrainingSettings(hidden=(8,), loss=CrossEntropy(), epochs=3, batch_size=10)


@pytest.fixture(scope="module")
def digits() -> Records:
    return load("mnist-5k", records=100, seed=0).train


def test_changes_are_those_between_networks_trained_one_by_one(digits) -> None:
    """A plain loop: train with all records, then without each; compare weights and logits."""
    found = empirical_sensitivity(digits, removals=3, settings=SMALL, queries=digits.features[:7], seed=4)
    planted, rows, kinds = _plant(digits, removals=3, seed=4)
    asked = np.concatenate([digits.features[:7], planted.features[np.concatenate(rows)]])

    def trained(left_out):
        network = train_stack(
            planted.features,
            planted.labels,
            10,
            [np.arange(100)],
            settings=SMALL,
            seeds=[4],
            left_out=[left_out],
        )
        kernels = np.concatenate([kernel.numpy().ravel() for kernel in network.kernels])
        return kernels.astype(float), network.logits(asked).double().numpy()

    weights, logits = trained([])
    for removal, row, kind in zip(found.removals, rows, kinds, strict=True):
        others, other_logits = trained(row)
        assert (removal.rows, removal.kind) == (tuple(row), kind)
        assert removal.weight == pytest.approx(np.abs(others - weights).max(), rel=1e-3)
        assert removal.weights_l2 == pytest.approx(np.linalg.norm(others - weights), rel=1e-3)
        assert removal.logit == pytest.approx(np.abs(other_logits - logits).max(), rel=1e-3)
    assert found.queries == 10
    assert found.logit.value == max(removal.logit for removal in found.removals)
    assert found.logit.basis == "empirical"


def test_planted_records_are_what_they_are_called(digits) -> None:
    planted, rows, kinds = _plant(digits, removals=6, seed=1)
    assert kinds == ["mislabelled", "extreme", "ordinary"] * 2
    for row, kind in zip(rows, kinds, strict=True):
        assert len(row) == 1
        same_label = (planted.labels[row] == digits.labels[row]).all()
        same_features = (planted.features[row] == digits.features[row]).all()
        assert (same_label, same_features) == (kind != "mislabelled", kind != "extreme")
        if kind == "extreme":
            assert set(np.unique(planted.features[row])) <= {0.0, 1.0}
            assert (np.abs(planted.features[row] - digits.features[row]) >= 0.5).all()
    untouched = np.delete(np.arange(100), np.concatenate(rows))
    assert (planted.features[untouched] == digits.features[untouched]).all()
    assert (planted.labels[untouched] == digits.labels[untouched]).all()


def test_the_published_bounds_are_refuted_on_real_digits() -> None:
    """1,000 records, the authors' loss with alpha = 1, the paper's network: THEORY 2.3 on a small scale.

    The bound on the whole weight vector grows as 1/n and is too wide to be exceeded here; the slow test does it.
    """
    data = load("mnist-5k", records=1000, seed=0)
    found = empirical_sensitivity(
        data.train,
        removals=2,
        queries=data.test.features[:200],
        settings=TrainingSettings(epochs=50),
    )
    checks = {
        check.quantity: check for check in found.against(published_sensitivity_for(784, (128,), 10, 1000))
    }
    assert checks["weight"].verdict == "refuted"
    assert checks["logit"].verdict == "refuted"
    assert checks["weights_l2"].verdict == "consistent"
    assert checks["weight"].basis == "published"


@pytest.mark.slow
def test_all_published_bounds_are_refuted_at_the_paper_s_own_setting(real_data) -> None:
    """MNIST, 10,000 records, 100 epochs: one mislabelled record moves a logit, a weight and the weights too far."""
    data = load("mnist", records=10_000, seed=0, data_dir=real_data)
    found = empirical_sensitivity(data.train, removals=3, queries=data.test.features[:1000])
    formulas = published_sensitivity_for(784, (128,), 10, 10_000)
    assert formulas.logit.value == pytest.approx(0.358, abs=1e-3)
    assert [check.verdict for check in found.against(formulas)] == ["refuted"] * 3


def test_the_largest_change_names_the_record_that_caused_it() -> None:
    found = EmpiricalSensitivity(
        (Removal((3,), "ordinary", 0.1, 0.5, 0.2), Removal((5,), "extreme", 0.05, 0.9, 0.1)), 10, 2
    )
    assert found.weight.value == 0.1
    assert "an ordinary record" in found.weight.because
    assert found.weights_l2.value == 0.9
    assert "an extreme record" in found.weights_l2.because
    record = found.to_json()
    assert record["logit"] == 0.2
    assert [removal["rows"] for removal in record["removals"]] == [(3,), (5,)]
    assert record["unit"] == "record"


@pytest.mark.parametrize("removals", [0, 100])
def test_impossible_removals_are_refused(digits, removals) -> None:
    with pytest.raises(InvalidInput, match="removals must be between 1 and"):
        empirical_sensitivity(digits, settings=SMALL, removals=removals)


@pytest.fixture(scope="module")
def visits() -> Records:
    """30 persons with 1 to 4 rows each; the rows of a person do not lie together."""
    dice = np.random.default_rng(0)
    persons = np.repeat([f"p{number}" for number in range(30)], np.arange(30) % 4 + 1).astype(object)
    dice.shuffle(persons)
    features = dice.random((len(persons), 5))
    return Records("visits", features, dice.integers(0, 2, len(persons)), classes=2, persons=persons)


def test_with_persons_all_rows_of_a_person_are_planted_and_left_out(visits) -> None:
    planted, rows, kinds = _plant(visits, removals=6, seed=2)
    for gone, kind in zip(rows, kinds, strict=True):
        (person,) = set(visits.persons[gone])
        np.testing.assert_array_equal(gone, np.flatnonzero(visits.persons == person))
        changed = (planted.labels != visits.labels) | (planted.features != visits.features).any(1)
        assert changed[gone].all() == (kind != "ordinary")
    assert max(len(gone) for gone in rows) > 1
    found = empirical_sensitivity(visits, removals=6, settings=SMALL, seed=2)
    assert [removal.rows for removal in found.removals] == [tuple(gone) for gone in rows]
    assert found.unit == "person"
    assert found.logit.because.endswith(" person.")
    assert found.to_json()["unit"] == "person"

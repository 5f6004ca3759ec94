"""The output route's solver reaches its tolerance for every data set."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from small_heads import Problem, minimisers

from quietmax.errors import InvalidInput
from quietmax.estimators.head_solver import (
    MeanCrossEntropy,
    Objective,
    Tilted,
    certifiable_tolerance,
    minimise,
)
from quietmax.estimators.head_table import Extent, Table, clipped_rows, unit_rows


def table_of(features: np.ndarray, labels: np.ndarray, classes: int) -> Table:
    rows = unit_rows(clipped_rows(features.astype(np.float32), 1.0), np.zeros(features.shape[1]), 0.2)
    return Table(rows.astype(np.float32), labels.astype(np.int64), classes)


def random_table(seed: int, records: int = 40, columns: int = 3, classes: int = 3) -> Table:
    rng = np.random.default_rng(seed)
    return table_of(rng.normal(size=(records, columns)), rng.integers(classes, size=records), classes)


def true_gradient(table: Table, objective: Objective, weights: np.ndarray) -> np.ndarray:
    """By automatic differentiation of the formula."""
    matrix = torch.tensor(weights, requires_grad=True)
    logits = torch.from_numpy(table.rows.astype(np.float64)) @ matrix.T
    losses = torch.nn.functional.cross_entropy(logits, torch.from_numpy(table.labels), reduction="none")
    if isinstance(objective, MeanCrossEntropy):
        value = losses.sum() / objective.size
    else:
        assert isinstance(objective, Tilted)
        value = torch.log(objective.mass + torch.exp(objective.alpha * losses).sum()) / objective.alpha
    value = value + objective.regularisation / 2 * matrix.square().sum()
    value.backward()
    assert matrix.grad is not None
    assert objective.value_and_gradient(table, weights)[0] == pytest.approx(value.item(), rel=1e-12)
    return matrix.grad.numpy()


OBJECTIVES: list[Objective] = [
    MeanCrossEntropy(size=40.0, regularisation=0.01),
    MeanCrossEntropy(size=3.0, regularisation=1.0),
    Tilted(alpha=0.5, mass=40.0, regularisation=0.05),
    Tilted(alpha=5.0, mass=0.1, regularisation=0.5),
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("fast_iterations", [500, 3, 0])
def test_the_tolerance_is_reached_with_and_without_the_fast_solver(objective, fast_iterations):
    table = random_table(0)
    solution = minimise(table, objective, 1e-7, fast_iterations=fast_iterations)
    assert solution.gradient_bound <= 1e-7
    assert np.linalg.norm(true_gradient(table, objective, solution.weights)) <= 1e-7
    assert solution.fast == (fast_iterations == 500)
    np.testing.assert_allclose(solution.weights.sum(axis=0), 0.0, atol=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_the_computed_gradient_is_within_its_rounding_bound(objective):
    rng = np.random.default_rng(1)
    for seed in range(20):
        table = random_table(seed)
        weights = rng.normal(size=(3, 4)) * 10 ** rng.uniform(-2, 1.5)
        error = objective.value_and_gradient(table, weights)[1] - true_gradient(table, objective, weights)
        assert np.linalg.norm(error) <= objective.rounding(table, weights) < 1e-10


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_the_smoothness_bound_holds_along_random_directions(objective):
    rng = np.random.default_rng(2)
    table = random_table(3)
    for _ in range(200):
        weights, direction = rng.normal(size=(3, 4)) * 3, rng.normal(size=(3, 4))
        step = 1e-5 * direction / np.linalg.norm(direction)
        change = objective.value_and_gradient(table, weights + step)[1]
        change = change - objective.value_and_gradient(table, weights - step)[1]
        curvature = float((change * step).sum()) / (2 * 1e-10)
        assert objective.regularisation * (1 - 1e-3) <= curvature <= objective.smoothness(table) * (1 + 1e-3)


def test_the_minimiser_equals_scikit_learns_logistic_regression():
    table = random_table(4, records=200)
    size, regularisation = 200.0, 0.01
    solution = minimise(table, MeanCrossEntropy(size, regularisation), 1e-9)
    reference = LogisticRegression(
        C=1 / (regularisation * size), fit_intercept=False, tol=1e-10, max_iter=10_000
    ).fit(table.rows.astype(np.float64), table.labels)
    np.testing.assert_allclose(solution.weights, reference.coef_, atol=1e-5)


def test_the_minimiser_equals_the_reference_solver():
    table = random_table(5, records=10)
    for objective in (MeanCrossEntropy(7.0, 0.02), Tilted(0.7, 3.0, 0.02)):
        problem = Problem(
            torch.from_numpy(table.rows.astype(np.float64))[None],
            torch.from_numpy(table.labels)[None],
            torch.ones(1, 10, dtype=torch.float64),
            3,
            0.02,
            7.0,
            alpha=objective.alpha if isinstance(objective, Tilted) else None,
            mass=3.0,
        )
        np.testing.assert_allclose(
            minimise(table, objective, 1e-10).weights, minimisers(problem)[0], atol=1e-7
        )


def difficult(name: str) -> Table:
    rng = np.random.default_rng(6)
    if name == "one record":
        return table_of(np.ones((1, 2)), np.array([0]), 2)
    if name == "one class":
        return table_of(rng.normal(size=(30, 2)), np.zeros(30), 3)
    if name == "duplicates with opposite labels":
        return table_of(np.ones((50, 2)), np.arange(50) % 2, 2)
    if name == "extreme values":
        return table_of(rng.choice([-1e30, 1e30, 0.0], size=(30, 2)), rng.integers(2, size=30), 2)
    if name == "a separable line":
        return table_of(np.linspace(-1, 1, 40)[:, None], np.linspace(-1, 1, 40) > 0, 2)
    return table_of(rng.normal(size=(2000, 2)), rng.integers(2, size=2000), 2)


@pytest.mark.parametrize(
    "name",
    [
        "one record",
        "one class",
        "duplicates with opposite labels",
        "extreme values",
        "a separable line",
        "many more records than declared",
    ],
)
@pytest.mark.parametrize("regularisation", [1e-4, 1.0])
@pytest.mark.parametrize("fast_iterations", [500, 0])
def test_difficult_data_are_solved_to_the_tolerance_too(name, regularisation, fast_iterations):
    table = difficult(name)
    size = 20.0
    tolerance = 0.005 * math.sqrt(2) / size
    solution = minimise(
        table, MeanCrossEntropy(size, regularisation), tolerance, fast_iterations=fast_iterations
    )
    assert solution.gradient_bound <= tolerance
    tilted = minimise(table, Tilted(1.0, size, regularisation), 1e-4, fast_iterations=fast_iterations)
    assert tilted.gradient_bound <= 1e-4


@pytest.mark.parametrize(
    ("objective", "features"),
    [
        (MeanCrossEntropy(1e4, 0.002), 4000),
        (MeanCrossEntropy(1e6, 2e-5), 4000),
        (MeanCrossEntropy(50.0, 1e-6), 20),
        (Tilted(4e4, 60.0, 0.01), 21),
        (Tilted(4.0, 1e4, 1e-6), 4000),
    ],
    ids=str,
)
def test_the_rounding_error_stays_below_the_tolerance_wherever_a_certified_minimiser_may_lie(
    objective, features
):
    tolerance = certifiable_tolerance(objective, features, 10, at_least=1e-9)
    farthest = objective.longest(10) + tolerance / objective.regularisation
    for records in (1, objective.foreseen):
        error = objective.rounding(Extent(records, features, 10), np.full((1, 1), farthest))
        assert error <= tolerance / 2


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_the_public_bounds_on_length_and_steepness_hold(objective):
    for seed in range(5):
        table = random_table(seed, records=min(objective.foreseen, 80))
        solution = minimise(table, objective, 1e-7)
        assert np.linalg.norm(solution.weights) <= solution.longest
        assert objective.smoothness(table) <= objective.steepest


def test_settings_too_steep_to_be_minimised_are_refused_from_public_numbers():
    for objective in (MeanCrossEntropy(100.0, 1e-9), Tilted(1e5, 60.0, 1e-4)):
        with pytest.raises(InvalidInput, match="times steeper than it is convex"):
            certifiable_tolerance(objective, 5, 3, at_least=1e-6)


def test_a_tolerance_below_the_rounding_error_is_refused_at_once():
    with pytest.raises(InvalidInput, match="Float64 cannot certify"):
        minimise(random_table(7), MeanCrossEntropy(1e-9, 0.1), 1e-9)

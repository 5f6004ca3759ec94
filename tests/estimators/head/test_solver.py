"""The output route's solver reaches its tolerance for every data set."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from quietmax.errors import InvalidInput
from quietmax.estimators.blocks import Table
from quietmax.estimators.head.exact_sums import _unit_rows, clipped_rows
from quietmax.estimators.head.solver import (
    MeanCrossEntropy,
    Objective,
    Tilted,
    _certifiable_tolerance,
    _max_solution_norm,
    _minimise,
)
from quietmax.sensitivity import certified
from tests.estimators.head.small_heads import Problem, minimisers, movement, random_problems


def table_of(features: np.ndarray, labels: np.ndarray, classes: int) -> Table:
    rows = _unit_rows(clipped_rows(features.astype(np.float32), 1.0), np.zeros(features.shape[1]), 0.2)
    return Table(rows.astype(np.float32), labels.astype(np.int64), classes)


def random_table(seed: int, records: int = 40, columns: int = 3, classes: int = 3) -> Table:
    rng = np.random.default_rng(seed)
    return table_of(rng.normal(size=(records, columns)), rng.integers(classes, size=records), classes)


def true_gradient(table: Table, objective: Objective, weights: np.ndarray) -> np.ndarray:
    """By automatic differentiation of the formula."""
    matrix = torch.tensor(weights, requires_grad=True)
    logits = torch.from_numpy(table.rows.astype(np.float64)) @ matrix.T
    losses = torch.nn.functional.cross_entropy(logits, torch.from_numpy(table.labels), reduction="none")
    shares = torch.ones(len(table)) if table.shares is None else torch.from_numpy(table.shares)
    if isinstance(objective, MeanCrossEntropy):
        value = (losses * shares).sum() / objective.size
    else:
        assert isinstance(objective, Tilted)
        tilted = (torch.exp(objective.alpha * losses) * shares).sum()
        value = torch.log(objective.mass + tilted) / objective.alpha
    value = value + objective.regularisation / 2 * matrix.square().sum()
    value.backward()
    assert matrix.grad is not None
    assert objective._value_and_gradient(table, weights)[0] == pytest.approx(value.item(), rel=1e-12)
    return matrix.grad.numpy()


OBJECTIVES: list[Objective] = [
    MeanCrossEntropy(size=40.0, regularisation=0.01),
    MeanCrossEntropy(size=3.0, regularisation=1.0),
    Tilted(alpha=0.5, mass=40.0, regularisation=0.05),
    Tilted(alpha=5.0, mass=0.1, regularisation=0.5),
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("fast_iterations", [500, 3, 0])
def test_the_tolerance_is_reached_with_and_without_the_fast_solver(
    objective: Any, fast_iterations: int
) -> None:
    table = random_table(0)
    solution = _minimise(table, objective, 1e-7, fast_iterations=fast_iterations)
    assert solution.gradient_bound <= 1e-7
    assert np.linalg.norm(true_gradient(table, objective, solution.weights)) <= 1e-7
    assert solution.fast == (fast_iterations == 500)
    np.testing.assert_allclose(solution.weights.sum(axis=0), 0.0, atol=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("by_person", [False, True], ids=["records", "persons"])
def test_the_computed_gradient_is_within_its_rounding_bound(objective: Any, by_person: bool) -> None:
    rng = np.random.default_rng(1)
    for seed in range(20):
        table = persons_table(rng, 12, 9)[0] if by_person else random_table(seed)
        weights = rng.normal(size=(3, 4)) * 10 ** rng.uniform(-2, 1.5)
        error = objective._value_and_gradient(table, weights)[1] - true_gradient(table, objective, weights)
        bound = objective.rounding(table.units, len(table), weights.shape, weights)
        assert np.linalg.norm(error) <= bound < 1e-10


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_the_smoothness_bound_holds_along_random_directions(objective: Any) -> None:
    rng = np.random.default_rng(2)
    table = random_table(3)
    for _ in range(200):
        weights, direction = rng.normal(size=(3, 4)) * 3, rng.normal(size=(3, 4))
        step = 1e-5 * direction / np.linalg.norm(direction)
        change = objective._value_and_gradient(table, weights + step)[1]
        change = change - objective._value_and_gradient(table, weights - step)[1]
        curvature = float((change * step).sum()) / (2 * 1e-10)
        assert objective.regularisation * (1 - 1e-3) <= curvature <= objective.smoothness(table) * (1 + 1e-3)


def test_the_minimiser_equals_scikit_learns_logistic_regression() -> None:
    table = random_table(4, records=200)
    size, regularisation = 200.0, 0.01
    solution = _minimise(table, MeanCrossEntropy(size, regularisation), 1e-9)
    reference = LogisticRegression(
        C=1 / (regularisation * size), fit_intercept=False, tol=1e-10, max_iter=10_000
    ).fit(table.rows.astype(np.float64), table.labels)
    np.testing.assert_allclose(solution.weights, reference.coef_, atol=1e-5)


def test_the_minimiser_equals_the_reference_solver() -> None:
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
            _minimise(table, objective, 1e-10).weights, minimisers(problem)[0], atol=1e-7
        )


RNG = np.random.default_rng(6)
LINE = np.linspace(-1, 1, 40)
DIFFICULT = {
    "one record": table_of(np.ones((1, 2)), np.array([0]), 2),
    "one class": table_of(RNG.normal(size=(30, 2)), np.zeros(30), 3),
    "duplicates with opposite labels": table_of(np.ones((50, 2)), np.arange(50) % 2, 2),
    "extreme values": table_of(RNG.choice([-1e30, 1e30, 0.0], size=(30, 2)), RNG.integers(2, size=30), 2),
    "a separable line": table_of(LINE[:, None], LINE > 0, 2),
    "many more records than declared": table_of(RNG.normal(size=(2000, 2)), RNG.integers(2, size=2000), 2),
}


@pytest.mark.parametrize("table", DIFFICULT.values(), ids=DIFFICULT)
@pytest.mark.parametrize("regularisation", [1e-4, 1.0])
@pytest.mark.parametrize("fast_iterations", [500, 0])
def test_difficult_data_are_solved_to_the_tolerance_too(
    table: Table, regularisation: float, fast_iterations: int
) -> None:
    size = 20.0
    tolerance = 0.005 * math.sqrt(2) / size
    solution = _minimise(
        table, MeanCrossEntropy(size, regularisation), tolerance, fast_iterations=fast_iterations
    )
    assert solution.gradient_bound <= tolerance
    tilted = _minimise(table, Tilted(1.0, size, regularisation), 1e-4, fast_iterations=fast_iterations)
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
    objective: Any, features: Any
) -> None:
    tolerance = _certifiable_tolerance(objective, features, 10, at_least=1e-9)
    farthest = objective.max_weight_norm(10) + tolerance / objective.regularisation
    for records in (1, objective._max_records):
        error = objective.rounding(records, records, (10, features), np.full((1, 1), farthest))
        assert error <= tolerance / 2


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_the_public_bounds_on_length_and_steepness_hold(objective: Any) -> None:
    for seed in range(5):
        table = random_table(seed, records=min(objective._max_records, 80))
        solution = _minimise(table, objective, 1e-7)
        assert np.linalg.norm(solution.weights) <= _max_solution_norm(objective, 3, 1e-7)
        assert objective.smoothness(table) <= objective._max_smoothness


def test_settings_too_steep_to_be_minimised_are_refused_from_public_numbers() -> None:
    for objective in (MeanCrossEntropy(100.0, 1e-9), Tilted(1e5, 60.0, 1e-4)):
        with pytest.raises(InvalidInput, match="condition number"):
            _certifiable_tolerance(objective, 5, 3, at_least=1e-6)


def test_a_tolerance_below_the_rounding_error_is_refused_at_once() -> None:
    with pytest.raises(InvalidInput, match="Float64 cannot certify"):
        _minimise(random_table(7), MeanCrossEntropy(1e-9, 0.1), 1e-9)


SETTINGS = [  # records, columns, classes, regularisation, size
    (2, 2, 2, 0.1, 2.0),
    (5, 2, 3, 0.01, 5.0),
    (12, 1, 2, 0.001, 3.0),
    (6, 3, 4, 1.0, 100.0),
    (20, 2, 2, 0.003, 20.0),
]


def against_a_crowd(
    length: float, crowd: float, regularisation: float, size: float = 1.0, **tilt: float
) -> Problem:
    """One record of class 0 against `crowd` ones of class 1 in the same direction, but short.

    The crowd makes the head sure of class 1 at the record, so its gradient is nearly as long as any can be; being
    short, the crowd hardly curves the objective, so nothing but the regulariser resists.
    """
    rows = torch.tensor([[[1.0], [length]]], dtype=torch.float64)
    present = torch.tensor([[1.0, crowd]], dtype=torch.float64)
    return Problem(rows, torch.tensor([[0, 1]]), present, 2, regularisation, size, **tilt)  # type: ignore[arg-type]


@pytest.mark.parametrize(("records", "columns", "classes", "regularisation", "size"), SETTINGS)
def test_removing_one_record_moves_the_minimiser_by_at_most_the_bound(
    records: Any, columns: int, classes: int, regularisation: float, size: Any
) -> None:
    generator, constants = torch.Generator().manual_seed(records), {"regularisation": regularisation}
    problem = random_problems(generator, 2000, records, columns, classes, size=size, **constants)
    moved = movement(problem)
    bound = certified.head_output(regularisation=regularisation, declared_size=size)
    lengths = moved.norm(dim=(1, 2))
    assert lengths.max() <= bound.value
    assert lengths.max() > 0.3 * bound.value  # the search is not idle
    queries = torch.nn.functional.normalize(torch.randn(2000, columns, 50, dtype=torch.float64), dim=1)
    logits = moved @ queries
    assert logits.abs().max() <= certified.score_bounds(bound, classes=classes).one.value
    assert logits.norm(dim=1).max() <= certified.score_bounds(bound, classes=classes).vector.value


def test_the_bounds_on_weights_and_logits_are_reached_to_more_than_ninety_percent() -> None:
    regularisation, size = 0.01, 100.0
    moved = movement(against_a_crowd(0.002, 20_000.0, regularisation, size))[0]
    bound = certified.head_output(regularisation=regularisation, declared_size=size)
    assert 0.9 * bound.value < moved.norm() <= bound.value
    one = certified.score_bounds(bound, classes=2).one
    assert 0.9 * one.value < moved[0].abs().max() <= one.value
    together = certified.score_bounds(bound, classes=2).vector
    assert 0.9 * together.value < (moved @ torch.ones(1, dtype=torch.float64)).norm() <= together.value


def test_climbing_towards_the_worst_record_does_not_pass_the_bound() -> None:
    """Survival of the furthest: the record's place and label, its company's places, labels and numbers evolve."""
    generator = torch.Generator().manual_seed(1)
    regularisation, size, batch = 0.01, 50.0, 128
    bound = certified.head_output(regularisation=regularisation, declared_size=size).value
    rows = torch.randn(batch, 4, 2, generator=generator, dtype=torch.float64)
    problem = Problem(
        rows / rows.norm(dim=-1, keepdim=True),
        torch.randint(3, (batch, 4), generator=generator),
        torch.ones(batch, 4, dtype=torch.float64),
        3,
        regularisation,
        size,
    )
    lengths = movement(problem).norm(dim=(1, 2))
    start = float(lengths.max())

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for _ in range(20):
        best = lengths.argsort(descending=True)[:32]
        parents = best.repeat(4)
        shake = 10 ** (-2 * torch.rand(batch, 1, 1, generator=generator, dtype=torch.float64))
        rows = problem.rows[parents] * torch.exp(noise(batch, 4, 1)) + shake * noise(batch, 4, 2)
        rows = rows / rows.norm(dim=-1, keepdim=True).clamp_min(1.0)
        present = (problem.present[parents] * torch.exp(noise(batch, 4))).clamp(1.0, 1e5)
        present[:, 0] = 1.0
        labels = problem.labels[parents].clone()
        redrawn = torch.rand(batch, 4, generator=generator) < 0.1
        labels[redrawn] = torch.randint(3, (int(redrawn.sum()),), generator=generator)
        rows[:32], labels[:32], present[:32] = problem.rows[best], problem.labels[best], problem.present[best]
        problem = Problem(rows, labels, present, 3, regularisation, size)
        lengths = movement(problem).norm(dim=(1, 2))
        assert lengths.max() <= bound
    assert lengths.max() > max(start, 0.8 * bound)


def test_replacing_a_record_moves_the_minimiser_by_at_most_twice_the_bound() -> None:
    problem = random_problems(torch.Generator().manual_seed(3), 400, 6, 2, 3, regularisation=0.01, size=6.0)
    rows, labels = problem.rows.clone(), problem.labels.clone()
    rows[:, 0], labels[:, 0] = -rows[:, 0], (labels[:, 0] + 1) % 3
    replaced = Problem(**{**problem.__dict__, "rows": rows, "labels": labels})
    moved = minimisers(problem) - minimisers(replaced)
    bound = certified.head_output(regularisation=0.01, declared_size=6.0)
    assert moved.norm(dim=(1, 2)).max() <= 2 * bound.value


@pytest.mark.parametrize("alpha", [0.001, 0.1, 1.0, 5.0])
@pytest.mark.parametrize(
    ("classes", "regularisation", "mass"), [(2, 0.05, 10.0), (3, 1.0, 2.0), (4, 0.3, 0.01)]
)
def test_removing_one_record_moves_the_tilted_minimiser_by_at_most_the_bound(
    alpha: float, classes: int, regularisation: float, mass: float
) -> None:
    constants = {"regularisation": regularisation, "alpha": alpha, "mass": mass}
    problem = random_problems(torch.Generator().manual_seed(7), 120, 5, 2, classes, **constants)
    with_record, without_record = minimisers(problem), minimisers(problem.without(0))
    bound = certified.head_tilted(classes=classes, **constants)
    assert (with_record - without_record).norm(dim=(1, 2)).max() <= bound.value
    longest = certified.weight_bound(regularisation, classes)
    assert with_record.norm(dim=(1, 2)).max() <= longest
    logits = torch.einsum("bnd,bcd->bnc", problem.rows, without_record)
    losses = torch.logsumexp(logits, -1) - logits.gather(-1, problem.labels[..., None])[..., 0]
    assert losses.max() <= math.log(classes) + math.sqrt(2) * longest


def test_the_tilted_bound_is_reached_to_more_than_ninety_percent_where_tilting_is_slight() -> None:
    constants = {"regularisation": 3e-6, "alpha": 1e-5, "mass": 4e5}
    moved = movement(against_a_crowd(0.0015, 2e4, **constants))[0].norm()
    bound = certified.head_tilted(classes=2, **constants)
    assert 0.9 * bound.value < moved <= bound.value


def test_the_reference_solver_finds_a_known_minimiser() -> None:
    """One record, two classes: by symmetry W = (t, -t) with lam t = sigma(-2t) / N."""
    problem = Problem(
        torch.ones(1, 1, 1, dtype=torch.float64),
        torch.zeros(1, 1, dtype=torch.int64),
        torch.ones(1, 1, dtype=torch.float64),
        2,
        0.1,
        4.0,
    )
    weights = minimisers(problem)[0, :, 0].numpy()
    t = float(weights[0])
    np.testing.assert_allclose(weights, [t, -t], atol=1e-9)
    assert 0.1 * t == pytest.approx(1 / (1 + math.exp(2 * t)) / 4, abs=1e-9)


def persons_table(
    rng: np.random.Generator, persons: int, rows: int, classes: int = 3
) -> tuple[Table, np.ndarray]:
    """A table whose first person has `rows` rows and the others one to four, and the person of each row."""
    owner = np.repeat(np.arange(persons), np.concatenate([[rows], rng.integers(1, 5, persons - 1)]))
    plain = table_of(rng.normal(size=(len(owner), 3)), rng.integers(classes, size=len(owner)), classes)
    return Table(plain.rows, plain.labels, classes, np.bincount(owner)[owner]), owner


def test_equal_rows_of_a_person_count_as_one_record() -> None:
    plain = random_table(21, records=30)
    repeats = np.random.default_rng(21).integers(1, 50, 30)
    order = np.repeat(np.arange(30), repeats)
    table = Table(plain.rows[order], plain.labels[order], 3, repeats[order])
    assert table.units == 30
    for objective in (MeanCrossEntropy(30.0, 0.02), Tilted(0.7, 30.0, 0.02)):
        one, many = (_minimise(each, objective, 1e-9).weights for each in (plain, table))
        np.testing.assert_allclose(many, one, atol=2e-7)


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_removing_one_person_moves_the_minimiser_by_at_most_the_bound(rows: int) -> None:
    rng = np.random.default_rng(rows)
    largest = 0.0
    for trial in range(30):
        table, owner = persons_table(rng, 12, rows)
        first = owner == 0
        if (
            trial % 2
        ):  # the worst person: all rows in one direction, of another class than the short rows there
            table.rows[first], table.labels[first] = table.rows[0], 0
            table.rows[~first], table.labels[~first] = table.rows[0] * 2.0**-6, 1
        assert table.repeats is not None
        fewer = Table(table.rows[~first], table.labels[~first], 3, table.repeats[~first])
        objective = MeanCrossEntropy(12.0, 0.5)
        plain = certified.head_output(regularisation=0.5, declared_size=12.0, tolerance=1e-8).value
        moved = _minimise(table, objective, 1e-8).weights - _minimise(fewer, objective, 1e-8).weights
        assert np.linalg.norm(moved) <= plain
        largest = max(largest, float(np.linalg.norm(moved)) / plain)
        tilted = Tilted(0.3, 40.0, 0.5)
        bound = certified.head_tilted(
            alpha=0.3, mass=40.0, regularisation=0.5, classes=3, tolerance=1e-8
        ).value
        moved = _minimise(table, tilted, 1e-8).weights - _minimise(fewer, tilted, 1e-8).weights
        assert np.linalg.norm(moved) <= bound
    assert largest > 0.5


def test_the_tolerance_for_persons_covers_any_number_of_rows() -> None:
    objective = MeanCrossEntropy(1000.0, 1e-3)
    tolerance = _certifiable_tolerance(objective, 20, 3, 0.0, repeated=True)
    assert tolerance > _certifiable_tolerance(objective, 20, 3, 0.0)
    farthest = np.full((1, 1), objective.max_weight_norm(3) + tolerance / 1e-3)
    for rows in (objective._max_records, 10**9, 2**31 * 2**20):
        assert objective.rounding(objective._max_records, rows, (3, 20), farthest) <= tolerance / 2

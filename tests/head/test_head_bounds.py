"""Brute force against the certified sensitivities of the head (THEORY 3.1, 3.2)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from small_heads import Problem, minimisers, movement, random_problems

from quietmax.errors import InvalidInput
from quietmax.sensitivity import Sensitivity, certified

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
    records, columns, classes, regularisation, size
):
    problem = random_problems(
        torch.Generator().manual_seed(records),
        2000,
        records,
        columns,
        classes,
        regularisation=regularisation,
        size=size,
    )
    moved = movement(problem)
    bound = certified.head_output(regularisation=regularisation, declared_size=size)
    lengths = moved.norm(dim=(1, 2))
    assert lengths.max() <= bound.value
    assert lengths.max() > 0.3 * bound.value  # the search is not idle
    queries = torch.nn.functional.normalize(torch.randn(2000, columns, 50, dtype=torch.float64), dim=1)
    logits = moved @ queries
    assert logits.abs().max() <= certified.logit(bound, classes=classes).value
    assert logits.norm(dim=1).max() <= certified.logits(bound).value


def test_the_bounds_on_weights_and_logits_are_reached_to_more_than_ninety_percent():
    regularisation, size = 0.01, 100.0
    moved = movement(against_a_crowd(0.002, 20_000.0, regularisation, size))[0]
    bound = certified.head_output(regularisation=regularisation, declared_size=size)
    assert 0.9 * bound.value < moved.norm() <= bound.value
    one = certified.logit(bound, classes=2)
    assert 0.9 * one.value < moved[0].abs().max() <= one.value
    together = certified.logits(bound)
    assert 0.9 * together.value < (moved @ torch.ones(1, dtype=torch.float64)).norm() <= together.value


def test_climbing_towards_the_worst_record_does_not_pass_the_bound():
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


def test_replacing_a_record_moves_the_minimiser_by_at_most_twice_the_bound():
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
    alpha, classes, regularisation, mass
):
    problem = random_problems(
        torch.Generator().manual_seed(7),
        120,
        5,
        2,
        classes,
        regularisation=regularisation,
        alpha=alpha,
        mass=mass,
    )
    with_record, without_record = minimisers(problem), minimisers(problem.without(0))
    bound = certified.head_tilted(alpha=alpha, mass=mass, regularisation=regularisation, classes=classes)
    assert (with_record - without_record).norm(dim=(1, 2)).max() <= bound.value
    longest = certified.weight_bound(regularisation, classes)
    assert with_record.norm(dim=(1, 2)).max() <= longest
    logits = torch.einsum("bnd,bcd->bnc", problem.rows, without_record)
    losses = torch.logsumexp(logits, -1) - logits.gather(-1, problem.labels[..., None])[..., 0]
    assert losses.max() <= math.log(classes) + math.sqrt(2) * longest


def test_the_tilted_bound_is_reached_to_more_than_ninety_percent_where_tilting_is_slight():
    constants = {"regularisation": 3e-6, "alpha": 1e-5, "mass": 4e5}
    moved = movement(against_a_crowd(0.0015, 2e4, **constants))[0].norm()
    bound = certified.head_tilted(classes=2, **constants)
    assert 0.9 * bound.value < moved <= bound.value


def test_the_number_shows_when_tilting_makes_the_sensitivity_useless():
    settings = {"regularisation": 0.01, "classes": 10}
    tilted = certified.head_tilted(alpha=1.0, mass=10_000.0, **settings)
    untilted = certified.head_output(regularisation=0.01, declared_size=10_000)
    assert untilted.value == pytest.approx(0.01414, abs=1e-5)
    assert tilted.value == pytest.approx(42.9, abs=0.05)
    assert certified.tilted_share(alpha=1.0, mass=10_000.0, **settings) > 0.999
    slight = certified.head_tilted(alpha=0.01, mass=10_000.0, **settings)
    assert slight.value == pytest.approx(0.0226, abs=5e-5)


def test_tolerance_and_rounding_are_added_to_the_bounds():
    exact = certified.head_output(regularisation=0.1, declared_size=50)
    loose = certified.head_output(regularisation=0.1, declared_size=50, tolerance=0.01)
    assert loose.value == pytest.approx(exact.value + 0.2, rel=1e-9)
    tilted = {"alpha": 0.1, "mass": 5.0, "regularisation": 0.1, "classes": 3}
    assert certified.head_tilted(**tilted, tolerance=0.01).value == pytest.approx(
        certified.head_tilted(**tilted).value + 0.2, rel=1e-9
    )
    assert certified.head_gradient(0.5, coordinates=100, grid=0.01).value == pytest.approx(0.6, rel=1e-9)


def test_every_certified_sensitivity_says_that_it_is_and_where_it_comes_from():
    weights = certified.head_output(regularisation=0.1, declared_size=50)
    bounds = certified.score_bounds(weights, classes=4, length=2.0)
    for entry in (weights, bounds.one, bounds.vector, certified.head_gradient(1.0)):
        assert entry.basis == "certified"
        assert "THEORY 3" in entry.because
    assert bounds.one.value == pytest.approx(math.sqrt(3 / 4) * 2 * weights.value, rel=1e-9)
    assert bounds.vector.value == pytest.approx(2 * weights.value, rel=1e-9)


@pytest.mark.parametrize(
    "make",
    [
        lambda: certified.head_output(regularisation=0.0, declared_size=10),
        lambda: certified.head_output(regularisation=0.1, declared_size=0),
        lambda: certified.head_output(regularisation=0.1, declared_size=10, tolerance=-1.0),
        lambda: certified.head_output(regularisation=0.1, declared_size=10, radius=math.inf),
        lambda: certified.head_gradient(-0.5),
        lambda: certified.head_tilted(alpha=0.0, mass=1.0, regularisation=1.0, classes=2),
        lambda: certified.head_tilted(alpha=1.0, mass=-1.0, regularisation=1.0, classes=2),
        lambda: certified.weight_bound(1.0, 1),
        lambda: certified.logit(Sensitivity(1.0, "published", "the paper"), classes=2),
        lambda: certified.logits(Sensitivity(1.0, "observed", "retraining")),
    ],
)
def test_constants_without_meaning_are_refused(make):
    with pytest.raises(InvalidInput):
        make()


def test_the_reference_solver_finds_a_known_minimiser():
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

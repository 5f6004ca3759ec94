"""Certified sensitivities: the formulas. That they hold for minimisers is tested with the solver of the head."""

from __future__ import annotations

import math

import pytest

from quietmax.errors import InvalidInput
from quietmax.sensitivity import Sensitivity, certified


def test_the_number_shows_when_tilting_makes_the_sensitivity_useless() -> None:
    settings = {"regularisation": 0.01, "classes": 10}
    tilted = certified.head_tilted(alpha=1.0, mass=10_000.0, **settings)
    untilted = certified.head_output(regularisation=0.01, declared_size=10_000)
    assert untilted.value == pytest.approx(0.01414, abs=1e-5)
    assert tilted.value == pytest.approx(42.9, abs=0.05)
    assert tilted.because.startswith("A record's share of the tilted weight is at most 1 ")
    slight = certified.head_tilted(alpha=0.01, mass=10_000.0, **settings)
    assert slight.value == pytest.approx(0.0226, abs=5e-5)


def test_tolerance_and_rounding_are_added_to_the_bounds() -> None:
    exact = certified.head_output(regularisation=0.1, declared_size=50)
    loose = certified.head_output(regularisation=0.1, declared_size=50, tolerance=0.01)
    assert loose.value == pytest.approx(exact.value + 0.2, rel=1e-9)
    tilted = {"alpha": 0.1, "mass": 5.0, "regularisation": 0.1, "classes": 3}
    assert certified.head_tilted(**tilted, tolerance=0.01).value == pytest.approx(
        certified.head_tilted(**tilted).value + 0.2, rel=1e-9
    )
    assert certified.head_gradient(0.5, coordinates=100, grid=0.01).value == pytest.approx(0.6, rel=1e-9)


def test_every_certified_sensitivity_says_that_it_is_and_where_it_comes_from() -> None:
    weights = certified.head_output(regularisation=0.1, declared_size=50)
    bounds = certified.score_bounds(weights, classes=4)
    for entry in (weights, bounds.one, bounds.vector, certified.head_gradient(1.0)):
        assert entry.basis == "certified"
        assert "THEORY 3" in entry.because
    assert bounds.one.value == pytest.approx(math.sqrt(3 / 4) * weights.value, rel=1e-9)
    assert bounds.vector.value == pytest.approx(weights.value, rel=1e-9)


@pytest.mark.parametrize(
    "make",
    [
        lambda: certified.head_output(regularisation=0.0, declared_size=10),
        lambda: certified.head_output(regularisation=0.1, declared_size=0),
        lambda: certified.head_output(regularisation=0.1, declared_size=10, tolerance=-1.0),
        lambda: certified.head_output(regularisation=0.1, declared_size=math.inf),
        lambda: certified.head_gradient(-0.5),
        lambda: certified.head_tilted(alpha=0.0, mass=1.0, regularisation=1.0, classes=2),
        lambda: certified.head_tilted(alpha=1.0, mass=-1.0, regularisation=1.0, classes=2),
        lambda: certified.weight_bound(1.0, 1),
        lambda: certified.score_bounds(Sensitivity(1.0, "published", "the paper"), classes=2),
        lambda: certified.score_bounds(Sensitivity(1.0, "empirical", "retraining"), classes=2),
    ],
)
def test_constants_without_meaning_are_refused(make) -> None:
    with pytest.raises(InvalidInput):
        make()

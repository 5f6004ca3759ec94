"""Bounds on scores and the spread that follows from them (THEORY 3.3); the certified formulas of a head.

That these hold for minimisers is tested with the head's solver.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp

from quietmax.errors import InvalidInput
from quietmax.sensitivity import ScoreBounds, Sensitivity, certified
from tests.mechanisms.made_up import bounds, neighbours


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
    ],
)
def test_constants_without_meaning_are_refused(make) -> None:
    with pytest.raises(InvalidInput):
        make()


@given(
    one=st.floats(0.01, 10),
    vector=st.floats(0.01, 10),
    classes=st.integers(2, 12),
    seed=st.integers(0, 10**6),
)
def test_differences_and_log_odds_move_by_at_most_the_spread(one, vector, classes, seed) -> None:
    limits = bounds(one, vector)
    first, second = neighbours(np.random.default_rng(seed), classes, limits)
    for v in range(classes):
        others = [w for w in range(classes) if w != v]
        moved = abs((first[v] - logsumexp(first[others])) - (second[v] - logsumexp(second[others])))
        assert moved <= limits.spread * (1 + 1e-9)
        for w in others:
            assert abs((first[v] - first[w]) - (second[v] - second[w])) <= limits.spread * (1 + 1e-9)


def test_the_spread_is_reached_by_opposite_moves_of_two_logits_and_two_for_votes() -> None:
    assert bounds(0.5, 100.0).spread == pytest.approx(1.0)
    assert bounds(100.0, 0.6).spread == pytest.approx(2 * 0.6 / math.sqrt(2))
    assert bounds(1.0, math.sqrt(2)).spread == pytest.approx(2.0)


@pytest.mark.parametrize("basis", ["published", "empirical"])
def test_only_certified_sensitivities_make_bounds(basis) -> None:
    entry = Sensitivity(0.5, basis, "made up")
    for make in (lambda: ScoreBounds(entry, entry), lambda: certified.score_bounds(entry, classes=2)):
        with pytest.raises(InvalidInput, match="certified"):
            make()


def test_a_sensitivity_keeps_plain_types_only() -> None:
    class Text(str):
        __slots__ = ()

    class Own(Sensitivity):
        pass

    for value in (1, np.float32(1.0), np.float64(1.0)):
        kept: object = Sensitivity(value, "certified", "made up").value  # type: ignore[arg-type]
        assert (type(kept), kept) == (float, 1.0)
    for wrong in ("a lot", None):
        with pytest.raises(InvalidInput, match="must be a number"):
            Sensitivity(wrong, "certified", "made up")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="plain strings, got Text and str"):
        Sensitivity(1.0, Text("certified"), "made up")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="plain strings, got str and Text"):
        Sensitivity(1.0, "certified", Text("made up"))
    plain, own = Sensitivity(1.0, "certified", "made up"), Own(1.0, "certified", "made up")
    for pair in ((own, plain), (plain, own)):
        with pytest.raises(InvalidInput, match="type Sensitivity itself, got Own"):
            ScoreBounds(*pair)

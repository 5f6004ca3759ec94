"""Bounds on scores: the spread that follows from them, and what they are made of (THEORY 3.3)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp

from quietmax.errors import InvalidInput
from quietmax.sensitivity import ScoreBounds, Sensitivity
from tests.mechanisms.made_up import bounds, neighbours


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


def test_the_spread_is_reached() -> None:
    one_bound = bounds(0.5, 100.0)  # opposite moves of two logits
    assert one_bound.spread == pytest.approx(1.0)
    two_bound = bounds(100.0, 0.6)
    move = np.array([1.0, -1.0]) * 0.6 / math.sqrt(2)
    assert two_bound.spread == pytest.approx(move[0] - move[1])


def test_votes_have_a_spread_of_two() -> None:
    assert bounds(1.0, math.sqrt(2)).spread == pytest.approx(2.0)


@pytest.mark.parametrize("basis", ["published", "empirical"])
def test_only_certified_sensitivities_make_bounds(basis) -> None:
    entry = Sensitivity(0.5, basis, "made up")
    with pytest.raises(InvalidInput, match="certified"):
        ScoreBounds(entry, entry)


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

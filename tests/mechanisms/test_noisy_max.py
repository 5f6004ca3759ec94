"""The proven mechanisms: distributions, costs, and that neighbours differ by no more than stated (THEORY 3.3, 3.4)."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from quietmax.accounting import GaussianCost, PureCost
from quietmax.mechanisms import GaussianScores, NoisyMax, SampledNeuron
from quietmax.mechanisms import base as noisy_max_module
from quietmax.mechanisms.base import _onto_simplex
from quietmax.models.training import softmax
from quietmax.noise import EXACT, SeededNoise
from tests.mechanisms.made_up import bounds, neighbours, spied

BOUNDS = bounds()


FALSE_ALARM = 1e-7


@given(epsilon=st.floats(1e-3, 20), classes=st.integers(2, 8), seed=st.integers(0, 10**6))
def test_the_exponential_choice_never_exceeds_epsilon_on_neighbours(epsilon, classes, seed) -> None:
    """The distribution itself, not samples: log-ratios lie within epsilon, and their range too (bounded range)."""
    limits = bounds()
    first, second = neighbours(np.random.default_rng(seed), classes, limits)
    ratios = np.log(softmax(epsilon * first / limits.spread)) - np.log(
        softmax(epsilon * second / limits.spread)
    )
    assert np.abs(ratios).max() <= epsilon * (1 + 1e-9)
    assert ratios.max() - ratios.min() <= epsilon * (1 + 1e-9)


@pytest.mark.parametrize("source", [EXACT, SeededNoise(2)], ids=["exact", "seeded"])
def test_the_choice_has_the_stated_distribution(source) -> None:
    scores, limits = np.array([1.0, 0.3, -0.8, 0.9]), bounds()
    chosen = NoisyMax("exponential", bounds=limits, per_query=PureCost(2.0)).release(
        np.tile(scores, (30_000, 1)), source
    )
    expected = 30_000 * softmax(2.0 * scores / limits.spread)
    assert stats.chisquare(np.bincount(chosen.labels, minlength=4), expected).pvalue > FALSE_ALARM
    assert chosen.probabilities is None


def test_gaussian_noisy_max_has_the_stated_distribution() -> None:
    """Two classes: the difference of two scores carries N(0, 2*sigma^2)."""
    limits, scores = bounds(), np.array([0.4, 0.0])
    mechanism = NoisyMax("gaussian", bounds=limits, per_query=GaussianCost(0.5))
    labels = mechanism.release(np.tile(scores, (40_000, 1)), EXACT).labels
    sigma = limits.vector.value / 0.5
    expected = stats.norm.sf(0.4, scale=math.sqrt(2) * sigma)
    assert stats.binomtest(int((labels == 1).sum()), 40_000, expected).pvalue > FALSE_ALARM


def test_permute_and_flip_is_right_at_least_as_often_as_the_exponential_mechanism() -> None:
    """McKenna and Sheldon 2020; a one-sided test at false-alarm probability 1e-7."""
    scores = np.tile([3.0, 2.0, 1.0, 0.0, 0.0, 0.0], (40_000, 1))
    right = {
        method: int(
            (
                NoisyMax(method, bounds=bounds(1, math.sqrt(2)), per_query=PureCost(1.0))
                .release(scores, EXACT)
                .labels
                == 0
            ).sum()
        )
        for method in ("exponential", "permute-and-flip")
    }
    gain = (right["permute-and-flip"] - right["exponential"]) / math.sqrt(2 * 40_000 * 0.25)
    assert gain > 5.2


@given(
    rows=st.integers(1, 5), classes=st.integers(2, 9), scale=st.floats(1e-3, 1e3), seed=st.integers(0, 10**6)
)
def test_projection_gives_the_nearest_probabilities(rows, classes, scale, seed) -> None:
    points = np.random.default_rng(seed).normal(0, scale, (rows, classes))
    projected = _onto_simplex(points)
    np.testing.assert_allclose(projected.sum(1), 1.0, atol=1e-9 * max(scale, 1))
    assert (projected >= 0).all()
    # Optimality: no feasible direction towards a vertex comes closer.
    for row, vertex in itertools.product(range(rows), range(classes)):
        step = np.eye(classes)[vertex] - projected[row]
        assert (points[row] - projected[row]) @ step <= 1e-7 * max(scale, 1)


def test_a_label_is_counted_in_the_measure_asked_for() -> None:
    assert NoisyMax("exponential").measure == NoisyMax("permute-and-flip").measure == "pure"
    assert NoisyMax("exponential", count_in="pure").measure == "pure"
    assert NoisyMax("exponential", count_in="gaussian").measure == "gaussian"
    assert NoisyMax("gaussian").measure == NoisyMax("gaussian", count_in="gaussian").measure == "gaussian"
    assert GaussianScores().measure == SampledNeuron("gaussian").measure == "gaussian"
    assert SampledNeuron("laplace").measure == "pure"


def test_the_reason_names_the_mechanism() -> None:
    for method, reason in (
        ("gaussian", "Gaussian mechanism"),
        ("exponential", "Exponential mechanism"),
        ("permute-and-flip", "Permute-and-flip"),
    ):
        cost = GaussianCost(1.0) if method == "gaussian" else PureCost(1.0)
        guarantee = NoisyMax(method, bounds=BOUNDS, per_query=cost).guarantee(3)
        assert guarantee.because.startswith(reason)
        assert guarantee.parameters["method"] == method


def test_votes_are_projected_and_logits_go_through_the_softmax() -> None:
    sure = GaussianCost(1e6)
    votes = GaussianScores(votes=10, bounds=BOUNDS, per_query=sure).release(
        np.array([[7.0, 3.0, 0.0]]), EXACT
    )
    np.testing.assert_allclose(votes.probabilities, [[0.7, 0.3, 0.0]], atol=1e-5)
    logits = GaussianScores(bounds=BOUNDS, per_query=sure).release(np.array([[7.0, 3.0, 0.0]]), EXACT)
    np.testing.assert_allclose(logits.probabilities, softmax(np.array([[7.0, 3.0, 0.0]])), atol=1e-5)


def test_probabilities_are_left_as_they_are_by_the_projection() -> None:
    points = np.array([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    np.testing.assert_allclose(_onto_simplex(points), points, atol=1e-15)
    np.testing.assert_allclose(_onto_simplex(points + 4.0), points, atol=1e-15)


def test_all_scores_of_a_query_are_noised_and_rounded_together(monkeypatch) -> None:
    for mechanism in (GaussianScores(), NoisyMax("gaussian")):
        spy = spied(monkeypatch, noisy_max_module, "release_gaussian")
        dataclasses.replace(mechanism, bounds=BOUNDS, per_query=GaussianCost(1.0)).release(
            np.zeros((5, 4)), EXACT
        )
        assert spy.given[0]["coordinates"] == 4
        assert spy.given[0]["sensitivity"] == BOUNDS.vector.value

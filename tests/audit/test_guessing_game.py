"""The guessing game of a one-run audit: its bounds hold where the law is known, and equal published figures."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq, linprog
from scipy.special import ndtr, ndtri
from scipy.stats import binom, norm

from quietmax.audit.guessing import (
    _mass_needed,
    epsilon_lower_bound,
    mu_lower_bound,
    tail_under_epsilon,
)
from quietmax.errors import InvalidInput


@pytest.mark.parametrize(
    ("canaries", "guesses", "right", "delta", "published"),
    [(1000, 100, 75, 1e-4, 0.673), (100_000, 1510, 1439, 1e-5, 2.675)],
    ids=["appendix D", "section 7"],
)
def test_figures_printed_by_steinke_nasr_and_jagielski_come_out(canaries, guesses, right, delta, published):
    """arXiv:2305.08846v1, at 95%; the second figure is cut off, not rounded."""
    bound = epsilon_lower_bound(canaries, guesses, right, delta=delta, confidence=0.95)
    assert bound == pytest.approx(published, abs=1e-3)


@given(
    canaries=st.integers(1, 300),
    share=st.floats(0, 1),
    epsilon=st.floats(0, 4),
    delta=st.sampled_from([0.0, 1e-3, 0.05]),
    confidence=st.sampled_from([0.8, 0.99]),
)
@settings(max_examples=60)
def test_the_bound_on_epsilon_is_wrong_with_at_most_the_stated_probability(
    canaries, share, epsilon, delta, confidence
):
    """Randomised response that tells everything with probability delta, guessing about a fixed part of the canaries.

    Its law is known, so the probability of an error is summed, not sampled.
    """
    guesses = max(1, int(share * canaries))
    right = np.arange(guesses + 1)
    law = (1 - delta) * binom.pmf(right, guesses, 1 / (1 + math.exp(-epsilon)))
    law[-1] += delta
    rejected = [tail_under_epsilon(canaries, guesses, v, epsilon, delta) <= 1 - confidence for v in right]
    assert law[rejected].sum() <= (1 - confidence) * (1 + 1e-9)


@given(canaries=st.integers(2, 50), mu=st.floats(0.1, 3), confidence=st.sampled_from([0.8, 0.99]))
@settings(max_examples=20)
def test_the_bound_on_mu_is_wrong_with_at_most_the_stated_probability(canaries, mu, confidence):
    """One number with Gaussian noise per canary: each guess is right with probability Phi(mu/2)."""
    right = np.arange(canaries + 1)
    law = binom.pmf(right, canaries, norm.cdf(mu / 2))
    wrong = [mu_lower_bound(canaries, canaries, int(v), confidence=confidence) > mu for v in right]
    assert law[wrong].sum() <= (1 - confidence) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("canaries", "guesses", "right", "mu"), [(8, 8, 7, 0.7), (12, 6, 6, 1.0), (20, 10, 8, 0.3)]
)
def test_the_least_mass_is_the_solution_of_the_linear_programme(canaries, guesses, right, mu):
    """Independently: maximise P[N >= v] over all laws that obey the inequalities, F replaced by its tangents."""
    levels = np.arange(guesses + 1)
    rows, limits = [], []
    for k in range(1, guesses + 1):
        for point in ndtr(np.linspace(-9, 4, 400)):
            value = ndtr(ndtri(point) + mu)
            slope = norm.pdf(ndtri(point) + mu) / norm.pdf(ndtri(point))
            correct = np.where(levels >= k, levels, 0) / canaries
            wrong = np.where(levels >= k - 1, guesses - levels, 0) / canaries
            rows.append(correct - slope * wrong)
            limits.append(value - slope * point)
    solved = linprog(
        -(levels >= right).astype(float),
        A_ub=np.array(rows),
        b_ub=np.array(limits),
        A_eq=np.ones((1, guesses + 1)),
        b_eq=[1.0],
        bounds=(0, 1),
    )
    assert solved.success

    def excess(tail):
        needed = _mass_needed(np.array([mu]), canaries, guesses, right, 0.0, tail)
        return float(needed[0]) - guesses / canaries

    assert brentq(excess, 1e-12, 1.0, xtol=1e-12) == pytest.approx(-solved.fun, rel=2e-3)


def test_bounds_grow_with_right_guesses_and_fall_with_confidence_and_delta():
    bounds = [mu_lower_bound(1000, 100, right, confidence=0.95) for right in (50, 70, 90, 100)]
    assert bounds == sorted(bounds)
    assert bounds[0] == 0
    assert mu_lower_bound(1000, 100, 90, confidence=0.999) < bounds[2]
    assert mu_lower_bound(1000, 100, 90, extra_delta=1e-3, confidence=0.95) < bounds[2]
    assert epsilon_lower_bound(1000, 100, 90, delta=1e-3, confidence=0.95) < epsilon_lower_bound(
        1000, 100, 90, confidence=0.95
    )


@pytest.mark.parametrize("numbers", [(10, 11, 5), (10, 5, 6), (10, 0, 0), (10, 5, -1)])
def test_impossible_games_are_refused(numbers):
    with pytest.raises(InvalidInput, match="impossible"):
        mu_lower_bound(*numbers, confidence=0.95)
    with pytest.raises(InvalidInput, match="impossible"):
        tail_under_epsilon(*numbers, 1.0)


@pytest.mark.parametrize(("epsilon", "delta"), [(-1, 0), (float("nan"), 0), (1, -0.1), (1, 1.1)])
def test_a_claim_that_is_none_is_refused(epsilon, delta):
    with pytest.raises(InvalidInput, match="at least 0"):
        tail_under_epsilon(10, 10, 5, epsilon, delta)


@pytest.mark.parametrize("bound", [epsilon_lower_bound, mu_lower_bound])
@pytest.mark.parametrize("confidence", [0, 1, -1, float("nan")])
def test_a_confidence_that_is_none_is_refused(bound, confidence):
    with pytest.raises(InvalidInput, match="strictly between 0 and 1"):
        bound(10, 10, 5, confidence=confidence)

"""Lower bounds from counts: the exact interval covers, and the search for events does not break the confidence."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import ndtr

from quietmax import audit
from quietmax.accounting import GaussianCost, Guarantee, PureCost
from quietmax.audit.bounds import Counts, approximate_lower_bounds, largest_probability, smallest_probability
from quietmax.audit.report import Claim
from quietmax.errors import InvalidInput


@given(trials=st.integers(1, 60), probability=st.floats(1e-6, 1), error=st.sampled_from([0.2, 0.01, 1e-6]))
@settings(max_examples=40)
def test_each_side_of_the_interval_misses_with_at_most_the_stated_probability(trials, probability, error):
    """Summed over every possible count, not sampled."""
    happened = np.arange(trials + 1)
    law = stats.binom.pmf(happened, trials, probability)
    low = np.array([smallest_probability(int(count), trials, error) for count in happened])
    high = np.array([largest_probability(int(count), trials, error) for count in happened])
    assert law[low > probability * (1 + 1e-12)].sum() <= error * (1 + 1e-9)
    assert law[high < probability * (1 - 1e-12)].sum() <= error * (1 + 1e-9)


def test_the_interval_is_the_published_one():
    """Clopper and Pearson's own example: 95% for 10 of 20 is 0.272 to 0.728."""
    assert smallest_probability(10, 20, 0.025) == pytest.approx(0.272, abs=5e-4)
    assert largest_probability(10, 20, 0.025) == pytest.approx(0.728, abs=5e-4)


def test_bounds_close_in_on_the_truth_as_trials_grow():
    trials = 10**8
    counts = Counts(round(trials * ndtr(0.5)), round(trials * ndtr(-0.5)), trials)
    assert counts.mu_lower_bound(0.0, 0.999) == pytest.approx(1.0, abs=2e-3)
    counts = Counts(trials // 2, round(trials / 2 * math.exp(-1)), trials)
    assert counts.epsilon_lower_bound(0.0, 0.999) == pytest.approx(1.0, abs=2e-3)
    assert counts.epsilon_lower_bound(0.1, 0.999) == pytest.approx(math.log(0.8) + 1, abs=2e-3)


@given(likely=st.integers(0, 1000), unlikely=st.integers(0, 1000), delta=st.sampled_from([0.0, 1e-5, 0.3]))
def test_bounds_are_never_negative_and_fall_with_delta(likely, unlikely, delta):
    counts = Counts(likely, unlikely, 1000)
    for parameter in ("epsilon", "mu"):
        bound = counts.lower_bound(parameter, delta, 0.999)
        assert 0 <= bound <= counts.lower_bound(parameter, 0.0, 0.999)
        assert counts.lower_bound(parameter, delta, 0.999999) <= bound


def test_the_approximation_used_in_the_search_is_close_where_counts_are_not_small():
    likely, unlikely = np.array([5000, 700]), np.array([2000, 200])
    for parameter in ("epsilon", "mu"):
        near = approximate_lower_bounds(likely, unlikely, 10_000, parameter, 0.0, 0.999)
        exact = [
            Counts(int(one), int(other), 10_000).lower_bound(parameter, 0.0, 0.999)
            for one, other in zip(likely, unlikely, strict=True)
        ]
        assert near == pytest.approx(exact, rel=0.02)


def test_a_claim_is_read_off_costs_and_guarantees():
    assert Claim.of(GaussianCost(0.5)).parameter == "mu"
    approximate = Guarantee("approximate", epsilon=2.0, delta=1e-6, because="Under test.")
    assert Claim.of(approximate) == Claim("approximate", 2.0, 1e-6)
    assert Claim.of(approximate).parameter == "epsilon"
    with_delta = Guarantee("gaussian", mu=1.0, extra_delta=1e-7, because="Under test.")
    assert Claim.of(with_delta) == Claim("gaussian", 1.0, 1e-7)
    assert Claim.of(GaussianCost(1.0)).epsilon(1e-5) == pytest.approx(4.377, abs=1e-3)
    assert Claim.of(PureCost(3.0)).epsilon(1e-5) == 3.0


def test_the_confidence_holds_although_the_event_is_searched_for():
    """Two equal worlds: any positive bound is an error. 150 audits at 90%: more than 46 errors have chance 1e-11."""
    dice = np.random.default_rng(5)
    wrong = 0
    for _ in range(150):
        report = audit.distinguish(
            lambda draws: dice.normal(size=(draws, 3)),
            lambda draws: dice.normal(size=(draws, 3)),
            PureCost(0.0),
            samples=400,
            confidence=0.9,
        )
        wrong += report.verdict == "refuted"
    assert stats.binom.sf(46, 150, 0.1) < 1e-11
    assert wrong <= 46


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_noise_on_a_number_is_measured_to_within_a_fifth(law):
    """The bound fails to reach four fifths of the truth, or exceeds it, with probability below 1e-6."""
    dice = np.random.default_rng(3)
    noise = dice.normal if law == "gaussian" else dice.laplace
    claim = GaussianCost(1.0) if law == "gaussian" else PureCost(1.0)
    report = audit.distinguish(
        lambda draws: noise(0.0, 1.0, draws),
        lambda draws: noise(1.0, 1.0, draws),
        claim,
        samples=60_000,
        confidence=1 - 1e-7,
    )
    assert report.verdict == "consistent"
    assert report.share > 0.8
    assert report.epsilon_lower_bound <= report.epsilon_claimed


def test_a_value_that_noise_leaves_untouched_is_found():
    """Noise on one of three numbers, drawn anew: the difference of the other two gives the world away."""
    dice = np.random.default_rng(4)

    def leaky(gap):
        def draw(draws):
            numbers = np.tile([gap, 0.0, 1.0], (draws, 1)) + dice.normal(0, 50.0, (draws, 1))
            numbers[np.arange(draws), dice.integers(0, 3, draws)] += dice.normal(0, 50.0, draws)
            return numbers

        return draw

    report = audit.distinguish(leaky(0.0), leaky(1e-3), PureCost(1.0), samples=8000)
    assert report.verdict == "refuted"
    assert "repeat" in report.evidence


def test_a_rare_leak_is_found():
    """A release that tells the truth once in 200 draws is not private, whatever it does otherwise."""
    dice = np.random.default_rng(6)

    def sometimes(world):
        return lambda draws: np.where(dice.random(draws) < 0.005, 100.0 * world, dice.normal(0, 1.0, draws))

    report = audit.distinguish(sometimes(-1), sometimes(1), PureCost(1.0), samples=60_000)
    assert report.verdict == "refuted"


def test_a_delta_that_was_claimed_is_granted():
    """The same leak is within (1, 0.01)-privacy."""
    dice = np.random.default_rng(6)

    def sometimes(world):
        return lambda draws: np.where(dice.random(draws) < 0.005, 100.0 * world, dice.normal(0, 1.0, draws))

    claim = Guarantee("approximate", epsilon=1.0, delta=0.01, because="Under test.")
    report = audit.distinguish(sometimes(-1), sometimes(1), claim, samples=60_000, confidence=1 - 1e-7)
    assert report.verdict == "consistent"
    assert report.delta == 0.01


def test_a_report_is_json_and_a_table():
    dice = np.random.default_rng(0)
    report = audit.distinguish(
        lambda draws: dice.normal(size=draws),
        lambda draws: dice.normal(4.0, 1.0, draws),
        GaussianCost(1.0),
        samples=2000,
        subject="two normals",
    )
    record = report.to_json()
    assert record["verdict"] == "refuted"
    assert record["subject"] == "two normals"
    assert record["lower_bound"] > record["claimed"] == 1.0
    rows = dict(report.rows())
    assert rows["verdict"] == "refuted"
    assert rows["mu claimed"] == "1"
    assert "epsilon at least at delta 1e-05" in rows


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"samples": 10}, "too few"),
        ({"confidence": 1.0}, "confidence"),
        ({"delta": 0.0}, "delta"),
    ],
)
def test_wrong_settings_are_refused(arguments, words):
    with pytest.raises(InvalidInput, match=words):
        audit.distinguish(np.zeros, np.zeros, PureCost(1.0), **arguments)


def test_numbers_that_are_not_numbers_are_refused():
    with pytest.raises(InvalidInput, match="NaN"):
        audit.distinguish(lambda draws: np.full(draws, np.nan), np.zeros, PureCost(1.0))
    with pytest.raises(InvalidInput, match="missing"):
        audit.distinguish(lambda draws: np.zeros((draws, 0)), np.zeros, PureCost(1.0))
    with pytest.raises(InvalidInput, match="same release"):
        audit.distinguish(lambda draws: np.zeros((draws, 2)), np.zeros, PureCost(1.0))
    with pytest.raises(InvalidInput, match="same release"):
        audit.distinguish(lambda draws: np.zeros(draws - 1), np.zeros, PureCost(1.0))

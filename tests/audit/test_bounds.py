from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.optimize import brentq, linprog
from scipy.special import ndtr, ndtri
from scipy.stats import binom, norm

from quietmax.accounting import GaussianCost, Guarantee, PureCost
from quietmax.accounting.dpsgd import Schedule, loss_delta
from quietmax.accounting.guarantee import Definition
from quietmax.attacks.metrics import clopper_pearson
from quietmax.audit.bounds import (
    Claim,
    CountedEvent,
    CountedGuesses,
    EventCounts,
    SampledSteps,
    SummedSignals,
    _guess_tail,
    _mass_needed,
    _mu_from_guesses,
    epsilon_from_guesses,
)
from quietmax.audit.distinguishing import _rating
from quietmax.errors import InvalidInput

DEFINITIONS: tuple[Definition, ...] = ("approximate", "gaussian")


def bound_of(counts: EventCounts, definition: Definition, delta: float, confidence: float) -> float:
    """The bound on epsilon or mu, whatever is claimed of it."""
    return Claim(definition, 1.0, delta)._lower_bound(counts, confidence)


@given(trials=st.integers(1, 60), probability=st.floats(1e-6, 1), error=st.sampled_from([0.2, 0.01, 1e-6]))
@settings(max_examples=40)
def test_each_limit_is_wrong_with_at_most_the_stated_probability(
    trials: int, probability: float, error: float
) -> None:
    """Summed over every possible count, not sampled."""
    happened = np.arange(trials + 1)
    distribution = stats.binom.pmf(happened, trials, probability)
    low, high = np.transpose([clopper_pearson(int(count), trials, error) for count in happened])
    assert distribution[low > probability * (1 + 1e-12)].sum() <= error * (1 + 1e-9)
    assert distribution[high < probability * (1 - 1e-12)].sum() <= error * (1 + 1e-9)


def test_bounds_approach_the_truth_as_trials_grow() -> None:
    trials = 10**8
    counts = EventCounts(round(trials * ndtr(0.5)), round(trials * ndtr(-0.5)), trials)
    assert bound_of(counts, "gaussian", 0.0, 0.999) == pytest.approx(1.0, abs=2e-3)
    counts = EventCounts(trials // 2, round(trials / 2 * math.exp(-1)), trials)
    assert bound_of(counts, "approximate", 0.0, 0.999) == pytest.approx(1.0, abs=2e-3)
    assert bound_of(counts, "approximate", 0.1, 0.999) == pytest.approx(math.log(0.8) + 1, abs=2e-3)


@given(likely=st.integers(0, 1000), unlikely=st.integers(0, 1000), delta=st.sampled_from([0.0, 1e-5, 0.3]))
def test_bounds_are_never_negative_and_fall_with_delta(likely: int, unlikely: int, delta: float) -> None:
    counts = EventCounts(likely, unlikely, 1000)
    for definition in DEFINITIONS:
        bound = bound_of(counts, definition, delta, 0.999)
        assert 0 <= bound <= bound_of(counts, definition, 0.0, 0.999)
        assert bound_of(counts, definition, delta, 0.999999) <= bound


def test_the_approximation_of_the_search_is_close_if_counts_are_not_small() -> None:
    likely, unlikely = np.array([5000, 700]), np.array([2000, 200])
    for definition in DEFINITIONS:
        near = _rating(Claim(definition, 1.0), 0.999)(likely, unlikely, 10_000)
        exact = [
            bound_of(EventCounts(int(one), int(other), 10_000), definition, 0.0, 0.999)
            for one, other in zip(likely, unlikely, strict=True)
        ]
        assert near == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize(
    ("canaries", "guesses", "right", "delta", "published"),
    [(1000, 100, 75, 1e-4, 0.673), (100_000, 1510, 1439, 1e-5, 2.675)],
    ids=["appendix D", "section 7"],
)
def test_bounds_are_those_printed_by_steinke_nasr_and_jagielski(
    canaries: int, guesses: int, right: int, delta: float, published: float
) -> None:
    """arXiv:2305.08846v1, at 95%; the second figure is cut off, not rounded."""
    bound = epsilon_from_guesses(canaries, guesses, right, delta=delta, confidence=0.95)
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
    canaries: int, share: float, epsilon: float, delta: float, confidence: float
) -> None:
    """Randomised response that tells everything with probability delta, guessing about a fixed part of the canaries.

    Its distribution is known, so the probability of an error is summed, not sampled.
    """
    guesses = max(1, int(share * canaries))
    right = np.arange(guesses + 1)
    distribution = (1 - delta) * binom.pmf(right, guesses, 1 / (1 + math.exp(-epsilon)))
    distribution[-1] += delta
    rejected = [_guess_tail(canaries, guesses, v, epsilon, delta) <= 1 - confidence for v in right]
    assert distribution[rejected].sum() <= (1 - confidence) * (1 + 1e-9)


@given(canaries=st.integers(2, 50), mu=st.floats(0.1, 3), confidence=st.sampled_from([0.8, 0.99]))
@settings(max_examples=20)
def test_the_bound_on_mu_is_wrong_with_at_most_the_stated_probability(
    canaries: int, mu: float, confidence: float
) -> None:
    """One number with Gaussian noise per canary: each guess is right with probability Phi(mu/2)."""
    right = np.arange(canaries + 1)
    distribution = binom.pmf(right, canaries, norm.cdf(mu / 2))
    wrong = [_mu_from_guesses(canaries, canaries, int(v), confidence=confidence) > mu for v in right]
    assert distribution[wrong].sum() <= (1 - confidence) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("canaries", "guesses", "right", "mu"), [(8, 8, 7, 0.7), (12, 6, 6, 1.0), (20, 10, 8, 0.3)]
)
def test_the_least_mass_is_the_solution_of_the_linear_programme(
    canaries: int, guesses: int, right: int, mu: float
) -> None:
    """Maximise P[N >= v] over all distributions that obey the inequalities, F replaced by its tangents."""
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

    def excess(tail: float) -> float:
        needed = _mass_needed(np.array([mu]), canaries, guesses, right, 0.0, tail)
        return float(needed[0]) - guesses / canaries

    assert brentq(excess, 1e-12, 1.0, xtol=1e-12) == pytest.approx(-solved.fun, rel=2e-3)


def test_bounds_grow_with_right_guesses_and_fall_with_confidence_and_delta() -> None:
    bounds = [_mu_from_guesses(1000, 100, right, confidence=0.95) for right in (50, 70, 90, 100)]
    assert bounds == sorted(bounds)
    assert bounds[0] == 0
    assert _mu_from_guesses(1000, 100, 90, confidence=0.999) < bounds[2]
    assert _mu_from_guesses(1000, 100, 90, extra_delta=1e-3, confidence=0.95) < bounds[2]
    assert epsilon_from_guesses(1000, 100, 90, delta=1e-3, confidence=0.95) < epsilon_from_guesses(
        1000, 100, 90, confidence=0.95
    )


@pytest.mark.parametrize("bound", [epsilon_from_guesses, _mu_from_guesses])
def test_impossible_numbers_of_guesses_and_confidences_are_errors(bound: Any) -> None:
    for numbers in ((10, 11, 5), (10, 5, 6), (10, 0, 0), (10, 5, -1)):
        with pytest.raises(InvalidInput, match="must satisfy"):
            bound(*numbers, confidence=0.95)
    for confidence in (0, 1, -1, math.nan):
        with pytest.raises(InvalidInput, match="strictly between 0 and 1"):
            bound(10, 10, 5, confidence=confidence)


def test_the_estimated_power_is_how_often_repetitions_refute() -> None:
    """An event of probability 0.7 against 0.2 and the claim epsilon = 1: ln(0.7/0.2) = 1.25.

    The estimate has 400 repetitions and the comparison 300: they differ by 0.2 with probability below 1e-6.
    """
    claim = Claim._of(PureCost(1.0))
    generator = np.random.default_rng(0)
    for trials, least, most in ((150, 0.0, 0.3), (1000, 0.5, 0.9), (4000, 0.99, 1.0)):
        event = CountedEvent(EventCounts(7 * trials // 10, 2 * trials // 10, trials), claim, 0.99)
        assert least <= event._power() <= most
        drawn = generator.binomial(trials, [0.7, 0.2], (300, 2))
        refuted = [claim._lower_bound(EventCounts(int(p), int(q), trials), 0.99) > 1 for p, q in drawn]
        assert abs(np.mean(refuted) - event._power()) < 0.2
    needed = CountedEvent(EventCounts(105, 30, 150), claim, 0.99)._samples_needed()
    assert needed is not None
    assert 2000 < needed < 6000  # half of the samples bound the event
    assert CountedEvent(EventCounts(50, 50, 100), claim, 0.99)._samples_needed() is None


def test_the_estimated_power_of_guesses_is_a_binomial_tail() -> None:
    claim = Claim._of(PureCost(0.5))
    least = next(right for right in range(101) if _guess_tail(100, 100, right, 0.5) <= 0.05)
    guesses = CountedGuesses(100, 100, 80, claim, 0.95)
    assert guesses._power() == pytest.approx(stats.binom.sf(least - 1, 100, 80.5 / 101))
    assert CountedGuesses(100, 100, 80, Claim._of(PureCost(10.0)), 0.95)._power() == 0.0
    noisy = [
        CountedGuesses(100, 100, 80, Claim._of(GaussianCost(mu)), 0.95)._power() for mu in (0.1, 1.0, 5.0)
    ]
    assert noisy[0] > 0.99 > noisy[1] > noisy[2]


def test_the_curve_of_sampled_steps_permits_every_test_of_them_and_half_the_noise_exceeds_it() -> None:
    """The likelihood ratio test of the claimed steps stays within the curve: at 1 - 1e-7 it never leaves the limits."""
    claimed = SampledSteps(0.885, Schedule(0.5, 4))
    assert claimed._epsilon(1e-5) == pytest.approx(8.0, abs=0.01)
    generator = np.random.default_rng(0)
    refuted = {}
    for share in (1.0, 0.5):
        sigma = share * claimed.noise_multiplier
        without = generator.normal(0, sigma, (4000, 4))
        inside = generator.normal(0, sigma, (4000, 4)) + (generator.random((4000, 4)) < 0.5)
        first, second = (
            np.log1p(0.5 * np.expm1((2 * moved - 1) / (2 * sigma**2))).sum(1) for moved in (without, inside)
        )
        counts = EventCounts(int((second > 0).sum()), int((first > 0).sum()), 4000)
        limits = counts._limits(1 - 1e-7)
        refuted[share] = bool(limits[0] > claimed._permitted(limits[1]))
        assert (claimed._lower_bound(*limits, 1e-5) > 8.01) == refuted[share]
    assert refuted == {1.0: False, 0.5: True}


@pytest.mark.parametrize(("p", "q"), [(0.5, 0.1), (0.6, 0.3), (0.9, 0.2)])
def test_the_bound_of_sampled_steps_states_no_more_than_the_limits_prove(p: float, q: float) -> None:
    """The noise that the limits just do not reject has at least the stated epsilon, and hardly more."""
    claimed, delta = SampledSteps(0.885, Schedule(1.0, 1)), 1e-5
    low, high = 0.1, 10.0
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        rejected = p > SampledSteps(middle, claimed.schedule)._permitted(q)
        low, high = (low, middle) if rejected else (middle, high)
    bound = claimed._lower_bound(p, q, delta)
    assert loss_delta(low, bound, claimed.schedule) >= delta
    assert loss_delta(low, 1.001 * bound, claimed.schedule) < delta


def test_a_large_epsilon_of_sampled_steps_can_be_refuted() -> None:
    steps = SampledSteps(1 / 13, Schedule(1.0, 1))
    claim = Claim("approximate", steps._epsilon(1e-5), 1e-5, steps)
    assert claim.amount > 128
    assert loss_delta(1 / 13, 1.001 * claim.amount, steps.schedule) < 1e-5
    counts = EventCounts(10**13, 0, 10**13)
    assert claim._rejected(*map(np.array, counts._limits(0.99)))
    assert claim._lower_bound(counts, 0.99) > claim.amount


def test_a_bound_far_beyond_the_claim_is_that_of_noise_that_is_rejected() -> None:
    steps, counts = SampledSteps(2.0, Schedule(1.0, 1)), EventCounts(10**6, 0, 10**6)
    quarter = SampledSteps(0.5, steps.schedule)
    p, q = counts._limits(0.99)
    assert p > quarter._permitted(q)
    assert steps._lower_bound(*counts._limits(0.99), 1e-5) == pytest.approx(quarter._epsilon(1e-5))


def test_a_claim_is_read_from_costs_and_guarantees() -> None:
    assert Claim._of(GaussianCost(0.5)).parameter == "mu"
    approximate = Guarantee("approximate", epsilon=2.0, delta=1e-6, because="Under test.")
    assert Claim._of(approximate) == Claim("approximate", 2.0, 1e-6)
    assert Claim._of(approximate).parameter == "epsilon"
    with_delta = Guarantee("gaussian", mu=1.0, extra_delta=1e-7, because="Under test.")
    assert Claim._of(with_delta) == Claim("gaussian", 1.0, 1e-7)
    assert Claim._of(GaussianCost(1.0))._stated(1e-5)["epsilon_claimed"] == pytest.approx(4.377, abs=1e-3)
    assert Claim._of(PureCost(3.0))._stated(1e-5)["epsilon_claimed"] == 3.0


def summed(
    mu: float, seed: int, *, canaries: int = 200, share: float = 1.0, adversary: str = "all"
) -> SummedSignals:
    """The signals of one run whose canaries move them by at most mu; ``share`` of the noise of a claim of 1."""
    rng = np.random.default_rng(seed)
    inside, noise = rng.random(canaries) < 0.5, share * rng.normal(size=canaries)
    moved = np.full(canaries, mu)
    if adversary == "some":  # What a canary does depends on the noise of the others and on its own
        moved = np.where((np.roll(noise, 1) > 0) | (noise > 0), mu, -mu)
    return SummedSignals._of(7.0 + inside * moved + noise, inside, Claim("gaussian", 1.0), 0.95)


@pytest.mark.parametrize("adversary", ["all", "some"])
def test_the_bound_from_sums_exceeds_a_true_mu_with_at_most_the_stated_probability(adversary: str) -> None:
    """Of 1,500 runs at 95%, more than 130 exceed it with probability below 1e-7."""
    audits = 1500
    wrong = sum(summed(1.0, seed, adversary=adversary)._lower_bound() > 1.0 for seed in range(audits))
    assert stats.binom.sf(130, audits, 0.05) < 1e-7
    assert wrong <= 130
    # Where every canary moves its signal by mu the bound is exact: fewer than 35 have probability below 1e-7.
    assert stats.binom.cdf(34, audits, 0.05) < 1e-7
    assert wrong >= 35 or adversary == "some"


def test_sums_show_most_of_mu_and_refute_half_the_noise_where_guesses_show_about_half() -> None:
    """4,000 canaries with mu = 2: the bound at 95% is about 1.9, with a standard deviation of 0.04."""
    honest, weaker = summed(2.0, 1, canaries=4000), summed(1.0, 2, canaries=4000, share=0.5)
    assert 0.85 < honest._lower_bound() / 2 < 1.02
    assert weaker._lower_bound() > 1.5
    true = summed(1.0, 3, canaries=4000)
    assert true._power(0.5) > 0.999999
    assert true._power(1.0) < 0.9
    # The power is how often repetitions refute: 400 of them, wrong by 6 standard deviations with probability 1e-8.
    few = SummedSignals(50, 50, 1.3, Claim("gaussian", 1.0), 0.95)
    rng = np.random.default_rng(0)
    inside = np.arange(100) < 50
    refuted = sum(
        SummedSignals._of(rng.normal(size=100) + 1.3 * inside, inside, few.claim, 0.95)._lower_bound() > 1
        for _ in range(400)
    )
    assert abs(refuted / 400 - few._power()) < 6 * 0.5 / math.sqrt(400)


def test_the_tail_of_sums_is_that_of_the_t_distribution_and_the_rest_of_a_claim_is_kept_apart() -> None:
    signals = summed(1.0, 5)
    root = math.sqrt(1 / signals.inside + 1 / signals.outside)
    expected = stats.nct.sf(1.4 / root, signals.outside - 1, 1.0 / root)
    assert signals._tail(1.0, 1.4) == pytest.approx(expected, rel=1e-6)
    strict = SummedSignals(
        signals.inside, signals.outside, signals.distance, Claim("gaussian", 1.0, 1e-4), 0.95
    )
    assert strict._error == pytest.approx(0.05 - 200e-4)
    assert strict._lower_bound() < signals._lower_bound()
    hopeless = SummedSignals(100, 100, 3.0, Claim("gaussian", 1.0, 1e-3), 0.95)
    assert hopeless._lower_bound() == pytest.approx(0.0, abs=1e-9)


def test_signals_without_noise_are_as_far_apart_as_can_be_and_other_claims_are_errors() -> None:
    inside = np.arange(100) < 50
    clear = SummedSignals._of(np.where(inside, 1.0, 0.0), inside, Claim("gaussian", 1.0), 0.95)
    assert clear._lower_bound() > 20
    for claim, chosen in ((Claim("pure", 1.0), inside), (clear.claim, np.arange(100) < 3)):
        with pytest.raises(
            InvalidInput, match="require a claim of mu and at least 8 canaries on either side"
        ):
            SummedSignals._of(np.zeros(100), chosen, claim, 0.95)

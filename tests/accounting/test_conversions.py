"""mu against (epsilon, delta): the closed form at hundreds of digits, dp-accounting, and brute force."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.special import ndtri
from scipy.stats import norm

from quietmax.accounting import delta_of, epsilon_of, mu_of, pure_as_gaussian
from quietmax.accounting.costs import (
    _stepped,
    as_number,
    bounded_range_as_gaussian,
    decimal,
    root_rounded_down,
    root_rounded_up,
    rounded_down,
    rounded_up,
)
from quietmax.errors import InvalidInput


def one_up(value: float, times: int = 1) -> float:
    for _ in range(times):
        value = math.nextafter(value, math.inf)
    return value


powers_of_ten = st.floats(-6, 2).map(lambda power: 10.0**power)
deltas = st.floats(-300, math.log10(0.5)).map(lambda power: 10.0**power)


def true_delta(mu: float, epsilon: float) -> mpmath.mpf:
    """The formula of theory section 2.5, literally, with 80 digits."""
    with mpmath.workdps(80):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)

        def above(x):
            return mpmath.erfc(x / mpmath.sqrt(2)) / 2

        return above(epsilon / mu - mu / 2) - mpmath.exp(epsilon) * above(epsilon / mu + mu / 2)


def test_the_three_numbers_of_the_theory_page() -> None:
    assert delta_of(1.0, 1.0) == pytest.approx(0.127, abs=5e-4)
    assert epsilon_of(1.0, 1e-5) == pytest.approx(4.38, abs=5e-3)
    assert mu_of(1.0, 1e-5) == pytest.approx(0.268, abs=5e-4)


@settings(deadline=None, max_examples=200)
@given(powers_of_ten, st.floats(-10, 37))
def test_delta_is_never_below_the_true_value_and_at_most_three_in_1e11_above(mu, place) -> None:
    epsilon = max(0.0, mu * (place + mu / 2))
    truth = true_delta(mu, epsilon)
    assume(truth >= mpmath.mpf("1e-300"))
    computed = mpmath.mpf(delta_of(mu, epsilon))
    assert truth <= computed <= truth * (1 + mpmath.mpf("3e-11"))


@pytest.mark.parametrize("mu", [1e-12, 1e3, 1e4, 1e6])
@pytest.mark.parametrize("place", [-30.0, 0.0, 5.0, 36.0])
def test_delta_stays_safe_beyond_the_range_of_use(mu, place) -> None:
    for epsilon in np.linspace(0.99999, 1.00001, 7) * max(0.0, mu * (place + mu / 2)):
        truth = true_delta(mu, float(epsilon))
        assert truth <= mpmath.mpf(delta_of(mu, float(epsilon)))


@settings(deadline=None, max_examples=100)
@given(powers_of_ten, deltas)
def test_epsilon_is_safe_and_tight(mu, delta) -> None:
    epsilon = epsilon_of(mu, delta)
    assert true_delta(mu, epsilon) <= delta
    if epsilon > 0.0:
        assert true_delta(mu, max(epsilon * (1 - 1e-9) - 1e-9 * mu, 0.0)) > delta


@settings(deadline=None, max_examples=100)
@given(st.floats(-8, 4).map(lambda power: 10.0**power), deltas)
def test_mu_is_safe_and_tight(epsilon, delta) -> None:
    mu = mu_of(epsilon, delta)
    assert true_delta(mu, epsilon) <= delta
    assert true_delta(mu * (1 + 1e-9), epsilon) > delta


@pytest.mark.parametrize("mu", [1e-6, 1e-3, 0.4999, 0.5, 0.5001, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("delta", [1e-300, 1e-100, 1e-15, 1e-5, 0.1, 0.5])
def test_there_and_back_again_at_the_extremes(mu, delta) -> None:
    epsilon = epsilon_of(mu, delta)
    if epsilon > 0.0:
        assert mu_of(epsilon, delta) == pytest.approx(mu, rel=1e-8)
    else:
        assert delta_of(mu, 0.0) <= delta


def test_without_epsilon_delta_is_the_total_variation() -> None:
    for mu in (1e-6, 0.1, 1.0, 10.0):
        assert delta_of(mu, 0.0) == pytest.approx(2 * norm.cdf(mu / 2) - 1, rel=1e-9)
    assert mu_of(0.0, 1e-300) == pytest.approx(1e-300 * math.sqrt(2 * math.pi), rel=1e-9)


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (4.0, 10), (30.0, 1000)])
def test_dp_accounting_agrees_for_composed_gaussian_mechanisms(sigma, steps) -> None:
    reference = pld.from_gaussian_mechanism(sigma, value_discretization_interval=1e-4).self_compose(steps)
    mu = math.sqrt(steps) / sigma
    for epsilon in (0.5, 1.0, 3.0):
        assert delta_of(mu, epsilon) == pytest.approx(reference.get_delta_for_epsilon(epsilon), rel=5e-3)
    for delta in (1e-3, 1e-6):
        assert epsilon_of(mu, delta) == pytest.approx(reference.get_epsilon_for_delta(delta), rel=2e-3)


@settings(deadline=None, max_examples=100)
@given(st.floats(-12, 3).map(lambda power: 10.0**power))
def test_the_mu_of_a_pure_step_is_rounded_up_from_the_formula(epsilon) -> None:
    with mpmath.workdps(60):
        corner = 1 / (1 + mpmath.exp(mpmath.mpf(epsilon)))
        # mu is right when the Gaussian curve passes through the corner: Phi(-mu/2) = corner; larger mu is safe
        mu = mpmath.mpf(pure_as_gaussian(epsilon))
        assert mpmath.ncdf(-mu / 2) <= corner <= mpmath.ncdf(-mu * (1 - mpmath.mpf("1e-12")) / 2)


def test_the_small_epsilon_factors_of_the_theory_page() -> None:
    assert pure_as_gaussian(1e-6) / 1e-6 == pytest.approx(math.sqrt(math.pi / 2), rel=1e-6)
    assert bounded_range_as_gaussian(1e-6) / 1e-6 == pytest.approx(math.sqrt(math.pi / 8), rel=1e-6)


@pytest.mark.parametrize("epsilon", [0.01, 0.3, 1.0, 4.0, 20.0])
def test_randomised_response_never_beats_the_gaussian_curve_of_a_pure_step(epsilon) -> None:
    mu = pure_as_gaussian(epsilon)
    false_alarms = np.linspace(1e-6, 1 - 1e-6, 4001)
    misses = np.maximum.reduce(
        [
            np.zeros_like(false_alarms),
            1 - np.exp(epsilon) * false_alarms,
            np.exp(-epsilon) * (1 - false_alarms),
        ]
    )
    gaussian_misses = norm.cdf(-ndtri(false_alarms) - mu)
    assert np.all(gaussian_misses <= misses + 1e-12)
    assert np.min(misses - gaussian_misses) < 1e-4  # the curves touch: no smaller mu would do


@pytest.mark.parametrize("epsilon", [0.01, 0.3, 1.0, 4.0, 20.0])
def test_no_bounded_range_pair_needs_more_than_the_conversion_gives(epsilon) -> None:
    # The worst pair of log-ratios in [t - epsilon, t]: binary, q = (exp(-t) - exp(-epsilon))/(1 - exp(-epsilon)).
    t = np.linspace(0, epsilon, 20_001)[1:-1]
    q = np.exp(-t) * -np.expm1(t - epsilon) / -np.expm1(-epsilon)
    p = -np.expm1(t - epsilon) / -np.expm1(-epsilon)
    needed = ndtri(p) - ndtri(q)
    mu = bounded_range_as_gaussian(epsilon)
    assert needed.max() <= mu * (1 + 1e-12)
    assert needed.max() == pytest.approx(mu, rel=1e-6)
    assert needed.argmax() == pytest.approx(t.size // 2, abs=2)


@settings(deadline=None, max_examples=100)
@given(st.integers(2, 6), st.integers(0, 2**32), st.floats(0.05, 8.0))
def test_random_exponential_mechanisms_stay_within_their_gaussian_conversion(
    candidates, seed, epsilon
) -> None:
    generator = np.random.default_rng(seed)
    scores = generator.normal(size=candidates) * 3
    moves = generator.uniform(-0.5, 0.5, candidates)
    laws = []
    for values in (scores, scores + moves):
        weights = np.exp(epsilon * values - np.max(epsilon * values))
        laws.append(weights / weights.sum())
    first, second = laws
    mu = bounded_range_as_gaussian(epsilon)
    for at in (0.0, 0.2 * epsilon, 0.5 * epsilon, 0.9 * epsilon):
        delta = max(np.maximum(a - np.exp(at) * b, 0).sum() for a, b in ((first, second), (second, first)))
        assert delta <= delta_of(mu, at) + 1e-12


@pytest.mark.parametrize("steps", [1, 20, 500])
def test_composed_laplace_mechanisms_stay_within_their_gaussian_conversion(steps) -> None:
    epsilon = 0.1
    reference = pld.from_laplace_mechanism(1 / epsilon, value_discretization_interval=1e-3).self_compose(
        steps
    )
    mu = math.sqrt(steps) * pure_as_gaussian(epsilon)
    for at in (0.1, 0.5, 1.0, 2.0):
        assert reference.get_delta_for_epsilon(at) <= delta_of(mu, at) + 1e-9


def test_more_privacy_loss_is_never_less() -> None:
    mus = np.geomspace(1e-6, 100, 60)
    for epsilon in (0.0, 0.1, 5.0):
        values = [delta_of(mu, epsilon) for mu in mus]
        assert values == sorted(values)
    for delta in (1e-300, 1e-9, 0.3):
        values = [epsilon_of(mu, delta) for mu in mus]
        assert values == sorted(values)


def test_nothing_spent_is_perfect_privacy() -> None:
    assert delta_of(0.0, 0.0) == 0.0
    assert epsilon_of(0.0, 1e-9) == 0.0
    assert pure_as_gaussian(0.0) == 0.0


def test_a_delta_too_small_to_state_is_not_stated() -> None:
    assert delta_of(0.01, 100.0) == 1e-300
    with pytest.raises(InvalidInput):
        epsilon_of(1.0, 1e-301)
    with pytest.raises(InvalidInput):
        mu_of(1.0, 0.0)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, None, "one"])
def test_what_is_no_privacy_parameter_is_refused(bad) -> None:
    for call in (
        lambda: delta_of(bad, 1.0),
        lambda: delta_of(1.0, bad),
        lambda: epsilon_of(bad, 1e-5),
        lambda: epsilon_of(1.0, bad),
        lambda: mu_of(bad, 1e-5),
        lambda: mu_of(1.0, bad),
        lambda: pure_as_gaussian(bad),
        lambda: bounded_range_as_gaussian(bad),
    ):
        with pytest.raises(InvalidInput):
            call()


def true_delta_of_gaussian_limits(mu: float, epsilon: float) -> mpmath.mpf:
    with mpmath.workdps(400):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
        near, far = (mpmath.erfc((epsilon / mu + sign * mu / 2) / mpmath.sqrt(2)) / 2 for sign in (-1, 1))
        return near - mpmath.exp(epsilon) * far


@pytest.mark.parametrize("mu", [1e-6, 0.01, 0.3, 0.49, 0.5, 0.51, 1.0, 4.0, 20.0, 60.0])
def test_delta_is_rounded_up_by_less_than_two_in_1e11(mu) -> None:
    for place in (-20.0, -3.0, -0.5, -1e-9, 0.0, 1e-9, 0.5, 3.0, 12.0, 30.0):
        epsilon = max(0.0, mu * (place + mu / 2))
        truth = true_delta_of_gaussian_limits(mu, epsilon)
        assert truth <= mpmath.mpf(delta_of(mu, epsilon)) < truth * (1 + mpmath.mpf("2e-11"))


def test_no_delta_is_larger_than_one_however_little_is_private() -> None:
    assert delta_of(1e3, 0.0) == 1.0
    assert delta_of(50.0, 1.0) == 1.0


def test_no_delta_is_smaller_than_1e_300_however_much_is_private() -> None:
    for mu, epsilon in ((0.5, 5e16), (0.01, 1e9), (3.0, 1e200), (1e-9, 1.0)):
        assert delta_of(mu, epsilon) == 1e-300


def test_deltas_from_1e_300_to_below_one_are_taken() -> None:
    for delta in (1e-300, math.nextafter(1.0, 0.0)):
        assert delta_of(1.0, epsilon_of(1.0, delta)) <= delta
        assert delta_of(mu_of(1.0, delta), 1.0) <= delta
    for delta in (0.0, math.nextafter(1e-300, 0.0), 1.0):
        for function in (epsilon_of, mu_of):
            with pytest.raises(InvalidInput, match="at least 1e-300 and below 1"):
                function(1.0, delta)


@pytest.mark.parametrize("mu", [1e-3, 0.3, 1.0, 10.0])
def test_the_delta_of_no_epsilon_needs_none_and_a_hair_less_needs_hardly_any(mu) -> None:
    delta = delta_of(mu, 0.0)
    assert epsilon_of(mu, delta) == 0.0
    for share in (1 - 1e-15, 1 - 5e-12, 1 - 1e-10):
        epsilon = epsilon_of(mu, delta * share)
        assert 0.0 <= epsilon < 1.0
        assert delta_of(mu, epsilon) <= delta * share


@pytest.mark.parametrize("delta", [1e-300, 1e-40, 1e-5, 0.4])
def test_epsilon_and_mu_are_found_to_ten_digits(delta) -> None:
    for mu in (1e-6, 0.2, 1.0, 7.0, 90.0):
        epsilon = epsilon_of(mu, delta)
        if epsilon > 0.0:
            assert (
                true_delta_of_gaussian_limits(mu, epsilon)
                <= delta
                < true_delta_of_gaussian_limits(mu, epsilon * (1 - 1e-10) - 1e-10 * mu)
            )
    for epsilon in (0.0, 1e-8, 0.5, 30.0, 1e5):
        mu = mu_of(epsilon, delta)
        assert (
            true_delta_of_gaussian_limits(mu, epsilon)
            <= delta
            < true_delta_of_gaussian_limits(mu * (1 + 1e-10), epsilon)
        )


def test_a_root_is_left_by_the_smallest_power_of_two_that_is_safe() -> None:
    for least in (2.0**-44, 2.0**-43, 2.0**-40):
        assert _stepped(lambda step: step, least.__le__) == least


@pytest.mark.parametrize("delta", [1e-300, 1e-5, 0.5, 0.9])
def test_a_mu_is_found_for_every_epsilon_there_is(delta) -> None:
    for epsilon in (0.0, 1e-300, 1e-12, 39.0, 41.0, 1e9, 1e100, 1e300):
        mu = mu_of(epsilon, delta)
        assert delta_of(mu, epsilon) <= delta
        # delta is about Phi(-x) where mu is large, and about mu/sqrt(2 pi) where epsilon is nothing.
        if epsilon == 1e9:
            quantile = -float(ndtri(delta))
            assert mu == pytest.approx(math.sqrt(quantile**2 + 2 * epsilon) - quantile, rel=1e-9)
        if epsilon == 0.0:
            assert math.erf(mu / math.sqrt(8)) == pytest.approx(delta, rel=1e-9)


@pytest.mark.parametrize("epsilon", [1e-12, 0.5, 0.999999, 1.0, 1.000001, 3.0, 700.0])
def test_a_pure_step_is_converted_to_thirteen_digits_rounded_up(epsilon) -> None:
    with mpmath.workdps(60):
        corner = 1 / (1 + mpmath.exp(mpmath.mpf(epsilon)))
        mu = mpmath.mpf(pure_as_gaussian(epsilon))
        assert mpmath.ncdf(-mu / 2) < corner < mpmath.ncdf(-mu * (1 - mpmath.mpf("1e-13")) / 2)


def test_what_is_exact_is_not_rounded_at_all() -> None:
    for value in (0.0, 0.1, 1.0, 3.5, 1e-50, 123456.789):
        assert rounded_up(decimal(value)) == rounded_down(decimal(value)) == value
        assert root_rounded_up(decimal(value) ** 2) == root_rounded_down(decimal(value) ** 2) == value


@given(st.fractions(min_value=Fraction(1, 10**12), max_value=10**12))
def test_roots_are_rounded_to_the_very_next_float(value) -> None:
    up, down = root_rounded_up(value), root_rounded_down(value)
    assert decimal(math.nextafter(up, 0.0)) ** 2 < value <= decimal(up) ** 2
    assert decimal(down) ** 2 <= value < decimal(math.nextafter(down, math.inf)) ** 2


def test_a_root_a_hair_below_or_above_a_decimal_is_still_rounded_to_the_very_next_float() -> None:
    hair, generator = Fraction(1, 10**18), random.Random(0)
    for _ in range(500):
        root = generator.uniform(0.01, 10.0)
        square = decimal(root) ** 2
        assert root_rounded_up(square * (1 - hair)) == root_rounded_down(square * (1 + hair)) == root
        assert root_rounded_up(square * (1 + hair)) == math.nextafter(root, math.inf)
        assert root_rounded_down(square * (1 - hair)) == math.nextafter(root, 0.0)


@pytest.mark.parametrize("value", [10**400, "x", None, []])
def test_what_no_float_can_be_is_no_number(value) -> None:
    assert math.isnan(as_number(value))


@given(st.fractions(min_value=Fraction(1, 10**9), max_value=10**9))
def test_outward_rounding_goes_outwards_by_at_most_one_float(value) -> None:
    assert decimal(rounded_down(value)) <= value <= decimal(rounded_up(value))
    assert rounded_up(value) <= one_up(rounded_down(value))
    assert decimal(root_rounded_down(value)) ** 2 <= value <= decimal(root_rounded_up(value)) ** 2
    assert root_rounded_up(value) <= one_up(root_rounded_down(value))

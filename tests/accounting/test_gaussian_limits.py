"""The Gaussian currency at the ends of its range, where formulas take over from each other and deltas are 0 or 1."""

from __future__ import annotations

import math

import mpmath
import pytest
from scipy.special import ndtri

from quietmax.accounting import delta_of, epsilon_of, mu_of, pure_as_gaussian
from quietmax.errors import InvalidInput


def true_delta(mu: float, epsilon: float) -> mpmath.mpf:
    with mpmath.workdps(400):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
        near, far = (mpmath.erfc((epsilon / mu + sign * mu / 2) / mpmath.sqrt(2)) / 2 for sign in (-1, 1))
        return near - mpmath.exp(epsilon) * far


@pytest.mark.parametrize("mu", [1e-6, 0.01, 0.3, 0.49, 0.5, 0.51, 1.0, 4.0, 20.0, 60.0])
def test_delta_is_rounded_up_by_less_than_two_in_1e11(mu):
    for place in (-20.0, -3.0, -0.5, -1e-9, 0.0, 1e-9, 0.5, 3.0, 12.0, 30.0):
        epsilon = max(0.0, mu * (place + mu / 2))
        truth = true_delta(mu, epsilon)
        assert truth <= mpmath.mpf(delta_of(mu, epsilon)) < truth * (1 + mpmath.mpf("2e-11"))


def test_no_delta_is_larger_than_one_however_little_is_private():
    assert delta_of(1e3, 0.0) == 1.0
    assert delta_of(50.0, 1.0) == 1.0


def test_no_delta_is_smaller_than_1e_300_however_much_is_private():
    for mu, epsilon in ((0.5, 5e16), (0.01, 1e9), (3.0, 1e200), (1e-9, 1.0)):
        assert delta_of(mu, epsilon) == 1e-300


def test_deltas_from_1e_300_to_below_one_are_taken():
    for delta in (1e-300, math.nextafter(1.0, 0.0)):
        assert delta_of(1.0, epsilon_of(1.0, delta)) <= delta
        assert delta_of(mu_of(1.0, delta), 1.0) <= delta
    for delta in (0.0, math.nextafter(1e-300, 0.0), 1.0):
        for function in (epsilon_of, mu_of):
            with pytest.raises(InvalidInput, match="at least 1e-300 and less than 1"):
                function(1.0, delta)


@pytest.mark.parametrize("mu", [1e-3, 0.3, 1.0, 10.0])
def test_the_delta_of_no_epsilon_needs_none_and_a_hair_less_needs_hardly_any(mu):
    delta = delta_of(mu, 0.0)
    assert epsilon_of(mu, delta) == 0.0
    for share in (1 - 1e-15, 1 - 5e-12, 1 - 1e-10):
        epsilon = epsilon_of(mu, delta * share)
        assert 0.0 <= epsilon < 1.0
        assert delta_of(mu, epsilon) <= delta * share


@pytest.mark.parametrize("delta", [1e-300, 1e-40, 1e-5, 0.4])
def test_epsilon_and_mu_are_found_to_ten_digits(delta):
    for mu in (1e-6, 0.2, 1.0, 7.0, 90.0):
        epsilon = epsilon_of(mu, delta)
        if epsilon > 0.0:
            assert true_delta(mu, epsilon) <= delta < true_delta(mu, epsilon * (1 - 1e-10) - 1e-10 * mu)
    for epsilon in (0.0, 1e-8, 0.5, 30.0, 1e5):
        mu = mu_of(epsilon, delta)
        assert true_delta(mu, epsilon) <= delta < true_delta(mu * (1 + 1e-10), epsilon)


@pytest.mark.parametrize("delta", [1e-300, 1e-5, 0.5, 0.9])
def test_a_mu_is_found_for_every_epsilon_there_is(delta):
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
def test_a_pure_step_is_converted_to_thirteen_digits_rounded_up(epsilon):
    with mpmath.workdps(60):
        corner = 1 / (1 + mpmath.exp(mpmath.mpf(epsilon)))
        mu = mpmath.mpf(pure_as_gaussian(epsilon))
        assert mpmath.ncdf(-mu / 2) < corner < mpmath.ncdf(-mu * (1 - mpmath.mpf("1e-13")) / 2)

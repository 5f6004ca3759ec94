"""The rigorous bounds behind the exact branch, against arithmetic of a hundred digits."""

from __future__ import annotations

from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtri

from quietmax.noise import inversion, selection
from quietmax.noise.enclosure import exponential_survival, logarithm, normal_survival

points = st.fractions(min_value=0, max_value=30, max_denominator=2**40)
bit_counts = st.integers(min_value=8, max_value=300)


def exact(value: Fraction) -> mpmath.mpf:
    return mpmath.mpf(value.numerator) / value.denominator


@pytest.fixture(autouse=True)
def _many_digits():
    with mpmath.workdps(700):
        yield


@settings(deadline=None, max_examples=60)
@given(points, bit_counts)
def test_the_normal_survival_lies_within_its_bounds_and_they_are_close(point, bits):
    low, high = normal_survival(point, bits)
    truth = mpmath.erfc(exact(point) / mpmath.sqrt(2))
    assert exact(low) <= truth <= exact(high)
    assert high - low <= Fraction(1, 2**bits)


@settings(deadline=None, max_examples=60)
@given(points, bit_counts)
def test_the_exponential_survival_lies_within_its_bounds_and_they_are_close(point, bits):
    low, high = exponential_survival(point, bits)
    assert exact(low) <= mpmath.exp(-exact(point)) <= exact(high)
    assert high - low <= Fraction(1, 2**bits)


@settings(deadline=None, max_examples=60)
@given(st.integers(min_value=1, max_value=2**64), bit_counts)
def test_the_logarithm_lies_within_its_bounds_and_they_are_close(numerator, bits):
    value = Fraction(numerator, 2**64)
    low, high = logarithm(value, bits)
    assert exact(low) <= mpmath.log(exact(value)) <= exact(high)
    assert high - low <= Fraction(1, 2**bits)


def test_far_out_the_bounds_stay_valid_and_cheap():
    for bits in (64, 128):
        for survival in (normal_survival, exponential_survival):
            low, high = survival(Fraction(10**9), bits)
            assert low == 0
            assert high == Fraction(1, 2**bits)


def uniforms_to_check() -> np.ndarray:
    generator = np.random.default_rng(20)
    spread = 2.0 ** -generator.uniform(0, 16, 1500)
    near_one = 1.0 - 2.0 ** -generator.uniform(1, 52, 500)
    at_the_formula_switch = 2 * 0.1353352832366127 + np.linspace(-1e-9, 1e-9, 201)
    return np.concatenate([spread, near_one, at_the_formula_switch, generator.random(1500)])


def test_the_trusted_normal_quantile_errs_sixty_four_times_less_than_is_trusted():
    with mpmath.workdps(40):
        uniform = uniforms_to_check()
        worst = 0.0
        for value, quantile in zip(0.5 * uniform, ndtri(0.5 * uniform), strict=True):
            point = mpmath.mpf(float(quantile))
            error = (mpmath.ncdf(point) - mpmath.mpf(float(value))) / mpmath.npdf(point)
            worst = max(worst, abs(float(error)))
    assert worst < 2.0**-43 / 64


def test_the_trusted_logarithm_and_exponential_err_sixty_four_times_less_than_is_trusted():
    with mpmath.workdps(40):
        uniform = uniforms_to_check()
        logarithms = [
            abs(float(mpmath.log(mpmath.mpf(float(u))) - mpmath.mpf(float(v))))
            for u, v in zip(uniform, np.log(uniform), strict=True)
        ]
        exponents = np.concatenate([-np.geomspace(1e-9, 700, 2000), [0.0]])
        exponentials = [
            abs(float(mpmath.mpf(float(v)) / mpmath.exp(mpmath.mpf(float(e))) - 1))
            for e, v in zip(exponents, np.exp(exponents), strict=True)
        ]
    assert max(logarithms) < 2.0**-43 / 64
    assert max(exponentials) < 2.0**-44 / 64


def test_the_margins_cover_what_is_trusted():
    assert inversion.MARGIN >= 2.0**-43 + 2.0**-46
    assert selection.KEY_MARGIN >= 2.0**-43 + 2.0**-46
    assert selection.WEIGHT_MARGIN >= 2 * (2.0**-43 + 2.0**-51)

"""The bound on the delta of sampled Gaussian steps is never below exact values, and close to them."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest

from quietmax.accounting import delta_of, mu_of
from quietmax.accounting import loss_distribution as module
from quietmax.accounting.dpsgd import Schedule, _interval, noise_multiplier
from quietmax.accounting.loss_distribution import sampled_gaussian_delta


def bound(sigma, epsilon, rate, steps, interval=None):
    interval = _interval(sigma, Schedule(rate, steps)) if interval is None else interval
    return sampled_gaussian_delta(sigma, epsilon, sampling_rate=rate, steps=steps, interval=interval)


def sampled_bound(monkeypatch, *arguments):
    """The bound without the one for full steps beside it."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "delta_of", lambda *_: 2.0)
        return bound(*arguments)


# --- exact values -------------------------------------------------------------------------------------------------


def _normal(x):
    return mpmath.erfc(-x / mpmath.sqrt(2)) / 2


def _exact_of_one(sigma, epsilon, rate, removed):
    """The delta of one step at any real epsilon, from where its loss crosses epsilon."""
    scale, e = 1 / sigma, mpmath.exp(epsilon)
    if removed:  # P is the mixture, its loss rises in x
        ratio = (e - (1 - rate)) / rate
        if ratio <= 0:
            return 1 - e
        at = mpmath.log(ratio) / scale + scale / 2
        return (1 - rate) * _normal(-at) + rate * _normal(scale - at) - e * _normal(-at)
    ratio = (1 / e - (1 - rate)) / rate
    if ratio <= 0:
        return mpmath.mpf(0)
    at = mpmath.log(ratio) / scale + scale / 2
    return _normal(at) - e * ((1 - rate) * _normal(at) + rate * _normal(at - scale))


def _exact_of_two(sigma, epsilon, rate, removed):
    """Two steps: the mean, over the first one's loss, of the second one's delta at what is left of epsilon."""
    scale = 1 / sigma

    def integrand(t):
        density = mpmath.npdf(t)
        loss = mpmath.log(1 - rate + rate * mpmath.exp((t - scale / 2) * scale))
        if removed:
            density = (1 - rate) * density + rate * mpmath.npdf(t - scale)
        return density * _exact_of_one(sigma, epsilon - (loss if removed else -loss), rate, removed)

    return mpmath.quad(integrand, mpmath.linspace(-12, 12 + scale, 25))


STEPS = [
    (1.0, 0.5, 0.1),
    (0.5, 2.0, 0.3),
    (3.0, 0.05, 0.02),
    (2.0, 1.0, 0.999),
    (0.8, 4.0, 1 - 1e-12),
    (5.0, 1.5, 0.5),
]


@pytest.mark.parametrize(("sigma", "epsilon", "rate"), STEPS)
@pytest.mark.parametrize(("steps", "exact"), [(1, _exact_of_one), (2, _exact_of_two)])
def test_one_and_two_steps_are_bounded_from_above_and_closely(
    monkeypatch, sigma, epsilon, rate, steps, exact
):
    with mpmath.workdps(30):
        numbers = [mpmath.mpf(number) for number in (sigma, epsilon, rate)]
        true = max(exact(*numbers, removed) for removed in (True, False))
        found = sampled_bound(monkeypatch, sigma, epsilon, rate, steps)
        assert true <= found <= true * 1.01 + 1e-30


@pytest.mark.parametrize("steps", [10, 10**4, 10**6, 10**8])
@pytest.mark.parametrize("delta", [1e-3, 1e-9, 1e-15, 1e-25])
def test_steps_that_hardly_ever_leave_a_record_out_cost_what_full_steps_cost(monkeypatch, steps, delta):
    for share in (1.0, 1.008):
        sigma = math.sqrt(steps) / mu_of(1.0, delta) * share
        exact = delta_of(math.sqrt(steps) / sigma, 1.0)
        found = sampled_bound(monkeypatch, sigma, 1.0, 1 - 1e-12, steps)
        # leaving a record out with probability 1e-12 saves less than this
        assert exact * (1 - 1e-9) <= found
        if steps <= 10**6 and delta >= 1e-9:  # beyond, the grid gets coarse and the bound loose
            assert found <= exact * 1.01
        assert bound(sigma, 1.0, 1 - 1e-12, steps) <= exact * (1 + 1e-12)


@pytest.mark.parametrize(
    ("sigma", "epsilon", "rate", "steps"), [(0.7, 3.0, 0.2, 7), (2.0, 0.5, 0.05, 12), (1.0, 0.1, 0.9, 3)]
)
def test_the_convolution_is_an_upper_bound_on_the_same_grid_in_high_precision(sigma, epsilon, rate, steps):
    interval = 24 * _interval(sigma, Schedule(rate, steps))
    for removed in (True, False):
        step = module._one_step(sigma, rate, interval, removed=removed)
        with mpmath.workdps(50):
            whole = _power([round(float(mass) * 2**120) for mass in step.masses], steps)
            whole = [mpmath.mpf(entry) / mpmath.mpf(2) ** (120 * steps) for entry in whole]
            true = mpmath.mpf(0)
            for place, mass in enumerate(whole):
                over = (steps * step.first + place) * mpmath.mpf(interval) - mpmath.mpf(epsilon)
                if over > 0:
                    true += mass * -mpmath.expm1(-over)
            found = module._composed_delta(step, steps, epsilon)
            assert true <= found <= true * (1 + mpmath.mpf("1e-6")) + steps * module._LOST


@pytest.mark.parametrize(("sigma", "rate"), [(1.0, 0.1), (0.4, 0.9), (6.0, 0.01)])
@pytest.mark.parametrize("removed", [True, False])
def test_the_grid_keeps_both_masses_of_a_step(sigma, rate, removed):
    """P adds up to 1, and so does Q, whose mass at a loss is exp(-loss) times P's."""
    interval = _interval(sigma, Schedule(rate, 1))
    step = module._one_step(sigma, rate, interval, removed=removed)
    losses = (step.first + np.arange(len(step.masses))) * interval
    assert step.masses.sum() == pytest.approx(1.0, abs=1e-13)
    # rounding the share of the upper end up takes a little from Q
    assert 1 - 1e-10 < step.masses @ np.exp(-losses) < 1 + 1e-13
    assert (step.masses >= 0.0).all()
    assert step.shift < 1e-12
    assert step.inflation < 1e-12


def _power(masses, steps):
    """The convolution of `steps` copies of a list of whole numbers: digits of one large number, far enough apart."""
    digit = (sum(masses) ** steps).bit_length() + 1
    packed = sum(mass << (digit * at) for at, mass in enumerate(masses)) ** steps
    mask = (1 << digit) - 1
    return [(packed >> (digit * at)) & mask for at in range(steps * (len(masses) - 1) + 1)]


# --- relations that every bound keeps -----------------------------------------------------------------------------


def test_a_coarser_grid_only_raises_delta():
    fine = _interval(2.0, Schedule(0.1, 100))
    found = [bound(2.0, 1.0, 0.1, 100, interval=fine * factor) for factor in (1, 4, 16, 64)]
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_sampling_never_costs_more_than_full_steps():
    for sigma, epsilon, rate, steps in ((1.0, 1.0, 0.5, 1), (30.0, 2.0, 0.3, 1000), (0.1, 50.0, 0.9, 2)):
        assert bound(sigma, epsilon, rate, steps) <= delta_of(math.sqrt(steps) / sigma, epsilon) * (1 + 1e-9)


def test_where_the_computation_has_no_bound_full_steps_are_counted():
    many = 10**13
    assert bound(1e7, 1.0, 0.5, many, interval=1e-9) == pytest.approx(delta_of(math.sqrt(many) / 1e7, 1.0))
    assert bound(1e-4, 4e7, 0.5, 1) == pytest.approx(delta_of(1e4, 4e7))


@pytest.mark.parametrize(("rate", "steps", "delta"), [(1 - 1e-12, 10**6, 1e-9), (1 - 1e-9, 10**4, 1e-6)])
def test_the_noise_for_nearly_full_batches_suffices_by_the_exact_curve_of_full_ones(rate, steps, delta):
    sigma = noise_multiplier(1.0, delta, Schedule(rate, steps))
    # rate < 1 saves less than a part in a million here
    assert delta_of(math.sqrt(steps) / sigma, 1.0) <= delta * (1 + 1e-6)
    assert sigma <= math.sqrt(steps) / mu_of(1.0, delta) * (1 + 1e-4)


@pytest.mark.parametrize("length", [2**6, 2**10, 2**13])
def test_the_fourier_transform_errs_by_far_less_than_what_is_allowed_for(length):
    """Entries are compared with exact sums; the allowance is 8*log2(N)*u*|v|_1."""
    generator = np.random.default_rng(0)
    for values in (generator.random(length), np.exp(-0.5 * np.linspace(-12, 12, length) ** 2)):
        transform = module.fft.rfft(values, length)
        allowed = 8 * math.log2(length) * module._U * values.sum()
        with mpmath.workdps(30):
            for place in generator.integers(0, length // 2, 4):
                exact = mpmath.fsum(
                    mpmath.mpf(float(value))
                    * mpmath.expjpi(-2 * mpmath.mpf(int(place) * at % length) / length)
                    for at, value in enumerate(values)
                )
                assert abs(mpmath.mpmathify(complex(transform[place])) - exact) < allowed / 8

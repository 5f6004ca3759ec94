"""The noise multipliers of DP-SGD against their formulas, to the last digits and at the ends of what they take."""

from __future__ import annotations

import dataclasses
import logging
import math
import tracemalloc
from fractions import Fraction
from functools import partial

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting import pld, rdp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import fft
from scipy.stats import norm

from quietmax.accounting import delta_of, mu_of
from quietmax.accounting import dpsgd as module
from quietmax.accounting.dpsgd import (
    ACCOUNTANTS,
    Schedule,
    _advanced_composition,
    _advanced_share,
    _interval,
    _renyi_divergence,
    _sampled_gaussian_delta,
    loss_delta,
    noise_multiplier,
    renyi_epsilon,
)
from quietmax.errors import InvalidInput

CASES = [(0.3, 1e-6, Schedule(0.03, 700)), (2.0, 1e-3, Schedule(0.2, 13)), (50.0, 1e-9, Schedule(1.0, 3))]
HAIR = 1 + 1e-11
slow = partial(pytest.param, marks=pytest.mark.slow)


def published(accountant, epsilon, delta, schedule):
    return noise_multiplier(epsilon, delta, schedule, accountant=accountant, analysis="published")


def proven(accountant, epsilon, delta, schedule):
    return noise_multiplier(epsilon, delta, schedule, accountant=accountant)


def test_a_schedule_takes_every_share_up_to_all_and_any_number_of_steps_from_one() -> None:
    assert Schedule(1.0, 1).epochs == 1.0
    assert Schedule(1e-9, 3.0).steps == 3
    for rate in (0.0, math.nextafter(1.0, 2.0), 1.1, math.nan):
        with pytest.raises(InvalidInput, match="sampling_rate must be above 0"):
            Schedule(rate, 1)
    for steps in (0, -1, 1.5, True, math.nan, math.inf):
        with pytest.raises(InvalidInput, match="steps must be an integer of at least 1"):
            Schedule(0.5, steps)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Schedule(1.0, 1).steps = 2  # type: ignore[misc]


def test_epochs_that_are_whole_but_for_rounding_are_whole_and_others_are_left() -> None:
    assert Schedule(0.07, 100).epochs == 7.0 != 0.07 * 100
    assert Schedule(0.015, 100).epochs == 1.5
    assert Schedule(0.07, 101).epochs == 0.07 * 101
    assert Schedule(0.01, 3).epochs == 0.03


@pytest.mark.parametrize("accountant", ["nc", "ac", "zcdp"])
def test_epsilon_is_from_1e_4_to_1e6_and_delta_from_1e_9_to_below_one(accountant) -> None:
    schedule = Schedule(0.1, 100)
    for epsilon, delta in ((1e-4, 1e-5), (1e6, 1e-5), (1.0, 1e-9), (1.0, 0.999)):
        assert published(accountant, epsilon, delta, schedule) > 0.0
    low, high, least = math.nextafter(1e-4, 0.0), math.nextafter(1e6, math.inf), math.nextafter(1e-9, 0.0)
    for epsilon, delta in ((low, 1e-5), (high, 1e-5), (1.0, least), (1.0, 1.0)):
        with pytest.raises(InvalidInput, match=r"must be (between|at least)"):
            published(accountant, epsilon, delta, schedule)


@pytest.mark.parametrize(("epsilon", "delta", "schedule"), CASES)
def test_concentrated_privacy_of_all_steps_is_epsilon_rounded_up(epsilon, delta, schedule) -> None:
    sigma = mpmath.mpf(proven("zcdp", epsilon, delta, schedule))
    with mpmath.workdps(40):
        rho = schedule.steps / (2 * sigma**2)
        needed = rho + 2 * mpmath.sqrt(rho * mpmath.log(1 / mpmath.mpf(delta)))
    assert epsilon / HAIR < needed < epsilon


def _sampled(sigma: float, delta: float, rate: float) -> mpmath.mpf:
    """The epsilon of one Poisson-sampled Gaussian step at this delta (Balle, Barthe, Gaboardi 2018)."""
    with mpmath.workdps(40):
        low, high = mpmath.mpf(0), mpmath.mpf(500)
        for _ in range(120):  # the epsilon of the unsampled step at delta/rate, by halving
            middle = (low + high) / 2
            low, high = (middle, high) if delta_of(1 / sigma, float(middle)) > delta / rate else (low, middle)
        return mpmath.log(1 + rate * mpmath.expm1(high))


@pytest.mark.parametrize(("epsilon", "delta", "schedule"), CASES)
def test_naive_and_advanced_composition_give_every_sampled_step_its_share(epsilon, delta, schedule) -> None:
    """Advanced composition spends half of delta on the steps and half on itself."""
    steps, rate = schedule.steps, schedule.sampling_rate
    share = float(_sampled(proven("nc", epsilon, delta, schedule), delta / steps, rate))
    assert steps * share == pytest.approx(epsilon, rel=1e-7)
    share = float(_sampled(proven("ac", epsilon, delta, schedule), delta / (2 * steps), rate))
    assert _advanced_composition(share, steps, delta / 2) == pytest.approx(epsilon, rel=1e-7)


@pytest.mark.parametrize("epsilon", [1e-6, 0.01, 0.3, 1.0, 7.0])
def test_advanced_composition_is_the_formula_rounded_up_by_a_hair(epsilon) -> None:
    for queries in (1, 3, 50, 10_000):
        for delta in (1e-12, 1e-5, 0.3, 0.9):
            with mpmath.workdps(60):
                exact, log = mpmath.mpf(epsilon), mpmath.log(1 / mpmath.mpf(delta))
                drift = queries * exact * mpmath.tanh(exact / 2)
                truth = min(queries * exact, drift + exact * mpmath.sqrt(2 * queries * log))
                found = mpmath.mpf(_advanced_composition(epsilon, queries, delta))
                assert truth < found <= truth * (1 + mpmath.mpf("1e-13"))


@settings(deadline=None)
@given(st.floats(-9, 2.7).map(lambda power: 10.0**power), st.integers(1, 10**6), st.floats(1e-12, 0.9))
def test_the_share_of_a_release_in_advanced_composition_is_safe_and_tight(total, queries, delta) -> None:
    share = _advanced_share(total, queries, delta)
    assert _advanced_composition(share, queries, delta) <= total
    assert _advanced_composition(share * (1 + 1e-12), queries, delta) > total
    assert total / queries * (1 - 1e-9) <= share <= total


def test_a_step_is_never_read_at_a_delta_above_one_half() -> None:
    schedule = Schedule(0.01, 1)
    sigma = proven("nc", 1.0, 0.9, schedule)
    unsampled = math.log1p(math.expm1(1.0) / 0.01)
    assert sigma * mu_of(unsampled, 0.5) == pytest.approx(1.0, rel=1e-11)


@pytest.mark.parametrize("steps", [1, 9, 1000])
def test_full_batches_are_gaussian_mechanisms_counted_exactly(steps) -> None:
    sigma = proven("pld", 0.7, 1e-6, Schedule(1.0, steps))
    assert 1.0 < sigma * mu_of(0.7, 1e-6) / math.sqrt(steps) < HAIR


def _best_order(sigma, delta, steps, published):
    """The bound for full batches, whose divergence of order a is a*T/(2*sigma^2), over a fine net of orders."""
    orders = np.exp(np.geomspace(1e-3, math.log(2.0**15), 200_000))
    divergence = orders * steps / (2 * sigma**2)
    if published:
        return (divergence + math.log(1 / delta) / (orders - 1)).min()
    return (divergence + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)).min()


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize(
    ("sigma", "delta"),
    [(0.02, 1e-5), (0.1, 1e-5), (0.5, 1e-6), (1.0, 1e-5), (3.0, 1e-3), (10.0, 1e-5), (100.0, 1e-9)],
)
def test_the_orders_tried_come_within_a_few_thousandths_of_the_best(sigma, delta, published) -> None:
    found = renyi_epsilon(sigma, delta, Schedule(1.0, 4), largest_order=2**15, published=published)
    best = _best_order(sigma, delta, 4, published)
    assert best * (1 - 1e-6) <= found <= best * 1.006 + 1e-9


def test_orders_beyond_the_largest_are_not_tried() -> None:
    small, large = (renyi_epsilon(1e3, 1e-5, Schedule(1.0, 1), largest_order=most) for most in (64, 2**15))
    assert small > 4 * large


def test_divergences_are_rounded_up_by_a_trifle_for_each_step() -> None:
    sigma, steps = 1e6, 10**6
    exact = 64 * steps / (2 * sigma**2) + math.log(1e5) / 63  # the largest order is the best
    found = renyi_epsilon(sigma, 1e-5, Schedule(1.0, steps), largest_order=64, published=True)
    assert exact < found < exact + 2e-12 * steps


def test_the_noise_under_rdp_is_the_smallest_that_suffices() -> None:
    schedule = Schedule(1.0, 30)
    for published_ in (True, False):
        analysis = "published" if published_ else "proven"
        sigma = noise_multiplier(2.0, 1e-5, schedule, accountant="rdp", analysis=analysis)
        assert renyi_epsilon(sigma, 1e-5, schedule, published=published_) <= 2.0
        assert renyi_epsilon(sigma * (1 - 1e-4), 1e-5, schedule, published=published_) > 2.0


@pytest.mark.parametrize(("epsilon", "delta"), [(0.01, 1e-5), (0.2, 1e-9), (8.0, 1e-3)])
def test_small_and_large_epsilons_find_an_order_that_suits_them(epsilon, delta) -> None:
    for analysis in ("published", "proven"):
        sigma = noise_multiplier(epsilon, delta, Schedule(1.0, 4), accountant="rdp", analysis=analysis)
        assert _best_order(sigma, delta, 4, analysis == "published") == pytest.approx(epsilon, rel=0.006)


@pytest.mark.parametrize(("sigma", "rate", "steps"), [(0.3, 0.01, 3), (0.5, 0.1, 300)])
def test_little_noise_is_counted_by_quadrature_where_the_series_gives_up(sigma, rate, steps) -> None:
    """In the second case dp-accounting's series gives up at the best order, 1.4."""
    delta = 1e-5
    orders = [1 + part / 50 for part in range(3, 100)]
    bounds = [
        steps * module._renyi_divergence(order, sigma, rate) + math.log(1 / delta) / (order - 1)
        for order in orders
    ]
    found = renyi_epsilon(sigma, delta, Schedule(rate, steps), largest_order=64, published=True)
    assert min(bounds) * (1 - 1e-6) <= found <= min(bounds) * 1.01


@pytest.mark.parametrize("wanted", [1e-3, 0.19, 0.21, 5.0, 1e6])
def test_the_search_finds_the_smallest_noise_wherever_it_lies(wanted) -> None:
    found = module._smallest(lambda sigma: math.log(wanted / sigma), 1.0, Schedule(0.1, 10))
    assert wanted <= found <= wanted * (1 + 1e-4)


def test_the_search_gives_up_where_no_noise_suffices() -> None:
    with pytest.raises(InvalidInput, match="No noise multiplier up to 1e26"):
        module._smallest(lambda _: 1.0, 1.0, Schedule(0.1, 10))
    assert module._smallest(lambda sigma: math.log(1e25 / sigma), 1.0, Schedule(0.1, 10)) >= 1e25


def test_no_delta_below_1e_12_is_claimed() -> None:
    assert loss_delta(50.0, 30.0, Schedule(0.01, 10)) == 1e-12


def test_warnings_are_silenced_only_while_counting() -> None:
    logger = logging.getLogger("absl")
    level = logger.level
    with module._quiet():
        assert logger.level == logging.ERROR
    assert logger.level == level


def bound(sigma, epsilon, rate, steps, interval=None):
    interval = _interval(sigma, Schedule(rate, steps)) if interval is None else interval
    return _sampled_gaussian_delta(sigma, epsilon, Schedule(rate, steps), interval)


def sampled_bound(monkeypatch, *arguments):
    """The bound without the one for full steps beside it."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "delta_of", lambda *_: 2.0)
        return bound(*arguments)


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


LITTLE_NOISE = [(0.05, 180.0, 0.3), (0.05, 215.0, 1e-6), (0.03, 500.0, 0.7), (0.03, 560.0, 1e-4)]
STEPS = [
    (1.0, 0.5, 0.1),
    (0.5, 2.0, 0.3),
    (3.0, 0.05, 0.02),
    (2.0, 1.0, 0.999),
    (0.8, 4.0, 1 - 1e-12),
    (5.0, 1.5, 0.5),
]


@pytest.mark.parametrize(
    ("steps", "exact", "sigma", "epsilon", "rate"),
    [(steps, exact, *step) for steps, exact in ((1, _exact_of_one), (2, _exact_of_two)) for step in STEPS]
    + [(1, _exact_of_one, *step) for step in LITTLE_NOISE],
)
def test_one_and_two_steps_are_bounded_from_above_and_closely(
    monkeypatch, steps, exact, sigma, epsilon, rate
) -> None:
    with mpmath.workdps(30):
        numbers = [mpmath.mpf(number) for number in (sigma, epsilon, rate)]
        true = max(exact(*numbers, removed) for removed in (True, False))
        found = sampled_bound(monkeypatch, sigma, epsilon, rate, steps)
        assert true <= found <= true * 1.01 + 1e-30


@pytest.mark.parametrize("scale", [0.3, 4.0, 30.0])
@pytest.mark.parametrize("rate", [1e-6, 0.3, 0.9, 1 - 1e-12])
def test_the_loss_is_right_to_a_few_units_in_the_last_place(scale, rate) -> None:
    points = np.linspace(-12.0, 12.0 + scale, 97)
    for t, found in zip(points, module._loss(points, scale, rate), strict=True):
        with mpmath.workdps(40):
            y = (mpmath.mpf(t) - mpmath.mpf(scale) / 2) * scale
            exact = mpmath.log(1 - mpmath.mpf(rate) + rate * mpmath.exp(y))
            assert abs(found - exact) <= 4 * module._U * (abs(y) + abs(exact) + 1e-300)


@pytest.mark.parametrize("removed", [True, False])
@pytest.mark.parametrize("scale", [0.3, 4.0, 20.0, 30.0])
def test_the_quadrature_intervals_are_short_and_each_lies_in_one_cell_of_the_grid(scale, removed) -> None:
    interval = 0.01 * scale
    for edges in module._edges(scale, 0.3, interval, removed):
        assert np.diff(edges).min() > 0.0
        assert np.diff(edges).max() <= 1.5 / (12.0 + scale) * (1 + 1e-12)
        ends = module._loss(edges, scale, 0.3) / interval
        assert (np.floor(ends[1:] - 1e-6) <= np.floor(ends[:-1] + 1e-6)).all()


@pytest.mark.parametrize("larger", [True, False])
def test_the_bound_is_the_larger_one_of_adding_and_removing_a_record(monkeypatch, larger) -> None:
    monkeypatch.setattr(module, "_one_step", lambda *_, removed: removed)
    monkeypatch.setattr(module, "_composed_delta", lambda removed, *_: 0.02 if removed is larger else 0.01)
    assert bound(1.0, 0.5, 0.1, 1) == 0.02


@pytest.mark.parametrize("steps", [10, 10**4, 10**6, 10**8])
@pytest.mark.parametrize("delta", [1e-3, 1e-9, 1e-15, 1e-25])
def test_steps_that_hardly_ever_leave_a_record_out_cost_what_full_steps_cost(
    monkeypatch, steps, delta
) -> None:
    for share in (1.0, 1.006, 1.008):
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
def test_the_convolution_is_an_upper_bound_on_the_same_grid_in_high_precision(
    sigma, epsilon, rate, steps
) -> None:
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


@pytest.mark.parametrize("removed", [True, False])
@pytest.mark.parametrize(
    ("sigma", "epsilon", "rate", "steps"),
    [(1.0, 5.0, 0.5, 60), (1.0, 20.0, 0.5, 60), (1.0, 1.0, 0.3, 30), (2.0, 1.0, 0.1, 200)],
)
def test_a_transform_that_is_too_short_for_the_sum_only_raises_delta(
    monkeypatch, sigma, epsilon, rate, steps, removed
) -> None:
    """What lies above the window is bounded by Chernoff's inequality."""
    step = module._one_step(sigma, rate, 8 * _interval(sigma, Schedule(rate, steps)), removed=removed)
    whole = np.ones(1)
    for _ in range(steps):
        whole = np.convolve(whole, step.masses)
    over = (steps * step.first + np.arange(len(whole))) * step.interval - epsilon
    true = float(whole @ -np.expm1(-np.maximum(over, 0.0)))
    for length in (2**7, 2**8, 2**9):
        monkeypatch.setattr(module, "_LONGEST_TRANSFORM", length)
        assert true * (1 - 1e-9) <= module._composed_delta(step, steps, epsilon) <= true * 12
    monkeypatch.undo()
    assert true * (1 - 1e-9) <= module._composed_delta(step, steps, epsilon) <= true * (1 + 1e-6)


@pytest.mark.parametrize("sigma", [0.01, 0.05, 1.0, 7.0])
@pytest.mark.parametrize("removed", [True, False])
def test_the_allowed_shift_covers_the_rounding_of_every_loss(sigma, removed) -> None:
    """Another test says that a loss is off by at most 4*u*(|y| + |loss|), where y is what the exponential takes."""
    interval = _interval(sigma, Schedule(0.3, 1))
    ends = np.array([-12.0, 12.0 + (1 / sigma if removed else 0.0)])
    y = np.abs((ends - 0.5 / sigma) / sigma).max()
    largest = np.abs(module._loss(ends, 1 / sigma, 0.3)).max()
    assert module._one_step(sigma, 0.3, interval, removed=removed).shift >= 4 * module._U * (y + largest)


@pytest.mark.parametrize(("sigma", "rate"), [(1.0, 0.1), (0.4, 0.9), (6.0, 0.01)])
@pytest.mark.parametrize("removed", [True, False])
def test_the_grid_keeps_both_masses_of_a_step(sigma, rate, removed) -> None:
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


@pytest.mark.parametrize("removed", [True, False])
@pytest.mark.parametrize(("sigma", "interval"), [(1.0, 1.0), (0.1, 3.0), (1.0, 0.01)])
def test_the_errors_of_one_step_are_allowed_for_as_stated(monkeypatch, sigma, interval, removed) -> None:
    """A u of 2^-30 shows the allowances, beside which the true rounding errors are nothing."""
    rate, scale, u = 0.3, 1 / sigma, 2.0**-30
    monkeypatch.setattr(module, "_U", u)
    step = module._one_step(sigma, rate, interval, removed=removed)
    ends = np.array([-12.0, 12.0 + (scale if removed else 0.0)])
    largest = np.abs(module._loss(ends, scale, rate)).max()
    assert step.shift == pytest.approx(
        32 * u * (largest + scale * (12 + scale) + interval), rel=1e-6, abs=0.0
    )
    # a mass is added up from the quadrature intervals whose losses lie in one cell of the grid
    edges = module._edges(scale, rate, interval, removed)
    middle = np.concatenate([(each[1:] + each[:-1]) / 2 for each in edges])
    places = np.floor((1 if removed else -1) * module._loss(middle, scale, rate) / interval)
    most = np.unique(places, return_counts=True)[1].max()
    assert step.inflation == pytest.approx(u * (8 * (12 + scale) ** 2 + most + 128), rel=1e-9, abs=0.0)


@pytest.mark.parametrize("removed", [True, False])
@pytest.mark.parametrize(("sigma", "interval"), [(1.0, 0.5), (1.0, 1.0), (3.0, 0.2)])
def test_a_little_more_than_its_share_goes_to_the_larger_loss(sigma, interval, removed) -> None:
    """4*shift/(1 - exp(-interval)) + 2^-40 of every mass; so much of Q goes, as a larger loss has a smaller Q."""
    rate, sign = 0.3, 1 if removed else -1
    step = module._one_step(sigma, rate, interval, removed=removed)
    losses = (step.first + np.arange(len(step.masses))) * interval
    t = np.linspace(-12.0, 12.0 + 1 / sigma, 100_001)
    density = (1 - rate) * norm.pdf(t) + rate * norm.pdf(t - 1 / sigma) if removed else norm.pdf(t)
    lower_end = np.floor(sign * module._loss(t, 1 / sigma, rate) / interval) * interval
    q_of_lower_ends = (density * np.exp(-lower_end)).sum() / density.sum()
    more = 4 * step.shift / -math.expm1(-interval) + 2.0**-40
    expected = more * -math.expm1(-interval) * q_of_lower_ends
    assert 1.0 - step.masses @ np.exp(-losses) == pytest.approx(expected, rel=0.02, abs=0.0)


@pytest.mark.parametrize("removed", [True, False])
@pytest.mark.parametrize("scale", [0.5, 3.0, 9.0])
def test_every_integration_interval_counts_once(monkeypatch, scale, removed) -> None:
    """With a reach of two deviations, the outermost intervals are not negligible."""
    monkeypatch.setattr(module, "_REACH", 2.0)
    monkeypatch.setattr(module, "_BLOCK", 7)
    found = module._one_step(1 / scale, 0.3, 0.05, removed=removed).masses.sum()
    at = np.array([-2.0, 2.0, max(2.0, scale - 2.0), scale + 2.0] if removed else [-2.0, 2.0])
    without, with_it = np.diff(norm.cdf(at))[::2].sum(), np.diff(norm.cdf(at - scale))[::2].sum()
    assert found == pytest.approx(0.7 * without + 0.3 * with_it if removed else without, rel=1e-12)


MASSES = np.array([0.2, 0.3, 0.5])


def _tilted(tilt, half):
    """The masses of the losses -half, 0 and half times exp(tilt*loss), the sum of which is exp(level)."""
    weights = MASSES * np.exp(tilt * half * np.array([-1.0, 0.0, 1.0]))
    return weights / weights.sum(), math.log(weights.sum())


def _sum_of(masses, steps):
    """The convolution of `steps` copies of the masses, one after the other."""
    whole = np.ones(1)
    for _ in range(steps):
        whole = np.convolve(whole, masses)
    return whole


def _gain(losses, epsilon, tilt):
    """What a tilted mass at each loss adds to delta."""
    over = np.maximum(losses - epsilon, 0.0)
    return np.exp(-tilt * over) - np.exp(-(tilt + 1) * over)


@pytest.mark.parametrize("tilt", [0.0, 0.7, 3.0])
@pytest.mark.parametrize(("steps", "epsilon"), [(1, 0.2), (3, 1.0), (6, 0.3), (6, 2.2)])
def test_every_error_of_the_convolution_is_allowed_for_as_stated(monkeypatch, tilt, steps, epsilon) -> None:
    """A u of 2^-20 shows the allowances, beside which the true rounding errors are nothing."""
    half, shift, inflation, u = 0.5, 0.01, 0.002, 2.0**-20
    monkeypatch.setattr(module, "_U", u)
    monkeypatch.setattr(module, "_tilt", lambda *_: tilt)
    found = module._composed_delta(module._Step(-1, MASSES, half, shift, inflation), steps, epsilon)

    at = epsilon - steps * shift - 4 * u * steps * half - 8 * u * epsilon
    tilted, level = _tilted(tilt, half)
    length = 4
    while length < 2 * steps + 1:
        length *= 2
    # the transform by its definition: an error of 8*log2(N)*u in each entry, 24*u in each factor of the power
    turns = np.outer(np.arange(length // 2 + 1), np.arange(3)) / length
    size = np.abs(np.exp(-2j * np.pi * turns) @ tilted)
    each, factor = 8 * math.log2(length) * u, math.exp(24 * steps * u)
    errors = (factor - 1) * size**steps + steps * each * (size + each) ** (steps - 1)
    gain = _gain(half * (np.arange(length) - steps), at, tilt)
    body = (1 + length * u) * (_sum_of(tilted, steps) @ gain[: 2 * steps + 1])
    # Parseval: a root of squares; the transform back: its own error on a sum
    body += math.sqrt(2 * (errors**2).sum() / length) * math.sqrt((gain**2).sum())
    body += (each + 4 * u) * 2 * (size**steps).sum() / length * gain.sum() * (1 + 24 * steps * u)
    slack = steps * inflation + 2.0**-40
    slack += 8 * u * (steps * (2 + tilt * half + 2 * abs(level)) + tilt * at + 4)
    assert found == pytest.approx(math.exp(steps * level - tilt * at + slack) * body, rel=2e-13, abs=0.0)


@pytest.mark.parametrize(
    ("tilt", "epsilon"), [(0.0, 15.0), (0.0, 31.0), (0.0, 33.0), (0.1, 30.0), (0.4, 60.0), (0.4, 75.0)]
)
@pytest.mark.parametrize("length", [16, 32, 64])
def test_what_a_short_transform_does_not_hold_is_bounded_as_stated(
    monkeypatch, tilt, epsilon, length
) -> None:
    half, steps = 0.5, 200
    monkeypatch.setattr(module, "_U", 0.0)
    monkeypatch.setattr(module, "_tilt", lambda *_: tilt)
    monkeypatch.setattr(module, "_LONGEST_TRANSFORM", length)
    monkeypatch.setattr(module, "_SPREADS_BELOW", 1.5)
    found = module._composed_delta(module._Step(-1, MASSES, half, 0.0, 0.0), steps, epsilon)

    tilted, level = _tilted(tilt, half)
    places = np.arange(3)
    mean = tilted @ places
    spread = math.sqrt(steps * (tilted @ (places - mean) ** 2))
    base = math.floor(steps * mean - 1.5 * spread)
    if tilt:  # where delta counts
        base = min(base, math.floor(epsilon / half) + steps)
    wrapped = np.zeros(length)
    np.add.at(wrapped, (np.arange(2 * steps + 1) - base) % length, _sum_of(tilted, steps))
    body = wrapped @ _gain(half * (np.arange(length) + base - steps), epsilon, tilt)
    # Chernoff: E[exp(t*(sum - top))] for several t; a tilted mass adds at most 1/(1 + tilt)
    top = half * (base + length - steps)
    rest = min(
        math.exp(steps * (_tilted(tilt + more, half)[1] - level) - more * top)
        for more in module._EXTRA_TILTS / (half * spread)
    )
    body += min(1.0, 2 * rest) / (1 + tilt)
    assert found == pytest.approx(math.exp(steps * level - tilt * epsilon) * body, rel=1e-9, abs=0.0)


def test_a_delta_beyond_the_largest_loss_is_only_what_was_not_integrated() -> None:
    step = module._Step(-1, MASSES, 0.5, 0.0, 0.0)
    for epsilon in (1.5, 2.0):
        assert module._composed_delta(step, 3, epsilon * (1 + 1e-12)) == 3 * module._LOST
    assert module._composed_delta(step, 3, 1.5 - 1e-6) == pytest.approx(0.5**3 * 1e-6, rel=1e-4)


def test_a_chernoff_bound_beyond_all_floats_is_no_error() -> None:
    """The losses of a rare record: once in a while one is enormous."""
    assert 0.3 < loss_delta(0.37, 0.00128, Schedule(2.4e-5, 56)) < 1.0


def test_a_delta_beyond_all_floats_is_infinite_and_not_an_error(monkeypatch) -> None:
    monkeypatch.setattr(module, "_tilt", lambda *_: 5000.0)
    step = module._Step(-1, np.array([0.9, 0.05, 0.05]), 0.5, 0.0, 0.0)
    assert module._composed_delta(step, 3, 0.2) == math.inf


@pytest.mark.parametrize(("steps", "rate", "sigma"), [(10**12, 0.5, 1e7), (1, 0.5, 1 / 4096)])
def test_up_to_its_limits_the_sampled_bound_is_used_and_never_beyond(monkeypatch, steps, rate, sigma) -> None:
    monkeypatch.setattr(module, "_one_step", lambda *_, **__: None)
    monkeypatch.setattr(module, "_composed_delta", lambda *_: 0.0)
    assert bound(sigma, 1.0, rate, steps, 1.0) == 0.0
    assert bound(sigma, 1.0, rate, 10**12 + 1, 1.0) > 0.0
    assert bound(math.nextafter(sigma, 0.0) if steps == 1 else 1e-9, 1.0, rate, steps, 1.0) > 0.0


def test_the_bound_of_full_steps_is_read_at_a_mu_that_is_rounded_up(monkeypatch) -> None:
    monkeypatch.setattr(module, "delta_of", lambda mu, _: mu)
    for sigma, steps in ((7.0, 3), (0.3, 10), (1.7, 12345)):
        mu = Fraction(bound(sigma, 1.0, 1.0, steps, 1.0))
        assert 1 < mu**2 * Fraction(sigma) ** 2 / steps < 1 + Fraction(1, 2**48)


@pytest.mark.parametrize("which", [True, False])
def test_a_bound_that_is_no_number_is_not_used(monkeypatch, which) -> None:
    monkeypatch.setattr(module, "_one_step", lambda *_, removed: removed)
    monkeypatch.setattr(module, "_composed_delta", lambda removed, *_: math.nan if removed is which else 0.0)
    assert bound(1.0, 0.5, 0.1, 1) == pytest.approx(delta_of(1.0, 0.5), rel=1e-9)


def _power(masses, steps):
    """The convolution of `steps` copies of a list of whole numbers: digits of one large number, far enough apart."""
    digit = (sum(masses) ** steps).bit_length() + 1
    packed = sum(mass << (digit * at) for at, mass in enumerate(masses)) ** steps
    mask = (1 << digit) - 1
    return [(packed >> (digit * at)) & mask for at in range(steps * (len(masses) - 1) + 1)]


@pytest.mark.parametrize("length", [2**6, 2**10, 2**13])
def test_the_fourier_transform_errs_by_far_less_than_what_is_allowed_for(length) -> None:
    """Entries are compared with exact sums; the allowance is 8*log2(N)*u*|v|_1."""
    generator = np.random.default_rng(0)
    for values in (generator.random(length), np.exp(-0.5 * np.linspace(-12, 12, length) ** 2)):
        transform = fft.rfft(values, length)
        assert math.nextafter(1.0, 2.0) - 1.0 == 2 * module._U
        allowed = 8 * math.log2(length) * module._U * values.sum()
        with mpmath.workdps(30):
            for place in generator.integers(0, length // 2, 4):
                exact = mpmath.fsum(
                    mpmath.mpf(float(value))
                    * mpmath.expjpi(-2 * mpmath.mpf(int(place) * at % length) / length)
                    for at, value in enumerate(values)
                )
                assert abs(mpmath.mpmathify(complex(transform[place])) - exact) < allowed / 8


PAPER = Schedule(0.01, 10_000)
TABLE = {0.1: 70, 0.5: 13.8, 1: 7, 5: 1.669, 10: 1.056, 50: 0.551, 100: 0.445, 500: 0.275, 1000: 0.219}
"""Noise multipliers listed in the program of Jayaraman and Evans for batches of 200 of 10,000 records, 100 epochs."""


@pytest.mark.parametrize(("accountant", "sigma"), [("nc", 571.7), ("ac", 299.8), ("zcdp", 49.0)])
def test_the_published_noise_of_three_accountants_is_reproduced(accountant, sigma) -> None:
    assert published(accountant, 1.0, 1e-5, PAPER) == pytest.approx(sigma, abs=0.05)


def _event(schedule, sigma):
    step = dp_accounting.PoissonSampledDpEvent(schedule.sampling_rate, dp_accounting.GaussianDpEvent(sigma))
    return dp_accounting.SelfComposedDpEvent(step, schedule.steps)


@pytest.mark.parametrize(
    ("epsilon", "sigma"),
    [entry if entry[0] in (1, 10, 1000) else slow(*entry) for entry in TABLE.items()],
)
def test_the_published_noise_under_rdp_is_the_table_of_the_program_it_came_from(epsilon, sigma) -> None:
    """Its entries at epsilon 0.01 and 0.05 are coarser (525 and 150; the search gives 680 and 136)."""
    found = noise_multiplier(epsilon, 1e-5, Schedule(0.02, 5000), accountant="rdp", analysis="published")
    assert found == pytest.approx(sigma, rel=0.03)


@pytest.mark.parametrize(
    ("epsilon", "schedule"),
    [(1.0, Schedule(0.1, 100)), (1.0, Schedule(0.02, 5000)), slow(4.0, Schedule(0.01, 2000))],
)
@pytest.mark.parametrize(("accountant", "theirs"), [("rdp", rdp.RdpAccountant), ("pld", pld.PLDAccountant)])
def test_the_proven_noise_equals_dp_accountings_own_calibration(
    epsilon, schedule, accountant, theirs
) -> None:
    wanted = dp_accounting.calibrate_dp_mechanism(
        theirs, lambda sigma: _event(schedule, sigma), epsilon, 1e-5
    )
    found = noise_multiplier(epsilon, 1e-5, schedule, accountant=accountant)
    assert found == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("epsilon", [0.001, 0.01, 0.3, slow(20.0), slow(1000.0)])
def test_the_loss_distribution_stays_small_whatever_epsilon_is(epsilon) -> None:
    tracemalloc.start()
    try:
        sigma = noise_multiplier(epsilon, 1e-5, PAPER)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64e6
    assert loss_delta(sigma, epsilon, PAPER) <= 1e-5
    assert loss_delta(sigma / 1.001, epsilon, PAPER) > 1e-5


@pytest.mark.parametrize("schedule", [Schedule(0.05, 200), Schedule(0.3, 20), Schedule(1.0, 50)])
@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_every_proven_accountant_is_within_its_promise_and_pld_needs_least_noise(epsilon, schedule) -> None:
    """The privacy loss distribution is the exact curve up to its grid: all others must lie above it."""
    found = {each: noise_multiplier(epsilon, 1e-5, schedule, accountant=each) for each in ACCOUNTANTS}
    assert found["pld"] <= found["rdp"] * 1.0001
    for each in ("rdp", "zcdp", "ac", "nc"):
        assert found["pld"] <= found[each] * 1.0001
        assert loss_delta(found[each], epsilon, schedule) <= 1e-5 * 1.001


@given(
    epsilon=st.floats(0.01, 1000.0),
    delta=st.floats(1e-9, 1e-3),
    records=st.integers(200, 100_000),
    accountant=st.sampled_from(["zcdp", "ac", "nc"]),
)
def test_published_noise_over_epochs_suffices_if_the_other_records_keep_their_places(
    epsilon, delta, records, accountant
) -> None:
    """The assumption that the conditional guarantee names: then each epoch is one Gaussian mechanism."""
    schedule = Schedule(100 / records, records)
    sigma = noise_multiplier(epsilon, delta, schedule, accountant=accountant, analysis="published")
    assert schedule.epochs == 100
    assert delta_of(math.sqrt(schedule.epochs) / sigma, epsilon) <= delta * (1 + 1e-9)


@pytest.mark.parametrize(("order", "sigma", "rate"), [(1.05, 0.27, 0.01), (1.5, 0.6, 0.08), (3.3, 0.8, 0.3)])
def test_the_renyi_divergence_by_quadrature_is_right(order, sigma, rate) -> None:
    """Against 30-digit integration of its definition, to a fifth of what is allowed for rounding."""

    def integrand(x):
        ratio = 1 - rate + rate * mpmath.exp((2 * x - 1) / (2 * sigma**2))
        return mpmath.npdf(x, 0, sigma) * ratio**order

    with mpmath.workdps(30):
        points = [-20 * sigma, -5 * sigma, 0, sigma, 0.5, 1, order, order + 20 * sigma]
        mean = mpmath.quad(integrand, sorted(points))
        wanted = float(mpmath.log(mean) / (order - 1))
    assert _renyi_divergence(order, sigma, rate) == pytest.approx(wanted, rel=0.0, abs=module._ROUNDING / 5)
    closed = order / (2 * sigma**2)  # of a step that all but certainly samples the record
    assert _renyi_divergence(order, sigma, 1 - 1e-15) == pytest.approx(closed, rel=1e-9)


def test_a_divergence_lost_in_rounding_is_not_read_as_perfect_privacy() -> None:
    """dp-accounting returns epsilon 0 for a divergence that came out negative."""
    assert renyi_epsilon(1e9, 1e-5, Schedule(1e-4, 1000)) > 0.0


def test_nothing_is_printed_while_calibrating(capfd) -> None:
    noise_multiplier(100.0, 1e-5, Schedule(1 / 12, 1200), accountant="rdp")
    noise_multiplier(0.5, 1e-5, Schedule(1 / 12, 1200), accountant="pld")
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.parametrize(
    ("arguments", "options", "match"),
    [
        ((math.nan, 1e-5, PAPER), {}, "epsilon"),
        ((1.0, 1e-5, PAPER), {"accountant": "gdp"}, "accountant"),
        ((1.0, 1e-5, PAPER), {"accountant": "pld", "analysis": "published"}, "accountant"),
        ((1.0, 1e-5, PAPER), {"analysis": "hoped"}, "analysis"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_with_a_sentence(arguments, options, match) -> None:
    with pytest.raises(InvalidInput, match=match):
        noise_multiplier(*arguments, **options)

"""Costs compose exactly, budgets divide exactly, and mu, epsilon and delta are converted outwards.

Conversions are compared with the closed form at a hundred digits, with dp-accounting, and by brute force.
"""

from __future__ import annotations

import dataclasses
import json
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

from quietmax.accounting import (
    Budget,
    GaussianCost,
    Guarantee,
    PureCost,
    compose,
    delta_of,
    epsilon_of,
    mu_of,
    per_query,
    pure_as_gaussian,
)
from quietmax.accounting import costs as costs_module
from quietmax.accounting import guarantee as guarantee_module
from quietmax.accounting.costs import (
    LIMIT,
    Meter,
    _rounded_down,
    _stepped,
    bounded_range_as_gaussian,
    cost_from_json,
    decimal,
    root_rounded_down,
    root_rounded_up,
    rounded_up,
)
from quietmax.errors import InvalidInput, as_number

KINDS = [PureCost, GaussianCost]
amounts = st.floats(1e-9, 1e4)
pure = amounts.map(PureCost)
gaussian = amounts.map(GaussianCost)
costs = st.one_of(pure, gaussian)
same_measure = st.one_of(st.lists(pure, min_size=1, max_size=8), st.lists(gaussian, min_size=1, max_size=8))
powers_of_ten = st.floats(-6, 2).map(lambda power: 10.0**power)
deltas = st.floats(-300, math.log10(0.5)).map(lambda power: 10.0**power)


def size(cost) -> float:
    return cost.epsilon if isinstance(cost, PureCost) else cost.mu


def one_up(value: float, times: int = 1) -> float:
    for _ in range(times):
        value = math.nextafter(value, math.inf)
    return value


def test_what_is_exact_is_not_rounded_at_all() -> None:
    for value in (0.0, 0.1, 1.0, 3.5, 1e-50, 123456.789):
        assert rounded_up(decimal(value)) == _rounded_down(decimal(value)) == value
        assert root_rounded_up(decimal(value) ** 2) == root_rounded_down(decimal(value) ** 2) == value


@given(st.fractions(min_value=Fraction(1, 10**12), max_value=10**12))
def test_outward_rounding_goes_to_the_very_next_float(value) -> None:
    assert decimal(_rounded_down(value)) <= value <= decimal(rounded_up(value))
    assert rounded_up(value) <= one_up(_rounded_down(value))
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


def true_delta(mu: float, epsilon: float) -> mpmath.mpf:
    """The formula of theory section 2.5, literally, with 100 digits more than its difference loses for a small mu."""
    with mpmath.workdps(100 + max(0, math.ceil(-math.log10(mu)))):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
        near, far = (mpmath.erfc((epsilon / mu + sign * mu / 2) / mpmath.sqrt(2)) / 2 for sign in (-1, 1))
        return near - mpmath.exp(epsilon) * far


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
    assert truth <= mpmath.mpf(delta_of(mu, epsilon)) <= truth * (1 + mpmath.mpf("3e-11"))


@pytest.mark.parametrize("mu", [1e-6, 0.01, 0.3, 0.49, 0.5, 0.51, 1.0, 4.0, 20.0, 60.0])
def test_delta_is_rounded_up_by_less_than_two_in_1e11_where_its_formulas_change(mu) -> None:
    for place in (-20.0, -3.0, -0.5, -1e-9, 0.0, 1e-9, 0.5, 3.0, 12.0, 30.0):
        epsilon = max(0.0, mu * (place + mu / 2))
        truth = true_delta(mu, epsilon)
        assert truth <= mpmath.mpf(delta_of(mu, epsilon)) < truth * (1 + mpmath.mpf("2e-11"))


@pytest.mark.parametrize("mu", [1e-12, 1e3, 1e4, 1e6])
@pytest.mark.parametrize("place", [-30.0, 0.0, 5.0, 36.0])
def test_delta_stays_safe_beyond_the_range_of_use(mu, place) -> None:
    for epsilon in np.linspace(0.99999, 1.00001, 7) * max(0.0, mu * (place + mu / 2)):
        assert true_delta(mu, float(epsilon)) <= mpmath.mpf(delta_of(mu, float(epsilon)))


@settings(deadline=None, max_examples=100)
@given(powers_of_ten, deltas)
def test_epsilon_is_safe_and_tight_to_ten_digits(mu, delta) -> None:
    epsilon = epsilon_of(mu, delta)
    assert true_delta(mu, epsilon) <= delta
    if epsilon > 0.0:
        assert true_delta(mu, max(epsilon * (1 - 1e-10) - 1e-10 * mu, 0.0)) > delta


@settings(deadline=None, max_examples=100)
@given(st.one_of(st.just(0.0), st.floats(-8, 4).map(lambda power: 10.0**power)), deltas)
def test_mu_is_safe_and_tight_to_ten_digits(epsilon, delta) -> None:
    mu = mu_of(epsilon, delta)
    assert true_delta(mu, epsilon) <= delta < true_delta(mu * (1 + 1e-10), epsilon)


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (4.0, 10), (30.0, 1000)])
def test_dp_accounting_agrees_for_composed_gaussian_mechanisms(sigma, steps) -> None:
    reference = pld.from_gaussian_mechanism(sigma, value_discretization_interval=1e-4).self_compose(steps)
    mu = math.sqrt(steps) / sigma
    for epsilon in (0.5, 1.0, 3.0):
        assert delta_of(mu, epsilon) == pytest.approx(reference.get_delta_for_epsilon(epsilon), rel=5e-3)
    for delta in (1e-3, 1e-6):
        assert epsilon_of(mu, delta) == pytest.approx(reference.get_epsilon_for_delta(delta), rel=2e-3)


def test_nothing_spent_is_perfect_privacy_and_no_delta_is_below_1e_300_or_above_1() -> None:
    assert delta_of(0.0, 0.0) == epsilon_of(0.0, 1e-9) == pure_as_gaussian(0.0) == 0.0
    for mu, epsilon in ((0.5, 5e16), (0.01, 1e9), (0.01, 100.0), (3.0, 1e200), (1e-9, 1.0)):
        assert delta_of(mu, epsilon) == 1e-300
    assert delta_of(1e3, 0.0) == delta_of(50.0, 1.0) == 1.0


def test_deltas_from_1e_300_to_below_one_are_taken() -> None:
    for delta in (1e-300, math.nextafter(1.0, 0.0)):
        assert delta_of(1.0, epsilon_of(1.0, delta)) <= delta
        assert delta_of(mu_of(1.0, delta), 1.0) <= delta
    for delta in (0.0, math.nextafter(1e-300, 0.0), 1.0):
        for function in (epsilon_of, mu_of):
            with pytest.raises(InvalidInput, match="at least 1e-300 and below 1"):
                function(1.0, delta)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, None, "one"])
@pytest.mark.parametrize(
    "call",
    [
        lambda bad: delta_of(bad, 1.0),
        lambda bad: delta_of(1.0, bad),
        lambda bad: epsilon_of(bad, 1e-5),
        lambda bad: epsilon_of(1.0, bad),
        lambda bad: mu_of(bad, 1e-5),
        lambda bad: mu_of(1.0, bad),
        pure_as_gaussian,
        bounded_range_as_gaussian,
    ],
)
def test_what_is_no_privacy_parameter_is_refused(call, bad) -> None:
    with pytest.raises(InvalidInput, match="must be at least"):
        call(bad)


@pytest.mark.parametrize("mu", [1e-3, 0.3, 1.0, 10.0])
def test_the_delta_of_no_epsilon_needs_none_and_a_hair_less_needs_hardly_any(mu) -> None:
    delta = delta_of(mu, 0.0)
    assert epsilon_of(mu, delta) == 0.0
    for share in (1 - 1e-15, 1 - 5e-12, 1 - 1e-10):
        epsilon = epsilon_of(mu, delta * share)
        assert 0.0 <= epsilon < 1.0
        assert delta_of(mu, epsilon) <= delta * share


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


@settings(deadline=None, max_examples=100)
@given(
    st.one_of(st.floats(-12, 2.84).map(lambda power: 10.0**power), st.sampled_from([0.999999, 1.0, 1.000001]))
)
def test_a_pure_step_is_converted_to_thirteen_digits_rounded_up(epsilon) -> None:
    with mpmath.workdps(60):
        corner = 1 / (1 + mpmath.exp(mpmath.mpf(epsilon)))
        # mu is right when the Gaussian curve passes through the corner: Phi(-mu/2) = corner; larger mu is safe
        mu = mpmath.mpf(pure_as_gaussian(epsilon))
        assert mpmath.ncdf(-mu / 2) <= corner < mpmath.ncdf(-mu * (1 - mpmath.mpf("1e-13")) / 2)


def test_the_small_epsilon_factors_of_the_theory_page() -> None:
    assert pure_as_gaussian(1e-6) / 1e-6 == pytest.approx(math.sqrt(math.pi / 2), rel=1e-6)
    assert bounded_range_as_gaussian(1e-6) / 1e-6 == pytest.approx(math.sqrt(math.pi / 8), rel=1e-6)


@pytest.mark.parametrize("epsilon", [0.01, 0.3, 1.0, 4.0, 20.0])
def test_randomised_response_never_beats_the_gaussian_curve_of_a_pure_step(epsilon) -> None:
    mu = pure_as_gaussian(epsilon)
    false_alarms = np.linspace(1e-6, 1 - 1e-6, 4001)
    steep, flat = 1 - np.exp(epsilon) * false_alarms, np.exp(-epsilon) * (1 - false_alarms)
    misses = np.maximum(np.maximum(steep, flat), 0.0)
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


@given(st.lists(costs, max_size=8), costs, st.randoms())
def test_composition_does_not_depend_on_the_order_and_one_release_more_never_costs_less(
    steps, further, random
) -> None:
    shuffled = list(steps)
    random.shuffle(shuffled)
    assert compose(steps) == compose(shuffled)
    assert compose([*steps, further]).as_gaussian().mu >= compose(steps).as_gaussian().mu


@given(same_measure)
def test_the_composed_cost_is_the_least_float_above_the_exact_one(steps) -> None:
    exact = sum((step.amount for step in steps), Fraction(0))
    total = compose(steps)
    assert type(total)(math.nextafter(size(total), 0.0)).amount < exact <= total.amount


@given(costs, st.integers(1, 10**6))
def test_many_equal_releases_cost_what_composing_them_says(cost, count) -> None:
    assert cost.times(count).amount >= cost.amount * count
    if count <= 50:
        assert cost.times(count) == compose([cost] * count)
    assert cost.times(0) == type(cost)(0.0)
    assert cost.times(1) == cost


def test_sums_of_decimals_are_what_people_expect() -> None:
    assert compose([]) == PureCost(0.0)
    assert compose([PureCost(0.1), PureCost(0.2)]) == PureCost(0.3)
    assert compose([PureCost(0.1)] * 10) == PureCost(1.0)
    assert compose([GaussianCost(0.1)] * 100) == GaussianCost(1.0)


def test_mixed_measures_are_composed_in_the_gaussian_one() -> None:
    mixed = compose([PureCost(0.5), GaussianCost(1.0)])
    assert isinstance(mixed, GaussianCost)
    assert mixed.mu == pytest.approx(math.hypot(pure_as_gaussian(0.5), 1.0), rel=1e-14)
    assert bounded_range_as_gaussian(0.5) < pure_as_gaussian(0.5)


@given(costs)
def test_a_cost_survives_json_also_with_the_key_of_version_0_1(cost) -> None:
    record = json.loads(json.dumps(cost.to_json()))
    assert cost_from_json(record) == cost
    assert cost_from_json({**record, "currency": record.pop("measure")}) == cost


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"measure": "pure"},
        {"measure": "gaussian"},
        {"measure": "gold", "epsilon": 1.0},
        {"measure": "gold", "mu": 1.0},
        {"measure": "pure", "mu": 1.0},
    ],
)
def test_a_record_whose_measure_and_amount_do_not_fit_is_refused(record) -> None:
    with pytest.raises(InvalidInput, match="must state a measure"):
        cost_from_json(record)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cost_is_nothing_or_from_1e_100_to_1e100_both_included(kind) -> None:
    for allowed in (0.0, 1e-100, 1e100):
        assert size(kind(allowed)) == allowed
    assert math.copysign(1.0, size(kind(-0.0))) == 1.0
    below, above = math.nextafter(1e-100, 0.0), math.nextafter(1e100, math.inf)
    for refused in (below, above, -1.0, math.nan, math.inf, None, "1"):
        with pytest.raises(InvalidInput, match="must be 0 or between 1e-100 and 1e100"):
            kind(refused)


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_of_releases_beyond_what_a_float_counts_is_refused(kind) -> None:
    assert kind(0.5).times(2**53 - 1).amount > kind(0.5).amount
    for count in (2**53, 2**60, -1, 0.5, True):
        with pytest.raises(InvalidInput, match="integer of at least 0"):
            kind(0.5).times(count)


def test_nothing_in_accounting_can_be_changed_after_it_was_made() -> None:
    members = [*vars(costs_module).values(), *vars(guarantee_module).values()]
    classes = [each for each in members if dataclasses.is_dataclass(each)]
    assert {Budget, GaussianCost, Guarantee, Meter, PureCost} <= set(classes)
    for made in (PureCost(1.0), GaussianCost(1.0), Budget(1.0), Meter(PureCost(1.0))):
        for field in dataclasses.fields(made):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(made, field.name, None)
    assert all(each.__dataclass_params__.frozen for each in classes)


def test_a_budget_divides_exactly_by_every_number_to_ten_and_by_powers_of_ten_and_fits_json() -> None:
    assert all(LIMIT % parts == 0 for parts in [*range(1, 11), *(10**power for power in range(13))])
    assert LIMIT < 2**53


@pytest.mark.parametrize("kind", KINDS)
def test_the_smallest_charge_is_one_unit_and_the_budget_has_limit_of_them(kind) -> None:
    meter = Meter(kind(1.0))
    assert meter.units(kind(1e-60)) == meter.units(meter.share(LIMIT)) == 1
    assert meter.affordable(kind(1e-60)) == LIMIT
    assert meter.units(kind(0.0)) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_spent_budget_has_nothing_left_even_if_more_was_spent(kind) -> None:
    meter = Meter(kind(0.7))
    assert meter.remaining(LIMIT) == meter.remaining(LIMIT + 5) == meter.spent(0) == kind(0.0)
    assert meter.remaining(LIMIT - 1) != kind(0.0)
    assert meter.spent(LIMIT) == kind(0.7)


@given(st.floats(1e-6, 1e6), st.integers(1, LIMIT - 1))
def test_what_was_spent_is_rounded_up_and_what_is_left_down_by_less_than_a_float(epsilon, units) -> None:
    meter = Meter(PureCost(epsilon))
    spent, left = Fraction(units, LIMIT) * decimal(epsilon), Fraction(LIMIT - units, LIMIT) * decimal(epsilon)
    assert decimal(math.nextafter(meter.spent(units).epsilon, 0.0)) < spent <= meter.spent(units).amount
    after = math.nextafter(meter.remaining(units).epsilon, math.inf)
    assert meter.remaining(units).amount <= left < decimal(after)


@given(costs, st.integers(1, 7 * 10**7))
def test_a_budget_shared_by_k_queries_pays_for_exactly_k(total, queries) -> None:
    assert Meter(total).affordable(Meter(total).share(queries)) == queries


@settings(max_examples=60)
@given(
    st.one_of(
        st.tuples(pure, st.lists(pure, min_size=1, max_size=40)),
        st.tuples(gaussian, st.lists(gaussian, min_size=1, max_size=40)),
    )
)
def test_charges_accepted_by_the_meter_compose_to_at_most_the_total(pair) -> None:
    total, steps = pair
    meter = Meter(total)
    spent, accepted = 0, []
    for step in steps:
        if spent + meter.units(step) <= LIMIT:
            spent += meter.units(step)
            accepted.append(step)
    assert sum((step.amount for step in accepted), Fraction(0)) <= total.amount


@given(costs)
def test_the_whole_budget_can_be_spent_at_once(total) -> None:
    meter = Meter(total)
    assert meter.units(total) == LIMIT
    assert meter.share(1) == meter.remaining(0) == total


@pytest.mark.parametrize("kind", KINDS)
def test_a_budget_is_shared_by_one_query_up_to_as_many_as_there_are_units(kind) -> None:
    meter = Meter(kind(0.3))
    assert meter.share(1) == kind(0.3)
    assert meter.affordable(meter.share(LIMIT)) == LIMIT
    for refused in (0, -1, LIMIT + 1):
        with pytest.raises(InvalidInput, match="The number of releases must be"):
            meter.share(refused)


def test_a_float_kth_of_a_budget_pays_for_k_queries_or_one_less_and_never_for_too_many() -> None:
    # 1/k as a float may lie just above the true k-th; then k of them are really too much.
    for k in range(1, 3000):
        affordable = Meter(PureCost(1.0)).affordable(PureCost(1.0 / k))
        assert affordable * decimal(1.0 / k) <= 1
        assert affordable in (k - 1, k)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda: Meter(GaussianCost(1.0)).units(PureCost(0.1)), "as_gaussian"),
        (lambda: Meter(PureCost(0.0)), "total of a budget must be above 0"),
        (lambda: Meter(PureCost(1.0)).share(1.5), "integer of at least 0"),
        (lambda: Budget(1.0).total("gaussian"), "requires a delta above 0"),
        (lambda: Budget(1.0).total("gold"), "measure must be"),
        (lambda: Budget(1.0).total("pure", "hopeful"), "analysis must be"),
        *[(lambda bad=bad: Budget(bad), "epsilon must be") for bad in (0.0, -1.0, math.nan, math.inf, "1")],
        *[(lambda bad=bad: Budget(bad), "between 1e-100 and 1e100") for bad in (0.9e-100, 1.1e100)],
        *[(lambda bad=bad: Budget(1.0, delta=bad), "delta must be") for bad in (1.0, -0.1)],
        *[(lambda bad=bad: Budget(1.0, queries=bad), "queries must be") for bad in (0, 2.5)],
    ],
)
def test_impossible_budgets_and_charges_are_refused(wrong, sentence) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        wrong()


def test_the_three_analyses_of_several_queries() -> None:
    budget = Budget(epsilon=10.0, delta=1e-5, queries=100)
    for analysis in ("proven", "published", "published-example"):
        assert per_query(budget, "pure", analysis) == PureCost(0.1)
    assert per_query(budget, "gaussian", "published") == GaussianCost(1.0)
    assert per_query(budget, "gaussian", "published-example") == GaussianCost(0.1)
    proven = per_query(budget, "gaussian")
    assert proven.mu * 10 == pytest.approx(budget.total("gaussian").mu, rel=1e-12)
    assert Meter(budget.total("gaussian")).affordable(proven) == 100


def test_a_budget_without_a_number_of_queries_is_for_one_and_published_totals_need_no_delta() -> None:
    assert per_query(Budget(epsilon=1.0), "pure") == PureCost(1.0)
    assert per_query(Budget(0.3, queries=1), "pure") == PureCost(0.3)
    assert Budget(epsilon=1.0).total("gaussian", "published") == GaussianCost(1.0)
    assert per_query(Budget(epsilon=10.0), "gaussian", "published-example") == GaussianCost(10.0)


def test_a_budget_takes_numbers_of_any_kind_and_size() -> None:
    budget = Budget(epsilon=np.float32(1.0), delta=np.float64(1e-5), queries=np.int64(3))
    assert json.loads(json.dumps(vars(budget))) == {"epsilon": 1.0, "delta": 1e-5, "queries": 3}
    assert Budget(0.3, delta=0.999999).delta == 0.999999
    for epsilon in (1e-100, 1e100):
        assert Budget(epsilon).total("pure") == PureCost(epsilon)

"""Costs compose exactly, budgets divide exactly, and spending never passes the total."""

from __future__ import annotations

import dataclasses
import json
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from hypothesis import given, settings
from hypothesis import strategies as st

import quietmax.accounting as accounting
from quietmax.accounting import (
    LIMIT,
    Budget,
    GaussianCost,
    Guarantee,
    Meter,
    PureCost,
    advanced_composition,
    advanced_composition_per_query,
    bounded_range_as_gaussian,
    compose,
    cost_from_json,
    per_query,
    pure_as_gaussian,
    queries_affordable,
    total_needed,
)
from quietmax.accounting.conversions import (
    decimal,
    root_rounded_down,
    root_rounded_up,
    rounded_down,
    rounded_up,
)
from quietmax.errors import InvalidInput

amounts = st.floats(1e-9, 1e4)
pure = amounts.map(PureCost)
gaussian = amounts.map(GaussianCost)
costs = st.one_of(pure, gaussian)
same_measure = st.one_of(st.lists(pure, min_size=1, max_size=8), st.lists(gaussian, min_size=1, max_size=8))


def size(cost) -> float:
    return cost.epsilon if isinstance(cost, PureCost) else cost.mu


def one_up(value: float, times: int = 1) -> float:
    for _ in range(times):
        value = math.nextafter(value, math.inf)
    return value


@given(st.lists(costs, max_size=8), st.randoms())
def test_composition_does_not_depend_on_the_order(steps, random) -> None:
    shuffled = list(steps)
    random.shuffle(shuffled)
    assert compose(steps) == compose(shuffled)


@given(st.lists(costs, min_size=1, max_size=8), costs)
def test_one_release_more_never_costs_less(steps, further) -> None:
    before, after = compose(steps), compose([*steps, further])
    assert after.as_gaussian().mu >= before.as_gaussian().mu


@given(same_measure, same_measure)
def test_composing_in_parts_is_the_same_to_three_units_in_the_last_place(first, second) -> None:
    if first[0].measure != second[0].measure:
        first = second
    together = size(compose([*first, *second]))
    in_parts = size(compose([compose(first), compose(second)]))
    assert together <= in_parts <= one_up(together, 3)


@given(same_measure)
def test_the_composed_cost_is_the_least_float_above_the_exact_one(steps) -> None:
    exact = sum((step.amount for step in steps), Fraction(0))
    total = compose(steps)
    assert total.amount >= exact
    below = type(total)(math.nextafter(size(total), 0.0))
    assert below.amount < exact


@given(costs, st.integers(1, 10**6))
def test_many_equal_releases_cost_what_composing_them_says(cost, count) -> None:
    assert cost.times(count).amount >= cost.amount * count
    if count <= 50:
        assert cost.times(count) == compose([cost] * count)


def test_sums_of_decimals_are_what_people_expect() -> None:
    assert compose([PureCost(0.1), PureCost(0.2)]) == PureCost(0.3)
    assert compose([PureCost(0.1)] * 10) == PureCost(1.0)
    assert compose([GaussianCost(0.1)] * 100) == GaussianCost(1.0)


def test_mixed_measures_are_composed_in_the_gaussian_one() -> None:
    mixed = compose([PureCost(0.5), GaussianCost(1.0)])
    assert isinstance(mixed, GaussianCost)
    assert mixed.mu == pytest.approx(math.hypot(pure_as_gaussian(0.5), 1.0), rel=1e-14)
    assert bounded_range_as_gaussian(0.5) < pure_as_gaussian(0.5)
    assert compose([]) == PureCost(0.0)


@given(costs)
def test_a_cost_survives_json(cost) -> None:
    assert cost_from_json(json.loads(json.dumps(cost.to_json()))) == cost


@pytest.mark.parametrize("record", [{}, {"measure": "pure"}, {"measure": "gold", "epsilon": 1.0}])
def test_a_record_that_is_no_cost_is_refused(record) -> None:
    with pytest.raises(InvalidInput):
        cost_from_json(record)


@pytest.mark.parametrize("kind", [PureCost, GaussianCost])
@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, 1e-101, 1e101, None, "1"])
def test_an_impossible_cost_is_refused(kind, bad) -> None:
    with pytest.raises(InvalidInput):
        kind(bad)


@given(st.fractions(min_value=Fraction(1, 10**9), max_value=10**9))
def test_outward_rounding_goes_outwards_by_at_most_one_float(value) -> None:
    assert decimal(rounded_down(value)) <= value <= decimal(rounded_up(value))
    assert rounded_up(value) <= one_up(rounded_down(value))
    assert decimal(root_rounded_down(value)) ** 2 <= value <= decimal(root_rounded_up(value)) ** 2
    assert root_rounded_up(value) <= one_up(root_rounded_down(value))


@given(costs, st.integers(1, 7 * 10**7))
def test_a_budget_shared_by_k_queries_pays_for_exactly_k(total, queries) -> None:
    meter = Meter(total)
    assert meter.affordable(meter.share(queries)) == queries


@given(costs, st.lists(st.integers(1, LIMIT), max_size=30))
def test_what_was_spent_and_what_is_left_never_exceed_the_total(total, charges) -> None:
    meter = Meter(total)
    spent = 0
    for units in charges:
        if spent + units <= LIMIT:
            spent += units
    left = meter.remaining(spent)
    assert left.amount <= total.amount - Fraction(spent, LIMIT) * total.amount
    assert meter.spent(spent).amount >= Fraction(spent, LIMIT) * total.amount
    assert spent + meter.units(left) <= LIMIT


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
    assert meter.share(1) == total
    assert meter.remaining(0) == total


@given(costs, st.integers(1, 10**5))
def test_the_total_needed_for_k_queries_pays_for_k(cost, queries) -> None:
    total = total_needed(cost, queries)
    assert queries_affordable(total, cost) >= queries
    assert queries_affordable(total, cost) <= queries + 1
    assert total.amount <= cost.amount * queries * (1 + Fraction(1, 10**9))


def test_a_float_kth_of_a_budget_pays_for_k_queries_or_one_less_and_never_for_too_many() -> None:
    # 1/k as a float may lie just above the true k-th; then k of them are really too much.
    for k in range(1, 3000):
        affordable = queries_affordable(PureCost(1.0), PureCost(1.0 / k))
        assert affordable * decimal(1.0 / k) <= 1
        assert affordable in (k - 1, k)


def test_round_tenths_and_hundredths_divide_a_budget_without_remainder() -> None:
    for parts in (2, 4, 5, 8, 10, 16, 20, 25, 40, 50, 80, 100, 1000, 10_000):
        assert queries_affordable(PureCost(1.0), PureCost(1.0 / parts)) == parts
        assert queries_affordable(PureCost(10.0), PureCost(10.0 / parts)) == parts
    for root in (2, 4, 5, 10, 20, 100, 1000):
        assert queries_affordable(GaussianCost(1.0), GaussianCost(1.0 / root)) == root**2


def test_a_cost_in_the_wrong_measure_is_refused_by_the_meter() -> None:
    with pytest.raises(InvalidInput, match="as_gaussian"):
        Meter(GaussianCost(1.0)).units(PureCost(0.1))


def test_a_meter_needs_a_budget_and_a_cost() -> None:
    with pytest.raises(InvalidInput):
        Meter(PureCost(0.0))
    with pytest.raises(InvalidInput):
        Meter(PureCost(1.0)).affordable(PureCost(0.0))
    for releases in (0, -1, 1.5, LIMIT + 1):
        with pytest.raises(InvalidInput):
            Meter(PureCost(1.0)).share(releases)


def test_the_readings_of_several_queries() -> None:
    budget = Budget(epsilon=10.0, delta=1e-5, queries=100)
    assert per_query(budget, "pure") == PureCost(0.1)
    assert per_query(budget, "pure", "published") == PureCost(0.1)
    assert per_query(budget, "gaussian", "published") == GaussianCost(1.0)
    assert per_query(budget, "gaussian", "published-example") == GaussianCost(0.1)
    proven = per_query(budget, "gaussian")
    assert proven.mu * 10 == pytest.approx(budget.total("gaussian").mu, rel=1e-12)
    assert Meter(budget.total("gaussian")).affordable(proven) == 100


def test_a_budget_without_a_number_of_queries_is_for_one() -> None:
    assert per_query(Budget(epsilon=1.0), "pure") == PureCost(1.0)


def test_a_gaussian_total_needs_a_delta_unless_read_as_published() -> None:
    with pytest.raises(InvalidInput, match="delta"):
        Budget(epsilon=1.0).total("gaussian")
    assert Budget(epsilon=1.0).total("gaussian", "published") == GaussianCost(1.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"epsilon": 0.0},
        {"epsilon": -1.0},
        {"epsilon": math.nan},
        {"epsilon": math.inf},
        {"epsilon": "1"},
        {"epsilon": 1.0, "delta": 1.0},
        {"epsilon": 1.0, "delta": -0.1},
        {"epsilon": 1.0, "queries": 0},
        {"epsilon": 1.0, "queries": 2.5},
    ],
)
def test_an_impossible_budget_is_refused(fields) -> None:
    with pytest.raises(InvalidInput):
        Budget(**fields)


def test_a_budget_takes_numbers_of_any_kind_and_is_json() -> None:
    budget = Budget(epsilon=np.float32(1.0), delta=np.float64(1e-5), queries=np.int64(3))
    assert json.loads(json.dumps(budget.to_json())) == {"epsilon": 1.0, "delta": 1e-5, "queries": 3}


@pytest.mark.parametrize("words", [("gold", "proven"), ("pure", "hopeful")])
def test_unknown_words_are_refused(words) -> None:
    with pytest.raises(InvalidInput):
        Budget(epsilon=1.0).total(*words)


@pytest.mark.parametrize(("epsilon", "queries"), [(0.01, 1000), (0.1, 100), (0.5, 10), (1.0, 50)])
def test_advanced_composition_is_never_below_the_true_privacy_curve(epsilon, queries) -> None:
    # Randomised response is the worst epsilon-private release; dp-accounting composes it numerically.
    flip = 2.0 / (1.0 + math.exp(epsilon))
    curve = pld.from_randomized_response(flip, 2, value_discretization_interval=1e-4).self_compose(queries)
    for delta in (1e-8, 1e-5, 1e-2):
        total = advanced_composition(epsilon, queries, delta)
        assert curve.get_epsilon_for_delta(delta) <= total * 1.001 + queries * 1e-4
        assert total <= queries * epsilon * (1 + 1e-12)


@settings(deadline=None)
@given(st.floats(1e-4, 50.0), st.integers(1, 10**6), st.floats(1e-12, 0.5))
def test_the_inverse_of_advanced_composition_is_safe_and_tight(total, queries, delta) -> None:
    share = advanced_composition_per_query(total, queries, delta)
    assert advanced_composition(share, queries, delta) <= total
    assert advanced_composition(share * (1 + 1e-9), queries, delta) > total
    assert share >= total / queries * (1 - 1e-9)


@pytest.mark.parametrize("arguments", [(0.0, 1, 0.1), (1.0, 0, 0.1), (1.0, 1, 0.0), (1.0, 1, 1.0)])
def test_advanced_composition_refuses_impossible_arguments(arguments) -> None:
    with pytest.raises(InvalidInput):
        advanced_composition(*arguments)
    with pytest.raises(InvalidInput):
        advanced_composition_per_query(*arguments)


@pytest.mark.parametrize("cost", [PureCost(0.5), GaussianCost(0.5)])
def test_a_number_of_releases_beyond_what_a_float_counts_is_refused(cost) -> None:
    assert cost.times(2**53 - 1).amount > cost.amount
    for count in (2**53, 2**60, -1, 0.5, True):
        with pytest.raises(InvalidInput, match="integer of at least 0"):
            cost.times(count)


def test_nothing_in_accounting_can_be_changed_after_it_was_made() -> None:
    classes = [each for each in vars(accounting).values() if dataclasses.is_dataclass(each)]
    assert {Budget, GaussianCost, Guarantee, Meter, PureCost} <= set(classes)
    for made in (PureCost(1.0), GaussianCost(1.0), Budget(1.0), Meter(PureCost(1.0))):
        for field in dataclasses.fields(made):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(made, field.name, None)
    assert all(each.__dataclass_params__.frozen for each in classes)


@pytest.mark.parametrize("cost", [PureCost(0.5), GaussianCost(0.5)])
def test_no_release_costs_nothing_and_one_costs_itself(cost) -> None:
    assert cost.times(0) == type(cost)(0.0)
    assert cost.times(1) == cost


@pytest.mark.parametrize(
    "record", [{"measure": "gaussian"}, {"measure": "gold", "mu": 1.0}, {"measure": "pure", "mu": 1.0}]
)
def test_a_record_whose_measure_and_amount_do_not_fit_is_refused(record) -> None:
    with pytest.raises(InvalidInput, match="must state a measure"):
        cost_from_json(record)


def test_a_budget_may_be_as_small_and_as_large_as_a_cost() -> None:
    for epsilon in (1e-100, 1e100):
        assert Budget(epsilon).total("pure") == PureCost(epsilon)
    for epsilon in (0.9e-100, 1.1e100):
        with pytest.raises(InvalidInput, match="between 1e-100 and 1e100"):
            Budget(epsilon)


def test_a_budget_may_be_for_one_query_and_its_delta_as_close_to_one_as_one_likes() -> None:
    assert per_query(Budget(0.3, queries=1), "pure") == PureCost(0.3)
    assert Budget(0.3, delta=0.999999).delta == 0.999999


def test_dividing_as_in_the_published_example_leaves_the_pure_measure_alone() -> None:
    budget = Budget(epsilon=10.0, delta=1e-5, queries=100)
    assert per_query(budget, "pure", "published-example") == PureCost(0.1)
    assert per_query(Budget(epsilon=10.0), "gaussian", "published-example") == GaussianCost(10.0)


@pytest.mark.parametrize("cost", [PureCost(0.3), GaussianCost(0.3)])
def test_a_total_is_for_one_query_up_to_as_many_as_there_are_units(cost) -> None:
    assert total_needed(cost, 1) == cost
    assert Meter(total_needed(cost, LIMIT)).affordable(cost) == LIMIT
    for refused in (0, LIMIT + 1):
        with pytest.raises(InvalidInput, match=f"between 1 and {LIMIT}"):
            total_needed(cost, refused)


def true_total(epsilon: float, queries: int, delta: float) -> mpmath.mpf:
    with mpmath.workdps(60):
        epsilon, delta = mpmath.mpf(epsilon), mpmath.mpf(delta)
        drift = queries * epsilon * mpmath.tanh(epsilon / 2)
        return min(queries * epsilon, drift + epsilon * mpmath.sqrt(2 * queries * mpmath.log(1 / delta)))


def test_the_total_is_the_formula_rounded_up_by_a_hair() -> None:
    for epsilon in (1e-6, 0.01, 0.3, 1.0, 7.0):
        for queries in (1, 3, 50, 10_000):
            for delta in (1e-12, 1e-5, 0.3, 0.9):
                truth = true_total(epsilon, queries, delta)
                found = mpmath.mpf(advanced_composition(epsilon, queries, delta))
                assert truth < found <= truth * (1 + mpmath.mpf("1e-13"))


def test_one_query_costs_no_more_than_itself() -> None:
    assert advanced_composition(0.5, 1, 1e-5) == pytest.approx(0.5, rel=1e-13)
    assert advanced_composition_per_query(0.5, 1, 1e-5) == pytest.approx(0.5, rel=1e-12)


def test_few_queries_share_evenly_since_simple_composition_is_better() -> None:
    assert advanced_composition_per_query(1.0, 2, 1e-9) == pytest.approx(0.5, rel=1e-12)
    assert advanced_composition_per_query(1.0, 2, 1e-9) <= 0.5


def test_a_generous_delta_never_gives_a_query_more_than_the_total() -> None:
    assert advanced_composition_per_query(0.1, 1, 0.9) <= 0.1
    assert advanced_composition_per_query(0.1, 1, 0.9) == pytest.approx(0.1, rel=1e-12)


@pytest.mark.parametrize("total", [1e-9, 0.01, 3.0, 500.0])
def test_the_share_is_the_largest_to_twelve_digits(total) -> None:
    for queries in (1, 7, 1000):
        share = advanced_composition_per_query(total, queries, 1e-6)
        assert advanced_composition(share, queries, 1e-6) <= total
        assert advanced_composition(share * (1 + 1e-12), queries, 1e-6) > total


@pytest.mark.parametrize("epsilon", [-1.0, 0.0, math.inf, math.nan])
def test_an_epsilon_that_is_no_positive_number_is_refused(epsilon) -> None:
    for function in (advanced_composition, advanced_composition_per_query):
        with pytest.raises(InvalidInput, match="epsilon must be a finite number above 0"):
            function(epsilon, 2, 1e-5)


def test_costs_that_version_0_1_wrote_are_read() -> None:
    assert cost_from_json({"currency": "pure", "epsilon": 0.5}) == PureCost(0.5)
    assert cost_from_json({"currency": "gaussian", "mu": 0.5}) == GaussianCost(0.5)

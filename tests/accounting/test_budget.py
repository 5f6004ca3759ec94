"""Budgets and meters: exact to the last float and the last unit."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quietmax.accounting import Budget, GaussianCost, PureCost, per_query, queries_affordable, total_needed
from quietmax.accounting.costs import LIMIT, Meter, decimal
from quietmax.errors import InvalidInput

amounts = st.floats(1e-9, 1e4)
pure = amounts.map(PureCost)
gaussian = amounts.map(GaussianCost)
costs = st.one_of(pure, gaussian)


def test_a_budget_divides_exactly_by_every_number_to_ten_and_by_powers_of_ten_and_fits_json() -> None:
    assert all(LIMIT % parts == 0 for parts in [*range(1, 11), *(10**power for power in range(13))])
    assert LIMIT < 2**53


@pytest.mark.parametrize("total", [PureCost(1.0), GaussianCost(1.0)])
def test_the_smallest_charge_is_one_unit_and_the_budget_has_limit_of_them(total) -> None:
    meter = Meter(total)
    tiny = type(total)(1e-60)
    assert meter.units(tiny) == 1
    assert meter.affordable(tiny) == LIMIT
    assert meter.units(meter.share(LIMIT)) == 1
    assert meter.units(type(total)(0.0)) == 0


@pytest.mark.parametrize("total", [PureCost(0.7), GaussianCost(0.7)])
def test_a_spent_budget_has_nothing_left_even_if_more_was_spent(total) -> None:
    meter = Meter(total)
    nothing = type(total)(0.0)
    assert meter.remaining(LIMIT) == meter.remaining(LIMIT + 5) == nothing
    assert meter.remaining(LIMIT - 1) != nothing
    assert meter.spent(0) == nothing
    assert meter.spent(LIMIT) == total


@given(st.floats(1e-6, 1e6), st.integers(1, LIMIT - 1))
def test_what_was_spent_is_rounded_up_and_what_is_left_down_by_less_than_a_float(epsilon, units) -> None:
    meter = Meter(PureCost(epsilon))
    spent, left = Fraction(units, LIMIT) * decimal(epsilon), Fraction(LIMIT - units, LIMIT) * decimal(epsilon)
    assert decimal(math.nextafter(meter.spent(units).epsilon, 0.0)) < spent <= meter.spent(units).amount
    after = math.nextafter(meter.remaining(units).epsilon, math.inf)
    assert meter.remaining(units).amount <= left < decimal(after)


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


def test_the_three_analyses_of_several_queries() -> None:
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


def test_a_gaussian_total_needs_a_delta_unless_analysed_as_published() -> None:
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

"""Costs compose exactly, budgets divide exactly, and spending never passes the total."""

from __future__ import annotations

import dataclasses
import json
import math
from fractions import Fraction

import mpmath
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from hypothesis import given, settings
from hypothesis import strategies as st

from quietmax.accounting import Budget, GaussianCost, Guarantee, PureCost, compose, pure_as_gaussian
from quietmax.accounting import costs as costs_module
from quietmax.accounting import guarantee as guarantee_module
from quietmax.accounting.costs import Meter, bounded_range_as_gaussian, cost_from_json, decimal
from quietmax.accounting.dpsgd import advanced_composition, advanced_composition_per_query
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
    classes = [
        each
        for module in (costs_module, guarantee_module)
        for each in vars(module).values()
        if dataclasses.is_dataclass(each)
    ]
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


def test_one_query_may_have_all_but_the_slack() -> None:
    assert advanced_composition_per_query(1.0, 1, 1e-5) == 1.0 - 2.0**-44


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


@pytest.mark.parametrize("kind", [PureCost, GaussianCost])
def test_a_cost_is_nothing_or_from_1e_100_to_1e100_both_included(kind) -> None:
    for allowed in (0.0, 1e-100, 1e100):
        assert decimal(kind(allowed).to_json()["mu" if kind is GaussianCost else "epsilon"]) == decimal(
            allowed
        )
    for refused in (math.nextafter(1e-100, 0.0), math.nextafter(1e100, math.inf)):
        with pytest.raises(InvalidInput, match="between 1e-100 and 1e100"):
            kind(refused)


def test_nothing_is_never_written_with_a_sign() -> None:
    assert math.copysign(1.0, PureCost(-0.0).epsilon) == 1.0

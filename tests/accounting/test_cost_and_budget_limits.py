"""Costs and budgets at the ends of what they take."""

from __future__ import annotations

import dataclasses

import pytest

import quietmax.accounting as accounting
from quietmax.accounting import (
    LIMIT,
    Budget,
    GaussianCost,
    Guarantee,
    Meter,
    PureCost,
    cost_from_json,
    per_query,
    total_needed,
)
from quietmax.errors import InvalidInput


def test_nothing_in_accounting_can_be_changed_after_it_was_made():
    classes = [each for each in vars(accounting).values() if dataclasses.is_dataclass(each)]
    assert {Budget, GaussianCost, Guarantee, Meter, PureCost} <= set(classes)
    for made in (PureCost(1.0), GaussianCost(1.0), Budget(1.0), Meter(PureCost(1.0))):
        for field in dataclasses.fields(made):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(made, field.name, None)
    assert all(each.__dataclass_params__.frozen for each in classes)


@pytest.mark.parametrize("cost", [PureCost(0.5), GaussianCost(0.5)])
def test_no_release_costs_nothing_and_one_costs_itself(cost):
    assert cost.times(0) == type(cost)(0.0)
    assert cost.times(1) == cost


@pytest.mark.parametrize(
    "record", [{"currency": "gaussian"}, {"currency": "gold", "mu": 1.0}, {"currency": "pure", "mu": 1.0}]
)
def test_a_record_whose_currency_and_amount_do_not_fit_is_refused(record):
    with pytest.raises(InvalidInput, match="cannot be read from"):
        cost_from_json(record)


def test_a_budget_may_be_as_small_and_as_large_as_a_cost():
    for epsilon in (1e-100, 1e100):
        assert Budget(epsilon).in_currency("pure") == PureCost(epsilon)
    for epsilon in (0.9e-100, 1.1e100):
        with pytest.raises(InvalidInput, match="1e-100 to 1e100"):
            Budget(epsilon)


def test_a_budget_may_be_for_one_query_and_its_delta_as_close_to_one_as_one_likes():
    assert per_query(Budget(0.3, queries=1), "pure") == PureCost(0.3)
    assert Budget(0.3, delta=0.999999).delta == 0.999999


def test_dividing_as_in_the_published_example_leaves_the_pure_currency_alone():
    budget = Budget(epsilon=10.0, delta=1e-5, queries=100)
    assert per_query(budget, "pure", "published-example") == PureCost(0.1)
    assert per_query(Budget(epsilon=10.0), "gaussian", "published-example") == GaussianCost(10.0)


@pytest.mark.parametrize("cost", [PureCost(0.3), GaussianCost(0.3)])
def test_a_total_is_for_one_query_up_to_as_many_as_there_are_units(cost):
    assert total_needed(cost, 1) == cost
    assert Meter(total_needed(cost, LIMIT)).affordable(cost) == LIMIT
    for refused in (0, LIMIT + 1):
        with pytest.raises(InvalidInput, match=f"1 to {LIMIT}"):
            total_needed(cost, refused)

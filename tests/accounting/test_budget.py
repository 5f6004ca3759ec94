"""Exact arithmetic and whole units: what is promised of the limits, to the last float and the last unit."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quietmax.accounting import LIMIT, GaussianCost, Meter, PureCost
from quietmax.accounting.conversions import (
    as_number,
    decimal,
    root_rounded_down,
    root_rounded_up,
    rounded_down,
    rounded_up,
)
from quietmax.errors import InvalidInput


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


@pytest.mark.parametrize("value", [10**400, "x", None, []])
def test_what_no_float_can_be_is_no_number(value) -> None:
    assert math.isnan(as_number(value))

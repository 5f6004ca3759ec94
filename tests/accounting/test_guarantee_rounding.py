"""What a guarantee derives is rounded towards less privacy, and by a hair only."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import mpmath
import pytest

from quietmax.accounting import GaussianCost, Guarantee, PureCost
from quietmax.errors import InvalidInput

HAIR = mpmath.mpf("1e-12")


def pure(epsilon: float, **more) -> Guarantee:
    return Guarantee.of(PureCost(epsilon), status="proven", because="x", **more)


def approximate(epsilon: float, delta: float, **more) -> Guarantee:
    return Guarantee("approximate", epsilon=epsilon, delta=delta, status="proven", because="x", **more)


@pytest.mark.parametrize("claimed", [1e-6, 0.1, 1.0, 5.0, 40.0])
def test_the_delta_of_a_pure_claim_is_that_of_randomised_response_rounded_up(claimed):
    for part in (0.0, 0.1, 0.5, 0.9, 0.999):
        epsilon = part * claimed
        with mpmath.workdps(60):
            right = 1 / (1 + mpmath.exp(-mpmath.mpf(claimed)))
            truth = right - mpmath.exp(mpmath.mpf(epsilon)) * (1 - right)
        assert truth < mpmath.mpf(pure(claimed).at_epsilon(epsilon)) < truth * (1 + HAIR)
    for epsilon in (claimed, claimed * 1.5, claimed + 0.5, 1e6):
        assert pure(claimed).at_epsilon(epsilon) == 0.0


@pytest.mark.parametrize("claimed", [0.1, 1.0, 5.0])
def test_the_epsilon_of_a_pure_claim_is_rounded_up(claimed):
    for delta in (1e-9, 1e-5, 0.01):
        with mpmath.workdps(60):
            truth = mpmath.mpf(claimed) + mpmath.log(1 - delta * (1 + mpmath.exp(-mpmath.mpf(claimed))))
        found = mpmath.mpf(pure(claimed).at_delta(delta))
        assert truth < found < truth * (1 + HAIR)


def test_a_delta_beyond_the_worst_case_needs_no_epsilon():
    for delta in (0.5, 0.7, 0.74, 0.9, 0.99):
        assert pure(1.0).at_delta(delta) == 0.0
    assert pure(1.0).at_delta(0.4) > 0.0


def test_no_derived_delta_is_larger_than_one():
    assert approximate(20.0, 0.9).at_epsilon(0.0) == 1.0
    assert pure(100.0, extra_delta=0.5).at_epsilon(0.0) == 1.0


def test_two_deltas_are_added_and_rounded_up():
    claim = approximate(1.0, 1e-5, extra_delta=1e-6)
    total = Fraction(1e-5) + Fraction(1e-6)
    assert total < Fraction(claim.at_epsilon(1.0)) < total * (1 + Fraction(1, 10**12))
    mixed = Guarantee.of(PureCost(1.0), status="proven", because="x", extra_delta=1e-6)
    plain = Fraction(pure(1.0).at_epsilon(0.5)) + Fraction(1e-6)
    assert plain < Fraction(mixed.at_epsilon(0.5)) < plain * (1 + Fraction(1, 10**12))


def test_an_extra_delta_alone_is_stated_as_it_is():
    assert pure(1.0, extra_delta=1e-6).at_epsilon(2.0) == 1e-6
    assert approximate(1.0, 1e-5).at_epsilon(2.0) == 1e-5


def test_what_is_left_of_a_delta_after_the_extra_one_is_rounded_down():
    for cost in (PureCost(1.0), GaussianCost(1.0)):
        plain = Guarantee.of(cost, status="proven", because="x")
        claim = dataclasses.replace(plain, extra_delta=1e-6)
        for delta in (1.1e-6, 1e-5, 0.1):
            without = Fraction(plain.at_epsilon(claim.at_delta(delta)))
            assert Fraction(delta) - Fraction(1, 10**11) < without + Fraction(1e-6) <= Fraction(delta)
        assert claim.at_delta(math.nextafter(1e-6, 0.0)) == math.inf
    assert pure(1.0, extra_delta=1e-6).at_delta(1e-6) == 1.0


def test_a_release_that_costs_nothing_is_private_at_delta_zero():
    nothing = Guarantee.of(GaussianCost(0.0), status="proven", because="x")
    assert nothing.at_delta(0.0) == 0.0
    assert nothing.at_delta(1e-5) == 0.0
    assert nothing.at_epsilon(0.0) == 0.0


def test_a_guarantee_may_be_restated_with_the_same_status():
    assert pure(1.0).weakened("proven", "Another proof.").because == "Another proof."
    assert pure(1.0).weakened("refuted", "No.").weakened("refuted", "Still no.").status == "refuted"
    with pytest.raises(InvalidInput, match="cannot be weakened"):
        pure(1.0).weakened("refuted", "No.").weakened("conditional", "Perhaps.")


@pytest.mark.parametrize("extra", [-1e-9, 1.0, math.nan])
def test_an_extra_delta_is_from_zero_to_below_one(extra):
    with pytest.raises(InvalidInput, match="from 0 to below 1"):
        pure(1.0, extra_delta=extra)


def test_two_deltas_together_stay_below_one():
    assert approximate(1.0, 0.5, extra_delta=0.25).at_epsilon(1.0) == pytest.approx(0.75)
    with pytest.raises(InvalidInput, match="less than 1"):
        approximate(1.0, 0.5, extra_delta=0.5)


def test_a_guarantee_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        pure(1.0).epsilon = 0.5

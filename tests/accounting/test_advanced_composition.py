"""Advanced composition against its formula at sixty digits, at the ends of what it takes."""

from __future__ import annotations

import math

import mpmath
import pytest

from quietmax.accounting import advanced_composition, advanced_composition_per_query
from quietmax.errors import InvalidInput


def true_total(epsilon: float, queries: int, delta: float) -> mpmath.mpf:
    with mpmath.workdps(60):
        epsilon, delta = mpmath.mpf(epsilon), mpmath.mpf(delta)
        drift = queries * epsilon * mpmath.tanh(epsilon / 2)
        return min(queries * epsilon, drift + epsilon * mpmath.sqrt(2 * queries * mpmath.log(1 / delta)))


def test_the_total_is_the_formula_rounded_up_by_a_hair():
    for epsilon in (1e-6, 0.01, 0.3, 1.0, 7.0):
        for queries in (1, 3, 50, 10_000):
            for delta in (1e-12, 1e-5, 0.3, 0.9):
                truth = true_total(epsilon, queries, delta)
                found = mpmath.mpf(advanced_composition(epsilon, queries, delta))
                assert truth < found <= truth * (1 + mpmath.mpf("1e-13"))


def test_one_query_costs_no_more_than_itself():
    assert advanced_composition(0.5, 1, 1e-5) == pytest.approx(0.5, rel=1e-13)
    assert advanced_composition_per_query(0.5, 1, 1e-5) == pytest.approx(0.5, rel=1e-12)


def test_few_queries_share_evenly_since_simple_composition_is_better():
    assert advanced_composition_per_query(1.0, 2, 1e-9) == pytest.approx(0.5, rel=1e-12)
    assert advanced_composition_per_query(1.0, 2, 1e-9) <= 0.5


def test_a_generous_delta_never_gives_a_query_more_than_the_total():
    assert advanced_composition_per_query(0.1, 1, 0.9) <= 0.1
    assert advanced_composition_per_query(0.1, 1, 0.9) == pytest.approx(0.1, rel=1e-12)


@pytest.mark.parametrize("total", [1e-9, 0.01, 3.0, 500.0])
def test_the_share_is_the_largest_to_twelve_digits(total):
    for queries in (1, 7, 1000):
        share = advanced_composition_per_query(total, queries, 1e-6)
        assert advanced_composition(share, queries, 1e-6) <= total
        assert advanced_composition(share * (1 + 1e-12), queries, 1e-6) > total


@pytest.mark.parametrize("epsilon", [-1.0, 0.0, math.inf, math.nan])
def test_an_epsilon_that_is_no_positive_number_is_refused(epsilon):
    for function in (advanced_composition, advanced_composition_per_query):
        with pytest.raises(InvalidInput, match="give a positive epsilon"):
            function(epsilon, 2, 1e-5)

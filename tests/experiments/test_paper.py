"""The paper's numbers, and what follows from them without training."""

from __future__ import annotations

import math

import pytest

from quietmax.errors import InvalidInput
from quietmax.experiments import paper
from quietmax.experiments.paper import (
    MISPRINTS,
    correlate,
    reproduce_correlations,
    reproduce_sensitivity_table,
)


def test_all_eleven_rows_equal_the_paper_to_its_printed_digits_except_two_residues() -> None:
    rows = reproduce_sensitivity_table()
    assert len({row.dataset for row in rows}) == 11
    assert len(rows) == 11 * 6
    different = {(row.dataset, row.quantity) for row in rows if not row.agrees}
    roots = {("purchase-2", "logit"), ("purchase-20", "oaro")}
    consequences = {("purchase-2", "probability"), ("purchase-2", "probability_untruncated")}
    assert different == set(MISPRINTS) == roots | consequences
    assert all(row.note for row in rows if not row.agrees)


def test_the_papers_purchase_2_probability_follows_from_its_printed_logit() -> None:
    printed = paper._sensitivity_table()["purchase-2"]
    assert round(math.expm1(2 * printed["delta_logit"]), 4) == printed["delta_probability_untruncated"]


def test_a_data_set_that_the_paper_does_not_have_is_an_error() -> None:
    with pytest.raises(InvalidInput, match="no row for 'mnist-5k'"):
        reproduce_sensitivity_table(["mnist-5k"])


def test_all_correlations_equal_the_paper_to_its_printed_digits() -> None:
    rows = reproduce_correlations()
    assert len(rows) == 18
    assert all(row.agrees for row in rows)


def test_correlations_need_three_pairs() -> None:
    with pytest.raises(InvalidInput, match="at least 3; got 2 and 2 values"):
        correlate([1, 2], [1, 2])


def test_the_files_have_every_curve_of_the_figures() -> None:
    names = paper._sensitivity_table()
    assert set(names) == set(paper.accuracy_table())
    for dataset in names:
        for series in ("alg1_gauss", "alg1_lap", "rdp", "zcdp", "ac", "nc"):
            for metric in ("acc_loss", "priv_leak"):
                assert tuple(sorted(paper.curve(dataset, metric, series))) == paper.EPSILONS


def test_the_printed_bound_is_the_papers_own_formula() -> None:
    for dataset in paper.accuracy_table():
        plain = paper.curve(dataset, "priv_leak", "nonprivate")
        for epsilon, bound in paper.curve(dataset, "priv_leak", "published_bound").items():
            assert bound == pytest.approx(min(math.expm1(min(epsilon, 1.0)), plain[epsilon]), abs=6e-3)

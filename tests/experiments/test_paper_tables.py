from __future__ import annotations

import math

import pytest

from quietmax.errors import InvalidInput
from quietmax.experiments import reference
from quietmax.experiments.accuracy_table import Accuracies, measure_accuracies
from quietmax.experiments.correlation import correlate, reproduce_correlations
from quietmax.experiments.sensitivity_table import RESIDUES, reproduce_sensitivity_table


def test_all_eleven_rows_equal_the_paper_to_its_printed_digits_except_two_residues():
    rows = reproduce_sensitivity_table()
    assert len({row.dataset for row in rows}) == 11
    assert len(rows) == 11 * 6
    different = {(row.dataset, row.quantity) for row in rows if not row.agrees}
    roots = {("purchase-2", "logit"), ("purchase-20", "oaro")}
    consequences = {("purchase-2", "probability"), ("purchase-2", "probability_untruncated")}
    assert different == set(RESIDUES) == roots | consequences
    assert all(row.note for row in rows if not row.agrees)


def test_the_papers_purchase_2_probability_follows_from_its_printed_logit():
    printed = reference.sensitivity_table()["purchase-2"]
    assert round(math.expm1(2 * printed["delta_logit"]), 4) == printed["delta_probability_untruncated"]


def test_the_two_residues_are_what_the_formulas_give():
    by_name = {(row.dataset, row.quantity): row for row in reproduce_sensitivity_table()}
    assert round(by_name["purchase-2", "logit"].ours, 4) == 0.1997
    assert round(by_name["purchase-20", "oaro"].ours, 4) == 1.6753


def test_a_row_the_paper_does_not_have_is_refused():
    with pytest.raises(InvalidInput, match="no row"):
        reproduce_sensitivity_table(["mnist-5k"])


def test_all_correlations_equal_the_paper_to_its_printed_digits():
    rows = reproduce_correlations()
    assert len(rows) == 18
    assert all(row.agrees for row in rows)


def test_correlations_need_three_pairs():
    with pytest.raises(InvalidInput, match="at least 3"):
        correlate([1, 2], [1, 2])


def test_the_reference_holds_every_curve_of_the_figures():
    names = reference.sensitivity_table()
    assert set(names) == set(reference.accuracy_table())
    for dataset in names:
        for series in ("alg1_gauss", "alg1_lap", "rdp", "zcdp", "ac", "nc"):
            for metric in ("acc_loss", "priv_leak"):
                assert len(reference.curve(dataset, metric, series)) == 11


def test_the_printed_bound_is_the_papers_own_formula():
    for dataset in reference.accuracy_table():
        plain = reference.curve(dataset, "priv_leak", "nonprivate")
        for epsilon, bound in reference.curve(dataset, "priv_leak", "published_bound").items():
            assert bound == pytest.approx(min(math.expm1(min(epsilon, 1.0)), plain[epsilon]), abs=6e-3)


def test_accuracies_are_compared_with_the_paper_within_the_stated_tolerance():
    row = Accuracies("location", (1.0, 1.0), (0.60, 0.62), (0.99, 0.99), (0.60, 0.61))
    agrees = {each.quantity: each.agrees for each in row.comparisons()}
    assert agrees == {
        "original train accuracy": True,
        "original test accuracy": True,
        "convexified train accuracy": True,
        "convexified test accuracy": False,
    }


def test_location_reproduces_the_papers_accuracies(real_data):
    """Three repeats of the real thing; the ten of the table run in `reproduce accuracy-table`."""
    found = measure_accuracies("location", repeats=3, data_dir=real_data)
    assert {
        row.quantity: row.agrees for row in found.comparisons() if row.quantity.startswith("convexified")
    } == {
        "convexified train accuracy": True,
        "convexified test accuracy": True,
    }


def test_repeats_must_be_positive(real_data):
    with pytest.raises(InvalidInput, match="repeats"):
        measure_accuracies("location", repeats=0, data_dir=real_data)

"""Algorithm 1's accuracy loss over epsilon, against the curves of the paper's figures."""

from __future__ import annotations

import math

import pytest

from quietmax.errors import InvalidInput
from quietmax.experiments import paper as reference
from quietmax.experiments.paper import (
    EPSILONS,
    RESIDUES,
    Accuracies,
    LossCurve,
    correlate,
    measure_accuracies,
    measure_accuracy_loss,
    reproduce_correlations,
    reproduce_sensitivity_table,
)
from quietmax.experiments.paper import LOSS_TOLERANCE as TOLERANCE


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


def _differences(name, real_data, repeats=10):
    curves = measure_accuracy_loss(name, repeats=repeats, data_dir=real_data)
    rows = [row for curve in curves for row in curve.comparisons()]
    assert len(rows) == 2 * len(EPSILONS)
    return {row.quantity: round(row.difference, 4) for row in rows if not row.agrees}


def test_location_is_within_the_tolerance_at_every_epsilon(real_data):
    assert _differences("location", real_data) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "adult"])
def test_mnist_and_adult_are_within_the_tolerance_at_every_epsilon(real_data, name):
    assert _differences(name, real_data) == {}


def test_a_curve_is_compared_point_by_point():
    curve = LossCurve("location", "gaussian", (1.0, 5.0, 3.0), ((0.45, 0.36, 0.1), (0.46, 0.36, 0.1)))
    rows = curve.comparisons()
    assert [row.agrees for row in rows] == [True, False]  # 3.0 is not in the paper
    assert rows[1].difference == pytest.approx(0.36 - 0.3053)
    assert abs(rows[1].difference) > TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adult", "mnist", "location"])
def test_convexified_accuracies_are_within_the_tolerance_of_the_paper(real_data, name):
    rows = measure_accuracies(name, repeats=10, data_dir=real_data).comparisons()
    assert {row.quantity: row.agrees for row in rows} == {row.quantity: True for row in rows}

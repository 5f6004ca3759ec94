from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, norm

from quietmax.accounting import PureCost
from quietmax.attacks.metrics import (
    _ESTIMATES,
    AttackReport,
    Estimate,
    Floats,
    _auc,
    _difference,
    _proportion,
    _roc_curve,
    _tpr_at_fpr,
    best_threshold,
    plot_reports,
)
from quietmax.errors import InvalidInput, QuietmaxError

few_values = st.lists(st.integers(-3, 3), min_size=1, max_size=30).map(
    lambda values: np.array(values, dtype=float)
)


@given(few_values, few_values)
def test_the_curve_counts_what_lies_at_or_above_each_distinct_score(
    members: Floats, nonmembers: Floats
) -> None:
    curve = _roc_curve(members, nonmembers)
    distinct = sorted(set(members) | set(nonmembers), reverse=True)
    assert curve.true_positives.tolist() == [0, *((members >= value).sum() for value in distinct)]
    assert curve.false_positives.tolist() == [0, *((nonmembers >= value).sum() for value in distinct)]


@given(few_values, few_values)
def test_the_best_threshold_beats_every_other(members: Floats, nonmembers: Floats) -> None:
    def gain(threshold: float) -> float:
        return float((members > threshold).mean() - (nonmembers > threshold).mean())

    chosen = gain(best_threshold(members, nonmembers))
    assert all(chosen >= gain(other) - 1e-12 for other in np.arange(-4, 4, 0.5))
    assert chosen >= 0


@given(few_values, few_values)
def test_the_auc_is_the_probability_of_a_member_above_a_nonmember(
    members: Floats, nonmembers: Floats
) -> None:
    above = (members[:, None] > nonmembers).mean() + (members[:, None] == nonmembers).mean() / 2
    found = _auc(members, nonmembers)
    assert found.value == pytest.approx(above)
    assert found.low <= found.value <= found.high


def test_the_thinned_curve_is_part_of_the_curve_and_short() -> None:
    generator = np.random.default_rng(1)
    curve = _roc_curve(generator.normal(1, 1, 20_000), generator.normal(0, 1, 20_000))
    fpr, tpr = curve._thinned()
    assert len(fpr) == len(tpr) <= 402
    assert (fpr[0], tpr[-1], fpr[-1]) == (0.0, 1.0, 1.0)
    points = set(zip(curve.fpr.tolist(), curve.tpr.tolist(), strict=True))
    assert points >= set(zip(fpr, tpr, strict=True))


def test_the_interval_of_a_difference_stays_within_possible_values() -> None:
    assert _difference(Estimate(1.0, 0.6, 1.0), Estimate(0.0, 0.0, 0.4)).high == 1.0
    assert _difference(Estimate(0.0, 0.0, 0.4), Estimate(1.0, 0.6, 1.0)).low == -1.0


def test_the_variance_of_the_auc_is_that_of_delong() -> None:
    generator = np.random.default_rng(3)
    members, nonmembers = generator.normal(0.7, 1, 60).round(1), generator.normal(0, 1, 45).round(1)
    wins = (members[:, None] > nonmembers) + (members[:, None] == nonmembers) / 2
    variance = wins.mean(1).var(ddof=1) / 60 + wins.mean(0).var(ddof=1) / 45
    found = _auc(members, nonmembers)
    assert found.high - found.value == pytest.approx(1.959964 * variance**0.5, rel=1e-5)


def test_complete_separation_has_an_interval_of_positive_length() -> None:
    found = _auc(np.arange(1.0, 51.0), -np.arange(1.0, 51.0))
    assert found.value == found.high == 1.0
    assert found.low == pytest.approx(1 - (np.log(40) / 100) ** 0.5)


def test_tpr_at_an_fpr_is_the_best_below_it_and_its_limits_account_for_few_nonmembers_and_ties() -> None:
    curve = _roc_curve(np.array([5.0, 4.0, 1.0]), np.concatenate([[4.5], np.zeros(99)]))
    assert _tpr_at_fpr(curve, 0.001).value == pytest.approx(1 / 3)
    assert _tpr_at_fpr(curve, 0.01).value == pytest.approx(1.0)
    separated = _roc_curve(np.ones(1000), np.zeros(1000))
    assert _tpr_at_fpr(separated, 0.001).low == 0.0
    assert _tpr_at_fpr(separated, 0.01).low > 0.99
    ties = np.repeat([1.0, 0.0], 500)
    assert _tpr_at_fpr(_roc_curve(ties, ties), 0.01).high < 0.01


@given(few_values, few_values, st.sampled_from([0.001, 0.01, 0.2, 0.5, 1.0]))
def test_tpr_at_an_fpr_lies_in_its_interval(members: Floats, nonmembers: Floats, fpr: float) -> None:
    found = _tpr_at_fpr(_roc_curve(members, nonmembers), fpr)
    assert 0 <= found.low <= found.value <= found.high <= 1


def test_the_interval_of_tpr_at_an_fpr_has_the_stated_coverage() -> None:
    generator = np.random.default_rng(4)
    truth = norm.sf(norm.isf(0.05) - 1.5)
    repeats, covered = 600, 0
    for _ in range(repeats):
        curve = _roc_curve(generator.normal(1.5, 1, 300), generator.normal(0, 1, 300))
        found = _tpr_at_fpr(curve, 0.05)
        assert found.low <= found.value <= found.high
        covered += found.low <= truth <= found.high
    # At a coverage of 95%, fewer than 542 of 600 has probability below 1e-6.
    assert covered >= 542


@pytest.mark.parametrize("broken", [np.array([]), np.array([np.nan]), np.array([np.inf])])
def test_missing_or_infinite_scores_are_errors(broken: Floats) -> None:
    with pytest.raises(InvalidInput):
        _roc_curve(broken, np.array([0.0]))


@pytest.mark.parametrize(("members", "nonmembers"), [(10, 10), (30, 30), (20, 100)])
def test_the_interval_of_a_difference_covers_small_and_large_ones_as_stated(
    members: int, nonmembers: int
) -> None:
    """Enumerate all counts for rates up to the corners, where the interval is weakest."""
    rows = [
        [
            _difference(_proportion(one, members), _proportion(other, nonmembers))
            for other in range(nonmembers + 1)
        ]
        for one in range(members + 1)
    ]
    low, high = (np.array([[getattr(each, end) for each in row] for row in rows]) for end in ("low", "high"))
    half = np.concatenate([np.geomspace(1e-3, 0.05, 25), np.linspace(0.06, 0.5, 12)])
    rates = np.concatenate([half, 1 - half[::-1]])
    first, second = (
        binom.pmf(np.arange(trials + 1), trials, rates[:, None]) for trials in (members, nonmembers)
    )
    small: list[float] = []
    large: list[float] = []
    for (one, p), (other, q) in itertools.product(enumerate(rates), repeat=2):
        covered = float(first[one] @ ((low <= p - q) & (p - q <= high)) @ second[other])
        (small if abs(p - q) <= 0.5 else large).append(covered)
    assert min(small) >= 0.95
    assert min(large) >= 0.92


@pytest.fixture
def report() -> AttackReport:
    generator = np.random.default_rng(0)
    return AttackReport._from_scores(
        attack="test",
        target="a toy",
        released="probabilities",
        member_scores=generator.normal(1, 1, 400),
        nonmember_scores=generator.normal(0, 1, 300),
        decision=0.0,
        threshold=0.5,
        queries=700,
        spent=PureCost(70.0),
        settings={"models": 3},
        notes=["one thing"],
    )


def test_the_decision_and_the_threshold_give_leakage_and_advantage(report: AttackReport) -> None:
    generator = np.random.default_rng(0)
    members, nonmembers = generator.normal(1, 1, 400), generator.normal(0, 1, 300)
    assert report.tpr.value == (members > 0).mean()
    assert report.fpr.value == (nonmembers > 0).mean()
    assert report.leakage.value == pytest.approx((members > 0).mean() - (nonmembers > 0).mean())
    assert report.advantage.value == pytest.approx((members > 0.5).mean() - (nonmembers > 0.5).mean())


def test_the_report_is_valid_json_and_every_estimate_lies_in_its_interval(report: AttackReport) -> None:
    values = json.loads(json.dumps(report.to_json(), allow_nan=False))
    for name in _ESTIMATES.values():
        estimate = getattr(report, name)
        assert estimate.low <= estimate.value <= estimate.high
        assert estimate.low < estimate.high
        assert values[name] == estimate.to_json()
    assert (values["members"], values["nonmembers"], values["queries"]) == (400, 300, 700)
    assert values["spent"] == {"measure": "pure", "epsilon": 70.0}
    assert values["roc"]["fpr"][-1] == values["roc"]["tpr"][-1] == 1.0
    assert "Clopper-Pearson" in values["intervals"]


def test_the_report_prints_as_a_table(report: AttackReport) -> None:
    text = str(report)
    assert text.splitlines()[0] == "test against a toy: 400 members, 300 non-members"
    for word in (*_ESTIMATES, "spent epsilon = 70", "one thing", f"{report.auc.value:.4f}"):
        assert word in text


def test_a_plot_names_every_attack(report: AttackReport, tmp_path: Path) -> None:
    other = replace(report, attack="second")
    text = plot_reports([report, other], tmp_path / "both.svg").read_text()
    for word in ("<!-- test against a toy", "<!-- second against a toy", "false positive rate"):
        assert word in text
    assert report.plot(tmp_path / "roc.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_written_is_an_error(report: AttackReport, tmp_path: Path) -> None:
    for path in (tmp_path / "missing" / "roc.png", tmp_path / "roc.words"):
        with pytest.raises(QuietmaxError, match="could not be written"):
            report.plot(path)
    with pytest.raises(InvalidInput, match="at least one"):
        plot_reports([], tmp_path / "none.png")

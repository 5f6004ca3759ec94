from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, norm
from sklearn import metrics as sklearn_metrics

from quietmax.attacks.metrics import (
    Estimate,
    Floats,
    _difference,
    _proportion,
    _roc_curve,
    _tpr_at_fpr,
    auc,
    best_threshold,
    clopper_pearson,
)
from quietmax.errors import InvalidInput

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
    found = auc(members, nonmembers)
    assert found.value == pytest.approx(above)
    assert found.low <= found.value <= found.high


def test_curve_and_auc_agree_with_scikit_learn() -> None:
    generator = np.random.default_rng(0)
    members, nonmembers = generator.normal(1, 1, 300), generator.normal(0, 1, 200)
    truth = np.repeat([1, 0], [300, 200])
    scores = np.concatenate([members, nonmembers])
    fpr, tpr, _ = sklearn_metrics.roc_curve(truth, scores, drop_intermediate=False)
    curve = _roc_curve(members, nonmembers)
    np.testing.assert_allclose(curve.fpr, fpr)
    np.testing.assert_allclose(curve.tpr, tpr)
    assert auc(members, nonmembers).value == pytest.approx(sklearn_metrics.roc_auc_score(truth, scores))


def test_the_thinned_curve_is_part_of_the_curve_and_short() -> None:
    generator = np.random.default_rng(1)
    curve = _roc_curve(generator.normal(1, 1, 20_000), generator.normal(0, 1, 20_000))
    fpr, tpr = curve.thinned()
    assert len(fpr) == len(tpr) <= 402
    assert (fpr[0], tpr[-1], fpr[-1]) == (0.0, 1.0, 1.0)
    points = set(zip(curve.fpr.tolist(), curve.tpr.tolist(), strict=True))
    assert points >= set(zip(fpr, tpr, strict=True))


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (3, 10), (10, 10), (517, 1200)])
def test_clopper_pearson_agrees_with_scipy(successes: int, trials: int) -> None:
    expected = binomtest(successes, trials).proportion_ci(0.95, method="exact")
    assert clopper_pearson(successes, trials, 0.025) == pytest.approx((expected.low, expected.high))


def test_the_interval_of_a_difference_has_the_stated_coverage() -> None:
    generator = np.random.default_rng(2)
    repeats, covered = 2000, 0
    for hits, alarms in generator.binomial(80, [0.6, 0.35], size=(repeats, 2)):
        found = _difference(_proportion(hits, 80), _proportion(alarms, 80))
        covered += found.low <= 0.25 <= found.high
    # At a coverage of 95%, fewer than 1851 of 2000 has probability below 1e-6.
    assert covered >= 1851


def test_the_interval_of_a_difference_stays_within_possible_values() -> None:
    assert _difference(Estimate(1.0, 0.6, 1.0), Estimate(0.0, 0.0, 0.4)).high == 1.0
    assert _difference(Estimate(0.0, 0.0, 0.4), Estimate(1.0, 0.6, 1.0)).low == -1.0


def test_the_variance_of_the_auc_is_that_of_delong() -> None:
    generator = np.random.default_rng(3)
    members, nonmembers = generator.normal(0.7, 1, 60).round(1), generator.normal(0, 1, 45).round(1)
    wins = (members[:, None] > nonmembers) + (members[:, None] == nonmembers) / 2
    variance = wins.mean(1).var(ddof=1) / 60 + wins.mean(0).var(ddof=1) / 45
    found = auc(members, nonmembers)
    assert found.high - found.value == pytest.approx(1.959964 * variance**0.5, rel=1e-5)


def test_complete_separation_has_an_interval_of_positive_length() -> None:
    found = auc(np.arange(1.0, 51.0), -np.arange(1.0, 51.0))
    assert found.value == found.high == 1.0
    assert found.low == pytest.approx(1 - (np.log(40) / 100) ** 0.5)


def test_tpr_at_an_fpr_is_the_best_below_it() -> None:
    members, nonmembers = np.array([5.0, 4.0, 1.0]), np.concatenate([[4.5], np.zeros(99)])
    curve = _roc_curve(members, nonmembers)
    assert _tpr_at_fpr(curve, 0.001).value == pytest.approx(1 / 3)
    assert _tpr_at_fpr(curve, 0.01).value == pytest.approx(1.0)


def test_tpr_at_an_fpr_with_few_nonmembers_has_no_lower_limit() -> None:
    curve = _roc_curve(np.ones(1000), np.zeros(1000))
    assert _tpr_at_fpr(curve, 0.001).low == 0.0
    assert _tpr_at_fpr(curve, 0.01).low > 0.99


def test_tpr_at_an_fpr_between_two_ties_has_a_low_upper_limit() -> None:
    scores = np.repeat([1.0, 0.0], 500)
    assert _tpr_at_fpr(_roc_curve(scores, scores), 0.01).high < 0.01


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

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quietmax.estimators.evaluation import _exact_evaluation
from quietmax.estimators.figures import (
    BINS,
    CONFIDENCE,
    EDGES,
    Estimate,
    Evaluation,
    GroupsOf,
    _area,
    _mean,
    _ratio,
)
from tests.estimators.evaluated import UNITS, drawn, noisy, sure, tables

# A right interval is outside these limits with a probability below 1e-6 (Hoeffding, 4,000 draws).
SLACK = math.sqrt(math.log(1e6) / (2 * 4000))


GROUPS = GroupsOf("sex", ("f", "m", "missing or other"), 0, 2, None, True)


# --- intervals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "noise", [(0.0, 0.0), (1.0, 1.0), (3.7, 3.7), (5.0, 12.0), (12.0, 5.0), (20.0, 20.0)]
)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.5, 0.7, 0.99, 1.0])
def test_an_interval_covers_the_true_share_for_few_and_for_many_people(
    share: float, noise: tuple[float, float]
) -> None:
    rng = np.random.default_rng(3)
    for people in (0, 1, 3, 10, 30, 100, 1000):
        right = rng.binomial(people, share, 4000)
        draws = np.stack([right, people - right]) + rng.standard_normal((2, 4000)) * np.array(noise)[:, None]
        estimates = [_ratio(first, second, *noise) for first, second in draws.T]
        covered = np.mean([each.low <= share <= each.high for each in estimates])
        assert covered > CONFIDENCE - SLACK, (people, covered)
        for each in estimates:
            assert 0 <= each.low <= each.high <= 1
            assert each.value is None or each.low <= each.value <= each.high
            assert (each.value is None) == ((each.low, each.high) == (0, 1))


def test_an_interval_covers_for_people_with_several_rows() -> None:
    """A person's rows are right or wrong together half of the time; each person adds fractions."""
    rng = np.random.default_rng(5)
    people, draws, noise = 40, 4000, 3.7
    chance = 0.8
    own = rng.choice([0.65, 0.95], size=(draws, people))  # mean 0.8
    rows = rng.integers(1, 31, size=(draws, people))
    right = (rng.binomial(rows, own) / rows).sum(axis=1)
    estimates = [
        _ratio(first + noise * z[0], people - first + noise * z[1], noise, noise)
        for first, z in zip(right, rng.standard_normal((draws, 2)), strict=True)
    ]
    assert np.mean([each.low <= chance <= each.high for each in estimates]) > CONFIDENCE - SLACK


def test_an_interval_is_not_needlessly_wide_for_many_people() -> None:
    exact = _ratio(8600.0, 1400.0, 0.0, 0.0)
    assert exact.high - exact.low == pytest.approx(2 * 1.96 * math.sqrt(0.86 * 0.14 / 10_000), rel=0.03)
    published = _ratio(8600.0, 1400.0, 8.0, 8.0)
    assert published.high - published.low < 1.05 * (exact.high - exact.low)


def test_counts_below_the_noise_give_no_value() -> None:
    for right, wrong in ((0.0, 0.0), (-3.0, 2.0), (4.0, 1.0), (-80.0, -80.0), (20.0, -20.0), (-20.0, 20.0)):
        estimate = _ratio(right, wrong, 7.0, 7.0)
        assert (estimate.value, estimate.low, estimate.high) == (None, 0.0, 1.0), (right, wrong)
    assert str(_ratio(0.0, 0.0, 7.0, 7.0)) == "unknown"


def test_a_share_that_cannot_be_told_from_0_is_shown_as_an_upper_limit() -> None:
    estimate = _ratio(-2.0, 60.0, 7.0, 7.0)
    assert (estimate.value, estimate.low) == (0.0, 0.0)
    shown = str(estimate)
    assert shown.startswith("below 0.")
    assert 0 <= float(shown.removeprefix("below ")) - estimate.high < 0.001  # rounded up
    assert str(_ratio(9.0, 60.0, 7.0, 7.0)).startswith("0.130 (0.000 to ")


# --- figures ------------------------------------------------------------------------------------------------------


def test_all_tables_are_used_for_the_accuracy() -> None:
    """With one table of 100 cells the noise would be 3 times as large."""
    values = []
    for seed in range(300):
        evaluation = noisy(np.eye(10, dtype=np.int64) * 100, seed)
        values.append([evaluation._count(right=side)[0] for side in (True, False)])
    noises = [evaluation._count(right=side)[1] for side in (True, False)]
    for found, noise, true in zip(np.array(values).T, noises, (1000, 0), strict=True):
        assert np.mean(found) == pytest.approx(true, abs=5 * noise / math.sqrt(300))
        assert np.std(found) == pytest.approx(noise, rel=5 / math.sqrt(600))
    assert noises[1] < 2.3 * evaluation.noise  # sqrt(90) = 9.5 from the table of classes alone
    grouped = noisy(np.eye(2, dtype=np.int64) * 100, groups=GROUPS)
    assert grouped._count(right=True)[1] == pytest.approx(
        grouped.noise / math.sqrt(1 / 2 + 1 / (len(EDGES) - 1) + 1 / 12)
    )


def test_every_cell_of_the_matrix_has_an_interval_that_covers_the_noise() -> None:
    counts = np.array([[900, 3], [0, 850]])
    covered = np.zeros((2, 2))
    draws = 1000
    for seed in range(draws):
        evaluation = noisy(counts, seed)
        cells = evaluation.to_json()["cells"]
        low, high = (np.array([[cell[end] for cell in row] for row in cells]) for end in ("low", "high"))
        assert (low >= 0).all()
        assert np.array([[cell["value"] for cell in row] for row in cells]).tolist() == [
            list(row) for row in evaluation.confusion
        ]
        assert high[0, 0] - low[0, 0] == pytest.approx(2 * 1.96 * evaluation.noise, rel=0.001)
        covered += (low <= counts) & (counts <= high)
    slack = math.sqrt(math.log(1e6) / (2 * draws))
    assert (covered / draws > CONFIDENCE - slack).all()
    assert (covered[0, 0] / draws) < CONFIDENCE + slack  # nor is it needlessly wide


def test_the_remarks_state_the_margin_of_the_counts_and_why_they_do_not_add_up() -> None:
    evaluation = noisy(np.array([[900, 60, 0], [40, 850, 0], [0, 0, 900]]))
    (remark,) = evaluation.remarks()
    assert f"within ±{math.ceil(evaluation.margin)} of the true one" in remark
    assert "which average several noisy tables" in remark
    assert abs(evaluation.size.value - np.sum(evaluation.confusion)) > 1e-6
    assert evaluation.to_json()["remarks"] == [remark]
    three = tables(3)
    exact = _exact_evaluation(sure(three, np.eye(3, dtype=np.int64) * 90), three, "person")
    assert exact.remarks() == []


@pytest.mark.parametrize(("share", "too_confident"), [(0.55, True), (0.8, True), (0.95, False)])
def test_probabilities_are_called_too_confident_if_fewer_answers_are_right(
    share: float, too_confident: bool
) -> None:
    right, wrong = round(1000 * share), round(1000 * (1 - share) / 2)
    confusion = np.full((3, 3), wrong) + np.eye(3, dtype=np.int64) * (right - wrong)
    evaluation = noisy(confusion)  # all with a confidence above 0.87
    assert ("too confident: with 0.87 to 1.00, only" in " ".join(evaluation.remarks())) == too_confident


@pytest.mark.parametrize(("share", "words"), [(0.5, ("too high", "too low")), (0.999, ())])
def test_probabilities_are_called_too_high_or_too_low_where_the_share_is_another(
    share: float, words: tuple[str, ...]
) -> None:
    right, wrong = round(5000 * share), round(5000 * (1 - share))
    remarks = " ".join(noisy(np.array([[right, wrong], [wrong, right]])).remarks())
    for word, bins in (("too high", "with 0.99 to 1.00"), ("too low", "with 0.00 to 0.01")):
        assert (f"The probabilities of yes are {word}: {bins}, the share is 0." in remarks) == (word in words)


# --- JSON ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"at": (0.2, 0.3)}, {"groups": "sex"}, {"costs": ((0.0, 0.3), (0.7, 0.0))}]
)
def test_an_evaluation_survives_json_and_its_figures_are_computed_again(settings: dict[str, Any]) -> None:
    evaluation = noisy(
        np.array([[900, 100], [150, 850]]), **settings | ({"groups": GROUPS} if "groups" in settings else {})
    )
    record = json.loads(json.dumps(evaluation.to_json()))
    assert record["publishable"] is True
    record["accuracy"] = {"value": 1.0, "low": 1.0, "high": 1.0}
    assert Evaluation.from_json(record) == evaluation
    assert Evaluation.from_json(record).accuracy == evaluation.accuracy


def test_exact_figures_are_marked_and_never_read_back() -> None:
    exact = _exact_evaluation(sure(tables(), np.array([[90, 10], [10, 90]])), tables(), "person")
    record = exact.to_json()
    assert (record["publishable"], record["guarantee"]) == (False, None)
    assert "Not for publication" in record["caveat"]
    with pytest.raises((ValueError, TypeError, KeyError)):
        Evaluation.from_json(record)
    published = noisy(np.eye(2, dtype=np.int64) * 50, at=(0.3,), groups=GROUPS).to_json()
    by_group = published["by_group"]
    for name, value in itertools.chain(
        (("noise", value) for value in (0, 1.0, math.nan)),
        (("mu", value) for value in (0, 1.0, math.inf, None, "x")),
        [("confusion", [[1.0]]), ("confusion", [[1.0, math.nan], [1.0, 1.0]]), ("classes", ["no"])],
        [("guarantee", None), ("unit", "row"), ("composition", "none"), ("calibration", [[1.0, 2.0]])],
        [
            ("edges", None),
            ("edges", published["edges"][1:]),
            ("at", [0.4]),
            ("at", [0.0]),
            ("by_group", None),
        ],
        (("costs", costs) for costs in ([[0, 1]], [[0, 1], [0, 0]], [[1, 1], [1, 0]], [[0, 3], [1, 0]], "x")),
        [
            ("by_group", by_group | {"names": ["f"]}),
            ("by_group", by_group | {"counts": []}),
            ("by_group", by_group | {"column": None, "names": 3}),
        ],
    ):
        with pytest.raises((ValueError, TypeError, KeyError)):
            Evaluation.from_json(published | {name: value})


# --- two classes: curves, costs and groups ------------------------------------------------------------------------


class Population:
    """People with a calibrated score, a class and a group; and the true figures of this population."""

    def __init__(self, prior: float, separation: float, truth: int = 400_000) -> None:
        self.prior, self.separation = prior, separation
        self.tables = tables(at=(0.3,), costs=((0.0, 0.2), (0.8, 0.0)), groups=GROUPS)
        labels, answers = self.people(truth, np.random.default_rng(12))
        self.truth = figures(
            _exact_evaluation(self.tables.count(labels, answers, None), self.tables, "person")
        )

    def people(self, count: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Draw people: their classes and answers. The score is too low for the second group, of 10%."""
        labels = (rng.random(count) < self.prior).astype(np.int64)
        group = (rng.random(count) < 0.1).astype(np.int64)
        middle = math.log(self.prior / (1 - self.prior)) - self.separation**2 / 2
        logits = middle + self.separation * (rng.standard_normal(count) + self.separation * labels)
        scores = 1 / (1 + np.exp(-logits + 0.5 * group))
        assert self.tables.edges is not None
        bins = np.searchsorted(self.tables.edges[1:-1], scores)
        answers = [scores > 0.2, bins, group, np.rint(scores * UNITS)]
        return labels, np.stack(answers, 1).astype(np.int32)


def figures(evaluation: Evaluation) -> dict[str, Estimate]:
    """Every figure of an evaluation with an interval for sampling, by name."""
    assert evaluation.auc is not None
    assert evaluation.log_loss is not None
    found = {"accuracy": evaluation.accuracy, "auc": evaluation.auc, "log-loss": evaluation.log_loss}
    found |= {f"recall {name}": each for name, each in evaluation.recall.items()}
    found |= {f"bin {each.low}": each.share for each in evaluation.bins}
    for each in evaluation.points:
        for name in ("recall", "false_alarms", "precision"):
            found[f"{name} at {each.threshold}"] = getattr(each, name)
    for group in evaluation.groups[:2]:
        found |= {f"{group.name} accuracy": group.accuracy, f"{group.name} excess": group.excess}
        found |= {f"{group.name} recall {name}": each for name, each in group.recall.items()}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("people", [150, 2000, 20_000])
@pytest.mark.parametrize(("prior", "separation"), [(0.5, 3.0), (0.1, 2.0), (0.25, 0.5)])
def test_every_interval_of_an_evaluation_covers_the_truth(
    prior: float, separation: float, people: int
) -> None:
    """In at least 0.93 of 1,500 evaluations of each size, every figure with its interval of 0.95.

    An interval that is right is below this in one of 5,000 cases; the seeds are fixed.
    """
    population, rng, draws = Population(prior, separation, 4_000_000), np.random.default_rng(people), 1500
    covered: Counter[str] = Counter()
    for seed in range(draws):
        counts = population.tables.count(*population.people(people, rng), None)
        for name, each in figures(drawn(population.tables, counts, seed)).items():
            true = population.truth[name].value
            covered[name] += true is None or each.low <= true <= each.high
    assert len(covered) > 60
    low = {name: count / draws for name, count in covered.items() if count / draws < 0.93}
    assert low == {}


def test_the_intervals_of_a_common_evaluation_cover_the_truth_and_are_narrow() -> None:
    population, rng, draws = Population(0.25, 1.5), np.random.default_rng(0), 150
    covered: Counter[str] = Counter()
    widths: dict[str, list[float]] = {}
    for seed in range(draws):
        counts = population.tables.count(*population.people(4000, rng), None)
        for name, each in figures(drawn(population.tables, counts, seed)).items():
            true = population.truth[name].value
            covered[name] += true is None or each.low <= true <= each.high
            widths.setdefault(name, []).append(each.high - each.low)
    # A right interval is below this limit with a probability below 1e-6 (Hoeffding), for each name.
    assert min(covered.values()) / draws > CONFIDENCE - math.sqrt(math.log(1e6) / (2 * draws))
    limits = {"accuracy": 0.04, "auc": 0.06, "log-loss": 0.09, "recall yes": 0.06, "f accuracy": 0.06}
    for name, most in limits.items():
        assert np.mean(widths[name]) < most, (name, np.mean(widths[name]))


def test_without_noise_the_curves_are_those_of_a_plain_computation() -> None:
    from sklearn.metrics import log_loss, precision_score, recall_score, roc_auc_score

    rng = np.random.default_rng(3)
    labels = rng.integers(0, 2, 3000)
    scores = np.clip(0.35 + 0.2 * labels + 0.25 * rng.standard_normal(3000), 0.001, 0.999)
    counted = tables(at=(0.3,), costs=((0.0, 0.4), (0.6, 0.0)))
    edges = np.array(counted.edges)
    bins = np.searchsorted(edges[1:-1], scores)
    answers = np.stack([scores > 0.4, bins, np.zeros(3000), np.zeros(3000)], 1).astype(np.int32)
    exact = _exact_evaluation(counted.count(labels, answers, None), counted, "record")
    middle = ((edges[1:] + edges[:-1]) / 2)[bins]
    assert exact.auc is not None
    assert exact.log_loss is not None
    assert exact.auc.value == pytest.approx(roc_auc_score(labels, bins))
    assert exact.log_loss.value == pytest.approx(log_loss(labels, middle))
    assert [each.threshold for each in exact.points] == edges[1:-1].tolist()
    assert {0.3, 0.4} < {each.threshold for each in exact.points}
    assert [each.threshold for each in exact.named_points] == [0.3, 0.4]
    for each in exact.points:
        answered = scores > each.threshold
        assert each.recall.value == pytest.approx(recall_score(labels, answered), abs=1e-6)
        assert each.false_alarms.value == pytest.approx(answered[labels == 0].mean(), abs=1e-6)
        if each.precision.value is not None:
            assert each.precision.value == pytest.approx(precision_score(labels, answered), abs=1e-6)
    assert exact.accuracy.value == pytest.approx(np.mean((scores > 0.4) == labels), abs=1e-6)
    assert exact.decision == "yes if its probability is above 0.4, otherwise no"


@pytest.mark.parametrize("classes", [2, 3])
def test_groups_have_the_figures_of_their_people(classes: int) -> None:
    rng = np.random.default_rng(4)
    labels, group = rng.integers(0, classes, 4000), rng.integers(0, 2, 4000)
    probabilities = rng.dirichlet(np.ones(classes), 4000)
    predicted = probabilities.argmax(1)
    mass = probabilities[:, 1] if classes == 2 else probabilities.max(1)
    counted = tables(classes, groups=GROUPS)
    answers = np.stack([predicted, np.zeros(4000), group, np.rint(mass * UNITS)], 1).astype(np.int32)
    exact = _exact_evaluation(counted.count(labels, answers, None), counted, "record")
    for number, found in enumerate(exact.groups[:2]):
        own = group == number
        assert found.size.value == pytest.approx(own.sum())
        right = predicted[own] == labels[own]
        assert found.accuracy.value == pytest.approx(right.mean(), abs=1e-6)
        for label, name in enumerate(exact.classes):
            assert found.recall[name].value == pytest.approx(right[labels[own] == label].mean(), abs=1e-6)
        happened = labels[own] == 1 if classes == 2 else right
        assert found.excess.value == pytest.approx(mass[own].mean() - happened.mean(), abs=1e-6)
    assert exact.groups[2].accuracy.value is None


def test_nothing_is_said_of_groups_below_a_size_that_follows_from_the_noise() -> None:
    counted = tables(groups=GROUPS)
    people = 60
    answers = np.stack([np.zeros(2000), np.zeros(2000), np.arange(2000) < people, np.zeros(2000)], 1)
    unsaid = 0
    for seed in range(20):
        evaluation = drawn(
            counted, counted.count(np.zeros(2000, np.int64), answers.astype(np.int32), None), seed
        )
        first, second, _ = evaluation.groups
        assert first.accuracy.value is not None
        assert evaluation.least_group == pytest.approx(2 * 1.96 * evaluation.noise * math.sqrt(8), rel=1e-3)
        assert (second.accuracy.value is None) >= (second.size.value < evaluation.least_group)
        if second.accuracy.value is None:
            unsaid += 1
            assert (second.excess.low, second.excess.high) == (-1, 1)
            (remark,) = (each for each in evaluation.remarks() if each.startswith("Nothing can be said"))
            assert "m, missing or other: with this noise, a group needs about 72 people." in remark
    assert 5 < unsaid < 20


def test_a_mean_and_an_area_of_too_few_people_are_unknown() -> None:
    few = np.array([3.0, 1.0])
    assert _area(few, few, 5.0) == Estimate(None, 0.0, 1.0)
    assert _area(few, np.zeros(2), 0.0) == Estimate(None, 0.0, 1.0)
    assert _mean(np.array([[-1.0, 1.0]]), few[None], 5.0) == Estimate(None, -1.0, 1.0)
    assert _mean(np.array([[-1.0, 1.0]]), np.zeros((1, 2)), 0.0) == Estimate(None, -1.0, 1.0)


def test_wide_bins_join_the_bins_between_their_edges() -> None:
    evaluation = noisy(np.array([[900, 100], [150, 850]]), at=(0.3,))
    assert evaluation.edges is not None
    wide, edges = evaluation.wide_bins, np.array(evaluation.edges)
    assert [each.low for each in wide] + [1.0] == [0, 0.06, 0.2, 0.5, 0.8, 0.94, 1]
    for each in wide:
        inside = (edges[:-1] >= each.low) & (edges[1:] <= each.high)
        spread = evaluation.noise * math.sqrt(inside.sum())
        right, wrong = np.array(evaluation.calibration)[inside].sum(0)
        assert each.share == _ratio(float(right), float(wrong), spread, spread)
    three = noisy(np.eye(3, dtype=np.int64) * 100)
    assert three.wide_bins == three.bins


def test_more_than_two_classes_have_no_curves() -> None:
    three = noisy(np.eye(3, dtype=np.int64) * 100)
    assert (three.auc, three.log_loss, three.points, three.edges) == (None, None, (), None)
    assert len(three.bins) == BINS

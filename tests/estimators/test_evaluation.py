from __future__ import annotations

import copy
import errno
import itertools
import json
import math
import os
import pickle
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from quietmax.accounting.costs import epsilon_of, mu_of
from quietmax.accounting.guarantee import Guarantee
from quietmax.data.records import Records, hold_out
from quietmax.data.schema import Schema
from quietmax.data.tables import encode_table
from quietmax.errors import BudgetExhausted, DataUnavailable, InvalidInput, QuietmaxError
from quietmax.estimators import evaluation as evaluation_module
from quietmax.estimators.evaluation import (
    BINS,
    CONFIDENCE,
    EVALUATION_FILE,
    Composition,
    Evaluation,
    EvaluationCharge,
    _binned_answers,
    _count_answers,
    _evaluation_mu,
    _exact_evaluation,
    _noisy_evaluation,
    _probabilities,
    _ratio,
    composed_guarantee,
    evaluate_folder,
    read_evaluations,
    split_name,
)
from quietmax.estimators.head.estimator import PrivateHead
from quietmax.estimators.head.weights import HeadWeights
from quietmax.estimators.serialization import open_private, save_private
from quietmax.estimators.teachers import Teachers
from quietmax.noise.sources import SeededNoise
from tests.estimators.made import interrupted_saving, made

TRAINING = Guarantee("gaussian", mu=0.268, status="proven", because="Training.", unit="person")
UNITS = 2**24
# A right interval is outside these limits with a probability below 1e-6 (Hoeffding, 4,000 draws).
SLACK = math.sqrt(math.log(1e6) / (2 * 4000))


def flat(*tables: NDArray[np.int64]) -> NDArray[np.int64]:
    """What `_count_answers` returns for a table of classes and one of confidence."""
    return np.concatenate([table.reshape(-1) for table in tables])


def drawn(units: NDArray[np.int64], classes: Any, seed: int = 0) -> Evaluation:
    charges = [EvaluationCharge(0.268, "parallel", ("seeded",))]
    return _noisy_evaluation(units, classes, TRAINING, charges, SeededNoise(seed))


def noisy(counts: NDArray[np.int64], seed: int = 0) -> Evaluation:
    """Evaluate a table of whole people by true and predicted class; all answers have the highest confidence."""
    right = np.trace(counts)
    calibration = np.zeros((BINS, 2), dtype=np.int64)
    calibration[-1] = right, counts.sum() - right
    return drawn(flat(counts, calibration) * UNITS, range(len(counts)), seed)


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


# --- counts -------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, BINS - 1)), max_size=40))
def test_one_person_adds_a_vector_of_sum_at_most_one_to_each_table(rows: list[tuple[int, int, int]]) -> None:
    labels, predicted, bins = (np.array(part, dtype=np.int64) for part in zip(*rows, strict=True)) if rows else (
        np.empty(0, dtype=np.int64),
    ) * 3  # fmt: skip
    counts = _count_answers(labels, predicted, bins, np.full(len(rows), max(len(rows), 1)), classes=3)
    for table in (counts[:9], counts[9:]):
        assert (table >= 0).all()
        assert table.sum() <= UNITS
        assert table.sum() >= (UNITS - len(rows) if rows else 0)
    assert np.linalg.norm(counts / UNITS) <= math.sqrt(2)


def test_every_row_is_answered_on_its_own_bit_for_bit() -> None:
    """Answers in one large batch round differently from answers to single rows; these must not."""
    rng = np.random.default_rng(1)
    head = HeadWeights(rng.normal(size=(3, 41)) * 5, np.zeros(40), 1.0, 1.0)
    features = rng.normal(size=(300, 40)).astype(np.float32)
    predicted, bins = _binned_answers(_probabilities(head, None, features, 3))
    for chosen in (rng.permutation(300), np.arange(7, 300, 3), np.array([5])):
        again = _binned_answers(_probabilities(head, None, features[chosen], 3))
        assert np.array_equal(again[0], predicted[chosen])
        assert np.array_equal(again[1], bins[chosen])
    probabilities = np.concatenate([head.predict_proba(row[None]) for row in features])
    assert np.array_equal(probabilities.argmax(axis=1), predicted)
    edges = np.linspace(1 / 3, 1, BINS + 1)
    assert np.array_equal(np.clip(np.searchsorted(edges, probabilities.max(axis=1), "right") - 1, 0, 4), bins)


def test_the_noise_has_the_size_that_the_guarantee_states() -> None:
    empty = np.zeros((2, 2), dtype=np.int64)
    one = [noisy(empty, seed) for seed in range(500)]
    found = np.array([[*np.ravel(each.confusion), *np.ravel(each.calibration)] for each in one]).ravel()
    assert one[0].noise == pytest.approx(math.sqrt(2) / 0.268, rel=1e-3)
    # The variance of 7,000 draws: five standard errors.
    assert np.var(found) == pytest.approx(one[0].noise ** 2, rel=5 * math.sqrt(2 / 7000))
    nobody = np.zeros(4 + 2 * BINS, dtype=np.int64)
    both = _noisy_evaluation(nobody, "ab", TRAINING, [EvaluationCharge(0.268, "parallel")])
    assert both.noise == pytest.approx(math.sqrt(2) / 0.268, rel=1e-3)
    assert both.guarantee == composed_guarantee(TRAINING, [EvaluationCharge(0.268, "parallel")])


def test_published_figures_cover_the_true_ones_and_are_close_to_the_exact_ones() -> None:
    rng = np.random.default_rng(2)
    truth = {"accuracy": 0.85, "recall": (0.9, 0.7)}
    covered = {"accuracy": 0, "no": 0, "yes": 0, "bin": 0, "size": 0}
    draws = 1000
    for seed in range(draws):
        labels = (rng.random(2000) < 0.25).astype(np.int64)
        right = rng.random(2000) < np.array(truth["recall"])[labels]
        bins = rng.integers(0, BINS, 2000)  # confidence tells nothing here: every bin is right as often
        counts = _count_answers(labels, np.where(right, labels, 1 - labels), bins, None, classes=2)
        evaluation = drawn(counts, ("no", "yes"), seed)
        exact = _exact_evaluation(counts, ("no", "yes"), "person")
        assert evaluation.accuracy.value == pytest.approx(exact.accuracy.value, abs=0.025)
        assert exact.accuracy.value == pytest.approx(right.mean(), abs=1e-6)
        covered["accuracy"] += evaluation.accuracy.low <= 0.85 <= evaluation.accuracy.high
        for name, recall in zip(("no", "yes"), (0.9, 0.7), strict=True):
            covered[name] += evaluation.recall[name].low <= recall <= evaluation.recall[name].high
        covered["bin"] += evaluation.bins[0].right.low <= 0.85 <= evaluation.bins[0].right.high
        covered["size"] += evaluation.size.low <= 2000 <= evaluation.size.high
    limit = CONFIDENCE - math.sqrt(math.log(1e6) / (2 * draws))
    assert all(count / draws > limit for count in covered.values()), covered


def test_both_tables_are_used_for_the_accuracy() -> None:
    """With one table of 100 cells the noise would be 3 times as large."""
    counts = np.eye(10, dtype=np.int64) * 100 * UNITS
    calibration = np.zeros((BINS, 2), dtype=np.int64)
    calibration[-1, 0] = 1000 * UNITS
    values = []
    for seed in range(300):
        evaluation = drawn(flat(counts, calibration), range(10), seed)
        right, wrong, right_noise, wrong_noise = evaluation._totals
        values.append((right, wrong))
    for found, noise, true in zip(np.array(values).T, (right_noise, wrong_noise), (1000, 0), strict=True):
        assert np.mean(found) == pytest.approx(true, abs=5 * noise / math.sqrt(300))
        assert np.std(found) == pytest.approx(noise, rel=5 / math.sqrt(600))
    assert wrong_noise < 2.3 * evaluation.noise  # sqrt(90) = 9.5 from the table of classes alone


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
    evaluation = noisy(np.array([[900, 60], [40, 850]]))
    (remark,) = evaluation.remarks()
    assert f"within ±{math.ceil(evaluation.margin)} of the true one" in remark
    assert "which average two noisy tables" in remark
    right, wrong, *_ = evaluation._totals
    assert abs(right + wrong - np.sum(evaluation.confusion)) > 1e-6
    assert evaluation.to_json()["remarks"] == [remark]
    units = flat(np.eye(2, dtype=np.int64) * 90, np.array([[0, 0], [180, 0]])) * UNITS
    exact = _exact_evaluation(units, "ab", "person")
    assert exact.remarks() == []


@pytest.mark.parametrize(("share", "too_confident"), [(0.55, True), (0.8, True), (0.95, False)])
def test_probabilities_are_called_too_confident_if_fewer_answers_are_right(
    share: float, too_confident: bool
) -> None:
    right, wrong = round(2000 * share / 2), round(2000 * (1 - share) / 2)
    evaluation = noisy(np.array([[right, wrong], [wrong, right]]))  # all with a confidence above 0.9
    assert ("too confident: with 0.90 to 1.00, only" in " ".join(evaluation.remarks())) == too_confident


# --- costs --------------------------------------------------------------------------------------------------------


def trained(**claimed: Any) -> Guarantee:
    return Guarantee(**({"status": "proven", "because": "Training."} | claimed))


HALF, PURE = trained(definition="gaussian", mu=0.5), trained(definition="pure", epsilon=1.0)
APPROXIMATE = trained(definition="approximate", epsilon=1.0, delta=1e-5, status="conditional")
PURE_MU, APPROXIMATE_MU = PURE.cost.as_gaussian().mu, mu_of(1.0, 1e-5)
COMPOSED: dict[str, tuple[Guarantee, list[tuple[float, Composition]], float]] = {
    "the holdout costs nothing beyond the training": (TRAINING, [(0.268, "parallel")], 0.268),
    "nor does less than that": (TRAINING, [(0.1, "parallel")], 0.268),
    "evaluations of the holdout add up": (HALF, [(0.3, "parallel"), (0.4, "parallel")], 0.5),
    "and can cost more": (HALF, [(0.3, "parallel"), (0.4, "parallel"), (1.2, "parallel")], 1.3),
    "other people may be in both": (replace(HALF, mu=0.3), [(0.4, "sequential")], 0.5),
    "both kinds": (replace(HALF, mu=0.3), [(0.3, "parallel"), (0.4, "sequential")], 0.5),
    "a pure training": (PURE, [(PURE_MU, "parallel")], PURE_MU),
}


@pytest.mark.parametrize(("training", "charged", "mu"), COMPOSED.values(), ids=COMPOSED)
def test_evaluations_compose_with_the_training(training: Guarantee, charged: Any, mu: float) -> None:
    together = composed_guarantee(training, [EvaluationCharge(*each) for each in charged])
    assert together.mu == pytest.approx(mu)
    assert (together.status, together.unit) == ("proven", training.unit)
    assert "3.8" in together.because or {kind for _, kind in charged} == {"sequential"}


def test_an_approximate_guarantee_composes_too() -> None:
    def composed(mu: float, composition: Composition) -> Guarantee:
        return composed_guarantee(APPROXIMATE, [EvaluationCharge(mu, composition)])

    free, more = composed(APPROXIMATE_MU, "parallel"), composed(1.0, "parallel")
    assert (free.epsilon, free.delta, free.status) == (1.0, 1e-5, "conditional")
    assert (more.epsilon, more.delta) == (epsilon_of(1.0, 1e-5), 1e-5)
    added = composed(APPROXIMATE_MU, "sequential")
    assert added.epsilon == pytest.approx(2.0, rel=1e-9)
    assert added.epsilon >= 1.0 + epsilon_of(APPROXIMATE_MU, 1e-5)
    assert added.delta == 2e-5


@pytest.mark.parametrize(
    ("training", "spent", "composition", "budget", "mu"),
    [
        (TRAINING, [], "parallel", {}, 0.268),
        (HALF, [0.3], "parallel", {}, 0.4),
        (PURE, [], "parallel", {}, PURE_MU),
        (APPROXIMATE, [], "parallel", {}, APPROXIMATE_MU),
        (HALF, [0.3, 0.4], "parallel", {"mu": 1.2}, 1.2),
        (HALF, [], "sequential", {"mu": 0.4}, 0.4),
        (HALF, [], "sequential", {"epsilon": 1.0}, mu_of(1.0, 1e-5)),
        (HALF, [0.3, 0.4], "parallel", {}, "holdout have spent as much as the training"),
        (TRAINING, [], "sequential", {}, "a budget is required"),
        (HALF, [], "parallel", {"epsilon": 1.0, "mu": 1.0}, "Only one of mu and epsilon"),
        (HALF, [], "parallel", {"delta": 1e-6}, "`delta` requires `epsilon`"),
    ],
)
def test_an_evaluation_costs_its_budget_or_what_is_free(
    training: Guarantee, spent: list[float], composition: Composition, budget: Any, mu: float | str
) -> None:
    earlier = [EvaluationCharge(each, "parallel") for each in spent]
    if isinstance(mu, float):
        assert _evaluation_mu(training, earlier, composition, **budget) == mu
        return
    with pytest.raises(BudgetExhausted if "spent" in mu else InvalidInput, match=mu):
        _evaluation_mu(training, earlier, composition, **budget)


def test_seeded_noise_makes_the_guarantee_conditional() -> None:
    guarantee = noisy(np.eye(2, dtype=np.int64) * 50).guarantee
    assert guarantee.status == "conditional"
    assert any("seed" in assumption for assumption in guarantee.assumptions)
    with pytest.raises(InvalidInput, match="must be charged as one that assumes 'seeded'"):
        _noisy_evaluation(
            np.ones(4 + 2 * BINS, dtype=np.int64),
            *("ab", TRAINING, [EvaluationCharge(0.268, "parallel")], SeededNoise(0)),
        )


# --- JSON ---------------------------------------------------------------------------------------------------------


def test_an_evaluation_survives_json_and_its_figures_are_computed_again() -> None:
    evaluation = noisy(np.array([[900, 100], [150, 850]]))
    record = json.loads(json.dumps(evaluation.to_json()))
    assert record["publishable"] is True
    record["accuracy"] = {"value": 1.0, "low": 1.0, "high": 1.0}
    assert Evaluation.from_json(record) == evaluation
    assert Evaluation.from_json(record).accuracy == evaluation.accuracy


def test_exact_figures_are_marked_and_never_read_back() -> None:
    counts = flat(np.array([[90, 10], [10, 90]]), np.array([[180, 20]])) * UNITS
    exact = _exact_evaluation(counts, ("no", "yes"), "person")
    record = exact.to_json()
    assert (record["publishable"], record["guarantee"]) == (False, None)
    assert "Not for publication" in record["caveat"]
    with pytest.raises((ValueError, TypeError, KeyError)):
        Evaluation.from_json(record)
    published = noisy(np.eye(2, dtype=np.int64) * 50).to_json()
    for name, value in itertools.chain(
        (("noise", value) for value in (0, 1.0, math.nan)),
        (("mu", value) for value in (0, 1.0, math.inf, None, "x")),
        [("confusion", [[1.0]]), ("confusion", [[1.0, math.nan], [1.0, 1.0]]), ("classes", ["no"])],
        [("guarantee", None), ("unit", "row"), ("composition", "none"), ("calibration", [[1.0, 2.0]])],
    ):
        with pytest.raises((ValueError, TypeError, KeyError)):
            Evaluation.from_json(published | {name: value})


# --- estimators and folders ---------------------------------------------------------------------------------------


def people(count: int = 3000, *, persons: bool = True, seed: int = 0) -> Records:
    """Records whose label follows the first feature; with persons, two rows each."""
    rng = np.random.default_rng(seed)
    features = rng.random((count, 4)).astype(np.float32)
    labels = (features[:, 0] + 0.2 * rng.normal(size=count) > 0.5).astype(np.int64)
    names = np.array([f"p{row // 2}" for row in range(count)], dtype=object)
    return Records("people", features, labels, 2, persons=names if persons else None)


def head(**settings: Any) -> PrivateHead:
    return made(PrivateHead, epsilon=1.0, delta=1e-5, declared_size=1200, **settings)


def held_out(share: float = 0.3, *, persons: bool = True, **settings: Any) -> tuple[Any, PrivateHead]:
    """People of whom some were held out, and a head trained on the others."""
    split = hold_out(people(persons=persons), share)
    return split, head(**settings).fit(split.train)


def save(fitted: Any, folder: Path, **options: Any) -> Path:
    return save_private(fitted, folder, dataset="people", **options)


def evaluate(folder: Path, records: Any, **options: Any) -> Evaluation:
    return evaluate_folder(folder, open_private(folder), records, **options)


def stored(folder: Path) -> list[EvaluationCharge]:
    return read_evaluations(folder, open_private(folder))


@pytest.mark.parametrize("persons", [True, False])
def test_a_model_is_evaluated_on_its_holdout_for_free_and_on_nobody_else(persons: bool) -> None:
    split = hold_out(people(persons=persons), 0.3, seed=4)
    fitted = head().fit(split.train)
    evaluation = fitted.evaluate(split.records)  # training set and holdout
    assert evaluation.composition == "parallel"
    assert evaluation.guarantee.mu == fitted.guarantee_.mu
    assert evaluation.guarantee.status == "proven"
    assert evaluation.unit == fitted.guarantee_.unit == ("person" if persons else "record")
    held_out = len(set(split.test.persons)) if split.test.persons is not None else len(split.test)
    # 5 standard deviations of the noise; the training set is three times as large.
    assert evaluation.size.value == pytest.approx(held_out, abs=5 * evaluation.noise * 3)
    right = np.mean(fitted.predict(split.test.features) == split.test.labels)
    assert evaluation.accuracy.value == pytest.approx(right, abs=0.08)
    with pytest.raises(BudgetExhausted):
        fitted.evaluate(split.test)
    further = fitted.evaluate(split.test, mu=fitted.guarantee_.mu)
    assert further.guarantee.mu == pytest.approx(fitted.guarantee_.mu * math.sqrt(2))
    fitted.fit(split.train)
    assert fitted.evaluate(split.test).guarantee == evaluation.guarantee


@pytest.mark.parametrize("kind", ["arrays", "records", "persons"])
def test_plain_arrays_compose_unless_they_are_declared_disjoint(kind: str) -> None:
    """No rule of a holdout is applied to them: the training set under other names is not the holdout."""
    data, groups = people(persons=False), None
    if kind == "arrays":
        fitted = head(classes=(0, 1)).fit(data.features[:2000], data.labels[:2000])
    else:
        split, fitted = held_out(persons=kind == "persons")
        data = split.train
        groups = np.arange(len(data)) if kind == "persons" else None
    arrays = (data.features, data.labels, groups)
    with pytest.raises(InvalidInput, match="a budget is required"):
        fitted.evaluate(*arrays)
    composed = fitted.evaluate(*arrays, epsilon=1.0, delta=1e-5)
    assert (composed.composition, composed.guarantee.status) == ("sequential", "proven")
    assert composed.guarantee.mu == pytest.approx(math.hypot(fitted.guarantee_.mu, mu_of(1.0, 1e-5)))
    assert composed.size.value == pytest.approx(len(data), abs=60)  # everybody is counted
    declared = fitted.evaluate(*arrays, disjoint=True).guarantee
    assert (declared.mu, declared.status) == (composed.guarantee.mu, "conditional")
    assert any("No evaluated person is in the training set" in each for each in declared.assumptions)


def test_the_evaluation_counts_the_unit_that_the_model_protects() -> None:
    data = people()
    by_person = head(classes=(0, 1)).fit(data.features, data.labels, groups=data.persons)
    with pytest.raises(InvalidInput, match="`groups` is required"):
        by_person.evaluate(data.features, data.labels, mu=1.0)
    evaluation = by_person.evaluate(data.features, data.labels, data.persons, mu=1.0)
    assert evaluation.size.value == pytest.approx(1500, abs=40)
    by_record = head(classes=(0, 1)).fit(data.features, data.labels)
    with pytest.raises(InvalidInput, match="leave out `groups`"):
        by_record.evaluate(data.features, data.labels, data.persons, mu=1.0)


def test_a_frame_is_encoded_and_its_labels_and_persons_are_found() -> None:
    data = people()
    frame = pd.DataFrame(
        {"a": data.features[:, 0], "who": data.persons, "ill": np.array(["no", "yes"])[data.labels]}
    )
    schema = Schema(label="ill", classes=("no", "yes"), bounds={"a": (0, 1)}, person="who")
    fitted = head(schema=schema).fit(frame)
    evaluation = fitted.evaluate(frame, mu=1.0)
    assert (evaluation.classes, evaluation.unit) == (("no", "yes"), "person")
    assert evaluation.size.value == pytest.approx(1500, abs=40)
    assert evaluation.recall["yes"].low > 0.6
    labels = frame.pop("ill")
    again = fitted.evaluate(frame, labels, mu=1.0)
    assert again.accuracy.value == pytest.approx(evaluation.accuracy.value, abs=0.1)
    with pytest.raises(InvalidInput, match="leave out `groups`"):
        fitted.evaluate(frame, labels, data.persons, mu=1.0)


@pytest.mark.parametrize("kind", ["teachers", "head"])
def test_a_model_that_is_paid_per_answer_cannot_be_evaluated(kind: str, tmp_path: Path) -> None:
    """Its account and its stored answers would tell exactly who was held out."""
    split = hold_out(people(400), 0.3, seed=1)
    fitted: Teachers | PrivateHead = (
        Teachers(epsilon=10.0, delta=1e-5, queries=200, teachers=5, declared_size=140)
        if kind == "teachers"
        else PrivateHead(epsilon=9.0, release="query", queries=600, declared_size=140)
    ).fit(split.train)
    refused = r"paid per answer cannot be evaluated: .* people whose records are public"
    for budget in ({}, {"epsilon": 1.0}):
        with pytest.raises(InvalidInput, match=refused):
            fitted.evaluate(split.records, **budget)
    folder = save(fitted, tmp_path / "model")
    for exact in (False, True):
        with pytest.raises(InvalidInput, match=refused):
            evaluate(folder, split.records, exact=exact)
    assert fitted.predictor_.answered == 0
    assert not (folder / EVALUATION_FILE).exists()
    assert stored(folder) == []


def test_records_that_were_split_by_row_cannot_be_trained_on_by_person() -> None:
    data = people()
    split = hold_out(people(persons=False), 0.3)
    assert data.persons is not None
    with pytest.raises(InvalidInput, match="split without knowing `groups`"):
        head().fit(split.train, groups=data.persons[split.train_rows])
    head().fit(hold_out(people(persons=False), 0.0).train, groups=data.persons)


def test_people_who_may_have_other_names_are_refused(tmp_path: Path) -> None:
    """A file calls them 00007, and pandas reads 7: with other names, most people would be counted as held out."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"who": [f"{row:05d}" for row in range(800)], "age": rng.integers(0, 100, 800)})
    frame["ill"] = np.where(frame["age"] > 50, "yes", "no")
    schema = Schema(label="ill", classes=("no", "yes"), bounds={"age": (0, 100)}, person="who")
    split = hold_out(encode_table(frame, schema), 0.5, seed=1)
    fitted = head().fit(split.train)
    renamed = frame.assign(who=frame["who"].astype(int))
    for who in (renamed["who"], renamed["who"].astype(float), frame["who"].astype(object)):
        with pytest.raises(InvalidInput, match=r"the same type as in training \(string\)"):
            fitted.evaluate(frame.assign(who=who))
    with pytest.raises(InvalidInput, match="the encoding that the model was trained with"):
        fitted.evaluate(encode_table(renamed, schema))
    evaluation = fitted.evaluate(frame.astype({"who": "category"}))
    assert evaluation.guarantee.status == "proven"
    assert "The evaluated people have the same names as in training." in evaluation.guarantee.assumptions
    folder = save(fitted, tmp_path / "model")
    with pytest.raises(InvalidInput, match="the encoding that the model was trained with"):
        evaluate(folder, encode_table(renamed, schema), exact=True)


def test_records_of_another_encoding_are_refused() -> None:
    """Rows are held out by their encoded content: with other bounds, other rows would be."""
    frame = pd.DataFrame({"a": people().features[:, 0], "ill": people().labels})
    narrow, wide = (
        encode_table(frame, Schema(label="ill", classes=("0", "1"), bounds={"a": (0, bound)}))
        for bound in (1, 2)
    )
    fitted = head().fit(hold_out(narrow, 0.3).train)
    for other in (wide, replace(narrow, encoding=None)):
        with pytest.raises(InvalidInput, match="the encoding that the model was trained with"):
            fitted.evaluate(other)
    plain = head().fit(hold_out(people(persons=False), 0.3).train).evaluate(people(persons=False))
    assert "The evaluated records are encoded as in training." in plain.guarantee.assumptions


def test_a_free_evaluation_of_records_assumes_that_they_are_encoded_as_in_training() -> None:
    """Records that were trained on have other numbers in a column of another type, and so may seem held out."""
    frame = pd.DataFrame({"a": np.random.default_rng(0).random(2000), "ill": np.arange(2000) % 2})
    schema = Schema(label="ill", classes=("0", "1"), bounds={"a": (0, 3)}, complete=("a",))
    split = hold_out(encode_table(frame, schema), 0.3)
    fitted, trained = head(steps=1).fit(split.train), frame.iloc[split.train_rows]
    evaluation = fitted.evaluate(trained.astype({"a": "float32"}))
    assert evaluation.composition == "parallel"
    assert evaluation.size.low > 0
    assumed = (*fitted.guarantee_.assumptions, "The evaluated records are encoded as in training.")
    assert evaluation.guarantee.assumptions == assumed


def saved(tmp_path: Path) -> tuple[Path, Records]:
    """A folder with a model, and the people on whom it can be evaluated."""
    split, fitted = held_out()
    return save(fitted, tmp_path / "model"), split.records


def test_a_folder_keeps_its_evaluations_and_what_they_cost(tmp_path: Path) -> None:
    folder, records = saved(tmp_path)
    model = open_private(folder)
    assert stored(folder) == []
    first = evaluate_folder(folder, model, records, mu=0.1)
    second = evaluate_folder(folder, model, records)  # what is left
    assert second.guarantee.mu == model.guarantee.mu
    assert math.hypot(0.1, second.mu or 0.0) == pytest.approx(model.guarantee.mu or 0.0)
    assert [each.result for each in stored(folder)] == [first, second]
    with pytest.raises(BudgetExhausted, match="as much as the training"):
        evaluate_folder(folder, model, records)
    third = evaluate_folder(folder, model, records, mu=1.0)
    assert third.guarantee.mu == pytest.approx(math.hypot(model.guarantee.mu or 0.0, 1.0))
    assert len(stored(folder)) == 3


def test_an_estimator_that_is_saved_keeps_its_evaluations_in_the_folder(tmp_path: Path) -> None:
    split, fitted = held_out()
    before = fitted.evaluate(split.test, mu=0.1)
    folder = save(fitted, tmp_path / "model")
    assert [each.result for each in stored(folder)] == [before]
    evaluate(folder, split.records, mu=0.1)
    rest = fitted.evaluate(split.test)
    assert rest.mu == pytest.approx(math.sqrt(fitted.guarantee_.mu**2 - 0.02))
    assert [each.result for each in stored(folder)][2] == rest
    save(fitted, folder, overwrite=True)
    assert [each.result for each in stored(folder)][2] == rest
    save(head().fit(split.train), folder, overwrite=True)
    assert stored(folder) == []
    with pytest.raises(DataUnavailable, match="those of another model"):
        fitted.evaluate(split.test, mu=0.1)


def test_of_several_folders_only_the_first_evaluates_for_free(tmp_path: Path) -> None:
    split, fitted = held_out()
    training = fitted.guarantee_.mu
    first, second = (save(fitted, tmp_path / name) for name in "ab")
    assert (first / "model.json").read_bytes() == (second / "model.json").read_bytes()
    model = open_private(second)
    with pytest.raises(BudgetExhausted, match=r"saved before, and only the first one.* requires a budget"):
        evaluate_folder(second, model, split.records)
    evaluation = fitted.evaluate(split.records)
    assert [each.result for each in read_evaluations(first, model)] == [evaluation]
    further = evaluate_folder(second, model, split.records, mu=0.1)
    assert further.guarantee.mu == pytest.approx(
        math.hypot(training, 0.1)
    )  # with what the first one may spend
    assert "left to another copy" in further.guarantee.because
    third = save(fitted, tmp_path / "c")
    assert [each.result for each in read_evaluations(third, model)] == [evaluation]
    with pytest.raises(BudgetExhausted):
        evaluate(third, split.records)
    shutil.rmtree(first)
    fourth = save(fitted, tmp_path / "d")
    with pytest.raises(BudgetExhausted, match="only the first one"):
        evaluate(fourth, split.records)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interrupted_save_leaves_one_free_evaluation(tmp_path: Path, moment: str) -> None:
    split, fitted = held_out()
    with interrupted_saving(moment):
        save(fitted, tmp_path / "model")
    assert fitted.evaluate(split.records).mu == fitted.guarantee_.mu
    if moment == "before":
        save(fitted, tmp_path / "model")
    with pytest.raises(BudgetExhausted):
        evaluate_folder(tmp_path / "model", open_private(tmp_path / "model"), split.records)


def test_a_folder_with_another_holdout_than_its_guarantee_names_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)[0] / "model.json"
    content = json.loads(path.read_text())
    assert content["guarantee"]["parameters"]["holdout"] == content["holdout"] == {"share": 0.3, "seed": 0}
    for edited in ({"share": 0.999, "seed": 0}, {"share": 0.3, "seed": 1}, None):
        path.write_text(json.dumps(content | {"holdout": edited}))
        with pytest.raises(DataUnavailable, match="damaged"):
            open_private(path.parent)
    del content["evaluation_id"]
    path.write_text(json.dumps(content))
    with pytest.raises(DataUnavailable, match="id of its evaluations"):
        open_private(path.parent)


@pytest.mark.parametrize("evaluated", [True, False])
def test_a_copy_of_an_estimator_cannot_evaluate_the_holdout_for_free(evaluated: bool, tmp_path: Path) -> None:
    split, fitted = held_out()
    if evaluated:
        fitted.evaluate(split.test, mu=0.1)
    copies = [copy.deepcopy(fitted), pickle.loads(pickle.dumps(fitted))]
    copies.append(copy.deepcopy(copies[0]))
    for number, copied in enumerate(copies):
        with pytest.raises(BudgetExhausted, match="copied or saved before"):
            copied.evaluate(split.test)
        folder = save(copied, tmp_path / str(number))
        with pytest.raises(BudgetExhausted, match="copied or saved before"):
            evaluate(folder, split.test)
        paid = copied.evaluate(split.test, mu=0.1).guarantee
        assert paid.mu == pytest.approx(math.hypot(fitted.guarantee_.mu, 0.1))
    free = fitted.evaluate(split.test).guarantee
    assert free.mu == fitted.guarantee_.mu


def test_two_references_to_one_estimator_share_its_account(tmp_path: Path) -> None:
    split, fitted = held_out()
    shared = copy.copy(fitted)
    folder = save(fitted, tmp_path / "model")
    shared.evaluate(split.test)
    with pytest.raises(BudgetExhausted):
        evaluate(folder, split.test)


def test_a_fork_cannot_evaluate_and_saves_without_the_free_evaluation(tmp_path: Path) -> None:
    split, fitted = held_out()
    child = os.fork()
    if child == 0:  # pragma: no cover
        try:
            fitted.evaluate(split.test)
        except QuietmaxError:
            save(fitted, tmp_path / "forked")
        os._exit(0)
    os.waitpid(child, 0)
    folder = tmp_path / "forked"
    with pytest.raises(BudgetExhausted, match="only the first one"):
        evaluate(folder, split.test)
    fitted.evaluate(split.test)


def test_what_an_evaluation_assumes_is_stored_with_its_charge(tmp_path: Path) -> None:
    data = people(persons=False)
    fitted = head(classes=(0, 1), random_state=0).fit(data.features[:2000], data.labels[:2000])
    evaluation = fitted.evaluate(data.features[2000:], data.labels[2000:], disjoint=True)
    folder = save(fitted, tmp_path / "model")
    (found,) = stored(folder)
    assert found.assumes == ("disjoint", "seeded")
    assert composed_guarantee(open_private(folder).guarantee, [found]) == evaluation.guarantee


def test_exact_figures_are_neither_charged_nor_stored(tmp_path: Path) -> None:
    folder, records = saved(tmp_path)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    exact = evaluate(folder, records, exact=True)
    assert exact.exact
    assert exact.guarantee is None
    assert exact.to_json()["publishable"] is False
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    held_out = hold_out(records, 0.3).test
    assert exact.size.value == pytest.approx(len(set(held_out.persons)), abs=1e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("where", "failing", "problem"),
    [
        (evaluation_module, "release_gaussian", KeyboardInterrupt()),
        (evaluation_module, "atomic_write", KeyboardInterrupt()),
        (evaluation_module, "atomic_write", OSError(errno.ENOSPC, "No space left on device")),
    ],
)
def test_an_evaluation_that_does_not_end_costs_nothing(
    where: Any, failing: str, problem: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, records = saved(tmp_path)
    model = open_private(folder)
    before = (folder / EVALUATION_FILE).read_bytes()

    def fail(*_: Any, **__: Any) -> None:
        raise problem

    monkeypatch.setattr(where, failing, fail)
    with pytest.raises(KeyboardInterrupt if isinstance(problem, KeyboardInterrupt) else QuietmaxError):
        evaluate_folder(folder, model, records)
    monkeypatch.undo()
    assert (folder / EVALUATION_FILE).read_bytes() == before
    evaluate_folder(folder, model, records)
    with pytest.raises(BudgetExhausted):
        evaluate_folder(folder, model, records)


def test_evaluations_that_are_missing_edited_or_of_another_model_are_refused(tmp_path: Path) -> None:
    folder, records = saved(tmp_path)
    evaluate(folder, records)
    path = folder / EVALUATION_FILE
    text = path.read_text()
    content = json.loads(text)
    other = save(head().fit(hold_out(records, 0.3).train), tmp_path / "other")
    entry = content["evaluations"][0]
    edits: list[object] = [
        None, json.loads((other / EVALUATION_FILE).read_text()),
        [], {}, {**content, "format": "x"}, {**content, "id": "0" * 32}, {**content, "evaluations": 3},
        {**content, "evaluations": []} | {"id": None},
        {**content, "evaluations": [{**entry, "mu": 0.01}]},
        {**content, "evaluations": [{**entry, "composition": "none", "result": None}]},
        {**content, "evaluations": [{**entry, "assumes": ["nothing"]}]},
        {**content, "evaluations": [{**entry, "assumes": []}]},
        {**content, "evaluations": [{**entry, "reserved": True}]},
        {**content, "evaluations": [{**entry, "result": None}]},
        {**content, "evaluations": [{**entry, "result": {**entry["result"], "noise": 0}}]},
        {**content, "evaluations": [{**entry, "result": {**entry["result"], "unit": "record"}}]},
        *(
            {**content, "evaluations": [{**entry, "result": {**entry["result"], "guarantee": edited}}]}
            for edited in (
                {**entry["result"]["guarantee"], "mu": 0.01},
                {**entry["result"]["guarantee"], "status": "conditional"},
                {**entry["result"]["guarantee"], "unit": "record"},
                {**entry["result"]["guarantee"], "assumptions": []},
            )
        ),
    ]  # fmt: skip
    for edited in edits:
        path.unlink()
        if edited is not None:
            path.write_text(json.dumps(edited))
        for use in (stored, partial(evaluate, records=records, mu=0.1)):
            with pytest.raises(
                DataUnavailable, match=r"those of another model\. What was spent on them is unknown"
            ):
                use(folder)
        path.write_text(text)
    evaluate(folder, records, mu=0.1)


def test_models_that_hold_out_different_people_have_splits_of_different_names(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": people().features[:, 0], "ill": people().labels, "who": people().persons})

    def name(records: Records, share: float = 0.3, seed: int = 0) -> str | None:
        fitted = head(steps=1).fit(hold_out(records, share, seed=seed).train)
        return split_name(open_private(save(fitted, tmp_path / "model", overwrite=True)))

    def table(person: str | None, bound: int = 1) -> Records:
        columns: dict[str, Any] = {"label": "ill", "classes": ("0", "1"), "bounds": {"a": (0, bound)}}
        return encode_table(frame, Schema(**columns, person=person, ignore=() if person else ("who",)))

    by_person = table("who")
    names = {
        name(by_person),
        name(by_person, seed=1),
        name(by_person, 0.2),
        name(table(None)),
        name(table(None, 2)),
    }
    assert len(names - {None}) == 5
    assert name(by_person) in names
    for persons in (True, False):  # nothing says how the people or rows of two arrays are related
        names |= {name(people(persons=persons)) for _ in range(2)}
    assert len(names) == 9
    assert name(people(), 0.0) is None


def test_a_person_changes_the_counts_by_what_this_person_adds_and_nobody_elses(tmp_path: Path) -> None:
    """From the table to the counts, bit for bit: encoding, side of the split, features, answers and shares."""
    rng = np.random.default_rng(8)
    count = 400
    frame = pd.DataFrame(
        {
            "age": rng.integers(18, 90, count),
            "city": rng.choice(["a", "b", "c"], count),
            "who": [f"p{each}" for each in rng.integers(0, 120, count)],
        }
    )
    frame["ill"] = np.where(frame["age"] + 20 * rng.normal(size=count) > 50, "yes", "no")
    schema = Schema(
        label="ill",
        classes=("no", "yes"),
        bounds={"age": (18, 90)},
        categories={"city": ("a", "b", "c")},
        person="who",
    )
    folder = save_private(
        head().fit(hold_out(encode_table(frame, schema), 0.5).train), tmp_path / "model", dataset="people"
    )
    model = open_private(folder)

    def counts(rows: pd.DataFrame) -> NDArray[np.float64]:
        exact = evaluate_folder(folder, model, encode_table(rows, schema), exact=True)
        return np.array([*np.ravel(exact.confusion), *np.ravel(exact.calibration)]) * UNITS

    everybody = counts(frame)
    assert np.array_equal(everybody, counts(frame.sample(frac=1, random_state=1)))
    both_classes = frame.groupby("who")["ill"].nunique() == 2  # encode_table needs two classes
    moved = 0
    for who in both_classes.index[both_classes][:25]:
        own = counts(frame[frame["who"] == who])
        assert np.array_equal(everybody - counts(frame[frame["who"] != who]), own)
        assert own[:4].sum() <= UNITS
        assert own[4:].sum() <= UNITS
        moved += bool(own.any())
    assert 3 < moved < 22  # the others were in the training set

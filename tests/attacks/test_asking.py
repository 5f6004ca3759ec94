from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.svm import LinearSVC

import quietmax as qm
from quietmax.accounting import GaussianCost, PureCost
from quietmax.attacks import NoisyModel, ask
from quietmax.errors import InvalidInput
from quietmax.estimators.teachers import Teachers
from quietmax.mechanisms import Algorithm1, NoisyMax
from quietmax.models import TorchModel
from quietmax.noise import SeededNoise
from quietmax.sensitivity import ScoreBounds, Sensitivity

CERTIFIED = ScoreBounds(Sensitivity(1.0, "certified", "test"), Sensitivity(1.0, "certified", "test"))


@pytest.fixture
def queries(memorised):
    return memorised.test.features[:20]


def test_a_plain_model_answers_with_its_probabilities_at_no_cost(overfitted, queries):
    asked = ask(overfitted, queries, 3)
    np.testing.assert_array_equal(asked.answers.probabilities, overfitted.predict_proba(queries))
    assert (asked.queries, asked.spent, asked.target) == (20, None, "plain model")


def test_a_predictor_is_charged_once_per_query(overfitted, queries):
    quiet = qm.Predictor(overfitted, Algorithm1("laplace"), qm.Budget(1.0, queries=50), noise=SeededNoise(0))
    asked = ask(quiet, queries, 3)
    assert asked.queries == quiet.answered == 20
    assert asked.spent == quiet.cost.times(20)
    assert asked.target == "algorithm1"
    again = ask(quiet, queries, 3)
    np.testing.assert_array_equal(again.answers.probabilities, asked.answers.probabilities)
    assert (again.queries, again.spent) == (0, PureCost(0.0))


def test_a_predictor_that_releases_labels_is_asked_for_labels_and_charged_once(overfitted, queries):
    quiet = qm.Predictor(
        overfitted, NoisyMax(bounds=CERTIFIED), qm.Budget(10.0, queries=20), noise=SeededNoise(0)
    )
    asked = ask(quiet, queries, 3)
    assert asked.answers.probabilities is None
    assert asked.queries == quiet.answered == 20


def test_an_exhausted_predictor_refuses_the_attack(overfitted, queries):
    quiet = qm.Predictor(overfitted, Algorithm1(), qm.Budget(1.0, queries=5), noise=SeededNoise(0))
    with pytest.raises(qm.BudgetExhausted):
        ask(quiet, queries, 3)


def test_a_noisy_model_says_what_all_its_answers_cost_together(overfitted, queries):
    target = NoisyModel.at(overfitted, Algorithm1("gaussian"), 0.5, noise=SeededNoise(1))
    asked = ask(target, queries, 3)
    one = target.mechanism.cost(3)
    assert one.mu == pytest.approx(0.5)
    assert asked.spent == one.times(20)
    assert isinstance(asked.spent, GaussianCost)
    assert np.abs(asked.answers.probabilities - overfitted.predict_proba(queries)).max() > 1e-3


def test_an_estimator_s_columns_are_put_at_their_classes(memorised, queries):
    kept = memorised.train.labels != 1
    estimator = LogisticRegression().fit(memorised.train.features[kept], memorised.train.labels[kept])
    asked = ask(estimator, queries, 3)
    np.testing.assert_array_equal(asked.answers.probabilities[:, [0, 2]], estimator.predict_proba(queries))
    assert (asked.answers.probabilities[:, 1] == 0).all()


def test_an_estimator_without_probabilities_gives_labels(memorised, queries):
    estimator = LinearSVC().fit(memorised.train.features, memorised.train.labels)
    asked = ask(estimator, queries, 3)
    assert asked.answers.probabilities is None
    np.testing.assert_array_equal(asked.answers.labels, estimator.predict(queries))


def test_an_estimator_fitted_on_other_labels_is_refused(memorised, queries):
    names = np.array(["a", "b", "c"])[memorised.train.labels]
    with pytest.raises(InvalidInput, match="classes"):
        ask(LogisticRegression().fit(memorised.train.features, names), queries, 3)


def test_teachers_are_charged_through_their_own_predictor(memorised, queries):
    crowd = Teachers(10.0, 0.0, queries=30, teachers=4, random_state=0).fit(
        memorised.train.features, memorised.train.labels
    )
    asked = ask(crowd, queries, 3)
    assert asked.queries == 20
    assert asked.spent == crowd.predictor_.cost.times(20)


def test_a_wrapped_module_answers_with_the_softmax_of_its_logits(queries):
    module = torch.nn.Linear(40, 3)
    asked = ask(TorchModel(module, 3), queries, 3)
    expected = torch.softmax(module(torch.from_numpy(queries)), -1).detach().numpy()
    np.testing.assert_allclose(asked.answers.probabilities, expected, atol=1e-6)


def test_a_function_may_give_probabilities_or_labels(queries):
    rows = np.tile([0.2, 0.3, 0.5], (20, 1))
    assert ask(lambda _: rows, queries, 3).answers.labels.tolist() == [2] * 20
    assert ask(lambda _: [1] * 20, queries, 3).answers.probabilities is None


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (np.zeros((20, 3)), "not probabilities"),
        (np.full((20, 3), np.nan), "not probabilities"),
        (np.tile([2.0, -0.5, -0.5], (20, 1)), "not probabilities"),
        (np.full((20, 2), 0.5), "shape"),
        (np.full((19, 3), 1 / 3), "one per query"),
        (np.full(20, 0.5), "whole"),
        (np.full(20, 3), "label outside"),
        (["a"] * 20, "not numbers"),
    ],
)
def test_answers_that_are_none_are_refused(queries, answer, complaint):
    with pytest.raises(InvalidInput, match=complaint):
        ask(lambda _: answer, queries, 3)


def test_what_cannot_be_asked_is_refused(queries):
    with pytest.raises(InvalidInput, match="cannot be asked"):
        ask(3.5, queries, 3)

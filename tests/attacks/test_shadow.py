from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import quietmax as qm
from quietmax.attacks import Endpoint, Shadow, ShadowPool, Threshold, leakage_curve
from quietmax.attacks.shadow import ATTACK_NETWORK, attack_data
from quietmax.attacks.shadow_models import candidate_rows
from quietmax.data import Records, Split
from quietmax.errors import InvalidInput
from quietmax.mechanisms import Algorithm1, Answerer, NoisyMax
from quietmax.models import CrossEntropy, TrainingSettings
from quietmax.noise import SeededNoise
from quietmax.sensitivity import ScoreBounds, Sensitivity


def test_the_attack_network_is_the_paper_s():
    assert (
        TrainingSettings(
            hidden=(64,),
            activation="tanh",
            loss=CrossEntropy(),
            learning_rate=0.01,
            batch_size=100,
            epochs=100,
            l2=1e-6,
        )
        == ATTACK_NETWORK
    )


def test_shadow_tells_memorised_records_and_asks_each_candidate_once(memorised, overfitted, outside_pool):
    report = Shadow().run(overfitted, memorised, pool=outside_pool)
    assert report.leakage.low > 0.5
    assert report.auc.low > 0.8
    assert report.leakage.value == report.tpr.value - report.fpr.value
    assert (report.members, report.nonmembers, report.queries, report.spent) == (100, 100, 200, None)
    assert report.settings["models"] == 8
    assert report.settings["pool"] == "outside"


def test_shadow_trains_its_own_pool_from_the_model_s_settings(memorised, overfitted):
    seen = []
    attack = Shadow(models=2, network=TrainingSettings(hidden=(8,), loss=CrossEntropy(), epochs=5))
    report = attack.run(overfitted, memorised, progress=lambda done, total: seen.append((done, total)))
    assert report.settings["models"] == 2
    assert seen[-1][0] == seen[-1][1]
    again = attack.run(overfitted, memorised)
    assert again.auc == report.auc


def test_attack_data_are_the_shadow_networks_own_plain_answers(memorised, outside_pool):
    data = attack_data(outside_pool, "probabilities")
    assert data.features.shape == (8 * 200, 3)
    second = next(network for index, network in enumerate(outside_pool.each()) if index == 1)
    rows = np.flatnonzero(outside_pool.inside[1])
    expected = torch.softmax(second.logits(memorised.records.features[rows]), -1)
    np.testing.assert_allclose(data.features[200:300], expected.numpy(), atol=1e-6)
    np.testing.assert_array_equal(data.labels[200:300], memorised.records.labels[rows])
    assert data.inside.reshape(8, 2, 100).tolist() == [[[1] * 100, [0] * 100]] * 8


def test_every_record_is_judged_by_the_network_of_its_true_class(memorised, overfitted, outside_pool):
    attack = Shadow(network=TrainingSettings(hidden=(8,), loss=CrossEntropy(), epochs=3))
    fitted = attack.fit(outside_pool, "probabilities")
    answers = attack.ask(overfitted, memorised).answers
    scores = fitted.scores(answers)
    labels = memorised.records.labels[candidate_rows(memorised)]
    for record in range(0, 200, 17):
        judge = fitted.networks.network(int(labels[record]))
        outside, inside = judge.logits(answers.probabilities[record : record + 1].astype(np.float32))[
            0
        ].tolist()
        assert scores[record] == pytest.approx(inside - outside, abs=1e-5)


def test_classes_without_shadow_records_are_judged_by_one_network_for_all(memorised, overfitted):
    """The leftover records hold no record of class 2, which the candidates do."""
    labels = memorised.records.labels
    kept = memorised.pool_rows[labels[memorised.pool_rows] != 2]
    scarce = Split(memorised.records, memorised.train_rows, memorised.test_rows, kept, 0)
    pool = ShadowPool.outside(scarce, overfitted.settings, 3)
    attack = Shadow(network=TrainingSettings(hidden=(8,), loss=CrossEntropy(), epochs=2))
    fitted = attack.fit(pool, "probabilities")
    assert fitted.networks.networks == 3
    assert fitted.network_of_class.tolist() == [0, 1, 2]
    assert attack_data(pool, "probabilities").labels.max() == 1
    report = attack.run(overfitted, scarce, pool=pool)
    assert "no records both inside and outside for 1 classes (2)" in report.notes[-1]


def test_shadow_refuses_networks_that_saw_candidates(memorised, overfitted, around_pool):
    with pytest.raises(InvalidInput, match="design outside"):
        Shadow().run(overfitted, memorised, pool=around_pool)


def test_a_label_only_target_is_judged_by_its_label(memorised, overfitted, outside_pool):
    report = Shadow().run(overfitted, memorised, pool=outside_pool, target=overfitted.predict)
    assert report.released == "labels"
    assert report.leakage.value > 0.4
    # Nine pairs of true and released class, so at most nine scores.
    assert len(report.roc.fpr) <= 10


def test_an_attack_fitted_to_probabilities_refuses_labels(memorised, overfitted, outside_pool):
    attack = Shadow(network=TrainingSettings(hidden=(4,), loss=CrossEntropy(), epochs=1))
    fitted = attack.fit(outside_pool, "probabilities")
    with pytest.raises(InvalidInput, match="labels only"):
        fitted.scores(attack.ask(overfitted.predict, memorised).answers)


@pytest.mark.parametrize("attack", [Shadow(), Threshold(), Threshold(statistic="entropy")])
def test_a_network_that_saw_nothing_leaks_nothing(memorised, untrained, outside_pool, attack):
    report = attack.run(untrained, memorised, pool=outside_pool)
    # Under no difference TPR - FPR of 100 and 100 has standard deviation at most 0.071, the AUC 0.041.
    assert abs(report.leakage.value) < 0.36
    assert abs(report.auc.value - 0.5) < 0.21


@pytest.mark.parametrize("statistic", ["loss", "confidence", "entropy"])
def test_threshold_reads_the_named_number_off_each_answer(memorised, overfitted, outside_pool, statistic):
    attack = Threshold(statistic=statistic)
    answers = attack.ask(overfitted, memorised).answers
    scores = attack.fit(outside_pool, "probabilities").scores(answers)
    labels = memorised.records.labels[candidate_rows(memorised)]
    for record in range(0, 200, 13):
        row = answers.probabilities[record].tolist()
        expected = {
            "loss": math.log(row[labels[record]]),
            "confidence": max(row),
            "entropy": sum(p * math.log(p) for p in row),
        }[statistic]
        assert scores[record] == pytest.approx(expected, rel=1e-9)


def test_the_threshold_comes_from_the_shadow_networks_and_not_from_the_target(
    memorised, overfitted, untrained, outside_pool
):
    one, other = (Threshold().run(each, memorised, pool=outside_pool) for each in (overfitted, untrained))
    assert one.threshold == other.threshold
    assert one.auc.value > other.auc.value + 0.2


def test_on_labels_alone_threshold_finds_the_accuracy_gap(memorised, overfitted, outside_pool):
    report = Threshold().run(overfitted, memorised, pool=outside_pool, target=overfitted.predict)
    gap = qm.models.accuracy(overfitted, memorised.train) - qm.models.accuracy(overfitted, memorised.test)
    assert report.leakage.value == pytest.approx(gap)
    assert report.notes


def test_a_pool_for_another_split_is_refused(memorised, overfitted, outside_pool):
    other = qm.data.split(memorised.records, size=100, seed=2)
    with pytest.raises(InvalidInput, match="another split"):
        Threshold().run(overfitted, other, pool=outside_pool)
    with pytest.raises(InvalidInput, match="another split"):
        leakage_curve(overfitted, other, Algorithm1(), (1.0,), attack=Threshold(), pool=outside_pool)


def test_a_model_of_other_data_is_refused(overfitted):
    generator = np.random.default_rng(0)
    records = Records("other", generator.random((50, 7)).astype(np.float32), generator.integers(0, 3, 50), 3)
    with pytest.raises(InvalidInput, match="split it was trained on"):
        Threshold().run(overfitted, qm.data.split(records, size=20))


def test_settings_alone_may_stand_for_the_model_when_a_target_is_given(memorised, overfitted, outside_pool):
    attack = Threshold()
    report = attack.run(overfitted.settings, memorised, target=overfitted.predict_proba, pool=outside_pool)
    assert report.auc == attack.run(overfitted, memorised, pool=outside_pool).auc
    with pytest.raises(InvalidInput, match="give the target"):
        attack.run(overfitted.settings, memorised)
    with pytest.raises(InvalidInput, match="of type Endpoint"):
        attack.run(Endpoint("http://host/v2/models/x"), memorised)


def test_an_unknown_statistic_is_refused():
    with pytest.raises(InvalidInput, match="loss, confidence, entropy"):
        Threshold(statistic="length")


def test_a_private_target_s_report_says_what_the_attack_cost(memorised, overfitted, outside_pool):
    quiet = qm.Predictor(overfitted, Algorithm1(), qm.Budget(1.0, queries=500), noise=SeededNoise(0))
    report = Threshold().run(overfitted, memorised, target=quiet, pool=outside_pool)
    assert report.queries == quiet.answered == 200
    assert report.spent == quiet.cost.times(200)
    assert report.to_json()["spent"]["measure"] == "gaussian"


def test_a_proven_mechanism_with_strong_noise_hides_membership(memorised, overfitted, outside_pool):
    """What is certified here is the noise's scale beside these logits; 0.36 is five standard deviations."""
    certified = ScoreBounds(Sensitivity(100.0, "certified", "test"), Sensitivity(100.0, "certified", "test"))
    target = Answerer.prepare(overfitted, NoisyMax(bounds=certified), qm.Budget(0.1), noise=SeededNoise(0))
    report = Shadow().run(overfitted, memorised, target=target, pool=outside_pool)
    assert report.released == "labels"
    assert abs(report.leakage.value) < 0.36


def test_the_leakage_of_algorithm_1_grows_towards_the_plain_model_s(memorised, overfitted, outside_pool):
    curve = leakage_curve(
        overfitted,
        memorised,
        Algorithm1("laplace"),
        (0.01, 1e6),
        attack=Threshold(),
        pool=outside_pool,
        noise=SeededNoise(0),
    )
    noisy, nearly_plain = curve.reports
    assert nearly_plain.leakage.value == pytest.approx(curve.plain.leakage.value, abs=0.02)
    assert noisy.leakage.value < curve.plain.leakage.value - 0.2
    assert curve.leakages == (noisy.leakage.value, nearly_plain.leakage.value)
    assert noisy.spent.epsilon == pytest.approx(2.0)
    assert curve.plain.spent is None
    assert curve.to_json()["epsilons"] == [0.01, 1e6]


def test_a_curve_needs_an_epsilon(memorised, overfitted):
    with pytest.raises(InvalidInput, match="at least one"):
        leakage_curve(overfitted, memorised, Algorithm1(), (), attack=Threshold())


def test_on_location_the_plain_model_leaks_more_than_the_paper_says(real_data):
    """Four shadow networks instead of thirty, to be quick; the paper's leakage is 0.36."""
    data = qm.load("location", data_dir=real_data)
    model = qm.train(data)
    report = Shadow(models=4).run(model, data)
    assert report.leakage.value >= 0.36
    assert report.members == report.nonmembers == 1200

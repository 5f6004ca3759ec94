from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import quietmax as qm
from quietmax.accounting import Budget
from quietmax.attacks import Shadow, ShadowPool
from quietmax.attacks.builtin import ATTACK_NETWORK, _attack_data
from quietmax.attacks.metrics import released_probabilities
from quietmax.attacks.shadow_models import candidate_rows
from quietmax.data import Split
from quietmax.errors import InvalidInput
from quietmax.mechanisms import NoisyMax
from quietmax.mechanisms.base import Answerer
from quietmax.models import CrossEntropy, Model, TrainingSettings
from quietmax.noise import SeededNoise
from quietmax.sensitivity import ScoreBounds, Sensitivity


def test_the_attack_network_is_that_of_the_paper() -> None:
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


def test_memorised_records_are_told_apart_with_one_query_per_candidate(
    memorised: Split, overfitted: Model, disjoint_pool: ShadowPool
) -> None:
    report = Shadow().run(overfitted, memorised, pool=disjoint_pool)
    assert report.leakage.low > 0.5
    assert report.auc.low > 0.8
    assert report.leakage.value == report.tpr.value - report.fpr.value
    assert (report.members, report.nonmembers, report.queries, report.spent) == (100, 100, 200, None)
    assert report.settings["models"] == 8
    assert report.settings["pool"] == "disjoint"


def test_a_pool_is_trained_with_the_settings_of_the_model(memorised: Split, overfitted: Model) -> None:
    seen = []
    attack = Shadow(models=2, network=TrainingSettings(hidden=(8,), loss=CrossEntropy(), epochs=5))
    report = attack.run(overfitted, memorised, progress=lambda done, total: seen.append((done, total)))
    assert report.settings["models"] == 2
    assert seen[-1][0] == seen[-1][1]
    again = attack.run(overfitted, memorised)
    assert again.auc == report.auc


def test_attack_data_are_the_plain_answers_of_the_shadow_networks(
    memorised: Split, disjoint_pool: ShadowPool
) -> None:
    data = _attack_data(disjoint_pool, "probabilities")
    assert data.features.shape == (8 * 200, 3)
    second = next(network for index, network in enumerate(disjoint_pool.each()) if index == 1)
    rows = np.flatnonzero(disjoint_pool.inside[1])
    expected = torch.softmax(second.logits(memorised.records.features[rows]), -1)
    np.testing.assert_allclose(data.features[200:300], expected.numpy(), atol=1e-6)
    np.testing.assert_array_equal(data.labels[200:300], memorised.records.labels[rows])
    assert data.inside.reshape(8, 2, 100).tolist() == [[[1] * 100, [0] * 100]] * 8


def test_every_record_is_judged_by_the_network_of_its_true_class(
    memorised: Split, overfitted: Model, disjoint_pool: ShadowPool
) -> None:
    attack = Shadow(network=TrainingSettings(hidden=(8,), loss=CrossEntropy(), epochs=3))
    fitted = attack.fit(disjoint_pool, "probabilities")
    answers = attack.query(overfitted, memorised).answers
    scores = fitted.scores(answers)
    labels = memorised.records.labels[candidate_rows(memorised)]
    for record in range(0, 200, 17):
        judge = fitted.networks.network(int(labels[record]))
        answer = released_probabilities(answers)[record : record + 1].astype(np.float32)
        outside, inside = judge.logits(answer)[0].tolist()
        assert scores[record] == pytest.approx(inside - outside, abs=1e-5)


def test_classes_without_shadow_records_are_judged_by_one_network_for_all(
    memorised: Split, overfitted: Model
) -> None:
    """The leftover records hold no record of class 2, which the candidates do."""
    labels = memorised.records.labels
    kept = memorised.pool_rows[labels[memorised.pool_rows] != 2]
    scarce = Split(memorised.records, memorised.train_rows, memorised.test_rows, kept, 0)
    pool = ShadowPool.train("disjoint", scarce, overfitted.settings, 3)
    attack = Shadow(network=TrainingSettings(hidden=(8,), loss=CrossEntropy(), epochs=2))
    fitted = attack.fit(pool, "probabilities")
    assert fitted.networks.networks == 3
    assert fitted.network_of_class.tolist() == [0, 1, 2]
    assert _attack_data(pool, "probabilities").labels.max() == 1
    report = attack.run(overfitted, scarce, pool=pool)
    assert "for 1 classes (2)" in report.notes[-1]


def test_overlapping_networks_are_an_error(
    memorised: Split, overfitted: Model, overlapping_pool: ShadowPool
) -> None:
    with pytest.raises(InvalidInput, match="requires a shadow pool of design disjoint, got overlapping"):
        Shadow().run(overfitted, memorised, pool=overlapping_pool)


def test_a_label_only_target_is_judged_by_its_label(
    memorised: Split, overfitted: Model, disjoint_pool: ShadowPool
) -> None:
    report = Shadow().run(overfitted, memorised, pool=disjoint_pool, target=overfitted.predict)
    assert report.released == "labels"
    assert report.leakage.value > 0.4
    # Nine pairs of true and released class, so at most nine scores.
    assert len(report.roc.fpr) <= 10


def test_an_attack_fitted_to_probabilities_cannot_score_labels(
    memorised: Split, overfitted: Model, disjoint_pool: ShadowPool
) -> None:
    attack = Shadow(network=TrainingSettings(hidden=(4,), loss=CrossEntropy(), epochs=1))
    fitted = attack.fit(disjoint_pool, "probabilities")
    with pytest.raises(InvalidInput, match="labels only"):
        fitted.scores(attack.query(overfitted.predict, memorised).answers)


def test_an_untrained_network_leaks_nothing(
    memorised: Split, untrained: Model, disjoint_pool: ShadowPool
) -> None:
    report = Shadow().run(untrained, memorised, pool=disjoint_pool)
    # Without a difference, TPR - FPR of 100 and 100 has standard deviation at most 0.071, the AUC 0.041.
    assert abs(report.leakage.value) < 0.36
    assert abs(report.auc.value - 0.5) < 0.21


def test_a_proven_mechanism_with_strong_noise_hides_membership(
    memorised: Split, overfitted: Model, disjoint_pool: ShadowPool
) -> None:
    """What is certified here is the noise's scale beside these logits; 0.36 is five standard deviations."""
    certified = ScoreBounds(Sensitivity(100.0, "certified", "test"), Sensitivity(100.0, "certified", "test"))
    target = Answerer.prepare(overfitted, NoisyMax(bounds=certified), Budget(0.1), noise=SeededNoise(0))
    report = Shadow().run(overfitted, memorised, target=target, pool=disjoint_pool)
    assert report.released == "labels"
    assert abs(report.leakage.value) < 0.36


def test_the_plain_model_of_location_leaks_at_least_what_the_paper_reports(real_data: Path) -> None:
    """Four shadow networks instead of thirty, to be quick; the paper's leakage is 0.36."""
    data = qm.load("location", data_dir=real_data)
    model = qm.train(data)
    report = Shadow(models=4).run(model, data)
    assert report.leakage.value >= 0.36
    assert report.members == report.nonmembers == 1200

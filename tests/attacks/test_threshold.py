from __future__ import annotations

import math

import pytest

from quietmax.attacks import ShadowPool, Threshold
from quietmax.attacks.builtin import StatisticName
from quietmax.attacks.metrics import released_probabilities
from quietmax.attacks.shadow_models import candidate_rows
from quietmax.data import Split
from quietmax.errors import InvalidInput
from quietmax.models import Model, accuracy


@pytest.mark.parametrize("statistic", ["loss", "confidence", "entropy"])
def test_scores_are_the_named_statistic_of_each_answer(
    memorised: Split, overfitted: Model, disjoint_pool: ShadowPool, statistic: StatisticName
) -> None:
    attack = Threshold(statistic=statistic)
    answers = attack.query(overfitted, memorised).answers
    scores = attack.fit(disjoint_pool, "probabilities").scores(answers)
    labels = memorised.records.labels[candidate_rows(memorised)]
    for record in range(0, 200, 13):
        row = released_probabilities(answers)[record].tolist()
        expected = {
            "loss": math.log(row[labels[record]]),
            "confidence": max(row),
            "entropy": sum(p * math.log(p) for p in row),
        }[statistic]
        assert scores[record] == pytest.approx(expected, rel=1e-9)


def test_the_threshold_depends_on_the_shadow_networks_and_not_on_the_target(
    memorised: Split, overfitted: Model, untrained: Model, disjoint_pool: ShadowPool
) -> None:
    one, other = (Threshold().run(each, memorised, pool=disjoint_pool) for each in (overfitted, untrained))
    assert one.threshold == other.threshold
    assert one.auc.value > other.auc.value + 0.2


def test_with_labels_only_the_leakage_is_the_accuracy_gap(
    memorised: Split, overfitted: Model, disjoint_pool: ShadowPool
) -> None:
    report = Threshold().run(overfitted, memorised, pool=disjoint_pool, target=overfitted.predict)
    gap = accuracy(overfitted, memorised.train) - accuracy(overfitted, memorised.test)
    assert report.leakage.value == pytest.approx(gap)
    assert report.notes


def test_an_unknown_statistic_is_an_error() -> None:
    with pytest.raises(InvalidInput, match="loss, confidence, entropy"):
        Threshold(statistic="length")  # type: ignore[arg-type]


@pytest.mark.parametrize("attack", [Threshold(), Threshold(statistic="entropy")])
def test_an_untrained_network_leaks_nothing(
    memorised: Split, untrained: Model, disjoint_pool: ShadowPool, attack: Threshold
) -> None:
    report = attack.run(untrained, memorised, pool=disjoint_pool)
    # Without a difference, TPR - FPR of 100 and 100 has standard deviation at most 0.071, the AUC 0.041.
    assert abs(report.leakage.value) < 0.36
    assert abs(report.auc.value - 0.5) < 0.21

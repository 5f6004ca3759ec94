from __future__ import annotations

import numpy as np
import pytest

from quietmax.attacks import RMIA, LiRA, Shadow, Threshold, run_together
from quietmax.attacks.base import shared_designs
from quietmax.attacks.registry import BUILT_IN, named
from quietmax.errors import InvalidInput
from quietmax.models import CrossEntropy, TrainingSettings

QUICK = TrainingSettings(hidden=(8,), loss=CrossEntropy(), epochs=5)


def test_the_target_is_asked_once_for_all_attacks(memorised, overfitted):
    seen = []

    def target(features):
        seen.append(len(features))
        return overfitted.predict_proba(features)

    attacks = [Threshold(models=4), LiRA(models=6), RMIA(models=6, population=40)]
    reports = run_together(attacks, overfitted, memorised, target=target)
    assert seen == [240]
    assert [report.attack for report in reports] == ["threshold", "lira", "rmia"]
    assert {report.queries for report in reports} == {240}
    assert all("asked once for all 3 attacks" in report.notes[-1] for report in reports)
    assert {report.settings["models"] for report in reports} == {6}


def test_attacks_together_find_what_they_find_alone(memorised, overfitted, around_pool):
    attacks = [LiRA(models=12, seed=3), RMIA(models=12, seed=3)]
    together = run_together(attacks, overfitted, memorised)
    for attack, report in zip(attacks, together, strict=True):
        alone = attack.run(overfitted, memorised, pool=around_pool)
        assert report.auc.value == pytest.approx(alone.auc.value, abs=1e-6)
        assert report.leakage.value == pytest.approx(alone.leakage.value, abs=0.02)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_attack_has_its_registered_name(name):
    assert named(name, models=4).name == name


def test_as_few_pools_as_possible_are_trained():
    flexible = [Threshold(), LiRA(mode="offline"), RMIA(mode="offline")]
    assert set(shared_designs(flexible)) == {"outside"}
    assert set(shared_designs([*flexible, LiRA()])) == {"around"}
    assert set(shared_designs([*flexible, Shadow()])) == {"outside"}
    assert shared_designs([Shadow(), LiRA()]) == ["outside", "around"]


def test_both_designs_are_trained_when_both_are_needed(memorised, overfitted):
    reports = run_together([Shadow(models=2, network=QUICK), LiRA(models=6)], overfitted, memorised)
    assert [report.settings["pool"] for report in reports] == ["outside", "around"]
    assert np.isfinite([report.auc.value for report in reports]).all()


def test_one_attack_alone_carries_no_note_on_others(memorised, overfitted):
    (report,) = run_together([Threshold(models=2)], overfitted, memorised)
    assert report.notes == ()


def test_no_attack_at_all_is_refused(memorised, overfitted):
    with pytest.raises(InvalidInput, match="at least one"):
        run_together([], overfitted, memorised)

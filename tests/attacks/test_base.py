"""Running attacks: alone, together, against other targets and at several epsilons."""

from __future__ import annotations

import numpy as np
import pytest

import quietmax as qm
from quietmax.accounting import Budget, PureCost
from quietmax.attacks import RMIA, Endpoint, LiRA, Shadow, Threshold, leakage_curve
from quietmax.attacks.base import run_together, shared_designs
from quietmax.data import Records, hold_out, split
from quietmax.errors import InvalidInput
from quietmax.mechanisms import Algorithm1
from quietmax.models import CrossEntropy, TrainingSettings
from quietmax.noise import SeededNoise
from tests.attacks.conftest import World

QUICK = TrainingSettings(hidden=(8,), loss=CrossEntropy(), epochs=5)


def test_a_pool_is_trained_with_the_settings_of_the_model(world: World) -> None:
    seen = []
    attack = Shadow(models=2, network=QUICK)
    report = attack.run(world.model, world.data, progress=lambda done, total: seen.append((done, total)))
    assert report.settings["models"] == 2
    assert report.settings["network"]["hidden"] == [8]
    assert seen[-1][0] == seen[-1][1]
    assert attack.run(world.model, world.data).auc == report.auc


def test_the_target_is_queried_once_for_all_attacks(world: World) -> None:
    seen = []

    def target(features):
        seen.append(len(features))
        return world.model.predict_proba(features)

    attacks = [Threshold(models=4), LiRA(models=6), RMIA(models=6, population=40)]
    reports = run_together(attacks, world.model, world.data, target=target)
    assert seen == [240]
    assert [report.attack for report in reports] == ["threshold", "lira", "rmia"]
    assert {report.queries for report in reports} == {240}
    assert all("queried once for all 3 attacks" in report.notes[-1] for report in reports)
    assert {report.settings["models"] for report in reports} == {6}


def test_attacks_find_the_same_together_and_alone(world: World) -> None:
    attacks = [LiRA(models=12, seed=3), RMIA(models=12, seed=3)]
    for attack, report in zip(attacks, run_together(attacks, world.model, world.data), strict=True):
        alone = world.run(attack)
        assert report.auc.value == pytest.approx(alone.auc.value, abs=1e-6)
        assert report.leakage.value == pytest.approx(alone.leakage.value, abs=0.02)


def test_as_few_pools_as_possible_are_trained(world: World) -> None:
    flexible = [Threshold(), LiRA(mode="offline"), RMIA(mode="offline")]
    assert set(shared_designs(flexible, world.data)) == {"disjoint"}
    assert set(shared_designs([*flexible, LiRA()], world.data)) == {"overlapping"}
    assert set(shared_designs([*flexible, Shadow()], world.data)) == {"disjoint"}
    assert shared_designs([Shadow(), LiRA()], world.data) == ["disjoint", "overlapping"]
    own_table = hold_out(world.data.records, 0.2)
    assert set(shared_designs([*flexible, Shadow(), LiRA(), RMIA()], own_table)) == {"overlapping"}


def test_both_designs_are_trained_when_both_are_needed(world: World) -> None:
    reports = run_together([Shadow(models=2, network=QUICK), LiRA(models=6)], world.model, world.data)
    assert [report.settings["pool"] for report in reports] == ["disjoint", "overlapping"]
    assert np.isfinite([report.auc.value for report in reports]).all()
    (alone,) = run_together([Threshold(models=2)], world.model, world.data)
    assert alone.notes == ()


def test_what_does_not_fit_together_is_an_error(world: World) -> None:
    other = split(world.data.records, size=100, seed=2)
    with pytest.raises(InvalidInput, match="another split"):
        Threshold().run(world.model, other, pool=world.disjoint)
    with pytest.raises(InvalidInput, match="another split"):
        leakage_curve(world.model, other, Algorithm1(), (1.0,), attack=Threshold(), pool=world.disjoint)
    generator = np.random.default_rng(0)
    records = Records("other", generator.random((50, 7)).astype(np.float32), generator.integers(0, 3, 50), 3)
    with pytest.raises(InvalidInput, match="trained on other data"):
        Threshold().run(world.model, split(records, size=20))
    with pytest.raises(InvalidInput, match="requires at least one attack"):
        run_together([], world.model, world.data)
    with pytest.raises(InvalidInput, match="at least one number"):
        leakage_curve(world.model, world.data, Algorithm1(), (), attack=Threshold())


def test_training_settings_are_enough_if_there_is_a_target(world: World) -> None:
    attack, settings = Threshold(), world.model.settings
    report = attack.run(settings, world.data, target=world.model.predict_proba, pool=world.disjoint)
    assert report.auc == world.run(attack).auc
    with pytest.raises(InvalidInput, match="target is required"):
        attack.run(settings, world.data)
    with pytest.raises(InvalidInput, match="got Endpoint"):
        attack.run(Endpoint("http://host/v2/models/x"), world.data)


def test_the_report_states_what_the_queries_cost_a_private_target(world: World) -> None:
    quiet = qm.Predictor(world.model, Algorithm1(), Budget(1.0, queries=500), noise=SeededNoise(0))
    report = world.run(Threshold(), quiet)
    assert report.queries == quiet.answered == 200
    assert report.spent == quiet.cost.times(200)
    assert report.to_json()["spent"]["measure"] == "gaussian"


def test_the_leakage_of_algorithm_1_grows_towards_that_of_the_plain_model(world: World) -> None:
    curve = leakage_curve(
        world.model,
        world.data,
        Algorithm1("laplace"),
        (0.01, 1e6),
        attack=Threshold(),
        pool=world.disjoint,
        noise=SeededNoise(0),
    )
    plain, noisy, nearly_plain = (curve[epsilon] for epsilon in (None, 0.01, 1e6))
    assert nearly_plain.leakage.value == pytest.approx(plain.leakage.value, abs=0.02)
    assert noisy.leakage.value < plain.leakage.value - 0.2
    assert isinstance(noisy.spent, PureCost)
    assert noisy.spent.epsilon == pytest.approx(2.0)
    assert (plain.spent, noisy.target) == (None, "algorithm1")

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import quietmax as qm
from quietmax.accounting import Budget, PureCost
from quietmax.attacks import (
    RMIA,
    Endpoint,
    LiRA,
    Shadow,
    ShadowPool,
    Threshold,
    leakage_curve,
)
from quietmax.attacks.base import run_together, shared_designs
from quietmax.attacks.builtin import make_attack, registered_attacks
from quietmax.data import Records, Split, hold_out
from quietmax.errors import InvalidInput
from quietmax.mechanisms import Algorithm1
from quietmax.models import CrossEntropy, Model, TrainingSettings
from quietmax.noise import SeededNoise

QUICK = TrainingSettings(hidden=(8,), loss=CrossEntropy(), epochs=5)


def test_the_target_is_queried_once_for_all_attacks(memorised: Split, overfitted: Model) -> None:
    seen = []

    def target(features):
        seen.append(len(features))
        return overfitted.predict_proba(features)

    attacks = [Threshold(models=4), LiRA(models=6), RMIA(models=6, population=40)]
    reports = run_together(attacks, overfitted, memorised, target=target)
    assert seen == [240]
    assert [report.attack for report in reports] == ["threshold", "lira", "rmia"]
    assert {report.queries for report in reports} == {240}
    assert all("queried once for all 3 attacks" in report.notes[-1] for report in reports)
    assert {report.settings["models"] for report in reports} == {6}


def test_attacks_find_the_same_together_and_alone(
    memorised: Split, overfitted: Model, overlapping_pool: ShadowPool
) -> None:
    attacks = [LiRA(models=12, seed=3), RMIA(models=12, seed=3)]
    together = run_together(attacks, overfitted, memorised)
    for attack, report in zip(attacks, together, strict=True):
        alone = attack.run(overfitted, memorised, pool=overlapping_pool)
        assert report.auc.value == pytest.approx(alone.auc.value, abs=1e-6)
        assert report.leakage.value == pytest.approx(alone.leakage.value, abs=0.02)


@pytest.mark.parametrize("name", registered_attacks())
def test_a_built_in_attack_has_its_registered_name(name: str) -> None:
    assert make_attack(name, models=4).name == name


def test_as_few_pools_as_possible_are_trained(memorised: Split) -> None:
    flexible = [Threshold(), LiRA(mode="offline"), RMIA(mode="offline")]
    assert set(shared_designs(flexible, memorised)) == {"disjoint"}
    assert set(shared_designs([*flexible, LiRA()], memorised)) == {"overlapping"}
    assert set(shared_designs([*flexible, Shadow()], memorised)) == {"disjoint"}
    assert shared_designs([Shadow(), LiRA()], memorised) == ["disjoint", "overlapping"]


def test_without_a_pool_all_attacks_share_overlapping_sets(memorised: Split) -> None:
    own_table = hold_out(memorised.records, 0.2)
    attacks = [Threshold(), LiRA(mode="offline"), RMIA(mode="offline"), Shadow(), LiRA(), RMIA()]
    assert set(shared_designs(attacks, own_table)) == {"overlapping"}


def test_both_designs_are_trained_when_both_are_needed(memorised: Split, overfitted: Model) -> None:
    reports = run_together([Shadow(models=2, network=QUICK), LiRA(models=6)], overfitted, memorised)
    assert [report.settings["pool"] for report in reports] == ["disjoint", "overlapping"]
    assert np.isfinite([report.auc.value for report in reports]).all()


def test_the_report_of_one_attack_has_no_note_about_others(memorised: Split, overfitted: Model) -> None:
    (report,) = run_together([Threshold(models=2)], overfitted, memorised)
    assert report.notes == ()


def test_no_attacks_are_an_error(memorised: Split, overfitted: Model) -> None:
    with pytest.raises(InvalidInput, match="requires at least one attack"):
        run_together([], overfitted, memorised)


def test_a_pool_for_another_split_is_an_error(
    memorised: Split, overfitted: Model, disjoint_pool: ShadowPool
) -> None:
    other = qm.data.split(memorised.records, size=100, seed=2)
    with pytest.raises(InvalidInput, match="another split"):
        Threshold().run(overfitted, other, pool=disjoint_pool)
    with pytest.raises(InvalidInput, match="another split"):
        leakage_curve(overfitted, other, Algorithm1(), (1.0,), attack=Threshold(), pool=disjoint_pool)


def test_a_model_of_other_data_is_an_error(overfitted: Model) -> None:
    generator = np.random.default_rng(0)
    records = Records("other", generator.random((50, 7)).astype(np.float32), generator.integers(0, 3, 50), 3)
    with pytest.raises(InvalidInput, match="trained on other data"):
        Threshold().run(overfitted, qm.data.split(records, size=20))


def test_training_settings_are_enough_if_there_is_a_target(
    memorised: Split, overfitted: Model, disjoint_pool: ShadowPool
) -> None:
    attack = Threshold()
    report = attack.run(overfitted.settings, memorised, target=overfitted.predict_proba, pool=disjoint_pool)
    assert report.auc == attack.run(overfitted, memorised, pool=disjoint_pool).auc
    with pytest.raises(InvalidInput, match="target is required"):
        attack.run(overfitted.settings, memorised)
    with pytest.raises(InvalidInput, match="got Endpoint"):
        attack.run(Endpoint("http://host/v2/models/x"), memorised)  # type: ignore[arg-type]


def test_the_report_states_what_the_queries_cost_a_private_target(
    memorised: Split, overfitted: Model, disjoint_pool: ShadowPool
) -> None:
    quiet = qm.Predictor(overfitted, Algorithm1(), Budget(1.0, queries=500), noise=SeededNoise(0))
    report = Threshold().run(overfitted, memorised, target=quiet, pool=disjoint_pool)
    assert report.queries == quiet.answered == 200
    assert report.spent == quiet.cost.times(200)
    assert report.to_json()["spent"]["measure"] == "gaussian"


def test_the_leakage_of_algorithm_1_grows_towards_that_of_the_plain_model(
    memorised: Split, overfitted: Model, disjoint_pool: ShadowPool
) -> None:
    curve = leakage_curve(
        overfitted,
        memorised,
        Algorithm1("laplace"),
        (0.01, 1e6),
        attack=Threshold(),
        pool=disjoint_pool,
        noise=SeededNoise(0),
    )
    noisy, nearly_plain = curve.reports
    assert nearly_plain.leakage.value == pytest.approx(curve.plain.leakage.value, abs=0.02)
    assert noisy.leakage.value < curve.plain.leakage.value - 0.2
    assert curve.leakages == (noisy.leakage.value, nearly_plain.leakage.value)
    assert isinstance(noisy.spent, PureCost)
    assert noisy.spent.epsilon == pytest.approx(2.0)
    assert curve.plain.spent is None
    assert curve.to_json()["epsilons"] == [0.01, 1e6]


def test_a_leakage_curve_requires_an_epsilon(memorised: Split, overfitted: Model) -> None:
    with pytest.raises(InvalidInput, match="at least one"):
        leakage_curve(overfitted, memorised, Algorithm1(), (), attack=Threshold())


@pytest.mark.parametrize("name", registered_attacks())
def test_every_attack_is_made_from_models_and_seed(name: str) -> None:
    attack = make_attack(name, models=9, seed=4)
    assert (attack.models, attack.seed) == (9, 4)
    assert name.startswith(attack.name)


def test_an_unknown_attack_is_an_error_that_suggests_the_nearest_name() -> None:
    with pytest.raises(InvalidInput, match="did you mean 'lira'"):
        make_attack("lirra", models=1)


class _Mine(Threshold):
    name = "mine"


def _install(monkeypatch: pytest.MonkeyPatch, **plugins: Any) -> list[EntryPoint]:
    """Register objects as entry points of the group `quietmax.attacks`."""
    module = ModuleType("attack_plugins")
    entries = []
    for name, value in plugins.items():
        setattr(module, name, value)
        entries.append(EntryPoint(name, f"attack_plugins:{name}", "quietmax.attacks"))
    monkeypatch.setitem(sys.modules, "attack_plugins", module)
    monkeypatch.setattr(
        "quietmax._plugins.entry_points", lambda group: entries if group == "quietmax.attacks" else []
    )
    return entries


def test_a_plug_in_adds_an_attack(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, mine=_Mine)
    assert list(registered_attacks())[-1] == "mine"
    assert make_attack("mine", models=2, seed=1) == _Mine(models=2, seed=1)


def test_broken_plug_ins_are_skipped_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = _install(monkeypatch, shadow=_Mine, number=3)
    entries.append(EntryPoint("absent", "attack_plugins:absent", "quietmax.attacks"))
    with pytest.warns(UserWarning, match="plug-in") as warned:
        known = registered_attacks()
    assert [str(each.message).split("'")[1] for each in warned] == ["shadow", "number", "absent"]
    assert "number" not in known
    assert known["shadow"] is not _Mine


def test_a_plug_in_must_return_an_attack(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, odd=lambda models, seed: models + seed)
    with pytest.raises(InvalidInput, match="must return a quietmax"):
        make_attack("odd", models=1)

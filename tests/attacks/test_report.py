from __future__ import annotations

import json
from importlib.metadata import EntryPoint

import numpy as np
import pytest

from quietmax.accounting import PureCost
from quietmax.attacks import Threshold, named, plot_reports, registered, registry, summarise
from quietmax.errors import InvalidInput, QuietmaxError


@pytest.fixture
def report():
    generator = np.random.default_rng(0)
    return summarise(
        attack="test",
        target="a toy",
        released="probabilities",
        member_scores=generator.normal(1, 1, 400),
        nonmember_scores=generator.normal(0, 1, 300),
        decision=0.0,
        threshold=0.5,
        queries=700,
        spent=PureCost(70.0),
        settings={"models": 3},
        notes=["one thing"],
    )


def test_the_decision_and_the_threshold_give_leakage_and_advantage(report):
    generator = np.random.default_rng(0)
    members, nonmembers = generator.normal(1, 1, 400), generator.normal(0, 1, 300)
    assert report.tpr.value == (members > 0).mean()
    assert report.fpr.value == (nonmembers > 0).mean()
    assert report.leakage.value == pytest.approx((members > 0).mean() - (nonmembers > 0).mean())
    assert report.advantage.value == pytest.approx((members > 0.5).mean() - (nonmembers > 0.5).mean())


def test_every_figure_lies_in_its_interval(report):
    assert len(report.figures()) == 7
    for figure in report.figures().values():
        assert figure.low <= figure.value <= figure.high
        assert figure.low < figure.high


def test_the_report_survives_json(report):
    values = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert values["leakage"]["value"] == report.leakage.value
    assert values["auc"] == report.auc.to_json()
    assert (values["members"], values["nonmembers"], values["queries"]) == (400, 300, 700)
    assert values["spent"] == {"measure": "pure", "epsilon": 70.0}
    assert values["roc"]["fpr"][-1] == values["roc"]["tpr"][-1] == 1.0
    assert "Clopper-Pearson" in values["intervals"]


def test_the_report_reads_as_a_table(report):
    text = str(report)
    assert text.splitlines()[0] == "test against a toy: 400 members, 300 non-members"
    for word in (
        "TPR",
        "FPR",
        "leakage",
        "advantage",
        "AUC",
        "TPR at 0.1% FPR",
        "spent epsilon = 70",
        "one thing",
    ):
        assert word in text
    assert f"{report.auc.value:.4f}" in text


def test_the_report_cannot_be_changed(report):
    with pytest.raises(AttributeError):
        report.queries = 0


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_the_plot_is_a_picture_on_log_axes(report, tmp_path, ending):
    written = report.plot(tmp_path / f"roc.{ending}")
    beginning = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending]
    assert written.read_bytes().startswith(beginning)


def test_a_plot_names_every_attack(report, tmp_path):
    import dataclasses

    other = dataclasses.replace(report, attack="second")
    text = plot_reports([report, other], tmp_path / "both.svg").read_text()
    assert "<!-- test against a toy" in text
    assert "<!-- second against a toy" in text
    assert "false positive rate" in text


def test_a_plot_that_cannot_be_written_is_refused(report, tmp_path):
    for path in (tmp_path / "missing" / "roc.png", tmp_path / "roc.words"):
        with pytest.raises(QuietmaxError, match="could not be written"):
            report.plot(path)
    with pytest.raises(InvalidInput, match="at least one"):
        plot_reports([], tmp_path / "none.png")


@pytest.mark.parametrize("name", list(registered()))
def test_every_registered_attack_takes_models_and_seed(name):
    attack = named(name, models=9, seed=4)
    assert (attack.models, attack.seed) == (9, 4)
    assert name.startswith(attack.name)


def test_an_unknown_attack_is_refused_with_the_nearest_name():
    with pytest.raises(InvalidInput, match="did you mean 'lira'"):
        named("lirra", models=1)


class _Mine(Threshold):
    name = "mine"


def _plugins(monkeypatch, **named_objects):
    import sys
    import types

    module = types.ModuleType("attack_plugins")
    entries = []
    for name, value in named_objects.items():
        setattr(module, name, value)
        entries.append(
            EntryPoint(name.replace("_", "-"), f"attack_plugins:{name}", registry.ENTRY_POINT_GROUP)
        )
    monkeypatch.setitem(sys.modules, "attack_plugins", module)
    monkeypatch.setattr(
        registry, "entry_points", lambda group: entries if group == "quietmax.attacks" else []
    )
    return entries


def test_a_plug_in_adds_an_attack(monkeypatch):
    _plugins(monkeypatch, mine=_Mine)
    assert list(registered())[-1] == "mine"
    assert named("mine", models=2, seed=1) == _Mine(models=2, seed=1)


def test_broken_plug_ins_are_left_aside_with_a_warning(monkeypatch):
    entries = _plugins(monkeypatch, shadow=_Mine, number=3)
    entries.append(EntryPoint("absent", "attack_plugins:absent", registry.ENTRY_POINT_GROUP))
    with pytest.warns(UserWarning, match="plug-in") as warned:
        known = registered()
    assert [str(each.message).split("'")[1] for each in warned] == ["shadow", "number", "absent"]
    assert "number" not in known
    assert known["shadow"] is not _Mine


def test_a_plug_in_must_give_an_attack(monkeypatch):
    _plugins(monkeypatch, odd=lambda models, seed: models + seed)
    with pytest.raises(InvalidInput, match="must give a quietmax"):
        named("odd", models=1)

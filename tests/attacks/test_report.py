from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quietmax.accounting import PureCost
from quietmax.attacks.metrics import _ESTIMATES, AttackReport, plot_reports
from quietmax.errors import InvalidInput, QuietmaxError


@pytest.fixture
def report() -> AttackReport:
    generator = np.random.default_rng(0)
    return AttackReport.from_scores(
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


def test_the_decision_and_the_threshold_give_leakage_and_advantage(report: AttackReport) -> None:
    generator = np.random.default_rng(0)
    members, nonmembers = generator.normal(1, 1, 400), generator.normal(0, 1, 300)
    assert report.tpr.value == (members > 0).mean()
    assert report.fpr.value == (nonmembers > 0).mean()
    assert report.leakage.value == pytest.approx((members > 0).mean() - (nonmembers > 0).mean())
    assert report.advantage.value == pytest.approx((members > 0.5).mean() - (nonmembers > 0.5).mean())


def test_every_estimate_lies_in_its_interval(report: AttackReport) -> None:
    assert len(_ESTIMATES) == 7
    for name in _ESTIMATES.values():
        estimate = getattr(report, name)
        assert estimate.low <= estimate.value <= estimate.high
        assert estimate.low < estimate.high


def test_the_report_is_valid_json(report: AttackReport) -> None:
    values = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert values["leakage"]["value"] == report.leakage.value
    assert values["auc"] == report.auc.to_json()
    assert (values["members"], values["nonmembers"], values["queries"]) == (400, 300, 700)
    assert values["spent"] == {"measure": "pure", "epsilon": 70.0}
    assert values["roc"]["fpr"][-1] == values["roc"]["tpr"][-1] == 1.0
    assert "Clopper-Pearson" in values["intervals"]


def test_the_report_prints_as_a_table(report: AttackReport) -> None:
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


def test_the_report_cannot_be_changed(report: AttackReport) -> None:
    with pytest.raises(AttributeError):
        report.queries = 0  # type: ignore[misc]


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_the_plot_is_written_in_every_format(report: AttackReport, tmp_path: Path, ending: str) -> None:
    written = report.plot(tmp_path / f"roc.{ending}")
    beginning = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending]
    assert written.read_bytes().startswith(beginning)


def test_a_plot_names_every_attack(report: AttackReport, tmp_path: Path) -> None:
    other = replace(report, attack="second")
    text = plot_reports([report, other], tmp_path / "both.svg").read_text()
    assert "<!-- test against a toy" in text
    assert "<!-- second against a toy" in text
    assert "false positive rate" in text


def test_a_plot_that_cannot_be_written_is_an_error(report: AttackReport, tmp_path: Path) -> None:
    for path in (tmp_path / "missing" / "roc.png", tmp_path / "roc.words"):
        with pytest.raises(QuietmaxError, match="could not be written"):
            report.plot(path)
    with pytest.raises(InvalidInput, match="at least one"):
        plot_reports([], tmp_path / "none.png")

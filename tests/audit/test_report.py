from __future__ import annotations

from pathlib import Path

import pytest

from quietmax.accounting import GaussianCost, Guarantee, PureCost
from quietmax.accounting.guarantee import Definition
from quietmax.audit.bounds import AuditReport, Claim, Finding, plot_findings
from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.sensitivity.network import BoundCheck


def report(claimed: float = 1.0, lower_bound: float = 1.5, definition: Definition = "pure") -> AuditReport:
    return AuditReport("coin", definition, claimed, lower_bound, 0.999, "heads", 100, 0.0, 1.0, 1.5)


def test_a_finding_is_what_was_found_as_a_multiple_of_the_claim() -> None:
    refuted = Finding.of_report(report(definition="gaussian"))
    assert (refuted.name, refuted.multiple, refuted.verdict) == ("coin\nmu", 1.5, "refuted")
    held = Finding.of_check(BoundCheck("weights_l2", 0.25, 0.5, "certified"))
    assert (held.name, held.multiple, held.verdict) == ("weights l2", 0.5, "consistent")


def test_the_plot_names_every_finding_and_its_verdict(tmp_path: Path) -> None:
    path = plot_findings(
        [Finding.of_report(report()), Finding("one logit", 0.2, 0.5, "consistent")],
        tmp_path / "audit.svg",
        title="Audit of a coin",
    )
    # Matplotlib keeps each text of an SVG in a comment.
    drawn = path.read_text(encoding="utf-8")
    for text in ("Audit of a coin", "1.5 of 1: refuted", "0.2 of 0.5: consistent", "one logit"):
        assert f"<!-- {text} -->" in drawn


def test_findings_that_cannot_be_plotted_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="at least one finding"):
        plot_findings([], tmp_path / "audit.png")
    with pytest.raises(InvalidInput, match="Only positive claims"):
        plot_findings([Finding.of_report(report(claimed=0.0))], tmp_path / "audit.png")
    with pytest.raises(QuietmaxError, match="could not be written"):
        plot_findings([Finding.of_report(report())], tmp_path / "missing" / "audit.png")


def test_a_claim_is_read_from_costs_and_guarantees() -> None:
    assert Claim.of(GaussianCost(0.5)).parameter == "mu"
    approximate = Guarantee("approximate", epsilon=2.0, delta=1e-6, because="Under test.")
    assert Claim.of(approximate) == Claim("approximate", 2.0, 1e-6)
    assert Claim.of(approximate).parameter == "epsilon"
    with_delta = Guarantee("gaussian", mu=1.0, extra_delta=1e-7, because="Under test.")
    assert Claim.of(with_delta) == Claim("gaussian", 1.0, 1e-7)
    assert Claim.of(GaussianCost(1.0)).stated(1e-5)["epsilon_claimed"] == pytest.approx(4.377, abs=1e-3)
    assert Claim.of(PureCost(3.0)).stated(1e-5)["epsilon_claimed"] == 3.0

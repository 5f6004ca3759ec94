from __future__ import annotations

import pytest

from quietmax.audit import AuditReport, Finding, plot_findings
from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.sensitivity import BoundCheck


def report(claimed=1.0, lower_bound=1.5, definition="pure"):
    return AuditReport("coin", definition, claimed, lower_bound, 0.999, "heads", 100, 0.0, 1.0, 1.5)


def test_a_finding_is_what_was_found_as_a_multiple_of_the_claim():
    refuted = Finding.of_report(report(definition="gaussian"))
    assert (refuted.name, refuted.multiple, refuted.verdict) == ("coin\nmu", 1.5, "refuted")
    held = Finding.of_check(BoundCheck("weights_l2", 0.25, 0.5, "certified"))
    assert (held.name, held.multiple, held.verdict) == ("weights l2", 0.5, "consistent")


def test_the_picture_names_every_finding_and_its_verdict(tmp_path):
    path = plot_findings(
        [Finding.of_report(report()), Finding("one logit", 0.2, 0.5, "consistent")],
        tmp_path / "audit.svg",
        title="Audit of a coin",
    )
    # Matplotlib keeps each text of an SVG in a comment.
    drawn = path.read_text(encoding="utf-8")
    for text in ("Audit of a coin", "1.5 of 1: refuted", "0.2 of 0.5: consistent", "one logit"):
        assert f"<!-- {text} -->" in drawn


def test_what_cannot_be_drawn_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(InvalidInput, match="no finding"):
        plot_findings([], tmp_path / "audit.png")
    with pytest.raises(InvalidInput, match="cannot be drawn to scale"):
        plot_findings([Finding.of_report(report(claimed=0.0))], tmp_path / "audit.png")
    with pytest.raises(QuietmaxError, match="could not be written"):
        plot_findings([Finding.of_report(report())], tmp_path / "missing" / "audit.png")

"""A picture of audits: what was found as a multiple of what is claimed, refuted claims in red."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quietmax.audit.report import AuditReport, Verdict
from quietmax.errors import InvalidInput
from quietmax.picture import write_picture
from quietmax.sensitivity import BoundCheck

_COLOURS: dict[Verdict, str] = {"refuted": "#c0392b", "consistent": "#2e7d4f"}


@dataclass(frozen=True)
class Finding:
    """One bar: what was ``found`` for ``name``, beside what is ``claimed``."""

    name: str
    found: float
    claimed: float
    verdict: Verdict

    @classmethod
    def of_report(cls, report: AuditReport) -> Finding:
        """The lower bound of an audit beside the claim."""
        parameter = "mu" if report.definition == "gaussian" else "epsilon"
        return cls(f"{report.subject}\n{parameter}", report.lower_bound, report.claimed, report.verdict)

    @classmethod
    def of_check(cls, check: BoundCheck) -> Finding:
        """An observed change beside a bound."""
        return cls(check.quantity.replace("_", " "), check.observed, check.bound, check.verdict)

    @property
    def multiple(self) -> float:
        """What was found as a multiple of the claim.

        >>> Finding("one logit", 3.0, 2.0, "refuted").multiple
        1.5
        """
        if self.claimed <= 0:
            raise InvalidInput(
                f"A claim of {self.claimed:g} cannot be drawn to scale; audit a positive one, or print it instead."
            )
        return self.found / self.claimed


def plot_findings(findings: Sequence[Finding], path: str | Path, *, title: str = "") -> Path:
    """Draw one bar per finding, with a line at 1 where the claim stands, and write them to ``path``."""
    from matplotlib.figure import Figure

    if not findings:
        raise InvalidInput("There is no finding to plot; give at least one.")
    multiples = [finding.multiple for finding in findings]
    figure = Figure(figsize=(6.4, 1.4 + 0.6 * len(findings)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(findings))
    axes.barh(places, multiples, height=0.6, color=[_COLOURS[finding.verdict] for finding in findings])
    axes.axvline(1.0, color="black", linewidth=1.2)
    for place, finding, multiple in zip(places, findings, multiples, strict=True):
        text = f"{finding.found:.3g} of {finding.claimed:.3g}: {finding.verdict}"
        axes.annotate(text, (multiple, place), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_yticks(places, [finding.name for finding in findings])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.6 * max(1.0, *multiples))
    axes.set_xlabel("found, as a multiple of what is claimed (line)")
    axes.set_title(title, loc="left", fontsize="medium")
    return write_picture(figure, path)

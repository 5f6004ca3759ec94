"""AttackReport: what an attack found, with intervals, as a table, as JSON and as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quietmax._io import write_figure
from quietmax.accounting.costs import Cost
from quietmax.attacks.metrics import (
    Estimate,
    Floats,
    OperatingCurve,
    Released,
    area,
    difference,
    operating_curve,
    proportion,
    tpr_at,
)
from quietmax.errors import InvalidInput

INTERVALS = (
    "95% intervals: TPR and FPR Clopper-Pearson; leakage and advantage from those limits, squared and added "
    "(Newcombe); AUC DeLong; TPR at a given FPR exact limits of threshold and rate, half of the error each."
)


@dataclass(frozen=True, eq=False)
class AttackReport:
    """How well members were told from non-members.

    ``leakage`` is TPR - FPR of the attack's own decision. ``advantage`` is TPR - FPR at ``threshold``, the best one
    *on the shadow networks*; no figure but the AUC and the two TPRs at a given FPR looks at the target's true
    membership to choose anything. ``queries`` is what the target was asked, ``spent`` what that cost it.
    """

    attack: str
    target: str
    released: Released
    members: int
    nonmembers: int
    tpr: Estimate
    fpr: Estimate
    leakage: Estimate
    advantage: Estimate
    auc: Estimate
    tpr_at_0_1_percent_fpr: Estimate
    tpr_at_1_percent_fpr: Estimate
    threshold: float
    queries: int
    spent: Cost | None
    roc: OperatingCurve
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def table(self) -> list[tuple[str, str, str]]:
        """Rows of (figure, value, 95% interval)."""
        rows = [
            (name, f"{entry.value:.4f}", f"{entry.low:.4f} to {entry.high:.4f}")
            for name, entry in self.figures().items()
        ]
        return [*rows, ("queries", f"{self.queries:,}", "" if self.spent is None else f"spent {self.spent}")]

    def figures(self) -> dict[str, Estimate]:
        """Every figure that has an interval, by the name it is shown under."""
        return {
            "TPR": self.tpr,
            "FPR": self.fpr,
            "leakage": self.leakage,
            "advantage": self.advantage,
            "AUC": self.auc,
            "TPR at 0.1% FPR": self.tpr_at_0_1_percent_fpr,
            "TPR at 1% FPR": self.tpr_at_1_percent_fpr,
        }

    def __str__(self) -> str:
        head = (
            f"{self.attack} against {self.target}: {self.members:,} members, {self.nonmembers:,} non-members"
        )
        rows = [f"  {name:16s} {value:>8s}  {interval}".rstrip() for name, value, interval in self.table()]
        return "\n".join([head, *rows, *(f"  note: {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """JSON values; the ROC is thinned to a few hundred points, dense at low FPR."""
        fpr, tpr = self.roc.thinned()
        return {
            "attack": self.attack,
            "target": self.target,
            "released": self.released,
            "members": self.members,
            "nonmembers": self.nonmembers,
            "tpr": self.tpr.to_json(),
            "fpr": self.fpr.to_json(),
            "leakage": self.leakage.to_json(),
            "advantage": self.advantage.to_json(),
            "auc": self.auc.to_json(),
            "tpr_at_0_1_percent_fpr": self.tpr_at_0_1_percent_fpr.to_json(),
            "tpr_at_1_percent_fpr": self.tpr_at_1_percent_fpr.to_json(),
            "threshold": self.threshold,
            "queries": self.queries,
            "spent": None if self.spent is None else self.spent.to_json(),
            "settings": dict(self.settings),
            "notes": list(self.notes),
            "intervals": INTERVALS,
            "roc": {"fpr": fpr, "tpr": tpr},
        }

    def plot(self, path: str | Path) -> Path:
        """Write the ROC on log axes to ``path``."""
        return plot_reports([self], path)


def summarise(
    *,
    attack: str,
    target: str,
    released: Released,
    member_scores: Floats,
    nonmember_scores: Floats,
    decision: float,
    threshold: float,
    queries: int,
    spent: Cost | None = None,
    settings: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> AttackReport:
    """The report of an attack from its scores.

    A record is called a member above ``decision``; ``threshold`` is the one chosen on shadow networks.

    >>> report = summarise(
    ...     attack="coin", target="nothing", released="labels", member_scores=np.array([0.0, 1.0]),
    ...     nonmember_scores=np.array([0.0, 1.0]), decision=0.5, threshold=0.5, queries=4)
    >>> report.leakage.value, report.auc.value
    (0.0, 0.5)
    """
    curve = operating_curve(member_scores, nonmember_scores)
    tpr, fpr = _rate(member_scores, decision), _rate(nonmember_scores, decision)
    return AttackReport(
        attack=attack,
        target=target,
        released=released,
        members=len(member_scores),
        nonmembers=len(nonmember_scores),
        tpr=tpr,
        fpr=fpr,
        leakage=difference(tpr, fpr),
        advantage=difference(_rate(member_scores, threshold), _rate(nonmember_scores, threshold)),
        auc=area(member_scores, nonmember_scores),
        tpr_at_0_1_percent_fpr=tpr_at(curve, 0.001),
        tpr_at_1_percent_fpr=tpr_at(curve, 0.01),
        threshold=threshold,
        queries=queries,
        spent=spent,
        roc=curve,
        settings={} if settings is None else settings,
        notes=tuple(notes),
    )


def plot_reports(reports: Sequence[AttackReport], path: str | Path) -> Path:
    """Draw the ROCs of several attacks on log axes, with the line of guessing, and write them to ``path``."""
    from matplotlib.figure import Figure

    if not reports:
        raise InvalidInput("There is no report to plot; give at least one.")
    # A figure without pyplot: no window system, no state shared with the caller's own plots.
    figure = Figure(figsize=(5.2, 5.0), layout="constrained")
    axes = figure.add_subplot()
    lowest = 1 / max(max(report.members, report.nonmembers) for report in reports)
    for report in reports:
        label = f"{report.attack} against {report.target} (AUC {report.auc.value:.3f})"
        axes.plot(
            np.maximum(report.roc.fpr, lowest / 2),
            np.maximum(report.roc.tpr, lowest / 2),
            drawstyle="steps-post",
            label=label,
        )
    guess = np.geomspace(lowest / 2, 1, 50)
    axes.plot(guess, guess, color="grey", linestyle=":", label="guessing")
    axes.set(
        xscale="log", yscale="log", xlabel="false positive rate", ylabel="true positive rate", aspect="equal"
    )
    axes.set_xlim(lowest, 1)
    axes.set_ylim(lowest, 1.1)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize="small")
    return write_figure(figure, path)


def _rate(scores: Floats, threshold: float) -> Estimate:
    return proportion(int((scores > threshold).sum()), len(scores))

"""The result of an attack: rates with confidence intervals, as a table, as JSON and as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quietmax._io import write_figure
from quietmax.accounting.costs import Cost
from quietmax.accounting.guarantee import Unit
from quietmax.attacks.metrics import (
    Estimate,
    Floats,
    Released,
    RocCurve,
    auc,
    difference,
    proportion,
    roc_curve,
    tpr_at_fpr,
)
from quietmax.errors import InvalidInput

INTERVALS = (
    "95% intervals: TPR and FPR Clopper-Pearson; leakage and advantage Newcombe, from the Clopper-Pearson limits; "
    "AUC DeLong; TPR at a given FPR exact limits of threshold and rate, half of the error each."
)


@dataclass(frozen=True, eq=False)
class AttackReport:
    """How well an attack told members from non-members.

    Only the AUC and the two TPRs at a given FPR use the target's true membership to choose a threshold. Every other
    threshold comes from shadow networks.

    Parameters
    ----------
    attack : str
        Name of the attack.
    target : str
        Name of the target.
    released : {"probabilities", "labels"}
        What the target released.
    members, nonmembers : int
        Numbers of records of each kind, or of persons.
    tpr, fpr : Estimate
        Shares of members and of non-members that the attack called members.
    leakage : Estimate
        TPR - FPR of the attack's own decision.
    advantage : Estimate
        TPR - FPR at ``threshold``.
    auc : Estimate
        Area under the ROC curve.
    tpr_at_0_1_percent_fpr, tpr_at_1_percent_fpr : Estimate
        TPR at a low FPR.
    threshold : float
        The threshold with the largest TPR - FPR on the shadow networks.
    queries : int
        Number of queries that the target answered.
    spent : Cost or None
        What the queries cost the target; None if it has no budget.
    roc : RocCurve
        The ROC curve.
    settings : Mapping[str, Any]
        Settings of the attack and its shadow pool, as JSON values.
    notes : tuple of str
        What a reader of the figures has to know.
    unit : {"record", "person"}
        What was attacked: single records, or persons with all their rows.
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
    roc: RocCurve
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unit: Unit = "record"

    @classmethod
    def from_scores(
        cls,
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
        unit: Unit = "record",
    ) -> AttackReport:
        """Compute the report of an attack from its scores.

        Parameters
        ----------
        attack, target : str
            Names of the attack and of the target.
        released : {"probabilities", "labels"}
            What the target released.
        member_scores, nonmember_scores : array of float
            Scores of the members and of the non-members, larger for likelier members.
        decision : float
            The attack calls a record a member if its score is above this.
        threshold : float
            The threshold chosen on shadow networks.
        queries : int
            Number of queries that the target answered.
        spent : Cost or None
            What the queries cost the target.
        settings : Mapping[str, Any] or None
            Settings of the attack, as JSON values.
        notes : sequence of str
            What a reader of the figures has to know.
        unit : {"record", "person"}
            What the scores belong to.

        Returns
        -------
        AttackReport
            The report.

        Examples
        --------
        >>> report = AttackReport.from_scores(
        ...     attack="coin", target="nothing", released="labels", member_scores=np.array([0.0, 1.0]),
        ...     nonmember_scores=np.array([0.0, 1.0]), decision=0.5, threshold=0.5, queries=4)
        >>> report.leakage.value, report.auc.value
        (0.0, 0.5)
        """

        def rate(scores: Floats, limit: float) -> Estimate:
            return proportion(int((scores > limit).sum()), len(scores))

        curve = roc_curve(member_scores, nonmember_scores)
        tpr, fpr = rate(member_scores, decision), rate(nonmember_scores, decision)
        return cls(
            attack=attack,
            target=target,
            released=released,
            members=len(member_scores),
            nonmembers=len(nonmember_scores),
            tpr=tpr,
            fpr=fpr,
            leakage=difference(tpr, fpr),
            advantage=difference(rate(member_scores, threshold), rate(nonmember_scores, threshold)),
            auc=auc(member_scores, nonmember_scores),
            tpr_at_0_1_percent_fpr=tpr_at_fpr(curve, 0.001),
            tpr_at_1_percent_fpr=tpr_at_fpr(curve, 0.01),
            threshold=threshold,
            queries=queries,
            spent=spent,
            roc=curve,
            settings={} if settings is None else settings,
            notes=tuple(notes),
            unit=unit,
        )

    def estimates(self) -> dict[str, Estimate]:
        """Return every estimate by the name it is shown under."""
        return {
            "TPR": self.tpr,
            "FPR": self.fpr,
            "leakage": self.leakage,
            "advantage": self.advantage,
            "AUC": self.auc,
            "TPR at 0.1% FPR": self.tpr_at_0_1_percent_fpr,
            "TPR at 1% FPR": self.tpr_at_1_percent_fpr,
        }

    def table(self) -> list[tuple[str, str, str]]:
        """Return rows of (name, value, 95% interval)."""
        rows = [
            (name, f"{estimate.value:.4f}", f"{estimate.low:.4f} to {estimate.high:.4f}")
            for name, estimate in self.estimates().items()
        ]
        return [*rows, ("queries", f"{self.queries:,}", "" if self.spent is None else f"spent {self.spent}")]

    @property
    def title(self) -> str:
        """Attack, target and number of records or persons in one line."""
        persons = " (persons)" if self.unit == "person" else ""
        return (
            f"{self.attack} against {self.target}: {self.members:,} members, {self.nonmembers:,} non-members"
            f"{persons}"
        )

    def __str__(self) -> str:
        rows = [f"  {name:16s} {value:>8s}  {interval}".rstrip() for name, value, interval in self.table()]
        return "\n".join([self.title, *rows, *(f"  note: {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; the ROC curve is thinned to a few hundred points, dense at low FPR."""
        fpr, tpr = self.roc.thinned()
        return {
            "attack": self.attack,
            "target": self.target,
            "released": self.released,
            "unit": self.unit,
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
        """Write the ROC curve on logarithmic axes to ``path`` and return it."""
        return plot_reports([self], path)


def plot_reports(reports: Sequence[AttackReport], path: str | Path) -> Path:
    """Plot the ROC curves of several attacks on logarithmic axes, with the line of random guessing."""
    from matplotlib.figure import Figure

    if not reports:
        raise InvalidInput("A plot requires at least one report, got none.")
    # A figure without pyplot: no window system, no state shared with the caller's own plots.
    figure = Figure(figsize=(5.2, 5.0), layout="constrained")
    axes = figure.add_subplot()
    lowest = 1 / max(max(report.members, report.nonmembers) for report in reports)
    for report in reports:
        axes.plot(
            np.maximum(report.roc.fpr, lowest / 2),
            np.maximum(report.roc.tpr, lowest / 2),
            drawstyle="steps-post",
            label=f"{report.attack} against {report.target} (AUC {report.auc.value:.3f})",
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

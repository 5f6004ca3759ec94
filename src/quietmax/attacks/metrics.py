"""The rates of an attack with their 95% confidence intervals, and its report: a table, JSON and a plot.

An attack gives every record a score and calls it a member if the score is *above* a threshold. Members and non-members
are two independent samples. Every interval covers the true value with probability at least 95%, with two exceptions:
that of the AUC does so asymptotically, and that of a difference of rates above 0.5 with at least 92%.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import beta, rankdata

from quietmax._io import write_figure
from quietmax.accounting.costs import Cost
from quietmax.accounting.guarantee import Unit
from quietmax.errors import InvalidInput
from quietmax.mechanisms.base import Answers

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]
Statistic = Callable[[Answers, Labels], Floats]
"""(answers, true labels) -> one number per answer, larger where a member is likelier."""
Released = Literal["probabilities", "labels"]
"""What a target releases for each query."""

CONFIDENCE = 0.95
"""Confidence level of every interval of an attack."""
SMALLEST_PROBABILITY = 1e-45
"""Below any positive float32. Keeps logarithms finite where a released probability is 0."""
_NORMAL_QUANTILE = 1.959963984540054
INTERVALS = (
    "95% intervals: TPR and FPR Clopper-Pearson; leakage and advantage Newcombe, from the Clopper-Pearson limits; "
    "AUC DeLong; TPR at a given FPR exact limits of threshold and rate, half of the error each."
)
_ESTIMATES = {
    "TPR": "tpr",
    "FPR": "fpr",
    "leakage": "leakage",
    "advantage": "advantage",
    "AUC": "auc",
    "TPR at 0.1% FPR": "tpr_at_0_1_percent_fpr",
    "TPR at 1% FPR": "tpr_at_1_percent_fpr",
}
"""Fields of a report by the names they are shown under."""


def released_by(answers: Answers) -> Released:
    """What the answers contain."""
    return "labels" if answers.probabilities is None else "probabilities"


def _released_probabilities(answers: Answers) -> Floats:
    if answers.probabilities is None:
        raise InvalidInput("The target releases labels only; this statistic requires probabilities.")
    return answers.probabilities


def correct(answers: Answers, labels: Labels) -> Floats:
    """Return 1 where the released label is the true one, else 0."""
    return np.asarray(answers.labels == labels, dtype=np.float64)


def _log_probability(answers: Answers, labels: Labels) -> Floats:
    """Return ``ln p_y``, the negative cross-entropy."""
    probabilities = _released_probabilities(answers)
    of_true_class = probabilities[np.arange(len(probabilities)), labels]
    return np.log(np.maximum(of_true_class, SMALLEST_PROBABILITY))


@dataclass(frozen=True)
class Estimate:
    """An estimate with its 95% confidence interval.

    Parameters
    ----------
    value : float
        The estimate.
    low, high : float
        The ends of the interval.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"

    def to_json(self) -> dict[str, float]:
        """Return the three numbers by name."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class RocCurve:
    """The ROC curve: how many records are called members at every distinct threshold, the strictest first."""

    true_positives: NDArray[np.int64]  # Members that are called members: from 0 to all members
    false_positives: NDArray[np.int64]  # Non-members that are: from 0 to all non-members

    @property
    def tpr(self) -> Floats:
        """True positive rates, ascending."""
        return np.asarray(self.true_positives / self.true_positives[-1])

    @property
    def fpr(self) -> Floats:
        """False positive rates, ascending."""
        return np.asarray(self.false_positives / self.false_positives[-1])

    def _thinned(self) -> tuple[list[float], list[float]]:
        """Return at most about 400 of the curve's corners as lists (fpr, tpr), dense at low FPR."""
        total = int(self.false_positives[-1])
        wanted = np.concatenate([np.geomspace(1, total, 200).round(), np.linspace(0, total, 200).round()])
        # The last point of each wanted number of false positives has the highest TPR.
        kept = np.searchsorted(self.false_positives, np.unique(wanted), side="right") - 1
        kept = np.unique([0, *kept])
        return self.fpr[kept].tolist(), self.tpr[kept].tolist()


def _roc_curve(members: Floats, nonmembers: Floats) -> RocCurve:
    if not len(members) or not len(nonmembers):
        raise InvalidInput(
            f"An attack requires members and non-members, got {len(members)} and {len(nonmembers)}."
        )
    scores = np.concatenate([members, nonmembers])
    if not np.isfinite(scores).all():
        raise InvalidInput("The scores of an attack must be finite, got NaN or an infinite score.")
    order = np.argsort(-scores, kind="stable")
    is_member = order < len(members)
    last_of_ties = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    true_positives = np.cumsum(is_member)[last_of_ties]
    return RocCurve(
        np.concatenate([[0], true_positives]).astype(np.int64),
        np.concatenate([[0], last_of_ties + 1 - true_positives]).astype(np.int64),
    )


def best_threshold(members: Floats, nonmembers: Floats) -> float:
    """Return the threshold with the largest TPR - FPR.

    It lies midway between two scores. If no threshold is better than calling no record a member, it is the largest
    score.
    """
    curve = _roc_curve(members, nonmembers)
    values = np.unique(np.concatenate([members, nonmembers]))[::-1]
    best = int(np.argmax(curve.tpr - curve.fpr))
    if best == 0:
        return float(values[0])
    # The last point, which calls everyone a member, has TPR - FPR = 0 and is never better: a lower score exists.
    above, below = float(values[best - 1]), float(values[best])
    middle = below + (above - below) / 2
    return middle if middle < above else below


def clopper_pearson(successes: ArrayLike, trials: int, error: float) -> tuple[Floats, Floats]:
    """Compute exact limits of proportions (Clopper and Pearson 1934).

    Either limit alone is a one-sided bound with confidence ``1 - error``; both together are an interval with
    confidence ``1 - 2 * error``.
    """
    count = np.asarray(successes)
    low = np.where(count == 0, 0.0, beta.ppf(error, np.maximum(count, 1), trials - count + 1))
    high = np.where(count == trials, 1.0, beta.isf(error, count + 1, np.maximum(trials - count, 1)))
    return low, high


def _proportion(successes: int, trials: int) -> Estimate:
    low, high = clopper_pearson(successes, trials, (1 - CONFIDENCE) / 2)
    return Estimate(successes / trials, float(low), float(high))


def _difference(first: Estimate, second: Estimate) -> Estimate:
    """Estimate ``first - second`` of two independent rates.

    The distances to the ends of their intervals are squared and added: Newcombe (1998), method 10, with
    Clopper-Pearson intervals in place of Wilson's. By enumeration, for 10 to 400 trials each, it covers a difference
    of up to 0.5 with at least 95% and a larger one with at least 92%.
    """
    value = first.value - second.value
    below = math.hypot(first.value - first.low, second.high - second.value)
    above = math.hypot(first.high - first.value, second.value - second.low)
    return Estimate(value, max(value - below, -1.0), min(value + above, 1.0))


def _auc(members: Floats, nonmembers: Floats) -> Estimate:
    """Estimate the AUC: the probability that a member scores above a non-member, ties counting half.

    The interval is that of DeLong et al. (1988), computed from midranks (Sun and Xu 2014). Where the scores separate
    completely, the estimated variance is zero and Hoeffding's bound for two-sample U-statistics (1963) replaces it.
    """
    m, n = len(members), len(nonmembers)
    together = rankdata(np.concatenate([members, nonmembers]))
    # For every member the share of non-members below it, and the reverse.
    beaten = (together[:m] - rankdata(members)) / n
    beating = 1 - (together[m:] - rankdata(nonmembers)) / m
    value = float(beaten.mean())
    variance = (beaten.var(ddof=1) / m if m > 1 else 0.0) + (beating.var(ddof=1) / n if n > 1 else 0.0)
    half = _NORMAL_QUANTILE * math.sqrt(variance)
    if variance == 0:
        half = math.sqrt(math.log(2 / (1 - CONFIDENCE)) / (2 * min(m, n)))
    return Estimate(value, max(value - half, 0.0), min(value + half, 1.0))


def _tpr_at_fpr(curve: RocCurve, fpr: float) -> Estimate:
    """Estimate the largest TPR among thresholds whose observed FPR is at most ``fpr``.

    The interval accounts for the threshold being estimated too. Half of the 5% error goes to exact limits of the
    threshold at which the true FPR is ``fpr`` (an order statistic of the non-members), half to Clopper-Pearson limits
    of the TPR there. With few non-members the lower end is therefore 0: 600 of them cannot show an FPR of 0.1%.
    """
    members, nonmembers = int(curve.true_positives[-1]), int(curve.false_positives[-1])

    def _caught(false_positives: float, side: Literal["left", "right"]) -> int:
        return int(curve.true_positives[np.searchsorted(curve.false_positives, false_positives, side) - 1])

    confidence = 1 - (1 - CONFIDENCE) / 4  # of each of the four limits
    rank = np.arange(1, nonmembers + 1)
    # The true FPR of a threshold just above the rank-th largest non-member has distribution Beta(rank, n - rank + 1),
    # or is smaller with ties. At that non-member the distribution is the same, or the FPR is larger.
    surely_below = beta.cdf(fpr, rank, nonmembers - rank + 1) >= confidence
    surely_above = beta.sf(fpr, rank, nonmembers - rank + 1) >= confidence
    low, high = 0.0, 1.0
    if surely_below.any():
        below = _caught(rank[surely_below][-1] - 1, "right")
        low = float(clopper_pearson(below, members, 1 - confidence)[0])
    if surely_above.any():
        high = float(clopper_pearson(_caught(rank[surely_above][0], "left"), members, 1 - confidence)[1])
    return Estimate(_caught(fpr * nonmembers, "right") / members, low, high)


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
    def _from_scores(
        cls,
        *,
        member_scores: Floats,
        nonmember_scores: Floats,
        decision: float,
        threshold: float,
        **facts: Any,
    ) -> AttackReport:
        """Compute the report; ``facts`` are the fields that do not follow from the scores."""

        def _rates(limit: float) -> list[Estimate]:
            both = member_scores, nonmember_scores
            return [_proportion(int((scores > limit).sum()), len(scores)) for scores in both]

        curve = _roc_curve(member_scores, nonmember_scores)
        tpr, fpr = _rates(decision)
        return cls(
            members=len(member_scores),
            nonmembers=len(nonmember_scores),
            tpr=tpr,
            fpr=fpr,
            leakage=_difference(tpr, fpr),
            advantage=_difference(*_rates(threshold)),
            auc=_auc(member_scores, nonmember_scores),
            tpr_at_0_1_percent_fpr=_tpr_at_fpr(curve, 0.001),
            tpr_at_1_percent_fpr=_tpr_at_fpr(curve, 0.01),
            threshold=threshold,
            roc=curve,
            **facts,
        )

    def table(self) -> list[tuple[str, str, str]]:
        """Return rows of (name, value, 95% interval)."""
        rows = [
            (name, f"{estimate.value:.4f}", f"{estimate.low:.4f} to {estimate.high:.4f}")
            for name, estimate in ((name, getattr(self, own)) for name, own in _ESTIMATES.items())
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
        fpr, tpr = self.roc._thinned()
        return {
            **{each.name: getattr(self, each.name) for each in fields(self)},
            **{name: getattr(self, name).to_json() for name in _ESTIMATES.values()},
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

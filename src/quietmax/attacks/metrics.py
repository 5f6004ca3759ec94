"""Statistics of single answers, and the rates of an attack with their 95% confidence intervals.

An attack gives every record a score and calls it a member if the score is *above* a threshold. Members and non-members
are two independent samples. Every interval covers the true value with probability at least 95%, with two exceptions:
that of the AUC does so asymptotically, and that of a difference of rates above 0.5 with at least 92%.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta, rankdata

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


def released_by(answers: Answers) -> Released:
    """Return what ``answers`` contain: probabilities, or labels only."""
    return "labels" if answers.probabilities is None else "probabilities"


def released_probabilities(answers: Answers) -> Floats:
    """Return the probability vectors of ``answers``; raise `InvalidInput` if only labels were released."""
    if answers.probabilities is None:
        raise InvalidInput("The target releases labels only; this statistic requires probabilities.")
    return answers.probabilities


def correct(answers: Answers, labels: Labels) -> Floats:
    """Return 1 where the released label of ``answers`` is the true one of ``labels``, else 0."""
    return np.asarray(answers.labels == labels, dtype=np.float64)


def log_probability(answers: Answers, labels: Labels) -> Floats:
    """Return ``ln p_y``, the negative cross-entropy of ``answers`` at the true ``labels``."""
    probabilities = released_probabilities(answers)
    of_true_class = probabilities[np.arange(len(probabilities)), labels]
    return np.log(np.maximum(of_true_class, SMALLEST_PROBABILITY))


def log_odds(answers: Answers, labels: Labels) -> Floats:
    """Return ``ln p_y - ln(sum of the other probabilities)`` of ``answers`` at the true ``labels``.

    This is the logit scaling of Carlini et al. (2022), under which the values are nearly Gaussian. The other
    probabilities are summed: ``1 - p_y`` would lose digits.
    """
    others = released_probabilities(answers).copy()
    others[np.arange(len(others)), labels] = 0.0
    log_others = np.log(np.maximum(others.sum(-1), SMALLEST_PROBABILITY))
    return np.asarray(log_probability(answers, labels) - log_others)


def confidence(answers: Answers, labels: Labels) -> Floats:  # noqa: ARG001
    """Return the largest probability of ``answers``; the true ``labels`` are not used (Salem et al. 2019)."""
    return np.asarray(released_probabilities(answers).max(-1))


def negative_entropy(answers: Answers, labels: Labels) -> Floats:  # noqa: ARG001
    """Return ``sum_c p_c ln p_c`` of ``answers``; the true ``labels`` are not used."""
    probabilities = released_probabilities(answers)
    return np.asarray((probabilities * np.log(np.maximum(probabilities, SMALLEST_PROBABILITY))).sum(-1))


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
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True, eq=False)
class RocCurve:
    """The ROC curve: how many records are called members at every distinct threshold, the strictest first.

    Parameters
    ----------
    true_positives : array of shape (points,)
        Members that are called members. Starts with 0, ends with all members.
    false_positives : array of shape (points,)
        Non-members that are called members. Starts with 0, ends with all non-members.
    """

    true_positives: NDArray[np.int64]
    false_positives: NDArray[np.int64]

    @property
    def tpr(self) -> Floats:
        """True positive rates, ascending."""
        return np.asarray(self.true_positives / self.true_positives[-1])

    @property
    def fpr(self) -> Floats:
        """False positive rates, ascending."""
        return np.asarray(self.false_positives / self.false_positives[-1])

    def thinned(self, points: int = 200) -> tuple[list[float], list[float]]:
        """Return at most about ``2 * points`` of the curve's corners as lists (fpr, tpr), dense at low FPR."""
        total = int(self.false_positives[-1])
        wanted = np.unique(
            np.concatenate([np.geomspace(1, total, points).round(), np.linspace(0, total, points).round()])
        )
        # The last point of each wanted number of false positives has the highest TPR.
        kept = np.unique(np.searchsorted(self.false_positives, wanted, side="right") - 1)
        kept = np.unique(np.concatenate([[0], kept]))
        return self.fpr[kept].tolist(), self.tpr[kept].tolist()


def roc_curve(members: Floats, nonmembers: Floats) -> RocCurve:
    """Compute the ROC curve of an attack's scores."""
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
    curve = roc_curve(members, nonmembers)
    values = np.unique(np.concatenate([members, nonmembers]))[::-1]
    best = int(np.argmax(curve.tpr - curve.fpr))
    if best == 0:
        return float(values[0])
    # The last point, which calls everyone a member, has TPR - FPR = 0 and is never better: a lower score exists.
    above, below = float(values[best - 1]), float(values[best])
    middle = below + (above - below) / 2
    return middle if middle < above else below


def clopper_pearson(successes: int, trials: int, error: float) -> tuple[float, float]:
    """Compute exact limits of a proportion (Clopper and Pearson 1934).

    Either limit alone is a one-sided bound with confidence ``1 - error``; both together are an interval with
    confidence ``1 - 2 * error``.
    """
    low = 0.0 if successes == 0 else float(beta.ppf(error, successes, trials - successes + 1))
    high = 1.0 if successes == trials else float(beta.isf(error, successes + 1, trials - successes))
    return low, high


def proportion(successes: int, trials: int) -> Estimate:
    """Estimate a rate from ``successes`` in ``trials``, with its Clopper-Pearson interval."""
    return Estimate(successes / trials, *clopper_pearson(successes, trials, (1 - CONFIDENCE) / 2))


def difference(first: Estimate, second: Estimate) -> Estimate:
    """Estimate ``first - second`` of two independent rates.

    The distances to the ends of their intervals are squared and added: Newcombe (1998), method 10, with
    Clopper-Pearson intervals in place of Wilson's. By enumeration, for 10 to 400 trials each, it covers a difference
    of up to 0.5 with at least 95% and a larger one with at least 92%.
    """
    value = first.value - second.value
    below = math.hypot(first.value - first.low, second.high - second.value)
    above = math.hypot(first.high - first.value, second.value - second.low)
    return Estimate(value, max(value - below, -1.0), min(value + above, 1.0))


def auc(members: Floats, nonmembers: Floats) -> Estimate:
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


def tpr_at_fpr(curve: RocCurve, fpr: float) -> Estimate:
    """Estimate the largest TPR among thresholds whose observed FPR is at most ``fpr``.

    The interval accounts for the threshold being estimated too. Half of the 5% error goes to exact limits of the
    threshold at which the true FPR is ``fpr`` (an order statistic of the non-members), half to Clopper-Pearson limits
    of the TPR there. With few non-members the lower end is therefore 0: 600 of them cannot show an FPR of 0.1%.
    """
    members, nonmembers = int(curve.true_positives[-1]), int(curve.false_positives[-1])
    reached = curve.true_positives[np.searchsorted(curve.false_positives, fpr * nonmembers, "right") - 1]
    confidence = 1 - (1 - CONFIDENCE) / 4  # of each of the four limits
    rank = np.arange(1, nonmembers + 1)
    # The true FPR of a threshold just above the rank-th largest non-member has distribution Beta(rank, n - rank + 1),
    # or is smaller with ties. At that non-member the distribution is the same, or the FPR is larger.
    surely_below = beta.cdf(fpr, rank, nonmembers - rank + 1) >= confidence
    surely_above = beta.sf(fpr, rank, nonmembers - rank + 1) >= confidence
    low, high = 0.0, 1.0
    if surely_below.any():
        allowed = int(rank[surely_below][-1]) - 1
        caught = curve.true_positives[np.searchsorted(curve.false_positives, allowed, "right") - 1]
        low = clopper_pearson(int(caught), members, 1 - confidence)[0]
    if surely_above.any():
        needed = int(rank[surely_above][0])
        caught = curve.true_positives[np.searchsorted(curve.false_positives, needed, "left") - 1]
        high = clopper_pearson(int(caught), members, 1 - confidence)[1]
    return Estimate(float(reached / members), low, high)

"""Rates of an attack and how sure they are: operating curve, AUC, TPR at a low FPR, 95% intervals.

A record is called a member when its score is *above* a threshold. Members and non-members are taken as two
independent samples; every interval has a coverage of at least (or, for the AUC, asymptotically) 95%.
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
CONFIDENCE = 0.95
_NORMAL_QUANTILE = 1.959963984540054


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"

    def to_json(self) -> dict[str, float]:
        """The three numbers by name."""
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True, eq=False)
class OperatingCurve:
    """The ROC: at every distinct threshold, from the strictest on, how many of each kind are called members.

    Both arrays begin with 0 (nobody is called a member) and end with everybody.
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
        """At most about ``2*points`` of the curve's corners, dense where the FPR is small, as lists (fpr, tpr)."""
        total = int(self.false_positives[-1])
        wanted = np.unique(
            np.concatenate([np.geomspace(1, total, points).round(), np.linspace(0, total, points).round()])
        )
        # The last point of each wanted false-positive count: the highest TPR that count buys.
        kept = np.unique(np.searchsorted(self.false_positives, wanted, side="right") - 1)
        kept = np.unique(np.concatenate([[0], kept]))
        return self.fpr[kept].tolist(), self.tpr[kept].tolist()


def operating_curve(members: Floats, nonmembers: Floats) -> OperatingCurve:
    """The ROC of the scores of members and non-members.

    >>> operating_curve(np.array([2.0, 1.0]), np.array([1.0, 0.0])).true_positives
    array([0, 1, 2, 2])
    """
    if not len(members) or not len(nonmembers):
        raise InvalidInput("An attack needs at least one member and one non-member; give a split with both.")
    scores = np.concatenate([members, nonmembers])
    if not np.isfinite(scores).all():
        raise InvalidInput(
            "An attack's score is NaN or infinite; scores must be finite numbers; correct the attack."
        )
    order = np.argsort(-scores, kind="stable")
    is_member = order < len(members)
    last_of_ties = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    true_positives = np.cumsum(is_member)[last_of_ties]
    return OperatingCurve(
        np.concatenate([[0], true_positives]).astype(np.int64),
        np.concatenate([[0], last_of_ties + 1 - true_positives]).astype(np.int64),
    )


def best_threshold(members: Floats, nonmembers: Floats) -> float:
    """The threshold with the largest TPR - FPR on these scores (of shadow networks, never of the target).

    Lies midway between two scores. If nothing beats calling nobody a member, it is the largest score; calling everyone
    a member gains nothing either, so there is always a lower score.

    >>> best_threshold(np.array([3.0, 4.0]), np.array([1.0, 2.0]))
    2.5
    """
    curve = operating_curve(members, nonmembers)
    values = np.unique(np.concatenate([members, nonmembers]))[::-1]
    best = int(np.argmax(curve.tpr - curve.fpr))
    if best == 0:
        return float(values[0])
    above, below = float(values[best - 1]), float(values[best])
    middle = below + (above - below) / 2
    return middle if middle < above else below


def clopper_pearson(successes: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Exact interval for a proportion (Clopper and Pearson 1934).

    >>> [round(end, 4) for end in clopper_pearson(0, 100)]
    [0.0, 0.0362]
    """
    tail = (1 - confidence) / 2
    low = 0.0 if successes == 0 else float(beta.ppf(tail, successes, trials - successes + 1))
    high = 1.0 if successes == trials else float(beta.ppf(1 - tail, successes + 1, trials - successes))
    return low, high


def proportion(successes: int, trials: int) -> Estimate:
    """A rate with its Clopper-Pearson interval."""
    return Estimate(successes / trials, *clopper_pearson(successes, trials))


def difference(first: Estimate, second: Estimate) -> Estimate:
    """``first - second`` of two independent rates; the distances to their limits are squared and added.

    Newcombe (1998), method 10, with Clopper-Pearson limits in place of Wilson's.
    """
    value = first.value - second.value
    below = math.hypot(first.value - first.low, second.high - second.value)
    above = math.hypot(first.high - first.value, second.value - second.low)
    return Estimate(value, max(value - below, -1.0), min(value + above, 1.0))


def area(members: Floats, nonmembers: Floats) -> Estimate:
    """AUC: the chance that a member scores above a non-member, ties counting half; interval by DeLong (1988).

    Computed from midranks (Sun and Xu 2014). Where the scores separate completely the estimated variance is zero;
    Hoeffding's bound for two-sample U-statistics (1963) takes its place.
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


def tpr_at(curve: OperatingCurve, fpr: float) -> Estimate:
    """The largest TPR among thresholds whose observed FPR is at most ``fpr``.

    The interval allows for the threshold being estimated too: of the 5% error, half goes to exact limits of the
    threshold at which the true FPR is ``fpr`` (an order statistic of the non-members), half to Clopper-Pearson limits
    of the TPR there. With few non-members the lower limit is therefore 0: nobody can tell an FPR of 0.1% from 600.
    """
    members, nonmembers = int(curve.true_positives[-1]), int(curve.false_positives[-1])
    reached = curve.true_positives[np.searchsorted(curve.false_positives, fpr * nonmembers, "right") - 1]
    tail = (1 - CONFIDENCE) / 4
    rank = np.arange(1, nonmembers + 1)
    # Above the rank-th largest non-member the true FPR has law Beta(rank, n - rank + 1), or is smaller with ties; from
    # it on, the same law, or it is larger.
    surely_below = beta.cdf(fpr, rank, nonmembers - rank + 1) >= 1 - tail
    surely_above = beta.sf(fpr, rank, nonmembers - rank + 1) >= 1 - tail
    low, high = 0.0, 1.0
    if surely_below.any():
        allowed = int(rank[surely_below][-1]) - 1
        caught = curve.true_positives[np.searchsorted(curve.false_positives, allowed, "right") - 1]
        low = clopper_pearson(int(caught), members, 1 - 2 * tail)[0]
    if surely_above.any():
        needed = int(rank[surely_above][0])
        caught = curve.true_positives[np.searchsorted(curve.false_positives, needed, "left") - 1]
        high = clopper_pearson(int(caught), members, 1 - 2 * tail)[1]
    return Estimate(float(reached / members), low, high)


Labels = NDArray[np.int64]
Statistic = Callable[[Answers, Labels], Floats]
Released = Literal["probabilities", "labels"]

FLOOR = 1e-45
"""Below any positive float32: keeps logarithms finite where a released probability is 0."""


def correct(answers: Answers, labels: Labels) -> Floats:
    """1 where the released label is the true one, else 0: all that labels alone can say."""
    return np.asarray(answers.labels == labels, dtype=np.float64)


def log_probability(answers: Answers, labels: Labels) -> Floats:
    """``ln p_y``, the negative cross-entropy loss."""
    return np.log(np.maximum(_of_true_class(answers, labels), FLOOR))


def log_odds(answers: Answers, labels: Labels) -> Floats:
    """``ln p_y - ln(sum of the others)``: the logit scaling under which LiRA's values are nearly Gaussian.

    The others are summed rather than subtracted from 1, so that nothing cancels.
    """
    others = probabilities_of(answers).copy()
    others[np.arange(len(others)), labels] = 0.0
    return np.asarray(log_probability(answers, labels) - np.log(np.maximum(others.sum(-1), FLOOR)))


def confidence(answers: Answers, labels: Labels) -> Floats:  # noqa: ARG001
    """The largest probability, whatever its class (Salem et al. 2019)."""
    return np.asarray(probabilities_of(answers).max(-1))


def negative_entropy(answers: Answers, labels: Labels) -> Floats:  # noqa: ARG001
    """``sum_c p_c ln p_c``: large where the answer is concentrated."""
    probabilities = probabilities_of(answers)
    return np.asarray((probabilities * np.log(np.maximum(probabilities, FLOOR))).sum(-1))


def probabilities_of(answers: Answers) -> Floats:
    """The released probability vectors, or a refusal where only labels were released."""
    if answers.probabilities is None:
        raise InvalidInput(
            "This target releases labels only, so its probabilities cannot be used; choose an attack that reads labels."
        )
    return answers.probabilities


def released_by(answers: Answers) -> Released:
    """What an answer holds."""
    return "labels" if answers.probabilities is None else "probabilities"


def _of_true_class(answers: Answers, labels: Labels) -> Floats:
    probabilities = probabilities_of(answers)
    return probabilities[np.arange(len(probabilities)), labels]

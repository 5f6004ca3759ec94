"""Threshold: one statistic per answer, compared with one threshold (Yeom et al. 2018).

Yeom et al. compare the loss with the average training loss. Here the threshold is the best one on shadow networks,
which requires no knowledge of the target. Confidence and entropy are those of Salem et al. (2019); they do not use the
true label.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quietmax.attacks import metrics
from quietmax.attacks.base import Attack, FittedAttack
from quietmax.attacks.metrics import Floats, Labels, Released, Statistic
from quietmax.attacks.shadow_models import Design, ShadowPool, candidate_rows
from quietmax.errors import InvalidInput
from quietmax.mechanisms.base import Answers
from quietmax.models.stacked import Progress

StatisticName = Literal["loss", "confidence", "entropy"]
_STATISTICS: dict[StatisticName, Statistic] = {
    "loss": metrics.log_probability,
    "confidence": metrics.confidence,
    "entropy": metrics.negative_entropy,
}


@dataclass(frozen=True, eq=False)
class FittedThreshold(FittedAttack):
    """A statistic and the threshold that it is compared with."""

    statistic: Statistic
    labels: Labels
    threshold: float
    notes: tuple[str, ...] = ()

    def scores(self, answers: Answers) -> Floats:
        """Return the statistic of each of ``answers``."""
        return self.statistic(answers, self.labels)


@dataclass(frozen=True)
class Threshold(Attack):
    """Compare one statistic of each answer with one threshold.

    If the target releases labels only, a record is called a member if its label is correct. The leakage is then the
    training accuracy minus the test accuracy (Yeom et al.'s bounded-loss adversary).

    Parameters
    ----------
    models : int
        Number of shadow networks.
    seed : int
        Determines the shadow networks.
    statistic : {"loss", "confidence", "entropy"}
        The loss of the true class, the largest probability, or the entropy of the answer.

    Examples
    --------
    >>> Threshold(models=4, statistic="entropy").name
    'threshold-entropy'
    """

    statistic: StatisticName = "loss"

    @property
    def name(self) -> str:
        """``threshold`` for the loss, else ``threshold-`` and the statistic."""
        return "threshold" if self.statistic == "loss" else f"threshold-{self.statistic}"

    def __post_init__(self) -> None:
        if self.statistic not in _STATISTICS:
            raise InvalidInput(f"statistic must be one of {', '.join(_STATISTICS)}, got {self.statistic!r}.")

    @property
    def designs(self) -> tuple[Design, ...]:
        """Any networks whose members are known."""
        return ("disjoint", "overlapping")

    def fit(
        self,
        pool: ShadowPool,
        released: Released,
        progress: Progress | None = None,  # noqa: ARG002
    ) -> FittedThreshold:
        """Choose the threshold on the answers of ``pool`` to its members and non-members.

        Targets that release labels only (``released``) have the fixed threshold 1/2. ``progress`` is not used.
        """
        self.check_pool(pool)
        labels = pool.data.records.labels[candidate_rows(pool.data)]
        if released == "labels":
            note = "The target releases labels only: a record with a correct label is called a member."
            return FittedThreshold(metrics.correct, labels, 0.5, (note,))
        statistic = _STATISTICS[self.statistic]
        rows = pool.reference_rows
        units = pool.units(rows)
        values = units.means(pool.values(rows, statistic, released))
        inside = units.all(pool.inside[:, rows])
        held_out = units.all(pool.drawn[:, rows]) & ~inside
        return FittedThreshold(statistic, labels, metrics.best_threshold(values[inside], values[held_out]))

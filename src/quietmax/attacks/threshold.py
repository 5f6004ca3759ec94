"""Threshold: one number read off each answer, and one threshold (Yeom et al. 2018).

Yeom et al. compare the loss with the average training loss; here the threshold is the best one on shadow networks,
which needs no knowledge of the target. Confidence and entropy are those of Salem et al. (2019); they do without the
true label.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quietmax.attacks import metrics as statistics
from quietmax.attacks.base import Attack, Fitted
from quietmax.attacks.metrics import Floats, Labels, Released, Statistic, best_threshold
from quietmax.attacks.shadow_models import Design, Progress, ShadowPool, candidate_rows
from quietmax.errors import InvalidInput
from quietmax.mechanisms.base import Answers

Reading = Literal["loss", "confidence", "entropy"]
_STATISTICS: dict[Reading, Statistic] = {
    "loss": statistics.log_probability,
    "confidence": statistics.confidence,
    "entropy": statistics.negative_entropy,
}


@dataclass(frozen=True, eq=False)
class FittedThreshold(Fitted):
    """A statistic and the threshold it is compared with."""

    statistic: Statistic
    labels: Labels
    threshold: float
    notes: tuple[str, ...] = ()

    def scores(self, answers: Answers) -> Floats:
        """The statistic of each answer."""
        return self.statistic(answers, self.labels)


@dataclass(frozen=True)
class Threshold(Attack):
    """``loss`` of the true class, ``confidence`` (largest probability) or ``entropy``, against one threshold.

    A target that releases labels only is judged by whether its label is right: then leakage is its training accuracy
    minus its test accuracy (Yeom et al.'s bounded-loss adversary).
    """

    statistic: Reading = "loss"

    @property
    def name(self) -> str:
        """``threshold`` of the loss, else with the statistic's name."""
        return "threshold" if self.statistic == "loss" else f"threshold-{self.statistic}"

    def __post_init__(self) -> None:
        if self.statistic not in _STATISTICS:
            raise InvalidInput(
                f"The statistic is {self.statistic!r}, but must be one of {', '.join(_STATISTICS)}; choose one."
            )

    @property
    def designs(self) -> tuple[Design, ...]:
        """Any networks whose members are known will do."""
        return ("outside", "around")

    def fit(
        self,
        pool: ShadowPool,
        released: Released,
        progress: Progress | None = None,  # noqa: ARG002
    ) -> FittedThreshold:
        """Choose the threshold on what the shadow networks answer to records inside and outside."""
        self.check_pool(pool)
        labels = pool.data.records.labels[candidate_rows(pool.data)]
        if released == "labels":
            return FittedThreshold(
                statistics.correct,
                labels,
                0.5,
                ("Only labels are released: a right one is taken for a member's.",),
            )
        statistic = _STATISTICS[self.statistic]
        rows = pool.reference_rows
        values, inside = pool.values(rows, statistic, released), pool.inside[:, rows]
        held_out = pool.drawn[:, rows] & ~inside
        return FittedThreshold(statistic, labels, best_threshold(values[inside], values[held_out]))

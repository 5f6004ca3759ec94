"""Noisy max: the label with the largest score, after noise or by a randomised choice. Proven (THEORY 3.3, 3.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from quietmax.accounting import Cost, Currency, GaussianCost, Guarantee
from quietmax.errors import InvalidInput
from quietmax.mechanisms.mechanism import Answers, Floats, checked_scores
from quietmax.mechanisms.proven import ProvenMechanism
from quietmax.mechanisms.selection import selection_epsilon
from quietmax.noise import NoiseSource, choose, permute_and_flip, release_gaussian
from quietmax.sensitivity import ScoreBounds

Method = Literal["gaussian", "exponential", "permute-and-flip"]


@dataclass(frozen=True)
class NoisyMax(ProvenMechanism):
    """Release the label alone.

    ``gaussian``: the largest score after Gaussian noise on all of them, ``mu = D_2/sigma``. ``exponential``: label v
    with probability proportional to ``exp(eps*z_v/spread)``. ``permute-and-flip``: never worse in expected score at
    equal pure epsilon. ``count_in`` is the currency of the budget; Gaussian noise exists only in the Gaussian one.
    """

    method: Method = "exponential"
    count_in: Currency | None = None
    bounds: ScoreBounds | None = None
    per_query: Cost | None = None

    def __post_init__(self) -> None:
        if self.method not in ("gaussian", "exponential", "permute-and-flip"):
            raise InvalidInput(
                f"method is {self.method!r}, but must be 'gaussian', 'exponential' or 'permute-and-flip'; choose one."
            )
        if self.method == "gaussian" and self.count_in == "pure":
            raise InvalidInput(
                "Gaussian noise has no pure epsilon; count in the gaussian currency or choose exponential."
            )

    @property
    def name(self) -> str:
        """``noisy-max``."""
        return "noisy-max"

    @property
    def currency(self) -> Currency:
        """As asked for; by default Gaussian for Gaussian noise, pure for a choice."""
        return self.count_in or ("gaussian" if self.method == "gaussian" else "pure")

    def guarantee(self, classes: int) -> Guarantee:
        """Proven, given bounds certified by the model."""
        parameters: dict[str, Any] = {
            "mechanism": self.name,
            "method": self.method,
            "classes": classes,
            "releases": "label",
        }
        if self.method == "gaussian":
            because = "Gaussian mechanism on all scores, then post-processing (THEORY 3.4)."
        elif self.method == "exponential":
            because = "Exponential mechanism on the scores, whose differences move by at most the spread (THEORY 3.3)."
        else:
            because = (
                "Permute-and-flip on the scores, whose differences move by at most the spread (THEORY 3.3)."
            )
        return self._claimed(because, parameters)

    def release(self, scores: Floats, source: NoiseSource) -> Answers:
        """Labels for scores of shape (queries, classes)."""
        bounds, cost = self._ready()
        values = checked_scores(scores)
        if self.method == "gaussian":
            assert isinstance(cost, GaussianCost)
            noisy = release_gaussian(
                values,
                sensitivity=bounds.vector.value,
                mu=cost.mu,
                source=source,
                coordinates=values.shape[1],
            )
            return Answers(noisy.values.argmax(-1), None)
        pick = choose if self.method == "exponential" else permute_and_flip
        epsilon = selection_epsilon(cost, self.method)
        return Answers(
            pick(values, epsilon=epsilon, range_sensitivity=bounds.spread, source=source).index, None
        )

    def _ready(self) -> tuple[ScoreBounds, Cost]:
        bounds, cost = super()._ready()
        if self.method == "gaussian" and not isinstance(cost, GaussianCost):
            raise InvalidInput("Gaussian noise is paid in the Gaussian currency; give a cost in mu.")
        return bounds, cost

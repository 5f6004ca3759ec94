"""Noisy max: the label with the largest score, after noise or by a randomised choice. Proven (THEORY 3.3, 3.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from quietmax.accounting.costs import Cost, GaussianCost, Measure
from quietmax.accounting.guarantee import Guarantee
from quietmax.errors import InvalidInput
from quietmax.mechanisms.base import Answers, Floats, ProvenMechanism, checked_scores, selection_epsilon
from quietmax.models.training import softmax
from quietmax.noise.release import release_gaussian
from quietmax.noise.selection import choose, permute_and_flip
from quietmax.noise.sources import NoiseSource
from quietmax.sensitivity.base import ScoreBounds

Method = Literal["gaussian", "exponential", "permute-and-flip"]


@dataclass(frozen=True)
class NoisyMax(ProvenMechanism):
    """Release the label alone.

    ``gaussian``: the largest score after Gaussian noise on all of them, ``mu = D_2/sigma``. ``exponential``: label v
    with probability proportional to ``exp(eps*z_v/spread)``. ``permute-and-flip``: never worse in expected score at
    equal pure epsilon. ``count_in`` is the measure of the budget; Gaussian noise exists only in the Gaussian one.
    """

    method: Method = "exponential"
    count_in: Measure | None = None
    bounds: ScoreBounds | None = None
    per_query: Cost | None = None

    def __post_init__(self) -> None:
        if self.method not in ("gaussian", "exponential", "permute-and-flip"):
            raise InvalidInput(
                f"method is {self.method!r}, but must be 'gaussian', 'exponential' or 'permute-and-flip'; choose one."
            )
        if self.method == "gaussian" and self.count_in == "pure":
            raise InvalidInput(
                "Gaussian noise has no pure epsilon; count in the gaussian measure or choose exponential."
            )

    @property
    def name(self) -> str:
        """``noisy-max``."""
        return "noisy-max"

    @property
    def measure(self) -> Measure:
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
            raise InvalidInput("Gaussian noise is paid in the Gaussian measure; give a cost in mu.")
        return bounds, cost


@dataclass(frozen=True)
class GaussianScores(ProvenMechanism):
    """Release all scores with noise ``N(0, (D_2/mu)^2)`` each, as probabilities.

    Logits go through the softmax. Votes (``votes`` is their known sum, the number of teachers) are divided by that sum
    and projected onto the probability simplex.
    """

    votes: int | None = None
    bounds: ScoreBounds | None = None
    per_query: Cost | None = None

    @property
    def name(self) -> str:
        """``gaussian``."""
        return "gaussian"

    @property
    def measure(self) -> Measure:
        """Gaussian."""
        return "gaussian"

    def guarantee(self, classes: int) -> Guarantee:
        """Proven, given bounds certified by the model."""
        return self._claimed(
            "Gaussian mechanism on all scores, then post-processing (THEORY 3.4).",
            {"mechanism": self.name, "classes": classes, "releases": "probabilities"},
        )

    def release(self, scores: Floats, source: NoiseSource) -> Answers:
        """Probabilities for scores of shape (queries, classes)."""
        bounds, cost = self._ready()
        values = checked_scores(scores)
        noisy = release_gaussian(
            values, sensitivity=bounds.vector.value, mu=cost.mu, source=source, coordinates=values.shape[1]
        ).values
        probabilities = softmax(noisy) if self.votes is None else onto_simplex(noisy / self.votes)
        return Answers(noisy.argmax(-1), probabilities)

    def _ready(self) -> tuple[ScoreBounds, GaussianCost]:
        bounds, cost = super()._ready()
        if not isinstance(cost, GaussianCost):
            raise InvalidInput("Gaussian noise is paid in the Gaussian measure; give a cost in mu.")
        return bounds, cost


def onto_simplex(points: Floats) -> Floats:
    """The nearest probability vectors in L2 (Held, Wolfe and Crowder 1974).

    >>> onto_simplex(np.array([[0.5, 0.9, -3.0]])).round(6).tolist()
    [[0.3, 0.7, 0.0]]
    """
    ordered = -np.sort(-points, axis=1)
    excess = np.cumsum(ordered, axis=1) - 1
    rank = np.arange(1, points.shape[1] + 1)
    kept = np.count_nonzero(ordered * rank > excess, axis=1)
    shift = excess[np.arange(len(points)), kept - 1] / kept
    return np.asarray(np.maximum(points - shift[:, None], 0.0))

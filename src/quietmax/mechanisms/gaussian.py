"""Gaussian noise on every score of a query; probabilities by post-processing. Proven (THEORY 3.4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quietmax.accounting import Cost, Currency, GaussianCost, Guarantee
from quietmax.errors import InvalidInput
from quietmax.mechanisms.mechanism import Answers, Floats, checked_scores
from quietmax.mechanisms.proven import ProvenMechanism
from quietmax.models import softmax
from quietmax.noise import NoiseSource, release_gaussian
from quietmax.sensitivity import ScoreBounds


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
    def currency(self) -> Currency:
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
            raise InvalidInput("Gaussian noise is paid in the Gaussian currency; give a cost in mu.")
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

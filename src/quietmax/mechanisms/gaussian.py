"""Gaussian noise on every score of a query; probabilities by post-processing. Proven (THEORY 3.4)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from quietmax.accounting import Cost, Currency, GaussianCost, Guarantee, Reading
from quietmax.errors import InvalidInput
from quietmax.mechanisms.mechanism import Answers, Floats, certified_bounds, checked_scores
from quietmax.models import Classifier, softmax
from quietmax.noise import NoiseSource, release_gaussian
from quietmax.sensitivity import ScoreBounds


@dataclass(frozen=True)
class GaussianScores:
    """Release all scores with noise ``N(0, (D_2/mu)^2)`` each, as probabilities.

    Logits go through the softmax. Votes (``votes`` is their known sum, the number of teachers) are divided by that sum
    and projected onto the probability simplex.
    """

    votes: int | None = None
    bounds: ScoreBounds | None = None
    per_query: GaussianCost | None = None

    @property
    def name(self) -> str:
        """``gaussian``."""
        return "gaussian"

    @property
    def reading(self) -> Reading:
        """A budget means (epsilon, delta)."""
        return "proven"

    @property
    def currency(self) -> Currency:
        """Gaussian."""
        return "gaussian"

    def prepared(self, model: Classifier, per_query: Cost) -> GaussianScores:
        """Fill in the cost per query and the model's certified bounds."""
        if not isinstance(per_query, GaussianCost):
            raise InvalidInput("Gaussian noise is paid in the Gaussian currency; give a cost in mu.")
        return replace(
            self, bounds=certified_bounds(self.bounds, model), per_query=self.per_query or per_query
        )

    def cost(self, classes: int) -> Cost:  # noqa: ARG002
        """The stated cost per query; it does not depend on the number of classes."""
        return self._ready()[1]

    def guarantee(self, classes: int) -> Guarantee:
        """Proven, given the certified bounds."""
        bounds, cost = self._ready()
        return Guarantee.of(
            cost,
            status="proven",
            because="Gaussian mechanism on all scores, then post-processing (THEORY 3.4).",
            parameters={
                "mechanism": self.name,
                "classes": classes,
                "releases": "probabilities",
                **bounds.to_json(),
            },
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
        if self.bounds is None or self.per_query is None:
            raise InvalidInput(
                "The mechanism still has open parameters; give bounds and per_query, or use a Predictor."
            )
        return self.bounds, self.per_query


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

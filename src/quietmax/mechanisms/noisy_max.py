"""Noisy max: the label of the largest score, after noise or by a randomised choice; and all scores with noise.

Both mechanisms are proven (THEORY 3.3, 3.4).
"""

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


@dataclass(frozen=True)
class NoisyMax(ProvenMechanism):
    """Release a label alone.

    Parameters
    ----------
    method : {"exponential", "gaussian", "permute-and-flip"}
        ``"gaussian"``: the largest score after Gaussian noise on all of them, ``mu = D_2/sigma``. ``"exponential"``:
        label v with probability proportional to ``exp(eps*z_v/spread)``. ``"permute-and-flip"``: never worse in
        expected score at equal pure epsilon.
    count_in : {"pure", "gaussian"} or None
        The privacy measure of the cost. By default Gaussian for Gaussian noise and pure otherwise.
    bounds : ScoreBounds or None
        How far one record moves the scores. By default the model's own certified bounds.
    per_query : PureCost or GaussianCost or None
        The cost of one answer. By default set from the budget.

    Raises
    ------
    InvalidInput
        If `method` is unknown, or Gaussian noise is to be counted in the pure measure.

    Examples
    --------
    >>> from quietmax.accounting import PureCost
    >>> from quietmax.noise import SeededNoise
    >>> from quietmax.sensitivity import ScoreBounds, Sensitivity
    >>> one = Sensitivity(1.0, "certified", "One record changes one vote.")
    >>> votes = NoisyMax(bounds=ScoreBounds(one, one), per_query=PureCost(1.0))
    >>> votes.release(np.array([[0.0, 90.0, 10.0]]), SeededNoise(0)).labels
    array([1])
    """

    method: Literal["gaussian", "exponential", "permute-and-flip"] = "exponential"
    count_in: Measure | None = None
    bounds: ScoreBounds | None = None
    per_query: Cost | None = None

    def __post_init__(self) -> None:
        if self.method not in ("gaussian", "exponential", "permute-and-flip"):
            raise InvalidInput(
                f"method must be 'exponential', 'gaussian' or 'permute-and-flip', got {self.method!r}."
            )
        if self.method == "gaussian" and self.count_in == "pure":
            raise InvalidInput("count_in must be 'gaussian' or None with method='gaussian', got 'pure'.")

    @property
    def name(self) -> str:
        """``"noisy-max"``."""
        return "noisy-max"

    @property
    def measure(self) -> Measure:
        """`count_in`; by default Gaussian for Gaussian noise and pure for a choice."""
        return self.count_in or ("gaussian" if self.method == "gaussian" else "pure")

    def guarantee(self, classes: int) -> Guarantee:
        """Return a proven guarantee if the model certifies the bounds, else a conditional one.

        Parameters
        ----------
        classes : int
            The number of classes.
        """
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
        return self._guarantee(because, parameters)

    def release(self, scores: Floats, source: NoiseSource) -> Answers:
        """Draw labels.

        Parameters
        ----------
        scores : ndarray of shape (queries, classes)
            The scores of the queries.
        source : NoiseSource
            Where the noise comes from.
        """
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
        """Return bounds and cost; Gaussian noise requires a Gaussian cost."""
        bounds, cost = super()._ready()
        if self.method == "gaussian" and not isinstance(cost, GaussianCost):
            raise InvalidInput("per_query must be a GaussianCost for Gaussian noise, got a PureCost.")
        return bounds, cost


@dataclass(frozen=True)
class GaussianScores(ProvenMechanism):
    """Release all scores with noise ``N(0, (D_2/mu)^2)`` each, as probabilities.

    Parameters
    ----------
    votes : int or None
        None: the scores are logits and go through the softmax. Otherwise the scores are votes that add up to this
        number; they are divided by it and projected onto the probability simplex.
    bounds : ScoreBounds or None
        How far one record moves the scores. By default the model's own certified bounds.
    per_query : GaussianCost or None
        The cost of one answer. By default set from the budget.

    Examples
    --------
    >>> from quietmax.noise import SeededNoise
    >>> from quietmax.sensitivity import ScoreBounds, Sensitivity
    >>> one = Sensitivity(1.0, "certified", "One record changes one vote.")
    >>> votes = GaussianScores(votes=100, bounds=ScoreBounds(one, one), per_query=GaussianCost(1e3))
    >>> votes.release(np.array([[0.0, 90.0, 10.0]]), SeededNoise(0)).probabilities.round(2)
    array([[0. , 0.9, 0.1]])
    """

    votes: int | None = None
    bounds: ScoreBounds | None = None
    per_query: Cost | None = None

    @property
    def name(self) -> str:
        """``"gaussian"``."""
        return "gaussian"

    @property
    def measure(self) -> Measure:
        """``"gaussian"``."""
        return "gaussian"

    def guarantee(self, classes: int) -> Guarantee:
        """Return a proven guarantee if the model certifies the bounds, else a conditional one.

        Parameters
        ----------
        classes : int
            The number of classes.
        """
        return self._guarantee(
            "Gaussian mechanism on all scores, then post-processing (THEORY 3.4).",
            {"mechanism": self.name, "classes": classes, "releases": "probabilities"},
        )

    def release(self, scores: Floats, source: NoiseSource) -> Answers:
        """Draw probabilities.

        Parameters
        ----------
        scores : ndarray of shape (queries, classes)
            The scores of the queries.
        source : NoiseSource
            Where the noise comes from.
        """
        bounds, cost = self._ready()
        values = checked_scores(scores)
        noisy = release_gaussian(
            values, sensitivity=bounds.vector.value, mu=cost.mu, source=source, coordinates=values.shape[1]
        ).values
        probabilities = softmax(noisy) if self.votes is None else onto_simplex(noisy / self.votes)
        return Answers(noisy.argmax(-1), probabilities)

    def _ready(self) -> tuple[ScoreBounds, GaussianCost]:
        """Return bounds and cost, which must be Gaussian."""
        bounds, cost = super()._ready()
        if not isinstance(cost, GaussianCost):
            raise InvalidInput("per_query must be a GaussianCost for Gaussian noise, got a PureCost.")
        return bounds, cost


def onto_simplex(points: Floats) -> Floats:
    """Return the nearest probability vectors in L2 (Held, Wolfe and Crowder 1974)."""
    ordered = -np.sort(-points, axis=1)
    excess = np.cumsum(ordered, axis=1) - 1
    rank = np.arange(1, points.shape[1] + 1)
    kept = np.count_nonzero(ordered * rank > excess, axis=1)
    shift = excess[np.arange(len(points)), kept - 1] / kept
    return np.asarray(np.maximum(points - shift[:, None], 0.0))

"""The sampled neuron, repaired: the paper's idea with a proof, at a cost that does not depend on the number of classes.

A label is chosen by the exponential mechanism (or permute-and-flip) on the logits. Then its log-odds against all other
labels together are released with noise. Nothing else about the logits is released (THEORY 3.3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import expit, logsumexp

from quietmax.accounting.conversions import root_rounded_down, rounded_down
from quietmax.accounting.costs import Cost, GaussianCost, Measure, PureCost
from quietmax.accounting.guarantee import Guarantee
from quietmax.errors import InvalidInput
from quietmax.mechanisms.base import (
    Answers,
    Floats,
    Noise,
    ProvenMechanism,
    Selection,
    checked_scores,
    selection_epsilon,
)
from quietmax.noise.release import release_gaussian, release_laplace
from quietmax.noise.selection import choose, permute_and_flip
from quietmax.noise.sources import NoiseSource
from quietmax.sensitivity.base import ScoreBounds


@dataclass(frozen=True)
class SampledNeuron(ProvenMechanism):
    """Release a label and its probability.

    With two classes there is no choice: the log-odds of class 1 get the whole budget.

    Parameters
    ----------
    noise : {"laplace", "gaussian"}
        The noise on the log-odds. Laplace noise is counted in the pure measure, Gaussian noise in the Gaussian one.
    selection : {"exponential", "permute-and-flip"}
        How the label is chosen.
    sampling_share : float
        The share of the budget (of epsilon, or of mu^2) that pays for the choice; between 0 and 1, exclusive.
    bounds : ScoreBounds or None
        How far one record moves the logits. By default the model's own certified bounds.
    per_query : PureCost or GaussianCost or None
        The cost of one answer. By default set from the budget.

    Raises
    ------
    InvalidInput
        If a name is unknown or `sampling_share` is out of range.

    Examples
    --------
    >>> from quietmax.noise import SeededNoise
    >>> from quietmax.sensitivity import ScoreBounds, Sensitivity
    >>> one = Sensitivity(0.1, "certified", "THEORY 3.1")
    >>> neuron = SampledNeuron(bounds=ScoreBounds(one, one), per_query=PureCost(10.0))
    >>> neuron.release(np.array([[0.0, 9.0, 1.0]]), SeededNoise(0)).labels
    array([1])
    """

    noise: Noise = "laplace"
    selection: Selection = "exponential"
    sampling_share: float = 0.75
    bounds: ScoreBounds | None = None
    per_query: Cost | None = None

    def __post_init__(self) -> None:
        if self.noise not in ("laplace", "gaussian"):
            raise InvalidInput(f"noise must be 'laplace' or 'gaussian', got {self.noise!r}.")
        if self.selection not in ("exponential", "permute-and-flip"):
            raise InvalidInput(
                f"selection must be 'exponential' or 'permute-and-flip', got {self.selection!r}."
            )
        if not 0 < self.sampling_share < 1:
            raise InvalidInput(
                f"sampling_share must be between 0 and 1, exclusive, got {self.sampling_share}."
            )

    @property
    def name(self) -> str:
        """``"sampled-neuron"``."""
        return "sampled-neuron"

    @property
    def measure(self) -> Measure:
        """Pure for Laplace noise, Gaussian for Gaussian noise."""
        return "pure" if self.noise == "laplace" else "gaussian"

    def guarantee(self, classes: int) -> Guarantee:
        """Return a proven guarantee if the model certifies the bounds, else a conditional one.

        Parameters
        ----------
        classes : int
            The number of classes.
        """
        parameters: dict[str, Any] = {
            "mechanism": self.name,
            "noise": self.noise,
            "selection": "none" if classes == 2 else self.selection,
            "sampling_share": 0.0 if classes == 2 else self.sampling_share,
            "classes": classes,
            "releases": "label and its probability",
        }
        return self._guarantee(
            "A label chosen by the exponential mechanism or permute-and-flip, then its noised log-odds; "
            "both move by at most the spread of the certified bounds (THEORY 3.3).",
            parameters,
        )

    def release(self, scores: Floats, source: NoiseSource) -> Answers:
        """Draw labels and probabilities.

        Parameters
        ----------
        scores : ndarray of shape (queries, classes)
            The logits of the queries.
        source : NoiseSource
            Where the noise comes from.
        """
        bounds, cost = self._ready()
        # The slack covers the rounding of differences in float64, given that no logit exceeds 2^24 spreads.
        spread = bounds.spread * (1 + 2**-20)
        logits = np.clip(checked_scores(scores), -bounds.spread * 2**24, bounds.spread * 2**24)
        queries, classes = logits.shape
        if classes == 2:
            odds = self._noised(logits[:, 1] - logits[:, 0], cost, spread, source)
            second = expit(odds)
            return Answers((odds > 0).astype(np.int64), np.stack([1 - second, second], axis=1))
        for_choice, for_odds = self._shares(cost)
        pick = choose if self.selection == "exponential" else permute_and_flip
        epsilon = selection_epsilon(for_choice, self.selection)
        chosen = pick(logits, epsilon=epsilon, range_sensitivity=spread, source=source).index
        query = np.arange(queries)
        others = logits.copy()
        others[query, chosen] = -np.inf
        # The logarithm of a sum of exponentials is off by a few units of 2^-53 per class, however small the spread is.
        rounding = (classes + 8) * 2.0**-49
        odds = logits[query, chosen] - logsumexp(others, axis=1)
        odds = self._noised(odds, for_odds, spread + rounding, source)
        # Post-processing: the chosen label gets at least 1/C, so noise cannot flip it; the others share the rest.
        winning = np.maximum(expit(odds), 1 / classes)
        each_other = np.minimum((1 - winning) / (classes - 1), winning)
        probabilities = np.repeat(each_other[:, None], classes, axis=1)
        probabilities[query, chosen] = winning
        return Answers(chosen, probabilities)

    def _noised(self, odds: Floats, cost: Cost, sensitivity: float, source: NoiseSource) -> Floats:
        """Add Laplace or Gaussian noise to the log-odds."""
        if isinstance(cost, PureCost):
            return release_laplace(
                odds, sensitivity=sensitivity, epsilon=cost.epsilon, source=source, coordinates=1
            ).values
        return release_gaussian(
            odds, sensitivity=sensitivity, mu=cost.mu, source=source, coordinates=1
        ).values

    def _shares(self, cost: Cost) -> tuple[Cost, Cost]:
        """Divide the cost (epsilon, or mu^2) into two parts that add up to no more than it."""
        share = self.sampling_share
        if isinstance(cost, PureCost):
            first = PureCost(share * cost.epsilon)
            return first, PureCost(rounded_down(cost.amount - first.amount))
        first_mu = GaussianCost(math.sqrt(share) * cost.mu)
        return first_mu, GaussianCost(root_rounded_down(cost.amount - first_mu.amount))

    def _ready(self) -> tuple[ScoreBounds, Cost]:
        """Return bounds and cost, which must be in the measure of the noise."""
        bounds, cost = super()._ready()
        wanted = PureCost if self.noise == "laplace" else GaussianCost
        if not isinstance(cost, wanted):
            raise InvalidInput(
                f"per_query must be a {wanted.__name__} for {self.noise} noise, got a {type(cost).__name__}."
            )
        return bounds, cost

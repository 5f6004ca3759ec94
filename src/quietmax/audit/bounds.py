"""From counts to lower bounds: how often an event happened in two neighbouring worlds, and what that proves.

If an answer is (epsilon, delta)-private, then ``P <= exp(epsilon)*Q + delta`` for every event, with P and Q its
probabilities in two neighbouring worlds; if it is mu-Gaussian private, ``Phi^-1(P) - Phi^-1(Q) <= mu`` (Dong, Roth and
Su 2022, section 2). So a P from below and a Q from above bound epsilon and mu from below. Both come from the exact
interval of Clopper and Pearson (1934), each side with half of the permitted error, as in Jagielski, Ullman and Oprea
2020 and, for mu, Nasr et al. 2023.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri
from scipy.stats import beta as beta_law

from quietmax.errors import InvalidInput

Parameter = Literal["epsilon", "mu"]

CONFIDENCE = 1 - 1e-6
"""Of every bound, unless another is asked for: a `refuted` is wrong in one audit of a million."""


def checked_confidence(confidence: float) -> float:
    """Return a confidence strictly between 0 and 1."""
    if not 0 < confidence < 1:
        raise InvalidInput(
            f"The confidence is {confidence}, but must lie strictly between 0 and 1; try 0.999999."
        )
    return confidence


def smallest_probability(happened: int, trials: int, error: float) -> float:
    """The lower end of the one-sided exact interval: the truth lies below it with probability at most ``error``.

    >>> round(smallest_probability(100, 100, 0.05), 4)
    0.9705
    """
    return float(beta_law.ppf(error, happened, trials - happened + 1)) if happened else 0.0


def largest_probability(happened: int, trials: int, error: float) -> float:
    """The upper end of the one-sided exact interval.

    >>> round(largest_probability(0, 100, 0.05), 4)
    0.0295
    """
    return float(beta_law.isf(error, happened + 1, trials - happened)) if happened < trials else 1.0


@dataclass(frozen=True)
class Counts:
    """How often an event happened in ``trials`` draws of each world; ``likely`` is where it was expected more often."""

    likely: int
    unlikely: int
    trials: int

    def epsilon_lower_bound(self, delta: float, confidence: float) -> float:
        """``ln((P - delta)/Q)``, P from below and Q from above, at least 0.

        >>> round(Counts(500, 0, 1000).epsilon_lower_bound(0.0, 0.95), 2)
        4.85
        """
        error = (1 - confidence) / 2
        numerator = smallest_probability(self.likely, self.trials, error) - delta
        denominator = largest_probability(self.unlikely, self.trials, error)
        return max(0.0, math.log(numerator / denominator)) if numerator > 0 else 0.0

    def mu_lower_bound(self, delta: float, confidence: float) -> float:
        """``Phi^-1(P - delta) - Phi^-1(Q)``, P from below and Q from above, at least 0.

        >>> round(Counts(841, 500, 1000).mu_lower_bound(0.0, 0.95), 2)
        0.82
        """
        error = (1 - confidence) / 2
        numerator = smallest_probability(self.likely, self.trials, error) - delta
        denominator = largest_probability(self.unlikely, self.trials, error)
        return max(0.0, float(ndtri(numerator) - ndtri(denominator))) if numerator > 0 else 0.0

    def lower_bound(self, parameter: Parameter, delta: float, confidence: float) -> float:
        """The bound on epsilon or on mu."""
        bound = self.epsilon_lower_bound if parameter == "epsilon" else self.mu_lower_bound
        return bound(delta, confidence)

    def to_json(self) -> dict[str, Any]:
        """The three numbers by name."""
        return {"likely": self.likely, "unlikely": self.unlikely, "trials": self.trials}


def approximate_lower_bounds(
    likely: NDArray[np.int64],
    unlikely: NDArray[np.int64],
    trials: int,
    parameter: Parameter,
    delta: float,
    confidence: float,
) -> NDArray[np.float64]:
    """The same bounds for many events at once, by Wilson's interval: good enough to choose an event by."""
    z = -float(ndtri((1 - confidence) / 2))

    def wilson(happened: NDArray[np.int64], sign: float) -> NDArray[np.float64]:
        share = happened / trials
        spread = z * np.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
        return np.asarray((share + z * z / (2 * trials) + sign * spread) / (1 + z * z / trials))

    tiny = 1e-300
    numerator = np.maximum(wilson(likely, -1.0) - delta, tiny)
    denominator = np.clip(wilson(unlikely, 1.0), tiny, 1.0)
    if parameter == "epsilon":
        return np.asarray(np.log(numerator / denominator))
    return np.asarray(ndtri(numerator) - ndtri(denominator))

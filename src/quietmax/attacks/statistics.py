"""What an answer says of its record: one number per answer, larger for members.

The same functions read a target's released answers and the shadow networks' plain ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quietmax.errors import InvalidInput
from quietmax.mechanisms import Answers

Floats = NDArray[np.float64]
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

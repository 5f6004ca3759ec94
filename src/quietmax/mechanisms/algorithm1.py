"""Algorithm 1 of the paper: noise on one sampled output neuron, as published, with what holds of it.

**No privacy is claimed for three or more classes.** Only one logit gets noise, so the differences of the others are
released exactly and distinguish neighbours (THEORY 2.1): the guarantee is `refuted`. For two classes the mechanism is
private if the given sensitivity is a true bound, which the published one is not, and then costs less than the paper
says (THEORY 2.2): the guarantee is `conditional`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from quietmax.accounting.costs import Analysis, Cost, GaussianCost, Measure, PureCost
from quietmax.accounting.guarantee import Guarantee
from quietmax.errors import InvalidInput
from quietmax.mechanisms.base import Answers, Floats, Noise, _check_name, _noised
from quietmax.models.training import Classifier, Model, softmax
from quietmax.noise.release import CLIP_STEPS, choose
from quietmax.noise.sources import NoiseSource
from quietmax.sensitivity.network import published_sensitivity

_NUMBERS = ("epsilon_sampling", "epsilon_neuron", "logit_sensitivity", "probability_sensitivity")


def budget_split(epsilon: float, classes: int, noise: Noise) -> float:
    """Return the paper's ``e_s = e_n``: ``eps/(2C+1)`` for Laplace noise, ``eps/sqrt(4C+1)`` for Gaussian."""
    return epsilon / (2 * classes + 1) if noise == "laplace" else epsilon / math.sqrt(4 * classes + 1)


def _claimed_epsilon(epsilon_sampling: float, epsilon_neuron: float, classes: int, noise: Noise) -> float:
    """Return what an answer costs in the paper: ``e_s + 2C*e_n`` (Laplace), ``sqrt(e_s^2 + 4C*e_n^2)`` (Gaussian)."""
    if noise == "laplace":
        return epsilon_sampling + 2 * classes * epsilon_neuron
    return math.sqrt(epsilon_sampling**2 + 4 * classes * epsilon_neuron**2)


@dataclass(frozen=True)
class Algorithm1:
    """The paper's mechanism. Parameters that are None are set from the model and the budget.

    Parameters
    ----------
    noise : {"gaussian", "laplace"}
        The noise on the sampled logit.
    epsilon_sampling : float or None
        The epsilon ``e_s`` of sampling the neuron.
    epsilon_neuron : float or None
        The epsilon ``e_n`` of the noise.
    logit_sensitivity : float or None
        Delta z. By default the published formula.
    probability_sensitivity : float or None
        Delta p. By default the published formula.
    analysis : {"published", "published-example", "proven"}
        How a budget becomes a total; see `quietmax.accounting.Budget.total`.

    Examples
    --------
    >>> from quietmax.noise import SeededNoise
    >>> mechanism = Algorithm1("laplace", 1 / 21, 1 / 21, logit_sensitivity=0.358, probability_sensitivity=1.0)
    >>> mechanism.guarantee(classes=10).status
    'refuted'
    >>> mechanism.release(np.zeros((2, 10)), SeededNoise(0)).probabilities.shape
    (2, 10)
    """

    name: ClassVar[str] = "algorithm1"
    noise: Noise = "gaussian"
    epsilon_sampling: float | None = None
    epsilon_neuron: float | None = None
    logit_sensitivity: float | None = None
    probability_sensitivity: float | None = None
    analysis: Analysis = "published"

    def __post_init__(self) -> None:
        _check_name(self, "noise", ("gaussian", "laplace"))
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InvalidInput(f"{name} must be a positive number or None, got {value}.")

    @property
    def measure(self) -> Measure:
        """Pure for Laplace noise, Gaussian for Gaussian noise."""
        return "pure" if self.noise == "laplace" else "gaussian"

    def prepared(self, model: Classifier, per_query: Cost) -> Algorithm1:
        """Return the mechanism with the budget split and the published sensitivities filled in.

        `per_query` is the cost of one query as the paper counts it. The published sensitivities exist for a `Model`
        only; for any other model they must be given.
        """
        epsilon = per_query.epsilon if isinstance(per_query, PureCost) else per_query.mu
        share = budget_split(epsilon, model.classes, self.noise)
        while _claimed_epsilon(share, share, model.classes, self.noise) > epsilon:
            share = math.nextafter(share, 0.0)
        chosen = replace(
            self,
            epsilon_sampling=share if self.epsilon_sampling is None else self.epsilon_sampling,
            epsilon_neuron=share if self.epsilon_neuron is None else self.epsilon_neuron,
        )
        if chosen.logit_sensitivity is None or chosen.probability_sensitivity is None:
            if not isinstance(model, Model):
                raise InvalidInput(
                    "logit_sensitivity and probability_sensitivity are required for a model of type "
                    f"{type(model).__name__}. The published formulas apply to networks that quietmax.train returned."
                )
            formulas = published_sensitivity(model)
            chosen = replace(
                chosen,
                logit_sensitivity=chosen.logit_sensitivity or formulas.logit.value,
                probability_sensitivity=chosen.probability_sensitivity or formulas.probability.value,
            )
        return chosen

    def cost(self, classes: int) -> Cost:
        """Return the cost of one query: ``2*e_n`` for two classes (THEORY 2.2), otherwise what the paper claims."""
        sampling, neuron, _, _ = self._numbers()
        spent = 2 * neuron if classes == 2 else _claimed_epsilon(sampling, neuron, classes, self.noise)
        return PureCost(spent) if self.noise == "laplace" else GaussianCost(spent)

    def guarantee(self, classes: int) -> Guarantee:
        """Return a guarantee: refuted for three or more classes, conditional on a true logit bound for two."""
        sampling, neuron, logit, _ = numbers = self._numbers()
        parameters: dict[str, Any] = {
            "mechanism": self.name,
            "noise": self.noise,
            "classes": classes,
            **dict(zip(_NUMBERS, numbers, strict=True)),
            "claimed_by_the_paper": _claimed_epsilon(sampling, neuron, classes, self.noise),
        }
        if classes == 2:
            return Guarantee.of(
                self.cost(classes),
                status="conditional",
                because="For two classes the released log-odds carry noise of the stated scale, if one record moves "
                "a logit by at most the stated sensitivity; the published formula is not such a bound "
                "(THEORY 2.2, 2.3).",
                parameters=parameters,
                assumptions=(f"One record moves any logit by at most {logit:g}.",),
            )
        return Guarantee.of(
            self.cost(classes),
            status="refuted",
            because="Only one logit is noised, so the differences of the others are released exactly and tell "
            "neighbouring training sets apart (THEORY 2.1).",
            parameters=parameters,
        )

    def release(self, logits: Floats, source: NoiseSource) -> Answers:
        """Draw answers: lines 8 to 13 of Algorithm 1 (lines 1 to 7 are the model's forward pass).

        All logits are rounded to the grid of the noise. Otherwise the digits of a logit below the grid would be
        released exactly, even for two classes. The logits have shape (..., classes).
        """
        epsilon_sampling, epsilon_neuron, logit_sensitivity, probability_sensitivity = self._numbers()
        values = np.asarray(logits, dtype=np.float64)
        if values.ndim < 2 or values.shape[-1] < 2:
            raise InvalidInput(
                f"Logits must have shape (queries, classes) with 2 or more classes, got {values.shape}."
            )
        z = values.reshape(-1, values.shape[-1])
        if not np.isfinite(z).all():
            raise InvalidInput("Logits must be finite, got NaN or infinity. Nothing was released.")
        query = np.arange(len(z))
        # Line 8: p <- Softmax(z)
        p = softmax(z)
        # Line 9: v <- Exp-DP, Pr[v] proportional to exp(e_s * p_v / (2 * Delta p))
        v = choose(p, epsilon=epsilon_sampling, range_sensitivity=2 * probability_sensitivity, source=source)
        # Line 10: z_v <- z_v + Dist(0, Delta z / e_n)
        sampled = z[query, v]
        cost = PureCost(epsilon_neuron) if self.noise == "laplace" else GaussianCost(epsilon_neuron)
        noised = _noised(sampled, cost, logit_sensitivity, source, coordinates=1)
        # Line 11: the other logits as they are, clipped where the noised one is
        limit = CLIP_STEPS * noised.step
        noisy = np.rint(np.clip(z, -limit, limit) / noised.step) * noised.step
        noisy[query, v] = noised.values
        # Line 12: p <- Softmax(noisy z); line 13: return p
        p = softmax(noisy).reshape(values.shape)
        return Answers(p.argmax(-1), p)

    def _numbers(self) -> tuple[float, float, float, float]:
        numbers = tuple(getattr(self, name) for name in _NUMBERS)
        if None in numbers:
            raise InvalidInput(
                "Algorithm1 cannot release: epsilon_sampling, epsilon_neuron, logit_sensitivity and "
                "probability_sensitivity must be set. A Predictor sets them."
            )
        return numbers

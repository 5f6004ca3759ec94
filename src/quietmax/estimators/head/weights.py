"""A fitted head: a classifier on public features, bounds on its scores, and what is guaranteed of it.

The guarantees are computed from the public facts of the training alone, after training and when a folder is opened.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quietmax.accounting.costs import GaussianCost, root_rounded_up
from quietmax.accounting.guarantee import Guarantee, Unit
from quietmax.data.encoding import Encoding
from quietmax.errors import InvalidInput
from quietmax.estimators.blocks import ROWS_AT_ONCE, Floats
from quietmax.estimators.head.exact_sums import GRID, clipped_rows, unit_rows, whitened_rows
from quietmax.estimators.head.solver import (
    MeanCrossEntropy,
    Tilted,
    certifiable_tolerance,
    max_solution_norm,
    output_sensitivity,
)
from quietmax.estimators.head.training import (
    LINEAR,
    STEPS_ROUNDED,
    TILTED_TOLERANCE,
    gradient_sensitivity,
    output_plan,
)
from quietmax.estimators.training_set import (
    OWN_MAP,
    SEEDED_WEIGHTS,
    SETTINGS_PUBLIC,
    Condition,
    check_choice,
    code_before,
    data_assumptions,
    data_conditions,
    map_assumptions,
    weakened,
)
from quietmax.mechanisms.base import proves_bounds
from quietmax.models.training import LogitClassifier
from quietmax.noise.sources import EXACT
from quietmax.sensitivity import certified
from quietmax.sensitivity.certified import ScoreBounds, Sensitivity

_SLACK = 2.0**-20


@dataclass(frozen=True, eq=False)
class HeadWeights(LogitClassifier):
    """The classifier `scores(f) = W (f - m, b) / ||(f - m, b)||` of public features f, clipped to a radius.

    If the weights were released, everything computed here is post-processing.
    """

    weights: Floats  # W; the last column is for the constant feature b
    centre: Floats  # m
    bias: float  # b
    radius: float  # Features are clipped to this length and divided by it
    whitening: Floats | None = field(default=None, kw_only=True)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.weights)

    def scores(self, features: NDArray[np.floating]) -> Floats:
        """Compute the logits."""
        inputs = np.asarray(features, dtype=np.float32)
        logits = np.empty((len(inputs), self.classes))
        for start in range(0, len(inputs), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            rows = unit_rows(clipped_rows(inputs[part], self.radius), self.centre, self.bias)
            if self.whitening is not None:
                rows = whitened_rows(rows, self.whitening)
            logits[part] = rows @ self.weights.T
        return logits

    def predict_proba(self, features: NDArray[np.floating]) -> Floats:
        """Compute class probabilities."""
        logits = self.scores(features)
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))


@dataclass(frozen=True, eq=False)
class PrivateHeadWeights(HeadWeights):
    """Weights that were not released, with bounds on their scores: a `Predictor` may answer from them.

    The bounds are proven for weights that `PrivateHead.fit` made or that were opened from a model folder. For weights
    that you make yourself, here or by `certified`, they are an assumption.
    """

    bounds: ScoreBounds  # How far one record or person moves the scores of any query
    _fitted: bool = field(default=False, init=False, repr=False)

    @classmethod
    def certified(
        cls, head: HeadWeights, sensitivity: Sensitivity, *, max_norm: float, unit: Unit = "record"
    ) -> PrivateHeadWeights:
        """Add the bounds that follow from the sensitivity of the weights, widened for the rounding of the scores.

        A score computed in float64 is off by at most `(d + 2) 2^-53 ||W||`, twice that between neighbours, doubled to
        be safe.
        """
        length = math.sqrt(float(np.square(head.weights).sum()))
        weights = head.weights * min(1.0, max_norm / max(length, max_norm))
        rounding = 4 * (head.weights.shape[1] + 2) * 2.0**-53 * max_norm * math.sqrt(head.classes)
        widened = Sensitivity(
            sensitivity.value * (1 + _SLACK) + rounding, sensitivity.basis, sensitivity.because
        )
        bounds = certified.score_bounds(widened, classes=head.classes, unit=unit)
        return cls(weights, head.centre, head.bias, head.radius, bounds, whitening=head.whitening)

    @classmethod
    def _of_fit(
        cls, head: HeadWeights, sensitivity: Sensitivity, *, max_norm: float, unit: Unit = "record"
    ) -> PrivateHeadWeights:
        """Return weights with proven bounds; only for weights whose sensitivity this library derived itself."""
        private = cls.certified(head, sensitivity, max_norm=max_norm, unit=unit)
        object.__setattr__(private, "_fitted", True)
        return private


proves_bounds(PrivateHeadWeights, when=lambda head: head._fitted)


Facts = Mapping[str, Any]
"""The public facts of a training by name: the ``parameters`` of its guarantee."""


def weights_guarantee(facts: Facts, *, own_map: bool, encoding: Encoding | None = None) -> Guarantee:
    """Return the guarantee of released weights."""
    because = f"Gaussian mechanism on a certified minimiser. {weight_sensitivity(facts).because}"
    if facts["training_method"] == "gradient":
        because = "Gaussian mechanisms on exact clipped gradient sums compose to mu (THEORY 3.1)."
    parts = (facts["mu_size"], facts["mu_centring"], facts.get("mu_moments"))
    first = [GaussianCost(mu).amount for mu in parts if mu is not None]
    guarantee = Guarantee.of(
        GaussianCost(root_rounded_up(sum(first, _training_amount(facts)))),
        status="proven",
        because=because,
        parameters=facts,
        assumptions=_assumptions(facts, encoding),
        unit=facts.get("unit", "record"),
    )
    seeded = () if facts["noise_source"] == EXACT.describe() else (SEEDED_WEIGHTS,)
    return weakened(guarantee, *_conditions(facts, own_map, encoding), *seeded)


def _training_amount(facts: Facts) -> Fraction:
    """Return mu^2 of all releases of the training itself."""
    whole = GaussianCost(facts["mu_training"]).amount
    if facts["training_method"] != "gradient":
        return whole
    if "schedule" not in facts:  # A model made before the learning rate fell: the same noise in all steps.
        steps = facts["steps"]
        if not (isinstance(steps, int) and steps >= 1):
            raise InvalidInput(f"steps must be an integer of at least 1, got {steps!r}.")
        return steps * GaussianCost(facts["mu_training"] / math.sqrt(steps)).amount
    check_choice("schedule", facts["schedule"], (LINEAR,))
    return whole * STEPS_ROUNDED


def query_guarantee(
    answers: Guarantee, facts: Facts, *, own_map: bool, encoding: Encoding | None = None
) -> Guarantee:
    """Return the guarantee of all answers from weights that are not released."""
    guarantee = Guarantee.of(
        answers.cost,
        status=answers.status,
        because=answers.because,
        parameters={**answers.parameters, **facts},
        assumptions=(*answers.assumptions, *_assumptions(facts, encoding)),
        unit=facts.get("unit", "record"),
    )
    return weakened(guarantee, *_conditions(facts, own_map, encoding))


def _assumptions(facts: Facts, encoding: Encoding | None) -> tuple[str, ...]:
    """Return what every guarantee of a head assumes."""
    data = data_assumptions(facts.get("unit", "record"), encoding)
    return (SETTINGS_PUBLIC, *data, *map_assumptions(facts["features"]))


def _conditions(facts: Facts, own_map: bool, encoding: Encoding | None) -> tuple[Condition, ...]:
    """Return the conditions of user code and of what was read off the private records."""
    data = data_conditions(
        classes_declared=facts["classes_declared"] is True,
        encoding=encoding,
        code_before=code_before(facts),
    )
    return (OWN_MAP, *data) if own_map else data


def weight_sensitivity(facts: Facts) -> Sensitivity:
    """Return how far one record moves what is released: a gradient sum, or the minimiser of the output method."""
    if facts["training_method"] == "gradient":
        # Heads of earlier versions have no fact `grid`; they could not have more than 2^22 records.
        grid = facts.get("grid", GRID)
        return gradient_sensitivity(facts["max_grad_norm"], facts["classes"], facts["dimension"], grid)
    return output_sensitivity(_objective(facts), facts["classes"], facts["tolerance"])


def max_weight_norm(facts: Facts) -> float:
    """Return a public bound on the length of the minimiser of the output method."""
    return max_solution_norm(_objective(facts), facts["classes"], float(facts["tolerance"]))


def least_tolerance(facts: Facts) -> float:
    """Return the tolerance of the output method with these facts, which float64 can certify."""
    wanted = TILTED_TOLERANCE
    if facts["loss"] != "convexified":
        wanted = output_plan(facts["declared_size"], 1.0, regularisation=facts["regularisation"]).tolerance
    repeated = facts.get("unit", "record") == "person"
    return certifiable_tolerance(
        _objective(facts), facts["dimension"], facts["classes"], wanted, repeated=repeated
    )


def _objective(facts: Facts) -> MeanCrossEntropy | Tilted:
    """Return the objective that was minimised."""
    if facts["loss"] == "convexified":
        return Tilted(facts["alpha"], facts["mass"], facts["regularisation"])
    return MeanCrossEntropy(facts["declared_size"], facts["regularisation"])

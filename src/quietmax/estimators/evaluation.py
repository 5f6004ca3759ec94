"""An accuracy that may be published: noisy counts of right and wrong answers, and what follows from them (THEORY 3.9).

Two tables are counted on the evaluated people: true class by predicted class, and confidence by right or wrong. A
person with k rows adds 1/k for each row, rounded down to a multiple of 2^-24. What one person adds to a table is not
negative and sums to at most 1, so its L2 length is at most 1, and at most sqrt(2) for both tables together. Gaussian
noise on all counts gives mu-Gaussian privacy. Everything else is computed from the noisy counts.

Two tables have C^2 + 2B cells for C classes and B bins of confidence. One table of true class, predicted class and
confidence has C^2 B cells, and the noise of a sum grows with the number of its cells. For B > 2, every published figure
is more accurate with two tables, although each of them has half of mu^2.

Each row is answered on its own, in calls of equal shape. So the cell of a row depends on that row alone (THEORY 3.8).

Who is counted, and the account of what evaluations cost, are in `quietmax.estimators.evaluate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from quietmax.accounting.costs import (
    GaussianCost,
    decimal,
    delta_of,
    epsilon_of,
    mu_of,
    root_rounded_down,
    root_rounded_up,
    rounded_up,
)
from quietmax.accounting.guarantee import Guarantee, Unit
from quietmax.errors import BudgetExhausted, InvalidInput
from quietmax.estimators.training_set import Condition, weakened
from quietmax.noise.release import release_gaussian
from quietmax.noise.sources import EXACT, ExactNoise, NoiseSource
from quietmax.spending import new_identity

Counts = NDArray[np.int64]
Composition = Literal["parallel", "sequential"]

NOT_FOR_PUBLICATION = (
    "Not for publication: computed from private records without noise, so no guarantee covers it."
)
BINS = 5
"""Number of bins of confidence."""
CONFIDENCE = 0.95
"""Every interval covers the true value with this probability, each on its own."""
_SHARE = 2**24
"""A person's rows share this many units; sums of units below 2^53 are exact in float64."""
_MOST_UNITS = 2**53
_SENSITIVITY = math.nextafter(math.sqrt(2), 2)
"""The L2 length of what one person adds to the two tables, rounded up."""
_SIZE_ERROR = 0.002
"""The part of 1 - CONFIDENCE that is left for the bound on a noisy number of people."""
_Z_SIZE = float(ndtri(1 - _SIZE_ERROR))
_Z = float(ndtri(1 - (1 - CONFIDENCE - _SIZE_ERROR) / 2))
_Z_COUNT = float(ndtri((1 + CONFIDENCE) / 2))
_CONTINUITY = 0.5
Assumed = Literal["disjoint", "seeded", "names", "encoding"]
_CONDITIONS: dict[Assumed, Condition] = {
    "disjoint": Condition(
        "Who was held out was declared, and not computed by the library (THEORY 3.8).",
        (
            "No evaluated person is in the training set, and on which side a person is does not depend on other "
            "people.",
        ),
    ),
    "seeded": Condition(
        "The noise of the evaluation is seeded and in floating point, for experiments only (THEORY 3.5).",
        ("Nobody knows the seed, and nobody looks at the low digits of the counts.",),
    ),
}
_ASSUMPTIONS: dict[Assumed, str] = {
    "names": "The evaluated people have the same names as in training.",
    "encoding": "The evaluated records are encoded as in training.",
}


# --- figures ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A figure with its interval, which covers sampling and noise.

    >>> print(Estimate(0.8612, 0.8531, 0.8689))
    0.861 (0.853 to 0.869)
    """

    value: float | None  # None: the counts are too small for the noise, so nothing is known
    low: float  # The 95% interval of the true value
    high: float

    def __str__(self) -> str:
        if self.value is None:
            return "unknown"
        if self.value == self.low == 0:
            return f"below {math.ceil(1000 * self.high) / 1000:.3f}"
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def _ratio(right: float, wrong: float, right_noise: float, wrong_noise: float) -> Estimate:
    """Estimate the share of right answers from two noisy counts, with an interval that is honest for small counts.

    The interval contains each share p that a test does not reject: ``right - p (right + wrong)`` has mean 0 and at
    most the variance ``n p (1 - p) + (1 - p)^2 s_r^2 + p^2 s_w^2`` for n people and noise of standard deviations s_r
    and s_w (Wilson's interval, with the terms of Fieller's for the noise). The true n is unknown: its place takes an
    upper bound that holds with probability 0.998. A continuity correction of half a person keeps the interval valid
    for few people and for shares near 0 and 1. People with several rows add fractions, which vary no more.
    """
    size = right + wrong
    right_variance, wrong_variance = right_noise**2, wrong_noise**2
    at_most = max(size, 0.0) + _Z_SIZE * math.sqrt(right_variance + wrong_variance)
    square = size**2 + _Z**2 * (at_most - right_variance - wrong_variance)
    ends = []
    for side, count, noise in ((-1, right, right_noise), (1, wrong, wrong_noise)):
        shifted = right + side * _CONTINUITY
        half = shifted * size + _Z**2 * (at_most / 2 - right_variance)
        under_root = half**2 - square * (shifted**2 - _Z**2 * right_variance)
        if size <= 0 or square <= 0 or under_root < 0:
            return Estimate(None, 0.0, 1.0)
        if count - _CONTINUITY <= _Z * noise:  # so few that none at all is not rejected
            ends.append(float(side > 0))
        else:
            ends.append(min(max((half + side * math.sqrt(under_root)) / square, 0.0), 1.0))
    low, high = ends
    if low <= 0 and high >= 1:
        return Estimate(None, 0.0, 1.0)
    return Estimate(min(max(right / size, low), high), low, high)


@dataclass(frozen=True)
class Bin:
    """The answers whose confidence lies in one interval."""

    low: float  # The interval. The confidence of an answer is the probability that the model gives to it
    high: float
    right: Estimate  # The share of right answers among them


@dataclass(frozen=True)
class Evaluation:
    """How good a model is, from noisy counts: publishable, with a guarantee for the people who were counted.

    Parameters
    ----------
    classes : tuple of str
        The class names.
    confusion : tuple of tuples of float
        Noisy number of people by true class (rows) and predicted class (columns).
    calibration : tuple of pairs of float
        Noisy number of people with right and with wrong answers, by bin of confidence.
    noise : float
        The standard deviation of the noise of each count. 0: the counts are exact and not for publication.
    unit : {"record", "person"}
        What counts as one: a row, or all rows of a person.
    mu : float or None
        What the counts cost the people who were counted.
    composition : {"parallel", "sequential"}
        "parallel": they were held out of training. "sequential": they may be in the training set too.
    guarantee : Guarantee or None
        What is guaranteed of the model and its evaluations so far together. None: exact counts.

    Attributes
    ----------
    size : Estimate
        The number of people who were counted; the interval covers the noise.
    accuracy : Estimate
        The share of right answers.
    recall : dict of str to Estimate
        The share of right answers among the people of each class.
    bins : tuple of Bin
        The calibration curve.
    margin : float
        Half the width of the 95% interval of each noisy count.
    cells : tuple of tuples of Estimate
        The confusion matrix with an interval for each cell, which covers the noise.

    Examples
    --------
    >>> counts = ((900.2, 98.1), (151.7, 848.9))
    >>> confidence = ((310.4, 102.3), (522.9, 99.8), (915.1, 45.6))
    >>> evaluation = Evaluation(("no", "yes"), counts, confidence, 5.3, "person", 0.27, "parallel", None)
    >>> print(evaluation.accuracy)
    0.875 (0.859 to 0.890)
    >>> print(evaluation.recall["yes"])
    0.848 (0.822 to 0.872)
    """

    classes: tuple[str, ...]
    confusion: tuple[tuple[float, ...], ...]
    calibration: tuple[tuple[float, float], ...]
    noise: float
    unit: Unit
    mu: float | None
    composition: Composition
    guarantee: Guarantee | None

    @property
    def exact(self) -> bool:
        """Whether the counts have no noise; then nothing of this may be published."""
        return self.noise == 0

    @cached_property
    def _totals(self) -> tuple[float, float, float, float]:
        """Noisy numbers of right and of wrong answers, and the standard deviations of their noise.

        Both tables state them. Their average is weighted by the inverse of the number of cells that are added up,
        which is the inverse of the variance of the noise.
        """
        classes = len(self.classes)
        table = np.asarray(self.confusion)
        totals = [float(np.trace(table)), float(table.sum() - np.trace(table))]
        cells: list[float] = [classes, classes * (classes - 1)]
        other, bins = np.asarray(self.calibration).sum(axis=0), len(self.calibration)
        for side in (0, 1):
            weight = bins / (bins + cells[side])
            totals[side] = weight * totals[side] + (1 - weight) * float(other[side])
            cells[side] = cells[side] * bins / (cells[side] + bins)
        right, wrong = totals
        return right, wrong, self.noise * math.sqrt(cells[0]), self.noise * math.sqrt(cells[1])

    @property
    def size(self) -> Estimate:
        """The number of people who were counted; the interval covers the noise."""
        right, wrong, right_noise, wrong_noise = self._totals
        size, spread = right + wrong, _Z_COUNT * math.hypot(right_noise, wrong_noise)
        return Estimate(max(size, 0.0), max(size - spread, 0.0), max(size + spread, 0.0))

    @property
    def accuracy(self) -> Estimate:
        """The share of right answers."""
        return _ratio(*self._totals)

    @property
    def recall(self) -> dict[str, Estimate]:
        """The share of right answers among the people of each class."""
        others = self.noise * math.sqrt(len(self.classes) - 1)
        return {
            name: _ratio(row[number], sum(row) - row[number], self.noise, others)
            for number, (name, row) in enumerate(zip(self.classes, self.confusion, strict=True))
        }

    @property
    def bins(self) -> tuple[Bin, ...]:
        """The calibration curve."""
        edges = np.linspace(1 / len(self.classes), 1, len(self.calibration) + 1)
        return tuple(
            Bin(float(low), float(high), _ratio(*counts, self.noise, self.noise))
            for low, high, counts in zip(edges, edges[1:], self.calibration, strict=False)
        )

    @property
    def margin(self) -> float:
        """Half the width of the 95% interval of each noisy count."""
        return _Z_COUNT * self.noise

    @property
    def cells(self) -> tuple[tuple[Estimate, ...], ...]:
        """The confusion matrix with an interval for each cell, which covers the noise."""
        return tuple(
            tuple(
                Estimate(count, max(count - self.margin, 0.0), max(count + self.margin, 0.0)) for count in row
            )
            for row in self.confusion
        )

    def remarks(self) -> list[str]:
        """Return what a reader of the figures must know, as plain sentences.

        Examples
        --------
        >>> counts, confidence = ((900.0, 98.0), (151.0, 848.0)), ((310.0, 12.0), (720.0, 45.0), (700.0, 210.0))
        >>> Evaluation(("no", "yes"), counts, confidence, 5.3, "person", 0.27, "parallel", None).remarks()[-1]
        'The probabilities are too confident: with 0.83 to 1.00, only 0.769 (0.738 to 0.798) of the answers are right.'
        """
        found = []
        if not self.exact:
            found.append(
                f"Every count has noise: it is within \u00b1{math.ceil(self.margin):,} of the true one with 95% "
                "confidence, and it can be negative. The cells do not add up to the accuracy and the number of "
                f"{'people' if self.unit == 'person' else 'records'}, which average two noisy tables."
            )
        overconfident = "; ".join(
            f"with {each.low:.2f} to {each.high:.2f}, only {each.right}"
            for each in self.bins
            if each.right.value is not None and each.right.high < each.low
        )
        if overconfident:
            found.append(f"The probabilities are too confident: {overconfident} of the answers are right.")
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the counts and all figures as JSON values. Exact counts are marked as not for publication."""
        return {
            "publishable": not self.exact,
            **({"caveat": NOT_FOR_PUBLICATION} if self.exact else {}),
            "unit": self.unit,
            "confidence": CONFIDENCE,
            "size": asdict(self.size),
            "accuracy": asdict(self.accuracy),
            "recall": {name: asdict(estimate) for name, estimate in self.recall.items()},
            "bins": [asdict(each) for each in self.bins],
            "classes": list(self.classes),
            "confusion": [list(row) for row in self.confusion],
            "cells": [[asdict(cell) for cell in row] for row in self.cells],
            "remarks": self.remarks(),
            "calibration": [list(pair) for pair in self.calibration],
            "noise": self.noise,
            "mu": self.mu,
            "composition": self.composition,
            "guarantee": None if self.guarantee is None else self.guarantee.to_json(),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Evaluation:
        """Return the evaluation that `to_json` wrote. Figures are computed again from the counts."""
        evaluation = cls(
            classes=tuple(map(str, record["classes"])),
            confusion=tuple(tuple(map(float, row)) for row in record["confusion"]),
            calibration=tuple((float(right), float(wrong)) for right, wrong in record["calibration"]),
            noise=float(record["noise"]),
            unit=record["unit"],
            mu=float(record["mu"]),
            composition=record["composition"],
            guarantee=Guarantee.from_json(record["guarantee"]),
        )
        classes = len(evaluation.classes)
        numbers = np.array([*sum(evaluation.confusion, ()), *sum(evaluation.calibration, ())])
        if (
            classes < 2
            or len(evaluation.calibration) != BINS
            or [len(row) for row in evaluation.confusion] != [classes] * classes
            or not np.isfinite(numbers).all()
            or evaluation.unit not in ("record", "person")
            or evaluation.composition not in ("parallel", "sequential")
            or not 0 < cast(float, evaluation.mu) < math.inf
            # Noise of this size is what the stated mu pays for; rounding on the grid adds less than 1%.
            or not 0.99 < evaluation.noise * cast(float, evaluation.mu) / _SENSITIVITY < 1.01
        ):
            raise ValueError("not a publishable evaluation")
        return evaluation


# --- counting -----------------------------------------------------------------------------------------------------


def _free_probabilities(classifier: Any, features: NDArray[np.float32], classes: int) -> NDArray[np.float64]:
    """Answer each row on its own, so that no other row changes its rounding."""
    row = np.empty((1, features.shape[1]), dtype=np.float32)  # one place in memory for all rows
    probabilities = np.empty((len(features), classes))
    for number, values in enumerate(features):
        row[0] = values
        probabilities[number] = classifier.predict_proba(row)[0]
    return probabilities


def _binned_answers(probabilities: NDArray[np.float64]) -> tuple[Counts, Counts]:
    """Return the predicted class of each row, and the bin of its confidence."""
    classes = probabilities.shape[1]
    predicted = probabilities.argmax(axis=1)
    confidence = probabilities[np.arange(len(probabilities)), predicted]
    scaled = (confidence - 1 / classes) / (1 - 1 / classes) * BINS
    return predicted, np.clip(np.floor(scaled), 0, BINS - 1).astype(np.int64)


def _count_answers(
    labels: Counts, predicted: Counts, bins: Counts, rows_of_person: Counts | None, classes: int
) -> Counts:
    """Count answers in units of 2^-24 people: the table of classes, then that of confidence. The sums are exact."""
    shares = np.full(len(labels), _SHARE) if rows_of_person is None else _SHARE // rows_of_person
    counts = np.zeros(classes**2 + 2 * BINS, dtype=np.int64)
    np.add.at(counts, labels * classes + predicted, shares)
    np.add.at(counts, classes**2 + 2 * bins + (labels != predicted), shares)
    return counts


# --- what it costs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvaluationCharge:
    """What one evaluation cost the people who were counted."""

    mu: float  # The Gaussian cost
    composition: Composition  # "parallel": they were held out of training
    assumes: tuple[Assumed, ...] = ()
    id: str = field(default_factory=new_identity)  # A random id of the evaluation
    reserved: bool = (
        False  # Whether nothing was published: the evaluation that is free belongs to another copy
    )
    result: Evaluation | None = None  # The published figures, unless it is reserved


def _evaluation_mu(
    training: Guarantee,
    charges: Sequence[EvaluationCharge],
    composition: Composition,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    mu: float | None = None,
) -> float:
    """Return the mu of the next evaluation."""
    if mu is not None and epsilon is not None:
        raise InvalidInput("Only one of mu and epsilon can be given.")
    if delta is not None and epsilon is None:
        raise InvalidInput("`delta` requires `epsilon`.")
    if mu is not None:
        return GaussianCost(mu).mu
    if epsilon is not None:
        return mu_of(epsilon, 1e-5 if delta is None else delta)
    if composition == "sequential":
        raise InvalidInput(
            "The evaluated people may be in the training set, so the evaluation costs them something in addition to "
            "the training: a budget is required (`epsilon`, `delta`). For people who were held out it is free."
        )
    found = _free_mu(training, charges)
    if found < 1e-3 * _as_gaussian(training).mu:
        spent = (
            "The model was copied or saved before, and only the first one may evaluate the holdout for free."
            if any(each.reserved for each in charges)
            else "The evaluations of this holdout have spent as much as the training."
        )
        raise BudgetExhausted(
            f"{spent} A further evaluation requires a budget (`epsilon`, `delta`) and weakens the guarantee of the "
            "model and its evaluations together."
        )
    return found


def _free_mu(training: Guarantee, charges: Sequence[EvaluationCharge]) -> float:
    """Return the mu that evaluations of held-out people may still cost without weakening the guarantee of the model."""
    left = _as_gaussian(training).amount - _amount(charges, "parallel")
    return root_rounded_down(left) if left > 0 else 0.0


def _as_gaussian(training: Guarantee) -> GaussianCost:
    """Return the mu up to which an evaluation of held-out people does not weaken the guarantee of the model."""
    if training.definition == "approximate":
        return GaussianCost(mu_of(cast(float, training.epsilon), cast(float, training.delta)))
    return training.cost.as_gaussian()


def _amount(charges: Sequence[EvaluationCharge], composition: Composition) -> Fraction:
    """Return the sum of the squared mus of evaluations."""
    return sum(
        (GaussianCost(each.mu).amount for each in charges if each.composition == composition), Fraction(0)
    )


def composed_guarantee(training: Guarantee, charges: Sequence[EvaluationCharge]) -> Guarantee:
    """Return what is guaranteed of a model and its evaluations together.

    A person of the training set is charged for the training, a person of the holdout for the evaluations of the
    holdout, and everybody for the other evaluations: ``mu^2 = max(mu_training^2, sum mu_parallel^2) + sum
    mu_sequential^2`` (THEORY 3.8). A pure guarantee counts by its Gaussian cost. For an (epsilon, delta) guarantee,
    evaluations of the holdout count as (epsilon, delta) at the same delta, and other evaluations are added.
    """
    parallel, sequential = _amount(charges, "parallel"), _amount(charges, "sequential")
    because = (
        f"{training.because} Evaluation: Gaussian mechanism on counts to which one {training.unit} adds at most 1 "
        "(THEORY 3.9)."
    )
    if parallel:
        because += " The holdout is not in the training set: parallel composition (THEORY 3.8)."
    if any(each.reserved for each in charges):
        because += " The evaluation that is free is left to another copy of the model."
    if sequential:
        because += " The evaluated people may be in the training set: their costs add up (THEORY 3.6)."
    parameters = {
        "training": {
            name: value
            for name in ("definition", "epsilon", "mu", "delta")
            if (value := getattr(training, name)) is not None
        },
        "evaluations": [
            {"mu": each.mu, "composition": each.composition, **({"reserved": True} if each.reserved else {})}
            for each in charges
        ],
    }
    assumed = {name for each in charges for name in each.assumes}
    assumptions = (
        *training.assumptions,
        *(text for name, text in _ASSUMPTIONS.items() if name in assumed),
    )
    common: dict[str, Any] = {"because": because, "parameters": parameters, "assumptions": assumptions}
    if training.definition == "approximate":
        claimed, delta = cast(float, training.epsilon), cast(float, training.delta)
        holdout = root_rounded_up(parallel)
        if parallel and delta_of(holdout, claimed) > delta:
            claimed = epsilon_of(holdout, delta)
        if sequential:
            added = decimal(claimed) + decimal(epsilon_of(root_rounded_up(sequential), delta))
            claimed, delta = rounded_up(added), rounded_up(2 * decimal(delta))
        composed = replace(training, epsilon=claimed, delta=delta, **common)
    else:
        total = max(training.cost.as_gaussian().amount, parallel) + sequential
        composed = replace(training, definition="gaussian", epsilon=None, mu=root_rounded_up(total), **common)
    return weakened(composed, *(condition for name, condition in _CONDITIONS.items() if name in assumed))


# --- evaluating ---------------------------------------------------------------------------------------------------


def _exact_evaluation(counts: Counts, classes: Sequence[object], unit: Unit) -> Evaluation:
    """Return the owner's exact figures. They are not for publication."""
    return _evaluation(counts / _SHARE, classes, noise=0.0, unit=unit, composition="sequential")


def _evaluation(
    counts: NDArray[np.float64],
    classes: Sequence[object],
    *,
    mu: float | None = None,
    guarantee: Guarantee | None = None,
    **fields: Any,
) -> Evaluation:
    """Return the evaluation of what `_count_answers` counted."""
    number = len(classes)
    confusion, calibration = counts[: number**2].reshape(number, number), counts[number**2 :].reshape(-1, 2)
    return Evaluation(
        classes=tuple(map(str, classes)),
        confusion=tuple(tuple(row) for row in confusion.tolist()),
        calibration=tuple((right, wrong) for right, wrong in calibration.tolist()),
        mu=mu,
        guarantee=guarantee,
        **fields,
    )


def _noisy_evaluation(
    counts: Counts,
    classes: Sequence[object],
    training: Guarantee,
    charges: Sequence[EvaluationCharge],
    source: NoiseSource = EXACT,
) -> Evaluation:
    """Draw the noise of an evaluation, the last of the charges, and return the publishable figures."""
    charge = charges[-1]
    if not (type(source) is ExactNoise and source.exact) and "seeded" not in charge.assumes:
        raise InvalidInput("An evaluation with seeded noise must be charged as one that assumes 'seeded'.")
    released = release_gaussian(
        np.minimum(counts, _MOST_UNITS) / _SHARE, sensitivity=_SENSITIVITY, mu=charge.mu, source=source
    )
    return _evaluation(
        released.values,
        classes,
        noise=released.scale,
        unit=training.unit,
        mu=charge.mu,
        composition=charge.composition,
        guarantee=composed_guarantee(training, charges),
    )

"""An accuracy that may be published: noisy counts of right and wrong answers, and what follows from them (THEORY 3.9).

Two tables are counted on the evaluated people: true class by predicted class, and confidence by right or wrong. A
person with k rows adds 1/k for each row, rounded down to a multiple of 2^-24. What one person adds to a table is not
negative and sums to at most 1, so its L2 length is at most 1, and at most sqrt(2) for both tables together. Gaussian
noise on all counts gives mu-Gaussian privacy. Everything else is computed from the noisy counts.

Two tables have C^2 + 2B cells for C classes and B bins of confidence. One table of true class, predicted class and
confidence has C^2 B cells, and the noise of a sum grows with the number of its cells. For B > 2, every published figure
is more accurate with two tables, although each of them has half of mu^2.

Each row is answered on its own, in calls of equal shape. So the cell of a row depends on that row alone (THEORY 3.8).

People who were held out of training are not in the training set. For them, the model is post-processing of other
people's records, and for the people of the training set, the evaluation is: the two together are as private as the
weaker of them (parallel composition). Anybody else may be in both, and the two compose.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import ndtri
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from quietmax._io import atomic_write
from quietmax.accounting.conversions import (
    decimal,
    delta_of,
    epsilon_of,
    mu_of,
    root_rounded_down,
    root_rounded_up,
    rounded_up,
)
from quietmax.accounting.costs import GaussianCost
from quietmax.accounting.guarantee import Guarantee
from quietmax.data.encoding import Encoding
from quietmax.data.records import Holdout, Records, is_held_out
from quietmax.data.tables import as_frame, person_names, person_type
from quietmax.errors import BudgetExhausted, DataUnavailable, InvalidInput, QuietmaxError
from quietmax.estimators.training_set import Persons, queries
from quietmax.estimators.validation import Condition, alike, checked_records, class_numbers, weakened
from quietmax.noise.release import release_gaussian
from quietmax.noise.sources import EXACT, ExactNoise, NoiseSource, SeededNoise
from quietmax.predictor import Predictor
from quietmax.spending import DESCRIPTION_FILE, OwnProcess, new_identity

if TYPE_CHECKING:
    from quietmax.estimators.serialization import PrivateModel

Counts = NDArray[np.int64]
Composition = Literal["parallel", "sequential"]

NOT_FOR_PUBLICATION = (
    "Not for publication: computed from private records without noise, so no guarantee covers it."
)
WEIGHTS_FILE = "weights.safetensors"
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
PAID_PER_ANSWER = (
    "A model that is paid per answer cannot be evaluated: what the answers cost, and which answers are free "
    "afterwards, would tell who was evaluated. Train a head that releases its weights, or with DP-SGD, to publish an "
    "accuracy; or compare the answers of `predict` for people whose records are public."
)
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

    Parameters
    ----------
    value : float or None
        The estimate. None: the counts are too small for the noise, so nothing is known.
    low, high : float
        The 95% interval of the true value.

    Examples
    --------
    >>> print(Estimate(0.8612, 0.8531, 0.8689))
    0.861 (0.853 to 0.869)
    """

    value: float | None
    low: float
    high: float

    def __str__(self) -> str:
        return "unknown" if self.value is None else f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"

    def to_json(self) -> dict[str, float | None]:
        """Return the fields by name."""
        return {"value": self.value, "low": self.low, "high": self.high}


def ratio(right: float, wrong: float, right_noise: float, wrong_noise: float) -> Estimate:
    """Estimate the share of right answers from two noisy counts, with an interval that is honest for small counts.

    The interval contains each share p that a test does not reject: ``right - p (right + wrong)`` has mean 0 and at
    most the variance ``n p (1 - p) + (1 - p)^2 s_r^2 + p^2 s_w^2`` for n people and noise of standard deviations s_r
    and s_w (Wilson's interval, with the terms of Fieller's for the noise). The true n is unknown: its place takes an
    upper bound that holds with probability 0.998. A continuity correction of half a person keeps the interval valid
    for few people and for shares near 0 and 1. People with several rows add fractions, which vary no more.

    Parameters
    ----------
    right, wrong : float
        The noisy counts.
    right_noise, wrong_noise : float
        The standard deviations of their noise; 0 for exact counts.

    Returns
    -------
    Estimate
        From 0 to 1. If the counts do not exceed the noise, the interval is all of it and there is no value.

    Examples
    --------
    >>> print(ratio(1718.0, 280.0, 7.0, 7.0))
    0.860 (0.842 to 0.876)
    >>> print(ratio(2.0, 3.0, 7.0, 7.0))
    unknown
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
    """The answers whose confidence lies in one interval.

    Parameters
    ----------
    low, high : float
        The interval. The confidence of an answer is the probability that the model gives to it.
    right : Estimate
        The share of right answers among them. The model is calibrated if it lies between `low` and `high`.
    """

    low: float
    high: float
    right: Estimate


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
    unit: Literal["record", "person"]
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
        return ratio(*self._totals)

    @property
    def recall(self) -> dict[str, Estimate]:
        """The share of right answers among the people of each class."""
        others = self.noise * math.sqrt(len(self.classes) - 1)
        return {
            name: ratio(row[number], sum(row) - row[number], self.noise, others)
            for number, (name, row) in enumerate(zip(self.classes, self.confusion, strict=True))
        }

    @property
    def bins(self) -> tuple[Bin, ...]:
        """The calibration curve."""
        edges = np.linspace(1 / len(self.classes), 1, len(self.calibration) + 1)
        return tuple(
            Bin(float(low), float(high), ratio(*counts, self.noise, self.noise))
            for low, high, counts in zip(edges, edges[1:], self.calibration, strict=False)
        )

    def to_json(self) -> dict[str, Any]:
        """Return the counts and all figures as JSON values. Exact counts are marked as not for publication."""
        return {
            "publishable": not self.exact,
            **({"caveat": NOT_FOR_PUBLICATION} if self.exact else {}),
            "unit": self.unit,
            "confidence": CONFIDENCE,
            "size": self.size.to_json(),
            "accuracy": self.accuracy.to_json(),
            "recall": {name: estimate.to_json() for name, estimate in self.recall.items()},
            "bins": [
                {"low": each.low, "high": each.high, "right": each.right.to_json()} for each in self.bins
            ],
            "classes": list(self.classes),
            "confusion": [list(row) for row in self.confusion],
            "calibration": [list(pair) for pair in self.calibration],
            "noise": self.noise,
            "mu": self.mu,
            "composition": self.composition,
            "guarantee": None if self.guarantee is None else self.guarantee.to_json(),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Evaluation:
        """Return the evaluation that `to_json` wrote. Figures are computed again from the counts.

        Parameters
        ----------
        record : mapping
            What `to_json` returned.

        Raises
        ------
        ValueError, TypeError or KeyError
            If the record is not that of an evaluation which may be published.
        """
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


class _Answering(Protocol):
    """A classifier of public features whose answers are free."""

    def predict_proba(self, features: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the probabilities of all classes."""
        ...


def free_answers(
    classifier: _Answering, features: NDArray[np.float32], classes: int
) -> tuple[Counts, Counts]:
    """Answer each row on its own, so that no other row changes its rounding.

    Parameters
    ----------
    classifier : object
        Released weights: anything with ``predict_proba``.
    features : array of shape (rows, features)
        Public features.
    classes : int
        Number of classes.

    Returns
    -------
    tuple of two arrays of int
        The predicted class and the bin of its confidence, for each row.
    """
    row = np.empty((1, features.shape[1]), dtype=np.float32)  # one place in memory for all rows
    probabilities = np.empty((len(features), classes))
    for number, values in enumerate(features):
        row[0] = values
        probabilities[number] = classifier.predict_proba(row)[0]
    predicted = probabilities.argmax(axis=1)
    confidence = probabilities[np.arange(len(features)), predicted]
    scaled = (confidence - 1 / classes) / (1 - 1 / classes) * BINS
    return predicted, np.clip(np.floor(scaled), 0, BINS - 1).astype(np.int64)


def count_answers(
    labels: Counts, predicted: Counts, bins: Counts, rows_of_person: Counts | None, classes: int
) -> tuple[Counts, Counts]:
    """Count right and wrong answers in units of 2^-24 people. The sums are exact.

    Parameters
    ----------
    labels, predicted : array of int, shape (rows,)
        True and predicted classes.
    bins : array of int, shape (rows,)
        Bins of confidence.
    rows_of_person : array of int, shape (rows,), or None
        Number of rows of each row's person. None: each row is a person.
    classes : int
        Number of classes.

    Returns
    -------
    tuple of arrays of int
        The table of true and predicted classes, and the table of confidence and right or wrong.

    Examples
    --------
    >>> bins, two_rows_of_one = np.array([4, 2]), np.array([2, 2])
    >>> table, _ = count_answers(np.array([0, 1]), np.array([0, 0]), bins, two_rows_of_one, classes=2)
    >>> table / 2**24
    array([[0.5, 0. ],
           [0.5, 0. ]])
    """
    shares = np.full(len(labels), _SHARE) if rows_of_person is None else _SHARE // rows_of_person
    confusion = np.zeros((classes, classes), dtype=np.int64)
    np.add.at(confusion, (labels, predicted), shares)
    calibration = np.zeros((BINS, 2), dtype=np.int64)
    np.add.at(calibration, (bins, (labels != predicted).astype(np.int64)), shares)
    return confusion, calibration


# --- what it costs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvaluationCharge:
    """What one evaluation cost the people who were counted.

    Parameters
    ----------
    mu : float
        The Gaussian cost.
    composition : {"parallel", "sequential"}
        "parallel": they were held out of training. "sequential": they may be in the training set too.
    assumes : tuple of {"disjoint", "seeded", "names", "encoding"}
        What the evaluation rests on: a declaration that they were held out, seeded noise, or a rule that recognises
        them by their names or by the encoding of their records.
    id : str
        A random id of the evaluation.
    reserved : bool
        True: this is not an evaluation, but budget that is left to the folder that the model was saved to first.
    """

    mu: float
    composition: Composition
    assumes: tuple[Assumed, ...] = ()
    id: str = field(default_factory=new_identity)
    reserved: bool = False


def evaluation_mu(
    training: Guarantee,
    charges: Sequence[EvaluationCharge],
    composition: Composition,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    mu: float | None = None,
) -> float:
    """Return the mu of the next evaluation.

    Parameters
    ----------
    training : Guarantee
        What is guaranteed of the model.
    charges : sequence of EvaluationCharge
        What earlier evaluations cost.
    composition : {"parallel", "sequential"}
        How the evaluation composes with the training.
    epsilon, delta : float, optional
        The budget of the evaluation. `delta` is 1e-5 by default.
    mu : float, optional
        The budget of the evaluation, instead of `epsilon` and `delta`.

    Returns
    -------
    float
        The stated budget. By default, for people who were held out, what is left of a budget as large as that of the
        training: the model and its evaluation together then have the guarantee of the model.

    Raises
    ------
    BudgetExhausted
        If no budget is stated and nothing is left.
    InvalidInput
        If no budget is stated for people who may be in the training set, or the stated one is incomplete or stated
        twice.

    Examples
    --------
    >>> training = Guarantee("gaussian", mu=0.5, status="proven", because="Example.")
    >>> evaluation_mu(training, [EvaluationCharge(0.3, "parallel")], "parallel")
    0.4
    """
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
    found = _left(training, charges)
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


def _left(training: Guarantee, charges: Sequence[EvaluationCharge]) -> float:
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

    Parameters
    ----------
    training : Guarantee
        What is guaranteed of the model.
    charges : sequence of EvaluationCharge
        What the evaluations cost, at least one.

    Returns
    -------
    Guarantee
        For the unit of the model.

    Examples
    --------
    >>> training = Guarantee("gaussian", mu=0.3, status="proven", because="Example.")
    >>> composed_guarantee(training, [EvaluationCharge(0.3, "parallel")]).mu
    0.3
    >>> composed_guarantee(training, [EvaluationCharge(0.4, "sequential")]).mu
    0.5
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


def exact_evaluation(
    confusion: Counts,
    calibration: Counts,
    classes: Sequence[object],
    unit: Literal["record", "person"],
) -> Evaluation:
    """Return the owner's exact figures. They are not for publication.

    Parameters
    ----------
    confusion, calibration
        What `count_answers` returned.
    classes : sequence
        The class names.
    unit : {"record", "person"}
        What counts as one.

    Returns
    -------
    Evaluation
        Without noise and without a guarantee. Its intervals cover sampling alone.
    """
    return _evaluation(
        np.concatenate([confusion.reshape(-1), calibration.reshape(-1)]) / _SHARE,
        classes,
        noise=0.0,
        unit=unit,
        mu=None,
        composition="sequential",
        guarantee=None,
    )


def _evaluation(counts: NDArray[np.float64], classes: Sequence[object], **fields: Any) -> Evaluation:
    """Return the evaluation of a list of counts: the table of classes, then that of confidence."""
    number = len(classes)
    confusion, calibration = counts[: number**2].reshape(number, number), counts[number**2 :].reshape(-1, 2)
    return Evaluation(
        classes=tuple(map(str, classes)),
        confusion=tuple(tuple(row) for row in confusion.tolist()),
        calibration=tuple((right, wrong) for right, wrong in calibration.tolist()),
        **fields,
    )


def noisy_evaluation(
    confusion: Counts,
    calibration: Counts,
    classes: Sequence[object],
    training: Guarantee,
    charges: Sequence[EvaluationCharge],
    source: NoiseSource = EXACT,
) -> Evaluation:
    """Draw the noise of an evaluation that was charged, and return the publishable figures.

    Parameters
    ----------
    confusion, calibration
        What `count_answers` returned.
    classes : sequence
        The class names.
    training : Guarantee
        What is guaranteed of the model.
    charges : sequence of EvaluationCharge
        What the evaluations of this model cost; the last one is this one.
    source : NoiseSource
        Where the noise comes from. Exact noise by default.

    Returns
    -------
    Evaluation
        The noisy counts with their guarantee.

    Raises
    ------
    InvalidInput
        If the noise is not exact, and the charge does not say so.
    """
    charge = charges[-1]
    if not (type(source) is ExactNoise and source.exact) and "seeded" not in charge.assumes:
        raise InvalidInput("An evaluation with seeded noise must be charged as one that assumes 'seeded'.")
    units = np.concatenate([confusion.reshape(-1), calibration.reshape(-1)])
    released = release_gaussian(
        np.minimum(units, _MOST_UNITS) / _SHARE, sensitivity=_SENSITIVITY, mu=charge.mu, source=source
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


def evaluate(
    estimator: Any,
    X: Any,
    y: Any = None,
    groups: Any = None,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    mu: float | None = None,
    disjoint: bool = False,
) -> Evaluation:
    """Evaluate a fitted private estimator so that the result may be published.

    Parameters
    ----------
    estimator : PrivateHead or DPSGD
        A fitted estimator whose weights are released.
    X : array-like, data frame or Records
        The people to evaluate on, as for `fit`. If the estimator was trained on records that a split held people out
        of, only people whom the same rule holds out are counted. The rule cannot recognise people in plain arrays,
        with `groups` or without: there everybody is counted, and may be in the training set.
    y : array-like, optional
        The labels, unless they are in the frame or the records.
    groups : array-like, optional
        Whose row each row is. Required exactly if the estimator protects persons and `X` does not name them.
    epsilon, delta : float, optional
        The budget of the evaluation; see `evaluation_mu`.
    mu : float, optional
        The budget of the evaluation, instead of `epsilon` and `delta`.
    disjoint : bool
        Whether you declare that no evaluated person is in the training set. The guarantee is then conditional.

    Returns
    -------
    Evaluation
        The published figures. Its guarantee covers the estimator and all of its evaluations together.

    Raises
    ------
    BudgetExhausted
        If no budget is stated and nothing is left.
    InvalidInput
        If the estimator is paid per answer, or the rows do not fit it.

    Examples
    --------
    >>> from quietmax import PrivateHead
    >>> X, y = np.array([[0.0, 1.0], [1.0, 0.0]] * 5000), np.array([0, 1] * 5000)
    >>> head = PrivateHead(declared_size=8000, classes=(0, 1), random_state=0).fit(X[:8000], y[:8000])
    >>> evaluation = evaluate(head, X[8000:], y[8000:], disjoint=True)
    >>> evaluation.accuracy.low > 0.98, evaluation.guarantee.mu == head.guarantee_.mu
    (True, True)
    """
    check_is_fitted(estimator)
    if hasattr(estimator, "predictor_"):
        raise InvalidInput(PAID_PER_ANSWER)
    account = _account(estimator)
    seed = getattr(estimator, "random_state", None)
    subject = _Subject(
        classifier=getattr(estimator, "model_", None) or estimator._released_weights,
        feature_map=estimator.feature_map_,
        classes=tuple(estimator.classes_.tolist()),
        encoding=estimator.encoding_,
        training=estimator.guarantee_,
        source=EXACT if seed is None else SeededNoise(int(check_random_state(seed).randint(2**31 - 1))),
    )
    records, recognised = _as_records(estimator, X, y, groups)
    return subject.evaluated(
        *(records, account),
        recognised=recognised,
        disjoint=disjoint,
        epsilon=epsilon,
        delta=delta,
        mu=mu,
    )


def _as_records(estimator: Any, X: Any, y: Any, groups: Any) -> tuple[Records, bool]:
    """Return what an estimator is evaluated on, checked as in training, and whether a rule can recognise the people."""
    if isinstance(X, Records):
        if y is not None or groups is not None:
            raise InvalidInput("Records have labels and persons: leave out `y` and `groups`.")
        return replace(X, features=queries(estimator, X)), True
    encoding: Encoding | None = estimator.encoding_
    if encoding is not None and (isinstance(X, pd.DataFrame) or hasattr(X, "__arrow_c_stream__")):
        frame = as_frame(X)
        if y is not None:
            frame = frame.assign(**{encoding.label: np.asarray(y, dtype=object)})
        records = evaluation_records(frame, encoding)
        if records.persons is not None and groups is not None:
            raise InvalidInput("The table has a `person` column already: leave out `groups`.")
    else:
        features = queries(estimator, X)
        _, given = checked_records(BaseEstimator(), features, y)
        _, labels = class_numbers(given, estimator.classes_)
        records = Records("evaluation", features, labels, len(estimator.classes_))
        encoding = None
    if groups is not None:
        records = replace(records, persons=Persons.of(groups).names)
    return records, encoding is not None and groups is None


def evaluation_records(frame: pd.DataFrame, encoding: Encoding, name: str = "evaluation") -> Records:
    """Encode the table that a model is evaluated on, as in training.

    Parameters
    ----------
    frame : pandas.DataFrame
        The table with its labels.
    encoding : Encoding
        The encoding of the model.
    name : str
        Name of the table.

    Returns
    -------
    Records
        The encoded table. Unlike in training, all rows may be of one class.

    Raises
    ------
    InvalidInput
        If the table does not fit, or its `person` column has another type than in training.

    Examples
    --------
    >>> from quietmax.data import Schema, encode_table
    >>> table = pd.DataFrame({"who": ["01", "02"], "age": [30, 60], "ill": ["no", "yes"]})
    >>> schema = Schema(label="ill", classes=("no", "yes"), bounds={"age": (0, 100)}, person="who")
    >>> evaluation_records(table, encode_table(table, schema).encoding).persons.tolist()
    ['01', '02']
    """
    persons = None
    if encoding.person is not None:
        found = person_type(frame, encoding.person)
        if found != encoding.person_type:
            raise InvalidInput(
                f"The `person` column {encoding.person!r} must have the same type as in training "
                f"({encoding.person_type}), got {found}. In another type the same people may have other names: 00007 "
                "becomes 7."
            )
        persons = person_names(frame, encoding.person)
    features, labels = encoding.encode(frame, encoding.label)
    return Records(name, features, labels, len(encoding.classes), encoding=encoding, persons=persons)


@dataclass(frozen=True, eq=False)
class _Subject:
    """What is evaluated: released weights, how records became features, and what is guaranteed of the training."""

    classifier: Any
    feature_map: Any
    classes: tuple[Any, ...]
    encoding: Encoding | None
    training: Guarantee
    source: NoiseSource = EXACT

    @property
    def holdout(self) -> Holdout | None:
        """The rule that held people out of the training."""
        rule = self.training.parameters.get("holdout")
        return None if rule is None else Holdout.from_json(rule)

    def evaluated(
        self,
        records: Records,
        account: _Account,
        *,
        recognised: bool = True,
        disjoint: bool = False,
        **budget: float | None,
    ) -> Evaluation:
        """Charge the account, draw the noise and keep the result."""
        if self.training.status == "refuted":
            raise InvalidInput(
                "The guarantee of the model is refuted, so no evaluation of it may be published."
            )
        counted = self.counted(records, recognised=recognised)
        by_rule = recognised and self.holdout is not None
        composition: Composition = "parallel" if by_rule or disjoint else "sequential"
        assumes: tuple[Assumed, ...] = (
            *(("disjoint",) if disjoint and not by_rule else ()),
            *(("seeded",) if self.source is not EXACT else ()),
            *(("names",) if by_rule and records.unit == "person" else ()),
            *(("encoding",) if by_rule and records.unit == "record" and self.encoding is None else ()),
        )
        with account.locked():
            earlier = account.read()
            charges = [each.charge for each in earlier]
            mu = evaluation_mu(self.training, charges, composition, **budget)
            charge = EvaluationCharge(mu, composition, assumes)
            confusion, calibration = self.answers(counted)
            account.write([*earlier, StoredEvaluation(charge, None)])
            result = noisy_evaluation(
                confusion, calibration, self.classes, self.training, [*charges, charge], self.source
            )
            account.write([*earlier, StoredEvaluation(charge, result)])
        return result

    def counted(self, records: Records, *, recognised: bool = True) -> Records:
        """Return the people who are counted: those whom training held out, or everybody if no rule tells them."""
        if records.unit != self.training.unit:
            raise InvalidInput(
                "The model protects persons, so the evaluation must know whose row each row is: `groups` is required."
                if self.training.unit == "person"
                else "The model protects single records, so rows cannot be counted by person: leave out `groups`."
            )
        if recognised and records.encoding != self.encoding:
            raise InvalidInput("The records must have the encoding that the model was trained with.")
        if self.holdout is None or not recognised:
            return records
        return records.take(is_held_out(records, self.holdout))

    def answers(self, records: Records) -> tuple[Counts, Counts]:
        """Answer every row and count the answers."""
        features = (
            records.features if self.feature_map is None else self.feature_map.transform(records.features)
        )
        predicted, bins = free_answers(self.classifier, features, len(self.classes))
        rows = None if records.persons is None else Persons(records.persons).rows
        return count_answers(records.labels, predicted, bins, rows, len(self.classes))


# --- what evaluations have cost -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredEvaluation:
    """An evaluation that was charged to the people who were evaluated.

    Parameters
    ----------
    charge : EvaluationCharge
        What it cost.
    result : Evaluation or None
        The published figures. None: the program ended between the charge and the result.
    """

    charge: EvaluationCharge
    result: Evaluation | None


class _Account(Protocol):
    """The evaluations of one model, and what they cost."""

    def locked(self) -> AbstractContextManager[None]:
        """Keep others from spending the same budget meanwhile."""
        ...

    def read(self) -> list[StoredEvaluation]:
        """Return the evaluations so far."""
        ...

    def write(self, evaluations: list[StoredEvaluation]) -> None:
        """Replace the evaluations."""
        ...


def _with_reserve(evaluations: Sequence[StoredEvaluation], training: Guarantee) -> list[StoredEvaluation]:
    """Return the evaluations of a copy: what is left of the free budget belongs to the original."""
    left = _left(training, [each.charge for each in evaluations])
    if left == 0:
        return list(evaluations)
    return [*evaluations, StoredEvaluation(EvaluationCharge(left, "parallel", reserved=True), None)]


_MEMORY_LOCK = threading.RLock()


@dataclass(eq=False)
class _MemoryAccount:
    """The evaluations of an estimator since it was fitted, until it is saved.

    A copy or a pickle leaves the free evaluation to the original. A fork cannot evaluate (THEORY 3.12).
    """

    id: str
    training: Guarantee
    evaluations: list[StoredEvaluation] = field(default_factory=list)
    process: OwnProcess = field(default_factory=OwnProcess)

    @contextmanager
    def locked(self) -> Iterator[None]:
        self.process.check()
        with _MEMORY_LOCK:
            yield

    def read(self) -> list[StoredEvaluation]:
        return self.evaluations

    def write(self, evaluations: list[StoredEvaluation]) -> None:
        self.evaluations = evaluations

    def __reduce__(self) -> tuple[Any, ...]:
        return _MemoryAccount, (self.id, self.training, _with_reserve(self.evaluations, self.training))


def open_evaluations(estimator: Any) -> None:
    """Open the account of evaluations of an estimator that was fitted now.

    Parameters
    ----------
    estimator : PrivateHead or DPSGD
        The estimator, with its guarantee.
    """
    estimator._evaluations = _MemoryAccount(new_identity(), estimator.guarantee_)


def _account(estimator: Any) -> _MemoryAccount | _FolderAccount:
    """Return the account of a fitted estimator."""
    account: _MemoryAccount | _FolderAccount | None = getattr(estimator, "_evaluations", None)
    if account is None:
        raise InvalidInput(
            "The last `fit` of the estimator failed, or another version made it: fit it again before it is evaluated "
            "or saved."
        )
    return account


def save_evaluations(estimator: Any, folder: str | Path, write: Callable[[str, str], object]) -> None:
    """Save an estimator together with its evaluations.

    Of several folders, the first one keeps the evaluation that is free; later evaluations of the estimator are stored
    there too.

    Parameters
    ----------
    estimator : PrivateHead or DPSGD
        The estimator.
    folder : str or Path
        Where it is saved.
    write : callable
        Writes the folder. It gets the id of the estimator's evaluations and the content of their file.
    """
    account, target = _account(estimator), Path(folder).resolve()
    assert account.id is not None
    saved = _FolderAccount(target, account.id, estimator.guarantee_)
    moves = isinstance(account, _MemoryAccount) or account.folder == target
    with ExitStack() as stack:
        try:
            if moves:
                stack.enter_context(account.locked())
            evaluations = account.read()
        except QuietmaxError:  # in a fork, or the first folder is gone: nobody knows what was evaluated there
            evaluations, moves = [], False
        if not moves:
            evaluations = _with_reserve(evaluations, estimator.guarantee_)
        write(account.id, saved.text(evaluations))
        if isinstance(account, _MemoryAccount):
            # Whoever else holds the account in memory must not spend again what moved into the folder.
            account.write(_with_reserve(account.evaluations, account.training))
            estimator._evaluations = saved


# --- evaluations of a model folder --------------------------------------------------------------------------------

EVALUATION_FILE = "evaluation.json"
"""The file of a model folder with its evaluations and what they cost. It may be published with the folder."""
_FORMAT = "quietmax evaluations"


def read_evaluations(folder: str | Path, model: PrivateModel) -> list[StoredEvaluation]:
    """Read the evaluations of a model folder.

    Parameters
    ----------
    folder : str or Path
        The model folder.
    model : PrivateModel
        The model, opened from the folder.

    Returns
    -------
    list of StoredEvaluation
        The oldest first; empty if the model was never evaluated. Their guarantees were computed again.

    Raises
    ------
    DataUnavailable
        If the file is missing, cannot be read or belongs to another model. What was spent is then unknown.
    """
    if isinstance(model.classifier, Predictor):
        return []
    return _FolderAccount(Path(folder), model.evaluation_id, model.guarantee).read()


def _stored_from_json(
    entry: Mapping[str, Any], earlier: Sequence[StoredEvaluation], training: Guarantee
) -> StoredEvaluation:
    """Return an evaluation that `_FolderAccount` wrote; raise ValueError if it contradicts what it was charged for."""
    charge = EvaluationCharge(
        mu=GaussianCost(float(entry["mu"])).mu,
        composition=entry["composition"],
        assumes=tuple(entry["assumes"]),
        id=str(entry["id"]),
        reserved=entry["reserved"] is True,
    )
    if charge.composition not in get_args(Composition) or not set(charge.assumes) <= set(get_args(Assumed)):
        raise ValueError("not the charge of an evaluation")
    if entry["result"] is None:
        return StoredEvaluation(charge, None)
    result = Evaluation.from_json(entry["result"])
    charges = [*(each.charge for each in earlier), charge]
    computed = composed_guarantee(training, charges)
    stated = cast(Guarantee, result.guarantee)
    if (
        (result.mu, result.composition, result.unit) != (charge.mu, charge.composition, training.unit)
        or charge.reserved
        or not alike(stated.to_json(), json.loads(json.dumps(computed.to_json())))
    ):
        raise ValueError("a result that is not the one charged for")
    return StoredEvaluation(charge, result)


def evaluate_folder(
    folder: str | Path,
    model: PrivateModel,
    records: Records,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    mu: float | None = None,
    exact: bool = False,
) -> Evaluation:
    """Evaluate a saved model, and store the result in its folder.

    The folder keeps account of what its evaluations cost. The cost is written to the disk before the noise is drawn.

    Parameters
    ----------
    folder : str or Path
        The model folder.
    model : PrivateModel
        The model, opened from the folder.
    records : Records
        The people to evaluate on, encoded as the model's. If the model was trained with a holdout, only people whom
        the same rule holds out are counted, who cannot be in the training set.
    epsilon, delta, mu : float, optional
        The budget, as for `evaluate`.
    exact : bool
        Return the owner's exact figures instead. They are not for publication: nothing is charged and nothing is
        stored.

    Returns
    -------
    Evaluation
        The figures. Their guarantee covers the model and all of its evaluations together.

    Raises
    ------
    BudgetExhausted
        If no budget is stated and nothing is left.
    InvalidInput
        If the model is paid per answer, the rows do not fit it, or no budget is stated for people who may be in the
        training set.
    DataUnavailable
        If the file of the evaluations is missing or damaged.
    QuietmaxError
        If the result cannot be written.
    """
    if isinstance(model.classifier, Predictor):
        raise InvalidInput(PAID_PER_ANSWER)
    subject = _Subject(model.classifier, model.features, model.classes, model.encoding, model.guarantee)
    if exact:
        return exact_evaluation(
            *subject.answers(subject.counted(records)), model.classes, model.guarantee.unit
        )
    account = _FolderAccount(Path(folder), model.evaluation_id, model.guarantee)
    return subject.evaluated(records, account, epsilon=epsilon, delta=delta, mu=mu)


def split_name(model: PrivateModel) -> str | None:
    """Return a name of the split that held people out of a model's training set.

    Two models with the same name of the split hold the same people out of a table. The name says what is held out,
    records or people, and how they are recognised: by an encoding, which names the `person` column and its type. People
    of plain arrays are recognised by nothing, so the split belongs to the one model.

    Parameters
    ----------
    model : PrivateModel
        The model.

    Returns
    -------
    str or None
        None if nobody was held out.
    """
    holdout, encoding, unit = model.holdout, model.encoding, model.guarantee.unit
    if holdout is None:
        return None
    if encoding is None or (unit == "person" and encoding.person is None):
        known_by = f"model {model.evaluation_id}"
    else:
        known_by = f"encoding {hashlib.sha256(encoding.to_json().encode()).hexdigest()[:32]}"
    return f"{holdout.share!r} of the {unit}s of {known_by}, seed {holdout.seed}"


@dataclass(frozen=True, eq=False)
class _FolderAccount:
    """The evaluations of a model folder, in its file. The id is in the description; None before format version 4."""

    folder: Path
    id: str | None
    training: Guarantee

    @contextmanager
    def locked(self) -> Iterator[None]:
        try:
            file = os.open(self.folder / DESCRIPTION_FILE, os.O_RDONLY)
        except OSError as problem:
            raise DataUnavailable(
                f"The model in {self.folder} cannot be opened ({problem.strerror})."
            ) from problem
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)

    def read(self) -> list[StoredEvaluation]:
        path = self.folder / EVALUATION_FILE
        found: list[StoredEvaluation] = []
        try:
            if self.id is None and not path.exists():
                return found
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != _FORMAT or content["id"] != self.id:
                raise ValueError("another model")
            for entry in content["evaluations"]:
                found.append(_stored_from_json(entry, found, self.training))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
            raise DataUnavailable(
                f"The evaluations in {path} are missing, damaged or those of another model. What was spent on them is "
                "unknown. Restore the file from a copy."
            ) from problem
        return found

    def text(self, evaluations: Sequence[StoredEvaluation]) -> str:
        """Return the content of the file."""
        content = {
            "format": _FORMAT,
            "id": self.id,
            "evaluations": [
                {**asdict(each.charge), "result": None if each.result is None else each.result.to_json()}
                for each in evaluations
            ],
        }
        return json.dumps(content, indent=2, allow_nan=False) + "\n"

    def write(self, evaluations: list[StoredEvaluation]) -> None:
        text = self.text(evaluations)
        path = self.folder / EVALUATION_FILE
        try:
            atomic_write(path, lambda staging: staging.write_text(text, encoding="utf-8"))
        except OSError as problem:
            raise QuietmaxError(
                f"The evaluation cannot be written to {path} ({problem.strerror})."
            ) from problem


def weights_digest(folder: str | Path) -> str:
    """Return the SHA-256 of the weights of a model folder.

    Parameters
    ----------
    folder : str or Path
        The model folder.

    Raises
    ------
    DataUnavailable
        If the weights cannot be read.
    """
    try:
        return hashlib.sha256((Path(folder) / WEIGHTS_FILE).read_bytes()).hexdigest()
    except OSError as problem:
        raise DataUnavailable(f"The weights in {folder} cannot be read ({problem.strerror}).") from problem

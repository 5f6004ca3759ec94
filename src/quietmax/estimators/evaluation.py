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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
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
from quietmax.data.tables import as_frame, person_names
from quietmax.errors import BudgetExhausted, DataUnavailable, InvalidInput, QuietmaxError
from quietmax.estimators.training_set import Persons, queries
from quietmax.estimators.validation import Condition, checked_records, class_numbers, weakened
from quietmax.noise.release import release_gaussian
from quietmax.noise.sources import EXACT, ExactNoise, NoiseSource, SeededNoise
from quietmax.predictor import Predictor
from quietmax.spending import DESCRIPTION_FILE, OwnProcess

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
_SIZE_ERROR = 0.002
"""The part of 1 - CONFIDENCE that is left for the bound on a noisy number of people."""
_Z_SIZE = float(ndtri(1 - _SIZE_ERROR))
_Z = float(ndtri(1 - (1 - CONFIDENCE - _SIZE_ERROR) / 2))
_Z_COUNT = float(ndtri((1 + CONFIDENCE) / 2))
_CONTINUITY = 0.5
Assumed = Literal["disjoint", "seeded", "batched"]
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
_BATCHED_ANSWERS = (
    "The numerical library rounds the scores of an evaluated row alike at every place of a batch."
)


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
    calibration : tuple of pairs of float, or None
        Noisy number of people with right and with wrong answers, by bin of confidence. None if the model releases
        labels only.
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
    >>> evaluation = Evaluation(("no", "yes"), counts, None, 5.3, "person", 0.27, "parallel", None)
    >>> print(evaluation.accuracy)
    0.875 (0.858 to 0.891)
    >>> print(evaluation.recall["yes"])
    0.848 (0.822 to 0.872)
    """

    classes: tuple[str, ...]
    confusion: tuple[tuple[float, ...], ...]
    calibration: tuple[tuple[float, float], ...] | None
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
        if self.calibration is not None:
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
        """The calibration curve; empty if the model releases labels only."""
        edges = np.linspace(1 / len(self.classes), 1, len(self.calibration or ()) + 1)
        return tuple(
            Bin(float(low), float(high), ratio(*counts, self.noise, self.noise))
            for low, high, counts in zip(edges, edges[1:], self.calibration or (), strict=False)
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
            "calibration": None if self.calibration is None else [list(pair) for pair in self.calibration],
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
        calibration = record["calibration"]
        evaluation = cls(
            classes=tuple(map(str, record["classes"])),
            confusion=tuple(tuple(map(float, row)) for row in record["confusion"]),
            calibration=None if calibration is None else tuple((float(a), float(b)) for a, b in calibration),
            noise=float(record["noise"]),
            unit=record["unit"],
            mu=float(record["mu"]),
            composition=record["composition"],
            guarantee=Guarantee.from_json(record["guarantee"]),
        )
        classes = len(evaluation.classes)
        numbers = np.array([*sum(evaluation.confusion, ()), *sum(evaluation.calibration or (), ())])
        if (
            classes < 2
            or [len(row) for row in evaluation.confusion] != [classes] * classes
            or not np.isfinite(numbers).all()
            or evaluation.unit not in ("record", "person")
            or evaluation.composition not in ("parallel", "sequential")
            or not 0 < cast(float, evaluation.mu) < math.inf
            # Noise of this size is what the stated mu pays for; rounding on the grid adds less than 1%.
            or not 0.99 < evaluation.noise * cast(float, evaluation.mu) / _sensitivity(calibration) < 1.01
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
    labels: Counts, predicted: Counts, bins: Counts | None, rows_of_person: Counts | None, classes: int
) -> tuple[Counts, Counts | None]:
    """Count right and wrong answers in units of 2^-24 people. The sums are exact.

    Parameters
    ----------
    labels, predicted : array of int, shape (rows,)
        True and predicted classes.
    bins : array of int, shape (rows,), or None
        Bins of confidence; None if the model releases labels only.
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
    >>> two_rows_of_one = np.array([2, 2])
    >>> table, _ = count_answers(np.array([0, 1]), np.array([0, 0]), None, two_rows_of_one, classes=2)
    >>> table / 2**24
    array([[0.5, 0. ],
           [0.5, 0. ]])
    """
    shares = np.full(len(labels), _SHARE) if rows_of_person is None else _SHARE // rows_of_person
    confusion = np.zeros((classes, classes), dtype=np.int64)
    np.add.at(confusion, (labels, predicted), shares)
    calibration = None
    if bins is not None:
        calibration = np.zeros((BINS, 2), dtype=np.int64)
        np.add.at(calibration, (bins, (labels != predicted).astype(np.int64)), shares)
    return confusion, calibration


def _sensitivity(calibration: object) -> float:
    """Return the L2 length of what one person adds to the tables: 1 for one table, sqrt(2) for two, rounded up."""
    return 1.0 if calibration is None else math.nextafter(math.sqrt(2), 2)


def _noisy(
    confusion: Counts, calibration: Counts | None, mu: float, source: NoiseSource
) -> tuple[NDArray[np.float64], float]:
    """Return both tables as one list of noisy numbers of people, and the standard deviation of the noise."""
    tables = [confusion] if calibration is None else [confusion, calibration]
    units = np.concatenate([table.reshape(-1) for table in tables])
    released = release_gaussian(
        np.minimum(units, _MOST_UNITS) / _SHARE, sensitivity=_sensitivity(calibration), mu=mu, source=source
    )
    return released.values, released.scale


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
    assumes : tuple of {"disjoint", "seeded", "batched"}
        What the evaluation rests on: a declaration that they were held out, seeded noise, or answers that were
        computed in one batch.
    """

    mu: float
    composition: Composition
    assumes: tuple[Assumed, ...] = ()


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
    left = _as_gaussian(training).amount - _amount(charges, "parallel")
    found = root_rounded_down(left) if left > 0 else 0.0
    if found < 1e-3 * _as_gaussian(training).mu:
        raise BudgetExhausted(
            "The evaluations of this holdout have spent as much as the training. A further evaluation requires a "
            "budget (`epsilon`, `delta`) and weakens the guarantee of the model and its evaluations together."
        )
    return found


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
    if sequential:
        because += " The evaluated people may be in the training set: their costs add up (THEORY 3.6)."
    parameters = {
        "training": {
            name: value
            for name in ("definition", "epsilon", "mu", "delta")
            if (value := getattr(training, name)) is not None
        },
        "evaluations": [{"mu": each.mu, "composition": each.composition} for each in charges],
    }
    assumed = {name for each in charges for name in each.assumes}
    assumptions = (*training.assumptions, *((_BATCHED_ANSWERS,) if "batched" in assumed else ()))
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
    calibration: Counts | None,
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
        np.concatenate([confusion.reshape(-1), *([] if calibration is None else [calibration.reshape(-1)])])
        / _SHARE,
        classes,
        noise=0.0,
        unit=unit,
        mu=None,
        composition="sequential",
        guarantee=None,
    )


def _evaluation(counts: NDArray[np.float64], classes: Sequence[object], **fields: Any) -> Evaluation:
    """Return the evaluation of a list of counts: the table of classes, then that of confidence if there is one."""
    number = len(classes)
    confusion, calibration = counts[: number**2].reshape(number, number), counts[number**2 :].reshape(-1, 2)
    return Evaluation(
        classes=tuple(map(str, classes)),
        confusion=tuple(tuple(row) for row in confusion.tolist()),
        calibration=tuple((right, wrong) for right, wrong in calibration.tolist()) or None,
        **fields,
    )


def noisy_evaluation(
    confusion: Counts,
    calibration: Counts | None,
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
    counts, scale = _noisy(confusion, calibration, charge.mu, source)
    return _evaluation(
        counts,
        classes,
        noise=scale,
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
    estimator : PrivateHead, DPSGD or Teachers
        A fitted estimator. If it is paid per answer, each row is charged as an answer.
    X : array-like, data frame or Records
        The people to evaluate on, as for `fit`. If the estimator was trained on records that a split held people out
        of, only people whom the same rule holds out are counted.
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
        If no budget is stated and nothing is left, or the answers cannot be paid.
    InvalidInput
        If the rows do not fit the estimator.

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
    seed = getattr(estimator, "random_state", None)
    subject = _Subject(
        classifier=estimator.predictor_
        if hasattr(estimator, "predictor_")
        else getattr(estimator, "model_", None) or estimator._released_weights,
        feature_map=estimator.feature_map_,
        classes=tuple(estimator.classes_.tolist()),
        training=estimator.guarantee_,
        holdout=estimator.holdout_,
        source=EXACT if seed is None else SeededNoise(int(check_random_state(seed).randint(2**31 - 1))),
    )
    records = _as_records(estimator, X, y, groups)
    return subject.evaluated(
        records, _account(estimator), disjoint=disjoint, epsilon=epsilon, delta=delta, mu=mu
    )


def _as_records(estimator: Any, X: Any, y: Any, groups: Any) -> Records:
    """Return what an estimator is evaluated on, checked as in training."""
    if isinstance(X, Records):
        if y is not None or groups is not None:
            raise InvalidInput("Records have labels and persons: leave out `y` and `groups`.")
        return replace(X, features=queries(estimator, X))
    encoding: Encoding | None = estimator.encoding_
    if encoding is not None and (isinstance(X, pd.DataFrame) or hasattr(X, "__arrow_c_stream__")):
        frame = as_frame(X)
        persons = None if encoding.person is None else person_names(frame, encoding.person)
        if y is not None:
            frame = frame.assign(**{encoding.label: np.asarray(y, dtype=object)})
        labels, features = encoding.encode_labels(frame), queries(estimator, frame)
        if persons is not None and groups is not None:
            raise InvalidInput("The table has a `person` column already: leave out `groups`.")
    else:
        persons, features = None, queries(estimator, X)
        _, given = checked_records(BaseEstimator(), features, y)
        _, labels = class_numbers(given, estimator.classes_)
    if groups is not None:
        persons = Persons.of(groups).names
    return Records("evaluation", features, labels, len(estimator.classes_), None, encoding, persons)


@dataclass(frozen=True, eq=False)
class _Subject:
    """What is evaluated: a classifier of mapped records, what is guaranteed of it, and whom training held out."""

    classifier: Any
    feature_map: Any
    classes: tuple[Any, ...]
    training: Guarantee
    holdout: Holdout | None
    source: NoiseSource = EXACT

    def evaluated(
        self, records: Records, account: _Account, *, disjoint: bool, **budget: float | None
    ) -> Evaluation:
        """Charge the account, draw the noise and keep the result."""
        counted, composition = self.counted(records), self.composition(disjoint=disjoint)
        assumes: tuple[Assumed, ...] = (
            *(("disjoint",) if composition == "parallel" and self.holdout is None else ()),
            *(("seeded",) if self.source is not EXACT else ()),
            *(("batched",) if isinstance(self.classifier, Predictor) else ()),
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

    def counted(self, records: Records) -> Records:
        """Return the people who are counted: those whom training held out, or everybody if it held out nobody."""
        if records.unit != self.training.unit:
            raise InvalidInput(
                "The model protects persons, so the evaluation must know whose row each row is: `groups` is required."
                if self.training.unit == "person"
                else "The model protects single records, so rows cannot be counted by person: leave out `groups`."
            )
        return records if self.holdout is None else records.take(is_held_out(records, self.holdout))

    def composition(self, *, disjoint: bool) -> Composition:
        """Return how an evaluation composes with the training."""
        if self.training.status == "refuted":
            raise InvalidInput(
                "The guarantee of the model is refuted, so no evaluation of it may be published."
            )
        return "parallel" if self.holdout is not None or disjoint else "sequential"

    def answers(self, records: Records) -> tuple[Counts, Counts | None]:
        """Answer every row and count the answers. Answers of a model that is paid per answer are charged."""
        features = (
            records.features if self.feature_map is None else self.feature_map.transform(records.features)
        )
        predicted: Counts
        bins: Counts | None
        if isinstance(self.classifier, Predictor):
            predicted, bins = self.classifier.predict(features), None
        else:
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


_MEMORY_LOCK = threading.RLock()


@dataclass(eq=False)
class _MemoryAccount:
    """The evaluations of an estimator that was not saved. A copy of it, in a fork or elsewhere, pays for nothing."""

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


def _account(estimator: Any) -> _Account:
    """Return the account of a fitted estimator; a new one if it was fitted since."""
    account: _MemoryAccount | _FolderAccount | None = getattr(estimator, "_evaluations", None)
    if account is None or account.training is not estimator.guarantee_:
        account = estimator._evaluations = _MemoryAccount(estimator.guarantee_)
    return account


def move_evaluations(estimator: Any, folder: str | Path) -> None:
    """Move the evaluations of an estimator into the folder that it was saved to; later ones are stored there too.

    Parameters
    ----------
    estimator : PrivateHead, DPSGD or Teachers
        The estimator.
    folder : str or Path
        Its model folder.
    """
    evaluations = _account(estimator).read()
    account = _FolderAccount(Path(folder).resolve(), weights_digest(folder), estimator.guarantee_)
    if evaluations:
        account.write(evaluations)
    estimator._evaluations = account


# --- evaluations of a model folder --------------------------------------------------------------------------------

EVALUATION_FILE = "evaluation.json"
"""The file of a model folder with its evaluations and what they cost. It may be published with the folder."""
_FORMAT = "quietmax evaluations"


def read_evaluations(folder: str | Path) -> list[StoredEvaluation]:
    """Read the evaluations of a model folder.

    Parameters
    ----------
    folder : str or Path
        The model folder.

    Returns
    -------
    list of StoredEvaluation
        The oldest first; empty if the model was never evaluated.

    Raises
    ------
    DataUnavailable
        If the file cannot be read or belongs to another model. What was spent is then unknown.
    """
    path = Path(folder) / EVALUATION_FILE
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT or content["weights_sha256"] != weights_digest(folder):
            raise ValueError("another model")
        found = [_stored_from_json(entry) for entry in content["evaluations"]]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise DataUnavailable(
            f"The evaluations in {path} cannot be read, or belong to another model. What was spent on them is unknown. "
            "Restore the file from a copy."
        ) from problem
    return found


def _stored_from_json(entry: Mapping[str, Any]) -> StoredEvaluation:
    """Return an evaluation that `_FolderAccount` wrote."""
    charge = EvaluationCharge(
        GaussianCost(float(entry["mu"])).mu, entry["composition"], tuple(entry["assumes"])
    )
    if charge.composition not in get_args(Composition) or not set(charge.assumes) <= set(get_args(Assumed)):
        raise ValueError("not the charge of an evaluation")
    result = None if entry["result"] is None else Evaluation.from_json(entry["result"])
    if result is not None and (result.mu, result.composition) != (charge.mu, charge.composition):
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
        If no budget is stated and nothing is left, or the answers cannot be paid.
    InvalidInput
        If the rows do not fit the model, or no budget is stated for people who may be in the training set.
    QuietmaxError
        If the result cannot be written.
    """
    subject = _Subject(model.classifier, model.features, model.classes, model.guarantee, model.holdout)
    if exact:
        return exact_evaluation(
            *subject.answers(subject.counted(records)), model.classes, model.guarantee.unit
        )
    account = _FolderAccount(Path(folder), weights_digest(folder), model.guarantee)
    return subject.evaluated(records, account, disjoint=False, epsilon=epsilon, delta=delta, mu=mu)


def split_name(model: PrivateModel) -> str | None:
    """Return a name of the split that held people out of a model's training set.

    Two models with the same name of the split hold the same people out of a table. People are held out by their name
    in the `person` column, and rows by their encoded content, which depends on the encoding.

    Parameters
    ----------
    model : PrivateModel
        The model.

    Returns
    -------
    str or None
        None if nobody was held out.
    """
    holdout = model.holdout
    if holdout is None:
        return None
    if model.encoding is not None and model.encoding.person is not None:
        who = f"people by {model.encoding.person!r}"
    else:
        text = f"{model.inputs}" if model.encoding is None else model.encoding.to_json()
        who = f"rows of encoding {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return f"{holdout.share!r} of the {who}, seed {holdout.seed}"


@dataclass(frozen=True, eq=False)
class _FolderAccount:
    """The evaluations of a model folder, in its file."""

    folder: Path
    digest: str
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
        if weights_digest(self.folder) != self.digest:
            raise DataUnavailable(f"The model in {self.folder} was replaced by another one.")
        return read_evaluations(self.folder)

    def write(self, evaluations: list[StoredEvaluation]) -> None:
        content = {
            "format": _FORMAT,
            "weights_sha256": self.digest,
            "evaluations": [
                {**asdict(each.charge), "result": None if each.result is None else each.result.to_json()}
                for each in evaluations
            ],
        }
        text = json.dumps(content, indent=2, allow_nan=False) + "\n"
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

"""Evaluations of answers that are made up."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quietmax.accounting.guarantee import Guarantee
from quietmax.estimators.evaluation import EvaluationCharge, _noisy_evaluation
from quietmax.estimators.figures import BINS, Evaluation, Tables
from quietmax.noise.sources import SeededNoise

TRAINING = Guarantee("gaussian", mu=0.268, status="proven", because="Training.", unit="person")
UNITS = 2**24


def tables(classes: int = 2, **settings: Any) -> Tables:
    """The tables of an evaluation of so many classes."""
    names = ("no", "yes") if classes == 2 else tuple(map(str, range(classes)))
    return Tables(names, **settings)


def drawn(counted: Tables, units: NDArray[np.int64], seed: int = 0) -> Evaluation:
    """Draw seeded noise for counts."""
    charges = [EvaluationCharge(0.268, "parallel", ("seeded",))]
    return _noisy_evaluation(units, counted, TRAINING, charges, SeededNoise(seed))


def sure(counted: Tables, confusion: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count people by true and predicted class, all answered with the highest confidence, and in the first group."""
    classes = len(confusion)
    people = np.repeat(np.arange(classes**2), confusion.ravel())
    labels, predicted = people // classes, people % classes
    last = (BINS if counted.edges is None else len(counted.edges) - 1) - 1
    high = predicted if counted.edges is not None else np.ones_like(predicted)
    answers = np.stack([predicted, last * high, np.zeros_like(high), UNITS * high], 1).astype(np.int32)
    return counted.count(labels, answers, None)


def noisy(confusion: NDArray[np.int64], seed: int = 0, **settings: Any) -> Evaluation:
    """Evaluate such people."""
    counted = tables(len(confusion), **settings)
    return drawn(counted, sure(counted, confusion), seed)

"""Asking a target: a model, a predictor, an estimator, a function, or a server; and counting what was asked.

An attack sees a target only through the answers to its queries. What they cost is reported, because a private
target's guarantee speaks of a number of queries, and an attack may need more than its owner would answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quietmax.accounting import Budget, Cost, per_query
from quietmax.attacks.endpoint import Endpoint
from quietmax.errors import InvalidInput
from quietmax.estimators.private_model import PrivateModel
from quietmax.mechanisms import Answers, Mechanism
from quietmax.models import Classifier, Model, softmax
from quietmax.noise import EXACT, NoiseSource
from quietmax.predictor import Predictor

Features = NDArray[np.float32]
Target = Any
"""A classifier, `Predictor`, `NoisyModel`, estimator, private model, `Endpoint`, URL, or function of features."""

_SUM_TOLERANCE = 1e-2


@dataclass(frozen=True, eq=False)
class Asked:
    """A target's answers, how many queries they took, and what those cost where the target says so."""

    answers: Answers
    queries: int
    spent: Cost | None
    target: str


@dataclass(frozen=True, eq=False)
class NoisyModel:
    """A model behind a mechanism, without a budget: every query is answered at the same cost.

    The setting of the paper's figures, where epsilon is the price of *one* answer while an attack asks thousands.
    """

    model: Classifier
    mechanism: Mechanism
    noise: NoiseSource = EXACT

    @classmethod
    def at(
        cls,
        model: Classifier,
        mechanism: Mechanism,
        epsilon: float,
        *,
        delta: float = 0.0,
        noise: NoiseSource = EXACT,
    ) -> NoisyModel:
        """The mechanism prepared so that one answer costs (epsilon, delta), as its own reading of a budget has it."""
        budget = Budget(epsilon, delta, queries=1)
        one = per_query(budget, mechanism.currency, mechanism.reading)
        return cls(model, mechanism.prepared(model, one), noise)

    def answer(self, features: Features) -> Answers:
        """Released answers."""
        return self.mechanism.release(self.model.scores(features), self.noise)


def ask(target: Target, features: Features, classes: int) -> Asked:
    """Ask ``target`` for an answer to each row of ``features`` and check that it is one.

    >>> asked = ask(lambda rows: np.full((len(rows), 2), 0.5), np.zeros((3, 4), np.float32), 2)
    >>> asked.queries, asked.answers.probabilities.shape
    (3, (3, 2))
    """
    if isinstance(target, str):
        target = Endpoint(target)
    queries, spent, name = len(features), None, _name(target)
    account = _account_of(target)
    before = 0 if account is None else account.answered
    answers = _checked(_answers_of(target, features, classes), queries, classes)
    if account is not None:
        queries = account.answered - before
        spent = account.cost.times(queries)
    elif isinstance(target, NoisyModel):
        spent = target.mechanism.cost(target.model.classes).times(queries)
    return Asked(answers, queries, spent, name)


def _name(target: Target) -> str:
    """What a report calls the target."""
    if isinstance(target, Predictor | NoisyModel):
        return target.mechanism.name
    if isinstance(target, Endpoint):
        return target.url
    return "plain model" if isinstance(target, Model) else type(target).__name__


def _account_of(target: Target) -> Predictor | None:
    """The predictor that pays for the target's answers, where one does."""
    if isinstance(target, PrivateModel):
        return _account_of(target.answerer)
    behind = target if isinstance(target, Predictor) else getattr(target, "predictor_", None)
    return behind if isinstance(behind, Predictor) else None


def _answers_of(target: Target, features: Features, classes: int) -> Answers:
    if isinstance(target, NoisyModel | Endpoint):
        return target.answer(features)
    columns = _columns(target, classes)
    if hasattr(target, "predict_proba") and not _refuses_probabilities(target, features):
        return _with_labels(_spread(_numbers(target.predict_proba(features)), columns, classes))
    if isinstance(target, Classifier):
        return _with_labels(softmax(target.scores(features)))
    if hasattr(target, "predict"):
        return Answers(_codes(target.predict(features), columns), None)
    if callable(target):
        return _from_function(target, features)
    raise InvalidInput(
        f"A target of type {type(target).__name__} cannot be asked; give a model, a Predictor, a fitted estimator, "
        "a function from features to probabilities or labels, or the URL of a server."
    )


def _refuses_probabilities(target: Target, features: Features) -> bool:
    """Whether a paying target releases labels only; one record tells, and its stored answer is free to ask again."""
    if not isinstance(target, Predictor | PrivateModel) or _account_of(target) is None:
        return False
    try:
        target.predict_proba(features[:1])
    except InvalidInput:
        return True
    return False


def _from_function(target: Callable[[Features], Any], features: Features) -> Answers:
    given = _numbers(target(features))
    if given.ndim == 1:
        return Answers(_whole(given), None)
    return _with_labels(given)


def _columns(target: Target, classes: int) -> NDArray[np.int64] | None:
    """Which class each column of a fitted estimator means; None where it states nothing."""
    stated = getattr(target, "classes_", None)
    if stated is None:
        return None
    known = np.asarray(stated)
    if not np.issubdtype(known.dtype, np.number) or not np.isin(known, np.arange(classes)).all():
        raise InvalidInput(
            f"The estimator's classes are {known.tolist()[:5]}..., but the data's are 0 to {classes - 1}; "
            "fit it on the labels of the data it is attacked with."
        )
    return known.astype(np.int64)


def _spread(
    probabilities: NDArray[np.float64], columns: NDArray[np.int64] | None, classes: int
) -> NDArray[np.float64]:
    """Columns put at their classes; classes the estimator never saw get probability 0."""
    if columns is None or probabilities.ndim != 2 or probabilities.shape[1] != len(columns):
        return probabilities
    spread = np.zeros((len(probabilities), classes))
    spread[:, columns] = probabilities
    return spread


def _codes(labels: Any, columns: NDArray[np.int64] | None) -> NDArray[np.int64]:
    codes = _whole(_numbers(labels))
    if columns is not None and not np.isin(codes, columns).all():
        raise InvalidInput("The estimator predicted a label that is not among its classes; fit it again.")
    return codes


def _numbers(given: Any) -> NDArray[np.float64]:
    try:
        return np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidInput(
            "The target's answers are not numbers; it must return probabilities of shape (queries, classes) or "
            "whole-number labels of shape (queries,); correct the target."
        ) from None


def _whole(labels: NDArray[np.float64]) -> NDArray[np.int64]:
    if not np.isfinite(labels).all() or (labels != np.rint(labels)).any():
        raise InvalidInput(
            "The target's answers have one number per query, but not whole ones; labels must be class numbers, "
            "probabilities a row per query; correct the target."
        )
    return labels.astype(np.int64)


def _with_labels(probabilities: NDArray[np.float64]) -> Answers:
    values = np.asarray(probabilities, dtype=np.float64)
    return Answers(values.argmax(-1), values)


def _checked(answers: Answers, queries: int, classes: int) -> Answers:
    """Refuse answers of a wrong shape, labels outside the classes, and rows that are no probabilities."""
    labels, probabilities = answers.labels, answers.probabilities
    if labels.shape != (queries,):
        raise InvalidInput(
            f"The target gave answers of shape {labels.shape} to {queries} queries, but must give one per query; "
            "correct the target."
        )
    if probabilities is None:
        if queries and (labels.min() < 0 or labels.max() >= classes):
            raise InvalidInput(f"The target released a label outside 0 to {classes - 1}; check its classes.")
        return answers
    if probabilities.shape != (queries, classes):
        raise InvalidInput(
            f"The target released values of shape {probabilities.shape}, but {queries} queries to {classes} classes "
            f"need ({queries}, {classes}); check its classes."
        )
    sums = probabilities.sum(-1)
    if (
        not (np.isfinite(sums).all() and (probabilities >= -_SUM_TOLERANCE).all())
        or (np.abs(sums - 1) > _SUM_TOLERANCE).any()
    ):
        raise InvalidInput(
            "The target released rows that are not probabilities (0 or more, adding up to 1); apply a softmax to "
            "logits first."
        )
    return Answers(labels, np.clip(probabilities, 0.0, 1.0))

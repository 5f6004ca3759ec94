"""Which class a model answers with, given its probabilities and what each error costs: a public setting of the owner.

The answer is the class with the lowest expected cost. For two classes that is a threshold on the probability of the
second one: the cost of answering it wrongly, divided by the sum of both costs. Without costs the answer is the most
probable class. All of this is post-processing of probabilities that were released.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quietmax.data.encoding import quoted
from quietmax.errors import InvalidInput

Costs = tuple[tuple[float, ...], ...]
"""The cost of an answer by true class (rows) and predicted class (columns); 0 on the diagonal."""
LEAST_THRESHOLD = 1e-9
NOT_TOO_CLOSE = f"; at least {LEAST_THRESHOLD:g} away from both"


def costs_of(
    classes: Sequence[object],
    threshold: Mapping[Any, float] | None = None,
    cost: Mapping[tuple[Any, Any], float] | None = None,
) -> Costs | None:
    """Return the costs of errors that a threshold stands for, or those given; 1 for each error that is not named.

    None: neither was given.
    """
    names = [str(name) for name in classes]
    if threshold and cost:
        raise InvalidInput("Only one of `threshold` and `cost` can be given.")
    for name in [*(threshold or ()), *(each for pair in cost or () for each in pair)]:
        if str(name) not in names:
            raise InvalidInput(f"There is no class {str(name)!r}; the classes are {quoted(names)}.")
    if threshold:
        if len(names) != 2 or len(threshold) != 1:
            raise InvalidInput(
                "`threshold` names one of two classes and its least probability, as in yes=0.3. Models of more classes "
                "take costs."
            )
        ((name, least),) = threshold.items()
        if not is_threshold(least):
            raise InvalidInput(f"A threshold must be between 0 and 1, got {least}{NOT_TOO_CLOSE}.")
        second = least if str(name) == names[1] else 1 - least
        return ((0.0, second), (1 - second, 0.0))
    return _costs_of_errors(names, cost) if cost else None


def _costs_of_errors(names: list[str], cost: Mapping[tuple[Any, Any], float]) -> Costs:
    """Return the costs of all errors; 1 for each that is not named."""
    table = 1.0 - np.eye(len(names))
    for (true, predicted), number in cost.items():
        if str(true) == str(predicted) or not 0 < number < math.inf:
            raise InvalidInput(
                f"A cost must be a positive number for an answer that is wrong, got {number} for {true!r} answered as "
                f"{predicted!r}."
            )
        table[names.index(str(true)), names.index(str(predicted))] = number
    costs = tuple(map(tuple, table.tolist()))
    if len(names) == 2 and not is_threshold(threshold_of(costs)):
        raise InvalidInput(f"One cost may be at most {1 / LEAST_THRESHOLD:g} times the other.")
    return costs


def checked_costs(stored: Any, classes: int) -> Costs | None:
    """Return costs that were stored as JSON; raise ValueError if they are none."""
    if stored is None:
        return None
    table = np.array(stored, dtype=np.float64)
    wrong = ~np.eye(classes, dtype=bool)
    if table.shape != (classes, classes) or table[~wrong].any() or not np.isfinite(table).all():
        raise ValueError("not a table of costs")
    if not (table[wrong] > 0).all():
        raise ValueError("costs must be positive")
    costs = tuple(map(tuple, table.tolist()))
    if classes == 2 and not is_threshold(threshold_of(costs)):
        raise ValueError("one cost is too large beside the other")
    return costs


def is_threshold(probability: float) -> bool:
    """Return whether a probability is far enough from 0 and 1 to be a threshold."""
    return LEAST_THRESHOLD <= probability <= 1.0 - LEAST_THRESHOLD


def threshold_of(costs: Costs | None) -> float:
    """Return the probability above which the second of two classes is the answer."""
    return 0.5 if costs is None else round(costs[0][1] / (costs[0][1] + costs[1][0]), 12)


def decided(probabilities: NDArray[np.float64], costs: Costs | None) -> NDArray[np.int64]:
    """Return the class of each row, from the probabilities of that row alone."""
    if costs is None:
        return np.asarray(probabilities.argmax(-1), dtype=np.int64)
    if len(costs) == 2:
        return (probabilities[:, 1] > threshold_of(costs)).astype(np.int64)
    expected = sum(probabilities[:, [true]] * np.array(row) for true, row in enumerate(costs))
    return np.asarray(np.argmin(expected, axis=1), dtype=np.int64)


def decision_in_words(costs: Costs | None, classes: Sequence[object]) -> str:
    """Return how a model answers, as a phrase."""
    if costs is None:
        return "the most probable class"
    if len(costs) == 2:
        return f"{classes[1]} if its probability is above {threshold_of(costs):.4g}, otherwise {classes[0]}"
    named = ", ".join(
        f"{classes[true]} answered as {classes[predicted]} {cost:.4g}"
        for true, row in enumerate(costs)
        for predicted, cost in enumerate(row)
        if predicted != true and cost != 1
    )
    return f"the class with the lowest expected cost ({named}; any other error 1)"

"""The public set of classes of an estimator, and labels as places in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quietmax.errors import InvalidInput


def class_numbers(
    labels: NDArray[Any], declared: Sequence[Any] | None
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The classes in order, and the place of each label among them; without a declaration they are read off the labels.

    A refusal shows no label: it may reach people who must not see the records.

    >>> class_numbers(np.array(["yes", "no", "yes"]), ("no", "yes"))
    (array(['no', 'yes'], dtype='<U3'), array([1, 0, 1]))
    """
    classes = np.unique(labels) if declared is None else np.asarray(declared)
    if classes.ndim != 1:
        raise InvalidInput("The declared classes are no list; declare each class once, as in range(10).")
    numbers = {label: number for number, label in enumerate(classes.tolist())}
    if declared is None and len(classes) < 2:
        raise InvalidInput(
            "The labels hold one class only, but a classifier needs at least two different classes; declare the "
            "classes, or give records of another class."
        )
    if len(numbers) < 2 or len(numbers) < len(classes):
        raise InvalidInput(
            f"The declared classes are {classes.tolist()[:20]}, but a classifier needs at least two different "
            "classes; declare each class once."
        )
    places = np.array([numbers.get(label, -1) for label in labels.tolist()], dtype=np.int64)
    if (places < 0).any():
        raise InvalidInput(
            f"{len(classes)} classes were declared, but the data hold a label that is not among them; correct that "
            "label or declare its class."
        )
    return classes, places

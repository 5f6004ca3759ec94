"""Records and labels as scikit-learn checks them; what it says about them shows no value and no count of records."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from quietmax.accounting.guarantee import Guarantee, Status
from quietmax.errors import InvalidInput
from quietmax.models.features.base import FeatureMap
from quietmax.models.features.generic import is_batched, runs_user_code


def checked_records(estimator: Any, X: ArrayLike, y: ArrayLike) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """A table of finite numbers in float32, and a label for each of its rows."""
    records: NDArray[np.float32]
    labels: NDArray[Any]
    try:
        with np.errstate(over="ignore"):
            records, labels = validate_data(estimator, X, y, dtype=np.float32)
        with warnings.catch_warnings():
            # whether most labels differ is a fact about the private labels
            warnings.filterwarnings("ignore", message="The number of unique classes")
            check_classification_targets(labels)
    except ValueError as problem:
        # the first line says what is wrong; further ones, and what stands behind "to float", show values, and the
        # list behind "samples" the numbers of rows
        told = str(problem).splitlines()[0].partition(" to float:")[0].partition(": [")[0].rstrip(":. ")
        raise InvalidInput(f"{told}; give a table of finite numbers and one label for each row.") from None
    return records, labels


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


LARGEST_SIZE = 10**9
"""More than the memory of a machine holds; a fixed number, so that a refusal tells nothing of the records."""


def checked_size(size: int) -> int:
    """The size, unless it cannot be the number of records in a table.

    >>> checked_size(1000)
    1000
    """
    if (
        isinstance(size, bool)
        or not isinstance(size, Real)
        or not 1 <= size <= LARGEST_SIZE
        or size != int(size)
    ):
        raise InvalidInput(
            f"The declared size is {size!r}, but must be a whole number from 1 to {LARGEST_SIZE:,}: give one."
        )
    return int(size)


@dataclass(frozen=True)
class Condition:
    """A sentence added to the reason of a guarantee, and the assumptions on which it then rests."""

    because: str
    assumptions: tuple[str, ...]


SETTINGS_PUBLIC = "The feature map and all settings were chosen without looking at the private records."
LIBRARY_ROUNDING = (
    "The numerical library rounds a record's features alike at every place of a batch and beside all other records. "
    "This was checked on synthetic records before training; `quietmax audit invariant` checks it again."
)
LIBRARY_STACK = (
    "The numerical library computes every network of a stack from that network's numbers alone, and rounds equal "
    "calls alike. `quietmax audit invariant` checks it."
)
CLASSES = Condition(
    "The classes were not declared (THEORY 3.1).",
    ("The set of classes is public: it was read off the labels, since none were declared.",),
)
SIZE = Condition(
    "The number of records was not declared (THEORY 3.1).",
    ("The number of records is public: it was read off them, since no declared_size was given.",),
)
MAP = Condition(
    "The feature map runs the user's own code.",
    ("The user's own feature map computes a record's features from that record alone.",),
)
BUILDER = Condition(
    "The teachers are the user's own modules.",
    ("The user's own modules share nothing: a record changes the answers of its own teacher alone.",),
)


def map_assumptions(description: Mapping[str, Any] | None) -> tuple[str, ...]:
    """What a proven guarantee assumes of the library because of its feature map, as `features.described` states it."""
    return () if description is None or not is_batched(description) else (LIBRARY_ROUNDING,)


def weakened(guarantee: Guarantee, condition: Condition) -> Guarantee:
    """The guarantee under a further condition."""
    status: Status = "conditional" if guarantee.status == "proven" else guarantee.status
    return guarantee.weakened(status, f"{guarantee.because} {condition.because}", condition.assumptions)


def runs_own_code(features: object) -> bool:
    """Whether a feature map (None for none) is the user's own, or holds code of theirs.

    >>> runs_own_code(None), runs_own_code(object())
    (False, True)
    """
    if isinstance(features, FeatureMap):
        return runs_user_code(features)
    return features is not None

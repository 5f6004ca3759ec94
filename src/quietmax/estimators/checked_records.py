"""Records and labels as scikit-learn checks them; what it says about them shows no value and no count of records."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from quietmax.errors import InvalidInput


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

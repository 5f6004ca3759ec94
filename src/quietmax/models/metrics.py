"""How good a classifier's answers are, in the paper's measures."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quietmax.data import Records
from quietmax.errors import InvalidInput


class _Predicts(Protocol):
    def predict(self, features: NDArray[np.floating]) -> NDArray[np.int64]: ...


def accuracy(model: _Predicts, records: Records) -> float:
    """The share of records whose label the model predicts."""
    return float((model.predict(records.features) == records.labels).mean())


def accuracy_loss(private: float, baseline: float) -> float:
    """``1 - acc_private / acc_baseline``, the paper's accuracy loss on the same test set.

    >>> accuracy_loss(0.45, 0.9)
    0.5
    """
    if baseline <= 0:
        raise InvalidInput(
            f"The baseline's accuracy is {baseline}, but a loss relative to it needs a positive one; give "
            "such a baseline."
        )
    return 1 - private / baseline

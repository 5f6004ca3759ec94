"""A whole training set in memory, as the tests of what an estimator is trained on look at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quietmax.accounting.guarantee import Unit
from quietmax.estimators.training_set import (
    Condition,
    Persons,
    TrainingRows,
    _data_conditions,
    _training_rows,
)


@dataclass(frozen=True, eq=False)
class TrainingSet:
    """The rows of all pieces, and what is known of them."""

    records: NDArray[np.float32]
    labels: NDArray[np.int64]
    names: NDArray[np.object_] | None
    rows: TrainingRows

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rows, name)

    @property
    def persons(self) -> Persons | None:
        return None if self.names is None else Persons.of(self.names)

    @property
    def unit(self) -> Unit:
        return self.rows.unit

    @property
    def units(self) -> int:
        """The number of persons, or of records if every row stands for itself."""
        return len(self.records) if self.persons is None else self.persons.count

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The conditions on which every guarantee for these rows rests."""
        return _data_conditions(
            classes_declared=self.rows.classes_declared,
            encoding=self.rows.encoding,
            code_before=self.rows.code_before,
        )


def training_set(estimator: Any, X: Any, y: Any, groups: Any) -> TrainingSet:
    """Read everything that an estimator is trained on."""
    rows = _training_rows(estimator, X, y, groups)
    pieces = list(rows.pieces)
    names = None
    if rows.unit == "person":
        names = np.concatenate([piece.persons for piece in pieces if piece.persons is not None])
    return TrainingSet(
        np.concatenate([piece.records for piece in pieces]),
        np.concatenate([piece.labels for piece in pieces]),
        names,
        rows,
    )

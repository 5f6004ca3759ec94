"""What a feature map is: a public function of one record, chosen without looking at the private records (THEORY 3.1).

A map must give a record the same features whatever other records it is computed with: otherwise removing
one record would move the others, and the sensitivity of everything built on the features would be wrong.
Matrix products and Fourier transforms may round differently with the shape of a batch, so maps that use
them always compute batches of one fixed shape (`in_batches`), multiply by matrices whose columns come in
sixteens (narrower ones were seen to round differently with a row's place in memory), and the tests check
that a record's features do not depend, bit for bit, on its place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quietmax.errors import InvalidInput
from quietmax.models.features.threads import side_by_side

Floats = NDArray[np.float32]

WIDTH = 16
"""Matrices that maps multiply by have a multiple of this many columns."""


class FeatureMap(ABC):
    """A public function that turns each record (m numbers) into d features; `kind` names it in files."""

    kind: ClassVar[str]

    @abstractmethod
    def dimension(self, columns: int) -> int:
        """The number of features a record of `columns` numbers becomes; refuses a number it cannot take."""

    @abstractmethod
    def _features(self, records: Floats) -> Floats:
        """The features of records already checked to be a finite (n, m) array."""

    def transform(self, records: ArrayLike) -> Floats:
        """The features of every record, in float32, shape (n, d)."""
        checked = as_matrix(records)
        expected = (len(checked), self.dimension(checked.shape[1]))
        features = np.ascontiguousarray(self._features(checked), dtype=np.float32)
        if features.shape != expected:
            raise InvalidInput(
                f"The feature map '{self.kind}' returned values of shape {features.shape}, but {expected} was "
                "expected; check what it computes."
            )
        return features

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """The map's public parameters as JSON values, with its `kind`; read by `feature_map_from_json`."""

    @classmethod
    @abstractmethod
    def from_json(cls, values: Mapping[str, Any]) -> FeatureMap:
        """The inverse of `to_json`."""


def as_matrix(records: ArrayLike) -> Floats:
    """Return the records as a finite float32 table, refusing anything else."""
    try:
        with np.errstate(over="ignore"):
            matrix = np.ascontiguousarray(records, dtype=np.float32)
    except (TypeError, ValueError):
        matrix = np.empty(0, np.float32)
    if matrix.ndim != 2:
        raise InvalidInput(
            "The records must be a table of numbers, one row per record; give an array of shape (n, m)."
        )
    if not np.isfinite(matrix).all():
        raise InvalidInput(
            "The records contain NaN, infinity or a number beyond float32; give finite numbers for every record."
        )
    return matrix


def in_batches(
    compute: Callable[[Floats], Floats],
    records: Floats,
    rows_at_once: int,
    dimension: int,
    *,
    apart: bool = False,
) -> Floats:
    """Apply `compute` to batches of exactly `rows_at_once` rows, the last one filled up with zeros.

    `apart` computes several batches at once, each on one thread.
    """
    features = np.empty((len(records), dimension), np.float32)

    def fill(number: int) -> None:
        start = number * rows_at_once
        batch = records[start : start + rows_at_once]
        rows = len(batch)
        if rows < rows_at_once:
            batch = np.concatenate([batch, np.zeros((rows_at_once - rows, records.shape[1]), np.float32)])
        features[start : start + rows] = compute(np.ascontiguousarray(batch))[:rows]

    batches = -(-len(records) // rows_at_once)
    if apart:
        side_by_side(fill, batches)
    else:
        for number in range(batches):
            fill(number)
    return features

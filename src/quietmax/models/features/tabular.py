"""Feature maps for tables: identity, scaling, one-hot encoding and normalisation, all with given constants."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from quietmax.errors import InvalidInput
from quietmax.models.features.base import FeatureMap, Floats, square_sums


@dataclass(frozen=True)
class Identity(FeatureMap):
    """The record itself.

    >>> Identity().transform([[1.0, 2.0]])
    array([[1., 2.]], dtype=float32)
    """

    kind: ClassVar[str] = "identity"

    def dimension(self, columns: int) -> int:
        """As many features as numbers."""
        return columns

    def _features(self, records: Floats) -> Floats:
        return records

    def to_json(self) -> dict[str, Any]:
        """`{"kind": "identity"}`."""
        return {"kind": self.kind}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Identity:  # noqa: ARG003
        """The inverse of `to_json`."""
        return cls()


@dataclass(frozen=True)
class Scaling(FeatureMap):
    """Clip column j to `[low_j, high_j]` and stretch it to [0, 1]; the bounds are given, never measured.

    >>> Scaling(low=(0.0, 10.0), high=(100.0, 20.0)).transform([[25.0, 30.0]])
    array([[0.25, 1.  ]], dtype=float32)
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    kind: ClassVar[str] = "scaling"

    def __post_init__(self) -> None:
        object.__setattr__(self, "low", tuple(float(value) for value in self.low))
        object.__setattr__(self, "high", tuple(float(value) for value in self.high))
        pairs = list(zip(self.low, self.high, strict=False))
        if (
            len(self.low) != len(self.high)
            or not pairs
            or not all(math.isfinite(low) and math.isfinite(high) and low < high for low, high in pairs)
        ):
            raise InvalidInput(
                "Scaling needs one finite lower and one higher finite upper bound per column; correct the bounds."
            )

    def dimension(self, columns: int) -> int:
        """As many features as columns."""
        if columns != len(self.low):
            raise InvalidInput(
                f"The records have {columns} columns, but bounds were given for {len(self.low)}; give one pair "
                "per column."
            )
        return columns

    def _features(self, records: Floats) -> Floats:
        low, high = np.array(self.low), np.array(self.high)
        return np.asarray((np.clip(records, low, high) - low) / (high - low), dtype=np.float32)

    def to_json(self) -> dict[str, Any]:
        """The bounds."""
        return {"kind": self.kind, "low": list(self.low), "high": list(self.high)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Scaling:
        """The inverse of `to_json`."""
        return cls(tuple(values["low"]), tuple(values["high"]))


@dataclass(frozen=True)
class OneHot(FeatureMap):
    """One feature per listed category of each column; `None` instead of a list keeps the column as it is.

    A value that is not listed becomes all zeros.

    >>> OneHot((None, (1.0, 2.0, 3.0))).transform([[0.5, 2.0], [0.25, 7.0]])
    array([[0.5 , 0.  , 1.  , 0.  ],
           [0.25, 0.  , 0.  , 0.  ]], dtype=float32)
    """

    categories: tuple[tuple[float, ...] | None, ...]
    kind: ClassVar[str] = "one-hot"

    def __post_init__(self) -> None:
        columns = tuple(
            None if column is None else tuple(float(value) for value in column) for column in self.categories
        )
        object.__setattr__(self, "categories", columns)
        if not columns or any(
            column is not None and (not column or len(set(column)) < len(column)) for column in columns
        ):
            raise InvalidInput(
                "One-hot encoding needs, for every column, None or a list of different categories; correct the lists."
            )

    def dimension(self, columns: int) -> int:
        """One feature per category, one per column kept."""
        if columns != len(self.categories):
            raise InvalidInput(
                f"The records have {columns} columns, but categories were given for {len(self.categories)}; give "
                "a list or None per column."
            )
        return sum(1 if column is None else len(column) for column in self.categories)

    def _features(self, records: Floats) -> Floats:
        parts = [
            values[:, None] if column is None else values[:, None] == np.array(column, np.float32)
            for values, column in zip(records.T, self.categories, strict=True)
        ]
        return np.concatenate(parts, axis=1).astype(np.float32)

    def to_json(self) -> dict[str, Any]:
        """The categories."""
        columns = [None if column is None else list(column) for column in self.categories]
        return {"kind": self.kind, "categories": columns}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> OneHot:
        """The inverse of `to_json`."""
        return cls(tuple(None if column is None else tuple(column) for column in values["categories"]))


@dataclass(frozen=True)
class UnitNorm(FeatureMap):
    """Divide every record by its length: `x / ||x||`, with a constant c > 0 `(x, c) / ||(x, c)||`.

    With the constant nothing is lost to a linear classifier: `w.x + b > 0` and `(w.x + (b/c) c) / ||(x,
    c)|| > 0` are the same statement. A record of zeros stays zero if there is no constant.

    >>> UnitNorm().transform([[3.0, 4.0]])
    array([[0.6, 0.8]], dtype=float32)
    >>> UnitNorm(constant=1.0).transform([[0.0, 0.0]])
    array([[0., 0., 1.]], dtype=float32)
    """

    constant: float = 0.0
    kind: ClassVar[str] = "unit-norm"

    def __post_init__(self) -> None:
        object.__setattr__(self, "constant", float(self.constant))
        if not 0.0 <= self.constant < math.inf:
            raise InvalidInput(
                f"The constant of a normalisation is {self.constant}, but must be at least 0; give such a number."
            )

    def dimension(self, columns: int) -> int:
        """One feature more if there is a constant."""
        return columns + (self.constant > 0.0)

    def _features(self, records: Floats) -> Floats:
        wide = records.astype(np.float64)
        if self.constant > 0.0:
            wide = np.concatenate([wide, np.full((len(wide), 1), self.constant)], axis=1)
        lengths = np.sqrt(square_sums(wide))
        unit = np.divide(wide, lengths, out=np.zeros_like(wide), where=lengths > 0.0)
        return np.asarray(unit, dtype=np.float32)

    def to_json(self) -> dict[str, Any]:
        """The constant."""
        return {"kind": self.kind, "constant": self.constant}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> UnitNorm:
        """The inverse of `to_json`."""
        return cls(float(values["constant"]))

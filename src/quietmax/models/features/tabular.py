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

    Examples
    --------
    >>> Identity().transform([[1.0, 2.0]])
    array([[1., 2.]], dtype=float32)
    """

    kind: ClassVar[str] = "identity"

    def dimension(self, columns: int) -> int:
        """Return the number of features: as many as numbers.

        Parameters
        ----------
        columns : int
            Numbers per record.

        Returns
        -------
        int
        """
        return columns

    def _features(self, records: Floats) -> Floats:
        return records

    def to_json(self) -> dict[str, Any]:
        """Return the kind as JSON values.

        Returns
        -------
        dict
        """
        return {"kind": self.kind}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Identity:  # noqa: ARG003
        """Return the map that `to_json` described.

        Parameters
        ----------
        values : mapping
            What `to_json` returned.

        Returns
        -------
        Identity
        """
        return cls()


@dataclass(frozen=True)
class Scaling(FeatureMap):
    """Clip each column to public bounds and scale it to [0, 1].

    Parameters
    ----------
    low, high : tuple of float
        Finite bounds of each column, `low < high`.

    Raises
    ------
    InvalidInput
        If the bounds are not valid.

    Examples
    --------
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
                "Scaling needs two finite bounds for each column, the lower one in `low` and the upper one in `high`."
            )

    def dimension(self, columns: int) -> int:
        """Return the number of features: as many as columns.

        Parameters
        ----------
        columns : int
            Numbers per record.

        Returns
        -------
        int
        """
        if columns != len(self.low):
            raise InvalidInput(
                f"The records must have {len(self.low)} columns, one for each pair of bounds; got {columns}."
            )
        return columns

    def _features(self, records: Floats) -> Floats:
        low, high = np.array(self.low), np.array(self.high)
        return np.asarray((np.clip(records, low, high) - low) / (high - low), dtype=np.float32)

    def to_json(self) -> dict[str, Any]:
        """Return the bounds as JSON values.

        Returns
        -------
        dict
        """
        return {"kind": self.kind, "low": list(self.low), "high": list(self.high)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Scaling:
        """Return the map that `to_json` described.

        Parameters
        ----------
        values : mapping
            What `to_json` returned.

        Returns
        -------
        Scaling
        """
        return cls(tuple(values["low"]), tuple(values["high"]))


@dataclass(frozen=True)
class OneHot(FeatureMap):
    """One feature per category of each column; a value that is not listed becomes all zeros.

    Parameters
    ----------
    categories : tuple of (tuple of float, or None)
        The categories of each column, all different; None keeps the column as it is.

    Raises
    ------
    InvalidInput
        If the categories are not valid.

    Examples
    --------
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
                "One-hot encoding needs None or a list of different categories for every column."
            )

    def dimension(self, columns: int) -> int:
        """Return the number of features: one per category, and one per column kept.

        Parameters
        ----------
        columns : int
            Numbers per record.

        Returns
        -------
        int
        """
        if columns != len(self.categories):
            raise InvalidInput(
                f"The records must have {len(self.categories)} columns, one for each entry of `categories`; got "
                f"{columns}."
            )
        return sum(1 if column is None else len(column) for column in self.categories)

    def _features(self, records: Floats) -> Floats:
        parts = [
            values[:, None] if column is None else values[:, None] == np.array(column, np.float32)
            for values, column in zip(records.T, self.categories, strict=True)
        ]
        return np.concatenate(parts, axis=1).astype(np.float32)

    def to_json(self) -> dict[str, Any]:
        """Return the categories as JSON values.

        Returns
        -------
        dict
        """
        columns = [None if column is None else list(column) for column in self.categories]
        return {"kind": self.kind, "categories": columns}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> OneHot:
        """Return the map that `to_json` described.

        Parameters
        ----------
        values : mapping
            What `to_json` returned.

        Returns
        -------
        OneHot
        """
        return cls(tuple(None if column is None else tuple(column) for column in values["categories"]))


@dataclass(frozen=True)
class UnitNorm(FeatureMap):
    """Divide every record by its length: `x / ||x||`, with a constant c > 0 `(x, c) / ||(x, c)||`.

    With the constant nothing is lost to a linear classifier: `w.x + b > 0` and `(w.x + (b/c) c) / ||(x,
    c)|| > 0` are the same statement. A record of zeros stays zero if there is no constant.

    Parameters
    ----------
    constant : float
        A number of at least 0 that is appended to every record; 0 appends nothing.

    Raises
    ------
    InvalidInput
        If the constant is not valid.

    Examples
    --------
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
                f"The constant of a normalisation must be a number of at least 0, got {self.constant}."
            )

    def dimension(self, columns: int) -> int:
        """Return the number of features: one more than numbers if there is a constant.

        Parameters
        ----------
        columns : int
            Numbers per record.

        Returns
        -------
        int
        """
        return columns + (self.constant > 0.0)

    def _features(self, records: Floats) -> Floats:
        wide = records.astype(np.float64)
        if self.constant > 0.0:
            wide = np.concatenate([wide, np.full((len(wide), 1), self.constant)], axis=1)
        lengths = np.sqrt(square_sums(wide))
        unit = np.divide(wide, lengths, out=np.zeros_like(wide), where=lengths > 0.0)
        return np.asarray(unit, dtype=np.float32)

    def to_json(self) -> dict[str, Any]:
        """Return the constant as JSON values.

        Returns
        -------
        dict
        """
        return {"kind": self.kind, "constant": self.constant}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> UnitNorm:
        """Return the map that `to_json` described.

        Parameters
        ----------
        values : mapping
            What `to_json` returned.

        Returns
        -------
        UnitNorm
        """
        return cls(float(values["constant"]))

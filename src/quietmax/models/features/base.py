"""The feature-map interface, and how maps are computed so that no record depends on another, bit for bit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import lru_cache
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quietmax._lazy import lazy_module
from quietmax._threads import parallel_map
from quietmax.errors import InvalidInput

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

Floats = NDArray[np.float32]

WIDTH = 16
"""Matrices that maps multiply by have a multiple of this many columns: products with fewer often round by position."""
_PUBLIC_SEED = 3008
_LARGEST_CHECKED = 1e12
_ADDED_AT_ONCE = 256
_NUMBERS_IN_CACHE = 2**18
"""About this many numbers are squared at once."""


class FeatureMap(ABC):
    """A public function that turns each record (m numbers) into d features (THEORY 3.1).

    A subclass implements `dimension`, `_features`, `to_json` and `from_json`. The features of a record must be a
    function of that record alone.

    Attributes
    ----------
    kind : str
        Name of the map in files.
    """

    kind: ClassVar[str]

    @abstractmethod
    def dimension(self, columns: int) -> int:
        """Return the number of features of a record."""

    @abstractmethod
    def _features(self, records: Floats) -> Floats:
        """Return the features of records, already checked to be a finite (n, m) array."""

    def transform(self, records: ArrayLike) -> Floats:
        """Return the features of records.

        Parameters
        ----------
        records : array, shape (n, m)
            Finite numbers.

        Returns
        -------
        ndarray of float32, shape (n, d)

        Raises
        ------
        InvalidInput
            If the records are not valid.
        """
        checked = _as_matrix(records)
        expected = (len(checked), self.dimension(checked.shape[1]))
        features = np.ascontiguousarray(self._features(checked), dtype=np.float32)
        if features.shape != expected:
            raise InvalidInput(
                f"The feature map '{self.kind}' must return an array of shape {expected}, got {features.shape}."
            )
        return features

    def to_json(self) -> dict[str, Any]:
        """Return the public parameters of a map that is a dataclass as JSON values, with its `kind`.

        A map inside it stands under `maps`, as several do.
        """
        values = {each.name: _as_json(getattr(self, each.name)) for each in _parameters(type(self))}
        if "feature_map" in values:
            values["maps"] = [values.pop("feature_map")]
        return {"kind": self.kind, **values}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> FeatureMap:
        """Return the map that `to_json` described; the maps in `values["maps"]` have been read."""
        if "maps" in values and "maps" not in {each.name for each in _parameters(cls)}:
            (inner,) = values["maps"]
            values = {**values, "feature_map": inner}
        return cls(
            **{
                each.name: _CONVERTED.get(str(each.type), _as_tuple)(values[each.name])
                for each in _parameters(cls)
                if each.name in values or each.default is MISSING
            }
        )


_CONVERTED: dict[str, Callable[[Any], Any]] = {"int": index, "float": float}
"""How a stored parameter is read, by the annotation of its field; lists become tuples."""


def _parameters(kind: type) -> tuple[Field[Any], ...]:
    if not is_dataclass(kind):
        raise InvalidInput(
            f"The feature map {kind.__name__} is not a dataclass, so it must implement `to_json` and `from_json`."
        )
    return tuple(each for each in fields(kind) if each.init)


def _as_json(value: Any) -> Any:
    if isinstance(value, FeatureMap):
        return value.to_json()
    return [_as_json(each) for each in value] if isinstance(value, tuple) else value


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(each) for each in value) if isinstance(value, list | tuple) else value


def _as_matrix(records: ArrayLike) -> Floats:
    try:
        with np.errstate(over="ignore"):
            matrix = np.ascontiguousarray(records, dtype=np.float32)
    except (TypeError, ValueError):
        matrix = np.empty(0, np.float32)
    if matrix.ndim != 2:
        raise InvalidInput("The records must be an array of numbers of shape (n, m), one row per record.")
    if not np.isfinite(matrix).all():
        raise InvalidInput(
            "The records must be finite numbers in the range of float32; one is NaN, infinite or too large."
        )
    return matrix


class BatchedMap(FeatureMap):
    """A map that the numerical library computes on batches of records.

    Every batch has the same shape and starts at the same alignment (torch aligns its memory to 64 bytes). What may
    still differ is the position of a record in its batch. So each map is first checked, once per process, number of
    columns and number of threads, on public random records: the features of a record must be the same, bit for bit,
    at every position and beside other records. A map that fails is computed one record at a time: then all records
    have the same position. The choice depends on public numbers alone.

    Attributes
    ----------
    parallel : bool
        Whether several batches may be computed at once, each on one thread.
    """

    parallel: ClassVar[bool] = False

    @abstractmethod
    def _batch_rows(self) -> int:
        """Return the number of records in a batch."""

    @abstractmethod
    def _batch(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the features of a batch of records, float32 of shape (rows, columns)."""

    def _prepare(self) -> None:
        """Compute what all batches share. Called before several threads need it."""

    def _rows_at_once(self, columns: int) -> int:
        """Return how many records of so many numbers are computed together: a batch, or 1 where the check failed."""
        return _checked_rows(self, columns, torch.get_num_threads())

    def _features(self, records: Floats) -> Floats:
        self._prepare()
        return _in_batches(self, records, self._rows_at_once(records.shape[1]))


def _in_batches(feature_map: BatchedMap, records: Floats, rows_at_once: int) -> Floats:
    """Return the features of all records from batches of exactly `rows_at_once` rows, the last padded with zeros."""
    columns = records.shape[1]
    features = np.empty((len(records), feature_map.dimension(columns)), np.float32)

    def _fill(number: int) -> None:
        part = records[number * rows_at_once : (number + 1) * rows_at_once]
        batch = torch.zeros(rows_at_once, columns, dtype=torch.float32, device="cpu")
        batch.numpy()[: len(part)] = part
        with torch.no_grad():
            computed = feature_map._batch(batch)
        features[number * rows_at_once :][: len(part)] = computed[: len(part)].numpy()

    batches = -(-len(records) // rows_at_once)
    if feature_map.parallel:
        parallel_map(_fill, batches)
    else:
        for number in range(batches):
            _fill(number)
    return features


@lru_cache(maxsize=64)
def _checked_rows(feature_map: BatchedMap, columns: int, threads: int) -> int:  # noqa: ARG001
    """Return the rows of a batch if every position in it gives the same features, else 1."""
    rows = feature_map._batch_rows()
    if rows > 1 and _positions_agree(feature_map, columns, rows):
        return rows
    if not _positions_agree(feature_map, columns, 1):
        raise InvalidInput(
            f"The feature map '{feature_map.kind}' must be a function of the record alone, but it gave one record "
            "different features in two calls; it may be random or keep state."
        )
    return 1


def _positions_agree(feature_map: BatchedMap, columns: int, rows: int) -> bool:
    """Return whether public records have the same features at all positions of a batch and beside other records."""
    generator = np.random.default_rng(_PUBLIC_SEED)
    small = generator.random((rows, columns), np.float32)
    if not _same_features(feature_map, small, _in_batches(feature_map, small, rows)):
        return False
    signs = generator.choice(np.array([-1.0, 1.0], np.float32), (rows, columns))
    large = signs * small * np.geomspace(_LARGEST_CHECKED, 1.0, columns, dtype=np.float32)
    try:
        expected = _in_batches(feature_map, large, rows)
    except Exception:  # Code of the user's own may refuse such numbers in any way.
        return True
    return _same_features(feature_map, large, expected)


def _same_features(feature_map: BatchedMap, mixed: Floats, expected: Floats) -> bool:
    rows = len(mixed)
    disturbed = mixed.copy()
    disturbed[1::4], disturbed[3::4] = 0.0, 1.0
    order = np.arange(rows)
    first, last = np.zeros_like(order), np.full_like(order, rows - 1)
    positions = ((mixed, order), (mixed[::-1], order[::-1]), (np.roll(mixed, 1, 0), np.roll(order, 1)))
    copies = ((mixed[first], first), (mixed[last], last), (disturbed, order))
    for table, source in (*positions, *copies):
        computed = _in_batches(feature_map, table, rows)
        # Where the features overflow, the bits of a NaN say nothing.
        same = (bits(computed) == bits(expected[source])) | (np.isnan(computed) & np.isnan(expected[source]))
        if not same[(table == mixed[source]).all(axis=1)].all():
            return False
    return True


def bits(values: Floats) -> NDArray[np.uint32]:
    """Return the bit patterns of float32 numbers, which tell -0 from 0 and compare NaN."""
    return np.ascontiguousarray(values).view(np.uint32)


def square_sums(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of squares of every row, by single additions in an order that depends on the width alone."""
    width = rows.shape[1]
    lanes = min(_ADDED_AT_ONCE, 1 << max(0, width - 1).bit_length())
    sums = np.zeros((len(rows), 1))
    height = max(1, _NUMBERS_IN_CACHE // max(1, width))
    for top in range(0, len(rows), height):
        part = rows[top : top + height]
        # Long lines are added faster than short ones. Short rows are turned into them at once.
        total = np.square(part[:, :lanes].T, order="C" if width <= lanes else "K")
        for start in range(lanes, width, lanes):
            squares = np.square(part[:, start : start + lanes]).T
            total[: len(squares)] += squares
        total, left = np.ascontiguousarray(total), lanes
        while left > 1:
            left //= 2
            upper = total[left:]
            total[: len(upper)] += upper
            total = total[:left]
        if width:
            sums[top : top + height, 0] = total[0]
    return sums

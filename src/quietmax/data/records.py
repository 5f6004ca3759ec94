"""Encoded records, and their division into training part, test part and pool.

A record is one row: its features and its label.  Two rows with the same identity (by default: equal features
and equal label) are copies of one record and always stay on the same side of a division.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from quietmax.data.encoding import Encoding
from quietmax.errors import InvalidInput

_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, eq=False)
class Records:
    """Encoded records: `features` (n, m) in float32, `labels` (n,) in `range(classes)`.

    `image_shape` is (channels, height, width) where the features are pixels; `encoding` says how the columns
    of a table became features; `identities` (n,) tells records apart where the encoding drops detail of the
    source.

    >>> Records("two points", np.eye(2, dtype=np.float32), np.array([0, 1]), classes=2).take([1]).labels
    array([1])
    """

    name: str
    features: NDArray[np.float32]
    labels: NDArray[np.int64]
    classes: int
    image_shape: tuple[int, int, int] | None = None
    encoding: Encoding | None = None
    identities: NDArray[np.uint64] | None = None

    def __post_init__(self) -> None:
        features = np.ascontiguousarray(self.features, dtype=np.float32)
        labels = np.ascontiguousarray(self.labels, dtype=np.int64)
        object.__setattr__(self, "features", features)
        object.__setattr__(self, "labels", labels)
        if features.ndim != 2 or labels.shape != features.shape[:1]:
            raise InvalidInput(
                f"The records of '{self.name}' need a table of features and one label per row, but the "
                f"features have shape {features.shape} and the labels {labels.shape}; give arrays of shapes "
                "(n, m) and (n,)."
            )
        if features.size and not (np.isfinite(features.min()) and np.isfinite(features.max())):
            row, column = np.argwhere(~np.isfinite(features))[0]
            raise InvalidInput(
                f"Feature {column} of record {row} of '{self.name}' is {features[row, column]}, but "
                "features must be finite numbers; correct or remove that record."
            )
        if labels.size and not (labels.min() >= 0 and labels.max() < self.classes):
            row = int(np.flatnonzero((labels < 0) | (labels >= self.classes))[0])
            raise InvalidInput(
                f"Record {row} of '{self.name}' has label {labels[row]}, but the declared classes are 0 to "
                f"{self.classes - 1}; correct the label or declare more classes."
            )
        if self.image_shape is not None and np.prod(self.image_shape) != features.shape[1]:
            raise InvalidInput(
                f"The records of '{self.name}' have {features.shape[1]} features, which do not make an "
                f"image of shape {self.image_shape}; correct the shape or leave it out."
            )

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: NDArray[np.int64] | Sequence[int]) -> Records:
        """Return the records at the given row numbers, in that order."""
        chosen = np.asarray(rows, dtype=np.int64)
        identities = None if self.identities is None else self.identities[chosen]
        return replace(
            self, features=self.features[chosen], labels=self.labels[chosen], identities=identities
        )

    def digest(self) -> str:
        """SHA-256 of the features and labels, the same for every order of the rows.

        >>> points = Records("points", np.eye(3, dtype=np.float32), np.array([0, 1, 1]), classes=2)
        >>> points.digest() == points.take([2, 0, 1]).digest()
        True
        """
        order = np.argsort(self.contents, kind="stable")
        sha256 = hashlib.sha256(f"{self.features.shape[1]} {self.classes} ".encode())
        for start in range(0, len(order), _ROWS_AT_ONCE):
            rows = order[start : start + _ROWS_AT_ONCE]
            sha256.update(self.features[rows].astype("<f4", copy=False).tobytes())
            sha256.update(self.labels[rows].astype("<i8", copy=False).tobytes())
        return sha256.hexdigest()

    @cached_property
    def contents(self) -> NDArray[np.uint64]:
        """A number per row, equal for rows of equal features and label."""
        return content_identities(self.features, self.labels)


def content_identities(features: NDArray[np.generic], labels: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a 64-bit number per row that is equal for equal rows.

    With fixed random odd multipliers `a` and the row's 32-bit words `x`, the number is `sum_j a_j * x_j mod
    2^64`, the label being one more word.  Different rows among n collide with a chance of about n^2 / 2^64,
    and a collision only keeps two records on the same side.
    """
    words = np.ascontiguousarray(features).view(np.uint32)
    multipliers = np.random.default_rng(0x51E7).integers(2**64, size=words.shape[1] + 1, dtype=np.uint64)
    multipliers |= np.uint64(1)
    identities: NDArray[np.uint64] = labels.astype(np.uint64) * multipliers[0]
    for start in range(0, len(words), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        identities[rows] += words[rows].astype(np.uint64) @ multipliers[1:]
    return identities


@dataclass(frozen=True, eq=False)
class Split:
    """Disjoint rows of the same records: training and test part of equal size, and the rest as a pool."""

    records: Records
    train_rows: NDArray[np.int64]
    test_rows: NDArray[np.int64]
    pool_rows: NDArray[np.int64]
    seed: int

    @property
    def name(self) -> str:
        """Name of the data set."""
        return self.records.name

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.records.classes

    @cached_property
    def train(self) -> Records:
        """The training part."""
        return self.records.take(self.train_rows)

    @cached_property
    def test(self) -> Records:
        """The test part, as large as the training part."""
        return self.records.take(self.test_rows)

    @cached_property
    def pool(self) -> Records:
        """What neither part uses; shadow models draw from it."""
        return self.records.take(self.pool_rows)

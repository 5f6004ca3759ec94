"""Encoded records, and their division into training part, test part and pool.

A record is one row: its features and its label.  Rows with the same identity (by default: equal features,
whatever their labels) count as copies of one record and always stay on the same side of a division.
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

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROWS_AT_ONCE = 4096
_WORDS_AT_ONCE = 1 << 17
_ZERO = np.float32(0)  # added to features so that -0.0 and 0.0 have the same bits


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
        if self.identities is not None and self.identities.shape != labels.shape:
            raise InvalidInput(
                f"The records of '{self.name}' have {len(labels)} rows but identities of shape "
                f"{self.identities.shape}; give one identity per row."
            )
        if not _all_finite(features):
            row, column = np.argwhere(~np.isfinite(features))[0]
            raise InvalidInput(
                f"Feature {column} of record {row} of '{self.name}' is not a finite number (NaN or "
                "infinite), but features must be finite; correct or remove that record."
            )
        if labels.size and not (labels.min() >= 0 and labels.max() < self.classes):
            row = int(np.flatnonzero((labels < 0) | (labels >= self.classes))[0])
            raise InvalidInput(
                f"Record {row} of '{self.name}' has a label outside the declared classes 0 to "
                f"{self.classes - 1}; correct the label or declare more classes."
            )
        if self.image_shape is not None and np.prod(self.image_shape) != features.shape[1]:
            raise InvalidInput(
                f"The records of '{self.name}' have {features.shape[1]} features, which do not make an "
                f"image of shape {self.image_shape}; correct the shape or leave it out."
            )

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_] | Sequence[int]) -> Records:
        """Return the records at the given row numbers, in that order (or those that a mask of booleans marks)."""
        given = np.asarray(rows)
        chosen = np.flatnonzero(given) if given.dtype == np.bool_ else given.astype(np.int64)
        identities = None if self.identities is None else self.identities[chosen]
        return replace(
            self, features=self.features[chosen], labels=self.labels[chosen], identities=identities
        )

    def digest(self) -> str:
        """SHA-256 of the features and labels, the same for every order of the rows.

        By it a ledger recognises records it has seen; it is computed from private records, so do not publish
        it.

        >>> points = Records("points", np.eye(3, dtype=np.float32), np.array([0, 1, 1]), classes=2)
        >>> points.digest() == points.take([2, 0, 1]).digest()
        True
        """
        order = np.lexsort((self.labels, self.contents))
        sha256 = hashlib.sha256(f"{self.features.shape[1]} {self.classes} ".encode())
        for start in range(0, len(order), _ROWS_AT_ONCE):
            rows = order[start : start + _ROWS_AT_ONCE]
            sha256.update((self.features[rows] + _ZERO).astype("<f4", copy=False).tobytes())
            sha256.update(self.labels[rows].astype("<i8", copy=False).tobytes())
        return sha256.hexdigest()

    @cached_property
    def contents(self) -> NDArray[np.uint64]:
        """A number per row, equal for rows of equal features."""
        return content_identities(self.features)


def _all_finite(features: NDArray[np.float32]) -> bool:
    """Tell whether all features are finite; the sum is so in nearly every case, which takes one fast pass."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(features.sum())) or bool(np.isfinite(features).all())


def content_identities(features: NDArray[np.float32]) -> NDArray[np.uint64]:
    """Return a 64-bit number per row that is equal for equal rows.

    The row's 32-bit words are scrambled one by one into `x`; with fixed odd multipliers `a` the number is
    `sum_j a_j * x_j mod 2^64`.  Some two different rows among n share a number with a chance of about n^2 /
    2^60, which would merely keep two records on the same side.
    """
    count, width = features.shape
    multipliers = scrambled(np.arange(1, width + 1, dtype=np.uint64) * GOLDEN) | np.uint64(1)
    identities = np.empty(count, dtype=np.uint64)
    step = max(1, _WORDS_AT_ONCE // max(width, 1))
    for start in range(0, count, step):
        words = (features[start : start + step] + _ZERO).view(np.uint32)
        words ^= words >> np.uint32(16)
        words *= np.uint32(0x7FEB352D)
        words ^= words >> np.uint32(15)
        identities[start : start + step] = words.astype(np.uint64) @ multipliers
    return identities


def scrambled(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit numbers one to one (the finaliser of SplitMix64; Steele, Lea and Flood 2014)."""
    mixed = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


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


_DEFAULT_SHARE = (2, 5)


def split(records: Records, *, size: int | None = None, seed: int = 0) -> Split:
    """Divide the records into `size` for training, `size` for testing and a pool of all others.

    Without `size`, training and test part take two fifths each.  Copies of one record stay on the same side.

    >>> points = Records("points", np.arange(10, dtype=np.float32)[:, None], np.arange(10) % 2, classes=2)
    >>> parts = split(points, size=4, seed=7)
    >>> len(parts.train), len(parts.test), len(parts.pool)
    (4, 4, 2)
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise InvalidInput(
            f"The seed is {seed!r}, but it must be a whole number from 0 upwards; give such a number."
        )
    count = len(records)
    wanted = count * _DEFAULT_SHARE[0] // _DEFAULT_SHARE[1] if size is None else size
    if isinstance(wanted, bool) or not isinstance(wanted, int | np.integer) or wanted < 1:
        raise InvalidInput(
            f"Training and test part would have {wanted!r} records each of the {count} of '{records.name}', "
            "but at least 1 is needed; ask for another number of records."
        )
    if 2 * wanted > count:
        raise InvalidInput(
            f"'{records.name}' has {count} records, but {wanted} for training and as many others for "
            f"testing were asked for; ask for at most {count // 2}."
        )
    groups = _groups_in_order(records, int(seed))
    while True:
        train, test, pool = _fill(groups, int(wanted), count)
        reached = min(len(train), len(test))
        if reached == wanted:
            return Split(records, train, test, pool, int(seed))
        if size is not None or reached == 0:
            raise InvalidInput(
                f"'{records.name}' holds so many copies of the same records that two parts of {wanted} "
                "cannot be filled without putting copies of one record on both sides; ask for fewer, or "
                "name a `person` column if these are different people."
            )
        wanted = reached


def _groups_in_order(records: Records, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return all rows, copies of one record next to each other, and the sizes of these groups."""
    identities = records.identities if records.identities is not None else records.contents
    keys = scrambled(scrambled(identities) + np.uint64((seed * int(GOLDEN)) % 2**64))
    rows = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.diff(keys[rows], prepend=~keys[rows[:1]]))
    return rows.astype(np.int64), np.diff(starts, append=len(rows)).astype(np.int64)


def _fill(
    groups: tuple[NDArray[np.int64], NDArray[np.int64]], size: int, count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Give each group, in order, to the first part that has room for all of it."""
    rows, sizes = groups
    if len(sizes) == count:
        return rows[:size], rows[size : 2 * size], rows[2 * size :]
    room = [size, size, count]
    part_of_group = np.empty(len(sizes), dtype=np.int64)
    for group, members in enumerate(sizes.tolist()):
        part = 0 if members <= room[0] else 1 if members <= room[1] else 2
        room[part] -= members
        part_of_group[group] = part
    part_of_row = np.repeat(part_of_group, sizes)
    return rows[part_of_row == 0], rows[part_of_row == 1], rows[part_of_row == 2]

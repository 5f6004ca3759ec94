"""Encoded records, and their split into a training set, a test set and a pool.

A record is one row: its features and its label.  Rows with the same identity (by default: equal features,
whatever their labels) count as copies of one record and always stay on the same side of a split.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from quietmax.data.encoding import Encoding
from quietmax.errors import InvalidData, InvalidInput

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROWS_AT_ONCE = 4096
_WORDS_AT_ONCE = 1 << 17
_ZERO = np.float32(0)  # added to features so that -0.0 and 0.0 have the same bits


@dataclass(frozen=True, eq=False)
class Records:
    """Encoded records.

    Parameters
    ----------
    name : str
        Name of the data set.
    features : ndarray of float32, shape (records, features)
        Finite numbers.
    labels : ndarray of int64, shape (records,)
        Class numbers in `range(classes)`.
    classes : int
        Number of classes.
    image_shape : (int, int, int), optional
        Channels, height and width, where the features are pixels.
    encoding : Encoding, optional
        How the columns of a table became features.
    identities : ndarray of uint64, shape (records,), optional
        Equal for rows that are copies of one record (or belong to one person); by default rows with equal features.

    Attributes
    ----------
    content_hashes : ndarray of uint64
        One number per row, equal for rows of equal features.

    Raises
    ------
    InvalidInput
        If shapes do not match, a feature is not finite or a label is not a class.

    Examples
    --------
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
                f"The features and labels of '{self.name}' must have the shapes (n, m) and (n,), got "
                f"{features.shape} and {labels.shape}."
            )
        if self.identities is not None and self.identities.shape != labels.shape:
            raise InvalidInput(
                f"'{self.name}' must have one identity per row: {len(labels)} rows, but identities of shape "
                f"{self.identities.shape}."
            )
        if not _all_finite(features):
            row, column = np.argwhere(~np.isfinite(features))[0]
            raise InvalidData(
                f"Features must be finite; feature {column} of record {row} of '{self.name}' is NaN or infinite."
            )
        if labels.size and not (labels.min() >= 0 and labels.max() < self.classes):
            row = int(np.flatnonzero((labels < 0) | (labels >= self.classes))[0])
            raise InvalidData(
                f"Labels must be class numbers from 0 to {self.classes - 1}; record {row} of '{self.name}' has another."
            )
        if self.image_shape is not None and np.prod(self.image_shape) != features.shape[1]:
            raise InvalidInput(
                f"The records of '{self.name}' have {features.shape[1]} features, which do not form an image of "
                f"shape {self.image_shape}."
            )

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_] | Sequence[int]) -> Records:
        """Return some of the records.

        Parameters
        ----------
        rows : array of int or bool
            Row numbers in the wanted order, or a mask.

        Returns
        -------
        Records
        """
        given = np.asarray(rows)
        chosen = np.flatnonzero(given) if given.dtype == np.bool_ else given.astype(np.int64)
        identities = None if self.identities is None else self.identities[chosen]
        return replace(
            self, features=self.features[chosen], labels=self.labels[chosen], identities=identities
        )

    def digest(self) -> str:
        """Return a SHA-256 of the features and labels that does not depend on the order of the rows.

        A ledger recognises a training set by it.  It is computed from private records: do not publish it.

        Returns
        -------
        str
            64 hexadecimal digits.

        Examples
        --------
        >>> points = Records("points", np.eye(3, dtype=np.float32), np.array([0, 1, 1]), classes=2)
        >>> points.digest() == points.take([2, 0, 1]).digest()
        True
        """
        order = np.lexsort((self.labels, self.content_hashes))
        sha256 = hashlib.sha256(f"{self.features.shape[1]} {self.classes} ".encode())
        for start in range(0, len(order), _ROWS_AT_ONCE):
            rows = order[start : start + _ROWS_AT_ONCE]
            sha256.update((self.features[rows] + _ZERO).astype("<f4", copy=False).tobytes())
            sha256.update(self.labels[rows].astype("<i8", copy=False).tobytes())
        return sha256.hexdigest()

    @cached_property
    def content_hashes(self) -> NDArray[np.uint64]:
        """One number per row, equal for rows of equal features."""
        return hash_rows(self.features)


def _all_finite(features: NDArray[np.float32]) -> bool:
    """Return whether all features are finite; their sum decides nearly every case in one fast pass."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(features.sum())) or bool(np.isfinite(features).all())


def hash_rows(features: NDArray[np.float32]) -> NDArray[np.uint64]:
    """Return a 64-bit number per row that is equal for equal rows.

    The row's 32-bit words are scrambled one by one into `x`; with fixed odd multipliers `a` the number is
    `sum_j a_j * x_j mod 2^64`.  The chance that any two different rows among n share a number is about n^2 /
    2^60; a split would then keep these two records on the same side.

    Parameters
    ----------
    features : ndarray of float32, shape (records, features)
        The rows.

    Returns
    -------
    ndarray of uint64, shape (records,)
    """
    count, width = features.shape
    multipliers = _scramble(np.arange(1, width + 1, dtype=np.uint64) * _GOLDEN) | np.uint64(1)
    hashes = np.empty(count, dtype=np.uint64)
    step = max(1, _WORDS_AT_ONCE // max(width, 1))
    for start in range(0, count, step):
        words = (features[start : start + step] + _ZERO).view(np.uint32)
        words ^= words >> np.uint32(16)
        words *= np.uint32(0x7FEB352D)
        words ^= words >> np.uint32(15)
        hashes[start : start + step] = words.astype(np.uint64) @ multipliers
    return hashes


def _scramble(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit numbers one to one (the finaliser of SplitMix64; Steele, Lea and Flood 2014)."""
    mixed = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@dataclass(frozen=True, eq=False)
class Split:
    """Records divided into a training set, a test set of the same size, and a pool of all others.

    Parameters
    ----------
    records : Records
        All records.
    train_rows, test_rows, pool_rows : ndarray of int64
        Disjoint row numbers of the records.
    seed : int
        The seed of the split.

    Attributes
    ----------
    name : str
        Name of the data set.
    classes : int
        Number of classes.
    train, test, pool : Records
        The records of each part.
    """

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
        """The training set."""
        return self.records.take(self.train_rows)

    @cached_property
    def test(self) -> Records:
        """The test set, as large as the training set."""
        return self.records.take(self.test_rows)

    @cached_property
    def pool(self) -> Records:
        """All other records; shadow models draw from them."""
        return self.records.take(self.pool_rows)


def split(records: Records, *, size: int | None = None, seed: int = 0) -> Split:
    """Split records into a training set, a test set of the same size and a pool.

    Copies of one record stay on the same side.

    Parameters
    ----------
    records : Records
        The records to split.
    size : int, optional
        Size of the training set and of the test set; by default two fifths of the records, or less where copies
        leave no other choice.
    seed : int
        Public seed of the order in which records are assigned.

    Returns
    -------
    Split

    Raises
    ------
    InvalidInput
        If there are too few records, or too many copies of one record.

    Examples
    --------
    >>> points = Records("points", np.arange(10, dtype=np.float32)[:, None], np.arange(10) % 2, classes=2)
    >>> parts = split(points, size=4, seed=7)
    >>> len(parts.train), len(parts.test), len(parts.pool)
    (4, 4, 2)
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise InvalidInput(f"seed must be an integer of at least 0, got {seed!r}.")
    count = len(records)
    wanted = count * 2 // 5 if size is None else size
    if isinstance(wanted, bool) or not isinstance(wanted, int | np.integer) or wanted < 1:
        raise InvalidInput(
            f"The size of the training set must be an integer of at least 1, got {wanted!r} "
            f"('{records.name}' has {count} records)."
        )
    if 2 * wanted > count:
        raise InvalidInput(
            f"'{records.name}' has {count} records, so the training set and the test set can have at most "
            f"{count // 2} each; got {wanted}."
        )
    groups = _groups_in_order(records, int(seed))
    while True:
        train, test, pool = _fill(groups, int(wanted), count)
        reached = min(len(train), len(test))
        if reached == wanted:
            return Split(records, train, test, pool, int(seed))
        if size is not None or reached == 0:
            raise InvalidInput(
                f"'{records.name}' has too many copies of the same records for two sets of {wanted}: copies must "
                "stay on the same side. Smaller sets may fit; a `person` column tells rows of different people "
                "apart."
            )
        wanted = reached


def _groups_in_order(records: Records, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return all rows, copies of one record next to each other, and the sizes of these groups."""
    identities = records.identities if records.identities is not None else records.content_hashes
    keys = _scramble(_scramble(identities) + np.uint64((seed * int(_GOLDEN)) % 2**64))
    rows = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.diff(keys[rows], prepend=~keys[rows[:1]]))
    return rows.astype(np.int64), np.diff(starts, append=len(rows)).astype(np.int64)


def _fill(
    groups: tuple[NDArray[np.int64], NDArray[np.int64]], size: int, count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Assign each group, in order, to the first part that has room for all of it."""
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

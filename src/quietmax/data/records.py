"""Encoded records, and the two ways to split them.

A record is one row: its features and its label.  A table of the user is split by a keyed hash: each person (without
a `person` column: each row, by its features) is held out or not, whoever else is in the table.  The data sets of
the paper are split as in the paper, into a training set and a test set of equal size and a pool.  All rows of one
person, and rows of equal features, always stay on the same side.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quietmax.data.encoding import Encoding
from quietmax.errors import InvalidData, InvalidInput

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROWS_AT_ONCE = 4096
_WORDS_AT_ONCE = 1 << 17
_UTF_8 = ("utf-8", "surrogatepass")
_ZERO = np.float32(0)  # added to features so that -0.0 and 0.0 have the same bits


def _check_seed(seed: object) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise InvalidInput(f"seed must be an integer of at least 0, got {seed!r}.")


@dataclass(frozen=True)
class Holdout:
    """How the persons of a table were held out of training: by a keyed hash of each person alone.

    Parameters
    ----------
    share : float
        Probability of a person to be held out, at least 0 and below 1.
    seed : int
        Public key of the hash.

    Raises
    ------
    InvalidInput
        If the share or the seed is not valid.

    Examples
    --------
    >>> Holdout.from_json(Holdout(0.2, seed=7).to_json())
    Holdout(share=0.2, seed=7)
    """

    share: float
    seed: int = 0

    def __post_init__(self) -> None:
        number = isinstance(self.share, int | float | np.number) and not isinstance(self.share, bool)
        if not number or not 0 <= self.share < 1:
            raise InvalidInput(f"holdout must be a number of at least 0 and below 1, got {self.share!r}.")
        _check_seed(self.seed)
        object.__setattr__(self, "share", float(self.share))
        object.__setattr__(self, "seed", int(self.seed))

    def to_json(self) -> dict[str, Any]:
        """Return share and seed by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Holdout:
        """Return the holdout of share and seed."""
        if not isinstance(content, Mapping) or set(content) != {"share", "seed"}:
            raise InvalidInput("A holdout must have the keys 'share' and 'seed'.")
        return cls(**content)


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
    persons : ndarray of str, shape (records,), optional
        The person that each row belongs to, where the schema names a `person` column.
    raw_hashes : ndarray of uint64, shape (records,), optional
        Equal for rows that were equal before they were encoded, where a data set offers several encodings that
        must be split alike.
    holdout : Holdout, optional
        How persons were held out of the table that these records come from.

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
    persons: NDArray[np.object_] | None = None
    raw_hashes: NDArray[np.uint64] | None = None
    holdout: Holdout | None = None

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
        for name in ("persons", "raw_hashes"):
            given = getattr(self, name)
            if given is not None and given.shape != labels.shape:
                raise InvalidInput(
                    f"The {name} of '{self.name}' must have the shape ({len(labels)},), got {given.shape}."
                )
        with np.errstate(over="ignore", invalid="ignore"):  # nearly always the sum says it, in one fast pass
            finite = np.isfinite(features.sum()) or np.isfinite(features).all()
        if not finite:
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
        """Return the records of some row numbers, in that order, or of a mask."""
        given = np.asarray(rows)
        chosen = np.flatnonzero(given) if given.dtype == np.bool_ else given.astype(np.int64)
        return replace(
            self,
            features=self.features[chosen],
            labels=self.labels[chosen],
            persons=None if self.persons is None else self.persons[chosen],
            raw_hashes=None if self.raw_hashes is None else self.raw_hashes[chosen],
        )

    @property
    def unit(self) -> Literal["record", "person"]:
        """Whom a guarantee for these records protects: one row, or all rows of one person."""
        return "record" if self.persons is None else "person"

    @cached_property
    def units(self) -> NDArray[np.int64]:
        """The number of each row's unit, from 0 in the order of first appearance: its person, else the row itself."""
        if self.persons is None:
            return np.arange(len(self), dtype=np.int64)
        numbers: dict[str, int] = {}
        return np.array([numbers.setdefault(name, len(numbers)) for name in self.persons], dtype=np.int64)

    def digest(self) -> str:
        """Return a SHA-256 of the features and labels that does not depend on the order of the rows.

        A ledger recognises a training set by it.  It is computed from private records: do not publish it.

        >>> points = Records("points", np.eye(3, dtype=np.float32), np.array([0, 1, 1]), classes=2)
        >>> points.digest() == points.take([2, 0, 1]).digest()
        True
        """
        order = np.lexsort((self.labels, self._content_hashes))
        sha256 = hashlib.sha256(f"{self.features.shape[1]} {self.classes} ".encode())
        for start in range(0, len(order), _ROWS_AT_ONCE):
            rows = order[start : start + _ROWS_AT_ONCE]
            sha256.update((self.features[rows] + _ZERO).astype("<f4", copy=False).tobytes())
            sha256.update(self.labels[rows].astype("<i8", copy=False).tobytes())
        return sha256.hexdigest()

    @cached_property
    def _content_hashes(self) -> NDArray[np.uint64]:
        """One number per row, equal for rows of equal features."""
        return _hash_rows(self.features)


def _hash_rows(features: NDArray[np.float32]) -> NDArray[np.uint64]:
    """Return a 64-bit number per row; different rows among n share one with a chance of about n^2 / 2^60."""
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
    """Records divided into a training set, a test set and a pool.

    Parameters
    ----------
    records : Records
        All records.
    train_rows, test_rows, pool_rows : ndarray of int64
        Disjoint row numbers of the records.
    seed : int
        The seed of the split.

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
    def holdout(self) -> Holdout | None:
        """How persons were held out; None for the paper's split."""
        return self.records.holdout

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
        """The test set: the holdout, or as many records as in the training set."""
        return self.records.take(self.test_rows)

    @cached_property
    def pool(self) -> Records:
        """All other records; shadow models draw from them."""
        return self.records.take(self.pool_rows)


def hold_out(records: Records, share: float = 0.0, *, seed: int = 0) -> Split:
    """Split a table into the training set and the holdout.

    Each person is held out or not by a keyed hash of that person alone (THEORY 3.8): adding or removing other people
    moves nobody, so a guarantee for the training set is the same guarantee for the table.

    Parameters
    ----------
    records : Records
        The encoded table.
    share : float
        Probability of a person (without persons: of a row) to be held out; 0 means that everybody trains.
    seed : int
        Public key of the hash.

    Returns
    -------
    Split
        The rows keep their order.  The test set is the holdout, the pool is empty.

    Raises
    ------
    InvalidInput
        If the share or the seed is not valid.

    Examples
    --------
    >>> visits = Records(
    ...     "visits",
    ...     np.arange(6, dtype=np.float32)[:, None],
    ...     np.array([0, 1, 0, 1, 0, 1]),
    ...     classes=2,
    ...     persons=np.array(["ann", "ann", "bob", "cid", "cid", "dan"], dtype=object),
    ... )
    >>> parts = hold_out(visits, 0.5, seed=1)
    >>> sorted(set(parts.train.persons)), sorted(set(parts.test.persons))
    (['ann', 'bob', 'dan'], ['cid'])
    """
    holdout = Holdout(share, seed)
    held_out = is_held_out(records, holdout)
    nobody = np.empty(0, dtype=np.int64)
    marked = replace(records, holdout=holdout)
    return Split(marked, np.flatnonzero(~held_out), np.flatnonzero(held_out), nobody, holdout.seed)


def is_held_out(records: Records, holdout: Holdout) -> NDArray[np.bool_]:
    """Return for every row whether it is held out."""
    if holdout.share == 0:
        return np.zeros(len(records), dtype=bool)
    key = hashlib.blake2b(str(holdout.seed).encode(), digest_size=32).digest()
    bound = np.uint64(math.floor(math.ldexp(holdout.share, 64)))
    if records.persons is not None:
        return _keyed_hashes((name.encode(*_UTF_8) for name in records.persons), key) < bound
    held_out = np.empty(len(records), dtype=bool)
    for start in range(0, len(records), _ROWS_AT_ONCE):
        rows = (records.features[start : start + _ROWS_AT_ONCE] + _ZERO).astype("<f4", copy=False)
        hashes = _keyed_hashes((row.tobytes() for row in rows), key)
        held_out[start : start + len(rows)] = hashes < bound
    return held_out


def _keyed_hashes(contents: Iterable[bytes], key: bytes) -> NDArray[np.uint64]:
    digests = (hashlib.blake2b(content, digest_size=8, key=key).digest() for content in contents)
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


def split(records: Records, *, size: int | None = None, seed: int = 0) -> Split:
    """Split records as in the paper: into a training set, a test set of the same size and a pool.

    Rows of one person, and copies of one record, stay on the same side.

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
    _check_seed(seed)
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
    if records.persons is not None:
        hashes = _keyed_hashes((person.encode(*_UTF_8) for person in records.persons), b"")
    else:
        hashes = records._content_hashes if records.raw_hashes is None else records.raw_hashes
    keys = _scramble(_scramble(hashes) + np.uint64((seed * int(_GOLDEN)) % 2**64))
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

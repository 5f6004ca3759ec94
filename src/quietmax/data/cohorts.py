"""Cohorts: each person of a table that grows belongs to one part of it, by a function of that person's own rows.

A model of a series is trained on one cohort, so that all versions together cost a person as much as their own cohort
does. Which cohort a person is in, and whether an erasure list leaves them out, depends on that person's rows, the list
and public numbers alone (THEORY 3.8, 3.17).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from quietmax._io import atomic_write
from quietmax.data.cells import as_string, is_missing, is_valid_unicode, numbered
from quietmax.data.encoding import (
    CategoricalColumn,
    Column,
    DateColumn,
    column_from_json,
    column_json,
    quoted,
    require_columns,
)
from quietmax.errors import DataUnavailable, InvalidInput, QuietmaxError

if TYPE_CHECKING:
    import pandas as pd

NO_COHORT = -1
"""The number of a row that says nothing about the cohort: its cell is missing, or not in the declared list or range."""
_MOST_PARTS = 65_536
_MOST_WAITING = 2**20
_PERIODS = ("year", "quarter", "month", "week", "day")
COHORT_FORMS = (
    "'COLUMN:month' (or year, quarter, week, day) for a column in `dates`, the name of a column in `categories`, or "
    "'hash:12' for 12 parts ('hash:12:7' with another key)"
)


@dataclass(frozen=True)
class CohortRule:
    """What says which cohort a person is in: the first period or category among their rows, or a keyed hash."""

    by: str  # As the schema states it
    column: Column | None = None  # The column of dates or categories; None for a hash

    def __post_init__(self) -> None:
        if self.column is None:
            _, *numbers = self.by.split(":")
            if not (_is_hash(self.by) and 2 <= int(numbers[0]) <= _MOST_PARTS):
                raise InvalidInput(
                    f"`cohort` must divide into 2 to {_MOST_PARTS:,} parts, as 'hash:12' does, got {self.by!r}."
                )
        elif isinstance(self.column, DateColumn) != (self._period is not None):
            raise InvalidInput(f"`cohort` must be {COHORT_FORMS}; got {self.by!r}.")

    @classmethod
    def of(cls, by: str, columns: Mapping[str, Column]) -> CohortRule:
        """Return the rule that a schema states; the columns are those that it declares dates or categories of."""
        if _is_hash(by):
            return cls(by)
        name, _, period = by.rpartition(":")
        column = columns.get(name if name and period in _PERIODS else by)
        if not isinstance(column, DateColumn | CategoricalColumn):
            raise InvalidInput(f"`cohort` must be {COHORT_FORMS}; got {by!r}.")
        return cls(by, column)

    @property
    def _period(self) -> str | None:
        name, _, period = self.by.rpartition(":")
        return period if name and self.column is not None and name == self.column.name else None

    def number(self, name: str) -> int:
        """Return the number of a cohort by its name; numbers rise in the public order."""
        found, column = None, self.column
        if column is None:
            parts = int(self.by.split(":")[1])
            shown = f"the numbers from 1 to {parts}"
            if name.isascii() and name.isdigit() and name == str(int(name)) and 1 <= int(name) <= parts:
                found = int(name)
        elif isinstance(column, CategoricalColumn):
            shown = quoted(column.categories)
            found = column.categories.index(name) if name in column.categories else None
        else:
            assert isinstance(column, DateColumn)
            low, high = (
                _period_of(date.fromisoformat(bound[:10]), self._period)
                for bound in (column.low, column.high)
            )
            shown = f"{self._period}s from '{low[1]}' to '{high[1]}'"
            given = _parsed(name, self._period)
            found = given if given is not None and low[0] <= given <= high[0] else None
        if found is None:
            raise InvalidInput(f"There is no cohort {name!r}; the cohorts of {self.by!r} are {shown}.")
        return found

    def of_persons(self, contents: Iterable[bytes]) -> NDArray[np.int64]:
        """Return the number of the cohort of each person's name (or of a row's features) by the keyed hash."""
        _, parts, *keys = self.by.split(":")
        key = hashlib.blake2b(f"cohort {parts} {keys[0] if keys else 0}".encode(), digest_size=32).digest()
        hashed = (hashlib.blake2b(content, digest_size=8, key=key).digest() for content in contents)
        numbers = np.frombuffer(b"".join(hashed), dtype="<u8")
        return (numbers % np.uint64(int(parts))).astype(np.int64) + 1

    def of_rows(self, frame: pd.DataFrame) -> NDArray[np.int64]:
        """Return the number of the cohort that each row states by its own cell, else `NO_COHORT`."""
        column = self.column
        assert column is not None
        require_columns(frame, [column.name])
        codes = column.read(frame[column.name])
        outside = np.isnan(codes) | (codes < 0.0)
        if isinstance(column, DateColumn):
            outside |= codes > 1.0
        distinct, places = np.unique(np.where(outside, 0.0, codes), return_inverse=True)
        numbers = np.array([self._number_of(code) for code in distinct.tolist()], dtype=np.int64)
        return np.where(outside, NO_COHORT, numbers[places.ravel()] if len(numbers) else 0)

    def _number_of(self, code: float) -> int:
        if isinstance(self.column, DateColumn):
            return _period_of(date.fromisoformat(self.column.value_at(code)[:10]), self._period)[0]
        return int(code)

    def to_json(self) -> dict[str, Any]:
        """Return the rule as JSON values."""
        return {"by": self.by, "column": None if self.column is None else column_json(self.column)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> CohortRule:
        """Read a rule from JSON values."""
        if not isinstance(content, Mapping) or set(content) != {"by", "column"}:
            raise InvalidInput("The rule of a cohort must have the keys 'by' and 'column'.")
        column = content["column"]
        return cls(content["by"], None if column is None else column_from_json(column))


def _is_hash(by: str) -> bool:
    name, *numbers = by.split(":")
    return (
        name == "hash"
        and len(numbers) in (1, 2)
        and all(each.isascii() and each.isdigit() for each in numbers)
    )


def _period_of(day: date, period: str | None) -> tuple[int, str]:
    year, week, _ = day.isocalendar()
    return {
        "year": (day.year, f"{day.year:04d}"),
        "quarter": (4 * day.year + (day.month - 1) // 3, f"{day.year:04d}-Q{(day.month + 2) // 3}"),
        "month": (12 * day.year + day.month, f"{day.year:04d}-{day.month:02d}"),
        "week": (100 * year + week, f"{year:04d}-W{week:02d}"),
        "day": (day.toordinal(), day.isoformat()),
    }[str(period)]


def _parsed(name: str, period: str | None) -> int | None:
    """Return the number of a named period; None if it is not the name of one."""
    year, _, rest = name.partition("-")
    try:
        day = {
            "year": lambda: date(int(year), 1, 1),
            "quarter": lambda: date(int(year), 3 * int(rest[1:]) - 2, 1),
            "month": lambda: date(int(year), int(rest), 1),
            "week": lambda: date.fromisocalendar(int(year), int(rest[1:]), 1),
            "day": lambda: date.fromisoformat(name),
        }[str(period)]()
    except ValueError:
        return None
    number, written = _period_of(day, period)
    return number if written == name else None


@dataclass(frozen=True, eq=False)
class Cohort:
    """The people of one cohort of a table."""

    rule: CohortRule
    name: str
    members: NDArray[np.bytes_] | None = None  # Sorted digests, where all rows decide

    def holds(
        self, frame: pd.DataFrame, persons: NDArray[np.object_] | None, features: NDArray[np.float32]
    ) -> NDArray[np.bool_]:
        """Return for each row whether it belongs to the cohort: with its person, or without persons by itself."""
        if self.members is not None:
            assert persons is not None
            return np.isin(person_digests(persons), self.members)
        if self.rule.column is not None:
            numbers = self.rule.of_rows(frame)
        elif persons is not None:
            numbers = self.rule.of_persons(name.encode("utf-8", "surrogatepass") for name in persons)
        else:
            rows = (features + np.float32(0)).astype("<f4", copy=False)
            numbers = self.rule.of_persons(row.tobytes() for row in rows)
        return np.asarray(numbers == self.rule.number(self.name))

    @property
    def digest(self) -> str:
        """Names the cohort and its people; it is computed from private records."""
        members = b"" if self.members is None else self.members.tobytes()
        return hashlib.sha256(repr((self.rule.to_json(), self.name)).encode() + members).hexdigest()


def people_of(
    rule: CohortRule, name: str, rows: Iterable[tuple[NDArray[np.object_], NDArray[np.int64]]]
) -> Cohort:
    """Return the people whose first cohort, of all their rows (names and cohort numbers, part by part), is this one."""
    number, inside, earlier = rule.number(name), _Distinct(), _Distinct()
    for persons, numbers in rows:
        digests = person_digests(persons)
        inside.add(digests[numbers == number])
        earlier.add(digests[(numbers != NO_COHORT) & (numbers < number)])
    return Cohort(rule, name, np.setdiff1d(inside.found(), earlier.found()))


class _Distinct:
    """The distinct digests of many rows, in about as much memory as they need."""

    def __init__(self) -> None:
        self._parts = [np.empty(0, dtype="S16")]
        self._added = 0

    def add(self, digests: NDArray[np.bytes_]) -> None:
        self._parts.append(np.unique(digests))
        self._added += len(self._parts[-1])
        if self._added > max(_MOST_WAITING, len(self._parts[0])):
            self.found()

    def found(self) -> NDArray[np.bytes_]:
        self._parts, self._added = [np.unique(np.concatenate(self._parts))], 0
        return self._parts[0]


def person_digests(names: NDArray[np.object_], key: bytes = b"") -> NDArray[np.bytes_]:
    """Return a digest of each row's person; two persons share one with probability below `n^2 / 2^129`."""
    codes, distinct = numbered(names)
    digests = [
        hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16, key=key).digest()
        for name in distinct
    ]
    return np.frombuffer(b"".join(digests), dtype="S16")[codes]


# --- Who leaves -------------------------------------------------------------------------------------------------------

_FORMAT = "quietmax erasure list 1"


@dataclass(frozen=True)
class ErasureList:
    """The people who must be missing from every later training, as keyed hashes of what the `person` column holds.

    The list holds no names, but whoever has it can test whether a name is on it: only its owner can read the file.
    Outer blanks, case and the form of Unicode do not count, so that nobody is missed; two people whose names differ
    only in these are left out together.

    Parameters
    ----------
    key : str
        The random key of the hashes, 64 hexadecimal digits.
    persons : tuple of str
        The hashes, sorted.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> file = Path(folder.name) / "people.erased"
    >>> ErasureList.add(file, "Ann"), ErasureList.add(file, "ann")
    (True, False)
    >>> ErasureList.from_file(file).holds(np.array(["ann", "Bob"], dtype=object))
    array([ True, False])
    """

    key: str = field(repr=False)
    persons: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def from_file(cls, path: str | Path) -> ErasureList:
        """Read a list; a missing or damaged file is an error, never an empty list."""
        try:
            stored = json.loads(Path(path).read_bytes())
            key, persons = stored.pop("key"), stored.pop("persons")
            if stored != {"format": _FORMAT} or len(key) != 64 or any(len(each) != 32 for each in persons):
                raise ValueError("not an erasure list")
            bytes.fromhex("".join([key, *persons]))
        except OSError as problem:
            raise DataUnavailable(
                f"The erasure list {path} cannot be read ({problem.strerror}). 'quietmax forget' writes one."
            ) from problem
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
            raise DataUnavailable(
                f"The erasure list {path} is damaged or no erasure list. Restore it from a backup."
            ) from problem
        return cls(key, tuple(persons))

    @classmethod
    def add(cls, path: str | Path, person: object) -> bool:
        """Add a person to the list in a file, which is created if missing; return whether the person was new."""
        file, name = Path(path), as_string(person)
        if is_missing([name])[0] or not is_valid_unicode([name])[0]:
            raise InvalidInput("`person` must be a value of the person column, not a missing one.")
        try:
            with ExitStack() as stack:  # of two processes that add people, none forgets the other's
                folder = os.open(file.parent, os.O_RDONLY)
                stack.callback(os.close, folder)
                fcntl.flock(folder, fcntl.LOCK_EX)
                stack.callback(fcntl.flock, folder, fcntl.LOCK_UN)
                found = cls.from_file(file) if file.exists() else cls(secrets.token_hex(32))
                new = found._hash(name)
                if new not in found.persons:
                    content = {"format": _FORMAT, "key": found.key, "persons": sorted((*found.persons, new))}
                    text = json.dumps(content, indent=1)
                    atomic_write(file, lambda staging: staging.write_text(text), private=True)
                return new not in found.persons
        except OSError as problem:
            raise QuietmaxError(
                f"The erasure list {file} cannot be written ({problem.strerror})."
            ) from problem

    def entry(self, person: object) -> str:
        """Return the first digits of a person's hash, by which a record can name the entry."""
        return self._hash(as_string(person))[:16]

    def holds(self, names: NDArray[np.object_]) -> NDArray[np.bool_]:
        """Tell for each name, as `Records.persons` has it, whether the person is on the list."""
        known = self._known
        if not known:
            return np.zeros(len(names), dtype=np.bool_)
        return np.fromiter((self._hash(name) in known for name in names), dtype=np.bool_, count=len(names))

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.persons)

    def _hash(self, name: str) -> str:
        plain = normalize("NFKC", normalize("NFKC", name).casefold())
        content = plain.strip().encode("utf-8", "surrogatepass")
        return hashlib.blake2b(content, key=bytes.fromhex(self.key), digest_size=16).hexdigest()

"""People who asked to be erased: a keyed list of hashes beside the table, which every later training leaves out.

Whether a row is left out depends on that row's person and on the list alone (THEORY 3.8, 3.17).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from quietmax._io import atomic_write
from quietmax.data.cells import as_string, is_missing, is_valid_unicode
from quietmax.errors import DataUnavailable, InvalidInput, QuietmaxError

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

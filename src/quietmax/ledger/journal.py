"""The journal's chain: every row carries the hash of the row before it.

`hash = SHA-256(JSON list of the row's fields, the previous hash among them)`. Whoever edits, drops or moves a row must
rewrite every later one, and the head that an auditor has written down (`quietmax ledger status`) no longer fits.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

START = "0" * 64
"""What the first row names as the hash before it."""
_JSON = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One row of the journal. `units` is what it adds to the balance, `spent_units` the balance after it."""

    account: int
    sequence: int
    time: int
    kind: str
    client: str
    model: str
    answers: int
    units: int
    spent_units: int
    limit_units: int
    detail: str
    previous: str
    hash: str = ""

    def sealed(self) -> JournalEntry:
        """The entry with its hash."""
        return JournalEntry(**{**asdict(self), "hash": self.digest()})

    def digest(self) -> str:
        """The hash this entry must carry."""
        return digest(
            self.account,
            self.sequence,
            self.time,
            self.kind,
            self.client,
            self.model,
            self.answers,
            self.units,
            self.spent_units,
            self.limit_units,
            self.detail,
            self.previous,
        )

    @property
    def misfits(self) -> bool:
        """Whether a field is of another type than was written: SQLite keeps whatever a foreign hand puts there."""
        return not (
            type(self.account) is type(self.sequence) is type(self.time) is int
            and type(self.answers)
            is type(self.units)
            is type(self.spent_units)
            is type(self.limit_units)
            is int
            and type(self.kind) is type(self.client) is type(self.model) is str
            and type(self.detail) is type(self.previous) is type(self.hash) is str
        )

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


def digest(*fields: int | str) -> str:
    """SHA-256 of the fields as one JSON list without spaces, in UTF-8.

    >>> digest(1, "a") == hashlib.sha256(b'[1,"a"]').hexdigest()
    True
    """
    return hashlib.sha256(_JSON.encode(fields).encode()).hexdigest()

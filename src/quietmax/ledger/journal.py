"""The journal's hash chain: every row contains the hash of the row before it.

A row's hash is the SHA-256 of its fields, the previous hash among them. To edit, delete or move a row, one must rewrite
all later rows, and then the last hash is no longer the one that an auditor wrote down (`quietmax ledger status`).

The account of the API keys also records which accounts were opened, and which training sets each of them pays for. So
no training set can get a second budget unnoticed.

The chain also covers what is stored for request ids. A charge names its request, and a row ``answered`` has a keyed
digest of each stored answer, so that no answer can be removed and drawn again unnoticed.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import orjson

START = "0" * 64
"""The previous hash of the first row."""


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One row of the journal."""

    account: int  # The id of the account
    sequence: int  # The number of the row within its account, from 1
    time: int  # Microseconds since 1970
    kind: str
    client: str  # The client's name, or an empty string
    model: str  # The model, as `name/version`, or an empty string
    answers: int  # The number of answers charged
    units: int  # The units added to the balance
    spent_units: int  # The balance after this row
    limit_units: int  # The budget after this row
    detail: str  # A JSON object with what else belongs to the row, or an empty string
    previous: str  # The hash of the row before
    hash: str = ""  # The hash of this row

    def expected_hash(self) -> str:
        """Return the hash that follows from the other fields."""
        return row_hash(
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
    def has_wrong_types(self) -> bool:
        """Whether a field has another type than was written: SQLite accepts any type in an edit."""
        integers = (
            *(self.account, self.sequence, self.time, self.answers),
            *(self.units, self.spent_units, self.limit_units),
        )
        strings = (self.kind, self.client, self.model, self.detail, self.previous, self.hash)
        return {type(each) for each in integers} != {int} or {type(each) for each in strings} != {str}

    def to_json(self) -> dict[str, Any]:
        """Return all fields by name."""
        return asdict(self)


def row_hash(*fields: int | str) -> str:
    """Return the SHA-256 of the fields, written as one JSON list without spaces, in UTF-8."""
    return hashlib.sha256(orjson.dumps(fields)).hexdigest()


def answer_digest(salt: bytes, request: bytes, body: bytes, answer: bytes) -> str:
    """Return the digest of a stored answer. Without the salt it reveals nothing about the answer."""
    content = b"answer %d %d " % (len(request), len(body)) + request + body + answer
    return hashlib.blake2b(content, key=salt, digest_size=16).hexdigest()

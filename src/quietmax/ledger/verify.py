"""Verify a ledger: recompute every chain, every balance and every key from the journal."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, select

from quietmax.accounting.budget import LIMIT
from quietmax.accounting.costs import cost_from_json
from quietmax.errors import LedgerDamaged
from quietmax.ledger.accounts import UNREADABLE, AccountState, Terms, parts_of, state_of
from quietmax.ledger.api_keys import all_keys, key_detail
from quietmax.ledger.database import KEYS_BOOK, accounts, journal
from quietmax.ledger.journal import START, JournalEntry


@dataclass(frozen=True)
class Verification:
    """What was found: rows read, and one sentence for each fault."""

    accounts: int
    rows: int
    faults: tuple[str, ...]

    @property
    def sound(self) -> bool:
        """Whether there is no fault."""
        return not self.faults

    def to_json(self) -> dict[str, Any]:
        """The result by name."""
        return {
            "sound": self.sound,
            "accounts": self.accounts,
            "rows": self.rows,
            "faults": list(self.faults),
        }


def entries(connection: Connection, account: int | None = None) -> Iterator[JournalEntry]:
    """The journal, account by account in the order of its rows."""
    statement = select(journal).order_by(journal.c.account, journal.c.sequence)
    if account is not None:
        statement = statement.where(journal.c.account == account)
    for row in connection.execute(statement.execution_options(yield_per=10_000)):
        yield JournalEntry(*row)


def verify(connection: Connection, anchors: Mapping[str, tuple[int, str]] | None = None) -> Verification:
    """Find edited, missing and reordered rows, and balances, quotas or keys that the journal does not explain.

    `anchors` are heads an auditor wrote down earlier, account -> (row, hash): they must still be in the chain.
    """
    faults: list[str] = []
    rows = 0
    books = connection.execute(select(accounts).order_by(accounts.c.id)).all()
    for book in books:
        state = None
        try:
            state = None if book.name == KEYS_BOOK else state_of(book)
        except LedgerDamaged as damage:
            faults.append(str(damage))
        replay = _Replay(book, state, (anchors or {}).get(book.name))
        for entry in entries(connection, book.id):
            replay.follow(entry)
            rows += 1
        faults += replay.finished()
        if book.name == KEYS_BOOK:
            faults += _key_faults(connection, replay)
        else:
            faults += _part_faults(connection, book, replay)
    known = {book.name for book in books}
    if KEYS_BOOK not in known:
        faults.append("The book of keys is missing.")
    faults += [
        f"The account {name!r} is missing, though its row {anchor[0]} was written down."
        for name, anchor in (anchors or {}).items()
        if name not in known
    ]
    numbers = {book.id for book in books}
    orphans = set(connection.execute(select(journal.c.account).distinct()).scalars()) - numbers
    faults += [
        f"The journal has rows of an account {number} that does not exist."
        for number in sorted(orphans, key=str)
    ]
    return Verification(len(known - {KEYS_BOOK}), rows, tuple(faults))


class _Replay:
    """Follows one chain and keeps what it says."""

    def __init__(self, book: Row[Any], state: AccountState | None, anchor: tuple[int, str] | None) -> None:
        self._book = book
        self._state = state
        self._anchor = anchor
        self._faults: list[str] = []
        self._expected = 1
        self._head = START
        self._spent = 0
        self._limit = 0 if book.name == KEYS_BOOK else LIMIT
        self.spent_by_client: dict[str, int] = defaultdict(int)
        self.quotas: dict[str, int | None] = {}
        self.created: dict[str, tuple[str, str]] = {}
        self.revoked: dict[str, int] = {}

    def follow(self, entry: JournalEntry) -> None:
        """Check one row against the row before it."""
        if entry.misfits:
            self._fault(
                f"row {entry.sequence!r} was edited: it holds a number or a text where the other belongs"
            )
            if type(entry.sequence) is int:
                self._expected, self._head = entry.sequence + 1, entry.hash
            return
        if entry.sequence != self._expected:
            gap = f"row {self._expected}" + (
                f" to {entry.sequence - 1}" if entry.sequence - 1 > self._expected else ""
            )
            self._fault(f"{gap} missing")
        elif entry.previous != self._head:
            self._fault(
                f"row {entry.sequence} does not follow the row before it: one of them was edited or moved"
            )
        if entry.digest() != entry.hash:
            self._fault(f"row {entry.sequence} was edited or moved")
        if entry.spent_units != self._spent + entry.units or entry.units < 0:
            self._fault(f"the balance at row {entry.sequence} is not the sum of what was charged")
        if entry.spent_units > entry.limit_units:
            self._fault(f"more is spent at row {entry.sequence} than the budget")
        if entry.limit_units != self._limit and entry.kind not in ("grant", "revoke"):
            self._fault(f"the budget changes at row {entry.sequence} without a grant")
        self._limit, self._spent = entry.limit_units, entry.spent_units
        self._expected, self._head = entry.sequence + 1, entry.hash
        if self._anchor == (entry.sequence, entry.hash):
            self._anchor = None
        self._note(entry)

    def _note(self, entry: JournalEntry) -> None:
        if entry.units:
            self.spent_by_client[entry.client] += entry.units
        try:
            detail = json.loads(entry.detail) if entry.detail else {}
            if entry.kind == "open":
                told = cost_from_json(detail["total"]), Terms.from_json(detail["terms"])
                if self._state is not None and told != (self._state.total, self._state.terms):
                    self._fault("its total or terms are not those it was opened with")
            elif entry.kind == "quota" or (entry.kind == "revoke" and entry.client):
                self.quotas[entry.client] = detail.get("quota_units")
            elif entry.kind == "key-created":
                self.created[detail["id"]] = (entry.client, entry.detail)
            elif entry.kind == "key-revoked":
                self.revoked[detail["id"]] = detail["revoked"]
        except UNREADABLE:
            self._fault(f"row {entry.sequence} cannot be read")

    def finished(self) -> list[str]:
        """All faults of the chain, its end compared with the account's own row."""
        if self._expected - 1 != self._book.sequence:
            self._fault(f"the last row is {self._expected - 1}, but should be {self._book.sequence}")
        elif self._head != self._book.head:
            self._fault("the last row is not the one the account names")
        if self._spent != self._book.spent_units:
            self._fault("the balance is not that of the last row")
        if self._limit != self._book.limit_units:
            self._fault("the budget is not that of the last row")
        if self._anchor is not None:
            self._fault(f"row {self._anchor[0]} is not the one that was written down")
        return self._faults

    def _fault(self, what: str) -> None:
        self._faults.append(f"Account {self._book.name!r}: {what}.")


def _part_faults(connection: Connection, book: Row[Any], replay: _Replay) -> list[str]:
    faults = []
    spent = dict(replay.spent_by_client)
    quotas = dict(replay.quotas)
    try:
        parts = parts_of(connection, book.id)
    except LedgerDamaged as damage:
        return [str(damage)]
    for part in parts:
        if part.spent_units != spent.pop(part.client, 0):
            faults.append(
                f"Account {book.name!r}: the part of client {part.client!r} is not the sum of its rows."
            )
        if part.limit_units != quotas.pop(part.client, None):
            faults.append(
                f"Account {book.name!r}: the quota of client {part.client!r} was not set by anyone."
            )
    faults += [
        f"Account {book.name!r}: the part of client {client!r} is missing." for client in {*spent, *quotas}
    ]
    return faults


def _key_faults(connection: Connection, replay: _Replay) -> list[str]:
    faults = []
    created = dict(replay.created)
    for key in all_keys(connection):
        told = created.pop(key.id, None)
        if not all(isinstance(each, str) for each in (key.id, key.role, key.secret_hash)) or told != (
            key.client,
            key_detail(key.id, key.role, key.secret_hash, key.expires),
        ):
            faults.append(f"The key {key.id} is not as it was created.")
        if key.revoked != replay.revoked.get(key.id):
            faults.append(f"The key {key.id} is not revoked as the journal says.")
    faults += [f"The key {number} is missing." for number in created]
    return faults

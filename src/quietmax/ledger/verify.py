"""Verification: recompute every hash chain, balance, quota, key, training set and stored request from the journal."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import Connection, Row

from quietmax.accounting.costs import LIMIT, cost_from_json
from quietmax.errors import LedgerDamaged, counted
from quietmax.ledger.accounts import (
    AccountState,
    Terms,
    account_rows,
    account_state,
    key_detail,
    list_keys,
    list_subaccounts,
)
from quietmax.ledger.database import (
    KEYS_ACCOUNT,
    PARSE_ERRORS,
    START,
    JournalEntry,
    answer_digest,
    read_salt,
    run,
    stream,
)
from quietmax.ledger.transactions import Part

Anchor = tuple[int, str]
"""The number and the hash of a journal row that an auditor wrote down."""


@dataclass(frozen=True)
class Verification:
    """The result of a verification.

    Parameters
    ----------
    accounts : int
        The number of accounts.
    rows : int
        The number of journal rows read.
    faults : tuple of str
        One sentence for each fault.
    """

    accounts: int
    rows: int
    faults: tuple[str, ...]

    @property
    def sound(self) -> bool:
        """Whether there is no fault."""
        return not self.faults

    def to_json(self) -> dict[str, Any]:
        """Return the result by name."""
        return {
            "sound": self.sound,
            "accounts": self.accounts,
            "rows": self.rows,
            "faults": list(self.faults),
        }


def read_journal(connection: Connection, account: int | None = None) -> Iterator[JournalEntry]:
    """Read the journal, account by account in the order of the rows."""
    where = "" if account is None else "WHERE account = :account"
    columns = ", ".join(each.name for each in fields(JournalEntry))
    statement = f"SELECT {columns} FROM journal {where} ORDER BY account, sequence"
    named = {} if account is None else {"account": account}
    for row in stream(connection, statement, **named):
        yield JournalEntry(*row)


def verify(connection: Connection, anchors: Mapping[str, Anchor] | None = None) -> Verification:
    """Find edited, missing and reordered rows, and what the journal does not explain.

    This covers balances, quotas, keys, the names of accounts, their training sets, and what is stored for request ids.
    Cached answers are not covered: removing one makes a client pay again, and no edit of them leads to a draw without a
    charge. Of what earlier versions stored, names, training sets and requests are covered as the migration found them.
    """
    anchors = anchors or {}
    salt = read_salt(connection)
    faults: list[str] = []
    count = 0
    rows = account_rows(connection)
    names = {row.name for row in rows}
    bindings = None
    if KEYS_ACCOUNT not in names:
        faults.append("The account of the API keys is missing.")
    # The first says which accounts were opened.
    for row in sorted(rows, key=lambda row: row.name != KEYS_ACCOUNT):
        replay, found = _replay_account(connection, row, salt, anchors.get(row.name), bindings)
        faults += found
        count += replay.rows
        bindings = bindings or replay.bindings
    if bindings is not None:
        faults += bindings.compare(connection, rows)
    faults += [
        f"Account {name!r} is missing, but its row {anchor[0]} was written down."
        for name, anchor in anchors.items()
        if name not in names
    ]
    ids = {row.id for row in rows}
    for what, table in (("journal has rows", "journal"), ("ledger has requests", "requests")):
        unknown = set(run(connection, f"SELECT DISTINCT account FROM {table}").scalars()) - ids
        faults += [
            f"The {what} of account {number}, which does not exist." for number in sorted(unknown, key=str)
        ]
    return Verification(len(names - {KEYS_ACCOUNT}), count, tuple(faults))


def _replay_account(
    connection: Connection,
    row: Row[Any],
    salt: bytes,
    anchor: Anchor | None,
    bindings: _Bindings | None,
) -> tuple[_Replay, list[str]]:
    """Replay the journal of one account; return the replay and all faults of the account."""
    faults: list[str] = []
    state = None
    try:
        state = None if row.name == KEYS_ACCOUNT else account_state(row)
    except LedgerDamaged as damage:
        faults.append(str(damage))
    adopted_until = None if bindings is None else bindings.adopted_until.get(row.id, 0)
    replay = _Replay(row, state, anchor, adopted_until)
    for entry in read_journal(connection, row.id):
        replay.check(entry)
    faults += replay.finish()
    faults += [f"Account {row.name!r}: {what}." for what in replay.requests.compare(connection, row.id, salt)]
    if row.name == KEYS_ACCOUNT:
        return replay, faults + _key_faults(connection, replay)
    return replay, faults + _subaccount_faults(connection, row, replay)


class _Replay:
    """Follows the chain of one account and collects what it states about clients and keys."""

    def __init__(
        self, account: Row[Any], state: AccountState | None, anchor: Anchor | None, adopted_until: int | None
    ) -> None:
        self._account = account
        self._state = state
        self._anchor = anchor
        self._faults: list[str] = []
        self._next_sequence = 1
        self._head = START
        self._spent = 0
        self._limit = 0 if account.name == KEYS_ACCOUNT else LIMIT
        self.rows = 0
        self.spent_by_client: dict[str, int] = defaultdict(int)
        self._parts: dict[Part, int] = {}
        self.requests = _Requests(adopted_until)
        self.bindings = _Bindings() if account.name == KEYS_ACCOUNT else None
        self.quotas: dict[str, int | None] = {}
        self.created_keys: dict[str, tuple[str, str]] = {}
        self.revoked_keys: dict[str, int] = {}

    def check(self, entry: JournalEntry) -> None:
        """Check a row against the row before it."""
        self.rows += 1
        if entry.has_wrong_types:
            self._fault(f"row {entry.sequence!r} was edited: a field has the wrong type")
            if type(entry.sequence) is int:
                self._next_sequence, self._head = entry.sequence + 1, entry.hash
            return
        self._check_chain(entry)
        self._check_balance(entry)
        if self._anchor == (entry.sequence, entry.hash):
            self._anchor = None
        self._collect(entry)

    def _check_chain(self, entry: JournalEntry) -> None:
        if entry.sequence != self._next_sequence:
            last = entry.sequence - 1
            several = last > self._next_sequence
            self._fault(
                f"rows {self._next_sequence} to {last} are missing"
                if several
                else f"row {self._next_sequence} is missing"
            )
        elif entry.previous != self._head:
            self._fault(
                f"row {entry.sequence} does not follow the row before it: one of them was edited or moved"
            )
        if entry.expected_hash() != entry.hash:
            self._fault(f"row {entry.sequence} was edited or moved")
        self._next_sequence, self._head = entry.sequence + 1, entry.hash

    def _check_balance(self, entry: JournalEntry) -> None:
        if entry.spent_units != self._spent + entry.units or entry.units < 0:
            self._fault(f"the balance at row {entry.sequence} is not the sum of the charges")
        if entry.spent_units > entry.limit_units:
            self._fault(f"the balance at row {entry.sequence} exceeds the budget")
        if entry.limit_units != self._limit and entry.kind not in ("grant", "revoke"):
            self._fault(f"the budget changes at row {entry.sequence} without a grant")
        self._limit, self._spent = entry.limit_units, entry.spent_units

    def _collect(self, entry: JournalEntry) -> None:
        if entry.units:
            self.spent_by_client[entry.client] += entry.units
        try:
            detail = json.loads(entry.detail) if entry.detail else {}
            charged = self._check_part(entry) if entry.kind in ("training", "evaluation") else entry.units
            for fault in self._follow(entry, detail, charged):
                self._fault(fault)
            if entry.kind == "open":
                opened = cost_from_json(detail["total"]), Terms.from_json(detail["terms"])
                if self._state is not None and opened != (self._state.total, self._state.terms):
                    self._fault("its total or terms are not those it was opened with")
            elif entry.kind == "quota" or (entry.kind == "revoke" and entry.client):
                self.quotas[entry.client] = detail.get("quota_units")
            elif entry.kind == "key-created":
                self.created_keys[detail["id"]] = (entry.client, entry.detail)
            elif entry.kind == "key-revoked":
                self.revoked_keys[detail["id"]] = detail["revoked"]
        except PARSE_ERRORS:
            self._fault(f"row {entry.sequence} cannot be read")

    def _follow(self, entry: JournalEntry, detail: Mapping[str, Any], units: int) -> list[str]:
        """Take in what a row states about requests, or about accounts and training sets; return its faults."""
        if self.bindings is not None and entry.kind in _BINDING_KINDS:
            fault = self.bindings.follow(entry, detail)
            return [fault] if fault else []
        return self.requests.follow(entry, detail, units)

    def _check_part(self, entry: JournalEntry) -> int:
        """Check that the balance grew as the charge of a part requires; return the units of the charge."""
        stated = Part.from_detail(entry.detail)
        if stated is None:
            return entry.units
        part, units = stated
        if units < 0 or entry.units != part.increase(self._parts, units):
            self._fault(f"row {entry.sequence} does not charge what its part of the account has spent")
        self._parts[part] = self._parts.get(part, 0) + units
        return units

    def finish(self) -> list[str]:
        """Compare the end of the chain with the account; return all faults."""
        account = self._account
        if self._next_sequence - 1 != account.sequence:
            self._fault(f"the last row is {self._next_sequence - 1}, but should be {account.sequence}")
        elif self._head != account.head:
            self._fault("the last row is not the one that the account names")
        if self._spent != account.spent_units:
            self._fault("the balance is not that of the last row")
        if self._limit != account.limit_units:
            self._fault("the budget is not that of the last row")
        if self._anchor is not None:
            self._fault(f"row {self._anchor[0]} is not the one that was written down")
        return self._faults

    def _fault(self, what: str) -> None:
        self._faults.append(f"Account {self._account.name!r}: {what}.")


_BINDING_KINDS = ("account", "training-set", "reassign", "adopted")


class _Bindings:
    """Follows what the journal of the API keys states about accounts and their training sets."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._used_names: set[str] = set()
        self._training_sets: dict[str, int] = {}
        self._others = False  # rows that a newer version wrote came before
        self.adopted_until: dict[int, int] = {}

    def follow(self, entry: JournalEntry, detail: Mapping[str, Any]) -> str:
        """Take in a row; return its fault, if it has one."""
        if entry.kind == "adopted":
            return self._adopt(entry, detail)
        if entry.kind == "reassign" and "digest" not in detail:
            return ""  # of an earlier version: what it led to was adopted
        self._others = True
        if entry.kind == "account":
            return self._open(entry, detail["id"], detail["name"])
        known = self._training_sets.get(detail["digest"])
        self._training_sets[detail["digest"]] = detail["id"]
        if entry.kind == "training-set" and known is not None:
            return f"row {entry.sequence} binds a training set that has an account already"
        if entry.kind == "reassign" and known is None:
            return f"row {entry.sequence} moves a training set that has no account"
        return ""

    def _adopt(self, entry: JournalEntry, detail: Mapping[str, Any]) -> str:
        if self._others:
            return f"row {entry.sequence} adopts accounts of an earlier version after newer ones"
        faults = []
        for number, each in detail["accounts"].items():
            faults.append(self._open(entry, int(number), each["name"]))
            self.adopted_until[int(number)] = each["sequence"]
        self._training_sets |= detail["training_sets"]
        return next(filter(None, faults), "")

    def _open(self, entry: JournalEntry, account: int, name: str) -> str:
        if account in self._names or name in self._used_names:
            return f"row {entry.sequence} opens the account {name!r} a second time"
        self._names[account] = name
        self._used_names.add(name)
        return ""

    def compare(self, connection: Connection, rows: Sequence[Row[Any]]) -> list[str]:
        """Compare accounts and training sets with the journal; return what is wrong."""
        faults = []
        names = dict(self._names)
        for row in rows:
            stated = KEYS_ACCOUNT if row.name == KEYS_ACCOUNT else names.pop(row.id, None)
            if stated != row.name:
                opened = "was not opened" if stated is None else f"was opened as {stated!r}"
                faults.append(f"Account {row.name!r}: according to the journal it {opened}.")
        faults += [f"Account {name!r} is missing." for name in names.values()]
        bound = {
            row.digest: row.account for row in run(connection, "SELECT digest, account FROM training_sets")
        }
        stated_sets = self._training_sets
        wrong = sum(bound.get(each) != stated_sets.get(each) for each in {*bound, *stated_sets})
        if wrong:
            without = counted(wrong, "training set does not have", "training sets do not have")
            faults.append(f"{without} the account that the journal states.")
        return faults


@dataclass(slots=True)
class _Request:
    """What the journal states about a request id."""

    time: int
    paid: int
    keep: bool
    kind: str | None  # None: adopted from an earlier version
    digest: str | None = None


class _Requests:
    """Follows what the journal states about the request ids of one account."""

    def __init__(self, adopted_until: int | None) -> None:
        self._adopted_until = adopted_until  # the last row that can adopt requests; None: not known
        self._known: dict[bytes, _Request] = {}
        self._adopted: int | None = 0  # units of adopted requests; None once there are others
        self._charged = 0  # units of charges that name no request, which may be those of adopted ones

    def follow(self, entry: JournalEntry, detail: Mapping[str, Any], units: int) -> list[str]:
        """Take in a row; return its faults. `units` is what it charges for its request."""
        if entry.kind == "answered":
            return [
                fault
                for key, digest in detail["requests"].items()
                if (fault := self._answer(entry.sequence, bytes.fromhex(key), digest))
            ]
        if entry.kind == "adopted":
            return self._adopt(entry, detail)
        if entry.kind == "prune":
            before = detail["before"]
            self._known = {key: each for key, each in self._known.items() if each.keep or each.time >= before}
        elif "request" in detail:
            self._adopted = None
            fault = self._charge(entry, detail, units)
            return [fault] if fault else []
        elif entry.kind == "charge":
            self._charged += units
        return []

    def _adopt(self, entry: JournalEntry, detail: Mapping[str, Any]) -> list[str]:
        """Take in requests of an earlier version: before any other, and no more of them than was paid."""
        if self._adopted_until is not None and entry.sequence > self._adopted_until:
            return [f"row {entry.sequence} adopts requests, but no earlier version wrote to the account"]
        if self._adopted is None:
            return [f"row {entry.sequence} adopts requests of an earlier version after newer ones"]
        for key, each in detail["requests"].items():
            request = _Request(each["time"], each["units"], each["keep"], None, each["answer"])
            self._known[bytes.fromhex(key)] = request
            self._adopted += 0 if request.keep else request.paid
        if self._adopted > self._charged:
            return [f"row {entry.sequence} adopts requests for which nobody has paid"]
        return []

    def _charge(self, entry: JournalEntry, detail: Mapping[str, Any], units: int) -> str:
        key, paid = bytes.fromhex(detail["request"]), detail.get("paid")
        keep = bool(detail.get("keep"))
        known = self._known.get(key)
        if known is None or paid is None:
            self._known[key] = _Request(entry.time, units, keep, entry.kind)
        else:
            known.paid += units
            known.time = entry.time
            if known.keep != keep or known.kind not in (None, entry.kind):
                return f"row {entry.sequence} counts on a charge for something else"
        if known is not None and paid is None:
            return f"the request of row {entry.sequence} was charged before, and what was stored for it was removed"
        if paid is not None and (known is None or known.paid - units != paid):
            return f"row {entry.sequence} counts on an earlier charge that is not in the journal"
        if known is not None and known.digest is not None:
            return f"row {entry.sequence} draws again for a request that was answered"
        return ""

    def _answer(self, sequence: int, key: bytes, digest: str) -> str:
        known = self._known.get(key)
        if known is None:
            return f"row {sequence} answers a request that was not charged"
        answered, known.digest = known.digest is not None, digest
        return f"row {sequence} answers a request a second time" if answered else ""

    def compare(self, connection: Connection, account: int, salt: bytes) -> list[str]:
        """Compare the stored requests of the account with the journal; return what is wrong."""
        unknown = changed = 0
        statement = "SELECT request, body, units, time, answer FROM requests WHERE account = :account"
        for row in stream(connection, statement, account=account):
            stated = self._known.pop(row.request, None)
            if stated is None:
                unknown += 1
            elif not _is_as_stated(row, stated, salt):
                changed += 1
        found = (
            (unknown, "stored request is not in the journal", "stored requests are not in the journal"),
            (
                changed,
                "stored request or its answer was changed",
                "stored requests or their answers were changed",
            ),
            (len(self._known), "stored request is missing", "stored requests are missing"),
        )
        return [counted(*each) for each in found if each[0]]


def _is_as_stated(row: Row[Any], stated: _Request, salt: bytes) -> bool:
    """Tell whether a stored request is what the journal states."""
    try:
        digest = None if row.answer is None else answer_digest(salt, row.request, row.body, row.answer)
        keep = len(row.body) == 0
    except TypeError:  # SQLite accepts any type in an edit
        return False
    return (row.time, row.units, keep, digest) == (stated.time, stated.paid, stated.keep, stated.digest)


def _subaccount_faults(connection: Connection, account: Row[Any], replay: _Replay) -> list[str]:
    """Compare the subaccounts with the charges and quotas of the journal."""
    faults = []
    spent, quotas = dict(replay.spent_by_client), dict(replay.quotas)
    try:
        subaccounts = list_subaccounts(connection, account.id)
    except LedgerDamaged as damage:
        return [str(damage)]
    for each in subaccounts:
        if each.spent_units != spent.pop(each.client, 0):
            faults.append(
                f"Account {account.name!r}: the balance of client {each.client!r} is not the sum of its charges."
            )
        if each.limit_units != quotas.pop(each.client, None):
            faults.append(
                f"Account {account.name!r}: the quota of client {each.client!r} is not in the journal."
            )
    faults += [
        f"Account {account.name!r}: the subaccount of client {client!r} is missing."
        for client in {*spent, *quotas}
    ]
    return faults


def _key_faults(connection: Connection, replay: _Replay) -> list[str]:
    """Compare the API keys with the journal."""
    faults = []
    created = dict(replay.created_keys)
    for key in list_keys(connection):
        recorded = created.pop(key.id, None)
        if key.has_wrong_types or recorded != (key.client, key_detail(key)):
            faults.append(f"Key {key.id} is not as it was created.")
        if key.revoked != replay.revoked_keys.get(key.id):
            faults.append(f"Key {key.id} is not revoked as the journal states.")
    faults += [f"Key {key_id} is missing." for key_id in created]
    return faults

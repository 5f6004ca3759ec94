"""Verification: recompute every hash chain, balance, quota, key, training set and stored request from the journal."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, Row

from quietmax.accounting.costs import LIMIT, cost_from_json
from quietmax.errors import LedgerDamaged, counted
from quietmax.ledger.accounts import (
    AccountState,
    Terms,
    _account_rows,
    _account_state,
    _key_detail,
    _list_keys,
    _list_subaccounts,
    _named_clients,
    _pseudonym,
)
from quietmax.ledger.database import (
    COLUMNS,
    KEYS_ACCOUNT,
    PARSE_ERRORS,
    START,
    JournalEntry,
    _answer_digest,
    _has_wrong_types,
    _read_salt,
    _run,
    _stream,
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
        return {"sound": self.sound, **asdict(self), "faults": list(self.faults)}


def _read_journal(connection: Connection, account: int | None = None) -> Iterator[JournalEntry]:
    """Read the journal, account by account in the order of the rows."""
    where = "" if account is None else "WHERE account = :account"
    statement = f"SELECT {', '.join(COLUMNS)} FROM journal {where} ORDER BY account, sequence"
    named = {} if account is None else {"account": account}
    yield from (JournalEntry(*row) for row in _stream(connection, statement, **named))


def _verify(connection: Connection, anchors: Mapping[str, Anchor] | None = None) -> Verification:
    """Find edited, missing and reordered rows, and what the journal does not explain.

    This covers balances, quotas, keys, the names of accounts, their training sets, and what is stored for request ids.
    Cached answers are not covered: removing one makes a client pay again, and no edit of them leads to a draw without a
    charge. Of what earlier versions stored, names, training sets and requests are covered as the migration found them.
    """
    anchors = anchors or {}
    salt = _read_salt(connection)
    rows, clients = _account_rows(connection), _named_clients(connection)
    shown = {each.pseudonym: each.name for each in clients}
    names, ids = {row.name for row in rows}, {row.id for row in rows}
    faults = [] if KEYS_ACCOUNT in names else ["The account of the API keys is missing."]
    faults += [
        f"The name of client {each.name!r} was changed."
        for each in clients
        if _pseudonym(each.name, each.salt) != each.pseudonym
    ]
    count = 0
    bindings = None
    for row in sorted(rows, key=lambda row: row.name != KEYS_ACCOUNT):  # it says which accounts were opened
        replay = _Replay(row, anchors.get(row.name), bindings, shown)
        bindings = replay.bindings
        for entry in _read_journal(connection, row.id):
            replay._follow(entry)
            count += 1
        faults += replay._finish(connection, salt)
    if bindings is not None:
        faults += bindings._compare(connection, rows)
    faults += [
        f"Account {name!r} is missing, but its row {anchor[0]} was written down."
        for name, anchor in anchors.items()
        if name not in names
    ]
    for what, table in (("journal has rows", "journal"), ("ledger has requests", "requests")):
        unknown = set(_run(connection, f"SELECT DISTINCT account FROM {table}").scalars()) - ids
        faults += [
            f"The {what} of account {number}, which does not exist." for number in sorted(unknown, key=str)
        ]
    return Verification(len(names - {KEYS_ACCOUNT}), count, tuple(faults))


class _Replay:
    """Follows the chain of one account and collects what it states about clients, requests and keys."""

    def __init__(
        self, account: Row[Any], anchor: Anchor | None, bindings: _Bindings | None, names: Mapping[str, str]
    ) -> None:
        self._account = account
        self._names = names
        self._keys = account.name == KEYS_ACCOUNT
        self._anchor = anchor
        self._faults: list[str] = []
        self._next_sequence = 1
        self._head = START
        self._spent = 0
        self._limit = 0 if self._keys else LIMIT
        self._spent_by_client: dict[str, int] = defaultdict(int)
        self._quotas: dict[str, int | None] = {}
        self._parts: dict[Part, int] = {}
        self._created_keys: dict[str, tuple[str, str]] = {}
        self._revoked_keys: dict[str, int] = {}
        self._requests = _Requests(None if bindings is None else bindings.adopted_until.get(account.id, 0))
        self.bindings = _Bindings() if self._keys else bindings
        self._state: AccountState | None = None
        try:
            self._state = None if self._keys else _account_state(account)
        except LedgerDamaged as damage:
            self._faults.append(str(damage))

    def _follow(self, entry: JournalEntry) -> None:
        """Check a row against the row before it, and take in what it states."""
        if _has_wrong_types(entry):
            self._fault(f"row {entry.sequence!r} was edited: a field has the wrong type")
            if type(entry.sequence) is int:
                self._next_sequence, self._head = entry.sequence + 1, entry.hash
            return
        self._check_row(entry)
        if self._anchor == (entry.sequence, entry.hash):
            self._anchor = None
        try:
            self._collect(entry)
        except PARSE_ERRORS:
            self._fault(f"row {entry.sequence} cannot be read")

    def _check_row(self, entry: JournalEntry) -> None:
        """Check the place of a row in the chain, its hash, balance and budget."""
        last = entry.sequence - 1
        if last > self._next_sequence:
            self._fault(f"rows {self._next_sequence} to {last} are missing")
        elif entry.sequence != self._next_sequence:
            self._fault(f"row {self._next_sequence} is missing")
        elif entry.previous != self._head:
            self._fault(
                f"row {entry.sequence} does not follow the row before it: one of them was edited or moved"
            )
        if entry.expected_hash() != entry.hash:
            self._fault(f"row {entry.sequence} was edited or moved")
        self._next_sequence, self._head = entry.sequence + 1, entry.hash
        if entry.spent_units != self._spent + entry.units or entry.units < 0:
            self._fault(f"the balance at row {entry.sequence} is not the sum of the charges")
        if entry.spent_units > entry.limit_units:
            self._fault(f"the balance at row {entry.sequence} exceeds the budget")
        if entry.limit_units != self._limit and entry.kind not in ("grant", "revoke"):
            self._fault(f"the budget changes at row {entry.sequence} without a grant")
        self._limit, self._spent = entry.limit_units, entry.spent_units

    def _collect(self, entry: JournalEntry) -> None:
        client = self._names.get(entry.client, entry.client)
        if entry.units:
            self._spent_by_client[client] += entry.units
        detail = json.loads(entry.detail) if entry.detail else {}
        charged = self._check_part(entry) if entry.kind in ("training", "evaluation") else entry.units
        if self._keys and self.bindings is not None and entry.kind in _BINDING_KINDS:
            faults = self.bindings._follow(entry, detail)
        else:
            faults = self._requests._follow(entry, detail, charged)
        for fault in faults:
            self._fault(fault)
        if entry.kind == "open":
            opened = cost_from_json(detail["total"]), Terms._from_json(detail["terms"])
            if self._state is not None and opened != (self._state.total, self._state.terms):
                self._fault("its total or terms are not those it was opened with")
        elif entry.kind == "quota" or (entry.kind == "revoke" and entry.client):
            self._quotas[client] = detail.get("quota_units")
        elif entry.kind == "key-created":
            self._created_keys[detail["id"]] = (client, entry.detail)
        elif entry.kind == "key-revoked":
            self._revoked_keys[detail["id"]] = detail["revoked"]

    def _check_part(self, entry: JournalEntry) -> int:
        """Check that the balance grew as the charge of a part requires; return the units of the charge."""
        stated = Part._from_detail(entry.detail)
        if stated is None:
            return entry.units
        part, units = stated
        if units < 0 or entry.units != part._increase(self._parts, units):
            self._fault(f"row {entry.sequence} does not charge what its part of the account has spent")
        if part._other_rule(self._parts):
            self._fault(f"row {entry.sequence} charges a cohort of another rule than the rows before it")
        self._parts[part] = self._parts.get(part, 0) + units
        return units

    def _finish(self, connection: Connection, salt: bytes) -> list[str]:
        """Compare what the chain states with what is stored; return all faults."""
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
        for fault in self._requests._compare(connection, account.id, salt):
            self._fault(fault)
        if self._keys:
            self._compare_keys(connection)
        else:
            self._compare_subaccounts(connection)
        return self._faults

    def _compare_subaccounts(self, connection: Connection) -> None:
        try:
            stored = {each.client: each for each in _list_subaccounts(connection, self._account.id)}
        except LedgerDamaged as damage:
            self._faults.append(str(damage))
            return
        for client, each in stored.items():
            if each.spent_units != self._spent_by_client.get(client, 0):
                self._fault(f"the balance of client {client!r} is not the sum of its charges")
            if each.limit_units != self._quotas.get(client):
                self._fault(f"the quota of client {client!r} is not in the journal")
        for client in {*self._spent_by_client, *self._quotas} - stored.keys():
            self._fault(f"the subaccount of client {client!r} is missing")

    def _compare_keys(self, connection: Connection) -> None:
        stored = {key.id: key for key in _list_keys(connection)}
        for key in stored.values():
            if _has_wrong_types(key) or self._created_keys.get(key.id) != (key.client, _key_detail(key)):
                self._faults.append(f"Key {key.id} is not as it was created.")
            if key.revoked != self._revoked_keys.get(key.id):
                self._faults.append(f"Key {key.id} is not revoked as the journal states.")
        self._faults += [f"Key {key} is missing." for key in self._created_keys if key not in stored]

    def _fault(self, what: str) -> None:
        self._faults.append(f"Account {self._account.name!r}: {what}.")


_BINDING_KINDS = ("account", "training-set", "reassign", "adopted")


class _Bindings:
    """Follows what the journal of the API keys states about accounts and their training sets."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._training_sets: dict[str, int] = {}
        self._others = False  # rows that a newer version wrote came before
        self.adopted_until: dict[int, int] = {}

    def _follow(self, entry: JournalEntry, detail: Mapping[str, Any]) -> Iterator[str]:
        """Take in a row; yield its faults."""
        row = f"row {entry.sequence}"
        if entry.kind == "adopted" and self._others:
            yield f"{row} adopts accounts of an earlier version after newer ones"
        elif entry.kind == "adopted":
            for number, each in detail["accounts"].items():
                yield from self._open(row, int(number), each["name"])
                self.adopted_until[int(number)] = each["sequence"]
            self._training_sets |= detail["training_sets"]
        elif entry.kind == "account":
            self._others = True
            yield from self._open(row, detail["id"], detail["name"])
        elif entry.kind == "training-set" or "digest" in detail:  # else of an earlier version, and adopted
            self._others = True
            known = detail["digest"] in self._training_sets
            self._training_sets[detail["digest"]] = detail["id"]
            if entry.kind == "training-set" and known:
                yield f"{row} binds a training set that has an account already"
            elif entry.kind == "reassign" and not known:
                yield f"{row} moves a training set that has no account"

    def _open(self, row: str, account: int, name: str) -> Iterator[str]:
        if account in self._names or name in self._names.values():
            yield f"{row} opens the account {name!r} a second time"
        else:
            self._names[account] = name

    def _compare(self, connection: Connection, rows: Sequence[Row[Any]]) -> Iterator[str]:
        """Compare accounts and training sets with the journal; yield what is wrong."""
        names = dict(self._names)
        for row in rows:
            stated = KEYS_ACCOUNT if row.name == KEYS_ACCOUNT else names.pop(row.id, None)
            if stated != row.name:
                opened = "was not opened" if stated is None else f"was opened as {stated!r}"
                yield f"Account {row.name!r}: according to the journal it {opened}."
        for name in names.values():
            yield f"Account {name!r} is missing."
        bound = dict(iter(_run(connection, "SELECT digest, account FROM training_sets")))
        stated_sets = self._training_sets
        if wrong := sum(bound.get(each) != stated_sets.get(each) for each in {*bound, *stated_sets}):
            without = counted(wrong, "training set does not have", "training sets do not have")
            yield f"{without} the account that the journal states."


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

    def _follow(self, entry: JournalEntry, detail: Mapping[str, Any], units: int) -> Iterator[str]:
        """Take in a row; yield its faults. `units` is what it charges for its request."""
        row = f"row {entry.sequence}"
        if entry.kind == "answered":
            for key, digest in detail["requests"].items():
                known = self._known.get(bytes.fromhex(key))
                if known is None:
                    yield f"{row} answers a request that was not charged"
                    continue
                if known.digest is not None:
                    yield f"{row} answers a request a second time"
                known.digest = digest
        elif entry.kind == "adopted":
            yield from self._adopt(entry, detail)
        elif entry.kind == "prune":
            before = detail["before"]
            self._known = {key: each for key, each in self._known.items() if each.keep or each.time >= before}
        elif "request" in detail:
            self._adopted = None
            yield from self._charge(entry, detail, units)
        elif entry.kind == "charge":
            self._charged += units

    def _adopt(self, entry: JournalEntry, detail: Mapping[str, Any]) -> Iterator[str]:
        """Take in requests of an earlier version: before any other, and no more of them than was paid."""
        row = f"row {entry.sequence}"
        if self._adopted_until is not None and entry.sequence > self._adopted_until:
            yield f"{row} adopts requests, but no earlier version wrote to the account"
        elif self._adopted is None:
            yield f"{row} adopts requests of an earlier version after newer ones"
        else:
            for key, each in detail["requests"].items():
                request = _Request(each["time"], each["units"], each["keep"], None, each["answer"])
                self._known[bytes.fromhex(key)] = request
                self._adopted += 0 if request.keep else request.paid
            if self._adopted > self._charged:
                yield f"{row} adopts requests for which nobody has paid"

    def _charge(self, entry: JournalEntry, detail: Mapping[str, Any], units: int) -> Iterator[str]:
        row = f"row {entry.sequence}"
        key, paid, keep = bytes.fromhex(detail["request"]), detail.get("paid"), bool(detail.get("keep"))
        known = self._known.get(key)
        if paid is None or known is None:
            self._known[key] = _Request(entry.time, units, keep, entry.kind)
            if known is not None:
                yield f"the request of {row} was charged before, and what was stored for it was removed"
            elif paid is not None:
                yield f"{row} counts on an earlier charge that is not in the journal"
        else:
            before, known.paid, known.time = known.paid, known.paid + units, entry.time
            if known.keep != keep or known.kind not in (None, entry.kind):
                yield f"{row} counts on a charge for something else"
            elif before != paid:
                yield f"{row} counts on an earlier charge that is not in the journal"
            elif known.digest is not None:
                yield f"{row} draws again for a request that was answered"

    def _compare(self, connection: Connection, account: int, salt: bytes) -> list[str]:
        """Compare the stored requests of the account with the journal; return what is wrong."""
        unknown = changed = 0
        statement = "SELECT request, body, units, time, answer FROM requests WHERE account = :account"
        for row in _stream(connection, statement, account=account):
            stated = self._known.pop(row.request, None)
            if stated is None:
                unknown += 1
            elif not _is_as_stated(row, stated, salt):
                changed += 1
        missing = len(self._known)
        one, many = "stored request", "stored requests"
        found = (
            (unknown, f"{one} is not in the journal", f"{many} are not in the journal"),
            (changed, f"{one} or its answer was changed", f"{many} or their answers were changed"),
            (missing, f"{one} is missing", f"{many} are missing"),
        )
        return [counted(*each) for each in found if each[0]]


def _is_as_stated(row: Row[Any], stated: _Request, salt: bytes) -> bool:
    try:
        digest = _answer_digest(salt, row.request, row.body, row.answer)
        keep = len(row.body) == 0
    except TypeError:  # SQLite accepts any type in an edit
        return False
    return (row.time, row.units, keep, digest) == (stated.time, stated.paid, stated.keep, stated.digest)

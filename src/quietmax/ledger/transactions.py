"""Charges: what a request asks of the ledger, the result, and the transaction that decides.

`ChargeBatch` decides all charges of one transaction. The account rows are locked first (`lock_accounts`), so no other
process can spend the same budget in between.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from typing import Literal, NamedTuple, get_args

import numpy as np
import orjson

from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.ledger.database import (
    PARSE_ERRORS,
    AccountTransaction,
    Cursor,
    _answer_digest,
    _damaged,
    _lock_accounts,
)

# --- parts of an account ------------------------------------------------------------------------------------------

Side = Literal["training", "holdout"]


@dataclass(frozen=True, slots=True)
class Part:
    """The people whom a release concerns: one side of a split, one cohort, or both (THEORY 3.8, 3.17).

    Nobody is on both sides of a split or in two cohorts of one rule, so these are charged in parallel: an account has
    spent what concerns everybody, and of the rest what the most expensive cohort has spent. That is the larger of its
    two sides, summed over all splits: for two different splits, a person may be on the expensive side of both. Answers
    that are charged one by one count for everybody, and so for every cohort.
    """

    split: str | None = None  # Name of the split: equal names mean that each person is on the same side
    side: Side | None = None  # The side
    cohort: str | None = None  # Name of the cohort. None: people of all cohorts
    rule: str | None = None  # What says which cohort a person is in; an account has one rule

    def _increase(self, spent: Mapping[Part, int], units: int) -> int:
        """Return by how much the balance of the account grows if this part is charged."""
        return _balance({**spent, self: spent.get(self, 0) + units}) - _balance(spent)

    def _other_rule(self, spent: Iterable[Part]) -> str | None:
        """Return the rule of the cohorts that were charged before, if this cohort is of another rule."""
        if self.rule is None:
            return None
        return next((part.rule for part in spent if part.rule not in (None, self.rule)), None)

    def _to_detail(self, units: int) -> dict[str, str | int]:
        """Return what the detail of the journal row of a charge states about the part."""
        stated = {name: value for name, value in asdict(self).items() if value is not None}
        return {**dict(sorted(stated.items())), "units": units}

    @classmethod
    def _from_detail(cls, detail: str) -> tuple[Part, int] | None:
        """Return the part and the units that the detail of a journal row states; None if it concerns everybody."""
        content = json.loads(detail) if detail else {}
        if not {"side", "split", "cohort", "rule", "units"} & set(content):
            return None
        part = cls(*(content.get(each.name) for each in fields(cls)))
        units = content["units"]
        sided = (part.split is None) == (part.side is None) and part.side in (None, *get_args(Side))
        named = (part.cohort is None) == (part.rule is None) and part != cls()
        words = {type(each) for each in (part.split, part.cohort, part.rule)} <= {str, type(None)}
        if not (sided and named and words) or type(units) is not int:
            raise ValueError("not a part of an account")
        return part, units


def _balance(spent: Mapping[Part, int]) -> int:
    """Return what the charges of parts take from an account: what the most expensive cohort has spent."""
    return max(_by_cohort(spent).values())


def _by_cohort(spent: Mapping[Part, int]) -> dict[str | None, int]:
    """Return what the charges of parts take from each cohort, and from people of no cohort that was charged (None)."""
    of_cohort: dict[str | None, list[tuple[Part, int]]] = {None: []}
    for part, units in spent.items():
        of_cohort.setdefault(part.cohort, []).append((part, units))
    found = {}
    for cohort, own in of_cohort.items():
        sides: Counter[tuple[str | None, Side | None]] = Counter()
        for part, units in own if cohort is None else (*of_cohort[None], *own):
            sides[part.split, part.side] += units
        larger: dict[str | None, int] = {}
        for (split, _), units in sides.items():
            larger[split] = max(larger.get(split, 0), units)
        found[cohort] = sum(larger.values())
    return found


_PART_ROWS = (
    "SELECT account, detail FROM journal"
    " WHERE account IN (??) AND kind <> 'charge' AND kind IN ('training', 'evaluation') AND detail <> ''"
)


_CLOSED = (
    "SELECT changed.account FROM journal AS changed WHERE account IN (??) AND kind = 'revoke' AND client = ''"
    " AND NOT EXISTS (SELECT 1 FROM journal AS later WHERE later.account = changed.account AND later.kind = 'grant'"
    " AND later.sequence > changed.sequence)"
)


def _spent_by_part(cursor: Cursor, accounts: Iterable[int]) -> dict[int, dict[Part, int]]:
    wanted = set(accounts)
    spent: dict[int, dict[Part, int]] = {account: {} for account in wanted}
    for account, detail in cursor._fetch_listed(_PART_ROWS, wanted):
        try:
            stated = Part._from_detail(detail)
        except PARSE_ERRORS as error:
            raise _damaged(f"A journal row of account {account} cannot be read") from error
        if stated is not None:
            part, units = stated
            spent[account][part] = spent[account].get(part, 0) + units
    return spent


# --- requests and results -----------------------------------------------------------------------------------------

_RELEASES = ("training", "evaluation")


@dataclass(frozen=True, slots=True)
class Charge:
    """A request to pay for answers, from an account and from the client's subaccount: both or neither.

    Parameters
    ----------
    account, client : int
        The ids of the account and of the client.
    model : str
        The model, as ``name/version``.
    unit_cost : int
        The units that one answer costs.
    rows : int
        The number of answers. Not used if `queries` are given.
    key : str, optional
        The id of the API key; the charge fails if the key is no longer valid when it is decided.
    queries : tuple of bytes
        The key of each distinct query (`Ledger.query_keys`). Only those without a stored answer are charged.
    request : bytes, optional
        The key of the request id (`Ledger.request_key`). A retry with the same id is not charged again.
    body : bytes
        A digest of the request: the same id with another body is an error, and so is an id that another account has
        paid for and that was never answered.
    kind : {"charge", "training", "evaluation", "migrated-budget"}
        The kind of the journal row.
    part : Part, optional
        The part of the account that is charged, of a training or an evaluation. None: everybody.
    deadline : float
        The value of `time.monotonic` after which the charge is no longer attempted.
    expires : int, optional
        When the bearer token of the request expires, in microseconds since 1970; the charge fails if that is past when
        it is decided.
    """

    account: int
    client: int
    model: str
    unit_cost: int
    rows: int
    key: str | None = None
    queries: tuple[bytes, ...] = ()
    request: bytes | None = None
    body: bytes = b""
    kind: Literal["charge", "training", "evaluation", "migrated-budget"] = "charge"
    part: Part | None = None
    deadline: float = math.inf
    expires: int | None = None

    def __post_init__(self) -> None:
        if self.unit_cost < 0 or self.rows < 0:
            raise InvalidInput(
                f"unit_cost and rows of a charge must not be negative, got {self.unit_cost} and {self.rows}."
            )
        if self.part is not None and self.kind not in _RELEASES:
            raise InvalidInput(
                f"Only a training or an evaluation can charge a part, got the kind {self.kind}."
            )


@dataclass(frozen=True, slots=True)
class Charged:
    """The charge is durable, and the answers may be drawn."""

    units: int  # The units charged
    answers: int  # The number of new answers that may be drawn
    remaining_units: int  # The units that this client can still spend
    cached: Mapping[bytes, bytes] = field(default_factory=dict)  # The stored answers of its queries


@dataclass(frozen=True, slots=True)
class Replayed:
    """The request was answered before: nothing was charged."""

    answer: bytes  # The stored answer of the whole request
    remaining_units: int  # The units that this client can still spend


@dataclass(frozen=True, slots=True)
class LimitExceeded:
    """The charge exceeds a limit: nothing was charged.

    Parameters
    ----------
    limit : {"budget", "quota"}
        The limit: the account's budget or the client's quota.
    units, remaining_units : int
        The units that the charge needs, and those that remain below the limit.
    """

    limit: Literal["budget", "quota"]
    units: int
    remaining_units: int


@dataclass(frozen=True, slots=True)
class RequestIdReused:
    """The request id belongs to a request with another body or to another account: nothing was charged."""


@dataclass(frozen=True, slots=True)
class InvalidKey:
    """The API key or token is not valid any more, or the key belongs to another client: nothing was charged."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The ledger failed, so nothing may be answered. A retry with the same request id is not charged twice."""

    error: QuietmaxError  # The error to raise or report


ChargeResult = Charged | Replayed | LimitExceeded | RequestIdReused | InvalidKey | Failed


@dataclass(frozen=True, slots=True)
class NewAnswers:
    """A request to store answers: by query for the answer cache, and as a whole for a request id."""

    account: int  # The id of the account. Not used if there are neither `queries` nor a `request`
    queries: tuple[bytes, ...] = ()  # The keys of the new queries
    answers: bytes = b""  # Their packed answers one after the other, all of one length
    request: bytes | None = None  # The key of the request id
    answer: bytes = b""  # The packed answer of the whole request. Needed with `request`
    deadline: float = math.inf  # The value of `time.monotonic` after which storing is no longer retried


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """The answers are durable."""

    answer: bytes  # The only answer of the request that may leave: the first that was stored
    first: bool  # Whether it is the answer of this attempt


# --- answer cache -------------------------------------------------------------------------------------------------

KEY_BYTES = 16
_MAX_ANSWERS = 200_000
_ROWS_PER_READ = 5_000
_POSITION_BITS = 20


class AnswerCache:
    """Finds stored answers to identical queries. Not thread-safe: it belongs to the thread that writes.

    The index is in memory: an indexed row per query would write 100 pages for 100 queries. Every lookup first reads the
    rows that were added since, also by other processes. Storing requires the account's lock, so that rows become
    visible in the order of their ids.
    """

    def __init__(self, max_answers: int = _MAX_ANSWERS) -> None:
        self._max_answers = max_answers
        # account -> first half of the key -> (id of the row << _POSITION_BITS) + position in the row
        self._locations: dict[int, dict[int, int]] = {}
        self._last_read: dict[int, int] = {}

    def _find(self, cursor: Cursor, account: int, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """Look up the stored answers to queries."""
        self._refresh(cursor, account)
        locations = self._locations[account]
        wanted = list(keys)
        halves = _first_halves(b"".join(wanted))
        if locations.keys().isdisjoint(halves):
            return {}
        hits = {wanted[place]: locations[half] for place, half in enumerate(halves) if half in locations}
        rows = {
            row_id: (bytes(row_keys), bytes(answers))
            for row_id, row_keys, answers in cursor._fetch_listed(
                "SELECT id, keys, answers FROM answers WHERE id IN (??)",
                {location >> _POSITION_BITS for location in hits.values()},
            )
        }
        found = {}
        for key, location in hits.items():
            row_keys, answers = rows.get(location >> _POSITION_BITS, (b"", b""))
            if not row_keys:  # pruned: else an answer that is stored later would not be found
                locations.pop(_first_halves(key)[0], None)
            position = location & ((1 << _POSITION_BITS) - 1)
            if row_keys[position * KEY_BYTES : (position + 1) * KEY_BYTES] == key:
                width = len(answers) * KEY_BYTES // len(row_keys)
                found[key] = answers[position * width : (position + 1) * width]
        return found

    def _clear(self) -> None:
        """Drop the index. Needed after a rollback: rows that the transaction had seen may not exist."""
        self._locations.clear()
        self._last_read.clear()

    def _refresh(self, cursor: Cursor, account: int) -> None:
        """Index the rows that were added since the last call."""
        if account not in self._locations:
            self._locations[account] = {}
            self._last_read[account] = _first_id(cursor, account, self._max_answers)
        locations = self._locations[account]
        newer = "SELECT id, keys FROM answers WHERE account = ? AND id > ? ORDER BY id LIMIT ?"
        while True:
            rows = cursor._fetch(newer, (account, self._last_read[account], _ROWS_PER_READ))
            for row_id, keys in rows:
                for location, half in enumerate(_first_halves(bytes(keys)), row_id << _POSITION_BITS):
                    locations.setdefault(half, location)  # of equal queries, the first that was stored counts
                self._last_read[account] = row_id
                if len(locations) > self._max_answers + self._max_answers // 16:  # many take little longer
                    for half in list(islice(locations, len(locations) - self._max_answers)):
                        del locations[half]
            if len(rows) < _ROWS_PER_READ:
                return


def _first_id(cursor: Cursor, account: int, max_answers: int) -> int:
    """Return the id after which the newest `max_answers` answers begin."""
    older = "SELECT id, LENGTH(keys) FROM answers WHERE account = ? AND id < ? ORDER BY id DESC LIMIT ?"
    count, row_id = 0, 2**62
    while rows := cursor._fetch(older, (account, row_id, _ROWS_PER_READ)):
        for row_id, length in rows:
            count += length // KEY_BYTES
            if count > max_answers:
                return int(row_id)
    return 0


def _first_halves(keys: bytes) -> list[int]:
    """Return the parts of keys that are indexed; a whole key is compared after its row was read."""
    halves: list[int] = np.frombuffer(keys, "<i8")[:: KEY_BYTES // 8].tolist()
    return halves


# --- charges inside a transaction ---------------------------------------------------------------------------------

_SUBACCOUNTS = (
    "SELECT subaccounts.account, clients.id, clients.name, subaccounts.limit_units, subaccounts.spent_units"
    " FROM clients LEFT OUTER JOIN subaccounts ON subaccounts.client = clients.id WHERE clients.id IN (??)"
)
_SAVE_SUBACCOUNT = (
    "INSERT INTO subaccounts (account, client, limit_units, spent_units, refused) VALUES (?, ?, NULL, ?, 0)"
    " ON CONFLICT (account, client) DO UPDATE SET spent_units = excluded.spent_units"
)
_KEYS = "SELECT id, client, expires, revoked FROM keys WHERE id IN (??)"
_REQUESTS = "SELECT request, account, body, units, answer FROM requests WHERE request IN (??)"
_INSERT_REQUEST = (
    "INSERT INTO requests (request, body, account, units, time, answer) VALUES (?, ?, ?, ?, ?, NULL)"
)
_UPDATE_REQUEST = "UPDATE requests SET units = ?, time = ? WHERE request = ?"


_OVERLAP = (
    "The cohorts are those of the rule {!r}, but the account was charged for cohorts of the rule {!r}, so a person "
    "could be in two of them. The rule of a training set cannot change. A model that was trained without a cohort is "
    "charged to everybody."
)


@dataclass(slots=True)
class _Balance:
    """A client's subaccount inside a transaction."""

    limit_units: int | None
    spent_units: int
    changed: bool = False


class _StoredRequest(NamedTuple):
    """What the ledger knows of a request id."""

    account: int
    body: bytes
    units: int
    answer: bytes | None


def _read_requests(cursor: Cursor, keys: set[bytes]) -> dict[bytes, _StoredRequest]:
    return {
        bytes(request): _StoredRequest(account, bytes(body), units, None if answer is None else bytes(answer))
        for request, account, body, units, answer in cursor._fetch_listed(_REQUESTS, keys)
    }


class ChargeBatch:
    """Decides the charges of one transaction, in their order."""

    def __init__(
        self,
        cursor: Cursor,
        answer_cache: AnswerCache,
        accounts: Mapping[int, AccountTransaction],
        charges: Sequence[Charge],
        now: int,
    ) -> None:
        self._cursor = cursor
        self._accounts = accounts
        self._now = now
        self._client_names: dict[int, str] = {}
        self._balances: dict[tuple[int, int], _Balance] = {}
        for account, client, name, limit_units, spent_units in cursor._fetch_listed(
            _SUBACCOUNTS, {charge.client for charge in charges}
        ):
            self._client_names[client] = name
            if account is not None:
                self._balances[account, client] = _Balance(limit_units, spent_units)
        self._clients_by_key = {
            key: client
            for key, client, expires, revoked in cursor._fetch_listed(
                _KEYS, {charge.key for charge in charges if charge.key is not None}
            )
            if revoked is None and (expires is None or expires > now)
        }
        self._attempts = _read_requests(
            cursor, {charge.request for charge in charges if charge.request is not None}
        )
        queries: dict[int, set[bytes]] = {}
        for charge in charges:
            if charge.queries:
                queries.setdefault(charge.account, set()).update(charge.queries)
        self._cached = {
            account: answer_cache._find(cursor, account, keys) for account, keys in queries.items()
        }
        in_parts = {charge.account for charge in charges if charge.part is not None}
        self._parts = _spent_by_part(cursor, in_parts)
        self._closed = {account for (account,) in cursor._fetch_listed(_CLOSED, in_parts)}
        self._new_requests: dict[bytes, tuple[Charge, int]] = {}
        self._resumed_requests: dict[bytes, int] = {}
        self.results: list[ChargeResult] = [self._decide(charge) for charge in charges]

    @property
    def _changed(self) -> bool:
        """Whether anything has to be written."""
        return any(account.rows for account in self._accounts.values())

    def _save(self) -> None:
        """Write balances, journal rows and requests."""
        cursor = self._cursor
        for account in self._accounts.values():
            if account.rows:
                account._save(cursor)
        cursor._execute_many(
            _SAVE_SUBACCOUNT,
            [(*key, balance.spent_units) for key, balance in self._balances.items() if balance.changed],
        )
        cursor._execute_many(
            _INSERT_REQUEST,
            [
                (request, charge.body, charge.account, units, self._now)
                for request, (charge, units) in self._new_requests.items()
            ],
        )
        cursor._execute_many(
            _UPDATE_REQUEST,
            [(units, self._now, request) for request, units in self._resumed_requests.items()],
        )

    def _decide(self, charge: Charge) -> ChargeResult:
        if charge.key is not None and self._clients_by_key.get(charge.key) != charge.client:
            return InvalidKey()
        if charge.expires is not None and charge.expires <= self._now:
            return InvalidKey()
        account = self._accounts[charge.account]
        balance = self._balances.setdefault((charge.account, charge.client), _Balance(None, 0))
        earlier = None if charge.request is None else self._attempts.get(charge.request)
        if earlier is not None:
            if earlier.body != charge.body:
                return RequestIdReused()
            if earlier.answer is not None:
                return Replayed(earlier.answer, _remaining(account, balance))
            if earlier.account != charge.account:
                return RequestIdReused()  # this account would answer what another one has paid for
        return self._pay(charge, account, balance, earlier)

    def _pay(
        self, charge: Charge, account: AccountTransaction, balance: _Balance, earlier: _StoredRequest | None
    ) -> Charged | LimitExceeded | Failed:
        """Charge the new answers, less what an earlier attempt has paid; a training or an evaluation pays once."""
        cached: dict[bytes, bytes] = {}
        if found := self._cached.get(charge.account):
            cached = {query: found[query] for query in charge.queries if query in found}
        answers = len(charge.queries) - len(cached) if charge.queries else charge.rows
        paid = 0 if earlier is None else earlier.units
        full = max(answers * charge.unit_cost - paid, 0)
        if earlier is not None and charge.kind in _RELEASES:
            full = 0
        units = full if charge.part is None else charge.part._increase(self._parts[charge.account], full)
        if full and charge.part is not None and (refused := self._refused(charge.account, charge.part, full)):
            return refused
        if units > account.limit_units - account.spent_units:
            return LimitExceeded("budget", units, account.limit_units - account.spent_units)
        if balance.limit_units is not None and units > balance.limit_units - balance.spent_units:
            return LimitExceeded("quota", units, balance.limit_units - balance.spent_units)
        draws_for_id = charge.request is not None and (earlier is None or charge.kind == "charge")
        if draws_for_id or full > 0:
            account._add(
                self._now,
                charge.kind,
                client=self._client_names[charge.client],
                model=charge.model,
                answers=answers,
                units=units,
                detail=_charge_detail(charge, full, None if earlier is None else paid),
            )
            balance.spent_units += units
            balance.changed |= units > 0
            if charge.part is not None:
                spent = self._parts[charge.account]
                spent[charge.part] = spent.get(charge.part, 0) + full
            if charge.request is not None:
                if earlier is None or charge.request in self._new_requests:
                    self._new_requests[charge.request] = (charge, paid + full)
                else:
                    self._resumed_requests[charge.request] = paid + full
                attempt = _StoredRequest(charge.account, charge.body, paid + full, None)
                self._attempts[charge.request] = attempt
        return Charged(units, answers, _remaining(account, balance), cached)

    def _refused(self, account: int, part: Part, units: int) -> LimitExceeded | Failed | None:
        """Return why a cohort cannot be charged, whatever remains: it may overlap others, or the account is closed."""
        if other := part._other_rule(self._parts[account]):
            return Failed(InvalidInput(_OVERLAP.format(part.rule, other)))
        closed = part.cohort is not None and account in self._closed
        return LimitExceeded("budget", units, 0) if closed else None


def _charge_detail(charge: Charge, units: int, paid: int | None) -> str:
    """Return the detail of a journal row: the request, whether pruning keeps it, what earlier attempts have paid."""
    fields: dict[str, str | int] = {} if charge.part is None else charge.part._to_detail(units)
    if charge.request is not None:
        fields["request"] = charge.request.hex()
        if not charge.body:
            fields["keep"] = True
        if paid is not None:
            fields["paid"] = paid
    return orjson.dumps(fields).decode() if fields else ""


def _remaining(account: AccountTransaction, balance: _Balance) -> int:
    remaining = account.limit_units - account.spent_units
    if balance.limit_units is None:
        return remaining
    return min(remaining, balance.limit_units - balance.spent_units)


# --- answers and counts inside a transaction ----------------------------------------------------------------------

_ANSWER_REQUEST = "UPDATE requests SET answer = ? WHERE request = ? AND answer IS NULL"
_INSERT_ANSWERS = "INSERT INTO answers (account, keys, answers, time) VALUES (?, ?, ?, ?)"
COUNT_REFUSED = (
    "INSERT INTO subaccounts (account, client, spent_units, refused) VALUES (?, ?, 0, ?)"
    " ON CONFLICT (account, client) DO UPDATE SET refused = subaccounts.refused + excluded.refused"
)


def _store_answers(
    cursor: Cursor,
    accounts: Mapping[int, AccountTransaction],
    batch: Sequence[NewAnswers],
    salt: bytes,
    now: int,
) -> list[StoredAnswer]:
    """Store answers. Of several draws for one request id only one was paid for: the first to be stored may leave."""
    known = _read_requests(cursor, {new.request for new in batch if new.request is not None})
    digests: dict[int, dict[str, str | None]] = {}
    stored, written, cached = [], [], []
    for new in batch:
        answer, first = new.answer, True
        if new.request is not None:
            request = known.get(new.request)
            if request is None or request.account != new.account:
                raise _damaged("A charged request is missing from the ledger")
            if request.answer is not None:
                answer, first = request.answer, False
            else:
                known[new.request] = request._replace(answer=answer)
                written.append((answer, new.request))
                digest = _answer_digest(salt, new.request, request.body, answer)
                digests.setdefault(new.account, {})[new.request.hex()] = digest
        if first and new.queries:
            cached.append((new.account, b"".join(new.queries), new.answers, now))
        stored.append(StoredAnswer(answer, first))
    for account, requests in digests.items():
        accounts[account]._add(now, "answered", detail=json.dumps({"requests": requests}))
    if cursor._execute_many(_ANSWER_REQUEST, written) != len(written):
        raise _damaged("A charged request is missing from the ledger")
    cursor._execute_many(_INSERT_ANSWERS, cached)
    return stored


# --- retention ----------------------------------------------------------------------------------------------------

DAY = 24 * 3600 * 1_000_000
"""Microseconds."""
_MIN_PRUNE_DAYS = 1 / 24
_MAX_PRUNE_DAYS = 36_500
_PRUNE_REQUESTS = "DELETE FROM requests WHERE account = ? AND time < ? AND LENGTH(body) > 0"
_PRUNE_ANSWERS = "DELETE FROM answers WHERE account = ? AND time < ?"


def _prune(cursor: Cursor, days: float, now: int) -> tuple[int, int]:
    """Delete requests and cached answers of long ago; what trainings and evaluations were charged for is kept."""
    if not _MIN_PRUNE_DAYS <= days <= _MAX_PRUNE_DAYS:
        raise InvalidInput(f"days must be between 1/24 and {_MAX_PRUNE_DAYS}, got {days:g}.")
    before = now - int(days * DAY)
    deleted = Counter[str]()
    for (number,) in cursor._fetch("SELECT id FROM accounts ORDER BY id"):
        locked = _lock_accounts(cursor, [number])[number]
        rows = {
            "requests": cursor._execute(_PRUNE_REQUESTS, (number, before)),
            "batches": cursor._execute(_PRUNE_ANSWERS, (number, before)),
        }
        if any(rows.values()):
            locked._add(now, "prune", detail=json.dumps({"before": before, **rows}, sort_keys=True))
            locked._save(cursor)
            deleted.update(rows)
    return deleted["requests"], deleted["batches"]

"""What is asked of the ledger for one request, and what it says."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from quietmax.errors import InvalidInput, LedgerDamaged, QuietmaxError
from quietmax.ledger.answer_cache import AnswerCache
from quietmax.ledger.database import Cursor, Values
from quietmax.ledger.journal import digest


@dataclass(frozen=True, slots=True)
class Charge:
    """Pay for answers from an account and the client's part of it, both or neither.

    `rows` answers of `unit_cost` units each; with `queries` (one key for each different query) only those that have
    no stored answer. `request` makes a retry free; `body` tells whether it is the same request. A charge that has not
    begun at `deadline` (`time.monotonic`) is dropped. `key` is checked in the same transaction.
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
    kind: Literal["charge", "training", "migrated-budget"] = "charge"
    deadline: float = math.inf

    def __post_init__(self) -> None:
        if self.unit_cost < 0 or self.rows < 0:
            raise InvalidInput(
                f"A charge of {self.rows} answers at {self.unit_cost} units each is less than nothing; give a cost "
                "and a number of answers that are not negative."
            )


@dataclass(frozen=True, slots=True)
class Charged:
    """The charge is durable: `answers` new ones may be drawn, the others are in `stored`.

    `remaining_units` is what remains for this client afterwards. `resumed`: an earlier try of the same request had paid
    already and its answer never left.
    """

    units: int
    answers: int
    remaining_units: int
    stored: Mapping[bytes, bytes] = field(default_factory=dict)
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Replayed:
    """This request was answered before; the stored answer again, at no cost."""

    answer: bytes
    remaining_units: int


@dataclass(frozen=True, slots=True)
class LimitExceeded:
    """Nothing was charged: `whose` limit it was, and what remains of it."""

    limit: Literal["budget", "quota"]
    units: int
    remaining_units: int


@dataclass(frozen=True, slots=True)
class RequestIdReused:
    """Nothing was charged: the request id belongs to another request."""


@dataclass(frozen=True, slots=True)
class InvalidKey:
    """Nothing was charged: the key was revoked or has expired."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The ledger failed: nothing may be answered. Whether it was charged is unknown; a retry by id is free."""

    error: QuietmaxError


ChargeResult = Charged | Replayed | LimitExceeded | RequestIdReused | InvalidKey | Failed


@dataclass(frozen=True, slots=True)
class NewAnswers:
    """Keep answers: by query, and the whole answer of a request that carries an id.

    `queries` are the keys of new queries to an account, `answers` theirs one after the other, all of one length.
    """

    account: int = 0
    queries: tuple[bytes, ...] = ()
    answers: bytes = b""
    request: bytes | None = None
    answer: bytes = b""
    deadline: float = math.inf


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """Kept. `answer` is the request's only one: the `first` that was stored, which may be another try's."""

    answer: bytes
    first: bool


_LOCK = "SELECT id, limit_units, spent_units, sequence, head FROM accounts WHERE id IN (??) ORDER BY id FOR UPDATE"
_SAVE = "UPDATE accounts SET limit_units = ?, spent_units = ?, sequence = ?, head = ? WHERE id = ?"
_JOURNAL = (
    "INSERT INTO journal (account, sequence, time, kind, client, model, answers, units, spent_units, limit_units,"
    " detail, previous, hash) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_PARTS = (
    "SELECT subaccounts.account, clients.id, clients.name, subaccounts.limit_units, subaccounts.spent_units"
    " FROM clients LEFT OUTER JOIN subaccounts ON subaccounts.client = clients.id WHERE clients.id IN (??)"
)
_NEW_PART = (
    "INSERT INTO subaccounts (account, client, limit_units, spent_units, refused) VALUES (?, ?, NULL, ?, 0)"
)
_SAVE_PART = "UPDATE subaccounts SET spent_units = ? WHERE account = ? AND client = ?"
_KEYS = "SELECT id, client, expires, revoked FROM keys WHERE id IN (??)"
_REQUESTS = "SELECT request, body, units, answer FROM requests WHERE request IN (??)"
_NEW_REQUEST = (
    "INSERT INTO requests (request, body, account, units, time, answer) VALUES (?, ?, ?, ?, ?, NULL)"
)
_SAVE_REQUEST = "UPDATE requests SET units = ? WHERE request = ?"
_ANSWER_REQUEST = "UPDATE requests SET answer = ? WHERE request = ? AND answer IS NULL"
_ANSWER_OF_REQUEST = "SELECT answer FROM requests WHERE request = ?"
_NEW_ANSWERS = "INSERT INTO answers (account, keys, answers) VALUES (?, ?, ?)"
_COUNT_REFUSED = (
    "INSERT INTO subaccounts (account, client, spent_units, refused) VALUES (?, ?, 0, ?)"
    " ON CONFLICT (account, client) DO UPDATE SET refused = subaccounts.refused + excluded.refused"
)


@dataclass(slots=True)
class AccountTransaction:
    """An account inside a transaction: its balance, the end of its chain, and the rows to be added."""

    account: int
    limit_units: int
    spent_units: int
    sequence: int
    head: str
    rows: list[Values] = field(default_factory=list)

    def add(
        self,
        now: int,
        kind: str,
        *,
        client: str = "",
        model: str = "",
        answers: int = 0,
        units: int = 0,
        detail: str = "",
    ) -> None:
        """Append a row to the journal and move the balance by its units."""
        self.spent_units += units
        self.sequence += 1
        fields = (
            self.account,
            self.sequence,
            now,
            kind,
            client,
            model,
            answers,
            units,
            self.spent_units,
            self.limit_units,
            detail,
            self.head,
        )
        self.head = digest(*fields)
        self.rows.append((*fields, self.head))

    def save(self, cursor: Cursor) -> None:
        """Write the balance and the new rows."""
        cursor.run(_SAVE, (self.limit_units, self.spent_units, self.sequence, self.head, self.account))
        cursor.run_many(_JOURNAL, self.rows)


def locked(cursor: Cursor, ids: Iterable[int]) -> dict[int, AccountTransaction]:
    """The named accounts, locked until the transaction ends."""
    wanted = set(ids)
    found = {row[0]: AccountTransaction(*row) for row in cursor.rows_of(_LOCK, wanted)}
    if len(found) < len(wanted):
        raise LedgerDamaged("An account is missing from the ledger; restore it from a copy, or start again.")
    return found


@dataclass(slots=True)
class _Part:
    """A client's part of an account inside a transaction."""

    limit_units: int | None
    spent_units: int
    is_new: bool
    changed: bool = False


class ChargeBatch:
    """Works through the charges of one transaction; `outcomes` says what became of each, in their order."""

    def __init__(
        self,
        cursor: Cursor,
        answer_cache: AnswerCache,
        books: Mapping[int, AccountTransaction],
        charges: Sequence[Charge],
        now: int,
    ) -> None:
        self._cursor = cursor
        self._now = now
        self._books = books
        self._names: dict[int, str] = {}
        self._parts: dict[tuple[int, int], _Part] = {}
        self._read_parts({charge.client for charge in charges})
        self._holders = self._valid_keys({charge.key for charge in charges if charge.key is not None})
        self._requests = self._known_requests(
            {charge.request for charge in charges if charge.request is not None}
        )
        self._stored = _stored_answers(cursor, answer_cache, charges)
        self._new_requests: dict[bytes, tuple[Charge, int]] = {}
        self._raised_requests: dict[bytes, int] = {}
        self.outcomes: list[ChargeResult] = [self._one(charge) for charge in charges]

    @property
    def changed(self) -> bool:
        """Whether anything must be written."""
        return bool(self._new_requests) or any(book.rows for book in self._books.values())

    def save(self) -> None:
        """Write balances, journal and requests."""
        cursor = self._cursor
        for book in self._books.values():
            if book.rows:
                book.save(cursor)
        for (account, client), part in self._parts.items():
            if part.changed and part.is_new:
                cursor.run(_NEW_PART, (account, client, part.spent_units))
            elif part.changed:
                cursor.run(_SAVE_PART, (part.spent_units, account, client))
        cursor.run_many(
            _NEW_REQUEST,
            [
                (request, charge.body, charge.account, units, self._now)
                for request, (charge, units) in self._new_requests.items()
            ],
        )
        cursor.run_many(_SAVE_REQUEST, [(units, request) for request, units in self._raised_requests.items()])

    def _one(self, charge: Charge) -> ChargeResult:
        if charge.key is not None and self._holders.get(charge.key) != charge.client:
            return InvalidKey()
        book = self._books[charge.account]
        part = self._parts.setdefault((charge.account, charge.client), _Part(None, 0, is_new=True))
        paid = 0
        resumed = False
        if charge.request is not None:
            known = self._requests.get(charge.request)
            if known is not None:
                body, paid, answer = known
                if body != charge.body:
                    return RequestIdReused()
                if answer is not None:
                    return Replayed(answer, _left(book, part))
                resumed = True
        stored = {query: self._stored[query] for query in charge.queries if query in self._stored}
        count = len(charge.queries) - len(stored) if charge.queries else charge.rows
        units = max(count * charge.unit_cost - paid, 0)
        if units > book.limit_units - book.spent_units:
            return LimitExceeded("budget", units, book.limit_units - book.spent_units)
        if part.limit_units is not None and units > part.limit_units - part.spent_units:
            return LimitExceeded("quota", units, part.limit_units - part.spent_units)
        if units or charge.kind == "training":
            book.add(
                self._now,
                charge.kind,
                client=self._names[charge.client],
                model=charge.model,
                answers=count,
                units=units,
            )
            part.spent_units += units
            part.changed = True
        if charge.request is not None:
            self._note_request(charge, charge.request, paid + units, resumed)
        return Charged(units, count, _left(book, part), stored, resumed)

    def _note_request(self, charge: Charge, request: bytes, units: int, resumed: bool) -> None:
        if not resumed or request in self._new_requests:
            self._new_requests[request] = (charge, units)
        else:
            self._raised_requests[request] = units
        self._requests[request] = (charge.body, units, None)

    def _read_parts(self, ids: set[int]) -> None:
        for account, client, name, limit_units, spent_units in self._cursor.rows_of(_PARTS, ids):
            self._names[client] = name
            if account is not None:
                self._parts[account, client] = _Part(limit_units, spent_units, is_new=False)

    def _valid_keys(self, ids: set[str]) -> dict[str, int]:
        """Keys that are neither revoked nor expired, with their clients."""
        return {
            number: client
            for number, client, expires, revoked in self._cursor.rows_of(_KEYS, ids)
            if revoked is None and (expires is None or expires > self._now)
        }

    def _known_requests(self, ids: set[bytes]) -> dict[bytes, tuple[bytes, int, bytes | None]]:
        return {
            bytes(request): (bytes(body), units, None if answer is None else bytes(answer))
            for request, body, units, answer in self._cursor.rows_of(_REQUESTS, ids)
        }


def _stored_answers(
    cursor: Cursor, answer_cache: AnswerCache, charges: Sequence[Charge]
) -> dict[bytes, bytes]:
    asked: dict[int, set[bytes]] = {}
    for charge in charges:
        if charge.queries:
            asked.setdefault(charge.account, set()).update(charge.queries)
    stored: dict[bytes, bytes] = {}
    for account, queries in asked.items():
        stored.update(answer_cache.find(cursor, account, queries))
    return stored


def _left(book: AccountTransaction, part: _Part) -> int:
    left = book.limit_units - book.spent_units
    return left if part.limit_units is None else min(left, part.limit_units - part.spent_units)


def keep(cursor: Cursor, stores: Sequence[NewAnswers]) -> list[StoredAnswer]:
    """Keep answers.

    Of several draws for one request id (a retry while the first try was under way) only one was paid for, so only the
    first to be stored may ever leave: the others are forgotten here, their answers by query too.
    """
    kept = []
    for store in stores:
        answer = store.answer
        first = True
        if store.request is not None:
            first = cursor.run(_ANSWER_REQUEST, (store.answer, store.request)) == 1
        if not first:
            found = cursor.rows(_ANSWER_OF_REQUEST, (store.request,))
            if not found:
                raise LedgerDamaged("A request that was charged is missing from the ledger; restore a copy.")
            answer = bytes(found[0][0])
        elif store.queries:
            cursor.run(_NEW_ANSWERS, (store.account, b"".join(store.queries), store.answers))
        kept.append(StoredAnswer(answer, first))
    return kept


def count_refusals(cursor: Cursor, refusals: Mapping[tuple[int, int], int]) -> None:
    """Add refused requests to the clients' parts of accounts."""
    cursor.run_many(
        _COUNT_REFUSED, [(account, client, count) for (account, client), count in sorted(refusals.items())]
    )

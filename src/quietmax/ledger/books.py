"""One transaction of the ledger: many charges, each accepted or refused on its own.

The account's row is locked first, so that all writers of an account go one after the other. Balances are worked out
here, in the order of the charges, and written once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, bindparam, select, text

from quietmax.ledger.chain import digest
from quietmax.ledger.charges import (
    Charge,
    Charged,
    KeyEnded,
    Outcome,
    Refused,
    Replayed,
    Reused,
    Store,
    Stored,
)
from quietmax.ledger.errors import LedgerDamaged
from quietmax.ledger.tables import accounts, answers, clients, journal, keys, requests, subaccounts

_MOST_PARAMETERS = 10_000
_ACCOUNTS = (
    select(
        accounts.c.id, accounts.c.limit_units, accounts.c.spent_units, accounts.c.sequence, accounts.c.head
    )
    .where(accounts.c.id.in_(bindparam("ids", expanding=True)))
    .order_by(accounts.c.id)
    .with_for_update()
)
_SUBACCOUNTS = (
    select(
        subaccounts.c.account,
        subaccounts.c.client,
        clients.c.name,
        subaccounts.c.limit_units,
        subaccounts.c.spent_units,
    )
    .join_from(clients, subaccounts, subaccounts.c.client == clients.c.id, isouter=True)
    .where(clients.c.id.in_(bindparam("ids", expanding=True)))
)
_CLIENTS = select(clients.c.id, clients.c.name).where(clients.c.id.in_(bindparam("ids", expanding=True)))
_KEYS = select(keys.c.id, keys.c.client, keys.c.expires, keys.c.revoked).where(
    keys.c.id.in_(bindparam("ids", expanding=True))
)
_REQUESTS = select(requests.c.request, requests.c.body, requests.c.units, requests.c.answer).where(
    requests.c.request.in_(bindparam("ids", expanding=True))
)
_ANSWERS = select(answers.c.query, answers.c.answer).where(
    answers.c.query.in_(bindparam("ids", expanding=True))
)
_SAVE_ACCOUNT = text(
    "UPDATE accounts SET limit_units = :limit_units, spent_units = :spent_units, sequence = :sequence, head = :head"
    " WHERE id = :account"
)
_SAVE_SUBACCOUNT = text(
    "UPDATE subaccounts SET spent_units = :spent_units WHERE account = :account AND client = :client"
)
_SAVE_REQUEST = text("UPDATE requests SET units = :units WHERE request = :request")
_COUNT_REFUSED = text(
    "INSERT INTO subaccounts (account, client, spent_units, refused) VALUES (:account, :client, 0, :refused)"
    " ON CONFLICT (account, client) DO UPDATE SET refused = subaccounts.refused + excluded.refused"
)
_KEEP_ANSWER = text("INSERT INTO answers (query, answer) VALUES (:query, :answer) ON CONFLICT DO NOTHING")
_KEEP_REQUEST = text("UPDATE requests SET answer = :answer WHERE request = :request AND answer IS NULL")


@dataclass(slots=True)
class Book:
    """An account inside a transaction: its balance, the end of its chain, and the rows to be added."""

    account: int
    limit_units: int
    spent_units: int
    sequence: int
    head: str
    rows: list[dict[str, Any]] = field(default_factory=list)

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
        fields: dict[str, Any] = {
            "account": self.account,
            "sequence": self.sequence,
            "time": now,
            "kind": kind,
            "client": client,
            "model": model,
            "answers": answers,
            "units": units,
            "spent_units": self.spent_units,
            "limit_units": self.limit_units,
            "detail": detail,
            "previous": self.head,
        }
        self.head = digest(*fields.values())
        self.rows.append({**fields, "hash": self.head})

    def save(self, connection: Connection) -> None:
        """Write the balance and the new rows."""
        connection.execute(
            _SAVE_ACCOUNT,
            {
                "account": self.account,
                "limit_units": self.limit_units,
                "spent_units": self.spent_units,
                "sequence": self.sequence,
                "head": self.head,
            },
        )
        connection.execute(journal.insert(), self.rows)


def locked(connection: Connection, ids: Iterable[int]) -> dict[int, Book]:
    """The named accounts, locked until the transaction ends."""
    wanted = sorted(set(ids))
    found = {row.id: Book(*row) for row in connection.execute(_ACCOUNTS, {"ids": wanted})}
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


class Posting:
    """Works through the charges of one transaction; `outcomes` says what became of each, in their order."""

    def __init__(
        self, connection: Connection, books: Mapping[int, Book], charges: Sequence[Charge], now: int
    ) -> None:
        self._connection = connection
        self._now = now
        self._books = books
        self._names: dict[int, str] = {}
        self._parts: dict[tuple[int, int], _Part] = {}
        self._read_parts({charge.client for charge in charges})
        self._holders = self._valid_keys({charge.key for charge in charges if charge.key is not None})
        self._requests = self._known_requests(
            {charge.request for charge in charges if charge.request is not None}
        )
        self._stored = self._stored_answers({query for charge in charges for query in charge.queries})
        self._new_requests: dict[bytes, dict[str, Any]] = {}
        self._raised_requests: dict[bytes, int] = {}
        self.outcomes: list[Outcome] = [self._one(charge) for charge in charges]

    @property
    def changed(self) -> bool:
        """Whether anything must be written."""
        return bool(self._new_requests) or any(book.rows for book in self._books.values())

    def save(self) -> None:
        """Write balances, journal and requests."""
        for book in self._books.values():
            if book.rows:
                book.save(self._connection)
        fresh: list[dict[str, int]] = []
        moved: list[dict[str, int]] = []
        for (account, client), part in self._parts.items():
            if part.changed:
                row = {"account": account, "client": client, "spent_units": part.spent_units}
                (fresh if part.is_new else moved).append(row)
        if fresh:
            self._connection.execute(
                subaccounts.insert(), [{**row, "limit_units": None, "refused": 0} for row in fresh]
            )
        if moved:
            self._connection.execute(_SAVE_SUBACCOUNT, moved)
        if self._new_requests:
            self._connection.execute(requests.insert(), list(self._new_requests.values()))
        for request, units in self._raised_requests.items():
            self._connection.execute(_SAVE_REQUEST, {"request": request, "units": units})

    def _one(self, charge: Charge) -> Outcome:
        if charge.key is not None and self._holders.get(charge.key) != charge.client:
            return KeyEnded()
        book = self._books[charge.account]
        part = self._parts.setdefault((charge.account, charge.client), _Part(None, 0, is_new=True))
        paid = 0
        resumed = False
        if charge.request is not None:
            known = self._requests.get(charge.request)
            if known is not None:
                body, paid, answer = known
                if body != charge.body:
                    return Reused()
                if answer is not None:
                    return Replayed(answer, _left(book, part))
                resumed = True
        stored = {query: self._stored[query] for query in charge.queries if query in self._stored}
        count = len(charge.queries) - len(stored) if charge.queries else charge.rows
        units = max(count * charge.unit_cost - paid, 0)
        if units > book.limit_units - book.spent_units:
            return Refused("budget", units, book.limit_units - book.spent_units)
        if part.limit_units is not None and units > part.limit_units - part.spent_units:
            return Refused("quota", units, part.limit_units - part.spent_units)
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
        if not resumed:
            self._new_requests[request] = {
                "request": request,
                "body": charge.body,
                "account": charge.account,
                "units": units,
                "time": self._now,
                "answer": None,
            }
        elif request in self._new_requests:
            self._new_requests[request]["units"] = units
        elif units > self._requests[request][1]:
            self._raised_requests[request] = units
        self._requests[request] = (charge.body, units, None)

    def _read_parts(self, ids: set[int]) -> None:
        for account, client, name, limit_units, spent_units in self._connection.execute(
            _SUBACCOUNTS, {"ids": sorted(ids)}
        ):
            if account is not None:
                self._parts[account, client] = _Part(limit_units, spent_units, is_new=False)
                self._names[client] = name
        missing = ids - self._names.keys()
        if missing:
            self._names.update(
                (row.id, row.name) for row in self._connection.execute(_CLIENTS, {"ids": sorted(missing)})
            )

    def _valid_keys(self, ids: set[str]) -> dict[str, int]:
        """Keys that are neither revoked nor expired, with their clients."""
        if not ids:
            return {}
        return {
            row.id: row.client
            for row in self._connection.execute(_KEYS, {"ids": sorted(ids)})
            if row.revoked is None and (row.expires is None or row.expires > self._now)
        }

    def _known_requests(self, ids: set[bytes]) -> dict[bytes, tuple[bytes, int, bytes | None]]:
        return {
            bytes(row.request): (
                bytes(row.body),
                row.units,
                None if row.answer is None else bytes(row.answer),
            )
            for row in _in_parts(self._connection, _REQUESTS, ids)
        }

    def _stored_answers(self, ids: set[bytes]) -> Mapping[bytes, bytes]:
        return {bytes(row.query): bytes(row.answer) for row in _in_parts(self._connection, _ANSWERS, ids)}


def _left(book: Book, part: _Part) -> int:
    left = book.limit_units - book.spent_units
    return left if part.limit_units is None else min(left, part.limit_units - part.spent_units)


def _in_parts(connection: Connection, statement: Any, ids: set[bytes]) -> list[Row[Any]]:
    ordered = sorted(ids)
    rows: list[Row[Any]] = []
    for start in range(0, len(ordered), _MOST_PARAMETERS):
        rows += connection.execute(statement, {"ids": ordered[start : start + _MOST_PARAMETERS]}).all()
    return rows


def keep(connection: Connection, stores: Sequence[Store]) -> list[Stored]:
    """Keep answers; where one is there already, the first stays.

    Of several draws for one request id (a retry while the first try was under way) only one was paid for, so only the
    first to be stored may ever leave: the others are forgotten here, their answers by query too.
    """
    kept = []
    by_query: dict[bytes, bytes] = {}
    for store in stores:
        answer = store.answer
        first = True
        if store.request is not None:
            done = connection.execute(_KEEP_REQUEST, {"request": store.request, "answer": store.answer})
            first = done.rowcount == 1
        if first:
            for query, one in store.answers:
                by_query.setdefault(query, one)
        else:
            found = connection.execute(
                select(requests.c.answer).where(requests.c.request == store.request)
            ).scalar_one_or_none()
            if found is None:
                raise LedgerDamaged("A request that was charged is missing from the ledger; restore a copy.")
            answer = bytes(found)
        kept.append(Stored(answer, first))
    if by_query:
        rows = [{"query": query, "answer": by_query[query]} for query in sorted(by_query)]
        connection.execute(_KEEP_ANSWER, rows)
    return kept


def count_refusals(connection: Connection, refusals: Mapping[tuple[int, int], int]) -> None:
    """Add refused requests to the clients' parts of accounts."""
    connection.execute(
        _COUNT_REFUSED,
        [
            {"account": account, "client": client, "refused": count}
            for (account, client), count in sorted(refusals.items())
        ],
    )

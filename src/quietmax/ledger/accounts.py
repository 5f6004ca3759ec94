"""Accounts: one for each training set, parts of it for clients, and what an administrator may change.

A training set has one budget, whoever asks and however often a model is trained on it again (THEORY 3.6). An account
is found by the digest of its records or by the name its owner gave it; sharing an account is always safe, opening a
second one for the same records needs an administrator's reason, in words, which the journal keeps.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, get_args

from sqlalchemy import Connection, Row, insert, select

from quietmax.accounting.budget import LIMIT, Analysis, Budget, Meter
from quietmax.accounting.costs import Cost, cost_from_json
from quietmax.errors import InvalidInput, LedgerDamaged
from quietmax.ledger.database import KEYS_BOOK, Cursor, accounts, clients, journal, subaccounts, training_sets
from quietmax.ledger.journal import START
from quietmax.ledger.transactions import AccountTransaction, locked

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MOST_UNITS = 2**62
_FEWEST_WORDS = 3
UNREADABLE = (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError)
"""What reading a JSON text of the ledger may raise after somebody edited it."""


@dataclass(frozen=True)
class Terms:
    """What the owner promised when the account was opened: (epsilon, delta), and how a Gaussian total reads it."""

    epsilon: float
    delta: float = 0.0
    analysis: Analysis = "proven"

    def total(self, measure: str) -> Cost:
        """The total in a measure."""
        return Budget(self.epsilon, self.delta).total(measure, self.analysis)  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        """The terms by name."""
        return {"epsilon": self.epsilon, "delta": self.delta, "analysis": self.analysis}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Terms:
        """The terms that `to_json` wrote; raises one of `UNREADABLE` if they are not those."""
        named = dict(record)
        if "reading" in named:  # version 0.1
            named["analysis"] = named.pop("reading")
        if set(named) != {"epsilon", "delta", "analysis"} or named["analysis"] not in get_args(Analysis):
            raise ValueError("these are not terms")
        return cls(float(named["epsilon"]), float(named["delta"]), named["analysis"])


@dataclass(frozen=True)
class Subaccount:
    """A client's part of an account."""

    client: str
    limit_units: int | None
    spent_units: int
    refused: int


@dataclass(frozen=True)
class AccountState:
    """An account as it stands. `total` is what `LIMIT` units are worth."""

    id: int
    name: str
    total: Cost
    terms: Terms
    limit_units: int
    spent_units: int
    sequence: int
    head: str
    opened: int

    @property
    def remaining_units(self) -> int:
        """Units not yet spent."""
        return self.limit_units - self.spent_units

    @property
    def limit(self) -> Cost:
        """The whole budget, grants included, rounded down."""
        return self.cost_left(self.limit_units)

    @property
    def spent(self) -> Cost:
        """What was spent, rounded up."""
        return Meter(self.total).spent(self.spent_units)

    @property
    def remaining(self) -> Cost:
        """What is left, rounded down."""
        return self.cost_left(self.remaining_units)

    def cost_left(self, units: int) -> Cost:
        """Units as a cost, rounded down."""
        return Meter(self.total).remaining(LIMIT - units)

    def units(self, cost: Cost) -> int:
        """What a release of this cost takes, rounded up; a pure cost counts in a Gaussian account too (THEORY 3)."""
        converted = cost.as_gaussian() if self.total.measure == "gaussian" else cost
        return Meter(self.total).units(converted)

    def to_json(self) -> dict[str, Any]:
        """The account by name, amounts as costs and as whole units."""
        return {
            "account": self.name,
            "terms": self.terms.to_json(),
            "budget": self.limit.to_json(),
            "spent": self.spent.to_json(),
            "remaining": self.remaining.to_json(),
            "limit_units": self.limit_units,
            "spent_units": self.spent_units,
            "rows": self.sequence,
            "head": self.head,
        }


def checked_name(name: str, what: str) -> str:
    """A name of an account or client: letters, digits, dot, dash, underscore."""
    if _NAME.fullmatch(name):
        return name
    raise InvalidInput(
        f"The {what} name {name[:80]!r} must be 1 to 64 letters, digits, dots, dashes or underscores, the first a"
        " letter or digit; choose such a name."
    )


def checked_reason(because: str) -> str:
    """An administrator's reason: some words, since the journal keeps it for the auditor."""
    if len(because.split()) >= _FEWEST_WORDS and len(because) <= 1000:
        return because
    raise InvalidInput(
        f"The reason {because[:80]!r} must be a sentence of {_FEWEST_WORDS} words or more (at most 1000 letters), as"
        " the journal keeps it for the auditor; say why."
    )


def damaged(what: str) -> LedgerDamaged:
    """The refusal to go on with a ledger that somebody edited."""
    return LedgerDamaged(f"{what}; stop serving from the ledger and restore a copy that holds every charge.")


def state_of(row: Row[Any]) -> AccountState:
    """The account a row of the table describes."""
    try:
        total, terms = cost_from_json(json.loads(row.total)), Terms.from_json(json.loads(row.terms))
    except UNREADABLE as problem:
        raise damaged(f"The total or the terms of the account {row.name!r} cannot be read") from problem
    if not all(type(each) is int for each in (row.limit_units, row.spent_units, row.sequence, row.opened)):
        raise damaged(f"The balance, the budget or the last row of the account {row.name!r} is not a number")
    return AccountState(
        row.id,
        row.name,
        total,
        terms,
        row.limit_units,
        row.spent_units,
        row.sequence,
        row.head,
        row.opened,
    )


def by_name(connection: Connection, name: str) -> AccountState | None:
    """The account of that name."""
    row = connection.execute(select(accounts).where(accounts.c.name == name)).one_or_none()
    return None if row is None else state_of(row)


def by_digest(connection: Connection, digest: str) -> AccountState | None:
    """The account of the records of that digest."""
    row = connection.execute(
        select(accounts)
        .join_from(accounts, training_sets, accounts.c.id == training_sets.c.account)
        .where(training_sets.c.digest == digest)
    ).one_or_none()
    return None if row is None else state_of(row)


def all_of(connection: Connection) -> list[AccountState]:
    """All accounts of training sets, by name."""
    rows = connection.execute(
        select(accounts).where(accounts.c.name != KEYS_BOOK).order_by(accounts.c.name)
    ).all()
    return [state_of(row) for row in rows]


def parts_of(connection: Connection, account: int) -> list[Subaccount]:
    """The clients' parts of an account, the largest spender first."""
    rows = connection.execute(
        select(clients.c.name, subaccounts.c.limit_units, subaccounts.c.spent_units, subaccounts.c.refused)
        .join_from(subaccounts, clients, subaccounts.c.client == clients.c.id)
        .where(subaccounts.c.account == account)
        .order_by(subaccounts.c.spent_units.desc(), clients.c.name)
    )
    parts = [Subaccount(*row) for row in rows]
    for part in parts:
        if type(part.spent_units) is not int or type(part.limit_units) not in (int, type(None)):
            raise damaged(f"The balance or the quota of client {part.client!r} is not a number")
    return parts


def open_account(
    connection: Connection,
    name: str,
    total: Cost,
    terms: Terms,
    *,
    digest: str | None,
    named_by_owner: bool,
    because: str | None,
) -> AccountState:
    """The account of a training set; opened now if the ledger knows neither its digest nor its name.

    An account that exists keeps its budget: another total is refused. With `because`, records whose digest belongs to
    another account are moved to this one.
    """
    checked_name(name, "account")
    if because is not None:
        checked_reason(because)
    book = locked_keys_book(connection)  # so that two processes do not open the same account
    bound = None if digest is None else by_digest(connection, digest)
    if bound is not None and bound.name != name:
        if because is None and named_by_owner:
            raise InvalidInput(
                f"These records belong to the account {bound.name!r}, whose budget they share with every model trained "
                f"on them; leave out the name {name!r}, or give a reason in words to count them elsewhere."
            )
        if because is None:
            return _same_total(bound, total)
    found = by_name(connection, name)
    if found is None:
        found = _created(connection, name, total, terms, because)
    _same_total(found, total)
    if digest is not None and (bound is None or bound.id != found.id):
        if bound is not None:
            connection.execute(training_sets.delete().where(training_sets.c.digest == digest))
            book.add(now(), "reassign", detail=_detail(account=name, before=bound.name, because=because))
            book.save(Cursor(connection))
        connection.execute(insert(training_sets), {"digest": digest, "account": found.id})
    return found


def _same_total(account: AccountState, total: Cost) -> AccountState:
    if account.total == total:
        return account
    raise InvalidInput(
        f"The account {account.name!r} was opened with {account.total}, but {total} is asked for; "
        "leave out the budget to go on with the account as it is, or raise it with 'quietmax ledger grant'."
    )


def _created(
    connection: Connection, name: str, total: Cost, terms: Terms, because: str | None
) -> AccountState:
    Meter(total)
    moment = now()
    connection.execute(
        insert(accounts),
        {
            "name": name,
            "total": json.dumps(total.to_json()),
            "terms": json.dumps(terms.to_json()),
            "limit_units": LIMIT,
            "spent_units": 0,
            "sequence": 0,
            "head": START,
            "opened": moment,
        },
    )
    created = by_name(connection, name)
    assert created is not None
    book = locked(Cursor(connection), [created.id])[created.id]
    reason = {} if because is None else {"because": because}
    book.add(moment, "open", detail=_detail(total=total.to_json(), terms=terms.to_json(), **reason))
    book.save(Cursor(connection))
    created = by_name(connection, name)
    assert created is not None
    return created


def locked_keys_book(connection: Connection) -> AccountTransaction:
    """The book of keys, locked."""
    number = connection.execute(select(accounts.c.id).where(accounts.c.name == KEYS_BOOK)).scalar_one()
    return locked(Cursor(connection), [number])[number]


def named(connection: Connection, name: str) -> AccountState:
    """The account of that name, or a sentence that says which there are."""
    found = by_name(connection, name) if name != KEYS_BOOK else None
    if found is None:
        known = ", ".join(account.name for account in all_of(connection)) or "none yet"
        raise InvalidInput(
            f"The ledger has no account {name[:80]!r}; its accounts are: {known}; name one of them."
        )
    return found


def grant(connection: Connection, name: str, terms: Terms, because: str) -> AccountState:
    """Set the whole budget of an account to new terms; what was spent stays spent."""
    checked_reason(because)
    account = named(connection, name)
    book = locked(Cursor(connection), [account.id])[account.id]
    if (alone := alone_in(connection, account.id)) is not None:
        raise InvalidInput(
            f"The account {name!r} was taken whole by the model {alone[0]}, whose guarantee adds up with no other, and "
            "cannot be raised; count further models elsewhere, with --account and a reason."
        )
    wanted = terms.total(account.total.measure)
    limit = int(wanted.amount * LIMIT / Fraction(account.total.amount))
    if not book.spent_units <= limit <= _MOST_UNITS:
        raise InvalidInput(
            f"The budget of {name!r} cannot become {wanted}: more than that is spent, or it is more than 900 "
            "times the first one; give a budget in between."
        )
    book.limit_units = limit
    book.add(now(), "grant", detail=_detail(terms=terms.to_json(), because=because))
    book.save(Cursor(connection))
    return named(connection, name)


def set_quota(
    connection: Connection, name: str, client: str, share: float | None, because: str
) -> AccountState:
    """Limit a client to a share of the account's budget (None: no limit but the budget itself)."""
    checked_reason(because)
    account = named(connection, name)
    book = locked(Cursor(connection), [account.id])[account.id]
    if share is not None and not 0 <= share <= 1:
        raise InvalidInput(
            f"The share is {share!r}, but must be from 0 to 1; give a part of the whole budget."
        )
    limit = None if share is None else int(Fraction(str(share)) * book.limit_units)
    _limit_client(connection, book, client, limit)
    book.add(now(), "quota", client=client, detail=_detail(share=share, quota_units=limit, because=because))
    book.save(Cursor(connection))
    return named(connection, name)


def revoke(connection: Connection, name: str, client: str | None, because: str) -> AccountState:
    """Take back what is unspent: of the whole account, or of one client's part."""
    checked_reason(because)
    account = named(connection, name)
    book = locked(Cursor(connection), [account.id])[account.id]
    limit = None
    if client is None:
        book.limit_units = book.spent_units
    else:
        known = {part.client: part for part in parts_of(connection, account.id)}
        limit = known[client].spent_units if client in known else 0
        _limit_client(connection, book, client, limit)
    book.add(now(), "revoke", client=client or "", detail=_detail(quota_units=limit, because=because))
    book.save(Cursor(connection))
    return named(connection, name)


def note_unproven(connection: Connection, account: AccountState, model: str, status: str) -> None:
    """Write down, once, that a model without proven guarantee answers from this account."""
    book = locked(Cursor(connection), [account.id])[account.id]
    if (model, status) not in unproven_models(connection, account.id):
        book.add(now(), "unproven", model=model, detail=_detail(status=status))
        book.save(Cursor(connection))


def unproven_models(connection: Connection, account: int) -> list[tuple[str, str]]:
    """Models without proven guarantee that ever answered from an account, with the status of their guarantee."""
    rows = connection.execute(
        select(journal.c.model, journal.c.detail)
        .where(journal.c.account == account, journal.c.kind == "unproven")
        .order_by(journal.c.sequence)
    )
    try:
        return [(row.model, json.loads(row.detail)["status"]) for row in rows]
    except UNREADABLE as problem:
        raise damaged(f"The journal of account {account} has a row that cannot be read") from problem


def take_alone(connection: Connection, account: AccountState, model: str, digest: str) -> None:
    """Write down that a model is the only one its account will ever pay for; refuse if anything else was paid."""
    book = locked(Cursor(connection), [account.id])[account.id]
    alone = alone_in(connection, account.id)
    if alone is not None and alone[1] == digest:
        return
    if alone is not None or book.spent_units:
        raise InvalidInput(
            f"The guarantee of the model {model} adds up with no other, but the account {account.name!r} has paid for "
            "something already; give it an account of its own with --account, --because and --budget."
        )
    if book.limit_units < LIMIT:
        raise InvalidInput(
            f"The account {account.name!r} was lowered below the terms it was opened with, but the model {model} needs "
            "all of it; raise it again with 'quietmax ledger grant', or give the model an account of its own."
        )
    book.add(now(), "exclusive", model=model, detail=_detail(digest=digest))
    book.save(Cursor(connection))


def alone_in(connection: Connection, account: int) -> tuple[str, str] | None:
    """The model that has taken an account whole, and its digest."""
    row = connection.execute(
        select(journal.c.model, journal.c.detail).where(
            journal.c.account == account, journal.c.kind.in_(("exclusive", "alone"))
        )
    ).one_or_none()
    try:
        return None if row is None else (row.model, json.loads(row.detail)["digest"])
    except UNREADABLE as problem:
        raise damaged(f"The journal of account {account} has a row that cannot be read") from problem


def client_id(connection: Connection, name: str, *, create: bool = False) -> int:
    """The number of a client."""
    found = connection.execute(select(clients.c.id).where(clients.c.name == name)).scalar_one_or_none()
    if found is None and create:
        connection.execute(insert(clients), {"name": checked_name(name, "client")})
        found = connection.execute(select(clients.c.id).where(clients.c.name == name)).scalar_one()
    if found is None:
        raise InvalidInput(
            f"There is no client {name[:80]!r}; create a key for it first with 'quietmax ledger key create'."
        )
    return int(found)


def _limit_client(connection: Connection, book: AccountTransaction, client: str, limit: int | None) -> None:
    number = client_id(connection, client)
    where = (subaccounts.c.account == book.account) & (subaccounts.c.client == number)
    spent = connection.execute(select(subaccounts.c.spent_units).where(where)).scalar_one_or_none()
    if spent is None:
        connection.execute(
            insert(subaccounts),
            {
                "account": book.account,
                "client": number,
                "limit_units": limit,
                "spent_units": 0,
                "refused": 0,
            },
        )
    elif limit is not None and spent > limit:
        raise InvalidInput(
            f"The client {client!r} has spent {spent / book.limit_units:.4g} of the budget already, more than the "
            "quota asked for; give a larger share, or revoke what is left."
        )
    else:
        connection.execute(subaccounts.update().where(where).values(limit_units=limit))


def now() -> int:
    """Microseconds since 1970."""
    return time.time_ns() // 1000


def _detail(**fields: Any) -> str:
    kept: Mapping[str, Any] = {name: value for name, value in fields.items() if value is not None}
    return json.dumps(kept, sort_keys=True)

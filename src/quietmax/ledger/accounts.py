"""Accounts: one for each training set, with subaccounts of clients, and what an administrator may change.

A training set has one budget, whoever asks and however often a model is trained on it again (THEORY 3.6). An account is
found by the digest of its records or by its name. Sharing an account is always safe. A second account for the same
records needs an administrator's reason, which the journal keeps.

All functions run inside the caller's transaction.
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

from quietmax.accounting.costs import LIMIT, Analysis, Budget, Cost, Measure, Meter, cost_from_json
from quietmax.errors import InvalidInput, LedgerDamaged, counted
from quietmax.ledger.database import (
    KEYS_ACCOUNT,
    Cursor,
    accounts,
    clients,
    journal,
    subaccounts,
    training_sets,
)
from quietmax.ledger.journal import START
from quietmax.ledger.transactions import AccountTransaction, lock_accounts

PARSE_ERRORS = (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError)
"""What parsing JSON of the ledger can raise after somebody edited it."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TOKEN_CLIENT_NAME = re.compile(r"oidc:[!-~]{1,255}@[!-?A-~]{1,200}")
"""The issuer follows the last @. No client of an API key has such a name, because of the colon."""
_MAX_UNITS = 2**62
_MIN_REASON_WORDS = 3
_MAX_REASON_LENGTH = 1000
_EXCLUSIVE_KINDS = ("exclusive", "alone")  # version 0.1 wrote "alone"

# --- states -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Terms:
    """The (epsilon, delta) that the owner of the records promises.

    Parameters
    ----------
    epsilon : float
        The epsilon of all answers together.
    delta : float
        Their delta.
    analysis : {"proven", "published", "published-example"}
        How (epsilon, delta) becomes a total in the Gaussian measure, as in `Budget.total`.

    Examples
    --------
    >>> Terms(1.0).total("pure")
    PureCost(epsilon=1.0)
    """

    epsilon: float
    delta: float = 0.0
    analysis: Analysis = "proven"

    def total(self, measure: Measure) -> Cost:
        """Return the total cost in a privacy measure.

        Parameters
        ----------
        measure : {"pure", "gaussian"}
            The privacy measure.
        """
        return Budget(self.epsilon, self.delta).total(measure, self.analysis)

    def to_json(self) -> dict[str, Any]:
        """Return the terms by name."""
        return {"epsilon": self.epsilon, "delta": self.delta, "analysis": self.analysis}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Terms:
        """Read what `to_json` wrote, or what version 0.1 wrote (`reading` instead of `analysis`)."""
        fields = {"analysis" if name == "reading" else name: value for name, value in record.items()}
        if set(fields) != {"epsilon", "delta", "analysis"} or len(record) != len(fields):
            raise ValueError("not the terms of an account")
        if fields["analysis"] not in get_args(Analysis):
            raise ValueError("not the terms of an account")
        return cls(float(fields["epsilon"]), float(fields["delta"]), fields["analysis"])


@dataclass(frozen=True)
class Subaccount:
    """A client's share of an account."""

    client: str  # The client's name
    limit_units: int | None  # The client's quota. None: only the account's budget limits the client
    spent_units: int  # What the client has spent
    refused: int  # The number of charges that exceeded the budget or the quota


@dataclass(frozen=True)
class AccountState:
    """An account at one moment.

    Parameters
    ----------
    id : int
        The id of the account.
    name : str
        Its name.
    total : Cost
        The cost that `LIMIT` units stand for: the budget that the account was opened with.
    terms : Terms
        The (epsilon, delta) that it was opened with.
    limit_units : int
        The budget, grants and revocations included.
    spent_units : int
        What was spent.
    sequence : int
        The number of the last journal row.
    head : str
        The hash of the last journal row.
    opened : int
        When the account was opened, in microseconds since 1970.
    """

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
        """The units not yet spent."""
        return self.limit_units - self.spent_units

    @property
    def limit(self) -> Cost:
        """The budget, grants and revocations included, rounded down."""
        return self._cost_of(self.limit_units)

    @property
    def spent(self) -> Cost:
        """What was spent, rounded up."""
        return Meter(self.total).spent(self.spent_units)

    @property
    def remaining(self) -> Cost:
        """What remains, rounded down."""
        return self._cost_of(self.remaining_units)

    def _cost_of(self, units: int) -> Cost:
        """Return units as a cost, rounded down."""
        return Meter(self.total).remaining(LIMIT - units)

    def units(self, cost: Cost) -> int:
        """Return what a release of this cost takes from the account, rounded up.

        Parameters
        ----------
        cost : Cost
            The cost. A Gaussian account can pay a pure cost too (THEORY 3), but not the other way round.
        """
        converted = cost.as_gaussian() if self.total.measure == "gaussian" else cost
        return Meter(self.total).units(converted)

    def to_json(self) -> dict[str, Any]:
        """Return the account by name, amounts as costs and as units."""
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


# --- reading ------------------------------------------------------------------------------------------------------


def damaged(what: str) -> LedgerDamaged:
    """Return the error for a ledger that somebody edited."""
    return LedgerDamaged(f"{what}. Stop serving from this ledger and restore a backup that has every charge.")


def account_state(row: Row[Any]) -> AccountState:
    """Return the account that a row of the table describes."""
    try:
        total, terms = cost_from_json(json.loads(row.total)), Terms.from_json(json.loads(row.terms))
    except PARSE_ERRORS as error:
        raise damaged(f"The total or the terms of account {row.name!r} cannot be read") from error
    if not all(type(each) is int for each in (row.limit_units, row.spent_units, row.sequence, row.opened)):
        raise damaged(f"The balance, the budget or the last row of account {row.name!r} is not an integer")
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


def find_by_name(connection: Connection, name: str) -> AccountState | None:
    """Return the account of a name, if there is one."""
    row = connection.execute(select(accounts).where(accounts.c.name == name)).one_or_none()
    return None if row is None else account_state(row)


def find_by_digest(connection: Connection, digest: str) -> AccountState | None:
    """Return the account of a training set, if there is one."""
    row = connection.execute(
        select(accounts)
        .join_from(accounts, training_sets, accounts.c.id == training_sets.c.account)
        .where(training_sets.c.digest == digest)
    ).one_or_none()
    return None if row is None else account_state(row)


def get_account(connection: Connection, name: str) -> AccountState:
    """Return the account of a name."""
    found = find_by_name(connection, name) if name != KEYS_ACCOUNT else None
    if found is None:
        known = ", ".join(account.name for account in list_accounts(connection)) or "none"
        raise InvalidInput(f"The ledger has no account {name[:80]!r}. Its accounts: {known}.")
    return found


def list_accounts(connection: Connection) -> list[AccountState]:
    """Return all accounts of training sets, by name."""
    rows = connection.execute(
        select(accounts).where(accounts.c.name != KEYS_ACCOUNT).order_by(accounts.c.name)
    ).all()
    return [account_state(row) for row in rows]


def list_subaccounts(connection: Connection, account: int) -> list[Subaccount]:
    """Return the subaccounts of an account, those that spent most first."""
    rows = connection.execute(
        select(clients.c.name, subaccounts.c.limit_units, subaccounts.c.spent_units, subaccounts.c.refused)
        .join_from(subaccounts, clients, subaccounts.c.client == clients.c.id)
        .where(subaccounts.c.account == account)
        .order_by(subaccounts.c.spent_units.desc(), clients.c.name)
    )
    found = [Subaccount(*row) for row in rows]
    for each in found:
        if type(each.spent_units) is not int or type(each.limit_units) not in (int, type(None)):
            raise damaged(f"The balance or the quota of client {each.client!r} is not an integer")
    return found


def unproven_models(connection: Connection, account: int) -> list[tuple[str, str]]:
    """Return the models without a proven guarantee that ever used an account."""
    rows = connection.execute(
        select(journal.c.model, journal.c.detail)
        .where(journal.c.account == account, journal.c.kind == "unproven")
        .order_by(journal.c.sequence)
    )
    return [(row.model, _read_detail(account, row.detail, "status")) for row in rows]


def exclusive_model(connection: Connection, account: int) -> tuple[str, str] | None:
    """Return the model that an account is reserved for, if there is one."""
    row = connection.execute(
        select(journal.c.model, journal.c.detail).where(
            journal.c.account == account, journal.c.kind.in_(_EXCLUSIVE_KINDS)
        )
    ).one_or_none()
    return None if row is None else (row.model, _read_detail(account, row.detail, "digest"))


def _read_detail(account: int, detail: str, name: str) -> str:
    """Return one field of a journal row's detail."""
    try:
        value: str = json.loads(detail)[name]
    except PARSE_ERRORS as error:
        raise damaged(f"A journal row of account {account} cannot be read") from error
    return value


# --- opening ------------------------------------------------------------------------------------------------------


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
    """Return the account of a training set; open one if neither its digest nor its name is known.

    An existing account keeps its budget: another total is an error.
    """
    check_name(name, "account")
    if because is not None:
        check_reason(because)
    keys_account = lock_keys_account(connection)  # so that two processes do not open the same account
    current = None if digest is None else find_by_digest(connection, digest)
    if current is not None and current.name != name and because is None:
        if named_by_owner:
            raise InvalidInput(
                f"These records belong to the account {current.name!r}: all models trained on them share its budget. "
                f"To count them in {name!r}, a reason (`because`) is required."
            )
        return _with_total(current, total)
    account = find_by_name(connection, name)
    if account is None:
        account = _create_account(connection, keys_account, name, total, terms, because)
    _with_total(account, total)
    if digest is not None and (current is None or current.id != account.id):
        _bind_training_set(connection, keys_account, digest, current, account, because)
    if keys_account.rows:
        keys_account.save(Cursor(connection))
    return account


def _bind_training_set(
    connection: Connection,
    keys_account: AccountTransaction,
    digest: str,
    before: AccountState | None,
    account: AccountState,
    because: str | None,
) -> None:
    """Bind a training set to an account. The journal keeps it, so that nobody can bind it to another one unnoticed."""
    bound: dict[str, Any] = {"id": account.id, "digest": digest}
    if before is None:
        keys_account.add(now(), "training-set", detail=detail_json(**bound))
    else:
        connection.execute(training_sets.delete().where(training_sets.c.digest == digest))
        changed = detail_json(**bound, account=account.name, before=before.name, because=because)
        keys_account.add(now(), "reassign", detail=changed)
    connection.execute(insert(training_sets), {"digest": digest, "account": account.id})


def _with_total(account: AccountState, total: Cost) -> AccountState:
    """Return the account if it was opened with this total."""
    if account.total == total:
        return account
    raise InvalidInput(
        f"The account {account.name!r} was opened with {account.total}, not with {total}. "
        "'quietmax ledger grant' changes its budget."
    )


def _create_account(
    connection: Connection,
    keys_account: AccountTransaction,
    name: str,
    total: Cost,
    terms: Terms,
    because: str | None,
) -> AccountState:
    Meter(total)  # raises if the total is 0
    check_opening(connection, name, because)
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
    account = _lock(connection, get_account(connection, name).id)
    opened = detail_json(total=total.to_json(), terms=terms.to_json(), because=because)
    account.add(moment, "open", detail=opened)
    account.save(Cursor(connection))
    keys_account.add(moment, "account", detail=detail_json(id=account.account, name=name))
    return get_account(connection, name)


def lost_accounts(connection: Connection) -> list[int]:
    """Return the ids of accounts that spent something by the journal, and that the database has lost."""
    rows = connection.execute(
        select(journal.c.detail)
        .join_from(journal, accounts, journal.c.account == accounts.c.id)
        .where(accounts.c.name == KEYS_ACCOUNT, journal.c.kind == "loss")
    ).scalars()
    try:
        return sorted({int(number) for detail in rows for number in json.loads(detail).get("accounts", {})})
    except PARSE_ERRORS as error:
        raise damaged("A journal row of the account of the API keys cannot be read") from error


def check_opening(connection: Connection, name: str, because: str | None) -> None:
    """Raise `InvalidInput` if a new account needs a reason: one that was lost may have paid for the same records."""
    if because is None and (lost := lost_accounts(connection)):
        raise InvalidInput(
            f"The ledger has lost {counted(len(lost), 'account')}, so the new account {name!r} could be a second "
            "budget for the same records. `account` and a reason (`because`) are required."
        )


# --- changes by an administrator ----------------------------------------------------------------------------------


def grant(connection: Connection, name: str, terms: Terms, because: str) -> AccountState:
    """Set the budget of an account. What was spent stays spent."""
    check_reason(because)
    current = get_account(connection, name)
    account = _lock(connection, current.id)
    if (exclusive := exclusive_model(connection, current.id)) is not None:
        raise InvalidInput(
            f"The account {name!r} is reserved for the model {exclusive[0]}, whose guarantee does not compose with "
            "others, and cannot be raised. Other models need another account."
        )
    wanted = terms.total(current.total.measure)
    limit = int(wanted.amount * LIMIT / Fraction(current.total.amount))
    if not account.spent_units <= limit <= _MAX_UNITS:
        raise InvalidInput(
            f"The budget of {name!r} cannot become {wanted}: it must be at least what is spent, and at most about 900 "
            "times the first budget."
        )
    account.limit_units = limit
    account.add(now(), "grant", detail=detail_json(terms=terms.to_json(), because=because))
    account.save(Cursor(connection))
    return get_account(connection, name)


def set_quota(
    connection: Connection, name: str, client: str, share: float | None, because: str
) -> AccountState:
    """Limit a client to a share of an account's budget."""
    check_reason(because)
    if _TOKEN_CLIENT_NAME.fullmatch(client):  # may get a quota before the first request
        lock_keys_account(connection)
        client_id(connection, client, create=True)
    account = _lock(connection, get_account(connection, name).id)
    if share is not None and not 0 <= share <= 1:
        raise InvalidInput(f"share must be between 0 and 1, got {share!r}.")
    limit = None if share is None else int(Fraction(str(share)) * account.limit_units)
    _limit_client(connection, account, client, limit)
    account.add(
        now(), "quota", client=client, detail=detail_json(share=share, quota_units=limit, because=because)
    )
    account.save(Cursor(connection))
    return get_account(connection, name)


def revoke(connection: Connection, name: str, client: str | None, because: str) -> AccountState:
    """Take back what is unspent, of an account or of one client."""
    check_reason(because)
    account = _lock(connection, get_account(connection, name).id)
    limit = None
    if client is None:
        account.limit_units = account.spent_units
    else:
        spent = {each.client: each.spent_units for each in list_subaccounts(connection, account.account)}
        limit = spent.get(client, 0)
        _limit_client(connection, account, client, limit)
    account.add(now(), "revoke", client=client or "", detail=detail_json(quota_units=limit, because=because))
    account.save(Cursor(connection))
    return get_account(connection, name)


def _limit_client(
    connection: Connection, account: AccountTransaction, client: str, limit: int | None
) -> None:
    number = client_id(connection, client)
    where = (subaccounts.c.account == account.account) & (subaccounts.c.client == number)
    spent = connection.execute(select(subaccounts.c.spent_units).where(where)).scalar_one_or_none()
    if spent is None:
        connection.execute(
            insert(subaccounts),
            {
                "account": account.account,
                "client": number,
                "limit_units": limit,
                "spent_units": 0,
                "refused": 0,
            },
        )
    elif limit is not None and spent > limit:
        raise InvalidInput(
            f"The quota of client {client!r} must be at least what the client has spent, "
            f"{spent / account.limit_units:.4g} of the budget."
        )
    else:
        connection.execute(subaccounts.update().where(where).values(limit_units=limit))


# --- changes by the service ---------------------------------------------------------------------------------------


def record_unproven(connection: Connection, account: int, model: str, status: str) -> None:
    """Record, once, that a model without a proven guarantee uses an account."""
    locked = _lock(connection, account)
    if (model, status) not in unproven_models(connection, account):
        locked.add(now(), "unproven", model=model, detail=detail_json(status=status))
        locked.save(Cursor(connection))


def reserve_exclusively(connection: Connection, account: AccountState, model: str, digest: str) -> None:
    """Record that an account pays for one model only. Its guarantee does not compose with others."""
    locked = _lock(connection, account.id)
    exclusive = exclusive_model(connection, account.id)
    if exclusive is not None and exclusive[1] == digest:
        return
    if exclusive is not None or locked.spent_units:
        raise InvalidInput(
            f"The guarantee of the model {model} does not compose with others, and the account {account.name!r} has "
            "already paid for something. The model needs an account of its own."
        )
    if locked.limit_units < LIMIT:
        raise InvalidInput(
            f"The model {model} needs the whole budget that the account {account.name!r} was opened with, but the "
            "budget was lowered. 'quietmax ledger grant' raises it."
        )
    locked.add(now(), "exclusive", model=model, detail=detail_json(digest=digest))
    locked.save(Cursor(connection))


def client_id(connection: Connection, name: str, *, create: bool = False) -> int:
    """Return the id of a client."""
    found = connection.execute(select(clients.c.id).where(clients.c.name == name)).scalar_one_or_none()
    if found is None and create:
        if not _TOKEN_CLIENT_NAME.fullmatch(name):
            check_name(name, "client")
        connection.execute(insert(clients), {"name": name})
        found = connection.execute(select(clients.c.id).where(clients.c.name == name)).scalar_one()
    if found is None:
        raise InvalidInput(
            f"The ledger has no client {name[:80]!r}. 'quietmax ledger key create' creates a client."
        )
    return int(found)


def token_client_name(issuer: str, subject: str) -> str | None:
    """Return the name of the client that a token of an identity provider states."""
    name = f"oidc:{subject}@{issuer.removeprefix('https://')}"
    return name if _TOKEN_CLIENT_NAME.fullmatch(name) else None


# --- shared -------------------------------------------------------------------------------------------------------


def lock_keys_account(connection: Connection) -> AccountTransaction:
    """Lock the account that records API keys; it also guards the creation of accounts and clients."""
    number = connection.execute(select(accounts.c.id).where(accounts.c.name == KEYS_ACCOUNT)).scalar_one()
    return _lock(connection, number)


def _lock(connection: Connection, account: int) -> AccountTransaction:
    return lock_accounts(Cursor(connection), [account])[account]


def check_name(name: str, what: str) -> str:
    """Return the name of an account or client if it is valid."""
    if _NAME.fullmatch(name):
        return name
    raise InvalidInput(
        f"The {what} name must be 1 to 64 letters, digits, dots, dashes or underscores, the first a letter or digit, "
        f"got {name[:80]!r}."
    )


def check_reason(because: str) -> str:
    """Return an administrator's reason if it is long enough to mean something to an auditor."""
    if len(because.split()) >= _MIN_REASON_WORDS and len(because) <= _MAX_REASON_LENGTH:
        return because
    raise InvalidInput(
        f"The reason must have at least {_MIN_REASON_WORDS} words and at most {_MAX_REASON_LENGTH} characters, "
        f"got {because[:80]!r}."
    )


def now() -> int:
    """Return the time in microseconds since 1970."""
    return time.time_ns() // 1000


def detail_json(**fields: Any) -> str:
    """Return the detail of a journal row, without the fields that are None."""
    return json.dumps({name: value for name, value in fields.items() if value is not None}, sort_keys=True)

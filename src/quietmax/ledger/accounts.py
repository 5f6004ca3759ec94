"""Accounts, clients and API keys: what they are, and what an administrator and the service may change.

A training set has one budget, whoever asks and however often a model is trained on it again (THEORY 3.6). An account is
found by the digest of its records or by its name. Sharing an account is always safe. A second account for the same
records needs an administrator's reason, which the journal keeps.

An API key has the form `qm_<id>_<secret>`. The secret has 256 bits of operating-system entropy and is shown once; the
ledger keeps only its SHA-256. The id finds the row, and the hash of the secret is compared in constant time. A slow
password hash would add nothing, because 256 random bits cannot be guessed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, Literal, NamedTuple, get_args

from sqlalchemy import Connection, Engine, Row

from quietmax.accounting.costs import LIMIT, Analysis, Budget, Cost, Measure, Meter, cost_from_json
from quietmax.errors import InvalidInput, counted
from quietmax.ledger.database import (
    KEYS_ACCOUNT,
    PARSE_ERRORS,
    AccountTransaction,
    Cursor,
    _damaged,
    _driver_connection,
    _has_wrong_types,
    _insert,
    _insert_account,
    _lock_accounts,
    _read_transaction,
    _run,
    _translate_errors,
    _write_transaction,
    now,
)
from quietmax.ledger.heads import FileGuard, Head, HeadFile, _read_heads
from quietmax.ledger.transactions import DAY, _prune

Role = Literal["admin", "client"]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TOKEN_CLIENT_NAME = re.compile(r"oidc:[!-~]{1,255}@[!-?A-~]{1,200}")
"""The issuer follows the last @. No client of an API key has such a name, because of the colon."""
_PLAIN_CLIENTS = ("anonymous", "lost", "training")
"""Clients that are nobody: the journal states their names."""
_PROPOSAL_DAYS = 30
_KEY = re.compile(r"qm_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
_UNKNOWN_KEY_HASH = hashlib.sha256(b"no such key").hexdigest()
_MAX_KEY_DAYS = 36_500
_MAX_UNITS = 2**62
_MIN_REASON_WORDS = 3
_MAX_REASON_LENGTH = 1000
_HISTORY_POINTS = 120

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
        """Return the total cost in a privacy measure."""
        return Budget(self.epsilon, self.delta).total(measure, self.analysis)

    def to_json(self) -> dict[str, Any]:
        """Return the terms by name."""
        return asdict(self)

    @classmethod
    def _from_json(cls, stored: Mapping[str, Any]) -> Terms:
        """Read what `to_json` wrote, or what version 0.1 wrote (`reading` instead of `analysis`)."""
        fields = {"analysis" if name == "reading" else name: value for name, value in stored.items()}
        known = set(fields) == set(asdict(cls(1.0))) and len(stored) == len(fields)
        if not known or fields["analysis"] not in get_args(Analysis):
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
    id, name
        The id and the name of the account.
    total : Cost
        The cost that `LIMIT` units stand for: the budget that the account was opened with.
    terms : Terms
        The (epsilon, delta) that it was opened with.
    limit_units, spent_units : int
        The budget, grants and revocations included, and what was spent.
    sequence, head
        The number and the hash of the last journal row.
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
        return Meter(self.total).remaining(LIMIT - self.limit_units)

    @property
    def spent(self) -> Cost:
        """What was spent, rounded up."""
        return Meter(self.total).spent(self.spent_units)

    @property
    def remaining(self) -> Cost:
        """What remains, rounded down."""
        return Meter(self.total).remaining(LIMIT - self.remaining_units)

    def units(self, cost: Cost) -> int:
        """Return what a release of this cost takes from the account, rounded up.

        A Gaussian account can pay a pure cost too (THEORY 3), but not the other way round.
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


class Use(NamedTuple):
    """What a client spent on a model in one hour. Times are in microseconds since 1970."""

    client: str
    model: str
    hour: int
    first: int
    last: int
    units: int


class SpendingPoint(NamedTuple):
    """What was spent from an account at one time."""

    time: int  # Microseconds since 1970
    spent_units: int  # The balance


@dataclass(frozen=True)
class ApiKey:
    """An API key as the ledger knows it. Times are in microseconds since 1970.

    Parameters
    ----------
    id : str
        The public part of the key.
    client, client_id
        The name and the id of the client that uses it.
    role : {"client", "admin"}
        An admin also sees the spending of all clients.
    created : int
        When it was created.
    expires, revoked : int or None
        When it expires or was revoked. None: never.
    secret_hash : str
        The SHA-256 of the secret.
    """

    id: str
    client: str
    client_id: int
    role: Role
    created: int
    expires: int | None
    revoked: int | None
    secret_hash: str

    def is_valid(self, now: int) -> bool:
        """Return whether the key is neither revoked nor expired at a time."""
        return self.revoked is None and (self.expires is None or self.expires > now)

    def to_json(self) -> dict[str, Any]:
        """Return all fields but the hash and the client's id."""
        return {
            name: value for name, value in asdict(self).items() if name not in ("client_id", "secret_hash")
        }


# --- reading ------------------------------------------------------------------------------------------------------

_ACCOUNTS = "SELECT id, name, total, terms, limit_units, spent_units, sequence, head, opened FROM accounts"


def _account_state(row: Row[Any]) -> AccountState:
    try:
        total, terms = cost_from_json(json.loads(row.total)), Terms._from_json(json.loads(row.terms))
    except PARSE_ERRORS as error:
        raise _damaged(f"The total or the terms of account {row.name!r} cannot be read") from error
    if not all(type(each) is int for each in (row.limit_units, row.spent_units, row.sequence, row.opened)):
        raise _damaged(f"The balance, the budget or the last row of account {row.name!r} is not an integer")
    return AccountState(**{**row._mapping, "total": total, "terms": terms})


def _account_rows(connection: Connection) -> list[Row[Any]]:
    """Return the rows of all accounts, that of the API keys included, in the order of their ids."""
    return list(_run(connection, f"{_ACCOUNTS} ORDER BY id").all())


_SHOWN = "COALESCE(client_names.name, clients.name)"
_WITH_NAMES = "LEFT JOIN client_names ON client_names.client = clients.id"
_OF_NAME = "name = :value"
_OF_DIGEST = "id = (SELECT account FROM training_sets WHERE digest = :value)"


def _find(connection: Connection, condition: str, value: str | None) -> AccountState | None:
    """Return the account that meets an SQL condition on ``:value``, if there is one."""
    row = _run(connection, f"{_ACCOUNTS} WHERE {condition}", value=value).one_or_none()
    return None if row is None else _account_state(row)


def _get_account(connection: Connection, name: str) -> AccountState:
    found = _find(connection, _OF_NAME, name) if name != KEYS_ACCOUNT else None
    if found is None:
        known = ", ".join(account.name for account in _list_accounts(connection)) or "none"
        raise InvalidInput(f"The ledger has no account {name[:80]!r}. Its accounts: {known}.")
    return found


def _list_accounts(connection: Connection) -> list[AccountState]:
    """Return all accounts of training sets, by name."""
    rows = _run(connection, f"{_ACCOUNTS} WHERE name != :keys ORDER BY name", keys=KEYS_ACCOUNT)
    return [_account_state(row) for row in rows]


def _list_subaccounts(connection: Connection, account: int) -> list[Subaccount]:
    """Return the subaccounts of an account, those that spent most first."""
    rows = _run(
        connection,
        f"SELECT {_SHOWN} AS client, limit_units, spent_units, refused"
        f" FROM subaccounts JOIN clients ON subaccounts.client = clients.id {_WITH_NAMES}"
        f" WHERE account = :account ORDER BY spent_units DESC, {_SHOWN}",
        account=account,
    )
    found = [Subaccount(*row) for row in rows]
    for each in found:
        if _has_wrong_types(each):
            raise _damaged(f"The balance or the quota of client {each.client!r} is not an integer")
    return found


def _list_keys(connection: Connection) -> list[ApiKey]:
    """Return all API keys, the oldest first."""
    rows = _run(
        connection,
        f"SELECT keys.id, {_SHOWN}, keys.client, role, created, expires, revoked, secret_hash"
        f" FROM keys JOIN clients ON keys.client = clients.id {_WITH_NAMES} ORDER BY created, keys.id",
    )
    return [ApiKey(*row) for row in rows]


def _client_names(connection: Connection) -> dict[str, str]:
    """Return the names of clients by what the journal states; an erased client is not among them."""
    return {row.pseudonym: row.name for row in _named_clients(connection)}


def _named_clients(connection: Connection) -> list[Row[Any]]:
    statement = "SELECT clients.name AS pseudonym, client_names.name, salt FROM client_names, clients WHERE client = id"
    return list(_run(connection, f"{statement} ORDER BY client_names.name"))


def _pseudonym(name: str, salt: str) -> str:
    """Return what the journal calls a client: without the random salt nobody can test a name."""
    return "client-" + hashlib.sha256(f"{salt} {name}".encode()).hexdigest()[:32]


def _key_detail(key: ApiKey) -> str:
    """Return the detail of the journal row of a new key: enough to detect a later change of the key."""
    return json.dumps({"expires": key.expires, "hash": key.secret_hash, "id": key.id, "role": key.role})


def find_key(known: Mapping[str, ApiKey], presented: str, now: int) -> ApiKey | None:
    """Return the key that a caller presents, if it is right and valid; a wrong id takes as long as a wrong secret."""
    form = _KEY.fullmatch(presented)
    key_id, secret = form.groups() if form else ("", "")
    key = known.get(key_id)
    expected = _UNKNOWN_KEY_HASH if key is None else key.secret_hash
    matches = hmac.compare_digest(_hash_secret(secret), expected)
    return key if key is not None and matches and key.is_valid(now) else None


def _hash_secret(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def token_client_name(issuer: str, subject: str) -> str | None:
    """Return the name of the client that a token of an identity provider states."""
    name = f"oidc:{subject}@{issuer.removeprefix('https://')}"
    return name if _TOKEN_CLIENT_NAME.fullmatch(name) else None


def _recorded_models(connection: Connection, account: int, field: str, kinds: str) -> list[tuple[str, str]]:
    """Return the models in the journal rows of some kinds (SQL), with one field of the rows' details."""
    statement = (
        f"SELECT model, detail FROM journal WHERE account = :account AND kind IN ({kinds}) ORDER BY sequence"
    )
    rows = _run(connection, statement, account=account)
    try:
        return [(row.model, json.loads(row.detail)[field]) for row in rows]
    except PARSE_ERRORS as error:
        raise _damaged(f"A journal row of account {account} cannot be read") from error


_UNPROVEN = ("status", "'unproven'")
_EXCLUSIVE = ("digest", "'exclusive', 'alone'")  # version 0.1 wrote "alone"


def _lost_accounts(connection: Connection) -> list[int]:
    """Return the ids of accounts that spent something by the journal, and that the database has lost."""
    rows = _run(
        connection,
        "SELECT detail FROM journal WHERE kind = 'loss' AND account = (SELECT id FROM accounts WHERE name = :keys)",
        keys=KEYS_ACCOUNT,
    ).scalars()
    try:
        return sorted({int(number) for detail in rows for number in json.loads(detail).get("accounts", {})})
    except PARSE_ERRORS as error:
        raise _damaged("A journal row of the account of the API keys cannot be read") from error


def _check_opening(connection: Connection, name: str, because: str | None) -> None:
    if because is None and (lost := _lost_accounts(connection)):
        raise InvalidInput(
            f"The ledger has lost {counted(len(lost), 'account')}, so the new account {name!r} could be a second "
            "budget for the same records. `account` and a reason (`because`) are required."
        )


# --- changes inside a transaction ---------------------------------------------------------------------------------

_SET_QUOTA = (
    "INSERT INTO subaccounts (account, client, limit_units, spent_units, refused)"
    " VALUES (:account, :client, :quota, 0, 0)"
    " ON CONFLICT (account, client) DO UPDATE SET limit_units = excluded.limit_units"
)


def _check_name(name: str, what: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"The {what} name must be 1 to 64 letters, digits, dots, dashes or underscores, the first a letter or "
            f"digit, got {name[:80]!r}."
        )


def _check_reason(because: str) -> None:
    """Raise `InvalidInput` unless an administrator's reason is long enough to mean something to an auditor."""
    if len(because.split()) < _MIN_REASON_WORDS or len(because) > _MAX_REASON_LENGTH:
        raise InvalidInput(
            f"The reason must have at least {_MIN_REASON_WORDS} words and at most {_MAX_REASON_LENGTH} characters, "
            f"got {because[:80]!r}."
        )


def _lock_account(connection: Connection, account: int) -> AccountTransaction:
    return _lock_accounts(Cursor(connection), [account])[account]


def _lock_keys_account(connection: Connection) -> AccountTransaction:
    """Lock the account that records API keys; it also guards the creation of accounts and clients."""
    number = _run(connection, "SELECT id FROM accounts WHERE name = :keys", keys=KEYS_ACCOUNT).scalar_one()
    return _lock_account(connection, number)


def _record(
    connection: Connection,
    account: AccountTransaction,
    kind: str,
    /,
    *,
    client: str = "",
    model: str = "",
    units: int = 0,
    **detail: Any,
) -> None:
    """Write the journal row of a change, with those details that are not None, and the balance."""
    stated = {name: value for name, value in detail.items() if value is not None}
    account._add(
        now(), kind, client=client, model=model, units=units, detail=json.dumps(stated, sort_keys=True)
    )
    account._save(Cursor(connection))


def _client_number(connection: Connection, name: str, *, create: bool = False) -> int:
    number = (
        "SELECT client FROM client_names WHERE name = :name UNION SELECT id FROM clients WHERE name = :name"
    )
    found = _run(connection, number, name=name).scalar_one_or_none()
    if found is None and create:
        if not _TOKEN_CLIENT_NAME.fullmatch(name):
            _check_name(name, "client")
        salt = secrets.token_hex(16)
        stated = name if name in _PLAIN_CLIENTS else _pseudonym(name, salt)
        _insert(connection, "clients", name=stated)
        found = _run(connection, number, name=stated).scalar_one()
        if stated != name:
            _insert(connection, "client_names", client=found, name=name, salt=salt)
    if found is None:
        raise InvalidInput(
            f"The ledger has no client {name[:80]!r}. 'quietmax ledger key create' creates a client."
        )
    return int(found)


def _stated_client(connection: Connection, name: str) -> str:
    """Return what the journal calls a client."""
    number = _client_number(connection, name)
    return str(_run(connection, "SELECT name FROM clients WHERE id = :number", number=number).scalar_one())


def _administrators(connection: Connection) -> dict[str, ApiKey]:
    """Return the valid keys of administrators, by id."""
    return {key.id: key for key in _list_keys(connection) if key.role == "admin" and key.is_valid(now())}


def _administrator(connection: Connection, presented: str) -> ApiKey:
    found = find_key(_administrators(connection), presented, now())
    if found is None:
        raise InvalidInput("The key must be the valid key of an administrator.")
    return found


def _granted_limit(connection: Connection, account: AccountTransaction, terms: Terms) -> int:
    """Return the units of a new budget."""
    current = _account_state(_run(connection, f"{_ACCOUNTS} WHERE id = :id", id=account.account).one())
    if exclusive := _recorded_models(connection, current.id, *_EXCLUSIVE):
        raise InvalidInput(
            f"The account {current.name!r} is reserved for the model {exclusive[0][0]}, whose guarantee does not "
            "compose with others, and cannot be raised. Other models need another account."
        )
    wanted = terms.total(current.total.measure)
    limit = int(wanted.amount * LIMIT / Fraction(current.total.amount))
    if not account.spent_units <= limit <= _MAX_UNITS:
        raise InvalidInput(
            f"The budget of {current.name!r} cannot become {wanted}: it must be at least what is spent, and at "
            "most about 900 times the first budget."
        )
    return limit


def _revoke_key(connection: Connection, keys_account: AccountTransaction, key: ApiKey) -> ApiKey:
    moment = now()
    _run(connection, "UPDATE keys SET revoked = :moment WHERE id = :id", moment=moment, id=key.id)
    client = _stated_client(connection, key.client)
    _record(connection, keys_account, "key-revoked", client=client, id=key.id, revoked=moment)
    return replace(key, revoked=moment)


def _with_total(account: AccountState, total: Cost) -> AccountState:
    """Return the account if it was opened with this total."""
    if account.total == total:
        return account
    raise InvalidInput(
        f"The account {account.name!r} was opened with {account.total}, not with {total}. "
        "'quietmax ledger grant' changes its budget."
    )


def _limit_client(
    connection: Connection, account: AccountTransaction, client: str, limit: int | None
) -> None:
    number = _client_number(connection, client)
    spent = _spent_by(connection, account, client)
    if limit is not None and spent > limit:
        raise InvalidInput(
            f"The quota of client {client!r} must be at least what the client has spent, "
            f"{spent / account.limit_units:.4g} of the budget."
        )
    _run(connection, _SET_QUOTA, account=account.account, client=number, quota=limit)


def _spent_by(connection: Connection, account: AccountTransaction, client: str) -> int:
    shares = _list_subaccounts(connection, account.account)
    return sum(each.spent_units for each in shares if each.client == client)


# --- the accounts of a ledger -------------------------------------------------------------------------------------


class Accounts:
    """The part of a `Ledger` that reads and changes accounts, clients and API keys."""

    _engine: Engine
    _guard: FileGuard
    _heads: HeadFile

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        """Open a transaction that writes, unless the ledger has lost rows; record the new heads."""
        self._guard._check()
        with _write_transaction(self._engine) as connection:
            self._heads._check_all(connection)
            yield connection
            heads = _read_heads(connection)
        self._heads._record(heads)

    @contextmanager
    def _change(
        self, name: str, kind: str, because: str, client: str = ""
    ) -> Iterator[tuple[Connection, AccountTransaction, dict[str, Any]]]:
        """Lock an account for a change by an administrator; write its journal row with the details that were added."""
        _check_reason(because)
        with self._write() as connection:
            account = _lock_account(connection, _get_account(connection, name).id)
            detail: dict[str, Any] = {"because": because}
            stated = client and _stated_client(connection, client)
            yield connection, account, detail
            _record(connection, account, kind, client=stated, **detail)

    # Accounts

    def open_account(
        self,
        name: str,
        total: Cost,
        terms: Terms,
        *,
        digest: str | None = None,
        named_by_owner: bool = False,
        because: str | None = None,
    ) -> AccountState:
        """Return the account of a training set; open one if neither its digest nor its name is known.

        Parameters
        ----------
        name : str
            The name of the account: letters, digits, dots, dashes and underscores.
        total : Cost
            The budget of a new account. An existing account must have been opened with the same.
        terms : Terms
            The (epsilon, delta) behind `total`.
        digest : str, optional
            The digest of the training set.
        named_by_owner : bool
            Whether the owner chose the name. If so, records that belong to another account are an error.
        because : str, optional
            The reason to move records that belong to another account to this one.
        """
        _check_name(name, "account")
        if because is not None:
            _check_reason(because)
        with self._write() as connection:
            keys_account = _lock_keys_account(connection)  # two processes must not open the same account
            current = _find(connection, _OF_DIGEST, digest)
            if current is not None and current.name != name and because is None:
                if named_by_owner:
                    raise InvalidInput(
                        f"These records belong to the account {current.name!r}: all models trained on them share its "
                        f"budget. To count them in {name!r}, a reason (`because`) is required."
                    )
                return _with_total(current, total)
            account = _find(connection, _OF_NAME, name)
            if account is None:
                Meter(total)  # raises if the total is 0
                _check_opening(connection, name, because)
                described: dict[str, Any] = {"total": total.to_json(), "terms": terms.to_json()}
                opened = _insert_account(connection, name, **described, limit_units=LIMIT)
                _record(connection, _lock_account(connection, opened), "open", **described, because=because)
                _record(connection, keys_account, "account", id=opened, name=name)
                account = _get_account(connection, name)
            _with_total(account, total)
            if digest is not None and (current is None or current.id != account.id):
                # in the journal, so that nobody can bind a training set to another account unnoticed
                bound: dict[str, Any] = {"id": account.id, "digest": digest}
                if current is None:
                    _record(connection, keys_account, "training-set", **bound)
                else:
                    _run(connection, "DELETE FROM training_sets WHERE digest = :digest", digest=digest)
                    bound |= {"account": account.name, "before": current.name, "because": because}
                    _record(connection, keys_account, "reassign", **bound)
                _insert(connection, "training_sets", digest=digest, account=account.id)
            return account

    def find_account(self, name: str, digest: str | None = None) -> AccountState | None:
        """Return the account of a training set's digest, else of a name, if there is one."""
        _check_name(name, "account")
        with _read_transaction(self._engine) as connection:
            return _find(connection, _OF_DIGEST, digest) or _find(connection, _OF_NAME, name)

    def account(self, name: str) -> AccountState:
        """Return an account; raise `InvalidInput` if there is none of this name."""
        with _read_transaction(self._engine) as connection:
            return _get_account(connection, name)

    def accounts(self) -> list[AccountState]:
        """Return all accounts, by name."""
        with _read_transaction(self._engine) as connection:
            return _list_accounts(connection)

    def subaccounts(self, account: AccountState) -> list[Subaccount]:
        """Return the clients' shares of an account, those that spent most first."""
        with _read_transaction(self._engine) as connection:
            return _list_subaccounts(connection, account.id)

    def spending_history(self, account: AccountState) -> list[SpendingPoint]:
        """Return what was spent from an account over time, at about 120 journal rows that are spread evenly."""
        steps = (round(account.sequence * step / _HISTORY_POINTS) for step in range(_HISTORY_POINTS))
        wanted = ", ".join(str(number) for number in sorted({1, account.sequence, *steps}))
        with _read_transaction(self._engine) as connection:
            rows = _run(
                connection,
                f"SELECT time, spent_units FROM journal WHERE account = :account AND sequence IN ({wanted})"
                " ORDER BY sequence",
                account=account.id,
            )
            return [SpendingPoint(*row) for row in rows]

    def usage(self, account: AccountState, after: int = 0) -> list[Use]:
        """Return who spent what by the hour, in the rows of the journal after a number; clients by pseudonym."""
        statement = (
            "SELECT client, model, time / 3600000000 AS hour, MIN(time), MAX(time), SUM(units) FROM journal"
            " WHERE account = :account AND sequence > :after AND sequence <= :until AND units > 0"
            " GROUP BY client, model, hour"
        )
        with _read_transaction(self._engine) as connection:
            rows = _run(connection, statement, account=account.id, after=after, until=account.sequence)
            return [Use(*row)._replace(units=int(row[5])) for row in rows]

    def lost_accounts(self) -> list[int]:
        """Return the ids of accounts that have spent something and were lost; a new account then needs a reason."""
        with _read_transaction(self._engine) as connection:
            return _lost_accounts(connection)

    def check_opening(self, name: str, because: str | None) -> None:
        """Raise `InvalidInput` if a new account needs a reason and has none, because accounts were lost."""
        with _read_transaction(self._engine) as connection:
            _check_opening(connection, name, because)

    def charged_models(self, account: AccountState) -> list[str]:
        """Return the models that an account was charged for, as ``name/version``, by name."""
        statement = "SELECT DISTINCT model FROM journal WHERE account = :account AND model != ''"
        with _read_transaction(self._engine) as connection:
            return sorted(_run(connection, statement, account=account.id).scalars())

    def heads(self) -> list[tuple[str, Head]]:
        """Return the last journal row of every account with its name, that of the API keys included."""
        with _read_transaction(self._engine) as connection:
            names = {row.id: row.name for row in _account_rows(connection)}
            return [(names[head.account], head) for head in _read_heads(connection)]

    # Changes by an administrator

    def grant(self, account: str, terms: Terms, because: str) -> AccountState:
        """Set the budget of an account, for a reason of at least three words. What was spent stays spent.

        If two administrators have keys, only both together can raise a budget: `propose` and `confirm`.
        """
        with self._change(account, "grant", because) as (connection, locked, detail):
            limit = _granted_limit(connection, locked, terms)
            several = len({key.client_id for key in _administrators(connection).values()}) > 1
            if several and limit >= locked.limit_units:  # the same budget opens a closed account again
                raise InvalidInput(
                    "Raising a budget needs the keys of two administrators: one grants with `key_file`, another "
                    f"confirms with 'quietmax ledger confirm {account}'."
                )
            locked.limit_units = limit
            detail["terms"] = terms.to_json()
        return self.account(account)

    def propose(self, account: str, terms: Terms, because: str, key: str) -> None:
        """Propose a budget with the key of an administrator. It changes once another one confirms it."""
        with self._change(account, "proposal", because) as (connection, locked, detail):
            proposer = _administrator(connection, key)
            _granted_limit(connection, locked, terms)
            detail |= {"terms": terms.to_json(), "key": proposer.id}
            detail["by"] = _stated_client(connection, proposer.client)

    def confirm(self, account: str, key: str) -> AccountState:
        """Set the budget that was proposed last, with the key of a second administrator."""
        newest = (
            "SELECT sequence, time, kind, detail FROM journal WHERE account = :account AND kind != 'charge'"
            " AND (kind IN ('proposal', 'grant') OR kind = 'revoke' AND client = '') ORDER BY sequence DESC LIMIT 1"
        )
        with self._write() as connection:
            locked = _lock_account(connection, _get_account(connection, account).id)
            confirmer = _administrator(connection, key)
            row = _run(connection, newest, account=locked.account).one_or_none()
            if row is None or row.kind != "proposal" or row.time < now() - _PROPOSAL_DAYS * DAY:
                raise InvalidInput(
                    f"Nothing was proposed for the account {account!r} in the last {_PROPOSAL_DAYS} days that waits."
                )
            proposed = json.loads(row.detail)
            proposer = _administrators(connection).get(proposed["key"])
            if proposer is None or proposer.client_id == confirmer.client_id:
                raise InvalidInput(
                    "The budget must be confirmed by another administrator than who proposed it, whose key must "
                    "still be valid."
                )
            terms = Terms._from_json(proposed["terms"])
            locked.limit_units = _granted_limit(connection, locked, terms)
            approved = [proposed["by"], _stated_client(connection, confirmer.client)]
            stated = {"because": proposed["because"], "terms": proposed["terms"]}
            _record(connection, locked, "grant", **stated, approved=approved, proposal=row.sequence)
        return self.account(account)

    def set_quota(self, account: str, client: str, share: float | None, because: str) -> AccountState:
        """Limit a client to a share of an account's budget, from 0 to 1, for a reason; None: no quota."""
        if share is not None and not 0 <= share <= 1:
            raise InvalidInput(f"share must be between 0 and 1, got {share!r}.")
        if _TOKEN_CLIENT_NAME.fullmatch(client):
            self.client(client)  # may get a quota before the first request
        with self._change(account, "quota", because, client) as (connection, locked, detail):
            limit = None if share is None else int(Fraction(str(share)) * locked.limit_units)
            _limit_client(connection, locked, client, limit)
            detail |= {"share": share, "quota_units": limit}
        return self.account(account)

    def revoke(self, account: str, client: str | None, because: str) -> AccountState:
        """Take back, for a reason, what is unspent: of one client, or of the whole account if `client` is None."""
        with self._change(account, "revoke", because, client or "") as (connection, locked, detail):
            if client is None:
                locked.limit_units = locked.spent_units
            else:
                detail["quota_units"] = _spent_by(connection, locked, client)
                _limit_client(connection, locked, client, detail["quota_units"])
        return self.account(account)

    def prune(self, days: float) -> tuple[int, int]:
        """Delete what is stored for requests and queries of more than `days` ago; return how many rows of each.

        The journal and all balances stay. A request id that was pruned is unknown: it is charged and drawn like a new
        one. So is a query that was pruned from the answer cache. `days` is at least an hour, so that no request is in
        flight.
        """
        with self._write() as connection:
            return _prune(Cursor(connection), days, now())

    # Models without a proven guarantee, or with one that does not compose

    def record_unproven(self, account: AccountState, model: str, status: str) -> None:
        """Record, once, that a model (``name/version``) without a proven guarantee uses an account."""
        with self._write() as connection:
            locked = _lock_account(connection, account.id)
            if (model, status) not in _recorded_models(connection, account.id, *_UNPROVEN):
                _record(connection, locked, "unproven", model=model, status=status)

    def unproven_models(self, account: AccountState) -> list[tuple[str, str]]:
        """Return the models without a proven guarantee that ever used an account, with their status."""
        with _read_transaction(self._engine) as connection:
            return _recorded_models(connection, account.id, *_UNPROVEN)

    def _reserve_exclusively(self, account: AccountState, model: str, digest: str) -> None:
        """Record that an account pays for one model only. Its guarantee does not compose with others."""
        with self._write() as connection:
            locked = _lock_account(connection, account.id)
            exclusive = _recorded_models(connection, account.id, *_EXCLUSIVE)
            if exclusive and exclusive[0][1] == digest:
                return
            if exclusive or locked.spent_units:
                raise InvalidInput(
                    f"The guarantee of the model {model} does not compose with others, and the account "
                    f"{account.name!r} has already paid for something. The model needs an account of its own."
                )
            if locked.limit_units < LIMIT:
                raise InvalidInput(
                    f"The model {model} needs the whole budget that the account {account.name!r} was opened with, but "
                    "the budget was lowered. 'quietmax ledger grant' raises it."
                )
            _record(connection, locked, "exclusive", model=model, digest=digest)

    # Clients and API keys

    def client(self, name: str) -> int:
        """Return the id of a client; the client is created if new."""
        with self._write() as connection:
            _lock_keys_account(connection)
            return _client_number(connection, name, create=True)

    def create_key(self, client: str, role: Role = "client", days: float | None = None) -> tuple[str, ApiKey]:
        """Create an API key that expires after some days, or never; the client is created if new.

        The result is the key itself, to be shown once, and what the ledger keeps of it.
        """
        _check_name(client, "client")  # also if the client exists: the clients of tokens have no API keys
        if role not in get_args(Role):
            raise InvalidInput(f"role must be admin or client, got {role!r}.")
        if days is not None and not 0 < days <= _MAX_KEY_DAYS:
            raise InvalidInput(f"days must be greater than 0 and at most {_MAX_KEY_DAYS}, got {days}.")
        secret, created = secrets.token_urlsafe(32), now()
        expires = None if days is None else created + int(days * DAY)
        with self._write() as connection:
            keys_account = _lock_keys_account(connection)
            number = _client_number(connection, client, create=True)
            hashed, key_id = _hash_secret(secret), secrets.token_hex(8)
            key = ApiKey(key_id, client, number, role, created, expires, None, hashed)
            fields = {name: value for name, value in asdict(key).items() if name != "client_id"}
            _insert(connection, "keys", **{**fields, "client": number})
            stated = _stated_client(connection, client)
            keys_account._add(created, "key-created", client=stated, detail=_key_detail(key))
            keys_account._save(Cursor(connection))
        return f"qm_{key.id}_{secret}", key

    def revoke_key(self, key_id: str) -> ApiKey:
        """Revoke an API key. A revoked key stays as it is."""
        with self._write() as connection:
            keys_account = _lock_keys_account(connection)
            key = next((each for each in _list_keys(connection) if each.id == key_id), None)
            if key is None:
                raise InvalidInput(
                    f"The ledger has no key with the id {key_id[:40]!r}. 'quietmax ledger key list' lists the keys."
                )
            return key if key.revoked is not None else _revoke_key(connection, keys_account, key)

    def erase_client(self, name: str) -> str:
        """Erase the name of a client and revoke its keys; return the pseudonym that stays in the journal."""
        with self._write() as connection:
            keys_account = _lock_keys_account(connection)
            number = _client_number(connection, name)
            for key in _list_keys(connection):
                if key.client_id == number and key.revoked is None:
                    _revoke_key(connection, keys_account, key)
            stated = _stated_client(connection, name)
            if not _run(
                connection, "DELETE FROM client_names WHERE client = :client", client=number
            ).rowcount:
                raise InvalidInput(
                    f"The client {name[:80]!r} has no name that can be erased: it is nobody's, was erased before, or "
                    "was written into the audit log by version 0.3 or earlier."
                )
            _record(connection, keys_account, "client-erased", client=stated)
        if self._engine.dialect.name == "sqlite":  # else the name stays in the write-ahead log for a while
            with _translate_errors(self._engine), self._engine.connect() as connection:
                _driver_connection(connection).execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
        return stated

    def client_names(self) -> dict[str, str]:
        """Return the names of clients by their pseudonyms in the journal; an erased client is not among them."""
        with _read_transaction(self._engine) as connection:
            return _client_names(connection)

    def keys(self) -> list[ApiKey]:
        """Return all API keys, the oldest first."""
        with _read_transaction(self._engine) as connection:
            if self._heads.damage is None:
                self._heads._check_all(connection)  # else keys that were revoked could come back
            found = _list_keys(connection)
        for key in found:
            if _has_wrong_types(key):
                raise _damaged(f"The key {key.id!r} cannot be read")
        return found

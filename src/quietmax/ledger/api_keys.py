"""API keys: 256 bits of operating-system entropy, shown once; the ledger keeps only their SHA-256. And ended sessions.

A key has the form `qm_<id>_<secret>`. The id finds the row, and the hash of the secret is compared in constant time. A
slow password hash would add nothing, because 256 random bits cannot be guessed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sqlalchemy import Connection, delete, insert, select

from quietmax.errors import InvalidInput
from quietmax.ledger.accounts import check_name, client_id, lock_keys_account, now
from quietmax.ledger.database import Cursor, clients, keys
from quietmax.ledger.database import ended_sessions as _ended
from quietmax.ledger.transactions import DAY

Role = Literal["admin", "client"]
_FORM = re.compile(r"qm_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
_UNKNOWN_KEY_HASH = hashlib.sha256(b"no such key").hexdigest()
_MAX_DAYS = 36_500


@dataclass(frozen=True)
class ApiKey:
    """An API key as the ledger knows it. Times are in microseconds since 1970.

    Parameters
    ----------
    id : str
        The public part of the key.
    client : str
        The name of the client that uses it.
    client_id : int
        The id of the client.
    role : {"client", "admin"}
        An admin also sees the spending of all clients.
    created : int
        When it was created.
    expires : int or None
        When it expires. None: never.
    revoked : int or None
        When it was revoked. None: it was not.
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
        """Return whether the key is neither revoked nor expired.

        Parameters
        ----------
        now : int
            Microseconds since 1970.
        """
        return self.revoked is None and (self.expires is None or self.expires > now)

    @property
    def has_wrong_types(self) -> bool:
        """Whether a field has another type than was written: SQLite accepts any type in an edit."""
        strings, times = (self.id, self.role, self.secret_hash), (self.created, self.expires, self.revoked)
        return not (
            all(isinstance(each, str) for each in strings)
            and all(each is None or isinstance(each, int) for each in times)
        )

    def to_json(self) -> dict[str, Any]:
        """Return all fields but the hash and the client's id."""
        return {
            "id": self.id,
            "client": self.client,
            "role": self.role,
            "created": self.created,
            "expires": self.expires,
            "revoked": self.revoked,
        }


def create_key(connection: Connection, client: str, role: Role, days: float | None) -> tuple[str, ApiKey]:
    """Create an API key for a client; the client is created if new."""
    check_name(client, "client")  # also if the client exists: the clients of tokens have no API keys
    if role not in get_args(Role):
        raise InvalidInput(f"role must be admin or client, got {role!r}.")
    if days is not None and not 0 < days <= _MAX_DAYS:
        raise InvalidInput(f"days must be greater than 0 and at most {_MAX_DAYS}, got {days}.")
    keys_account = lock_keys_account(connection)
    secret = secrets.token_urlsafe(32)
    created = now()
    key = ApiKey(
        secrets.token_hex(8),
        client,
        client_id(connection, client, create=True),
        role,
        created,
        None if days is None else created + int(days * DAY),
        None,
        _hash_secret(secret),
    )
    connection.execute(
        insert(keys),
        {
            "id": key.id,
            "client": key.client_id,
            "role": key.role,
            "secret_hash": key.secret_hash,
            "created": key.created,
            "expires": key.expires,
            "revoked": key.revoked,
        },
    )
    keys_account.add(created, "key-created", client=client, detail=key_detail(key))
    keys_account.save(Cursor(connection))
    return f"qm_{key.id}_{secret}", key


def key_detail(key: ApiKey) -> str:
    """Return the detail of the journal row of a new key: enough to detect a later change of the key."""
    return json.dumps({"expires": key.expires, "hash": key.secret_hash, "id": key.id, "role": key.role})


def revoke_key(connection: Connection, key_id: str) -> ApiKey:
    """Revoke an API key. A revoked key stays as it is."""
    keys_account = lock_keys_account(connection)
    key = {each.id: each for each in list_keys(connection)}.get(key_id)
    if key is None:
        raise InvalidInput(
            f"The ledger has no key with the id {key_id[:40]!r}. 'quietmax ledger key list' lists the keys."
        )
    if key.revoked is None:
        moment = now()
        connection.execute(keys.update().where(keys.c.id == key_id).values(revoked=moment))
        detail = json.dumps({"id": key_id, "revoked": moment})
        keys_account.add(moment, "key-revoked", client=key.client, detail=detail)
        keys_account.save(Cursor(connection))
    return next(each for each in list_keys(connection) if each.id == key_id)


def list_keys(connection: Connection) -> list[ApiKey]:
    """Return all API keys, the oldest first."""
    rows = connection.execute(
        select(
            keys.c.id,
            clients.c.name,
            keys.c.client,
            keys.c.role,
            keys.c.created,
            keys.c.expires,
            keys.c.revoked,
            keys.c.secret_hash,
        )
        .join_from(keys, clients, keys.c.client == clients.c.id)
        .order_by(keys.c.created, keys.c.id)
    )
    return [ApiKey(*row) for row in rows]


def find_key(known: Mapping[str, ApiKey], presented: str, now: int) -> ApiKey | None:
    """Return the key that a caller presents, if it is right and valid.

    A wrong secret and a wrong id take the same time.
    """
    form = _FORM.fullmatch(presented)
    key_id, secret = form.groups() if form else ("", "")
    key = known.get(key_id)
    expected = _UNKNOWN_KEY_HASH if key is None else key.secret_hash
    matches = hmac.compare_digest(_hash_secret(secret), expected)
    return key if key is not None and matches and key.is_valid(now) else None


def end_session(connection: Connection, session: str, expires: int) -> None:
    """Record that a session of the dashboard was closed; forget those that have expired."""
    connection.execute(delete(_ended).where((_ended.c.expires <= now()) | (_ended.c.id == session)))
    connection.execute(insert(_ended), {"id": session, "expires": expires})


def ended_sessions(connection: Connection) -> frozenset[str]:
    """Return the ids of the sessions that were closed and have not expired yet."""
    return frozenset(connection.execute(select(_ended.c.id).where(_ended.c.expires > now())).scalars())


def _hash_secret(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()

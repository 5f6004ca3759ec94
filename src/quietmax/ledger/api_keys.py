"""Keys: 256 bits of the operating system's entropy, shown once; the ledger keeps only their SHA-256.

A key reads `qm_<id>_<secret>`. The id finds the row, the secret's hash is compared in constant time. With 256 random
bits a slow password hash would add nothing: there is nothing to guess.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from dataclasses import dataclass
from typing import Any, Literal, cast

from sqlalchemy import Connection, insert, select

from quietmax.errors import InvalidInput
from quietmax.ledger.accounts import client_id, locked_keys_book, now
from quietmax.ledger.database import Cursor, clients, keys

Role = Literal["admin", "client"]
_FORM = re.compile(r"qm_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
_NOBODY = hashlib.sha256(b"no such key").hexdigest()
_DAY = 24 * 3600 * 1_000_000


@dataclass(frozen=True)
class ApiKey:
    """A key as the ledger knows it; times in microseconds since 1970."""

    id: str
    client: str
    client_id: int
    role: Role
    created: int
    expires: int | None
    revoked: int | None
    secret_hash: str

    def is_valid(self, moment: int) -> bool:
        """Whether it is neither revoked nor expired."""
        return self.revoked is None and (self.expires is None or self.expires > moment)

    def to_json(self) -> dict[str, Any]:
        """Everything but the hash."""
        return {
            "id": self.id,
            "client": self.client,
            "role": self.role,
            "created": self.created,
            "expires": self.expires,
            "revoked": self.revoked,
        }


def create_key(connection: Connection, client: str, role: Role, days: float | None) -> tuple[str, ApiKey]:
    """A new key for a client (who is created if new): the key itself, to be shown once, and its row."""
    if role not in ("admin", "client"):
        raise InvalidInput(f"The role is {role!r}, but must be admin or client; name one.")
    if days is not None and not 0 < days <= 36_500:
        raise InvalidInput(
            f"The key would expire after {days} days, but must last for more than 0 and up to 36500; give "
            "such a number."
        )
    book = locked_keys_book(connection)
    number, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
    moment = now()
    row = {
        "id": number,
        "client": client_id(connection, client, create=True),
        "role": role,
        "secret_hash": _hashed(secret),
        "created": moment,
        "expires": None if days is None else moment + int(days * _DAY),
        "revoked": None,
    }
    connection.execute(insert(keys), row)
    book.add(
        moment,
        "key-created",
        client=client,
        detail=key_detail(number, role, cast(str, row["secret_hash"]), cast("int | None", row["expires"])),
    )
    book.save(Cursor(connection))
    return f"qm_{number}_{secret}", ApiKey(
        number,
        client,
        cast(int, row["client"]),
        role,
        moment,
        cast("int | None", row["expires"]),
        None,
        cast(str, row["secret_hash"]),
    )


def key_detail(number: str, role: str, secret_hash: str, expires: int | None) -> str:
    """What the journal says of a new key: enough to notice that its row was changed later."""
    return json.dumps({"expires": expires, "hash": secret_hash, "id": number, "role": role})


def revoke_key(connection: Connection, number: str) -> ApiKey:
    """End a key now."""
    book = locked_keys_book(connection)
    found = {key.id: key for key in all_keys(connection)}.get(number)
    if found is None:
        raise InvalidInput(
            f"There is no key with the id {number[:40]!r}; list them with 'quietmax ledger key list'."
        )
    if found.revoked is None:
        moment = now()
        connection.execute(keys.update().where(keys.c.id == number).values(revoked=moment))
        book.add(
            moment,
            "key-revoked",
            client=found.client,
            detail=json.dumps({"id": number, "revoked": moment}),
        )
        book.save(Cursor(connection))
    return next(key for key in all_keys(connection) if key.id == number)


def all_keys(connection: Connection) -> list[ApiKey]:
    """All keys, the oldest first."""
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


def find_key(known: dict[str, ApiKey], presented: str, moment: int) -> ApiKey | None:
    """The key that was presented, if it is right and holds. Takes the same time for a wrong secret and a wrong id."""
    form = _FORM.fullmatch(presented)
    number, secret = form.groups() if form else ("", "")
    key = known.get(number)
    right = hmac.compare_digest(_hashed(secret), _NOBODY if key is None else key.secret_hash)
    return key if key is not None and right and key.is_valid(moment) else None


def _hashed(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()

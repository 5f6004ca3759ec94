"""Versions of the ledger's tables, and the steps from one to the next.

A step is never changed once a release contains it; a change of the tables is a new step at the end.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Engine, inspect, select, text

from quietmax.ledger.chain import START
from quietmax.ledger.database import writing
from quietmax.ledger.errors import LedgerDamaged
from quietmax.ledger.tables import KEYS_BOOK, accounts, meta, metadata

_ADVISORY_LOCK = 7_238_164_001


@dataclass(frozen=True)
class Migration:
    """A step: after `apply`, the tables are of `version`."""

    version: int
    what: str
    apply: Callable[[Connection], None]


def _first(connection: Connection) -> None:
    metadata.create_all(connection)
    connection.execute(
        accounts.insert(),
        {
            "name": KEYS_BOOK,
            "total": "{}",
            "terms": "{}",
            "limit_units": 0,
            "spent_units": 0,
            "sequence": 0,
            "head": START,
            "opened": time.time_ns() // 1000,
        },
    )
    connection.execute(
        meta.insert(),
        [
            {"name": "ledger", "value": secrets.token_hex(16)},
            {"name": "session_secret", "value": secrets.token_hex(32)},
            {"name": "query_salt", "value": secrets.token_hex(32)},
        ],
    )


MIGRATIONS = (Migration(1, "accounts, clients, keys, journal, requests and stored answers", _first),)


def migrate(engine: Engine, steps: Sequence[Migration] = MIGRATIONS) -> int:
    """Bring the tables to the newest version, all steps or none, and return it; a newer ledger is refused."""
    with writing(engine) as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _ADVISORY_LOCK})
        present = version(connection)
        newest = steps[-1].version
        if present > newest:
            raise LedgerDamaged(
                f"The ledger is of version {present}, but this Quietmax knows versions up to {newest}; "
                "install the Quietmax that wrote it, or a newer one."
            )
        missing = [step for step in steps if step.version > present]
        for step in missing:
            step.apply(connection)
        if missing:
            connection.execute(meta.delete().where(meta.c.name == "version"))
            connection.execute(meta.insert(), {"name": "version", "value": str(newest)})
        return newest


def version(connection: Connection) -> int:
    """The version of the tables; 0 for an empty database."""
    present = set(inspect(connection).get_table_names())
    if not present:
        return 0
    if "meta" not in present or "journal" not in present:
        raise LedgerDamaged(
            "The database holds tables, but not those of a Quietmax ledger; name an empty database or a ledger."
        )
    found = str(connection.execute(select(meta.c.value).where(meta.c.name == "version")).scalar_one_or_none())
    if not found.isdigit():
        raise LedgerDamaged("The ledger does not say its version; restore it from a copy.")
    return int(found)

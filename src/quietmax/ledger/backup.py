"""Backups: a consistent copy of a ledger as one SQLite file, from either database; and upgrades that are rehearsed."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, inspect, text

from quietmax._io import atomic_write
from quietmax.errors import InvalidInput, LedgerDamaged, QuietmaxError
from quietmax.ledger import database
from quietmax.ledger.database import _read_transaction, _run, _translate_errors, _write_transaction, parse_url
from quietmax.ledger.heads import HeadFile, _head_path
from quietmax.ledger.ledger import Ledger
from quietmax.ledger.verify import Verification, _verify

_TABLES = (
    *("meta", "accounts", "clients", "client_names", "training_sets", "subaccounts", "keys"),
    *("journal", "requests", "answers"),
)
_NUMBERED = ("accounts", "clients", "answers")
_COPIED_ROWS = 5_000


def back_up(ledger: Ledger, file: Path) -> Verification:
    """Copy a ledger, which may be in use, into a new SQLite file, and verify the copy."""
    if file.exists():
        raise InvalidInput(f"The backup {file} exists already; each backup needs a file of its own.")
    found: list[Verification] = []

    def _write(staging: Path) -> None:
        with _opened(staging) as copy:
            _copy(ledger._engine, copy)
            found.append(_verified(copy, "The ledger"))

    try:
        atomic_write(file, _write, private=True)
    except OSError as error:
        raise QuietmaxError(f"Cannot write the backup {file}: {error.strerror}.") from error
    return found[0]


def restore(file: Path, address: str | None, because: str | None = None) -> bool:
    """Put a backup where there is no ledger; return whether a head file could tell what the backup lacks.

    A backup that lacks rows that the head file names is refused without a reason (`because`) to accept the loss.
    """
    where = database.default_url() if address is None else address
    with tempfile.TemporaryDirectory(prefix="quietmax-") as place, _opened(Path(place) / "copy") as copy:
        _copy_file(file, copy)
        database._migrate(copy)
        _verified(copy, f"The backup {file}")
        path = _head_path(create_engine(parse_url(where)))
        with _read_transaction(copy) as connection:
            known = _run(connection, "SELECT value FROM meta WHERE name = 'ledger'").scalar_one()
            heads = HeadFile(path, str(known), copy, read_only=True)
            heads._load(connection)
        if heads.damage is not None and because is None:
            raise heads.damage
        with _opened(where) as target:
            _copy(copy, target)
    compared = path is not None and path.exists()
    Ledger(where, accept_loss=None if heads.damage is None else because).close()
    return compared


def rehearse_migration(address: str | None) -> tuple[int, int, Verification]:
    """Bring a copy of a ledger up to date and verify it; return both versions of the schema and what was found.

    A ledger in PostgreSQL is changed itself, in a transaction that is rolled back.
    """
    where = database.default_url() if address is None else address
    url = parse_url(where)
    is_file = url.drivername == "sqlite"
    with (
        tempfile.TemporaryDirectory(prefix="quietmax-") as place,
        _opened(Path(place) / "copy" if is_file else where) as engine,
    ):
        if is_file:
            _copy_file(Path(str(url.database)), engine)
        with suppress(_RolledBack), _write_transaction(engine) as connection:
            before = database._apply(connection)
            found = _verify(connection)
            raise _RolledBack
    return before, len(database.MIGRATIONS), found


class _RolledBack(Exception):
    """Ends a rehearsal."""


@contextmanager
def _opened(address: str | Path) -> Iterator[Engine]:
    engine = database._open_engine(address)
    try:
        yield engine
    finally:
        engine.dispose()


def _verified(engine: Engine, what: str) -> Verification:
    with _read_transaction(engine) as connection:
        found = _verify(connection)
    if not found.sound:
        raise LedgerDamaged(f"{what} has faults, the first: {found.faults[0]}")
    return found


def _copy_file(file: Path, target: Engine) -> None:
    """Copy a SQLite file of any version as it is; it may be in use."""
    if not file.is_file():
        raise InvalidInput(f"The file {file} does not exist.")
    with _translate_errors(target), target.connect() as connection:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=rw", uri=True)) as source:
            source.backup(database._driver_connection(connection))
        if not inspect(connection).get_table_names():
            raise LedgerDamaged(f"The file {file} is not a ledger.")


def _copy(source: Engine, target: Engine) -> None:
    """Copy a ledger with the newest schema into an empty database, completely or not at all."""
    with _read_transaction(target) as connection:
        if inspect(connection).get_table_names():
            raise InvalidInput("A backup is restored where there is no ledger: move the old one away first.")
    if source.dialect.name == target.dialect.name == "sqlite":
        _copy_file(Path(str(source.url.database)), target)
        return
    with _read_transaction(source) as reader, _write_transaction(target) as writer:
        database._apply(writer)
        for table in reversed(_TABLES):
            _run(writer, f"DELETE FROM {table}")
        for table in _TABLES:
            _copy_table(reader, writer, table)


def _copy_table(reader: Connection, writer: Connection, table: str) -> None:
    rows = database._stream(reader, f"SELECT * FROM {table}")
    names = list(rows.keys())
    insert = text(
        f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join(f':{each}' for each in names)})"
    )
    for some in rows.mappings().partitions(_COPIED_ROWS):
        writer.execute(insert, [dict(row) for row in some])
    if table in _NUMBERED and writer.dialect.name == "postgresql":
        newest = f"COALESCE((SELECT MAX(id) FROM {table}), 1)"
        _run(writer, f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), {newest})")

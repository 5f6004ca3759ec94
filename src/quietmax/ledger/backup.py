"""Backups: a consistent copy of a ledger as one SQLite file, from either database; and upgrades that are rehearsed."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from quietmax._io import atomic_write
from quietmax.errors import InvalidInput, LedgerDamaged, QuietmaxError
from quietmax.ledger.database import (
    MIGRATIONS,
    _apply,
    _damaged,
    _driver_connection,
    _known_version,
    _migrate,
    _open_engine,
    _read_transaction,
    _run,
    _stream,
    _translate_errors,
    _write_transaction,
    default_url,
    parse_url,
)
from quietmax.ledger.heads import HeadFile, _head_path
from quietmax.ledger.ledger import Ledger
from quietmax.ledger.verify import Verification, _verify

_TABLES = (
    "meta", "accounts", "clients", "client_names", "training_sets", "subaccounts", "keys", "journal", "requests",
    "answers",
)  # fmt: skip
_NUMBERED = ("accounts", "clients", "answers")
_COPIED_ROWS = 5_000


def back_up(ledger: Ledger, file: Path) -> Verification:
    """Copy a ledger, which may be in use, into a new SQLite file, and verify the copy."""
    if file.exists():
        raise InvalidInput(f"The backup {file} exists already; each backup needs a file of its own.")

    def _write(staging: Path) -> None:
        with _opened(staging) as copy:
            _copy(ledger._engine, copy)
            with _write_transaction(copy) as connection:
                found.append(_checked(connection, "The ledger"))
            with _translate_errors(copy), copy.connect() as connection:  # one file, without a log
                _driver_connection(connection).execute("PRAGMA journal_mode=DELETE").close()

    found: list[Verification] = []
    try:
        atomic_write(file, _write, private=True)
    except OSError as error:
        raise QuietmaxError(f"Cannot write the backup {file}: {error.strerror}.") from error
    return found[0]


def restore(file: Path, address: str | None, because: str | None = None) -> bool:
    """Put a backup where there is no ledger; return whether a head file could tell what the backup lacks.

    A backup that lacks rows that the head file names is refused without a reason (`because`) to accept the loss.
    """
    where = default_url() if address is None else address
    url = parse_url(where)
    is_new = url.drivername == "sqlite" and not Path(str(url.database)).exists()
    with tempfile.TemporaryDirectory(prefix="quietmax-") as place, _opened(where) as target:
        try:
            with _read_transaction(target) as connection:
                if inspect(connection).get_table_names():
                    raise InvalidInput(
                        "A backup is restored where there is no ledger: move the old one away first."
                    )
            with _opened(Path(place) / "copy.sqlite") as copy:
                _copy_file(file, copy)
                _migrate(copy)
                with _read_transaction(copy) as connection:
                    _checked(connection, f"The backup {file}")
                    path, known = (
                        _head_path(target),
                        _run(connection, "SELECT value FROM meta WHERE name = 'ledger'"),
                    )
                    heads = HeadFile(path, str(known.scalar_one()), copy, read_only=True)
                    heads._load(connection)
                if heads.damage is not None and because is None:
                    raise heads.damage
                _copy(copy, target)
        except BaseException:
            if is_new:
                for suffix in ("", "-wal", "-shm"):
                    Path(f"{url.database}{suffix}").unlink(missing_ok=True)
            raise
    compared = path is not None and path.exists()
    Ledger(where, accept_loss=because if heads.damage is not None else None).close()
    return compared


def rehearse_migration(address: str | None) -> tuple[int, int, Verification]:
    """Bring a copy of a ledger up to date and verify it; return both versions of the schema and what was found.

    A ledger in PostgreSQL is changed itself, in a transaction that is rolled back.
    """
    where = default_url() if address is None else address
    with tempfile.TemporaryDirectory(prefix="quietmax-") as place:
        url = parse_url(where)
        is_file = url.drivername == "sqlite"
        with _opened(Path(place) / "copy.sqlite" if is_file else where) as engine:
            if is_file:
                _copy_file(Path(str(url.database)), engine)
            with suppress(_RollBack), _write_transaction(engine) as connection:
                before = _apply(connection)
                found = _verify(connection)
                raise _RollBack
    return before, len(MIGRATIONS), found


class _RollBack(Exception):
    """Ends a rehearsal."""


@contextmanager
def _opened(address: str | Path) -> Iterator[Engine]:
    engine = _open_engine(address)
    try:
        yield engine
    finally:
        engine.dispose()


def _checked(connection: Connection, what: str) -> Verification:
    found = _verify(connection)
    if not found.sound:
        raise LedgerDamaged(f"{what} has {len(found.faults)} faults, the first: {found.faults[0]}")
    return found


def _copy_file(file: Path, target: Engine) -> None:
    """Copy a SQLite file as it is, also one that is in use, of any version."""
    if not file.is_file():
        raise InvalidInput(f"The file {file} does not exist.")
    source = sqlite3.connect(f"{file.absolute().as_uri()}?mode=rw", uri=True)
    try:
        with _translate_errors(target), target.connect() as connection:
            source.backup(_driver_connection(connection))
        with _read_transaction(target) as connection:
            if not _known_version(connection, len(MIGRATIONS)):
                raise LedgerDamaged(f"The file {file} is not a ledger.")
    except sqlite3.Error as error:
        raise _damaged(f"The file {file} cannot be read as a ledger ({error})") from error
    finally:
        source.close()


def _copy(source: Engine, target: Engine) -> None:
    """Copy a ledger with the newest schema into an empty database, completely or not at all."""
    if source.dialect.name == target.dialect.name == "sqlite":
        _copy_file(Path(str(source.url.database)), target)
        return
    with _read_transaction(source) as reader, _write_transaction(target) as writer:
        _apply(writer)
        for table in reversed(_TABLES):
            _run(writer, f"DELETE FROM {table}")
        for table in _TABLES:
            rows = _stream(reader, f"SELECT * FROM {table}")
            names = list(rows.keys())
            insert = (
                f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join(f':{each}' for each in names)})"
            )
            for some in rows.mappings().partitions(_COPIED_ROWS):
                writer.execute(text(insert), [dict(row) for row in some])
        for table in _NUMBERED if target.dialect.name == "postgresql" else ():
            newest = f"(SELECT MAX(id) FROM {table})"
            _run(writer, f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), COALESCE({newest}, 1))")

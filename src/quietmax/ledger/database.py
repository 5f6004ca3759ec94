"""Where the ledger lies: a SQLite file or a PostgreSQL database, set up so that a commit is durable.

SQLite: write-ahead log with `synchronous=FULL`, which flushes the log at every commit. PostgreSQL:
`synchronous_commit=on`; a server that runs with `fsync=off` is refused. Transactions that write take SQLite's write
lock at their start.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from quietmax.errors import InvalidInput, words_of
from quietmax.ledger.errors import LedgerUnavailable

SECONDS_TO_CONNECT = 2
SECONDS_TO_WAIT = 10
_WRITES = {"quietmax_writes": True}


def default_url() -> str:
    """The ledger used when none is named: QUIETMAX_LEDGER, else one file per user, wherever the command runs."""
    named = os.environ.get("QUIETMAX_LEDGER")
    if named:
        return named
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return f"sqlite:///{Path(state) / 'quietmax' / 'ledger.sqlite'}"


def parsed_url(address: str | Path) -> URL:
    """A SQLite file or PostgreSQL address; a plain path means a SQLite file.

    >>> parsed_url("postgresql://host/ledger").drivername, parsed_url("books.sqlite").database
    ('postgresql+psycopg', 'books.sqlite')
    """
    text_ = str(address)
    try:
        url = make_url(text_) if "://" in text_ else URL.create("sqlite", database=text_)
    except (ArgumentError, ValueError):
        url = URL.create("unknown")
    if url.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return url.set(drivername="postgresql+psycopg")
    if url.drivername == "sqlite" and url.database and url.database != ":memory:":
        return url
    raise InvalidInput(
        "The ledger's address must be a file, sqlite:///FILE or postgresql://USER@HOST/DATABASE; give one of these."
    )


def shown(url: URL) -> str:
    """The address without its password."""
    return url.render_as_string(hide_password=True)


def opened(address: str | Path) -> Engine:
    """An engine for the address; creates the SQLite file, readable by its owner alone."""
    url = parsed_url(address)
    if url.drivername == "sqlite":
        return _sqlite(Path(str(url.database)))
    return _postgresql(url)


def _sqlite(path: Path) -> Engine:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as problem:
        raise LedgerUnavailable(
            f"The ledger {path} cannot be opened ({problem.strerror}); name a file you may write to."
        ) from problem
    engine = create_engine(
        URL.create("sqlite", database=str(path)),
        poolclass=QueuePool,
        pool_size=4,
        max_overflow=16,
        connect_args={"timeout": SECONDS_TO_WAIT, "check_same_thread": False, "isolation_level": None},
    )

    @event.listens_for(engine, "connect")
    def _prepare(connection: sqlite3.Connection, _record: Any) -> None:
        cursor = connection.cursor()
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("quietmax_writes")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _postgresql(url: URL) -> Engine:
    settings = {
        "synchronous_commit": "on",
        "lock_timeout": f"{SECONDS_TO_WAIT}s",
        "statement_timeout": f"{SECONDS_TO_WAIT}s",
        "idle_in_transaction_session_timeout": f"{SECONDS_TO_WAIT}s",
    }
    engine = create_engine(
        url,
        pool_size=4,
        max_overflow=16,
        pool_pre_ping=True,
        pool_timeout=SECONDS_TO_WAIT,
        connect_args={
            "connect_timeout": SECONDS_TO_CONNECT,
            "options": " ".join(f"-c {name}={value}" for name, value in settings.items()),
            "keepalives_idle": SECONDS_TO_WAIT,
            "tcp_user_timeout": SECONDS_TO_WAIT * 1000,
        },
    )
    with translated(engine), engine.connect() as connection:
        if connection.execute(text("SHOW fsync")).scalar_one() != "on":
            raise InvalidInput(
                "This PostgreSQL server runs with fsync=off, so that a charge may be lost in a crash; turn fsync on."
            )
    return engine


@contextmanager
def translated(engine: Engine) -> Iterator[None]:
    """Turn failures of the database into one sentence."""
    try:
        yield
    except (SQLAlchemyError, _driver(engine).Error) as problem:
        raise unavailable(engine, problem) from problem


def _driver(engine: Engine) -> Any:
    return engine.dialect.dbapi


def unavailable(engine: Engine, problem: BaseException) -> LedgerUnavailable:
    """What is said when the database fails; the driver's own words, without the statement's values."""
    cause = problem.orig if isinstance(problem, DBAPIError) and problem.orig is not None else problem
    place = engine.url.database if engine.dialect.name == "sqlite" else shown(engine.url)
    return LedgerUnavailable(
        f"The ledger {place} cannot be used now ({words_of(cause)}), and nothing is answered until it can; name the "
        "file of a ledger and make it writable, or start its database."
    )


@contextmanager
def reading(engine: Engine, *, snapshot: bool = False) -> Iterator[Connection]:
    """A connection in a transaction that only reads; with `snapshot`, everything as it was at its start."""
    with translated(engine), engine.connect() as connection:
        if snapshot and engine.dialect.name == "postgresql":
            connection = connection.execution_options(isolation_level="REPEATABLE READ")
        with connection.begin():
            yield connection


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """A connection in a transaction that writes; durable when the block ends, undone if it raises."""
    with (
        translated(engine),
        engine.connect().execution_options(**_WRITES) as connection,
        connection.begin(),
    ):
        yield connection


def writer(engine: Engine) -> Connection:
    """A connection kept by one thread for its writing transactions."""
    with translated(engine):
        return engine.connect().execution_options(**_WRITES)

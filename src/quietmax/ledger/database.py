"""Where the ledger lies: a SQLite file or a PostgreSQL database, set up so that a commit is durable.

SQLite: write-ahead log with `synchronous=FULL`, which flushes the log at every commit. PostgreSQL:
`synchronous_commit=on`; a server that runs with `fsync=off` is refused. Transactions that write take SQLite's write
lock at their start.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Connection,
    Engine,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    create_engine,
    event,
    inspect,
    select,
    text,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from quietmax.errors import InvalidInput, LedgerDamaged, LedgerUnavailable, words_of
from quietmax.ledger.journal import START

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


def parse_url(address: str | Path) -> URL:
    """A SQLite file or PostgreSQL address; a plain path means a SQLite file.

    >>> parse_url("postgresql://host/ledger").drivername, parse_url("books.sqlite").database
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
    url = parse_url(address)
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


Values = Sequence[int | str | bytes | None]
_MOST_VALUES = 10_000


class Cursor:
    """Runs statements written with `?` for values and `(??)` for a list of them."""

    def __init__(self, connection: Connection) -> None:
        self._cursor: Any = connection.connection.cursor()
        self._sqlite = connection.dialect.name == "sqlite"

    def rows(self, statement: str, values: Values = ()) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        self._cursor.execute(_spelled(statement, self._sqlite), values)
        found: list[tuple[Any, ...]] = self._cursor.fetchall()
        return found

    def rows_of(self, statement: str, listed: Iterable[int | str | bytes]) -> list[tuple[Any, ...]]:
        """All rows of a query for a list of values, in parts that the database takes."""
        values = sorted(listed)
        found: list[tuple[Any, ...]] = []
        for start in range(0, len(values), _MOST_VALUES):
            part = values[start : start + _MOST_VALUES]
            self._cursor.execute(_spelled(statement, self._sqlite, len(part)), part)
            found += self._cursor.fetchall()
        return found

    def run(self, statement: str, values: Values = ()) -> int:
        """Change something; the number of rows changed."""
        self._cursor.execute(_spelled(statement, self._sqlite), values)
        return int(self._cursor.rowcount)

    def run_many(self, statement: str, rows: Sequence[Values]) -> None:
        """Change many rows with one statement."""
        if rows:
            self._cursor.executemany(_spelled(statement, self._sqlite), rows)


@lru_cache(maxsize=512)
def _spelled(statement: str, sqlite: bool, count: int | None = None) -> str:
    """The statement as the driver takes it.

    >>> _spelled("SELECT 1 WHERE x IN (??) FOR UPDATE", True, 2), _spelled("SELECT ? FOR UPDATE", False)
    ('SELECT 1 WHERE x IN (?,?)', 'SELECT %s FOR UPDATE')
    """
    if count is not None:
        statement = statement.replace("(??)", f"({','.join('?' * count)})")
    return statement.replace(" FOR UPDATE", "") if sqlite else statement.replace("?", "%s")


KEYS_BOOK = "(keys)"
"""The book in which keys are journalled; no account of a training set can have this name."""

metadata = MetaData()

_Number = BigInteger().with_variant(Integer, "sqlite")

meta = Table("meta", metadata, Column("name", Text, primary_key=True), Column("value", Text, nullable=False))

accounts = Table(
    "accounts",
    metadata,
    Column("id", _Number, primary_key=True, autoincrement=True),
    Column("name", Text, nullable=False, unique=True),
    Column("total", Text, nullable=False),
    Column("terms", Text, nullable=False),
    Column("limit_units", _Number, nullable=False),
    Column("spent_units", _Number, nullable=False),
    Column("sequence", _Number, nullable=False),
    Column("head", Text, nullable=False),
    Column("opened", _Number, nullable=False),
    CheckConstraint("0 <= spent_units AND spent_units <= limit_units", name="never_overspent"),
)
"""`total` is what `LIMIT` units are worth, as the JSON of a cost; `terms` says what the owner promised; `head` is the
hash of the journal's last row, `sequence` its number."""

training_sets = Table(
    "training_sets",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("account", _Number, ForeignKey("accounts.id"), nullable=False),
)

clients = Table(
    "clients",
    metadata,
    Column("id", _Number, primary_key=True, autoincrement=True),
    Column("name", Text, nullable=False, unique=True),
)

subaccounts = Table(
    "subaccounts",
    metadata,
    Column("account", _Number, ForeignKey("accounts.id"), nullable=False),
    Column("client", _Number, ForeignKey("clients.id"), nullable=False),
    Column("limit_units", _Number, nullable=True),
    Column("spent_units", _Number, nullable=False),
    Column("refused", _Number, nullable=False),
    PrimaryKeyConstraint("account", "client"),
    CheckConstraint(
        "0 <= spent_units AND (limit_units IS NULL OR spent_units <= limit_units)",
        name="quota_never_overspent",
    ),
)

keys = Table(
    "keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("client", _Number, ForeignKey("clients.id"), nullable=False),
    Column("role", Text, nullable=False),
    Column("secret_hash", Text, nullable=False),
    Column("created", _Number, nullable=False),
    Column("expires", _Number, nullable=True),
    Column("revoked", _Number, nullable=True),
)

journal = Table(
    "journal",
    metadata,
    Column("account", _Number, ForeignKey("accounts.id"), nullable=False),
    Column("sequence", _Number, nullable=False),
    Column("time", _Number, nullable=False),
    Column("kind", Text, nullable=False),
    Column("client", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("answers", _Number, nullable=False),
    Column("units", _Number, nullable=False),
    Column("spent_units", _Number, nullable=False),
    Column("limit_units", _Number, nullable=False),
    Column("detail", Text, nullable=False),
    Column("previous", Text, nullable=False),
    Column("hash", Text, nullable=False),
    PrimaryKeyConstraint("account", "sequence"),
)

requests = Table(
    "requests",
    metadata,
    Column("request", LargeBinary, primary_key=True),
    Column("body", LargeBinary, nullable=False),
    Column("account", _Number, nullable=False),
    Column("units", _Number, nullable=False),
    Column("time", _Number, nullable=False),
    Column("answer", LargeBinary, nullable=True),
)
"""`request` is a hash of client and request id, `body` one of what was asked; `units` is what was paid for it."""

answers = Table(
    "answers",
    metadata,
    Column("id", _Number, primary_key=True, autoincrement=True),
    Column("account", _Number, ForeignKey("accounts.id"), nullable=False),
    Column("keys", LargeBinary, nullable=False),
    Column("answers", LargeBinary, nullable=False),
    sqlite_autoincrement=True,
)
"""Answers of one request: `keys` are keyed hashes of model version and features, 16 bytes each."""

Index("answers_by_account", answers.c.account, answers.c.id)
_rare = journal.c.kind != "charge"
Index("journal_rare", journal.c.account, journal.c.kind, sqlite_where=_rare, postgresql_where=_rare)


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

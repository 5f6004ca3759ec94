"""The ledger's database: address, engine, transactions, cursor, tables and migrations, in this order.

A committed transaction is durable. SQLite uses a write-ahead log with `synchronous=FULL`, which flushes the log at
every commit. PostgreSQL uses `synchronous_commit=on`; a server that runs with `fsync=off` is an error. Transactions
that write take SQLite's write lock when they begin.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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

from quietmax.errors import InvalidInput, LedgerDamaged, LedgerUnavailable, QuietmaxError, short_message
from quietmax.ledger.journal import START, answer_digest, row_hash

_CONNECT_TIMEOUT = 2
_TIMEOUT = 10
_MIN_LOCK_PAUSE, _MAX_LOCK_PAUSE = 0.0001, 0.005
_WRITE_OPTIONS = {"quietmax_writes": True}
_LIKE_URL = re.compile(r"[A-Za-z][\w+.-]*(:|//)|.*:[^/]*@")
"""A word followed by a colon or two slashes, or a user and a password before an @."""

# --- address ------------------------------------------------------------------------------------------------------


def default_url() -> str:
    """Return the address of the ledger that is used when none is given."""
    variables = ("QUIETMAX_LEDGER", "QUIETMAX_LEDGER_FILE", "QUIETMAX_LEDGER_PASSWORD_FILE")
    address, address_file, password_file = (os.environ.get(name) for name in variables)
    return configured_url(
        address or None,
        Path(address_file) if address_file else None,
        Path(password_file) if password_file else None,
    )


def configured_url(address: str | None, address_file: Path | None, password_file: Path | None) -> str:
    """Return the address of the ledger from settings that keep its password out of the environment."""
    if address is not None and address_file is not None:
        raise InvalidInput("Only one of `ledger` and `ledger_file` can be set.")
    if address_file is not None:
        address = read_secret(address_file)
    if address is None:
        state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
        address = f"sqlite:///{Path(state) / 'quietmax' / 'ledger.sqlite'}"
    if password_file is None:
        return address
    url = parse_url(address)
    if url.drivername == "sqlite" or url.password is not None:
        raise InvalidInput(
            "`ledger_password_file` requires a postgresql:// ledger whose address has no password."
        )
    return url.set(password=read_secret(password_file)).render_as_string(hide_password=False)


def read_secret(path: Path) -> str:
    """Read a file that holds one secret; white space around it is ignored."""
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        secret = ""
    except OSError as error:
        raise QuietmaxError(f"Cannot read the secret {path}: {error.strerror}.") from error
    if not secret:
        raise QuietmaxError(f"The secret {path} must be a text file that is not empty.")
    return secret


def parse_url(address: str | Path) -> URL:
    """Parse the address of a ledger."""
    written = str(address)
    try:
        if "://" in written:
            url = make_url(written)
        else:
            is_file = isinstance(address, Path) or not _LIKE_URL.match(written)
            url = URL.create("sqlite" if is_file else "unknown", database=written)
    except (ArgumentError, ValueError):
        url = URL.create("unknown")
    if url.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return url.set(drivername="postgresql+psycopg")
    if url.drivername == "sqlite" and url.database and url.database != ":memory:" and not url.host:
        return url
    raise InvalidInput(
        "The ledger's address must be a file, sqlite:///FILE or postgresql://USER@HOST/DATABASE."
    )


def hide_password(url: URL) -> str:
    """Return the address as text, without its password."""
    hidden = {name: "***" for name in url.query if "pass" in name.lower()}
    return url.update_query_dict(hidden).render_as_string(hide_password=True)


# --- engine -------------------------------------------------------------------------------------------------------


def open_engine(address: str | Path, *, read_only: bool = False) -> Engine:
    """Open the database at an address. A SQLite file is created if missing, readable by its owner only."""
    url = parse_url(address)
    if url.drivername == "sqlite":
        return _open_sqlite(Path(str(url.database)), read_only)
    return _open_postgresql(url, read_only)


def _open_sqlite(path: Path, read_only: bool) -> Engine:
    options: dict[str, Any] = {"timeout": _TIMEOUT, "check_same_thread": False, "isolation_level": None}
    if read_only:
        address = _read_only_address(path)
        pragmas: tuple[str, ...] = ()
    else:
        address = _create_file(path)
        pragmas = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON")
    engine = create_engine(
        URL.create("sqlite", database=str(path)),
        poolclass=QueuePool,
        pool_size=4,
        max_overflow=16,
        creator=lambda: sqlite3.connect(address, uri=read_only, **options),
    )

    @event.listens_for(engine, "connect")
    def _set_pragmas(connection: sqlite3.Connection, _record: Any) -> None:
        cursor = connection.cursor()
        for pragma in pragmas:
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("quietmax_writes")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _create_file(path: Path) -> str:
    """Create a file that only its owner can read, unless it exists; return its name."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise LedgerUnavailable(f"Cannot open the ledger {path}: {error.strerror}.") from error
    return str(path)


def _read_only_address(path: Path) -> str:
    """Return the address with which SQLite reads a file and leaves it, its log and its folder as they are."""
    try:
        log_bytes = os.stat(f"{path}-wal").st_size
    except OSError:
        log_bytes = 0
    if log_bytes and not Path(f"{path}-shm").exists():
        raise LedgerUnavailable(
            f"The ledger {path} cannot be read without changing it: {path}-shm is missing. 'quietmax ledger status' "
            "creates it."
        )
    # Without a log, SQLite would create one even to read; with one, it would note there who reads.
    return f"{path.absolute().as_uri()}?mode=ro&" + ("readonly_shm=1" if log_bytes else "immutable=1")


def _open_postgresql(url: URL, read_only: bool) -> Engine:
    settings = {
        "default_transaction_read_only": "on" if read_only else "off",
        "synchronous_commit": "on",
        "lock_timeout": f"{_TIMEOUT}s",
        "statement_timeout": f"{_TIMEOUT}s",
        "idle_in_transaction_session_timeout": f"{_TIMEOUT}s",
    }
    engine = create_engine(
        url,
        pool_size=4,
        max_overflow=16,
        pool_pre_ping=True,
        pool_timeout=_TIMEOUT,
        connect_args={
            "connect_timeout": _CONNECT_TIMEOUT,
            "options": " ".join(f"-c {name}={value}" for name, value in settings.items()),
            "keepalives_idle": _TIMEOUT,
            "tcp_user_timeout": _TIMEOUT * 1000,
        },
    )
    with _translate_errors(engine), engine.connect() as connection:
        if connection.execute(text("SHOW fsync")).scalar_one() != "on":
            raise InvalidInput(
                "The PostgreSQL server must run with fsync=on: with fsync=off a crash can lose charges."
            )
    return engine


def is_migrated(engine: Engine) -> bool:
    """Tell whether a ledger has the newest schema."""
    with read_transaction(engine) as connection:
        return _known_version(connection, len(MIGRATIONS)) == len(MIGRATIONS)


def unavailable(engine: Engine, error: BaseException) -> LedgerUnavailable:
    """Describe a database error in one sentence, without the values of the statement."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    name = engine.url.database if engine.dialect.name == "sqlite" else hide_password(engine.url)
    return LedgerUnavailable(
        f"The ledger {name} is not available: {short_message(cause)}. No query is answered until it is."
    )


# --- transactions -------------------------------------------------------------------------------------------------


@contextmanager
def read_transaction(engine: Engine) -> Iterator[Connection]:
    """Open a connection in a transaction that only reads."""
    with _translate_errors(engine), engine.connect() as connection, connection.begin():
        yield connection


@contextmanager
def snapshot_transaction(engine: Engine) -> Iterator[Connection]:
    """Open a connection in a transaction that only reads, and sees the whole database as it was at the first query."""
    with _translate_errors(engine), engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            connection = connection.execution_options(isolation_level="REPEATABLE READ")
        with connection.begin():
            yield connection


@contextmanager
def write_transaction(engine: Engine) -> Iterator[Connection]:
    """Open a connection in a transaction that writes: durable after the block, rolled back if the block raises."""
    with (
        _translate_errors(engine),
        engine.connect().execution_options(**_WRITE_OPTIONS) as connection,
        connection.begin(),
    ):
        yield connection


def writer_connection(engine: Engine) -> Connection:
    """Open a connection that one thread keeps for its transactions; see `charge_transaction`."""
    with _translate_errors(engine):
        connection = engine.connect()
        if engine.dialect.name == "sqlite":
            _driver_connection(connection).execute("PRAGMA busy_timeout=0")
        return connection


@contextmanager
def charge_transaction(connection: Connection) -> Iterator[Cursor]:
    """Open a write transaction without SQLAlchemy, whose own steps would take a third of its time.

    It is durable after the block, and rolled back if the block raises.
    """
    driver = _driver_connection(connection)
    try:
        if connection.dialect.name == "sqlite":
            _begin_immediate(driver)
        yield Cursor(connection)
        driver.commit()
    except BaseException:
        with suppress(Exception):  # a connection that is lost has nothing to roll back
            driver.rollback()
        raise


def _driver_connection(connection: Connection) -> Any:
    return connection.connection.driver_connection


def _begin_immediate(driver: sqlite3.Connection) -> None:
    """Take the write lock of SQLite as soon as it is free.

    SQLite itself would look again after 1, 2, 5, 10, 15, ... milliseconds, while other workers hold the lock for half a
    millisecond at a time.
    """
    until = time.monotonic() + _TIMEOUT
    pause = _MIN_LOCK_PAUSE
    while True:
        try:
            driver.execute("BEGIN IMMEDIATE")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
        time.sleep(pause)
        pause = min(1.2 * pause, _MAX_LOCK_PAUSE)


@contextmanager
def _translate_errors(engine: Engine) -> Iterator[None]:
    """Raise errors of SQLAlchemy and of the driver as `LedgerUnavailable`."""
    driver: Any = engine.dialect.dbapi
    try:
        yield
    except (SQLAlchemyError, driver.Error) as error:
        raise unavailable(engine, error) from error


# --- cursor -------------------------------------------------------------------------------------------------------

Values = Sequence[int | str | bytes | None]
_MAX_LISTED_VALUES = 10_000


class Cursor:
    """Runs SQL on the driver's own cursor: charges are too frequent for statements that SQLAlchemy builds.

    In a statement ``?`` stands for a value and ``(??)`` for a list of values. ``FOR UPDATE`` is left out on SQLite,
    where a write transaction holds the lock of the whole file.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = _driver_connection(connection)
        self._cursor: Any = self._connection.cursor()
        self._sqlite = connection.dialect.name == "sqlite"

    def rollback(self) -> None:
        """Undo what the transaction has written, and end it."""
        self._connection.rollback()

    def fetch(self, statement: str, values: Values = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        self._cursor.execute(_to_dialect(statement, self._sqlite), values)
        rows: list[tuple[Any, ...]] = self._cursor.fetchall()
        return rows

    def fetch_listed(self, statement: str, listed: Iterable[int | str | bytes]) -> list[tuple[Any, ...]]:
        """Return all rows of a query with one ``(??)``, in several statements if the list is long."""
        values = sorted(listed)
        rows: list[tuple[Any, ...]] = []
        for start in range(0, len(values), _MAX_LISTED_VALUES):
            chunk = values[start : start + _MAX_LISTED_VALUES]
            self._cursor.execute(_to_dialect(statement, self._sqlite, len(chunk)), chunk)
            rows += self._cursor.fetchall()
        return rows

    def execute(self, statement: str, values: Values = ()) -> int:
        """Run a statement that writes; return the number of rows changed."""
        self._cursor.execute(_to_dialect(statement, self._sqlite), values)
        return int(self._cursor.rowcount)

    def execute_many(self, statement: str, rows: Sequence[Values]) -> int:
        """Run a statement that writes once for each row of values; return the number of rows changed."""
        if not rows:
            return 0
        self._cursor.executemany(_to_dialect(statement, self._sqlite), rows)
        return int(self._cursor.rowcount)


@lru_cache(maxsize=512)
def _to_dialect(statement: str, sqlite: bool, listed: int | None = None) -> str:
    """Write a statement as the driver expects it.

    >>> _to_dialect("SELECT 1 WHERE x IN (??) FOR UPDATE", True, 2), _to_dialect("SELECT ? FOR UPDATE", False)
    ('SELECT 1 WHERE x IN (?,?)', 'SELECT %s FOR UPDATE')
    """
    if listed is not None:
        statement = statement.replace("(??)", f"({','.join('?' * listed)})")
    return statement.replace(" FOR UPDATE", "") if sqlite else statement.replace("?", "%s")


# --- tables -------------------------------------------------------------------------------------------------------

KEYS_ACCOUNT = "(keys)"
"""The account whose journal records API keys. No account of a training set can have this name."""

metadata = MetaData()

_BigInt = BigInteger().with_variant(Integer, "sqlite")

meta = Table("meta", metadata, Column("name", Text, primary_key=True), Column("value", Text, nullable=False))

accounts = Table(
    "accounts",
    metadata,
    Column("id", _BigInt, primary_key=True, autoincrement=True),
    Column("name", Text, nullable=False, unique=True),
    Column("total", Text, nullable=False),
    Column("terms", Text, nullable=False),
    Column("limit_units", _BigInt, nullable=False),
    Column("spent_units", _BigInt, nullable=False),
    Column("sequence", _BigInt, nullable=False),
    Column("head", Text, nullable=False),
    Column("opened", _BigInt, nullable=False),
    CheckConstraint("0 <= spent_units AND spent_units <= limit_units", name="never_overspent"),
)
"""`total` is the cost that `LIMIT` units stand for, as JSON. `terms` is the (epsilon, delta) that the owner promised.
`sequence` and `head` are the number and the hash of the last journal row."""

training_sets = Table(
    "training_sets",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("account", _BigInt, ForeignKey("accounts.id"), nullable=False),
)

clients = Table(
    "clients",
    metadata,
    Column("id", _BigInt, primary_key=True, autoincrement=True),
    Column("name", Text, nullable=False, unique=True),
)

subaccounts = Table(
    "subaccounts",
    metadata,
    Column("account", _BigInt, ForeignKey("accounts.id"), nullable=False),
    Column("client", _BigInt, ForeignKey("clients.id"), nullable=False),
    Column("limit_units", _BigInt, nullable=True),
    Column("spent_units", _BigInt, nullable=False),
    Column("refused", _BigInt, nullable=False),
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
    Column("client", _BigInt, ForeignKey("clients.id"), nullable=False),
    Column("role", Text, nullable=False),
    Column("secret_hash", Text, nullable=False),
    Column("created", _BigInt, nullable=False),
    Column("expires", _BigInt, nullable=True),
    Column("revoked", _BigInt, nullable=True),
)

journal = Table(
    "journal",
    metadata,
    Column("account", _BigInt, ForeignKey("accounts.id"), nullable=False),
    Column("sequence", _BigInt, nullable=False),
    Column("time", _BigInt, nullable=False),
    Column("kind", Text, nullable=False),
    Column("client", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("answers", _BigInt, nullable=False),
    Column("units", _BigInt, nullable=False),
    Column("spent_units", _BigInt, nullable=False),
    Column("limit_units", _BigInt, nullable=False),
    Column("detail", Text, nullable=False),
    Column("previous", Text, nullable=False),
    Column("hash", Text, nullable=False),
    PrimaryKeyConstraint("account", "sequence"),
)

ended_sessions = Table(
    "ended_sessions",
    metadata,
    Column("id", Text, primary_key=True),
    Column("expires", _BigInt, nullable=False),
)
"""Sessions of the dashboard that were closed before they expire. `expires` is in microseconds since 1970."""

requests = Table(
    "requests",
    metadata,
    Column("request", LargeBinary, primary_key=True),
    Column("body", LargeBinary, nullable=False),
    Column("account", _BigInt, nullable=False),
    Column("units", _BigInt, nullable=False),
    Column("time", _BigInt, nullable=False),
    Column("answer", LargeBinary, nullable=True),
)
"""`request` is a keyed hash of client and request id, `body` a hash of the request, `units` what was charged for it."""

answers = Table(
    "answers",
    metadata,
    Column("id", _BigInt, primary_key=True, autoincrement=True),
    Column("account", _BigInt, ForeignKey("accounts.id"), nullable=False),
    Column("keys", LargeBinary, nullable=False),
    Column("answers", LargeBinary, nullable=False),
    Column("time", _BigInt, nullable=False, server_default="0"),
    sqlite_autoincrement=True,
)
"""The answer cache. One row holds the answers that were drawn together: `keys` are keyed hashes of model version and
features, 16 bytes each; `answers` are the packed answers in the same order. `time` is 0 for rows of version 0.1."""

Index("answers_by_account", answers.c.account, answers.c.id)
_not_a_charge = journal.c.kind != "charge"
Index(
    "journal_rare",
    journal.c.account,
    journal.c.kind,
    sqlite_where=_not_a_charge,
    postgresql_where=_not_a_charge,
)


# --- migrations ---------------------------------------------------------------------------------------------------

_ADVISORY_LOCK = 7_238_164_001
_ADOPTED_PER_ROW = 500


@dataclass(frozen=True)
class Migration:
    """One step of the schema. The n-th step leads to version n."""

    description: str  # What the step changes
    apply: Callable[[Connection], None]  # Makes the change on a connection


def _create_tables(connection: Connection) -> None:
    metadata.create_all(connection)
    connection.execute(
        accounts.insert(),
        {
            "name": KEYS_ACCOUNT,
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
            {"name": "query_salt", "value": secrets.token_hex(32)},
            {"name": "query_hash", "value": "gmac"},
        ],
    )


def _rename_words(connection: Connection) -> None:
    """Keep all rows, which the hash chain covers. New rows use words that version 0.1 cannot read."""
    connection.execute(meta.delete().where(meta.c.name == "pulse"))  # now "write_probe"


def _forget_session_secret(connection: Connection) -> None:
    """Delete the secret that signed sessions: whoever read a copy of the ledger could sign an administrator's."""
    connection.execute(meta.delete().where(meta.c.name == "session_secret"))
    ended_sessions.create(connection, checkfirst=True)


def _adopt_requests(connection: Connection) -> None:
    """Put the requests that earlier versions stored into the hash chain, and give cached answers a time."""
    if "time" not in {column["name"] for column in inspect(connection).get_columns("answers")}:
        connection.execute(text("ALTER TABLE answers ADD COLUMN time BIGINT NOT NULL DEFAULT 0"))
    salt = read_salt(connection)
    for account in connection.execute(select(accounts)).all():
        stored = select(requests).where(requests.c.account == account.id).order_by(requests.c.request)
        rows = connection.execute(stored).all()
        last: Mapping[str, Any] = account._asdict()
        for start in range(0, len(rows), _ADOPTED_PER_ROW):
            described = {
                bytes(row.request).hex(): {
                    "time": row.time,
                    "units": row.units,
                    "keep": not row.body,
                    "answer": None
                    if row.answer is None
                    else answer_digest(salt, row.request, row.body, row.answer),
                }
                for row in rows[start : start + _ADOPTED_PER_ROW]
            }
            last = _add_adopted(connection, last, json.dumps({"requests": described}))


def _adopt_accounts(connection: Connection) -> None:
    """Put the names of accounts and their training sets into the hash chain, as they are now.

    The last row of each account is stated too: rows `adopted` cannot come after it.
    """
    opened = connection.execute(select(accounts).order_by(accounts.c.id)).all()
    last: Mapping[str, Any] = next(row for row in opened if row.name == KEYS_ACCOUNT)._asdict()
    bound = connection.execute(select(training_sets).order_by(training_sets.c.digest)).all()
    names = [
        ("accounts", str(row.id), {"name": row.name, "sequence": row.sequence})
        for row in opened
        if row.name != KEYS_ACCOUNT
    ]
    described = names + [("training_sets", row.digest, row.account) for row in bound]
    for start in range(0, len(described), _ADOPTED_PER_ROW):
        detail: dict[str, dict[str, Any]] = {"accounts": {}, "training_sets": {}}
        for table, name, value in described[start : start + _ADOPTED_PER_ROW]:
            detail[table][name] = value
        last = _add_adopted(connection, last, json.dumps(detail))


def read_salt(connection: Connection) -> bytes:
    """Return the salt of all keyed hashes."""
    found = connection.execute(select(meta.c.value).where(meta.c.name == "query_salt")).scalar_one_or_none()
    try:
        return bytes.fromhex(found or "missing")
    except (TypeError, ValueError) as error:
        raise LedgerDamaged(
            "The ledger's query_salt is missing. Restore the ledger from a backup."
        ) from error


def _add_adopted(connection: Connection, last: Mapping[str, Any], detail: str) -> Mapping[str, Any]:
    """Append a journal row that adopts what an earlier version stored; return the account's new state."""
    fields = {
        "account": last["id"],
        "sequence": last["sequence"] + 1,
        "time": time.time_ns() // 1000,
        "kind": "adopted",
        "client": "",
        "model": "",
        "answers": 0,
        "units": 0,
        "spent_units": last["spent_units"],
        "limit_units": last["limit_units"],
        "detail": detail,
        "previous": last["head"],
    }
    head = row_hash(*fields.values())
    connection.execute(journal.insert(), {**fields, "hash": head})
    state = {**last, "sequence": fields["sequence"], "head": head}
    connection.execute(
        accounts.update()
        .where(accounts.c.id == last["id"])
        .values(sequence=state["sequence"], head=state["head"])
    )
    return state


MIGRATIONS = (
    Migration("accounts, clients, keys, journal, requests and the answer cache", _create_tables),
    Migration("terms with 'analysis'; journal kinds exclusive, migrated-budget, reassign", _rename_words),
    Migration("no secret of sessions; sessions that ended", _forget_session_secret),
    Migration("requests in the hash chain; the time of cached answers", _adopt_requests),
    Migration("accounts and training sets in the hash chain", _adopt_accounts),
)


def migrate(engine: Engine, migrations: Sequence[Migration] = MIGRATIONS) -> int:
    """Bring the schema to the newest version, with all missing migrations or none."""
    with write_transaction(engine) as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _ADVISORY_LOCK})
        newest = len(migrations)
        missing = migrations[_known_version(connection, newest) :]
        for migration in missing:
            migration.apply(connection)
        if missing:
            connection.execute(meta.delete().where(meta.c.name == "version"))
            connection.execute(meta.insert(), {"name": "version", "value": str(newest)})
        return newest


def _known_version(connection: Connection, newest: int) -> int:
    """Return the version of the schema; raise if it is newer than the newest that is known."""
    current = _schema_version(connection)
    if current > newest:
        raise LedgerDamaged(
            f"The ledger has schema version {current}. This version of Quietmax supports versions up to {newest}."
        )
    return current


def _schema_version(connection: Connection) -> int:
    """Return the version of the schema; 0 for an empty database."""
    present = set(inspect(connection).get_table_names())
    if not present:
        return 0
    if "meta" not in present or "journal" not in present:
        raise LedgerDamaged("The database has tables that are not those of a Quietmax ledger.")
    found = str(connection.execute(select(meta.c.value).where(meta.c.name == "version")).scalar_one_or_none())
    if not found.isdigit():
        raise LedgerDamaged("The ledger's schema version is missing. Restore the ledger from a backup.")
    return int(found)

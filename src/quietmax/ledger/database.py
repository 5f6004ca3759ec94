"""The ledger's database: address, engine, transactions, cursor, hash chain, tables, locked accounts and migrations.

A committed transaction is durable. SQLite uses a write-ahead log with `synchronous=FULL`, which flushes the log at
every commit. PostgreSQL uses `synchronous_commit=on`; a server that runs with `fsync=off` is an error. Transactions
that write take SQLite's write lock when they begin.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import lru_cache, partial
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from quietmax.errors import InvalidInput, LedgerDamaged, LedgerUnavailable, QuietmaxError, short_message

_CONNECT_TIMEOUT = 2
_STREAMED_ROWS = 10_000
_TIMEOUT = 10
_MIN_LOCK_PAUSE, _MAX_LOCK_PAUSE = 0.0001, 0.005
_PRAGMAS = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "secure_delete=ON")
_LIKE_URL = re.compile(r"[A-Za-z][\w+.-]*(:|//)|.*:[^/]*@")
"""A word followed by a colon or two slashes, or a user and a password before an @."""

# --- address ------------------------------------------------------------------------------------------------------


def default_url() -> str:
    """Return the address of the ledger that is used when none is given."""
    files = (os.environ.get(name) for name in ("QUIETMAX_LEDGER_FILE", "QUIETMAX_LEDGER_PASSWORD_FILE"))
    address_file, password_file = (Path(name) if name else None for name in files)
    return configured_url(os.environ.get("QUIETMAX_LEDGER") or None, address_file, password_file)


def configured_url(address: str | None, address_file: Path | None, password_file: Path | None) -> str:
    """Return the address of the ledger from settings that keep its password out of the environment."""
    if address is not None and address_file is not None:
        raise InvalidInput("Only one of `ledger` and `ledger_file` can be set.")
    if address_file is not None:
        address = _read_secret(address_file)
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
    return url.set(password=_read_secret(password_file)).render_as_string(hide_password=False)


def _read_secret(path: Path) -> str:
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


def _open_engine(address: str | Path, *, read_only: bool = False) -> Engine:
    """Open the database at an address. A SQLite file is created if missing, readable by its owner only."""
    url = parse_url(address)
    if url.drivername == "sqlite":
        return _open_sqlite(Path(str(url.database)), read_only)
    return _open_postgresql(url, read_only)


def _open_sqlite(path: Path, read_only: bool) -> Engine:
    options: dict[str, Any] = {"timeout": _TIMEOUT, "check_same_thread": False, "isolation_level": None}
    target = _read_only_address(path) if read_only else _create_file(path)
    engine = create_engine(
        URL.create("sqlite", database=str(path)),
        poolclass=QueuePool,
        pool_size=4,
        max_overflow=16,
        creator=lambda: sqlite3.connect(target, uri=read_only, **options),
    )

    @event.listens_for(engine, "connect")
    def _set_pragmas(connection: sqlite3.Connection, _record: Any) -> None:
        for pragma in () if read_only else _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}").close()

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
        if _run(connection, "SHOW fsync").scalar_one() != "on":
            raise InvalidInput(
                "The PostgreSQL server must run with fsync=on: with fsync=off a crash can lose charges."
            )
    return engine


def _unavailable(engine: Engine, error: BaseException) -> LedgerUnavailable:
    """Describe a database error in one sentence, without the values of the statement."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    name = engine.url.database if engine.dialect.name == "sqlite" else hide_password(engine.url)
    return LedgerUnavailable(
        f"The ledger {name} is not available: {short_message(cause)}. No query is answered until it is."
    )


# --- transactions -------------------------------------------------------------------------------------------------


@contextmanager
def _read_transaction(engine: Engine) -> Iterator[Connection]:
    """Open a connection in a transaction that only reads, and sees the database as it was at the first query."""
    with _translate_errors(engine), engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            connection = connection.execution_options(isolation_level="REPEATABLE READ")
        with connection.begin():
            yield connection


@contextmanager
def _write_transaction(engine: Engine) -> Iterator[Connection]:
    """Open a connection in a transaction that writes: durable after the block, rolled back if the block raises."""
    with (
        _translate_errors(engine),
        engine.connect().execution_options(quietmax_writes=True) as connection,
        connection.begin(),
    ):
        yield connection


def _writer_connection(engine: Engine) -> Connection:
    """Open a connection that one thread keeps for its transactions; see `_charge_transaction`."""
    with _translate_errors(engine):
        connection = engine.connect()
        if engine.dialect.name == "sqlite":
            _driver_connection(connection).execute("PRAGMA busy_timeout=0")
        return connection


@contextmanager
def _charge_transaction(connection: Connection) -> Iterator[Cursor]:
    """Open a write transaction as `_write_transaction` does, in two thirds of the time: without SQLAlchemy."""
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
    """Take the write lock of SQLite as soon as it is free: SQLite itself would look too rarely for brief charges."""
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
        raise _unavailable(engine, error) from error


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

    def _rollback(self) -> None:
        """Undo what the transaction has written, and end it."""
        self._connection.rollback()

    def _fetch(self, statement: str, values: Values = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        self._cursor.execute(_to_dialect(statement, self._sqlite, len(values)), values)
        rows: list[tuple[Any, ...]] = self._cursor.fetchall()
        return rows

    def _fetch_listed(self, statement: str, listed: Iterable[int | str | bytes]) -> list[tuple[Any, ...]]:
        """Return all rows of a query with one ``(??)``, in several statements if the list is long."""
        values = sorted(listed)
        rows: list[tuple[Any, ...]] = []
        for start in range(0, len(values), _MAX_LISTED_VALUES):
            rows += self._fetch(statement, values[start : start + _MAX_LISTED_VALUES])
        return rows

    def _execute(self, statement: str, values: Values = ()) -> int:
        """Run a statement that writes; return the number of rows changed."""
        self._cursor.execute(_to_dialect(statement, self._sqlite, len(values)), values)
        return int(self._cursor.rowcount)

    def _execute_many(self, statement: str, rows: Sequence[Values]) -> int:
        """Run a statement that writes once for each row of values; return the number of rows changed."""
        if not rows:
            return 0
        self._cursor.executemany(_to_dialect(statement, self._sqlite, len(rows[0])), rows)
        return int(self._cursor.rowcount)


@lru_cache(maxsize=512)
def _to_dialect(statement: str, sqlite: bool, count: int) -> str:
    """Write a statement with so many values as the driver expects it."""
    statement = statement.replace("(??)", f"({','.join('?' * count)})")
    return statement.replace(" FOR UPDATE", "") if sqlite else statement.replace("?", "%s")


# --- hash chain ---------------------------------------------------------------------------------------------------

START = "0" * 64
"""The previous hash of the first row."""


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One row of the journal. Its hash covers the hash of the row before it.

    To edit, delete or move a row, one must rewrite all later rows, and then the last hash is no longer the one that an
    auditor wrote down (`quietmax ledger status`). The account of the API keys also records which accounts were opened,
    and which training sets each of them pays for, so that no training set can get a second budget unnoticed. A charge
    names its request, and a row ``answered`` has a keyed digest of each stored answer, so that no answer can be removed
    and drawn again unnoticed.
    """

    account: int  # The id of the account
    sequence: int  # The number of the row within its account, from 1
    time: int  # Microseconds since 1970
    kind: str
    client: str  # The client's name, or an empty string
    model: str  # The model, as `name/version`, or an empty string
    answers: int  # The number of answers charged
    units: int  # The units added to the balance
    spent_units: int  # The balance after this row
    limit_units: int  # The budget after this row
    detail: str  # A JSON object with what else belongs to the row, or an empty string
    previous: str  # The hash of the row before
    hash: str = ""  # The hash of this row

    def expected_hash(self) -> str:
        """Return the hash that follows from the other fields."""
        return _row_hash(_HASHED(self))


COLUMNS = tuple(each.name for each in fields(JournalEntry))
"""The columns of the journal."""
_HASHED = attrgetter(*COLUMNS[:-1])
_ADDED = attrgetter(*COLUMNS[2:-2])


def _row_hash(fields: tuple[int | str, ...]) -> str:
    """Return the SHA-256 of the fields, written as one JSON list without spaces, in UTF-8."""
    return hashlib.sha256(orjson.dumps(fields)).hexdigest()


@lru_cache(maxsize=8)
def _field_types(row: Any) -> tuple[tuple[str, tuple[type, ...]], ...]:
    kinds = {"int": (int,), "int | None": (int, type(None))}
    return tuple((each.name, kinds.get(str(each.type), (str,))) for each in fields(row))


def _has_wrong_types(row: Any) -> bool:
    """Tell whether a field of a row, a dataclass, has another type than was written: SQLite accepts any in an edit."""
    return any(type(getattr(row, name)) not in types for name, types in _field_types(row.__class__))


def _answer_digest(salt: bytes, request: bytes, body: bytes, answer: bytes | None) -> str | None:
    """Return the digest of a stored answer, if there is one. Without the salt it reveals nothing about the answer."""
    if answer is None:
        return None
    content = b"answer %d %d " % (len(request), len(body)) + request + body + answer
    return hashlib.blake2b(content, key=salt, digest_size=16).hexdigest()


# --- tables -------------------------------------------------------------------------------------------------------

KEYS_ACCOUNT = "(keys)"
"""The account whose journal records API keys. No account of a training set can have this name."""
PARSE_ERRORS = (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError)
"""What parsing JSON of the ledger can raise after somebody edited it."""
_TABLES = Path(__file__).with_name("tables.sql").read_text(encoding="utf-8")
_SQLITE_ID = "INTEGER NOT NULL PRIMARY KEY"
_COLUMN_TYPES = {
    "sqlite": {"id": _SQLITE_ID, "new_id": f"{_SQLITE_ID} AUTOINCREMENT", "bytes": "BLOB"},
    "postgresql": {"id": "BIGSERIAL PRIMARY KEY", "new_id": "BIGSERIAL PRIMARY KEY", "bytes": "BYTEA"},
}
"""`new_id` is never used again after its row was deleted."""


def _damaged(what: str) -> LedgerDamaged:
    return LedgerDamaged(f"{what}. Stop serving from this ledger and restore a backup that has every charge.")


def _run(connection: Connection, statement: str, **values: object) -> Any:
    """Run SQL in which ``:name`` stands for a value."""
    return connection.execute(text(statement), values)


def _stream(connection: Connection, statement: str, **values: object) -> Any:
    """Run a query as `_run` does, but without holding all rows in memory."""
    return connection.execute(text(statement).execution_options(yield_per=_STREAMED_ROWS), values)


def _insert(connection: Connection, table: str, **values: object) -> None:
    """Add a row to a table."""
    names = ", ".join(f":{name}" for name in values)
    _run(connection, f"INSERT INTO {table} ({', '.join(values)}) VALUES ({names})", **values)


def _insert_account(
    connection: Connection, name: str, *, total: object, terms: object, limit_units: int
) -> int:
    """Add an account that has spent nothing and has no journal row; return its id."""
    stated = {"total": json.dumps(total), "terms": json.dumps(terms), "limit_units": limit_units}
    _insert(connection, "accounts", name=name, spent_units=0, sequence=0, head=START, opened=now(), **stated)
    return int(_run(connection, "SELECT id FROM accounts WHERE name = :name", name=name).scalar_one())


# --- locked accounts ----------------------------------------------------------------------------------------------

_LOCK_ACCOUNTS = (
    "SELECT id, limit_units, spent_units, sequence, head FROM accounts"
    " WHERE id IN (??) ORDER BY id FOR UPDATE"
)
_UPDATE_ACCOUNT = "UPDATE accounts SET limit_units = ?, spent_units = ?, sequence = ?, head = ? WHERE id = ?"
_INSERT_JOURNAL = f"INSERT INTO journal ({', '.join(COLUMNS)}) VALUES ({', '.join('?' for _ in COLUMNS)})"


@dataclass(slots=True)
class AccountTransaction:
    """A locked account inside a transaction: its balance, the end of its hash chain and the journal rows to write."""

    account: int  # The id of the account
    limit_units: int  # Its budget
    spent_units: int  # Its balance
    sequence: int  # The number of its last journal row
    head: str  # The hash of its last journal row
    rows: list[JournalEntry] = field(default_factory=list)  # The journal rows to write, not yet in the chain

    def _add(
        self,
        now: int,
        kind: str,
        *,
        client: str = "",
        model: str = "",
        answers: int = 0,
        units: int = 0,
        detail: str = "",
    ) -> None:
        """Add a journal row; charges without a request id by one client for one model share a row in a transaction."""
        self.spent_units += units
        last = self.rows[-1] if self.rows and kind == "charge" else None
        shared = (kind, client, model, "", "")
        if last and (last.kind, last.client, last.model, last.detail, detail) == shared:
            del self.rows[-1]
            answers, units = answers + last.answers, units + last.units
        balance = self.spent_units, self.limit_units
        stated = self.account, 0, now, kind, client, model, answers, units, *balance, detail, ""
        self.rows.append(JournalEntry(*stated))

    def _save(self, cursor: Cursor) -> None:
        """Write the balance and the journal rows."""
        chained = []
        for row in self.rows:
            self.sequence += 1
            fields = (self.account, self.sequence, *_ADDED(row), self.head)
            self.head = _row_hash(fields)
            chained.append((*fields, self.head))
        self.rows.clear()
        balance = self.limit_units, self.spent_units, self.sequence, self.head
        cursor._execute(_UPDATE_ACCOUNT, (*balance, self.account))
        cursor._execute_many(_INSERT_JOURNAL, chained)


def _lock_accounts(cursor: Cursor, ids: Iterable[int]) -> dict[int, AccountTransaction]:
    wanted = set(ids)
    found = {row[0]: AccountTransaction(*row) for row in cursor._fetch_listed(_LOCK_ACCOUNTS, wanted)}
    if len(found) < len(wanted):
        raise _damaged("An account is missing from the ledger")
    return found


# --- migrations ---------------------------------------------------------------------------------------------------

_ADVISORY_LOCK = 7_238_164_001
_ADOPTED_PER_ROW = 500
_ADOPTED_TABLES = ("accounts", "training_sets")
_SALT_BYTES = 32


def _create_ledger(connection: Connection) -> None:
    for statement in _TABLES.format(**_COLUMN_TYPES[connection.dialect.name]).rstrip(";\n").split(";\n"):
        connection.exec_driver_sql(statement)
    _insert_account(connection, KEYS_ACCOUNT, total={}, terms={}, limit_units=0)
    _insert(connection, "meta", name="ledger", value=secrets.token_hex(16))
    _insert(connection, "meta", name="query_salt", value=secrets.token_hex(_SALT_BYTES))
    _insert(connection, "meta", name="query_hash", value="gmac")


def _adopt_requests(connection: Connection) -> None:
    """Put the requests that earlier versions stored into the hash chain, and give cached answers a time."""
    if "time" not in {column["name"] for column in inspect(connection).get_columns("answers")}:
        _run(connection, "ALTER TABLE answers ADD COLUMN time BIGINT NOT NULL DEFAULT 0")
    salt = _read_salt(connection)
    stored = "SELECT * FROM requests WHERE account = :account ORDER BY request"
    for account in _run(connection, "SELECT id FROM accounts ORDER BY id").scalars().all():
        described = {
            row.request.hex(): {
                "time": row.time,
                "units": row.units,
                "keep": not row.body,
                "answer": _answer_digest(salt, row.request, row.body, row.answer),
            }
            for row in _run(connection, stored, account=account)
        }
        _adopt(connection, account, [{"requests": dict(chunk)} for chunk in _chunks(described.items())])


def _adopt_accounts(connection: Connection) -> None:
    """Put accounts, their last rows (none `adopted` can come later) and training sets into the hash chain."""
    opened = _run(connection, "SELECT id, name, sequence FROM accounts ORDER BY id").all()
    bound = _run(connection, "SELECT digest, account FROM training_sets ORDER BY digest").all()
    described: list[tuple[str, str, Any]] = [
        ("accounts", str(row.id), {"name": row.name, "sequence": row.sequence})
        for row in opened
        if row.name != KEYS_ACCOUNT
    ]
    described += [("training_sets", row.digest, row.account) for row in bound]
    details = [
        {table: {name: value for each, name, value in chunk if each == table} for table in _ADOPTED_TABLES}
        for chunk in _chunks(described)
    ]
    _adopt(connection, next(row.id for row in opened if row.name == KEYS_ACCOUNT), details)


def _add_client_names(connection: Connection) -> None:
    """Add the table of names that can be erased. Older clients keep theirs in the journal."""
    if "client_names" not in inspect(connection).get_table_names():
        created = next(each for each in _TABLES.split(";\n") if "TABLE client_names" in each)
        connection.exec_driver_sql(created)


def _chunks(items: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield as many items at a time as one journal row adopts."""
    remaining = iter(items)
    while chunk := list(islice(remaining, _ADOPTED_PER_ROW)):
        yield chunk


def _adopt(connection: Connection, account: int, details: Sequence[object]) -> None:
    """Append journal rows that adopt what an earlier version stored."""
    cursor = Cursor(connection)
    locked = _lock_accounts(cursor, [account])[account]
    for detail in details:
        locked._add(now(), "adopted", detail=json.dumps(detail))
    locked._save(cursor)


def _read_salt(connection: Connection) -> bytes:
    found = _run(connection, "SELECT value FROM meta WHERE name = 'query_salt'").scalar_one_or_none()
    with suppress(TypeError, ValueError):
        salt = bytes.fromhex(found)
        if len(salt) == _SALT_BYTES:
            return salt
    raise _damaged("The ledger's query_salt is missing or was changed")


MIGRATIONS: tuple[Callable[[Connection], object], ...] = (
    _create_ledger,
    # Now "write_probe". All rows stay, which the hash chain covers. New rows use words that version 0.1 cannot read.
    partial(_run, statement="DELETE FROM meta WHERE name = 'pulse'"),
    # It signed sessions: whoever read a copy of the ledger could sign an administrator's.
    partial(_run, statement="DELETE FROM meta WHERE name = 'session_secret'"),
    _adopt_requests,
    _adopt_accounts,
    partial(_run, statement="DROP TABLE IF EXISTS ended_sessions"),  # the page has no sessions any more
    # No table changes. New rows charge cohorts, which versions up to 0.3 would add up wrongly: they must not write.
    lambda _: None,
    _add_client_names,
)
"""The steps of the schema. The n-th step leads to version n."""


def _migrate(engine: Engine, migrations: Sequence[Callable[[Connection], object]] = MIGRATIONS) -> None:
    """Bring the schema to the newest version, with all missing migrations or none."""
    with _write_transaction(engine) as connection:
        _apply(connection, migrations)


def _apply(connection: Connection, migrations: Sequence[Callable[[Connection], object]] = MIGRATIONS) -> int:
    """Apply the missing migrations; return the version that the schema had."""
    if connection.dialect.name == "postgresql":
        _run(connection, "SELECT pg_advisory_xact_lock(:lock)", lock=_ADVISORY_LOCK)
    before = _known_version(connection, len(migrations))
    for apply in migrations[before:]:
        apply(connection)
    if before < len(migrations):
        _run(connection, "DELETE FROM meta WHERE name = 'version'")
        _insert(connection, "meta", name="version", value=str(len(migrations)))
    return before


def _is_migrated(engine: Engine) -> bool:
    with _read_transaction(engine) as connection:
        return _known_version(connection, len(MIGRATIONS)) == len(MIGRATIONS)


def _known_version(connection: Connection, newest: int) -> int:
    """Return the version of the schema, 0 for an empty database; raise if it is newer than the newest that is known."""
    present = set(inspect(connection).get_table_names())
    if not present:
        return 0
    if "meta" not in present or "journal" not in present:
        raise LedgerDamaged("The database has tables that are not those of a Quietmax ledger.")
    found = str(_run(connection, "SELECT value FROM meta WHERE name = 'version'").scalar_one_or_none())
    if not found.isdigit():
        raise _damaged("The ledger's schema version is missing")
    if int(found) > newest:
        raise LedgerDamaged(
            f"The ledger has schema version {found}. This version of Quietmax supports versions up to {newest}."
        )
    return int(found)


def now() -> int:
    """Return the time in microseconds since 1970."""
    return time.time_ns() // 1000

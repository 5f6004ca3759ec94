from __future__ import annotations

import hashlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy import inspect, text
from sqlalchemy.exc import IntegrityError, OperationalError

from quietmax.accounting import PureCost
from quietmax.accounting.costs import LIMIT
from quietmax.errors import InvalidInput, LedgerDamaged, LedgerUnavailable, QuietmaxError
from quietmax.ledger import Charge, Ledger, database
from quietmax.ledger.database import (
    COLUMNS,
    MIGRATIONS,
    START,
    JournalEntry,
    _answer_digest,
    _is_migrated,
    _migrate,
    _open_engine,
    _read_transaction,
    _unavailable,
    _write_transaction,
    configured_url,
    default_url,
    hide_password,
    now,
    parse_url,
)
from quietmax.ledger.transactions import NewAnswers
from tests.ledger.scenarios import charge_for, charge_patients, open_patients, writer_driver


def test_the_default_ledger_is_one_file_per_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("QUIETMAX_LEDGER", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_url() == f"sqlite:///{tmp_path / 'quietmax' / 'ledger.sqlite'}"
    monkeypatch.setenv("QUIETMAX_LEDGER", "postgresql://host/ledger")
    assert default_url() == "postgresql://host/ledger"


def test_every_scheme_of_postgresql_and_every_name_of_a_file_is_accepted(path: Path) -> None:
    for scheme in ("postgresql", "postgres", "postgresql+psycopg"):
        url = parse_url(f"{scheme}://ann@host/ledger")
        assert (url.drivername, url.username, url.database) == ("postgresql+psycopg", "ann", "ledger")
    assert parse_url(f"sqlite:///{path}").database == parse_url(path).database == str(path)
    for name in ("./a:b.sqlite", "/x/a:b.sqlite", "a@b.sqlite", "/a//b", "data/postgres//x", "sqlite/x"):
        assert parse_url(name).database == name
    assert parse_url(Path("a:b@c.sqlite")).database == "a:b@c.sqlite"
    assert parse_url("sqlite:///a:b@c.sqlite").database == "a:b@c.sqlite"


@pytest.mark.parametrize(
    "wrong",
    [
        "postgres//ann:word@host/ledger",
        "postgresql:/ann:word@host/ledger",
        "postgresql:ann:word@host",
        "mysql//ann:word@host",
        "redis:ledger",
        "ann:word@host/ledger",
        "/ann:word@host/ledger",
        "sqlite://ann:word@host/ledger",
        *("mysql://host/x", "sqlite://", "sqlite:///:memory:", "://", "http://x"),
    ],
)
def test_a_mistyped_url_is_no_file_and_its_password_is_not_shown(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match=r"must be a file, sqlite:///FILE or postgresql://") as refusal:
        Ledger(wrong)
    assert "word" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


def test_a_password_in_the_query_of_an_address_is_hidden() -> None:
    url = parse_url("postgresql://host/ledger?user=ann&password=word1&sslpassword=word2&sslmode=require")
    shown = hide_password(url)
    assert "word1" not in shown
    assert "word2" not in shown
    assert "user=ann" in shown
    assert "sslmode=require" in shown
    assert "word3" not in hide_password(parse_url("postgresql://ann:word3@host/ledger"))


def test_a_sqlite_ledger_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "ledger.sqlite"
    with Ledger(path):
        assert path.stat().st_mode & 0o777 == 0o600


def test_the_error_for_an_unreachable_server_hides_the_password() -> None:
    with pytest.raises(LedgerUnavailable, match="is not available") as refusal:
        Ledger("postgresql://someone:secret@127.0.0.1:9/ledger")
    assert "secret" not in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_database_error_names_the_file_and_the_first_line_of_the_cause(path: Path) -> None:
    engine = _open_engine(path)
    sentence = str(_unavailable(engine, ValueError("the disk is full\nand much more")))
    assert sentence.startswith(f"The ledger {path} is not available: the disk is full. ")
    assert ": ValueError." in str(_unavailable(engine, ValueError()))
    wrapped = OperationalError("SELECT secret", {"secret": 1}, sqlite3.OperationalError("locked"))
    assert ": locked." in str(_unavailable(engine, wrapped))
    assert len(str(_unavailable(engine, ValueError("x" * 10_000)))) < 500
    engine.dispose()


def test_a_silent_server_is_given_up_after_the_same_timeout_as_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def remember(_, **options):
        settings.update(options["connect_args"])
        raise ConnectionError

    settings: dict = {}
    monkeypatch.setattr(database, "create_engine", remember)
    with pytest.raises(ConnectionError):
        _open_engine("postgresql://host/ledger")
    assert settings["tcp_user_timeout"] == 1000 * settings["keepalives_idle"]
    assert f"lock_timeout={settings['keepalives_idle']}s" in settings["options"]
    assert "synchronous_commit=on" in settings["options"]


@pytest.mark.parametrize("address", ["postgresql"], indirect=True)
def test_the_ledger_reconnects_after_postgresql_dropped_its_connections(address: str) -> None:
    with Ledger(address) as ledger:
        charge_patients(ledger)
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE pid <> pg_backend_pid() AND datname = current_database()"
            )
        assert ledger.account("patients").spent_units == 3000


def test_a_write_transaction_holds_the_lock_of_the_file_from_its_start(path: Path) -> None:
    with Ledger(path) as ledger:
        charge_patients(ledger)
        other = sqlite3.connect(path, timeout=0, isolation_level=None)
        with _write_transaction(ledger._engine), pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
        with _read_transaction(ledger._engine):
            other.execute("BEGIN IMMEDIATE")
        other.close()


def test_every_commit_is_flushed_to_the_disk(ledger: Ledger) -> None:
    ledger.charge(charge_for(ledger))
    driver = writer_driver(ledger)
    if ledger._engine.dialect.name == "sqlite":
        full = 2
        assert driver.execute("PRAGMA synchronous").fetchone()[0] == full
        with ledger._engine.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"
    else:
        assert driver.execute("SHOW synchronous_commit").fetchone()[0] == "on"
        assert driver.execute("SHOW fsync").fetchone()[0] == "on"


def test_no_row_of_any_table_can_be_written_twice(charged_ledger: Ledger) -> None:
    account = open_patients(charged_ledger, "others", digest="records")
    charged_ledger.charge_training(account, "head/1", "digest", PureCost(0.5))
    charged_ledger.store_answers(NewAnswers(account.id, (b"q" * 16,), b"answer"))
    for table in inspect(charged_ledger._engine).get_table_names():
        with (
            charged_ledger._engine.connect() as connection,
            pytest.raises(IntegrityError, match=r"(?i)unique"),
        ):
            connection.execute(text(f"INSERT INTO {table} SELECT * FROM {table}"))


def test_the_index_of_rare_rows_omits_charges(ledger: Ledger) -> None:
    schema = inspect(ledger._engine)
    (rare,) = (index for index in schema.get_indexes("journal") if index["name"] == "journal_rare")
    assert "charge" in str(rare["dialect_options"][f"{schema.dialect.name}_where"])


@pytest.mark.parametrize(
    ("spent", "limit", "kept"), [(0, 10, True), (10, 10, True), (11, 10, False), (-1, 10, False)]
)
@pytest.mark.parametrize("table", ["accounts", "subaccounts"])
def test_a_constraint_forbids_an_overspent_account_or_quota(
    ledger: Ledger, table: str, spent: int, limit: int, kept: bool
) -> None:
    charge_patients(ledger)
    change = f"UPDATE {table} SET spent_units = {spent}, limit_units = {limit}"
    with ledger._engine.connect() as connection:
        if kept:
            connection.execute(text(change))
        else:
            with pytest.raises(IntegrityError, match=r"(?i)check.*never_overspent"):
                connection.execute(text(change))
        connection.rollback()


def test_a_new_ledger_has_a_salt_of_256_bits_no_secret_of_sessions_and_an_empty_account_of_keys(
    path: Path,
) -> None:
    before = now()
    with Ledger(path) as ledger:
        with _read_transaction(ledger._engine) as connection:
            kept: dict[str, str] = dict(iter(connection.execute(text("SELECT name, value FROM meta"))))
            balance = "SELECT limit_units, spent_units, sequence, opened FROM accounts"
            *row, opened_at = connection.execute(text(balance)).one()
        assert ledger.verify().sound
    assert kept["version"] == str(len(MIGRATIONS))
    assert {name: len(value) for name, value in kept.items()} == {
        "ledger": 32,
        "query_hash": 4,
        "query_salt": 64,
        "version": 1,
    }
    assert row == [0, 0, 0]
    assert before <= opened_at <= now()


def test_a_new_migration_runs_once_and_keeps_the_balances_and_a_failed_one_changes_nothing(
    address: str,
) -> None:
    def widen(connection):
        connection.execute(text("ALTER TABLE clients ADD COLUMN note TEXT"))

    def fail(_: object) -> None:
        raise LedgerDamaged("broken step")

    steps = (*MIGRATIONS, widen)
    with Ledger(address) as ledger:
        account = open_patients(ledger)
        ledger.charge(Charge(account.id, ledger.client("ann"), "m/1", 5, rows=1))
    engine = _open_engine(address)
    with pytest.raises(LedgerDamaged, match="broken step"):
        _migrate(engine, (*steps, fail))
    assert "note" not in {column["name"] for column in inspect(engine).get_columns("clients")}
    for _ in range(2):
        _migrate(engine)
        assert _is_migrated(engine)
    for _ in range(2):
        _migrate(engine, steps)
    assert "note" in {column["name"] for column in inspect(engine).get_columns("clients")}
    with engine.connect() as connection:
        assert connection.execute(text("SELECT spent_units FROM accounts WHERE id = 2")).scalar_one() == 5
    with pytest.raises(LedgerDamaged, match="supports versions up to"):
        _migrate(engine)
    engine.dispose()


META, JOURNAL = "CREATE TABLE meta (name TEXT, value TEXT)", "CREATE TABLE journal (x INTEGER)"


@pytest.mark.parametrize(
    ("statements", "sentence"),
    [
        ([META], "not those of a Quietmax ledger"),
        ([JOURNAL], "not those of a Quietmax ledger"),
        ([META, JOURNAL], "schema version is missing"),
        ([META, JOURNAL, "INSERT INTO meta VALUES ('version', 'one')"], "schema version is missing"),
    ],
)
def test_tables_that_are_not_those_of_a_ledger_are_an_error(
    address: str, statements: list[str], sentence: str
) -> None:
    engine = _open_engine(address)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()
    with pytest.raises(LedgerDamaged, match=sentence):
        Ledger(address)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("postgresql://ann@host/ledger\n")
    return path


def test_the_address_and_the_password_of_the_ledger_can_be_read_from_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, secret: Path
) -> None:
    monkeypatch.delenv("QUIETMAX_LEDGER", raising=False)
    monkeypatch.setenv("QUIETMAX_LEDGER_FILE", str(secret))
    assert default_url() == "postgresql://ann@host/ledger"
    password = tmp_path / "password"
    password.write_text("p@ss/word:%\n")
    monkeypatch.setenv("QUIETMAX_LEDGER_PASSWORD_FILE", str(password))
    url = parse_url(default_url())
    assert (url.username, url.password, url.host, url.database) == ("ann", "p@ss/word:%", "host", "ledger")
    assert "word" not in hide_password(url)


def test_settings_of_the_ledger_that_contradict_each_other_are_errors(secret: Path) -> None:
    with pytest.raises(InvalidInput, match="Only one of `ledger` and `ledger_file`"):
        configured_url("ledger.sqlite", secret, None)
    for address in ("ledger.sqlite", "postgresql://ann:word@host/ledger"):
        with pytest.raises(
            InvalidInput, match="requires a postgresql:// ledger whose address has no password"
        ):
            configured_url(address, None, secret)


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe"])
def test_an_empty_secret_is_an_error_that_names_its_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(QuietmaxError, match=r"secret must be a text file that is not empty\."):
        configured_url(None, path, None)
    with pytest.raises(QuietmaxError, match=r"Cannot read the secret .*absent: No such file"):
        configured_url(None, tmp_path / "absent", None)


# --- hash chain ---------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NUMBER = st.integers(-(2**63), 2**63 - 1)


@given(st.tuples(*[NUMBER] * 3, *[TEXT] * 3, *[NUMBER] * 4, TEXT))
@example((2, 1, 5, "open", "Zoë", "m/1", 0, 0, 0, LIMIT, "{}"))
def test_a_row_is_hashed_as_the_json_list_that_the_standard_library_writes(fields: Any) -> None:
    written = json.dumps([*fields, START], separators=(",", ":"), ensure_ascii=False)
    expected = hashlib.sha256(written.encode("utf-8")).hexdigest()
    assert JournalEntry(**dict(zip(COLUMNS, (*fields, START), strict=False))).expected_hash() == expected
    assert len(START) == len(expected)


def test_the_digest_of_an_answer_is_a_keyed_hash_of_request_body_and_answer() -> None:
    content = b"answer 3 4 keybodydraw"
    expected = hashlib.blake2b(content, key=b"salt", digest_size=16).hexdigest()
    assert _answer_digest(b"salt", b"key", b"body", b"draw") == expected
    assert _answer_digest(b"salt", b"keyb", b"ody", b"draw") != expected, "the lengths count"

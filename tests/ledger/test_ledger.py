"""The database: its format, its locks, what its failures read like, and what verification finds in forged rows."""

from __future__ import annotations

import hashlib
import sqlite3
from dataclasses import replace

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import OperationalError
from sqlalchemy.schema import CreateTable

from quietmax.accounting import LIMIT, PureCost
from quietmax.ledger import Charge, Charged, Ledger, LedgerDamaged, NewAnswers, Subaccount, Terms, database
from quietmax.ledger import answer_cache as cache_module
from quietmax.ledger import verify as verify_module
from quietmax.ledger.accounts import now
from quietmax.ledger.answer_cache import AnswerCache
from quietmax.ledger.database import (
    Cursor,
    accounts,
    answers,
    clients,
    migrate,
    open_engine,
    parse_url,
    read_transaction,
    unavailable,
    write_transaction,
)
from quietmax.ledger.journal import START, JournalEntry
from quietmax.ledger.verify import verify


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.sqlite"


def _charged(ledger, rows=3):
    account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
    ann = ledger.client("ann")
    for _ in range(rows):
        ledger.charge(Charge(account.id, ann, "m/1", 1000, rows=1))
    return ledger.account("patients")


# --- format -------------------------------------------------------------------------------------------------------


def test_a_new_ledger_is_of_version_2_with_secrets_of_256_bits(path):
    with Ledger(path) as ledger:
        with read_transaction(ledger._engine) as connection:
            kept = dict(connection.execute(text("SELECT name, value FROM meta")).all())
        assert len(ledger.session_secret) == 32
        assert ledger.verify().sound
    assert kept["version"] == "2"
    assert {name: len(value) for name, value in kept.items()} == {
        "ledger": 32,
        "query_salt": 64,
        "session_secret": 64,
        "version": 1,
    }


def test_the_book_of_keys_begins_empty(path):
    before = now()
    with Ledger(path) as ledger, read_transaction(ledger._engine) as connection:
        *row, opened_at = connection.execute(
            text("SELECT limit_units, spent_units, sequence, opened FROM accounts")
        ).one()
    assert row == [0, 0, 0]
    assert before <= opened_at <= now()


def test_the_folders_of_a_new_ledger_are_made(tmp_path):
    with Ledger(tmp_path / "a" / "b" / "ledger.sqlite") as ledger:
        assert ledger.accounts() == []


def test_a_row_is_hashed_as_one_json_list_in_utf_8():
    row = JournalEntry(2, 1, 5, "open", "Zoë", "m/1", 0, 0, 0, LIMIT, "{}", START)
    written = f'[2,1,5,"open","Zoë","m/1",0,0,0,{LIMIT},"{{}}","{START}"]'
    assert row.expected_hash() == hashlib.sha256(written.encode("utf-8")).hexdigest()
    assert len(START) == len(row.expected_hash())


@pytest.mark.parametrize(
    ("statements", "sentence"),
    [
        (["CREATE TABLE meta (name TEXT, value TEXT)"], "not those of a Quietmax ledger"),
        (["CREATE TABLE journal (x INTEGER)"], "not those of a Quietmax ledger"),
        (
            ["CREATE TABLE meta (name TEXT, value TEXT)", "CREATE TABLE journal (x INTEGER)"],
            "schema version is missing",
        ),
        (
            [
                "CREATE TABLE meta (name TEXT, value TEXT)",
                "CREATE TABLE journal (x INTEGER)",
                "INSERT INTO meta VALUES ('version', 'one')",
            ],
            "schema version is missing",
        ),
    ],
)
def test_tables_that_are_no_ledger_are_left_alone(path, statements, sentence):
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)
    engine = open_engine(path)
    with pytest.raises(LedgerDamaged, match=sentence):
        migrate(engine)
    engine.dispose()


def test_a_server_numbers_accounts_clients_and_answers_itself():
    for table in (accounts, clients, answers):
        assert "id BIGSERIAL" in str(CreateTable(table).compile(dialect=postgresql.dialect()))


def test_the_number_of_a_stored_answer_is_never_given_again(path):
    """The shelf remembers the last number it has seen, and would never look at a smaller one."""
    with Ledger(path) as ledger:
        account = _charged(ledger)
        ledger.store_answers(NewAnswers(account.id, (b"a" * 16,), b"x"))
        with write_transaction(ledger._engine) as connection:
            connection.execute(text("DELETE FROM answers"))
        ledger.store_answers(NewAnswers(account.id, (b"b" * 16,), b"y"))
        asked = Charge(account.id, ledger.client("ann"), "m/1", 1, 1, queries=(b"b" * 16,))
        assert dict(ledger.charge(asked).cached) == {b"b" * 16: b"y"}
        with read_transaction(ledger._engine) as connection:
            assert connection.execute(text("SELECT id FROM answers")).scalar_one() == 2


# --- addresses and failures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheme", ["postgresql", "postgres", "postgresql+psycopg"], ids=["long", "short", "driver"]
)
def test_every_spelling_of_a_servers_address_is_understood(scheme):
    url = parse_url(f"{scheme}://ann@host/ledger")
    assert (url.drivername, url.username, url.database) == ("postgresql+psycopg", "ann", "ledger")


def test_a_sqlite_address_and_a_path_mean_the_same_file(path):
    assert parse_url(f"sqlite:///{path}").database == parse_url(path).database == str(path)


def test_a_failure_names_the_file_and_the_first_line_of_the_cause(path):
    engine = open_engine(path)
    sentence = str(unavailable(engine, ValueError("the disk is full\nand much more")))
    assert sentence.startswith(f"The ledger {path} is not available: the disk is full. ")
    assert ": ValueError." in str(unavailable(engine, ValueError()))
    wrapped = OperationalError("SELECT secret", {"secret": 1}, sqlite3.OperationalError("locked"))
    assert ": locked." in str(unavailable(engine, wrapped))
    assert len(str(unavailable(engine, ValueError("x" * 10_000)))) < 500
    engine.dispose()


def test_a_transaction_that_writes_holds_the_files_lock_from_its_start(path):
    with Ledger(path) as ledger:
        _charged(ledger)
        other = sqlite3.connect(path, timeout=0, isolation_level=None)
        with write_transaction(ledger._engine), pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
        with read_transaction(ledger._engine):
            other.execute("BEGIN IMMEDIATE")
        other.close()


def test_a_ledger_nobody_closed_does_not_keep_the_process_alive(path):
    with Ledger(path) as ledger:
        assert ledger.writer._thread.daemon
        assert ledger.writer.batches == 0


def test_a_server_that_fell_silent_is_given_up_after_the_seconds_of_every_other_wait(monkeypatch):
    def remember(_, **options):
        settings.update(options["connect_args"])
        raise ConnectionError

    settings: dict = {}
    monkeypatch.setattr(database, "create_engine", remember)
    with pytest.raises(ConnectionError):
        open_engine("postgresql://host/ledger")
    assert settings["tcp_user_timeout"] == 1000 * settings["keepalives_idle"]
    assert f"lock_timeout={settings['keepalives_idle']}s" in settings["options"]
    assert "synchronous_commit=on" in settings["options"]


@pytest.mark.parametrize("address", ["postgresql"], indirect=True)
def test_a_postgresql_server_that_dropped_its_connections_is_used_again(address):
    with Ledger(address) as ledger:
        _charged(ledger)
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE pid <> pg_backend_pid() AND datname = current_database()"
            )
        assert ledger.account("patients").spent_units == 3000


# --- the shelf ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_stored_answers_are_found_however_many_are_read_at_once(path, rows, monkeypatch):
    monkeypatch.setattr(cache_module, "_ROWS_PER_READ", 2)
    keys = [bytes([number]) * 16 for number in range(rows)]
    with Ledger(path) as ledger:
        account = _charged(ledger)
        for number, key in enumerate(keys):
            ledger.store_answers(NewAnswers(account.id, (key,), b"%d" % number))
        with write_transaction(ledger._engine) as connection:
            found = AnswerCache().find(Cursor(connection), account.id, keys)
            assert found == {key: b"%d" % number for number, key in enumerate(keys)}
            for most in range(1, rows + 1):
                latest = AnswerCache(most).find(Cursor(connection), account.id, keys)
                assert list(latest) == keys[-most:]


def test_the_shelf_keeps_as_many_answers_as_it_says_and_forgets_the_oldest(path):
    keys = [bytes([number]) * 16 for number in range(6)]
    with Ledger(path) as ledger:
        account = _charged(ledger)
        with write_transaction(ledger._engine) as connection:
            cursor, answer_cache = Cursor(connection), AnswerCache(max_answers=4)
            for number, key in enumerate(keys):
                cursor.execute(
                    "INSERT INTO answers (account, keys, answers) VALUES (?, ?, ?)", (account.id, key, b"x")
                )
                assert (
                    list(answer_cache.find(cursor, account.id, keys)) == keys[max(0, number - 3) : number + 1]
                )


# --- verification -------------------------------------------------------------------------------------------------


def test_verification_counts_accounts_and_rows(path):
    with Ledger(path) as ledger:
        _charged(ledger)
        ledger.create_key("ann")
        found = ledger.verify()
        assert (found.accounts, found.rows, found.faults) == (1, 5, ())
        assert found.to_json() == {"sound": True, "accounts": 1, "rows": 5, "faults": []}


def test_a_ledger_is_verified_as_it_was_at_the_start_though_charges_go_on(ledger, monkeypatch):
    account = _charged(ledger)
    ann = ledger.client("ann")
    entries = verify_module.read_journal

    def meanwhile(connection, number):
        assert isinstance(ledger.charge(Charge(account.id, ann, "m/1", 1, rows=1)), Charged)
        return entries(connection, number)

    monkeypatch.setattr(verify_module, "read_journal", meanwhile)
    found = ledger.verify()
    assert (found.rows, found.faults) == (4, ())
    assert ledger.account("patients").sequence == 6


def test_a_quota_for_a_client_who_never_asked_is_sound(path):
    with Ledger(path) as ledger:
        account = _charged(ledger)
        ledger.client("bob")
        ledger.set_quota("patients", "bob", 0.5, "half for bob later")
        assert Subaccount("bob", LIMIT // 2, 0, 0) in ledger.subaccounts(account)
        assert ledger.verify().sound


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"spent_units": 2001}, "the balance at row 4 is not the sum of the charges"),
        ({"units": -500, "spent_units": 1500}, "the balance at row 4 is not the sum of the charges"),
        ({"limit_units": 2999}, "the balance at row 4 exceeds the budget"),
        ({"limit_units": 2 * LIMIT}, "the budget changes at row 4 without a grant"),
        ({"kind": "quota", "detail": "{"}, "row 4 cannot be read"),
        ({"client": "bob"}, "the balance of client 'ann' is not the sum of its charges"),
        ({"sequence": 5}, "row 4 is missing"),
        ({"sequence": 7}, "rows 4 to 6 are missing"),
    ],
)
def test_a_forged_last_row_is_found_though_its_hash_and_the_account_fit(path, change, fault):
    with Ledger(path) as ledger:
        _charged(ledger)
        last = list(ledger.export("patients"))[-1]
        forged = replace(last, **change)
        forged = replace(forged, hash=forged.expected_hash())
        with write_transaction(ledger._engine) as connection:
            fields = forged.to_json()
            setting = ", ".join(f"{name} = :{name}" for name in fields if name != "account")
            connection.execute(
                text(f"UPDATE journal SET {setting} WHERE account = :account AND sequence = {last.sequence}"),
                fields,
            )
            connection.execute(
                text(
                    "UPDATE accounts SET sequence = :sequence, head = :hash, spent_units = :spent_units,"
                    " limit_units = MAX(:limit_units, :spent_units) WHERE id = :account"
                ),
                fields,
            )
            found = verify(connection).faults
            connection.rollback()
        assert any(fault in each for each in found), found
        assert ledger.verify().sound


def test_a_spent_budget_and_a_revoked_one_are_sound(path):
    with Ledger(path) as ledger:
        account = _charged(ledger)
        ledger.charge(Charge(account.id, ledger.client("ann"), "m/1", LIMIT - 3000, rows=1))
        assert ledger.account("patients").remaining_units == 0
        assert ledger.verify().sound
        ledger.revoke("patients", None, "the study is over")
        assert ledger.verify().sound


def test_an_anchor_holds_as_long_as_its_row_is_in_the_chain(path):
    with Ledger(path) as ledger:
        _charged(ledger)
        rows = list(ledger.export("patients"))
        for row in rows:
            assert ledger.verify({"patients": (row.sequence, row.hash)}).sound
        missing = ledger.verify({"patients": (len(rows) + 1, rows[-1].hash)})
        assert missing.faults == ("Account 'patients': row 5 is not the one that was written down.",)
        assert not ledger.verify({"patients": (1, rows[1].hash)}).sound

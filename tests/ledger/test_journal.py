from __future__ import annotations

import json
from dataclasses import replace

import pytest
from sqlalchemy import inspect, text

from quietmax.accounting import LIMIT, GaussianCost, PureCost
from quietmax.errors import InvalidInput
from quietmax.ledger import (
    Charge,
    Charged,
    Ledger,
    LedgerDamaged,
    LedgerUnavailable,
    NewAnswers,
    StoredAnswer,
    Terms,
    find_key,
)
from quietmax.ledger.accounts import now
from quietmax.ledger.database import MIGRATIONS, Migration, default_url, migrate, open_engine, parse_url
from quietmax.ledger.journal import START
from quietmax.ledger.verify import verify


@pytest.fixture
def spent(ledger):
    """A ledger with an account, a quota, two keys (one revoked) and nine charges."""
    account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
    _, key = ledger.create_key("ann")
    _, gone = ledger.create_key("bob", "admin", days=30)
    ledger.revoke_key(gone.id)
    ledger.set_quota("patients", "ann", 0.5, "half for ann alone")
    for number in range(9):
        ledger.charge(Charge(account.id, key.client_id, "m/1", 1000 + number, rows=1))
    assert ledger.verify().sound
    return ledger


def _faults_after(ledger, *statements):
    """What verification finds after the statements, which are undone again."""
    with ledger._engine.connect() as connection, connection.begin() as transaction:
        for statement in statements:
            assert connection.execute(text(statement)).rowcount > 0
        found = verify(connection).faults
        transaction.rollback()
    assert ledger.verify().sound
    return found


def test_an_edited_row_is_found_whichever_field_was_edited(spent):
    edits = {
        "units": 1,
        "time": 1,
        "client": "'eve'",
        "model": "'other/1'",
        "answers": 9,
        "detail": "'{}'",
        "spent_units": 5,
        "limit_units": LIMIT + 1,
        "kind": "'grant'",
        "previous": f"'{START}'",
        "hash": f"'{START}'",
    }
    for field, value in edits.items():
        faults = _faults_after(
            spent, f"UPDATE journal SET {field} = {value} WHERE sequence = 5 AND account = 2"
        )
        assert "Account 'patients': row 5 was edited or moved." in faults, field


def test_an_edited_row_with_a_new_hash_of_its_own_is_found_by_the_next_row(spent):
    row = next(row for row in spent.export("patients") if row.sequence == 5)
    forged = replace(row, model="other/1").expected_hash()
    faults = _faults_after(
        spent,
        f"UPDATE journal SET model = 'other/1', hash = '{forged}' WHERE sequence = 5 AND account = 2",
    )
    assert faults == (
        "Account 'patients': row 6 does not follow the row before it: one of them was edited or moved.",
    )


@pytest.mark.parametrize("row", [1, 4, 11])
def test_a_missing_row_is_found_at_the_start_the_middle_and_the_end(spent, row):
    faults = _faults_after(spent, f"DELETE FROM journal WHERE sequence = {row} AND account = 2")
    assert any(f"row {row} is missing" in fault or "the last row is 10" in fault for fault in faults)


def test_several_missing_rows_in_a_row_are_named(spent):
    faults = _faults_after(spent, "DELETE FROM journal WHERE sequence BETWEEN 4 AND 6 AND account = 2")
    assert "Account 'patients': rows 4 to 6 are missing." in faults


def test_two_rows_that_changed_places_are_found(spent):
    faults = _faults_after(
        spent,
        *(
            f"UPDATE journal SET sequence = {new} WHERE sequence = {old} AND account = 2"
            for old, new in ((4, 99), (5, 4), (99, 5))
        ),
    )
    assert "Account 'patients': row 4 was edited or moved." in faults
    assert "Account 'patients': row 5 was edited or moved." in faults


def test_a_changed_balance_quota_or_key_is_found(spent):
    nine = """'{"measure": "pure", "epsilon": 9.0}'"""
    for change, expected in {
        "UPDATE accounts SET spent_units = 1 WHERE id = 2": "the balance is not that of the last row",
        "UPDATE accounts SET limit_units = limit_units + 1 WHERE id = 2": "the budget is not that of the last row",
        "UPDATE accounts SET sequence = 10 WHERE id = 2": "the last row is 11, but should be 10",
        f"UPDATE accounts SET head = '{START}' WHERE id = 2": "the last row is not the one that the account names",
        f"UPDATE accounts SET total = {nine} WHERE id = 2": "its total or terms are not those it was opened with",
        "UPDATE subaccounts SET spent_units = 3": "the balance of client 'ann' is not the sum of its charges",
        "UPDATE subaccounts SET limit_units = NULL": "the quota of client 'ann' is not in the journal",
        "DELETE FROM subaccounts": "the subaccount of client 'ann' is missing",
        "UPDATE keys SET role = 'admin' WHERE role = 'client'": "is not as it was created",
        "UPDATE keys SET revoked = NULL WHERE revoked IS NOT NULL": "is not revoked as the journal states",
        "DELETE FROM keys WHERE role = 'client'": "is missing",
    }.items():
        assert any(expected in fault for fault in _faults_after(spent, change)), change


def test_a_wholly_rewritten_chain_is_found_by_a_head_written_down_before(ledger, tmp_path):
    account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
    ann = ledger.client("ann")
    ledger.charge(Charge(account.id, ann, "m/1", 1000, rows=1))
    before = ledger.account("patients")
    with Ledger(tmp_path / "rewritten.sqlite") as other:
        other.open_account("patients", PureCost(1.0), Terms(1.0))
        for _ in range(3):
            other.charge(Charge(account.id, other.client("ann"), "m/1", 1, rows=1))
        assert other.verify().sound
        anchored = other.verify({"patients": (before.sequence, before.head)})
        assert anchored.faults == ("Account 'patients': row 2 is not the one that was written down.",)
    ledger.charge(Charge(account.id, ann, "m/1", 1000, rows=1))
    assert ledger.verify({"patients": (before.sequence, before.head)}).sound
    assert not ledger.verify({"other": (1, START)}).sound


def test_the_export_holds_every_row_and_its_hashes_can_be_checked_by_anyone(spent):
    rows = list(spent.export("patients"))
    assert [row.sequence for row in rows] == list(range(1, 12))
    assert [row.kind for row in rows] == ["open", "quota", *["charge"] * 9]
    assert all(row.expected_hash() == row.hash for row in rows)
    assert [row.previous for row in rows] == [START, *(row.hash for row in rows[:-1])]
    assert len(list(spent.export())) == len(rows) + 3
    assert json.loads(json.dumps(rows[0].to_json()))["limit_units"] == LIMIT


def test_a_retrained_model_continues_the_account_of_its_records(ledger):
    first = ledger.open_account("patients", PureCost(1.0), Terms(1.0), digest="abc")
    again = ledger.open_account("patients-again", PureCost(1.0), Terms(1.0), digest="abc")
    assert again.id == first.id
    with pytest.raises(InvalidInput, match="belong to the account 'patients'"):
        ledger.open_account("mine", PureCost(1.0), Terms(1.0), digest="abc", named_by_owner=True)
    assert [account.name for account in ledger.accounts()] == ["patients"]


def test_records_move_to_another_account_only_with_a_reason_in_words(ledger):
    ledger.open_account("patients", PureCost(1.0), Terms(1.0), digest="abc")
    with pytest.raises(InvalidInput, match="must have at least 3 words"):
        ledger.open_account("mine", PureCost(1.0), Terms(1.0), digest="abc", because="because")
    words = "The ethics board allowed a second study."
    other = ledger.open_account("mine", PureCost(1.0), Terms(1.0), digest="abc", because=words)
    assert other.name == "mine"
    assert ledger.find_account("patients", "abc").name == "mine"
    assert sum(words in row.detail for row in ledger.export()) == 2
    assert ledger.verify().sound


def test_an_account_keeps_its_budget_until_a_grant(ledger):
    account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
    with pytest.raises(InvalidInput, match="was opened with epsilon = 1"):
        ledger.open_account("patients", PureCost(2.0), Terms(2.0))
    granted = ledger.grant("patients", Terms(2.0), "The board allows twice as much.")
    assert (granted.limit_units, granted.limit) == (2 * LIMIT, PureCost(2.0))
    assert ledger.open_account("patients", PureCost(1.0), Terms(1.0)).limit_units == 2 * LIMIT
    ledger.charge(Charge(account.id, ledger.client("ann"), "m/1", 3 * LIMIT // 2, rows=1))
    with pytest.raises(InvalidInput, match="cannot become epsilon = 1"):
        ledger.grant("patients", Terms(1.0), "This would be too little.")
    assert ledger.account("patients").remaining == PureCost(0.5)
    assert ledger.verify().sound


def test_a_grant_in_the_gaussian_currency_counts_squares(ledger):
    ledger.open_account("patients", GaussianCost(1.0), Terms(1.0, 1e-5, "published"))
    granted = ledger.grant("patients", Terms(2.0, 1e-5, "published"), "Twice the mu is allowed.")
    assert (granted.limit_units, granted.limit) == (4 * LIMIT, GaussianCost(2.0))


def test_revoking_takes_back_what_is_unspent(ledger):
    account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
    ann, bob = ledger.client("ann"), ledger.client("bob")
    ledger.charge(Charge(account.id, ann, "m/1", 100, rows=1))
    ledger.revoke("patients", "ann", "ann has left us")
    assert ledger.charge(Charge(account.id, ann, "m/1", 1, rows=1)).limit == "quota"
    ledger.charge(Charge(account.id, bob, "m/1", 1, rows=1))
    assert ledger.revoke("patients", None, "the study is over").remaining_units == 0
    assert ledger.charge(Charge(account.id, bob, "m/1", 1, rows=1)).limit == "budget"
    assert ledger.verify().sound


@pytest.mark.parametrize("name", ["", "a b", "(keys)", "-x", "x" * 65, "näme", "a/b"])
def test_odd_names_are_refused_in_a_sentence(ledger, name):
    with pytest.raises(InvalidInput, match="must be 1 to 64 letters"):
        ledger.open_account(name, PureCost(1.0), Terms(1.0))
    with pytest.raises(InvalidInput, match="must be 1 to 64 letters"):
        ledger.create_key(name)


def test_an_unknown_account_or_client_is_named_with_those_there_are(ledger):
    ledger.open_account("patients", PureCost(1.0), Terms(1.0))
    with pytest.raises(InvalidInput, match=r"no account 'nobody'\. Its accounts: patients"):
        ledger.account("nobody")
    with pytest.raises(InvalidInput, match="no account"):
        ledger.account("(keys)")
    with pytest.raises(InvalidInput, match="no client 'eve'"):
        ledger.set_quota("patients", "eve", 0.1, "some words of reason")


def test_a_key_has_256_random_bits_and_only_its_hash_is_kept(ledger):
    shown, key = ledger.create_key("ann", "admin", days=1)
    other, _ = ledger.create_key("ann")
    secret = shown.split("_", 2)[2]
    assert len(secret) == 43
    assert shown != other
    assert key.expires == key.created + 24 * 3600 * 10**6
    with ledger._engine.connect() as connection:
        everything = [
            str(row)
            for table in inspect(connection).get_table_names()
            for row in connection.execute(text(f"SELECT * FROM {table}"))
        ]
    assert not any(secret in row for row in everything)


def _known_keys(ledger):
    keys = ledger.keys()
    return {key.id: key for key in keys}


def test_only_the_right_living_key_is_found(ledger):
    shown, key = ledger.create_key("ann", days=1)
    other, _ = ledger.create_key("bob")
    known = _known_keys(ledger)
    assert find_key(known, shown, now()).client == "ann"
    mixed = f"qm_{key.id}_{other.split('_', 2)[2]}"
    for wrong in (mixed, shown[:-1], shown + "A", "", "qm__", f"qm_{'0' * 16}_{'A' * 43}", shown.upper()):
        assert find_key(known, wrong, now()) is None
    assert find_key(known, shown, key.expires) is None
    ledger.revoke_key(key.id)
    assert find_key(_known_keys(ledger), shown, now()) is None
    with pytest.raises(InvalidInput, match="no key with the id"):
        ledger.revoke_key("0000")


def test_secrets_are_compared_in_constant_time(ledger, monkeypatch):
    compared = []
    monkeypatch.setattr(
        "quietmax.ledger.api_keys.hmac.compare_digest", lambda a, b: compared.append((a, b)) or a == b
    )
    shown, _ = ledger.create_key("ann")
    known = _known_keys(ledger)
    find_key(known, shown, now())
    find_key(known, "nonsense", now())
    assert len(compared) == 2
    assert all(len(one) == len(other) == 64 for one, other in compared)


def test_the_spending_curve_starts_at_zero_and_ends_at_the_balance(spent):
    account = spent.account("patients")
    curve = spent.spending_history(account, points=4)
    assert curve[0].spent_units == 0
    assert curve[-1].spent_units == account.spent_units
    assert len(curve) <= 5
    assert curve == sorted(curve, key=lambda point: (point.time, point.spent_units))


def test_an_empty_database_gets_the_newest_tables_and_keeps_them(address):
    engine = open_engine(address)
    assert migrate(engine) == MIGRATIONS[-1].version == migrate(engine)
    engine.dispose()


def test_a_further_migration_runs_once_and_keeps_what_was_spent(address):
    def widen(connection):
        connection.execute(text("ALTER TABLE clients ADD COLUMN note TEXT"))

    steps = (*MIGRATIONS, Migration(MIGRATIONS[-1].version + 1, "a note on clients", widen))
    with Ledger(address) as ledger:
        account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
        ledger.charge(Charge(account.id, ledger.client("ann"), "m/1", 5, rows=1))
    engine = open_engine(address)
    for _ in range(2):
        assert migrate(engine, steps) == steps[-1].version
    with engine.connect() as connection:
        assert "note" in {column["name"] for column in inspect(connection).get_columns("clients")}
        assert connection.execute(text("SELECT spent_units FROM accounts WHERE id = 2")).scalar_one() == 5
    with pytest.raises(LedgerDamaged, match="supports versions up to"):
        migrate(engine)
    engine.dispose()


def test_a_migration_that_fails_leaves_the_ledger_as_it_was(address):
    def fail(connection):
        connection.execute(text("ALTER TABLE clients ADD COLUMN note TEXT"))
        raise LedgerDamaged("broken step")

    with Ledger(address):
        pass
    engine = open_engine(address)
    with pytest.raises(LedgerDamaged, match="broken step"):
        migrate(engine, (*MIGRATIONS, Migration(99, "broken", fail)))
    with engine.connect() as connection:
        assert "note" not in {column["name"] for column in inspect(connection).get_columns("clients")}
    assert migrate(engine) == MIGRATIONS[-1].version
    engine.dispose()


def test_a_database_of_something_else_is_left_alone(address):
    engine = open_engine(address)
    with engine.connect() as connection, connection.begin():
        connection.execute(text("CREATE TABLE journal (x INTEGER)"))
    engine.dispose()
    with pytest.raises(LedgerDamaged, match="not those of a Quietmax ledger"):
        Ledger(address)


@pytest.mark.parametrize("wrong", ["mysql://host/x", "sqlite://", "sqlite:///:memory:", "://", "http://x"])
def test_an_address_of_no_known_database_is_refused(wrong):
    with pytest.raises(InvalidInput, match=r"must be a file, sqlite:///FILE or postgresql://"):
        parse_url(wrong)


def test_the_default_ledger_is_one_file_per_user_wherever_the_command_runs(monkeypatch, tmp_path):
    monkeypatch.delenv("QUIETMAX_LEDGER", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_url() == f"sqlite:///{tmp_path / 'quietmax' / 'ledger.sqlite'}"
    monkeypatch.setenv("QUIETMAX_LEDGER", "postgresql://host/ledger")
    assert default_url() == "postgresql://host/ledger"


def test_an_unreachable_server_is_one_sentence_without_the_password():
    with pytest.raises(LedgerUnavailable, match="is not available") as refusal:
        Ledger("postgresql://someone:secret@127.0.0.1:9/ledger")
    assert "secret" not in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_sqlite_ledger_that_was_moved_away_is_not_charged(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
        ann = ledger.client("ann")
        charge = Charge(account.id, ann, "m/1", 1, rows=1)
        path.rename(tmp_path / "elsewhere.sqlite")
        assert "was moved, deleted or replaced" in str(ledger.charge(charge).error)
        with pytest.raises(LedgerUnavailable):
            ledger.ping()
        (tmp_path / "elsewhere.sqlite").rename(path)
        assert ledger.charge(charge).units == 1
        ledger.ping()


def test_a_full_disk_refuses_cleanly_and_the_ledger_recovers(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
        ann = ledger.client("ann")
        charge = Charge(account.id, ann, "m/1", 1, rows=1)
        ledger.charge(charge)

        def limit_pages(count):
            driver = ledger.writer._connection.connection.driver_connection
            driver.execute(f"PRAGMA max_page_count={count}")

        limit_pages(1)
        outcomes: list = []
        while not outcomes or isinstance(outcomes[-1], Charged):
            outcomes.append(ledger.charge(charge))
            assert len(outcomes) < 300
        assert "disk is full" in str(outcomes[-1].error)
        paid = len(outcomes)
        assert ledger.account("patients").spent_units == paid
        assert ledger.verify().sound
        assert ledger.charge(charge).units == 1
        ledger.ping()
        assert ledger.account("patients").spent_units == paid + 1


def test_answers_are_stored_as_soon_as_the_ledger_is_back(tmp_path):
    path = tmp_path / "ledger.sqlite"
    query = b"q" * 16
    with Ledger(path) as ledger:
        account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
        path.rename(tmp_path / "away")
        told: list = []
        ledger.submit_answers(NewAnswers(account.id, (query,), b"answer"), told.append)
        (tmp_path / "away").rename(path)
        asked = ledger.charge(Charge(account.id, ledger.client("ann"), "m/1", 1, 1, queries=(query,)))
        while not told:
            asked = ledger.charge(Charge(account.id, ledger.client("ann"), "m/1", 1, 1, queries=(query,)))
        assert told == [StoredAnswer(b"", True)]
        assert dict(asked.cached) == {query: b"answer"}

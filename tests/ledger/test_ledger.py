from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quietmax.accounting import LIMIT, PureCost
from quietmax.errors import LedgerDamaged, LedgerUnavailable
from quietmax.ledger import (
    AccountState,
    ApiKey,
    Charge,
    Charged,
    Failed,
    InvalidKey,
    Ledger,
    LimitExceeded,
    NewAnswers,
    Replayed,
    RequestIdReused,
    SpendingPoint,
    StoredAnswer,
    Subaccount,
    Terms,
    Verification,
)
from quietmax.ledger.journal import START, JournalEntry
from quietmax.ledger.transactions import AccountTransaction, _Balance
from tests.ledger.scenarios import (
    charge_error,
    edit,
    journal_kinds,
    open_patients,
    open_with_unit_cost,
    pay,
    writer_driver,
)


def test_results_are_immutable_and_frequent_objects_have_slots() -> None:
    immutable: list[Any] = [
        AccountState,
        ApiKey,
        Charge,
        Charged,
        Failed,
        InvalidKey,
        JournalEntry,
        LimitExceeded,
    ]
    immutable += [
        NewAnswers,
        Replayed,
        RequestIdReused,
        SpendingPoint,
        StoredAnswer,
        Subaccount,
        Terms,
        Verification,
    ]
    assert all(each.__dataclass_params__.frozen for each in immutable)
    for each in (
        AccountTransaction,
        Charge,
        Charged,
        JournalEntry,
        Failed,
        InvalidKey,
        LimitExceeded,
        Replayed,
        RequestIdReused,
        NewAnswers,
        StoredAnswer,
        _Balance,
    ):
        assert "__dict__" not in dir(each), each


def test_request_keys_have_32_bytes_and_query_keys_16(sqlite_ledger: Ledger) -> None:
    assert len(sqlite_ledger.request_key(1, "first")) == 32
    assert len(sqlite_ledger.query_key(b"model", b"query")) == 16


def test_request_keys_of_different_clients_differ(ledger: Ledger) -> None:
    assert ledger.request_key(1, "1 x") != ledger.request_key(11, " x")
    assert ledger.request_key(1, "x") != ledger.request_key(2, "x")


@pytest.mark.parametrize("name", ["query_salt", "session_secret"])
@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM meta WHERE name = '{}'",
        "UPDATE meta SET value = 'zz' WHERE name = '{}'",
        "UPDATE meta SET value = '' WHERE name = '{}'",
        "UPDATE meta SET value = x'00' WHERE name = '{}'",
    ],
)
def test_a_ledger_without_its_secrets_is_an_error(filled: Path, name: str, statement: str) -> None:
    edit(filled, statement.format(name))
    with pytest.raises(LedgerDamaged, match=f"The ledger's {name} is missing or was changed. Stop serving"):
        Ledger(filled)


def test_training_is_charged_once_for_each_model(ledger: Ledger) -> None:
    account = ledger.open_account("patients", PureCost(2.0), Terms(2.0))
    for _ in range(3):
        ledger.charge_training(account, "head/1", "digest one", PureCost(1.0))
    assert ledger.account("patients").spent_units == LIMIT // 2
    ledger.charge_training(account, "head/2", "digest two", PureCost(1.0))
    with pytest.raises(Exception, match="spent more than remains in the account 'patients'"):
        ledger.charge_training(account, "head/3", "digest three", PureCost(0.1))
    assert [entry.kind for entry in ledger.export("patients")] == ["open", "training", "training"]


def test_training_that_costs_nothing_is_recorded_too(sqlite_ledger: Ledger) -> None:
    account = open_patients(sqlite_ledger)
    sqlite_ledger.charge_training(account, "head/1", "digest", PureCost(0.0))
    assert journal_kinds(sqlite_ledger) == ["open", "training"]


def test_the_spending_history_starts_at_zero_and_ends_at_the_balance(charged_ledger: Ledger) -> None:
    account = charged_ledger.account("patients")
    curve = charged_ledger.spending_history(account, points=4)
    assert curve[0].spent_units == 0
    assert curve[-1].spent_units == account.spent_units
    assert len(curve) <= 5
    assert curve == sorted(curve, key=lambda point: (point.time, point.spent_units))


def test_the_spending_history_starts_with_the_first_row(ledger: Ledger) -> None:
    account, units = open_with_unit_cost(ledger)
    assert [point.spent_units for point in ledger.spending_history(ledger.account("patients"))] == [0]
    ledger.charge(Charge(account.id, ledger.client("ann"), "m/1", units, rows=1))
    spent = [point.spent_units for point in ledger.spending_history(ledger.account("patients"))]
    assert (spent[0], spent[-1]) == (0, units)


def test_the_export_has_every_row_and_its_hashes_can_be_recomputed(charged_ledger: Ledger) -> None:
    rows = list(charged_ledger.export("patients"))
    assert [row.sequence for row in rows] == list(range(1, 12))
    assert [row.kind for row in rows] == ["open", "quota", *["charge"] * 9]
    assert all(row.expected_hash() == row.hash for row in rows)
    assert [row.previous for row in rows] == [START, *(row.hash for row in rows[:-1])]
    assert len(list(charged_ledger.export())) == len(rows) + 3
    assert json.loads(json.dumps(rows[0].to_json()))["limit_units"] == LIMIT


def test_a_moved_sqlite_ledger_is_not_charged(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        account = open_patients(ledger)
        ann = ledger.client("ann")
        charge = Charge(account.id, ann, "m/1", 1, rows=1)
        path.rename(tmp_path / "elsewhere.sqlite")
        assert "was moved, deleted or replaced" in str(charge_error(ledger, charge))
        with pytest.raises(LedgerUnavailable):
            ledger.ping()
        (tmp_path / "elsewhere.sqlite").rename(path)
        assert pay(ledger, charge).units == 1
        ledger.ping()


def test_a_full_disk_is_an_error_and_the_ledger_recovers(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        account = open_patients(ledger)
        ann = ledger.client("ann")
        charge = Charge(account.id, ann, "m/1", 1, rows=1)
        ledger.charge(charge)

        writer_driver(ledger).execute("PRAGMA max_page_count=1")
        results: list[Any] = []
        while not results or isinstance(results[-1], Charged):
            results.append(ledger.charge(charge))
            assert len(results) < 300
        assert "disk is full" in str(results[-1].error)
        paid = len(results)
        assert ledger.account("patients").spent_units == paid
        assert ledger.verify().sound
        assert pay(ledger, charge).units == 1
        ledger.ping()
        assert ledger.account("patients").spent_units == paid + 1


def test_a_closed_ledger_charges_nothing(path: Path) -> None:
    with Ledger(path) as ledger:
        account = open_patients(ledger)
        charge = Charge(account.id, ledger.client("ann"), "m/1", 1, rows=1)
        assert isinstance(ledger.charge(charge), Charged)
    assert "The ledger is closed" in str(charge_error(ledger, charge))
    with pytest.raises(LedgerUnavailable, match="The ledger is closed"):
        ledger.store_answers(NewAnswers(account.id, (b"q" * 16,), b"answer"))
    with Ledger(path) as ledger:
        assert ledger.account("patients").spent_units == 1


def test_an_open_ledger_does_not_keep_the_process_alive(path: Path) -> None:
    with Ledger(path) as ledger:
        assert ledger.writer._thread.daemon
        assert ledger.writer.batches == 0

"""Edits that leave values of a wrong kind behind: SQLite keeps them, and looking must find them, not fall over them."""

from __future__ import annotations

import sqlite3

import pytest

from quietmax.accounting import PureCost
from quietmax.ledger import Charge, Ledger, LedgerDamaged, Terms


@pytest.fixture
def place(tmp_path):
    """The file of a ledger with an account, a quota, a key, two charges and a model without proof."""
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
        _, key = ledger.create_key("ann")
        ledger.set_quota("patients", "ann", 0.5, "half for ann alone")
        for _ in range(2):
            ledger.charge(Charge(account.id, key.client_id, "m/1", 1000, rows=1))
        ledger.record_unproven(account, "m/1", "conditional")
        assert ledger.verify().sound
    return path


def _edit(place, statement):
    with sqlite3.connect(place) as connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        assert connection.execute(statement).rowcount > 0
    connection.close()


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        (
            "UPDATE accounts SET total = 'zz' WHERE id = 2",
            "total or the terms of account 'patients' cannot",
        ),
        (
            "UPDATE accounts SET total = '[]' WHERE id = 2",
            "total or the terms of account 'patients' cannot",
        ),
        (
            f"UPDATE accounts SET total = '{DEEP}' WHERE id = 2",
            "total or the terms of account 'patients'",
        ),
        ("UPDATE accounts SET terms = '{\"bad\": 1}' WHERE id = 2", "total or the terms of account"),
        (
            "UPDATE accounts SET terms = '[1]' WHERE id = 2",
            "total or the terms of account 'patients' cannot",
        ),
        (
            'UPDATE accounts SET terms = \'{"epsilon": "x", "delta": 0, "reading": "proven"}\' WHERE id = 2',
            "total or the terms of account 'patients' cannot",
        ),
        (
            'UPDATE accounts SET terms = \'{"epsilon": 1, "delta": 0, "reading": "mine"}\' WHERE id = 2',
            "total or the terms of account 'patients' cannot",
        ),
        ("UPDATE accounts SET limit_units = 'abc' WHERE id = 2", "of account 'patients' is not an integer"),
        ("UPDATE accounts SET sequence = 'abc' WHERE id = 2", "of account 'patients' is not an integer"),
        ("UPDATE subaccounts SET spent_units = 1.5", "quota of client 'ann' is not an integer"),
        ("UPDATE subaccounts SET limit_units = 'abc'", "quota of client 'ann' is not an integer"),
    ],
)
def test_an_unreadable_account_is_a_fault_and_one_sentence_elsewhere(place, statement, expected):
    _edit(place, statement)
    with Ledger(place) as ledger:
        assert any(expected in fault for fault in ledger.verify().faults)
        with pytest.raises(LedgerDamaged, match=r"\. Stop serving from this ledger") as refusal:
            [ledger.subaccounts(account) for account in ledger.accounts()]
    assert expected in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, "'abc'") for name in ("units", "time", "answers", "spent_units", "limit_units")),
        *((name, "x'00ff'") for name in ("kind", "client", "model", "detail", "previous", "hash")),
    ],
)
def test_a_journal_row_with_a_value_of_a_wrong_kind_is_found(place, field, value):
    _edit(place, f"UPDATE journal SET {field} = {value} WHERE account = 2 AND sequence = 3")
    with Ledger(place) as ledger:
        faults = ledger.verify().faults
        with pytest.raises(LedgerDamaged, match="Row 3 of the journal of account 2 cannot be read"):
            list(ledger.export())
    assert any("row 3 was edited: a field has the wrong type" in fault for fault in faults)
    assert not any("missing" in fault for fault in faults if "client" not in fault)


@pytest.mark.parametrize("number", ["'abc'", "x'00'"])
def test_a_journal_row_whose_number_is_none_is_found(place, number):
    _edit(place, f"UPDATE journal SET sequence = {number} WHERE account = 2 AND sequence = 3")
    with Ledger(place) as ledger:
        faults = ledger.verify().faults
    assert "Account 'patients': row 3 is missing." in faults
    assert any("was edited: a field has the wrong type" in fault for fault in faults)


@pytest.mark.parametrize("detail", ["[]", "zz", "[[", "3", DEEP])
@pytest.mark.parametrize("row", [1, 2])
def test_a_journal_row_with_unreadable_details_is_found(place, detail, row):
    _edit(place, f"UPDATE journal SET detail = '{detail}' WHERE account = 2 AND sequence = {row}")
    with Ledger(place) as ledger:
        faults = ledger.verify().faults
    assert f"Account 'patients': row {row} was edited or moved." in faults
    assert f"Account 'patients': row {row} cannot be read." in faults


def test_an_unreadable_note_on_an_unproven_model_is_one_sentence(place):
    _edit(place, "UPDATE journal SET detail = 'zz' WHERE kind = 'unproven'")
    with (
        Ledger(place) as ledger,
        pytest.raises(LedgerDamaged, match="A journal row of account 2 cannot be read"),
    ):
        ledger.unproven_models(ledger.account("patients"))


def test_rows_of_accounts_that_do_not_exist_are_found_whatever_they_are_called(place):
    _edit(place, "UPDATE journal SET account = 'abc' WHERE account = 2 AND sequence = 3")
    _edit(place, "UPDATE journal SET account = 77 WHERE account = 2 AND sequence = 4")
    with Ledger(place) as ledger:
        faults = ledger.verify().faults
    assert "The journal has rows of account abc, which does not exist." in faults
    assert "The journal has rows of account 77, which does not exist." in faults


def test_a_key_with_a_value_of_a_wrong_kind_is_found(place):
    _edit(place, "UPDATE keys SET secret_hash = x'00'")
    with Ledger(place) as ledger:
        assert any("is not as it was created" in fault for fault in ledger.verify().faults)


@pytest.mark.parametrize(
    "change", ["secret_hash = x'00'", "created = 'abc'", "expires = 'abc'", "role = x'00'"]
)
def test_a_key_that_cannot_be_read_is_one_sentence(place, change):
    _edit(place, f"UPDATE keys SET {change}")
    with Ledger(place) as ledger, pytest.raises(LedgerDamaged, match=r"The key '.*' cannot be read"):
        ledger.keys()


def test_an_unreadable_note_on_a_model_that_took_an_account_whole_is_one_sentence(tmp_path):
    place = tmp_path / "ledger.sqlite"
    with Ledger(place) as ledger:
        account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
        ledger.charge_training(account, "m/1", "digest", "all")
        assert ledger.verify().sound
    _edit(place, "UPDATE journal SET detail = '[]' WHERE kind = 'exclusive'")
    with (
        Ledger(place) as ledger,
        pytest.raises(LedgerDamaged, match="A journal row of account 2 cannot be read"),
    ):
        ledger.grant("patients", Terms(2.0), "The board allows more.")


def test_a_missing_book_of_keys_is_found(place):
    _edit(place, "DELETE FROM journal WHERE account = 1")
    _edit(place, "DELETE FROM accounts WHERE id = 1")
    with Ledger(place) as ledger:
        assert ledger.verify().faults == ("The account of the API keys is missing.",)


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
def test_a_ledger_without_its_own_secrets_is_refused_in_a_sentence(place, name, statement):
    _edit(place, statement.format(name))
    with pytest.raises(LedgerDamaged, match=f"The ledger's {name} is missing or was changed. Stop serving"):
        Ledger(place)

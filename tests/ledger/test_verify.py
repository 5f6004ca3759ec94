from __future__ import annotations

import itertools
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from quietmax.accounting import GaussianCost, PureCost
from quietmax.accounting.costs import LIMIT
from quietmax.errors import LedgerDamaged
from quietmax.ledger import Charge, Ledger, Terms, database
from quietmax.ledger import verify as verify_module
from quietmax.ledger.accounts import Subaccount
from quietmax.ledger.database import (
    COLUMNS,
    KEYS_ACCOUNT,
    START,
    Cursor,
    _lock_accounts,
    _write_transaction,
    now,
)
from quietmax.ledger.transactions import Charged, NewAnswers, Part, Replayed
from quietmax.ledger.verify import _verify
from tests.ledger.scenarios import charge_for, charge_patients, edit, open_patients, pay

DEEP_JSON = "[" * 100_000
_NUMBERS = ("units", "time", "answers", "spent_units", "limit_units")
_TEXTS = ("kind", "client", "model", "detail", "previous", "hash")


def test_verification_counts_accounts_and_rows(path: Path) -> None:
    with Ledger(path) as ledger:
        charge_patients(ledger)
        ledger.create_key("ann")
        found = ledger.verify()
        assert (found.accounts, found.rows, found.faults) == (1, 6, ())
        assert found.to_json() == {"sound": True, "accounts": 1, "rows": 6, "faults": []}


def test_verification_sees_one_snapshot_while_charges_go_on(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    charge_patients(ledger)
    charge = charge_for(ledger)
    entries = verify_module._read_journal

    def meanwhile(connection, number):
        pay(ledger, charge)
        return entries(connection, number)

    monkeypatch.setattr(verify_module, "_read_journal", meanwhile)
    found = ledger.verify()
    assert (found.rows, found.faults) == (5, ())
    assert ledger.account("patients").sequence == 6


def test_an_unused_quota_a_free_part_and_a_budget_that_is_spent_or_revoked_are_sound(path: Path) -> None:
    with Ledger(path) as ledger:
        account = charge_patients(ledger)
        for number in range(2):
            ledger.charge_training(account, "head/1", f"model {number}", PureCost(0.0), split="split")
        assert ledger.parts(account) == {Part("split", "training"): 0}
        ledger.client("bob")
        ledger.set_quota("patients", "bob", 0.5, "half for bob later")
        assert Subaccount("bob", LIMIT // 2, 0, 0) in ledger.subaccounts(account)
        pay(ledger, charge_for(ledger, LIMIT - 3000))
        assert ledger.account("patients").remaining_units == 0
        assert ledger.verify().sound
        ledger.revoke("patients", None, "the study is over")
        assert ledger.verify().sound


def _faults_after(ledger, *statements):
    """What verification finds after the statements, which are undone again."""
    with ledger._engine.connect() as connection, connection.begin() as transaction:
        for statement in statements:
            assert connection.execute(text(statement)).rowcount > 0
        found = _verify(connection).faults
        transaction.rollback()
    assert ledger.verify().sound
    return found


def test_an_edited_row_is_found_whichever_field_was_edited(charged_ledger: Ledger) -> None:
    for field in COLUMNS[2:]:
        change = f"{field} = {field} || 'x'" if field in _TEXTS else f"{field} = {field} + 1"
        statement = f"UPDATE journal SET {change} WHERE sequence = 5 AND account = 2"
        faults = _faults_after(charged_ledger, statement)
        assert "Account 'patients': row 5 was edited or moved." in faults, field


def test_an_edited_row_with_a_new_hash_is_found_by_the_next_row(charged_ledger: Ledger) -> None:
    row = next(row for row in charged_ledger.export("patients") if row.sequence == 5)
    forged = replace(row, model="other/1").expected_hash()
    faults = _faults_after(
        charged_ledger,
        f"UPDATE journal SET model = 'other/1', hash = '{forged}' WHERE sequence = 5 AND account = 2",
    )
    assert faults == (
        "Account 'patients': row 6 does not follow the row before it: one of them was edited or moved.",
    )


NINE = """'{"measure": "pure", "epsilon": 9.0}'"""
EDITS = {
    "DELETE FROM journal WHERE sequence = 1 AND account = 2": "row 1 is missing",
    "DELETE FROM journal WHERE sequence = 4 AND account = 2": "row 4 is missing",
    "DELETE FROM journal WHERE sequence = 11 AND account = 2": "the last row is 10",
    "DELETE FROM journal WHERE sequence BETWEEN 4 AND 6 AND account = 2": "rows 4 to 6 are missing.",
    "UPDATE accounts SET spent_units = 1 WHERE id = 2": "the balance is not that of the last row",
    "UPDATE accounts SET limit_units = limit_units + 1 WHERE id = 2": "the budget is not that of the last row",
    "UPDATE accounts SET sequence = 10 WHERE id = 2": "the last row is 11, but should be 10",
    f"UPDATE accounts SET head = '{START}' WHERE id = 2": "the last row is not the one that the account names",
    f"UPDATE accounts SET total = {NINE} WHERE id = 2": "its total or terms are not those it was opened with",
    "UPDATE subaccounts SET spent_units = 3": "the balance of client 'ann' is not the sum of its charges",
    "UPDATE subaccounts SET limit_units = NULL": "the quota of client 'ann' is not in the journal",
    "DELETE FROM subaccounts": "the subaccount of client 'ann' is missing",
    "UPDATE keys SET role = 'admin' WHERE role = 'client'": "is not as it was created",
    "UPDATE keys SET revoked = NULL WHERE revoked IS NOT NULL": "is not revoked as the journal states",
    "DELETE FROM keys WHERE role = 'client'": "is missing",
}


def test_a_missing_row_and_a_changed_balance_quota_or_key_are_found(charged_ledger: Ledger) -> None:
    for change, expected in EDITS.items():
        assert any(expected in fault for fault in _faults_after(charged_ledger, change)), change
    moves = [
        f"UPDATE journal SET sequence = {new} WHERE sequence = {old} AND account = 2"
        for old, new in ((4, 99), (5, 4), (99, 5))
    ]
    faults = _faults_after(charged_ledger, *moves)
    assert {f"Account 'patients': row {row} was edited or moved." for row in (4, 5)} <= set(faults)


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
def test_a_forged_last_row_is_found_even_if_its_hash_and_the_account_fit(
    path: Path, change: dict[str, Any], fault: str
) -> None:
    with Ledger(path) as ledger:
        charge_patients(ledger)
        last = list(ledger.export("patients"))[-1]
        forged = replace(last, **change)
        forged = replace(forged, hash=forged.expected_hash())
        with _write_transaction(ledger._engine) as connection:
            fields = asdict(forged)
            setting = ", ".join(f"{name} = :{name}" for name in fields if name != "account")
            balance = "sequence = :sequence, head = :hash, spent_units = :spent_units"
            for statement in (
                f"UPDATE journal SET {setting} WHERE account = :account AND sequence = {last.sequence}",
                f"UPDATE accounts SET {balance}, limit_units = MAX(:limit_units, :spent_units) WHERE id = :account",
            ):
                connection.execute(text(statement), fields)
            found = _verify(connection).faults
            connection.rollback()
        assert any(fault in each for each in found), found
        assert ledger.verify().sound


def test_a_rewritten_chain_is_found_by_an_anchor(ledger: Ledger, tmp_path: Path) -> None:
    pay(ledger, charge_for(ledger, 1000))
    before = ledger.account("patients")
    with Ledger(tmp_path / "rewritten.sqlite") as other:
        for _ in range(3):
            pay(other, charge_for(other))
        assert other.verify().sound
        anchored = other.verify({"patients": (before.sequence, before.head)})
        assert anchored.faults == ("Account 'patients': row 2 is not the one that was written down.",)
    pay(ledger, charge_for(ledger, 1000))
    rows = list(ledger.export("patients"))
    for each in rows:
        assert ledger.verify({"patients": (each.sequence, each.hash)}).sound
    for name, row, hashed, fault in (
        ("patients", 4, rows[-1].hash, "Account 'patients': row 4 is not the one that was written down."),
        ("patients", 1, rows[1].hash, "Account 'patients': row 1 is not the one that was written down."),
        ("other", 1, START, "Account 'other' is missing, but its row 1 was written down."),
    ):
        assert ledger.verify({name: (row, hashed)}).faults == (fault,)


_ROW = "journal SET {} WHERE account = 2 AND sequence = {}"
_WRONG = [
    ("total = 'zz'", "total = '[]'", f"total = '{DEEP_JSON}'", "terms = '{\"bad\": 1}'", "terms = '[1]'"),
    ('terms = \'{"epsilon": "x", "delta": 0, "reading": "proven"}\'',),
    ('terms = \'{"epsilon": 1, "delta": 0, "reading": "mine"}\'',),
]
WRONG_VALUES = [
    *(
        (f"accounts SET {each} WHERE id = 2", "total or the terms of account 'patients' cannot be read", "")
        for each in itertools.chain(*_WRONG)
    ),
    *(
        (f"accounts SET {name} = 'abc' WHERE id = 2", "of account 'patients' is not an integer", "")
        for name in ("limit_units", "sequence")
    ),
    ("subaccounts SET spent_units = 1.5", "quota of client 'ann' is not an integer", ""),
    ("subaccounts SET limit_units = 'abc'", "quota of client 'ann' is not an integer", ""),
    *(
        (
            _ROW.format(f"{name} = {value}", 3),
            "row 3 was edited: a field has the wrong type",
            "Row 3 of the journal",
        )
        for value, names in (("'abc'", _NUMBERS), ("x'00ff'", _TEXTS))
        for name in names
    ),
    *(
        (_ROW.format(f"sequence = {value}", 3), fault, "of the journal of account 2 cannot be read")
        for value in ("'abc'", "x'00'")
        for fault in ("Account 'patients': row 3 is missing.", "was edited: a field has the wrong type")
    ),
    *(
        (_ROW.format(f"detail = '{detail}'", row), f"Account 'patients': row {row} {fault}.", None)
        for detail in ("[]", "zz", "[[", "3", DEEP_JSON)
        for row in (1, 2)
        for fault in ("was edited or moved", "cannot be read")
    ),
    *(
        (_ROW.format(f"account = {value}", 3), f"has rows of account {shown}, which does not exist.", None)
        for value, shown in (("'abc'", "abc"), ("77", "77"))
    ),
    *(
        (f"keys SET {change}", "is not as it was created", r"The key '.*' cannot be read")
        for change in ("secret_hash = x'00'", "created = 'abc'", "expires = 'abc'", "role = x'00'")
    ),
]


@pytest.mark.parametrize(("change", "fault", "error"), WRONG_VALUES)
def test_a_wrong_value_is_a_fault_and_an_error_where_it_is_read(
    filled: Path, change: str, fault: str, error: str | None
) -> None:
    edit(filled, f"UPDATE {change}")
    with Ledger(filled) as ledger:
        faults = ledger.verify().faults
        assert any(fault in each for each in faults), faults
        assert not any("are missing" in each for each in faults), "the rows after it are followed"
        if error is None:
            return
        with pytest.raises(LedgerDamaged, match=error or re.escape(fault)) as refusal:
            print(
                [ledger.subaccounts(account) for account in ledger.accounts()],
                ledger.keys(),
                *ledger.export(),
            )
    assert "Stop serving from this ledger" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_an_unreadable_row_of_an_unproven_or_exclusive_model_is_an_error(path: Path) -> None:
    with Ledger(path) as ledger:
        account = open_patients(ledger)
        ledger.record_unproven(account, "m/1", "conditional")
        ledger.charge_training(account, "m/1", "digest", "all")
        assert ledger.verify().sound
    edit(path, "UPDATE journal SET detail = '[]' WHERE kind IN ('unproven', 'exclusive')")
    with Ledger(path) as ledger:
        for read in (
            lambda: ledger.unproven_models(account),
            lambda: ledger.grant("patients", Terms(2.0), "The board allows more."),
        ):
            with pytest.raises(LedgerDamaged, match="A journal row of account 2 cannot be read"):
                read()


def test_a_missing_keys_account_is_found(filled: Path) -> None:
    edit(filled, "DELETE FROM journal WHERE account = 1", "DELETE FROM accounts WHERE id = 1")
    with Ledger(filled) as ledger:
        missing, lost = ledger.verify().faults
        assert missing == "The account of the API keys is missing."
        assert "row 2 of account 1 is in" in lost


def test_a_part_that_was_charged_too_little_is_found(path: Path) -> None:
    """Whoever rewrites the whole chain can still not give the holdout a charge that its side does not explain."""
    with Ledger(path) as ledger:
        account = ledger.open_account("people", GaussianCost(1.0), Terms(4.4, 1e-5))
        ledger.charge_training(account, "head/1", "model", GaussianCost(0.5), split="split")
        ledger.charge_evaluation(account, "head/1", "evaluation", GaussianCost(0.6), split="split")
        assert ledger.verify().sound
        row = next(row for row in ledger.export("people") if row.kind == "evaluation")
    for detail, fault in (
        (
            json.dumps(Part("split", "holdout")._to_detail(LIMIT)),
            "does not charge what its part of the account has spent",
        ),
        (json.dumps(Part("another", "holdout")._to_detail(LIMIT // 3)), "does not charge what its part"),
        (json.dumps(Part("split", "holdout")._to_detail(-5)), "does not charge what its part"),
        ("{}", "1 stored request is not in the journal"),
        ('{"side": "nobody", "split": "split", "units": 1}', "cannot be read"),
        ('{"side": "holdout", "split": "split", "units": "1"}', "cannot be read"),
        ('{"split": "split", "units": 1}', "cannot be read"),
        ('{"cohort": "May", "units": 1}', "cannot be read"),
        ('{"cohort": ["May"], "rule": "month", "units": 1}', "cannot be read"),
        ('{"units": 1}', "cannot be read"),
    ):
        forged = replace(row, detail=detail)
        quoted = detail.replace("'", "''")
        hashed, place = forged.expected_hash(), f"account = {row.account} AND sequence = {row.sequence}"
        edit(
            path,
            f"UPDATE journal SET detail = '{quoted}', hash = '{hashed}' WHERE {place}",
            f"UPDATE accounts SET head = '{hashed}' WHERE id = {row.account}",
        )
        with Ledger(path) as ledger:
            faults = ledger.verify().faults
            assert any(fault in each for each in faults), faults


def test_a_cohort_that_was_moved_to_another_rule_or_charged_too_little_is_found(path: Path) -> None:
    with Ledger(path) as ledger:
        account = ledger.open_account("people", GaussianCost(1.0), Terms(4.4, 1e-5))
        for month in ("May", "June"):
            ledger.charge_training(account, "m/1", month, GaussianCost(0.5), cohort=("month", month))
        assert ledger.verify().sound
        row = next(row for row in ledger.export("people") if "June" in row.detail)
    for before, after, fault in (
        ('"rule":"month"', '"rule":"year"', "charges a cohort of another rule"),
        ('"cohort":"June"', '"cohort":"May"', "does not charge what its part"),
    ):
        assert before in row.detail
        forged = replace(row, detail=row.detail.replace(before, after))
        place = f"account = {row.account} AND sequence = {row.sequence}"
        edit(
            path,
            f"UPDATE journal SET detail = '{forged.detail}', hash = '{forged.expected_hash()}' WHERE {place}",
        )
        with Ledger(path) as ledger:
            faults = ledger.verify().faults
            assert any(fault in each for each in faults), faults


# --- stored requests ----------------------------------------------------------------------------------------------


def answer(ledger: Ledger, charge: Charge, text_: bytes) -> bytes:
    """Send a request with an id: charge, draw, store. Returns the answer that leaves."""
    charged = ledger.charge(charge)
    if isinstance(charged, Replayed):
        return charged.answer
    assert isinstance(charged, Charged), charged
    assert charge.request is not None
    return ledger.store_answers(NewAnswers(charge.account, request=charge.request, answer=text_)).answer


def _binary(ledger: Ledger, content: bytes) -> str:
    return f"decode('{content.hex()}', 'hex')" if "post" in ledger.address else f"x'{content.hex()}'"


def test_an_answer_that_was_cleared_and_drawn_again_is_found(ledger: Ledger) -> None:
    """Thirty draws for one charge: whether the draws differ or not, and even if the first answer is put back."""
    charge = charge_for(ledger, 1000, "visit")
    first = answer(ledger, charge, b"draw 0")
    state = ledger.account("patients")
    assert ledger.verify().sound
    for draw in (b"draw 0", *(b"draw %d" % number for number in range(1, 30))):
        edit(ledger, "UPDATE requests SET answer = NULL")
        assert answer(ledger, charge, draw) == draw
    assert ledger.account("patients").spent_units == state.spent_units
    edit(ledger, f"UPDATE requests SET answer = {_binary(ledger, first)}")
    found = ledger.verify({"patients": (state.sequence, state.head)}).faults
    assert sum("draws again for a request that was answered" in fault for fault in found) == 30
    assert sum("answers a request a second time" in fault for fault in found) == 30


def test_a_request_that_was_never_paid_is_found(ledger: Ledger) -> None:
    """Whoever inserts a request that looks paid gets draws for it, but the chain says that nobody paid."""
    charge = charge_for(ledger, 1000, "visit")
    answer(ledger, charge, b"draw")
    copied = f"SELECT {{}}, body, account, {10**6}, time, NULL FROM requests"
    edit(ledger, "INSERT INTO requests " + copied.format(_binary(ledger, b"\xff")))
    assert ledger.verify().faults == ("Account 'patients': 1 stored request is not in the journal.",)
    free = ledger.charge(replace(charge, request=b"\xff"))
    assert isinstance(free, Charged)
    assert free.units == 0
    row = ledger.account("patients").sequence
    assert f"Account 'patients': row {row} counts on an earlier charge that is not in the journal." in (
        ledger.verify().faults
    )
    edit(ledger, "UPDATE requests SET units = 0 WHERE units > 1000")
    assert not ledger.verify().sound


@pytest.mark.parametrize(
    ("statement", "fault"),
    [
        ("UPDATE requests SET answer = NULL", "1 stored request or its answer was changed"),
        ("UPDATE requests SET answer = body", "1 stored request or its answer was changed"),
        ("UPDATE requests SET body = answer", "1 stored request or its answer was changed"),
        ("UPDATE requests SET units = 5", "1 stored request or its answer was changed"),
        ("UPDATE requests SET time = 5", "1 stored request or its answer was changed"),
        ("DELETE FROM requests", "1 stored request is missing"),
        ("UPDATE requests SET account = 77", "1 stored request is missing"),
    ],
)
def test_a_changed_or_removed_request_is_found(ledger: Ledger, statement: str, fault: str) -> None:
    answer(ledger, charge_for(ledger, 1000, "visit"), b"draw")
    faults = _faults_after(ledger, statement)
    assert f"Account 'patients': {fault}." in faults
    if "77" in statement:
        assert "The ledger has requests of account 77, which does not exist." in faults


@pytest.mark.parametrize("change", ["body = 5", "answer = 5", "body = 'text'", "answer = 'text'"])
def test_a_request_with_a_value_of_the_wrong_type_is_found(path: Path, change: str) -> None:
    with Ledger(path) as ledger:
        answer(ledger, charge_for(ledger, 1000, "visit"), b"draw")
        assert _faults_after(ledger, f"UPDATE requests SET {change}") == (
            "Account 'patients': 1 stored request or its answer was changed.",
        )


def test_a_removed_request_is_paid_again_and_found(ledger: Ledger) -> None:
    charge = charge_for(ledger, 1000, "visit")
    answer(ledger, charge, b"draw")
    edit(ledger, "DELETE FROM requests")
    assert answer(ledger, charge, b"another") == b"another"
    assert ledger.account("patients").spent_units == 2000
    row = ledger.account("patients").sequence - 1
    expected = f"the request of row {row} was charged before, and what was stored for it was removed"
    assert any(expected in fault for fault in ledger.verify().faults)


def add_row(ledger: Ledger, account: int, kind: str, detail: object, units: int = 0) -> None:
    """Append a row to the chain of an account, as whoever writes the database can."""
    with _write_transaction(ledger._engine) as connection:
        cursor = Cursor(connection)
        locked = _lock_accounts(cursor, [account])[account]
        locked._add(1, kind, client="ann" if units else "", units=units, detail=json.dumps(detail))
        locked._save(cursor)


def adopt(ledger: Ledger, account: int, **changes: object) -> None:
    """Forge a row that adopts the request ff of an earlier version."""
    described = {"time": 1, "units": 5000, "keep": False, "answer": None, **changes}
    add_row(ledger, account, "adopted", {"requests": {"ff": described}})


def test_an_account_that_no_earlier_version_wrote_to_adopts_no_requests(ledger: Ledger) -> None:
    """A forged row that declares requests of an earlier version gives nobody free draws."""
    charge = charge_for(ledger, 1000, "visit")
    ledger.charge(replace(charge, request=None, unit_cost=10_000))
    assert ledger.verify().sound
    for keep in (False, True):
        adopt(ledger, charge.account, keep=keep)
        row = ledger.account("patients").sequence
        fault = f"Account 'patients': row {row} adopts requests, but no earlier version wrote to the account."
        assert fault in ledger.verify().faults
    unused = f"UPDATE accounts SET sequence = 0, head = '{START}' WHERE id = 2"
    edit(ledger, "DELETE FROM journal WHERE account = 2", unused)
    adopt(ledger, charge.account, keep=True)
    assert fault.replace(f"row {row}", "row 1") in ledger.verify().faults


def make_earlier(path: Path) -> None:
    """Write a ledger whose account `patients` an earlier version has opened and charged, without any stored request."""
    with Ledger(path) as ledger:
        charge_patients(ledger)
        open_patients(ledger, "others", digest="others")
    unused = f"UPDATE accounts SET sequence = 0, head = '{START}' WHERE id = 1"
    version = "UPDATE meta SET value = '3' WHERE name = 'version'"
    edit(path, "DELETE FROM journal WHERE account = 1", unused, version)
    path.with_name(path.name + ".head").unlink()


@pytest.fixture
def earlier_version(path: Path) -> Ledger:
    make_earlier(path)
    return Ledger(path)


@pytest.mark.parametrize("at_once", [1, 2, 3, 500])
def test_all_requests_that_an_earlier_version_stored_are_adopted(
    path: Path, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_ADOPTED_PER_ROW", at_once)
    make_earlier(path)
    for request, units, body, stored in (
        (1, 1000, "6162", "x'63'"),
        (2, 2000, "64", "NULL"),
        (3, 0, "", "x'65'"),
    ):
        edit(
            path,
            "INSERT INTO requests (account, request, body, units, time, answer)"
            f" VALUES (2, x'0{request}', x'{body}', {units}, 7, {stored})",
        )
    before = now()
    with Ledger(path) as ledger:
        adopted = [
            json.loads(row.detail)["requests"] for row in ledger.export("patients") if row.kind == "adopted"
        ]
        assert all(
            (row.answers, before <= row.time <= now()) == (0, True)
            for row in ledger.export()
            if row.kind == "adopted"
        )
        assert [len(each) for each in adopted] == {1: [1, 1, 1], 2: [2, 1]}.get(at_once, [3])
        found = {key: value for each in adopted for key, value in each.items()}
        assert {key: (each["units"], each["keep"], each["time"]) for key, each in found.items()} == {
            "01": (1000, False, 7),
            "02": (2000, False, 7),
            "03": (0, True, 7),
        }
        assert ledger.verify().sound
        assert _faults_after(ledger, "UPDATE requests SET answer = x'66' WHERE units = 1000") == (
            "Account 'patients': 1 stored request or its answer was changed.",
        )


def test_adopted_requests_come_first_and_were_paid(earlier_version: Ledger) -> None:
    with earlier_version as ledger:
        assert ledger.verify().sound
        row = ledger.account("patients").sequence + 1
        for last, units, fault in (
            (5, 3001, f"row {row} adopts requests for which nobody has paid"),
            (5, 3000, ""),
            (4, 3000, f"row {row} adopts requests, but no earlier version wrote to the account"),
        ):
            with ledger._engine.connect() as connection, connection.begin() as transaction:
                connection.execute(text(_adopted_until(last)))
                cursor = Cursor(connection)
                account = _lock_accounts(cursor, [2])[2]
                detail = {"requests": {"ff": {"time": 1, "units": units, "keep": False, "answer": None}}}
                account._add(1, "adopted", detail=json.dumps(detail))
                account._save(cursor)
                faults = _verify(connection).faults
                transaction.rollback()
            expected = [f"Account 'patients': {fault}."] if fault else []
            assert [each for each in faults if "adopts requests" in each] == expected


def _adopted_until(row: int) -> str:
    """The SQL that changes up to which row the migration adopted requests of the account `patients`."""
    found, changed = (f'"sequence"\\: {number}' for number in (4, row))
    return f"UPDATE journal SET detail = REPLACE(detail, '{found}', '{changed}') WHERE account = 1"


def test_requests_are_adopted_before_any_other_is_charged(earlier_version: Ledger) -> None:
    with earlier_version as ledger:
        pay(ledger, charge_for(ledger, 1000, "visit"))
        edit(ledger, _adopted_until(6))
        adopt(ledger, 2, units=3000)
        faults = ledger.verify().faults
    assert "Account 'patients': row 6 adopts requests of an earlier version after newer ones." in faults


def test_what_an_earlier_version_stored_is_covered_from_the_migration_on(earlier_version: Ledger) -> None:
    with earlier_version as ledger:
        (row,) = (row for row in ledger.export() if row.account == 1)
        assert json.loads(row.detail) == {
            "accounts": {
                "2": {"name": "patients", "sequence": 4},
                "3": {"name": "others", "sequence": 1},
            },
            "training_sets": {"others": 3},
        }
        assert ledger.verify().sound
        assert _faults_after(ledger, "UPDATE accounts SET name = 'mine' WHERE id = 2") == (
            "Account 'mine': according to the journal it was opened as 'patients'.",
        )
        assert _faults_after(ledger, "UPDATE training_sets SET account = 2") == (
            "1 training set does not have the account that the journal states.",
        )
        add_row(ledger, 1, "adopted", {"accounts": {}, "training_sets": {"more": 2}})
        assert ledger.verify().faults == (
            "1 training set does not have the account that the journal states.",
        )
        open_patients(ledger)
        open_patients(ledger, "newer")
        add_row(ledger, 1, "adopted", {"accounts": {}, "training_sets": {}})
        assert any(
            "adopts accounts of an earlier version after newer" in each for each in ledger.verify().faults
        )


@pytest.mark.parametrize("kind", ["training", "charge"])
def test_a_charge_for_one_thing_does_not_pay_for_another(ledger: Ledger, kind: str) -> None:
    """Whoever writes the database gives a paid training the body of a query, and gets draws for it."""
    charge = charge_for(ledger, 1000, "visit")
    key = "training" if kind == "training" else "visit"
    assert charge.request is not None
    detail = {"request": charge.request.hex(), "keep": True}
    add_row(ledger, charge.account, kind, detail, units=50_000)
    body = _binary(ledger, charge.body)
    edit(
        ledger,
        f"INSERT INTO requests VALUES ({_binary(ledger, charge.request)}, {body}, 2, 50000, 1, NULL)",
        "INSERT INTO subaccounts (account, client, spent_units, refused) SELECT 2, id, 50000, 0 FROM clients",
    )
    before = ledger.verify().faults
    assert before == ("Account 'patients': 1 stored request or its answer was changed.",), key
    free = ledger.charge(charge)
    assert isinstance(free, Charged)
    assert free.units == 0
    row = ledger.account("patients").sequence
    edit(ledger, f"UPDATE requests SET body = {_binary(ledger, b'')}")
    assert f"Account 'patients': row {row} counts on a charge for something else." in ledger.verify().faults


# --- accounts and training sets -----------------------------------------------------------------------------------


def test_a_second_budget_for_a_training_set_is_found(ledger: Ledger) -> None:
    """Whoever writes the database lets the records look new, and the service opens a second account for them."""
    open_patients(ledger, digest="records")
    state = ledger.account("patients")
    pay(ledger, charge_for(ledger, LIMIT))
    assert ledger.verify().sound
    edit(ledger, "DELETE FROM training_sets")
    assert ledger.verify().faults == ("1 training set does not have the account that the journal states.",)
    edit(ledger, "UPDATE accounts SET name = 'old' WHERE id = 2")
    fresh = open_patients(ledger, digest="records")
    assert fresh.remaining_units == LIMIT
    faults = ledger.verify({"old": (state.sequence, state.head)}).faults
    last = dict(ledger.heads())[KEYS_ACCOUNT].sequence
    assert {
        f"Account '(keys)': row {last - 1} opens the account 'patients' a second time.",
        f"Account '(keys)': row {last} binds a training set that has an account already.",
        "Account 'old': according to the journal it was opened as 'patients'.",
    } <= set(faults)


def test_an_account_that_was_removed_and_opened_again_is_found(path: Path) -> None:
    with Ledger(path) as ledger:
        open_patients(ledger, digest="records")
        pay(ledger, charge_for(ledger, LIMIT))
    tables = ("journal", "subaccounts", "training_sets")
    edit(
        path,
        *(f"DELETE FROM {table} WHERE account = 2" for table in tables),
        "DELETE FROM accounts WHERE id = 2",
    )
    path.with_name(path.name + ".head").unlink()
    with Ledger(path) as ledger:
        assert "Account 'patients' is missing." in ledger.verify().faults
        again = open_patients(ledger, digest="records")
        assert again.remaining_units == LIMIT
        faults = ledger.verify().faults
    assert "Account '(keys)': row 3 opens the account 'patients' a second time." in faults
    assert "Account '(keys)': row 4 binds a training set that has an account already." in faults


def test_records_that_an_administrator_moved_are_sound_and_nobody_else_can_move_them(ledger: Ledger) -> None:
    open_patients(ledger, digest="records")
    open_patients(ledger, "other", digest="records", because="a new study began")
    assert ledger.verify().sound
    assert _faults_after(ledger, "UPDATE training_sets SET account = 2") == (
        "1 training set does not have the account that the journal states.",
    )
    add_row(ledger, 1, "reassign", {"id": 2, "digest": "unknown", "because": "of nothing"})
    add_row(ledger, 1, "training-set", {"id": [2], "digest": "list"})
    faults = ledger.verify().faults
    assert "Account '(keys)': row 5 moves a training set that has no account." in faults
    assert "2 training sets do not have the account that the journal states." in faults
    add_row(ledger, 1, "account", {"id": [2], "name": "list"})
    assert "Account '(keys)': row 7 cannot be read." in ledger.verify().faults

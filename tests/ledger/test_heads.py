"""The head file: a ledger that was rolled back is noticed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine

from quietmax.accounting import PureCost
from quietmax.errors import InvalidInput, LedgerDamaged, LedgerUnavailable
from quietmax.ledger import Charge, Ledger, Terms
from quietmax.ledger import heads as heads_module
from quietmax.ledger.database import _migrate, _open_engine
from quietmax.ledger.heads import Head, HeadFile
from quietmax.ledger.transactions import Failed
from tests.ledger.scenarios import (
    REASON,
    charge_error,
    charge_for,
    charge_patients,
    edit,
    open_patients,
    pay,
    writer_driver,
)

CHARGE_AND_WAIT = """
import os, sys, time
from quietmax.ledger import Charge, Ledger
from quietmax.ledger.transactions import Charged
ledger = Ledger(sys.argv[1])
account, ann = ledger.account("patients"), ledger.client("ann")
def charge(count):
    done = [isinstance(ledger.charge(Charge(account.id, ann, "m/1", 1, rows=1)), Charged) for _ in range(count)]
    print(sum(done), flush=True)
charge(10)
sys.stdin.readline()
charge(1)
sys.stdin.readline()
ledger.close()
"""


def head_of(path: Path) -> Path:
    return path.with_name(path.name + ".head")


def copy_database(path: Path, target: Path) -> None:
    """Copy what SQLite sees, without files beside it."""
    source, copy = sqlite3.connect(path), sqlite3.connect(target)
    source.backup(copy)
    source.close()
    copy.close()


def rolled_back(path: Path) -> Path:
    """A ledger with 53 charges whose file was replaced by a copy with 3."""
    with Ledger(path) as ledger:
        charge_patients(ledger)
        copy_database(path, path.with_suffix(".old"))
        charge = charge_for(ledger, 1000)
        for _ in range(50):
            pay(ledger, charge)
    shutil.copy(path.with_suffix(".old"), path)
    return path


@pytest.fixture
def head_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The head file of all ledgers that are opened, on both databases."""
    monkeypatch.setenv("QUIETMAX_LEDGER_HEAD", str(tmp_path / "shared.head"))
    return tmp_path / "shared.head"


def go_back(ledger: Ledger, sequence: int) -> None:
    """Put the account `patients`, where each row after the first is a charge of 1000 units, back to a row."""
    spent = 1000 * (sequence - 1)
    edit(
        ledger,
        f"DELETE FROM journal WHERE account = 2 AND sequence > {sequence}",
        f"UPDATE accounts SET sequence = {sequence}, spent_units = {spent}, head ="
        f" (SELECT hash FROM journal WHERE account = 2 AND sequence = {sequence}) WHERE id = 2",
        f"UPDATE subaccounts SET spent_units = {spent}",
    )


def write_slot(path: Path, head: Head) -> None:
    """Write a head into the head file behind its back."""
    with head_of(path).open("r+b") as file:
        file.seek(256 * head.account)
        file.write(json.dumps(asdict(head)).encode().ljust(255) + b"\n")


def stored(path: Path) -> tuple[str | None, list[Head]]:
    unused: Any = None
    return HeadFile(path, "", unused)._read()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    opened = _open_engine(tmp_path / "empty.sqlite")
    _migrate(opened)
    yield opened
    opened.dispose()


def test_an_old_copy_is_not_charged_and_says_what_to_do(path: Path) -> None:
    rolled_back(path)
    with Ledger(path) as ledger:
        account = ledger.account("patients")
        assert account.spent_units == 3000
        (fault,) = ledger.verify().faults
        assert fault == (
            f"The ledger has lost charges: row 54 of account 2 is in {head_of(path)}, but not in the audit log. Put "
            "the newest copy of the ledger in place, or charge what is known to be lost and go on with 'quietmax "
            "ledger accept-loss'."
        )
        assert str(charge_error(ledger, Charge(account.id, 1, "m/1", 1, rows=1))) == fault
        for write in (lambda: ledger.client("bob"), lambda: open_patients(ledger), ledger.ping):
            with pytest.raises(LedgerDamaged, match="has lost charges"):
                write()
        assert ledger.account("patients").sequence == account.sequence


def test_an_accepted_loss_is_charged_and_recorded(path: Path) -> None:
    rolled_back(path)
    with pytest.raises(InvalidInput, match="The reason must have at least"):
        Ledger(path, accept_loss="no")
    with Ledger(path, accept_loss="the copy of May is the newest") as ledger:
        assert ledger.account("patients").spent_units == 53_000
        assert {each.client: each.spent_units for each in ledger.subaccounts(ledger.account("patients"))} == {
            "lost": 50_000,
            "ann": 3000,
        }
        assert ledger.verify().sound
        assert ledger.lost_accounts() == [], "the account is there, so a new one needs no reason"
        assert "the copy of May is the newest" in list(ledger.export("patients"))[-1].detail
        charge_patients(ledger)
    with Ledger(path) as ledger:
        assert ledger.account("patients").spent_units == 56_000
    with pytest.raises(InvalidInput, match="has lost nothing"):
        Ledger(path, accept_loss="the copy of May is the newest")


def test_an_account_that_has_lost_nothing_is_not_charged_for_the_loss_of_another(path: Path) -> None:
    with Ledger(path) as ledger:
        other = open_patients(ledger, "others")
        pay(ledger, Charge(other.id, ledger.client("ann"), "m/1", 500, rows=1))
        open_patients(ledger)
        copy_database(path, path.with_suffix(".old"))
        pay(ledger, charge_for(ledger, 1000))
        open_patients(ledger, "unused")
    shutil.copy(path.with_suffix(".old"), path)
    with Ledger(path, accept_loss="the copy of May is the newest") as ledger:
        assert {each.name: each.spent_units for each in ledger.accounts()} == {
            "others": 500,
            "patients": 1000,
        }
        assert [row.kind for row in ledger.export("others")] == ["open", "charge"]
        assert ledger.lost_accounts() == [], "the third had spent nothing"
        assert ledger.verify().sound


def test_a_loss_larger_than_the_budget_that_is_left_takes_all_of_it(path: Path) -> None:
    rolled_back(path)
    write_slot(path, Head(2, 99, 2**60, "f" * 64))
    with Ledger(path, accept_loss="the copy of May is the newest") as ledger:
        assert ledger.account("patients").remaining_units == 0
        assert ledger.verify().sound


def test_a_new_ledger_in_the_place_of_a_deleted_one_is_not_charged(path: Path) -> None:
    with Ledger(path) as ledger:
        charge_patients(ledger)
    path.unlink()
    with Ledger(path) as ledger, pytest.raises(LedgerDamaged, match=r"is not the one that .*head belongs to"):
        open_patients(ledger)
    with Ledger(path, accept_loss="the old ledger was a trial") as ledger:
        with pytest.raises(InvalidInput, match="has lost 1 account, so the new account 'patients' could be"):
            open_patients(ledger)
        open_patients(ledger, because="it was a trial")
        charge_patients(ledger)
        assert ledger.verify().sound


def test_a_damaged_head_file_stops_charges_until_it_is_accepted(path: Path) -> None:
    with Ledger(path) as ledger:
        charge_patients(ledger)
    head_of(path).write_bytes(b"{}" + head_of(path).read_bytes()[2:])
    with Ledger(path) as ledger, pytest.raises(LedgerDamaged, match=r"head, which says .* is damaged"):
        ledger.client("bob")
    with Ledger(path, accept_loss="the file was damaged by hand") as ledger:
        charge_patients(ledger)
    with Ledger(path) as ledger:
        charge_patients(ledger)


def test_the_head_file_is_up_to_date_after_every_write_and_created_again_if_missing(path: Path) -> None:
    with Ledger(path) as ledger:
        account = charge_patients(ledger)
        assert stored(head_of(path))[1][-1] == Head(2, account.sequence, 3000, account.head)
        ledger.set_quota("patients", "ann", 0.5, "half for ann alone")
        ledger.create_key("bob")
        heads = {head.account: head.sequence for head in stored(head_of(path))[1]}
        assert heads == {1: 2, 2: account.sequence + 1}
        head_of(path).unlink()
        ledger._heads._flushed_at = -1e9  # the file is opened again after every flush
        for _ in range(2):
            pay(ledger, charge_for(ledger))
        assert stored(head_of(path))[1] == [
            Head(2, account.sequence + 3, 3002, ledger.account("patients").head)
        ]
    assert head_of(path).stat().st_mode & 0o777 == 0o600
    head_of(path).unlink()
    with Ledger(path):
        assert len(stored(head_of(path))[1]) == 2


@pytest.mark.parametrize(("number", "lost"), [(6, False), (7, False), (8, True)])
def test_a_row_of_another_process_is_replaced_only_by_a_newer_one_and_if_it_is_in_the_journal(
    tmp_path: Path, engine: Engine, number: int, lost: bool
) -> None:
    one, other = (HeadFile(tmp_path / "head", "ledger", engine) for _ in range(2))
    one._record([Head(2, 7, 70, "seven")])
    other._record([Head(2, number, 10 * number, "other"), Head(3, 1, 10, "first")])
    assert one._read() == ("ledger", [Head(2, 7, 70, "seven"), Head(3, 1, 10, "first")])
    assert ("row 7 of account 2 is not the one that was committed" in str(other.damage)) is lost
    assert other.error is None


@pytest.mark.parametrize("forged", [False, True])
def test_an_older_row_in_the_head_file_is_replaced_if_it_is_in_the_journal(path: Path, forged: bool) -> None:
    """Another process may write its row late, between the check and the commit of this one."""
    with Ledger(path) as ledger:
        charge = Charge(charge_patients(ledger).id, 1, "m/1", 1, rows=1)
        hashed = "f" * 64 if forged else list(ledger.export("patients"))[2].hash
        older, newer = Head(2, 3, 2000, hashed), Head(2, 5, 4000, "e" * 64)
        write_slot(path, older)
        ledger._heads._record([newer])
        assert stored(head_of(path))[1][-1] == (older if forged else newer)
        assert (ledger._heads.damage is not None, ledger._heads.error) == (forged, None)
        if forged:
            error = str(charge_error(ledger, charge))
            assert "row 3 of account 2 is not the one that was committed" in error


def test_heads_without_a_file_or_of_a_ledger_that_is_only_read_are_kept_in_memory(
    tmp_path: Path, engine: Engine
) -> None:
    for file in (
        HeadFile(None, "ledger", engine),
        HeadFile(tmp_path / "head", "ledger", engine, read_only=True),
    ):
        file._record([Head(2, 7, 70, "seven")])
        assert (file._read(), file.error) == ((None, []), None)
        file._close()
    assert not (tmp_path / "head").exists()


def test_the_head_file_is_flushed_every_few_seconds_and_when_it_is_closed(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, flushed = SimpleNamespace(now=100.0), list[float]()
    monkeypatch.setattr(heads_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(os, "fdatasync", lambda _: flushed.append(clock.now))
    file = HeadFile(tmp_path / "head", "ledger", engine)
    every = heads_module._FLUSH_SECONDS
    for number, moment in enumerate((100.0, 100.0 + every, 101.0 + every, 101.0 + 2 * every), start=1):
        clock.now = moment
        file._record([Head(2, number, number, "hash")])
    assert flushed == [101.0 + every]
    file._close()
    assert flushed == [101.0 + every, 101.0 + 2 * every]
    file._close()
    assert len(flushed) == 2, "what is closed is flushed already"


def test_the_head_file_names_the_last_row_after_several_writers(address: str, head_file: Path) -> None:
    """Each writes over rows of the others, which it finds in the journal."""
    with ExitStack() as stack:
        ledgers = [stack.enter_context(Ledger(address)) for _ in range(4)]
        charge_patients(ledgers[0])
        charge = charge_for(ledgers[0])

        def charge_repeatedly(ledger: Ledger) -> None:
            for _ in range(30):
                pay(ledger, charge)

        with ThreadPoolExecutor(len(ledgers)) as pool:
            list(pool.map(charge_repeatedly, ledgers))
        state = ledgers[0].account("patients")
        assert state.spent_units == 3120
        assert stored(head_file)[1][-1] == Head(2, state.sequence, 3120, state.head)
        for ledger in ledgers:
            ledger.ping()


def test_a_head_file_that_cannot_be_written_makes_the_ledger_not_ready_and_loses_no_charge(
    path: Path, tmp_path: Path
) -> None:
    with Ledger(path) as ledger:
        charge = charge_for(ledger)
        ledger._heads._close()
        ledger._heads.path = tmp_path / "no" / "folder"
        pay(ledger, charge)
        with pytest.raises(LedgerUnavailable, match=r"Cannot write .*folder: No such file"):
            ledger.ping()
        ledger._heads.path = head_of(path)
        pay(ledger, charge)
        ledger.ping()


def test_a_database_that_goes_back_while_it_is_served_is_not_charged(ledger: Ledger) -> None:
    """As after a failover of PostgreSQL to a replica that lags: there is no file, but this process remembers."""
    charge_patients(ledger)
    charge = charge_for(ledger)
    go_back(ledger, 3)
    assert ledger.verify().sound, "the chain is intact"
    error = str(charge_error(ledger, charge))
    assert "went back in time: account 2 was at row 4 and is at row 3" in error


def test_an_account_that_is_replaced_or_removed_while_it_is_served_is_noticed(ledger: Ledger) -> None:
    charge_patients(ledger)
    ledger.check_damage()
    for statements in (
        (
            "UPDATE journal SET hash = 'other' WHERE account = 2 AND sequence = 4",
            "UPDATE accounts SET head = 'other' WHERE id = 2",
        ),
        (
            "DELETE FROM journal WHERE account = 2",
            "DELETE FROM subaccounts",
            "DELETE FROM accounts WHERE id = 2",
        ),
    ):
        edit(ledger, *statements)
        with pytest.raises(LedgerDamaged, match="row 4 of account 2 is not the one that was committed"):
            ledger.check_damage()


def test_a_restored_ledger_is_not_written_after_another_process_has_added_rows(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number of rows says nothing then: the row that this process knows must still be the same row."""
    monkeypatch.setenv("QUIETMAX_LEDGER_HEAD", str(tmp_path / "first.head"))
    with Ledger(address) as first:
        charge_patients(first)
        charge = charge_for(first, 1000)
        go_back(first, 3)
        monkeypatch.setenv("QUIETMAX_LEDGER_HEAD", str(tmp_path / "second.head"))
        with Ledger(address) as second:
            for _ in range(5):
                pay(second, charge)
        went_back = "went back in time: row 4 of account 2 is not the one that was committed"
        assert went_back in str(charge_error(first, charge))
        for write in (
            lambda: first.create_key("bob"),
            lambda: first.grant("patients", Terms(2.0), REASON),
            first.keys,
            first.ping,
            first.check_damage,
        ):
            with pytest.raises(LedgerDamaged, match=went_back):
                write()
        assert first.account("patients").spent_units == 7000, "nothing was added"
        assert first.account("patients").terms == Terms(1.0)


@pytest.mark.parametrize("knows", ["little", "its own charge", "its own charge, and has closed the file"])
def test_an_idle_process_trusts_the_head_file_of_the_others(
    address: str, head_file: Path, knows: str
) -> None:
    """Another one charged meanwhile: after a restore, what it knows itself is still there."""
    with Ledger(address) as busy:
        charge = Charge(charge_patients(busy).id, busy.client("ann"), "m/1", 1000, rows=1)
        with Ledger(address) as idle:
            pay(busy if knows == "little" else idle, charge)
            pay(busy, charge)
            go_back(busy, 5)
            if knows.endswith("closed the file"):
                idle._heads._close()
            went_back = "account 2 was at row 6 and is at row 5"
            assert went_back in str(charge_error(idle, charge))
            with pytest.raises(LedgerDamaged, match=went_back):
                idle.client("bob")
        assert stored(head_file)[1][-1].sequence == 6, "it was not replaced"


def test_the_head_file_of_the_others_covers_the_account_of_the_api_keys(path: Path) -> None:
    with Ledger(path) as busy, Ledger(path) as idle:
        busy.create_key("ann")
        unused = f"UPDATE accounts SET sequence = 0, head = '{'0' * 64}' WHERE id = 1"
        edit(busy, "DELETE FROM journal WHERE account = 1", unused)
        with pytest.raises(LedgerDamaged, match="account 1 was at row 1 and is at row 0"):
            idle.check_damage()


def test_a_key_that_was_revoked_does_not_come_back_with_a_restored_ledger(
    ledger: Ledger, address: str
) -> None:
    charge_patients(ledger)
    _, key = ledger.create_key("ann")
    with Ledger(address) as other:
        other.revoke_key(key.id)
    (revoked,) = ledger.keys()
    assert revoked.revoked is not None
    edit(  # no account of a training set has changed since the backup
        ledger,
        "DELETE FROM journal WHERE account = 1 AND kind = 'key-revoked'",
        "UPDATE accounts SET sequence = sequence - 1, head = (SELECT hash FROM journal WHERE account = 1"
        " ORDER BY sequence DESC LIMIT 1) WHERE id = 1",
        "UPDATE keys SET revoked = NULL",
    )
    for use in (ledger.keys, lambda: ledger.create_key("eve")):
        with pytest.raises(LedgerDamaged, match="account 1 was at row 3 and is at row 2"):
            use()


def test_a_single_writer_looks_nothing_up_and_several_writers_one_row(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    shared: list[int] = []
    flock = fcntl.flock

    def count_shared(file: int, operation: int) -> None:
        shared.extend([file] * (operation == fcntl.LOCK_SH))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", count_shared)

    def lookups(ledger: Ledger, charge: Charge) -> int:
        pay(ledger, charge)
        seen.clear()
        pay(ledger, charge)
        return sum("FROM journal" in statement for statement in seen)

    with Ledger(path) as one, Ledger(path) as other:
        charge = Charge(charge_patients(one).id, one.client("ann"), "m/1", 1000, rows=1)
        writer_driver(one).set_trace_callback(seen.append)
        shared.clear()
        assert lookups(one, charge) == 0
        assert shared == [], "nor does it wait for the lock of the file to read it"
        assert any("FROM accounts" in statement for statement in seen)
        seen.clear()
        pay(other, charge)
        pay(one, charge)
        assert sum("FROM journal" in statement for statement in seen) == 1
        assert len(shared) == 2, "each of the two sees that the other has written"


def test_a_head_file_that_is_damaged_while_it_is_used_fails_no_charge(path: Path) -> None:
    with Ledger(path) as ledger:
        charge_patients(ledger)
        charge = charge_for(ledger)
        for damage in (b"{", b"[1]", b'{"account": 2}', b"[" * 200):
            with head_of(path).open("r+b") as file:
                file.seek(512)
                file.write(damage.ljust(256))
            pay(ledger, charge)
            with pytest.raises(LedgerUnavailable, match=r"Cannot write .*head: the file is damaged"):
                ledger.ping()
        assert ledger.account("patients").spent_units == 3004


def test_an_account_that_was_lost_gets_no_new_budget_without_a_reason(path: Path) -> None:
    """The backup is older than the account: nothing in it says that its records have a budget."""
    old = path.with_suffix(".old")
    with Ledger(path) as ledger:
        open_patients(ledger, "others", digest="others")
        copy_database(path, old)
        account = open_patients(ledger, digest="patients")
        pay(ledger, Charge(account.id, ledger.client("ann"), "m/1", 1000, rows=1))
    shutil.copy(old, path)
    with Ledger(path) as ledger, pytest.raises(LedgerDamaged, match="has lost charges"):
        ledger.check_damage()
    with Ledger(path, accept_loss="the copy of May is the newest") as ledger:
        row = next(row for row in ledger.export() if row.kind == "loss")
        assert json.loads(row.detail)["accounts"] == {"3": 1000}
    with Ledger(path) as ledger:
        assert open_patients(ledger, "others", digest="others").id == 2
        for name in ("patients", "another"):
            with pytest.raises(InvalidInput, match=r"has lost 1 account, .* could be a second budget"):
                open_patients(ledger, name, digest="patients")
            with pytest.raises(InvalidInput, match="has lost 1 account"):
                ledger.check_opening(name, None)
        assert [each.name for each in ledger.accounts()] == ["others"]
        ledger.open_account(
            "patients", PureCost(0.5), Terms(0.5), digest="patients", because="half of it is left"
        )
        assert "half of it is left" in next(ledger.export("patients")).detail
        assert ledger.verify().sound


@pytest.mark.usefixtures("serving")
def test_a_ledger_that_is_only_read_is_not_changed_while_it_is_served_or_after_a_crash(
    path: Path, tmp_path: Path
) -> None:
    def files(folder: Path) -> dict[str, bytes]:
        return {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}

    crashed = tmp_path / "crashed"
    for folder in (path.parent, crashed):
        if folder == crashed:
            crashed.mkdir()
            for name in files(path.parent):
                shutil.copy(path.parent / name, crashed / name)
        before = files(folder)
        assert f"{path.name}-wal" in before
        with Ledger(folder / path.name, read_only=True) as ledger:
            ledger.check_damage()
            assert ledger.account("patients").spent_units == 3010, "what is in the log is read"
            with pytest.raises(LedgerUnavailable, match="readonly"):
                ledger.client("bob")
        assert files(folder) == before
    (crashed / f"{path.name}-shm").unlink()
    with pytest.raises(LedgerUnavailable, match="without changing it"):
        Ledger(crashed / path.name, read_only=True)


def test_a_ledger_that_is_only_read_must_exist_with_the_newest_schema(address: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="must exist and have the newest schema"):
        Ledger(address, read_only=True)
    assert list(tmp_path.iterdir()) == []
    with Ledger(address) as ledger:
        charge_patients(ledger)
    with Ledger(address, read_only=True) as ledger:
        assert ledger.account("patients").spent_units == 3000
        assert ledger.verify().sound
        with pytest.raises(LedgerUnavailable, match=r"read-?only"):
            ledger.client("bob")


@pytest.fixture
def serving(path: Path):
    """A process that has charged ten times, charges once more at the first line it reads, and ends at the second."""
    with Ledger(path) as ledger:
        charge_patients(ledger)
    process = subprocess.Popen(
        [sys.executable, "-c", CHARGE_AND_WAIT, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "10\n"
    yield process
    process.kill()
    process.wait()


def test_a_removed_write_ahead_log_is_noticed_at_the_next_charge_and_its_charges_are_not_forgotten(
    path: Path, serving: subprocess.Popen[str]
) -> None:
    path.with_name(path.name + "-wal").unlink()
    assert serving.stdin is not None
    assert serving.stdout is not None
    serving.stdin.write("\n")
    serving.stdin.flush()
    assert serving.stdout.readline() == "0\n", "nothing is charged to a file that nobody will find"
    os.kill(serving.pid, signal.SIGKILL)
    serving.wait()
    for rest in path.parent.glob("*-shm"):
        rest.unlink()
    with Ledger(path) as ledger:
        assert ledger.account("patients").spent_units == 3000, "the charges are gone"
        assert isinstance(ledger.charge(Charge(2, 1, "m/1", 1, rows=1)), Failed)
        assert not ledger.verify().sound
    with Ledger(path, accept_loss="somebody removed the log") as ledger:
        assert ledger.account("patients").spent_units == 3010


def test_a_process_that_ends_in_order_saves_what_a_removed_log_held(
    path: Path, serving: subprocess.Popen[str]
) -> None:
    path.with_name(path.name + "-wal").unlink()
    serving.communicate("\n\n", timeout=20)
    assert serving.returncode == 0
    with Ledger(path) as ledger:
        assert ledger.account("patients").spent_units == 3010
        pay(ledger, charge_for(ledger))
        assert ledger.verify().sound

"""Backups, restores and rehearsed upgrades, on both databases."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from quietmax.errors import InvalidInput, LedgerDamaged
from quietmax.ledger import Charge, Ledger, LedgerUnavailable
from quietmax.ledger.backup import back_up, rehearse_migration, restore
from quietmax.ledger.database import MIGRATIONS, _run, _write_transaction
from tests.ledger.scenarios import edit


def test_a_backup_of_either_database_is_restored_in_either_and_goes_on(
    charged_ledger: Ledger, tmp_path: Path, postgres_address: str
) -> None:
    file, elsewhere = tmp_path / "backup.sqlite", str(tmp_path / "elsewhere.sqlite")
    rows = [entry.hash for entry in charged_ledger.export()]
    assert back_up(charged_ledger, file).rows == len(rows)
    assert file.stat().st_mode & 0o777 == 0o600
    assert sorted(each.name for each in tmp_path.glob("backup*")) == ["backup.sqlite"], (
        "one file, without a log"
    )
    with pytest.raises(InvalidInput, match="exists already"):
        back_up(charged_ledger, file)
    targets = [elsewhere]
    if charged_ledger.address.startswith("sqlite"):
        targets.append(postgres_address)
    for address in targets:
        assert restore(file, address) is False
        with Ledger(address) as restored:
            assert restored.verify().sound
            assert [entry.hash for entry in restored.export()] == rows
            state, charged = restored.account("patients"), charged_ledger.account("patients")
            assert (state.spent_units, state.limit_units) == (charged.spent_units, charged.limit_units)
            number = restored.client("eve")
            restored.charge(Charge(state.id, number, "m/1", 10, rows=1))
            assert restored.account("patients").spent_units == state.spent_units + 10
            assert restored.verify().sound
        with pytest.raises(InvalidInput, match="where there is no ledger"):
            restore(file, address, "Go back to Monday.")


def test_a_backup_that_lacks_charges_is_refused_until_the_loss_is_accepted(
    filled: Path, tmp_path: Path
) -> None:
    file = tmp_path / "old.sqlite"
    with Ledger(filled) as ledger:
        back_up(ledger, file)
        account = ledger.account("patients")
        ledger.charge(Charge(account.id, ledger.client("ann"), "m/1", 1000, rows=1))
    filled.rename(tmp_path / "lost.sqlite")
    with pytest.raises(LedgerDamaged, match="has lost charges"):
        restore(file, str(filled))
    assert not filled.exists()
    assert restore(file, str(filled), "The disk failed today.") is True
    with Ledger(filled) as ledger:
        assert ledger.account("patients").spent_units == account.spent_units + 1000
        assert ledger.verify().sound


def test_a_backup_that_was_edited_or_is_none_restores_nothing(filled: Path, tmp_path: Path) -> None:
    file, target = tmp_path / "edited.sqlite", tmp_path / "target.sqlite"
    with Ledger(filled) as ledger:
        back_up(ledger, file)
    edit(file, "UPDATE accounts SET spent_units = 0 WHERE name = 'patients'")
    with pytest.raises(LedgerDamaged, match=r"has faults, the first: Account 'patients'"):
        restore(file, str(target))
    with pytest.raises(InvalidInput, match="does not exist"):
        restore(tmp_path / "absent.sqlite", str(target))
    (tmp_path / "text.sqlite").write_text(
        "no database, but long enough to be looked at\n" * 40, encoding="utf-8"
    )
    with pytest.raises(LedgerUnavailable):
        restore(tmp_path / "text.sqlite", str(target))
    assert not target.exists()


def test_an_upgrade_is_rehearsed_without_changing_the_ledger(address: str) -> None:
    with Ledger(address) as ledger:
        ledger.create_key("ann")
        edit(ledger, "UPDATE meta SET value = '7' WHERE name = 'version'")
        with _write_transaction(ledger._engine) as connection:
            _run(connection, "DROP TABLE client_names")
    for _ in range(2):
        before, after, found = rehearse_migration(address)
        assert (before, after) == (7, len(MIGRATIONS))
        assert found.sound, "as in an older ledger, the journal has the name that the table has"
    with Ledger(address):
        pass
    assert rehearse_migration(address)[:2] == (len(MIGRATIONS), len(MIGRATIONS))


def test_an_erased_name_is_in_no_file_of_the_ledger(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.create_key("somebody-with-a-name")
        ledger.erase_client("somebody-with-a-name")
        files = [file.read_bytes() for file in path.parent.glob("ledger.sqlite*")]
        assert files
        assert not any(b"somebody-with-a-name" in content for content in files)
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT COUNT(*) FROM client_names").fetchone() == (0,)

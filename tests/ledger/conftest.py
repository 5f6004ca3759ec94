"""Ledgers on each of the two databases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quietmax.ledger import Charge, Ledger
from tests.ledger.scenarios import open_patients


@pytest.fixture
def ledger(address: str) -> Iterator[Ledger]:
    """An empty ledger, on SQLite and on PostgreSQL."""
    with Ledger(address) as opened:
        yield opened


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a SQLite ledger that does not exist yet."""
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def sqlite_ledger(path: Path) -> Iterator[Ledger]:
    with Ledger(path) as opened:
        yield opened


@pytest.fixture
def charged_ledger(ledger: Ledger) -> Ledger:
    """A ledger with an account, a quota, two keys (one revoked) and nine charges, on both databases."""
    account = open_patients(ledger)
    _, key = ledger.create_key("ann")
    _, revoked = ledger.create_key("bob", "admin", days=30)
    ledger.revoke_key(revoked.id)
    ledger.set_quota("patients", "ann", 0.5, "half for ann alone")
    for number in range(9):
        ledger.charge(Charge(account.id, key.client_id, "m/1", 1000 + number, rows=1))
    assert ledger.verify().sound
    return ledger


@pytest.fixture
def filled(path: Path) -> Path:
    """The path of a SQLite ledger with an account, a quota, a key, two charges and an unproven model."""
    with Ledger(path) as ledger:
        account = open_patients(ledger)
        _, key = ledger.create_key("ann")
        ledger.set_quota("patients", "ann", 0.5, "half for ann alone")
        for _ in range(2):
            ledger.charge(Charge(account.id, key.client_id, "m/1", 1000, rows=1))
        ledger.record_unproven(account, "m/1", "conditional")
        assert ledger.verify().sound
    return path

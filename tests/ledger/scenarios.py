"""Steps that several tests of the ledger share."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import text

from quietmax.accounting import PureCost
from quietmax.errors import QuietmaxError
from quietmax.ledger import AccountState, Charge, Ledger, LimitExceeded, Terms
from quietmax.ledger.transactions import Charged, Failed, NewAnswers

REASON = "three words suffice"


def open_patients(ledger: Ledger, name: str = "patients", **more: Any) -> AccountState:
    """Open the account `patients`, or another one, with epsilon 1."""
    return ledger.open_account(name, PureCost(1.0), Terms(1.0), **more)


def charge_patients(ledger: Ledger) -> AccountState:
    """Open the account `patients` and charge it three times 1000 units for ann."""
    charge = charge_for(ledger, 1000)
    for _ in range(3):
        pay(ledger, charge)
    return ledger.account("patients")


def query_key(ledger: Ledger, model: bytes, query: bytes) -> bytes:
    return ledger.query_keys(model, memoryview(query), len(query))[0]


def account_of(ledger: Ledger, digest: str, name: str = "other") -> str | None:
    """The name of the account that is found for a training set."""
    found = ledger.find_account(name, digest)
    return None if found is None else found.name


def writer_driver(ledger: Ledger) -> Any:
    """The driver's own connection that the writer keeps."""
    connection = ledger.writer._connection
    assert connection is not None
    return connection.connection.driver_connection


def journal_kinds(ledger: Ledger) -> list[str]:
    """The kinds of the journal rows of the account `patients`, without those that bind stored answers."""
    return [entry.kind for entry in ledger.export("patients") if entry.kind != "answered"]


def pay(ledger: Ledger, charge: Charge) -> Charged:
    """Make a charge that must succeed."""
    result = ledger.charge(charge)
    assert isinstance(result, Charged), result
    return result


def exceeded(ledger: Ledger, charge: Charge) -> LimitExceeded:
    """Make a charge that must exceed a limit."""
    result = ledger.charge(charge)
    assert isinstance(result, LimitExceeded), result
    return result


def charge_error(ledger: Ledger, charge: Charge) -> QuietmaxError:
    """Make a charge that must fail, and return the error."""
    result = ledger.charge(charge)
    assert isinstance(result, Failed), result
    return result.error


def hold_writer(ledger: Ledger) -> threading.Event:
    """Keep the writer busy until the returned event is set, so that what is submitted meanwhile is one batch."""
    release, held = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        held.set()
        release.wait(20)

    ledger.submit_answers(NewAnswers(0), hold)
    assert held.wait(10)
    return release


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.001)


def wait_for(results: Sequence[object], count: int) -> None:
    wait_until(lambda: len(results) == count)


def edit(place: Path | Ledger, *statements: str) -> None:
    """Edit a ledger behind its back: a closed one of SQLite by its path, or one that is open."""
    if isinstance(place, Ledger):
        with place._engine.begin() as opened:
            for statement in statements:
                assert opened.execute(text(statement)).rowcount > 0
        return
    connection = sqlite3.connect(place)
    with connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        for statement in statements:
            assert connection.execute(statement).rowcount > 0
    connection.close()


def charge_for(ledger: Ledger, units: int = 1, request_id: str | None = None, **more: Any) -> Charge:
    """A charge of some units from the account `patients` for ann; both are made if they are new."""
    account, ann = open_patients(ledger), ledger.client("ann")
    if request_id is not None:
        more = {"request": ledger.request_key(ann, request_id), "body": b"body", **more}
    return Charge(account.id, ann, "m/1", units, rows=1, **more)

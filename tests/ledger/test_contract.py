"""What every account keeps: in memory, in a file, and in a ledger on both databases."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from quietmax.accounting.costs import LIMIT
from quietmax.errors import BudgetExhausted
from quietmax.ledger import Charge, Ledger, LimitExceeded
from quietmax.spending import FileAccount, MemoryAccount
from tests.ledger.scenarios import open_patients

ANSWERS = 150


class LedgerAccount:
    """The account `patients` of a ledger, with the interface of the others."""

    def __init__(self, address: str) -> None:
        self.ledger = Ledger(address)
        self._account, self._client = open_patients(self.ledger).id, self.ledger.client("ann")

    @property
    def answered(self) -> int:
        return self.ledger.account("patients").spent_units * ANSWERS // LIMIT

    def charge(self, queries: int, limit: int) -> None:
        charge = Charge(self._account, self._client, "m/1", LIMIT // limit, rows=queries)
        if isinstance(self.ledger.charge(charge), LimitExceeded):
            raise BudgetExhausted


def file_account(path: str) -> FileAccount:
    return FileAccount(path) if Path(path).exists() else FileAccount.create(path)


Open = Callable[[], Any]


@pytest.fixture(params=["memory", "file", "sqlite", "postgresql"])
def open_account(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Open an account, the same one each time."""
    if request.param == "memory":
        memory = MemoryAccount()
        return lambda: memory
    if request.param == "file":
        return lambda: file_account(str(tmp_path / "account"))
    if request.param == "sqlite":
        return lambda: LedgerAccount(str(tmp_path / "ledger.sqlite"))
    address = request.getfixturevalue("postgres_address")
    return lambda: LedgerAccount(address)


def test_a_budget_pays_for_exactly_its_answers_and_a_batch_completely_or_not_at_all(
    open_account: Open,
) -> None:
    account = open_account()
    for paid in range(0, 147, 3):
        assert account.answered == paid
        account.charge(3, ANSWERS)
    for batch in (4, 10**6):
        with pytest.raises(BudgetExhausted):
            account.charge(batch, ANSWERS)
    assert open_account().answered == account.answered == 147, "nothing was charged, and nothing is forgotten"
    account.charge(3, ANSWERS)
    with pytest.raises(BudgetExhausted):
        open_account().charge(1, ANSWERS)
    assert account.answered == ANSWERS


def _spend(account: Any, start: Any) -> int:
    """Charge 29 times one answer in each of four threads; return how many were paid."""
    paid: list[int] = []

    def charge_repeatedly() -> None:
        start.wait()
        for _ in range(29):
            with suppress(BudgetExhausted):
                account.charge(1, ANSWERS)
                paid.append(1)

    threads = [threading.Thread(target=charge_repeatedly) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(paid)


def test_threads_and_processes_together_get_exactly_the_answers_that_the_budget_pays_for(
    open_account: Open,
) -> None:
    account = open_account()
    if isinstance(account, MemoryAccount):  # in another process it raises
        assert _spend(account, threading.Barrier(4)) == account.answered == 116
        return
    context = multiprocessing.get_context("fork")
    start, counts = context.Barrier(16), context.SimpleQueue()
    processes = [context.Process(target=lambda: counts.put(_spend(open_account(), start))) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert sum(counts.get() for _ in processes) == account.answered == ANSWERS
    if isinstance(account, LedgerAccount):
        assert account.ledger.verify().sound

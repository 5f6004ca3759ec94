from __future__ import annotations

import queue
import re
import sqlite3
import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
from sqlalchemy.pool import QueuePool

from quietmax.accounting.costs import LIMIT
from quietmax.errors import LedgerUnavailable
from quietmax.ledger import Charge, Ledger, LimitExceeded
from quietmax.ledger import database as database_module
from quietmax.ledger import ledger as ledger_module
from quietmax.ledger.ledger import LedgerWriter, _Batch, _Conflict
from quietmax.ledger.transactions import ChargeBatch, Charged, Failed, NewAnswers, StoredAnswer
from tests.ledger.scenarios import (
    charge_error,
    charge_for,
    exceeded,
    hold_writer,
    open_patients,
    pay,
    wait_for,
    wait_until,
)

CHARGE: Any = (Charge(1, 1, "m/1", 1, rows=1), print)
ANSWERS: Any = (NewAnswers(1, (b"q" * 16,), b"answer"), print)
REQUESTED: Any = (NewAnswers(1, request=b"request", answer=b"answer"), print)
FLUSH_INTERVAL: Any = pytest.approx(ledger_module._FLUSH_INTERVAL)


def _submit(ledger: Ledger, count: int, units: int, results: list[Any]) -> None:
    charge = charge_for(ledger, units)
    for _ in range(count):
        ledger.submit_charges([charge], results.extend)


def test_concurrent_charges_share_a_transaction(ledger: Ledger) -> None:
    charge_for(ledger)
    gate, results = hold_writer(ledger), list[Any]()
    before = ledger.writer.batches
    _submit(ledger, 500, LIMIT // 400, results)
    gate.set()
    wait_for(results, 500)
    assert Counter(type(result) for result in results) == {Charged: 400, LimitExceeded: 100}
    assert ledger.writer.batches - before == 1
    assert ledger.verify().sound


def test_a_batch_is_written_when_it_is_as_large_as_the_last(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    charge_for(ledger)
    gate, results = hold_writer(ledger), list[Any]()
    _submit(ledger, 3, 1, results)
    gate.set()
    wait_for(results, 3)
    monkeypatch.setattr(ledger.writer, "_window", 600.0)
    before = ledger.writer.batches
    _submit(ledger, 3, 1, results)
    wait_for(results, 6)
    assert ledger.writer.batches - before == 1


def test_charges_that_are_submitted_together_get_their_results_together_and_in_order(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "_MAX_BATCH", 2)  # so that they need several transactions
    with Ledger(path) as ledger:
        calls: list[Any] = []
        ledger.submit_charges([charge_for(ledger, units) for units in (1, 2, LIMIT, 3, 4)], calls.append)
        wait_for(calls, 1)
        assert [getattr(each, "units", None) for each in calls[0]] == [1, 2, LIMIT, 3, 4]
        assert isinstance(calls[0][2], LimitExceeded)


@pytest.mark.parametrize("released", [True, False])
def test_a_charge_takes_the_lock_of_sqlite_soon_after_another_process_releases_it(
    released: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ledger(path) as ledger:
        charge = charge_for(ledger)
        assert isinstance(ledger.charge(charge), Charged)
        other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        now, pauses = [0.0], list[float]()

        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            now[0] += seconds
            if released and len(pauses) == 3:
                other.execute("ROLLBACK")

        clock = SimpleNamespace(sleep=sleep, monotonic=lambda: now[0])
        monkeypatch.setattr(database_module, "time", clock)
        result = ledger.charge(charge)
        other.close()
        assert isinstance(result, Charged if released else Failed)
        assert (len(pauses) == 3) == released
        assert max(pauses) <= 0.005
        assert all(one <= other <= 2 * one for one, other in pairwise(pauses)), "they grow slowly"
        assert released or now[0] == pytest.approx(10.0, abs=0.01)


def test_refused_charges_are_counted_soon_even_if_nothing_else_is_written(ledger: Ledger) -> None:
    ledger.charge(charge_for(ledger, LIMIT + 1))
    account = ledger.account("patients")
    wait_until(lambda: [each.refused for each in ledger.subaccounts(account)] == [1], 60)


def test_what_waits_is_written_when_the_ledger_is_closed(path: Path) -> None:
    results: list[Any] = []
    with Ledger(path) as ledger:
        charge_for(ledger)
        gate = hold_writer(ledger)
        _submit(ledger, 50, 1, results)
        _submit(ledger, 1, LIMIT, results)
        gate.set()
    assert [type(result) for result in results] == [Charged] * 50 + [LimitExceeded]
    with Ledger(path) as ledger:
        account = ledger.account("patients")
        assert account.spent_units == 50
        assert [each.refused for each in ledger.subaccounts(account)] == [1]


def test_what_is_submitted_after_close_fails_at_once(path: Path) -> None:
    with Ledger(path) as ledger:
        charge = charge_for(ledger)
        gate = hold_writer(ledger)
        closing = threading.Thread(target=ledger.writer._close)
        closing.start()
        wait_until(lambda: ledger.writer._ended)
        results: list[Any] = []
        ledger.submit_charges([charge] * 5, results.append)  # behind the end, while the thread still writes
        ledger.submit_answers(NewAnswers(0), results.append)
        assert [[type(each) for each in results[0]], type(results[1])] == [[Failed] * 5, Failed]
        gate.set()
        closing.join(20)
        assert not closing.is_alive()
    assert "The ledger is closed" in str(charge_error(ledger, charge))
    with pytest.raises(LedgerUnavailable, match="The ledger is closed"):
        ledger.store_answers(NewAnswers(charge.account, (b"q" * 16,), b"answer"))
    with Ledger(path) as ledger:
        assert ledger.account("patients").spent_units == 0


def test_an_error_in_a_callback_does_not_stop_the_writer(path: Path) -> None:
    with Ledger(path) as ledger:
        charge = charge_for(ledger)
        ledger.submit_charges([charge], lambda _: [][0])
        assert isinstance(ledger.charge(charge), Charged)


def test_answers_are_stored_as_soon_as_the_ledger_is_back(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    query = b"q" * 16
    with Ledger(path) as ledger:
        account = open_patients(ledger)
        path.rename(tmp_path / "away")
        results: list[Any] = []
        ledger.submit_answers(NewAnswers(account.id, (query,), b"answer"), results.append)
        (tmp_path / "away").rename(path)
        charge = charge_for(ledger, queries=(query,))
        asked = pay(ledger, charge)
        while not results:
            asked = pay(ledger, charge)
        assert results == [StoredAnswer(b"", True)]
        assert dict(asked.cached) == {query: b"answer"}


def _checked_out(ledger: Ledger) -> int:
    pool = ledger._engine.pool
    assert isinstance(pool, QueuePool)
    return pool.checkedout()


def test_a_failed_connection_is_replaced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with Ledger(path) as ledger:
        charge = charge_for(ledger)
        pay(ledger, charge)
        assert _checked_out(ledger) == 1
        with monkeypatch.context() as patch:
            patch.setattr(ChargeBatch, "_save", fail)
            assert "disk I/O error" in str(charge_error(ledger, charge))
        assert _checked_out(ledger) == 0
        ledger._engine.dispose()  # SQLite deletes its log with the last connection
        assert not path.with_name(path.name + "-wal").exists()
        pay(ledger, charge)
        assert ledger.account("patients").spent_units == 2


def test_a_repeated_conflict_is_reported_in_the_words_of_the_database(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ledger(path) as ledger:
        charge = charge_for(ledger)

        def conflict(_: object) -> None:
            raise sqlite3.IntegrityError("UNIQUE constraint failed: requests.request")

        monkeypatch.setattr(ChargeBatch, "_save", conflict)
        message = str(charge_error(ledger, charge))
    assert "UNIQUE constraint failed" in message
    assert "_Conflict" not in message


# --- without a thread ---------------------------------------------------------------------------------------------


def _stopped_writer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A writer without a thread, at the time 100."""
    monkeypatch.setattr(ledger_module, "time", SimpleNamespace(monotonic=lambda: 100.0))
    writer: Any = object.__new__(LedgerWriter)
    writer._closing = False
    writer._retries = []
    writer.error = None
    return writer


def test_a_charge_at_its_deadline_fails_once_and_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = _stopped_writer(monkeypatch)
    written: list[Charge] = []
    results: list[Any] = []
    writer._write_batch = lambda batch: written.extend(charge for charge, _ in batch.charges)
    charges = [Charge(1, 1, "m/1", 1, rows=1, deadline=deadline) for deadline in (99.0, 100.0, 100.5)]
    writer._write(_Batch([(charge, results.append) for charge in charges]))
    assert written == charges[2:]
    assert [type(result) for result in results] == [Failed, Failed]
    assert "reached its deadline before the ledger" in str(results[0].error)


def test_answers_that_could_not_be_stored_are_retried_until_their_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = _stopped_writer(monkeypatch)
    results: list[Any] = []

    def fail(*_: object) -> None:
        raise LedgerUnavailable("The disk is full.")

    writer._commit = fail
    answers = [
        (NewAnswers(0, answer=b"%d" % number, deadline=deadline), results.append)
        for number, deadline in enumerate((99.0, 100.0, 100.5))
    ]
    writer._write_batch(_Batch([(CHARGE[0], results.append)], answers))
    assert writer._retries == answers[2:]
    assert [str(result.error) for result in results] == ["The disk is full."] * 3
    assert writer.error is results[0].error
    writer._closing, writer._retries = True, []
    writer._write_batch(_Batch([], answers))
    assert writer._retries == []
    assert len(results) == 6


def test_a_batch_with_a_conflict_is_written_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = _stopped_writer(monkeypatch)
    sizes = []

    def conflict(batch: _Batch) -> None:
        sizes.append((len(batch.charges), len(batch.answers)))
        if sum(sizes[-1]) > 1:
            raise _Conflict

    writer._write_batch = conflict
    writer._write(_Batch([CHARGE] * 2, [ANSWERS] * 3))
    assert sizes == [(2, 3), (1, 0), (1, 0), (0, 1), (0, 1), (0, 1)]


# --- collecting a batch, with a simulated clock and queue ---------------------------------------------------------

Item = tuple[float, Any]
"""An item of the queue, and the seconds after which it arrives."""
WINDOW: Any = pytest.approx(ledger_module._MIN_WINDOW)
REFUSED_INTERVAL: Any = pytest.approx(ledger_module._REFUSED_FLUSH_INTERVAL)


class SimulatedQueue:
    """A queue with a clock of its own. It stands for the module `time` and for the event of the writer as well."""

    def __init__(self, *items: Item) -> None:
        self.now = 1000.0
        self.items = list(items)
        self.timeouts: list[float | None] = []
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def clear(self) -> None:
        """As an event: nobody sets it."""

    wait = sleep

    def get(self, timeout: float | None) -> Any:
        self.timeouts.append(timeout)
        if not self.items or (timeout is not None and self.items[0][0] > timeout):
            assert timeout is not None, "the writer would wait for ever"
            self.now += timeout
            raise queue.Empty
        after, item = self.items.pop(0)
        self.now += after
        return item

    def get_nowait(self) -> Any:
        if not self.qsize():
            raise queue.Empty
        return self.items.pop(0)[1]

    def qsize(self) -> int:
        return next((place for place, (after, _) in enumerate(self.items) if after), len(self.items))


def _collecting(
    monkeypatch: pytest.MonkeyPatch,
    *items: Item,
    last_batch_size: int = 0,
    refused: int = 0,
    retries: tuple[Any, ...] = (),
) -> Any:
    """A writer without a thread whose queue is simulated."""
    writer = _stopped_writer(monkeypatch)
    writer._queue = writer._wake = SimulatedQueue(*items)
    monkeypatch.setattr(ledger_module, "time", writer._queue)
    writer._last_batch_size, writer._window = last_batch_size, ledger_module._MIN_WINDOW
    writer._retries, writer._refused = list(retries), Counter({(1, 1): refused} if refused else {})
    return writer


@pytest.mark.parametrize(
    ("items", "options", "charges", "answers", "timeouts", "slept"),
    [
        # at once with all that waits: charges, and answers of a request id
        ([(3, CHARGE), (0, ANSWERS), (0, CHARGE), (0.1, CHARGE)], {}, 2, 1, [None], []),
        ([(3, REQUESTED)], {}, 0, 1, [None], []),
        # answers that nobody waits for: after the flush interval, which a second one does not begin again
        ([(3, ANSWERS)], {}, 0, 1, [None, FLUSH_INTERVAL], []),
        ([(3, ANSWERS), (0.01, CHARGE)], {}, 1, 1, [None, FLUSH_INTERVAL], []),
        ([(3, ANSWERS), (0.015, ANSWERS), (1, ANSWERS)], {}, 0, 2, [None, FLUSH_INTERVAL, ANY], []),
        # refused charges: counted after their interval, or with what comes first
        ([], {"refused": 2}, 0, 0, [REFUSED_INTERVAL], []),
        ([(0.1, ANSWERS)], {"refused": 2}, 0, 1, [REFUSED_INTERVAL, FLUSH_INTERVAL], []),
        # as many charges as the last batch had, within one batch window
        ([(3, CHARGE), (0, CHARGE)], {"last_batch_size": 2}, 2, 0, [None], []),
        ([(3, CHARGE), (9, CHARGE)], {"last_batch_size": 2}, 1, 0, [None], [WINDOW]),
        ([(0, CHARGE)] * 3, {"last_batch_size": 9}, 3, 0, [None], [WINDOW]),
        ([(3, REQUESTED)], {"last_batch_size": 2}, 0, 1, [None], []),
        # a full batch
        ([(0, CHARGE), *[(0, ANSWERS)] * 2, *[(0, CHARGE)] * 2], {}, 2, 2, [None], []),
        # answers that failed: retried after a delay
        ([], {"retries": (ANSWERS,)}, 0, 1, [FLUSH_INTERVAL], [ledger_module._RETRY_DELAY]),
    ],
)
def test_a_batch_waits_for_what_shares_its_flush_and_no_longer(
    items: list[Item],
    options: dict[str, Any],
    charges: int,
    answers: int,
    timeouts: list[Any],
    slept: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger_module, "_MAX_BATCH", 4)
    writer = _collecting(monkeypatch, *items, **options)
    batch = writer._next_batch()
    assert (len(batch.charges), len(batch.answers), writer._retries) == (charges, answers, [])
    assert (writer._queue.timeouts, writer._queue.slept) == (timeouts, slept)
    if len(timeouts) == 3:
        assert writer._queue.now == pytest.approx(1003.0 + ledger_module._FLUSH_INTERVAL)


@pytest.mark.parametrize(
    ("window", "arrives_after", "next_window"),
    [
        (0.006, 0.004, 0.008),
        (0.006, 0.001, 0.006),
        (0.02, 0.019, 0.03),
        (0.02, None, 0.01),
        (0.008, None, 0.006),
    ],
)
def test_the_batch_window_is_twice_the_last_wait_and_half_after_a_wait_in_vain(
    window: float, arrives_after: float | None, next_window: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = _collecting(monkeypatch)

    def wait(seconds: float) -> bool:
        writer._queue.now += seconds if arrives_after is None else arrives_after
        return arrives_after is not None

    monkeypatch.setattr(writer._queue, "wait", wait)
    writer._window = window
    writer._wait_for(1)
    assert writer._window == pytest.approx(next_window)


def test_a_clock_that_goes_back_is_noticed_also_after_a_restart(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = time.time_ns
    with Ledger(path) as ledger:
        charge = charge_for(ledger)
        assert isinstance(ledger.charge(charge), Charged)
        assert not caplog.records
        monkeypatch.setattr(time, "time_ns", lambda: real() - 60 * 10**9)
        for _ in range(2):
            assert isinstance(ledger.charge(charge), Charged)
        (warned,) = caplog.messages
        assert re.match(r"The clock went back by (5\d|60)\.\d seconds\.", warned)
        assert ledger.verify().sound
    caplog.clear()
    monkeypatch.setattr(time, "time_ns", lambda: real() - 3600 * 10**9)
    with Ledger(path) as ledger:
        assert isinstance(ledger.charge(charge), Charged)
        assert len(caplog.messages) == 1


def test_a_removed_write_ahead_log_is_noticed_before_the_next_charge(path: Path) -> None:
    with Ledger(path) as ledger:
        charge = charge_for(ledger)
        pay(ledger, charge)
        path.with_name(path.name + "-wal").rename(path.with_name("log"))
        assert "-wal was removed or replaced while in use" in str(charge_error(ledger, charge))
        with pytest.raises(LedgerUnavailable, match="-wal was removed or replaced while in use"):
            ledger.client("bob")
        path.with_name("log").rename(path.with_name(path.name + "-wal"))
        pay(ledger, charge)
        assert ledger.account("patients").spent_units == 2


def test_refused_charges_are_not_counted_before_their_interval_is_over(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of them writes little: most of its transactions are rolled back."""
    with Ledger(path) as ledger:
        account, refused = open_patients(ledger), charge_for(ledger, LIMIT + 1)
        monkeypatch.setattr(ledger_module, "_REFUSED_FLUSH_INTERVAL", 1.5 * time.monotonic())
        for _ in range(3):
            exceeded(ledger, refused)
        assert ledger.subaccounts(account) == []
    with Ledger(path) as ledger:
        assert [each.refused for each in ledger.subaccounts(account)] == [3]

"""The writing thread at its limits: the very deadline, a group that is full, and the end."""

from __future__ import annotations

import queue
import sqlite3
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from quietmax.accounting import LIMIT, PureCost
from quietmax.errors import InvalidInput
from quietmax.ledger import (
    Charge,
    Charged,
    Failed,
    Ledger,
    LedgerUnavailable,
    LimitExceeded,
    NewAnswers,
    Terms,
)
from quietmax.ledger import writer as writer_module
from quietmax.ledger.accounts import now
from quietmax.ledger.database import FileGuard, open_engine
from quietmax.ledger.transactions import ChargeBatch
from quietmax.ledger.writer import LedgerWriter, _Conflict
from tests.ledger.holding import held


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.sqlite"


def _stopped(monkeypatch, moment=100.0) -> LedgerWriter:
    """A writer without a thread, at a moment that stands still."""
    monkeypatch.setattr(writer_module, "time", SimpleNamespace(monotonic=lambda: moment))
    writer = object.__new__(LedgerWriter)
    writer._closing = False
    writer._retries = []
    writer.error = None
    return writer


def _charge(deadline=float("inf")) -> Charge:
    return Charge(1, 1, "m/1", 1, rows=1, deadline=deadline)


def test_at_its_very_deadline_a_charge_is_told_so_once_and_not_written(monkeypatch):
    writer, written, told = _stopped(monkeypatch), [], []
    writer._write_batch = lambda charges, _: written.extend(charge for charge, _ in charges)
    charges = [_charge(deadline) for deadline in (99.0, 100.0, 100.5)]
    writer._write([(charge, told.append) for charge in charges], [])
    assert written == charges[2:]
    assert [type(outcome) for outcome in told] == [Failed, Failed]
    assert "reached its deadline before the ledger" in str(told[0].error)


def test_answers_that_could_not_be_stored_are_tried_again_until_their_very_deadline(monkeypatch):
    writer, told = _stopped(monkeypatch), []

    def fail(*_):
        raise LedgerUnavailable("The disk is full.")

    writer._commit = fail
    stores = [
        (NewAnswers(answer=b"%d" % number, deadline=deadline), told.append)
        for number, deadline in enumerate((99.0, 100.0, 100.5))
    ]
    writer._write_batch([(_charge(), told.append)], stores)
    assert writer._retries == stores[2:]
    assert [str(outcome.error) for outcome in told] == ["The disk is full."] * 3
    assert writer.error is told[0].error
    writer._closing, writer._retries = True, []
    writer._write_batch([], stores)
    assert writer._retries == []
    assert len(told) == 6


def test_a_group_that_met_another_process_is_written_one_by_one(monkeypatch):
    writer, groups = _stopped(monkeypatch), []

    def collide(charges, stores):
        groups.append((len(charges), len(stores)))
        if len(charges) + len(stores) > 1:
            raise _Conflict

    writer._write_batch = collide
    charges = [(_charge(), print)] * 2
    writer._write(charges, [(NewAnswers(), print)] * 3)
    assert groups == [(2, 3), (1, 0), (1, 0), (0, 1), (0, 1), (0, 1)]


def test_a_closed_ledger_spends_nothing_and_says_so(path):
    with Ledger(path) as ledger:
        account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
        charge = Charge(account.id, ledger.client("ann"), "m/1", 1, rows=1)
        assert isinstance(ledger.charge(charge), Charged)
    assert "The ledger is closed" in str(ledger.charge(charge).error)
    with pytest.raises(LedgerUnavailable, match="The ledger is closed"):
        ledger.store_answers(NewAnswers(account.id, (b"q" * 16,), b"answer"))
    with Ledger(path) as ledger:
        assert ledger.account("patients").spent_units == 1


def test_what_waits_when_the_ledger_is_closed_is_written(path):
    told = []
    with Ledger(path) as ledger:
        account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
        ann = ledger.client("ann")
        gate = held(ledger)
        for _ in range(50):
            ledger.submit_charge(Charge(account.id, ann, "m/1", 1, rows=1), told.append)
        ledger.submit_charge(Charge(account.id, ann, "m/1", LIMIT, rows=1), told.append)
        gate.set()
    assert [type(outcome) for outcome in told] == [Charged] * 50 + [LimitExceeded]
    with Ledger(path) as ledger:
        account = ledger.account("patients")
        assert account.spent_units == 50
        assert [part.refused for part in ledger.subaccounts(account)] == [1]


def test_a_callback_that_fails_harms_nobody(path):
    with Ledger(path) as ledger:
        account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
        charge = Charge(account.id, ledger.client("ann"), "m/1", 1, rows=1)
        ledger.submit_charge(charge, lambda _: 1 / 0)
        assert isinstance(ledger.charge(charge), Charged)


def test_a_full_group_is_written_and_the_rest_comes_next(path, monkeypatch):
    monkeypatch.setattr(writer_module, "_MAX_BATCH", 4)
    with Ledger(path) as ledger:
        account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
        ann = ledger.client("ann")
        reached, gate, told = threading.Event(), threading.Event(), []

        def hold(_):
            reached.set()
            gate.wait(20)

        ledger.submit_answers(NewAnswers(), hold)
        assert reached.wait(20)
        before = ledger.writer.batches
        for _ in range(9):
            ledger.submit_charge(Charge(account.id, ann, "m/1", 1, rows=1), told.append)
        gate.set()
        deadline = time.monotonic() + 60
        while len(told) < 9:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert ledger.writer.batches - before == 3


def test_a_ledger_is_in_its_place_until_it_is_moved_and_again_when_it_is_back(path):
    engine = open_engine(path)
    place = FileGuard(engine)
    place.check()
    path.rename(path.with_suffix(".away"))
    with pytest.raises(LedgerUnavailable, match="was moved, deleted or replaced"):
        place.check()
    path.touch()
    with pytest.raises(LedgerUnavailable, match="was moved, deleted or replaced"):
        place.check()
    path.with_suffix(".away").rename(path)
    place.check()
    engine.dispose()


def test_a_failed_ledger_is_fit_again_after_the_next_write(path):
    with Ledger(path) as ledger:
        account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
        charge = Charge(account.id, ledger.client("ann"), "m/1", 1, rows=1)
        path.rename(path.with_suffix(".away"))
        assert isinstance(ledger.charge(charge), Failed)
        assert ledger.writer.error is not None
        path.with_suffix(".away").rename(path)
        assert isinstance(ledger.charge(charge), Charged)
        assert ledger.writer.error is None


# --- gathering, with a clock and a queue that stand still -----------------------------------------------------------


class Waiting:
    """A queue whose items come after given seconds of a clock of its own; what is asked of it is remembered."""

    def __init__(self, *items):
        self.now, self.items, self.timeouts, self.slept = 1000.0, list(items), [], []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds

    def clear(self):
        """As an event: nobody sets it."""

    wait = sleep

    def get(self, timeout):
        self.timeouts.append(timeout)
        if not self.items or (timeout is not None and self.items[0][0] > timeout):
            assert timeout is not None, "it would wait for ever"
            self.now += timeout
            raise queue.Empty
        after, item = self.items.pop(0)
        self.now += after
        return item

    def get_nowait(self):
        if not self.qsize():
            raise queue.Empty
        return self.items.pop(0)[1]

    def qsize(self):
        return next((place for place, (after, _) in enumerate(self.items) if after), len(self.items))


def _gathering(monkeypatch, *items, last_batch_size=0, refusals=0, again=()):
    waiting = Waiting(*items)
    monkeypatch.setattr(writer_module, "time", waiting)
    writer = object.__new__(LedgerWriter)
    writer._queue, writer._closing, writer._last_batch_size = waiting, False, last_batch_size
    writer._wake = waiting
    writer._retries, writer._refused = list(again), Counter({(1, 1): refusals} if refusals else {})
    batch = writer._next_batch()
    return waiting, batch.charges, batch.answers, writer


CHARGE = (Charge(1, 1, "m/1", 1, rows=1), print)
ANSWERS = (NewAnswers(1, (b"q" * 16,), b"answer"), print)
REQUESTED = (NewAnswers(request=b"request", answer=b"answer"), print)
FLUSH_INTERVAL = pytest.approx(writer_module._FLUSH_INTERVAL)


def test_charges_and_requested_answers_are_taken_at_once_with_all_that_waits(monkeypatch):
    waiting, charges, stores, _ = _gathering(
        monkeypatch, (3.0, CHARGE), (0.0, ANSWERS), (0.0, CHARGE), (0.1, CHARGE)
    )
    assert (charges, stores) == ([CHARGE, CHARGE], [ANSWERS])
    assert (waiting.timeouts, waiting.slept) == ([None], [])
    waiting, charges, stores, _ = _gathering(monkeypatch, (3.0, REQUESTED))
    assert (charges, stores, waiting.timeouts) == ([], [REQUESTED], [None])


def test_answers_nobody_waits_for_are_held_for_a_moment(monkeypatch):
    waiting, charges, stores, _ = _gathering(monkeypatch, (3.0, ANSWERS))
    assert (charges, stores) == ([], [ANSWERS])
    assert waiting.timeouts == [None, FLUSH_INTERVAL]
    waiting, charges, stores, _ = _gathering(monkeypatch, (3.0, ANSWERS), (0.01, CHARGE))
    assert (charges, stores) == ([CHARGE], [ANSWERS])
    waiting, charges, stores, _ = _gathering(monkeypatch, (3.0, ANSWERS), (0.015, ANSWERS), (0.015, ANSWERS))
    assert (charges, stores) == ([], [ANSWERS, ANSWERS])  # a second one does not make the first wait longer
    assert waiting.now == pytest.approx(1003.0 + writer_module._FLUSH_INTERVAL)


def test_refusals_are_counted_after_their_seconds_or_with_what_comes_first(monkeypatch):
    waiting, charges, stores, _ = _gathering(monkeypatch, refusals=2)
    assert (charges, stores) == ([], [])
    assert waiting.timeouts == [pytest.approx(writer_module._REFUSED_FLUSH_INTERVAL)]
    waiting, _, stores, _ = _gathering(monkeypatch, (0.1, ANSWERS), refusals=2)
    assert stores == [ANSWERS]
    assert waiting.timeouts[1:] == [FLUSH_INTERVAL]


def test_a_group_waits_for_as_many_as_the_last_had_but_only_so_long(monkeypatch):
    waiting, charges, _, _ = _gathering(monkeypatch, (3.0, CHARGE), (0.0, CHARGE), last_batch_size=2)
    assert (len(charges), waiting.slept) == (2, [])
    waiting, charges, _, _ = _gathering(monkeypatch, (3.0, CHARGE), (9.0, CHARGE), last_batch_size=2)
    assert (len(charges), sum(waiting.slept)) == (1, pytest.approx(writer_module._BATCH_WINDOW))
    waiting, _, stores, _ = _gathering(monkeypatch, (3.0, REQUESTED), last_batch_size=2)
    assert (len(stores), waiting.slept) == (1, [])


def test_answers_that_failed_are_tried_again_after_a_pause(monkeypatch):
    waiting, charges, stores, writer = _gathering(monkeypatch, again=[ANSWERS])
    assert (charges, stores, writer._retries) == ([], [ANSWERS], [])
    assert (waiting.slept, waiting.timeouts) == ([writer_module._RETRY_DELAY], [FLUSH_INTERVAL])


def test_closing_takes_what_waits_before_it(monkeypatch):
    _, charges, stores, writer = _gathering(monkeypatch, (3.0, ANSWERS), (0.0, CHARGE), (0.0, None))
    assert (charges, stores, writer._closing) == ([CHARGE], [ANSWERS], True)


def test_a_charge_is_journalled_with_its_time_in_microseconds(path):
    with Ledger(path) as ledger:
        account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
        before = now()
        ledger.charge(Charge(account.id, ledger.client("ann"), "m/1", 1, rows=1))
        assert before <= list(ledger.export("patients"))[-1].time <= now()


def test_a_connection_that_failed_is_given_up_and_another_one_taken(path, monkeypatch):
    def fail(_):
        raise sqlite3.OperationalError("disk I/O error")

    with Ledger(path) as ledger:
        account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
        charge = Charge(account.id, ledger.client("ann"), "m/1", 1, rows=1)
        assert isinstance(ledger.charge(charge), Charged)
        assert ledger._engine.pool.checkedout() == 1
        with monkeypatch.context() as patch:
            patch.setattr(ChargeBatch, "save", fail)
            assert "disk I/O error" in str(ledger.charge(charge).error)
        assert ledger._engine.pool.checkedout() == 0
        assert isinstance(ledger.charge(charge), Charged)
        assert ledger.account("patients").spent_units == 2


def test_what_comes_after_the_end_is_told_so_and_nobody_waits(path):
    with Ledger(path) as ledger:
        account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
        charge = Charge(account.id, ledger.client("ann"), "m/1", 1, rows=1)
        gate = held(ledger)
        closing = threading.Thread(target=ledger.writer.close)
        closing.start()
        while not ledger.writer._ended:
            time.sleep(0.001)
        told = []
        ledger.submit_charge(charge, told.append)  # behind the end, while the thread still writes
        ledger.submit_answers(NewAnswers(), told.append)
        assert [type(each) for each in told] == [Failed, Failed]
        gate.set()
        closing.join(20)
        assert not closing.is_alive()


def test_a_row_written_by_another_process_twice_is_told_in_the_database_s_words(path, monkeypatch):
    with Ledger(path) as ledger:
        account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
        charge = Charge(account.id, ledger.client("ann"), "m/1", 1, rows=1)

        def collide(*_):
            raise sqlite3.IntegrityError("UNIQUE constraint failed: requests.request")

        monkeypatch.setattr(ChargeBatch, "save", collide)
        outcome = ledger.charge(charge)
    told = str(outcome.error)
    assert "UNIQUE constraint failed" in told
    assert "_Conflict" not in told


def test_no_account_can_have_the_name_of_the_book_of_keys(path):
    with Ledger(path) as ledger, pytest.raises(InvalidInput, match="account name"):
        ledger.find_account("(keys)")


def test_the_reason_for_a_new_account_is_a_sentence_too(path):
    with Ledger(path) as ledger:
        with pytest.raises(InvalidInput, match="must have at least 3 words"):
            ledger.open_account("patients", PureCost(1.0), Terms(1.0), because="so")
        assert ledger.accounts() == []

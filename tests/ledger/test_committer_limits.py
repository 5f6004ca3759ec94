"""The writing thread at its limits: the very deadline, a group that is full, and the end."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from quietmax.accounting import LIMIT, PureCost
from quietmax.ledger import Charge, Charged, Failed, Ledger, LedgerUnavailable, Refused, Store, Terms
from quietmax.ledger import committer as committer_module
from quietmax.ledger.committer import Committer, Place, _Collided
from quietmax.ledger.database import opened


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.sqlite"


def _stopped(monkeypatch, moment=100.0) -> Committer:
    """A committer without a thread, at a moment that stands still."""
    monkeypatch.setattr(committer_module, "time", SimpleNamespace(monotonic=lambda: moment))
    committer = object.__new__(Committer)
    committer._closing = False
    committer._again = []
    committer.failing = None
    return committer


def _charge(deadline=float("inf")) -> Charge:
    return Charge(1, 1, "m/1", 1, rows=1, deadline=deadline)


def test_at_its_very_deadline_a_charge_is_told_so_once_and_not_written(monkeypatch):
    committer, written, told = _stopped(monkeypatch), [], []
    committer._write_group = lambda charges, _: written.extend(charge for charge, _ in charges)
    charges = [_charge(deadline) for deadline in (99.0, 100.0, 100.5)]
    committer._write([(charge, told.append) for charge in charges], [])
    assert written == charges[2:]
    assert [type(outcome) for outcome in told] == [Failed, Failed]
    assert "did not come to this request in time" in str(told[0].problem)


def test_answers_that_could_not_be_stored_are_tried_again_until_their_very_deadline(monkeypatch):
    committer, told = _stopped(monkeypatch), []

    def fail(*_):
        raise LedgerUnavailable("The disk is full.")

    committer._commit = fail
    stores = [
        (Store(answer=b"%d" % number, deadline=deadline), told.append)
        for number, deadline in enumerate((99.0, 100.0, 100.5))
    ]
    committer._write_group([(_charge(), told.append)], stores)
    assert committer._again == stores[2:]
    assert [str(outcome.problem) for outcome in told] == ["The disk is full."] * 3
    assert committer.failing is told[0].problem
    committer._closing, committer._again = True, []
    committer._write_group([], stores)
    assert committer._again == []
    assert len(told) == 6


def test_a_group_that_met_another_process_is_written_one_by_one(monkeypatch):
    committer, groups = _stopped(monkeypatch), []

    def collide(charges, stores):
        groups.append((len(charges), len(stores)))
        if len(charges) + len(stores) > 1:
            raise _Collided

    committer._write_group = collide
    charges = [(_charge(), print)] * 2
    committer._write(charges, [(Store(), print)] * 3)
    assert groups == [(2, 3), (1, 0), (1, 0), (0, 1), (0, 1), (0, 1)]


def test_a_closed_ledger_spends_nothing_and_says_so(path):
    with Ledger(path) as ledger:
        account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
        charge = Charge(account.id, ledger.client("ann"), "m/1", 1, rows=1)
        assert isinstance(ledger.charge(charge), Charged)
    assert "The ledger is closed" in str(ledger.charge(charge).problem)
    with pytest.raises(LedgerUnavailable, match="The ledger is closed"):
        ledger.store(Store(account.id, (b"q" * 16,), b"answer"))
    with Ledger(path) as ledger:
        assert ledger.account("patients").spent_units == 1


def test_what_waits_when_the_ledger_is_closed_is_written(path):
    told = []
    with Ledger(path) as ledger:
        account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
        ann = ledger.client("ann")
        reached, gate = threading.Event(), threading.Event()

        def hold(_):
            reached.set()
            gate.wait(20)

        ledger.submit_store(Store(), hold)
        assert reached.wait(20)
        for _ in range(50):
            ledger.submit(Charge(account.id, ann, "m/1", 1, rows=1), told.append)
        ledger.submit(Charge(account.id, ann, "m/1", LIMIT, rows=1), told.append)
        gate.set()
    assert [type(outcome) for outcome in told] == [Charged] * 50 + [Refused]
    with Ledger(path) as ledger:
        account = ledger.account("patients")
        assert account.spent_units == 50
        assert [part.refused for part in ledger.parts(account)] == [1]


def test_a_callback_that_fails_harms_nobody(path):
    with Ledger(path) as ledger:
        account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
        charge = Charge(account.id, ledger.client("ann"), "m/1", 1, rows=1)
        ledger.submit(charge, lambda _: 1 / 0)
        assert isinstance(ledger.charge(charge), Charged)


def test_a_full_group_is_written_and_the_rest_comes_next(path, monkeypatch):
    monkeypatch.setattr(committer_module, "_MOST_TOGETHER", 4)
    with Ledger(path) as ledger:
        account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
        ann = ledger.client("ann")
        reached, gate, told = threading.Event(), threading.Event(), []

        def hold(_):
            reached.set()
            gate.wait(20)

        ledger.submit_store(Store(), hold)
        assert reached.wait(20)
        before = ledger.committer.groups
        for _ in range(8):
            ledger.submit(Charge(account.id, ann, "m/1", 1, rows=1), told.append)
        gate.set()
        deadline = time.monotonic() + 60
        while len(told) < 8:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert ledger.committer.groups - before == 2


def test_a_ledger_is_in_its_place_until_it_is_moved_and_again_when_it_is_back(path):
    engine = opened(path)
    place = Place(engine)
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
        assert ledger.committer.failing is not None
        path.with_suffix(".away").rename(path)
        assert isinstance(ledger.charge(charge), Charged)
        assert ledger.committer.failing is None

"""Group commit: one thread writes everything that waits in one transaction, so that a disk flush serves many.

While a group is being flushed the next one gathers. Clients that were charged together tend to ask again together, so a
group waits a few milliseconds for as many charges as the last one had; a client alone never waits. `done` is called in
this thread, after the commit: an outcome `Charged` means that the charge will survive a crash. Charges of a group whose
transaction failed are not tried again (nobody is answered); answers that could not be stored are, until their deadline.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from quietmax.errors import LedgerUnavailable, QuietmaxError
from quietmax.ledger.answer_cache import AnswerCache
from quietmax.ledger.database import Cursor, unavailable, writer
from quietmax.ledger.transactions import (
    Charge,
    ChargeBatch,
    ChargeResult,
    Failed,
    LimitExceeded,
    NewAnswers,
    StoredAnswer,
    count_refusals,
    keep,
    locked,
)

_MOST_TOGETHER = 1024
_PAUSE = 0.1
_MOMENT = 0.02
_REFUSALS_SECONDS = 0.5
_COMPANY_SECONDS = 0.006

ChargeDone = Callable[[ChargeResult], None]
StoreDone = Callable[[StoredAnswer | Failed], None]
_Waiting = tuple[Charge, ChargeDone]
_Keeping = tuple[NewAnswers, StoreDone]

_CLOSED = LedgerUnavailable("The ledger is closed; nothing was spent, ask again when it is open.")
_TOO_LATE = LedgerUnavailable(
    "The ledger did not come to this request in time; nothing was spent, ask again."
)


class _Collided(Exception):
    """Another process has written the same row in the meantime; the transaction was undone."""


class LedgerWriter:
    """The writing thread of a ledger."""

    def __init__(self, engine: Engine, place: Place) -> None:
        self._engine = engine
        self._queue: queue.SimpleQueue[_Waiting | _Keeping | None] = queue.SimpleQueue()
        self._again: list[_Keeping] = []
        self._refusals: Counter[tuple[int, int]] = Counter()
        self._connection: Connection | None = None
        self._answer_cache = AnswerCache()
        driver: Any = engine.dialect.dbapi
        self._driver_error: type[Exception] = driver.Error
        self._integrity: type[Exception] = driver.IntegrityError
        self._place = place
        self._closing = False
        self._ended = False
        self._putting = threading.Lock()
        self._company = 0
        self._awaited = math.inf
        self._enough = threading.Event()
        self._counted = time.monotonic()
        self.batches = 0
        self.error: QuietmaxError | None = None
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    def charge(self, charge: Charge, done: ChargeDone) -> None:
        """Charge with the next group."""
        if not self._taken((charge, done)):
            _tell(done, Failed(_CLOSED))
        elif self._queue.qsize() >= self._awaited:
            self._enough.set()

    def store(self, store: NewAnswers, done: StoreDone) -> None:
        """Store with the next group."""
        if not self._taken((store, done)):
            _tell(done, Failed(_CLOSED))

    def close(self) -> None:
        """Write what waits, then stop."""
        self._taken(None)
        self._thread.join()

    def _taken(self, item: _Waiting | _Keeping | None) -> bool:
        """Whether the thread will come to it: nothing is put behind the end, where nobody would be told."""
        with self._putting:
            if not self._ended:
                self._queue.put(item)
                self._ended = item is None
                return True
            return False

    def _run(self) -> None:
        while not self._closing or self._again:
            charges, stores = self._gathered()
            self._company = len(charges)
            if charges or stores or self._refusals:
                self._write(charges, stores)
        if self._refusals:
            with contextlib.suppress(Exception):
                self._commit([], [])
        self._drop_connection()

    def _gathered(self) -> tuple[list[_Waiting], list[_Keeping]]:
        """What waits. Answers nobody waits for are held back until something else is written, or for a moment.

        Refusals wait to be counted for longer, so that a flood of them writes little.
        """
        charges: list[_Waiting] = []
        stores, self._again = self._again, []
        if stores:
            time.sleep(_PAUSE)
            until: float | None = time.monotonic() + _MOMENT
        else:
            until = time.monotonic() + _REFUSALS_SECONDS if self._refusals else None
        hurry = False
        patient = True
        try:
            while True:
                item = self._queue.get(
                    timeout=None if until is None else max(until - time.monotonic(), 0.001)
                )
                while True:
                    if item is None:
                        self._closing = True
                    elif isinstance(item[0], Charge):
                        charges.append(item)
                    else:
                        stores.append(item)
                        hurry |= item[0].request is not None
                    if self._closing or len(charges) + len(stores) >= _MOST_TOGETHER:
                        return charges, stores
                    if charges and patient:
                        self._wait_for(self._company - len(charges))
                        patient = False
                    try:
                        item = self._queue.get_nowait()
                    except queue.Empty:
                        break
                if charges or hurry:
                    return charges, stores
                until = min(until or math.inf, time.monotonic() + _MOMENT)
        except queue.Empty:
            return charges, stores

    def _wait_for(self, count: int) -> None:
        """Wait a few milliseconds until so many things are in the queue; woken once, not for every one of them."""
        self._enough.clear()
        self._awaited = count
        if self._queue.qsize() < count:
            self._enough.wait(_COMPANY_SECONDS)
        self._awaited = math.inf

    def _write(self, charges: list[_Waiting], stores: list[_Keeping]) -> None:
        moment = time.monotonic()
        for charge, done in charges:
            if charge.deadline <= moment:
                _tell(done, Failed(_TOO_LATE))
        in_time = [waiting for waiting in charges if waiting[0].deadline > moment]
        try:
            self._write_group(in_time, stores)
        except _Collided:
            # Another process wrote the same request id in the meantime: each on its own, so that it is seen.
            for waiting in in_time:
                self._write_alone([waiting], [])
            for keeping in stores:
                self._write_alone([], [keeping])

    def _write_alone(self, charges: list[_Waiting], stores: list[_Keeping]) -> None:
        try:
            self._write_group(charges, stores)
        except _Collided as problem:
            for _, done in [*charges, *stores]:
                _tell(done, Failed(unavailable(self._engine, problem.__cause__ or problem)))

    def _write_group(self, charges: list[_Waiting], stores: list[_Keeping]) -> None:
        try:
            outcomes, kept = self._commit([charge for charge, _ in charges], [store for store, _ in stores])
        except _Collided:
            raise
        except Exception as problem:
            failed = problem if isinstance(problem, QuietmaxError) else _unexpected(problem)
            self.error = failed
            moment = time.monotonic()
            for _, done in charges:
                _tell(done, Failed(failed))
            for keeping in stores:
                if (
                    isinstance(failed, LedgerUnavailable)
                    and keeping[0].deadline > moment
                    and not self._closing
                ):
                    self._again.append(keeping)
                else:
                    _tell(keeping[1], Failed(failed))
            return
        for (_, done), outcome in zip(charges, outcomes, strict=True):
            _tell(done, outcome)
        for (_, stored_done), stored in zip(stores, kept, strict=True):
            _tell(stored_done, stored)

    def _commit(
        self, charges: list[Charge], stores: list[NewAnswers]
    ) -> tuple[list[ChargeResult], list[StoredAnswer]]:
        """One transaction. Raises `LedgerUnavailable` (nothing may be answered) or `_Collided` (undone)."""
        self._place.check()
        refusals = dict(self._refusals)
        try:
            connection = self._ready()
            with connection.begin() as transaction:
                cursor = Cursor(connection)
                named = {charge.account for charge in charges} | {account for account, _ in refusals}
                books = locked(cursor, named | {store.account for store in stores if store.queries})
                kept = keep(cursor, stores)  # first, so that the charges see what was stored before them
                posting = ChargeBatch(cursor, self._answer_cache, books, charges, time.time_ns() // 1000)
                late = bool(refusals) and time.monotonic() - self._counted > _REFUSALS_SECONDS
                changed = bool(stores) or posting.changed or not charges or late
                if changed:
                    posting.save()
                    count_refusals(cursor, refusals)
                else:
                    transaction.rollback()
        except BaseException as problem:
            self._answer_cache.forget()
            if isinstance(problem, self._integrity):
                raise _Collided from problem
            if isinstance(problem, (SQLAlchemyError, self._driver_error)):
                self._drop_connection()
                raise unavailable(self._engine, problem) from problem
            raise
        if changed:
            self._refusals.clear()
            self._counted = time.monotonic()
            self.error = None
        for charge, outcome in zip(charges, posting.outcomes, strict=True):
            if isinstance(outcome, LimitExceeded):
                self._refusals[charge.account, charge.client] += 1
        self.batches += 1
        return posting.outcomes, kept

    def _ready(self) -> Connection:
        if self._connection is None:
            self._connection = writer(self._engine)
        return self._connection

    def _drop_connection(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(SQLAlchemyError):
                self._connection.invalidate()
            with contextlib.suppress(SQLAlchemyError):
                self._connection.close()
        self._connection = None


class Place:
    """Notices that a SQLite file was moved, deleted or replaced since it was opened: charges to it would be lost."""

    def __init__(self, engine: Engine) -> None:
        self._path = Path(str(engine.url.database)) if engine.dialect.name == "sqlite" else None
        self._known = self._seen()

    def check(self) -> None:
        """Refuse to write to a file that is no longer in its place."""
        if self._path is not None and self._seen() != self._known:
            raise LedgerUnavailable(
                f"The ledger {self._path} was moved, deleted or replaced while in use; put the file back, or restart."
            )

    def _seen(self) -> tuple[int, int] | None:
        if self._path is None:
            return None
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_dev, found.st_ino


def _tell(done: Callable[..., None], outcome: object) -> None:
    with contextlib.suppress(Exception):
        done(outcome)


def _unexpected(problem: Exception) -> LedgerUnavailable:
    return LedgerUnavailable(
        f"The ledger failed in an unforeseen way ({type(problem).__name__}: {problem}); try again, and tell its owner."
    )

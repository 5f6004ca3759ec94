"""Group commit: one thread writes everything that waits in one transaction, so that one disk flush serves many charges.

While a batch is being flushed, the next one fills. Clients whose charges were in the same batch tend to send their next
requests at the same time. So a batch waits a few milliseconds (the batch window) until it has as many charges as the
last one; a single client never waits. Callbacks run in this thread, after the commit: `Charged` means that the charge
survives a crash. If a transaction fails, its charges are not retried, because nobody is answered. Answers that could
not be stored are retried until their deadline.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from quietmax.errors import LedgerTooLate, LedgerUnavailable, QuietmaxError
from quietmax.ledger.answer_cache import AnswerCache
from quietmax.ledger.database import charge_transaction, unavailable, writer_connection
from quietmax.ledger.heads import Head, HeadFile
from quietmax.ledger.transactions import (
    Charge,
    ChargeBatch,
    ChargeResult,
    Failed,
    LimitExceeded,
    NewAnswers,
    StoredAnswer,
    count_refused,
    lock_accounts,
    store_answers,
)

_MAX_BATCH = 1024
_MIN_WINDOW = 0.006  # how long a batch waits for as many charges as the last one had, ...
_MAX_WINDOW = 0.03  # ... or twice as long as the last one had to wait, at most this long
_FLUSH_INTERVAL = 0.02  # how long answers that nobody waits for are held back
_REFUSED_FLUSH_INTERVAL = (
    0.5  # how long refused charges wait to be counted, so that a flood of them writes little
)
_RETRY_DELAY = 0.1
_CLOCK_TOLERANCE = 1_000_000  # microseconds; clocks of replicas differ, and are adjusted
_log = logging.getLogger(__name__)

ChargeCallback = Callable[[ChargeResult], None]
ChargesCallback = Callable[[list[ChargeResult]], None]
AnswersCallback = Callable[[StoredAnswer | Failed], None]
_PendingCharge = tuple[Charge, ChargeCallback]
_PendingAnswers = tuple[NewAnswers, AnswersCallback]

_CLOSED = LedgerTooLate("The ledger is closed. Nothing was charged.")
_TOO_LATE = LedgerTooLate("The request reached its deadline before the ledger. Nothing was charged.")


class _Group:
    """The results of charges that were submitted together. Whoever waits for them is woken up once."""

    def __init__(self, done: ChargesCallback, count: int) -> None:
        self._done = done
        self._results: list[Any] = [None] * count
        self._missing = count

    def add(self, place: int, result: ChargeResult) -> None:
        self._results[place] = result
        self._missing -= 1
        if not self._missing:
            self._done(self._results)


class FileGuard:
    """Detects that files of SQLite were moved, deleted or replaced while in use: charges would be lost."""

    def __init__(self, engine: Engine) -> None:
        self._path = Path(str(engine.url.database)) if engine.dialect.name == "sqlite" else None
        self._log = None if self._path is None else Path(f"{self._path}-wal")
        self._opened = _file_identity(self._path)
        self._opened_log: tuple[int, int] | None = None

    def check(self) -> None:
        """Raise `LedgerUnavailable` if a file is no longer the one that was opened."""
        if self._opened_log is not None and _file_identity(self._log) != self._opened_log:
            raise LedgerUnavailable(
                f"The file {self._log} was removed or replaced while in use; it holds the latest charges. Stop the "
                "service with SIGTERM, which saves them, and start it again."
            )
        if self._path is not None and _file_identity(self._path) != self._opened:
            raise LedgerUnavailable(
                f"The ledger {self._path} was moved, deleted or replaced while in use. Put the file back, or restart."
            )

    def watch_log(self, watch: bool) -> None:
        """Watch SQLite's write-ahead log too, while a connection that has it open stays open."""
        self._opened_log = _file_identity(self._log) if watch else None


def _file_identity(path: Path | None) -> tuple[int, int] | None:
    if path is None:
        return None
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class _Conflict(Exception):
    """Another process wrote the same row first; the transaction was rolled back."""


@dataclass(slots=True)
class _Batch:
    """What one transaction writes. `urgent`: somebody waits for it."""

    charges: list[_PendingCharge] = field(default_factory=list)
    answers: list[_PendingAnswers] = field(default_factory=list)
    urgent: bool = False

    def add(self, item: _PendingCharge | _PendingAnswers) -> None:
        if isinstance(item[0], Charge):
            self.charges.append(item)
            self.urgent = True
        else:
            self.answers.append(item)
            self.urgent |= item[0].request is not None

    @property
    def full(self) -> bool:
        return len(self.charges) + len(self.answers) >= _MAX_BATCH


class LedgerWriter:
    """The thread that writes charges and answers."""

    def __init__(self, engine: Engine, guard: FileGuard, salt: bytes, heads: HeadFile, newest: int) -> None:
        self._engine = engine
        self._heads = heads
        self._salt = salt
        self._guard = guard
        driver: Any = engine.dialect.dbapi
        self._driver_error: type[Exception] = driver.Error
        self._integrity_error: type[Exception] = driver.IntegrityError
        self._connection: Connection | None = None
        self._answer_cache = AnswerCache()
        self._queue: queue.SimpleQueue[_PendingCharge | _PendingAnswers | None] = queue.SimpleQueue()
        self._queue_lock = threading.Lock()
        self._ended = False  # the end is in the queue
        self._closing = False  # the thread has read the end
        self._retries: list[_PendingAnswers] = []
        self._refused: Counter[tuple[int, int]] = Counter()
        self._refused_flushed = time.monotonic()
        self._last_batch_size = 0
        self._newest = newest
        self._window = _MIN_WINDOW
        self._wake_size = math.inf
        self._wake = threading.Event()
        self.batches = 0
        self.error: QuietmaxError | None = None
        self.last_flush = (0, 0)
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    def submit_charges(self, charges: Sequence[Charge], done: ChargesCallback) -> None:
        """Decide charges with the next batch."""
        group = _Group(done, len(charges))
        if not self._enqueue([(charge, partial(group.add, place)) for place, charge in enumerate(charges)]):
            _notify(done, [Failed(_CLOSED)] * len(charges))
        elif self._queue.qsize() >= self._wake_size:
            self._wake.set()

    def submit_answers(self, answers: NewAnswers, done: AnswersCallback) -> None:
        """Store answers with the next batch."""
        if not self._enqueue([(answers, done)]):
            _notify(done, Failed(_CLOSED))

    def close(self) -> None:
        """Write what waits, then stop the thread."""
        self._enqueue([None])
        self._thread.join()

    def _enqueue(self, items: Sequence[_PendingCharge | _PendingAnswers | None]) -> bool:
        """Return whether the thread will read the items: nothing is put behind the end of the queue."""
        with self._queue_lock:
            if self._ended:
                return False
            for item in items:
                self._queue.put(item)
                self._ended = item is None
            return True

    # In the thread

    def _run(self) -> None:
        while not self._closing:
            batch = self._next_batch()
            self._last_batch_size = len(batch.charges)
            if batch.charges or batch.answers or self._refused:
                self._write(batch.charges, batch.answers)
        if self._refused:
            with contextlib.suppress(Exception):
                self._commit([], [])
        self._drop_connection()

    def _next_batch(self) -> _Batch:
        """Collect what waits.

        Charges and answers of request ids are written at once. Answers that nobody waits for are held back for the
        flush interval, or until something else is written. Refused charges wait longer to be counted.
        """
        batch = _Batch(answers=self._retries)
        self._retries = []
        flush_at: float | None = None
        if batch.answers:
            time.sleep(_RETRY_DELAY)
            flush_at = time.monotonic() + _FLUSH_INTERVAL
        elif self._refused:
            flush_at = time.monotonic() + _REFUSED_FLUSH_INTERVAL
        while True:
            try:
                item = self._queue.get(
                    timeout=None if flush_at is None else max(flush_at - time.monotonic(), 0.001)
                )
            except queue.Empty:
                return batch
            self._drain_queue(batch, item)
            if batch.urgent or batch.full or self._closing:
                return batch
            flush_at = min(flush_at or math.inf, time.monotonic() + _FLUSH_INTERVAL)

    def _drain_queue(self, batch: _Batch, item: _PendingCharge | _PendingAnswers | None) -> None:
        """Add an item and all that waits in the queue, up to a full batch; wait once for the batch window."""
        waited = False
        while True:
            if item is None:
                self._closing = True
            else:
                batch.add(item)
            if self._closing or batch.full:
                return
            if batch.charges and not waited:
                self._wait_for(self._last_batch_size - len(batch.charges))
                waited = True
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return

    def _wait_for(self, count: int) -> None:
        """Wait until the queue has so many items, at most the batch window; the thread wakes up once, not per item."""
        started = time.monotonic()
        self._wake.clear()
        self._wake_size = count
        if self._queue.qsize() < count:
            arrived = self._wake.wait(self._window)
            wanted = 2 * (time.monotonic() - started) if arrived else self._window / 2
            self._window = min(max(wanted, _MIN_WINDOW), _MAX_WINDOW)
        self._wake_size = math.inf

    def _write(self, charges: list[_PendingCharge], answers: list[_PendingAnswers]) -> None:
        """Write a batch without the charges that are past their deadline."""
        now = time.monotonic()
        for charge, done in charges:
            if charge.deadline <= now:
                _notify(done, Failed(_TOO_LATE))
        in_time = [pending for pending in charges if pending[0].deadline > now]
        try:
            self._write_batch(in_time, answers)
        except _Conflict:
            # Another process wrote the same request id first. One transaction each, so that it is seen.
            for pending_charge in in_time:
                self._write_one([pending_charge], [])
            for pending_answers in answers:
                self._write_one([], [pending_answers])

    def _write_one(self, charges: list[_PendingCharge], answers: list[_PendingAnswers]) -> None:
        try:
            self._write_batch(charges, answers)
        except _Conflict as conflict:
            for _, done in [*charges, *answers]:
                _notify(done, Failed(unavailable(self._engine, conflict.__cause__ or conflict)))

    def _write_batch(self, charges: list[_PendingCharge], answers: list[_PendingAnswers]) -> None:
        """Commit a batch and call back. Raises `_Conflict` only."""
        try:
            results, stored = self._commit([charge for charge, _ in charges], [new for new, _ in answers])
        except _Conflict:
            raise
        except Exception as error:
            self._fail(error if isinstance(error, QuietmaxError) else _unexpected(error), charges, answers)
            return
        for place, (_, charge_done) in enumerate(charges):
            _notify(charge_done, results[place])
        for place, (_, answers_done) in enumerate(answers):
            _notify(answers_done, stored[place])

    def _fail(
        self, error: QuietmaxError, charges: list[_PendingCharge], answers: list[_PendingAnswers]
    ) -> None:
        """Report a failed batch; keep the answers that can still be stored."""
        self.error = error
        now = time.monotonic()
        for _, charge_done in charges:
            _notify(charge_done, Failed(error))
        for pending in answers:
            new, answers_done = pending
            if isinstance(error, LedgerUnavailable) and new.deadline > now and not self._closing:
                self._retries.append(pending)
            else:
                _notify(answers_done, Failed(error))

    def _commit(
        self, charges: list[Charge], answers: list[NewAnswers]
    ) -> tuple[list[ChargeResult], list[StoredAnswer]]:
        """Run one transaction. Raises `LedgerUnavailable` (nothing may be answered) or `_Conflict` (rolled back)."""
        self._guard.check()
        started = time.time_ns()
        refused = dict(self._refused)
        try:
            opened = self._connection is None
            connection = self._open_connection()
            with charge_transaction(connection) as cursor:
                if opened:
                    self._guard.watch_log(True)
                ids = {charge.account for charge in charges} | {account for account, _ in refused}
                ids |= {new.account for new in answers if new.queries or new.request is not None}
                accounts = lock_accounts(cursor, ids)
                self._heads.check_locked(cursor, accounts.values())
                now = self._now()
                # first, so that the charges find these answers
                stored = store_answers(cursor, accounts, answers, self._salt, now)
                batch = ChargeBatch(cursor, self._answer_cache, accounts, charges, now)
                overdue = bool(refused) and time.monotonic() - self._refused_flushed > _REFUSED_FLUSH_INTERVAL
                changed = bool(answers) or batch.changed or not charges or overdue
                if changed:
                    batch.save()
                    count_refused(cursor, refused)
                else:
                    cursor.rollback()
        except BaseException as error:
            self._answer_cache.clear()
            if isinstance(error, self._integrity_error):
                raise _Conflict from error
            if isinstance(error, (SQLAlchemyError, self._driver_error)):
                self._drop_connection()
                raise unavailable(self._engine, error) from error
            raise
        if changed:
            self._heads.record(
                Head(each.account, each.sequence, each.spent_units, each.head)
                for each in accounts.values()
                if each.rows
            )
            self._refused.clear()
            self._refused_flushed = time.monotonic()
            self.error = None
        for place, charge in enumerate(charges):
            if isinstance(batch.results[place], LimitExceeded):
                self._refused[charge.account, charge.client] += 1
        self.batches += 1
        self.last_flush = (started, time.time_ns())
        return batch.results, stored

    def _now(self) -> int:
        """Return the time in microseconds; warn if the clock has gone back since the last transaction."""
        now = time.time_ns() // 1000
        if now < self._newest - _CLOCK_TOLERANCE:
            _log.warning(
                "The clock went back by %.1f seconds. Keys that had expired may be valid again, and times in the "
                "audit log are not in order.",
                (self._newest - now) / 1e6,
            )
            self._newest = now
        self._newest = max(self._newest, now)
        return now

    def _open_connection(self) -> Connection:
        if self._connection is None:
            self._connection = writer_connection(self._engine)
        return self._connection

    def _drop_connection(self) -> None:
        self._guard.watch_log(False)
        if self._connection is not None:
            with contextlib.suppress(SQLAlchemyError):
                self._connection.invalidate()
            with contextlib.suppress(SQLAlchemyError):
                self._connection.close()
        self._connection = None


def _notify(done: Callable[..., None], result: object) -> None:
    """Call a callback; its errors must not stop the writer."""
    try:  # noqa: SIM105 - contextlib.suppress takes longer than most callbacks
        done(result)
    except Exception:
        pass


def _unexpected(error: Exception) -> LedgerUnavailable:
    return LedgerUnavailable(f"The ledger failed with an unexpected error ({type(error).__name__}: {error}).")

"""The ledger: budgets that outlive the process and cannot be overspent, in SQLite or PostgreSQL. And its writer.

Group commit: one thread writes everything that waits in one transaction, so that one disk flush serves many charges.
While a batch is being flushed, the next one fills. Clients whose charges were in the same batch tend to send their next
requests at the same time. So a batch waits a few milliseconds (the batch window) until it has as many charges as the
last one; a single client never waits. Callbacks run in this thread, after the commit: `Charged` means that the charge
survives a crash. If a transaction fails, its charges are not retried, because nobody is answered. Answers that could
not be stored are retried until their deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from quietmax.accounting.costs import LIMIT, Cost, GaussianCost, delta_of
from quietmax.errors import InvalidInput, LedgerDamaged, LedgerTooLate, LedgerUnavailable, QuietmaxError
from quietmax.ledger.accounts import (
    Accounts,
    AccountState,
    _check_reason,
    _client_number,
    _get_account,
    _lock_account,
    _lock_keys_account,
    _record,
)
from quietmax.ledger.database import (
    Cursor,
    JournalEntry,
    _charge_transaction,
    _damaged,
    _has_wrong_types,
    _is_migrated,
    _lock_accounts,
    _migrate,
    _open_engine,
    _read_salt,
    _read_transaction,
    _run,
    _unavailable,
    _write_transaction,
    _writer_connection,
    default_url,
    hide_password,
    now,
    parse_url,
)
from quietmax.ledger.heads import FileGuard, HeadFile, _head_of, _head_path, _read_heads
from quietmax.ledger.transactions import (
    COUNT_REFUSED,
    KEY_BYTES,
    AnswerCache,
    Charge,
    ChargeBatch,
    Charged,
    ChargeResult,
    Failed,
    LimitExceeded,
    NewAnswers,
    Part,
    Side,
    StoredAnswer,
    _by_cohort,
    _spent_by_part,
    _store_answers,
)
from quietmax.ledger.verify import Anchor, Verification, _read_journal, _verify

TRAINING_CLIENT = "training"
"""The client that is charged for what training and evaluations spent."""
_RELEASES = {"training": "Training", "evaluation": "Evaluating"}
_MAX_HASHED = 2047
"""Bytes to hash at once: hashlib would release the interpreter lock for more, and wait to get it back."""
_FIXED_NONCE = bytes(12)
LOST_CLIENT = "lost"
"""The client that is charged for what a ledger has lost."""
_ADD_SPENT = (
    "INSERT INTO subaccounts (account, client, spent_units, refused) VALUES (:account, :client, :units, 0)"
    " ON CONFLICT (account, client) DO UPDATE SET spent_units = subaccounts.spent_units + excluded.spent_units"
)
_PROBE_BYTES = 2**17
"""The size of a write that tests the disk. Its text is twice as long, more than a batch of charges usually writes."""
_WRITE_PROBE = (
    "INSERT INTO meta (name, value) VALUES ('write_probe', :value)"
    " ON CONFLICT (name) DO UPDATE SET value = excluded.value"
)

_MAX_BATCH = 1024
_MIN_WINDOW = 0.006  # how long a batch waits for as many charges as the last one had, ...
_MAX_WINDOW = 0.03  # ... or twice as long as the last one had to wait, at most this long
_FLUSH_INTERVAL = 0.02  # how long answers that nobody waits for are held back
_REFUSED_FLUSH_INTERVAL = 0.5  # how long refused charges wait to be counted: a flood of them writes little
_RETRY_DELAY = 0.1
_CLOCK_TOLERANCE = 1_000_000  # microseconds; clocks of replicas differ, and are adjusted
_log = logging.getLogger(__name__)

ChargeCallback = Callable[[ChargeResult], None]
ChargesCallback = Callable[[list[ChargeResult]], None]
AnswersCallback = Callable[[StoredAnswer | Failed], None]
Cohort = tuple[str, str]
"""The rule that says which cohort a person is in, and the name of one of its cohorts."""
_PendingCharge = tuple[Charge, ChargeCallback]
_PendingAnswers = tuple[NewAnswers, AnswersCallback]

_CLOSED = LedgerTooLate("The ledger is closed. Nothing was charged.")
_TOO_LATE = LedgerTooLate("The request reached its deadline before the ledger. Nothing was charged.")


class Ledger(Accounts):
    """Accounts, clients, API keys and the journal.

    Threads can share a ledger, and several processes can open the same one.

    Parameters
    ----------
    address : str or Path, optional
        A SQLite file (a path or ``sqlite:///FILE``) or ``postgresql://USER@HOST/DATABASE``. Default: the environment
        variable `QUIETMAX_LEDGER`, else a SQLite file in the user's state directory.
    accept_loss : str, optional
        The reason to go on although the database has lost rows that the head file names. What is known to be lost is
        charged to client ``lost``, and the journal keeps the reason.
    read_only : bool
        Create, migrate and change nothing: the ledger must exist, with the newest schema.

    Raises
    ------
    LedgerUnavailable
        If the database cannot be opened.
    LedgerDamaged
        If the database is not a ledger, or is newer than this version of Quietmax. A ledger that has lost rows can be
        read and verified; this is raised by everything that would write.

    Examples
    --------
    >>> import tempfile
    >>> from quietmax.accounting import PureCost
    >>> from quietmax.ledger import Terms
    >>> folder = tempfile.TemporaryDirectory()
    >>> with Ledger(Path(folder.name) / "ledger.sqlite") as ledger:
    ...     account = ledger.open_account("patients", PureCost(1.0), Terms(1.0))
    ...     client = ledger.client("ann")
    ...     charge = Charge(account.id, client, "model/1", account.units(PureCost(0.4)), rows=1)
    ...     [type(ledger.charge(charge)).__name__ for _ in range(3)]
    ['Charged', 'Charged', 'LimitExceeded']
    """

    def __init__(
        self,
        address: str | Path | None = None,
        *,
        accept_loss: str | None = None,
        read_only: bool = False,
    ) -> None:
        where = default_url() if address is None else address
        if read_only and not ledger_exists(where):
            shown = hide_password(parse_url(where))
            raise InvalidInput(f"The ledger {shown} must exist and have the newest schema to be read only.")
        self._engine = _open_engine(where, read_only=read_only)
        self._writer: LedgerWriter | None = None
        self._writer_lock = threading.Lock()
        self._query_hashes: dict[bytes, AESGCM] = {}  # by the digest of the model
        try:
            if not read_only:
                _migrate(self._engine)
            with _read_transaction(self._engine) as connection:
                values = {row.name: row.value for row in _run(connection, "SELECT name, value FROM meta")}
                self._salt, self._id = _read_salt(connection), str(values.get("ledger"))
            self._has_gmac_keys = values.get("query_hash") == "gmac"  # a ledger of version 0.1 keeps its hash
            self._guard = FileGuard(self._engine)
            self._heads = HeadFile(_head_path(self._engine), self._id, self._engine, read_only=read_only)
            with _read_transaction(self._engine) as connection:
                self._heads._load(connection)
            if accept_loss is not None:
                self._accept_loss(accept_loss)
        except BaseException:
            self._engine.dispose()  # else SQLite keeps its write-ahead log as long as this process runs
            raise

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what waits and close the database."""
        if self._writer is not None:
            self._writer._close()
        self._heads._close()
        self._engine.dispose()

    @property
    def address(self) -> str:
        """The address of the database, without its password."""
        return hide_password(self._engine.url)

    @property
    def writer(self) -> LedgerWriter:
        """The thread that writes charges and answers; started on first use."""
        with self._writer_lock:
            if self._writer is None:
                self._writer = LedgerWriter(
                    self._engine, self._guard, self._salt, self._heads, self._newest_time()
                )
            return self._writer

    # Charges and answers

    def submit_charges(self, charges: Sequence[Charge], done: ChargesCallback) -> None:
        """Decide charges with the next batch; `done` gets all results, in their order.

        It is called once, after the disk flush, from the writer's thread.
        """
        pending = list(zip(charges, _as_one(done, len(charges)), strict=True))
        if not self.writer._enqueue(pending):
            _notify(done, [Failed(_CLOSED)] * len(charges))

    def submit_answers(self, answers: NewAnswers, done: AnswersCallback) -> None:
        """Store answers with the next batch; `done` is called as by `submit_charges`."""
        if not self.writer._enqueue([(answers, done)]):
            _notify(done, Failed(_CLOSED))

    def charge(self, charge: Charge) -> ChargeResult:
        """Decide a charge and wait: nothing may be answered unless the result is `Charged`, which is durable."""
        decided: Future[list[ChargeResult]] = Future()
        self.submit_charges([charge], decided.set_result)
        return decided.result()[0]

    def store_answers(self, answers: NewAnswers) -> StoredAnswer:
        """Store answers and wait until they are durable; return the answer that may leave."""
        result: Future[StoredAnswer | Failed] = Future()
        self.submit_answers(answers, result.set_result)
        stored = result.result()
        if isinstance(stored, Failed):
            raise stored.error
        return stored

    def charge_training(
        self,
        account: AccountState,
        model: str,
        digest: str,
        cost: Cost | Literal["all"],
        *,
        split: str | None = None,
        cohort: Cohort | None = None,
    ) -> None:
        """Charge, once for each model, what its training spent; raise `QuietmaxError` if the account cannot pay for it.

        With the cost "all" the guarantee does not compose with others, so the model takes the whole account, and
        nothing can be granted afterwards. The people that a split held out of the training set are not charged, nor are
        those of other cohorts than the one that the model was trained on.
        """
        if cost == "all":
            self._reserve_exclusively(account, model, digest)
            units = self.account(account.name).limit_units
        else:
            units = account.units(cost)
        part = _part(split, "training", cohort)
        self._charge_release(account, model, units, "training", digest, part)

    def is_training_charged(self, account: AccountState, digest: str) -> bool:
        """Tell whether `charge_training` has charged a model of this digest."""
        request = _release_request(account, "training", digest)
        with _read_transaction(self._engine) as connection:
            found = _run(connection, "SELECT 1 FROM requests WHERE request = :request", request=request)
            return found.first() is not None

    def charge_evaluation(
        self,
        account: AccountState,
        model: str,
        digest: str,
        cost: GaussianCost,
        *,
        split: str | None = None,
        cohort: Cohort | None = None,
    ) -> None:
        """Charge, once for each evaluation, what it spent; raise `QuietmaxError` if the account cannot pay for it.

        An evaluation of the people that a split held out costs nothing as long as it spends no more than the training
        on the other people (parallel composition, THEORY 3.8). Without a split, they may be in the training set;
        without a cohort, they may be of any.
        """
        terms = account.terms
        if (
            account.total.measure == "pure"
            and terms.delta
            and delta_of(cost.mu, terms.epsilon) <= terms.delta
        ):
            # The account promises one pair (epsilon, delta), which does not compose: the holdout takes all of it. A
            # budget that was lowered cannot pay for that pair.
            units = max(account.limit_units, LIMIT)
        else:
            units = account.units(cost)
        self._charge_release(account, model, units, "evaluation", digest, _part(split, "holdout", cohort))

    def _charge_release(
        self,
        account: AccountState,
        model: str,
        units: int,
        kind: Literal["training", "evaluation"],
        digest: str,
        part: Part | None,
    ) -> None:
        """Charge for a release that was made before it came to the ledger."""
        request = _release_request(account, kind, digest)
        who = "" if part is None or part.cohort is None else f" for the cohort {part.cohort!r}"
        exceeded = f"{_RELEASES[kind]} the model {model} spent more than remains{who}"
        result = self.charge_past(account, model, units, 1, request, kind, exceeded, part)
        if isinstance(result, Charged):
            self.store_answers(NewAnswers(account.id, request=request, answer=b"trained"))

    def charge_past(
        self,
        account: AccountState,
        model: str,
        unit_cost: int,
        rows: int,
        request: bytes,
        kind: Literal["training", "evaluation", "migrated-budget"],
        exceeded: str,
        part: Part | None = None,
    ) -> ChargeResult:
        """Charge what was spent before it came to the ledger; raise if that fails, `exceeded` says what is too much."""
        client = self.client(TRAINING_CLIENT)
        charge = Charge(account.id, client, model, unit_cost, rows, request=request, kind=kind, part=part)
        result = self.charge(charge)
        if isinstance(result, LimitExceeded):
            raise QuietmaxError(
                f"{exceeded} in the account {account.name!r}. 'quietmax ledger grant' raises the budget."
            )
        if isinstance(result, Failed):
            raise result.error
        return result

    def parts(self, account: AccountState) -> dict[Part, int]:
        """Return what each part of an account has spent, in units; empty if every charge concerns everybody."""
        with _read_transaction(self._engine) as connection:
            spent = _spent_by_part(Cursor(connection), [account.id])[account.id]
        return dict(sorted(spent.items(), key=lambda item: tuple(each or "" for each in astuple(item[0]))))

    def cohorts(self, account: AccountState) -> dict[str, int]:
        """Return what each cohort has spent, in units, with what concerns everybody; empty if there are no cohorts."""
        with _read_transaction(self._engine) as connection:
            spent = _spent_by_part(Cursor(connection), [account.id])[account.id]
            state = _get_account(connection, account.name)
        found = _by_cohort(spent)
        everybody = state.spent_units - max(found.values())
        return {cohort: everybody + found[cohort] for cohort in sorted(filter(None, found))}

    def request_key(self, client: int, request_id: str) -> bytes:
        """Return the keyed hash that stands for a client's request id. Different clients have different keys."""
        return self._keyed_hash(b"request %d " % client + request_id.encode(), 32)

    def query_keys(self, model_digest: bytes, queries: memoryview, size: int) -> list[bytes]:
        """Return the keyed hash that stands for each of many queries in the answer cache, each of `size` bytes.

        The keys are GMAC tags, a keyed universal hash: without the salt nobody can choose two queries whose keys are
        equal more often than by chance, about 2^-120 for each pair. Tags never leave the ledger, so one nonce serves
        for all of them. GMAC takes a third of the time of SHA-256.
        """
        rows = (queries[start : start + size] for start in range(0, len(queries), size))
        if self._has_gmac_keys:
            if model_digest not in self._query_hashes:
                self._query_hashes[model_digest] = AESGCM(self._keyed_hash(b"query " + model_digest, 32))
            hash_row = self._query_hashes[model_digest].encrypt
            return [hash_row(_FIXED_NONCE, b"", row) for row in rows]
        start = hashlib.blake2b(model_digest, key=self._salt, digest_size=KEY_BYTES)
        keys = []
        for row in rows:
            digest = start.copy()
            for begin in range(0, size, _MAX_HASHED):
                digest.update(row[begin : begin + _MAX_HASHED])
            keys.append(digest.digest())
        return keys

    def _keyed_hash(self, content: bytes, size: int) -> bytes:
        return hashlib.blake2b(content, key=self._salt, digest_size=size).digest()

    # Checks

    def ping(self) -> None:
        """Raise `LedgerUnavailable` unless the database answers; after a failed write, unless it can be written."""
        writer = self.writer
        if writer.error is None:
            self._guard._check()
            if self._heads.error is not None:
                raise self._heads.error
            self.check_damage()
        else:
            with self._write() as connection:
                _run(connection, _WRITE_PROBE, value=secrets.token_hex(_PROBE_BYTES))
            writer.error = None

    def export(self, account: str | None = None) -> Iterator[JournalEntry]:
        """Read the journal, row by row, of one account or of all."""
        number = None if account is None else self.account(account).id
        with _read_transaction(self._engine) as connection:
            for entry in _read_journal(connection, number):
                if _has_wrong_types(entry):
                    raise _damaged(
                        f"Row {entry.sequence!r} of the journal of account {entry.account!r} cannot be read"
                    )
                yield entry

    def verify(self, anchors: Mapping[str, Anchor] | None = None) -> Verification:
        """Recompute every hash chain, balance, quota and key from the journal.

        `anchors` are rows that an auditor wrote down: account name -> (row, hash). They must still be in the chain.
        """
        with _read_transaction(self._engine) as connection:
            found = _verify(connection, anchors)
        damage = self._heads.damage
        return found if damage is None else replace(found, faults=(*found.faults, str(damage)))

    def check_damage(self) -> None:
        """Raise `LedgerDamaged` if the ledger has lost rows that its head file or this process knows of."""
        with _read_transaction(self._engine) as connection:
            self._heads._check_all(connection)

    def _newest_time(self) -> int:
        newest = (
            "SELECT journal.time FROM accounts JOIN journal"
            " ON journal.account = accounts.id AND journal.sequence = accounts.sequence"
        )
        with _read_transaction(self._engine) as connection:
            times = _run(connection, newest).scalars()
            return max((each for each in times if type(each) is int), default=now())

    def _accept_loss(self, because: str) -> None:
        """Charge what the head file knows of and the database has lost; the journal names lost accounts."""
        if self._heads.damage is None:
            raise InvalidInput("The ledger has lost nothing that its head file names.")
        _check_reason(because)
        try:
            ledger, heads = self._heads._read()
        except LedgerDamaged:
            ledger, heads = None, []
        spent = {head.account: head.spent_units for head in heads}
        with _write_transaction(self._engine) as connection:
            keys_account = _lock_keys_account(connection)
            numbers = set(_run(connection, "SELECT id FROM accounts").scalars())
            known = numbers if ledger == self._id else set()
            lost = {number: units for number, units in spent.items() if units and number not in known}
            _record(connection, keys_account, "loss", because=because, accounts=lost or None)
            client = _client_number(connection, LOST_CLIENT, create=True)
            for number in sorted((known & set(spent)) - {keys_account.account}):
                account = _lock_account(connection, number)
                left = account.limit_units - account.spent_units
                units = min(max(spent[number] - account.spent_units, 0), left)
                if units:
                    _record(connection, account, "loss", client=LOST_CLIENT, units=units, because=because)
                    _run(connection, _ADD_SPENT, account=number, client=client, units=units)
            current = _read_heads(connection)
        path = self._heads.path
        if path is not None:
            path.unlink(missing_ok=True)
        self._heads = HeadFile(path, self._id, self._engine)
        self._heads._record(current)


def ledger_exists(address: str | Path) -> bool:
    """Tell whether a ledger exists with the newest schema; raise if none could be created where there is none."""
    url = parse_url(address)
    path = Path(str(url.database))
    if url.drivername == "sqlite" and not path.exists():
        above = next(folder for folder in path.absolute().parents if folder.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise LedgerUnavailable(f"Cannot create the ledger {path}: {above} is not a writable folder.")
        return False
    engine = _open_engine(address, read_only=True)
    try:
        return _is_migrated(engine)
    finally:
        engine.dispose()


def _part(split: str | None, side: Side, cohort: Cohort | None) -> Part | None:
    """Return the part of an account that a release concerns; None if it concerns everybody."""
    if split is None and cohort is None:
        return None
    rule, name = cohort or (None, None)
    return Part(split, None if split is None else side, name, rule)


def _release_request(account: AccountState, kind: str, digest: str) -> bytes:
    """The request key of a training or an evaluation. The words are part of stored keys: they cannot change."""
    return hashlib.sha256(f"{kind} {account.id} {digest}".encode()).digest()


# --- the writer ---------------------------------------------------------------------------------------------------


def _as_one(done: ChargesCallback, count: int) -> list[ChargeCallback]:
    """Return a callback for each of several charges; with the last one, `done` is called once for all."""
    results: dict[int, ChargeResult] = {}

    def _add(place: int, result: ChargeResult) -> None:
        results[place] = result
        if len(results) == count:
            done([results[place] for place in range(count)])

    return [partial(_add, place) for place in range(count)]


class _Conflict(Exception):
    """Another process wrote the same row first; the transaction was rolled back."""


@dataclass(slots=True)
class _Batch:
    """What one transaction writes. `urgent`: somebody waits for it."""

    charges: list[_PendingCharge] = field(default_factory=list)
    answers: list[_PendingAnswers] = field(default_factory=list)
    urgent: bool = False

    def _add(self, item: _PendingCharge | _PendingAnswers) -> None:
        if isinstance(item[0], Charge):
            self.charges.append(item)
            self.urgent = True
        else:
            self.answers.append(item)
            self.urgent |= item[0].request is not None

    @property
    def _full(self) -> bool:
        return len(self.charges) + len(self.answers) >= _MAX_BATCH


class LedgerWriter:
    """The thread that writes charges and answers."""

    def __init__(self, engine: Engine, guard: FileGuard, salt: bytes, heads: HeadFile, newest: int) -> None:
        self._engine, self._guard, self._salt, self._heads = engine, guard, salt, heads
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
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    def _close(self) -> None:
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
        if self._queue.qsize() >= self._wake_size:
            self._wake.set()
        return True

    # In the thread

    def _run(self) -> None:
        while not self._closing:
            batch = self._next_batch()
            self._last_batch_size = len(batch.charges)
            if batch.charges or batch.answers or self._refused:
                self._write(batch)
        if self._refused:
            with contextlib.suppress(Exception):
                self._commit([], [])
        self._drop_connection()

    def _next_batch(self) -> _Batch:
        """Collect what waits: at once if somebody waits for it, else after a flush interval."""
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
            if batch.urgent or batch._full or self._closing:
                return batch
            flush_at = min(flush_at or math.inf, time.monotonic() + _FLUSH_INTERVAL)

    def _drain_queue(self, batch: _Batch, item: _PendingCharge | _PendingAnswers | None) -> None:
        """Add an item and all that waits in the queue, up to a full batch; wait once for the batch window."""
        waited = False
        while True:
            if item is None:
                self._closing = True
            else:
                batch._add(item)
            if self._closing or batch._full:
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

    def _write(self, batch: _Batch) -> None:
        """Write a batch without the charges that are past their deadline."""
        now = time.monotonic()
        for charge, done in batch.charges:
            if charge.deadline <= now:
                _notify(done, Failed(_TOO_LATE))
        batch.charges = [pending for pending in batch.charges if pending[0].deadline > now]
        try:
            self._write_batch(batch)
        except _Conflict:
            # Another process wrote the same request id first. One transaction each, so that it is seen.
            alone = [_Batch([each]) for each in batch.charges] + [
                _Batch([], [each]) for each in batch.answers
            ]
            for single in alone:
                try:
                    self._write_batch(single)
                except _Conflict as conflict:
                    error = _unavailable(self._engine, conflict.__cause__ or conflict)
                    for _, waiting in [*single.charges, *single.answers]:
                        _notify(waiting, Failed(error))

    def _write_batch(self, batch: _Batch) -> None:
        """Commit a batch and call back; keep the answers that can still be stored. Raises `_Conflict` only."""
        pending = [*batch.charges, *batch.answers]
        try:
            results = self._commit([charge for charge, _ in batch.charges], [new for new, _ in batch.answers])
        except _Conflict:
            raise
        except Exception as error:
            unexpected = f"The ledger failed with an unexpected error ({type(error).__name__}: {error})."
            self.error = error if isinstance(error, QuietmaxError) else LedgerUnavailable(unexpected)
            pending, retry = [*batch.charges], isinstance(self.error, LedgerUnavailable) and not self._closing
            for answers in batch.answers:
                in_time = retry and answers[0].deadline > time.monotonic()
                (self._retries if in_time else pending).append(answers)
            results = [Failed(self.error)] * len(pending)
        for (_, done), result in zip(pending, results, strict=True):
            _notify(done, result)

    def _commit(self, charges: list[Charge], answers: list[NewAnswers]) -> list[ChargeResult | StoredAnswer]:
        """Run one transaction. Raises `LedgerUnavailable` (nothing may be answered) or `_Conflict` (rolled back)."""
        self._guard._check()
        refused = dict(self._refused)
        try:
            opened = self._connection is None
            self._connection = self._connection or _writer_connection(self._engine)
            with _charge_transaction(self._connection) as cursor:
                if opened:
                    self._guard._watch_log(True)
                ids = {charge.account for charge in charges} | {account for account, _ in refused}
                ids |= {new.account for new in answers if new.queries or new.request is not None}
                accounts = _lock_accounts(cursor, ids)
                self._heads._check_locked(cursor, accounts.values())
                now = self._now()
                # first, so that the charges find these answers
                stored = _store_answers(cursor, accounts, answers, self._salt, now)
                batch = ChargeBatch(cursor, self._answer_cache, accounts, charges, now)
                overdue = bool(refused) and time.monotonic() - self._refused_flushed > _REFUSED_FLUSH_INTERVAL
                changed = bool(answers) or batch._changed or not charges or overdue
                if changed:
                    batch._save()
                    counts = [(*subaccount, count) for subaccount, count in sorted(refused.items())]
                    cursor._execute_many(COUNT_REFUSED, counts)
                else:
                    cursor._rollback()
        except BaseException as error:
            self._answer_cache._clear()
            if isinstance(error, self._integrity_error):
                raise _Conflict from error
            if isinstance(error, (SQLAlchemyError, self._driver_error)):
                self._drop_connection()
                raise _unavailable(self._engine, error) from error
            raise
        if changed:
            self._heads._record(map(_head_of, accounts.values()))
            self._refused.clear()
            self._refused_flushed = time.monotonic()
            self.error = None
        for place, charge in enumerate(charges):
            if isinstance(batch.results[place], LimitExceeded):
                self._refused[charge.account, charge.client] += 1
        self.batches += 1
        return [*batch.results, *stored]

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

    def _drop_connection(self) -> None:
        self._guard._watch_log(False)
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

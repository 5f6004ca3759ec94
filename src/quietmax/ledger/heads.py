"""What notices that a ledger has lost rows: the head file outside the database, and the guard of SQLite's files.

A database that was rolled back (an old copy put in place, a lost write-ahead log, a failover to a replica that lags)
verifies: its chain is shorter, but intact. So every commit writes the number, the hash and the balance of the last row
of each account into a small file, after the commit is durable. The file may lag behind the database, but is never
ahead of it. When the ledger is opened, each of these rows must still be in the journal.

A process also remembers the last row that it has seen of each account. Before it writes, these rows and those in the
file must be in the journal: a ledger that was put back while it is served charges nothing, even after another process
has added rows to it. A single writer finds the rows that it knows, without a query.

Each account has a slot of 256 bytes, which no sector boundary divides, so that a crash leaves it old or new. Processes
that share the file take its lock, and replace only rows that are in the journal, by newer ones. The file is flushed
every few seconds and not with every commit: it survives a killed process at once, and a power failure up to the last
flush.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy import Connection, Engine

from quietmax.errors import LedgerDamaged, LedgerUnavailable, QuietmaxError
from quietmax.ledger.database import PARSE_ERRORS, AccountTransaction, Cursor, _read_transaction, _run

_SLOT_BYTES = 256
_FLUSH_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Head:
    """The last journal row of an account."""

    account: int  # The id of the account
    sequence: int  # The number of the row
    spent_units: int  # The balance after the row
    hash: str  # The hash of the row


def _head_of(locked: AccountTransaction) -> Head:
    return Head(locked.account, locked.sequence, locked.spent_units, locked.head)


def _read_heads(connection: Connection) -> list[Head]:
    """Return the heads of all accounts of a ledger."""
    rows = _run(connection, "SELECT id, sequence, spent_units, head FROM accounts ORDER BY id")
    return [Head(*row) for row in rows if type(row.sequence) is int]  # SQLite accepts any type in an edit


def _head_path(engine: Engine) -> Path | None:
    beside = f"{engine.url.database}.head" if engine.dialect.name == "sqlite" else None
    path = os.environ.get("QUIETMAX_LEDGER_HEAD") or beside
    return None if path is None else Path(path)


class HeadFile:
    """The newest heads that this process knows, and the file that keeps them."""

    def __init__(self, path: Path | None, ledger: str, engine: Engine, *, read_only: bool = False) -> None:
        self.path = path
        self.error: QuietmaxError | None = None
        self.damage: LedgerDamaged | None = None
        self._ledger = ledger
        self._engine = engine
        self._read_only = read_only
        self._known: dict[int, Head] = {}
        self._verified: dict[int, bytes] = {}  # the slots that this process wrote or has looked up
        self._lock = threading.Lock()
        self._flushed_at = time.monotonic()
        self._file: int | None = None

    def _load(self, connection: Connection) -> None:
        """Set `damage` unless every row that the file names is in the journal; else record the heads of the ledger."""
        try:
            ledger, heads = self._read()
            if ledger not in (None, self._ledger):
                raise LedgerDamaged(
                    f"The ledger is not the one that {self.path} belongs to, so what was spent is unknown."
                )
            cursor = Cursor(connection)
            for head in heads:
                if head.sequence and not _is_committed(cursor, head):
                    raise LedgerDamaged(
                        f"The ledger has lost charges: row {head.sequence} of account {head.account} is in "
                        f"{self.path}, but not in the audit log."
                    )
            self._record(_read_heads(connection))
        except LedgerDamaged as damage:
            self.damage = LedgerDamaged(
                f"{damage} Put the newest copy of the ledger in place, or charge what is known to be lost and go on "
                "with 'quietmax ledger accept-loss'."
            )

    def _check_locked(self, cursor: Cursor, locked: Iterable[AccountTransaction]) -> None:
        """Raise `LedgerDamaged` if the ledger has lost rows that this process or the file knows of."""
        heads = {each.account: _head_of(each) for each in locked}
        if self.damage is None and self._are_last_seen(heads):
            return
        self._check(cursor, heads, self._expected(heads))

    def _are_last_seen(self, heads: Mapping[int, Head]) -> bool:
        """Tell whether nobody else has written to these accounts, nor to their slots in the file."""
        with self._lock:
            return all(
                self._known.get(number) == head
                and (self.path is None or self._read_slot(number) == self._verified.get(number))
                for number, head in heads.items()
            )

    def _read_slot(self, account: int) -> bytes:
        """Return a slot of the file, or nothing if it is not open. A slot that is just written may be half old."""
        try:
            return b"" if self._file is None else os.pread(self._file, _SLOT_BYTES, _SLOT_BYTES * account)
        except OSError:
            return b""

    def _check_all(self, connection: Connection) -> None:
        """Raise `LedgerDamaged` if the ledger has lost rows of any account."""
        # First: what is expected must not be newer than what the transaction sees.
        expected = self._expected(None)
        current = {head.account: head for head in _read_heads(connection)}
        self._check(Cursor(connection), current, expected)

    def _expected(self, wanted: Iterable[int] | None) -> list[Head]:
        """Return the heads that must be in the journal, of some accounts or of all: the known and the stored ones."""
        if self.damage is not None:
            raise self.damage
        with self._lock:
            numbers = self._known if wanted is None else [each for each in wanted if each in self._known]
            expected = [self._known[number] for number in numbers]
            with suppress(OSError):  # `_record` reports it
                expected += self._stored_heads(wanted)
            return expected

    def _check(self, cursor: Cursor, current: Mapping[int, Head], expected: Iterable[Head]) -> None:
        """Compare the heads that must be in the journal with those of the accounts; look up where they differ."""
        for head in expected:
            now = current.get(head.account)
            is_last = now is not None and (now.sequence, now.hash) == (head.sequence, head.hash)
            if head.sequence and not is_last and not _is_committed(cursor, head):
                raise _went_back(head, now)
        with self._lock:
            self._remember(current.values())

    def _remember(self, heads: Iterable[Head]) -> list[Head]:
        """Keep heads of committed rows; return those that are newer than what was known."""
        newer = [
            head
            for head in heads
            if head.account not in self._known or self._known[head.account].sequence < head.sequence
        ]
        self._known.update((head.account, head) for head in newer)
        return newer

    def _record(self, heads: Iterable[Head]) -> None:
        """Keep heads of committed rows, unless newer ones are kept already."""
        with self._lock:
            committed = list(heads)
            before = {head.account: self._known.get(head.account) for head in committed}
            newer = self._remember(committed)
            if self.path is None or self._read_only or not newer:
                return
            try:
                self._replace(self.path, newer, before)
            except (OSError, *PARSE_ERRORS) as error:  # the charge is durable, whatever the file holds
                self._forget_file()
                cause = error.strerror if isinstance(error, OSError) else "the file is damaged"
                self.error = LedgerUnavailable(f"Cannot write {self.path}: {cause}.")
            except QuietmaxError as error:
                self.error = error

    def _replace(self, path: Path, heads: list[Head], before: Mapping[int, Head | None]) -> None:
        """Write heads into the file. What another process wrote there is looked up before it is replaced."""
        while doubtful := self._write(path, heads, before):
            for head, slot in doubtful:
                with _read_transaction(self._engine) as connection:
                    if not _is_committed(Cursor(connection), head):
                        self.damage = _went_back(head, None)
                        return
                self._verified[head.account] = slot
        self.error = None

    def _close(self) -> None:
        """Flush the file and close it."""
        with self._lock, suppress(OSError):
            self._flush()

    def _read(self) -> tuple[str | None, list[Head]]:
        """Return the id of the ledger and the heads that the file holds; None and nothing if there is no file."""
        if self.path is None or not self.path.exists():
            return None, []
        try:
            content = self.path.read_bytes()
            slots = [content[at : at + _SLOT_BYTES] for at in range(0, len(content), _SLOT_BYTES)]
            if not slots:
                return None, []
            heads = [Head(**json.loads(slot)) for slot in slots[1:] if not _is_empty(slot)]
            return str(json.loads(slots[0])["ledger"]), heads
        except OSError as error:
            raise LedgerUnavailable(f"Cannot read {self.path}: {error.strerror}.") from error
        except PARSE_ERRORS as error:
            raise LedgerDamaged(
                f"The file {self.path}, which says what charges the ledger must have, is damaged."
            ) from error

    def _stored_heads(self, wanted: Iterable[int] | None) -> list[Head]:
        """Return the heads that the file has, of some accounts or of all. What cannot be understood is left out."""
        if self.path is None:
            return []
        with self._locked_file(self.path, fcntl.LOCK_SH) as file:
            numbers = range(1, os.fstat(file).st_size // _SLOT_BYTES) if wanted is None else wanted
            slots = [os.pread(file, _SLOT_BYTES, _SLOT_BYTES * number) for number in numbers]
        found = []
        for slot in slots:
            with suppress(*PARSE_ERRORS):  # an empty slot too
                found.append(Head(**json.loads(slot)))
        return found

    def _write(
        self, path: Path, heads: list[Head], before: Mapping[int, Head | None]
    ) -> list[tuple[Head, bytes]]:
        """Write the heads that are newer than those in the file; return what must be looked up before that."""
        doubtful = []
        with self._locked_file(path, fcntl.LOCK_EX) as file:
            if not os.fstat(file).st_size:
                os.pwrite(file, _slot({"ledger": self._ledger}), 0)
            for head in heads:
                slot = os.pread(file, _SLOT_BYTES, _SLOT_BYTES * head.account)
                if slot != self._verified.get(head.account) and not _is_empty(slot):
                    stored = Head(**json.loads(slot))
                    if stored.sequence >= head.sequence:
                        continue
                    if stored != before.get(head.account):
                        doubtful.append((stored, slot))
                        continue
                self._verified[head.account] = slot = _slot(asdict(head))
                os.pwrite(file, slot, _SLOT_BYTES * head.account)
        if time.monotonic() - self._flushed_at > _FLUSH_SECONDS:
            self._flush()
        return doubtful

    @contextmanager
    def _locked_file(self, path: Path, lock: int) -> Iterator[int]:
        if self._file is None:
            self._file = os.open(path, os.O_RDONLY if self._read_only else os.O_RDWR | os.O_CREAT, 0o600)
        file = self._file
        fcntl.flock(file, lock)
        try:
            yield file
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)

    def _flush(self) -> None:
        """Flush the file and close it: the next write opens it again, or a new one if it was removed."""
        self._flushed_at = time.monotonic()
        if self._file is not None:
            os.fdatasync(self._file)
        self._forget_file()

    def _forget_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def _slot(content: Mapping[str, int | str]) -> bytes:
    return json.dumps(content).encode().ljust(_SLOT_BYTES - 1) + b"\n"


def _is_empty(slot: bytes) -> bool:
    return not slot.strip(b"\0 \n")


def _is_committed(cursor: Cursor, head: Head) -> bool:
    statement = "SELECT hash FROM journal WHERE account = ? AND sequence = ?"
    return cursor._fetch(statement, (head.account, head.sequence)) == [(head.hash,)]


def _went_back(head: Head, current: Head | None) -> LedgerDamaged:
    """Return the error for a row that was committed, but is not in the journal."""
    if current is not None and current.sequence < head.sequence:
        what = f"account {head.account} was at row {head.sequence} and is at row {current.sequence}"
    else:
        what = f"row {head.sequence} of account {head.account} is not the one that was committed"
    return LedgerDamaged(
        f"The ledger went back in time: {what}. Stop serving from it and restore a backup that has every charge."
    )


class FileGuard:
    """Detects that files of SQLite were moved, deleted or replaced while in use: charges would be lost."""

    def __init__(self, engine: Engine) -> None:
        self._path = Path(str(engine.url.database)) if engine.dialect.name == "sqlite" else None
        self._log = None if self._path is None else Path(f"{self._path}-wal")
        self._opened = _identity(self._path)
        self._opened_log: tuple[int, int] | None = None

    def _check(self) -> None:
        """Raise `LedgerUnavailable` if a file is no longer the one that was opened."""
        if self._opened_log is not None and _identity(self._log) != self._opened_log:
            raise LedgerUnavailable(
                f"The file {self._log} was removed or replaced while in use; it holds the latest charges. Stop the "
                "service with SIGTERM, which saves them, and start it again."
            )
        if self._path is not None and _identity(self._path) != self._opened:
            raise LedgerUnavailable(
                f"The ledger {self._path} was moved, deleted or replaced while in use. Put the file back, or restart."
            )

    def _watch_log(self, watch: bool) -> None:
        """Watch SQLite's write-ahead log too, while a connection that has it open stays open."""
        self._opened_log = _identity(self._log) if watch else None


def _identity(path: Path | None) -> tuple[int, int] | None:
    if path is None:
        return None
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino

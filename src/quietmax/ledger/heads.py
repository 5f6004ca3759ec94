"""The head file: the end of every account's hash chain, kept outside the database.

A database that was rolled back (an old copy put in place, a lost write-ahead log, a failover to a replica that lags)
verifies: its chain is shorter, but intact. So every commit writes the number, the hash and the balance of the last row
of each account into a small file, after the commit is durable. The file may lag behind the database, but is never
ahead of it. When the ledger is opened, each of these rows must still be in the journal.

Each account has a slot of 256 bytes, which no sector boundary divides, so that a crash leaves it old or new. Processes
that share the file take its lock and never replace a newer row by an older one. The file is flushed every few seconds
and not with every commit: it survives a killed process at once, and a power failure up to the last flush.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, select

from quietmax.errors import LedgerDamaged, LedgerUnavailable
from quietmax.ledger.database import accounts, journal
from quietmax.ledger.transactions import AccountTransaction

_SLOT_BYTES = 256
_FLUSH_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Head:
    """The last journal row of an account.

    Parameters
    ----------
    account : int
        The id of the account.
    sequence : int
        The number of the row.
    spent_units : int
        The balance after the row.
    hash : str
        The hash of the row.
    """

    account: int
    sequence: int
    spent_units: int
    hash: str


def read_heads(connection: Connection) -> list[Head]:
    """Return the heads of all accounts of a ledger.

    Parameters
    ----------
    connection : sqlalchemy.Connection
        A connection inside a transaction.
    """
    columns = accounts.c.id, accounts.c.sequence, accounts.c.spent_units, accounts.c.head
    rows = connection.execute(select(*columns).order_by(accounts.c.id))
    return [Head(*row) for row in rows if type(row.sequence) is int]  # SQLite accepts any type in an edit


class HeadFile:
    """The newest heads that this process knows, and the file that keeps them.

    Parameters
    ----------
    path : Path or None
        The file. None: heads are kept in memory only.
    ledger : str
        The id of the ledger.

    Attributes
    ----------
    error : LedgerUnavailable or None
        Why the file could not be written the last time.
    damage : LedgerDamaged or None
        What the ledger has lost. Such a ledger can be read and verified, but not written.
    """

    def __init__(self, path: Path | None, ledger: str) -> None:
        self.path = path
        self.error: LedgerUnavailable | None = None
        self.damage: LedgerDamaged | None = None
        self._ledger = ledger
        self._known: dict[int, Head] = {}
        self._lock = threading.Lock()
        self._flushed_at = time.monotonic()
        self._file: int | None = None

    def load(self, connection: Connection) -> None:
        """Set `damage` unless every row that the file names is in the journal; else record the heads of the ledger.

        Parameters
        ----------
        connection : sqlalchemy.Connection
            A connection inside a transaction.
        """
        try:
            lost = self._lost(connection)
        except LedgerDamaged as damage:
            lost = str(damage)
        if lost is None:
            self.record(read_heads(connection))
        else:
            self.damage = LedgerDamaged(
                f"{lost} Put the newest copy of the ledger in place, or charge what is known to be lost and go on with "
                "'quietmax ledger accept-loss'."
            )

    def _lost(self, connection: Connection) -> str | None:
        """Return what the ledger has lost, in a sentence; None if nothing."""
        ledger, heads = self.read()
        if ledger not in (None, self._ledger):
            return f"The ledger is not the one that {self.path} belongs to, so what was spent is unknown."
        for head in heads:
            found = connection.execute(
                select(journal.c.hash).where(
                    journal.c.account == head.account, journal.c.sequence == head.sequence
                )
            ).scalar_one_or_none()
            if head.sequence and found != head.hash:
                return (
                    f"The ledger has lost charges: row {head.sequence} of account {head.account} is in {self.path}, "
                    "but not in the audit log."
                )
        return None

    def check_locked(self, locked: Iterable[AccountTransaction]) -> None:
        """Raise `LedgerDamaged` if the ledger has lost rows, or an account is behind what this process has seen of it.

        Parameters
        ----------
        locked : iterable of AccountTransaction
            Accounts that are locked and not changed yet.
        """
        if self.damage is not None:
            raise self.damage
        for account in locked:
            known = self._known.get(account.account)
            if known is not None and (
                account.sequence < known.sequence
                or (account.sequence == known.sequence and account.head != known.hash)
            ):
                raise LedgerDamaged(
                    f"The ledger went back in time: account {account.account} was at row {known.sequence} and is at "
                    f"row {account.sequence}. Stop serving from it and restore a backup that has every charge."
                )

    def record(self, heads: Iterable[Head]) -> None:
        """Keep heads of committed rows, unless newer ones are kept already.

        Parameters
        ----------
        heads : iterable of Head
            The heads. What cannot be written is in `error`: the charges themselves are durable.
        """
        with self._lock:
            newer = [
                head
                for head in heads
                if head.account not in self._known or self._known[head.account].sequence < head.sequence
            ]
            self._known.update((head.account, head) for head in newer)
            if self.path is None or not newer:
                return
            try:
                self._write(newer)
                self.error = None
            except OSError as error:
                self._forget_file()
                self.error = LedgerUnavailable(f"Cannot write {self.path}: {error.strerror}.")
            except (
                ValueError,
                TypeError,
                KeyError,
                RecursionError,
            ):  # the charge is durable, whatever the file holds
                self._forget_file()
                self.error = LedgerUnavailable(f"Cannot write {self.path}: the file is damaged.")

    def close(self) -> None:
        """Flush the file and close it."""
        with self._lock, suppress(OSError):
            self._flush()

    def reset(self, heads: Iterable[Head]) -> None:
        """Forget all heads but these.

        Parameters
        ----------
        heads : iterable of Head
            The heads of the ledger as it is now.
        """
        self._known.clear()
        self.damage = None
        self._forget_file()
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        self.record(heads)

    def read(self) -> tuple[str | None, list[Head]]:
        """Return the id of the ledger and the heads that the file holds; None and nothing if there is no file.

        Raises
        ------
        LedgerDamaged
            If the file cannot be understood.
        """
        if self.path is None or not self.path.exists():
            return None, []
        try:
            content = self.path.read_bytes()
            slots = [content[at : at + _SLOT_BYTES] for at in range(0, len(content), _SLOT_BYTES)]
            if not slots:
                return None, []
            heads = [Head(**json.loads(slot)) for slot in slots[1:] if slot.strip(b"\0 \n")]
            return str(json.loads(slots[0])["ledger"]), heads
        except OSError as error:
            raise LedgerUnavailable(f"Cannot read {self.path}: {error.strerror}.") from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise LedgerDamaged(
                f"The file {self.path}, which says what charges the ledger must have, is damaged."
            ) from error

    def _write(self, heads: list[Head]) -> None:
        """Write the heads that are newer than those in the file; create it, readable by its owner only, if missing."""
        if self._file is None:
            assert self.path is not None
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        file = self._file
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            if not os.pread(file, 1, 0):
                _write_slot(file, 0, f'{{"ledger": "{self._ledger}"}}')
            for head in heads:
                stored = os.pread(file, _SLOT_BYTES, _SLOT_BYTES * head.account).strip(b"\0 \n")
                if not stored or json.loads(stored)["sequence"] < head.sequence:
                    _write_slot(
                        file,
                        head.account,
                        f'{{"account": {head.account}, "sequence": {head.sequence}, '
                        f'"spent_units": {head.spent_units}, "hash": "{head.hash}"}}',
                    )
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
        if time.monotonic() - self._flushed_at > _FLUSH_SECONDS:
            self._flush()

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


def _write_slot(file: int, number: int, content: str) -> None:
    os.pwrite(file, content.encode().ljust(_SLOT_BYTES - 1) + b"\n", _SLOT_BYTES * number)

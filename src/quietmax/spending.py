"""Account: how many answers were paid for. In memory, or in a file that outlives the process."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from quietmax.errors import BudgetExhausted, DataUnavailable, InvalidInput, QuietmaxError

ACCOUNT_FILE = "account.json"
"""Where a model folder counts the answers paid for."""


class Account(Protocol):
    """Counts paid answers. `charge` returns only after the charge is as durable as the account can make it."""

    @property
    def answered(self) -> int:
        """How many answers were paid for."""
        ...

    def charge(self, queries: int, limit: int) -> None:
        """Pay for ``queries`` answers, or raise `BudgetExhausted` if more than ``limit`` would be paid for in all."""
        ...


_fork_mark = object()


def _mark_fork() -> None:
    global _fork_mark
    _fork_mark = object()


os.register_at_fork(after_in_child=_mark_fork)


class OwnProcess:
    """The process in which this object was made; `check` raises in every other one (THEORY 3.12).

    A fork copies what is in memory. Every fork by Python replaces a mark in the child, so a process id that is used
    again does not help; the process id detects a fork by C code, which does not replace the mark.
    """

    def __init__(self) -> None:
        self._mark = _fork_mark
        self._id = os.getpid()

    def check(self) -> None:
        """Raise `QuietmaxError` in any other process. Call it before waiting for a lock: a fork copies locks too."""
        if self._mark is not _fork_mark or self._id != os.getpid():
            raise QuietmaxError(
                f"This is a fork of process {self._id}, which holds the privacy budget; a copy of the budget in memory "
                "pays for nothing. Ask in that process, or save the model there and open its folder in this process."
            )


class MemoryAccount:
    """An account that ends with the process. Safe to share between threads; a forked process is refused."""

    def __init__(self) -> None:
        self._answered = 0
        self._lock = threading.Lock()
        self._process = OwnProcess()

    @property
    def answered(self) -> int:
        """How many answers were paid for."""
        self._process.check()
        return self._answered

    def charge(self, queries: int, limit: int) -> None:
        """Pay for ``queries`` answers or refuse."""
        self._process.check()
        with self._lock:
            self._answered = _charged(self._answered, queries, limit)

    def __getstate__(self) -> dict[str, Any]:
        raise InvalidInput("An account in memory cannot be copied or pickled: the copy would be spent again.")


class FileAccount:
    """An account in a small file, safe to share between processes of one machine.

    A charge holds the file's lock and is flushed to the disk before `charge` returns: a crash may cost budget, but
    never gives an answer that was not paid for. The file must exist (see `create`): if it is missing, the balance is
    unknown and nothing is answered.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, path: str | Path, answered: int = 0) -> FileAccount:
        """Create the file of a new account, or of one whose file was lost; an existing file is left alone.

        Parameters
        ----------
        path : where the file is created.
        answered : how many answers were paid for already. For a lost file: at least as many as were given.
        """
        account = cls(path)
        if isinstance(answered, bool) or not isinstance(answered, int) or answered < 0:
            raise InvalidInput(
                f"answered must be an integer from 0 up, got {answered!r}; give the number of answers paid for."
            )
        try:
            number, made = tempfile.mkstemp(prefix=f".{account.path.name}-", dir=account.path.parent)
            try:
                os.write(number, account_text(answered).encode())
                os.fsync(number)
                os.link(made, account.path)
            finally:
                os.close(number)
                os.unlink(made)
        except FileExistsError as problem:
            raise InvalidInput(
                f"There is an account {account.path} already; open it with FileAccount instead."
            ) from problem
        except OSError as problem:
            raise QuietmaxError(
                f"The account {account.path} cannot be created ({problem.strerror}); make its folder writable."
            ) from problem
        return account

    @property
    def answered(self) -> int:
        """How many answers were paid for."""
        with self._locked(os.O_RDONLY) as file:
            return self._read(file)

    def charge(self, queries: int, limit: int) -> None:
        """Pay for ``queries`` answers or refuse."""
        with self._locked(os.O_RDWR) as file:
            total = _charged(self._read(file), queries, limit)
            # One short write in place, always of the same length: far below a disk sector, so never torn.
            os.pwrite(file, account_text(total).encode(), 0)
            os.fsync(file)

    @contextmanager
    def _locked(self, access: int) -> Iterator[int]:
        try:
            file = os.open(self.path, access)
        except FileNotFoundError as problem:
            raise DataUnavailable(
                f"The account {self.path} is missing, so it is unknown how many answers were paid for and nothing is "
                "answered. Restore it from a copy, or state the number: FileAccount.create(path, answered=...)."
            ) from problem
        except OSError as problem:
            raise QuietmaxError(
                f"The account {self.path} cannot be opened ({problem.strerror}), so nothing can be charged and nothing "
                "is answered; make its folder writable."
            ) from problem
        try:
            fcntl.flock(file, fcntl.LOCK_SH if access == os.O_RDONLY else fcntl.LOCK_EX)
            yield file
        except OSError as problem:
            raise QuietmaxError(
                f"The account {self.path} cannot be written ({problem.strerror}), so nothing was answered; "
                "make room or give the right to write."
            ) from problem
        finally:
            # A process forked meanwhile holds a copy of the open file, so closing it here would keep the lock.
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)

    def _read(self, file: int) -> int:
        try:
            answered = json.loads(os.pread(file, 1024, 0))["answered"]
        except (ValueError, KeyError, TypeError, RecursionError):
            answered = None
        if isinstance(answered, str) and answered.isascii() and answered.isdigit():
            return int(answered)
        raise DataUnavailable(
            f"The account {self.path} is damaged, so nobody knows what was spent and nothing is answered; restore it "
            "from a copy."
        )


def account_text(answered: int) -> str:
    """What the file of a `FileAccount` holds, always of the same length.

    >>> account_text(7)
    '{"answered": "00000000000000000007"}'
    """
    return json.dumps({"answered": f"{answered:020d}"})


def _charged(answered: int, queries: int, limit: int) -> int:
    left = max(limit - answered, 0)
    if queries > left:
        raise BudgetExhausted(
            f"{queries} answers were asked for, but {answered} of {limit} are spent and {left} are left; "
            f"ask at most {left}, or open a new budget if the owner of the records allows it."
        )
    return answered + queries

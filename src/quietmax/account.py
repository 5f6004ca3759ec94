"""Account: how many answers were paid for. In memory, or in a file that outlives the process."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from quietmax.errors import DataUnavailable, QuietmaxError

ACCOUNT_FILE = "account.json"
"""Where a model folder counts the answers paid for."""


class BudgetExhausted(QuietmaxError):
    """The budget does not pay for the queries asked; none was answered and nothing was spent."""


class Account(Protocol):
    """Counts paid answers. `charge` returns only after the charge is as durable as the account can make it."""

    @property
    def answered(self) -> int:
        """How many answers were paid for."""
        ...

    def charge(self, queries: int, limit: int) -> None:
        """Pay for ``queries`` answers, or raise `BudgetExhausted` if more than ``limit`` would be paid for in all."""
        ...


class MemoryAccount:
    """An account that ends with the process. Safe to share between threads."""

    def __init__(self) -> None:
        self._answered = 0
        self._lock = threading.Lock()

    @property
    def answered(self) -> int:
        """How many answers were paid for."""
        return self._answered

    def charge(self, queries: int, limit: int) -> None:
        """Pay for ``queries`` answers or refuse."""
        with self._lock:
            self._answered = _charged(self._answered, queries, limit)


class FileAccount:
    """An account in a small file, safe to share between processes of one machine.

    A charge holds the file's lock and is flushed to the disk before `charge` returns: a crash may cost budget, but
    never gives an answer that was not paid for.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

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
            file = self._opened(access)
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
            os.close(file)

    def _opened(self, access: int) -> int:
        """The file, made with nothing spent if it is not there: it appears whole, so an empty one is a damaged one."""
        if not self.path.exists():
            number, made = tempfile.mkstemp(prefix=f".{self.path.name}-", dir=self.path.parent)
            try:
                os.write(number, account_text(0).encode())
                os.fsync(number)
                with suppress(FileExistsError):
                    os.link(made, self.path)
            finally:
                os.close(number)
                os.unlink(made)
        return os.open(self.path, access)

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

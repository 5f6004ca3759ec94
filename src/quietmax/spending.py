"""Accounts: they count the answers that were charged, in memory or in a file that outlives the process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from quietmax.errors import BudgetExhausted, DataUnavailable, InvalidInput, QuietmaxError, counted

ACCOUNT_FILE = "account.json"
"""The file of a model folder that counts the charged answers."""
MOVED_FILE = "moved.txt"
"""The file of a model folder that says that a ledger keeps its budget now."""
DESCRIPTION_FILE = "model.json"
"""The file of a model folder that describes the model."""
ACCOUNT_ID = "account_id"
"""The key of the description under which the id of the model's account is stored."""
_CLOSED = "closed".ljust(20, "-")


class Account(Protocol):
    """The interface of an account, which counts charged answers."""

    @property
    def answered(self) -> int:
        """The number of answers that were charged."""
        ...

    def charge(self, queries: int, limit: int) -> None:
        """Charge for answers. The charge is as durable as the account can make it when this returns."""
        ...


_fork_marks = [object()]
"""One more in the child of every fork."""
os.register_at_fork(after_in_child=lambda: _fork_marks.append(object()))


class OwnProcess:
    """The process in which this object was made; `check` raises in every other one (THEORY 3.12).

    A fork copies what is in memory. Every fork by Python adds a mark in the child, so a process id that is used again
    does not matter. The process id detects a fork by C code, which adds no mark.
    """

    def __init__(self) -> None:
        self._mark = _fork_marks[-1]
        self._id = os.getpid()

    def check(self) -> None:
        """Raise `QuietmaxError` in any other process.

        Call this before waiting for a lock, because a fork copies locks too.
        """
        if self._mark is not _fork_marks[-1] or self._id != os.getpid():
            raise QuietmaxError(
                f"This is a fork of process {self._id}, which holds the privacy budget. A copy of the budget pays for "
                "nothing. A model that was saved by that process can be opened from its folder here."
            )


class MemoryAccount:
    """An account in memory. It is safe to share between threads, and raises in a forked process."""

    def __init__(self) -> None:
        self._answered = 0
        self._lock = threading.Lock()
        self._process = OwnProcess()

    @property
    def answered(self) -> int:
        """The number of answers that were charged."""
        self._process.check()
        return self._answered

    def charge(self, queries: int, limit: int) -> None:
        """Charge for answers."""
        self._process.check()
        with self._lock:
            self._answered = _charged(self._answered, queries, limit)

    def __getstate__(self) -> dict[str, Any]:
        raise InvalidInput(
            "An account in memory cannot be copied or pickled, because the copy could be spent again."
        )


class FileAccount:
    """An account in a small file that the processes of one machine can share.

    A charge holds the file's lock and is flushed to the disk before `charge` returns: a crash may cost budget, but
    never gives an answer that was not charged. The file must exist (see `create`): if it is missing, the balance is
    unknown and nothing is answered.

    The file holds a random id. A model folder also has the id in its description, so that a model is never paid from
    the account of another model that was saved at the same path. Accounts of Quietmax 0.1 have no id.

    Parameters
    ----------
    path : str or Path
        The file. A relative path is resolved now, so a later change of the working directory has no effect.
    identity : str, optional
        The id that the file must hold. If it holds another one, nothing is charged. None accepts any id, and
        an empty string a file without an id.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> account = FileAccount.create(Path(folder.name) / "account.json")
    >>> account.charge(3, limit=10)
    >>> FileAccount(account.path).answered
    3
    >>> folder.cleanup()
    """

    def __init__(self, path: str | Path, *, identity: str | None = None) -> None:
        self.path = Path(os.path.realpath(path))
        self._identity = identity

    @classmethod
    def create(cls, path: str | Path, answered: int = 0) -> FileAccount:
        """Create the file of a new account, or of one whose file was lost; an existing file is left alone.

        In a model folder, the account gets the id that the model's description names; elsewhere a new one. `answered`
        is the number of answers that were charged already. For a lost file: at least as many as were given.

        Raises
        ------
        InvalidInput
            If the file exists, or `answered` is not an integer of at least 0.
        QuietmaxError
            If the file cannot be created.
        """
        account = cls(path)
        account._identity = _described_identity(account.path) or new_identity()
        if isinstance(answered, bool) or not isinstance(answered, int) or answered < 0:
            raise InvalidInput(f"answered must be an integer of at least 0, got {answered!r}.")
        try:
            descriptor, staging = tempfile.mkstemp(prefix=f".{account.path.name}-", dir=account.path.parent)
            try:
                _write(descriptor, _account_text(answered, account._identity))
                os.link(staging, account.path)
            finally:
                os.close(descriptor)
                os.unlink(staging)
        except FileExistsError as problem:
            raise InvalidInput(
                f"The account {account.path} already exists; FileAccount(path) opens it."
            ) from problem
        except OSError as problem:
            raise QuietmaxError(
                f"The account {account.path} cannot be created ({problem.strerror})."
            ) from problem
        return account

    @property
    def answered(self) -> int:
        """The number of answers that were charged."""
        with self._locked(os.O_RDONLY) as file:
            return self._read(file)[0]

    @property
    def identity(self) -> str:
        """The id that the file holds; empty if it has none."""
        with self._locked(os.O_RDONLY) as file:
            return self._read(file)[1]

    def charge(self, queries: int, limit: int) -> None:
        """Charge for answers, of which the budget pays for `limit` in all.

        Raises
        ------
        BudgetExhausted
            If more than `limit` answers would be charged in all. Nothing is charged.
        DataUnavailable
            If the file is missing, damaged, closed, or the account of another model. Nothing is charged.
        """
        with self._locked(os.O_RDWR) as file:
            answered, identity = self._read(file)
            _write(file, _account_text(_charged(answered, queries, limit), identity))

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Close an account for good, so that its model can be replaced; if the block raises, it is opened again.

        A process that still has the account open cannot charge it. An account that counts answers stays open.
        """
        with self._locked(os.O_RDWR) as file:
            answered, identity = self._read(file)
            if answered:
                raise InvalidInput(
                    f"'{self.path.parent}' is not replaced, because its account counts {answered} paid answers; they "
                    "must not be forgotten."
                )
            mark = _account_text(None, identity)
            _write(file, mark)
        try:
            yield
        except BaseException:
            with self._locked(os.O_RDWR) as file:
                if os.pread(file, 1024, 0) == mark.encode():
                    _write(file, _account_text(0, identity))
            raise

    @contextmanager
    def _locked(self, access: int) -> Iterator[int]:
        try:
            file = os.open(self.path, access)
        except FileNotFoundError as problem:
            raise DataUnavailable(
                f"The account {self.path} is missing. The number of charged answers is unknown, so nothing is "
                "answered. Restore the file from a backup, or state the number: FileAccount.create(path, answered=...)."
            ) from problem
        except OSError as problem:
            raise QuietmaxError(
                f"The account {self.path} cannot be opened ({problem.strerror}). Nothing was charged or answered."
            ) from problem
        try:
            fcntl.flock(file, fcntl.LOCK_SH if access == os.O_RDONLY else fcntl.LOCK_EX)
            yield file
        except OSError as problem:
            raise QuietmaxError(
                f"The account {self.path} cannot be read or written ({problem.strerror}). Nothing was answered."
            ) from problem
        finally:
            # A process forked meanwhile holds a copy of the open file, so closing it here would keep the lock.
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)

    def _read(self, file: int) -> tuple[int, str]:
        """Return the number of charged answers and the id, or raise if the account must not be used."""
        try:
            content = json.loads(os.pread(file, 1024, 0))
            answered, identity = content["answered"], content.get("id", "")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            answered = identity = None
        if answered == _CLOSED:
            raise DataUnavailable(
                f"The account {self.path} was closed when its model was replaced. Nothing was charged or answered."
            )
        numeric = isinstance(answered, str) and answered.isascii() and answered.isdigit()
        if numeric and isinstance(identity, str):
            if self._identity is None or self._identity == identity:
                return int(answered), identity
            raise DataUnavailable(
                f"The account {self.path} belongs to another model. Nothing was charged or answered. Open the model "
                "from the folder that holds both the model and its account."
            )
        raise DataUnavailable(
            f"The account {self.path} is damaged. The number of charged answers is unknown, so nothing is answered. "
            "Restore the file from a backup."
        )


def new_identity() -> str:
    """Return a random id for an account."""
    return secrets.token_hex(16)


def _account_text(answered: int | None, identity: str = "") -> str:
    """Return the content of an account file. For one id it always has the same length."""
    content = {"answered": _CLOSED if answered is None else f"{answered:020d}"}
    return json.dumps(content | ({"id": identity} if identity else {}))


def _write(file: int, text: str) -> None:
    """Write an account in place and flush it to the disk."""
    # One short write, always of the same length: far below a disk sector, so never torn.
    content = text.encode()
    if os.pwrite(file, content, 0) < len(content):  # a limit on the size of files
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    os.fsync(file)


def _described_identity(path: Path) -> str | None:
    """Return the id that the description of a model folder names for its account."""
    if path.name != ACCOUNT_FILE:
        return None
    try:
        identity = json.loads(path.with_name(DESCRIPTION_FILE).read_bytes())[ACCOUNT_ID]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return identity if isinstance(identity, str) and identity.isalnum() and len(identity) <= 64 else None


def _charged(answered: int, queries: int, limit: int) -> int:
    """Return the number of charged answers after a charge, or raise `BudgetExhausted`."""
    left = max(limit - answered, 0)
    if queries > left:
        raise BudgetExhausted(
            f"Privacy budget exhausted: {counted(queries, 'answer')} requested, {left} of {limit} left. Nothing "
            "was charged."
        )
    return answered + queries

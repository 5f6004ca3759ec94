"""The exceptions that Quietmax raises, and the sentences that several modules share.

A message says what is wrong and what is valid. It never contains a value of a private record.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable


class QuietmaxError(Exception):
    """Base class of all errors that a user can cause. The command line prints the message and exits with 1."""


class InvalidInput(QuietmaxError, ValueError):
    """The caller's input is invalid. Nothing was written and nothing was charged."""

    def __init__(self, message: str, column: str | None = None) -> None:
        super().__init__(message)
        self.column = column  # Whose cell cannot be read, if that is what is wrong


class InvalidData(InvalidInput):
    """The contents of a file or table are invalid. Unlike other invalid input, this is not wrong usage."""


class DataUnavailable(QuietmaxError):
    """A file is missing, incomplete or not the expected one."""


class BudgetExhausted(QuietmaxError):
    """The privacy budget does not pay for the queries. None was answered and nothing was charged."""


class LedgerUnavailable(QuietmaxError):
    """The database cannot be reached or written. No charge is known to be durable, so nothing may be answered."""


class LedgerTooLate(LedgerUnavailable):
    """The ledger did not do its part in time. Clients may see the message: it names no file and no database."""


class LedgerDamaged(QuietmaxError):
    """The ledger contradicts itself, or has a format that this version does not know."""


class QuietmaxWarning(UserWarning):
    """Something that the owner of the records should know. The command line prints it as one line on stderr."""


def unknown_name(kind: str, name: str, known: Iterable[str], also: str = "") -> InvalidInput:
    """Return the error for a name that is not registered; it suggests a similar name if there is one."""
    names = list(known)
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    meant = f" (did you mean '{near[0]}'?)" if near else ""
    return InvalidInput(f"Unknown {kind} '{name}'{meant}. Valid: {', '.join(names)}{also}.")


def check_type(value: object, types: type | tuple[type, ...], name: str, expected: str) -> None:
    """Raise `InvalidInput` if a value has another type than the expected ones."""
    if not isinstance(value, types):
        raise InvalidInput(f"{name} must be {expected}, got a value of type {type(value).__name__}.")


def as_number(value: object) -> float:
    """Return `value` as a float, or NaN if it is not a number."""
    try:
        return float(value) if not isinstance(value, str | bytes) else math.nan  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def checked_positive(value: float, name: str) -> float:
    """Return `value` as a float if it is between 1e-100 and 1e100."""
    number = as_number(value)
    if 1e-100 <= number <= 1e100:
        return number
    raise InvalidInput(f"{name} must be between 1e-100 and 1e100, got {value!r}.")


def counted(count: int, one: str, several: str | None = None) -> str:
    """Return how many there are, in words.

    >>> counted(1, "account"), counted(2000, "account"), counted(3, "query", "queries")
    ('1 account', '2,000 accounts', '3 queries')
    """
    return f"1 {one}" if count == 1 else f"{count:,} {several or one + 's'}"


def short_message(error: BaseException) -> str:
    """Return the first line of an error's message, at most 160 characters; the type's name if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]

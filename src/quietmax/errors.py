"""What Quietmax raises: one clear sentence saying what was wrong, what was expected and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class QuietmaxError(Exception):
    """Any refusal or failure a user can provoke; the command line prints its sentence and exits with 1."""


class InvalidInput(QuietmaxError, ValueError):
    """The caller's input is wrong; nothing was written and nothing was spent."""


class DataUnavailable(QuietmaxError):
    """A data file is missing, incomplete or not the expected one."""


def unknown_name(what: str, name: str, known: Iterable[str], otherwise: str = "") -> InvalidInput:
    """The refusal of a name that is not among the known ones; it suggests the nearest, if one is near.

    >>> print(unknown_name("attack", "shadw", ["lira", "shadow"]))
    There is no attack 'shadw' among lira, shadow; name one of them (did you mean 'shadow'?).
    """
    names = list(known)
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    meant = f" (did you mean '{near[0]}'?)" if near else ""
    return InvalidInput(
        f"There is no {what} '{name}' among {', '.join(names)}; name one of them{meant}{otherwise}."
    )


def expect(value: object, kinds: type | tuple[type, ...], what: str, wanted: str) -> None:
    """Refuse a value of another type than is taken.

    >>> expect("1", float, "The budget", "a Budget")
    Traceback (most recent call last):
    ...
    quietmax.errors.InvalidInput: The budget is of type str, which is not taken; give a Budget.
    """
    if not isinstance(value, kinds):
        raise InvalidInput(f"{what} is of type {type(value).__name__}, which is not taken; give {wanted}.")


def words_of(problem: BaseException) -> str:
    """What another library says, short enough to stand in a sentence of ours: its first line, or the kind of problem.

    >>> words_of(ValueError("too wide\\nby 3")), words_of(ValueError())
    ('too wide', 'ValueError')
    """
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0][:160]


class LedgerUnavailable(QuietmaxError):
    """The database cannot be reached or written; nothing is known to be charged, so nothing may be answered."""


class LedgerDamaged(QuietmaxError):
    """The ledger contradicts itself, or is of a kind this program does not know."""

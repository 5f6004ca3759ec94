"""What Quietmax raises: one clear sentence saying what was wrong, what was expected and what to do."""

from __future__ import annotations


class QuietmaxError(Exception):
    """Any refusal or failure a user can provoke; the command line prints its sentence and exits with 1."""


class InvalidInput(QuietmaxError, ValueError):
    """The caller's input is wrong; nothing was written and nothing was spent."""


class DataUnavailable(QuietmaxError):
    """A data file is missing, incomplete or not the expected one."""

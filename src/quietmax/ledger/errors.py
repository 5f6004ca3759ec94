"""What the ledger raises besides the errors of the package."""

from __future__ import annotations

from quietmax.errors import QuietmaxError


class LedgerUnavailable(QuietmaxError):
    """The database cannot be reached or written; nothing is known to be charged, so nothing may be answered."""


class LedgerDamaged(QuietmaxError):
    """The ledger contradicts itself, or is of a kind this program does not know."""

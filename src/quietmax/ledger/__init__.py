"""Budgets that outlive the process: accounts, charges, keys and a journal, in SQLite or PostgreSQL."""

from quietmax.errors import LedgerDamaged, LedgerUnavailable
from quietmax.ledger.accounts import AccountState, Part, Terms
from quietmax.ledger.api_keys import Key, find_key
from quietmax.ledger.ledger import Ledger, Point
from quietmax.ledger.transactions import (
    Charge,
    Charged,
    Failed,
    KeyEnded,
    Outcome,
    Refused,
    Replayed,
    Reused,
    Store,
    Stored,
)
from quietmax.ledger.verify import Verification

__all__ = [
    "AccountState",
    "Charge",
    "Charged",
    "Failed",
    "Key",
    "KeyEnded",
    "Ledger",
    "LedgerDamaged",
    "LedgerUnavailable",
    "Outcome",
    "Part",
    "Point",
    "Refused",
    "Replayed",
    "Reused",
    "Store",
    "Stored",
    "Terms",
    "Verification",
    "find_key",
]

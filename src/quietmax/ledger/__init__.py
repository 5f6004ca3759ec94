"""Budgets that outlive the process: accounts, charges, API keys and a journal, in SQLite or PostgreSQL."""

from quietmax.errors import LedgerDamaged, LedgerUnavailable
from quietmax.ledger.accounts import AccountState, ApiKey, Terms
from quietmax.ledger.ledger import Ledger
from quietmax.ledger.transactions import Charge, ChargeResult, LimitExceeded
from quietmax.ledger.verify import Verification

__all__ = [
    "AccountState",
    "ApiKey",
    "Charge",
    "ChargeResult",
    "Ledger",
    "LedgerDamaged",
    "LedgerUnavailable",
    "LimitExceeded",
    "Terms",
    "Verification",
]

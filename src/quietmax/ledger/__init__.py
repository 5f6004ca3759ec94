"""Budgets that outlive the process: accounts, charges, API keys and a journal, in SQLite or PostgreSQL."""

from quietmax.errors import LedgerDamaged, LedgerUnavailable
from quietmax.ledger.accounts import AccountState, Subaccount, Terms
from quietmax.ledger.api_keys import ApiKey, find_key
from quietmax.ledger.ledger import Ledger, SpendingPoint
from quietmax.ledger.transactions import (
    Charge,
    Charged,
    ChargeResult,
    Failed,
    InvalidKey,
    LimitExceeded,
    NewAnswers,
    Part,
    Pruned,
    Replayed,
    RequestIdReused,
    StoredAnswer,
)
from quietmax.ledger.verify import Verification

__all__ = [
    "AccountState",
    "ApiKey",
    "Charge",
    "ChargeResult",
    "Charged",
    "Failed",
    "InvalidKey",
    "Ledger",
    "LedgerDamaged",
    "LedgerUnavailable",
    "LimitExceeded",
    "NewAnswers",
    "Part",
    "Pruned",
    "Replayed",
    "RequestIdReused",
    "SpendingPoint",
    "StoredAnswer",
    "Subaccount",
    "Terms",
    "Verification",
    "find_key",
]

"""Units as numbers in the account's currency, for answers and pages; the ledger itself counts whole units."""

from __future__ import annotations

import math
from typing import Any

from quietmax.accounting import LIMIT, Cost, PureCost, epsilon_of
from quietmax.ledger import AccountState, Part

_SLACK = 2.0**-50


def shown_cost(total: Cost, units: int) -> float:
    """What units cost, rounded up: epsilon, or mu."""
    return _amount(total, units) * (1 + _SLACK)


def shown_left(total: Cost, units: int) -> float:
    """What units are still worth, rounded down."""
    return _amount(total, max(units, 0)) * (1 - _SLACK)


def currency_name(total: Cost) -> str:
    """``epsilon`` or ``mu``: what the numbers mean."""
    return "epsilon" if isinstance(total, PureCost) else "mu"


def _amount(total: Cost, units: int) -> float:
    part = units / LIMIT
    return total.epsilon * part if isinstance(total, PureCost) else total.mu * math.sqrt(part)


def budget_json(account: AccountState, parts: list[Part], client: str, all_clients: bool) -> dict[str, Any]:
    """An account for the budget endpoint: the whole, and the caller's part (an administrator sees everyone's)."""
    total = _amount(account.total, account.limit_units)
    shown = [part for part in parts if all_clients or part.client == client]
    return {
        "account": account.name,
        "currency": currency_name(account.total),
        "terms": account.terms.to_json(),
        "total": total,
        "spent": min(shown_cost(account.total, account.spent_units), total),
        "remaining": shown_left(account.total, account.left_units),
        "spent_fraction": account.spent_units / account.limit_units if account.limit_units else 1.0,
        "spent_in_epsilon": _in_epsilon(account),
        "clients": [
            {
                "client": part.client,
                "spent_fraction": part.spent_units / account.limit_units if account.limit_units else 0.0,
                "quota_fraction": (
                    None
                    if part.limit_units is None
                    else (part.limit_units / account.limit_units if account.limit_units else 0.0)
                ),
                "refused": part.refused,
            }
            for part in shown
        ],
    }


def _in_epsilon(account: AccountState) -> float | None:
    """What was spent as an epsilon at the delta of the terms; None where the terms have no delta to read a mu at."""
    spent = account.spent
    if isinstance(spent, PureCost):
        return spent.epsilon
    if account.terms.delta == 0 or account.terms.reading != "proven":
        return None
    return epsilon_of(spent.mu, account.terms.delta) if spent.mu else 0.0


def answers_left(left_units: int, unit_cost: int) -> int:
    """How many further answers the units pay for."""
    return max(left_units, 0) // unit_cost

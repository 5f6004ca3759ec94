"""An open ledger on each of the two databases."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quietmax.ledger import Ledger


@pytest.fixture
def ledger(address: str) -> Iterator[Ledger]:
    """An empty ledger, on SQLite and on PostgreSQL."""
    with Ledger(address) as opened:
        yield opened

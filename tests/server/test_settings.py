"""Limits of the service."""

from __future__ import annotations

import pytest

from quietmax.errors import InvalidInput
from quietmax.server import Settings


@pytest.mark.parametrize("name", ["max_bytes", "max_rows", "timeout", "max_in_flight"])
@pytest.mark.parametrize("limit", [0, -1, float("nan")])
def test_a_limit_must_be_positive(name: str, limit: float) -> None:
    with pytest.raises(InvalidInput, match=f"{name} must be greater than 0"):
        Settings(**{name: limit})  # type: ignore[arg-type]

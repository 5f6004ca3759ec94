"""Limits of the service."""

from __future__ import annotations

from pathlib import Path

import pytest

from quietmax.errors import InvalidInput
from quietmax.server import Settings
from quietmax.server.settings import POSITIVE, read_session_secret


@pytest.mark.parametrize("name", POSITIVE)
@pytest.mark.parametrize("limit", [0, -1, float("nan")])
def test_a_limit_must_be_positive(name: str, limit: float) -> None:
    with pytest.raises(InvalidInput, match=f"{name} must be greater than 0"):
        Settings(**{name: limit})  # type: ignore[arg-type]


def test_a_session_secret_is_random_unless_given_and_never_shown() -> None:
    assert Settings().session_secret != Settings().session_secret
    assert Settings(session_secret=b"x" * 32).session_secret == b"x" * 32
    assert "xxx" not in repr(Settings(session_secret=b"x" * 32))
    with pytest.raises(InvalidInput, match="session_secret must have at least 32 bytes, got 31"):
        Settings(session_secret=b"x" * 31)


def test_a_session_secret_is_read_from_a_file_of_at_least_32_bytes(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(InvalidInput, match=f"Cannot read the session secret {file}"):
        read_session_secret(file)
    file.write_bytes(b"short\n")
    with pytest.raises(InvalidInput, match="must have at least 32 bytes, got 5"):
        read_session_secret(file)
    file.write_bytes(b"y" * 40 + b"\n")
    assert read_session_secret(file) == b"y" * 40

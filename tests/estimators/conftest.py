"""Fixtures that several tests of estimators share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quietmax.estimators import blocks


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 rows, so that every batch and every shard is in many of them."""
    monkeypatch.setattr(blocks, "ROWS_AT_ONCE", 16)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1)

"""Shared by all tests: where the real data sets lie, and small data that need no file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "quietmax", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("quietmax")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data sets; tests that need it are skipped where it is not given."""
    folder = os.environ.get("QUIETMAX_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("QUIETMAX_DATA does not name a folder with the real data sets")
    return Path(folder)

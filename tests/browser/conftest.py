"""A real Chromium, and the service with a small model behind the dashboard."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

SERVER_TESTS = Path(__file__).parent.parent / "server"
if str(SERVER_TESTS) not in sys.path:
    sys.path.append(str(SERVER_TESTS))
HOW = "install it with: apt-get install -y chromium (or name another with QUIETMAX_CHROMIUM)"


@pytest.fixture(scope="session")
def chromium():
    """The path of a Chromium; without one the test is skipped and says how to get it."""
    named = os.environ.get("QUIETMAX_CHROMIUM")
    found = named or next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if found is None:
        pytest.skip(f"there is no Chromium; {HOW}")
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is missing; install it with: pip install playwright")
    return found


@pytest.fixture(scope="session")
def browser(chromium):
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(
                executable_path=chromium, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
            )
        except Error as problem:
            pytest.skip(f"Chromium does not start ({str(problem).splitlines()[0]}); {HOW}")
        yield opened
        opened.close()


@pytest.fixture
def picture(request):
    """Where a screenshot goes: the folder QUIETMAX_SCREENSHOTS, if it is set; who changes the page looks at them."""
    folder = os.environ.get("QUIETMAX_SCREENSHOTS")

    def take(page, name):
        if folder:
            page.screenshot(path=Path(folder) / f"{request.node.name}-{name}.png", full_page=True)

    return take

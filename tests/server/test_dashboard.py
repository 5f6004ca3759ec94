"""The dashboard over HTTP and in a real browser, on a desk and on a phone."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from quietmax.ledger import Terms
from quietmax.models import Model, TrainingSettings, save_model
from quietmax.models.mlp import initial_mlp
from quietmax.server import Settings
from quietmax.server.errors import unavailable
from tests.server.running_service import (
    LEDGER_DOWN,
    Running,
    Start,
    inference,
    running,
    some_rows,
)

QUERIES = 3
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 375, "height": 812}
TIMEOUT = 60_000
BAR_SHOWS = """share => {
    const bar = document.querySelector(".bar"), width = each => each.getBoundingClientRect().width;
    return Math.abs(width(bar.firstElementChild) / width(bar) - share) < 0.01;
}"""


def test_the_pages_refuse_requests_of_other_sites(plain: Running) -> None:
    with httpx.Client(base_url=plain.url) as browser:
        browser.post("/login", data={"key": plain.key})
        query = inference(some_rows(1))
        for headers in ({"origin": "https://attacker.example"}, {"sec-fetch-site": "cross-site"}):
            assert browser.post("/try?model=plain", json=query, headers=headers).status_code == 403
            assert browser.post("/login", data={"key": plain.key}, headers=headers).status_code == 403
        assert plain.ledger.account("people").spent_units == 0
        own = {"origin": plain.url, "sec-fetch-site": "same-origin"}
        assert browser.post("/try?model=plain", json=query, headers=own).status_code == 200


@pytest.mark.parametrize(
    ("where", "query", "status"),
    [
        ("", b"{}", 400),
        ("?model=nobody", b"{}", 404),
        ("?model=plain&version=2", b"{}", 404),
        ("?model=plain", b"", 400),
        ("?model=plain", b"[]", 400),
        ("?model=plain", b"{}", 400),
        ("?model=plain", json.dumps(inference(some_rows(1))).encode()[:-1], 400),
        ("?model=plain", json.dumps(inference(np.ones((1, 2)))).encode(), 422),
        ("?model=plain", json.dumps(inference(np.full((1, 6), 1e30))).encode(), 422),
        ("?model=plain", b"x" * 5001, 413),
    ],
)
def test_an_invalid_query_is_refused_without_a_charge(
    start: Start, where: str, query: bytes, status: int
) -> None:
    limits = Settings(max_bytes=5000)
    with (
        start("plain", budget=Terms(10.0), queries=20, settings=limits) as plain,
        httpx.Client(base_url=plain.url) as browser,
    ):
        browser.post("/login", data={"key": plain.key})
        refused = browser.post(f"/try{where}", content=query)
        assert refused.status_code == status
        assert refused.json()["error"].endswith(".")
        assert browser.post("/login", data={"key": "x" * 5000}).status_code == 413
        assert plain.ledger.account("people").spent_units == 0


def test_the_page_has_no_external_resource_and_allows_only_its_own_script(plain: Running) -> None:
    login = plain.http.post("/login", data={"key": plain.admin})
    response = plain.http.get("/", headers={"cookie": login.headers["set-cookie"].partition(";")[0]})
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    for word in ("http://", "https://", "//cdn", "src="):
        assert word not in response.text
    assert response.headers["cache-control"] == "no-store"
    assert "as owner (administrator)" in response.text


def test_names_on_the_page_are_escaped(models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    shutil.copytree(models / "plain", folder)
    description = json.loads((folder / "model.json").read_text())
    description["dataset"] = "<script>alert(1)</script>"
    (folder / "model.json").write_text(json.dumps(description))
    with running(
        f"sqlite:///{tmp_path / 'l.sqlite'}",
        [str(folder)],
        budget=Terms(10.0),
        settings=Settings(anonymous=True),
    ) as service:
        page = httpx.get(service.url).text
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


def test_a_login_while_the_ledger_is_down_is_503_and_not_a_wrong_key(
    plain: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: str) -> None:
        raise unavailable(str(LEDGER_DOWN))

    monkeypatch.setattr(plain.service.auth, "login", fail)
    assert httpx.post(f"{plain.url}/login", data={"key": plain.key}).status_code == 503


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser") / "digits"
    network = initial_mlp((6, 8, 4), "tanh", (0,))
    save_model(Model(network, TrainingSettings((8,)), 160, "people", 0), folder)
    return folder


@pytest.fixture
def service(chromium: str, model: Path, tmp_path: Path) -> Iterator[Running]:  # noqa: ARG001
    shutil.copytree(model, tmp_path / "digits")
    place = f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    with running(place, [f"digits={tmp_path / 'digits'}"], budget=Terms(10.0), queries=QUERIES) as started:
        yield started


@pytest.fixture(params=[DESK, PHONE], ids=["desk", "phone"])
def page(browser: Any, service: Running, request: pytest.FixtureRequest) -> Iterator[Any]:
    context = browser.new_context(viewport=request.param, base_url=service.url)
    opened = context.new_page()
    opened.set_default_timeout(TIMEOUT)
    opened.wrong = []
    opened.on("pageerror", lambda error: opened.wrong.append(str(error)))
    opened.on("console", lambda message: message.type == "error" and opened.wrong.append(message.text))
    opened.requested = []
    opened.on("request", lambda request: opened.requested.append(request.url))
    yield opened
    context.close()


def _log_in(page: Any, key: str) -> None:
    page.goto("/")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("heading", name="Budget of people").wait_for()


def _percent(page: Any) -> float:
    return float(page.locator('[data-field="percent"]').inner_text().rstrip("%"))


def _send_query(page: Any, number: int) -> str:
    page.locator("output").evaluate("output => output.textContent = ''")
    page.get_by_label("Try it").fill(", ".join(str(number + index / 10) for index in range(6)))
    page.get_by_role("button", name="Send query").click()
    page.locator("output", has_text=re.compile(r"\.")).wait_for()
    return str(page.locator("output").inner_text())


def test_a_client_logs_in_sends_queries_and_is_refused_when_the_budget_is_exhausted(
    page: Any, service: Running, screenshot: Any
) -> None:
    from playwright.sync_api import expect

    page.goto("/")
    screenshot(page, "login")
    _log_in(page, service.key)
    assert _percent(page) == 0
    screenshot(page, "fresh")
    for asked in range(1, QUERIES + 1):
        said = _send_query(page, asked)
        assert said.startswith("Class ")
        assert f"; {QUERIES - asked} answers left." in said
        expect(page.locator('[data-field="percent"]')).to_have_text(
            f"{100 * asked / QUERIES:.1f}%", timeout=TIMEOUT
        )
        page.wait_for_function(BAR_SHOWS, arg=asked / QUERIES)
    screenshot(page, "spent")
    said = _send_query(page, 9)
    assert said == "Privacy budget exhausted: 1 answer requested, 0 left. Nothing was charged."
    assert page.locator("output.error").count() == 1
    expect(page.locator('[data-field="refused"]')).to_have_text("1", timeout=TIMEOUT)
    screenshot(page, "refused")
    said = _send_query(page, 1)
    assert "answered before" in said, "a cached answer is free even when the budget is exhausted"
    assert (
        service.ledger.account("people").remaining_units
        < service.ledger.account("people").limit_units // QUERIES
    )
    assert [text for text in page.wrong if "403" not in text] == []


def test_the_page_fits_the_screen_and_fetches_nothing_from_elsewhere(page: Any, service: Running) -> None:
    _log_in(page, service.admin)
    _send_query(page, 1)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (
        "nothing to scroll sideways"
    )
    small = page.evaluate(
        "[...document.querySelectorAll('button, textarea, input')]"
        ".filter(each => each.getBoundingClientRect().height < 32).length"
    )
    assert small == 0, "everything to be pressed is large enough for a finger"
    assert all(url.startswith(service.url) for url in page.requested)
    assert page.wrong == []


def test_the_page_says_that_a_guarantee_is_not_proven(page: Any, service: Running) -> None:
    _log_in(page, service.key)
    assert page.locator(".badge.refuted", has_text="refuted").is_visible()
    assert page.get_by_text("No proven guarantee (refuted)").first.is_visible()


def test_a_wrong_key_is_refused_and_a_logged_out_browser_sees_nothing(page: Any, service: Running) -> None:
    page.goto("/")
    page.get_by_label("API key").fill("qm_0123456789abcdef_" + "x" * 43)
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("alert").wait_for()
    _log_in(page, service.key)
    page.get_by_role("button", name="Log out").click()
    page.get_by_label("API key").wait_for()
    assert page.evaluate("fetch('/state').then(response => response.status)") == 401


def test_spending_by_others_appears_without_reloading(page: Any, service: Running) -> None:
    from playwright.sync_api import expect

    _log_in(page, service.admin)
    service.infer(np.ones((1, 6)), model="digits")
    expect(page.locator('[data-field="clients"] tr', has_text="ann")).to_be_visible(timeout=TIMEOUT)
    expect(page.locator('[data-field="percent"]')).to_have_text(f"{100 / QUERIES:.1f}%", timeout=TIMEOUT)

"""The dashboard in a real browser: log in, ask, watch the budget fall, be refused; on a desk and on a phone."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest

from quietmax.ledger import Terms
from quietmax.models import Model, TrainingSettings, save_model
from quietmax.models.mlp import initial_mlp

QUERIES = 3
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 375, "height": 812}
PATIENCE = 60_000
BAR_SHOWS = """share => {
    const bar = document.querySelector(".bar"), width = each => each.getBoundingClientRect().width;
    return Math.abs(width(bar.firstElementChild) / width(bar) - share) < 0.01;
}"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser") / "digits"
    network = initial_mlp((6, 8, 4), "tanh", (0,))
    save_model(Model(network, TrainingSettings((8,)), 160, "people", 0), folder)
    return folder


@pytest.fixture
def service(chromium, model, tmp_path):  # noqa: ARG001
    from running_service import running

    shutil.copytree(model, tmp_path / "digits")
    place = f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    with running(place, [f"digits={tmp_path / 'digits'}"], budget=Terms(10.0), queries=QUERIES) as started:
        yield started


@pytest.fixture(params=[DESK, PHONE], ids=["desk", "phone"])
def page(browser, service, request):
    context = browser.new_context(viewport=request.param, base_url=service.url)
    opened = context.new_page()
    opened.set_default_timeout(PATIENCE)
    opened.wrong = []
    opened.on("pageerror", lambda problem: opened.wrong.append(str(problem)))
    opened.on("console", lambda message: message.type == "error" and opened.wrong.append(message.text))
    opened.asked = []
    opened.on("request", lambda asked: opened.asked.append(asked.url))
    yield opened
    context.close()


def _log_in(page, key):
    page.goto("/")
    page.get_by_label("Key").fill(key)
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("heading", name="Budget of people").wait_for()


def _percent(page):
    return float(page.locator('[data-field="percent"]').inner_text().rstrip("%"))


def _ask(page, number):
    page.locator("output").evaluate("output => output.textContent = ''")
    page.get_by_label("Try it").fill(", ".join(str(number + index / 10) for index in range(6)))
    page.get_by_role("button", name=re.compile("^Ask")).click()
    page.locator("output", has_text=re.compile(r"\.")).wait_for()
    return page.locator("output").inner_text()


def test_a_client_logs_in_asks_watches_the_budget_fall_and_is_refused(page, service, picture):
    from playwright.sync_api import expect

    page.goto("/")
    picture(page, "login")
    _log_in(page, service.key)
    assert _percent(page) == 0
    picture(page, "fresh")
    for asked in range(1, QUERIES + 1):
        said = _ask(page, asked)
        assert said.startswith("Class ")
        assert f"; {QUERIES - asked} answers are left." in said
        expect(page.locator('[data-field="percent"]')).to_have_text(
            f"{100 * asked / QUERIES:.1f}%", timeout=PATIENCE
        )
        page.wait_for_function(BAR_SHOWS, arg=asked / QUERIES)
    picture(page, "spent")
    said = _ask(page, 9)
    assert "pays for 0 more" in said
    assert page.locator("output.problem").count() == 1
    expect(page.locator('[data-field="refused"]')).to_have_text("1", timeout=PATIENCE)
    picture(page, "refused")
    said = _ask(page, 1)
    assert "asked before" in said, "a stored answer is free even when the budget is gone"
    assert (
        service.ledger.account("people").remaining_units
        < service.ledger.account("people").limit_units // QUERIES
    )
    assert [text for text in page.wrong if "403" not in text] == []


def test_the_page_fits_the_screen_and_fetches_nothing_from_elsewhere(page, service):
    _log_in(page, service.admin)
    _ask(page, 1)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (
        "nothing to scroll sideways"
    )
    small = page.evaluate(
        "[...document.querySelectorAll('button, textarea, input')]"
        ".filter(each => each.getBoundingClientRect().height < 32).length"
    )
    assert small == 0, "everything to be pressed is large enough for a finger"
    assert all(url.startswith(service.url) for url in page.asked)
    assert page.wrong == []


def test_the_guarantee_of_an_unproven_model_is_said_on_the_page(page, service):
    _log_in(page, service.key)
    assert page.locator(".badge.refuted", has_text="refuted").is_visible()
    assert page.get_by_text("No proven guarantee (refuted)").first.is_visible()


def test_a_wrong_key_is_refused_and_a_logged_out_browser_sees_nothing(page, service):
    page.goto("/")
    page.get_by_label("Key").fill("qm_0123456789abcdef_" + "x" * 43)
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("alert").wait_for()
    _log_in(page, service.key)
    page.get_by_role("button", name="Log out").click()
    page.get_by_label("Key").wait_for()
    assert page.evaluate("fetch('/state').then(told => told.status)") == 401


def test_spending_by_others_appears_without_reloading(page, service):
    from playwright.sync_api import expect

    _log_in(page, service.admin)
    service.infer(np.ones((1, 6)), model="digits")
    expect(page.locator('[data-field="clients"] tr', has_text="ann")).to_be_visible(timeout=PATIENCE)
    expect(page.locator('[data-field="percent"]')).to_have_text(f"{100 / QUERIES:.1f}%", timeout=PATIENCE)

"""The dashboard over HTTP and in a real browser, on a desk and on a phone."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from html import unescape
from pathlib import Path
from statistics import NormalDist
from typing import Any

import httpx
import numpy as np
import pandas as pd
import pytest

from quietmax.accounting import epsilon_of
from quietmax.accounting.guarantee import Guarantee
from quietmax.cli.serve import _served_line
from quietmax.errors import counted
from quietmax.estimators import decide_folder
from quietmax.ledger import Terms
from quietmax.server import Client, Settings
from tests.server.running_service import (
    Running,
    Start,
    some_loans,
)

QUERIES = 3
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
ZOOMED = {"width": 640, "height": 450}  # A desk at 200%
TIMEOUT = 60_000
BAR_SHOWS = """share => {
    const bar = document.querySelector(".bar"), width = each => each.getBoundingClientRect().width;
    return Math.abs(width(bar.firstElementChild) / width(bar) - share) < 0.01;
}"""


def test_the_page_has_no_external_resource_and_allows_only_its_own_script(plain: Running) -> None:
    admin = {"authorization": f"Bearer {plain.admin}"}
    for path in ("/", "/contents"):
        response = plain.http.get(path, headers=admin)
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        for word in ("http://", "https://", "//cdn", "src="):
            assert word not in response.text
        assert response.headers["cache-control"] == "no-store"
    assert "as owner (administrator)" in response.text


def test_names_on_the_page_are_escaped(start: Start, models: Path, tmp_path: Path) -> None:
    description = shutil.copytree(models / "plain", tmp_path / "plain") / "model.json"
    named = {**json.loads(description.read_text()), "dataset": "<script>alert(1)</script>"}
    description.write_text(json.dumps(named))
    with start("plain", settings=Settings(anonymous=True)) as service:
        page = httpx.get(f"{service.url}/contents").text
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


@contextmanager
def _opened(browser: Any, service: Running, viewport: dict[str, int], scheme: str = "light") -> Iterator[Any]:
    context = browser.new_context(viewport=viewport, base_url=service.url, color_scheme=scheme)
    opened = context.new_page()
    opened.set_default_timeout(TIMEOUT)
    opened.wrong = []
    opened.on("pageerror", lambda error: opened.wrong.append(str(error)))
    opened.on("console", lambda message: message.type == "error" and opened.wrong.append(message.text))
    opened.requested = []
    opened.on("request", lambda request: opened.requested.append(request.url))
    yield opened
    context.close()


@pytest.fixture(params=[DESK, PHONE], ids=["desk", "phone"])
def viewport(request: pytest.FixtureRequest) -> dict[str, int]:
    size: dict[str, int] = request.param
    return size


@pytest.fixture
def plain_page(browser: Any, start: Start, viewport: dict[str, int]) -> Iterator[tuple[Any, Running]]:
    with start("plain", queries=QUERIES) as service, _opened(browser, service, viewport) as page:
        yield page, service


@pytest.fixture
def loans_page(browser: Any, start: Start, viewport: dict[str, int]) -> Iterator[tuple[Any, Running]]:
    with start("loans") as service, _opened(browser, service, viewport) as page:
        _log_in(page, service.key, "loans.csv")
        yield page, service


def _log_in(page: Any, key: str, account: str = "people") -> None:
    page.goto("/")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Log in").click()
    page.locator("h2", has_text=f"Budget of {account}").wait_for(state="attached")


def _show(page: Any, name: str) -> None:
    page.get_by_role("link", name=name).click()
    page.locator("nav [aria-current]", has_text=name).wait_for()


def _send_query(page: Any, number: int) -> str:
    page.locator("output").evaluate("output => output.textContent = ''")
    page.get_by_label("Try it").fill(", ".join(str(number + index / 10) for index in range(6)))
    page.get_by_role("button", name="Send query").click()
    page.locator("output", has_text=re.compile(r"\.")).wait_for()
    return str(page.locator("output").inner_text())


def _check_accessible(page: Any, axe: str) -> None:
    page.evaluate(axe)
    found = page.evaluate("axe.run()")
    assert len(found["passes"]) > 15, "axe has looked at the page"
    assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found["violations"]] == []


@pytest.mark.parametrize(
    ("viewport", "scheme"),
    [
        (DESK, "light"),
        (DESK, "dark"),
        (PHONE, "dark"),
        (ZOOMED, "light"),
        ({"width": 320, "height": 640}, "light"),
    ],
    ids=["desk", "dark desk", "dark phone", "zoomed desk", "narrow"],
)
def test_every_view_is_accessible_and_fits(
    browser: Any, start: Start, axe: str, screenshot: Any, viewport: dict[str, int], scheme: str
) -> None:
    with start("survey", "loans") as service, _opened(browser, service, viewport, scheme) as page:
        page.goto("/")
        _check_accessible(page, axe)
        _log_in(page, service.key, "loans.csv")
        _check_accessible(page, axe)
        page.get_by_label("Model").select_option("loans/1")
        form = page.locator("section:visible form.try")
        form.get_by_role("button").click()
        form.locator("[aria-invalid]").first.wait_for()
        _check_accessible(page, axe)
        form.get_by_label("age").fill("300")
        form.get_by_label("région").select_option("north")
        form.get_by_role("button").click()
        form.locator("output table").wait_for()
        lines = page.locator("section:visible").get_by_label("or paste the lines")
        lines.fill(_csv_file(some_loans(300)))
        page.get_by_role("button", name="Get answers").click()
        page.locator("section:visible .answers").wait_for()
        _check_accessible(page, axe)
        screenshot(page, "ask")
        assert page.locator("section:visible").bounding_box()["height"] < 4 * 900, (
            "the table scrolls in its box"
        )
        _check_page(page, service)
        _show(page, "Budget and models")
        page.get_by_text("version 1").nth(-1).click()
        _check_accessible(page, axe)
        screenshot(page, "owner")
        _check_page(page, service)


def test_an_administrator_sees_the_budget_first_and_the_address_names_the_view(
    browser: Any, start: Start
) -> None:
    with start("survey") as service, _opened(browser, service, DESK) as page:
        _log_in(page, service.admin, "survey.csv")
        assert page.get_by_role("heading", name="Budget of survey.csv").is_visible()
        assert page.get_by_role("button", name="Send query").is_hidden()
        _show(page, "Ask")
        assert page.url.endswith("/#ask")
        assert page.get_by_role("button", name="Send query").is_visible()
        assert page.get_by_role("heading", name="Budget of survey.csv").is_hidden()
        page.get_by_role("button", name="Log out").click()
        _log_in(page, service.key, "survey.csv")
        assert page.get_by_role("button", name="Send query").is_visible()


def test_who_asks_chooses_one_of_several_models(browser: Any, start: Start) -> None:
    from playwright.sync_api import expect

    settings = Settings(anonymous=True)
    with start("survey", "loans", settings=settings) as service, _opened(browser, service, DESK) as page:
        page.goto("/")
        shown = page.locator("section[data-model]:visible h2")
        options = page.get_by_label("Model").locator("option")
        expect(options).to_have_count(2)
        names = [option.split("/")[0] for option in options.all_inner_texts()]
        assert sorted(names) == ["loans", "survey"]
        for name in reversed(names):
            page.get_by_label("Model").select_option(f"{name}/1")
            assert shown.all_inner_texts() == [f"{name} version 1"]
        assert page.wrong == []


def test_the_highest_version_is_offered_first(browser: Any, start: Start) -> None:
    from playwright.sync_api import expect

    with start("survey", settings=Settings(anonymous=True)) as service:
        service.service.deployments[:] = [
            replace(service.service.deployments[0], version=each) for each in ("2", "10", "9")
        ]
        with _opened(browser, service, DESK) as page:
            page.goto("/")
            expect(page.get_by_label("Model").locator("option")).to_have_text(
                ["survey/10", "survey/9", "survey/2"]
            )


PARTS = ("(constant)", "age", "income", "région", "smoker", "joined", "seen", "zip")
IMPORTANCES = (("income", 1.5, 0.01), ("age", 0.02, 0.05))
CURVES = {"income": {"0 to 50000": -1.25, "50000 to 100000": 1.75}, "age": {"18 to 100": 0.0}}
EFFECTS = {
    "classes": ["no", "yes"],
    "importance": [
        {"column": column, "importance": size, "noise": noise} for column, size, noise in IMPORTANCES
    ],
    "curves": {
        column: [
            {"value": value, "noise": 0.1, "effect on no": -effect, "effect on yes": effect}
            for value, effect in curve.items()
        ]
        for column, curve in CURVES.items()
    },
}


def _with_effects_and_reasons(page: Any) -> list[Any]:
    """Let the metadata offer effects and reasons, and answers carry reasons; return the outputs that were asked for."""
    wanted: list[Any] = []

    def describe(route: Any) -> None:
        body = route.fetch().json()
        body["parameters"].update(effects=EFFECTS, reasons=list(PARTS))
        if all(output["name"] != "reasons" for output in body["outputs"]):
            body["outputs"].append({"name": "reasons", "datatype": "FP64", "shape": [-1, len(PARTS), 2]})
        route.fulfill(json=body)

    def answer(route: Any) -> None:
        asked = route.request.post_data_json
        wanted.append([output["name"] for output in asked.pop("outputs")])
        body = route.fetch(post_data=json.dumps(asked)).json()
        yes = [0.1, -0.5, 2.5, *[0.0] * 5]
        data = [share for each in yes for share in (-each, each)]
        body["outputs"].append({"name": "reasons", "datatype": "FP64", "shape": [1, 8, 2], "data": data})
        body["outputs"][0]["data"] = ["yes"]
        route.fulfill(json=body)

    page.route("**/v2/models/loans/versions/1", describe)
    page.route("**/v2/models/loans/versions/1/infer", answer)
    return wanted


def test_effects_and_reasons_are_drawn_where_the_metadata_offer_them(
    browser: Any, start: Start, axe: str, viewport: dict[str, int], screenshot: Any
) -> None:
    with start("loans") as service, _opened(browser, service, viewport) as page:
        wanted = _with_effects_and_reasons(page)
        _log_in(page, service.key, "loans.csv")
        page.get_by_role("heading", name="Which columns matter").wait_for()
        text = "rows => rows.map(row => row.textContent)"
        effects = page.locator(".effects")
        shown = effects.locator("> table tr").evaluate_all(text)
        assert shown == ["income1.500", "age0.020 (noise)"]
        page.get_by_text("The effect of each value").click()
        curve = page.get_by_role("region", name="The effect of each value").locator("tr")
        assert curve.evaluate_all(text) == ["0 to 50000−1.250 ± 0.100", "50000 to 100000+1.750 ± 0.100"]
        band = curve.last.locator("i").evaluate("each => [each.style.left, each.style.width]")
        ends = 50 * (1 + 1.55 / 1.95), 20 / 1.95  # two standard deviations, of a track from -1.95 to 1.95
        assert [float(each.rstrip("%")) for each in band] == pytest.approx([*ends], abs=0.01)
        page.get_by_label("Column").select_option("age")
        assert curve.evaluate_all(text) == ["18 to 100+0.000 ± 0.100"]
        page.get_by_label("age", exact=False).first.fill("40")
        page.get_by_label("région").select_option("north")
        page.get_by_role("button", name="Send query").click()
        reasons = page.locator("output table", has_text="What spoke for (+) and against (−) yes").locator(
            "tr"
        )
        reasons.first.wait_for()
        lines = reasons.evaluate_all(text)
        assert lines[:3] == ["income+2.500", "age−0.500", "(constant)+0.100"]
        assert len(lines) == len(PARTS)
        widths = reasons.locator(".track span").evaluate_all(
            "bars => bars.map(bar => [bar.style.left, bar.style.width, bar.className])"
        )
        assert widths[:2] == [["50%", "50%", ""], ["40%", "10%", "against"]]
        assert wanted == [["label", "probabilities", "reasons"]]
        _check_accessible(page, axe)
        screenshot(page, "reasons")
        _check_page(page, service)


def test_the_effects_and_reasons_of_a_head_on_a_table_are_those_of_its_metadata_and_answers(
    browser: Any, start: Start, screenshot: Any
) -> None:
    with start("summed") as service, _opened(browser, service, DESK) as page:
        told = service.http.get("/v2/models/summed").json()["parameters"]
        effects = service.service.deployment("summed").additive.effects()
        assert told["effects"] == effects.to_json()
        assert told["effects"]["importance"][0]["column"] == "income", "it decides whether a loan is repaid"
        _log_in(page, service.key, "loans.csv")
        page.locator(".effects tr").first.wait_for()
        assert page.locator(".effects > table th").all_inner_texts() == list(effects.importance.column)[:10]
        page.get_by_label("age").first.fill("40")
        page.get_by_label("income").first.fill("90000")
        page.get_by_label("région").select_option("north")
        page.get_by_role("button", name="Send query").click()
        reasons = page.locator("output table", has_text="What spoke for (+) and against (−) yes").locator(
            "tr"
        )
        reasons.first.wait_for()
        screenshot(page, "summed")
        assert reasons.count() == min(len(told["reasons"]), 10)
        assert reasons.first.locator("th").inner_text() == "income"
        assert page.wrong == []


def _check_page(page: Any, service: Running) -> None:
    """The page fits the screen, fetches nothing from elsewhere and has no error."""
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert all(url.startswith(service.url) for url in page.requested)
    assert [text for text in page.wrong if "403" not in text] == []


def test_a_client_logs_in_sends_queries_and_is_refused_when_the_budget_is_exhausted(
    plain_page: tuple[Any, Running], screenshot: Any
) -> None:
    from playwright.sync_api import expect

    page, service = plain_page
    percent = page.locator('[data-field="percent"]')
    page.goto("/")
    screenshot(page, "login")
    _log_in(page, service.key)
    expect(percent).to_have_text("0.0%", timeout=TIMEOUT)
    screenshot(page, "fresh")
    _show(page, "Budget and models")
    screenshot(page, "owner-fresh")
    _show(page, "Ask")
    small = page.evaluate(
        "[...document.querySelectorAll('button, textarea, input')]"
        ".filter(each => each.getBoundingClientRect().height < 32).length"
    )
    assert small == 0, "everything to be pressed is large enough for a finger"
    for asked in range(1, QUERIES + 1):
        said = _send_query(page, asked)
        assert said.startswith("Class ")
        assert f"; {counted(QUERIES - asked, 'answer')} left." in said
        expect(percent).to_have_text(f"{100 * asked / QUERIES:.1f}%", timeout=TIMEOUT)
        _show(page, "Budget and models")
        page.wait_for_function(BAR_SHOWS, arg=asked / QUERIES)
        _show(page, "Ask")
    screenshot(page, "spent")
    said = _send_query(page, 9)
    assert said == "Privacy budget exhausted: 1 answer requested, 0 left. Nothing was charged."
    assert page.locator("output.error").count() == 1
    expect(page.locator('[data-field="refused"]')).to_have_text("1", timeout=TIMEOUT)
    screenshot(page, "refused")
    _show(page, "Budget and models")
    screenshot(page, "owner-refused")
    _show(page, "Ask")
    said = _send_query(page, 1)
    assert "answered before" in said, "a cached answer is free even when the budget is exhausted"
    account = service.ledger.account("people")
    assert account.remaining_units < account.limit_units // QUERIES
    _check_page(page, service)


def test_a_wrong_key_is_refused_and_a_logged_out_browser_sees_nothing(
    plain_page: tuple[Any, Running],
) -> None:
    page, service = plain_page
    page.goto("/")
    page.get_by_label("API key").fill("qm_0123456789abcdef_" + "x" * 43)
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("alert").wait_for()
    _log_in(page, service.key)
    page.get_by_role("button", name="Log out").click()
    page.get_by_label("API key").wait_for()
    assert page.evaluate("fetch('/state').then(response => response.status)") == 401


def test_spending_by_others_appears_without_reloading(plain_page: tuple[Any, Running]) -> None:
    from playwright.sync_api import expect

    page, service = plain_page
    _log_in(page, service.admin)
    service.infer(np.ones((1, 6)))
    expect(page.locator('[data-field="clients"] tr', has_text="ann")).to_be_visible(timeout=TIMEOUT)
    expect(page.locator('[data-field="percent"]')).to_have_text(f"{100 / QUERIES:.1f}%", timeout=TIMEOUT)
    _check_page(page, service)


FORM = {"age": "40", "income": "75000.5", "joined": "2015-06-30", "zip": "8001", "seen": "2024-03-01T08:30"}


def _csv_file(frame: pd.DataFrame) -> str:
    """A file as a spreadsheet may write it: BOM, semicolons, quotes, blanks in the header, decimal commas."""
    written = frame.assign(
        income=frame.income.map("{:.2f} €".format).str.replace(".", ","),
        joined=frame.joined.dt.strftime("%d.%m.%Y"),
        customer='Müller; "' + frame.customer + '"',
    ).rename(columns={"age": " age "})
    return "\ufeff" + written.to_csv(sep=";", index=False, lineterminator="\r\n")


def _drop(page: Any, content: str) -> None:
    transfer = page.evaluate_handle(
        """content => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([content], "people.csv", {type: "text/csv"}));
            return transfer;
        }""",
        content,
    )
    page.dispatch_event(".drop", "drop", {"dataTransfer": transfer})


def test_the_form_of_a_table_is_filled_in_with_the_keyboard_and_answered_with_a_class_name(
    loans_page: tuple[Any, Running], screenshot: Any
) -> None:
    page, service = loans_page
    output = page.locator("form.try output")
    page.get_by_label("age").focus()
    page.keyboard.type(FORM["age"])
    page.keyboard.press("Tab")
    page.keyboard.type(FORM["income"])
    page.keyboard.press("Tab")
    page.keyboard.type("so")
    page.keyboard.press("Tab")
    page.keyboard.type("y")
    for name in ("joined", "seen", "zip"):
        page.get_by_label(name).fill(FORM[name])
    page.get_by_label("zip").press("Enter")
    output.locator("table").wait_for()
    screenshot(page, "form")
    typed: Any = {**FORM, "age": 40, "income": 75_000.5, "région": "south", "smoker": True}
    typed.update(joined=pd.Timestamp(typed["joined"]), seen=pd.Timestamp(typed["seen"]))
    with Client(service.url, service.key) as client:
        expected = client.infer("loans", pd.DataFrame([typed]))
    assert expected.probabilities is not None
    answer = f"Class {expected.labels[0]} with probability {expected.probabilities.max():.3f}."
    assert output.inner_text().startswith(f"{answer} Free: paid at training.")
    no, yes = (f"{share:.3f}" for share in expected.probabilities[0])
    assert output.locator("tr").evaluate_all("rows => rows.map(row => row.textContent)") == [
        f"no{no}",
        f"yes{yes}",
    ]
    _check_page(page, service)


def test_the_form_requires_what_may_not_be_missing_and_says_so_next_to_the_field(
    loans_page: tuple[Any, Running], screenshot: Any
) -> None:
    from playwright.sync_api import expect

    page, service = loans_page
    send, output = page.get_by_role("button", name="Send query"), page.locator("form.try output")
    age, region = page.get_by_label("age"), page.get_by_label("région")
    send.click()
    expect(output).to_have_text("Nothing was sent: 2 fields to correct.")
    expect(age).to_have_accessible_description("18 to 100 age needs a number.")
    expect(region).to_have_accessible_description("région needs a value.")
    assert page.evaluate("document.activeElement.labels[0].textContent") == "age"
    screenshot(page, "wrong")
    age.fill("250")
    send.click()
    expect(output).to_have_text("Nothing was sent: 1 field to correct.")
    assert (age.get_attribute("aria-invalid"), region.get_attribute("aria-invalid")) == (None, "true")
    assert not [url for url in page.requested if "/infer" in url], "nothing was sent so far"
    region.select_option("north")
    send.click()
    output.locator("table").wait_for()
    expect(age).to_have_accessible_description("18 to 100 age counts as 100.")
    assert page.locator("label.must").all_inner_texts() == ["age", "région"]
    assert page.get_by_text("Fields with * are required.").is_visible()
    assert page.get_by_label("age").get_attribute("max") == "100"
    assert page.get_by_text("0 to 100,000 €").is_visible()
    assert page.get_by_label("région").locator("option").all_inner_texts() == ["choose", "north", "south"]
    assert page.get_by_label("smoker").locator("option").all_inner_texts() == ["unknown", "yes", "no"]
    assert page.get_by_label("joined").get_attribute("min") == "2010-01-01"
    assert page.get_by_label("seen").get_attribute("max") == "2024-12-31T00:00:00"
    assert service.ledger.account("loans.csv").spent_units == service.ledger.account("loans.csv").limit_units
    assert page.wrong == []


def test_what_the_service_refuses_because_of_one_value_is_said_next_to_its_field(
    loans_page: tuple[Any, Running], axe: str, screenshot: Any
) -> None:
    from playwright.sync_api import expect

    page, _ = loans_page
    send, output = page.get_by_role("button", name="Send query"), page.locator("form.try output")
    joined = page.get_by_label("joined")
    page.get_by_label("age").fill("40")
    page.get_by_label("région").select_option("north")
    joined.fill("20155-06-30")  # a year that the browser takes, and the service does not
    send.click()
    expect(output).to_have_text("Nothing was answered: 1 field to correct.")
    said = "There is no date in the column 'joined', which is declared as dates such as 2024-01-31."
    expect(joined).to_have_accessible_description(f"2010-01-01 to 2025-12-31 {said}")
    assert joined.get_attribute("aria-invalid") == "true"
    assert page.evaluate("document.activeElement.labels[0].textContent") == "joined"
    _check_accessible(page, axe)
    screenshot(page, "refused")
    joined.fill("2015-06-30")
    send.click()
    output.locator("table").wait_for()
    assert joined.get_attribute("aria-invalid") is None
    assert [text for text in page.wrong if "422" not in text] == []


def test_the_form_is_filled_with_the_defaults_of_the_schema_and_states_the_decision(
    browser: Any, start: Start, models: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(models / "loans", tmp_path / "loans")
    description = json.loads((folder / "model.json").read_text())
    values = {
        "age": "40",
        "région": "south",
        "smoker": "no",
        "joined": "2015-06-30",
        "seen": "2024-03-01 08:30:00",
    }
    description["encoding"]["defaults"] = list(values.items())
    (folder / "model.json").write_text(json.dumps(description))
    decide_folder(folder, threshold={"yes": 0.3})
    with (
        start("loans", settings=Settings(anonymous=True)) as service,
        _opened(browser, service, DESK) as page,
    ):
        page.goto("/")
        form = page.locator("form.try")
        form.wait_for()
        filled = {name: page.get_by_label(name).input_value() for name in (*values, "income", "zip")}
        assert filled == {**values, "seen": "2024-03-01T08:30", "income": "", "zip": ""}
        assert form.get_by_text("Some fields are filled in as a start: change what differs.").is_visible()
        assert form.get_by_text("“yes”: yes if its probability is above 0.3, otherwise no.").is_visible()
        form.get_by_role("button", name="Send query").click()
        form.locator("output table").wait_for()
        assert page.wrong == []


def test_a_model_that_was_paid_at_training_shows_no_bar_and_says_what_its_guarantee_means(
    loans_page: tuple[Any, Running],
) -> None:
    page, service = loans_page
    guarantee = service.service.deployment("loans").guarantee
    sentences = guarantee.in_words("the weights and all answers of this model")
    assert len(sentences) >= 2
    for sentence in sentences:
        assert page.locator(".plain", has_text=sentence).is_visible()
    assert page.get_by_text("Other models or figures of the same people add to this.").is_visible()
    _show(page, "Budget and models")
    assert page.get_by_text("Paid at training: any number of answers.").is_visible()
    assert page.locator(".bar").count() == 0
    assert "%" not in page.locator("[data-account]").inner_text()
    assert page.get_by_text("one person: all rows with the same value in column 'customer'").is_visible()
    assert page.get_by_text(
        "All rows of one person, and nobody else's, have the same value in column 'customer'.", exact=True
    ).is_visible()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("head",), None),
        (("head", "again"), "everything that all models of this account release, and their evaluations"),
        (("head", "loans"), "Some of these models protect records and others people"),
        (("plain", "other"), "The claimed limits do not hold"),
    ],
    ids=lambda value: " and ".join(value) if isinstance(value, tuple) else "",
)
def test_an_account_with_several_models_says_what_all_of_them_mean_together(
    names: tuple[str, ...], words: str | None, start: Start, models: Path, tmp_path: Path
) -> None:
    shutil.copytree(models / "head", tmp_path / "again")
    shutil.copytree(models / "plain", tmp_path / "other")
    settings = Settings(anonymous=True)
    with start(*names, budget=Terms(20.0, 1e-5), queries=5, account="all", settings=settings) as service:
        text = unescape(httpx.get(f"{service.url}/contents").text)
        limit = service.ledger.account("all").limit
    assert ("What all models of this account mean together" in text) == (words is not None)
    assert words is None or words in text
    if names == ("head", "again"):
        total = Guarantee.of(limit, status="proven", because="Their sum.").max_accuracy()
        assert total > 0.9
        assert f"is right at most {math.ceil(1000 * total) / 10:g}% of the time" in text


def test_a_dropped_csv_file_is_answered_as_a_table_and_as_a_file(
    loans_page: tuple[Any, Running], screenshot: Any
) -> None:
    from playwright.sync_api import expect

    page, service = loans_page
    frame = some_loans(1203)
    get = page.get_by_role("button", name="Get answers")
    assert get.is_disabled()
    _drop(page, _csv_file(frame))
    expect(page.locator(".status")).to_have_text("1203 rows. Not sent: customer, repaid.")
    get.click()
    expect(page.locator(".status")).to_have_text("1203 rows answered.")
    screenshot(page, "answers")
    assert page.locator(".answers tbody tr").count() == 101
    with page.expect_download() as download:
        page.get_by_text("Save all answers").click()
    saved = pd.read_csv(download.value.path(), encoding="utf-8-sig")
    with Client(service.url, service.key) as client:
        parts = [client.infer("loans", frame[start : start + 500]) for start in range(0, 1203, 500)]
    labels = np.concatenate([part.labels for part in parts])
    probabilities = np.concatenate([part.probabilities for part in parts])
    assert saved.prediction.tolist() == labels.tolist()
    np.testing.assert_allclose(saved[["probability of no", "probability of yes"]], probabilities, atol=1e-6)
    assert saved.repaid.tolist() == frame.repaid.tolist()
    assert saved.customer[0] == 'Müller; "C0"'
    first = page.locator(".answers tbody tr").first.locator("td").all_inner_texts()
    assert first[:3] == ["1", labels[0], f"{probabilities[0].max():.3f}"]
    assert sum("/infer" in url for url in page.requested) == 3, "in batches of 500"
    _check_page(page, service)


def test_a_file_is_chosen_or_pasted_too_and_a_wrong_one_is_not_sent(loans_page: tuple[Any, Running]) -> None:
    from playwright.sync_api import expect

    page, _ = loans_page
    status, get = page.locator(".status"), page.get_by_role("button", name="Get answers")
    lines = _csv_file(some_loans(3))
    page.locator("[type=file]").set_input_files(
        {"name": "p.csv", "mimeType": "text/csv", "buffer": lines.encode()}
    )
    expect(status).to_have_text("3 rows. Not sent: customer, repaid.")
    paste = page.get_by_label("or paste the lines")
    for text, told in (
        (lines.replace("income", "salary"), "The file has no column income."),
        (lines.replace("customer", "zip"), "The file has several columns named zip."),
        (lines.splitlines()[0], "The file has no rows below its header."),
        (lines + "x;y\n", "Row 4 has 2 cells; the header has 9."),
        (lines + '"x', "A quoted cell does not end."),
        ("", "The file has no column age, income, région, smoker, joined, seen, zip."),
    ):
        paste.fill(text)
        expect(status).to_have_text(told)
        assert get.is_disabled()
    assert not [url for url in page.requested if "/infer" in url]
    paste.fill(lines.replace("north", "east").replace("south", "east"))
    get.click()
    expect(status).to_have_text("3 rows answered. 3 values are not among the declared categories (région).")
    paste.fill(lines.replace("True", "perhaps").replace("False", "perhaps"))
    get.click()
    expect(status).to_contain_text(
        "Row 1 (and 2 more) has neither yes nor no in the boolean column 'smoker'."
    )


def test_a_file_with_more_rows_than_the_budget_pays_for_is_answered_as_far_as_it_goes(
    browser: Any, start: Start
) -> None:
    from playwright.sync_api import expect

    lines = "age,income,région\n" + "".join(f"{age},5,north\n" for age in range(70))
    with start("survey", settings=Settings(max_rows=30)) as service, _opened(browser, service, DESK) as page:
        _log_in(page, service.key, "survey.csv")
        page.get_by_label("or paste the lines").fill(lines)
        page.get_by_role("button", name="Get answers").click()
        expect(page.locator(".status")).to_have_text(
            "Privacy budget exhausted: 30 answers requested, 10 left. Nothing was charged. "
            "Answered so far: 30 rows."
        )
        assert page.locator(".answers tbody tr").count() == 30
        assert service.http.get("/v2/models/survey/budget").json()["remaining_answers"] == 10
        expect(page.locator('[data-field="percent"]')).to_have_text("75.0%", timeout=TIMEOUT)
        assert [text for text in page.wrong if "403" not in text] == []


def test_the_page_shows_nothing_that_was_inferred_from_the_records(start: Start) -> None:
    pages = []
    for name in ("inferred", "table"):
        with start(name, settings=Settings(anonymous=True)) as service:
            pages.append(httpx.get(f"{service.url}/contents").text)
    for secret in ("south", "100000"):
        assert secret not in pages[0]
        assert secret in pages[1], "what was declared is shown"
    assert re.search('name="column-2"[^>]* type="text"', pages[0])


@pytest.mark.parametrize(
    ("accuracy", "strength", "words"),
    [(0.749, "moderate", "moderate protection [##-]"), (0.751, "weak", "weak protection [#--]")],
)
def test_page_metadata_and_start_say_how_strong_a_proven_guarantee_is(
    accuracy: float, strength: str, words: str, start: Start
) -> None:
    mu = 2 * NormalDist().inv_cdf(accuracy) - 1e-6
    budget = Terms(epsilon_of(mu, 1e-5), 1e-5)
    with start("teachers", budget=budget, settings=Settings(anonymous=True)) as service:
        deployment = service.service.deployment("teachers")
        text = unescape(httpx.get(f"{service.url}/contents").text)
        told = httpx.get(f"{service.url}/v2/models/teachers").json()["parameters"]
    assert '<span class="badge proven">✓ proven</span>' in text
    sign = words.partition("[")[2].rstrip("]").replace("#", "●").replace("-", "○")
    protection = f'{words.partition(" [")[0]} <span aria-hidden="true">{sign}</span>'
    assert text.count(f'<span class="badge {strength}">{protection}</span>') == 2, (
        "for who asks and for the owner"
    )
    assert (told["guarantee_status"], told["guarantee_strength"]) == ("proven", strength)
    assert _served_line(deployment).startswith(f"teachers/1 (proven, {words}: a guess whether one record")


def test_the_badge_follows_a_grant_without_reloading(browser: Any, start: Start) -> None:
    from playwright.sync_api import expect

    with (
        start("teachers", settings=Settings(anonymous=True)) as service,
        _opened(browser, service, DESK) as page,
    ):
        page.goto("/")
        badge = page.locator("#ask .badge").nth(1)
        expect(badge).to_have_text("moderate protection ●●○")
        green = badge.evaluate("each => getComputedStyle(each).backgroundColor")
        service.ledger.grant("patients", Terms(60.0, 1e-5), "The board has allowed it.")
        expect(badge).to_have_text("no protection ○○○", timeout=TIMEOUT)
        assert badge.evaluate("each => getComputedStyle(each).backgroundColor") != green
        assert page.wrong == []

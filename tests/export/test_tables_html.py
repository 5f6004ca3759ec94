"""The calculator gives the answers of the model folder in a real browser, without a network."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import quietmax as qm
from quietmax.data.schema import Schema
from quietmax.errors import InvalidInput
from quietmax.estimators.serialization import open_private, save_private
from quietmax.export.tables import export_html
from tests.export.people import SCHEMA

PHONE, DESK = {"width": 360, "height": 700}, {"width": 1280, "height": 900}


@contextmanager
def opened(browser: Any, file: Path, **options: Any) -> Iterator[Any]:
    """Open a calculator; whatever the browser complains about, and any request, is an error."""
    page = browser.new_page(**options)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: problems.append(request.url))
    page.goto(file.as_uri())
    assert problems == [file.as_uri()]
    yield page
    assert problems == [file.as_uri()]
    page.close()


@pytest.fixture(scope="module")
def file(table_head: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("html") / "calculator.html"
    export_html(table_head, place)
    return place


def rows_of_the_form(count: int) -> pd.DataFrame:
    """Draw rows as the form has them: numbers as written, ISO dates, choices, and "" for what is not known."""
    generator = np.random.default_rng(4)
    days = pd.date_range("1995-01-01", "2035-01-01").strftime("%Y-%m-%d").to_numpy(object)
    numbers = [
        repr(each) for each in (-999.0, 0.0, -0.0, 20.0, 39.999, 40.0, 60.0, 100.0, 1e300, -1e300, 1e-9)
    ]
    columns: dict[str, Any] = {
        name: np.where(
            generator.random(count) < 0.7,
            np.array([repr(each) for each in generator.uniform(-20, 120, count).tolist()], object),
            generator.choice(np.array(numbers, object), count),
        )
        for name in SCHEMA.bounds
    }
    columns |= {
        name: generator.choice([*each, "unlisted"], count) for name, each in SCHEMA.categories.items()
    }
    columns |= {name: generator.choice(["yes", "no"], count) for name in SCHEMA.booleans}
    columns |= {name: generator.choice(days, count) for name in SCHEMA.dates}
    rows = pd.DataFrame(columns).astype(object)
    return rows.mask(generator.random(rows.shape) < 0.1, "")


def in_page(page: Any, rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Return what the page's own function answers."""
    found = page.evaluate(
        "rows => JSON.stringify(JSON.parse(rows).map((row) => answer(row)))", rows.to_json(orient="records")
    )
    return list(json.loads(found))


def test_ten_thousand_rows_get_the_class_the_probabilities_and_the_reasons_of_the_folder(
    browser: Any, file: Path, table_head: Path
) -> None:
    given, model = rows_of_the_form(10_000), open_private(table_head)
    with opened(browser, file) as page:
        found = in_page(page, given)
    left = pd.to_datetime(given["left"]).dt.strftime("%d.%m.%Y").fillna("")
    records = model.encode(given.assign(left=left))
    expected = model.predict_proba(records)
    shares, labels = ([each[name] for each in found] for name in ("probabilities", "label"))
    assert np.abs(np.array(shares) - expected).max() <= 1e-9
    assert (np.array(labels) == np.array(model.classes)[model.predict(records)]).all()
    assert len(set(labels)) > 1
    contributions = np.array([each["contributions"] for each in found])
    assert np.array_equal(contributions, model.additive().contributions(records))


@pytest.mark.parametrize("classes", [2, 3])
def test_the_answer_follows_the_costs_of_errors(browser: Any, tmp_path: Path, classes: int) -> None:
    rng, names = np.random.default_rng(0), ("low", "middle", "</script><b>high")[:classes]
    rows = pd.DataFrame({"<b>a": rng.random(600)})
    number = rows["<b>a"] * classes + 0.5 * rng.standard_normal(600)
    rows["y"] = np.array(names)[number.clip(0, classes - 0.5).astype(int)]
    schema = Schema(label="y", classes=names, bounds={"<b>a": (0, 1)})
    head = qm.PrivateHead(epsilon=5.0, schema=schema, declared_size=600).fit(rows)
    plain = head.predict(rows)
    head.decide(cost={("middle", "low"): 20, ("low", "middle"): 0.5})
    folder = save_private(head, tmp_path / "model", dataset="</script><script>alert(1)</script>")
    export_html(folder, tmp_path / "a.html")
    with opened(browser, tmp_path / "a.html") as page:
        found = in_page(page, rows[["<b>a"]].map(repr))
        assert page.locator("b").count() == 0
    assert [each["label"] for each in found] == head.predict(rows).tolist() != plain.tolist()
    assert (
        np.abs(np.array([each["probabilities"] for each in found]) - head.predict_proba(rows)).max() <= 1e-9
    )


def test_the_policy_allows_the_script_and_the_style_by_their_hash_and_nothing_else(
    browser: Any, file: Path
) -> None:
    text = file.read_text("utf-8")
    policy = re.findall('<meta http-equiv="Content-Security-Policy" content="(.*?)">', text)[0]
    allowed = dict(each.split(" ", 1) for each in policy.split("; "))
    hashes = {}
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = hashlib.sha256(content.encode()).digest()
        hashes[f"{tag}-src"] = f"'sha256-{base64.b64encode(digest).decode()}'"
    nothing = dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")
    assert allowed == {**nothing, **hashes}
    page = browser.new_page()
    blocked: list[str] = []
    page.on("console", lambda message: blocked.append(message.text))
    page.goto(file.as_uri())
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))"
    )
    assert (
        page.evaluate("fetch('http://127.0.0.1:9').then(() => 'answered', () => window.ran ?? 'refused')")
        == "refused"
    )
    for what in ("inline script", "http://127.0.0.1:9"):
        assert any(what in each and "Content Security Policy" in each for each in blocked)
    page.close()


def test_the_form_is_filled_in_and_computed_by_the_keyboard_alone(
    browser: Any, file: Path, screenshot: Callable[[Any, str], None]
) -> None:
    with opened(browser, file, viewport=PHONE, color_scheme="dark") as page:
        page.get_by_label("age").focus()
        page.keyboard.type("34")
        page.keyboard.press("Enter")  # two required fields are empty
        assert page.evaluate("document.activeElement.labels[0].textContent") == "hours"
        page.keyboard.type("77")
        page.keyboard.press("Tab")
        page.keyboard.type("another")
        page.get_by_label("code").focus()
        page.keyboard.type("0.5")
        page.get_by_label("joined").fill("2030-01-01")
        page.get_by_label("age").focus()
        page.keyboard.press("Enter")
        told = page.locator("output").inner_text()
        row = {
            "age": "34",
            "gain": "",
            "hours": "77",
            "city": "another",
            "code": "0.5",
            "region": "",
            "smoker": "",
        }
        expected = page.evaluate("row => answer(row)", {**row, "joined": "2030-01-01", "left": ""})
        assert told.startswith(expected["label"])
        assert "hours counts as 60." in told
        assert "joined counts as 2024-12-31." in told
        assert all(f"{100 * share:.1f}%" in told for share in expected["probabilities"])
        reasons = page.locator("output table").nth(1).locator("th").all_inner_texts()
        assert sorted(reasons) == sorted(page.evaluate("model.summands"))
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it fits a phone"
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
        screenshot(page, "calculator")
        page.get_by_role("button", name="Clear").press("Enter")
        assert page.locator("output").inner_text() == "Enter the values above."


def test_the_form_starts_with_the_defaults_of_the_schema(
    browser: Any, table_head: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(table_head, tmp_path / "model"))
    description = json.loads((folder / "model.json").read_text())
    values = {"age": "40", "city": "東京", "smoker": "no", "joined": "2015-06-30"}
    description["encoding"]["defaults"] = list(values.items())
    (folder / "model.json").write_text(json.dumps(description))
    export_html(folder, tmp_path / "a.html")
    with opened(browser, tmp_path / "a.html") as page:
        shown = {name: page.get_by_label(name, exact=True) for name in (*values, "gain", "region")}
        filled = {name: field.input_value() for name, field in shown.items()}
        assert filled == {**values, "gain": "", "region": ""}
        shown["age"].fill("3")
        page.get_by_role("button", name="Clear").click()
        assert shown["age"].input_value() == "40"


def test_values_that_are_none_of_the_form_are_errors_in_words(browser: Any, file: Path) -> None:
    row = dict.fromkeys(("age", "gain", "hours", "city", "code", "region", "smoker", "joined", "left"), "")
    wrong = {"age": "12x", "smoker": "maybe", "joined": "1.2.2003"}
    said = {
        "age": "age must be a number.",
        "smoker": "smoker must be one of no, yes.",
        "joined": "joined must be a date.",
    }
    with opened(browser, file) as page:
        for name, value in wrong.items():
            script = "row => { try { return answer(row) } catch (error) { return error.message } }"
            assert page.evaluate(script, {**row, name: value}) == said[name]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_obstacle(browser: Any, file: Path, scheme: str) -> None:
    if importlib.util.find_spec("axe_playwright_python") is None:
        pytest.skip("axe-core is missing; install it with: pip install axe-playwright-python")
    with opened(browser, file, viewport=DESK, color_scheme=scheme) as page:
        page.get_by_label("hours").fill("30")
        page.get_by_label("code").select_option("2")
        page.get_by_role("button", name="Compute").click()
        page.locator("output table").first.wait_for()
        page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
        found = page.evaluate("axe.run()")
        assert len(found["passes"]) > 15
        assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found["violations"]] == []


def test_the_guarantee_is_stated_in_words_with_its_strength(
    browser: Any, file: Path, table_head: Path
) -> None:
    guarantee = open_private(table_head).guarantee
    with opened(browser, file) as page:
        told = page.locator("main").inner_text()
        about = page.evaluate("model.about")
    assert guarantee.protection in guarantee.summary
    for line in (
        guarantee.summary,
        *guarantee.in_words("everything computed from this model"),
        *guarantee.assumptions,
    ):
        assert line in told
    assert about["guarantee"] == json.loads(json.dumps(guarantee.to_json()))


def test_a_hashed_column_is_refused_by_its_name(tmp_path: Path) -> None:
    rows = pd.DataFrame({"a": ["x", "z"] * 200, "y": ["no", "yes"] * 200})
    schema = Schema(label="y", classes=("no", "yes"), hashed={"a": 8})
    head = qm.PrivateHead(epsilon=8.0, schema=schema, declared_size=400).fit(rows)
    folder = save_private(head, tmp_path / "model", dataset="made up")
    with pytest.raises(InvalidInput, match=r"Column 'a' cannot be exported to HTML.*BLAKE2b"):
        export_html(folder, tmp_path / "a.html")
    assert not (tmp_path / "a.html").exists()

"""What the demo tells its reader to open (privacy card, report, page) looks right on a desk and on a phone.

QUIETMAX_SCREENSHOTS=FOLDER keeps the screenshots, to be looked at, and the picture of the README, `page.png`.
"""

from __future__ import annotations

import ast
import io
import os
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import matplotlib.image
import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from quietmax.cli.demo import QUESTIONS, _paper, _survey, _table
from quietmax.data import Schema, load
from quietmax.data.readers import fair_table
from quietmax.estimators import PrivateHead, save_private
from quietmax.ledger import Ledger
from quietmax.server import Service, Settings
from quietmax.server.deployment import deploy, load_models
from quietmax.server.run import run_in_thread
from tests.docs.code_blocks import blocks_of

ROOT = Path(__file__).parents[1]
README = blocks_of(ROOT / "README.md")
(README_SCHEMA,) = (block.text for block in README if block.saved_as == "survey.toml")
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
OVERFLOWING = """() => [...document.querySelectorAll("h1, h2, h3, p, th, td, li, label, button, input, summary")]
    .filter(each => each.getClientRects().length && !each.closest("[data-scrolls], .scroll, pre, details:not([open])"))
    .filter(each => each.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
    .map(each => each.outerHTML.slice(0, 80))"""
SMALL_TEXT = """() => [...document.querySelectorAll("p, th, td, li, label, button, summary")]
    .filter(each => each.getClientRects().length && each.textContent.trim())
    .filter(each => parseFloat(getComputedStyle(each).fontSize) < 11).length"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the demo writes, without the steps that write nothing."""
    folder = tmp_path_factory.mktemp("demo")
    _table(folder)
    _survey(folder)
    _paper(folder)
    return folder


@pytest.fixture(scope="module")
def address(demo: Path) -> Iterator[str]:
    """The service that the demo tells its reader to start."""
    with Ledger(demo / "demo.sqlite") as ledger:
        deployments = deploy(ledger, load_models([str(demo / "affair")]))
        with run_in_thread(Service(ledger, deployments, Settings(anonymous=True, request_log=False))) as url:
            yield url


@pytest.fixture(
    params=[(DESK, "light"), (PHONE, "light"), (DESK, "dark")], ids=["desk", "phone", "dark desk"]
)
def page(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    viewport, scheme = request.param
    context = browser.new_context(viewport=viewport, color_scheme=scheme)
    opened = context.new_page()
    opened.wrong, opened.requested = [], []
    opened.on("pageerror", lambda error: opened.wrong.append(str(error)))
    opened.on("console", lambda message: message.type == "error" and opened.wrong.append(message.text))
    opened.on("request", lambda asked: opened.requested.append(asked.url))
    yield opened
    context.close()


def assert_looks_right(page: Any) -> None:
    """Nothing is cut off or too small to read, nothing is fetched from elsewhere, and the page is not empty."""
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing to scroll sideways"
    assert page.evaluate(OVERFLOWING) == []
    assert page.evaluate(SMALL_TEXT) == 0
    own = page.url.split("/")[2]
    assert [url for url in page.requested if url.split("/")[2] != own] == []
    assert page.wrong == []
    # On a busy machine the first frame may not be painted yet.
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    pixels = matplotlib.image.imread(io.BytesIO(page.screenshot()))[..., :3]
    ink = (np.abs(pixels - pixels[0, 0]).max(axis=-1) > 0.2).mean()
    assert 0.01 < ink < 0.5, f"{ink:.1%} of the first screen is ink"


def test_the_privacy_card_looks_right(page: Any, demo: Path, screenshot: Callable[[Any, str], None]) -> None:
    page.goto((demo / "card.html").as_uri())
    screenshot(page, "card")
    assert page.get_by_text("proven", exact=True).is_visible()
    assert page.get_by_role("heading", name="What somebody can learn from it, at most").is_visible()
    assert_looks_right(page)


def test_the_report_looks_right(page: Any, demo: Path, screenshot: Callable[[Any, str], None]) -> None:
    page.goto((demo / "report.html").as_uri())
    page.locator("#panels svg").first.wait_for()
    screenshot(page, "report")
    plot = page.locator("#panels svg").first.bounding_box()
    assert plot["width"] >= 0.3 * page.viewport_size["width"]
    assert_looks_right(page)


def test_the_page_answers_and_looks_right(
    page: Any, address: str, screenshot: Callable[[Any, str], None]
) -> None:
    page.goto(address)
    page.get_by_role("button", name="Send query").wait_for()  # the page fetches what it shows
    screenshot(page, "page")
    assert_looks_right(page)
    ask(page, QUESTIONS[1])
    screenshot(page, "answer")
    assert_looks_right(page)
    page.get_by_role("link", name="Budget and models").click()
    page.get_by_role("heading", name="Models").wait_for()
    screenshot(page, "owner")
    assert_looks_right(page)


def ask(page: Any, row: dict[str, Any]) -> Any:
    """Fill the form of the page and send it; return the table of the answer."""
    for column, value in row.items():
        field = page.get_by_label(re.compile(rf"^{column}\b"))
        if field.evaluate("each => each.tagName") == "SELECT":
            field.select_option(str(value))
        else:
            field.fill(str(value))
    page.get_by_role("button", name="Send query").click()
    answer = page.locator("form.try output table").last
    answer.wait_for()
    assert page.locator("form.try output").inner_text().startswith("Class yes")
    return answer


@pytest.fixture(scope="module")
def readme_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The service of the README: its survey, its schema and its options."""
    folder = tmp_path_factory.mktemp("readme")
    fair_table().to_csv(folder / "survey.csv", index=False)
    (folder / "survey.toml").write_text(README_SCHEMA, encoding="utf-8")
    data = load(folder / "survey.csv", holdout=0.2)
    head = PrivateHead(epsilon=1.0, delta=1e-5, declared_size=5000).fit(data.train)
    save_private(head, folder / "affair", dataset=data.name)
    with Ledger(folder / "ledger.sqlite") as ledger:
        deployments = deploy(ledger, load_models([str(folder / "affair")]))
        with run_in_thread(Service(ledger, deployments, Settings(anonymous=True, request_log=False))) as url:
            yield url


def readme_query() -> dict[str, Any]:
    """The row that the README asks about."""
    (asked,) = (block.text for block in README if block.mark == "asks")
    (row,) = (node for node in ast.walk(ast.parse(asked)) if isinstance(node, ast.Dict))
    found: dict[str, Any] = ast.literal_eval(row)
    return found


def test_the_page_of_the_readme_states_the_bounds_of_its_schema(readme_address: str) -> None:
    page = httpx.get(f"{readme_address}/contents").text
    bounds = Schema.from_dict(tomllib.loads(README_SCHEMA)).bounds
    assert len(bounds) == 6
    for column, (low, high) in bounds.items():
        field = page.partition(f">{column}</label>")[2].partition("</div>")[0]
        assert f'min="{low:g}" max="{high:g}"' in field
        assert re.search(rf">{low:g} to {high:g}</span>", field), f"the hint of {column}"


def test_the_picture_of_the_readme_was_made_from_its_schema() -> None:
    with Image.open(ROOT / "docs" / "figures" / "page.png") as picture:
        assert picture.info.get("survey.toml") == README_SCHEMA


def test_the_page_of_the_readme_answers_its_query(browser: Any, readme_address: str) -> None:
    """The picture of the README: the model with the answer."""
    context = browser.new_context(viewport={"width": 1100, "height": 900}, device_scale_factor=1.5)
    page = context.new_page()
    page.goto(readme_address)
    answer = ask(page, readme_query())
    if folder := os.environ.get("QUIETMAX_SCREENSHOTS"):
        page.evaluate("scrollTo(0, 0)")
        box, end = page.locator("section[data-model]").bounding_box(), answer.bounding_box()
        clip = {**box, "height": end["y"] + end["height"] - box["y"]}
        info = PngImagePlugin.PngInfo()
        info.add_text("survey.toml", README_SCHEMA)
        with Image.open(io.BytesIO(page.screenshot(full_page=True, clip=clip))) as picture:
            picture.quantize(256).save(Path(folder) / "page.png", pnginfo=info, optimize=True)
    context.close()

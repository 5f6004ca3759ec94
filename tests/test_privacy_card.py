from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quietmax.accounting.guarantee import Guarantee
from quietmax.data.records import Holdout
from quietmax.estimators.evaluation import BINS, EvaluationCharge, noisy_evaluation
from quietmax.privacy_card import OBSERVED, PrivacyCard
from tests.server import conftest as server_fixtures

browser, chromium = server_fixtures.browser, server_fixtures.chromium

GUARANTEE = Guarantee(
    "gaussian",
    mu=0.268,
    status="proven",
    because="Gaussian mechanisms on exact clipped gradient sums compose to mu (THEORY 3.1).",
    unit="person",
    assumptions=("The feature map and all settings were chosen without looking at the private records.",),
    parameters={"steps": 180, "features": {"kind": "unit-norm", "constant": 1.0}},
)
SEEN = {"value": 0.01, "low": -0.01, "high": 0.03}


def evaluated(card: PrivacyCard, classes: int = 2) -> PrivacyCard:
    """Return the card of the same model after an evaluation of its holdout."""
    counts = np.eye(classes, dtype=np.int64) * 2**24 * 800
    assert card.guarantee is not None
    evaluation = noisy_evaluation(
        *(counts, np.zeros((BINS, 2), dtype=np.int64), [f"class {each}" for each in range(classes)]),
        card.guarantee,
        [EvaluationCharge(0.268, "parallel")],
    )
    return replace(card, evaluation=evaluation, released=evaluation.guarantee)


def make_card(**changes: Any) -> PrivacyCard:
    card = PrivacyCard(
        *("income", "head", "people.csv", 8000, GUARANTEE, 1e-5, 1.0, None, None, ()), holdout=Holdout(0.2)
    )
    return replace(card, **changes)


def full_card() -> PrivacyCard:
    """A card with all that it can show: many assumptions, ten classes, several attacks, a long path."""
    assumptions = tuple(
        f"Assumption {number}: "
        + "the numerical library rounds equal calls alike, at every place of a batch. " * 2
        for number in range(6)
    )
    guarantee = replace(GUARANTEE, status="conditional", assumptions=assumptions, unit="record")
    leakage = tuple(
        {"attack": name, "released_by": "the released weights", "leakage": SEEN, "auc": SEEN}
        for name in ("threshold", "shadow", "lira", "rmia")
    )
    card = make_card(model="/a/very/long/path" * 12, guarantee=guarantee, leakage=leakage)
    return evaluated(card, classes=10)


def words(page: str) -> str:
    """The words of a page without its tags."""
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", page.partition("</style>")[2])).split())


def test_the_card_says_in_plain_words_what_somebody_can_learn_and_who_is_protected() -> None:
    text = words(evaluated(make_card()).to_html())
    assert "is right at most 55.4% of the time; tossing a coin is right 50% of the time." in text
    assert "recognises at most" in text
    assert "one person, with all rows of this person" in text
    assert "20% of the people were held out of training by a keyed hash" in text
    assert "paid at training, any number of answers" in text
    assert "accuracy 0." in text or "accuracy 1.000" in text
    assert "held-out people" in text
    assert "doubles" not in text


def test_the_words_are_about_the_model_and_its_evaluations_together() -> None:
    card = make_card()
    more = replace(card, released=replace(GUARANTEE, mu=1.0, status="conditional"))
    assert more.status == "conditional"
    assert more.in_words() == replace(GUARANTEE, mu=1.0, status="conditional").in_words()
    assert more.in_words() != card.in_words()


def test_a_card_for_records_says_what_several_records_mean() -> None:
    card = make_card(guarantee=replace(GUARANTEE, unit="record"), holdout=None)
    text = words(card.to_html())
    assert "with 2 records" in text
    assert "a person with several records is protected less" in text
    assert "in the training set" in text
    assert "not evaluated; run 'quietmax evaluate'" in text


def test_a_model_that_is_paid_per_answer_shows_what_was_charged() -> None:
    rows = dict(make_card(queries=1000, answered=12).rows())
    assert rows["answers"] == "12 of 1,000 answers charged so far"


def test_of_many_classes_the_lowest_recalls_are_shown() -> None:
    card = evaluated(make_card(), classes=30)
    assert card.evaluation is not None
    shown = dict(card.rows())["lowest recalls of 30 classes"]
    values = {name: each.value for name, each in card.evaluation.recall.items()}
    lowest = sorted(values, key=lambda name: values[name] or 0.0)[:10]
    assert [part.partition(":")[0] for part in shown.split("; ")] == lowest


def test_names_and_reasons_are_escaped() -> None:
    card = make_card(model="<script>alert(1)</script>", dataset="a & b")
    assert "<script>" not in card.to_html()
    assert "a & b" in words(card.to_html())


def test_the_page_loads_nothing() -> None:
    page = full_card().to_html()
    assert not re.search(r"https?:|src=|@import|url\(", page)
    assert OBSERVED in words(page)


@pytest.mark.parametrize("card", [make_card(), full_card()], ids=["small", "full"])
def test_the_card_prints_on_one_page_and_fits_a_phone(
    card: PrivacyCard, browser: Any, tmp_path: Path
) -> None:
    file = tmp_path / "card.html"
    file.write_text(card.to_html(), encoding="utf-8")
    page = browser.new_page(viewport={"width": 390, "height": 844})
    try:
        page.goto(file.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.evaluate("parseFloat(getComputedStyle(document.querySelector('td')).fontSize)") >= 16
        printed = page.pdf(prefer_css_page_size=True)
    finally:
        page.close()
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 1
    assert b"/MediaBox [0 0 594.9" in printed or b"/MediaBox [0 0 595" in printed  # A4

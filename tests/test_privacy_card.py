from __future__ import annotations

import math
import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from quietmax.accounting.guarantee import Guarantee
from quietmax.data.records import Holdout
from quietmax.errors import InvalidInput
from quietmax.estimators import PrivateHead, save_private
from quietmax.estimators.evaluation import EvaluationCharge, _noisy_evaluation
from quietmax.estimators.figures import Evaluation, GroupsOf, Tables
from quietmax.estimators.head.effects import curve_svg
from quietmax.estimators.training_set import Basis
from quietmax.ledger import Ledger
from quietmax.ledger.accounts import Terms
from quietmax.privacy_card import (
    BLANK,
    OBSERVED,
    LedgerRecord,
    PrivacyCard,
    _calibration_html,
    edpb_checklist,
    nist_checklist,
    read_card,
)
from quietmax.server.deployment import deploy, load_models
from tests.estimators.evaluated import sure
from tests.export.people import train

GUARANTEE = Basis().under(
    Guarantee(
        "gaussian",
        mu=0.268,
        status="proven",
        because="Gaussian mechanisms on exact clipped gradient sums compose to mu (THEORY 3.1).",
        unit="person",
        parameters={"steps": 180, "features": {"kind": "unit-norm", "constant": 1.0}},
    )
)
SEEN = {"value": 0.01, "low": -0.01, "high": 0.03}


def evaluated(card: PrivacyCard, classes: int = 2, **settings: Any) -> PrivacyCard:
    """Return the card of the same model after a noisy evaluation of its holdout.

    Every class has 800 right answers, and the surest answers some wrong ones.
    """
    assert card.guarantee is not None
    counts = np.eye(classes, dtype=np.int64) * 800
    counts[0, 1] = 60
    counted = Tables(tuple(f"class {each}" for each in range(classes)), **settings)
    charges = [EvaluationCharge(0.268, "parallel")]
    evaluation = _noisy_evaluation(sure(counted, counts), counted, card.guarantee, charges)
    return replace(card, evaluations=(evaluation,), released=evaluation.guarantee)


def make_card(**changes: Any) -> PrivacyCard:
    card = PrivacyCard(
        *("income", "head", "people.csv", 8000, GUARANTEE, 1e-5, 1.0, None, None, ()), holdout=Holdout(0.2)
    )
    return replace(card, **changes)


def full_card(classes: int = 10, **settings: Any) -> PrivacyCard:
    """A card with all that it can show: many assumptions and classes, several attacks, a long path."""
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
    return evaluated(card, classes=classes, **settings)


GROUPS = GroupsOf(
    "region", (*(f"region {each}" for each in range(20)), "missing or other"), 0, 20, None, False
)


def calibrated_card() -> PrivacyCard:
    """A full card with groups, named thresholds, and a bin for each of many probabilities of which much is known."""
    card = full_card(classes=2, groups=GROUPS, at=(0.25, 0.3, 0.4))
    assert card.evaluation is not None
    assert card.evaluation.edges is not None
    bins = tuple((800.0 * high, 800.0 * (1 - high)) for high in card.evaluation.edges[1:])
    return replace(card, evaluations=(replace(card.evaluation, calibration=bins),))


def words(page: str) -> str:
    """The words of a page without its tags."""
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", page.partition("</style>")[2])).split())


def test_the_card_says_in_plain_words_what_somebody_can_learn_and_who_is_protected() -> None:
    text = words(evaluated(make_card()).to_html())
    assert "is right at most 55.4% of the time; tossing a coin is right 50% of the time." in text
    assert "recognises at most" in text
    assert "one person, with all rows of this person" in text
    assert "20% of the people in the table were held out of training, chosen by a keyed hash." in text
    assert "paid at training, any number of answers" in text
    assert "accuracy 0." in text or "accuracy 1.000" in text
    assert "held-out people" in text
    assert not any(word in text for word in ("doubles", "add-remove", "THEORY"))
    assert "(theory page, section 3.1)" in text
    column = make_card(person_column="customer_id")
    assert column.to_json()["protects"] == dict(column.rows())["protects"]
    assert dict(column.rows())["protects"].startswith(
        "one person: all rows with the same value in column 'customer_id'. 20% of the people in the table"
    )


def test_the_words_cover_one_model_and_say_that_others_add_to_it() -> None:
    for text in (words(make_card().to_html()), str(make_card().rows())):
        assert "Somebody who sees everything released by this model and its evaluations, knows" in text
        assert "Other models or figures of the same people add to this; the ledger" in text
        assert "everything that was released" not in text


def test_the_card_shows_the_matrix_with_a_margin_per_cell_and_the_calibration() -> None:
    card = evaluated(make_card(), classes=3)
    evaluation = card.evaluation
    assert evaluation is not None
    margin = math.ceil(evaluation.margin)
    assert 8 <= margin <= 16  # 1.96 * sqrt(2) / 0.268, rounded up, is 11
    page, rows = words(card.to_html()), dict(card.rows())
    for name, counts in zip(evaluation.classes, evaluation.confusion, strict=True):
        cells = [f"{round(count) + 0:,} ±{margin}" for count in counts]
        assert f"{name} {' '.join(cells)}" in page
        assert rows[f"true {name}, predicted"] == "; ".join(
            f"{each}: {cell}" for each, cell in zip(evaluation.classes, cells, strict=True)
        )
    for each in evaluation.bins:
        assert f"{each.low:.2f} to {each.high:.2f} {each.share}" in page
        assert rows[f"right with confidence {each.low:.2f} to {each.high:.2f}"] == str(each.share)
    assert "The cells do not add up to the accuracy and the number of people" in page


def test_the_card_shows_curves_and_folds_groups_and_named_thresholds_away() -> None:
    card = replace(evaluated(make_card(), groups=GROUPS, at=(0.3,)), decision="the most probable class")
    evaluation = card.evaluation
    assert evaluation is not None
    page, rows = words(card.to_html()), dict(card.rows())
    assert rows["area under the ROC curve"] == str(evaluation.auc)
    assert rows["log-loss"] == str(evaluation.log_loss)
    assert rows["answer"] == "the most probable class"
    point, _ = evaluation.named_points
    assert rows["class 1 if its probability is above the threshold, 0.3"] == (
        f"recall: {point.recall}; false alarms: {point.false_alarms}; precision: {point.precision}"
    )
    first = evaluation.groups[0]
    assert (
        f"accuracy: {first.accuracy}; recall of class 0: {first.recall['class 0']}"
        in rows["By region, region 0"]
    )
    assert f"region 0 {first.size.in_people()} {first.accuracy}" in page
    folded = re.findall(r"<details><summary>(.*?)</summary>", card.to_html())
    assert folded == [
        "Calibration in all bins",
        "class 1 if its probability is above the threshold",
        "By region",
    ]
    assert "Nothing can be said of 20 of the groups: with this noise, a group needs about 72 people." in page
    for each in (*evaluation.bins, *evaluation.wide_bins):
        assert f"{each.low:.2f} to {each.high:.2f} {each.share}" in page
    assert "probability of class 1 share of class 1" in page
    other = replace(card, decision="class 1 if its probability is above 0.3, otherwise class 0")
    assert dict(other.rows())["answer"].startswith("evaluated: the most probable class; now: class 1 if its")
    question = "Is the error acceptable for small groups?"
    assert checklist(card)[question].startswith(
        f"Accuracy by region: region 0 {first.accuracy}; region 1 unknown"
    )
    assert checklist(make_card())[question] == BLANK


def test_a_large_matrix_is_left_to_the_json() -> None:
    card = evaluated(make_card(), classes=5)
    text = words(card.to_html())
    assert "±" not in text.partition("Every count")[0]
    assert "`quietmax card --json` shows it, with an interval for each cell." in text
    cells = card.to_json()["evaluation"]["cells"]
    assert [len(row) for row in cells] == [5] * 5
    assert all(set(cell) == {"value", "low", "high"} for row in cells for cell in row)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [(210.0, "The probabilities are too confident: with 0.83 to 1.00, only 0.769"), (30.0, "")],
)
def test_probabilities_are_called_too_confident_only_if_they_are(wrong: float, said: str) -> None:
    """With given counts: the intervals of noisy ones would miss the truth now and then."""
    counts, confidence = ((900.0, 98.0), (151.0, 848.0)), ((310.0, 12.0), (720.0, 45.0), (700.0, wrong))
    evaluation = Evaluation(("no", "yes"), counts, confidence, 5.3, "person", 0.27, "parallel", GUARANTEE)
    text = words(make_card(evaluations=(evaluation,)).to_html())
    assert said in text
    assert ("too confident" in text) == bool(said)


def test_a_weaker_evaluation_does_not_hide_a_better_one(tmp_path: Path) -> None:
    features = np.abs(np.random.default_rng(0).normal(size=(400, 3))).astype(np.float32)
    labels = (features[:, 0] > 0.6).astype(int)
    head = PrivateHead(4.0, 1e-5, classes=(0, 1), declared_size=300).fit(features[:300], labels[:300])
    better = head.evaluate(features[300:], labels[300:], mu=0.5)
    weaker = head.evaluate(features[300:], labels[300:], mu=0.05)
    folder = save_private(head, tmp_path / "model", dataset="made up")
    card = read_card(folder)
    assert card.evaluations == (better, weaker)
    assert card.evaluation == better
    rows = card.rows()
    assert ("accuracy", str(better.accuracy)) in rows
    further = dict(rows)["further evaluation"]
    assert further.startswith(f"accuracy {weaker.accuracy} on about ")
    assert further.endswith("records, who may be in the training set")
    assert [each["mu"] for each in card.to_json()["further_evaluations"]] == [0.05]


def test_what_may_be_published_depends_on_what_is_released() -> None:
    def published(**changes: Any) -> str:
        return dict(make_card(**changes).rows())["may be published"]

    assert published() == "the model folder with its weights, any number of answers"
    assert published(queries=5).startswith("the answers that were charged; not the model folder")
    charged = dict(make_card(queries=1000, answered=12).rows())["answers"]
    assert charged == "12 of 1,000 answers charged so far"
    assert published(guarantee=replace(GUARANTEE, status="refuted")).startswith("nothing")
    rows = dict(evaluated(make_card()).rows())
    assert rows["may be published"].endswith(", the figures of the evaluations")
    for name in ("report of the training", "exact figures", "schema check", "attacks"):
        assert name in rows["not for publication"]
    assert "may be published" not in dict(make_card(guarantee=None).rows())


def test_a_card_with_attack_results_has_a_banner_and_the_public_one_has_neither() -> None:
    card = full_card()
    assert not card.publishable
    assert card.to_json()["publishable"] is False
    assert words(card.to_html()).startswith("Not for publication: this card shows results of attacks.")
    assert card.rows()[0][0] == "not for publication"
    public = card.for_publication()
    assert public.publishable
    assert public.to_json()["leakage"] == []
    for text in (words(public.to_html()), str(public.rows())):
        assert "observed leakage" not in text
        assert "this card shows" not in text
        assert "AUC" not in text
    assert make_card().publishable


def test_the_words_are_about_the_model_and_its_evaluations_together() -> None:
    card = make_card()
    more = replace(card, released=replace(GUARANTEE, mu=1.0, status="conditional"))
    assert more.status == "conditional"
    assert more.in_words()[1:3] == replace(GUARANTEE, mu=1.0, status="conditional").in_words()[1:]
    assert more.in_words() != card.in_words()


def test_a_card_for_records_says_what_several_records_mean() -> None:
    card = make_card(guarantee=replace(GUARANTEE, unit="record"), holdout=None)
    text = words(card.to_html())
    assert "with 2 records" in text
    assert "a person with several records is protected less" in text
    assert "held out" not in text
    assert "not evaluated; run 'quietmax evaluate'" in text


@pytest.fixture
def paid_per_answer(tmp_path: Path) -> Path:
    """The folder of a head that is paid per answer: epsilon 2 for 5 labels."""
    features = np.abs(np.random.default_rng(0).normal(size=(300, 3))).astype(np.float32)
    options: dict[str, Any] = {"method": "output", "release": "query", "queries": 5, "classes": (0, 1)}
    head = PrivateHead(2.0, None, declared_size=300, **options)
    head.fit(features, (features[:, 0] > 0.6).astype(int))
    return save_private(head, tmp_path / "model", dataset="made up")


def test_a_model_whose_budget_moved_into_a_ledger_states_no_limit_on_all_its_answers(
    paid_per_answer: Path, tmp_path: Path
) -> None:
    before = read_card(paid_per_answer)
    assert "everything released by this model" in before.in_words()[0]
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        (served,) = deploy(
            ledger, load_models([str(paid_per_answer)]), budget=Terms(20.0, 1e-5), accept_weak=True
        )
        assert served.account.limit.epsilon == 20.0
    card = read_card(paid_per_answer)
    assert card.moved
    assert card.to_json()["moved"] is True
    assert card.in_words()[0].startswith("Somebody who sees 5 answers of this model, knows all other records")
    assert "a ledger charges its answers, and its budget may allow more of them" in card.in_words()[-1]
    rows = dict(card.rows())
    assert rows["answers"] == "charged by a ledger since the model was served; the guarantee is for 5"
    assert "everything" not in words(card.to_html())


def test_the_card_of_a_pure_guarantee_states_its_epsilon_and_advises_no_evaluation(
    paid_per_answer: Path,
) -> None:
    card = read_card(paid_per_answer)
    assert (card.epsilon_at_delta, card.delta) == (2.0, 0.0)
    assert dict(card.rows())["in (epsilon, delta)"] == "(2, 0)"
    assert dict(card.rows())["accuracy"] == "not evaluated; a model that is paid per answer cannot be"


def checklist(card: PrivacyCard) -> dict[str, str]:
    return {item.question: item.answer for item in nist_checklist(card)}


def test_the_checklist_covers_every_factor_and_marks_what_it_cannot_know(
    tmp_path: Path, paid_per_answer: Path
) -> None:
    items = nist_checklist(card := read_card(train(tmp_path / "head")))
    factors = {
        "Unit of privacy",
        "Bounds",
        "Sensitivity",
        "Noise",
        "Budget",
        "Side channels",
        "Data collection",
    }
    assert {item.topic for item in items} >= factors
    assert {item.answer for item in items if item.topic in ("Data collection", "Side channels")} == {BLANK}
    answers, paid = checklist(card), checklist(read_card(paid_per_answer))
    definition, rounding = (
        "Which definition, and how large is epsilon?",
        "Are floating-point attacks excluded?",
    )
    assert card.guarantee is not None
    norm = card.guarantee.parameters["max_grad_norm"]
    assert f"max_grad_norm {norm:.6g}" in answers["How is the influence of one unit limited?"]
    assert "epsilon 8 at delta 1e-05" in answers[definition]
    assert paid[definition] == "pure: epsilon 2 at delta 0"
    assert answers[rounding].startswith("Yes: sums and noise are multiples of a public grid")
    assert paid[rounding] == BLANK, "only released weights are added without rounding"
    moved = checklist(replace(read_card(paid_per_answer), moved=True))["What is charged, and what is left?"]
    assert moved == "Charged by a ledger since the model was served; the guarantee is for 5."
    with pytest.raises(InvalidInput, match="ordinary network"):
        nist_checklist(make_card(guarantee=None))


def test_the_checklist_of_the_edpb_states_what_model_and_ledger_know_and_leaves_judgements_blank(
    tmp_path: Path, paid_per_answer: Path
) -> None:
    card = read_card(train(tmp_path / "head"))
    items = edpb_checklist(card)
    answers = {item.topic: item.answer for item in items}
    assert list(answers)[:3] == ["Direct extraction", "Queries", "Means"]
    assert answers["Direct extraction"].startswith("the model folder with its weights")
    assert " ".join(card.in_words()) in answers["Direct extraction"]
    assert answers["Queries"].startswith("Paid at training, any number of answers.")
    by_question = {item.question: item.answer for item in items}
    method = by_question["Which method limits what training reveals?"]
    assert method.startswith("gaussian: epsilon 8 at delta 1e-05; sensitivity ")
    assert "max_grad_norm" in method
    assert "Exact samplers" in method
    assert by_question["Is its claim proven, and what does it assume?"].startswith("proven: ")
    assert by_question["Which attacks were tried, and what did they show?"] == BLANK
    judged = [question for question, answer in by_question.items() if answer == BLANK]
    assert len(judged) == 7
    assert any("insignificant" in question for question in judged), (
        "the software does not call a model anonymous"
    )
    report = {"attack": "lira", "released_by": "the released weights", "leakage": SEEN, "auc": SEEN}
    seen = replace(card, leakage=(report,))
    shown = {item.question: item.answer for item in edpb_checklist(seen)}
    assert f"AUC {SEEN['value']:.4f}" in shown["Which attacks were tried, and what did they show?"]
    paid = edpb_checklist(
        read_card(paid_per_answer), LedgerRecord("Budget of the account.", "", "2 valid API keys.")
    )
    assert "not the model folder, which holds weights without noise" in paid[0].answer
    assert "Budget of the account." in paid[1].answer
    assert paid[2].answer == f"2 valid API keys. Other means: {BLANK}"
    with pytest.raises(InvalidInput, match="ordinary network"):
        edpb_checklist(make_card(guarantee=None))


def test_the_card_of_a_table_shows_the_columns_that_matter_most(
    tmp_path: Path, paid_per_answer: Path
) -> None:
    card = read_card(train(tmp_path / "head"))
    assert card.effects is not None
    columns, page = [*card.effects.curves], card.to_html()
    assert page.count("<svg") == min(3, len(columns))
    for column in columns[:3]:
        assert curve_svg(card.effects, column) in page
    importances = card.effects.importance.to_dict("records")
    assert card.to_json()["effects"] == importances
    assert f"<td>{importances[0]['importance']:.3f}</td>" in page
    other = read_card(paid_per_answer)
    assert "<svg" not in other.to_html()
    assert other.to_json()["effects"] is None


def test_the_calibration_is_drawn_where_it_is_known() -> None:
    evaluation = calibrated_card().evaluation
    assert evaluation is not None
    picture = _calibration_html(evaluation)
    paths = re.findall(
        r'd="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)" stroke="#0969da" stroke-width="2.5"', picture
    )
    assert len(paths) == len(evaluation.bins)
    for each, path in zip(evaluation.bins, paths, strict=True):
        left, up, right, same = map(float, path)
        assert up == same == pytest.approx(170 - 160 * (each.share.value or 0.0), abs=0.06)
        assert [left, right] == pytest.approx([40 + 260 * each.low, 40 + 260 * each.high], abs=0.06)
    assert "share of class 1 by probability of class 1" in picture
    unknown = replace(evaluation, calibration=((0.0, 0.0),) * len(evaluation.bins))
    assert _calibration_html(unknown) == ""
    assert "<svg" not in replace(make_card(), evaluations=(unknown,)).to_html()


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


@pytest.mark.parametrize(
    "card",
    [make_card(), full_card(), full_card(classes=2), full_card(classes=4), calibrated_card()],
    ids=["small", "ten classes", "two classes", "four classes", "every bin"],
)
def test_the_card_prints_on_one_page_and_fits_a_phone(
    card: PrivacyCard, browser: Any, tmp_path: Path
) -> None:
    file = tmp_path / "card.html"
    card = replace(card, effects=read_card(train(tmp_path / "head")).effects)
    file.write_text(card.to_html(), encoding="utf-8")
    page = browser.new_page(viewport={"width": 390, "height": 844})
    try:
        page.goto(file.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.evaluate("parseFloat(getComputedStyle(document.querySelector('td')).fontSize)") >= 16
        printed = page.pdf(prefer_css_page_size=True)
        page.emulate_media(media="print")
        for picture, count in ((".effects svg", 3), (".calibration", int(card.evaluation is not None))):
            shown = page.locator(picture)
            assert shown.count() == count, picture
            assert all(each.is_visible() for each in shown.all()), "the pictures are printed"
        assert page.locator(".counts.drawn > :last-child:visible").count() == 0, (
            "the picture stands for its table"
        )
        if card.evaluation is not None:
            assert page.locator(".grid:visible").count() == (len(card.evaluation.classes) <= 4), "the matrix"
    finally:
        page.close()
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 1
    assert b"/MediaBox [0 0 594.9" in printed or b"/MediaBox [0 0 595" in printed  # A4


@pytest.mark.parametrize(
    ("accuracy", "colour", "strength", "words"),
    [
        (0.549, "#1a7f37", "strong", "strong protection [###]"),
        (0.749, "#1a7f37", "moderate", "moderate protection [##-]"),
        (0.751, "#bc4c00", "weak", "weak protection [#--]"),
        (0.951, "#cf222e", "none", "no protection [---]"),
    ],
)
def test_a_card_is_green_only_if_an_adversary_is_right_at_most_three_times_in_four(
    accuracy: float, colour: str, strength: str, words: str
) -> None:
    card = make_card(guarantee=replace(GUARANTEE, mu=2 * NormalDist().inv_cdf(accuracy - 1e-9)))
    page = card.to_html()
    assert f'<span class="status">proven</span> <span class="status strength">{words}</span>' in page
    assert f".strength {{ background: {colour}; }}" in page
    assert f"solid {colour};" in page
    assert ("#1a7f37" in page) == (accuracy < 0.75)
    assert dict(card.rows())["status"].startswith(f"proven, {words}: a guess whether one ")
    assert card.title == f"Privacy card: {dict(card.rows())['status']}"
    told = card.to_json()
    assert (told["status"], told["strength"]) == ("proven", strength)


def test_a_card_is_not_green_if_its_guarantee_is_not_proven() -> None:
    card = make_card(guarantee=replace(GUARANTEE, mu=0.01, status="conditional"))
    assert card.strength == "strong"
    assert ".strength { background: #9a6700; }" in card.to_html()
    assert "#1a7f37" not in card.to_html()

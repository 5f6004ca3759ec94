from __future__ import annotations

from dataclasses import replace

import pytest

from quietmax.errors import InvalidInput
from quietmax.privacy_card import BLANK, nist_checklist, read_card
from tests.export.people import train


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory):
    return read_card(train(tmp_path_factory.mktemp("forms") / "head"))


def test_the_checklist_covers_every_factor_and_marks_what_it_cannot_know(card) -> None:
    items = nist_checklist(card)
    topics = {item.topic for item in items}
    assert topics >= {
        "Unit of privacy",
        "Bounds",
        "Sensitivity",
        "Noise",
        "Budget",
        "Side channels",
        "Data collection",
    }
    by_topic = {item.topic: item for item in items}
    assert "0.5" in by_topic["Sensitivity"].answer
    assert by_topic["Data collection"].answer == BLANK
    assert by_topic["Side channels"].answer == BLANK
    assert any("epsilon 8 at delta 1e-05" in item.answer for item in items)


@pytest.fixture(scope="module")
def paid_card(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("forms") / "paid"
    return read_card(train(folder, delta=None, method="output", release="query", queries=5))


def test_the_checklist_states_the_epsilon_of_a_pure_guarantee(paid_card) -> None:
    assert any(item.answer == "pure: epsilon 8 at delta 0" for item in nist_checklist(paid_card))


def test_the_checklist_does_not_count_answers_that_a_ledger_charges(paid_card) -> None:
    answers = {item.question: item.answer for item in nist_checklist(replace(paid_card, moved=True))}
    said = answers["What is charged, and what is left?"]
    assert said == "Charged by a ledger since the model was served; the guarantee is for 5."


def test_only_released_weights_are_added_without_rounding(card, paid_card) -> None:
    def answer(of) -> str:
        return next(item.answer for item in nist_checklist(of) if "floating-point" in item.question)

    assert answer(card).startswith("Yes: sums and noise are multiples of a public grid")
    assert answer(paid_card) == BLANK


def test_an_ordinary_network_has_no_such_form(card) -> None:
    plain = replace(card, guarantee=None, released=None)
    with pytest.raises(InvalidInput, match="ordinary network"):
        nist_checklist(plain)

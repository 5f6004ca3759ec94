from __future__ import annotations

import json
from dataclasses import replace

import pytest

from quietmax.errors import InvalidInput
from quietmax.privacy_card import BLANK, nist_checklist, read_card, registry_entry
from tests.export.people import train


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory):
    return read_card(train(tmp_path_factory.mktemp("forms") / "head"))


def test_the_registry_entry_states_the_guarantee_and_leaves_the_rest_to_people(card) -> None:
    entry = json.loads(json.dumps(registry_entry(card)))["deployment"]
    assert list(entry) == [
        *("product", "dp_flavor", "privacy_loss", "model", "accounting", "implementation", "resources")
    ]
    assert entry["privacy_loss"]["privacy_unit"] == "record"
    assert entry["privacy_loss"]["privacy_parameters"]["epsilon"] == pytest.approx(8.0, rel=1e-6)
    assert entry["privacy_loss"]["privacy_parameters"]["delta"] == 1e-5
    assert entry["privacy_loss"]["privacy_parameters_description"].startswith("Status: proven.")
    assert entry["product"]["data_curators"] == [BLANK]


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


def test_the_forms_state_the_epsilon_of_a_pure_guarantee(paid_card) -> None:
    entry = registry_entry(paid_card)["deployment"]
    assert entry["dp_flavor"]["name"] == "Pure DP"
    assert entry["privacy_loss"]["privacy_parameters"] == {"epsilon": 8.0, "delta": 0.0}
    assert any(item.answer == "pure: epsilon 8 at delta 0" for item in nist_checklist(paid_card))


def test_the_forms_do_not_count_answers_that_a_ledger_charges(paid_card) -> None:
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
    for form in (registry_entry, nist_checklist):
        with pytest.raises(InvalidInput, match="ordinary network"):
            form(plain)

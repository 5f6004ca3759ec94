from __future__ import annotations

import html
import json
from pathlib import Path

import pytest

from quietmax.cli.models import _NOT_IN_LEDGER
from quietmax.errors import DataUnavailable
from quietmax.ledger import Charge, Ledger
from quietmax.privacy_card import BLANK, OBSERVED, leakage_file, read_card, record_leakage
from quietmax.server.deployment import deploy, load_models
from tests.cli.conftest import assert_error, document, printed, run
from tests.cli.own_table import DECLARED

SEEN = {"value": 0.01, "low": -0.01, "high": 0.03}
REPORT = {"attack": "shadow", "released_by": "the model", "leakage": SEEN, "auc": SEEN, "members": 480}


def test_the_card_shows_guarantee_status_assumptions_spending_and_leakage(votes: Path, queries: Path) -> None:
    run("predict", "--model", votes, "--input", queries)
    record_leakage(votes, [REPORT])
    newer = SEEN | {"value": 0.02}
    record_leakage(votes, [REPORT | {"leakage": newer}, REPORT | {"attack": "lira"}])
    page = Path("card.html")
    card = document("card", votes, "--html", page)
    assert card["status"] == "proven"
    assert card["answered"] == 2
    assert card["declared_size"] == 480
    assert [(entry["attack"], entry["leakage"]["value"]) for entry in card["leakage"]] == [
        ("shadow", 0.02),  # a newer run replaces the older
        ("lira", 0.01),
    ]
    assert card["leakage_caveat"] == OBSERVED
    text = page.read_text()
    assert "proven" in text
    assert "://" not in text  # nothing is fetched to show it
    assert html.escape(OBSERVED) in text
    out = printed("card", votes)
    assert "Privacy card: proven" in out
    assert "2 of 10 answers charged so far" in " ".join(out.split())
    assert "doubles" not in out


def test_the_card_of_an_ordinary_model_claims_nothing_and_shows_observed_leakage() -> None:
    folder = Path("model")
    run("train", "network", "mnist-5k", "--records", 200, "--epochs", 5, "-o", folder)
    assert run("attack", folder, "--attack", "threshold", "--shadows", 2)[0] == 0
    assert "observed leakage, threshold" in " ".join(printed("card", folder).split())
    leakage_file(folder).write_text("[")
    assert_error(run("card", folder), 1, "cannot be read")
    leakage_file(folder).unlink()
    assert document("card", folder)["status"] == "none"


def test_attack_results_are_kept_out_of_a_folder_that_may_be_published(people: Path) -> None:
    head = Path("head")
    train = ("train", "head", people, *DECLARED, "--declared-size", 480, "--holdout", 0.4, "-o", head)
    assert run(*train)[0] == 0
    before = {file.name: file.read_bytes() for file in head.iterdir()}
    attack = ("attack", head, "--data", people, *DECLARED, "--holdout", 0.4, "--attack", "threshold")
    assert OBSERVED in " ".join(printed(*attack, "--shadows", 2).split())
    assert document(*attack, "--shadows", 2)["caveat"] == OBSERVED
    assert {file.name: file.read_bytes() for file in head.iterdir()} == before
    card = document("card", head)
    assert [entry["attack"] for entry in card["leakage"]] == ["threshold"]
    assert card["leakage_caveat"] == OBSERVED
    # the card for publication shows none of it
    page = Path("public.html")
    out = printed("card", head, "--public", "--html", page)
    for text in (out, page.read_text()):
        assert "observed leakage" not in text
        assert "shows results of attacks" not in " ".join(text.replace("│", " ").split())
    assert "this card shows results of attacks" in " ".join(run("card", head)[1].replace("│", " ").split())
    assert document("card", head, "--public")["leakage"] == []
    # another model of the same name does not inherit them
    assert run(*train, "--overwrite")[0] == 0
    card = document("card", head)
    assert (card["leakage"], card["leakage_caveat"]) == ([], None)


@pytest.mark.parametrize("name", ["delta", "declared_size", "queries"])
def test_a_value_of_the_wrong_type_in_a_model_folder_is_an_error(head: Path, name: str) -> None:
    described = json.loads((head / "model.json").read_text())
    numbers: tuple[object, ...] = (-1, "x", [], {}, [None], True, float("inf"))
    for value in numbers:
        (head / "model.json").write_text(json.dumps(described | {name: value}))
        assert_error(run("card", head), 1, name)


def test_a_foreign_file_of_attack_results_is_an_error(head: Path) -> None:
    record_leakage(head, [REPORT])
    assert len(read_card(head).leakage) == 1
    for content in (
        {"x": 1}, [{"attack": 1}], 3, None, "x", [3], [REPORT], {"attacks": 3},
        *({"attacks": [entry]} for entry in (
            3, REPORT | {"attack": 3}, REPORT | {"leakage": {}}, REPORT | {"auc": 3},
            REPORT | {"leakage": SEEN | {"low": "x"}},
        )),
    ):  # fmt: skip
        leakage_file(head).write_text(json.dumps(content))
        with pytest.raises(DataUnavailable, match=leakage_file(head).name):
            read_card(head)
        with pytest.raises(DataUnavailable, match=leakage_file(head).name):
            record_leakage(head, [REPORT])
    leakage_file(head).write_text("[" * 100_000)
    with pytest.raises(DataUnavailable, match=leakage_file(head).name):
        read_card(head)


def test_the_forms_state_what_the_ledger_has_charged_and_leave_the_rest_to_people(votes: Path) -> None:
    ledger = Path("state/ledger.sqlite")
    with Ledger(ledger) as opened:
        (served,) = deploy(opened, load_models([f"votes={votes}"]))
        opened.create_key("owner", "admin")
        _, key = opened.create_key("ann")
        opened.revoke_key(opened.create_key("bob")[1].id)
        unit = served.unit_cost
        opened.charge(Charge(served.account.id, key.client_id, "votes/1", unit, rows=4, key=key.id))
        opened.charge(Charge(served.account.id, key.client_id, "other/3", unit, rows=1, key=key.id))
        state = opened.account(served.account.name)
        heads = [f"{name}:{head.sequence}:{head.hash}" for name, head in opened.heads()]
    before = {each.name: each.read_bytes() for each in ledger.parent.iterdir()}
    answers = {
        item["question"]: item["answer"]
        for item in document("card", votes, "--format", "nist-800-226", "--ledger", ledger)
    }
    budget = answers["What is charged, and what is left?"]
    assert f"Account {state.name}, opened with epsilon" in budget
    assert f"spent mu {state.spent.mu:.6g}, remaining mu {state.remaining.mu:.6g}; 1 client." in budget
    releases = answers["Which other releases use data of the same people?"]
    assert releases == f"Of the same account: other/3, votes/1. Outside the ledger: {BLANK}"
    access = answers["Who has access to the training data and to the ledger?"]
    assert access.startswith("2 valid API keys, 1 of them of administrators.")
    assert len(heads) == 2
    assert all(head in access for head in heads)
    assert BLANK in access
    of_the_edpb = document("card", votes, "--format", "edpb-28-2024", "--ledger", ledger)
    assert [item["answer"] for item in of_the_edpb if budget in item["answer"]], "it states the budget too"
    assert any(item["answer"].startswith("2 valid API keys") for item in of_the_edpb)
    assert {each.name: each.read_bytes() for each in ledger.parent.iterdir()} == before


def test_a_form_says_if_the_ledger_does_not_know_the_model_and_refuses_what_it_cannot_read(
    votes: Path,
) -> None:
    ledger = Path("ledger.sqlite")
    form = ("card", votes, "--format", "nist-800-226", "--ledger", ledger)
    with Ledger(ledger):
        pass
    answers = document(*form)
    assert sum(_NOT_IN_LEDGER in item["answer"] for item in answers) == 2
    assert_error(run(*form, "--account", "nobody"), 2, "has no account 'nobody'")

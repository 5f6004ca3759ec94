from __future__ import annotations

from pathlib import Path

import pytest

from quietmax.estimators.evaluation import EVALUATION_FILE, NOT_FOR_PUBLICATION
from quietmax.estimators.serialization import open_private
from tests.cli.conftest import assert_error, document, printed, run
from tests.cli.own_table import DECLARED, add_persons


@pytest.fixture
def model(people: Path) -> Path:
    """A head for persons, trained without 30% of them."""
    add_persons(people)
    folder = Path("income")
    options = ("--person", "id", "--declared-size", 280, "--holdout", 0.3, "--epsilon", 4)
    printed("train", "head", people, *DECLARED, *options, "-o", folder)
    return folder


def test_the_holdout_is_evaluated_for_free_and_shown_on_the_card(people: Path, model: Path) -> None:
    found = document("evaluate", model, "--data", people)
    assert found["publishable"] is True
    assert (found["unit"], found["composition"]) == ("person", "parallel")
    assert found["guarantee"]["mu"] == open_private(model).guarantee.mu
    assert found["guarantee"]["status"] == "proven"
    exact = document("evaluate", model, "--data", people, "--exact")
    assert found["size"]["low"] - 5 <= exact["size"]["value"] <= found["size"]["high"] + 5
    assert exact["size"]["value"] < 160  # of 400 persons
    assert found["accuracy"]["value"] == pytest.approx(exact["accuracy"]["value"], abs=0.2)
    assert set(found["recall"]) == {"lo", "hi"}
    card = document("card", model)
    assert card["evaluation"] == found
    assert card["holdout"] == {"share": 0.3, "seed": 0}
    out = printed("card", model)
    assert "recall by class" in out
    text = " ".join(out.replace("│", " ").split())
    assert "30% of the people in the table were held out of training" in text
    column = open_private(model).encoding.person
    assert f"one person: all rows with the same value in column {column!r}." in text
    assert f"All rows of one person, and nobody else's, have the same value in column {column!r}." in text
    assert "true hi, predicted" in text
    assert "±" in text


def test_a_second_evaluation_of_the_holdout_needs_a_budget(people: Path, model: Path) -> None:
    text = " ".join(printed("evaluate", model, "--data", people).split())
    for words in (
        "accuracy",
        "recall of hi",
        "confidence 0.90 to 1.00",
        "may be published",
        "within ±",
        "Guarantee:",
    ):
        assert words in text
    assert_error(run("evaluate", model, "--data", people), 1, "as much as the training", "--epsilon")
    further = document("evaluate", model, "--data", people, "--epsilon", 1)
    training = open_private(model).guarantee
    assert further["guarantee"]["mu"] > (training.mu or 0.0)
    card = document("card", model)
    assert card["released"] == further["guarantee"]
    assert card["guarantee"]["mu"] == training.mu
    assert card["epsilon_at_delta"] > 4


def test_without_a_holdout_the_costs_add_up(people: Path, head: Path) -> None:
    before = (head / EVALUATION_FILE).read_bytes()
    assert_error(run("evaluate", head, "--data", people), 2, "a budget is required", "--epsilon")
    assert (head / EVALUATION_FILE).read_bytes() == before
    found = document("evaluate", head, "--data", people, "--epsilon", 1)
    training = open_private(head).guarantee
    assert found["composition"] == "sequential"
    assert found["guarantee"]["mu"] ** 2 == pytest.approx((training.mu or 0.0) ** 2 + found["mu"] ** 2)


def test_exact_figures_are_marked_and_not_stored(people: Path, model: Path) -> None:
    before = (model / EVALUATION_FILE).read_bytes()
    exact = ("evaluate", model, "--data", people, "--exact")
    assert NOT_FOR_PUBLICATION in " ".join(printed(*exact).split())
    result = run("evaluate", model, "--data", "mnist-5k")
    assert_error(result, 2, "not encoded as the records of the model")
    assert (model / EVALUATION_FILE).read_bytes() == before
    assert document("card", model)["evaluation"] is None

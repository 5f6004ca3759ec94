from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from quietmax.data.records import Holdout, Records, is_held_out
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


def test_only_people_who_were_held_out_are_counted(people: Path, model: Path) -> None:
    """The exact number is that of the persons whom the rule of the folder holds out, whatever else is in the file."""
    opened = open_private(model)
    assert opened.holdout == Holdout(0.3, 0)
    assert opened.encoding is not None
    header, *rows = people.read_text().splitlines()
    names = np.array([row.split(",")[0] for row in rows], dtype=object)
    zeros = np.zeros((len(rows), 1), dtype=np.float32)
    records = Records("ids", zeros, np.zeros(len(rows), dtype=np.int64), 2, persons=names)
    held_out = is_held_out(records, opened.holdout)
    exact = document("evaluate", model, "--data", people, "--exact")
    assert exact["size"]["value"] == pytest.approx(len(set(names[held_out])), abs=1e-3)
    trained = people.with_name("trained.csv")
    trained.write_text(
        "\n".join([header, *(row for row, out in zip(rows, held_out, strict=True) if not out)])
    )
    assert document("evaluate", model, "--data", trained, "--exact")["size"]["value"] == 0


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


def test_exact_figures_take_no_budget_are_marked_and_not_stored(people: Path, model: Path) -> None:
    before = (model / EVALUATION_FILE).read_bytes()
    exact = ("evaluate", model, "--data", people, "--exact")
    for budget in (("--epsilon", 1), ("--delta", 1e-6)):
        result = run(*exact, *budget)
        assert_error(result, 2, "--exact takes no budget: leave out --epsilon and --delta")
    assert NOT_FOR_PUBLICATION in " ".join(printed(*exact).split())
    assert (model / EVALUATION_FILE).read_bytes() == before
    assert document("card", model)["evaluation"] is None


def test_people_who_may_have_other_names_are_an_error(people: Path, model: Path) -> None:
    """In the Parquet file the persons are numbers, in the CSV file they were strings."""
    frame = pd.read_csv(people)
    frame["id"] = range(len(frame))
    frame.to_parquet(people.with_suffix(".parquet"))
    for further in ((), ("--exact",)):
        found = run("evaluate", model, "--data", people.with_suffix(".parquet"), *further)
        assert_error(found, 2, "same type as in training", "int64")


def test_what_cannot_be_evaluated_is_an_error(people: Path, model: Path) -> None:
    assert_error(run("evaluate", model, "--data", "mnist-5k"), 2, "not encoded as the records of the model")
    anonymous = people.with_name("anonymous.csv")
    anonymous.write_text("age,sex,income\n30,F,lo\n")
    assert_error(run("evaluate", model, "--data", anonymous), 2, "'id'")
    assert json.loads((model / EVALUATION_FILE).read_text())["evaluations"] == []

from __future__ import annotations

from pathlib import Path

import pytest

from quietmax.estimators.evaluation import EVALUATION_FILE
from quietmax.estimators.figures import NOT_FOR_PUBLICATION
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
        "share of hi with probability 0.99 to 1.00",
        "area under the ROC curve",
        "log-loss",
        "the most probable class",
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


def test_groups_and_thresholds_are_part_of_the_same_release(people: Path, model: Path) -> None:
    for given, message in (
        (("--by", "nothing"), "--by must be a column of the schema, got 'nothing'"),
        (("--by", "age=x"), "--by must be a column, or a column with numbers as in age=30,50; got 'age=x'"),
        (("--at", "1.5"), "Every threshold of --at must be between 0 and 1, got 1.5"),
    ):
        assert_error(run("evaluate", model, "--data", people, *given), 2, message)
    found = document("evaluate", model, "--data", people, "--by", "age=30,50", "--at", 0.2, 0.3)
    assert found["guarantee"]["mu"] == open_private(model).guarantee.mu
    assert found["by_group"]["column"] == "age"
    assert [each["name"] for each in found["groups"]][:3] == ["below 30", "30 to 50", "50 and above"]
    assert found["at"] == [0.2, 0.3]
    assert {0.2, 0.3} <= {each["threshold"] for each in found["points"]}
    assert document("card", model)["evaluation"] == found
    text = " ".join(
        printed("evaluate", model, "--data", people, "--exact", "--by", "age=30,50", "--at", 0.3).split()
    )
    for words in (
        "By age",
        "30 to 50",
        "hi if its probability is above the threshold",
        "false alarms",
        "0.3",
    ):
        assert words in text


def test_a_threshold_is_stored_and_used_by_answers_and_evaluations(people: Path, model: Path) -> None:
    queries = ("predict", "--model", model, "--input", people)
    before = document(*queries)
    second = before["classes"].index("hi")
    scores = sorted(row[second] for row in before["probabilities"] if row[second] > 0.5)
    high = round(scores[len(scores) // 2], 4)
    stored = document("decide", model, "--threshold", f"hi={high}")
    assert stored["decision"] == f"hi if its probability is above {high:g}, otherwise lo"
    after = document(*queries)
    assert after["probabilities"] == before["probabilities"]
    assert after["labels"] == ["hi" if row[second] > high else "lo" for row in after["probabilities"]]
    assert after["labels"] != before["labels"]
    shown = printed("decide", model, "--threshold", f"hi={high}")
    assert stored["decision"] in " ".join(shown.split())
    evaluated = document("evaluate", model, "--data", people)
    assert evaluated["decision"] == stored["decision"]
    assert high in {each["threshold"] for each in evaluated["points"]}
    assert document("decide", model, "--cost", "hi:lo=4")["costs"] == [[0, 1], [4, 0]]
    text = " ".join(printed("card", model).replace("│", " ").split())
    assert f"evaluated: {stored['decision']}; now: hi if its probability is above 0.2, otherwise lo" in text
    assert document("decide", model)["costs"] is None
    assert document(*queries)["labels"] == before["labels"]


def test_what_is_no_decision_is_wrong_usage(model: Path) -> None:
    for given, message in (
        (("--threshold", "hi"), "--threshold must be a name and a number, as in yes=0.3; got 'hi'"),
        (("--threshold", "hi=2"), "A threshold must be between 0 and 1, got 2"),
        (("--cost", "hi=5"), "no class ''"),
        (("--cost", "hi:lo=0"), "must be a positive number"),
        (("--cost", "hi:lo=2", "--threshold", "hi=0.3"), "Only one of --threshold and --cost"),
    ):
        assert_error(run("decide", model, *given), 2, message)


def test_answers_of_another_decision_are_not_mixed_with_these(people: Path, model: Path) -> None:
    queries = ("predict", "--model", model, "--input", people, "-o", "answers")
    first = document(*queries)
    assert first["written"] == 1
    lines = Path("answers", people.name).read_text().splitlines()
    document("decide", model, "--cost", "lo:hi=1e6")
    assert_error(run(*queries), 2, "has answers of another model")
    document("predict", "--model", model, "--input", people, "-o", "others")
    changed = Path("others", people.name).read_text().splitlines()
    assert [line.partition(",")[2] for line in lines] == [line.partition(",")[2] for line in changed]
    assert lines != changed

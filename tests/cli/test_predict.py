from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quietmax.ledger import Ledger
from quietmax.server.deployment import deploy, load_models
from tests.cli.conftest import assert_error, document, printed, run
from tests.cli.own_table import DECLARED


def test_the_guarantee_and_its_status_are_always_printed() -> None:
    model, queries = Path("model"), "queries.npz"
    train = ("train", "network", "mnist-5k", "--records", 600, "--epochs", 3, "-o", model, "--json")
    assert json.loads(run(*train)[1])["test_accuracy"] > 0.4
    np.savez(queries, features=np.random.default_rng(0).random((5, 784), dtype=np.float32))
    predict = ("predict", "--model", model, "--input", queries, "--epsilon", 1)
    answer = document(*predict)
    assert answer["guarantee"]["status"] == "refuted"
    assert np.array(answer["probabilities"]).sum(1) == pytest.approx(np.ones(5))
    assert answer["spent"] == 5
    assert answer["remaining"]["queries"] == 0
    for mechanism in ("algorithm1", "algorithm1-laplace"):
        assert "Guarantee: refuted" in printed(*predict, "--mechanism", mechanism)


def test_an_ordinary_network_answers_with_the_names_of_its_classes_and_prints_the_first_answers(
    network: Path, queries: Path
) -> None:
    predict = ("predict", "--model", network, "--epsilon", 1000, "--input")
    answer = document(*predict, queries)
    assert answer["labels"] == ["lo", "hi"]
    assert answer["guarantee"]["status"] == "conditional"
    many = Path("many.csv")
    many.write_text("age,sex\n" + "".join(f"{age},F\n" for age in range(18, 88)))
    assert "The first 20 of 70 answers; --json prints all." in run(*predict, many)[1]
    assert len(document(*predict, many)["labels"]) == 70


def test_seeded_noise_is_repeatable_and_named_in_the_guarantee(network: Path, queries: Path) -> None:
    def predict() -> Any:
        options = ("--model", network, "--input", queries, "--epsilon", 1, "--seeded", 7, "--json")
        return document("predict", *options)

    first, second = predict(), predict()
    assert first["probabilities"] == second["probabilities"]
    assert first["guarantee"]["parameters"]["noise_source"] == {"source": "seeded", "exact": False, "seed": 7}


def test_teachers_answer_until_the_budget_is_spent_or_moves_to_a_ledger(people: Path, queries: Path) -> None:
    folder = Path("votes")
    options = ("--queries", 3, "--epsilon", 30, "--declared-size", 480)
    assert "Guarantee: proven" in printed("train", "teachers", people, *DECLARED, *options, "-o", folder)
    answers = document("predict", "--model", folder, "--input", queries)
    assert answers["remaining"]["queries"] == 1
    assert_error(
        run("predict", "--model", folder, "--input", queries),
        1,
        "Privacy budget exhausted: 2 answers requested, 1 of 3 left",
    )
    with Ledger(Path("ledger.sqlite")) as ledger:
        deploy(ledger, load_models([str(folder)]), accept_weak=True)
    result = run("predict", "--model", folder, "--input", queries)
    assert_error(result, 1, "moved to the ledger", "ask the service")
    assert "left" not in result[2], "a budget that moved is not called spent"


def test_answers_are_printed_whatever_the_names_of_the_classes() -> None:
    table, queries, folder = Path("people.csv"), Path("queries.csv"), "votes"
    names = ("[/x]", "[low]")
    table.write_text("age,income\n" + "".join(f"{age},{names[age > 50]}\n" for age in range(1, 100)))
    queries.write_text("age\n10\n95\n")
    schema = f'label = "income"\nclasses = ["{names[0]}", "{names[1]}"]\nbounds = {{ age = [0, 100] }}\n'
    table.with_suffix(".toml").write_text(schema)
    options = ("--teachers", 3, "--queries", 4, "--epsilon", 4000, "--declared-size", 60)
    assert run("train", "teachers", table, *options, "-o", folder)[0] == 0
    predict = ("predict", "--model", folder, "--input", queries)
    labels = document(*predict)["labels"]
    out = printed(*predict)
    assert [line.split("│")[2].strip() for line in out.splitlines() if line.startswith("│")] == labels

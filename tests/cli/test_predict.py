from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quietmax.ledger import Ledger
from quietmax.server.deployment import deploy
from quietmax.server.repository import load_models
from tests.cli.conftest import Run, assert_error, json_of, output_of
from tests.cli.own_table import DECLARED


def test_the_guarantee_and_its_status_are_always_printed(run: Run, tmp_path: Path) -> None:
    model, queries = tmp_path / "model", tmp_path / "queries.npz"
    train = ("train", "network", "mnist-5k", "--records", 600, "--epochs", 3, "-o", model, "--json")
    assert json.loads(run(*train)[1])["test_accuracy"] > 0.4
    np.savez(queries, features=np.random.default_rng(0).random((5, 784), dtype=np.float32))
    predict = ("predict", "--model", model, "--input", queries, "--epsilon", 1)
    answer = json_of(run(*predict, "--json"))
    assert answer["guarantee"]["status"] == "refuted"
    assert np.array(answer["probabilities"]).sum(1) == pytest.approx(np.ones(5))
    assert answer["spent"] == 5
    assert answer["remaining"]["queries"] == 0
    for mechanism in ("algorithm1", "algorithm1-laplace"):
        out = output_of(run(*predict, "--mechanism", mechanism))
        assert "Guarantee: refuted" in out


def test_an_ordinary_network_answers_with_the_names_of_its_classes_and_prints_the_first_answers(
    run: Run, network: Path, queries: Path, tmp_path: Path
) -> None:
    predict = ("predict", "--model", network, "--epsilon", 1000, "--input")
    answer = json_of(run(*predict, queries, "--json"))
    assert answer["labels"] == ["lo", "hi"]
    assert answer["guarantee"]["status"] == "conditional"
    many = tmp_path / "many.csv"
    many.write_text("age,sex\n" + "".join(f"{age},F\n" for age in range(18, 88)))
    assert "The first 20 of 70 answers; --json prints all." in run(*predict, many)[1]
    assert len(json_of(run(*predict, many, "--json"))["labels"]) == 70


def test_seeded_noise_is_repeatable_and_named_in_the_guarantee(
    run: Run, network: Path, queries: Path
) -> None:
    def predict() -> Any:
        options = ("--model", network, "--input", queries, "--epsilon", 1, "--seeded", 7, "--json")
        return json_of(run("predict", *options))

    first, second = predict(), predict()
    assert first["probabilities"] == second["probabilities"]
    assert first["guarantee"]["parameters"]["noise_source"] == {"source": "seeded", "exact": False, "seed": 7}


def test_an_ordinary_network_answers_only_through_its_mechanism_and_under_a_budget(
    run: Run, network: Path, queries: Path
) -> None:
    predict = ("predict", "--model", network, "--input", queries)
    assert_error(run(*predict, "--mechanism", "gaussian", "--epsilon", 1), 2, "Valid: algorithm1,")
    assert_error(run(*predict), 2, "--epsilon is required")


def test_a_private_model_refuses_the_options_of_ordinary_networks(
    run: Run, head: Path, queries: Path
) -> None:
    for option in (("--epsilon", 5), ("--seeded", 5), ("--mechanism", "algorithm1")):
        result = run("predict", "--model", head, "--input", queries, *option)
        assert_error(result, 2, f"{option[0]} cannot be used with a private model")


def test_teachers_answer_until_the_budget_is_spent_or_moves_to_a_ledger(
    run: Run, people: Path, queries: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "votes"
    options = ("--queries", 3, "--epsilon", 30, "--declared-size", 480)
    out = output_of(run("train", "teachers", people, *DECLARED, *options, "-o", folder))
    assert "Guarantee: proven" in out
    answers = json_of(run("predict", "--model", folder, "--input", queries, "--json"))
    assert answers["remaining"]["queries"] == 1
    assert_error(
        run("predict", "--model", folder, "--input", queries),
        1,
        "Privacy budget exhausted: 2 answers requested, 1 of 3 left",
    )
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        deploy(ledger, load_models([str(folder)]))
    result = run("predict", "--model", folder, "--input", queries)
    assert_error(result, 1, "moved to the ledger", "ask the service")
    assert "left" not in result[2], "a budget that moved is not called spent"


def test_answers_are_printed_whatever_the_names_of_the_classes(run: Run, tmp_path: Path) -> None:
    table, queries, folder = tmp_path / "people.csv", tmp_path / "queries.csv", tmp_path / "votes"
    names = ("[/x]", "[low]")
    table.write_text("age,income\n" + "".join(f"{age},{names[age > 50]}\n" for age in range(1, 100)))
    queries.write_text("age\n10\n95\n")
    schema = f'label = "income"\nclasses = ["{names[0]}", "{names[1]}"]\nbounds = {{ age = [0, 100] }}\n'
    table.with_suffix(".toml").write_text(schema)
    options = ("--teachers", 3, "--queries", 4, "--epsilon", 4000, "--declared-size", 60)
    assert run("train", "teachers", table, *options, "-o", folder)[0] == 0
    predict = ("predict", "--model", folder, "--input", queries)
    labels = json_of(run(*predict, "--json"))["labels"]
    out = output_of(run(*predict))
    assert [line.split("│")[2].strip() for line in out.splitlines() if line.startswith("│")] == labels

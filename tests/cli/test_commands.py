from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quietmax.cli import COMMANDS, loaded, spread_lists


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small network trained on the embedded digits by the command itself."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    command = [sys.executable, "-c", "from quietmax.cli import main; main()", "train", "mnist-5k"]
    done = subprocess.run(
        [*command, "--records", "600", "--epochs", "3", "--output", str(folder), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["test_accuracy"] > 0.4
    return folder


@pytest.fixture
def queries(tmp_path):
    path = tmp_path / "queries.npz"
    np.savez(path, features=np.random.default_rng(0).random((5, 784), dtype=np.float32))
    return path


def refused(result: tuple[int, str, str], *words: str) -> None:
    """One clear sentence on stderr, exit code 1, nothing on stdout."""
    code, out, err = result
    assert code == 1, err
    assert out == ""
    assert err.startswith("quietmax: ")
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err
    for word in words:
        assert word in err


def test_sensitivity_prints_exactly_the_seven_quantities(run):
    code, out, _ = run(
        "sensitivity", "--features", 784, "--hidden", 128, "--classes", 10, "--records", 10000, "--json"
    )
    assert code == 0
    values = json.loads(out)
    assert list(values) == [
        "rho",
        "weights_l2",
        "weight",
        "logit",
        "probability",
        "probability_untruncated",
        "oaro",
    ]
    assert round(values["rho"], 4) == 2.2274
    assert round(values["logit"], 4) == 0.3577
    assert round(values["oaro"], 4) == 1.9845


def test_sensitivity_of_a_trained_model(run, model):
    code, out, _ = run("sensitivity", "--model", model, "--json")
    assert code == 0
    assert json.loads(out)["rho"] == pytest.approx(2.2274, abs=5e-5)
    code, out, _ = run("sensitivity", "--model", model)
    assert code == 0
    assert "published" in out


def test_sensitivity_needs_a_shape_or_a_model(run, model):
    refused(run("sensitivity", "--features", 784), "--classes")
    refused(run("sensitivity", "--features", 784, "--model", model), "not both")


def test_datasets_lists_all_twelve(run):
    code, out, _ = run("datasets", "--json")
    assert code == 0
    names = [entry["name"] for entry in json.loads(out)]
    assert len(names) == 12
    assert "mnist-5k" in names
    code, out, _ = run("datasets")
    assert code == 0
    assert "location" in out


def test_the_tables_print_paper_ours_and_difference(run):
    for table in ("sensitivity-table", "correlations"):
        code, out, _ = run("reproduce", table, "--json")
        assert code == 0
        assert {"paper", "ours", "difference", "agrees"} <= set(json.loads(out)[0])
        code, out, _ = run("reproduce", table)
        assert code == 0
        assert "difference" in out
    code, out, _ = run("reproduce", "sensitivity-table", "--datasets", "mnist", "adult", "--json")
    assert {row["dataset"] for row in json.loads(out)} == {"mnist", "adult"}


def test_the_accuracy_table_runs_on_real_data(run, real_data):
    code, out, _ = run(
        "reproduce",
        "accuracy-table",
        "--datasets",
        "location",
        "--repeats",
        1,
        "--data-dir",
        real_data,
        "--json",
    )
    assert code == 0
    assert [row["quantity"] for row in json.loads(out)][-1] == "convexified test accuracy"


def test_predict_always_prints_the_guarantee_with_its_status(run, model, queries):
    code, out, _ = run("predict", "--model", model, "--input", queries, "--epsilon", 1, "--json")
    assert code == 0
    answer = json.loads(out)
    assert answer["guarantee"]["status"] == "refuted"
    assert np.array(answer["probabilities"]).sum(1) == pytest.approx(np.ones(5))
    assert answer["spent"] == 5
    assert answer["remaining"]["queries"] == 0
    for noise in ("gaussian", "laplace"):
        code, out, _ = run("predict", "--model", model, "--input", queries, "--epsilon", 1, "--noise", noise)
        assert code == 0
        assert "Guarantee: refuted" in out


def test_seeded_noise_is_asked_for_by_name_and_shown(run, model, queries):
    def ask():
        code, out, _ = run(
            "predict", "--model", model, "--input", queries, "--epsilon", 1, "--seeded", 7, "--json"
        )
        assert code == 0
        return json.loads(out)

    first, second = ask(), ask()
    assert first["probabilities"] == second["probabilities"]
    assert first["guarantee"]["parameters"]["noise_source"] == {"source": "seeded", "exact": False, "seed": 7}


def test_predict_refuses_more_queries_than_the_budget_is_for(run, model, queries):
    refused(
        run("predict", "--model", model, "--input", queries, "--epsilon", 1, "--queries", 3), "5 answers", "3"
    )


def test_train_writes_a_model_once_unless_told_to_overwrite(run, model):
    before = (model / "weights.safetensors").read_bytes()
    arguments = ("train", "mnist-5k", "--records", 300, "--epochs", 1, "--output", model)
    refused(run(*arguments), "exists already")
    assert (model / "weights.safetensors").read_bytes() == before
    (copy := model.parent / "copy").mkdir()
    refused(
        run("train", "mnist-5k", "--records", 300, "--epochs", 1, "--overwrite", "--output", copy),
        "not a Quietmax",
    )
    assert list(copy.iterdir()) == []
    other = model.parent / "other"
    for more in ((), ("--overwrite", "--loss", "cross-entropy")):
        code, out, _ = run("train", "mnist-5k", "--records", 300, "--epochs", 1, "--output", other, *more)
        assert code == 0
        assert "test accuracy" in out
    assert json.loads((other / "model.json").read_text())["settings"]["loss"] == {"name": "cross-entropy"}
    assert sorted(path.name for path in model.parent.iterdir()) == ["copy", "model", "other"]


def test_alpha_can_be_searched_for(run):
    code, out, _ = run("train", "mnist-5k", "--records", 300, "--epochs", 1, "--alpha", "search", "--json")
    assert code == 0
    result = json.loads(out)
    assert len(result["alpha_search"]) == 20
    assert result["alpha"] in [trial["alpha"] for trial in result["alpha_search"]]


def test_an_own_table_is_trained_on_and_asked(run, tmp_path):
    rows = ["age,sex,income"] + [
        f"{20 + n % 60},{'FM'[n % 2]},{'hi' if n % 60 > 30 else 'lo'}" for n in range(200)
    ]
    table = tmp_path / "people.csv"
    table.write_text("\n".join(rows))
    declared = ["--label", "income", "--classes", "lo,hi", "--bounds", "age=0:100", "--categories", "sex=F,M"]
    folder = tmp_path / "model"
    code, out, _ = run(
        "train", table, *declared, "--epochs", 60, "--learning-rate", 0.01, "-o", folder, "--json"
    )
    assert code == 0
    assert json.loads(out)["test_accuracy"] > 0.9
    asked = tmp_path / "asked.csv"
    asked.write_text("age,sex\n25,F\n75,M\n")
    code, out, _ = run("predict", "--model", folder, "--input", asked, "--epsilon", 1000, "--json")
    assert code == 0
    answer = json.loads(out)
    assert answer["labels"] == ["lo", "hi"]
    assert answer["guarantee"]["status"] == "conditional"
    refused(run("train", table, "--label", "income", "--classes", "lo,hi"), "age")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "mnits"], ["mnist"]),
        (["train", "absent.csv", "--label", "y"], ["absent.csv"]),
        (["train", "mnist-5k", "--records", "4000"], ["4000"]),
        (["train", "mnist-5k", "--alpha", "-1"], ["alpha"]),
        (["train", "mnist-5k", "--alpha", "many"], ["alpha"]),
        (["train", "mnist-5k", "--loss", "hinge"], ["hinge"]),
        (["train", "mnist-5k", "--loss", "quadratic", "--alpha", "1"], ["alpha"]),
        (["train", "mnist-5k", "--activation", "step"], ["step"]),
        (["train", "mnist-5k", "--averaged-over", "classes"], ["averaged_over"]),
        (["train", "mnist-5k", "--label", "y"], ["label"]),
        (["train", "people.csv", "--bounds", "age"], ["column=low:high"]),
        (["train", "people.csv", "--classes", "yes"], ["fewer than two classes"]),
        (["train", "people.csv", "--classes", "1"], ["fewer than two classes"]),
        (["train", "people.csv", "--categories", "sex"], ["column=first,second"]),
        (["predict", "--model", "absent", "--input", "x.csv", "--epsilon", "1"], ["no model"]),
        (["reproduce", "sensitivity-table", "--datasets", "mnits"], ["mnits"]),
        (
            ["reproduce", "accuracy-table", "--datasets", "mnist", "--repeats", "0", "--data-dir", "."],
            ["repeats"],
        ),
    ],
    ids=lambda value: " ".join(value),
)
def test_bad_input_is_one_sentence_and_exit_code_1(run, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    refused(run(*arguments), *words)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder_is_one_sentence(run, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    arguments = ("train", "mnist-5k", "--records", 300, "--epochs", 0, "--output", blocked / "model")
    refused(run(*arguments), "could not be written")
    assert blocked.read_text() == "in the way"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["trian"], "No such command 'trian'; did you mean 'train'; see 'quietmax --help'."),
        (["train"], "Missing argument 'data'; see 'quietmax train --help'."),
        (["train", "mnist-5k", "--nonsense"], "No such option: --nonsense"),
        (["predict", "--model"], "Option '--model' requires an argument; see 'quietmax --help'."),
        (["predict", "--epsilon", "x"], "Invalid value for '--epsilon'"),
        (["ledger", "key", "create"], "see 'quietmax ledger key create --help'."),
    ],
)
def test_wrong_usage_is_one_sentence_that_names_the_help(run, arguments, sentence):
    refused(run(*arguments), sentence)


@pytest.mark.parametrize("arguments", [[], ["ledger"], ["ledger", "key"]])
def test_a_command_without_its_subcommand_shows_the_help(run, arguments):
    code, out, err = run(*arguments)
    assert (code, err) == (1, "")
    assert f"Usage: {' '.join(['quietmax', *arguments])} [OPTIONS] COMMAND" in out


def test_an_interruption_is_exit_code_130(run, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("quietmax.cli.datasets.command", interrupted)
    code, out, err = run("datasets")
    assert (code, out) == (130, "")
    assert "Traceback" not in err


def test_every_command_has_help_with_an_example(run):
    def walk(group, path):
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from walk(command, [*path, name])
            else:
                yield [*path, name]

    commands = []
    for name in COMMANDS:
        command = loaded(name)
        commands += walk(command, [name]) if hasattr(command, "commands") else [[name]]
    assert len(commands) >= 8
    for command in commands:
        code, out, _ = run(*command, "--help")
        assert code == 0
        assert f"quietmax {' '.join(command)}" in " ".join(out.split()), command
        if command != ["demo"]:
            assert "--json" in out


def test_the_version_is_told(run):
    code, out, _ = run("--version")
    assert code == 0
    assert out.startswith("quietmax ")


def test_several_values_may_follow_one_option():
    assert spread_lists(["a", "--datasets", "x", "y", "--json", "z"]) == [
        "a", "--datasets", "x", "--datasets", "y", "--json", "z",
    ]  # fmt: skip


def test_the_demo_tells_the_whole_story_as_json(run, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", {**os.environ, "QUIETMAX_DATA": ""})
    code, out, _ = run("demo", "--json", "--output", str(tmp_path / "demo"))
    assert code == 0
    found = json.loads(out)
    assert found["accuracy"]["convexified_test_acc"] > 0.85
    assert found["sensitivity"]["rho"] == pytest.approx(2.2274, abs=5e-5)
    assert found["answer"]["guarantee"]["status"] == "refuted"
    assert found["private_head"]["guarantee"]["status"] == "proven"
    assert found["private_head"]["test_acc"] > 0.9
    service = found["service"]
    assert service["answers_left"] == list(range(len(service["labels"])))[::-1]
    assert "pays for 0 more" in service["refusal"]
    assert service["spent_fraction"] == 1
    assert service["journal_is_sound"]
    assert "served with fresh noise" in found["attack"]["about"]
    results = {(line["method"], line["epsilon"]): line for line in found["attack"]["results"]}
    assert results["plain", None]["status"] == "none"
    assert results["algorithm1-gaussian", 1.0]["status"] == "refuted"
    assert abs(results["head", 1.0]["leakage_shadow"]) < 0.2
    page = Path(found["attack"]["report"])
    assert page.parent == tmp_path / "demo"
    assert "Privacy and utility on mnist-5k" in page.read_text(encoding="utf-8")

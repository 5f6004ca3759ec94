"""`quietmax compare` from the command line to the report, on a tiny grid."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from typer.testing import CliRunner, Result

from quietmax.cli import app
from quietmax.cli import compare as compare_module
from quietmax.experiments import methods as methods_module
from quietmax.experiments import report, runner
from quietmax.experiments.report import OWNER_ONLY, SEEDED_NOISE
from quietmax.models.features import UnitNorm
from tests.experiments.same_process import start_in_this_process


@pytest.fixture(autouse=True)
def same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting processes takes seconds."""
    monkeypatch.setattr(runner, "start_workers", start_in_this_process)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


TINY = ("--records", 300, "--shadows", 2, "--epochs", 3, "--attack-epochs", 3)


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "people.csv"
    rows = ["age,income"] + [
        f"{20 + number % 50}.{number},{'yes' if number % 3 else 'no'}" for number in range(400)
    ]
    path.write_text("\n".join(rows) + "\n")
    return path


def test_a_comparison_of_a_table_is_complete_and_a_second_run_computes_nothing(
    people: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "write_figures", lambda *_: [])  # slow, and tested below
    arguments = (
        "compare", people, "--label", "income", "--classes", "no,yes", "--bounds", "age=0:100",
        "--shadows", 2, "--epochs", 3, "--attack-epochs", 3, "--epsilons", "1", "--queries", "1,10",
        "--attacks", "shadow", "--attacks", "threshold", "--output", tmp_path / "out", "--json",
    )  # fmt: skip
    first = run(*arguments)
    assert first.exit_code == 0, first.output
    found = json.loads(first.stdout)
    by_method: dict[str, list[dict[str, Any]]] = {}
    for line in found["results"]:
        by_method.setdefault(line["method"], []).append(line)
    assert set(by_method) == set(compare_module.DEFAULT_METHODS)
    assert len(by_method["teachers"]) == 2  # two numbers of answers
    assert len(by_method["head"]) == 1
    assert {line["status"] for line in by_method["algorithm1-laplace"]} == {"conditional"}  # two classes
    # The size of an own table is taken as public; version 0.1 called this proven.
    assert {line["status"] for line in by_method["head"]} == {"conditional"}
    assert found["about"] == f"{SEEDED_NOISE} {OWNER_ONLY}"
    assert OWNER_ONLY in (tmp_path / "out" / "NOT-FOR-PUBLICATION.txt").read_text()
    for line in found["results"]:
        assert 0 <= line["test_accuracy"] <= 1
        assert -1 <= line["leakage_shadow"] <= 1
        assert -1 <= line["leakage_threshold"] <= 1
    again = json.loads(run(*arguments).stdout)
    assert again["computed"] == 0
    assert again["results"] == found["results"]


def test_inferred_bounds_make_every_guarantee_conditional(people: Path, tmp_path: Path) -> None:
    done = run(
        "compare", people, "--label", "income", "--classes", "no,yes", "--infer", "--shadows", 2, "--epochs", 2,
        "--attack-epochs", 2, "--epsilons", "1", "--methods", "head,dpsgd", "--output", tmp_path / "out", "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert {line["status"] for line in json.loads(done.stdout)["results"]} == {"conditional"}
    assert "For the owner" in (tmp_path / "out" / "report.html").read_text()


def test_the_report_is_one_file_that_fetches_nothing_and_names_what_has_no_guarantee(tmp_path: Path) -> None:
    out = tmp_path / "out"
    methods = ("--epsilons", "1", "--methods", "plain,algorithm1-laplace")
    done = run("compare", "mnist-5k", *TINY, *methods, "--output", out)
    assert done.exit_code == 0, done.output
    page = (out / "report.html").read_text()
    without_namespace = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|src=|@import|url\(", without_namespace)
    assert "no guarantee" in page
    assert SEEDED_NOISE in page
    assert SEEDED_NOISE in " ".join(done.output.split())
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert all(line["dashed"] for figure in json.loads(data[1]) for line in figure["lines"])
    with (out / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    table = pyarrow.parquet.read_table(out / "results.parquet").to_pylist()
    assert (
        [line["method"] for line in lines]
        == [line["method"] for line in table]
        == ["plain", "algorithm1-laplace"]
    )
    assert float(lines[1]["test_accuracy"]) == pytest.approx(table[1]["test_accuracy"], rel=1e-5)
    assert (out / "figures" / "mnist-5k-leakage-shadow.pdf").read_bytes().startswith(b"%PDF")
    assert (out / "figures" / "mnist-5k-leakage-shadow.png").read_bytes().startswith(b"\x89PNG")


def test_a_failed_trial_is_named_the_others_are_reported_and_the_exit_code_is_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Any:
        return 1 / 0

    broken = methods_module.Method("broken", "broken", "proven", fail)
    known = {**methods_module.methods(), "broken": broken}
    monkeypatch.setattr(methods_module, "methods", lambda: known)
    methods = ("--epsilons", "1", "--methods", "plain,broken")
    done = run("compare", "mnist-5k", *TINY, *methods, "--output", tmp_path / "out")
    assert done.exit_code == 1
    assert "failed: mnist-5k, broken, epsilon 1" in done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert "Failed trials: 1" in (tmp_path / "out" / "report.html").read_text()
    assert "plain" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "data set 'nowhere'"),
        (["mnist-5k", "--methods", "heed"], "did you mean 'head'"),
        (["mnist-5k", "--epsilons", "many"], "--epsilons must be positive numbers"),
        (["mnist-5k", "--epsilons", "-1"], "--epsilons must be positive numbers"),
        (["mnist-5k", "--queries", "1.5"], "--queries must be integers"),
        (["mnist-5k", "--attacks", "telepathy"], "attack 'telepathy'"),
        (["mnist-5k", "--attacks", "lira", "--shadows", "1"], "--shadows must be at least 2"),
        (["mnist-5k", "--label", "y"], "do not apply to the data set 'mnist-5k'"),
        (
            ("mnist-5k", "--methods", "head,published-rdp", "--epsilons", "1", "--epsilons", "3"),
            "(0.01, 0.05, 0.1, 0.5, 1, 5, 10, 50, 100, 500, 1000), got 3",
        ),
    ],
)
def test_invalid_options_are_errors_before_anything_is_trained(
    arguments: list[object], words: str, tmp_path: Path
) -> None:
    done = run("compare", *arguments, "--output", tmp_path / "out")
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


def test_rmia_queries_records_of_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        methods_module, "default_features", lambda *_: UnitNorm()
    )  # those of images take long
    arguments = (
        "--attacks",
        "rmia-offline",
        "--methods",
        "head",
        "--epsilons",
        "1",
        "--output",
        tmp_path / "out",
    )
    done = run("compare", "mnist-5k", *TINY, *arguments, "--json")
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["results"]
    assert -1 <= row["leakage_rmia-offline"] <= 1


def test_a_table_with_persons_is_compared_on_its_holdout_by_persons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "write_figures", lambda *_: [])
    table = tmp_path / "visits.csv"
    rows = [
        f"p{number // 3},{20 + number % 50}.{number},{'yes' if number % 2 else 'no'}" for number in range(360)
    ]
    table.write_text("who,age,income\n" + "\n".join(rows) + "\n")
    declared = ("--label", "income", "--classes", "no,yes", "--bounds", "age=0:100", "--person", "who")
    quick = (
        "--shadows",
        8,
        "--epochs",
        2,
        "--attack-epochs",
        2,
        "--epsilons",
        "1",
        "--methods",
        "plain,head",
    )
    done = run(
        "compare", table, *declared, *quick, "--attacks", "shadow,lira,rmia", "--holdout", "0.25",
        "--output", tmp_path / "out", "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    head = next(line for line in json.loads(done.stdout)["results"] if line["method"] == "head")
    assert {"leakage_shadow", "leakage_lira", "leakage_rmia"} <= set(head)
    assert "90 training persons" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--records", 100), "--holdout is the share of a table"),
        (("--holdout", 0), "--holdout must be above 0 and below 1"),
    ],
)
def test_a_table_is_split_by_its_holdout_only(
    people: Path, tmp_path: Path, options: tuple[object, ...], words: str
) -> None:
    declared = ("--label", "income", "--classes", "no,yes", "--bounds", "age=0:100")
    done = run("compare", people, *declared, *options, "--output", tmp_path / "out")
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.split())

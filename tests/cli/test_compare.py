"""`quietmax compare` and `quietmax reproduce` end to end on a tiny grid: tables, report, restart, failures."""

from __future__ import annotations

import csv
import json
import re

import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from quietmax.cli import _grids as grids
from quietmax.cli import app, reproduce
from quietmax.cli import compare as compare_module
from quietmax.errors import InvalidInput
from quietmax.experiments.grid import Effort
from quietmax.experiments.profiles import Work
from quietmax.experiments.report import OWNER_ONLY, SEEDED_NOISE
from quietmax.experiments.runner import Where
from quietmax.experiments.workers import Outcome, outcome_of


class SameProcess:
    """A crew in the test's own process, as starting others takes seconds."""

    workers = 1

    def __init__(self, make):
        self._compute, self._cell = make(), None

    def give(self, _, cell):
        self._cell = cell

    def next(self):
        return Outcome(0, *outcome_of(self._compute, self._cell))

    def stop(self):
        pass


@pytest.fixture(autouse=True)
def same_process(monkeypatch):
    monkeypatch.setattr(Where, "crew", lambda _, make: SameProcess(make))


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


TINY = ("--records", 300, "--shadows", 2, "--epochs", 3, "--attack-epochs", 3)


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "people.csv"
    rows = ["age,income"] + [
        f"{20 + number % 50}.{number},{'yes' if number % 3 else 'no'}" for number in range(400)
    ]
    path.write_text("\n".join(rows) + "\n")
    return path


def test_a_comparison_of_an_own_table_is_complete_and_a_second_run_computes_nothing(people, tmp_path):
    arguments = (
        "compare", people, "--label", "income", "--classes", "no,yes", "--bounds", "age=0:100",
        "--shadows", 2, "--epochs", 3, "--attack-epochs", 3, "--epsilons", "1", "--queries", "1,10",
        "--attacks", "shadow", "--attacks", "threshold", "--output", tmp_path / "out", "--json",
    )  # fmt: skip
    first = run(*arguments)
    assert first.exit_code == 0, first.output
    found = json.loads(first.stdout)
    by_method = {}
    for line in found["results"]:
        by_method.setdefault(line["method"], []).append(line)
    assert set(by_method) == set(compare_module.DEFAULT_METHODS)
    assert len(by_method["teachers"]) == 2  # two numbers of answers
    assert len(by_method["head"]) == 1
    assert {line["status"] for line in by_method["algorithm1-laplace"]} == {"conditional"}  # two classes
    assert {line["status"] for line in by_method["head"]} == {"proven"}
    assert found["about"] == f"{SEEDED_NOISE} {OWNER_ONLY}"
    assert OWNER_ONLY in (tmp_path / "out" / "NOT-FOR-PUBLICATION.txt").read_text()
    for line in found["results"]:
        assert 0 <= line["test_accuracy"] <= 1
        assert -1 <= line["leakage_shadow"] <= 1
        assert -1 <= line["leakage_threshold"] <= 1
    again = json.loads(run(*arguments).stdout)
    assert again["computed"] == 0
    assert again["results"] == found["results"]


def test_bounds_read_off_the_records_make_every_guarantee_conditional(people, tmp_path):
    done = run(
        "compare", people, "--label", "income", "--classes", "no,yes", "--infer", "--shadows", 2, "--epochs", 2,
        "--attack-epochs", 2, "--epsilons", "1", "--methods", "head,dpsgd", "--output", tmp_path / "out", "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert {line["status"] for line in json.loads(done.stdout)["results"]} == {"conditional"}
    assert "For the owner" in (tmp_path / "out" / "report.html").read_text()


def test_the_report_is_one_file_that_fetches_nothing_and_names_what_has_no_guarantee(tmp_path):
    out = tmp_path / "out"
    done = run(
        "compare",
        "mnist-5k",
        *TINY,
        "--epsilons",
        "1",
        "--methods",
        "plain,algorithm1-laplace",
        "--output",
        out,
    )
    assert done.exit_code == 0, done.output
    page = (out / "report.html").read_text()
    without_namespace = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|src=|@import|url\(", without_namespace)
    assert "no guarantee" in page
    assert SEEDED_NOISE in page
    assert SEEDED_NOISE in " ".join(done.output.split())
    panels = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert all(line["dashed"] for panel in panels for line in panel["lines"])
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


def test_a_failing_cell_is_named_the_rest_is_reported_and_the_exit_code_is_1(tmp_path, monkeypatch):
    from quietmax.experiments import methods

    broken = methods.Method("broken", "broken", "proven", lambda *_: 1 / 0)
    known = {**methods.methods(), "broken": broken}
    monkeypatch.setattr(methods, "methods", lambda: known)
    done = run(
        "compare",
        "mnist-5k",
        *TINY,
        "--epsilons",
        "1",
        "--methods",
        "plain,broken",
        "--output",
        tmp_path / "out",
    )
    assert done.exit_code == 1
    assert "failed: mnist-5k, broken, epsilon 1" in done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert "1 cells failed" in (tmp_path / "out" / "report.html").read_text()
    assert "plain" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "no data set"),
        (["mnist-5k", "--methods", "heed"], "did you mean 'head'"),
        (["mnist-5k", "--epsilons", "many"], "numbers"),
        (["mnist-5k", "--epsilons", "-1"], "positive"),
        (["mnist-5k", "--queries", "1.5"], "whole"),
        (["mnist-5k", "--attacks", "telepathy"], "no attack"),
        (["mnist-5k", "--attacks", "lira", "--shadows", "1"], "--shadows 2"),
        (["mnist-5k", "--label", "y"], "leave them out"),
        (
            ("mnist-5k", "--methods", "head,published-rdp", "--epsilons", "1", "--epsilons", "3"),
            "0.01, 0.05, 0.1, 0.5, 1, 5, 10, 50, 100, 500, 1000), but --epsilons holds 3; choose",
        ),
        (
            ("mnist-5k", "--records", 300, "--attacks", "lira,rmia"),
            "rmia also asks for records that are neither",
        ),
        (
            ("mnist-5k", "--records", 300, "--attacks", "rmia-offline", "--methods", "plain,head"),
            "which head do not answer",
        ),
    ],
)
def test_bad_options_are_refused_in_a_sentence_before_anything_is_trained(arguments, words, tmp_path):
    done = run("compare", *arguments, "--output", tmp_path / "out")
    assert isinstance(done.exception, InvalidInput)
    assert words in str(done.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("records", "methods"), [(2500, "head"), (300, "plain,algorithm1-laplace")], ids=str)
def test_rmia_is_taken_where_every_method_answers_what_it_asks(records, methods, monkeypatch):
    """2,500 training and as many test digits leave none of the 5,000 over."""
    computed = []
    monkeypatch.setattr(compare_module, "compute", lambda cells, *_, **__: computed.extend(cells))
    run("compare", "mnist-5k", "--records", records, "--attacks", "rmia", "--methods", methods)
    assert {cell.method for cell in computed} == set(methods.split(","))


def test_everything_is_reproduced_on_a_tiny_profile_and_an_interrupt_is_a_sentence(tmp_path, monkeypatch):
    from quietmax.experiments import profiles

    tiny = Work(Effort(200, 2, epochs=2, attack_epochs=2), repeats=1, sweeps=0, private=1)
    monkeypatch.setattr(profiles, "work", lambda *_: tiny)
    monkeypatch.setattr(profiles, "EPSILONS", (1.0, 10.0))
    monkeypatch.setattr(profiles, "LIKE_FOR_LIKE_EPSILONS", (1.0,))
    monkeypatch.setattr(reproduce, "estimated_seconds", lambda cells, **_: dict.fromkeys(cells, 3600.0))
    arguments = ("reproduce", "all", "--datasets", "mnist-5k", "--output", tmp_path / "out")
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    for words in (
        "core hours",
        "Finding 5: CONFIRMED",
        "Many answers",
        "Sensitivities",
        "report.html",
        "0 failed",
    ):
        assert words in done.stdout, words
    found = json.loads(run(*arguments, "--json").stdout)
    assert found["computed"] == 0
    assert len(found["findings"]) == 5
    assert {row["reading"] for row in found["multi_query"]} == {
        "published",
        "published-example",
        "any number",
    }
    for part in ("figures", "findings", "multi-query"):
        done = run("reproduce", part, *arguments[2:], "--json")
        assert done.exit_code == 0, done.output
        json.loads(done.stdout)
    assert json.loads(run(*arguments, "--estimate", "--json").stdout)["quick"] > 0

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(grids, "run_cells", interrupted)
    done = run(*arguments)
    assert done.exit_code == 1
    assert "goes on from there" in done.stderr

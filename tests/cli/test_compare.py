"""`quietmax compare` from the command line to the report, on a tiny grid."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from quietmax.cli.experiments import DEFAULT_METHODS
from quietmax.experiments import methods as methods_module
from quietmax.experiments import report, runner
from quietmax.experiments.report import OWNER_ONLY, SEEDED_NOISE
from tests.cli.conftest import Result, run
from tests.experiments.toy_grid import start_in_this_process

TINY = "mnist-5k --records 300 --shadows 2 --epochs 3 --attack-epochs 3 --epsilons 1"


@pytest.fixture(autouse=True)
def same_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Starting processes takes seconds."""
    monkeypatch.setattr(runner, "_start_workers", start_in_this_process)
    monkeypatch.chdir(tmp_path)


def compare(words: str, **files: Path) -> Result:
    """Run a comparison into the folder ``out``."""
    return run("compare", *words.format(**files).split(), "--output", "out")


def rows_of(words: str, **files: Path) -> list[dict[str, Any]]:
    code, out, err = compare(f"{words} --json", **files)
    assert code == 0, err
    found: list[dict[str, Any]] = json.loads(out)["results"]
    return found


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 rows of 134 persons."""
    path = tmp_path_factory.mktemp("table") / "people.csv"
    rows = [f"p{row // 3},{20 + row % 50}.{row},{'yes' if row % 3 else 'no'}" for row in range(400)]
    path.write_text("\n".join(["who,age,income", *rows]) + "\n")
    declared = 'label = "income"\nclasses = ["no", "yes"]\nbounds = { age = [0, 100] }\n'
    path.with_suffix(".toml").write_text(declared)
    return path


def test_a_comparison_of_a_table_is_complete_and_a_second_run_computes_nothing(
    people: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "write_figures", lambda *_: [])  # slow, and tested below
    Path("facts.toml").write_text('ignore = ["who"]\n' + people.with_suffix(".toml").read_text())
    words = (
        "{people} --schema facts.toml --shadows 2 --epochs 3 --attack-epochs 3 --epsilons 1 --queries 1 --queries 10 "
        "--attacks shadow threshold --json"
    )
    code, out, err = compare(words, people=people)
    assert code == 0, err
    found = json.loads(out)
    by_method: dict[str, list[dict[str, Any]]] = {}
    for line in found["results"]:
        by_method.setdefault(line["method"], []).append(line)
        assert 0 <= line["test_accuracy"] <= 1
        assert -1 <= line["leakage_shadow"] <= 1
        assert -1 <= line["leakage_threshold"] <= 1
    assert set(by_method) == set(DEFAULT_METHODS)
    assert len(by_method["teachers"]) == 2  # two numbers of answers
    assert len(by_method["head"]) == 1
    assert {line["status"] for line in by_method["algorithm1-laplace"]} == {"conditional"}  # two classes
    # The size of an own table is taken as public; version 0.1 called this proven.
    assert {line["status"] for line in by_method["head"]} == {"conditional"}
    assert found["about"] == f"{SEEDED_NOISE} {OWNER_ONLY}"
    assert OWNER_ONLY in Path("out/NOT-FOR-PUBLICATION.txt").read_text()
    again = json.loads(compare(words, people=people)[1])
    assert again["computed"] == 0
    assert again["results"] == found["results"]


def test_inferred_bounds_make_every_guarantee_conditional(people: Path) -> None:
    Path("draft.toml").write_text('label = "income"\nclasses = ["no", "yes"]\nignore = ["who"]\n')
    words = "{people} --schema draft.toml --infer --shadows 2 --epochs 2 --attack-epochs 2"
    rows = rows_of(f"{words} --epsilons 1 --methods head,dpsgd", people=people)
    assert {line["status"] for line in rows} == {"conditional"}
    assert "For the owner" in Path("out/report.html").read_text()


def test_the_report_is_one_file_that_fetches_nothing_and_names_what_has_no_guarantee() -> None:
    code, out, err = compare(f"{TINY} --methods plain,algorithm1-laplace")
    assert code == 0, err
    page = Path("out/report.html").read_text()
    without_namespace = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|src=|@import|url\(", without_namespace)
    assert "no guarantee" in page
    assert SEEDED_NOISE in page
    assert SEEDED_NOISE in " ".join(out.split())
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert all(line["dashed"] for figure in json.loads(data[1]) for line in figure["lines"])
    with Path("out/results.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [row["method"] for row in lines] == ["plain", "algorithm1-laplace"]
    for form, start in (("pdf", b"%PDF"), ("png", b"\x89PNG")):
        assert Path(f"out/figures/mnist-5k-leakage-shadow.{form}").read_bytes().startswith(start)


def test_a_failed_trial_is_named_the_others_are_reported_and_the_exit_code_is_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = methods_module.Method("broken", "broken", "proven", lambda *_: 1 / 0)  # type: ignore[arg-type,return-value]
    known = {**methods_module.methods(), "broken": broken}
    monkeypatch.setattr(methods_module, "methods", lambda: known)
    code, out, err = compare(f"{TINY} --methods plain,broken")
    assert code == 1
    assert "failed: mnist-5k, broken, epsilon 1" in err
    assert "ZeroDivisionError" in err
    assert "Failed trials: 1" in Path("out/report.html").read_text()
    assert "plain" in out


def test_a_table_with_persons_is_compared_on_its_holdout_by_persons(
    people: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "write_figures", lambda *_: [])
    words = "{people} --person who --shadows 8 --epochs 2 --attack-epochs 2 --epsilons 1"
    rows = rows_of(f"{words} --methods plain,head --attacks shadow,lira,rmia --holdout 0.25", people=people)
    head = next(row for row in rows if row["method"] == "head")
    assert {"leakage_shadow", "leakage_lira", "leakage_rmia"} <= set(head)
    assert "100 training persons" in Path("out/report.html").read_text()

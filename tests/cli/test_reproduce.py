"""`quietmax reproduce`: every command reads the same trials."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from quietmax.cli import app, reproduce
from quietmax.data import is_stand_in, readers
from quietmax.experiments import grid, inputs, report, runner
from quietmax.experiments.grid import Effort, Workload
from quietmax.experiments.paper import accuracy_table
from quietmax.experiments.results import write_trials
from quietmax.models.features import UnitNorm
from tests.experiments.made_up import the_papers_own
from tests.experiments.same_process import start_in_this_process


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_help_says_where_to_start() -> None:
    assert "Start with report" in run("reproduce", "--help").output


@pytest.fixture
def tiny_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile of one small repeat, run in this process."""
    tiny = Workload(Effort(200, 2, epochs=2, attack_epochs=2), repeats=1, dpsgd_repeats=0, proven_repeats=1)
    monkeypatch.setattr(grid, "workload", lambda *_: tiny)
    monkeypatch.setattr(grid, "EPSILONS", (1.0, 10.0))
    monkeypatch.setattr(grid, "LIKE_FOR_LIKE_EPSILONS", (1.0,))
    monkeypatch.setattr(runner, "estimated_seconds", lambda *_, **__: 3600.0)
    monkeypatch.setattr(runner, "start_workers", start_in_this_process)
    monkeypatch.setattr(inputs, "default_features", lambda *_: UnitNorm())  # those of images take long
    monkeypatch.setattr(report, "write_figures", lambda *_: [])  # slow, and tested with `compare`


def test_tables_show_the_papers_number_ours_and_the_difference() -> None:
    for table, part in (("sensitivity-table", None), ("correlations", "paper")):
        found = json.loads(run("reproduce", table, "--json").stdout)
        rows = found if part is None else found[part]
        assert {"paper", "ours", "difference", "agrees"} <= set(rows[0])
        done = run("reproduce", table)
        assert done.exit_code == 0
        assert "difference" in done.stdout
    rows = json.loads(run("reproduce", "sensitivity-table", "--datasets", "mnist,adult", "--json").stdout)
    assert {row["dataset"] for row in rows} == {"mnist", "adult"}


@pytest.mark.usefixtures("tiny_profile")
def test_all_runs_every_trial_and_the_other_commands_compute_nothing_more(tmp_path: Path) -> None:
    options = ("--datasets", "mnist-5k", "--output", tmp_path / "out")
    done = run("reproduce", "all", *options)
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
    found = json.loads(run("reproduce", "all", *options, "--json").stdout)
    assert found["computed"] == 0
    assert len(found["findings"]) == 5
    assert {row["analysis"] for row in found["multi_query"]} == {
        "published",
        "published-example",
        "any number",
    }
    stored = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "trials").rglob("*.json")}
    for part in ("accuracy-table", "figures", "findings", "multi-query"):
        done = run("reproduce", part, *options)
        assert done.exit_code == 0, done.output
        assert "0 trials computed" in done.stdout
        json.loads(run("reproduce", part, *options, "--json").stdout)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "trials").rglob("*.json")} == stored
    assert json.loads(run("reproduce", "all", *options, "--estimate", "--json").stdout)["quick"] > 0


@pytest.mark.usefixtures("tiny_profile")
def test_the_accuracy_table_compares_both_losses_and_the_leakage(tmp_path: Path, real_data: Path) -> None:
    options = ("--datasets", "location", "--data-dir", real_data, "--output", tmp_path, "--json")
    done = run("reproduce", "accuracy-table", *options)
    assert done.exit_code == 0, done.output
    assert [row["quantity"] for row in json.loads(done.stdout)] == [
        "convexified train accuracy",
        "convexified test accuracy",
        "convexified gap",
        "leakage, plain network",
        "oaro",
        "original train accuracy",
        "original test accuracy",
        "original gap",
    ]
    assert (tmp_path / "tables" / "accuracy.csv").read_text().startswith("of,quantity,paper,ours")


def test_the_report_needs_only_the_table_of_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "write_figures", lambda *_: [])
    monkeypatch.setattr(runner, "run", lambda *_, **__: pytest.fail("something was trained"))
    table = tmp_path / "trials.csv"
    write_trials(the_papers_own("location") | the_papers_own("mnist"), table)
    done = run("reproduce", "report", "--results", table, "--output", tmp_path / "out")
    assert done.exit_code == 0, done.output
    for words in ("Finding 5: CONFIRMED", "Leakage", "Many answers", "1 repeat of each curve"):
        assert words in done.stdout, words
    assert "Not measured in this run: DP-SGD as published, RDP" in " ".join(done.stdout.split())
    assert (tmp_path / "out" / "trials.csv").read_text() == table.read_text()
    curves = (tmp_path / "out" / "tables" / "curves.csv").read_text().splitlines()
    assert len(curves) == 1 + 2 * 44
    assert not any(line.endswith("no") for line in curves)


def test_a_table_that_is_not_one_of_trials_is_an_error(tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    done = run("reproduce", "report", "--results", other, "--output", tmp_path / "out")
    assert done.exit_code == 1
    assert "is not a table of trials: it has no column 'attacks'" in " ".join(done.stderr.split())
    done = run("reproduce", "report", "--results", tmp_path / "none.csv", "--output", tmp_path / "out")
    assert done.exit_code == 1
    assert "cannot be read" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("tiny_profile")
def test_one_command_runs_the_stand_in_and_once_the_file_is_there_the_real_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "STAND_IN_RECORDS", 2_000)
    options = ("--datasets", "purchase-2", "--data-dir", tmp_path, "--output", tmp_path / "out", "--json")
    refused = run("reproduce", "accuracy-table", *options)
    assert refused.exit_code == 1
    assert "purchase-2-stand-in" in refused.stderr
    command = ("reproduce", "figures", *options, "--stand-ins")
    assert json.loads(run(*command).stdout) == []
    assert measured_in(tmp_path / "out") == {"purchase-2-stand-in"}
    bits = np.random.default_rng(0).integers(2, size=(1_000, 600))
    lines = [",".join(map(str, [1 + row % 100, *values])) for row, values in enumerate(bits.tolist())]
    (tmp_path / "dataset_purchase").write_text("\n".join(lines) + "\n")
    compared = json.loads(run(*command).stdout)
    assert {row["dataset"] for row in compared} == {"purchase-2"}
    assert measured_in(tmp_path / "out") == {"purchase-2"}


def measured_in(folder: Path) -> set[str]:
    """The data sets in the table of results of a folder."""
    with (folder / "results.csv").open(encoding="utf-8") as table:
        return {row["dataset"] for row in csv.DictReader(table)}


@pytest.mark.usefixtures("tiny_profile")
def test_without_names_stand_ins_take_the_place_of_missing_files_only(real_data: Path) -> None:
    grid = reproduce._GridOptions(data_dir=real_data)
    eleven = reproduce._GridOptions(data_dir=real_data, stand_ins=True).datasets
    assert len(eleven) == 11
    assert [name for name in eleven if not is_stand_in(name)] == grid.datasets
    assert {name.removesuffix("-stand-in") for name in eleven} == set(accuracy_table())


@pytest.mark.usefixtures("tiny_profile")
def test_an_interrupt_exits_with_130_and_says_that_results_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run_trials", interrupted)
    done = run("reproduce", "figures", "--datasets", "mnist-5k", "--output", tmp_path / "out")
    assert done.exit_code == 130
    assert "the same command continues from there" in " ".join(done.stderr.split())


def test_without_any_data_set_of_the_paper_the_error_says_where_to_look(tmp_path: Path) -> None:
    done = run("reproduce", "figures", "--data-dir", tmp_path)
    assert done.exit_code == 1
    assert "is present. 'quietmax datasets' lists" in " ".join(done.stderr.split())


@pytest.mark.parametrize("command", ["accuracy-table", "figures", "findings", "multi-query", "all"])
def test_the_help_of_ray_names_the_extra_to_install(command: str) -> None:
    """Brackets in a help text are not markup."""
    shown = " ".join(run("reproduce", command, "--help").output.replace("│", " ").split())
    assert "Requires quietmax[ray]." in shown


def test_unknown_data_sets_profiles_and_no_repeats_are_errors(tmp_path: Path) -> None:
    for arguments, words in (
        (("sensitivity-table", "--datasets", "mnits"), "mnits"),
        (("figures", "--datasets", "mnits", "--data-dir", tmp_path), "mnits"),
        (("accuracy-table", "--datasets", "mnist-5k", "--repeats", 0), "repeats"),
        (
            ("figures", "--datasets", "mnist-5k", "--profile", "fast"),
            "profile must be quick or paper, got 'fast'",
        ),
    ):
        done = run("reproduce", *arguments)
        assert done.exit_code == 2
        assert words in " ".join(done.output.split())

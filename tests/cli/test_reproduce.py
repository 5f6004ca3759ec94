"""`quietmax reproduce`: every command reads the same trials."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from quietmax.cli import reproduce
from quietmax.data import readers
from quietmax.data.registry import is_stand_in
from quietmax.experiments import grid, measurements, methods, report, runner
from quietmax.experiments.grid import Effort, _Workload, write_trials
from quietmax.experiments.paper import accuracy_table
from quietmax.models import TrainingSettings
from quietmax.models.features import UnitNorm
from tests.cli.conftest import Run, assert_error, json_of, output_of
from tests.experiments.made_up import the_papers_own
from tests.experiments.same_process import start_in_this_process

PARTS = ("accuracy-table", "figures", "findings", "multi-query")


@pytest.fixture
def tiny_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile of one small repeat, run in this process."""
    tiny = _Workload(Effort(200, 2, epochs=2, attack_epochs=2), repeats=1, dpsgd_repeats=0, proven_repeats=1)
    monkeypatch.setattr(grid, "_workload", lambda *_: tiny)
    monkeypatch.setattr(grid, "EPSILONS", (1.0, 10.0))
    monkeypatch.setattr(grid, "LIKE_FOR_LIKE_EPSILONS", (1.0,))
    monkeypatch.setattr(runner, "estimated_seconds", lambda *_, **__: 3600.0)
    monkeypatch.setattr(runner, "start_workers", start_in_this_process)
    monkeypatch.setattr(methods, "default_features", lambda *_: UnitNorm())  # those of images take long
    monkeypatch.setattr(report, "write_figures", lambda *_: [])  # slow, and tested with `compare`


def test_the_help_says_where_to_start_and_that_of_ray_names_the_extra_to_install(run: Run) -> None:
    """Brackets in a help text are not markup."""
    assert "Start with report" in output_of(run("reproduce", "--help"))
    for command in (("compare",), *(("reproduce", each) for each in (*PARTS, "all"))):
        shown = output_of(run(*command, "--help")).replace("│", " ")
        assert "Requires quietmax[ray]." in " ".join(shown.split())


def test_tables_show_the_papers_number_ours_and_the_difference(run: Run) -> None:
    for table, part in (("sensitivity-table", None), ("correlations", "paper")):
        found = json_of(run("reproduce", table, "--json"))
        rows = found if part is None else found[part]
        assert {"paper", "ours", "difference", "agrees"} <= set(rows[0])
        assert "difference" in output_of(run("reproduce", table))
    rows = json_of(run("reproduce", "sensitivity-table", "--datasets", "mnist,adult", "--json"))
    assert {row["dataset"] for row in rows} == {"mnist", "adult"}


@pytest.mark.usefixtures("tiny_profile")
def test_all_runs_every_trial_and_the_other_commands_compute_nothing_more(run: Run, tmp_path: Path) -> None:
    options = ("--datasets", "mnist-5k", "--output", tmp_path / "out")
    shown = output_of(run("reproduce", "all", *options))
    for words in (
        "core hours",
        "Finding 5: CONFIRMED",
        "Many answers",
        "Sensitivities",
        "report.html",
        "0 failed",
    ):
        assert words in shown, words
    found = json_of(run("reproduce", "all", *options, "--json"))
    assert found["computed"] == 0
    assert len(found["findings"]) == 5
    analyses = {row["analysis"] for row in found["multi_query"]}
    assert analyses == {"published", "published-example", "any number"}
    stored = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "trials").rglob("*.json")}
    for part in PARTS:
        assert "0 trials computed" in output_of(run("reproduce", part, *options))
        json_of(run("reproduce", part, *options, "--json"))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "trials").rglob("*.json")} == stored
    assert json_of(run("reproduce", "all", *options, "--estimate", "--json"))["quick"] > 0


@pytest.mark.usefixtures("tiny_profile")
def test_the_accuracy_table_compares_both_losses_and_the_leakage(
    run: Run, tmp_path: Path, real_data: Path
) -> None:
    options = ("--datasets", "location", "--data-dir", real_data, "--output", tmp_path, "--json")
    assert [row["quantity"] for row in json_of(run("reproduce", "accuracy-table", *options))] == [
        *(f"convexified {each}" for each in ("train accuracy", "test accuracy", "gap")),
        *("leakage, plain network", "oaro"),
        *(f"original {each}" for each in ("train accuracy", "test accuracy", "gap")),
    ]
    assert (tmp_path / "tables" / "accuracy.csv").read_text().startswith("of,quantity,paper,ours")


def test_the_report_needs_only_the_table_of_trials(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "write_figures", lambda *_: [])
    monkeypatch.setattr(runner, "run", lambda *_, **__: pytest.fail("something was trained"))
    table = tmp_path / "trials.csv"
    write_trials(the_papers_own("location") | the_papers_own("mnist"), table)
    shown = output_of(run("reproduce", "report", "--results", table, "--output", tmp_path / "out"))
    for words in ("Finding 5: CONFIRMED", "Leakage", "Many answers", "1 repeat of each curve"):
        assert words in shown, words
    assert "Not measured in this run: DP-SGD as published, RDP" in " ".join(shown.split())
    assert (tmp_path / "out" / "trials.csv").read_text() == table.read_text()
    curves = (tmp_path / "out" / "tables" / "curves.csv").read_text().splitlines()
    assert len(curves) == 1 + 2 * 44
    assert not any(line.endswith("no") for line in curves)


@pytest.mark.usefixtures("tiny_profile")
def test_one_command_runs_the_stand_in_and_once_the_file_is_there_the_real_data_set(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "STAND_IN_RECORDS", 2_000)
    options = ("--datasets", "purchase-2", "--data-dir", tmp_path, "--output", tmp_path / "out", "--json")
    assert_error(run("reproduce", "accuracy-table", *options), 1, "purchase-2-stand-in")
    command = ("reproduce", "figures", *options, "--stand-ins")
    assert json_of(run(*command)) == []
    assert measured_in(tmp_path / "out") == {"purchase-2-stand-in"}
    bits = np.random.default_rng(0).integers(2, size=(1_000, 600))
    lines = [",".join(map(str, [1 + row % 100, *values])) for row, values in enumerate(bits.tolist())]
    (tmp_path / "dataset_purchase").write_text("\n".join(lines) + "\n")
    assert {row["dataset"] for row in json_of(run(*command))} == {"purchase-2"}
    assert measured_in(tmp_path / "out") == {"purchase-2"}


def measured_in(folder: Path) -> set[str]:
    """The data sets in the table of results of a folder."""
    with (folder / "results.csv").open(encoding="utf-8") as table:
        return {row["dataset"] for row in csv.DictReader(table)}


@pytest.mark.usefixtures("tiny_profile")
def test_without_names_stand_ins_take_the_place_of_missing_files_only(real_data: Path) -> None:
    present = reproduce._GridOptions(data_dir=real_data).datasets
    eleven = reproduce._GridOptions(data_dir=real_data, stand_ins=True).datasets
    assert len(eleven) == 11
    assert [name for name in eleven if not is_stand_in(name)] == present
    assert {name.removesuffix("-stand-in") for name in eleven} == set(accuracy_table())


@pytest.mark.usefixtures("tiny_profile")
def test_an_interrupt_exits_with_130_and_says_that_results_are_kept(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run_trials", interrupted)
    code, _, err = run("reproduce", "figures", "--datasets", "mnist-5k", "--output", tmp_path / "out")
    assert code == 130
    assert "the same command continues from there" in " ".join(err.split())


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("sensitivity-table --datasets mnits", 2, "mnits"),
        ("figures --datasets mnits --data-dir .", 2, "mnits"),
        ("accuracy-table --datasets mnist-5k --repeats 0", 2, "repeats"),
        ("figures --datasets mnist-5k --profile fast", 2, "profile must be quick or paper, got 'fast'"),
        ("figures --data-dir .", 1, "is present. 'quietmax datasets' lists"),
        ("report --results other.csv --output out", 1, "not a table of trials: it has no column 'attacks'"),
        ("report --results none.csv --output out", 1, "cannot be read"),
        *((f"{table} --measure --data-dir .", 1, "quietmax datasets") for table in reproduce._MEASUREMENTS),
        *((f"{table} --datasets texas", 2, "--measure") for table in ("architectures", "alpha", "cifar")),
        ("bounds-table --datasets mnits", 2, "mnits"),
    ],
)
def test_what_cannot_be_shown_or_run_is_an_error(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, code: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.csv").write_text("a,b\n1,2\n")
    assert_error(run("reproduce", *arguments.split()), code, words)
    assert not Path("out").exists()


# --- stored measurements of our own, measured again


@pytest.mark.parametrize(
    ("command", "shown", "absent"),
    [
        ("bounds-table", ("location", "adult"), "mnist"),
        ("architectures", ("location", "adult"), "mnist"),
        ("alpha", ("location", "adult"), "mnist"),
        ("cifar", ("cifar-100",), "cifar-10:"),
    ],
)
def test_the_stored_table_is_shown_and_written_without_training(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    shown: tuple[str, ...],
    absent: str,
) -> None:
    monkeypatch.setattr("quietmax.models.stacked.train_stack", None)
    out = output_of(run("reproduce", command, "--datasets", ",".join(shown), "--output", tmp_path))
    assert all(name in out for name in shown)
    assert absent not in out
    with (tmp_path / f"{command}.csv").open() as file:
        assert {row["dataset"] for row in csv.DictReader(file)} == set(shown)
    figures = {
        f"{name}-alpha-{kind}.{form}"
        for name in shown
        for kind in ("accuracy", "leakage")
        for form in ("png", "pdf")
        if command == "alpha"
    }
    assert {path.name for path in tmp_path.iterdir()} == {f"{command}.csv"} | figures
    assert json_of(run("reproduce", command, "--datasets", shown[0], "--json"))


def test_the_bounds_table_shows_all_configurations_with_every_condition(run: Run) -> None:
    rows = json_of(run("reproduce", "bounds-table", "--json"))
    assert len(rows) == 11
    for row in rows:
        assert len(row["bounds"]) == 5
        for bound in row["bounds"]:
            assert bound["applies"] is False
            assert all(condition["because"] for condition in bound["conditions"])
    shown = " ".join(output_of(run("reproduce", "bounds-table")).replace("│", " ").split())
    for words in (
        "Chaudhuri",
        "128 hidden",
        "minimiser reached",
        "known to hold for 0 of 55 bounds",
        "exceeded",
    ):
        assert words in shown, words


def test_measuring_again_trains_and_continues_where_it_was_stopped(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurements, "_settings", lambda _: TrainingSettings(epochs=1))
    monkeypatch.setattr(measurements, "_REMOVALS_OTHERWISE", 2)
    options = ("--measure", "--datasets", "mnist-5k", "--output", tmp_path)
    output_of(run("reproduce", "bounds-table", *options))
    for file in ("bounds.csv", "bounds-table.csv"):
        with (tmp_path / file).open() as lines:
            assert [row["dataset"] for row in csv.DictReader(lines)] == ["mnist-5k"]
    monkeypatch.setattr("quietmax.sensitivity.network.train_stack", None)
    assert json_of(run("reproduce", "bounds-table", *options, "--json"))[0]["observed"]["removals"] == 2


def test_measuring_alpha_runs_trials_that_a_second_run_finds(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "start_workers", start_in_this_process)
    less = {"records": 200, "shadows": 2, "epochs": 2, "attack_epochs": 2}
    monkeypatch.setitem(measurements._SWEEPS, "mnist-5k", (1, less, (0.5, 1.0)))
    options = ("--measure", "--datasets", "mnist-5k", "--output", tmp_path)
    assert "mnist-5k-alpha-leakage.png" in output_of(run("reproduce", "alpha", *options))
    monkeypatch.setattr(runner, "start_workers", lambda *_: pytest.fail("something was trained"))
    found = json_of(run("reproduce", "alpha", *options, "--json"))
    assert [row["alpha"] for row in found["rows"]] == [None, 0.5, 1.0]
    assert found["rows"][1]["threshold_leakage"] is not None

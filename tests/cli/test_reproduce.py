"""`quietmax reproduce`: both commands show the same tables, from stored trials or from those that are run."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from quietmax.cli.experiments import _available
from quietmax.experiments import grid, measurements, methods, report, runner
from quietmax.experiments.grid import Effort, _Workload, write_trials
from quietmax.models import TrainingSettings
from quietmax.models.features import UnitNorm
from tests.cli.conftest import document, printed, run
from tests.experiments.made_up import the_papers_own
from tests.experiments.toy_grid import start_in_this_process


@pytest.fixture
def tiny_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile of one small repeat, run in this process."""
    tiny = _Workload(Effort(200, 2, epochs=2, attack_epochs=2), repeats=1, dpsgd_repeats=0, proven_repeats=1)
    monkeypatch.setattr(grid, "_workload", lambda *_: tiny)
    monkeypatch.setattr(grid, "EPSILONS", (1.0, 10.0))
    monkeypatch.setattr(grid, "LIKE_FOR_LIKE_EPSILONS", (1.0,))
    monkeypatch.setattr(runner, "_start_workers", start_in_this_process)
    monkeypatch.setattr(methods, "default_features", lambda *_: UnitNorm())  # those of images take long
    monkeypatch.setattr(report, "write_figures", lambda *_: [])  # slow, and tested with `compare`


def test_tables_without_data_show_the_papers_number_ours_and_the_difference() -> None:
    report = ("reproduce", "report", "--tables", "sensitivities", "correlations", "own-correlations")
    found = document(*report)
    for table in report[3:]:
        assert {"paper", "ours", "difference", "agrees"} <= set(found[table][0])
    assert printed(*report).count("difference") == 3
    rows = document(*report[:4], "--datasets", "mnist,adult")["sensitivities"]
    assert {row["dataset"] for row in rows} == {"mnist", "adult"}


@pytest.mark.usefixtures("tiny_profile")
def test_a_run_makes_every_trial_and_a_run_for_some_tables_computes_nothing_more() -> None:
    command = ("reproduce", "run", "--datasets", "mnist-5k", "--output", "out")
    shown = printed(*command)
    for words in ("Finding 5: CONFIRMED", "Many answers", "report.html", "0 failed"):
        assert words in shown, words
    found = document(*command)
    assert found["computed"] == 0
    assert len(found["findings"]) == 5
    analyses = {row["analysis"] for row in found["multi-query"]}
    assert analyses == {"published", "published-example", "any number"}
    stored = {path: path.stat().st_mtime_ns for path in Path("out/trials").rglob("*.json")}
    for table in ("accuracy", "curves", "findings", "multi-query"):
        assert "0 trials computed" in printed(*command, "--tables", table)
        assert set(document(*command, "--tables", table)) > {table, "results"}
    assert {path: path.stat().st_mtime_ns for path in Path("out/trials").rglob("*.json")} == stored


@pytest.mark.usefixtures("tiny_profile", "real_data")
def test_the_table_of_accuracies_compares_both_losses_and_the_leakage(
    tmp_path: Path,
) -> None:
    options = ("--datasets", "location", "--output", tmp_path, "--json")
    found = document("reproduce", "run", "--tables", "accuracy", *options)["accuracy"]
    assert [row["quantity"] for row in found] == [
        *(f"convexified {each}" for each in ("train accuracy", "test accuracy", "gap")),
        *("leakage, plain network", "oaro"),
        *(f"original {each}" for each in ("train accuracy", "test accuracy", "gap")),
    ]
    assert Path("tables/accuracy.csv").read_text().startswith("of,quantity,paper,ours")


def test_the_report_needs_only_the_table_of_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "write_figures", lambda *_: [])
    monkeypatch.setattr(runner, "run", lambda *_, **__: pytest.fail("something was trained"))
    table = Path("trials.csv")
    write_trials(the_papers_own("location") | the_papers_own("mnist"), table)
    command = ("reproduce", "report", "--results", table, "--output")
    shown = printed(*command, Path("out"))
    for words in ("Finding 5: CONFIRMED", "Leakage", "Many answers", "1 repeat of each curve"):
        assert words in shown, words
    assert "Not measured in this run: DP-SGD as published, RDP" in " ".join(shown.split())
    assert Path("out/trials.csv").read_text() == table.read_text()
    curves = Path("out/tables/curves.csv").read_text().splitlines()
    assert len(curves) == 1 + 2 * 44
    assert not any(line.endswith("no") for line in curves)
    one = document(*command, Path("one"), "--tables", "curves", "--datasets", "mnist")
    assert {row["dataset"] for row in one["curves"]} == {"mnist"}
    assert one["written"] == [str(Path("one/tables/curves.csv"))]


@pytest.mark.usefixtures("real_data")
def test_without_names_the_data_sets_are_those_whose_files_are_present() -> None:
    names = ["location", "purchase-2"]
    assert _available((), names) == ["location"]


@pytest.mark.usefixtures("tiny_profile")
def test_an_interrupt_exits_with_130_and_says_that_results_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run_trials", interrupted)
    code, _, err = run("reproduce", "run", "--datasets", "mnist-5k", "--output", "out")
    assert code == 130
    assert "the same command continues from there" in " ".join(err.split())


# --- stored measurements of our own, measured again


@pytest.mark.parametrize(
    ("table", "file", "shown", "absent"),
    [
        ("bounds", "bounds-table.csv", ("location", "adult"), "mnist"),
        ("alpha", "alpha.csv", ("location", "adult"), "mnist"),
        ("cifar", "cifar.csv", ("cifar-100",), "cifar-10:"),
    ],
)
def test_a_stored_measurement_is_shown_and_written_without_training(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    table: str,
    file: str,
    shown: tuple[str, ...],
    absent: str,
) -> None:
    monkeypatch.setattr("quietmax.models.stacked.train_stack", None)
    command = ("reproduce", "report", "--tables", table, "--datasets", ",".join(shown))
    out = printed(*command, "--output", tmp_path)
    assert all(name in out for name in shown)
    assert absent not in out
    with (tmp_path / file).open() as lines:
        assert {row["dataset"] for row in csv.DictReader(lines)} == set(shown)
    figures = {
        f"{name}-alpha-{kind}.{form}"
        for name in shown
        for kind in ("accuracy", "leakage")
        for form in ("png", "pdf")
        if table == "alpha"
    }
    assert {path.name for path in tmp_path.iterdir()} == {file} | figures
    assert document(*command)[table]


def test_the_bounds_are_shown_for_all_configurations_with_every_condition() -> None:
    command = ("reproduce", "report", "--tables", "bounds")
    bounds = [bound for row in document(*command)["bounds"] for bound in row["bounds"]]
    assert len(bounds) == 11 * 5
    assert not any(bound["applies"] for bound in bounds)
    assert all(condition["because"] for bound in bounds for condition in bound["conditions"])
    shown = " ".join(printed(*command).replace("│", " ").split())
    for words in (
        "Chaudhuri",
        "128 hidden",
        "minimiser reached",
        "known to hold for 0 of 55 bounds",
        "exceeded",
    ):
        assert words in shown, words


def test_measuring_again_trains_and_continues_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurements, "_settings", lambda _: TrainingSettings(epochs=1))
    monkeypatch.setattr(measurements, "_REMOVALS_OTHERWISE", 2)
    command = ("reproduce", "run", "--tables", "bounds", "--datasets", "mnist-5k", "--output", tmp_path)
    printed(*command)
    for file in ("bounds.csv", "bounds-table.csv"):
        with (tmp_path / file).open() as lines:
            assert [row["dataset"] for row in csv.DictReader(lines)] == ["mnist-5k"]
    monkeypatch.setattr("quietmax.sensitivity.network.train_stack", None)
    assert document(*command)["bounds"][0]["observed"]["removals"] == 2


def test_measuring_alpha_runs_trials_that_a_second_run_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_start_workers", start_in_this_process)
    less = {"records": 200, "shadows": 2, "epochs": 2, "attack_epochs": 2}
    monkeypatch.setitem(measurements._SWEEPS, "mnist-5k", (1, less, (0.5, 1.0)))
    command = ("reproduce", "run", "--tables", "alpha", "--datasets", "mnist-5k", "--output", tmp_path)
    assert "mnist-5k-alpha-leakage.png" in printed(*command)
    monkeypatch.setattr(runner, "_start_workers", lambda *_: pytest.fail("something was trained"))
    found = document(*command)["alpha"]
    assert [row["alpha"] for row in found["rows"]] == [None, 0.5, 1.0]
    assert found["rows"][1]["threshold_leakage"] is not None

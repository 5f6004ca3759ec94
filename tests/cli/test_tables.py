"""Tests of `quietmax reproduce bounds-table`, `architectures`, `alpha` and `cifar`: stored tables, measured again."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from quietmax.cli import reproduce
from quietmax.data.records import Records
from quietmax.experiments import measurements, runner
from quietmax.models import TrainingSettings
from tests.cli.conftest import Run, assert_error
from tests.experiments.same_process import start_in_this_process


@pytest.mark.parametrize("command", ["bounds-table", "architectures", "alpha"])
def test_the_stored_table_is_shown_and_written_without_training(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("quietmax.models.stacked.train_stack", None)
    code, out, err = run("reproduce", command, "--datasets", "location,adult", "--output", tmp_path)
    assert code == 0, err
    assert "location" in out
    assert "adult" in out
    assert "mnist" not in out
    name = "bounds-table.csv" if command == "bounds-table" else f"{command}.csv"
    with (tmp_path / name).open() as file:
        assert {row["dataset"] for row in csv.DictReader(file)} == {"location", "adult"}
    figures = {
        f"{name}-alpha-{kind}.{form}"
        for name in ("location", "adult")
        for kind in ("accuracy", "leakage")
        for form in ("png", "pdf")
    }
    assert {path.name for path in tmp_path.iterdir()} == {name} | (figures if command == "alpha" else set())
    assert json.loads(run("reproduce", command, "--datasets", "location", "--json")[1])


def test_the_bounds_table_shows_all_configurations_with_every_condition(run: Run) -> None:
    rows = json.loads(run("reproduce", "bounds-table", "--json")[1])
    assert len(rows) == 11
    for row in rows:
        assert len(row["bounds"]) == 5
        for bound in row["bounds"]:
            assert bound["applies"] is False
            assert all(condition["because"] for condition in bound["conditions"])
    code, out, _ = run("reproduce", "bounds-table")
    assert code == 0
    for words in (
        "Chaudhuri",
        "128 hidden",
        "minimiser reached",
        "known to hold for 0 of 55 bounds",
        "exceeded",
    ):
        assert words in " ".join(out.replace("│", " ").split()), words


def test_data_sets_without_stored_numbers_or_of_unknown_name_are_errors(run: Run) -> None:
    for command in ("architectures", "alpha"):
        assert_error(run("reproduce", command, "--datasets", "texas"), 2, "texas", "--measure")
    assert_error(run("reproduce", "bounds-table", "--datasets", "mnits"), 2, "mnits")


def test_without_data_a_measurement_says_where_to_look(run: Run, tmp_path: Path) -> None:
    for command in ("bounds-table", "architectures", "alpha", "cifar"):
        result = run("reproduce", command, "--measure", "--data-dir", tmp_path)
        assert_error(result, 1, "quietmax datasets")


def test_measuring_again_trains(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "_settings", lambda _: TrainingSettings(epochs=1))
    monkeypatch.setattr(
        measurements, "TrainingSettings", lambda *given: replace(TrainingSettings(*given), epochs=1)
    )
    monkeypatch.setattr(measurements, "ARCHITECTURE_CASES", ((1, "tanh", "cross-entropy"),))
    options = ("--measure", "--datasets", "mnist-5k", "--removals", 2, "--output", tmp_path)
    code, out, err = run("reproduce", "bounds-table", *options)
    assert code == 0, err
    assert "bounds.csv" in out
    code, out, err = run("reproduce", "architectures", *options, "--repeats", 1, "--json")
    assert code == 0, err
    assert [row["removals"] for row in json.loads(out)] == [2]


def test_measuring_alpha_runs_trials_that_a_second_run_finds(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "start_workers", start_in_this_process)
    less = {"records": 200, "shadows": 2, "epochs": 2, "attack_epochs": 2}
    monkeypatch.setitem(measurements._SWEEPS, "mnist-5k", (1, less, (0.5, 1.0)))
    options = ("--measure", "--datasets", "mnist-5k", "--output", tmp_path)
    code, out, err = run("reproduce", "alpha", *options)
    assert code == 0, err
    assert "3 trials computed" in out
    assert (tmp_path / "mnist-5k-alpha-leakage.png").is_file()
    assert "0 trials computed" in run("reproduce", "alpha", *options)[1]
    found = json.loads(run("reproduce", "alpha", *options, "--json")[1])
    assert [row["alpha"] for row in found["rows"]] == [None, 0.5, 1.0]
    assert found["rows"][1]["threshold_leakage"] is not None


def test_the_stored_trials_on_cifar_are_shown_and_written_without_training(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quietmax.models.stacked.train_stack", None)
    code, out, err = run("reproduce", "cifar", "--datasets", "cifar-100", "--output", tmp_path)
    assert code == 0, err
    assert "cifar-100" in out
    assert "0.0001" in out
    with (tmp_path / "cifar.csv").open() as file:
        assert {row["dataset"] for row in csv.DictReader(file)} == {"cifar-100"}
    shown = json.loads(run("reproduce", "cifar", "--json")[1])
    assert {row["dataset"] for row in shown["networks"]} == {"cifar-10", "cifar-100"}
    assert_error(run("reproduce", "cifar", "--datasets", "mnist"), 2, "mnist")


def test_measuring_cifar_continues_where_it_was_stopped(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = np.random.default_rng(0).random((100, 12), dtype=np.float32)
    images = Records("cifar-10", features, np.arange(100) % 10, classes=10)
    first = measurements.Case("cifar-10", "pixel/255", 1e-3, 1, "convexified", 2.0)
    second = measurements.Case("cifar-10", "pixel/255 - 0.5", 1e-3, 1, "cross-entropy", None)
    measured = []
    measure = measurements.measure_case

    def noted(case: measurements.Case, records: Records, *, seed: int) -> list[measurements.CifarTrial]:
        measured.append(case)
        return measure(case, records, seed=seed)

    monkeypatch.setattr(reproduce, "_available", lambda *_: ["cifar-10"])
    monkeypatch.setattr(measurements, "load_records", lambda *_, **__: images)
    monkeypatch.setattr(measurements, "dataset", lambda _: SimpleNamespace(records=40, alpha=2.0))
    monkeypatch.setattr(measurements, "measure_case", noted)
    for cases in ([first], [first, second]):
        monkeypatch.setattr(measurements, "cifar_cases", lambda _, cases=cases: cases)
        code, _, err = run("reproduce", "cifar", "--measure", "--output", tmp_path)
        assert code == 0, err
    assert measured == [first, second]
    with (tmp_path / "cifar.csv").open() as file:
        assert [row["method"] for row in csv.DictReader(file)].count("plain") == 2

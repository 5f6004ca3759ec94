from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run, assert_error


def test_tables_show_the_paper_s_numbers_ours_and_the_difference(run: Run) -> None:
    for table in ("sensitivity-table", "correlations"):
        code, out, _ = run("reproduce", table, "--json")
        assert code == 0
        assert {"paper", "ours", "difference", "agrees"} <= set(json.loads(out)[0])
        code, out, _ = run("reproduce", table)
        assert code == 0
        assert "difference" in out
    code, out, _ = run("reproduce", "sensitivity-table", "--datasets", "mnist", "adult", "--json")
    assert {row["dataset"] for row in json.loads(out)} == {"mnist", "adult"}


def test_the_accuracy_table_runs_on_real_data(run: Run, real_data: Path) -> None:
    options = ("--datasets", "location", "--repeats", 1, "--data-dir", real_data, "--json")
    code, out, _ = run("reproduce", "accuracy-table", *options)
    assert code == 0
    assert [row["quantity"] for row in json.loads(out)][-1] == "convexified test accuracy"


def test_unknown_data_sets_and_no_repeats_are_errors(run: Run) -> None:
    assert_error(run("reproduce", "sensitivity-table", "--datasets", "mnits"), 2, "mnits")
    table = ("reproduce", "accuracy-table", "--datasets", "mnist", "--data-dir", ".")
    assert_error(run(*table, "--repeats", 0), 2, "repeats")

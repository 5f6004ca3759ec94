"""`quietmax plan`: a table of outlooks, a figure, and one sentence for what is wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from quietmax import Schema, plan
from quietmax.experiments import forecast
from tests.cli.conftest import assert_error, document, printed, run
from tests.cli.own_table import SCHEMA, write_people

SMALL = ("--people", 40, "--simulations", 10)


@pytest.fixture(autouse=True)
def schema(in_its_own_folder: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.setattr(forecast, "_MOST_ROWS", 512)
    monkeypatch.setattr(forecast, "_TEST_ROWS", 512)
    shutil.copy(SCHEMA, tmp_path / "people.toml")


def test_the_document_is_the_forecast_of_the_python_function() -> None:
    found = document("plan", "people.toml", *SMALL, "--majority", 0.6, "--achievable", 0.9, "--epsilon", 2)
    declared = Schema.from_file("people.toml")
    expected = plan(declared, 40, epsilon=2.0, majority=0.6, achievable=0.9, simulations=10).to_json()
    assert found["by_epsilon"] == list(expected["by_epsilon"])
    assert found["by_people"] == list(expected["by_people"])
    assert found["enough_people"] == expected["enough_people"]
    assert found["epsilon"] == 2


def test_the_tables_show_each_epsilon_and_number_of_people_and_the_advice() -> None:
    shown = printed("plan", "people.toml", *SMALL, "--majority", 0.6)
    rows = [line.strip("│ ").split()[0] for line in shown.splitlines() if line.startswith("│")]
    assert rows == ["0.1", "0.2", "0.5", "1", "2", "3", "5", "8", "10", "20", "40", "80", "160", "320"]
    assert "Accuracy flattens at epsilon" in shown or "Accuracy still rises at epsilon 8" in shown
    assert "people" in shown
    assert "stating what is achievable narrows" in shown


def test_a_sample_a_figure_and_a_page_with_every_epsilon_and_number_of_people_are_files(
    tmp_path: Path,
) -> None:
    write_people(tmp_path / "public.csv")
    options = ("--sample", "public.csv", "--output", "plan.svg", "--html", "plan.html")
    found = document("plan", "people.toml", *SMALL, *options)
    assert "<svg" in (tmp_path / "plan.svg").read_text()
    assert len(found["grid"]) == 8 * 6, "a forecast is for 10 people or more"
    page = (tmp_path / "plan.html").read_text()
    assert "<title>Forecast: people.toml</title>" in page
    assert f'"max_guess": {found["grid"][-1]["max_guess"]!r}' in page


def test_a_figure_or_sample_that_cannot_be_used_is_said_before_anything_is_simulated() -> None:
    for words, code in {
        "people.toml --people 40 --output figure": 1,
        "people.toml --people 40 --html absent/plan.html": 1,
        "people.toml --people 40 --sample absent.csv": 1,
    }.items():
        assert_error(run("plan", *words.split()), code, words.split()[-1])

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from quietmax.data import Schema, check_table
from quietmax.data.draft import TableReport
from quietmax.data.encoding import Losses
from quietmax.errors import InvalidInput
from tests.data.conftest import ErrorMessage
from tests.data.people import DECLARED, written

SCHEMA = Schema.from_dict(DECLARED)


def test_the_report_counts_what_each_column_loses(tmp_path: Path) -> None:
    report = check_table(written(tmp_path), SCHEMA)
    assert {column.name: column.losses for column in report.columns} == {
        "age": Losses(missing=1, clipped=1),
        "sex": Losses(missing=1, unknown=1),
        "gain": Losses(missing=1, clipped=1),
    }
    assert [column.kind for column in report.columns] == ["numeric", "categorical", "numeric"]
    assert (report.rows, report.ignored, report.classes) == (5, ("name",), {"no": 3, "yes": 2})
    assert (report.persons, report.unlabelled, report.problems) == (None, 0, ())


def test_the_report_counts_people_and_their_rows(tmp_path: Path) -> None:
    text = "who,x,y\n" + "a,1,0\na,2,1\nb,3,0\n,4,1\n"
    schema = Schema(label="y", classes=("0", "1"), bounds={"x": (0, 9)}, person="who")
    report = check_table(written(tmp_path, text), schema)
    assert (report.persons, report.most_rows, report.without_person) == (2, 2, 1)
    assert report.problems == (
        "Row 4 has no value in the person column. Give each such row a value of its own, or delete it.",
    )


PERSON = Schema(label="y", classes=("0", "1"), bounds={"x": (0, 9)}, person="who")


@pytest.mark.parametrize(
    ("names", "ignore_case", "similar"),
    [
        (["C1", "c1", "C2", "C2"], (), 2),
        (["C1", "c1", "C2", "C2"], ("who",), 0),
        (["a b", "ab", "a  b", "c"], (), 3),
        (["007", "7", "70", "8"], (), 2),
        (["C07", "C7", "C 7", "c"], ("who",), 3),
        (["100", "10", "1", "0"], (), 0),
    ],
)
def test_names_of_people_that_differ_in_spelling_only_are_mentioned(
    names: list[str], ignore_case: tuple[str, ...], similar: int
) -> None:
    table = pd.DataFrame({"who": names, "x": 1, "y": ["0", "1", "0", "1"]})
    report = check_table(table, replace(PERSON, ignore_case=ignore_case))
    assert (report.similar_persons, report.problems) == (similar, ())
    assert any("case, blanks or leading zeros" in warning for warning in report.warnings) == bool(similar)


def test_people_with_one_row_each_are_mentioned() -> None:
    table = pd.DataFrame({"who": ["a", "b"], "x": 1, "y": ["0", "1"]})
    assert check_table(table, PERSON).warnings == (
        "Every person has just one row: does the person column tell people apart, or rows?",
    )
    assert check_table(pd.concat([table, table]), PERSON).warnings == ()


def test_hashed_free_text_and_columns_without_a_name_are_mentioned(tmp_path: Path) -> None:
    rows = "".join(f"asked on day {row} about her loan;{row:05};{row % 2};\n" for row in range(60))
    schema = Schema(label="y", classes=("0", "1"), hashed={"note": 64, "zip": 64})
    report = check_table(written(tmp_path, f"note;zip;y;\n{rows}"), schema)
    assert (report.free_text, report.unnamed, report.problems) == (("note",), 1, ())
    text, unnamed = report.warnings
    assert "'note' seem to hold free text" in text
    assert unnamed == "1 column has no name, and will be ignored."


PEOPLE = pd.DataFrame({"age": ["25", "old", "?"], "ill": ["no", "YES", ""], "zip": ["1", "2", "3"]})


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, "does not declare the label"),
        ({"label": "ill", "classes": ["no", "yes"]}, "2 rows have no label"),
        ({"label": "ill", "classes": ["no", "yes"], "ignore_case": ["ill"]}, "1 row has no label"),
        ({"bounds": {"age": (0, 9)}}, "'zip' hold"),
        (
            {"label": "ill", "classes": ["no", "yes"]},
            "not in `classes`: add the class there, or delete such rows",
        ),
        (
            {"bounds": {"age": (0, 9)}},
            "1 cell of column 'age' cannot be read as numbers; `decimal`, `thousands`, `units`",
        ),
        (
            {"dates": {"age": ["2020-01-01", "2020-12-31"]}},
            "cannot be read as dates; `date_formats` or `missing_values`",
        ),
        (
            {"booleans": ["age"]},
            "cannot be read as yes or no; `missing_values`, or `categories` in place of `booleans`",
        ),
    ],
)
def test_problems_say_why_training_would_be_refused(facts: dict[str, Any], said: str) -> None:
    problems = check_table(PEOPLE, Schema.from_dict(facts)).problems
    assert any(said in problem for problem in problems)


def test_unconfirmed_proposals_are_listed_and_are_a_problem(tmp_path: Path) -> None:
    report = check_table(
        written(tmp_path), SCHEMA.updated({"confirm": {"bounds": {"age": "from the values"}}})
    )
    assert report.unconfirmed == ("'age' in bounds",)
    assert report.problems == (
        "The schema is a draft: training refuses it until each line under [confirm] is checked and deleted.",
    )


def test_the_report_becomes_json(tmp_path: Path) -> None:
    report = check_table(written(tmp_path), SCHEMA)
    assert isinstance(report, TableReport)
    content = json.loads(json.dumps(report.to_json()))
    assert content["columns"][0] == {
        "name": "age",
        "kind": "numeric",
        "losses": {"missing": 1, "clipped": 1, "unknown": 0, "unreadable": 0},
    }
    assert content["problems"] == []


def test_a_schema_that_does_not_fit_is_rejected(tmp_path: Path, error_message: ErrorMessage) -> None:
    assert "no column 'agee'" in error_message(
        lambda: check_table(written(tmp_path), SCHEMA.updated({"bounds": {"agee": (0, 1)}})), InvalidInput
    )
    assert "needs named columns" in error_message(
        lambda: check_table(tmp_path / "a.npz", SCHEMA), InvalidInput
    )

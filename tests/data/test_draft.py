from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars
import pyarrow
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import quietmax
from quietmax.data import Schema, check_table, draft_schema, encode_table, load
from quietmax.data.draft import (
    _Proposal,
    _propose,
    _round_outwards,
    _with_proposals,
)
from quietmax.data.encoding import Losses
from quietmax.errors import InvalidData, InvalidInput
from tests.data.conftest import problem_of
from tests.data.people import DECLARED, written

VISITS = pd.DataFrame(
    {
        "customer_id": [f"c{number // 2}" for number in range(60)],
        "visit_no": range(60),
        "age": [20 + number % 50 for number in range(60)],
        "region": [("north", "South", "SOUTH")[number % 3] for number in range(60)],
        "joined": [f"{1 + number % 28:02}.03.20{10 + number % 9}" for number in range(60)],
        "notes": [f"asked on day {number} about her loan" for number in range(60)],
        "nothing": [None] * 60,
        "left": [("no", "yes")[number % 2] for number in range(60)],
    }
)
EXPECTED = Schema(
    label="left",
    classes=("no", "yes"),
    bounds={"age": (0, 80)},
    categories={"region": ("South", "north")},
    ignore=("visit_no", "nothing"),
    text=("notes",),
    person="customer_id",
    dates={"joined": ("2010-01-01", "2018-12-31")},
    date_formats={"joined": "%d.%m.%Y"},
    ignore_case=("region",),
)


def facts(schema: Schema) -> dict[str, Any]:
    return {key: value for key, value in schema.to_dict().items() if key != "confirm"}


def test_a_draft_proposes_types_bounds_categories_classes_and_the_person() -> None:
    schema = draft_schema(VISITS)
    assert facts(schema) == facts(EXPECTED)
    # Each fact is to be confirmed by itself.
    confirm = dict(schema.confirm)
    assert all(confirm.pop(key) for key in ("label", "classes", "person"))
    declared = {
        key: value for key, value in facts(schema).items() if key not in ("label", "classes", "person")
    }
    assert {key: set(found) for key, found in confirm.items()} == {
        key: set(value) for key, value in declared.items()
    }
    assert {name for found in confirm.values() for name in found} == set(VISITS) - {"customer_id", "left"}


@pytest.mark.parametrize("kind", ["csv", "parquet", "arrow", "polars"])
def test_a_draft_is_the_same_for_every_kind_of_table(kind: str) -> None:
    table: Any = {"arrow": pyarrow.table(VISITS), "polars": polars.DataFrame(VISITS.to_dict("list"))}.get(
        kind
    )
    if kind == "csv":
        table = Path("visits.csv")
        VISITS.to_csv(table, index=False)
    elif kind == "parquet":
        table = str(Path("visits.parquet"))
        VISITS.to_parquet(table)
    assert draft_schema(table) == draft_schema(VISITS)


def test_given_columns_need_no_confirmation() -> None:
    schema = quietmax.draft_schema(VISITS, label="region", person="visit_no")
    assert (schema.label, schema.person) == ("region", "visit_no")
    assert (schema.classes, schema.ignore_case) == (("South", "north"), ("region",))
    assert not {"label", "person"} & set(schema.confirm)
    assert schema.confirm["ignore_case"] == {"region": "as said under classes"}
    assert "customer_id" in schema.ignore
    assert "left" in schema.booleans


def test_every_proposal_stands_under_confirm_and_shows_no_more_than_the_schema() -> None:
    text = draft_schema(VISITS).to_toml()
    assert text.startswith("# A draft.")
    content = tomllib.loads(text)
    assert content["confirm"]["bounds"]["age"] == "bounds 0 to 80: from the values, rounded outwards"
    assert "free text" in content["confirm"]["text"]["notes"]
    assert "empty" in content["confirm"]["ignore"]["nothing"]
    assert not any(
        character.isdigit()
        for name in ("person", "classes", "label")
        for character in content["confirm"][name]
    )


def test_a_draft_trains_only_when_it_is_confirmed() -> None:
    table = Path("visits.csv")
    VISITS.to_csv(table, index=False)
    draft = draft_schema(table)
    written(draft.to_toml(), "visits.toml")
    with pytest.raises(InvalidInput, match=r"delete its line under \[confirm\]"):
        load(table)
    assert load(table, infer=True).train.encoding.inferred  # type: ignore[union-attr]
    confirmed = draft.to_toml().partition("\n[confirm]")[0]
    written(confirmed, "visits.toml")
    data = load(table, holdout=0.3)
    assert not data.train.encoding.inferred
    assert (data.train.unit, len(set(data.records.persons))) == ("person", 30)  # type: ignore[arg-type]


def test_without_a_likely_label_the_draft_says_so() -> None:
    table = pd.DataFrame({"x": np.arange(50) / 7, "z": np.arange(50) * 1.5})
    draft = draft_schema(table)
    assert draft.label is None
    assert "# label =" in draft.to_toml()
    assert draft_schema(table.assign(target=1, other=2.5)).label == "target"


def test_a_label_with_very_many_values_gets_no_classes() -> None:
    schema = draft_schema(pd.DataFrame({"x": range(200), "price": range(200)}), label="price")
    assert schema.classes is None
    assert "more than 100 values" in schema.confirm["classes"]


def test_the_owner_of_a_label_with_a_third_value_is_told_to_look_at_it() -> None:
    for third, told in (("no", False), ("unknown", True)):
        table = pd.DataFrame({"age": [20, 30, 40], "ill": ["no", "yes", third]})
        because = draft_schema(table, label="ill").confirm["classes"]
        assert ("means unknown, take it out and delete its rows" in because) == told


def test_a_person_named_as_such_is_preferred_to_other_numbers() -> None:
    table = pd.DataFrame(
        {"loan_id": range(90), "patient": [number // 3 for number in range(90)], "y": [0, 1] * 45}
    )
    schema = draft_schema(table)
    assert (schema.person, schema.ignore) == ("patient", ("loan_id",))
    schema = draft_schema(table.drop(columns="patient"))
    assert (schema.person, schema.ignore) == (None, ("loan_id",))
    assert "number the rows, not people" in schema.confirm["ignore"]["loan_id"]


def test_a_number_that_repeats_is_proposed_as_person_with_a_doubt() -> None:
    table = pd.DataFrame({"account_no": [number // 3 for number in range(90)], "y": [0, 1] * 45})
    schema = draft_schema(table)
    assert schema.person == "account_no"
    assert "only because the values repeat" in schema.confirm["person"]


@pytest.mark.parametrize("name", ["patient_id", "Customer", "id", "visit_id"])
def test_a_draft_asks_whether_a_column_named_like_a_person_with_few_values_is_the_person(name: str) -> None:
    table = pd.DataFrame({name: [number % 4 for number in range(90)], "age": range(90), "y": [0, 1] * 45})
    draft = draft_schema(table)
    assert draft.person is None
    question = draft.confirm["person"]
    assert question.startswith(
        f"not proposed: is '{name}' the person? Its name says that it may be, and its "
    )
    assert f'person = "{name}"' in question
    Path("draft.toml").write_text(draft.to_toml(), encoding="utf-8")
    read = Schema.from_file(Path("draft.toml"))
    assert read.unconfirmed == draft.unconfirmed
    assert "person" in read.unconfirmed
    assert "person" not in read.updated({"person": name, "ignore": ()}).unconfirmed


def test_a_draft_asks_nothing_about_numbers_of_rows_booleans_and_values_that_do_not_repeat() -> None:
    table = pd.DataFrame({"member": [0, 1, 1] * 30, "index": 9, "loan_id": range(90), "y": [0, 1] * 45})
    assert "person" not in draft_schema(table).confirm


@pytest.mark.parametrize(
    ("person", "label"),
    [
        ("Numéro client", "Remboursé"),
        ("Kunden-Nr.", "gekündigt"),
        ("Número de cliente", "Impago"),
        ("Codice paziente", "Diagnosi finale"),
        ("Patientennummer", "Klasse"),
    ],
)
def test_people_and_labels_are_found_by_name_in_other_languages(person: str, label: str) -> None:
    table = pd.DataFrame(
        {
            person: [f"C{number // 3:05}" for number in range(90)],
            label: ["oui", "non", "non"] * 30,
            "Compte": [1_064_187_060_866_652_760 + 7_919_000_000 * number for number in range(90)],
        }
    )
    schema = draft_schema(table)
    assert (schema.person, schema.label, schema.ignore) == (person, label, ("Compte",))
    assert schema.classes == ("non", "oui")
    assert "ids" in schema.confirm["ignore"]["Compte"]


def test_the_label_must_have_values_and_be_another_column_than_the_person() -> None:
    message = problem_of(InvalidInput, draft_schema, VISITS, label="left", person="left")
    assert message == "Column 'left' cannot be both the label and the person."
    assert "is empty" in problem_of(InvalidInput, draft_schema, VISITS, label="nothing")
    assert draft_schema(VISITS.rename(columns={"nothing": "target"})).label == "left"


def test_what_is_not_a_table_with_rows_is_rejected() -> None:
    assert "no column 'income'" in problem_of(InvalidInput, draft_schema, VISITS, label="income")
    assert "no rows" in problem_of(InvalidData, draft_schema, VISITS[:0])
    assert "list" in problem_of(InvalidInput, draft_schema, [1, 2])
    assert "named columns" in problem_of(InvalidInput, draft_schema, Path("a.npz"))


# --- Proposals for one column ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "bounds"),
    [
        (17, 90, (0, 100)),
        (0, 99_999, (0, 100_000)),
        (0, 100, (0, 100)),
        (0, 0, (0, 1)),
        (5, 5, (0, 5)),
        (-3, -3, (-3, 0)),
        (0.02, 0.7, (0, 0.8)),
        (1987, 2021, (1980, 2030)),
        (-12, 35, (-20, 40)),
        (-90, -17, (-100, 0)),
        (36.1, 41.9, (36, 42)),
    ],
)
def test_bounds_are_rounded_outwards(low: float, high: float, bounds: tuple[float, float]) -> None:
    assert _round_outwards(low, high) == pytest.approx(bounds)


@given(st.floats(-1e12, 1e12), st.floats(-1e12, 1e12))
def test_rounded_bounds_hold_the_values_and_differ(first: float, second: float) -> None:
    low, high = sorted((first, second))
    assume(high == low or high - low > 1e-9 * max(abs(low), abs(high), 1e-280))
    assume(max(abs(low), abs(high)) > 1e-280 or low == high == 0)
    down, up = _round_outwards(low, high)
    slack = 1e-9 * max(abs(low), abs(high))
    assert down <= low + slack
    assert up >= high - slack
    assert down < up


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["17", "90", "NA"], {"bounds": (0, 100)}),
        (["", "?", None], {"ignore": True}),
        (["Yes", "no", "", "TRUE"], {"booleans": True}),
        (["0", "1", "1"], {"booleans": True}),
        (["a", "b", "a"], {"categories": ("a", "b")}),
        (["North", "north", "north", "South"], {"categories": ("South", "north"), "ignore_case": True}),
        (["2020-01-31", "2021-06-01"], {"dates": ("2020-01-01", "2021-12-31")}),
        (["2020-01-31 08:00", "2021-06-01T09:30:00Z"], {"dates": ("2020-01-01", "2021-12-31")}),
        (["31.01.2020", "1.6.2021"], {"dates": ("2020-01-01", "2021-12-31"), "date_formats": "%d.%m.%Y"}),
        (["01/31/2020", "06/01/2021"], {"dates": ("2020-01-01", "2021-12-31"), "date_formats": "%m/%d/%Y"}),
        (
            ["31 Jan 2020 08:30", "1 Jun 2021 09:00"],
            {"dates": ("2020-01-01", "2021-12-31"), "date_formats": "%d %b %Y %H:%M"},
        ),
        (["1.234,50", "7,25", "12"], {"bounds": (0, 1500), "decimal": ",", "thousands": "."}),
        (["1,5", "2,25"], {"bounds": (1.5, 2.3), "decimal": ","}),
        (["1,234.5", "12"], {"bounds": (0, 1500), "thousands": ","}),
        (["1 234", "45\u00a0678"], {"bounds": (0, 50_000), "thousands": " "}),
        (["34", "61", "-", "n.a."], {"bounds": (30, 70), "missing_values": ("-", "n.a.")}),
        (["2020-01-31", "None"], {"dates": ("2020-01-01", "2020-12-31"), "missing_values": ("None",)}),
        (["0", "1", "2", "3+"], {"categories": ("0", "1", "2", "3+")}),
        (["$1,200.50", "$7", "-$5"], {"bounds": (-1000, 2000), "thousands": ",", "units": "$"}),
        (["1.200,50 €", "7 €"], {"bounds": (0, 1500), "decimal": ",", "thousands": ".", "units": "€"}),
        (["12%", "5%", ""], {"bounds": (0, 12), "units": "%"}),
        (["K1", "K2", "K3"], {"categories": ("K1", "K2", "K3")}),
        (["01234", "90210"], {"categories": ("01234", "90210")}),
        ([*map(str, range(40)), "unknown"], {"bounds": (0, 40), "missing_values": ("unknown",)}),
        ([*map(str, range(5, 40)), "-999"], {"bounds": (0, 40), "missing_values": ("-999",)}),
        (pd.Series([1.5, math.nan, 3]), {"bounds": (0, 3)}),
        (pd.Series([True, False]), {"booleans": True}),
        (pd.Series([0, 1, 1]), {"booleans": True}),
        (pd.Series([math.nan, math.nan]), {"ignore": True}),
        (pd.Series([math.inf, 2.0, 8.0]), {"bounds": (0, 8)}),
        (pd.Series(pd.to_datetime(["2020-05-05", None])), {"dates": ("2020-01-01", "2020-12-31")}),
        (
            pd.Series(pd.arrays.ArrowExtensionArray(pyarrow.array([1, None, 90], pyarrow.int8()))),
            {"bounds": (0, 100)},
        ),
        (pd.Series(pd.arrays.ArrowExtensionArray(pyarrow.array([[1], [2]]))), {"ignore": True}),
    ],
)
def test_the_values_and_the_type_say_what_a_column_holds(cells: Any, expected: dict[str, Any]) -> None:
    column = cells if isinstance(cells, pd.Series) else pd.Series(cells, dtype="str")
    assert dict(_propose("x", column).declared) == expected


@pytest.mark.parametrize(
    ("name", "values", "identifies"),
    [
        ("customer_id", [number // 3 for number in range(300)], 2),
        ("Kunden-Nr", [f"K{number // 3}" for number in range(300)], 2),
        ("patientID", [*range(300)], 2),
        ("email", [f"a{number}@example.org" for number in range(300)], 2),
        ("id", [number // 3 for number in range(300)], 1),
        ("loan_id", [*range(300)], 0),
        ("LoanId", [*range(300)], 0),
        ("Account No.", [*range(300)], 0),
        ("loan_id", [number // 3 for number in range(300)], 1),
        ("Numéro de prêt", [*range(300)], 0),
        ("Numéro d'assuré", [*range(300)], 2),
        ("Identifiant du patient", [*range(300)], 2),
        ("Mitgliedsnummer", [*range(300)], 2),
        ("id_paciente", [number // 3 for number in range(300)], 2),
        ("numero_de_hijos", [number % 5 for number in range(300)], 0),
        ("customer_age", [number % 80 for number in range(300)], 0),
        ("number_of_children", [number % 5 for number in range(300)], 0),
        ("paid", [*range(300)], 0),
        ("customer_type", [("new", "old")[number % 2] for number in range(300)], 0),
        ("house_no", [number % 40 for number in range(300)], 0),
        ("customer_id", [float(number) + 0.5 for number in range(300)], 0),
    ],
)
def test_names_and_values_say_who_is_a_person(name: str, values: list[Any], identifies: int) -> None:
    assert _propose(name, pd.Series(values)).identifies == identifies


HUNDRED = range(100)
ACCOUNTS = [123_456_789_012 + 7_919 * number for number in HUNDRED]


@pytest.mark.parametrize(
    ("name", "cells", "expected", "said"),
    [
        (
            "x",
            [0] * 50 + [20_000, 99_999],
            {"bounds": (0, 100_000), "scales": "log"},
            "most values are small",
        ),
        ("x", [*range(0, 100_000, 1_000)], {"bounds": (0, 100_000)}, "bounds 0 to 100000"),
        ("x", [f"city {number % 80}" for number in range(400)], {"hashed": 64}, "many different values"),
        (
            "notes",
            [f"called on day {number} about a loan" for number in HUNDRED],
            {"text": True},
            "free text",
        ),
        ("surname", [f"name{number}x" for number in HUNDRED], {"ignore": True}, "nearly every row"),
        *((name, [*HUNDRED], {"ignore": True}, "number the rows") for name in ("", "Index", "Unnamed: 0")),
        ("zip_code", [f"{number:05}" for number in HUNDRED], {"hashed": 64}, ""),
        ("PLZ", [*range(10_000, 10_100)], {"hashed": 64}, "from the name"),
        ("Compte", ACCOUNTS, {"ignore": True}, "seem to be ids"),
        ("Compte", [*map(str, ACCOUNTS)], {"ignore": True}, "seem to be ids"),
        (
            "Compte",
            [account // 10 for account in ACCOUNTS],
            {"bounds": (12_345_670_000, 12_345_760_000)},
            "bounds",
        ),
        (
            "amount",
            [123_456_789_012, 234_567_890_123] * 50,
            {"bounds": (100_000_000_000, 300_000_000_000)},
            "bounds",
        ),
        (
            "day",
            ["01/02/2020", "03/04/2021"],
            {"dates": ("2020-01-01", "2021-12-31"), "date_formats": "%d/%m/%Y"},
            "also fit %m/%d/%Y",
        ),
        ("x", ["1,234", "5,678"], {"bounds": (0, 6000), "thousands": ","}, "check whether"),
        ("x", ["1.234", "5.678"], {"bounds": (0, 6)}, "check whether"),
        ("x", ["1.25", "5.678"], {"bounds": (0, 6)}, "from the values, rounded outwards"),
    ],
)
def test_a_proposal_follows_from_the_values_and_the_name_and_says_how(
    name: str, cells: list[Any], expected: dict[str, Any], said: str
) -> None:
    proposal = _propose(name, pd.Series(cells))
    assert dict(proposal.declared) == expected
    assert said in proposal.because


def test_what_is_declared_is_not_replaced_by_a_proposal() -> None:
    schema = Schema(scales={"x": "linear"}, booleans=("b",))
    proposals = {
        "x": _Proposal({"bounds": (0, 9), "scales": "log"}, ""),
        "b": _Proposal({"booleans": True}, ""),
    }
    completed = _with_proposals(schema, proposals)
    assert (completed.scales, completed.bounds, completed.booleans) == (
        {"x": "linear"},
        {"x": (0, 9)},
        ("b",),
    )


cells = st.one_of(
    st.sampled_from(
        ["", "NA", "yes", "No", "1", "0", "1,5", "1.234,5", "2020-01-01", "31.12.2020", "a b c d e f g"]
    ),
    st.text(max_size=5),
    st.integers(-(10**9), 10**9).map(str),
    st.floats(allow_nan=False).map(repr),
)


@given(st.lists(cells, min_size=2, max_size=40), st.sampled_from(["x", "customer_id", "zip"]))
def test_a_column_can_be_read_as_proposed_without_loss(values: list[str], name: str) -> None:
    table = pd.DataFrame(
        {
            name: pd.Series(values, dtype="str"),
            "y": ["a", "b"] * (len(values) // 2) + ["a"] * (len(values) % 2),
        }
    )
    schema = _with_proposals(Schema(label="y", classes=("a", "b")), {name: _propose(name, table[name])})
    report = check_table(table, schema)
    assert not report.problems
    for column in report.columns:
        finite = [value for value in values if "inf" not in value.casefold() and "e+30" not in value]
        assert column.losses.unknown == column.losses.unreadable == 0
        assert column.losses.clipped <= len(values) - len(finite)
    if report.columns:
        assert len(encode_table(table, schema)) == len(values)


# --- The check -------------------------------------------------------------------------------------------------------


SCHEMA = Schema.from_dict(DECLARED)
PERSON = Schema(label="y", classes=("0", "1"), bounds={"x": (0, 9)}, person="who")


def test_the_report_counts_what_each_column_loses() -> None:
    report = check_table(written(), SCHEMA)
    assert {column.name: column.losses for column in report.columns} == {
        "age": Losses(missing=1, clipped=1),
        "sex": Losses(missing=1, unknown=1),
        "gain": Losses(missing=1, clipped=1),
    }
    assert [column.kind for column in report.columns] == ["numeric", "categorical", "numeric"]
    assert (report.rows, report.ignored, report.classes) == (5, ("name",), {"no": 3, "yes": 2})
    assert (report.persons, report.unlabelled, report.problems) == (None, 0, ())


def test_the_report_counts_people_and_their_rows() -> None:
    text = "who,x,y\n" + "a,1,0\na,2,1\nb,3,0\n,4,1\n"
    report = check_table(written(text), PERSON)
    assert (report.persons, report.most_rows, report.without_person) == (2, 2, 1)
    assert report.problems == (
        "Row 4 has no value in the person column. Give each such row a value of its own, or delete it.",
    )


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


def test_hashed_free_text_and_columns_without_a_name_are_mentioned() -> None:
    rows = "".join(f"asked on day {row} about her loan;{row:05};{row % 2};\n" for row in range(60))
    schema = Schema(label="y", classes=("0", "1"), hashed={"note": 64, "zip": 64})
    report = check_table(written(f"note;zip;y;\n{rows}"), schema)
    assert (report.free_text, report.unnamed, report.problems) == (("note",), 1, ())
    text, unnamed = report.warnings
    assert "'note' seem to hold free text" in text
    assert unnamed == "1 column has no name, and will be ignored."


PEOPLE = pd.DataFrame({"age": ["25", "old", "?"], "ill": ["no", "YES", ""], "zip": ["1", "2", "3"]})


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, "does not declare the label"),
        ({"label": "ill", "classes": ["no", "yes"], "ignore_case": ["ill"]}, "1 row has no label"),
        ({"bounds": {"age": (0, 9)}}, "'zip' hold"),
        (
            {"label": "ill", "classes": ["no", "yes"]},
            "2 rows have no label, or one that is not in `classes`: add the class there, or delete such rows.",
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


def test_a_schema_that_does_not_fit_is_rejected() -> None:
    wrong = SCHEMA.updated({"bounds": {"agee": (0, 1)}})
    assert "no column 'agee'" in problem_of(InvalidInput, check_table, written(), wrong)
    assert "needs named columns" in problem_of(InvalidInput, check_table, Path("a.npz"), SCHEMA)

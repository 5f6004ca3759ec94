from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars
import pyarrow
import pytest

import quietmax
from quietmax.data import Schema, draft_schema, load
from quietmax.errors import InvalidData, InvalidInput
from tests.data.conftest import ErrorMessage
from tests.data.people import written

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
    schema = draft_schema(VISITS).schema
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
def test_a_draft_is_the_same_for_every_kind_of_table(kind: str, tmp_path: Path) -> None:
    table: Any = {"arrow": pyarrow.table(VISITS), "polars": polars.DataFrame(VISITS.to_dict("list"))}.get(
        kind
    )
    if kind == "csv":
        table = tmp_path / "visits.csv"
        VISITS.to_csv(table, index=False)
    elif kind == "parquet":
        table = str(tmp_path / "visits.parquet")
        VISITS.to_parquet(table)
    assert draft_schema(table).schema == draft_schema(VISITS).schema


def test_given_columns_need_no_confirmation() -> None:
    schema = quietmax.draft_schema(VISITS, label="region", person="visit_no").schema
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


def test_a_draft_trains_only_when_it_is_confirmed(tmp_path: Path) -> None:
    table = tmp_path / "visits.csv"
    VISITS.to_csv(table, index=False)
    draft = draft_schema(table)
    written(tmp_path, draft.to_toml(), "visits.toml")
    with pytest.raises(InvalidInput, match=r"delete its line under \[confirm\]"):
        load(table)
    assert load(table, infer=True).train.encoding.inferred  # type: ignore[union-attr]
    confirmed = draft.to_toml().partition("\n[confirm]")[0]
    written(tmp_path, confirmed, "visits.toml")
    data = load(table, holdout=0.3)
    assert data.train.encoding is not None
    assert not data.train.encoding.inferred
    assert (data.train.unit, len(set(data.records.persons))) == ("person", 30)  # type: ignore[arg-type]


def test_without_a_likely_label_the_draft_says_so() -> None:
    table = pd.DataFrame({"x": np.arange(50) / 7, "z": np.arange(50) * 1.5})
    draft = draft_schema(table)
    assert draft.schema.label is None
    assert "# label =" in draft.to_toml()
    assert draft_schema(table.assign(target=1, other=2.5)).schema.label == "target"


def test_a_label_with_very_many_values_gets_no_classes() -> None:
    schema = draft_schema(pd.DataFrame({"x": range(200), "price": range(200)}), label="price").schema
    assert schema.classes is None
    assert "more than 100 values" in schema.confirm["classes"]


def test_the_owner_of_a_label_with_a_third_value_is_told_to_look_at_it() -> None:
    two = pd.DataFrame({"age": [20, 30, 40], "ill": ["no", "yes", "no"]})
    three = pd.DataFrame({"age": [20, 30, 40], "ill": ["no", "yes", "unknown"]})
    assert "means unknown" not in draft_schema(two, label="ill").schema.confirm["classes"]
    assert (
        "means unknown, take it out and delete its rows"
        in draft_schema(three, label="ill").schema.confirm["classes"]
    )


def test_a_person_named_as_such_is_preferred_to_other_numbers() -> None:
    table = pd.DataFrame(
        {"loan_id": range(90), "patient": [number // 3 for number in range(90)], "y": [0, 1] * 45}
    )
    schema = draft_schema(table).schema
    assert (schema.person, schema.ignore) == ("patient", ("loan_id",))
    schema = draft_schema(table.drop(columns="patient")).schema
    assert (schema.person, schema.ignore) == (None, ("loan_id",))
    assert "number the rows, not people" in schema.confirm["ignore"]["loan_id"]


def test_a_number_that_repeats_is_proposed_as_person_with_a_doubt() -> None:
    table = pd.DataFrame({"account_no": [number // 3 for number in range(90)], "y": [0, 1] * 45})
    schema = draft_schema(table).schema
    assert schema.person == "account_no"
    assert "only because the values repeat" in schema.confirm["person"]


@pytest.mark.parametrize("name", ["patient_id", "Customer", "id", "visit_id"])
def test_a_draft_asks_whether_a_column_named_like_a_person_with_few_values_is_the_person(
    name: str, tmp_path: Path
) -> None:
    table = pd.DataFrame({name: [number % 4 for number in range(90)], "age": range(90), "y": [0, 1] * 45})
    draft = draft_schema(table)
    assert draft.schema.person is None
    question = draft.schema.confirm["person"]
    assert question.startswith(
        f"not proposed: is '{name}' the person? Its name says that it may be, and its "
    )
    assert f'person = "{name}"' in question
    (tmp_path / "draft.toml").write_text(draft.to_toml(), encoding="utf-8")
    read = Schema.from_file(tmp_path / "draft.toml")
    assert read.unconfirmed == draft.schema.unconfirmed
    assert "person" in read.unconfirmed
    assert "person" not in read.updated({"person": name, "ignore": ()}).unconfirmed


def test_a_draft_asks_nothing_about_numbers_of_rows_booleans_and_values_that_do_not_repeat() -> None:
    table = pd.DataFrame({"member": [0, 1, 1] * 30, "index": 9, "loan_id": range(90), "y": [0, 1] * 45})
    assert "person" not in draft_schema(table).schema.confirm


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
    schema = draft_schema(table).schema
    assert (schema.person, schema.label, schema.ignore) == (person, label, ("Compte",))
    assert schema.classes == ("non", "oui")
    assert "ids" in schema.confirm["ignore"]["Compte"]


def test_the_label_must_have_values_and_be_another_column_than_the_person(
    error_message: ErrorMessage,
) -> None:
    message = error_message(lambda: draft_schema(VISITS, label="left", person="left"), InvalidInput)
    assert message == "Column 'left' cannot be both the label and the person."
    assert "is empty" in error_message(lambda: draft_schema(VISITS, label="nothing"), InvalidInput)
    assert draft_schema(VISITS.rename(columns={"nothing": "target"})).schema.label == "left"


def test_what_is_not_a_table_with_rows_is_rejected(tmp_path: Path, error_message: ErrorMessage) -> None:
    assert "no column 'income'" in error_message(lambda: draft_schema(VISITS, label="income"), InvalidInput)
    assert "no rows" in error_message(lambda: draft_schema(VISITS[:0]), InvalidData)
    assert "list" in error_message(lambda: draft_schema([1, 2]), InvalidInput)
    assert "named columns" in error_message(lambda: draft_schema(tmp_path / "a.npz"), InvalidInput)

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quietmax.data import Encoding, Schema, draft_schema, encode_table, load
from quietmax.errors import DataUnavailable, InvalidInput
from tests.data.conftest import problem_of
from tests.data.people import DECLARED, expect_people, written


def test_declarations_come_from_a_toml_or_json_file_and_arguments_win() -> None:
    path = written()
    toml = """
        label = "ill"
        classes = ["no", "yes"]
        ignore = ["name"]
        bounds = { age = [20, 60], gain = [0, 5] }
        [categories]
        sex = ["f", "m"]
    """
    schema = written(toml, "schema.toml")
    expect_people(path, schema=schema, **{**dict.fromkeys(DECLARED), "bounds": {"gain": (0, 100)}})
    expect_people(path, schema=written(json.dumps(DECLARED), "schema.json"), **dict.fromkeys(DECLARED))
    expect_people(path, schema=Schema.from_dict(DECLARED), **dict.fromkeys(DECLARED))


def test_empty_declarations_leave_those_of_the_schema_file_as_they_are() -> None:
    schema = written(json.dumps(DECLARED), "schema.json")
    nothing: dict[str, Any] = {"label": None, "classes": None, "bounds": {}, "categories": {}, "ignore": []}
    expect_people(written(), schema=schema, **nothing)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("schema.toml", 'label = "ill', "not valid TOML"),
        ("schema.toml", "bounds = { größe = [0, 250] }", "letters such as ü need quotes"),
        ("schema.json", "{", "not valid TOML or JSON"),
        ("schema.json", "[1]", "one object"),
        ("schema.json", '{"lable": "ill"}', "Unknown key 'lable'"),
        ("schema.toml", "classes = true", "classes must be"),
        ("schema.toml", "bounds = { age = [0, 9], monthly.income = [0, 9] }", "; check that of 'monthly'."),
    ],
)
def test_a_wrong_schema_file_is_rejected(name: str, text: str, said: str) -> None:
    schema = written(text, name)
    message = problem_of(InvalidInput, load, written(), schema=schema)
    assert said in message
    assert str(schema) in message


def test_a_missing_schema_file_is_rejected() -> None:
    schema = Path("gone.toml")
    assert str(schema) in problem_of(DataUnavailable, load, written(), schema=schema)


def test_the_key_identifier_of_version_0_1_is_the_person_column() -> None:
    assert Schema.from_dict({"identifier": "patient"}) == Schema(person="patient")


EVERYTHING = Schema(
    label="churn",
    classes=("no", "yes"),
    bounds={"age": (0, 100), "Einkommen (€)": (0, 1e6), 'a"b': (-0.5, 1e300)},
    categories={"region": ("north", "sü\nd", "1")},
    scales={"Einkommen (€)": "log"},
    edges={"age": (18, 65.5)},
    complete=("age",),
    ignore=("notes", ""),
    person="customer id",
    dates={"joined": ("2010-01-01", "2020-12-31 08:00:00")},
    date_formats={"joined": "%d.%m.%Y"},
    booleans=("smoker",),
    decimal={"Einkommen (€)": ","},
    thousands={"Einkommen (€)": "."},
    units={"Einkommen (€)": "€"},
    hashed={"zip": 64},
    ignore_case=("region", "churn"),
    missing_values={"age": ("-999", "?\x7f")},
    crosses=(("region", "smoker"),),
    defaults={"age": 40, "region": "1", "smoker": "yes", "joined": "2015-06-30"},
    confirm={
        "person": "from the name",
        "bounds": {"age": 'bounds: "from" the values', "label": "x"},
        "ignore": {"": "y"},
    },
)


def test_a_schema_is_read_back_from_toml_and_json() -> None:
    toml = written(EVERYTHING.to_toml(), "schema.toml")
    text = written(json.dumps(EVERYTHING.to_dict()), "schema.json")
    assert Schema.from_file(toml) == Schema.from_file(text) == EVERYTHING
    assert Schema.from_dict(Schema().to_dict()) == Schema()
    assert Schema().to_toml().strip() == ""


@given(
    st.dictionaries(
        st.text(min_size=1).map(str.strip).filter(bool), st.lists(st.text().map(str.strip), max_size=3)
    )
)
def test_any_names_and_categories_are_read_back_from_toml(categories: dict[str, list[str]]) -> None:
    schema = Schema.from_dict({"categories": categories, "ignore": list(categories)})
    assert Schema.from_dict(tomllib.loads(schema.to_toml())) == schema


def test_dates_may_be_written_as_toml_dates() -> None:
    toml = "[dates]\nday = [2010-01-01, 2020-12-31]\nat = [2010-01-01T00:00:00, 2020-12-31T08:00:00Z]\n"
    schema = Schema.from_file(written(toml, "schema.toml"))
    assert schema.dates["day"] == ("2010-01-01", "2020-12-31")
    assert schema.dates["at"] == ("2010-01-01 00:00:00", "2020-12-31 08:00:00+00:00")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bounds", {"age": (0,)}),
        ("bounds", {"age": "09"}),
        ("bounds", [("age", 0, 1)]),
        ("categories", {"sex": "fm"}),
        ("classes", "yes"),
        ("ignore", "name"),
        ("dates", {"day": ["2010-01-01"]}),
        ("dates", {"day": "2010-01-01"}),
        ("booleans", "smoker"),
        ("hashed", {"zip": "64"}),
        ("hashed", {"zip": True}),
        ("hashed", ["zip"]),
        ("crosses", [["a"]]),
        ("crosses", ["ab"]),
        ("decimal", {"x": 1}),
        ("missing_values", {"x": "-999"}),
        ("defaults", {"x": ["a"]}),
        ("defaults", {"x": ""}),
        ("defaults", ["x"]),
        ("confirm", ["age"]),
        ("confirm", {"age": "bounds from the values"}),
        ("confirm", {"bounds": "from the values"}),
        ("confirm", {"label": {"age": "from the name"}}),
        ("confirm", {"bounds": {"age": 7}}),
        ("confirm", {"confirm": {"age": "from the values"}}),
    ],
)
def test_a_value_of_the_wrong_type_is_rejected(key: str, value: Any) -> None:
    assert f"{key} must be" in problem_of(InvalidInput, Schema.from_dict, {key: value})
    assert f"{key} must be" in problem_of(InvalidInput, Schema, **{key: value})


FACTS: dict[str, Any] = {
    "label": "y",
    "classes": ("no", "yes"),
    "bounds": {"age": (18, 100), "pay": (0, 1e6)},
    "decimal": {"pay": ","},
    "categories": {"region": ("North", "south", "7")},
    "ignore_case": ("region",),
    "booleans": ("smoker",),
    "dates": {"seen": ("2020-01-01", "2024-12-31")},
    "date_formats": {"seen": "%d.%m.%Y"},
    "hashed": {"zip": 8},
    "ignore": ("note",),
}
ROWS = pd.DataFrame(
    [["50", "70,5", "SOUTH", "no", "31.12.2022", "8001", "", "yes"]],
    columns=["age", "pay", "region", "smoker", "seen", "zip", "note", "y"],
)


def test_defaults_are_what_the_form_is_filled_with_and_change_nothing_else() -> None:
    toml = """
        [defaults]
        age = 40
        pay = 70.5
        region = "NORTH"
        smoker = true
        seen = 2021-02-03
        zip = "1010"
    """
    defaults = Schema.from_file(written(toml, "schema.toml")).defaults
    plain, filled = (encode_table(ROWS, Schema(**FACTS, defaults=given)) for given in ({}, defaults))
    assert plain.encoding is not None
    assert filled.encoding is not None
    assert dict(filled.encoding.defaults) == {
        "age": "40",
        "pay": "70.5",
        "region": "North",
        "smoker": "yes",
        "seen": "2021-02-03",
        "zip": "1010",
    }
    assert np.array_equal(plain.features, filled.features)
    assert plain.encoding == filled.encoding, "models of one table stay models of one table"
    assert Encoding.from_json(filled.encoding.to_json()).defaults == filled.encoding.defaults
    assert "defaults" not in plain.encoding.to_json(), "what was stored before stays the same"
    assert Encoding.from_json(plain.encoding.to_json()).defaults == ()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("age", 17),
        ("age", "many"),
        ("age", math.nan),
        ("age", True),
        ("region", "east"),
        ("region", "?"),
        ("smoker", "perhaps"),
        ("seen", "2019-12-31"),
        ("seen", "03.02.2021"),
        ("note", "x"),
        ("y", "yes"),
        ("other", "x"),
    ],
)
def test_a_default_that_its_column_does_not_declare_is_rejected(column: str, value: Any) -> None:
    said = problem_of(InvalidInput, encode_table, ROWS, Schema(**FACTS, defaults={column: value}))
    assert f"'{column}'" in said
    assert "default" in said or "no column 'other'" in said


def test_lists_and_numbers_of_a_schema_in_python_are_those_of_a_file() -> None:
    listed: dict[str, Any] = {
        "classes": 2,
        "categories": {" sex ": ["f", "m"]},
        "bounds": {"age": [0, 100]},
        "crosses": [["sex", "age"]],
        "booleans": ["smoker"],
    }
    assert Schema(**listed) == Schema.from_dict(listed)
    assert Schema(**listed).crosses == (("sex", "age"),)


CONFIRM = {"classes": "from the values", "bounds": {"age": "bounds 20 to 60: from the values"}}
DRAFTED = {**DECLARED, "confirm": CONFIRM}


def test_an_unconfirmed_draft_is_refused_with_the_names_of_what_to_confirm() -> None:
    message = problem_of(InvalidInput, load, written(), **DRAFTED)
    assert "nobody has confirmed classes, 'age' in bounds. Check" in message
    assert "[confirm]" in message
    assert "load the table with `infer`" in message  # `fit` has no such argument


def test_an_unconfirmed_draft_is_inferred_if_the_owner_says_so() -> None:
    encoding = load(written(), **DRAFTED, infer=True).train.encoding
    assert encoding.inferred == (
        "the lines of the schema that nobody has confirmed: classes, 'age' in bounds",
    )


def test_what_is_declared_as_an_argument_counts_as_confirmed() -> None:
    schema = Schema.from_dict(DRAFTED)
    confirmed = schema.updated({"bounds": {"age": (20, 60)}, "classes": ["no", "yes"]})
    assert not confirmed.confirm
    assert schema.updated({"bounds": {"gain": (0, 100)}}).confirm == CONFIRM
    more = schema.updated({"confirm": {"categories": {"sex": "from the values"}}})
    assert more.confirm == {**CONFIRM, "categories": {"sex": "from the values"}}
    expect_people(written(), schema=confirmed, **dict.fromkeys(DECLARED))


def test_only_the_fact_that_an_argument_states_counts_as_confirmed() -> None:
    rows = "".join(
        f"{'refused' if row == 5 else row % 90 * (1000 if row < 9 else 1)},{row % 2}\n" for row in range(200)
    )
    path = written(f"income,ill\n{rows}")
    draft = draft_schema(path, label="ill")
    assert set(draft.to_dict()) == {"label", "classes", "bounds", "scales", "missing_values", "confirm"}
    stated = draft.updated({"classes": 2, "bounds": {"income": (0, 100_000)}})
    assert set(stated.unconfirmed) == {"'income' in scales", "'income' in missing_values"}
    assert "'income' in scales" in problem_of(InvalidInput, load, path, schema=stated)
    further = stated.updated({"scales": {"income": "linear"}, "missing_values": {"income": ["refused"]}})
    assert not further.confirm
    assert len(load(path, schema=further).train) == 200


@pytest.mark.parametrize("name", ["label", "classes", "person", "bounds", "confirm", "columns"])
def test_a_column_may_have_the_name_of_a_key(name: str) -> None:
    rows = "".join(f"{row},{row % 37 * 1.5},{row % 2}\n" for row in range(100))
    path = written(f"customer_id,{name},ill\n{rows}")
    draft = draft_schema(path, label="ill", person="customer_id")
    assert Schema.from_dict(tomllib.loads(draft.to_toml())) == draft
    stated = draft.updated({"label": "ill", "classes": 2, "person": "customer_id"})
    assert stated.unconfirmed == (f"'{name}' in bounds",)
    assert "nobody has confirmed" in problem_of(InvalidInput, load, path, schema=stated)
    assert not stated.updated({"bounds": {name: (0, 1)}}).confirm


def test_nothing_is_to_be_confirmed_about_a_column_that_is_no_feature() -> None:
    draft = Schema(
        bounds={"a": (0, 1)}, ignore=("id",), confirm={"bounds": {"a": "x", "b": "x"}, "ignore": {"id": "x"}}
    )
    assert draft.updated({"person": "id"}).confirm == {"bounds": {"a": "x", "b": "x"}}
    assert draft.updated({"ignore": ["id", "a"]}).confirm == {"bounds": {"b": "x"}}


def test_a_list_replaces_the_one_of_the_draft_with_its_lines() -> None:
    draft = Schema(booleans=("a", "b"), confirm={"booleans": {"a": "x", "b": "x"}})
    stated = draft.updated({"booleans": ["a"]})
    assert (stated.booleans, stated.confirm) == (("a",), {})
    assert draft.updated({"booleans": []}) == draft


def test_ignored_columns_are_added_and_confirm_only_themselves() -> None:
    drafted = Schema(ignore=("note", "fax"), confirm={"ignore": {"note": "free text", "fax": "empty"}})
    updated = drafted.updated({"ignore": ["age", "note"]})
    assert updated.ignore == ("note", "fax", "age")
    assert updated.confirm == {"ignore": {"fax": "empty"}}
    assert drafted.updated({"label": "ill"}).ignore == ("note", "fax")

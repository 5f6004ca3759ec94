from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quietmax.data import Schema, load
from quietmax.errors import DataUnavailable, InvalidInput
from tests.data.conftest import ErrorMessage
from tests.data.people import DECLARED, expect_people, written


def test_declarations_come_from_a_toml_or_json_file_and_arguments_win(tmp_path: Path) -> None:
    path = written(tmp_path)
    toml = """
        label = "ill"
        classes = ["no", "yes"]
        ignore = ["name"]
        bounds = { age = [20, 60], gain = [0, 5] }
        [categories]
        sex = ["f", "m"]
    """
    schema = written(tmp_path, toml, "schema.toml")
    expect_people(path, schema=schema, **{**dict.fromkeys(DECLARED), "bounds": {"gain": (0, 100)}})
    expect_people(
        path, schema=written(tmp_path, json.dumps(DECLARED), "schema.json"), **dict.fromkeys(DECLARED)
    )
    expect_people(path, schema=Schema.from_dict(DECLARED), **dict.fromkeys(DECLARED))


def test_empty_declarations_leave_those_of_the_schema_file_as_they_are(tmp_path: Path) -> None:
    schema = written(tmp_path, json.dumps(DECLARED), "schema.json")
    nothing: dict[str, Any] = {"label": None, "classes": None, "bounds": {}, "categories": {}, "ignore": []}
    expect_people(written(tmp_path), schema=schema, **nothing)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("schema.toml", 'label = "ill', "not valid TOML"),
        ("schema.json", "{", "not valid TOML or JSON"),
        ("schema.json", "[1]", "one object"),
        ("schema.json", '{"lable": "ill"}', "Unknown key 'lable'"),
        ("schema.toml", "classes = true", "classes must be"),
    ],
)
def test_a_wrong_schema_file_is_rejected(
    tmp_path: Path, name: str, text: str, said: str, error_message: ErrorMessage
) -> None:
    schema = written(tmp_path, text, name)
    message = error_message(lambda: load(written(tmp_path), schema=schema), InvalidInput)
    assert said in message
    assert str(schema) in message


def test_a_missing_schema_file_is_rejected(tmp_path: Path, error_message: ErrorMessage) -> None:
    schema = tmp_path / "gone.toml"
    assert str(schema) in error_message(lambda: load(written(tmp_path), schema=schema), DataUnavailable)


def test_the_key_identifier_of_version_0_1_is_the_person_column() -> None:
    assert Schema.from_dict({"identifier": "patient"}) == Schema(person="patient")

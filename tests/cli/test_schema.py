from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from quietmax.data import Schema, draft_schema
from tests.cli.conftest import assert_error, document, printed, run

TABLE = "customer id; Âge ;income;region;joined;notes;left\n" + "".join(
    f'c{number // 3};{18 + number % 60};"{number}.000,50";{("Nord", "SÜD", "nord")[number % 3]};'
    f"{1 + number % 28}.3.2020;called on day {number} about a loan;{('no', 'Yes')[number % 2]}\n"
    for number in range(90)
)


@pytest.fixture
def customers() -> Path:
    path = Path("customers.csv")
    path.write_text(TABLE, encoding="utf-8")
    return path


def confirm(text: str) -> str:
    """The draft as an owner leaves it who agrees with every line."""
    return text.partition("\n[confirm]")[0] + "\n"


def test_a_draft_is_printed_as_toml_with_every_line_to_confirm(customers: Path) -> None:
    content = tomllib.loads(printed("schema", "draft", customers))
    assert Schema.from_dict(content) == draft_schema(customers)
    assert (content["label"], content["person"]) == ("left", "customer id")
    confirm = content["confirm"]
    assert {key for key, how in confirm.items() if isinstance(how, str)} == {"label", "classes", "person"}
    columns = {name for how in confirm.values() if isinstance(how, dict) for name in how}
    assert columns == {"Âge", "income", "region", "joined", "notes"}
    assert content["thousands"] == {"income": "."}


def test_a_draft_is_printed_as_json_that_is_a_schema_file(customers: Path) -> None:
    out = printed("schema", "draft", customers, "--label", "region", "--person", "notes", "--json")
    assert (json.loads(out)["label"], json.loads(out)["person"]) == ("region", "notes")
    Path("draft.json").write_text(out, encoding="utf-8")
    assert Schema.from_file(Path("draft.json")).label == "region"


def test_a_draft_must_be_confirmed_before_training_and_is_then_checked(customers: Path) -> None:
    _, text, _ = run("schema", "draft", customers)
    schema = customers.with_suffix(".toml")
    schema.write_text(text, encoding="utf-8")
    train = ("train", "head", customers, "--declared-size", 30, "-o", customers.parent / "head")
    assert_error(run(*train), 2, "nobody has confirmed", "'Âge'", "[confirm]", "--infer")
    code, out, err = run("schema", "check", customers)
    assert code == 1
    assert "Not confirmed: label, person, classes" in out
    assert "The schema is a draft: training refuses it until each line under [confirm]" in err
    schema.write_text(confirm(text), encoding="utf-8")
    code, out, err = run("schema", "check", customers)
    assert (code, err) == (0, "")
    assert "Not confirmed" not in out
    assert "Persons: 30, with at most 3 rows each." in out
    assert "Ignored" not in out
    assert re.search("notes *│ *text", out)


def test_the_check_shows_shares_for_the_owner(customers: Path) -> None:
    _, text, _ = run("schema", "draft", customers)
    narrow = confirm(text).replace('"Âge" = [0, 80]', '"Âge" = [0, 47]')
    schema = Path("narrow.toml")
    schema.write_text(narrow, encoding="utf-8")
    report = document("schema", "check", customers, "--schema", schema)
    losses = {column["name"]: column["losses"] for column in report["columns"]}
    assert losses["Âge"]["clipped"] == 30
    assert report["classes"] == {"Yes": 45, "no": 45}
    assert (report["persons"], report["most_rows"]) == (30, 3)
    out = printed("schema", "check", customers, "--schema", schema)
    assert "33.33%" in out
    assert "owner's eyes only" in out


def test_the_check_fails_if_training_would_be_refused(customers: Path) -> None:
    _, text, _ = run("schema", "draft", customers)
    schema = customers.with_suffix(".toml")
    schema.write_text(confirm(text).replace('income = ","', "").replace('income = "."', ""), encoding="utf-8")
    code, _, err = run("schema", "check", customers)
    assert (code, "cannot be read as numbers" in err) == (1, True)
    schema.unlink()
    code, _, err = run("schema", "check", customers)
    assert (code, "'customer id'" in err) == (1, True)
    assert f"quietmax schema draft {customers} --output {schema}" in err


def test_a_draft_is_written_to_a_file_that_is_replaced_only_on_demand(customers: Path) -> None:
    schema = customers.with_suffix(".toml")
    draft = ("schema", "draft", customers, "--output", schema)
    assert "[confirm]" in printed(*draft)
    assert schema.read_text(encoding="utf-8") == draft_schema(customers).to_toml()
    schema.write_text("mine", encoding="utf-8")
    assert_error(run(*draft), 2, "exists; --overwrite")
    assert_error(run(*draft, "--overwrite", "--label", "gone"), 2, "no column 'gone'")
    assert schema.read_text(encoding="utf-8") == "mine"
    assert run(*draft, "--overwrite")[0] == 0
    assert Schema.from_file(schema) == draft_schema(customers)
    assert run(*draft[:-1], Path("draft.json"))[0] == 0
    assert Schema.from_file(Path("draft.json")) == draft_schema(customers)
    assert_error(run(*draft[:-1], Path("draft.txt")), 2, ".toml or .json")


def test_the_check_mentions_people_with_one_row_each() -> None:
    table = Path("people.csv")
    table.write_text("who,x,y,\na,1,0,\nb,2,1,\n", encoding="utf-8")
    facts = 'label = "y"\nclasses = 2\nperson = "who"\nbounds = { x = [0, 9] }\n'
    table.with_suffix(".toml").write_text(facts, encoding="utf-8")
    code, out, err = run("schema", "check", table)
    assert (code, err) == (0, "")
    assert "Persons: 2, with at most 1 row each." in out
    assert "Note: Every person has just one row" in out
    assert "Note: 1 column has no name" in out

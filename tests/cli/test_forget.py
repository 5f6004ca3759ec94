from __future__ import annotations

import io
from pathlib import Path

import pytest

from quietmax.data import ErasureList
from tests.cli.conftest import assert_error, document, printed, run

SCHEMA = (
    'label = "ill"\nclasses = ["no", "yes"]\nperson = "who"\ncomplete = ["age"]\n[bounds]\nage = [0, 100]\n'
)


@pytest.fixture
def schema() -> Path:
    """A schema, and a head that was trained with it."""
    place = Path("people.toml")
    place.write_text(SCHEMA)
    rows = [f"Person-{number},{number % 100},{'yes' if number % 100 > 50 else 'no'}" for number in range(200)]
    Path("people.csv").write_text("\n".join(["who,age,ill", *rows]) + "\n")
    assert run("train", "head", "people.csv", "--schema", place, "--declared-size", 200, "-o", "head")[0] == 0
    return place


def test_a_person_gets_on_the_list_and_a_page_that_names_nobody(schema: Path) -> None:
    command = ("forget", "head", "--schema", schema, "--person", "Person-7", "--html", "page.html")
    told = document(*command)
    assert (told["list"], told["added"]) == ("people.erased", True)
    assert [(each["model"], each["trained_on"]) for each in told["models"]] == [("head", "maybe")]
    assert ErasureList.from_file("people.erased").entry("Person-7") == told["entry"]
    page = Path("page.html").read_text()
    assert told["entry"] in page
    shown = printed(*command)
    assert "was already on the erasure list" in " ".join(shown.split())
    assert "Nothing was deleted" in " ".join(shown.split())
    for text in (page, shown, str(told), Path("people.erased").read_text()):
        assert "person-7" not in text.lower()


def test_the_person_can_be_read_from_standard_input(schema: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Person-8\n"))
    told = document("forget", "--schema", schema, "--person", "-", "--list", "other.erased")
    assert ErasureList.from_file("other.erased").entry("Person-8") == told["entry"]
    assert told["in_words"] == ["No released model was named."]


def test_bad_input_puts_nobody_on_the_list(schema: Path) -> None:
    Path("plain.toml").write_text(SCHEMA.replace('person = "who"\n', 'ignore = ["who"]\n'))
    for arguments, code, message in (
        (("--schema", "plain.toml", "--person", "x"), 1, "must name a person column"),
        (("--schema", schema, "--person", ""), 2, "--person must be a value of the person column"),
        (("nowhere", "--schema", schema, "--person", "x"), 1, "no model in"),
    ):
        assert_error(run("forget", *arguments), code, message)
    assert not Path("people.erased").exists()
    Path("people.erased").write_text("{}")
    assert_error(run("forget", "--schema", schema, "--person", "x"), 1, "damaged")

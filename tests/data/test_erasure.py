"""The list of people who asked to be erased."""

from __future__ import annotations

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from quietmax.data import ErasureList, Schema, encode_table
from quietmax.errors import DataUnavailable, InvalidInput, QuietmaxError


def _holds(file: Path, *names: str) -> list[bool]:
    return ErasureList.from_file(file).holds(np.array(names, dtype=object)).tolist()


def test_a_list_holds_no_names_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    file = tmp_path / "people.erased"
    assert ErasureList.add(file, "Eva-Maria")
    text = file.read_text()
    assert "eva" not in text.lower()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    shown = repr(ErasureList.from_file(file))
    assert json.loads(text)["key"] not in shown


def test_two_lists_have_different_keys_and_hashes(tmp_path: Path) -> None:
    contents = []
    for name in ("a", "b"):
        ErasureList.add(tmp_path / name, "4711")
        contents.append(json.loads((tmp_path / name).read_text()))
    assert contents[0]["key"] != contents[1]["key"]
    assert contents[0]["persons"] != contents[1]["persons"]


@pytest.mark.parametrize("ignore_case", [False, True])
def test_a_person_is_found_in_a_table_as_the_table_names_the_person(
    tmp_path: Path, ignore_case: bool
) -> None:
    schema = Schema(
        label="ill",
        classes=("no", "yes"),
        bounds={"age": (0, 100)},
        complete=("age",),
        person="who",
        ignore_case=("who",) if ignore_case else (),
    )
    table = pd.DataFrame(
        {"who": [" Ann ", "bob", "ANN", "4711"], "age": [1, 2, 3, 4], "ill": ["no", "yes", "no", "no"]}
    )
    for person in ("ann", 4711):
        ErasureList.add(tmp_path / "erased", person)
    persons = encode_table(table, schema).persons
    assert persons is not None
    assert ErasureList.from_file(tmp_path / "erased").holds(persons).tolist() == [True, False, True, True]


def test_a_name_in_another_form_of_unicode_is_the_same_person(tmp_path: Path) -> None:
    ErasureList.add(tmp_path / "erased", "José\u00a0Ω")
    names = np.array(["Jose\u0301 ω", "JOSÉ \u2126", "Jose"], dtype=object)
    assert ErasureList.from_file(tmp_path / "erased").holds(names).tolist() == [True, True, False]


def test_people_who_are_added_at_the_same_time_are_all_on_the_list(tmp_path: Path) -> None:
    file = tmp_path / "erased"
    names = [f"person {number}" for number in range(40)]
    with ThreadPoolExecutor(8) as threads:
        added = list(threads.map(lambda name: ErasureList.add(file, name), [*names, *names]))
    assert sum(added) == 40
    assert all(_holds(file, *names))


def test_adding_a_person_again_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "erased"
    ErasureList.add(file, "Ann")
    before = file.read_bytes()
    assert not ErasureList.add(file, " ANN ")
    assert file.read_bytes() == before


@pytest.mark.parametrize("person", ["", "  ", "NA", None, float("nan"), "\ud800"])
def test_a_missing_value_is_no_person(tmp_path: Path, person: object) -> None:
    with pytest.raises(InvalidInput, match="value of the person column"):
        ErasureList.add(tmp_path / "erased", person)
    assert not (tmp_path / "erased").exists()


def test_a_missing_or_damaged_list_is_never_an_empty_one(tmp_path: Path) -> None:
    file = tmp_path / "erased"
    with pytest.raises(DataUnavailable, match="cannot be read"):
        ErasureList.from_file(file)
    with pytest.raises(QuietmaxError, match="cannot be written"):
        ErasureList.add(tmp_path / "missing" / "erased", "ann")
    ErasureList.add(file, "ann")
    good = json.loads(file.read_text())
    for change in (
        {"key": "ab"},
        {"persons": ["x" * 32]},
        {"persons": None},
        {"format": "other"},
        {"more": 1},
    ):
        file.write_text(json.dumps(good | change))
        with pytest.raises(DataUnavailable, match="damaged"):
            ErasureList.from_file(file)
    file.write_text("[" * 10_000)
    with pytest.raises(DataUnavailable, match="damaged"):
        ErasureList.add(file, "bob")

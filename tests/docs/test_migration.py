"""What the page about the migration from version 0.1 names is there."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from quietmax.cli import load_command
from quietmax.data.encoding import _FORMATS
from quietmax.ledger.database import MIGRATIONS
from quietmax.models.serialization import FORMAT_VERSION

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text(encoding="utf-8")


def _rows(heading: str) -> list[list[str]]:
    """The rows of the table under a row of headings."""
    lines = PAGE.split(f"\n\n| {heading} |\n")[1].splitlines()[1:]
    end = next(index for index, line in enumerate(lines) if not line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[:end]]


def _object(name: str) -> Any:
    """What a name inside of quietmax means; fields of dataclasses count."""
    found: Any = importlib.import_module("quietmax")
    path = "quietmax"
    for part in name.split("."):
        path += f".{part}"
        if hasattr(found, part):
            found = getattr(found, part)
        elif part in getattr(found, "__dataclass_fields__", {}):
            return found.__dataclass_fields__[part]
        else:
            found = importlib.import_module(path)
    return found


NAMES = re.findall(
    r"`((?:\w+\.)+\w+)`", " ".join(row[1] for row in _rows("version 0.1 | version 0.2") if len(row) == 2)
)


def test_there_are_names_to_check() -> None:
    assert len(NAMES) > 50


@pytest.mark.parametrize("name", NAMES)
def test_a_new_name_is_there(name: str) -> None:
    if name != "Teachers.ensemble_":  # set by fit
        _object(name)  # raises ImportError if there is no such name


@pytest.mark.parametrize(
    "row", _rows("call | argument in 0.1 | argument in 0.2"), ids=lambda row: " ".join(row[:2])
)
def test_a_new_argument_is_taken_and_an_old_one_is_not(row: list[str]) -> None:
    call = _object(row[0].strip("`"))
    taken = inspect.signature(call).parameters
    old, new = (re.findall(r"`(\w+)`", cell) for cell in row[1:])
    if row[0] == "`load`":  # declarations of tables are passed on; the paper's data sets keep `records`
        assert "holdout" in taken
        return
    assert set(new) <= set(taken)
    assert not set(old) & set(taken)


@pytest.mark.parametrize(
    "row", _rows("command | version 0.1 | version 0.2"), ids=lambda row: " ".join(row[:2])
)
def test_a_new_option_is_there_and_an_old_one_is_not(row: list[str]) -> None:
    name, *rest = row[0].strip("`").split()
    command = load_command(name)
    for part in rest:
        command = command.commands[part]
    options = {option for parameter in getattr(command, "params", ()) for option in parameter.opts}
    options |= {option for parameter in getattr(command, "params", ()) for option in parameter.secondary_opts}
    old, new = (set(re.findall(r"(--[\w-]+)", cell)) for cell in row[1:])
    assert new <= options
    assert not (old - new) & options


def test_the_new_commands_are_there() -> None:
    (listed,) = re.findall(r"^New commands: (.*)\.$", PAGE, re.MULTILINE)
    for words in re.findall(r"`([\w -]+)`", listed):
        command = load_command(words.split()[0])
        for part in words.split()[1:]:
            command = command.commands[part]


def test_the_versions_of_files_and_of_the_ledger_are_those_of_the_code() -> None:
    assert f"| format {FORMAT_VERSION} |" in PAGE
    assert f"`{_FORMATS[0]}`" in PAGE
    assert [int(row[0]) for row in _rows("schema | what is new")] == [*range(2, len(MIGRATIONS) + 1)]
    assert f"writes schema {len(MIGRATIONS)}" in PAGE

"""Shared by the tests of commands: run a command in this process; a table of people, queries and trained models."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from quietmax.cli import COMMANDS, load_command, main
from tests.cli.own_table import DECLARED, write_people

Result = tuple[int, str, str]
"""Exit code, stdout, stderr."""


class Captured(io.StringIO):
    """A stream whose `isatty` tests can replace."""


def run(*arguments: object) -> Result:
    """Run a command line in this process and return (exit code, stdout, stderr)."""
    with (
        pytest.MonkeyPatch.context() as patched,
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(Captured()) as err,
    ):
        patched.setattr(sys, "argv", ["quietmax", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()


def printed(*arguments: object) -> str:
    """What a command that must succeed prints on stdout."""
    code, out, err = run(*arguments)
    assert code == 0, err
    return out


def document(*arguments: object) -> Any:
    """The JSON document that a command that must succeed prints."""
    return json.loads(printed(*arguments, "--json"))


def assert_error(result: Result, code: int, *words: str) -> None:
    """One line on stderr that holds the words, nothing on stdout, and the exit code."""
    found, out, err = result
    assert (found, out) == (code, ""), err
    assert err.startswith("quietmax: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    for word in words:
        assert word in err


def _commands(command: Any, path: list[str]) -> Iterator[tuple[list[str], Any]]:
    """A command, or all subcommands of a group, with the words that call it."""
    if hasattr(command, "commands"):
        for name, subcommand in command.commands.items():
            yield from _commands(subcommand, [*path, name])
    else:
        yield path, command


def all_commands() -> Iterator[tuple[list[str], Any]]:
    """Every command of the command line."""
    for name in COMMANDS:
        yield from _commands(load_command(name), [name])


@pytest.fixture(autouse=True)
def in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test starts in an empty folder, which also gets the ledger."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUIETMAX_LEDGER", "ledger.sqlite")


@pytest.fixture
def people(tmp_path: Path) -> Path:
    """The file of a table whose label is easy to learn."""
    return write_people(tmp_path / "people.csv")


@pytest.fixture
def queries(tmp_path: Path) -> Path:
    """Two queries to a model of `people`: labels lo and hi."""
    path = tmp_path / "queries.csv"
    path.write_text("age,sex\n20,F\n85,M\n")
    return path


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of people, and a head, an ordinary network and teachers for 10 queries of it; tests get copies."""
    root = tmp_path_factory.mktemp("trained")
    people = write_people(root / "people.csv")
    for name, *options in (
        ("head", "--declared-size", 1000, "--epsilon", 4),
        ("network", "--epochs", 60, "--learning-rate", 0.01),
        ("teachers", "--queries", 10, "--declared-size", 480),
    ):
        printed("train", name, people, *DECLARED, *options, "-o", root / name)
    return root


def _copy_of(name: str, target: str) -> Any:
    """A fixture: the folder of a model that was trained on `people`, which the test may change."""

    @pytest.fixture(name=target)
    def copied(trained: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(trained / name, tmp_path / target))

    return copied


head, network, votes = _copy_of("head", "head"), _copy_of("network", "network"), _copy_of("teachers", "votes")

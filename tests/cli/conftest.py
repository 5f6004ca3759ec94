"""Shared by the tests of commands: run a command in this process; a table of people, queries and trained models."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from quietmax.cli import COMMANDS, load_command, main
from tests.cli.own_table import DECLARED, write_people

Result = tuple[int, str, str]
"""Exit code, stdout, stderr."""
Run = Callable[..., Result]


def _exit_code(*arguments: object) -> int:
    """Run a command line in this process."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["quietmax", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0)


def call(*arguments: object) -> Result:
    """Run a command line in this process, also where no fixture is, and return (exit code, stdout, stderr)."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = _exit_code(*arguments)
    return code, out.getvalue(), err.getvalue()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process and return (exit code, stdout, stderr)."""

    def call(*arguments: object) -> Result:
        code = _exit_code(*arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


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


def output_of(result: Result) -> str:
    """What a command that succeeded printed on stdout."""
    code, out, err = result
    assert code == 0, err
    return out


def json_of(result: Result) -> Any:
    """The JSON document that a command that succeeded printed."""
    return json.loads(output_of(result))


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
        assert _exit_code("train", name, people, *DECLARED, *options, "-o", root / name) == 0
    return root


@pytest.fixture
def head(trained: Path, tmp_path: Path) -> Path:
    """The folder of a private head trained on `people`."""
    return Path(shutil.copytree(trained / "head", tmp_path / "head"))


@pytest.fixture
def network(trained: Path, tmp_path: Path) -> Path:
    """The folder of an ordinary network trained on `people`."""
    return Path(shutil.copytree(trained / "network", tmp_path / "network"))


@pytest.fixture
def votes(trained: Path, tmp_path: Path) -> Path:
    """The folder of teachers trained on `people`, which are paid for 10 answers."""
    return Path(shutil.copytree(trained / "teachers", tmp_path / "votes"))

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner, Result

from quietmax.cli._options import arguments_of, with_groups


@dataclass(frozen=True, kw_only=True)
class Size:
    depth: Annotated[int, typer.Option()]
    width: Annotated[int, "Width of the box.", {"min": 1}] = 3
    names: Annotated[list[str] | None, typer.Option("--name")] = None


@with_groups
def command(
    *,
    title: Annotated[str, typer.Argument()],
    size: Size,
    loud: Annotated[bool, typer.Option("--loud")] = False,
) -> None:
    """Shows what it was given."""
    print(title, size, loud)


@with_groups
def smaller(*, size: Annotated[Size, "names"]) -> None:
    """Has a group without one of its fields."""
    print(size)


def _run(function: Any, *arguments: str) -> Result:
    app = typer.Typer()
    app.command()(function)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("box --width 5 --name a --name b --loud --depth 1", "Size(depth=1, width=5, names=['a', 'b']) True"),
        ("box --depth 1", "Size(depth=1, width=3, names=None) False"),
        ("box", None),  # a field without default is required
        ("box --depth 1 --width 0", None),  # below its limit
    ],
)
def test_the_fields_of_a_group_are_options_of_the_command(words: str, shown: str | None) -> None:
    done = _run(command, *words.split())
    assert done.exit_code == (2 if shown is None else 0)
    assert shown is None or done.output == f"box {shown}\n"


def test_a_field_that_the_command_does_not_have_keeps_its_default() -> None:
    assert _run(smaller, "--depth", "1").output == "Size(depth=1, width=3, names=None)\n"
    assert _run(smaller, "--depth", "1", "--name", "a").exit_code == 2


def test_the_help_is_that_of_the_command_and_of_the_fields() -> None:
    shown = _run(command, "--help").output
    assert "Shows what it was given." in shown
    assert "Width of the box." in shown


def test_arguments_are_the_options_that_were_given() -> None:
    assert arguments_of(Size(depth=0, names=[])) == {"depth": 0, "width": 3}

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from quietmax.cli._options import with_groups


@dataclass(frozen=True)
class Size:
    width: Annotated[int, typer.Option(min=1)] = 3
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


def _run(*arguments: str):
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments))


def test_a_group_s_fields_are_options_of_the_command():
    shown = _run("box", "--width", "5", "--name", "a", "--name", "b", "--loud")
    assert shown.output == "box Size(width=5, names=['a', 'b']) True\n"


def test_options_left_out_have_the_group_s_defaults():
    assert _run("box").output == "box Size(width=3, names=None) False\n"


def test_a_field_s_limits_are_checked_and_the_help_is_the_command_s_own():
    assert _run("box", "--width", "0").exit_code == 2
    assert "Shows what it was given." in _run("--help").output

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner, Result

from quietmax.cli._options import TableOptions, arguments_of, with_groups


@dataclass(frozen=True, kw_only=True)
class Size:
    depth: Annotated[int, typer.Option()]
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


def _run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments))


def test_the_fields_of_a_group_are_options_of_the_command() -> None:
    shown = _run("box", "--width", "5", "--name", "a", "--name", "b", "--loud", "--depth", "1")
    assert shown.output == "box Size(depth=1, width=5, names=['a', 'b']) True\n"


def test_options_that_are_not_given_have_the_defaults_of_the_group() -> None:
    assert _run("box", "--depth", "1").output == "box Size(depth=1, width=3, names=None) False\n"


def test_a_field_without_default_is_a_required_option() -> None:
    assert _run("box").exit_code == 2


def test_limits_of_a_field_are_checked_and_the_help_is_the_command_s_own() -> None:
    assert _run("box", "--depth", "1", "--width", "0").exit_code == 2
    assert "Shows what it was given." in _run("--help").output


def test_arguments_are_the_options_that_were_given() -> None:
    assert arguments_of(Size(depth=0, names=[])) == {"depth": 0, "width": 3}


def test_facts_about_a_table_are_arguments_of_load() -> None:
    facts = TableOptions(
        label="y", classes="no,yes", bounds=["age=0:100"], categories=["sex=F, M"], person="id", infer=True
    )
    assert facts.given() == {
        "label": "y",
        "classes": ["no", "yes"],
        "bounds": {"age": (0.0, 100.0)},
        "categories": {"sex": ("F", "M")},
        "person": "id",
        "infer": True,
    }
    assert TableOptions().given() == {}

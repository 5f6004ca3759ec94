from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.testing import CliRunner, Result

from quietmax.cli._options import DataOptions, TableOptions, arguments_of, with_groups
from quietmax.data.records import Holdout


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


def test_a_holdout_is_passed_on_only_if_it_is_given(people: Path) -> None:
    facts: dict[str, Any] = {
        "label": "income",
        "classes": "lo,hi",
        "bounds": ["age=18:90"],
        "categories": ["sex=F,M"],
    }
    everybody = DataOptions(**facts).load(str(people), quiet=True)
    assert (len(everybody.train), len(everybody.test)) == (1200, 0)
    parts = DataOptions(**facts, holdout=0.5, seed=2).load(str(people), quiet=True)
    assert parts.holdout == Holdout(0.5, seed=2)
    assert len(parts.train) + len(parts.test) == 1200
    assert len(DataOptions().load("mnist-5k", quiet=True).test) == 2000

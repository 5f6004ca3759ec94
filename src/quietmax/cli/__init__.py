"""The command line: a thin skin over the packages."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from quietmax.errors import QuietmaxError
from quietmax.version import __version__

# Options that take several values in a row, as in --datasets mnist location.
_LISTS = frozenset({"--datasets", "--methods", "--epsilons", "--attacks"})

# Every command is the module of its name: a function `command`, or a Typer `app` for a group.
COMMANDS = {
    "demo": "The whole story on real digits, in two minutes.",
    "datasets": "What data sets there are, and where their files come from.",
    "train": "Train on a data set or your own table; see --private.",
    "sensitivity": "The paper's sensitivities of a network: formulas, not bounds.",
    "predict": "Answer the queries of a file, with the guarantee's status.",
    "attack": "Can members be told from a model's answers?",
    "audit": "Test a claim: what an adversary can show against it.",
    "card": "The one-page privacy card of a model.",
    "serve": "Answer over HTTP; every answer is paid for in the ledger first.",
    "ledger": "Budgets, keys and the journal.",
    "compare": "Privacy and utility of every method on your own data.",
    "reproduce": "The paper's tables and figures, its numbers beside ours.",
}


class Commands(TyperGroup):
    """The commands by name and summary; a command's module is imported when it is called, as torch takes seconds."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, summary in COMMANDS.items():
            self.add_command(TyperCommand(name, help=summary))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command called, in earnest."""
        name, *rest = args
        return (name, loaded(name), rest) if name in COMMANDS else super().resolve_command(ctx, args)


def loaded(name: str) -> Any:
    """Import a command's module and build its parser."""
    try:
        module = import_module(f"quietmax.cli.{name}")
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("quietmax"):
            raise
        raise QuietmaxError(
            f"'quietmax {name}' needs further packages ({missing.name} is missing); "
            "install: pip install 'quietmax[serve]'."
        ) from missing
    if hasattr(module, "app"):
        return typer.main.get_group(module.app)
    single = typer.Typer(add_completion=False)
    single.command(name)(module.command)
    return typer.main.get_command(single)


app = typer.Typer(
    cls=Commands,
    name="quietmax",
    help="Private predictions from ordinary classifiers, with guarantees you can audit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quietmax {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version."
    ),
) -> None:
    """Private predictions from ordinary classifiers, with guarantees you can audit."""


def spread_lists(arguments: list[str]) -> list[str]:
    """Turn ``--datasets a b`` into ``--datasets a --datasets b``, which is what the parser takes.

    >>> spread_lists(["--datasets", "mnist", "adult", "--json"])
    ['--datasets', 'mnist', '--datasets', 'adult', '--json']
    """
    spread: list[str] = []
    current = None
    for argument, following in zip(arguments, [*arguments, "-"][1:], strict=True):
        if argument.startswith("-"):
            current = argument if argument in _LISTS and not following.startswith("-") else None
            if current is None:
                spread.append(argument)
        elif current is not None:
            spread += [current, argument]
        else:
            spread.append(argument)
    return spread


# The parser's complaints: click's class, or that of the copy of click which typer brings along.
_WrongUse: Any = typer.BadParameter.__base__


def main() -> None:
    """Run the command line; a refusal is one sentence on stderr and exit code 1."""
    try:
        sys.exit(app(spread_lists(sys.argv[1:]), prog_name="quietmax", standalone_mode=False))
    except QuietmaxError as refusal:
        _refuse(str(refusal))
    except _WrongUse as problem:
        told = " ".join(problem.format_message().split()).rstrip(".?").replace(". Did", "; did")
        if not told:  # a command without its subcommand: the help is on the screen
            sys.exit(1)
        where = "quietmax" if problem.ctx is None else problem.ctx.command_path
        _refuse(f"{told}; see '{where} --help'.")
    except OSError as problem:
        where = "" if problem.filename is None else f" for {str(problem.filename)[:60]!r}"
        _refuse(
            f"The system refused ({problem.strerror or problem}){where}; make room, or choose another file."
        )


def _refuse(sentence: str) -> NoReturn:
    from quietmax.cli._output import errors

    errors.print(f"quietmax: {sentence}", style="bold red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(1)

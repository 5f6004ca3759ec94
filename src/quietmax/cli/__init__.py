"""The command line: a thin skin over the packages."""

from __future__ import annotations

import sys

import typer

from quietmax.cli import (
    attack,
    audit,
    card,
    datasets,
    demo,
    ledger,
    predict,
    reproduce,
    sensitivity,
    serve,
    train,
)
from quietmax.cli.output import errors
from quietmax.errors import QuietmaxError
from quietmax.version import __version__

# Options that take several values in a row, as in --datasets mnist location.
_LISTS = frozenset({"--datasets"})

app = typer.Typer(
    name="quietmax",
    help="Private predictions from ordinary classifiers, with guarantees you can audit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for name, module in {
    "demo": demo,
    "datasets": datasets,
    "train": train,
    "sensitivity": sensitivity,
    "predict": predict,
    "attack": attack,
    "card": card,
    "serve": serve,
}.items():
    app.command(name)(module.command)
app.add_typer(audit.app, name="audit")
app.add_typer(ledger.app, name="ledger")
app.add_typer(reproduce.app, name="reproduce")


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
    for argument in arguments:
        if argument.startswith("-"):
            current = argument if argument in _LISTS else None
            if current is None:
                spread.append(argument)
        elif current is not None:
            spread += [current, argument]
        else:
            spread.append(argument)
    return spread


def main() -> None:
    """Run the command line; a refusal is one sentence on stderr and exit code 1."""
    try:
        app(spread_lists(sys.argv[1:]))
    except QuietmaxError as refusal:
        errors.print(f"quietmax: {refusal}", style="bold red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)

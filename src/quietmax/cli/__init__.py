"""The command line. A command's module is imported only when the command is called."""

from __future__ import annotations

import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any, NoReturn

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from quietmax import __version__
from quietmax._ray import is_ray_address
from quietmax.errors import InvalidData, InvalidInput, QuietmaxError, QuietmaxWarning

# Each command is a function or, if it has subcommands, a Typer app. It has a module of its own, where it is called
# `command` (perhaps with a `COMMAND_CLASS` for it) or `app`, or has its own name in one of the shared modules.
COMMANDS = {
    "demo": "End-to-end demo: a survey of people, then the paper.",
    "datasets": "List the data sets and where their files come from.",
    "schema": "Draft and check the schema of your own table.",
    "plan": "Forecast the accuracy of a head, before any budget is spent.",
    "train": "Train a private head, teachers, DP-SGD or a network.",
    "predict": "Answer the queries in a file or folder.",
    "evaluate": "Measure an accuracy that may be published.",
    "decide": "Choose the threshold or the costs of errors.",
    "explain": "Show which columns of a table matter to a model.",
    "sensitivity": "Compute the paper's sensitivity formulas.",
    "attack": "Run membership-inference attacks on a model.",
    "audit": "Search for lower bounds on a claimed epsilon.",
    "card": "Show the privacy card of a model.",
    "forget": "Leave a person out of later trainings, and say what stays.",
    "export": "Export a released model to ONNX, skops or MLflow.",
    "bundle": "Sign the files of a model folder.",
    "serve": "Serve models over HTTP.",
    "ask": "Ask a running service about all rows of a file.",
    "ledger": "Manage budgets, API keys and the audit log.",
    "witness": "Write down, at a second place, what a ledger has charged.",
    "compare": "Compare the privacy and utility of all methods on your data.",
    "reproduce": "Reproduce the paper's tables and figures.",
}
_SHARED = {
    **dict.fromkeys(
        ("evaluate", "decide", "explain", "card", "forget", "export", "bundle", "sensitivity"), "models"
    ),
    **dict.fromkeys(("datasets", "schema", "plan"), "data"),
    "ask": "predict",
    "witness": "ledger",
    **dict.fromkeys(("compare", "reproduce"), "experiments"),
}
"""The modules of commands that share one."""
# Options that take several values in a row, as in --datasets mnist location.
_LIST_OPTIONS = frozenset(
    {"--datasets", "--tables", "--methods", "--epsilons", "--attacks", "--at", "--cost"}
)

# Typer raises its own copy of click's UsageError, which it does not export.
_UsageError: Any = typer.BadParameter.__base__


class _Commands(TyperGroup):
    """All commands with their summaries; the module of a command is imported when the command is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, summary in COMMANDS.items():
            self.add_command(TyperCommand(name, help=summary))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, *rest = args
        return (name, load_command(name), rest) if name in COMMANDS else super().resolve_command(ctx, args)

    # Typer itself would end with 130 and no message.
    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        try:
            return super().make_context(*arguments, **settings)
        except KeyboardInterrupt:
            _fail("Interrupted.", 130)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interruption:
            _fail(str(interruption) or "Interrupted.", 130)


def load_command(name: str) -> Any:
    """Import the module of a command and build its parser."""
    module = import_module(f"quietmax.cli.{_SHARED.get(name, name)}")
    found = next(vars(module)[each] for each in (name, "app", "command") if each in vars(module))
    command: Any
    if isinstance(found, typer.Typer):
        command = typer.main.get_group(found)
        command.help = command.help or COMMANDS[name]
    else:
        single = typer.Typer(add_completion=False)
        single.command(name, cls=getattr(module, "COMMAND_CLASS", TyperCommand))(found)
        command = typer.main.get_command(single)
    _prepare(command)
    return command


def _prepare(command: Any) -> None:
    """Let rich print help texts unchanged, and let errors of a command name its flags; includes subcommands."""
    for part in (command, *command.params):
        if getattr(part, "help", None):
            part.help = "\n\n".join(" ".join(escape(each).split()) for each in part.help.split("\n\n"))
    if hasattr(command, "commands"):
        for subcommand in command.commands.values():
            _prepare(subcommand)
    else:
        command.callback = _reporting_errors(command)


def _reporting_errors(command: Any) -> Callable[..., Any]:
    """The function of a command, with errors printed as one line that names flags instead of arguments."""
    function = command.callback
    flags = {each.name: each.opts[0] for each in command.params if each.param_type_name == "option"}

    @wraps(function)
    def _run(*arguments: Any, **options: Any) -> Any:
        try:
            with _printed_warnings(flags):
                return function(*arguments, **options)
        except QuietmaxError as problem:
            usage = isinstance(problem, InvalidInput) and not isinstance(problem, InvalidData)
            _fail(_name_flags(str(problem), flags), 2 if usage else 1)

    return _run


@contextmanager
def _printed_warnings(flags: Mapping[str, str]) -> Iterator[None]:
    """Print our warnings as one line on stderr that names flags instead of arguments."""
    with warnings.catch_warnings():
        before = warnings.showwarning

        def _show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if not issubclass(category, QuietmaxWarning):
                before(message, category, *place, **more)
                return
            from quietmax.cli._output import print_note

            print_note(_name_flags(str(message), flags))

        warnings.showwarning = _show
        yield


def _name_flags(message: str, flags: Mapping[str, str]) -> str:
    """Replace argument names in an error message by the flags of the command line."""

    def _with_value(found: re.Match[str]) -> str:
        return f"{flags[found[1]]} {shlex.quote(found[2])}" if found[1] in flags else found[0]

    def _alone(found: re.Match[str]) -> str:
        return flags.get(found[1] or found[2] or found[3], found[0])

    message = re.sub(r"\b(\w+)='([^']*)'", _with_value, message)
    return re.sub(r"`(\w+)`|^([a-z]\w*)\b|\b([a-z]+_\w+)\b", _alone, message)


app = typer.Typer(
    cls=_Commands,
    name="quietmax",
    help="Private predictions from ordinary classifiers, with guarantees you can audit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quietmax {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Show the version."
    ),
) -> None:
    """Private predictions from ordinary classifiers, with guarantees you can audit."""


def main() -> None:
    """Run the command line.

    Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted. Errors are one line on stderr.
    """
    try:
        sys.exit(app(_rewritten(sys.argv[1:]), prog_name="quietmax", standalone_mode=False))
    except _UsageError as problem:
        message = " ".join(problem.format_message().split()).replace("Value error, ", "")
        if not message:  # a group without a command: its help is already printed
            sys.exit(2)
        place = "quietmax" if problem.ctx is None else problem.ctx.command_path
        _fail(f"{message.rstrip('.')} (see '{place} --help').", 2)
    except QuietmaxError as problem:  # while the command line is parsed
        _fail(str(problem), 1)
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.startswith("quietmax"):
            raise
        extra = "ray" if missing.name == "ray" else "serve"
        _fail(
            f"The package {missing.name} is not installed. Install it with: pip install 'quietmax[{extra}]'",
            1,
        )
    except OSError as problem:
        place = "" if problem.filename is None else f": {str(problem.filename)[:60]!r}"
        _fail(f"The operating system reported an error ({problem.strerror or problem}){place}.", 1)


def _rewritten(arguments: list[str]) -> list[str]:
    """Write ``--datasets a b`` as ``--datasets a --datasets b``, and ``--ray`` without address as ``--ray local``."""
    written: list[str] = []
    current = None
    for argument, following in zip(arguments, [*arguments, "-"][1:], strict=True):
        if current is not None and not argument.startswith("-"):
            written += [current, argument]
            continue
        current = argument if argument in _LIST_OPTIONS and not following.startswith("-") else None
        if current is None:
            written.append(argument)
        if argument == "--ray" and not is_ray_address(following):
            written.append("local")
    return written


def _fail(message: str, code: int) -> NoReturn:
    """Print the message on stderr and exit with the code."""
    from quietmax.cli._output import print_error

    print_error(message)
    sys.exit(code)

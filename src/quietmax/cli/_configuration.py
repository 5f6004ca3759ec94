"""Options from the environment and from a TOML file: every option of a command, declared once.

The command line comes first, then the environment (``QUIETMAX_PORT``), the file of ``--config`` (``port``), and the
default. Click looks values up in this order by itself; this module names the variables and checks the file.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer
from typer.core import TyperCommand

from quietmax.errors import InvalidData, InvalidInput, QuietmaxError, unknown_name

PREFIX = "QUIETMAX_"
_NOT_IN_FILE = ("config", "check")
_NOT_A_VARIABLE = ("check",)
# Kubernetes sets QUIETMAX_PORT=tcp://10.0.0.1:8080 in every pod beside a service that is called quietmax.
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")
_SERVICE_VARIABLE = re.compile(
    r".*_SERVICE_(HOST|PORT(_\w+)?)|.*_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?"
)
OTHER_VARIABLES = frozenset(
    PREFIX + name
    for name in (
        *("DATA", "LEDGER_HEAD", "KEY"),
        # of tests and benchmarks
        *(
            "BENCH_ROWS",
            "CHROMIUM",
            "INVARIANT_TABLES",
            "KILLS",
            "PYTHONS",
            "SAME_NUMBERS",
            "SCREENSHOTS",
            "WRITE_FIXTURES",
        ),
    )
)
"""Variables that are no options of the command, but mean something elsewhere."""
_TOML_TYPES: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
    list: ((list,), "a list of strings"),
}


@dataclass(frozen=True)
class Setting:
    """One option with its other names."""

    flags: tuple[str, ...]  # How the command line writes it; empty for an argument
    key: str  # Its key in the TOML file and, in upper case, in the environment variable
    option: Any  # The parameter of Click

    @property
    def variable(self) -> str | None:
        """Its environment variable."""
        return None if self.key in _NOT_A_VARIABLE else PREFIX + self.key.upper()

    @property
    def in_file(self) -> bool:
        """Whether the TOML file can set it."""
        return self.key not in _NOT_IN_FILE


def settings_of(command: Any) -> list[Setting]:
    """List the options of a command, and its arguments, with their other names."""
    settings = []
    for option in command.params:
        if option.name == "help":
            continue
        if option.param_type_name == "argument":
            settings.append(Setting((), option.name, option))
        else:
            key = option.opts[0].lstrip("-").replace("-", "_")
            settings.append(Setting((*option.opts, *option.secondary_opts), key, option))
    return settings


class ConfigurableCommand(TyperCommand):
    """A command whose options are environment variables too."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        for setting in settings_of(self):
            variable = setting.variable
            if variable is not None and not _is_service_link(variable):
                setting.option.envvar = variable
                setting.option.show_envvar = False  # the help would have twice as many lines

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; an error says where the value was set."""
        try:
            left = super().parse_args(ctx, args)
            check_variables(self, os.environ)
            return left
        except typer.BadParameter as problem:
            option: Any = problem.param
            source = None if option is None else ctx.get_parameter_source(option.name)
            if source is not None and source.name == "ENVIRONMENT":
                problem.message += f" (set by {option.envvar})"
            elif source is not None and source.name == "DEFAULT_MAP":
                problem.message += f" (set by {ctx.params['config']})"
            raise


def check_variables(command: Any, variables: Mapping[str, str]) -> None:
    """Check that every variable of ours in an environment is one that the command knows."""
    known = [setting.variable for setting in settings_of(command) if setting.variable is not None]
    for name, value in sorted(variables.items()):
        if not name.startswith(PREFIX) or name in known or name in OTHER_VARIABLES:
            continue
        if _SERVICE_VARIABLE.fullmatch(name) or _SERVICE_LINK.match(value):
            continue
        (nearest,) = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise InvalidInput(
            f"Unknown environment variable {name}; the nearest valid name is {nearest}. Unset it if it is not meant "
            "for this command."
        )


def _is_service_link(variable: str) -> bool:
    return variable.endswith("_PORT") and bool(_SERVICE_LINK.match(os.environ.get(variable, "")))


def _use_file(context: typer.Context, path: Path | None) -> Path | None:
    """Take the values of the file as defaults of the other options."""
    if path is not None:
        context.default_map = read_file(path, settings_of(context.command))
    return path


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        is_eager=True,
        callback=_use_file,
        metavar="FILE",
        help="TOML file with options: max_rows = 100 for --max-rows 100.",
    ),
]


def read_file(path: Path, settings: list[Setting]) -> dict[str, Any]:
    """Read a TOML file of options."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise QuietmaxError(f"Cannot read the configuration {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidData(f"The configuration {path} is not a TOML file: {error}.") from error
    known = {setting.key: setting for setting in settings if setting.in_file}
    for key, value in values.items():
        if key not in known:
            raise InvalidData(f"{path}: {unknown_name('key', key, known)}")
        _check_type(path, known[key], value)
    return {known[key].option.name: value for key, value in values.items()}


def _check_type(path: Path, setting: Setting, value: Any) -> None:
    """Raise unless TOML gives the value the option's type: Click itself would turn 8080.5 into a port."""
    annotation = setting.option.type_descriptor.annotation
    kind = get_origin(annotation) or annotation
    types, expected = _TOML_TYPES.get(kind, ((str,), "a string"))
    valid = isinstance(value, types) and (kind is bool or not isinstance(value, bool))
    if kind is list:
        valid = valid and all(isinstance(each, str) for each in value)
    if not valid:
        raise InvalidData(f"{path}: {setting.key} must be {expected}.")

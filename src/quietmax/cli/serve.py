"""`quietmax serve`: serve models over HTTP.

Every option is also an environment variable and a key of the file of ``--config``. The command line comes first, then
the environment (``QUIETMAX_PORT``), the file (``port``), and the default. Click looks values up in this order; this
module names the variables and checks the file. Most options are fields of the classes in `quietmax.server.settings`.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import typer
from typer.core import TyperCommand

from quietmax.cli._options import Json, with_groups
from quietmax.cli._output import errors, print_json
from quietmax.errors import (
    InvalidData,
    InvalidInput,
    QuietmaxError,
    checked_positive,
    counted,
    unknown_name,
)
from quietmax.server.settings import Listener, Settings

if TYPE_CHECKING:
    from quietmax.ledger.accounts import Terms
    from quietmax.ledger.ledger import Ledger
    from quietmax.server.deployment import Deployment
    from quietmax.server.service import Service
    from quietmax.server.telemetry import Metrics

PREFIX = "QUIETMAX_"
_NOT_IN_FILE = ("config", "check")
# Kubernetes sets QUIETMAX_PORT=tcp://10.0.0.1:8080 in every pod beside a service that is called quietmax.
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")
_SERVICE_VARIABLE = re.compile(
    r".*_SERVICE_(HOST|PORT(_\w+)?)|.*_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?"
)
_OTHER_VARIABLES = tuple(
    PREFIX + name
    for name in (
        *("DATA", "LEDGER_HEAD", "KEY"),
        # of tests and benchmarks
        *("BENCH_ROWS", "CHROMIUM", "INVARIANT_TABLES", "KILLS", "PYTHONS", "SAME_NUMBERS", "SCREENSHOTS"),
        "WRITE_FIXTURES",
    )
)
"""Variables that are no options of the command, but mean something elsewhere."""


class ServeOption(NamedTuple):
    """One option or argument with its other names."""

    key: str  # Its key in the TOML file
    variable: str | None  # Its environment variable
    in_file: bool  # Whether the TOML file can set it
    option: Any  # The parameter of Click


def options_of(command: Any) -> list[ServeOption]:
    """List the options of a command, and its arguments, with their other names."""
    keys = {option.opts[0].lstrip("-").replace("-", "_"): option for option in command.params}
    return [
        ServeOption(key, None if key == "check" else PREFIX + key.upper(), key not in _NOT_IN_FILE, option)
        for key, option in keys.items()
        if key != "help"
    ]


class ConfigurableCommand(TyperCommand):
    """A command whose options are environment variables too."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        for setting in options_of(self):
            variable = setting.variable
            if variable is not None and not (
                variable.endswith("_PORT") and _SERVICE_LINK.match(os.environ.get(variable, ""))
            ):
                setting.option.envvar = variable
                setting.option.show_envvar = False  # the help would have twice as many lines

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; an error says where the value was set."""
        try:
            left = super().parse_args(ctx, args)
            _check_variables(self, os.environ)
            return left
        except typer.BadParameter as problem:
            option: Any = problem.param
            source = None if option is None else ctx.get_parameter_source(option.name)
            if source is not None and source.name == "ENVIRONMENT":
                problem.message += f" (set by {option.envvar})"
            elif source is not None and source.name == "DEFAULT_MAP":
                problem.message += f" (set by {ctx.params['config']})"
            raise


def _check_variables(command: Any, variables: Mapping[str, str]) -> None:
    """Check that every variable of ours in an environment is one that the command knows."""
    known = [setting.variable for setting in options_of(command) if setting.variable is not None]
    for name, value in sorted(variables.items()):
        of_kubernetes = _SERVICE_VARIABLE.fullmatch(name) or _SERVICE_LINK.match(value)
        if not name.startswith(PREFIX) or name in known or name in _OTHER_VARIABLES or of_kubernetes:
            continue
        (nearest,) = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise InvalidInput(
            f"Unknown environment variable {name}; the nearest valid name is {nearest}. Unset it if it is not meant "
            "for this command."
        )


def _use_file(context: typer.Context, path: Path | None) -> Path | None:
    """Take the values of a TOML file as defaults of the other options."""
    if path is None:
        return None
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise QuietmaxError(f"Cannot read the configuration {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidData(f"The configuration {path} is not a TOML file: {error}.") from error
    known = {setting.key: setting.option for setting in options_of(context.command) if setting.in_file}
    for key, value in values.items():
        if key not in known:
            raise InvalidData(f"{path}: {unknown_name('key', key, known)}")
        several = known[key].nargs == -1
        if isinstance(value, list) != several or isinstance(value, dict):
            raise InvalidData(f"{path}: {key} must be {'a list of strings' if several else 'one value'}.")
    # As text, so that they are read as on the command line: Click would turn the number 8080.5 into a port.
    context.default_map = {
        known[key].name: list(map(str, value)) if isinstance(value, list) else str(value)
        for key, value in values.items()
    }
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
COMMAND_CLASS = ConfigurableCommand


@dataclass(frozen=True)
class _Models:
    """What is served, and who pays."""

    PANEL: ClassVar = "Models, ledger and budget"

    repository: Annotated[
        Path | None,
        "Directory of models as NAME/VERSION. The highest version of each is served; SIGHUP reads what is new.",
    ] = None
    keep_versions: Annotated[
        int, "Versions of each model of the --repository that clients can ask for.", {"min": 1}
    ] = 1
    accept_unproven: Annotated[bool, "Serve models without a proven guarantee; answers carry a warning."] = (
        False
    )
    accept_weak: Annotated[
        bool,
        "Serve models whose proven guarantee is weak: an adversary may be right 75% of the time or more.",
    ] = False
    ledger: Annotated[str | None, "SQLite file or postgresql://... URL. Default: one file per user."] = None
    ledger_file: Annotated[Path | None, "File that holds the URL of --ledger, a secret."] = None
    ledger_password_file: Annotated[Path | None, "File that holds the password of a PostgreSQL ledger."] = (
        None
    )
    budget: Annotated[
        float | None, "Epsilon of the training set's total budget. Default: the model's own."
    ] = None
    delta: Annotated[float, "Delta of --budget."] = 0.0
    queries: Annotated[int | None, "Ordinary model: number of answers that share --budget.", {"min": 1}] = (
        None
    )
    account: Annotated[str | None, "Account of the training set. Default: the name of the data set."] = None
    because: Annotated[
        str | None, "Reason to move the records to another --account; the audit log keeps it."
    ] = None

    def _terms(self) -> Terms | None:
        """The budget that the owner states, if any."""
        from quietmax.ledger.accounts import Terms

        if self.budget is None and self.delta:
            raise InvalidInput("`delta` requires `budget`.")
        if self.because is not None and self.account is None:
            raise InvalidInput("`because` requires `account`.")
        return None if self.budget is None else Terms(checked_positive(self.budget, "budget"), self.delta)

    def _load(self, models: list[str]) -> list[Deployment]:
        from quietmax.server.deployment import load_models

        return load_models(
            models, budget=self._terms(), queries=self.queries, accept_unproven=self.accept_unproven
        )

    def _deploy(
        self, ledger: Ledger, models: Iterable[Deployment], because: str | None = None
    ) -> list[Deployment]:
        from quietmax.server.deployment import deploy

        return deploy(ledger, models, **self._choices(because))

    def _choices(self, because: str | None) -> dict[str, Any]:
        return {
            "budget": self._terms(),
            "account": self.account,
            "because": because,
            "accept_weak": self.accept_weak,
        }

    def _check(self, address: str, models: list[Deployment]) -> None:
        """Check models against the ledger, if it exists already."""
        from quietmax.ledger.ledger import Ledger, ledger_exists
        from quietmax.server.deployment import check_deployments

        with Ledger(address, read_only=True) if ledger_exists(address) else nullcontext() as ledger:
            if ledger is not None:
                ledger.check_damage()
            check_deployments(ledger, models, **self._choices(self.because))


@with_groups
def command(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Model folders: FOLDER, NAME=FOLDER or NAME/VERSION=FOLDER.", show_default=False),
    ] = None,
    *,
    config: Config = None,  # noqa: ARG001 (its callback has read the file)
    workers: Annotated[int, "Worker processes behind the port.", {"min": 1}] = 1,
    check: Annotated[
        bool,
        "Check options, models, ledger, certificate and ports, then exit. Nothing is charged or written.",
    ] = False,
    as_json: Json = False,
    chosen: _Models,
    listener: Listener,
    settings: Annotated[Settings, "max_header_bytes", "max_headers", "max_in_flight"],
) -> None:
    """Serve models over the Open Inference Protocol v2. The ledger charges every answer before it is drawn.

    Every option is also an environment variable (QUIETMAX_MAX_ROWS for --max-rows) and a key of the file of --config
    (max_rows). The command line comes first, then the environment, then the file.

    Examples:

    quietmax serve digits=private

    quietmax serve digits=private --ledger postgresql://localhost/quietmax

    quietmax serve model --accept-unproven --budget 10 --ledger trial.sqlite
    """
    from quietmax.ledger.database import configured_url, hide_password, parse_url
    from quietmax.ledger.ledger import Ledger
    from quietmax.server.deployment import ModelRepository
    from quietmax.server.run import supervise
    from quietmax.server.service import Service
    from quietmax.server.telemetry import Log

    _use_one_thread()
    if not models and chosen.repository is None:
        raise InvalidInput("At least one model must be named in `models`, or a `repository`.")
    if settings.anonymous:
        listener.check_anonymous()
    address = configured_url(chosen.ledger, chosen.ledger_file, chosen.ledger_password_file)
    loaded, repository = chosen._load(models or []), None
    if chosen.repository is not None:
        reserved = {each.name for each in loaded}
        repository = ModelRepository(
            chosen.repository, chosen._load, chosen._deploy, reserved, chosen.keep_versions
        )
    if check:
        listener.check_ports()
        served = [*loaded, *(repository.start(None) if repository else [])]
        chosen._check(address, served)
        lines = [f"{each.label} ({each.status})" for each in served]
        checked = {"ledger": hide_password(parse_url(address)), "served": lines}
        _tell(checked, "The configuration is valid. The ledger is {ledger}.", as_json=as_json)
        return

    def _create_service(metrics: Metrics) -> Service:
        ledger = Ledger(address)
        # The command has checked the strength; a budget that was raised since then must not stop a worker.
        deployed = replace(chosen, accept_weak=True)._deploy(ledger, loaded)
        return Service(ledger, deployed, settings, metrics=metrics, repository=repository)

    with listener.reserve_grpc_port() as listener:
        opened, log = listener.open_socket(), Log()
        with Ledger(address) as ledger:
            served = chosen._deploy(ledger, loaded, chosen.because)
            served += repository.start(ledger) if repository else []
            told: dict[str, Any] = {
                "url": listener.url(opened),
                "grpc_port": listener.grpc_port,
                "ledger": ledger.address,
                "served": [_served_line(each) for each in served],
                "warnings": _start_warnings(served, ledger, settings),
            }
        if as_json or sys.stderr.isatty():
            grpc = "" if listener.grpc_port is None else " (gRPC on port {grpc_port})"
            _tell(told, f"Serving on {{url}}{grpc} with the ledger {{ledger}}.", as_json=as_json)
        else:
            log.event("serving", **told)
            log.flush()  # before the lines of the workers
        supervise(_create_service, listener, opened, log, workers)


def _use_one_thread() -> None:
    """Let torch use one thread: requests run in parallel, and a small network gains nothing from more."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    else:  # a head does not need it
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"


def _tell(told: dict[str, Any], sentence: str, *, as_json: bool) -> None:
    """Say what is served, or would be: as JSON on stdout, or as text."""
    if as_json:
        print_json(told)
        return
    errors.print(sentence.format_map(told), highlight=False)
    for line in told["served"]:
        errors.print(f"  {line}", highlight=False)
    for warning in told.get("warnings", ()):
        errors.print(warning, style="yellow", highlight=False)


def _served_line(deployment: Deployment) -> str:
    account, answers = deployment.account, "answers are free"
    if deployment.unit_cost:
        answers = f"{counted(account.remaining_units // deployment.unit_cost, 'answer')} left"
    return f"{deployment.label} ({deployment.total_guarantee(account).summary}): account {account.name}, {answers}"


def _start_warnings(served: list[Deployment], ledger: Ledger, settings: Settings) -> list[str]:
    """Return what the operator should know at the start."""
    warnings = []
    for deployment in served:
        account = deployment.account
        if account.remaining_units < deployment.unit_cost:
            warnings.append(
                f"The budget of the account {account.name} is exhausted. 'quietmax ledger grant' raises it."
            )
        if deployment.warning:
            warnings.append(f"{deployment.label}: {deployment.warning}")
    if not ledger.keys() and not settings.anonymous and settings.oidc_issuer is None:
        warnings.append("There is no API key yet. Create one with: quietmax ledger key create NAME")
    return list(dict.fromkeys(warnings))  # models may share an account

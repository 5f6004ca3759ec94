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
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_origin

import typer
from typer.core import TyperCommand

from quietmax.cli._options import Json, with_groups
from quietmax.cli._output import errors, print_json
from quietmax.errors import InvalidData, InvalidInput, QuietmaxError, counted, unknown_name
from quietmax.server.settings import Listener, ServiceOptions, Settings, read_session_secret

if TYPE_CHECKING:
    from quietmax.ledger.accounts import Terms
    from quietmax.server.deployment import Deployment
    from quietmax.server.repository import ModelControl
    from quietmax.server.service import Service
    from quietmax.server.telemetry import Log, Metrics

PREFIX = "QUIETMAX_"
_NOT_IN_FILE = ("config", "check")
_NOT_A_VARIABLE = ("check",)
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
_TOML_TYPES: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
    list: ((list,), "a list of strings"),
}


@dataclass(frozen=True)
class ServeOption:
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


def options_of(command: Any) -> list[ServeOption]:
    """List the options of a command, and its arguments, with their other names."""
    settings = []
    for option in command.params:
        if option.name == "help":
            continue
        if option.param_type_name == "argument":
            settings.append(ServeOption((), option.name, option))
        else:
            key = option.opts[0].lstrip("-").replace("-", "_")
            settings.append(ServeOption((*option.opts, *option.secondary_opts), key, option))
    return settings


class ConfigurableCommand(TyperCommand):
    """A command whose options are environment variables too."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        for setting in options_of(self):
            variable = setting.variable
            if variable is not None and not _is_service_link(variable):
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
        if not name.startswith(PREFIX) or name in known or name in _OTHER_VARIABLES:
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
        context.default_map = _read_file(path, options_of(context.command))
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


def _read_file(path: Path, settings: list[ServeOption]) -> dict[str, Any]:
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


def _check_type(path: Path, setting: ServeOption, value: Any) -> None:
    """Raise unless TOML gives the value the option's type: Click itself would turn 8080.5 into a port."""
    annotation = setting.option.type_descriptor.annotation
    kind = get_origin(annotation) or annotation
    types, expected = _TOML_TYPES.get(kind, ((str,), "a string"))
    valid = isinstance(value, types) and (kind is bool or not isinstance(value, bool))
    if kind is list:
        valid = valid and all(isinstance(each, str) for each in value)
    if not valid:
        raise InvalidData(f"{path}: {setting.key} must be {expected}.")


COMMAND_CLASS = ConfigurableCommand


@dataclass(frozen=True)
class _Models:
    """What is served, and who pays."""

    PANEL: ClassVar = "Models, ledger and budget"

    repository: Annotated[
        Path | None,
        "Directory of models as NAME/VERSION that administrators can load and unload while the service runs. The "
        "highest version of each is served from the start.",
    ] = None
    accept_unproven: Annotated[bool, "Serve models without a proven guarantee; answers carry a warning."] = (
        False
    )
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
    mechanism: Annotated[
        str | None,
        "Ordinary model: algorithm1. Head charged per answer: sampled-neuron. Either: the name of a plug-in.",
    ] = None
    account: Annotated[str | None, "Account of the training set. Default: the name of the data set."] = None
    because: Annotated[
        str | None, "Reason to move the records to another --account; the audit log keeps it."
    ] = None

    def terms(self) -> Terms | None:
        """The budget that the owner states, if any."""
        from quietmax.ledger.accounts import Terms
        from quietmax.noise.release import checked_positive

        if self.budget is None and self.delta:
            raise InvalidInput("`delta` requires `budget`.")
        if self.because is not None and self.account is None:
            raise InvalidInput("`because` requires `account`.")
        return None if self.budget is None else Terms(checked_positive(self.budget, "budget"), self.delta)


@with_groups
def command(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Model folders: FOLDER, NAME=FOLDER or NAME/VERSION=FOLDER.", show_default=False),
    ] = None,
    *,
    config: Config = None,  # noqa: ARG001 (its callback has read the file)
    session_secret_file: Annotated[
        Path | None,
        "File with the secret that signs sessions of the dashboard, for several replicas. Default: random.",
    ] = None,
    workers: Annotated[int, "Worker processes behind the port.", {"min": 1}] = 1,
    check: Annotated[
        bool,
        "Check options, models, ledger, certificate and ports, then exit. Nothing is charged or written.",
    ] = False,
    as_json: Json = False,
    chosen: _Models,
    listener: Listener,
    options: ServiceOptions,
) -> None:
    """Serve models over the Open Inference Protocol v2. The ledger charges every answer before it is drawn.

    Every option is also an environment variable (QUIETMAX_MAX_ROWS for --max-rows) and a key of the file of --config
    (max_rows). The command line comes first, then the environment, then the file.

    Examples:

    quietmax serve digits=private

    quietmax serve digits=private --ledger postgresql://localhost/quietmax

    quietmax serve model --accept-unproven --budget 10 --ledger trial.sqlite
    """
    from quietmax.ledger.database import configured_url
    from quietmax.ledger.ledger import Ledger
    from quietmax.server.deployment import deploy
    from quietmax.server.repository import load_models
    from quietmax.server.run import supervise
    from quietmax.server.service import Service
    from quietmax.server.telemetry import Log, Metrics

    _use_one_thread()
    if not models and chosen.repository is None:
        raise InvalidInput("At least one model must be named in `models`, or a `repository`.")
    terms = chosen.terms()
    settings = _settings(options, listener, session_secret_file)
    address = configured_url(chosen.ledger, chosen.ledger_file, chosen.ledger_password_file)
    read = partial(
        load_models,
        budget=terms,
        queries=chosen.queries,
        mechanism=chosen.mechanism,
        accept_unproven=chosen.accept_unproven,
    )
    loaded = read(models or [])
    with ExitStack() as stack:
        control = None
        if chosen.repository is not None:
            bind = partial(deploy, budget=terms, account=chosen.account)
            control = _control(chosen.repository, loaded, read, bind, stack)

        def served() -> list[Deployment]:
            return loaded if control is None else [*loaded, *control.start()]

        if check:
            listener.check_ports()
            _check(served(), address, terms, chosen, as_json=as_json)
            return
        listener = stack.enter_context(listener.reserve_grpc_port())

        def create_service(metrics: Metrics, because: str | None = None) -> Service:
            ledger = Ledger(address)
            bound = deploy(ledger, served(), budget=terms, account=chosen.account, because=because)
            return Service(ledger, bound, settings, metrics=metrics, control=control)

        opened = listener.open_socket()
        first, log = create_service(Metrics(), chosen.because), Log()
        try:
            _announce(first, listener.url(opened), listener.grpc_port, log, as_json=as_json)
        finally:
            first.ledger.close()
        supervise(create_service, listener, opened, log, workers)


def _settings(options: ServiceOptions, listener: Listener, session_secret_file: Path | None) -> Settings:
    """Return the settings that the options state."""
    if options.anonymous:
        listener.check_anonymous()
    settings = Settings(**vars(options), secure_cookies=listener.secure_cookies)
    if session_secret_file is None:
        return settings
    return replace(settings, session_secret=read_session_secret(session_secret_file))


def _control(
    repository: Path,
    loaded: list[Deployment],
    read: Callable[[list[str]], list[Deployment]],
    bind: Callable[..., list[Deployment]],
    stack: ExitStack,
) -> ModelControl:
    """Return what loads and unloads the models of a repository."""
    from quietmax.server.repository import ModelControl, ModelRepository, SharedState
    from quietmax.server.run import shared_folder

    state = SharedState(stack.enter_context(shared_folder("quietmax-models-")))
    names = {each.name for each in loaded}
    return ModelControl(ModelRepository(repository), state, lambda model: read([model])[0], bind, names)


def _use_one_thread() -> None:
    """Let torch use one thread: requests run in parallel, and a small network gains nothing from more."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    else:  # a head does not need it
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"


def _check(
    models: list[Deployment], address: str, terms: Terms | None, chosen: _Models, *, as_json: bool
) -> None:
    """Check the models against the ledger, if it exists already; say what would be served."""
    from quietmax.ledger.database import hide_password, parse_url
    from quietmax.ledger.ledger import Ledger, ledger_exists
    from quietmax.server.deployment import check_deployments

    check = partial(
        check_deployments, models=models, budget=terms, account=chosen.account, because=chosen.because
    )
    if not ledger_exists(address):
        check(None)
    else:
        with Ledger(address, read_only=True) as ledger:
            ledger.check_damage()
            check(ledger)
    shown = hide_password(parse_url(address))
    if as_json:
        listed = [{"name": each.name, "version": each.version, "status": each.status} for each in models]
        print_json({"valid": True, "ledger": shown, "models": listed})
        return
    _print_line(f"The configuration is valid. The ledger is {shown}.")
    for each in models:
        _print_line(f"  {each.label} ({each.status})")


def _announce(service: Service, url: str, grpc_port: int | None, log: Log, *, as_json: bool) -> None:
    """Say what is served: as JSON on stdout, as text on a terminal, or in the log."""
    ledger = service.ledger.address
    if as_json:
        models = [
            {"name": each.name, "version": each.version, "account": each.account.name, "status": each.status}
            for each in service.deployments
        ]
        document = {"url": url, "ledger": ledger, "keys": len(service.ledger.keys()), "models": models}
        print_json(document if grpc_port is None else {**document, "grpc_port": grpc_port})
        return
    served, warnings = [_served_line(each) for each in service.deployments], _start_warnings(service)
    if not sys.stderr.isatty():
        log.event("serving", url=url, grpc_port=grpc_port, ledger=ledger, served=served, warnings=warnings)
        log.flush()  # before the lines of the workers
        return
    grpc = "" if grpc_port is None else f" (gRPC on port {grpc_port})"
    _print_line(f"Serving on {url}{grpc} with the ledger {ledger}.")
    for line in served:
        _print_line(f"  {line}")
    for warning in warnings:
        _print_line(warning, "yellow")


def _served_line(deployment: Deployment) -> str:
    """Describe a model in a line."""
    account, unit_cost = deployment.account, deployment.unit_cost
    answers = (
        f"{counted(account.remaining_units // unit_cost, 'answer')} left" if unit_cost else "answers are free"
    )
    grade = deployment.total_guarantee(account).grade_in_words
    return f"{deployment.label} ({grade}): account {account.name}, {answers}"


def _start_warnings(service: Service) -> list[str]:
    """Return what the operator should know at the start."""
    warnings = []
    for deployment in service.deployments:
        account = deployment.account
        if account.remaining_units < deployment.unit_cost:
            warnings.append(
                f"The budget of the account {account.name} is exhausted. 'quietmax ledger grant' raises it."
            )
        if deployment.warning:
            warnings.append(f"{deployment.label}: {deployment.warning}")
    if not service.ledger.keys() and not service.settings.anonymous and service.settings.oidc_issuer is None:
        warnings.append("There is no API key yet. Create one with: quietmax ledger key create NAME")
    return list(dict.fromkeys(warnings))  # models may share an account


def _print_line(text: str, style: str | None = None) -> None:
    errors.print(text, style=style, highlight=False)

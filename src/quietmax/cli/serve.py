"""`quietmax serve`: serve models over HTTP."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quietmax.cli._configuration import Config, ConfigurableCommand
from quietmax.cli._options import Json
from quietmax.cli._output import errors, print_json
from quietmax.errors import InvalidInput, counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quietmax.ledger.ledger import Ledger
    from quietmax.server.deployment import Deployment
    from quietmax.server.log import Log
    from quietmax.server.service import Service
    from quietmax.server.settings import OidcSettings


COMMAND_CLASS = ConfigurableCommand
_BUDGET, _NETWORK, _LIMITS = "Ledger and budget", "Network", "Limits"
_ANSWERS = "Answers, log and telemetry"


# Each option declared here is also an environment variable and a key of the file of --config, and has a row in the
# table of docs/how-to/configure-the-service.md; see `quietmax.cli._configuration`.
def command(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Model folders: FOLDER, NAME=FOLDER or NAME/VERSION=FOLDER.", show_default=False),
    ] = None,
    repository: Annotated[
        Path | None,
        typer.Option(
            help="Directory of models as NAME/VERSION that administrators can load and unload while the service runs. "
            "The highest version of each is served from the start.",
        ),
    ] = None,
    config: Config = None,  # noqa: ARG001 (its callback has read the file)
    accept_unproven: Annotated[
        bool,
        typer.Option(
            "--accept-unproven", help="Serve models without a proven guarantee; answers carry a warning."
        ),
    ] = False,
    ledger: Annotated[
        str | None,
        typer.Option(
            help="SQLite file or postgresql://... URL. Default: one file per user.", rich_help_panel=_BUDGET
        ),
    ] = None,
    ledger_file: Annotated[
        Path | None,
        typer.Option(help="File that holds the URL of --ledger, a secret.", rich_help_panel=_BUDGET),
    ] = None,
    ledger_password_file: Annotated[
        Path | None,
        typer.Option(help="File that holds the password of a PostgreSQL ledger.", rich_help_panel=_BUDGET),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            help="Epsilon of the training set's total budget. Default: the model's own.",
            rich_help_panel=_BUDGET,
        ),
    ] = None,
    delta: Annotated[float, typer.Option(help="Delta of --budget.", rich_help_panel=_BUDGET)] = 0.0,
    queries: Annotated[
        int | None,
        typer.Option(
            min=1, help="Ordinary model: number of answers that share --budget.", rich_help_panel=_BUDGET
        ),
    ] = None,
    mechanism: Annotated[
        str | None,
        typer.Option(
            help="Ordinary model: algorithm1. Head charged per answer: sampled-neuron. Either: the name of a plug-in.",
            rich_help_panel=_BUDGET,
        ),
    ] = None,
    noise: Annotated[
        str, typer.Option(help="Noise of algorithm1: gaussian or laplace.", rich_help_panel=_BUDGET)
    ] = "gaussian",
    account: Annotated[
        str | None,
        typer.Option(
            help="Account of the training set. Default: the name of the data set.", rich_help_panel=_BUDGET
        ),
    ] = None,
    because: Annotated[
        str | None,
        typer.Option(
            help="Reason to move the records to another --account; the audit log keeps it.",
            rich_help_panel=_BUDGET,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_NETWORK)] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.", rich_help_panel=_NETWORK),
    ] = 8080,
    grpc_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Also listen for gRPC on this port; 0: any free one. Requires quietmax[grpc].",
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    anonymous: Annotated[
        bool,
        typer.Option(
            "--anonymous",
            help="Answer requests without an API key (loopback only).",
            rich_help_panel=_NETWORK,
        ),
    ] = False,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="TLS certificate (PEM file).", rich_help_panel=_NETWORK)
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="TLS private key (PEM file).", rich_help_panel=_NETWORK)
    ] = None,
    behind_proxy: Annotated[
        bool,
        typer.Option(
            "--behind-proxy", help="A proxy in front of the service ends TLS.", rich_help_panel=_NETWORK
        ),
    ] = False,
    session_secret_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the secret that signs sessions of the dashboard, for several replicas. Default: random.",
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    oidc_issuer: Annotated[
        str | None,
        typer.Option(
            help="URL of an OpenID Connect issuer whose bearer tokens are accepted beside API keys.",
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    oidc_audience: Annotated[
        str | None,
        typer.Option(
            help="Audience (claim aud) that tokens must name. Required with --oidc-issuer.",
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    oidc_client_claim: Annotated[
        str, typer.Option(help="Claim that names the client.", rich_help_panel=_NETWORK)
    ] = "sub",
    oidc_admin_claim: Annotated[
        str | None,
        typer.Option(
            help="Claim that makes an administrator, for example realm_access.roles.",
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    oidc_admin_value: Annotated[
        str | None,
        typer.Option(
            help="Value that --oidc-admin-claim must be equal to or contain.", rich_help_panel=_NETWORK
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Worker processes behind the port.", rich_help_panel=_NETWORK)
    ] = 1,
    max_rows: Annotated[
        int, typer.Option(min=1, help="Most rows in one request.", rich_help_panel=_LIMITS)
    ] = 1000,
    max_bytes: Annotated[
        int, typer.Option(min=1, help="Largest request body in bytes.", rich_help_panel=_LIMITS)
    ] = 16 * 2**20,
    max_body_memory: Annotated[
        int,
        typer.Option(
            min=1,
            help="Most bytes of all request bodies that a worker holds at the same time.",
            rich_help_panel=_LIMITS,
        ),
    ] = 256 * 2**20,
    timeout: Annotated[
        float, typer.Option(help="Seconds until a request is given up.", rich_help_panel=_LIMITS)
    ] = 10.0,
    header_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds until the headers of a request must have arrived.", rich_help_panel=_LIMITS
        ),
    ] = 10.0,
    idle_timeout: Annotated[
        float,
        typer.Option(help="Seconds until a connection without a request is closed.", rich_help_panel=_LIMITS),
    ] = 60.0,
    max_header_bytes: Annotated[
        int,
        typer.Option(
            min=1, help="Largest size of the headers of a request in bytes.", rich_help_panel=_LIMITS
        ),
    ] = 32 * 2**10,
    max_headers: Annotated[
        int, typer.Option(min=1, help="Most headers of a request.", rich_help_panel=_LIMITS)
    ] = 100,
    max_connections: Annotated[
        int,
        typer.Option(
            min=1,
            help="Most open connections of a worker. The limit on file descriptors may lower it.",
            rich_help_panel=_LIMITS,
        ),
    ] = 1000,
    otel: Annotated[
        bool,
        typer.Option(
            "--otel",
            help="Export traces and metrics by OpenTelemetry (OTLP over HTTP), as the variables OTEL_* say.",
            rich_help_panel=_ANSWERS,
        ),
    ] = False,
    rate_limit: Annotated[
        float | None,
        typer.Option(
            help="Requests per second of one client, in each worker. Default: no limit.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    rate_burst: Annotated[
        int | None,
        typer.Option(
            help="Requests that a client may send at once after a pause. Default: those of one second.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    answer_cache: Annotated[
        bool,
        typer.Option(
            help="Answer identical queries from the cache for free, or charge them again.",
            rich_help_panel=_ANSWERS,
        ),
    ] = True,
    request_log: Annotated[
        bool, typer.Option(help="Write a log line per request.", rich_help_panel=_ANSWERS)
    ] = True,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Check options, models, ledger, certificate and ports, then exit. Nothing is charged or written.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Serve models over the Open Inference Protocol v2. The ledger charges every answer before it is drawn.

    Every option is also an environment variable (QUIETMAX_MAX_ROWS for --max-rows) and a key of the file of --config
    (max_rows). The command line comes first, then the environment, then the file.

    Examples:

    quietmax serve digits=private

    quietmax serve digits=private --ledger postgresql://localhost/quietmax

    quietmax serve model --accept-unproven --budget 10 --ledger trial.sqlite
    """
    from quietmax.ledger.accounts import Terms
    from quietmax.ledger.database import configured_url
    from quietmax.ledger.ledger import Ledger
    from quietmax.noise.release import checked_positive
    from quietmax.server.deployment import check_deployments, deploy
    from quietmax.server.log import Log
    from quietmax.server.metrics import Metrics
    from quietmax.server.model_control import ModelControl, SharedState
    from quietmax.server.repository import ModelRepository, load_models
    from quietmax.server.run import Listener
    from quietmax.server.service import Service
    from quietmax.server.settings import Settings, read_session_secret
    from quietmax.server.supervisor import shared_folder, supervise
    from quietmax.server.telemetry import check_telemetry

    _use_one_thread()
    if not models and repository is None:
        raise InvalidInput("At least one model must be named in `models`, or a `repository`.")
    if budget is None and delta:
        raise InvalidInput("`delta` requires `budget`.")
    if otel:
        check_telemetry()
    if because is not None and account is None:
        raise InvalidInput("`because` requires `account`.")
    listener = Listener(host, port, tls_certificate, tls_key, behind_proxy, grpc_port)
    if anonymous:
        listener.check_anonymous()
    secret = (
        {} if session_secret_file is None else {"session_secret": read_session_secret(session_secret_file)}
    )
    settings = Settings(
        anonymous=anonymous,
        max_bytes=max_bytes,
        max_body_memory=max_body_memory,
        max_rows=max_rows,
        timeout=timeout,
        header_timeout=header_timeout,
        idle_timeout=idle_timeout,
        max_header_bytes=max_header_bytes,
        max_headers=max_headers,
        max_connections=max_connections,
        telemetry=otel,
        rate_limit=rate_limit,
        rate_burst=rate_burst,
        answer_cache=answer_cache,
        log_requests=request_log,
        secure_cookies=listener.secure_cookies,
        **secret,  # type: ignore[arg-type]
        oidc=_oidc_settings(
            oidc_issuer, oidc_audience, oidc_client_claim, oidc_admin_claim, oidc_admin_value
        ),
    )
    address = configured_url(ledger, ledger_file, ledger_password_file)
    terms = None if budget is None else Terms(checked_positive(budget, "budget"), delta)
    read = partial(
        load_models,
        budget=terms,
        queries=queries,
        mechanism=mechanism,
        noise=noise,
        accept_unproven=accept_unproven,
    )
    bind = partial(deploy, budget=terms, account=account)
    loaded = read(models or [])
    with ExitStack() as stack:
        control = None
        if repository is not None:
            state = SharedState(stack.enter_context(shared_folder("quietmax-models-")))
            names = {each.name for each in loaded}
            control = ModelControl(
                ModelRepository(repository), state, lambda model: read([model])[0], bind, names
            )
        if check:
            listener.check_ports()
            served = loaded if control is None else [*loaded, *control.start()]
            _check(
                address,
                partial(check_deployments, models=served, budget=terms, account=account, because=because),
            )
            _print_checked(served, address, as_json=as_json)
            return
        opened = listener.open_socket()

        def create_service(metrics: Metrics, reason: str | None = None) -> Service:
            accounts = Ledger(address)
            served = loaded if control is None else [*loaded, *control.start()]
            return Service(
                accounts, bind(accounts, served, because=reason), settings, metrics=metrics, control=control
            )

        listener = stack.enter_context(listener.reserve_grpc_port())
        first, log = create_service(Metrics(), because), Log()
        try:
            _announce(first, listener.url(opened), listener.grpc_port, log, as_json=as_json)
        finally:
            first.ledger.close()
        supervise(create_service, listener, opened, log, workers)


def _use_one_thread() -> None:
    """Let torch use one thread: requests run in parallel, and a small network gains nothing from more."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    else:  # a head does not need it
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"


def _check(address: str, check: Callable[[Ledger | None], None]) -> None:
    """Check the models against the ledger, if it exists already."""
    from quietmax.ledger.ledger import Ledger, ledger_exists

    if not ledger_exists(address):
        check(None)
        return
    with Ledger(address, read_only=True) as ledger:
        ledger.check_damage()
        check(ledger)


def _print_checked(models: Sequence[Deployment], address: str, *, as_json: bool) -> None:
    """Print what would be served."""
    from quietmax.ledger.database import hide_password, parse_url

    shown = hide_password(parse_url(address))
    if as_json:
        listed = [{"name": each.name, "version": each.version, "status": each.status} for each in models]
        print_json({"valid": True, "ledger": shown, "models": listed})
        return
    _print_line(f"The configuration is valid. The ledger is {shown}.")
    for each in models:
        _print_line(f"  {each.label} ({each.status})")


def _oidc_settings(
    issuer: str | None,
    audience: str | None,
    client_claim: str,
    admin_claim: str | None,
    admin_value: str | None,
) -> OidcSettings | None:
    """Return whose tokens are accepted; None if no issuer is given."""
    from quietmax.server.settings import OidcSettings

    if issuer is None:
        if audience is not None or admin_claim is not None or admin_value is not None:
            raise InvalidInput(
                "`oidc_audience`, `oidc_admin_claim` and `oidc_admin_value` require `oidc_issuer`."
            )
        return None
    if audience is None:
        raise InvalidInput("`oidc_issuer` requires `oidc_audience`.")
    return OidcSettings(issuer, audience, client_claim, admin_claim, admin_value)


def _announce(service: Service, url: str, grpc_port: int | None, log: Log, *, as_json: bool) -> None:
    """Say what is served: as JSON on stdout, as text on a terminal, or in the log."""
    if as_json:
        _print_json(service, url, grpc_port)
    elif sys.stderr.isatty():
        _print_summary(service, url, grpc_port)
    else:
        _log_summary(service, url, grpc_port, log)


def _print_json(service: Service, url: str, grpc_port: int | None) -> None:
    """Print what is served as one JSON document."""
    models = [
        {"name": each.name, "version": each.version, "account": each.account.name, "status": each.status}
        for each in service.deployments
    ]
    keys = len(service.ledger.keys())
    document = {"url": url, "ledger": service.ledger.address, "keys": keys, "models": models}
    print_json(document if grpc_port is None else {**document, "grpc_port": grpc_port})


def _print_summary(service: Service, url: str, grpc_port: int | None) -> None:
    """Print what is served, with warnings, for somebody at a terminal."""
    grpc = "" if grpc_port is None else f" (gRPC on port {grpc_port})"
    _print_line(f"Serving on {url}{grpc} with the ledger {service.ledger.address}.")
    for deployment in service.deployments:
        _print_line(f"  {_served_line(deployment)}")
    for warning in _start_warnings(service):
        _print_line(warning, "yellow")


def _log_summary(service: Service, url: str, grpc_port: int | None, log: Log) -> None:
    """Log what is served, with warnings, as one JSON object: every line of the log is one."""
    log.event(
        "serving",
        url=url,
        grpc_port=grpc_port,
        ledger=service.ledger.address,
        served=[_served_line(each) for each in service.deployments],
        warnings=_start_warnings(service),
    )
    log.flush()  # before the lines of the workers


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
    if not service.ledger.keys() and not service.settings.anonymous and service.settings.oidc is None:
        warnings.append("There is no API key yet. Create one with: quietmax ledger key create NAME")
    return list(dict.fromkeys(warnings))  # models may share an account


def _print_line(text: str, style: str | None = None) -> None:
    errors.print(text, style=style, highlight=False)

"""`quietmax serve`: serve models over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quietmax.cli._options import Json
from quietmax.cli._output import errors, print_json
from quietmax.errors import InvalidInput

if TYPE_CHECKING:
    from quietmax.server.service import Service


def command(
    models: Annotated[
        list[str], typer.Argument(help="Model folders: FOLDER, NAME=FOLDER or NAME/VERSION=FOLDER.")
    ],
    ledger: Annotated[
        str | None,
        typer.Option(
            help="SQLite file or postgresql://... URL. Default: $QUIETMAX_LEDGER, else one per user."
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(help="Epsilon of the training set's total budget. Default: the model's own."),
    ] = None,
    delta: Annotated[float, typer.Option(help="Delta of --budget.")] = 0.0,
    queries: Annotated[
        int | None, typer.Option(min=1, help="Ordinary model: number of answers that share --budget.")
    ] = None,
    mechanism: Annotated[
        str | None,
        typer.Option(help="Ordinary model: algorithm1. Head charged per answer: sampled-neuron."),
    ] = None,
    noise: Annotated[str, typer.Option(help="Noise of algorithm1: gaussian or laplace.")] = "gaussian",
    account: Annotated[
        str | None, typer.Option(help="Account of the training set. Default: the name of the data set.")
    ] = None,
    because: Annotated[
        str | None,
        typer.Option(help="Reason to move the records to another --account; the audit log keeps it."),
    ] = None,
    accept_unproven: Annotated[
        bool,
        typer.Option(
            "--accept-unproven", help="Serve models without a proven guarantee; answers carry a warning."
        ),
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8080,
    anonymous: Annotated[
        bool, typer.Option("--anonymous", help="Answer requests without an API key (loopback only).")
    ] = False,
    tls_certificate: Annotated[Path | None, typer.Option(help="TLS certificate (PEM file).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="TLS private key (PEM file).")] = None,
    behind_proxy: Annotated[
        bool, typer.Option("--behind-proxy", help="A proxy in front of the service ends TLS.")
    ] = False,
    session_secret_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the secret that signs sessions of the dashboard, for several replicas. Default: random."
        ),
    ] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Most rows in one request.")] = 1000,
    max_bytes: Annotated[int, typer.Option(min=1, help="Largest request body in bytes.")] = 16 * 2**20,
    timeout: Annotated[float, typer.Option(help="Seconds until a request is given up.")] = 10.0,
    header_timeout: Annotated[
        float, typer.Option(help="Seconds until the headers of a request must have arrived.")
    ] = 10.0,
    idle_timeout: Annotated[
        float, typer.Option(help="Seconds until a connection without a request is closed.")
    ] = 60.0,
    max_header_bytes: Annotated[
        int, typer.Option(min=1, help="Largest size of the headers of a request in bytes.")
    ] = 32 * 2**10,
    max_headers: Annotated[int, typer.Option(min=1, help="Most headers of a request.")] = 100,
    max_connections: Annotated[
        int,
        typer.Option(min=1, help="Most open connections. The limit on file descriptors may lower it."),
    ] = 1000,
    no_answer_cache: Annotated[
        bool,
        typer.Option(
            "--no-answer-cache",
            help="Charge identical queries again instead of answering them from the cache for free.",
        ),
    ] = False,
    no_request_log: Annotated[
        bool, typer.Option("--no-request-log", help="Do not write a log line per request.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Serve models over the Open Inference Protocol v2. The ledger charges every answer before it is drawn.

    Examples:

    quietmax serve digits=private

    quietmax serve digits=private --ledger postgresql://localhost/quietmax

    quietmax serve model --accept-unproven --budget 10 --ledger trial.sqlite
    """
    import torch

    from quietmax.ledger.accounts import Terms
    from quietmax.ledger.ledger import Ledger
    from quietmax.server.deployment import deploy
    from quietmax.server.metrics import Log
    from quietmax.server.repository import load_models
    from quietmax.server.run import Listener, supervise
    from quietmax.server.service import Service
    from quietmax.server.settings import Settings, read_session_secret

    torch.set_num_threads(1)  # requests run in parallel; a small network gains nothing from more threads
    if budget is None and delta:
        raise InvalidInput("`delta` requires `budget`.")
    if because is not None and account is None:
        raise InvalidInput("`because` requires `account`.")
    listener = Listener(host, port, tls_certificate, tls_key, behind_proxy)
    if anonymous:
        listener.check_anonymous()
    secret = (
        {} if session_secret_file is None else {"session_secret": read_session_secret(session_secret_file)}
    )
    settings = Settings(
        anonymous=anonymous,
        max_bytes=max_bytes,
        max_rows=max_rows,
        timeout=timeout,
        header_timeout=header_timeout,
        idle_timeout=idle_timeout,
        max_header_bytes=max_header_bytes,
        max_headers=max_headers,
        max_connections=max_connections,
        answer_cache=not no_answer_cache,
        log_requests=not no_request_log,
        secure_cookies=listener.secure_cookies,
        **secret,  # type: ignore[arg-type]
    )
    terms = None if budget is None else Terms(budget, delta)
    loaded = load_models(
        models,
        budget=terms,
        queries=queries,
        mechanism=mechanism,
        noise=noise,
        accept_unproven=accept_unproven,
    )
    opened = listener.open_socket()

    def create_service(reason: str | None = None) -> Service:
        accounts = Ledger(ledger)
        deployments = deploy(accounts, loaded, budget=terms, account=account, because=reason)
        return Service(accounts, deployments, settings)

    first = create_service(because)
    try:
        url = listener.url(opened)
        if as_json:
            _print_json(first, url)
        else:
            _print_summary(first, url)
    finally:
        first.ledger.close()
    supervise(create_service, listener, opened, Log())


def _print_json(service: Service, url: str) -> None:
    """Print what is served as one JSON document."""
    models = [
        {"name": each.name, "version": each.version, "account": each.account.name, "status": each.status}
        for each in service.deployments
    ]
    keys = len(service.ledger.keys())
    print_json({"url": url, "ledger": service.ledger.address, "keys": keys, "models": models})


def _print_summary(service: Service, url: str) -> None:
    """Print what is served, with warnings, on stderr."""
    _print_line(f"Serving on {url} with the ledger {service.ledger.address}.")
    for deployment in service.deployments:
        account, unit_cost = deployment.account, deployment.unit_cost
        answers = (
            f"{account.remaining_units // unit_cost:,} answers left" if unit_cost else "answers are free"
        )
        _print_line(f"  {deployment.label} ({deployment.status}): account {account.name}, {answers}")
        if account.remaining_units < unit_cost:
            _print_line(
                f"  The budget of the account {account.name} is exhausted. 'quietmax ledger grant' raises it.",
                "yellow",
            )
        if deployment.warning:
            _print_line(f"  {deployment.warning}", "yellow")
    if not service.ledger.keys() and not service.settings.anonymous:
        _print_line("There is no API key yet. Create one with: quietmax ledger key create NAME", "yellow")


def _print_line(text: str, style: str | None = None) -> None:
    errors.print(text, style=style, highlight=False)

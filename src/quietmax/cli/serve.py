"""`quietmax serve`: private predictions over HTTP, with a ledger that cannot be overspent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quietmax.cli._options import Json
from quietmax.cli._output import errors, print_json
from quietmax.errors import InvalidInput


def command(
    models: Annotated[
        list[str], typer.Argument(help="Model folders, each as FOLDER, NAME=FOLDER or NAME/VERSION=FOLDER.")
    ],
    ledger: Annotated[
        str | None,
        typer.Option(help="SQLite file or postgresql://...; default: QUIETMAX_LEDGER, else one per user."),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(help="Epsilon of the training set's whole budget; default: the model's own."),
    ] = None,
    delta: Annotated[float, typer.Option(help="Delta of the budget.")] = 0.0,
    queries: Annotated[
        int | None, typer.Option(min=1, help="Ordinary model: answers the budget is divided among.")
    ] = None,
    mechanism: Annotated[
        str | None,
        typer.Option(help="Ordinary model: algorithm1. Head that answers per query: sampled-neuron."),
    ] = None,
    noise: Annotated[str, typer.Option(help="algorithm1: gaussian or laplace.")] = "gaussian",
    account: Annotated[
        str | None, typer.Option(help="Name of the training set's account; default: the data set's name.")
    ] = None,
    because: Annotated[
        str | None,
        typer.Option(help="Reason, in words, to count records elsewhere than before; the journal keeps it."),
    ] = None,
    accept_unproven: Annotated[
        bool,
        typer.Option(
            "--accept-unproven", help="Serve models without proven guarantee; every answer says so."
        ),
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8080,
    anonymous: Annotated[
        bool, typer.Option("--anonymous", help="Answer without keys; only on this machine.")
    ] = False,
    tls_certificate: Annotated[Path | None, typer.Option(help="TLS certificate file.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="TLS private key file.")] = None,
    behind_proxy: Annotated[
        bool, typer.Option("--behind-proxy", help="A proxy in front of this service speaks TLS.")
    ] = False,
    max_rows: Annotated[int, typer.Option(min=1, help="Rows in one request.")] = 1000,
    max_bytes: Annotated[int, typer.Option(min=1, help="Bytes in one request.")] = 16 * 2**20,
    seconds: Annotated[float, typer.Option(help="Seconds until a request is given up.")] = 10.0,
    stored_answers: Annotated[
        bool,
        typer.Option(
            "--stored-answers/--no-stored-answers", help="Identical queries get the stored answer at no cost."
        ),
    ] = True,
    log_requests: Annotated[
        bool, typer.Option("--log-requests/--no-log-requests", help="One log line per request.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Serve models over the Open Inference Protocol v2. Every answer is paid for in the ledger before it is drawn.

    Examples:

    quietmax serve digits=private

    quietmax serve digits=private --ledger postgresql://localhost/quietmax

    quietmax serve model --accept-unproven --budget 10 --ledger trial.sqlite
    """
    try:
        from quietmax.ledger.accounts import Terms
        from quietmax.ledger.ledger import Ledger
        from quietmax.server.deployment import deploy
        from quietmax.server.metrics import Log
        from quietmax.server.repository import load_servables
        from quietmax.server.run import Listening, check_anonymous, open_port, supervise
        from quietmax.server.service import Service
        from quietmax.server.settings import Settings
    except ImportError as missing:
        raise InvalidInput(
            f"Serving needs further packages ({missing.name} is missing); install: pip install 'quietmax[serve]'."
        ) from missing
    import torch

    torch.set_num_threads(1)  # requests come in parallel; a network this small gains nothing from more
    listening = Listening(host, port, tls_certificate, tls_key, behind_proxy)
    if anonymous:
        check_anonymous(listening)
    if budget is None and delta:
        raise InvalidInput(
            "--delta belongs to --budget; give both, or leave both out for the model's own budget."
        )
    if because is not None and account is None:
        raise InvalidInput("--because belongs to --account; name the account that these records shall have.")
    settings = Settings(
        anonymous=anonymous,
        max_bytes=max_bytes,
        max_rows=max_rows,
        seconds=seconds,
        stored_answers=stored_answers,
        log_requests=log_requests,
        secure_cookies=listening.secure_cookies,
    )
    terms = None if budget is None else Terms(budget, delta)
    loaded = load_servables(
        models,
        budget=terms,
        queries=queries,
        mechanism=mechanism,
        noise=noise,
        accept_unproven=accept_unproven,
    )
    port_opened = open_port(listening)

    def make(reason: str | None = None) -> Service:
        book = Ledger(ledger)
        return Service(book, deploy(book, loaded, budget=terms, account=account, because=reason), settings)

    first = make(because)
    try:
        _announce(first, listening.host, port_opened.getsockname()[1], tls_certificate is not None, as_json)
    finally:
        first.ledger.close()
    supervise(make, listening, port_opened, Log())


def _announce(service: object, host: str, port: int, tls: bool, as_json: bool) -> None:
    from quietmax.server.service import Service

    assert isinstance(service, Service)
    url = f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
    keys = len(service.ledger.keys())
    if as_json:
        print_json(
            {
                "url": url,
                "ledger": service.ledger.address,
                "keys": keys,
                "models": [
                    {
                        "name": deployment.name,
                        "version": deployment.version,
                        "account": deployment.account.name,
                        "status": deployment.status,
                    }
                    for deployment in service.deployments
                ],
            }
        )
        return
    errors.print(f"Serving on {url} with the ledger {service.ledger.address}.", highlight=False, markup=False)
    for deployment in service.deployments:
        answers = (
            "any number of answers, paid at training"
            if deployment.unit_cost == 0
            else f"{deployment.account.remaining_units // deployment.unit_cost:,} answers left"
        )
        errors.print(
            f"  {deployment.label} ({deployment.status}): account {deployment.account.name}, {answers}",
            highlight=False,
            markup=False,
        )
        if deployment.account.remaining_units < deployment.unit_cost:
            errors.print(
                f"  Nothing is left of the account {deployment.account.name}: every new question will be refused; raise it "
                "with 'quietmax ledger grant'.",
                style="yellow",
                highlight=False,
                markup=False,
            )
        if deployment.warning:
            errors.print(f"  {deployment.warning}", style="yellow", highlight=False, markup=False)
    if not keys and not service.settings.anonymous:
        errors.print(
            "There is no key yet, so nobody can ask; create one with: quietmax ledger key create NAME",
            style="yellow",
            highlight=False,
            markup=False,
        )

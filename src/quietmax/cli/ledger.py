"""`quietmax ledger`: look at budgets, change them in words, check the journal, make and end keys."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from quietmax._io import atomic_write
from quietmax.cli._options import Json
from quietmax.cli._output import console, print_json, print_table
from quietmax.errors import InvalidInput, QuietmaxError

if TYPE_CHECKING:
    from quietmax.ledger.accounts import AccountState
    from quietmax.ledger.api_keys import ApiKey
    from quietmax.ledger.journal import JournalEntry
    from quietmax.ledger.ledger import Ledger

app = typer.Typer(help="Budgets, keys and the journal.", no_args_is_help=True)
key_app = typer.Typer(help="Keys of administrators and clients.", no_args_is_help=True)
app.add_typer(key_app, name="key")

Address = Annotated[
    str | None,
    typer.Option(
        "--ledger", help="SQLite file or postgresql://...; default: QUIETMAX_LEDGER, else one per user."
    ),
]
Because = Annotated[str, typer.Option(help="The reason, in words; the journal keeps it.")]


@contextmanager
def _opened(address: str | None, *, create: bool = False) -> Iterator[Ledger]:
    try:
        from quietmax.ledger.database import default_url, parse_url
        from quietmax.ledger.ledger import Ledger
    except ImportError as missing:
        raise InvalidInput(
            f"The ledger needs further packages ({missing.name} is missing); install: pip install 'quietmax[serve]'."
        ) from missing
    url = parse_url(default_url() if address is None else address)
    if url.drivername == "sqlite" and not create and not Path(str(url.database)).is_file():
        raise InvalidInput(
            f"There is no ledger {url.database}; create it with 'quietmax serve' or 'quietmax ledger key create'."
        )
    with Ledger(address) as ledger:
        yield ledger


@app.command()
def status(ledger: Address = None, as_json: Json = False) -> None:
    """Show every account: budget, spent, left, by client; and the head of its journal, to be written down.

    Example: quietmax ledger status
    """
    with _opened(ledger) as book:
        told = []
        for account in book.accounts():
            parts = book.subaccounts(account)
            told.append(
                {
                    **account.to_json(),
                    "clients": [vars(part) for part in parts],
                    "unproven_models": [
                        f"{model} ({status})" for model, status in book.unproven_models(account)
                    ],
                }
            )
            if not as_json:
                _print_account(account)
                if parts:
                    print_table(
                        f"Who spent of {account.name}",
                        ("client", "spent", "quota", "refused"),
                        (
                            (
                                part.client,
                                _percent(part.spent_units, account.limit_units),
                                ""
                                if part.limit_units is None
                                else _percent(part.limit_units, account.limit_units),
                                str(part.refused),
                            )
                            for part in parts
                        ),
                    )
        if as_json:
            print_json({"ledger": book.address, "accounts": told})
        elif not told:
            console.print("The ledger has no accounts yet; 'quietmax serve' opens them.")


@app.command()
def grant(
    account: Annotated[str, typer.Argument(help="The account's name.")],
    because: Because,
    epsilon: Annotated[float | None, typer.Option(help="Epsilon of the new whole budget.")] = None,
    delta: Annotated[float | None, typer.Option(help="Its delta; default: as before.")] = None,
    client: Annotated[str | None, typer.Option(help="Set this client's quota instead.")] = None,
    share: Annotated[
        float | None,
        typer.Option(help="The client's quota as a part of the budget, 0 to 1; without: no quota."),
    ] = None,
    ledger: Address = None,
    as_json: Json = False,
) -> None:
    """Set an account's whole budget, or a client's quota of it. What was spent stays spent.

    Examples:

    quietmax ledger grant people --epsilon 2 --because "The board allowed it."

    quietmax ledger grant people --client ann --share .5 --because "Half for Ann."
    """
    if (epsilon is None) == (client is None):
        raise InvalidInput(
            "Give --epsilon to set the account's budget, or --client to set a quota; one of them."
        )
    if (client is None and share is not None) or (epsilon is None and delta is not None):
        raise InvalidInput(
            "--share belongs to --client, and --delta to --epsilon; leave out the one without its company."
        )
    with _opened(ledger) as book:
        from quietmax.ledger.accounts import Terms

        if epsilon is None:
            _changed(book.set_quota(account, str(client), share, because), as_json)
        else:
            before = book.account(account).terms
            terms = Terms(epsilon, before.delta if delta is None else delta, before.analysis)
            _changed(book.grant(account, terms, because), as_json)


@app.command()
def revoke(
    account: Annotated[str, typer.Argument(help="The account's name.")],
    because: Because,
    client: Annotated[str | None, typer.Option(help="Take back this client's part only.")] = None,
    ledger: Address = None,
    as_json: Json = False,
) -> None:
    """Take back what is unspent: nothing more is answered from the account, or to the client.

    Example: quietmax ledger revoke people --because "The study is over."
    """
    with _opened(ledger) as book:
        _changed(book.revoke(account, client, because), as_json)


@app.command()
def export(
    account: Annotated[str | None, typer.Option(help="Only this account.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File; default: standard output.")
    ] = None,
    ledger: Address = None,
    as_json: Json = False,
) -> None:
    """Write the journal, one JSON object per row; with --json as one document.

    Example: quietmax ledger export --output journal.jsonl
    """
    with _opened(ledger) as book:
        rows = book.export(account)
        if output is None:
            _write_rows(rows, sys.stdout, as_json)
            return

        def write(path: Path) -> None:
            with path.open("w", encoding="utf-8") as stream:
                _write_rows(rows, stream, as_json)

        try:
            atomic_write(output, write)
        except OSError as problem:
            raise QuietmaxError(
                f"The journal cannot be written to {output} ({problem.strerror}); choose another file."
            ) from problem


def _write_rows(rows: Iterable[JournalEntry], stream: TextIO, as_json: bool) -> None:
    if as_json:
        stream.write(json.dumps([row.to_json() for row in rows], indent=2) + "\n")
    else:
        for row in rows:
            stream.write(json.dumps(row.to_json()) + "\n")


@app.command()
def verify(
    anchor: Annotated[
        list[str] | None,
        typer.Option(
            help="A head written down earlier, ACCOUNT:ROW:HASH, which must still be there; repeat."
        ),
    ] = None,
    ledger: Address = None,
    as_json: Json = False,
) -> None:
    """Find any edited, missing or reordered row, and any balance, quota or key the journal does not explain.

    Example: quietmax ledger verify
    """
    with _opened(ledger) as book:
        found = book.verify(dict(_anchor(text) for text in anchor or []))
    if as_json:
        print_json(found.to_json())
    elif found.sound:
        console.print(f"Sound: {found.rows} rows, {found.accounts} accounts.", style="green", highlight=False)
    if not found.sound:
        shown = " ".join(found.faults[:5])
        more = f" And {len(found.faults) - 5} more." if len(found.faults) > 5 else ""
        raise QuietmaxError(
            "The ledger was tampered with or damaged; stop serving from it and restore a copy that holds every "
            f"charge: {shown}{more}"
        )


@key_app.command("create")
def create_key(
    client: Annotated[str, typer.Argument(help="Who will use it.")],
    role: Annotated[
        str, typer.Option(help="client (asks) or admin (asks, and sees everyone's spending).")
    ] = "client",
    days: Annotated[float | None, typer.Option(help="Days until it expires; default: never.")] = None,
    ledger: Address = None,
    as_json: Json = False,
) -> None:
    """Create a key. It is shown once; the ledger keeps only its hash.

    Example: quietmax ledger key create ann --days 90
    """
    with _opened(ledger, create=True) as book:
        shown, key = book.create_key(client, role, days)  # type: ignore[arg-type]
    if as_json:
        print_json({"key": shown, **key.to_json()})
        return
    console.print(f"Key of {client} ({role}), shown this once:", highlight=False, markup=False)
    sys.stdout.write(shown + "\n")


@key_app.command("list")
def list_keys(ledger: Address = None, as_json: Json = False) -> None:
    """List keys, without their secrets.

    Example: quietmax ledger key list
    """
    with _opened(ledger) as book:
        keys = book.keys()
    if as_json:
        print_json({"keys": [key.to_json() for key in keys]})
        return
    print_table(
        "Keys",
        ("id", "client", "role", "created", "ends"),
        ((key.id, key.client, key.role, _moment(key.created), _end(key)) for key in keys),
    )


@key_app.command("revoke")
def revoke_key(
    number: Annotated[str, typer.Argument(help="The key's id, as in 'quietmax ledger key list'.")],
    ledger: Address = None,
    as_json: Json = False,
) -> None:
    """End a key now.

    Example: quietmax ledger key revoke 0123456789abcdef
    """
    with _opened(ledger) as book:
        key = book.revoke_key(number)
    if as_json:
        print_json(key.to_json())
    else:
        console.print(f"The key {key.id} of {key.client} is revoked.", highlight=False, markup=False)


def _anchor(text: str) -> tuple[str, tuple[int, str]]:
    name, _, rest = text.partition(":")
    row, _, head = rest.partition(":")
    if not (row.isascii() and row.isdigit()) or len(head) != 64:
        raise InvalidInput(
            f"--anchor {text!r} is not ACCOUNT:ROW:HASH; copy it from 'quietmax ledger status'."
        )
    return name, (int(row), head)


def _changed(account: AccountState, as_json: bool) -> None:
    if as_json:
        print_json(account.to_json())
    else:
        _print_account(account)


def _print_account(account: AccountState) -> None:
    ((_, measure), (name, total)) = account.limit.to_json().items()
    spent, left = list(account.spent.to_json().values())[1], list(account.remaining.to_json().values())[1]
    print_table(
        f"Account {account.name}",
        ("", ""),
        (
            ("promised", f"epsilon {account.terms.epsilon:g}, delta {account.terms.delta:g}"),
            ("budget", f"{name} {total:.6g} ({measure})"),
            ("spent", f"{name} {spent:.6g} ({_percent(account.spent_units, account.limit_units)})"),
            ("left", f"{name} {left:.6g}"),
            ("journal", f"{account.name}:{account.sequence}:{account.head}"),
        ),
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f}%" if whole else "100%"


def _moment(microseconds: int) -> str:
    return datetime.fromtimestamp(microseconds / 1e6, UTC).strftime("%Y-%m-%d %H:%M")


def _end(key: ApiKey) -> str:
    if key.revoked is not None:
        return f"revoked {_moment(key.revoked)}"
    return "never" if key.expires is None else _moment(key.expires)

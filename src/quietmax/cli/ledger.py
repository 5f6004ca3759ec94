"""`quietmax ledger`: show and change budgets, export and verify the audit log, manage API keys."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quietmax._io import atomic_write
from quietmax.cli._options import with_groups
from quietmax.cli._output import amount, console, in_json, print_json, print_table
from quietmax.cli.predict import _key
from quietmax.errors import InvalidInput, QuietmaxError, counted

if TYPE_CHECKING:
    from quietmax.accounting.guarantee import Guarantee
    from quietmax.ledger.accounts import AccountState, ApiKey
    from quietmax.ledger.ledger import Ledger

app = typer.Typer(help="Manage budgets, API keys and the audit log.", no_args_is_help=True)
key_app = typer.Typer(help="Manage API keys of clients and administrators.", no_args_is_help=True)
app.add_typer(key_app, name="key")

Address = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        help="SQLite file or postgresql://USER@HOST/DATABASE. Default: $QUIETMAX_LEDGER, else a file of the user.",
    ),
]
AccountName = Annotated[str, typer.Argument(help="Name of the account.")]
KeyFile = Annotated[Path | None, typer.Option(help="File with the API key of an administrator.")]
Because = Annotated[str, "Reason, at least three words; the audit log keeps it."]
_MAX_FAULTS = 5


@contextmanager
def _open(address: str | None, *, create: bool = False, accept_loss: str | None = None) -> Iterator[Ledger]:
    """Open a ledger. A SQLite file that does not exist is an error unless it may be created."""
    from quietmax.ledger.database import default_url, parse_url
    from quietmax.ledger.ledger import Ledger

    url = parse_url(default_url() if address is None else address)
    if url.drivername == "sqlite" and not create and not Path(str(url.database)).is_file():
        raise InvalidInput(
            f"The ledger {url.database} does not exist. 'quietmax serve' and 'quietmax ledger key create' create it."
        )
    with Ledger(address, accept_loss=accept_loss) as ledger:
        yield ledger


@app.command("status")
@with_groups
def _status(address: Address = None) -> None:
    """Show every account: budget, spent, remaining and clients; and the last row of its audit log, to write down.

    Example: quietmax ledger status
    """
    from quietmax.ledger.database import KEYS_ACCOUNT

    with _open(address) as ledger:
        accounts = ledger.accounts()
        heads = {
            name: f"{name}:{head.sequence}:{head.hash}" for name, head in ledger.heads() if head.sequence
        }
        shown = [
            {
                **account.to_json(),
                "clients": [vars(each) for each in ledger.subaccounts(account)],
                "unproven_models": [
                    f"{model} ({status})" for model, status in ledger.unproven_models(account)
                ],
                "strength": "none" if ledger.unproven_models(account) else _promised(account).strength,
                "parts": [
                    {**asdict(part), "spent_units": units} for part, units in ledger.parts(account).items()
                ],
                "cohorts": ledger.cohorts(account),
            }
            for account in accounts
        ]
        print_json({"ledger": ledger.address, "accounts": shown, "heads": list(heads.values())})
        for account in accounts:
            _print_account(ledger, account)
            _print_spending(ledger, account)
    if not accounts:
        console.print("The ledger has no accounts yet. 'quietmax serve' opens them.")
    if KEYS_ACCOUNT in heads:
        console.print(
            f"Audit log of accounts, training sets and API keys: {heads[KEYS_ACCOUNT]}", soft_wrap=True
        )


@app.command("grant")
@with_groups
def _grant(
    account: AccountName,
    because: Because,
    epsilon: Annotated[float | None, "Epsilon of the new budget."] = None,
    delta: Annotated[float | None, "Delta of the new budget. Default: unchanged."] = None,
    client: Annotated[str | None, "Set the quota of this client instead."] = None,
    share: Annotated[
        float | None,
        "Quota of the client as a fraction of the budget, 0 to 1. Default: no quota.",
    ] = None,
    key_file: KeyFile = None,
    address: Address = None,
) -> None:
    """Set the budget of an account, or the quota of a client. What was spent stays spent.

    If two administrators have keys, raising a budget needs both: with the key of one it is proposed, and the other runs
    'quietmax ledger confirm'.

    Examples:

    quietmax ledger grant people --epsilon 2 --because "The board allowed it."

    quietmax ledger grant people --client ann --share .5 --because "Half for Ann."
    """
    if (epsilon is None) == (client is None):
        raise InvalidInput("Either `epsilon` (a budget) or `client` (a quota) is required, not both.")
    if client is None and share is not None:
        raise InvalidInput("`share` requires `client`.")
    if epsilon is None and delta is not None:
        raise InvalidInput("`delta` requires `epsilon`.")
    with _open(address) as ledger:
        from quietmax.ledger.accounts import Terms

        if epsilon is None:
            changed = ledger.set_quota(account, str(client), share, because)
        else:
            before = ledger.account(account).terms
            terms = Terms(epsilon, before.delta if delta is None else delta, before.analysis)
            if key_file is not None:
                ledger.propose(account, terms, because, str(_key(key_file)))
                print_json(ledger.account(account).to_json())
                console.print(f"Proposed. Another administrator confirms: quietmax ledger confirm {account}")
                return
            changed = ledger.grant(account, terms, because)
        _print_changed(ledger, changed)


@app.command("confirm")
@with_groups
def _confirm(account: AccountName, key_file: KeyFile = None, address: Address = None) -> None:
    """Set the budget that another administrator has proposed with 'grant --key-file' in the last 30 days.

    Example: quietmax ledger confirm people --key-file bob.key
    """
    if (key := _key(key_file)) is None:
        raise InvalidInput("`key_file`, with the key of an administrator, is required.")
    with _open(address) as ledger:
        _print_changed(ledger, ledger.confirm(account, key))


@app.command("revoke")
@with_groups
def _revoke(
    account: AccountName,
    because: Because,
    client: Annotated[str | None, "Revoke the quota of this client only."] = None,
    address: Address = None,
) -> None:
    """Take back what is unspent: the account, or the client, gets no more answers.

    Example: quietmax ledger revoke people --because "The study is over."
    """
    with _open(address) as ledger:
        _print_changed(ledger, ledger.revoke(account, client, because))


def _print_changed(ledger: Ledger, account: AccountState) -> None:
    print_json(account.to_json())
    _print_account(ledger, account)


def _promised(account: AccountState) -> Guarantee:
    """What is guaranteed once the budget of an account is spent, if all its models are proven (THEORY 3.13)."""
    from quietmax.accounting.guarantee import Guarantee

    extra_delta = account.terms.delta if account.limit.measure == "pure" else 0.0  # DP-SGD may take it
    because = "The budget bounds all answers together."
    return Guarantee.of(account.limit, status="proven", because=because, extra_delta=extra_delta)


def _print_account(ledger: Ledger, account: AccountState) -> None:
    """Print the budget of an account, and what it guarantees."""
    if unproven := ledger.unproven_models(account):
        promised = f"no proven limit: {', '.join(f'{model} is {status}' for model, status in unproven)}"
    else:
        promised = _promised(account).summary
    rows = (
        ("opened with", f"epsilon {account.terms.epsilon:g}, delta {account.terms.delta:g}"),
        ("budget", f"{amount(account.limit)} ({account.limit.measure})"),
        ("spent", f"{amount(account.spent)} ({_percent(account.spent_units, account.limit_units)})"),
        ("remaining", amount(account.remaining)),
        ("guarantee", promised),
    )
    print_table(f"Account {account.name}", ("", ""), rows)
    console.print(f"Audit log: {account.name}:{account.sequence}:{account.head}", soft_wrap=True)


def _print_spending(ledger: Ledger, account: AccountState) -> None:
    """Print what each cohort or each side of a split has spent, of which the largest counts, and each client."""
    whole, parts = account.limit_units, ledger.parts(account)
    if cohorts := ledger.cohorts(account):
        rule = next(part.rule for part in parts if part.rule)
        spent = [(cohort, _percent(units, whole)) for cohort, units in cohorts.items()]
        print_table(f"Cohorts of {account.name}: the largest counts", (f"by {rule}", "spent"), spent)
    elif parts:
        sides = [(str(part.split), str(part.side), _percent(units, whole)) for part, units in parts.items()]
        title = f"Parts of {account.name}: of each split, the larger side counts"
        print_table(title, ("split", "side", "spent"), sides)
    clients = [
        (
            each.client,
            _percent(each.spent_units, whole),
            "" if each.limit_units is None else _percent(each.limit_units, whole),
            str(each.refused),
        )
        for each in ledger.subaccounts(account)
    ]
    if clients:
        print_table(f"Clients of {account.name}", ("client", "spent", "quota", "refused"), clients)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f}%" if whole else "100%"


@app.command("export")
@with_groups
def _export(
    account: Annotated[str | None, "Export this account only."] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write. Default: standard output.")
    ] = None,
    address: Address = None,
) -> None:
    """Export the audit log, one JSON object per line; with --json as one document.

    Example: quietmax ledger export --output audit-log.jsonl
    """
    with _open(address) as ledger:
        entries = (asdict(entry) for entry in ledger.export(account))
        documents = (json.dumps(list(entries), indent=2),) if in_json() else map(json.dumps, entries)
        lines = (f"{each}\n" for each in documents)
        if output is None:
            sys.stdout.writelines(lines)
            return

        def _write(path: Path) -> None:
            with path.open("w", encoding="utf-8") as stream:
                stream.writelines(lines)

        try:
            atomic_write(output, _write)
        except OSError as error:
            raise QuietmaxError(f"Cannot write the audit log to {output}: {error.strerror}.") from error


@app.command("verify")
@with_groups
def _verify(
    anchor: Annotated[
        list[str] | None,
        "A row written down earlier, ACCOUNT:ROW:HASH, that must still be in the audit log. Can be repeated.",
    ] = None,
    address: Address = None,
) -> None:
    """Find edited, missing or reordered rows, and balances, quotas or keys that the audit log does not explain.

    Example: quietmax ledger verify
    """
    anchors = dict(_parse_anchor(text) for text in anchor or [])
    with _open(address) as ledger:
        found = ledger.verify(anchors)
    print_json(found.to_json())
    if not found.sound:
        more = len(found.faults) - _MAX_FAULTS
        raise QuietmaxError(
            "The ledger was edited or is damaged. Stop serving from it and restore a backup that has every charge. "
            + " ".join(found.faults[:_MAX_FAULTS])
            + (f" And {more} more." if more > 0 else "")
        )
    searched = f"{counted(found.rows, 'row')} of {counted(found.accounts, 'account')}"
    console.print(f"No faults found in {searched}.", style="green")


def _parse_anchor(text: str) -> tuple[str, tuple[int, str]]:
    name, _, rest = text.partition(":")
    row, _, head = rest.partition(":")
    if not (row.isascii() and row.isdigit()) or len(head) != 64:
        raise InvalidInput(
            f"`anchor` must be ACCOUNT:ROW:HASH, as 'quietmax ledger status' prints it, got {text!r}."
        )
    return name, (int(row), head)


@app.command("backup")
@with_groups
def _back_up(
    file: Annotated[Path, typer.Argument(help="SQLite file to write; it must not exist.")],
    address: Address = None,
) -> None:
    """Copy a ledger, from either database and also while it is served, into one SQLite file; verify the copy.

    Example: quietmax ledger backup monday.sqlite
    """
    from quietmax.ledger.backup import back_up

    with _open(address) as ledger:
        found = back_up(ledger, file)
        heads = [f"{name}:{head.sequence}:{head.hash}" for name, head in ledger.heads() if head.sequence]
    print_json({"backup": str(file), **found.to_json(), "heads": heads})
    console.print(
        f"The backup {file} has {counted(found.rows, 'row')} of {counted(found.accounts, 'account')}."
    )


@app.command("restore")
@with_groups
def _restore(
    file: Annotated[Path, typer.Argument(help="File that 'quietmax ledger backup' wrote.")],
    accept_loss: Annotated[
        str | None, "Reason to restore a backup that lacks charges; what is known to be lost is charged."
    ] = None,
    address: Address = None,
) -> None:
    """Put a backup where there is no ledger. One that lacks charges that LEDGER.head names is refused.

    Example: quietmax ledger restore monday.sqlite --ledger new.sqlite
    """
    from quietmax.ledger.backup import restore

    compared = restore(file, address, accept_loss)
    with _open(address) as ledger:
        print_json({"compared": compared, "accounts": [each.to_json() for each in ledger.accounts()]})
        for account in ledger.accounts():
            _print_account(ledger, account)
    if not compared:
        console.print(
            "There is no head file, so nothing tells whether the backup lacks charges: compare with rows that were "
            "written down ('quietmax ledger verify --anchor'), or revoke the accounts.",
            style="yellow",
        )


@app.command("migrate")
@with_groups
def _migrate(
    check: Annotated[bool, typer.Option("--check", help="Only rehearse: change nothing.")] = False,
    address: Address = None,
) -> None:
    """Bring a ledger up to date after an upgrade of Quietmax, or rehearse it on a copy, and verify the result.

    Example: quietmax ledger migrate --check
    """
    from quietmax.ledger.backup import rehearse_migration

    before, after, found = rehearse_migration(address)
    print_json({"before": before, "after": after, **found.to_json()})
    if not found.sound:
        raise QuietmaxError(f"The ledger has faults, the first: {found.faults[0]} Nothing was changed.")
    if not check:
        with _open(address):
            pass
    done = "would become" if check and before != after else "is" if before == after else "became"
    console.print(
        f"The schema {done} version {after} (it was {before}); {counted(found.rows, 'row')} verified."
    )


@app.command("clients")
@with_groups
def _clients(address: Address = None) -> None:
    """List the names of clients with the pseudonyms that the audit log states.

    Example: quietmax ledger clients
    """
    with _open(address) as ledger:
        names = ledger.client_names()
    print_json({"clients": names})
    print_table("Clients", ("name", "in the audit log"), [(name, stated) for stated, name in names.items()])


@app.command("erase-client")
@with_groups
def _erase_client(
    client: Annotated[str, typer.Argument(help="Name of the client.")], address: Address = None
) -> None:
    """Erase the name of a client, and revoke its keys. The audit log keeps a pseudonym, and still verifies.

    Example: quietmax ledger erase-client ann
    """
    with _open(address) as ledger:
        stated = ledger.erase_client(client)
    print_json({"pseudonym": stated})
    console.print(
        f"The name is erased; the audit log keeps {stated}. Backups and reasons that name it are yours."
    )


@app.command("accept-loss")
@with_groups
def _accept_loss(because: Because, address: Address = None) -> None:
    """Go on with a ledger that has lost charges. What is known to be lost is charged to the client "lost".

    If whole accounts are lost, a new account needs a reason from then on: its records may have had a budget already.

    The file LEDGER.head, beside the ledger, says what must be there. Prefer a newer copy of the ledger if there is one.

    Example: quietmax ledger accept-loss --because "The disk failed in May."
    """
    with _open(address, accept_loss=because) as ledger:
        accounts, lost = ledger.accounts(), ledger.lost_accounts()
        print_json({"accounts": [account.to_json() for account in accounts], "lost_accounts": lost})
        for account in accounts:
            _print_account(ledger, account)
    if lost:
        console.print(
            f"Lost, with what was spent: {counted(len(lost), 'account')}. A new account now needs --account and "
            "--because: it could be a second budget for the same records.",
            style="yellow",
        )
    console.print("API keys that were revoked meanwhile may be valid again: see 'quietmax ledger key list'.")


@app.command("prune")
@with_groups
def _prune(
    days: Annotated[float, "Keep what was stored in the last so many days; at least 1/24 (an hour)."],
    address: Address = None,
) -> None:
    """Delete stored requests and cached answers of long ago. Budgets and the audit log stay.

    A deleted request id, or a deleted cached query, is charged like a new one when it is sent again.

    Example: quietmax ledger prune --days 30
    """
    with _open(address) as ledger:
        requests, batches = ledger.prune(days)
    print_json({"requests": requests, "batches": batches})
    console.print(
        f"Deleted {counted(requests, 'stored request')} and "
        f"{counted(batches, 'batch', 'batches')} of cached answers."
    )


@with_groups
def witness(
    file: Annotated[Path, typer.Argument(help="File of the witness; one line is added to it.")],
    export: Annotated[Path | None, "Audit log of all accounts, as 'quietmax ledger export' wrote it."] = None,
    model: Annotated[list[Path] | None, "Folder of a model that is paid per answer. Can be repeated."] = None,
    key: Annotated[
        Path | None, "PEM file of the Ed25519 key; it is created if there is none. Default: FILE.pem."
    ] = None,
    moved: Annotated[bool, "Accept that a model folder lies at another place than before."] = False,
    address: Address = None,
) -> None:
    """Write down, signed, the last rows of a ledger and the counts of model folders; fail if any of them went back.

    Run it on another machine, which the owner of the ledger cannot write to. Each file watches one ledger.

    Example: quietmax witness witness.jsonl --export audit-log.jsonl
    """
    from quietmax.ledger.witness import witness as write_down

    rows = None
    if export is not None:
        rows = _read_export(export)
    elif address is not None:
        with _open(address) as ledger:
            rows = [asdict(entry) for entry in ledger.export(None)]
    if rows is None and not model:
        raise InvalidInput("At least one of `export`, `address` and `model` is required.")
    content = write_down(file, rows, model or (), key=key or file.with_name(f"{file.name}.pem"), moved=moved)
    print_json(content)
    seen = (
        f"{counted(len(content['heads']), 'account')} and {counted(len(content['folders']), 'model folder')}"
    )
    console.print(f"Line {content['number']} of {file}: {seen}, and none of them went back.")


def _read_export(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]
        return [{name: row[name] for name in ("account", "sequence", "hash")} for row in found]
    except OSError as error:
        raise QuietmaxError(f"Cannot read the audit log {path}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise QuietmaxError(f"{path} is not an audit log, as 'quietmax ledger export' writes it.") from error


@key_app.command("create")
@with_groups
def _create_key(
    client: Annotated[str, typer.Argument(help="Name of the client that will use the key.")],
    role: Annotated[str, "client, or admin, who also sees the spending of all clients."] = "client",
    days: Annotated[float | None, "Days until the key expires. Default: never."] = None,
    address: Address = None,
) -> None:
    """Create an API key. It is shown once; the ledger keeps only its hash.

    Example: quietmax ledger key create ann --days 90
    """
    with _open(address, create=True) as ledger:
        shown, key = ledger.create_key(client, role, days)  # type: ignore[arg-type]
    print_json({"key": shown, **key.to_json()})
    console.print(f"API key of {client} ({role}). It is not shown again:")
    console.print(shown, soft_wrap=True)


@key_app.command("list")
@with_groups
def _list_keys(address: Address = None) -> None:
    """List all API keys, without their secrets.

    Example: quietmax ledger key list
    """
    with _open(address) as ledger:
        keys = ledger.keys()
    print_json({"keys": [key.to_json() for key in keys]})
    rows = [(key.id, key.client, key.role, _date(key.created), _expiry(key)) for key in keys]
    print_table("API keys", ("id", "client", "role", "created", "expires"), rows)


@key_app.command("revoke")
@with_groups
def _revoke_key(
    key_id: Annotated[
        str, typer.Argument(metavar="ID", help="Id of the key, as 'quietmax ledger key list' prints it.")
    ],
    address: Address = None,
) -> None:
    """Revoke an API key at once.

    Example: quietmax ledger key revoke 0123456789abcdef
    """
    with _open(address) as ledger:
        key = ledger.revoke_key(key_id)
    print_json(key.to_json())
    console.print(f"The key {key.id} of {key.client} is revoked.")


def _date(microseconds: int) -> str:
    return datetime.fromtimestamp(microseconds / 1e6, UTC).strftime("%Y-%m-%d %H:%M")


def _expiry(key: ApiKey) -> str:
    if key.revoked is not None:
        return f"revoked {_date(key.revoked)}"
    return "never" if key.expires is None else _date(key.expires)

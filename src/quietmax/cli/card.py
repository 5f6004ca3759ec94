"""`quietmax card`: the privacy card of a model as a table, JSON or HTML."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from quietmax.cli._options import Model, with_groups
from quietmax.cli._output import amount, console, print_json, print_table
from quietmax.errors import InvalidInput, QuietmaxError, counted

if TYPE_CHECKING:
    from quietmax.privacy_card import LedgerRecord, PrivacyCard

_NOT_IN_LEDGER = "The ledger has no account for this training set yet."
Form = Literal["card", "nist-800-226"]


@with_groups
def command(
    *,
    model: Model,
    html: Annotated[Path | None, "Also write the card as a web page to this file."] = None,
    public: Annotated[bool, "Leave out what is not for publication: results of attacks."] = False,
    form: Annotated[
        Form,
        typer.Option(
            "--format",
            help="The card, or a checklist after NIST SP 800-226, which marks what the software cannot know.",
        ),
    ] = "card",
    ledger: Annotated[
        str | None,
        "With --format nist-800-226: also state what this ledger has charged. A SQLite file or the address of a "
        "PostgreSQL database; it is only read.",
    ] = None,
    account: Annotated[str | None, "Account in the ledger. Default: that of the model's data set."] = None,
) -> None:
    """Show the privacy card of a model: what somebody can learn at most, for whom, and how good the model is.

    A card that shows results of attacks says on top that it is not for publication; --public leaves them out.

    Examples:

    quietmax card model --html card.html --public

    quietmax card private --format nist-800-226 --ledger ledger.sqlite
    """
    from quietmax._io import atomic_write
    from quietmax.privacy_card import nist_checklist, read_card

    if ledger is not None and form == "card":
        raise InvalidInput("`ledger` requires `form` nist-800-226.")
    if account is not None and ledger is None:
        raise InvalidInput("`account` requires `ledger`.")
    card = read_card(model)
    if public:
        card = card.for_publication()
    if html is not None:
        try:
            atomic_write(html, lambda staging: staging.write_text(card.to_html(), encoding="utf-8"))
        except OSError as problem:
            raise QuietmaxError(f"Cannot write the card to {html}: {problem.strerror}.") from problem
    if form == "card":
        print_json(card.to_json())
        print_table(card.title, ("", ""), card.rows(), prose=True)
        if html is not None:
            console.print(f"Wrote {html}.", soft_wrap=True)
        return
    record = None if ledger is None else _read_ledger(ledger, card, account)
    items = nist_checklist(card, record)
    print_json([item._asdict() for item in items])
    print_table("Checklist after NIST SP 800-226", ("factor", "question", "answer"), items, prose=True)


def _read_ledger(address: str, card: PrivacyCard, account: str | None) -> LedgerRecord:
    """Read what a ledger states about the training set of a model; the ledger is not changed."""
    from quietmax.ledger.database import KEYS_ACCOUNT, now
    from quietmax.ledger.ledger import Ledger
    from quietmax.privacy_card import LedgerRecord
    from quietmax.server.deployment import find_account

    with Ledger(address, read_only=True) as ledger:
        ledger.check_damage()
        _, _, found = find_account(ledger, card.dataset, account)
        if found is None and account is not None:
            ledger.account(account)  # names those that exist
        budget = releases = _NOT_IN_LEDGER
        if found is not None:
            amounts = ", ".join(f"{name} {amount(getattr(found, name))}" for name in ("spent", "remaining"))
            clients = sum(each.spent_units > 0 for each in ledger.subaccounts(found))
            budget = (
                f"Account {found.name}, opened with epsilon {found.terms.epsilon:g} and delta {found.terms.delta:g}: "
                f"budget {amount(found.limit)}, {amounts}; {counted(clients, 'client')}."
            )
            releases = f"Of the same account: {', '.join(ledger.charged_models(found)) or 'none'}."
        known = ledger.keys()
        keys = [key for key in known if key.is_valid(now())]
        administrators = sum(key.role == "admin" for key in keys)
        access = f"{counted(len(keys), 'valid API key')}, {administrators} of them of administrators."
        named = {KEYS_ACCOUNT, found.name if found else KEYS_ACCOUNT}
        heads = [f"{name}:{head.sequence}:{head.hash}" for name, head in ledger.heads() if name in named]
    log = f" Audit log at the time of this form: {', '.join(heads)}." if heads else ""
    return LedgerRecord(budget, releases, access + log)

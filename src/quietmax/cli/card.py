"""`quietmax card`: the privacy card of a model as a table, JSON or HTML."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from quietmax.cli._options import Json, with_groups
from quietmax.cli._output import console, print_json, print_table
from quietmax.errors import InvalidInput, QuietmaxError

if TYPE_CHECKING:
    from quietmax.privacy_card import PrivacyCard
    from quietmax.review_forms import LedgerRecord

Form = Literal["card", "opendp-registry", "nist-800-226"]


@with_groups
def command(
    *,
    model: Annotated[Path, typer.Argument(help="Model folder, written by 'quietmax train'.")],
    html: Annotated[Path | None, "Also write the card as a web page to this file."] = None,
    public: Annotated[bool, "Leave out what is not for publication: results of attacks."] = False,
    form: Annotated[
        Form,
        typer.Option(
            "--format",
            help="The card, an entry for the OpenDP deployments registry (JSON, which is YAML), or a checklist after "
            "NIST SP 800-226. What the software cannot know is marked.",
        ),
    ] = "card",
    ledger: Annotated[
        str | None,
        "With another --format: also state what this ledger has charged. A SQLite file or the address of a PostgreSQL "
        "database; it is only read.",
    ] = None,
    account: Annotated[str | None, "Account in the ledger. Default: that of the model's data set."] = None,
    as_json: Json = False,
) -> None:
    """Show the privacy card of a model: what somebody can learn at most, for whom, and how good the model is.

    A card that shows results of attacks says on top that it is not for publication; --public leaves them out.

    Examples:

    quietmax card model --html card.html --public

    quietmax card private --format nist-800-226 --ledger ledger.sqlite
    """
    from quietmax._io import atomic_write
    from quietmax.privacy_card import read_card

    if ledger is not None and form == "card":
        raise InvalidInput("`ledger` requires `form` opendp-registry or nist-800-226.")
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
    if form != "card":
        _print_form(card, form, None if ledger is None else _read_ledger(ledger, card, account), as_json)
    elif as_json:
        print_json(card.to_json())
    else:
        print_table(card.title, ("", ""), card.rows(), prose=True)
        if html is not None:
            console.print(f"Wrote {html}.", soft_wrap=True)


def _read_ledger(address: str, card: PrivacyCard, account: str | None) -> LedgerRecord:
    """Read what a ledger states about the training set of a model; the ledger is not changed."""
    from quietmax.ledger.database import KEYS_ACCOUNT, now
    from quietmax.ledger.ledger import Ledger
    from quietmax.review_forms import LedgerRecord
    from quietmax.server.deployment import find_account

    with Ledger(address, read_only=True) as ledger:
        ledger.check_damage()
        _, _, found = find_account(ledger, card.dataset, account)
        if found is None and account is not None:
            ledger.account(account)  # names those that exist
        known = ledger.keys()
        keys = [key for key in known if key.is_valid(now())]
        spent = [] if found is None else [each for each in ledger.subaccounts(found) if each.spent_units]
        named = {KEYS_ACCOUNT} if found is None else {KEYS_ACCOUNT, found.name}
        return LedgerRecord(
            None if found is None else found.to_json(),
            () if found is None else tuple(ledger.charged_models(found)),
            len(spent),
            sum(key.role == "admin" for key in keys),
            len(keys),
            tuple(f"{name}:{head.sequence}:{head.hash}" for name, head in ledger.heads() if name in named),
        )


def _print_form(card: PrivacyCard, form: Form, ledger: LedgerRecord | None, as_json: bool) -> None:
    """Print the card as a form for reviewers."""
    from quietmax.review_forms import nist_checklist, registry_entry

    if form == "opendp-registry":
        print_json(registry_entry(card, ledger))
    elif as_json:
        print_json([item._asdict() for item in nist_checklist(card, ledger)])
    else:
        title, columns = "Checklist after NIST SP 800-226", ("factor", "question", "answer")
        print_table(title, columns, nist_checklist(card, ledger), prose=True)

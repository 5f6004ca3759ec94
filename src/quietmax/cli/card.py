"""`quietmax card`: the privacy card of a model as a table, JSON or HTML."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from quietmax.cli._options import Json
from quietmax.cli._output import console, print_json, print_table
from quietmax.errors import QuietmaxError

if TYPE_CHECKING:
    from quietmax.privacy_card import PrivacyCard

Form = Literal["card", "opendp-registry", "nist-800-226"]


def command(
    model: Annotated[Path, typer.Argument(help="Model folder, written by 'quietmax train'.")],
    html: Annotated[Path | None, typer.Option(help="Also write the card as a web page to this file.")] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Leave out what is not for publication: results of attacks.")
    ] = False,
    form: Annotated[
        Form,
        typer.Option(
            "--format",
            help="The card, an entry for the OpenDP deployments registry (JSON, which is YAML), or a checklist after "
            "NIST SP 800-226. What the software cannot know is marked.",
        ),
    ] = "card",
    as_json: Json = False,
) -> None:
    """Show the privacy card of a model: what somebody can learn at most, for whom, and how good the model is.

    A card that shows results of attacks says on top that it is not for publication; --public leaves them out.

    Example: quietmax card model --html card.html --public
    """
    from quietmax._io import atomic_write
    from quietmax.privacy_card import read_card

    card = read_card(model)
    if public:
        card = card.for_publication()
    if html is not None:
        try:
            atomic_write(html, lambda staging: staging.write_text(card.to_html(), encoding="utf-8"))
        except OSError as problem:
            raise QuietmaxError(f"Cannot write the card to {html}: {problem.strerror}.") from problem
    if form != "card":
        _print_form(card, form, as_json)
        return
    if as_json:
        print_json(card.to_json())
        return
    print_table(f"Privacy card: {card.status}", ("", ""), card.rows(), prose=True)
    if html is not None:
        console.print(f"Wrote {html}.", soft_wrap=True)


def _print_form(card: PrivacyCard, form: Form, as_json: bool) -> None:
    """Print the card as a form for reviewers."""
    from quietmax.review_forms import nist_checklist, registry_entry

    if form == "opendp-registry":
        print_json(registry_entry(card))
        return
    items = nist_checklist(card)
    if as_json:
        print_json(
            [{"topic": each.topic, "question": each.question, "answer": each.answer} for each in items]
        )
        return
    rows = [(each.topic, each.question, each.answer) for each in items]
    print_table("Checklist after NIST SP 800-226", ("factor", "question", "answer"), rows, prose=True)

"""`quietmax card`: the privacy card of a model as a table, JSON or HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quietmax.cli._options import Json
from quietmax.cli._output import console, print_json, print_table
from quietmax.errors import QuietmaxError


def command(
    model: Annotated[Path, typer.Argument(help="Model folder, written by 'quietmax train'.")],
    html: Annotated[Path | None, typer.Option(help="Also write the card as a web page to this file.")] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Leave out what is not for publication: results of attacks.")
    ] = False,
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
    if as_json:
        print_json(card.to_json())
        return
    print_table(f"Privacy card: {card.status}", ("", ""), card.rows(), prose=True)
    if html is not None:
        console.print(f"Wrote {html}.", soft_wrap=True)

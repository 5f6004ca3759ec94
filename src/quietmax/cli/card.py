"""`quietmax card`: the privacy card of a model, as text, JSON or HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quietmax._io import atomic_write
from quietmax.cli._options import Json
from quietmax.cli._output import console, print_json, print_table
from quietmax.errors import QuietmaxError
from quietmax.privacy_card import read_card


def command(
    model: Annotated[Path, typer.Argument(help="Folder written by 'quietmax train'.")],
    html: Annotated[Path | None, typer.Option(help="Write the card as a page to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Print the one-page privacy card of a model: guarantee, status, assumptions, what was spent, what was seen.

    Example: quietmax card model --html card.html
    """
    card = read_card(model)
    if html is not None:
        try:
            atomic_write(html, lambda staging: staging.write_text(card.to_html(), encoding="utf-8"))
        except OSError as problem:
            raise QuietmaxError(
                f"The card could not be written to {html} ({problem.strerror}); choose a file you may write to."
            ) from problem
    if as_json:
        print_json(card.to_json())
        return
    print_table(f"Privacy card: {card.status}", ("", ""), card.rows())
    if html is not None:
        console.print(f"Written to {html}", markup=False, highlight=False)

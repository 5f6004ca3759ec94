"""`quietmax ask`: the answers of a running service to all rows of a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from quietmax.cli._options import with_groups
from quietmax.cli._output import console, print_json, progress_bar
from quietmax.errors import DataUnavailable, InvalidData, counted
from quietmax.server.client import Client


@with_groups
def command(
    *,
    url: Annotated[str, typer.Argument(help="Address of the service, such as http://127.0.0.1:8080.")],
    model: Annotated[
        str, typer.Argument(help="NAME or NAME/VERSION of a model; by default its highest version.")
    ],
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="CSV, TSV or Parquet file with the columns of the model, in any order. Others are not sent.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="CSV file of answers, in the order of the rows. It is written completely or not at all. Default: "
            "beside FILE, with the ending .answers.csv.",
        ),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the API key. Default: the environment variable QUIETMAX_KEY, if it is set."
        ),
    ] = None,
) -> None:
    """Ask a running service ('quietmax serve') about all rows of a file.

    Rows are sent in as many requests as needed. If a run ends early, run the same command again: what was charged is
    not charged again.

    Examples:

    quietmax ask http://127.0.0.1:8080 affair people.csv

    quietmax ask https://my.org affair/2 a.csv --key-file key.txt -o b.csv
    """
    target = output or source.with_suffix(".answers.csv")
    name, _, version = model.partition("/")
    with Client(url, _key(key_file)) as client, progress_bar("asking") as progress:
        try:
            done = client.ask_file(name, source, target, version=version or None, progress=progress)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                "Interrupted. Run the same command again: what was charged is not charged again."
            ) from None
    print_json({**done, "output": str(target)})
    left = done["remaining_answers"]
    paid = (
        "The answers were free: training was charged."
        if left is None
        else f"{counted(done['new_answers'], 'new answer was', 'new answers were')} charged; {left:,} are left."
    )
    console.print(f"{counted(done['rows'], 'answer is', 'answers are')} in {target}. {paid}", soft_wrap=True)


def _key(file: Path | None) -> str | None:
    """The API key in a file or in the environment; None for anonymous access."""
    if file is None:
        return os.environ.get("QUIETMAX_KEY") or None
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DataUnavailable(
            f"key_file cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}."
        ) from None
    if not key.isascii() or not key.isprintable() or not key:
        raise InvalidData(f"key_file must hold one API key and nothing else, but '{file}' does not.")
    return key

"""What commands print: JSON on request, tables otherwise, progress on stderr, one sentence when something fails."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from quietmax.accounting.guarantee import Guarantee

# Names of classes, folders and accounts are shown as they are: no brackets or colons in them mean a style or a picture.
console = Console(markup=False, emoji=False)
errors = Console(stderr=True, markup=False, emoji=False)


def print_json(value: Any) -> None:
    """Print one JSON document; infinities become null, as JSON has no word for them."""
    sys.stdout.write(json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str | None = None
) -> None:
    """Print a table; all columns but the first are aligned to the right."""
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(trial) for trial in row))
    console.print(table)


@contextmanager
def progress_bar(description: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr with the time left; call the yielded function with (done, total)."""
    described = TextColumn("{task.description}", markup=False)
    columns = (described, BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True, disable=quiet or not errors.is_terminal) as bar:
        task = bar.add_task(description, total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield advance


def print_guarantee(guarantee: Guarantee) -> None:
    """Print what is claimed, and what it assumes."""
    colour = {"proven": "green", "conditional": "yellow", "refuted": "red"}[guarantee.status]
    console.print("Guarantee:", style="bold", end=" ")
    console.print(str(guarantee), style=colour, markup=False, highlight=False)
    for assumption in guarantee.assumptions:
        console.print(f"  assumes: {assumption}", markup=False, highlight=False)

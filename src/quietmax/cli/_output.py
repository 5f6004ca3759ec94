"""What commands print: JSON or tables on stdout, progress and errors on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from quietmax.accounting.costs import Cost
    from quietmax.accounting.guarantee import Guarantee

# Class, folder and account names are printed unchanged: brackets and colons in them are not markup or emoji codes.
console = Console(markup=False, emoji=False, highlight=False)
errors = Console(stderr=True, markup=False, emoji=False, highlight=False)

_COLOURS = {
    "strong": "green",
    "moderate": "green",
    "weak": "dark_orange",
    "none": "red",
    "conditional": "yellow",
    "refuted": "red",
}
"""The colour of each grade of a guarantee."""


@contextmanager
def as_document(*, wanted: bool) -> Iterator[None]:
    """With --json, print documents alone; otherwise everything else. A command states both, one after the other."""
    console.quiet = wanted
    try:
        yield
    finally:
        console.quiet = False


def in_json() -> bool:
    """Whether a JSON document is wanted."""
    return console.quiet


def print_json(value: Any) -> None:
    """Print a JSON document if one is wanted; infinities and NaN, which JSON does not have, become null."""
    if in_json():
        sys.stdout.write(json.dumps(_jsonable(value), indent=2, allow_nan=False) + "\n")


def _jsonable(value: Any) -> Any:
    """The value without objects, infinities and NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _jsonable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(entry) for entry in value]
    if not hasattr(value, "to_json"):
        return value
    rated = {"strength": value.strength} if hasattr(value, "strength") else {}  # a guarantee
    return _jsonable({**value.to_json(), **rated})


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    caption: str | None = None,
    *,
    prose: bool = False,
    optional: Sequence[str] = (),
) -> None:
    """Print a table. The first column is left-aligned, the others right-aligned; long entries are wrapped.

    Numbers and other short words are not broken unless even they need more than the terminal's width.
    """
    shown = [list(row) for row in rows]
    cells = [[column, *(row[index] for row in shown)] for index, column in enumerate(columns)]
    widths = [_unbroken(each) for each in cells]
    kept, left_out = list(range(len(columns))), []
    for name in optional:
        if _fit(widths[index] for index in kept):
            break
        left_out.append(name)
        kept.remove(columns.index(name))
    fits = _fit(widths[index] for index in kept)
    table = Table(title=title, title_justify="left", show_header=any(columns))
    for index in kept:
        table.add_column(
            columns[index],
            justify="left" if prose or index == 0 else "right",
            overflow="fold",
            min_width=widths[index] if fits else None,
            # Rich shrinks the widest columns first; it must not try those that cannot become narrower.
            no_wrap=fits and widths[index] == max(map(cell_len, cells[index])),
        )
    for row in shown:
        table.add_row(*(Text(row[index]) for index in kept))
    console.print(table)
    if left_out:
        console.print(f"Left out, the terminal is too narrow: {'; '.join(left_out)}.", style="italic")
    if caption is not None:
        console.print(caption, style="italic")


def print_rows(
    title: str, columns: Mapping[str, str], rows: Iterable[Any], caption: str | None = None, **options: Any
) -> None:
    """Print objects as a table; each column has a heading and a format, such as "{0.value:.4f}" or "{1}" of a tuple."""
    entries = (row if isinstance(row, tuple) else (row,) for row in rows)
    lines = ([form.format(*entry) for form in columns.values()] for entry in entries)
    print_table(title, list(columns), lines, caption, **options)


_LONGEST_UNBROKEN = 20
_FRAME, _FRAME_PER_COLUMN = 1, 3


def _unbroken(cells: Sequence[str]) -> int:
    """Return the width below which a column would break a word of at most 20 characters."""
    widths = [cell_len(word) for cell in cells for word in cell.split()]
    return max((width for width in widths if width <= _LONGEST_UNBROKEN), default=1)


def _fit(widths: Iterable[int]) -> bool:
    """Return whether columns of these widths fit into the terminal."""
    return _FRAME + sum(width + _FRAME_PER_COLUMN for width in widths) <= console.width


def print_guarantee(guarantee: Guarantee) -> None:
    """Print status and strength of a guarantee, what is claimed, and its assumptions."""
    colour = _COLOURS[guarantee.grade]
    claim = str(guarantee).removeprefix(f"{guarantee.status}: ")
    console.print(Text.assemble(("Guarantee:", "bold"), " ", (guarantee.summary, colour), f". {claim}"))
    for assumption in guarantee.assumptions:
        console.print(f"  assumes: {assumption}")


def amount(cost: Cost) -> str:
    """The amount of a cost with its symbol: epsilon or mu."""
    ((name, value),) = ((name, value) for name, value in cost.to_json().items() if name != "measure")
    return f"{name} {value:.6g}"


def print_error(message: str) -> None:
    """Print one line on stderr."""
    errors.print(f"quietmax: {message}", style="bold red", soft_wrap=True)


def print_note(message: str) -> None:
    """Print one line on stderr that is not an error."""
    errors.print(message, soft_wrap=True)


@contextmanager
def progress_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar with the remaining time on stderr, if stderr is a terminal."""
    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=errors, transient=True, disable=in_json() or not errors.is_terminal
    ) as bar:
        task = bar.add_task(description, total=None)

        def _advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield _advance

"""Tables of our own measurements that are shipped with the package as CSV files: writing and reading them."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from quietmax._io import atomic_write
from quietmax.errors import InvalidInput

Row = TypeVar("Row", bound=Any)

_DIGITS = 6


def stored_table(kind: type[Row], file: str, names: Sequence[str] | None = None) -> list[Row]:
    """Return the rows of a shipped table."""
    found = read_table(kind, resources.files("quietmax.experiments").joinpath("paper", file))
    measured = list(dict.fromkeys(row.dataset for row in found))
    for name in names or ():
        if name not in measured:
            raise InvalidInput(
                f"Nothing is stored for {name!r}; stored are {', '.join(measured)}. Others can be measured with "
                "`measure`."
            )
    return [row for name in names or measured for row in found if row.dataset == name]


def read_table(kind: type[Row], path: Traversable) -> list[Row]:
    """Return the rows of a table that `write_table` wrote.

    Parameters
    ----------
    kind : dataclass
        What a row is; its fields are strings, numbers or None.
    path : pathlib.Path or Traversable
        The CSV file.

    Returns
    -------
    list of `kind`
    """
    with path.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    hints = get_type_hints(kind)
    return [
        kind(**{each.name: _value(row[each.name], hints[each.name]) for each in fields(kind)}) for row in rows
    ]


def write_table(rows: Sequence[Mapping[str, object]], path: Path) -> Path:
    """Write rows to a CSV file; `stored_table` reads it if they are the fields of a dataclass."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(staging: Path) -> None:
        with staging.open("w", encoding="utf-8", newline="") as file:
            lines = csv.writer(file, lineterminator="\n")
            lines.writerow(rows[0])
            for row in rows:
                lines.writerow([_text(value) for value in row.values()])

    atomic_write(path, write)
    return path


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.{_DIGITS}g}" if isinstance(value, float) else str(value)


def _value(text: str, hint: Any) -> Any:
    """Return what `_text` wrote, by the annotation of its field."""
    optional = type(None) in get_args(hint)
    if optional and not text:
        return None
    wanted = next(each for each in get_args(hint) if each is not type(None)) if optional else hint
    return wanted(text)

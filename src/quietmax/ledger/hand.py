"""The ledger's writing hand: plain statements on the driver's own cursor, inside a transaction of SQLAlchemy's.

A statement through SQLAlchemy takes some 75 microseconds, on the cursor 3 (SQLite, measured); a charge needs half a
dozen of them, so that this is what decides how many charges a second are possible. The statements are the same for both
databases but for the placeholder and the row lock, which SQLite does not have (it locks the file).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection

Values = Sequence[int | str | bytes | None]
_MOST_VALUES = 10_000


class Hand:
    """Runs statements written with `?` for values and `(??)` for a list of them."""

    def __init__(self, connection: Connection) -> None:
        self._cursor: Any = connection.connection.cursor()
        self._sqlite = connection.dialect.name == "sqlite"

    def rows(self, statement: str, values: Values = ()) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        self._cursor.execute(_spelled(statement, self._sqlite), values)
        found: list[tuple[Any, ...]] = self._cursor.fetchall()
        return found

    def rows_of(self, statement: str, listed: Iterable[int | str | bytes]) -> list[tuple[Any, ...]]:
        """All rows of a query for a list of values, in parts that the database takes."""
        values = sorted(listed)
        found: list[tuple[Any, ...]] = []
        for start in range(0, len(values), _MOST_VALUES):
            part = values[start : start + _MOST_VALUES]
            self._cursor.execute(_spelled(statement, self._sqlite, len(part)), part)
            found += self._cursor.fetchall()
        return found

    def run(self, statement: str, values: Values = ()) -> int:
        """Change something; the number of rows changed."""
        self._cursor.execute(_spelled(statement, self._sqlite), values)
        return int(self._cursor.rowcount)

    def run_many(self, statement: str, rows: Sequence[Values]) -> None:
        """Change many rows with one statement."""
        if rows:
            self._cursor.executemany(_spelled(statement, self._sqlite), rows)


@lru_cache(maxsize=512)
def _spelled(statement: str, sqlite: bool, count: int | None = None) -> str:
    """The statement as the driver takes it.

    >>> _spelled("SELECT 1 WHERE x IN (??) FOR UPDATE", True, 2), _spelled("SELECT ? FOR UPDATE", False)
    ('SELECT 1 WHERE x IN (?,?)', 'SELECT %s FOR UPDATE')
    """
    if count is not None:
        statement = statement.replace("(??)", f"({','.join('?' * count)})")
    return statement.replace(" FOR UPDATE", "") if sqlite else statement.replace("?", "%s")

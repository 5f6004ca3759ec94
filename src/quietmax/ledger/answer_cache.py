"""The shelf: finds stored answers to identical queries.

The database keeps answers in the order they were given, those drawn together in one row: with a row for each query
in an index, every query would dirty a page of its own, and a batch of 100 would write 100 pages. The index is in
memory, holds the latest answers of each account, and is brought up to date inside the transaction that asks, so that
what other processes have stored is found too. Whoever stores holds the account's lock: rows appear in the order of
their ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import numpy as np

from quietmax.ledger.database import Cursor

KEY_BYTES = 16
MOST_ANSWERS = 200_000
_ROWS_AT_ONCE = 5_000
_POSITION_BITS = 20


class AnswerCache:
    """The index of one process. Not safe to share between threads: it belongs to the writing one."""

    def __init__(self, most: int = MOST_ANSWERS) -> None:
        self._most = most
        self._places: dict[int, dict[int, int]] = {}
        self._seen: dict[int, int] = {}

    def find(self, cursor: Cursor, account: int, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """The stored answers among the keys of queries."""
        self._refresh(cursor, account)
        places = self._places[account]
        hits = {key: places[short] for key in keys if (short := _short(key)) in places}
        if not hits:
            return {}
        rows = {
            number: (bytes(known), bytes(answers))
            for number, known, answers in cursor.rows_of(
                "SELECT id, keys, answers FROM answers WHERE id IN (??)",
                {place >> _POSITION_BITS for place in hits.values()},
            )
        }
        found = {}
        for key, place in hits.items():
            known, answers = rows.get(place >> _POSITION_BITS, (b"", b""))
            position = place & ((1 << _POSITION_BITS) - 1)
            if known[position * KEY_BYTES : (position + 1) * KEY_BYTES] == key:
                width = len(answers) * KEY_BYTES // len(known)
                found[key] = answers[position * width : (position + 1) * width]
        return found

    def forget(self) -> None:
        """Read everything again: a transaction was undone, so that what it showed is not there."""
        self._places.clear()
        self._seen.clear()

    def _refresh(self, cursor: Cursor, account: int) -> None:
        if account not in self._places:
            self._places[account] = {}
            self._seen[account] = self._start(cursor, account)
        while True:
            rows = cursor.rows(
                "SELECT id, keys FROM answers WHERE account = ? AND id > ? ORDER BY id LIMIT ?",
                (account, self._seen[account], _ROWS_AT_ONCE),
            )
            for number, keys in rows:
                self._add(account, number, bytes(keys))
            if len(rows) < _ROWS_AT_ONCE:
                return

    def _start(self, cursor: Cursor, account: int) -> int:
        """The id after which the latest answers begin."""
        count, before = 0, 2**62
        while True:
            rows = cursor.rows(
                "SELECT id, LENGTH(keys) FROM answers WHERE account = ? AND id < ? ORDER BY id DESC LIMIT ?",
                (account, before, _ROWS_AT_ONCE),
            )
            for number, length in rows:
                count += length // KEY_BYTES
                before = number
                if count > self._most:
                    return int(number)
            if len(rows) < _ROWS_AT_ONCE:
                return 0

    def _add(self, account: int, number: int, keys: bytes) -> None:
        places = self._places[account]
        shorts = np.frombuffer(keys, "<i8")[:: KEY_BYTES // 8].tolist()
        first = number << _POSITION_BITS
        for position, short in enumerate(shorts):
            places.setdefault(short, first + position)
        self._seen[account] = number
        for short in list(islice(places, max(len(places) - self._most, 0))):
            del places[short]


def _short(key: bytes) -> int:
    """The first half of a key, by which it is indexed; the whole is compared when it is read."""
    return int.from_bytes(key[:8], "little", signed=True)

"""The answer cache: finds stored answers to identical queries.

Answers that were drawn together share one row of the table `answers`, in the order of their ids. With one indexed row
per query, a batch of 100 queries would write 100 pages of the database. So the index is in memory. It holds the newest
answers of each account. Every lookup first reads the rows that were added since, inside the transaction of the lookup,
so that answers stored by other processes are found too. Storing answers requires the account's lock, so rows become
visible in the order of their ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import numpy as np

from quietmax.ledger.database import Cursor

KEY_BYTES = 16
MAX_ANSWERS = 200_000
_ROWS_PER_READ = 5_000
_POSITION_BITS = 20


class AnswerCache:
    """The index of one process. Not thread-safe: it belongs to the thread that writes."""

    def __init__(self, max_answers: int = MAX_ANSWERS) -> None:
        self._max_answers = max_answers
        # account -> first half of the key -> (id of the row << _POSITION_BITS) + position in the row
        self._locations: dict[int, dict[int, int]] = {}
        self._last_read: dict[int, int] = {}

    def find(self, cursor: Cursor, account: int, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """Look up the stored answers to queries."""
        self._refresh(cursor, account)
        locations = self._locations[account]
        wanted = list(keys)
        halves = _first_halves(b"".join(wanted))
        if locations.keys().isdisjoint(halves):
            return {}
        hits = {wanted[place]: locations[half] for place, half in enumerate(halves) if half in locations}
        rows = {
            row_id: (bytes(row_keys), bytes(answers))
            for row_id, row_keys, answers in cursor.fetch_listed(
                "SELECT id, keys, answers FROM answers WHERE id IN (??)",
                {location >> _POSITION_BITS for location in hits.values()},
            )
        }
        found = {}
        for key, location in hits.items():
            row_keys, answers = rows.get(location >> _POSITION_BITS, (b"", b""))
            if not row_keys:  # pruned: else an answer that is stored later would not be found
                locations.pop(_first_halves(key)[0], None)
            position = location & ((1 << _POSITION_BITS) - 1)
            if row_keys[position * KEY_BYTES : (position + 1) * KEY_BYTES] == key:
                width = len(answers) * KEY_BYTES // len(row_keys)
                found[key] = answers[position * width : (position + 1) * width]
        return found

    def clear(self) -> None:
        """Drop the index. Needed after a rollback: rows that the transaction had seen may not exist."""
        self._locations.clear()
        self._last_read.clear()

    def _refresh(self, cursor: Cursor, account: int) -> None:
        """Index the rows that were added since the last call."""
        if account not in self._locations:
            self._locations[account] = {}
            self._last_read[account] = self._first_id(cursor, account)
        while True:
            rows = cursor.fetch(
                "SELECT id, keys FROM answers WHERE account = ? AND id > ? ORDER BY id LIMIT ?",
                (account, self._last_read[account], _ROWS_PER_READ),
            )
            for row_id, keys in rows:
                self._add(account, row_id, bytes(keys))
            if len(rows) < _ROWS_PER_READ:
                return

    def _first_id(self, cursor: Cursor, account: int) -> int:
        """Return the id after which the newest `max_answers` answers begin."""
        count, before = 0, 2**62
        while True:
            rows = cursor.fetch(
                "SELECT id, LENGTH(keys) FROM answers WHERE account = ? AND id < ? ORDER BY id DESC LIMIT ?",
                (account, before, _ROWS_PER_READ),
            )
            for row_id, length in rows:
                count += length // KEY_BYTES
                before = row_id
                if count > self._max_answers:
                    return int(row_id)
            if len(rows) < _ROWS_PER_READ:
                return 0

    def _add(self, account: int, row_id: int, keys: bytes) -> None:
        locations = self._locations[account]
        for location, half in enumerate(_first_halves(keys), row_id << _POSITION_BITS):
            locations.setdefault(half, location)  # of equal queries, the first that was stored counts
        self._last_read[account] = row_id
        if len(locations) > self._max_answers + self._max_answers // 16:  # dropping many takes little longer
            for half in list(islice(locations, len(locations) - self._max_answers)):
                del locations[half]


def _first_halves(keys: bytes) -> list[int]:
    """Return the parts of keys that are indexed; a whole key is compared after its row was read."""
    halves: list[int] = np.frombuffer(keys, "<i8")[:: KEY_BYTES // 8].tolist()
    return halves

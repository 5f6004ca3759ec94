from __future__ import annotations

import hashlib

from quietmax.accounting import LIMIT
from quietmax.ledger.journal import START, JournalEntry


def test_a_row_is_hashed_as_one_json_list_in_utf_8() -> None:
    row = JournalEntry(2, 1, 5, "open", "Zoë", "m/1", 0, 0, 0, LIMIT, "{}", START)
    written = f'[2,1,5,"open","Zoë","m/1",0,0,0,{LIMIT},"{{}}","{START}"]'
    assert row.expected_hash() == hashlib.sha256(written.encode("utf-8")).hexdigest()
    assert len(START) == len(row.expected_hash())

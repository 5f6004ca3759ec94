from __future__ import annotations

import hashlib
import json

from hypothesis import given
from hypothesis import strategies as st

from quietmax.accounting import LIMIT
from quietmax.ledger.journal import START, JournalEntry, row_hash


def test_a_row_is_hashed_as_one_json_list_in_utf_8() -> None:
    row = JournalEntry(2, 1, 5, "open", "Zoë", "m/1", 0, 0, 0, LIMIT, "{}", START)
    written = f'[2,1,5,"open","Zoë","m/1",0,0,0,{LIMIT},"{{}}","{START}"]'
    assert row.expected_hash() == hashlib.sha256(written.encode("utf-8")).hexdigest()
    assert len(START) == len(row.expected_hash())


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.text(st.characters(exclude_categories=["Cs"]))))
def test_a_row_has_the_hash_of_what_the_standard_library_writes(fields: list[int | str]) -> None:
    written = json.dumps(fields, separators=(",", ":"), ensure_ascii=False)
    assert row_hash(*fields) == hashlib.sha256(written.encode("utf-8")).hexdigest()

from __future__ import annotations

import hashlib
import json

from hypothesis import given
from hypothesis import strategies as st

from quietmax.accounting.costs import LIMIT
from quietmax.ledger.database import START, JournalEntry, answer_digest, row_hash


def test_a_row_is_hashed_as_one_json_list_in_utf_8() -> None:
    row = JournalEntry(2, 1, 5, "open", "Zoë", "m/1", 0, 0, 0, LIMIT, "{}", START)
    written = f'[2,1,5,"open","Zoë","m/1",0,0,0,{LIMIT},"{{}}","{START}"]'
    assert row.expected_hash() == hashlib.sha256(written.encode("utf-8")).hexdigest()
    assert len(START) == len(row.expected_hash())


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.text(st.characters(exclude_categories=["Cs"]))))
def test_a_row_has_the_hash_of_what_the_standard_library_writes(fields: list[int | str]) -> None:
    written = json.dumps(fields, separators=(",", ":"), ensure_ascii=False)
    assert row_hash(*fields) == hashlib.sha256(written.encode("utf-8")).hexdigest()


def test_the_digest_of_an_answer_is_a_keyed_hash_of_request_body_and_answer() -> None:
    content = b"answer 3 4 keybodydraw"
    expected = hashlib.blake2b(content, key=b"salt", digest_size=16).hexdigest()
    assert answer_digest(b"salt", b"key", b"body", b"draw") == expected
    assert answer_digest(b"salt", b"keyb", b"ody", b"draw") != expected, "the lengths count"

from __future__ import annotations

import hashlib
import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from quietmax.accounting.costs import LIMIT
from quietmax.ledger.database import COLUMNS, START, JournalEntry, _answer_digest

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NUMBER = st.integers(-(2**63), 2**63 - 1)


@given(st.tuples(*[NUMBER] * 3, *[TEXT] * 3, *[NUMBER] * 4, TEXT))
@example((2, 1, 5, "open", "Zoë", "m/1", 0, 0, 0, LIMIT, "{}"))
def test_a_row_is_hashed_as_the_json_list_that_the_standard_library_writes(fields: Any) -> None:
    written = json.dumps([*fields, START], separators=(",", ":"), ensure_ascii=False)
    expected = hashlib.sha256(written.encode("utf-8")).hexdigest()
    assert JournalEntry(**dict(zip(COLUMNS, (*fields, START), strict=False))).expected_hash() == expected
    assert len(START) == len(expected)


def test_the_digest_of_an_answer_is_a_keyed_hash_of_request_body_and_answer() -> None:
    content = b"answer 3 4 keybodydraw"
    expected = hashlib.blake2b(content, key=b"salt", digest_size=16).hexdigest()
    assert _answer_digest(b"salt", b"key", b"body", b"draw") == expected
    assert _answer_digest(b"salt", b"keyb", b"ody", b"draw") != expected, "the lengths count"

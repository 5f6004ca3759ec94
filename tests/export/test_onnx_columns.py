"""The regular expressions of the ONNX columns agree with Python's strings."""

from __future__ import annotations

import re
import sys
from decimal import Decimal

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quietmax.data.cells import exact_number
from quietmax.data.encoding import CategoricalColumn, HashedColumn
from quietmax.errors import InvalidData, InvalidInput
from quietmax.estimators.serialization import open_private
from quietmax.export.onnx import (
    _BLANKS,
    Graph,
    _any_case,
    _encode_column,
    _literal,
    _plain_number,
)
from quietmax.export.tables import CASED
from tests.export.people import CELLS, random_rows, unreadable


def python(pattern: str) -> re.Pattern[str]:
    """Return a pattern of RE2 for Python, which writes characters in another way."""
    return re.compile(re.sub(r"\\x\{(.*?)\}", lambda found: f"\\U{int(found[1], 16):08x}", pattern))


@settings(max_examples=40)
@given(st.text(max_size=6), st.text(alphabet="sSßſẞfFﬁﬀﬃiİIıkK\u212aé", max_size=6))
def test_a_pattern_for_any_case_matches_what_folds_to_the_string(first: str, second: str) -> None:
    for string, other in (
        (first, second),
        (second, first),
        (second, second.upper()),
        (second, second.lower()),
    ):
        found = python(_any_case(string.casefold())).fullmatch(other)
        assert (found is not None) == (string.casefold() == other.casefold())


@given(st.text(max_size=8), st.text(max_size=8))
def test_a_literal_matches_its_string_alone(string: str, other: str) -> None:
    assert python(_literal(string)).fullmatch(string)
    assert (python(_literal(string)).fullmatch(other) is not None) == (string == other)


@given(
    st.from_regex(r"-?(0|[1-9][0-9]{0,3})?(\.[0-9]{0,3})?", fullmatch=True),
    st.sampled_from(["1", "-0.5", "120", "0"]),
)
def test_a_pattern_for_a_number_matches_its_spellings_without_exponent(string: str, number: str) -> None:
    found = python(_plain_number(Decimal(number))).fullmatch(string)
    assert (found is not None) == (exact_number(string) == Decimal(number))


def test_the_blanks_are_those_that_strip_removes() -> None:
    removed = {chr(number) for number in range(sys.maxunicode + 1) if chr(number).isspace()}
    matched = {chr(number) for number in range(0x4000) if python(_BLANKS).fullmatch(chr(number))}
    assert removed == matched
    assert " \t\u3000\x1c".strip() == ""


def test_no_character_outside_the_table_changes_its_case() -> None:
    assert all(chr(number).casefold() == chr(number) for number in range(CASED.stop, sys.maxunicode + 1))


@pytest.mark.parametrize("name", ["smoker", "joined", "left"])
def test_the_cells_that_the_tests_call_unreadable_are_errors_of_the_encoding(name: str, table_head) -> None:
    encoding = open_private(table_head).encoding
    usual = random_rows(1, seed=0).assign(joined="2012-02-29", left="15.06.1999", smoker="yes", code="2")
    for cell in CELLS[name]:
        row = usual.assign(**{name: cell})
        if unreadable(row)[0]:
            with pytest.raises(InvalidData):
                encoding.encode(row)
        else:
            assert encoding.encode(row).shape == (1, len(encoding.feature_names))


def test_a_column_with_too_many_spellings_is_refused() -> None:
    column = CategoricalColumn("street", ("s" * 300,), ignore_case=True)
    with pytest.raises(InvalidInput, match=r"'street'.*too many spellings"):
        _encode_column(Graph(["street"]), column)


def test_a_column_type_without_operations_is_refused_by_its_name() -> None:
    column = type("PostalColumn", (HashedColumn,), {"kind": "postal"})("zip", 4)
    with pytest.raises(InvalidInput, match=r"'zip' cannot be exported.*columns of the type 'postal'"):
        _encode_column(Graph(["zip"]), column)


def test_ordinary_words_in_any_case_have_short_patterns() -> None:
    assert (
        pd.Series(["Massachusetts", "Mississippi"]).map(lambda word: len(_any_case(word.casefold()))).max()
        < 5000
    )

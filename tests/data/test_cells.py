"""How one cell is read: the same at every place, whatever the other cells of its column hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pytest

from quietmax.data.cells import (
    _parse_boolean,
    as_numbers,
    as_string,
    as_strings,
    is_valid_unicode,
    parse_date,
)
from quietmax.errors import InvalidInput
from quietmax.estimators.blocks import _person_digests
from quietmax.estimators.training_set import Persons, _names_of


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Decimal("1.00"), "1"),
        (Decimal("0E-10"), "0"),
        (Decimal("12345678901234567890.1250"), "12345678901234567890.125"),
        (Decimal("1E+3"), "1000"),
        (123456789012345678901, "123456789012345678901"),
        (np.float32(3), "3"),
        (b" caf\xc3\xa9 ", "caf\u00e9"),
        (b"\xff1", "\\xff1"),
        (np.datetime64("NaT"), ""),
        (datetime(2024, 1, 31, 8, 30), "2024-01-31 08:30:00"),
        (datetime(2024, 1, 31, 8, 30, 0, 500000), "2024-01-31 08:30:00.5"),
    ],
)
def test_a_cell_is_one_string(value: object, text: str) -> None:
    assert as_string(value) == text


def test_a_nested_python_value_is_an_error() -> None:
    with pytest.raises(InvalidInput, match="of type list"):
        as_strings(pd.Series([["a"], ["b"]]))


COLUMNS: list[Callable[[list[Any]], pd.Series[Any]]] = [
    lambda cells: pd.Series(cells, dtype=object),
    lambda cells: pd.Series(pd.arrays.ArrowExtensionArray(pyarrow.array(cells))),
]


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize(
    "cells",
    [
        [1, None, 2**53 + 1, -7],
        [1.5, None, math.inf, 3.0],
        ["a ", None, "01", "NA"],
        [True, None, False],
        [date(2024, 1, 31), None, date(1, 1, 1)],
        [datetime(2024, 1, 31, 8, 30, 0, 500000), None, datetime(1970, 1, 1)],
        [Decimal("1.50"), None, Decimal("2.00")],
        [b" x ", None, b"\xff"],
    ],
)
def test_the_string_of_a_cell_depends_on_no_other_cell(
    cells: list[Any], column: Callable[[list[Any]], pd.Series[Any]]
) -> None:
    values = column(cells)
    together = as_strings(values).tolist()
    assert together == [as_strings(values.iloc[[place]]).item() for place in range(len(cells))]
    assert together[::-1] == as_strings(values.iloc[::-1]).tolist()
    assert together[1] == ""


def test_what_is_no_number_names_the_row_and_shows_no_value() -> None:
    with pytest.raises(InvalidInput) as told:
        as_numbers(pd.Series(["1", "secret"]), "age")
    assert "Row 2 has no number in the numeric column 'age'" in str(told.value)
    assert "secret" not in str(told.value)


def test_dates_booleans_and_valid_strings_are_told_from_others() -> None:
    assert parse_date("2024-02-29") == datetime(2024, 2, 29)
    assert parse_date("2023-02-29") is None
    assert [_parse_boolean(each) for each in ("Yes", "0", "0.0", "ja")] == [1, 0, 0, None]
    assert is_valid_unicode(["ok", "\ud800"]).tolist() == [True, False]


@pytest.mark.parametrize("kind", ["string[python]", "string[pyarrow]", "str", "category", object])
def test_strings_that_differ_after_a_nul_character_differ_with_every_version_of_pandas(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    strings = ["a\0b", "a\0c", "a", " b"]
    column = pd.Series([*strings, None], dtype=kind)
    factorize = pd.factorize

    def of_version_2(values: Any, **options: Any) -> Any:
        cut = [str(value).partition("\0")[0] for value in values]
        return factorize(np.array(cut, dtype=object), **options)

    monkeypatch.setattr(pd, "factorize", of_version_2)
    assert as_strings(column).tolist() == ["a\0b", "a\0c", "a", "b", ""]
    names = _names_of(column[:-1])
    persons = Persons.of(names)
    assert (persons.count, persons.rows.tolist()) == (4, [1, 1, 1, 1])
    assert len(set(_person_digests(names, b"key").tolist())) == 4


def test_a_category_that_no_row_has_is_not_read() -> None:
    column = pd.Series(pd.Categorical([2, None, 2], categories=[1, 2, (3,)]))
    assert as_strings(column).tolist() == ["2", "", "2"]
    assert as_strings(column[:0]).tolist() == []


def test_integers_of_arrow_that_no_float_equals_are_rounded() -> None:
    large = pd.Series([2**53 + 1, None], dtype=pd.ArrowDtype(pyarrow.int64()))
    np.testing.assert_equal(as_numbers(large, "x"), [2.0**53, math.nan])

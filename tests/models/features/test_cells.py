"""A row's cells follow from that row and public numbers alone, and are those of a plain computation (THEORY 3.14)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quietmax._before_noise import is_plain
from quietmax.data.encoding import (
    BooleanColumn,
    CategoricalColumn,
    Encoding,
    HashedColumn,
    NumericColumn,
    TextColumn,
)
from quietmax.errors import InvalidInput
from quietmax.models.features.generic import feature_map_from_json
from quietmax.models.features.tabular import LEVELS, TableCells, table_cells

CELLS = TableCells(
    9,
    ((0, 1), (1, 3), (3, 6), (6, 9)),
    (0, 1),
    levels=32,
    crosses=((0, 1), (2, 3), (1, 2), (2, 2)),
)


def plain_cells(cells: TableCells, row: list[float]) -> list[int]:
    """The cells of one row, column by column."""
    found, coarse, sizes = [], [], []
    for position, (first, last) in enumerate(cells.parts):
        part = row[first:last]
        if position in cells.numbers:
            missing = len(part) == 2 and part[1] > 0.0
            value = min(max(part[0], 0.0), 1.0)
            found.append(cells.levels if missing else min(math.floor(value * cells.levels), cells.levels - 1))
            coarse.append(8 if missing else min(math.floor(value * 8), 7))
            sizes.append(9)
        else:
            positive = [place for place, each in enumerate(part) if each > 0.0]
            largest = max(positive, key=lambda place: (part[place], -place), default=len(part))
            found.append(largest)
            coarse.append(largest)
            sizes.append(len(part) + 1)
    return found + [coarse[one] * sizes[other] + coarse[other] for one, other in cells.crosses]


NUMBERS = st.sampled_from([0.0, 1.0, -0.0, 0.5, 0.03125, 0.999, -3.0, 2.0, 1e38]) | st.floats(0, 1, width=32)


@settings(max_examples=200, deadline=None)
@given(st.lists(NUMBERS, min_size=9, max_size=9))
def test_the_cells_of_a_row_are_those_of_a_plain_computation(row: list[float]) -> None:
    (found,) = CELLS.transform([row])
    assert found.tolist() == plain_cells(CELLS, [float(np.float32(each)) for each in row])
    assert all(0 <= cell < size for cell, size in zip(found, CELLS.sizes, strict=True))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_a_row_has_the_same_cells_whatever_is_beside_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.choice(np.array([0.0, 1.0, 0.25, 0.7, -1.0, 1e30], np.float32), (60, 9))
    expected = CELLS.transform(rows)
    for order in (np.arange(1, 60), rng.permutation(60), np.repeat(np.arange(5), 9), np.array([7])):
        np.testing.assert_array_equal(CELLS.transform(rows[order]), expected[order])
        np.testing.assert_array_equal(CELLS.transform(np.asfortranarray(rows[order])), expected[order])


def test_cells_of_the_largest_map_are_exact_in_the_numbers_that_hold_them() -> None:
    wide = TableCells(4091, ((0, 2045), (2045, 4091)), crosses=((0, 1),))
    assert 2**22 - 2**12 < sum(wide.sizes) <= 2**22
    rows = np.zeros((2, 4091), np.float32)
    rows[0, [2044, 4090]] = 1.0
    found = wide.transform(rows)
    assert found[0].tolist() == [2044, 2045, 2044 * 2047 + 2045]
    assert found[1].tolist() == [2045, 2046, 2046 * 2047 - 1]  # none of the indicators: the last cell of all


def test_the_cells_of_a_schema_are_levels_categories_and_their_pairs() -> None:
    columns = (
        NumericColumn("age", 0, 100),
        CategoricalColumn("town", ("a", "b"), missing=False),
        BooleanColumn("smokes"),
        HashedColumn("zip", 4),
    )
    encoding = Encoding(columns, "ill", ("no", "yes"), crosses=(("age", "town"),))
    cells = table_cells(encoding, 16)
    assert cells is not None
    frame = pd.DataFrame(
        {
            "age": ["0", "99.9", None, "250"],
            "town": ["a", "b", "c", "b"],
            "smokes": ["yes", "no", None, "yes"],
            "zip": ["1", "1", "2", None],
        }
    )
    found = cells.transform(encoding.encode(frame))
    assert cells.sizes[:2] == (17, 3)
    assert found[:, 0].tolist() == [0, 15, 16, 15]
    assert found[:, 1].tolist() == [0, 1, 2, 1]
    assert found[0, 3] == found[1, 3]
    assert found[:, 4].tolist() == [0 * 3 + 0, 7 * 3 + 1, 8 * 3 + 2, 7 * 3 + 1]
    for row in range(4):
        alone = encoding.encode(frame.iloc[[row]].reset_index(drop=True))
        np.testing.assert_array_equal(cells.transform(alone)[0], found[row])


def test_a_table_with_a_column_of_text_has_no_cells() -> None:
    encoding = Encoding((NumericColumn("age", 0, 100), TextColumn("note")), "ill", ("no", "yes"))
    assert table_cells(encoding, 16) is None


def test_a_map_of_cells_is_stored_and_runs_no_code_of_the_users_own() -> None:
    assert feature_map_from_json(CELLS.to_json()) == CELLS
    assert is_plain(CELLS, "map")


INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "no column": ({"parts": ()}, "Each part must be a range"),
    "an empty part": ({"parts": ((0, 0),)}, "Each part must be a range"),
    "a part beyond the row": ({"parts": ((0, 10),)}, "Each part must be a range"),
    "levels": ({"levels": 20}, "`levels` must be one of"),
    "a number of three entries": ({"numbers": (2,)}, "`numbers` must be positions"),
    "a number that is no part": ({"numbers": (4,)}, "`numbers` must be positions"),
    "a cross with no part": ({"crosses": ((0, 4),)}, "`crosses` must be pairs"),
}


@pytest.mark.parametrize(("changed", "message"), INVALID.values(), ids=INVALID)
def test_parameters_that_no_table_has_are_an_error(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        TableCells(**({"columns": 9, "parts": CELLS.parts, "numbers": (0, 1)} | changed))


def test_too_many_cells_and_rows_of_another_table_are_errors() -> None:
    with pytest.raises(InvalidInput, match="at most 4,194,304 are possible"):
        TableCells(4094, ((0, 2047), (2047, 4094)), crosses=((0, 1),))
    with pytest.raises(InvalidInput, match="must have 9 numbers, got 8"):
        CELLS.transform(np.zeros((1, 8)))
    with pytest.raises(InvalidInput, match="finite"):
        CELLS.transform(np.full((1, 9), np.nan))
    assert max(LEVELS) == 256

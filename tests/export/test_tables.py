"""What is said of columns without Quietmax is what the encoding and the cells do."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quietmax.data.encoding import CategoricalColumn, Column, DateColumn, Encoding, NumericColumn
from quietmax.export.tables import _reading, characters_by_case
from quietmax.models.features.tabular import table_cells

FINITE = st.floats(-1e300, 1e300, allow_nan=False)


def cells_of(column: Column, values: list, levels: int) -> list[int]:
    encoding = Encoding((column,), "label", ("no", "yes"))
    cells = table_cells(encoding, levels)
    assert cells is not None
    return cells.transform(encoding.encode(pd.DataFrame({column.name: values})))[:, 0].astype(int).tolist()


@settings(max_examples=40)
@given(FINITE, FINITE, st.sampled_from(["linear", "log"]), st.sampled_from([8, 64, 256]), st.booleans())
def test_the_cells_of_a_number_begin_where_the_encoding_says_to_the_last_bit(
    one, other, scale, levels, missing
) -> None:
    low, high = min(one, other), max(one, other)
    if not low < high or (scale == "log" and high - low < 1e-300):
        return
    column = NumericColumn("a", low, high, scale=scale, missing=missing, missing_values=("7",))
    starts = np.array(_reading(column, levels, "SQL").starts)
    assert len(starts) == levels - 1
    values = np.concatenate([starts, np.nextafter(starts, -np.inf), [low, high, -np.inf, np.inf]])
    values = values[values != 7.0]
    assert cells_of(column, values.tolist(), levels) == np.searchsorted(starts, values, side="right").tolist()


@pytest.mark.parametrize("high", ["2000-01-09", "2023-06-30"])
def test_the_cells_of_dates_begin_where_the_encoding_says(high: str) -> None:
    column = DateColumn("a", "2000-01-01", high, format="%d.%m.%Y")
    starts = np.array(_reading(column, 64, "SQL").starts)
    days = pd.date_range("1999-12-01", "2023-08-01", freq="3D")
    expected = np.searchsorted(starts, days.strftime("%Y-%m-%d").to_numpy(str), side="right")
    assert cells_of(column, days.strftime("%d.%m.%Y").tolist(), 64) == expected.tolist()


def test_edges_codes_and_values_without_a_cell_are_read_as_declared() -> None:
    edges = _reading(NumericColumn("a", 0, 60, edges=(20, 40), missing_values=("-9", "none")), 256, "SQL")
    assert (edges.starts, edges.missing, edges.codes, edges.coarse) == ((20.0, 40.0), 3, [-9.0], 1)
    codes = CategoricalColumn("a", ("1", "1.0", "x"), style="codes", missing=False)
    reading = _reading(codes, 8, "SQL")
    assert dict(reading.words) == dict(
        zip(codes.categories, cells_of(codes, list(codes.categories), 8), strict=True)
    )
    assert [cell for _, cell in reading.numbers] == cells_of(codes, ["1.00"], 8)
    assert reading.other == cells_of(codes, ["another"], 8)[0]
    assert reading.missing == cells_of(codes, [None], 8)[0]


def test_what_a_character_folds_to_folds_to_itself() -> None:
    """So the order in which SQL replaces characters is of no importance."""
    assert all(part.casefold() == part for part in characters_by_case())

from __future__ import annotations

import json
import math
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quietmax.data import Encoding
from quietmax.data.encoding import (
    _KINDS,
    BooleanColumn,
    CategoricalColumn,
    Column,
    DateColumn,
    HashedColumn,
    Losses,
    NumericColumn,
)
from quietmax.errors import InvalidInput
from tests.data.conftest import problem_of


def encoded(column: Column, values: object) -> Any:
    return Encoding((column,), "y", ("0", "1")).encode(pd.DataFrame({column.name: values})).tolist()


AGE, AGE_MISSING = NumericColumn("age", 0, 10, missing=False), NumericColumn("age", 0, 10)
CUT = NumericColumn("age", 0, 100, edges=(30, 60), missing=False)
SEX = CategoricalColumn("sex", ("Female", "Male"))
SIZE = CategoricalColumn("size", ("S", "M", "L", "XL"), style="codes", missing=False)
GRADE = CategoricalColumn("grade", ("1", "2"), missing=False)
CODE = CategoricalColumn("code", ("1", "01", "9007199254740992", "inf"), missing=False)
EUROPEAN = NumericColumn("x", 0, 10, decimal=",", thousands=".", missing=False)
DECLARED = NumericColumn("x", 0, 10, missing_values=("-999", "unknown"))
SMOKER = BooleanColumn("smoker")
DAY = DateColumn("day", "2020-01-01", "2020-01-11", missing=False)
MOMENT = DateColumn("at", "2020-01-01 00:00:00", "2020-01-01T10:00:00Z", missing=False)
YES, NO, MISSING = [0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]
PYTHON = [True, None, False, np.bool_(True), 1, "1", Decimal("1.50"), np.float32(0.5), b"1", math.nan, pd.NA]
BECOMES: dict[str, tuple[Column, list[Any], list[list[float]]]] = {
    "scaled and clipped": (AGE, [0, 2.5, 10, -5, 1e9], [[0], [0.25], [1], [0], [1]]),
    "an edge belongs to the interval above it": (
        CUT,
        [29.9, 30, 59, 60, 1000],
        [[1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1]],
    ),
    "a missing number is marked": (AGE_MISSING, [5, None], [[0.5, 0], [0, 1]]),
    "a missing number is the lower bound": (AGE, [5, None], [[0.5], [0]]),
    "a missing number is in no interval": (
        NumericColumn("age", 0, 10, edges=(5,)),
        [1, None],
        [[1, 0, 0], [0, 0, 1]],
    ),
    "strings of numbers": (AGE, [" 5", "1e1", "2.5 ", "-3"], [[0.5], [1], [0.25], [0]]),
    "strings of infinity": (
        AGE_MISSING,
        ["5", "inf", "-Infinity", "1e999", "nan"],
        [[0.5, 0], [1, 0], [0, 0], [1, 0], [0, 1]],
    ),
    "infinity": (
        AGE_MISSING,
        [5.0, math.inf, -math.inf, 1e300, math.nan],
        [[0.5, 0], [1, 0], [0, 0], [1, 0], [0, 1]],
    ),
    "values of Python": (
        NumericColumn("x", 0, 2),
        PYTHON,
        [[0.5, 0], [0, 1], [0, 0], *[[0.5, 0]] * 3, [0.75, 0], [0.25, 0], [0.5, 0], [0, 1], [0, 1]],
    ),
    "separators are for strings": (
        EUROPEAN,
        [2.5, Decimal("2.5"), 2, "2,5", b"2,5", True],
        [[0.25], [0.25], [np.float32(0.2)], [0.25], [0.25], [np.float32(0.1)]],
    ),
    "declared missing strings": (DECLARED, ["5", "-999.0", "unknown"], [[0.5, 0], [0, 1], [0, 1]]),
    "declared missing numbers": (DECLARED, [5, -999, math.nan], [[0.5, 0], [0, 1], [0, 1]]),
    "categories": (SEX, ["Male", " Female ", "Martian", None], [YES, NO, [0, 0, 0], MISSING]),
    "codes": (SIZE, ["S", "M", "L", "XL", "?", "XXL"], [[0.25], [0.5], [0.75], [1], [0], [0]]),
    "a marker may be a category": (
        CategoricalColumn("c", ("NA", "DE")),
        ["NA", "DE", ""],
        [NO, YES, MISSING],
    ),
    "integers are categories": (GRADE, [1, 2], [[1, 0], [0, 1]]),
    "floats are categories": (GRADE, [1.0, 2.0], [[1, 0], [0, 1]]),
    "booleans are categories": (
        CategoricalColumn("ill", ("True", "False"), missing=False),
        [True, False],
        [[1, 0], [0, 1]],
    ),
    "codes are the same only as strings": (
        CODE,
        ["01", "1", "001", "+1", "1_0", "9007199254740993", "infinity", "nan", "\u0661", "1e9999"],
        [[0, 1, 0, 0], [1, 0, 0, 0], *[[0, 0, 0, 0]] * 8],
    ),
    "declared missing categories": (
        CategoricalColumn("c", ("a",), missing_values=("none",)),
        ["a", "none", "other"],
        [[1, 0], [0, 1], [0, 0]],
    ),
    "yes and no": (
        SMOKER,
        ["Yes", "y", "TRUE", "t", "1", "1.0", "no", "N", "False", "f", "0", "", "?", None],
        [YES] * 6 + [NO] * 5 + [MISSING] * 3,
    ),
    "true and false": (SMOKER, [True, False], [YES, NO]),
    "ones and zeros": (SMOKER, [1.0, 0.0, math.nan], [YES, NO, MISSING]),
    "a missing answer": (BooleanColumn("smoker", missing=False), ["y", ""], [[0, 1], [0, 0]]),
    "days": (
        DAY,
        ["2020-01-06", "2020-01-06 23:59:59", "2019-01-01", "2021-01-01", "2020-01-06T23:30:00-05:00", ""],
        [[0.5], [0.5], [0], [1], [0.5], [0]],
    ),
    "moments in UTC": (
        MOMENT,
        ["2020-01-01 05:00", "2020-01-01T07:00:00+02:00", "2020-01-01 02:30:00.000", "2020-01-01"],
        [[0.5], [0.5], [0.25], [0]],
    ),
}


@pytest.mark.parametrize(("column", "cells", "features"), BECOMES.values(), ids=BECOMES)
def test_a_cell_becomes_its_features_whatever_else_the_column_holds(
    column: Column, cells: list[Any], features: list[list[float]]
) -> None:
    assert encoded(column, cells) == features
    typeless = pd.Series(cells, dtype=object)
    assert encoded(column, typeless) == features
    for place, row in enumerate(features):
        assert encoded(column, typeless.iloc[[place]]) == [row]


@pytest.mark.parametrize(
    ("column", "cells", "said"),
    [
        (
            AGE_MISSING,
            ["elderly", "1,000", "1_000", "0x1A", "1e", "--5", "\u0661", "True", " . "],
            "no number in the numeric column 'age'; a missing value is an empty cell",
        ),
        (SMOKER, ["maybe", "2", "yes!", "ja"], "neither yes nor no in the boolean column 'smoker'"),
        (
            DAY,
            ["31.01.2020", "2020-02-30", "2020-1-1", "20200101", "January"],
            "no date in the column 'day', which is declared as dates such as 2024-01-31",
        ),
    ],
)
def test_a_cell_that_cannot_be_read_is_an_error_that_does_not_show_it(
    column: Column, cells: list[str], said: str
) -> None:
    for cell in cells:
        message = problem_of(InvalidInput, encoded, column, ["", cell])
        assert message == f"Row 2 has {said}."


NO_DATES: list[dict[str, Any]] = [
    {"low": "2020-01-02"},
    {"low": "01.01.2020"},
    {"low": "2019-12-31 00:00:00"},
    {"low": 2019},
    {"format": "day"},
    {"format": "%x"},
    {"format": "%d.%m.%"},
]


@pytest.mark.parametrize(
    ("kind", "values", "wrong", "said"),
    [
        *(
            (NumericColumn, (), {"low": low, "high": high}, "bounds of column 'x'")
            for low, high in [(1, 1), (2, 1), (0, math.inf), (math.nan, 1), (-1e308, 1e308)]
        ),
        *(
            (NumericColumn, (0, 10), {"edges": edges}, "edges of column 'x'")
            for edges in [(0,), (11,), (5, 5), (6, 5)]
        ),
        (NumericColumn, (0, 10), {"scale": "cubic"}, "'cubic'"),
        *((NumericColumn, (0, 1), {"unit": unit}, "unit of column 'x'") for unit in [" €", "1", "-", "a.b"]),
        *(
            (NumericColumn, (0, 1), separators, "separators of column 'x'")
            for separators in [{"decimal": ";"}, {"thousands": "-"}, {"decimal": ",", "thousands": ","}]
        ),
        *(
            (CategoricalColumn, (categories,), {}, "categories of column 'x'")
            for categories in [(), ("a", "a"), (1.0, 2.0)]
        ),
        (CategoricalColumn, (("f",),), {"style": "hash"}, "'hash'"),
        (
            CategoricalColumn,
            (("a", "none"),),
            {"missing_values": ("none",)},
            "'none' is both a category and a missing value",
        ),
        *(
            (DateColumn, (), {"low": "2020-01-01", "high": "2020-01-02", **wrong}, "column 'x'")
            for wrong in NO_DATES
        ),
        *(
            (HashedColumn, (buckets,), {}, "buckets of column 'x'")
            for buckets in [1, 0, 2**17, 2.5, True, "64"]
        ),
    ],
)
def test_a_declaration_that_is_not_valid_is_rejected(
    kind: Any, values: tuple[Any, ...], wrong: dict[str, Any], said: str
) -> None:
    assert said in problem_of(InvalidInput, kind, "x", *values, **wrong)


def test_logarithmic_scale_is_the_logarithm_of_the_distance_from_the_lower_bound() -> None:
    column = NumericColumn("gain", 10, 109, scale="log", missing=False)
    expected = [[0.0], [math.log(10) / math.log(100)], [1.0]]
    np.testing.assert_allclose(encoded(column, [10, 19, 109]), expected, rtol=1e-6)


@pytest.mark.parametrize("marker", ["", " ", "?", "NA", "N/A", "null", "NULL", "nan", "NaN"])
def test_every_marker_of_a_missing_value_is_one_in_numbers_and_categories(marker: str) -> None:
    assert encoded(NumericColumn("age", 0, 10), ["5", marker]) == [[0.5, 0], [0, 1]]
    assert encoded(CategoricalColumn("sex", ("f", "m")), ["m", marker]) == [[0, 1, 0], [0, 0, 1]]


def test_minus_zero_has_the_bits_of_zero() -> None:
    for scale in ("linear", "log"):
        column = NumericColumn("x", 0, 10, scale=scale, missing=False)
        for values in ([-0.0, 5.0], ["-0.0", "5"], ["-1e-400", "5"]):
            assert not np.signbit(encoded(column, values)).any()
            assert encoded(column, values)[0] == [0]


@pytest.mark.parametrize("categories", [("1", "2.5"), ("1.0", "2.50"), ("1.", "25e-1"), ("1", "2.5", "1.0")])
def test_numbers_and_their_texts_are_the_same_category(categories: tuple[str, ...]) -> None:
    column = CategoricalColumn("dose", categories, style="codes", missing=False)
    first, second = [1 / len(categories)], [2 / len(categories)]
    for one in (1, 1.0, "1.00", "1", " 1e0 "):
        assert encoded(column, [one]) == [pytest.approx(first)], one
    for two in (2.5, "2.5", "2.500", "0.25e1"):
        assert encoded(column, [two]) == [pytest.approx(second)], two


@given(
    values=st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.none(), min_size=1),
    low=st.floats(-1e6, 1e6),
    width=st.floats(1e-3, 1e6),
    scale=st.sampled_from(["linear", "log"]),
)
def test_a_numeric_feature_always_lies_between_zero_and_one(
    values: list[float | None], low: float, width: float, scale: str
) -> None:
    column = NumericColumn("x", low, low + width, scale=scale)  # type: ignore[arg-type]
    features = np.array(encoded(column, pd.Series(values, dtype=object)))
    assert ((features >= 0) & (features <= 1)).all()


ENCODING = Encoding(
    (
        NumericColumn("age", 0, 100, missing=False),
        CategoricalColumn("sex", ("f", "m")),
        NumericColumn("gain", 0, 1_000, scale="log", edges=(10, 100)),
    ),
    label="ill",
    classes=("no", "yes"),
    inferred=("the classes of label 'ill'",),
)
TABLE = pd.DataFrame(
    {"ill": ["yes", "no"], "gain": ["", "50"], "sex": ["f", "x"], "extra": [1, 2], "age": [50, 25]}
)


def test_features_follow_the_order_of_the_encoding_not_of_the_table() -> None:
    features, labels = ENCODING.encode(TABLE), ENCODING.encode_labels(TABLE)
    assert features.tolist() == [[0.5, 1, 0, 0, 0, 0, 0, 1], [0.25, 0, 0, 0, 0, 1, 0, 0]]
    assert labels.tolist() == [1, 0]
    assert features.dtype == np.float32
    assert labels.dtype == np.int64
    assert len(ENCODING.feature_names) == features.shape[1]


@pytest.mark.parametrize(("column", "label"), [("0", 1), (" age ", "y ")])
def test_names_of_columns_are_strings_without_outer_blanks(column: str, label: Any) -> None:
    encoding = Encoding(
        (NumericColumn(column.strip(), 0, 100, missing=False),), str(label).strip(), ("no", "yes")
    )
    table = pd.DataFrame({int(column) if column == "0" else column: [25, 50], label: ["no", "yes"]})
    assert encoding.encode(table.iloc[:, :1]).tolist() == [[0.25], [0.5]]
    assert encoding.encode_labels(table).tolist() == [0, 1]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": "other"}',
        json.dumps({**json.loads(ENCODING.to_json()), "format": "quietmax encoding 4"}),
        json.dumps({**json.loads(ENCODING.to_json()), "columns": [{"type": "magic"}]}),
        json.dumps({**json.loads(ENCODING.to_json()), "columns": [{"type": "numeric", "name": "age"}]}),
        ENCODING.to_json()[:-20],
    ],
)
def test_json_of_something_else_is_rejected(text: str) -> None:
    assert "not the JSON of an encoding" in problem_of(InvalidInput, Encoding.from_json, text)


def test_json_of_version_0_1_names_the_versions_that_read_it() -> None:
    old = ENCODING.to_json().replace("quietmax encoding 3", "quietmax encoding 1")
    assert "only versions 0.1 and 0.2" in problem_of(InvalidInput, Encoding.from_json, old)


def test_a_table_without_a_needed_column_is_rejected_and_its_columns_listed() -> None:
    message = problem_of(InvalidInput, ENCODING.encode, TABLE.drop(columns="sex"))
    assert "no column 'sex'" in message
    assert "'ill', 'gain', 'extra', 'age'" in message


def test_a_table_with_two_columns_of_one_name_is_rejected() -> None:
    table = pd.concat([TABLE, TABLE[["sex"]]], axis=1)
    assert "several columns named 'sex'" in problem_of(InvalidInput, ENCODING.encode, table)


@pytest.mark.parametrize(
    ("label", "kind", "advice"),
    [
        ("maybe", "outside the classes", "Declare the class too, or delete such rows."),
        ("", "no label", "'yes'. Delete such rows."),
    ],
)
def test_a_label_that_is_no_class_is_rejected_without_showing_it(label: str, kind: str, advice: str) -> None:
    table = TABLE.assign(ill=["yes", label])
    message = problem_of(InvalidInput, ENCODING.encode_labels, table)
    assert "Row 2" in message
    assert kind in message
    assert "'no', 'yes'" in message
    assert message.endswith(advice)
    assert "maybe" not in message


def test_an_encoding_needs_two_classes_and_different_columns() -> None:
    age = NumericColumn("age", 0, 1)
    assert "two classes" in problem_of(InvalidInput, Encoding, (age,), "ill", ("yes",))
    assert "two classes" in problem_of(InvalidInput, Encoding, (age,), "ill", ("yes", "yes"))
    cases: list[tuple[tuple[Column, ...], str]] = [((), "ill"), ((age, age), "ill"), ((age,), "age")]
    for columns, label in cases:
        assert "different" in problem_of(InvalidInput, Encoding, columns, label, ("a", "b"))


POINT = {"decimal": ",", "thousands": "."}
DOLLARS = {"thousands": ",", "unit": "$"}


@pytest.mark.parametrize(
    ("written_as", "numbers"),
    [
        ({"decimal": ","}, {"1,5": 1.5, "-,5": -0.5, "1.5": None}),
        (
            POINT,
            {"1.234.567,89": 1234567.89, "1234,5": 1234.5, "1,5e3": 1500.0, "-Infinity": -math.inf}
            # "1.5" would be 15 if separators were just dropped
            | dict.fromkeys(("1.5", "12.34,5", "1.2345", "1,234,5", ",", "€5")),
        ),
        ({"thousands": ","}, {"12,345": 12345.0, "1,23": None, ",123": None}),
        ({"thousands": " "}, {"1\u202f234 567.5": 1234567.5}),
        ({"thousands": "'"}, {"1\u2019234'567": 1234567.0}),
        ({}, {"1,234": None}),
        (DOLLARS, {"$1,234.50": 1234.5, "-$ 5": -5.0, "7": 7.0, "$NA": math.nan}),
        (DOLLARS, dict.fromkeys(("$", "$$5", "5$5"))),
        ({"unit": "%"}, {"12 %": 12.0}),
        ({"unit": "kg"}, {"75kg": 75.0, "-kg75": -75.0, "75 lb": None}),
    ],
)
def test_numbers_are_read_with_the_declared_separators_and_unit_or_are_an_error(
    written_as: dict[str, Any], numbers: dict[str, float | None]
) -> None:
    column = NumericColumn("x", 0, 1, **written_as)
    for written, number in numbers.items():
        np.testing.assert_equal(column.parse(written), number)
        if number is None:
            message = problem_of(InvalidInput, encoded, column, ["1", written])
            assert (
                message == "Row 2 has no number in the numeric column 'x'; a missing value is an empty cell."
            )


@pytest.mark.parametrize(
    "dtype", ["datetime64[ns]", "datetime64[s]", "date32[day][pyarrow]", "timestamp[us][pyarrow]"]
)
def test_dates_of_every_type_are_the_same_dates(dtype: str) -> None:
    column = DateColumn("day", "2020-01-01", "2020-01-11", format="%d.%m.%Y")
    written = ["06.01.2020", "1.1.2020", ""]
    typed = pd.Series(["2020-01-06", "2020-01-01", None]).astype("datetime64[s]").astype(dtype)
    assert encoded(column, written) == encoded(column, typed) == [[0.5, 0], [0, 0], [0, 1]]
    for strings in (object, "category", "string[python]", "large_string[pyarrow]"):
        assert encoded(column, pd.Series(written).astype(strings)) == [[0.5, 0], [0, 0], [0, 1]]


def test_hashed_strings_are_spread_evenly() -> None:
    # 20,000 strings in 8 buckets: each Binomial(20000, 1/8); 6 standard deviations: false alarm below 2e-8.
    rows = np.array(encoded(HashedColumn("zip", 8, missing=False), [f"{row:05}" for row in range(20_000)]))
    assert np.abs(rows.sum(axis=0) - 2_500).max() < 6 * math.sqrt(20_000 / 8 * 7 / 8)


def test_case_is_ignored_only_where_it_is_declared() -> None:
    region = CategoricalColumn("r", ("north",), missing=False)
    cells = ["North", "NORTH", "south"]
    assert encoded(region, cells) == [[0], [0], [0]]
    assert encoded(replace(region, ignore_case=True), cells) == [[1], [1], [0]]
    with pytest.raises(InvalidInput, match="more than case"):
        replace(region, categories=("north", "North"), ignore_case=True)
    same, other = encoded(HashedColumn("r", 64, ignore_case=True), ["Süd", "SÜD"])
    assert same == other
    assert encoded(HashedColumn("r", 64), ["Süd"]) != encoded(HashedColumn("r", 64), ["SÜD"])
    labels = Encoding((BooleanColumn("b"),), "y", ("No", "Yes"))
    folded, answers = replace(labels, label_ignores_case=True), pd.DataFrame({"y": ["no", "YES", "Yes"]})
    assert folded.encode_labels(answers).tolist() == [0, 1, 1]
    with pytest.raises(InvalidInput, match="outside the classes"):
        labels.encode_labels(answers)


def test_hashed_strings_fall_into_public_buckets() -> None:
    column = HashedColumn("zip", 4)
    assert column.feature_names == ("zip#0", "zip#1", "zip#2", "zip#3", "zip missing")
    rows = np.array(encoded(column, ["01234", " 01234 ", "1234", None, "NA"]))
    assert rows.sum(axis=1).tolist() == [1] * 5
    assert rows[0].tolist() == rows[1].tolist()
    assert rows[3].tolist() == rows[4].tolist() == [0, 0, 0, 0, 1]
    # BLAKE2b with 8 bytes, little-endian, modulo 4: fixed for ever, as models depend on it.
    assert np.array(encoded(HashedColumn("zip", 4, missing=False), ["a", "b", "é"])).argmax(
        axis=1
    ).tolist() == [0, 0, 3]


EVERY_TYPE = Encoding(
    (
        NumericColumn(
            "income", 0, 1e6, "log", missing_values=("-999",), decimal=",", thousands=".", unit="€"
        ),
        NumericColumn("age", 0, 100, edges=(18, 65), missing=False),
        CategoricalColumn("region", ("north", "süd"), ignore_case=True),
        BooleanColumn("smoker", missing_values=("unknown",)),
        DateColumn("joined", "2010-01-01", "2020-12-31", "%d.%m.%Y"),
        HashedColumn("zip", 16, ignore_case=True),
    ),
    "y",
    ("no", "yes"),
    ("what column 'age' holds",),
    (("region", "smoker"),),
    label_ignores_case=True,
    person="customer",
)


def test_every_column_type_is_read_back_from_json() -> None:
    assert {column.kind for column in EVERY_TYPE.columns} == _KINDS.keys() - {"text"}
    assert Encoding.from_json(EVERY_TYPE.to_json()) == EVERY_TYPE


@pytest.mark.parametrize(
    "crosses",
    [
        (("region", "region"),),
        (("region", "nobody"),),
        (("region", "smoker"), ("smoker", "region")),
        (("region", "y"),),
    ],
)
def test_crosses_must_be_different_pairs_of_columns(crosses: tuple[tuple[str, str], ...]) -> None:
    message = problem_of(InvalidInput, replace, EVERY_TYPE, crosses=crosses)
    assert "different pairs of two columns" in message


@pytest.mark.parametrize(
    ("column", "cells", "losses"),
    [
        (NumericColumn("x", 0, 9), ["1", "10", "-1", "", "x"], Losses(1, 2, 0, 1)),
        (NumericColumn("x", 0, 9), ["0", "9"], Losses(0, 0, 0, 0)),
        (NumericColumn("x", 0, 9, missing_values=("x",)), ["1", "inf", "x"], Losses(1, 1, 0, 0)),
        (CategoricalColumn("x", ("a",)), ["a", "b", "?"], Losses(1, 0, 1, 0)),
        (BooleanColumn("x"), ["y", "b", "?"], Losses(1, 0, 0, 1)),
        (DateColumn("x", "2020-01-01", "2020-01-02"), ["2020-01-03", "b", "?"], Losses(1, 1, 0, 1)),
        (HashedColumn("x", 2), ["a", "b", "?"], Losses(1, 0, 0, 0)),
    ],
)
def test_losses_count_what_is_not_taken_as_it_is(column: Column, cells: list[str], losses: Losses) -> None:
    assert column._losses(pd.Series(cells)) == losses


@pytest.mark.parametrize("column", EVERY_TYPE.columns, ids=lambda column: column.name)
def test_synthetic_cells_can_be_read_and_some_lie_outside_the_limits(column: Column) -> None:
    cells = column._synthetic(300, np.random.default_rng(0))
    losses = column._losses(pd.Series(cells))
    outside = losses.clipped + losses.unknown
    assert (len(cells), losses.missing, losses.unreadable) == (300, 0, 0)
    assert 0 < outside < 150 if column.kind in ("numeric", "categorical", "date") else outside == 0
    assert len(set(cells)) > 2


def test_a_long_table_of_numbers_is_encoded_like_its_rows() -> None:
    generator = np.random.default_rng(0)
    a = NumericColumn("a", -1, 1)
    encoding = Encoding(
        (a, replace(a, name="b", missing=False), replace(a, name="c", edges=(0.5,))), "y", ("0", "1")
    )
    numbers = generator.normal(size=(9000, 3))
    table = pd.DataFrame(
        {
            "a": np.where(generator.random(9000) < 0.1, math.nan, numbers[:, 0]),
            "b": numbers[:, 1].round().astype(int),
            "c": numbers[:, 2].astype(np.float32),
        }
    )
    features = encoding.encode(table)
    for rows in (slice(0, 1), slice(4095, 4097), slice(8191, 8193), slice(8999, 9000)):
        strings = table[rows].astype(str).replace("nan", "")
        assert encoding.encode(strings).tolist() == features[rows].tolist()

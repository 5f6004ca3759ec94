from __future__ import annotations

import json
import math
from dataclasses import replace
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quietmax.data import (
    BooleanColumn,
    CategoricalColumn,
    DateColumn,
    Encoding,
    HashedColumn,
    NumericColumn,
)
from quietmax.data.encoding import Column, Losses
from quietmax.errors import InvalidInput
from tests.data.conftest import ErrorMessage


def encoded(column: Column, values: object) -> Any:
    series = values if isinstance(values, pd.Series) else pd.Series(values)
    features = np.zeros((len(series), len(column.feature_names)), dtype=np.float32)
    column.encode(series, features)
    return features.tolist()


def test_numbers_are_scaled_by_the_public_bounds_and_clipped_to_them() -> None:
    column = NumericColumn("age", 20, 60, missing=False)
    assert encoded(column, [20, 30, 60, -5, 1e9]) == [[0], [0.25], [1], [0], [1]]


def test_logarithmic_scale_is_the_logarithm_of_the_distance_from_the_lower_bound() -> None:
    column = NumericColumn("gain", 10, 109, scale="log", missing=False)
    expected = [[0.0], [math.log(10) / math.log(100)], [1.0]]
    np.testing.assert_allclose(encoded(column, [10, 19, 109]), expected, rtol=1e-6)


def test_an_edge_belongs_to_the_interval_above_it() -> None:
    column = NumericColumn("age", 0, 100, edges=(30, 60), missing=False)
    assert column.feature_names == ("age>=0", "age>=30", "age>=60")
    assert encoded(column, [29.9, 30, 59, 60, 1000]) == [
        [1, 0, 0],
        [0, 1, 0],
        [0, 1, 0],
        [0, 0, 1],
        [0, 0, 1],
    ]


def test_a_missing_number_becomes_the_lower_bound_and_is_marked() -> None:
    assert encoded(NumericColumn("age", 0, 10), [5, None]) == [[0.5, 0], [0, 1]]
    assert encoded(NumericColumn("age", 0, 10, missing=False), [5, None]) == [[0.5], [0]]
    assert encoded(NumericColumn("age", 0, 10, edges=(5,)), [1, None]) == [[1, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize("marker", ["", " ", "?", "NA", "N/A", "null", "NULL", "nan", "NaN"])
def test_every_marker_of_a_missing_value_is_one_in_numbers_and_categories(marker: str) -> None:
    assert encoded(NumericColumn("age", 0, 10), ["5", marker]) == [[0.5, 0], [0, 1]]
    assert encoded(CategoricalColumn("sex", ("f", "m")), ["m", marker]) == [[0, 1, 0], [0, 0, 1]]


def test_a_marker_that_is_declared_as_a_category_is_that_category() -> None:
    assert encoded(CategoricalColumn("country", ("NA", "DE")), ["NA", "DE", ""]) == [
        [1, 0, 0],
        [0, 1, 0],
        [0, 0, 1],
    ]


def test_numbers_written_as_text_are_numbers() -> None:
    column = NumericColumn("age", 0, 10, missing=False)
    assert encoded(column, [" 5", "1e1", "2.5 ", "-3"]) == [[0.5], [1], [0.25], [0]]


@pytest.mark.parametrize("odd", ["elderly", "1,000", "1_000", "0x1A", "1e", "--5", "\u0661", "True", "."])
def test_what_is_no_number_is_an_error_without_showing_it(odd: str, error_message: ErrorMessage) -> None:
    message = error_message(lambda: encoded(NumericColumn("age", 0, 10), ["5", odd]), InvalidInput)
    assert "'age'" in message
    assert "Row 2" in message
    assert odd == "." or odd not in message


@pytest.mark.parametrize(
    ("values", "features"),
    [
        (["5", "inf", "-Infinity", "1e999", "nan"], [[0.5, 0], [1, 0], [0, 0], [1, 0], [0, 1]]),
        ([5.0, math.inf, -math.inf, 1e300, math.nan], [[0.5, 0], [1, 0], [0, 0], [1, 0], [0, 1]]),
    ],
)
def test_infinity_is_clipped_and_nan_is_missing_as_text_and_as_number(
    values: list[object], features: list[list[float]]
) -> None:
    assert encoded(NumericColumn("age", 0, 10), values) == features


def test_minus_zero_has_the_bits_of_zero() -> None:
    for scale in ("linear", "log"):
        column = NumericColumn("x", 0, 10, scale=scale, missing=False)
        for values in ([-0.0, 5.0], ["-0.0", "5"], ["-1e-400", "5"]):
            assert not np.signbit(encoded(column, values)).any()
            assert encoded(column, values)[0] == [0]


def test_python_values_are_read_one_by_one_whatever_else_the_column_holds() -> None:
    numeric = NumericColumn("x", 0, 2)
    cells = [
        True,
        None,
        False,
        np.bool_(True),
        1,
        "1",
        Decimal("1.50"),
        np.float32(0.5),
        b"1",
        math.nan,
        pd.NA,
    ]
    expected = [
        [0.5, 0],
        [0, 1],
        [0, 0],
        [0.5, 0],
        [0.5, 0],
        [0.5, 0],
        [0.75, 0],
        [0.25, 0],
        [0.5, 0],
        [0, 1],
        [0, 1],
    ]
    assert encoded(numeric, pd.Series(cells, dtype=object)) == expected
    for cell, row in zip(cells, expected, strict=True):
        assert encoded(numeric, pd.Series([cell], dtype=object)) == [row]


def test_categories_become_one_feature_each_and_unknown_ones_all_zeros() -> None:
    column = CategoricalColumn("sex", ("Female", "Male"))
    assert column.feature_names == ("sex=Female", "sex=Male", "sex missing")
    assert encoded(column, ["Male", " Female ", "Martian", None]) == [
        [0, 1, 0],
        [1, 0, 0],
        [0, 0, 0],
        [0, 0, 1],
    ]


def test_codes_are_evenly_spaced_and_zero_is_left_for_unknown_and_missing() -> None:
    column = CategoricalColumn("size", ("S", "M", "L", "XL"), style="codes", missing=False)
    assert encoded(column, ["S", "M", "L", "XL", "?", "XXL"]) == [[0.25], [0.5], [0.75], [1], [0], [0]]


def test_whole_numbers_match_categories_whatever_their_type() -> None:
    column = CategoricalColumn("grade", ("1", "2"), missing=False)
    for values in ([1, 2], [1.0, 2.0], ["1", "2"]):
        assert encoded(column, values) == [[1, 0], [0, 1]]
    assert encoded(column, pd.Series(["1", None, "2"], dtype="category")) == [[1, 0], [0, 0], [0, 1]]
    assert encoded(CategoricalColumn("ill", ("True", "False"), missing=False), [True, False]) == [
        [1, 0],
        [0, 1],
    ]


@pytest.mark.parametrize("categories", [("1", "2.5"), ("1.0", "2.50"), ("1.", "25e-1"), ("1", "2.5", "1.0")])
def test_numbers_and_their_texts_are_the_same_category(categories: tuple[str, ...]) -> None:
    column = CategoricalColumn("dose", categories, style="codes", missing=False)
    first, second = [1 / len(categories)], [2 / len(categories)]
    for one in (1, 1.0, "1.00", "1", " 1e0 "):
        assert encoded(column, [one]) == [pytest.approx(first)], one
    for two in (2.5, "2.5", "2.500", "0.25e1"):
        assert encoded(column, [two]) == [pytest.approx(second)], two


def test_codes_and_words_are_the_same_only_as_strings() -> None:
    column = CategoricalColumn("code", ("1", "01", "9007199254740992", "inf"), missing=False)
    for other in ("001", "+1", "1_0", "9007199254740993", "infinity", "nan", "\u0661", "1e9999"):
        assert encoded(column, [other]) == [[0, 0, 0, 0]], other
    assert encoded(column, ["01", "1"]) == [[0, 1, 0, 0], [1, 0, 0, 0]]


def test_categories_that_are_no_strings_are_rejected(error_message: ErrorMessage) -> None:
    assert "different" in error_message(lambda: CategoricalColumn("dose", (1.0, 2.0)), InvalidInput)  # type: ignore[arg-type]


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


@given(values=st.lists(st.floats(0, 10) | st.none(), min_size=2), changed=st.integers(0, 100))
def test_the_features_of_a_record_depend_on_no_other_record(values: list[float | None], changed: int) -> None:
    column, row = NumericColumn("x", 2, 8, edges=(3, 5)), changed % len(values)
    others = [value for index, value in enumerate(values) if index != row]
    before, after = (
        encoded(column, pd.Series(values, dtype=object)),
        encoded(column, pd.Series(others, dtype=object)),
    )
    assert before[:row] + before[row + 1 :] == after


@pytest.mark.parametrize("bounds", [(1, 1), (2, 1), (0, math.inf), (math.nan, 1), (-1e308, 1e308)])
def test_bounds_that_bound_nothing_are_rejected(
    bounds: tuple[float, float], error_message: ErrorMessage
) -> None:
    assert "bounds of column 'age'" in error_message(lambda: NumericColumn("age", *bounds), InvalidInput)


@pytest.mark.parametrize("edges", [(0,), (11,), (5, 5), (6, 5)])
def test_edges_that_do_not_rise_between_the_bounds_are_rejected(
    edges: tuple[float, ...], error_message: ErrorMessage
) -> None:
    assert "edges of column 'age'" in error_message(
        lambda: NumericColumn("age", 0, 10, edges=edges), InvalidInput
    )


def test_an_unknown_scale_or_style_is_rejected(error_message: ErrorMessage) -> None:
    assert "'cubic'" in error_message(lambda: NumericColumn("age", 0, 1, scale="cubic"), InvalidInput)  # type: ignore[arg-type]
    assert "'hash'" in error_message(lambda: CategoricalColumn("sex", ("f",), style="hash"), InvalidInput)  # type: ignore[arg-type]


@pytest.mark.parametrize("categories", [(), ("a", "a")])
def test_categories_must_be_different_and_at_least_one(
    categories: tuple[str, ...], error_message: ErrorMessage
) -> None:
    assert "categories of column 'sex'" in error_message(
        lambda: CategoricalColumn("sex", categories), InvalidInput
    )


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
    features, labels = ENCODING.encode(TABLE, "ill")
    assert features.tolist() == [[0.5, 1, 0, 0, 0, 0, 0, 1], [0.25, 0, 0, 0, 0, 1, 0, 0]]
    assert labels.tolist() == [1, 0]
    assert features.dtype == np.float32
    assert labels.dtype == np.int64
    assert len(ENCODING.feature_names) == features.shape[1]


def test_a_table_to_predict_needs_no_label_column() -> None:
    features = ENCODING.encode(TABLE.drop(columns="ill"))
    np.testing.assert_array_equal(features, ENCODING.encode(TABLE, "ill")[0])


def test_the_label_column_may_have_another_name_in_another_table() -> None:
    assert ENCODING.encode_labels(TABLE.rename(columns={"ill": "truth"}), "truth").tolist() == [1, 0]


def test_column_names_that_are_numbers_match_their_text() -> None:
    encoding = Encoding((NumericColumn("0", 0, 2, missing=False),), "1", ("0", "1"))
    features, labels = encoding.encode(pd.DataFrame([[1, 1], [2, 0]]), "1")
    assert features.tolist() == [[0.5], [1]]
    assert labels.tolist() == [1, 0]


def test_an_encoding_survives_json() -> None:
    again = Encoding.from_json(ENCODING.to_json())
    assert again == ENCODING
    assert again.inferred
    np.testing.assert_array_equal(again.encode(TABLE), ENCODING.encode(TABLE))


OLD_COLUMNS = """[
    {"type": "numeric", "name": "age", "low": 0, "high": 100, "scale": "linear", "edges": [18.0], "missing": true},
    {"type": "categorical", "name": "sex", "categories": ["f", "m"], "style": "codes", "missing": false}
]"""


@pytest.mark.parametrize(("age", "key"), [(1, "measurements"), (2, "inferred")])
def test_the_json_of_earlier_versions_is_read(age: int, key: str) -> None:
    old = (
        f'{{"format": "quietmax encoding {age}", "columns": {OLD_COLUMNS}, "label": "ill", "classes": ["no", "yes"], '
        f'"{key}": ["the classes of label \'ill\'"]}}'
    )
    assert Encoding.from_json(old) == Encoding(
        (
            NumericColumn("age", 0, 100, edges=(18.0,)),
            CategoricalColumn("sex", ("f", "m"), style="codes", missing=False),
        ),
        "ill",
        ("no", "yes"),
        ("the classes of label 'ill'",),
    )


names = st.text(min_size=1, max_size=8)


@given(
    columns=st.dictionaries(
        names,
        st.tuples(st.floats(-1e9, 0), st.floats(1, 1e9)) | st.sets(names, min_size=1),
        min_size=2,
        max_size=5,
    ),
    classes=st.lists(names, min_size=2, unique=True),
)
def test_any_encoding_survives_json(columns: dict[str, object], classes: list[str]) -> None:
    label, *rest = columns
    described = tuple(
        NumericColumn(name, *columns[name])  # type: ignore[misc]
        if isinstance(columns[name], tuple)
        else CategoricalColumn(name, tuple(columns[name]))  # type: ignore[arg-type]
        for name in rest
    )
    encoding = Encoding(described, label, tuple(classes))
    assert Encoding.from_json(encoding.to_json()) == encoding
    assert not encoding.inferred


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
def test_json_of_something_else_is_rejected(text: str, error_message: ErrorMessage) -> None:
    assert "not the JSON of an encoding" in error_message(lambda: Encoding.from_json(text), InvalidInput)


def test_a_table_without_a_needed_column_is_rejected_and_its_columns_listed(
    error_message: ErrorMessage,
) -> None:
    message = error_message(lambda: ENCODING.encode(TABLE.drop(columns="sex")), InvalidInput)
    assert "no column 'sex'" in message
    assert "'ill', 'gain', 'extra', 'age'" in message


def test_a_table_with_two_columns_of_one_name_is_rejected(error_message: ErrorMessage) -> None:
    table = pd.concat([TABLE, TABLE[["sex"]]], axis=1)
    assert "several columns named 'sex'" in error_message(lambda: ENCODING.encode(table), InvalidInput)


@pytest.mark.parametrize(
    ("label", "kind", "advice"),
    [
        ("maybe", "outside the classes", "Declare the class too, or delete such rows."),
        ("", "no label", "'yes'. Delete such rows."),
    ],
)
def test_a_label_that_is_no_class_is_rejected_without_showing_it(
    label: str, kind: str, advice: str, error_message: ErrorMessage
) -> None:
    table = TABLE.assign(ill=["yes", label])
    message = error_message(lambda: ENCODING.encode(table, "ill"), InvalidInput)
    assert "Row 2" in message
    assert kind in message
    assert "'no', 'yes'" in message
    assert message.endswith(advice)
    assert "maybe" not in message


def test_an_encoding_needs_two_classes_and_different_columns(error_message: ErrorMessage) -> None:
    age = NumericColumn("age", 0, 1)
    assert "two classes" in error_message(lambda: Encoding((age,), "ill", ("yes",)), InvalidInput)
    assert "two classes" in error_message(lambda: Encoding((age,), "ill", ("yes", "yes")), InvalidInput)
    cases: list[tuple[tuple[Column, ...], str]] = [((), "ill"), ((age, age), "ill"), ((age,), "age")]
    for columns, label in cases:
        assert "different" in error_message(partial(Encoding, columns, label, ("a", "b")), InvalidInput)


@pytest.mark.parametrize(
    ("separators", "written", "number"),
    [
        ((",", ""), "1,5", 1.5),
        ((",", ""), "-,5", -0.5),
        ((",", "."), "1.234.567,89", 1234567.89),
        ((",", "."), "1234,5", 1234.5),
        ((",", "."), "1,5e3", 1500.0),
        ((".", ","), "12,345", 12345.0),
        ((".", " "), "1\u202f234 567.5", 1234567.5),
        ((".", "'"), "1\u2019234'567", 1234567.0),
        ((",", "."), "-Infinity", -math.inf),
    ],
)
def test_numbers_are_read_with_the_declared_separators(
    separators: tuple[str, str], written: str, number: float
) -> None:
    column = NumericColumn("x", 0, 1, decimal=separators[0], thousands=separators[1])
    assert column.parse(written) == number


@pytest.mark.parametrize(
    ("separators", "written"),
    [
        ((",", "."), "1.5"),  # would be 15 if separators were just dropped
        ((",", "."), "12.34,5"),
        ((",", "."), "1.2345"),
        ((",", "."), "1,234,5"),
        ((",", ""), "1.5"),
        ((".", ","), "1,23"),
        ((".", ","), ",123"),
        ((".", ""), "1,234"),
        ((",", "."), ","),
        ((",", "."), "€5"),
    ],
)
def test_a_number_with_other_separators_is_an_error_and_never_another_number(
    separators: tuple[str, str], written: str, error_message: ErrorMessage
) -> None:
    column = NumericColumn("x", 0, 1, decimal=separators[0], thousands=separators[1])
    assert column.parse(written) is None
    message = error_message(lambda: encoded(column, ["1", written]), InvalidInput)
    assert "Row 2 has no number in the numeric column 'x'" in message
    assert written not in message


@pytest.mark.parametrize(
    ("unit", "written", "number"),
    [
        ("$", "$1,234.50", 1234.5),
        ("$", "-$ 5", -5.0),
        ("$", "7", 7.0),
        ("%", "12 %", 12.0),
        ("kg", "75kg", 75.0),
        ("$", "$", None),
        ("$", "$$5", None),
        ("$", "5$5", None),
        ("kg", "75 lb", None),
        ("$", "$NA", math.nan),
    ],
)
def test_a_declared_unit_may_stand_before_or_after_a_number(
    unit: str, written: str, number: float | None
) -> None:
    read = NumericColumn("x", 0, 1, thousands=",", unit=unit).parse(written)
    assert read == number or (
        read is not None and number is not None and math.isnan(read) == math.isnan(number)
    )


@pytest.mark.parametrize("unit", [" €", "1", "-", "a.b"])
def test_a_unit_that_could_be_part_of_a_number_is_rejected(unit: str, error_message: ErrorMessage) -> None:
    assert "unit of column 'x'" in error_message(lambda: NumericColumn("x", 0, 1, unit=unit), InvalidInput)


def test_separators_apply_to_strings_and_not_to_numbers() -> None:
    column = NumericColumn("x", 0, 10, decimal=",", thousands=".", missing=False)
    typed: list[object] = [2.5, Decimal("2.5"), 2, "2,5", b"2,5"]
    assert encoded(column, pd.Series(typed, dtype=object)) == [
        [0.25],
        [0.25],
        [np.float32(0.2)],
        [0.25],
        [0.25],
    ]


@pytest.mark.parametrize("wrong", [{"decimal": ";"}, {"thousands": "-"}, {"decimal": ",", "thousands": ","}])
def test_separators_that_are_not_valid_are_rejected(
    wrong: dict[str, str], error_message: ErrorMessage
) -> None:
    assert "separators of column 'x'" in error_message(
        lambda: NumericColumn("x", 0, 1, **wrong),  # type: ignore[arg-type]
        InvalidInput,
    )


def test_declared_missing_values_are_missing_as_strings_and_as_numbers() -> None:
    column = NumericColumn("x", 0, 10, missing_values=("-999", "unknown"))
    expected = [[0.5, 0], [0, 1], [0, 1]]
    assert encoded(column, ["5", "-999.0", "unknown"]) == expected
    assert encoded(column, [5, -999, math.nan]) == expected
    categories = CategoricalColumn("c", ("a",), missing_values=("none",))
    assert encoded(categories, ["a", "none", "other"]) == [[1, 0], [0, 1], [0, 0]]
    with pytest.raises(InvalidInput, match="both a category and a missing value"):
        CategoricalColumn("c", ("a", "none"), missing_values=("none",))


def test_booleans_are_read_in_any_spelling_and_type() -> None:
    column = BooleanColumn("smoker")
    yes, no, missing = [0, 1, 0], [1, 0, 0], [0, 0, 1]
    cells = ["Yes", "y", "TRUE", "t", "1", "1.0", "no", "N", "False", "f", "0", "", "?", None]
    assert encoded(column, cells) == [yes] * 6 + [no] * 5 + [missing] * 3
    assert encoded(column, [True, False]) == [yes, no]
    assert encoded(column, [1.0, 0.0, math.nan]) == [yes, no, missing]
    assert encoded(BooleanColumn("smoker", missing=False), ["y", ""]) == [[0, 1], [0, 0]]


@pytest.mark.parametrize("cell", ["maybe", "2", "yes!", "ja"])
def test_a_boolean_that_is_neither_yes_nor_no_is_an_error_without_its_value(
    cell: str, error_message: ErrorMessage
) -> None:
    message = error_message(lambda: encoded(BooleanColumn("smoker"), ["yes", cell]), InvalidInput)
    assert message == "Row 2 has neither yes nor no in the boolean column 'smoker'."


def test_dates_count_in_days_between_bounds_that_are_dates() -> None:
    column = DateColumn("day", "2020-01-01", "2020-01-11", missing=False)
    cells = ["2020-01-06", "2020-01-06 23:59:59", "2019-01-01", "2021-01-01", "2020-01-06T23:30:00-05:00", ""]
    assert encoded(column, cells) == [[0.5], [0.5], [0], [1], [0.5], [0]]


def test_timestamps_count_in_utc_between_bounds_that_are_timestamps() -> None:
    column = DateColumn("at", "2020-01-01 00:00:00", "2020-01-01T10:00:00Z", missing=False)
    cells = ["2020-01-01 05:00", "2020-01-01T07:00:00+02:00", "2020-01-01 02:30:00.000", "2020-01-01"]
    assert encoded(column, cells) == [[0.5], [0.5], [0.25], [0]]


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


@pytest.mark.parametrize("cell", ["31.01.2020", "2020-02-30", "2020-1-1", "20200101", "January"])
def test_a_cell_that_is_no_date_is_an_error_without_its_value(cell: str, error_message: ErrorMessage) -> None:
    column = DateColumn("day", "2020-01-01", "2020-01-11")
    message = error_message(lambda: encoded(column, ["2020-01-02", cell]), InvalidInput)
    assert "Row 2 has no date in the column 'day'" in message
    assert cell not in message


@pytest.mark.parametrize(
    "wrong",
    [
        {"low": "2020-01-02"},
        {"low": "01.01.2020"},
        {"low": "2019-12-31 00:00:00"},
        {"low": 2019},
        {"format": "day"},
        {"format": "%x"},
        {"format": "%d.%m.%"},
    ],
)
def test_bounds_and_formats_of_dates_that_are_not_valid_are_rejected(
    wrong: dict[str, Any], error_message: ErrorMessage
) -> None:
    given: dict[str, Any] = {"low": "2020-01-01", "high": "2020-01-02", **wrong}
    assert "column 'day'" in error_message(lambda: DateColumn("day", **given), InvalidInput)


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


def test_hashed_strings_are_spread_evenly() -> None:
    # 20,000 strings in 8 buckets: each Binomial(20000, 1/8); 6 standard deviations: false alarm below 2e-8.
    rows = np.array(
        encoded(HashedColumn("zip", 8, missing=False), [f"{number:05}" for number in range(20_000)])
    )
    assert np.abs(rows.sum(axis=0) - 2_500).max() < 6 * math.sqrt(20_000 / 8 * 7 / 8)


def test_case_is_ignored_only_where_it_is_declared() -> None:
    cells = ["North", "NORTH", "south"]
    assert encoded(CategoricalColumn("r", ("north",), missing=False), cells) == [[0], [0], [0]]
    assert encoded(CategoricalColumn("r", ("north",), missing=False, ignore_case=True), cells) == [
        [1],
        [1],
        [0],
    ]
    with pytest.raises(InvalidInput, match="more than case"):
        CategoricalColumn("r", ("north", "North"), ignore_case=True)
    hashed = encoded(HashedColumn("r", 64, ignore_case=True), ["Süd", "SÜD"])
    assert hashed[0] == hashed[1]
    assert encoded(HashedColumn("r", 64), ["Süd"]) != encoded(HashedColumn("r", 64), ["SÜD"])
    labels = Encoding((BooleanColumn("b"),), "y", ("No", "Yes"), label_ignores_case=True)
    assert labels.encode_labels(pd.DataFrame({"y": ["no", "YES", "Yes"]})).tolist() == [0, 1, 1]
    with pytest.raises(InvalidInput, match="outside the classes"):
        Encoding((BooleanColumn("b"),), "y", ("No", "Yes")).encode_labels(pd.DataFrame({"y": ["no"]}))


@pytest.mark.parametrize("buckets", [1, 0, 2**17, 2.5, True, "64"])
def test_a_number_of_buckets_that_is_not_valid_is_rejected(buckets: Any, error_message: ErrorMessage) -> None:
    assert "buckets of column 'zip'" in error_message(lambda: HashedColumn("zip", buckets), InvalidInput)


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
    assert Encoding.from_json(EVERY_TYPE.to_json()) == EVERY_TYPE


def test_a_name_may_have_outer_blanks_in_the_table() -> None:
    table = pd.DataFrame({" age ": [25, 50], "y ": ["no", "yes"]})
    features, labels = Encoding((NumericColumn("age", 0, 100, missing=False),), "y", ("no", "yes")).encode(
        table, "y"
    )
    assert (features.tolist(), labels.tolist()) == ([[0.25], [0.5]], [0, 1])


@pytest.mark.parametrize(
    "crosses",
    [
        (("region", "region"),),
        (("region", "nobody"),),
        (("region", "smoker"), ("smoker", "region")),
        (("region", "y"),),
    ],
)
def test_crosses_must_be_different_pairs_of_columns(
    crosses: tuple[tuple[str, str], ...], error_message: ErrorMessage
) -> None:
    message = error_message(lambda: replace(EVERY_TYPE, crosses=crosses), InvalidInput)
    assert "different pairs of two columns" in message


@pytest.mark.parametrize(
    ("column", "cells", "losses"),
    [
        (NumericColumn("x", 0, 9), ["1", "10", "-1", "", "x"], Losses(1, 2, 0, 1)),
        (NumericColumn("x", 0, 9, missing_values=("x",)), ["1", "inf", "x"], Losses(1, 1, 0, 0)),
        (CategoricalColumn("x", ("a",)), ["a", "b", "?"], Losses(1, 0, 1, 0)),
        (BooleanColumn("x"), ["y", "b", "?"], Losses(1, 0, 0, 1)),
        (DateColumn("x", "2020-01-01", "2020-01-02"), ["2020-01-03", "b", "?"], Losses(1, 1, 0, 1)),
        (HashedColumn("x", 2), ["a", "b", "?"], Losses(1, 0, 0, 0)),
    ],
)
def test_losses_count_what_is_not_taken_as_it_is(column: Column, cells: list[str], losses: Losses) -> None:
    assert column.losses(pd.Series(cells)) == losses


def test_python_objects_in_a_table_are_read_one_by_one() -> None:
    encoding = Encoding((NumericColumn("x", 0, 10, decimal=","),), "y", ("no", "yes"))
    table = pd.DataFrame({"x": pd.Series(["2,5", 5, True, "?", None], dtype=object)})
    assert encoding.encode(table).tolist() == [[0.25, 0], [0.5, 0], [np.float32(0.1), 0], [0, 1], [0, 1]]


def test_a_long_table_of_numbers_is_encoded_like_its_rows() -> None:
    generator = np.random.default_rng(0)
    columns = (
        NumericColumn("a", -1, 1),
        NumericColumn("b", 0, 9, missing=False),
        NumericColumn("c", 0, 9, edges=(3.0,)),
    )
    encoding = Encoding(columns, "y", ("0", "1"))
    table = pd.DataFrame(
        {
            "a": np.where(generator.random(9000) < 0.1, math.nan, generator.normal(size=9000)),
            "b": generator.integers(-2, 12, size=9000),
            "c": generator.random(9000).astype(np.float32) * 10,
            "y": generator.integers(0, 2, size=9000),
        }
    )
    features, labels = encoding.encode(table, "y")
    assert labels.tolist() == table["y"].tolist()
    for rows in (slice(0, 1), slice(4095, 4097), slice(8191, 8193), slice(8999, 9000)):
        strings = table[rows].astype(str).replace("nan", "")
        assert encoding.encode(strings).tolist() == features[rows].tolist()

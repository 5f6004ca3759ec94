from __future__ import annotations

import json
import math
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quietmax.data import CategoricalColumn, Encoding, NumericColumn
from quietmax.data.encoding import Column, as_string
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
    ],
)
def test_a_cell_has_one_text(value: object, text: str) -> None:
    assert as_string(value) == text


def test_a_nested_python_value_is_an_error() -> None:
    with pytest.raises(InvalidInput, match="of type list"):
        encoded(CategoricalColumn("x", ("a",)), pd.Series([["a"], ["b"]]))


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


def test_the_json_of_version_0_1_is_read() -> None:
    content = json.loads(ENCODING.to_json())
    content["measurements"] = content.pop("inferred")
    old = json.dumps({**content, "format": "quietmax encoding 1"})
    assert Encoding.from_json(old) == ENCODING


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


@pytest.mark.parametrize(("label", "kind"), [("maybe", "outside the classes"), ("", "no label")])
def test_a_label_that_is_no_class_is_rejected_without_showing_it(
    label: str, kind: str, error_message: ErrorMessage
) -> None:
    table = TABLE.assign(ill=["yes", label])
    message = error_message(lambda: ENCODING.encode(table, "ill"), InvalidInput)
    assert "Row 2" in message
    assert kind in message
    assert "'no', 'yes'" in message
    assert "maybe" not in message


def test_an_encoding_needs_two_classes_and_different_columns(error_message: ErrorMessage) -> None:
    age = NumericColumn("age", 0, 1)
    assert "two classes" in error_message(lambda: Encoding((age,), "ill", ("yes",)), InvalidInput)
    assert "two classes" in error_message(lambda: Encoding((age,), "ill", ("yes", "yes")), InvalidInput)
    cases: list[tuple[tuple[Column, ...], str]] = [((), "ill"), ((age, age), "ill"), ((age,), "age")]
    for columns, label in cases:
        assert "different" in error_message(partial(Encoding, columns, label, ("a", "b")), InvalidInput)

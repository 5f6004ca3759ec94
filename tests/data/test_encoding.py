from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quietmax.data import CategoricalColumn, Encoding, NumericColumn
from quietmax.errors import InvalidInput

Refusal = Callable[..., str]

ENCODING = Encoding(
    (
        NumericColumn("age", 0, 100, missing=False),
        CategoricalColumn("sex", ("f", "m")),
        NumericColumn("gain", 0, 1_000, scale="log", edges=(10, 100)),
    ),
    label="ill",
    classes=("no", "yes"),
    measurements=("the classes of label 'ill'",),
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
    assert again.measured
    np.testing.assert_array_equal(again.encode(TABLE), ENCODING.encode(TABLE))


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
    assert not encoding.measured


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": "other"}',
        json.dumps({**json.loads(ENCODING.to_json()), "format": "quietmax encoding 2"}),
        json.dumps({**json.loads(ENCODING.to_json()), "columns": [{"type": "magic"}]}),
        json.dumps({**json.loads(ENCODING.to_json()), "columns": [{"type": "numeric", "name": "age"}]}),
        ENCODING.to_json()[:-20],
    ],
)
def test_a_foreign_or_truncated_description_is_refused(text: str, refusal: Refusal) -> None:
    assert "description of an encoding" in refusal(lambda: Encoding.from_json(text), InvalidInput)


def test_a_table_without_a_needed_column_is_refused_and_its_columns_listed(refusal: Refusal) -> None:
    sentence = refusal(lambda: ENCODING.encode(TABLE.drop(columns="sex")), InvalidInput)
    assert "no column 'sex'" in sentence
    assert "'ill', 'gain', 'extra', 'age'" in sentence


def test_a_table_with_two_columns_of_one_name_is_refused(refusal: Refusal) -> None:
    table = pd.concat([TABLE, TABLE[["sex"]]], axis=1)
    assert "several columns named 'sex'" in refusal(lambda: ENCODING.encode(table), InvalidInput)


@pytest.mark.parametrize(("label", "kind"), [("maybe", "outside the declared classes"), ("", "no label")])
def test_a_label_that_is_no_class_is_refused_without_showing_it(
    label: str, kind: str, refusal: Refusal
) -> None:
    table = TABLE.assign(ill=["yes", label])
    sentence = refusal(lambda: ENCODING.encode(table, "ill"), InvalidInput)
    assert "Record 2" in sentence
    assert kind in sentence
    assert "'no', 'yes'" in sentence
    assert "maybe" not in sentence


def test_an_encoding_needs_two_classes_and_different_columns(refusal: Refusal) -> None:
    age = NumericColumn("age", 0, 1)
    assert "two classes" in refusal(lambda: Encoding((age,), "ill", ("yes",)), InvalidInput)
    assert "two classes" in refusal(lambda: Encoding((age,), "ill", ("yes", "yes")), InvalidInput)
    for columns, label in (((), "ill"), ((age, age), "ill"), ((age,), "age")):
        assert "different names" in refusal(
            lambda c=columns, n=label: Encoding(c, n, ("a", "b")), InvalidInput
        )

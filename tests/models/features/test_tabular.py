from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quietmax import PrivateHead
from quietmax.data import Schema
from quietmax.data.encoding import (
    BooleanColumn,
    CategoricalColumn,
    DateColumn,
    Encoding,
    HashedColumn,
    NumericColumn,
    TextColumn,
)
from quietmax.errors import InvalidInput
from quietmax.estimators import HeadSettings
from quietmax.models.features import OneHot, TableFeatures, UnitNorm, table_features
from quietmax.models.features.generic import feature_map_from_json
from quietmax.models.features.tabular import TableCells


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=6),
    st.floats(0.01, 100.0),
)
def test_normalising_with_a_constant_keeps_every_affine_decision(
    values: list[float], constant: float
) -> None:
    x = np.array([values], np.float32)
    weights = np.random.default_rng(0).normal(size=x.shape[1])
    before = float(x[0].astype(float) @ weights + constant)
    after = float(UnitNorm(constant).transform(x)[0].astype(float) @ np.append(weights, 1.0))
    length = float(np.sqrt(np.square(x.astype(float)).sum() + constant**2))
    assert after == pytest.approx(before / length, abs=1e-5 * float(np.linalg.norm(np.append(weights, 1.0))))


def plain_features(table: TableFeatures, row: list[float]) -> list[float]:
    """The features of one row, number by number."""
    features = list(row)
    for bins in table.bins:
        for number, flag in zip(table.numbers, table.missing, strict=True):
            value = min(max(row[number], 0.0), 1.0)
            interval = min(math.floor(value * bins), bins - 1)
            present = flag is None or row[flag] == 0.0
            features += [float(present and place == interval) for place in range(bins)]
    before_crosses = list(features)
    for (a, b), (c, d) in table.crosses:
        features += [one * other for one in before_crosses[a:b] for other in before_crosses[c:d]]
    length = math.sqrt(math.fsum(value * value for value in features))
    return [value / length if length else 0.0 for value in features]


TABLE = TableFeatures(6, (0, 2), (1, None), (4, 12), (((3, 6), (6, 10)), ((10, 14), (6, 10))))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([0.0, 1.0, 0.25, 0.3, 0.999, -3.0, 2.0]), min_size=6, max_size=6))
def test_table_features_equal_a_plain_computation(row: list[float]) -> None:
    expected = plain_features(TABLE, [float(np.float32(value)) for value in row])
    np.testing.assert_allclose(TABLE.transform([row])[0], expected, atol=1e-7)
    assert len(expected) == TABLE.dimension(6)


def test_many_rows_have_the_features_of_single_rows() -> None:
    rows = np.random.default_rng(0).random((5000, 6), np.float32)
    features = TABLE.transform(rows)
    for row in (0, 4095, 4096, 4999):
        np.testing.assert_array_equal(features[row], TABLE.transform(rows[row : row + 1])[0])


def test_scaled_indicators_have_equal_second_moments() -> None:
    """Three categories and two bins: E (a f)^2 is the same for all, however frequent they are."""
    generator = np.random.default_rng(1)
    rows = np.zeros((20_000, 4), np.float32)
    rows[np.arange(20_000), generator.choice(3, 20_000, p=[0.8, 0.15, 0.05])] = 1.0
    rows[:, 3] = generator.random(20_000) < 0.1
    features = OneHot((None, None, None, (0.0, 1.0))).transform(rows)
    table = TableFeatures(5)
    unit = table.transform(features).astype(np.float64)
    scale = table.scale(unit.mean(axis=0), 0.0)
    moments = np.square(unit * scale).mean(axis=0)
    np.testing.assert_allclose(moments, moments.mean(), rtol=1e-6)
    assert np.square(unit * scale).sum(axis=1).mean() == pytest.approx(1.0, rel=1e-6)


def test_a_fine_bin_keeps_its_scale_only_where_values_are_concentrated() -> None:
    """The first coarse bin is spread evenly over its eight fine bins; the second is one value and a rare one."""
    table = TableFeatures(1, (0,), (None,), (2, 16))
    centre = np.array([0.3, 0.4, 0.4, *[0.05] * 8, 0.38, 0.02, *[0.0] * 6])
    scale = table.scale(centre, 0.0)
    relative = scale[1:] * np.sqrt(centre[1:])
    np.testing.assert_allclose(relative[:2], relative[0])
    np.testing.assert_allclose(relative[2:10], relative[0] * (1 / 4) ** 2)
    assert relative[10] == pytest.approx(relative[0])
    assert scale[0] * math.sqrt(centre[0]) == pytest.approx(4 * relative[0])
    assert relative[11] == pytest.approx(relative[0] * (0.02 / 0.4 / (4 / 8)) ** 2)


def test_the_number_itself_decides_where_a_bin_was_empty_in_training() -> None:
    """Values above 0.5 are of class 1; a value from a gap in the training values is classified by its size."""
    generator = np.random.default_rng(0)
    values = generator.random(3000)
    values = values[(np.abs(values - 0.2) > 0.05) & (np.abs(values - 0.8) > 0.05)]
    frame = pd.DataFrame({"age": values, "label": np.where(values > 0.5, "yes", "no")})
    table = Schema(label="label", classes=("no", "yes"), bounds={"age": (0, 1)}, complete=("age",))
    for dense in (HeadSettings(second_moments=0.0), None):
        head = PrivateHead(4.0, 1e-5, schema=table, random_state=0, settings=dense).fit(frame)
        assert type(head.feature_map_) is (TableFeatures if dense else TableCells)
        assert head.predict(pd.DataFrame({"age": [0.2, 0.8]})).tolist() == ["no", "yes"]


def test_the_scale_is_finite_and_positive_whatever_was_released() -> None:
    for centre in (np.zeros(5), np.full(5, -1.0), np.array([1.0, 0.0, -0.5, 1e-300, 0.3])):
        scale = TableFeatures(1, (0,), (None,), (2,)).scale(np.resize(centre, 3), 1e-4)
        assert np.isfinite(scale).all()
        assert (scale > 0.0).all()
    assert TableFeatures(2).scale(np.zeros(2), 0.0).tolist()[0] > 0.0


def encoding(numeric: int = 5, crosses: tuple[tuple[str, str], ...] = (), **more: Any) -> Encoding:
    columns = (
        *(NumericColumn(f"n{place}", 0, 1, missing=bool(place % 2)) for place in range(numeric)),
        CategoricalColumn("job", ("a", "b")),
        BooleanColumn("smoker", missing=False),
    )
    return Encoding(columns, "label", ("no", "yes"), crosses=crosses, **more)


@pytest.mark.parametrize(
    ("numeric", "size", "mu", "bins"),
    [
        (5, 39_000, 0.27, (32, 256)),
        (5, 11_000, 0.27, (32,)),
        (5, 5_000, 0.27, (16,)),
        (5, 1_500, 0.27, (8,)),
        (5, 150, 2.7, (8,)),
        (5, 1_000_000, 0.27, (32,)),
        (20, 40_000, 0.27, (32,)),
        (21, 40_000, 0.27, None),
        (50, 40_000, 0.27, None),
        (40, 1_000_000, 0.27, None),
        (5, 1_400, 0.27, None),
        (5, 2_000, 1.6, (8,)),
        (5, 2_400, 100.0, (16,)),
        (5, 9_000, 1.6, (32,)),
        (5, 10_000, 1.6, (32, 256)),
        (0, 100, 0.27, ()),
    ],
)
def test_the_bins_follow_from_public_numbers(
    numeric: int, size: int, mu: float, bins: tuple[int, ...] | None
) -> None:
    chosen = table_features(encoding(numeric), size, 2, mu)
    assert type(chosen) is (UnitNorm if bins is None else TableFeatures)
    assert getattr(chosen, "bins", None) == bins
    assert chosen.dimension(len(encoding(numeric).feature_names)) * size <= 2**28


def test_many_classes_mean_fewer_bins() -> None:
    chosen: Any = table_features(encoding(), 39_000, 30, 0.27)
    assert chosen.bins == (32,)


def test_crosses_that_do_not_fit_into_memory_are_an_error() -> None:
    columns = (HashedColumn("zip", 2000, missing=False), HashedColumn("employer", 1000, missing=False))
    table = Encoding(columns, "label", ("no", "yes"), crosses=(("zip", "employer"),))
    assert table_features(table, 1_000, 2, 0.3).dimension(3000) == 2_003_000
    with pytest.raises(InvalidInput, match=r"2,003,000 features per row, too many"):
        table_features(table, 2_000, 2, 0.3)


def test_every_kind_of_column_and_every_declared_cross_becomes_features() -> None:
    columns = (
        NumericColumn("age", 0, 100),
        NumericColumn("pay", 0, 100, edges=(10, 20), missing=False),
        DateColumn("joined", "2020-01-01", "2020-12-31", missing=False),
        CategoricalColumn("job", ("a", "b")),
        HashedColumn("zip", 4, missing=False),
    )
    crosses = (("job", "zip"), ("age", "pay"), ("joined", "job"))
    table = Encoding(columns, "label", ("no", "yes"), crosses=crosses)
    chosen = table_features(table, 1_000, 2, 1.0)
    assert isinstance(chosen, TableFeatures)
    assert chosen.bins == (16,)
    assert (chosen.numbers, chosen.missing) == ((0, 5), (1, None))
    frame = pd.DataFrame(
        {
            "age": [50, None],
            "pay": [15, 15],
            "joined": ["2020-12-31"] * 2,
            "job": ["b", "?"],
            "zip": ["1", "1"],
        }
    )
    rows = table.encode(frame)
    width = rows.shape[1]
    features = chosen.transform(rows)
    assert features.shape == (2, width + 2 * 16 + 3 * 4 + 16 * 3 + 16 * 3)
    bucket = int(np.flatnonzero(rows[0, 9:])[0])
    start = width + 32
    first = [start + 1 * 4 + bucket, start + 12 + 8 * 3 + 1, start + 12 + 48 + 15 * 3 + 1]
    second = [start + 2 * 4 + bucket, start + 12 + 48 + 15 * 3 + 2]
    assert (np.flatnonzero(features[0, start:]) + start).tolist() == first
    assert (np.flatnonzero(features[1, start:]) + start).tolist() == second


def test_embeddings_of_texts_keep_their_numbers_and_signs() -> None:
    rows = np.float32([[1, 0, 0.6, -0.8], [0, 1, 0, 0]])
    features = TableFeatures(4, text=((2, 4),)).transform(rows)
    assert features == pytest.approx(np.float32([[1, 0, 0.6, -0.8], [0, np.sqrt(2), 0, 0]]) / np.sqrt(2))


def test_the_numbers_of_a_text_are_scaled_alike_whatever_their_mean() -> None:
    feature_map = TableFeatures(6, text=((2, 6),))
    centre = np.array([0.35, 0.35, -0.3, 0.3, 0.0, 0.1])
    factors = feature_map.scale(centre, 0.01)
    assert len(set(factors[2:])) == 1
    assert np.array_equal(factors, feature_map.scale(np.array([0.35, 0.35, 0.0, 0.0, 0.0, 0.0]), 0.01))
    # As an indicator with the same second moment: height h, and h / 4 for each of four numbers.
    height = 1 / np.sqrt(1 + 0.7**2)
    assert factors[2] / factors[0] == pytest.approx(np.sqrt((0.35 + 0.04) / (height / 4 + 0.04)))


def test_a_text_alone_is_not_scaled() -> None:
    assert TableFeatures(4, text=((0, 4),)).scale(np.zeros(4), 0.01) == pytest.approx(np.ones(4), rel=0.1)


def test_table_features_know_the_texts_of_an_encoding_and_their_json() -> None:
    encoding = Encoding(
        (NumericColumn("age", 0, 99), TextColumn("note"), TextColumn("reply", missing=False)),
        "ill",
        ("no", "yes"),
    )
    feature_map = table_features(encoding, 1_000, 2, 0.3)
    assert isinstance(feature_map, TableFeatures)
    assert feature_map.text == ((2, 386), (387, 771))
    assert feature_map_from_json(feature_map.to_json()) == feature_map
    few = table_features(encoding, 10, 2, 0.3)
    assert isinstance(few, TableFeatures)
    assert (few.bins, few.text) == ((), feature_map.text)

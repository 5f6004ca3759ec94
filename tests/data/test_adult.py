from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.linear_model import LogisticRegression

from quietmax.data import load, load_records
from quietmax.data.adult import CATEGORIES, COLUMNS, adult_encoding
from quietmax.errors import DataUnavailable, InvalidInput

Refusal = Callable[..., str]
TRAIN = """\
39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, Cuba, <=50K
50, Self-emp-inc, 83311, HS-grad, 9, Divorced, Sales, Husband, Black, Female, 0, 0, 13, Cuba, >50K
38, ?, 215646, HS-grad, 9, Divorced, ?, Unmarried, White, Male, 0, 0, 40, United-States, <=50K

"""
TEST = """\
|1x3 Cross validator
17, Private, 0, Preschool, 1, Widowed, Craft-repair, Wife, Other, Female, 99999, 5000, 99, Holand-Netherlands, >50K.

"""


def write_adult(folder: Path) -> None:
    (folder / "adult.data").write_text(TRAIN)
    (folder / "adult.test").write_text(TEST)


def test_complete_records_of_both_files_become_fourteen_scaled_codes(tmp_path: Path) -> None:
    write_adult(tmp_path)
    records = load_records("adult", data_dir=tmp_path, verify=False)
    assert records.features.shape == (3, 14)
    assert records.labels.tolist() == [0, 1, 1]
    expected = [
        (39 - 17) / 73,
        6 / 8,
        77516 / 1_500_000,
        1 / 16,
        12 / 15,
        3 / 7,
        9 / 14,
        4 / 6,
        1 / 5,
        2 / 2,
        2174 / 99_999,
        0,
        39 / 98,
        13 / 41,
    ]
    np.testing.assert_allclose(records.features[0], expected, rtol=1e-6)
    np.testing.assert_allclose(records.features[2, [0, 2, 3, 10, 11, 12, 13]], [0, 0, 1, 1, 1, 1, 1])


def test_one_hot_features_are_one_per_category_and_interval(tmp_path: Path) -> None:
    write_adult(tmp_path)
    records = load_records("adult", data_dir=tmp_path, verify=False, encoding="one-hot")
    encoding = records.encoding
    assert encoding is not None
    ones = [encoding.feature_names[index] for index in np.flatnonzero(records.features[1])]
    assert ones == [
        "age>=50",
        "workclass=Self-emp-inc",
        "education=HS-grad",
        "education-num",
        "marital-status=Divorced",
        "occupation=Sales",
        "relationship=Husband",
        "race=Black",
        "sex=Female",
        "capital-gain>=0",
        "capital-loss>=0",
        "hours-per-week>=10",
        "native-country=Cuba",
    ]
    assert not any("fnlwgt" in name for name in encoding.feature_names)


def test_the_encoding_of_adult_uses_no_measurement_and_encodes_new_tables() -> None:
    table = pd.read_csv(
        pd.io.common.StringIO(TEST), skiprows=1, names=[*COLUMNS, "income"], skipinitialspace=True
    )
    for style in ("codes", "one-hot"):
        encoding = adult_encoding(style)  # type: ignore[arg-type]
        assert not encoding.measured
        assert encoding.encode(table[list(COLUMNS)]).shape == (1, len(encoding.feature_names))


def test_an_unknown_encoding_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    write_adult(tmp_path)
    sentence = refusal(
        lambda: load_records("adult", data_dir=tmp_path, verify=False, encoding="embedding"), InvalidInput
    )
    assert "'codes'" in sentence


def test_a_truncated_adult_file_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    write_adult(tmp_path)
    (tmp_path / "adult.data").write_text(TRAIN[:150])
    assert "checksum" in refusal(lambda: load_records("adult", data_dir=tmp_path), DataUnavailable)
    (tmp_path / "adult.data").write_text("a text, of two columns\n")
    sentence = refusal(lambda: load_records("adult", data_dir=tmp_path, verify=False), DataUnavailable)
    assert "adult.data" in sentence


def test_the_real_adult_has_45222_complete_records_of_which_52_repeat_the_features_of_another(
    real_data: Path,
) -> None:
    records = load_records("adult", data_dir=real_data)
    assert records.features.shape == (45_222, 14)
    assert np.bincount(records.labels).tolist() == [34_014, 11_208]
    assert records.identities is not None
    assert len(np.unique(records.identities)) == 45_222 - 52
    assert ((records.features >= 0) & (records.features <= 1)).all()


def test_no_real_adult_category_is_unknown_to_the_encoding(real_data: Path) -> None:
    records = load_records("adult", data_dir=real_data)
    for name in CATEGORIES:
        assert (records.features[:, COLUMNS.index(name)] > 0).all()


def test_both_encodings_of_adult_give_the_same_split_without_copies_on_both_sides(real_data: Path) -> None:
    codes, one_hot = (
        load("adult", data_dir=real_data, seed=3, encoding=style) for style in ("codes", "one-hot")
    )
    np.testing.assert_array_equal(codes.train_rows, one_hot.train_rows)
    np.testing.assert_array_equal(codes.test_rows, one_hot.test_rows)
    assert (len(codes.train), len(codes.test), len(codes.pool)) == (10_000, 10_000, 25_222)
    sides = [set(part.contents.tolist()) for part in (codes.train, codes.test, codes.pool)]
    assert not sides[0] & sides[1]
    assert not (sides[0] | sides[1]) & sides[2]


def test_a_linear_model_on_the_one_hot_features_of_adult_reaches_85_percent(real_data: Path) -> None:
    data = load("adult", data_dir=real_data, encoding="one-hot", seed=0)

    def clipped(features: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        with_bias = np.hstack([features, np.ones((len(features), 1), dtype=np.float32)])
        return with_bias / np.maximum(np.linalg.norm(with_bias, axis=1, keepdims=True), 1)

    model = LogisticRegression(C=100, max_iter=300).fit(clipped(data.train.features), data.train.labels)
    assert model.score(clipped(data.test.features), data.test.labels) > 0.845

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quietmax.data import Holdout, Schema, load, load_records
from quietmax.data.records import is_held_out
from quietmax.errors import InvalidInput
from tests.data.conftest import ErrorMessage
from tests.data.people import DECLARED, FEATURES, written


def test_an_own_table_trains_on_everybody_who_is_not_held_out(tmp_path: Path) -> None:
    text = "x,y\n" + "".join(f"{number},{number % 2}\n" for number in range(50))
    path = written(tmp_path, text)
    declared: dict[str, Any] = {"label": "y", "classes": 2, "bounds": {"x": (0, 50)}}
    everybody = load(path, **declared, seed=2)
    assert (len(everybody.train), len(everybody.test), len(everybody.pool)) == (50, 0, 0)
    data = load(path, **declared, holdout=0.3, seed=2)
    assert data.holdout == Holdout(0.3, seed=2)
    assert data.test_rows.tolist() == np.flatnonzero(is_held_out(data.records, data.holdout)).tolist()
    assert sorted([*data.train_rows, *data.test_rows]) == [*range(50)]
    assert 0 < len(data.test) < 25


def test_the_size_of_the_training_set_cannot_be_given_for_an_own_table(
    tmp_path: Path, error_message: ErrorMessage
) -> None:
    message = error_message(lambda: load(written(tmp_path), **DECLARED, records=3), InvalidInput)
    assert "holdout" in message
    assert "only one" in error_message(lambda: load("mnist-5k", records=9, holdout=0.1), InvalidInput)


def test_the_toml_file_beside_a_table_is_its_schema_unless_another_is_named(tmp_path):
    path = written(tmp_path)
    written(
        tmp_path,
        'label = "ill"\nclasses = ["no", "yes"]\nignore = ["name"]\n'
        'bounds = { age = [20, 60], gain = [0, 100] }\ncategories = { sex = ["f", "m"] }\n',
        "people.toml",
    )
    beside = load_records(path)
    np.testing.assert_allclose(beside.features, FEATURES, rtol=1e-6)
    assert beside.encoding is not None
    assert not beside.encoding.inferred
    wider = load_records(path, bounds={"age": (20, 95)})
    assert wider.features[0, 0] == pytest.approx(10 / 75)
    with pytest.raises(InvalidInput, match="beside the table"):
        load_records(path, schema=Schema(label="ill"))


def test_an_encoding_is_rejected_where_there_is_no_choice(error_message: ErrorMessage) -> None:
    assert "only one encoding" in error_message(lambda: load("mnist-5k", encoding="one-hot"), InvalidInput)


def test_a_misspelt_option_is_rejected() -> None:
    with pytest.raises(TypeError, match="'dowload'"):
        load("mnist-5k", dowload=True)  # type: ignore[call-arg]


def test_options_for_own_files_are_rejected_for_registered_data_sets(error_message: ErrorMessage) -> None:
    assert "label applies only to files" in error_message(
        lambda: load("mnist-5k", label="digit"), InvalidInput
    )

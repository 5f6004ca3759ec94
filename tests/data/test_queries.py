from __future__ import annotations

import pytest

from quietmax.data import Encoding, NumericColumn
from quietmax.data.queries import read_queries
from quietmax.errors import DataUnavailable


def test_an_encoding_of_another_width_than_the_model_is_refused_before_anything_is_asked(tmp_path):
    path = tmp_path / "asked.csv"
    path.write_text("age\n20\n")
    encoding = Encoding((NumericColumn("age", 0, 100, missing=False),), "ill", ("no", "yes"))
    assert read_queries(path, encoding=encoding, width=1).shape == (1, 1)
    with pytest.raises(DataUnavailable, match="makes 1 features, but the model takes 2"):
        read_queries(path, encoding=encoding, width=2)

from __future__ import annotations

import pytest

from quietmax.data import Encoding, NumericColumn
from quietmax.data.queries import read_queries
from quietmax.errors import DataUnavailable, InvalidInput


def test_an_encoding_of_another_width_than_the_model_is_refused_before_anything_is_asked(tmp_path):
    path = tmp_path / "asked.csv"
    path.write_text("age\n20\n")
    encoding = Encoding((NumericColumn("age", 0, 100, missing=False),), "ill", ("no", "yes"))
    assert read_queries(path, encoding=encoding, width=1).shape == (1, 1)
    with pytest.raises(DataUnavailable, match="makes 1 features, but the model takes 2"):
        read_queries(path, encoding=encoding, width=2)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a,b\n1,2\n", "has 2 columns, but the model takes 3"),
        ("a,b,c\n1,2,3\n4,x,6\n", "Column 'b' holds something other than a number in record 2"),
        ("a,b,c\n1,2,inf\n", "Record 1 of .* no finite number in column 'c'"),
    ],
)
def test_without_an_encoding_a_file_of_other_columns_or_of_anything_but_numbers_is_refused(
    tmp_path, text, sentence
):
    path = tmp_path / "queries.csv"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=sentence):
        read_queries(path, encoding=None, width=3)


def test_without_an_encoding_numbers_are_taken_as_they_are(tmp_path):
    path = tmp_path / "queries.csv"
    path.write_text("a,b,c\n1,2,3\n4,5,-6.5\n")
    assert read_queries(path, encoding=None, width=3).tolist() == [[1, 2, 3], [4, 5, -6.5]]

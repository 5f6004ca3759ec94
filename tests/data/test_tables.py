from __future__ import annotations

import codecs
import contextlib
import csv
import errno
import io
import math
import tempfile
import traceback
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quietmax.data import Encoding, Schema, encode_table, load, load_records
from quietmax.data.cells import as_strings
from quietmax.data.encoding import NumericColumn
from quietmax.data.sources import as_frame, read_table
from quietmax.data.tables import _read_records, read_queries
from quietmax.errors import DataUnavailable, InvalidInput, QuietmaxError, QuietmaxWarning
from tests.data.conftest import problem_of
from tests.data.people import DECLARED, FEATURES, LABELS, PEOPLE, expect_people, written


def test_blanks_quotes_a_byte_order_mark_windows_line_ends_and_blank_lines_make_no_difference() -> None:
    rows = [",".join(f'" {cell} "' for cell in line.split(",")) for line in PEOPLE.splitlines()]
    text = "\ufeff\r\n" + "".join(f"{row}\r\n\r\n" for row in rows)
    expect_people(written(text))


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("place", [0, 50, 100])
@pytest.mark.parametrize("cell", ['"secret', '"secret" said', '"', '"secret\nsecret', '"secret""'])
def test_one_persons_unbalanced_quote_is_an_error_and_swallows_no_later_row(
    cell: str, place: int, separator: str
) -> None:
    rows = [f'"{row}";30;no'.replace(";", separator) for row in range(100)]
    rows[place:place] = [f"x;40;{cell}".replace(";", separator)]
    path = written("\n".join(["id;age;ill".replace(";", separator), *rows, ""]))
    message = problem_of(InvalidInput, read_table, path)
    assert f"row {place + 1} (not counting the header) has a field that begins with a quote" in message
    assert "secret" not in message


LONG = [f"{'long ' * 100}{number}" for number in range(3_000)]
MARK = codecs.BOM_UTF8
READ: dict[str, tuple[str | bytes, dict[str, list[str]]]] = {
    "a quote inside a cell": (
        'id,size\n1,5" tape\n2,a"b"\n',
        {"id": ["1", "2"], "size": ['5" tape', 'a"b"']},
    ),
    "line breaks in quotes": (
        MARK + b'\r\n"a\nb","c"\r\n\r\n"1\n2",3\n4,"5""\n\n6"\n',
        {"a\nb": ["1\n2", "4"], "c": ["3", '5"\n\n6']},
    ),
    **{
        f"encoded as {encoding}": (
            "\ufeffname,age\nZoë €,30\n".encode(encoding),
            {"name": ["Zoë €"], "age": ["30"]},
        )
        for encoding in ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")
    },
    **{
        f"a first line {line!r}": (line + "a;b,c,d\n1;2\n", {"a": ["1"], "b,c,d": ["2"]})
        for line in ("sep=;\n", "SEP=;\r\n", '"sep=;"\n', "\ufeffsep=;\r\n")
    },
    **{
        f"unnamed columns of {cell!r}": (
            f" ;a;;b;;\n0;1;{cell};2;;\n1;3;;4;;{cell}\n",
            {"a": ["1", "3"], "b": ["2", "4"]},
        )
        for cell in ("", "5", '"a;b"')
    },
    "carriage returns": ("a,b\r1,2\r3,4\r", {"a": ["1", "3"], "b": ["2", "4"]}),
    "quotes": ('a,b\n"1,1","say ""no"""\n"",""\n', {"a": ["1,1", ""], "b": ['say "no"', ""]}),
    "a named delimiter, and cells without values": (
        "sep=|\na|b\n1|2\n|\n\n",
        {"a": ["1", ""], "b": ["2", ""]},
    ),
    "another delimiter in quotes": (
        'x;"a, b";y\n1;"2, 3";0\n4;5;1\n',
        {"x": ["1", "4"], "a, b": ["2, 3", "5"], "y": ["0", "1"]},
    ),
    "a delimiter that the header does not have": ("x\n1;2\n", {"x": ["1;2"]}),
    "a header of more than a megabyte": (
        f"{','.join(LONG)}\n{','.join('1' * 3_000)}\n",
        {name: ["1"] for name in LONG},
    ),
}


@pytest.mark.parametrize(("content", "columns"), READ.values(), ids=READ)
def test_every_cell_of_a_text_file_is_a_string_under_its_name(
    content: str | bytes, columns: dict[str, list[str]]
) -> None:
    path = Path("people.csv")
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert read_table(path).frame.to_dict("list") == columns


@pytest.mark.parametrize(
    ("name", "delimiter"),
    [("people.csv", ","), ("people.csv", ";"), ("people.csv", "\t"), ("people.tsv", "\t")],
)
def test_the_delimiter_of_a_text_file_is_found_by_its_header(name: str, delimiter: str) -> None:
    expect_people(written(PEOPLE.replace(",", delimiter), name))


@settings(max_examples=400)
@given(st.text('a,"\n\r ', max_size=30))
def test_a_file_with_quotes_is_read_as_by_a_strict_reader_or_refused(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        path.write_bytes(f"x,y\n{text}\n".encode())
        try:
            rows = [row for row in csv.reader(io.StringIO(text, newline=""), strict=True) if row]
        except csv.Error:
            with pytest.raises(InvalidInput):
                read_table(path)
            return
        try:
            found = read_table(path).frame.to_numpy().tolist()
        except InvalidInput:
            assert not rows or any(len(row) != 2 for row in rows)
        else:
            assert found == rows


def test_scales_edges_and_complete_columns_refine_the_features() -> None:
    schema = {**DECLARED, "scales": {"gain": "log"}, "edges": {"age": [30, 50]}, "complete": ["age", "gain"]}
    records = load_records(written(), **schema)
    assert records.encoding.feature_names == (
        "age>=20",
        "age>=30",
        "age>=50",
        "sex=f",
        "sex=m",
        "sex missing",
        "gain",
    )
    assert records.features[:, -1] == pytest.approx(np.log1p([10, 0, 100, 0, 5]) / np.log1p(100))


def test_bounds_for_any_column_hold_where_nothing_else_is_declared() -> None:
    text = "a,b,c,y\n1,5,7,0\n2,6,8,1\n"
    records = load_records(
        written(text),
        label="y",
        classes=2,
        bounds={"*": (0, 10), "c": (0, 100)},
        complete=["a", "b", "c"],
    )
    np.testing.assert_allclose(records.features, [[0.1, 0.5, 0.07], [0.2, 0.6, 0.08]], rtol=1e-6)


def test_undeclared_columns_are_rejected_by_name_unless_inferring_is_allowed() -> None:
    path = written()
    message = problem_of(InvalidInput, load, path, label="ill")
    for expected in ("'name', 'age', 'sex', 'gain'", "`bounds`", "`categories`", "`classes`", "`infer`"):
        assert expected in message
    message = problem_of(InvalidInput, load, path, **{**DECLARED, "bounds": {"age": (0, 1)}})
    assert "'gain'" in message
    assert "'age'" not in message
    assert "`classes`" not in message
    message = problem_of(InvalidInput, load, path, **{**DECLARED, "classes": None})
    assert "needs `classes` for the label 'ill'" in message


def test_inferring_reads_bounds_categories_and_classes_and_says_so() -> None:
    records = load_records(written(), label="ill", ignore=["name"], infer=True)
    encoding = records.encoding
    assert encoding.inferred
    assert len(encoding.inferred) == 4
    for column in ("'age'", "'sex'", "'gain'", "'ill'"):
        assert any(column in entry for entry in encoding.inferred)
    assert records.features[:, 0] == pytest.approx([0.3, 0, 0.95, 0.4, 0.2])  # bounds 0 to 100
    assert encoding.feature_names[2:6] == ("sex=f", "sex=m", "sex=x", "sex missing")
    assert encoding.classes == ("no", "yes")


def test_only_what_is_not_declared_is_inferred() -> None:
    path = written()
    given = load_records(path, **DECLARED, infer=True)
    assert not given.encoding.inferred
    partly = load_records(path, **{**DECLARED, "classes": None}, infer=True)
    assert partly.encoding.inferred == ("the classes of label 'ill'",)
    np.testing.assert_array_equal(given.features, partly.features)


@pytest.mark.parametrize(
    ("text", "classes", "features"),
    [
        ("x,y\n10,10\n9,9\n2,2\n-1,-1\n", ("-1", "2", "9", "10"), None),
        *((f"x,y\n1,10\n2,9\n3,{odd}\n", tuple(sorted(["10", "9", odd])), None) for odd in ("²", "--5")),
        ("x,y\n1,a\n3,b\ninf,a\nnan,b\n", ("a", "b"), [[np.float32(1 / 3), 0], [1, 0], [1, 0], [0, 1]]),
        ("a,b,y\n3,,0\n3,,1\n", ("0", "1"), [[1, 0], [1, 0]]),  # 'a' between 0 and 3; 'b' is ignored
    ],
)
def test_classes_are_inferred_in_order_and_bounds_from_finite_numbers(
    text: str, classes: tuple[str, ...], features: list[list[float]] | None
) -> None:
    records = load_records(written(text), label="y", infer=True)
    assert records.encoding.classes == classes
    assert features is None or records.features.tolist() == features


def npz(**arrays: Any) -> Path:
    np.savez("points.npz", **arrays)
    return Path("points.npz")


@pytest.mark.parametrize(
    ("features", "declared", "expected"),
    [
        (np.array([[0.0, 5], [10, -3]]), {"bounds": {"*": (0, 10)}}, [[0, 0.5], [1, 0]]),
        (np.array([[True, False], [False, False]]), {}, [[1, 0], [0, 0]]),
        (np.array([[0, 51], [255, 0]], dtype=np.uint8), {}, [[0, np.float32(0.2)], [1, 0]]),
    ],
)
def test_the_numbers_of_an_npz_file_have_one_pair_of_bounds_which_bits_and_bytes_need_not(
    features: Any, declared: dict[str, Any], expected: list[list[float]]
) -> None:
    records = load_records(npz(features=features, labels=np.array([1.0, 0.0])), classes=2, **declared)
    assert (records.features.tolist(), records.labels.tolist()) == (expected, [1, 0])


def test_the_arrays_of_an_npz_file_may_have_other_names() -> None:
    path = npz(X=np.eye(3), y=np.array(["cat", "dog", "cat"]))
    records = load_records(path, features="X", label="y", classes=["dog", "cat"], bounds={"*": (0, 1)})
    np.testing.assert_array_equal(records.features, np.eye(3))
    assert records.labels.tolist() == [1, 0, 1]


@pytest.mark.parametrize(("axes", "shape"), [((4, 3, 5, 6), (3, 5, 6)), ((4, 5, 6), (1, 5, 6))])
def test_images_in_an_npz_file_keep_their_shape_and_bytes_need_no_bounds(
    axes: tuple[int, ...], shape: tuple[int, int, int]
) -> None:
    pixels = np.random.default_rng(0).integers(256, size=axes, dtype=np.uint8)
    records = load_records(npz(features=pixels, labels=np.array([0, 1, 2, 0])), classes=3)
    assert records.image_shape == shape
    np.testing.assert_allclose(records.features, pixels.reshape(4, -1) / 255, rtol=1e-6)
    assert not records.encoding.inferred


def test_an_npz_file_of_other_arrays_is_rejected() -> None:
    options: dict[str, Any] = {"classes": 2, "bounds": {"*": (0, 1)}}
    path = npz(images=np.eye(2), labels=np.array([0, 1]))
    message = problem_of(InvalidInput, load_records, path, **options)
    assert "no array 'features'" in message
    assert "'images', 'labels'" in message
    for arrays in (
        {"features": np.eye(2), "labels": np.array([0, 1, 1])},
        {"features": np.ones(2), "labels": np.array([0, 1])},
        {"features": np.array([["a"], ["b"]]), "labels": np.array([0, 1])},
    ):
        path = npz(**arrays)
        assert "array of numbers" in problem_of(InvalidInput, load_records, path, **options)
    path = npz(features=np.array([[{}], [[]]], dtype=object), labels=np.array([0, 1]))
    assert "Python objects" in problem_of(InvalidInput, load_records, path, **options)


@pytest.mark.parametrize("kept", [0.3, 0.9])
@pytest.mark.parametrize("suffix", ["npz", "parquet"])
def test_a_truncated_npz_or_parquet_file_is_rejected(suffix: str, kept: float) -> None:
    path = Path(f"points.{suffix}")
    if suffix == "npz":
        npz(features=np.eye(40), labels=np.arange(40) % 2)
    else:
        pd.DataFrame({"a": range(500), "labels": range(500)}).to_parquet(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    message = problem_of(InvalidInput, load_records, path, label="labels", classes=2, bounds={"*": (0, 1)})
    assert "truncated" in message


HEADER = PEOPLE.partition("\n")[0]
LATIN = PEOPLE.encode() + b"Joe,30,m,10,yes\n" * 20_000 + b"Zo\xeb,30,f,10,yes\n"
REFUSED = {
    "a short row": (PEOPLE.replace("Dan,40,,?,yes", "Dan,40"), "row 4 (not counting the header)"),
    "a long row": (PEOPLE.replace("?,yes", "?,yes,more"), "row 4 (not counting the header)"),
    "nothing": ("", "is empty"),
    "blank lines": ("\n\n", "is empty"),
    **{f"header {end!r}": (HEADER + end, "no records") for end in ("", "\n", "\n\n")},
    "a quote in the header": ('id,"age\n1,2\n3,4\n', "the header has a field that begins with a quote"),
    "an open quote after quoted line breaks": (
        'x,"a\nb"\n\n1,"2\n3"\n4,"5""\n\n6"\n"7,8\n',
        "row 3 (not counting the header) has a field that begins with a quote",
    ),
    "a short row after a line that names the delimiter": (
        "sep=;\na;b\n1;2\n3\n",
        "row 2 (not counting the header)",
    ),
    "half of a character in UTF-16": (
        ("\ufeff" + PEOPLE).encode("utf-16-le")[:-1],
        "UTF-16 with a byte-order mark",
    ),
    "a row in Latin-1": (PEOPLE.replace("Ann", "Änn").encode("latin-1"), "UTF-8"),
    "a header in Latin-1": (PEOPLE.replace("name", "näme").encode("latin-1"), "UTF-8"),
    "a row in Latin-1 far down": (LATIN, "UTF-8"),
    "a word in a numeric column": (
        PEOPLE.replace("30", "old"),
        "Row 1 has no number in the numeric column 'age'; a missing value is an empty cell. `quietmax schema check` "
        "counts all cells",
    ),
    "no person": (
        PEOPLE.replace("Cid", "").replace("Dan", "?"),
        "Row 3 (and 1 more) has no value in the `person` column 'name'. Give each such row a value of its own, or "
        "delete it.",
    ),
    "a label outside the classes": (
        PEOPLE.replace("1000,no", "1000,perhaps"),
        "Row 3 has a label outside the classes in column 'ill'; the declared classes are 'no', 'yes'. Declare the "
        "class too, or delete such rows.",
    ),
    "no label column": (
        PEOPLE.replace("ill", "sick"),
        "no column 'ill'; its columns are 'name', 'age', 'sex', 'gain', 'sick'",
    ),
}


@pytest.mark.parametrize(("content", "said"), REFUSED.values(), ids=REFUSED)
def test_a_text_file_that_is_no_such_table_is_rejected_without_its_content(
    content: str | bytes, said: str
) -> None:
    path = Path("people.csv")
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    person = {"ignore": [], "person": "name"} if "`person`" in said else {}
    message = problem_of(InvalidInput, load, path, **{**DECLARED, **person})
    assert said in message
    assert not any(cell in message for cell in ("Dan", "old", "perhaps", "Joe"))


def test_a_missing_file_another_kind_of_file_and_a_folder_are_rejected() -> None:
    assert "does not exist" in problem_of(DataUnavailable, load, Path("gone.csv"), **DECLARED)
    assert "'.xlsx'" in problem_of(InvalidInput, load, written(PEOPLE, "people.xlsx"), **DECLARED)
    for folder in ("./", "/"):
        problem_of(QuietmaxError, load, folder, **DECLARED)
    Path("folder.csv").mkdir()
    assert "is a folder" in problem_of(DataUnavailable, load, Path("folder.csv"), **DECLARED)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("fields.csv", f"{PEOPLE}Secret,30,f,10,yes,more\n".encode()),
        ("fields.tsv", b"a\tb\nSecret\n"),
        ("letters.csv", PEOPLE.encode() + b"Secret\xff,30,f,10,yes\n"),
        ("header.csv", b"Secret\xff,ill\n1,yes\n"),
        ("table.parquet", b"PAR1Secret"),
        ("arrays.npz", b"PKSecret"),
    ],
)
def test_an_error_in_a_table_shows_no_cell_even_in_its_traceback(
    tmp_path: Path, name: str, content: bytes
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InvalidInput) as error:
        read_table(path)
    assert error.value.__cause__ is None
    assert "Secret" not in "".join(traceback.format_exception(error.value))


def test_an_error_of_a_parser_is_not_the_cause_of_the_error_but_one_of_the_system_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails_with(problem: OSError) -> pytest.ExceptionInfo[DataUnavailable]:
        def fail(*_arguments: object, **_more: object) -> None:
            raise problem

        monkeypatch.setattr(pyarrow.parquet, "ParquetFile", fail)
        with pytest.raises(DataUnavailable) as error:
            read_table(path)
        return error

    path = written(PEOPLE, "people.parquet")
    parsed = fails_with(OSError("Secret cannot be decoded")).value
    assert "Secret" not in "".join(traceback.format_exception(parsed))
    forbidden = PermissionError(errno.EACCES, "Permission denied")
    assert fails_with(forbidden).value.__cause__ is forbidden


def test_repeated_column_names_are_rejected() -> None:
    text = PEOPLE.replace("name,age", "age,age", 1)
    assert "several columns named 'age'" in problem_of(InvalidInput, load, written(text), **DECLARED)
    table = pyarrow.table([pyarrow.array([1, 2]), pyarrow.array([1, 2])], names=["a", "a"])
    pyarrow.parquet.write_table(table, Path("twice.parquet"))
    message = problem_of(InvalidInput, load, Path("twice.parquet"), label="a")
    assert "several columns named 'a'" in message


@pytest.mark.parametrize("suffix", ["csv", "parquet", "npz"])
@pytest.mark.parametrize(
    ("odd", "features"), [(math.nan, [0, 1]), (None, [0, 1]), (math.inf, [1, 0]), (-math.inf, [0, 0])]
)
def test_nan_and_null_are_missing_values_and_infinity_is_clipped_in_every_format(
    suffix: str, odd: float | None, features: list[float]
) -> None:
    table, path = pyarrow.table({"feature_0": [1.0, odd], "labels": [0, 1]}), Path(f"points.{suffix}")
    if suffix == "csv":
        pyarrow.csv.write_csv(table, path)
    elif suffix == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        npz(features=np.array([[1.0], [np.nan if odd is None else odd]]), labels=np.array([0, 1]))
    records = load_records(path, label="labels", classes=2, bounds={"*": (0, 2)})
    width = 1 if suffix == "npz" else 2  # nothing is missing in an array
    assert records.features.tolist() == [[0.5, 0][:width], features[:width]]


def test_records_of_one_class_are_an_error_only_if_the_classes_are_read_from_them() -> None:
    path = written(PEOPLE.replace("yes", "no"))
    inferred = {**DECLARED, "classes": None, "infer": True}
    assert "one class" in problem_of(InvalidInput, load, path, **inferred)
    # Whether the last person of a class is there decides about nothing.
    assert load(path, **DECLARED).train.labels.tolist() == [0] * 5
    assert load(path, **DECLARED).classes == 2


def test_an_encoding_of_another_width_than_the_model_is_rejected_before_anything_is_encoded() -> None:
    path = Path("asked.csv")
    path.write_text("age\n20\n")
    encoding = Encoding((NumericColumn("age", 0, 100, missing=False),), "ill", ("no", "yes"))
    assert read_queries(path, encoding=encoding, width=1).shape == (1, 1)
    with pytest.raises(DataUnavailable, match="has 1 features, but the model takes 2"):
        read_queries(path, encoding=encoding, width=2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b,c\n1,2,3\n4,5,-6.5\n", None),
        ("a,b\n1,2\n", "each of the model's 3 features and no label; it has 2"),
        ("a,b,c\n1,2,3\n4,x,6\n", "Row 2 has no number in the numeric column 'b'"),
        ("a,b,c\n1,2,inf\n", "The file .*queries.csv: Row 1 has no finite number in column 'c'"),
    ],
)
def test_without_an_encoding_queries_are_finite_numbers_in_as_many_columns_as_the_model_takes(
    text: str, said: str | None
) -> None:
    path = written(text, "queries.csv")
    with pytest.raises(InvalidInput, match=said) if said else contextlib.nullcontext():
        assert read_queries(path, encoding=None, width=3).tolist() == [[1, 2, 3], [4, 5, -6.5]]


PEOPLE_FRAME = pd.DataFrame(
    {
        " age": [30.0, None, 95.0, 40.0, 20.0],
        "sex ": ["f", "m", "x", None, "f"],
        "gain": [10, 0, 1000, None, 5],
        "ill": ["yes", "no", "no", "yes", "no"],
    }
)
FRAME_SCHEMA = Schema.from_dict({**DECLARED, "ignore": []})


def frames() -> dict[str, Any]:
    """The same people as frames of several libraries, and as types of them."""
    rows = PEOPLE_FRAME.rename(columns=str.strip)
    return {
        "pandas": PEOPLE_FRAME,
        "pandas nullable": rows.convert_dtypes(),
        "pandas arrow": rows.convert_dtypes(dtype_backend="pyarrow"),
        "pandas category": rows.astype({"sex": "category", "ill": "category"}),
        "pandas index": rows.set_axis([5, 5, 1, 0, 9]),
        "arrow": pyarrow.Table.from_pandas(rows),
        "arrow batch": pyarrow.RecordBatch.from_pandas(rows),
        "polars": polars.from_arrow(pyarrow.Table.from_pandas(rows)),
        "polars categories": polars.DataFrame(
            rows.astype(object).where(rows.notna(), None).to_dict("list")
        ).with_columns(
            polars.col("sex").cast(polars.Categorical), polars.col("ill").cast(polars.Enum(["no", "yes"]))
        ),
    }


@pytest.mark.parametrize("kind", frames())
def test_every_kind_of_frame_gives_the_same_records(kind: str) -> None:
    records = encode_table(frames()[kind], FRAME_SCHEMA)
    np.testing.assert_allclose(records.features, FEATURES, rtol=1e-6)
    assert records.labels.tolist() == LABELS


@pytest.mark.parametrize(
    "labels",
    [
        ["yes", "no", "no", "yes", "no"],
        np.array(["yes", "no", "no", "yes", "no"]),
        pd.Series(["yes", "no", "no", "yes", "no"], index=[9, 8, 7, 6, 5]),
        pd.Categorical(["yes", "no", "no", "yes", "no"]),
        polars.Series(["yes", "no", "no", "yes", "no"]),
        pyarrow.array(["yes", "no", "no", "yes", "no"]),
    ],
    ids=lambda labels: type(labels).__module__ + "." + type(labels).__name__,
)
def test_labels_may_be_given_beside_the_frame(labels: Any) -> None:
    frame = PEOPLE_FRAME.drop(columns="ill")
    records = encode_table(frame, FRAME_SCHEMA, y=labels)
    assert records.labels.tolist() == LABELS
    assert encode_table(PEOPLE_FRAME.assign(ill="no"), FRAME_SCHEMA, y=labels).labels.tolist() == LABELS
    unnamed = encode_table(frame, replace(FRAME_SCHEMA, label=None), y=labels)
    assert (unnamed.labels.tolist(), unnamed.encoding.label) == (LABELS, "label")


def test_a_frame_and_labels_that_do_not_fit_are_rejected() -> None:
    frame = PEOPLE_FRAME
    for y in (["yes"], [["yes"]] * 5, pd.DataFrame({"ill": LABELS})):
        assert "y must" in problem_of(InvalidInput, encode_table, frame, FRAME_SCHEMA, y=y)
    assert "label column" in problem_of(InvalidInput, encode_table, frame, replace(FRAME_SCHEMA, label=None))
    assert "got ndarray" in problem_of(InvalidInput, as_frame, np.eye(2))
    assert "several columns named 'age'" in problem_of(
        InvalidInput, as_frame, pd.DataFrame([[1, 2]], columns=["age", "age "])
    )
    strange = polars.DataFrame({"x": [object()]}, schema={"x": polars.Object})
    assert "Arrow cannot represent" in problem_of(InvalidInput, as_frame, strange)


def test_a_frame_of_arrow_columns_keeps_their_types_and_can_be_cut() -> None:
    days = pyarrow.array([18_000, None, 19_000], pyarrow.int32()).view(pyarrow.date32())
    table = pyarrow.table({"day": days, "word": pyarrow.array(["a", "b", None]).cast(pyarrow.string_view())})
    frame = as_frame(table)
    assert [str(kind) for kind in frame.dtypes] == ["date32[day][pyarrow]", "large_string[pyarrow]"]
    assert as_strings(frame[1:]["day"]).tolist() == ["", "2022-01-08"]
    assert as_strings(frame.take([2, 0])["word"]).tolist() == ["", "a"]
    pyarrow.parquet.write_table(table, Path("days.parquet"))
    assert as_strings(read_table(Path("days.parquet")).frame["day"]).tolist() == [
        "2019-04-14",
        "",
        "2022-01-08",
    ]


MESSY = (
    "\ufeff Kunde , Âge,Einkommen (€), Région ,Raucher,Beitritt,PLZ,leer,Gekündigt \r\n"
    'k1,30,"1.234,50",Nord,Y,31.01.2020,01234,,Ja\r\n'
    'k1, 31 ,"12,5",NORD,n,1.2.2020,1234,,nein\r\n'
    "k2,NA,?,süd,TRUE,,01234,,JA\r\n"
    'k3,-999,"999.999.999",Île,,29.02.2020,,,Nein\r\n'
)
MESSY_SCHEMA = Schema(
    label="Gekündigt",
    classes=("nein", "ja"),
    bounds={"Âge": (0, 100), "Einkommen (€)": (0, 2469)},
    categories={"Région": ("nord", "süd")},
    dates={"Beitritt": ("2020-01-01", "2020-02-10")},
    date_formats={"Beitritt": "%d.%m.%Y"},
    booleans=("Raucher",),
    decimal={"Einkommen (€)": ","},
    thousands={"Einkommen (€)": "."},
    hashed={"PLZ": 4},
    ignore=("leer",),
    ignore_case=("Région", "Gekündigt"),
    missing_values={"Âge": ("-999",)},
    crosses=(("Région", "Raucher"),),
    person="Kunde",
)


def test_a_messy_text_file_is_read_cell_by_cell_as_declared() -> None:
    records = _read_records(written(MESSY), MESSY_SCHEMA)
    columns = dict(zip(records.encoding.feature_names, records.features.T.tolist(), strict=True))
    assert columns["Âge"] == pytest.approx([0.3, 0.31, 0, 0])
    assert columns["Âge missing"] == [0, 0, 1, 1]
    assert columns["Einkommen (€)"] == pytest.approx([0.5, 12.5 / 2469, 0, 1])
    assert columns["Région=nord"] == [1, 1, 0, 0]
    assert (columns["Raucher=yes"], columns["Raucher missing"]) == ([1, 0, 1, 0], [0, 0, 0, 1])
    assert columns["Beitritt"] == pytest.approx([30 / 40, 31 / 40, 0, 1])
    zips = np.array([columns[f"PLZ#{bucket}"] for bucket in range(4)]).T
    assert zips.sum(axis=1).tolist() == [1, 1, 1, 0]
    assert zips[0].tolist() == zips[2].tolist()
    assert records.labels.tolist() == [1, 0, 1, 0]
    assert (records.persons.tolist(), records.unit) == (["k1", "k1", "k2", "k3"], "person")
    encoding = records.encoding
    assert (encoding.person, encoding.crosses) == ("Kunde", (("Région", "Raucher"),))
    assert "Kunde" not in {column.name for column in encoding.columns}


AGE = DECLARED["bounds"]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"bounds": {"agee": (0, 1)}}, "no column 'agee'"),
    ({"bounds": {**AGE, "sex": (0, 1)}}, "'sex' is declared more than once"),
    ({"bounds": {**AGE, "ill": (0, 1)}}, "'ill' is declared more than once"),
    ({"ignore": ["name", "nobody"]}, "no column 'nobody'"),
    ({"person": "passport"}, "no column 'passport'"),
    ({"label": None}, "label must name"),
    ({"booleans": ["age", "sex"]}, "'age' is declared more than once"),
    ({"booleans": ["name"], "person": "name"}, "'name' is declared more than once"),
    ({"dates": {"ill": ("2020-01-01", "2020-02-10")}}, "'ill' is declared more than once"),
    ({"scales": {"sex": "log"}}, "'sex' is named in `scales`, which is for columns in `bounds` only"),
    ({"units": {"sex": "€"}}, "'sex' is named in `units`"),
    ({"date_formats": {"age": "%Y"}}, "'age' is named in `date_formats`"),
    (
        {"ignore_case": ["age"]},
        "'age' is named in `ignore_case`, which is for columns in `categories` or `hashed`",
    ),
    ({"crosses": [("age", "nobody")]}, "no column 'nobody'"),
    ({"crosses": [("age", "name")]}, "crosses must be"),
    ({"hashed": {"nobody": 4}}, "no column 'nobody'"),
    ({"missing_values": {"nobody": ["1"]}}, "no column 'nobody'"),
    ({"encoding": "one-hot"}, "encoding applies only to registered data sets"),
]


@pytest.mark.parametrize(("options", "said"), WRONG)
def test_declarations_that_are_wrong_or_do_not_fit_the_columns_are_rejected(
    options: dict[str, Any], said: str
) -> None:
    # A column that a case declares anew is not ignored.
    anew = "name" in {name for key in ("booleans", "dates") for name in options.get(key, ())}
    free: dict[str, Any] = {"ignore": []} if anew else {}
    path = written()
    assert said in problem_of(InvalidInput, load, path, **{**DECLARED, **free, **options})


def test_names_of_people_may_match_in_any_case() -> None:
    text = "who,x,y\n C0,1,0\nc0,2,1\nC1,3,0\nc 0,4,1\n"
    schema = Schema(label="y", classes=("0", "1"), bounds={"x": (0, 9)}, person="who")
    folded = replace(schema, ignore_case=("who",))
    for chosen, names in ((schema, ["C0", "c0", "C1", "c 0"]), (folded, ["c0", "c0", "c1", "c 0"])):
        records = _read_records(written(text), chosen)
        assert records.persons.tolist() == names
        encoding = records.encoding
        assert encoding.person_ignores_case == (chosen is folded)
        assert Encoding.from_json(encoding.to_json()) == encoding


def test_a_schema_may_still_ignore_a_column_without_a_name() -> None:
    expect_people(written(PEOPLE.replace("\n", ",\n")))
    ignored = {**DECLARED, "ignore": ["name", ""]}
    assert len(load_records(written(), **ignored)) == 5


def test_free_text_that_nothing_is_declared_about_is_refused_with_a_hint() -> None:
    rows = "".join(f"asked on day {row} about her loan,{row % 7},{row % 2}\n" for row in range(60))
    path = written(f"note,size,y\n{rows}")
    message = problem_of(InvalidInput, load, path, label="y", classes=2)
    assert "`text` or `ignore` for 'note', 'size'" in message
    assert "'note': this seems to be free text" in message
    assert "`hashed`" in message
    message = problem_of(InvalidInput, load, path, label="y", classes=2, ignore=["note"])
    assert "free text" not in message


def test_a_missing_file_is_named_before_a_missing_label() -> None:
    absent, present = Path("absent.csv"), Path("present.csv")
    present.write_text("age,ill\n30,no\n", encoding="utf-8")
    with pytest.raises(DataUnavailable, match="does not exist"):
        _read_records(absent, Schema())
    with pytest.raises(
        InvalidInput, match=r"label must name .* 'quietmax schema draft .*present\.csv' proposes"
    ):
        _read_records(present, Schema())


def test_inferring_warns_of_names_of_persons_by_the_name_alone() -> None:
    table = pd.DataFrame({"patient": [1, 1, 2, 3], "age": [1, 2, 3, 4], "ill": ["no", "yes", "no", "yes"]})
    with pytest.warns(QuietmaxWarning, match="'patient': the name says") as caught:
        records = encode_table(table, Schema(label="ill"), infer=True)
    assert records.unit == "record"
    assert len(caught) == 1
    other = table.assign(patient=[7, 8, 9, 9])
    with pytest.warns(QuietmaxWarning) as again:
        encode_table(other, Schema(label="ill"), infer=True)
    assert str(again[0].message) == str(caught[0].message), "no value has a part in it"
    declared = {"bounds": {"patient": (0, 9)}}, {"person": "patient"}, {"ignore": ("patient",)}
    for facts in declared:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            encode_table(table, Schema(label="ill", **facts), infer=True)

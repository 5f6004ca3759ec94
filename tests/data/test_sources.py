"""Rows that are read part by part: the same records as in one piece, and errors that name the file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quietmax.data import sources
from quietmax.data.records import Records, hold_out
from quietmax.data.schema import Schema
from quietmax.data.sources import TextPart, read_table
from quietmax.data.tables import TableRows, encode_table, encoded_rows, table_rows
from quietmax.errors import DataUnavailable, InvalidData, InvalidInput

SCHEMA = Schema(
    label="ill",
    classes=("no", "yes"),
    bounds={"age": (0, 100), "pay": (0, 120)},
    categories={"job": ("a", "b", "c")},
    person="who",
)


def people(rows: int = 200, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "who": [f"p{number}" for number in rng.integers(80, size=rows)],
            "age": rng.integers(0, 100, rows),
            "pay": rng.normal(50, 20, rows).round(2),
            "job": rng.choice(["a", "b", "c"], rows),
            "ill": rng.choice(["no", "yes"], rows),
        }
    )


def joined(rows: TableRows, at_once: int | None = None) -> tuple[np.ndarray, np.ndarray, list[str]]:
    parts = list(rows.records(at_once))
    persons = [name for part in parts for name in (part.persons if part.persons is not None else ())]
    return (
        np.concatenate([part.features for part in parts]),
        np.concatenate([part.labels for part in parts]),
        persons,
    )


def assert_same(rows: TableRows, expected: Records, at_once: int | None = None) -> None:
    features, labels, persons = joined(rows, at_once)
    np.testing.assert_array_equal(features, expected.features)
    np.testing.assert_array_equal(labels, expected.labels)
    assert persons == expected.persons.tolist()


def parquet_folder(folder: Path, frame: pd.DataFrame, files: int) -> Path:
    folder.mkdir(exist_ok=True)
    for number, part in enumerate(np.array_split(np.arange(len(frame)), files)):
        frame.iloc[part].to_parquet(folder / f"part-{number:02}.parquet", index=False)
    return folder


@pytest.mark.parametrize("at_once", [None, 1, 7, 1000])
def test_every_source_gives_the_records_of_the_table_in_one_piece(at_once: int | None) -> None:
    frame = people(30 if at_once == 1 else 200)  # a part of one row takes as long as a large one
    expected = encode_table(frame, SCHEMA)
    folder = parquet_folder(Path("people"), frame, 5)
    frame.to_csv(Path("people.csv"), index=False)
    frame.to_csv(Path("people.tsv"), index=False, sep="\t")
    for source in (
        frame,
        pa.Table.from_pandas(frame),
        folder,
        str(folder),
        str(folder / "*.parquet"),
        Path("people.csv"),
        Path("people.tsv"),
        pa.Table.from_pandas(frame).to_reader(),
    ):
        rows = table_rows(source, SCHEMA)
        assert rows.encoding == expected.encoding
        assert_same(rows, expected, at_once)


def test_only_the_needed_columns_and_no_hidden_files_are_read() -> None:
    frame = people()
    folder = parquet_folder(Path("people"), frame.assign(note="text"), 2)
    (folder / "_SUCCESS.csv").write_text("")
    (folder / ".hidden.parquet").write_text("")
    (folder / "readme.txt").write_text("")
    schema = SCHEMA.updated({"ignore": ("note",)})
    assert_same(table_rows(folder, schema), encode_table(frame, SCHEMA))
    columns = next(table_rows(folder, schema).parts[0]._frames(["age"], 10)).columns
    assert columns.tolist() == ["age"]


def test_the_two_sides_of_a_holdout_are_those_of_the_whole_table() -> None:
    frame = people()
    folder = parquet_folder(Path("people"), frame, 4)
    split = hold_out(encode_table(frame, SCHEMA), 0.3, seed=5)
    rows = table_rows(folder, SCHEMA, holdout=0.3, seed=5)
    assert_same(rows.train, split.train, 9)
    assert_same(rows.test, split.test, 9)
    assert all(part.holdout == split.holdout for part in rows.train.records())


def test_the_number_of_rows_is_known_where_the_source_states_it() -> None:
    frame = people(30)
    folder = parquet_folder(Path("people"), frame, 3)
    frame.to_csv(Path("people.csv"), index=False)
    counts = [table_rows(source, SCHEMA).count() for source in (frame, folder, Path("people.csv"))]
    assert counts == [30, 30, None]


# --- Errors -----------------------------------------------------------------------------------------------------------


def folder_of_fifty() -> tuple[Path, Path]:
    """Fifty files, and the one that a test damages."""
    folder = parquet_folder(Path("people"), people(500), 50)
    return folder, folder / "part-37.parquet"


def change(file: Path, **columns: object) -> None:
    frame = pd.read_parquet(file)
    frame.assign(**columns).to_parquet(file, index=False)


def error_of(folder: Path, schema: Schema = SCHEMA) -> str:
    with pytest.raises((InvalidData, DataUnavailable)) as caught:
        list(table_rows(folder, schema).records())
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.__cause__ is None
    return message


def without_age(file: Path) -> None:
    pd.read_parquet(file).drop(columns="age").to_parquet(file, index=False)


def cut(kept: float) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(file.read_bytes()[: int(kept * file.stat().st_size)])


def zeros_inside(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[4:400] = bytes(396)
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without_age, "{} has no column 'age', which the first file has."),
        (
            lambda file: change(file, note="secret"),
            "{} has a column 'note', which the first file does not have.",
        ),
        (
            lambda file: change(file, age=[f"secret {number}" for number in range(10)]),
            "{} has column 'age' of type large_string, but in an earlier file it is of type int64; all files must have "
            "the same type.",
        ),
        (
            lambda file: change(file, age=np.arange(10.0)),
            "{} has column 'age' of type double, but in an earlier file it is of type int64; all files must have the "
            "same type.",
        ),
        *((cut(kept), "{}") for kept in (0, 0.01, 0.5, 0.9)),
        (zeros_inside, "{}"),
    ],
)
def test_a_file_that_differs_from_the_others_or_is_damaged_is_named(
    damage: Callable[[Path], object], said: str
) -> None:
    folder, file = folder_of_fifty()
    encoding = table_rows(folder, SCHEMA).encoding
    assert len(joined(encoded_rows(folder, encoding))[1]) == 500
    damage(file)
    expected = said.format(f"The file {file}")
    message = error_of(folder)
    assert message == expected if "column" in said else expected in message
    if said == "{}":
        return
    with pytest.raises(InvalidData, match=re.escape(expected)):
        encoded_rows(folder, encoding)


def test_a_cell_that_cannot_be_read_is_named_by_file_and_row(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = parquet_folder(Path("people"), people(400), 2)
    file = folder / "part-01.parquet"
    labels = pd.read_parquet(file)["ill"].tolist()
    labels[129] = "secret"
    change(file, ill=labels)
    monkeypatch.setattr(sources, "_MOST_ROWS_AT_ONCE", 64)  # row 130 is the second of the third frame
    message = error_of(folder)
    assert message.startswith(f"The file {file}: Row 130 has a label outside the classes in column 'ill'")
    assert "secret" not in message


def test_a_row_of_a_text_file_is_counted_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["who,age,pay,job,ill", *(f"p{number},{number % 90},1.5,a,no" for number in range(200))]
    lines[141] = "p140,old,1.5,a,no"
    Path("people.csv").write_text("\n".join(lines))
    monkeypatch.setattr(sources, "_MOST_ROWS_AT_ONCE", 64)
    message = error_of(Path("people.csv"))
    assert message.startswith("The file people.csv: Row 141 has no number")
    lines[141] = "p140,40,1.5,a"
    Path("people.csv").write_text("\n".join(lines))
    message = error_of(Path("people.csv"))
    assert message.startswith("In the file people.csv, row 141 (not counting the header)")


def test_types_that_are_read_alike_and_the_order_of_columns_may_differ_and_a_file_may_have_no_rows() -> None:
    frame = people(30)
    folder = parquet_folder(Path("people"), frame, 3)
    file = folder / "part-01.parquet"
    pd.read_parquet(file)[[*reversed(frame.columns)]].to_parquet(file, index=False)
    frame.iloc[:0].to_parquet(folder / "part-03.parquet", index=False)
    assert_same(table_rows(folder, SCHEMA), encode_table(frame, SCHEMA))
    change(file, job=pd.read_parquet(file)["job"].astype("category"))
    assert_same(table_rows(folder, SCHEMA), encode_table(frame, SCHEMA))
    change(file, pay=[None] * 10)
    features, _, _ = joined(table_rows(folder, SCHEMA))
    expected = frame.assign(pay=frame["pay"].where((frame.index < 10) | (frame.index >= 20)))
    np.testing.assert_array_equal(features, encode_table(expected, SCHEMA).features)


def test_paths_that_name_nothing_are_errors(tmp_path: Path) -> None:
    for path in (Path("absent"), "*.parquet"):
        with pytest.raises(DataUnavailable, match="There is no file or folder"):
            table_rows(path, SCHEMA)
    with pytest.raises(DataUnavailable, match="has no file that ends in"):
        table_rows(tmp_path, SCHEMA)
    Path("people.json").write_text("{}")
    with pytest.raises(InvalidInput, match=r"must end in one of .*, got '\.json'"):
        table_rows(Path("people.json"), SCHEMA)


def test_everything_must_be_declared() -> None:
    folder = parquet_folder(Path("people"), people(20), 2)
    schema = Schema(label="ill", classes=("no", "yes"), bounds={"age": (0, 100)}, person="who")
    with pytest.raises(InvalidInput, match=r"part-00.parquet: .*'pay', 'job'"):
        table_rows(folder, schema)
    with pytest.raises(InvalidInput, match="label must name the label column"):
        table_rows(folder, Schema(classes=("no", "yes")))
    with pytest.raises(InvalidInput, match="leave out `y`"):
        table_rows(folder, SCHEMA, y=["no"] * 20)


# --- Text files in parts ----------------------------------------------------------------------------------------------


def frame_in_parts(file: Path, rows: int) -> pd.DataFrame:
    part = TextPart(file)
    return pd.concat(list(part._frames([*part._types()], rows)), ignore_index=True)


CELLS = st.text(st.sampled_from('ab," \n\r;\t0é'), max_size=6)


@given(
    st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=12),
    st.integers(1, 12),
    st.sampled_from(["\n", "\r\n"]),
)
def test_any_table_written_as_csv_is_read_alike_in_parts(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], at_once: int, end: str
) -> None:
    file = tmp_path_factory.mktemp("text") / "table.csv"
    pd.DataFrame(rows, columns=["one", "two"]).to_csv(file, index=False, quoting=1, lineterminator=end)
    pd.testing.assert_frame_equal(frame_in_parts(file, at_once), read_table(file).frame)


def test_a_file_without_values_does_not_decide_about_types() -> None:
    frame = people(30)
    folder = Path("people")
    folder.mkdir()
    frame.iloc[:0].astype(object).to_parquet(folder / "0.parquet", index=False)
    frame.assign(job=None).iloc[:10].to_parquet(folder / "1.parquet", index=False)
    frame.iloc[10:].to_parquet(folder / "2.parquet", index=False)
    rows = table_rows(folder, SCHEMA)
    assert rows.encoding == table_rows(folder / "2.parquet", SCHEMA).encoding
    assert_same(rows, encode_table(frame.assign(job=[None] * 10 + frame["job"].tolist()[10:]), SCHEMA))
    # In another type, the same people may have other names.
    frame.assign(who=range(30)).to_parquet(folder / "3.parquet", index=False)
    assert error_of(folder).startswith(f"The file {folder / '3.parquet'} has column 'who' of type int64")


def test_names_in_a_dictionary_are_names_of_the_same_type() -> None:
    frame = people(40)
    folder = parquet_folder(Path("people"), frame, 2)
    encoding = table_rows(folder, SCHEMA).encoding
    change(folder / "part-00.parquet", who=frame["who"][:20].astype("category"))
    assert table_rows(folder, SCHEMA).encoding == encoding
    assert table_rows(pyarrow.parquet.read_table(folder / "part-00.parquet"), SCHEMA).encoding == encoding
    assert_same(encoded_rows(folder, encoding), encode_table(frame, SCHEMA))


def test_a_file_that_is_gone_when_its_rows_are_counted_is_named() -> None:
    folder, file = folder_of_fifty()
    rows = table_rows(folder, SCHEMA)
    file.write_bytes(b"")
    with pytest.raises(InvalidData, match=f"{file.name} is damaged"):
        rows.count()
    file.unlink()
    with pytest.raises(DataUnavailable, match=f"{file.name} cannot be read"):
        rows.count()

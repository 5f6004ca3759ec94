"""The SQL statement gives the answers of the model folder, or none, in three real databases."""

from __future__ import annotations

import json
import sqlite3
import sys
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pytest
import sqlglot

import quietmax as qm
from quietmax.data.schema import Schema
from quietmax.errors import DataUnavailable, InvalidInput
from quietmax.estimators.serialization import open_private, save_private
from quietmax.export import tables as statements
from quietmax.export.tables import DIALECTS, export_sql
from tests.export.people import random_rows, readable_rows, train, unreadable

TOLERANCE = 1e-9
EXPONENTS = {"code": {"1e0", "10E-1", "5e-1", "30e-1", "1e5", "0e12"}, "smoker": {"1e0"}}
"""Cells that Quietmax reads, but no function that all databases have."""


def answers(
    dialect: str, text: str, rows: pd.DataFrame, types: dict[str, str] | None = None, address: str = ""
) -> pd.DataFrame:
    """Return what a database makes of a statement on a table `people`, in the order of the column `id`."""
    kinds = {"f": "double precision", "i": "bigint"}
    columns = {name: (types or {}).get(name, kinds.get(rows[name].dtype.kind, "text")) for name in rows}
    quoted = [f'"{str(name).replace(chr(34), chr(34) * 2)}"' for name in columns]
    described = ", ".join(f"{name} {kind}" for name, kind in zip(quoted, columns.values(), strict=True))
    create = f"CREATE TABLE people ({described})"
    if dialect == "postgres":
        import psycopg

        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute(create)
            with connection.cursor().copy("COPY people FROM STDIN") as copied:
                for row in rows.itertuples(index=False):
                    copied.write_row(row)
            cursor = connection.execute(text)
            found = pd.DataFrame(cursor.fetchall(), columns=[each.name for each in cursor.description or ()])
    elif dialect == "sqlite":
        lines = sqlite3.connect(":memory:")
        lines.execute(create)
        marks = ", ".join("?" * len(columns))
        lines.executemany(f"INSERT INTO people VALUES ({marks})", rows.astype(object).values.tolist())
        found = pd.read_sql(text, lines)
    else:
        database = duckdb.connect()
        database.execute(create)
        database.register("given", rows)
        database.execute("INSERT INTO people SELECT * FROM given")
        found = database.execute(text).df()
    return found.sort_values("id").reset_index(drop=True)


def probabilities(found: pd.DataFrame, model: Any) -> np.ndarray:
    return found[[f"probability of {name}" for name in model.classes]].to_numpy(np.float64)


@pytest.fixture(scope="module")
def many_rows(table_head: Path) -> tuple[pd.DataFrame, Any, np.ndarray]:
    """Rows with cells of all sorts, the model, and its probabilities; NaN for rows that it refuses."""
    rows, model = random_rows(13_500, seed=5), open_private(table_head)
    expected, read = np.full((len(rows), len(model.classes)), np.nan), ~unreadable(rows)
    expected[read] = model.predict_proba(model.encode(rows[read]))
    assert (expected[read].argmax(axis=1) == model.predict(model.encode(rows[read]))).all()
    return rows.reset_index(names="id"), model, expected


@pytest.mark.parametrize("dialect", ["duckdb", "postgres", "sqlite"])
def test_ten_thousand_rows_get_the_class_and_the_probabilities_of_the_folder(
    dialect: str, table_head: Path, many_rows: Any, request: pytest.FixtureRequest
) -> None:
    address = request.getfixturevalue("postgres_address") if dialect == "postgres" else ""
    rows, model, expected = many_rows
    found = answers(dialect, export_sql(table_head, None, dialect, keep=["id"]), rows, address=address)
    assert (found["id"] == rows["id"]).all()
    shares = probabilities(found, model)
    unsure = np.any([rows[name].str.strip().isin(cells) for name, cells in EXPONENTS.items()], axis=0)
    # A column of dates also takes ISO 8601, whatever its format: so the text of the type DATE looks.
    iso = (rows["left"] == "2000-01-01").to_numpy()
    refused = unreadable(rows.assign(left=rows["left"].mask(iso, "")))
    assert (found["prediction"].isna() == (refused | unsure)).all()
    assert (np.isnan(shares).all(axis=1) == (refused | unsure)).all()
    answered = ~(refused | unsure | iso)
    assert answered.sum() > 10_000
    assert np.abs(shares - expected)[answered].max() <= TOLERANCE
    classes = np.array(model.classes)[expected.argmax(axis=1)]
    assert (found["prediction"] == classes)[answered].all()
    assert len(set(classes[answered])) > 1


@pytest.mark.parametrize("dialect", ["duckdb", "postgres"])
def test_columns_of_other_types_are_read_like_their_text(
    dialect: str, table_head: Path, request: pytest.FixtureRequest
) -> None:
    address = request.getfixturevalue("postgres_address") if dialect == "postgres" else ""
    rows = readable_rows(300, seed=8).reset_index(names="id")
    generator = np.random.default_rng(0)
    rows["age"], rows["code"] = generator.integers(-5, 120, 300), generator.integers(-4, 5, 300)
    rows["smoker"] = generator.choice(["true", "false"], 300)
    for name in ("joined", "left"):
        days = pd.Timestamp("2001-01-01") + pd.to_timedelta(generator.integers(0, 12_000, 300), unit="D")
        rows[name] = days.strftime("%Y-%m-%d") + (" 08:30:00" if name == "joined" else "")
    types = {"age": "decimal(9, 3)", "smoker": "boolean", "joined": "timestamp", "left": "date"}
    found = answers(dialect, export_sql(table_head, None, dialect, keep=["id"]), rows, types, address)
    model = open_private(table_head)
    typed = rows.assign(left=pd.to_datetime(rows["left"]).dt.strftime("%d.%m.%Y"))
    assert np.abs(probabilities(found, model) - model.predict_proba(model.encode(typed))).max() <= TOLERANCE


def test_sqlite_takes_no_string_for_the_number_0(table_head: Path) -> None:
    rows = (
        pd.concat([readable_rows(1, seed=8)] * 5, ignore_index=True).assign(code="2").reset_index(names="id")
    )
    rows["age"] = pd.Series([None, "", "NA", "twelve", 0.0], dtype=object)
    found = answers("sqlite", export_sql(table_head, None, "sqlite", keep=["id"]), rows, {"age": ""})
    shares = found["probability of nie"]
    assert shares[0] == shares[1] == shares[2] != shares[4]
    assert found.loc[3, ["prediction", "probability of nie"]].isna().all()


@pytest.mark.parametrize("classes", [2, 3])
def test_the_answer_follows_the_costs_of_errors_and_the_calibrated_scale(
    tmp_path: Path, classes: int
) -> None:
    rng, names = np.random.default_rng(0), ("low", "middle", "high")[:classes]
    rows = pd.DataFrame({"a": rng.random(3000)})
    number = rows["a"] * classes + 0.5 * rng.standard_normal(3000)
    rows["y"] = np.array(names)[number.clip(0, classes - 0.5).astype(int)]
    schema = Schema(label="y", classes=names, bounds={"a": (0, 1)})
    settings = qm.HeadSettings(calibration=0.03)
    head = qm.PrivateHead(epsilon=5.0, schema=schema, declared_size=3000, settings=settings).fit(rows)
    plain = head.predict(rows)
    head.decide(cost={("middle", "low"): 20, ("low", "middle"): 0.5})
    assert head.scale_ != 1.0
    folder = save_private(head, tmp_path / "model", dataset="made up")
    rows = rows.reset_index(names="id")
    text = export_sql(folder, None, "duckdb", keep=["id"])
    found = answers("duckdb", text, rows)
    assert found["prediction"].tolist() == head.predict(rows).tolist() != plain.tolist()
    assert np.abs(probabilities(found, open_private(folder)) - head.predict_proba(rows)).max() <= TOLERANCE
    assert "middle if its" in text if classes == 2 else "the class with the lowest expected cost" in text


def test_reasons_add_up_to_the_scores(table_head: Path) -> None:
    rows, model = (
        readable_rows(200, seed=2).assign(code="2").reset_index(names="id"),
        open_private(table_head),
    )
    found = answers("duckdb", export_sql(table_head, None, "duckdb", keep=["id"], reasons=True), rows)
    expected = model.additive().contributions(model.encode(rows))
    for place, name in enumerate(model.classes):
        given = found[
            [f"contribution of {summand} to {name}" for summand in model.additive().summands]
        ].to_numpy()
        assert np.array_equal(given, expected[:, :, place])


def test_names_and_categories_with_signs_of_sql_stay_names_and_categories(tmp_path: Path) -> None:
    column, values = 'we"ird; -- `$', ("it's", "a\nb", 'q"', "\\", "{{ x }}", "--")
    generator = np.random.default_rng(0)
    rows = pd.DataFrame({column: generator.choice([*values, "other"], 400)})
    rows["y\n"] = np.where(rows[column] == "--", "yes'\n; DROP TABLE people", "no")
    classes = ("no", "yes'\n; DROP TABLE people")
    schema = Schema(label="y", classes=classes, categories={column: values})
    rows = rows.rename(columns={"y\n": "y"})
    head = qm.PrivateHead(epsilon=8.0, schema=schema, declared_size=400).fit(rows)
    folder = save_private(head, tmp_path / "model", dataset="x\nSELECT 1")
    for dialect in ("duckdb", "sqlite"):
        text = export_sql(folder, None, dialect, keep=["id"])
        found = answers(dialect, text, rows.reset_index(names="id"))
        assert found["prediction"].tolist() == head.predict(rows).tolist()
    comment = text[: text.index("WITH qm_rows")]
    assert all(line.startswith("-- ") for line in comment.splitlines())


def _trained(folder: Path, cell: str, settings: qm.HeadSettings | None = None, **declared: Any) -> Path:
    rows = pd.DataFrame({"a": [cell, ""] * 200, "y": ["no", "yes"] * 200})
    schema = Schema(label="y", classes=("no", "yes"), **declared)
    head = qm.PrivateHead(epsilon=8.0, schema=schema, declared_size=400, settings=settings).fit(rows)
    return save_private(head, folder, dataset="made up")


@pytest.fixture(scope="module")
def small_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dates = {"a": ("2000-01-01", "2024-01-01")}
    return _trained(tmp_path_factory.mktemp("small") / "model", "2001-01-01", dates=dates)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_reads_its_statement_and_has_the_guarantee_on_top(
    small_head: Path, dialect: str, tmp_path: Path
) -> None:
    table = "`my data`.people" if dialect == "bigquery" else '"my data".people'
    text = export_sql(small_head, tmp_path / "head.sql", dialect, table=table)
    assert (tmp_path / "head.sql").read_text("utf-8") == text
    parsed = sqlglot.parse(text, read=dialect)
    assert len(parsed) == 1
    assert {each.name for each in parsed[0].find_all(sqlglot.exp.Table) if each.db} == {"people"}
    guarantee = open_private(small_head).guarantee
    for line in (guarantee.summary, *guarantee.in_words("everything computed from this model")):
        assert f"-- {line}" in text
    assert ("MATERIALIZED" in text) == (dialect not in ("bigquery", "snowflake"))
    assert json.loads((small_head / "model.json").read_text())["dataset"] in text


@pytest.mark.parametrize(
    ("declared", "problem"),
    [
        ({"hashed": {"a": 8}}, r"Column 'a' .* no operator for hashes \(BLAKE2b\)"),
        ({"dates": {"a": ("2000-01-01 00:00:00", "2024-01-01 00:00:00")}}, "without the time of day"),
        (
            {"dates": {"a": ("2000-01-01", "2024-01-01")}, "date_formats": {"a": "%Y-%d-%m"}},
            "only dates such as",
        ),
        (
            {"dates": {"a": ("2000-01-01", "2024-01-01")}, "settings": qm.HeadSettings(second_moments=0.0)},
            "sums over columns",
        ),
    ],
    ids=["hashed", "time", "day-before-month", "dense"],
)
def test_what_sql_cannot_say_is_refused_in_one_sentence(tmp_path: Path, declared: Any, problem: str) -> None:
    cell = "2001-01-01 08:00:00" if "00:00" in str(declared) else "2001-01-01"
    folder = _trained(tmp_path / "model", cell, **declared)
    with pytest.raises(InvalidInput, match=problem):
        export_sql(folder, tmp_path / "out.sql", "duckdb")
    assert not (tmp_path / "out.sql").exists()


def test_a_linear_model_of_dpsgd_is_exported_too(tmp_path: Path) -> None:
    folder = train(tmp_path / "model", qm.DPSGD)
    rows, model = readable_rows(200, seed=2).assign(code="2").reset_index(names="id"), open_private(folder)
    found = answers("duckdb", export_sql(folder, None, "duckdb", keep=["id"]), rows)
    assert np.abs(probabilities(found, model) - model.predict_proba(model.encode(rows))).max() <= TOLERANCE


def test_wrong_arguments_large_models_and_missing_packages_are_errors(
    table_head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidInput, match=r"dialect must be one of 'duckdb', .* got 'oracle'"):
        export_sql(table_head, None, "oracle")
    with pytest.raises(InvalidInput, match="no name of a table in duckdb: ''"):
        export_sql(table_head, None, "duckdb", table="")
    with monkeypatch.context() as patched:
        patched.setattr(statements, "_MOST_WEIGHTS", 100)
        with pytest.raises(InvalidInput, match="too large for SQL"):
            export_sql(table_head, None, "duckdb")
    monkeypatch.setitem(sys.modules, "sqlglot", None)
    with pytest.raises(DataUnavailable, match=r"pip install 'quietmax\[sql\]'"):
        export_sql(table_head, None, "duckdb")

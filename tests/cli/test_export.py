from __future__ import annotations

from pathlib import Path

import duckdb
import numpy as np
import onnxruntime
import pandas as pd
import skops.io

import quietmax.mlflow
from quietmax.estimators.serialization import open_private
from quietmax.export.released import TRUSTED
from quietmax.export.tables import export_sql
from tests.cli.conftest import document, printed


def test_one_command_writes_all_formats_and_they_agree(head: Path, queries: Path) -> None:
    places = {"onnx": Path("a.onnx"), "skops": Path("a.skops"), "mlflow": Path("a"), "html": Path("a.html")}
    options = [part for name, place in places.items() for part in (f"--{name}", place)]
    options, places = (
        [*options, "--sql", "duckdb", "-o", "a.sql", "--table", "rows"],
        {**places, "sql": Path("a.sql")},
    )
    told = document("export", head, *options)
    assert told["written"] == {name: str(place) for name, place in places.items()}
    assert told["guarantee"] == open_private(head).guarantee.to_json()
    rows = pd.read_csv(queries)
    session = onnxruntime.InferenceSession(places["onnx"])
    feed = {"age": rows["age"].to_numpy(np.float64), "sex": rows["sex"].to_numpy(object)}
    assert list(session.run(["label"], feed)[0]) == ["lo", "hi"]
    assert list(skops.io.load(places["skops"], trusted=list(TRUSTED)).predict(rows)) == ["lo", "hi"]
    assert list(quietmax.mlflow.load_model(places["mlflow"]).predict(rows)) == ["lo", "hi"]
    database = duckdb.connect()
    database.register("rows", rows)
    assert database.execute(places["sql"].read_text("utf-8")).df()["prediction"].tolist() == ["lo", "hi"]
    assert places["html"].read_text("utf-8").startswith("<!doctype html>")
    assert "Guarantee:" in printed("export", head, "--onnx", places["onnx"])


def test_without_a_file_the_statement_is_all_that_is_printed(head: Path) -> None:
    text = printed("export", head, "--sql", "sqlite", "--keep", "id", "--reasons")
    assert text == export_sql(head, None, "sqlite", keep=["id"], reasons=True)
    told = document("export", head, "--sql", "sqlite")
    assert told["sql"] == export_sql(head, None, "sqlite")
    assert told["written"] == {}

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pandas as pd
import skops.io

import quietmax.mlflow
from quietmax.estimators.serialization import open_private
from quietmax.export.released import TRUSTED
from tests.cli.conftest import Run, assert_error, json_of, output_of


def test_one_command_writes_all_formats_and_they_agree(
    run: Run, head: Path, queries: Path, tmp_path: Path
) -> None:
    places = {"onnx": tmp_path / "a.onnx", "skops": tmp_path / "a.skops", "mlflow": tmp_path / "a"}
    options = [part for name, place in places.items() for part in (f"--{name}", place)]
    told = json_of(run("export", head, *options, "--json"))
    assert told["written"] == {name: str(place) for name, place in places.items()}
    assert told["guarantee"] == open_private(head).guarantee.to_json()
    rows = pd.read_csv(queries)
    session = onnxruntime.InferenceSession(places["onnx"])
    feed = {"age": rows["age"].to_numpy(np.float64), "sex": rows["sex"].to_numpy(object)}
    assert list(session.run(["label"], feed)[0]) == ["lo", "hi"]
    assert list(skops.io.load(places["skops"], trusted=list(TRUSTED)).predict(rows)) == ["lo", "hi"]
    assert list(quietmax.mlflow.load_model(places["mlflow"]).predict(rows)) == ["lo", "hi"]
    out = output_of(run("export", head, "--onnx", places["onnx"]))
    assert "Guarantee:" in out


def test_nothing_to_write_and_unwritable_places_are_errors(run: Run, head: Path, tmp_path: Path) -> None:
    assert_error(run("export", head), 2, "--onnx", "--skops", "--mlflow")
    for option in ("--onnx", "--skops", "--mlflow"):
        assert_error(run("export", head, option, "/proc/none/a"), 1, "/proc/none/a")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    assert_error(run("export", head, "--mlflow", tmp_path / "there"), 2, "already exists")

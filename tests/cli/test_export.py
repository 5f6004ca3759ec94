from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pandas as pd
import skops.io

import quietmax.mlflow
from quietmax.estimators.serialization import open_private
from quietmax.export.released import TRUSTED
from tests.cli.conftest import document, printed


def test_one_command_writes_all_formats_and_they_agree(head: Path, queries: Path) -> None:
    places = {"onnx": Path("a.onnx"), "skops": Path("a.skops"), "mlflow": Path("a")}
    options = [part for name, place in places.items() for part in (f"--{name}", place)]
    told = document("export", head, *options)
    assert told["written"] == {name: str(place) for name, place in places.items()}
    assert told["guarantee"] == open_private(head).guarantee.to_json()
    rows = pd.read_csv(queries)
    session = onnxruntime.InferenceSession(places["onnx"])
    feed = {"age": rows["age"].to_numpy(np.float64), "sex": rows["sex"].to_numpy(object)}
    assert list(session.run(["label"], feed)[0]) == ["lo", "hi"]
    assert list(skops.io.load(places["skops"], trusted=list(TRUSTED)).predict(rows)) == ["lo", "hi"]
    assert list(quietmax.mlflow.load_model(places["mlflow"]).predict(rows)) == ["lo", "hi"]
    assert "Guarantee:" in printed("export", head, "--onnx", places["onnx"])

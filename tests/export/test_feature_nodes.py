"""Feature maps of images have the same features in ONNX."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import quietmax as qm
from quietmax.estimators.serialization import save_private
from quietmax.export.graph import IR_VERSION, OPSET, Graph
from quietmax.export.onnx import map_features, onnx_model
from quietmax.models.features.images import Scattering
from quietmax.models.features.patches import Joined, Mirrored, Patches, Reduced, Turned

MAPS: dict[str, Any] = {
    "scattering": Scattering((2, 12, 13), groups=2),
    "scattering with three scales": Scattering((1, 20, 17), scales=3, angles=4, groups=1, whitening=0.0),
    "scattering with one scale": Scattering((1, 9, 9), scales=1, angles=3, groups=2),
    "patches": Patches((3, 11, 14), cells=2),
    "mirrored": Mirrored(Scattering((1, 12, 13), groups=9)),
    "turned": Turned(Scattering((1, 12, 12), groups=9), degrees=(-10.0, 0.0, 25.0), pairs=32),
    "joined": Joined((Patches((3, 12, 12), cells=1), Mirrored(Scattering((3, 12, 12))))),
    "reduced": Reduced((1, 30, 41), Turned(Scattering((1, 12, 13), groups=9), pairs=0)),
}


@pytest.mark.parametrize("name", MAPS)
def test_the_features_of_images_are_equal(name: str) -> None:
    feature_map = MAPS[name]
    columns = math.prod(feature_map.image_shape)
    records = np.random.default_rng(0).random((40, columns), np.float32)
    records[0], records[1] = 0.0, 1e-6 * records[1]
    graph = Graph(["records", "features"])
    graph.output(map_features(graph, feature_map, "records", columns), "features")
    kind = onnx.TensorProto.FLOAT
    inputs = [onnx.helper.make_tensor_value_info("records", kind, ["rows", columns])]
    outputs = [onnx.helper.make_tensor_value_info("features", kind, ["rows", None])]
    model = onnx.helper.make_model(
        onnx.helper.make_graph(graph.nodes, "map", inputs, outputs, graph.constants),
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
    )
    (features,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"records": records})
    assert np.abs(features - feature_map.transform(records)).max() < 1e-5


def test_a_head_of_images_gives_equal_answers(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    images = generator.random((400, 144), np.float32)
    images[200:, :72] *= 0.2
    labels = np.repeat(["flat", "top"], 200)
    head = qm.PrivateHead(
        epsilon=8.0, features=MAPS["turned"], classes=("flat", "top"), declared_size=400
    ).fit(images, labels)
    folder = save_private(head, tmp_path / "head", dataset="images")
    session = onnxruntime.InferenceSession(onnx_model(folder).SerializeToString())
    label, probabilities = session.run(None, {"features": images})
    assert np.abs(probabilities - head.predict_proba(images)).max() < 1e-4
    assert (label == head.predict(images)).all()

"""ONNX files give the answers of the model folder, or none."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pandas as pd
import pytest

import quietmax as qm
from quietmax.data.schema import Schema
from quietmax.errors import InvalidInput
from quietmax.estimators.head.weights import TableWeights
from quietmax.estimators.serialization import open_private, save_private
from quietmax.export.onnx import (
    IR_VERSION,
    OPSET,
    Graph,
    Value,
    _classify,
    _map_features,
    _onnx_model,
    export_onnx,
)
from quietmax.models.features.generic import Pipeline, RandomFourier
from quietmax.models.features.images import Joined, Mirrored, Patches, Reduced, Scattering, Turned
from quietmax.models.features.tabular import Identity, OneHot, Scaling, TableCells, TableFeatures, UnitNorm
from tests.export.people import CELLS, SCHEMA, random_rows, train, unreadable

TOLERANCE = 1e-6
"""Largest difference between a probability of the folder and of the file, as docs/how-to/export.md states it."""
EXPONENTS = {"code": {"1e0", "10E-1", "5e-1", "30e-1", "1e5"}, "smoker": {"1e0"}}
"""Cells that Quietmax reads, but regular expressions cannot."""


def session(model: Any) -> onnxruntime.InferenceSession:
    content = model.SerializeToString() if isinstance(model, onnx.ModelProto) else Path(model).read_bytes()
    return onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])


def run(model: Any, rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Return labels and probabilities of rows, with the columns as they are."""
    opened = model if isinstance(model, onnxruntime.InferenceSession) else session(model)
    label, probabilities = opened.run(
        None, {each.name: rows[each.name].to_numpy() for each in opened.get_inputs()}
    )
    return label, probabilities


@pytest.fixture(scope="module")
def dense_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `table_head`, with second moments left out by a setting, which asks for features instead of cells."""
    settings = qm.HeadSettings(second_moments=0.0)
    return train(tmp_path_factory.mktemp("dense") / "head", settings=settings)


@pytest.fixture(scope="module")
def file(table_head: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("onnx") / "head.onnx"
    export_onnx(table_head, place)
    return place


@pytest.fixture(scope="module")
def dpsgd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A linear model that DP-SGD trained on the same rows."""
    return train(tmp_path_factory.mktemp("dpsgd") / "model", qm.DPSGD)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network that DP-SGD trained on the same rows."""
    settings = qm.DPSGDSettings(hidden=(6, 4), steps=60)
    return train(tmp_path_factory.mktemp("network") / "model", qm.DPSGD, settings=settings)


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("table_head", TableCells),
        ("dense_head", TableFeatures),
        ("dpsgd", TableCells),
        ("network", TableCells),
    ],
)
def test_thousands_of_rows_get_the_answers_of_the_folder_or_none(
    name: str, features: type, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    table_head, file = request.getfixturevalue(name), tmp_path / "head.onnx"
    export_onnx(table_head, file)
    rows = random_rows(6000, seed=5)
    refused = unreadable(rows)
    unsure = np.any([rows[name].isin(cells) for name, cells in EXPONENTS.items()], axis=0)
    label, probabilities = run(file, rows)
    assert ((label == "") == (refused | unsure)).all()
    assert (np.isnan(probabilities).all(axis=1) == (refused | unsure)).all()
    answered = ~(refused | unsure)
    assert answered.sum() > 1000
    model = open_private(table_head)
    assert type(model.features) is features
    expected = model.predict_proba(model.encode(rows[answered]))
    assert np.abs(probabilities[answered] - expected).max() <= TOLERANCE
    assert (label[answered] == np.array(model.classes)[expected.argmax(axis=1)]).all()
    assert len(set(label[answered])) > 1


def test_reasons_add_up_to_the_score_to_the_last_bit_or_are_nan(table_head: Path, tmp_path: Path) -> None:
    export_onnx(table_head, tmp_path / "head.onnx", reasons=True)
    opened = session(tmp_path / "head.onnx")
    rows = random_rows(3000, seed=6)
    given = {each.name: rows[each.name].to_numpy() for each in opened.get_inputs()}
    label, probabilities, reasons = opened.run(["label", "probabilities", "reasons"], given)
    model = open_private(table_head)
    names = json.loads(opened.get_modelmeta().custom_metadata_map["reasons"])
    assert names == list(model.additive().summands)
    assert reasons.shape == (3000, len(names), 3)
    answered = label != ""
    assert 500 < answered.sum() < 3000
    assert np.isnan(reasons[~answered]).all()
    scores = np.cumsum(reasons[answered], axis=1)[:, -1]
    records = model.encode(rows[answered])
    assert np.array_equal(scores, model.classifier.scores(model.features.transform(records)))
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    expected = exponentials / exponentials.sum(axis=1, keepdims=True)
    assert np.abs(probabilities[answered] - expected).max() <= TOLERANCE


def test_only_sums_over_columns_are_exported_with_reasons(dense_head: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="sums over columns"):
        export_onnx(dense_head, tmp_path / "head.onnx", reasons=True)
    assert not (tmp_path / "head.onnx").exists()


@pytest.mark.parametrize("name", CELLS)
def test_every_cell_is_read_as_in_training_or_refused(table_head: Path, file: Path, name: str) -> None:
    cells = CELLS[name]
    usual = random_rows(1, seed=0).assign(joined="2012-02-29", left="15.06.1999", smoker="yes", code="2")
    rows: pd.DataFrame = pd.concat([usual] * len(cells), ignore_index=True)
    rows[name] = cells
    refused = unreadable(rows) | rows[name].isin(EXPONENTS.get(name, ())).to_numpy()
    label, probabilities = run(file, rows)
    assert ((label == "") == refused).all()
    model = open_private(table_head)
    expected = model.predict_proba(model.encode(rows[~refused]))
    assert np.abs(probabilities[~refused] - expected).max() <= TOLERANCE


def test_a_row_gets_the_same_answer_alone_and_among_others(file: Path) -> None:
    rows, opened = random_rows(40, seed=9), session(file)
    together = run(opened, rows)
    for place in range(40):
        label, probabilities = run(opened, rows.iloc[place : place + 1])
        assert label[0] == together[0][place]
        assert np.allclose(probabilities[0], together[1][place], rtol=0, atol=TOLERANCE, equal_nan=True)


def test_inputs_are_the_columns_and_outputs_class_names_and_probabilities(file: Path) -> None:
    opened = session(file)
    inputs = {each.name: (each.type, each.shape) for each in opened.get_inputs()}
    assert inputs["age"] == ("tensor(double)", ["rows"])
    assert inputs["city"] == inputs["joined"] == inputs["smoker"] == ("tensor(string)", ["rows"])
    assert set(inputs) == set(CELLS)
    outputs = {each.name: (each.type, each.shape) for each in opened.get_outputs()}
    assert outputs == {
        "label": ("tensor(string)", ["rows"]),
        "probabilities": ("tensor(double)", ["rows", 3]),
    }


@pytest.mark.parametrize("classes", [2, 3])
def test_the_label_follows_the_costs_of_errors(tmp_path: Path, classes: int) -> None:
    rng, names = np.random.default_rng(0), ("low", "middle", "high")[:classes]
    rows = pd.DataFrame({"a": rng.random(600)})
    number = rows["a"] * classes + 0.5 * rng.standard_normal(600)
    rows["y"] = np.array(names)[number.clip(0, classes - 0.5).astype(int)]
    schema = Schema(label="y", classes=names, bounds={"a": (0, 1)})
    head = qm.PrivateHead(epsilon=5.0, schema=schema, declared_size=600).fit(rows)
    plain = head.predict(rows)
    head.decide(cost={("middle", "low"): 20, ("low", "middle"): 0.5})
    folder = save_private(head, tmp_path / "model", dataset="made up")
    export_onnx(folder, tmp_path / "model.onnx")
    label, _ = run(tmp_path / "model.onnx", rows[["a"]])
    assert label.tolist() == head.predict(rows).tolist()
    assert label.tolist() != plain.tolist()
    told = session(tmp_path / "model.onnx").get_modelmeta().custom_metadata_map["decision"]
    assert told.startswith("middle if its" if classes == 2 else "the class with the lowest expected cost")


def test_the_guarantee_and_the_provenance_are_readable_without_quietmax(table_head: Path, file: Path) -> None:
    program = (
        "import json, onnxruntime, sys\n"
        "about = onnxruntime.InferenceSession(sys.argv[1]).get_modelmeta()\n"
        "print(json.dumps([about.producer_name, about.custom_metadata_map]))\n"
        "assert not any(name.startswith('quietmax') for name in sys.modules)"
    )
    told = subprocess.run(
        [sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=True
    )
    producer, about = json.loads(told.stdout)
    guarantee, provenance = json.loads(about["guarantee"]), json.loads(about["provenance"])
    assert producer == "quietmax"
    assert guarantee == open_private(table_head).guarantee.to_json()
    assert (float(about["epsilon"]), float(about["delta"])) == (8.0, 1e-5)
    assert json.loads(about["classes"]) == list(SCHEMA.classes or ())
    described = (table_head / "model.json").read_bytes()
    assert provenance["model_json_sha256"] == hashlib.sha256(described).hexdigest()
    assert provenance["trained_with"] == f"quietmax {qm.__version__}"


def test_names_of_columns_do_not_collide_with_outputs_or_inner_values(tmp_path: Path) -> None:
    names = ("label", "value 1", "value 7", "probabilities")
    rows = pd.DataFrame(np.random.default_rng(0).random((300, 4)), columns=list(names))
    rows["y"] = np.where(rows["label"] > 0.5, "a", "b")
    schema = Schema(label="y", classes=("a", "b"), bounds=dict.fromkeys(names, (0, 1)))
    head = qm.PrivateHead(epsilon=5.0, schema=schema, declared_size=300).fit(rows)
    folder = save_private(head, tmp_path / "head", dataset="names")
    model = _onnx_model(folder)
    assert [each.name for each in session(model).get_outputs()] == ["label_", "probabilities_"]
    label, probabilities = run(model, rows)
    assert (label == head.predict(rows)).all()
    assert np.abs(probabilities - head.predict_proba(rows)).max() <= TOLERANCE


@pytest.mark.parametrize(
    ("schema", "cells", "words"),
    [
        (Schema(hashed={"zip": 8}), ["8001", "8002"], ("'zip'", "hashes")),
        (
            Schema(dates={"at": ("2020-01-01 00:00:00", "2021-01-01 00:00:00")}),
            ["2020-05-01", ""],
            ("'at'", "time"),
        ),
        (
            Schema(dates={"on": ("2020-01-01", "2021-01-01")}, date_formats={"on": "%d %B %Y"}),
            ["1 May 2020", "2 May 2020"],
            ("'on'", "dates"),
        ),
        (Schema(categories={"kind": ("1", "1.0")}), ["1", "1.0"], ("'kind'", "same number")),
    ],
)
def test_a_column_that_onnx_cannot_compute_is_an_error_that_names_it(
    schema: Schema, cells: list[str], words: tuple[str, ...], tmp_path: Path
) -> None:
    (name,) = {**schema.hashed, **schema.dates, **schema.categories}
    rows = pd.DataFrame({name: cells * 100, "y": ["a", "b"] * 100})
    declared = schema.updated({"label": "y", "classes": ("a", "b")})
    head = qm.PrivateHead(schema=declared, declared_size=200).fit(rows)
    folder, file = save_private(head, tmp_path / "head", dataset="one column"), tmp_path / "head.onnx"
    with pytest.raises(InvalidInput) as refused:
        export_onnx(folder, file)
    for word in words:
        assert word in str(refused.value)
    assert not file.exists()


VECTORS = np.random.default_rng(3).normal(size=(600, 4)).astype(np.float32)
LABELS = np.where(VECTORS[:, 0] > 0, 7, 3)
QUERIES = np.random.default_rng(4).normal(size=(3000, 4)).astype(np.float32)
QUERIES[:3] = np.array([[0, 0, 0, 0], [1e30, -1e30, 1, 2], [1e-30, 0, 0, 0]])
IN_UNIT = Scaling((-1.0,) * 4, (1.0,) * 4)
NEAR_ZERO = Scaling((-1e-30,) * 4, (1e-30,) * 4)
MAPS: dict[str, Any] = {
    "default": "auto",
    "identity": Identity(),
    "pipeline": Pipeline((IN_UNIT, UnitNorm())),
    "one-hot": Pipeline((NEAR_ZERO, OneHot((None, (0.0, 1.0), (1.0,), (0.5,))))),
    "random-fourier": RandomFourier(count=50),
}
COMMON: dict[str, Any] = {"epsilon": 5.0, "classes": (3, 7), "declared_size": 600}
MODELS: dict[str, Any] = {
    **{
        f"head, {name}": qm.PrivateHead(features=each, settings=qm.HeadSettings(radius=2.0), **COMMON)
        for name, each in MAPS.items()
    },
    **{
        f"dpsgd, {name}": qm.DPSGD(settings=qm.DPSGDSettings(hidden=(6,), activation=name), **COMMON)
        for name in ("tanh", "relu", "sigmoid")
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_vectors_give_equal_answers_and_none_to_what_is_not_finite(
    name: str, tmp_path: Path
) -> None:
    model = MODELS[name].fit(VECTORS, LABELS)
    opened = session(_onnx_model(save_private(model, tmp_path / "model", dataset="vectors")))
    queries = QUERIES if name.startswith("head") else VECTORS
    label, probabilities = opened.run(None, {"features": queries})
    assert (label == model.predict(queries).astype(str)).all()
    assert np.abs(probabilities - model.predict_proba(queries)).max() <= TOLERANCE
    wrong = np.float32([[1, 2, 3, np.nan], [1, 2, 3, np.inf], [1, 2, 3, 4]])
    label, probabilities = opened.run(None, {"features": wrong})
    assert list(label != "") == [False, False, True]
    assert np.isnan(probabilities[:2]).all()


IMAGE_MAPS: dict[str, Any] = {
    "scattering": Scattering((2, 12, 13), groups=2),
    "scattering with three scales": Scattering((1, 20, 17), scales=3, angles=4, groups=1, whitening=0.0),
    "scattering with one scale": Scattering((1, 9, 9), scales=1, angles=3, groups=2),
    "patches": Patches((3, 11, 14), cells=2),
    "mirrored": Mirrored(Scattering((1, 12, 13), groups=9)),
    "turned": Turned(Scattering((1, 12, 12), groups=9), degrees=(-10.0, 0.0, 25.0), pairs=32),
    "joined": Joined((Patches((3, 12, 12), cells=1), Mirrored(Scattering((3, 12, 12))))),
    "reduced": Reduced((1, 30, 41), Turned(Scattering((1, 12, 13), groups=9), pairs=0)),
}


def computed(add: Callable[[Value], Value], records: np.ndarray, kind: int) -> np.ndarray:
    """What a graph computes of records, as a type of ONNX."""
    graph = Graph(["records", "results"])
    graph._output(add(Value(graph, "records")), "results")
    inputs = [
        onnx.helper.make_tensor_value_info("records", onnx.TensorProto.FLOAT, ["rows", records.shape[1]])
    ]
    outputs = [onnx.helper.make_tensor_value_info("results", kind, ["rows", None])]
    model = onnx.helper.make_model(
        onnx.helper.make_graph(graph.nodes, "part", inputs, outputs, graph.constants),
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
    )
    (results,) = session(model).run(None, {"records": records})
    return results


@pytest.mark.parametrize("name", IMAGE_MAPS)
def test_the_features_of_images_are_equal(name: str) -> None:
    feature_map = IMAGE_MAPS[name]
    columns = math.prod(feature_map.image_shape)
    records = np.random.default_rng(0).random((40, columns), np.float32)
    records[0], records[1] = 0.0, 1e-6 * records[1]
    features = computed(partial(_map_features, feature_map, columns=columns), records, onnx.TensorProto.FLOAT)
    assert np.abs(features - feature_map.transform(records)).max() < 1e-5


@pytest.mark.parametrize("levels", [8, 256])
@pytest.mark.parametrize("classes", [2, 3])
def test_cells_and_what_they_add_are_equal_bit_for_bit(levels: int, classes: int) -> None:
    """With numbers at the ends of intervals and missing, categories that are unknown, and all sorts of crosses."""
    cells = TableCells(
        columns=8,
        parts=((0, 1), (1, 3), (3, 6), (6, 7), (7, 8)),
        numbers=(0, 1, 4),
        levels=levels,
        crosses=((0, 1), (1, 2), (2, 3), (4, 0)),
    )
    generator = np.random.default_rng(levels)
    records = generator.random((4000, 8), np.float32)
    records[:2000, [0, 1, 7]] = generator.integers(0, levels + 1, (2000, 3)) / np.float32(levels)
    records[:, 2] = generator.random(4000) < 0.3
    indicated = generator.integers(0, 4, 4000)
    records[:, 3:6] = indicated[:, None] == np.arange(3)
    records[:, 6] = generator.random(4000) < 0.5
    records[-3:, :3] = [[-1.0, 2.0, 0.0], [-0.0, 1.0, 1.0], [np.nextafter(np.float32(1), 0), 1e-30, 0.0]]
    count = sum(cells.sizes)
    weights = TableWeights(
        generator.normal(size=(classes, count + 1)), np.zeros(count), cells.sizes, np.zeros(count + 1)
    )
    expected = cells.transform(records)
    assert {int(cell) for cell in expected[:, 1]} == set(range(levels + 1))
    indices = computed(partial(_map_features, cells, columns=8), records, onnx.TensorProto.FLOAT)
    np.testing.assert_array_equal(indices, expected)
    scores = computed(partial(_classify, weights), indices, onnx.TensorProto.DOUBLE)
    np.testing.assert_array_equal(scores, weights.scores(expected))


def test_a_head_of_images_gives_equal_answers(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    images = generator.random((400, 144), np.float32)
    images[200:, :72] *= 0.2
    labels = np.repeat(["flat", "top"], 200)
    head = qm.PrivateHead(
        epsilon=8.0, features=IMAGE_MAPS["turned"], classes=("flat", "top"), declared_size=400
    ).fit(images, labels)
    folder = save_private(head, tmp_path / "head", dataset="images")
    label, probabilities = session(_onnx_model(folder)).run(None, {"features": images})
    assert np.abs(probabilities - head.predict_proba(images)).max() < 1e-4
    assert (label == head.predict(images)).all()

"""Encoders from files: what they compute, and which files they refuse."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import safetensors.torch
import torch
from onnx import TensorProto, helper
from sklearn.base import clone
from torch import nn

from quietmax.accounting.guarantee import Guarantee
from quietmax.data import Schema, load
from quietmax.errors import DataUnavailable, InvalidInput, QuietmaxError
from quietmax.estimators import DPSGD, DPSGDSettings, PrivateHead, Teachers
from quietmax.estimators.training_set import EMBEDDED, LIBRARY_ROUNDING, Basis
from quietmax.models.features import Embedding, Encoder, Pipeline, UnitNorm, save_encoder
from quietmax.models.features.encoder import _network
from quietmax.models.features.generic import describe_map, is_batched, runs_user_code
from tests.models.features.onnx_files import (
    FLOAT,
    PUBLIC_OUTPUT,
    PUBLIC_SHA256,
    convolutions,
    external,
    mixing,
    node,
    public_file,
    sha256,
    write,
)

RECORDS = np.random.default_rng(1).random((7, 4), dtype=np.float32)
IMAGES = np.random.default_rng(2).random((6, 3 * 9 * 8), dtype=np.float32)
SHAPE = (3, 9, 8)
LAYERS = Path("net.safetensors")


def unit(rows: Any) -> Any:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, groups=3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Sequential(nn.MaxPool2d(2), nn.Dropout2d(0.5), nn.Conv2d(6, 4, 2, bias=False), nn.GELU()),
        nn.GroupNorm(2, 4),
        nn.AvgPool2d(2, stride=1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.LayerNorm(16),
        nn.Linear(16, 5),
        nn.BatchNorm1d(5, affine=False),
        nn.Tanh(),
    )
    layers(torch.rand(20, *SHAPE))  # Gives the batch normalisation running statistics.
    return layers.eval()


# Layers in safetensors


def test_layers_in_a_file_compute_what_the_module_computes_and_draw_no_random_numbers() -> None:
    digest = save_encoder(network(), LAYERS)
    _network.cache_clear()
    before = torch.get_rng_state()
    encoder = Encoder(LAYERS, digest, image_shape=SHAPE)
    assert torch.equal(before, torch.get_rng_state())
    with torch.no_grad():
        expected = network()(torch.from_numpy(IMAGES).reshape(-1, *SHAPE)).numpy()
    np.testing.assert_allclose(encoder.transform(IMAGES), unit(expected), atol=1e-6)
    assert encoder.dimension(IMAGES.shape[1]) == 5


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Softmax(dim=0), "got Softmax"),
        (nn.LSTM(3, 4), "got LSTM"),
        (type("Linear", (nn.Linear,), {})(2, 2), "got Linear"),
        (type("Mixing", (nn.Sequential,), {"forward": lambda _, x: x})(), "got Mixing"),
        (nn.Flatten(start_dim=0), "start_dim=1"),
        (nn.BatchNorm1d(3, track_running_stats=False), "running statistics"),
    ],
)
def test_other_layers_are_not_written(module: nn.Module, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        save_encoder(nn.Sequential(module), LAYERS)


@pytest.mark.parametrize(
    "layers",
    [
        None,
        "no JSON",
        [{"layer": "Softmax", "dim": 0}],
        [{"layer": "Flatten", "start_dim": 0, "end_dim": -1}],
        [{"layer": "Linear", "in_features": 4}],
        [{"layer": "Linear", "in_features": 3, "out_features": 2, "bias": True}],
        [{"layer": "Linear", "in_features": 4, "out_features": 2, "bias": False}],
        [{"layer": "Linear", "in_features": 4, "out_features": 2, "bias": True}, {"layer": "Linear"}],
        {"layer": "ReLU"},
    ],
)
def test_a_file_that_save_encoder_did_not_write_is_refused(layers: Any) -> None:
    metadata = {} if layers is None else {"quietmax.encoder": json.dumps(layers)}
    if layers == "no JSON":
        metadata = {"quietmax.encoder": layers}
    tensors = {"0.weight": torch.ones(2, 4), "0.bias": torch.zeros(2)}
    LAYERS.write_bytes(safetensors.torch.save(tensors, metadata))
    with pytest.raises(
        InvalidInput, match=r"net\.safetensors is not a file that save_encoder wrote|start_dim=1"
    ):
        Encoder(LAYERS, sha256(LAYERS))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, r"must be an \.onnx or \.safetensors file") for name in ("net.pt", "net")),
        ("net.onnx", "not an ONNX file|cannot read"),
        ("net.safetensors", "save_encoder"),
    ],
)
def test_only_safetensors_and_onnx_files_are_read(name: str, words: str) -> None:
    Path(name).write_bytes(pickle.dumps(1) + b"\x01" * 50)
    with pytest.raises(InvalidInput, match=words):
        Encoder(name, sha256(Path(name)))


# The SHA-256


def test_a_file_must_be_named_with_its_sha256() -> None:
    digest = save_encoder(nn.ReLU(), LAYERS)
    with pytest.raises(InvalidInput, match=f"must be named with its `sha256`. .* {digest}"):
        Encoder(LAYERS)
    with pytest.raises(DataUnavailable, match=f"has the SHA-256 {digest}, but {'0' * 64} was expected"):
        Encoder(LAYERS, "0" * 64)
    with pytest.raises(DataUnavailable, match="cannot be read: No such file"):
        Encoder("other.safetensors", digest)
    with pytest.raises(InvalidInput, match="output requires an ONNX file"):
        Encoder(LAYERS, digest, output="x")
    assert Encoder(LAYERS, digest.upper()).sha256 == digest


def test_a_file_is_read_once() -> None:
    encoder = Encoder(LAYERS, save_encoder(nn.ReLU(), LAYERS))
    before = encoder.transform(RECORDS)
    LAYERS.write_bytes(b"")
    _network.cache_clear()
    for again in (encoder, copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder))):
        np.testing.assert_array_equal(again.transform(RECORDS), before)
        assert again == encoder


# ONNX


def written(*nodes: Any, **network: Any) -> Encoder:
    """The encoder of a network in a file."""
    return Encoder("net.onnx", write(Path("net.onnx"), *nodes, **network))


UNCHANGED = node("Identity", "x", "a")


def branching(positive: Any, negative: Any = UNCHANGED, *then: Any, **inner: Any) -> Encoder:
    """A network with a branch: `a` comes from `positive` if the sum of the numbers is above 0, else from `negative`."""
    branches = [
        helper.make_graph(
            [each] if each else [], "branch", [], [helper.make_tensor_value_info("a", FLOAT, None)], **inner
        )
        for each in (positive, negative)
    ]
    return written(
        node("ReduceSum", "x", "sum", keepdims=0),
        node("Greater", "sum zero", "above"),
        node("If", "above", "m" if then else "y", then_branch=branches[0], else_branch=branches[1]),
        *then,
        tensors={"zero": np.float32(0.0)},
    )


def test_the_outputs_of_an_onnx_file_are_those_of_onnxruntime() -> None:
    encoder = convolutions(Path(), SHAPE)
    session = onnxruntime.InferenceSession(str(encoder.path), providers=["CPUExecutionProvider"])
    (expected,) = session.run(["y"], {"x": IMAGES.reshape(-1, *SHAPE)})
    np.testing.assert_allclose(encoder.transform(IMAGES), unit(expected), atol=1e-6)
    assert encoder._rows_at_once(IMAGES.shape[1]) == 1


def test_an_intermediate_output_may_be_named_and_pooled() -> None:
    encoder = convolutions(Path(), SHAPE)
    everywhere, pooled = replace(encoder, output="r"), replace(encoder, output="r", pool=True)
    assert everywhere.dimension(IMAGES.shape[1]) == 13 * 7 * 6
    np.testing.assert_allclose(
        pooled.transform(IMAGES), replace(encoder, output="f").transform(IMAGES), atol=1e-6
    )
    with pytest.raises(InvalidInput, match=r"has no output 'filters'. Its outputs are y;"):
        replace(encoder, output="filters")
    with pytest.raises(InvalidInput, match="pool requires an output with positions"):
        replace(encoder, pool=True).dimension(IMAGES.shape[1])


def test_an_onnx_file_gets_one_record_at_a_time() -> None:
    """So not even a network that mixes the records of a batch can mix them."""
    expected = RECORDS - (RECORDS.max(axis=1, keepdims=True) + 1)
    np.testing.assert_allclose(mixing(Path()).transform(RECORDS), unit(expected), atol=1e-6)


def test_outputs_that_are_not_finite_become_zero() -> None:
    encoder = written(node("Log", "x", "y"))
    np.testing.assert_allclose(encoder.transform([[-1.0, 0.0, np.e, 1.0]]), [[0, 0, 1, 0]])
    assert not encoder.transform([[-1.0, -2.0, 0.0, 1.0]]).any()


def test_control_flow_is_a_function_of_the_record() -> None:
    features = branching(node("Neg", "x", "a")).transform([[1.0, 0, 0, 0], [-3.0, 0, 0, 0]])
    np.testing.assert_allclose(features, [[-1, 0, 0, 0], [-1, 0, 0, 0]])


def test_dropout_is_accepted_for_inference() -> None:
    encoder = written(node("Dropout", "x ratio", "y"), tensors={"ratio": np.float32(0.5)})
    np.testing.assert_allclose(encoder.transform(RECORDS), unit(RECORDS), atol=1e-6)


TRAINED_DROPOUT = {"ratio": np.float32(0.5), "training": np.bool_(True)}
TWICE = helper.make_function(
    "own", "Twice", ["a"], ["b"], [node("Add", "a a", "b")], [helper.make_opsetid("", 17)]
)


def _outside() -> Encoder:
    """A matrix in another file, inside branches without operations."""
    np.eye(4, dtype=np.float32).tofile("matrix.bin")  # onnxruntime looks for it here
    matrix = TensorProto(name="a", data_type=FLOAT, dims=[4, 4], data_location=TensorProto.EXTERNAL)
    matrix.external_data.add(key="location", value="matrix.bin")
    return branching(None, None, node("MatMul", "x m", "y"), initializer=[matrix])


REFUSED: list[tuple[Any, str]] = [
    *(
        (network, f"{operation}, which may draw random numbers")
        for operation in ("RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial")
        for network in (
            partial(written, node(operation, "x", "y")),
            partial(branching, node(operation, "x", "a")),
        )
    ),
    (
        lambda: written(node("Dropout", "x ratio training", "y"), tensors=TRAINED_DROPOUT),
        "Dropout, which may draw random numbers",
    ),
    (
        lambda: written(node("Gelu", "x", "y", domain="com.microsoft"), domains=("com.microsoft",)),
        r"Gelu of the domain com\.microsoft; only standard operations",
    ),
    (
        lambda: written(node("Abs", "x", "y"), functions=[TWICE], domains=("own",)),
        "defines functions of its own",
    ),
    (lambda: Encoder("net.onnx", external(Path("net.onnx"))), "keeps tensors in other files"),
    (_outside, "keeps tensors in other files"),
    (
        lambda: written(node("Add", "x z", "y"), inputs=[(name, FLOAT, ["n", 4]) for name in "xz"]),
        r"one input of type float32, but net\.onnx takes: x .*, z",
    ),
    (
        lambda: written(node("Cast", "x", "y", to=FLOAT), inputs=[("x", TensorProto.INT32, ["n", 4])]),
        r"x \(tensor\(int32\)\)",
    ),
    (lambda: written(node("Abs", "x", "y"), inputs=[("x", FLOAT, [8, 4])]), "takes 8 records at once"),
    (
        lambda: written(node("NonZero", "x", "where"), node("Cast", "where", "y", to=FLOAT)).dimension(4),
        r"net\.onnx has no outputs for a record of zeros",
    ),
]


@pytest.mark.parametrize(("network", "words"), REFUSED)
def test_a_network_whose_outputs_may_not_be_a_function_of_one_record_is_refused(
    network: Any, words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        network()


def test_a_record_with_another_number_of_outputs_gets_zeros_and_no_error() -> None:
    encoder = written(
        *(node("Cos", "x", "cosine"), node("Floor", "cosine", "zero"), node("NonZero", "zero", "where")),
        node("Cast", "where", "y", to=FLOAT),
    )
    features = encoder.transform([[0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    assert features.shape == (2, 8)
    assert np.linalg.norm(features[0]) == pytest.approx(1.0)
    assert not features[1].any()


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    _network.cache_clear()
    with pytest.raises(
        QuietmaxError, match=r"requires the package onnxruntime.*pip install 'quietmax\[onnx\]'"
    ):
        written(node("Abs", "x", "y"))


# Inputs


def test_images_are_scaled_repeated_and_normalised() -> None:
    network = written(node("Identity", "x", "y"), inputs=[("x", FLOAT, [1, 3, 8, 6])])
    grey = np.random.default_rng(0).random((2, 4 * 3), dtype=np.float32)
    mean, std = (0.1, 0.2, 0.3), (1.0, 2.0, 4.0)
    encoder = replace(network, image_shape=(1, 4, 3), mean=mean, std=std)
    images = torch.from_numpy(grey).reshape(2, 1, 4, 3)
    large = nn.functional.interpolate(images, (8, 6), mode="bilinear", align_corners=False).numpy()
    expected = np.concatenate([(large - m) / s for m, s in zip(mean, std, strict=True)], axis=1)
    np.testing.assert_allclose(encoder.transform(grey), unit(expected.reshape(2, -1)), atol=1e-6)


def test_one_mean_and_std_hold_for_all_numbers() -> None:
    encoder = replace(written(node("Identity", "x", "y")), mean=0.5, std=0.25)
    np.testing.assert_allclose(encoder.transform(RECORDS), unit((RECORDS - 0.5) / 0.25), atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "columns", "words"),
    [
        ({"image_shape": (3, 9)}, 27, "must be channels, height and width"),
        ({"image_shape": (3, 0, 9)}, 27, "must be a sequence of positive integers"),
        ({"input_shape": 5}, 27, "must be a sequence of positive integers"),
        ({"mean": np.nan}, 216, "mean must be a finite number"),
        ({"std": "wide"}, 216, "std must be a finite number"),
        ({"std": (1.0, 0.0, 1.0)}, 216, "std must not be 0"),
        ({"mean": (0.5, 0.5)}, 216, "must be one number or 3, one for each channel"),
        ({}, 215, "215 numbers, which do not form images"),
        ({"image_shape": None}, 216, "State input_shape, or image_shape"),
        ({"image_shape": None, "input_shape": (3, 5, 5)}, 216, "but the records have 216 numbers"),
        ({"image_shape": (2, 12, 9)}, 216, "cannot be scaled to the shape"),
        ({"input_shape": (4, 9, 8)}, 216, "cannot be scaled to the shape"),
        ({"input_shape": (3, 2, 2)}, 216, "cannot compute inputs of shape"),
    ],
)
def test_settings_that_do_not_fit_are_errors(settings: dict[str, Any], columns: int, words: str) -> None:
    encoder = convolutions(Path(), SHAPE)
    with pytest.raises(InvalidInput, match=words):
        replace(encoder, **settings).transform(np.zeros((2, columns)))


# What a guarantee says of them


def test_an_encoder_is_not_the_users_code() -> None:
    encoder = convolutions(Path(), SHAPE)
    for feature_map in (encoder, Pipeline((UnitNorm(), encoder))):
        assert not runs_user_code(feature_map)
        assert is_batched(describe_map(feature_map))
    assert describe_map(encoder)["sha256"] == encoder.sha256
    assert describe_map(encoder)["file"] == "convolutions.onnx"


def test_a_head_learns_digits_from_a_public_network_and_its_proven_guarantee_names_the_file() -> None:
    encoder = Encoder(
        public_file(),
        PUBLIC_SHA256,
        image_shape=(1, 28, 28),
        input_shape=(3, 48, 48),
        output=PUBLIC_OUTPUT,
        mean=0.5,
        std=0.5,
    )
    data = load("mnist-5k", records=1000)
    assert encoder.dimension(784) == 200
    head = PrivateHead(3.0, 1e-5, features=encoder, classes=range(10), declared_size=1000)
    head.fit(data.train.features, data.train.labels)
    assert head.guarantee_.status == "proven"
    (assumption,) = (each for each in head.guarantee_.assumptions if "SHA-256" in each)
    assert assumption == (
        f"The encoder file ch_ppocr_mobile_v2.0_cls_infer.onnx (SHA-256 {PUBLIC_SHA256}) was made without the private "
        "records."
    )
    assert f"The limits rest on this: {assumption}" in head.guarantee_.in_words()
    assert (head.predict(data.test.features) == data.test.labels).mean() > 0.5


# Embeddings that were computed beforehand


@pytest.mark.parametrize(
    "facts",
    [
        {"bounds": {"a": (-1, 1), "b": (0, 1)}, "complete": ("*",)},
        {"bounds": {"*": (-1, 1)}, "complete": ("a",)},
        {"bounds": {"a": (-1, 1)}, "booleans": ("b",), "complete": ("*",)},
        {"bounds": {"*": (-1, 1)}, "edges": {"b": (0.0,)}, "complete": ("*",)},
    ],
)
@pytest.mark.parametrize(
    "estimator",
    [PrivateHead(4.0), DPSGD(4.0, 1e-5, settings=DPSGDSettings(steps=2)), Teachers(4.0, queries=1)],
)
def test_a_table_with_other_columns_is_not_an_embedding(estimator: Any, facts: Any) -> None:
    table = pd.DataFrame({"a": [-0.5, 0.5] * 50, "b": [0.0, 1.0] * 50, "y": ["no", "yes"] * 50})
    schema = Schema(label="y", classes=("no", "yes"), **facts)
    with pytest.raises(InvalidInput, match=r"features='embedding' requires numeric columns.*column 'b'"):
        clone(estimator).set_params(declared_size=100, features="embedding", schema=schema).fit(table)


def test_embeddings_are_centred_and_have_unit_length() -> None:
    rows = np.float32([[0.5, 1.0, 0.0], [0.5, 0.5, 0.5]])
    half = np.sqrt(np.float32(0.5))
    np.testing.assert_allclose(Embedding(0.5).transform(rows), [[0, half, -half], [0, 0, 0]], atol=1e-7)
    np.testing.assert_allclose(Embedding().transform(rows), unit(rows), atol=1e-7)
    with pytest.raises(InvalidInput, match="centre must be a finite number, got inf"):
        Embedding(np.inf)


@pytest.mark.parametrize(
    "estimator",
    [PrivateHead(4.0), DPSGD(4.0, 1e-5, settings=DPSGDSettings(steps=2)), Teachers(4.0, queries=1)],
)
def test_columns_of_embeddings_give_the_same_features_as_an_array(estimator: Any) -> None:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 200)
    numbers = generator.normal(size=(200, 40)) + np.eye(40)[0] * labels[:, None]
    rows = unit(numbers)
    frame = pd.DataFrame(rows, columns=[f"e{number}" for number in range(40)]).assign(ill=labels)
    schema = Schema(label="ill", classes=("0", "1"), bounds={"*": (-1, 1)}, complete=("*",))
    public = {"declared_size": 200, "features": "embedding"}
    table = clone(estimator).set_params(schema=schema, **public).fit(frame)
    array = clone(estimator).set_params(classes=(0, 1), **public).fit(rows, labels)
    assert (table.feature_map_, array.feature_map_) == (Embedding(0.5), Embedding())
    encoded = table.encoding_.encode(frame)
    np.testing.assert_allclose(
        table.feature_map_.transform(encoded), array.feature_map_.transform(rows), atol=1e-6
    )
    for fitted in (table, array):
        assert fitted.guarantee_.status == "proven"
        assert sum(each == EMBEDDED for each in fitted.guarantee_.assumptions) == 1
        assert f"The limits rest on this: {EMBEDDED}" in fitted.guarantee_.in_words()


def test_a_map_of_the_users_own_may_have_the_kind_of_ours() -> None:
    guarantee = Guarantee("gaussian", mu=1.0, because="Under test.")
    usual = Basis().under(guarantee).assumptions
    assert Basis({"kind": "encoder"}).under(guarantee).assumptions == (*usual, LIBRARY_ROUNDING)
    assert Basis({"kind": "embedding"}).under(guarantee).assumptions == usual

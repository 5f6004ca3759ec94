"""Small ONNX files for tests, and a public one that comes in a package."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from quietmax.models.features import Encoder

FLOAT = TensorProto.FLOAT
PUBLIC_SHA256 = "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c"
PUBLIC_OUTPUT = "reshape2_0.tmp_0"
"""The 200 averages before the last layer of the public network."""


def public_file() -> Path:
    """The network of the package rapidocr-onnxruntime that tells whether a line of text is upside down."""
    found = importlib.util.find_spec("rapidocr_onnxruntime")
    assert found is not None
    assert found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0]) / "models" / "ch_ppocr_mobile_v2.0_cls_infer.onnx"


def write(
    path: Path,
    *nodes: Any,
    inputs: Any = (("x", FLOAT, ["n", 4]),),
    outputs: tuple[str, ...] = ("y",),
    tensors: dict[str, Any] | None = None,
    functions: Any = (),
    domains: tuple[str, ...] = (),
) -> str:
    """Write a network and return its SHA-256."""
    graph = helper.make_graph(
        list(nodes),
        "net",
        [helper.make_tensor_value_info(*each) for each in inputs],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs],
        [
            numpy_helper.from_array(np.asarray(value), name) if not isinstance(value, TensorProto) else value
            for name, value in (tensors or {}).items()
        ],
    )
    opsets = [helper.make_opsetid("", 17), *(helper.make_opsetid(each, 1) for each in domains)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=list(functions))
    path.write_bytes(model.SerializeToString())
    return sha256(path)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def node(operation: str, inputs: str, outputs: str, **attributes: Any) -> Any:
    """A node whose inputs and outputs are names separated by spaces."""
    return helper.make_node(operation, inputs.split(), outputs.split(), **attributes)


def mixing(folder: Path) -> Encoder:
    """A network that divides by the largest number among all records that it gets at once."""
    path = folder / "mixing.onnx"
    digest = write(
        path,
        node("ReduceMax", "x", "most", axes=[0, 1], keepdims=1),
        node("Abs", "most", "size"),
        node("Add", "size one", "more"),
        node("Sub", "x more", "y"),
        tensors={"one": np.float32(1.0)},
    )
    return Encoder(path, digest)


def convolutions(folder: Path, image_shape: tuple[int, int, int]) -> Encoder:
    """A convolution, its mean over all positions, and a matrix product."""
    generator = np.random.default_rng(0)
    path = folder / "convolutions.onnx"
    digest = write(
        path,
        node("Conv", "x filters", "c", kernel_shape=[3, 3]),
        node("Relu", "c", "r"),
        node("GlobalAveragePool", "r", "p"),
        node("Flatten", "p", "f"),
        node("MatMul", "f matrix", "y"),
        inputs=[("x", FLOAT, ["n", image_shape[0], "h", "w"])],
        tensors={
            "filters": generator.normal(size=(13, image_shape[0], 3, 3)).astype(np.float32),
            "matrix": generator.normal(size=(13, 17)).astype(np.float32),
        },
    )
    return Encoder(path, digest, image_shape=image_shape)


def external(path: Path) -> str:
    """Write a network whose matrix is in another file."""
    matrix = numpy_helper.from_array(np.eye(4, dtype=np.float32), "m")
    digest = write(path, node("MatMul", "x m", "y"), tensors={"m": matrix})
    model = onnx.load(str(path))
    onnx.save(model, str(path), save_as_external_data=True, location="matrix.bin", size_threshold=0)
    assert sha256(path) != digest
    return sha256(path)

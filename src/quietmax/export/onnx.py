"""A released model as one ONNX graph: columns in, class names and probabilities out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from quietmax import __version__
from quietmax._io import atomic_write
from quietmax.errors import InvalidInput
from quietmax.estimators.serialization import PrivateModel
from quietmax.export.columns import encode_column, input_type
from quietmax.export.feature_nodes import classify, map_features
from quietmax.export.graph import IR_VERSION, OPSET, Graph, require_onnx
from quietmax.export.released import metadata, open_released
from quietmax.spending import DESCRIPTION_FILE

_LABEL, _PROBABILITIES, _FEATURES = "label", "probabilities", "features"
_MOST_BYTES = 2**31 - 2**20
"""An ONNX file is one protocol buffer, which cannot be larger."""


def export_onnx(folder: str | Path, file: str | Path) -> None:
    """Write a released model as an ONNX file.

    The graph has one input per column of the table: float64 of shape (rows,) for a column of numbers, NaN for a missing
    value, and strings of shape (rows,) for all others, "" for a missing value. A model that was trained on numbers has
    the input ``features``, float32 of shape (rows, inputs). The outputs are ``label``, strings of shape (rows,), and
    ``probabilities``, float64 of shape (rows, classes). If a column has such a name, that of the output is followed by
    an underscore. A row with a cell that Quietmax would refuse has the label "" and probabilities NaN.

    Parameters
    ----------
    folder : str or Path
        The model folder.
    file : str or Path
        The file to write.

    Raises
    ------
    InvalidInput
        If the model must not be exported, or ONNX operators cannot compute it.
    DataUnavailable
        If the package onnx is not installed, or the folder is damaged.
    """
    content = onnx_model(folder).SerializeToString()
    atomic_write(Path(file), lambda staging: staging.write_bytes(content))


def onnx_model(folder: str | Path) -> Any:
    """Return a released model as an ONNX model; see `export_onnx`."""
    onnx, model = require_onnx(), open_released(folder)
    names = [column.name for column in model.encoding.columns] if model.encoding else [_FEATURES]
    label, probabilities = (_free(name, names) for name in (_LABEL, _PROBABILITIES))
    graph = Graph([*names, label, probabilities])

    def value(name: str, kind: type, *shape: str | int) -> Any:
        return onnx.helper.make_tensor_value_info(name, graph.type_of(kind), ["rows", *shape])

    if model.encoding is None:
        inputs = [value(_FEATURES, np.float32, model.inputs)]
    else:
        inputs = [value(column.name, input_type(column)) for column in model.encoding.columns]
    _answers(graph, model, label, probabilities)
    outputs = [value(label, np.str_), value(probabilities, np.float64, len(model.classes))]
    if sum(each.ByteSize() for each in graph.constants) > _MOST_BYTES:
        raise InvalidInput("The model is too large for one ONNX file, which has at most 2 GB.")
    written = onnx.helper.make_model(
        onnx.helper.make_graph(graph.nodes, "quietmax", inputs, outputs, graph.constants),
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="quietmax",
        producer_version=__version__,
        doc_string=str(model.guarantee),
    )
    about = metadata(model, (Path(folder) / DESCRIPTION_FILE).read_bytes())
    onnx.helper.set_model_props(written, {name: _as_string(each) for name, each in about.items()})
    onnx.checker.check_model(written)
    return written


def _answers(graph: Graph, model: PrivateModel, label: str, probabilities: str) -> None:
    """Add the operations from the inputs to the outputs."""
    records, unreadable = _encoded(graph, model)
    features = (
        records if model.features is None else map_features(graph, model.features, records, model.inputs)
    )
    logits = classify(graph, model.classifier, features)  # type: ignore[arg-type]
    names = graph("Gather", np.array(model.classes), graph("ArgMax", logits, axis=1, keepdims=0))
    shares = graph("Softmax", logits, axis=1)
    if unreadable is not None:
        names = graph("Where", unreadable, np.array(""), names)
        shares = graph("Where", graph.columns(unreadable), np.float64(np.nan), shares)
    graph.output(names, label)
    graph.output(shares, probabilities)


def _encoded(graph: Graph, model: PrivateModel) -> tuple[str, str | None]:
    """Return the encoded records, and which rows cannot be read."""
    if model.encoding is None:
        infinite = graph("Or", graph("IsNaN", _FEATURES), graph("IsInf", _FEATURES))
        some = graph("ReduceMax", graph.cast(infinite, np.float32), np.array([1]), keepdims=0)
        return _FEATURES, graph.cast(some, np.bool_)
    columns = [encode_column(graph, column) for column in model.encoding.columns]
    doubts = [unreadable for _, unreadable in columns if unreadable is not None]
    records = graph.side_by_side([features for features, _ in columns])
    return records, graph.any_of(doubts) if doubts else None


def _free(name: str, taken: list[str]) -> str:
    """Return a name that no column has."""
    while name in taken:
        name += "_"
    return name


def _as_string(value: Any) -> str:
    """Return a string as it is and other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

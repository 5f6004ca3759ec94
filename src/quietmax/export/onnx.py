"""A released model as one ONNX graph: columns in, class names and probabilities out.

Feature maps and classifiers compute in the order and the precision of their own modules. Fourier transforms of images
are products with matrices of cosines and sines. Turning an image and averaging its pixels are linear, so they are
products with the matrices that the maps' own functions make of unit images.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quietmax import __version__
from quietmax._io import atomic_write
from quietmax.errors import InvalidInput
from quietmax.estimators.dpsgd.estimator import Centring, PrivateNetwork
from quietmax.estimators.dpsgd.training import ROW_LENGTH
from quietmax.estimators.head.exact_sums import BITS, on_grid
from quietmax.estimators.head.weights import HeadWeights
from quietmax.estimators.serialization import PrivateModel
from quietmax.export.graph import IR_VERSION, OPSET, Graph, _encode_column, _input_type, _require_onnx
from quietmax.export.released import _metadata, _open_released
from quietmax.models.features import images as image_maps
from quietmax.models.features.base import FeatureMap
from quietmax.models.features.generic import Pipeline, RandomFourier, _frequencies
from quietmax.models.features.images import (
    CONTRAST,
    TINY,
    Joined,
    Mirrored,
    Patches,
    Reduced,
    Scattering,
    Turned,
)
from quietmax.models.features.tabular import Identity, OneHot, Scaling, TableFeatures, UnitNorm
from quietmax.models.mlp import MLP
from quietmax.spending import DESCRIPTION_FILE

_LABEL, _PROBABILITIES, _FEATURES = "label", "probabilities", "features"
_MOST_BYTES = 2**31 - 2**20
"""An ONNX file is one protocol buffer, which cannot be larger."""
_UNIT = 2.0**BITS
_SHORTENED = 1.0 - 2.0**-36
_IMAGE_UNIT = 2.0**26
_NORM_EPSILON = 1e-5


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
    content = _onnx_model(folder).SerializeToString()
    atomic_write(Path(file), lambda staging: staging.write_bytes(content))


def _onnx_model(folder: str | Path) -> Any:
    """Return a released model as an ONNX model; see `export_onnx`."""
    onnx, model = _require_onnx(), _open_released(folder)
    names = [column.name for column in model.encoding.columns] if model.encoding else [_FEATURES]
    label, probabilities = (_free(name, names) for name in (_LABEL, _PROBABILITIES))
    graph = Graph([*names, label, probabilities])

    def value(name: str, kind: type, *shape: str | int) -> Any:
        return onnx.helper.make_tensor_value_info(name, graph.type_of(kind), ["rows", *shape])

    if model.encoding is None:
        inputs = [value(_FEATURES, np.float32, model.inputs)]
    else:
        inputs = [value(column.name, _input_type(column)) for column in model.encoding.columns]
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
    about = _metadata(model, (Path(folder) / DESCRIPTION_FILE).read_bytes())
    onnx.helper.set_model_props(written, {name: _as_string(each) for name, each in about.items()})
    onnx.checker.check_model(written)
    return written


def _answers(graph: Graph, model: PrivateModel, label: str, probabilities: str) -> None:
    """Add the operations from the inputs to the outputs."""
    records, unreadable = _encoded(graph, model)
    features = (
        records if model.features is None else _map_features(graph, model.features, records, model.inputs)
    )
    logits = _classify(graph, model.classifier, features)  # type: ignore[arg-type]
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
    columns = [_encode_column(graph, column) for column in model.encoding.columns]
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


# --- Feature maps -----------------------------------------------------------------------------------------------------


def _map_features(graph: Graph, feature_map: FeatureMap, records: str, columns: int) -> str:
    """Add the operations of a feature map."""
    if isinstance(feature_map, Pipeline):
        for step in feature_map.maps:
            records = _map_features(graph, step, records, columns)
            columns = step.dimension(columns)
        return records
    if isinstance(feature_map, RandomFourier):
        return _random_fourier(graph, feature_map, records, columns)
    add = _MAPS.get(type(feature_map))
    if add is None:
        raise InvalidInput(
            f"The features '{feature_map.kind}' cannot be exported to ONNX. The other formats can hold them."
        )
    return add(graph, feature_map, records)


def _scaling(graph: Graph, feature_map: Scaling, records: str) -> str:
    low, high = np.array(feature_map.low), np.array(feature_map.high)
    clipped = graph("Min", graph("Max", graph.cast(records, np.float64), low), high)
    return graph.cast(graph("Div", graph("Sub", clipped, low), high - low), np.float32)


def _one_hot(graph: Graph, feature_map: OneHot, records: str) -> str:
    parts = []
    for place, categories in enumerate(feature_map.categories):
        part = graph("Gather", records, np.array([place]), axis=1)
        if categories is not None:
            part = graph.cast(graph("Equal", part, np.array(categories, np.float32)), np.float32)
        parts.append(part)
    return graph.side_by_side(parts)


def _unit_norm(graph: Graph, feature_map: UnitNorm, records: str) -> str:
    wide = graph.cast(records, np.float64)
    if feature_map.constant > 0.0:
        wide = graph("Pad", wide, np.array([0, 0, 0, 1]), np.float64(feature_map.constant))
    return graph.cast(_divided(graph, wide), np.float32)


def _divided(graph: Graph, rows: str) -> str:
    """Return rows of float64 divided by their length; a row of zeros stays."""
    lengths = graph("Sqrt", graph("ReduceSumSquare", rows, np.array([1]), keepdims=1))
    positive = graph("Greater", lengths, np.array([0.0]))
    return graph("Div", rows, graph("Where", positive, lengths, np.array([1.0])))


def _table(graph: Graph, feature_map: TableFeatures, records: str) -> str:
    encoded = graph.cast(records, np.float64)
    parts = [encoded]
    if feature_map.bins and feature_map.numbers:
        numbers = graph("Gather", encoded, np.array(feature_map.numbers), axis=1)
        values = graph("Clip", numbers, np.float64(0.0), np.float64(1.0))
        # A number that cannot be missing has its flag in a further column of zeros.
        flags = [feature_map.columns if flag is None else flag for flag in feature_map.missing]
        padded = graph("Pad", encoded, np.array([0, 0, 0, 1]))
        flagged = graph("Gather", padded, np.array(flags), axis=1)
        present = graph("Unsqueeze", graph("Equal", flagged, np.float64(0.0)), np.array([2]))
        parts += [_bins(graph, values, present, bins) for bins in feature_map.bins]
    wide = graph.side_by_side(parts)
    crosses = []
    for (a, b), (c, d) in feature_map.crosses:
        first = graph("Unsqueeze", graph("Slice", wide, *map(np.array, ([a], [b], [1]))), np.array([2]))
        second = graph("Unsqueeze", graph("Slice", wide, *map(np.array, ([c], [d], [1]))), np.array([1]))
        crosses.append(graph("Flatten", graph("Mul", first, second), axis=1))
    return graph.cast(_divided(graph, graph.side_by_side([wide, *crosses])), np.float32)


def _bins(graph: Graph, values: str, present: str, bins: int) -> str:
    """Return the indicators of equal intervals, number by number."""
    scaled = graph("Floor", graph("Mul", values, np.float64(bins)))
    interval = graph("Unsqueeze", graph("Min", scaled, np.float64(bins - 1)), np.array([2]))
    inside = graph("And", graph("Equal", interval, np.arange(bins, dtype=np.float64)), present)
    return graph("Flatten", graph.cast(inside, np.float64), axis=1)


def _random_fourier(graph: Graph, feature_map: RandomFourier, records: str, columns: int) -> str:
    pairs = feature_map.count // 2
    bandwidth = math.sqrt(columns) / 4 if feature_map.bandwidth is None else float(feature_map.bandwidth)
    frequencies = _frequencies(columns, pairs, bandwidth, feature_map.seed)[:, :pairs].numpy()
    angles = graph("MatMul", graph.cast(records, np.float64), frequencies)
    both = graph.side_by_side([graph("Cos", angles), graph("Sin", angles)])
    return graph.cast(graph("Div", both, np.float64(math.sqrt(pairs))), np.float32)


# --- Feature maps of images -----------------------------------------------------------------------------------------


def _shaped(graph: Graph, values: str, *shape: int) -> str:
    """Return the values of every record in a shape."""
    return graph("Reshape", values, np.array([-1, *shape]))


def _bright(graph: Graph, records: str, pixels: int) -> str:
    """Return images divided by the root of their mean square."""
    squares = graph("ReduceSumSquare", records, np.array([1]), keepdims=1)
    lengths = graph("Max", graph("Sqrt", squares), np.array([TINY], np.float32))
    return graph("Div", records, graph("Div", lengths, np.array([math.sqrt(pixels)], np.float32)))


def _scattering(graph: Graph, feature_map: Scattering, records: str) -> str:
    channels, height, width = feature_map.image_shape
    bright = _shaped(graph, _bright(graph, records, channels * height * width), height, width)
    planes = _scatter(graph, feature_map, bright)
    paths, positions = feature_map.paths, math.prod(feature_map.grid)
    grouped = _shaped(graph, planes, feature_map.groups, paths // feature_map.groups * positions)
    centred = graph("Sub", grouped, graph("ReduceMean", grouped, np.array([2]), keepdims=1))
    variance = graph("ReduceMean", graph("Mul", centred, centred), np.array([2]), keepdims=1)
    scaled = graph(
        "Div", centred, graph("Sqrt", graph("Add", variance, np.array([_NORM_EPSILON], np.float32)))
    )
    normalised = _shaped(graph, scaled, paths, positions)
    if feature_map.whitening > 0.0:
        whitening = image_maps._whitening(feature_map)[:, :paths].numpy()
        normalised = graph("MatMul", np.ascontiguousarray(whitening.T), normalised)
    return graph.unit(graph("Flatten", normalised, axis=1), TINY)


def _scatter(graph: Graph, feature_map: Scattering, images: str) -> str:
    """Return the scattering coefficients of grey images, of shape (planes, paths, positions)."""
    _, height, width = feature_map.image_shape
    scales, positions = feature_map.scales, math.prod(feature_map.grid)
    filters = image_maps._filters(height, width, scales, feature_map.angles)
    averages = [matrix[:, :positions].numpy() for matrix in filters.averages]
    padded = _reflected(graph, images, height, width, scales)
    rows, columns = filters.wavelets[0][0].shape[1:3]
    spectrum = _transformed(graph, padded, rows, columns)
    flat = _shaped(graph, padded, 1, rows * columns)
    first, second = [graph("MatMul", flat, averages[0])], []
    for fine in range(scales):
        wavelets = filters.wavelets[fine][0][..., 0].numpy()
        moduli = _moduli(graph, spectrum, wavelets, 2**fine)
        side = (rows // 2**fine, columns // 2**fine)
        angles = len(wavelets)
        first.append(graph("MatMul", _shaped(graph, moduli, angles, math.prod(side)), averages[fine]))
        if fine + 1 < scales:
            inner = _transformed(graph, _shaped(graph, moduli, 1, *side), *side)
        coarser = []
        for coarse in range(fine + 1, scales):
            bank = filters.wavelets[coarse][fine][..., 0].numpy()
            step = 2 ** (coarse - fine)
            flat = _shaped(graph, _moduli(graph, inner, bank, step), angles, math.prod(side) // step**2)
            coarser.append(graph("MatMul", flat, averages[coarse]))
        if coarser:
            joined = graph.side_by_side(coarser)
            second.append(_shaped(graph, joined, angles * angles * len(coarser), positions))
    return graph("Concat", *first, *second, axis=1)


def _reflected(graph: Graph, images: str, height: int, width: int, scales: int) -> str:
    """Pad images by reflection, as shape (planes, 1, rows, columns)."""
    above = image_maps._padded(height, scales) - height
    left = image_maps._padded(width, scales) - width
    pads = np.array([0, above // 2, left // 2, 0, (above + 1) // 2, (left + 1) // 2])
    return graph("Unsqueeze", graph("Pad", images, pads, mode="reflect"), np.array([1]))


def _fourier(size: int, sign: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the matrix of a discrete Fourier transform, its real and its imaginary part."""
    turns = np.outer(np.arange(size), np.arange(size)) % size * (2 * math.pi / size)
    return np.cos(turns).astype(np.float32), (sign * np.sin(turns)).astype(np.float32)


def _transformed(graph: Graph, images: str, rows: int, columns: int) -> tuple[str, str]:
    """Return the Fourier transform of real images: F U F'."""
    real, imaginary = _fourier(rows, -1.0)
    left = graph("MatMul", real, images), graph("MatMul", imaginary, images)
    return _times(graph, left, *_fourier(columns, -1.0))


def _times(
    graph: Graph, values: tuple[str, str], real: NDArray[Any], imaginary: NDArray[Any]
) -> tuple[str, str]:
    """Return complex matrices times a complex constant matrix from the right."""
    a, b = values
    return (
        graph("Sub", graph("MatMul", a, real), graph("MatMul", b, imaginary)),
        graph("Add", graph("MatMul", a, imaginary), graph("MatMul", b, real)),
    )


def _moduli(graph: Graph, spectrum: tuple[str, str], wavelets: NDArray[np.float32], step: int) -> str:
    """Return |x * psi| subsampled by a step, for every wavelet; see `images._moduli`."""
    rows, columns = (side // step for side in wavelets.shape[1:])
    folded = []
    for part in spectrum:
        product = graph("Mul", part, wavelets / np.float32(step**2))
        if step > 1:
            blocks = graph("Reshape", product, np.array([0, 0, step, rows, step, columns]))
            product = graph("ReduceSum", blocks, np.array([2, 4]), keepdims=0)
        folded.append(product)
    real, imaginary = _fourier(rows, 1.0)
    left = (
        graph("Sub", graph("MatMul", real, folded[0]), graph("MatMul", imaginary, folded[1])),
        graph("Add", graph("MatMul", real, folded[1]), graph("MatMul", imaginary, folded[0])),
    )
    back = _times(graph, left, *(part / np.float32(rows * columns) for part in _fourier(columns, 1.0)))
    return graph("Sqrt", graph("Add", *(graph("Mul", part, part) for part in back)))


def _patches(graph: Graph, feature_map: Patches, records: str) -> str:
    channels, height, width = feature_map.image_shape
    shipped = image_maps._shipped()
    images = _shaped(graph, _bright(graph, records, channels * height * width), channels, height, width)
    sides = [
        _responses(graph, each, feature_map, shipped) for each in (images, _flipped(graph, images, width))
    ]
    means = graph("Div", graph("Add", *sides), np.array([2.0], np.float32))
    roots = graph("Transpose", graph("Sqrt", means), perm=[0, 2, 1])
    centred = graph("Sub", roots, graph("ReduceMean", roots, np.array([2]), keepdims=1))
    spread = graph("Sqrt", graph("ReduceMean", graph("Mul", centred, centred), np.array([2]), keepdims=1))
    cells = graph("Div", centred, graph("Max", spread, np.array([TINY], np.float32)))
    whitened = graph("Transpose", graph("MatMul", cells, shipped.whitening.numpy()), perm=[0, 2, 1])
    return graph.unit(graph("Flatten", whitened, axis=1), TINY)


def _responses(graph: Graph, images: str, feature_map: Patches, shipped: image_maps._PatchFilters) -> str:
    """Return the mean responses of the cells of one side; see `images.responses`."""
    filters = shipped.filters.numpy()
    box = np.full((1, *filters.shape[1:]), 1 / filters[0].size, np.float32)
    mean = graph("Conv", images, box)
    squares = graph("Conv", graph("Mul", images, images), box)
    variance = graph("Max", graph("Sub", squares, graph("Mul", mean, mean)), np.array([0.0], np.float32))
    contrast = graph("Sqrt", graph("Add", variance, np.array([CONTRAST**2], np.float32)))
    responses = graph("Div", graph("Conv", images, filters), contrast)
    z = graph("Sub", responses, shipped.offsets.numpy()[:, None, None])
    threshold = np.array([image_maps._THRESHOLD], np.float32)
    above = graph("Relu", graph("Sub", z, threshold))
    below = graph("Relu", graph("Sub", graph("Neg", z), threshold))
    inside = [side - filters.shape[2] + 1 for side in feature_map.image_shape[1:]]
    cells = feature_map.cells
    pooled = _pooled(graph, graph.side_by_side([above, below]), inside, [cells, cells])
    return _shaped(graph, pooled, 2 * len(filters), cells * cells)


def _pooled(graph: Graph, images: str, sides: list[int], cells: list[int], kind: type = np.float32) -> str:
    """Average the pixels of every cell, as `adaptive_avg_pool2d`."""
    down, across = (
        torch.nn.functional.adaptive_avg_pool1d(torch.eye(side, dtype=torch.float64)[None], number)[0].numpy()
        for side, number in zip(sides, cells, strict=True)
    )
    rows = graph("MatMul", np.ascontiguousarray(down.T).astype(kind), images)
    return graph("MatMul", rows, across.astype(kind))


def _flipped(graph: Graph, images: str, width: int) -> str:
    """Return mirror images."""
    return graph("Gather", images, np.arange(width)[::-1].copy(), axis=3)


def _mirrored(graph: Graph, feature_map: Mirrored, records: str) -> str:
    channels, height, width = feature_map.image_shape
    flipped = _flipped(graph, _shaped(graph, records, channels, height, width), width)
    mirror = graph("Flatten", flipped, axis=1)
    total = graph("Add", *(_scattering(graph, feature_map.feature_map, each) for each in (records, mirror)))
    across = feature_map.feature_map.grid[1]
    wide = _shaped(graph, total, feature_map.feature_map.paths * feature_map.feature_map.grid[0], across)
    left = graph("Slice", wide, *map(np.array, ([0], [(across + 1) // 2], [2])))
    return graph.unit(graph("Flatten", left, axis=1), TINY)


def _turned(graph: Graph, feature_map: Turned, records: str) -> str:
    channels, height, width = feature_map.image_shape
    pixels = height * width
    planes = _shaped(graph, _bright(graph, records, channels * pixels), channels, pixels)
    units = torch.eye(pixels).reshape(pixels, 1, height, width)
    parts = []
    for angle in feature_map.degrees:
        matrix = image_maps._turned(units, angle).reshape(pixels, pixels).numpy()
        turned = graph("Flatten", graph("MatMul", planes, matrix), axis=1)
        parts.append(_scattering(graph, feature_map.feature_map, turned))
    total = parts[0] if len(parts) == 1 else graph("Sum", *parts)
    if feature_map.pairs:
        across, back = image_maps._differences(feature_map.feature_map, feature_map.pairs)
        kept = np.ascontiguousarray(back[:, : across.shape[0]].numpy())
        total = graph("Sub", total, graph("MatMul", graph("MatMul", total, across.numpy()), kept))
    return graph.unit(total, TINY)


def _joined(graph: Graph, feature_map: Joined, records: str) -> str:
    parts = graph.side_by_side([_MAPS[type(each)](graph, each, records) for each in feature_map.maps])
    return graph("Div", parts, np.array([math.sqrt(len(feature_map.maps))], np.float32))


def _reduced(graph: Graph, feature_map: Reduced, records: str) -> str:
    images = _shaped(graph, graph.cast(records, np.float64), *feature_map.image_shape)
    sides, cells = list(feature_map.image_shape[1:]), list(feature_map.feature_map.image_shape[1:])
    small = graph.cast(_pooled(graph, images, sides, cells, np.float64), np.float32)
    inner = feature_map.feature_map
    return _MAPS[type(inner)](graph, inner, graph("Flatten", small, axis=1))


_MAPS: dict[type[FeatureMap], Callable[[Graph, Any, str], str]] = {
    Identity: lambda _graph, _map, records: records,
    Scaling: _scaling,
    OneHot: _one_hot,
    UnitNorm: _unit_norm,
    TableFeatures: _table,
    Scattering: _scattering,
    Patches: _patches,
    Mirrored: _mirrored,
    Turned: _turned,
    Joined: _joined,
    Reduced: _reduced,
}


# --- Classifiers ------------------------------------------------------------------------------------------------------


def _classify(graph: Graph, classifier: HeadWeights | PrivateNetwork, features: str) -> str:
    """Add the operations of a classifier."""
    if isinstance(classifier, HeadWeights):
        rows = _centred(
            graph, features, classifier.centre, classifier.radius, classifier.bias, classifier.whitening
        )
        return graph("MatMul", rows, np.ascontiguousarray(classifier.weights.T))
    assert isinstance(classifier.network, MLP)
    if classifier.centring is not None:
        features = _centring(graph, features, classifier.centring)
    return graph.cast(_network(graph, classifier.network, features), np.float64)


def _centred(
    graph: Graph,
    features: str,
    centre: NDArray[np.float64],
    radius: float,
    bias: float,
    whitening: NDArray[np.float64] | None,
) -> str:
    """Return clipped, centred and whitened rows on the grid; see `exact_sums`."""
    scaled = graph("Div", graph.cast(features, np.float64), np.float64(radius))
    lengths = graph("Sqrt", graph("ReduceSumSquare", scaled, np.array([1]), keepdims=1))
    factors = graph("Div", np.float64(_SHORTENED), graph("Max", lengths, np.array([[_SHORTENED]])))
    clipped = _on_grid(graph, graph("Mul", scaled, factors))
    shifted = graph("Sub", clipped, centre)
    shifted = graph("Pad", shifted, np.array([0, 0, 0, 1]), np.float64(on_grid(np.array(bias))))
    squares = graph("ReduceSumSquare", shifted, np.array([1]), keepdims=1)
    unit = graph("Div", shifted, graph("Sqrt", graph("Max", squares, np.array([[2.0**-60]]))))
    rows = _on_grid(graph, graph("Mul", unit, np.float64(_SHORTENED)))
    return rows if whitening is None else _whitened(graph, rows, whitening)


def _on_grid(graph: Graph, values: str) -> str:
    """Round towards zero to multiples of 2^-20."""
    return graph("Div", graph.trunc(graph("Mul", values, np.float64(_UNIT))), np.float64(_UNIT))


def _whitened(graph: Graph, rows: str, whitening: NDArray[np.float64]) -> str:
    """Return `A g / ||A g||` on the grid."""
    images = graph("Mul" if whitening.ndim == 1 else "MatMul", rows, whitening)
    images = graph.trunc(graph("Mul", images, np.float64(_IMAGE_UNIT)))
    squares = graph("ReduceSumSquare", images, np.array([1]), keepdims=1)
    lengths = graph("Sqrt", graph("Max", squares, np.array([[1.0]])))
    units = graph("Div", graph("Mul", images, np.float64(_UNIT * _SHORTENED)), lengths)
    return graph("Div", graph.trunc(units), np.float64(_UNIT))


def _centring(graph: Graph, features: str, centring: Centring) -> str:
    """Return what the network of DP-SGD sees; see `Centring.rows`."""
    rows = _centred(graph, features, centring.centre, centring.radius, 1.0 / ROW_LENGTH, centring.scale)
    kept = graph("Slice", rows, *map(np.array, ([0], [-1], [1])))
    return graph.cast(graph("Mul", kept, np.float64(ROW_LENGTH)), np.float32)


def _network(graph: Graph, network: MLP, features: str) -> str:
    """Return the logits of a network."""
    signal = graph.cast(
        features, network.kernels[0].numpy().dtype.type
    )  # networks with exact noise have float64 weights
    for kernel, bias in zip(network.kernels[:-1], network.biases[:-1], strict=True):
        summed = graph("Add", graph("MatMul", signal, kernel[0].numpy()), bias[0].numpy())
        signal = graph(network.activation.capitalize(), summed)
    last = np.ascontiguousarray(network.kernels[-1][0].numpy().T)
    return graph("Add", graph("MatMul", signal, last), network.biases[-1][0].numpy())

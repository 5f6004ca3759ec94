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
from quietmax._lazy import required
from quietmax.errors import InvalidInput
from quietmax.estimators.dpsgd.estimator import Centring, PrivateNetwork
from quietmax.estimators.dpsgd.training import ROW_LENGTH
from quietmax.estimators.head.exact_sums import BITS, on_grid
from quietmax.estimators.head.weights import HeadWeights, TableWeights
from quietmax.estimators.serialization import PrivateModel
from quietmax.export.graph import (
    IR_VERSION,
    OPSET,
    Graph,
    Value,
    _any_of,
    _encode_column,
    _input_type,
    _side_by_side,
)
from quietmax.export.released import _metadata, _open_released
from quietmax.models.features import images as image_maps
from quietmax.models.features.base import FeatureMap
from quietmax.models.features.cells import CROSSED_LEVELS, TableCells
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
_ONE_MORE = np.array([0, 0, 0, 1])
"""Pads rows by one column."""


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
    """
    content = _onnx_model(folder).SerializeToString()
    atomic_write(Path(file), lambda staging: staging.write_bytes(content))


def _onnx_model(folder: str | Path) -> Any:
    """Return a released model as an ONNX model; see `export_onnx`."""
    onnx, model = required("onnx", "An export to ONNX"), _open_released(folder)
    columns = model.encoding.columns if model.encoding else ()
    names = [column.name for column in columns] or [_FEATURES]
    label, probabilities = (_free(name, names) for name in (_LABEL, _PROBABILITIES))
    graph = Graph([*names, label, probabilities])

    def _info(name: str, kind: type, *shape: str | int) -> Any:
        return onnx.helper.make_tensor_value_info(name, graph._type(kind), ["rows", *shape])

    inputs = [_info(column.name, _input_type(column)) for column in columns]
    _answers(graph, model, label, probabilities)
    outputs = [_info(label, np.str_), _info(probabilities, np.float64, len(model.classes))]
    if sum(each.ByteSize() for each in graph.constants) > _MOST_BYTES:
        raise InvalidInput("The model is too large for one ONNX file, which has at most 2 GB.")
    inputs = inputs or [_info(_FEATURES, np.float32, model.inputs)]
    written = onnx.helper.make_model(
        onnx.helper.make_graph(graph.nodes, "quietmax", inputs, outputs, graph.constants),
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="quietmax",
        producer_version=__version__,
        doc_string=str(model.guarantee),
    )
    about = _metadata(model, (Path(folder) / DESCRIPTION_FILE).read_bytes())
    texts = {
        name: each if isinstance(each, str) else json.dumps(each, ensure_ascii=False)
        for name, each in about.items()
    }
    onnx.helper.set_model_props(written, texts)
    onnx.checker.check_model(written)
    return written


def _free(name: str, taken: list[str]) -> str:
    """Return a name that no column has."""
    while name in taken:
        name += "_"
    return name


def _answers(graph: Graph, model: PrivateModel, label: str, probabilities: str) -> None:
    """Add the operations from the inputs to the outputs."""
    records, unreadable = _encoded(graph, model)
    if model.features is not None:
        records = _map_features(model.features, records, model.inputs)
    logits = _classify(model.classifier, records)  # type: ignore[arg-type]
    names = graph("Gather", np.array(model.classes), logits("ArgMax", axis=1, keepdims=0))
    shares = logits("Softmax", axis=1)
    if unreadable is not None:
        names = unreadable("Where", np.array(""), names)
        shares = unreadable._column()("Where", np.float64(np.nan), shares)
    graph._output(names, label)
    graph._output(shares, probabilities)


def _encoded(graph: Graph, model: PrivateModel) -> tuple[Value, Value | None]:
    """Return the encoded records, and which rows cannot be read."""
    if model.encoding is None:
        numbers = Value(graph, _FEATURES)
        infinite = (numbers("IsNaN") | numbers("IsInf"))._cast(np.float32)
        return numbers, infinite("ReduceMax", np.array([1]), keepdims=0)._cast(np.bool_)
    columns = [_encode_column(graph, column) for column in model.encoding.columns]
    doubts = [unreadable for _, unreadable in columns if unreadable is not None]
    return _side_by_side([features for features, _ in columns]), _any_of(doubts) if doubts else None


# --- Feature maps -----------------------------------------------------------------------------------------------------


def _map_features(feature_map: FeatureMap, records: Value, columns: int) -> Value:
    """Add the operations of a feature map."""
    if isinstance(feature_map, Pipeline):
        for step in feature_map.maps:
            records = _map_features(step, records, columns)
            columns = step.dimension(columns)
        return records
    if isinstance(feature_map, RandomFourier):
        return _random_fourier(feature_map, records, columns)
    add = _MAPS.get(type(feature_map))
    if add is None:
        raise InvalidInput(
            f"The features '{feature_map.kind}' cannot be exported to ONNX. The other formats can hold them."
        )
    return add(feature_map, records)


def _scaling(feature_map: Scaling, records: Value) -> Value:
    low, high = np.array(feature_map.low), np.array(feature_map.high)
    clipped = records._cast(np.float64)("Max", low)("Min", high)
    shares: Value = (clipped - low) / (high - low)
    return shares._cast(np.float32)


def _one_hot(feature_map: OneHot, records: Value) -> Value:
    parts = []
    for place, categories in enumerate(feature_map.categories):
        part = records("Gather", np.array([place]), axis=1)
        if categories is not None:
            part = part("Equal", np.array(categories, np.float32))._cast(np.float32)
        parts.append(part)
    return _side_by_side(parts)


def _unit_norm(feature_map: UnitNorm, records: Value) -> Value:
    wide = records._cast(np.float64)
    if feature_map.constant > 0.0:
        wide = wide("Pad", _ONE_MORE, np.float64(feature_map.constant))
    return _divided(wide)._cast(np.float32)


def _divided(rows: Value) -> Value:
    """Return rows of float64 divided by their length; a row of zeros stays."""
    lengths = rows._squares()("Sqrt")
    positive: Value = lengths > 0.0
    return rows / positive("Where", lengths, 1.0)


def _table(feature_map: TableFeatures, records: Value) -> Value:
    encoded = records._cast(np.float64)
    parts = [encoded]
    if feature_map.bins and feature_map.numbers:
        values = encoded("Gather", np.array(feature_map.numbers), axis=1)("Clip", 0.0, 1.0)
        # A number that cannot be missing has its flag in a further column of zeros.
        flags = [feature_map.columns if flag is None else flag for flag in feature_map.missing]
        flagged = encoded("Pad", _ONE_MORE)("Gather", np.array(flags), axis=1)
        present = flagged("Equal", 0.0)("Unsqueeze", np.array([2]))
        parts += [_bins(values, present, bins) for bins in feature_map.bins]
    wide = _side_by_side(parts)
    crosses = []
    for (a, b), (c, d) in feature_map.crosses:
        first = _sliced(wide, a, b)("Unsqueeze", np.array([2]))
        second = _sliced(wide, c, d)("Unsqueeze", np.array([1]))
        crosses.append((first * second)("Flatten", axis=1))
    return _divided(_side_by_side([wide, *crosses]))._cast(np.float32)


def _sliced(rows: Value, start: int, end: int, axis: int = 1) -> Value:
    return rows("Slice", np.array([start]), np.array([end]), np.array([axis]))


def _bins(values: Value, present: Value, bins: int) -> Value:
    """Return the indicators of equal intervals, number by number."""
    interval = (values * float(bins))("Floor")("Min", np.float64(bins - 1))("Unsqueeze", np.array([2]))
    inside = interval("Equal", np.arange(bins, dtype=np.float64)) & present
    return inside._cast(np.float64)("Flatten", axis=1)


def _cells(feature_map: TableCells, records: Value) -> Value:
    """Return the index of the cell in each column and cross; see `TableCells`."""
    levels, crossed = feature_map.levels, feature_map._crossed
    cells, coarse = [], []
    for position, (first, last) in enumerate(feature_map.parts):
        part = _sliced(records, first, last)
        if position in feature_map.numbers:
            cells.append(_level(part, last - first, levels))
            coarse.append((cells[-1] / np.float32(levels // CROSSED_LEVELS))("Floor"))
        else:
            cells.append(_indicated(part, last - first))
            coarse.append(cells[-1])
    pairs = [coarse[one] * np.float32(crossed(other)) + coarse[other] for one, other in feature_map.crosses]
    return _side_by_side([*cells, *pairs])


def _level(part: Value, width: int, levels: int) -> Value:
    """Return the interval of each share, and the last cell for a missing value."""
    share = _sliced(part, 0, 1)("Clip", np.float32(0.0), np.float32(1.0))
    level = (share * np.float32(levels))("Floor")("Min", np.float32(levels - 1))
    missing = _sliced(part, 1, 2) > np.float32(0.0) if width == 2 else None
    return level if missing is None else missing("Where", np.float32(levels), level)


def _indicated(part: Value, width: int) -> Value:
    """Return the position of each row's largest positive indicator, or their number if there is none."""
    positive: Value = part("ReduceMax", np.array([1]), keepdims=1) > np.float32(0.0)
    return positive("Where", part("ArgMax", axis=1, keepdims=1)._cast(np.float32), np.float32(width))


def _random_fourier(feature_map: RandomFourier, records: Value, columns: int) -> Value:
    pairs = feature_map.count // 2
    bandwidth = math.sqrt(columns) / 4 if feature_map.bandwidth is None else float(feature_map.bandwidth)
    frequencies = _frequencies(columns, pairs, bandwidth, feature_map.seed)[:, :pairs].numpy()
    angles = records._cast(np.float64) @ frequencies
    return (_side_by_side([angles("Cos"), angles("Sin")]) / math.sqrt(pairs))._cast(np.float32)


# --- Feature maps of images -------------------------------------------------------------------------------------------

_Complex = tuple[Value, Value]
"""The real and the imaginary part of a value."""


def _shaped(values: Value, *shape: int) -> Value:
    """Return the values of every record in a shape."""
    return values("Reshape", np.array([-1, *shape]))


def _bright(records: Value, pixels: int) -> Value:
    """Return images divided by the root of their mean square."""
    lengths = records._squares()("Sqrt")("Max", np.float32(TINY))
    return records / (lengths / np.float32(math.sqrt(pixels)))


def _centred_groups(values: Value) -> tuple[Value, Value]:
    """Return values without their mean over the last axis, and their variance."""
    centred = values - values("ReduceMean", np.array([2]), keepdims=1)
    return centred, (centred * centred)("ReduceMean", np.array([2]), keepdims=1)


def _scattering(feature_map: Scattering, records: Value) -> Value:
    channels, height, width = feature_map.image_shape
    bright = _shaped(_bright(records, channels * height * width), height, width)
    paths, positions = feature_map.paths, math.prod(feature_map.grid)
    grouped = _shaped(
        _scatter(feature_map, bright), feature_map.groups, paths // feature_map.groups * positions
    )
    centred, variance = _centred_groups(grouped)
    normalised = _shaped(centred / (variance + np.float32(_NORM_EPSILON))("Sqrt"), paths, positions)
    if feature_map.whitening > 0.0:
        whitening = image_maps._whitening(feature_map)[:, :paths].numpy()
        normalised = np.ascontiguousarray(whitening.T) @ normalised
    return normalised("Flatten", axis=1)._unit(TINY)


def _scatter(feature_map: Scattering, images: Value) -> Value:
    """Return the scattering coefficients of grey images, of shape (planes, paths, positions)."""
    _, height, width = feature_map.image_shape
    scales, positions = feature_map.scales, math.prod(feature_map.grid)
    filters = image_maps._filters(height, width, scales, feature_map.angles)
    averages = [matrix[:, :positions].numpy() for matrix in filters.averages]
    padded = _reflected(images, height, width, scales)
    rows, columns = filters.wavelets[0][0].shape[1:3]
    spectrum = _transformed(padded, rows, columns)
    first, second = [_shaped(padded, 1, rows * columns) @ averages[0]], []
    for fine in range(scales):
        wavelets = filters.wavelets[fine][0][..., 0].numpy()
        moduli = _moduli(spectrum, wavelets, 2**fine)
        side = (rows // 2**fine, columns // 2**fine)
        angles = len(wavelets)
        first.append(_shaped(moduli, angles, math.prod(side)) @ averages[fine])
        if fine + 1 < scales:
            inner = _transformed(_shaped(moduli, 1, *side), *side)
        coarser = []
        for coarse in range(fine + 1, scales):
            bank = filters.wavelets[coarse][fine][..., 0].numpy()
            step = 2 ** (coarse - fine)
            flat = _shaped(_moduli(inner, bank, step), angles, math.prod(side) // step**2)
            coarser.append(flat @ averages[coarse])
        if coarser:
            second.append(_shaped(_side_by_side(coarser), angles * angles * len(coarser), positions))
    return _side_by_side([*first, *second])


def _reflected(images: Value, height: int, width: int, scales: int) -> Value:
    """Pad images by reflection, as shape (planes, 1, rows, columns)."""
    above = image_maps._padded(height, scales) - height
    left = image_maps._padded(width, scales) - width
    pads = np.array([0, above // 2, left // 2, 0, (above + 1) // 2, (left + 1) // 2])
    return images("Pad", pads, mode="reflect")("Unsqueeze", np.array([1]))


def _fourier(size: int, sign: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the matrix of a discrete Fourier transform, its real and its imaginary part."""
    turns = np.outer(np.arange(size), np.arange(size)) % size * (2 * math.pi / size)
    return np.cos(turns).astype(np.float32), (sign * np.sin(turns)).astype(np.float32)


def _transformed(images: Value, rows: int, columns: int) -> _Complex:
    """Return the Fourier transform of real images: F U F'."""
    real, imaginary = _fourier(rows, -1.0)
    return _product((real @ images, imaginary @ images), _fourier(columns, -1.0))


def _product(left: tuple[Any, Any], right: tuple[Any, Any]) -> _Complex:
    """Return the product of complex matrices, of which one may be constant."""
    (a, b), (c, d) = left, right
    return a @ c - b @ d, a @ d + b @ c


def _moduli(spectrum: _Complex, wavelets: NDArray[np.float32], step: int) -> Value:
    """Return |x * psi| subsampled by a step, for every wavelet; see `images._moduli`."""
    rows, columns = (side // step for side in wavelets.shape[1:])
    folded = []
    for part in spectrum:
        product = part * (wavelets / np.float32(step**2))
        if step > 1:
            blocks = product("Reshape", np.array([0, 0, step, rows, step, columns]))
            product = blocks("ReduceSum", np.array([2, 4]), keepdims=0)
        folded.append(product)
    left = _product(_fourier(rows, 1.0), (folded[0], folded[1]))
    real, imaginary = (part / np.float32(rows * columns) for part in _fourier(columns, 1.0))
    back, turned = _product(left, (real, imaginary))
    return (back * back + turned * turned)("Sqrt")


def _patches(feature_map: Patches, records: Value) -> Value:
    channels, height, width = feature_map.image_shape
    shipped = image_maps._shipped()
    images = _shaped(_bright(records, channels * height * width), channels, height, width)
    left, right = (_responses(each, feature_map, shipped) for each in (images, _flipped(images, width)))
    roots = ((left + right) / np.float32(2.0))("Sqrt")("Transpose", perm=[0, 2, 1])
    centred, variance = _centred_groups(roots)
    cells = centred / variance("Sqrt")("Max", np.float32(TINY))
    whitened = (cells @ shipped.whitening.numpy())("Transpose", perm=[0, 2, 1])
    return whitened("Flatten", axis=1)._unit(TINY)


def _responses(images: Value, feature_map: Patches, shipped: image_maps._PatchFilters) -> Value:
    """Return the mean responses of the cells of one side; see `images._responses`."""
    filters = shipped.filters.numpy()
    box = np.full((1, *filters.shape[1:]), 1 / filters[0].size, np.float32)
    mean = images("Conv", box)
    variance = ((images * images)("Conv", box) - mean * mean)("Max", np.float32(0.0))
    contrast = (variance + np.float32(CONTRAST**2))("Sqrt")
    z = images("Conv", filters) / contrast - shipped.offsets.numpy()[:, None, None]
    threshold = np.float32(image_maps._THRESHOLD)
    above, below = (z - threshold)("Relu"), (z("Neg") - threshold)("Relu")
    inside = [side - filters.shape[2] + 1 for side in feature_map.image_shape[1:]]
    cells = feature_map.cells
    pooled = _pooled(_side_by_side([above, below]), inside, [cells, cells])
    return _shaped(pooled, 2 * len(filters), cells * cells)


def _pooled(images: Value, sides: list[int], cells: list[int], kind: type = np.float32) -> Value:
    """Average the pixels of every cell, as `adaptive_avg_pool2d`."""
    down, across = (
        torch.nn.functional.adaptive_avg_pool1d(torch.eye(side, dtype=torch.float64)[None], number)[0].numpy()
        for side, number in zip(sides, cells, strict=True)
    )
    rows: Value = np.ascontiguousarray(down.T).astype(kind) @ images
    return rows @ across.astype(kind)


def _flipped(images: Value, width: int) -> Value:
    """Return mirror images."""
    return images("Gather", np.arange(width)[::-1].copy(), axis=3)


def _mirrored(feature_map: Mirrored, records: Value) -> Value:
    channels, height, width = feature_map.image_shape
    mirror = _flipped(_shaped(records, channels, height, width), width)("Flatten", axis=1)
    inner = feature_map.feature_map
    total = _scattering(inner, records) + _scattering(inner, mirror)
    across = inner.grid[1]
    wide = _shaped(total, inner.paths * inner.grid[0], across)
    return _sliced(wide, 0, (across + 1) // 2, axis=2)("Flatten", axis=1)._unit(TINY)


def _turned(feature_map: Turned, records: Value) -> Value:
    channels, height, width = feature_map.image_shape
    pixels = height * width
    planes = _shaped(_bright(records, channels * pixels), channels, pixels)
    units = torch.eye(pixels).reshape(pixels, 1, height, width)
    parts = []
    for angle in feature_map.degrees:
        matrix = image_maps._turned(units, angle).reshape(pixels, pixels).numpy()
        parts.append(_scattering(feature_map.feature_map, (planes @ matrix)("Flatten", axis=1)))
    total = parts[0] if len(parts) == 1 else parts[0]("Sum", *parts[1:])
    if feature_map.pairs:
        across, back = image_maps._differences(feature_map.feature_map, feature_map.pairs)
        kept = np.ascontiguousarray(back[:, : across.shape[0]].numpy())
        total = total - total @ across.numpy() @ kept
    return total._unit(TINY)


def _joined(feature_map: Joined, records: Value) -> Value:
    parts = _side_by_side([_MAPS[type(each)](each, records) for each in feature_map.maps])
    return parts / np.float32(math.sqrt(len(feature_map.maps)))


def _reduced(feature_map: Reduced, records: Value) -> Value:
    inner = feature_map.feature_map
    images = _shaped(records._cast(np.float64), *feature_map.image_shape)
    sides, cells = list(feature_map.image_shape[1:]), list(inner.image_shape[1:])
    small = _pooled(images, sides, cells, np.float64)._cast(np.float32)
    return _MAPS[type(inner)](inner, small("Flatten", axis=1))


_MAPS: dict[type[FeatureMap], Callable[[Any, Value], Value]] = {
    Identity: lambda _map, records: records,
    Scaling: _scaling,
    OneHot: _one_hot,
    UnitNorm: _unit_norm,
    TableFeatures: _table,
    TableCells: _cells,
    Scattering: _scattering,
    Patches: _patches,
    Mirrored: _mirrored,
    Turned: _turned,
    Joined: _joined,
    Reduced: _reduced,
}


# --- Classifiers ------------------------------------------------------------------------------------------------------


def _classify(classifier: HeadWeights | TableWeights | PrivateNetwork, features: Value) -> Value:
    """Add the operations of a classifier."""
    if isinstance(classifier, TableWeights):
        return _looked_up(classifier, features)
    if isinstance(classifier, HeadWeights):
        rows = _centred(features, classifier.centre, classifier.radius, classifier.bias, classifier.whitening)
        return rows @ np.ascontiguousarray(classifier.weights.T)
    assert isinstance(classifier.network, MLP)
    if classifier.centring is not None:
        features = _centring(features, classifier.centring)
    return _network(classifier.network, features)._cast(np.float64)


def _looked_up(classifier: TableWeights, cells: Value) -> Value:
    """Return the sum of a constant and of what each cell adds to the logits, column by column."""
    ends = np.cumsum(classifier.sizes)
    added = []
    for place, (size, end) in enumerate(zip(classifier.sizes, ends, strict=True)):
        index = cells("Gather", np.array(place), axis=1)._cast(np.int64)
        table = np.ascontiguousarray(classifier.weights[:, end - size : end].T)
        added.append(cells.graph("Gather", table, index))
    return cells.graph("Sum", classifier.weights[:, -1].copy(), *added)


def _centred(
    features: Value,
    centre: NDArray[np.float64],
    radius: float,
    bias: float,
    whitening: NDArray[np.float64] | None,
) -> Value:
    """Return clipped, centred and whitened rows on the grid; see `exact_sums`."""
    scaled = features._cast(np.float64) / np.float64(radius)
    factors = np.float64(_SHORTENED) / scaled._squares()("Sqrt")("Max", np.array([[_SHORTENED]]))
    shifted = _on_grid(scaled * factors) - centre
    shifted = shifted("Pad", _ONE_MORE, np.float64(on_grid(np.array(bias))))
    unit = shifted / shifted._squares()("Max", np.array([[2.0**-60]]))("Sqrt")
    rows = _on_grid(unit * _SHORTENED)
    if whitening is None:
        return rows
    # A g / ||A g||
    images = rows * whitening if whitening.ndim == 1 else rows @ whitening
    images = (images * _IMAGE_UNIT)._trunc()
    lengths = images._squares()("Max", np.array([[1.0]]))("Sqrt")
    return (images * (_UNIT * _SHORTENED) / lengths)._trunc() / _UNIT


def _on_grid(values: Value) -> Value:
    """Round towards zero to multiples of 2^-20."""
    return (values * _UNIT)._trunc() / _UNIT


def _centring(features: Value, centring: Centring) -> Value:
    """Return what the network of DP-SGD sees; see `Centring.rows`."""
    rows = _centred(features, centring.centre, centring.radius, 1.0 / ROW_LENGTH, centring.scale)
    return (_sliced(rows, 0, -1) * ROW_LENGTH)._cast(np.float32)


def _network(network: MLP, features: Value) -> Value:
    """Return the logits of a network."""
    signal = features._cast(network.kernels[0].numpy().dtype.type)  # with exact noise the weights are float64
    for kernel, bias in zip(network.kernels[:-1], network.biases[:-1], strict=True):
        summed = signal @ kernel[0].numpy() + bias[0].numpy()
        signal = summed(network.activation.capitalize())
    last = np.ascontiguousarray(network.kernels[-1][0].numpy().T)
    return signal @ last + network.biases[-1][0].numpy()

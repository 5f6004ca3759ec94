"""Feature maps and classifiers as ONNX operations, in the order and the precision of their own modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quietmax.errors import InvalidInput
from quietmax.estimators.dpsgd.centring import Centring
from quietmax.estimators.dpsgd.config import ROW_LENGTH
from quietmax.estimators.dpsgd.estimator import PrivateNetwork
from quietmax.estimators.head.exact_sums import BITS, on_grid
from quietmax.estimators.head.weights import HeadWeights
from quietmax.export import image_nodes
from quietmax.export.graph import Graph
from quietmax.models.features.base import FeatureMap
from quietmax.models.features.generic import Pipeline, RandomFourier, _frequencies
from quietmax.models.features.tabular import Identity, OneHot, Scaling, TableFeatures, UnitNorm
from quietmax.models.mlp import MLP

_UNIT = 2.0**BITS
_SHORTENED = 1.0 - 2.0**-36
_IMAGE_UNIT = 2.0**26


def map_features(graph: Graph, feature_map: FeatureMap, records: str, columns: int) -> str:
    """Add the operations of a feature map.

    Parameters
    ----------
    graph : Graph
        The graph.
    feature_map : FeatureMap
        The map.
    records : str
        float32 of shape (rows, columns).
    columns : int
        Numbers per record.

    Returns
    -------
    str
        float32 of shape (rows, features).

    Raises
    ------
    InvalidInput
        If the map cannot be exported.
    """
    if isinstance(feature_map, Pipeline):
        for step in feature_map.maps:
            records = map_features(graph, step, records, columns)
            columns = step.dimension(columns)
        return records
    if type(feature_map) in image_nodes.MAPS:
        return image_nodes.map_images(graph, feature_map, records)
    add = _MAPS.get(type(feature_map))
    if add is None:
        raise InvalidInput(
            f"The features '{feature_map.kind}' cannot be exported to ONNX. The other formats can hold them."
        )
    return add(graph, feature_map, records, columns)


def _identity(graph: Graph, feature_map: Identity, records: str, columns: int) -> str:  # noqa: ARG001
    return records


def _scaling(graph: Graph, feature_map: Scaling, records: str, columns: int) -> str:  # noqa: ARG001
    low, high = np.array(feature_map.low), np.array(feature_map.high)
    clipped = graph("Min", graph("Max", graph.cast(records, np.float64), low), high)
    return graph.cast(graph("Div", graph("Sub", clipped, low), high - low), np.float32)


def _one_hot(graph: Graph, feature_map: OneHot, records: str, columns: int) -> str:  # noqa: ARG001
    parts = []
    for place, categories in enumerate(feature_map.categories):
        part = graph("Gather", records, np.array([place]), axis=1)
        if categories is not None:
            part = graph.cast(graph("Equal", part, np.array(categories, np.float32)), np.float32)
        parts.append(part)
    return graph.side_by_side(parts)


def _unit_norm(graph: Graph, feature_map: UnitNorm, records: str, columns: int) -> str:  # noqa: ARG001
    wide = graph.cast(records, np.float64)
    if feature_map.constant > 0.0:
        wide = graph("Pad", wide, np.array([0, 0, 0, 1]), np.float64(feature_map.constant))
    return graph.cast(_divided(graph, wide), np.float32)


def _divided(graph: Graph, rows: str) -> str:
    """Return rows of float64 divided by their length; a row of zeros stays."""
    lengths = graph("Sqrt", graph("ReduceSumSquare", rows, np.array([1]), keepdims=1))
    positive = graph("Greater", lengths, np.array([0.0]))
    return graph("Div", rows, graph("Where", positive, lengths, np.array([1.0])))


def _table(graph: Graph, feature_map: TableFeatures, records: str, columns: int) -> str:
    encoded = graph.cast(records, np.float64)
    parts = [encoded]
    if feature_map.bins and feature_map.numbers:
        numbers = graph("Gather", encoded, np.array(feature_map.numbers), axis=1)
        values = graph("Clip", numbers, np.float64(0.0), np.float64(1.0))
        # A number that cannot be missing has its flag in a further column of zeros.
        flags = [columns if flag is None else flag for flag in feature_map.missing]
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


_MAPS: dict[type[FeatureMap], Callable[[Graph, Any, str, int], str]] = {
    Identity: _identity,
    Scaling: _scaling,
    OneHot: _one_hot,
    UnitNorm: _unit_norm,
    TableFeatures: _table,
    RandomFourier: _random_fourier,
}


# --- Classifiers ------------------------------------------------------------------------------------------------------


def classify(graph: Graph, classifier: HeadWeights | PrivateNetwork, features: str) -> str:
    """Add the operations of a classifier.

    Parameters
    ----------
    graph : Graph
        The graph.
    classifier : HeadWeights or PrivateNetwork
        The released weights.
    features : str
        float32 of shape (rows, features).

    Returns
    -------
    str
        Logits, float64 of shape (rows, classes).
    """
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

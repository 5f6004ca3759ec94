from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from quietmax._threads import parallel_map
from quietmax.errors import InvalidInput
from quietmax.models.features import (
    FeatureMap,
    Identity,
    OneHot,
    Pipeline,
    RandomFourier,
    Scaling,
    Scattering,
    TableFeatures,
    UnitNorm,
    image_features,
)
from quietmax.models.features.generic import feature_map_from_json
from quietmax.models.features.images import Joined, Mirrored, Patches, Reduced, Turned
from tests.models.features.maps import COLUMNS, MAPS, SAVEABLE, ModuleMap, named, records


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_results_come_in_order_and_torch_has_one_thread_meanwhile() -> None:
    seen = parallel_map(lambda piece: (piece, torch.get_num_threads()), 7)
    assert seen == [(piece, 1) for piece in range(7)]
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_as_many_pieces_run_at_once_as_torch_had_threads() -> None:
    together = threading.Barrier(3, timeout=30)
    parallel_map(lambda _piece: together.wait(), 3)  # would break if fewer than three ran at once


@pytest.mark.usefixtures("three_threads")
def test_the_number_of_threads_is_restored_after_nested_and_failed_work() -> None:
    def fails(piece: int) -> None:
        parallel_map(lambda inner: inner, 2)
        if piece == 1:
            raise ValueError("one piece fails")

    with pytest.raises(ValueError, match="one piece fails"):
        parallel_map(fails, 4)
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("feature_map", MAPS, ids=named)
def test_features_are_float32_of_the_stated_dimension_also_of_no_records(feature_map: FeatureMap) -> None:
    features = feature_map.transform(records(3))
    assert features.dtype == np.float32
    assert features.shape == (3, feature_map.dimension(COLUMNS))
    assert np.isfinite(features).all()
    assert feature_map.transform(np.empty((0, COLUMNS))).shape == (0, feature_map.dimension(COLUMNS))


class CosineOfSum(torch.nn.Module):
    """The cosine of a float64 sum, which records at odd positions of a batch may add up from the other end."""

    def __init__(self, *, reverses: bool) -> None:
        super().__init__()
        self.reverses = reverses

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        ordered = batch.double().clone()
        if self.reverses:
            ordered[1::2] = ordered[1::2].flip(1)
        return ordered.cumsum(1)[:, -1:].cos()


class Lookup(torch.nn.Module):
    """Rows of a table by their numbers, which must be 0 or 1."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(2, 3)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.rows(batch.long())
        return features


@pytest.mark.parametrize(("reverses", "rows"), [(True, 1), (False, 64)])
def test_another_order_of_a_float64_sum_is_seen_on_large_numbers(reverses: bool, rows: int) -> None:
    feature_map = ModuleMap(CosineOfSum(reverses=reverses), outputs=1)
    assert feature_map._rows_at_once(12) == rows
    table = 1e12 * np.random.default_rng(0).normal(size=(70, 12))
    features = feature_map.transform(table)
    np.testing.assert_array_equal(feature_map.transform(table[1:]), features[1:])


def test_a_map_that_refuses_large_numbers_is_checked_on_small_ones() -> None:
    feature_map = ModuleMap(Lookup(), outputs=6)
    assert feature_map._rows_at_once(2) == 64
    assert feature_map.transform([[0.0, 1.0]]).shape == (1, 6)


@pytest.mark.parametrize(
    "table", [[[np.nan, 1.0]], [[np.inf, 1.0]], [[1e300, 1.0]], [1.0, 2.0], [["a", "b"]], 3.0], ids=str
)
def test_anything_but_a_finite_matrix_is_rejected(table: Any) -> None:
    with pytest.raises(InvalidInput, match="The records"):
        Identity().transform(table)


SHAPE = (3, 9, 8)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        # generic
        (lambda: RandomFourier(count=3), "even and at least 2, got 3"),
        (lambda: RandomFourier(bandwidth=0.0), "bandwidth must be a positive number, got 0"),
        (lambda: RandomFourier(seed=-1), "seed must be an integer of at least 0, got -1"),
        (lambda: Pipeline(()), "at least one feature map"),
        (lambda: Pipeline(("identity",)), "at least one feature map"),  # type: ignore[arg-type]
        # images
        (lambda: Scattering((1, 4, 4)), "more than 4 pixels in height and width, got 4 x 4"),
        (lambda: Scattering((28, 28)), "image shape"),  # type: ignore[arg-type]
        (lambda: Scattering((1, 28, 28), groups=10), "divide the 81 scattering paths, got 10"),
        (lambda: Scattering((1, 28, 28), whitening=-0.1), "between 0 and 2, got -0.1"),
        # tabular
        (lambda: Scaling(low=(0.0,), high=(0.0,)), "two finite bounds for each column"),
        (lambda: Scaling(low=(0.0, 1.0), high=(1.0,)), "two finite bounds for each column"),
        (lambda: Scaling(low=(), high=()), "two finite bounds for each column"),
        (lambda: OneHot(((1.0, 1.0),)), "different categories for every column"),
        (lambda: OneHot(((),)), "different categories for every column"),
        (lambda: OneHot(()), "different categories for every column"),
        (lambda: UnitNorm(-1.0), "at least 0, got -1"),
        (lambda: UnitNorm(float("nan")), "at least 0, got nan"),
        (lambda: TableFeatures(3, (3,), (None,)), "different, from 0 to 2"),
        (lambda: TableFeatures(3, (0,), (0,)), "different, from 0 to 2"),
        (lambda: TableFeatures(3, (0, 1), (2,)), "a position or None for each number"),
        (lambda: TableFeatures(3, (0,), (None,), (0,)), "at most two positive numbers"),
        (lambda: TableFeatures(3, (0,), (None,), (4, 6)), "the second a multiple of the first"),
        (lambda: TableFeatures(3, (0,), (None,), (2, 4, 8)), "at most two positive numbers"),
        (lambda: TableFeatures(3, crosses=(((0, 2), (2, 4)),)), "a range of the 3 features"),
        (lambda: TableFeatures(3, crosses=(((1, 1), (0, 1)),)), "a range of the 3 features"),
        (lambda: TableFeatures(4, text=((2, 5),)), "Each block of a text"),
        # patches
        (lambda: Patches((1, 28, 28)), r"colour images, of a shape \(3, height, width\); got \(1, 28, 28\)"),
        (lambda: Patches((32, 32)), "colour images"),
        (lambda: Patches((3, 6, 32)), "got 2 cells and 6 x 32 pixels"),
        (lambda: Patches((3, 32, 32), cells=0), "at least 1 cell"),
        (lambda: Mirrored(Identity()), "made from a Scattering map"),
        (lambda: Turned(Identity()), "made from a Scattering map"),
        (lambda: Turned(Scattering(SHAPE), ()), "at least one angle"),
        (lambda: Turned(Scattering(SHAPE), (0.0, 91.0)), r"between -90 and 90 degrees; got \(0.0, 91.0\)"),
        (lambda: Turned(Scattering(SHAPE), pairs=8), "0 or a multiple of 16, got 8"),
        (lambda: Turned(Scattering(SHAPE), pairs=-16), "0 or a multiple of 16, got -16"),
        (lambda: Turned(Scattering(SHAPE), (float("nan"),)), "between -90 and 90 degrees"),
        (lambda: Joined((Turned(Scattering(SHAPE)),)), "at least one Scattering"),
        (lambda: Joined(()), "at least one Scattering"),
        (lambda: Joined((Identity(),)), "at least one Scattering"),
        (lambda: Joined((Patches(SHAPE), Scattering((3, 8, 9)))), "the same image shape"),
        (lambda: Reduced((3, 9, 9), Identity()), "made from a Scattering"),
        (
            lambda: Reduced((3, 8, 9), Scattering(SHAPE)),
            r"\(3, 8, 9\) cannot be reduced to the shape \(3, 9, 8\)",
        ),
        (lambda: Reduced((1, 20, 20), Scattering(SHAPE)), "cannot be reduced"),
        (lambda: image_features((1, 4, 30)), r"at least 5 pixels in height and width, got \(1, 4, 30\)"),
        (lambda: image_features((28, 28)), r"shape \(channels, height, width\)"),
        (lambda: image_features((0, 28, 28)), r"shape \(channels, height, width\)"),
        # records
        (lambda: Scaling((0.0,), (1.0,)).transform(np.zeros((1, 2))), "got 2"),
        (lambda: OneHot((None,)).transform(np.zeros((1, 2))), "got 2"),
        (lambda: TableFeatures(6).transform(np.zeros((1, 5))), "must have 6 numbers, got 5"),
        (lambda: Scattering(SHAPE).transform(np.zeros((1, 2))), "have 2 numbers"),
        (lambda: Reduced((3, 20, 20), Scattering(SHAPE)).transform(np.zeros((1, 2))), "have 2 numbers"),
        (lambda: Patches(SHAPE).transform(np.zeros((1, 2))), "have 2 numbers"),
        (lambda: Joined((Patches(SHAPE),)).transform(np.zeros((1, 2))), "have 2 numbers"),
    ],
)
def test_wrong_parameters_and_records_are_rejected(build: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        build()


@pytest.mark.parametrize("feature_map", SAVEABLE, ids=named)
def test_a_map_read_from_json_is_equal_and_computes_the_same(feature_map: FeatureMap) -> None:
    again = feature_map_from_json(json.loads(json.dumps(feature_map.to_json())))
    assert again == feature_map
    np.testing.assert_array_equal(again.transform(records(2)), feature_map.transform(records(2)))


@pytest.mark.parametrize(
    "description", [{}, {"kind": "unknown"}, {"kind": "scaling"}, {"kind": "pipeline", "maps": 3}]
)
def test_values_that_describe_no_map_are_rejected(description: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="do not describe a feature map"):
        feature_map_from_json(description)


def test_random_fourier_features_have_length_one_and_approximate_the_gaussian_kernel() -> None:
    table = records(2)
    features = RandomFourier(count=20_000, bandwidth=5.0).transform(table).astype(float)
    np.testing.assert_allclose(np.linalg.norm(features, axis=1), 1.0, rtol=1e-6)
    distance = np.square(table[0] - table[1]).sum()
    # mean of 10,000 cosines in [-1, 1]: 0.06 is 6 standard errors at the least (Hoeffding: below 2e-8)
    assert features[0] @ features[1] == pytest.approx(np.exp(-distance / 50), abs=0.06)

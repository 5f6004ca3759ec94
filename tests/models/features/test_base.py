from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from quietmax._threads import parallel_map
from quietmax.errors import InvalidInput
from quietmax.models.features import FeatureMap, FrozenModule, Identity, OneHot, Scaling, Scattering
from quietmax.models.features.images import dead_leaves
from tests.models.features.maps import COLUMNS, MAPS, named, records


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


@pytest.mark.usefixtures("three_threads")
def test_scattering_is_the_same_on_one_thread_and_on_three() -> None:
    images = dead_leaves(200, (1, 16, 16), seed=0).reshape(200, -1)
    feature_map = Scattering((1, 16, 16))
    several = feature_map.transform(images)
    torch.set_num_threads(1)
    np.testing.assert_array_equal(feature_map.transform(images), several)


@pytest.mark.parametrize("feature_map", MAPS, ids=named)
def test_features_are_float32_of_the_stated_dimension(feature_map: FeatureMap) -> None:
    features = feature_map.transform(records(3))
    assert features.dtype == np.float32
    assert features.shape == (3, feature_map.dimension(COLUMNS))
    assert np.isfinite(features).all()


@pytest.mark.parametrize("feature_map", MAPS, ids=named)
def test_a_records_features_do_not_depend_on_the_other_records_bit_for_bit(feature_map: FeatureMap) -> None:
    table = records(150)
    features = feature_map.transform(table)
    for removed in (0, 1, 63, 64, 149):
        kept = np.delete(np.arange(150), removed)
        np.testing.assert_array_equal(feature_map.transform(table[kept]), features[kept])
    order = np.random.default_rng(1).permutation(150)
    np.testing.assert_array_equal(feature_map.transform(table[order]), features[order])
    np.testing.assert_array_equal(feature_map.transform(table[7:8]), features[7:8])


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
    feature_map = FrozenModule(CosineOfSum(reverses=reverses), outputs=1)
    assert feature_map.checked_rows(12) == rows
    table = 1e12 * np.random.default_rng(0).normal(size=(70, 12))
    features = feature_map.transform(table)
    np.testing.assert_array_equal(feature_map.transform(table[1:]), features[1:])


def test_a_map_that_refuses_large_numbers_is_checked_on_small_ones() -> None:
    feature_map = FrozenModule(Lookup(), outputs=6)
    assert feature_map.checked_rows(2) == 64
    assert feature_map.transform([[0.0, 1.0]]).shape == (1, 6)


@pytest.mark.parametrize("feature_map", MAPS, ids=named)
def test_no_records_give_no_features(feature_map: FeatureMap) -> None:
    assert feature_map.transform(np.empty((0, COLUMNS))).shape == (0, feature_map.dimension(COLUMNS))


@pytest.mark.parametrize(
    "table", [[[np.nan, 1.0]], [[np.inf, 1.0]], [[1e300, 1.0]], [1.0, 2.0], [["a", "b"]], 3.0], ids=str
)
def test_anything_but_a_finite_matrix_is_rejected(table: Any) -> None:
    with pytest.raises(InvalidInput, match="The records"):
        Identity().transform(table)


@pytest.mark.parametrize(
    "feature_map",
    [
        Scaling(low=(0.0,), high=(1.0,)),
        OneHot((None,)),
        Scattering((1, 28, 28)),
        FrozenModule(torch.nn.ReLU(), 5, (5,)),
    ],
    ids=named,
)
def test_records_of_another_width_are_rejected(feature_map: FeatureMap) -> None:
    with pytest.raises(InvalidInput, match=r"(have|got) 2"):
        feature_map.transform([[0.0, 1.0]])

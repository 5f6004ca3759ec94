from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from quietmax.models.features import Scattering, dead_leaves
from quietmax.models.features.base import parallel_map


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_results_come_in_order_and_torch_has_one_thread_meanwhile():
    seen = parallel_map(lambda piece: (piece, torch.get_num_threads()), 7)
    assert seen == [(piece, 1) for piece in range(7)]
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_as_many_pieces_run_at_once_as_torch_had_threads():
    together = threading.Barrier(3, timeout=30)
    parallel_map(lambda _piece: together.wait(), 3)  # would break if fewer than three ran at once


@pytest.mark.usefixtures("three_threads")
def test_the_number_of_threads_is_restored_after_nested_and_failed_work():
    def fails(piece: int) -> None:
        parallel_map(lambda inner: inner, 2)
        if piece == 1:
            raise ValueError("one piece fails")

    with pytest.raises(ValueError, match="one piece fails"):
        parallel_map(fails, 4)
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_scattering_is_the_same_on_one_thread_and_on_three():
    images = dead_leaves(200, (1, 16, 16), seed=0).reshape(200, -1)
    feature_map = Scattering((1, 16, 16))
    several = feature_map.transform(images)
    torch.set_num_threads(1)
    np.testing.assert_array_equal(feature_map.transform(images), several)

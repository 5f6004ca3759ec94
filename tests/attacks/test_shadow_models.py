from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quietmax._threads import parallel_map
from quietmax.attacks import ShadowPool
from quietmax.attacks.shadow_models import _leftover_rows, candidate_rows
from quietmax.data import Split, split
from quietmax.errors import InvalidInput
from quietmax.models import CrossEntropy, TrainingSettings
from quietmax.models.stacked import training_bytes
from tests.attacks.conftest import World

QUICK = TrainingSettings(hidden=(4,), loss=CrossEntropy(), epochs=1)


def test_disjoint_sets_have_the_target_s_size_overlap_each_other_and_contain_no_candidate(
    world: World,
) -> None:
    pool = world.disjoint
    assert not pool.drawn[:, candidate_rows(world.data)].any()
    assert (pool.inside.sum(1) == 100).all()
    assert (pool.drawn.sum(1) == 200).all()
    assert (pool.drawn >= pool.inside).all()
    both = pool.inside.astype(int) @ pool.inside.T.astype(int)
    assert (both[~np.eye(8, dtype=bool)] < 100).all()
    assert (both > 0).all()
    assert pool.notes == ()


def test_overlapping_sets_come_in_complementary_halves_without_regard_to_the_target_s_members(
    world: World,
) -> None:
    """The share of members in a random half has standard deviation 0.035: 0.25 is seven of them away from 0.5."""
    candidates, inside = candidate_rows(world.data), world.overlapping.inside
    assert (inside[:, candidates].sum(0) == 6).all()
    assert (inside[::2, candidates] ^ inside[1::2, candidates]).all()
    assert (inside.sum(1) == 100).all()
    assert not np.delete(inside, candidates, axis=1).any()
    shares = inside[:, world.data.train_rows].mean(1)
    assert (np.abs(shares - 0.5) < 0.25).all()
    assert (shares != 0.5).any()


def test_few_leftover_records_are_halved_with_a_note_and_none_are_an_error(world: World) -> None:
    data = world.data
    scarce = Split(data.records, data.train_rows, data.test_rows, data.pool_rows[:61], 0)
    pool = ShadowPool.train("disjoint", scarce, QUICK, 2)
    assert (pool.inside.sum(1) == 30).all()
    assert (pool.drawn.sum(1) == 60).all()
    assert "Only 61 records are available" in pool.notes[0]
    with pytest.raises(InvalidInput, match="leaves 0"):
        ShadowPool.train("disjoint", split(data.records, size=210), QUICK, 2)


def test_no_networks_and_unknown_designs_are_errors(world: World) -> None:
    for design in ("disjoint", "overlapping"):
        with pytest.raises(InvalidInput, match="at least 1"):
            ShadowPool.train(design, world.data, QUICK, 0)
    with pytest.raises(InvalidInput, match="design must be 'disjoint' or 'overlapping', got 'around'"):
        ShadowPool.train("around", world.data, QUICK, 1)


def test_many_networks_are_trained_in_stacks_that_neither_memory_nor_threads_decide(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quietmax.models.stacked.LARGEST_STACK", 2)
    before, pools, steps = torch.get_num_threads(), [], list[tuple[int, int]]()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            report = lambda done, total: steps.append((done, total))  # noqa: E731
            pools.append(ShadowPool.train("disjoint", world.data, QUICK, 5, seed=2, progress=report))
    finally:
        torch.set_num_threads(before)
    assert [stack.networks for stack in pools[0].stacks] == [1, 2, 2]
    assert steps[-1][0] == steps[-1][1]
    monkeypatch.undo()
    together = ShadowPool.train("disjoint", world.data, QUICK, 5, seed=2)
    for one, other, whole in zip(*(pool.each() for pool in (*pools, together)), strict=True):
        assert torch.equal(one.weight_vectors(), other.weight_vectors())
        torch.testing.assert_close(one.weight_vectors(), whole.weight_vectors())


def test_networks_that_are_trained_at_the_same_time_fit_into_the_memory(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = training_bytes((world.data.records.features.shape[1], 4, world.data.records.classes), QUICK)
    together: list[int] = []
    trained = parallel_map

    def watched(work: Any, count: int) -> Any:
        together.append(count)
        return trained(work, count)

    monkeypatch.setattr("quietmax.attacks.shadow_models.parallel_map", watched)
    monkeypatch.setattr("quietmax.attacks.shadow_models.MAX_MEMORY", 2 * one)
    assert len(ShadowPool.train("disjoint", world.data, QUICK, 5).stacks) == 3
    assert together == [1, 1, 1]


def test_leftover_records_are_chosen_by_the_seed_and_never_candidates(world: World) -> None:
    chosen = _leftover_rows(world.data, 50, 0)
    assert len(np.unique(chosen)) == 50
    assert not np.isin(chosen, candidate_rows(world.data)).any()
    assert not np.array_equal(chosen, _leftover_rows(world.data, 50, 1))
    np.testing.assert_array_equal(_leftover_rows(world.data, 1000, 0), world.data.pool_rows)


def test_the_same_seed_gives_the_same_pool_and_another_seed_another(world: World) -> None:
    one, same, other = (ShadowPool.train("disjoint", world.data, QUICK, 2, seed=seed) for seed in (4, 4, 5))
    np.testing.assert_array_equal(one.inside, same.inside)
    assert torch.equal(one.stacks[0].weight_vectors(), same.stacks[0].weight_vectors())
    assert not np.array_equal(one.inside, other.inside)

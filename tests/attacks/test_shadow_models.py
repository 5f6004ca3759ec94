from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quietmax._ray import RayEngine
from quietmax._threads import parallel_map
from quietmax.attacks import ShadowPool
from quietmax.attacks.builtin import _log_odds
from quietmax.attacks.shadow_models import Design, candidate_rows, leftover_rows
from quietmax.data import Split, split
from quietmax.errors import InvalidInput
from quietmax.models import CrossEntropy, TrainingSettings
from quietmax.models.stacked import training_bytes

QUICK = TrainingSettings(hidden=(4,), loss=CrossEntropy(), epochs=1)


def test_disjoint_sets_contain_no_candidate(memorised: Split, disjoint_pool: ShadowPool) -> None:
    assert not disjoint_pool.drawn[:, candidate_rows(memorised)].any()
    assert disjoint_pool.inside.any()


def test_disjoint_sets_have_the_size_of_the_target_inside_and_held_out(disjoint_pool: ShadowPool) -> None:
    assert (disjoint_pool.inside.sum(1) == 100).all()
    assert (disjoint_pool.drawn.sum(1) == 200).all()
    assert (disjoint_pool.drawn >= disjoint_pool.inside).all()
    assert disjoint_pool.notes == ()


def test_disjoint_sets_may_overlap_each_other(disjoint_pool: ShadowPool) -> None:
    both = disjoint_pool.inside.astype(int) @ disjoint_pool.inside.T.astype(int)
    assert (both[~np.eye(8, dtype=bool)] < 100).all()
    assert (both > 0).all()


def test_overlapping_sets_come_in_complementary_halves(
    memorised: Split, overlapping_pool: ShadowPool
) -> None:
    candidates = candidate_rows(memorised)
    assert (overlapping_pool.inside[:, candidates].sum(0) == 6).all()
    assert (overlapping_pool.inside[::2, candidates] ^ overlapping_pool.inside[1::2, candidates]).all()
    assert (overlapping_pool.inside.sum(1) == 100).all()
    assert not np.delete(overlapping_pool.inside, candidates, axis=1).any()


def test_the_halves_are_drawn_without_regard_to_the_target_s_members(
    memorised: Split, overlapping_pool: ShadowPool
) -> None:
    # The share of members in a random half has standard deviation 0.035: 0.25 is seven of them away from 0.5.
    shares = overlapping_pool.inside[:, memorised.train_rows].mean(1)
    assert (np.abs(shares - 0.5) < 0.25).all()
    assert (shares != 0.5).any()


def test_a_network_answers_differently_to_its_members(overlapping_pool: ShadowPool, memorised: Split) -> None:
    candidates = candidate_rows(memorised)
    values = overlapping_pool.values(candidates, _log_odds)
    inside = overlapping_pool.inside[:, candidates]
    assert values[inside].mean() > 3
    assert values[~inside].mean() < 1


def test_few_leftover_records_are_halved_with_a_note(memorised: Split) -> None:
    scarce = Split(memorised.records, memorised.train_rows, memorised.test_rows, memorised.pool_rows[:61], 0)
    pool = ShadowPool.train("disjoint", scarce, QUICK, 2)
    assert (pool.inside.sum(1) == 30).all()
    assert (pool.drawn.sum(1) == 60).all()
    assert "Only 61 records are available" in pool.notes[0]


def test_disjoint_sets_require_leftover_records(memorised: Split) -> None:
    everything = split(memorised.records, size=210)
    with pytest.raises(InvalidInput, match="leaves 0"):
        ShadowPool.train("disjoint", everything, QUICK, 2)


@pytest.mark.parametrize("design", ["disjoint", "overlapping"])
def test_no_networks_are_an_error(memorised: Split, design: Design) -> None:
    with pytest.raises(InvalidInput, match="at least 1"):
        ShadowPool.train(design, memorised, QUICK, 0)


def test_many_networks_are_trained_in_stacks_that_neither_memory_nor_threads_decide(
    memorised: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quietmax.models.stacked.LARGEST_STACK", 2)
    before, pools, steps = torch.get_num_threads(), [], list[tuple[int, int]]()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            report = lambda done, total: steps.append((done, total))  # noqa: E731
            pools.append(ShadowPool.train("disjoint", memorised, QUICK, 5, seed=2, progress=report))
    finally:
        torch.set_num_threads(before)
    assert [stack.networks for stack in pools[0].stacks] == [1, 2, 2]
    assert steps[-1][0] == steps[-1][1]
    monkeypatch.undo()
    together = ShadowPool.train("disjoint", memorised, QUICK, 5, seed=2)
    for one, other, whole in zip(*(pool.each() for pool in (*pools, together)), strict=True):
        assert torch.equal(one.weight_vectors(), other.weight_vectors())
        torch.testing.assert_close(one.weight_vectors(), whole.weight_vectors())


def test_networks_that_are_trained_at_the_same_time_fit_into_the_memory(
    memorised: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = training_bytes((memorised.records.features.shape[1], 4, memorised.records.classes), QUICK)
    together: list[int] = []
    trained = parallel_map

    def watched(work: Any, count: int) -> Any:
        together.append(count)
        return trained(work, count)

    monkeypatch.setattr("quietmax.attacks.shadow_models.parallel_map", watched)
    monkeypatch.setattr("quietmax.attacks.shadow_models.MAX_MEMORY", 2 * one)
    assert len(ShadowPool.train("disjoint", memorised, QUICK, 5).stacks) == 3
    assert together == [1, 1, 1]


@pytest.mark.slow
def test_networks_are_the_same_on_ray_workers(memorised: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr("quietmax.models.stacked.LARGEST_STACK", 2)
    here = ShadowPool.train("overlapping", memorised, QUICK, 5, seed=2)
    there = ShadowPool.train("overlapping", memorised, QUICK, 5, seed=2, engine=RayEngine(workers=2))
    assert len(there.stacks) == 3
    for one, other in zip(here.each(), there.each(), strict=True):
        assert torch.equal(one.weight_vectors(), other.weight_vectors())


def test_leftover_records_are_chosen_by_the_seed_and_never_candidates(memorised: Split) -> None:
    chosen = leftover_rows(memorised, 50, 0)
    assert len(np.unique(chosen)) == 50
    assert not np.isin(chosen, candidate_rows(memorised)).any()
    assert not np.array_equal(chosen, leftover_rows(memorised, 50, 1))
    np.testing.assert_array_equal(leftover_rows(memorised, 1000, 0), memorised.pool_rows)


def test_the_same_seed_gives_the_same_pool_and_another_seed_another(memorised: Split) -> None:
    one, same, other = (ShadowPool.train("disjoint", memorised, QUICK, 2, seed=seed) for seed in (4, 4, 5))
    np.testing.assert_array_equal(one.inside, same.inside)
    assert torch.equal(one.stacks[0].weight_vectors(), same.stacks[0].weight_vectors())
    assert not np.array_equal(one.inside, other.inside)

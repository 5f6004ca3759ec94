from __future__ import annotations

import numpy as np
import pytest
import torch

from quietmax.attacks import ShadowPool
from quietmax.attacks import shadow_models as shadow_pool
from quietmax.attacks.metrics import log_odds
from quietmax.attacks.shadow_models import candidate_rows, leftover_rows, networks_at_once
from quietmax.data import Split, split
from quietmax.errors import InvalidInput
from quietmax.models import CrossEntropy, TrainingSettings

QUICK = TrainingSettings(hidden=(4,), loss=CrossEntropy(), epochs=1)


def test_shadow_sets_never_touch_the_target_s_records(memorised, outside_pool):
    assert not outside_pool.drawn[:, candidate_rows(memorised)].any()
    assert outside_pool.inside.any()


def test_every_shadow_network_has_the_target_s_size_inside_and_outside(outside_pool):
    assert (outside_pool.inside.sum(1) == 100).all()
    assert (outside_pool.drawn.sum(1) == 200).all()
    assert (outside_pool.drawn >= outside_pool.inside).all()
    assert outside_pool.notes == ()


def test_shadow_sets_differ_and_overlap(outside_pool):
    both = outside_pool.inside.astype(int) @ outside_pool.inside.T.astype(int)
    assert (both[~np.eye(8, dtype=bool)] < 100).all()
    assert (both > 0).all()


def test_networks_around_the_candidates_come_in_complementary_halves(memorised, around_pool):
    candidates = candidate_rows(memorised)
    assert (around_pool.inside[:, candidates].sum(0) == 6).all()
    assert (around_pool.inside[::2, candidates] ^ around_pool.inside[1::2, candidates]).all()
    assert (around_pool.inside.sum(1) == 100).all()
    assert not np.delete(around_pool.inside, candidates, axis=1).any()


def test_the_halves_are_drawn_without_regard_to_the_target_s_members(memorised, around_pool):
    # The share of members in a random half has standard deviation 0.035: 0.25 is seven of them away from 0.5.
    shares = around_pool.inside[:, memorised.train_rows].mean(1)
    assert (np.abs(shares - 0.5) < 0.25).all()
    assert (shares != 0.5).any()


def test_a_network_knows_what_was_inside(around_pool, memorised):
    candidates = candidate_rows(memorised)
    values = around_pool.values(candidates, log_odds)
    inside = around_pool.inside[:, candidates]
    assert values[inside].mean() > 3
    assert values[~inside].mean() < 1


def test_a_small_pool_is_halved_and_the_report_says_so(memorised):
    scarce = Split(memorised.records, memorised.train_rows, memorised.test_rows, memorised.pool_rows[:61], 0)
    pool = ShadowPool.outside(scarce, QUICK, 2)
    assert (pool.inside.sum(1) == 30).all()
    assert (pool.drawn.sum(1) == 60).all()
    assert "Only 61 records are left over" in pool.notes[0]


def test_without_leftover_records_there_are_no_shadow_networks(memorised):
    everything = split(memorised.records, size=210)
    with pytest.raises(InvalidInput, match="fewer records"):
        ShadowPool.outside(everything, QUICK, 2)


@pytest.mark.parametrize("train", [ShadowPool.outside, ShadowPool.around])
def test_no_networks_at_all_are_refused(memorised, train):
    with pytest.raises(InvalidInput, match="at least 1"):
        train(memorised, QUICK, 0)


def test_networks_trained_in_groups_are_the_same_networks(memorised, monkeypatch):
    steps = []
    together = ShadowPool.outside(memorised, QUICK, 5, seed=2)
    monkeypatch.setattr(shadow_pool, "networks_at_once", lambda *_: 2)
    apart = ShadowPool.outside(
        memorised, QUICK, 5, seed=2, progress=lambda done, total: steps.append((done, total))
    )
    assert [stack.networks for stack in apart.stacks] == [2, 2, 1]
    assert steps[-1][0] == steps[-1][1]
    for one, other in zip(together.each(), apart.each(), strict=True):
        torch.testing.assert_close(one.weight_vectors(), other.weight_vectors())


def test_groups_follow_the_memory_they_may_take():
    one = networks_at_once((10, 5, 2), QUICK, memory=1)
    many = networks_at_once((10, 5, 2), QUICK, memory=10**9)
    assert one == 1
    assert 4_000 < many < 200_000


def test_leftover_records_are_chosen_by_the_seed_and_never_candidates(memorised):
    chosen = leftover_rows(memorised, 50, 0)
    assert len(np.unique(chosen)) == 50
    assert not np.isin(chosen, candidate_rows(memorised)).any()
    assert not np.array_equal(chosen, leftover_rows(memorised, 50, 1))
    np.testing.assert_array_equal(leftover_rows(memorised, 1000, 0), memorised.pool_rows)


def test_the_same_seed_gives_the_same_pool_and_another_seed_another(memorised):
    one, same, other = (ShadowPool.outside(memorised, QUICK, 2, seed=seed) for seed in (4, 4, 5))
    np.testing.assert_array_equal(one.inside, same.inside)
    assert torch.equal(one.stacks[0].weight_vectors(), same.stacks[0].weight_vectors())
    assert not np.array_equal(one.inside, other.inside)

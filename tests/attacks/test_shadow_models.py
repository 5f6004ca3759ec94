from __future__ import annotations

import numpy as np
import pytest
import torch

from quietmax.attacks import ShadowPool
from quietmax.attacks.metrics import log_odds
from quietmax.attacks.shadow_models import Design, candidate_rows, leftover_rows, networks_at_once
from quietmax.data import Split, split
from quietmax.errors import InvalidInput
from quietmax.models import CrossEntropy, TrainingSettings

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
    values = overlapping_pool.values(candidates, log_odds)
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


def test_networks_trained_in_groups_are_the_same_networks(
    memorised: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    together = ShadowPool.train("disjoint", memorised, QUICK, 5, seed=2)
    monkeypatch.setattr("quietmax.attacks.shadow_models.networks_at_once", lambda *_: 2)
    apart = ShadowPool.train(
        "disjoint", memorised, QUICK, 5, seed=2, progress=lambda done, total: steps.append((done, total))
    )
    assert [stack.networks for stack in apart.stacks] == [2, 2, 1]
    assert steps[-1][0] == steps[-1][1]
    for one, other in zip(together.each(), apart.each(), strict=True):
        torch.testing.assert_close(one.weight_vectors(), other.weight_vectors())


def test_groups_fit_into_the_memory() -> None:
    one = networks_at_once((10, 5, 2), QUICK, memory=1)
    many = networks_at_once((10, 5, 2), QUICK, memory=10**9)
    assert one == 1
    assert 4_000 < many < 200_000


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

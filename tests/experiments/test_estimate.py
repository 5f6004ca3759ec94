"""Estimates count the work of each trial, and what a group shares once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quietmax.data.records import Records
from quietmax.experiments import runner as estimate
from quietmax.experiments.grid import DataSource, Effort, Group, Trial, reproduction_trials
from quietmax.experiments.runner import estimated_bytes, estimated_seconds


def test_an_estimate_counts_shared_networks_once_and_grows_with_the_work() -> None:
    small = reproduction_trials(["location"], "quick", experiments=["algorithm1"])
    large = reproduction_trials(["location"], "paper", experiments=["algorithm1"])
    few, many = (estimated_seconds(trials, measured=False) for trials in (small, large))
    assert sum(many.values()) > 3 * sum(few.values())
    (first, *others) = [each for each in small if each.group == small[0].group]
    assert few[first] > 5 * max(few[each] for each in others)


def test_an_estimate_measures_this_machine(real_data: Path) -> None:
    trials = reproduction_trials(["adult"], "quick", experiments=["accuracy"], repeats=1)
    assert 0 < sum(estimated_seconds(trials, data_dir=real_data).values()) < 3600


def test_an_estimate_knows_when_too_few_records_are_left_for_shadow_networks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    labels = np.arange(30_000) % 10
    records = Records("cifar-10", np.zeros((len(labels), 1), np.float32), labels, classes=10)
    monkeypatch.setattr(estimate, "source_records", lambda *_: records)
    monkeypatch.setattr(estimate, "_seconds_per_record", lambda *_: 1.0)
    plain, *_ = reproduction_trials(["cifar-10"], "paper", experiments=["accuracy"], repeats=1)
    assert (plain.group.effort.records, plain.group.effort.shadows) == (10_000, 100)
    half = 5_000  # 10,000 records are left for a shadow network's set and as many others
    networks = 100 * (10_000 + 100 * half)
    attack = 100 * 2 * 100 * half
    estimate._shadow_set_and_largest_class.cache_clear()
    seconds = estimated_seconds([plain])[plain]
    estimate._shadow_set_and_largest_class.cache_clear()
    assert seconds == pytest.approx(networks + attack, rel=1e-3)


def test_the_memory_of_a_worker_is_that_of_its_largest_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def records(source: DataSource, *_: object) -> list[None]:
        return [None] * {"location": 5_010, "mnist": 70_000, "cifar-10": 60_000}[source.name]

    monkeypatch.setattr(estimate, "source_records", records)
    estimate._records.cache_clear()
    location, mnist, cifar = (
        estimated_bytes(reproduction_trials([name], "paper", repeats=1))
        for name in ("location", "mnist", "cifar-10")
    )
    together = estimated_bytes(reproduction_trials(["location", "mnist", "cifar-10"], "paper", repeats=1))
    estimate._records.cache_clear()
    assert location < mnist < cifar == together
    assert cifar > 4 * 60_000 * 3_072  # the records alone


def test_every_method_has_an_estimate() -> None:
    trials = reproduction_trials(["location", "mnist"], "paper", repeats=1)
    seconds = estimated_seconds(trials, measured=False)
    shared = {each.method: seconds[each] for each in reversed(trials) if each.group.source.name == "mnist"}
    assert shared["published-rdp"] > shared["head"] > shared["algorithm1-gaussian"] > 0
    own = Trial(Group(DataSource("own.csv", digest="1"), Effort(100, 2)), "plain")
    assert estimated_seconds([own], measured=False)[own] > 0


def test_without_attacks_no_shadow_network_is_counted() -> None:
    attacked = Trial(Group(DataSource("mnist"), Effort(10_000, 50)), "plain")
    effort = replace(attacked.group.effort, attacks=())
    alone = replace(attacked, group=replace(attacked.group, effort=effort))
    seconds = estimated_seconds([attacked, alone], measured=False)
    assert seconds[attacked] > 50 * seconds[alone]

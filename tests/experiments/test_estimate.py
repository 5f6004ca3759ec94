"""Estimates count the work of each trial, and what a group shares once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quietmax.data.records import Records
from quietmax.experiments import runner
from quietmax.experiments.grid import DataSource, Effort, Group, Trial, reproduction_trials
from quietmax.experiments.runner import estimated_bytes, estimated_seconds


@pytest.fixture
def one_second_per_record(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """30,000 records of ten classes, of which every network takes a second for each and each epoch."""
    records = Records("any", np.zeros((30_000, 1), np.float32), np.arange(30_000) % 10, classes=10)
    monkeypatch.setattr(runner, "source_records", lambda *_: records)
    monkeypatch.setattr(runner, "_seconds_per_record", lambda *_: 1.0)
    runner._labels.cache_clear()
    yield
    runner._labels.cache_clear()


@pytest.mark.usefixtures("one_second_per_record")
def test_an_estimate_counts_shared_networks_once_and_grows_with_the_work() -> None:
    (first, second, *_), large = (
        reproduction_trials(["location"], profile, experiments=["algorithm1"])
        for profile in ("quick", "paper")
    )
    assert estimated_seconds([first, second]) < 1.001 * estimated_seconds([first])
    assert estimated_seconds(large) > 3 * estimated_seconds([first])


def test_an_estimate_measures_this_machine(real_data: Path) -> None:
    trials = reproduction_trials(["adult"], "quick", experiments=["accuracy"], repeats=1)
    assert 0 < estimated_seconds(trials, data_dir=real_data) < 3600


@pytest.mark.usefixtures("one_second_per_record")
def test_an_estimate_knows_when_too_few_records_are_left_for_shadow_networks() -> None:
    plain, *_ = reproduction_trials(["cifar-10"], "paper", experiments=["accuracy"], repeats=1)
    assert (plain.group.effort.records, plain.group.effort.shadows) == (10_000, 100)
    half = 5_000  # 10,000 records are left for a shadow network's set and as many others
    networks = 100 * (10_000 + 100 * half)
    attack = 100 * 2 * 100 * half
    assert estimated_seconds([plain]) == pytest.approx(networks + attack, rel=1e-3)


def test_the_memory_of_a_worker_is_that_of_its_largest_group(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"location": 5_010, "mnist": 70_000, "cifar-10": 60_000}
    monkeypatch.setattr(runner, "_labels", lambda source, _: np.zeros(counts[source.name]))
    location, mnist, cifar = (
        estimated_bytes(reproduction_trials([name], "paper", repeats=1))
        for name in ("location", "mnist", "cifar-10")
    )
    together = estimated_bytes(reproduction_trials(["location", "mnist", "cifar-10"], "paper", repeats=1))
    assert location < mnist < cifar == together
    assert cifar > 4 * 60_000 * 3_072  # the records alone


@pytest.mark.usefixtures("one_second_per_record")
def test_every_method_has_an_estimate_and_without_attacks_no_shadow_network_is_counted() -> None:
    group = Group(DataSource("mnist"), Effort(10_000, 50))
    alone = replace(group, effort=replace(group.effort, attacks=()))
    seconds = {
        name: estimated_seconds([Trial(alone, name, 1.0)])
        for name in ("plain", "original", "head", "dpsgd", "teachers", "published-rdp")
    }
    assert seconds["original"] == pytest.approx(2 * seconds["plain"], rel=1e-6)
    assert seconds["published-rdp"] > seconds["original"]
    assert seconds["teachers"] > seconds["head"] > seconds["dpsgd"] > seconds["plain"] > 0
    attacked = {name: estimated_seconds([Trial(group, name)]) for name in ("plain", "teachers")}
    assert attacked["teachers"] > attacked["plain"] > 25 * seconds["plain"]

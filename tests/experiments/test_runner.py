"""The runner: nothing is lost, nothing is computed twice, and a failure does not stop the other trials."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quietmax._ray import Lost
from quietmax.data.records import Records
from quietmax.errors import InvalidInput
from quietmax.experiments import runner
from quietmax.experiments.grid import DataSource, Effort, Group, Trial, reproduction_trials
from quietmax.experiments.results import Result, ResultStore
from quietmax.experiments.runner import (
    MAX_TRIES,
    Compute,
    LocalWorkers,
    MeasureFactory,
    RayWorkers,
    TrialOutcome,
    Workers,
    compute_trial,
    estimated_bytes,
    estimated_seconds,
    run,
    run_trials,
    start_workers,
)
from tests.experiments.same_process import SameProcess
from tests.experiments.toy_grid import EFFORT, tiny_trials

HERE = Path(__file__).parent


def number(trial: Trial) -> Result:
    return {"number": trial.epsilon or 0.0}


def test_a_second_run_computes_nothing_and_starts_no_workers(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    first = run(tiny_trials(), store, lambda: SameProcess(number))
    second = run(tiny_trials(), store, lambda: pytest.fail("started"))
    assert (first.computed, second.computed) == (len(tiny_trials()), 0)
    assert second.results == first.results


def test_a_damaged_result_counts_as_missing(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    trials = tiny_trials()
    run(trials, store, lambda: SameProcess(number))
    files = sorted((tmp_path / "trials").rglob("*.json"))
    files[0].write_text(files[0].read_text()[:20])
    files[1].write_text("[]")
    assert run(trials, store, lambda: SameProcess(number)).computed == 2


def test_a_failing_trial_is_reported_and_the_others_continue(tmp_path: Path) -> None:
    def compute(trial: Trial) -> Any:
        if trial.epsilon == 10.0:
            return TrialOutcome(0, failure="no such luck")
        return number(trial)

    workers = SameProcess(compute)
    done = run(tiny_trials(), ResultStore(tmp_path), lambda: workers)
    assert set(done.failures.values()) == {"no such luck"}
    assert len(done.failures) == 4
    assert len(done.results) == 6
    assert workers.stopped


def test_a_trial_whose_workers_die_is_given_up_after_a_few_tries(tmp_path: Path) -> None:
    deaths = []

    def compute(trial: Trial) -> Any:
        if trial.method == "plain" and trial.group.repeat == 0:
            deaths.append(trial)
            return TrialOutcome(0, failure="killed", died=True)
        return number(trial)

    done = run(tiny_trials(), ResultStore(tmp_path), lambda: SameProcess(compute))
    assert len(deaths) == MAX_TRIES
    assert len(done.failures) == 1
    assert len(done.results) == len(tiny_trials()) - 1


def test_no_worker_joins_a_group_before_its_first_trial_is_finished(tmp_path: Path) -> None:
    workers = SameProcess(number, count=3)
    run(tiny_trials(), ResultStore(tmp_path), lambda: workers)
    first_two = [(worker, trial.group.repeat) for worker, trial in workers.submitted[:2]]
    assert first_two == [(0, 0), (1, 1)]
    # the third worker had to wait for a group's first trial
    assert any(worker == 2 for worker, _ in workers.submitted[2:])


def test_a_worker_that_joins_a_group_begins_at_its_end(tmp_path: Path) -> None:
    trials = [trial for trial in tiny_trials() if trial.group.repeat == 0]
    workers = SameProcess(number, count=2)
    run(trials, ResultStore(tmp_path), lambda: workers)
    assert [trial for worker, trial in workers.submitted if worker == 0][:2] == trials[:2]
    assert next(trial for worker, trial in workers.submitted if worker == 1) == trials[-1]


def test_the_group_with_the_most_work_starts_first_and_progress_counts_trials(tmp_path: Path) -> None:
    light, heavy = (
        [replace(each, group=replace(each.group, effort=replace(EFFORT, epochs=epochs))) for each in part]
        for part, epochs in ((tiny_trials()[:5], 3), (tiny_trials()[5:], 30))
    )
    workers = SameProcess(number)
    seen: list[tuple[int, int]] = []
    run([*light, *heavy], ResultStore(tmp_path), lambda: workers, progress=lambda *done: seen.append(done))
    assert workers.submitted[0][1] == heavy[0]
    assert seen == [(done, 10) for done in range(11)]


def test_an_interrupt_stops_the_workers_and_keeps_finished_results(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    computed = []

    def compute(trial: Trial) -> Result:
        computed.append(trial)
        if len(computed) == 4:
            raise KeyboardInterrupt
        return number(trial)

    workers = SameProcess(compute)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_trials(), store, lambda: workers)
    assert workers.stopped
    assert run(tiny_trials(), store, lambda: SameProcess(number)).computed == len(tiny_trials()) - 3


def test_a_run_without_trials_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no trials"):
        run_trials([], tmp_path)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_killed_grid_continues_where_it_was_and_gives_the_same_numbers(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = subprocess.Popen(
        [sys.executable, str(HERE / "toy_grid.py"), str(killed)], start_new_session=True
    )
    deadline = time.monotonic() + 300
    while len(list((killed / "trials").rglob("*-*.json"))) < 3:
        assert process.poll() is None, "the grid ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)  # the driver and its workers
    process.wait()
    stamps = {
        path: path.stat().st_mtime_ns
        for path in killed.rglob("*")
        if path.suffix in (".json", ".safetensors")
    }
    results = [path for path in stamps if path.suffix == ".json"]
    assert 3 <= len(results) < len(tiny_trials())

    again = run(tiny_trials(), ResultStore(killed), lambda: SameProcess(MeasureFactory(killed)()))
    assert again.failures == {}
    assert again.computed == len(tiny_trials()) - len(results)
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())

    fresh = run(tiny_trials(), ResultStore(whole), lambda: SameProcess(MeasureFactory(whole)()))
    for trial in tiny_trials():
        assert _numbers(again.results[trial]) == pytest.approx(_numbers(fresh.results[trial]), abs=1e-6)


def _numbers(result: Result) -> list[float]:
    """Everything that does not depend on the clock and on what else the process did."""
    kept = {key: value for key, value in result.items() if not key.endswith(("_seconds", "_bytes"))}
    return [float(leaf) for leaf in _leaves(kept)]


def _leaves(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [leaf for entry in value.values() for leaf in _leaves(entry)]
    return [value] if isinstance(value, int | float) else []


# --- workers


@dataclass(frozen=True)
class NumberFactory:
    """Computes a number without any work."""

    def __call__(self) -> Compute:
        return lambda trial: {"number": float(trial.epsilon or 0)}


@dataclass(frozen=True)
class FatalFactory:
    """The worker that computes the first trial at epsilon 10 kills itself, once; every trial leaves a mark."""

    folder: Path

    def __call__(self) -> Compute:
        def compute(trial: Trial) -> Result:
            with (self.folder / "computed").open("a") as file:
                file.write(trial.key + "\n")
            mark = self.folder / "died"
            if trial.epsilon == 10.0 and not mark.exists():
                mark.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)
            return {"number": float(trial.epsilon or 0)}

        return compute


def _check_one_death_costs_one_try(start: Callable[[], Workers], folder: Path) -> None:
    store, trials = ResultStore(folder / "store"), tiny_trials()
    done = run(trials, store, start)
    assert done.failures == {}
    assert (folder / "died").exists()
    assert {trial: found["number"] for trial, found in done.results.items()} == {
        trial: float(trial.epsilon or 0) for trial in trials
    }
    assert len((folder / "computed").read_text().split()) == len(trials) + 1
    again = run(trials, store, lambda: pytest.fail("started"))
    assert again.results == done.results


def test_a_killed_process_is_replaced_and_its_trial_tried_again(tmp_path: Path) -> None:
    _check_one_death_costs_one_try(lambda: LocalWorkers(FatalFactory(tmp_path), count=1), tmp_path)


@pytest.mark.slow
def test_a_killed_ray_actor_is_replaced_and_its_trial_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="the optional package Ray is not installed")
    # Ray's workers must find this module.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    _check_one_death_costs_one_try(lambda: RayWorkers(FatalFactory(tmp_path), count=2), tmp_path)


def test_an_error_of_quietmax_is_its_message_and_any_other_has_its_type_and_place() -> None:
    def fail(_: Trial) -> Result:
        raise InvalidInput("records must be at least 10, got 1.")

    assert compute_trial(fail, tiny_trials()[0]) == (None, "records must be at least 10, got 1.")
    _, failure = compute_trial(lambda _: {"number": 1 / 0}, tiny_trials()[0])
    assert "ZeroDivisionError" in failure
    assert "test_runner.py" in failure


def test_workers_are_local_processes_unless_ray_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[Any, ...]] = []
    monkeypatch.setattr(runner, "LocalWorkers", lambda _, count: started.append(("local", count)))
    monkeypatch.setattr(runner, "RayWorkers", lambda _, **options: started.append(("ray", options)))
    start_workers(NumberFactory(), 3)
    start_workers(NumberFactory(), 2, "local")
    start_workers(NumberFactory(), None, "host:1")
    assert started == [
        ("local", 3),
        ("ray", {"address": "local", "count": 2}),
        ("ray", {"address": "host:1", "count": None}),
    ]


class _FakeActors:
    """Three actors in this process, one of which is lost once; the real ones are tested above."""

    count = 3

    def __init__(self, _engine: object, kind: Any, arguments: Any) -> None:
        self._actor = kind(*arguments(0))
        self._sent: list[tuple[int, Trial]] = []
        self.lost, self.closed = 0, False
        made.append(self)

    def send(self, worker: int, _method: str, trial: Trial) -> None:
        self._sent.append((worker, trial))

    def next(self) -> tuple[int, Any]:
        worker, trial = self._sent.pop(0)
        if trial.epsilon == 10.0 and not self.lost:
            self.lost += 1
            return worker, Lost("killed")
        return worker, self._actor.compute(trial)

    def close(self) -> None:
        self.closed = True


made: list[_FakeActors] = []


def test_ray_workers_use_all_actors_and_try_the_trial_of_a_lost_one_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(runner, "Actors", _FakeActors)
    workers = RayWorkers(NumberFactory())
    assert workers.count == 3
    done = run(tiny_trials(), ResultStore(tmp_path), lambda: workers)
    assert (made[-1].lost, made[-1].closed) == (1, True)
    assert len(done.results) == len(tiny_trials())


# --- estimates


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

"""The runner: nothing is lost, nothing is computed twice, and a failure does not stop the other trials."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quietmax._ray import MOST_LOSSES, Lost, RayEngine
from quietmax.errors import InvalidInput
from quietmax.experiments import runner
from quietmax.experiments.grid import Result, ResultStore, Trial
from quietmax.experiments.runner import Compute, _compute_trial, _measuring, _start_workers, run, run_trials
from tests.experiments.toy_grid import EFFORT, SameProcess, tiny_trials

HERE = Path(__file__).parent


def number(trial: Trial) -> Result:
    return {"number": trial.epsilon or 0.0}


def number_factory() -> Compute:
    return number


def test_a_second_run_computes_nothing_and_a_damaged_result_counts_as_missing(tmp_path: Path) -> None:
    store, trials = ResultStore(tmp_path), tiny_trials()
    first = run(trials, store, lambda: SameProcess(number))
    second = run(trials, store, lambda: pytest.fail("started"))
    assert (first.computed, second.computed) == (len(trials), 0)
    assert second.results == first.results
    files = sorted((tmp_path / "trials").rglob("*.json"))
    files[0].write_text(files[0].read_text()[:20])
    files[1].write_text("[]")
    assert run(trials, store, lambda: SameProcess(number)).computed == 2


def test_a_failing_trial_is_reported_and_the_others_continue(tmp_path: Path) -> None:
    def compute(trial: Trial) -> Result:
        if trial.epsilon == 10.0:
            raise InvalidInput("no such luck")
        return number(trial)

    workers = SameProcess(compute)
    done = run(tiny_trials(), ResultStore(tmp_path), lambda: workers)
    assert set(done.failures.values()) == {"no such luck"}
    assert (len(done.failures), len(done.results)) == (4, 6)
    assert workers.closed


def test_a_trial_whose_workers_die_is_given_up_after_a_few_tries(tmp_path: Path) -> None:
    deaths = []

    def compute(trial: Trial) -> Any:
        if trial.method == "plain" and trial.group.repeat == 0:
            deaths.append(trial)
            return Lost("killed")
        return number(trial)

    done = run(tiny_trials(), ResultStore(tmp_path), lambda: SameProcess(compute))
    assert len(deaths) == MOST_LOSSES
    assert list(done.failures.values()) == ["the worker was lost (killed)"]
    assert len(done.results) == len(tiny_trials()) - 1


def test_no_worker_joins_a_group_before_its_first_trial_is_finished(tmp_path: Path) -> None:
    workers = SameProcess(number, count=3)
    run(tiny_trials(), ResultStore(tmp_path), lambda: workers)
    assert [(worker, trial.group.repeat) for worker, trial in workers.sent[:2]] == [(0, 0), (1, 1)]
    # the third worker had to wait for a group's first trial
    assert any(worker == 2 for worker, _ in workers.sent[2:])


def test_a_worker_that_joins_a_group_begins_at_its_end(tmp_path: Path) -> None:
    trials = [trial for trial in tiny_trials() if trial.group.repeat == 0]
    workers = SameProcess(number, count=2)
    run(trials, ResultStore(tmp_path), lambda: workers)
    assert [trial for worker, trial in workers.sent if worker == 0][:2] == trials[:2]
    assert next(trial for worker, trial in workers.sent if worker == 1) == trials[-1]


def test_the_group_with_the_most_work_starts_first_and_progress_counts_trials(tmp_path: Path) -> None:
    light, heavy = (
        [replace(each, group=replace(each.group, effort=replace(EFFORT, epochs=epochs))) for each in part]
        for part, epochs in ((tiny_trials()[:5], 3), (tiny_trials()[5:], 30))
    )
    workers = SameProcess(number)
    seen: list[tuple[int, int]] = []
    run([*light, *heavy], ResultStore(tmp_path), lambda: workers, progress=lambda *done: seen.append(done))
    assert workers.sent[0][1] == heavy[0]
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
    assert workers.closed
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
    stored = [path for path in killed.rglob("*") if path.suffix in (".json", ".safetensors")]
    stamps = {path: path.stat().st_mtime_ns for path in stored}
    results = [path for path in stamps if path.suffix == ".json"]
    assert 3 <= len(results) < len(tiny_trials())

    again = run(tiny_trials(), ResultStore(killed), lambda: SameProcess(_measuring(killed)))
    assert again.failures == {}
    assert again.computed == len(tiny_trials()) - len(results)
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())

    fresh = run(tiny_trials(), ResultStore(whole), lambda: SameProcess(_measuring(whole)))
    for trial in tiny_trials():
        assert _numbers(again.results[trial]) == pytest.approx(_numbers(fresh.results[trial]), abs=1e-6)


def _numbers(result: Result) -> list[float]:
    """Everything that does not depend on the clock and on what else the process did."""
    return _leaves({key: each for key, each in result.items() if not key.endswith(("_seconds", "_bytes"))})


def _leaves(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [leaf for entry in value.values() for leaf in _leaves(entry)]
    return [float(value)] if isinstance(value, int | float) else []


def fatal_factory(folder: Path) -> Compute:
    """The worker that computes the first trial at epsilon 10 kills itself, once; every trial leaves a mark."""

    def compute(trial: Trial) -> Result:
        with (folder / "computed").open("a") as file:
            file.write(trial.key + "\n")
        mark = folder / "died"
        if trial.epsilon == 10.0 and not mark.exists():
            mark.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return number(trial)

    return compute


@pytest.mark.parametrize("ray", [None, pytest.param("local", marks=pytest.mark.slow)])
def test_a_killed_worker_is_replaced_and_its_trial_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray: str | None
) -> None:
    if ray:
        pytest.importorskip("ray", reason="the optional package Ray is not installed")
        # Ray's workers must find this module, and this source.
        root = Path(__file__).parents[2]
        monkeypatch.setenv("PYTHONPATH", f"{root}{os.pathsep}{root / 'src'}")
    store, trials = ResultStore(tmp_path / "store"), tiny_trials()
    factory = partial(fatal_factory, tmp_path)
    done = run(trials, store, lambda: _start_workers(factory, 2 if ray else 1, ray))
    assert done.failures == {}
    assert (tmp_path / "died").exists()
    assert {trial: found["number"] for trial, found in done.results.items()} == {
        trial: float(trial.epsilon or 0) for trial in trials
    }
    assert len((tmp_path / "computed").read_text().split()) == len(trials) + 1
    assert run(trials, store, lambda: pytest.fail("started")).results == done.results


def test_an_error_of_quietmax_is_its_message_and_any_other_has_its_type_and_place() -> None:
    def fail(_: Trial) -> Result:
        raise InvalidInput("records must be at least 10, got 1.")

    assert _compute_trial(fail, tiny_trials()[0]) == (None, "records must be at least 10, got 1.")
    _, failure = _compute_trial(lambda _: {"number": 1 / 0}, tiny_trials()[0])
    assert "ZeroDivisionError" in failure
    assert "test_runner.py" in failure


@pytest.mark.usefixtures("one_thread")
def test_workers_are_local_processes_unless_ray_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real workers, which die, are tested above."""
    for name in ("LocalWorkers", "Actors"):
        monkeypatch.setattr(runner, name, lambda *given, name=name: (name, *given))
    assert _start_workers(number_factory, 3) == ("LocalWorkers", number_factory, 3)  # type: ignore[comparison-overlap]
    started: Any = _start_workers(number_factory, None, "host:1")
    name, engine, kind, arguments = started
    assert (name, engine) == ("Actors", RayEngine("host:1"))
    trial = tiny_trials()[0]
    assert kind(*arguments(0)).compute(trial) == (number(trial), "")

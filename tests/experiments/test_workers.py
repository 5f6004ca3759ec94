"""Workers: local processes and Ray actors, with one killed while it computes."""

from __future__ import annotations

import builtins
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.experiments import runner as workers_module
from quietmax.experiments.grid import Trial
from quietmax.experiments.results import Result, ResultStore
from quietmax.experiments.runner import (
    Compute,
    LocalWorkers,
    RayWorkers,
    Workers,
    compute_trial,
    run,
    start_workers,
)
from tests.experiments.toy_grid import tiny_trials


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
    assert "test_workers.py" in failure


def test_workers_are_local_processes_unless_ray_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[Any, ...]] = []
    monkeypatch.setattr(workers_module, "LocalWorkers", lambda _, count: started.append(("local", count)))
    monkeypatch.setattr(workers_module, "RayWorkers", lambda _, **options: started.append(("ray", options)))
    start_workers(NumberFactory(), 3)
    start_workers(NumberFactory(), 2, "local")
    start_workers(NumberFactory(), None, "host:1")
    assert started == [
        ("local", 3),
        ("ray", {"address": "local", "count": 2}),
        ("ray", {"address": "host:1", "count": None}),
    ]


def test_without_the_package_the_error_says_how_to_install_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == "ray":
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(QuietmaxError, match=r"pip install 'quietmax\[ray\]'"):
        RayWorkers(NumberFactory())


class _FakeRay:
    """Enough of Ray to test the bookkeeping quickly; the real one is tested above."""

    class exceptions:
        class RayError(Exception):
            pass

        class RayTaskError(RayError):
            pass

    def __init__(self) -> None:
        self.shut, self.killed = False, 0

    def is_initialized(self) -> bool:
        return False

    def init(self, **_: Any) -> None:
        pass

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 3.0}

    def remote(self, kind: Any) -> Any:
        class Bound:
            def __init__(self, call: Any) -> None:
                self.remote = lambda *arguments: (call, arguments)

        class Actor:
            def __init__(self, *arguments: Any) -> None:
                self.compute = Bound(kind(*arguments).compute)
                self.__ray_ready__ = Bound(lambda: True)

        class Factory:
            def options(self, **_: Any) -> Factory:
                return self

            def remote(self, *arguments: Any) -> Actor:
                return Actor(*arguments)

        return Factory()

    def wait(self, waiting: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return waiting[:1], waiting[1:]

    def get(self, submitted: Any) -> Any:
        call, arguments = submitted
        if arguments[0].epsilon == 10.0 and not self.killed:
            self.killed += 1
            raise self.exceptions.RayError
        return call(*arguments)

    def kill(self, _: Any) -> None:
        pass

    def shutdown(self) -> None:
        self.shut = True


def test_ray_workers_use_all_cores_of_a_cluster_and_replace_a_lost_actor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = _FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    workers = RayWorkers(NumberFactory())
    assert workers.count == 3
    done = run(tiny_trials(), ResultStore(tmp_path), lambda: workers)
    assert fake.killed == 1
    assert len(done.results) == len(tiny_trials())
    assert fake.shut


def test_a_cluster_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", _FakeRay())
    with pytest.raises(QuietmaxError, match=r"could not be reached at 127\.0\.0\.1:1: Connection refused\."):
        RayWorkers(NumberFactory(), address="127.0.0.1:1")

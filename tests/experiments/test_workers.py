"""The same cells on a real local Ray, with a worker killed in mid-run."""

from __future__ import annotations

import builtins
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from quietmax.errors import QuietmaxError
from quietmax.experiments.results import Store
from quietmax.experiments.runner import run
from quietmax.experiments.workers import RayWorkers
from tests.experiments.toy_grid import tiny_cells


@dataclass(frozen=True)
class MakeFatal:
    """The worker that computes the third cell kills itself, once; every cell leaves a mark of its own."""

    folder: Path

    def __call__(self):
        def compute(trial):
            with (self.folder / "computed").open("a") as file:
                file.write(trial.key + "\n")
            mark = self.folder / "died"
            if trial.epsilon == 10.0 and not mark.exists():
                mark.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)
            return {"number": float(trial.epsilon or 0)}

        return compute


@pytest.mark.slow
def test_a_ray_worker_killed_in_mid_run_costs_one_cell_a_second_try_and_nothing_else(tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="the optional package Ray is not installed")
    # Ray's workers must find this module, which pytest imported from its own folder.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    store, trials = Store(tmp_path / "store"), tiny_cells()
    done = run(trials, store, lambda: RayWorkers(MakeFatal(tmp_path), workers=2))
    assert done.failures == {}
    assert (tmp_path / "died").exists()
    assert {trial: found["number"] for trial, found in done.results.items()} == {
        trial: float(trial.epsilon or 0) for trial in trials
    }
    computed = (tmp_path / "computed").read_text().split()
    assert len(computed) == len(trials) + 1
    again = run(trials, store, lambda: pytest.fail("hired"))
    assert again.results == done.results


def test_without_ray_the_option_is_refused_in_a_sentence(monkeypatch, tmp_path):
    real = builtins.__import__

    def absent(name, *arguments, **keywords):
        if name == "ray":
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(QuietmaxError, match=r"install quietmax\[ray\]"):
        RayWorkers(MakeFatal(tmp_path))


class _FakeRay:
    """Just enough of Ray to test the crew's bookkeeping quickly; the real one is tested above."""

    class exceptions:
        class RayError(Exception):
            pass

    def __init__(self):
        self.shut, self.killed = False, 0

    def is_initialized(self):
        return False

    def init(self, address=None, **_):
        if address == "nowhere:1":
            raise ConnectionError("no answer")

    def cluster_resources(self):
        return {"CPU": 3.0}

    def remote(self, kind):
        ray = self

        class Bound:
            def __init__(self, call):
                self.remote = lambda *arguments: (call, arguments)

        class Actor:
            def __init__(self, *arguments):
                made = kind(*arguments)
                self.compute, self.process_id = Bound(made.compute), Bound(made.process_id)

        class Factory:
            def options(self, **_):
                return self

            def remote(self, *arguments):
                return Actor(*arguments)

        assert ray is self
        return Factory()

    def wait(self, waiting, **_):
        return waiting[:1], waiting[1:]

    def get(self, asked):
        call, arguments = asked
        if arguments and arguments[0].epsilon == 10.0 and not self.killed:
            self.killed += 1
            raise self.exceptions.RayError
        return call(*arguments)

    def kill(self, _):
        pass

    def shutdown(self):
        self.shut = True


@dataclass(frozen=True)
class MakeNumber:
    def __call__(self):
        return lambda trial: {"number": float(trial.epsilon or 0)}


def test_the_crew_takes_all_cores_of_a_cluster_and_replaces_a_lost_worker(monkeypatch, tmp_path):
    fake = _FakeRay()
    monkeypatch.setattr("quietmax.experiments.workers._imported", lambda: fake)
    crew = RayWorkers(MakeNumber())
    assert crew.workers == 3
    assert crew.process_id(0) == os.getpid()
    done = run(tiny_cells(), Store(tmp_path), lambda: crew)
    assert fake.killed == 1
    assert len(done.results) == len(tiny_cells())
    assert fake.shut


def test_a_cluster_that_does_not_answer_is_a_sentence(monkeypatch):
    monkeypatch.setattr("quietmax.experiments.workers._imported", _FakeRay)
    with pytest.raises(QuietmaxError, match="could not be reached at nowhere:1"):
        RayWorkers(MakeNumber(), address="nowhere:1")

"""The runner: nothing is lost, nothing is done twice, failures stay where they happen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.experiments.evaluate import MakeMeasure
from quietmax.experiments.grid import Effort, Group, Source, Trial
from quietmax.experiments.results import Store
from quietmax.experiments.runner import TRIES, run
from quietmax.experiments.workers import LocalWorkers, Outcome, outcome_of
from tests.experiments.toy_grid import EFFORT, GROUPS, tiny_cells

HERE = Path(__file__).parent


class SameProcess:
    """A crew without processes: computes when asked for the next outcome, the last cell given first."""

    def __init__(self, compute, workers=1):
        self.workers = workers
        self.given: list[tuple[int, Trial]] = []
        self.order: list[tuple[int, Trial]] = []
        self.stopped = False
        self._compute = compute

    def give(self, worker, trial):
        self.given.append((worker, trial))
        self.order.append((worker, trial))

    def next(self):
        worker, trial = self.given.pop()
        made = self._compute(trial)
        return made if isinstance(made, Outcome) else Outcome(worker, *outcome_of(lambda _: made, trial))

    def stop(self):
        self.stopped = True


def number(trial):
    return {"number": trial.epsilon or 0.0}


def test_a_cell_has_the_same_key_in_every_process_and_another_for_every_setting():
    trials = tiny_cells()
    program = "from toy_grid import tiny_cells; print([cell.key for cell in tiny_cells()])"
    environment = os.environ | {"PYTHONPATH": str(HERE), "PYTHONHASHSEED": "7"}
    elsewhere = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    ).stdout.strip()
    assert elsewhere == str([trial.key for trial in trials])
    changed = [
        Trial(Group(Source("mnist-5k"), EFFORT, 0, seed=1), "plain"),
        Trial(Group(Source("mnist-5k"), Effort(records=301, shadows=2), 0), "plain"),
        Trial(GROUPS[0], "plain", queries=2),
    ]
    assert len({trial.key for trial in trials + changed}) == len(trials) + 3


def test_a_changed_file_is_another_source(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("a,b\n1,0\n")
    before = Source.of(str(path), {"label": "b"})
    path.write_text("a,b\n2,0\n")
    assert Source.of(str(path), {"label": "b"}) != before
    assert before.title == "own"


@pytest.mark.parametrize("named", [True, False])
def test_a_changed_declaration_is_another_source(tmp_path, monkeypatch, named):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own.csv").write_text("a,b\n1,0\n")
    schema = tmp_path / ("facts.toml" if named else "own.toml")
    declared = {"schema": schema} if named else {}
    seen = [Source.of("~/own.csv")]
    for high in (1, 2):
        schema.write_text(f"[bounds]\na = [0, {high}]\n")
        seen.append(Source.of("~/own.csv", declared))
        assert seen[-1] == Source.of("~/own.csv", declared)
    assert len({source.digest for source in seen}) == 3
    assert seen[0].title == "own"


def test_a_second_run_computes_nothing_and_hires_nobody(tmp_path):
    store = Store(tmp_path)
    first = run(tiny_cells(), store, lambda: SameProcess(number))
    second = run(tiny_cells(), store, lambda: pytest.fail("hired"))
    assert (first.computed, second.computed) == (len(tiny_cells()), 0)
    assert second.results == first.results


def test_a_half_written_or_damaged_result_counts_as_missing(tmp_path):
    store = Store(tmp_path)
    trials = tiny_cells()
    run(trials, store, lambda: SameProcess(number))
    files = sorted((tmp_path / "cells").rglob("*.json"))
    files[0].write_text(files[0].read_text()[:20])
    files[1].write_text("[]")
    assert run(trials, store, lambda: SameProcess(number)).computed == 2


def test_a_failing_cell_is_reported_and_the_others_go_on(tmp_path):
    def compute(trial):
        if trial.epsilon == 10.0:
            return Outcome(0, failure="no such luck")
        return number(trial)

    crew = SameProcess(compute)
    done = run(tiny_cells(), Store(tmp_path), lambda: crew)
    assert set(done.failures.values()) == {"no such luck"}
    assert len(done.failures) == 4
    assert len(done.results) == 6
    assert crew.stopped


def test_a_cell_that_kills_its_workers_is_given_up_after_a_few_tries(tmp_path):
    deaths = []

    def compute(trial):
        if trial.method == "plain" and trial.group.repeat == 0:
            deaths.append(trial)
            return Outcome(0, failure="killed", died=True)
        return number(trial)

    done = run(tiny_cells(), Store(tmp_path), lambda: SameProcess(compute))
    assert len(deaths) == TRIES
    assert len(done.failures) == 1
    assert len(done.results) == len(tiny_cells()) - 1


def test_nobody_joins_a_group_before_its_first_cell_is_done(tmp_path):
    crew = SameProcess(number, workers=3)
    run(tiny_cells(), Store(tmp_path), lambda: crew)
    first_three = [(worker, trial.group.repeat) for worker, trial in crew.order[:3]]
    assert first_three[:2] == [(0, 0), (1, 1)]
    # the third worker had to wait for a group's first cell
    assert all(worker != 2 for worker, _ in crew.order[:2])


def test_who_joins_a_group_begins_at_its_far_end(tmp_path):
    trials = [trial for trial in tiny_cells() if trial.group.repeat == 0]
    crew = SameProcess(number, workers=2)
    run(trials, Store(tmp_path), lambda: crew)
    assert [trial for worker, trial in crew.order if worker == 0][:2] == trials[:2]
    assert next(trial for worker, trial in crew.order if worker == 1) == trials[-1]


def test_of_two_workers_that_want_the_same_networks_one_makes_them(tmp_path):
    store, made, begun = Store(tmp_path), [], threading.Barrier(2)

    def make():
        made.append(threading.get_ident())
        time.sleep(0.2)
        return {"weights": np.arange(3.0)}

    def want():
        begun.wait()
        return store.arrays(GROUPS[0], "shadows", make)

    with ThreadPoolExecutor(2) as workers:
        first, second = (each.result() for each in [workers.submit(want), workers.submit(want)])
    assert len(made) == 1
    assert np.array_equal(first["weights"], second["weights"])
    assert np.array_equal(store.arrays(GROUPS[0], "shadows", make)["weights"], np.arange(3.0))


def test_the_heaviest_group_starts_first_and_time_left_shrinks(tmp_path):
    crew = SameProcess(number)
    seen = []
    run(
        tiny_cells(),
        Store(tmp_path),
        lambda: crew,
        weight=lambda trial: 10.0 if trial.group.repeat == 1 else 1.0,
        progress=seen.append,
    )
    assert crew.order[0][1].group.repeat == 1
    assert seen[0].seconds_left is None
    assert seen[-1].seconds_left == 0.0
    assert [each.done for each in seen] == list(range(len(tiny_cells()) + 1))


def test_an_interrupt_stops_the_crew_and_keeps_what_is_done(tmp_path):
    store = Store(tmp_path)
    asked = []

    def compute(trial):
        asked.append(trial)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return number(trial)

    crew = SameProcess(compute)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_cells(), store, lambda: crew)
    assert crew.stopped
    assert run(tiny_cells(), store, lambda: SameProcess(number)).computed == len(tiny_cells()) - 3


def test_a_store_serves_one_run_at_a_time(tmp_path):
    store = Store(tmp_path)
    with store.locked(), pytest.raises(QuietmaxError, match="Another run"), Store(tmp_path).locked():
        pass
    with store.locked():
        pass


def test_a_folder_that_cannot_be_written_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(QuietmaxError, match="cannot be written"), Store(tmp_path / "file").locked():
        pass


def test_outcomes_tell_refusals_and_accidents_apart():
    def refuse(_):
        raise InvalidInput("Too small; take more.")

    assert outcome_of(refuse, tiny_cells()[0]) == (None, "Too small; take more.")
    assert "ZeroDivisionError" in outcome_of(lambda _: 1 / 0, tiny_cells()[0])[1]


@dataclass(frozen=True)
class MakeFatal:
    """The first worker to compute repeat 1 kills itself, once."""

    folder: Path

    def __call__(self):
        def compute(trial):
            mark = self.folder / "died"
            if trial.group.repeat == 1 and not mark.exists():
                mark.write_text("")
                os.kill(os.getpid(), signal.SIGKILL)
            return {"number": 1.0}

        return compute


def test_a_killed_worker_process_is_replaced_and_its_cell_tried_again(tmp_path):
    done = run(tiny_cells(), Store(tmp_path / "store"), lambda: LocalWorkers(MakeFatal(tmp_path), workers=1))
    assert (tmp_path / "died").exists()
    assert done.failures == {}
    assert len(done.results) == len(tiny_cells())


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_a_grid_killed_half_way_goes_on_where_it_was_and_gives_the_same_numbers(tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = subprocess.Popen(
        [sys.executable, str(HERE / "toy_grid.py"), str(killed)], start_new_session=True
    )
    deadline = time.monotonic() + 300
    while len(list((killed / "cells").rglob("*-*.json"))) < 3:
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
    before = {path.name for path in stamps}
    assert 3 <= len([path for path in stamps if path.suffix == ".json"]) < len(tiny_cells())

    compute = MakeMeasure(killed)()
    again = run(tiny_cells(), Store(killed), lambda: SameProcess(compute))
    assert again.failures == {}
    assert again.computed == len(tiny_cells()) - len([name for name in before if name.endswith(".json")])
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())

    fresh = run(tiny_cells(), Store(whole), lambda: SameProcess(MakeMeasure(whole)()))
    for trial in tiny_cells():
        assert _numbers(again.results[trial]) == pytest.approx(_numbers(fresh.results[trial]), abs=1e-6)


def _numbers(result):
    """Everything that does not depend on the clock."""
    kept = {key: value for key, value in result.items() if not key.endswith("_seconds")}
    return [float(word) for word in _leaves(kept)]


def _leaves(value):
    if isinstance(value, dict):
        return [leaf for entry in value.values() for leaf in _leaves(entry)]
    return [value] if isinstance(value, int | float) else []


def test_results_are_json(tmp_path):
    trial = tiny_cells()[0]
    store = Store(tmp_path)
    store.keep_result(trial, {"number": 0.1})
    (path,) = (tmp_path / "cells").rglob("*.json")
    assert json.loads(path.read_text())["cell"]["method"] == "plain"
    assert store.result(trial) == {"number": 0.1}
    with pytest.raises(ValueError, match="JSON"):
        store.keep_result(trial, {"number": float("nan")})
    assert store.result(trial) == {"number": 0.1}

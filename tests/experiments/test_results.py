"""The result store: results and networks are stored whole, once, and found again."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.experiments.findings import summarize
from quietmax.experiments.grid import DataSource, Group, Trial, reproduction_trials
from quietmax.experiments.results import STORED_TRIALS, Arrays, ResultStore, read_trials, write_trials
from tests.experiments.made_up import result, the_papers_own, trial
from tests.experiments.toy_grid import GROUPS, tiny_trials


def test_results_are_json(tmp_path: Path) -> None:
    trial = tiny_trials()[0]
    store = ResultStore(tmp_path)
    store.store_result(trial, {"number": 0.1})
    (path,) = (tmp_path / "trials").rglob("*.json")
    assert json.loads(path.read_text())["trial"]["method"] == "plain"
    assert path.stat().st_mode & 0o777 == 0o600
    assert store.result(trial) == {"number": 0.1}
    with pytest.raises(ValueError, match="JSON"):
        store.store_result(trial, {"number": float("nan")})
    assert store.result(trial) == {"number": 0.1}


def test_results_of_version_0_1_are_found(tmp_path: Path) -> None:
    trial, store = tiny_trials()[0], ResultStore(tmp_path)
    path = tmp_path / "cells" / f"{trial.key}.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"cell": trial.to_json(), "result": {"number": 0.1}}))
    assert store.result(trial) == {"number": 0.1}
    store.store_result(trial, {"number": 0.2})
    assert store.result(trial) == {"number": 0.2}


def test_of_two_workers_that_need_the_same_networks_one_trains_them(tmp_path: Path) -> None:
    store, made, begun = ResultStore(tmp_path), [], threading.Barrier(2)

    def make() -> Arrays:
        made.append(threading.get_ident())
        time.sleep(0.2)
        return {"weights": np.arange(3.0)}

    def need() -> Arrays:
        begun.wait()
        return store.arrays(GROUPS[0], "shadows", make)

    with ThreadPoolExecutor(2) as workers:
        first, second = (each.result() for each in [workers.submit(need), workers.submit(need)])
    assert len(made) == 1
    assert np.array_equal(first["weights"], second["weights"])
    assert np.array_equal(store.arrays(GROUPS[0], "shadows", make)["weights"], np.arange(3.0))
    (path,) = (tmp_path / "networks").rglob("*.safetensors")
    assert path.stat().st_mode & 0o777 == 0o600, "networks without noise"


def test_a_store_serves_one_run_at_a_time(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    with store.locked(), pytest.raises(QuietmaxError, match="Another run"), ResultStore(tmp_path).locked():
        pass
    with store.locked():
        pass


def test_a_folder_that_is_not_writable_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(QuietmaxError, match="cannot be written"), ResultStore(tmp_path / "file").locked():
        pass


def test_a_table_of_trials_gives_the_same_summaries_as_the_results(tmp_path: Path) -> None:
    found = the_papers_own() | {
        trial("head", 1.0, repeat): result(
            status="proven", claimed_delta=1e-4, test_accuracy=0.6 + 0.01 * repeat
        )
        for repeat in range(3)
    }
    write_trials(found, tmp_path / "trials.csv")
    back = read_trials([tmp_path / "trials.csv"])
    assert list(back) == list(found)
    before, after = summarize(found), summarize(back)
    for one, other in zip(before, after, strict=True):
        numbers, again = one.flat(), other.flat()
        assert numbers.keys() == again.keys()
        for name, value in numbers.items():
            assert again[name] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), (
                name
            )


def test_tables_of_trials_can_be_joined_but_not_mixed(tmp_path: Path) -> None:
    first, second, other = (tmp_path / f"{name}.csv" for name in ("first", "second", "other"))
    write_trials(the_papers_own("location"), first)
    write_trials(the_papers_own("mnist"), second)
    assert len(read_trials([first, second])) == len(the_papers_own("location")) + len(the_papers_own("mnist"))
    with pytest.raises(QuietmaxError, match="repeats the trial location, plain"):
        read_trials([first, first])
    group = Group(DataSource("location"), replace(trial("plain").group.effort, shadows=5), repeat=1)
    write_trials({Trial(group, "plain"): result()}, other)
    with pytest.raises(QuietmaxError, match="location have different settings"):
        read_trials([first, other])
    first.write_text(first.read_text().replace("0.65", "many", 1))
    with pytest.raises(QuietmaxError, match=r"Line 2 of .* is not a trial: could not convert"):
        read_trials([first])
    with pytest.raises(InvalidInput, match="registered data sets"):
        write_trials(
            {Trial(replace(group, source=replace(group.source, digest="x")), "plain"): result()}, other
        )


def test_the_stored_run_has_every_trial_of_the_papers_profile() -> None:
    repeats: dict[str, int] = {}
    stored = read_trials([STORED_TRIALS])
    for each in stored:
        name = each.group.source.name
        repeats[name] = max(repeats.get(name, 0), each.group.repeat + 1)
    assert all(repeats[name] >= 3 for name in ("location", "adult"))
    for name, count in repeats.items():
        wanted = reproduction_trials([name], "paper", repeats=count)
        assert set(wanted) <= set(stored)

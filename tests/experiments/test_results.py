"""The result store: results and networks are stored whole, once, and found again."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from quietmax.errors import QuietmaxError
from quietmax.experiments.results import Arrays, ResultStore
from tests.experiments.toy_grid import GROUPS, tiny_trials


def test_results_are_json(tmp_path: Path) -> None:
    trial = tiny_trials()[0]
    store = ResultStore(tmp_path)
    store.store_result(trial, {"number": 0.1})
    (path,) = (tmp_path / "trials").rglob("*.json")
    assert json.loads(path.read_text())["trial"]["method"] == "plain"
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

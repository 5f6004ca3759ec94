"""Keys of trials, the trials of each profile, and their results: stored whole, once, and found again."""

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
from quietmax.experiments.grid import (
    LIKE_FOR_LIKE_EPSILONS,
    STORED_TRIALS,
    Arrays,
    DataSource,
    Effort,
    Group,
    ResultStore,
    Trial,
    _workload,
    read_trials,
    reproduction_trials,
    write_trials,
)
from tests.experiments.made_up import result, the_papers_own, trial
from tests.experiments.toy_grid import EFFORT, GROUPS, tiny_trials


def test_a_trial_has_another_key_for_every_setting() -> None:
    changed = [
        Trial(Group(DataSource("mnist-5k"), EFFORT, 0, seed=1), "plain"),
        Trial(Group(DataSource("mnist-5k"), Effort(records=301, shadows=2), 0), "plain"),
        Trial(GROUPS[0], "plain", queries=2),
    ]
    assert len({trial.key for trial in tiny_trials() + changed}) == len(tiny_trials()) + 3


def test_keys_and_seeds_are_those_of_version_0_1() -> None:
    """Stored results are found by these keys, in every process, and the figures depend on the seeds."""
    trial = Trial(Group(DataSource("mnist-5k"), Effort(200, 2, 1, 3, 50, ("threshold",))), "head", 10.0)
    assert trial.key == "mnist-5k-0-92215544e0e4/head-10-any-9315ecdda323"
    assert trial.noise_seed == 155303305863377
    declared = '{"bounds": {"age": [0.0, 100.0]}, "classes": ["no", "yes"], "infer": true, "person": "id"}'
    table = DataSource("people.csv", declared, "0123")
    assert Trial(Group(table, Effort(100, 2)), "plain").key == "people-0-20819f40b03b/plain-any-e118f26964ab"


@pytest.mark.parametrize("named", [True, False])
def test_a_changed_table_or_declaration_is_another_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own.csv").write_text("a,b\n1,0\n")
    schema = tmp_path / ("facts.toml" if named else "own.toml")
    declared = {"schema": schema} if named else {}
    seen = [DataSource.of("~/own.csv")]
    for high in (1, 2):
        schema.write_text(f"[bounds]\na = [0, {high}]\n")
        seen.append(DataSource.of("~/own.csv", declared))
        assert seen[-1] == DataSource.of("~/own.csv", declared)
    (tmp_path / "own.csv").write_text("a,b\n2,0\n")
    seen.append(DataSource.of("~/own.csv", declared))
    assert len({source.digest for source in seen}) == 4
    assert seen[0].title == "own"


def test_the_paper_profile_has_ten_repeats_and_all_shadow_networks() -> None:
    chosen = _workload("mnist", "paper")
    assert (chosen.repeats, chosen.effort.shadows, chosen.effort.epochs) == (10, 50, 100)
    trials = reproduction_trials(["mnist"], "paper")
    assert len({each.group for each in trials}) == 10
    alike = {each.epsilon for each in trials if each.method == "head"}
    assert alike == set(LIKE_FOR_LIKE_EPSILONS)
    with pytest.raises(InvalidInput, match="profile must be quick or paper, got 'fast'"):
        _workload("mnist", "fast")


def test_every_experiment_reads_the_same_trials() -> None:
    """The accuracy table and the figures are parts of the same grid, so nothing is trained twice."""
    everything = set(reproduction_trials(["location"], "quick"))
    for experiment in ("accuracy", "algorithm1", "dpsgd", "like-for-like"):
        part = reproduction_trials(["location"], "quick", experiments=[experiment])
        assert set(part) < everything
        assert part[0].method == "plain"


def test_results_are_json(tmp_path: Path) -> None:
    stored = tiny_trials()[0]
    store = ResultStore(tmp_path)
    store.store_result(stored, {"number": 0.1})
    (path,) = (tmp_path / "trials").rglob("*.json")
    assert json.loads(path.read_text())["trial"]["method"] == "plain"
    assert path.stat().st_mode & 0o777 == 0o600
    assert store.result(stored) == {"number": 0.1}
    with pytest.raises(ValueError, match="JSON"):
        store.store_result(stored, {"number": float("nan")})
    assert store.result(stored) == {"number": 0.1}


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

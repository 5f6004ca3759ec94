"""Keys of trials, and the trials of each profile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quietmax.errors import InvalidInput
from quietmax.experiments.grid import (
    LIKE_FOR_LIKE_EPSILONS,
    DataSource,
    Effort,
    Group,
    Trial,
    _workload,
    reproduction_trials,
)
from tests.experiments.toy_grid import EFFORT, GROUPS, tiny_trials

HERE = Path(__file__).parent


def test_a_trial_has_the_same_key_in_every_process_and_another_for_every_setting() -> None:
    trials = tiny_trials()
    program = "from toy_grid import tiny_trials; print([trial.key for trial in tiny_trials()])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "PYTHONHASHSEED": "7"}
    elsewhere = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    ).stdout.strip()
    assert elsewhere == str([trial.key for trial in trials])
    changed = [
        Trial(Group(DataSource("mnist-5k"), EFFORT, 0, seed=1), "plain"),
        Trial(Group(DataSource("mnist-5k"), Effort(records=301, shadows=2), 0), "plain"),
        Trial(GROUPS[0], "plain", queries=2),
    ]
    assert len({trial.key for trial in trials + changed}) == len(trials) + 3


def test_keys_and_seeds_are_those_of_version_0_1() -> None:
    """Stored results are found by these keys, and the figures depend on the seeds."""
    trial = Trial(Group(DataSource("mnist-5k"), Effort(200, 2, 1, 3, 50, ("threshold",))), "head", 10.0)
    assert trial.key == "mnist-5k-0-92215544e0e4/head-10-any-9315ecdda323"
    assert trial.noise_seed == 155303305863377
    declared = '{"bounds": {"age": [0.0, 100.0]}, "classes": ["no", "yes"], "infer": true, "person": "id"}'
    table = DataSource("people.csv", declared, "0123")
    assert Trial(Group(table, Effort(100, 2)), "plain").key == "people-0-20819f40b03b/plain-any-e118f26964ab"


def test_a_changed_file_is_another_source(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("a,b\n1,0\n")
    before = DataSource.of(str(path), {"label": "b"})
    path.write_text("a,b\n2,0\n")
    assert DataSource.of(str(path), {"label": "b"}) != before
    assert before.title == "own"


@pytest.mark.parametrize("named", [True, False])
def test_a_changed_declaration_is_another_source(
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
    assert len({source.digest for source in seen}) == 3
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

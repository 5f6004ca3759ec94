"""The examples of the help: short enough to be pasted from the screen, and they work in the order they stand in."""

from __future__ import annotations

import os
import shlex

import numpy as np
import pytest

from quietmax.accounting import PureCost
from quietmax.cli import COMMANDS, loaded
from quietmax.data import load
from quietmax.ledger import Ledger, Terms
from quietmax.server import run as supervisor

SCREEN = 78
NOT_RUN = {
    "quietmax demo": "has a test of its own",
    "quietmax serve digits=private --ledger postgresql://localhost/quietmax": "needs a database",
    "quietmax ledger key revoke 0123456789abcdef": "needs the id of one's own key",
    "quietmax reproduce figures --datasets location": "takes long",
    "quietmax reproduce findings --datasets location adult mnist": "takes long",
    "quietmax reproduce multi-query --datasets location": "takes long",
    "quietmax reproduce all --profile quick": "takes a quarter of an hour",
}


def _commands(command, path):
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from _commands(inner, [*path, name])
    else:
        yield path, command


def _examples():
    """Every command, its examples, and how much stands before one on its line."""
    for name in COMMANDS:
        for path, command in _commands(loaded(name), [name]):
            before, found, shown = (command.help or "").partition("Example: ")
            if not found:
                before, found, shown = before.partition("Examples:")
            for block in shown.split("\n\n"):
                example = " ".join(block.split())
                if example:
                    yield path, example, 0 if found == "Examples:" else len(found)


def test_every_command_has_an_example_that_fits_a_screen():
    examples = list(_examples())
    for path, example, before in examples:
        assert example.startswith(f"quietmax {' '.join(path)}"), example
        assert before + len(example) <= SCREEN, f"{before + len(example)} letters: {example}"
    everything = {" ".join(path) for name in COMMANDS for path, _ in _commands(loaded(name), [name])}
    assert {" ".join(path) for path, _, _ in examples} == everything
    assert set(NOT_RUN) <= {example for _, example, _ in examples}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """What the examples take for granted: a table with its declaration, queries, a ledger with an account."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUIETMAX_LEDGER", str(tmp_path / "ledger.sqlite"))
    ages = np.random.default_rng(0).integers(18, 90, 1200)
    rows = [f"{age},{('Female', 'Male')[age % 2]},{'yes' if age > 50 else 'no'}" for age in ages]
    (tmp_path / "people.csv").write_text("\n".join(["age,sex,income", *rows]))
    (tmp_path / "people.toml").write_text(
        'label = "income"\nclasses = ["no", "yes"]\nbounds = { age = [0, 120] }\n'
        'categories = { sex = ["Female", "Male"] }\n'
    )
    queries = load("mnist-5k").test.features[:3]
    header = ",".join(f"pixel_{number}" for number in range(queries.shape[1]))
    np.savetxt(tmp_path / "queries.csv", queries, delimiter=",", header=header, comments="")
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.open_account("people", PureCost(1.0), Terms(1.0))
        ledger.client("ann")
    return tmp_path


@pytest.mark.slow
def test_the_examples_work_when_they_are_pasted(run, folder, monkeypatch):
    monkeypatch.setattr(supervisor, "supervise", lambda *_: None)
    assert folder.is_dir()
    real = "QUIETMAX_DATA" in os.environ
    for _, example, _ in _examples():
        if example in NOT_RUN or (example.startswith("quietmax reproduce") and not real):
            continue
        code, _, err = run(*shlex.split(example)[1:])
        assert code == 0, f"{example}: {err}"

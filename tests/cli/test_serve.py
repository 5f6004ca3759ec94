"""`quietmax serve` up to the moment it serves: what it refuses, and what it announces."""

from __future__ import annotations

import json

import pytest

from quietmax.cli._output import errors
from quietmax.ledger import Ledger
from quietmax.models import Model, TrainingSettings, save_model
from quietmax.models.mlp import initial_mlp
from quietmax.server import run as supervisor

ORDINARY = ("--accept-unproven", "--budget", 10, "--queries", 20, "--port", 0)


@pytest.fixture
def serve(run, tmp_path, monkeypatch):
    """Run `serve` with an ordinary model; what would be served is remembered, not served."""
    network = initial_mlp((6, 8, 4), "tanh", (0,))
    save_model(Model(network, TrainingSettings((8,)), 160, "people", 0), tmp_path / "plain")
    served = []
    monkeypatch.setattr(supervisor, "supervise", lambda make, *_: served.append(make))
    monkeypatch.setattr(errors, "_width", 200)

    def call(*options):
        served.clear()
        ended = run("serve", tmp_path / "plain", "--ledger", tmp_path / "ledger.sqlite", *options)
        return *ended, len(served)

    return call


def test_what_is_served_is_announced_with_its_warning_and_the_missing_key(serve, tmp_path):
    code, _, err, served = serve(*ORDINARY)
    assert (code, served) == (0, 1)
    assert "Serving on http://127.0.0.1:" in err
    assert "plain/1 (refuted): account people, 20 answers left" in err
    assert "create one with: quietmax ledger key create NAME" in err
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.create_key("ann")
    _, _, err, _ = serve(*ORDINARY)
    assert "key create" not in err


def test_what_is_served_is_announced_as_json(serve):
    code, out, err, served = serve(*ORDINARY, "--anonymous", "--json")
    assert (code, err, served) == (0, "", 1)
    told = json.loads(out)
    assert told["url"].startswith("http://127.0.0.1:")
    assert told["keys"] == 0
    (model,) = told["models"]
    assert (model["name"], model["account"], model["status"]) == ("plain", "people", "refuted")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((*ORDINARY, "--anonymous", "--behind-proxy"), "only for this machine"),
        ((*ORDINARY, "--anonymous", "--host", "0.0.0.0", "--behind-proxy"), "only for this machine"),
        (("--accept-unproven", "--delta", 1e-5), "--delta belongs to --budget"),
        ((*ORDINARY, "--because", "They are other people."), "--because belongs to --account"),
        ((*ORDINARY, "--host", "0.0.0.0"), "travel in the clear"),
        (("--budget", 10, "--queries", 20), "--accept-unproven"),
    ],
)
def test_what_cannot_be_served_is_refused_and_leaves_no_account(serve, tmp_path, options, sentence):
    code, out, err, served = serve(*options)
    assert (code, out, served) == (1, "", 0)
    assert sentence in err
    if (tmp_path / "ledger.sqlite").exists():
        with Ledger(tmp_path / "ledger.sqlite") as ledger:
            assert ledger.accounts() == []


def test_an_account_of_which_nothing_is_left_is_announced(serve, tmp_path):
    serve(*ORDINARY)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.revoke("people", None, "The study is over.")
    _, _, err, served = serve(*ORDINARY)
    assert served == 1
    assert "Nothing is left of the account people" in err

"""DP-SGD from the command line: trained, asked, shown, served, attacked, and refused in one sentence."""

from __future__ import annotations

import json

import pytest
from own_table import DECLARED

from quietmax.server.loading import load_servables

PRIVATE = (*DECLARED, "--private", "dpsgd")


def test_a_network_is_trained_asked_shown_served_and_attacked(run, people, tmp_path):
    folder = tmp_path / "network"
    options = ("--epsilon", 200, "--declared-size", 600, "--sampling-rate", 0.5, "--steps", 60, "-o", folder)
    code, out, err = run("train", people, *PRIVATE, *options, "--learning-rate", 16, "--json")
    assert code == 0, err
    told = json.loads(out)
    # The larger class has 0.54; in 30 trainings, each with its own noise, 0.826 was the least.
    assert told["test_accuracy"] > 0.7
    assert told["queries"] == "any number"
    assert told["delta"] == pytest.approx(1 / 6000)
    assert (told["accountant"], told["reading"], told["steps"]) == ("pld", "proven", 60)
    guarantee = told["guarantee"]
    assert (guarantee["status"], guarantee["epsilon"]) == ("proven", 200.0)
    asked = tmp_path / "asked.csv"
    asked.write_text("age,sex\n20,F\n85,M\n")
    code, out, err = run("predict", "--model", folder, "--input", asked, "--json")
    assert code == 0, err
    assert json.loads(out)["labels"] == ["lo", "hi"]
    assert json.loads(out)["remaining"]["queries"] is None
    code, out, err = run("card", folder, "--json")
    assert code == 0, err
    assert json.loads(out)["guarantee"]["status"] == "proven"
    (named,) = load_servables([str(folder)])
    assert named.servable.proven
    told = run(
        "attack", folder, "--data", people, *DECLARED, "--attack", "threshold", "--shadows", 2, "--json"
    )
    assert told[0] == 0, told[2]
    assert json.loads(told[1])["reports"][0]["attack"] == "threshold"


def test_full_batches_and_the_published_reading_are_saved_with_their_own_guarantees(run, people, tmp_path):
    shared = ("--epsilon", 8, "--declared-size", 600, "--json")
    code, out, err = run("train", people, *PRIVATE, *shared, "--sampling-rate", 1, "-o", tmp_path / "full")
    assert code == 0, err
    assert json.loads(out)["guarantee"]["definition"] == "gaussian"
    assert run("card", tmp_path / "full")[0] == 0
    code, out, err = run(
        "train",
        people,
        *PRIVATE,
        *shared,
        *("--configuration", "paper", "--reading", "published", "--accountant", "zcdp", "--hidden", 4),
        *("-o", tmp_path / "paper"),
    )
    assert code == 0, err
    told = json.loads(out)
    assert told["guarantee"]["status"] == "conditional"
    assert (told["learning_rate"], told["clip"], told["steps"]) == (0.001, 1.0, 600)
    code, out, err = run("card", tmp_path / "paper")
    assert code == 0, err
    assert "conditional" in out


def test_the_report_for_people_names_the_accountant_and_the_noise(run, people):
    code, out, err = run(
        "train", people, *PRIVATE, "--sampling-rate", 0.5, "--accountant", "nc", "--steps", 5
    )
    assert code == 0, err
    for word in ("accountant", "nc", "noise multiplier", "conditional"):  # no size was declared
        assert word in out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--private", "dpsgd", "--accountant", "moments"), "pld, rdp, zcdp, ac, nc"),
        (("--private", "dpsgd", "--reading", "published"), "published reading knows"),
        (("--private", "dpsgd", "--reading", "hoped"), "reading"),
        (("--private", "dpsgd", "--configuration", "mine"), "today, paper"),
        (("--private", "dpsgd", "--epochs", "5"), "--sampling-rate"),
        (("--private", "dpsgd", "--queries", "5"), "--queries"),
        (("--private", "dpsgd", "--features", "scattering"), "needs images"),
        (("--private", "dpsgd", "--sampling-rate", "2"), "sampling rate"),
        (("--private", "dpsgd", "--delta", "2"), "delta"),
        (("--private", "head", "--accountant", "rdp"), "Only --private dpsgd reads --accountant"),
        (("--clip", "1", "--steps", "3"), "Only --private dpsgd reads --steps, --clip"),
    ],
)
def test_wrong_options_are_one_sentence(run, people, arguments, word):
    code, out, err = run("train", people, *DECLARED, *arguments)
    assert code == 1
    assert out == ""
    assert word in err
    assert len(err.strip().splitlines()) == 1

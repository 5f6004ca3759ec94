"""Training, asking and looking at private models from the command line."""

from __future__ import annotations

import html
import json
import re

import pytest

from quietmax.data import load
from quietmax.estimators.head import estimator as head
from quietmax.privacy_card import OBSERVED, leakage_file, record_leakage
from quietmax.server.repository import load_servables
from tests.cli.own_table import DECLARED


@pytest.fixture
def asked(tmp_path):
    path = tmp_path / "asked.csv"
    path.write_text("age,sex\n20,F\n85,M\n")
    return path


def test_a_head_is_trained_on_an_own_table_and_asked_without_end(run, people, asked, tmp_path):
    folder = tmp_path / "head"
    code, out, _ = run(
        "train",
        people,
        *DECLARED,
        "--private",
        "head",
        "--epsilon",
        4,
        "--declared-size",
        480,
        "-o",
        folder,
        "--json",
    )
    assert code == 0
    result = json.loads(out)
    assert result["guarantee"]["status"] == "proven"
    assert result["test_accuracy"] > 0.8
    for _ in range(3):
        code, out, _ = run("predict", "--model", folder, "--input", asked, "--json")
        assert code == 0
        answer = json.loads(out)
        assert answer["labels"] == ["lo", "hi"]
        assert answer["remaining"]["queries"] is None
    code, out, _ = run("predict", "--model", folder, "--input", asked)
    assert code == 0
    assert "Guarantee: proven" in out


def _numbers(text):
    return set(re.findall(r"[0-9.]+", text.replace(",", "")))


@pytest.mark.parametrize("kind", ["head", "teachers", "dpsgd"])
def test_the_true_number_of_training_records_is_shown_nowhere_if_one_is_declared(run, people, tmp_path, kind):
    declared = {"label": "income", "classes": ["lo", "hi"]}
    columns = {"bounds": {"age": (18, 90)}, "categories": {"sex": ["F", "M"]}}
    true = str(len(load(people, **declared, **columns).train))
    folder = tmp_path / "model"
    arguments = (people, *DECLARED, "--private", kind, "--declared-size", 5000, "--epsilon", 4)
    shown = [run("train", *arguments, "-o", folder, "--json"), run("train", *arguments)]
    shown += [run("card", folder), run("card", folder, "--json")]
    assert [code for code, _, _ in shown] == [0, 0, 0, 0]
    result = json.loads(shown[0][1])
    assert (result["records"], result["records_from"]) == (5000, "declared")
    assert true not in _numbers("".join(out + err for _, out, err in shown))
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            assert true not in _numbers(file.read_text())


def test_a_head_without_declared_size_shows_the_noisy_count_that_it_paid_for(
    run, people, tmp_path, monkeypatch
):
    monkeypatch.setattr(head, "released_size", lambda *_: 4321.7)
    folder = tmp_path / "model"
    code, out, _ = run("train", people, *DECLARED, "--private", "head", "-o", folder, "--json")
    assert code == 0
    result = json.loads(out)
    assert (result["records"], result["records_from"]) == (4322, "noisy count")
    assert set(result["not_for_publication"]) == {"test_accuracy", "seconds"}
    code, out, _ = run("card", folder)
    assert code == 0
    assert "noisy number of records" in " ".join(out.split())
    assert "declared number of records" not in " ".join(out.split())


def test_attack_results_are_kept_out_of_a_folder_that_may_be_published(run, people, tmp_path):
    folder = tmp_path / "model"
    run("train", people, *DECLARED, "--private", "head", "--declared-size", 480, "-o", folder)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    asked = (folder, "--data", people, *DECLARED, "--attack", "threshold", "--shadows", 2)
    code, out, _ = run("attack", *asked)
    assert code == 0
    assert OBSERVED in " ".join(out.split())
    code, out, _ = run("attack", *asked, "--json")
    assert json.loads(out)["caveat"] == OBSERVED
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    code, out, _ = run("card", folder, "--json")
    assert [entry["attack"] for entry in json.loads(out)["leakage"]] == ["threshold"]
    assert json.loads(out)["leakage_caveat"] == OBSERVED
    # another model under the same name does not inherit them
    run("train", people, *DECLARED, "--private", "head", "--declared-size", 480, "-o", folder, "--overwrite")
    code, out, _ = run("card", folder, "--json")
    assert (code, json.loads(out)["leakage"], json.loads(out)["leakage_caveat"]) == (0, [], None)


def test_what_ordinary_training_prints_is_marked_as_not_for_publication(run):
    arguments = ("train", "mnist-5k", "--records", 200, "--epochs", 2)
    assert "Not for publication" in run(*arguments)[1]
    told = json.loads(run(*arguments, "--json")[1])
    assert {"records", "train_accuracy", "test_accuracy"} <= set(told["not_for_publication"])


def test_teachers_answer_until_the_budget_is_gone_also_in_a_new_process(run, people, asked, tmp_path):
    folder = tmp_path / "crowd"
    code, out, _ = run(
        "train", people, *DECLARED, "--private", "teachers", "--queries", 3, "--epsilon", 30, "--declared-size", 480,
        "-o", folder,
    )  # fmt: skip
    assert code == 0
    assert "Guarantee: proven" in out
    code, out, _ = run("predict", "--model", folder, "--input", asked, "--json")
    assert code == 0
    assert json.loads(out)["remaining"]["queries"] == 1
    code, out, err = run("predict", "--model", folder, "--input", asked)
    assert (code, out) == (1, "")
    assert "2 of 3 are spent" in err


def test_a_measured_encoding_makes_the_guarantee_conditional(run, people):
    code, out, _ = run(
        "train",
        people,
        "--label",
        "income",
        "--infer",
        "--private",
        "head",
        "--declared-size",
        480,
        "--json",
    )
    assert code == 0
    guarantee = json.loads(out)["guarantee"]
    assert guarantee["status"] == "conditional"
    assert any("age" in assumption for assumption in guarantee["assumptions"])


def test_answers_per_query_from_a_head_are_pure(run, people, tmp_path):
    code, out, _ = run(
        "train",
        people,
        *DECLARED,
        "--private",
        "head",
        "--queries",
        5,
        "--declared-size",
        480,
        "-o",
        tmp_path / "m",
        "--json",
    )
    assert code == 0
    guarantee = json.loads(out)["guarantee"]
    assert (guarantee["definition"], guarantee["status"]) == ("pure", "proven")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--private", "sgd"], "head, teachers or dpsgd"),
        (["--private", "head", "--epsilon", "-1"], "epsilon"),
        (["--private", "head", "--features", "scattering"], "needs images"),
        (["--private", "head", "--features", "sift"], "sift"),
        (["--private", "head", "--route", "scenic"], "route"),
    ],
)
def test_bad_private_options_are_one_sentence(run, people, tmp_path, arguments, word):
    code, out, err = run(
        "train", people, *DECLARED, *arguments, "--declared-size", 480, "-o", tmp_path / "model"
    )
    assert (code, out) == (1, "")
    assert word in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--epsilon", 1], "Only private training reads --epsilon; add --private"),
        (
            ["--epsilon", 1, "--delta", 1e-6, "--clip", 1],
            "Only private training reads --epsilon, --delta, --clip",
        ),
        (["--queries", 5], "Only private training reads --queries"),
        (["--declared-size", 480], "Only private training reads --declared-size"),
        (["--teachers", 5], "Only private training reads --teachers"),
        (["--route", "gradient"], "Only private training reads --route"),
        (["--features", "auto"], "Only private training reads --features"),
        (["--configuration", "default"], "Only --private dpsgd reads --configuration"),
        (
            ["--loss", "quadratic", "--averaged-over", "samples"],
            "--averaged-over belong to --loss convexified",
        ),
        (["--private", "head", "--epochs", 5], "--private head does not read --epochs"),
        (["--private", "head", "--hidden", 5], "--private head does not read --hidden"),
        (["--private", "head", "--teachers", 5], "--private head does not read --teachers"),
        (["--private", "head", "--queries", 5, "--route", "gradient"], "has the route output"),
        (["--private", "teachers", "--route", "output"], "--private teachers does not read --route"),
        (
            ["--private", "teachers", "--loss", "convexified", "--alpha", 1, "--l2", 1, "--learning-rate", 1],
            "--private teachers does not read --loss, --alpha, --learning-rate, --l2",
        ),
        (
            ["--private", "teachers", "--batch-size", 5],
            "--private teachers does not read --batch-size",
        ),
        (["--private", "dpsgd", "--loss", "quadratic"], "--private dpsgd does not read --loss"),
        (["--private", "dpsgd", "--teachers", 5], "--private dpsgd does not read --teachers"),
    ],
)
def test_an_option_that_would_not_be_read_is_refused(run, people, tmp_path, arguments, sentence):
    code, out, err = run("train", people, *DECLARED, *arguments, "-o", tmp_path / "model")
    assert (code, out) == (1, "")
    assert sentence in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "model").exists()


def test_a_private_model_takes_no_mechanism_of_the_callers(run, people, asked, tmp_path):
    run("train", people, *DECLARED, "--private", "head", "--declared-size", 480, "-o", tmp_path / "model")
    for option in ("--epsilon", "--epsilon-sampling"):
        code, _, err = run("predict", "--model", tmp_path / "model", "--input", asked, option, 5)
        assert code == 1
        assert "its own mechanism" in err


def test_the_card_tells_guarantee_status_assumptions_spending_and_leakage(run, people, asked, tmp_path):
    folder = tmp_path / "crowd"
    run(
        "train",
        people,
        *DECLARED,
        "--private",
        "teachers",
        "--queries",
        3,
        "--declared-size",
        480,
        "-o",
        folder,
    )
    run("predict", "--model", folder, "--input", asked)
    seen = {"value": 0.01, "low": -0.01, "high": 0.03}
    report = {"attack": "shadow", "released_by": "the model", "leakage": seen, "auc": seen, "members": 480}
    record_leakage(folder, [report])
    newer = seen | {"value": 0.02}
    record_leakage(folder, [report | {"leakage": newer}, report | {"attack": "lira"}])
    page = tmp_path / "card.html"
    code, out, _ = run("card", folder, "--html", page, "--json")
    assert code == 0
    card = json.loads(out)
    assert card["status"] == "proven"
    assert card["answered"] == 2
    assert card["declared_size"] == 480
    assert [(entry["attack"], entry["leakage"]["value"]) for entry in card["leakage"]] == [
        ("shadow", 0.02),  # a newer run replaces the older
        ("lira", 0.01),
    ]
    assert card["leakage_caveat"] == OBSERVED
    text = page.read_text()
    assert "proven" in text
    assert "http" not in text  # nothing is fetched to show it
    assert html.escape(OBSERVED) in text
    code, out, _ = run("card", folder)
    assert code == 0
    assert "Privacy card: proven" in out
    assert "for a source table" in out
    assert "doubles" in out


def test_the_card_of_an_ordinary_model_promises_nothing_and_shows_what_an_attack_saw(run, tmp_path):
    run("train", "mnist-5k", "--records", 200, "--epochs", 5, "-o", tmp_path / "model")
    code, _, _ = run("attack", tmp_path / "model", "--attack", "threshold", "--shadows", 2)
    assert code == 0
    code, out, _ = run("card", tmp_path / "model")
    assert "observed leakage, threshold" in " ".join(out.split())
    leakage_file(tmp_path / "model").write_text("[")
    code, _, err = run("card", tmp_path / "model")
    assert code == 1
    assert "cannot be read" in err
    leakage_file(tmp_path / "model").unlink()
    code, out, _ = run("card", tmp_path / "model", "--json")
    assert code == 0
    assert json.loads(out)["status"] == "none"
    code, _, err = run("card", tmp_path / "absent")
    assert code == 1
    assert "no model" in err
    code, _, err = run("card", tmp_path / "model", "--html", tmp_path / "absent" / "card.html")
    assert code == 1
    assert "could not be written" in err


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
    assert (told["accountant"], told["analysis"], told["steps"]) == ("pld", "proven", 60)
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
    assert (told["learning_rate"], told["max_grad_norm"], told["steps"]) == (0.001, 1.0, 600)
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
        (("--private", "dpsgd", "--configuration", "mine"), "default, paper"),
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

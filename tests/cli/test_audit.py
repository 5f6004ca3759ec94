"""`quietmax audit`: each command prints one JSON document or a table, and refuses with one sentence."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from quietmax.cli.audit import app
from quietmax.errors import InvalidInput, QuietmaxError


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, QuietmaxError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_algorithm_1_with_ten_classes_is_refuted():
    report = json.loads(run("mechanism", "--classes", 10, "--epsilon", 1, "--samples", 8000, "--json"))
    assert report["verdict"] == "refuted"
    assert report["claimed"] == pytest.approx(1.0)
    assert report["lower_bound"] > 4
    assert report["definition"] == "pure"
    assert report["noise_source"] == "seeded"


@pytest.mark.parametrize(
    ("options", "verdict"),
    [
        (("--mechanism", "algorithm1", "--classes", 2, "--noise", "gaussian"), "consistent"),
        (("--mechanism", "sampled-neuron", "--classes", 2), "consistent"),
        (("--mechanism", "sampled-neuron", "--classes", 2, "--noise-share", 0.5), "refuted"),
        (("--mechanism", "noisy-max", "--noise", "permute-and-flip"), "consistent"),
        (("--mechanism", "noisy-max", "--noise", "gaussian", "--epsilon", 8), "consistent"),
        (
            ("--mechanism", "noisy-max", "--noise", "gaussian", "--epsilon", 8, "--noise-share", 0.5),
            "refuted",
        ),
        (("--mechanism", "gaussian", "--classes", 3, "--epsilon", 8, "--exact"), "consistent"),
    ],
    ids=str,
)
def test_every_mechanism_can_be_audited(options, verdict):
    """At the default confidence a true claim is called refuted once in a million."""
    report = json.loads(run("mechanism", *options, "--samples", 20000, "--json"))
    assert report["verdict"] == verdict


def test_the_table_shows_the_event_with_its_brackets():
    shown = run("mechanism", "--mechanism", "sampled-neuron", "--classes", 2, "--samples", 4000)
    assert "Audit of sampled-neuron with 2 classes" in shown
    assert "p[0]" in shown or "p[1]" in shown
    assert "not a proof" in shown


def test_a_picture_is_written_on_request(tmp_path):
    path = tmp_path / "audit.svg"
    run("mechanism", "--mechanism", "sampled-neuron", "--classes", 2, "--samples", 4000, "--plot", path)
    assert "consistent -->" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "arguments", [("mechanism",), ("sensitivity", "mnist-5k"), ("training", "mnist-5k")], ids=str
)
def test_a_picture_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch, arguments):
    for name in ("quietmax.data.load.load", "quietmax.cli.audit._prepared"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("began"))
    with pytest.raises(QuietmaxError, match="does not exist"):
        run(*arguments, "--plot", tmp_path / "missing" / "audit.svg")


@pytest.mark.parametrize(
    "arguments",
    [
        ("mechanism", "--samples", 1000, "--classes", 2),
        ("sensitivity", "mnist-5k", "--records", 50, "--removals", 1, "--epochs", 0),
    ],
    ids=str,
)
def test_a_picture_that_fails_after_all_does_not_lose_the_verdict(tmp_path, monkeypatch, arguments):
    def fails(*_, **__):
        raise QuietmaxError("The disk is full.")

    monkeypatch.setattr("quietmax.audit.report.plot_findings", fails)
    chosen = [*arguments, "--json", "--plot", tmp_path / "audit.svg"]
    result = CliRunner().invoke(app, [str(argument) for argument in chosen])
    assert isinstance(result.exception, QuietmaxError)
    assert json.loads(result.stdout)["verdict"] in ("refuted", "consistent")


def test_sensitivity_is_observed_beside_the_published_bounds():
    options = ("mnist-5k", "--records", 200, "--removals", 3, "--epochs", 5, "--queries", 20)
    report = json.loads(run("sensitivity", *options, "--json"))
    assert [removal["kind"] for removal in report["removals"]] == ["mislabelled", "extreme", "ordinary"]
    assert [check["quantity"] for check in report["bounds"]] == ["weight", "weights_l2", "logit"]
    assert report["verdict"] in ("refuted", "consistent")
    for check in report["bounds"]:
        assert (check["verdict"] == "refuted") == (check["empirical"] > check["bound"])
        assert check["empirical"] == report[check["quantity"]]
    assert report["records"] == 200
    assert report["queries"] == 23
    shown = run("sensitivity", *options)
    assert "Comparison with the paper's bounds" in shown


@pytest.mark.parametrize("estimator", ["head", "teachers", "dpsgd"])
def test_private_training_survives_one_run(estimator):
    report = json.loads(
        run("training", "mnist-5k", "--estimator", estimator, "--records", 300, "--canaries", 60, "--json")
    )
    assert report["verdict"] == "consistent"
    assert report["epsilon_claimed"] == pytest.approx(1.0, rel=1e-6)
    assert report["samples"] == 60


def test_dpsgd_can_be_trained_often_with_a_part_of_its_noise():
    options = ("training", "mnist-5k", "--estimator", "dpsgd", "--method", "repeated", "--records", 40)
    options += ("--times", 64, "--epsilon", 4, "--json")
    honest = json.loads(run(*options))
    assert honest["verdict"] == "consistent"
    assert honest["epsilon_claimed"] == pytest.approx(4.0, rel=1e-6)
    bare = json.loads(run(*options, "--noise-share", 0.001))
    assert bare["verdict"] == "refuted"


def test_an_ordinary_network_is_refuted_by_one_run():
    report = json.loads(
        run(
            *("training", "mnist-5k", "--estimator", "network", "--records", 300, "--canaries", 400),
            *("--epochs", 30, "--json"),
        )
    )
    assert report["verdict"] == "refuted"
    assert report["definition"] == "approximate"
    assert report["delta"] == 1e-5


def test_training_can_be_repeated_for_networks_and_estimators():
    options = ("--method", "repeated", "--records", 40, "--times", 64, "--epochs", 5, "--json")
    for estimator in ("network", "head"):
        report = json.loads(run("training", "mnist-5k", "--estimator", estimator, *options))
        assert report["method"] == "repeated training"
        assert report["samples"] == 64
    assert report["verdict"] == "consistent"


def test_stability_is_measured_with_and_without_noise():
    options = ("mnist-5k", "--records", 60, "--removed", 3, "--epochs", 3, "--draws", 2)
    report = json.loads(run("stability", *options, "--noise", 0.01, "--noise", 0.1, "--json"))
    assert [each["noise"] for each in report["noisy"]] == [0.01, 0.1]
    assert report["bound"] > 0
    shown = run("stability", *options, "--noise", 0.1)
    assert "noise 0.1" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("mechanism", "--mechanism", "magic"), "--mechanism must be one of"),
        (("mechanism", "--noise", "pink"), "--noise"),
        (("mechanism", "--noise-share", 0), "--noise-share"),
        (("training", "mnist-5k", "--estimator", "oracle"), "--estimator"),
        (("training", "mnist-5k", "--method", "never"), "--method"),
        *(
            (
                ("training", "mnist-5k", "--estimator", each, "--method", method, "--noise-share", 0.5),
                "--noise-share",
            )
            for each, method in (("network", "repeated"), ("head", "repeated"), ("dpsgd", "one-run"))
        ),
    ],
)
def test_wrong_words_are_refused_with_a_sentence(arguments, words):
    with pytest.raises(InvalidInput, match=words):
        run(*arguments)


def test_less_noise_can_only_be_audited_where_it_is_drawn():
    with pytest.raises(InvalidInput, match="--noise-share"):
        run("training", "mnist-5k", "--estimator", "network", "--noise-share", 0.5)

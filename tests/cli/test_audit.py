"""`quietmax audit`: each command prints one JSON document or a table."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from quietmax import HeadSettings, PrivateHead
from quietmax.audit import training
from quietmax.estimators.serialization import save_private
from quietmax.models.features import RandomFourier
from tests.cli.conftest import document, printed, run


@pytest.mark.parametrize(
    ("options", "verdict"),
    [
        ("algorithm1 --classes 10 --epsilon 1", "refuted"),
        ("algorithm1 --classes 2 --noise gaussian", "consistent"),
        ("sampled-neuron --classes 2", "consistent"),
        ("sampled-neuron --classes 2 --noise-share 0.5", "refuted"),
        ("noisy-max --noise permute-and-flip", "consistent"),
        ("noisy-max --noise gaussian --epsilon 8", "consistent"),
        ("noisy-max --noise gaussian --epsilon 8 --noise-share 0.5", "refuted"),
        ("gaussian --classes 3 --epsilon 8 --exact", "consistent"),
    ],
)
def test_every_mechanism_can_be_audited(options: str, verdict: str) -> None:
    """At the default confidence a true claim is called refuted once in a million."""
    words = ("audit", "mechanism", "--mechanism", *options.split(), "--samples", 20000, "--no-self-test")
    assert document(*words)["verdict"] == verdict


def test_the_table_shows_the_event_with_its_brackets() -> None:
    options = ("--mechanism", "sampled-neuron", "--classes", 2, "--samples", 4000)
    shown = printed("audit", "mechanism", *options)
    assert "Audit of sampled-neuron with 2 classes" in shown
    assert "p[0]" in shown or "p[1]" in shown
    assert "not a proof" in shown


def test_empirical_sensitivity_is_compared_with_the_published_bounds() -> None:
    options = ("mnist-5k", "--records", 200, "--removals", 3, "--epochs", 5, "--queries", 20)
    report = document("audit", "sensitivity", *options)
    assert [removal["kind"] for removal in report["removals"]] == ["mislabelled", "extreme", "ordinary"]
    assert [check["quantity"] for check in report["bounds"]] == ["weight", "weights_l2", "logit"]
    assert report["verdict"] in ("refuted", "consistent")
    for check in report["bounds"]:
        assert (check["verdict"] == "refuted") == (check["empirical"] > check["bound"])
        assert check["empirical"] == report[check["quantity"]]
    assert report["records"] == 200
    assert report["queries"] == 23
    shown = printed("audit", "sensitivity", *options)
    assert "Comparison with the paper's bounds" in shown


def test_the_example_of_the_page_exceeds_the_published_bounds() -> None:
    """docs/audit.md, "Empirical sensitivity", says so of this command."""
    options = ("mnist-5k", "--records", 2000, "--epochs", 10, "--removals", 2)
    report = document("audit", "sensitivity", *options)
    checks = {check["quantity"]: check for check in report["bounds"]}
    assert [checks[name]["verdict"] for name in ("weight", "logit")] == ["refuted", "refuted"]
    assert checks["logit"]["empirical"] > 3 * checks["logit"]["bound"]
    assert checks["logit"]["bound"] == pytest.approx(1.79, abs=0.005)


@pytest.fixture
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that are trained in five steps, with the same guarantee."""
    head = partial(PrivateHead, settings=HeadSettings(steps=5))
    monkeypatch.setitem(training._TRAINED, "head", head)


def test_stability_is_measured_with_and_without_noise() -> None:
    options = ("mnist-5k", "--records", 60, "--removed", 3, "--epochs", 3, "--draws", 2)
    report = document("audit", "stability", *options, "--noise", 0.01, "--noise", 0.1)
    assert [each["noise"] for each in report["noisy"]] == [0.01, 0.1]
    assert report["bound"] > 0
    shown = printed("audit", "stability", *options, "--noise", 0.1)
    assert "noise 0.1" in shown


def test_the_worst_case_prints_whether_half_the_noise_would_be_noticed() -> None:
    options = ("training", "worst-case", "--estimator", "teachers", "--queries", 4)
    shown = " ".join(printed("audit", *options).split())
    assert "This audit would notice half the noise: with it, epsilon is at least 1." in shown
    assert "self_test" not in shown
    report = document("audit", *options, "--times", 2000)
    assert report["self_test"]["notices"] == (report["self_test"]["power"] >= 0.9)
    assert [each["noise_share"] for each in report["further_self_tests"]] == [0.75]
    assert "notice three quarters of the noise" in shown
    assert document("audit", *options, "--noise-share", 0.5)["verdict"] == "refuted"
    assert document("audit", *options, "--no-self-test")["self_test"] is None


def test_a_mechanism_is_audited_with_a_self_test_unless_it_is_refuted() -> None:
    options = ("mechanism", "--mechanism", "noisy-max", "--classes", 2, "--samples", 20000)
    assert document("audit", *options)["self_test"]["notices"] is True
    few = ("mechanism", "--mechanism", "noisy-max", "--classes", 2, "--samples", 1000)
    assert document("audit", *few)["self_test"]["notices"] is False
    assert document("audit", "mechanism", "--samples", 4000)["self_test"] is None


@pytest.fixture
def fourier_head() -> Path:
    records = np.random.default_rng(0).random((80, 5), np.float32)
    fitted = PrivateHead(features=RandomFourier(count=8), classes=(0, 1), declared_size=80)
    return save_private(fitted.fit(records, np.arange(80) % 2), Path("head"), dataset="people")


def test_the_invariant_of_a_model_is_printed_as_a_table_or_json(fourier_head: Path) -> None:
    code, out, err = run("audit", "invariant", fourier_head, "--records", 40)
    assert (code, err) == (0, "")
    assert "features" in out
    assert "consistent" in out
    report = document("audit", "invariant", fourier_head, "--records", 40)
    assert (report["verdict"], report["records"], report["model"]) == ("consistent", 40, str(fourier_head))


def test_a_broken_invariant_exits_with_1(fourier_head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    correct = RandomFourier._features
    monkeypatch.setattr(
        RandomFourier, "_features", lambda self, records: correct(self, records - records.mean(axis=0))
    )
    code, out, err = run("audit", "invariant", fourier_head, "--json")
    assert code == 1
    assert json.loads(out)["verdict"] == "refuted"
    assert " ".join(err.split()).startswith("quietmax: The invariant is broken on this machine: features of ")


@pytest.fixture(scope="module")
def visits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 persons with two or three rows in the unit square, with a schema beside the table."""
    path = tmp_path_factory.mktemp("visits") / "visits.csv"
    generator = np.random.default_rng(0)
    persons = np.repeat(np.arange(120), np.arange(120) % 2 + 2)
    points = generator.random((len(persons), 2))
    rows = [f"p{who},{a:.4f},{b:.4f},{int(a > b)}" for who, (a, b) in zip(persons, points, strict=True)]
    path.write_text("who,a,b,more\n" + "\n".join(rows) + "\n")
    path.with_suffix(".toml").write_text(
        'label = "more"\nclasses = ["0", "1"]\nperson = "who"\n[bounds]\na = [0, 1]\nb = [0, 1]\n'
    )
    return path


@pytest.mark.usefixtures("_few_steps")
@pytest.mark.parametrize("estimator", ["head", "head-query", "teachers", "dpsgd"])
def test_every_estimator_keeps_its_claim_with_persons_as_canaries_and_is_audited_with_less_noise(
    visits: Path, estimator: str
) -> None:
    options = ("--estimator", estimator, "--holdout", 0.4, "--canaries", 30, "--no-self-test")
    report = document("audit", "training", visits, *options)
    assert (report["unit"], report["verdict"], report["samples"]) == ("person", "consistent", 30)
    assert report["epsilon_claimed"] == pytest.approx(1.0, rel=1e-6)
    assert "claimed_for" not in report
    less = document("audit", "training", visits, *options, "--noise-share", 0.5)
    assert (less["epsilon_claimed"], less["self_test"]) == (report["epsilon_claimed"], None)


def test_sensitivity_of_an_own_table_is_that_of_whole_persons(visits: Path) -> None:
    report = document("audit", "sensitivity", visits, "--removals", 3, "--epochs", 2)
    assert report["unit"] == "person"
    assert {len(removal["rows"]) for removal in report["removals"]} <= {2, 3}
    assert report["records"] == 300
    assert "Removing one person of visits" in printed(
        "audit", "sensitivity", visits, "--removals", 2, "--epochs", 1
    )

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quietmax.attacks import Endpoint
from quietmax.attacks.builtin import registered_attacks
from quietmax.cli import load_command
from quietmax.data import Split, load
from quietmax.errors import QuietmaxError
from quietmax.models import CrossEntropy, TrainingSettings, save_model, train
from quietmax.privacy_card import leakage_file
from tests.cli.conftest import document, printed, run


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of 300 records with random labels, which a network can only memorise."""
    generator = np.random.default_rng(5)
    path = tmp_path_factory.mktemp("data") / "tosses.npz"
    features = generator.integers(0, 2, (300, 30)).astype(np.uint8)
    np.savez(path, features=features, labels=generator.integers(0, 3, 300))
    path.with_suffix(".toml").write_text(SCHEMA)
    return path


SCHEMA = 'label = "labels"\nclasses = ["0", "1", "2"]\nbounds = { "*" = [0, 1] }\n'
HALF = ("--holdout", "0.5")


@pytest.fixture(scope="module")
def data(table: Path) -> Split:
    return load(table, holdout=0.5, seed=3)


@pytest.fixture(scope="module")
def folder(data: Split, tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = TrainingSettings(
        hidden=(16,), loss=CrossEntropy(), learning_rate=0.02, epochs=60, batch_size=20
    )
    return save_model(train(data, settings=settings), tmp_path_factory.mktemp("models") / "model")


def refused(complaint: str, *arguments: object) -> None:
    code, out, err = run("attack", *arguments)
    assert (code in (1, 2), out) == (True, "")
    assert re.search(complaint, err), err


def test_a_saved_model_is_attacked_with_several_attacks_and_plotted(
    folder: Path, table: Path, data: Split
) -> None:
    plot = Path("roc.png")
    attacks = ("--attack", "threshold", "--attack", "lira", "--attack", "rmia-offline")
    values = document("attack", folder, "--data", table, *HALF, *attacks, "--shadows", 8, "--plot", plot)
    assert [report["attack"] for report in values["reports"]] == ["threshold", "lira", "rmia-offline"]
    assert {report["settings"]["pool"] for report in values["reports"]} == {"overlapping"}
    assert values["reports"][1]["auc"]["value"] > 0.9
    assert {report["queries"] for report in values["reports"]} == {300}
    assert values["records"] == len(data.train)
    assert values["unit"] == "record"
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_card_lists_every_variant_of_an_attack(folder: Path, table: Path) -> None:
    names = ["threshold", "threshold-entropy", "lira", "lira-offline"]
    attacks = [part for name in names for part in ("--attack", name)]
    out = printed("attack", folder, "--data", table, *HALF, *attacks, "--shadows", 4)
    assert leakage_file(folder).name in "".join(out.split())  # the command says where they are stored
    assert leakage_file(folder).stat().st_mode & 0o777 == 0o600
    kept = [entry["attack"] for entry in json.loads(leakage_file(folder).read_text())["attacks"]]
    assert set(names) <= set(kept)


@pytest.mark.parametrize("name", ["missing/roc.png", "roc.sculpture", "roc", "."])
def test_a_plot_that_cannot_be_written_is_an_error_before_the_target_is_queried(
    folder: Path, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("quietmax.attacks.base.run_together", lambda *_, **__: pytest.fail("queried"))
    refused("The figure cannot be written to", folder, "--data", table, *HALF, "--plot", tmp_path / name)


def test_a_plot_that_fails_does_not_lose_the_reports(
    folder: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise QuietmaxError("The disk is full.")

    monkeypatch.setattr("quietmax.attacks.metrics.plot_reports", fails)
    leakage_file(folder).unlink(missing_ok=True)
    arguments = ("--data", table, *HALF, "--attack", "threshold", "--shadows", 2, "--json")
    code, out, err = run("attack", folder, *arguments, "--plot", "roc.png")
    assert (code, err) == (1, "quietmax: The disk is full.\n")
    assert json.loads(out)["reports"][0]["attack"] == "threshold"
    assert json.loads(leakage_file(folder).read_text())["attacks"][0]["attack"] == "threshold"


def test_shadow_is_the_default_attack_and_prints_a_table(folder: Path, table: Path, data: Split) -> None:
    out = printed("attack", folder, "--data", table, *HALF, "--shadows", 3)
    assert f"shadow against plain model: {len(data.train)} members" in out
    for word in ("leakage", "AUC", "TPR at 0.1% FPR", "95% interval", "Clopper-Pearson"):
        assert word in out


def test_algorithm_1_is_attacked_at_an_epsilon_per_answer(folder: Path, table: Path) -> None:
    attack = ("attack", folder, "--data", table, *HALF, "--attack", "threshold", "--shadows", 4)
    plain = document(*attack)["reports"][0]
    noisy = document(*attack, "--mechanism", "algorithm1-laplace", "--epsilon", 0.1)
    report = noisy["reports"][0]
    assert noisy["epsilon_per_answer"] == 0.1
    assert report["target"] == "algorithm1"
    assert report["spent"]["epsilon"] == pytest.approx(0.1 * 300)
    assert report["auc"]["value"] < plain["auc"]["value"]


def test_the_account_of_a_private_model_is_charged(data: Split, table: Path) -> None:
    from quietmax.estimators import Teachers, save_private

    crowd = Teachers(1.0, 1e-5, queries=500, teachers=5, declared_size=150).fit(data.train)
    folder = save_private(crowd, Path("private"), dataset="tosses")
    attack = ("attack", folder, "--data", table, "--attack", "threshold", "--shadows", 2)
    (report,) = document(*attack)["reports"]
    assert report["released"] == "labels"
    assert (report["members"], report["nonmembers"]) == (len(data.train), len(data.test))
    assert report["queries"] == 300
    assert report["spent"]["measure"] in ("pure", "gaussian")


def test_a_server_is_queried_instead_of_the_model_with_the_key_from_the_environment(
    folder: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server always says class 0, so it is right for as many members as non-members, give or take."""
    keys: set[str | None] = set()

    def send(self: Endpoint, _url: str, body: bytes | None = None) -> Any:
        keys.add(self.key)
        if body is None:
            return {"inputs": [{"name": "rows"}]}
        count = json.loads(body)["inputs"][0]["shape"][0]
        return {"outputs": [{"shape": [count], "datatype": "INT64", "data": [0] * count}]}

    monkeypatch.setattr(Endpoint, "_send", send)
    monkeypatch.setenv("QUIETMAX_KEY", "opensesame")
    url = "http://127.0.0.1:9/v2/models/tosses"
    attack = ("attack", folder, "--data", table, *HALF, "--attack", "threshold", "--shadows", 2)
    (report,) = document(*attack, "--target", url)["reports"]
    assert keys == {"opensesame"}
    assert (report["target"], report["released"]) == (url, "labels")
    assert abs(report["auc"]["value"] - 0.5) < 0.2


def test_the_table_of_the_training_and_its_declarations_are_required(folder: Path, table: Path) -> None:
    refused("--data with its file", folder)
    wider = Path("wider.toml")
    wider.write_text(SCHEMA.replace("[0, 1]", "[0, 2]"))
    refused("encoded differently", folder, "--data", table, *HALF, "--schema", wider)


def test_the_holdout_must_be_that_of_the_training(folder: Path, table: Path, data: Split) -> None:
    from quietmax.estimators import PrivateHead, save_private

    refused(r"--holdout 0\.2 leaves .* must be as in training", folder, "--data", table, "--holdout", 0.2)
    held_out = save_private(PrivateHead(declared_size=150).fit(data.train), Path("a"), dataset="tosses")
    refused(r"--holdout must be 0\.5 as in the training", held_out, "--data", table, "--holdout", 0.2)
    everybody = load(table).train
    whole = save_private(PrivateHead(declared_size=300).fit(everybody), Path("b"), dataset="tosses")
    refused("trained on everybody", whole, "--data", table, "--holdout", 0.2)
    refused("requires people who were not trained on", whole, "--data", table)


def people(path: Path, persons: int, start: int, seed: int) -> Path:
    """Persons with two rows each and random labels."""
    generator = np.random.default_rng(seed)
    lines = ["who,ill," + ",".join(f"x{number}" for number in range(20))]
    for row in range(2 * persons):
        values = ",".join(str(value) for value in generator.integers(0, 2, 20))
        lines.append(f"p{start + row // 2},{['no', 'yes'][generator.integers(2)]},{values}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_other_people_serve_as_shadow_data_and_as_nonmembers_and_persons_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The schema beside the attacked table describes the other table too; its rows are whole persons."""
    table, others = people(Path("people.csv"), 40, 0, 1), people(Path("others.csv"), 90, 500, 2)
    bounds = "".join(f"x{number} = [0, 1]\n" for number in range(20))
    table.with_suffix(".toml").write_text(
        f'label = "ill"\nclasses = ["no", "yes"]\nperson = "who"\n[bounds]\n{bounds}'
    )
    settings = TrainingSettings((16,), loss=CrossEntropy(), learning_rate=0.02, epochs=60, batch_size=20)
    monkeypatch.setattr("quietmax.models.stacked.TrainingSettings", lambda loss: settings)  # noqa: ARG005
    values = document(
        "attack", table, "--shadow-data", others, "--attack", "shadow", "--attack", "lira", "--shadows", 8
    )
    assert values["unit"] == "person"
    shadow, lira = values["reports"]
    assert {shadow["members"], lira["members"]} == {40}
    assert 25 < shadow["nonmembers"] < 65  # 90 fair coins; more than four standard deviations on either side
    assert (shadow["settings"]["pool"], lira["settings"]["pool"]) == ("disjoint", "overlapping")
    assert shadow["auc"]["low"] > 0.6
    assert lira["auc"]["low"] > 0.6
    refused("must hold other people", table, "--shadow-data", table)
    refused("can only be combined with your own table", "mnist-5k", "--shadow-data", others, "--records", 50)


def test_the_help_names_every_built_in_attack() -> None:
    option = next(each for each in load_command("attack").params if each.name == "attack")
    named = option.help.partition(", or the name")[0].split(", ")
    assert named == list(registered_attacks())

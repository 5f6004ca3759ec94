from __future__ import annotations

import json
import re
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from quietmax.cli import train as commands
from quietmax.cli._output import errors
from quietmax.data.records import Records
from quietmax.data.registry import load
from quietmax.estimators.dpsgd.estimator import DPSGD
from quietmax.estimators.dpsgd.training import DPSGDSettings
from quietmax.estimators.head import estimator as head_module
from quietmax.estimators.head.estimator import PrivateHead
from quietmax.estimators.serialization import open_private
from quietmax.estimators.teachers import Teachers
from quietmax.models.features import Encoder
from quietmax.models.stacked import TrainingSettings
from tests.cli.conftest import assert_error, document, printed, run
from tests.cli.own_table import DECLARED, SCHEMA, add_persons
from tests.estimators.growing import MONTHS, visits
from tests.estimators.growing import SCHEMA as GROWING
from tests.models.features.onnx_files import PUBLIC_OUTPUT, PUBLIC_SHA256, public_file

SMALL = ("mnist-5k", "--records", 300, "--epochs", 1)
DECLARED_SIZE = ("--declared-size", 1000)


@pytest.mark.parametrize(
    ("group", "target"),
    [
        (commands.NetworkOptions, TrainingSettings),
        (commands.HeadOptions, PrivateHead),
        (commands.TeachersOptions, Teachers),
        (commands.DPSGDOptions, DPSGD),
    ],
)
def test_options_are_arguments_of_what_is_trained_and_their_help_states_its_defaults(
    group: Any, target: Any
) -> None:
    arguments = {**signature(target).parameters}
    if target is DPSGD:
        arguments |= signature(DPSGDSettings).parameters
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        default = arguments[field.name].default
        stated = re.search(r"Default: ([\w.-]+)\.$", hints[field.name].__metadata__[0])
        if stated is not None:
            expected = default[0] if field.name == "hidden" else default
            assert stated[1] == str(expected), field.name


# Ordinary networks


def test_a_model_is_written_once_unless_overwrite_is_given(tmp_path: Path) -> None:
    folder = Path("model")
    train = ("train", "network", *SMALL, "--output", folder)
    out = printed(*train)
    assert "test accuracy" in out
    assert "Do not publish" in out
    before = (folder / "weights.safetensors").read_bytes()
    assert_error(run(*train), 2, "already exists", "--overwrite")
    assert (folder / "weights.safetensors").read_bytes() == before
    assert run(*train, "--overwrite", "--alpha", 0)[0] == 0
    assert json.loads((folder / "model.json").read_text())["settings"]["loss"] == {"name": "cross-entropy"}
    (other := Path("other")).mkdir()
    assert_error(run("train", "network", *SMALL, "--overwrite", "--output", other), 2, "other")
    assert list(other.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "other"]


def test_a_network_has_the_settings_of_the_options_and_a_report_that_must_not_be_published() -> None:
    options = ("--hidden", 5, "--hidden", 4)
    more = ("--alpha", 2, "--learning-rate", 0.01, "--epochs", 2)
    result = document("train", "network", *SMALL[:3], *options, *more, "-o", "model")
    assert {"records", "train_accuracy", "test_accuracy"} <= set(result["not_for_publication"])
    settings = json.loads(Path("model/model.json").read_text())["settings"]
    loss = settings.pop("loss")
    assert settings == {
        "hidden": [5, 4], "activation": "tanh", "l2": 0.001, "batch_size": 100, "learning_rate": 0.01, "epochs": 2,
    }  # fmt: skip
    assert loss["alpha"] == 2


# Private models


def test_a_table_may_have_unit_norm_features(people: Path) -> None:
    printed("train", "head", people, *DECLARED, *DECLARED_SIZE, "--features", "unit-norm", "-o", "unit")
    assert json.loads(Path("unit/model.json").read_text())["features"]["kind"] == "unit-norm"


def _numbers(text: str) -> set[str]:
    """All numbers but those inside random ids and digests, which hold any digits."""
    return set(re.findall(r"[0-9.]+", re.sub(r"\b[0-9a-f]{16,}\b", "", text.replace(",", ""))))


@pytest.mark.parametrize("name", ["head", "teachers", "dpsgd"])
def test_the_true_number_of_rows_and_persons_appears_nowhere_if_one_is_declared(
    people: Path, name: str
) -> None:
    add_persons(people)
    training = load(people, schema=SCHEMA, person="id", holdout=0.2).train
    true = {str(len(training)), str(len(set(training.persons))), "1200"}
    folder = Path("model")
    queries = ("--queries", 1) if name == "teachers" else ()
    options = ("--person", "id", "--holdout", 0.2, "--declared-size", 5000, "--epsilon", 4)
    train = ("train", name, people, *DECLARED, *queries, *options)
    shown = [run(*train, "-o", folder, "--json"), run(*train)]
    shown += [run("card", folder), run("card", folder, "--json")]
    assert [code for code, _, _ in shown] == [0, 0, 0, 0]
    result = json.loads(shown[0][1])
    assert (result["unit"], result["size"], result["size_from"]) == ("person", 5000, "declared")
    assert (result["guarantee"]["unit"], result["guarantee"]["status"]) == ("person", "proven")
    assert "for one person" in " ".join(shown[2][1].replace("│", " ").split())
    assert "5,000 persons (declared)" in shown[1][1]
    assert not true & _numbers("".join(out + err for _, out, err in shown))
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            assert not true & _numbers(file.read_text())


def test_a_head_without_declared_size_shows_the_noisy_count_that_it_paid_for(
    people: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_module, "_released_size", lambda *_: 4321.7)
    folder = Path("model")
    result = document("train", "head", people, *DECLARED, "-o", folder)
    assert (result["unit"], result["size"], result["size_from"]) == ("record", 4322, "noisy count")
    assert result["not_for_publication"] == ["seconds"]
    out = printed("card", folder)
    assert "noisy number of records" in " ".join(out.split())
    assert "declared number of records" not in " ".join(out.split())


def test_too_few_people_for_the_budget_are_told_from_the_released_or_declared_size_alone(
    people: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warnings(*options: object, name: str = "head") -> list[str]:
        found: list[str] = document("train", name, people, *DECLARED, *options)["warnings"]
        return found

    (few,) = warnings("--declared-size", 30)
    assert few.startswith("Too few records for this epsilon: the noise outweighs them")
    assert "More than 187 records, a larger --epsilon would help" in few
    assert warnings("--declared-size", 188) == []
    assert warnings("--declared-size", 30, "--epsilon", 20) == []
    monkeypatch.setattr(head_module, "_released_size", lambda *_: 1.0)
    assert warnings() == [few]
    assert few in " ".join(printed("train", "head", people, *DECLARED).split())
    (votes,) = warnings("--declared-size", 188, "--queries", 2, name="teachers")
    assert "a larger --epsilon or fewer --queries would help" in votes
    add_persons(people)
    (persons,) = warnings("--declared-size", 30, "--person", "id")
    assert persons.startswith("Too few people")


@pytest.mark.parametrize(
    ("name", "options"), [("teachers", ("--queries", 2)), ("dpsgd", ("--steps", 2, "--hidden", 2))]
)
def test_a_size_that_was_not_declared_is_named_with_its_flag_by_train_and_serve(
    people: Path, name: str, options: tuple[object, ...]
) -> None:
    folder = Path("model")
    out = printed("train", name, people, *DECLARED, *options, "--epsilon", 8, "-o", folder)
    assert "'quietmax serve' refuses the model" in out
    assert "train with --declared-size" in out
    served = run("serve", folder, "--ledger", "ledger.sqlite")
    assert_error(served, 2, "is conditional, not proven", "--declared-size", "--accept-unproven")
    result = document("train", name, people, *DECLARED, *options, "--epsilon", 8, *DECLARED_SIZE)
    assert (result["warnings"], result["guarantee"]["status"]) == ([], "proven")


def test_everybody_is_trained_on_unless_a_holdout_is_asked_for(
    people: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained_on: list[int] = []
    fit = PrivateHead.fit

    def counted(self: PrivateHead, records: Records) -> PrivateHead:
        trained_on.append(len(records))
        return fit(self, records)

    monkeypatch.setattr(PrivateHead, "fit", counted)
    train = ("train", "head", people, *DECLARED, *DECLARED_SIZE)
    result = document(*train)
    assert (trained_on.pop(), result["test_accuracy"], result["holdout"]) == (1200, None, 0)
    held_out = ("--holdout", 0.25, "--seed", 3)
    result = json.loads(run(*train, *held_out, "--json", "-o", "first")[1])
    assert result["holdout"] == 0.25
    assert result["not_for_publication"] == ["test_accuracy", "seconds"]
    # 2 sexes times 72 ages: rows of equal features stay together, so the share is that of 144 groups.
    assert 0.5 < trained_on.pop() / 1200 < 0.95
    assert json.loads(Path("first/model.json").read_text())["holdout"] == {
        "share": 0.25,
        "seed": 3,
    }
    assert f"quietmax evaluate second --data {people}" in printed(*train, *held_out, "-o", "second")


def test_an_interrupted_training_leaves_the_folder_as_it_was(
    people: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = ("train", "head", people, *DECLARED, *DECLARED_SIZE, "-o", "model", "--overwrite")
    assert run(*train)[0] == 0
    before = {path.name: path.read_bytes() for path in Path("model").iterdir()}
    names = sorted(path.name for path in tmp_path.iterdir())
    rename = Path.rename

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def interrupted_second_rename(path: Path, target: Path) -> Path:
        if target == Path("model") and not path.name.endswith("-replaced"):
            raise KeyboardInterrupt
        return rename(path, target)

    for place, replacement in (
        ("quietmax.estimators.head.estimator.PrivateHead.fit", interrupted),
        ("quietmax.models.serialization.safetensors.torch.save", interrupted),
        ("quietmax.models.serialization.os.fsync", interrupted),
        ("pathlib.Path.rename", interrupted_second_rename),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(place, replacement)
            assert run(*train) == (130, "", "quietmax: Interrupted.\n"), place
        assert {path.name: path.read_bytes() for path in Path("model").iterdir()} == before, place
        assert sorted(path.name for path in tmp_path.iterdir()) == names, place


def test_dpsgd_trains_a_network_that_is_queried_served_and_attacked(people: Path, queries: Path) -> None:
    folder = Path("network")
    options = ("--epsilon", 200, "--declared-size", 600, "--sampling-rate", 0.5, "--steps", 60, "-o", folder)
    more = ("--learning-rate", 16, "--holdout", 0.4, "--json")
    result = document("train", "dpsgd", people, *DECLARED, *options, *more)
    # The larger class has 0.54; in 30 trainings, each with its own noise, 0.978 was the least.
    assert result["test_accuracy"] > 0.7
    assert result["queries"] == "any number"
    assert result["delta"] == pytest.approx(1 / 6000)
    facts = result["guarantee"]["parameters"]
    assert (facts["accountant"], facts["analysis"], facts["steps"]) == ("pld", "proven", 60)
    assert (result["guarantee"]["status"], result["guarantee"]["epsilon"]) == ("proven", 200.0)
    answers = document("predict", "--model", folder, "--input", queries)
    assert (answers["labels"], answers["remaining"]["queries"]) == (["lo", "hi"], None)
    assert document("card", folder)["guarantee"]["status"] == "proven"
    attack = ("attack", folder, "--data", people, *DECLARED, "--attack", "threshold", "--shadows", 2)
    assert document(*attack)["reports"][0]["attack"] == "threshold"
    assert_error(run(*attack, "--mechanism", "algorithm1", "--epsilon", 1), 2, "--mechanism")


def test_full_batches_and_the_published_analysis_are_saved_with_their_own_guarantees(people: Path) -> None:
    train = ("train", "dpsgd", people, *DECLARED, "--epsilon", 8, "--declared-size", 600, "--json")
    full = document(*train, "--sampling-rate", 1, "-o", "full")
    assert full["guarantee"]["definition"] == "gaussian"
    assert run("card", "full")[0] == 0
    paper = ("--preset", "paper", "--analysis", "published", "--accountant", "zcdp", "--hidden", 4)
    result = document(*train, *paper, "-o", "paper")
    assert result["guarantee"]["status"] == "conditional"
    facts = result["guarantee"]["parameters"]
    assert (facts["learning_rate"], facts["max_grad_norm"], facts["steps"]) == (0.001, 1.0, 600)
    assert "conditional" in printed("card", "paper")


# Encoders from files


ENCODER = f"""
path = "{public_file()}"
sha256 = "{PUBLIC_SHA256}"
output = "{PUBLIC_OUTPUT}"
input_shape = [3, 48, 48]
mean = 0.5
std = [0.5, 0.5, 0.25]
"""


@pytest.mark.parametrize(
    "kind", [("head",), ("teachers", "--queries", 4, "--teachers", 2), ("dpsgd", "--steps", 1)]
)
def test_an_encoder_file_is_the_feature_map_and_is_named_in_the_guarantee(kind: tuple[object, ...]) -> None:
    folder, encoder = Path("model"), Path("encoder.toml")
    encoder.write_text(ENCODER)
    data = ("mnist-5k", "--records", 60, "--declared-size", 60, "--features", encoder)
    guarantee = document("train", *kind, *data, "--output", folder)["guarantee"]
    assert guarantee["status"] == "proven"
    assert sum(PUBLIC_SHA256 in each for each in guarantee["assumptions"]) == 1
    features = open_private(folder).features
    assert isinstance(features, Encoder)
    assert (features.image_shape, features.input_shape) == ((1, 28, 28), (3, 48, 48))
    assert (features.mean, features.std) == (0.5, (0.5, 0.5, 0.25))


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (f'path = "{public_file()}"', 2, PUBLIC_SHA256),
        (f'path = "{public_file()}"\nsha256 = "ab"', 1, "but ab was expected"),
        ('path = "net.onnx"\nsha256 = "ab"', 1, "cannot be read: No such file"),
        ("pool = true", 1, "must have the path of the network"),
        ('paht = "net.onnx"', 2, "did you mean 'path'"),
        (ENCODER + "pooll = true", 2, "did you mean 'pool'"),
        ("path", 1, "is not a TOML file"),
        (None, 1, "Cannot read"),
    ],
)
def test_a_wrong_encoder_is_an_error_before_anything_is_trained(
    content: str | None, code: int, words: str
) -> None:
    if content is not None:
        Path("encoder.toml").write_text(content)
    train = ("train", "head", "mnist-5k", "--records", 60, "--features", "encoder.toml")
    assert_error(run(*train), code, words)


def test_inferring_asks_about_a_column_that_may_be_the_person(
    people: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_width", 500)
    add_persons(people, "patient_id")
    train = ("train", "head", people, "--label", "income", "--infer", "--declared-size", 300, "--json")
    code, out, err = run(*train)
    assert (code, err) == (
        0,
        "'patient_id': the name says that this may tell whose row a row is, but no --person column is named. The "
        "guarantee is for one record, so a person with several rows is protected less. If one person can have several "
        "rows, name the column: --person patient_id.\n",
    )
    guarantee = json.loads(out)["guarantee"]
    assert (guarantee["unit"], guarantee["status"]) == ("record", "conditional")
    assert any("age" in assumption for assumption in guarantee["assumptions"])
    code, out, err = run(*train, "--person", "patient_id")
    assert (code, err, json.loads(out)["guarantee"]["unit"]) == (0, "", "person")


def test_inferring_with_a_draft_asks_about_the_person_too(people: Path) -> None:
    header, *rows = people.read_text().splitlines()
    people.write_text("\n".join([f"id,{header}", *(f"{number},{row}" for number, row in enumerate(rows))]))
    people.with_suffix(".toml").write_text(printed("schema", "draft", people, "--label", "income"))
    train = ("train", "head", people, "--infer", *DECLARED_SIZE, "--json")
    assert "'id': the name says that this may tell whose row" in run(*train)[2]
    schema = people.with_suffix(".toml")
    schema.write_text(re.sub(r"(?m)^\[confirm\.ignore\]\nid = .*\n", "", schema.read_text()))
    assert run(*train)[2] == "", "the owner has said that it is no feature"


# Series


def growing(folder: Path) -> Path:
    """A table that grows, with its schema beside it."""
    visits().to_csv(folder / "visits.csv", index=False)
    (folder / "visits.toml").write_text(GROWING.to_toml(), "utf-8")
    return folder / "visits.csv"


def test_a_series_is_trained_evaluated_and_shown_on_its_card(tmp_path: Path) -> None:
    table = growing(tmp_path)
    first, second = tmp_path / "first", tmp_path / "second"
    train = ("train", "head", table, "--epsilon", 4)
    shown = document(*train, "--cohort", MONTHS[0], "--holdout", 0.4, "-o", first)
    assert (shown["cohort"], shown["version"]) == (MONTHS[0], 1)
    document("evaluate", first, "--data", table)
    shown = document(*train, "--cohort", MONTHS[1], "--continue", first, "-o", second)
    assert (shown["cohort"], shown["version"], shown["holdout"]) == (MONTHS[1], 2, 0.4)
    assert shown["guarantee"]["mu"] == shown["guarantee"]["parameters"]["mu_version"]
    card = document("card", second)
    assert [each["cohort"] for each in card["series"]] == [*MONTHS[:2]]
    assert "accuracy" in card["series"][0]
    assert "earlier versions of its series" in card["in_words"][0]
    printed("card", second, "--html", tmp_path / "card.html")
    page = (tmp_path / "card.html").read_text("utf-8")
    assert "<h2>The series</h2>" in page
    assert "Published accuracy of each version" in page


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--cohort", "2026-13"), "There is no cohort '2026-13'"),
        (("--continue", "first"), "--continue requires --cohort"),
        (("--cohort", MONTHS[1], "--again"), "--again requires --continue"),
        (("--cohort", MONTHS[0], "--continue", "first"), "adds up for its people: --again allows it"),
        (("--cohort", MONTHS[1], "--continue", "nothing"), "nothing"),
        (("--cohort", "2026-11"), "Nobody is left to train on"),
        (("--forgotten", "nothing"), "The erasure list nothing cannot be read"),
    ],
)
def test_a_series_that_cannot_be_continued_is_an_error_that_writes_nothing(
    options: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = growing(tmp_path)
    if "first" in options:
        printed("train", "head", table, "--cohort", MONTHS[0], "-o", "first")
    result = run("train", "head", table, *options, "-o", "next")
    assert_error(result, result[0], message)
    assert result[0] in (1, 2)
    assert not Path("next").exists()

"""Files that were changed by hand and names that no file can have: one sentence and exit code 1, no traceback."""

from __future__ import annotations

import json
import shutil

import pytest

from quietmax.errors import DataUnavailable
from quietmax.privacy_card import leakage_file, read_card, record_leakage
from tests.cli.own_table import DECLARED

LONG = "x" * 300


@pytest.fixture
def head(run, people, tmp_path):
    """The folder of a private head."""
    folder = tmp_path / "head"
    code, _, _ = run(
        "train", people, *DECLARED, "--private", "head", "--declared-size", 480, "--epsilon", 4, "-o", folder
    )
    assert code == 0
    return folder


def _refused(told: tuple[int, str, str], expected: str) -> None:
    code, out, err = told
    assert (code, out) == (1, "")
    assert err.startswith("quietmax: ")
    assert expected in err
    assert err.count("\n") == 1


def _changed(folder, target, **changes):
    shutil.copytree(folder, target, dirs_exist_ok=True)
    path = target / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return target


def test_a_card_is_refused_if_a_value_of_the_model_is_of_a_wrong_kind(run, head, tmp_path):
    for name in ("delta", "declared_size", "queries"):
        for value in (-1, "x", [], {}, [None], True, float("inf")):
            _refused(
                run("card", _changed(head, tmp_path / "bad", **{name: value})),
                f"{name} is not a number",
            )
    guarantee = json.loads((head / "model.json").read_text())["guarantee"]
    for value in (
        -1, "x", [], {}, 1e308, [None], True, guarantee | {"status": "x"}, guarantee | {"definition": "x"},
        guarantee | {"mu": "x"}, guarantee | {"parameters": 3}, guarantee | {"assumptions": 3},
    ):  # fmt: skip
        _refused(run("card", _changed(head, tmp_path / "bad", guarantee=value)), "is damaged")


def test_a_card_is_refused_if_the_attacks_file_is_foreign(head):
    seen = {"value": 0.01, "low": -0.01, "high": 0.03}
    report = {"attack": "shadow", "released_by": "the model", "leakage": seen, "auc": seen, "members": 480}
    record_leakage(head, [report])
    assert len(read_card(head).leakage) == 1
    for content in (
        {"x": 1}, [{"attack": 1}], 3, None, "x", [3], [report], {"attacks": 3},
        *({"attacks": [entry]} for entry in (
            3, report | {"attack": 3}, report | {"leakage": {}}, report | {"auc": 3},
            report | {"leakage": seen | {"low": "x"}},
        )),
    ):  # fmt: skip
        leakage_file(head).write_text(json.dumps(content))
        with pytest.raises(DataUnavailable, match="delete it and run the attack again"):
            read_card(head)
        with pytest.raises(DataUnavailable, match="delete it and run the attack again"):
            record_leakage(head, [report])
    leakage_file(head).write_text("[" * 100_000)
    with pytest.raises(DataUnavailable, match="delete it and run the attack again"):
        read_card(head)


def test_a_private_model_changed_by_hand_is_refused_when_asked(run, head, tmp_path):
    asked = tmp_path / "asked.csv"
    asked.write_text("age,sex\n20,F\n")
    _refused(
        run("predict", "--model", _changed(head, tmp_path / "bad", features=None), "--input", asked),
        "is damaged",
    )


def test_names_that_no_file_can_have_are_refused(run, people, head, tmp_path):
    train = ("train", people, *DECLARED, "--private", "head", "--declared-size", 480)
    for command in (
        (*train, "-o", tmp_path / LONG),
        ("train", f"{LONG}.csv", *DECLARED),
        ("train", people, "--schema", tmp_path / f"{LONG}.json"),
        ("predict", "--model", LONG, "--input", people),
        ("predict", "--model", head, "--input", f"{LONG}.csv"),
        ("card", LONG),
        ("card", head, "--html", LONG),
        ("attack", LONG),
        ("serve", LONG),
        ("ledger", "status", "--ledger", LONG),
    ):
        code, _, err = run(*command)
        assert code == 1, command[0]
        assert err.startswith("quietmax: "), command[0]
        assert err.count("\n") == 1, command[0]


def test_the_longest_name_a_folder_can_have_is_written(run, people, tmp_path):
    folder = tmp_path / ("x" * 255)
    code, _, err = run("train", people, *DECLARED, "--private", "head", "--declared-size", 480, "-o", folder)
    assert (code, err) == (0, "")
    assert read_card(folder).status == "proven"


@pytest.mark.parametrize("problem", [PermissionError(13, "not allowed", "data"), OSError(28, "disk full")])
def test_a_refusal_of_the_system_is_one_sentence(run, monkeypatch, problem):
    def fail(_):
        raise problem

    monkeypatch.setattr("quietmax.cli.spread_lists", fail)
    _refused(run("datasets"), f"The system refused ({problem.strerror})")


def test_a_list_option_without_values_is_refused_and_not_taken_for_everything(run):
    _refused(run("reproduce", "accuracy-table", "--datasets"), "'--datasets' requires an argument")
    _refused(run("reproduce", "accuracy-table", "--datasets", "--json"), "no data set '--json'")


@pytest.mark.parametrize("name", ["deep.json", "deep.toml"])
def test_a_schema_that_is_nested_too_deeply_is_refused(run, people, tmp_path, name):
    schema = tmp_path / name
    schema.write_text(("a = " if name.endswith("toml") else "") + "[" * 100_000)
    _refused(run("train", people, "--schema", schema), "is nested too deeply")


def test_an_ordinary_model_answers_only_with_its_mechanism_and_a_budget(run, people, tmp_path):
    folder = tmp_path / "plain"
    assert run("train", people, *DECLARED, "--epochs", 1, "-o", folder)[0] == 0
    asked = ("predict", "--model", folder, "--input", people)
    _refused(run(*asked, "--mechanism", "gaussian", "--epsilon", 1), "choose algorithm1")
    _refused(run(*asked), "give --epsilon")


def test_a_private_model_is_not_attacked_through_another_mechanism(run, people, head):
    asked = ("attack", head, "--data", people, *DECLARED, "--mechanism", "algorithm1", "--epsilon", 1)
    _refused(run(*asked), "leave --mechanism out")


def test_less_noise_can_only_be_audited_where_it_is_drawn(run):
    asked = ("audit", "training", "mnist-5k", "--estimator", "network", "--noise-share", 0.5)
    _refused(run(*asked), "--noise-share belongs to")


def test_a_table_may_be_normalised_but_not_scattered(run, people, tmp_path):
    train = ("train", people, *DECLARED, "--private", "head", "--declared-size", 480)
    code, _, err = run(*train, "--features", "unit-norm", "-o", tmp_path / "unit")
    assert (code, err) == (0, "")
    assert json.loads((tmp_path / "unit" / "model.json").read_text())["features"]["kind"] == "unit-norm"
    _refused(run(*train, "--features", "scattering", "-o", tmp_path / "not"), "choose identity")
    assert not (tmp_path / "not").exists()

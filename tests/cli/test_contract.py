"""What holds of every command: one JSON document, exit codes, one sentence for an error, and nothing written by it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest

from quietmax.accounting import PureCost
from quietmax.ledger import Ledger, Terms
from tests.cli.conftest import Run, all_commands, assert_error
from tests.cli.own_table import DECLARED

SMALL = "mnist-5k --records 40"
PEOPLE = f"people.csv {' '.join(DECLARED)} --declared-size 1000"
ELSEWHERE = {
    *("demo", "serve", "compare", "reproduce run", "ledger accept-loss"),
}
"""Commands that run long or need more than a folder; the tests of their own modules run them with --json."""
# Arguments that work in the folder of the fixture; and arguments of which one value is wrong, with a word of the error.
CASES = {
    "datasets": ("", None),
    "schema draft": ("people.csv --label income", ("absent.csv", 1, "absent.csv")),
    "schema check": ("people.csv --schema people.json", ("absent.csv", 1, "absent.csv")),
    "train network": (f"{SMALL} --epochs 1", ("absent.csv --label y", 1, "absent.csv")),
    "train head": (PEOPLE, (f"{PEOPLE} --epsilon -1 -o out", 2, "--epsilon")),
    "train teachers": (f"{PEOPLE} --queries 2", (f"{PEOPLE} --queries 2 --delta 2 -o out", 2, "--delta")),
    "train dpsgd": (f"{PEOPLE} --steps 1", (f"{PEOPLE} --accountant moments -o out", 2, "--accountant")),
    "predict": ("--model head --input people.csv", ("--model absent --input people.csv", 1, "absent")),
    "evaluate": ("head --data people.csv --exact", ("head --data absent.csv --exact", 1, "absent.csv")),
    "sensitivity": ("--features 9 --classes 2 --records 9", ("--features 9", 2, "--classes")),
    "attack": (f"{SMALL} --attack threshold --shadows 2", ("absent", 2, "must be a model folder")),
    "audit mechanism": ("--samples 1000 --classes 2", ("--noise-share 0", 2, "--noise-share")),
    "audit sensitivity": (f"{SMALL} --removals 1 --epochs 0", ("absent.csv", 1, "absent.csv")),
    "audit training": (
        "worst-case --estimator teachers --times 64",
        (f"{SMALL} --estimator oracle", 2, "--estimator"),
    ),
    "audit stability": (f"{SMALL} --removed 2 --epochs 0", (f"{SMALL} --removed 41", 2, "--removed")),
    "audit invariant": ("head --records 4", ("absent", 1, "absent")),
    "card": ("head", ("absent", 1, "absent")),
    "export": ("head --onnx new.onnx", ("head", 2, "--onnx")),
    "ledger status": ("", ("--ledger absent.sqlite", 2, "absent.sqlite")),
    "ledger grant": (
        "people --epsilon 2 --because 'The board allowed it.'",
        ("people --because no", 2, "--epsilon"),
    ),
    "ledger revoke": (
        "people --because 'The study is over.'",
        ("nobody --because 'It is over.'", 2, "nobody"),
    ),
    "ledger export": ("", ("--account nobody -o log.jsonl", 2, "nobody")),
    "ledger verify": ("", ("--anchor people", 2, "--anchor")),
    "ledger prune": ("--days 30", ("--days 0", 2, "between 1/24 and 36500")),
    "ledger key create": ("ann", ("ann --role owner", 2, "--role must be")),
    "ledger key list": ("", ("--ledger absent.sqlite", 2, "absent.sqlite")),
    "ledger key revoke": ("KEY", ("0123456789abcdef", 2, "0123456789abcdef")),
    "reproduce report": ("--tables correlations bounds", ("--tables alpha --datasets mnits", 2, "mnits")),
}
SCHEMA = {
    "label": "income",
    "classes": ["lo", "hi"],
    "bounds": {"age": [18, 90]},
    "categories": {"sex": ["F", "M"]},
}
ALL = {" ".join(path): command for path, command in all_commands()}


@pytest.fixture
def folder(trained: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The current folder: a copy of `trained` with a schema, and a ledger with an account and a key elsewhere."""
    folder = Path(shutil.copytree(trained, tmp_path / "folder"))
    (folder / "people.json").write_text(json.dumps(SCHEMA))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("QUIETMAX_LEDGER", str(tmp_path / "ledger.sqlite"))
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.open_account("people", PureCost(1.0), Terms(1.0))
        monkeypatch.setenv("KEY", ledger.create_key("bob")[1].id)
    return folder


def test_every_command_is_tested_here_or_elsewhere() -> None:
    assert set(ALL) == {*CASES, *ELSEWHERE}


@pytest.mark.parametrize("name", CASES)
def test_json_is_one_document_and_nothing_else(run: Run, folder: Path, name: str) -> None:
    assert folder.is_dir()
    words = shlex.split(CASES[name][0].replace("KEY", os.environ["KEY"]))
    code, out, err = run(*name.split(), *words, "--json")
    assert code == 0, err
    json.loads(out)
    assert err == ""


@pytest.mark.parametrize("name", [name for name, (_, bad) in CASES.items() if bad])
def test_bad_input_is_one_sentence_and_writes_nothing(run: Run, folder: Path, name: str) -> None:
    bad = CASES[name][1]
    assert bad is not None
    before = sorted(folder.rglob("*"))
    assert_error(run(*name.split(), *shlex.split(bad[0])), bad[1], bad[2])
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("name", ALL)
def test_wrong_usage_exits_with_2_and_names_the_help(run: Run, name: str) -> None:
    assert_error(
        run(*name.split(), "--nonsense"), 2, "No such option: --nonsense", f"'quietmax {name} --help'"
    )
    assert "--json" in [option for each in ALL[name].params for option in each.opts]

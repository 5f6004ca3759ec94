"""What holds of every command: one JSON document, exit codes, one sentence for an error, and nothing written by it."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from quietmax.accounting import PureCost
from quietmax.cli.experiments import _MEASUREMENTS
from quietmax.ledger import Ledger, Terms
from tests.cli.conftest import all_commands, assert_error, run
from tests.cli.own_table import SCHEMA

SMALL = "mnist-5k --records 40"
PEOPLE = "people.csv --declared-size 1000"
ALL = {" ".join(path): command for path, command in all_commands()}
ELSEWHERE = {
    *("demo", "serve", "ask", "compare", "reproduce run", "ledger accept-loss", "forget"),
    *("ledger confirm", "ledger restore", "ledger erase-client"),
}
"""Commands that run long or need more than a folder; the tests of their own modules run them with --json."""
WORKING = {
    "datasets": "",
    "schema draft": "people.csv --label income",
    "schema check": "people.csv",
    "plan": "people.toml --people 40 --simulations 10",
    "train network": f"{SMALL} --epochs 1",
    "train head": PEOPLE,
    "train teachers": f"{PEOPLE} --queries 2",
    "train dpsgd": f"{PEOPLE} --steps 1",
    "predict": "--model head --input people.csv",
    "evaluate": "head --data people.csv --exact",
    "decide": "head --threshold hi=0.3",
    "explain": "head",
    "sensitivity": "--features 9 --classes 2 --records 9",
    "attack": f"{SMALL} --attack threshold --shadows 2",
    "audit mechanism": "--samples 1000 --classes 2",
    "audit sensitivity": f"{SMALL} --removals 1 --epochs 0",
    "audit training": "worst-case --estimator teachers --times 64",
    "audit stability": f"{SMALL} --removed 2 --epochs 0",
    "audit invariant": "head --records 4",
    "card": "head",
    "export": "head --onnx new.onnx",
    "bundle": "head",
    "witness": "witness.jsonl --model teachers",
    "ledger status": "",
    "ledger grant": "people --epsilon 2 --because 'The board allowed it.'",
    "ledger revoke": "people --because 'The study is over.'",
    "ledger export": "",
    "ledger verify": "",
    "ledger backup": "copy.sqlite",
    "ledger migrate": "--check",
    "ledger clients": "",
    "ledger prune": "--days 30",
    "ledger key create": "ann",
    "ledger key list": "",
    "ledger key revoke": "KEY",
    "reproduce report": "--tables correlations bounds",
}
WRONG = {
    1: {
        "ask http://127.0.0.1:9 people people.csv --key-file none.txt": "--key-file cannot be read",
        "predict --model absent --input people.csv": "absent",
        "ask http://127.0.0.1:9 people people.csv": "The service at 127.0.0.1:9 cannot be reached",
        "schema draft absent.csv": "absent.csv",
        "schema check absent.csv": "absent.csv",
        "schema check people.csv --schema absent.toml": "cannot be read",
        "plan absent.toml --people 40": "absent.toml",
        "train network absent.csv --label y": "absent.csv",
        f"train network {SMALL} --epochs 0 --output people.csv/model": "people.csv",
        "evaluate head --data absent.csv --exact": "absent.csv",
        "explain absent": "absent",
        "audit sensitivity absent.csv": "absent.csv",
        "audit invariant absent": "absent",
        "reproduce report --results people.csv": "not a table of trials: it has no column 'attacks'",
        "reproduce report --results none.csv": "cannot be read",
        "reproduce run --datasets purchase-2": "dataset_purchase",
        "reproduce run": "is present. 'quietmax datasets' lists",
        "card absent": "no model",
        "card head --html absent/card.html": "The page cannot be written",
        "export head --onnx /proc/none/a": "/proc/none/a",
        "export head --skops /proc/none/a": "/proc/none/a",
        "bundle absent": "no model",
        "bundle head --output /proc/none/a": "cannot be written",
        "witness people.csv --model teachers": "is not the file of a witness",
        "witness w.jsonl --export absent.jsonl": "Cannot read the audit log",
        "export head --mlflow /proc/none/a": "/proc/none/a",
        "export head --sql duckdb -o /proc/none/a": "/proc/none/a",
        "export head --html /proc/none/a": "/proc/none/a",
        **{f"reproduce run --tables {table}": "quietmax datasets" for table in _MEASUREMENTS},
    },
    2: {
        "trian": "No such command 'trian'. Did you mean 'train'? (see 'quietmax --help').",
        "predict --model": "Option '--model' requires an argument (see 'quietmax --help').",
        "ask ftp://h people people.csv": "url must be an http or https address",
        "predict --epsilon x": "Invalid value for '--epsilon'",
        "schema draft people.csv --label 'income tax'": "no column 'income tax'",
        "schema draft people.csv --label age --person age": "both the label and the person",
        "plan people.csv --people 40": "never the records",
        "plan people.toml --people 4": "--people must be an integer from 10",
        "plan people.toml --people 40 --achievable 0.8": "--achievable requires --majority",
        "plan people.toml --people 40 --majority 0.2": "--majority must be the share",
        "plan people.toml --people 40 --epsilon 0": "--epsilon must be between",
        "plan people.toml": "Missing option '--people'",
        "train head": "Missing argument 'data' (see 'quietmax train head --help').",
        "train network mnits": "mnist",
        "train network mnist-5k --records 4000": "4000",
        "train network mnist-5k --alpha -1": "--alpha must be a positive number",
        "train network mnist-5k --label y": "--label",
        "train network bare.csv --records 100": "--holdout",
        "train network bare.csv --records 100 --holdout 0.2": "only one of them",
        "train network bare.csv --label income": "`categories`",
        "train network people.csv --schema deep.toml": "nested too deeply",
        "train network people.csv --schema deep.json": "nested too deeply",
        f"train head {PEOPLE} --epsilon -1": "--epsilon",
        "train head people.csv --records 100": "--records applies only to registered data sets",
        "train head people.csv --holdout 1.5": "--holdout must be a number of at least 0 and below 1",
        "train head people.csv --features sift": "--features must be one of auto, identity",
        "train head people.csv --queries 5": "requires --declared-size",
        "train head people.csv --max-memory 1G --records 9": "--records applies only to registered data sets",
        "train head mnist-5k --max-memory 1G": "--max-memory applies only to CSV, TSV and Parquet files",
        "train head people.csv --resume": "--resume requires a --cache-dir",
        "train head people.csv --ray local --max-memory 1G": "--max-memory cannot be combined with --ray",
        f"train head {PEOPLE} --features scattering": "--features scattering",
        f"train teachers {PEOPLE} --queries 1 --features scattering": "image",
        f"train dpsgd {PEOPLE} --features scattering": "image",
        f"train teachers {PEOPLE} --queries 2 --delta 2": "--delta",
        "train teachers people.csv": "Missing option '--queries'",
        "train teachers people.csv --queries 1 --resume": "No such option: --resume",
        f"train dpsgd {PEOPLE} --accountant moments": "--accountant",
        "train dpsgd people.csv --analysis published": "with --analysis published, got 'pld'",
        "train dpsgd people.csv --sampling-rate 2": "--sampling-rate must be above 0",
        "bundle head --key people.csv": "must be an Ed25519 key",
        "witness w.jsonl": "At least one of --export, --ledger and --model",
        "witness w.jsonl --model head": "not paid per answer",
        "evaluate network --data people.csv": "not a private one",
        "evaluate head --data mnist-5k --exact": "nobody is left to evaluate it on",
        "explain teachers": "paid one by one",
        "explain network": "not a private one",
        "explain head --column agee": "did you mean 'age'?",
        "predict --model teachers --input people.csv --explain": "paid one by one",
        "predict --model network --input people.csv --explain": "paid one by one",
        "export head --skops head.skops --reasons": "--reasons requires --onnx or --sql",
        "export head --html head.html --keep id": "--keep require --sql",
        "evaluate head --data people.csv --exact --epsilon 1": "--exact takes no budget: leave out --epsilon",
        "evaluate head --data people.csv --exact --delta 1e-6": "--exact takes no budget: leave out --epsilon",
        "decide head --threshold maybe=0.3": "no class 'maybe'; the classes are",
        "decide teachers --cost lo:hi=2": "releases no probabilities to decide by",
        "decide network": "not a private one",
        "evaluate teachers --data people.csv": "paid per answer cannot be evaluated",
        "evaluate teachers --data people.csv --exact": "paid per answer cannot be evaluated",
        "evaluate teachers --data people.csv --epsilon 1": "paid per answer cannot be evaluated",
        "predict --model network --input people.csv": "--epsilon is required",
        "predict --model network --input people.csv --mechanism gaussian --epsilon 1": "Valid: algorithm1,",
        "predict --model head --input people.csv --epsilon 5": "--epsilon cannot be used with a private model",
        "predict --model head --input people.csv --seeded 5": "--seeded cannot be used with a private model",
        "predict --model head --input people.csv --mechanism algorithm1": "--mechanism cannot be used",
        "sensitivity --features 9": "Missing option '--classes'",
        "attack absent": "must be a model folder, a data set",
        f"attack {SMALL} --data x.csv": "--data can only be combined with a model folder",
        f"attack {SMALL} --attack shadw": "did you mean 'shadow'",
        f"attack {SMALL} --attack rmia --shadows 1": "--shadows must be at least 2 for the attack 'rmia', got 1",
        f"attack {SMALL} --mechanism magic": "Unknown mechanism 'magic'. Valid: algorithm1, algorithm1-laplace",
        f"attack {SMALL} --mechanism algorithm1": "--mechanism algorithm1 requires --epsilon",
        f"attack {SMALL} --epsilon 1": "can only be combined with a mechanism",
        f"attack {SMALL} --mechanism algorithm1 --epsilon 1 --target http://a/b": "own mechanism",
        f"attack {SMALL} --target nowhere": "must be an address",
        "audit mechanism --mechanism magic": "--mechanism must be one of",
        "audit mechanism --noise pink": "--noise must",
        "audit mechanism --noise-share 0": "--noise-share must be above 0",
        "audit training mnist-5k --estimator oracle": "--estimator must",
        "audit training worst-case --estimator oracle": "--estimator must be one of head, head-query",
        f"audit stability {SMALL} --removed 41": "--removed",
        "audit stability people.csv --records 50": "--holdout",
        "compare nowhere": "data set 'nowhere'",
        "compare mnist-5k --methods heed": "did you mean 'head'",
        "compare mnist-5k --epsilons many": "Invalid value for '--epsilons'",
        "compare mnist-5k --epsilons=-1": "--epsilons must be positive numbers",
        "compare mnist-5k --queries 1.5": "--queries must be positive integers, as in 1,100, got 1.5",
        "compare mnist-5k --attacks telepathy": "attack 'telepathy'",
        "compare mnist-5k --attacks lira --shadows 1": "--shadows must be at least 2",
        "compare mnist-5k --label y": "do not apply to the data set 'mnist-5k'",
        "compare mnist-5k --methods head,published-rdp --epsilons 1 3": "100, 500, 1000), got 3",
        "compare people.csv --records 100": "--holdout is the share of a table",
        "compare people.csv --holdout 0": "--holdout must be above 0 and below 1",
        "reproduce report --datasets": "'--datasets' requires an argument",
        "reproduce report --datasets --json": "'--json'",
        "reproduce report --tables alpha --datasets mnits": "mnits",
        "reproduce report --tables sensitivities --datasets mnits": "mnits",
        "reproduce report --tables acuracy": "did you mean 'accuracy'",
        "reproduce report --tables alpha --datasets texas": "quietmax reproduce run",
        "reproduce report --tables cifar --datasets texas": "quietmax reproduce run",
        "reproduce run --datasets mnits": "mnits",
        "reproduce run --datasets mnist-5k --repeats 0": "repeats",
        "reproduce run --datasets mnist-5k --profile fast": "profile must be quick or paper, got 'fast'",
        "card head --account a": "--account requires --ledger",
        "card head --ledger ledger.sqlite": "--ledger requires --format",
        "card head --format nist-800-226 --ledger absent.sqlite": "must exist",
        "export head": "--onnx",
        "export head --mlflow network": "already exists",
        "ledger status --ledger absent.sqlite": "absent.sqlite",
        "ledger grant people --because no": "--epsilon",
        "ledger revoke nobody --because 'It is over.'": "nobody",
        "ledger key create": "(see 'quietmax ledger key create --help').",
        "ledger key create ann --role owner": "--role must be",
        "ledger key list --ledger absent.sqlite": "absent.sqlite",
        "ledger key revoke 0123456789abcdef": "0123456789abcdef",
        "serve": "At least one model must be named",
        **{f"{name} --nonsense": f"'quietmax {name} --help'" for name in ALL},
    },
}
"""By exit code: command lines with one error, and what the message says."""


@pytest.fixture(scope="module")
def shared_folder(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of `trained` with a schema, tables that cannot be used, and a ledger with an account."""
    folder = Path(shutil.copytree(trained, tmp_path_factory.mktemp("contract") / "folder"))
    shutil.copy(SCHEMA, folder / "people.toml")
    shutil.copy(folder / "people.csv", folder / "bare.csv")
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "deep.toml").write_text("a = " + "[" * 100_000)
    with Ledger(folder / "ledger.sqlite") as ledger:
        ledger.open_account("people", PureCost(1.0), Terms(1.0))
    return folder


def test_every_command_is_tested_here_or_elsewhere() -> None:
    assert set(ALL) == {*WORKING, *ELSEWHERE}
    assert all(
        "--json" in [option for each in command.params for option in each.opts] for command in ALL.values()
    )


@pytest.mark.parametrize("name", WORKING)
def test_json_is_one_document_and_nothing_else(
    shared_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(shutil.copytree(shared_folder, tmp_path / "folder"))
    with Ledger(Path("ledger.sqlite")) as ledger:
        key = ledger.create_key("bob")[1].id
    code, out, err = run(*name.split(), *shlex.split(WORKING[name].replace("KEY", key)), "--json")
    assert (code, err) == (0, "")
    json.loads(out)


def _contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [pytest.param(words, code, said, id=words) for code in WRONG for words, said in WRONG[code].items()],
)
def test_wrong_usage_is_one_line_and_writes_nothing(
    shared_folder: Path, monkeypatch: pytest.MonkeyPatch, words: str, code: int, message: str
) -> None:
    monkeypatch.chdir(shared_folder)
    monkeypatch.setenv("QUIETMAX_DATA", str(shared_folder))
    before = _contents(shared_folder)
    writes = words.startswith(("train", "compare", "reproduce")) and "--output" not in words
    output = ("--output", "out") if writes and not words.endswith("--datasets") else ()
    assert_error(run(*shlex.split(words), *output), code, message)
    assert _contents(shared_folder) == before

"""The command line as a whole: the list of commands, their help and examples, errors and exit codes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import typer.testing

import quietmax
from quietmax.accounting.costs import PureCost
from quietmax.cli import _SHARED, COMMANDS, _name_flags, _rewritten, app, main
from quietmax.data.registry import load
from quietmax.errors import QuietmaxError
from quietmax.privacy_card import read_card
from tests.cli.conftest import all_commands, assert_error, printed, run
from tests.cli.own_table import DECLARED

FOLDER = Path(quietmax.__file__).parent / "cli"
HEAVY = ("torch", "numpy", "scipy", "sklearn", "pandas", "matplotlib", "starlette", "sqlalchemy", "ray")
PRINT_HELP = f"""
import json, sys
from quietmax.cli import app
for path in json.loads(sys.argv[1]):
    try:
        app([*path, "--help"])
    except SystemExit as ended:
        assert not ended.code
    imported = [name for name in {HEAVY} if name in sys.modules]
    assert not imported, (path, imported)
"""
LONG = "x" * 300


# The list of commands


def test_every_module_that_is_not_shared_code_holds_a_command() -> None:
    modules = {path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_")}
    assert modules == {_SHARED.get(name, name) for name in COMMANDS}


def test_the_list_of_commands_fits_one_screen() -> None:
    shown = typer.testing.CliRunner().invoke(app, ["--help"], terminal_width=80)
    assert len(shown.output.splitlines()) <= 40
    for name, summary in COMMANDS.items():
        assert name in shown.output
        assert summary in shown.output


def test_the_version_is_printed() -> None:
    assert run("--version") == (0, f"quietmax {quietmax.__version__}\n", "")


# Help


def test_help_imports_no_heavy_package() -> None:
    paths = [[], *([name] for name in COMMANDS), *(path for path, _ in all_commands())]
    words = [sys.executable, "-c", PRINT_HELP, json.dumps(paths)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.count("Usage: ") == len(paths)


def test_help_names_every_option_and_cuts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for path, command in all_commands():
        out = printed(*path, "--help")
        assert "…" not in out, path
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert parameter.opts[0] in out, (path, parameter.name)
        assert "--json" in out, path


def test_brackets_in_help_texts_are_printed() -> None:
    for name in (("compare",), ("reproduce", "run")):
        out = printed(*name, "--help")
        assert "quietmax[ray]" in "".join(line.strip("│ ") for line in out.splitlines())


@pytest.mark.parametrize("arguments", [[], ["schema"], ["train"], ["ledger"], ["ledger", "key"]])
def test_a_group_without_a_command_shows_its_help(arguments: list[str]) -> None:
    code, out, err = run(*arguments)
    assert (code, err) == (2, "")
    assert f"Usage: {' '.join(['quietmax', *arguments])} [OPTIONS] COMMAND" in out


# Examples

SCREEN = 78
NOT_RUN = {
    "quietmax demo": "has a test of its own",
    "quietmax serve digits=private --ledger postgresql://localhost/quietmax": "needs a database",
    "quietmax ledger key revoke 0123456789abcdef": "needs the id of one's own key",
    'quietmax ledger accept-loss --because "The disk failed in May."': "needs a loss; has a test of its own",
    "quietmax forget --schema people.toml --person 4711": "needs people; has a test of its own",
    "quietmax train head visits.csv --cohort 2026-11 --continue old --output new": "needs a series",
    "quietmax ask http://127.0.0.1:8080 affair people.csv": "needs a service",
    "quietmax ask https://my.org affair/2 a.csv --key-file key.txt -o b.csv": "needs a service",
    "quietmax forget visits --schema people.toml --person - --html page.html": "needs people",
    "quietmax reproduce run --profile quick": "takes a quarter of an hour",
    "quietmax reproduce run --tables curves --datasets location": "takes long",
}


def _examples() -> Iterator[tuple[list[str], str, int]]:
    """Every command, its examples, and the number of characters before one on its line."""
    for path, command in all_commands():
        before, found, shown = (command.help or "").partition("Example: ")
        if not found:
            before, found, shown = before.partition("Examples:")
        for block in shown.split("\n\n"):
            example = " ".join(block.split())
            if example:
                yield path, example, 0 if found == "Examples:" else len(found)


def test_every_command_has_an_example_that_fits_a_screen() -> None:
    examples = list(_examples())
    for path, example, before in examples:
        assert example.startswith(f"quietmax {' '.join(path)}"), example
        assert before + len(example) <= SCREEN, f"{before + len(example)} characters: {example}"
    assert {" ".join(path) for path, _, _ in examples} == {" ".join(path) for path, _ in all_commands()}
    assert set(NOT_RUN) <= {example for _, example, _ in examples}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the examples assume: a table with its schema, queries, folders of both, and a ledger with an account."""
    from quietmax.ledger import Ledger, Terms

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUIETMAX_LEDGER", str(Path("ledger.sqlite")))
    ages = np.random.default_rng(0).integers(18, 90, 1200)
    rows = [f"{age},{('Female', 'Male')[age % 2]},{'yes' if age > 50 else 'no'}" for age in ages]
    Path("people.csv").write_text("\n".join(["age,sex,income", *rows]))
    Path("people.toml").write_text(
        'label = "income"\nclasses = ["no", "yes"]\nbounds = { age = [0, 120] }\n'
        'categories = { sex = ["Female", "Male"] }\n'
    )
    queries = load("mnist-5k").test.features[:3]
    header = ",".join(f"pixel_{number}" for number in range(queries.shape[1]))
    np.savetxt(Path("queries.csv"), queries, delimiter=",", header=header, comments="")
    for name in ("people", "queries"):
        (tmp_path / name).mkdir()
        shutil.copy(Path(f"{name}.csv"), tmp_path / name / "part-1.csv")
    with Ledger(Path("ledger.sqlite")) as ledger:
        ledger.open_account("people", PureCost(1.0), Terms(1.0))
        ledger.client("ann")
    return tmp_path


@pytest.mark.slow
def test_the_examples_work_when_they_are_pasted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quietmax.server import run as supervisor

    monkeypatch.setattr(supervisor, "supervise", lambda *_: None)
    assert folder.is_dir()
    real = "QUIETMAX_DATA" in os.environ
    for _, example, _ in _examples():
        if example in NOT_RUN or (example.startswith("quietmax reproduce") and not real):
            continue
        # The folder has the confirmed schema already.
        words = shlex.split(example.replace("--output people.toml", "--output draft.toml"))
        printed(*words[1:])


# Arguments


def test_several_values_may_follow_one_option() -> None:
    assert _rewritten(["a", "--datasets", "x", "y", "--json", "z"]) == [
        "a", "--datasets", "x", "--datasets", "y", "--json", "z",
    ]  # fmt: skip


# Errors and exit codes


def test_errors_name_the_flags_of_the_command() -> None:
    flags = {"max_rows": "--max-rows", "infer": "--infer"}
    assert _name_flags("Set `infer` or `other`.", flags) == "Set --infer or `other`."
    assert _name_flags("max_rows must be positive.", flags) == "--max-rows must be positive."
    assert _name_flags("infer='all' is not other='all'.", flags) == "--infer all is not other='all'."
    assert _name_flags("infer='patient id; rm x'.", flags) == "--infer 'patient id; rm x'."
    assert _name_flags("It requires max_rows.", flags) == "It requires --max-rows."
    assert _name_flags("The infer must.", flags) == "The infer must."


def raising(problem: BaseException) -> Callable[[], None]:
    """A command that fails."""

    def command() -> None:
        raise problem

    return command


@pytest.mark.parametrize("line", ["Interrupted.", "Interrupted. Finished trials are stored."])
def test_an_interruption_is_one_line_and_exit_code_130(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    problem = KeyboardInterrupt() if line == "Interrupted." else KeyboardInterrupt(line)
    monkeypatch.setattr("quietmax.cli.data.datasets", raising(problem))
    assert run("datasets") == (130, "", f"quietmax: {line}\n")


@pytest.mark.parametrize("module", ["quietmax.cli", "typer", "rich.markup", "quietmax.cli.data"])
def test_an_interruption_while_the_command_line_is_imported_is_one_line(module: str) -> None:
    program = f"""
import runpy, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
sys.argv = ["quietmax", "datasets"]
runpy.run_module("quietmax", run_name="__main__")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "quietmax: Interrupted.\n")


def test_an_interruption_before_a_command_begins_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quietmax.cli._Commands.parse_args", lambda *_: raising(KeyboardInterrupt())())
    assert run("datasets") == (130, "", "quietmax: Interrupted.\n")


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (QuietmaxError("It failed."), "It failed."),
        (PermissionError(13, "not allowed", "data"), "not allowed): 'data'"),
        (OSError(28, "disk full"), "disk full"),
        (ModuleNotFoundError("no", name="uvicorn"), "pip install 'quietmax[serve]'"),
        (ModuleNotFoundError("no", name="ray"), "pip install 'quietmax[ray]'"),
    ],
)
def test_a_failure_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, problem: Exception, message: str
) -> None:
    monkeypatch.setattr("quietmax.cli.data.datasets", raising(problem))
    assert_error(run("datasets"), 1, message)


def test_a_missing_module_of_quietmax_itself_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ModuleNotFoundError("no", name="quietmax.absent")
    monkeypatch.setattr("quietmax.cli.data.datasets", raising(problem))
    monkeypatch.setattr(sys, "argv", ["quietmax", "datasets"])
    with pytest.raises(ModuleNotFoundError):
        main()


def test_names_that_no_file_can_have_are_one_line(
    people: Path, head: Path, queries: Path, tmp_path: Path
) -> None:
    for command in (
        ("train", "head", people, *DECLARED, "--declared-size", 480, "-o", tmp_path / LONG),
        ("train", "network", f"{LONG}.csv", *DECLARED),
        ("train", "network", people, "--schema", f"{LONG}.json"),
        ("predict", "--model", LONG, "--input", queries),
        ("predict", "--model", head, "--input", f"{LONG}.csv"),
        ("card", LONG),
        ("card", head, "--html", LONG),
        ("attack", LONG),
        ("serve", LONG),
        ("ledger", "status", "--ledger", LONG),
    ):
        code, _, err = run(*command)
        assert code in (1, 2), command[0]
        assert err.startswith("quietmax: "), command[0]
        assert err.count("\n") == 1, command[0]


def test_the_longest_name_that_a_folder_can_have_is_written(people: Path, tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 255)
    code, _, err = run("train", "head", people, *DECLARED, "--declared-size", 480, "-o", folder)
    assert (code, err) == (0, "")
    assert read_card(folder).status == "proven"

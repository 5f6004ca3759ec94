"""Options of `quietmax serve` from the command line, the environment and a TOML file: names, precedence and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from quietmax.cli import load_command
from quietmax.cli.serve import ServeOption, _check_variables, options_of
from tests.cli.conftest import assert_error, run
from tests.docs.scripts import script

option_table = script("docs/making/option_table.py")
SETTINGS = options_of(load_command("serve"))
IDS = [setting.key for setting in SETTINGS]
SAMPLES: dict[type, tuple[Any, str]] = {
    bool: (True, "true"),
    int: (3, "3"),
    float: (0.5, "0.5"),
    str: ("word", "word"),
    Path: ("some/file", "some/file"),
    list[str]: (["one", "two"], "one two"),
}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in SETTINGS:
        if setting.variable is not None:
            monkeypatch.delenv(setting.variable, raising=False)


def parsed(*arguments: str) -> dict[str, Any]:
    """What the command gets for a command line."""
    context = load_command("serve").make_context("serve", list(arguments))
    return dict(context.params)


def sample(setting: ServeOption) -> tuple[Any, str]:
    """A value that is not the default: in TOML, and as text."""
    value, text = SAMPLES[setting.option.type_descriptor.annotation]
    return (False, "false") if setting.option.default is True else (value, text)


@pytest.mark.parametrize("setting", SETTINGS, ids=IDS)
def test_every_option_can_be_set_by_its_variable_and_its_key(
    setting: ServeOption, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, text = sample(setting)
    name = setting.option.name
    file = Path("serve.toml")
    if setting.in_file:
        file.write_text(f"{setting.key} = {json.dumps(value)}\n")
        from_file = parsed("--config", str(file))[name]
        assert str(from_file) == str(value)
        assert from_file != parsed()[name]
    if setting.variable is not None and setting.key != "config":
        monkeypatch.setenv(setting.variable, text)
        assert str(parsed()[name]) == str(value)


def test_the_command_line_comes_first_then_the_environment_then_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = Path("serve.toml")
    file.write_text("port = 1001\nmax_rows = 11\nrequest_log = false\n")
    monkeypatch.setenv("QUIETMAX_CONFIG", str(file))
    assert (parsed()["port"], parsed()["max_rows"], parsed()["request_log"]) == (1001, 11, False)
    monkeypatch.setenv("QUIETMAX_PORT", "1002")
    monkeypatch.setenv("QUIETMAX_REQUEST_LOG", "true")
    assert (parsed()["port"], parsed()["max_rows"], parsed()["request_log"]) == (1002, 11, True)
    assert parsed("--port", "1003", "--no-request-log")["port"] == 1003
    assert parsed("--no-request-log")["request_log"] is False
    assert parsed("--port", "1003")["max_bytes"] == 16 * 2**20


def test_an_empty_variable_and_a_variable_that_kubernetes_sets_count_as_not_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUIETMAX_HOST", "")
    monkeypatch.setenv("QUIETMAX_PORT", "tcp://10.0.0.1:80")
    assert (parsed()["host"], parsed()["port"]) == ("127.0.0.1", 8080)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("QUIETMAX_PROT", "QUIETMAX_PORT"),
        ("QUIETMAX_LEGDER", "QUIETMAX_LEDGER"),
        ("QUIETMAX_LEDGER_PASSWORD", "QUIETMAX_LEDGER_PASSWORD_FILE"),
        ("QUIETMAX_CHECK", "QUIETMAX_"),
        ("QUIETMAX_", "QUIETMAX_"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_nearest_valid_name(
    monkeypatch: pytest.MonkeyPatch, name: str, nearest: str
) -> None:
    monkeypatch.setenv(name, "8080")
    result = run("serve", "model")
    assert_error(result, 1, f"Unknown environment variable {name}; the nearest valid name is {nearest}")
    assert run("serve", "--help")[0] == 0


def test_variables_of_kubernetes_of_tests_and_of_other_commands_are_no_misspelt_options() -> None:
    links = {
        "QUIETMAX_SERVICE_HOST": "10.0.0.1",
        "QUIETMAX_SERVICE_PORT": "8080",
        "QUIETMAX_SERVICE_PORT_HTTP": "8080",
        "QUIETMAX_PORT_8080_TCP": "tcp://10.0.0.1:8080",
        "QUIETMAX_PORT_8080_TCP_ADDR": "10.0.0.1",
        "QUIETMAX_METRICS_PORT": "tcp://10.0.0.1:80",
    }
    root = Path(__file__).parents[2]
    named = {
        name
        for folder in ("src", "tests", "benchmarks", "docs", "deploy")
        for file in (root / folder).rglob("*")
        if file.suffix in (".py", ".md", ".yaml", ".toml", ".txt", ".sh") and file != Path(__file__)
        for name in re.findall(r"\bQUIETMAX_[A-Z_]*[A-Z]\b", file.read_text(encoding="utf-8"))
    } - {"QUIETMAX_LEGDER"}
    assert {"QUIETMAX_DATA", "QUIETMAX_KILLS", "QUIETMAX_LEDGER"} < named
    _check_variables(load_command("serve"), {**dict.fromkeys(named, "1"), **links, "HOME": "/"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 8080", "Unknown key 'prot' (did you mean 'port'?). Valid: models, "),
        ("max-rows = 10", "Unknown key 'max-rows' (did you mean 'max_rows'?)"),
        ("check = true", "Unknown key 'check'"),
        ('config = "more.toml"', "Unknown key 'config'"),
        ("[serve]\nport = 80", "Unknown key 'serve'"),
        ("host = [1]", "host must be one value."),
        ("host = {a = 1}", "host must be one value."),
        ('models = "digits"', "models must be a list of strings."),
        ("port = ", "is not a TOML file"),
        ('account = "\udcff"', "is not a TOML file"),
    ],
)
def test_a_wrong_file_is_one_sentence_that_names_it(text: str, message: str) -> None:
    file = Path("serve.toml")
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert_error(run("serve", "--config", file), 1, "serve.toml", message)


@pytest.mark.parametrize(
    "text", ["port = 8080.5", "port = true", "anonymous = 2", "budget = true", "port = 70000"]
)
def test_a_value_of_another_type_is_named_with_the_place_that_sets_it(text: str) -> None:
    file = Path("serve.toml")
    file.write_text(text)
    assert_error(run("serve", "--config", file), 2, f"--{text.split()[0]}", f"(set by {file})")


def test_a_wrong_variable_and_a_missing_file_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_error(run("serve", "--config", "absent.toml"), 1, "absent.toml", "No such file")
    monkeypatch.setenv("QUIETMAX_PORT", "80000")
    assert_error(run("serve", "model"), 2, "--port", "(set by QUIETMAX_PORT)")


def test_the_table_of_the_documentation_has_every_option_with_all_its_names() -> None:
    rows = option_table.as_markdown().splitlines()[2:]
    assert len(rows) == len(SETTINGS) > 20
    assert "| `--max-rows` | `QUIETMAX_MAX_ROWS` | `max_rows` | `1000` | Most rows in one request. |" in rows
    page = Path(__file__).parents[2] / "docs" / "how-to" / "deploy.md"
    assert option_table.MARKER in page.read_text(encoding="utf-8")
    assert rows[0] in option_table.on_page_markdown(page.read_text(encoding="utf-8"))

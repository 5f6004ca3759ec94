"""The list of commands is complete, and showing it needs none of the heavy packages."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import typer.testing

import quietmax
from quietmax.cli import COMMANDS, app, loaded

FOLDER = Path(quietmax.__file__).parent / "cli"
HELP = """
import sys
from quietmax.cli import app
try:
    app(["--help"])
except SystemExit as ended:
    assert not ended.code
print(",".join(name for name in ("torch", "numpy", "sklearn", "pandas") if name in sys.modules) or "none")
"""


def test_every_module_that_holds_a_command_is_listed():
    holders = set()
    for path in FOLDER.glob("*.py"):
        names = set()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Assign):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if names & {"command", "app"} and path.stem != "__init__":
            holders.add(path.stem)
    assert holders == set(COMMANDS)


def test_the_list_of_commands_is_shown_without_importing_heavy_packages():
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "none"
    for name in COMMANDS:
        assert name in done.stdout


def test_the_list_of_commands_fits_one_screen():
    shown = typer.testing.CliRunner().invoke(app, ["--help"], terminal_width=80)
    assert len(shown.output.splitlines()) <= 40


def test_a_command_whose_packages_are_not_installed_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    for name in ("quietmax.cli.demo", "quietmax.cli.demo"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(
        quietmax.QuietmaxError, match=r"uvicorn is missing\); install: pip install 'quietmax\[serve\]'"
    ):
        loaded("demo")


def test_the_surface_is_reached_through_the_package():
    assert set(quietmax.__all__) <= set(dir(quietmax))
    for name in quietmax.__all__:
        assert getattr(quietmax, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = quietmax.nonsense

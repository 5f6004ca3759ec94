"""Shared by the tests of commands: running one in this process, and a table of one's own."""

from __future__ import annotations

import sys

import pytest

from quietmax.cli import main
from tests.cli.own_table import write_people


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a command line in this process and return (exit code, stdout, stderr)."""

    def call(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["quietmax", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return call


@pytest.fixture
def people(tmp_path):
    """The file of a table whose label is learned easily."""
    return write_people(tmp_path / "people.csv")

"""The examples run, and what they print is what they promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# What each must print, whatever the noise.
PROMISED = {
    "1-quickstart/quickstart.py": ("proven: ", "attack on the private head: leakage "),
    "2-your-own-data/own_data.py": (
        "status: proven",
        "query 5: class ",
        "query 6: Privacy budget exhausted",
    ),
    "3-paper/paper.py": ("62 of 66 numbers", "accuracy loss", "refuted"),
}


def _printed(script: str, folder: Path, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *options],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_listed():
    assert {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")} == set(PROMISED)


@pytest.mark.parametrize("script", PROMISED)
def test_the_small_version_of_an_example_prints_what_it_promises(script, tmp_path):
    printed = _printed(script, tmp_path, "--quick")
    for words in PROMISED[script]:
        assert words in printed


@pytest.mark.slow
@pytest.mark.parametrize("script", PROMISED)
def test_an_example_prints_what_it_promises(script, tmp_path):
    printed = _printed(script, tmp_path)
    for words in PROMISED[script]:
        assert words in printed

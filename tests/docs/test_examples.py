"""The examples run, and what they print is what they promise."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import zipfile
from contextlib import ExitStack
from pathlib import Path

import pytest

import quietmax
from tests.docs.code_blocks import blocks_of, commands, free_port, printed, serving

EXAMPLES = Path(__file__).parents[2] / "examples"
# What each must print, whatever the noise.
PROMISED = {
    "1-quickstart/quickstart.py": ("proven: ", "accuracy that may be published: 0.", "answers: "),
    "2-your-own-data/own_data.py": (
        "[confirm]",
        "proven: ",
        "for one person",
        "accuracy that may be published: 0.",
        "answers: ",
    ),
    "2-your-own-data/text_columns.py": (
        "[confirm.text]",
        "proven: ",
        "was made without the private records",
        "accuracy that may be published: 0.",
        "answers: ",
    ),
    "3-paper/paper.py": ("62 of 66 numbers", "accuracy loss", "refuted"),
}

NOTEBOOKS = {
    "2-your-own-data/own_table.ipynb": ("[confirm]", "for one person", "accuracy: 0.", "'] [[", "proven"),
    "2-your-own-data/images.ipynb": ("proven: ", "test accuracy: 0.", "for one person"),
    "2-your-own-data/text.ipynb": ("proven: ", "accuracy that may be published: 0.", "HillaryClinton"),
    "3-paper/paper.ipynb": ("62 of 66 numbers", "gaussian [", "leakage", "refuted", "proven"),
    "4-audit/audit_a_claim.ipynb": (
        "refuted - claimed 1.0",
        "100% of the noise: consistent",
        "50% of the noise: refuted",
        "logit: moved by",
    ),
}


def test_every_example_is_listed_here_and_in_the_readme():
    there = {
        path.relative_to(EXAMPLES).as_posix() for kind in ("*.py", "*.ipynb") for path in EXAMPLES.rglob(kind)
    }
    named = set(re.findall(r"`(\d-[\w/-]+\.\w+)`", (EXAMPLES / "README.md").read_text(encoding="utf-8")))
    assert there == named == {*PROMISED, *NOTEBOOKS}


@pytest.mark.parametrize("script", PROMISED)
def test_the_small_version_of_an_example_prints_what_it_promises(script, tmp_path, monkeypatch, capsys):
    """In this process: another would spend seconds on imports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, "--quick"])
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    printed = capsys.readouterr().out
    for words in PROMISED[script]:
        assert words in printed


@pytest.mark.slow
@pytest.mark.parametrize("example", [*PROMISED, *NOTEBOOKS])
def test_an_example_prints_what_it_promises(example, tmp_path):
    program = (EXAMPLES / example).read_text(encoding="utf-8")
    if example in NOTEBOOKS:  # its cells, in order
        cells = json.loads(program)["cells"]
        program = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    told = printed([sys.executable, "-c", program], cwd=tmp_path, env=environment)
    for words in (PROMISED | NOTEBOOKS)[example]:
        assert words in told, told


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_notebook_is_stored_without_outputs_and_each_cell_is_a_program(notebook):
    stored = json.loads((EXAMPLES / notebook).read_text(encoding="utf-8"))
    assert (stored["nbformat"], stored["nbformat_minor"]) == (4, 5)
    cells = stored["cells"]
    assert cells[0]["cell_type"] == "markdown"
    assert cells[0]["source"][0].startswith("# ")
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            compile("".join(cell["source"]), cell["id"], "exec")


ROOT = Path(__file__).parents[2]
PYTHONS = os.environ.get("QUIETMAX_PYTHONS", "").split() or [sys.executable]
"""The interpreters on which the wheel is tried alone."""


def _built(folder: Path, source: Path = ROOT) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(source)], check=True, capture_output=True)
    (wheel,) = folder.glob("quietmax-*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return _built(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_the_package_its_data_and_nothing_else(wheel):
    archive = zipfile.ZipFile(wheel)
    described = {name for name in archive.namelist() if ".dist-info/" in name}
    source = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    data = ("py.typed", "experiments/paper/curves.csv", "models/features/patches.safetensors")
    assert {f"quietmax/{name}" for name in data} <= source
    assert {*archive.namelist()} - described == source
    texts = {name.rpartition("/")[2]: archive.read(name).decode() for name in described}
    assert f"Version: {quietmax.__version__}" in texts["METADATA"]
    assert "License-Expression: Apache-2.0" in texts["METADATA"]
    assert "quietmax = quietmax.__main__:main" in texts["entry_points.txt"]


def test_the_source_archive_builds_the_same_wheel(wheel, tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("quietmax-*.tar.gz")
    first, second = map(zipfile.ZipFile, (wheel, _built(tmp_path / "again", archive)))
    assert sorted(first.namelist()) == sorted(second.namelist())
    for name in first.namelist():
        assert first.read(name) == second.read(name), name


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_the_wheel_alone_runs_the_demo_and_the_ten_lines_of_the_readme(python, wheel, tmp_path):
    subprocess.run([python, "-m", "venv", str(tmp_path / "new")], check=True)
    programs = tmp_path / "new" / "bin"
    for wanted in ("torch==2.13.0", f"{wheel}[serve]"):
        subprocess.run([str(programs / "pip"), "install", "--quiet", wanted], check=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {"QUIETMAX_LEDGER": str(empty / "ledger.sqlite"), "NO_PROXY": "*"}

    def run(*words: str) -> str:
        program, *rest = words
        return printed([str(programs / program), *rest], cwd=empty, env=variables)

    assert "proven" in run("quietmax", "demo", "--json")
    told, port = "", free_port()
    with ExitStack() as services:
        for block in blocks_of(ROOT / "README.md"):
            text = block.text.replace("8080", str(port))
            if block.saved_as:
                (empty / block.saved_as).write_text(text, encoding="utf-8")
            elif block.language == "python":
                told += run("python", "-c", text)
            elif block.mark == "serves":
                ((program, *rest),) = commands(text)
                command = [str(programs / program), *rest]
                services.enter_context(serving(command, port, cwd=empty, env=variables))
            elif block.runs:
                for words in commands(text):
                    told += run(*words)
    assert told.rstrip().endswith(("['yes']", "['no']")), told
    assert "proven" in told
    assert (empty / "card.html").is_file()

"""The examples run, and what they print is what they promise."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest

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


def _printed(script: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script)],
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
def test_the_small_version_of_an_example_prints_what_it_promises(script, tmp_path, monkeypatch, capsys):
    """In this process: another would spend seconds on imports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, "--quick"])
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    printed = capsys.readouterr().out
    for words in PROMISED[script]:
        assert words in printed


@pytest.mark.slow
@pytest.mark.parametrize("script", PROMISED)
def test_an_example_prints_what_it_promises(script, tmp_path):
    printed = _printed(script, tmp_path)
    for words in PROMISED[script]:
        assert words in printed


ROOT = Path(__file__).parents[2]
PEOPLE = """\
label = "income"
classes = ["no", "yes"]
bounds = { age = [0, 120], hours = [0, 100] }
"""


def _built(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], check=True, capture_output=True)
    (wheel,) = folder.glob("quietmax-*.whl")
    return wheel


def test_the_wheel_holds_the_package_its_data_and_nothing_else(tmp_path):
    wheel = _built(tmp_path)
    names = zipfile.ZipFile(wheel).namelist()
    metadata = zipfile.ZipFile(wheel).read(next(name for name in names if name.endswith("METADATA"))).decode()
    source = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    inside = {name for name in names if ".dist-info/" not in name}
    data = ("py.typed", "experiments/paper/curves.csv", "models/features/patches.safetensors")
    assert {f"quietmax/{name}" for name in data} <= inside
    assert inside == source
    from quietmax import __version__

    assert f"Version: {__version__}" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert (
        "quietmax = quietmax.__main__:main"
        in zipfile.ZipFile(wheel)
        .read(next(name for name in names if name.endswith("entry_points.txt")))
        .decode()
    )


@pytest.mark.slow
def test_the_wheel_alone_demonstrates_trains_and_serves(tmp_path):
    wheel = _built(tmp_path)
    venv.create(tmp_path / "new", with_pip=True)
    programs = tmp_path / "new" / "bin"
    for wanted in ("torch==2.13.0", f"{wheel}[serve]"):
        subprocess.run([str(programs / "pip"), "install", "--quiet", wanted], check=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables["QUIETMAX_LEDGER"] = str(empty / "ledger.sqlite")

    def run(*words: str) -> str:
        done = subprocess.run(
            [str(programs / "quietmax"), *words],
            cwd=empty,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "proven" in run("demo", "--json")
    rows = [
        f"{18 + person % 70},{person % 60},{'yes' if person % 60 > 30 else 'no'}" for person in range(2000)
    ]
    (empty / "my.csv").write_text("\n".join(["age,hours,income", *rows]) + "\n", encoding="utf-8")
    (empty / "my.toml").write_text(PEOPLE, encoding="utf-8")
    trained = json.loads(
        run(
            "train",
            "head",
            "my.csv",
            "--label",
            "income",
            "--epsilon",
            "1",
            "-o",
            "income",
            "--json",
        )
    )
    assert trained["guarantee"]["definition"] == "gaussian"
    run(
        *("train", "head", "my.csv", "--label", "income", "--epsilon", "1"),
        *("--declared-size", "800", "-o", "declared", "--json"),
    )
    command = [str(programs / "quietmax"), "serve", "declared", "--anonymous", "--port", "0", "--json"]
    service = subprocess.Popen(
        command, cwd=empty, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert service.stdout is not None
        told = ""
        while not told.rstrip().endswith("}") or told.count("{") != told.count("}"):
            line = service.stdout.readline()
            assert line, "the service ended before it said where it listens"
            told += line
        url = json.loads(told)["url"]
        columns = [
            {"name": name, "shape": [1], "datatype": "INT64", "data": [value]}
            for name, value in (("age", 40), ("hours", 55))
        ]
        request = urllib.request.Request(
            f"{url}/v2/models/declared/infer", data=json.dumps({"inputs": columns}).encode()
        )
        answer = json.loads(urllib.request.urlopen(request, timeout=60).read())
        assert answer["parameters"]["guarantee_status"] == "proven"
        (label,) = (each["data"] for each in answer["outputs"] if each["name"] == "label")
        assert label[0] in ("no", "yes")
    finally:
        service.terminate()
        service.wait(60)

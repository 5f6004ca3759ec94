"""The benchmarks' page is made from their rows, keeps what was not run again, and knows every script."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.scripts import script

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ratios, run = script("benchmarks/ratios.py"), script("benchmarks/run.py")


def test_every_benchmark_is_run():
    scripts = {path.stem for path in BENCHMARKS.glob("*.py")} - {"run", "ratios"}
    assert scripts == {benchmark.name for benchmark in run.BENCHMARKS}


def test_a_row_has_the_ratio_within_each_run_and_its_spread(tmp_path, monkeypatch, capsys):
    kept = tmp_path / "rows.jsonl"
    monkeypatch.setenv(ratios.ROWS, str(kept))
    ratios.report("b", "case", [1.0, 2.0, 4.0], "s", peer="other", theirs=[3.0, 8.0, 8.0])
    ratios.report("b", "alone", [5.0], "s")
    first, second = (json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines())
    assert (first["ours"], first["theirs"], first["ratio"]) == (2.0, 8.0, 3.0)
    assert (first["ratio_low"], first["ratio_high"], first["runs"]) == (2.0, 4.0, 3)
    assert second["ratio"] is None
    assert "ratio 3.00 [2.00, 4.00]" in capsys.readouterr().out
    assert run._line(first) == "| case | 2 | s | other | 8 | **3.00** | 2.00 to 4.00 | 3 |"
    with pytest.raises(ValueError):
        ratios.report("b", "uneven", [1.0], "s", peer="other", theirs=[1.0, 2.0])


def test_the_page_keeps_the_parts_of_benchmarks_that_were_not_run(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(run.page({"noise": "## Noise\n\nmeasured before"}), encoding="utf-8")
    parts = run.kept_parts(path)
    assert parts["noise"] == "## Noise\n\nmeasured before"
    assert set(parts) == {benchmark.name for benchmark in run.BENCHMARKS}
    row = json.loads(
        '{"case": "c", "ours": 1, "unit": "s", "peer": null, "theirs": null, "ratio": null, "runs": 1}'
    )
    parts["growth"] = run.part(run.BENCHMARKS[-1], [row], "", None, quick=True)
    text = run.page(parts)
    assert "measured before" in text
    assert "figures mean nothing" in text
    assert "| c | 1 | s |" in text
    assert f"Python {sys.version_info.major}" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["noise", "algorithm1", "stacked_training", "growth", "shadow_attack", "private_answers"]
)
def test_a_benchmark_runs_in_its_quick_version(name, tmp_path):
    path = tmp_path / "page.md"
    command = [sys.executable, str(BENCHMARKS / "run.py"), "--quick", "--only", name, "--page", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(run.kept_parts(path)[name].splitlines()) > 5

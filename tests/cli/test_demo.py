from __future__ import annotations

import json
from pathlib import Path

import pytest

from quietmax.cli.demo import run_steps
from tests.cli.conftest import Run


@pytest.mark.slow
def test_the_demo_trains_queries_serves_and_attacks(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUIETMAX_DATA", "")
    found_once = run_steps(tmp_path / "demo", quiet=True)
    monkeypatch.setattr("quietmax.cli.demo.run_steps", lambda *_, **__: found_once)
    code, out, _ = run("demo", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["accuracy"]["convexified_test_acc"] > 0.85
    assert found["sensitivity"]["rho"] == pytest.approx(2.2274, abs=5e-5)
    assert found["answer"]["guarantee"]["status"] == "refuted"
    assert found["private_head"]["guarantee"]["status"] == "proven"
    assert found["private_head"]["test_acc"] > 0.9
    service = found["service"]
    assert service["answers_left"] == list(range(len(service["labels"])))[::-1]
    assert service["refusal"]
    assert service["spent_fraction"] == 1
    assert service["journal_is_sound"]
    assert "served with fresh noise" in found["attack"]["about"]
    results = {(line["method"], line["epsilon"]): line for line in found["attack"]["results"]}
    assert results["plain", None]["status"] == "none"
    assert results["algorithm1-gaussian", 1.0]["status"] == "refuted"
    assert abs(results["head", 1.0]["leakage_shadow"]) < 0.2
    page = Path(found["attack"]["report"])
    assert page.parent == tmp_path / "demo"
    assert "Privacy and utility on mnist-5k" in page.read_text(encoding="utf-8")
    code, out, err = run("demo")
    assert code == 0, err
    for number in range(1, 7):
        assert f"{number}. " in out
    assert f"HTTP 403: {service['refusal']}" in " ".join(out.split())

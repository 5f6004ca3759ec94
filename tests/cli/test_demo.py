from __future__ import annotations

import json
from pathlib import Path

import pytest

from quietmax.cli.demo import ANSWERS, run_steps
from tests.cli.conftest import Run


@pytest.mark.slow
def test_the_demo_follows_the_owner_s_path_and_shows_the_paper(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUIETMAX_DATA", "")
    found_once = run_steps(tmp_path / "demo", quiet=True)
    monkeypatch.setattr("quietmax.cli.demo.run_steps", lambda *_, **__: found_once)
    code, out, _ = run("demo", "--json")
    assert code == 0
    found = json.loads(out)
    survey = found["survey"]
    assert survey["guarantee"]["status"] == "proven"
    assert survey["evaluation"]["publishable"]
    # The larger class has 0.68 and logistic regression without privacy 0.72; noise and sampling move it by 0.02.
    assert 0.6 < survey["evaluation"]["accuracy"]["value"] < 0.8
    assert survey["answers"] == ["no", "yes"]
    assert "proven" in Path(survey["card"]).read_text(encoding="utf-8")
    charged = found["charged"]
    assert charged["answers_left"] == list(range(ANSWERS))[::-1]
    assert set(charged["labels"]) <= {"no", "yes"}
    assert charged["refusal"]
    assert charged["spent_fraction"] == 1
    assert charged["journal_is_sound"]
    assert found["digits"]["network_test_acc"] > 0.8
    assert found["digits"]["head_test_acc"] > 0.9
    assert found["digits"]["guarantee"]["status"] == "proven"
    assert found["paper"]["sensitivity"]["rho"] == pytest.approx(2.2274, abs=5e-5)
    assert found["paper"]["guarantee"]["status"] == "refuted"
    head = found["attack"]["private head, epsilon 1, delta 1e-5"]
    assert abs(head["leakage"]) < 0.2
    code, out, err = run("demo")
    assert code == 0, err
    for number in range(1, 7):
        assert f"{number}. " in out
    assert f"HTTP 403: {charged['refusal']}" in " ".join(out.split())

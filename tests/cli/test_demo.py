from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quietmax.cli import demo
from tests.cli.conftest import document, run


@pytest.mark.slow
def test_the_demo_follows_the_owner_s_path_and_shows_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETMAX_DATA", "")
    steps = dict[str, Any]()
    run_steps = demo._steps
    monkeypatch.setattr(demo, "_steps", lambda output: steps.update(run_steps(output)) or steps)
    code, out, err = run("demo")
    assert code == 0, err
    monkeypatch.setattr(demo, "_steps", lambda _: steps)
    found = document("demo")
    assert list(found) == ["table", "survey", "answers", "digits", "paper", "open"]
    table = found["table"]
    assert table["rows"] == 6366
    assert table["draft"]["bounds"].keys() > table["confirmed"]["bounds"].keys(), (
        "codes were proposed as numbers"
    )
    survey = found["survey"]
    assert survey["guarantee"]["status"] == "proven"
    assert survey["guarantee"]["unit"] == "person"
    assert survey["evaluation"]["publishable"]
    # The larger class has 0.68 and logistic regression without privacy 0.72; noise and sampling move it by 0.02.
    assert 0.6 < survey["evaluation"]["accuracy"]["value"] < 0.8
    assert found["answers"]["answers"] == ["no", "yes"]
    assert "proven" in Path(survey["card"]).read_text(encoding="utf-8")
    digits = found["digits"]
    assert [digits[name]["guarantee"] for name in ("network", "algorithm1", "head")] == [
        "none",
        "refuted",
        "proven",
    ]
    assert digits["network"]["test_acc"] > 0.8
    assert digits["head"]["test_acc"] > 0.9
    assert abs(digits["head"]["leakage"]["value"]) < 0.2
    assert (found["paper"]["equal_to_the_paper"], found["paper"]["sensitivities"]) == (62, 66)
    assert "five findings" in Path(found["paper"]["report"]).read_text(encoding="utf-8")
    for number in range(1, 6):
        assert f"{number}. " in out
    said = " ".join(out.split())
    opened = found["open"]
    assert said.endswith(opened["serve"]), "the last lines name what to open"
    for name in ("card", "report", "page"):
        assert opened[name] in said.partition("Three things to open")[2]
    served = opened["serve"].split()[1:]
    assert run(*served, "--check")[0] == 0, "what it tells the reader to run works"


def test_a_second_demo_replaces_the_first_and_keeps_no_ledger_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUIETMAX_DATA", "")
    Path("ledger.sqlite").write_text("somebody's own")
    for _ in range(2):
        steps = demo._steps(tmp_path)
        found = dict(next(steps) for _ in range(3))
        assert found["answers"]["answers"] == ["no", "yes"]
        assert found["survey"]["guarantee"].unit == "person"
    assert Path("ledger.sqlite").read_text() == "somebody's own"

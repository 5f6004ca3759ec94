"""The figures of a report: which curves are dashed, and the paper's curves."""

from __future__ import annotations

import json
from pathlib import Path

from quietmax.experiments.figures import figures, write_figures
from quietmax.experiments.summary import summarize
from tests.experiments.made_up import result, the_papers_own, trial


def test_curves_without_a_proven_guarantee_are_dashed_and_the_papers_are_thin() -> None:
    found = the_papers_own() | {trial("head", 1.0): result(status="proven", claimed_delta=1e-4)}
    drawn = figures(summarize(found))
    lines = {line.name: line for figure in drawn for line in figure.lines}
    assert not lines["private head"].dashed
    assert lines["Algorithm 1, Gaussian (no guarantee)"].dashed
    assert any(line.thin and name.startswith("paper:") for name, line in lines.items())
    json.dumps([figure.to_json() for figure in drawn])


def test_more_answers_are_paler(tmp_path: Path) -> None:
    found = {
        trial("teachers", epsilon, queries=queries): result(status="proven")
        for epsilon in (1.0, 2.0)
        for queries in (1, 100)
    }
    (figure,) = figures(summarize(found))
    few, many = figure.lines
    assert (few.name, many.name) == ("teachers, 1 answer", "teachers, 100 answers")
    assert [int(many.colour[at : at + 2], 16) > int(few.colour[at : at + 2], 16) for at in (1, 3, 5)] == [
        True
    ] * 3
    (path,) = write_figures([figure], tmp_path / "figures", ["png"])
    assert path.read_bytes().startswith(b"\x89PNG")

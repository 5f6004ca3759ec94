"""The report: one page with every section, whose text cannot break out of its place."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from quietmax.errors import QuietmaxError
from quietmax.experiments.findings import summarize
from quietmax.experiments.paper import curve
from quietmax.experiments.report import (
    ReportInfo,
    figures,
    html,
    write_figures,
    write_report,
    write_stability_figure,
)
from tests.experiments.made_up import result, the_papers_own, trial


def test_the_page_escapes_its_texts_and_has_every_section() -> None:
    found = the_papers_own() | {trial("head", 1.0): result(status="proven", claimed_delta=1e-4)}
    info = ReportInfo("A <b>title</b>", "few & quick", 7, ("x </script> failed",))
    page = html(summarize(found), info)
    assert "<b>title" not in page
    assert page.count("</script>") == 2
    for part in ("plots", "findings", "many", "paper", "results", "settings"):
        assert f'id="{part}"' in page
    assert "few &amp; quick" in page
    assert "<td>torch</td>" in page
    header, results = page.partition("</header>")[0], page.partition('id="results"')[2]
    for part in (header, results):
        assert "experiments with seeded noise" in part
        assert "the method when it is served with fresh noise" in part


def test_without_results_nothing_is_written_and_a_folder_that_is_not_writable_is_an_error(
    tmp_path: Path,
) -> None:
    assert write_report([], tmp_path / "none", ReportInfo("", "", 0)) == []
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(QuietmaxError, match="could not be written"):
        write_report(summarize(the_papers_own()), tmp_path / "file", ReportInfo("", "", 0))


def test_curves_without_a_proven_guarantee_are_dashed_and_the_papers_are_thin() -> None:
    found = the_papers_own() | {trial("head", 1.0): result(status="proven", claimed_delta=1e-4)}
    drawn = figures(summarize(found))
    lines = {line.name: line for figure in drawn for line in figure.lines}
    assert not lines["private head"].dashed
    assert lines["Algorithm 1, Gaussian (no guarantee)"].dashed
    assert any(line.thin and name.startswith("paper:") for name, line in lines.items())


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


def test_the_papers_bound_is_drawn_and_missing_curves_are_named() -> None:
    found = {each: result for each, result in the_papers_own().items() if each.method != "algorithm1-laplace"}
    loss, leakage = figures(summarize(found))
    (bound,) = (line for line in leakage.lines if line.name.startswith("bound in the paper"))
    printed = curve("location", "priv_leak", "published_bound")
    values = {epsilon: value for epsilon, value, _ in bound.points}
    assert values[0.01] == pytest.approx(math.expm1(0.01))
    # The paper bounds by a leakage of 0.377, its table has 0.36.
    assert values == pytest.approx(printed, abs=0.02)
    for figure in (loss, leakage):
        assert "Not measured in this run: Algorithm 1, Laplace, DP-SGD as published, RDP" in figure.note
        assert "1 repeat of each curve" in figure.note


def test_a_long_legend_is_inside_the_file(tmp_path: Path) -> None:
    (narrow, *_) = figures(summarize(the_papers_own()))
    wide = replace(
        narrow, kind="wide", lines=tuple(replace(line, name=line.name * 3) for line in narrow.lines)
    )
    widths = [_width(path) for path in write_figures([narrow, wide], tmp_path, ["png"])]
    assert widths[1] > 1.4 * widths[0]


def _width(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[16:20], "big")


def test_the_stability_figure_shows_our_networks_beside_the_papers(tmp_path: Path) -> None:
    write_stability_figure(summarize(the_papers_own()), tmp_path / "stability.svg")
    text = (tmp_path / "stability.svg").read_text()
    assert "location" in text
    assert "OARO" in text

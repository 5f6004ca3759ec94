"""The report: one page with every section, whose text cannot break out of its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from quietmax.errors import QuietmaxError
from quietmax.experiments.findings import summarize
from quietmax.experiments.report import ReportInfo, html, write_report
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


def test_the_page_says_what_a_stand_in_is_and_compares_none_with_the_paper() -> None:
    real, made = the_papers_own(), {trial("plain", dataset="texas-stand-in"): result(status="none")}
    info = ReportInfo("", "", 0)
    pages = [html(summarize(found), info) for found in (real, real | made)]
    papers = [page.partition('id="paper"')[2].partition("</section>")[0] for page in pages]
    assert papers[0] == papers[1]
    assert "Not measured here: texas" in papers[1]
    assert ["stand-in" in page for page in pages] == [False, True]
    assert "not compared with the paper" in pages[1].partition("</header>")[0]


def test_without_results_nothing_is_written_and_a_folder_that_is_not_writable_is_an_error(
    tmp_path: Path,
) -> None:
    assert write_report([], tmp_path / "none", ReportInfo("", "", 0)) == []
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(QuietmaxError, match="could not be written"):
        write_report(summarize(the_papers_own()), tmp_path / "file", ReportInfo("", "", 0))

"""The documentation: the site builds, links and named tests exist, errors are sentences, benchmarks run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.scripts import script

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
DEFINED = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
}


def _missing(text: str) -> list[str]:
    """Names of tests in backticks that no test file defines."""
    named = set(re.findall(r"`(test_\w+)`", text))
    files = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    return sorted(named - DEFINED - files)


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_exists(page: str) -> None:
    assert _missing((ROOT / page).read_text(encoding="utf-8")) == []


def test_a_name_without_a_test_is_noticed() -> None:
    assert _missing("see `test_that_nobody_wrote`") == ["test_that_nobody_wrote"]


@pytest.fixture(scope="module")
def refusals():
    """All errors that the sources raise."""
    return script("docs/making/error_list.py").refusals()


def test_the_list_of_errors_is_long_and_shows_no_python(refusals):
    assert len(refusals) > 300
    for refusal in refusals:
        assert "{" not in refusal.sentence.replace("{'", "").replace("={", ""), refusal


def test_every_error_is_a_sentence_that_ends(refusals):
    unfinished = [
        f"{each.place}: {each.sentence}" for each in refusals if each.sentence.rstrip()[-1] not in ".?…"
    ]
    assert not unfinished, "\n".join(unfinished)


paper_page = script("docs/making/paper_page.py")


def test_the_tables_of_the_page_on_the_paper_come_from_the_stored_run():
    """If this fails, run `python docs/making/paper_page.py`."""
    page = paper_page.PAGE.read_text(encoding="utf-8")
    assert paper_page.filled(page, paper_page.blocks()) == page


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ratios, run = script("benchmarks/ratios.py"), script("benchmarks/run.py")


def test_every_benchmark_is_run():
    scripts = {path.stem for path in BENCHMARKS.glob("*.py")} - {
        "run",
        "ratios",
        "adult_table",
        "unseen_images",
    }
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


LINKED_PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    assert "WARNING" not in told, told
    built = tmp_path / "site"
    assert "There is no model in" in (built / "errors" / "index.html").read_text(encoding="utf-8")
    assert "permute_and_flip" in (built / "reference" / "noise" / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", LINKED_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_within_the_project_leads_to_a_file(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in LINK.findall(text):
        if "://" in link or link.startswith(("#", "mailto:")):
            continue
        assert (page.parent / link.partition("#")[0]).exists(), (
            f"{page.name} links to {link}, which is not there"
        )


def test_every_page_of_the_site_is_in_its_navigation():
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert pages - {"dpsgd.md"} <= listed
    assert listed <= pages


def test_every_section_of_the_theory_that_the_code_cites_is_on_the_page():
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    cited = set(re.findall(r"THEORY (\d\.\d+)", source))
    headings = re.findall(
        r"^### ([\d., ]+) ", (ROOT / "docs" / "theory.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    sections = {number for heading in headings for number in re.findall(r"\d\.\d+", heading)}
    assert len(cited) > 10
    assert cited <= sections
    assert {f"3.{number}" for number in range(1, 14)} <= sections

"""The documentation: the site builds, links and named tests exist, errors are sentences, benchmarks run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.code_blocks import printed
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


def test_every_test_that_a_page_names_exists() -> None:
    missing = {page: _missing((ROOT / page).read_text(encoding="utf-8")) for page in PAGES}
    assert not any(missing.values()), missing
    assert _missing("see `test_that_nobody_wrote`") == ["test_that_nobody_wrote"]


def test_every_file_and_module_that_the_pages_for_contributors_name_exists() -> None:
    text = "".join(
        (ROOT / page).read_text(encoding="utf-8") for page in ("CONTRIBUTING.md", "docs/architecture.md")
    )
    package = ROOT / "src" / "quietmax"
    files = set(re.findall(r"`([\w/]+\.py)`", text))
    modules = {name.replace(".", "/") for name in re.findall(r"`([a-z_]\w*(?:\.[a-z_]\w*)+)`", text)} - {
        name.replace(".", "/") for name in files
    }
    assert len(files) > 20
    assert len(modules) > 40
    assert [name for name in files if not ((ROOT / name).exists() or any(package.rglob(name)))] == []
    assert [name for name in modules if not any(package.glob(f"{name}{end}") for end in ("", ".py"))] == []


def test_the_list_of_errors_is_long_and_has_sentences_that_end_and_show_no_python() -> None:
    found = script("docs/making/error_list.py").refusals()
    assert len(found) > 300
    for each in found:
        assert "{" not in each.sentence.replace("{'", "").replace("={", ""), each
        assert each.sentence.rstrip()[-1] in ".?…", each


paper_page = script("docs/making/paper_page.py")


def test_the_tables_of_the_page_on_the_paper_come_from_the_stored_run():
    """If this fails, run `python docs/making/paper_page.py`."""
    page = paper_page.PAGE.read_text(encoding="utf-8")
    assert paper_page.filled(page, paper_page.blocks()) == page


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ratios, run = script("benchmarks/ratios.py"), script("benchmarks/run.py")


def test_every_benchmark_is_run():
    others = {"run", "ratios", "peers", "adult_table", "unseen_images"}
    assert {path.stem for path in BENCHMARKS.glob("*.py")} - others == {each.name for each in run.BENCHMARKS}


def test_a_row_has_the_ratio_within_each_run_and_its_spread(tmp_path, monkeypatch, capsys):
    kept = tmp_path / "rows.jsonl"
    monkeypatch.setenv(ratios.ROWS, str(kept))
    ratios.report("b", "case", [1.0, 2.0, 4.0], "s", peer="other", theirs=[3.0, 8.0, 8.0])
    ratios.report("b", "alone", [5.0], "s")
    first, second = (json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines())
    assert (first["ours"], first["theirs"], first["ratio"]) == (2.0, 8.0, 3.0)
    assert (first["ratio_low"], first["ratio_high"], first["runs"]) == (2.0, 4.0, 3)
    assert second["ratio"] is None
    assert "ratio 3.00 [2.00, 4.00]" in capsys.readouterr().err
    assert run._line(first) == "| case | 2 | s | other | 8 | **3.00** | 2.00 to 4.00 | 3 |"
    with pytest.raises(ValueError):
        ratios.report("b", "uneven", [1.0], "s", peer="other", theirs=[1.0, 2.0])


def _row(case: str, ratio: float | None) -> dict[str, object]:
    peer = {"peer": "other", "theirs": 8.0} if ratio else {"peer": None, "theirs": None}
    spread = {"ratio": ratio, "ratio_low": ratio, "ratio_high": ratio}
    return {"case": case, "ours": 2.0, "unit": "s", **peer, **spread, "runs": 3}


def test_the_first_table_has_the_ratios_of_the_chosen_cases_with_the_date_of_their_part(tmp_path):
    noise, dpsgd, shadow = (
        next(each for each in run.BENCHMARKS if each.name == name)
        for name in ("noise", "dpsgd", "shadow_attack")
    )
    rows = [_row(noise.glance[0], 4.0), _row("not chosen", 5.0), _row(noise.glance[1], None)]
    printed = f"| {noise.glance[2]} | 1 | s | prose | 1 | **9.00** | 9.00 to 9.00 | 1 |"
    parts = {
        "noise": run.part(noise, rows, printed, quick=False),
        "dpsgd": run.part(dpsgd, [_row(dpsgd.glance[0], 0.0625)], "", quick=True),
        "shadow_attack": run.part(shadow, [], f"{shadow.glance[0]}: ratio 7", quick=False),
    }
    dated = re.sub(r"\.py`, \d{4}-\d\d-\d\d;", ".py`, 2001-02-03;", run.page(parts))
    (tmp_path / "page.md").write_text(dated, encoding="utf-8")
    table = run.summary(run.kept_parts(tmp_path / "page.md")).splitlines()
    assert [line for line in table if line.startswith("| `")] == [
        f"| `noise` | {noise.glance[0]} | other | **4.00** | 4.00 to 4.00 | 2001-02-03 |",
        f"| `dpsgd` | {dpsgd.glance[0]} | other | **0.062** | 0.062 to 0.062 | 2001-02-03, a quick run |",
    ]


def test_the_page_in_the_documentation_is_as_the_runner_writes_it():
    """If this fails, run `python benchmarks/run.py --only NAME` for the part that was changed."""
    parts = run.kept_parts(run.RESULTS)
    assert run.page(parts) == run.RESULTS.read_text(encoding="utf-8")
    assert run.summary(parts) == run.GLANCE.read_text(encoding="utf-8")


def test_benchmarks_with_a_page_of_their_own_run_only_when_asked_for():
    usual = {each.name for each in run.chosen(None, everything=False)}
    alone = {"soak", "image_accuracy", "out_of_core"}
    assert "noise" in usual
    assert not usual & alone
    assert [each.name for each in run.chosen(["soak"], everything=False)] == ["soak"]
    assert run.chosen(None, everything=True) == list(run.BENCHMARKS)


@pytest.mark.parametrize("ends", ["by failing", "by an interrupt"])
def test_finished_parts_stay_when_a_later_benchmark_ends(ends, tmp_path, monkeypatch):
    path = tmp_path / "page.md"
    path.write_text(run.page({"dpsgd": "## DP-SGD\n\nmeasured before"}), encoding="utf-8")

    def measured(benchmark, _quick):
        if benchmark.name != "dpsgd":
            return [_row(case, 4.0) for case in benchmark.glance], "", None
        if ends == "by an interrupt":
            raise KeyboardInterrupt
        return [], "half a table", "ended with exit code 1"

    monkeypatch.setattr(run, "measured", measured)
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "noise", "dpsgd", "--page", str(path)])
    with pytest.raises(SystemExit, match=r"dpsgd: ended with exit code 1|Stopped during dpsgd"):
        run.main()
    parts = run.kept_parts(path)
    assert parts["dpsgd"] == "## DP-SGD\n\nmeasured before"
    assert "**4.00**" in parts["noise"]


def test_a_run_without_a_case_of_the_first_table_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "measured", lambda *_: ([_row("another", 4.0)], "", None))
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "dpsgd", "--page", str(tmp_path / "page.md")])
    with pytest.raises(SystemExit, match="dpsgd: no row for 44 networks, 100 epochs"):
        run.main()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [each.name for each in run.chosen(None, everything=False) if each.name != "observed"]
)
def test_a_benchmark_runs_in_its_quick_version(name, tmp_path):
    path = tmp_path / "page.md"
    printed([sys.executable, str(BENCHMARKS / "run.py"), "--quick", "--only", name, "--page", str(path)])
    assert len(run.kept_parts(path)[name].splitlines()) > 5


LINK = re.compile(r"\]\(([^)\s]+)\)")


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    built = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(built)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    told = printed(command, cwd=ROOT, env=quiet, stderr=subprocess.STDOUT)
    assert "WARNING" not in told, told
    assert "There is no model in" in (built / "errors" / "index.html").read_text(encoding="utf-8")
    assert "permute_and_flip" in (built / "reference" / "privacy" / "index.html").read_text(encoding="utf-8")


def test_every_link_within_the_project_leads_to_a_file() -> None:
    broken = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        own = (link for link in LINK.findall(text) if "://" not in link and link[0] != "#")
        broken += [
            f"{page.name}: {link}" for link in own if not (page.parent / link.partition("#")[0]).exists()
        ]
    assert not broken


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


def test_the_forecasts_on_the_page_of_tables_come_from_the_stored_run(monkeypatch):
    """If this fails, run `python benchmarks/forecast.py page`."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    forecast = script("benchmarks/forecast.py")
    stored = json.loads(forecast.RESULTS.read_text(encoding="utf-8"))
    page = forecast.PAGE.read_text(encoding="utf-8")
    assert forecast.filled(page, stored["cases"]) == page
    assert not set(stored["chosen_on"]) & {each["table"] for each in stored["cases"]}

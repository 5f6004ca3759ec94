"""The documentation site builds without a warning, and every link within the project leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
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

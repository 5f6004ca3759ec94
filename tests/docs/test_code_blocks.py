"""Every code block of the README and the documentation works when pasted, from an empty folder, in the page's order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.code_blocks import blocks_of, commands, run

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
BLOCKS = {page.relative_to(ROOT).as_posix(): blocks for page in PAGES if (blocks := blocks_of(page))}
# Blocks that no test runs, by page; each says why. A new one has to be entered here.
NOT_RUN = {
    "README.md": 1,
    "docs/quick-start.md": 1,
    "docs/reproduce.md": 2,
    "docs/tutorials/paper.md": 2,
}


@pytest.mark.parametrize("page", [page for page, blocks in BLOCKS.items() if any(b.runs for b in blocks)])
def test_the_blocks_of_a_page_run_when_pasted(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUIETMAX_LEDGER", str(tmp_path / "ledger.sqlite"))
    namespace = {"__name__": "__main__"}
    for block in BLOCKS[page]:
        if block.runs:
            run(block, namespace)


def test_the_blocks_that_are_not_run_are_known_and_say_why():
    left_out = {page: [b for b in blocks if not b.runs and not b.served] for page, blocks in BLOCKS.items()}
    assert {page: len(blocks) for page, blocks in left_out.items() if blocks} == NOT_RUN
    for blocks in left_out.values():
        for block in blocks:
            assert len(block.mark.removeprefix("not run:").split()) >= 2, (
                f"{block.page.name}:{block.line} says no reason"
            )


def test_a_block_that_fails_is_reported_with_its_page(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nvalue = 1\n```\n\n"
        "<!-- exits with 1 -->\n```sh\nquietmax card \\\n  absent # no such folder\n```\n\n"
        "```sh\nquietmax card absent\n```\n\n```python\nassert value == 2\n```\n\n<!-- asks -->\n```sh\nls\n```\n",
        encoding="utf-8",
    )
    first, refused, failing, wrong, foreign = blocks_of(page)
    assert commands(refused.text) == [["quietmax", "card", "absent"]]
    assert foreign.served
    namespace: dict[str, object] = {}
    monkeypatch.chdir(tmp_path)
    run(first, namespace)
    run(refused, namespace)
    with pytest.raises(AssertionError, match=r"page\.md:11"):
        run(failing, namespace)
    with pytest.raises(AssertionError):
        run(wrong, namespace)
    with pytest.raises(AssertionError, match="not run here"):
        run(foreign, namespace)

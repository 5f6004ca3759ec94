"""Every code block of the README and the documentation works when pasted, from an empty folder, in the page's order."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from quietmax.experiments import report
from quietmax.ledger import Ledger
from tests.docs.code_blocks import blocks_of, commands, exit_code, free_port, printed, run, serving

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
BLOCKS = {page.relative_to(ROOT).as_posix(): blocks for page in PAGES if (blocks := blocks_of(page))}
# Blocks that no test runs, by page; each says why. A new one has to be entered here.
NOT_RUN = {
    "README.md": 1,
    "docs/how-to/deploy.md": 5,
    "docs/how-to/extend.md": 5,
    "docs/how-to/large-data.md": 2,
    "docs/quick-start.md": 1,
    "docs/reproduce.md": 1,
    "docs/service.md": 1,
    "docs/tutorials/operate-the-service.md": 1,
}


QUIETMAX = [sys.executable, "-c", "from quietmax.cli import main; main()"]
# What the requests of a page print: class names, as JSON, from Python and over gRPC.
ANSWERED = {
    "README.md": (r"^\['(yes|no)'\]$",),
    "docs/service.md": (r'"data": ?\["(yes|no)"', r"\[b'(yes|no)' b'(yes|no)'\]"),
    "docs/tutorials/operate-the-service.md": (
        r"^(yes|no),0\.",
        "spent more than remains",
        "Proposed",
        "No faults",
    ),
    "docs/tutorials/your-own-table.md": (r'"data": ?\["(yes|no)"', r"\['(yes|no)'\]"),
}


@pytest.mark.parametrize(
    "page", [page for page, blocks in BLOCKS.items() if any(b.runs or b.served for b in blocks)]
)
def test_the_blocks_of_a_page_run_when_pasted_and_its_requests_are_answered(
    page, tmp_path, monkeypatch, request
):
    if page in ANSWERED and not (shutil.which("curl") and shutil.which("bash")):
        pytest.skip("curl is missing; install it with: apt-get install -y curl")
    if page == "docs/paper.md":  # dozens of figures, which the tests of the report draw
        monkeypatch.setattr(report, "write_figures", lambda *_: [])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUIETMAX_LEDGER", str(tmp_path / "ledger.sqlite"))
    if page == "docs/tutorials/operate-the-service.md":
        monkeypatch.setenv("QUIETMAX_LEDGER", request.getfixturevalue("postgres_address"))
    namespace = {"__name__": "__main__"}
    ports = {shown: str(free_port()) for shown in ("8080", "8081")}
    told, key = "", ""
    with ExitStack() as services:
        services.callback(_end_service, tmp_path / "service.pid")
        for block in BLOCKS[page]:
            if block.runs:
                run(block, namespace)
            elif block.mark == "serves":
                *others, served = commands(block.text)
                assert [exit_code(words) for words in others] == [0] * len(others)
                with Ledger(tmp_path / "ledger.sqlite") as ledger:
                    key, _ = ledger.create_key("reader")
                command = [*QUIETMAX, *(ports.get(word, word) for word in served[1:])]
                services.enter_context(serving(command, int(ports["8080"])))
            elif block.mark == "asks":
                told += _ask(block, ports, key)
    assert bool(told) == (page in ANSWERED)
    assert '"error"' not in told
    for expected in ANSWERED.get(page, ()):
        assert re.search(expected, told, re.MULTILINE), told


def _end_service(file: Path) -> None:
    """End what a page has started in the background, if a block before its end failed."""
    if file.exists():
        with suppress(ProcessLookupError):
            os.kill(int(file.read_text(encoding="utf-8")), signal.SIGTERM)


def _ask(block, ports: dict[str, str], key: str) -> str:
    text = re.sub(r"(127\.0\.0\.1:|--port )(\d+)", lambda found: found[1] + ports[found[2]], block.text)
    if block.language == "python":
        program = [sys.executable, "-c", text.replace("the key that was shown once", key)]
    else:
        program = ["bash", "-ec", text]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return printed(program, env={**os.environ, "PATH": path, "KEY": key, "NO_PROXY": "*"})


def test_the_blocks_that_are_not_run_are_known_and_say_why():
    left_out = {page: [b for b in blocks if not b.runs and not b.served] for page, blocks in BLOCKS.items()}
    assert {page: len(blocks) for page, blocks in left_out.items() if blocks} == NOT_RUN
    for blocks in left_out.values():
        for block in blocks:
            assert len(block.mark.removeprefix("not run:").split()) >= 2, (
                f"{block.page.name}:{block.line} says no reason"
            )


def test_the_owners_path_of_the_readme_has_ten_lines():
    programs = [
        block for block in BLOCKS["README.md"] if block.saved_as is None and not block.mark.startswith("not")
    ]
    assert sum(len(block.text.splitlines()) for block in programs) == 10


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


def test_a_file_that_the_reader_saves_and_the_output_of_a_command_are_written(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- file: facts.toml -->\n```toml\nlabel = 1\n```\n\n```toml\nshown = 1\n```\n\n"
        "```sh\nquietmax --version > version.txt\n```\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    for block in blocks_of(page):
        run(block, {})
    assert (tmp_path / "facts.toml").read_text(encoding="utf-8") == "label = 1\n"
    assert (tmp_path / "version.txt").read_text(encoding="utf-8").startswith("quietmax ")

"""Every code block of the README and the documentation works when pasted, from an empty folder, in the page's order."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from quietmax.ledger import Ledger
from tests.docs.code_blocks import blocks_of, commands, exit_code, run

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
BLOCKS = {page.relative_to(ROOT).as_posix(): blocks for page in PAGES if (blocks := blocks_of(page))}
# Blocks that no test runs, by page; each says why. A new one has to be entered here.
NOT_RUN = {
    "README.md": 1,
    "docs/how-to/deploy.md": 6,
    "docs/how-to/extend.md": 5,
    "docs/how-to/large-data.md": 2,
    "docs/how-to/own-encoder.md": 1,
    "docs/quick-start.md": 2,
    "docs/reproduce.md": 1,
    "docs/service.md": 1,
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


QUIETMAX = [sys.executable, "-c", "from quietmax.cli import main; main()"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _serving(words: list[str], port: int):
    service = subprocess.Popen(
        [*QUIETMAX, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        _wait_until_ready(service, port)
        yield
    finally:
        service.terminate()
        service.communicate(timeout=60)


def _wait_until_ready(service: subprocess.Popen[str], port: int) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        assert service.poll() is None, service.communicate()[1]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    pytest.fail("the service did not become ready")


def _ask(block, ports: dict[str, str], key: str) -> str:
    text = re.sub(r"127\.0\.0\.1:(\d+)", lambda found: f"127.0.0.1:{ports[found[1]]}", block.text)
    if block.language == "python":
        program = [sys.executable, "-c", text.replace("the key that was shown once", key)]
    else:
        program = ["bash", "-ec", text]
    asked = subprocess.run(
        program, env={**os.environ, "KEY": key, "NO_PROXY": "*"}, capture_output=True, text=True, check=False
    )
    assert asked.returncode == 0, f"{block.page.name}:{block.line}\n{asked.stderr}"
    return asked.stdout


@pytest.mark.parametrize("page", ["README.md", "docs/service.md", "docs/tutorials/your-own-table.md"])
def test_a_page_that_serves_and_asks_gets_answers(page, tmp_path, monkeypatch):
    if shutil.which("curl") is None or shutil.which("bash") is None:
        pytest.skip("curl is missing; install it with: apt-get install -y curl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUIETMAX_LEDGER", str(tmp_path / "ledger.sqlite"))
    blocks = blocks_of(ROOT / page)
    serves = [block for block in blocks if block.mark == "serves"]
    namespace = {"__name__": "__main__"}
    for block in itertools.takewhile(lambda block: not block.served, blocks):
        if block.runs:
            run(block, namespace)
    *others, served = commands(serves[0].text)
    assert [exit_code(words) for words in others] == [0] * len(others)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        key, _ = ledger.create_key("reader")
    ports = {shown: str(_free_port()) for shown in ("8080", "8081")}
    with _serving([ports.get(word, word) for word in served[1:]], int(ports["8080"])):
        told = "".join(_ask(block, ports, key) for block in blocks if block.mark == "asks")
    if page == "README.md":
        assert re.fullmatch(r"\['(yes|no)'\]", told.strip()), told
        return
    if page == "docs/service.md":
        assert re.search(r"\[b'(yes|no)' b'(yes|no)'\]", told), told  # over gRPC
    assert '"error"' not in told
    assert '"outputs"' in told
    assert re.search(r'"data": ?\["(yes|no)"', told), told  # a table: class names come back

"""Finds the code blocks of a page and runs them: Python in one namespace, `quietmax` commands in this process.

The output of a command may go to a file, as in ``quietmax schema draft people.csv > people.toml``.

An HTML comment on the line before a fence says what is special about a block:

    <!-- not run: why -->          not run with its page
    <!-- exits with 1 -->          a command that is meant to be refused
    <!-- serves -->                stays in the foreground; run by `test_code_blocks`, with what follows on the page
    <!-- asks -->                  needs the service that the page has started
    <!-- file: people.toml -->     not a program: the reader saves it as this file, and so does the test
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cli.conftest import run as run_command

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"<!--\s*(not run: .+?|exits with \d|serves|asks|file: [\w.-]+)\s*-->\s*\Z")
LANGUAGES = ("python", "sh")
# What is shown but is no program.
SHOWN = ("", "text", "toml", "bibtex", "json", "yaml", "nginx")


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its text, the line it begins on and its mark."""

    page: Path
    line: int
    language: str
    text: str
    mark: str

    @property
    def runs(self) -> bool:
        return not self.served and not self.mark.startswith("not run")

    @property
    def served(self) -> bool:
        return self.mark in ("serves", "asks")

    @property
    def saved_as(self) -> str | None:
        return self.mark.removeprefix("file: ") if self.mark.startswith("file: ") else None

    @property
    def expected_exit(self) -> int:
        return int(self.mark.removeprefix("exits with ")) if self.mark.startswith("exits") else 0


def blocks_of(page: Path, section: str = "") -> list[Block]:
    """The programs of a page or of one section, and the files that it tells the reader to save, in order."""
    text = page.read_text(encoding="utf-8")
    start = text.index(f"\n## {section}\n") if section else 0
    end = text.find("\n## ", start + 1) if section else len(text)
    found = []
    for match in FENCE.finditer(text, start, end if end > 0 else len(text)):
        language, content = match.groups()
        line = text.count("\n", 0, match.start()) + 1
        assert language in LANGUAGES + SHOWN, (
            f"{page.name}:{line} has a block of unknown language {language!r}"
        )
        mark = MARK.search(text[: match.start()])
        block = Block(page, line, language, content, mark.group(1) if mark else "")
        if language in LANGUAGES or block.saved_as:
            found.append(block)
    return found


def run(block: Block, namespace: dict[str, Any]) -> str:
    """Run one block and return what it printed; fails with the page and line if it fails."""
    if block.saved_as is not None:
        Path(block.saved_as).write_text(block.text, encoding="utf-8")
        return ""
    told = io.StringIO()
    place = f"{block.page.name}:{block.line}"
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        if block.language == "python":
            code = compile("\n" * block.line + block.text, str(block.page), "exec")
            exec(code, namespace)
        else:
            for words in commands(block.text):
                ended = exit_code(words)
                assert ended == block.expected_exit, f"{place}: {' '.join(words)}\n{told.getvalue()}"
    return told.getvalue()


def commands(text: str) -> list[list[str]]:
    """The command lines of a shell block, as words; comments are left out, continued lines joined."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def exit_code(words: list[str]) -> int:
    """Run a `quietmax` command in this process; its exit code."""
    assert words[0] == "quietmax", f"{words[0]} is not run here; mark its block '<!-- not run: why -->'"
    file = None
    if ">" in words:
        *words, _, file = words
    code, out, err = run_command(*words[1:])
    if file is None:
        sys.stdout.write(out)
    else:
        Path(file).write_text(out, encoding="utf-8")
    sys.stderr.write(err)
    return code


def printed(command: Sequence[str], **settings: Any) -> str:
    """Run a program until it ends without an error, and return what it printed."""
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    done = subprocess.run(command, text=True, check=False, **(streams | settings))
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return str(done.stdout)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(command: Sequence[str], port: int, **settings: Any) -> Iterator[None]:
    """A command that serves, from the time when it is ready; stopped at the end."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **settings
    ) as service:
        try:
            _wait_until_ready(service, f"http://127.0.0.1:{port}/v2/health/ready")
            yield
        finally:
            service.terminate()
            service.communicate(timeout=60)


def _wait_until_ready(service: subprocess.Popen[str], url: str) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        assert service.poll() is None, service.communicate()[1]
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError("the service did not become ready")

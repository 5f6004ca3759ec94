"""The documentation names tests as evidence; each of them exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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

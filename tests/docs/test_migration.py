"""What the page about earlier versions says of files is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from quietmax.ledger.database import MIGRATIONS

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text(encoding="utf-8")


def test_the_page_lists_every_schema_of_the_ledger() -> None:
    listed = PAGE.split("| schema | what is new |\n")[1].split("\n\n")[0]
    assert [int(number) for number in re.findall(r"^\| (\d+) \|", listed, re.MULTILINE)] == [
        *range(2, len(MIGRATIONS) + 1)
    ]
    assert f"ledgers of schema {len(MIGRATIONS)}" in PAGE

"""Classes of error found in other libraries are noticed by our checks when they are put into our code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.seeded_faults import BY_NAME, FAULTS

ROOT = Path(__file__).parents[1]
FAST = ["float noise", "cache without key"]
OTHERS = [fault.name for fault in FAULTS if fault.name not in FAST]


@pytest.mark.parametrize(
    "names", [FAST, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["fast", "others"]
)
def test_each_seeded_fault_fails_the_check_that_is_named_for_it_which_passes_without_it(
    names: list[str],
) -> None:
    """With the fault, that test runs and fails; without, all its cases pass."""
    told = subprocess.check_output(
        [sys.executable, "-m", "tests.seeded_faults", *names], cwd=ROOT, text=True, timeout=900
    )
    found = {each["name"]: each for each in map(json.loads, told.splitlines())}
    assert list(found) == names
    for name, each in found.items():
        seeded, unchanged = each["seeded"], each["unchanged"]
        assert seeded["used"], f"{name}: the changed module was not imported"
        assert not seeded["broken"], (name, seeded)
        assert [failed.partition("[")[0] for failed in seeded["failed"]] == [
            BY_NAME[name].check.partition("[")[0]
        ], (name, seeded)
        assert unchanged["passed"], (name, unchanged)
        assert not unchanged["failed"] + unchanged["broken"], (name, unchanged)


def test_there_are_thirteen_classes_and_every_fault_fits_the_present_code() -> None:
    assert len({fault.name.partition(":")[0] for fault in FAULTS}) == 13
    for fault in FAULTS:
        compile(fault.source(), str(fault.path), "exec")


def test_the_page_on_quality_lists_every_fault_where_it_was_put_and_what_caught_it() -> None:
    page = (ROOT / "docs" / "quality.md").read_text(encoding="utf-8")
    for fault in FAULTS:
        name = fault.check.partition("::")[2].partition("[")[0]
        assert f"| {fault.name} | `{fault.module}` | {fault.kind}: `{name}` |\n" in page

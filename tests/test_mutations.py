"""What `make mutations` does with a mutant that would take all memory of the machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KILLED = "import sys; from tests.mutations import killed; sys.exit(killed(None, [[sys.argv[1]]], 100.0))"


@pytest.mark.parametrize(("megabytes", "killed"), [(1000, False), (5000, True)])
def test_a_mutant_that_needs_too_much_memory_is_killed(megabytes: int, killed: bool, tmp_path: Path) -> None:
    tests = tmp_path / "test_memory.py"
    tests.write_text(
        f"def test_memory():\n    import torch\n    torch.ones(2)\n    bytearray({megabytes} * 2**20)\n"
    )
    done = subprocess.run([sys.executable, "-c", KILLED, str(tests)], cwd=ROOT, check=False)
    assert done.returncode == killed

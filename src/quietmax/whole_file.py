"""Files that are there whole or not at all, whatever ends the writing."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a file beside the path, flush it and put it in place in one step.

    A pipe or a device cannot be replaced and is written to directly.
    """
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():
        write(place)
        return
    staging = place.with_name(f".quietmax-{secrets.token_hex(8)}")
    try:
        write(staging)
        with staging.open("rb") as written:
            os.fsync(written.fileno())
        staging.replace(place)
        folder = os.open(place.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        staging.unlink(missing_ok=True)

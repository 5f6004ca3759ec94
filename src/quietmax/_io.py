"""Files that are there whole or not at all, whatever ends the writing."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quietmax.errors import QuietmaxError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def atomic_write(path: Path, write: Callable[[Path], Any]) -> None:
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


def check_figure(path: str | Path | None) -> None:
    """Refuse a file that `write_picture` could not write, before the work whose result it shows; None asks for none."""
    if path is None:
        return
    from matplotlib.figure import Figure

    file = Path(path)
    if file.suffix.lower().removeprefix(".") not in Figure().canvas.get_supported_filetypes():
        problem = f"a picture cannot end in '{file.suffix}'" if file.suffix else "its name has no ending"
    elif not file.parent.is_dir():
        problem = f"there is no folder {file.parent}"
    elif file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        problem = "it is a folder, or not writable"
    else:
        return
    raise QuietmaxError(
        f"The plot cannot be written to {path}, as {problem}; choose a writable .png, .pdf or .svg file."
    )


def write_figure(figure: Figure, path: str | Path) -> Path:
    """Write the figure in the format that the file's ending names."""
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as problem:
        raise QuietmaxError(
            f"The plot could not be written to {path} ({problem}); choose a writable .png, .pdf or .svg file."
        ) from problem
    return Path(path)

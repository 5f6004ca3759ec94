"""Writing a figure to a file, or one sentence why it could not be written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quietmax.errors import QuietmaxError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_picture(figure: Figure, path: str | Path) -> Path:
    """Write the figure in the format that the file's ending names."""
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as problem:
        raise QuietmaxError(
            f"The plot could not be written to {path} ({problem}); choose a writable .png, .pdf or .svg file."
        ) from problem
    return Path(path)

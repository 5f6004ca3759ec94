"""Atomic file writes, and writing figures."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quietmax.errors import QuietmaxError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STAGING = ".quietmax-"


def atomic_write(path: Path, write: Callable[[Path], Any], *, private: bool = False) -> None:
    """Write a file so that it is replaced completely or not at all, whatever ends the writing.

    `write` fills a temporary file in the same folder, which is flushed to the disk and then renamed. A pipe or a device
    cannot be replaced and is written to directly. Nobody who could not read the earlier file can read the new one; what
    is `private` only its owner can read.
    """
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():
        write(place)
        return
    staging = place.with_name(f"{_STAGING}{secrets.token_hex(8)}")
    mode = 0o600 if private else place.stat().st_mode & 0o666 if place.exists() else 0o666
    try:
        os.close(os.open(staging, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
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


def remove_staging(folder: Path) -> None:
    """Remove the temporary files of writers that were killed."""
    for file in folder.glob(f"{_STAGING}{'[0-9a-f]' * 16}"):
        file.unlink(missing_ok=True)


def check_figure(path: str | Path | None) -> None:
    """Raise `QuietmaxError` for a path that `write_figure` could not write to, before the figure is computed."""
    if path is None:
        return
    from matplotlib.figure import Figure

    file = Path(path)
    if file.suffix.lower().removeprefix(".") not in Figure().canvas.get_supported_filetypes():
        problem = f"the format '{file.suffix}' is not supported" if file.suffix else "it has no extension"
    elif not (problem := _why_not_writable(file)):
        return
    raise QuietmaxError(
        f"The figure cannot be written to {path}: {problem}. A writable .png, .pdf or .svg file is required."
    )


def _why_not_writable(file: Path) -> str:
    """Return why a file cannot be written; nothing if it can."""
    if not file.parent.is_dir():
        return f"the folder {file.parent} does not exist"
    writable = os.access(file if file.exists() else file.parent, os.W_OK)
    return "" if writable and not file.is_dir() else "it is a folder or not writable"


def check_page(path: Path | None) -> None:
    """Raise `QuietmaxError` for a path that a page cannot be written to, before it is made."""
    if path is not None and (problem := _why_not_writable(path)):
        raise QuietmaxError(f"The page cannot be written to {path}: {problem}.")


def write_text(content: str, path: Path, what: str, *, private: bool = False) -> None:
    """Write a text file atomically; `what` is its name in messages."""
    try:
        atomic_write(path, lambda staging: staging.write_text(content, encoding="utf-8"), private=private)
    except OSError as problem:
        raise QuietmaxError(f"{what} cannot be written to {path}: {problem.strerror}.") from problem


def write_figure(figure: Figure, path: str | Path) -> Path:
    """Write a figure in the format that the file's extension names."""
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as problem:
        raise QuietmaxError(f"The figure could not be written to {path} ({problem}).") from problem
    return Path(path)

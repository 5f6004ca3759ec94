"""Fetching official files: with progress, resumed after an interruption, checked, and never half in place.

By hand because the standard library's `urlretrieve` cannot resume and no other dependency speaks HTTP.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message
from pathlib import Path

from quietmax import __version__
from quietmax.data.readers import Download
from quietmax.errors import DataUnavailable

Progress = Callable[[str, int, int | None], None]
"""Called with the file's name, the bytes there so far, and the bytes in all where known."""

_BLOCK_BYTES = 1 << 18
_FRUITLESS_ATTEMPTS = 3
_TIMEOUT_SECONDS = 60.0


def fetch(
    download: Download, folder: Path, *, progress: Progress | None = None, timeout: float = _TIMEOUT_SECONDS
) -> Path:
    """Fetch an official file into the folder and return its path; a file of that name that is there is kept.

    Bytes go to `<name>.part`, which a later call continues (HTTP Range).  The part becomes the file in one
    step, and only if its checksum is right; otherwise it is removed.
    """
    target, part = folder / download.name, folder / f"{download.name}.part"
    if target.is_file():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _transfer(download, part, progress, timeout)
        found = _sha256(part)
        if download.sha256 not in (None, found):
            part.unlink()
            raise DataUnavailable(
                f"{download.url} gave a file with SHA-256 checksum {found} instead of {download.sha256}, so "
                "it was removed; try again later or get the official file by other means."
            )
        os.replace(part, target)
    except OSError as error:
        raise DataUnavailable(
            f"{download.name} cannot be written into {folder} ({error.strerror or error}); make room or "
            "choose another data directory."
        ) from error
    return target


def _transfer(download: Download, part: Path, progress: Progress | None, timeout: float) -> None:
    """Fill the part, going on where an interrupted transfer stopped until several attempts bring nothing."""
    fruitless = 0
    while True:
        before = _size(part)
        try:
            return _attempt(download, part, progress, timeout)
        except _Interrupted as interruption:
            after = _size(part)
            fruitless = 0 if after > before else fruitless + 1
            if fruitless >= _FRUITLESS_ATTEMPTS or not (before or after):
                kept = f", the {after} bytes that arrived are kept and continued" if after else ""
                raise DataUnavailable(
                    f"{download.url} could not be fetched ({interruption}); check the connection and try "
                    f"again{kept}."
                ) from interruption


def _attempt(download: Download, part: Path, progress: Progress | None, timeout: float) -> None:
    """Ask for what the part lacks and append it; raise _Interrupted if the file is not whole afterwards."""
    start = _size(part)
    headers = {"Accept-Encoding": "identity", "User-Agent": f"quietmax/{__version__}"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        response = urllib.request.urlopen(
            urllib.request.Request(download.url, headers=headers), timeout=timeout
        )
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and start:
            if _total(error.headers, start) == start:
                return
            part.unlink()
            raise _Interrupted("the server has another file than the one begun") from error
        raise DataUnavailable(
            f"{download.url} answered {error.code} ({error.reason}) instead of the file; get "
            f"{download.name} by other means and put it into the data directory."
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise _Interrupted(getattr(error, "reason", None) or error) from error
    with response:
        continued = response.status == http.client.PARTIAL_CONTENT
        if continued and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            part.unlink()
            raise _Interrupted("the server continued at another place than asked")
        size = start if continued else 0
        total = _total(response.headers, size)
        with part.open("ab" if continued else "wb") as stream:
            while block := _next_block(response):
                stream.write(block)
                size += len(block)
                if progress is not None:
                    progress(download.name, size, total)
    if total is not None and size != total:
        raise _Interrupted(f"the connection ended after {size} of {total} bytes")


class _Interrupted(Exception):
    """The transfer ended before the file was whole."""


def _next_block(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(_BLOCK_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise _Interrupted(error) from error


def _total(headers: Message, start: int) -> int | None:
    """Return the size of the whole file as the server states it, the answer beginning at byte `start`."""
    stated = headers.get("Content-Range", "").rpartition("/")[2]
    if stated.isdigit():
        return int(stated)
    length = headers.get("Content-Length", "")
    return start + int(length) if length.isdigit() else None


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

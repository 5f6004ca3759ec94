"""Download official files: with progress, resumable, verified, and atomic.

Written by hand because the standard library's `urlretrieve` cannot resume and no other dependency is an HTTP client.
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

DownloadProgress = Callable[[str, int, int | None], None]
"""Called with the file's name, the number of bytes so far, and the total where known."""

_BLOCK_BYTES = 1 << 18
_MAX_FAILED_ATTEMPTS = 3
_TIMEOUT_SECONDS = 60.0


def fetch(
    download: Download,
    folder: Path,
    *,
    progress: DownloadProgress | None = None,
    timeout: float = _TIMEOUT_SECONDS,
) -> Path:
    """Download an official file, unless the folder already has a file of that name.

    The bytes go to `<name>.part`, which a later call resumes (HTTP Range).  That file is renamed when it is complete
    and has the right checksum, and removed if it has another.

    Parameters
    ----------
    download : Download
        The file and its address.
    folder : Path
        Where to put it.
    progress : callable, optional
        Called with the file's name, the number of bytes so far, and the total or None.
    timeout : float
        Seconds without data after which an attempt ends.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    DataUnavailable
        If the file cannot be fetched or written, or has the wrong checksum.
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
                f"The file from {download.url} has the SHA-256 checksum {found} instead of {download.sha256}; it was "
                "removed."
            )
        os.replace(part, target)
    except OSError as error:
        raise DataUnavailable(
            f"{download.name} cannot be written to the folder {folder}: {error.strerror or error}."
        ) from error
    return target


def _transfer(download: Download, part: Path, progress: DownloadProgress | None, timeout: float) -> None:
    """Fill the partial file, resuming interrupted transfers until several attempts in a row bring nothing."""
    failed = 0
    while True:
        before = _size(part)
        try:
            return _attempt(download, part, progress, timeout)
        except _Interrupted as interruption:
            after = _size(part)
            failed = 0 if after > before else failed + 1
            if failed >= _MAX_FAILED_ATTEMPTS or not (before or after):
                kept = f" The next attempt resumes after the {after} bytes received so far." if after else ""
                raise DataUnavailable(
                    f"The download of {download.url} failed: {interruption}.{kept}"
                ) from interruption


def _attempt(download: Download, part: Path, progress: DownloadProgress | None, timeout: float) -> None:
    """Request what the partial file lacks and append it; raise _Interrupted if it is not complete afterwards."""
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
            raise _Interrupted("the file on the server has changed") from error
        raise DataUnavailable(
            f"The download of {download.url} failed: the server answered {error.code} ({error.reason})."
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise _Interrupted(getattr(error, "reason", None) or error) from error
    with response:
        continued = response.status == http.client.PARTIAL_CONTENT
        if continued and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            part.unlink()
            raise _Interrupted("the server resumed at the wrong byte")
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
    """The transfer ended before the file was complete."""


def _next_block(response: http.client.HTTPResponse) -> bytes:
    """Return the next bytes, or none at the end."""
    try:
        return response.read(_BLOCK_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise _Interrupted(error) from error


def _total(headers: Message, start: int) -> int | None:
    """Return the size of the complete file as the server states it in a response that begins at byte `start`."""
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

"""Where data files lie, in which forms they may come, and whether they are the expected ones."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar, cast

from quietmax.errors import DataUnavailable

Read = TypeVar("Read")
_FORMS = ("", ".gz", ".xz")
_UNREADABLE = (OSError, EOFError, tarfile.TarError, zlib.error, lzma.LZMAError)


@dataclass(frozen=True)
class Download:
    """An official file: its name, its address and, where known, the SHA-256 of its bytes."""

    name: str
    url: str
    sha256: str | None = None


@dataclass(frozen=True)
class Part:
    """One piece of a data set: a file of this name (or that with .gz or .xz), or a member of an archive.

    `sha256` belongs to the decompressed content.
    """

    name: str
    sha256: str | None = None
    archive: str | None = None


def default_data_dir() -> Path:
    """Return the folder of data files: QUIETMAX_DATA, else `quietmax` in the user's cache folder."""
    if named := os.environ.get("QUIETMAX_DATA"):
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "quietmax"


@dataclass(frozen=True)
class Source:
    """The places in which the files of one data set may lie, the first being where a download goes.

    `verify` says whether contents with a known checksum are compared with it.
    """

    places: tuple[Path, ...]
    verify: bool = True

    @classmethod
    def of(
        cls, data_dir: str | os.PathLike[str] | None, folders: Sequence[str], *, verify: bool = True
    ) -> Source:
        """Return the named folders of the data directory, then the data directory itself."""
        root = default_data_dir() if data_dir is None else Path(data_dir).expanduser()
        return cls((*(root / folder for folder in folders), root), verify)

    def find(self, part: Part) -> Path | None:
        """Return the file that holds the part: itself, compressed, or the archive it is a member of."""
        names = [part.name + form for form in _FORMS]
        if part.archive is not None:
            names.append(part.archive)
        for name in names:
            for place in self.places:
                if (place / name).is_file():
                    return place / name
        return None

    def read_each(self, parts: Sequence[Part], read: Callable[[Part, IO[bytes]], Read]) -> dict[str, Read]:
        """Return what `read` makes of every part's decompressed stream, opening each archive once."""
        plain: dict[Path, Part] = {}
        archives: dict[Path, dict[str, Part]] = {}
        for part in parts:
            path = self.find(part)
            if path is None:
                raise DataUnavailable(
                    f"The file {part.name} is in none of the folders {self._listed()}; put it there."
                )
            if path.name == part.archive:
                archives.setdefault(path, {})[part.name] = part
            else:
                plain[path] = part
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            found = list(threads.map(lambda path: _read_file(path, plain[path], read), plain))
        results = {part.name: result for part, result in zip(plain.values(), found, strict=True)}
        for path, wanted in archives.items():
            results.update(_read_members(path, wanted, read))
        return results

    def contents(self, parts: Sequence[Part]) -> dict[str, bytes]:
        """Return the decompressed bytes of every part by its name, compared with the known checksums."""
        return self.read_each(parts, self._content)

    def _content(self, part: Part, stream: IO[bytes]) -> bytes:
        content = stream.read()
        if not content:
            raise DataUnavailable(
                f"The file {self.find(part)} is empty; remove it and get the official file again."
            )
        if self.verify and part.sha256 not in (None, hashlib.sha256(content).hexdigest()):
            raise DataUnavailable(
                f"The content of {part.name} in {self.find(part)} does not have the SHA-256 checksum "
                f"{part.sha256} of the official one; remove it and get the official file again."
            )
        return content

    def _listed(self) -> str:
        return ", ".join(str(place) for place in self.places)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn every way in which a file cannot be read into one sentence."""
    try:
        yield
    except _UNREADABLE as error:
        reason = (
            error.strerror if isinstance(error, OSError) and error.strerror else "it is damaged or cut off"
        )
        raise DataUnavailable(
            f"The file {path} cannot be read ({reason}); make it readable, or remove it and get the "
            "official file again."
        ) from error


def _read_file(path: Path, part: Part, read: Callable[[Part, IO[bytes]], Read]) -> Read:
    with _reading(path):
        if path.suffix == ".gz":
            with gzip.open(path) as unzipped:
                return read(part, cast(IO[bytes], unzipped))
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as stream:
            return read(part, stream)


def _read_members(
    path: Path, wanted: dict[str, Part], read: Callable[[Part, IO[bytes]], Read]
) -> dict[str, Read]:
    """Read the wanted members of a tar archive in the archive's order; nothing is unpacked to disk."""
    results: dict[str, Read] = {}
    with _reading(path), tarfile.open(path, "r|*") as archive:
        for member in archive:
            name = next((name for name in wanted if f"/{member.name}".endswith(f"/{name}")), None)
            stream = None if name is None else archive.extractfile(member)
            if name is not None and stream is not None:
                results[name] = read(wanted[name], stream)
            if len(results) == len(wanted):
                return results
    raise DataUnavailable(
        f"The archive {path} has no member {', '.join(sorted(wanted.keys() - results.keys()))}; get the "
        "official file again."
    )

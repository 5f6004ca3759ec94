from __future__ import annotations

import errno
import gzip
import hashlib
import io
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from quietmax.data import Part, Source, default_data_dir
from quietmax.errors import DataUnavailable

Refusal = Callable[..., str]
CONTENT = bytes(range(256)) * 40
PART = Part("numbers", hashlib.sha256(CONTENT).hexdigest(), "numbers.tgz")


def write_archive(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def write_form(folder: Path, form: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if form == "archive":
        path = folder / "numbers.tgz"
        write_archive(path, {"README": b"read me", "some/folder/numbers": CONTENT, "numbers2": b"other"})
        return path
    path = folder / f"numbers{form}"
    path.write_bytes({"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[form](CONTENT))
    return path


@pytest.mark.parametrize("place", [".", "set"])
@pytest.mark.parametrize("form", ["", ".gz", ".xz", "archive"])
def test_a_part_is_read_in_every_form_from_the_folder_or_the_data_directory(
    tmp_path: Path, form: str, place: str
) -> None:
    path = write_form(tmp_path / place, form)
    source = Source.of(tmp_path, ["set"])
    assert source.find(PART) == path
    assert source.contents([PART]) == {"numbers": CONTENT}


def test_a_plain_file_is_preferred_to_the_archive(tmp_path: Path) -> None:
    write_archive(tmp_path / "numbers.tgz", {"numbers": b"from the archive"})
    plain = write_form(tmp_path, "")
    assert Source.of(tmp_path, ["set"]).find(PART) == plain


def test_several_members_of_one_archive_and_a_plain_file_are_read_together(tmp_path: Path) -> None:
    parts = [Part("b", None, "all.tgz"), Part("a", None, "all.tgz"), Part("c")]
    write_archive(tmp_path / "all.tgz", {"x/a": b"A", "x/b": b"B"})
    (tmp_path / "c").write_bytes(b"C")
    assert Source.of(tmp_path, []).contents(parts) == {"a": b"A", "b": b"B", "c": b"C"}


@pytest.mark.parametrize("form", ["", ".gz", ".xz", "archive"])
def test_another_content_than_the_official_one_is_refused_unless_verification_is_off(
    tmp_path: Path, form: str, refusal: Refusal
) -> None:
    write_form(tmp_path, form)
    part = Part("numbers", "0" * 64, "numbers.tgz")
    sentence = refusal(lambda: Source.of(tmp_path, []).contents([part]), DataUnavailable)
    assert "checksum" in sentence
    assert str(tmp_path) in sentence
    assert Source.of(tmp_path, [], verify=False).contents([part]) == {"numbers": CONTENT}


@pytest.mark.parametrize(
    ("form", "kept"), [(".gz", 0.5), (".gz", 0.95), (".xz", 0.5), (".xz", 0.95), ("archive", 0.5)]
)
def test_a_truncated_file_is_refused(tmp_path: Path, form: str, kept: float, refusal: Refusal) -> None:
    path = write_form(tmp_path, form)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    sentence = refusal(lambda: Source.of(tmp_path, []).contents([PART]), DataUnavailable)
    assert "damaged or cut off" in sentence
    assert str(path) in sentence


@pytest.mark.parametrize("name", ["numbers.gz", "numbers.xz", "numbers.tgz"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, name: str, refusal: Refusal) -> None:
    (tmp_path / name).write_bytes(b"<html>not found</html>")
    assert "damaged" in refusal(lambda: Source.of(tmp_path, []).contents([PART]), DataUnavailable)


def test_an_empty_file_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "numbers").touch()
    assert "is empty" in refusal(lambda: Source.of(tmp_path, []).contents([PART]), DataUnavailable)


def test_an_archive_without_the_member_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    write_archive(tmp_path / "numbers.tgz", {"other": CONTENT})
    assert "no member numbers" in refusal(lambda: Source.of(tmp_path, []).contents([PART]), DataUnavailable)


def test_a_missing_file_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    sentence = refusal(lambda: Source.of(tmp_path, ["set"]).contents([PART]), DataUnavailable)
    assert "numbers" in sentence
    assert str(tmp_path / "set") in sentence


def test_an_unreadable_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    def forbidden(*_arguments: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    write_form(tmp_path, "")
    monkeypatch.setattr(Path, "open", forbidden)
    assert "Permission denied" in refusal(lambda: Source.of(tmp_path, []).contents([PART]), DataUnavailable)


def test_reading_an_archive_writes_nothing(tmp_path: Path) -> None:
    write_form(tmp_path, "archive")
    before = sorted(tmp_path.rglob("*"))
    Source.of(tmp_path, []).contents([PART])
    assert sorted(tmp_path.rglob("*")) == before


def test_the_data_directory_is_named_by_the_environment_or_lies_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUIETMAX_DATA", str(tmp_path / "named"))
    assert default_data_dir() == tmp_path / "named"
    monkeypatch.delenv("QUIETMAX_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert default_data_dir() == tmp_path / "cache" / "quietmax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_data_dir() == tmp_path / ".cache" / "quietmax"

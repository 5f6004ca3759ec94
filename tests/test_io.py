"""Atomic writes replace a file completely or not at all; figures are checked before they are computed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from quietmax._io import atomic_write, check_figure, write_figure
from quietmax.errors import QuietmaxError


def test_a_file_is_replaced_only_when_its_writing_has_ended(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    path.write_text("before")

    def half(staging: Path) -> None:
        staging.write_text("ha")
        assert path.read_text() == "before"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        atomic_write(path, half)
    assert path.read_text() == "before"
    atomic_write(path, lambda staging: staging.write_text("after"))
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_is_as_open_as_the_user_s_other_files(tmp_path: Path) -> None:
    atomic_write(tmp_path / "ours", lambda staging: staging.write_text("x"))
    (tmp_path / "theirs").write_text("x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "theirs").stat().st_mode


@pytest.mark.parametrize("private", [True, False])
def test_nobody_else_can_read_what_is_private_or_was_not_theirs_to_read(
    tmp_path: Path, private: bool
) -> None:
    path, modes = tmp_path / "ours", []

    def write(staging: Path) -> None:
        modes.append(staging.stat().st_mode & 0o077)
        staging.write_text("x")

    path.write_text("before")
    path.chmod(0o644 if private else 0o600)
    atomic_write(path, write, private=private)
    assert [*modes, path.stat().st_mode & 0o777] == [0, 0o600]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("before")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    atomic_write(tmp_path / "link", lambda staging: staging.write_text("after"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").read_text() == "after"


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        atomic_write(tmp_path / "pipe", lambda place: place.write_text("x"))
        assert os.read(reader, 10) == b"x"
    finally:
        os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def test_a_folder_cannot_become_a_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="directory"):
        atomic_write(tmp_path, lambda place: place.write_text("x"))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("figure.docx", "the format '.docx' is not supported"),
        ("figure", "it has no extension"),
        ("absent/figure.png", "does not exist"),
        ("folder.png", "it is a folder or not writable"),
    ],
)
def test_a_figure_that_could_not_be_written_is_refused_before_it_is_computed(
    tmp_path: Path, name: str, problem: str
) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(QuietmaxError, match=problem):
        check_figure(tmp_path / name)


def test_a_figure_is_written_in_the_format_of_its_extension(tmp_path: Path) -> None:
    check_figure(None)
    for name, start in (("figure.png", b"\x89PNG"), ("figure.pdf", b"%PDF"), ("figure.svg", b"<?xml")):
        check_figure(tmp_path / name)
        assert write_figure(Figure(), tmp_path / name).read_bytes().startswith(start)
    with pytest.raises(QuietmaxError, match="could not be written"):
        write_figure(Figure(), tmp_path / "absent" / "figure.png")

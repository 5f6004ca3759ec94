"""Fetching from a real HTTP server on this machine that misbehaves as told."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from quietmax.data import Download
from quietmax.data.readers import _fetch
from quietmax.errors import DataUnavailable
from tests.data.conftest import ErrorMessage

CONTENT = np.random.default_rng(0).bytes(900_001)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves CONTENT; `cuts` says after how many bytes each answer is broken off."""

    daemon_threads = True
    content = CONTENT
    ranges = True
    length = True
    status = 200
    shift = 0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.cuts: list[int] = []
        self.asked: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/file.bin"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        server, asked = self.server, self.headers.get("Range")
        server.asked.append(asked)
        if server.status != 200:
            self.send_error(server.status)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and server.ranges else 0
        if start >= len(server.content) and start:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(server.content)}")
            self.end_headers()
            return
        body = server.content[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header(
                "Content-Range",
                f"bytes {start + server.shift}-{len(server.content) - 1}/{len(server.content)}",
            )
        if server.length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: server.cuts.pop(0)] if server.cuts else body)

    def log_message(self, *_args: object) -> None:
        return


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def official(server: Server, sha256: str | None = SHA256) -> Download:
    return Download("file.bin", server.url, sha256)


def test_a_file_is_fetched_into_a_new_folder_with_progress(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    path = _fetch(official(server), tmp_path / "new" / "folder", progress=lambda *step: seen.append(step))
    assert path == tmp_path / "new" / "folder" / "file.bin"
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]
    assert [step[1] for step in seen] == sorted(step[1] for step in seen)
    assert seen[-1] == ("file.bin", len(CONTENT), len(CONTENT))
    assert len(seen) > 2


def test_a_file_that_is_there_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin").write_bytes(b"mine")
    assert _fetch(official(server), tmp_path).read_bytes() == b"mine"
    assert server.asked == []


RESUMED = {
    "broken off twice": ({"cuts": [300_000, 200_000]}, b"", [None, "bytes=300000-", "bytes=500000-"]),
    "a part of an earlier run": ({}, CONTENT[:700_000], ["bytes=700000-"]),
    "a server that cannot continue": ({"ranges": False}, b"old" * 1_000, ["bytes=3000-"]),
    "a part that is already whole": ({}, CONTENT, [f"bytes={len(CONTENT)}-"]),
    "a part longer than the file": ({}, CONTENT + b"more", [f"bytes={len(CONTENT) + 4}-", None]),
    "a server that continues elsewhere": ({"shift": 1}, CONTENT[:1_000], ["bytes=1000-", None]),
}


@pytest.mark.parametrize("sha256", [SHA256, None])
@pytest.mark.parametrize(("server_is", "part", "asked"), RESUMED.values(), ids=RESUMED)
def test_a_transfer_goes_on_where_it_stopped_or_begins_again(
    server: Server,
    tmp_path: Path,
    server_is: dict[str, object],
    part: bytes,
    asked: list[str | None],
    sha256: str | None,
) -> None:
    for name, value in server_is.items():
        setattr(server, name, list(value) if isinstance(value, list) else value)
    if part:
        (tmp_path / "file.bin.part").write_bytes(part)
    assert _fetch(official(server, sha256), tmp_path).read_bytes() == CONTENT
    assert server.asked == asked
    assert [file.name for file in tmp_path.iterdir()] == ["file.bin"]


@pytest.mark.parametrize("part", [b"", b"x" * 1_000])
def test_a_wrong_checksum_leaves_nothing_behind_and_the_next_try_succeeds(
    server: Server, tmp_path: Path, part: bytes, error_message: ErrorMessage
) -> None:
    (tmp_path / "file.bin.part").write_bytes(part)
    expected = SHA256 if part else "0" * 64
    message = error_message(lambda: _fetch(official(server, expected), tmp_path), DataUnavailable)
    assert f"instead of {expected}" in message
    assert list(tmp_path.iterdir()) == []
    assert _fetch(official(server), tmp_path).read_bytes() == CONTENT


def test_what_arrived_is_kept_when_the_server_goes_away_and_continued_later(
    server: Server, tmp_path: Path, error_message: ErrorMessage
) -> None:
    server.cuts = [400_000, 0, 0, 0]
    message = error_message(lambda: _fetch(official(server), tmp_path), DataUnavailable)
    assert "400000" in message
    assert (tmp_path / "file.bin.part").read_bytes() == CONTENT[:400_000]
    assert not (tmp_path / "file.bin").exists()
    assert _fetch(official(server), tmp_path).read_bytes() == CONTENT
    assert server.asked[-1] == "bytes=400000-"


def test_a_server_that_states_no_length_is_believed_up_to_the_checksum(
    server: Server, tmp_path: Path, error_message: ErrorMessage
) -> None:
    server.length = False
    assert _fetch(official(server), tmp_path / "whole").read_bytes() == CONTENT
    server.cuts = [1_000]
    assert "checksum" in error_message(lambda: _fetch(official(server), tmp_path / "cut"), DataUnavailable)


@pytest.mark.parametrize("status", [403, 404, 500])
def test_an_answer_that_is_not_the_file_is_rejected(
    server: Server, tmp_path: Path, status: int, error_message: ErrorMessage
) -> None:
    server.status = status
    message = error_message(lambda: _fetch(official(server), tmp_path), DataUnavailable)
    assert str(status) in message
    assert server.url in message
    assert list(tmp_path.iterdir()) == []


def test_a_rejected_connection_is_one_sentence(tmp_path: Path, error_message: ErrorMessage) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    download = Download("file.bin", f"http://127.0.0.1:{port}/file.bin", SHA256)
    message = error_message(lambda: _fetch(download, tmp_path), DataUnavailable)
    assert "refused" in message
    assert list(tmp_path.iterdir()) == []


def test_a_silent_server_is_given_up(tmp_path: Path, error_message: ErrorMessage) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        download = Download("file.bin", f"http://127.0.0.1:{silent.getsockname()[1]}/file.bin", SHA256)
        message = error_message(lambda: _fetch(download, tmp_path, timeout=0.2), DataUnavailable)
    assert "timed out" in message


def test_a_folder_that_cannot_be_written_is_rejected(
    server: Server, tmp_path: Path, error_message: ErrorMessage
) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    message = error_message(lambda: _fetch(official(server), tmp_path / "taken" / "below"), DataUnavailable)
    assert "cannot be written" in message
    assert server.asked == []

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
    """Serves CONTENT, or its first `sent` bytes."""

    daemon_threads = True
    sent = len(CONTENT)
    length = True
    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/file.bin"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server = self.server
        server.asked += 1
        if server.status != 200:
            self.send_error(server.status)
            return
        self.send_response(200)
        if server.length:
            self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[: server.sent])

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
    assert server.asked == 0


@pytest.mark.parametrize(
    ("expected", "sent", "length", "said"),
    [
        ("0" * 64, len(CONTENT), True, f"instead of {'0' * 64}"),
        (SHA256, 400_000, True, "the connection ended after 400000 of 900001 bytes"),
        (None, 400_000, True, "the connection ended after 400000 of 900001 bytes"),
        (SHA256, 1_000, False, "checksum"),
        (SHA256, 0, False, "checksum"),
    ],
)
def test_a_wrong_or_truncated_file_leaves_nothing_behind_and_the_next_try_succeeds(
    server: Server,
    tmp_path: Path,
    expected: str | None,
    sent: int,
    length: bool,
    said: str,
    error_message: ErrorMessage,
) -> None:
    server.sent, server.length = sent, length
    assert said in error_message(lambda: _fetch(official(server, expected), tmp_path), DataUnavailable)
    assert list(tmp_path.iterdir()) == []
    server.sent = len(CONTENT)
    assert _fetch(official(server, SHA256), tmp_path).read_bytes() == CONTENT


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
    assert server.asked == 0

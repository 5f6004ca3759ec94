"""The limit on the memory of all request bodies together."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from quietmax.errors import InvalidInput
from quietmax.ledger import Terms
from quietmax.server import Settings
from quietmax.server.errors import HttpError
from quietmax.server.protocol import BODIES_FULL
from tests.server.running_service import (
    Running,
    Start,
    inference,
    some_rows,
    until,
)

SIZE = 2**20
SMALL = Settings(max_bytes=SIZE, max_body_memory=4 * SIZE, timeout=30)


@contextmanager
def _sent(service: Running, body: bytes, length: int | None = None) -> Iterator[socket.socket]:
    """A connection over which a body was sent, of which the service expects `length` bytes; None: chunks."""
    host, port = service.url.partition("://")[2].split(":")
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = f"POST /v2/models/plain/infer HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {service.key}\r\n{framing}"
        connection.sendall(head.encode() + b"\r\n\r\n")
        if length is None:
            connection.sendall(b"%x\r\n" % SIZE + body)
        else:
            connection.sendall(body)
        yield connection


def _error(connection: socket.socket) -> tuple[int, str]:
    received = b""
    while part := connection.recv(2**16):
        received += part
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"retry-after: 1" in head
    return int(head.split()[1]), json.loads(body)["error"]


def test_a_body_that_does_not_fit_is_503_before_it_is_read(start: Start) -> None:
    with (
        start("plain", budget=Terms(10.0), queries=20, settings=SMALL) as service,
        ExitStack() as opened,
    ):
        for _ in range(4):
            opened.enter_context(_sent(service, b" " * (SIZE - 1), SIZE))
        until(lambda: service.service.bodies.held == 4 * (SIZE - 1))
        with _sent(service, b"", SIZE) as refused:
            assert _error(refused) == (503, BODIES_FULL)
        assert service.http.get("/v2/models").status_code == 200, "a request without a body is answered"
        assert 'refused_connections_total{reason="body"} 1.0' in service.http.get("/metrics").text
        opened.close()
        until(lambda: service.service.bodies.held == 0)
        assert service.infer(some_rows(1)).status_code == 200
        until(lambda: service.service.bodies.held == 0)


def test_bodies_that_grow_beyond_the_limit_together_are_refused(start: Start) -> None:
    """Nobody knows before how long a body in chunks is, nor when the others arrive."""
    with (
        start("plain", budget=Terms(10.0), queries=20, settings=SMALL) as service,
        ExitStack() as opened,
    ):
        for _ in range(4):
            opened.enter_context(_sent(service, b" " * (SIZE - 1)))
        until(lambda: service.service.bodies.held == 4 * (SIZE - 1))
        with _sent(service, b" " * 100) as refused:
            assert _error(refused) == (503, BODIES_FULL)
        until(lambda: service.service.bodies.held == 4 * (SIZE - 1))
        opened.close()
        until(lambda: service.service.bodies.held == 0)


def test_a_body_counts_until_its_request_has_ended_also_if_its_client_has_gone(start: Start) -> None:
    with start("plain", budget=Terms(10.0), queries=20, settings=SMALL) as service:
        infer, going, asked = service.service.infer, threading.Event(), threading.Event()

        async def wait(*arguments: Any) -> Any:
            asked.set()
            while not going.is_set():
                await asyncio.sleep(0.01)
            return await infer(*arguments)

        service.service.infer = wait  # type: ignore[method-assign,assignment]
        body = json.dumps(inference(some_rows(1))).encode()
        with _sent(service, body, len(body)):
            assert asked.wait(30)
        time.sleep(0.2)
        assert service.service.bodies.held == len(body)
        going.set()
        until(lambda: service.service.bodies.held == 0)


def test_requests_that_wait_behind_another_on_a_connection_that_ends_are_forgotten(start: Start) -> None:
    with start("plain", budget=Terms(10.0), queries=20, settings=SMALL) as service:
        going, asked = threading.Event(), threading.Event()

        async def wait(*_: Any) -> Any:
            asked.set()
            while not going.is_set():
                await asyncio.sleep(0.01)
            raise HttpError(400, "There is nobody to answer.")

        service.service.infer = wait  # type: ignore[method-assign,assignment]
        body = json.dumps(inference(some_rows(1))).encode()
        request = (
            f"POST /v2/models/plain/infer HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {service.key}\r\n"
        )
        request += f"Content-Length: {len(body)}\r\n\r\n{body.decode()}"
        with _sent(service, body + request.encode() * 3, len(body)):
            assert asked.wait(30)
            until(lambda: service.service.bodies.held == 4 * len(body))
        until(lambda: service.service.bodies.held == len(body))
        going.set()
        until(lambda: service.service.bodies.held == 0)


def test_the_memory_for_bodies_must_hold_the_largest_one() -> None:
    with pytest.raises(InvalidInput, match=r"max_body_memory must be at least max_bytes \(100\), got 99"):
        Settings(max_bytes=100, max_body_memory=99)

"""Limits on connections, headers and bodies."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from quietmax.errors import InvalidInput
from quietmax.server import Settings
from quietmax.server import protocol as limits
from quietmax.server import run as run_module
from quietmax.server.protocol import BODIES_FULL
from tests.server.running_service import (
    Running,
    Start,
    inference,
    running,
    some_rows,
    until,
)

GET = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def head(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    place = tmp_path_factory.mktemp("head") / "ledger.sqlite"
    with running(f"sqlite:///{place}", [f"head={models / 'head'}"]) as service:
        yield service


@contextmanager
def _connected(service: Running) -> Iterator[socket.socket]:
    host, port = service.url.partition("://")[2].split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        yield connection


def _everything(connection: socket.socket) -> bytes:
    """All that the service sends until it ends the connection."""
    parts = []
    try:
        while part := connection.recv(2**16):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


def _refusal(service: Running, *sent: bytes, header: bytes = b"connection: close") -> tuple[int, str]:
    """Status and message of the error that ends a connection."""
    with _connected(service) as connection:
        try:
            for part in sent:
                connection.sendall(part)
        except ConnectionError:
            pass
        head, _, body = _everything(connection).partition(b"\r\n\r\n")
    assert header in head
    return int(head.split()[1]), json.loads(body)["error"]


def _is_open(connection: socket.socket) -> bool:
    """Whether the service has not ended an idle connection."""
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def _refused(service: Running, reason: str) -> float:
    text = service.http.get("/metrics").text
    return sum(
        float(line.split()[1])
        for line in text.splitlines()
        if line.startswith(f'quietmax_refused_connections_total{{reason="{reason}"}}')
    )


@contextmanager
def _trickling(connection: socket.socket, part: bytes) -> Iterator[None]:
    """Send a part again and again, as long as the service reads."""
    stopped = threading.Event()

    def trickle() -> None:
        with suppress(ConnectionError):
            while not stopped.wait(0.05):
                connection.sendall(part)

    thread = threading.Thread(target=trickle)
    thread.start()
    yield
    stopped.set()
    thread.join()


@contextmanager
def _inference_held(service: Running) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Hold inference requests: one event is set once there is one, the other lets them go on."""
    infer, asked, going = service.service.infer, threading.Event(), threading.Event()

    async def wait(*arguments: Any) -> Any:
        asked.set()
        while not going.is_set():
            await asyncio.sleep(0.01)
        return await infer(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service.service, "infer", wait)
        yield asked, going


def _request(
    service: Running, path: str, length: int | None = 0, method: str = "POST", chunked: bool = False
) -> bytes:
    """The headers of a request with the key of a client, and the length of its body if it has one."""
    framing = (
        "Transfer-Encoding: chunked\r\n" if chunked else f"Content-Length: {length}\r\n" if length else ""
    )
    return (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {service.key}\r\n{framing}\r\n"
    ).encode()


HEAD, PLAIN = (f"/v2/models/{name}/infer" for name in ("head", "plain"))


def _plain_request(service: Running) -> bytes:
    body = json.dumps(inference(some_rows(1))).encode()
    return _request(service, PLAIN, len(body)) + body


def test_a_huge_header_is_refused_before_it_is_read(head: Running) -> None:
    flood = (b"x" * 2**20 for _ in range(128))
    refused, before = _refused(head, "header"), time.process_time()
    assert _refusal(head, GET + b"X: ", *flood) == (431, "The headers must have at most 32768 bytes.")
    assert time.process_time() - before < 2
    assert _refused(head, "header") == refused + 1


def test_many_small_headers_are_refused(head: Running) -> None:
    for count, status in ((90, 200), (101, 431)):
        with _connected(head) as connection:
            connection.sendall(GET + b"a: b\r\n" * count + b"Connection: close\r\n\r\n")
            assert _everything(connection).split()[1] == b"%d" % status
    assert _refusal(head, GET, b"a: b\r\n" * 4_000_000)[0] == 431


def test_headers_up_to_the_limit_are_accepted_and_longer_ones_and_urls_are_not(start: Start) -> None:
    with start("head", settings=Settings(max_header_bytes=1000)) as service:
        for size, status in ((800, 200), (1000, 431)):
            answered = httpx.get(f"{service.url}/v2/health/live", headers={"x": "y" * size})
            assert answered.status_code == status
        assert httpx.get(f"{service.url}/{'y' * 1000}").status_code == 414
        assert httpx.get(f"{service.url}/{'y' * 500}").status_code == 404


@pytest.mark.parametrize(("length", "part"), [(None, b"a: b\r\n"), (1000, b" ")], ids=["headers", "body"])
def test_what_arrives_byte_by_byte_has_an_end_and_so_have_silent_connections(
    start: Start, length: int | None, part: bytes
) -> None:
    with start("head", settings=Settings(header_timeout=0.5, timeout=0.5)) as service:
        with _connected(service) as connection, _connected(service) as silent:
            connection.sendall(GET if length is None else _request(service, HEAD, length))
            started = time.monotonic()
            with _trickling(connection, part):
                assert _everything(connection).startswith(b"HTTP/1.1 408")
            assert time.monotonic() - started < 5
            assert _everything(silent) == b""
        assert _refused(service, "timeout") == 1


def test_a_connection_without_requests_is_closed_after_the_idle_timeout(start: Start) -> None:
    with start("head", settings=Settings(idle_timeout=1)) as service, _connected(service) as connection:
        connection.sendall(GET + b"\r\n")
        started = time.monotonic()
        assert _everything(connection).startswith(b"HTTP/1.1 200")
        assert 0.9 < time.monotonic() - started < 10


def test_a_body_that_does_not_arrive_ends_the_connection_on_every_route(start: Start) -> None:
    with start("head", settings=Settings(timeout=0.5)) as service, ExitStack() as opened:
        waiting = {}
        for path in (HEAD, "/contents", "/v2/health/live", "/nowhere"):
            waiting[path] = opened.enter_context(_connected(service))
            waiting[path].sendall(_request(service, path, 1000) + b"{")
        started = time.monotonic()
        for path, connection in waiting.items():
            answer = _everything(connection)
            assert answer.count(b"HTTP/1.1") == 1
            if path == HEAD:
                assert answer.startswith(b"HTTP/1.1 408")
                assert b"The body did not arrive in time. Nothing was charged." in answer
        assert time.monotonic() - started < 5


def test_more_connections_than_allowed_replace_idle_ones_and_are_logged_and_counted(start: Start) -> None:
    with start("head", settings=Settings(max_connections=20)) as service, ExitStack() as opened:
        idle = [opened.enter_context(_connected(service)) for _ in range(60)]
        assert httpx.get(f"{service.url}/v2/health/ready").status_code == 200
        assert sum(_is_open(each) for each in idle) <= 20
        assert _refused(service, "connections") >= 41
        deadline = time.monotonic() + 10
        while b"connections_full" not in service.log.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
        (line, *_) = [
            json.loads(each) for each in service.log.getvalue().splitlines() if b"connections_full" in each
        ]
        assert line["limit"] == 20


def test_with_a_certificate_only_tls_is_spoken_and_connections_in_their_handshake_count_too(
    start: Start, certificate: Any
) -> None:
    with (
        start("head", tls=certificate, settings=Settings(max_connections=20)) as service,
        ExitStack() as opened,
    ):
        for _ in range(60):
            opened.enter_context(_connected(service))
        trusted = ssl.create_default_context(cafile=certificate[0])
        ready = f"{service.url}/v2/health/ready"
        assert httpx.get(ready, verify=trusted).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(ready.replace("https", "http"), timeout=120)


def test_connections_of_http_and_grpc_leave_descriptors_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((1024, 896), (200, 100), (resource.RLIM_INFINITY, 1000), (100, 50), (4096, 1000)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert limits._connection_limits(Settings(), grpc=False)[0] == most
        if soft != resource.RLIM_INFINITY:
            http, grpc = limits._connection_limits(Settings(max_connections=100_000), grpc=True)
            assert http + grpc <= soft - min(128, soft // 2)
            assert http > grpc > 0
            assert limits._connection_limits(Settings(), grpc=True)[0] == min(http, 1000)
    assert limits._connection_limits(Settings(max_connections=10), grpc=True) == (10, 10)


def test_a_request_that_was_received_is_not_replaced(start: Start) -> None:
    with (
        start("plain", settings=Settings(max_connections=2)) as service,
        _inference_held(service) as (asked, going),
        ThreadPoolExecutor(1) as pool,
        ExitStack() as opened,
    ):
        answer = pool.submit(service.infer, some_rows(1))
        assert asked.wait(10)
        for _ in range(5):
            opened.enter_context(_connected(service))
        assert httpx.get(f"{service.url}/v2/health/live").status_code == 200
        going.set()
        assert answer.result(60).status_code == 200


FRAMING = [
    b"Content-Length: 1\r\nContent-Length: 2\r\n",
    b"Content-Length: 1, 1\r\n",
    b"Content-Length: +1\r\n",
    b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: chunked, gzip\r\n",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: \x0bchunked\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n1\nx\n0\n\n",
    b"Transfer-Encoding: chunked\r\n\r\n0\r\nHost: x\r\nContent-Length: 1\r\n",
    b"A : b\r\n",
    b"A: b\r\n c\r\n",
    b"A: b\nC: d\r\n",
    b"A: b\rc\r\n",
    b"A: b\0\r\n",
]
"""What readers of HTTP could understand in two ways (RFC 9112, 5 to 7)."""


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"nonsense\r\n\r\n", "The request is not valid HTTP/1.1."),
        *((GET + wrong + b"\r\n", "The request is not valid HTTP/1.1.") for wrong in FRAMING),
        *(
            (
                b"GET /v2" + version + b"\r\n\r\n",
                "The request must be HTTP/1.1 with a Host header, or HTTP/1.0.",
            )
            for version in (b" HTTP/1.1", b" HTTP/2.0\r\nHost: x", b"")
        ),
        *(
            (
                b"GET " + path + b" HTTP/1.1\r\nHost: " + host + b"\r\n\r\n",
                "The Host header or the path is not valid.",
            )
            for path, host in (
                (b"/v2#x", b"x"),
                (b"/v2", b"a b"),
                (b"/v2", b"a/b"),
                (b"/v2", b"a:b"),
            )
        ),
        *(
            (
                b"GET " + wrong + b" HTTP/1.1\r\nHost: x\r\n\r\n",
                "The request target must be a path or an address with http or https.",
            )
            for wrong in (b"ftp://x/v2", b"http://u@x/v2")
        ),
        (
            GET + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            "The only transfer encoding that is supported is chunked.",
        ),
        (GET + b"Host: other\r\n\r\n", "The Host header must be sent once."),
        (
            GET + b"Authorization: a\r\nauthorization: b\r\n\r\n",
            "The Authorization header must be sent once.",
        ),
        (
            b"POST /v2 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nk\r\n0\r\n"
            b"Authorization: Bearer x\r\n\r\n",
            "Authorization must be sent before the body.",
        ),
    ],
)
def test_ambiguous_requests_are_400_and_end_the_connection(head: Running, sent: bytes, message: str) -> None:
    assert _refusal(head, sent) == (400, message)


def test_a_key_in_a_trailer_opens_nothing(plain: Running) -> None:
    body = json.dumps(inference(some_rows(1))).encode()
    for trailer in (f"Authorization: Bearer {plain.key}", "X-Other: y"):
        with _connected(plain) as connection:
            connection.sendall(
                b"POST /v2/models/plain/infer HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n%s\r\n\r\n"
                % (len(body), body, trailer.encode())
            )
            assert _everything(connection).split()[1] == (b"400" if "Auth" in trailer else b"401")
    assert plain.ledger.account("people").spent_units == 0


@pytest.mark.parametrize("count", [100, 2000])
def test_of_many_pipelined_requests_the_last_that_is_answered_says_that_the_connection_ends(
    head: Running, count: int
) -> None:
    with _connected(head) as connection:
        connection.sendall((GET + b"\r\n") * 20 + GET + b"Connection: close\r\n\r\n")
        assert _everything(connection).count(b"HTTP/1.1 200") == 21
    with _connected(head) as connection:
        connection.sendall((GET + b"\r\n") * count)
        answers = _everything(connection).split(b"HTTP/1.1 200")[1:]
    assert len(answers) == 33
    assert [b"\r\nconnection: close\r\n" in answer for answer in answers] == [False] * 32 + [True]


def test_what_http_asks_of_every_server_holds(head: Running) -> None:
    """RFC 9110: HEAD as GET, OPTIONS, Allow and Date; RFC 9112: a request target with a host, HTTP/1.0."""
    live = "/v2/health/live"
    got = httpx.get(head.url + live)
    assert "GMT" in got.headers["date"]
    for wanted, status in ((live, 200), ("/v2/models", 401), (HEAD, 405)):
        asked = httpx.head(head.url + wanted)
        assert (asked.status_code, asked.content) == (status, b"")
    assert httpx.head(head.url + live).headers["content-length"] == got.headers["content-length"]
    assert httpx.options(head.url + live).json() == {"methods": ["GET", "HEAD", "OPTIONS"]}
    assert httpx.delete(head.url + HEAD).headers["allow"] == "POST, OPTIONS"
    for target in (b"GET http://localhost", b"OPTIONS *", b"GET HTTP://localhost" + live.encode()):
        with _connected(head) as connection:
            connection.sendall(target + b" HTTP/1.1\r\nHost: other\r\nConnection: close\r\n\r\n")
            assert _everything(connection).startswith(b"HTTP/1.1 200")
    with _connected(head) as connection:
        connection.sendall(b"GET /v2/health/live HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        answer = _everything(connection)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer


def test_a_client_that_waits_for_100_continue_gets_it_or_the_end_of_the_connection(plain: Running) -> None:
    expect = b"Expect: 100-continue\r\n\r\n"
    body = json.dumps(inference(some_rows(1))).encode()
    with _connected(plain) as connection:
        connection.sendall(_request(plain, PLAIN, len(body))[:-2] + expect)
        assert connection.recv(2**16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert connection.recv(2**16).startswith(b"HTTP/1.1 200")
    refused = b"POST " + PLAIN.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n" + expect
    assert _refusal(plain, refused)[0] == 401


def test_an_error_after_a_request_does_not_take_its_place(plain: Running) -> None:
    with _connected(plain) as connection:
        connection.sendall(_plain_request(plain) + b"nonsense\r\n\r\n")
        answer = _everything(connection)
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.count(b"HTTP/1.1") == 1


def test_an_offered_upgrade_is_ignored_and_ends_the_connection(head: Running) -> None:
    with _connected(head) as connection:
        connection.sendall(GET + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n" + GET + b"\r\n")
        assert _everything(connection).count(b"HTTP/1.1 200") == 1


def test_a_client_that_does_not_read_its_response_is_cut_off(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start("head", settings=Settings(timeout=0.5)) as service, _connected(service) as connection:
        monkeypatch.setattr(service.service.metrics, "_exposition", lambda _: b"x" * 2**26)
        connection.sendall(_request(service, "/metrics", method="GET"))
        time.sleep(2)
        assert len(_everything(connection)) < 2**26


def test_a_head_request_is_answered_on_a_connection_that_stays_open(head: Running) -> None:
    with httpx.Client(base_url=head.url, timeout=20) as http:
        for _ in range(2):
            response = http.head("/v2/health/live")
            assert response.headers["content-type"] == "application/json"
            assert response.content == b""
        assert http.get("/v2/health/live").json() == {"live": True}


def _open_connections(service: Running) -> int:
    """How many connections the service has, with its own count of every 0.25 seconds."""
    told = service.http.get("/metrics").text
    return int(float(told.split("\nquietmax_connections ")[1].split()[0]))


def test_a_body_that_does_not_arrive_is_replaced_before_a_connection_that_was_used_later(
    start: Start,
) -> None:
    """A client that announces a body and sends none is not protected from new connections."""
    with start("head", settings=Settings(max_connections=8)) as service, ExitStack() as opened:
        stalled = [opened.enter_context(_connected(service)) for _ in range(6)]
        for each in stalled:
            each.sendall(_request(service, HEAD, 1000))
        until(lambda: _open_connections(service) >= 7)
        used = [opened.enter_context(_connected(service)) for _ in range(5)]
        for each in used:
            each.sendall(GET + b"\r\n")
            assert each.recv(2**16).startswith(b"HTTP/1.1 200")
        assert all(_is_open(each) for each in used)
        assert sum(not _is_open(each) for each in stalled) == 4


def test_connections_in_their_handshake_are_replaced_before_those_that_were_used(
    start: Start, certificate: Any
) -> None:
    trusted = ssl.create_default_context(cafile=certificate[0])
    with (
        start("head", tls=certificate, settings=Settings(max_connections=4)) as service,
        ExitStack() as opened,
    ):
        raw = opened.enter_context(_connected(service))
        with trusted.wrap_socket(raw, server_hostname="127.0.0.1") as honest:
            honest.sendall(GET + b"\r\n")
            assert honest.recv(2**16).startswith(b"HTTP/1.1 200")
            for _ in range(40):
                opened.enter_context(_connected(service))
            assert httpx.get(f"{service.url}/v2/health/ready", verify=trusted).status_code == 200
            honest.sendall(GET + b"\r\n")
            assert honest.recv(2**16).startswith(b"HTTP/1.1 200")


def test_unfinished_requests_and_responses_that_nobody_reads_do_not_delay_a_stop(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as opened:
        with start("head") as service:
            monkeypatch.setattr(service.service.metrics, "_exposition", lambda _: b"x" * 2**23)
            metrics = _request(service, "/metrics", method="GET")
            unfinished = metrics + b"POST /v2 HTTP/1.1\r\nHost: x\r\n"
            answered = [opened.enter_context(_connected(service)) for _ in range(2)]
            for connection, sent in zip(answered, (metrics * 8, unfinished), strict=True):
                connection.sendall(sent)
            assert [connection.recv(1) for connection in answered] == [b"H", b"H"]
            for sent in (GET[:20], _request(service, HEAD, 2)):
                opened.enter_context(_connected(service)).sendall(sent)
            time.sleep(0.5)
            started = time.monotonic()
        assert time.monotonic() - started < 5
    assert caplog.messages == []


def test_a_slow_reader_gets_its_whole_response_while_the_service_stops(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    received = bytearray()

    def read(connection: socket.socket) -> None:
        while part := connection.recv(2**18):
            received.extend(part)
            time.sleep(0.02)

    with ExitStack() as opened:
        with start("head") as service:
            monkeypatch.setattr(service.service.metrics, "_exposition", lambda _: b"x" * 2**25)
            connection = opened.enter_context(_connected(service))
            connection.sendall(_request(service, "/metrics", method="GET"))
            received += connection.recv(1)
            thread = threading.Thread(target=read, args=(connection,))
            thread.start()
            started = time.monotonic()
        assert time.monotonic() - started > limits._LINGER_SECONDS, "the response took longer than the limit"
        thread.join()
    assert received.count(b"x") >= 2**25


def test_an_answer_that_takes_longer_than_the_stop_is_refused_and_not_called_an_error(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_SHUTDOWN_TIMEOUT", 1)
    with ExitStack() as opened:
        with start("plain") as service:
            asked, _ = opened.enter_context(_inference_held(service))
            connection = opened.enter_context(_connected(service))
            connection.sendall(_plain_request(service))
            assert asked.wait(30)
        received = _everything(connection)
    assert received.startswith(b"HTTP/1.1 503")
    assert b"A retry with the same id is not charged twice." in received


SIZE = 2**20
SMALL = Settings(max_bytes=SIZE, max_body_memory=4 * SIZE, timeout=30)


@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_that_do_not_fit_together_are_503_before_they_are_read(start: Start, chunked: bool) -> None:
    """Nobody knows before how long a body in chunks is, nor when the others arrive."""
    with start("plain", settings=SMALL) as service, ExitStack() as opened:
        bodies = service.service.bodies
        sent = _request(service, PLAIN, SIZE, chunked=chunked) + (b"%x\r\n" % SIZE if chunked else b"")
        for _ in range(4):
            opened.enter_context(_connected(service)).sendall(sent + b" " * (SIZE - 1))
        until(lambda: bodies.held == 4 * (SIZE - 1))
        late = sent + (b" " * 100 if chunked else b"")
        assert _refusal(service, late, header=b"retry-after: 1") == (503, BODIES_FULL)
        until(lambda: bodies.held == 4 * (SIZE - 1))
        assert service.http.get("/v2/models").status_code == 200, "a request without a body is answered"
        assert 'refused_connections_total{reason="body"} 1.0' in service.http.get("/metrics").text
        opened.close()
        until(lambda: bodies.held == 0)
        assert service.infer(some_rows(1)).status_code == 200
        until(lambda: bodies.held == 0)


@pytest.mark.parametrize("waiting", [0, 3])
def test_a_body_counts_until_its_request_has_ended_also_if_its_client_has_gone(
    start: Start, waiting: int
) -> None:
    """Requests that wait behind it on its connection are forgotten."""
    with start("plain", settings=SMALL) as service, _inference_held(service) as (asked, going):
        request, bodies = _plain_request(service), service.service.bodies
        size = len(request.partition(b"\r\n\r\n")[2])
        with _connected(service) as connection:
            connection.sendall(request * (1 + waiting))
            assert asked.wait(30)
            until(lambda: bodies.held == (1 + waiting) * size)
        until(lambda: bodies.held == size)
        time.sleep(0.2)
        assert bodies.held == size
        going.set()
        until(lambda: bodies.held == 0)


def test_the_memory_for_bodies_must_hold_the_largest_one() -> None:
    with pytest.raises(InvalidInput, match=r"max_body_memory must be at least max_bytes \(100\), got 99"):
        Settings(max_bytes=100, max_body_memory=99)

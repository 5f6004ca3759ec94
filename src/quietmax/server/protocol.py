"""HTTP/1.1 connections with limits: on their number, on headers, and on the time that a client may take.

uvicorn parses HTTP with httptools and limits none of these. Without limits, one client without a key could use up the
processor with a huge header, or all file descriptors with connections that send nothing.
"""

from __future__ import annotations

import asyncio
import math
import mmap
import re
import resource
import socket
import ssl
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from quietmax.server.settings import Settings

if TYPE_CHECKING:
    from quietmax.server.service import Service

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
BODIES_FULL = "The service holds too many request bodies. Send the request again later. Nothing was charged."
"""What a client is told whose body does not fit. The status is 503."""
MAX_CONTROL_BYTES = 2**16
"""Largest body of a request that holds no rows."""
_RESERVED_DESCRIPTORS = 128
"""File descriptors that connections leave to the ledger, the log and the models."""
_CHECK_INTERVAL = 0.25
_FULL_LOG_INTERVAL = 1.0
_OTHERS_FIRST_SECONDS = 0.005
"""How long a worker leaves a new connection to the workers that have fewer."""
_NOT_LISTENING = 2**62
_LINGER_SECONDS = 1.0
"""How long a refused client may go on sending, so that it can read why it was refused."""
_MAX_PIPELINED = 32
_HOST = re.compile(rb"(\[[0-9A-Fa-fvV:.]+\]|[\w.~!$&'()*+,;=%-]*)(:[0-9]*)?", re.ASCII)
"""A valid Host header (RFC 9110, 7.2); it may be empty."""
_ABSOLUTE = re.compile(rb"(?i:https?)://([^/?#@]+)((?:[/?][^#]*)?)")
"""A request target with a scheme and a host (RFC 9112, 3.2.2)."""
_BODY_OVERHEAD = 2
"""A body in chunks may take this many times its limit on the wire."""
_STOPPED = "The service stops and did not wait for the answer. A retry with the same id is not charged twice."
_NOT_HTTP = (400, "The request is not valid HTTP/1.1.", "malformed")


class BodyMemory:
    """Counts the bytes of all request bodies that a process holds, over HTTP and gRPC together.

    The limit on one body bounds nothing by itself: very many clients may send one at the same time. A body counts from
    its first byte until its request has ended, also if its client has gone.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    def _fits(self, size: int) -> bool:
        return self.held + size <= self.limit

    def _hold(self, size: int) -> None:
        self.held += size

    def _release(self, size: int) -> None:
        self.held -= size


class Phase(Enum):
    """What a connection waits for."""

    IDLE = "the next request"
    HEAD = "the rest of the headers"
    BODY = "the rest of the body"
    ANSWER = "the response"


@dataclass(frozen=True)
class ConnectionShare:
    """One worker's share of the connections that several workers accept from the same socket.

    Without shares, the worker that wakes up first accepts all connections of a burst.
    """

    counts: memoryview  # The number of connections of each worker, in memory that the workers share
    number: int  # This worker, counted from 0

    @classmethod
    def _of_workers(cls, workers: int) -> list[ConnectionShare]:
        """Return the shares of so many workers, none of which listens yet."""
        counts = memoryview(mmap.mmap(-1, 8 * workers)).cast("q")
        shares = [cls(counts, number) for number in range(workers)]
        for share in shares:
            share._close()
        return shares

    def _update(self, count: int) -> bool:
        """Tell the other workers how many connections this one has; return whether none of them has fewer."""
        self.counts[self.number] = count
        return count == min(self.counts)

    def _close(self) -> None:
        """Say that this worker does not listen."""
        self.counts[self.number] = _NOT_LISTENING

    @property
    def _listens(self) -> bool:
        return self.counts[self.number] != _NOT_LISTENING


class Connections:
    """The open connections of a server process.

    If all are taken, a new connection replaces the one whose client has sent nothing for the longest time, first of all
    one whose TLS handshake is not done. A connection whose request was received is never replaced.
    """

    def __init__(self, service: Service, share: ConnectionShare, *, grpc: bool = False) -> None:
        self.service = service
        self.limit, _ = _connection_limits(service.settings, grpc=grpc)
        self.open: OrderedDict[LimitedProtocol, None] = OrderedDict()  # the one silent longest first
        self._share = share
        self._handshakes: dict[asyncio.Task[None], None] = {}
        self._logged_full_at = -math.inf
        self._full = 0

    def __len__(self) -> int:
        return len(self.open) + len(self._handshakes)

    async def _accept(
        self,
        listening: socket.socket,
        create: Callable[[], LimitedProtocol],
        context: ssl.SSLContext | None,
    ) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        while True:
            try:
                accepted = await self._next_connection(listening)
            except OSError as error:  # no descriptor left, or the client has gone already
                self.service.log.event("accept_failed", error=error.strerror)
                await asyncio.sleep(_CHECK_INTERVAL)
                continue
            if not self._make_room():
                accepted.close()
                continue
            if context is None:
                await self._connect(accepted, create, None)
                continue
            task = loop.create_task(self._connect(accepted, create, context))
            self._handshakes[task] = None
            task.add_done_callback(lambda done: self._handshakes.pop(done, None))

    async def _next_connection(self, listening: socket.socket) -> socket.socket:
        """Accept a connection; leave it to the workers that have fewer connections if they take it at once."""
        while True:
            fair = self._share._update(len(self))
            await _readable(listening)
            if not fair:
                await asyncio.sleep(_OTHERS_FIRST_SECONDS)
            with suppress(BlockingIOError):  # another worker took it
                accepted, _ = listening.accept()
                accepted.setblocking(False)
                return accepted

    async def _check(self) -> None:
        """End connections whose time is over, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_CHECK_INTERVAL)
            now = loop.time()
            for connection in tuple(self.open):
                connection._end_if_late(now)
            self.service.metrics.connections.set(len(self))
            self.service.metrics.dropped_lines.set(self.service.log.dropped)
            if self._share._listens:
                self._share._update(len(self))
            self._log_full(now)

    async def _connect(
        self, accepted: socket.socket, create: Callable[[], LimitedProtocol], context: ssl.SSLContext | None
    ) -> None:
        """Do the TLS handshake, if any, and hand the connection to its protocol."""
        timeout = None if context is None else self.service.settings.header_timeout
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                create, accepted, ssl=context, ssl_handshake_timeout=timeout
            )
        except OSError:  # ssl.SSLError and a handshake that takes too long are OSErrors, too
            self.service.metrics._count_refused("handshake")

    def _make_room(self) -> bool:
        """Return whether there is room for one more connection, after replacing one if necessary."""
        if len(self) < self.limit:
            return True
        self._full += 1
        self.service.metrics._count_refused("connections")
        if self._handshakes:  # they have sent nothing yet, so they go first
            task = next(iter(self._handshakes))
            del self._handshakes[task]
            task.cancel()
            return True
        replaced = next((each for each in self.open if not each._busy), None)
        if replaced is not None:
            del self.open[replaced]
            replaced.transport.abort()
        return replaced is not None

    def _log_full(self, now: float) -> None:
        """Log at most once a second that there were too many connections."""
        if self._full and now - self._logged_full_at >= _FULL_LOG_INTERVAL:
            self.service.log.event("connections_full", limit=self.limit, refused=self._full)
            self._logged_full_at, self._full = now, 0


class LimitedProtocol(HttpToolsProtocol):
    """One connection: uvicorn's protocol with limits.

    Every error is JSON, as on all other paths, and ends the connection.
    """

    def __init__(self, connections: Connections, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self.phase = Phase.IDLE
        self._all = connections
        self._bodies = connections.service.bodies
        self._limits = connections.service.settings
        self._read_deadline = self.loop.time() + self._limits.header_timeout
        self._write_deadline = math.inf
        self._received = 0
        self._header_bytes = 0
        self._header_count = 0
        self._error: tuple[int, str, str] | None = None
        self._refused = False
        self._lingering = False
        self._stopping = False
        self._unread = 0
        self._answering: Any = None
        self._held: dict[Any, int] = {}

    @property
    def _busy(self) -> bool:
        """Whether a request was received whole and is not answered yet."""
        if self.phase is Phase.HEAD:
            return self.cycle is not None and not self.cycle.response_complete
        return self.phase is Phase.ANSWER or bool(self.pipeline)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start with an open connection."""
        super().connection_made(transport)
        self._all.open[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """End with the connection, and so do all its requests: uvicorn itself knows of the latest alone."""
        for cycle, _ in self.pipeline:
            self._release(cycle)
        for cycle in (self._answering, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)
        self._all.open.pop(self, None)

    def data_received(self, data: bytes) -> None:
        """Parse data, unless the client was refused already."""
        if self._refused:
            return
        self._note_activity()
        self._received += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # no other protocol is offered: this request is the last
            self._refused = True
            self.cycle.keep_alive = False
            if self.cycle.response_complete:
                self.transport.close()
        except httptools.HttpParserError:
            self._refuse(*(self._error or _NOT_HTTP))
        else:
            self._check_size()

    def on_message_begin(self) -> None:
        """Start to count headers."""
        super().on_message_begin()
        self._header_bytes = self._header_count = 0
        self._enter(Phase.HEAD, self._limits.header_timeout)

    def on_url(self, url: bytes) -> None:
        """Count the bytes of the URL."""
        self._count_header(len(url), 414)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header. Those that follow the body are discarded: nobody has checked them."""
        self._header_count += 1
        if self._header_count > self._limits.max_headers:
            self._fail(431, f"A request must have at most {self._limits.max_headers} headers.")
        self._count_header(len(name) + len(value) + 4)
        if self.phase is Phase.HEAD:
            super().on_header(name, value)
        elif name.lower() in (b"authorization", b"cookie"):
            self._fail(400, "Authorization must be sent before the body.")

    def on_headers_complete(self) -> None:
        """Check what RFC 9110 and 9112 leave to the server, and start to read the body."""
        if not self.url.startswith(b"/") and self.url != b"*":
            self._take_host_from_url()
        fields = dict(self.headers)
        for name in (b"authorization", b"host"):
            if name in fields and [each for each, _ in self.headers].count(name) > 1:
                self._fail(400, f"The {name.decode().title()} header must be sent once.")
        version = self.parser.get_http_version()
        if version == "1.0":
            self.expect_100_continue = False
        elif version != "1.1" or b"host" not in fields:
            self._fail(400, "The request must be HTTP/1.1 with a Host header, or HTTP/1.0.")
        if _HOST.fullmatch(fields.get(b"host", b"")) is None or b"#" in self.url:
            self._fail(400, "The Host header or the path is not valid.")
        if fields.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            self._fail(400, "The only transfer encoding that is supported is chunked.")
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._fail(400, f"At most {_MAX_PIPELINED} requests may be sent before the first is answered.")
        if not self._bodies._fits(self._limits.max_bytes) and not self._bodies._fits(
            int(fields.get(b"content-length", 0))
        ):
            self._fail(503, BODIES_FULL, "body")
        super().on_headers_complete()
        self.cycle.transport = _ResponseWriter(self, self.cycle)  # type: ignore[assignment]
        self._enter(Phase.BODY, self._limits.timeout)

    def _take_host_from_url(self) -> None:
        """Replace a request target such as ``http://host/path`` by its path, and the Host header by its host."""
        found = _ABSOLUTE.fullmatch(self.url)
        if found is None or not self.headers:
            self._fail(400, "The request target must be a path or an address with http or https.")
        else:
            self.url = found[2] if found[2].startswith(b"/") else b"/" + found[2]
            self.headers[:] = [(name, found[1] if name == b"host" else value) for name, value in self.headers]

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
            async def _send_unread(message: MutableMapping[str, Any]) -> None:
                """Send the answer to a client that waits before it sends its body: it may never send it."""
                cycle.keep_alive = cycle.keep_alive and not cycle.waiting_for_100_continue
                await send(message)

            try:
                await app(scope, receive, _send_unread if cycle.waiting_for_100_continue else send)
            except asyncio.CancelledError:  # the service stops, and the answer took too long
                started, cycle.response_started = cycle.response_started, True
                if not started and not self.transport.is_closing():
                    cycle.response_complete = True
                    self._write_error(503, _STOPPED)
                    self.transport.close()
            finally:
                self._release(cycle)

        self._answering = cycle
        super()._start_asgi_task(cycle, _answer)  # type: ignore[arg-type]

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body, unless the request is answered already."""
        if not self.cycle.response_complete:
            if not self._bodies._fits(len(body)):
                self._fail(503, BODIES_FULL, "body")
            self._bodies._hold(len(body))
            self._held[self.cycle] = self._held.get(self.cycle, 0) + len(body)
        super().on_body(body)

    def _release(self, cycle: Any) -> None:
        self._bodies._release(self._held.pop(cycle, 0))

    def on_message_complete(self) -> None:
        """Wait for the response."""
        super().on_message_complete()
        self._enter(Phase.ANSWER, math.inf)
        self._start_idling()

    def on_response_complete(self) -> None:
        """Wait for the next request. Unlike uvicorn's, this sets no timer: `_end_if_late` ends idle connections."""
        self.server_state.total_requests += 1
        if self.transport.is_closing() or self._lingering:
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        self._start_idling()

    def pause_writing(self) -> None:
        """Wait for the client to read."""
        super().pause_writing()
        self._write_deadline = self.loop.time() + self._write_timeout

    def resume_writing(self) -> None:
        """Go on writing."""
        super().resume_writing()
        self._write_deadline = math.inf

    def shutdown(self) -> None:
        """Stop gracefully: a request that was received is answered, one that was not is refused."""
        self._stopping = True
        self._unread = self.transport.get_write_buffer_size()
        if self._unread:
            self._write_deadline = min(self._write_deadline, self.loop.time() + self._write_timeout)
        if not self._refuse_if_unfinished():
            super().shutdown()

    def _refuse_if_unfinished(self) -> bool:
        """Refuse a request that was not received whole when the service stops; return whether there is one."""
        unfinished = self.phase in (Phase.HEAD, Phase.BODY) and not self._busy
        if unfinished and not self._refused:
            self._refuse(503, "The service is stopping. Nothing was charged.", "stopping")
        return unfinished

    @property
    def _write_timeout(self) -> float:
        """How long a client may take to read on."""
        return _LINGER_SECONDS if self._stopping else self._limits.timeout

    def _end_if_late(self, now: float) -> None:
        """End the connection if its client took too long."""
        if self._stopping:
            self._extend_while_reading(now)
        if now >= self._write_deadline:
            self._all.service.metrics._count_refused("timeout")
            self.transport.abort()
        elif self.transport.is_closing():
            self._write_deadline = min(self._write_deadline, now + self._write_timeout)
        elif self._stopping:
            self._refuse_if_unfinished()
        elif now >= self._read_deadline and not self._busy and not self._refused:
            self._end_late_request()

    def _extend_while_reading(self, now: float) -> None:
        """Give a client that reads its response more time when the service stops, and one that does not read none."""
        unread = self.transport.get_write_buffer_size()
        if unread < self._unread or not unread:
            self._write_deadline = now + _LINGER_SECONDS if unread else math.inf
        self._unread = unread

    def _end_late_request(self) -> None:
        if self.phase is Phase.IDLE:
            self.transport.close()
        elif self.phase is Phase.HEAD:
            self._refuse(408, "The headers did not arrive in time.", "timeout")
        else:
            self._refuse(408, "The body did not arrive in time. Nothing was charged.", "timeout")

    def _enter(self, phase: Phase, seconds: float) -> None:
        self.phase = phase
        self._note_activity()
        self._read_deadline = self.loop.time() + seconds
        self._received = 0

    def _note_activity(self) -> None:
        """Make this connection the last one to be replaced."""
        if self in self._all.open:
            self._all.open.move_to_end(self)

    def _start_idling(self) -> None:
        """Wait for the next request if the last one was both received and answered."""
        if self.phase is Phase.ANSWER and self.cycle.response_complete:
            self._enter(Phase.IDLE, self._limits.idle_timeout)

    def _count_header(self, size: int, status: int = 431) -> None:
        self._header_bytes += size
        if self._header_bytes > self._limits.max_header_bytes:
            what = "headers" if status == 431 else "request target"
            self._fail(status, f"The {what} must have at most {self._limits.max_header_bytes} bytes.")

    def _check_size(self) -> None:
        """Refuse a header that does not end, and a body that is much longer than any that is read."""
        if self.phase is Phase.HEAD and self._received > self._limits.max_header_bytes:
            limit = self._limits.max_header_bytes
            self._refuse(431, f"The headers must have at most {limit} bytes.", "header")
        elif self.phase is Phase.BODY and self._received > _BODY_OVERHEAD * self._limits.max_bytes + 2**16:
            self._refuse(413, f"The body must have at most {self._limits.max_bytes} bytes.", "body")

    def _fail(self, status: int, message: str, reason: str = "header") -> None:
        """Stop the parser, from one of its callbacks."""
        self._error = status, message, reason
        raise ValueError(message)

    def _refuse(self, status: int, message: str, reason: str) -> None:
        """Answer with an error, unless another response is on its way, and end the connection."""
        self._refused = True
        self._all.service.metrics._count_refused(reason)
        address = self.client[0] if self.client else None
        self._all.service.log.event("refused", status=status, reason=reason, address=address)
        cycle = self.cycle
        if self.phase is Phase.HEAD and self._busy:  # what was received before is answered
            cycle.keep_alive = False
            return
        if self.phase is Phase.BODY:
            if cycle.response_started or self.pipeline:
                self.transport.close()
                return
            cycle.disconnected = True
            cycle.message_event.set()
        self._write_error(status, message)
        self._linger()

    def _write_error(self, status: int, message: str) -> None:
        content = orjson.dumps({"error": message})
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(content)),
            *([(b"retry-after", b"1")] if status == 503 else []),
            (b"connection", b"close"),
        ]
        lines = b"".join(b"%s: %s\r\n" % header for header in headers)
        self.transport.write(STATUS_LINE[status] + lines + b"\r\n" + content)

    def _linger(self) -> None:
        """Close once the client has had time to read the error: an unread request would reset the connection."""
        self._refused = self._lingering = True
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(_LINGER_SECONDS, self.transport.abort)
        else:
            self.transport.close()


async def _readable(listening: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(listening, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(listening)


class _ResponseWriter:
    """Writes the headers of a response together with the start of its body, in one system call instead of two."""

    def __init__(self, protocol: LimitedProtocol, cycle: Any) -> None:
        self._protocol, self._cycle = protocol, cycle
        self._transport: asyncio.Transport = cycle.transport
        self._has_body = cycle.scope["method"] != "HEAD"
        self._headers: bytes | None = None

    def write(self, data: bytes) -> None:
        if self._transport.is_closing():  # the connection was ended, and its loss is not reported yet
            return
        if self._headers is None and self._cycle.response_started and self._has_body:
            self._headers = data
        else:
            self._transport.write(self._headers + data if self._headers else data)
            self._headers = self._headers and b""

    def close(self) -> None:
        if self._headers and not self._transport.is_closing():
            self._transport.write(self._headers)
        if self._protocol._refused or self._cycle.more_body:  # the client may still be sending
            self._protocol._linger()
        else:
            self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


def _connection_limits(settings: Settings, *, grpc: bool) -> tuple[int, int]:
    """Return how many connections HTTP and gRPC may have; together they leave enough file descriptors for the rest."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limited = soft != resource.RLIM_INFINITY
    available = max(soft - _RESERVED_DESCRIPTORS, soft // 2) if limited else 2**31
    for_grpc = min(settings.max_connections, available // 4) if grpc else 0
    return min(settings.max_connections, available - for_grpc), for_grpc

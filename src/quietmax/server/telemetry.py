"""What an operator sees: the log, metrics for Prometheus and the dashboard, and traces.

The log has one JSON object per line, written by a thread of its own. Nothing waits for it: lines that nobody reads are
dropped and counted. Neither inputs nor answers nor keys are logged. So the messages of exceptions and warnings are not
logged either: they may quote an input. Their type and their place in the code are logged. Metrics name no client.

OpenTelemetry gets a trace of each inference request over OTLP. A request only notes when its phases began and ended;
the spans are made when it ends. Inputs, answers, keys, clients and request ids are never exported. OpenTelemetry is
imported only if it is used.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import sys
import threading
import time
import traceback
import uuid
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePath
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, values
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from quietmax import __version__
from quietmax.errors import InvalidInput, QuietmaxError
from quietmax.ledger.accounts import AccountState

if TYPE_CHECKING:
    from quietmax.server.deployment import Deployment

Headers = list[tuple[bytes, bytes]]
Field = str | int | float | bool | None | Sequence[str]
_FLUSH_INTERVAL = 0.25
_MAX_LINES = 10_000
_MAX_FRAMES = 12
_MAX_MESSAGE = 200
_MAX_STRING = 1000
_PLACEHOLDER = re.compile(r"%(?:\(\w*\))?[#0 +-]*(?:\d+|\*)?(?:\.(?:\d+|\*))?[hlL]?([a-zA-Z%])")
_PIPE_SIZE = 4096


class Log:
    """Writes events as JSON, one per line: requests four times a second, other events at once."""

    def __init__(self, stream: BinaryIO | None = None, max_lines: int = _MAX_LINES) -> None:
        self.dropped = 0
        self._stream = stream
        self._max_lines = max_lines
        self._process = 0
        self._starting = threading.Lock()

    def event(self, event: str, **fields: Field) -> None:
        """Write an event; never wait for the stream."""
        if self._process != os.getpid():
            self._start()
        if len(self._lines) >= self._max_lines:
            self.dropped += 1
        else:
            self._lines.append((time.time(), event, fields))
            if not self._waiting.is_set():
                self._waiting.set()
        if event != "request":
            self._urgent.set()

    def failure(self, error: BaseException, **fields: Field) -> None:
        """Write that something failed: the type of the error and where it was raised, but not its message."""
        self.event("failed", kind=type(error).__name__, frames=_frames(error.__traceback__), **fields)

    def flush(self, timeout: float = 1.0) -> bool:
        """Write all lines that wait; return whether that was done in time."""
        self._start()
        written = threading.Event()
        self._lines.append(written)
        self._urgent.set()
        self._waiting.set()
        return written.wait(timeout)

    def _start(self) -> None:
        """Start the thread that writes; a fork starts its own."""
        with self._starting:
            if self._process == os.getpid():
                return
            self._lines: deque[tuple[float, str, Mapping[str, Field]] | threading.Event] = deque()
            self._waiting, self._urgent = threading.Event(), threading.Event()
            self._process = os.getpid()
            threading.Thread(target=self._write_forever, name="log", daemon=True).start()

    def _write_forever(self) -> None:
        reported = 0
        while True:
            self._waiting.wait()
            self._urgent.wait(_FLUSH_INTERVAL)
            self._waiting.clear()
            self._urgent.clear()
            dropped = self.dropped
            if dropped > reported:
                self._write([_line(time.time(), "dropped", {"lines": dropped - reported})])
                reported = dropped
            lines: list[bytes] = []
            while self._lines:
                entry = self._lines.popleft()
                if isinstance(entry, threading.Event):
                    self._write(lines)
                    lines = []
                    entry.set()
                else:
                    lines.append(_line(*entry))
            self._write(lines)

    def _write(self, lines: list[bytes]) -> None:
        """Write lines in pieces of a size that a pipe takes at once, so that those of processes do not mix."""
        piece = b""
        for line in [*lines, b""]:
            if piece and (not line or len(piece) + len(line) > _PIPE_SIZE):
                self._write_piece(piece)
                piece = b""
            piece += line

    def _write_piece(self, piece: bytes) -> None:
        try:
            if self._stream is None:
                _write_to_stderr(piece)
            else:
                self._stream.write(piece)
                self._stream.flush()
        except (OSError, ValueError):  # closed, or a full disk
            self.dropped += piece.count(b"\n")


def _write_to_stderr(piece: bytes) -> None:
    """Write to the descriptor itself: a fork could inherit a locked `sys.stderr`."""
    while piece:
        try:
            piece = piece[os.write(2, piece) :]
        except BlockingIOError:
            time.sleep(_FLUSH_INTERVAL)


def _line(moment: float, event: str, fields: Mapping[str, Field]) -> bytes:
    short = {name: value[:_MAX_STRING] if isinstance(value, str) else value for name, value in fields.items()}
    entry = {"time": round(moment, 3), "event": event, **short}
    try:
        return orjson.dumps(entry) + b"\n"
    except TypeError:  # a string that is not valid Unicode
        return json.dumps(entry, default=str).encode() + b"\n"


def _frames(trace: TracebackType | None) -> list[str]:
    """Return where an error was raised, the innermost place last: file, line and function, without source or values."""
    frames = traceback.extract_tb(trace)[-_MAX_FRAMES:]
    return [f"{_short_path(frame.filename)}:{frame.lineno} {frame.name}"[-_MAX_MESSAGE:] for frame in frames]


def _short_path(path: str) -> str:
    return "/".join(PurePath(path).parts[-2:])


@contextmanager
def _libraries_logged(log: Log) -> Iterator[None]:
    """Write to the log what Python and the libraries would write to standard error."""

    def _unhandled(failed: Any) -> None:
        if failed.exc_value is not None:
            log.failure(failed.exc_value)

    def _warn(_message: Any, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any) -> None:
        place = f"{_short_path(filename)}:{lineno}"
        log.event("library", source=category.__name__, message=f"A warning at {place}.")

    handler = _Handler(log)
    root = logging.getLogger()
    before = sys.excepthook, threading.excepthook, sys.unraisablehook
    sys.excepthook = lambda _, error, __: log.failure(error)
    threading.excepthook = sys.unraisablehook = _unhandled
    root.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn  # type: ignore[assignment]
            yield
    finally:
        root.removeHandler(handler)
        sys.excepthook, threading.excepthook, sys.unraisablehook = before


class _Handler(logging.Handler):
    """Writes the records of the module `logging`: the message, or the error."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        source = f"{record.name} {record.levelname.lower()}"
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            self._log.failure(error, source=source)
        else:
            message = _message(record).partition("\n")[0][:_MAX_MESSAGE]
            self._log.event("library", source=source, message=message)


def _message(record: logging.LogRecord) -> str:
    """Return the message of a record. An ellipsis stands for each value of another library: it may be an input."""
    if record.name.startswith("quietmax."):
        return record.getMessage()
    if record.name == "asyncio":  # it writes the arguments of callbacks into its messages
        return ""
    text = str(record.msg)
    return _PLACEHOLDER.sub(lambda found: "%" if found[1] == "%" else "…", text) if record.args else text


@dataclass(slots=True)
class Record:
    """What the log, the metrics and a trace tell about a request."""

    client: str | None = None  # Who sent it, once that is known
    deployment: Deployment | None = None  # The model that is asked, once it is found
    rows: int = 0  # Number of rows, once they are decoded
    status: int = 500  # HTTP status of the response, also for requests over gRPC
    headers: Headers = field(default_factory=list)  # Those of an authenticated caller, who may name a trace
    address: str | None = None  # The address that the request came from: that of the proxy, if there is one
    request: str = ""  # Id of the request, for the log and the header `x-request-id`
    route: str | None = None  # The path as the OpenAPI document has it; None if there is no such path
    event: str = "request"  # Name of the event in the log
    error: str | None = None  # What only the log tells about an error
    logged: bool = False  # Whether it is in the log

    @property
    def model(self) -> tuple[str, str]:
        """Name and version of the model; empty if none was found."""
        return ("", "") if self.deployment is None else (self.deployment.name, self.deployment.version)

    def _write(self, log: Log, seconds: float) -> None:
        self.logged = True
        model, version = self.model
        error = {} if self.error is None else {"error": self.error}
        log.event(
            self.event,
            request=self.request,
            address=self.address,
            route=self.route,
            model=model,
            version=version,
            client=self.client,
            rows=self.rows,
            status=self.status,
            milliseconds=round(seconds * 1000, 2),
            **error,
        )


CONTENT_TYPE = CONTENT_TYPE_LATEST
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_NOT_COUNTED = SimpleNamespace(inc=lambda *_: None, observe=lambda *_: None)
"""Stands for a metric that cannot be written."""


class Metrics:
    """Counters of a service."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self._registry), partial(Gauge, registry=self._registry)
        self._requests = counter("quietmax_requests", "Inference requests.", ["model", "version", "status"])
        self._answers = counter(
            "quietmax_answers",
            "Rows answered, with a new or a cached answer.",
            ["model", "version", "origin"],
        )
        self._seconds = Histogram(
            "quietmax_request_seconds",
            "Duration of answered inference requests.",
            ["model", "version"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._spent = gauge(
            "quietmax_budget_spent_fraction",
            "Fraction of the budget that is spent.",
            ["account"],
            multiprocess_mode="mostrecent",
        )
        self._ledger_up = gauge(
            "quietmax_ledger_up", "Whether the ledger is available.", multiprocess_mode="mostrecent"
        )
        self.connections = gauge("quietmax_connections", "Open connections.", multiprocess_mode="livesum")
        self.dropped_lines = gauge(
            "quietmax_log_lines_dropped",
            "Lines of the log that were dropped because nobody read them.",
            multiprocess_mode="sum",
        )
        self._refused = counter(
            "quietmax_refused_connections",
            "Connections that were ended because of a limit or an invalid request.",
            ["reason"],
        )
        self._children: dict[tuple[Any, ...], Any] = {}

    @classmethod
    def _of_worker(cls, folder: Path, number: int) -> Metrics:
        """Return the metrics of one worker, which are shown together with those of all others.

        A worker that is started again goes on with the counters of the one that died. Call this at most once in a
        process, before it creates other metrics.
        """
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
        values.ValueClass = values.MultiProcessValue(lambda: number)  # type: ignore[no-untyped-call]
        mark_process_dead(number, str(folder))  # type: ignore[no-untyped-call]
        metrics = cls()
        metrics._folder = folder
        return metrics

    def _count_request(self, model: str, version: str, status: int, seconds: float) -> None:
        self._child(self._requests, model, version, status).inc()
        if status == 200:
            self._child(self._seconds, model, version).observe(seconds)

    def _child(self, metric: Any, *labels: str | int) -> Any:
        """Return the metric with these labels. `labels` itself takes a lock and makes strings, for every request."""
        key = (metric, *labels)
        if key not in self._children:
            try:
                self._children[key] = metric.labels(*labels)
            except OSError:  # somebody has removed the folder: no reason to fail a request
                return _NOT_COUNTED
        return self._children[key]

    def _count_answers(self, model: str, version: str, new: int, cached: int) -> None:
        if new:
            self._child(self._answers, model, version, "new").inc(new)
        if cached:
            self._child(self._answers, model, version, "cached").inc(cached)

    def _count_refused(self, reason: str) -> None:
        self._child(self._refused, reason).inc()

    def _latency(self, label: str) -> dict[str, float] | None:
        """Return median and 99th percentile of the durations of requests in seconds, of all workers; None: no requests.

        They are interpolated within the buckets of the histogram, as Prometheus does.
        """
        model, version = label.split("/")
        wanted = {"model": model, "version": version}
        below = [(0.0, 0.0)]
        for metric in self._of_all_workers().collect():
            for sample in metric.samples if metric.name == "quietmax_request_seconds" else ():
                bound = sample.labels.get("le")
                if bound is not None and wanted.items() <= sample.labels.items():
                    below.append((min(float(bound), _BUCKETS[-1]), sample.value))
        bounds, counts = zip(*sorted(below), strict=True)
        if not counts[-1]:
            return None
        median, p99 = np.interp([0.5 * counts[-1], 0.99 * counts[-1]], counts, bounds)
        return {"median": float(median), "p99": float(p99)}

    def _of_all_workers(self) -> CollectorRegistry:
        if self._folder is None or not self._folder.is_dir():
            return self._registry
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(self._folder))  # type: ignore[no-untyped-call]
        return registry

    def _exposition(self, accounts: list[AccountState] | None) -> bytes:
        self._ledger_up.set(0 if accounts is None else 1)
        for account in accounts or []:
            self._spent.labels(account.name).set(_spent_fraction(account))
        return generate_latest(self._of_all_workers())


def _spent_fraction(account: AccountState) -> float:
    return account.spent_units / account.limit_units if account.limit_units else 1.0


_CLOSE_SECONDS = 3.0
_PROTOCOL = "http/protobuf"


class Trace:
    """When the phases of one request began and ended, in nanoseconds since 1970. Any thread may add one."""

    __slots__ = ("phases", "started", "token")

    def __init__(self) -> None:
        self.started = time.time_ns()
        self.phases: list[tuple[str, int, int, str | None]] = []
        self.token: Token[Trace | None] | None = None

    def _add(self, name: str, started: int, ended: int, parent: str | None = None) -> None:
        self.phases.append((name, started, ended, parent))


_current: ContextVar[Trace | None] = ContextVar("quietmax_trace", default=None)


def _current_trace() -> Trace | None:
    """Return the trace of the request that is handled; None if there is no telemetry."""
    return _current.get()


@contextmanager
def _phase(name: str) -> Iterator[None]:
    """Add a phase to the trace of the request that is handled, if there is one."""
    trace = _current.get()
    if trace is None:
        yield
        return
    started = time.time_ns()
    try:
        yield
    finally:
        trace._add(name, started, time.time_ns())


def check_telemetry() -> None:
    """Raise if telemetry cannot be exported: a package is missing, or a variable has an unsupported value."""
    for package in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise QuietmaxError(
                f"Telemetry requires the package {package.replace('.', '-')}. Install: pip install 'quietmax[otel]'."
            )
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", _PROTOCOL)
    if protocol != _PROTOCOL:
        raise InvalidInput(f"OTEL_EXPORTER_OTLP_PROTOCOL must be {_PROTOCOL}, got {protocol!r}.")


class Telemetry:
    """Exports traces of one server process, as the variables OTEL_* say."""

    def __init__(self) -> None:
        check_telemetry()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        own = {"service.instance.id": str(uuid.uuid4()), "service.version": __version__}
        if "OTEL_SERVICE_NAME" not in os.environ:
            own["service.name"] = "quietmax"
        self._tracers = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)
        self._tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._tracers.get_tracer("quietmax", __version__)

    def _begin(self) -> Trace:
        """Begin the trace of a request, in the task that handles it."""
        trace = Trace()
        trace.token = _current.set(trace)
        return trace

    def _end(self, trace: Trace, record: Record) -> None:
        """End the trace of a request: make its spans."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if trace.token is not None:
            _current.reset(trace.token)
        ended = time.time_ns()
        model, version = record.model
        labels: dict[str, str | int] = {
            "quietmax.model": model,
            "quietmax.version": version,
            "quietmax.rows": record.rows,
            "http.response.status_code": record.status,
        }
        named = dict(record.headers).get(b"traceparent", b"").decode("latin-1")
        parent = TraceContextTextMapPropagator().extract({"traceparent": named}) if named else None
        span = self._tracer.start_span("infer", parent, SpanKind.SERVER, labels, start_time=trace.started)
        if record.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        contexts: dict[str | None, Context] = {None: set_span_in_context(span)}
        for name, started, phase_ended, inside in list(trace.phases):
            child = self._tracer.start_span(name, contexts.get(inside, contexts[None]), start_time=started)
            child.end(phase_ended)
            contexts[name] = set_span_in_context(child)
        span.end(ended)

    def _close(self) -> None:
        """Export what waits, for a few seconds at most, and stop."""
        thread = threading.Thread(target=self._tracers.shutdown, daemon=True)
        thread.start()
        thread.join(_CLOSE_SECONDS)

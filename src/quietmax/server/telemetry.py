"""What an operator sees: the log, and metrics for Prometheus.

The log has one JSON object per line, written by a thread of its own. Nothing waits for it: lines that nobody reads are
dropped and counted. Neither inputs nor answers nor keys are logged. So the messages of exceptions and warnings are not
logged either: they may quote an input. Their type and their place in the code are logged. Metrics name no client.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, values
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

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
    """What the log and the metrics tell about a request."""

    client: str | None = None  # Who sent it, once that is known
    deployment: Deployment | None = None  # The model that is asked, once it is found
    rows: int = 0  # Number of rows, once they are decoded
    status: int = 500  # HTTP status of the response, also for requests over gRPC
    address: str | None = None  # The address that the request came from: that of the proxy, if there is one
    request: str = ""  # Id of the request, for the log and the header `x-request-id`
    route: str | None = None  # The pattern of the path; None if there is no such path
    error: str | None = None  # What only the log tells about an error

    @property
    def model(self) -> tuple[str, str]:
        """Name and version of the model; empty if none was found."""
        return ("", "") if self.deployment is None else (self.deployment.name, self.deployment.version)

    def _write(self, log: Log, seconds: float) -> None:
        model, version = self.model
        log.event(
            "request",
            request=self.request,
            address=self.address,
            route=self.route,
            model=model,
            version=version,
            client=self.client,
            rows=self.rows,
            status=self.status,
            milliseconds=round(seconds * 1000, 2),
            **({} if self.error is None else {"error": self.error}),
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

    def _exposition(self, accounts: list[AccountState] | None) -> bytes:
        """Return the metrics of all workers as text; accounts of None: the ledger is not available."""
        self._ledger_up.set(0 if accounts is None else 1)
        for account in accounts or []:
            self._spent.labels(account.name).set(_spent_fraction(account))
        registry = self._registry
        if self._folder is not None and self._folder.is_dir():
            registry = CollectorRegistry()
            MultiProcessCollector(registry, str(self._folder))  # type: ignore[no-untyped-call]
        return generate_latest(registry)


def _spent_fraction(account: AccountState) -> float:
    return account.spent_units / account.limit_units if account.limit_units else 1.0

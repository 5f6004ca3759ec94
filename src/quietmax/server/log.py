"""The log: one JSON object per line, written by a thread of its own.

Nothing waits for the log. If its lines are not read, as in a pipe that nobody drains, they are dropped and counted.

Neither inputs nor answers nor keys are logged. So the messages of exceptions and warnings are not logged either: they
may quote an input. Their type and their place in the code are logged.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from types import TracebackType
from typing import Any, BinaryIO

import orjson

Field = str | int | float | bool | None | Sequence[str]
_FLUSH_INTERVAL = 0.25
_MAX_LINES = 10_000
_MAX_FRAMES = 12
_MAX_MESSAGE = 200
_MAX_STRING = 1000
_PLACEHOLDER = re.compile(r"%(?:\(\w*\))?[#0 +-]*(?:\d+|\*)?(?:\.(?:\d+|\*))?[hlL]?([a-zA-Z%])")
_PIPE_SIZE = 4096
"""POSIX writes up to this many bytes to a pipe at once, so that lines of several processes do not mix."""


class Log:
    """Writes events as JSON, one per line.

    Requests are written four times a second, other events at once. No method waits for the stream, except `flush`.
    """

    def __init__(self, stream: BinaryIO | None = None, max_lines: int = _MAX_LINES) -> None:
        self.dropped = 0
        self._stream = stream
        self._max_lines = max_lines
        self._process = 0
        self._starting = threading.Lock()

    def event(self, event: str, **fields: Field) -> None:
        """Write an event as soon as possible."""
        self._append(event, fields)
        self._urgent.set()

    def request(self, **fields: Field) -> None:
        """Write a request with the next flush."""
        self._append("request", fields)

    def failure(self, error: BaseException, **fields: Field) -> None:
        """Write that something failed: the type of the error and where it was raised, but not its message."""
        self.event("failed", kind=type(error).__name__, frames=_frames(error.__traceback__), **fields)

    def flush(self, timeout: float = 1.0) -> bool:
        """Write all lines that wait."""
        self._start()
        written = threading.Event()
        self._lines.append(written)
        self._urgent.set()
        self._waiting.set()
        return written.wait(timeout)

    def _append(self, event: str, fields: Mapping[str, Field]) -> None:
        if self._process != os.getpid():
            self._start()
        if len(self._lines) >= self._max_lines:
            self.dropped += 1
            return
        self._lines.append((time.time(), event, fields))
        if not self._waiting.is_set():
            self._waiting.set()

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
        """Write lines, each in one piece."""
        for piece in _pieces(lines):
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


def _pieces(lines: list[bytes]) -> Iterator[bytes]:
    """Join lines to pieces that are written at once."""
    piece = b""
    for line in lines:
        if piece and len(piece) + len(line) > _PIPE_SIZE:
            yield piece
            piece = b""
        piece += line
    if piece:
        yield piece


def _line(moment: float, event: str, fields: Mapping[str, Field]) -> bytes:
    """Return an event as one line."""
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
def libraries_logged(log: Log) -> Iterator[None]:
    """Write to the log what Python and the libraries would write to standard error."""
    handler = _Handler(log)
    root = logging.getLogger()
    before = sys.excepthook, threading.excepthook, sys.unraisablehook
    sys.excepthook = lambda _, error, __: log.failure(error)
    threading.excepthook = sys.unraisablehook = _hook(log)
    root.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warning_hook(log)
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


def _hook(log: Log) -> Callable[[Any], None]:
    """Return a hook for errors that nothing handles: in a thread, or where none can be raised."""

    def write(failed: Any) -> None:
        if failed.exc_value is not None:
            log.failure(failed.exc_value)

    return write


def _warning_hook(log: Log) -> Callable[..., None]:
    """Return a replacement of `warnings.showwarning`."""

    def write(_message: Any, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any) -> None:
        place = f"{_short_path(filename)}:{lineno}"
        log.event("library", source=category.__name__, message=f"A warning at {place}.")

    return write

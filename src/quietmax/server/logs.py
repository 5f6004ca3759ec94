"""Logs: one JSON object per line on stderr. No inputs, outputs, request ids or keys are ever given to it."""

from __future__ import annotations

import sys
import threading
import time
from typing import BinaryIO

import orjson

_EVERY_SECONDS = 0.25


class Log:
    """Writes lines; they are flushed four times a second, and at once if they are no mere requests."""

    def __init__(self, stream: BinaryIO | None = None) -> None:
        self._stream = sys.stderr.buffer if stream is None else stream
        self._lock = threading.Lock()
        self._waiting: list[bytes] = []
        self._flushed = 0.0

    def event(self, event: str, **fields: str | int | float | bool | None) -> None:
        """Write an event at once."""
        self._append(event, fields)
        self.flush()

    def request(self, **fields: str | int | float | None) -> None:
        """Write a request with the next flush."""
        self._append("request", fields)
        if time.monotonic() - self._flushed > _EVERY_SECONDS:
            self.flush()

    def _append(self, event: str, fields: dict[str, str | int | float | bool | None]) -> None:
        self._waiting.append(orjson.dumps({"time": round(time.time(), 3), "event": event, **fields}))

    def flush(self) -> None:
        """Write what waits."""
        with self._lock:
            lines, self._waiting = self._waiting, []
            self._flushed = time.monotonic()
            if lines:
                try:
                    self._stream.write(b"\n".join(lines) + b"\n")
                    self._stream.flush()
                except (OSError, ValueError):
                    return
